"""The program IR: buffers in memories and a list of statements the core executes in order.

Copies run on the DMA, launches on engines and calls on further cores while core 0 goes on; each queue works in order. A
`Wait` holds core 0 until a queue has finished the statement it names, or another core's next call. Everything has a
fixed address.
`loops.print_program` writes it as text for people.

Statements with a `stream` are commands of that engine's list: the engine itself issues them, in order, to its own queue
and its DMA's. Those that follow one another are one list (`lists`), which core 0 starts at the first of them; where it
waits for one, it waits for all of the list. A `Wait` of a stream holds only the engine.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from math import prod
from typing import NewType, TypeAlias

import numpy as np

from dovetail.ir.graph import Graph
from dovetail.ir.layout import Layout, axis_offsets, check_part, field_numbers, from_field, physical_shape, stored_shape
from dovetail.ir.types import Array, Box, DType, Shape, TensorType, box_shape, dense_steps, full_box
from dovetail.program.series import Loop
from dovetail.records import Record, field
from dovetail.target.description import Target
from dovetail.target.pattern import Match

Queue = NewType("Queue", str)
"""A worker that carries out statements in order, by name: an engine, a DMA or a core."""
CORE = Queue("core")
"""The queue of core 0."""


def core_queue(core: int) -> Queue:
    """The queue of a core by its number."""
    return Queue(f"{CORE}{core}") if core else CORE


def copy_queue(target: Target) -> Queue:
    """The queue of copies: the DMA's, `CORE` where there is none."""
    return Queue(target.dma.name) if target.dma else CORE


class Role(enum.Enum):
    """The use of a buffer."""

    INPUT = "input"
    OUTPUT = "output"
    VALUE = "value"
    """An activation of the network."""
    TILE = "tile"
    """Part of an activation, or constants, copied close to an engine."""
    SCRATCH = "scratch"
    STATE = "state"
    """Kept from one inference to the next."""
    CONSTANT = "constant"
    """Known at compile time; lies with the code."""


class Buffer(Record):
    """A stretch of memory."""

    name: str
    """A C identifier, unique in the program."""
    memory: str
    nbytes: int
    role: Role
    address: int | None = None
    """First byte; None until allocated, and for constants the linker places: all but those of streams."""


Buffers = Mapping[str, Buffer]
"""Buffers by name."""
ValueName: TypeAlias = str
"""Name of a value of the network."""


