"""State of an importer of an ONNX operator: its operands and attributes, the graph being built, and constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from dovetail.errors import ModelError
from dovetail.ir.graph import GraphBuilder
from dovetail.ir.operators.arithmetic import Dequantize, Quantize
from dovetail.ir.operators.base import Operator, Padding2d
from dovetail.ir.operators.movement import Reshape, Transpose
from dovetail.ir.types import Array, DType, Shape
from dovetail.read.geometry import Pair, same_border
from dovetail.read.onnx.file import Constant, OnnxFile, OnnxNode, wrap
from dovetail.read.values import MAX_ELEMENTS, MAX_PLACES, Values

# What to do about what a reader refuses; each sentence fits many messages.
OTHERWISE = "say it with other operators or attributes, and export the network again"
AGAIN = "export the network again: what this file says contradicts itself"
FOLD = "make it a constant, for instance by folding constants during the export"
ALIKE = "quantise again: per tensor, weights per output channel, with positive scales and zero points of the same type"
SMALLER = "make the network smaller there, and export it again"

TO_NHWC, TO_NCHW = (0, 2, 3, 1), (0, 3, 1, 2)
"""Orders of axes; the first is OIHW to OHWI, too."""


@dataclass(frozen=True)
class OnnxQuantisation:
    """The parameters of one quantisation, as constants of the graph."""

    scale: str
    zero_point: str
    axis: int
    """The axis the parameters run along; -1 per tensor."""
    dtype: DType
    """The zero point's type: that of the integers."""
    steps: Array
    """The scale's elements, float32 [1 or C]."""


