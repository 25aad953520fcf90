"""A zoo network with weights and measured ranges, written as a float ONNX model or a quantised one in QDQ form.

QDQ form: each operator stands between a DequantizeLinear and a QuantizeLinear; activations are int8 with a zero
point, weights int8 per output channel without one, biases int32 of scale input x weight. Input and output are int8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from dovetail.guests.zoo.networks import INPUT, ZooLayer, ZooLayerKind, ZooNetwork
from dovetail.guests.zoo.weights import Floats, Parameters, ZooWeights, forward
from dovetail.ir.onnx_body import IR_VERSION, OPSET, OnnxBody
from dovetail.ir.types import DType
from dovetail.records import Record


class ZooQuantisation(Record):
    """How an int8 activation stands for a real one."""

    scale: np.float32
    """Real step between two neighbouring integers, greater than 0."""
    zero_point: int
    """Integer that stands for 0.0, -128 to 127."""

    @classmethod
    def spanning(cls, low: float, high: float) -> ZooQuantisation:
        """The finest quantisation whose 256 integers reach from `low` to `high`, and in which 0.0 is exact."""
        low, high = min(low, 0.0), max(high, 0.0)
        scale = np.float32(max(high - low, 2.0**-20) / 255)
        return cls(scale, int(np.clip(np.rint(-128 - low / float(scale)), -128, 127)))


PROBABILITY = ZooQuantisation(np.float32(1 / 256), -128)
"""The quantisation TFLite fixes for the result of a softmax."""


_OPERATORS: dict[ZooLayerKind, tuple[str, dict[str, Any]]] = {
    ZooLayerKind.CONVOLUTION: ("Conv", {}),
    ZooLayerKind.DEPTHWISE: ("Conv", {}),
    ZooLayerKind.DENSE: ("Gemm", {"transB": 1}),
    ZooLayerKind.ADD: ("Add", {}),
    ZooLayerKind.POOL: ("GlobalAveragePool", {}),
    ZooLayerKind.FLATTEN: ("Flatten", {"axis": 1}),
    ZooLayerKind.SOFTMAX: ("Softmax", {"axis": -1}),
}
"""Name of a kind's operator, and attributes that are always the same."""


class _ZooModelWriter(OnnxBody):
    """The nodes and constants written so far, named as exporters name them."""

    def constant(self, name: str, array: npt.NDArray[Any]) -> str:
        return self.initializer(name, array, DType.of(array.dtype))

    def node(self, op_type: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        """Add an operator with one output; its name."""
        super().node(op_type, inputs, output, **attributes)
        self.nodes[-1].name = output.removesuffix("_output_0")
        return output

    def steps(self, tensor: str, quantisation: ZooQuantisation) -> list[str]:
        """Add scale and zero point of a tensor; their names."""
        scale = self.constant(f"{tensor}_scale", np.array(quantisation.scale))
        return [scale, self.constant(f"{tensor}_zero_point", np.array(quantisation.zero_point, np.int8))]

    def quantised(self, tensor: str, quantisation: ZooQuantisation, is_output: bool) -> str:
        """Add a QuantizeLinear, and a DequantizeLinear unless it is the network's output; the last one's output."""
        steps = self.steps(tensor, quantisation)
        integers = self.node("QuantizeLinear", [tensor, *steps], "output" if is_output else f"{tensor}_quantized")
        return integers if is_output else self.node("DequantizeLinear", [integers, *steps], f"{integers}_dequantized")


def _quantised_parameters(
    writer: _ZooModelWriter, layer: ZooLayer, parameters: Parameters, input_scale: np.float32
) -> list[str]:
    """Integer weights and bias with their DequantizeLinear; the names of the two float tensors."""
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


def _float_parameters(writer: _ZooModelWriter, layer: ZooLayer, parameters: Parameters) -> list[str]:
    arrays = {"weight": parameters.weight, "bias": parameters.bias}
    return [writer.constant(f"{layer.name}.{kind}", array.astype(np.float32)) for kind, array in arrays.items()]


def _attributes(layer: ZooLayer, image: Floats, parameters: Mapping[str, Parameters]) -> dict[str, Any]:
    """The ONNX attributes of the layer's operator on an input of the shape of `image`."""
    if layer.kind not in (ZooLayerKind.CONVOLUTION, ZooLayerKind.DEPTHWISE):
        return _OPERATORS[layer.kind][1]
    return {
        "group": image.shape[1] // parameters[layer.name].weight.shape[1],
        "kernel_shape": list(layer.kernel),
        "pads": [side for sides in zip(*layer.borders(*image.shape[2:]), strict=True) for side in sides],
        "strides": [layer.stride, layer.stride],
    }


def _output_quantisation(layer: ZooLayer, source: ZooQuantisation, value: Floats) -> ZooQuantisation:
    """Measured, except: mean and flatten keep their input's (TFLite demands it), softmax has TFLite's fixed one."""
    if layer.kind in (ZooLayerKind.POOL, ZooLayerKind.FLATTEN):
        return source
    if layer.kind is ZooLayerKind.SOFTMAX:
        return PROBABILITY
    return ZooQuantisation.spanning(float(value.min()), float(value.max()))


def model(network: ZooNetwork, prepared: ZooWeights, is_quantised: bool = True) -> onnx.ModelProto:
    """The network as an ONNX model of batch 1, input `input` and output `output`: both int8, or float32.

    Activation ranges are the lowest and highest values that the calibration inputs give.
    """
    writer, parameters = _ZooModelWriter(), prepared.parameters
    values = forward(network, parameters, prepared.calibration if is_quantised else prepared.calibration[:1])
    quantisations = {INPUT: ZooQuantisation.spanning(*network.input_range)}
    tensors = {INPUT: "input"}
    if is_quantised:
        steps = writer.steps("input", quantisations[INPUT])
        tensors[INPUT] = writer.node("DequantizeLinear", ["input", *steps], "input_dequantized")
    for layer in network.layers:
        is_output, source = layer is network.layers[-1], quantisations[layer.inputs[0]]
        inputs = [tensors[name] for name in layer.inputs]
        if (own := parameters.get(layer.name)) is not None and is_quantised:
            inputs += _quantised_parameters(writer, layer, own, source.scale)
        elif own is not None:
            inputs += _float_parameters(writer, layer, own)
        operators = [_OPERATORS[layer.kind][0], *(["Relu"] if layer.relu else [])]
        outputs = [f"/{layer.name}/{operator}_output_0" for operator in operators]
        if is_output and not is_quantised:
            outputs[-1] = "output"
        result = writer.node(
            operators[0], inputs, outputs[0], **_attributes(layer, values[layer.inputs[0]], parameters)
        )
        for operator, output in zip(operators[1:], outputs[1:], strict=True):
            result = writer.node(operator, [result], output)
        quantisations[layer.name] = _output_quantisation(layer, source, values[layer.name])
        if is_quantised:
            result = writer.quantised(result, quantisations[layer.name], is_output)
        tensors[layer.name] = result
    shapes = {"input": network.input_shape, "output": values[network.layers[-1].name].shape[1:]}
    kind = TensorProto.INT8 if is_quantised else TensorProto.FLOAT
    ends = [helper.make_tensor_value_info(end, kind, [1, *shape]) for end, shape in shapes.items()]
    graph = helper.make_graph(writer.nodes, network.name, ends[:1], ends[1:], writer.initializers)
    opset = helper.make_opsetid("", OPSET)
    return helper.make_model(graph, opset_imports=[opset], ir_version=IR_VERSION, producer_name="dovetail.zoo")
