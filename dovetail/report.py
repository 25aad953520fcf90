"""The report of a run as data, and its JSON.

How costs are attributed:

* Cycles of a layer are the time from its marker to the next layer's; `waiting` are those in which the core sleeps, as a
  rule for the layer before. What comes before the first marker belongs to the first layer and what comes after the last
  one to the last: the layers' cycles add up to the total.
* Engine cycles of a layer are the busy cycles of the jobs started for it: the build says how many commands each layer
  gives each engine, in order (dovetail/sim/stretches.py). Where a device shows another number of jobs they are
  None (`null`), and a note names it.
* An engine that takes lists of commands works through several layers without the core: there a layer lasts from the
  end of what comes before it to the end of its last command.
* Bounds (`dovetail.bounds`) are of the model's operators in a layer; those of an operator in several layers are shared
  by multiply-accumulates. The network's is no sum of them: units work side by side.
* Bytes moved are those the DMA writes for a layer, padding included, and those brought to an engine with a copy of the
  memory, or back from it, as the program says.

Cycles, instructions, layers and timeline are those of the first inference; `each` has the totals of all of them.
On the host there are no cycles: every figure that needs them is None (`null`), and there is no timeline. Devices that
time their own work, such as OpenCL's, give nanoseconds for each layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from dovetail.bounds import NOTHING, Bound, layer_bounds, model_bound
from dovetail.claims import Claim, claims
from dovetail.claims import notes as device_notes
from dovetail.codegen.manifest import BuildManifest, LayerWork, MemoryUse
from dovetail.documented import document
from dovetail.energy import energy
from dovetail.errors import visible
from dovetail.names import names
from dovetail.notes import Kind, Note
from dovetail.program.ir import CORE, core_queue
from dovetail.records import Record, field
from dovetail.schedule.layout import Conversion
from dovetail.sim.stretches import busy as busy
from dovetail.sim.stretches import jobs_of
from dovetail.sim.stretches import union as union

if TYPE_CHECKING:
    from rich.console import Console

    from dovetail.run import RunResult
    from dovetail.sim.device import Activity as DeviceActivity
    from dovetail.sim.protocol import InferenceResult
    from dovetail.target.description import Target


Span = tuple[int, int]
"""Start and end, in cycles."""


class CoreUse(Record):
    """Work of one core. On the host only planned figures are there, and there are no layers."""

    name: str
    """Name in the timeline: "core", "core1", …"""
    speed: float
    """Relative to the others, as the target says."""
    cycles: int | None
    """Busy cycles: not asleep, and for further cores with a job."""
    instructions: int | None
    """Instructions executed; None if they are not counted."""
    stack: int
    """Bytes of stack reserved."""
    stack_used: int | None
    """Most bytes of stack used."""
    layers: Mapping[str, int]
    """Cycles for each layer that it computes, or computes partly; on core 0 until the next layer, waits included."""


def core_uses(result: RunResult, first: InferenceResult) -> tuple[CoreUse, ...]:
    """The use of each core, by number, in the first inference of a run."""
    layers, works = result.build.manifest.layers, result.build.manifest.work
    stacks = (result.simulation.stack_bytes, *result.simulation.worker_stack_bytes)
    uses = []
    for number, core in enumerate(result.build.target.cores):
        name = core_queue(number)
        own = {
            layer.name
            for layer, work in zip(layers, works, strict=True)
            if number in (((0,) if layer.engine == "core" else ()) if work.cores is None else work.cores)
        }
        cycles, instructions, worked = first.core_cycles, first.instructions, Counter[str]()
        jobs = first.activities.get(name, ())
        if number and cycles is not None:
            cycles, instructions = sum(job.end - job.start for job in jobs), sum(job.instructions for job in jobs)
            by_label = {f"{layer}_on_{name}": layer for layer in own}
            worked.update({by_label[job.label]: job.end - job.start for job in jobs if job.label in by_label})
        else:
            for marker in first.markers:
                if layers[marker.layer].name in own:
                    worked[layers[marker.layer].name] += marker.end_cycle - marker.start_cycle
        stack_used = stacks[number] if number < len(stacks) else None
        uses.append(CoreUse(name, core.speed, cycles, instructions, core.stack, stack_used, dict(worked)))
    return tuple(uses)


SCHEMA = 1
"""Version of the JSON. It grows when a field is removed or changes its meaning, not when one is added."""


class ReportLayer(Record):
    """Costs of a layer: operators that one engine, or the core, computes together."""

    name: str
    """Name of the layer."""
    operators: tuple[str, ...]
    """Operators of the user's model computed here."""
    engine: str
    """Name of the engine (of several, joined by "+"), of the DMA, or "core"."""
    cycles: int | None
    """Cycles from its beginning on the core to the beginning of the next layer; 0 if nothing is computed."""
    engine_cycles: int | None
    """Cycles in which the engines' jobs for it run; 0 where no engine works, None where unknown."""
    macs: int
    """Number of multiply-accumulates."""
    ideal_macs_per_cycle: float | None
    """The peak of its engines; None on the core."""
    bytes_moved: int
    """Bytes the DMA writes for it, and those brought to an engine's copy of the memory and back."""
    reason_not_offloaded: str
    """Reason why no engine computes it; empty if one does."""
    beside: tuple[str, ...] = ()
    """The layers the engine computes at the same time, started together."""
    candidates: Mapping[str, int] = field(default_factory=dict)
    """Cycles by place, as the planner compared them; empty where nothing was compared."""
    kernels: Mapping[str, int] = field(default_factory=dict)
    """Cycles of kernels of the core, by estimate: with its `own_instructions` and `plain`; empty where one is known."""
    estimated: int | None = None
    """`cycles` as the clock has them at compile time."""
    bound: float | None = None
    """Cycles that every schedule takes at least, by the model and the hardware (`dovetail.bounds`); None without
    time."""
    bound_by: str = ""
    """The unit that sets it, as a sentence."""
    waiting: int | None = None
    """The part of `cycles` in which the core sleeps: it waits for transfers of this layer, or for an engine's work."""
    nanoseconds: int | None = None
    """Time of its kernels on a device that takes it; None where nothing does."""

    @property
    def core_cycles(self) -> int | None:
        """The part of `cycles` in which the core works."""
        return None if self.cycles is None else self.cycles - (self.waiting or 0)

    @property
    def macs_per_cycle(self) -> float | None:
        """MACs per busy cycle of its engine or core; None without time or MACs."""
        cycles = self.engine_cycles if self.ideal_macs_per_cycle is not None else self.core_cycles
        return self.macs / cycles if cycles and self.macs else None


