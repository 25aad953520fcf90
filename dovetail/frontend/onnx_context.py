"""What every ONNX operator importer works with: the file, the graph being built, and its two image orders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dovetail.errors import ModelError
from dovetail.frontend.onnx_file import MAX_ELEMENTS, Constant, OnnxFile, OnnxNode
from dovetail.graph.graph import GraphBuilder
from dovetail.graph.types import Array, DType, Shape, TensorType
from dovetail.operators.base import Operator
from dovetail.operators.movement import Reshape, Transpose
from dovetail.operators.quantization import Dequantize, Quantize

# What to do about what a reader refuses; each sentence fits many messages.
OTHERWISE = "say it with other operators or attributes, and export the network again"
AGAIN = "export the network again: what this file says contradicts itself"
FOLD = "make it a constant, for instance by folding constants during the export"
ALIKE = "quantise again: per tensor, weights per output channel, with positive scales and zero points of the same type"
SMALLER = "make the network smaller there, and export it again"

TO_NHWC = (0, 2, 3, 1)
"""NCHW to NHWC, and OIHW to OHWI."""

TO_NCHW = (0, 3, 1, 2)
"""NHWC to NCHW."""


@dataclass(frozen=True)
class Scaling:
    """The parameters of one quantisation, as constants of the graph."""

    scale: str
    zero_point: str
    axis: int
    """The axis the parameters run along; -1 per tensor."""
    dtype: DType
    """The zero point's type: that of the integers."""
    steps: Array
    """The scale's elements, float32 [1 or C]."""
    offsets: Array
    """The zero point's elements, int32 [1 or C]."""


