"""What a mesh must know of each layer: its shapes, what it reads of its operands, and where it can be cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dovetail.errors import ModelError
from dovetail.graph.graph import Graph, Node
from dovetail.graph.types import Shape, full_box
from dovetail.kernels.region import Region as Parts
from dovetail.kernels.region import split
from dovetail.operators.base import Operator
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.operators.movement import Pad
from dovetail.operators.pooling import AveragePool2d, MaxPool2d, SumPool2d
from dovetail.partition import Region

INPUT = -1
"""The producer of what the network is given."""
POOLS = (MaxPool2d, AveragePool2d, SumPool2d)
LINEAR = (Conv2d, DepthwiseConv2d, FullyConnected)

Image = tuple[int, int, int]
"""Rows, columns and channels of a value; whatever is no image is one row of one column."""


@dataclass(frozen=True)
class Reading:
    """What a piece reads of an operand: per axis from `step * start - lead` on, `span` beyond the last step."""

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


@dataclass(frozen=True)
class Layer:
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

    @property
    def on_array(self) -> bool:
        """True where the MAC array computes it."""
        return self.kind != "core"

    @property
    def constant_bytes(self) -> int:
        """Bytes of weights and parameters of the whole layer."""
        return sum(array.nbytes for array in self.graph.constants.values())


def image_of(shape: Shape) -> Image:
    """A value's shape as an image."""
    if len(shape) == 4 and shape[0] == 1:
        return shape[1], shape[2], shape[3]
    return 1, 1, int(np.prod(shape))


def layers_of(graph: Graph, regions: Sequence[Region]) -> tuple[Layer, ...]:
    """The layers of a network, views left out.

    Raises:
        ModelError: it keeps states between inferences, or an output is given under another shape only.
    """
    if graph.states:
        raise ModelError("a network with states does not run on a mesh", where=graph.name,
                         hint="use a target that is not a mesh")
    behind: dict[str, str] = {}
    made: dict[str, int] = {}
    found: list[Layer] = []
    for region in regions:
        if region.is_view:
            source = region.graph.inputs[0]
            behind[region.output] = behind.get(source, source)
            continue
        found.append(_layer(len(found), region, graph, behind, made))
        made[region.output] = found[-1].index
    missing = [name for name in graph.outputs if behind.get(name, name) not in made]
    if missing:
        raise ModelError(f"the output '{missing[0]}' is not computed by a layer", where=graph.name,
                         hint="take this output out of the model")
    return tuple(found)


def output_layers(graph: Graph, layers: Sequence[Layer], regions: Sequence[Region]) -> dict[str, int]:
    """Network output -> the layer that computes it."""
    made = {layer.graph.outputs[0]: layer.index for layer in layers}
    for region in regions:
        if region.is_view and region.graph.inputs[0] in made:
            made[region.output] = made[region.graph.inputs[0]]
    return {name: made[name] for name in graph.outputs}


def _layer(index: int, region: Region, whole: Graph, behind: dict[str, str], made: dict[str, int]) -> Layer:
    graph, again = _read_apart(region.graph)
    try:
        parts: Parts | None = split(graph)
    except ValueError:
        parts = None
    anchor = parts.anchor if parts else None
    kind = _kind(graph, anchor)
    result = graph.types[region.output]
    image = image_of(result.shape)
    summed, unit, kernel, stride = 1, 1, (1, 1), (1, 1)
    if anchor is not None and kind != "core":
        summed, unit, kernel, stride = _sums(graph, anchor, kind, behind, whole)
    names = list(graph.inputs)
    if parts and anchor is not None:
        names.sort(key=lambda name: name != parts.source())
    readings = tuple(
        _reading(name, again.get(name, name), graph, parts, kind, image, whole, behind, made) for name in names
    )
    return Layer(
        index, region.name, graph, kind, parts, image, result.dtype.numpy.itemsize, summed, unit, kernel, stride,
        readings, _cuttable(graph, anchor, kind, image), ", ".join(region.origins),
    )  # fmt: skip


def _kind(graph: Graph, anchor: Node | None) -> str:
    """Who computes a layer: the array takes int8 images and vectors with int8 weights that are constants."""
    if anchor is None or len(anchor.inputs) < 2 or anchor.inputs[1] not in graph.constants:
        return "core"
    x, w = (graph.types[name] for name in anchor.inputs[:2])
    operator = anchor.operator
    if x.dtype.bits != 8 or w.dtype.bits > 8 or getattr(operator, "weight_zero_point", 0) != 0:
        return "core"
    if isinstance(operator, FullyConnected):
        return "dense" if int(np.prod(x.shape[:-1])) == 1 else "core"
    if not isinstance(operator, Conv2d | DepthwiseConv2d) or x.shape[0] != 1 or operator.dilation != (1, 1):
        return "core"
    if isinstance(operator, DepthwiseConv2d):
        return "depthwise" if w.shape[3] == x.shape[3] else "core"
    return "convolution" if operator.groups([x, w]) == 1 else "core"


