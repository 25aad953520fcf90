"""A graph as plain ONNX: standard operators, images in ONNX's order (NCHW), as other tools read it.

A value of four axes may be there in the graph's own order (NHWC) and as an image (NCHW). Each operator asks for the
form it computes in; a transpose is written where that form is not there yet, and a graph's own transposes between the
two orders only give a form a second name. An operator without a form of its own here is written as its standard body.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import numpy as np
import onnx

from dovetail.errors import DovetailError
from dovetail.ir.graph import Graph, Node
from dovetail.ir.onnx_body import MOST_BYTES, OnnxBody, onnx_model, value_info
from dovetail.ir.onnx_file import USER_DOMAIN, opaque_node
from dovetail.ir.operators.base import Operator, SlidingWindow
from dovetail.ir.operators.movement import Gather, Pad, Resample, Reshape, Transpose, permuted
from dovetail.ir.operators.reduction import Normalise, ReduceKind
from dovetail.ir.operators.sequence import WriteRow
from dovetail.ir.pattern import apply, occurrence
from dovetail.ir.types import DType, Shape, TensorType
from dovetail.read.geometry import ResizeAxis

TO_IMAGE = (0, 3, 1, 2)
"""NHWC to NCHW, and weights to those of ONNX."""
TO_GRAPH = (0, 2, 3, 1)
"""NCHW to NHWC."""
_TO_DEPTHWISE = (3, 0, 1, 2)
"""Weights of depthwise layers to those of ONNX."""
_POOLS = {ReduceKind.MAXIMUM: "MaxPool", ReduceKind.MEAN: "AveragePool"}


def plain_onnx(graph: Graph, notes: Mapping[str, str] | None = None) -> onnx.ModelProto:
    """The graph as a model of standard operators, opset 21.

    Args:
        graph: floats and integers; inputs and outputs keep their names and order of axes.
        notes: metadata of the model.

    Raises:
        DovetailError: it is larger than an ONNX file can be.
    """
    writer = _OnnxWriter(graph)
    for node in graph.nodes:
        if node.output not in writer.absorbed:
            writer.write(node)
    for name in graph.outputs:
        if writer.read(name) != name:
            writer.node("Identity", [writer.read(name)], name)
    body = onnx.GraphProto(name=graph.name, node=writer.nodes, initializer=writer.initializers)
    body.input.extend(_input_info(name, graph.types[name]) for name in graph.inputs)
    body.output.extend(value_info(name, graph.types[name]) for name in graph.outputs)
    model = onnx_model(body, "dovetail.calibrate", notes or {})
    if any(node.operator.opaque for node in graph.nodes):
        model.opset_import.add(domain=USER_DOMAIN, version=1)
    if model.ByteSize() > MOST_BYTES:
        what = f"{model.ByteSize()} bytes are more than an ONNX file can hold ({MOST_BYTES})"
        raise DovetailError(what, where=graph.name, hint="quantise a smaller network, or parts of this one")
    return model


def _input_info(name: str, kind: TensorType) -> onnx.ValueInfoProto:
    """An input's name and type; one narrower than a byte is of 4 bits."""
    if kind.dtype.bits >= 8:
        return value_info(name, kind)
    nibble = onnx.TensorProto.INT4 if kind.dtype.signed else onnx.TensorProto.UINT4
    return onnx.helper.make_tensor_value_info(name, nibble, list(kind.shape))


_BORDER = apply(Pad, having=lambda pad: pad.value == 0 and len(pad.before) == 4)


def _absorbed_pads(graph: Graph) -> dict[str, tuple[str, list[int]]]:
    """Borders of zeros that only convolutions read, which have them as an attribute: operand and widths of each."""
    absorbed = {}
    for node in graph.nodes:
        border, readers = occurrence(_BORDER, graph, node), graph.users()[node.output]
        if border is None or node.output in graph.outputs or not readers:
            continue
        pad = border[_BORDER]
        reads = (_is_convolution(graph, one) and one.inputs[0] == node.output for one in readers)
        if not any((*pad.before[::3], *pad.after[::3])) and all(reads):
            absorbed[node.output] = (node.inputs[0], [*pad.before[1:3], *pad.after[1:3]])
    return absorbed


def _window_of(graph: Graph, node: Node) -> SlidingWindow | None:
    return node.operator.window([graph.types[name] for name in node.inputs])


