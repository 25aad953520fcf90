"""A zoo network with weights and measured ranges, written as a quantised ONNX model in QDQ form.

QDQ form: each operator stands between a DequantizeLinear and a QuantizeLinear; activations are int8 with a zero
point, weights int8 per output channel without one, biases int32 of scale input x weight. Input and output are int8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from dovetail.guests.zoo.networks import ZooLayer, ZooLayerKind, ZooNetwork, same_padding
from dovetail.guests.zoo.weights import Floats, Parameters, ZooWeights, forward
from dovetail.ir.onnx_body import IR_VERSION, OPSET, OnnxBody
from dovetail.ir.types import DType


@dataclass(frozen=True, slots=True)
class ZooQuantisation:
    """How an int8 activation stands for a real one."""

    scale: np.float32
    """The real step between two neighbouring integers, greater than 0."""
    zero_point: int
    """The integer that stands for 0.0, -128 to 127."""

    @classmethod
    def spanning(cls, low: float, high: float) -> ZooQuantisation:
        """The finest whose 256 integers reach from `low` to `high`, and in which 0.0 is exact."""
        low, high = min(low, 0.0), max(high, 0.0)
        scale = np.float32(max(high - low, 2.0**-20) / 255)
        return cls(scale, int(np.clip(np.rint(-128 - low / float(scale)), -128, 127)))


PROBABILITY = ZooQuantisation(np.float32(1 / 256), -128)
"""The quantisation TFLite fixes for the result of a softmax."""


_OPERATORS = {
    ZooLayerKind.CONVOLUTION: "Conv",
    ZooLayerKind.DEPTHWISE: "Conv",
    ZooLayerKind.DENSE: "Gemm",
    ZooLayerKind.ADD: "Add",
}
_OPERATORS |= {ZooLayerKind.POOL: "GlobalAveragePool", ZooLayerKind.FLATTEN: "Flatten", ZooLayerKind.SOFTMAX: "Softmax"}


class _ZooModelWriter(OnnxBody):
    """The nodes and constants written so far, named as exporters name them."""

    def constant(self, name: str, array: npt.NDArray[Any]) -> str:
        return self.initializer(name, array, DType.of(array.dtype))

    def node(self, op_type: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        """Add an operator with one output; its name."""
        super().node(op_type, inputs, output, **attributes)
        self.nodes[-1].name = output.removesuffix("_output_0")
        return output

    def activation_constants(self, tensor: str, quantisation: ZooQuantisation) -> list[str]:
        """Add scale and zero point of a tensor; their names."""
        scale = self.constant(f"{tensor}_scale", np.array(quantisation.scale))
        return [scale, self.constant(f"{tensor}_zero_point", np.array(quantisation.zero_point, np.int8))]


_Activation = tuple[str, ZooQuantisation]
"""A value later layers read: the float tensor after its DequantizeLinear, and its quantisation."""


def _write_parameters(
    writer: _ZooModelWriter, layer: ZooLayer, parameters: Parameters, input_scale: np.float32
) -> list[str]:
    """Weights and bias with their DequantizeLinear; the names of the two float tensors."""
    weight = parameters.weight
    peak = np.abs(weight).reshape(len(weight), -1).max(axis=1)
    scale = (np.maximum(peak, 2.0**-20) / 127).astype(np.float32)
    steps = np.rint(weight / scale.astype(np.float64).reshape(-1, *(1 for _ in weight.shape[1:])))
    bias_scale = input_scale * scale
    bias_steps = np.clip(np.rint(parameters.bias / bias_scale.astype(np.float64)), -(2**31), 2**31 - 1)
    pairs = {"weight": (steps.astype(np.int8), scale), "bias": (bias_steps.astype(np.int32), bias_scale)}
    names = []
    for kind, (integers, scales) in pairs.items():
        stem = f"{layer.name}.{kind}"
        inputs = [writer.constant(f"{stem}_quantized", integers), writer.constant(f"{stem}_scale", scales)]
        inputs.append(writer.constant(f"{stem}_zero_point", np.zeros(len(scales), integers.dtype)))
        names.append(writer.node("DequantizeLinear", inputs, f"{stem}_dequantized", axis=0))
    return names


def _attributes(layer: ZooLayer, image: Floats, parameters: Mapping[str, Parameters]) -> dict[str, Any]:
    """The ONNX attributes of the layer's operator on an input of the shape of `image`."""
    if layer.kind not in (ZooLayerKind.CONVOLUTION, ZooLayerKind.DEPTHWISE):
        return {
            ZooLayerKind.DENSE: {"transB": 1},
            ZooLayerKind.FLATTEN: {"axis": 1},
            ZooLayerKind.SOFTMAX: {"axis": -1},
        }.get(layer.kind, {})
    margins = [same_padding(image.shape[2 + a], layer.kernel[a], layer.stride) for a in (0, 1)]
    return {
        "group": image.shape[1] // parameters[layer.name].weight.shape[1],
        "kernel_shape": list(layer.kernel),
        "pads": [before for before, _ in margins] + [after for _, after in margins],
        "strides": [layer.stride, layer.stride],
    }


