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
* An engine that takes lists of commands works through several layers without the core: there a layer lasts from the end
  of what comes before it to the end of its last command, and its commands are counted, not guessed
  (dovetail/sim/stretches.py).
* Bytes moved are those the DMA writes for a layer, padding included, and those brought to an engine with a copy of the
  memory, or back from it, as the program says.

Cycles, instructions, layers and timeline are those of the first inference; `each` has the totals of all of them.
On the host there is no time: every figure that needs it is None (`null`), and there is no timeline.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, Any

from dovetail.schedule.layout import Conversion
from dovetail.sim.stretches import Stretches, jobs_of

if TYPE_CHECKING:
    from rich.console import Console

    from dovetail.run import RunResult
    from dovetail.sim.device import Activity as DeviceActivity
    from dovetail.sim.protocol import InferenceResult


@dataclass(frozen=True, slots=True)
class CoreUse:
    """One core. On the host all but what is planned is None, and there are no layers."""

    name: str
    """As in the timeline: "core", "core1", …"""
    speed: float
    """Relative to the others, as the target says."""
    cycles: int | None
    """Busy: not asleep, of further cores with a job."""
    instructions: int | None
    stack: int
    """Bytes reserved."""
    stack_used: int | None
    """Most bytes used."""
    layers: Mapping[str, int]
    """Cycles it worked for each layer of which it computes a part; core 0 until the next layer, waits included."""


def core_uses(result: RunResult, first: InferenceResult) -> tuple[CoreUse, ...]:
    """Every core's, by number, of one inference of a run."""
    layers, works = result.build.manifest["layers"], result.build.manifest["work"]
    names = [layer["name"] for layer in layers]
    alone = [(0,) if layer["engine"] == "core" else () for layer in layers]
    cores = [tuple(work.get("cores", one)) for work, one in zip(works, alone, strict=True)]
    used = (result.simulation.stack_bytes, *result.simulation.worker_stack_bytes)
    found = []
    for number, core in enumerate(result.build.target.cores):
        own = [name for name, some in zip(names, cores, strict=True) if number in some]
        name = f"core{number}" if number else "core"
        jobs = first.activities.get(name, ())
        cycles, instructions = first.core_cycles, first.instructions
        worked = _marked(first, names, own)
        if number and cycles is not None:
            cycles, instructions = sum(job.end - job.start for job in jobs), sum(job.instructions for job in jobs)
            worked = {layer: job.end - job.start for job in jobs for layer in own if job.label == f"{layer}_on_{name}"}
        stack_used = used[number] if number < len(used) else None
        found.append(CoreUse(name, core.speed, cycles, instructions, core.stack, stack_used, worked))
    return tuple(found)


def _marked(first: InferenceResult, names: Sequence[str], own: Sequence[str]) -> dict[str, int]:
    """Cycles between the markers of some layers and those that follow."""
    found: Counter[str] = Counter()
    for marker in first.markers:
        if names[marker.layer] in own:
            found[names[marker.layer]] += marker.end_cycle - marker.start_cycle
    return dict(found)


SCHEMA = 1
"""Version of the JSON. It grows when a field is removed or changes its meaning, not when one is added."""


@dataclass(frozen=True, slots=True)
class ReportLayer:
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
    beside: tuple[str, ...] = ()
    """The layers the engine computes at the same time, started together."""

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
class ReportActivity:
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
    """The costs of a run; `to_json` is the documented form."""

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
    layers: tuple[ReportLayer, ...]
    each: tuple[Totals, ...]
    """Every inference."""
    timeline: Mapping[str, tuple[ReportActivity, ...]]
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
    layers, devices = _layers(result, first), _devices(result)
    macs = {"total": sum(layer.macs for layer in layers)}
    macs["core"] = sum(layer.macs for layer in layers if layer.engine == "core")
    for name in (engine.name for engine in result.build.target.engines):  # all, or those of its launches of a share
        macs[name] = sum(layer.macs for layer in layers if layer.engine == name)
        several = (work for layer, work in zip(layers, manifest["work"], strict=True) if "+" in layer.engine)
        macs[name] += sum(int(work["engines"].get(name, 0)) for work in several)
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
        conversions=tuple(Conversion(**{**c, "readers": tuple(c["readers"])}) for c in manifest.get("conversions", [])),
    )


