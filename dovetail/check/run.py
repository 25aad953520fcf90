"""Carries cases out: many layers as one network, compiled as any, on whatever computes them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dovetail.check.cases import Case, ask
from dovetail.check.direct import fits_directly, on_device
from dovetail.check.layers import Layer, add_layer, single
from dovetail.check.model import LAST, on_model
from dovetail.check.raised import raised
from dovetail.errors import DovetailError, PlaceError, PlanError
from dovetail.graph.graph import GraphBuilder
from dovetail.graph.types import Array
from dovetail.target.description import Offload, Target

if TYPE_CHECKING:
    from dovetail.compile import Compiled

INSTRUCTIONS = 30_000_000
"""That a batch may take on the simulated chip at most."""
SECONDS = 60.0
"""That a batch may take."""
_START, _PER_CASE, _PER_PRODUCT = 1_000_000, 400_000, 40
"""Instructions a batch may take: for start-up, for each case, and for each multiply-accumulate."""
_HANGS = ("it hangs", "gave no answer", "without an end", "deadlock")
"""What is in the errors of a port that does not come to an end."""
_SKIPPED = "not tried after an error"
_BATCH = 32


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
    """Why it was not tried: no tile of it fits the memories, the core has no kernel for a part of it, or an error."""

    @property
    def hangs(self) -> bool:
        """True when it did not come to an end."""
        return any(word in self.error for word in _HANGS)

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
    done = _refused(target, {index: case for index, case in enumerate(cases) if not case.taken})
    done |= _directly(target, cases, seconds) if simulator == "model" else {}
    for batch in _batches({index: case for index, case in enumerate(cases) if index not in done}):
        if any(outcome.hangs for outcome in done.values()):
            outcomes = [Outcome(cases[index], skipped=_SKIPPED) for index in batch]
        else:
            outcomes = _attempt(target, [cases[index] for index in batch], simulator, seconds)
        done.update(zip(batch, outcomes, strict=True))
        progress(len(done))
    return [done[index] for index in range(len(cases))]


def _refused(target: Target, cases: Mapping[int, Case]) -> dict[int, Outcome]:
    """Cases outside of a limit: whether the engine leaves them alone. What the core makes of them is not asked."""
    from dovetail.place import first

    done: dict[int, Outcome] = {}
    for index, case in cases.items():
        graph, layer = single(offload_of(target, case).pattern, case.point)
        regions = first(graph, _alone(target, case))
        taken = any(region.engine and region.graph.outputs == (layer.root,) for region in regions)
        error = f"the engine took it, against its limit: {case.failure}" if taken else ""
        done[index] = Outcome(case, layer.expected, layer.expected, error)
    return done


def _directly(target: Target, cases: Sequence[Case], seconds: float) -> dict[int, Outcome]:
    """Those cases that are one launch of a Python model, carried out without compiling anything."""
    done: dict[int, Outcome] = {}
    for index, case in ((index, case) for index, case in enumerate(cases) if case.taken):
        offload = offload_of(target, case)
        asked = ask(offload, case.point) if not case.room else None
        if asked is None or not fits_directly(offload, asked.match):
            continue
        if any(outcome.hangs for outcome in done.values()):
            done[index] = Outcome(case, skipped=_SKIPPED)
            continue
        try:
            found = on_device(target, target.engine(case.engine), offload, asked.match, asked.layer,
                              case, seconds)  # fmt: skip
            if found is not None:  # else it is computed in tiles
                done[index] = Outcome(case, found, asked.layer.expected)
        except DovetailError as error:
            done[index] = Outcome(case, error=str(error))
        except Exception as error:  # the port's own code: pack, commands, the device
            done[index] = Outcome(case, error=raised(error))
    return done


def _batches(cases: Mapping[int, Case]) -> Iterator[list[int]]:
    """Indices of cases that go into one network: of one offload and one size of memory."""
    groups: dict[tuple[str, str, int], list[int]] = {}
    for index, case in cases.items():
        groups.setdefault((case.engine, case.offload, case.room), []).append(index)
    for group in groups.values():
        yield from (group[start : start + _BATCH] for start in range(0, len(group), _BATCH))


def _attempt(target: Target, cases: Sequence[Case], simulator: str, seconds: float) -> list[Outcome]:
    """A batch; where it fails as a whole, its halves, so that one bad case does not hide the others.

    On a chip the first alone comes before them: a port that hangs may do so in every try.
    """
    try:
        return _batch(target, cases, simulator, seconds)
    except DovetailError as error:
        if len(cases) == 1:
            room = isinstance(error, PlanError) or (isinstance(error, PlaceError) and "no tile of" in str(error))
            skip = room or "no core kernel" in error.hint
            return [Outcome(cases[0], skipped=str(error)) if skip else Outcome(cases[0], error=str(error))]
    except Exception as error:  # the port's own code: pack, commands, the device
        if len(cases) == 1:
            return [Outcome(cases[0], error=raised(error))]
    found: list[Outcome] = []
    for part in _parts(cases, simulator):
        if simulator != "model" and any(outcome.error for outcome in found):
            found += [Outcome(case, skipped=_SKIPPED) for case in part]
        else:
            found += _attempt(target, part, simulator, seconds)
    return found


def _parts(cases: Sequence[Case], simulator: str) -> Iterator[Sequence[Case]]:
    """Halves; before them the first case, where it is not on the model."""
    alone = 1 if simulator != "model" and len(cases) > 2 else 0
    half = alone + (len(cases) - alone) // 2
    yield from (part for part in (cases[:alone], cases[alone:half], cases[half:]) if part)


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
    compiled = compile_graph(graph, machine, Options(), interpret=False)
    return compiled, {name: array for layer in layers for name, array in layer.inputs.items()}, layers


def _batch(target: Target, cases: Sequence[Case], simulator: str, seconds: float) -> list[Outcome]:
    compiled, inputs, layers = compiled_cases(target, cases)
    if simulator == "model":
        outputs: Mapping[str, Array] = on_model(compiled, inputs, seconds)
    else:
        most = _START + sum(_PER_CASE + _PER_PRODUCT * layer.work for layer in layers)
        outputs = _on_simulator(compiled, inputs, simulator, min(most, INSTRUCTIONS), seconds)
    return [_outcome(case, layer, f"c{index}_", compiled, outputs)
            for index, (case, layer) in enumerate(zip(cases, layers, strict=True))]  # fmt: skip


def _outcome(case: Case, layer: Layer, origin: str, compiled: Compiled, outputs: Mapping[str, Array]) -> Outcome:
    regions = [region for region in compiled.regions if origin in region.origins]
    if all(region.engine is None for region in regions):
        reason = next((region.reason for region in regions if region.reason), "")
        return Outcome(case, error=f"every limit takes it, and no engine did: {reason}")
    return Outcome(case, outputs[layer.root], layer.expected)


def _alone(target: Target, case: Case) -> Target:
    """The target with one engine and one offload only, and with as much memory as the case says."""
    engine = replace(target.engine(case.engine), offloads=(replace(offload_of(target, case), lossy=""),))
    memories = tuple(
        replace(memory, size=case.room) if case.room and memory.name == engine.memory else memory
        for memory in target.memories
    )
    return replace(target, engines=(engine,), memories=memories)


def _on_simulator(
    compiled: Compiled, inputs: Mapping[str, Array], simulator: str, instructions: int, seconds: float
) -> Mapping[str, Array]:
    """The outputs of the network in C on a simulated chip, or on this computer."""
    from dovetail.emit.project import write_project
    from dovetail.run import Watchdog, open_build, run_build

    with tempfile.TemporaryDirectory(prefix="dovetail-check-") as name:
        folder = Path(name)
        write_project(compiled.project, folder / "build")
        build = open_build(folder / "build", compiled.unit.target)
        with _last_accesses(folder) if simulator != "host" else nullcontext():
            watchdog = Watchdog(instructions, seconds, folder)
            return run_build(build, simulator, [inputs], watchdog=watchdog).outputs[0]


@contextmanager
def _last_accesses(folder: Path) -> Iterator[None]:
    """Adds the last register accesses to the error of a simulator that gives up."""
    from dovetail.errors import SimulationError
    from dovetail.simulate.watch import accesses

    try:
        yield
    except SimulationError as error:
        found = [f"{file.stem}: {access}" for file in sorted(folder.glob("*.accesses"))
                 for access in accesses(file)[-LAST:]]  # fmt: skip
        if "last register accesses" in error.hint:
            raise
        last = f"last register accesses: {'; '.join(found)}" if found else "no register was accessed"
        hint = f"{error.hint}; {last}" if error.hint else last
        raise SimulationError(error.what, where=error.where, hint=hint) from error
