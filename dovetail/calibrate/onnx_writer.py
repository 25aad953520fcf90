"""A graph as plain ONNX: standard operators, images in ONNX's order (NCHW), as other tools read it.

A value of four axes may be there in the graph's own order (NHWC) and as an image (NCHW). Each operator asks for the
form it computes in; a transpose is written where that form is not there yet, and a graph's own transposes between the
two orders only give a form a second name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from dovetail import __version__
from dovetail.errors import DovetailError
from dovetail.graph.graph import Graph, Node
from dovetail.graph.onnx_body import OPSET, OnnxBody, element_type
from dovetail.graph.types import Array, DType
from dovetail.operators.linear import Conv2d, DepthwiseConv2d
from dovetail.operators.movement import Pad
from dovetail.operators.quantization import Dequantize

TO_IMAGE = (0, 3, 1, 2)
"""NHWC to NCHW."""
TO_GRAPH = (0, 2, 3, 1)
"""NCHW to NHWC."""
_NARROW = {
    DType.INT2: TensorProto.INT4,
    DType.UINT2: TensorProto.UINT4,
    DType.INT4: TensorProto.INT4,
    DType.UINT4: TensorProto.UINT4,
}
"""How constants narrower than a byte are stored. ONNX has 2-bit tensors since opset 25, but ONNX Runtime 1.31 refuses a
convolution with such weights (it makes a QLinearConv of it, which takes none), so they are 4-bit tensors of -2 to 1;
targets with narrow weights find the width from the values (`dovetail.adapt.narrow`)."""
IR_VERSION = 10
"""The file format of opset 21."""
_MOST_BYTES = (1 << 31) - 1


class Writer:
    """What is written so far, and which forms of each value there are."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.body = OnnxBody(tuple(graph.types))
        self.initializers: list[onnx.TensorProto] = []
        self.plain: dict[str, str] = {name: name for name in graph.inputs}
        """Name of a value in the graph's order."""
        self.images: dict[str, str] = {}
        """Name of a value in NCHW."""
        self.producers = graph.producers()
        self.absorbed = _absorbed_pads(graph)
        self._taken = set(graph.types)

    def fresh(self, stem: str) -> str:
        """A name that is not used yet."""
        name, count = stem, 1
        while name in self._taken:
            count += 1
            name = f"{stem}_{count}"
        self._taken.add(name)
        return name

    def node(self, op_type: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        """Write a standard operator."""
        self.body.nodes.append(helper.make_node(op_type, list(inputs), [output], name=output, **attributes))
        return output

    def constant(self, name: str, array: Array, dtype: DType) -> str:
        """Write a constant under this very name."""
        if dtype in _NARROW:
            tensor = helper.make_tensor(name, _NARROW[dtype], array.shape, array.reshape(-1).tolist())
        else:
            tensor = numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)
        self.initializers.append(tensor)
        return name

    def read(self, value: str) -> str:
        """The value in the graph's order."""
        if value not in self.plain:
            if value in self.graph.constants:
                self.plain[value] = self.constant(value, self.graph.constants[value], self.graph.types[value].dtype)
            elif self._is_static(value):
                node = self.producers[value]
                rank = len(self.graph.types[value].shape)
                axis = node.operator.axis % rank if isinstance(node.operator, Dequantize) and rank else 0
                self.plain[value] = self.scaled("DequantizeLinear", node, self.read(node.inputs[0]), value, axis)
            else:
                name = self.fresh(f"{value}_nhwc") if value not in self.graph.outputs else value
                self.plain[value] = self._moved(value, name, image=False)
        return self.plain[value]

    def read_image(self, value: str) -> str:
        """The value of four axes in NCHW."""
        if value not in self.images:
            if value in self.graph.constants:
                array = self.graph.constants[value].transpose(TO_IMAGE)
                self.images[value] = self.constant(self.fresh(value), array, self.graph.types[value].dtype)
            else:
                name = self.fresh(f"{value}_nchw")
                self.images[value] = self._moved(value, name, image=True)
        return self.images[value]

    def scaled(self, op_type: str, node: Node, x: str, name: str, axis: int) -> str:
        """Write QuantizeLinear or DequantizeLinear of `x` with a node's parameters, which run along `axis` of it."""
        graph = self.graph
        integers = graph.types[node.output if op_type == "QuantizeLinear" else node.inputs[0]].dtype
        scale, zero_point = (graph.constants[value] for value in node.inputs[1:])
        names = []
        for value, array, dtype in ((node.inputs[1], scale, DType.FLOAT32), (node.inputs[2], zero_point, integers)):
            if value not in self.plain:
                flat = array.reshape(()) if array.size == 1 else array
                self.plain[value] = self.constant(value, flat.astype(dtype.numpy), dtype)
            names.append(self.plain[value])
        attributes = {"axis": axis} if scale.size > 1 else {}
        return self.node(op_type, [x, *names], name, **attributes)

    def _is_static(self, value: str) -> bool:
        """True for what constant integers stand for."""
        node = self.producers.get(value)
        return node is not None and isinstance(node.operator, Dequantize) and node.inputs[0] in self.graph.constants

    def _moved(self, value: str, name: str, image: bool) -> str:
        """A computed value in the other order.

        Of what is dequantised the integers are turned: ONNX Runtime 1.31 refuses a transpose between DequantizeLinear
        and a convolution at opset 21.
        """
        source = self.producers.get(value)
        order = TO_IMAGE if image else TO_GRAPH
        if source is not None and isinstance(source.operator, Dequantize) and source.inputs[0] not in self.graph.inputs:
            integers = self.read_image(source.inputs[0]) if image else self.read(source.inputs[0])
            axis = source.operator.axis % 4
            return self.scaled("DequantizeLinear", source, integers, name, order.index(axis) if image else axis)
        return self.node("Transpose", [self.read(value) if image else self.images[value]], name, perm=list(order))

    def is_image(self, value: str) -> bool:
        """True when the value is there in NCHW."""
        return value in self.images

    def result(self, node: Node, image: bool) -> str:
        """The name an operator's result gets; the other form of an output takes the output's own."""
        name = node.output
        if image and name in self.graph.outputs:
            name = self.fresh(f"{name}_nchw")
        (self.images if image else self.plain)[node.output] = name
        return name


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
        if (
            spatial
            and readers
            and all(isinstance(u.operator, Conv2d | DepthwiseConv2d) and u.inputs[0] == node.output for u in readers)
        ):
            found.append(node.output)
    return frozenset(found)


