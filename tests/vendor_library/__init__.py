"""The test library `vl` (vl.h says its rules) as a target: a RISC-V core that calls it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.ir.operators.arithmetic import Clip, Requantize
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Pad
from dovetail.ir.types import Array
from dovetail.target import CValue, Match, Offload, apply, blocked, constant, layers, maybe, operand
from dovetail.targets import riscv
from dovetail.targets.vendorlib import Argument, Library, Query, function, pointer, struct, with_library

LIBRARY = Library("vl", Path(__file__).parent, "vl.h", ("vl.c",), success=0)
ASYNCHRONOUS = Library("vl_async", Path(__file__).parent, "vl.h", ("vl.c",), wait="vl_wait", success=0)
IMAGES, ROWS = blocked((0, 1, 2, 3), 3, 4), blocked((0, 1), 1, 4)
WORDS, RESULT = partial(pointer, c_type="const int32_t"), pointer("result", "int8_t")


def shape(m: Match) -> dict[str, CValue]:
    (_, h, w, c), (_, rows, columns, outputs) = m.type("x").shape, m.result.shape
    return {"height": h, "width": w, "channels": c, "rows": rows, "columns": columns, "outputs": outputs}


def window(m: Match) -> dict[str, CValue]:
    (_, rows, columns, _), (down, right) = m.type("weights").shape, m.nodes["layer"].operator.stride
    _, top, left, _ = m.operator("pad", Pad).before if m.has("pad") else (0,) * 4
    return {"rows": rows, "columns": columns, "row_stride": down, "column_stride": right, "top": top, "left": left}


def scaling(m: Match) -> dict[str, CValue]:
    clip, requantize = m.operator("clip", Clip), m.operator("requantize", Requantize)
    zeros = {"zero_in": m.nodes["layer"].operator.input_zero_point, "zero_out": requantize.output_zero_point}
    return {**zeros, "low": clip.low, "high": clip.high, **{name: WORDS(name) for name in ("multiplier", "shift")}}


def fours(array: Array, axes: int) -> Array:
    """The last `axes` axes filled with zeros to multiples of 4."""
    return np.pad(array, [(0, -n % 4 if axis >= array.ndim - axes else 0) for axis, n in enumerate(array.shape)])


def per_channel(name: str) -> Callable[[Match], Array]:
    return lambda m: fours(np.broadcast_to(m.array(name), m.result.shape[-1]), 1)


LIMITS = (layers.ALL_INT8, layers.INT8_WEIGHTS, layers.PADDING_OF_ZERO_POINT, layers.ALL_DOUBLE_ROUNDING, layers.BATCH)
ONE_EACH = {Conv2d: layers.NO_GROUPS, DepthwiseConv2d: layers.NO_MULTIPLIER}
PLACE = [struct("vl_shape", shape), struct("vl_window", window)]
LENGTHS: list[Argument] = [lambda m: m.type("x").shape[1], lambda m: m.result.shape[1]]


def described(library: Library, name: str, kind: type, given: list[Argument], weights: Any, **more: Any) -> Offload:
    source = operand("x") if kind is FullyConnected else maybe(Pad, operand("x"), name="pad")
    layer = apply(kind, source, constant("weights"), constant("bias"), name="layer")
    room = [pointer("scratch", "void")] if kind is Conv2d else []
    arguments = [*given, struct("vl_scaling", scaling), pointer("x"), pointer("weights"), WORDS("bias"), *room, RESULT]
    constants = {name: per_channel(name) for name in ("bias", "multiplier", "shift")}
    return function(
        library,
        name,
        apply(Clip, apply(Requantize, layer, constant("multiplier"), constant("shift"))),
        arguments,
        constraints=(*LIMITS, *([layers.NO_DILATION, ONE_EACH[kind]] if kind in ONE_EACH else [])),
        constants={**constants, "weights": lambda m: weights(m.array("weights"))},
        layouts=dict.fromkeys(("x", "result"), ROWS if kind is FullyConnected else IMAGES),
        **more,
    )


def convolution(library: Library, name: str, **more: Any) -> Offload:
    query = Query("vl_conv_scratch", PLACE)
    return described(library, name, Conv2d, PLACE, lambda w: fours(w.transpose(1, 2, 3, 0), 2), query=query, **more)


DENSE = described(LIBRARY, "vl_dense", FullyConnected, LENGTHS, lambda w: fours(w.T, 2))
DEPTHWISE = described(LIBRARY, "vl_depthwise", DepthwiseConv2d, PLACE, lambda w: fours(w[0], 1))
TARGET = with_library(riscv.TARGET, LIBRARY, [convolution(LIBRARY, "vl_conv"), DEPTHWISE, DENSE])
LATER = with_library(riscv.TARGET, ASYNCHRONOUS, [convolution(ASYNCHRONOUS, "vl_conv_start")])
