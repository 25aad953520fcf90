"""Calibrations: cycles of a library's calls and of a core's kernels as the simulated chip shows them, from a file.

`dovetail calibrate` writes the file. `dovetail compile --calibration FILE` takes it, or a line of the target file:

    TARGET = calibrated(TARGET, Path(__file__).with_name("mine.cycles.json"))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from dovetail.documents import Document, read_document
from dovetail.errors import TargetError
from dovetail.records import Record
from dovetail.target.description import Target
from dovetail.target.offload import Offload
from dovetail.target.pattern import Match

SCHEMA = 1
"""Version of the file. It grows when a field is removed or changes its meaning."""
Rates = Annotated[
    dict[Annotated[str, Meta(max_length=100)], Annotated[float, Meta(ge=0, le=1e9)]], Meta(max_length=200)
]
"""Cycles by part of the work."""


class CallRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cycles of an offload's calls."""

    engine: str
    offload: str
    rates: Rates
    """By the parts of `work_of`."""


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of measured cycles."""

    target: str
    calls: Annotated[tuple[CallRates, ...], Meta(max_length=1000)] = ()
    kernels: Rates = {}
    """As `Core.kernels`; empty to leave that as it is."""


def work_of(match: Match) -> dict[str, float]:
    """How much there is of what a call of a library takes its time for: the `call` itself, multiply-accumulates
    (`mac`), `element`s of the result and of constants (`constant`), elements (`window`) and positions (`tap`) that
    windows bring to the places of the result."""
    types, result = match.graph.types, match.result
    found = {"call": 1.0, "mac": 0.0, "element": float(result.elements), "window": 0.0, "tap": 0.0}
    for node in match.graph.nodes:
        kinds, outputs = [types[name] for name in node.inputs], types[node.output]
        macs, channels = node.operator.macs(kinds), max(outputs.shape[-1], 1) if outputs.shape else 1
        own = prod(getattr(node.operator, "kernel", ())) * outputs.elements if hasattr(node.operator, "kernel") else 0
        found["mac"] += macs
        found["window"] += own or macs / channels
        if macs and len(kinds[1].shape) == 4:
            found["tap"] += kinds[1].shape[1] * kinds[1].shape[2] * outputs.elements / channels
    return found | {"constant": float(sum(array.size for array in match.graph.constants.values()))}


class FittedCycles(Record):
    """`Offload.cycles` as the sum of the parts of a call's work, each times its rate."""

    rates: tuple[tuple[str, float], ...]

    def __call__(self, match: Match) -> int:
        """Cycles of a call."""
        work = work_of(match)
        return max(round(sum(rate * work[part] for part, rate in self.rates)), 1)


def calibrated(target: Target, file: Path) -> Target:
    """The target with the cycles of a file instead of those it declares.

    Raises:
        TargetError: the file cannot be read, is damaged, or is of another target.
    """
    hint = "make it anew with dovetail calibrate"
    document = read_document(file, "json", Calibration, schema=SCHEMA, error=TargetError, hint=hint)
    found = document.value
    if found.target != target.name:
        raise document.wrong(f"it was measured on '{found.target}', not on '{target.name}'", ("target",))
    rates = {(one.engine, one.offload): dict(one.rates) for one in found.calls}
    _check(document, target)
    engines = tuple(
        replace(engine, offloads=tuple(_fitted(one, rates.get((engine.name, one.name))) for one in engine.offloads))
        for engine in target.engines
    )
    cores = [replace(core, kernels=dict(found.kernels) or core.kernels) for core in target.cores]
    return replace(target, engines=engines, core=cores[0], workers=tuple(cores[1:]))


def _fitted(offload: Offload, rates: Mapping[str, float] | None) -> Offload:
    return replace(offload, cycles=FittedCycles(tuple(sorted(rates.items()))), floor=None) if rates else offload


def _check(document: Document[Calibration], target: Target) -> None:
    """Raise TargetError for calls of what the target does not have, and for unknown parts."""
    offloads = {(engine.name, one.name) for engine in target.engines for one in engine.offloads}
    for number, own in enumerate(document.value.calls):
        if (own.engine, own.offload) not in offloads:
            raise document.wrong(f"{target.name} has no {own.engine} {own.offload}", ("calls", number, "offload"))
        for part in sorted(own.rates.keys() - PARTS):
            what = f"there is no part '{part}' of a call; there is {', '.join(sorted(PARTS))}"
            raise document.wrong(what, ("calls", number, "rates", part))


PARTS = {"call", "mac", "element", "window", "tap", "constant"}
"""Parts of `work_of`."""