class OnnxValues(Values):
    """The import in progress, as one operator of the file sees it; values are kept in ONNX's own axis order."""

    op: OnnxNode
    """The operator being read."""
    read: set[str]
    """Attributes of it that its entry has honoured."""
    called: set[str]
    """Graph values that are called as one of its results."""

    def __init__(self, file: OnnxFile, name: str) -> None:
        self.file, self.builder = file, GraphBuilder(name)
        self.values: dict[str, str] = {}
        """Graph value of each ONNX value computed so far."""
        self.constants: dict[str, Constant] = dict(file.constants)
        """ONNX values known at compile time."""
        self.static: set[str] = set()
        """Graph values computed from constants alone."""

    @property
    def stem(self) -> str:
        return next(name for name in self.op.outputs if name)

    @property
    def origin(self) -> str:
        return f"{self.op.op_type} {self.op.index} ({self.op.name or next(iter(self.op.outputs), '')})"

    def refuse(self, what: str, hint: str = OTHERWISE) -> ModelError:
        return ModelError(what, where=f"{self.file.name}, {self.origin}", hint=hint)

    @property
    def opset(self) -> int:
        """Version of the standard operators."""
        return self.file.opsets.get("", self.file.opsets.get("com.microsoft", 1))

    # What the operator says

    def attribute(self, name: str, default: Any) -> Any:
        """An attribute, now honoured; `default` where it is not set."""
        self.read.add(name)
        return self.op.attributes.get(name, default)

    def only(self, name: str, wanted: Any) -> None:
        """Refuse an attribute set to anything but `wanted` (its default)."""
        found = self.attribute(name, wanted)
        if found != wanted:
            raise self.refuse(f"the attribute {name} = {found} is not supported, only {wanted}")

    def choice(self, name: str, default: str, *known: str) -> str:
        """A text attribute, one of a few."""
        found = self.attribute(name, default)
        if found not in known:
            raise self.refuse(f"the attribute {name} = {found} is not supported, only {' and '.join(known)}")
        return str(found)

    def has(self, position: int) -> bool:
        """True when the operand is there."""
        return position < len(self.op.inputs) and self.op.inputs[position] != ""

    def name_of(self, position: int) -> str:
        """The ONNX name of an operand that must be there."""
        if not self.has(position):
            raise self.refuse(f"operand {position} is missing", AGAIN)
        return self.op.inputs[position]

    def constant_operand(self, position: int, what: str) -> Constant:
        """An operand that must be a constant."""
        name = self.name_of(position)
        if name not in self.constants:
            raise self.refuse(f"the {what} {name!r} must be constant", FOLD)
        return self.constants[name]

    def integers(self, position: int, what: str) -> tuple[int, ...]:
        """The elements of a constant integer operand."""
        array = self.constant_operand(position, what).array
        if array.dtype.kind not in "iu":
            raise self.refuse(f"the {what} must be integers, got {array.dtype}", AGAIN)
        return tuple(int(value) for value in array.reshape(-1))

    def listed(self, name: str, position: int, what: str) -> tuple[int, ...] | None:
        """Integers that are an attribute in older opsets and a constant operand since; None where there are none."""
        found = self.attribute(name, None)
        if found is not None:
            return tuple(found)
        return self.integers(position, what) if self.has(position) else None

    def one_number(self, position: int, default: float, what: str) -> float:
        """The one element of a constant operand, `default` where it is absent."""
        if not self.has(position):
            return default
        array = self.constant_operand(position, what).array
        if array.size != 1 or array.dtype.kind not in "fiu":
            raise self.refuse(f"the {what} must be one number", AGAIN)
        return float(array.reshape(-1)[0])

    def axis(self, axis: int, rank: int) -> int:
        """An axis counted from either end as one counted from the front."""
        if not -rank <= axis < rank:
            raise self.refuse(f"axis {axis} is outside the {rank} axes", AGAIN)
        return axis % rank

    def axis_of(self, x: str, default: int) -> int:
        """The attribute `axis`, an axis of x, counted from the front."""
        return self.axis(int(self.attribute("axis", default)), len(self.shape(x)))

    def one_result(self, what: str) -> None:
        """Refuse further results; `what` they are."""
        if sum(name != "" for name in self.op.outputs) != 1:
            raise self.refuse(what)

    # Operands

    def value(self, position: int) -> str:
        """The graph value of an operand, in ONNX's axis order."""
        name = self.name_of(position)
        if name not in self.values:
            if name not in self.constants:
                raise self.refuse(f"{name!r} is read before it is computed", AGAIN)
            self.values[name] = self.place(name, self.constants[name])
        return self.values[name]

    def real(self, position: int = 0) -> str:
        """The graph value of an operand, which must be float."""
        x = self.value(position)
        if self.type_of(x).dtype is not DType.FLOAT32:
            raise self.refuse(f"works on float32 here, its operand is {self.type_of(x)}")
        return x

    @property
    def operands(self) -> list[str]:
        """The graph values of all operands, none of which may be absent."""
        return [self.value(position) for position in range(len(self.op.inputs))]

    def place(self, stem: str, constant: Constant) -> str:
        """Put a constant into the graph."""
        if constant.dtype is None:
            raise self.refuse(f"the constant {stem!r} has the type {constant.array.dtype}, which is not supported")
        value = self.builder.constant(stem, constant.array, constant.dtype)
        self.static.add(value)
        return value

    # The graph

    def add(self, operator: Operator, operands: Sequence[str], suffix: str = "", name: str = "") -> str:
        value = super().add(operator, operands, suffix, name)
        if self.type_of(value).elements >= MAX_ELEMENTS:
            raise self.refuse(f"computes {self.type_of(value)}; the limit is {MAX_ELEMENTS} elements", SMALLER)
        if all(operand in self.static for operand in operands):
            self.static.add(value)
        if name in self.op.outputs or not name + suffix:
            self.called.add(value)
        return value

    def constant(self, array: Array, suffix: str) -> str:
        value = super().constant(array, suffix)
        self.static.add(value)
        return value

    def number(self, value: float, suffix: str = "constant") -> str:
        """A float constant of one element; ONNX's are all called constant."""
        return super().number(value)

    def fixed(self, x: str) -> bool:
        return x in self.static

    def pick(self, x: str, places: Sequence[Sequence[int]], suffix: str = "") -> str:
        self.check_places(max((len(chosen) for chosen in places), default=0))
        return super().pick(x, places, suffix)

    def check_places(self, longest: int) -> None:
        """Refuse to pick more places along one axis than may be."""
        if longest > MAX_PLACES:
            raise self.refuse(f"picks {longest} places along one axis; the limit is {MAX_PLACES}", SMALLER)

    def image(self, x: str) -> str:
        """An NCHW value as NHWC."""
        if len(self.shape(x)) != 4:
            raise self.refuse(f"works on 2-D images only, its operand is {self.type_of(x)}")
        return self.add(Transpose(TO_NHWC), [x], name=f"{x}_nhwc")

    def of_image(self, image: str) -> str:
        """The operator's result from an NHWC value."""
        return self.add(Transpose(TO_NCHW), [image])

    def bind(self, value: str) -> None:
        """Make `value` the operator's first result; a result of the model keeps its own name."""
        name = self.op.outputs[0]
        if value not in self.called and any(name == output for output, _ in self.file.outputs):
            value = self.add(Reshape(self.shape(value)), [value])
        self.values[name] = value

    # Quantisation

    def scaling(
        self, scale: int, zero_point: int, axis: int = -1, default: DType = DType.UINT8, rank: int = -1
    ) -> OnnxQuantisation:
        """Scale and zero point from constant operands at these positions; without the second, 0 of the type `default`.

        Parameters of more than one element run along `axis` of the quantised operand's `rank` axes (-1: not checked).
        """
        given = self.constant_operand(scale, "scale")
        steps, stem = given.array.reshape(-1), self.op.inputs[scale]
        if given.dtype is not DType.FLOAT32 or given.array.ndim > 1 or not (np.isfinite(steps) & (steps > 0)).all():
            raise self.refuse(f"the scale {stem!r} must be float32, positive, and at most one axis", ALIKE)
        dtype, offsets = default, np.zeros(len(steps), np.int32)
        if self.has(zero_point):
            found = self.constant_operand(zero_point, "zero point")
            if found.dtype is None or not found.dtype.is_integer or found.array.size not in (1, len(steps)):
                raise self.refuse(f"the zero point {self.op.inputs[zero_point]!r} does not fit the scale", ALIKE)
            dtype = found.dtype
            offsets = np.broadcast_to(found.array.reshape(-1), steps.shape).astype(np.int32)
        if len(steps) > 1 and rank >= 0 and not -rank <= axis < rank:
            raise self.refuse(f"the axis {axis} is outside the {rank} axes of the operand", AGAIN)
        return self.scaling_of(stem, steps, offsets, axis % rank if rank > 0 else axis, dtype)

    def scaling_of(self, stem: str, steps: Array, offsets: Array, axis: int, dtype: DType) -> OnnxQuantisation:
        """A quantisation of given elements."""
        stem = stem.removesuffix("_scale")
        scale = self.builder.constant(f"{stem}_scale", steps.astype(np.float32))
        zero_point = self.builder.constant(f"{stem}_zero_point", offsets.astype(np.int32))
        self.static |= {scale, zero_point}
        return OnnxQuantisation(scale, zero_point, axis if len(steps) > 1 else -1, dtype, steps)

    def dequantized(self, value: str, scaling: OnnxQuantisation, name: str = "") -> str:
        """The float meaning of an integer value."""
        kind = self.type_of(value).dtype
        if kind is not scaling.dtype:
            raise self.refuse(f"{value!r} is {kind.text}, its zero point {scaling.dtype.text}", ALIKE)
        operands = [value, scaling.scale, scaling.zero_point]
        return self.add(Dequantize(scaling.axis), operands, name=name or f"{value}_real")

    def real_operand(self, position: int) -> str:
        """The float meaning of an operand that its scale and zero point follow."""
        return self.dequantized(self.value(position), self.scaling(position + 1, position + 2))

    def quantized(self, value: str, scaling: OnnxQuantisation, suffix: str = "") -> str:
        """A float value as integers."""
        return self.add(Quantize(scaling.dtype, scaling.axis), [value, scaling.scale, scaling.zero_point], suffix)

    # Windows

    def over_axes(self, axes: Sequence[int | None]) -> OnnxValues:
        """The operator, over any number of image axes, with its attributes as they are for a two-dimensional one.

        `axes` are the rows and the columns among them; None stands for an axis of size 1 that is not there.
        """
        attributes = dict(self.op.attributes)
        for name, default in (("kernel_shape", 1), ("strides", 1), ("dilations", 1), ("pads", 0)):
            given = attributes.get(name)
            if given is None:
                continue
            rank = len(given) // 2 if name == "pads" else len(given)
            if any(axis is not None and axis >= rank for axis in axes) or len(given) not in (rank, 2 * rank):
                continue  # too short for its operand, which its reader refuses
            attributes[name] = tuple(
                default if axis is None else given[first + axis]
                for first in range(0, len(given), rank)
                for axis in axes
            )
        return self.again(op=replace(self.op, attributes=attributes))

    def pair(self, name: str, default: Sequence[int] = (1, 1)) -> Pair:
        """An attribute of positive rows and columns."""
        values = self.attribute(name, default)
        if len(values) != 2 or min(values) < 1:
            raise self.refuse(f"the {name} {list(values)} must be two positive numbers (2-D images only)", AGAIN)
        return int(values[0]), int(values[1])

    def padding(self, sizes: Shape, span: Pair, stride: Pair) -> Padding2d:
        """Rows and columns added by the attributes pads and auto_pad around an image of `sizes`, whose windows cover
        `span` rows and columns, dilation included."""
        mode = self.attribute("auto_pad", "NOTSET")
        pads = tuple(self.attribute("pads", (0, 0, 0, 0)))
        if mode == "NOTSET":
            if len(pads) != 4 or min(pads) < 0:
                raise self.refuse(f"the pads {list(pads)} must be four numbers of at least 0", AGAIN)
            return (pads[0], pads[2]), (pads[1], pads[3])
        if mode == "VALID":
            return (0, 0), (0, 0)
        if mode not in ("SAME_UPPER", "SAME_LOWER"):
            raise self.refuse(f"auto_pad = {mode} is not supported")
        rows, columns = map(same_border, sizes, span, stride)
        return (rows, columns) if mode == "SAME_UPPER" else (rows[::-1], columns[::-1])