def _devices(result: RunResult) -> tuple[str, ...]:
    target = result.build.target
    return (*(engine.name for engine in target.engines if engine.device), *(dma.name for dma in target.dmas))


def _totals(inference: InferenceResult, devices: Sequence[str]) -> Totals:
    cycles: dict[str, int | None] = {"total": inference.total_cycles, "core": inference.core_cycles}
    jobs = inference.activities
    return Totals(inference.instructions, cycles | {n: _busy(jobs[n]) if n in jobs else None for n in devices})


def _busy(activities: Sequence[DeviceActivity]) -> int:
    """Cycles in which at least one of these is going on."""
    total, reached = 0, 0
    for activity in sorted(activities, key=lambda a: (a.start, a.end)):
        total += max(0, activity.end - max(activity.start, reached))
        reached = max(reached, activity.end)
    return total


def _layers(result: RunResult, first: InferenceResult) -> tuple[ReportLayer, ...]:
    manifest = result.build.manifest
    described, work = manifest["layers"], manifest["work"]
    cycles = _layer_cycles(first, len(described))
    peak = {engine.name: engine.ideal_macs_per_cycle for engine in result.build.target.engines}
    parts = {layer["engine"]: layer["engine"].split("+") for layer in described}
    ideal = {name: sum(map(peak.__getitem__, own)) for name, own in parts.items() if peak.keys() >= set(own)}
    busy = (
        _engine_cycles(work, _devices(result), first, manifest.get("stretches", ()))
        if cycles is not None
        else [None] * len(described)
    )
    return tuple(
        ReportLayer(
            name=layer["name"],
            operators=tuple(layer["operators"]),
            engine=layer["engine"],
            cycles=None if cycles is None else cycles[index],
            engine_cycles=busy[index],
            macs=int(layer["macs"]),
            ideal_macs_per_cycle=ideal.get(layer["engine"]),
            bytes_moved=int(moved["bytes"]),
            reason_not_offloaded=layer["reason_not_offloaded"],
            beside=tuple(layer.get("beside", ())),
        )
        for index, (layer, moved) in enumerate(zip(described, manifest["work"], strict=True))
    )


def _engine_cycles(
    work: Sequence[Mapping[str, Any]], devices: Sequence[str], first: InferenceResult, stretches: Stretches = ()
) -> list[int | None]:
    """Cycles of each layer in which at least one engine works for it."""
    jobs: list[list[DeviceActivity] | None] = [[] for _ in work]
    listed = {queue for stretch in stretches for queue in stretch["commands"]}
    for stretch, done in zip(stretches, jobs_of(stretches, first) or (), strict=False):
        kept = [job for queue, job in done if queue in work[stretch["layer"]]["engines"]]
        jobs[stretch["layer"]] = [*(jobs[stretch["layer"]] or ()), *kept]
    for name in (device for device in devices if device not in listed):
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


def _by_macs(macs: Mapping[int, int], jobs: Sequence[DeviceActivity]) -> dict[int, tuple[DeviceActivity, ...]] | None:
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
    layers = sum(1 for _ in takewhile(lambda macs: macs == 0, wanted[number:]))
    count = sum(1 for _ in takewhile(lambda job: job.macs == 0, jobs[start:]))
    return count // layers if layers and any(wanted) else 0


def _timeline(inference: InferenceResult, layers: Sequence[ReportLayer]) -> dict[str, tuple[ReportActivity, ...]]:
    if inference.total_cycles is None:
        return {}
    core = tuple(ReportActivity(m.start_cycle, m.end_cycle, layers[m.layer].name) for m in inference.markers)
    jobs = {
        name: tuple(ReportActivity(j.start, j.end, j.label) for j in own) for name, own in inference.activities.items()
    }
    return {"core": core, **jobs}


