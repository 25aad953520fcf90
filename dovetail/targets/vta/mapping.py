"""How a region's loops and constants are mapped onto VTA: what its instructions mean, which loop goes outside, what is
staged where, and how constants lie.

An instruction's meaning is a loop nest: one entry per way it is used; several are one GEMM or LOAD. Arrays end in the
lanes of one element: [batch, block], of weights [block, block]. Memories are VTA's. The schedules are made once per
kind of region, for all sizes; every step is a rewrite that Exo checks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.files import default_cache
from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.arithmetic import Clip, ScaleShift, scale_digits
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Concat
from dovetail.ir.operators.reduction import MaxPool2d
from dovetail.ir.types import Array
from dovetail.loops import (
    SHIFTS,
    Procedure,
    bias_rows,
    covered,
    digit_rows,
    digits,
    memory,
    ones,
    procedure,
    shifts,
    stored,
)
from dovetail.records import Record
from dovetail.targets.vta.config import VtaConfig

_EXTENTS = dict(b="OCB", h="OH", w="OW", n="BATCH", o="BLOCK", i="BLOCK", d="D", kh="KH", kw="KW")
_LANES = "BATCH, BLOCK"
_MATRIX = "BLOCK, BLOCK"
_SUMS = f"[OCB, OH, OW, {_LANES}]"
_TOTAL = f"total: [i32]{_SUMS} @ ACC"
_HERE = "total[b, h, w, n, o]"
_RESULT = "OCB: size, OH: size, OW: size"
_KERNEL = "KH: size, KW: size"
_WINDOW = f"[DOWN * OH - DOWN + KH, ACROSS * OW - ACROSS + KW, {_LANES}]"
_PIXEL = "DOWN * h + kh, ACROSS * w + kw"


def _meaning(signature: str, loops: str, statement: str) -> str:
    """A procedure of one nest; `loops` are its variables, outermost first."""
    lines = [f"def {signature}:"]
    for depth, name in enumerate(loops.split()):
        lines.append(f"{'    ' * (depth + 1)}for {name} in seq(0, {_EXTENTS[name]}):")
    return "\n".join([*lines, "    " * (len(lines)) + statement])


def _load(name: str, loops: str, filled: str) -> str:
    """A copy of a whole array of int8 into `filled`, "name @ memory"."""
    extents = [_EXTENTS[each] for each in loops.split()]
    sizes = "".join(f"{extent}: size, " for extent in extents if extent not in ("BATCH", "BLOCK"))
    array, _, where = filled.partition(" @ ")
    shape, place = f"[{', '.join(extents)}]", f"[{', '.join(loops.split())}]"
    kind = "i32" if where == "ACC" else "i8"
    signature = f"{name}({sizes}source: [{kind}]{shape} @ DRAM, {array}: [{kind}]{shape} @ {where})"
    return _meaning(signature, loops, f"{array}{place} = source{place}")


def _of_every(name: str, value: str) -> str:
    """An ALU instruction on every element of the result."""
    operand = "number: i32 @ DRAM" if "number" in value else f"parameter: [i32][OCB, {_LANES}] @ ACC"
    return _meaning(f"{name}({_RESULT}, {_TOTAL}, {operand})", "b h w n o", f"{_HERE} = {value}")


_LOADS = {
    "load_image": ("h w n o", "image @ INP"),
    "load_ones": ("d n o", "ones @ INP"),
    "load_weights": ("b kh kw o i", "weights @ WGT"),
    "load_matrices": ("kh kw o i", "weights @ WGT"),
    "load_parameter": ("b n o", "parameter @ ACC"),
    "load_matrix": ("o i", "matrix @ WGT"),
}
_ON_EVERY = {
    "multiply_by": f"{_HERE} * number",
    "add_number": f"{_HERE} + number",
    "shift_by": f"shift_right({_HERE}, number)",
    "at_least": f"most({_HERE}, number)",
    "at_most": f"least({_HERE}, number)",
    "multiply_each": f"{_HERE} * parameter[b, n, o]",
    "shift_each": f"shift_right({_HERE}, parameter[b, n, o])",
    "add_each": f"{_HERE} + parameter[b, n, o]",
    "double_each": f"shift_up({_HERE}, parameter[b, n, o])",
}
MEANINGS: Mapping[str, str] = {
    "load_padded": f"""
