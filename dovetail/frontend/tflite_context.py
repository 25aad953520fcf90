"""What every TFLite operator importer works with: the file, the graph being built, and the QDQ form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import numpy as np

from dovetail.errors import ModelError
from dovetail.frontend.tflite_file import AGAIN, ALIKE, FOLD, OTHERWISE, OperatorEntry, Tensor, TfliteFile
from dovetail.frontend.tflite_variables import Variables
from dovetail.graph.graph import GraphBuilder
from dovetail.graph.types import Array, DType, TensorType
from dovetail.operators.activation import Clamp
from dovetail.operators.base import Operator
from dovetail.operators.quantization import Dequantize, Quantize

ACTIVATIONS: Mapping[int, tuple[float, float] | None] = {
    0: None,
    1: (0.0, inf),
    2: (-1.0, 1.0),
    3: (0.0, 6.0),
}
"""Fused activation by its number in the TFLite schema (NONE, RELU, RELU_N1_TO_1, RELU6) as a range."""

ACTIVATION_NAMES = ("NONE", "RELU", "RELU_N1_TO_1", "RELU6", "TANH", "SIGN_BIT")
"""The schema's names, for messages."""

ACTIVATION_TYPES = (DType.INT8, DType.UINT8, DType.INT16, DType.FLOAT32)
"""Element types a computed value may have."""


