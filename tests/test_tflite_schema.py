"""The names and numbers of TensorFlow Lite's schema, against those of the package tflite."""

from __future__ import annotations

from typing import Any

import flatbuffers  # type: ignore[import-untyped]
import numpy as np
import pytest
import tflite  # type: ignore[import-untyped]

from dovetail.read.tflite.flatbuffer import Table
from dovetail.read.tflite.schema import BUILTIN_OPERATORS, TENSOR_TYPES, OptionTable, option_tables

TABLES = list(option_tables().values())


def names(enumeration: object) -> list[str]:
    """Members in the order of their numbers, which have no gaps."""
    found = {value: name for name, value in vars(enumeration).items() if isinstance(value, int)}
    assert sorted(found) == list(range(len(found)))
    return [found[number] for number in range(len(found))]


def test_enumerations_are_those_of_the_schema() -> None:
    assert list(TENSOR_TYPES) == names(tflite.TensorType)
    assert list(BUILTIN_OPERATORS) == names(tflite.BuiltinOperator)
    assert [table.name for table in TABLES] == names(tflite.BuiltinOptions)
    assert [table.number for table in TABLES] == list(range(len(TABLES)))


def values(table: OptionTable) -> dict[str, Any]:
    """A value of each field that is not its default."""
    kinds = {"?": None, "f": 0.75, "b": 7, "s": b"text", "[i": (3, -1, 2), "[f": (0.5, -2.0)}
    return {
        name: not default if kind == "?" else kinds.get(kind, 70_000 + place)
        for place, (name, kind, default) in table.fields.items()
    }


@pytest.mark.parametrize("table", TABLES[1:], ids=lambda table: table.name)
def test_options_are_read_as_the_package_reads_them(table: OptionTable) -> None:
    given = values(table)
    builder = flatbuffers.Builder(0)
    stored = dict(given)
    for place, (name, kind, _) in table.fields.items():
        if kind == "s":
            stored[name] = builder.CreateString(given[name])
        elif kind.startswith("["):
            stored[name] = builder.CreateNumpyVector(np.array(given[name], f"<{kind[1:]}4"))
        assert hasattr(getattr(tflite, table.name), name), place
    getattr(tflite, f"{table.name}Start")(builder)
    for name, value in stored.items():
        getattr(tflite, f"{table.name}Add{name}")(builder, value)
    builder.Finish(getattr(tflite, f"{table.name}End")(builder))
    data = bytes(builder.Output())
    theirs, ours = getattr(tflite, table.name).GetRootAs(data, 0), Table.root(data)
    for place, (name, kind, _) in table.fields.items():
        if kind.startswith("["):
            assert tuple(getattr(theirs, f"{name}AsNumpy")()) == ours.values(place, kind[1:]) == given[name]
            assert ours.length(place) == len(given[name])
            assert ours.array(place, f"{kind[1:]}4").tolist() == list(given[name])
        else:
            own = ours.text(place) if kind == "s" else ours.number(place, kind)
            assert getattr(theirs, name)() == own == given[name]
    known = [name for name in vars(getattr(tflite, table.name)) if name.endswith("AsNumpy") or name in given]
    assert {name.removesuffix("AsNumpy") for name in known} == set(given)


@pytest.mark.parametrize("table", TABLES[1:], ids=lambda table: table.name)
def test_defaults_are_those_of_the_package(table: OptionTable) -> None:
    empty = bytes((8, 0, 0, 0, 4, 0, 4, 0, 4, 0, 0, 0))
    theirs, ours = getattr(tflite, table.name).GetRootAs(empty, 0), Table.root(empty)
    helpers = ("AsNumpy", "Length", "IsNone", "HasIdentifier", "Init")
    names = {name for name in vars(type(theirs)) if name[0].isupper() and not name.endswith(helpers)}
    assert {name for name in names if not name.startswith("GetRootAs")} == {one[0] for one in table.fields.values()}
    for place, (name, kind, default) in table.fields.items():
        if kind.startswith("["):
            assert ours.values(place, kind[1:]) == () and ours.length(place) == 0
        elif kind == "s":
            assert ours.text(place) is None is getattr(theirs, name)()
        else:
            assert getattr(theirs, name)() == default == ours.number(place, kind, default)


def test_what_points_outside_raises() -> None:
    far = bytes((8, 0, 0, 0, 4, 0, 4, 0, 255, 0, 0, 0))  # its vtable would be before the file
    with pytest.raises(ValueError, match="before the file"):
        Table.root(far)
