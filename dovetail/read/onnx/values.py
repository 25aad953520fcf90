"""State of an importer of an ONNX operator: its operands and attributes, the graph being built, and constants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, TypeVar

import numpy as np

from dovetail.ir.graph import GraphBuilder
from dovetail.ir.operators.arithmetic import Dequantize, Quantize
from dovetail.ir.operators.base import Operator, Padding2d, SlidingWindow
from dovetail.ir.operators.user import UserOperator
from dovetail.ir.types import Array, DType, Shape
from dovetail.notes import Tell, silent
from dovetail.read.geometry import Pair, same_padding
from dovetail.read.onnx.file import Constant, OnnxFile, OnnxNode, wrap
from dovetail.read.values import AGAIN, ALIKE, FOLD, MAX_ELEMENTS, OTHERWISE, SMALLER, Consequence, Value, Values, words
from dovetail.records import Record

T = TypeVar("T")

ADVICE: Mapping[str, str] = {
    OTHERWISE: "say it with other operators or attributes, and export the network again",
    AGAIN: "export the network again: what this file says contradicts itself",
    FOLD: "make it a constant, for instance by folding constants during the export",
    ALIKE: "quantise again: per tensor, weights per output channel, with positive scales and zero points of the same "
    "type",
    SMALLER: "make the network smaller there, and export it again",
}
"""Advice for each kind of refusal."""

QONNX_DOMAINS = ("qonnx.custom_op.general", "finn.custom_op.general", "onnx.brevitas")
"""Domains QONNX's operators are found in."""

UNPADDED: Padding2d = ((0, 0), (0, 0))
"""No border."""

TO_NHWC, TO_NCHW = (0, 2, 3, 1), (0, 3, 1, 2)
"""Orders of axes; the first is OIHW to OHWI, too."""


class OnnxQuantisation(Record):
    """The parameters of one quantisation, as constants of the graph."""

    scale: Value
    zero_point: Value
    axis: int
    """The axis the parameters run along; -1 per tensor."""
    dtype: DType
    """The zero point's type: that of the integers."""
    steps: Array
    """The scale's elements, float32 [1 or C]."""