class TfliteContext:
    """The import in progress. Importers read operands and emit nodes through it; it keeps the QDQ form."""

    def __init__(self, file: TfliteFile, name: str) -> None:
        self.file = file
        self.builder = GraphBuilder(name)
        self._values: dict[int, str] = {}
        self._known: dict[int, Array] = {}
        self._parameters: dict[int, tuple[str, str]] = {}
        self.variables = Variables()

    def where(self, op: OperatorEntry) -> str:
        """The operator as messages name it: file, opcode, index, first result."""
        return f"{self.file.name}, {self.origin(op)}"

    def origin(self, op: OperatorEntry) -> str:
        """The operator as `Node.origin` names it."""
        name = self.file.tensors[op.outputs[0]].name if op.outputs and op.outputs[0] >= 0 else "no result"
        return f"{op.opcode} {op.index} ({name})"

    def refuse(self, op: OperatorEntry, what: str, hint: str = OTHERWISE) -> ModelError:
        """The error for something about `op` that cannot be honoured."""
        return ModelError(what, where=self.where(op), hint=hint)

    def options(self, op: OperatorEntry, kind: str) -> Mapping[str, Any]:
        """The operator's options, which must be of the schema's class `kind`."""
        if op.options_class != kind:
            raise self.refuse(op, f"carries options of the kind {op.options_class}, expected {kind}", AGAIN)
        return op.options

    def optional(self, op: OperatorEntry, position: int) -> Tensor | None:
        """An operand that may be absent."""
        if position >= len(op.inputs) or op.inputs[position] < 0:
            return None
        return self.file.tensors[op.inputs[position]]

    def input(self, op: OperatorEntry, position: int) -> Tensor:
        """An operand that must be there."""
        found = self.optional(op, position)
        if found is None:
            raise self.refuse(op, f"operand {position} is missing", AGAIN)
        return found

    def output(self, op: OperatorEntry) -> Tensor:
        """The operator's one result."""
        if len(op.outputs) != 1 or op.outputs[0] < 0:
            raise self.refuse(op, f"has {len(op.outputs)} results, expected 1", AGAIN)
        return self.file.tensors[op.outputs[0]]

    def integers(self, op: OperatorEntry, position: int, what: str) -> tuple[int, ...]:
        """The elements of a constant int32 or int64 operand, row by row."""
        tensor = self.input(op, position)
        array = self.known(tensor)
        if array is None or tensor.dtype not in (DType.INT32, DType.INT64):
            raise self.refuse(op, f"the operand {tensor} ({what}) must be a constant of int32 or int64", FOLD)
        return tuple(int(value) for value in array.reshape(-1))

    def known(self, tensor: Tensor) -> Array | None:
        """The elements of a constant, or of a tensor computed from shapes alone; None for any other."""
        return tensor.array() if tensor.is_constant else self._known.get(tensor.index)

    def bind_known(self, op: OperatorEntry, array: Array) -> None:
        """Make `array`, known now, the operator's result; it must have the type the model declares."""
        tensor = self.output(op)
        if tensor.shape != array.shape or tensor.dtype not in (DType.INT32, DType.INT64) or tensor.is_constant:
            raise self.refuse(op, f"computes {list(array.shape)} integers, the model declares {tensor}", AGAIN)
        self._known[tensor.index] = array.astype(tensor.dtype.numpy)

    def array(self, op: OperatorEntry, tensor: Tensor, what: str) -> Array:
        """The elements of an operand that must be constant."""
        if not tensor.is_constant:
            raise self.refuse(op, f"the {what} {tensor} must be constant", FOLD)
        return tensor.array()

    def add_input(self, index: int) -> None:
        """Declare an input of the network."""
        tensor = self.file.tensors[index]
        if tensor.is_constant or tensor.is_variable or index in self._values:
            raise ModelError(f"input {tensor} is a constant, a variable or listed twice", where=self.file.name,
                             hint="convert the model again")
        name = self.builder.fresh(tensor.name)
        self._values[index] = self.builder.input(name, TensorType(tensor.shape, tensor.dtype))

    def value(self, op: OperatorEntry | None, tensor: Tensor) -> str:
        """The value of a tensor as stored: an integer for a quantised one."""
        if tensor.index not in self._values:
            where = self.where(op) if op else self.file.name
            if tensor.is_variable:
                raise ModelError(f"tensor {tensor} is a variable, which this operator cannot keep", where=where,
                                 hint="keep states in a recurrent layer, or give them as an input and an output")
            if not tensor.is_constant:
                raise ModelError(f"tensor {tensor} is read before it is computed", where=where,
                                 hint="convert the model again: its operators stand in the wrong order")
            self._values[tensor.index] = self.builder.constant(tensor.name, tensor.array(), tensor.dtype)
        return self._values[tensor.index]

    def real(self, op: OperatorEntry, tensor: Tensor) -> str:
        """The float meaning of a tensor: itself, or a Dequantize of it."""
        value = self.value(op, tensor)
        if tensor.dtype is DType.FLOAT32:
            return value
        scale, zero_point = self.parameters(op, tensor)
        axis = tensor.quantisation.axis if tensor.quantisation and len(tensor.quantisation.scale) > 1 else -1
        return self.dequantize(op, value, scale, zero_point, axis)

    def dequantize(self, op: OperatorEntry, value: str, scale: str, zero_point: str, axis: int) -> str:
        """A Dequantize node."""
        operands = [value, scale, zero_point]
        return self.builder.add(Dequantize(axis), operands, f"{value}_real", self.origin(op))

    def parameters(self, op: OperatorEntry, tensor: Tensor) -> tuple[str, str]:
        """The scale and zero-point constants of a quantised tensor."""
        if tensor.quantisation is None:
            raise self.refuse(op, f"tensor {tensor} has no quantisation", "quantise the whole model")
        if tensor.index not in self._parameters:
            scale = self.builder.constant(f"{tensor.name}_scale", tensor.quantisation.scale)
            zero_point = self.builder.constant(f"{tensor.name}_zero_point", tensor.quantisation.zero_point)
            self._parameters[tensor.index] = (scale, zero_point)
        return self._parameters[tensor.index]

    def emit(self, op: OperatorEntry, operator: Operator, operands: Sequence[str]) -> None:
        """The operator's result without any arithmetic on the elements."""
        name = self.output(op).name
        self.bind(op, self.builder.add(operator, operands, name, self.origin(op)))

    def emit_real(self, op: OperatorEntry, operator: Operator, operands: Sequence[str], activation: int = 0) -> None:
        """The operator's result in float, clamped by a fused activation, quantised if its tensor is."""
        self.bind(op, self.finish(op, operator, operands, activation, self.output(op).name))

    def finish(self, op: OperatorEntry, operator: Operator, operands: Sequence[str], activation: int, name: str) -> str:
        """operator -> Clamp -> Quantize, the last one there is under `name`; returns its value."""
        return self._chained(op, [operator, *self._ending(op, activation)], operands, name)

    def finish_real(self, op: OperatorEntry, value: str, activation: int) -> None:
        """Make a float value, clamped by a fused activation and quantised, the operator's result."""
        steps = self._ending(op, activation)
        self.bind(op, self._chained(op, steps, [value], self.output(op).name) if steps else value)

    def _ending(self, op: OperatorEntry, activation: int) -> list[Operator]:
        """What follows an operator that computes: Clamp, Quantize, each where there is one."""
        tensor = self.output(op)
        if activation not in ACTIVATIONS:
            number = ACTIVATION_NAMES[activation] if 0 <= activation < len(ACTIVATION_NAMES) else activation
            raise self.refuse(op, f"the fused activation {number} is not supported")
        limits = ACTIVATIONS[activation]
        steps: list[Operator] = [] if limits is None else [Clamp(*limits)]
        if tensor.dtype.is_integer:
            if tensor.quantisation and len(tensor.quantisation.scale) != 1:
                raise self.refuse(op, f"the result {tensor} is quantised per channel, which is not supported", ALIKE)
            steps.append(Quantize(tensor.dtype))
        return steps

    def _chained(self, op: OperatorEntry, steps: Sequence[Operator], operands: Sequence[str], name: str) -> str:
        """The steps one behind the other; the last value is named `name`."""
        value = ""
        for step, kind in enumerate(steps):
            inputs = [*operands] if step == 0 else [value]
            inputs += self.parameters(op, self.output(op)) if isinstance(kind, Quantize) else []
            suffix = "" if step == len(steps) - 1 else "_clamped" if isinstance(kind, Clamp) else "_sum"
            value = self.builder.add(kind, inputs, f"{name}{suffix}", self.origin(op))
        return value

    def results(self, op: OperatorEntry, count: int) -> list[Tensor]:
        """The operator's results, where it has several."""
        if len(op.outputs) != count or any(index < 0 for index in op.outputs):
            raise self.refuse(op, f"has {len(op.outputs)} results, expected {count}", AGAIN)
        return [self.file.tensors[index] for index in op.outputs]

    def expect_shape(self, op: OperatorEntry, shape: Sequence[int]) -> None:
        """Refuse a result of another shape than the model declares, before anything of its size is made."""
        if tuple(shape) != self.output(op).shape:
            raise self.refuse(op, f"gives the shape {list(shape)}, the model declares {self.output(op)}", AGAIN)

    def axis(self, op: OperatorEntry, axis: int, rank: int) -> int:
        """An axis counted from either end as one counted from the front."""
        if not -rank <= axis < rank:
            raise self.refuse(op, f"axis {axis} is outside the {rank} axes", AGAIN)
        return axis % rank

    def add(self, op: OperatorEntry, operator: Operator, operands: Sequence[str], suffix: str) -> str:
        """Add a node on the way to the result; its name is the result's with a suffix."""
        return self.builder.add(operator, operands, f"{self.output(op).name}_{suffix}", self.origin(op))

    def constant(self, op: OperatorEntry, array: Array, suffix: str) -> str:
        """A constant on the way to the result; its name is the result's with a suffix."""
        return self.builder.constant(f"{self.output(op).name}_{suffix}", array)

    def bind(self, op: OperatorEntry, value: str, result: Tensor | None = None) -> None:
        """Make `value` the operator's result (one of several); it must have the type the model declares."""
        tensor = result or self.output(op)
        if tensor.index in self._values or tensor.is_constant or tensor.is_variable:
            raise self.refuse(op, f"tensor {tensor} is written twice or is a constant", AGAIN)
        found = self.builder.type_of(value)
        if found != TensorType(tensor.shape, tensor.dtype):
            raise self.refuse(op, f"computes {found}, the model declares {tensor}", AGAIN)
        self._values[tensor.index] = value

    def same_type(self, op: OperatorEntry, *tensors: Tensor) -> None:
        """Refuse unless all tensors are activations of one element type."""
        for tensor in tensors:
            if tensor.dtype is not tensors[0].dtype or tensor.dtype not in ACTIVATION_TYPES:
                raise self.refuse(op, f"mixes or has unsupported element types: {', '.join(map(str, tensors))}")

    def same_quantisation(self, a: Tensor, b: Tensor) -> bool:
        """True when elements of `a` can be copied to `b`."""
        if a.dtype is not b.dtype:
            return False
        if a.quantisation is None:
            return b.quantisation is None
        return a.quantisation.same_as(b.quantisation)


def bias_scale(x: Tensor, w: Tensor) -> Array:
    """Scale of a product of two quantised tensors, float32 [1 or C]: the unit TFLite's kernels count a bias in."""
    if x.quantisation is None or w.quantisation is None:
        raise ValueError("a product of values without quantisation has no scale")
    return np.asarray(x.quantisation.scale * w.quantisation.scale, np.float32)
