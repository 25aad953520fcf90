"""The tuning file: what was chosen for each layer, in TOML that people read, commit and may edit."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dovetail import __version__
from dovetail.errors import DovetailError, PlanError
from dovetail.partition.regions import Region
from dovetail.plan.knobs import choose
from dovetail.target.description import Target
from dovetail.target.knobs import Choice, Value
from dovetail.tune.layer import signature

SCHEMA = 1
"""Version of the file. It grows when a field is removed or changes its meaning."""
MOST_BYTES = 1 << 20
"""A larger file is not read."""


class TuningError(DovetailError):
    """A tuning file that is damaged or belongs to something else."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a tuning file or a trial log is for."""

    dovetail: str
    """Version of Dovetail."""
    model: str
    """Name of the network."""
    model_sha256: str
    target: str
    policy: str
    rounding: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One layer."""

    name: str
    """Of the region."""
    signature: str
    default_cycles: int
    """Of the layer by itself, nothing chosen."""
    tuned_cycles: int
    """Of the layer by itself, with the choice."""
    choice: Choice


@dataclass(frozen=True, slots=True)
class Tuning:
    """A whole file."""

    identity: Identity
    measure: str
    """One of `tune.measure.MEASURES`; on "host" all cycles are nanoseconds."""
    default_cycles: int
    """Of the whole network, nothing chosen."""
    tuned_cycles: int
    """Of the whole network, with all choices; never more."""
    layers: tuple[Entry, ...]
    """Those for which something is chosen."""


def identity(model: str, content: bytes, target: str, policy: str, rounding: str) -> Identity:
    """What a compilation is of: name and bytes of the model, names of target, policy and rounding."""
    return Identity(__version__, model, hashlib.sha256(content).hexdigest(), target, policy, rounding)


def to_toml(tuning: Tuning) -> str:
    """The file's text; the same for the same content."""
    lines = [
        "# Written by dovetail tune, used by dovetail compile --tuning. Cycles are of one inference.",
        f"schema = {SCHEMA}",
    ]
    lines += [f"{field.name} = {_toml(getattr(tuning.identity, field.name))}" for field in fields(Identity)]
    lines.append(f"measure = {_toml(tuning.measure)}")
    lines += [f"default_cycles = {tuning.default_cycles}", f"tuned_cycles = {tuning.tuned_cycles}"]
    for entry in tuning.layers:
        settings = ", ".join(f"{name} = {_toml(value)}" for name, value in entry.choice.items())
        lines += ["", "[[layer]]", f"name = {_toml(entry.name)}", f"signature = {_toml(entry.signature)}"]
        lines += [f"default_cycles = {entry.default_cycles}", f"tuned_cycles = {entry.tuned_cycles}"]
        lines.append(f"choice = {{ {settings} }}")
    return "\n".join(lines) + "\n"


def _toml(value: Value) -> str:
    """A TOML integer or basic string; JSON's escapes are TOML's, but for DEL."""
    return str(value) if isinstance(value, int) else json.dumps(value).replace("\x7f", "\\u007f")


