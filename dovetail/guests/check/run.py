"""Runs cases: many layers as one network, compiled as any other, on a simulator or on a Python model alone.

On "model" engines of `JobRegisters` are their Python models alone: no firmware, no core. A layer that is one launch is
given to the model as it is, with gaps between rows, and memory is looked at afterwards.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

import numpy as np

from dovetail.arrays import built
from dovetail.claims import Claim
from dovetail.compile import Compiled, Options, compile_graph
from dovetail.documented import document
from dovetail.errors import DovetailError, PlaceError, PlanError, ProgramError, SimulationError
from dovetail.guests.check.cases import Case, PointCheck, ask, raised
from dovetail.guests.check.layers import MadeLayer, add_layer, single
from dovetail.ir.graph import GraphBuilder
from dovetail.ir.layout import Layout
from dovetail.ir.types import Array, TensorType
from dovetail.program.interpret import ProgramInterpreter
from dovetail.program.ir import LaunchStatement, View, byte_places, dense_view, load, store
from dovetail.records import Record
from dovetail.report import make_report
from dovetail.run import Watchdog, run_build
from dovetail.schedule.partition import initial_partition
from dovetail.sim.device import (
    Device,
    DeviceSpec,
    MemoryBus,
    MemoryRegion,
    accesses,
    find,
    hurried,
    make_device,
    slowed,
    spec_of,
)
from dovetail.sim.launch_queue import QueueDevice
from dovetail.target.description import Target
from dovetail.target.devices import JOB
from dovetail.target.engine import Engine
from dovetail.target.offload import Command, Offload, Operand, placed
from dovetail.target.pattern import Scope

LAST = 8
"""Register accesses shown of a port that hangs."""
_CONSTANTS = 16
"""Bytes that packed constants are aligned to."""


def bus_of(target: Target) -> MemoryBus:
    """The memories of a target, in which nothing was written yet."""
    return MemoryBus([MemoryRegion(memory.name, memory.base, memory.size) for memory in target.memories])


def has_model(target: Target, engine: Engine) -> bool:
    """Whether an engine can be tried by its Python model alone."""
    return not target.reads_constants(engine) and (takes_jobs(engine) or _carries_out(engine))


def takes_jobs(engine: Engine) -> bool:
    """Whether its model is that of `JobRegisters`."""
    return engine.device is not None and engine.device.factory == "dovetail.sim.launch_queue:JobDevice"


def _carries_out(engine: Engine) -> bool:
    """Whether its model is of a class that does commands without the driver."""
    with suppress(DovetailError):
        return engine.device is not None and hasattr(find(engine.device.factory, "device factory"), "carry_out")
    return False


def writes_of(command: Command) -> list[tuple[int, int]]:
    """Byte offset and value of each register a driver of `JobRegisters` writes for a command, in order."""
    return [*((JOB + 4 * index, word) for index, word in enumerate(command.words)), (QueueDevice.START, 1)]


def last_writes(command: Command) -> str:
    """The last register writes of a command, for people."""
    writes = [f"write {offset:#x} = {value & 0xFFFFFFFF:#x}" for offset, value in writes_of(command)]
    return "; ".join(writes[-LAST:])


def carry_out(device: Device, command: Command, seconds: float) -> None:
    """Carry out one job from start to end; raises SimulationError if it takes longer than allowed."""
    with time_limit(seconds, last_writes(command)):
        if hasattr(device, "carry_out"):
            device.carry_out(command.words)
            return
        for offset, value in writes_of(command):
            device.write(offset, value, 0)
        while (event := device.next_event()) is not None:
            device.advance(event)
        device.read(QueueDevice.FINISHED, 0)


def device_of(engine: Engine, bus: MemoryBus) -> Device:
    """An engine's Python model on these memories."""
    assert engine.device is not None
    return make_device(spec_of(engine.device), bus)


