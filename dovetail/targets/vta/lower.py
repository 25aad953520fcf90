"""From a region to VTA's instruction stream: tiles, their traces, places in the SRAMs, and each issued instruction."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from math import prod
from operator import mul

from dovetail.ir.graph import Graph
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d
from dovetail.ir.operators.reduction import MaxPool2d
from dovetail.ir.types import Box
from dovetail.loops import SHIFTS, Allocation, Demand, Event, Issue, Lanes, Pool, Span, Window, algorithm, pools, trace
from dovetail.records import Record
from dovetail.target import crop
from dovetail.targets.vta.config import MOST_PAD, VtaConfig
from dovetail.targets.vta.cost import VtaTiling, capacities, shape, slots_of_use
from dovetail.targets.vta.isa import AluOpcode, Load, Store, VtaMemory
from dovetail.targets.vta.listed import computation, listed, number
from dovetail.targets.vta.mapping import DIGITS, ZEROS, depth, scheduled
from dovetail.targets.vta.writer import (
    InstructionStream,
    InstructionTemplate,
    SlotBuffer,
    StreamWriter,
    Triple,
    VtaLoop,
    VtaRegion,
    rectangles,
    row_major,
    shifted,
)

_MEMORIES = {"INP": VtaMemory.INP, "WGT": VtaMemory.WGT, "ACC": VtaMemory.ACC}
_OPCODES = {
    "largest": AluOpcode.MAX,
    "multiply_by": AluOpcode.MUL,
    "add_number": AluOpcode.ADD,
    "shift_by": AluOpcode.SHR,
    "at_least": AluOpcode.MAX,
    "at_most": AluOpcode.MIN,
    "multiply_each": AluOpcode.MUL,
    "shift_each": AluOpcode.SHR,
    "add_each": AluOpcode.ADD,
    "add_total": AluOpcode.ADD,
    "double_each": AluOpcode.SHR,
}
"""The ALU's operation in each use of it."""