class ReportActivity(Record):
    """A bar of the timeline, in cycles since the start of the inference."""

    start: int
    """Cycle it starts at."""
    end: int
    """Cycle it ends at."""
    label: str
    """Description for people."""


class Totals(Record):
    """Cycles and instructions of one whole inference."""

    instructions: int | None
    """Instructions executed; None if they are not counted."""
    cycles: Mapping[str, int | None]
    """"total": from first to last instruction; "core": not asleep; every engine and the DMA: busy."""


class Report(Record):
    """The costs of a run; `to_json` is the documented form."""

    schema: int
    """Version of this form."""
    dovetail: str
    """Version of Dovetail that made the build."""
    model: str
    """Name of the model."""
    target: str
    """Name of the target."""
    policy: str
    """Name of the requantisation policy."""
    simulator: str
    """Simulator or board of the run."""
    inferences: int
    """Number of inferences."""
    instructions: int | None
    """Instructions of the first inference; None if they are not counted."""
    cycles: Mapping[str, int | None]
    """Cycles of the first inference; None if there is no clock."""
    macs: Mapping[str, int]
    """"total", "core" and every engine: multiply-accumulates of an inference."""
    memory: Mapping[str, MemoryUse]
    """Bytes used of each memory, by name."""
    sizes: Mapping[str, int]
    """Bytes of text, rodata, data and bss of the firmware; empty on the host."""
    stack: int | None
    """Most bytes of stack used."""
    layers: tuple[ReportLayer, ...]
    """Layers of the first inference, in order."""
    each: tuple[Totals, ...]
    """Totals of every inference."""
    timeline: Mapping[str, tuple[ReportActivity, ...]]
    """Bars by device and core; "core" has one bar per layer."""
    cores: tuple[CoreUse, ...] = ()
    """Work of each core, by number."""
    delay: int = 0
    """Calls between an input and its outputs, in a pipeline. Cycles are those of one call, so of one input after
    another."""
    conversions: tuple[Conversion, ...] = ()
    """The values that change their layout."""
    estimated: int | None = None
    """Cycles of an inference as the clock has them at compile time."""
    bound: float | None = None
    """Cycles that no schedule of the model takes less than (`dovetail.bounds`); None without time."""
    bound_by: str = ""
    """The unit that sets it, as a sentence."""
    notes: tuple[Note, ...] = ()
    """Told when it was compiled, and what the figures leave out."""
    claims: tuple[Claim, ...] = ()
    """Cycles declared and taken, by layer of the model and unit."""
    energy: Mapping[str, float] = field(default_factory=dict)
    """Energy of the first inference in uJ, by core, engine and memory; empty if the target has no figures."""

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`, keys as the fields."""
        return asdict(self) | {"notes": [note.to_json() for note in self.notes]}


def make_report(result: RunResult) -> Report:
    """The report of a run of at least one inference."""
    manifest, simulation, target = result.build.manifest, result.simulation, result.build.target
    first, layers = simulation.inferences[0], _layers(result)
    macs, cores = _macs(layers, manifest.work, target), core_uses(result, first)
    least = model_bound(manifest.operators, target) if first.total_cycles is not None else NOTHING
    each = tuple(_totals(inference, _devices(target)) for inference in simulation.inferences)
    return Report(
        schema=SCHEMA,
        dovetail=manifest.dovetail,
        model=manifest.model,
        target=manifest.target,
        policy=manifest.policy,
        simulator=result.simulator,
        inferences=len(simulation.inferences),
        instructions=first.instructions,
        cycles=each[0].cycles,
        macs=macs,
        memory=manifest.memory,
        sizes={name: size for name, size in result.sizes.items() if name in ("text", "rodata", "data", "bss")},
        stack=simulation.stack_bytes,
        layers=layers,
        each=each,
        timeline=_timeline(first, layers),
        cores=cores,
        delay=manifest.delay,
        conversions=manifest.conversions,
        estimated=manifest.estimated,
        bound=round(least.cycles, 1) or None,
        bound_by=least.by,
        notes=(
            *manifest.notes,
            *device_notes(result),
            *_beside_the_plan(result),
            *_beaten(first.total_cycles, least),
            *_hiding(result),
        ),
        claims=claims(result, _awake(layers, cores), [layer.cycles for layer in layers]),
        energy=energy(result, {**each[0].cycles, **{core.name: core.cycles for core in cores}}, macs),
    )


_LEAST_BESIDE = 1024
"""Bytes beside the plan that are worth a note."""


def _beside_the_plan(result: RunResult) -> tuple[Note, ...]:
    """A note where the firmware has more variables than the plan, and what drivers and libraries say, have bytes."""
    target, sizes = result.build.target, result.sizes
    reached = (name for name in result.build.manifest.memory if target.memory(name).is_reached_by(CORE))
    planned = sum(result.build.manifest.memory[name].peak for name in reached)
    beside = sizes.get("bss", 0) + sizes.get("data", 0) - planned
    said = sum(engine.holds for engine in target.engines)
    if beside - said < _LEAST_BESIDE:
        return ()
    what = f"variables of drivers, libraries and kernels take {beside:,} bytes beside the plan"
    return (Note(Kind.FIGURES, f"{what}, of which Engine.holds says {said:,}"),)


def _beaten(taken: int | None, least: Bound) -> tuple[Note, ...]:
    """A note where fewer cycles are taken than the bound says."""
    if taken is None or taken >= least.cycles:
        return ()
    said = "Engine.best, an engine's peak or port, or the DMA's width says less than there is"
    what = f"{taken:,} cycles are fewer than the {least.cycles:,.0f} of the bound ({least.by}): {said}"
    return (Note(Kind.FIGURES, what),)


_MANY = 0.75
"""Part of the outputs that lie at an end of their range which is worth a note."""
_FEW = 8
"""Elements of floats of which some are the least and the largest in any case."""


def _hiding(result: RunResult) -> tuple[Note, ...]:
    """A note where outputs are saturated, as a softmax of random numbers is: there a wrong layer changes nothing.

    Integers are at an end of their type's range, floats at the least or largest of their array.
    """
    ends = elements = 0
    for port in result.build.manifest.outputs:
        for array in (one[port.name] for one in result.outputs):
            elements += array.size
            if port.kind.is_integer:
                ends += int(((array == port.kind.low) | (array == port.kind.high)).sum())
            elif array.size >= _FEW:
                ends += int(((array == array.min()) | (array == array.max())).sum())
    if not elements or ends < _MANY * elements:
        return ()
    what = f"{ends:,} of {elements:,} elements of the outputs lie at an end of their range"
    return (Note(Kind.HIDING, f"{what}, where a wrong layer may not show: --check-layers compares each layer"),)


def _awake(layers: Sequence[ReportLayer], cores: Sequence[CoreUse]) -> list[int | None]:
    """By layer, the cycles of the core that works longest for it."""
    return [
        None
        if own.core_cycles is None
        else max([own.core_cycles, *(core.layers.get(own.name, 0) for core in cores[1:])])
        for own in layers
    ]


def _macs(layers: Sequence[ReportLayer], works: Sequence[LayerWork], target: Target) -> dict[str, int]:
    """Multiply-accumulates in total and by device: of a layer that engines share, those of each one's launches."""
    macs = Counter({"total": 0, "core": 0, **{engine.name: 0 for engine in target.engines}})
    for layer, work in zip(layers, works, strict=True):
        macs["total"] += layer.macs
        if "+" in layer.engine:
            macs.update(work.engines)
        elif layer.engine in macs:
            macs[layer.engine] += layer.macs
    return dict(macs)


def _devices(target: Target) -> tuple[str, ...]:
    return (*(engine.name for engine in target.engines if engine.device), *(dma.name for dma in target.dmas))


def _totals(inference: InferenceResult, devices: Sequence[str]) -> Totals:
    cycles: dict[str, int | None] = {"total": inference.total_cycles, "core": inference.core_cycles}
    jobs = inference.activities
    return Totals(inference.instructions, cycles | {n: busy(jobs[n]) if n in jobs else None for n in devices})


def _layers(result: RunResult) -> tuple[ReportLayer, ...]:
    manifest, target, first = result.build.manifest, result.build.target, result.simulation.inferences[0]
    described, works = manifest.layers, manifest.work
    peaks = {engine.name: engine.ideal_macs_per_cycle for engine in target.engines}
    cycles: list[int | None] = [None] * len(described)
    engine_cycles = waiting = cycles
    if first.total_cycles is not None:
        spent, slept = Counter[int](), Counter[int]()
        for (index, start, end), marker in zip(windows(first), first.markers, strict=True):
            spent[index] += end - start
            slept[index] += marker.idle
        cycles, waiting = [spent[number] for number in range(len(described))], [slept[n] for n in range(len(described))]
        engine_cycles = _engine_cycles(manifest, first)
    layers, times = [], first.layer_nanoseconds
    bounds = [NOTHING] * len(described)
    if first.total_cycles is not None:
        bounds = layer_bounds(described, manifest.operators, target)
    for number, (layer, work, least) in enumerate(zip(described, works, bounds, strict=True)):
        engines = layer.engine.split("+")
        ideal = sum(peaks[engine] for engine in engines) if peaks.keys() >= set(engines) else None
        layers.append(
            ReportLayer(
                name=layer.name,
                operators=layer.operators,
                engine=layer.engine,
                cycles=cycles[number],
                engine_cycles=engine_cycles[number],
                waiting=waiting[number],
                estimated=layer.estimated,
                bound=None if first.total_cycles is None else round(least.cycles, 1),
                bound_by=least.by,
                macs=layer.macs,
                ideal_macs_per_cycle=ideal,
                bytes_moved=work.bytes,
                reason_not_offloaded=layer.reason_not_offloaded,
                beside=layer.beside,
                candidates=layer.candidates,
                kernels=layer.kernels,
                nanoseconds=times[number] if times and ideal is not None else None,
            )
        )
    return tuple(layers)


def _engine_cycles(manifest: BuildManifest, first: InferenceResult) -> list[int | None]:
    """Cycles of each layer in which at least one engine works for it; None where a device does not account for it."""
    stretches, works = manifest.stretches, manifest.work
    jobs, unknown = jobs_of(stretches, first)
    own: list[list[DeviceActivity]] = [[] for _ in works]
    for stretch, some in zip(stretches, jobs, strict=True):
        own[stretch.layer] += [job for queue, job in some if queue in works[stretch.layer].engines]
    known = [unknown.keys().isdisjoint(work.engines) for work in works]
    return [busy(some) if is_known else None for some, is_known in zip(own, known, strict=True)]


def windows(inference: InferenceResult) -> list[tuple[int, int, int]]:
    """Layer, first and one past the last cycle of every window; together they are the inference."""
    if inference.total_cycles is None or not inference.markers:
        return []
    ends = [*(marker.start_cycle for marker in inference.markers[1:]), inference.total_cycles]
    starts = [0, *ends[:-1]]
    return [(m.layer, start, end) for m, start, end in zip(inference.markers, starts, ends, strict=True)]


def _timeline(inference: InferenceResult, layers: Sequence[ReportLayer]) -> dict[str, tuple[ReportActivity, ...]]:
    if inference.total_cycles is None:
        return {}
    marked = ((marker.start_cycle, marker.end_cycle, layers[marker.layer].name) for marker in inference.markers)
    bars = {"core": tuple(ReportActivity(*bar) for bar in marked)}
    for name, jobs in inference.activities.items():
        bars[name] = tuple(ReportActivity(job.start, job.end, job.label) for job in jobs)
    return bars


def print_report(report: Report, console: Console, parts: bool = False) -> None:
    """Print a table of the layers of the model, or of their `parts`, with totals at its end."""
    from rich.table import Table

    many = f", {report.inferences} inferences, the first:" if report.inferences > 1 else ""
    title = f"{report.model} on {report.target} ({report.simulator}, policy {report.policy}){many}"
    console.print(visible(title), style="bold", markup=False, highlight=False, soft_wrap=True)
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("layer", no_wrap=True)
    table.add_column("where", no_wrap=True)
    for heading in ("engine busy", "core busy", "core waits", "at least", "MACs", "MAC/cycle", "bytes moved"):
        table.add_column(heading, justify="right", no_wrap=True)
    for layer in report.layers if parts else grouped(report.layers):
        style = "" if layer.ideal_macs_per_cycle is not None else "dim"
        table.add_row(*_table_row(*_on_cores(report, layer)), style=style)
    console.print(table, highlight=False)
    for line in totals(report):
        console.print(visible(line), markup=False, highlight=False, soft_wrap=True)


def totals(report: Report) -> list[str]:
    """The lines below the table."""
    lines = []
    if report.cycles["total"] is not None:
        devices = ((name, cycles) for name, cycles in report.cycles.items() if name != "total" and cycles is not None)
        parts = ", ".join(f"{name} {_number(cycles)}" for name, cycles in devices)
        lines.append(f"cycles        {_number(report.cycles['total'])}{f' (busy: {parts})' if parts else ''}")
    if spans := [layer.nanoseconds for layer in report.layers if layer.nanoseconds is not None]:
        lines.append(f"device time   {sum(spans) / 1000:,.1f} us of kernels, by the device's own clock")
    if report.bound and report.cycles["total"]:
        times = f"taken are {report.cycles['total'] / report.bound:.2f} times that"
        lines.append(f"at least      {report.bound:,.0f} cycles on this hardware: {report.bound_by}; {times}")
    if report.instructions is not None:
        lines.append(f"instructions  {_number(report.instructions)}")
    if report.energy:
        parts = ", ".join(f"{name} {used:,.3g}" for name, used in report.energy.items())
        lines.append(f"energy        {sum(report.energy.values()):,.4g} uJ where the target says it ({parts})")
    lines.append(f"MACs          {_share(report)}")
    if report.conversions:
        lines.append(f"conversions   {_conversions_text(report)}")
    for name, use in report.memory.items():
        bound = f"lower bound {_number(use.lower_bound)}"
        lines.append(f"{name:13} {_number(use.peak)} of {_number(use.size)} bytes at the peak ({bound})")
    shown = (note for note in report.notes if note.kind in (Kind.FIGURES, Kind.HIDING) or note.kind.level == "warning")
    lines += [f"{note.kind.level:13} {note.text}" for note in shown]
    told = [(claim, "claim" if claim.is_off else "loss") for claim in report.claims if claim.is_off or claim.is_loss]
    lines += [f"{kind:13} {claim.sentence}" for claim, kind in told]
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
    ways = ", ".join(f"{one.maker} to {' and '.join(one.readers)}" for one in report.conversions)
    between = sum(one.maker in engines and not engines.isdisjoint(one.readers) for one in report.conversions)
    moved = sum(one.nbytes for one in report.conversions)
    return f"{len(report.conversions)} of layouts, {_number(moved)} bytes ({ways}); {between} between engines"


def _share(report: Report) -> str:
    total = report.macs["total"]
    engines = {name: macs for name, macs in report.macs.items() if total and name not in ("total", "core")}
    return ", ".join([_number(total), *(f"{100 * macs / total:.1f} % on {name}" for name, macs in engines.items())])


def grouped(layers: Sequence[ReportLayer]) -> tuple[ReportLayer, ...]:
    """The layers of the model, each under the name of the largest of its parts."""
    return tuple(_joined([layers[one] for one in parts]) for parts in parts_of([one.operators for one in layers]))


def parts_of(operators: Sequence[Sequence[str]]) -> list[list[int]]:
    """Numbers of the layers that are parts of one layer of the model: those that compute the same of its operators. A
    part of no operator belongs to the one before."""
    groups: dict[tuple[str, ...], list[int]] = {}
    key: tuple[str, ...] = ()
    for number, own in enumerate(operators):
        key = tuple(own) or key
        groups.setdefault(key, []).append(number)
    return list(groups.values())


def _joined(parts: Sequence[ReportLayer]) -> ReportLayer:
    """Parts of a layer as one."""
    if len(parts) == 1:
        return parts[0]
    largest = max(parts, key=lambda part: (part.macs, part.core_cycles or 0))
    known = all(part.engine_cycles is not None for part in parts)
    return replace(
        largest,
        name=f"{largest.name} ({len(parts)} parts)",
        engine_cycles=sum(part.engine_cycles or 0 for part in parts) if known else None,
        cycles=None if largest.cycles is None else sum(part.cycles or 0 for part in parts),
        waiting=None if largest.waiting is None else sum(part.waiting or 0 for part in parts),
        bound=None if largest.bound is None else round(sum(part.bound or 0 for part in parts), 1),
        macs=sum(part.macs for part in parts),
        bytes_moved=sum(part.bytes_moved for part in parts),
        nanoseconds=None if largest.nanoseconds is None else sum(part.nanoseconds or 0 for part in parts),
    )


def _on_cores(report: Report, layer: ReportLayer) -> tuple[ReportLayer, str]:
    """The layer and who does it: an engine, or the cores that have a part of it. Where core 0 has none, its cycles are
    those of the core that works longest."""
    own = {core.name: core.layers[layer.name] for core in report.cores if layer.name in core.layers}
    if layer.engine != "core" or not own:
        return layer, f"{layer.engine}, beside {', '.join(layer.beside)}" if layer.beside else layer.engine
    return layer if "core" in own else replace(layer, cycles=max(own.values()), waiting=0), " ".join(own)


def _table_row(layer: ReportLayer, where: str) -> tuple[str, ...]:
    rate = layer.macs_per_cycle
    speed = "" if rate is None else f"{rate:.2f}"
    if rate is not None and layer.ideal_macs_per_cycle:
        speed = f"{rate:.1f} of {layer.ideal_macs_per_cycle:g}"
    engine = _number(layer.engine_cycles) if layer.ideal_macs_per_cycle is not None else ""
    engine = engine if layer.nanoseconds is None else f"{layer.nanoseconds / 1000:,.1f} us"
    least = None if layer.bound is None else round(layer.bound)
    counts = (layer.core_cycles, layer.waiting, least, layer.macs, layer.bytes_moved)
    *cycles, macs, moved = (_number(count or None) for count in counts)
    return layer.name, where, engine, *cycles, macs, speed, moved


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


if not TYPE_CHECKING:
    __getattr__ = names(__name__, Activity="ReportActivity")

document(__name__)
