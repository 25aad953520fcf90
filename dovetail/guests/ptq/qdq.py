"""The float graph in QDQ form: Quantize and Dequantize put around what gets integers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from dovetail.guests.ptq.layers import LayerWeights
from dovetail.guests.ptq.steps import RECURRENT, TensorQuantisation, carries, spanning, steps_of
from dovetail.ir.graph import Graph, GraphBuilder, Node
from dovetail.ir.operators.activation import Clamp
from dovetail.ir.operators.arithmetic import Dequantize, Quantize
from dovetail.ir.pattern import occurrence
from dovetail.ir.types import Array, DType, TensorType

MOST_BIAS = 2**30
"""The largest integer a bias is given, so that sums stay within 32 bits."""


@dataclass(frozen=True)
class Scheme:
    """Everything that was decided about the integers of a network."""

    activations: Mapping[str, TensorQuantisation]
    """By float value."""
    weights: Mapping[str, LayerWeights]
    """By result of the layer; layers that are not here stay float."""
    biases: Mapping[str, Array]
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

    def __post_init__(self) -> None:
        self.builder = GraphBuilder(self.graph.name)
        self.taken = frozenset(self.graph.types)

    def run(self) -> Graph:
        for name in self.graph.inputs:
            self._input(name)
        for node in self.graph.nodes:
            self._node(node)
        return self.builder.finish([self.names[f"output {name}"] for name in self.graph.outputs])

    def _fresh(self, stem: str) -> str:
        name, count = self.builder.fresh(stem), 1
        while name in self.taken:
            count += 1
            name = self.builder.fresh(f"{stem}_{count}")
        return name

    def _constant(self, stem: str, array: Array, dtype: DType | None = None) -> str:
        return self.builder.constant(self._fresh(stem), array, dtype)

    def _parameters(self, stem: str, scale: Array | float, zero_point: Array | int) -> list[str]:
        return [
            self._constant(f"{stem}_scale", np.asarray(scale, np.float32).reshape(-1)),
            self._constant(f"{stem}_zero_point", np.asarray(zero_point, np.int32).reshape(-1)),
        ]

    def _input(self, name: str) -> None:
        kind, steps = self.graph.types[name], self.scheme.activations.get(name)
        if steps is None:
            self.names[name] = self.builder.input(name, kind)
            return
        parameters = self._parameters(name, steps.scale, steps.zero_point)
        if self.scheme.integer_ends:
            source = self.builder.input(name, TensorType(kind.shape, steps.dtype))
        else:
            self.builder.input(name, kind)
            source = self._quantized(name, steps, parameters, name, self._fresh(f"{name}_quantized"))
        self.names[name] = self.builder.add(Dequantize(), [source, *parameters], self._fresh(f"{name}_dequantized"))

    def _quantized(
        self, real: str, steps: TensorQuantisation, parameters: list[str], name: str, stem: str, origin: str = ""
    ) -> str:
        """The integers of a value. Values of fewer than 8 bits become 8-bit integers, which every reader of ONNX takes;
        their floats are limited first."""
        dtype = steps.dtype
        if dtype.bits < 8:
            low, high = ((end - steps.zero_point) * steps.scale for end in (dtype.low, dtype.high))
            real = self.builder.add(Clamp(low, high), [real], self._fresh(f"{name}_limited"), origin)
        return self.builder.add(Quantize(dtype.narrowed(max(dtype.bits, 8))), [real, *parameters], stem, origin)

    def _node(self, node: Node) -> None:
        operands = [self._operand(node, position) for position in range(len(node.inputs))]
        if node.output in self.scheme.biases and len(node.inputs) == 2:
            operands.append(self._bias(node))
        steps = self.scheme.activations.get(node.output)
        is_output = node.output in self.graph.outputs
        if steps is None and carries(node) and (is_output or not node.operator.pads):
            # Readers of QDQ models expect the pair behind every operator, also one that only moves elements. A border
            # stays with the convolution that has it as an attribute.
            steps = steps_of(self.graph, self.scheme.activations, node.output)
        stem = self._fresh(f"{node.output}_real") if is_output and steps is not None else node.output
        real = self.builder.add(node.operator, operands, stem, node.origin)
        if steps is None:
            self.names[node.output] = self.names[f"output {node.output}"] = real
            return
        parameters = self._parameters(node.output, steps.scale, steps.zero_point)
        whole = is_output and self.scheme.integer_ends
        stem = node.output if whole else self._fresh(f"{node.output}_quantized")
        integers = self._quantized(real, steps, parameters, node.output, stem, node.origin)
        stem = node.output if is_output and not whole else self._fresh(f"{node.output}_dequantized")
        value = self.builder.add(Dequantize(), [integers, *parameters], stem, node.origin)
        self.names[node.output] = value
        self.names[f"output {node.output}"] = integers if whole else value

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
        integers = (np.rint(steps.rounded(array) / steps.scale) + steps.zero_point).astype(np.int8)
        return self._dequantized(name, integers, DType.INT8, np.array([steps.scale]), zero_point=steps.zero_point)

    def _gates(self, name: str, gates: int) -> str:
        """Weights of a recurrent layer as int8, with a scale for each gate."""
        rows = self.graph.constants[name]
        peaks = np.abs(rows.reshape(gates, -1)).max(axis=1)
        scale = (np.maximum(peaks, 2.0**-40) / 127).astype(np.float32)
        scales = np.repeat(scale, rows.shape[0] // gates)
        integers = np.clip(np.rint(rows / scales[:, None]), -127, 127).astype(np.int8)
        return self._dequantized(name, integers, DType.INT8, scales, 0)

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
