"""Tables of a flatbuffer, read without trust: what points outside of the bytes raises struct.error or ValueError.

Layout from flatbuffers.dev/internals: a table begins with the distance to its vtable, which has the places of its
fields; texts, vectors and tables are reached by distances, and begin with their length.
"""

from __future__ import annotations

import struct

import numpy as np

from dovetail.ir.types import Array

_STRUCTS = {kind: struct.Struct(f"<{kind}") for kind in "?bBHiIqQf"}


class Table:
    """A table. Numbers are named by their letter in `struct`, and fields by their place in the schema."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at
        self._vtable = at - self._read("i", at)
        self._nbytes = self._read("H", self._vtable)

    @classmethod
    def root(cls, data: bytes) -> Table:
        """The table that a file begins with."""
        return cls(data, struct.unpack_from("<I", data)[0])

    def _read(self, kind: str, at: int) -> int:
        if at < 0:
            raise ValueError(f"a place {-at} bytes before the file")
        value: int = _STRUCTS[kind].unpack_from(self.data, at)[0]
        return value

    def _place(self, field: int) -> int:
        """Place of a field; 0 where there is none."""
        entry = 4 + 2 * field
        offset = self._read("H", self._vtable + entry) if entry < self._nbytes else 0
        return self.at + offset if offset else 0

    def _target(self, field: int) -> int:
        """The place that a field says; 0 where there is none."""
        place = self._place(field)
        return place + self._read("I", place) if place else 0

    def number(self, field: int, kind: str = "i", default: float = 0) -> int:
        """A number, which is a float or a truth value where its kind is one."""
        place = self._place(field)
        return self._read(kind, place) if place else default  # type: ignore[return-value]

    def table(self, field: int) -> Table | None:
        """A table; None where there is none."""
        place = self._target(field)
        return Table(self.data, place) if place else None

    def length(self, field: int) -> int:
        """Elements of a vector."""
        place = self._target(field)
        return self._read("I", place) if place else 0

    def entry(self, field: int, index: int) -> Table:
        """A table of a vector of tables."""
        if not 0 <= index < self.length(field):
            raise IndexError(f"entry {index} of {self.length(field)}")
        place = self._target(field) + 4 + 4 * index
        return Table(self.data, place + self._read("I", place))

    def array(self, field: int, kind: str) -> Array:
        """The numbers of a vector as a view of the file; none where there is no vector."""
        place = self._target(field)
        return np.frombuffer(self.data, f"<{kind}", self.length(field), place + 4) if place else np.zeros(0, f"<{kind}")

    def values(self, field: int, kind: str = "i") -> tuple[int, ...]:
        """The same as numbers."""
        place = self._target(field)
        return struct.unpack_from(f"<{self.length(field)}{kind}", self.data, place + 4) if place else ()

    def text(self, field: int) -> bytes | None:
        """A text; None where there is none."""
        place = self._target(field)
        return struct.unpack_from(f"{self.length(field)}s", self.data, place + 4)[0] if place else None
