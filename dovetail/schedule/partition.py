"""Partition: cuts the integer graph into regions, what each engine takes as a whole and what the core computes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dovetail import kernels
from dovetail.errors import ModelError, TargetError
from dovetail.ir.crop import moves_nothing
from dovetail.ir.graph import Graph, Node
from dovetail.ir.layout import Layout, packing_fits, physical_shape
from dovetail.ir.operators.movement import Pad, Slice
from dovetail.ir.types import Box, DType, full_box
from dovetail.target.description import Target
from dovetail.target.engine import Engine
from dovetail.target.offload import Offload
from dovetail.target.pattern import Choice, Match, Mismatch, Scope, match_pattern
from dovetail.user_file import asking


@dataclass(frozen=True)
class Share:
    """Part of a region's result, computed by one of several engines."""

    engine: Engine
    offload: Offload
    box: Box


@dataclass(frozen=True)
class Slot:
    """When a region is thought to be computed, in cycles since the start of the network."""

    issue: int
    """When the core starts it."""
    begin: int
    """When it begins: engines have queues."""
    end: int
    fetch: int = 0
    """When its constants are fetched, if that is done early."""
    issued: int = 0
    """When the core has started all of it."""


@dataclass(frozen=True)
class Region:
    """Nodes computed together, by one engine or by the core."""

    name: str
    """Short, unique, a C identifier."""
    graph: Graph
    """The nodes as a graph of their own: runtime operands are its inputs, the one result its output."""
    match: Match | None
    """How the offload's pattern lies in `graph`; None on the core."""
    engine: Engine | None
    offload: Offload | None
    reason: str
    """On the core: the one sentence that says why no engine took it; empty where an engine did or none could."""
    origins: tuple[str, ...]
    """The operators of the user's model computed here."""
    mover: str = ""
    """Who copies where the region only moves elements: the DMA's name, or "core" without one; empty otherwise."""
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    """The layout it takes each operand in, and gives its result in, by value name; row-major where absent. Set by the
    layout stage."""
    converted: frozenset[str] = frozenset()
    """Values that lie otherwise than it takes or gives them: its DMA converts them on the way. Set by the layout
    stage."""
    choice: Choice = field(default_factory=dict)
    """Settings of the planner's knobs and the offload's (schedule/knobs.py); the rest the planner chooses."""

    still: bool = False
    """True where the core has nothing to do: the result lies in the operand, or the operands lie in the result."""
    shares: tuple[Share, ...] = ()
    """Who computes which part where several engines compute it together, the first of them being `engine`; empty where
    one does it all. (Set by the place stage, as `slot` is.)"""
    slot: Slot | None = None
    """When it is scheduled; None where regions are computed one after the other."""
    held: bool = False
    """Whether it is computed beside the next region of its engine, which starts both. (Set by the joint stage.)"""
    box: Box | None = None
    """The part of the result that is computed, in one of `parts`; None for all of it."""
    core: int | None = None
    """Number of the one core the user pinned it to; None for as many as make it fastest."""

    @property
    def place(self) -> str:
        """Who does the region: an engine, several joined by "+", the DMA or "core"."""
        if self.shares:
            return "+".join(share.engine.name for share in self.shares)
        return self.engine.name if self.engine else self.mover or "core"

    @property
    def parts(self) -> tuple[Region, ...]:
        """The region as each engine sees it: itself, or one for each share, numbered."""
        return tuple(self._part(number, share) for number, share in enumerate(self.shares)) or (self,)

    def _part(self, number: int, share: Share) -> Region:
        match = match_pattern(share.offload.pattern, self.graph, self.output)
        assert isinstance(match, Match), "shares are only given to engines that take the region"
        name, engine, offload = f"{self.name}_part_{number}", share.engine, share.offload
        return replace(self, name=name, match=match, engine=engine, offload=offload, shares=(), box=share.box)

    @property
    def extent(self) -> Box:
        """The box of the result that is computed."""
        return self.box or full_box(self.graph.types[self.output].shape)

    @property
    def output(self) -> str:
        """Name of the value computed."""
        return self.graph.outputs[0]

    @property
    def macs(self) -> int:
        """Multiply-accumulates, padded taps counted."""
        types = self.graph.types
        return sum(node.operator.macs([types[name] for name in node.inputs]) for node in self.graph.nodes)

    @property
    def takes_strides(self) -> bool:
        """True when its operands and its result may be parts of other values: an engine's, as a rule."""
        shared = all(share.offload.strided for share in self.shares)
        return self.offload is not None and self.offload.strided and shared

    @property
    def is_view(self) -> bool:
        """True when the result is its operand under another shape: nothing is computed."""
        return all(node.operator.is_view for node in self.graph.nodes)


