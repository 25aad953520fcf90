"""Layers in the shapes and types an engine takes: borders alike on all sides, im2col, strides as slices, whole words of
results, weights of few bits, unsigned activations. Exact."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from dovetail.ir.graph import Graph, GraphBuilder, Node
from dovetail.ir.operators.activation import FixedSoftmax
from dovetail.ir.operators.arithmetic import Clip, Lookup, Offset, Requantize, ScaleShift
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.linear import Conv2d, Convolution, FullyConnected, Linear, MatrixProduct
from dovetail.ir.operators.movement import Im2col, Pad, Pick, Slice
from dovetail.ir.operators.reduction import AveragePool2d, MaxPool2d, SumPool2d
from dovetail.ir.rules import Draft, Rewrite, run
from dovetail.ir.types import Array, DType, TensorType
from dovetail.legalize.requantisation import Accepts, scaled_layer


def _of_layers(graph: Graph, rule: Rewrite, shifted: bool) -> Graph:
    """A rule applied to every layer, or only to those whose sums a ScaleShift reads: on an engine that requantises so
    the core computes all others, and with them what the rule adds."""
    users = graph.users()
    chosen = {
        node.output
        for node in graph.nodes
        if not shifted or all(isinstance(user.operator, ScaleShift) for user in users[node.output])
    }
    return run(graph, [lambda draft, node: rule(draft, node) if node.output in chosen else None])


def convolution_as_im2col(chooses: Accepts, shifted: bool = False) -> Callable[[Graph], Graph]:
    """A rewrite: a chosen convolution becomes im2col and a 1x1 convolution.

    Args:
        chooses: of types and layer.
        shifted: whether only layers are looked at whose sums a ScaleShift reads.
    """

    def rule(draft: Draft, node: Node) -> str | None:
        operator = node.operator
        if not isinstance(operator, Conv2d) or node.inputs[1] not in draft.constants:
            return None
        weights = draft.constants[node.inputs[1]]
        kernel = (weights.shape[1], weights.shape[2])
        kinds = [draft.types[value] for value in node.inputs]
        if kernel == (1, 1) or operator.groups(kinds) > 1 or not chooses(draft.types, node):
            return None
        moved = draft.add(Im2col(kernel, operator.stride, operator.dilation), [node.inputs[0]], node)
        flat = weights.reshape(weights.shape[0], 1, 1, prod(weights.shape[1:]))
        name = draft.constant(flat, draft.types[node.inputs[1]].dtype, node.inputs[1])
        dense = replace(operator, stride=(1, 1), dilation=(1, 1))
        return draft.add(dense, [moved, name, *node.inputs[2:]], node)

    return lambda graph: _of_layers(graph, rule, shifted)


def stride_as_slice(chooses: Accepts) -> Callable[[Graph], Graph]:
    """A rewrite: a chosen strided 1x1 convolution becomes a dense one of every n-th pixel."""

    def rule(draft: Draft, node: Node) -> str | None:
        operator = node.operator
        if not isinstance(operator, Conv2d) or operator.stride == (1, 1):
            return None
        if draft.types[node.inputs[1]].shape[1:3] != (1, 1) or not chooses(draft.types, node):
            return None
        shape = draft.types[node.inputs[0]].shape
        step = (1, *operator.stride, 1)
        sliced = draft.add(Slice((0, 0, 0, 0), shape, step), [node.inputs[0]], node)
        return draft.add(replace(operator, stride=(1, 1)), [sliced, *node.inputs[1:]], node)

    return lambda graph: run(graph, [rule])


def even_borders(largest: int, shifted: bool = False) -> Callable[[Graph], Graph]:
    """A rewrite: convolutions get taps of zero until the border is half a window on every side.

    TFLite's SAME with stride 2 pads one row below and none above: a 3x3 window becomes the corner of a 5x5 one.

    Args:
        largest: rows and columns of the largest window made.
        shifted: whether only layers are looked at whose sums a ScaleShift reads.
    """

    def rule(draft: Draft, node: Node) -> str | None:
        operator = node.operator
        if not isinstance(operator, Convolution) or operator.dilation != (1, 1):
            return None
        if operator.weight_zero_point or node.inputs[1] not in draft.constants:
            return None
        pad = draft.made_by(node.inputs[0], Pad)
        border = pad.operator if pad is not None else Pad((0,) * 4, (0,) * 4, operator.input_zero_point)
        source = pad.inputs[0] if pad is not None else node.inputs[0]
        assert isinstance(border, Pad)
        if border.value != operator.input_zero_point or any(border.before[a] + border.after[a] for a in (0, 3)):
            return None
        weights, kind = draft.constants[node.inputs[1]], draft.types[source]
        # Half the smallest window around the middle that holds all taps, some of them before the image.
        sides = [max(border.before[axis], weights.shape[axis] - 1 - border.before[axis]) for axis in (1, 2)]
        wanted = (0, *sides, 0)
        fits = all(
            (kind.shape[1 + axis] - 1) // operator.stride[axis] + 1 == draft.types[node.output].shape[1 + axis]
            and 2 * sides[axis] + 1 <= largest
            for axis in (0, 1)
        )
        if not fits or (border.before == wanted and border.after == wanted):
            return None
        padded = draft.add(Pad(wanted, wanted, border.value), [source], node) if any(sides) else source
        grown = _grown(weights, [side - border.before[axis] for axis, side in enumerate(sides, 1)], sides)
        name = draft.constant(grown, draft.types[node.inputs[1]].dtype, node.inputs[1])
        return draft.add(replace(operator), [padded, name, *node.inputs[2:]], node)

    return lambda graph: _of_layers(graph, rule, shifted)


def _grown(weights: Array, first: list[int], sides: list[int]) -> Array:
    """The weights (taps along axes 1 and 2) from taps `first` on of a window of 2 * sides + 1."""
    pads = [(0, 0)] * 4
    for axis in (1, 2):
        lead = first[axis - 1]
        pads[axis] = (lead, 2 * sides[axis - 1] + 1 - lead - weights.shape[axis])
    return np.pad(weights, pads)


def dense_results_of(multiple: int) -> Callable[[Graph], Graph]:
    """A rewrite: a scale-shifted dense layer whose results are no multiple of so many gets results of zero, which are
    cut off again. Exact."""

    def rule(draft: Draft, node: Node) -> str | None:
        scaled, dense = scaled_layer(draft, node, ScaleShift, FullyConnected)
        if scaled is None or dense is None:
            return None
        count, known = draft.types[dense.output].shape[-1], draft.constants
        if count % multiple == 0 or len(dense.inputs) > 2 or any(v not in known for v in scaled.inputs[1:]):
            return None

        def longer(name: str, last: bool) -> str:
            """The constant with more rows: like its last, or of zeros."""
            array = known[name] if known[name].shape[0] > 1 else np.repeat(known[name], count, axis=0)
            more = np.repeat(array[-1:] if last else np.zeros_like(array[-1:]), -count % multiple, axis=0)
            return draft.constant(np.concatenate([array, more]), draft.types[name].dtype, name)

        wide = draft.add(dense.operator, [dense.inputs[0], longer(dense.inputs[1], last=False)], dense)
        parameters = [longer(name, last=True) for name in scaled.inputs[1:]]
        clipped = draft.add(node.operator, [draft.add(ScaleShift(), [wide, *parameters], scaled)], node)
        shape = draft.types[node.output].shape
        return draft.add(Slice((0,) * len(shape), shape, (1,) * len(shape)), [clipped], node)

    return lambda graph: run(graph, [rule])


def narrow_weights(types: Collection[DType] = (DType.INT2, DType.INT4)) -> Callable[[Graph], Graph]:
    """A rewrite that gives constant weights of layers the first of `types` whose range their values keep within.

    Files hold narrow weights in wider types where their format or its readers have none (a 2-bit one in ONNX).
    """

    def rewrite(graph: Graph) -> Graph:
        kinds = dict(graph.types)
        for name in _weights_only(graph):
            array, kind = graph.constants[name], graph.types[name]
            low, high = int(array.min()), int(array.max())
            for dtype in types:
                if dtype.bits < kind.dtype.bits and kind.dtype.signed and dtype.low <= low and high <= dtype.high:
                    kinds[name] = TensorType(kind.shape, dtype)
                    break
        return replace(graph, types=kinds)

    return rewrite


def _weights_only(graph: Graph) -> list[str]:
    """Constant weights that nothing but layers reads."""
    users = graph.users()

    def weighs(node: Node, name: str) -> bool:
        return node.operator.weight_axis is not None and node.inputs[1] == name and node.inputs.count(name) == 1

    kept = (name for name, array in graph.constants.items() if array.size and name not in graph.outputs and users[name])
    return [name for name in kept if all(weighs(node, name) for node in users[name])]


_SHIFT = 128


def unsigned_activations(graph: Graph) -> Graph:
    """The graph with int8 activations replaced by uint8 ones; inputs and outputs keep their types.

    Every int8 value v is stored as v + 128, and every zero point moves with it.
    """
    draft = _UnsignedRewriter(graph, GraphBuilder(graph.name))
    for name in graph.inputs:
        draft.builder.input(name, graph.types[name])
        draft.signed[name] = name
    for node in graph.nodes:
        draft.take(node)
    for name in graph.outputs:
        draft.same(name)
    return draft.builder.finish(graph.outputs, graph.states)


@dataclass
class _UnsignedRewriter:
    graph: Graph
    builder: GraphBuilder
    signed: dict[str, str] = field(default_factory=dict)
    """Old value -> new value with the same elements."""
    raised: dict[str, str] = field(default_factory=dict)
    """Old int8 value -> new uint8 value, 128 higher."""

    def same(self, value: str) -> str:
        """The new value with the elements of an old one."""
        if value not in self.signed:
            if value in self.graph.constants:
                dtype = self.graph.types[value].dtype
                self.signed[value] = self.builder.constant(value, self.graph.constants[value], dtype)
            else:
                self.signed[value] = self.builder.add(Offset(-_SHIFT, DType.INT8), [self.raised[value]], value)
        return self.signed[value]

    def unsigned(self, value: str) -> str:
        """The new uint8 value of an old int8 one."""
        if value not in self.raised:
            stem = f"{value}_unsigned"
            self.raised[value] = self.builder.add(Offset(_SHIFT, DType.UINT8), [self.same(value)], stem)
        return self.raised[value]

    def is_int8(self, value: str) -> bool:
        """True for an int8 value computed at run time."""
        return self.graph.types[value].dtype is DType.INT8 and value not in self.graph.constants

    def take(self, node: Node) -> None:
        operator = node.operator
        keeps_name = node.output in self.graph.outputs
        data = [self.is_int8(value) for value in node.inputs]
        clips = isinstance(operator, Clip) and operator.dtype is DType.INT8
        if clips and isinstance(operator, Clip) and self._clip(node, operator):
            return
        moves = isinstance(operator, MaxPool2d) or (operator.moves_only and not isinstance(operator, Pick))
        if data and all(data) and moves and not keeps_name:
            moved = replace(operator, value=operator.value + _SHIFT) if isinstance(operator, Pad) else operator
            self._add_raised(node, moved, [self.unsigned(value) for value in node.inputs])
            return
        taken: Any = operator
        centred = isinstance(operator, Linear | Requantize | AveragePool2d | SumPool2d)
        reads_raised = any(data[:1]) and (centred or isinstance(operator, Lookup | FixedSoftmax))
        if reads_raised and centred:
            taken = replace(taken, input_zero_point=taken.input_zero_point + _SHIFT)
        first = [self.unsigned(value) if reads_raised else self.same(value) for value in node.inputs[:1]]
        inputs = [*first, *(self.same(value) for value in node.inputs[1:])]
        if isinstance(operator, MatrixProduct):
            zeros = [zero + _SHIFT * raised for zero, raised in zip(operator.zero_points, data, strict=True)]
            taken = MatrixProduct(*zeros)
            pairs = zip(node.inputs, data, strict=True)
            inputs = [self.unsigned(value) if raised else self.same(value) for value, raised in pairs]
        self.signed[node.output] = self.builder.add(taken, inputs, node.output, node.origin)

    def _clip(self, node: Node, clip: Clip) -> bool:
        """Let the requantisation before a clip add the 128; False where another operator stands there."""
        producer = self.graph.producers().get(node.inputs[0])
        if producer is None or not isinstance(producer.operator, Requantize):
            return False
        if len(self.graph.users()[producer.output]) > 1 or producer.output in self.graph.outputs:
            return False
        raised = replace(producer.operator, output_zero_point=producer.operator.output_zero_point + _SHIFT)
        first = producer.inputs[0]
        if self.is_int8(first):
            raised = replace(raised, input_zero_point=raised.input_zero_point + _SHIFT)
        operand = self.unsigned(first) if self.is_int8(first) else self.same(first)
        inputs = [operand, *(self.same(value) for value in producer.inputs[1:])]
        scaled = self.builder.add(raised, inputs, f"{producer.output}_unsigned", producer.origin)
        self._add_raised(node, Clip(clip.low + _SHIFT, clip.high + _SHIFT, DType.UINT8), [scaled])
        return True

    def _add_raised(self, node: Node, operator: Operator, inputs: list[str]) -> None:
        stem = f"{node.output}_unsigned"
        self.raised[node.output] = self.builder.add(operator, inputs, stem, node.origin)
