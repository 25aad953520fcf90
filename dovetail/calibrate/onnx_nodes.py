"""How each operator is written as plain ONNX; one without a writer here is written as its standard body."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf

import numpy as np

from dovetail.calibrate.onnx_writer import TO_GRAPH, TO_IMAGE, Writer
from dovetail.graph.graph import Node
from dovetail.graph.types import DType, TensorType
from dovetail.operators.activation import Clamp, Softmax, Unary
from dovetail.operators.arithmetic import Add
from dovetail.operators.base import Operator
from dovetail.operators.elementwise import Binary
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.operators.movement import Concat, Pad, Reshape, Transpose
from dovetail.operators.pooling import AveragePool2d, MaxPool2d
from dovetail.operators.quantization import Dequantize, Quantize
from dovetail.operators.selection import Gather

WriteNode = Callable[[Writer, Node], None]


def write_node(writer: Writer, node: Node) -> None:
    """Write an operator; its result is then known to the writer."""
    rule = _WRITERS.get(type(node.operator))
    if rule is None:
        _body(writer, node)
    else:
        rule(writer, node)


def _body(writer: Writer, node: Node) -> None:
    """The operator's meaning, in the graph's order."""
    operands = [writer.read(name) for name in node.inputs]
    types = [writer.graph.types[name] for name in node.inputs]
    found = node.operator.onnx(writer.body, operands, types)
    writer.node("Identity", [found], writer.result(node, image=False))


def _weights(writer: Writer, value: str, permutation: tuple[int, ...]) -> str:
    """Weights in ONNX's order; constants and dequantised constants are transposed here and now."""
    graph = writer.graph
    source = writer.producers.get(value)
    if value in graph.constants:
        array = graph.constants[value].transpose(permutation)
        return writer.constant(writer.fresh(value), array, graph.types[value].dtype)
    if source is None or not isinstance(source.operator, Dequantize) or source.inputs[0] not in graph.constants:
        name = writer.fresh(f"{value}_moved")
        return writer.node("Transpose", [writer.read(value)], name, perm=list(permutation))
    integers = source.inputs[0]
    moved = writer.constant(
        writer.fresh(f"{integers}_onnx"), graph.constants[integers].transpose(permutation), graph.types[integers].dtype
    )
    axis = source.operator.axis % len(permutation)
    return writer.scaled("DequantizeLinear", source, moved, writer.fresh(f"{value}_onnx"), permutation.index(axis))


def _quantisation(writer: Writer, node: Node) -> None:
    operator = node.operator
    assert isinstance(operator, Quantize | Dequantize)
    source = node.inputs[0]
    if source in writer.graph.constants:
        return  # written in the order it is read in
    op_type = "QuantizeLinear" if isinstance(operator, Quantize) else "DequantizeLinear"
    image = writer.is_image(source) or _input_read_as_image(writer, node)
    x = writer.read_image(source) if image else writer.read(source)
    rank = len(writer.graph.types[source].shape)
    axis = operator.axis % rank if rank else 0
    place = TO_IMAGE.index(axis) if image else axis
    writer.scaled(op_type, node, x, writer.result(node, image), place)


def _input_read_as_image(writer: Writer, node: Node) -> bool:
    """Whether an input of the network is transposed before it is quantised, as tools expect Quantize and Dequantize
    side by side and next to the operator."""
    graph = writer.graph
    if node.inputs[0] not in graph.inputs or len(graph.types[node.output].shape) != 4:
        return False
    reached = {node.output}
    for reader in graph.nodes:
        if reader.inputs and reader.inputs[0] in reached:
            if isinstance(reader.operator, Conv2d | DepthwiseConv2d | MaxPool2d | AveragePool2d):
                return True
            if isinstance(reader.operator, Dequantize | Pad):
                reached.add(reader.output)
    return False