def beside(regions: Sequence[Region]) -> dict[str, tuple[str, ...]]:
    """The names of the regions each region is computed side by side with, by its own; none for those alone."""
    found: dict[str, tuple[str, ...]] = {}
    together: list[str] = []
    for region in (region for region in regions if region.engine is not None):
        together.append(region.name)
        if not region.held:
            found |= {name: tuple(one for one in together if one != name) for name in together if len(together) > 1}
            together = []
    return found


@dataclass
class PartitionCache:
    """What was asked of one graph, whoever computes the rest of it."""

    offloads: dict[tuple[str, int], Match | Mismatch] = field(default_factory=dict)
    """By the node's result and the offload, which is the same object in every variant of a target."""
    kernels: dict[frozenset[str], str | None] = field(default_factory=dict)
    """Some nodes by their results -> why they are no kernel of the core, None where they are one."""


def partition(
    graph: Graph, target: Target, declined: Mapping[str, str] | None = None, tried: PartitionCache | None = None
) -> tuple[Region, ...]:
    """Regions in an order that computes every value before it is read.

    Args:
        graph: the whole network.
        target: the machine.
        declined: values that no engine is to compute, each with the reason.
        tried: what is known of the same graph from variants of the target; what is found is added.

    Raises:
        ModelError: an operator that neither an engine nor the core can compute.
    """
    tried = tried or PartitionCache()
    found = _Partition(graph, target, declined=declined, tried=tried).regions()
    offered = target.dma is not None and any(engine.offloads for engine in target.engines)
    if not offered or any(region.engine is not None for region in found):
        return found
    # nothing for the engines: as a core alone, whose kernels pad by themselves, so that it is no slower than one
    return _Partition(graph, target, padding=True, declined=declined, tried=tried).regions()


def as_kernels(graph: Graph, target: Target) -> tuple[Region, ...]:
    """A graph as the kernels and views of a core alone, in turn; no value lies in another.

    Raises:
        ModelError: an operator that the core cannot compute.
    """
    return _Partition(graph, replace(target, engines=(), dma=None), padding=True, apart=True).regions()


def explain_mismatch(graph: Graph, target: Target, node: Node) -> str:
    """Why no engine takes the computation that ends in `node`: the sentence of the pattern that came closest."""
    return _Partition(graph, target).mismatch(node)


def rivals(graph: Graph, target: Target, region: Region) -> tuple[str, ...]:
    """Why the engine's other offloads that could compute what a region's offload begins with did not, a sentence each.

    Args:
        graph: the whole network.
        target: the machine.
        region: one of its regions; none on the core.
    """
    if region.offload is None or region.engine is None:
        return ()
    chosen = f"{region.engine.name} {region.offload.name}"
    how = "preferred" if region.offload.prefer else "declared first"
    return tuple(
        f"{engine.name} {offload.name} takes it too; {chosen} is {how}"
        for engine, offload, found in _Partition(graph, target).attempts(graph.producers()[region.output])
        if isinstance(found, Match) and not offload.lossy
        if engine.name == region.engine.name and offload.name != region.offload.name
    )


