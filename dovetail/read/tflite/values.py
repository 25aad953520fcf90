"""State of an importer of a TFLite operator: its operands and options, the graph being built, and the QDQ form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Self

from dovetail.errors import ModelError
from dovetail.ir.graph import GraphBuilder
from dovetail.ir.operators.activation import Clamp
from dovetail.ir.operators.arithmetic import Dequantize, Quantize
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.user import UserOperator
from dovetail.ir.types import Array, DType
from dovetail.notes import Kind, Note, Tell, silent
from dovetail.read.tflite.file import ADVICE, OperatorEntry, TfliteFile, TfliteQuantisation, TfliteTensor
from dovetail.read.values import AGAIN, ALIKE, FOLD, Value, Values, words

ACTIVATIONS = words("NONE RELU RELU_N1_TO_1 RELU6 TANH SIGN_BIT")
"""Fused activations by their numbers in the TFLite schema."""

LIMITS: Mapping[str, tuple[float, float] | None] = {
    **{"NONE": None, "RELU": (0.0, inf), "RELU_N1_TO_1": (-1.0, 1.0), "RELU6": (0.0, 6.0)}
}
"""The ranges of those that limit."""

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
    current: dict[Key, Value] = field(default_factory=dict)
    """The graph value of each variable read or written so far, as of the operator being imported."""
    states: dict[Key, Value] = field(default_factory=dict)
    """The graph's state of each variable that is read before it is written."""
    taken: set[int] = field(default_factory=set)
    """Variable tensors an operator keeps already."""


