"""A network's first layer in bands of rows: the core brings one band of the input into the engine's form while the DMA
gathers and the engine computes the bands before. Its last in parts of the channels, which the core brings into the form
of the result one by one. Exact."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise, product, zip_longest
from typing import TypeAlias

from dovetail.ir.crop import part
from dovetail.ir.graph import Graph, Node, prune
from dovetail.ir.operators.arithmetic import Clip, Offset, Requantize, ScaleShift
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Concat, Im2col, Pad, Slice, Transpose
from dovetail.ir.rewrite import Draft, run
from dovetail.ir.types import TensorType, full_box

Counts = Callable[[Mapping[str, TensorType], Sequence[Node]], int]
"""How many bands pay for a first layer; told the types of all values and its nodes, the input's reader first."""
Ordered = Callable[[Sequence[Sequence[Node]]], Sequence[Node]]
_BEFORE = (Offset, Transpose, Pad, Im2col)
_LAYER = ((Conv2d, DepthwiseConv2d), (ScaleShift,), (Clip,))


def moves_before_offset(graph: Graph) -> Graph:
    """The graph with offsets behind the pads whose results are made into patches, and behind transposes: what was moved
    by copying can be offset where it lies."""

    def padded(draft: Draft, node: Node) -> str | None:
        pad = draft.made_by(node.inputs[0], Pad) if isinstance(node.operator, Im2col) else None
        offset = draft.made_by(pad.inputs[0], Offset) if pad is not None else None
        if pad is None or offset is None or max(draft.users(pad.output), draft.users(offset.output)) > 1:
            return None
        assert isinstance(pad.operator, Pad) and isinstance(offset.operator, Offset)
        value, kind = pad.operator.value - offset.operator.offset, draft.types[offset.inputs[0]].dtype
        if not kind.low <= value <= kind.high or kind.bits != offset.operator.dtype.bits:
            return None
        moved = draft.add(replace(pad.operator, value=value), [offset.inputs[0]], pad)
        return draft.add(node.operator, [draft.add(offset.operator, [moved], offset)], node)

    def transposed(draft: Draft, node: Node) -> str | None:
        offset = draft.made_by(node.inputs[0], Offset) if isinstance(node.operator, Transpose) else None
        if offset is None or draft.users(offset.output) > 1:
            return None
        return draft.add(offset.operator, [draft.add(node.operator, offset.inputs, node)], offset, node.output)

    return run(graph, [padded, transposed])