def print_report(report: Report, console: Console) -> None:
    """Print a table of the layers and the totals below it."""
    from rich.table import Table

    many = f", {report.inferences} inferences, the first:" if report.inferences > 1 else ""
    title = f"{report.model} on {report.target} ({report.simulator}, policy {report.policy}){many}"
    console.print(title, style="bold", markup=False, highlight=False, soft_wrap=True)
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("layer", no_wrap=True)
    table.add_column("where", no_wrap=True)
    for heading in ("cycles", "engine busy", "MACs", "MAC/cycle", "bytes moved"):
        table.add_column(heading, justify="right", no_wrap=True)
    for layer in report.layers:
        style = "" if layer.ideal_macs_per_cycle is not None else "dim"
        table.add_row(*_table_row(*_on_cores(report, layer)), style=style)
    console.print(table, highlight=False)
    for line in totals(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def totals(report: Report) -> list[str]:
    """The lines below the table."""
    lines = []
    if report.cycles["total"] is not None:
        busy = {name: value for name, value in report.cycles.items() if name != "total" and value is not None}
        parts = ", ".join(f"{name} {_number(value)}" for name, value in busy.items())
        lines.append(f"cycles        {_number(report.cycles['total'])}{f' (busy: {parts})' if parts else ''}")
    if report.instructions is not None:
        lines.append(f"instructions  {_number(report.instructions)}")
    lines.append(f"MACs          {_share(report)}")
    if report.conversions:
        lines.append(f"conversions   {_conversions_text(report)}")
    for name, use in report.memory.items():
        bound = f"lower bound {_number(use.lower_bound)}"
        lines.append(f"{name:13} {_number(use.peak)} of {_number(use.size)} bytes at the peak ({bound})")
    lines += _core_lines(report) if len(report.cores) > 1 else []
    if report.sizes:
        sizes = ", ".join(f"{name} {_number(size)}" for name, size in report.sizes.items())
        stack = f", stack used {_number(report.stack)}" if report.stack is not None else ""
        lines.append(f"firmware      {sizes}{stack} bytes")
    return lines


def _core_lines(report: Report) -> list[str]:
    """A line for each of several cores, and one for a pipeline."""
    lines = []
    for core in report.cores:
        lines.append(f"{core.name:13} speed {core.speed:g}, stack {_number(core.stack)} bytes")
        if core.cycles is not None:
            work = f"busy {_number(core.cycles)} cycles, {_number(core.instructions)} instructions"
            lines[-1] += f", used {_number(core.stack_used)}; {work}"
    if report.delay:
        calls = "call" if report.delay == 1 else "calls"
        lines.append(f"pipeline      the outputs of an input come {report.delay} {calls} later")
    return lines


def _conversions_text(report: Report) -> str:
    """How many values change their layout, between whom, and how many from an engine to an engine."""
    engines = {name for name in report.macs if name not in ("total", "core")}
    ways = ", ".join(f"{found.maker} to {' and '.join(found.readers)}" for found in report.conversions)
    between = sum(found.maker in engines and not engines.isdisjoint(found.readers) for found in report.conversions)
    moved = sum(found.nbytes for found in report.conversions)
    return f"{len(report.conversions)} of layouts, {_number(moved)} bytes ({ways}); {between} between engines"


def _share(report: Report) -> str:
    total = report.macs["total"]
    engines = {name: macs for name, macs in report.macs.items() if total and name not in ("total", "core")}
    return ", ".join([_number(total), *(f"{100 * macs / total:.1f} % on {name}" for name, macs in engines.items())])


def _on_cores(report: Report, layer: ReportLayer) -> tuple[ReportLayer, str]:
    """The layer and who does it: an engine, or the cores that have a part of it. Where core 0 has none, its cycles are
    those of the core that works longest."""
    own = {core.name: core.layers[layer.name] for core in report.cores if layer.name in core.layers}
    if layer.engine != "core" or not own:
        return layer, f"{layer.engine}, beside {', '.join(layer.beside)}" if layer.beside else layer.engine
    return layer if "core" in own else replace(layer, cycles=max(own.values())), " ".join(own)


def _table_row(layer: ReportLayer, where: str) -> tuple[str, ...]:
    rate = layer.macs_per_cycle
    speed = "" if rate is None else f"{rate:.2f}"
    if rate is not None and layer.ideal_macs_per_cycle:
        speed = f"{rate:.1f} of {layer.ideal_macs_per_cycle:g}"
    busy = _number(layer.engine_cycles) if layer.ideal_macs_per_cycle is not None else ""
    moved = _number(layer.bytes_moved) if layer.bytes_moved else ""
    macs = _number(layer.macs) if layer.macs else ""
    return layer.name, where, _number(layer.cycles), busy, macs, speed, moved


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