def on_model(compiled: Compiled, inputs: Mapping[str, Array], seconds: float) -> dict[str, Array]:
    """The outputs of a program whose launches the devices carry out.
    Raises SimulationError if a device accesses other memory than its own, or does not come to an end."""
    program, target, unit = compiled.plan.program, compiled.unit.target, compiled.unit
    machine, bus = ProgramInterpreter(program, target), bus_of(target)
    machine.memories.update(bus.arrays)
    for name, view in program.inputs.items():
        machine.write(view, inputs[name])
    for index, statement in enumerate(program.statements):
        if not isinstance(statement, LaunchStatement):
            machine.step(index, statement)
            continue
        device = device_of(target.engine(statement.engine), bus)
        for _, command in unit.commands[index]:
            if not isinstance(command, Command):
                raise ProgramError(f"{statement.engine} is software and has no device")
            carry_out(device, command, seconds)
    return {name: machine.read(view) for name, view in program.outputs.items()}


@contextmanager
def time_limit(seconds: float, last: str) -> Iterator[None]:
    """Raise SimulationError if the body takes longer; only in the main thread of a system with alarms."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def late(number: int, frame: FrameType | None) -> None:
        place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else ""
        raise SimulationError(
            f"it hangs: no end within {seconds:g} s", where=place, hint=f"last register accesses: {last}"
        )

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def on_device(target: Target, case: Case, checked: PointCheck, seconds: float) -> Array | None:
    """The result of a layer on an engine's Python model; None if the engine's memory does not hold the layer.

    Args:
        target: the machine.
        case: which engine, and where operands lie.
        checked: the layer of the case.
        seconds: the most a command may take.

    Raises:
        SimulationError: the model accesses other memory than its own, or does not come to an end.
        ProgramError: the model writes outside of its result.
    """
    engine, offload = target.engine(case.engine), offload_of(target, case)
    match, layer, memory = checked.match, checked.layer, target.memory(engine.memory)
    alignment, apart = 256 if case.aligned else memory.alignment, offload.strided and not case.dense
    room, layouts = _MemoryAllocator(alignment), offload.layouts_of(match)
    inputs = [(leaf, name) for leaf, name in match.values.items() if name in layer.inputs]
    views = {name: room.view(name, match.graph.types[name], layouts.get(leaf), apart) for leaf, name in inputs}
    packed = {name: array.reshape(-1).view(np.uint8) for name, array in offload.pack(match).items()}
    step = alignment if case.aligned else _CONSTANTS
    places = {name: room.take(array.size, step) for name, array in packed.items()}
    scratch = room.take(offload.scratch(match), memory.alignment)
    result = room.view("result", match.result, layouts.get("result"), apart)
    if room.used > memory.size:
        return None
    bus = bus_of(target)
    contents = bus.arrays[engine.memory]
    for name, view in views.items():
        store(contents, view, 0, layer.inputs[name])
    for name, array in packed.items():
        contents[places[name] : places[name] + array.size] = array
    before = contents.copy()
    laid_out = {**views, "result": result}
    operands = {name: Operand(memory.base + view.offset, view.strides) for name, view in laid_out.items()}
    operands |= {name: Operand(memory.base + place, (1,)) for name, place in (places | {"scratch": scratch}).items()}
    own = target.memory(engine.buffer) if engine.buffer and offload.buffered else memory
    wanted = offload.buffered(match) if offload.buffered else {}
    for leaf, one in placed(wanted, own.alignment).items():
        name = leaf if leaf in packed else match.values[leaf]
        operands[name] = replace(operands[name], buffer=own.base + one.start)
    device = device_of(engine, bus)
    for command in offload.commands(match, operands):
        if isinstance(command, Command):
            carry_out(device, command, seconds)
    before[scratch : scratch + offload.scratch(match)] = contents[scratch : scratch + offload.scratch(match)]
    _written_elsewhere(before, contents, result)
    return load(contents, result, 0)


def _written_elsewhere(before: Array, after: Array, result: View) -> None:
    """Raise ProgramError if other bytes than the result's have changed."""
    changed, bytewise = before != after, result.bytewise
    changed[byte_places(bytewise, 0)] = False
    if bytewise.layout is not None and not bytewise.layout.is_row_major:  # what pads the last blocks may hold any bytes
        changed[result.span[0] : result.span[1]] = False
    wrong = np.flatnonzero(changed)
    if wrong.size:
        first = int(wrong[0]) - result.span[0]
        raise ProgramError(
            f"it writes outside of its result: {wrong.size} bytes, the first {first} bytes from where "
            f"the result begins (it has {result.span[1] - result.span[0]})"
        )


