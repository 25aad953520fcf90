"""A network's first layer in bands of rows: the core brings one band of the input into the engine's form while the DMA
gathers and the engine computes the bands before. Its last in parts of the channels, which the core brings into the form
of the result one by one. Exact."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product, zip_longest
from typing import Any

from dovetail.ir.crop import part
from dovetail.ir.graph import Graph, Node, prune
from dovetail.ir.operators.arithmetic import Clip, Offset, Requantize, ScaleShift
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Concat, Im2col, Pad, Transpose
from dovetail.ir.pattern import Apply, Pattern, apply, maybe, occurrence, operand, rest, some
from dovetail.ir.rules import Rule, RuleMatch, run
from dovetail.ir.types import TensorType, full_box
from dovetail.legalize.requantisation import PARAMETERS
from dovetail.legalize.spans import Spans, rows_of

Counts = Callable[[Mapping[str, TensorType], Sequence[Node]], int]
"""How many bands pay for a first layer; told the types of all values and its nodes, the input's reader first."""
Ordered = Callable[[Sequence[Sequence[Node]]], Sequence[Node]]
X = operand("x")
_OFFSET = apply(Offset, X, alone=True)
_PAD = apply(Pad, _OFFSET, alone=True)
_PADDED = apply(Im2col, _PAD)
_TURNED = apply(Transpose, _OFFSET)


def _padded_first(at: RuleMatch) -> str | None:
    value, kind, offset = at[_PAD].value - at[_OFFSET].offset, at.type(X).dtype, at[_OFFSET].dtype
    if not kind.low <= value <= kind.high or kind.bits != offset.bits:
        return None
    moved = at.add(replace(at[_PAD], value=value), X, like=_PAD)
    return at.add(at[_PADDED], at.add(at[_OFFSET], moved, like=_OFFSET))


def _turned_first(at: RuleMatch) -> str:
    return at.add(at[_OFFSET], at.add(at[_TURNED], X), like=_OFFSET, stem=at.root.output)


def moves_before_offset(graph: Graph) -> Graph:
    """The graph with offsets behind the pads whose results are made into patches, and behind transposes: what was moved
    by copying can be offset where it lies."""
    return run(graph, (Rule(_PADDED, _padded_first), Rule(_TURNED, _turned_first)))


def layer(image: Pattern, alone: bool = False) -> Apply[Clip]:
    """clip(scale-shift(convolution(image))), of which nothing else reads a part; `alone`: nor the result."""
    sums = apply((Conv2d, DepthwiseConv2d), image, rest("weights"), alone=True)
    return apply(Clip, apply(ScaleShift, sums, PARAMETERS, alone=True), alone=alone)


