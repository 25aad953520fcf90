"""Checks that a program keeps every rule, by walking it as the machine would: no address, no wait is taken on trust."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from dovetail.errors import ProgramError
from dovetail.ir.crop import reads_in_place
from dovetail.ir.layout import packing_fits
from dovetail.ir.types import Array
from dovetail.kernels import may_overwrite
from dovetail.program.ir import (
    CORE,
    Begin,
    Buffer,
    Call,
    Copy,
    LaunchStatement,
    Program,
    Role,
    Statement,
    View,
    Wait,
    byte_places,
    in_order_of,
    overwritten,
    print_statement,
    queue_of,
    reads,
    stream_of,
    touches,
    writes,
)
from dovetail.program.loops import check_loops
from dovetail.program.transfers import transfers
from dovetail.target.description import Target

_REPORT = "report this with the model and the target: a program made by Dovetail must keep this rule"
_LAYOUT = "look at the layouts the target's Offload declares for its operands and result"


@dataclass(frozen=True)
class _InFlightAccess:
    """A statement issued to a queue and not known to have finished."""

    index: int
    queue: str
    memory: str
    span: tuple[int, int]
    view: View
    is_write: bool
    stream: str
    """Engine whose list it is a command of; empty for none."""


@dataclass
class _VerifierState:
    program: Program
    target: Target
    identity: dict[str, int]
    owner: dict[str, Array]
    running: list[_InFlightAccess] = field(default_factory=list)
    behind: dict[str, list[_InFlightAccess]] = field(default_factory=dict)
    """By engine what its list has waited for: for everybody else it may still be running."""
    held: dict[str, list[int]] = field(default_factory=dict)
    """By engine the launches that wait for the one that starts them."""
    replaced: set[str] = field(default_factory=set)
    """States that hold their next contents already."""


def verify(program: Program, target: Target) -> None:
    """Check bounds, residency, lifetimes, waits and shapes.

    Raises:
        ProgramError: the first broken rule, with the statement that breaks it.
    """
    for buffer in program.buffers.values():
        with _at(f"buffer {buffer.name}"):
            _check_buffer(buffer, target)
    identity = {name: number + 1 for number, name in enumerate(sorted(program.buffers))}
    owner = {memory.name: np.zeros(memory.size, dtype=np.int32) for memory in target.memories}
    state = _VerifierState(program, target, identity, owner)
    for view in (*program.inputs.values(), *(kept.view for kept in program.states)):
        _mark(state, view)
    for index, statement in enumerate(program.statements):
        try:
            _step(state, index, statement)
        except ProgramError as error:
            line = print_statement(program, index).strip()
            raise ProgramError(error.what, where=f"statement {line}", hint=error.hint or _REPORT) from None
    with _at(f"end of {program.name}"):
        _check_end(state)
    check_loops(program)


@contextmanager
def _at(where: str) -> Iterator[None]:
    """Say in errors where they were found, and what to do where nothing nearer is known."""
    try:
        yield
    except ProgramError as error:
        raise ProgramError(error.what, where=where, hint=error.hint or _REPORT) from None


def _check_end(state: _VerifierState) -> None:
    for engine, waiting in state.held.items():
        if waiting:
            raise ProgramError(f"ends while {engine} holds the launch {waiting[0]}, which none starts")
    left_over = [*state.running, *(one for own in state.behind.values() for one in own)]
    if left_over:
        left = left_over[0]
        raise ProgramError(f"ends while {left.queue} may still run statement {left.index}")
    for name, view in state.program.outputs.items():
        _check_resident(state, view, f"output '{name}'")
    for kept in state.program.states:
        if kept.view.buffer not in state.replaced:
            raise ProgramError(f"the state {kept.view.buffer} is never replaced")
        _check_resident(state, kept.view, f"state '{kept.view.buffer}'")


def _check_buffer(buffer: Buffer, target: Target) -> None:
    memories = {memory.name: memory for memory in target.memories}
    if buffer.memory not in memories:
        raise ProgramError(f"it lies in {buffer.memory}, which {target.name} does not have")
    if buffer.role is Role.CONSTANT and buffer.address is None:
        return
    memory = memories[buffer.memory]
    if buffer.address is None:
        raise ProgramError("it has no address")
    end = memory.base + memory.size
    if not memory.base <= buffer.address <= end - buffer.nbytes:
        raise ProgramError(
            f"its {buffer.nbytes} bytes at 0x{buffer.address:x} are outside {memory.name} "
            f"(0x{memory.base:x} to 0x{end:x})"
        )
    if buffer.address % memory.alignment:
        raise ProgramError(f"its address 0x{buffer.address:x} is not aligned to {memory.alignment} bytes")


def _step(state: _VerifierState, index: int, statement: Statement) -> None:
    if isinstance(statement, Begin):
        return
    if isinstance(statement, Wait):
        _check_wait(state, index, statement)
        _wait(state, statement)
        return
    for view, _ in touches(statement):
        _check_view(state, view)
    _check_shapes(state, statement)
    _check_apart(state, statement)
    queue, stream = queue_of(statement, state.program.dma), stream_of(statement)
    beside = _beside(state, statement)
    _check_reach(state, statement)
    _check_states(state, statement)
    for view in reads(statement):
        _check_free(state, view, queue, stream, beside, is_write=False)
        _check_resident(state, view, f"'{view.buffer}'")
    for view in writes(statement):
        if state.program.buffers[view.buffer].role is Role.CONSTANT:
            raise ProgramError(f"writes to the constant {view.buffer}")
        _check_free(state, view, queue, stream, beside, is_write=True)
        _mark(state, view)
    for view, is_write in touches(statement) if queue != CORE else ():
        buffer = state.program.buffers[view.buffer]
        if buffer.address is not None:
            span = _absolute(buffer, view)
            state.running.append(_InFlightAccess(index, queue, buffer.memory, span, view, is_write, stream))
    if isinstance(statement, LaunchStatement):
        state.held[queue] = [*beside, index] if statement.starts_with_next else []


def _beside(state: _VerifierState, statement: Statement) -> Sequence[int]:
    """The launches a launch works beside, of those before it; raises where there are more than the engine takes."""
    if not isinstance(statement, LaunchStatement):
        return ()
    own, joint = state.held.get(statement.engine, []), state.target.engine(statement.engine).joint
    if (statement.starts_with_next or own) and (
        joint is None or len(own) + 1 + statement.starts_with_next > joint.most
    ):
        most = joint.most if joint else 1
        raise ProgramError(f"{statement.engine} takes {most} launches at a time", hint="look at Engine.joint")
    return own


def _wait(state: _VerifierState, wait: Wait) -> None:
    """What may still be running after a wait: core 0 waits for the whole list a statement is in, and everybody knows; a
    list knows by itself what it has waited for."""
    whole = "" if wait.stream else stream_of(state.program.statements[wait.statement])

    def over(one: _InFlightAccess) -> bool:
        mine = one.queue == wait.queue or bool(whole and one.stream == whole)
        return one.index <= wait.statement and mine

    if wait.stream:
        state.behind.setdefault(wait.stream, []).extend(one for one in state.running if over(one))
    elif whole:
        state.behind[whole] = [one for one in state.behind.get(whole, ()) if not over(one)]
    state.running = [one for one in state.running if not over(one)]


def _check_reach(state: _VerifierState, statement: Statement) -> None:
    """Whoever carries a statement out reaches the memories it touches."""
    queue = queue_of(statement, state.program.dma)
    who = CORE if isinstance(statement, Call) else queue
    for view, _ in touches(statement):
        memory = state.target.memory(state.program.buffers[view.buffer].memory)
        if not memory.is_reached_by(who):
            hint = f"look at Memory.reach of {memory.name}"
            raise ProgramError(f"{who} does not reach {memory.name}, where {view.buffer} lies", hint=hint)


def _check_wait(state: _VerifierState, index: int, wait: Wait) -> None:
    if not 0 <= wait.statement < index:
        raise ProgramError(f"waits for statement {wait.statement}, which has not been issued")
    waited = state.program.statements[wait.statement]
    if isinstance(waited, Begin | Wait) or queue_of(waited, state.program.dma) != wait.queue:
        raise ProgramError(f"waits for statement {wait.statement}, which does not run on {wait.queue}")
    if isinstance(waited, LaunchStatement) and waited.starts_with_next:
        raise ProgramError(f"waits for statement {wait.statement}, which another launch starts")
    if wait.stream and stream_of(waited) != wait.stream:
        raise ProgramError(
            f"the list of {wait.stream} waits for statement {wait.statement}, which is not one of its own"
        )


def _check_view(state: _VerifierState, view: View) -> None:
    buffer = state.program.buffers.get(view.buffer)
    if buffer is None:
        raise ProgramError(f"names the unknown buffer {view.buffer}")
    start, stop = view.span
    if start < 0 or stop > buffer.nbytes:
        raise ProgramError(f"touches bytes {start} to {stop} of {view.buffer}, which has {buffer.nbytes}")


def _check_shapes(state: _VerifierState, statement: Statement) -> None:
    if isinstance(statement, Copy):
        inner, outer = statement.source.type.shape, statement.destination.type.shape
        before = statement.before or (0,) * len(inner)
        fits = len(inner) == len(outer) == len(before)
        fits = fits and all(b >= 0 and b + i <= o for b, i, o in zip(before, inner, outer, strict=True))
        if not fits or (not any(before) and not statement.before and inner != outer):
            raise ProgramError(f"copies {statement.source.type} into {statement.destination.type}")
        if state.target.dma is None and state.program.dma != CORE and not statement.queue:
            hint = "give the target a Dma, or the memory of the core as the engine's memory"
            raise ProgramError(f"{state.target.name} has no DMA", hint=hint)
        transfers(statement)
        _check_streamed_copy(state, statement)
        return
    if isinstance(statement, LaunchStatement):
        engine = state.target.engine(statement.engine)
        for name, view in (*statement.operands.items(), ("result", statement.result)):
            memory = state.program.buffers[view.buffer].memory
            read_only = state.program.buffers[view.buffer].role is Role.CONSTANT
            needed = (engine.constants if name in statement.packed else "") or engine.memory
            in_place = read_only and name in statement.packed and state.target.reads_constants(engine)
            if memory != needed and not in_place:
                hint = "look at Engine.memory and Engine.constants of the target"
                raise ProgramError(f"{engine.name} reaches {needed} only; {view.buffer} lies in {memory}", hint=hint)
        if statement.stream != (engine.name if engine.stream else ""):
            raise ProgramError(f"{engine.name} {'takes lists' if engine.stream else 'takes no lists'} of commands")
        if (statement.queue != CORE) != bool(engine.wait):
            hint = "give the Engine a wait= function exactly if its driver returns before the work is done"
            raise ProgramError(f"{engine.name} {'is' if engine.wait else 'cannot be'} waited for", hint=hint)
        for name, array in statement.packed.items():
            if statement.operands[name].type.nbytes != array.nbytes:
                raise ProgramError(
                    f"constant {name} has {statement.operands[name].type.nbytes} of {array.nbytes} bytes",
                    hint="look at the Offload's constants: they must have the bytes of their declared type",
                )
    if isinstance(statement, LaunchStatement | Call):
        graph = statement.graph
        for name in graph.inputs:
            if statement.operands[name].type != graph.types[name]:
                raise ProgramError(f"operand '{name}' is {statement.operands[name].type}, expected {graph.types[name]}")
        _check_layouts(statement)
        if statement.result.type != graph.types[graph.outputs[0]]:
            raise ProgramError(f"writes {statement.result.type}, computes {graph.types[graph.outputs[0]]}")


def _check_streamed_copy(state: _VerifierState, copy: Copy) -> None:
    """An engine's own DMA copies in the engine's list, from or to the engine's memory, and fills nothing."""
    if not copy.queue and not copy.stream:
        return
    engine = state.target.engine(copy.stream)
    if engine.dma is None or engine.dma.name != copy.queue:
        raise ProgramError(f"{copy.queue} is not the DMA of {engine.name}")
    ends = {state.program.buffers[view.buffer].memory for view in (copy.source, copy.destination)}
    if engine.memory not in ends or copy.before:
        raise ProgramError(f"{copy.queue} copies to and from {engine.memory} only, and fills nothing")


