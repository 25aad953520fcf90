"""The layers of a network as a mesh takes them: their shapes, and along which axes they can be cut."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import ModelError
from dovetail.ir.crop import crop
from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.arithmetic import Add, Clip, Requantize
from dovetail.ir.operators.linear import Linear
from dovetail.ir.requantisation.bounds import weight_sums
from dovetail.ir.requantisation.lines import ChannelLines, lines_of
from dovetail.ir.types import Array, Box, DType, Shape, TensorType, full_box
from dovetail.kernels.scope import KernelScope as Parts
from dovetail.kernels.scope import split
from dovetail.records import Record, field
from dovetail.schedule.region import Region

INPUT = -1
"""The producer of the network's inputs."""
SUMS, FOLDED = "row_of_sums", "folded_bias"
"""Names of the operands of what the core does behind the array."""
MOST_SUMS = 64
"""Into how many parts the sums of a layer are cut at most."""

Show = Callable[[str], None]
"""Tells a user what is being done now."""
Ints = NDArray[Any]
"""Numbers of layers, pieces or elements."""

Image = tuple[int, int, int]
"""Rows, columns and channels of a value; whatever is no image is one row of one column."""


class LineUse(enum.IntEnum):
    """How sums are requantised: by no line, by lines, by lines that gain something above zero."""

    NOT, PLAIN, GAINING = range(3)


class OperandRead(Record):
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
    view: str = ""
    """As the network calls it: `value`, or a view of it."""


class MeshLayer(Record, dict=True):
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
    """Image of the result."""
    itemsize: int
    """Bytes of an element of the result."""
    summed: int
    """Input channels (or elements) summed over; 1 on the core."""
    unit: int
    """The sums may be cut at multiples of it."""
    kernel: tuple[int, int]
    stride: tuple[int, int]
    readings: tuple[OperandRead, ...]
    """A reading for each run-time operand; the first of an array's layer is the convolved one."""
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

    @property
    def result(self) -> TensorType:
        """Type of the result."""
        return self.graph.types[self.graph.outputs[0]]

    @property
    def anchor(self) -> Node | None:
        """The operator that is not pointwise; None where there is none."""
        return self.parts.anchor if self.parts else None

    @property
    def one_slot(self) -> tuple[int, ...]:
        """One slot for each operand."""
        return (1,) * len(self.readings)

    @cached_property
    def tail(self) -> Graph | None:
        """The core's work behind the array; None where the sums are the result, or nothing is on the array."""
        return tail_of(self.graph, self.anchor) if self.anchor and self.on_array else None

    def _found_lines(self, first: int, last: int) -> ChannelLines | None:
        """Lines for some channels alone, where a requantisation to int8 stands first behind the sums."""
        tail, anchor = self.tail, self.anchor
        if tail is None or anchor is None or len(tail.nodes) < 3:
            return None
        begin, users, operator = tail.nodes[:3], tail.users(), tail.nodes[1].operator
        is_chain = all(b.inputs[0] == a.output and len(users[a.output]) == 1 for a, b in pairwise(begin))
        if not is_chain or not isinstance(operator, Requantize) or begin[2].operator != Clip(-128, 127, DType.INT8):
            return None
        most = 128 if self.graph.types[anchor.inputs[0]].dtype.signed else 255
        folded, reach = tail.constants[FOLDED], most * np.add(*_weight_sums(self.graph, anchor))
        parameters = (np.broadcast_to(tail.constants[name], folded.shape) for name in begin[1].inputs[1:])
        return lines_of(operator, *(one[first:last] for one in (*parameters, folded, reach)))

    @cached_property
    def _lines(self) -> ChannelLines | None:
        """Lines of the whole layer."""
        return self._found_lines(0, self.image[2])

    def lines(self, first: int, last: int) -> ChannelLines | None:
        """By which the sums of the channels from `first` to before `last` are requantised: those of the whole layer if
        it has them, so that its pieces share a program; None where there are none."""
        return self._lines.of(first, last) if self._lines else self._found_lines(first, last)

    def line_use(self, first: int, last: int) -> LineUse:
        """How the channels from `first` to before `last` are requantised."""
        lines = self.lines(first, last)
        return LineUse.NOT if lines is None else LineUse.PLAIN if lines.gains is None else LineUse.GAINING

    @property
    def constant_bytes(self) -> int:
        """Bytes of weights and parameters of the whole layer."""
        return sum(array.nbytes for array in self.graph.constants.values())

    @property
    def result_bytes(self) -> int:
        """Bytes of the whole result."""
        return prod(self.image) * self.itemsize


def _weight_sums(graph: Graph, anchor: Node) -> tuple[Array, Array]:
    return weight_sums(np.moveaxis(graph.constants[anchor.inputs[1]], anchor.operator.weight_axis or 0, 0))


