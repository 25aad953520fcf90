"""A graph as plain ONNX: standard operators, images in ONNX's order (NCHW), as other tools read it.

A value of four axes may be there in the graph's own order (NHWC) and as an image (NCHW). Each operator asks for the
form it computes in; a transpose is written where that form is not there yet, and a graph's own transposes between the
two orders only give a form a second name. An operator without a form of its own here is written as its standard body.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from math import inf
from typing import Any

import numpy as np
import onnx

from dovetail.errors import DovetailError
from dovetail.ir.graph import Graph, Node
from dovetail.ir.onnx_body import MOST_BYTES, OnnxBody, onnx_model, value_info
from dovetail.ir.onnx_file import USER_DOMAIN, opaque_node
from dovetail.ir.operators.activation import Clamp, Softmax, Unary
from dovetail.ir.operators.arithmetic import Add, Dequantize, Quantize
from dovetail.ir.operators.base import Operator, SlidingWindow
from dovetail.ir.operators.elementwise import Binary
from dovetail.ir.operators.linear import Conv2d, Convolution, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Concat, Gather, Pad, Resample, Reshape, Transpose
from dovetail.ir.operators.reduction import AveragePool2d, MaxPool2d, Normalise, Pool2d
from dovetail.ir.pattern import apply, occurrence, operand
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


_BORDER = apply(Pad, operand("x"), having=lambda pad: pad.value == 0 and len(pad.before) == 4)


def _absorbed_pads(graph: Graph) -> dict[str, tuple[str, list[int]]]:
    """Borders of zeros that only convolutions read, which have them as an attribute: operand and widths of each."""
    users, absorbed = graph.users(), {}
    for node in graph.nodes:
        border = occurrence(_BORDER, graph, node) if node.output not in graph.outputs else None
        readers = users[node.output]
        if border is None or not readers:
            continue
        pad = border[_BORDER]
        spatial = not any((*pad.before[::3], *pad.after[::3]))
        if spatial and all(_is_convolution(graph, u) and u.inputs[0] == node.output for u in readers):
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

        The integers of a dequantised value are transposed, not its floats: ONNX Runtime 1.31 refuses a transpose
        between DequantizeLinear and a convolution at opset 21.
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
        is_output = not image and value in graph.outputs
        name = value if is_output else self.fresh(f"{value}_nchw" if image else f"{value}_nhwc")
        if source is not None and source.inputs[0] not in graph.inputs:
            return self.scaled(source, self.read(source.inputs[0], image), name, self._axis(source, image))
        if image:
            return self.node("Transpose", [self.read(value)], name, perm=list(TO_IMAGE))
        return self.node("Transpose", [self.images[value]], name, perm=list(TO_GRAPH))

    def _dequantized(self, value: str) -> Node | None:
        source = self.producers.get(value)
        return source if source is not None and source.operator.dequantises else None

    def _axis(self, node: Node, image: bool = False) -> int:
        """The axis the parameters of a Quantize or Dequantize run along, of a form of its operand."""
        operator: Any = node.operator
        rank = len(self.types[node.inputs[0]].shape)
        axis: int = operator.axis % rank if rank else 0
        return TO_IMAGE.index(axis) if image else axis

    def scaled(self, node: Node, x: str, name: str, axis: int) -> str:
        """Write the QuantizeLinear or DequantizeLinear of `x` that a node is; its parameters run along `axis` of it."""
        quantizes = node.operator.quantises
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
        _WRITERS.get(type(node.operator), _OnnxWriter._body)(self, node, node.operator)

    def _is_image(self, node: Node) -> bool:
        """Whether the first operand is there as an image."""
        return bool(node.inputs) and node.inputs[0] in self.images

    def _is_real(self, node: Node) -> bool:
        return self.types[node.inputs[0]].dtype is DType.FLOAT32

    def _standard(self, node: Node, op_type: str, image: bool = False, **attributes: Any) -> None:
        """Write an operator as one standard node, perhaps on images."""
        self.node(op_type, [self.read(name, image) for name in node.inputs], self.result(node, image), **attributes)

    def _body(self, node: Node, operator: Operator) -> None:
        """Write an operator as its standard body, or as a node of its own if it has none."""
        operands = [self.read(name) for name in node.inputs]
        if operator.opaque:
            written = opaque_node(node)
            written.input[:] = operands
            written.output[0] = self.result(node)
            self.nodes.append(written)
        else:
            result = operator.onnx(self, operands, [self.types[name] for name in node.inputs])
            self.node("Identity", [result], self.result(node))

    def _meaning(self, node: Node, image: bool) -> None:
        """Write an operator's own ONNX form, which serves either order of axes, so that it ends in the result."""
        operands = [self.read(name, image) for name in node.inputs]
        output = self.result(node, image)
        result = node.operator.onnx(self, operands, [self.types[name] for name in node.inputs])
        last = self.nodes[-1]
        if list(last.output) == [result]:
            last.output[0] = last.name = output
        else:
            self.node("Identity", [result], output)

    def _clamp(self, node: Node, operator: Clamp) -> None:
        image = self._is_image(node)
        x, output, limits = self.read(node.inputs[0], image), self.result(node, image), (operator.low, operator.high)
        if limits == (0.0, inf):
            self.node("Relu", [x], output)
        else:
            names = ["" if abs(limit) == inf else self.scalar(limit, DType.FLOAT32) for limit in limits]
            self.node("Clip", [x, *names], output)

    def _normalise(self, node: Node, operator: Normalise) -> None:
        if not operator.centred or operator.summed:
            self._body(node, operator)
            return
        ones = np.ones(self.types[node.inputs[0]].shape[-1], np.float32)
        factor = self.initializer(self.fresh(f"{node.output}_ones"), ones, DType.FLOAT32)
        operands = [self.read(node.inputs[0]), factor]
        self.node("LayerNormalization", operands, self.result(node), epsilon=operator.epsilon)

    def _softmax(self, node: Node, operator: Softmax) -> None:
        if operator.beta == 1.0:
            self._standard(node, "Softmax", axis=-1)
        else:
            self._body(node, operator)

    def _two(self, node: Node, op_type: str) -> None:
        """An addition or another function of two: as images where one operand is one and both have four axes."""
        types = [self.types[name] for name in node.inputs]
        image = all(len(kind.shape) == 4 for kind in types) and any(name in self.images for name in node.inputs)
        if self._is_real(node):
            self._standard(node, op_type, image)
        else:
            self._meaning(node, image)

    def _concat(self, node: Node, operator: Concat) -> None:
        rank = len(self.types[node.output].shape)
        image = rank == 4 and any(name in self.images for name in node.inputs)
        axis = operator.axis % rank
        self._standard(node, "Concat", image, axis=TO_IMAGE.index(axis) if image else axis)

    def _reshape(self, node: Node, operator: Reshape) -> None:
        # An image of one pixel is reshaped in whatever order it is there.
        x = self.read(node.inputs[0], self._is_image(node) and self.types[node.inputs[0]].shape[1:3] == (1, 1))
        shape = np.array(operator.shape, np.int64)
        target = self.initializer(self.fresh(f"{node.output}_shape"), shape, DType.INT64)
        self.node("Reshape", [x, target], self.result(node))

    def _pad(self, node: Node, operator: Pad) -> None:
        if not self._is_real(node) or len(operator.before) != 4:
            self._body(node, operator)
            return
        image = self._is_image(node)
        x, order = self.read(node.inputs[0], image), TO_IMAGE if image else (0, 1, 2, 3)
        border = [sizes[axis] for sizes in (operator.before, operator.after) for axis in order]
        operands = [x, self.integers(border), self.scalar(operator.value, DType.FLOAT32)]
        self.node("Pad", operands, self.result(node, image))

    def _resample(self, node: Node, operator: Resample) -> None:
        if (mode := self._resizing(node, operator)) is None:
            self._body(node, operator)
            return
        image, whole = self._is_image(node), self.types[node.output].shape
        sizes = self.integers([whole[axis] for axis in TO_IMAGE] if image else whole)
        operands = [self.read(node.inputs[0], image), "", "", sizes]
        kind, walk = mode
        self.node("Resize", operands, self.result(node, image), mode=kind, coordinate_transformation_mode=walk)

    def _resizing(self, node: Node, operator: Resample) -> tuple[str, str] | None:
        """The mode of the Resize that a Resample with constant taps is, and how it walks; None where it is none."""
        x, *names = node.inputs
        if any(name not in self.graph.constants for name in names):
            return None
        taps = [self.graph.constants[name] for name in names]
        sizes = [(self.types[x].shape[axis], self.types[node.output].shape[axis]) for axis in operator.axes]
        for cubic, walk in product((False, True), ("half_pixel", "asymmetric", "align_corners")):
            axes = (ResizeAxis(a, b, b / a, walk).taps(cubic, -0.75, False, False) for a, b in sizes)
            pairs = zip(taps, (array for axis in axes for array in axis), strict=True)
            if all(one.shape == other.shape and np.allclose(one, other, atol=1e-6) for one, other in pairs):
                return "cubic" if cubic else "linear", walk
        return None

    def _quantisation(self, node: Node, operator: Operator) -> None:
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
                if _window_of(self.graph, reader) is not None:
                    return True
                if reader.operator.dequantises or reader.operator.pads:
                    reached.add(reader.output)
        return False

    def _convolution(self, node: Node, operator: Convolution) -> None:
        channels, kernel = self.types[node.inputs[0]].shape[3], self.types[node.inputs[1]].shape
        source, pads = self.absorbed.get(node.inputs[0], (node.inputs[0], [0, 0, 0, 0]))
        x = self.read(source, image=True)
        weights = self._weights(node.inputs[1], (3, 0, 1, 2) if operator.is_channelwise else TO_IMAGE)
        operands = [x, weights, *(self.read(name) for name in node.inputs[2:])]
        sizes = {"kernel_shape": list(kernel[1:3]), "strides": list(operator.stride)}
        sizes |= {"dilations": list(operator.dilation), "pads": pads}
        group = channels if operator.is_channelwise else channels // kernel[3]
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

    def _dense(self, node: Node, operator: FullyConnected) -> None:
        if len(self.types[node.inputs[0]].shape) == 2:
            self._standard(node, "Gemm", transB=1)
            return
        operands = [self.read(name) for name in node.inputs]
        turned = self.node("Transpose", [operands[1]], self.fresh(f"{node.inputs[1]}_turned"), perm=[1, 0])
        output = self.result(node)
        product = output if len(operands) == 2 else self.fresh(f"{node.output}_product")
        self.node("MatMul", [operands[0], turned], product)
        if len(operands) > 2:
            self.node("Add", [product, operands[2]], output)

    def _pool(self, node: Node, operator: Pool2d, op_type: str) -> None:
        if not self._is_real(node):
            self._body(node, operator)
            return
        (top, bottom), (left, right) = operator.padding
        pads = [top, left, bottom, right]
        whole = operator.kernel == self.types[node.inputs[0]].shape[1:3] and not any(pads)
        if whole and op_type == "AveragePool":
            self._standard(node, "GlobalAveragePool", image=True)
        else:
            sizes = {"kernel_shape": list(operator.kernel), "strides": list(operator.stride), "pads": pads}
            self._standard(node, op_type, image=True, **sizes)

    def _transpose(self, node: Node, operator: Transpose) -> None:
        source, inner, order = node.inputs[0], node.output not in self.graph.outputs, operator.permutation
        if order == TO_GRAPH and inner:
            self.images[node.output] = self.read(source)
        elif order == TO_IMAGE and source in self.images and inner:
            self.plain[node.output] = self.images[source]
        elif order == TO_IMAGE and source in self.images:
            self.node("Identity", [self.images[source]], self.result(node))
        else:
            self._standard(node, "Transpose", perm=list(order))


