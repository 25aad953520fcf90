"""QONNX's own operators: quantisation to any number of bits, as Brevitas and QKeras export it.

Facts from the operators' definitions at github.com/fastmachinelearning/qonnx (docs/qonnx-custom-ops): Quant gives
(clamp(round(x / scale + zeropt)) - zeropt) * scale, its integers of `bitwidth` bits, one less of range at the low end
(signed) or the high end (unsigned) where it is `narrow`; BipolarQuant gives scale where x >= 0, else -scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from dovetail.frontend.onnx_context import AGAIN, ALIKE, OnnxContext
from dovetail.frontend.onnx_file import Constant, OnnxNode
from dovetail.graph.types import Array, DType, Shape
from dovetail.operators.activation import Clamp

DOMAINS = ("qonnx.custom_op.general", "finn.custom_op.general", "onnx.brevitas")
"""Domains these operators are found in."""
MOST_BITS = 16
"""Widest integers that are read."""

_ROUNDINGS: Mapping[str, Callable[[Array], Array]] = {
    "ROUND": np.rint,
    "HALF_EVEN": np.rint,
    "FLOOR": np.floor,
    "CEIL": np.ceil,
    "UP": lambda x: np.sign(x) * np.ceil(np.abs(x)),
    "DOWN": np.trunc,
    "ROUND_TO_ZERO": np.trunc,
    "HALF_UP": lambda x: np.sign(x) * np.floor(np.abs(x) + 0.5),
    "HALF_DOWN": lambda x: np.sign(x) * np.ceil(np.abs(x) - 0.5),
}


@dataclass(frozen=True)
class _Grid:
    """The integers a value may have."""

    low: int
    high: int

    def dtype(self, least: int) -> DType:
        """The narrowest type of at least so many bits that holds them."""
        kinds = (DType.INT2, DType.UINT2, DType.INT4, DType.UINT4, DType.INT8, DType.UINT8, DType.INT16, DType.UINT16)
        signed = self.low < 0
        return next(
            kind
            for kind in kinds
            if kind.bits >= least and kind.signed == signed and kind.low <= self.low and self.high <= kind.high
        )


def quant(ctx: OnnxContext, op: OnnxNode) -> None:
    """Quant and IntQuant, of constants (any granularity along one axis) and of computed values (per tensor)."""
    grid = _grid(ctx, op)
    rounding = str(ctx.attribute(op, "rounding_mode", "ROUND")).upper()
    if rounding not in _ROUNDINGS:
        raise ctx.refuse(op, f"rounding_mode = {rounding} is not supported", f"known are {', '.join(_ROUNDINGS)}")
    name = ctx.name_of(op, 0)
    rank = ctx.constants[name].array.ndim if name in ctx.constants else len(ctx.type_of(ctx.value(op, 0)).shape)
    scale, axis = _row(ctx, op, 1, rank)
    zeros, zero_axis = _row(ctx, op, 2, rank)
    axis = axis if scale.size > 1 else zero_axis
    if not (scale > 0).all() or (zeros != np.rint(zeros)).any():
        raise ctx.refuse(op, "the scales must be positive and the zero points whole numbers", ALIKE)
    scale, zeros = np.broadcast_arrays(scale, zeros)
    if name in ctx.constants:
        array = ctx.constants[name].array.astype(np.float32)
        shape = _along(scale.size, array.ndim, axis)
        steps = _ROUNDINGS[rounding](array / scale.astype(np.float32).reshape(shape) + zeros.reshape(shape))
        integers = np.clip(steps, grid.low, grid.high)
        _constant(ctx, op, integers, grid.dtype(2), scale, zeros, axis)
        return
    if rounding not in ("ROUND", "HALF_EVEN"):
        raise ctx.refuse(op, f"rounding_mode = {rounding} of computed values is not supported", "use ROUND")
    if scale.size != 1:
        raise ctx.refuse(op, f"a computed value is quantised per channel ({scale.size} scales); only weights may be",
                         ALIKE)
    dtype = grid.dtype(8)
    low, high = ((limit - float(zeros[0])) * float(scale[0]) for limit in (grid.low, grid.high))
    x = ctx.value(op, 0)
    if (grid.low, grid.high) != (dtype.low, dtype.high):
        x = ctx.add(op, Clamp(low, high), [x], f"{op.outputs[0]}_limited")
    scaling = ctx.scaling_of(op.outputs[0], scale, zeros, -1, dtype)
    integers_name = ctx.quantized(op, x, scaling, f"{op.outputs[0]}_quantized")
    ctx.values[op.outputs[0]] = ctx.dequantized(op, integers_name, scaling, op.outputs[0])


def bipolar_quant(ctx: OnnxContext, op: OnnxNode) -> None:
    """BipolarQuant of constants: weights of -1 and 1, held in 2 bits."""
    name = ctx.name_of(op, 0)
    if name not in ctx.constants:
        raise ctx.refuse(
            op,
            "binary activations are not supported, only binary weights",
            "quantise the activations to 2 bits or more (Quant)",
        )
    array = ctx.constants[name].array
    scale, axis = _row(ctx, op, 1, array.ndim)
    if not (scale > 0).all():
        raise ctx.refuse(op, "the scales must be positive", ALIKE)
    _constant(ctx, op, np.where(array >= 0, 1, -1), DType.INT2, scale, np.zeros_like(scale), axis)


def _grid(ctx: OnnxContext, op: OnnxNode) -> _Grid:
    """The integers of `bitwidth`, `signed` and `narrow`."""
    bits = ctx.number(op, 3, 8.0, "bit width")
    signed, narrow = (bool(ctx.attribute(op, key, default)) for key, default in (("signed", 1), ("narrow", 0)))
    least = 2 if signed else 1
    if bits != int(bits) or not least <= bits <= MOST_BITS:
        kind = "signed" if signed else "unsigned"
        raise ctx.refuse(op, f"{bits:g} bits, {kind}, are not supported; {least} to {MOST_BITS} are")
    whole = 1 << int(bits)
    if signed:
        return _Grid(-whole // 2 + narrow, whole // 2 - 1)
    return _Grid(0, whole - 1 - narrow)


def _row(ctx: OnnxContext, op: OnnxNode, position: int, rank: int) -> tuple[Array, int]:
    """A constant parameter as a row of elements, and the axis of the operand they run along (-1 for one element)."""
    array = ctx.constant(op, position, "quantisation parameter").array
    wide = [index for index, size in enumerate(array.shape) if size > 1]
    if len(wide) > 1 or array.ndim > rank or array.dtype.kind != "f" or not np.isfinite(array).all():
        raise ctx.refuse(op, f"the parameter {op.inputs[position]!r} must be finite and run along one axis at most",
                         AGAIN)
    axis = wide[0] + rank - array.ndim if wide else -1
    return array.reshape(-1).astype(np.float64), axis


def _along(size: int, rank: int, axis: int) -> Shape:
    return tuple(size if size > 1 and index == axis % max(rank, 1) else 1 for index in range(rank))


def _constant(
    ctx: OnnxContext, op: OnnxNode, integers: Array, dtype: DType, scale: Array, zeros: Array, axis: int
) -> None:
    """Put constant integers into the graph, and what they stand for as the operator's result."""
    value = ctx.place(op, f"{op.outputs[0]}_quantized", Constant(integers.astype(dtype.numpy), dtype))
    scaling = ctx.scaling_of(op.outputs[0], scale, zeros, axis, dtype)
    ctx.values[op.outputs[0]] = ctx.dequantized(op, value, scaling, op.outputs[0])
    ctx.static.add(ctx.values[op.outputs[0]])


QONNX = {"Quant": quant, "IntQuant": quant, "BipolarQuant": bipolar_quant}
"""The operators of these domains."""
