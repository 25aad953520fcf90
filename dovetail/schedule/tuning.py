"""The tuning file: what was chosen for the layers of one compilation, in TOML that people read, commit and may edit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from dovetail.documents import Document, read_document
from dovetail.errors import DovetailError, PlanError
from dovetail.ir.graph import Graph
from dovetail.schedule.knobs import choose
from dovetail.schedule.region import Region
from dovetail.target.description import Target
from dovetail.target.pattern import Choice, Value
from dovetail.version import __version__

SCHEMA = 1
"""Version of the file. It grows when a field is removed or changes its meaning."""
_HINT = "tune again, or mend the entry"

Cycles = Annotated[int, Meta(ge=0)]


class TuningError(DovetailError):
    """A tuning file that is damaged or belongs to something else."""


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The compilation a tuning file or a trial log belongs to."""

    dovetail: str
    """Version of Dovetail."""
    model: str
    """Name of the network."""
    model_sha256: str
    target: str
    policy: str
    rounding: str


class TuningEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One layer."""

    name: str
    """Name of the region."""
    signature: str
    default_cycles: Cycles
    """Cycles of the layer by itself, nothing chosen."""
    tuned_cycles: Cycles
    """Cycles of the layer by itself, with the choice."""
    choice: Choice


class Tuning(Identity, forbid_unknown_fields=True, frozen=True):
    """A tuning file."""

    measure: str
    """One of `tune.measure.MEASURES`; on "host" all cycles are nanoseconds."""
    default_cycles: Cycles
    """Cycles of the whole network, nothing chosen."""
    tuned_cycles: Cycles
    """Cycles of the whole network with all choices; never more."""
    layers: tuple[TuningEntry, ...] = msgspec.field(default=(), name="layer")
    """The layers for which something is chosen."""


def identity(model: str, content: bytes, target: str, policy: str, rounding: str) -> Identity:
    """The identity of a compilation: name and bytes of the model, names of target, policy and rounding."""
    return Identity(__version__, model, hashlib.sha256(content).hexdigest(), target, policy, rounding)


def read_tuning(path: Path) -> Document[Tuning]:
    """Read a tuning file; raises TuningError where it cannot be read, is too large, damaged or of another schema."""
    return read_document(path, "toml", Tuning, schema=SCHEMA, error=TuningError, hint=_HINT, what="the tuning file")


def tuning_text(tuning: Tuning) -> str:
    """The text of the file; the same for the same content."""
    fields = {"schema": SCHEMA, **msgspec.to_builtins(tuning)}
    layers: list[dict[str, Value]] = fields.pop("layer")
    lines = ["# Written by dovetail tune, used by dovetail compile --tuning. Cycles are of one inference."]
    lines += [f"{name} = {_toml(value)}" for name, value in fields.items()]
    for layer in layers:
        lines += ["", "[[layer]]", *(f"{name} = {_toml(value)}" for name, value in layer.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Value | dict[str, Value]) -> str:
    """A TOML integer, basic string or inline table; JSON's escapes are TOML's, but for DEL."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{name} = {_toml(setting)}' for name, setting in value.items())} }}"
    return str(value) if isinstance(value, int) else json.dumps(value).replace("\x7f", "\\u007f")


def choices_for(path: Path, wanted: Identity, regions: Sequence[Region], target: Target) -> dict[str, Choice]:
    """The choices of a tuning file by region name, after everything in it was checked.

    Args:
        path: the file.
        wanted: what is compiled.
        regions: the network's, nothing chosen.
        target: the machine.

    Raises:
        TuningError: the file is of something else, or names a layer, knob or value that does not exist; says which.
    """
    document = read_tuning(path)
    for name in Identity.__struct_fields__:
        of, here = getattr(document.value, name), getattr(wanted, name)
        if of != here and name != "model":
            raise document.wrong(f"the file is for {name} = {of}, this is {here}", (name,), "tune again")
    known = {region.name: region for region in regions}
    numbers: dict[str, int] = {}
    for number, entry in enumerate(document.value.layers):
        place, layer = ("layer", number), f"'{entry.name}'"
        if entry.name not in known:
            raise document.wrong(f"the network has no layer {layer}", place, "dovetail explain lists the layers")
        if (first := numbers.setdefault(entry.name, number)) != number:
            raise document.wrong(f"{layer} is named twice", place, "leave one of the two out", ("layer", first))
        if entry.signature != signature(known[entry.name].graph):
            raise document.wrong(f"{layer} is another layer: its signature differs", place, "tune again")
        try:
            choose((known[entry.name],), {entry.name: entry.choice}, target)
        except PlanError as error:
            raise document.wrong(f"{layer}: {error.what}", (*place, "choice")) from None
    return {entry.name: entry.choice for entry in document.value.layers}


def signature(graph: Graph) -> str:
    """A digest of operators, attributes, types and connections; neither weights nor names change it."""
    numbers = {name: f"i{index}" for index, name in enumerate(graph.inputs)}
    lines = [f"{name} {graph.types[value]}" for value, name in numbers.items()]
    for index, node in enumerate(graph.nodes):
        for value in node.inputs:
            if value not in numbers:
                numbers[value] = f"c{len(numbers)}"
                lines.append(f"{numbers[value]} {graph.types[value]}")
        numbers[node.output] = f"n{index}"
        operands = " ".join(numbers[value] for value in node.inputs)
        lines.append(f"{numbers[node.output]} {graph.types[node.output]} {node.operator!r} {operands}")
    lines.append(" ".join(numbers[value] for value in graph.outputs))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