Importer = Callable[[OnnxValues], str | None]
"""Adds an operator's nodes and gives its first result, None where it notes its results itself; raises ModelError for
what it cannot honour."""

# What a model derives from constants alone (shapes, quantised weights) is computed at once

FOLDABLE = {
    *("Abs", "Add", "And", "Cast", "Ceil", "Concat", "ConstantOfShape", "Div", "Equal", "Expand", "Flatten", "Floor"),
    *("Gather", "Greater", "Identity", "Less", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Pow", "QuantizeLinear"),
    *("Range", "Reciprocal", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape", "Round", "Shape", "Sign"),
    *("Size", "Slice", "Split", "Sqrt", "Squeeze", "Sub", "Transpose", "Unsqueeze", "Where"),
}
"""Standard operators folded when all their operands are constants. DequantizeLinear is not among them: the
quantise stage needs the integers of a constant."""

MAX_FOLDED = 1 << 26
"""Most elements a folded constant may have."""


def fold(v: OnnxValues) -> bool:
    """Compute the operator's results if all its operands are constants; True when it did.

    Raises:
        ModelError: a result would be larger than MAX_FOLDED, or the operator's attributes are wrong.
    """
    op = v.op
    if op.domain == "" and op.op_type == "Constant":
        v.constants[op.outputs[0]] = _constant(v)
        return True
    present = [name for name in op.inputs if name]
    if op.domain != "" or op.op_type not in FOLDABLE or not present or any(name not in v.constants for name in present):
        return False
    operands = {name: v.constants[name] for name in present}
    if _largest(op, [entry.array for entry in operands.values()]) > MAX_FOLDED:
        raise v.refuse(f"gives more than {MAX_FOLDED} elements from constants", SMALLER)
    try:
        with np.errstate(divide="raise", invalid="raise", over="ignore"):
            results = _run(op, operands, v.opset)
    except Exception as error:  # the reference evaluator raises errors of many kinds for wrong operands
        raise v.refuse(f"cannot be computed from its constant operands: {str(error)[:200]}", AGAIN) from error
    for name, array in zip(op.outputs, results, strict=False):
        if name:
            v.constants[name] = _from_numpy(array)
    return True


def _constant(v: OnnxValues) -> Constant:
    """The value of a Constant node, whichever attribute holds it."""
    kinds = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}
    for name, kind in kinds.items():
        if name in v.op.attributes:
            return _from_numpy(np.array(v.op.attributes[name], kind))
    value = v.op.attributes.get("value")
    if not isinstance(value, Constant):
        raise v.refuse("holds no dense tensor of numbers", AGAIN)
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
    rank = max(array.ndim for array in operands)
    aligned = [(1,) * (rank - array.ndim) + array.shape for array in operands]
    return prod(map(max, zip(*aligned, strict=True)))


def _run(op: OnnxNode, operands: dict[str, Constant], opset: int) -> list[Array]:
    """The operator's results by the ONNX reference evaluator."""
    from onnx import helper, numpy_helper
    from onnx.reference import ReferenceEvaluator

    node = helper.make_node(op.op_type, list(op.inputs), list(op.outputs))
    for name, value in op.attributes.items():
        held = numpy_helper.from_array(value.array, name) if isinstance(value, Constant) else value
        node.attribute.append(helper.make_attribute(name, held))
    kind = helper.make_tensor_type_proto(0, None)
    inputs, outputs = ([helper.make_value_info(name, kind) for name in ends if name] for ends in (operands, op.outputs))
    graph = helper.make_graph([node], "folded", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    feeds = {name: _to_numpy(constant) for name, constant in operands.items()}
    return [np.asarray(array) for array in ReferenceEvaluator(model).run(None, feeds)]


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
