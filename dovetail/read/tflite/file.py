"""Reads a TFLite file into plain, checked data: no access to the file is trusted after this module."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import numpy as np

from dovetail.errors import ModelError
from dovetail.ir.types import Array, DType, Shape, TensorType
from dovetail.read.values import AGAIN, ALIKE, FOLD, MAX_ELEMENTS, OTHERWISE, SMALLER, Refusing, unpacked, words
from dovetail.records import Record

ADVICE: Mapping[str, str] = {
    OTHERWISE: "say it with other operators or options in the network, and convert it again",
    AGAIN: "convert the model again: what this file says contradicts itself",
    FOLD: "make it a constant in the network, and convert it again",
    ALIKE: "quantise these tensors alike, with positive scales: convert the model again with a current converter",
    SMALLER: "make the network smaller there, and convert it again",
}
"""Advice for each kind of refusal."""

SCHEMA_VERSION = 3
"""The only schema version TensorFlow Lite ever shipped with the identifier TFL3."""

MAX_ENTRIES = 10_000
"""Most tensors, operators or buffers a file may have; far above any network for a microcontroller."""

MAX_SUBGRAPHS = 1000
"""Most subgraphs: signatures, and what loops and conditions run."""

MAX_RANK = 8
"""Most axes of a tensor."""

MAX_NAME = 1024
"""Longest tensor name in bytes."""

DTYPES: Mapping[str, DType] = {
    **{name: DType[name] for name in words("FLOAT32 INT4 INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 BOOL")},
    **{"RESOURCE": DType.INT32, "UINT64": DType.INT64},
}
"""Element types by their names in the TFLite schema. A resource is the number of a variable; sums in uint64, which only
the audio operators have, stay below 2^63."""


class TfliteQuantisation(Record):
    """real = scale * (q - zero_point)."""

    scale: Array
    """float32 [1] or [C], positive and finite."""
    zero_point: Array
    """int32, of the scale's shape."""
    axis: int
    """The axis the parameters run along; -1 for [1]."""

    def same_as(self, other: TfliteQuantisation) -> bool:
        """True when both give every integer the same real value."""
        equal = np.array_equal(self.scale, other.scale) and np.array_equal(self.zero_point, other.zero_point)
        return equal and self.axis == other.axis


