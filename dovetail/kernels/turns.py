"""How often each part of a kernel's loops runs. With the cycles of each part (`Core.kernels`) that is what the kernel
takes; `scripts/kernel_cycles.py` measures those.

The parts are those of the kernels as they are written: register blocks, pixels at borders and pixels inside, rows of
taps, ends of sums. Layers that are made small instead (`generate_all`, `little`) take longer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import gcd, prod
from types import MappingProxyType

from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.arithmetic import Clip, Requantize
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Concat, Pad, Slice, Transpose
from dovetail.ir.operators.reduction import AveragePool2d, MaxPool2d, SumPool2d
from dovetail.ir.requantisation.pairs import sum_chains
from dovetail.ir.types import Box, DType, box_shape
from dovetail.kernels.c import channel_lanes
from dovetail.kernels.convolution import (
    clamped_run,
    one_run,
    ordered,
    register_block,
    run_length,
    turn_elements,
    written_out,
)
from dovetail.kernels.depthwise import ColumnGroup, column_groups
from dovetail.kernels.elements import Walk, broadcast_walk, merge, row_major
from dovetail.kernels.kernel import UNROLL, CoreTraits, KernelScope, UnsupportedRegion
from dovetail.kernels.movement import SHORT
from dovetail.kernels.patches import Patches, patches_of
from dovetail.kernels.planes import Planes, planes_of
from dovetail.kernels.raised import RaisedNest
from dovetail.kernels.region import RegionParts, kernel, split
from dovetail.kernels.scheduled.knobs import turns_of
from dovetail.kernels.scheduled.write import knobs_of
from dovetail.kernels.sums import Products, products_of
from dovetail.kernels.window import COLUMN, ROW, WindowGeometry, window_of
from dovetail.target.pattern import Choice

Turns = Mapping[str, float]
"""Part of a kernel -> how often it runs. A part is named "family.part"; what ends a sum or computes an element by
itself "end.operator"."""
_RAISED = "end.raised"
"""The part that stands for the requantisation of `Raised` sums."""
TURNS: dict[type[Operator], Callable[[RegionParts, CoreTraits, Choice], Turns]] = {}
"""What counts the loops of each anchor; others are counted by the elements they read and make."""


def turns(graph: Graph, core: CoreTraits, choice: Choice = MappingProxyType({})) -> Turns:
    """How often the parts of a region's kernel run on a core, with what is chosen of its knobs."""
    found: dict[str, float] = defaultdict(float)
    try:
        region = split(graph)
    except UnsupportedRegion:  # there is no such kernel; its operators then count one by one
        for node in graph.nodes:
            _add(found, {f"{type(node.operator).__name__}.element": graph.types[node.output].elements})
        return found
    if region.anchor is None and sum_chains(graph, region.tree):  # one line computes the sum, `add_bytes` or as it is
        return {"line.element": graph.types[graph.outputs[0]].elements, "line.call": 1}
    if region.anchor is None:
        _add(found, {"pointwise.element": graph.types[graph.outputs[0]].elements, "pointwise.call": 1})
    else:
        kinds = type(region.anchor.operator).__mro__
        count = next((TURNS[kind] for kind in kinds if kind in TURNS), _by_elements)
        try:
            _add(found, count(region, core, choice))
        except UnsupportedRegion:
            _add(found, _by_elements(region, core, choice))
    for node in region.tree[1:] if _RAISED in found else region.tree:
        _add(found, {_ending(graph, node): graph.types[node.output].elements})
    return found


UNKNOWN = {"element": 10.0, "result": 10.0, "product": 4.0, "tap": 4.0}
"""Core cycles of what takes its time in any kernel, where nobody measured the kernel."""


def rate(part: str, rates: Mapping[str, float]) -> float:
    """Cycles of a part, by those that were measured. What is not among them takes none where others of its family are,
    and else what is taken for granted of any kernel."""
    if part in rates:
        return rates[part]
    family, _, name = part.partition(".")
    if family == "end":
        return UNKNOWN["element"]
    return 0.0 if any(known.startswith(f"{family}.") for known in rates) else UNKNOWN.get(name, 0.0)


