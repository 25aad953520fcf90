"""The points of a sweep: every combination of the values of the fields that are set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from dovetail.errors import DovetailError
from dovetail.sweep.fields import Field, Value, find, parse
from dovetail.target.description import Target

MOST_POINTS = 4096
"""Points of a sweep."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A field and the values it takes."""

    field: Field
    values: tuple[Value, ...]


def axes_of(target: Target, texts: Sequence[str]) -> tuple[Axis, ...]:
    """What `--set` asks for.

    Args:
        target: whose fields they are.
        texts: each "NAME=VALUE,VALUE,...".

    Raises:
        DovetailError: one is not of this form, names no field, or there are too many points.
    """
    axes: list[Axis] = []
    for text in texts:
        name, equals, listed = text.partition("=")
        parts = [part for part in listed.split(",") if part.strip()]
        if not equals or not parts:
            hint = "for example --set l1.size=64K,128K"
            raise DovetailError(f"'{text}' is not NAME=VALUE,VALUE", where="--set", hint=hint)
        field = find(target, name)
        if any(axis.field.name == field.name for axis in axes):
            raise DovetailError("this is set twice", where=field.name, hint="give all its values in one --set")
        axes.append(Axis(field, tuple(dict.fromkeys(parse(part, field) for part in parts))))
    if not axes:
        raise DovetailError("nothing is set", where="--set", hint="for example --set l1.size=64K,128K")
    count = prod(len(axis.values) for axis in axes)
    if count > MOST_POINTS:
        raise DovetailError(f"these are {count:,} points, the most are {MOST_POINTS:,}", where="--set",
                            hint="give fewer values")
    return tuple(axes)


def points(axes: Sequence[Axis]) -> list[Mapping[str, Value]]:
    """Every combination, the last field changing fastest."""
    names = [axis.field.name for axis in axes]
    return [dict(zip(names, values, strict=True)) for values in product(*(axis.values for axis in axes))]
