"""Exact execution: every element's real firmware in its own emulated core, messages passed between them.

A resident network runs as on a rack, wave after wave of elements. Of a network in sections, all elements stand at the
barrier of a section; each is then run to the next, those first whose messages others read. What they store is put
together and is what later sections fetch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dovetail.errors import MissingExtraError, SimulationError
from dovetail.farm import LostResult, farm
from dovetail.guests.mesh.building import build_programs, used_bytes
from dovetail.guests.mesh.element import ElementDevice
from dovetail.guests.mesh.emit import SECTIONS, MeshProject
from dovetail.guests.mesh.layers import Ints
from dovetail.guests.mesh.manifest import mesh_build, outputs_of, rack_images, read_images, word_of
from dovetail.guests.mesh.mapping import MeshMapping
from dovetail.guests.mesh.placement import SectionPlacement
from dovetail.guests.mesh.rack import LoadedElements
from dovetail.guests.mesh.sections import SectionTimes
from dovetail.guests.mesh.simulate import simulate
from dovetail.guests.mesh.transfers import senders_of
from dovetail.guests.mesh.workers import LOST_HINT, ElementRun, element_setup
from dovetail.ir.types import Array
from dovetail.sim.protocol import RunRequest, SimulationSetup
from dovetail.sim.rack import RackContents, RefusedError
from dovetail.target.description import Target

if TYPE_CHECKING:
    from dovetail.sim.machine import Machine

_LIMIT = 200_000_000
"""Instructions of an element in a section."""


@dataclass(frozen=True)
class ExactRun:
    """Outputs of the elements of a resident network, and what they used."""

    outputs: tuple[Mapping[str, Array], ...]
    """Per input, by the network's output names."""
    instructions: int
    """Sum over all elements and inputs."""
    cycles: tuple[int, ...]
    """Per element, as in `MeshProject.elements`: executing and waiting for the MAC array, all inputs."""
    turns: Ints
    """[inputs, pieces, 3] cycles from when a piece began an input to when it had given its slots back, had sent its
    message, and its element was free."""
    paces: tuple[int, ...]
    """Per element: the cycles of an input, all its pieces, the longest of the inputs."""
    memory: tuple[int, ...]
    """Per element: bytes of its memory that its program, stack, data and buffers take."""
    stack: int
    """Most bytes of stack any of them used."""


@contextmanager
def _firmware(
    mapped: MeshMapping, project: MeshProject, target: Target, hint: str, jobs: int = 1
) -> Iterator[tuple[dict[str, Path], dict[str, int]]]:
    """The firmware of each program, and bytes of an element it takes; raises as `run_exact`."""
    if find_spec("unicorn") is None:
        raise MissingExtraError("unicorn", "iss", "simulating firmware")
    with tempfile.TemporaryDirectory() as folder:
        firmware = build_programs(project.files, target, Path(folder), jobs)
        yield firmware, used_bytes(firmware, target, mapped.parts.mesh.usable, hint)