def _convolution(writer: Writer, node: Node) -> None:
    operator = node.operator
    assert isinstance(operator, Conv2d | DepthwiseConv2d)
    types = writer.graph.types
    source, pads = node.inputs[0], [0, 0, 0, 0]
    channels = types[source].shape[3]
    if source in writer.absorbed:
        border = writer.producers[source]
        assert isinstance(border.operator, Pad)
        pads = [*border.operator.before[1:3], *border.operator.after[1:3]]
        source = border.inputs[0]
    kernel = types[node.inputs[1]].shape
    depthwise = isinstance(operator, DepthwiseConv2d)
    operands = [writer.read_image(source), _weights(writer, node.inputs[1], (3, 0, 1, 2) if depthwise else TO_IMAGE)]
    operands += [writer.read(name) for name in node.inputs[2:]]
    writer.node(
        "Conv",
        operands,
        writer.result(node, image=True),
        kernel_shape=list(kernel[1:3]),
        strides=list(operator.stride),
        dilations=list(operator.dilation),
        pads=pads,
        group=channels // (1 if depthwise else kernel[3]),
    )


def _dense(writer: Writer, node: Node) -> None:
    shape = writer.graph.types[node.inputs[0]].shape
    operands = [writer.read(name) for name in node.inputs]
    if len(shape) == 2:
        writer.node("Gemm", operands, writer.result(node, image=False), transB=1)
        return
    turned = writer.node("Transpose", [operands[1]], writer.fresh(f"{node.inputs[1]}_turned"), perm=[1, 0])
    output = writer.result(node, image=False)
    if len(operands) == 2:
        writer.node("MatMul", [operands[0], turned], output)
        return
    product = writer.node("MatMul", [operands[0], turned], writer.fresh(f"{node.output}_product"))
    writer.node("Add", [product, operands[2]], output)


def _pool(writer: Writer, node: Node) -> None:
    operator = node.operator
    assert isinstance(operator, MaxPool2d | AveragePool2d)
    if writer.graph.types[node.inputs[0]].dtype is not DType.FLOAT32:
        _body(writer, node)
        return
    op_type = "MaxPool" if isinstance(operator, MaxPool2d) else "AveragePool"
    x = writer.read_image(node.inputs[0])
    output = writer.result(node, image=True)
    (top, bottom), (left, right) = operator.padding
    whole = operator.kernel == writer.graph.types[node.inputs[0]].shape[1:3] and not any((top, bottom, left, right))
    if whole and op_type == "AveragePool":
        writer.node("GlobalAveragePool", [x], output)
        return
    sizes = {
        "kernel_shape": list(operator.kernel),
        "strides": list(operator.stride),
        "pads": [top, left, bottom, right],
    }
    writer.node(op_type, [x], output, **sizes)


def _clamp(writer: Writer, node: Node) -> None:
    operator = node.operator
    assert isinstance(operator, Clamp)
    image = writer.is_image(node.inputs[0])
    x = writer.read_image(node.inputs[0]) if image else writer.read(node.inputs[0])
    output = writer.result(node, image)
    if (operator.low, operator.high) == (0.0, inf):
        writer.node("Relu", [x], output)
        return
    limits = [
        "" if abs(limit) == inf else writer.body.scalar(limit, DType.FLOAT32) for limit in (operator.low, operator.high)
    ]
    writer.node("Clip", [x, *limits], output)


def _elementwise(writer: Writer, node: Node) -> None:
    """An operator whose standard body works on either order: it follows its operand."""
    image = writer.is_image(node.inputs[0])
    x = writer.read_image(node.inputs[0]) if image else writer.read(node.inputs[0])
    kind = writer.graph.types[node.inputs[0]]
    found = node.operator.onnx(writer.body, [x], [TensorType(kind.shape, kind.dtype)])
    _rename_last(writer, found, writer.result(node, image))


def _rename_last(writer: Writer, found: str, wanted: str) -> None:
    """Give the result of the node written last its name in the graph."""
    last = writer.body.nodes[-1]
    if list(last.output) == [found]:
        last.output[0] = wanted
        last.name = wanted
    else:
        writer.node("Identity", [found], wanted)


def _softmax(writer: Writer, node: Node) -> None:
    assert isinstance(node.operator, Softmax)
    if node.operator.beta != 1.0:
        _body(writer, node)
        return
    x = writer.read(node.inputs[0])
    writer.node("Softmax", [x], writer.result(node, image=False), axis=-1)