def _check_layouts(statement: LaunchStatement | Call) -> None:
    """An engine finds each value in the layout it takes; the core finds the elements of all in one order, densely, and
    converts between two of which one shares bytes."""
    graph = statement.graph
    views = {**{name: statement.operands[name] for name in graph.inputs}, graph.outputs[0]: statement.result}
    converts = isinstance(statement, Call) and graph.nodes[0].operator.changes_layout
    for name, view in views.items():
        if not packing_fits(view.layout, view.type.dtype):
            raise ProgramError(f"'{name}' is {view.type} and lies {view.layout}, whose bytes it cannot fill")
        if isinstance(statement, Call):
            expected = view.layout if converts else in_order_of(view, statement.result.layout)
        else:
            expected = statement.layouts.get(name)
        if view.layout != expected:
            found, wanted = (layout or "row-major" for layout in (view.layout, expected))
            raise ProgramError(f"'{name}' lies {found}, expected {wanted}", hint=_LAYOUT)
        if isinstance(statement, Call) and not view.is_dense:
            raise ProgramError(f"the core does not take '{name}' with strides {list(view.strides)}")


def _check_apart(state: _VerifierState, statement: Statement) -> None:
    """What a statement writes may not lie over what it reads, but for an operand of the core that is read only at the
    place of each element. (What a copy does within one buffer, `transfers` checks.)"""
    named = statement.operands if isinstance(statement, Call) else dict(enumerate(reads(statement)))
    over = overwritten(statement, state.program.buffers) if isinstance(statement, Call) else None
    for written in writes(statement):
        for name, read in named.items():
            a, b = state.program.buffers[written.buffer], state.program.buffers[read.buffer]
            within = a.name == b.name and not isinstance(statement, Call)
            if within or a.memory != b.memory or a.address is None or b.address is None:
                continue
            (start, stop), (first, last) = _absolute(a, written), _absolute(b, read)
            if start < last and first < stop and name != over:
                raise ProgramError(f"writes {a.name} over its own operand {b.name}: lifetimes overlap")
    if over is None or not isinstance(statement, Call):
        return
    same = statement.operands[over].layout == statement.result.layout
    if not same or not reads_in_place(statement.graph, over) or not may_overwrite(statement.graph):
        raise ProgramError(f"writes its result over '{over}', which it reads at other places too: lifetimes overlap")


