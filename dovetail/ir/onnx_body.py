"""Writes standard ONNX: nodes and constants, fixed-point arithmetic on int64, numpy functions followed, models.

An operator's meaning is written into an `OnnxBody`, and so are whole networks. Arithmetic on int64 is exact in every
runtime; ONNX shifts only unsigned integers and divides towards zero, so shifts are written as divisions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.lib.mixins import NDArrayOperatorsMixin

from dovetail.ir.types import Array, DType, TensorType
from dovetail.version import __version__

OPSET = 21
"""The version of the standard operators that are written."""
IR_VERSION = 10
"""The file format's version: the one of opset 21, read by every ONNX Runtime since 1.18."""
MOST_BYTES = (1 << 31) - 1
"""The largest protobuf message."""


def element_type(dtype: DType) -> int:
    """ONNX's number for the type that holds an element; types narrower than a byte are held in one."""
    return int(onnx.helper.np_dtype_to_tensor_dtype(dtype.numpy))


def value_info(name: str, kind: TensorType) -> onnx.ValueInfoProto:
    """A value's name and type."""
    return onnx.helper.make_tensor_value_info(name, element_type(kind.dtype), list(kind.shape))


def tensor(name: str, array: Array, dtype: DType | None = None) -> onnx.TensorProto:
    """A constant; of a `dtype` narrower than a byte a tensor of 4 bits, without one of the array's type.

    ONNX has 2-bit tensors since opset 25, but ONNX Runtime 1.31 refuses a convolution with such weights (it makes a
    QLinearConv of it, which takes none), so they are 4-bit tensors of -2 to 1; targets with narrow weights find the
    width from the values (`dovetail.legalize`).
    """
    if dtype is not None and dtype.bits < 8:
        nibble = onnx.TensorProto.INT4 if dtype.signed else onnx.TensorProto.UINT4
        return onnx.helper.make_tensor(name, nibble, array.shape, array.reshape(-1).tolist())
    return onnx.numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)


def onnx_model(
    graph: onnx.GraphProto, producer: str, properties: Mapping[str, str], domain: str = ""
) -> onnx.ModelProto:
    """A model without functions yet.

    Args:
        graph: the network.
        producer: name of the program.
        properties: metadata.
        domain: of the functions, if it will have any.
    """
    model = onnx.ModelProto(ir_version=IR_VERSION, producer_name=producer, producer_version=__version__, graph=graph)
    model.opset_import.add(domain="", version=OPSET)
    if domain:
        model.opset_import.add(domain=domain, version=1)
    for key, value in sorted(properties.items()):
        model.metadata_props.add(key=key, value=value)
    return model


