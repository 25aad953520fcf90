"""Tilings of a region: which there are, and what one costs, in closed form, to tell the good ones from the bad.

Compute and bus work side by side, so a region takes the longer of the two, plus what comes before the first product and
after the last. The figures are checked against the device model in tests/test_vta_cost.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from math import prod

from dovetail.ir.graph import Graph
from dovetail.ir.operators.arithmetic import ScaleShift, scale_digits
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Pad
from dovetail.ir.operators.reduction import MaxPool2d
from dovetail.loops import bias_rows, shifts
from dovetail.records import Record
from dovetail.target import Best, Macs
from dovetail.targets.vta.config import VtaConfig, macs_per_cycle
from dovetail.targets.vta.mapping import depth, joined, shared_taps
from dovetail.targets.vta.writer import VtaLoop, micro

STREAMING = 8
"""Slots for data that cannot stay as a whole: more would only need more micro-operations."""


class VtaTiling(Record):
    """How a region's result is cut: a tile is computed from start to end before the next one."""

    rows: int
    columns: int
    blocks: int
    """Channel blocks."""
    channels_first: bool
    """Whether all channels of a part of the image come before its next part."""
    slots: int = 0
    """Most slots for one name in a memory; 0 for as many as are of use."""


@dataclass(frozen=True)
class RegionShape:
    """Sizes that a region's cost depends on."""

    graph: Graph = field(compare=False, repr=False)
    """The region, or another of the same sizes."""
    rows: int
    columns: int
    out_blocks: int
    in_blocks: int
    """Input blocks summed into one output block."""
    image_blocks: int
    """Blocks of the operand."""
    kernel: tuple[int, int]
    stride: tuple[int, int]
    digits: int
    """Rows of bias digits; 0 for no bias."""
    alu: int
    """ALU steps per output entry."""
    parameters: int
    """Arrays of per-channel scales or shifts."""
    by_block: bool
    """Whether every output block reads only its own input block."""
    pool: bool = False
    parts: int = 0
    """Copies of the sum that shifts and additions multiply it with."""
    size: tuple[int, int] = (0, 0)
    """Rows and columns of the operand."""
    before: tuple[int, int] = (0, 0)
    """Rows and columns of padding before it."""
    differ: int = 0
    """Matrices of a window of which several taps share one; 0 where each has its own."""

    @property
    def taps(self) -> int:
        """Positions of the window."""
        return self.kernel[0] * self.kernel[1]

    @property
    def matrices(self) -> int:
        """Matrices of weights for an output block and an input block."""
        return self.differ or self.taps