def _check_states(state: _VerifierState, statement: Statement) -> None:
    """A state is read before it is replaced, and replaced once, as a whole."""
    for view in reads(statement):
        if view.buffer in state.replaced:
            raise ProgramError(f"reads the state {view.buffer} after it was replaced")
    whole = {kept.view.buffer: kept.view for kept in state.program.states}
    for view in writes(statement):
        if state.program.buffers[view.buffer].role is not Role.STATE:
            continue
        if view.buffer in state.replaced or whole.get(view.buffer) != view:
            raise ProgramError(f"replaces the state {view.buffer} in part, or twice")
        state.replaced.add(view.buffer)


def _check_free(
    state: _VerifierState, view: View, queue: str, stream: str, beside: Sequence[int], is_write: bool
) -> None:
    """No other queue may still be using these bytes, nor launches beside this one (reading together is fine; one queue
    works in order)."""
    buffer = state.program.buffers[view.buffer]
    if buffer.address is None:
        return
    start, stop = _absolute(buffer, view)
    known = (one for engine, own in state.behind.items() if engine != stream for one in own)
    for other in (*state.running, *known):
        overlap = other.memory == buffer.memory and other.span[0] < stop and start < other.span[1]
        in_order = other.queue == queue and other.index not in beside
        if not overlap or in_order or not (is_write or other.is_write):
            continue
        if np.isin(_bytes(state, view), _bytes(state, other.view)).any():
            deed = "writes" if is_write else "reads"
            doing = "writing" if other.is_write else "reading"
            missing = "they begin together" if other.index in beside else "a wait is missing"
            raise ProgramError(
                f"{deed} {view.buffer} while {other.queue} may still be {doing} there (statement {other.index}): "
                f"{missing}"
            )