def tail_of(graph: Graph, anchor: Node) -> Graph | None:
    """The operators behind the sums, for one row of them; None where there are none."""
    positive, negative = _weight_sums(graph, anchor)
    folded = -anchor.operator.input_zero_point * (positive - negative)  # type: ignore[attr-defined]
    if len(anchor.inputs) > 2:
        folded = folded + graph.constants[anchor.inputs[2]]
    behind = graph.nodes[[node.output for node in graph.nodes].index(anchor.output) + 1 :]
    if not behind and not folded.any():
        return None
    shape = graph.types[anchor.output].shape
    row = (1, 1, *shape[2:]) if len(shape) == 4 else shape

    def narrowed(kind: TensorType) -> TensorType:
        return TensorType(row, kind.dtype) if kind.shape == shape else kind

    nodes = (Node(Add(), (SUMS, FOLDED), anchor.output), *behind)
    read = dict.fromkeys(name for node in nodes for name in node.inputs)
    constants = {name: graph.constants[name] for name in read if name in graph.constants}
    names = {*read, *(node.output for node in nodes)}
    types = {n: kind if n in constants else narrowed(kind) for n, kind in graph.types.items() if n in names}
    types |= {SUMS: TensorType(row, DType.INT32), FOLDED: TensorType(folded.shape, DType.INT32)}
    constants[FOLDED] = folded.astype(np.int32)
    inputs = (SUMS, *(name for name in graph.inputs if name in read))
    return Graph("row", inputs, graph.outputs, nodes, types, constants)


def unseen(now: str) -> None:
    """Show nobody what is being done."""


def image_of(shape: Shape) -> Image:
    """A value's shape as an image."""
    if len(shape) == 4 and shape[0] == 1:
        return shape[1], shape[2], shape[3]
    return 1, 1, prod(shape)


def box_of(shape: Shape, *spans: tuple[int, int]) -> Box:
    """A box of a value by its rows, columns and channels; all of one that is no image and no vector."""
    if len(shape) == 4 and shape[0] == 1:
        return (0, 1), *spans
    return ((0, 1), spans[2]) if len(shape) == 2 and shape[0] == 1 else full_box(shape)


def layers_of(graph: Graph, regions: Sequence[Region]) -> tuple[MeshLayer, ...]:
    """The layers of a network, views left out.

    Raises:
        ModelError: it keeps states between inferences, or an output is given under another shape only.
    """
    if graph.states:
        hint = "use a target that is not a mesh"
        raise ModelError("a network with states does not run on a mesh", where=graph.name, hint=hint)
    network = _MeshLayerBuilder(graph)
    layers: list[MeshLayer] = []
    for region in regions:
        if region.is_view:
            network.roots[region.output] = network.root(region.graph.inputs[0])
        else:
            network.producers[region.output] = len(layers)
            layers.append(network.layer(len(layers), region))
    missing = [name for name in graph.outputs if network.root(name) not in network.producers]
    if missing:
        hint = "take this output out of the model"
        raise ModelError(f"the output '{missing[0]}' is not computed by a layer", where=graph.name, hint=hint)
    return tuple(layers)


class MeshNetwork(Record):
    """A network as a mesh takes it."""

    graph: Graph
    layers: tuple[MeshLayer, ...]
    outputs: Mapping[str, int]
    """Network output -> the layer that computes it."""

    @property
    def results(self) -> frozenset[int]:
        """The layers whose results the network gives."""
        return frozenset(self.outputs.values())


def network_of(graph: Graph, regions: Sequence[Region]) -> MeshNetwork:
    """A network in layers; arguments and errors as of `layers_of`."""
    layers = layers_of(graph, regions)
    producers = {layer.graph.outputs[0]: layer.index for layer in layers}
    for region in regions:
        if region.is_view and region.graph.inputs[0] in producers:
            producers[region.output] = producers[region.graph.inputs[0]]
    return MeshNetwork(graph, layers, {name: producers[name] for name in graph.outputs})


