"""The report of a run as data, and its JSON.

How costs are attributed:

* Cycles of a layer are the time from its marker to the next layer's, so waiting for engines is counted where the core
  waits. What comes before the first marker belongs to the first layer and what comes after the last one to the last:
  the layers' cycles add up to the total.
* Engine cycles of a layer are the busy cycles of the jobs started for it. An engine's jobs end in the order in which
  they were started, so each layer takes jobs until their MACs reach its own (those of its launches). Jobs at the edge
  of a grid may compute more than is asked for; a layer that cannot be met exactly then ends where the next one can.
  Jobs without MACs are shared evenly by the layers without any that follow each other there.
  Where not even that is possible there must be one job per launch; else they are None (`null`).
* Bytes moved are those the DMA writes for a layer, padding included, and those brought to an engine with a copy of the
  memory, or back from it, as the program says.

Cycles, instructions, layers and timeline are those of the first inference; `each` has the totals of all of them.
On the host there is no time: every figure that needs it is None (`null`), and there is no timeline.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, Any

from dovetail.layout import Conversion
from dovetail.report.cores import CoreUse, core_uses

if TYPE_CHECKING:
    from dovetail.run import RunResult
    from dovetail.simulate.device import Activity as DeviceActivity
    from dovetail.simulate.protocol import InferenceResult

SCHEMA = 1
"""Version of the JSON. It grows when a field is removed or changes its meaning, not when one is added."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: what is computed together, by one engine or by the core."""

    name: str
    operators: tuple[str, ...]
    """Operators of the user's model computed here."""
    engine: str
    """Name of the engine (of several, joined by "+"), of the DMA, or "core"."""
    cycles: int | None
    """From its beginning on the core to the next layer's; 0 where nothing is done."""
    engine_cycles: int | None
    """Cycles in which the engines' jobs for it run; 0 where no engine works, None where unknown."""
    macs: int
    ideal_macs_per_cycle: float | None
    """The peak of its engines; None on the core."""
    bytes_moved: int
    """Bytes the DMA writes for it, and those brought to an engine's copy of the memory and back."""
    reason_not_offloaded: str

    @property
    def macs_per_cycle(self) -> float | None:
        """MACs per busy cycle of what computes it; None without time or MACs."""
        cycles = self.engine_cycles if self.ideal_macs_per_cycle is not None else self.cycles
        return self.macs / cycles if cycles and self.macs else None


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of one memory that activations and tiles need."""

    size: int
    peak: int
    lower_bound: int
    """The most bytes live at any one moment: no placement needs less."""


@dataclass(frozen=True, slots=True)
class Activity:
    """One bar of the timeline; cycles since the start of the inference."""

    start: int
    end: int
    label: str


@dataclass(frozen=True, slots=True)
class Totals:
    """One inference as a whole."""

    instructions: int | None
    cycles: Mapping[str, int | None]
    """"total": from first to last instruction; "core": not asleep; every engine and the DMA: busy."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a run cost; `to_json` is the documented form."""

    schema: int
    dovetail: str
    """Version of Dovetail that made the build."""
    model: str
    target: str
    policy: str
    simulator: str
    inferences: int
    instructions: int | None
    cycles: Mapping[str, int | None]
    """As in `Totals`."""
    macs: Mapping[str, int]
    """"total", "core" and every engine: multiply-accumulates of an inference."""
    memory: Mapping[str, MemoryUse]
    sizes: Mapping[str, int]
    """Bytes of text, rodata, data and bss of the firmware; empty on the host."""
    stack: int | None
    """Most bytes of stack used."""
    layers: tuple[Layer, ...]
    each: tuple[Totals, ...]
    """Every inference."""
    timeline: Mapping[str, tuple[Activity, ...]]
    """By device and further core; "core" has one bar per layer."""
    cores: tuple[CoreUse, ...] = ()
    """By number."""
    delay: int = 0
    """In a pipeline: calls between an input and its outputs. Cycles are those of one call, so of one input after
    another."""
    conversions: tuple[Conversion, ...] = ()
    """The values that change their layout."""

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`, keys as the fields."""
        return asdict(self)


def make_report(result: RunResult) -> Report:
    """The report of a run of at least one inference."""
    manifest, simulation = result.build.manifest, result.simulation
    first = simulation.inferences[0]
    devices = _devices(result)
    layers = _layers(result, first)
    macs = {"total": sum(layer.macs for layer in layers)}
    macs["core"] = sum(layer.macs for layer in layers if layer.engine == "core")
    for name in (engine.name for engine in result.build.target.engines):
        macs[name] = sum(_macs_on(name, layer, work) for layer, work in zip(layers, manifest["work"], strict=True))
    each = tuple(_totals(inference, devices) for inference in simulation.inferences)
    return Report(
        schema=SCHEMA,
        dovetail=str(manifest["dovetail"]),
        model=str(manifest["model"]),
        target=str(manifest["target"]),
        policy=str(manifest["policy"]),
        simulator=result.simulator,
        inferences=len(simulation.inferences),
        instructions=first.instructions,
        cycles=each[0].cycles,
        macs=macs,
        memory={name: MemoryUse(**use) for name, use in manifest["memory"].items()},
        sizes={name: size for name, size in result.sizes.items() if name in ("text", "rodata", "data", "bss")},
        stack=simulation.stack_bytes,
        layers=layers,
        each=each,
        timeline=_timeline(first, layers),
        cores=core_uses(result, first),
        delay=int(manifest.get("delay", 0)),
        conversions=tuple(
            Conversion(**{**found, "readers": tuple(found["readers"])}) for found in manifest.get("conversions", [])
        ),
    )


def _macs_on(engine: str, layer: Layer, work: Mapping[str, Any]) -> int:
    """MACs of a layer on an engine: all, or those of its launches where it has a share."""
    if layer.engine == engine:
        return layer.macs
    return int(work["engines"].get(engine, 0)) if "+" in layer.engine else 0


def _devices(result: RunResult) -> tuple[str, ...]:
    target = result.build.target
    return (*(engine.name for engine in target.engines if engine.device), *([target.dma.name] if target.dma else []))


def _totals(inference: InferenceResult, devices: Sequence[str]) -> Totals:
    cycles: dict[str, int | None] = {"total": inference.total_cycles, "core": inference.core_cycles}
    for name in devices:
        cycles[name] = _busy(inference.activities[name]) if name in inference.activities else None
    return Totals(inference.instructions, cycles)


def _busy(activities: Sequence[DeviceActivity]) -> int:
    """Cycles in which at least one of these is going on."""
    total, reached = 0, 0
    for activity in sorted(activities, key=lambda a: (a.start, a.end)):
        total += max(0, activity.end - max(activity.start, reached))
        reached = max(reached, activity.end)
    return total


def _layers(result: RunResult, first: InferenceResult) -> tuple[Layer, ...]:
    manifest = result.build.manifest
    described, work = manifest["layers"], manifest["work"]
    cycles = _layer_cycles(first, len(described))
    peak = {engine.name: engine.ideal_macs_per_cycle for engine in result.build.target.engines}
    ideal = {layer["engine"]: sum(map(peak.__getitem__, layer["engine"].split("+")))
             for layer in described if peak.keys() >= set(layer["engine"].split("+"))}  # fmt: skip
    busy = _engine_cycles(work, _devices(result), first) if cycles is not None else [None] * len(described)
    return tuple(
        Layer(
            name=layer["name"],
            operators=tuple(layer["operators"]),
            engine=layer["engine"],
            cycles=None if cycles is None else cycles[index],
            engine_cycles=busy[index],
            macs=int(layer["macs"]),
            ideal_macs_per_cycle=ideal.get(layer["engine"]),
            bytes_moved=int(moved["bytes"]),
            reason_not_offloaded=layer["reason_not_offloaded"],
        )
        for index, (layer, moved) in enumerate(zip(described, manifest["work"], strict=True))
    )


def _engine_cycles(
    work: Sequence[Mapping[str, Any]], devices: Sequence[str], first: InferenceResult
) -> list[int | None]:
    """Cycles of each layer in which at least one engine works for it."""
    jobs: list[list[DeviceActivity] | None] = [[] for _ in work]
    for name in devices:
        own = {i: int(done["engines"][name]) for i, done in enumerate(work) if name in done["engines"]}
        alone = all(len(work[i]["engines"]) == 1 for i in own)
        started = {i: int(work[i]["launches"]) for i in own} if alone else None
        found = assign_jobs(own, first.activities.get(name, ()), started)
        for index in own:
            known = jobs[index]
            jobs[index] = None if found is None or known is None else [*known, *found[index]]
    return [None if some is None else _busy(some) for some in jobs]


def _layer_cycles(inference: InferenceResult, count: int) -> list[int] | None:
    """Cycles per layer, adding up to the inference's; None without time."""
    if inference.total_cycles is None:
        return None
    found = [0] * count
    markers = inference.markers
    ends = [*(marker.start_cycle for marker in markers[1:]), inference.total_cycles]
    starts = [0, *ends[:-1]]
    for marker, start, end in zip(markers, starts, ends, strict=bool(markers)):
        found[marker.layer] += end - start
    return found


def assign_jobs(
    macs: Mapping[int, int], jobs: Sequence[DeviceActivity], launches: Mapping[int, int] | None = None
) -> dict[int, tuple[DeviceActivity, ...]] | None:
    """The jobs of one engine by layer, as the head of this file says; None when they cannot be told apart.

    Args:
        macs: MACs of each of the engine's layers, by index, in the order in which they are started.
        jobs: in the order in which they ended.
        launches: how many launches each of them has.
    """
    found = _by_macs(macs, jobs)
    if found is not None or launches is None or sum(launches.values()) != len(jobs):
        return found
    ends = accumulate(launches.values())
    return {index: tuple(jobs[end - launches[index] : end]) for index, end in zip(launches, ends, strict=True)}


def _by_macs(
    macs: Mapping[int, int], jobs: Sequence[DeviceActivity]
) -> dict[int, tuple[DeviceActivity, ...]] | None:
    sums = list(accumulate((job.macs for job in jobs), initial=0))
    places = {total: position for position, total in reversed(list(enumerate(sums)))}
    found: dict[int, tuple[DeviceActivity, ...]] = {}
    wanted, start = list(macs.values()), 0
    for number, index in enumerate(macs):
        idle = _idle_jobs(wanted, number, jobs, start)
        if idle:
            found[index] = tuple(jobs[start : start + idle])
            start += idle
            continue
        after = wanted[number + 1] if number + 1 < len(wanted) else None
        end = places.get(sums[start] + wanted[number])
        if after is None:
            end = len(jobs)
        elif end is None:
            least = bisect_left(sums, sums[start] + wanted[number])
            end = next((place for place in range(least, len(sums)) if sums[place] + after in places), None)
        if end is None or sums[end] - sums[start] < wanted[number]:
            return None
        found[index] = tuple(jobs[start:end])
        start = end
    return found


def _idle_jobs(wanted: Sequence[int], number: int, jobs: Sequence[DeviceActivity], start: int) -> int:
    """How many of the jobs from `start` on are those of a layer without MACs; 0 where it cannot be told."""
    if not any(wanted):
        return 0
    layers = sum(1 for _ in takewhile(lambda macs: macs == 0, wanted[number:]))
    count = sum(1 for _ in takewhile(lambda job: job.macs == 0, jobs[start:]))
    return count // layers if layers else 0


def _timeline(inference: InferenceResult, layers: Sequence[Layer]) -> dict[str, tuple[Activity, ...]]:
    if inference.total_cycles is None:
        return {}
    core = tuple(Activity(m.start_cycle, m.end_cycle, layers[m.layer].name) for m in inference.markers)
    found = {"core": core}
    for name, activities in inference.activities.items():
        found[name] = tuple(Activity(activity.start, activity.end, activity.label) for activity in activities)
    return found