def plain_onnx(graph: Graph, notes: dict[str, str] | None = None) -> onnx.ModelProto:
    """The graph as a model of standard operators, opset 21.

    Args:
        graph: floats and integers; inputs and outputs keep their names and order of axes.
        notes: metadata of the model.
    """
    from dovetail.calibrate.onnx_nodes import write_node

    writer = Writer(graph)
    for node in graph.nodes:
        if node.output not in writer.absorbed:
            write_node(writer, node)
    for name in graph.outputs:
        if writer.read(name) != name:
            writer.node("Identity", [writer.read(name)], name)
    body = onnx.GraphProto(name=graph.name)
    for names, field in ((graph.inputs, body.input), (graph.outputs, body.output)):
        for name in names:
            kind = graph.types[name]
            field.append(helper.make_tensor_value_info(name, element_type(kind.dtype), list(kind.shape)))
    body.node.extend(writer.body.nodes)
    body.initializer.extend(writer.initializers)
    model = onnx.ModelProto(
        ir_version=IR_VERSION, producer_name="dovetail.calibrate", producer_version=__version__, graph=body
    )
    model.opset_import.extend([onnx.OperatorSetIdProto(domain="", version=OPSET)])
    for key, value in sorted((notes or {}).items()):
        model.metadata_props.add(key=key, value=value)
    if model.ByteSize() > _MOST_BYTES:
        raise DovetailError(f"{model.ByteSize()} bytes are more than an ONNX file can hold ({_MOST_BYTES})",
                            where=graph.name, hint="quantise a smaller network, or parts of this one")
    return model