def _bytes(state: _VerifierState, view: View) -> Array:
    """The address of every byte of the blocks of a view."""
    address = state.program.buffers[view.buffer].address
    assert address is not None
    places = np.arange(view.type.dtype.numpy.itemsize, dtype=np.int64) + address + view.offset
    for size, stride in zip(view.physical, view.strides, strict=True):
        places = (places[:, None] + np.arange(size) * stride).reshape(-1)
    return places


def _check_resident(state: _VerifierState, view: View, name: str) -> None:
    buffer = state.program.buffers[view.buffer]
    if buffer.role is Role.CONSTANT:
        return
    found = _owners(state, view)
    expected = state.identity[view.buffer]
    wrong = found[found != expected]
    if wrong.size == 0:
        return
    if (wrong == 0).any():
        raise ProgramError(f"reads {name}, of which {int((wrong == 0).sum())} bytes were never written")
    names = {number: known for known, number in state.identity.items()}
    raise ProgramError(
        f"reads {name}, of which {wrong.size} bytes have been overwritten by {names[int(wrong[0])]}: lifetimes overlap"
    )


def _mark(state: _VerifierState, view: View) -> None:
    """Whole blocks are written, what pads them too: an engine knows no smaller unit."""
    buffer = state.program.buffers[view.buffer]
    owner = state.owner[buffer.memory]
    start, _ = _absolute(buffer, view)
    start -= state.target.memory(buffer.memory).base
    shape = (*view.physical, view.type.dtype.numpy.itemsize)
    strides = tuple(4 * stride for stride in (*view.strides, 1))
    np.lib.stride_tricks.as_strided(owner[start:], shape, strides)[...] = state.identity[view.buffer]


def _owners(state: _VerifierState, view: View) -> Array:
    """The owner of every byte of the elements of a view; what pads blocks need not have been written."""
    buffer = state.program.buffers[view.buffer]
    assert buffer.address is not None
    owner = state.owner[buffer.memory]
    base = buffer.address - state.target.memory(buffer.memory).base
    if view.layout is None:
        shape = (*view.type.shape, view.type.dtype.numpy.itemsize)
        strides = tuple(4 * stride for stride in (*view.strides, 1))
        return np.lib.stride_tricks.as_strided(owner[base + view.offset :], shape, strides)
    return np.asarray(owner[byte_places(view, base)])


def _absolute(buffer: Buffer, view: View) -> tuple[int, int]:
    assert buffer.address is not None
    start, stop = view.span
    return buffer.address + start, buffer.address + stop