class _MeshLayerBuilder(Record):
    """The whole network while its layers are made."""

    graph: Graph
    roots: dict[str, str] = field(default_factory=dict)
    """View -> the value it is a view of."""
    producers: dict[str, int] = field(default_factory=dict)
    """Value -> the layer that computes it."""

    def root(self, name: str) -> str:
        """The value itself, or the one it is a view of."""
        return self.roots.get(name, name)

    def layer(self, index: int, region: Region) -> MeshLayer:
        graph, parts, copies = _read_apart(region.graph)
        anchor = parts.anchor if parts else None
        kind, result = _kind(graph, anchor), graph.types[region.output]
        summed, unit, kernel, stride = 1, 1, (1, 1), (1, 1)
        if anchor is not None and kind != "core":
            types = [graph.types[name] for name in anchor.inputs]
            window = anchor.operator.window(types)
            if window is None:
                rows, columns, channels = image_of(self.graph.types[self.root(anchor.inputs[0])].shape)
                summed, unit = types[1].shape[1], channels if rows * columns > 1 else 4
            else:
                summed, unit = types[0].shape[3] if kind == "convolution" else 1, 4
                kernel, stride = window.kernel, window.stride
        first = parts.source() if parts and parts.anchor else ""
        names = sorted(graph.inputs, key=lambda name: bool(first) and name != first)
        image = image_of(result.shape)
        readings = tuple(self._reading(name, copies.get(name, name), graph, parts, kind, image) for name in names)
        itemsize, origin = result.dtype.numpy.itemsize, ", ".join(region.origins)
        form = (kind, parts, image, itemsize, summed, unit, kernel, stride, readings, _cuttable(graph, anchor, kind))
        return MeshLayer(index, region.name, graph, *form, origin)

    def _reading(self, name: str, view: str, graph: Graph, parts: Parts | None, kind: str, image: Image) -> OperandRead:
        """The reading of an operand that the network calls `view`."""
        value, shape = self.root(view), graph.types[name].shape
        whole, producer = self.graph.types[value], self.producers.get(value, INPUT)
        # The network's inputs lie in DRAM as a whole: a view of one is an image of its own.
        source = image_of(shape if producer == INPUT and len(shape) == 4 else whole.shape)
        reading = OperandRead(name, value, producer, source, whole.dtype.numpy.itemsize, view=view)
        anchor = parts.anchor if parts else None
        if parts is None or anchor is None or name != parts.source():
            return replace(reading, channels="all" if source != image or parts is None else "same")
        window = anchor.operator.window([graph.types[operand] for operand in anchor.inputs])
        if window is None or anchor.operator.moves_only:
            return replace(reading, channels="summed" if kind == "dense" else "all")
        lead = (window.padding[0][0], window.padding[1][0])
        if parts.pad is not None:
            lead = tuple(parts.pad.operator.before[1:3])  # type: ignore[attr-defined]
        same = kind == "depthwise" or is_pool(anchor, graph)
        channels = "same" if same else "summed" if kind == "convolution" else "all"
        return replace(reading, step=window.stride, span=window.span, lead=lead, channels=channels)


def is_pool(anchor: Node, graph: Graph) -> bool:
    """True for a window over an image without weights."""
    operator, types = anchor.operator, [graph.types[name] for name in anchor.inputs]
    return len(types) == 1 and not operator.moves_only and operator.window(types) is not None


def _kind(graph: Graph, anchor: Node | None) -> str:
    """`MeshLayer.kind`: the array takes int8 images and vectors with int8 weights that are constants."""
    operator = anchor.operator if anchor else None
    if anchor is None or not isinstance(operator, Linear) or anchor.inputs[1] not in graph.constants:
        return "core"
    x, w = (graph.types[name] for name in anchor.inputs[:2])
    if x.dtype.bits != 8 or w.dtype.bits > 8 or operator.weight_zero_point:
        return "core"
    window = operator.window([x, w])
    if window is None:
        return "dense" if prod(x.shape[:-1]) == 1 else "core"
    if x.shape[0] != 1 or window.dilation != (1, 1) or w.shape[3] != x.shape[3]:
        return "core"
    return "depthwise" if operator.weight_axis == 3 else "convolution"


def _parts(graph: Graph) -> Parts | None:
    try:
        return split(graph)
    except ValueError:
        return None


def _read_apart(graph: Graph) -> tuple[Graph, Parts | None, dict[str, str]]:
    """A region and its parts; a value that a window moves over and that is read behind it too has a second name there,
    since pieces read different parts of it. Also: second name -> value."""
    parts, users = _parts(graph), graph.users()
    weighted = parts is not None and parts.anchor is not None and parts.anchor.operator.weight_axis is not None
    windows = [node for node in (parts.pad, parts.anchor if weighted else None) if node] if parts else []
    shared = [name for name in graph.inputs if len(users[name]) > 1 and any(name in node.inputs for node in windows)]
    if not shared:
        return graph, parts, {}
    copies = {name: f"{name}_again" for name in shared}
    nodes = tuple(
        node if node in windows else replace(node, inputs=tuple(copies.get(name, name) for name in node.inputs))
        for node in graph.nodes
    )
    types = {**graph.types, **{copy: graph.types[name] for name, copy in copies.items()}}
    graph = replace(graph, inputs=(*graph.inputs, *copies.values()), nodes=nodes, types=types)
    return graph, _parts(graph), {copy: name for name, copy in copies.items()}


def _cuttable(graph: Graph, anchor: Node | None, kind: str) -> tuple[bool, bool, bool]:
    """Whether cropping works along each axis: tried with its first element."""
    if kind != "core":
        return kind != "dense", kind != "dense", True
    shape = graph.types[graph.outputs[0]].shape
    alike = all(graph.types[name].shape == shape for name in graph.inputs)
    if len(shape) != 4 or not (alike if anchor is None else is_pool(anchor, graph)):
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
    taps, anchor, graph = 1, layer.anchor, layer.graph
    if anchor is not None:
        types, elements = [graph.types[name] for name in anchor.inputs], graph.types[graph.outputs[0]].elements
        window = anchor.operator.window(types)
        if window is not None and is_pool(anchor, graph):
            taps = window.kernel[0] * window.kernel[1]
        elif elements:
            taps = max(1, anchor.operator.macs(types) // elements)
    return taps + len(layer.readings) - 1