def _is_convolution(graph: Graph, node: Node) -> bool:
    return node.operator.weight_axis is not None and _window_of(graph, node) is not None


class _OnnxWriter(OnnxBody):
    """The nodes and constants written so far, and the forms of each value that are there."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(tuple(graph.types))
        self.graph, self.types = graph, graph.types
        self.forms: dict[tuple[str, Shape], str] = {(name, ()): name for name in graph.inputs}
        """Name of a value with its axes in an order, which is empty for the graph's own."""
        self.absorbed = _absorbed_pads(graph)

    def read(self, value: str, order: Shape = ()) -> str:
        """The name of a value with its axes in an order."""
        if (value, order) not in self.forms:
            self.forms[value, order] = self._form(value, order)
        return self.forms[value, order]

    def _form(self, value: str, order: Shape) -> str:
        """Write a form of a value that is not there yet.

        The integers of a dequantised value are transposed, not its floats: ONNX Runtime 1.31 refuses a transpose
        between DequantizeLinear and a convolution at opset 21.
        """
        constants = self.graph.constants
        if value in constants:
            array = constants[value].transpose(order) if order else constants[value]
            name = self.fresh(f"{value}_onnx") if order else value
            return self.initializer(name, array, self.types[value].dtype)
        source = self.graph.producer(value)
        integers = source.inputs[0] if source is not None and source.operator.dequantises else ""
        whole = not order and (integers in constants or value in self.graph.outputs)
        ending = "onnx" if integers in constants else "nchw" if order else "nhwc"
        name = value if whole else self.fresh(f"{value}_{ending}")
        if source is not None and integers and integers not in self.graph.inputs:
            return self.scaled(source, self.read(integers, order), name, order)
        if order:
            return self.node("Transpose", [self.read(value)], name, perm=list(order))
        return self.node("Transpose", [self.forms[value, TO_IMAGE]], name, perm=list(TO_GRAPH))

    def scaled(self, node: Node, x: str, name: str, order: Shape) -> str:
        """Write the QuantizeLinear or DequantizeLinear that a node is, of `x`, which is its operand in an order."""
        quantizes, operator = node.operator.quantises, node.operator
        integers = self.types[node.output if quantizes else node.inputs[0]].dtype
        operands = [x]
        for value, dtype in zip(node.inputs[1:], (DType.FLOAT32, integers), strict=True):
            if (value, ()) not in self.forms:
                array = self.graph.constants[value]
                flat = array.reshape(()) if array.size == 1 else array
                self.forms[value, ()] = self.initializer(value, flat.astype(dtype.numpy), dtype)
            operands.append(self.forms[value, ()])
        attributes: dict[str, int] = {}
        if self.graph.constants[node.inputs[1]].size > 1:
            axis = getattr(operator, "axis", -1) % len(self.types[node.inputs[0]].shape)
            attributes["axis"] = order.index(axis) if order else axis
        return self.node("QuantizeLinear" if quantizes else "DequantizeLinear", operands, name, **attributes)

    def result(self, node: Node, order: Shape = ()) -> str:
        """The name an operator's result gets; the other form of an output takes the output's own."""
        name = self.fresh(f"{node.output}_nchw") if order and node.output in self.graph.outputs else node.output
        self.forms[node.output, order] = name
        return name

    def write(self, node: Node) -> None:
        """Write an operator; its result is then known."""
        operator, real = node.operator, self.types[node.output].dtype is DType.FLOAT32
        window = _window_of(self.graph, node) is not None
        if operator.quantises or operator.dequantises:
            _quantisation(self, node)
        elif operator.weight_axis is not None:
            (_convolution if window else _dense)(self, node, operator)
        elif window and real and not operator.moves_only:
            _pool(self, node, operator)
        else:
            _WRITERS.get(type(operator), _body)(self, node, operator)

    def has_image(self, *values: str) -> bool:
        """Whether one of some values is there as an image, and all have four axes."""
        axes = {len(self.types[name].shape) for name in values}
        return axes == {4} and any((name, TO_IMAGE) in self.forms for name in values)

    def standard(self, node: Node, op_type: str, order: Shape = (), **attributes: Any) -> None:
        """Write an operator as one standard node, perhaps on images."""
        self.node(op_type, [self.read(name, order) for name in node.inputs], self.result(node, order), **attributes)