def load_padded(H: size, W: size, T: index, B: index, L: index, R: index, source: [i8][H, W, {_LANES}] @ DRAM,
                image: [i8][T + H + B, L + W + R, {_LANES}] @ INP):
    assert T >= 0
    assert B >= 0
    assert L >= 0
    assert R >= 0
    for h in seq(0, T + H + B):
        for w in seq(0, L + W + R):
            for n in seq(0, BATCH):
                for o in seq(0, BLOCK):
                    if h >= T and h < T + H and w >= L and w < L + W:
                        image[h, w, n, o] = source[h - T, w - L, n, o]
                    else:
                        image[h, w, n, o] = 0.0
""",
    **{name: _load(name, *how) for name, how in _LOADS.items()},
    "widen": _meaning(
        f"widen(OH: size, OW: size, total: [i32][OH, OW, {_LANES}] @ ACC, image: [i8][OH, OW, {_LANES}] @ INP, "
        f"matrix: [i8][{_MATRIX}] @ WGT)",
        "h w n o i",
        "total[h, w, n, o] += image[h, w, n, i] * matrix[o, i]",
    ),
    "zero": _meaning(f"zero({_RESULT}, {_TOTAL})", "b h w n o", f"{_HERE} = 0.0"),
    "product": _meaning(
        f"product({_RESULT}, {_KERNEL}, {_TOTAL}, image: [i8]{_WINDOW} @ INP, "
        f"weights: [i8][OCB, KH, KW, {_MATRIX}] @ WGT)",
        "b kh kw h w n o i",
        f"{_HERE} += image[{_PIXEL}, n, i] * weights[b, kh, kw, o, i]",
    ),
    "product_of_block": _meaning(
        f"product_of_block(OH: size, OW: size, {_KERNEL}, total: [i32][OH, OW, {_LANES}] @ ACC, "
        f"image: [i8]{_WINDOW} @ INP, weights: [i8][KH, KW, {_MATRIX}] @ WGT)",
        "kh kw h w n o i",
        f"total[h, w, n, o] += image[{_PIXEL}, n, i] * weights[kh, kw, o, i]",
    ),
    "add_bias": _meaning(
        f"add_bias({_RESULT}, D: size, {_TOTAL}, ones: [i8][D, {_LANES}] @ INP, digits: [i8][OCB, D, {_MATRIX}] @ WGT)",
        "d b h w n o i",
        f"{_HERE} += ones[d, n, i] * digits[b, d, o, i]",
    ),
    "largest": _meaning(
        f"largest({_RESULT}, {_KERNEL}, {_TOTAL}, "
        f"wide: [i32][OCB, DOWN * OH - DOWN + KH, ACROSS * OW - ACROSS + KW, {_LANES}] @ ACC)",
        "kh kw b h w n o",
        f"{_HERE} = most({_HERE}, wide[b, {_PIXEL}, n, o])",
    ),
    "add_total": _meaning(
        f"add_total({_RESULT}, {_TOTAL}, other: [i32]{_SUMS} @ ACC)",
        "b h w n o",
        f"{_HERE} = {_HERE} + other[b, h, w, n, o]",
    ),
    "store": _meaning(
        f"store({_RESULT}, {_TOTAL}, result: [i8]{_SUMS} @ DRAM)", "b h w n o", f"result[b, h, w, n, o] = {_HERE}"
    ),
    **{name: _of_every(name, value) for name, value in _ON_EVERY.items()},
}
"""Name -> text, with BATCH, BLOCK, and DOWN and ACROSS, the strides of a window, to be filled in."""


def instruction(name: str, batch: int, block: int, stride: tuple[int, int] = (1, 1)) -> Procedure:
    """The instruction of that name for a configuration's lanes and the strides of a window."""
    text = MEANINGS[name]
    for word, number in (("BATCH", batch), ("BLOCK", block), ("DOWN", stride[0]), ("ACROSS", stride[1])):
        text = text.replace(word, str(number))
    return _made(name, text)


@cache
def _made(name: str, text: str) -> Procedure:
    """An instruction of this text: most do not depend on the strides."""
    scope = {memory_name: memory(memory_name) for memory_name in ("INP", "WGT", "ACC")}
    return procedure(text, scope, instruction=name)


_ORDER = (
    *("load_padded", "load_weights", "load_matrices", "load_matrix", "load_image", "load_ones", "load_parameter"),
    *("zero", "product", "product_of_block", "widen", "add_bias", "largest"),
    *("add_total", "double_each", "add_each", "multiply_each", "multiply_by", "shift_each", "shift_by"),
    *("at_least", "at_most", "add_number", "store"),
)
"""Instructions in the order they are looked for."""


