"""State of an importer of a TFLite operator: its operands and options, the graph being built, and the QDQ form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Self

import numpy as np

from dovetail.errors import ModelError
from dovetail.ir.graph import GraphBuilder
from dovetail.ir.operators.activation import Clamp
from dovetail.ir.operators.arithmetic import Dequantize, Quantize
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.user import UserOperator
from dovetail.ir.types import Array, DType, TensorType
from dovetail.read.tflite.file import (
    AGAIN,
    ALIKE,
    FOLD,
    OTHERWISE,
    OperatorEntry,
    TfliteFile,
    TfliteTensor,
    default_options,
)
from dovetail.read.values import Values

ACTIVATIONS: Mapping[int, tuple[float, float] | None] = {0: None, 1: (0.0, inf), 2: (-1.0, 1.0), 3: (0.0, 6.0)}
"""Fused activation by its number in the TFLite schema (NONE, RELU, RELU_N1_TO_1, RELU6) as a range."""

ACTIVATION_NAMES = ("NONE", "RELU", "RELU_N1_TO_1", "RELU6", "TANH", "SIGN_BIT")
"""The schema's names, for messages."""

ACTIVATION_TYPES = (DType.INT8, DType.UINT8, DType.INT16, DType.FLOAT32)
"""Element types a computed value may have."""

SHAPE_TYPES = (DType.INT32, DType.INT64)
"""Element types of shapes."""

Key = tuple[object, object]
"""Name of a resource variable: its container and its name there, as VAR_HANDLE has them."""


@dataclass
class Variables:
    """Values the model keeps from one inference to the next."""

    handles: dict[int, Key] = field(default_factory=dict)
    """The variable each resource tensor stands for."""
    first: dict[Key, Array] = field(default_factory=dict)
    """Contents before the first inference, where CALL_ONCE sets them."""
    current: dict[Key, str] = field(default_factory=dict)
    """The graph value of each variable read or written so far, as of the operator being imported."""
    states: dict[Key, str] = field(default_factory=dict)
    """The graph's state of each variable that is read before it is written."""
    taken: set[int] = field(default_factory=set)
    """Variable tensors an operator keeps already."""