def _two(writer: Writer, node: Node) -> None:
    """An addition or another function of two: as images where one operand is one and both have four axes."""
    operator = node.operator
    types = [writer.graph.types[name] for name in node.inputs]
    four = all(len(kind.shape) == 4 for kind in types)
    image = four and any(writer.is_image(name) for name in node.inputs)
    operands = [writer.read_image(name) if image else writer.read(name) for name in node.inputs]
    output = writer.result(node, image)
    if types[0].dtype is DType.FLOAT32 and isinstance(operator, Add | Binary):
        writer.node(operator.kind.value if isinstance(operator, Binary) else "Add", operands, output)
        return
    _rename_last(writer, operator.onnx(writer.body, operands, types), output)


def _concat(writer: Writer, node: Node) -> None:
    assert isinstance(node.operator, Concat)
    rank = len(writer.graph.types[node.output].shape)
    axis = node.operator.axis % rank
    image = rank == 4 and any(writer.is_image(name) for name in node.inputs)
    operands = [writer.read_image(name) if image else writer.read(name) for name in node.inputs]
    writer.node("Concat", operands, writer.result(node, image), axis=TO_IMAGE.index(axis) if image else axis)


def _transpose(writer: Writer, node: Node) -> None:
    assert isinstance(node.operator, Transpose)
    source, order = node.inputs[0], node.operator.permutation
    if order == TO_GRAPH and node.output not in writer.graph.outputs:
        writer.images[node.output] = writer.read(source)
    elif order == TO_IMAGE and writer.is_image(source) and node.output not in writer.graph.outputs:
        writer.plain[node.output] = writer.images[source]
    elif order == TO_IMAGE and writer.is_image(source):
        writer.node("Identity", [writer.images[source]], writer.result(node, image=False))
    else:
        writer.node("Transpose", [writer.read(source)], writer.result(node, image=False), perm=list(order))


def _reshape(writer: Writer, node: Node) -> None:
    """A reshape; of an image of one pixel in whatever order it is there."""
    assert isinstance(node.operator, Reshape)
    shape = writer.graph.types[node.inputs[0]].shape
    still = writer.is_image(node.inputs[0]) and shape[1:3] == (1, 1)
    x = writer.images[node.inputs[0]] if still else writer.read(node.inputs[0])
    target = writer.constant(writer.fresh(f"{node.output}_shape"), np.array(node.operator.shape, np.int64), DType.INT64)
    writer.node("Reshape", [x, target], writer.result(node, image=False))


def _gather(writer: Writer, node: Node) -> None:
    assert isinstance(node.operator, Gather)
    operands = [writer.read(name) for name in node.inputs]
    writer.node("Gather", operands, writer.result(node, image=False), axis=node.operator.axis)


def _pad(writer: Writer, node: Node) -> None:
    operator = node.operator
    assert isinstance(operator, Pad)
    kind = writer.graph.types[node.inputs[0]]
    if kind.dtype is not DType.FLOAT32 or len(kind.shape) != 4:
        _body(writer, node)
        return
    image = writer.is_image(node.inputs[0])
    x = writer.read_image(node.inputs[0]) if image else writer.read(node.inputs[0])
    order = TO_IMAGE if image else (0, 1, 2, 3)
    border = [sizes[axis] for sizes in (operator.before, operator.after) for axis in order]
    operands = [x, writer.body.integers(border), writer.body.scalar(operator.value, DType.FLOAT32)]
    writer.node("Pad", operands, writer.result(node, image))


_WRITERS: Mapping[type[Operator], WriteNode] = {
    Conv2d: _convolution,
    DepthwiseConv2d: _convolution,
    FullyConnected: _dense,
    MaxPool2d: _pool,
    AveragePool2d: _pool,
    Clamp: _clamp,
    Add: _two,
    Binary: _two,
    Concat: _concat,
    Transpose: _transpose,
    Reshape: _reshape,
    Pad: _pad,
    Gather: _gather,
    Quantize: _quantisation,
    Dequantize: _quantisation,
    Unary: _elementwise,
    Softmax: _softmax,
}
