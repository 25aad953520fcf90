"""Pins: layers or operators the user wants on engines or cores, from the command line or a file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import filter as matching
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from dovetail.documents import TextForm, read_document
from dovetail.errors import PlaceError
from dovetail.program.ir import CORE
from dovetail.schedule.region import CoreGroup, Region
from dovetail.target.description import Target

MOST_PINS = 10_000
"""Pins a file may have."""
_LONGEST = 1000
_OPERATOR = re.compile(r"\w+ \d+ \((.+)\)")
"""How messages name an operator: kind, place in the file, and the file's own name, which will do by itself."""
_EXAMPLE = 'such as {"pins": {"conv_4": "core"}} in JSON, or [pins] and conv_4 = "core" in TOML'

PinName = Annotated[
    str,
    Meta(min_length=1, max_length=_LONGEST, pattern=r"\S", description=f"a name of 1 to {_LONGEST} characters"),
]


class PinFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of pins."""

    pins: Annotated[dict[PinName, PinName], Meta(max_length=MOST_PINS)]
    """Layer or operator, or a pattern of such names -> engine."""


def parse_pins(texts: Iterable[str]) -> dict[str, str]:
    """Pins as the command line has them: NAME=ENGINE, ENGINE after the last "=".

    Raises:
        PlaceError: one is not of that form, or a layer is named twice.
    """
    pins: dict[str, str] = {}
    for text in texts:
        name, equals, engine = (part.strip() for part in text.rpartition("="))
        if not equals or not name or not engine:
            raise PlaceError(f"'{text[:_LONGEST]}' is not NAME=ENGINE", where="--pin", hint="such as --pin conv_4=core")
        if pins.setdefault(name, engine) != engine:
            what = f"'{name}' is pinned to {pins[name]} and to {engine}"
            raise PlaceError(what, where="--pin", hint="keep one of the two")
    return pins


def read_pins(path: Path) -> dict[str, str]:
    """Pins of a file, JSON if its name ends in .json, TOML otherwise: layer or operator -> engine, in a table "pins".

    Raises:
        PlaceError: it cannot be read, is too large, damaged, or something in it is not a pin; with the line.
    """
    form: TextForm = "json" if path.suffix == ".json" else "toml"
    file = read_document(path, form, PinFile, error=PlaceError, hint=_EXAMPLE, what="the file of pins").value
    return {name.strip(): engine.strip() for name, engine in file.pins.items()}


def resolve(pins: Mapping[str, str], regions: Sequence[Region], target: Target) -> dict[str, str]:
    """Region name -> where it shall be, from pins that name regions or operators of the user's model. A pattern such as
    "conv_*" is for all that are computed and that no other pin names.

    Raises:
        PlaceError: there is no such layer or engine, or one layer shall be in two places; names what there is.
    """
    named: dict[str, list[Region]] = {}
    for region in regions:
        plain = (_OPERATOR.fullmatch(origin) for origin in region.origins)
        for name in dict.fromkeys((region.name, *region.origins, *(match[1] for match in plain if match))):
            named.setdefault(name, []).append(region)
    places: dict[str, str] = {}
    because: dict[str, str] = {}
    for name, wish in sorted(pins.items(), key=lambda pin: pin[0] not in named):
        _check_engines(name, wish, target)
        several = [one for each in matching(named, name) for one in named[each] if one.shares or one.is_kernel]
        if name not in named and not several:
            near = get_close_matches(name, named, n=3, cutoff=0.5)
            hint = f"perhaps {' or '.join(repr(one) for one in near)}; " if near else ""
            what = "there is no such layer or operator to pin"
            raise PlaceError(what, where=f"pin '{name}'", hint=f"{hint}dovetail explain lists the layers")
        own = (one for one in several if because.get(one.name) not in named)
        for region in _meant(named[name]) if name in named else own:
            if places.setdefault(region.name, wish) != wish:
                raise PlaceError(
                    f"'{because[region.name]}' is pinned to {places[region.name]} and '{name}' to {wish}, "
                    "and both are this layer",
                    where=f"layer {region.name}",
                    hint=f"pin {region.name} once, to one place",
                )
            because[region.name] = name
    return places


def _meant(regions: Sequence[Region]) -> Sequence[Region]:
    """The regions of one operator that compute; all where none does."""
    computing = [region for region in regions if region.shares or region.is_kernel]
    return [region for region in computing if region.shares] or computing or regions


def _check_engines(name: str, wish: str, target: Target) -> None:
    engines = [engine.name for engine in target.engines]
    cores = [f"{CORE}{number}" for number in range(len(target.cores))] if target.workers else []
    known = [*engines, CORE, *cores]
    parts = [part.strip() for part in wish.split("+")]
    for part in parts:
        if part not in known:
            what = f"it goes to '{part}', which {target.name} does not have"
            raise PlaceError(what, where=f"pin '{name}'", hint=f"use {', '.join(known)}")
    alike = any(set(parts) <= set(some) for some in (engines, cores))
    if len(set(parts)) != len(parts) or (len(parts) > 1 and not alike):
        hint = "name one place, or several engines or cores joined by '+'"
        raise PlaceError(f"'{wish}' is not one place", where=f"pin '{name}'", hint=hint)


def pinned_cores(pin: str) -> CoreGroup:
    """The numbers of the cores a pin names, such as (1, 2) for "core1+core2"; empty where it names something else."""
    named = [re.fullmatch(rf"\s*{CORE}(\d+)\s*", part) for part in pin.split("+")]
    return tuple(sorted(int(one[1]) for one in named if one)) if all(named) else ()