def first_layer_in_bands(
    counts: Counts, step: int, laid_out: bool = False, layers: int = 1
) -> Callable[[Graph], Graph]:
    """A rewrite: the first layers after an input that is offset are computed in bands of rows. The core offsets a
    band before it waits for the engine's operand of the band before.

    Args:
        counts: how many bands.
        step: bands have a multiple of so many rows of the result, but for the last.
        laid_out: whether every input gets another layout, so that inputs without an offset count as well.
        layers: how many layers one behind the other at most; where the count for them is 1, fewer are tried.
    """
    source = operand("input")
    pattern: Pattern = source
    patterns: list[Apply[Clip]] = []
    for _ in range(layers):
        pattern = layer(some((Offset, Transpose, Pad, Im2col), pattern, alone=True), alone=True)
        patterns.insert(0, replace(pattern, alone=False))

    def chain_of(graph: Graph, name: str, pattern: Apply[Clip]) -> Sequence[Node]:
        """The nodes from an input to the result of its first layers; none where the core has nothing to do there."""
        places = (occurrence(pattern, graph, node) for node in graph.nodes if graph.readers(name) == 1)
        chain = next((place.members for place in places if place and place[source] == name), ())
        return chain if laid_out or any(_OFFSET.fits(node) for node in chain) else ()

    def rewrite(graph: Graph) -> Graph:
        for name, pattern in product(graph.inputs, patterns):
            chain = chain_of(graph, name, pattern)
            kind = graph.types[chain[-1].output] if chain else graph.types[name]
            if not chain or len(kind.shape) != 4 or kind.shape[0] != 1 or chain[-1].output in graph.outputs:
                continue
            count = min(counts(graph.types, chain), kind.shape[1] // step)
            if count > 1:
                with suppress(ValueError):  # a band of padding alone
                    spans = rows_of(kind.shape[1], count, step)
                    graph = cut_chain(graph, chain, 1, spans, _fetched_ahead if laid_out else _in_turn)
        return graph

    return rewrite


SpansBeside = Callable[[Mapping[str, TensorType], Sequence[Node], Sequence[Node]], Spans]
"""The bands of a layer's result; told all types, the nodes computed in bands, and those that come first."""
_GATHERED = apply(Im2col, maybe(Pad, X, alone=True), alone=True)
_OF_PATCHES = layer(_GATHERED)


def patches_in_bands(spans: SpansBeside) -> Callable[[Graph], Graph]:
    """A rewrite: a scale-shifted layer of patches of a value that another layer makes is computed in bands of rows; the
    DMA gathers the patches of one while the engine computes the band before. What other layers make of the same value
    comes first: the engine computes them while the first patches are gathered.

    Args:
        spans: the bands.
    """

    def rewrite(before: Graph) -> Graph:
        graph = before
        for node in before.nodes:
            place = occurrence(_OF_PATCHES, before, node)
            maker = before.producer(place[X]) if place else None
            # the core still works on an input that is offset
            if place is None or (maker and _OFFSET.fits(maker)):
                continue
            chain = place.members
            beside = _beside(graph, chain) if place.type(_GATHERED).shape[0] == 1 else []
            if len(cut := spans(before.types, chain, beside)) > 1:
                with suppress(ValueError):
                    graph = cut_chain(_before(graph, beside, chain[0]), chain, 1, cut, _fetched_ahead)
        return graph

    return rewrite


def _beside(graph: Graph, chain: Sequence[Node]) -> list[Node]:
    """The nodes of other layers that read a chain's operand behind its first node, and need nothing of the chain."""
    place, members = graph.nodes.index(chain[0]), {node.output for node in chain}
    ready = {*graph.inputs, *graph.constants, *(node.output for node in graph.nodes[:place])}
    inside, others = {chain[0].inputs[0]}, list[Node]()
    for node in graph.nodes[place:]:
        if node.output not in members and not inside.isdisjoint(node.inputs) and ready.issuperset(node.inputs):
            others.append(node)
            ready.add(node.output)
            inside |= set() if node.operator.limited_to else {node.output}
    return others


def _before(graph: Graph, moved: Sequence[Node], place: Node) -> Graph:
    """The graph with some nodes in front of another."""
    names, nodes = {node.output for node in moved}, list[Node]()
    for node in graph.nodes:
        nodes += [*moved, node] if node is place else [node] if node.output not in names else []
    return replace(graph, nodes=tuple(nodes))


_DENSE = apply(FullyConnected, alone=True)
_LAST = apply(Offset, some((Requantize, ScaleShift, Clip, Offset), _DENSE, alone=True))


def last_layer_in_parts(counts: Callable[[TensorType], int], step: int) -> Callable[[Graph], Graph]:
    """A rewrite: a dense layer whose result is an output but for an offset is computed in parts of its channels; the
    core offsets one while the engine computes the next.

    Args:
        counts: in how many parts, for a result.
        step: parts have a multiple of so many channels, but for the last.
    """

    def rewrite(graph: Graph) -> Graph:
        for node in graph.nodes:
            place = occurrence(_LAST, graph, node) if node.output in graph.outputs else None
            if place is None or graph.users()[node.output]:
                continue
            kind = place.type(_DENSE)
            if kind.elements == kind.shape[-1] and (count := min(counts(kind), kind.elements // step)) > 1:
                spans, axis = rows_of(kind.elements, count, step), len(kind.shape) - 1
                graph = cut_chain(graph, place.members, axis, spans, layers_ahead(_LAST))
        return graph

    return rewrite


def layers_ahead(part: Apply[Any]) -> Ordered:
    """Puts the nodes of all parts in order: what the core does of each, from an operator that is asked for on, behind
    the layer of the next."""

    def ordered(parts: Sequence[Sequence[Node]]) -> list[Node]:
        halves: list[tuple[Sequence[Node], Sequence[Node]]] = []
        for nodes in parts:
            place = next(place for place, node in enumerate(nodes) if part.fits(node))
            halves.append((nodes[:place], nodes[place:]))
        layers, rest = zip(*halves, strict=True)
        return [node for pair in zip_longest(layers, [(), *rest], fillvalue=()) for nodes in pair for node in nodes]

    return ordered


def cut_chain(
    graph: Graph, chain: Sequence[Node], axis: int, spans: Sequence[tuple[int, int]], ordered: Ordered
) -> Graph:
    """The graph with the nodes of a chain once for each span of an axis of its result, joined behind them.

    Args:
        graph: the whole.
        chain: nodes in order; only the last one's result is read by others.
        axis: of the result.
        spans: of all of it.
        ordered: puts the nodes of all parts in order.

    Raises:
        ValueError: the chain cannot be computed in such parts.
    """
    result, members = chain[-1].output, {node.output for node in chain}
    operands = dict.fromkeys(value for node in chain for value in node.inputs if value not in members)
    types = {value: graph.types[value] for value in (*operands, *members)}
    constants = {value: graph.constants[value] for value in operands if value in graph.constants}
    inputs = tuple(value for value in operands if value not in constants)
    whole = Graph(graph.name, inputs, (result,), tuple(chain), types, constants)
    full = full_box(graph.types[result].shape)
    cuts, along = [span for span in spans if span != full[axis]], "channels" if axis == len(full) - 1 else "rows"
    bands = [part(whole, {result: (*full[:axis], span, *full[axis + 1 :])}, f" {along} {span[0]}") for span in cuts]
    made = [*ordered([band.nodes for band in bands])]
    made.append(Node(Concat(axis), tuple(band.outputs[0] for band in bands), result, chain[-1].origin))
    ends = {*inputs, chain[0].output}
    first = max(place + (node is not chain[0]) for place, node in enumerate(graph.nodes) if node.output in ends)
    kept = [
        [node for node in some if node.output not in members] for some in (graph.nodes[:first], graph.nodes[first:])
    ]
    types = {**graph.types, **{value: kind for band in bands for value, kind in band.types.items()}}
    constants = {**graph.constants, **{value: array for band in bands for value, array in band.constants.items()}}
    return prune(replace(graph, nodes=(*kept[0], *made, *kept[1]), types=types, constants=constants))


def _fetched_ahead(bands: Sequence[Sequence[Node]]) -> list[Node]:
    """The nodes of one band after those of the other; where a band has several layers, what is moved for the next band
    but one comes before its second."""
    stages = []
    for band in bands:
        first, *rest = (place for place, node in enumerate(band) if node.operator.weight_axis is not None)
        second = next((place - (band[place - 1].operator.filler is not None) for place in rest), len(band))
        stages.append((band[:first], band[first:second], band[second:]))
    moves, firsts, rests = zip(*stages, strict=True)
    nodes, moved = [*moves[0]], 1
    for number, (first, rest) in enumerate(zip(firsts, rests, strict=True)):
        upto = number + (3 if rest else 2)
        nodes += [*first, *(node for some in moves[moved:upto] for node in some), *rest]
        moved = upto
    return nodes


def _in_turn(bands: Sequence[Sequence[Node]]) -> list[Node]:
    """The nodes of all bands: of each in order, what the DMA moves to its first kernel one band ahead of that, and the
    layer one band behind."""
    nodes: list[Node] = []
    stages = [_stages(band) for band in bands]
    for now, (ahead, here, behind) in enumerate(
        zip_longest([*(s[0] for s in stages[1:])], [s[1] for s in stages], [(), *(s[2] for s in stages)], fillvalue=())
    ):
        nodes += [*(stages[0][0] if now == 0 else ()), *ahead, *here, *behind]
    return nodes


def _stages(band: Sequence[Node]) -> tuple[Sequence[Node], Sequence[Node], Sequence[Node]]:
    """The nodes before a band's first kernel of the core, that kernel and the movement behind it, and the layer."""
    kernel = next(place for place, node in enumerate(band) if not node.operator.moves_only)
    layer = next(place for place, node in enumerate(band) if node.operator.weight_axis is not None)
    return band[:kernel], band[kernel:layer], band[layer:]
