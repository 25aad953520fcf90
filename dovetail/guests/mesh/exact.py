"""Exact execution: every element's real firmware in its own emulated core, messages passed between them.

Messages only go from lower stages to higher ones, so a stage's elements run side by side, over all inputs, once those
before have run; the message unit of each keeps to its slots. An element with several pieces runs once for each of them,
those of later stages idle, the last time with all; every time it must send the same. The elements of a stage are
spread over a farm.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.codegen.build.elf import symbols
from dovetail.codegen.build.instruction_sets import EMITTED_C, instruction_set
from dovetail.codegen.build.toolchain import compile_firmware
from dovetail.errors import MissingExtraError, PlanError, SimulationError
from dovetail.farm import farm
from dovetail.guests.mesh.compiled import macros, shared_files
from dovetail.guests.mesh.emit import Element, MeshProject, senders_of
from dovetail.guests.mesh.layers import Ints
from dovetail.guests.mesh.mapping import result_box
from dovetail.guests.mesh.partition import MeshPartition, MeshStage
from dovetail.guests.mesh.placement import SectionPlacement, Tables
from dovetail.guests.mesh.workers import ElementJob, element_setup, run_wave
from dovetail.ir.types import Array, box_slices
from dovetail.sim.protocol import SimulationResult
from dovetail.target.description import Target


@dataclass(frozen=True)
class ExactRun:
    """Outputs of the elements, and what they used."""

    outputs: tuple[Mapping[str, Array], ...]
    """Per input, by the network's output names."""
    instructions: int
    """Of all elements and inputs."""
    cycles: tuple[int, ...]
    """Per element, as in `MeshProject.elements`: executing and waiting for the MAC array, all inputs."""
    turns: Ints
    """[inputs, pieces, 3] cycles from when a piece began an input to when it had given its slots back, had sent its
    message, and its element was free."""
    paces: tuple[int, ...]
    """Per element: the cycles of an input, all its pieces, the longest of the inputs."""
    memory: tuple[int, ...]
    """Per element: bytes of its element's memory that its program, stack, data and buffers take."""
    stack: int
    """Most bytes of stack any of them used."""
    programs: int


def build_programs(project: MeshProject, target: Target, folder: Path, jobs: int = 2) -> dict[str, Path]:
    """Compile every program.

    Args:
        project: what was emitted.
        target: the element.
        folder: where its files are written.
        jobs: compilers that run side by side.

    Raises:
        PlanError: a program does not fit its element.
        BuildError: the compiler refused one.
    """
    for name, content in project.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    start = instruction_set(target.core.isa).start

    def build(name: str) -> tuple[str, Path]:
        shared = [folder / "runtime" / source for source in (start, "dovetail_rt.c", "mesh_sim.c")]
        shared += [folder / source for source in shared_files(target) if source.endswith(".c")]
        return name, compile_firmware(
            folder / "programs" / name,
            [*sorted((folder / "programs" / name).glob("*.c"), reverse=True), *shared],
            linker_script=folder / "link.ld",
            isa=target.core.isa,
            defines=macros(target),
            include=(folder / "runtime", *([folder / "driver"] if (folder / "driver").is_dir() else [])),
            flags=EMITTED_C,
            compiler_runtime="float" in project.programs[name],
        )

    with ThreadPoolExecutor(jobs) as pool:
        return dict(pool.map(build, sorted(project.programs)))


def run_exact(
    parts: MeshPartition,
    placed: SectionPlacement,
    tables: Tables,
    project: MeshProject,
    target: Target,
    inputs: Sequence[Mapping[str, Array]],
    jobs: int = 2,
    scheduler: str | None = None,
    told: Callable[[int, int], None] = lambda done, count: None,
) -> ExactRun:
    """Run every element over some inputs.

    Args:
        parts: the network in pieces.
        placed: where they are.
        tables: the keys of messages.
        project: programs and data.
        target: the element.
        inputs: arrays by input name, for each inference.
        jobs: processes.
        scheduler: address of a Dask scheduler whose workers are used instead; the results are the same.
        told: how many elements have run, and of how many; one with pieces in several stages counts for each.

    Raises:
        SimulationError: an element does something it must not, or ends the process it runs in.
        PlanError: a program does not fit its element.
        DovetailError: `jobs` is below 1, or the scheduler does not answer.
        MissingExtraError: Unicorn or Dask is not installed.
    """
    if find_spec("unicorn") is None:
        raise MissingExtraError("unicorn", "iss", "simulating firmware")
    with farm(jobs, scheduler) as spread, tempfile.TemporaryDirectory() as folder:
        firmware = build_programs(project, target, Path(folder), jobs)
        base = target.memory(target.values).base
        used = {name: symbols(path)["__bss_end"].address - base for name, path in firmware.items()}
        over = [name for name in sorted(used) if used[name] > parts.mesh.usable]
        if over:
            what = f"a program takes {used[over[0]]} bytes, an element has {parts.mesh.usable}"
            hint = "cut the layer into more pieces in the mapping file, or give fewer slots"
            raise PlanError(what, where=over[0], hint=hint)
        run = partial(run_wave, spread, element_setup(target))
        images = {name: path.read_bytes() for name, path in firmware.items()}
        return _waves(parts, placed, project, images, used, inputs, tables, run, told)