class _MemoryAllocator:
    """Places in a memory, one behind the other with some bytes between."""

    def __init__(self, alignment: int) -> None:
        self._alignment, self.used = alignment, alignment

    def take(self, nbytes: int, alignment: int) -> int:
        """The offset of so many bytes; `used` is then past them."""
        place = -(-self.used // alignment) * alignment
        self.used = place + nbytes + self._alignment
        return place

    def view(self, name: str, kind: TensorType, layout: Layout | None, apart: bool) -> View:
        """A place for a value in the layout the offload takes or gives it in."""
        view = dense_view(name, kind, 0, layout)
        if apart and (layout is None or layout.bytewise.is_row_major):  # with gaps behind its pixels and rows
            strides = list(view.strides)
            for axis in range(len(strides) - 2, -1, -1):
                strides[axis] = strides[axis + 1] * view.physical[axis + 1] + self._alignment
            view = replace(view, strides=tuple(strides))
        start, stop = view.span
        return View(name, kind, view.strides, self.take(stop - start, self._alignment), layout)


def in_no_time(target: Target) -> Target:
    """The target with engines that finish each job at once."""
    return _with_devices(target, lambda engine, spec: hurried(spec))


def much_slower(target: Target) -> Target:
    """The target with engines that take so long for each job that the core is never late."""
    return _with_devices(target, lambda engine, spec: slowed(spec, _SLOWER))


_SLOWER = 50


def _with_devices(target: Target, around: Callable[[str, DeviceSpec], DeviceSpec]) -> Target:
    """The target with something put around each engine's device."""

    def changed(engine: Engine) -> Engine:
        if (device := engine.device) is None:
            return engine
        spec = around(engine.name, spec_of(device))
        return replace(engine, device=replace(device, factory=spec.factory, arguments=spec.arguments))

    return replace(target, engines=tuple(map(changed, target.engines)))


INSTRUCTIONS = 30_000_000
"""Most instructions of a batch on the simulated chip."""
SECONDS = 60.0
"""Most seconds of a batch."""
_START, _PER_CASE, _PER_PRODUCT = 1_000_000, 400_000, 40
"""Instructions a batch may take: for start-up, for each case, and for each multiply-accumulate."""
_HANGS = ("it hangs", "gave no answer", "without an end", "deadlock")
"""Parts of the errors of a port that does not come to an end."""
_SKIPPED = "not tried after an error"
STOPPED = "not tried: the check was interrupted"
"""Why an outcome is missing behind Ctrl-C."""
_BATCH = 32


class Outcome(Record):
    """The result of a case, or the reason why it was not computed."""

    case: Case
    """Case that was run."""
    actual: Array | None = None
    """The computed result; None if nothing was computed."""
    expected: Array | None = None
    """Result of the pattern's meaning; None if the case was not computed."""
    error: str = ""
    """Why nothing was computed."""
    skipped: str = ""
    """Why it was not tried: no tile of it fits the memories, the core has no kernel for a part of it, or an error."""
    declared: int = 0
    """Cycles of the engine as the offload declares them, on a simulated chip."""
    taken: int = 0
    """Cycles the engine took there; 0 where that is not known."""

    @property
    def hangs(self) -> bool:
        """Whether it did not come to an end."""
        return any(word in self.error for word in _HANGS)

    @property
    def failed(self) -> bool:
        """Whether the port is wrong here."""
        if self.skipped or self.error:
            return bool(self.error)
        assert self.actual is not None and self.expected is not None
        return not np.array_equal(self.actual, self.expected)


def offload_of(target: Target, case: Case) -> Offload:
    """The offload a case is about."""
    return {offload.name: offload for offload in target.engine(case.engine).offloads}[case.offload]


def run(
    target: Target,
    cases: Sequence[Case],
    simulator: str,
    seconds: float = SECONDS,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Outcome]:
    """The outcome of every case, in order.

    Args:
        target: the machine.
        cases: the layers to compute.
        simulator: "model" (the device alone, in Python) or one of `dovetail.run.SIMULATORS`.
        seconds: the most a batch may take.
        progress: told how many cases have ended.
    """
    outcomes = run_until_stopped(target, cases, simulator, seconds, progress)
    if any(outcome.skipped == STOPPED for outcome in outcomes):
        raise KeyboardInterrupt
    return outcomes


def run_until_stopped(
    target: Target,
    cases: Sequence[Case],
    simulator: str,
    seconds: float = SECONDS,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Outcome]:
    """The same, and Ctrl-C only ends it: what was not tried then says so (`STOPPED`)."""
    outcomes: dict[int, Outcome] = {}
    with suppress(KeyboardInterrupt):
        for index, outcome in _outcomes(target, cases, simulator, seconds, outcomes):
            outcomes[index] = outcome
            progress(len(outcomes))
    return [outcomes.get(index) or Outcome(case, skipped=STOPPED) for index, case in enumerate(cases)]


def _outcomes(
    target: Target, cases: Sequence[Case], simulator: str, seconds: float, before: Mapping[int, Outcome]
) -> Iterator[tuple[int, Outcome]]:
    """The outcome of every case, each with its number; `before` are those that were given."""
    for index, case in enumerate(cases):
        if not case.taken:
            yield index, _refused(target, case)
        elif simulator == "model":
            outcome = _directly(target, case, seconds, _hanging(before))
            if outcome is not None:
                yield index, outcome
    for batch in _batches({index: case for index, case in enumerate(cases) if index not in before}):
        own = [cases[index] for index in batch]
        skipped = [Outcome(case, skipped=_SKIPPED) for case in own] if _hanging(before) else None
        yield from zip(batch, skipped or _attempt(target, own, simulator, seconds), strict=True)


def _hanging(outcomes: Mapping[int, Outcome]) -> bool:
    return any(outcome.hangs for outcome in outcomes.values())


def _refused(target: Target, case: Case) -> Outcome:
    """Whether the engine leaves a case alone that is outside of a limit. The core's result is not looked at."""
    offload = offload_of(target, case)
    graph, layer = single(offload.pattern, offload.cases, case.point)
    regions = initial_partition(graph, alone(target, case))
    taken = any(region.engine and region.graph.outputs == (layer.root,) for region in regions)
    error = f"the engine took it, against its limit: {case.failure}" if taken else ""
    return Outcome(case, layer.expected, layer.expected, error)


def _directly(target: Target, case: Case, seconds: float, skip: bool) -> Outcome | None:
    """The outcome of a case that is one launch of a Python model, without compiling anything; None for others."""
    offload = offload_of(target, case)
    checked = ask(offload, case.point) if not case.room else None
    limits = [limit for limit in offload.constraints if limit.scope is not Scope.LAYERS]
    if checked is None or any(limit.failure(checked.match) is not None for limit in limits):
        return None
    if skip:
        return Outcome(case, skipped=_SKIPPED)
    try:
        actual = on_device(target, case, checked, seconds)
    except DovetailError as error:
        return Outcome(case, error=str(error))
    except Exception as error:  # the port's own code: pack, commands, the device
        return Outcome(case, error=raised(error))
    return None if actual is None else Outcome(case, actual, checked.layer.expected)


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
    outcomes: list[Outcome] = []
    alone = 1 if simulator != "model" and len(cases) > 2 else 0
    half = alone + (len(cases) - alone) // 2
    for part in filter(None, (cases[:alone], cases[alone:half], cases[half:])):
        if simulator != "model" and any(outcome.error for outcome in outcomes):
            outcomes += [Outcome(case, skipped=_SKIPPED) for case in part]
        else:
            outcomes += _attempt(target, part, simulator, seconds)
    return outcomes


def compiled_cases(
    target: Target, cases: Sequence[Case]
) -> tuple[Compiled, Mapping[str, Array], tuple[MadeLayer, ...]]:
    """Cases of one offload as one compiled network, its inputs, and the layers in it.
    Raises DovetailError where it cannot be compiled."""
    builder, offload = GraphBuilder("check"), offload_of(target, cases[0])
    layers = tuple(
        add_layer(builder, offload.pattern, offload.cases, case.point, f"c{index}_") for index, case in enumerate(cases)
    )
    graph = builder.finish([layer.root for layer in layers])
    compiled = compile_graph(graph, alone(target, cases[0]), Options(), interpret=False)
    return compiled, {name: array for layer in layers for name, array in layer.inputs.items()}, layers


def _batch(target: Target, cases: Sequence[Case], simulator: str, seconds: float) -> list[Outcome]:
    compiled, inputs, layers = compiled_cases(target, cases)
    claimed: Mapping[str, Claim] = {}
    if simulator == "model":
        outputs: Mapping[str, Array] = on_model(compiled, inputs, seconds)
    else:
        most = _START + sum(_PER_CASE + _PER_PRODUCT * layer.work for layer in layers)
        outputs, found = on_simulator(compiled, inputs, simulator, min(most, INSTRUCTIONS), seconds)
        claimed = {claim.layer: claim for claim in found if claim.unit == cases[0].engine}
    outcomes = []
    for index, (case, layer) in enumerate(zip(cases, layers, strict=True)):
        regions = [region for region in compiled.regions if f"c{index}_" in region.origins]
        if any(region.engine is not None for region in regions):
            one = next((claimed[region.name] for region in regions if region.name in claimed), None)
            cycles = (one.declared, one.taken) if one else (0, 0)
            outcomes.append(Outcome(case, outputs[layer.root], layer.expected, "", "", *cycles))
        else:
            reason = next((region.reason for region in regions if region.reason), "")
            if reason.startswith(("no tile of ", "the smallest tile of ")):
                outcomes.append(Outcome(case, skipped=reason))
            else:
                outcomes.append(Outcome(case, error=f"every limit takes it, and no engine did: {reason}"))
    return outcomes


def alone(target: Target, case: Case) -> Target:
    """The target with one engine and one offload only, and with as much memory as the case says. What a file needs that
    the engine shares with others comes along: their addresses and files."""
    engine = replace(target.engine(case.engine), offloads=(replace(offload_of(target, case), lossy="", prefer=True),))
    for other in target.engines:
        if other.name != engine.name and {*engine.driver, *engine.files} & {*other.driver, *other.files}:
            engine = replace(
                engine,
                driver=tuple(dict.fromkeys((*engine.driver, *other.driver))),
                files={**other.files, **engine.files},
                headers=tuple(dict.fromkeys((*engine.headers, *other.headers))),
                defines={**other.defines, **engine.defines},
            )
    cut = engine.memory if case.room else None
    memories = tuple(replace(m, size=case.room) if m.name == cut else m for m in target.memories)
    return replace(target, engines=(engine,), memories=memories)


def on_simulator(
    compiled: Compiled, inputs: Mapping[str, Array], simulator: str, instructions: int, seconds: float
) -> tuple[Mapping[str, Array], tuple[Claim, ...]]:
    """Outputs, and the claims of the layers."""
    target = compiled.unit.target
    with built(compiled, target) as build:
        folder = build.folder.parent
        with _last_accesses(folder) if simulator != "host" else nullcontext():
            watchdog = Watchdog(instructions, seconds, folder)
            result = run_build(build, simulator, [inputs], watchdog=watchdog)
            return result.outputs[0], make_report(result).claims


@contextmanager
def _last_accesses(folder: Path) -> Iterator[None]:
    """Adds the last register accesses to the error of a simulator that gives up."""
    try:
        yield
    except SimulationError as error:
        if "last register accesses" in error.hint:
            raise
        files = sorted(folder.glob("*.accesses"))
        texts = [f"{file.stem}: {access}" for file in files for access in accesses(file)[-LAST:]]
        last = f"last register accesses: {'; '.join(texts)}" if texts else "no register was accessed"
        hint = f"{error.hint}; {last}" if error.hint else last
        raise SimulationError(error.what, where=error.where, hint=hint) from error


document(__name__)
