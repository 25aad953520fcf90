"""The layers of a network as a mesh takes them: their shapes, and along which axes they can be cut."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

from numpy.typing import NDArray

from dovetail.errors import ModelError
from dovetail.guests.mesh.finish import lines_behind, tail_of
from dovetail.ir.crop import crop
from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Pad
from dovetail.ir.requantisation.lines import ChannelLines
from dovetail.ir.types import Shape, full_box
from dovetail.kernels.region import RegionParts as Parts
from dovetail.kernels.region import split
from dovetail.schedule.region import Region

INPUT = -1
"""The producer of what the network is given."""
MOST_SUMS = 64
"""Into how many parts the sums of a layer are cut at most."""
_LINEAR = (Conv2d, DepthwiseConv2d, FullyConnected)

Ints = NDArray[Any]
"""Numbers of layers, pieces or elements."""

Image = tuple[int, int, int]
"""Rows, columns and channels of a value; whatever is no image is one row of one column."""


class LineUse(enum.IntEnum):
    """How sums are requantised: by no line, by lines, by lines that gain something above zero."""

    NOT, PLAIN, GAINING = range(3)


@dataclass(frozen=True)
class OperandRead:
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
    readings: tuple[OperandRead, ...]
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
    def lines(self) -> ChannelLines | None:
        """By which the whole layer's sums are requantised; None where there are none."""
        anchor = self.parts.anchor if self.parts else None
        return lines_behind(self.tail, self.graph, anchor) if self.tail and anchor else None

    def lined(self, first: int, last: int) -> LineUse:
        """How the channels from `first` to before `last` are requantised."""
        lines, anchor = self.lines, self.parts.anchor if self.parts else None
        if lines is None and self.tail is not None and anchor is not None and (first, last) != (0, self.image[2]):
            lines = lines_behind(self.tail, self.graph, anchor, first, last)
        return LineUse.NOT if lines is None else LineUse.PLAIN if lines.gains is None else LineUse.GAINING

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
    network = _MeshLayerBuilder(graph)
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
class _MeshLayerBuilder:
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

    def reading(self, name: str, given: str, graph: Graph, parts: Parts | None, kind: str, image: Image) -> OperandRead:
        """The reading of an operand that the network calls `given`."""
        value, shape = self.behind.get(given, given), graph.types[name].shape
        whole = self.graph.types[value]
        # The network's inputs lie in DRAM as a whole: a view of one is an image of its own.
        source = image_of(shape if value not in self.made and len(shape) == 4 else whole.shape)
        producer, itemsize = self.made.get(value, INPUT), whole.dtype.numpy.itemsize
        operand = (name, value, producer, source, itemsize)
        if parts is None or parts.anchor is None or name != parts.source():
            return OperandRead(*operand, channels="all" if source != image or parts is None else "same")
        anchor = parts.anchor
        window = anchor.operator.window([graph.types[operand] for operand in anchor.inputs])
        if window is None or anchor.operator.moves_only:
            return OperandRead(*operand, channels="summed" if kind == "dense" else "all")
        lead = (window.padding[0][0], window.padding[1][0])
        if parts.pad is not None:
            lead = tuple(parts.pad.operator.before[1:3])  # type: ignore[attr-defined]
        channels = "summed" if kind == "convolution" else "all"
        channels = "same" if kind == "depthwise" or is_pool(anchor, graph) else channels
        return OperandRead(*operand, window.stride, window.span, lead, channels)


def is_pool(anchor: Node, graph: Graph) -> bool:
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
    taps, anchor, graph = 1, layer.parts.anchor if layer.parts else None, layer.graph
    if anchor is not None:
        types, elements = [graph.types[name] for name in anchor.inputs], graph.types[graph.outputs[0]].elements
        window = anchor.operator.window(types)
        if window is not None and is_pool(anchor, graph):
            taps = window.kernel[0] * window.kernel[1]
        elif elements:
            taps = max(1, anchor.operator.macs(types) // elements)
    return taps + len(layer.readings) - 1