class OnnxValues(Values):
    """The import in progress, as one operator of the file sees it; values are kept in ONNX's own axis order."""

    advice = ADVICE
    op: OnnxNode
    """The operator being read."""
    read: set[str]
    """Attributes of it that its entry has honoured."""
    called: set[Value]
    """Graph values that are called as one of its results."""

    def __init__(self, file: OnnxFile, name: str) -> None:
        self.file, self.builder = file, GraphBuilder(name)
        self.values: dict[str, Value] = {}
        """Graph value of each ONNX value computed so far."""
        self.constants: dict[str, Constant] = dict(file.constants)
        """ONNX values known at compile time."""
        self.static: set[Value] = set()
        """Graph values computed from constants alone."""
        self.tell: Tell = silent
        """Is told what a user should know of an operator."""
        self.own: Mapping[tuple[str, str], type[UserOperator]] = {}
        """Operators of the user's own and bundled ones, by domain and name."""
        self.steps: list[OnnxNode] = []
        """Every operator imported so far, those of bodies each time."""
        self.lost: set[str] = set()
        """ONNX values whose operators are refused, and whose types no one says."""
        self.depth = 0
        """How many bodies this one lies in."""
        self._places: dict[int, tuple[Constant, Value]] = {}
        """Constants put into the graph by their names, and their values."""

    def stand_in(self) -> None:
        for name in filter(None, self.op.outputs):
            kind = self.file.types.get(name) or dict(self.file.outputs).get(name)
            if kind is not None and name not in self.values:
                self.values[name] = self.stood_in(name, kind)
            elif name not in self.values:
                self.lost.add(name)

    @property
    def stem(self) -> str:
        return next(name for name in self.op.outputs if name)

    @property
    def origin(self) -> str:
        return f"{self.op.op_type} {self.op.index} ({self.op.name or next(iter(self.op.outputs), '')})"

    @property
    def where(self) -> str:
        return f"{self.file.name}, {self.origin}"

    @property
    def opset(self) -> int:
        """Version of the standard operators."""
        return self.file.opsets.get("", self.file.opsets.get("com.microsoft", 1))

    # What the operator says

    def given(self, name: str) -> Any:
        """An attribute as the file has it, now honoured; None where it is not set."""
        self.read.add(name)
        return self.op.attributes.get(name)

    def attribute(self, name: str, default: T) -> T:
        """An attribute in the type of its default, now honoured; the default where it is not set."""
        found, kind = self.given(name), type(default)
        try:
            return default if found is None else kind(found)  # type: ignore[call-arg]
        except TypeError as error:
            raise self.refuse(f"the attribute {name} = {found} is not supported") from error

    def only(self, name: str, wanted: object) -> None:
        """Refuse an attribute set to anything but `wanted` (its default)."""
        found = self.given(name)
        self.refuse_if(found not in (None, wanted), f"the attribute {name} = {found} is not supported, only {wanted}")

    def choice(self, name: str, default: str, *known: str) -> str:
        """A text attribute, one of a few."""
        found = self.attribute(name, default)
        if found not in known:
            raise self.refuse(f"the attribute {name} = {found} is not supported, only {' and '.join(known)}")
        return found

    def has(self, position: int) -> bool:
        """True when the operand is there."""
        return position < len(self.op.inputs) and self.op.inputs[position] != ""

    def name_of(self, position: int) -> str:
        """The ONNX name of an operand that must be there."""
        self.wrong_if(not self.has(position), f"operand {position} is missing")
        return self.op.inputs[position]

    def constant_operand(self, position: int, what: str) -> Constant:
        """An operand that must be a constant."""
        name = self.name_of(position)
        self.refuse_if(name not in self.constants, f"the {what} {name!r} must be constant", FOLD)
        return self.constants[name]

    def array(self, position: int, what: str) -> Array:
        """The elements of an operand that must be a constant."""
        return self.constant_operand(position, what).array

    def integers(self, position: int, what: str, default: Shape | None = None, old: str = "") -> Shape:
        """The elements of a constant integer operand, in older opsets an attribute called `old`; the default, if there
        is one, where it is absent."""
        found = self.given(old) if old else None
        if found is not None:
            return tuple(found)
        if default is not None and not self.has(position):
            return default
        array = self.array(position, what)
        self.wrong_if(array.dtype.kind not in "iu", f"the {what} must be integers, got {array.dtype}")
        return tuple(array.reshape(-1).tolist())

    def one_number(self, position: int, default: float, what: str) -> float:
        """The one element of a constant operand, `default` where it is absent."""
        if not self.has(position):
            return default
        array = self.array(position, what)
        self.wrong_if(array.size != 1 or array.dtype.kind not in "fiu", f"the {what} must be one number")
        return float(array.reshape(-1)[0])

    def axis_of(self, x: Value, default: int) -> int:
        """The attribute `axis`, an axis of x, counted from the front."""
        return self.axis(self.attribute("axis", default), x.rank)

    def one_result(self, what: str) -> None:
        """Refuse further results; `what` they are."""
        self.refuse_if(sum(name != "" for name in self.op.outputs) != 1, what)

    # Operands

    @property
    def x(self) -> Value:
        """The graph value of the first operand."""
        return self.value(0)

    def value(self, position: int) -> Value:
        """The graph value of an operand, in ONNX's axis order."""
        return self.named_value(self.name_of(position))

    def named_value(self, name: str) -> Value:
        """The graph value of an ONNX value; constants are put into the graph once."""
        if name not in self.values:
            if name in self.lost:
                raise Consequence(f"{name!r} is not known", where=self.where, hint="see the refusal before")
            self.wrong_if(name not in self.constants, f"{name!r} is read before it is computed")
            held = self.constants[name]
            if id(held) not in self._places:
                self._places[id(held)] = held, self.place(name, held)
            self.values[name] = self._places[id(held)][1]
        return self.values[name]

    def real(self, position: int = 0) -> Value:
        """The graph value of an operand, which must be float."""
        x = self.value(position)
        self.refuse_if(x.dtype is not DType.FLOAT32, f"works on float32 here, its operand is {x.type}")
        return x

    def optional(self, position: int) -> list[Value]:
        """An operand that may be absent."""
        return [self.value(position)] if self.has(position) else []

    @property
    def operands(self) -> list[Value]:
        """The graph values of all operands, none of which may be absent."""
        return [self.value(position) for position in range(len(self.op.inputs))]

    def place(self, stem: str, constant: Constant) -> Value:
        """Put a constant into the graph."""
        kind = constant.array.dtype
        self.refuse_if(constant.dtype is None, f"the constant {stem!r} has the type {kind}, which is not supported")
        return self.placed(stem, constant.array, constant.dtype)

    # The graph

    def add(self, operator: Operator, operands: Sequence[Value], suffix: str = "", name: str = "") -> Value:
        value = super().add(operator, operands, suffix, name)
        what = f"computes {value.type}; the limit is {MAX_ELEMENTS} elements"
        self.refuse_if(value.elements >= MAX_ELEMENTS, what, SMALLER)
        if self.static.issuperset(operands):
            self.static.add(value)
        if name in self.op.outputs or not name + suffix:
            self.called.add(value)
        return value

    def placed(self, stem: str, array: Array, dtype: DType | None = None) -> Value:
        value = super().placed(stem, array, dtype)
        self.static.add(value)
        return value

    def number(self, value: float, suffix: str = "constant") -> Value:
        """A float constant of one element; ONNX's are all called constant."""
        return super().number(value)

    def fixed(self, x: Value) -> bool:
        return x in self.static

    def image(self, x: Value) -> Value:
        """An NCHW value as NHWC."""
        self.refuse_if(x.rank != 4, f"works on 2-D images only, its operand is {x.type}")
        return self.transpose(x, TO_NHWC, name=f"{x}_nhwc")

    def of_image(self, image: Value) -> Value:
        """The operator's result from an NHWC value."""
        return self.transpose(image, TO_NCHW)

    def bind(self, value: Value) -> None:
        """Make `value` the operator's first result; a result of the model keeps its own name."""
        name = self.op.outputs[0]
        if value not in self.called and any(name == output for output, _ in self.file.outputs):
            value = self.reshape(value, value.shape)
        self.values[name] = value

    def bind_further(self, values: Sequence[Value], shape: Shape) -> None:
        """Make values, under a shape, the results behind the first, where the file has them."""
        for name, value in zip(self.op.outputs[1:], values, strict=False):
            if name:
                self.values[name] = self.reshape(value, shape, name=name)

    # Quantisation

    def scaling(
        self, scale: int, zero_point: int, axis: int = -1, default: DType = DType.UINT8, rank: int = -1
    ) -> OnnxQuantisation:
        """Scale and zero point from constant operands at these positions; without the second, 0 of the type `default`.
        Several run along `axis` of the quantised operand's `rank` axes (-1: not checked)."""
        given, stem = self.constant_operand(scale, "scale"), self.op.inputs[scale]
        steps = given.array.reshape(-1)
        if given.dtype is not DType.FLOAT32 or given.array.ndim > 1 or not (np.isfinite(steps) & (steps > 0)).all():
            raise self.refuse(f"the scale {stem!r} must be float32, positive, and at most one axis", ALIKE)
        dtype, offsets = default, np.zeros(len(steps), np.int32)
        if self.has(zero_point):
            found = self.constant_operand(zero_point, "zero point")
            if found.dtype is None or not found.dtype.is_integer or found.array.size not in (1, len(steps)):
                raise self.refuse(f"the zero point {self.op.inputs[zero_point]!r} does not fit the scale", ALIKE)
            dtype = found.dtype
            offsets = np.broadcast_to(found.array.reshape(-1), steps.shape).astype(np.int32)
        outside = len(steps) > 1 and rank >= 0 and not -rank <= axis < rank
        self.wrong_if(outside, f"the axis {axis} is outside the {rank} axes of the operand")
        return self.scaling_of(stem, steps, offsets, axis % rank if rank > 0 else axis, dtype)

    def scaling_of(self, stem: str, steps: Array, offsets: Array, axis: int, dtype: DType) -> OnnxQuantisation:
        """A quantisation of given elements."""
        stem = stem.removesuffix("_scale")
        scale = self.placed(f"{stem}_scale", steps.astype(np.float32))
        zero_point = self.placed(f"{stem}_zero_point", offsets.astype(np.int32))
        return OnnxQuantisation(scale, zero_point, axis if len(steps) > 1 else -1, dtype, steps)

    def dequantized(self, value: Value, scaling: OnnxQuantisation, name: str = "") -> Value:
        """The float meaning of an integer value."""
        kind = value.dtype
        if kind is not scaling.dtype:
            raise self.refuse(f"{value.name!r} is {kind.text}, its zero point {scaling.dtype.text}", ALIKE)
        operands = [value, scaling.scale, scaling.zero_point]
        return self.add(Dequantize(scaling.axis), operands, name=name or f"{value}_real")

    def real_operand(self, position: int) -> Value:
        """The float meaning of an operand that its scale and zero point follow."""
        return self.dequantized(self.value(position), self.scaling(position + 1, position + 2))

    def quantized(self, value: Value, scaling: OnnxQuantisation, suffix: str = "") -> Value:
        """A float value as integers."""
        return self.add(Quantize(scaling.dtype, scaling.axis), [value, scaling.scale, scaling.zero_point], suffix)

    # Windows

    def over_axes(self, axes: Sequence[int | None]) -> OnnxValues:
        """The operator, over any number of image axes, as a two-dimensional one: `axes` are rows and columns among
        them, None one of size 1 that is not there. Attributes that are too short stay, for their reader to refuse."""
        attributes = dict(self.op.attributes)
        for name, default in (("kernel_shape", 1), ("strides", 1), ("dilations", 1), ("pads", 0)):
            given = attributes.get(name, ())
            rank = len(given) // (2 if name == "pads" else 1)
            if len(given) in (rank, 2 * rank) and all(axis is None or axis < rank for axis in axes):
                starts = range(0, len(given), max(rank, 1))
                pairs = [default if axis is None else given[start + axis] for start in starts for axis in axes]
                attributes |= {name: tuple(pairs)} if given else {}
        return self.again(op=replace(self.op, attributes=attributes))

    def pair(self, name: str, default: Shape = (1, 1)) -> Pair:
        """An attribute of positive rows and columns."""
        values = self.attribute(name, default)
        odd = len(values) != 2 or min(values) < 1
        self.wrong_if(odd, f"the {name} {list(values)} must be two positive numbers (2-D images only)")
        return int(values[0]), int(values[1])

    def window(self, sizes: Shape, kernel: Shape = ()) -> SlidingWindow:
        """The window that attributes say, over rows and columns `sizes`; `kernel` is the default of kernel_shape."""
        window = SlidingWindow(self.pair("kernel_shape", kernel), self.pair("strides"), self.pair("dilations"))
        mode, pads = self.attribute("auto_pad", "NOTSET"), self.attribute("pads", (0, 0, 0, 0))
        if mode == "NOTSET":
            self.wrong_if(len(pads) != 4 or min(pads) < 0, f"the pads {list(pads)} must be four numbers of at least 0")
            return replace(window, padding=((pads[0], pads[2]), (pads[1], pads[3])))
        rows, columns = same_padding(window, sizes)
        known = {"VALID": UNPADDED, "SAME_UPPER": (rows, columns), "SAME_LOWER": (rows[::-1], columns[::-1])}
        self.refuse_if(mode not in known, f"auto_pad = {mode} is not supported")
        return replace(window, padding=known[mode])


