"""The layers of a network as a mesh takes them: their shapes, how they can be cut, clocks and bytes of pieces."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import ModelError, PlanError
from dovetail.ir.crop import crop
from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.base import Rowwise
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Pad
from dovetail.ir.operators.reduction import MaxPool2d
from dovetail.ir.types import Box, Shape, full_box
from dovetail.kernels.region import Region as Parts
from dovetail.kernels.region import split
from dovetail.mesh.finish import Lines, lines_behind, tail_of
from dovetail.schedule.partition import Region
from dovetail.target.mesh import CoreClocks, Mesh, Work

INPUT = -1
"""The producer of what the network is given."""
MOST_SUMS = 64
"""Into how many parts the sums of a layer are cut at most."""
SUMS_TOGETHER = 512
"""Sums of the MAC array that are finished in one go, or one row of them: the array computes as many meanwhile."""
_LINEAR = (Conv2d, DepthwiseConv2d, FullyConnected)

Image = tuple[int, int, int]
"""Rows, columns and channels of a value; whatever is no image is one row of one column."""


class Lined(enum.IntEnum):
    """How sums are requantised: by no line, by lines, by lines that gain something above zero."""

    NOT, PLAIN, GAINING = range(3)


@dataclass(frozen=True)
class Reading:
    """An operand, of which a piece reads, per axis, from `step * start - lead` on, `span` beyond the last step."""

    name: str
    """In the layer's own graph."""
    value: str
    """As its producer calls it, views resolved."""
    producer: int
    """Index of the layer that computes it, or `INPUT`."""
    image: Image
    itemsize: int
    """Bytes of an element."""
    step: tuple[int, int] = (1, 1)
    span: tuple[int, int] = (1, 1)
    lead: tuple[int, int] = (0, 0)
    """Rows and columns of padding before the image."""
    channels: str = "same"
    """Which channels: the "same" as of the result, those "summed" over, or "all"."""
    given: str = ""
    """As the network calls it: `value`, or a view of it."""


@dataclass(frozen=True)
class MeshLayer:
    """A region of the network as the mesh computes it."""

    index: int
    name: str
    graph: Graph
    """The region's own graph: one result."""
    kind: str
    """"convolution", "depthwise" and "dense" run on the MAC array, "core" on the core."""
    parts: Parts | None
    """Pad, anchor and what comes behind it; None where it has another form."""
    image: Image
    """Of the result."""
    itemsize: int
    """Bytes of an element of the result."""
    summed: int
    """Input channels (or elements) summed over; 1 on the core."""
    unit: int
    """The sums may be cut at multiples of it."""
    kernel: tuple[int, int]
    stride: tuple[int, int]
    readings: tuple[Reading, ...]
    """Of each run-time operand; of an array's layer the first is what is convolved."""
    cuttable: tuple[bool, bool, bool]
    """Rows, columns, channels: whether it can be cut there."""
    origin: str
    """The operator of the user's model."""
    most_sums: int = MOST_SUMS
    """Into how many parts its sums are cut at most."""

    @property
    def on_array(self) -> bool:
        """True where the MAC array computes it."""
        return self.kind != "core"

    @cached_property
    def tail(self) -> Graph | None:
        """What the core computes behind the array; None where the sums are the result, or nothing is on the array."""
        anchor = self.parts.anchor if self.parts else None
        return tail_of(self.graph, anchor) if anchor and self.on_array else None

    @cached_property
    def lines(self) -> Lines | None:
        """By which the whole layer's sums are requantised; None where there are none."""
        anchor = self.parts.anchor if self.parts else None
        return lines_behind(self.tail, self.graph, anchor) if self.tail and anchor else None

    def lined(self, first: int, last: int) -> Lined:
        """How the channels from `first` to before `last` are requantised."""
        lines, anchor = self.lines, self.parts.anchor if self.parts else None
        if lines is None and self.tail is not None and anchor is not None and (first, last) != (0, self.image[2]):
            lines = lines_behind(self.tail, self.graph, anchor, first, last)
        return Lined.NOT if lines is None else Lined.PLAIN if lines.gains is None else Lined.GAINING

    @property
    def constant_bytes(self) -> int:
        """Bytes of weights and parameters of the whole layer."""
        return sum(array.nbytes for array in self.graph.constants.values())

    @property
    def result_bytes(self) -> int:
        """Bytes of the whole result."""
        return prod(self.image) * self.itemsize


