"""Exact execution in sections: every element's firmware, which computes its piece of one section after the other.

All elements stand at the barrier of a section; each is then run to the next, those whose messages others read first.
What they store is put together and is what later sections fetch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.codegen.build.elf import symbols
from dovetail.codegen.build.instruction_sets import EMITTED_C, instruction_set
from dovetail.codegen.build.toolchain import compile_firmware
from dovetail.errors import MissingExtraError, PlanError, SimulationError
from dovetail.farm import LostResult, farm
from dovetail.guests.mesh.element import ElementDevice
from dovetail.guests.mesh.emit import senders_of
from dovetail.guests.mesh.layers import Ints
from dovetail.guests.mesh.mapping import MeshMapping, result_box
from dovetail.guests.mesh.placement import SectionPlacement
from dovetail.guests.mesh.sections import SectionTimes
from dovetail.guests.mesh.sections_emit import PROGRAM, SectionsProject
from dovetail.guests.mesh.simulate import simulate
from dovetail.guests.mesh.workers import element_setup
from dovetail.ir.types import Array, box_slices
from dovetail.sim.protocol import RunRequest, SimulationSetup
from dovetail.target.description import Target

if TYPE_CHECKING:
    from dovetail.sim.machine import Machine

_LIMIT = 200_000_000
"""Instructions of an element in a section."""


@dataclass(frozen=True)
class SectionsRun:
    """Outputs of the elements, and what they used."""

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
    mapped: MeshMapping, project: SectionsProject, target: Target, inputs: Sequence[Mapping[str, Array]]
) -> SectionsRun:
    """Run every element over some inputs.

    Args:
        mapped: the network in sections.
        project: its program and data.
        target: the element.
        inputs: arrays by input name, for each inference.

    Raises:
        SimulationError: an element does something it must not, or ends the process that emulates them all.
        PlanError: the program does not fit its element.
        MissingExtraError: Unicorn is not installed.
    """
    if find_spec("unicorn") is None:
        raise MissingExtraError("unicorn", "iss", "simulating firmware")
    with tempfile.TemporaryDirectory() as folder:
        firmware = _built(project, target, Path(folder))
        memory = symbols(firmware)["__bss_end"].address - target.memory(target.values).base
        if memory > mapped.parts.mesh.usable:
            what = f"the program of all sections takes {memory} bytes, an element has {mapped.parts.mesh.usable}"
            raise PlanError(what, where=mapped.parts.graph.name, hint="use more chips, or --whole")
        job = _EmulationJob(mapped, project, element_setup(target), firmware.read_bytes(), tuple(inputs))
    with farm(1) as spread:  # elements meet at barriers: all in one process, but not in this one
        ((_, found),) = spread(_run, [job])
    if isinstance(found, LostResult):
        hint = "look for a bad pointer in the element's driver or device model, or give the process more memory"
        raise SimulationError(found.value, where=mapped.parts.graph.name, hint=hint)
    outputs, cycles = found
    clocks = tuple(np.array([one[section] for one in cycles]) for section in range(len(mapped.placed)))
    latency = max(_latency(mapped, [one[number] for one in clocks]) for number in range(len(inputs)))
    return SectionsRun(outputs, clocks, latency, memory)


def _built(project: SectionsProject, target: Target, folder: Path) -> Path:
    """The program compiled."""
    for name, content in project.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    names = (instruction_set(target.core.isa).start, "dovetail_rt.c", "mesh_sim.c", "mesh_sections_sim.c")
    own = sorted((folder / "programs" / PROGRAM).glob("*.c"))
    return compile_firmware(
        folder / "programs" / PROGRAM,
        [*own, *(folder / "runtime" / name for name in names)],
        linker_script=folder / "link.ld",
        isa=target.core.isa,
        include=(folder / "runtime",),
        flags=EMITTED_C,
        compiler_runtime=any(b"float" in path.read_bytes() for path in own),
    )


@dataclass(frozen=True)
class _EmulationJob:
    """What a process needs to emulate all elements over some inputs."""

    mapped: MeshMapping
    project: SectionsProject
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
        outputs = tuple(elements.inference(number, given) for number, given in enumerate(job.inputs))
    return outputs, elements.cycles


class _Elements:
    """The elements, all at the barrier of the same section."""

    def __init__(self, mapped: MeshMapping, project: SectionsProject, setup: SimulationSetup) -> None:
        from dovetail.sim.machine import Machine

        self.mapped, self.project = mapped, project
        self.machines: dict[int, Machine] = {}
        self.cycles: _Cycles = []
        for element, data in project.elements.items():
            machine = Machine(setup)
            machine.firmware.write("element_data", data)
            device = self.device(machine)
            device.inputs = [1 << 20] * len(mapped.placed)
            device.dram, device.rate = project.dram, mapped.parts.mesh.rates.dram / len(project.elements)
            machine.run(RunRequest((), {}, _LIMIT))
            self.machines[element] = machine

    @staticmethod
    def device(machine: Machine) -> ElementDevice:
        """The device of an element."""
        device = machine.devices[0]
        assert isinstance(device, ElementDevice)
        return device

    def inference(self, number: int, given: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs for an input; cycles are noted down."""
        parts, values = self.mapped.parts, dict(given)
        self.cycles.append([])
        for section, placed in enumerate(self.mapped.placed):
            assert placed is not None
            stored = self._section(section, number, placed, values)
            _gather(placed, stored, values)
        return {
            name: values[parts.layers[index].graph.outputs[0]].reshape(parts.graph.types[name].shape)
            for name, index in parts.outputs.items()
        }

    def _section(
        self, section: int, number: int, placed: SectionPlacement, values: Mapping[str, Array]
    ) -> dict[int, bytes]:
        """Run all elements to the next barrier; returns what each piece stored."""
        keys, senders = self.project.keys[section].key, senders_of(placed)
        fetches = {n: np.ascontiguousarray(values[f.value]).tobytes() for n, f in enumerate(placed.traffic.fetches)}
        sent: dict[int, bytes] = {}
        stored: dict[int, bytes] = {}
        cycles = [[0, 0, 0]] * placed.section.pieces
        home = {int(element): piece for piece, element in enumerate(placed.element)}
        idle = [element for element in self.machines if element not in home]
        for element in [*map(int, placed.element), *idle]:  # a piece's senders have lower numbers
            machine, piece = self.machines[element], home.get(element)
            reads = [int(keys[sender]) for sender in senders[piece]] if piece is not None else []
            device, before = self.device(machine), machine.cycles
            device.enter(section, number, {key: sent[key] for key in reads}, fetches)
            machine.run(RunRequest(({},), {}, _LIMIT))
            if piece is not None:
                turn = device.turns[-1]
                made = (turn.sent or turn.back) - turn.begun
                cycles[piece] = [turn.begun - before - device.waited, made, machine.cycles - turn.begun]
                sent |= device.sent[number] if device.sent else {}
                stored |= {piece: device.stored[number][section]} if device.stored else {}
        self.cycles[-1].append(cycles)
        return stored