class TfliteValues(Values):
    """The import in progress, as one operator of the file sees it. Values are as stored, or `real`: their floats."""

    advice = ADVICE
    op: OperatorEntry
    """The operator being read."""

    def __init__(self, file: TfliteFile, name: str, custom: Mapping[str, type[UserOperator]] | None = None) -> None:
        self.file, self.builder, self.variables, self.custom = file, GraphBuilder(name), Variables(), custom or {}
        self.tell: Tell = silent
        """Is told what a user should know of an operator."""
        self.depth = 0
        """How many subgraphs this one is called through."""
        self.steps: list[OperatorEntry] = []
        """Every operator imported so far, those of subgraphs each time."""
        self._values: dict[int, Value] = {}
        self._known: dict[int, Array] = {}
        self._parameters: dict[int, tuple[Value, Value]] = {}

    def inside(self, file: TfliteFile) -> Self:
        """The import of a subgraph, for one call of it; its tensors have no values yet."""
        variables = replace(self.variables, handles={}, taken=set())
        own: dict[str, object] = {"_values": {}, "_known": {}, "_parameters": {}}
        return self.again(file=file, depth=self.depth + 1, variables=variables, **own)

    def give(self, tensor: TfliteTensor, value: Value, known: Array | None) -> None:
        """Let a tensor have a value, and elements where they are known."""
        self._values[tensor.index] = value
        if known is not None:
            self._known[tensor.index] = known

    def stand_in(self) -> None:
        for tensor in (self.file.tensors[index] for index in self.op.outputs if index >= 0):
            if tensor.index not in self._values and not tensor.is_constant:
                self._values[tensor.index] = self.stood_in(tensor.name, tensor.type)

    @property
    def stem(self) -> str:
        return self.output.name

    @property
    def origin(self) -> str:
        op = self.op
        name = self.file.tensors[op.outputs[0]].name if op.outputs and op.outputs[0] >= 0 else "no result"
        return f"{op.custom_code or op.opcode} {op.index} ({name})"

    @property
    def where(self) -> str:
        return f"{self.file.name}, {self.origin}"

    # What the operator says

    def option(self, name: str) -> Any:
        """One of the operator's options, by its name in the schema."""
        return self.op.options[name]

    @property
    def activation(self) -> int:
        """The number of the activation that the operator's options fuse with it; 0 for none."""
        return int(self.op.options.get("FusedActivationFunction", 0))

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

    @property
    def x(self) -> TfliteTensor:
        """The first operand."""
        return self.input(0)

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
        found = self.op.outputs
        self.wrong_if(len(found) != count or min(found, default=0) < 0, f"has {len(found)} results, expected {count}")
        return [self.file.tensors[index] for index in found]

    def image(self) -> TfliteTensor:
        """The first operand, which must be an NHWC image."""
        self.wrong_if(self.x.rank != 4, f"needs an NHWC image, got {self.x}")
        return self.x

    def integers(self, position: int, what: str, count: int = -1) -> tuple[int, ...]:
        """The elements of a constant int32 or int64 operand, row by row; `count` of them unless that is negative."""
        tensor = self._given(position) or self.input(position)
        array = self.known_of(tensor)
        if array is None or tensor.dtype not in SHAPE_TYPES:
            raise self.refuse(f"the operand {tensor} ({what}) must be a constant of int32 or int64", FOLD)
        self.wrong_if(count >= 0 and array.size != count, f"the {what} has {array.size} entries, expected {count}")
        return tuple(array.reshape(-1).tolist())

    def array(self, tensor: TfliteTensor, what: str) -> Array:
        """The elements of an operand that must be constant."""
        self.refuse_if(not tensor.is_constant, f"the {what} {tensor} must be constant", FOLD)
        return tensor.array()

    def expect_shape(self, shape: Sequence[int]) -> None:
        """Refuse a result of another shape than the model declares, before anything of its size is made."""
        odd = tuple(shape) != self.output.shape
        self.wrong_if(odd, f"gives the shape {list(shape)}, the model declares {self.output}")

    def tell_of_zero(self, tensor: TfliteTensor, what: str) -> None:
        """Say what TensorFlow Lite Micro does wrong where a tensor has a zero point."""
        if tensor.zero:
            self.tell(Note(Kind.APPROXIMATE, f"{self.where}: TensorFlow Lite Micro {what}; Dovetail does not"))

    def same_type(self, *tensors: TfliteTensor) -> None:
        """Refuse unless all tensors are activations of one element type."""
        if any(one.dtype is not tensors[0].dtype or one.dtype not in ACTIVATION_TYPES for one in tensors):
            raise self.refuse(f"mixes or has unsupported element types: {', '.join(map(str, tensors))}")

    def keeps(self, *tensors: TfliteTensor, what: str) -> None:
        """Refuse unless elements of all tensors can be copied to the last one; `what` begins the message."""
        *others, last = tensors
        if not all(same_quantisation(tensor, last) for tensor in tensors):
            raise self.refuse(f"{what} {', '.join(map(str, others))} and {last} differ", ALIKE)

    # Known and computed tensors

    def known_of(self, tensor: TfliteTensor) -> Array | None:
        """The elements of a constant, or of a tensor computed from shapes alone; None for any other."""
        return tensor.array() if tensor.is_constant else self._known.get(tensor.index)

    def all_known(self, *tensors: TfliteTensor) -> list[Array] | None:
        """The elements of integers that are all known; None where one is not."""
        known = [array for array in map(self.known_of, tensors) if array is not None]
        return known if len(known) == len(tensors) and all(one.dtype in SHAPE_TYPES for one in tensors[:1]) else None

    def bind_known(self, array: Array) -> None:
        """Make `array`, known now, the operator's result; it must have the type the model declares."""
        tensor = self.output
        odd = tensor.shape != array.shape or tensor.dtype not in SHAPE_TYPES or tensor.is_constant
        self.wrong_if(odd, f"computes {list(array.shape)} integers, the model declares {tensor}")
        self._known[tensor.index] = array.astype(tensor.dtype.numpy)

    def bind(self, value: Value, result: TfliteTensor | None = None) -> None:
        """Make `value` the operator's result (one of several); it must have the type the model declares."""
        tensor = result or self.output
        odd = tensor.index in self._values or tensor.is_constant or tensor.is_variable
        self.wrong_if(odd, f"tensor {tensor} is written twice or is a constant")
        self.wrong_if(value.type != tensor.type, f"computes {value.type}, the model declares {tensor}")
        self._values[tensor.index] = value

    def add_input(self, index: int) -> None:
        """Declare an input of the network."""
        tensor = self.file.tensors[index]
        if tensor.is_constant or tensor.is_variable or index in self._values:
            what = f"input {tensor} is a constant, a variable or listed twice"
            raise ModelError(what, where=self.file.name, hint="convert the model again")
        self._values[index] = self.graph_input(self.builder.fresh(tensor.name), tensor.type)

    def value(self, tensor: TfliteTensor, where: str = "") -> Value:
        """The value of a tensor as stored: an integer for a quantised one."""
        if tensor.index not in self._values:
            what = "is read before it is computed"
            hint = "convert the model again: its operators stand in the wrong order"
            if tensor.is_variable:
                what = "is a variable, which this operator cannot keep"
                hint = "keep states in a recurrent layer, or give them as an input and an output"
            if tensor.is_variable or not tensor.is_constant:
                raise ModelError(f"tensor {tensor} {what}", where=where or self.where, hint=hint)
            self._values[tensor.index] = self.placed(tensor.name, tensor.array(), tensor.dtype)
        return self._values[tensor.index]

    def real(self, tensor: TfliteTensor) -> Value:
        """The float meaning of a tensor: itself, or a Dequantize of it."""
        value = self.value(tensor)
        if tensor.dtype is DType.FLOAT32:
            return value
        return self.dequantized(value, *self.parameters(tensor), self.quantisation(tensor).axis)

    def dequantized(self, value: Value, scale: Value, zero_point: Value, axis: int = -1) -> Value:
        """A Dequantize node."""
        return self.add(Dequantize(axis), [value, scale, zero_point], name=f"{value}_real")

    def quantisation(self, tensor: TfliteTensor) -> TfliteQuantisation:
        """The quantisation of a tensor that must have one."""
        if tensor.quantisation is None:
            raise self.refuse(f"tensor {tensor} has no quantisation", "quantise the whole model")
        return tensor.quantisation

    def parameters(self, tensor: TfliteTensor) -> tuple[Value, Value]:
        """The scale and zero-point constants of a quantised tensor."""
        held = self.quantisation(tensor)
        if tensor.index not in self._parameters:
            scale = self.placed(f"{tensor.name}_scale", held.scale)
            self._parameters[tensor.index] = scale, self.placed(f"{tensor.name}_zero_point", held.zero_point)
        return self._parameters[tensor.index]

    # Results

    def finish(self, operator: Operator | None, operands: Sequence[Value], suffix: str = "") -> Value:
        """operator, if any, -> Clamp -> Quantize: the result in float, limited by a fused activation, quantised if its
        tensor is; the last one there is has the name."""
        result, named = self.output, dict(enumerate(ACTIVATIONS)).get(self.activation, str(self.activation))
        self.refuse_if(named not in LIMITS, f"the fused activation {named} is not supported")
        limits = LIMITS[named]
        steps: list[Operator] = [*([operator] if operator else []), *([Clamp(*limits)] if limits else [])]
        if result.dtype.is_integer:
            if result.quantisation and len(result.quantisation.scale) != 1:
                raise self.refuse(f"the result {result} is quantised per channel, which is not supported", ALIKE)
            steps.append(Quantize(result.dtype))
        for left, step in zip(range(len(steps))[::-1], steps, strict=True):
            parameters = self.parameters(result) if step.quantises else ()
            ending = ("_clamped" if isinstance(step, Clamp) else "_sum") if left else ""
            operands = [self.add(step, [*operands, *parameters], name=self.named(suffix) + ending)]
        return operands[0]

    def moved(self, *operators: Operator, position: int = 0) -> Value | None:
        """Operators, one behind the other, that copy elements of an operand as stored; of a known one now (None)."""
        x = self.input(position)
        known = self.all_known(x)
        if known is not None:
            for operator in operators:
                known = [operator.evaluate(known)]
            self.bind_known(known[0])
            return None
        self.keeps(x, self.output, what="copies elements, but the type or quantisation of")
        value = self.value(x)
        for operator in operators:
            value = self.add(operator, [value], "" if operator is operators[-1] else "moved")
        return value


def same_quantisation(a: TfliteTensor, b: TfliteTensor) -> bool:
    """True when elements of `a` can be copied to `b`."""
    one, other = a.quantisation, b.quantisation
    return a.dtype is b.dtype and (one.same_as(other) if one is not None and other is not None else one is other)
