"""Checks that a program keeps every rule, by walking it as the machine would: no address, no wait is taken on trust."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter

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
    Queue,
    Role,
    Statement,
    View,
    Views,
    Wait,
    byte_places,
    in_order_of,
    issuer_of,
    overwritten,
    print_statement,
    queue_of,
    reads,
    stream_of,
    writes,
)
from dovetail.program.loops import check_loops, digest
from dovetail.program.transfers import relative_transfers
from dovetail.records import Record
from dovetail.target.chip import Memory
from dovetail.target.description import Target

_REPORT = "report this with the model and the target: a program made by Dovetail must keep this rule"
_LAYOUT = "look at the layouts the target's Offload declares for its operands and result"


def verify(program: Program, target: Target) -> None:
    """Check bounds, residency, lifetimes, waits and shapes.

    Raises:
        ProgramError: the first broken rule, with the statement that breaks it.
    """
    walk = _ProgramWalk(program, target)
    for buffer in program.buffers.values():
        with _at("buffer {}".format, buffer.name):
            _check_buffer(buffer, target)
    for view in (*program.inputs.values(), *(state.view for state in program.states)):
        walk.mark(view)
    for index, statement in enumerate(program.statements):
        with _at(_name_of, program, index):
            walk.step(index, statement)
    with _at("end of {}".format, program.name):
        walk.check_end()
    check_loops(program)


@contextmanager
def _at(where: Callable[..., str], *place: object) -> Iterator[None]:
    """Say in errors where they were found, and what to do where nothing nearer is known."""
    try:
        yield
    except ProgramError as error:
        raise ProgramError(error.what, where=where(*place), hint=error.hint or _REPORT) from None


def _name_of(program: Program, index: int) -> str:
    return f"statement {print_statement(program, index).strip()}"


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


class _InFlightAccess(Record):
    """A statement issued to a queue and not known to have finished."""

    index: int
    queue: Queue
    stream: str
    """Engine whose list it is a command of; empty for none."""
    chain: str
    """Engine that keeps every element of its launches behind those it is made from; empty for none."""
    memory: str
    span: tuple[int, int]
    """First byte and one past the last, as addresses."""
    view: View
    is_write: bool


_index = attrgetter("index")


@dataclass
class _ProgramWalk:
    """The state of the machine after some statements, as far as rules ask for it."""

    program: Program
    target: Target
    running: dict[tuple[str, Queue], list[_InFlightAccess]] = field(default_factory=dict)
    """By memory and queue, in the order of statements."""
    known: dict[tuple[str, Queue], int] = field(default_factory=dict)
    """By an engine's list or a further core, and queue: the statement up to which that one has waited. For everybody
    else the queue may still be running."""
    held: dict[str, list[int]] = field(default_factory=dict)
    """By engine, the launches that wait for the one that starts them."""
    replaced: dict[str, list[tuple[View, frozenset[str]]]] = field(default_factory=dict)
    """Parts of states that hold their next contents already, with the values that they were before, where they were
    changed in place: what is read of them since then is the next contents."""

    buffered: dict[str, dict[tuple[int, int], View | bytes]] = field(default_factory=dict)
    """By engine, what lies in its own buffer between two addresses: what was loaded from there, or a digest of it."""

    def __post_init__(self) -> None:
        self.identity = {name: number + 1 for number, name in enumerate(sorted(self.program.buffers))}
        self.memories = {memory.name: memory for memory in self.target.memories}
        self.has_states = any(buffer.role is Role.STATE for buffer in self.program.buffers.values())
        narrow = np.min_scalar_type(len(self.identity))
        self.owner = {memory.name: np.zeros(memory.size, narrow) for memory in self.target.memories}
        """For every byte of a memory, the buffer whose contents are there; 0 for none."""

    def buffer(self, view: View) -> Buffer:
        """The buffer a view is part of."""
        return self.program.buffers[view.buffer]

    def memory(self, view: View) -> Memory:
        """The memory a view lies in."""
        return self.memories[self.program.buffers[view.buffer].memory]

    def span(self, view: View) -> tuple[int, int] | None:
        """First byte and one past the last byte of a view, as addresses; None for what the linker places."""
        address, (start, stop) = self.program.buffers[view.buffer].address, view.span
        return None if address is None else (address + start, address + stop)

    def step(self, index: int, statement: Statement) -> None:
        """Check one statement and carry it out."""
        if isinstance(statement, Begin):
            return
        if isinstance(statement, Wait):
            self._check_wait(index, statement)
            self._wait(statement)
            return
        read, written = reads(statement), writes(statement)
        for view in (*read, *written):
            self._check_view(view)
        if isinstance(statement, Copy):
            self._check_copy(statement)
        else:
            self._check_computation(statement)
        self._check_apart(statement, read, written)
        queue, stream = queue_of(statement, self.program.dma), stream_of(statement)
        waiter = issuer_of(statement)
        beside = self._beside(statement)
        self._check_reach(CORE if isinstance(statement, Call) else queue, (*read, *written))
        if self.has_states:
            self._check_states(statement)
        chain = self._chain(statement)
        for view in read:
            self._check_free(view, queue, waiter, beside, is_write=False, chain=chain)
            self._check_resident(view, f"'{view.buffer}'")
        for view in written:
            if self.buffer(view).role is Role.CONSTANT:
                raise ProgramError(f"writes to the constant {view.buffer}")
            self._check_free(view, queue, waiter, beside, is_write=True)
            self.mark(view)
            for held in self.buffered.values():
                for place in [
                    place for place, what in held.items() if isinstance(what, View) and self._meet(what, view)
                ]:
                    del held[place]
        for number, view in enumerate((*read, *written)) if queue != CORE else ():
            if (span := self.span(view)) is not None:
                memory, is_write = self.buffer(view).memory, number >= len(read)
                access = _InFlightAccess(index, queue, stream, chain, memory, span, view, is_write)
                self.running.setdefault((memory, queue), []).append(access)
        if isinstance(statement, LaunchStatement):
            self.held[queue] = [*beside, index] if statement.starts_with_next else []

    def check_end(self) -> None:
        """Nothing runs any more, and outputs and states are there."""
        for engine, waiting in self.held.items():
            if waiting:
                raise ProgramError(f"ends while {engine} holds the launch {waiting[0]}, which none starts")
        for left in sorted((one for own in self.running.values() for one in own), key=_index):
            raise ProgramError(f"ends while {left.queue} may still run statement {left.index}")
        for name, view in self.program.outputs.items():
            self._check_resident(view, f"output '{name}'")
        for state in self.program.states:
            new = sum(view.type.elements for view, _ in self.replaced.get(state.view.buffer, ()))
            if new != state.view.type.elements:
                raise ProgramError(
                    f"the state {state.view.buffer} is {'replaced in part' if new else 'never replaced'}"
                )
            self._check_resident(state.view, f"state '{state.view.buffer}'")

    def _chain(self, statement: Statement) -> str:
        """The engine of a launch, where it chains launches; empty for other statements."""
        engine = self.target.engine(statement.engine) if isinstance(statement, LaunchStatement) else None
        return engine.name if engine and engine.joint and engine.joint.chained else ""

    def _beside(self, statement: Statement) -> Sequence[int]:
        """The launches a launch works beside, of those before it; raises where there are more than the engine takes."""
        if not isinstance(statement, LaunchStatement):
            return ()
        own, joint = self.held.get(statement.engine, []), self.target.engine(statement.engine).joint
        most, holds = joint.most if joint else 1, statement.starts_with_next
        if (holds or own) and (joint is None or len(own) + 1 + holds > most):
            raise ProgramError(f"{statement.engine} takes {most} launches at a time", hint="look at Engine.joint")
        return own

    def _check_wait(self, index: int, wait: Wait) -> None:
        if not 0 <= wait.statement < index:
            raise ProgramError(f"waits for statement {wait.statement}, which has not been issued")
        waited = self.program.statements[wait.statement]
        if isinstance(waited, Begin | Wait) or queue_of(waited, self.program.dma) != wait.queue:
            raise ProgramError(f"waits for statement {wait.statement}, which does not run on {wait.queue}")
        if isinstance(waited, LaunchStatement) and waited.starts_with_next:
            raise ProgramError(f"waits for statement {wait.statement}, which another launch starts")
        if wait.stream and stream_of(waited) != wait.stream:
            raise ProgramError(
                f"the list of {wait.stream} waits for statement {wait.statement}, which is not one of its own"
            )
        if wait.core != CORE and (not isinstance(waited, Call) or wait.core == wait.queue):
            raise ProgramError(f"{wait.core} waits for statement {wait.statement}, which is not another core's call")

    def _wait(self, wait: Wait) -> None:
        """Forget accesses that are over: core 0 waits for the whole list a statement is in, and everybody knows; a list
        or a further core knows by itself what it has waited for."""
        if wait.known_to:
            key = wait.known_to, wait.queue
            self.known[key] = max(self.known.get(key, -1), wait.statement)
            return
        whole = stream_of(self.program.statements[wait.statement])

        def runs(one: _InFlightAccess) -> bool:
            return one.index > wait.statement or not (one.queue == wait.queue or (whole and one.stream == whole))

        for place, accesses in self.running.items():
            if place[1] == wait.queue or whole:
                self.running[place] = list(filter(runs, accesses))

    def _check_reach(self, who: Queue, touched: Sequence[View]) -> None:
        """The core, engine or DMA that carries a statement out reaches the memories it touches."""
        for view in touched:
            memory = self.memory(view)
            if not memory.is_reached_by(who):
                hint = f"look at Memory.reach of {memory.name}"
                raise ProgramError(f"{who} does not reach {memory.name}, where {view.buffer} lies", hint=hint)

    def _check_view(self, view: View) -> None:
        if view.buffer not in self.program.buffers:
            raise ProgramError(f"names the unknown buffer {view.buffer}")
        (start, stop), nbytes = view.span, self.buffer(view).nbytes
        if start < 0 or stop > nbytes:
            raise ProgramError(f"touches bytes {start} to {stop} of {view.buffer}, which has {nbytes}")

    def _check_copy(self, copy: Copy) -> None:
        inner, outer = copy.source.type.shape, copy.destination.type.shape
        before = copy.before or (0,) * len(inner)
        fits = len(inner) == len(outer) == len(before)
        fits = fits and all(b >= 0 and b + i <= o for b, i, o in zip(before, inner, outer, strict=True))
        if not fits or (not any(before) and not copy.before and inner != outer):
            raise ProgramError(f"copies {copy.source.type} into {copy.destination.type}")
        if self.target.dma is None and self.program.dma != CORE and not copy.queue:
            hint = "give the target a Dma, or the memory of the core as the engine's memory"
            raise ProgramError(f"{self.target.name} has no DMA", hint=hint)
        relative_transfers(copy)
        if not copy.queue and not copy.stream:
            return
        # an engine's own DMA copies in the engine's list, from or to the engine's memory, and fills nothing
        engine = self.target.engine(copy.stream)
        if engine.dma is None or engine.dma.name != copy.queue:
            raise ProgramError(f"{copy.queue} is not the DMA of {engine.name}")
        if engine.memory not in (self.buffer(copy.source).memory, self.buffer(copy.destination).memory) or copy.before:
            raise ProgramError(f"{copy.queue} copies to and from {engine.memory} only, and fills nothing")

    def _check_computation(self, statement: LaunchStatement | Call) -> None:
        if isinstance(statement, LaunchStatement):
            self._check_launch(statement)
        graph = statement.graph
        views = {name: statement.operands[name] for name in graph.inputs}
        for name, view in views.items():
            if view.type != graph.types[name]:
                raise ProgramError(f"operand '{name}' is {view.type}, expected {graph.types[name]}")
        (output,) = graph.outputs
        _check_layouts(statement, views | {output: statement.result})
        if statement.result.type != graph.types[output]:
            raise ProgramError(f"writes {statement.result.type}, computes {graph.types[output]}")

    def _check_launch(self, launch: LaunchStatement) -> None:
        engine = self.target.engine(launch.engine)
        for name, view in (*launch.operands.items(), ("result", launch.result)):
            buffer, is_packed = self.buffer(view), name in launch.packed
            needed = engine.constants_memory if is_packed else engine.memory
            in_place = buffer.role is Role.CONSTANT and is_packed and self.target.reads_constants(engine)
            if buffer.memory != needed and not in_place:
                hint = "look at Engine.memory and Engine.constants of the target"
                what = f"{engine.name} reaches {needed} only; {view.buffer} lies in {buffer.memory}"
                raise ProgramError(what, hint=hint)
        if launch.stream != (engine.name if engine.stream else ""):
            raise ProgramError(f"{engine.name} {'takes lists' if engine.stream else 'takes no lists'} of commands")
        if (launch.queue != CORE) != bool(engine.wait):
            hint = "give the Engine a wait= function exactly if its driver returns before the work is done"
            raise ProgramError(f"{engine.name} {'is' if engine.wait else 'cannot be'} waited for", hint=hint)
        self._check_buffered(launch, engine.buffer)
        for name, array in launch.packed.items():
            nbytes = launch.operands[name].type.nbytes
            if nbytes != array.nbytes:
                hint = "look at the Offload's constants: they must have the bytes of their declared type"
                raise ProgramError(f"constant {name} has {nbytes} of {array.nbytes} bytes", hint=hint)

    def _meet(self, one: View, other: View) -> bool:
        """Whether two views share bytes."""
        span, written = self.span(one), self.span(other)
        meet = span is not None and written is not None and span[0] < written[1] and written[0] < span[1]
        return meet and self.memory(one) is self.memory(other)

    def _check_buffered(self, launch: LaunchStatement, memory: str) -> None:
        """Loads lie within its engine's buffer; one that is said to be there already is."""
        held, places = self.buffered.setdefault(launch.engine, {}), list(launch.buffered.values())
        for name, one in launch.buffered.items():
            view = launch.operands[name if name in launch.packed else launch.match.values[name]]
            what = digest(launch.packed[name]) if name in launch.packed else view
            first, stop = one.place.start, one.place.stop
            base, size = self.target.memory(memory).base, self.target.memory(memory).size
            shared = any(other.place.start < stop and first < other.place.stop for other in places if other is not one)
            if first < base or stop > base + size or shared:
                raise ProgramError(f"{name} is loaded to {first:#x} to {stop:#x}, which is not its own in {memory}")
            if one.is_loaded and held.get((first, stop)) != what:
                raise ProgramError(
                    f"{name} is not in {memory} at {first:#x}, where a launch before is said to have put it"
                )
            for place in [place for place in held if place[0] < stop and first < place[1]]:
                del held[place]
            held[first, stop] = what

    def _check_apart(
        self, statement: Copy | LaunchStatement | Call, read: Sequence[View], written: Sequence[View]
    ) -> None:
        """A statement writes over nothing it reads, but for an operand of the core that is read only at the place of
        each element. (Copies within one buffer are for `transfers` to check.)"""
        call = statement if isinstance(statement, Call) else None
        named = call.operands if call else dict(enumerate(read))
        over = overwritten(call, self.program.buffers) if call else None
        for result in written:
            for name, operand in named.items():
                within = result.buffer == operand.buffer and call is None
                if self._meet(result, operand) and not within and name != over:
                    what = f"writes {result.buffer} over its own operand {operand.buffer}: lifetimes overlap"
                    raise ProgramError(what)
        if call is None or over is None:
            return
        same = call.operands[over].layout == call.result.layout
        if not same or not reads_in_place(call.graph, over) or not may_overwrite(call.graph):
            raise ProgramError(
                f"writes its result over '{over}', which it reads at other places too: lifetimes overlap"
            )

    def _check_states(self, statement: Statement) -> None:
        """A state is read before it is replaced, and each element is replaced once."""
        operands = statement.operands if isinstance(statement, LaunchStatement | Call) else {}
        for view in reads(statement):
            for new, old in self.replaced.get(view.buffer, ()):
                if not view.is_apart(new) and (not old or any(operands.get(name) == view for name in old)):
                    raise ProgramError(f"reads the state {view.buffer} after it was replaced")
        for view in writes(statement):
            if self.buffer(view).role is not Role.STATE:
                continue
            done = self.replaced.setdefault(view.buffer, [])
            if not all(view.is_apart(new) for new, _ in done):
                raise ProgramError(f"replaces the state {view.buffer} twice")
            done.append((view, frozenset(name for name, read in operands.items() if read == view)))

    def _check_free(
        self, view: View, queue: Queue, waiter: str, beside: Sequence[int], is_write: bool, chain: str = ""
    ) -> None:
        """No other queue may still be using these bytes, nor launches beside this one (reading together is fine; one
        queue works in order, and so do the elements of chained launches)."""
        if (span := self.span(view)) is None:
            return
        for other in self._unfinished(self.buffer(view).memory, waiter, queue, beside):
            overlap = other.span[0] < span[1] and span[0] < other.span[1]
            in_order = other.queue == queue and other.index not in beside
            in_order = in_order or bool(chain and other.chain == chain and not is_write)
            if not overlap or in_order or not (is_write or other.is_write):
                continue
            if np.isin(self._bytes(view), self._bytes(other.view)).any():
                deed = "writes" if is_write else "reads"
                doing = "writing" if other.is_write else "reading"
                missing = "they begin together" if other.index in beside else "a wait is missing"
                where = f"may still be {doing} there (statement {other.index})"
                raise ProgramError(f"{deed} {view.buffer} while {other.queue} {where}: {missing}")

    def _unfinished(self, memory: str, waiter: str, queue: Queue, beside: Sequence[int]) -> Iterator[_InFlightAccess]:
        """Accesses to a memory that a waiter does not know to be over, without those of a queue that works in order."""
        for (where, other), accesses in self.running.items():
            if where == memory and (other != queue or beside):
                known = self.known.get((waiter, other), -1)
                yield from accesses[bisect_right(accesses, known, key=_index) :]

    def _bytes(self, view: View) -> Array:
        """The address of every byte of the blocks of a view."""
        address = self.buffer(view).address
        assert address is not None
        places = np.arange(view.type.dtype.numpy.itemsize, dtype=np.int64) + address + view.offset
        for size, stride in zip(view.physical, view.strides, strict=True):
            places = (places[:, None] + np.arange(size) * stride).reshape(-1)
        return places

    def _check_resident(self, view: View, name: str) -> None:
        if self.buffer(view).role is Role.CONSTANT:
            return
        own = self.identity[view.buffer]
        if (self._owner_bytes(view, view.physical) == own).all():
            return
        owners = self._owners(view)
        wrong = owners[owners != own]
        if wrong.size == 0:
            return
        if (wrong == 0).any():
            raise ProgramError(f"reads {name}, of which {int((wrong == 0).sum())} bytes were never written")
        other = next(other for other, number in self.identity.items() if number == wrong[0])
        raise ProgramError(
            f"reads {name}, of which {wrong.size} bytes have been overwritten by {other}: lifetimes overlap"
        )

    def mark(self, view: View) -> None:
        """Write a view: whole blocks, what pads them too, since an engine knows no smaller unit."""
        self._owner_bytes(view, view.physical)[...] = self.identity[view.buffer]

    def _owners(self, view: View) -> Array:
        """The owner of every byte of the elements of a view; what pads blocks need not have been written."""
        if view.layout is None:
            return self._owner_bytes(view, view.type.shape)
        memory, address = self.memory(view), self.buffer(view).address
        assert address is not None
        return np.asarray(self.owner[memory.name][byte_places(view, address - memory.base)])

    def _owner_bytes(self, view: View, shape: tuple[int, ...]) -> Array:
        """The owners of bytes of a view, as an array of this shape and the bytes of an element."""
        memory, address = self.memory(view), self.buffer(view).address
        assert address is not None
        owner, size = self.owner[memory.name], view.type.dtype.numpy.itemsize
        start, stop = (address - memory.base + end for end in view.span)
        if view.is_dense and shape == view.physical:
            return owner[start:stop]
        strides = tuple(owner.itemsize * stride for stride in (*view.strides, 1))
        return np.ndarray((*shape, size), owner.dtype, owner[start:stop].data, strides=strides)


def _check_layouts(statement: LaunchStatement | Call, views: Views) -> None:
    """An engine finds each value in the layout it takes; the core finds the elements of all in one order, densely, and
    converts between two of which one shares bytes."""
    converts = isinstance(statement, Call) and statement.graph.nodes[0].operator.changes_layout
    for name, view in views.items():
        if not packing_fits(view.layout, view.type.dtype):
            raise ProgramError(f"'{name}' is {view.type} and lies {view.layout}, whose bytes it cannot fill")
        if isinstance(statement, Call):
            expected = view.layout if converts else in_order_of(view, statement.result.layout)
        else:
            expected = statement.layouts.get(name)
        if view.layout != expected:
            lies, wanted = (layout or "row-major" for layout in (view.layout, expected))
            raise ProgramError(f"'{name}' lies {lies}, expected {wanted}", hint=_LAYOUT)
        if isinstance(statement, Call) and not view.is_dense:
            raise ProgramError(f"the core does not take '{name}' with strides {list(view.strides)}")