@cache
def scheduled(text: str, batch: int, block: int, stride: tuple[int, int]) -> Procedure:
    """A region's algorithm (`dovetail.loops.algorithm`) as VTA's instructions, kept in the user's cache folder.

    `batch` and `block` are the lanes, `stride` that of the window along rows and columns.

    Raises:
        TargetError: no instruction covers a statement.
    """
    known = {name: instruction(name, batch, block, stride) for name in _ORDER}
    scope = {**known, **{name: memory(name) for name in ("INP", "WGT", "ACC")}}
    key = "\n".join([text, str((batch, block, stride)), Path(__file__).read_text(encoding="utf-8")])
    return stored(key, default_cache() / "loops", lambda: schedule(text, batch, block, list(known.values())), scope)


DIGITS = tuple(f"digit_{number}" for number in range(4))
"""Amounts by which copies of a sum are shifted, where there is no product."""
_PARAMETERS = {
    **{"bias": "ab", "scale": "mb", "shift": "rb", "again": "gb"},
    **{name: f"d{number}sb" for number, name in enumerate(DIGITS)},
}
"""Arrays of one number per channel, and the outermost loop that reads each."""


def schedule(text: str, batch: int, block: int, meanings: Sequence[Procedure]) -> Procedure:
    """A region's algorithm as these instructions, made anew.

    Raises:
        TargetError: no instruction covers a statement.
    """
    made = procedure(text, {})
    made = _pool(made, batch, block) if "wide" in _allocations(made) else _sum(made, batch, block)
    for name in _PARAMETERS:
        made = _stage_parameter(made, name, batch, block)
    if "one" in _tensors(made):
        made = _stage_bias(made, batch, block)
    sums = ("total", "wide", *(f"part_{number}" for number in range(len(DIGITS))))
    made = _set_memories(made, dict.fromkeys(sums, "ACC"))
    return covered(made, meanings)


def _sum(made: Procedure, batch: int, block: int) -> Procedure:
    """Input blocks outermost; a block of the image and its weights are staged for each."""
    from exo.stdlib.scheduling import fuse, reorder_stmts, resize_dim, simplify, sink_alloc, stage_mem

    depthwise = "ib" not in _loops(made)
    if not depthwise:
        made = _outside(made, "ib", ("so", "sn", "sw", "sh", "sb"))
    for tap in ("kh", "kw"):
        made = _outside(made, tap, ("so", "sn", "sw", "sh"))
    step = "sb" if depthwise else "ib"
    lanes = f"0:{batch}, 0:{block}"
    if "padded" in _allocations(made):
        for _ in range(2):  # the sum's buffer and its zeros go before the padding
            made = reorder_stmts(made, made.find("for pb in _:_").expand(0, 1))
        made = fuse(made, made.find("for pb in _:_"), made.find(f"for {step} in _:_"))
        for _ in range(2):
            made = reorder_stmts(made, made.find("padded: _").expand(0, 1))
        made = sink_alloc(made, made.find("padded: _"))
        made = simplify(resize_dim(made, "padded", 0, 1, "pb"))
        step = "pb"
    else:
        window = f"x[{step}, 0:IH, 0:IW, {lanes}]"
        made = stage_mem(made, _first(made, "kh" if depthwise else "sb"), window, "padded")
    taps = f"0:KH, 0:KW, 0:{block}, 0:{block}"
    weights = f"w[{step}, {taps}]" if depthwise else f"w[0:OCB, {step}, {taps}]"
    made = simplify(stage_mem(made, _first(made, "kh" if depthwise else "sb"), weights, "weights"))
    return _set_memories(made, {"padded": "INP", "weights": "WGT"})


def _pool(made: Procedure, batch: int, block: int) -> Procedure:
    """The operand widened block by block; then taps outermost: each is one instruction over the whole result."""
    from exo.stdlib.scheduling import simplify, stage_mem

    made = stage_mem(made, _first(made, "ch"), f"x[cb, 0:IH, 0:IW, 0:{batch}, 0:{block}]", "image")
    made = simplify(stage_mem(made, _first(made, "ch"), f"identity[0:{block}, 0:{block}]", "matrix"))
    made = _set_memories(made, {"image": "INP", "matrix": "WGT"})
    for tap in ("kh", "kw"):
        made = _outside(made, tap, ("so", "sn", "sw", "sh", "sb"))
    return made


def _stage_bias(made: Procedure, batch: int, block: int) -> Procedure:
    from exo.stdlib.scheduling import simplify, stage_mem

    made = _outside(made, "bd", ("bo", "bn", "bw", "bh", "bb"))
    channels = _extent(made, "zb")
    made = stage_mem(made, _first(made, "bd"), f"one[0:D, 0:{batch}, 0:{block}]", "ones")
    made = stage_mem(made, _first(made, "bd"), f"digits[0:{channels}, 0:D, 0:{block}, 0:{block}]", "bias")
    return _set_memories(simplify(made), {"ones": "INP", "bias": "WGT"})