def read_tuning(path: Path) -> Tuning:
    """Read a tuning file.

    Raises:
        TuningError: it is absent, too large, damaged, of another schema, or a field is missing or of a wrong type.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise TuningError(f"the tuning file cannot be read: {error.strerror}", where=str(path),
                          hint="check the spelling and the permission to read") from None
    if len(content) > MOST_BYTES:
        raise TuningError(f"the tuning file is larger than {MOST_BYTES} bytes", where=str(path), hint="tune again")
    try:
        table = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TuningError(f"the tuning file is damaged: {error}", where=str(path), hint="tune again") from None
    schema = _field(table, "schema", int, str(path))
    if schema != SCHEMA:
        raise TuningError(f"the tuning file has schema {schema}, expected {SCHEMA}", where=str(path), hint="tune again")
    of = Identity(**{field.name: _field(table, field.name, str, str(path)) for field in fields(Identity)})
    layers = table.get("layer", [])
    if not isinstance(layers, list):
        raise TuningError("'layer' must be an array of tables", where=str(path), hint="tune again")
    entries = tuple(_entry(layer, f"{path}, layer {number}") for number, layer in enumerate(layers, 1))
    numbers = [_field(table, name, int, str(path)) for name in ("default_cycles", "tuned_cycles")]
    return Tuning(of, _field(table, "measure", str, str(path)), numbers[0], numbers[1], entries)


def _entry(layer: Any, where: str) -> Entry:
    if not isinstance(layer, dict):
        raise TuningError("a layer must be a table", where=where, hint="tune again")
    name = _field(layer, "name", str, where)
    choice = _field(layer, "choice", dict, f"{where} ('{name}')")
    for knob, value in choice.items():
        if type(value) not in (int, str):
            raise TuningError(f"{knob} = {value!r} is neither a whole number nor a string", where=f"{where} ('{name}')",
                              hint="tune again")
    numbers = [_field(layer, key, int, f"{where} ('{name}')") for key in ("default_cycles", "tuned_cycles")]
    return Entry(name, _field(layer, "signature", str, f"{where} ('{name}')"), numbers[0], numbers[1], choice)


def _field(table: Mapping[str, Any], name: str, kind: type, where: str) -> Any:
    if name not in table:
        raise TuningError(f"'{name}' is missing", where=where, hint="tune again")
    if type(table[name]) is not kind:
        known = {int: "a whole number", str: "a string", dict: "a table"}[kind]
        raise TuningError(f"'{name}' must be {known}", where=where, hint="tune again")
    return table[name]


def choices_for(path: Path, wanted: Identity, regions: tuple[Region, ...], target: Target) -> dict[str, Choice]:
    """The choices of a tuning file by region name, after everything in it was checked.

    Args:
        path: the file.
        wanted: what is compiled.
        regions: the network's, nothing chosen.
        target: the machine.

    Raises:
        TuningError: the file is of something else, or names a layer, knob or value that does not exist; says which.
    """
    tuning = read_tuning(path)
    for field in fields(Identity):
        found, here = getattr(tuning.identity, field.name), getattr(wanted, field.name)
        if found != here and field.name != "model":
            raise TuningError(
                f"the tuning file is for {field.name} = {found}, this is {here}", where=str(path), hint="tune again"
            )
    known = {region.name: region for region in regions}
    choices: dict[str, Choice] = {}
    for number, entry in enumerate(tuning.layers, 1):
        where = f"{path}, layer {number} ('{entry.name}')"
        if entry.name not in known:
            raise TuningError("the network has no such layer", where=where, hint="dovetail explain lists the layers")
        if entry.name in choices:
            raise TuningError("the layer is named twice", where=where, hint="leave one of the two out")
        if entry.signature != signature(known[entry.name].graph):
            raise TuningError("the layer is another one: its signature differs", where=where, hint="tune again")
        try:
            choose((known[entry.name],), {entry.name: entry.choice}, target)
        except PlanError as error:
            raise TuningError(error.what, where=where, hint="tune again, or change the entry") from None
        choices[entry.name] = entry.choice
    return choices


def may_be_written(path: Path) -> None:
    """Check before hours of work that the output can be written there.

    Raises:
        TuningError: something lies there that is not a tuning file.
    """
    if path.is_dir():
        raise TuningError("a folder lies where the tuning file shall be written", where=str(path),
                          hint="choose another file with -o")
    if path.exists() and path.stat().st_size:
        try:
            read_tuning(path)
        except TuningError as error:
            raise TuningError(
                f"the output exists and is not a tuning file ({error.what})",
                where=str(path),
                hint="choose another --output",
            ) from None


def entries_in_order(entries: Mapping[str, Entry], regions: Sequence[Region]) -> tuple[Entry, ...]:
    """Entries by region name in the network's order."""
    return tuple(entries[region.name] for region in regions if region.name in entries)
