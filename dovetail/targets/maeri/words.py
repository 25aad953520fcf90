"""Records as words of 32 bits, and back: launches of the engine, programming images, orders in the cache.

A record is its fields in the order of its class. A number, a truth value or an enumeration is a word; a record within
it its own words; an optional record a word 0 or 1 before it; `tuple[X, ...]` the number of its members and these; a
tuple of fixed length its members.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from enum import IntEnum
from functools import lru_cache
from types import NoneType
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin, get_type_hints

from dovetail.errors import DovetailError

MASK = 0xFFFFFFFF
Address = Annotated[int, "unsigned"]
"""A word without a sign; all other numbers have one."""
T = TypeVar("T")


@lru_cache(maxsize=64)
def _types(kind: Hashable) -> dict[str, Any]:
    """Types of a record's fields, by name."""
    hints = get_type_hints(cast(Any, kind), include_extras=True)
    return {field.name: hints[field.name] for field in fields(cast(Any, kind))}


def words_of(record: object, *left_out: str) -> Iterator[int]:
    """The words of a record, without the fields that are left out."""
    for name, kind in _types(cast(Hashable, type(record))).items():
        if name not in left_out:
            yield from _words(kind, getattr(record, name))


def _words(kind: Any, value: Any) -> Iterator[int]:
    members = get_args(kind)
    if get_origin(kind) is tuple:
        if members[-1] is Ellipsis:
            yield len(value)
        for each in value:
            yield from _words(type(each), each)
    elif NoneType in members:
        yield int(value is not None)
        if value is not None:
            yield from words_of(value)
    elif is_dataclass(value):
        yield from words_of(value)
    else:
        yield int(value) & MASK


class WordReader:
    """Words that are read one after the other.

    Args:
        words: without sign.
        wrong: makes the error about words that are no record, from a sentence.
    """

    def __init__(self, words: Sequence[int], wrong: Callable[[str], DovetailError]) -> None:
        self.words, self.wrong, self.at = words, wrong, 0

    @property
    def left(self) -> int:
        """Number of words that are still to be read."""
        return len(self.words) - self.at

    def take(self, count: int) -> tuple[int, ...]:
        """The next words, without sign."""
        if count > self.left:
            raise self.wrong(f"{count} words are wanted, {self.left} are left")
        self.at += count
        return tuple(self.words[self.at - count : self.at])

    def many(self, count: int, read: Callable[[], T]) -> tuple[T, ...]:
        """`count` members of a list, each of at least one word."""
        if not 0 <= count <= self.left:
            raise self.wrong(f"a list of {count} is longer than the words")
        return tuple(read() for _ in range(count))

    def record(self, kind: type[T], **given: Any) -> T:
        """The next record; fields whose values are given have no words."""
        values = {
            name: given[name] if name in given else self._value(of, f"{kind.__name__} has", name)
            for name, of in _types(cast(Hashable, kind)).items()
        }
        return kind(**values)

    def _value(self, kind: Any, owner: str, name: str) -> Any:
        members = get_args(kind)
        if get_origin(kind) is tuple:
            each = members[0]
            count = self.take(1)[0] if members[-1] is Ellipsis else len(members)
            return self.many(count, lambda: self._value(each, owner, name))
        if NoneType in members:
            return self._value(members[0], owner, name) if self.take(1)[0] else None
        if is_dataclass(kind):
            return self.record(cast(Any, kind))
        (word,) = self.take(1)
        if members:  # an address
            return word
        number = word - (word >> 31 << 32)
        if (kind is bool and number not in (0, 1)) or (issubclass(kind, IntEnum) and number not in set(kind)):
            raise self.wrong(f"{owner} {number} as its {name}")
        return kind(number)
