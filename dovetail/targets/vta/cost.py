"""What a tiling costs, in closed form: the schedules a region may have, and the one taken when nobody has tuned it.

Compute and bus work side by side, so a region takes the longer of the two, plus what comes before the first product and
after the last. The figures are checked against the device model in tests/test_vta_cost.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from dovetail.graph.graph import Graph
from dovetail.loops import digit_rows
from dovetail.operators.arithmetic import ScaleShift
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.operators.pooling import MaxPool2d
from dovetail.targets.vta.config import VtaConfig
from dovetail.targets.vta.constants import depth
from dovetail.targets.vta.lower import STREAMING, Tiling, capacities, slots_of_use


@dataclass(frozen=True)
class Shape:
    """What a region's cost depends on."""

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

    @property
    def taps(self) -> int:
        """Positions of the window."""
        return self.kernel[0] * self.kernel[1]


def shape(graph: Graph, config: VtaConfig) -> Shape:
    """What the cost of a region depends on."""
    x, y = graph.types[graph.inputs[0]].shape, graph.types[graph.outputs[0]].shape
    rows, columns = (y[1], y[2]) if len(y) == 4 else (1, 1)
    blocks, image = -(-y[-1] // config.block), -(-x[-1] // config.block)
    kernel, stride, digits, alu, parameters = (1, 1), (1, 1), 0, 2, 0
    by_block = pool = False
    for node in graph.nodes:
        operator = node.operator
        if isinstance(operator, Conv2d | DepthwiseConv2d):
            weights = graph.types[node.inputs[1]].shape
            kernel, stride = (weights[1], weights[2]), operator.stride
            by_block = isinstance(operator, DepthwiseConv2d)
        elif isinstance(operator, MaxPool2d):
            kernel, stride, by_block, pool = operator.kernel, operator.stride, True, True
            alu = 1 + kernel[0] * kernel[1]
        elif isinstance(operator, ScaleShift):
            scale, offset, amount = (graph.constants[name] for name in node.inputs[1:])
            digits = digit_rows(offset // scale, config.block) if offset.any() else 0
            alu += int((scale != 1).any()) + int(amount.any())
            parameters = sum(int((values != values.flat[0]).any()) for values in (scale, amount))
        elif isinstance(operator, FullyConnected):
            rows_of_kernel = depth(graph, config)
            kernel, image = (rows_of_kernel, 1), image // rows_of_kernel
    in_blocks = 1 if by_block else image
    return Shape(rows, columns, blocks, in_blocks, image, kernel, stride, digits, alu, parameters, by_block, pool)


def cycles(s: Shape, t: Tiling, config: VtaConfig) -> int:
    """Cycles of a region under a tiling.

    A tile's products (entries x (reset + taps x input blocks + digits), and the fill of every instruction) wait for its
    loads, but for those that had slots to go to while the tile before was in the ALU (alu_interval per entry and step).
    What earlier tiles left in the SRAMs is not loaded again; the bus carries the results as well. The first tile waits
    for its first step's loads (`lead`), or after its last loads computes its last step. A pool's loads are the compute
    queue's own, so that only its stores overlap.
    """
    down, across, groups = -(-s.rows // t.rows), -(-s.columns // t.columns), -(-s.out_blocks // t.blocks)
    image_tiles = down * across
    blocks = s.out_blocks / groups
    entries = s.rows * s.columns * s.out_blocks / (image_tiles * groups)
    steps = blocks if s.by_block else s.in_blocks
    products = entries * _products(s) + config.pipeline_cycles * _instructions(s, steps, blocks)
    alu = (entries * config.alu_interval + config.pipeline_cycles) * s.alu
    image, weights = _transfers(s, t, config, blocks)
    out = entries * config.out_element / config.bus_bytes
    total, lead = 0.0, (image + weights) / max(1, steps)
    if s.pool:
        return round(image_tiles * groups * (products + alu + image) + out + 3 * config.bus_latency)
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
        total += count * (overlapped if _overlaps(s, t, config) else apart)
    return round(total + out + 3 * config.bus_latency)


def floor(s: Shape, config: VtaConfig) -> int:
    """Cycles no schedule can do without: all products and ALU steps one after the other, or every byte once over the
    bus, whichever takes longer."""
    entries = s.rows * s.columns * s.out_blocks
    compute = entries * (_products(s) + config.alu_interval * s.alu)
    height = (s.rows - 1) * s.stride[0] + s.kernel[0]
    width = (s.columns - 1) * s.stride[1] + s.kernel[1]
    matrices = s.out_blocks * ((0 if s.pool else s.taps * s.in_blocks) + s.digits)
    operand = min(height * width, s.rows * s.columns * s.stride[0] * s.stride[1]) * s.image_blocks * config.inp_element
    bus = operand + matrices * config.wgt_element + entries * config.out_element
    return max(compute, bus // config.bus_bytes)


def _products(s: Shape) -> int:
    """GEMM cycles of one output entry, or the ALU's of a pool's zero."""
    return 1 + (0 if s.pool else s.taps * s.in_blocks + s.digits)


def _instructions(s: Shape, steps: float, blocks: float) -> float:
    """GEMM instructions of a tile: the taps of a single block are instructions of their own (micro.py)."""
    if s.pool:
        return 1.0
    apart = s.taps if s.by_block or blocks <= 1 else 1
    return 1 + steps * apart + min(s.digits, 1)


def _transfers(s: Shape, t: Tiling, config: VtaConfig, blocks: float) -> tuple[float, float]:
    """Cycles of the load queue for an average tile's operand and weights: a load waits, then moves its bytes."""
    axes = zip((s.rows, s.columns), (t.rows, t.columns), s.stride, s.kernel, strict=True)
    height, width = ((extent / -(-extent // tile) - 1) * stride + kernel for extent, tile, stride, kernel in axes)
    row = -(-width * config.inp_element // config.bus_bytes)
    wait = config.bus_latency
    loads = blocks if s.by_block else s.image_blocks
    matrices = blocks * ((0 if s.pool else s.taps * s.in_blocks) + s.digits)
    return loads * (height * row + wait), loads * wait + matrices * config.wgt_element / config.bus_bytes


def _again(s: Shape, t: Tiling, config: VtaConfig, image_tiles: int, groups: int) -> tuple[bool, bool]:
    """Whether a tile loads its part of the image again for another group of channels, and its weights for another part
    of the image."""
    height, width = _image(s, t)
    room = capacities(config)
    per_step = s.taps * (1 if s.by_block else min(t.blocks, s.out_blocks))
    steps = min(t.blocks, s.out_blocks) if s.by_block else s.in_blocks

    def stays(every: int, of_a_tile: int, entries: int, memory: str, next_same: bool) -> bool:
        slots = slots_of_use(every, of_a_tile, entries, room[memory])
        return slots >= every or (next_same and slots >= of_a_tile > 1)

    image = stays(image_tiles * s.image_blocks, steps, height * width, "INP", t.channels_first) and not s.by_block
    weights = stays(groups * steps, steps, per_step, "WGT", not t.channels_first)
    return not image, not weights


def _image(s: Shape, t: Tiling) -> tuple[int, int]:
    """Rows and columns of the operand a tile reads, padding included."""
    height = (min(t.rows, s.rows) - 1) * s.stride[0] + s.kernel[0]
    return height, (min(t.columns, s.columns) - 1) * s.stride[1] + s.kernel[1]


def _overlaps(s: Shape, t: Tiling, config: VtaConfig) -> bool:
    """Whether two slots of everything fit, so that loads, products and stores overlap."""
    height, width = _image(s, t)
    blocks = min(t.blocks, s.out_blocks)
    sums = min(t.rows, s.rows) * min(t.columns, s.columns) * blocks
    weights = s.taps * (1 if s.by_block else blocks)
    if s.pool:
        return (sums + height * width * blocks) * 2 <= config.acc_entries
    return (
        2 * height * width + s.digits <= config.inp_entries
        and 2 * weights + blocks * s.digits <= config.wgt_entries
        and 2 * (sums + blocks * s.parameters) <= config.acc_entries
    )


def problem(s: Shape, t: Tiling, config: VtaConfig) -> str:
    """Why a tile does not fit the SRAMs; empty when it does."""
    height, width = _image(s, t)
    blocks = min(t.blocks, s.out_blocks)
    sums = min(t.rows, s.rows) * min(t.columns, s.columns) * blocks
    needs = {
        "INP": (0 if s.pool else height * width + s.digits, config.inp_entries),
        "WGT": (0 if s.pool else s.taps * (1 if s.by_block else blocks) + blocks * s.digits, config.wgt_entries),
        "ACC": (sums + blocks * s.parameters + (height * width * blocks if s.pool else 0), config.acc_entries),
    }
    for memory, (need, room) in needs.items():
        if need > room:
            tile = f"{t.rows}x{t.columns}x{t.blocks}"
            return f"a tile of {tile} blocks needs {need} entries of {memory}, which has {room}"
    return ""


def sizes(extent: int) -> tuple[int, ...]:
    """Tile sizes worth trying along an axis: every way to cut it into equal parts but for the last."""
    return tuple(sorted({-(-extent // parts) for parts in range(1, extent + 1)}))


def tilings(s: Shape, config: VtaConfig) -> Iterator[Tiling]:
    """Every tiling of the default search that fits."""
    for blocks in sizes(s.out_blocks):
        for rows in sizes(s.rows):
            for columns in sizes(s.columns):
                for channels_first in (True, False):
                    tiling = Tiling(rows, columns, blocks, channels_first)
                    if not problem(s, tiling, config):
                        yield tiling


@lru_cache(maxsize=1024)
def best(s: Shape, config: VtaConfig) -> Tiling | None:
    """The cheapest tiling, the largest of equals; None when not even one pixel of one block fits."""
    return min(
        tilings(s, config),
        key=lambda t: (cycles(s, t, config), -t.rows, -t.columns, -t.blocks, t.channels_first),
        default=None,
    )
