"""Cuts the integer graph into regions: what each engine takes as a whole, and what the core computes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dovetail import kernels
from dovetail.errors import ModelError
from dovetail.graph.graph import Graph, Node
from dovetail.graph.layout import Layout
from dovetail.graph.stretch import moves_nothing
from dovetail.graph.types import Box, DType, full_box
from dovetail.operators.movement import Concat, Pad, Patches, Reshape, Slice, Transpose
from dovetail.target.description import Engine, Offload, Target
from dovetail.target.knobs import Choice
from dovetail.target.pattern import Match, Mismatch, Scope, match_pattern


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
    choice: Choice = field(default_factory=dict)
    """What was chosen for the planner's knobs and the offload's (plan/knobs.py); the rest the planner chooses."""

    still: bool = False
    """True where the core has nothing to do: the result lies in the operand, or the operands lie in the result."""
    shares: tuple[Share, ...] = ()
    """Who computes which part where several engines compute it together, the first of them being `engine`; empty where
    one does it all. (Set by the place stage, as `slot` is.)"""
    slot: Slot | None = None
    """When it is scheduled; None where regions are computed one after the other."""
    box: Box | None = None
    """The part of the result that is computed, in one of `parts`; None for all of it."""

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
        return self.offload is not None and all(
            offload.strided for offload in (self.offload, *(share.offload for share in self.shares))
        )

    @property
    def is_view(self) -> bool:
        """True when the result is its operand under another shape: nothing is computed."""
        return all(isinstance(node.operator, Reshape) for node in self.graph.nodes)


@dataclass(frozen=True)
class _Claim:
    nodes: tuple[Node, ...]
    engine: Engine | None
    offload: Offload | None
    reason: str
    mover: str = ""
    still: bool = False


def partition(graph: Graph, target: Target) -> tuple[Region, ...]:
    """Regions in an order that computes every value before it is read.

    Raises:
        ModelError: an operator that neither an engine nor the core can compute.
    """
    claimed: dict[str, _Claim] = {}
    for node in reversed(graph.nodes):
        if node.output not in claimed:
            claim = _claim(graph, target, node, claimed)
            claimed.update((member.output, claim) for member in claim.nodes)
    ordered = [claimed[node.output] for node in graph.nodes if claimed[node.output].nodes[-1].output == node.output]
    names = _names(ordered)
    return tuple(_region(graph, claim, name) for claim, name in zip(ordered, names, strict=True))


def explain_mismatch(graph: Graph, target: Target, node: Node) -> str:
    """Why no engine takes the computation that ends in `node`: the sentence of the pattern that came closest."""
    best = Mismatch("", 0)
    for engine, offload, found in _attempts(graph, target, node):
        if isinstance(found, Match):
            return ""
        if found.depth > best.depth:
            best = Mismatch(f"{engine.name} {offload.name}: {found.sentence}", found.depth)
    if best.depth or not target.engines:
        return best.sentence
    return f"no engine has a pattern that ends in {type(node.operator).__name__}"


def rivals(graph: Graph, target: Target, region: Region) -> tuple[str, ...]:
    """Why the engine's other offloads that could compute what a region's offload begins with did not, a sentence each.

    Args:
        graph: the whole network.
        target: the machine.
        region: one of its regions; none on the core.
    """
    if region.offload is None or region.engine is None:
        return ()
    node = graph.producers()[region.output]
    found = [
        (engine, offload)
        for engine, offload, match in _attempts(graph, target, node)
        if isinstance(match, Match) and not offload.lossy
        and engine.name == region.engine.name and offload.name != region.offload.name
    ]
    return tuple(
        f"{engine.name} {offload.name} takes it too; {region.engine.name} {region.offload.name} is declared first"
        for engine, offload in found
    )


def _attempts(graph: Graph, target: Target, node: Node) -> Iterator[tuple[Engine, Offload, Match | Mismatch]]:
    """Every offload of every engine tried on what ends in `node`; a broken constraint comes nearer than any pattern."""
    for engine in target.engines:
        for offload in engine.offloads:
            found = match_pattern(offload.pattern, graph, node.output)
            if isinstance(found, Match):
                found = _alone(graph, offload, found)
                asked = (constraint for constraint in offload.constraints if constraint.scope is not Scope.TILES)
                failures = (constraint.failure(found) for constraint in asked)
                sentence = next((failure for failure in failures if failure), None)
                if sentence is not None:
                    found = Mismatch(sentence, len(graph.nodes) + len(found.nodes))
            yield engine, offload, found


def _alone(graph: Graph, offload: Offload, found: Match) -> Match:
    """A match as it lies in a graph of its own nodes only, as every function of an offload is given it."""
    members = {member.output: member for member in found.nodes.values()}
    own = match_pattern(offload.pattern, _subgraph(graph, _in_order(graph, members), "candidate"), found.root)
    if isinstance(own, Mismatch):
        raise ValueError(f"{offload.name} no longer matches by itself: {own.sentence}")
    return own


def _claim(graph: Graph, target: Target, node: Node, claimed: dict[str, _Claim]) -> _Claim:
    for engine, offload, found in _attempts(graph, target, node):
        if isinstance(found, Match):
            members = {member.output for member in found.nodes.values()}
            if members.isdisjoint(claimed):
                nodes = tuple(member for member in graph.nodes if member.output in members)
                return _Claim(nodes, engine, offload, "")
    return _core_claim(graph, target, node, claimed)


def _core_claim(graph: Graph, target: Target, node: Node, claimed: dict[str, _Claim]) -> _Claim:
    """Grow a core region upwards from its last node as long as its kernel generator still takes it."""
    producers, users = graph.producers(), graph.users()
    members = {node.output: node}
    still = _still(graph, target, node)
    frontier = [] if still or _copied(graph, target, node) else list(node.inputs)
    while frontier:
        value = frontier.pop(0)
        producer = producers.get(value)
        if (
            producer is None
            or (_copied(graph, target, producer) and (target.dma or not isinstance(producer.operator, Pad)))
            or _still(graph, target, producer)
            or value in claimed
            or value in graph.outputs
            or value in members
        ):
            continue
        if any(user.output not in members for user in users[value]) or _engine_takes(graph, target, producer):
            continue
        grown = {**members, value: producer}
        if kernels.supports(_subgraph(graph, _in_order(graph, grown), "candidate")) is None:
            members = grown
            frontier.extend(producer.inputs)
    members = _cut_where_narrow(graph, target, node, members)
    nodes = _in_order(graph, members)
    refusal = kernels.supports(_subgraph(graph, nodes, "candidate")) if not _is_view(nodes) else None
    if refusal:
        raise ModelError(refusal, where=node.origin or node.output, hint="this operator has no core kernel yet")
    if still:
        return _Claim(nodes, None, None, "", still=True)
    if _copied(graph, target, node):
        return _Claim(nodes, None, None, "", target.dma.name if target.dma else "core")
    return _Claim(nodes, None, None, explain_mismatch(graph, target, node))


def _cut_where_narrow(graph: Graph, target: Target, root: Node, members: dict[str, Node]) -> dict[str, Node]:
    """Give back nodes at the top of a core region while it would read wide sums another core region must then store.
    Floats are as wide before a node as after it."""
    producers = graph.producers()
    kept = dict(members)
    while True:
        wide = [
            member
            for member in kept.values()
            for value in member.inputs
            if member is not root
            and value in producers
            and value not in kept
            and graph.types[value].dtype.bits > graph.types[member.output].dtype.bits // 2
            and graph.types[value].dtype.bits > 16
            and graph.types[value].dtype is not DType.FLOAT32
            and not _engine_takes(graph, target, producers[value])
        ]
        if not wide:
            return kept
        del kept[wide[0].output]


def _copied(graph: Graph, target: Target, node: Node) -> bool:
    """True for what becomes copies: of a DMA, or of the core, which gives values the strides an engine takes. A core
    alone computes movement in its kernels."""
    return bool(target.dma or target.engines) and _is_movement(graph, node)


def _still(graph: Graph, target: Target, node: Node) -> bool:
    """True for a slice or concatenation of whole rows that a core alone need not do."""
    return not (target.dma or target.engines) and moves_nothing(graph, node)


def _is_movement(graph: Graph, node: Node) -> bool:
    """True for what strided copies do by themselves."""
    operator, kind = node.operator, graph.types[node.inputs[0]]
    if any(value in graph.constants for value in node.inputs):
        return False
    if isinstance(operator, Pad):
        outer = (operator.before[0], operator.after[0], operator.before[-1], operator.after[-1])
        return len(kind.shape) == 4 and kind.shape[0] == 1 and kind.dtype.numpy.itemsize == 1 and not any(outer)
    if isinstance(operator, Patches):
        return operator.dilation[1] == 1 and kind.shape[0] == 1
    return isinstance(operator, Slice | Concat | Transpose)


def _is_view(nodes: Sequence[Node]) -> bool:
    return all(isinstance(node.operator, Reshape) for node in nodes)


def _engine_takes(graph: Graph, target: Target, node: Node) -> bool:
    return any(isinstance(found, Match) for _, _, found in _attempts(graph, target, node))


def _in_order(graph: Graph, members: dict[str, Node]) -> tuple[Node, ...]:
    return tuple(node for node in graph.nodes if node.output in members)


def _subgraph(graph: Graph, nodes: Sequence[Node], name: str) -> Graph:
    """The nodes as a graph of their own."""
    computed = {node.output for node in nodes}
    read = dict.fromkeys(value for node in nodes for value in node.inputs if value not in computed)
    inputs = tuple(value for value in read if value not in graph.constants)
    constants = {value: graph.constants[value] for value in read if value in graph.constants}
    types = {value: graph.types[value] for value in (*read, *(node.output for node in nodes))}
    return Graph(name, inputs, (nodes[-1].output,), tuple(nodes), types, constants)


def _region(graph: Graph, claim: _Claim, name: str) -> Region:
    inner = _subgraph(graph, claim.nodes, name)
    match = None
    if claim.offload is not None:
        found = match_pattern(claim.offload.pattern, inner, inner.outputs[0])
        if isinstance(found, Mismatch):
            raise ValueError(f"region {name} no longer matches: {found.sentence}")
        match = found
    origins = tuple(dict.fromkeys(node.origin for node in claim.nodes if node.origin))
    place = (match, claim.engine, claim.offload, claim.reason, origins, claim.mover)
    return Region(name, inner, *place, still=claim.still)


def _names(claims: Sequence[_Claim]) -> list[str]:
    """A short C identifier per region: the kind of its main operator and its place in the network."""
    return [f"{_kind(claim)}_{index}" for index, claim in enumerate(claims)]


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


def _kind(claim: _Claim) -> str:
    kinds = [type(node.operator).__name__ for node in claim.nodes]
    for operator, kind in _KINDS.items():
        if operator in kinds:
            return kind
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kinds[-1]).lower()