def _stage_parameter(made: Procedure, name: str, batch: int, block: int) -> Procedure:
    from exo.stdlib.scheduling import simplify, stage_mem

    if name not in _tensors(made):
        return made
    loop = _PARAMETERS[name]
    window = f"{name}[0:{_extent(made, 'zb')}, 0:{batch}, 0:{block}]"
    made = stage_mem(made, _first(made, loop), window, f"{name}_here")
    return _set_memories(simplify(made), {f"{name}_here": "ACC"})


def _outside(made: Procedure, loop: str, past: Sequence[str]) -> Procedure:
    """Move a loop outwards past others, innermost first."""
    from exo.stdlib.scheduling import reorder_loops

    for outer in past:
        made = reorder_loops(made, f"{outer} {loop}")
    return made


def _set_memories(made: Procedure, memories: dict[str, str]) -> Procedure:
    from exo.stdlib.scheduling import set_memory

    for name, where in memories.items():
        if name in _allocations(made):
            made = set_memory(made, f"{name}: _", memory(where))
    return made


def _first(made: Procedure, loop: str) -> Any:
    return made.find(f"for {loop} in _:_")


def _extent(made: Procedure, loop: str) -> str:
    return str(_first(made, loop).hi().name())


def _tensors(made: Procedure) -> set[str]:
    return {argument.name() for argument in made.args() if argument.is_tensor()}


def _allocations(made: Procedure) -> set[str]:
    return {cursor.name() for cursor in made.find("_: _", many=True)}


def _loops(made: Procedure) -> set[str]:
    return {cursor.name() for cursor in made.find("for _ in _: _", many=True)}


LEAST_INT8 = -128


class RegionConstants(Record):
    """Constants of a region, by the argument names of `dovetail.loops.algorithm`."""

    blob: Array
    """The bytes behind the WGT and ACC pointers, uint8."""
    first: Mapping[str, int]
    """First element of each array in its memory; "one" lies behind the INP pointer."""
    steps: Mapping[str, tuple[int, ...]]
    """Elements from one index to the next along each dimension but the lanes."""
    scalars: Mapping[str, int]
    """Values of the scalar arguments."""
    taps: tuple[int, ...] = ()
    """As `shared_taps`: the window has a matrix for each of these numbers."""


def joined(graph: Graph) -> Graph:
    """A region without the concatenation it begins with: the joint is its operand, which need not lie in one piece."""
    first = graph.nodes[0]
    if not isinstance(first.operator, Concat):
        return graph
    return replace(graph, inputs=(first.output,), nodes=graph.nodes[1:])


_MOST_DEPTH = 16
"""Input blocks of a dense layer loaded at once: enough to hide what a load waits for."""


