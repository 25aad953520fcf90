"""Engine assignment: which engine computes what, and when, decided for the network as a whole.

Every layer has candidates: each engine that takes it, several engines at once (each a part of the rows or channels of
its result), and the core. Each candidate has a cost in cycles of engines, DMA and core; between two layers stand the
cycles of relayouts and of copies from one engine's memory to another's. What is minimised is when the network ends,
with everything at the same time that can be. With one engine and no pins layers come one after the other, and each is
computed where it takes the fewest cycles (`cheaper.py`). A pin is a layer
or operator the user wants in a place: NAME=ENGINE on the command line, or a file that says it for many.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from dovetail.errors import PlaceError
from dovetail.files import kept_answer
from dovetail.ir.graph import Graph
from dovetail.program.ir import CORE
from dovetail.schedule.assign.candidates import layers
from dovetail.schedule.assign.candidates import pinned_core as pinned_core
from dovetail.schedule.assign.cheaper import cheaper
from dovetail.schedule.assign.costs import (
    ALL_ROOM,
    Candidate,
    CandidateStep,
    LayerOptions,
    PlacementReason,
    Schedule,
    without_offloads,
)
from dovetail.schedule.assign.timetable import heuristic, improve, in_order, lower_bound, settled, slots
from dovetail.schedule.partition import Region, partition
from dovetail.schedule.tiles.tiling import TileCache
from dovetail.target.description import Target


def told(layers: tuple[LayerOptions, ...], schedule: Schedule) -> dict[str, PlacementReason]:
    """Region name -> what there is to say; nothing for what nobody computes."""
    found: dict[str, PlacementReason] = {}
    for layer, pick in zip(layers, schedule.picks, strict=True):
        picked = layer.candidates[pick]
        known = (*layer.candidates, *layer.passed_over)
        if len(known) > 1 or layer.refused or layer.pinned:
            costs = tuple((one.place, one.cycles) for one in known)
            found |= dict.fromkeys(
                (step.region.name for step in picked.steps), PlacementReason(costs, layer.refused, why(layer, picked))
            )
    return found


def why(layer: LayerOptions, picked: Candidate) -> str:
    """Why a layer is where it is, in one sentence."""
    if layer.pinned:
        return f"the user pinned it to {layer.pinned}"
    others = [one for one in layer.candidates if one is not picked]
    if not others:
        return layer.region.reason if picked.members == {CORE} else "nothing else takes it"
    best = min(others, key=lambda one: one.cycles)
    if picked.cycles < best.cycles:
        return f"fastest there: {picked.cycles:,} cycles, {best.cycles:,} on {best.place}"
    if picked.cycles == best.cycles:
        return f"as fast there as on {best.place}: {picked.cycles:,} cycles"
    return (
        f"{best.place} would take {best.cycles:,} cycles instead of {picked.cycles:,}, but is wanted by others then: "
        "the network ends no later like this"
    )


def overlap(layers: tuple[LayerOptions, ...], schedule: Schedule) -> int:
    """Cycles of the schedule in which more than one of engines and core compute."""
    changes: list[tuple[int, int]] = []
    for layer, pick, starts in zip(layers, schedule.picks, schedule.starts, strict=True):
        for step, start in zip(layer.candidates[pick].steps, starts, strict=True):
            count = len(step.region.parts) if step.region.engine or step.region.place == CORE else 0
            changes += [(start, count), (start + step.cycles, -count)]
    total = busy = 0
    for (moment, count), (later, _) in pairwise(sorted(changes)):
        busy += count
        total += later - moment if busy > 1 else 0
    return total


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
            what = f"'{name.strip()}' is pinned to {found[name.strip()]} and to {engine.strip()}"
            raise PlaceError(what, where="--pin", hint="keep one of the two")
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
        hint = "check the spelling and the permission to read"
        raise PlaceError(f"the file of pins cannot be read: {error.strerror}", where=where, hint=hint) from None
    if len(content) > MOST_BYTES:
        hint = "give a file with one table, 'pins', and nothing else"
        raise PlaceError(f"the file of pins is larger than {MOST_BYTES} bytes", where=where, hint=hint)
    try:
        text = content.decode()
        table = json.loads(text, object_pairs_hook=_once) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlaceError(f"the file of pins is damaged: {error}", where=where, hint=_EXAMPLE) from None
    pins = table.get("pins") if isinstance(table, dict) else None
    if not isinstance(pins, dict) or set(table) != {"pins"}:
        raise PlaceError("the file must hold one table, 'pins'", where=where, hint=_EXAMPLE)
    if len(pins) > MOST_PINS:
        hint = "pin fewer layers: the planner places the rest"
        raise PlaceError(f"the file has {len(pins)} pins; at most {MOST_PINS} are read", where=where, hint=hint)
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
            what = "there is no such layer or operator to pin"
            raise PlaceError(what, where=f"pin '{name}'", hint=f"{hint}dovetail explain lists the layers")
        for region in _meant(name, named[name]):
            if found.setdefault(region.name, wish) != wish:
                raise PlaceError(
                    f"'{because[region.name]}' is pinned to {found[region.name]} and '{name}' to {wish}, "
                    "and both are this layer",
                    where=f"layer {region.name}",
                    hint=f"pin {region.name} once, to one place",
                )
            because[region.name] = name
    return found


def _meant(name: str, regions: Sequence[Region]) -> Sequence[Region]:
    """Of the regions of one operator those that compute; all where none does."""
    computing = [region for region in regions if not (region.mover or region.is_view or region.still)]
    return [region for region in computing if region.engine is not None] or computing or regions


def _check_engines(name: str, wish: str, target: Target) -> None:
    engines = [engine.name for engine in target.engines]
    cores = [f"{CORE}{number}" for number in range(len(target.cores))] if target.workers else []
    known = [*engines, CORE, *cores]
    parts = [part.strip() for part in wish.split("+")]
    for part in parts:
        if part not in known:
            what = f"it goes to '{part}', which {target.name} does not have"
            raise PlaceError(what, where=f"pin '{name}'", hint=f"use {', '.join(known)}")
    if len(set(parts)) != len(parts) or (len(parts) > 1 and not set(parts) <= set(engines)):
        raise PlaceError(
            f"'{wish}' is not one place", where=f"pin '{name}'", hint="name one place, or several engines joined by '+'"
        )


_EXACT_SECONDS = 3.0
"""Deterministic solver time."""
_EXACT_CANDIDATES = 600
"""Candidates of all layers together the solver is asked about; larger networks have the heuristic's answer."""