def shape(region: Graph, config: VtaConfig) -> RegionShape:
    """The sizes of a region that its cost depends on."""
    graph = joined(region)
    x, y = graph.types[graph.inputs[0]].shape, graph.types[graph.outputs[0]].shape
    rows, columns = (y[1], y[2]) if len(y) == 4 else (1, 1)
    blocks, image = -(-y[-1] // config.block), -(-x[-1] // config.block)
    kernel, stride, digits, alu, parameters, parts, differ = (1, 1), (1, 1), 0, 2, 0, 0, 0
    by_block = pool = False
    before = (0, 0)
    for node in graph.nodes:
        operator = node.operator
        if isinstance(operator, Pad):
            before = operator.before[1], operator.before[2]
        if isinstance(operator, Conv2d | DepthwiseConv2d):
            weights = graph.types[node.inputs[1]].shape
            kernel, stride = (weights[1], weights[2]), operator.stride
            by_block, differ = operator.is_channelwise, len({*shared_taps(graph, node)})
        elif isinstance(operator, MaxPool2d):
            kernel, stride, by_block, pool = operator.kernel, operator.stride, True, True
            alu = 1 + kernel[0] * kernel[1]
        elif isinstance(operator, ScaleShift):
            scale, offset, amount = (graph.constants[name] for name in node.inputs[1:])
            digits, added = bias_rows(graph, offset // scale, config.block), offset.any()
            amounts = shifts(amount, config.most_shift)
            parts = 0 if config.multiplies else len(scale_digits(scale) or ())
            scaled = config.multiplies and (scale != 1).any()
            alu += 3 * parts + int(scaled) + len(amounts)
            parameters = parts + sum(
                int((values != values.flat[0]).any()) for values in (scale, *amounts)[not scaled :]
            )
            if added and not digits:
                alu, parameters = alu + 1, parameters + 1
        elif isinstance(operator, FullyConnected):
            rows_of_kernel = depth(graph, config)
            kernel, image = (rows_of_kernel, 1), image // rows_of_kernel
    in_blocks = 1 if by_block else image
    sizes = (rows, columns, blocks, in_blocks, image, kernel, stride)
    size = (x[1], x[2]) if len(x) == 4 else (kernel[0], 1)
    return RegionShape(region, *sizes, digits, alu, parameters, by_block, pool, parts, size, before, differ)


def cycles(s: RegionShape, t: VtaTiling, config: VtaConfig) -> int:
    """Cycles of a region under a tiling.

    A tile's products (entries x (reset + taps x input blocks + digits), and the fill of every instruction) wait for its
    loads, but for those that had slots to go to while the tile before was in the ALU (alu_interval per entry and step).
    What earlier tiles left in the SRAMs is not loaded again; the bus carries the results as well. The first tile waits
    for its first step's loads (`lead`), or after its last loads computes its last step. A pool widens its operand:
    every entry is cleared and multiplied, like a sum.
    """
    down, across, groups = -(-s.rows // t.rows), -(-s.columns // t.columns), -(-s.out_blocks // t.blocks)
    image_tiles = down * across
    blocks = s.out_blocks / groups
    entries = s.rows * s.columns * s.out_blocks / (image_tiles * groups)
    steps, tile = blocks if s.by_block else s.in_blocks, (min(t.rows, s.rows), min(t.columns, s.columns))
    products = entries * _products(s) + config.pipeline_cycles * _instructions(s, tile, config, blocks)
    alu = (entries * config.alu_interval + config.pipeline_cycles) * s.alu
    image, weights = _transfers(s, t, config, blocks)
    out = entries * config.out_element / config.bus_bytes
    room = capacities(s, config)
    # whether two slots of everything fit, so that loads, products and stores overlap
    overlaps = all(need <= room[memory] for memory, need in _needs(s, t, 2).items())
    total, lead = 0.0, (image + weights) / max(1, steps)
    if s.pool:
        compute = products + 2 * prod(_average(s, t)) * blocks + alu
        return round(image_tiles * groups * max(compute, image) + image / blocks + out + 3 * config.bus_latency)
    image_again, weights_again = _again(s, t, config, image_tiles, groups)
    for count, first_image, first_weights in (
        (1, True, True),
        (image_tiles - 1, True, False),
        (groups - 1, False, True),
        ((image_tiles - 1) * (groups - 1), False, False),
    ):
        loads = (image if first_image or image_again else 0) + (weights if first_weights or weights_again else 0)
        first = first_image and first_weights
        early = 0 if first else min(alu, loads * min(1.0, STREAMING / steps))
        apart = products + alu + loads + out
        busy = max(products + lead, loads + products / max(1, steps)) if first else max(products, loads - early)
        overlapped = max(alu + busy, loads + out)
        total += count * (overlapped if overlaps else apart)
    return round(total + out + 3 * config.bus_latency)


def best(products: Macs, config: VtaConfig) -> Best:
    """The most of a kind of layer: a step multiplies a block of inputs with one of outputs; of a depthwise layer's
    inputs one is of use to an output, or one for each column where several make up a block."""
    block = config.block
    if products.kind != "DepthwiseConv2d":
        return Best(float(macs_per_cycle(config)), "", (block, block, 1, 1))
    rate = config.batch * block * max(1, block // products.outputs)
    return Best(float(rate), f"depthwise: one of {block} inputs is of use to a channel", (1, block, 1, 1))


def floor(s: RegionShape, config: VtaConfig) -> int:
    """Cycles no schedule can do without: every byte once over the bus, or what computing takes under the tiling that
    needs least for it (`least`), whichever takes longer."""
    height = (s.rows - 1) * s.stride[0] + s.kernel[0]
    width = (s.columns - 1) * s.stride[1] + s.kernel[1]
    matrices = s.out_blocks * ((0 if s.pool else s.matrices * s.in_blocks) + s.digits)
    operand = min(height * width, s.rows * s.columns * s.stride[0] * s.stride[1]) * s.image_blocks * config.inp_element
    bus = operand + matrices * config.wgt_element + s.rows * s.columns * s.out_blocks * config.out_element
    bus += s.parameters * s.out_blocks * config.acc_element
    return max(bus // config.bus_bytes, min(least(s, t, config) for t in tilings(s, config) if t.channels_first))


def least(s: RegionShape, t: VtaTiling, config: VtaConfig) -> int:
    """Cycles a tiling cannot do without, however its loads lie beside computing: all products and ALU steps one after
    the other, and the fill of every instruction; before the first product the loads of its operands, but for the time
    in which sums are cleared; after the last step the store of the last tile."""
    axes = ((s.rows, t.rows), (s.columns, t.columns), (s.out_blocks, t.blocks))
    kinds = list(product(*(_parts(extent, size) for extent, size in axes)))
    instructions = sum(
        down * across * often * (_instructions(s, (rows, columns), config, blocks) + s.alu)
        for (down, rows), (across, columns), (often, blocks) in kinds
    )
    entries = s.rows * s.columns * s.out_blocks
    compute = entries * (_products(s) + config.alu_interval * s.alu) + config.pipeline_cycles * instructions
    if s.pool:
        return round(compute)
    height, width = (max(1, size - edge) for size, edge in zip(_image(s, t), s.before, strict=True))
    image = min(height, s.size[0]) * -(-min(width, s.size[1]) * config.inp_element // config.bus_bytes)
    first, last = (prod(part[1] for part in kinds[place]) for place in (0, -1))
    weights = s.matrices * (1 if s.by_block else kinds[0][2][1]) * config.wgt_element / config.bus_bytes
    loaded = max(0, 2 * config.bus_latency + image + weights - first - config.pipeline_cycles)
    return round(loaded + compute + config.bus_latency + last * config.out_element / config.bus_bytes)


def _products(s: RegionShape) -> int:
    """GEMM cycles of one output entry, or the ALU's of a pool's zero."""
    return 1 + (0 if s.pool else s.taps * s.in_blocks + s.digits + s.parts)


def _parts(extent: int, size: int) -> list[tuple[int, int]]:
    """How often each size comes along an axis that is cut: the whole ones, and the last if it is smaller."""
    count, rest = divmod(extent, min(size, extent))
    return [(count, min(size, extent)), *([(1, rest)] if rest else [])]


def _instructions(s: RegionShape, tile: tuple[int, int], config: VtaConfig, blocks: float) -> float:
    """GEMM instructions of a tile of so many rows, columns and blocks: a reset, those of each step, and one for the
    digits."""
    if s.pool:
        return 1.0
    return 1 + (blocks if s.by_block else s.in_blocks) * _apart(s, tile, config, blocks) + min(s.digits, 1)


def _apart(s: RegionShape, tile: tuple[int, int], config: VtaConfig, blocks: float) -> int:
    """Instructions of a step, whose successive products must write different sums: one where a block follows another,
    else as many as the pixels and taps of a block need."""
    if s.taps == 1 or (blocks > 1 and not s.by_block):
        return 1
    if s.differ:
        return s.taps
    rows, columns = tile
    width = (columns - 1) * s.stride[1] + s.kernel[1]
    pixels = (VtaLoop(rows, (columns, s.stride[0] * width, 0)), VtaLoop(columns, (1, s.stride[1], 0)))
    taps = (VtaLoop(s.kernel[0], (0, width, s.kernel[1])), VtaLoop(s.kernel[1], (0, 1, 1)))
    return len(micro((*pixels, *taps), config.uop_entries, config.pipeline_cycles, True).starts)


def _transfers(s: RegionShape, t: VtaTiling, config: VtaConfig, blocks: float) -> tuple[float, float]:
    """Cycles of the load queue for an average tile's operand and weights: a load waits, then moves its bytes."""
    height, width = _average(s, t)
    row = -(-width * config.inp_element // config.bus_bytes)
    wait = config.bus_latency
    loads = blocks if s.by_block else s.image_blocks
    matrices = blocks * ((0 if s.pool else s.matrices * s.in_blocks) + s.digits)
    return loads * (height * row + wait), loads * wait + matrices * config.wgt_element / config.bus_bytes


def _average(s: RegionShape, t: VtaTiling) -> tuple[float, float]:
    """Rows and columns of the operand an average tile reads, padding included."""
    axes = zip((s.rows, s.columns), (t.rows, t.columns), s.stride, s.kernel, strict=True)
    height, width = ((extent / -(-extent // tile) - 1) * stride + kernel for extent, tile, stride, kernel in axes)
    return height, width


def _again(s: RegionShape, t: VtaTiling, config: VtaConfig, image_tiles: int, groups: int) -> tuple[bool, bool]:
    """Whether a tile loads its part of the image again for another group of channels, and its weights for another part
    of the image."""
    height, width = _image(s, t)
    room = capacities(s, config)
    per_step = s.matrices * (1 if s.by_block else min(t.blocks, s.out_blocks))
    steps = min(t.blocks, s.out_blocks) if s.by_block else s.in_blocks

    def stays(every: int, of_a_tile: int, entries: int, memory: str, next_same: bool) -> bool:
        slots = slots_of_use(every, of_a_tile, entries, room[memory])
        return slots >= every or (next_same and slots >= of_a_tile > 1)

    image = stays(image_tiles * s.image_blocks, steps, height * width, "INP", t.channels_first) and not s.by_block
    weights = stays(groups * steps, steps, per_step, "WGT", not t.channels_first)
    return not image, not weights


def _image(s: RegionShape, t: VtaTiling) -> tuple[int, int]:
    """Rows and columns of the operand a tile reads, padding included."""
    height = (min(t.rows, s.rows) - 1) * s.stride[0] + s.kernel[0]
    return height, (min(t.columns, s.columns) - 1) * s.stride[1] + s.kernel[1]


def _needs(s: RegionShape, t: VtaTiling, slots: int) -> dict[str, int]:
    """Entries of each memory for so many slots of everything a tile needs."""
    pixels, blocks = prod(_image(s, t)), min(t.blocks, s.out_blocks)
    sums = min(t.rows, s.rows) * min(t.columns, s.columns) * blocks
    if s.pool:
        return {"INP": slots * pixels, "WGT": 1, "ACC": slots * (sums + pixels * blocks)}
    weights = s.matrices * (1 if s.by_block else blocks)
    return {
        "INP": slots * pixels + s.digits,
        "WGT": slots * weights + blocks * s.digits,
        "ACC": slots * (sums * (1 + s.parts) + blocks * s.parameters),
    }


def problem(s: RegionShape, t: VtaTiling, config: VtaConfig) -> str:
    """Why a tile does not fit the SRAMs; empty when it does."""
    room = capacities(s, config)
    for memory, need in _needs(s, t, 1).items():
        if need > room[memory]:
            tile = f"{t.rows}x{t.columns}x{t.blocks}"
            return f"a tile of {tile} blocks needs {need} entries of {memory}, which has {room[memory]}"
    return ""


def sizes(extent: int) -> tuple[int, ...]:
    """Tile sizes worth trying along an axis: every way to cut it into equal parts but for the last."""
    return tuple(sorted({-(-extent // parts) for parts in range(1, extent + 1)}))


def tilings(s: RegionShape, config: VtaConfig) -> Iterator[VtaTiling]:
    """Every tiling of the default search that fits."""
    for blocks, rows, columns in product(sizes(s.out_blocks), sizes(s.rows), sizes(s.columns)):
        for channels_first in (True, False):
            tiling = VtaTiling(rows, columns, blocks, channels_first)
            if not problem(s, tiling, config):
                yield tiling


def capacities(s: RegionShape, config: VtaConfig) -> dict[str, int]:
    """Entries of the memories a schedule fills. A micro-operation names an ALU's second operand by the bits of INP's
    entries, so that sums which are one lie within the first of them."""
    reach = min(config.acc_entries, config.inp_entries) if s.pool or s.parts else config.acc_entries
    return {"INP": config.inp_entries, "WGT": config.wgt_entries, "ACC": reach}


def slots_of_use(everything: int, of_a_tile: int, entries: int, room: int) -> int:
    """Slots that help: for all contents when they fit, twice those of a tile when these do, else a few to run ahead.

    `everything` and `of_a_tile` are distinct contents over the whole region (0 for what is not loaded) and of a tile,
    `entries` those of a slot, `room` those of the memory.
    """
    share = room * 3 // 4
    if everything == 0:
        return 2
    if everything * entries <= share:
        return everything
    return 2 * of_a_tile if of_a_tile * entries <= share and of_a_tile > 1 else STREAMING