class _Partition:
    """A network while it is cut; every offload is tried once on what ends in a node."""

    def __init__(
        self,
        graph: Graph,
        target: Target,
        padding: bool = False,
        declined: Mapping[str, str] | None = None,
        apart: bool = False,
        tried: PartitionCache | None = None,
    ) -> None:
        """`padding`: whether the core's kernels pad, as those of a core alone do, although a DMA could; `declined`: as
        `partition`, as `tried`; `apart`: whether no value lies in another."""
        self._known = tried or PartitionCache()
        self._apart = apart
        self._graph, self._target, self._padding = graph, target, padding or not target.dmas
        self._producers, self._users = graph.producers(), graph.users()
        self._places = {node.output: place for place, node in enumerate(graph.nodes)}
        self._declined = declined or {}
        self._tried: dict[str, list[tuple[Engine, Offload, Match | Mismatch]]] = {}
        self._claimed: dict[str, Region] = {}

    def regions(self) -> tuple[Region, ...]:
        """All of them, each named after its main operator and its place in the network."""
        graph = self._graph
        for node in reversed(graph.nodes):
            if node.output not in self._claimed:
                region = self._on_engine(node) or self._on_core(node)
                self._claimed.update((member.output, region) for member in region.graph.nodes)
        claimed = ((node, self._claimed[node.output]) for node in graph.nodes)
        ordered = [region for node, region in claimed if region.output == node.output]
        return tuple(named(region, f"{_kind(region)}_{index}") for index, region in enumerate(ordered))

    def attempts(self, node: Node) -> list[tuple[Engine, Offload, Match | Mismatch]]:
        """Every offload of every engine tried on what ends in `node`, the match in a graph of its own nodes only."""
        if node.output not in self._tried:
            engines = () if node.output in self._declined else self._target.engines
            offloads = [(engine, offload) for engine in engines for offload in engine.offloads]
            self._tried[node.output] = [(*pair, self._asked(pair[1], node)) for pair in offloads]
        return self._tried[node.output]

    def _asked(self, offload: Offload, node: Node) -> Match | Mismatch:
        place = node.output, id(offload)
        if place not in self._known.offloads:
            self._known.offloads[place] = self._attempt(offload, node)
        return self._known.offloads[place]

    def _refusal(self, members: Mapping[str, Node]) -> str | None:
        """Why the core has no kernel for some nodes; None where it has one."""
        place = frozenset(members)
        if place not in self._known.kernels:
            self._known.kernels[place] = kernels.supports(self._subgraph(members))
        return self._known.kernels[place]

    def mismatch(self, node: Node) -> str:
        if node.output in self._declined:
            return self._declined[node.output]
        best = Mismatch("", 0)
        for engine, offload, found in self.attempts(node):
            if isinstance(found, Match):
                return ""
            if found.depth > best.depth:
                best = Mismatch(f"{engine.name} {offload.name}: {found.sentence}", found.depth)
        left = self._graph.left.get(node.output)
        if left is not None and best.depth <= len(self._graph.nodes):  # no pattern is there for a limit to be asked of
            return left
        if best.depth or not self._target.engines:
            return best.sentence
        return f"no engine has a pattern that ends in {type(node.operator).__name__}"

    def _attempt(self, offload: Offload, node: Node) -> Match | Mismatch:
        """A broken constraint comes nearer than any pattern."""
        found = match_pattern(offload.pattern, self._graph, node.output)
        if isinstance(found, Mismatch):
            return found
        members = {member.output: member for member in found.nodes.values()}
        own = match_pattern(offload.pattern, self._subgraph(members), found.root)
        if isinstance(own, Mismatch):
            raise ValueError(f"{offload.name} no longer matches by itself: {own.sentence}")
        asked = (constraint for constraint in offload.constraints if constraint.scope is not Scope.TILES)
        with asking(f"the limits of {offload.name} for {node.origin or node.output}"):
            sentence = next((failure for constraint in asked if (failure := constraint.failure(own))), None)
        return own if sentence is None else Mismatch(sentence, len(self._graph.nodes) + len(own.nodes))

    def _taken(self, node: Node) -> bool:
        return any(isinstance(found, Match) for _, _, found in self.attempts(node))

    def _on_engine(self, node: Node) -> Region | None:
        """The offload's that takes most of what ends in a node, and nothing another region has; of several that take as
        much the first. One that is to be preferred comes before others."""
        tried = self.attempts(node)
        matches = [(engine, offload, found) for engine, offload, found in tried if isinstance(found, Match)]
        for engine, offload, found in sorted(matches, key=lambda one: (not one[1].prefer, -len(one[2].nodes))):
            if all(one.output not in self._claimed for one in found.nodes.values()):
                return Region("", found.graph, found, engine, offload, "", _origins(found.graph))
        return None

    def _on_core(self, node: Node) -> Region:
        """A region of the core, grown from its last node upwards as far as one kernel reaches; or a copy."""
        still, copied = self._still(node), self._copied(node)
        members = {node.output: node}
        if not still and not copied:
            members = self._narrow(node, self._grown(node))
        inner = self._subgraph(members)
        is_view = all(member.operator.is_view for member in inner.nodes)
        refusal = None if is_view else self._refusal(members)
        if refusal:
            raise ModelError(refusal, where=node.origin or node.output, hint="this operator has no core kernel yet")
        mover = self._target.mover if copied and not still else ""
        reason = "" if still or copied else self.mismatch(node)
        return Region("", inner, None, None, None, reason, _origins(inner), mover, still=still)

    def _grown(self, node: Node) -> dict[str, Node]:
        """A region grown upwards from its last node as long as it still is one kernel."""
        members, frontier = {node.output: node}, list(node.inputs)
        while frontier:
            value = frontier.pop(0)
            producer = self._producers.get(value)
            if producer is None or value in self._claimed or value in self._graph.outputs or value in members:
                continue
            if self._copied(producer) and not (self._padding and isinstance(producer.operator, Pad)):
                continue
            if self._still(producer) or any(user.output not in members for user in self._users[value]):
                continue
            if not self._taken(producer) and not self._refusal({**members, value: producer}):
                members[value] = producer
                frontier.extend(producer.inputs)
        return members

    def _narrow(self, root: Node, members: dict[str, Node]) -> dict[str, Node]:
        """Give back nodes at the top of a core region while it would read wide sums another core region must then
        store, unless what is left reads as many. Floats are as wide before a node as after it."""
        best, least = dict(members), len(self._wide(members))
        while wide := [reader for reader in self._wide(members) if reader is not root]:
            del members[wide[0].output]
            members = self._own(root, members)
            if (count := len(self._wide(members))) < least:
                best, least = dict(members), count
        return best

    def _own(self, root: Node, members: Mapping[str, Node]) -> dict[str, Node]:
        """The members that a root is computed from by way of members, and that nobody else reads."""
        found = _reached(root, members)
        while True:
            read = {value: self._users[value] for value in found if value != root.output}
            stray = next((value for value, users in read.items() if any(u.output not in found for u in users)), None)
            if stray is None:
                return found
            del found[stray]
            found = _reached(root, found)

    def _wide(self, members: Mapping[str, Node]) -> list[Node]:
        """The reader of each wide sum that some nodes read and another region of the core computes."""
        types = self._graph.types
        return [
            member
            for member in members.values()
            for value in member.inputs
            if value in self._producers and value not in members
            if types[value].dtype.bits > max(types[member.output].dtype.bits // 2, 16)
            if types[value].dtype is not DType.FLOAT32 and not self._taken(self._producers[value])
        ]

    def _copied(self, node: Node) -> bool:
        """True for what becomes copies: of a DMA, or of the core, which gives values the strides an engine takes. A
        core alone computes movement in its kernels."""
        kinds, constants = [self._graph.types[name] for name in node.inputs], self._graph.constants
        if node.operator.is_view or any(name in constants for name in node.inputs):
            return False
        return bool(self._target.dma or self._target.engines) and node.operator.pieces(kinds) is not None

    def _still(self, node: Node) -> bool:
        """True for a slice or concatenation of whole rows that a core alone need not do, and for a slice that only
        copies and engines which take strides read, where values have one layout."""
        if self._apart:
            return False
        if not (self._target.dma or self._target.engines):
            return moves_nothing(self._graph, node)
        if not isinstance(node.operator, Slice) or set(node.operator.step) != {1} or node.output in self._graph.outputs:
            return False
        if len(self._graph.types[node.output].shape) == 1 and moves_nothing(self._graph, node):
            return True  # one of several results of a launch: whoever reads it finds it dense
        plain = not any(offload.layouts for engine in self._target.engines for offload in engine.offloads)
        readers = [self._claimed[user.output] for user in self._users[node.output]]
        return (
            plain and node.inputs[0] not in self._graph.constants and all(r.takes_strides or r.mover for r in readers)
        )

    def _subgraph(self, members: Mapping[str, Node]) -> Graph:
        """Some nodes as a graph of their own."""
        graph = self._graph
        nodes = tuple(self._producers[value] for value in sorted(members, key=self._places.__getitem__))
        read = dict.fromkeys(value for node in nodes for value in node.inputs if value not in members)
        inputs = tuple(value for value in read if value not in graph.constants)
        constants = {value: graph.constants[value] for value in read if value in graph.constants}
        types = {value: graph.types[value] for value in (*read, *(node.output for node in nodes))}
        left = {value: graph.left[value] for value in types if value in graph.left}
        return Graph("candidate", inputs, (nodes[-1].output,), nodes, types, constants, left=left)


def _reached(root: Node, members: Mapping[str, Node]) -> dict[str, Node]:
    """The members that a root is computed from by way of members."""
    found, frontier = {root.output: root}, [root]
    while frontier:
        made = [members[value] for value in frontier.pop().inputs if value in members and value not in found]
        found.update((node.output, node) for node in made)
        frontier += made
    return found


def _origins(graph: Graph) -> tuple[str, ...]:
    return tuple(dict.fromkeys(node.origin for node in graph.nodes if node.origin))


def named(region: Region, name: str) -> Region:
    """The region with a name, which is a C identifier."""
    graph = replace(region.graph, name=name)
    return replace(region, name=name, graph=graph, match=region.match and replace(region.match, graph=graph))


_KINDS = {
    "Conv2d": "conv",
    "DepthwiseConv2d": "depthwise",
    "FullyConnected": "dense",
    "AveragePool2d": "average_pool",
    "SumPool2d": "average_pool",
    "MaxPool2d": "max_pool",
    "FixedSoftmax": "softmax",
    "Add": "add",
    "Lookup": "lookup",
    "Quantize": "quantize",
    "Dequantize": "dequantize",
}


def _kind(region: Region) -> str:
    kinds = [type(node.operator).__name__ for node in region.graph.nodes]
    known = next((kind for operator, kind in _KINDS.items() if operator in kinds), None)
    return known or re.sub(r"(?<!^)(?=[A-Z])", "_", kinds[-1]).lower()


def engine_layouts(region: Region) -> dict[str, Layout]:
    """The layouts other than row-major an engine takes and gives, by value; none for other regions.

    Raises:
        ValueError: an offload's layout does not fit the values it is for.
        TargetError: it packs values of another width.
    """
    if region.offload is None or region.match is None:
        return {}
    found: dict[str, Layout] = {}
    for leaf, layout in region.offload.layouts_of(region.match).items():
        value = region.output if leaf == "result" else region.match.values.get(leaf)
        if value is None or layout.is_row_major or value in region.graph.constants:
            continue
        physical_shape(layout, region.graph.types[value].shape)
        if not packing_fits(layout, kind := region.graph.types[value].dtype):
            what = f"it takes '{value}' as {layout}, whose bytes {kind.text} cannot fill"
            hint = "let Offload.layouts be a function that asks for the value's width, or limit that with a Constraint"
            raise TargetError(what, where=region.offload.name, hint=hint)
        if found.setdefault(value, layout) != layout:
            raise ValueError(f"{region.offload.name} takes '{value}' in two layouts, {found[value]} and {layout}")
    return found