@dataclass
class OnnxContext:
    """The import in progress. Values are kept in ONNX's own axis order; image operators are wrapped."""

    file: OnnxFile
    builder: GraphBuilder
    values: dict[str, str] = field(default_factory=dict)
    """Graph value of each ONNX value computed so far."""
    constants: dict[str, Constant] = field(default_factory=dict)
    """ONNX values known at compile time."""
    static: set[str] = field(default_factory=set)
    """Graph values computed from constants alone."""
    read: set[str] = field(default_factory=set)
    """Attributes of the current operator its importer has honoured."""

    def origin(self, op: OnnxNode) -> str:
        """The operator as `Node.origin` names it."""
        return f"{op.op_type} {op.index} ({op.name or next(iter(op.outputs), '')})"

    def refuse(self, op: OnnxNode, what: str, hint: str = OTHERWISE) -> ModelError:
        """The error for something about `op` that cannot be honoured."""
        return ModelError(what, where=f"{self.file.name}, {self.origin(op)}", hint=hint)

    @property
    def opset(self) -> int:
        """Version of the standard operators."""
        return self.file.opsets.get("", self.file.opsets.get("com.microsoft", 1))

    def attribute(self, op: OnnxNode, name: str, default: Any) -> Any:
        """An attribute, now honoured; `default` where it is not set."""
        self.read.add(name)
        return op.attributes.get(name, default)

    def only(self, op: OnnxNode, name: str, wanted: Any) -> None:
        """Refuse an attribute set to anything but `wanted` (its default)."""
        found = self.attribute(op, name, wanted)
        if found != wanted:
            raise self.refuse(op, f"the attribute {name} = {found} is not supported, only {wanted}")

    def has(self, op: OnnxNode, position: int) -> bool:
        """True when the operand is there."""
        return position < len(op.inputs) and op.inputs[position] != ""

    def name_of(self, op: OnnxNode, position: int) -> str:
        """The ONNX name of an operand that must be there."""
        if not self.has(op, position):
            raise self.refuse(op, f"operand {position} is missing", AGAIN)
        return op.inputs[position]

    def constant(self, op: OnnxNode, position: int, what: str) -> Constant:
        """An operand that must be a constant."""
        name = self.name_of(op, position)
        if name not in self.constants:
            raise self.refuse(op, f"the {what} {name!r} must be constant", FOLD)
        return self.constants[name]

    def integers(self, op: OnnxNode, position: int, what: str) -> tuple[int, ...]:
        """The elements of a constant integer operand."""
        array = self.constant(op, position, what).array
        if array.dtype.kind not in "iu":
            raise self.refuse(op, f"the {what} must be integers, got {array.dtype}", AGAIN)
        return tuple(int(value) for value in array.reshape(-1))

    def number(self, op: OnnxNode, position: int, default: float, what: str) -> float:
        """The one element of a constant operand, `default` where it is absent."""
        if not self.has(op, position):
            return default
        array = self.constant(op, position, what).array
        if array.size != 1 or array.dtype.kind not in "fiu":
            raise self.refuse(op, f"the {what} must be one number", AGAIN)
        return float(array.reshape(-1)[0])

    def value(self, op: OnnxNode, position: int) -> str:
        """The graph value of an operand, in ONNX's axis order."""
        return self.value_named(op, self.name_of(op, position))

    def value_named(self, op: OnnxNode, name: str) -> str:
        """The graph value of an ONNX value."""
        if name not in self.values:
            if name not in self.constants:
                raise self.refuse(op, f"{name!r} is read before it is computed", AGAIN)
            self.values[name] = self.place(op, name, self.constants[name])
        return self.values[name]

    def place(self, op: OnnxNode, stem: str, constant: Constant) -> str:
        """Put a constant into the graph."""
        if constant.dtype is None:
            raise self.refuse(op, f"the constant {stem!r} has the type {constant.array.dtype}, which is not supported")
        value = self.builder.constant(stem, constant.array, constant.dtype)
        self.static.add(value)
        return value

    def type_of(self, value: str) -> TensorType:
        """Type of a graph value."""
        return self.builder.type_of(value)

    def add(self, op: OnnxNode, operator: Operator, operands: Sequence[str], stem: str = "") -> str:
        """Add a node; its name begins with `stem`, by default the operator's result."""
        value = self.builder.add(operator, operands, stem or op.outputs[0], self.origin(op))
        if self.type_of(value).elements >= MAX_ELEMENTS:
            raise self.refuse(op, f"computes {self.type_of(value)}; the limit is {MAX_ELEMENTS} elements", SMALLER)
        if all(operand in self.static for operand in operands):
            self.static.add(value)
        return value

    def emit(self, op: OnnxNode, operator: Operator, operands: Sequence[str]) -> None:
        """Add a node that computes the operator's result."""
        self.values[op.outputs[0]] = self.add(op, operator, operands)

    def emit_image(self, op: OnnxNode, operator: Operator, operands: Sequence[str]) -> None:
        """Add a node that computes the operator's result in NHWC, and its transpose."""
        image = self.add(op, operator, operands, f"{op.outputs[0]}_nhwc")
        self.emit(op, Transpose(TO_NCHW), [image])

    def image(self, op: OnnxNode, value: str) -> str:
        """An NCHW value as NHWC."""
        if len(self.type_of(value).shape) != 4:
            raise self.refuse(op, f"works on 2-D images only, its operand is {self.type_of(value)}")
        return self.add(op, Transpose(TO_NHWC), [value], f"{value}_nhwc")

    def alias(self, op: OnnxNode, value: str) -> None:
        """Make `value` the operator's result; a result of the model keeps its own name."""
        name = op.outputs[0]
        if any(name == output for output, _ in self.file.outputs):
            value = self.add(op, Reshape(self.type_of(value).shape), [value])
        self.values[name] = value

    def scaling(self, op: OnnxNode, scale: int, zero_point: int, axis: int, default: DType, rank: int = -1) -> Scaling:
        """Scale and zero point from constant operands.

        Args:
            op: the operator.
            scale: position of the scale operand.
            zero_point: position of the zero point, which may be absent (0 of the type `default`).
            axis: the axis parameters of more than one element run along.
            default: the integers' type without a zero point.
            rank: axes of the quantised operand, -1 to leave `axis` unchecked.
        """
        given = self.constant(op, scale, "scale")
        steps = given.array.reshape(-1)
        if given.dtype is not DType.FLOAT32 or given.array.ndim > 1 or not (np.isfinite(steps) & (steps > 0)).all():
            raise self.refuse(op, f"the scale {op.inputs[scale]!r} must be float32, positive, and at most one axis",
                              ALIKE)
        dtype, offsets = default, np.zeros(len(steps), np.int32)
        if self.has(op, zero_point):
            found = self.constant(op, zero_point, "zero point")
            if found.dtype is None or not found.dtype.is_integer or found.array.size not in (1, len(steps)):
                raise self.refuse(op, f"the zero point {op.inputs[zero_point]!r} does not fit the scale", ALIKE)
            dtype = found.dtype
            offsets = np.broadcast_to(found.array.reshape(-1), steps.shape).astype(np.int32)
        if len(steps) > 1 and rank >= 0 and not -rank <= axis < rank:
            raise self.refuse(op, f"the axis {axis} is outside the {rank} axes of the operand", AGAIN)
        stem = op.inputs[scale]
        return self.scaling_of(stem, steps, offsets, axis % rank if rank > 0 else axis, dtype)

    def scaling_of(self, stem: str, steps: Array, offsets: Array, axis: int, dtype: DType) -> Scaling:
        """A quantisation of given elements."""
        stem = stem.removesuffix("_scale")
        names = [
            self.builder.constant(f"{stem}_{suffix}", array)
            for suffix, array in (("scale", steps.astype(np.float32)), ("zero_point", offsets.astype(np.int32)))
        ]
        self.static.update(names)
        return Scaling(names[0], names[1], axis if len(steps) > 1 else -1, dtype, steps, offsets)

    def dequantized(self, op: OnnxNode, value: str, scaling: Scaling, stem: str = "") -> str:
        """The float meaning of an integer value."""
        kind = self.type_of(value).dtype
        if kind is not scaling.dtype:
            raise self.refuse(op, f"{value!r} is {kind.text}, its zero point {scaling.dtype.text}", ALIKE)
        operands = [value, scaling.scale, scaling.zero_point]
        return self.add(op, Dequantize(scaling.axis), operands, stem or f"{value}_real")

    def quantized(self, op: OnnxNode, value: str, scaling: Scaling, stem: str = "") -> str:
        """A float value as integers."""
        operands = [value, scaling.scale, scaling.zero_point]
        return self.add(op, Quantize(scaling.dtype, scaling.axis), operands, stem)

    def positive_axis(self, op: OnnxNode, axis: int, rank: int) -> int:
        """An axis counted from either end as one counted from the front."""
        if not -rank <= axis < rank:
            raise self.refuse(op, f"axis {axis} is outside the {rank} axes", AGAIN)
        return axis % rank