def _body(writer: _OnnxWriter, node: Node, operator: Operator) -> None:
    """Write an operator's meaning in standard ONNX, on images where it can follow their order of axes; one that has no
    such meaning as a node of its own."""
    types = [writer.types[name] for name in node.inputs]
    moved = operator.reordered(TO_IMAGE, types) if writer.has_image(*node.inputs) else None
    order = TO_IMAGE if moved is not None else ()
    operands, output = [writer.read(name, order) for name in node.inputs], writer.result(node, order)
    if operator.opaque:
        written = opaque_node(node)
        written.input[:], written.output[0] = operands, output
        writer.nodes.append(written)
        return
    if moved is not None:
        operator, types = moved, [TensorType(permuted(kind.shape, TO_IMAGE), kind.dtype) for kind in types]
    result, last = operator.onnx(writer, operands, types), writer.nodes[-1]
    if result not in operands and list(last.output) == [result]:
        last.output[0] = last.name = output
    else:
        writer.node("Identity", [result], output)


def _normalise(writer: _OnnxWriter, node: Node, operator: Normalise) -> None:
    if not operator.centred or operator.summed:
        return _body(writer, node, operator)
    ones = np.ones(writer.types[node.inputs[0]].shape[-1], np.float32)
    factor = writer.initializer(writer.fresh(f"{node.output}_ones"), ones, DType.FLOAT32)
    operands = [writer.read(node.inputs[0]), factor]
    writer.node("LayerNormalization", operands, writer.result(node), epsilon=operator.epsilon)


def _reshape(writer: _OnnxWriter, node: Node, operator: Reshape) -> None:
    # An image of one pixel is reshaped in whatever order it is there.
    pixel = writer.has_image(node.inputs[0]) and writer.types[node.inputs[0]].shape[1:3] == (1, 1)
    x = writer.read(node.inputs[0], TO_IMAGE if pixel else ())
    shape = np.array(operator.shape, np.int64)
    target = writer.initializer(writer.fresh(f"{node.output}_shape"), shape, DType.INT64)
    writer.node("Reshape", [x, target], writer.result(node))


def _write_row(writer: _OnnxWriter, node: Node, operator: WriteRow) -> None:
    """ScatterND, with the axis of the row first."""
    rank, axis = len(writer.types[node.output].shape), operator.axis
    order = (axis, *(other for other in range(rank) if other != axis))
    x, row, place = (writer.read(name) for name in node.inputs)
    if axis:
        x, row = (writer.add("Transpose", [name], perm=list(order)) for name in (x, row))
    place = writer.cast(writer.add("Reshape", [place, writer.integers((1, 1))]), DType.INT64)
    output = writer.result(node)
    if not axis:
        writer.node("ScatterND", [x, place, row], output)
        return
    back = [order.index(other) for other in range(rank)]
    writer.node("Transpose", [writer.add("ScatterND", [x, place, row])], output, perm=back)


def _resample(writer: _OnnxWriter, node: Node, operator: Resample) -> None:
    if (mode := _resizing(writer.graph, node, operator)) is None:
        return _body(writer, node, operator)
    order, whole = TO_IMAGE if writer.has_image(node.inputs[0]) else (), writer.types[node.output].shape
    operands = [writer.read(node.inputs[0], order), "", "", writer.integers(permuted(whole, order) if order else whole)]
    kind, walk = mode
    writer.node("Resize", operands, writer.result(node, order), mode=kind, coordinate_transformation_mode=walk)


def _resizing(graph: Graph, node: Node, operator: Resample) -> tuple[str, str] | None:
    """The mode of the Resize that a Resample with constant taps is, and how it walks; None where it is none."""
    x, *names = node.inputs
    if any(name not in graph.constants for name in names):
        return None
    taps = [graph.constants[name] for name in names]
    sizes = [(graph.types[x].shape[axis], graph.types[node.output].shape[axis]) for axis in operator.axes]
    for cubic, walk in product((False, True), ("half_pixel", "asymmetric", "align_corners")):
        axes = (ResizeAxis(a, b, b / a, walk).taps(cubic, -0.75, False, False) for a, b in sizes)
        pairs = zip(taps, (array for axis in axes for array in axis), strict=True)
        if all(one.shape == other.shape and np.allclose(one, other, atol=1e-6) for one, other in pairs):
            return "cubic" if cubic else "linear", walk
    return None