class View(Record, dict=True):
    """A strided part of a buffer."""

    buffer: str
    type: TensorType
    """Shape and elements, whatever the layout."""
    strides: tuple[int, ...]
    """Bytes from one index to the next along each physical dimension but one within a byte: each axis of the shape,
    unless `layout` says otherwise."""
    offset: int = 0
    """Bytes from the start of the buffer."""
    layout: Layout | None = None
    """The physical dimensions; None for the axes in their order."""

    @cached_property
    def physical(self) -> Shape:
        """Sizes of the physical dimensions, unused parts of last blocks included; elements in one byte count once."""
        return self.type.shape if self.layout is None else stored_shape(self.layout, self.type.shape)

    @cached_property
    def span(self) -> tuple[int, int]:
        """First byte and one past the last byte of the blocks touched, relative to the buffer."""
        if 0 in self.type.shape:
            return self.offset, self.offset
        reach = sum((size - 1) * stride for size, stride in zip(self.physical, self.strides, strict=True))
        return self.offset, self.offset + reach + self.type.dtype.numpy.itemsize

    @cached_property
    def is_dense(self) -> bool:
        """True when the elements, and what pads blocks, lie side by side in the order of the physical dimensions."""
        dense = dense_strides(self.physical, self.type.dtype)
        axes = zip(self.physical, self.strides, dense, strict=True)
        return all(size == 1 or stride == expected for size, stride, expected in axes)

    def is_apart(self, other: View) -> bool:
        """True when two views of one buffer surely touch no byte both, e.g. different channels of the same pixels."""
        (start, stop), (first, last) = self.span, other.span
        if stop <= first or last <= start:
            return True
        for period, width in self._combs.items():
            ahead = (other.offset - self.offset) % period
            if period in other._combs and width <= ahead and ahead + other._combs[period] <= period:
                return True
        return False

    @cached_property
    def _combs(self) -> dict[int, int]:
        """Width of the teeth by period: the view lies within a stretch of so many bytes in every period."""
        teeth, width = dict[int, int](), self.type.dtype.numpy.itemsize
        axes = [(size, stride) for size, stride in zip(self.physical, self.strides, strict=True) if size > 1]
        while axes and axes[-1][1] > 0:
            period = axes[-1][1]
            if width <= period and all(stride % period == 0 for _, stride in axes):
                teeth[period] = width
            size, stride = axes.pop()
            width += (size - 1) * stride
        return teeth

    def part(self, box: Box) -> View:
        """The view of a box of this view.

        Raises:
            ValueError: the box does not begin and end at whole blocks (it may end where the view does).
        """
        check_part(self.layout, box, self.type.shape)
        if self.layout is None:
            starts = [begin for begin, _ in box]
        else:
            coarsest = ((axis, step, self.layout.block(axis)) for axis, step in self.layout.stored)
            starts = [box[axis][0] // step if step == block else 0 for axis, step, block in coarsest]
        start = sum(begin * stride for begin, stride in zip(starts, self.strides, strict=True))
        kind = TensorType(box_shape(box), self.type.dtype)
        return View(self.buffer, kind, self.strides, self.offset + start, self.layout)

    @cached_property
    def bytewise(self) -> View:
        """A packed view as one of bytes, each of which stands for the elements in it; any other as it is."""
        if self.layout is None or not self.layout.packed:
            return self
        axis, share = self.layout.dims[-1][0], self.layout.fields
        shape = tuple(-(-size // share) if place == axis else size for place, size in enumerate(self.type.shape))
        return View(self.buffer, TensorType(shape, DType.UINT8), self.strides, self.offset, self.layout.bytewise)

    def seen_as(self, layout: Layout | None) -> View:
        """The same bytes under another layout in which every element lies where it does now.

        Raises:
            ValueError: they do not lie side by side, so that no other layout describes them.
        """
        if layout == self.layout:
            return self
        if not self.is_dense:
            raise ValueError(f"{self.buffer} does not lie densely and has one layout only")
        return dense_view(self.buffer, self.type, self.offset, layout)


Views = Mapping[ValueName, View]
"""Places of values."""


def in_order_of(view: View, layout: Layout | None) -> Layout | None:
    """The layout a kernel that works in the order of another one finds a view's elements in: of wide ones the order
    itself, of narrow ones that or their own, if it packs just this order without gaps."""
    order, own = layout.order if layout is not None else None, view.layout
    if own is None or not own.packed or own.order != order:
        return order
    elements = view.type.shape if order is None else physical_shape(order, view.type.shape)
    return own if prod(physical_shape(own, view.type.shape)) == prod(elements) else order


def dense_strides(shape: Shape, dtype: DType) -> tuple[int, ...]:
    """Row-major byte strides."""
    return tuple(dtype.numpy.itemsize * step for step in dense_steps(shape))


def dense_view(buffer: str, kind: TensorType, offset: int = 0, layout: Layout | None = None) -> View:
    """A whole value lying densely from `offset`, row-major unless a layout is given."""
    shape = kind.shape if layout is None else stored_shape(layout, kind.shape)
    return View(buffer, kind, dense_strides(shape, kind.dtype), offset, layout)


class Begin(Record):
    """From here on the core works for this layer (an index into `Program.layers`)."""

    layer: int


class Copy(Record, dict=True):
    """A strided copy by the DMA, or by the core where there is none; from one layout to another if they differ.

    `destination` is `source` surrounded by `before`/`after` elements of `fill`. Where the source is the very part of
    the destination it would be copied to, only what surrounds it is written.
    """

    layer: int
    source: View
    destination: View
    """Includes the padding."""
    before: Shape = ()
    """Elements of padding per axis ahead of the source; empty for none."""
    fill: int = 0
    queue: Queue | None = None
    """The engine's DMA that copies in a stream; None for the program's own queue of copies."""
    stream: str = ""
    """Engine whose list it is a command of; empty for none."""

    @cached_property
    def inner(self) -> Box:
        """The box of the destination that the source becomes."""
        shape = self.source.type.shape
        return tuple((b, b + size) for b, size in zip(self.before or (0,) * len(shape), shape, strict=True))

    @cached_property
    def fills_border(self) -> bool:
        """True when the source lies where it belongs already."""
        if not self.before or self.source.buffer != self.destination.buffer:
            return False
        try:
            return self.destination.part(self.inner) == self.source
        except ValueError:
            return False

    @cached_property
    def border(self) -> tuple[View, ...]:
        """The destination without the source.

        Raises:
            ValueError: the border ends within blocks.
        """
        return tuple(self.destination.part(strip) for strip in around(self.inner, self.destination.type.shape))

    @cached_property
    def strips(self) -> tuple[View, ...]:
        """The views written where only the border is filled; empty where everything is written, or where the border
        ends within blocks."""
        with suppress(ValueError):
            return self.border if self.fills_border else ()
        return ()


def around(inner: Box, shape: Shape) -> Iterator[Box]:
    """A value without a box of it, as boxes."""
    for axis, ((begin, end), size) in enumerate(zip(inner, shape, strict=True)):
        for span in ((0, begin), (end, size)):
            if span[0] < span[1]:
                yield (*inner[:axis], span, *full_box(shape)[axis + 1 :])


class Buffered(Record):
    """A place in an engine's own buffer."""

    place: range
    """Addresses."""
    is_loaded: bool
    """Whether a launch before has loaded the same there."""


class LaunchStatement(Record):
    """A start of an engine on one tile."""

    layer: int
    engine: str
    match: Match
    """The offload's pattern in the tile's own graph."""
    operands: Views
    """Runtime operands by value name, packed constants by their name, "scratch"."""
    result: View
    packed: Mapping[str, Array] = field(default_factory=dict)
    """The bytes that each packed constant must have."""
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    """The layout the engine takes each value in, its result by the value's name too; row-major where absent."""
    queue: Queue | None = None
    """`CORE` where the core does it itself, so that it has finished when the next statement begins; None for the
    engine's own queue."""
    stream: str = ""
    """Engine whose list it is a command of; empty for none."""
    starts_with_next: bool = False
    """Whether it begins only with the engine's next launch, which starts both, and so in no order with it."""
    buffered: Mapping[str, Buffered] = field(default_factory=dict)
    """Operands and constants it loads into its engine's own buffer, by the name of a leaf or a packed constant."""

    @property
    def graph(self) -> Graph:
        """The computation of this tile."""
        return self.match.graph


class Call(Record):
    """A kernel run by a core; all its values lie in one layout, densely. On core 0 it has finished when the next
    statement begins, on another one when it has been waited for."""

    layer: int
    graph: Graph
    operands: Views
    """Runtime operands by value name."""
    result: View
    core: int = 0
    """Number of the core, from 0."""


class Wait(Record):
    """Hold a core, or an engine's list, until `queue` has finished the statement at index `statement` (and all before
    it)."""

    layer: int
    queue: Queue
    statement: int
    stream: str = ""
    """Engine whose list it is a command of; empty where a core waits."""
    core: Queue = CORE
    """The core that waits: core 0, or another one between the calls before and those behind."""

    @property
    def known_to(self) -> str:
        """The engine or further core that alone knows of the end; empty for core 0, from which everybody knows."""
        return self.stream or ("" if self.core == CORE else self.core)


Statement: TypeAlias = Begin | Copy | LaunchStatement | Call | Wait


class StateVariable(Record):
    """A state: read before the one statement that replaces it, never shared with other buffers."""

    view: View
    """All of its buffer, dense."""
    first: Array
    """Contents before the first inference."""


class Program(Record):
    """A whole network as statements over placed buffers."""

    name: str
    buffers: Buffers
    constants: Mapping[str, Array]
    """Bytes of every CONSTANT buffer, uint8."""
    statements: tuple[Statement, ...]
    layers: tuple[str, ...]
    inputs: Views
    """The network's inputs by value name; dense."""
    outputs: Views
    values: Views = field(default_factory=dict)
    """The place of each intermediate value when it has been computed, for checks."""
    dma: Queue = Queue("dma")
    """The queue that copies run on: `CORE` where there is no DMA."""
    states: tuple[StateVariable, ...] = ()
    moves: Mapping[int, tuple[Move, ...]] = field(default_factory=dict)
    """The moves before a statement, by its index; the number of statements stands for the end."""
    loops: tuple[Loop, ...] = ()
    """Stretches of the statements that repeat, in order (`loops.rolled`)."""


class Move(Record):
    """Bytes brought to an engine's own copy of a memory, or back from it."""

    engine: str
    view: View
    """A view of bytes, at the same place on both sides."""
    to_engine: bool


def queue_of(statement: Statement, dma: Queue) -> Queue:
    """The queue a statement runs on; `dma` is that of copies."""
    if isinstance(statement, Copy):
        return statement.queue or dma
    if isinstance(statement, LaunchStatement):
        return statement.queue or Queue(statement.engine)
    return core_queue(statement.core) if isinstance(statement, Call) else CORE


def issuer_of(statement: Statement) -> str:
    """The engine or further core whose waits hold a statement, besides those of core 0; empty for none."""
    if isinstance(statement, Call):
        return core_queue(statement.core) if statement.core else ""
    return stream_of(statement)


def stream_of(statement: Statement) -> str:
    """The engine whose list a statement is a command of; empty for those that core 0 issues."""
    return "" if isinstance(statement, Begin | Call) else statement.stream


def lists(statements: Sequence[Statement]) -> tuple[tuple[int, ...], ...]:
    """The indices of the commands of each list, in order."""
    commands: list[list[int]] = []
    before = ""
    for index, statement in enumerate(statements):
        if isinstance(statement, Begin):
            continue
        stream = stream_of(statement)
        if stream and stream != before:
            commands.append([])
        if stream:
            commands[-1].append(index)
        before = stream
    return tuple(map(tuple, commands))


def side_by_side(statements: Sequence[Statement]) -> dict[int, tuple[int, ...]]:
    """The indices of the launches that begin together, by that of each of them; none for launches alone. The last
    starts all."""
    waiting: dict[str, list[int]] = {}
    turns: dict[int, tuple[int, ...]] = {}
    for index, statement in enumerate(statements):
        if not isinstance(statement, LaunchStatement):
            continue
        own = waiting.setdefault(statement.engine, [])
        own.append(index)
        if not statement.starts_with_next:
            turns |= dict.fromkeys(own, tuple(own)) if len(own) > 1 else {}
            waiting[statement.engine] = []
    return turns


def reads(statement: Statement) -> tuple[View, ...]:
    """Every view a statement reads."""
    if isinstance(statement, Copy):
        return () if statement.strips else (statement.source,)
    if isinstance(statement, LaunchStatement):
        return tuple(view for name, view in statement.operands.items() if name != "scratch")
    return tuple(statement.operands.values()) if isinstance(statement, Call) else ()


def writes(statement: Statement) -> tuple[View, ...]:
    """Every view a statement writes."""
    if isinstance(statement, Copy):
        return statement.strips or (statement.destination,)
    if isinstance(statement, LaunchStatement):
        scratch = statement.operands.get("scratch")
        return (statement.result, scratch) if scratch else (statement.result,)
    return (statement.result,) if isinstance(statement, Call) else ()


def touches(statement: Statement) -> list[tuple[View, bool]]:
    """Every view a statement reads, then every one it writes; True for these."""
    return [*((view, False) for view in reads(statement)), *((view, True) for view in writes(statement))]


def load(memory: Array, view: View, base: int) -> Array:
    """A copy of the logical array that lies in `view`, whose buffer begins at byte `base` of `memory` (uint8)."""
    if view.layout is None:
        return _strided(memory, view, base).copy()
    if view.layout.packed:
        bits = 8 // view.layout.fields
        raw = memory[element_places(view, base)] >> (bits * field_numbers(view.layout, view.type.shape))
        return from_field(raw, view.type.dtype)
    raw = memory[byte_places(view, base)].view(view.type.dtype.numpy)
    return np.asarray(raw.reshape(view.type.shape))


def store(memory: Array, view: View, base: int, array: Array) -> None:
    """Write a logical array to where `view` lies; what pads the last blocks is left as it is."""
    if view.layout is None:
        _strided(memory, view, base)[...] = array
        return
    held = np.ascontiguousarray(array, dtype=view.type.dtype.numpy)
    if view.layout.packed:
        _store_fields(memory, element_places(view, base), view.layout, held)
        return
    memory[byte_places(view, base)] = held.reshape(*held.shape, 1).view(np.uint8)


def _store_fields(memory: Array, places: Array, layout: Layout, array: Array) -> None:
    """Write elements to their fields of the bytes at `places`; other fields are left as they are."""
    bits = 8 // layout.fields
    fields = np.broadcast_to(field_numbers(layout, array.shape), array.shape)
    for field_number in range(layout.fields):
        chosen, shift = fields == field_number, bits * field_number
        mask = np.uint8(((1 << bits) - 1) << shift)
        mine = (array[chosen].astype(np.uint8) << shift) & mask
        memory[places[chosen]] = (memory[places[chosen]] & ~mask) | mine


def element_places(view: View, base: int) -> Array:
    """Index of the first byte of every element, int64 of the logical shape, from the view's buffer at byte `base`."""
    shape = view.type.shape
    if view.layout is None:
        offsets = tuple(np.arange(size) * stride for size, stride in zip(shape, view.strides, strict=True))
    else:
        offsets = axis_offsets(view.layout, view.strides, shape)
    places = np.full(shape, base + view.offset, dtype=np.int64)
    for axis, along in enumerate(offsets):
        places += along.reshape([-1 if other == axis else 1 for other in range(len(shape))])
    return places


def byte_places(view: View, base: int) -> Array:
    """Index of every byte of every element: `element_places` with an axis of bytes behind."""
    return element_places(view, base)[..., None] + np.arange(view.type.dtype.numpy.itemsize)


def _strided(memory: Array, view: View, base: int) -> Array:
    start, stop = view.span
    raw = memory[base + start : base + stop]
    return np.ndarray(view.type.shape, view.type.dtype.numpy, buffer=raw.data, strides=view.strides)


def overwritten(call: Call, buffers: Buffers) -> str | None:
    """The operand a placed call writes its result over; None for most."""

    def place(view: View) -> tuple[str, int | None]:
        buffer = buffers[view.buffer]
        return buffer.memory, None if buffer.address is None else buffer.address + view.offset

    for value, view in call.operands.items():
        if view == call.result or (view.buffer != call.result.buffer and place(view) == place(call.result)):
            return value
    return None


def print_statement(program: Program, index: int) -> str:
    """One statement as a line."""
    statement = program.statements[index]
    if isinstance(statement, Begin):
        return f"{program.layers[statement.layer]}:"
    return f"  {index:4d}  {_body(program, statement)}"


def _body(program: Program, statement: Copy | LaunchStatement | Call | Wait) -> str:
    if isinstance(statement, Copy):
        padding = f" padded from {list(statement.before)} with {statement.fill}" if any(statement.before) else ""
        queue = queue_of(statement, program.dma)
        if statement.fills_border:
            fill = f"{list(statement.before)} around {statement.source.type} with {statement.fill}"
            return f"{queue}: fill the border of {print_view(statement.destination)} from {fill}"
        return f"{queue}: copy {print_view(statement.source)} to {print_view(statement.destination)}{padding}"
    if isinstance(statement, LaunchStatement | Call):
        who = statement.engine if isinstance(statement, LaunchStatement) else core_queue(statement.core)
        kinds = "+".join(type(node.operator).__name__ for node in statement.graph.nodes)
        operands = ", ".join(map(print_view, statement.operands.values()))
        held = ", held for the next" if isinstance(statement, LaunchStatement) and statement.starts_with_next else ""
        buffered = statement.buffered.items() if isinstance(statement, LaunchStatement) else ()
        places = (f", {n} {'found' if one.is_loaded else 'loaded'} at {one.place.start:#x}" for n, one in buffered)
        return f"{who}: {kinds} of {operands} into {print_view(statement.result)}{held}{''.join(places)}"
    who = f"{statement.known_to}: " if statement.known_to else ""
    return f"{who}wait for {statement.queue} to finish {statement.statement}"


def print_view(view: View) -> str:
    """A view as text: its buffer, offset, type, layout and strides."""
    place = f"+{view.offset}" if view.offset else ""
    strides = "" if view.is_dense else f" strides {list(view.strides)}"
    layout = f" as {view.layout}" if view.layout is not None else ""
    return f"{view.buffer}{place} {view.type}{layout}{strides}"
