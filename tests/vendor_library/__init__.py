"""The test library `vl` (vl.h says its rules) as a target: a RISC-V core that calls it."""
from pathlib import Path

import numpy as np

from dovetail.graph.types import Array, DType
from dovetail.operators.arithmetic import Clip, Requantize
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.operators.movement import Pad
from dovetail.target import Constraint, CValue, Match, apply, blocked, constant, maybe, operand
from dovetail.targets import riscv
from dovetail.targets.vendorlib import Library, Query, function, pointer, struct, with_library

LIBRARY = Library("vl", Path(__file__).parent, "vl.h", ("vl.c",), success=0)
ASYNCHRONOUS = Library("vl_async", Path(__file__).parent, "vl.h", ("vl.c",), wait="vl_wait", success=0)
IMAGES, ROWS = blocked((0, 1, 2, 3), 3, 4), blocked((0, 1), 1, 4)


def shape(m: Match) -> dict[str, CValue]:
    (_, h, w, c), (_, rows, columns, outputs) = m.type("x").shape, m.result.shape
    return {"height": h, "width": w, "channels": c, "rows": rows, "columns": columns, "outputs": outputs}


def window(m: Match) -> dict[str, CValue]:
    (_, rows, columns, _), (down, right) = m.type("weights").shape, m.nodes["layer"].operator.stride
    _, top, left, _ = m.operator("pad", Pad).before if m.has("pad") else (0,) * 4
    return {"rows": rows, "columns": columns, "row_stride": down, "column_stride": right, "top": top, "left": left}


def scaling(m: Match) -> dict[str, CValue]:
    zeros = {"zero_in": m.nodes["layer"].operator.input_zero_point, "zero_out": m.operator("requantize", Requantize).output_zero_point}  # fmt: skip  # noqa: E501
    limits = {"low": m.operator("clip", Clip).low, "high": m.operator("clip", Clip).high}
    return {**zeros, **limits, "multiplier": pointer("multiplier", "const int32_t"), "shift": pointer("shift", "const int32_t")}  # fmt: skip  # noqa: E501


def fours(array: Array, axes: int) -> Array:
    """The last `axes` axes filled with zeros to multiples of 4."""
    return np.pad(array, [(0, -n % 4 if axis >= array.ndim - axes else 0) for axis, n in enumerate(array.shape)])


def described(library, name, kind, given, room=(), weights=lambda w: w, **more):  # type: ignore[no-untyped-def]
    source = operand("x") if kind is FullyConnected else maybe(Pad, operand("x"), name="pad")
    layer = apply(kind, source, constant("weights"), constant("bias"), name="layer")
    pattern = apply(Clip, apply(Requantize, layer, constant("multiplier"), constant("shift")))
    pads = lambda m: not m.has("pad") or m.operator("pad", Pad).value == m.nodes["layer"].operator.input_zero_point  # noqa: E731
    limits = [Constraint("int8 values and weights", lambda m: {m.type("x").dtype, m.type("weights").dtype, m.result.dtype}, {DType.INT8}.__eq__),  # noqa: E501
              Constraint("padding with the zero point", pads, bool), Constraint("batch 1", lambda m: m.result.shape[0], (1).__eq__)]  # fmt: skip  # noqa: E501
    constants = {n: lambda m, n=n: fours(np.broadcast_to(m.array(n), m.result.shape[-1]), 1) for n in ("bias", "multiplier", "shift")}  # fmt: skip  # noqa: E501
    arguments = [*given, struct("vl_scaling", scaling), pointer("x"), pointer("weights"), pointer("bias", "const int32_t"), *room, pointer("result", "int8_t")]  # fmt: skip  # noqa: E501
    layout = ROWS if kind is FullyConnected else IMAGES
    return function(library, name, pattern, arguments, constraints=limits, layouts={"x": layout, "result": layout},
                    constants={**constants, "weights": lambda m: weights(m.array("weights"))}, **more)  # fmt: skip


PLACE = [struct("vl_shape", shape), struct("vl_window", window)]
EXTRA = {"room": [pointer("scratch", "void")], "weights": lambda w: fours(w.transpose(1, 2, 3, 0), 2), "query": Query("vl_conv_scratch", PLACE)}  # noqa: E501
DENSE = described(LIBRARY, "vl_dense", FullyConnected, [lambda m: m.type("x").shape[1], lambda m: m.result.shape[1]], weights=lambda w: fours(w.T, 2))  # noqa: E501
DEPTHWISE = described(LIBRARY, "vl_depthwise", DepthwiseConv2d, PLACE, weights=lambda w: fours(w[0], 1))
TARGET = with_library(riscv.TARGET, LIBRARY, [described(LIBRARY, "vl_conv", Conv2d, PLACE, **EXTRA), DEPTHWISE, DENSE])
LATER = with_library(riscv.TARGET, ASYNCHRONOUS, [described(ASYNCHRONOUS, "vl_conv_start", Conv2d, PLACE, **EXTRA)])
