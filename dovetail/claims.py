"""Claims: the cycles a target declares of a layer's work, beside those the simulated chip took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dovetail.codegen.plan_file import PLAN, PlanFile, read_plan
from dovetail.documented import document
from dovetail.kernels import Optimize
from dovetail.notes import Kind, Note
from dovetail.program.ir import CORE
from dovetail.records import Record
from dovetail.sim.stretches import busy, jobs_of

if TYPE_CHECKING:
    from dovetail.run import RunResult
    from dovetail.sim.device import Activity
    from dovetail.sim.protocol import InferenceResult
    from dovetail.target.description import Target

OF_LAYER, OF_NETWORK = 0.1, 0.01
"""A claim is off that differs by more than these shares of what the layer's work took and of the whole network."""


class Claim(Record):
    """Cycles of a unit for a layer of the model."""

    layer: str
    """Name of the layer."""
    unit: str
    """An engine, a DMA, or "core"."""
    declared: int
    """Cycles that the target file declares."""
    taken: int
    """Cycles that the simulation took."""
    instead: int
    """Cycles the core would take for a layer on an engine, by estimate; 0 for other layers."""
    is_off: bool
    """Whether the two differ by more than is allowed."""
    is_loss: bool
    """Whether the unit took longer than the core would have taken for the layer, by more than a claim may be off."""

    @property
    def sentence(self) -> str:
        """A sentence with both figures, and with the core's if they are lower than those taken."""
        text = f"{self.unit} {self.layer}: declared {_short(self.declared)}, took {_short(self.taken)}"
        return f"{text}; the core takes {_short(self.instead)}" if 0 < self.instead < self.taken else text


def is_off(declared: int, taken: int, network: int) -> bool:
    """Whether a claim is off, in a network of so many cycles."""
    off = abs(declared - taken)
    return off > OF_LAYER * taken and off > OF_NETWORK * network


def _short(cycles: int) -> str:
    """A number with two significant digits at least, such as 27.9 M."""
    if cycles >= 1_000_000:
        return f"{cycles / 1e6:,.1f} M"
    return f"{cycles / 1000:,.1f} k" if cycles >= 10_000 else f"{cycles:,}"


def claims(result: RunResult, awake: Sequence[int | None], lasted: Sequence[int | None]) -> tuple[Claim, ...]:
    """Cycles declared and taken, by layer of the model and unit; nothing of devices that do not account for their
    work, and nothing without time or where another core runs than the target's.

    Args:
        result: a run of at least one inference.
        awake: by layer of the build, the cycles of the core that works longest for it.
        lasted: by layer, the cycles from its beginning on the core to the next layer's.
    """
    manifest, first = result.build.manifest, result.simulation.inferences[0]
    if first.total_cycles is None or not any(work.declared for work in manifest.work):
        return ()
    taken = _taken(result, awake, lasted)
    groups: dict[tuple[tuple[str, ...], str], list[int]] = {}
    last: tuple[str, ...] = ()
    for number, (layer, work) in enumerate(zip(manifest.layers, manifest.work, strict=True)):
        last = layer.operators or last or (layer.name,)
        key = tuple(sorted({layer.name, *layer.beside})) if layer.beside else last
        for unit in work.declared:
            if unit in taken[number]:
                groups.setdefault((key, unit), []).append(number)
    found = []
    for (_, unit), numbers in groups.items():
        declared = sum(manifest.work[number].declared[unit] for number in numbers)
        took = sum(taken[number][unit] for number in numbers)
        largest = max(numbers, key=lambda number: manifest.work[number].declared[unit])
        instead = sum(manifest.work[number].instead for number in numbers)
        wrong = is_off(declared, took, first.total_cycles)
        loses = 0 < instead < took and is_off(instead, took, first.total_cycles)
        found.append(Claim(manifest.layers[largest].name, unit, declared, took, instead, wrong, loses))
    return tuple(found)