Importer = Callable[[OnnxValues], Value | None]
"""Adds an operator's nodes and gives its first result, None where it notes them itself; raises ModelError."""

# What a model derives from constants alone (shapes, quantised weights) is computed at once

FOLDABLE = words(
    "Abs Add And ArgMax ArgMin Cast CastLike Ceil Clip Concat ConstantOfShape Cos CumSum Div Einsum Equal Erf Exp "
    "Expand EyeLike Flatten Floor Gather GatherElements GatherND Greater GreaterOrEqual Identity Less LessOrEqual "
    "Log MatMul Max Mean Min Mod Mul Neg NonZero Not OneHot Or Pad Pow QuantizeLinear Range Reciprocal ReduceL1 "
    "ReduceL2 ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum Reshape Round ScatterElements ScatterND Shape "
    "Sigmoid Sign Sin Size Slice Softmax Split Sqrt Squeeze Sub Sum Tanh Tile TopK Transpose Trilu Unsqueeze Where "
    "Xor"
)
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
    operands = {name: v.constants.get(name) for name in op.inputs if name}
    held = {name: constant for name, constant in operands.items() if constant is not None}
    if op.domain != "" or op.op_type not in FOLDABLE or not held or len(held) < len(operands):
        return False
    try:
        with np.errstate(divide="raise", invalid="raise", over="ignore"):
            large = _largest(op, [held[name].array for name in op.inputs if name]) > MAX_FOLDED
            results = {} if large else _run(op, held, v.opset)
    except Exception as error:  # the reference evaluator raises errors of many kinds for wrong operands
        raise v.refuse(f"cannot be computed from its constant operands: {error!s:.200}", AGAIN) from error
    v.refuse_if(large, f"gives more than {MAX_FOLDED} elements from constants", SMALLER)
    v.constants |= results
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
    sizes = [array.size for array in operands]
    match op.op_type:
        case "Range":
            start, stop, step = (float(array.reshape(-1)[0]) for array in operands)
            return MAX_FOLDED + 1 if step == 0 else int(abs(stop - start) / abs(step)) + 1
        case "ConstantOfShape" | "Expand":
            repeats = prod(max(int(size), 1) for size in operands[-1].reshape(-1))
            return repeats * (sizes[0] if op.op_type == "Expand" else 1)
        case "Gather" | "GatherND" | "OneHot":
            return max(sizes) * max(sizes[1], 1)
        case "Einsum" | "MatMul" | "EyeLike":
            return prod(max(size, 1) for size in sizes)
        case "Tile":
            return sizes[0] * prod(max(int(count), 1) for count in operands[1].reshape(-1))
        case "Pad":
            grown = np.abs(operands[1].reshape(-1).astype(np.int64)) if len(operands) > 1 else np.zeros(1, np.int64)
            return prod(size + int(grown.sum()) for size in operands[0].shape)
        case "Concat":
            return sum(sizes)
    rank = max(array.ndim for array in operands)
    aligned = [(1,) * (rank - array.ndim) + array.shape for array in operands]
    return prod(map(max, zip(*aligned, strict=True)))


def _run(op: OnnxNode, operands: Mapping[str, Constant], opset: int) -> dict[str, Constant]:
    """The operator's results by the ONNX reference evaluator."""
    from onnx import helper, numpy_helper
    from onnx.reference import ReferenceEvaluator

    attributes = {
        name: numpy_helper.from_array(value.array, name) if isinstance(value, Constant) else value
        for name, value in op.attributes.items()
    }
    node, names = helper.make_node(op.op_type, op.inputs, op.outputs, **attributes), [n for n in op.outputs if n]
    function = helper.make_function("", "folded", list(operands), names, [node], [helper.make_opsetid("", opset)])
    results = ReferenceEvaluator(function).run(None, {name: _to_numpy(held) for name, held in operands.items()}, {})
    return {name: _from_numpy(np.asarray(array)) for name, array in zip(names, results, strict=True)}


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