def depth(graph: Graph, config: VtaConfig) -> int:
    """How many input blocks a dense layer sums at a time: the most of those that divide them; 1 for other regions."""
    if not any(isinstance(node.operator, FullyConnected) for node in graph.nodes):
        return 1
    blocks = -(-graph.types[graph.inputs[0]].shape[-1] // config.block)
    return max(step for step in range(1, _MOST_DEPTH + 1) if blocks % step == 0)


def shared_taps(graph: Graph, node: Node) -> tuple[int, ...]:
    """Which matrix each tap of a depthwise window takes, of those that differ, where they are few, as for an average;
    else nothing: every tap has its own."""
    if not node.operator.is_channelwise:
        return ()
    weights = graph.constants[node.inputs[1]]
    matrices = [tap.tobytes() for row in weights[0] for tap in row]
    differ = list(dict.fromkeys(matrices))
    return tuple(map(differ.index, matrices)) if 2 * len(differ) <= len(matrices) else ()


def constants(graph: Graph, config: VtaConfig) -> RegionConstants:
    """Pack a region's constants; the order is weights, digits, then what is added, multiplied by and shifted by."""
    matrices: dict[str, Array] = {}
    rows: dict[str, Array] = {}
    scalars, taps = {"least_value": LEAST_INT8}, tuple[int, ...]()
    for node in graph.nodes:
        if isinstance(node.operator, Conv2d | DepthwiseConv2d | FullyConnected):
            matrices["w"] = _weights(graph, node, config.block, depth(graph, config))
            if taps := shared_taps(graph, node):
                firsts = np.unique(taps, return_index=True)[1]
                apart = matrices["w"].reshape(len(matrices["w"]), len(taps), 1, config.block, config.block)
                matrices["w"] = np.ascontiguousarray(apart[:, firsts])
        elif isinstance(node.operator, ScaleShift):
            channels = graph.types[node.output].shape[-1]
            scale, offset, shift = (np.broadcast_to(graph.constants[name], channels) for name in node.inputs[1:])
            bias = offset // scale
            if bias_rows(graph, bias, config.block):
                matrices["digits"] = _digits(tuple(bias.tolist()), config.block)
            elif bias.any():
                rows["bias"] = _accumulators(bias, config)
            if not config.multiplies:
                amounts = zip(DIGITS, scale_digits(scale) or (), strict=False)
                rows.update((name, _accumulators(-values, config)) for name, values in amounts)
            parts = zip(SHIFTS, shifts(shift, config.most_shift), strict=False)
            for name, values in (*((("scale", scale),) if config.multiplies else ()), *parts):
                if (values == values[0]).all():
                    scalars[name] = int(values[0])
                else:
                    rows[name] = _accumulators(values, config)
        elif isinstance(node.operator, MaxPool2d):
            matrices["identity"] = np.eye(config.block, dtype=np.int8)
        elif isinstance(node.operator, Clip):
            scalars.update(low=node.operator.low, high=node.operator.high)
    return replace(_joined(matrices, rows, scalars, config), taps=taps)


ZEROS = 1
"""The element of the driver's page that is zero."""


def page(config: VtaConfig) -> Array:
    """The driver's page, int8 [2, batch, block]: the vector every row of digits is multiplied by, and zeros."""
    row = np.repeat(ones(1, config.block), config.batch, axis=0)
    return np.stack([row, np.zeros_like(row)])


def _joined(
    matrices: Mapping[str, Array], rows: Mapping[str, Array], scalars: Mapping[str, int], config: VtaConfig
) -> RegionConstants:
    parts: list[Array] = []
    first = {"one": 0}
    steps: dict[str, tuple[int, ...]] = {"one": (0,)}
    size = 0
    elements = {**dict.fromkeys(matrices, config.wgt_element), **dict.fromkeys(rows, config.acc_element)}
    for name, array in {**matrices, **rows}.items():
        padding = -size % elements[name]
        parts += [np.zeros(padding, np.uint8), array.reshape(-1).view(np.uint8)]
        first[name] = (size + padding) // elements[name]
        leading = array.shape[:-2]
        steps[name] = tuple(int(np.prod(leading[axis + 1 :], dtype=np.int64)) for axis in range(len(leading)))
        size += padding + array.nbytes
    blob = np.concatenate(parts) if parts else np.zeros(0, np.uint8)
    return RegionConstants(blob, first, steps, scalars)


def _weights(graph: Graph, node: Node, block: int, rows: int) -> Array:
    """[out block, in block, row, column, out, in]; of a depthwise layer [block, row, column, out, in], all diagonal.

    `rows` input blocks of a dense layer are the rows of a kernel.
    """
    weights = graph.constants[node.inputs[1]]
    if node.operator.is_channelwise:
        filled = _filled(weights[0], 2, block)
        height, width, channels = filled.shape
        split = filled.reshape(height, width, channels // block, block).transpose(2, 0, 1, 3)
        return np.ascontiguousarray(split[..., None] * np.eye(block, dtype=np.int8))
    if weights.ndim == 2:
        weights = weights[:, None, None, :]
    filled = _filled(_filled(weights, 0, block), 3, block)
    out, height, width, depth = filled.shape
    split = filled.reshape(out // block, block, height, width, depth // block, block)
    found = np.ascontiguousarray(split.transpose(0, 4, 2, 3, 1, 5))
    return found.reshape(found.shape[0], -1, rows * height, width, block, block)


@lru_cache(maxsize=256)  # asked for with every set of weights that is packed to see where they lie
def _digits(values: tuple[int, ...], block: int) -> Array:
    """[out block, row of digits, out, in]; not to be written to."""
    bias = np.array(values, np.int64)
    made = _filled(digits(bias, digit_rows(bias, block), block), 0, block)
    found = np.ascontiguousarray(made.reshape(-1, block, made.shape[1], block).transpose(0, 2, 1, 3))
    found.setflags(write=False)
    return found


def _accumulators(values: Array, config: VtaConfig) -> Array:
    """[block, batch, lane], int32, every image the same."""
    filled = _filled(values.astype(np.int32), 0, config.block).reshape(-1, 1, config.block)
    return np.ascontiguousarray(np.repeat(filled, config.batch, axis=1))


def _filled(array: Array, axis: int, block: int) -> Array:
    """Zeros up to a whole number of blocks."""
    widths = [(0, -array.shape[axis] % block if index == axis else 0) for index in range(array.ndim)]
    return np.pad(array, widths)
