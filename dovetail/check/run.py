"""Carries cases out: many layers as one network, compiled as any, on whatever computes them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dovetail.check.cases import Case, ask
from dovetail.check.direct import fits_directly, on_device
from dovetail.check.layers import Layer, add_layer
from dovetail.check.model import on_model
from dovetail.errors import DovetailError, PlaceError, PlanError
from dovetail.graph.graph import GraphBuilder
from dovetail.graph.types import Array
from dovetail.target.description import Engine, Offload, Target

if TYPE_CHECKING:
    from dovetail.compile import Compiled

INSTRUCTIONS = 30_000_000
"""That a batch may take on the simulated chip."""
SECONDS = 60.0
"""That a batch may take."""
ENOUGH = 2
"""Errors after which others are not looked for: each may have taken as long as it could."""
_BATCH = 24
_LAST = 8
"""Register accesses shown of a driver that hangs."""


@dataclass(frozen=True)
class Outcome:
    """What became of a case."""

    case: Case
    actual: Array | None = None
    """What was computed; None where nothing was."""
    expected: Array | None = None
    error: str = ""
    """Why nothing was computed."""
    skipped: str = ""
    """Why it was not tried: it does not fit the memories, or the core has no such kernel."""

    @property
    def failed(self) -> bool:
        """True when the port is wrong here."""
        if self.skipped or self.error:
            return bool(self.error)
        assert self.actual is not None and self.expected is not None
        return not np.array_equal(self.actual, self.expected)


def offload_of(target: Target, case: Case) -> Offload:
    """The offload a case is about."""
    return {offload.name: offload for offload in target.engine(case.engine).offloads}[case.offload]


def run(
    target: Target, cases: Sequence[Case], simulator: str, seconds: float = SECONDS,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Outcome]:
    """Every case's outcome, in order.

    Args:
        target: the machine.
        cases: what to compute.
        simulator: "model" (the device alone, in Python) or one of `dovetail.run.SIMULATORS`.
        seconds: that a batch may take.
        progress: told how many are done.
    """
    done = _directly(target, cases, seconds) if simulator == "model" else {}
    for batch in _batches({index: case for index, case in enumerate(cases) if index not in done}):
        if sum(bool(outcome.error) for outcome in done.values()) >= ENOUGH:
            done.update((index, Outcome(cases[index], skipped=f"not tried after {ENOUGH} errors")) for index in batch)
            continue
        outcomes = _attempt(target, [cases[index] for index in batch], simulator, seconds)
        done.update(zip(batch, outcomes, strict=True))
        progress(len(done))
    return [done[index] for index in range(len(cases))]


def _directly(target: Target, cases: Sequence[Case], seconds: float) -> dict[int, Outcome]:
    """Those cases that are one launch of a Python model, carried out without compiling anything."""
    done: dict[int, Outcome] = {}
    for index, case in enumerate(cases):
        offload = offload_of(target, case)
        asked = ask(offload, case.point) if case.taken and not case.room else None
        if asked is None or not fits_directly(offload, asked.match):
            continue
        try:
            found = on_device(target, target.engine(case.engine), offload, asked.match, asked.layer,
                              case, seconds)  # fmt: skip
            skipped = "" if found is not None else f"{target.engine(case.engine).memory} does not hold it"
            done[index] = Outcome(case, found, asked.layer.expected, skipped=skipped)
        except DovetailError as error:
            done[index] = Outcome(case, error=str(error))
        except Exception as error:  # the port's own code: pack, commands, the device
            done[index] = Outcome(case, error=f"{type(error).__name__}: {error}")
    return done


def _batches(cases: Mapping[int, Case]) -> Iterator[list[int]]:
    """Indices of cases that go into one network: of one offload and one size of memory."""
    groups: dict[tuple[str, str, int, bool], list[int]] = {}
    for index, case in cases.items():
        groups.setdefault((case.engine, case.offload, case.room, case.taken), []).append(index)
    for group in groups.values():
        yield from (group[start : start + _BATCH] for start in range(0, len(group), _BATCH))


def _attempt(target: Target, cases: Sequence[Case], simulator: str, seconds: float) -> list[Outcome]:
    """A batch; where it fails as a whole, its halves, so that one bad case does not hide the others."""
    try:
        return _batch(target, cases, simulator, seconds)
    except DovetailError as error:
        if len(cases) == 1:
            room = isinstance(error, PlanError) or (isinstance(error, PlaceError) and "no tile of" in str(error))
            skip = room or "no core kernel" in error.hint or not cases[0].taken
            return [Outcome(cases[0], skipped=str(error)) if skip else Outcome(cases[0], error=str(error))]
    except Exception as error:  # the port's own code: pack, commands, the device
        if len(cases) == 1:
            last = str(error).strip().splitlines()[-1:] or [""]
            text = last[0] if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
            return [Outcome(cases[0], error=text)]
    half = len(cases) // 2
    found = _attempt(target, cases[:half], simulator, seconds)
    if simulator != "model" and sum(bool(outcome.error) for outcome in found) >= min(ENOUGH, half):
        return found + [Outcome(case, skipped="not tried after errors of all before") for case in cases[half:]]
    return found + _attempt(target, cases[half:], simulator, seconds)


def compiled_cases(
    target: Target, cases: Sequence[Case]
) -> tuple[Compiled, Mapping[str, Array], tuple[Layer, ...]]:
    """Cases of one offload as one compiled network, its inputs, and the layers in it.

    Raises:
        DovetailError: it cannot be compiled.
    """
    from dovetail.compile import Options, compile_graph

    machine = _alone(target, cases[0])
    builder = GraphBuilder("check")
    pattern = offload_of(target, cases[0]).pattern
    layers = tuple(add_layer(builder, pattern, case.point, f"c{index}_") for index, case in enumerate(cases))
    graph = builder.finish([layer.root for layer in layers])
    several = len(target.engines) > 1 and cases[0].taken  # else the core may be thought to be quicker
    pins = {f"c{index}_": case.engine for index, case in enumerate(cases)} if several else {}
    compiled = compile_graph(graph, machine, Options(pins=pins), interpret=False)
    return compiled, {name: array for layer in layers for name, array in layer.inputs.items()}, layers


def _batch(target: Target, cases: Sequence[Case], simulator: str, seconds: float) -> list[Outcome]:
    compiled, inputs, layers = compiled_cases(target, cases)
    if simulator == "model":
        outputs: Mapping[str, Array] = on_model(compiled, inputs, seconds)
    else:
        outputs = _on_simulator(compiled, inputs, simulator, seconds)
    return [_outcome(case, layer, f"c{index}_", compiled, outputs)
            for index, (case, layer) in enumerate(zip(cases, layers, strict=True))]  # fmt: skip


def _outcome(case: Case, layer: Layer, origin: str, compiled: Compiled, outputs: Mapping[str, Array]) -> Outcome:
    regions = [region for region in compiled.regions if origin in region.origins]
    taken = any(region.engine is not None for region in regions)
    if case.taken and not taken:
        reason = next((region.reason for region in regions if region.reason), "")
        return Outcome(case, error=f"every limit takes it, and no engine did: {reason}")
    if not case.taken and taken:
        return Outcome(case, error=f"the engine took it, against its limit: {case.failure}")
    return Outcome(case, outputs[layer.root], layer.expected)


def _alone(target: Target, case: Case) -> Target:
    """The target with one offload only, used wherever it can be, and with as much memory as the case says."""
    def reduced(engine: Engine) -> Engine:
        """Nothing of other engines."""
        kept = [replace(offload, lossy="") for offload in engine.offloads
                if (engine.name, offload.name) == (case.engine, case.offload)]  # fmt: skip
        return replace(engine, offloads=tuple(kept))

    engine = target.engine(case.engine)
    memories = tuple(
        replace(memory, size=case.room) if case.room and memory.name == engine.memory else memory
        for memory in target.memories
    )
    return replace(target, engines=tuple(map(reduced, target.engines)), memories=memories)


def _on_simulator(
    compiled: Compiled, inputs: Mapping[str, Array], simulator: str, seconds: float
) -> Mapping[str, Array]:
    """The outputs of the network in C on a simulated chip, or on this computer."""
    from dovetail.emit.project import write_project
    from dovetail.run import Watchdog, open_build, run_build

    with tempfile.TemporaryDirectory(prefix="dovetail-check-") as name:
        folder = Path(name)
        write_project(compiled.project, folder / "build")
        build = open_build(folder / "build", compiled.unit.target)
        with _last_accesses(folder, simulator):
            watchdog = Watchdog(INSTRUCTIONS, seconds, folder)
            return run_build(build, simulator, [inputs], watchdog=watchdog).outputs[0]


@contextmanager
def _last_accesses(folder: Path, simulator: str) -> Iterator[None]:
    """Adds the last register accesses to the error of a simulator that gives up."""
    from dovetail.errors import SimulationError
    from dovetail.simulate.watch import accesses

    try:
        yield
    except SimulationError as error:
        found = [f"{file.stem}: {access}" for file in sorted(folder.glob("*.accesses"))
                 for access in accesses(file)[-_LAST:]]  # fmt: skip
        if "last register accesses" in error.hint:
            raise
        last = f"last register accesses: {'; '.join(found)}" if found else "no register was accessed"
        hint = f"{error.hint}; {last}" if error.hint else last
        raise SimulationError(error.what, where=error.where, hint=hint) from error
