"""ONNX models whose large tensors stay outside of the message: protobuf has every byte in memory two or three times.

A message is fields one after the other, each a number and a length or value (protobuf.dev/programming-guides/encoding).
Of a model the graph is field 7, its initializers 5, a tensor's dims, type, name and raw bytes 1, 2, 8, 9 (onnx.proto).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from dovetail.ir.types import Array

_GRAPH, _INITIALIZER, _DIMS, _TYPE, _NAME, _RAW = 7, 5, 1, 2, 8, 9
_LARGE = 1 << 16
"""Raw bytes from which on a tensor stays outside."""
_TYPES = {1: "<f4", 2: "u1", 3: "i1", 4: "<u2", 5: "<i2", 6: "<i4", 7: "<i8", 11: "<f8", 12: "<u4", 13: "<u8"}
"""Elements by their number in TensorProto.DataType, of those that are alike in numpy."""
_NUMBERS = {text: number for number, text in _TYPES.items()} | {"b1": 9, "<f2": 10}
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_SMALL = [bytes([value]) for value in range(128)]
"""Numbers of one byte."""


@dataclass(frozen=True)
class _MessageField:
    """A field of a message, by places in its bytes."""

    number: int
    wire: int
    begin: int
    """Place of its number."""
    at: int
    """Place of its value."""
    end: int
    value: int
    """The number; the length of bytes."""


def without_large(data: bytes) -> tuple[bytes, dict[str, Array]]:
    """The message of a model without its large initializers' contents, and these by name, as views of the bytes.

    In the message they are empty tensors of their type. What is not a message is given back as it is.
    """
    found: dict[str, Array] = {}
    try:
        parts = list(_slim(data, found))
    except (IndexError, ValueError):  # what is wrong with it is protobuf's to say
        return data, {}
    return (b"".join(parts), found) if found else (data, {})


def _slim(data: bytes, found: dict[str, Array]) -> Iterator[bytes]:
    for field in _fields(data, 0, len(data)):
        if field.number == _GRAPH and field.wire == _BYTES:
            graph = b"".join(_slim_graph(data, field, found))
            yield tagged(_GRAPH, len(graph)) + graph
        else:
            yield data[field.begin : field.end]


def _slim_graph(data: bytes, graph: _MessageField, found: dict[str, Array]) -> Iterator[bytes]:
    for field in _fields(data, graph.at, graph.end):
        held = None
        if field.number == _INITIALIZER and field.wire == _BYTES and field.value >= _LARGE:
            held = _tensor(data, field)
        if held is None or held[0] in found:
            yield data[field.begin : field.end]
        else:
            found[held[0]] = held[1]
            yield tagged(_INITIALIZER, len(held[2])) + held[2]


def _tensor(data: bytes, tensor: _MessageField) -> tuple[str, Array, bytes] | None:
    """Name and elements of a tensor, and the message of an empty one in its place; None of one that must stay."""
    fields = list(_fields(data, tensor.at, tensor.end))
    single = {field.number: field for field in fields}
    if not {_TYPE, _NAME, _RAW} <= set(single) <= {_DIMS, _TYPE, _NAME, _RAW}:
        return None
    dims = [size for field in fields if field.number == _DIMS for size in _numbers(data, field)]
    raw, kind, name = single[_RAW], single[_TYPE], single[_NAME]
    if (kind.wire, name.wire, raw.wire) != (_VARINT, _BYTES, _BYTES):
        return None
    array = elements_of(memoryview(data)[raw.at : raw.end], kind.value, dims)
    kept = [data[field.begin : field.end] for field in (kind, name)]
    if array is None:
        return None
    return data[name.at : name.end].decode(), array, b"".join([_varint(_DIMS << 3) + b"\0", *kept])


def elements_of(raw: bytes | memoryview, kind: int, dims: Sequence[int]) -> Array | None:
    """The elements of a large tensor, by the number of their type, as a view; None of one that must stay."""
    numpy = _TYPES.get(kind)
    if numpy is None or len(raw) < _LARGE or not 0 < len(dims) <= 32 or min(dims) < 1:
        return None
    fits = prod(dims) * np.dtype(numpy).itemsize == len(raw)
    return np.frombuffer(raw, numpy).reshape(dims) if fits else None


def is_large(array: Array) -> bool:
    """Whether a constant stays outside."""
    return array.nbytes >= _LARGE and type_number(array.dtype) in _TYPES


def type_number(dtype: np.dtype[Any]) -> int:
    """The number of a type of elements in TensorProto.DataType."""
    return _NUMBERS[dtype.newbyteorder("<").str.replace("|", "")]


def tensor_parts(name: str, array: Array, outside: bool = True) -> Sequence[bytes | Array]:
    """The message of a tensor, one part after the other; the contents of a large one by themselves if `outside`."""
    flat = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)
    head = [
        numbered(_DIMS, *array.shape),
        numbered(_TYPE, type_number(array.dtype)),
        numbered(_NAME, name) if name else b"",
    ]
    parts = (b"".join([*head, tagged(_RAW, flat.size)]), flat)
    return parts if outside and is_large(array) else (parts[0] + flat.tobytes(),)


def joined(parts: Sequence[bytes | Array]) -> bytes:
    """The message of these parts."""
    return b"".join(part if isinstance(part, bytes) else part.tobytes() for part in parts)


def numbered(number: int, *values: float | str | bytes) -> bytes:
    """Fields of one number, one for each value: an integer, a float of 32 bits, text or bytes."""
    found, tag = list[bytes](), number << 3
    for value in values:
        if isinstance(value, int):
            found += _varint(tag | _VARINT), _varint(value & (1 << 64) - 1)
        elif isinstance(value, float):
            found += _varint(tag | _FIXED32), struct.pack("<f", value)
        else:
            content = value.encode() if isinstance(value, str) else value
            found += _varint(tag | _BYTES), _varint(len(content)), content
    return b"".join(found)


def _fields(data: bytes, at: int, end: int) -> Iterator[_MessageField]:
    """The fields of a message between two places; raises IndexError or ValueError for what is none."""
    while at < end:
        begin = at
        tag, at = _read(data, at)
        value = {_FIXED64: 8, _FIXED32: 4}.get(tag & 7, 0)
        if tag & 7 in (_VARINT, _BYTES):
            value, at = _read(data, at)
        after = at if tag & 7 == _VARINT else at + value
        if tag & 7 not in (_VARINT, _FIXED64, _BYTES, _FIXED32) or after > end:
            raise ValueError("not a message")
        yield _MessageField(tag >> 3, tag & 7, begin, at, after, value)
        at = after


def _numbers(data: bytes, field: _MessageField) -> Sequence[int]:
    """The numbers of a repeated field: one, or packed."""
    if field.wire == _VARINT:
        return [field.value]
    found, at = [], field.at
    while at < field.end:
        value, at = _read(data, at)
        found.append(value)
    return found


def _read(data: bytes, at: int) -> tuple[int, int]:
    """The number at a place, seven bits to a byte, and the place behind it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        value, at = value | (byte & 127) << shift, at + 1
        if byte < 128:
            return value, at
    raise ValueError("not a number")


def _varint(value: int) -> bytes:
    if value < 128:
        return _SMALL[value]
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def tagged(number: int, length: int) -> bytes:
    """Tag and length before the bytes of a field."""
    return _varint(number << 3 | _BYTES) + _varint(length)