def first_layer_in_bands(
    counts: Counts, step: int, laid_out: bool = False, layers: int = 1
) -> Callable[[Graph], Graph]:
    """A rewrite: what lies between an input that is offset and the first layers' result, that included, is computed in
    bands of rows, in an order in which the core offsets a band before it has to wait for the engine's operand of the
    one before. Rows of the first that two bands of the second read are computed for both.

    Args:
        counts: how many bands.
        step: bands have a multiple of so many rows of the result, but for the last.
        laid_out: whether every input gets another layout, so that inputs without an offset count as well.
        layers: how many layers one behind the other at most; where the count for them is 1, fewer are tried.
    """

    def rewrite(graph: Graph) -> Graph:
        for name, number in product(graph.inputs, range(layers, 0, -1)):
            chain = _chain(graph, name, laid_out, number)
            kind = graph.types[chain[-1].output] if chain else graph.types[name]
            if not chain or len(kind.shape) != 4 or kind.shape[0] != 1 or chain[-1].output in graph.outputs:
                continue
            count = min(counts(graph.types, chain), kind.shape[1] // step)
            if count > 1:
                with suppress(ValueError):  # a band of padding alone
                    graph = cut_chain(
                        graph, chain, 1, rows_of(kind.shape[1], count, step), _fetched_ahead if laid_out else _in_turn
                    )
        return graph

    return rewrite


def _chain(graph: Graph, name: str, laid_out: bool, layers: int) -> list[Node]:
    """The nodes from an input to the result of its first layers, as many as are in a row; none where something else
    reads a value of the first one, or the core has nothing to do there."""
    users, found, chain, wanted = graph.users(), list[Node](), list[Node](), [*_LAYER] * layers
    while wanted and name not in graph.outputs and len(readers := users.get(name, [])) == 1:
        (node,) = readers
        if node.inputs[0] != name:
            break
        if isinstance(node.operator, wanted[0]):
            wanted.pop(0)
        elif len(wanted) % len(_LAYER) or not isinstance(node.operator, _BEFORE):
            break
        chain.append(node)
        name = node.output
        found = [*chain] if not len(wanted) % len(_LAYER) and isinstance(node.operator, Clip) else found
    return found if laid_out or any(isinstance(node.operator, Offset) for node in found) else []


Spans: TypeAlias = Sequence[tuple[int, int]]
"""Rows from and to of each band of an image."""
SpansBeside = Callable[[Mapping[str, TensorType], Sequence[Node], Sequence[Node]], Spans]
"""The bands of a layer's result; told all types, the nodes computed in bands, and those that come first."""


def patches_in_bands(spans: SpansBeside) -> Callable[[Graph], Graph]:
    """A rewrite: a scale-shifted layer of patches of a value that another layer makes is computed in bands of rows; the
    DMA gathers the patches of one while the engine computes the band before. What other layers make of the same value
    comes first: the engine computes them while the first patches are gathered.

    Args:
        spans: the bands.
    """

    def rewrite(before: Graph) -> Graph:
        graph, users = before, before.users()
        makers = {node.output: node for node in before.nodes}
        for node in before.nodes:
            chain = _of_patches(before, node, makers, users) if isinstance(node.operator, Im2col) else []
            beside = _beside(graph, chain) if chain and before.types[node.output].shape[0] == 1 else []
            if chain and len(cut := spans(before.types, chain, beside)) > 1:
                with suppress(ValueError):
                    graph = cut_chain(_before(graph, beside, chain[0]), chain, 1, cut, _fetched_ahead)
        return graph

    return rewrite


def _of_patches(
    graph: Graph, patches: Node, makers: Mapping[str, Node], users: Mapping[str, Sequence[Node]]
) -> list[Node]:
    """The nodes from patches, what pads them included, to the result of their layer; none where something else reads a
    value between, or the patches are of an input the core still works on."""
    chain = [patches]
    for kinds in _LAYER:
        behind = users.get(chain[-1].output, ())
        if len(behind) != 1 or chain[-1].output in graph.outputs or not isinstance(behind[0].operator, kinds):
            return []
        chain.append(behind[0])
    border = makers.get(patches.inputs[0])
    if border is not None and isinstance(border.operator, Pad) and len(users[border.output]) == 1:
        chain.insert(0, border)
    maker = makers.get(chain[0].inputs[0])
    return [] if maker is not None and isinstance(maker.operator, Offset) else chain


def _beside(graph: Graph, chain: Sequence[Node]) -> list[Node]:
    """What other layers make of a chain's operand behind its first node, where they need nothing of the chain."""
    place, members = graph.nodes.index(chain[0]), {node.output for node in chain}
    known = {*graph.inputs, *graph.constants, *(node.output for node in graph.nodes[:place])}
    inside, found = {chain[0].inputs[0]}, list[Node]()
    for node in graph.nodes[place:]:
        if node.output not in members and not inside.isdisjoint(node.inputs) and known.issuperset(node.inputs):
            found.append(node)
            known.add(node.output)
            inside |= set() if isinstance(node.operator, Clip) else {node.output}
    return found


def _before(graph: Graph, moved: Sequence[Node], place: Node) -> Graph:
    """The graph with some nodes in front of another."""
    names, nodes = {node.output for node in moved}, list[Node]()
    for node in graph.nodes:
        nodes += [*moved, node] if node is place else [node] if node.output not in names else []
    return replace(graph, nodes=tuple(nodes))


def last_layer_in_parts(counts: Callable[[TensorType], int], step: int) -> Callable[[Graph], Graph]:
    """A rewrite: a dense layer whose result is an output but for an offset is computed in parts of its channels; the
    core offsets one while the engine computes the next.

    Args:
        counts: in how many parts, for a result.
        step: parts have a multiple of so many channels, but for the last.
    """

    def rewrite(before: Graph) -> Graph:
        graph, users = before, before.users()
        for node in before.nodes:
            chain = _to_the_output(before, node, users) if isinstance(node.operator, FullyConnected) else []
            kind = before.types[node.output]
            if chain and kind.elements == kind.shape[-1] and (count := min(counts(kind), kind.elements // step)) > 1:
                spans, axis = rows_of(kind.elements, count, step), len(kind.shape) - 1
                graph = cut_chain(graph, chain, axis, spans, layers_ahead(Offset))
        return graph

    return rewrite


def _to_the_output(graph: Graph, layer: Node, users: Mapping[str, Sequence[Node]]) -> list[Node]:
    """The nodes from a layer to the offset that makes an output of its result; none where there are others."""
    chain = [layer]
    while len(behind := users.get(chain[-1].output, ())) == 1 and chain[-1].output not in graph.outputs:
        if not isinstance(behind[0].operator, Requantize | ScaleShift | Clip | Offset):
            return []
        chain.append(behind[0])
    ended = chain[-1].output in graph.outputs and not users.get(chain[-1].output)
    return chain if ended and isinstance(chain[-1].operator, Offset) else []


def layers_ahead(*kinds: type[Operator]) -> Ordered:
    """Puts the nodes of all parts in order: what the core does of each, from an operator of these kinds on, behind the
    layer of the next."""

    def ordered(parts: Sequence[Sequence[Node]]) -> list[Node]:
        halves: list[tuple[Sequence[Node], Sequence[Node]]] = []
        for nodes in parts:
            place = next(place for place, node in enumerate(nodes) if isinstance(node.operator, kinds))
            halves.append((nodes[:place], nodes[place:]))
        layers, rest = zip(*halves, strict=True)
        return [node for pair in zip_longest(layers, [(), *rest], fillvalue=()) for nodes in pair for node in nodes]

    return ordered


def rows_of(total: int, count: int, step: int) -> list[tuple[int, int]]:
    """The rows of each band, half as many in the first and the last: what the core does first and the engine last
    nothing hides. The middle one has the rest that is no whole step; but where all have one step, the last."""
    if count * step >= total:
        return [(start, min(start + step, total)) for start in range(0, total, step)]
    shares = [1 if number in (0, count - 1) else 2 for number in range(count)]
    marks = [round(total // step * upto / sum(shares)) * step for upto in accumulate(shares, initial=0)]
    ends = [mark + (total % step if number > count // 2 else 0) for number, mark in enumerate(marks)]
    return [(start, end) for start, end in pairwise(ends) if start < end]


def soonest(total: int, most: int, before: tuple[float, float], after: tuple[float, float]) -> tuple[float, int]:
    """When a layer ends at the earliest, in cycles, and in how many bands it does, where one is brought about while the
    engine computes the one before.

    Args:
        total: rows.
        most: bands.
        before: cycles to bring about all rows, and those each band takes more.
        after: cycles the engine computes all rows, and those each band takes more.
    """

    def end(count: int) -> float:
        laid = computed = 0.0
        for start, stop in rows_of(total, count, 1):
            share = (stop - start) / total
            laid += before[0] * share + before[1]
            computed = max(laid, computed) + after[0] * share + after[1]
        return computed

    return min((end(count), count) for count in range(1, min(most, total) + 1))


_MOST_STARTS = 32
"""Places where a band may begin, so that few ways of cutting an image have to be looked at."""


def bands_behind(
    total: int, engine: Callable[[int], float], core: Callable[[int], float]
) -> tuple[tuple[int, int], ...]:
    """The rows of the fewest bands in which an image is cut so that the core, which handles each behind the engine, is
    done soonest. The engine is given one band beyond the one the core waits for; the next when the core has done that.

    Args:
        total: rows of the image.
        engine: cycles in which the engine computes a band of so many rows.
        core: cycles the core takes for such a band.
    """
    step = -(-total // _MOST_STARTS)
    # by the rows given to the engine and those of its last band: when the engine ends, when the core ends the bands
    # before the last, and where the bands end
    ways: dict[tuple[int, int], list[tuple[float, float, tuple[int, ...]]]] = {(0, 0): [(0.0, 0.0, ())]}
    for stop in (*range(step, total, step), total):
        for start in range(0, stop, step):
            rows, found = stop - start, []
            for (upto, last), known in ways.items():
                for computed, handled, ends in known if upto == start else ():
                    behind = max(handled, computed) + core(last) if last else 0.0
                    found.append((max(computed, handled) + engine(rows), behind, (*ends, stop)))
            ways[stop, rows] = _undominated(found)
    done = [
        (max(computed, handled) + core(last), len(ends), ends)
        for (upto, last), known in ways.items()
        for computed, handled, ends in known
        if upto == total
    ]
    return tuple(pairwise((0, *min(done)[2])))


def bands_ahead(
    total: int, moved: Callable[[int], float], engine: Callable[[int], float], busy: float = 0.0
) -> tuple[float, Spans]:
    """When an image is computed soonest that is brought about in bands, each while the engine computes those before, in
    cycles; and the rows of as few bands as that takes.

    Args:
        total: rows of the image.
        moved: cycles in which a band of so many rows is brought about.
        engine: cycles in which the engine computes it.
        busy: cycles for which the engine has other work first.
    """
    step = -(-total // _MOST_STARTS)
    moved, engine = cache(moved), cache(engine)
    # by the rows of the bands: when these lie there, when the engine has computed them, and where they end
    ways: dict[int, list[tuple[float, float, tuple[int, ...]]]] = {0: [(0.0, busy, ())]}
    for stop in (*range(step, total, step), total):
        ways[stop] = _undominated(
            [
                (there, max(there, computed) + engine(stop - start), (*ends, stop))
                for start, known in ways.items()
                for laid, computed, ends in known
                for there in (laid + moved(stop - start),)
            ]
        )
    end, _, ends = min((computed, len(ends), ends) for _, computed, ends in ways[total])
    return end, tuple(pairwise((0, *ends)))


def _undominated(
    ways: Sequence[tuple[float, float, tuple[int, ...]]],
) -> list[tuple[float, float, tuple[int, ...]]]:
    """Those than which none has earlier times and as few bands."""
    kept: list[tuple[float, float, tuple[int, ...]]] = []
    for way in sorted(ways, key=lambda way: (way[0], way[1], len(way[2]))):
        if not any(other[1] <= way[1] and len(other[2]) <= len(way[2]) for other in kept):
            kept.append(way)
    return kept


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
        first, *rest = (place for place, node in enumerate(band) if isinstance(node.operator, Conv2d | DepthwiseConv2d))
        second = next((place - isinstance(band[place - 1].operator, Pad) for place in rest), len(band))
        stages.append((band[:first], band[first:second], band[second:]))
    moves, firsts, rests = zip(*stages, strict=True)
    found, moved = [*moves[0]], 1
    for number, (first, rest) in enumerate(zip(firsts, rests, strict=True)):
        upto = number + (3 if rest else 2)
        found += [*first, *(node for some in moves[moved:upto] for node in some), *rest]
        moved = upto
    return found


def _in_turn(bands: Sequence[Sequence[Node]]) -> list[Node]:
    """The nodes of all bands: of each in order, what the DMA moves to its first kernel one band ahead of that, and the
    layer one band behind."""
    found: list[Node] = []
    stages = [_stages(band) for band in bands]
    for now, (ahead, here, behind) in enumerate(
        zip_longest([*(s[0] for s in stages[1:])], [s[1] for s in stages], [(), *(s[2] for s in stages)], fillvalue=())
    ):
        found += [*(stages[0][0] if now == 0 else ()), *ahead, *here, *behind]
    return found


def _stages(band: Sequence[Node]) -> tuple[Sequence[Node], Sequence[Node], Sequence[Node]]:
    """What comes before a band's first kernel of the core, that and the movement behind it, and the layer."""
    kernel = next(place for place, node in enumerate(band) if not isinstance(node.operator, Pad | Slice | Transpose))
    layer = next(place for place, node in enumerate(band) if isinstance(node.operator, Conv2d | DepthwiseConv2d))
    return band[:kernel], band[kernel:layer], band[layer:]
