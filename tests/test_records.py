"""Frozen records are dataclasses to the module `dataclasses`, and each kind of the package can have what it has."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from dataclasses import MISSING, Field, asdict, astuple, fields, is_dataclass, replace
from functools import cached_property
from importlib import import_module

import pytest

import dovetail
from dovetail.errors import MissingExtraError
from dovetail.records import Record, field


class Size(Record, dict=True):
    height: int
    width: int = 1
    names: list[str] = field(default_factory=list)

    @cached_property
    def area(self) -> int:
        return self.height * self.width


def kinds(kind: type[Record]) -> Iterator[type[Record]]:
    for one in kind.__subclasses__():
        yield one
        yield from kinds(one)


def test_dataclasses_takes_a_record_for_its_own() -> None:
    size = Size(2, 3)
    assert is_dataclass(size) and size.area == 6
    assert replace(size, width=4) == Size(2, 4) and replace(size, width=4).area == 8
    assert asdict(size) == {"height": 2, "width": 3, "names": []} and astuple(size) == (2, 3, [])
    height, width, names = fields(size)
    assert (height.name, width.default, names.default_factory) == ("height", 1, list)
    assert height.default is MISSING and names.default is MISSING
    with pytest.raises(AttributeError, match="immutable"):
        size.height = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        hash(size)  # a list is in it


def test_records_of_the_package_have_room_for_what_they_keep() -> None:
    for module in pkgutil.walk_packages(dovetail.__path__, "dovetail."):
        try:
            import_module(module.name)
        except (ImportError, MissingExtraError, SystemExit):
            continue
    found = list(dict.fromkeys(kinds(Record)))
    assert len(found) > 400
    for kind in found:
        kept = [name for base in kind.__mro__ for name, own in vars(base).items() if isinstance(own, cached_property)]
        assert not kept or kind.__dictoffset__, f"{kind.__name__} keeps {kept}: it needs dict=True"
        assert not any(isinstance(one, Field) for one in kind.__struct_defaults__), kind.__name__
        assert [one.name for one in fields(kind)] == list(kind.__struct_fields__)
