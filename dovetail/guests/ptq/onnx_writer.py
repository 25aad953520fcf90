"""A graph as plain ONNX: standard operators, images in ONNX's order (NCHW), as other tools read it.

A value of four axes may be there in the graph's own order (NHWC) and as an image (NCHW). Each operator asks for the
form it computes in; a transpose is written where that form is not there yet, and a graph's own transposes between the
two orders only give a form a second name. An operator without a form of its own here is written as its standard body.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import inf

import numpy as np
import onnx

from dovetail.errors import DovetailError
from dovetail.ir.graph import Graph, Node
from dovetail.ir.onnx_body import MOST_BYTES, OnnxBody, onnx_model, value_info
from dovetail.ir.onnx_file import USER_DOMAIN, opaque_node
from dovetail.ir.operators.activation import Clamp, Softmax, Unary
from dovetail.ir.operators.arithmetic import Add, Dequantize, Quantize
from dovetail.ir.operators.elementwise import Binary
from dovetail.ir.operators.linear import Convolution, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Concat, Gather, Pad, Resample, Reshape, Transpose
from dovetail.ir.operators.reduction import AveragePool2d, MaxPool2d, Normalise
from dovetail.ir.types import DType, TensorType
from dovetail.read.geometry import ResizeAxis

TO_IMAGE = (0, 3, 1, 2)
"""NHWC to NCHW."""
TO_GRAPH = (0, 2, 3, 1)
"""NCHW to NHWC."""


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


def _absorbed_pads(graph: Graph) -> frozenset[str]:
    """Borders of zeros that only convolutions read, which have them as an attribute."""
    users = graph.users()
    found = []
    for node in graph.nodes:
        if not isinstance(node.operator, Pad) or node.output in graph.outputs or len(node.operator.before) != 4:
            continue
        border = (*node.operator.before, *node.operator.after)
        spatial = node.operator.value == 0 and not any(border[axis] for axis in (0, 3, 4, 7))
        readers = users[node.output]
        convolved = [isinstance(u.operator, Convolution) and u.inputs[0] == node.output for u in readers]
        if spatial and readers and all(convolved):
            found.append(node.output)
    return frozenset(found)


class _OnnxWriter(OnnxBody):
    """The nodes and constants written so far, and the forms of each value that are there."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(tuple(graph.types))
        self.graph, self.types = graph, graph.types
        self.plain: dict[str, str] = {name: name for name in graph.inputs}
        """Name of a value in the graph's order."""
        self.images: dict[str, str] = {}
        """Name of a value in NCHW."""
        self.producers = graph.producers()
        self.absorbed = _absorbed_pads(graph)

    def read(self, value: str, image: bool = False) -> str:
        """The name of a value in the graph's order, or of one of four axes in NCHW."""
        forms = self.images if image else self.plain
        if value not in forms:
            forms[value] = self._form(value, image)
        return forms[value]

    def _form(self, value: str, image: bool) -> str:
        """Write a form of a value that is not there yet.

        Of what is dequantised the integers are turned: ONNX Runtime 1.31 refuses a transpose between DequantizeLinear
        and a convolution at opset 21.
        """
        graph = self.graph
        if value in graph.constants:
            array, name = graph.constants[value], value
            if image:
                array, name = array.transpose(TO_IMAGE), self.fresh(value)
            return self.initializer(name, array, self.types[value].dtype)
        source = self._dequantized(value)
        if source is not None and source.inputs[0] in graph.constants and not image:
            return self.scaled(source, self.read(source.inputs[0]), value, self._axis(source))
        given = not image and value in graph.outputs
        name = value if given else self.fresh(f"{value}_nchw" if image else f"{value}_nhwc")
        if source is not None and source.inputs[0] not in graph.inputs:
            return self.scaled(source, self.read(source.inputs[0], image), name, self._axis(source, image))
        if image:
            return self.node("Transpose", [self.read(value)], name, perm=list(TO_IMAGE))
        return self.node("Transpose", [self.images[value]], name, perm=list(TO_GRAPH))

    def _dequantized(self, value: str) -> Node | None:
        source = self.producers.get(value)
        return source if source is not None and isinstance(source.operator, Dequantize) else None

    def _axis(self, node: Node, image: bool = False) -> int:
        """The axis the parameters of a Quantize or Dequantize run along, of a form of its operand."""
        assert isinstance(node.operator, Quantize | Dequantize)
        rank = len(self.types[node.inputs[0]].shape)
        axis = node.operator.axis % rank if rank else 0
        return TO_IMAGE.index(axis) if image else axis

    def scaled(self, node: Node, x: str, name: str, axis: int) -> str:
        """Write the QuantizeLinear or DequantizeLinear of `x` that a node is; its parameters run along `axis` of it."""
        quantizes = isinstance(node.operator, Quantize)
        integers = self.types[node.output if quantizes else node.inputs[0]].dtype
        operands = [x]
        for value, dtype in zip(node.inputs[1:], (DType.FLOAT32, integers), strict=True):
            if value not in self.plain:
                array = self.graph.constants[value]
                flat = array.reshape(()) if array.size == 1 else array
                self.plain[value] = self.initializer(value, flat.astype(dtype.numpy), dtype)
            operands.append(self.plain[value])
        attributes = {"axis": axis} if self.graph.constants[node.inputs[1]].size > 1 else {}
        return self.node("QuantizeLinear" if quantizes else "DequantizeLinear", operands, name, **attributes)

    def result(self, node: Node, image: bool = False) -> str:
        """The name an operator's result gets; the other form of an output takes the output's own."""
        name = node.output
        if image and name in self.graph.outputs:
            name = self.fresh(f"{name}_nchw")
        (self.images if image else self.plain)[node.output] = name
        return name

    def write(self, node: Node) -> None:
        """Write an operator; its result is then known."""
        first = node.inputs[0] if node.inputs else ""
        image = first in self.images
        real = all(self.types[name].dtype is DType.FLOAT32 for name in node.inputs[:1])
        match node.operator:
            case Quantize() | Dequantize():
                self._quantisation(node)
            case Convolution() as operator:
                self._convolution(node, operator)
            case FullyConnected():
                self._dense(node)
            case MaxPool2d() | AveragePool2d() as operator if real:
                self._pool(node, operator)
            case Clamp(low=low, high=high):
                x, output = self.read(first, image), self.result(node, image)
                if (low, high) == (0.0, inf):
                    self.node("Relu", [x], output)
                else:
                    limits = ["" if abs(limit) == inf else self.scalar(limit, DType.FLOAT32) for limit in (low, high)]
                    self.node("Clip", [x, *limits], output)
            case Unary():
                self._meaning(node, image)
            case Normalise(epsilon=epsilon, centred=True, summed=False):
                ones = np.ones(self.types[first].shape[-1], np.float32)
                factor = self.initializer(self.fresh(f"{node.output}_ones"), ones, DType.FLOAT32)
                self.node("LayerNormalization", [self.read(first), factor], self.result(node), epsilon=epsilon)
            case Softmax(beta=1.0):
                self.node("Softmax", [self.read(first)], self.result(node), axis=-1)
            case Add() | Binary() as operator:
                self._two(node, operator)
            case Concat(axis=axis):
                axis %= len(self.types[node.output].shape)
                image = len(self.types[node.output].shape) == 4 and any(name in self.images for name in node.inputs)
                operands = [self.read(name, image) for name in node.inputs]
                place = TO_IMAGE.index(axis) if image else axis
                self.node("Concat", operands, self.result(node, image), axis=place)
            case Transpose(permutation=order):
                self._transpose(node, order)
            case Reshape(shape=shape):
                # An image of one pixel is reshaped in whatever order it is there.
                x = self.read(first, image and self.types[first].shape[1:3] == (1, 1))
                stem = self.fresh(f"{node.output}_shape")
                target = self.initializer(stem, np.array(shape, np.int64), DType.INT64)
                self.node("Reshape", [x, target], self.result(node))
            case Pad() as operator if real and len(self.types[first].shape) == 4:
                x = self.read(first, image)
                order = TO_IMAGE if image else (0, 1, 2, 3)
                border = [sizes[axis] for sizes in (operator.before, operator.after) for axis in order]
                operands = [x, self.integers(border), self.scalar(operator.value, DType.FLOAT32)]
                self.node("Pad", operands, self.result(node, image))
            case Resample() as operator if (mode := self._resizing(node, operator)) is not None:
                whole = self.types[node.output].shape
                sizes = self.integers([whole[axis] for axis in TO_IMAGE] if image else whole)
                operands = [self.read(first, image), "", "", sizes]
                kind, walk = mode
                self.node("Resize", operands, self.result(node, image), mode=kind, coordinate_transformation_mode=walk)
            case Gather(axis=axis):
                self.node("Gather", [self.read(name) for name in node.inputs], self.result(node), axis=axis)
            case operator if operator.opaque:
                written = opaque_node(node)
                written.input[:] = [self.read(name) for name in node.inputs]
                written.output[0] = self.result(node)
                self.nodes.append(written)
            case operator:
                operands = [self.read(name) for name in node.inputs]
                found = operator.onnx(self, operands, [self.types[name] for name in node.inputs])
                self.node("Identity", [found], self.result(node))

    def _resizing(self, node: Node, operator: Resample) -> tuple[str, str] | None:
        """The mode of the Resize that a Resample with constant taps is, and how it walks; None where it is none."""
        x, *names = node.inputs
        if any(name not in self.graph.constants for name in names):
            return None
        taps = [
            (self.graph.constants[a], self.graph.constants[b]) for a, b in zip(names[::2], names[1::2], strict=True)
        ]
        for cubic, walk in product((False, True), ("half_pixel", "asymmetric", "align_corners")):
            axes = [(self.types[x].shape[at], self.types[node.output].shape[at]) for at in operator.axes]
            made = [ResizeAxis(a, b, b / a, walk).taps(cubic, -0.75, False, False) for a, b in axes]
            pairs = [pair for one, other in zip(taps, made, strict=True) for pair in zip(one, other, strict=True)]
            if all(one.shape == other.shape and np.allclose(one, other, atol=1e-6) for one, other in pairs):
                return "cubic" if cubic else "linear", walk
        return None

    def _meaning(self, node: Node, image: bool) -> None:
        """Write an operator's own ONNX form, which serves either order of axes, so that it ends in the result."""
        operands = [self.read(name, image) for name in node.inputs]
        output = self.result(node, image)
        found = node.operator.onnx(self, operands, [self.types[name] for name in node.inputs])
        last = self.nodes[-1]
        if list(last.output) == [found]:
            last.output[0] = last.name = output
        else:
            self.node("Identity", [found], output)

    def _two(self, node: Node, operator: Add | Binary) -> None:
        """An addition or another function of two: as images where one operand is one and both have four axes."""
        types = [self.types[name] for name in node.inputs]
        image = all(len(kind.shape) == 4 for kind in types) and any(name in self.images for name in node.inputs)
        if types[0].dtype is not DType.FLOAT32:
            self._meaning(node, image)
            return
        operands = [self.read(name, image) for name in node.inputs]
        op_type = operator.kind.value if isinstance(operator, Binary) else "Add"
        self.node(op_type, operands, self.result(node, image))

    def _quantisation(self, node: Node) -> None:
        source = node.inputs[0]
        if source not in self.graph.constants:  # constants are written in the order they are read in
            image = source in self.images or self._input_read_as_image(node)
            x = self.read(source, image)
            self.scaled(node, x, self.result(node, image), self._axis(node, image))

    def _input_read_as_image(self, node: Node) -> bool:
        """Whether an input of the network is transposed before it is quantised, as tools expect Quantize and Dequantize
        side by side and next to the operator."""
        if node.inputs[0] not in self.graph.inputs or len(self.types[node.output].shape) != 4:
            return False
        reached = {node.output}
        for reader in self.graph.nodes:
            if reader.inputs and reader.inputs[0] in reached:
                if isinstance(reader.operator, Convolution | MaxPool2d | AveragePool2d):
                    return True
                if isinstance(reader.operator, Dequantize | Pad):
                    reached.add(reader.output)
        return False

    def _convolution(self, node: Node, operator: Convolution) -> None:
        source, pads = node.inputs[0], [0, 0, 0, 0]
        channels = self.types[source].shape[3]
        if source in self.absorbed:
            border = self.producers[source]
            assert isinstance(border.operator, Pad)
            pads = [*border.operator.before[1:3], *border.operator.after[1:3]]
            source = border.inputs[0]
        kernel = self.types[node.inputs[1]].shape
        depthwise = isinstance(operator, DepthwiseConv2d)
        x = self.read(source, image=True)
        weights = self._weights(node.inputs[1], (3, 0, 1, 2) if depthwise else TO_IMAGE)
        operands = [x, weights, *(self.read(name) for name in node.inputs[2:])]
        sizes = {"kernel_shape": list(kernel[1:3]), "strides": list(operator.stride)}
        sizes |= {"dilations": list(operator.dilation), "pads": pads}
        group = channels // (1 if depthwise else kernel[3])
        self.node("Conv", operands, self.result(node, image=True), **sizes, group=group)

    def _weights(self, value: str, permutation: tuple[int, ...]) -> str:
        """Weights in ONNX's order; constants and dequantised constants are transposed here and now."""
        constants, source = self.graph.constants, self._dequantized(value)
        if value in constants:
            return self.initializer(self.fresh(value), constants[value].transpose(permutation), self.types[value].dtype)
        if source is None or source.inputs[0] not in constants:
            name = self.fresh(f"{value}_moved")
            return self.node("Transpose", [self.read(value)], name, perm=list(permutation))
        integers = source.inputs[0]
        name, array = self.fresh(f"{integers}_onnx"), constants[integers].transpose(permutation)
        moved = self.initializer(name, array, self.types[integers].dtype)
        return self.scaled(source, moved, self.fresh(f"{value}_onnx"), permutation.index(self._axis(source)))

    def _dense(self, node: Node) -> None:
        operands = [self.read(name) for name in node.inputs]
        if len(self.types[node.inputs[0]].shape) == 2:
            self.node("Gemm", operands, self.result(node), transB=1)
            return
        turned = self.node("Transpose", [operands[1]], self.fresh(f"{node.inputs[1]}_turned"), perm=[1, 0])
        output = self.result(node)
        if len(operands) == 2:
            self.node("MatMul", [operands[0], turned], output)
            return
        product = self.node("MatMul", [operands[0], turned], self.fresh(f"{node.output}_product"))
        self.node("Add", [product, operands[2]], output)

    def _pool(self, node: Node, operator: MaxPool2d | AveragePool2d) -> None:
        x, output = self.read(node.inputs[0], image=True), self.result(node, image=True)
        (top, bottom), (left, right) = operator.padding
        pads, average = [top, left, bottom, right], isinstance(operator, AveragePool2d)
        if average and operator.kernel == self.types[node.inputs[0]].shape[1:3] and not any(pads):
            self.node("GlobalAveragePool", [x], output)
            return
        sizes = {"kernel_shape": list(operator.kernel), "strides": list(operator.stride), "pads": pads}
        self.node("AveragePool" if average else "MaxPool", [x], output, **sizes)

    def _transpose(self, node: Node, order: tuple[int, ...]) -> None:
        source, inner = node.inputs[0], node.output not in self.graph.outputs
        if order == TO_GRAPH and inner:
            self.images[node.output] = self.read(source)
        elif order == TO_IMAGE and source in self.images and inner:
            self.plain[node.output] = self.images[source]
        elif order == TO_IMAGE and source in self.images:
            self.node("Identity", [self.images[source]], self.result(node))
        else:
            self.node("Transpose", [self.read(source)], self.result(node), perm=list(order))