class TfliteValues(Values):
    """The import in progress, as one operator of the file sees it. Values are as stored, or `real`: their floats."""

    op: OperatorEntry
    """The operator being read."""

    def __init__(self, file: TfliteFile, name: str, custom: Mapping[str, type[UserOperator]] | None = None) -> None:
        self.file, self.builder, self.variables, self.custom = file, GraphBuilder(name), Variables(), custom or {}
        self.tell: Callable[[str], None] = lambda sentence: None
        """Is told what a user should know of an operator."""
        self.depth = 0
        """How many subgraphs this one is called through."""
        self.steps: list[OperatorEntry] = []
        """Every operator imported so far, those of subgraphs each time."""
        self._values: dict[int, str] = {}
        self._known: dict[int, Array] = {}
        self._parameters: dict[int, tuple[str, str]] = {}

    def inside(self, file: TfliteFile) -> Self:
        """The import of a subgraph, for one call of it; its tensors have no values yet."""
        variables = replace(self.variables, handles={}, taken=set())
        own: dict[str, object] = {"_values": {}, "_known": {}, "_parameters": {}}
        return self.again(file=file, depth=self.depth + 1, variables=variables, **own)

    def give(self, tensor: TfliteTensor, value: str, known: Array | None) -> None:
        """Let a tensor have a value, and elements where they are known."""
        self._values[tensor.index] = value
        if known is not None:
            self._known[tensor.index] = known

    @property
    def stem(self) -> str:
        return self.output.name

    @property
    def origin(self) -> str:
        op = self.op
        name = self.file.tensors[op.outputs[0]].name if op.outputs and op.outputs[0] >= 0 else "no result"
        return f"{op.custom_code or op.opcode} {op.index} ({name})"

    def refuse(self, what: str, hint: str = OTHERWISE) -> ModelError:
        return ModelError(what, where=f"{self.file.name}, {self.origin}", hint=hint)

    # What the operator says

    def options(self, kind: str) -> Mapping[str, Any]:
        """The operator's options of the schema's class `kind`; its defaults where the file has none or those of another
        class, as the runtimes do (core/api/flatbuffer_conversions.cc)."""
        if self.op.options_class != kind:
            self.op = replace(self.op, options_class=kind, options=default_options(kind))
        return self.op.options

    @property
    def activation(self) -> int:
        """The number of the activation that the operator's options fuse with it."""
        return int(self.op.options["FusedActivationFunction"])

    def optional(self, position: int) -> TfliteTensor | None:
        """An operand that may be absent, or without elements, which means the same."""
        found = self._given(position)
        return None if found is not None and found.is_empty else found

    def _given(self, position: int) -> TfliteTensor | None:
        """An operand as the file has it."""
        index = self.op.inputs[position] if position < len(self.op.inputs) else -1
        return self.file.tensors[index] if index >= 0 else None

    def has(self, position: int) -> bool:
        """True when the file has an operand, be it one without elements."""
        return self._given(position) is not None

    def input(self, position: int) -> TfliteTensor:
        """An operand that must be there."""
        found = self.optional(position)
        if found is None:
            raise self.refuse(f"operand {position} is missing", AGAIN)
        return found

    @property
    def inputs(self) -> list[TfliteTensor]:
        """All operands, none of which may be absent."""
        return [self.input(position) for position in range(len(self.op.inputs))]

    @property
    def output(self) -> TfliteTensor:
        """The operator's one result."""
        return self.results(1)[0]

    def results(self, count: int) -> list[TfliteTensor]:
        """The operator's results."""
        if len(self.op.outputs) != count or any(index < 0 for index in self.op.outputs):
            raise self.refuse(f"has {len(self.op.outputs)} results, expected {count}", AGAIN)
        return [self.file.tensors[index] for index in self.op.outputs]

    def image(self) -> TfliteTensor:
        """The first operand, which must be an NHWC image."""
        x = self.input(0)
        if len(x.shape) != 4:
            raise self.refuse(f"needs an NHWC image, got {x}", AGAIN)
        return x

    def integers(self, position: int, what: str, count: int = -1) -> tuple[int, ...]:
        """The elements of a constant int32 or int64 operand, row by row; `count` of them unless that is negative."""
        tensor = self._given(position) or self.input(position)
        array = self.known_of(tensor)
        if array is None or tensor.dtype not in SHAPE_TYPES:
            raise self.refuse(f"the operand {tensor} ({what}) must be a constant of int32 or int64", FOLD)
        if count >= 0 and array.size != count:
            raise self.refuse(f"the {what} has {array.size} entries, expected {count}", AGAIN)
        return tuple(int(value) for value in array.reshape(-1))

    def axis(self, axis: int, rank: int) -> int:
        """An axis counted from either end as one counted from the front."""
        if not -rank <= axis < rank:
            raise self.refuse(f"axis {axis} is outside the {rank} axes", AGAIN)
        return axis % rank

    def array(self, tensor: TfliteTensor, what: str) -> Array:
        """The elements of an operand that must be constant."""
        if not tensor.is_constant:
            raise self.refuse(f"the {what} {tensor} must be constant", FOLD)
        return tensor.array()

    def expect_shape(self, shape: Sequence[int]) -> None:
        """Refuse a result of another shape than the model declares, before anything of its size is made."""
        if tuple(shape) != self.output.shape:
            raise self.refuse(f"gives the shape {list(shape)}, the model declares {self.output}", AGAIN)

    def same_type(self, *tensors: TfliteTensor) -> None:
        """Refuse unless all tensors are activations of one element type."""
        for tensor in tensors:
            if tensor.dtype is not tensors[0].dtype or tensor.dtype not in ACTIVATION_TYPES:
                raise self.refuse(f"mixes or has unsupported element types: {', '.join(map(str, tensors))}")

    def keeps(self, *tensors: TfliteTensor, what: str) -> None:
        """Refuse unless elements of all tensors can be copied to the last one; `what` begins the message."""
        if not all(same_quantisation(tensor, tensors[-1]) for tensor in tensors):
            listed = ", ".join(map(str, tensors[:-1]))
            raise self.refuse(f"{what} {listed} and {tensors[-1]} differ", ALIKE)

    # Known and computed tensors

    def known_of(self, tensor: TfliteTensor) -> Array | None:
        """The elements of a constant, or of a tensor computed from shapes alone; None for any other."""
        return tensor.array() if tensor.is_constant else self._known.get(tensor.index)

    def bind_known(self, array: Array) -> None:
        """Make `array`, known now, the operator's result; it must have the type the model declares."""
        tensor = self.output
        if tensor.shape != array.shape or tensor.dtype not in SHAPE_TYPES or tensor.is_constant:
            raise self.refuse(f"computes {list(array.shape)} integers, the model declares {tensor}", AGAIN)
        self._known[tensor.index] = array.astype(tensor.dtype.numpy)

    def bind(self, value: str, result: TfliteTensor | None = None) -> None:
        """Make `value` the operator's result (one of several); it must have the type the model declares."""
        tensor = result or self.output
        if tensor.index in self._values or tensor.is_constant or tensor.is_variable:
            raise self.refuse(f"tensor {tensor} is written twice or is a constant", AGAIN)
        found = self.type_of(value)
        if found != TensorType(tensor.shape, tensor.dtype):
            raise self.refuse(f"computes {found}, the model declares {tensor}", AGAIN)
        self._values[tensor.index] = value

    def bind_open(self, value: str, tensor: TfliteTensor) -> None:
        """As `bind`, for a result whose shape the model may leave open: without axes, or with sizes of 0."""
        found = self.type_of(value)
        if tensor.dtype is found.dtype and (not tensor.shape or tensor.is_empty):
            tensor = replace(tensor, shape=found.shape)
        self.bind(value, tensor)

    def add_input(self, index: int) -> None:
        """Declare an input of the network."""
        tensor = self.file.tensors[index]
        if tensor.is_constant or tensor.is_variable or index in self._values:
            what = f"input {tensor} is a constant, a variable or listed twice"
            raise ModelError(what, where=self.file.name, hint="convert the model again")
        name = self.builder.fresh(tensor.name)
        self._values[index] = self.builder.input(name, TensorType(tensor.shape, tensor.dtype))

    def value(self, tensor: TfliteTensor, where: str = "") -> str:
        """The value of a tensor as stored: an integer for a quantised one."""
        if tensor.index not in self._values:
            where = where or f"{self.file.name}, {self.origin}"
            if tensor.is_variable:
                hint = "keep states in a recurrent layer, or give them as an input and an output"
                raise ModelError(
                    f"tensor {tensor} is a variable, which this operator cannot keep", where=where, hint=hint
                )
            if not tensor.is_constant:
                hint = "convert the model again: its operators stand in the wrong order"
                raise ModelError(f"tensor {tensor} is read before it is computed", where=where, hint=hint)
            self._values[tensor.index] = self.builder.constant(tensor.name, tensor.array(), tensor.dtype)
        return self._values[tensor.index]

    def real(self, tensor: TfliteTensor) -> str:
        """The float meaning of a tensor: itself, or a Dequantize of it."""
        value = self.value(tensor)
        if tensor.dtype is DType.FLOAT32:
            return value
        scale, zero_point = self.parameters(tensor)
        axis = tensor.quantisation.axis if tensor.quantisation and len(tensor.quantisation.scale) > 1 else -1
        return self.dequantize(value, scale, zero_point, axis)

    def dequantize(self, value: str, scale: str, zero_point: str, axis: int = -1) -> str:
        """A Dequantize node."""
        return self.add(Dequantize(axis), [value, scale, zero_point], name=f"{value}_real")

    def parameters(self, tensor: TfliteTensor) -> tuple[str, str]:
        """The scale and zero-point constants of a quantised tensor."""
        if tensor.quantisation is None:
            raise self.refuse(f"tensor {tensor} has no quantisation", "quantise the whole model")
        if tensor.index not in self._parameters:
            scale = self.builder.constant(f"{tensor.name}_scale", tensor.quantisation.scale)
            zero_point = self.builder.constant(f"{tensor.name}_zero_point", tensor.quantisation.zero_point)
            self._parameters[tensor.index] = (scale, zero_point)
        return self._parameters[tensor.index]

    # Results

    def finish(self, operator: Operator, operands: Sequence[str], activation: int = 0, suffix: str = "") -> str:
        """operator -> Clamp -> Quantize: the result in float, limited by a fused activation, quantised if its tensor
        is; the last one there is has the name."""
        return self._chained([operator, *self._ending(activation)], operands, suffix)

    def finish_real(self, value: str, activation: int = 0) -> str:
        """A float value, limited by a fused activation, and quantised."""
        return self._chained(self._ending(activation), [value], "")

    def _ending(self, activation: int) -> list[Operator]:
        """Clamp and Quantize, each where there is one."""
        tensor = self.output
        if activation not in ACTIVATIONS:
            named = dict(enumerate(ACTIVATION_NAMES)).get(activation, activation)
            raise self.refuse(f"the fused activation {named} is not supported")
        limits = ACTIVATIONS[activation]
        steps: list[Operator] = [Clamp(*limits)] if limits else []
        if tensor.dtype.is_integer:
            if tensor.quantisation and len(tensor.quantisation.scale) != 1:
                raise self.refuse(f"the result {tensor} is quantised per channel, which is not supported", ALIKE)
            steps.append(Quantize(tensor.dtype))
        return steps

    def _chained(self, steps: Sequence[Operator], operands: Sequence[str], suffix: str) -> str:
        for step in steps:
            parameters = self.parameters(self.output) if isinstance(step, Quantize) else ()
            on_the_way = "" if step is steps[-1] else "_clamped" if isinstance(step, Clamp) else "_sum"
            operands = [self.add(step, [*operands, *parameters], name=f"{self.named(suffix)}{on_the_way}")]
        return operands[0]

    def moved(self, *operators: Operator, position: int = 0) -> str | None:
        """Operators, one behind the other, that copy elements of an operand as stored; of a known one now (None)."""
        x = self.input(position)
        known = self.known_of(x)
        if known is not None and x.dtype in SHAPE_TYPES:
            for operator in operators:
                known = operator.evaluate([known])
            self.bind_known(known)
            return None
        self.keeps(x, self.output, what="copies elements, but the type or quantisation of")
        value = self.value(x)
        for operator in operators:
            value = self.add(operator, [value], "" if operator is operators[-1] else "moved")
        return value


def same_quantisation(a: TfliteTensor, b: TfliteTensor) -> bool:
    """True when elements of `a` can be copied to `b`."""
    if a.quantisation is None or b.quantisation is None:
        return a.dtype is b.dtype and a.quantisation is b.quantisation
    return a.dtype is b.dtype and a.quantisation.same_as(b.quantisation)


def bias_scale(x: TfliteTensor, w: TfliteTensor) -> Array:
    """Scale of a product of two quantised tensors, float32 [1 or C]: the unit TFLite's kernels count a bias in."""
    if x.quantisation is None or w.quantisation is None:
        raise ValueError("a product of values without quantisation has no scale")
    return np.asarray(x.quantisation.scale * w.quantisation.scale, np.float32)
