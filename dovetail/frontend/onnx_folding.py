"""Computes at compile time what an ONNX model derives from constants alone (shapes, quantised weights)."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from dovetail.frontend.onnx_context import AGAIN, SMALLER, OnnxContext
from dovetail.frontend.onnx_file import Constant, OnnxNode, wrap
from dovetail.graph.types import Array, DType

FOLDABLE = frozenset(
    (
        "Abs", "Add", "And", "Cast", "Ceil", "Concat", "ConstantOfShape", "Div",
        "Equal", "Expand", "Flatten", "Floor", "Gather", "Greater", "Identity", "Less",
        "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Pow",
        "QuantizeLinear", "Range", "Reciprocal", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape",
        "Round", "Shape", "Sign", "Size", "Slice", "Split", "Sqrt", "Squeeze",
        "Sub", "Transpose", "Unsqueeze", "Where",
    )
)  # fmt: skip
"""Standard operators folded when all their operands are constants. DequantizeLinear is not among them: the
quantise stage needs the integers of a constant."""

MAX_FOLDED = 1 << 26
"""Most elements a folded constant may have."""


def fold(ctx: OnnxContext, op: OnnxNode) -> bool:
    """Compute the operator's results if all its operands are constants; True when it did.

    Raises:
        ModelError: a result would be larger than MAX_FOLDED, or the operator's attributes are wrong.
    """
    if op.domain == "" and op.op_type == "Constant":
        ctx.constants[op.outputs[0]] = _constant(ctx, op)
        return True
    present = [name for name in op.inputs if name]
    if op.domain != "" or op.op_type not in FOLDABLE or not present:
        return False
    if any(name not in ctx.constants for name in present):
        return False
    operands = {name: ctx.constants[name] for name in present}
    if _largest(op, [entry.array for entry in operands.values()]) > MAX_FOLDED:
        raise ctx.refuse(op, f"gives more than {MAX_FOLDED} elements from constants", SMALLER)
    try:
        with np.errstate(divide="raise", invalid="raise", over="ignore"):
            results = _run(op, operands, ctx.opset)
    except Exception as error:  # the reference evaluator raises errors of many kinds for wrong operands
        raise ctx.refuse(op, f"cannot be computed from its constant operands: {str(error)[:200]}", AGAIN) from error
    for name, array in zip(op.outputs, results, strict=False):
        if name:
            ctx.constants[name] = _from_numpy(array)
    return True


def _constant(ctx: OnnxContext, op: OnnxNode) -> Constant:
    """The value of a Constant node, whichever attribute holds it."""
    kinds = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}
    for name, kind in kinds.items():
        if name in op.attributes:
            return _from_numpy(np.array(op.attributes[name], kind))
    value = op.attributes.get("value")
    if not isinstance(value, Constant):
        raise ctx.refuse(op, "holds no dense tensor of numbers", AGAIN)
    return value


def _largest(op: OnnxNode, operands: list[Array]) -> int:
    """An upper bound of the elements of a result."""
    if op.op_type == "Range":
        start, stop, step = (float(array.reshape(-1)[0]) for array in operands)
        return MAX_FOLDED + 1 if step == 0 else int(abs(stop - start) / abs(step)) + 1
    if op.op_type in ("ConstantOfShape", "Expand"):
        shape = [max(int(size), 1) for size in operands[-1].reshape(-1)]
        return prod(shape) * operands[0].size if op.op_type == "Expand" else prod(shape)
    if op.op_type == "Gather":
        return max(array.size for array in operands) * max(operands[1].size, 1)
    if op.op_type == "Concat":
        return sum(array.size for array in operands)
    ranks = max((array.ndim for array in operands), default=0)
    aligned = [(1,) * (ranks - array.ndim) + array.shape for array in operands]
    return prod(max(sizes) for sizes in zip(*aligned, strict=True)) if ranks else 1


def _run(op: OnnxNode, operands: dict[str, Constant], opset: int) -> list[Array]:
    """The operator's results by the ONNX reference evaluator."""
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    node = helper.make_node(op.op_type, list(op.inputs), list(op.outputs))
    for name, value in op.attributes.items():
        node.attribute.append(helper.make_attribute(name, _tensor(name, value)))
    inputs = [helper.make_value_info(name, helper.make_tensor_type_proto(0, None)) for name in operands]
    outputs = [helper.make_value_info(name, helper.make_tensor_type_proto(0, None)) for name in op.outputs if name]
    model = helper.make_model(
        helper.make_graph([node], "folded", inputs, outputs), opset_imports=[helper.make_opsetid("", opset)]
    )
    feeds = {name: _to_numpy(constant) for name, constant in operands.items()}
    return [np.asarray(array) for array in ReferenceEvaluator(model).run(None, feeds)]


def _tensor(name: str, value: Any) -> Any:
    """An attribute as ONNX's helper wants it."""
    from onnx import numpy_helper

    return numpy_helper.from_array(value.array, name) if isinstance(value, Constant) else value


def _to_numpy(constant: Constant) -> Array:
    """A constant in the numpy type the reference evaluator knows it by (ml_dtypes for 4-bit types)."""
    if constant.dtype is None or constant.dtype.bits >= 8:
        return constant.array
    from onnx import TensorProto, helper

    number = TensorProto.DataType.Value(constant.dtype.text.upper())
    return constant.array.astype(helper.tensor_dtype_to_np_dtype(number))


def _from_numpy(array: Array) -> Constant:
    """A constant of the element type numpy calls the array's."""
    try:
        return wrap(array, DType.of(array.dtype))
    except ValueError:
        return Constant(array, None)