def run_exact(
    mapped: MeshMapping,
    project: MeshProject,
    target: Target,
    inputs: Sequence[Mapping[str, Array]],
    jobs: int = 2,
    scheduler: str | None = None,
    ended: Callable[[int, int], None] = lambda done, count: None,
) -> ExactRun:
    """Run every element of a resident network over some inputs.

    Args:
        mapped: the network.
        project: programs and data.
        target: the element.
        inputs: arrays by input name, for each inference.
        jobs: processes.
        scheduler: address of a Dask scheduler whose workers are used instead; the results are the same.
        ended: called with how many runs of elements have ended, and how many there are.

    Raises:
        SimulationError: an element does something it must not, or ends the process it runs in.
        PlanError: a program does not fit its element.
        DovetailError: `jobs` is below 1, or the scheduler does not answer.
        MissingExtraError: Unicorn or Dask is not installed.
    """
    build = mesh_build(mapped, project, target)
    words = [word_of(mapped.topology.position(one.element)) for one in project.elements]
    fetches = mapped.whole[0].traffic.fetches
    tensors = [{n: _bytes(arrays[fetch.value]) for n, fetch in enumerate(fetches)} for arrays in inputs]
    hint = "cut the layer into more pieces in the mapping file, or give fewer slots"
    with farm(jobs, scheduler) as spread, _firmware(mapped, project, target, hint, jobs) as (firmware, used):
        data = {word: one.data for word, one in zip(words, project.elements, strict=True)}
        loaded = RackContents()
        for kind, number, content in rack_images(build, firmware, data, read_images(build, project.files)[1]):
            loaded.parts[kind][number] = bytearray(content)
        try:
            elements = LoadedElements(loaded, mapped.topology)
            runs = elements.run(spread, element_setup(target), tensors, ended)
        except RefusedError as error:
            hint = "report this: the tables of sender and receiver disagree"
            raise SimulationError(str(error), where="mesh", hint=hint) from None
    results = elements.rack_run(runs, len(inputs)).results
    outputs = outputs_of(build, dict(enumerate(results)), len(inputs))
    return _exact_run(project, [runs[word] for word in words], outputs, used)


def _bytes(array: Array) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def _exact_run(
    project: MeshProject, runs: Sequence[ElementRun], outputs: list[dict[str, Array]], used: Mapping[str, int]
) -> ExactRun:
    pieces = sum(len(element.pieces) for element in project.elements)
    turns = np.zeros((len(outputs), pieces, 3), np.int64)
    for element, run in zip(project.elements, runs, strict=True):
        turns[:, element.pieces] = run.clocks[:, :, 1:] - run.clocks[:, :, :1]
    return ExactRun(
        tuple(outputs),
        sum(run.instructions for run in runs),
        tuple(run.cycles for run in runs),
        turns,
        tuple(int(turns[:, element.pieces, 2].sum(axis=1).max()) for element in project.elements),
        tuple(used[element.program] for element in project.elements),
        max(run.stack for run in runs),
    )


@dataclass(frozen=True)
class SectionsRun:
    """Outputs of the elements of a network in sections, and what they used."""

    outputs: tuple[Mapping[str, Array], ...]
    """Per input, by the network's output names."""
    clocks: tuple[Ints, ...]
    """Per section [inputs, pieces, 3]: cycles of each piece until it begins, waiting for what is loaded left out; from
    there until its result can go; and until it waits for the others."""
    latency: float
    """Clocks of an input by the model of time, with these cycles; the longest of the inputs."""
    memory: int
    """Bytes of an element that program, stack, tables and the memory for sections take."""


def run_sections(
    mapped: MeshMapping, project: MeshProject, target: Target, inputs: Sequence[Mapping[str, Array]]
) -> SectionsRun:
    """Run every element of a network in sections over some inputs; arguments and errors as of `run_exact`."""
    with _firmware(mapped, project, target, "use more chips, or --whole") as (firmware, used):
        content = firmware[SECTIONS].read_bytes()
    job = _EmulationJob(mapped, project, element_setup(target), content, tuple(inputs))
    with farm(1) as spread:  # elements meet at barriers: all in one process, but not in this one
        ((_, run),) = spread(_run, [job])
    if isinstance(run, LostResult):
        raise SimulationError(run.value, where=mapped.parts.graph.name, hint=LOST_HINT)
    outputs, cycles = run
    clocks = tuple(np.array([one[section] for one in cycles]) for section in range(len(mapped.placed)))
    latency = max(_latency(mapped, [one[number] for one in clocks]) for number in range(len(inputs)))
    return SectionsRun(outputs, clocks, latency, used[SECTIONS])


@dataclass(frozen=True)
class _EmulationJob:
    """Everything a process needs to emulate all elements over some inputs."""

    mapped: MeshMapping
    project: MeshProject
    setup: SimulationSetup
    firmware: bytes
    """An ELF file."""
    inputs: tuple[Mapping[str, Array], ...]


_Cycles = list[list[list[list[int]]]]
"""By input, section and piece: see `SectionsRun.clocks`."""