_WRITERS: Mapping[type[Operator], Callable[[_OnnxWriter, Node, Any], None]] = {
    Quantize: _OnnxWriter._quantisation,
    Dequantize: _OnnxWriter._quantisation,
    Conv2d: _OnnxWriter._convolution,
    DepthwiseConv2d: _OnnxWriter._convolution,
    FullyConnected: _OnnxWriter._dense,
    MaxPool2d: lambda writer, node, pool: writer._pool(node, pool, "MaxPool"),
    AveragePool2d: lambda writer, node, pool: writer._pool(node, pool, "AveragePool"),
    Clamp: _OnnxWriter._clamp,
    Unary: lambda writer, node, unary: writer._meaning(node, writer._is_image(node)),
    Normalise: _OnnxWriter._normalise,
    Softmax: _OnnxWriter._softmax,
    Add: lambda writer, node, add: writer._two(node, "Add"),
    Binary: lambda writer, node, binary: writer._two(node, binary.kind.value),
    Concat: _OnnxWriter._concat,
    Transpose: _OnnxWriter._transpose,
    Reshape: _OnnxWriter._reshape,
    Pad: _OnnxWriter._pad,
    Resample: _OnnxWriter._resample,
    Gather: lambda writer, node, gather: writer._standard(node, "Gather", axis=gather.axis),
}
"""How each operator with a form of its own in ONNX is written."""
