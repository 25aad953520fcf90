"""The float graph in QDQ form: Quantize and Dequantize put around what gets integers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from dovetail.guests.ptq.layers import LayerWeights, WeightLimits
from dovetail.guests.ptq.steps import (
    LEAST,
    RECURRENT,
    Data,
    StepsByValue,
    TensorQuantisation,
    carries,
    spanning,
    steps_of,
)
from dovetail.ir.graph import Graph, GraphBuilder, Node
from dovetail.ir.operators.activation import Clamp
from dovetail.ir.operators.arithmetic import Dequantize, Quantize
from dovetail.ir.pattern import occurrence
from dovetail.ir.types import Array, DType, TensorType
from dovetail.records import Record

MOST_BIAS = 2**30
"""The largest integer a bias is given, so that sums stay within 32 bits."""


class Scheme(Record):
    """Everything that was decided about the integers of a network."""

    activations: StepsByValue
    """By float value."""
    weights: Mapping[str, LayerWeights]
    """By result of the layer; layers that are not here stay float."""
    biases: Data
    """float32 [C], by result of the layer."""
    integer_ends: bool = False
    """Whether inputs and outputs are integers instead of floats."""


def qdq_graph(graph: Graph, scheme: Scheme) -> Graph:
    """The graph with every decision written down; inputs, outputs and values keep their names."""
    return _QdqWriter(graph, scheme).run()


@dataclass
class _QdqWriter:
    graph: Graph
    scheme: Scheme
    names: dict[str, str] = field(default_factory=dict)
    """The value of the new graph to read, by value of the old one."""
    outputs: dict[str, str] = field(default_factory=dict)
    """The same for outputs of the network."""

    def __post_init__(self) -> None:
        self.builder = GraphBuilder(self.graph.name)

    def run(self) -> Graph:
        for name in self.graph.inputs:
            self._input(name)
        for node in self.graph.nodes:
            self._node(node)
        return self.builder.finish([self.outputs[name] for name in self.graph.outputs], self.graph.states)

    def _fresh(self, stem: str) -> str:
        return self.builder.fresh(stem, self.graph.types)

    def _constant(self, stem: str, array: Array, dtype: DType | None = None) -> str:
        return self.builder.constant(self._fresh(stem), array, dtype)

    def _parameters(self, stem: str, scale: Array | float, zero_point: Array | int) -> list[str]:
        return [
            self._constant(f"{stem}_scale", np.asarray(scale, np.float32).reshape(-1)),
            self._constant(f"{stem}_zero_point", np.asarray(zero_point, np.int32).reshape(-1)),
        ]

    def _input(self, name: str) -> None:
        kind, steps, ends = self.graph.types[name], self.scheme.activations.get(name), self.scheme.integer_ends
        self.names[name] = name
        if steps is not None:
            parameters = self._parameters(name, steps.scale, steps.zero_point)
            source = self.builder.input(name, TensorType(kind.shape, steps.dtype) if ends else kind)
            if not ends:
                source = self._quantized(name, steps, parameters, name, self._fresh(f"{name}_quantized"))
            self.names[name] = self.builder.add(Dequantize(), [source, *parameters], self._fresh(f"{name}_dequantized"))
        else:
            self.builder.input(name, kind)

    def _quantized(
        self, real: str, steps: TensorQuantisation, parameters: list[str], name: str, stem: str, origin: str = ""
    ) -> str:
        """The integers of a value. Values of fewer than 8 bits become 8-bit integers, which every reader of ONNX takes;
        their floats are limited first."""
        dtype = steps.dtype
        if dtype.bits < 8:
            low, high = (steps.real(end) for end in (dtype.low, dtype.high))
            real = self.builder.add(Clamp(low, high), [real], self._fresh(f"{name}_limited"), origin)
        return self.builder.add(Quantize(dtype.narrowed(max(dtype.bits, 8))), [real, *parameters], stem, origin)

    def _node(self, node: Node) -> None:
        operands = [self._operand(node, position) for position in range(len(node.inputs))]
        if node.output in self.scheme.biases and len(node.inputs) == 2:
            operands.append(self._bias(node))
        name, is_output = node.output, node.output in self.graph.outputs
        steps = self.scheme.activations.get(name)
        if steps is None and carries(node) and (is_output or not node.operator.pads):
            # Readers of QDQ models expect the pair behind every operator, also one that only moves elements. A border
            # stays with the convolution that has it as an attribute.
            steps = steps_of(self.graph, self.scheme.activations, name)
        stem = self._fresh(f"{name}_real") if is_output and steps is not None else name
        real = self.builder.add(node.operator, operands, stem, node.origin)
        self.names[name] = self.outputs[name] = real
        if steps is not None:
            parameters, whole = self._parameters(name, steps.scale, steps.zero_point), self.scheme.integer_ends
            stem = name if is_output and whole else self._fresh(f"{name}_quantized")
            integers = self._quantized(real, steps, parameters, name, stem, node.origin)
            stem = name if is_output and not whole else self._fresh(f"{name}_dequantized")
            self.names[name] = self.builder.add(Dequantize(), [integers, *parameters], stem, node.origin)
            self.outputs[name] = integers if whole else self.names[name]

    def _operand(self, node: Node, position: int) -> str:
        name = node.inputs[position]
        if name not in self.graph.constants:
            return self.names[name]
        weights = self.scheme.weights.get(node.output)
        if weights is not None and position == 1:
            return self._dequantized(name, weights.integers, weights.dtype, weights.scale, weights.axis)
        if weights is not None and position == 2:
            return self._bias(node)
        layer = occurrence(RECURRENT, self.graph, node) if node.output in self.scheme.activations else None
        if layer is not None and position in (1, 2):
            return self._gates(name, layer[RECURRENT].kind.gates)
        if name in self.names:
            return self.names[name]
        array, is_real = self.graph.constants[name], self.graph.types[node.output].dtype is DType.FLOAT32
        joined = is_real and (node.operator.pointwise == 2 or node.operator.joins) and self._on_integers(node)
        if array.dtype != np.float32 or not joined:
            self.names[name] = self.builder.constant(name, array, self.graph.types[name].dtype)
            return self.names[name]
        steps = spanning(float(array.min()), float(array.max()), DType.INT8, symmetric=False)
        scale, zero_point = np.array([steps.scale]), steps.zero_point
        return self._dequantized(name, steps.integers(array).astype(np.int8), DType.INT8, scale, zero_point=zero_point)

    def _gates(self, name: str, gates: int) -> str:
        """Weights of a recurrent layer as int8, with a scale for each gate."""
        rows, form = self.graph.constants[name], WeightLimits()
        peaks = np.abs(rows.reshape(gates, -1)).max(axis=1)
        scales = np.repeat((np.maximum(peaks, LEAST) / form.dtype.high).astype(np.float32), rows.shape[0] // gates)
        return self._dequantized(name, form.integers(rows, scales[:, None]).astype(np.int8), form.dtype, scales, 0)

    def _on_integers(self, node: Node) -> bool:
        """Whether an operand has steps; those of a layer normalisation's factor and offset have none."""
        computed = (name for name in node.inputs if name not in self.graph.constants)
        return any(steps_of(self.graph, self.scheme.activations, name) is not None for name in computed)

    def _bias(self, node: Node) -> str:
        """The bias in steps of input scale times weight scale, as int32."""
        bias, weights = self.scheme.biases[node.output], self.scheme.weights[node.output]
        source = steps_of(self.graph, self.scheme.activations, node.inputs[0])
        stem = node.inputs[2] if len(node.inputs) > 2 else f"{node.inputs[1]}_bias"
        if source is None:
            return self._constant(stem, bias.astype(np.float32))
        scale = np.asarray(np.float32(source.scale) * weights.scale, np.float32)
        integers = np.clip(np.rint(bias.astype(np.float64) / scale), -MOST_BIAS, MOST_BIAS).astype(np.int32)
        return self._dequantized(stem, integers, DType.INT32, scale, 0)

    def _dequantized(
        self, stem: str, integers: Array, dtype: DType, scale: Array, axis: int = -1, zero_point: int = 0
    ) -> str:
        """Constant integers and the floats they stand for; several scales run along an axis."""
        source = self._constant(f"{stem}_quantized", integers, dtype)
        parameters = self._parameters(stem, scale, np.full(scale.size, zero_point))
        place = axis if scale.size > 1 else -1
        return self.builder.add(Dequantize(place), [source, *parameters], self._fresh(f"{stem}_dequantized"))
