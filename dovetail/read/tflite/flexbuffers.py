"""Reads FlexBuffers, as the custom options of TFLite operators are written: bounded, into plain Python values.

The format's facts are those of flatbuffers' docs/source/flexbuffers.md. A buffer ends with its root: the value, a byte
of its type and width, a byte with the width of the root itself. Offsets count backwards from where they stand.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

MOST_VALUES = 20_000
"""Most values of a buffer, whichever way they are reached."""
_DEEPEST = 32
_NULL, _INT, _UINT, _FLOAT, _KEY, _STRING, _INDIRECT_INT, _INDIRECT_UINT, _INDIRECT_FLOAT = range(9)
_MAP, _VECTOR, _VECTOR_INT, _VECTOR_KEY, _BLOB, _BOOL, _VECTOR_BOOL = 9, 10, 11, 14, 25, 26, 36
_FIXED = range(16, 25)
"""Vectors of 2, 3 and 4 int, uint and float."""
_FLOATS = {2: "<e", 4: "<f", 8: "<d"}


def read_map(data: bytes) -> Mapping[str, Any]:
    """The map at the root: numbers, texts, bytes, tuples and dictionaries of them, None for null.

    Raises:
        ValueError: the bytes are no flexbuffer, its root is no map, or it is larger than the limits above.
    """
    if len(data) < 3:
        raise ValueError("the custom options are no flexbuffer")
    found = _FlexbufferReader(data).value(len(data) - 2 - data[-1], data[-1], data[-2], 0)
    if not isinstance(found, dict):
        raise ValueError("the custom options are no map")
    return found


class _FlexbufferReader:
    def __init__(self, data: bytes) -> None:
        self.data, self.left = data, MOST_VALUES

    def number(self, place: int, width: int, kind: int) -> int | float:
        """A number of so many bytes: signed, unsigned, or a float."""
        if width not in (1, 2, 4, 8) or not 0 <= place <= len(self.data) - width:
            raise ValueError("the custom options are damaged: a value lies outside them")
        part = self.data[place : place + width]
        if kind == _FLOAT:
            return float(struct.unpack(_FLOATS[width], part)[0]) if width in _FLOATS else 0.0
        return int.from_bytes(part, "little", signed=kind == _INT)

    def count(self, place: int, width: int) -> int:
        """A length, of no more than there is left."""
        found = int(self.number(place, width, _UINT))
        if found > self.left:
            raise ValueError(f"the custom options have more than {MOST_VALUES} values, or are damaged")
        return found

    def value(self, place: int, width: int, packed: int, depth: int) -> Any:
        """The value that stands at a place, or that an offset there leads to."""
        self.left -= 1
        if self.left < 0 or depth > _DEEPEST:
            raise ValueError(f"the custom options have more than {MOST_VALUES} values, or are nested too deep")
        kind, inner = packed >> 2, 1 << (packed & 3)
        if kind == _NULL:
            return None
        if kind in (_INT, _UINT, _FLOAT):
            return self.number(place, width, kind)
        if kind == _BOOL:
            return bool(self.number(place, width, _UINT))
        target = place - int(self.number(place, width, _UINT))
        if kind in (_INDIRECT_INT, _INDIRECT_UINT, _INDIRECT_FLOAT):
            return self.number(target, inner, kind - _INDIRECT_INT + _INT)
        return self.reached(kind, target, inner, depth)

    def reached(self, kind: int, target: int, width: int, depth: int) -> Any:
        """A text, bytes, a vector or a map at a place."""
        if kind == _KEY:
            return self.key(target)
        if kind in _FIXED:
            size, element = divmod(kind - _FIXED[0], 3)
            return self.vector(target, width, size + 2, element + _INT, depth)
        length = int(self.number(target - width, width, _UINT))
        if kind in (_STRING, _BLOB):
            if not 0 <= target <= len(self.data) - length:
                raise ValueError("the custom options are damaged: a text lies outside them")
            part = self.data[target : target + length]
            return part if kind == _BLOB else part.decode("utf-8", "replace")
        length = self.count(target - width, width)
        if kind == _MAP:
            return self.map(target, width, length, depth)
        if kind == _VECTOR:
            return self.untyped(target, width, length, depth)
        if kind in (*range(_VECTOR_INT, _VECTOR_KEY + 1), _VECTOR_BOOL):
            element = _BOOL if kind == _VECTOR_BOOL else kind - _VECTOR_INT + _INT
            return self.vector(target, width, length, element, depth)
        raise ValueError(f"the custom options hold a value of the unknown type {kind}")

    def vector(self, target: int, width: int, length: int, kind: int, depth: int) -> tuple[Any, ...]:
        """Elements of one type."""
        packed = kind << 2
        return tuple(self.value(target + number * width, width, packed, depth + 1) for number in range(length))

    def untyped(self, target: int, width: int, length: int, depth: int) -> tuple[Any, ...]:
        """Elements that each have a byte for their type behind them all."""
        types = target + length * width
        kinds = (int(self.number(types + number, 1, _UINT)) for number in range(length))
        return tuple(self.value(target + at * width, width, kind, depth + 1) for at, kind in enumerate(kinds))

    def map(self, target: int, width: int, length: int, depth: int) -> dict[str, Any]:
        """Values by their keys, which are a vector of their own."""
        at = target - 3 * width
        keys, inner = at - int(self.number(at, width, _UINT)), int(self.number(at + width, width, _UINT))
        if self.count(keys - inner, inner) != length:
            raise ValueError("the custom options are damaged: as many keys as values are needed")
        names = self.vector(keys, inner, length, _KEY, depth)
        return dict(zip(names, self.untyped(target, width, length, depth), strict=True))

    def key(self, target: int) -> str:
        """A text that ends with 0."""
        end = self.data.find(b"\0", target) if 0 <= target < len(self.data) else -1
        if end < 0:
            raise ValueError("the custom options are damaged: a key lies outside them")
        return self.data[target:end].decode("utf-8", "replace")