def _waves(
    parts: MeshPartition,
    placed: SectionPlacement,
    project: MeshProject,
    images: Mapping[str, bytes],
    used: Mapping[str, int],
    inputs: Sequence[Mapping[str, Array]],
    tables: Tables,
    run: Callable[[Mapping[int, ElementJob], Callable[[], None]], Mapping[int, SimulationResult]],
    told: Callable[[int, int], None],
) -> ExactRun:
    """Stage after stage; of pieces that sum for each other, one after the other. Arguments as of `run_exact`."""
    senders, fetches = senders_of(placed), placed.traffic.fetches
    home = {piece: element for element in project.elements for piece in element.pieces}
    tensors = [
        {f"dram {n}": np.ascontiguousarray(given[fetch.value]).tobytes() for n, fetch in enumerate(fetches)}
        for given in inputs
    ]
    sent: list[dict[str, bytes]] = [{} for _ in inputs]
    stored: list[dict[int, bytes]] = [{} for _ in inputs]
    results: dict[int, SimulationResult] = {}
    done: set[int] = set()
    fetching = {int(piece) for fetch in fetches for piece in fetch.pieces}

    def job(element: Element) -> ElementJob:
        """An element with those of its pieces that all they read has been sent for."""
        pieces = [piece for piece in element.pieces if piece in done]
        reads = [sender for piece in pieces for sender in senders[piece]]
        keys = {str(int(tables.key[sender])) for sender in reads if sender not in element.pieces}
        fetched = tensors if fetching.intersection(pieces) else [{} for _ in inputs]
        brought = tuple({**{k: given[k] for k in keys}, **more} for given, more in zip(sent, fetched, strict=True))
        limits = np.array([len(inputs) * (piece in done) for piece in element.pieces], "<u4")
        own = np.array(sorted({int(tables.key[s]) for s in reads if s in element.pieces}), "<u4")
        first = {"element_data": element.data, "inputs": limits.tobytes(), "own": own.tobytes()}
        return ElementJob(images[element.program], first, brought)

    waves = [
        range(stage.first + turn, stage.first + stage.pieces, stage.cut.sums)
        for stage in placed.section.stages
        for turn in range(stage.cut.sums)
    ]
    ended = iter(range(1, 1 + (count := sum(len({home[piece].element for piece in pieces}) for pieces in waves))))
    for pieces in waves:
        done.update(pieces)
        wave = {home[piece].element: home[piece] for piece in pieces}
        made = run({number: job(element) for number, element in wave.items()}, lambda: told(next(ended), count))
        for number, element in wave.items():
            results[number] = made[number]
            for place, inference in enumerate(made[number].inferences):
                for name, content in inference.outputs.items():
                    if name.startswith("stored "):
                        _keep(stored[place], element.pieces[int(name[7:])], content)
                    elif not name.startswith("turn "):
                        _keep(sent[place], name, content)
    found = [results[element.element] for element in project.elements]
    turns = _turns(project, found, len(inputs))
    return ExactRun(
        tuple(_gathered(parts, placed, one) for one in stored),
        sum(one.executed_instructions or 0 for one in found),
        tuple(one.inferences[0].total_cycles or 0 for one in found),
        turns,
        tuple(int(turns[:, element.pieces, 2].sum(axis=1).max()) for element in project.elements),
        tuple(used[element.program] for element in project.elements),
        max(one.stack_bytes or 0 for one in found),
        len(project.programs),
    )


def _turns(project: MeshProject, results: Sequence[SimulationResult], inputs: int) -> Ints:
    """As `ExactRun.turns`."""
    found = np.zeros((inputs, sum(len(element.pieces) for element in project.elements), 3), np.int64)
    for element, result in zip(project.elements, results, strict=True):
        for number, inference in enumerate(result.inferences):
            for place, piece in enumerate(element.pieces):
                clocks = np.frombuffer(inference.outputs[f"turn {place}"], "<i8")
                found[number, piece] = clocks[1:] - clocks[0]
    return found


def _keep(known: dict[Any, bytes], name: Any, content: bytes) -> None:
    """Note down what an element gave; raises SimulationError where it gave something else before."""
    if known.setdefault(name, content) != content:
        hint = "look at the element's driver: a piece must not change what another reads"
        raise SimulationError(f"with more pieces on its element, '{name}' is another", where="mesh", hint=hint)


def _gathered(parts: MeshPartition, placed: SectionPlacement, stored: Mapping[int, bytes]) -> dict[str, Array]:
    """The network's outputs, put together from what elements stored."""
    stages: dict[int, MeshStage] = {stage.layer.index: stage for stage in placed.section.stages}
    found = {}
    for name, index in parts.outputs.items():
        stage = stages[index]
        kind = stage.layer.graph.types[stage.layer.graph.outputs[0]]
        result = np.zeros(kind.shape, kind.dtype.numpy)
        for piece in np.nonzero(stage.last)[0].tolist():
            if stage.first + piece not in stored:
                hint = "look at the element's driver: every piece must store its result"
                raise SimulationError(f"piece {piece} stored nothing", where=stage.layer.name, hint=hint)
            box = result_box(stage, piece)
            part = np.frombuffer(stored[stage.first + piece], kind.dtype.numpy)
            result[box_slices(box)] = part.reshape([stop - start for start, stop in box])
        found[name] = result.reshape(parts.graph.types[name].shape)
    return found