class _InstructionUse:
    """One use of an instruction (mapping.py), appended to a stream as VTA instructions."""

    def __init__(self, writer: StreamWriter, issue: Issue) -> None:
        self._writer, self._operands, self._opcode = writer, issue.operands, _OPCODES.get(issue.instruction)
        self._name = issue.instruction
        if issue.instruction == "double_each" and writer.config.shifts_left:
            self._opcode = AluOpcode.SHL

    def _window(self, name: str) -> Window:
        found = self._operands[name]
        assert isinstance(found, Window), name
        return found

    def _buffer(self, name: str) -> SlotBuffer:
        return self._writer.buffer(self._window(name))

    def _whole(self, *names: str) -> tuple[int, ...]:
        found = [self._operands[name] for name in names]
        assert all(isinstance(value, int) for value in found), names
        return tuple(int(value) for value in found if isinstance(value, int))

    def load(self, filled: str) -> None:
        """A dense window into consecutive entries; nothing when it is there already."""
        buffer = self._buffer(filled)
        if buffer.here:
            return
        first, dims = self._writer.dram(self._window("source"))
        if filled == "weights" and self._writer.constants.taps:
            dims = ((buffer.shape[0], 1),)
        memory = _MEMORIES[buffer.memory]
        entry = self._writer.entry(self._window(filled))
        for offset, rows, width, stride in rectangles(dims):
            written = [Span(buffer.memory, entry, entry + rows * width)] if buffer.memory != "ACC" else []
            self._writer.issue(Load(memory, entry, first + offset, rows, width, stride), writes=written)
            entry += rows * width

    def load_padded(self) -> None:
        """One block of an image with zeros around it."""
        if self._buffer("image").here:
            return
        first, (_, (height, stride), (width, _)) = self._writer.dram(self._window("source"))
        top, bottom, left, right = self._whole("T", "B", "L", "R")
        entry = self._writer.entry(self._window("image"))
        if not height or not width:
            self._zeros(entry, (top + height + bottom) * (left + width + right))
            return
        load = Load(VtaMemory.INP, entry, first, height, width, stride, (top, bottom), (left, right))
        self._writer.issue(load, writes=[Span("INP", load.sram, load.sram + load.entries)])

    def _zeros(self, entry: int, count: int) -> None:
        """Nothing of the image: zeros around an element of zeros, as a LOAD needs an element."""
        while count:
            width = min(count, 2 * MOST_PAD + 1)
            rows = min(count // width, 2 * MOST_PAD + 1)
            pads = [(side // 2, side - side // 2) for side in (rows - 1, width - 1)]
            load = Load(VtaMemory.INP, entry, ZEROS, 1, 1, 1, pads[0], pads[1])
            self._writer.issue(load, writes=[Span("INP", entry, entry + load.entries)])
            entry, count = entry + load.entries, count - load.entries

    def store(self) -> None:
        """The result's entries of OUT to DRAM."""
        first, dims = self._writer.dram(self._window("result"))
        entry = self._writer.entry(self._window("total"))
        for offset, rows, width, stride in rectangles(dims):
            store = Store(VtaMemory.OUT, entry, first + offset, rows, width, stride)
            self._writer.issue(store, reads=[Span("OUT", entry, entry + rows * width)])
            entry += rows * width

    def compute(self) -> None:
        """GEMM or ALU: the nest of the instruction's meaning over the entries of its operands. Where taps of a window
        share matrices, each is an instruction of its own."""
        names, loops, indices = computation(self._name)
        windows = [self._window(name) for name in names]
        values = {name: value for name, value in self._operands.items() if isinstance(value, int)}
        values |= {**dict.fromkeys(loops, 0), **dict(zip(("DOWN", "ACROSS"), self._writer.stride, strict=True))}
        strides = [row_major(self._writer.buffer(window).shape) for window in windows]
        nest = {}
        for loop, extent in loops.items():
            moved, steps = {**values, loop: 1}, [0, 0, 0]
            for place, (own, lie) in enumerate(zip(indices, strides, strict=True)):
                far = (number(index, moved) - number(index, values) for index in own)
                steps[place] = sum(map(mul, far, lie[len(lie) - len(own) :]))
            nest[loop] = VtaLoop(number(extent, values), (steps[0], steps[1], steps[2]))
        entries = [*(self._writer.entry(window) for window in windows), 0, 0]
        taps = self._writer.constants.taps if "weights" in names else ()
        for place, matrix in enumerate(taps):
            down, across = divmod(place, nest["kw"].extent)
            first = entries[1] + down * nest["kh"].step[1] + across * nest["kw"].step[1]
            self._issue([nest["h"], nest["w"]], windows, (entries[0], first, entries[2] + matrix))
        if not taps:
            self._issue(list(nest.values()), windows, (entries[0], entries[1], entries[2]))

    def _issue(self, nest: Sequence[VtaLoop], windows: Sequence[Window], begin: Triple) -> None:
        """The instructions of a nest that begins with these entries of its operands."""
        scalar = self._operands.get("number")
        immediate = self._writer.constants.scalars[scalar] if isinstance(scalar, str) else None
        total, *others = (self._writer.buffer(window).span for window in windows)
        # the entries of OUT change with the accumulators
        read, out = [span for span in others if span.memory != "ACC"], Span("OUT", total.start, total.stop)
        self._writer.compute(InstructionTemplate(self._opcode, self._name == "zero", immediate), nest, begin, read, out)


_WRITE: Mapping[str, Callable[[_InstructionUse], None]] = {
    "load_padded": _InstructionUse.load_padded,
    "load_image": lambda use: use.load("image"),
    "load_ones": lambda use: use.load("ones"),
    "load_weights": lambda use: use.load("weights"),
    "load_matrices": lambda use: use.load("weights"),
    "load_matrix": lambda use: use.load("matrix"),
    "store": _InstructionUse.store,
}


class _TileEvents(Record, dict=True):
    events: tuple[Event, ...]
    origins: Mapping[str, tuple[int, ...]]
    """First index of each argument's leading dimensions in this tile."""

    @cached_property
    def contents(self) -> Mapping[int, Hashable]:
        """Keys of the data loaded into each buffer."""
        loads = [event for event in self.events if isinstance(event, Issue)]
        found = {_filled(load): _key(load, self.origins) for load in loads}
        return {buffer: key for buffer, key in found.items() if buffer is not None and key is not None}

    @cached_property
    def parameters(self) -> Sequence[tuple[Allocation, Window]]:
        """The arrays of one number per channel: the buffer of each, and the part of an argument it is filled with."""
        loads = [event for event in self.events if isinstance(event, Issue) and event.instruction == "load_parameter"]
        if not loads:
            return []
        buffers = {event.buffer: event for event in self.events if isinstance(event, Allocation)}
        found = [(_filled(load), load.operands["source"]) for load in loads]
        return [(buffers[place], source) for place, source in found if place is not None and isinstance(source, Window)]


def lower(placed: VtaRegion, tiling: VtaTiling, config: VtaConfig) -> InstructionStream:
    """The stream that computes a region.

    Raises:
        PlanError: a tile does not fit the SRAMs.
        TargetError: a field of an instruction is too small.
    """
    tiles = list(_tiles(placed.graph, tiling, config, placed.constants.taps))
    room = capacities(shape(placed.graph, config), config)
    writer = StreamWriter(placed, config, _pools(tiles, tiling, room), stride(placed.graph))
    for tile in tiles:
        _write(writer, tile)
    return writer.finish()


def _write(writer: StreamWriter, tile: _TileEvents) -> None:
    writer.origins = tile.origins
    contents = tile.contents
    _load_parameters(writer, tile.parameters, contents)
    early = {buffer.buffer for buffer, _ in tile.parameters}
    for event in tile.events:
        if isinstance(event, Allocation) and event.buffer not in early:
            writer.allocate(event, contents.get(event.buffer))
        elif isinstance(event, Issue) and event.instruction != "load_parameter":
            _WRITE.get(event.instruction, _InstructionUse.compute)(_InstructionUse(writer, event))


_PARAMETERS = "parameters"
"""The name they have together in the ACC memory."""


def _load_parameters(
    writer: StreamWriter, parameters: Sequence[tuple[Allocation, Window]], contents: Mapping[int, Hashable]
) -> None:
    """Load a tile's parameters by one LOAD, ahead of its other instructions: the compute queue has time for it while
    the first operands come. The arrays are of one size and lie behind one another."""
    if not parameters:
        return
    sources = sorted((writer.dram(source), buffer) for buffer, source in parameters)  # no two begin at one place
    buffers = [buffer for _, buffer in sources]
    entry = writer.allocate_together(_PARAMETERS, buffers, tuple(contents[buffer.buffer] for buffer in buffers))
    if entry is None:
        return
    (first, dims), (last, _) = sources[0][0], sources[-1][0]
    for offset, rows, width, stride in rectangles(((len(sources), (last - first) // max(1, len(sources) - 1)), *dims)):
        writer.issue(Load(VtaMemory.ACC, entry, first + offset, rows, width, stride))
        entry += rows * width


def _filled(event: Issue) -> int | None:
    if "source" not in event.operands:
        return None
    windows = [w for name, w in event.operands.items() if isinstance(w, Window) and name != "source"]
    return windows[0].buffer


def boxes(graph: Graph, tiling: VtaTiling, block: int) -> list[Box]:
    """The tiles of the result in the order they are computed."""
    shape = graph.types[graph.outputs[0]].shape
    channels = [(c, min(c + tiling.blocks * block, shape[-1])) for c in range(0, shape[-1], tiling.blocks * block)]
    if len(shape) == 2:
        return [((0, shape[0]), span) for span in channels]
    rows = [(h, min(h + tiling.rows, shape[1])) for h in range(0, shape[1], tiling.rows)]
    columns = [(w, min(w + tiling.columns, shape[2])) for w in range(0, shape[2], tiling.columns)]
    image = [(h, w) for h in rows for w in columns]
    if tiling.channels_first:
        return [((0, shape[0]), h, w, c) for h, w in image for c in channels]
    return [((0, shape[0]), h, w, c) for c in channels for h, w in image]


def _tiles(graph: Graph, tiling: VtaTiling, config: VtaConfig, taps: tuple[int, ...]) -> Iterator[_TileEvents]:
    lanes = Lanes(config.block, config.batch)
    rows = depth(graph, config)
    for box in boxes(graph, tiling, config.block):
        cut = crop(graph, box)
        loops = algorithm(cut.graph, lanes, graph.constants, rows, config.most_shift, config.multiplies)
        events = _events(loops.text, tuple(loops.sizes.items()), config, stride(graph))
        if taps:
            events = tuple(_with_matrices(event, len({*taps})) for event in events)
        yield _TileEvents(events, _origins(graph, cut.reads[graph.inputs[0]], box, config.block))


def _with_matrices(event: Event, count: int) -> Event:
    """The buffer of weights as it is where taps share so many."""
    if not isinstance(event, Allocation) or event.name != "weights":
        return event
    return replace(event, shape=(*event.shape[:-4], count, 1, *event.shape[-2:]))


@lru_cache(maxsize=256)  # tiles of layers alike do the same
def _events(
    text: str, sizes: tuple[tuple[str, int], ...], config: VtaConfig, steps: tuple[int, int]
) -> tuple[Event, ...]:
    """Events of an algorithm of these sizes, whose window moves by so many steps."""
    found = listed(text, config.batch, config.block, steps, dict(sizes))
    return trace(scheduled(text, config.batch, config.block, steps), dict(sizes)) if found is None else found


def stride(graph: Graph) -> tuple[int, int]:
    """The strides of a region's window, rows and columns; 1 where there is none."""
    for node in graph.nodes:
        if isinstance(node.operator, Conv2d | DepthwiseConv2d | MaxPool2d):
            return node.operator.stride
    return 1, 1


def _origins(graph: Graph, read: Box, box: Box, block: int) -> dict[str, tuple[int, ...]]:
    x = (read[-1][0] // block, *(start for start, _ in read[1:-1]))
    y = (box[-1][0] // block, *(start for start, _ in box[1:-1]))
    return {"x": x, "y": y, **dict.fromkeys(("w", "digits", "bias", "scale", *SHIFTS, *DIGITS), y[:1])}


def _key(issue: Issue, origins: Mapping[str, tuple[int, ...]]) -> Hashable | None:
    """Key of the data a load brings; None if it is no load from an argument."""
    source = issue.operands.get("source")
    if not isinstance(source, Window):
        return None
    whole = tuple(value for value in issue.operands.values() if isinstance(value, int))
    return source.array, shifted(source.box, origins.get(source.array, ())), whole


def _pools(tiles: Sequence[_TileEvents], tiling: VtaTiling, rooms: Mapping[str, int]) -> dict[str, Mapping[str, Pool]]:
    """Slots of every memory, of so many entries, for what the tiles put into it.

    What is read again stays: everything if it fits, else what one tile reads, since the next tile may read the same.
    """
    entries: dict[tuple[str, str], int] = {}
    everything: dict[tuple[str, str], set[Hashable]] = {}
    of_a_tile: dict[tuple[str, str], int] = {}
    for tile in tiles:
        contents, here = tile.contents, dict[tuple[str, str], set[Hashable]]()
        parameters = [buffer for buffer, _ in tile.parameters]
        together = {buffer.buffer for buffer in parameters}
        buffers = [event for event in tile.events if isinstance(event, Allocation) and event.buffer not in together]
        wanted = [((buffer.memory, buffer.name), [buffer]) for buffer in buffers]
        for name, held in [*wanted, *([(("ACC", _PARAMETERS), parameters)] if parameters else [])]:
            entries[name] = max(entries.get(name, 0), sum(prod(buffer.shape[:-2]) for buffer in held))
            if keys := tuple(contents[buffer.buffer] for buffer in held if buffer.buffer in contents):
                here.setdefault(name, set()).add(keys)
        for name, found in here.items():
            everything.setdefault(name, set()).update(found)
            of_a_tile[name] = max(of_a_tile.get(name, 0), len(found))
    made = {}
    for memory, room in rooms.items():
        demands = [
            Demand(name, size, slots_of_use(len(everything.get(key, ())), of_a_tile.get(key, 0), size, room))
            for key, size in sorted(entries.items())
            for name in [key[1]]
            if key[0] == memory
        ]
        made[memory] = pools(memory, room, demands, tiling.slots)
    return made