def over_axes(op: OnnxNode, axes: Sequence[int | None]) -> OnnxNode:
    """A window operator with its attributes as they are for a two-dimensional one.

    Args:
        op: an operator over any number of image axes.
        axes: which of them are the rows and the columns; None for an axis of size 1 that is not there.
    """
    attributes = dict(op.attributes)
    for name, default in (("kernel_shape", 1), ("strides", 1), ("dilations", 1), ("pads", 0)):
        given = attributes.get(name)
        if given is None:
            continue
        rank = len(given) // 2 if name == "pads" else len(given)
        if any(axis is not None and axis >= rank for axis in axes) or (name == "pads" and len(given) != 2 * rank):
            continue  # too short for its operand, which its reader refuses
        picked = tuple(default if axis is None else given[axis] for axis in axes)
        if name == "pads":
            picked += tuple(default if axis is None else given[rank + axis] for axis in axes)
        attributes[name] = picked
    return replace(op, attributes=attributes)


def pair(ctx: OnnxContext, op: OnnxNode, values: Sequence[int], what: str) -> tuple[int, int]:
    """Rows and columns of a 2-D operator."""
    if len(values) != 2 or min(values) < 1:
        raise ctx.refuse(op, f"the {what} {list(values)} must be two positive numbers (2-D images only)", AGAIN)
    return int(values[0]), int(values[1])


def image_padding(
    ctx: OnnxContext, op: OnnxNode, sizes: Shape, span: tuple[int, int], stride: tuple[int, int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows and columns added around an image by the attributes pads and auto_pad.

    Args:
        ctx: the import.
        op: the operator.
        sizes: rows and columns of the image.
        span: rows and columns a window covers, dilation included.
        stride: rows and columns from one window to the next.
    """
    mode = ctx.attribute(op, "auto_pad", "NOTSET")
    pads = tuple(ctx.attribute(op, "pads", (0, 0, 0, 0)))
    if mode == "NOTSET":
        if len(pads) != 4 or min(pads) < 0:
            raise ctx.refuse(op, f"the pads {list(pads)} must be four numbers of at least 0", AGAIN)
        return (pads[0], pads[2]), (pads[1], pads[3])
    if mode == "VALID":
        return (0, 0), (0, 0)
    if mode not in ("SAME_UPPER", "SAME_LOWER"):
        raise ctx.refuse(op, f"auto_pad = {mode} is not supported")
    found = []
    for size, reach, step in zip(sizes, span, stride, strict=True):
        total = max((-(-size // step) - 1) * step + reach - size, 0)
        small, large = total // 2, total - total // 2
        found.append((small, large) if mode == "SAME_UPPER" else (large, small))
    return found[0], found[1]