def _gather(placed: SectionPlacement, stored: Mapping[int, bytes], values: dict[str, Any]) -> None:
    """Put what was stored where it belongs."""
    for stage in placed.section.stages:
        name = stage.layer.graph.outputs[0]
        kind = stage.layer.graph.types[name]
        for piece in np.nonzero(stage.last & placed.traffic.stores[stage.first : stage.first + stage.pieces])[
            0
        ].tolist():
            if stage.first + piece not in stored:
                hint = "look at the element's driver: every piece must store its result"
                raise SimulationError(f"piece {piece} stored nothing", where=stage.layer.name, hint=hint)
            box = result_box(stage, piece)
            result = values.setdefault(name, np.zeros(kind.shape, kind.dtype.numpy))
            part = np.frombuffer(stored[stage.first + piece], kind.dtype.numpy)
            result[box_slices(box)] = part.reshape([stop - start for start, stop in box])


def _latency(mapped: MeshMapping, clocks: Sequence[Ints]) -> float:
    """The latency of an input whose pieces take so many clocks."""
    total, before = 0.0, None
    for placed, own in zip(mapped.placed, clocks, strict=True):
        assert placed is not None
        one = SectionTimes(placed)
        turns = own[None][:, :, [1, 1, 2]]
        executed = float(own[:, 0].max()) + simulate(placed, 1, turns=turns).latency
        total += one.after(before) - one.prepared - one.timing.latency + executed
        before = one
    return total
