"""What the user wants where: NAME=ENGINE on the command line, and files that say it for many layers."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dovetail.errors import PlaceError
from dovetail.partition.regions import Region
from dovetail.program.ir import CORE
from dovetail.target.description import Target

MOST_BYTES = 1 << 20
"""A larger file is not read."""
MOST_PINS = 10_000
"""Pins a file may have."""
_LONGEST = 1000
_OPERATOR = re.compile(r"\w+ \d+ \((.+)\)")
"""How messages name an operator: kind, place in the file, and the file's own name, which will do by itself."""
_EXAMPLE = 'such as {"pins": {"conv_4": "core"}} in JSON, or [pins] and conv_4 = "core" in TOML'


def parse_pins(texts: Iterable[str]) -> dict[str, str]:
    """Pins as the command line has them: NAME=ENGINE, ENGINE after the last "=".

    Raises:
        PlaceError: one is not of that form, or a layer is named twice.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, equals, engine = text.rpartition("=")
        if not equals or not name.strip() or not engine.strip():
            raise PlaceError(f"'{text[:_LONGEST]}' is not NAME=ENGINE", where="--pin", hint="such as --pin conv_4=core")
        if found.setdefault(name.strip(), engine.strip()) != engine.strip():
            raise PlaceError(f"'{name.strip()}' is pinned to {found[name.strip()]} and to {engine.strip()}",
                             where="--pin", hint="keep one of the two")
    return found


def read_pins(path: Path) -> dict[str, str]:
    """Pins of a file, JSON if its name ends in .json, TOML otherwise: layer or operator -> engine, in a table "pins".

    Raises:
        PlaceError: it is absent, larger than `MOST_BYTES`, damaged, or something in it is not a pin.
    """
    where = str(path)
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise PlaceError(f"the file of pins cannot be read: {error.strerror}", where=where,
                         hint="check the spelling and the permission to read") from None
    if len(content) > MOST_BYTES:
        raise PlaceError(f"the file of pins is larger than {MOST_BYTES} bytes", where=where,
                         hint="give a file with one table, 'pins', and nothing else")
    try:
        text = content.decode()
        table = json.loads(text, object_pairs_hook=_once) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlaceError(f"the file of pins is damaged: {error}", where=where, hint=_EXAMPLE) from None
    pins = table.get("pins") if isinstance(table, dict) else None
    if not isinstance(pins, dict) or set(table) != {"pins"}:
        raise PlaceError("the file must hold one table, 'pins'", where=where, hint=_EXAMPLE)
    if len(pins) > MOST_PINS:
        raise PlaceError(f"the file has {len(pins)} pins; at most {MOST_PINS} are read", where=where,
                         hint="pin fewer layers: the planner places the rest")
    return {_text(name, where): _text(engine, f"{where}, '{name[:_LONGEST]}'") for name, engine in pins.items()}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice in one table")
    return found


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip() or len(value) > _LONGEST:
        raise PlaceError(
            f"a name of 1 to {_LONGEST} characters is wanted, not {str(value)[:40]!r}", where=where, hint=_EXAMPLE
        )
    return value.strip()


def resolve(pins: Mapping[str, str], regions: Sequence[Region], target: Target) -> dict[str, str]:
    """Region name -> where it shall be, from pins that name regions or operators of the user's model.

    Raises:
        PlaceError: there is no such layer or engine, or one layer shall be in two places; names what there is.
    """
    named: dict[str, list[Region]] = {}
    for region in regions:
        plain = (_OPERATOR.fullmatch(origin) for origin in region.origins)
        for name in dict.fromkeys((region.name, *region.origins, *(match[1] for match in plain if match))):
            named.setdefault(name, []).append(region)
    found: dict[str, str] = {}
    because: dict[str, str] = {}
    for name, wish in pins.items():
        _check_engines(name, wish, target)
        if name not in named:
            near = get_close_matches(name, named, n=3, cutoff=0.5)
            hint = f"perhaps {' or '.join(repr(one) for one in near)}; " if near else ""
            raise PlaceError("there is no such layer or operator to pin", where=f"pin '{name}'",
                             hint=f"{hint}dovetail explain lists the layers")
        for region in _meant(name, named[name]):
            if found.setdefault(region.name, wish) != wish:
                raise PlaceError(f"'{because[region.name]}' is pinned to {found[region.name]} and '{name}' to {wish}, "
                                 "and both are this layer", where=f"layer {region.name}",
                                 hint=f"pin {region.name} once, to one place")
            because[region.name] = name
    return found


def _meant(name: str, regions: Sequence[Region]) -> Sequence[Region]:
    """Of the regions of one operator those that compute; all where none does."""
    computing = [region for region in regions if not (region.mover or region.is_view or region.still)]
    return [region for region in computing if region.engine is not None] or computing or regions


def _check_engines(name: str, wish: str, target: Target) -> None:
    known = [*(engine.name for engine in target.engines), CORE]
    parts = [part.strip() for part in wish.split("+")]
    for part in parts:
        if part not in known:
            raise PlaceError(f"it goes to '{part}', which {target.name} does not have",
                             where=f"pin '{name}'", hint=f"use {', '.join(known)}")
    if len(set(parts)) != len(parts) or (CORE in parts and len(parts) > 1):
        raise PlaceError(f"'{wish}' is not one place", where=f"pin '{name}'",
                         hint="name one place, or several engines joined by '+'")