def _taken(result: RunResult, awake: Sequence[int | None], lasted: Sequence[int | None]) -> list[dict[str, int]]:
    """By layer, the cycles of each unit that are known."""
    build, first = result.build, result.simulation.inferences[0]
    manifest, target = build.manifest, build.target
    jobs, _ = jobs_of(manifest.stretches, first)
    own: list[dict[str, list[Activity]]] = [{} for _ in manifest.layers]
    for stretch, some in zip(manifest.stretches, jobs, strict=True):
        for queue, job in some:
            own[stretch.layer].setdefault(queue, []).append(job)
    owners = _owners(result)
    if target.dma is not None:
        for job, owner in zip(first.activities.get(target.dma.name, ()), owners or (), strict=False):
            own[owner].setdefault(target.dma.name, []).append(job)
    found = [{unit: busy(some) for unit, some in units.items()} for units in own]
    for number, work in enumerate(manifest.work if not _other_core(result) else ()):
        calls = dict.fromkeys(_waited_for(target), lasted[number]) | {CORE: awake[number]}
        found[number] |= {
            unit: cycles for unit, cycles in calls.items() if unit in work.declared and cycles is not None
        }
    return found


def _other_core(result: RunResult) -> bool:
    """Whether another core runs than the target's (`run --core`)."""
    return ", core" in result.simulator


def _waited_for(target: Target) -> list[str]:
    """Engines whose calls take the core's time: software, and those that have finished when the call returns."""
    return [engine.name for engine in target.engines if engine.device is None or not engine.wait]


def _owners(result: RunResult) -> list[int] | None:
    """As `transfer_owners`, None too where the build's plan is gone; nothing where the target's DMA moves nothing."""
    build, first = result.build, result.simulation.inferences[0]
    dma = build.target.dma
    if dma is None or not any(dma.name in work.declared for work in build.manifest.work):
        return []
    if not (build.folder / PLAN).is_file():
        return None
    return transfer_owners(read_plan(build.folder, len(build.manifest.layers)), first, build.target)


def transfers_of(inference: InferenceResult, target: Target) -> list[Activity]:
    """The transfers of all DMAs, one DMA after the other."""
    return [job for dma in target.dmas for job in inference.activities.get(dma.name, ())]


def transfer_owners(plan: PlanFile, first: InferenceResult, target: Target) -> list[int] | None:
    """The layer of each of `transfers_of`; None without time, or where these and the program's copies do not match."""
    if not target.dmas or first.total_cycles is None:
        return None
    default = target.dma.name if target.dma else ""
    copies = [(copy.queue or default, [copy.layer] * copy.count) for copy in plan["transfers"]]
    owners = [layer for dma in target.dmas for name, layers in copies if name == dma.name for layer in layers]
    return owners if len(owners) == len(transfers_of(first, target)) else None


def notes(result: RunResult) -> tuple[Note, ...]:
    """A note for each device that does not account for its work, and for each kind of work that is not compared."""
    first, manifest = result.simulation.inferences[0], result.build.manifest
    if first.total_cycles is None:
        return ()
    waited = _waited_for(result.build.target)
    found = [
        f"{name} shows {len(first.activities.get(name, ()))} jobs and was given {count}: its busy cycles are not known "
        f"by layer{'' if name in waited else ', nor compared with those declared'} (let its device give one Activity "
        "for each command, or say Command.jobs)"
        for name, count in jobs_of(manifest.stretches, first)[1].items()
    ]
    if manifest.optimize is not Optimize.SPEED or _other_core(result):
        found.append("kernels are not compared with the cycles declared: these are of fast ones on the target's core")
    target = result.build.target
    if target.memory(target.code).waits:
        found.append(
            f"estimates count the waits for constants in {target.code}, those for instructions and values there not: "
            "what a cache keeps of these is known to the simulator alone"
        )
    if _owners(result) is None:
        found.append(
            "DMAs show other transfers than the build's plan has: their cycles are not compared with those declared"
        )
    return tuple(Note(Kind.FIGURES, sentence) for sentence in found)


document(__name__)