class TfliteTensor(Record):
    """A tensor of the file, checked."""

    index: int
    name: str
    shape: Shape
    dtype: DType
    data: Array | None
    """uint8 bytes of a constant as stored, of exactly the tensor's size; None for a computed value."""
    quantisation: TfliteQuantisation | None
    is_variable: bool = False
    """True for what an operator keeps from one inference to the next."""

    @property
    def type(self) -> TensorType:
        """Shape and element type."""
        return TensorType(self.shape, self.dtype)

    @property
    def rank(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    @property
    def zero(self) -> int:
        """The element that stands for 0, as stored."""
        return int(self.quantisation.zero_point[0]) if self.quantisation else 0

    @property
    def is_constant(self) -> bool:
        """True when the file holds its elements."""
        return self.data is not None

    @property
    def is_empty(self) -> bool:
        """True for a tensor without elements: how some converters write an optional operand that is absent."""
        return 0 in self.shape

    def array(self) -> Array:
        """The elements of a constant, in the numpy type of its dtype (int4 unpacked, low nibble first)."""
        if self.data is None:
            raise ValueError(f"{self.name} is not a constant")
        if self.dtype is DType.INT4:
            nibbles = unpacked(self.data, 4)[: prod(self.shape)].astype(np.int8)
            return ((nibbles ^ 8) - 8).reshape(self.shape)
        return self.data.view(self.dtype.numpy.newbyteorder("<")).astype(self.dtype.numpy).reshape(self.shape)

    def __str__(self) -> str:
        return f"{self.name} {self.type}"


class OperatorEntry(Record):
    """One operator of the file."""

    index: int
    opcode: str
    """The name in the schema."""
    version: int
    inputs: tuple[int, ...]
    """Tensor indices; -1 for an absent optional operand."""
    outputs: tuple[int, ...]
    options: Mapping[str, Any]
    """Every option by its name in the schema, vectors as tuples; defaults where the file has none, or those of another
    operator, as the runtimes do (core/api/flatbuffer_conversions.cc)."""
    custom_code: str = ""
    """The name of a CUSTOM operator."""
    custom_options: bytes = b""
    """The operator's custom options, as the file has them."""


class TfliteFile(Record):
    """A whole model, or one of its further subgraphs."""

    name: str
    """File name, for messages."""
    tensors: tuple[TfliteTensor, ...]
    operators: tuple[OperatorEntry, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    further: tuple[TfliteFile | None, ...] = ()
    """Subgraphs 1 and up that the first runs (CALL_ONCE, WHILE, IF), also by way of others; None for others."""
    left_out: tuple[str, ...] = ()
    """The names of those others: further signatures."""


def read_tflite(name: str, data: bytes) -> TfliteFile:
    """Decode and check the bytes of the file `name`.

    Raises:
        ModelError: the file is damaged, or holds something outside the limits above.
    """
    try:
        return _TfliteReader(name, data).read()
    except _DAMAGE as error:
        hint = "copy or convert the model again"
        raise ModelError(f"the TFLite file is damaged: {error}", where=name, hint=hint) from error


_OPTIONS = {
    **dict.fromkeys(words("AVERAGE_POOL_2D MAX_POOL_2D L2_POOL_2D"), "POOL_2D"),
    **dict.fromkeys(words("MEAN SUM REDUCE_ALL REDUCE_ANY REDUCE_MAX REDUCE_MIN REDUCE_PROD"), "REDUCER"),
    "L2_NORMALIZATION": "L2_NORM",
}
"""Stems of the names of option classes, for operators whose own name is another."""

_DAMAGE = (ValueError, LookupError, TypeError, AssertionError, OverflowError, struct.error)
"""Errors that the accessors of the flatbuffers library raise where an offset in the bytes points nowhere."""

_EMPTY_TABLE = bytes((8, 0, 0, 0, 4, 0, 4, 0, 4, 0, 0, 0))
"""A flatbuffer of a table without fields: where it begins (8); its vtable, of two sizes; the distance to that."""


class _TfliteReader(Refusing):
    """Decodes one file; every method raises ModelError or one of the errors a damaged flatbuffer gives, and `what` is
    how a tensor is called in messages."""

    advice = ADVICE

    def __init__(self, name: str, data: bytes) -> None:
        import tflite  # type: ignore[import-untyped]

        self.name, self.data, self.schema = name, data, tflite
        self.model = tflite.Model.GetRootAs(data, 0)
        self.constant_bytes = 0
        self.type_names = _names(tflite.TensorType)
        self.option_names = _names(tflite.BuiltinOptions)
        self.classes = {name.removesuffix("Options").lower(): name for name in self.option_names.values()}

    @property
    def where(self) -> str:
        return self.name

    def read(self) -> TfliteFile:
        """The file's first subgraph and those it runs."""
        model = self.model
        what = f"TFLite schema version {model.Version()} is not supported, only {SCHEMA_VERSION}"
        self.refuse_if(model.Version() != SCHEMA_VERSION, what, "convert the model with a current converter")
        self.wrong_if(self.count(model.SubgraphsLength(), "subgraphs") < 1, "the model has no subgraph")
        self.count(model.BuffersLength(), "buffers")
        self.count(model.OperatorCodesLength(), "opcodes")
        found = {0: self.subgraph(model.Subgraphs(0))}
        waiting = _runs(found[0])
        while waiting:
            number = waiting.pop()
            if number not in found and 0 < number < model.SubgraphsLength():
                found[number] = self.subgraph(model.Subgraphs(number))
                waiting += _runs(found[number])
        numbers = range(1, self.count(model.SubgraphsLength(), "subgraphs", MAX_SUBGRAPHS))
        names = {at: (model.Subgraphs(at).Name() or b"")[:80].decode("utf-8", "replace") for at in numbers}
        left = tuple(names[at] or f"number {at}" for at in numbers if at not in found)
        return replace(found[0], further=tuple(map(found.get, numbers)), left_out=left)

    def subgraph(self, graph: Any) -> TfliteFile:
        """One graph."""
        count = self.count(graph.TensorsLength(), "tensors")
        tensors = tuple(self.tensor(graph.Tensors(index), index) for index in range(count))
        steps = range(self.count(graph.OperatorsLength(), "operators"))
        operators = tuple(self.operator(graph.Operators(index), index, count) for index in steps)
        tensors, operators = _without_halves(tensors, operators)
        inputs = self.indices(graph.InputsAsNumpy(), count, "the model's inputs")
        outputs = self.indices(graph.OutputsAsNumpy(), count, "the model's outputs")
        return TfliteFile(self.name, tensors, operators, inputs, outputs)

    def count(self, length: int, what: str, limit: int = MAX_ENTRIES) -> int:
        """A length, refused beyond the limit."""
        what = f"{length} {what}; at most {limit} are supported, the file may be damaged"
        self.wrong_if(length > limit, what)
        return length

    def indices(self, raw: object, tensors: int, what: str) -> tuple[int, ...]:
        """Tensors by their places; -1 for none."""
        found = _vector(raw)
        self.count(len(found), f"entries in {what}")
        for index in found:
            self.wrong_if(not -1 <= index < tensors, f"{what} name tensor {index}; the model has {tensors} tensors")
        return found

    def tensor(self, raw: Any, index: int) -> TfliteTensor:
        """One tensor."""
        encoded = raw.Name() or b""
        if len(encoded) > MAX_NAME:
            raise self.refuse(f"the name of tensor {index} has {len(encoded)} bytes; the limit is {MAX_NAME}", SMALLER)
        name = encoded.decode("utf-8", "replace").replace("\x00", "?") or f"tensor_{index}"
        type_name, what = self.type_names.get(raw.Type(), f"number {raw.Type()}"), f"tensor {index} ({name})"
        halves = type_name == "FLOAT16" and raw.Buffer() > 0  # constants, which runtimes dequantise to float32
        known = type_name in DTYPES or halves
        self.refuse_if(not known, f"{what} has the element type {type_name}, which is not supported")
        self.refuse_if(raw.Sparsity() is not None, f"{what} is stored sparse", "convert the model with dense weights")
        shape, dtype = self.shape(raw, what), DType.FLOAT32 if halves else DTYPES[type_name]
        data = self.content(raw.Buffer(), shape, DType.INT16 if halves else dtype, what)
        if halves:
            self.refuse_if(data is None, f"{what} has the element type FLOAT16, which is not computed with")
            data = data.view(np.float16).astype(np.float32).view(np.uint8) if data is not None else None
        quantisation = self.quantisation(raw.Quantization(), shape, dtype, what)
        return TfliteTensor(index, name, shape, dtype, data, quantisation, bool(raw.IsVariable()))

    def shape(self, raw: Any, what: str) -> Shape:
        """A tensor's shape, all sizes fixed."""
        self.count(raw.ShapeLength(), f"axes of {what}", MAX_RANK)
        shape = _vector(raw.ShapeAsNumpy())
        fault = f"{what} has the shape {list(shape)}; every size must be fixed"
        self.refuse_if(min(shape, default=0) < 0, fault, "convert the model with a fixed input shape, batch included")
        if prod(shape) >= MAX_ELEMENTS:
            raise self.refuse(f"{what} has {prod(shape)} elements; the limit is {MAX_ELEMENTS}", SMALLER)
        return shape

    def content(self, number: int, shape: Shape, dtype: DType, what: str) -> Array | None:
        """A constant's bytes, of exactly as many as its type takes; None for what is computed."""
        buffers, expected = self.model.BuffersLength(), (prod(shape) * dtype.bits + 7) // 8
        self.wrong_if(number >= buffers, f"{what} names buffer {number}; the model has {buffers} buffers")
        if expected == 0:
            return np.zeros(0, np.uint8)
        found = self.stored(self.model.Buffers(number), what) if number else None
        if found is not None:
            self.wrong_if(found.size != expected, f"{what} needs {expected} bytes of data, its buffer has {found.size}")
            self.constant_bytes += expected
            if self.constant_bytes >= MAX_ELEMENTS:
                raise self.refuse(f"the constants take more than {MAX_ELEMENTS} bytes together", SMALLER)
        return found

    def stored(self, buffer: Any, what: str) -> Array | None:
        """A buffer's bytes, which may lie behind the flatbuffer (offset and size from the file's start: schema.fbs)."""
        start, size = int(buffer.Offset()), int(buffer.Size())
        if start > 1:
            fault = f"{what} wants bytes {start} to {start + size} of the file's {len(self.data)}"
            self.wrong_if(size < 1 or start + size > len(self.data), fault)
            return np.frombuffer(self.data, np.uint8, size, start)
        if buffer.DataIsNone() or buffer.DataLength() == 0:
            return None
        found: Array = buffer.DataAsNumpy()
        return found

    def quantisation(self, raw: Any, shape: Shape, dtype: DType, what: str) -> TfliteQuantisation | None:
        """Scales and zero points that fit the type and the shape; None where there are none."""
        if raw is None or raw.ScaleLength() == 0:
            return None
        self.refuse_if(raw.DetailsType() != 0, f"{what} has a custom quantisation, which is not supported", ALIKE)
        count, zeros = raw.ScaleLength(), raw.ZeroPointLength()
        self.refuse_if(zeros not in (0, count), f"{what} has {count} scales and {zeros} zero points", ALIKE)
        # Converters leave the axis of the weights at a tensor that has only one.
        axis = 0 if len(shape) == 1 else raw.QuantizedDimension()
        odd = count != 1 and not (0 <= axis < len(shape) and shape[axis] == count)
        self.wrong_if(odd, f"{what} has {count} scales along axis {axis}, which does not fit its shape {list(shape)}")
        scale = np.array(raw.ScaleAsNumpy(), np.float32).reshape(count)
        wide = np.array(_vector(raw.ZeroPointAsNumpy()) or (0,) * count, np.int64)
        if dtype is DType.FLOAT32:
            return None  # converters leave calibration results on float tensors; they mean nothing
        odd = not (np.isfinite(scale).all() and (scale > 0).all())
        self.wrong_if(odd, f"{what} has a scale that is not a positive number: {float(scale.min())}")
        low, high = (dtype.low, dtype.high) if dtype.bits <= 32 and dtype.is_integer else (0, 0)
        fault = f"{what} has zero points from {wide.min()} to {wide.max()}, outside {low} to {high}"
        self.refuse_if(wide.min() < low or wide.max() > high, fault, ALIKE)
        return TfliteQuantisation(scale, wide.astype(np.int32), axis if count != 1 else -1)

    def operator(self, raw: Any, index: int, tensors: int) -> OperatorEntry:
        """One operator."""
        number, codes = raw.OpcodeIndex(), self.model.OperatorCodesLength()
        self.wrong_if(number >= codes, f"operator {index} names opcode {number} of {codes}")
        code = self.model.OperatorCodes(number)
        builtin = max(code.DeprecatedBuiltinCode(), _builtin_code(code))
        opcode = self.schema.utils.BUILTIN_OPCODE2NAME.get(builtin, f"opcode {builtin}")
        custom = ("", b"")
        if opcode == "CUSTOM":
            content = b"" if raw.CustomOptionsIsNone() else raw.CustomOptionsAsNumpy().tobytes()
            custom = ((code.CustomCode() or b"")[:80].decode("utf-8", "replace"), content)
        options = self.options(raw, opcode)
        inputs = self.indices(raw.InputsAsNumpy(), tensors, f"the inputs of operator {index} ({opcode})")
        outputs = self.indices(raw.OutputsAsNumpy(), tensors, f"the outputs of operator {index} ({opcode})")
        return OperatorEntry(index, opcode, code.Version(), inputs, outputs, options, *custom)

    def options(self, raw: Any, opcode: str) -> Mapping[str, Any]:
        """An operator's options decoded field by field, through the accessors the schema gives its class."""
        name = self.classes.get(_OPTIONS.get(opcode, opcode).replace("_", "").lower())
        if name is None:
            return {}
        reader, table = getattr(self.schema, name)(), raw.BuiltinOptions()
        is_own = table is not None and self.option_names.get(raw.BuiltinOptionsType()) == name
        reader.Init(*((table.Bytes, table.Pos) if is_own else (_EMPTY_TABLE, 8)))
        options = {}
        for field in _fields(self.schema, name):
            is_vector = hasattr(reader, f"{field}AsNumpy")
            if is_vector:
                self.count(getattr(reader, f"{field}Length")(), f"entries in {name}.{field}")
            options[field] = _vector(getattr(reader, f"{field}AsNumpy")()) if is_vector else getattr(reader, field)()
        return options


def _runs(graph: TfliteFile) -> list[int]:
    """The subgraphs that a subgraph's operators run."""
    options = (item for op in graph.operators for item in op.options.items())
    return [int(value) for name, value in options if name.endswith("SubgraphIndex")]


def _builtin_code(code: Any) -> int:
    """The 32-bit field of an operator code as stored: the schema's accessor passes over numbers below 127, which some
    writers put there alone. The larger of the two fields counts (core/api/op_resolver.cc)."""
    import flatbuffers  # type: ignore[import-untyped]

    place = code._tab.Offset(10)
    return int(code._tab.Get(flatbuffers.number_types.Int32Flags, place + code._tab.Pos)) if place else 0


def _names(enumeration: object) -> dict[int, str]:
    return {value: name for name, value in vars(enumeration).items() if isinstance(value, int)}


def _without_halves(
    tensors: tuple[TfliteTensor, ...], operators: tuple[OperatorEntry, ...]
) -> tuple[tuple[TfliteTensor, ...], tuple[OperatorEntry, ...]]:
    """The file without DEQUANTIZE of constants of 16-bit floats: their results are those constants."""
    found = list(tensors)
    kept = []
    for one in operators:
        source = found[one.inputs[0]] if one.opcode == "DEQUANTIZE" and len(one.inputs) == 1 else None
        if source is None or source.dtype is not DType.FLOAT32 or not source.is_constant or len(one.outputs) != 1:
            kept.append(one)
        elif found[one.outputs[0]].shape == source.shape:
            found[one.outputs[0]] = replace(found[one.outputs[0]], data=source.data)
    return tuple(found), tuple(kept)


def _vector(raw: object) -> tuple[int, ...]:
    """A flatbuffers vector of integers; the accessors give the number 0 for an absent one."""
    return tuple(raw.tolist()) if isinstance(raw, np.ndarray) else ()


@cache
def _fields(schema: Any, kind: str) -> list[str]:
    """The options a flatbuffers options class has accessors for."""
    helpers = ("AsNumpy", "Length", "IsNone", "HasIdentifier")
    names = [name for name in vars(getattr(schema, kind)) if name[0].isupper() and name != "Init"]
    return [name for name in names if not name.startswith("GetRootAs") and not name.endswith(helpers)]


# Custom options

MOST_VALUES = 20_000
"""Most values in custom options, whichever way they are reached."""
_DEEPEST = 32


def read_map(data: bytes) -> Mapping[str, Any]:
    """Custom options, as a FlexBuffer has them: numbers, texts, bytes, tuples and dictionaries of them, None for null.

    Raises:
        ValueError: the bytes are no flexbuffer, its root is no map, or it is larger than the limits above.
    """
    from flatbuffers import flexbuffers

    try:
        found = _plain_value(flexbuffers.GetRoot(data), iter(range(MOST_VALUES)), 0)
    except _DAMAGE as error:
        raise ValueError(f"the custom options are damaged, or of more than Dovetail reads: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("the custom options are no map")
    return found


def _plain_value(ref: Any, left: Iterator[int], depth: int) -> Any:
    """The value of a reference; `left` runs out where there are too many."""
    if next(left, None) is None or depth > _DEEPEST:
        raise ValueError(f"more than {MOST_VALUES} values, or nested too deep")
    if ref.IsString or ref.IsKey:
        return ref.AsStringBytes.decode("utf-8", "replace")
    if ref.IsBlob:
        return bytes(ref.AsBlob)
    if ref.IsTypedVector:
        inside = ref.AsTypedVector
    elif ref.IsFixedTypedVector:
        inside = ref.AsFixedTypedVector
    elif ref.IsVector:
        inside = ref.AsMap if ref.IsMap else ref.AsVector
    else:
        return ref.Value
    # Members by their numbers: an iteration would end at the first that lies outside of the bytes.
    members = tuple(_plain_value(inside[number], left, depth + 1) for number in range(len(inside)))
    if not ref.IsMap:
        return members
    if len(inside.Keys) != len(inside):
        raise ValueError("as many keys as values are needed")
    return {str(_plain_value(inside.Keys[number], left, depth)): member for number, member in enumerate(members)}
