"""ONNX models whose large tensors stay outside of the message: protobuf has every byte in memory two or three times.

A message is fields one after the other, each a number and a length or value (protobuf.dev/programming-guides/encoding).
Of a model the graph is field 7, its initializers 5, a tensor's dims, type, name and raw bytes 1, 2, 8, 9 (onnx.proto).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import numpy as np

from dovetail.ir.types import Array
from dovetail.records import Record

_GRAPH, _INITIALIZER, _DIMS, _TYPE, _NAME, _RAW = 7, 5, 1, 2, 8, 9
_LARGE = 1 << 16
"""Raw bytes from which on a tensor stays outside."""
_TYPES = {1: "<f4", 2: "u1", 3: "i1", 4: "<u2", 5: "<i2", 6: "<i4", 7: "<i8", 11: "<f8", 12: "<u4", 13: "<u8"}
"""Elements by their number in TensorProto.DataType, of those that are alike in numpy."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class _MessageField(Record):
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
            yield _tagged(_GRAPH, len(graph)) + graph
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
            yield _tagged(_INITIALIZER, len(held[2])) + held[2]


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


def with_large(data: bytes, large: Mapping[int, Array]) -> list[bytes | Array]:
    """The parts of the message of a model whose initializers have these contents in addition, by their place among
    them. Each has a name, a type and dimensions, and no contents."""
    parts = list[bytes | Array]()
    for field in _fields(data, 0, len(data)):
        inside = list(_large_graph(data, field, large)) if field.number == _GRAPH else []
        if inside:
            parts.append(_tagged(_GRAPH, sum(map(_size, inside))))
        parts += inside or [data[field.begin : field.end]]
    return parts


def _large_graph(data: bytes, graph: _MessageField, large: Mapping[int, Array]) -> Iterator[bytes | Array]:
    place = 0
    for field in _fields(data, graph.at, graph.end):
        array = None
        if field.number == _INITIALIZER:
            array, place = large.get(place), place + 1
        if array is None:
            yield data[field.begin : field.end]
        else:
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            head = data[field.at : field.end] + _tagged(_RAW, flat.size)
            yield _tagged(_INITIALIZER, len(head) + flat.size) + head
            yield flat


def is_large(array: Array) -> bool:
    """Whether a constant is one `with_large` is used for."""
    return array.nbytes >= _LARGE and array.dtype.newbyteorder("<").str.replace("|", "") in _TYPES.values()


def _size(part: bytes | Array) -> int:
    return len(part)


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
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def _tagged(number: int, length: int) -> bytes:
    """Tag and length before the bytes of a field."""
    return _varint(number << 3 | _BYTES) + _varint(length)