class OnnxBody:
    """Collects nodes: those of one operator's meaning, or of a whole network.

    Names given to `add` are operands, or results of earlier calls.

    Args:
        reserved: names that must not be given to new values.
    """

    def __init__(self, reserved: Sequence[str] = ()) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self._names = set(reserved)
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def node(self, op_type: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        """Add a standard node that bears the name of its result; returns it."""
        self.nodes.append(onnx.helper.make_node(op_type, list(inputs), [output], name=output, **attributes))
        return output

    def initializer(self, name: str, array: Array, dtype: DType) -> str:
        """Add a constant of the network under this very name; returns it."""
        self.initializers.append(tensor(name, array, dtype))
        return name

    def add(self, op_type: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Add a standard node; returns the name of its result."""
        name = self.fresh(op_type.lower())
        self.nodes.append(onnx.helper.make_node(op_type, list(inputs), [name], **attributes))
        return name

    def add_several(self, op_type: str, inputs: Sequence[str], count: int, **attributes: Any) -> list[str]:
        """Add a standard node with several results; returns their names."""
        names = [self.fresh(op_type.lower()) for _ in range(count)]
        self.nodes.append(onnx.helper.make_node(op_type, list(inputs), names, **attributes))
        return names

    def tensor(self, array: Array) -> str:
        """The name of a constant; equal constants are written once."""
        key = (array.dtype.name, tuple(array.shape), array.tobytes())
        if key not in self._constants:
            name = self.fresh("constant")
            value = onnx.numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape))
            self.nodes.append(onnx.helper.make_node("Constant", [], [name], value=value))
            self._constants[key] = name
        return self._constants[key]

    def integers(self, values: Sequence[int]) -> str:
        """The name of an int64 constant of one axis: a shape, a list of axes."""
        return self.tensor(np.array(values, np.int64))

    def scalar(self, value: float, dtype: DType) -> str:
        """The name of a constant without axes."""
        return self.tensor(np.array(value, dtype.numpy))

    def cast(self, name: str, dtype: DType) -> str:
        """The value converted to an element type; int4 and its like become the byte that holds them."""
        return self.add("Cast", [name], to=element_type(dtype))

    def real64(self, name: str) -> str:
        """The value converted to float64."""
        return self.add("Cast", [name], to=int(onnx.TensorProto.DOUBLE))

    def real64_scalar(self, value: float) -> str:
        """The name of a float64 constant without axes."""
        return self.tensor(np.array(value, np.float64))

    def number(self, value: int) -> str:
        """The name of an int64 constant without axes."""
        return self.scalar(value, DType.INT64)

    def power(self, exponent: str) -> str:
        """2**exponent for int64 0 <= exponent <= 62."""
        return self.add("Gather", [self.tensor(np.int64(1) << np.arange(63, dtype=np.int64)), exponent])

    def shift_right(self, total: str, shift: str) -> str:
        """total / 2**shift rounded down, both int64, 0 <= shift <= 62."""
        divisor = self.power(shift)
        rest = self.add("Mod", [total, divisor])
        return self.add("Div", [self.add("Sub", [total, rest]), divisor])

    def with_sign(self, size: str, x: str) -> str:
        """size where x is not negative, -size elsewhere. (ONNX Runtime 1.31's Sign of int64 looks at 32 bits only.)"""
        positive = self.add("GreaterOrEqual", [x, self.number(0)])
        return self.add("Where", [positive, size, self.add("Neg", [size])])

    def high_product(self, a: str, b: str) -> str:
        """a * b / 2**31, halves up (`gemmlowp.high_product`)."""
        raised = self.add("Add", [self.add("Mul", [a, b]), self.number(1 << 30)])
        return self.shift_right(raised, self.number(31))

    def rounding_shift(self, x: str, exponent: str) -> str:
        """x / 2**exponent, halves away from zero (`gemmlowp.rounding_shift`)."""
        divisor = self.power(exponent)
        half = self.add("Div", [divisor, self.number(2)])
        size = self.add("Div", [self.add("Add", [self.add("Abs", [x]), half]), divisor])
        return self.with_sign(size, x)

    def limited(self, x: str, low: int, high: int) -> str:
        """An int64 value within limits."""
        return self.add("Clip", [x, self.number(low), self.number(high)])

    def traced(
        self, meaning: Callable[..., Any], inputs: Sequence[str], types: Sequence[TensorType], dtype: DType
    ) -> str:
        """The nodes of a function of int64 arrays that is written in numpy, cast to `dtype`.

        Args:
            meaning: the function; of numpy it may use what `_UFUNCS` and `_FUNCTIONS` list.
            inputs: names of its operands, of any integer type.
            types: theirs.
            dtype: of the result.
        """
        wide = [Int64Expression(self, self.cast(name, DType.INT64)) for name in inputs]
        for operand, kind in zip(wide, types, strict=False):
            operand.shape = kind.shape
        found = meaning(*wide)
        return self.cast(found.name, dtype)

    def products(
        self,
        op_type: str,
        operands: tuple[str, str],
        types: Sequence[TensorType],
        zero_points: tuple[int, int],
        **attributes: Any,
    ) -> str:
        """Sums of products in the accumulator's type.

        Integers are multiplied as unsigned bytes, the one combination every runtime computes exactly. A 16-bit operand
        goes as its high and its low byte, and the sums are put together in int64.

        Args:
            op_type: "Conv", of an NCHW image with OIHW weights, or "MatMul", of x [..., K] with weights [K, N].
            operands: names of x and weights.
            types: theirs, whatever their layout.
            zero_points: theirs; not used in float.
            attributes: of ONNX's operator.
        """
        x, weights = operands
        if types[0].dtype is DType.FLOAT32:
            weights = weights if types[1].dtype is DType.FLOAT32 else self.cast(weights, DType.FLOAT32)
            return self.add(op_type, [x, weights], **attributes)
        op_type = f"{op_type}Integer"
        weights, weight_zero = self._unsigned(weights, types[1].dtype, zero_points[1])
        if types[0].dtype.bits <= 8:
            x, zero = self._unsigned(x, types[0].dtype, zero_points[0])
            return self.add(op_type, [x, weights, zero, weight_zero], **attributes)
        raised = self.add("Sub", [self.cast(x, DType.INT32), self.scalar(types[0].dtype.low, DType.INT32)])
        zero_high, zero_low = divmod(zero_points[0] - types[0].dtype.low, 256)
        byte = self.scalar(256, DType.INT32)
        parts = ((self.add("Div", [raised, byte]), zero_high), (self.add("Mod", [raised, byte]), zero_low))
        sums = []
        for part, zero_point in parts:
            zero = self.scalar(zero_point, DType.UINT8)
            terms = [self.cast(part, DType.UINT8), weights, zero, weight_zero]
            sums.append(self.cast(self.add(op_type, terms, **attributes), DType.INT64))
        total = self.add("Add", [self.add("Mul", [sums[0], self.scalar(256, DType.INT64)]), sums[1]])
        return total if types[0].dtype is DType.INT16 else self.cast(total, DType.INT32)

    def _unsigned(self, name: str, dtype: DType, zero_point: int) -> tuple[str, str]:
        """An 8-bit operand as uint8, and its zero point moved along."""
        if not dtype.signed:
            return name, self.scalar(zero_point, DType.UINT8)
        raised = self.add("Add", [self.cast(name, DType.INT32), self.scalar(128, DType.INT32)])
        return self.cast(raised, DType.UINT8), self.scalar(zero_point + 128, DType.UINT8)

    def fresh(self, stem: str) -> str:
        """A name that is not used yet, beginning with `stem`."""
        count = 1
        name = stem
        while name in self._names:
            count += 1
            name = f"{stem}_{count}"
        self._names.add(name)
        return name


class Int64Expression(NDArrayOperatorsMixin):
    """An int64 value of `body` that numpy functions may be applied to; a comparison gives 0 or 1.

    numpy's functions come here by its protocols (__array_ufunc__ and __array_function__), and each becomes nodes.
    """

    shape: tuple[int, ...] = ()
    """Sizes of an operand; other values have none."""

    def __init__(self, body: OnnxBody, name: str) -> None:
        self.body = body
        self.name = name

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **_: Any) -> Int64Expression:
        if method != "__call__" or ufunc not in _UFUNCS:
            raise TypeError(f"{ufunc.__name__} has no ONNX form here")
        name = _UFUNCS[ufunc](self.body, [self._name(value) for value in inputs])
        return self._of(name if ufunc not in _RELATIONS else self.body.cast(name, DType.INT64))

    def __array_function__(
        self, function: Callable[..., Any], _: object, inputs: Sequence[Any], named: Mapping[str, Any]
    ) -> Int64Expression | list[Int64Expression]:
        if function is np.split:
            parts = self.body.add_several("Split", [self.name], inputs[1], **named, num_outputs=inputs[1])
            return [self._of(name) for name in parts]
        if function is np.stack:
            first = self.body.integers((0,))
            names = [self.body.add("Unsqueeze", [self._name(value), first]) for value in inputs[0]]
            return self._of(self.body.add("Concat", names, axis=0))
        if function is np.pad:
            return self._add(
                "Pad", self.body.integers([side for sides in zip(*inputs[1], strict=True) for side in sides])
            )
        if function not in _FUNCTIONS:
            raise TypeError(f"{function.__name__} has no ONNX form here")
        return self._of(_FUNCTIONS[function](self.body, [self._name(value) for value in inputs], dict(named)))

    def __getitem__(self, index: Any) -> Int64Expression:
        """Along the leading axes, a place or a slice of each."""
        places = index if isinstance(index, tuple) else (index,)
        spans = [place if isinstance(place, slice) else slice(place, place + 1) for place in places]
        ends = [np.iinfo(np.int64).max if span.stop is None else span.stop for span in spans]
        bounds = map(self.body.integers, ([span.start or 0 for span in spans], ends, range(len(spans))))
        found = self._add("Slice", *bounds)
        single = [axis for axis, place in enumerate(places) if not isinstance(place, slice)]
        return found._add("Squeeze", self.body.integers(single)) if single else found

    @property
    def T(self) -> Int64Expression:
        """A matrix with its axes exchanged."""
        return self._add("Transpose", perm=[1, 0])

    def reshape(self, shape: Sequence[int]) -> Int64Expression:
        """Under another shape."""
        return self._add("Reshape", self.body.integers(shape))

    def astype(self, dtype: Any) -> Int64Expression:
        """Wrapped to another integer type."""
        return self._of(self.body.cast(self.name, DType.of(dtype)))

    def taken_from(self, table: Array) -> Int64Expression:
        """table[this value]."""
        return self._of(self.body.add("Gather", [self._name(table), self.name]))

    def as_power(self) -> Int64Expression:
        """2**this value."""
        return self._of(self.body.power(self.name))

    def shifted_to_nearest(self, exponent: Any) -> Int64Expression:
        """`gemmlowp.rounding_shift`."""
        return self._of(self.body.rounding_shift(self.name, self._name(exponent)))

    def rounded_product(self, multiplier: Any, shift: Any, most: int) -> Int64Expression:
        """Times multiplier * 2**(shift - 31) in float32, rounded and limited to +-most."""
        body = self.body
        exponent = body.real64(body.add("Sub", [self._name(shift), body.number(31)]))
        power = body.add("Pow", [body.real64_scalar(2.0), exponent])
        scale = body.cast(body.add("Mul", [body.real64(self._name(multiplier)), power]), DType.FLOAT32)
        product = body.add("Round", [body.add("Mul", [body.cast(self.name, DType.FLOAT32), scale])])
        bounds = [body.real64_scalar(bound) for bound in (-most, most)]
        return self._of(body.cast(body.add("Clip", [body.real64(product), *bounds]), DType.INT64))

    def _of(self, name: str) -> Int64Expression:
        return Int64Expression(self.body, name)

    def _add(self, op_type: str, *operands: str, **attributes: Any) -> Int64Expression:
        return self._of(self.body.add(op_type, [self.name, *operands], **attributes))

    def _name(self, value: Any) -> str:
        return (
            value.name if isinstance(value, Int64Expression) else self.body.tensor(np.asarray(value).astype(np.int64))
        )


def _simple(name: str) -> Callable[[OnnxBody, list[str]], str]:
    return lambda body, inputs: body.add(name, inputs)


_UFUNCS: dict[np.ufunc, Callable[[OnnxBody, list[str]], str]] = {
    np.add: _simple("Add"),
    np.subtract: _simple("Sub"),
    np.multiply: _simple("Mul"),
    np.negative: _simple("Neg"),
    np.absolute: _simple("Abs"),
    np.maximum: _simple("Max"),
    np.minimum: _simple("Min"),
    np.bitwise_and: _simple("BitwiseAnd"),
    np.left_shift: lambda body, inputs: body.add("Mul", [inputs[0], body.power(inputs[1])]),
    np.right_shift: lambda body, inputs: body.shift_right(*inputs),
    np.greater: _simple("Greater"),
    np.greater_equal: _simple("GreaterOrEqual"),
    np.less: _simple("Less"),
    np.less_equal: _simple("LessOrEqual"),
    np.equal: _simple("Equal"),
    np.floor_divide: _simple("Div"),  # of numbers that are not negative
    np.matmul: _simple("MatMul"),
}

_RELATIONS = (np.greater, np.greater_equal, np.less, np.less_equal, np.equal)


def _reduced(name: str) -> Callable[[OnnxBody, list[str], dict[str, Any]], str]:
    def build(body: OnnxBody, inputs: list[str], named: dict[str, Any]) -> str:
        keep = int(bool(named.get("keepdims", False)))
        return body.add(name, [inputs[0], body.integers((int(named["axis"]),))], keepdims=keep)

    return build


def _where(body: OnnxBody, inputs: list[str], _: dict[str, Any]) -> str:
    return body.add("Where", [body.cast(inputs[0], DType.BOOL), *inputs[1:]])


def _limited(body: OnnxBody, inputs: list[str], _: dict[str, Any]) -> str:
    return body.add("Min", [body.add("Max", inputs[:2]), inputs[2]])


_FUNCTIONS: dict[Callable[..., Any], Callable[[OnnxBody, list[str], dict[str, Any]], str]] = {
    np.sum: _reduced("ReduceSum"),
    np.max: _reduced("ReduceMax"),
    np.where: _where,
    np.clip: _limited,
}