def image_of(shape: Shape) -> Image:
    """A value's shape as an image."""
    if len(shape) == 4 and shape[0] == 1:
        return shape[1], shape[2], shape[3]
    return 1, 1, prod(shape)


def layers_of(graph: Graph, regions: Sequence[Region]) -> tuple[MeshLayer, ...]:
    """The layers of a network, views left out.

    Raises:
        ModelError: it keeps states between inferences, or an output is given under another shape only.
    """
    if graph.states:
        raise ModelError(
            "a network with states does not run on a mesh", where=graph.name, hint="use a target that is not a mesh"
        )
    network = _Network(graph)
    found: list[MeshLayer] = []
    for region in regions:
        if region.is_view:
            source = region.graph.inputs[0]
            network.behind[region.output] = network.behind.get(source, source)
        else:
            network.made[region.output] = len(found)
            found.append(network.layer(len(found), region))
    missing = [name for name in graph.outputs if network.behind.get(name, name) not in network.made]
    if missing:
        hint = "take this output out of the model"
        raise ModelError(f"the output '{missing[0]}' is not computed by a layer", where=graph.name, hint=hint)
    return tuple(found)


def output_layers(graph: Graph, layers: Sequence[MeshLayer], regions: Sequence[Region]) -> dict[str, int]:
    """Network output -> the layer that computes it."""
    made = {layer.graph.outputs[0]: layer.index for layer in layers}
    for region in regions:
        if region.is_view and region.graph.inputs[0] in made:
            made[region.output] = made[region.graph.inputs[0]]
    return {name: made[name] for name in graph.outputs}


@dataclass(frozen=True)
class _Network:
    """The whole network while its layers are made."""

    graph: Graph
    behind: dict[str, str] = field(default_factory=dict)
    """View -> what it is a view of."""
    made: dict[str, int] = field(default_factory=dict)
    """Value -> the layer that computes it."""

    def layer(self, index: int, region: Region) -> MeshLayer:
        graph, again = _read_apart(region.graph)
        try:
            parts: Parts | None = split(graph)
        except ValueError:
            parts = None
        anchor = parts.anchor if parts else None
        kind, result = _kind(graph, anchor), graph.types[region.output]
        image = image_of(result.shape)
        summed, unit, kernel, stride = 1, 1, (1, 1), (1, 1)
        if anchor is not None and kind == "dense":
            x = anchor.inputs[0]
            rows, columns, channels = image_of(self.graph.types[self.behind.get(x, x)].shape)
            summed, unit = graph.types[anchor.inputs[1]].shape[1], channels if rows * columns > 1 else 4
        elif anchor is not None and kind != "core":
            types = [graph.types[name] for name in anchor.inputs]
            window = anchor.operator.window(types)
            assert window is not None
            summed, unit, kernel, stride = types[0].shape[3], 4, window.kernel, window.stride
            summed = summed if kind == "convolution" else 1
        names = sorted(
            graph.inputs, key=lambda name: anchor is not None and parts is not None and name != parts.source()
        )
        given = {name: again.get(name, name) for name in names}
        readings = tuple(
            replace(self.reading(name, given[name], graph, parts, kind, image), given=given[name]) for name in names
        )
        itemsize, origin = result.dtype.numpy.itemsize, ", ".join(region.origins)
        form = (kind, parts, image, itemsize, summed, unit, kernel, stride, readings, _cuttable(graph, anchor, kind))
        return MeshLayer(index, region.name, graph, *form, origin)

    def reading(self, name: str, given: str, graph: Graph, parts: Parts | None, kind: str, image: Image) -> Reading:
        """The reading of an operand that the network calls `given`."""
        value, shape = self.behind.get(given, given), graph.types[name].shape
        whole = self.graph.types[value]
        # The network's inputs lie in DRAM as a whole: a view of one is an image of its own.
        source = image_of(shape if value not in self.made and len(shape) == 4 else whole.shape)
        producer, itemsize = self.made.get(value, INPUT), whole.dtype.numpy.itemsize
        operand = (name, value, producer, source, itemsize)
        if parts is None or parts.anchor is None or name != parts.source():
            return Reading(*operand, channels="all" if source != image or parts is None else "same")
        anchor = parts.anchor
        window = anchor.operator.window([graph.types[operand] for operand in anchor.inputs])
        if window is None or anchor.operator.moves_only:
            return Reading(*operand, channels="summed" if kind == "dense" else "all")
        lead = (window.padding[0][0], window.padding[1][0])
        if parts.pad is not None:
            lead = tuple(parts.pad.operator.before[1:3])  # type: ignore[attr-defined]
        channels = "summed" if kind == "convolution" else "all"
        channels = "same" if kind == "depthwise" or _is_pool(anchor, graph) else channels
        return Reading(*operand, window.stride, window.span, lead, channels)