def _add(found: dict[str, float], more: Turns) -> None:
    for part, count in more.items():
        found[part] += count


def _ending(graph: Graph, node: Node) -> str:
    """The part that is one pointwise operator on an element: a requantisation by the function it takes."""
    operator = node.operator
    if not isinstance(operator, Requantize):
        return f"end.{type(operator).__name__}"
    users = [user.operator for user in graph.users()[node.output]]
    rectified = users and all(isinstance(user, Clip) and user.low >= operator.output_zero_point for user in users)
    shift = graph.constants.get(node.inputs[2])
    if shift is not None and not shift.any():
        return "end.raise"
    wide = "wide_" if graph.types[node.inputs[0]].dtype.bits > 32 else ""
    kind = "any" if shift is None or shift.max() >= 0 else "one" if shift.size == 1 else "each"
    return f"end.{wide}{operator.rounding.value}_{kind}{'_rectified' if rectified else ''}"


def _by_elements(region: RegionParts, core: CoreTraits, choice: Choice) -> Turns:
    """Of kernels without a count of their own: elements read and made, by the width of what is read."""
    name = f"{type(region.node.operator).__name__}{region.source_dtype.bits if region.node.inputs else ''}"
    kinds = [region.graph.types[value] for value in region.node.inputs]
    taken, products = kinds[0].elements if kinds else 0, region.node.operator.macs(kinds)
    found = {"element": region.result.elements, "read": taken, "product": products, "call": 1}
    return {f"{name}.{part}": float(count) for part, count in found.items()}


def _inside(window: WindowGeometry, axis: int) -> list[int]:
    """The taps inside the image, for each output along an axis."""
    stride, dilation, before = window.stride[axis], window.dilation[axis], window.before[axis]
    starts = [place * stride - before for place in range(window.outputs[axis])]
    return [
        sum(0 <= start + tap * dilation < window.size[axis] for tap in range(window.kernel[axis])) for start in starts
    ]


@kernel(Conv2d, FullyConnected, table=TURNS)
def _sums(region: RegionParts, core: CoreTraits, choice: Choice) -> Turns:
    products = products_of(region, KernelScope(region.graph))
    if core.instructions:
        scope = KernelScope(region.graph, room=core.room, choice=choice)
        try:
            return _in_patches(patches_of(region, scope, products, core))
        except UnsupportedRegion:
            pass
        try:
            return _scheduled(region, products, core)
        except UnsupportedRegion:
            pass
    return _blocked(products, core, choice)