@dataclass(frozen=True)
class Assignment:
    """Where everything is computed, and how good that is."""

    regions: tuple[Region, ...]
    """In the order in which they begin."""
    layers: tuple[LayerOptions, ...] = ()
    """Every layer with its candidates, in the partition's order; empty where nothing was to decide."""
    schedule: Schedule | None = None
    bound: int = 0
    """Cycles, by the same estimate, that no placement can be below."""
    compared: Mapping[str, PlacementReason] = field(default_factory=dict)
    """Region name -> what there is to say of a layer that was compared by itself, with one engine."""
    tiles: TileCache = field(default_factory=TileCache, compare=False)
    """What is known of tiles of regions, by their names, where their values lie row-major."""
    note: str = ""
    """A sentence about what was given up for want of memory; empty for nothing."""

    @property
    def is_proven(self) -> bool:
        """True when no placement can end earlier, by the costs as they are estimated."""
        return self.schedule is None or self.schedule.finish <= self.bound

    def describe(self) -> str:
        """The outcome in one sentence; empty where nothing was to decide."""
        if self.schedule is None:
            return self.note
        finish = self.schedule.finish
        together = f"{overlap(self.layers, self.schedule):,} of them with engines and core at work together"
        if self.is_proven:
            return f"the network ends after {finish:,} cycles by estimate, proven to be the least; {together}"
        gap = 100 * (finish - self.bound) / max(self.bound, 1)
        return f"the network ends after {finish:,} cycles by estimate, at most {gap:.1f} % above the least; {together}"


def assign(
    graph: Graph, regions: tuple[Region, ...], target: Target, pins: Mapping[str, str], held: Collection[str] = ()
) -> Assignment:
    """Decide where every region is computed.

    Args:
        graph: the whole network.
        regions: of `first`, their knobs chosen.
        target: the machine.
        pins: layer or operator -> engine, "core", a core by its number ("core1"), or engines joined by "+".
        held: names of regions that stay where they are, since knobs were chosen for them.

    Raises:
        PlaceError: a pin names what does not exist, or wants a layer where it cannot be; says why.
    """
    wishes = resolve(pins, regions, target)
    if len(target.engines) < 2 and not wishes:
        tiles = TileCache()
        chosen, compared = cheaper(graph, regions, target, held, tiles)
        before = {region.name: region.offload for region in regions}
        same = {region.name for region in chosen if region.offload is before.get(region.name)}
        return Assignment(chosen, compared=compared, tiles=tiles.of(same))
    known = layers(graph, regions, target, wishes, held)
    dma = target.dma.name if target.dma else CORE
    found, bound = _kept(known, dma)
    return Assignment(_placed(known, found, dma if len(target.engines) > 1 else None), known, found, bound)


