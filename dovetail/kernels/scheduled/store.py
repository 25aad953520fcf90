"""Scheduled loops that were made before: those that come with the package, and those kept on this computer.

Scheduling with Exo takes seconds a layer. The loops of common layers are data of the package, `shipped.zip`, made by
`scripts/ship_loops.py`; all others are kept in the cache folder once they were made.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dovetail.files import default_cache, keep_file, kept_file, text_digest
from dovetail.records import Record

SHIPPED = Path(__file__).with_name("shipped.zip")
NOT_SHIPPED = (
    "its loops do not come with the package, and scheduling them needs the Python package 'exo': "
    "pip install 'dovetail[loops]'"
)
_FORMAT = 2


class CFunction(Record):
    """One function as Exo writes it, less what Dovetail has no use for."""

    name: str
    parameters: tuple[str, ...]
    """Names; what is no array of the kernel is an index."""
    lines: tuple[str, ...]


class Loops(Record):
    """The C of a schedule, without the epilogue."""

    functions: tuple[CFunction, ...]
    used: tuple[str, ...]
    """Instructions in it."""
    notes: tuple[str, ...]
    """Why the others are not."""


def kept_loops(described: str, make: Callable[[], Loops | None]) -> Loops | None:
    """The loops of a description: the package's, else this computer's, else what `make` gives, which is then kept.

    Args:
        described: everything the loops depend on but the text of the schedules: algorithm, sizes, knobs, instructions.
        make: schedules them; None where that is not possible here.
    """
    key = _digest(f"{_FORMAT} {described}")
    loops = _from_json(_shipped().get(f"{key}.json"))
    if loops is not None:
        return loops
    place = default_cache() / "loops" / f"{key}-{_maker()}.json"
    loops = _from_json(kept_file(place))
    if loops is None and (loops := make()) is not None:
        keep_file(place, json.dumps(asdict(loops), separators=(",", ":")).encode())
    return loops


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@cache
def _shipped() -> Mapping[str, bytes]:
    """The contents of `shipped.zip`, by name."""
    if not SHIPPED.is_file():
        return {}
    with zipfile.ZipFile(SHIPPED) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _from_json(data: bytes | None) -> Loops | None:
    """The loops a file holds; None where it is damaged."""
    if data is None:
        return None
    try:
        read = json.loads(data)
        functions = tuple(CFunction(f["name"], tuple(f["parameters"]), tuple(f["lines"])) for f in read["functions"])
        return Loops(functions, tuple(read["used"]), tuple(read["notes"]))
    except (ValueError, KeyError, TypeError):
        return None


@cache
def _maker() -> str:
    """Digest of the schedules' own code and of Exo's version, on which loops depend beside their description."""
    here = Path(__file__).parent
    code = text_digest(here, here.parents[1] / "loops", code_only=True)
    try:
        return _digest(f"{code} {version('exo-lang')}")
    except PackageNotFoundError:
        return _digest(code)
