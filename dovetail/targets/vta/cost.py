"""What a tiling costs, in closed form: the schedules a region may have, and the one taken when nobody has tuned it.

Compute and bus work side by side, so a region takes the longer of the two, plus what comes before the first product and
after the last. The figures are checked against the device model in tests/test_vta_cost.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from dovetail.graph.graph import Graph
from dovetail.operators.arithmetic import ScaleShift
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.operators.movement import Pad
from dovetail.operators.pooling import MaxPool2d
from dovetail.targets.vta.config import VtaConfig
from dovetail.loops import digit_rows
from dovetail.targets.vta.lower import Tiling


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
        else:
            assert not isinstance(operator, FullyConnected) or kernel == (1, 1), operator
    in_blocks = 1 if by_block else image
    return Shape(rows, columns, blocks, in_blocks, image, kernel, stride, digits, alu, parameters, by_block, pool)


def cycles(s: Shape, t: Tiling, config: VtaConfig) -> int:
    """Cycles of a region under a tiling.

    compute: tiles of output x (reset + taps x input blocks + digits + alu_interval x ALU steps) and the fill of every
    instruction; bus: bytes of operands as often as they are loaded, of the result once, over bus_bytes.
    """
    down, across, groups = -(-s.rows // t.rows), -(-s.columns // t.columns), -(-s.out_blocks // t.blocks)
    tiles = down * across * groups
    per_entry = 1 + (0 if s.pool else s.taps * s.in_blocks + s.digits) + config.alu_interval * s.alu
    entries = s.rows * s.columns * s.out_blocks
    steps = s.in_blocks * (min(t.blocks, s.out_blocks) if s.by_block else 1)
    nests = tiles * (1 + s.alu + (0 if s.pool else steps) + min(s.digits, 1))
    if not s.pool and min(t.blocks, s.out_blocks) == 1 or s.by_block:
        nests += tiles * steps * (s.taps - 1)
    compute = entries * per_entry + nests * config.pipeline_cycles
    height, width = _image(s, t)
    stays = _stays(s, t, config)
    block_bytes, matrix_bytes = config.inp_element, config.wgt_element
    plane = height * width * block_bytes
    image_loads = down * across * s.image_blocks * (1 if stays.image or s.by_block else groups)
    matrices = s.out_blocks * s.in_blocks * s.taps * (0 if s.pool else 1)
    weight_loads = matrices * (1 if stays.weights else down * across)
    rows_bytes = height * -(-width * block_bytes // config.bus_bytes)
    bus = image_loads * rows_bytes + (weight_loads * matrix_bytes + entries * block_bytes) // config.bus_bytes
    transfers = image_loads + weight_loads // max(1, s.taps * min(t.blocks, s.out_blocks)) + tiles
    per_step = matrix_bytes * s.taps * (1 if s.by_block else min(t.blocks, s.out_blocks))
    first = 2 * config.bus_latency + (plane + (0 if s.pool else per_step)) // config.bus_bytes
    entries_of_tile = min(t.rows, s.rows) * min(t.columns, s.columns) * min(t.blocks, s.out_blocks)
    last = config.bus_latency + entries_of_tile * block_bytes // config.bus_bytes
    exposed = 0 if _overlaps(s, t, config) else min(compute, bus)
    return max(compute, bus + transfers) + first + last + exposed


@dataclass(frozen=True)
class _Stays:
    image: bool
    weights: bool


def _image(s: Shape, t: Tiling) -> tuple[int, int]:
    """Rows and columns of the operand a tile reads, padding included."""
    height = (min(t.rows, s.rows) - 1) * s.stride[0] + s.kernel[0]
    return height, (min(t.columns, s.columns) - 1) * s.stride[1] + s.kernel[1]


def _stays(s: Shape, t: Tiling, config: VtaConfig) -> _Stays:
    """Which operand is loaded once for all the tiles that follow each other and read it."""
    height, width = _image(s, t)
    image = height * width * s.image_blocks <= config.inp_entries * 3 // 4 and t.channels_first
    matrices = s.out_blocks * s.in_blocks * s.taps
    own = min(t.blocks, s.out_blocks) * s.in_blocks * s.taps
    once = s.rows <= t.rows and s.columns <= t.columns
    weights = once or matrices <= config.wgt_entries * 3 // 4
    weights = weights or (own <= config.wgt_entries * 3 // 4 and not t.channels_first)
    return _Stays(image, weights)


def _overlaps(s: Shape, t: Tiling, config: VtaConfig) -> bool:
    """Whether two slots of everything fit, so that loads, products and stores overlap."""
    height, width = _image(s, t)
    blocks = min(t.blocks, s.out_blocks)
    sums = min(t.rows, s.rows) * min(t.columns, s.columns) * blocks
    weights = s.taps * (1 if s.by_block else blocks)
    if s.pool:
        return (sums + height * width * blocks) * 2 <= config.acc_entries
    return (
        2 * height * width + 1 <= config.inp_entries
        and 2 * weights + blocks * s.digits <= config.wgt_entries
        and 2 * (sums + blocks * s.parameters) <= config.acc_entries
    )


def problem(s: Shape, t: Tiling, config: VtaConfig) -> str:
    """Why a tile does not fit the SRAMs; empty when it does."""
    height, width = _image(s, t)
    blocks = min(t.blocks, s.out_blocks)
    sums = min(t.rows, s.rows) * min(t.columns, s.columns) * blocks
    needs = {
        "INP": (0 if s.pool else height * width + min(s.digits, 1), config.inp_entries),
        "WGT": (0 if s.pool else s.taps * (1 if s.by_block else blocks) + blocks * s.digits, config.wgt_entries),
        "ACC": (sums + blocks * s.parameters + (height * width * blocks if s.pool else 0), config.acc_entries),
    }
    for memory, (need, room) in needs.items():
        if need > room:
            return f"a tile of {t.rows}x{t.columns}x{t.blocks} blocks needs {need} entries of {memory}, which has {room}"
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
    found = min(
        tilings(s, config),
        key=lambda t: (cycles(s, t, config), -t.rows, -t.columns, -t.blocks, t.channels_first),
        default=None,
    )
    return found