def _run(job: _EmulationJob) -> tuple[tuple[dict[str, Array], ...], _Cycles]:
    """The outputs of each input, and what pieces took; in this process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sections.elf"
        path.write_bytes(job.firmware)
        elements = _Elements(job.mapped, job.project, replace(job.setup, elf=path))
        outputs = tuple(elements.inference(number, arrays) for number, arrays in enumerate(job.inputs))
    return outputs, elements.cycles


class _Elements:
    """The elements, all at the barrier of the same section."""

    def __init__(self, mapped: MeshMapping, project: MeshProject, setup: SimulationSetup) -> None:
        from dovetail.sim.machine import Machine

        self._placed = mapped.placed
        self._parts, self._keys = mapped.parts, project.keys
        self._machines: dict[int, Machine] = {}
        self.cycles: _Cycles = []
        for element in project.elements:
            machine = Machine(setup)
            machine.firmware.write("element_data", element.data)
            device = _device(machine)
            device.inputs = [1 << 20] * len(self._placed)
            device.dram, device.rate = project.dram, mapped.parts.mesh.rates.dram / len(project.elements)
            machine.run(RunRequest((), {}, _LIMIT))
            self._machines[element.element] = machine

    def inference(self, number: int, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs for an input; cycles are noted down."""
        values = dict(arrays)
        self.cycles.append([])
        for section, placed in enumerate(self._placed):
            stored = self._section(section, number, placed, values)
            for piece in np.nonzero(placed.traffic.stores)[0].tolist():
                stage, place = placed.section.owners[piece]
                if piece not in stored:
                    hint = "look at the element's driver: every piece must store its result"
                    raise SimulationError(f"piece {place} stored nothing", where=stage.layer.name, hint=hint)
                stage.put(values, place, np.frombuffer(stored[piece], stage.result.dtype.numpy))
        return self._parts.outputs_in(values)

    def _section(
        self, section: int, number: int, placed: SectionPlacement, values: Mapping[str, Array]
    ) -> dict[int, bytes]:
        """Run all elements to the next barrier; returns what each piece stored."""
        keys, senders = self._keys[section].key, senders_of(placed)
        fetches = {n: _bytes(values[fetch.value]) for n, fetch in enumerate(placed.traffic.fetches)}
        sent: dict[int, bytes] = {}
        stored: dict[int, bytes] = {}
        cycles = [[0, 0, 0]] * placed.section.pieces
        home = {int(element): piece for piece, element in enumerate(placed.element)}
        idle = [element for element in self._machines if element not in home]
        for element in [*home, *idle]:  # a piece's senders have lower numbers
            machine, piece = self._machines[element], home.get(element)
            reads = [int(keys[sender]) for sender in senders[piece]] if piece is not None else []
            device, before = _device(machine), machine.cycles
            device.enter(section, number, {key: sent[key] for key in reads}, fetches)
            machine.run(RunRequest(({},), {}, _LIMIT))
            if piece is not None:
                turn = device.turns[-1]
                cycles[piece] = [
                    turn.begun - before - device.waited,
                    turn.done - turn.begun,
                    machine.cycles - turn.begun,
                ]
                sent |= device.sent[number]
                if section in device.stored[number]:
                    stored[piece] = device.stored[number][section]
        self.cycles[-1].append(cycles)
        return stored


def _device(machine: Machine) -> ElementDevice:
    device = machine.devices[0]
    assert isinstance(device, ElementDevice)
    return device


def _latency(mapped: MeshMapping, clocks: Sequence[Ints]) -> float:
    """The latency of an input whose pieces take so many clocks."""
    total, before = 0.0, None
    for placed, own in zip(mapped.placed, clocks, strict=True):
        one = SectionTimes(placed)
        turns = own[None][:, :, [1, 1, 2]]
        executed = float(own[:, 0].max()) + simulate(placed, 1, turns=turns).latency
        total += one.after(before) - one.prepared - one.timing.latency + executed
        before = one
    return total