def _output_quantisation(layer: ZooLayer, source: ZooQuantisation, value: Floats) -> ZooQuantisation:
    """Measured, except: mean and flatten keep their input's (TFLite demands it), softmax has TFLite's fixed one."""
    if layer.kind in (ZooLayerKind.POOL, ZooLayerKind.FLATTEN):
        return source
    if layer.kind is ZooLayerKind.SOFTMAX:
        return PROBABILITY
    return ZooQuantisation.spanning(float(value.min()), float(value.max()))


def _write_layer(
    writer: _ZooModelWriter,
    layer: ZooLayer,
    inputs: list[_Activation],
    values: Mapping[str, Floats],
    prepared: ZooWeights,
) -> tuple[str, ZooQuantisation]:
    """The layer's operator and ReLU; the float tensor it ends in and how that is to be quantised."""
    sources, quantisation = [tensor for tensor, _ in inputs], inputs[0][1]
    if layer.name in prepared.parameters:
        sources += _write_parameters(writer, layer, prepared.parameters[layer.name], quantisation.scale)
    operator = _OPERATORS[layer.kind]
    attributes = _attributes(layer, values[layer.inputs[0]], prepared.parameters)
    result = writer.node(operator, sources, f"/{layer.name}/{operator}_output_0", **attributes)
    if layer.relu:
        result = writer.node("Relu", [result], f"/{layer.name}/Relu_output_0")
    return result, _output_quantisation(layer, quantisation, values[layer.name])


def model(network: ZooNetwork, prepared: ZooWeights) -> onnx.ModelProto:
    """The network as an ONNX model of batch 1, input `input` and output `output`, both int8.

    Activation ranges are the lowest and highest values that the calibration inputs give.
    """
    writer = _ZooModelWriter()
    values = forward(network, prepared.parameters, prepared.calibration)
    name, quantisation = network.input_name, ZooQuantisation.spanning(*network.input_range)
    quantised, constants = name, writer.activation_constants(name, quantisation)
    activations: dict[str, _Activation] = {}
    for layer in network.layers:
        dequantised = writer.node("DequantizeLinear", [quantised, *constants], f"{quantised}_dequantized")
        activations[name] = (dequantised, quantisation)
        sources = [activations[source] for source in layer.inputs]
        result, quantisation = _write_layer(writer, layer, sources, values, prepared)
        name, constants = layer.name, writer.activation_constants(result, quantisation)
        quantised = "output" if layer is network.layers[-1] else f"{result}_quantized"
        writer.node("QuantizeLinear", [result, *constants], quantised)
    return _whole(writer, network, values[name].shape[1:], TensorProto.INT8)


def float_model(network: ZooNetwork, prepared: ZooWeights) -> onnx.ModelProto:
    """The network as a float ONNX model of batch 1, input `input` and output `output`."""
    writer = _ZooModelWriter()
    values = forward(network, prepared.parameters, prepared.calibration[:1])
    tensors = {network.input_name: "input"}
    for layer in network.layers:
        sources = [tensors[name] for name in layer.inputs]
        parameters = prepared.parameters.get(layer.name)
        if parameters is not None:
            for kind, array in (("weight", parameters.weight), ("bias", parameters.bias)):
                sources.append(writer.constant(f"{layer.name}.{kind}", array.astype(np.float32)))
        operator = _OPERATORS[layer.kind]
        whole = layer is network.layers[-1]
        result = "output" if whole and not layer.relu else f"/{layer.name}/{operator}_output_0"
        attributes = _attributes(layer, values[layer.inputs[0]], prepared.parameters)
        tensors[layer.name] = writer.node(operator, sources, result, **attributes)
        if layer.relu:
            result = "output" if whole else f"/{layer.name}/Relu_output_0"
            tensors[layer.name] = writer.node("Relu", [tensors[layer.name]], result)
    return _whole(writer, network, values[network.layers[-1].name].shape[1:], TensorProto.FLOAT)


def _whole(writer: _ZooModelWriter, network: ZooNetwork, result: tuple[int, ...], kind: int) -> onnx.ModelProto:
    """The model of what is written, its ends of one element type."""
    shapes = {"input": network.input_shape, "output": result}
    ends = {end: helper.make_tensor_value_info(end, kind, [1, *shape]) for end, shape in shapes.items()}
    graph = helper.make_graph(writer.nodes, network.name, [ends["input"]], [ends["output"]], writer.initializers)
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="dovetail.zoo"
    )