def _blocked(products: Products, core: CoreTraits, choice: Choice = MappingProxyType({})) -> Turns:
    """Sums of products in register blocks: neighbouring pixels inside the image together, all others one by one.

    Of those there are three kinds: at a border, in a function that layers share, with taps clamped to the image; so in
    the layer's own function where it computes all pixels alone; and left over beside blocks, all their taps inside.
    """
    window, outputs, depth = products.window, len(products.weights), products.weights.shape[3]
    share = outputs // products.groups
    (left, right), (top, bottom) = window.inside(COLUMN), window.inside(ROW)
    columns, rows = right - left, bottom - top
    pixels = window.outputs[ROW] * window.outputs[COLUMN]
    together, lanes = register_block(products, core.accumulators, 1, choice=choice)
    blocks, taps = -(-share // lanes) * products.groups, prod(window.kernel) * depth
    fast = columns // together * together * rows
    single = ("border_" if together > 1 else "alone_") if window.any_padded else "left_"
    if together == 1:  # there is one function for all pixels
        fast = 0 if window.any_padded else pixels
    inside, across = _inside(window, ROW), _inside(window, COLUMN)
    slow, slow_taps = pixels - fast, sum(inside) * sum(across) * depth - fast * taps
    slow_rows, groups = sum(inside) * len(across) - fast * window.kernel[ROW], fast / together
    found = {"group": groups, f"{single}pixel": slow if window.any_padded else 0}
    for name, width, number, times, kernel_rows in (
        ("", together, groups * taps, groups, groups * window.kernel[ROW]),
        (single, 1, slow_taps, slow, slow_rows),
    ):
        looped = name == "alone_" and _looped_ends(lanes, blocks)
        ends = "ragged_" if outputs % lanes else "looped_" if looped else ""
        found[f"{name}{ends}result"] = times * width * outputs
        by_element = bool(name) and (window.padded(COLUMN) or together > 1)
        step, starts, per_element = _steps(products, core.joined, (width, lanes), choice, by_element)
        sums = lanes * width
        own = {
            "product": number * sums,
            "load": number * (lanes + width),
            "turn": number * per_element,
            "row": kernel_rows * starts if window.kernel != (1, 1) else 0,
            "block": times,
            "sum": times * sums,
            "crowded": number * max(sums - core.accumulators, 0),
        }
        if name == "left_":  # so few that what begins a row of theirs shall not be fitted by itself
            found["row"] += own.pop("row") * blocks
        else:
            own["ordered"] = number if ordered(sums, step) else 0
            own["ordered_product"] = own["ordered"] * sums
            own[f"step_{width}x{lanes}"] = number  # what a compiler makes of a block of these sums beyond all that
        found |= {f"{name}{part}": count * blocks for part, count in own.items()}
    return {**{f"sum.{part}": float(count * window.batch) for part, count in found.items()}, "sum.call": 1}


_ENDS = 8
"""Sums of a pixel that a compiler ends without a loop, at most."""


def _looped_ends(lanes: int, blocks: int) -> bool:
    """Whether a compiler keeps the loop that ends the sums of a pixel, which then go through memory: of many, and
    sooner where there are several blocks of channels, as the places of constants are then computed."""
    return lanes > _ENDS or (lanes == _ENDS and blocks > 1)


def _steps(
    products: Products, joined: int, block: tuple[int, int], choice: Choice, by_element: bool
) -> tuple[int, int, float]:
    """Input elements of a turn of the innermost loop, such loops to a kernel row, and turns at last to an element: none
    where a compiler writes short loops of few products out, as the kernel does not keep it from that.

    Args:
        products: of the layer.
        joined: `CoreTraits.joined`.
        block: pixels and channels.
        choice: of the kernel's knobs.
        by_element: whether a loop over the taps of a row takes an element a turn, as the function of single pixels does
            that layers share, and any whose taps are clamped to the image.
    """
    window, merged = products.window, one_run(products.window, products.groups)
    length, starts = run_length(products), 1 if merged else window.kernel[COLUMN]
    clamped = by_element and clamped_run(window, products.groups)
    step = 1 if merged and by_element else turn_elements(length, prod(block), int(choice.get(UNROLL, 0)))
    if not clamped and (step == length or written_out(length, step, *block)):
        return step, starts, 0.0
    if ordered(prod(block), step) or not joined:
        return step, starts, 1 / step
    instructions = step * (sum(block) + 2 * prod(block)) + 1
    return step, starts, _turns_of_joined(length // step, instructions, joined, clamped) / length


_JOINED_AT_RUN_TIME = 4
"""Turns that a compiler makes one where it does not know how many there are."""


def _turns_of_joined(turns: int, instructions: int, most: int, unknown: bool) -> float:
    """Turns that a compiler leaves of a loop, of so many instructions each, by making several one: as many as divide
    them within `most` instructions; where it does not know how many there are, or nothing divides them, a power of two,
    and those left over one by one."""
    counts = [count for count in range(2, turns + 1) if turns % count == 0 and count * instructions <= most]
    if counts and not unknown:
        return turns // counts[-1] if counts[-1] < turns else 0
    count = next((count for count in (_JOINED_AT_RUN_TIME, 2) if count * instructions <= most), 1)
    return turns // count + turns % count


def _scheduled(region: RegionParts, products: Products, core: CoreTraits) -> Turns:
    """Sums of products with an instruction of the core; raises Unsupported where none does."""
    sizes, inside, knobs = knobs_of(region, products, core)
    found, several = turns_of(knobs, sizes, inside), -(-sizes.taps // knobs.vector) > knobs.unroll
    if several and not knobs.straight:  # sums leave their registers between turns
        found["kept"] = found["product"] / knobs.unroll
    kind = "staged" if knobs.staging else "straight" if knobs.straight else "instruction"
    return {**{f"{kind}.{part}": count for part, count in found.items()}, f"{kind}.kernel": 1}


def _in_patches(nest: Patches) -> Turns:
    """Sums of products of pairs: columns widened, then blocks of pixels and channels."""
    layout, outputs, rows = nest.layout, nest.outputs, nest.window.outputs[ROW]
    channels = -(-outputs // nest.channels)
    found: dict[str, float] = defaultdict(float)
    kind = "wide" if nest.by_words else "narrow"
    for times, count in nest.shares:
        columns = layout.count(count) * rows * times
        widened = {"row": columns * nest.window.kernel[ROW], kind: columns * layout.taps, "share": rows * times}
        _add(found, widened)
        for blocks, pixels in nest.parts(count):
            number = blocks * rows * times * channels
            turns_of_block, rest = divmod(layout.steps, nest.unroll)
            straight = nest.written_out(pixels)  # places are numbers then, and no pointer moves
            counts = {
                "product": number * layout.steps * pixels * nest.channels,
                "load": number * layout.steps * (pixels + nest.channels),
                "step": number * layout.steps,
                "turn": number * (turns_of_block if turns_of_block > 1 else 0),
                "rest": 0 if straight else number * min(rest, 1),
                f"block_{pixels}x{nest.channels}": 0 if straight else number,
                "sum": number * pixels * nest.channels,
                "straight_group" if straight else "group": blocks * rows * times,
            }
            _add(found, counts)
    return {**{f"patches.{part}": float(count) for part, count in found.items()}, **_raised(nest), "patches.call": 1}


@kernel(DepthwiseConv2d, table=TURNS)
def _depthwise(region: RegionParts, core: CoreTraits, choice: Choice) -> Turns:
    products = products_of(region, KernelScope(region.graph), merged=False)
    if core.instructions:
        try:
            return _in_planes(planes_of(region, KernelScope(region.graph, room=core.room), products, core.instructions))
        except UnsupportedRegion:
            pass
    groups = column_groups(products.window, core.accumulators) if products.channelwise else []
    return _by_groups(products.window, groups) if groups else _blocked(products, core)


def _by_groups(window: WindowGeometry, groups: list[ColumnGroup]) -> Turns:
    """Depthwise: neighbouring columns together, channel by channel."""
    inside, channels = _inside(window, ROW), window.channels * window.batch
    (top, bottom), rows = window.inside(ROW), sum(inside)
    name = "depthwise" if window.any_padded else "open_depthwise"
    found: dict[str, float] = defaultdict(float)
    for group in groups:
        places = {
            pixel * window.stride[COLUMN] + tap * window.dilation[COLUMN]
            for pixel, taps in enumerate(group.taps)
            for tap in taps
        }
        counts = {
            "product": sum(map(len, group.taps)) * rows,
            "load": len(places) * rows,
            "weight": window.kernel[COLUMN] * rows,
            "row": rows,
            "edge_row": sum(inside[:top]) + sum(inside[bottom:]),
            "group": len(inside),
            "result": len(inside) * group.pixels,
        }
        _add(found, {f"{name}.{part}": float(count * channels) for part, count in counts.items()})
        _add(found, {f"{name}.turn": len(inside) * window.batch})
    return {**found, f"{name}.call": 1}


def _in_planes(nest: Planes) -> Turns:
    """Depthwise with products of pairs: some channels copied into planes, then all pixels alike."""
    window, channels = nest.window, nest.window.channels
    rows, columns = window.outputs
    bands, lines = -(-rows // nest.band), nest.lines(nest.band)
    pairs = len(nest.reads(4)) / 4 * window.kernel[ROW]
    counts = {
        "filled": channels * bands * lines * nest.width,
        "line": channels * bands * lines,
        "product": channels * rows * columns * pairs,
        "row": channels * rows,
        "group": channels * rows * -(-columns // 4),
        "result": channels * rows * columns,
        "weight": channels * rows * -(-columns // 4) * len(nest.taps) * window.kernel[ROW],
        "channel": channels * bands,
    }
    return {**{f"planes.{part}": float(count) for part, count in counts.items()}, **_raised(nest), "planes.call": 1}


def _raised(nest: RaisedNest) -> Turns:
    """The requantisation of raised sums, if they are."""
    return {_RAISED: float(nest.region.result.elements)} if nest.raised else {}


@kernel(MaxPool2d, AveragePool2d, SumPool2d, table=TURNS)
def _pool(region: RegionParts, core: CoreTraits, choice: Choice) -> Turns:
    operator = region.node.operator
    assert isinstance(operator, MaxPool2d | AveragePool2d | SumPool2d)
    window = window_of(region, operator.kernel, operator.stride, own=operator.padding)
    lanes = channel_lanes(window.channels, 8)
    pixels, blocks = prod(window.outputs) * window.batch, window.channels // lanes
    inside, across = sum(_inside(window, ROW)), _inside(window, COLUMN)
    taps = inside * sum(across) * window.batch
    counts = {
        "tap": taps * window.channels,
        "turn": taps * blocks,
        "row": inside * len(across) * window.batch * blocks,
        "block": pixels * blocks,
        "result": pixels * window.channels,
        "pixel": pixels,
        "call": 1,
    }
    kind = "Padded" if window.any_padded else "Words" if region.source_dtype is DType.UINT8 else ""
    family = AveragePool2d if isinstance(operator, SumPool2d) and not kind else type(operator)  # the same loops
    return {f"{family.__name__}{kind}.{part}": float(count) for part, count in counts.items()}


@kernel(Concat, Pad, Slice, Transpose, table=TURNS)
def _moved(region: RegionParts, core: CoreTraits, choice: Choice) -> Turns:
    """Runs of neighbouring bytes, word by word where all begin with one; short ones, and what is computed from, element
    by element."""
    result, size, found = region.result, region.result.dtype.numpy.itemsize, defaultdict[str, float](float)
    found["call"] = 1
    if isinstance(region.node.operator, Pad):
        found["filled"] = result.elements * size
    for box, source in _pieces(region):
        loops = merge(box_shape(box), walks := (broadcast_walk(result.shape, result.shape, box), source))
        count, strides = loops.pop() if loops else (1, (1, 1))
        run, rows = count * size, prod(times for times, _ in loops)
        if region.tree or strides != (1, 1) or run < SHORT:
            _add(found, {"element" if strides == (1, 1) else "strided": rows * count, "row": rows})
        elif length := next((name for name, most in _WRITTEN_OUT.items() if count <= most), ""):
            _add(found, {f"{length}_run": rows, f"{length}_byte": rows * run})
        else:
            alike = _alike([size * (walks[0].start - source.start), *(size * (to - at) for _, (to, at) in loops)])
            _add(found, {"run": rows, "byte": rows * run * alike, "odd_byte": rows * run * (1 - alike)})
            found["tail"] += rows * (run % _LINE)
    return {f"move.{part}": float(number) for part, number in found.items()}


_WRITTEN_OUT = {"short": 8, "middle": 16}
"""Lengths of a run, in elements, up to which one compiler or another writes a copy of known size out."""
_LINE = 16
"""Bytes that a turn of memcpy takes."""


def _alike(distances: Sequence[int]) -> float:
    """The share of runs that begin at the same place in a word as where they go: how far the first is from there, and
    how much farther each turn of the loops around it; bytes."""
    step = gcd(4, *distances[1:])
    return step / 4 if distances[0] % step == 0 else 0.0


def _pieces(region: RegionParts) -> Iterator[tuple[Box, Walk]]:
    """The boxes of a moved result, and how each one's operand is walked."""
    operator, kinds = region.node.operator, [region.graph.types[name] for name in region.node.inputs]
    if isinstance(operator, Pad):
        shape = kinds[0].shape
        yield tuple((a, a + n) for a, n in zip(operator.before, shape, strict=True)), Walk(row_major(shape))
        return
    for piece in operator.pieces(kinds) or ():
        dense = row_major(kinds[piece.operand].shape)
        start = sum(first * step for first, step in zip(piece.start, dense, strict=True)) if piece.start else 0
        yield piece.box, Walk(tuple(step * dense[axis] for axis, step in piece.walks) or dense, start)