def _sums(
    graph: Graph, anchor: Node, kind: str, behind: dict[str, str], whole: Graph
) -> tuple[int, int, tuple[int, int], tuple[int, int]]:
    """What is summed over, where it may be cut, window and stride."""
    x, w = (graph.types[name].shape for name in anchor.inputs[:2])
    if kind == "dense":
        source = whole.types[behind.get(anchor.inputs[0], anchor.inputs[0])].shape
        rows, columns, channels = image_of(source)
        return w[1], (channels if rows * columns > 1 else 4), (1, 1), (1, 1)
    stride = anchor.operator.stride  # type: ignore[attr-defined]
    return (x[3] if kind == "convolution" else 1), 4, (w[1], w[2]), stride


def _read_apart(graph: Graph) -> tuple[Graph, dict[str, str]]:
    """The region with a name of its own for what is both convolved and read behind the convolution, since pieces read
    different parts of it; and new name -> value."""
    users = graph.users()
    types, nodes, again = dict(graph.types), list(graph.nodes), {}
    for name in graph.inputs:
        readers = users[name]
        if len(readers) > 1 and any(isinstance(user.operator, (*LINEAR, Pad)) for user in readers):
            other = f"{name}_again"
            again[other], types[other] = name, types[name]
            for place, node in enumerate(nodes):
                if name in node.inputs and not isinstance(node.operator, (*LINEAR, Pad)):
                    nodes[place] = replace(node, inputs=tuple(other if i == name else i for i in node.inputs))
    if not again:
        return graph, again
    return replace(graph, inputs=(*graph.inputs, *again), nodes=tuple(nodes), types=types), again


def _reading(
    name: str, given: str, graph: Graph, parts: Parts | None, kind: str, image: Image, whole: Graph,
    behind: dict[str, str], made: dict[str, int],
) -> Reading:  # fmt: skip
    value = behind.get(given, given)
    type_ = whole.types[value]
    shape = graph.types[name].shape
    # The network's inputs lie in DRAM as a whole: a view of one is an image of its own.
    source = image_of(shape if value not in made and len(shape) == 4 else type_.shape)
    first = parts is not None and parts.anchor is not None and name == parts.source()
    step, span, lead, channels = (1, 1), (1, 1), (0, 0), "same"
    anchor = parts.anchor.operator if parts and parts.anchor else None
    if first and isinstance(anchor, Conv2d | DepthwiseConv2d):
        assert parts is not None and parts.anchor is not None
        window = graph.types[parts.anchor.inputs[1]].shape[1:3]
        step = anchor.stride
        span = (1 + (window[0] - 1) * anchor.dilation[0], 1 + (window[1] - 1) * anchor.dilation[1])
        lead = tuple(parts.pad.operator.before[1:3]) if parts.pad else (0, 0)  # type: ignore[attr-defined]
        channels = "same" if kind == "depthwise" else "summed" if kind == "convolution" else "all"
    elif first and isinstance(anchor, POOLS):
        step, span, lead = anchor.stride, anchor.kernel, (anchor.padding[0][0], anchor.padding[1][0])
    elif first and kind == "dense":
        channels = "summed"
    elif first or source != image or parts is None:
        channels = "all"
    return Reading(name, value, made.get(value, INPUT), source, type_.dtype.numpy.itemsize, step, span, lead, channels)


def _cuttable(graph: Graph, anchor: Node | None, kind: str, image: Image) -> tuple[bool, bool, bool]:
    """Where cropping works: tried with the first element of each axis."""
    if kind in ("convolution", "depthwise"):
        return True, True, True
    if kind == "dense":
        return False, False, True
    shape = graph.types[graph.outputs[0]].shape
    if len(shape) != 4 or (anchor is not None and not isinstance(anchor.operator, POOLS)):
        return False, False, False
    if any(graph.types[name].shape != shape for name in graph.inputs if anchor is None):
        return False, False, False
    return (_crops(graph, 1), _crops(graph, 2), _crops(graph, 3))


def _crops(graph: Graph, axis: int) -> bool:
    from dovetail.graph.crop import crop

    box = list(full_box(graph.types[graph.outputs[0]].shape))
    if box[axis] == (0, 1):
        return False
    box[axis] = (0, 1)
    try:
        crop(graph, tuple(box))
    except ValueError:
        return False
    return True


def core_reads(layer: Layer) -> int:
    """Elements the core reads for each element of the result, of a layer the array does not compute."""
    taps = 1
    operator: Operator | None = layer.parts.anchor.operator if layer.parts and layer.parts.anchor else None
    if isinstance(operator, POOLS):
        taps = operator.kernel[0] * operator.kernel[1]
    elif operator is not None and layer.graph.types[layer.graph.outputs[0]].elements:
        types = [layer.graph.types[name] for name in layer.parts.anchor.inputs]  # type: ignore[union-attr]
        taps = max(1, operator.macs(types) // layer.graph.types[layer.graph.outputs[0]].elements)
    return taps + len(layer.readings) - 1
