"""Exact execution: every element's real firmware in its own emulated core, messages passed between them.

Messages only go from lower stages to higher ones, so a stage's elements run side by side, over all inputs, once those
before have run; the message unit of each keeps to its slots. Elements are spread over processes, or over the workers
of a Dask cluster.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.build.instruction_sets import EMITTED_C, instruction_set
from dovetail.build.toolchain import compile_firmware, symbols
from dovetail.errors import PlanError, SimulationError
from dovetail.graph.types import Array, box_slices
from dovetail.mesh.element_device import BASE
from dovetail.mesh.emit import Element, MeshProject, senders_of
from dovetail.mesh.execute import result_box
from dovetail.mesh.partition import Partitioned, Stage
from dovetail.mesh.place import Placed
from dovetail.mesh.tables import Tables
from dovetail.simulate.device import MemoryRegion
from dovetail.simulate.protocol import (
    Buffers,
    DeviceSpec,
    RunRequest,
    SimulationResult,
    SimulationSetup,
    result_from_message,
    run_to_message,
    setup_to_json,
)
from dovetail.simulate.worker_process import WorkerProcess
from dovetail.target.description import Target

_LIMIT = 2_000_000_000


@dataclass(frozen=True)
class ExactRun:
    """What the elements did."""

    outputs: tuple[Mapping[str, Array], ...]
    """Per input, by the network's output names."""
    instructions: int
    """Of all elements and inputs."""
    cycles: tuple[int, ...]
    """Per piece: executing and waiting for the MAC array, all inputs."""
    memory: tuple[int, ...]
    """Per piece: bytes of its element's memory that its program, stack, data and buffers take."""
    stack: int
    """Most bytes of stack any of them used."""
    programs: int


Job = tuple[str, Buffers, tuple[Buffers, ...]]
"""Path of a firmware, an element's data, and what each input brings."""


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
        """One of them."""
        sources = [Path(f"programs/{name}/program.c"), Path(f"runtime/{start}"), Path("runtime/dovetail_rt.c"),
                   Path("runtime/mesh_sim.c")]  # fmt: skip
        return name, compile_firmware(
            folder / "programs" / name, [folder / source for source in sources], linker_script=folder / "link.ld",
            isa=target.core.isa, defines={"DOVETAIL_SIM": None}, include=(folder / "runtime",), flags=EMITTED_C,
            compiler_runtime="float" in project.programs[name],
        )  # fmt: skip

    with ThreadPoolExecutor(jobs) as pool:
        return dict(pool.map(build, sorted(project.programs)))


def used_bytes(firmware: Path, target: Target) -> int:
    """Bytes of an element's memory a program takes, its stack, data and buffers included."""
    known = symbols(firmware)
    return known["__bss_end"].address - target.memory(target.code).base


def run_exact(
    parts: Partitioned, placed: Placed, tables: Tables, project: MeshProject, target: Target,
    inputs: Sequence[Mapping[str, Array]], jobs: int = 2, scheduler: str | None = None,
) -> ExactRun:  # fmt: skip
    """Run every element over some inputs.

    Args:
        parts: the network in pieces.
        placed: where they are.
        tables: the keys of messages.
        project: programs and data.
        target: the element.
        inputs: arrays by input name, for each inference.
        jobs: processes.
        scheduler: address of a Dask scheduler to use instead.

    Raises:
        SimulationError: an element does something it must not.
        PlanError: a program does not fit its element.
    """
    with tempfile.TemporaryDirectory() as folder:
        firmware = build_programs(project, target, Path(folder), jobs)
        used = {name: used_bytes(path, target) for name, path in firmware.items()}
        over = [name for name in sorted(used) if used[name] > parts.mesh.usable]
        if over:
            raise PlanError(f"a program takes {used[over[0]]} bytes, an element has {parts.mesh.usable}", where=over[0],
                            hint="cut the layer into more pieces in the mapping file, or give fewer slots")
        run = _spread_over(target, jobs, scheduler)
        try:
            return _waves(parts, placed, project, firmware, used, inputs, tables, run)
        finally:
            run.close()


class _Workers:
    """Processes that run elements, each with its share of a wave."""

    def __init__(self, target: Target, jobs: int) -> None:
        self._target = target
        self._workers = [_Worker(target) for _ in range(jobs)]
        self._pool = ThreadPoolExecutor(jobs)

    def __call__(self, wave: Sequence[Job]) -> list[SimulationResult]:
        """Run elements; results in their order."""
        shares = [range(number, len(wave), len(self._workers)) for number in range(len(self._workers))]
        done = list(self._pool.map(lambda worker, share: [worker.run(wave[place]) for place in share],
                                   self._workers, shares))  # fmt: skip
        found: list[SimulationResult | None] = [None] * len(wave)
        for share, results in zip(shares, done, strict=True):
            for place, result in zip(share, results, strict=True):
                found[place] = result
        return [result for result in found if result is not None]

    def close(self) -> None:
        """End them."""
        self._pool.shutdown()
        for worker in self._workers:
            worker.close()


class _Worker:
    """One process."""

    def __init__(self, target: Target) -> None:
        self._target, self._loaded = target, ""
        self._process = WorkerProcess("dovetail.mesh.element_worker", 600.0)

    def run(self, job: Job) -> SimulationResult:
        """Run an element."""
        firmware, data, brought = job
        if firmware != self._loaded:
            self._process.ask({"command": "load", "setup": setup_to_json(_setup(Path(firmware), self._target))})
            self._loaded = firmware
        message, blobs = run_to_message(RunRequest((data, *brought), {}, _LIMIT))
        return result_from_message(*self._process.ask({"command": "run", **message}, blobs))

    def close(self) -> None:
        """End it."""
        self._process.close()