def _quantisation(writer: _OnnxWriter, node: Node) -> None:
    source = node.inputs[0]
    if source not in writer.graph.constants:  # constants are written in the order they are read in
        order = TO_IMAGE if writer.has_image(source) or _is_read_as_image(writer.graph, node) else ()
        writer.scaled(node, writer.read(source, order), writer.result(node, order), order)


def _is_read_as_image(graph: Graph, node: Node) -> bool:
    """Whether an input of the network is transposed before it is quantised, as tools expect Quantize and Dequantize
    side by side and next to the operator."""
    if node.inputs[0] not in graph.inputs or len(graph.types[node.output].shape) != 4:
        return False
    reached = {node.output}
    for reader in graph.nodes:
        if reader.inputs and reader.inputs[0] in reached:
            if _window_of(graph, reader) is not None:
                return True
            if reader.operator.dequantises or reader.operator.pads:
                reached.add(reader.output)
    return False


def _convolution(writer: _OnnxWriter, node: Node, operator: Any) -> None:
    channels, kernel = writer.types[node.inputs[0]].shape[3], writer.types[node.inputs[1]].shape
    source, pads = writer.absorbed.get(node.inputs[0], (node.inputs[0], [0, 0, 0, 0]))
    x = writer.read(source, TO_IMAGE)
    weights = writer.read(node.inputs[1], _TO_DEPTHWISE if operator.is_channelwise else TO_IMAGE)
    operands = [x, weights, *(writer.read(name) for name in node.inputs[2:])]
    sizes = {"kernel_shape": list(kernel[1:3]), "strides": list(operator.stride)}
    sizes |= {"dilations": list(operator.dilation), "pads": pads}
    group = channels if operator.is_channelwise else channels // kernel[3]
    writer.node("Conv", operands, writer.result(node, TO_IMAGE), **sizes, group=group)


def _dense(writer: _OnnxWriter, node: Node, operator: Operator) -> None:
    if len(writer.types[node.inputs[0]].shape) == 2:
        return writer.standard(node, "Gemm", transB=1)
    x, weights, *bias = (writer.read(name) for name in node.inputs)
    turned = writer.node("Transpose", [weights], writer.fresh(f"{node.inputs[1]}_turned"), perm=[1, 0])
    output = writer.result(node)
    product = writer.node("MatMul", [x, turned], writer.fresh(f"{node.output}_product") if bias else output)
    if bias:
        writer.node("Add", [product, *bias], output)


def _pool(writer: _OnnxWriter, node: Node, operator: Any) -> None:
    (top, bottom), (left, right) = operator.padding
    pads, op_type = [top, left, bottom, right], _POOLS[operator.kind]
    whole = operator.kernel == writer.types[node.inputs[0]].shape[1:3] and not any(pads)
    if whole and op_type == "AveragePool":
        return writer.standard(node, "GlobalAveragePool", TO_IMAGE)
    sizes = {"kernel_shape": list(operator.kernel), "strides": list(operator.stride), "pads": pads}
    return writer.standard(node, op_type, TO_IMAGE, **sizes)


def _transpose(writer: _OnnxWriter, node: Node, operator: Transpose) -> None:
    source, order = node.inputs[0], operator.permutation
    inner, is_image = node.output not in writer.graph.outputs, writer.has_image(source)
    if order == TO_GRAPH and inner:
        writer.forms[node.output, TO_IMAGE] = writer.read(source)
    elif order == TO_IMAGE and is_image and inner:
        writer.forms[node.output, ()] = writer.read(source, TO_IMAGE)
    elif order == TO_IMAGE and is_image:
        writer.node("Identity", [writer.read(source, TO_IMAGE)], writer.result(node))
    else:
        writer.standard(node, "Transpose", perm=list(order))


_WRITERS: Mapping[type[Operator], Callable[[_OnnxWriter, Node, Any], None]] = {
    Normalise: _normalise,
    Transpose: _transpose,
    Reshape: _reshape,
    Resample: _resample,
    WriteRow: _write_row,
    Gather: lambda writer, node, gather: writer.standard(node, "Gather", axis=gather.axis),
}
"""How operators are written that other tools know in another form than their meaning's."""
