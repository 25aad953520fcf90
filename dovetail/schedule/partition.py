"""Partition: cuts the integer graph into regions, what each engine takes as a whole and what the core computes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from dovetail import kernels
from dovetail.errors import ModelError
from dovetail.ir.crop import moves_nothing, total_macs
from dovetail.ir.graph import Graph, Node, part_of
from dovetail.ir.operators.arithmetic import Lookup
from dovetail.ir.pattern import apply, operators_of
from dovetail.ir.types import DType
from dovetail.schedule.region import Region, Share, match_of
from dovetail.target.description import Target
from dovetail.target.engine import Engine
from dovetail.target.offload import Offload
from dovetail.target.pattern import Match, Mismatch, Scope, broken_limits, match_pattern
from dovetail.timing.kernels import core_cycles
from dovetail.user_file import asking

_TABLE = apply(Lookup)


@dataclass
class PartitionCache:
    """Answers about one graph that variants of a target share."""

    offloads: dict[tuple[str, int], Match | Mismatch] = field(default_factory=dict)
    """By the node's result and the offload, which is the same object in every variant of a target."""
    kernels: dict[frozenset[str], str | None] = field(default_factory=dict)
    """Nodes by their results -> why they are no kernel of the core, None where they are one."""


def partition(
    graph: Graph, target: Target, declined: Mapping[str, str] | None = None, cache: PartitionCache | None = None
) -> tuple[Region, ...]:
    """Regions in an order that computes every value before it is read.

    Args:
        graph: the whole network.
        target: the machine.
        declined: values that no engine is to compute, each with the reason.
        cache: answers about the same graph from variants of the target; new ones are added.

    Raises:
        ModelError: an operator that neither an engine nor the core can compute.
    """
    draft = _Partition(graph, target, declined or {}, cache or PartitionCache(), not target.dmas)
    regions = draft.regions()
    if not draft.is_offered or any(region.shares for region in regions):
        return regions
    # nothing for the engines: as a core alone, whose kernels pad by themselves, so that it is no slower than one
    return replace(draft, kernels_pad=True).regions()


def initial_partition(graph: Graph, target: Target) -> tuple[Region, ...]:
    """The partition from which assignment starts: without offloads that cost accuracy."""
    made = graph.once(("partition", id(target)), lambda: (target, partition(graph, _lossless(target))))
    return made[1]  # the target beside it keeps its number


def _lossless(target: Target) -> Target:
    """The machine without offloads that cost accuracy."""
    return without_offloads(target, dict.fromkeys((engine.name for engine in target.engines), False))


def without_offloads(target: Target, allowed: Mapping[str, bool]) -> Target:
    """The machine with only some engines' offloads, those engines first, in the order given.

    Args:
        target: the machine.
        allowed: engine -> whether offloads are allowed that cost accuracy.
    """
    engines = []
    for name, lossy in allowed.items():
        engine = target.engine(name)
        kept = tuple(offload for offload in engine.offloads if lossy or not offload.lossy)
        engines.append(engine if len(kept) == len(engine.offloads) else replace(engine, offloads=kept))
    others = [replace(engine, offloads=()) for engine in target.engines if engine.name not in allowed]
    return replace(target, engines=(*engines, *others))


def as_kernels(graph: Graph, target: Target) -> tuple[Region, ...]:
    """A graph as the kernels and views of a core alone, in turn; no value lies in another.

    Raises:
        ModelError: an operator that the core cannot compute.
    """
    return _Partition(graph, replace(target, engines=(), dma=None), kernels_pad=True, lies_apart=True).regions()


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
        for engine, offload, _ in _Partition(graph, target).matches(graph.producers()[region.output])
        if engine.name == region.engine.name and offload.name != region.offload.name and not offload.lossy
    )