def _is_pool(anchor: Node, graph: Graph) -> bool:
    """True for a window over an image without weights."""
    operator, types = anchor.operator, [graph.types[name] for name in anchor.inputs]
    return len(types) == 1 and not operator.moves_only and operator.window(types) is not None


def _kind(graph: Graph, anchor: Node | None) -> str:
    """Who computes a layer: the array takes int8 images and vectors with int8 weights that are constants."""
    if anchor is None or len(anchor.inputs) < 2 or anchor.inputs[1] not in graph.constants:
        return "core"
    x, w = (graph.types[name] for name in anchor.inputs[:2])
    operator = anchor.operator
    if x.dtype.bits != 8 or w.dtype.bits > 8 or getattr(operator, "weight_zero_point", 0) != 0:
        return "core"
    if isinstance(operator, FullyConnected):
        return "dense" if prod(x.shape[:-1]) == 1 else "core"
    if not isinstance(operator, Conv2d | DepthwiseConv2d) or x.shape[0] != 1 or operator.dilation != (1, 1):
        return "core"
    if isinstance(operator, DepthwiseConv2d):
        return "depthwise" if w.shape[3] == x.shape[3] else "core"
    return "convolution" if operator.groups([x, w]) == 1 else "core"


def _read_apart(graph: Graph) -> tuple[Graph, dict[str, str]]:
    """The region with a name of its own for what is both convolved and read behind the convolution, since pieces read
    different parts of it; and new name -> value."""
    users = graph.users()
    types, nodes, again = dict(graph.types), list(graph.nodes), {}
    for name in graph.inputs:
        readers = users[name]
        if len(readers) > 1 and any(isinstance(user.operator, (*_LINEAR, Pad)) for user in readers):
            other = f"{name}_again"
            again[other], types[other] = name, types[name]
            for place, node in enumerate(nodes):
                if name in node.inputs and not isinstance(node.operator, (*_LINEAR, Pad)):
                    nodes[place] = replace(node, inputs=tuple(other if i == name else i for i in node.inputs))
    if not again:
        return graph, again
    return replace(graph, inputs=(*graph.inputs, *again), nodes=tuple(nodes), types=types), again


def _cuttable(graph: Graph, anchor: Node | None, kind: str) -> tuple[bool, bool, bool]:
    """Where cropping works: tried with the first element of each axis."""
    if kind != "core":
        return kind != "dense", kind != "dense", True
    shape = graph.types[graph.outputs[0]].shape
    alike = all(graph.types[name].shape == shape for name in graph.inputs)
    if len(shape) != 4 or not (alike if anchor is None else _is_pool(anchor, graph)):
        return False, False, False
    return _crops(graph, 1), _crops(graph, 2), _crops(graph, 3)


def _crops(graph: Graph, axis: int) -> bool:
    box = list(full_box(graph.types[graph.outputs[0]].shape))
    if box[axis] == (0, 1):
        return False
    box[axis] = (0, 1)
    try:
        crop(graph, tuple(box))
    except ValueError:
        return False
    return True


