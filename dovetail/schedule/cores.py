"""Regions without an engine: strided copies where these do, else calls, dealt out to the cores by their speed.

A core's part is a stretch of the result along its first axis longer than 1: rows of an image, channels where there are
no rows. So operands and results of parts lie densely and core kernels take them as they are; parts of equal shape and
padding become one function.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import gcd, prod
from types import MappingProxyType

from dovetail import kernels
from dovetail.ir import crop
from dovetail.ir.crop import ALIGNMENT
from dovetail.ir.graph import Graph, Node, renamed
from dovetail.ir.types import Box, TensorType, box_shape, full_box, with_span
from dovetail.program.ir import Begin, Call, Copy, Statement, View, Views, dense_view
from dovetail.program.transfers import same_packing
from dovetail.schedule.region import CoreGroup, Region
from dovetail.target.description import Target
from dovetail.target.pattern import Choice
from dovetail.timing.kernels import Parts, core_cycles, shared_cycles

_STEPS = (1, 2, 4, 8)
"""Multiples of the least step that are tried: where results of one begin as kernels take them, operands may not."""


def copies(layer: int, graph: Graph, operands: Views, result: View) -> tuple[Copy, ...] | None:
    """The copies that compute a one-node graph, for the DMA or the core; None when copying cannot.

    Args:
        layer: index of the layer the copies belong to.
        graph: the region.
        operands: where each runtime operand lies; row-major but for pads, concatenations and relayouts.
        result: where the result goes, dense.
    """
    node = graph.nodes[0]
    if len(graph.nodes) != 1 or any(name in graph.constants for name in node.inputs):
        return None
    if node.operator.changes_layout and not same_packing(operands[node.inputs[0]].layout, result.layout):
        return None
    pieces = node.operator.pieces([graph.types[name] for name in node.inputs])
    if pieces is None:
        return None
    moves = []
    for piece in pieces:
        source, target = operands[node.inputs[piece.operand]], result.part(piece.box)
        if node.operator.is_view:
            source = dense_view(source.buffer, result.type, source.offset)
        elif piece.walks:
            start = sum(place * stride for place, stride in zip(piece.start, source.strides, strict=True))
            strides = tuple(source.strides[axis] * step for axis, step in piece.walks)
            source = View(source.buffer, target.type, strides, source.offset + start)
        moves.append(Copy(layer, source, target, piece.before, piece.fill))
    return tuple(moves)


def split(
    layer: int, graph: Graph, operands: Views, result: View, target: Target, cores: CoreGroup = ()
) -> tuple[Call, ...]:
    """The calls that compute a region on as many cores of a group as make it fastest, by estimate.

    Args:
        layer: index of the region.
        graph: the region.
        operands: where each runtime operand lies.
        result: where the result goes.
        target: its cores.
        cores: numbers of the cores of the group; empty for all.

    Returns:
        Calls on workers, which are started first, then that on core 0 if it has a part.
    """
    cores = cores or tuple(range(len(target.cores)))
    whole = Call(layer, graph, operands, result, min(cores))
    if len(cores) == 1 or not result.type.elements:
        return (whole,)
    bare = _without_views(whole)
    for boxes, chosen in _deals(bare, target, cores):
        if len(boxes) == 1:
            return (replace(whole, core=chosen[0]),)
        parts = _parts(bare, boxes, chosen)
        if parts is not None:
            return tuple(sorted(parts, key=lambda call: (call.core == 0, call.core)))
    return (whole,)


def _without_views(whole: Call) -> Call:
    """A call without the views that its operands and its result are of what lies there."""
    graph, operands, result, nodes = whole.graph, dict(whole.operands), whole.result, list[Node]()
    for node in graph.nodes:
        if node.operator.is_view and node.inputs[0] in operands:
            old = operands[node.inputs[0]]
            operands[node.output] = dense_view(old.buffer, graph.types[node.output], old.offset)
        else:
            nodes.append(node)
    output = graph.outputs[0]
    while nodes and nodes[-1].operator.is_view and nodes[-1].output == output:
        output = nodes.pop().inputs[0]
        result = dense_view(result.buffer, graph.types[output], result.offset)
    if not nodes:
        return whole
    read = {name for node in nodes for name in node.inputs}
    operands = {name: view for name, view in operands.items() if name in read}
    graph = replace(graph, inputs=tuple(operands), nodes=tuple(nodes), outputs=(output,))
    return Call(whole.layer, graph, operands, result, whole.core)


def _deals(whole: Call, target: Target, group: CoreGroup) -> list[tuple[tuple[Box, ...], list[int]]]:
    """The ways to deal out a call's result, a box for each of some cores of a group, the shortest by estimate first; a
    part has to be worth starting its core."""
    kind, all_work, speeds = whole.result.type, core_cycles(whole.graph, target), [each.speed for each in target.cores]
    start = target.core.statements.worker
    ranked = sorted(group, key=lambda core: (-speeds[core], core))
    ends: dict[tuple[Box, ...], tuple[float, list[int]]] = {}
    for count in range(1, len(ranked) + 1):
        cores = sorted(ranked[:count])
        for steps in _STEPS:
            boxes = shares(kind, [speeds[core] for core in cores], steps)
            sizes = [prod(box_shape(box)) for box in boxes]
            times = [all_work * size / kind.elements / speeds[core] for size, core in zip(sizes, cores, strict=True)]
            if all(sizes):
                ends.setdefault(boxes, (max(times) + start * sum(core != 0 for core in cores), cores))
    return [(boxes, cores) for boxes, (_, cores) in sorted(ends.items(), key=lambda item: item[1][0])]


def shares(kind: TensorType, speeds: Sequence[float], steps: int = 1) -> tuple[Box, ...]:
    """Stretches of a value, one for each of these speeds and in proportion to it; empty ones are left as (n, n).

    Args:
        kind: type of the value, which lies row-major.
        speeds: in any unit.
        steps: stretches begin at multiples of so many times the step at which results begin where kernels take them.
    """
    axis, step = stretch_axis(kind)
    step *= steps
    size = kind.shape[axis] if kind.shape else 1
    counts, whole = [0] * len(speeds), full_box(kind.shape)
    for _ in range(-(-size // step)):
        soonest = min(range(len(speeds)), key=lambda core: ((counts[core] + 1) / speeds[core], core))
        counts[soonest] += 1
    ends = [min(count * step, size) for count in accumulate(counts, initial=0)]
    return tuple(with_span(whole, axis, span) for span in pairwise(ends))


def core_parts(graph: Graph, target: Target, cores: CoreGroup = ()) -> Parts:
    """A region as a group of cores (empty: all) shares it where its values lie densely."""
    calls = split(0, graph, *dense_views(graph), target, cores)
    return tuple((call.graph, call.core) for call in calls)


def cores_cycles(graph: Graph, target: Target, choice: Choice = MappingProxyType({}), cores: CoreGroup = ()) -> int:
    """Cycles of a region that a group of cores (empty: all) shares."""
    return shared_cycles(core_parts(graph, target, cores), target, choice)


def dense_views(graph: Graph) -> tuple[dict[str, View], View]:
    """Operands and result of a region that lie densely, each in a buffer of its own."""
    (result,) = graph.outputs
    operands = {value: dense_view(value, graph.types[value]) for value in graph.inputs}
    return operands, dense_view(result, graph.types[result])


def workers_first(
    statements: Sequence[Statement], regions: Sequence[Region], cores: Mapping[str, CoreGroup]
) -> list[Statement]:
    """The statements of a pipeline's step with the stage of core 0 last, so that the others have begun by then: their
    first layers, then their second ones, and so on."""
    layers: list[tuple[tuple[bool, int], list[Statement]]] = []
    depths = Counter[CoreGroup]()
    for statement in statements:
        if isinstance(statement, Begin):
            group = cores[regions[statement.layer].output]
            layers.append(((0 in group, depths[group]), []))
            depths[group] += 1
        layers[-1][1].append(statement)
    return [statement for _, some in sorted(layers, key=lambda layer: layer[0]) for statement in some]


def stretch_axis(kind: TensorType) -> tuple[int, int]:
    """The axis along which parts of a row-major value lie densely, and the step at which they begin where kernels
    take them."""
    axis = next((axis for axis, size in enumerate(kind.shape) if size > 1), 0)
    nbytes = prod(kind.shape[axis + 1 :]) * kind.dtype.numpy.itemsize
    return axis, ALIGNMENT // gcd(ALIGNMENT, nbytes)


def _parts(whole: Call, boxes: Sequence[Box], cores: Sequence[int]) -> tuple[Call, ...] | None:
    """A call for each box; None where the region cannot be computed so."""
    try:
        calls = tuple(part(whole, box, core) for box, core in zip(boxes, cores, strict=True))
    except ValueError:
        return None
    for call in calls:  # values have to lie as kernels take them, and there has to be a kernel
        views = (*call.operands.values(), call.result)
        placed = all(view.is_dense and view.offset % ALIGNMENT == 0 for view in views)
        if not placed or kernels.supports(call.graph) is not None:
            return None
    return calls


def part(whole: Call, box: Box, core: int) -> Call:
    """The call that computes a box of another one's result.

    Raises:
        ValueError: the region cannot be computed in such parts.
    """
    cut = crop.part(whole.graph, {whole.graph.outputs[0]: box})
    operands: dict[str, View] = {}
    nodes: list[Node] = []
    names: dict[str, str] = {}
    for node in cut.nodes:
        read = node.operator.box_read
        if read is not None and not node.operator.skips and node.inputs[0] in whole.operands:
            operands[node.output] = whole.operands[node.inputs[0]].part(read)
            names[node.output] = node.inputs[0]
        else:
            nodes.append(node)
    values = {name for node in nodes for name in node.inputs}
    operands |= {name: view for name, view in whole.operands.items() if name in values}
    graph = replace(cut, inputs=tuple(operands), nodes=tuple(nodes))
    single = Counter((*names.values(), *values))  # a part has the name of its whole, of which nothing else is read
    names = {name: value for name, value in names.items() if single[value] == 1}
    types = {name: kind for name, kind in cut.types.items() if name not in names.values()}
    operands = {names.get(name, name): view for name, view in operands.items()}
    return Call(whole.layer, renamed(replace(graph, types=types), names), operands, whole.result.part(box), core)