@dataclass
class _Partition:
    """A network while it is cut; every offload is tried once on what ends in a node."""

    graph: Graph
    target: Target
    declined: Mapping[str, str] = field(default_factory=dict)
    cache: PartitionCache = field(default_factory=PartitionCache)
    kernels_pad: bool = False
    """Whether the core's kernels pad, as those of a core alone do, although a DMA could."""
    lies_apart: bool = False
    """Whether no value lies in another."""

    def __post_init__(self) -> None:
        self.producers, self.users = self.graph.producers(), self.graph.users()
        self.places = {node.output: place for place, node in enumerate(self.graph.nodes)}
        self.claimed: dict[str, Region] = {}
        """Value -> the region that computes it."""
        self.is_offered = self.target.dma is not None and any(engine.offloads for engine in self.target.engines)
        """Whether an engine may take a layer, and a DMA pads for it."""

    def backwards(self) -> Iterator[Region]:
        """The regions, without names, the last first."""
        for node in reversed(self.graph.nodes):
            if node.output not in self.claimed:
                region = self._on_engine(node) or self._on_core(node)
                self.claimed.update((member.output, region) for member in region.graph.nodes)
                yield region

    def regions(self) -> tuple[Region, ...]:
        """All of them, each named after its main operator and its place in the network."""
        for _ in self.backwards():
            pass
        last = (region for node in self.graph.nodes if (region := self.claimed[node.output]).output == node.output)
        return tuple(named(region, f"{_kind(region)}_{index}") for index, region in enumerate(last))

    def attempts(self, node: Node) -> Iterator[tuple[Engine, Offload, Match | Mismatch]]:
        """Every offload of every engine tried on what ends in `node`, the match in a graph of its own nodes only."""
        for engine in () if node.output in self.declined else self.target.engines:
            for offload in engine.offloads:
                place = node.output, id(offload)
                if place not in self.cache.offloads:
                    self.cache.offloads[place] = self._attempt(offload, node)
                yield engine, offload, self.cache.offloads[place]

    def matches(self, node: Node) -> list[tuple[Engine, Offload, Match]]:
        """The offloads that take what ends in `node`."""
        return [(engine, offload, one) for engine, offload, one in self.attempts(node) if isinstance(one, Match)]

    def _attempt(self, offload: Offload, node: Node) -> Match | Mismatch:
        """A broken constraint comes nearer than any pattern."""
        match = match_pattern(offload.pattern, self.graph, node.output)
        if isinstance(match, Mismatch):
            return match
        if not self.graph.types[node.output].shape:
            return Mismatch("the result is a scalar, which has no axis to cut", len(self.graph.nodes))
        own = match_of(offload, self._subgraph({member.output: member for member in match.nodes.values()}))
        with asking(f"the limits of {offload.name} for {node.origin or node.output}"):
            sentence = broken_limits(offload.constraints, own, Scope.TILES)
        return own if not sentence else Mismatch(sentence, len(self.graph.nodes) + len(own.nodes))

    def mismatch(self, node: Node) -> str:
        """As `explain_mismatch`; empty where an engine takes it."""
        if node.output in self.declined:
            return self.declined[node.output]
        best, nearest, own = "", (False, 0), type(node.operator).__name__
        main = next((kind for kind in self._kinds_above(node) if kind in _LAYERS), own)
        for engine, offload, outcome in self.attempts(node):
            if isinstance(outcome, Match):
                return ""
            near = (main in {kind.__name__ for kind in operators_of(offload.pattern)}, outcome.depth)
            if outcome.depth and near > nearest:
                best, nearest = f"{engine.name} {offload.name}: {outcome.sentence}", near
        left = self.graph.left.get(node.output)
        if left is not None:  # what a rewrite met is the cause of what a limit says, if one could be asked
            return f"{left}; {best}" if nearest[1] > len(self.graph.nodes) else left
        if best or not self.target.engines:
            return best
        return f"no engine has a pattern that ends in {own}"

    def _kinds_above(self, node: Node) -> Iterator[str]:
        """The kind of an operator, of the one that computes its first operand, and so on."""
        above: Node | None = node
        while above is not None:
            yield type(above.operator).__name__
            above = next((self.producers[name] for name in above.inputs if name in self.producers), None)

    def _on_engine(self, node: Node) -> Region | None:
        """The region of the offload that takes most of what ends in a node, and nothing another region has.

        A preferred offload comes before others; of several that take as much the first is taken.
        """
        for engine, offload, match in sorted(
            self.matches(node), key=lambda one: (not one[1].prefer, -len(one[2].nodes))
        ):
            if all(member.output not in self.claimed for member in match.nodes.values()):
                return Region("", match.graph, (Share(engine, offload),), "", _origins(match.graph))
        return None

    def _on_core(self, node: Node) -> Region:
        """A region of the core, grown from its last node upwards as far as one kernel reaches; or a copy."""
        is_noop, is_copied = self._is_noop(node), self._is_copied(node)
        members = (
            {node.output: node}
            if is_noop or is_copied
            else self._instructed(node, self._narrow(node, self._grown(node)))
        )
        graph = self._subgraph(members)
        is_view = all(member.operator.is_view for member in graph.nodes)
        if not is_view and (refusal := self._refusal(members)):
            raise ModelError(refusal, where=node.origin or node.output, hint="this operator has no core kernel yet")
        copied_by = self.target.mover if is_copied and not is_noop else ""
        reason = "" if is_noop or is_copied else self.mismatch(node)
        return Region("", graph, (), reason, _origins(graph), copied_by, is_noop)

    def _refusal(self, members: Mapping[str, Node]) -> str | None:
        """Why the core has no kernel for some nodes; None where it has one."""
        place = frozenset(members)
        if place not in self.cache.kernels:
            self.cache.kernels[place] = kernels.supports(self._subgraph(members))
        return self.cache.kernels[place]

    def _grown(self, node: Node) -> dict[str, Node]:
        """The members, by their results, of a region grown upwards from its last node while it still is one kernel.
        Views come after what is computed; views of operands stay outside, where they cost nothing."""
        members, frontier = {node.output: node}, list(node.inputs)
        while frontier:
            value = frontier.pop(0)
            producer = self.producers.get(value)
            if producer is None or value in self.claimed or value in self.graph.outputs or value in members:
                continue
            if producer.operator.is_view and any(self._computes(other) for other in frontier):
                frontier.append(value)
                continue
            if self._is_copied(producer) and not (self.kernels_pad and producer.operator.pads):
                continue
            if self._is_noop(producer) or any(user.output not in members for user in self.users[value]):
                continue
            if not self.matches(producer) and not self._refusal({**members, value: producer}):
                members[value] = producer
                frontier.extend(producer.inputs)
        while views := [one for one in members.values() if one is not node and self._sees_operand(one, members)]:
            for view in views:
                del members[view.output]
        return members

    def _sees_operand(self, node: Node, members: Mapping[str, Node]) -> bool:
        """Whether a node of a region is a view of one of its operands."""
        value = node.inputs[0] if node.operator.is_view else ""
        return bool(value) and value not in members and value not in self.graph.constants

    def _computes(self, value: str) -> bool:
        """Whether a value is computed by anything but a view."""
        producer = self.producers.get(value)
        return producer is not None and not producer.operator.is_view

    def _narrow(self, root: Node, members: dict[str, Node]) -> dict[str, Node]:
        """Give back nodes at the top of a core region while it would read wide sums another core region must then
        store, unless what is left reads as many. Floats are as wide before a node as after it."""
        best, least = members, len(self._wide(members))
        while wide := [reader for reader in self._wide(members) if reader != root.output]:
            members = self._own(root, {value: node for value, node in members.items() if value != wide[0]})
            if (count := len(self._wide(members))) < least:
                best, least = members, count
        return best

    def _instructed(self, root: Node, members: dict[str, Node]) -> dict[str, Node]:
        """Give back a table, with what only it reads, where the core's own instructions then compute the products: no
        kernel of those looks anything up."""
        traits = kernels.core_traits(self.target.core)
        tables = [node for node in members.values() if _TABLE.fits(node)]
        if not traits.instructions or not tables or not total_macs(self._subgraph(members)):
            return members
        for table in tables:
            end = self.producers[table.inputs[0]] if table is root and table.inputs[0] in members else root
            rest = self._own(end, {name: node for name, node in members.items() if node is not table})
            scope = kernels.scope_of(self._subgraph(rest), "candidate", traits)
            if not self._refusal(rest) and kernels.generated(scope).instructions:
                return rest if end is root else {root.output: root}
        return members

    def _own(self, root: Node, members: Mapping[str, Node]) -> dict[str, Node]:
        """The members that a root is computed from by way of members, and that nobody else reads."""
        reached, frontier = {root.output: root}, [root]
        while frontier:
            more = [members[value] for value in frontier.pop().inputs if value in members and value not in reached]
            reached.update((node.output, node) for node in more)
            frontier += more
        read = {value: self.users[value] for value in reached if value != root.output}
        stray = {value for value, users in read.items() if any(user.output not in reached for user in users)}
        inner = {value: node for value, node in reached.items() if value not in stray}
        return self._own(root, inner) if stray else reached

    def _wide(self, members: Mapping[str, Node]) -> list[str]:
        """The result of each member that reads a wide sum of another region of the core."""
        types = self.graph.types
        return [
            member.output
            for member in members.values()
            for value in member.inputs
            if value in self.producers and value not in members
            if types[value].dtype.bits > max(types[member.output].dtype.bits // 2, 16)
            if types[value].dtype is not DType.FLOAT32 and not self.matches(self.producers[value])
        ]

    def _is_copied(self, node: Node) -> bool:
        """True for what becomes copies: of a DMA, or of the core, which gives values the strides an engine takes. A
        core alone computes movement in its kernels."""
        if node.operator.is_view or any(name in self.graph.constants for name in node.inputs):
            return False
        kinds = [self.graph.types[name] for name in node.inputs]
        return bool(self.target.dma or self.target.engines) and node.operator.pieces(kinds) is not None

    def _is_noop(self, node: Node) -> bool:
        """True for a slice or concatenation of whole rows that a core alone need not do, and for a slice that only
        copies and engines which take strides read, where values have one layout."""
        if self.lies_apart:
            return False
        if not (self.target.dma or self.target.engines):
            return moves_nothing(self.graph, node)
        if node.operator.box_read is None or node.operator.skips or node.output in self.graph.outputs:
            return False
        if len(self.graph.types[node.output].shape) == 1 and moves_nothing(self.graph, node):
            return True  # one of several results of a launch: whoever reads it finds it dense
        if node.inputs[0] in self.graph.constants:
            return False
        if any(offload.layouts for engine in self.target.engines for offload in engine.offloads):
            return False
        readers = [self.claimed[user.output] for user in self.users[node.output]]
        return all(reader.takes_strides or reader.copied_by for reader in readers)

    def _subgraph(self, members: Mapping[str, Node]) -> Graph:
        """Some nodes, by their results, as a graph of their own."""
        nodes = [self.producers[value] for value in sorted(members, key=self.places.__getitem__)]
        return part_of(self.graph, nodes, "candidate")


def _origins(graph: Graph) -> tuple[str, ...]:
    return tuple(dict.fromkeys(node.origin for node in graph.nodes if node.origin))


def named(region: Region, name: str) -> Region:
    """The region with a name, which is a C identifier."""
    return replace(region, name=name, graph=replace(region.graph, name=name))


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


_LAYERS = tuple(_KINDS)[: tuple(_KINDS).index("Lookup")]
"""Kinds of operators that a layer is made around."""


def _kind(region: Region) -> str:
    kinds = [type(node.operator).__name__ for node in region.graph.nodes]
    main = next((kind for operator, kind in _KINDS.items() if operator in kinds), None)
    return main or re.sub(r"(?<!^)(?=[A-Z])", "_", kinds[-1]).lower()


def layer_cycles(graph: Graph, target: Target) -> float:
    """Cycles of a graph's layers one after the other, copies and tiles left out."""
    return sum(_cycles(region, target) for region in initial_partition(graph, target))


def cycles_within(graph: Graph, target: Target, most: float) -> float | None:
    """As `layer_cycles`; None where they are more than a limit, of which the last layers are enough to say so."""
    draft = _Partition(graph, _lossless(target), kernels_pad=not target.dmas)
    spent, total, is_final = list[float](), 0.0, not draft.is_offered
    for region in draft.backwards():
        spent.append(_cycles(region, target))
        is_final = is_final or bool(region.shares)
        total += spent[-1]
        if is_final and total > most:
            return None
    whole = sum(reversed(spent)) if is_final else layer_cycles(graph, target)
    return whole if whole <= most else None


def _cycles(region: Region, target: Target) -> float:
    offload, match = region.offload, region.match
    if offload is None or match is None:
        return 0 if region.is_view else core_cycles(region.graph, target)
    with asking(f"the cycles of {offload.name} for {region.name or ', '.join(region.origins)}"):
        return offload.cycles(match)