def _kept(known: tuple[LayerOptions, ...], dma: str) -> tuple[Schedule, int]:
    """The schedule that was found before for such layers, or is found now, and what none can be below."""
    asked = [(layer.after, sorted(layer.delays.items()), _costs(layer)) for layer in known]
    solver = find_spec("ortools") is not None
    answer = kept_answer(Path(__file__).parent, repr((asked, dma, solver)), lambda: _answer(*_found(known, dma)))
    held = json.loads(answer)
    launches, starts = (tuple(map(tuple, held[name])) for name in ("launches", "starts"))
    return Schedule(tuple(held["picks"]), launches, starts, held["finish"]), held["bound"]


def _costs(layer: LayerOptions) -> list[object]:
    """All of a layer's candidates that a schedule depends on."""
    return [
        (sorted(one.members), [[getattr(step, each.name) for each in fields(step)[1:]] for step in one.steps])
        for one in layer.candidates
    ]


def _answer(found: Schedule, bound: int) -> bytes:
    return json.dumps({**asdict(found), "bound": bound}).encode()


def _found(known: tuple[LayerOptions, ...], dma: str) -> tuple[Schedule, int]:
    """A schedule of some layers, and what none can be below."""
    engines = {name for layer in known for one in layer.candidates for step in one.steps for name in step.engines}
    known = tuple(map(_one_ahead, known)) if len(engines) > 1 else known
    found, bound = heuristic(known, dma), lower_bound(known, dma)
    if found.finish > bound and sum(len(layer.candidates) for layer in known) <= _EXACT_CANDIDATES:
        found, bound = improve(known, found, bound, dma, _EXACT_SECONDS)
        found = settled(known, found, dma)
    return in_order(known, found, dma), bound


def _one_ahead(layer: LayerOptions) -> LayerOptions:
    """The layer with constants that take all the room there is for those that wait: with several engines a schedule
    with as many waiting as fit is hardly ever proven to be the best, and is a worse one."""

    def filled(step: CandidateStep) -> CandidateStep:
        return replace(step, filled=tuple(ALL_ROOM for _ in step.engines))

    candidates = (replace(one, steps=tuple(map(filled, one.steps))) for one in layer.candidates)
    return replace(layer, candidates=tuple(candidates))


def one_by_one(assignment: Assignment) -> Assignment:
    """The same engines, each layer on one of them and after the one before: what needs least memory."""
    assert assignment.schedule is not None
    regions = _placed(assignment.layers, assignment.schedule, None)
    note = "there is no memory for several layers at once: they are computed one after the other"
    return Assignment(tuple(replace(region, shares=()) for region in regions), note=note)


def first(graph: Graph, target: Target) -> tuple[Region, ...]:
    """The partition from which placement starts: without offloads that cost accuracy."""
    lossless = {engine.name: False for engine in target.engines}
    return partition(graph, without_offloads(target, lossless))


def _placed(known: tuple[LayerOptions, ...], found: Schedule, dma: str | None) -> tuple[Region, ...]:
    """The chosen regions, in the order in which they are issued; without times, and in the partition's order, without
    the name of the queue of copies."""
    times = slots(known, found, dma) if dma is not None else {}
    chosen = []
    for layer, pick in zip(known, found.picks, strict=True):
        could_be_elsewhere = layer.region.engine is not None or layer.pinned
        for region in (step.region for step in layer.candidates[pick].steps):
            on_core = region.engine is None and not region.mover
            reason = why(layer, layer.candidates[pick]) if on_core and could_be_elsewhere else region.reason
            core = pinned_core(layer.pinned) if on_core else None
            chosen.append(replace(region, reason=reason, slot=times.get(region.name), core=core))
    return tuple(sorted(chosen, key=lambda region: region.slot.issue if region.slot else 0))
