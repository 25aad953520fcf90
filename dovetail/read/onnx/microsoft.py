"""ONNX Runtime's own operators (domain com.microsoft) on floats, and weights of a few bits in blocks.

Facts from onnxruntime's docs/ContribOperators.md: MatMulNBits keeps [N, K] weights as blocks of `block_size` numbers of
`bits` bits, the lowest bits first, with a scale and an unsigned zero point (the middle where it is absent) for each.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dovetail.ir.operators.activation import UnaryKind
from dovetail.ir.operators.linear import FullyConnected, MatrixProduct
from dovetail.ir.operators.reduction import Normalise
from dovetail.ir.types import Array
from dovetail.read.onnx.linear import matrix, with_rows
from dovetail.read.onnx.values import AGAIN, Importer, OnnxValues


def in_blocks(array: Array, scale: Array, zero_point: Array, axis: int, block: int) -> Array:
    """Integers that every `block` along an axis have a scale and a zero point for, as float32."""
    parts = [np.repeat(one, block, axis=axis) for one in (scale, zero_point)]
    cut = tuple(slice(0, size) for size in array.shape)
    return np.asarray((array.astype(np.float32) - parts[1][cut]) * parts[0][cut], dtype=np.float32)


def dequantized_blocks(v: OnnxValues, block: int, axis: int) -> str:
    """DequantizeLinear of constants with a scale for each block along an axis."""
    given, scale = v.constant_operand(0, "blocks").array, v.constant_operand(1, "scale").array.astype(np.float32)
    zeros = v.constant_operand(2, "zero point").array if v.has(2) else np.zeros(scale.shape)
    place = v.axis(axis, given.ndim)
    wanted = [-(-size // block) if at == place else size for at, size in enumerate(given.shape)]
    if block < 1 or list(scale.shape) != wanted or zeros.shape != scale.shape:
        raise v.refuse(f"blocks of {block} along axis {axis} of {list(given.shape)} do not fit the scale", AGAIN)
    return v.constant(in_blocks(given, scale, zeros.astype(np.float32), place, block), "blocks")


def few_bits(v: OnnxValues) -> str:
    """MatMulNBits: a dense layer whose weights are taken out of their blocks."""
    size, count = int(v.attribute("K", 0)), int(v.attribute("N", 0))
    bits, block = int(v.attribute("bits", 4)), int(v.attribute("block_size", 32))
    for name in ("accuracy_level", "weight_prepacked"):
        v.attribute(name, 0)  # how precisely ONNX Runtime may multiply; how it keeps weights in memory
    blocks = -(-size // max(block, 1))
    packed, scale = v.constant_operand(1, "weights").array, v.constant_operand(2, "scale").array.astype(np.float32)
    if bits not in (2, 4, 8) or size < 1 or packed.size * 8 != count * blocks * block * bits:
        raise v.refuse(f"{packed.size} bytes are not {count}x{size} weights of {bits} bits in blocks of {block}", AGAIN)
    if scale.size != count * blocks or v.has(4):
        raise v.refuse(
            f"{scale.size} scales do not fit {count * blocks} blocks, or columns are in another order", AGAIN
        )
    zeros = np.full((count, blocks), 1 << (bits - 1), np.float32)
    if v.has(3):
        given = v.constant_operand(3, "zero point").array
        if given.dtype == np.uint8:
            zeros = _unpacked(given.reshape(count, -1), bits)[:, :blocks].astype(np.float32)
        elif given.size == zeros.size:
            zeros = given.reshape(count, blocks).astype(np.float32)
        else:
            raise v.refuse(f"{given.size} zero points do not fit {zeros.size} blocks", AGAIN)
    integers = _unpacked(packed.reshape(count, -1), bits)[:, :size]
    weights = v.constant(in_blocks(integers, scale.reshape(count, blocks), zeros, 1, block), "weights")
    operands = [with_rows(v, v.real()), weights]
    return v.add(FullyConnected(), [*operands, v.real(5)] if v.has(5) else operands)


def _unpacked(rows: Array, bits: int) -> Array:
    """Unsigned numbers of a few bits, the lowest bits of each byte first: [N, bytes] as [N, numbers]."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    parts = (rows.astype(np.uint8)[:, :, None] >> shifts) & ((1 << bits) - 1)
    return parts.reshape(rows.shape[0], -1)


def fused_matmul(v: OnnxValues) -> str:
    """FusedMatMul: a product of matrices, of either its transpose, times a number."""
    v.only("transBatchA", 0)
    v.only("transBatchB", 0)
    a, b, alpha = v.real(0), v.real(1), float(v.attribute("alpha", 1.0))
    a = v.matrix_turned(a, "left") if v.attribute("transA", 0) else a
    turned = bool(v.attribute("transB", 0))
    if v.fixed(b) and len(v.shape(b)) == 2:
        product = v.add(FullyConnected(), [with_rows(v, a), matrix(v, b, rows_first=not turned)], "product")
    else:
        product = v.add(MatrixProduct(), [a, v.matrix_turned(b, "right") if turned else b], "product")
    return v.scaled(product, alpha)


def biased(kind: UnaryKind) -> Importer:
    """The importer of a function of a sum whose second term may be absent."""

    def build(v: OnnxValues) -> str:
        x = v.plus(v.real(), v.real(1), "biased") if v.has(1) else v.real()
        return v.unary(kind, x)

    return build


def quick_gelu(v: OnnxValues) -> str:
    """QuickGelu: x * Sigmoid(alpha * x)."""
    return v.swish(v.real(), float(v.attribute("alpha", 1.702)))


def skip_normalisation(centred: bool) -> Importer:
    """The importer of SkipLayerNormalization and SkipSimplifiedLayerNormalization: of a sum, which may be a result
    too."""

    def build(v: OnnxValues) -> str:
        if any(v.op.outputs[1:3]):
            raise v.refuse("gives means and deviations, which is not supported")
        total, bias = v.plus(v.real(0), v.real(1), "total"), 4 if centred else 3
        total = v.plus(total, v.real(bias), "biased") if v.has(bias) else total
        if len(v.op.outputs) > 3 and v.op.outputs[3]:
            v.values[v.op.outputs[3]] = total
        last = len(v.shape(total)) - 1
        rows = v.normalise(total, (last,), Normalise(float(v.attribute("epsilon", 1e-12)), centred))
        scaled = v.times(rows, v.real(2), "scaled")
        return v.plus(scaled, v.real(3), "offset") if centred and v.has(3) else scaled

    return build


FLOATS: Mapping[str, Importer] = {
    "BiasGelu": biased(UnaryKind.GELU),
    "FastGelu": biased(UnaryKind.GELU_TANH),
    "FusedMatMul": fused_matmul,
    "MatMulNBits": few_bits,
    "QuickGelu": quick_gelu,
    "SkipLayerNormalization": skip_normalisation(centred=True),
    "SkipSimplifiedLayerNormalization": skip_normalisation(centred=False),
}
"""Operators of com.microsoft on floats."""