class _Cluster:
    """The workers of a Dask cluster: each runs its share of a wave in a process of its own."""

    def __init__(self, target: Target, scheduler: str) -> None:
        from dovetail.errors import MissingExtraError

        try:
            distributed: Any = importlib.import_module("distributed")
        except ImportError as error:
            raise MissingExtraError("distributed", "tune", "running elements on a cluster") from error
        self._target = target
        self._client: Any = distributed.Client(scheduler)

    def __call__(self, wave: Sequence[Job]) -> list[SimulationResult]:
        """Run elements; results in their order."""
        named = [(Path(job[0]).read_bytes(), job) for job in wave]
        count = min(len(wave), max(1, sum(self._client.ncores().values())))
        shares = [named[number::count] for number in range(count)]
        done = self._client.gather(self._client.map(run_remote, shares, target=self._target, pure=False))
        return [done[place % count][place // count] for place in range(len(wave))]

    def close(self) -> None:
        """Leave the cluster."""
        self._client.close()


def run_remote(share: Sequence[tuple[bytes, Job]], target: Target) -> list[SimulationResult]:
    """Run elements on another computer, their firmware given as bytes."""
    worker = _Worker(target)
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = []
            for content, (name, data, brought) in share:
                path = Path(folder) / Path(name).name
                path.write_bytes(content)
                found.append(worker.run((str(path), data, brought)))
            return found
    finally:
        worker.close()


def _spread_over(target: Target, jobs: int, scheduler: str | None) -> _Workers | _Cluster:
    return _Cluster(target, scheduler) if scheduler else _Workers(target, jobs)


def _setup(firmware: Path, target: Target) -> SimulationSetup:
    assert target.mesh is not None
    device = DeviceSpec("dovetail.mesh.element_device:element_device", BASE, 4096, {"array": target.mesh.array.place})
    memories = tuple(MemoryRegion(memory.name, memory.base, memory.size) for memory in target.memories)
    return SimulationSetup(firmware, memories, (device,), target.core.isa, target.core.costs)


def _waves(
    parts: Partitioned, placed: Placed, project: MeshProject, firmware: Mapping[str, Path],
    used: Mapping[str, int], inputs: Sequence[Mapping[str, Array]], tables: Tables,
    run: Callable[[Sequence[Job]], list[SimulationResult]],
) -> ExactRun:  # fmt: skip
    """Stage after stage; of pieces that sum for each other, one after the other."""
    senders = senders_of(placed)
    elements = {element.piece: element for element in project.elements}
    tensors = [{f"dram {n}": np.ascontiguousarray(given[fetch.value]).tobytes()
                for n, fetch in enumerate(placed.traffic.fetches)} for given in inputs]  # fmt: skip
    sent: list[dict[int, bytes]] = [{} for _ in inputs]
    stored: list[dict[int, bytes]] = [{} for _ in inputs]
    results: dict[int, SimulationResult] = {}
    fetching = {int(piece) for fetch in placed.traffic.fetches for piece in fetch.pieces}
    for stage in placed.section.stages:
        for turn in range(stage.cut.sums):
            pieces = range(stage.first + turn, stage.first + stage.pieces, stage.cut.sums)
            wave = [_job(piece, elements, firmware, senders, sent, tables, tensors if piece in fetching else None)
                    for piece in pieces]  # fmt: skip
            for piece, result in zip(pieces, run(wave), strict=True):
                results[piece] = result
                for number, inference in enumerate(result.inferences):
                    for key, content in inference.outputs.items():
                        if key == "stored":
                            stored[number][piece] = content
                        else:
                            sent[number][int(key)] = content
    outputs = tuple(_gathered(parts, placed, one) for one in stored)
    order = range(placed.section.pieces)
    return ExactRun(
        outputs, sum(results[piece].executed_instructions or 0 for piece in order),
        tuple(results[piece].inferences[0].total_cycles or 0 for piece in order),
        tuple(used[elements[piece].program] for piece in order),
        max(results[piece].stack_bytes or 0 for piece in order), len(project.programs),
    )  # fmt: skip


def _job(
    piece: int, elements: Mapping[int, Element], firmware: Mapping[str, Path], senders: Sequence[Sequence[int]],
    sent: Sequence[Mapping[int, bytes]], tables: Tables, tensors: Sequence[Buffers] | None,
) -> Job:  # fmt: skip
    element = elements[piece]
    keys = [int(tables.key[sender]) for sender in senders[piece]]
    brought = tuple(
        {**{str(key): given[key] for key in keys}, **(tensors[number] if tensors else {})}
        for number, given in enumerate(sent)
    )
    return str(firmware[element.program]), {"element_data": element.data}, brought


def _gathered(parts: Partitioned, placed: Placed, stored: Mapping[int, bytes]) -> dict[str, Array]:
    """The network's outputs, put together from what elements stored."""
    stages: dict[int, Stage] = {stage.layer.index: stage for stage in placed.section.stages}
    found = {}
    for name, index in parts.outputs.items():
        stage = stages[index]
        kind = stage.layer.graph.types[stage.layer.graph.outputs[0]]
        result = np.zeros(kind.shape, kind.dtype.numpy)
        for piece in np.nonzero(stage.last)[0].tolist():
            if stage.first + piece not in stored:
                raise SimulationError(f"piece {piece} stored nothing", where=stage.layer.name,
                                      hint="look at the element's driver: every piece must store its result")
            box = result_box(stage, piece)
            part = np.frombuffer(stored[stage.first + piece], kind.dtype.numpy)
            result[box_slices(box)] = part.reshape([stop - start for start, stop in box])
        found[name] = result.reshape(parts.graph.types[name].shape)
    return found
