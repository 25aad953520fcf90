"""Records as words of 32 bits, and back: launches of the engine, programming images, orders in the cache.

A record is its fields in the order of its class. A number, a truth value or the place of a name in its enumeration is
a word; a record within it its own words; where there may be none, or one of several classes, its number among these
stands before it; `tuple[X, ...]` is the number of its members and these; a tuple of fixed length its members. The type
of a number may say its range, as in documents.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from itertools import chain
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from msgspec import Meta

from dovetail.errors import DovetailError

MASK = 0xFFFFFFFF
Address = Annotated[int, Meta(ge=0, lt=1 << 32)]
"""A word without a sign; all other words have one."""
Natural = Annotated[int, Meta(ge=0, lt=1 << 31)]
Count = Annotated[int, Meta(ge=1, lt=1 << 31)]
Size = Annotated[int, Meta(ge=1, lt=1 << 16)]
Byte = Annotated[int, Meta(ge=-128, lt=128)]
WordTable = Annotated[tuple[tuple[int, ...], ...], Meta(description="rows of words without a sign, of equal length")]
"""How many rows there are and how long they are stands before the words."""
T = TypeVar("T")


@lru_cache(maxsize=64)
def _types(kind: Hashable) -> dict[str, Any]:
    record = cast(Any, kind)
    hints = get_type_hints(record, include_extras=True)
    return {field.name: hints[field.name] for field in fields(record)}


def words_of(record: object, *left_out: str) -> Iterator[int]:
    """The words of a record, without the fields that are left out."""
    for name, kind in _types(cast(Hashable, type(record))).items():
        if name not in left_out:
            yield from _words(kind, getattr(record, name))


def _words(kind: Any, value: Any) -> Iterator[int]:
    members = get_args(kind)
    if kind == WordTable:
        yield from (len(value), len(value[0]) if value else 0, *chain.from_iterable(value))
    elif get_origin(kind) is tuple:
        if members[-1] is Ellipsis:
            yield len(value)
        for each in value:
            yield from _words(members[0], each)
    elif get_origin(kind) in (Union, UnionType):
        yield _kinds(members).index(type(value))
        yield from words_of(value) if value is not None else ()
    elif is_dataclass(value):
        yield from words_of(value)
    else:
        yield (list(type(value)).index(value) if isinstance(value, Enum) else int(value)) & MASK


def _kinds(members: Sequence[Any]) -> list[Any]:
    """The classes of a union, none first."""
    return sorted(members, key=lambda kind: kind is not NoneType)


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
        types = _types(cast(Hashable, kind))
        values = {name: self._value(of, kind, name) for name, of in types.items() if name not in given}
        return kind(**values, **given)

    def _value(self, kind: Any, owner: type, name: str) -> Any:
        origin, members = get_origin(kind), get_args(kind)
        if kind == WordTable:
            rows, length = self.take(2)
            return self.many(rows, lambda: self.take(length))
        if origin is tuple:
            count = self.take(1)[0] if members[-1] is Ellipsis else len(members)
            return self.many(count, lambda: self._value(members[0], owner, name))
        if origin in (Union, UnionType):
            (number,) = self.take(1)
            if number >= len(members):
                raise self.wrong(f"{owner.__name__} has no {name} of kind {number}")
            kind = _kinds(members)[number]
        if kind is NoneType:
            return None
        if is_dataclass(kind):
            return self.record(cast(Any, kind))
        (word,) = self.take(1)
        number = word if kind == Address else word - (word >> 31 << 32)
        kind, limits = members if origin is Annotated else (kind, None)
        fits = limits is None or limits.ge <= number < limits.lt
        names = [False, True] if kind is bool else list(kind) if issubclass(kind, Enum) else None
        if not fits or (names is not None and not 0 <= number < len(names)):
            raise self.wrong(f"{owner.__name__} has {number} as its {name}")
        return kind(number) if names is None else names[number]