def core_reads(layer: MeshLayer) -> int:
    """Elements the core reads for each element of the result, of a layer the array does not compute."""
    taps, anchor, graph = 1, layer.parts.anchor if layer.parts else None, layer.graph
    if anchor is not None:
        types, elements = [graph.types[name] for name in anchor.inputs], graph.types[graph.outputs[0]].elements
        window = anchor.operator.window(types)
        if window is not None and _is_pool(anchor, graph):
            taps = window.kernel[0] * window.kernel[1]
        elif elements:
            taps = max(1, anchor.operator.macs(types) // elements)
    return taps + len(layer.readings) - 1


Ints = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Cut:
    """Into how many parts each axis is cut."""

    rows: int = 1
    columns: int = 1
    channels: int = 1
    sums: int = 1

    @property
    def pieces(self) -> int:
        """Number of pieces."""
        return self.rows * self.columns * self.channels * self.sums


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of pieces along each axis, one entry per piece (or per candidate cut)."""

    rows: Ints
    columns: Ints
    channels: Ints
    sums: Ints
    """Elements of the axis summed over."""
    parts: Ints
    """Parts of the sums: with more than one, 32-bit sums go from piece to piece."""
    place: Ints | None = None
    """Which of those parts; None for the last, which gives results."""
    lined: Ints | None = None
    """How a piece's sums are requantised, as `Lined`; None where that is as for the whole layer."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Clocks and bytes of pieces, one entry each."""

    clocks: Ints
    """From all operands there to the result complete."""
    floor: Ints
    """Clocks of the multiply-accumulates alone; of the core's layers all."""
    received: Ints
    """Bytes of operands."""
    sent: Ints
    """Bytes of the result."""
    fixed: Ints
    """Bytes of memory for code, stack, constants, the row of sums and two results."""
    slot: Ints
    """Bytes for one input's first operand."""
    others: Ints
    """Bytes for one input's other operands and partial sums, as many slots as each needs counted."""
    constants: Ints
    """Bytes of `fixed` that are weights and parameters."""


@dataclass(frozen=True)
class Frontier:
    """The cuts of a layer none of which is better than another: more pieces, less time."""

    cuts: tuple[Cut, ...]
    pieces: Ints
    """Ascending."""
    clocks: Ints
    """Descending: the longest piece with its communication."""


def work_of(layer: MeshLayer, sizes: Sizes) -> Work:
    """A MAC array's work on pieces."""
    box = (sizes.rows, sizes.columns, sizes.channels, sizes.sums)
    return Work(layer.kind, *box, layer.kernel, layer.stride, *_windows(layer.readings[0], sizes))


def _windows(reading: Reading, sizes: Sizes) -> tuple[Ints, Ints]:
    """Rows and columns of an operand that pieces read, its padding included."""
    (down, right), (high, wide) = reading.step, reading.span
    return (sizes.rows - 1) * down + high, (sizes.columns - 1) * right + wide


def costs_of(layer: MeshLayer, sizes: Sizes, mesh: Mesh, slots: tuple[int, ...]) -> Costs:
    """Clocks and bytes of pieces.

    Args:
        layer: what is cut.
        sizes: of the pieces.
        mesh: its elements.
        slots: per operand of the layer, how many inputs' worth of it a piece holds.
    """
    box = sizes.rows * sizes.columns * sizes.channels
    last = np.where(sizes.parts > 1, 4, layer.itemsize)
    others, received = np.zeros_like(box), np.zeros_like(box)
    for reading, count in zip(layer.readings[1:], slots[1:], strict=True):
        size = (box if reading.channels == "same" else prod(reading.image)) * reading.itemsize
        others, received = others + count * size, received + size
    partial = np.where(sizes.parts > 1, 4 * box, 0)
    others, received = others + slots[0] * partial, received + partial
    first, reads = _first_operand(layer, sizes)
    received = received + reads
    if mesh.pieces is not None:
        clocks = floor = np.array([mesh.pieces.price(graph) for graph in _first_pieces(layer, sizes)], np.int64)
        constants = layer.constant_bytes * sizes.channels // max(layer.image[2], 1) if layer.parts else 0 * box
        constants = np.where(constants > 0, constants, layer.constant_bytes)
        slot, rest = first, first + others + last * box  # while it is computed, all lies in buffers of its own
    elif layer.on_array:
        work = work_of(layer, sizes)
        together = rows_together(layer, sizes, mesh)
        clocks = np.ceil(by_turns(layer, sizes, mesh, together)).astype(np.int64)
        floor = mesh.mac.compute(work)
        constants = mesh.mac.weights(work) + 12 * sizes.channels
        slot, rest = (mesh.mac.operand(work), mesh.mac.row_sums(work))
        rest = rest * together * np.where(together < sizes.rows, 2, 1)
        rest += together * sizes.columns * sizes.channels if len(layer.readings) > 1 else 0
        if layer.kind == "dense":
            slot, rest = reads, rest + slot
    else:
        clocks = floor = np.ceil(core_clocks(layer, sizes, mesh.core)).astype(np.int64)
        constants, slot, rest = np.full_like(box, layer.constant_bytes), first, np.zeros_like(box)
    fixed = mesh.code + mesh.stack + constants + rest + 2 * last * box
    return Costs(clocks, floor, received, last * box, fixed, slot, others, constants)


def rows_together(layer: MeshLayer, sizes: Sizes, mesh: Mesh) -> Ints:
    """Rows of pieces of these sizes whose sums are finished in one go while the array computes the next: as many goes
    as balance what is not computed beside each other against what each go costs."""
    row = sizes.columns * sizes.channels
    apart = np.minimum(mesh.mac.clocks(work_of(layer, sizes)), sizes.rows * row * mesh.core.finished)
    turns = np.maximum(1, np.rint(np.sqrt(apart / max(mesh.core.turn, 1.0)))).astype(np.int64)
    most = np.maximum(1, SUMS_TOGETHER // row)
    wanted = np.minimum(most, -(-sizes.rows // turns))
    for near in (2, -2, 1, -1, 0):  # rather so that all goes are alike
        other = wanted + near
        wanted = np.where((other > 0) & (other <= most) & (sizes.rows % np.maximum(other, 1) == 0), other, wanted)
    return np.asarray(wanted, np.int64)


def by_turns(layer: MeshLayer, sizes: Sizes, mesh: Mesh, together: Ints) -> NDArray[np.float64]:
    """Clocks of pieces of these sizes: the core finishes some rows while the array computes the next."""
    turns, array = -(-sizes.rows // together), mesh.mac.clocks(work_of(layer, sizes))
    core = finishing(layer, sizes, mesh.core, turns)
    turns = np.where(core > 0, turns, 1)
    each = (array + core + (turns - 1) * np.maximum(array, core)) / turns
    return np.asarray(each + mesh.core.handling + turns * (turns > 1) * mesh.core.turn)


def finishing(layer: MeshLayer, sizes: Sizes, core: CoreClocks, turns: Ints) -> NDArray[np.float64]:
    """Clocks of the core behind the array for pieces of these sizes, in so many turns."""
    box, groups = sizes.rows * sizes.columns * sizes.channels, -(-sizes.channels // 4)
    place = sizes.parts - 1 if sizes.place is None else sizes.place
    passed, before = place < sizes.parts - 1, place > 0
    lined = layer.lined(0, layer.image[2]) if sizes.lined is None else sizes.lined
    pixels, each = sizes.rows * sizes.columns, core.finished + core.gaining * (lined == Lined.GAINING)
    by_lines = 4 * pixels * groups * each + turns * groups * (pixels > turns) * core.group
    last = np.where((lined != Lined.NOT) & (sizes.parts == 1), by_lines, box * core.without_lines)
    last = last + box * core.added * (len(layer.readings) - 1) if layer.tail else 0.0 * box
    return np.where(passed, box * core.passed, last) + box * before * core.joined


def core_clocks(layer: MeshLayer, sizes: Sizes, core: CoreClocks) -> NDArray[np.float64]:
    """Clocks of pieces of these sizes that the core computes alone."""
    anchor, taps = layer.parts.anchor if layer.parts else None, core_reads(layer)
    each = taps * core.read
    if anchor is not None and _is_pool(anchor, layer.graph):
        mean = taps * core.averaged + core.result + core.divided * (taps & (taps - 1) > 0)
        each = taps * core.compared if isinstance(anchor.operator, MaxPool2d) else mean
    elif any(isinstance(node.operator, Rowwise) for node in layer.graph.nodes):
        each = core.row
    elif all(node.operator.moves_only for node in layer.graph.nodes):
        each = core.moved
    return np.asarray(sizes.rows * sizes.columns * sizes.channels * each + core.handling)


def _first_pieces(layer: MeshLayer, sizes: Sizes) -> Iterator[Graph]:
    """The computation of pieces of these sizes that begin where the result does."""
    shape = layer.graph.types[layer.graph.outputs[0]].shape
    for rows, columns, channels in zip(
        sizes.rows.tolist(), sizes.columns.tolist(), sizes.channels.tolist(), strict=True
    ):
        box = _box(shape, rows, columns, channels)
        yield layer.graph if box == full_box(shape) else crop(layer.graph, box).graph


def _box(shape: Shape, rows: int, columns: int, channels: int) -> Box:
    """The first elements of a result; all of one that is no image and no vector."""
    if len(shape) == 4 and shape[0] == 1:
        return (0, 1), (0, rows), (0, columns), (0, channels)
    return ((0, 1), (0, channels)) if len(shape) == 2 and shape[0] == 1 else full_box(shape)


def _first_operand(layer: MeshLayer, sizes: Sizes) -> tuple[Ints, Ints]:
    """Bytes of the first operand with its padding, and of what is received of it."""
    reading = layer.readings[0]
    height, width, depth = reading.image
    rows, columns = _windows(reading, sizes)
    if reading.channels == "all":
        rows, columns, channels = (np.full_like(sizes.rows, size) for size in reading.image)
    elif layer.kind == "dense":
        # whole rows of the image that hold the elements summed over
        rows = np.minimum(height, -(-sizes.sums // (width * depth)) + (sizes.parts > 1)) if height > 1 else sizes.rows
        columns, channels = np.full_like(rows, width), sizes.sums if height * width == 1 else np.full_like(rows, depth)
    else:
        channels = sizes.channels if reading.channels == "same" else sizes.sums
    padded = rows * columns * channels * reading.itemsize
    return padded, np.minimum(rows, height) * np.minimum(columns, width) * channels * reading.itemsize


def grain(layer: MeshLayer, mesh: Mesh) -> tuple[int, int, int]:
    """Elements along rows, columns and channels that sizes of parts are multiples of, but for the last part."""
    if mesh.pieces is not None:
        return mesh.pieces.grain(layer.graph)
    step = mesh.mac.dense_outputs if layer.kind == "dense" else mesh.mac.rows
    return 1, mesh.mac.columns if layer.on_array else 1, step


def grains(layer: MeshLayer, mesh: Mesh) -> tuple[int, int, int]:
    """How many there are along each axis."""
    rows, columns, channels = (-(-size // step) for size, step in zip(layer.image, grain(layer, mesh), strict=True))
    return rows, columns, channels


def largest(layer: MeshLayer, mesh: Mesh, axis: int, parts: Ints) -> Ints:
    """Size of the largest part along an axis, for numbers of parts."""
    if not layer.cuttable[axis]:
        return np.full(len(parts), layer.image[axis])
    size = -(-grains(layer, mesh)[axis] // parts) * grain(layer, mesh)[axis]
    return np.asarray(np.minimum(size, layer.image[axis]))


def part_counts(total: int) -> Ints:
    """Numbers of parts worth trying: of those with equally large parts, the fewest."""
    sizes = np.unique(-(-total // np.arange(1, total + 1)))
    return np.unique(-(-total // sizes))


def spatial_counts(layer: MeshLayer, mesh: Mesh) -> list[Ints]:
    """Numbers of parts worth trying along rows, columns and channels."""
    free = zip(grains(layer, mesh), layer.cuttable, strict=True)
    return [part_counts(total) if may else np.array([1]) for total, may in free]


def candidates(layer: MeshLayer, mesh: Mesh) -> tuple[NDArray[np.int64], Sizes]:
    """Every cut worth trying, [cuts, 4] rows, columns, channels, sums, and the size of its largest piece."""
    groups = -(-layer.summed // layer.unit)
    spatial = spatial_counts(layer, mesh)
    if mesh.pieces is not None:  # engines give whole results; columns are cut where there are too few rows
        spatial[1] = spatial[1] if len(spatial[0]) == 1 else spatial[1][:1]
    sums = part_counts(groups) if layer.kind != "depthwise" and mesh.pieces is None else np.array([1])
    counts = (*spatial, sums[sums <= layer.most_sums])
    grid = np.stack(np.meshgrid(*counts, indexing="ij"), axis=-1).reshape(-1, 4)
    summed = np.minimum(-(-groups // grid[:, 3]) * layer.unit, layer.summed)
    rows, columns, channels = (largest(layer, mesh, axis, grid[:, axis]) for axis in range(3))
    return grid, Sizes(rows, columns, channels, summed, grid[:, 3])


def frontier(layer: MeshLayer, mesh: Mesh, slots: tuple[int, ...], most: int) -> Frontier:
    """The cuts of a layer worth choosing from.

    Args:
        layer: what is cut.
        mesh: its elements.
        slots: per operand, how many inputs' worth a piece holds.
        most: pieces there may be.

    Raises:
        PlanError: even the smallest piece does not fit an element; says which, how many bytes, and the levers.
    """
    grid, sizes = candidates(layer, mesh)
    costs = costs_of(layer, sizes, mesh, slots)
    memory = costs.fixed + slots[0] * costs.slot + costs.others
    pieces = grid.prod(axis=1)
    fits = memory <= mesh.usable
    if not fits.any():
        raise _too_large(layer, sizes, costs, memory, mesh)
    longest = np.maximum(costs.clocks, np.ceil(np.maximum(costs.received, costs.sent) / mesh.rates.port))
    kept = np.nonzero(fits & (pieces <= most))[0]
    # ties go to fewer parts of the sums, then to less received
    kept = kept[np.lexsort((costs.received[kept], grid[kept, 3], longest[kept], pieces[kept]))]
    best = np.minimum.accumulate(longest[kept]) if len(kept) else longest[kept]
    kept = kept[np.concatenate(([True], best[1:] < best[:-1]))[: len(kept)]]
    cuts = tuple(Cut(*(int(count) for count in grid[index])) for index in kept)
    return Frontier(cuts, pieces[kept], longest[kept].astype(np.int64))


def frontier_or_empty(layer: MeshLayer, mesh: Mesh, slots: tuple[int, ...], most: int) -> Frontier:
    """As `frontier`; without cuts where not even the smallest piece fits."""
    try:
        return frontier(layer, mesh, slots, most)
    except PlanError:
        return Frontier((), np.zeros(0, np.int64), np.zeros(0, np.int64))


def _too_large(layer: MeshLayer, sizes: Sizes, costs: Costs, memory: Ints, mesh: Mesh) -> PlanError:
    """The message about a layer that no cut makes small enough."""
    least = int(memory.argmin())
    parts = f"constants {costs.constants[least]}, operands {costs.slot[least] + costs.others[least]}"
    sums = costs.fixed[least] - costs.constants[least] - 2 * costs.sent[least] - mesh.code - mesh.stack
    return PlanError(
        f"the smallest piece ({sizes.rows[least]}x{sizes.columns[least]} pixels of {sizes.channels[least]} channels, "
        f"{sizes.sums[least]} summed) takes {int(memory[least])} bytes, an element has {mesh.usable} ({parts}, "
        f"results {2 * costs.sent[least]}, a row of sums {sums}, code and stack {mesh.code + mesh.stack})",
        where=f"{layer.name} ({layer.origin})" if layer.origin else layer.name,
        hint="use elements with more memory (Mesh.usable), keep less for code (Mesh.code) or stack, use --objective "
        "latency (one slot per operand), or make the layer narrower",
    )


def bounds(total: int, parts: int, unit: int = 1) -> Ints:
    """Where parts of nearly equal size begin and end, in whole units: [parts + 1]."""
    units = -(-total // unit)
    return np.minimum(np.arange(parts + 1, dtype=np.int64) * units // parts * unit, total)
