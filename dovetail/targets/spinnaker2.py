"""SpiNNaker2: boards of 48 chips of 152 elements, each a Cortex-M4F with 128 KiB and a 16x4 array of 8-bit MACs.

Facts and their sources: hardware/spinnaker2.md. Chosen here, for want of a public number, and marked below: the shape
of the grid of 38 routers, the rate of links between chips, and the clocks of a hop.
"""

from __future__ import annotations

import numpy as np

from dovetail.target import Core, CoreClocks, Count, Grid, MacArray, Memory, Mesh, Policy, Rates, Target, Work
from dovetail.targets.cortex_m import cortex_m


def _up(value: Count | int, step: int) -> Count:
    return np.asarray(-(-np.asarray(value) // step) * step)


def compute(work: Work) -> Count:
    """Clocks of the MAC array alone (fact sheet, section 3): conv ceil(Wo/16) Ho fW fH Ci ceil(Co/4) s^2, dense
    inN ceil(outN/16). A channel of a depthwise layer is a convolution of one channel into one."""
    if work.kind == "dense":
        return np.asarray(work.inputs * (_up(work.outputs, 16) // 16))
    taps = work.kernel[0] * work.kernel[1] * work.stride[0] * work.stride[1]
    rows = _up(work.width, 16) // 16 * work.height * taps
    return np.asarray(rows * (work.outputs if work.kind == "depthwise" else work.inputs * (_up(work.outputs, 4) // 4)))


def clocks(work: Work) -> Count:
    """`compute`, and the results written: ceil(w/4) c clocks per round of w columns and c channels."""
    if work.kind == "dense":
        return compute(work) + _up(work.outputs, 4)
    full, rest = work.width // 16, work.width % 16
    return np.asarray(compute(work) + (full * 4 + _up(rest, 4) // 4) * work.height * work.outputs)


def operand(work: Work) -> Count:
    """Bytes of the operand: ceil16(W) H C of an image, four times a vector."""
    if work.kind == "dense":
        return _up(4 * work.inputs, 16)
    channels = work.outputs if work.kind == "depthwise" else work.inputs
    return _up(work.in_width, 16) * work.in_height * channels


def weights(work: Work) -> Count:
    """Bytes of the weights: fW fH Ci ceil4(Co), or ceil4(in) ceil16(out)."""
    if work.kind == "dense":
        return _up(work.inputs, 4) * _up(work.outputs, 16)
    taps = work.kernel[0] * work.kernel[1]
    inputs = 1 if work.kind == "depthwise" else work.inputs
    return _up(taps * inputs * _up(work.outputs, 4), 16)


def row_sums(work: Work) -> Count:
    """Bytes of a row of 32-bit results: ceil16(4 Wo) Co, or four times a dense layer's."""
    if work.kind == "dense":
        return 16 * _up(work.outputs, 16)
    return _up(4 * work.width, 16) * work.outputs


ARRAY = MacArray(
    16, 4, clocks, compute, operand, weights, row_sums, dense_outputs=16, place="dovetail.targets.spinnaker2:ARRAY"
)

BOARD = tuple((x, y) for y in range(8) for x in range(8) if -3 <= x - y <= 4)
"""The 48 chips of a board, a hexagon with three pairs of sides, as on SpiNN-5 boards."""
ORIGINS = tuple(
    (x + 12 * column, y + 12 * row) for row in range(2) for column in range(4) for x, y in ((0, 0), (4, 8), (8, 4))
)
"""24 boards: three to a square of 12x12 chips."""

MESH = Mesh(
    array=ARRAY,
    # 38 routers of 4 elements: 8x5 without two (the shape is chosen here)
    grid=Grid(8, 5, 4, without=((3, 2), (4, 2)), gate=(3, 2), dram=(4, 2)),
    # elements at 250 MHz; NoC 500 MHz of 16 bytes; DRAM 4 x 16 bytes per 2 clocks; 8 Gbit/s per link is chosen here
    rates=Rates(port=16, noc=32, link=4, dram=32),
    board=BOARD,
    origins=ORIGINS,
    directions=((1, 0), (1, 1), (0, 1), (-1, 0), (-1, -1), (0, -1)),
    clock=250e6,
    usable=0x17000,
    route_entries=16384,
    dram_bytes=1 << 30,
    core=CoreClocks(  # by scripts/mesh_core.py
        **{"read": 2.9, "moved": 0.7, "compared": 5.3, "averaged": 1.5, "result": 7.6, "divided": 7.0, "row": 36.3},
        **{"reordered": 2.8, "quantised": 10.2, "floating": 437.9, "dequantised": 51.9},
        **{"finished": 8.5, "gaining": 6.3, "without_lines": 18.6, "passed": 6.0, "joined": 2.0, "added": 6.8},
        **{"group": 17.8, "turn": 63.9, "handling": 160.0, "after": 60.3},
        # of sections, fitted to executed ones (docs/mesh.md)
        **{"section": 316.0, "section_go": 37.3, "padding_row": 48.0, "padding": 0.36},
    ),
)
"""A board. Links that would close rings are not used, so that routes need no second channel for them."""

TARGET = Target(
    name="spinnaker2",
    sentence="boards of 48 chips of 152 Cortex-M4F with 128 KiB and a 16x4 MAC array; one element, or a mesh of them",
    core=Core("cortex-m4", stack=2048, functions=cortex_m(4).core.functions),
    # the element's memory from 0x8100 on is free for programs; begun at a page
    memories=(Memory("sram", base=0x9000, size=0x17000, alignment=16),),
    code="sram",
    values="sram",
    policies=(Policy("exact", "the core requantises as TFLite Micro does", ()),),
    mesh=MESH,
)
