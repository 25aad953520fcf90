"""Layers made from a pattern: a point says how large they are and how their numbers are chosen.

A point is a setting for every axis below; axes that are absent have their first default. `_MAKERS` has a function for
each operator a pattern may have; a pattern with another operator cannot be tried and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dovetail.ir.graph import Graph, GraphBuilder
from dovetail.ir.operators.arithmetic import Add, Clip, Lookup, Offset, Requantize, Rounding, ScaleShift
from dovetail.ir.operators.base import Operator, require
from dovetail.ir.operators.bits import BitProduct, ToBitPlanes
from dovetail.ir.operators.elementwise import Binary, BinaryKind
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected, Linear, accumulator_type
from dovetail.ir.operators.movement import Concat, Pad, Reshape, Slice, Transpose
from dovetail.ir.operators.reduction import AveragePool2d, MaxPool2d, SumPool2d
from dovetail.ir.operators.user import UserOperator
from dovetail.ir.pattern import operators_of
from dovetail.ir.types import Array, DType, TensorType
from dovetail.records import Record
from dovetail.target.offload import Cases
from dovetail.target.pattern import Apply, Leaf, Pattern

Point = Mapping[str, int]
"""Axis -> setting."""
Part = Apply[Any]
"""An operator of a pattern, with its operands."""

SIZES = {
    **{"rows": 6, "columns": 5, "channels": 8, "outputs": 8, "kernel_rows": 3, "kernel_columns": 3},
    **dict.fromkeys(("stride_rows", "stride_columns", "dilation_rows", "dilation_columns"), 1),
    **dict.fromkeys(("top", "left", "bottom", "right", "batch", "groups", "depth"), 1),
}
"""Axes that count something, with their defaults. `depth` is a depthwise layer's multiplier."""
PADS = ("top", "bottom", "left", "right")
LEAST = {name: 0 if name in PADS else 1 for name in SIZES}
"""The smallest size of each."""
TYPES = (DType.INT8, DType.UINT8, DType.INT16, DType.INT4, DType.UINT4, DType.INT2, DType.UINT2)
WEIGHTS = (DType.INT8, DType.INT4, DType.INT2)
RANGES = ((-1 << 31, (1 << 31) - 1), (0, (1 << 31) - 1), (0, 77), (-64, 63), (-32, 31))
"""Limits of a clip before those of its type."""
NUMBERS: dict[str, tuple[int, ...]] = {
    **{"input_zero": (5, 0), "weight_zero": (0, 3), "output_zero": (-9, 0), "pad_offset": (0, 3)},
    **{"type": tuple(range(len(TYPES))), "weight_type": tuple(range(len(WEIGHTS)))},
    "rounding": tuple(range(len(Rounding))),
    **{"per_channel": (1, 0), "bias": (1, 0), "weights": (1, 2, 0), "x": (1, 0)},
    **{"multiplier": (0, 1, 2, 3), "scales": (0, 1), "relu": (0, 1), "variant": tuple(range(8))},
}
"""Axes of other numbers: the default first. `weights` and `x`: 0 all the same, 1 random, 2 weights of -1, 0 and 1.
`multiplier`: of a requantisation, 0 any, 1 a power of two, 2 one of 15 bits, 3 of 8. Of networks (`networks.py`):
`scales`: 0 any, 1 powers of two, those of activations all the same; `relu`: whether it is there; `variant`: the port's
own."""
MADE = {"made": (0, 1), "model": (0,)}
"""How a layer is made, which stays as it is: `made` 1 is from a network, `model` says which; 0 is the port's own."""
ORDERS = ((0, 2, 1, 3), (0, 3, 1, 2), (0, 2, 3, 1), (3, 2, 1, 0), (0, 1, 3, 2))
"""Permutations of a transposition."""
FUNCTIONS = tuple(kind for kind in BinaryKind if kind is not BinaryKind.PRELU)
"""Functions of two integers."""
OWN: dict[str, tuple[int, ...]] = {
    "range": tuple(range(len(RANGES))),
    "result": tuple(range(len(TYPES))),
    "scale": (0, 1),
    "offset": (0, 1, 2),
    "with": (1, 0),
    "order": tuple(range(len(ORDERS))),
    "function": tuple(range(len(FUNCTIONS))),
    "along": (3, 1, 2, 0),
    "unequal": (1, 0),
    "first": (0, 1, 3),
    "spread": (0, 1, 2),
}
"""Axes of one operator of the pattern, as `axis:name`. Of a ScaleShift, `scale` 1: a shift only, one for all channels;
`offset` 0: any, 1: a multiple of the scale, 2: none. `with`: whether an optional operator is there. `along`: of a
concatenation; `unequal`: whether its operands have different sizes there. `first`: channels a slice begins behind.
`spread`: the second of two operands is whole (0), has one element for each channel (1), or one alone (2)."""
_DEFAULTS = SIZES | {axis: settings[0] for axis, settings in (MADE | NUMBERS | OWN).items()}


MOST_WORK, MOST_ELEMENTS = 2_000_000, 200_000
"""Multiply-accumulates of a layer, and elements of a value, beyond which none is made."""


class NoLayerError(Exception):
    """A pattern has an operator that no layer can be made with."""


def setting(point: Point, axis: str) -> int:
    """The setting of an axis in a point, or its default."""
    return point.get(axis, _DEFAULTS[axis.split(":")[0]])


@dataclass
class LayerBuilder:
    """A layer being made: what was computed so far, and which axes mattered."""

    builder: GraphBuilder
    point: Point
    prefix: str
    generator: np.random.Generator
    arrays: dict[str, Array] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    """Leaf -> value, of run-time operands."""
    parts: dict[int, str] = field(default_factory=dict)
    """Part of the pattern, by identity -> its value: a part that stands in the pattern twice is one value."""
    used: dict[str, None] = field(default_factory=dict)
    work: int = 0
    matrix: bool = False
    spread: str = ""
    """The axis that says how many elements the leaf being made has; empty where it has all."""
    result: DType = DType.INT8
    """Type of the result of the part that is being made."""

    def get(self, axis: str) -> int:
        """The setting of an axis; notes that the axis matters."""
        self.used[axis] = None
        return setting(self.point, axis)

    def both(self, what: str) -> tuple[int, int]:
        """The settings of both directions of an image."""
        return self.get(f"{what}_rows"), self.get(f"{what}_columns")

    def constant(self, name: str, array: Array, dtype: DType | None = None) -> str:
        """Add a constant."""
        value = self.builder.constant(f"{self.prefix}{name}", array, dtype)
        self.arrays[value] = array
        return value

    def given(self, leaf: str, kind: TensorType, array: Array) -> str:
        """Add a run-time operand."""
        value = self.builder.input(f"{self.prefix}{leaf}", kind)
        self.arrays[value], self.inputs[leaf] = array.astype(kind.dtype.numpy), value
        return value

    def operand(self, leaf: str, kind: TensorType) -> str:
        """Add a run-time operand of random integers, or of one integer."""
        low, high = kind.dtype.low, kind.dtype.high
        array = np.full(kind.shape, low + 3)
        if self.get("x"):
            array = self.generator.integers(max(low, -(1 << 11)), min(high, 1 << 11) + 1, kind.shape)
        return self.given(leaf, kind, array)

    def add(self, operator: Operator, *inputs: str) -> str:
        """Add an operator and compute it; raises ValueError where it does not take its operands."""
        kinds = [self.builder.type_of(name) for name in inputs]
        result = operator.infer(kinds)
        self.work += operator.macs(kinds)
        require_small(self.work <= MOST_WORK, *kinds, result)
        stem = f"{self.prefix}{type(operator).__name__.lower()}"
        value = self.builder.add(operator, inputs, stem, self.prefix or "case")
        self.arrays[value] = operator.evaluate([self.arrays[name] for name in inputs])
        return value


def require_small(condition: bool, *kinds: TensorType) -> None:
    """Raise ValueError unless the condition holds and the values are small enough to be tried."""
    require(condition and all(kind.elements <= MOST_ELEMENTS for kind in kinds), "too large to be tried")


class MadeLayer(Record):
    """A layer in a graph, with operands and the result it must give."""

    root: str
    inputs: Mapping[str, Array]
    expected: Array
    used: tuple[str, ...]
    """Axes that matter."""
    work: int
    """Multiply-accumulates."""

    def settings(self, point: Point) -> dict[str, int]:
        """The settings of all axes that matter."""
        return {axis: setting(point, axis) for axis in self.used}


def add_layer(builder: GraphBuilder, pattern: Pattern, cases: Cases | None, point: Point, prefix: str) -> MadeLayer:
    """Put a layer of a pattern, or of a network, into a graph; its numbers depend on nothing but the point.

    Raises:
        ValueError: there is no such layer, e.g. a kernel larger than its image.
        NoLayerError: no layer can be made with an operator of the pattern.
    """
    seed = [abs(setting(point, axis)) for axis in _SEEDING]
    making = LayerBuilder(builder, point, prefix, np.random.default_rng(seed))
    making.matrix = FullyConnected in operators_of(pattern)
    root = _of_network(making, cases) if setting(point, "made") else _make(making, pattern)
    arrays = {name: making.arrays[name] for name in making.inputs.values()}
    return MadeLayer(root, arrays, making.arrays[root], tuple(making.used), making.work)


_SEEDING = (*SIZES, *(axis for axis in NUMBERS if axis not in ("multiplier", "scales", "relu", "variant")))
"""Axes the random numbers depend on."""


class _PointSettings(Mapping[str, int]):
    """The settings of a point; each one that is read is noted."""

    def __init__(self, making: LayerBuilder) -> None:
        self._making = making

    def __getitem__(self, axis: str) -> int:
        if axis not in self:
            raise KeyError(axis)
        return self._making.get(axis)

    def __iter__(self) -> Iterator[str]:
        return iter((*SIZES, *NUMBERS))

    def __len__(self) -> int:
        return len(SIZES) + len(NUMBERS)

    def __contains__(self, axis: object) -> bool:
        return axis in SIZES or axis in NUMBERS or axis in MADE


def _of_network(making: LayerBuilder, cases: Cases | None) -> str:
    """The part of a network that the offload takes; its value."""
    making.get("made")
    if cases is None:
        raise ValueError("there are no networks for it")
    part = cases(_PointSettings(making))
    names = {name: making.constant(name, array, part.types[name].dtype) for name, array in part.constants.items()}
    names |= {name: making.operand(name, part.types[name]) for name in part.inputs}
    for node in part.nodes:
        names[node.output] = making.add(node.operator, *(names[name] for name in node.inputs))
    return names[part.outputs[0]]


def single(pattern: Pattern, cases: Cases | None, point: Point) -> tuple[Graph, MadeLayer]:
    """A network of one layer; raises as `add_layer`."""
    builder = GraphBuilder("case")
    layer = add_layer(builder, pattern, cases, point, "")
    return builder.finish([layer.root]), layer


def left_out(pattern: Pattern) -> tuple[str, ...]:
    """Names of a pattern's operators that no layer is made with."""
    return tuple(dict.fromkeys(kind.__name__ for kind in operators_of(pattern) if _maker(kind) is None))


def _maker(kind: type[Operator]) -> Maker | None:
    """The function that makes layers with an operator."""
    if issubclass(kind, UserOperator):
        return _user
    return _applied if kind in _OPERATORS else _MAKERS.get(kind)


def _make(making: LayerBuilder, part: Pattern) -> str:
    if isinstance(part, Leaf):
        return _leaf(making, part)
    maker = _maker(part.operator)
    if part.optional and (maker is None or (part.operator is not Pad and not making.get(f"with:{part.name}"))):
        return _make(making, part.inputs[0])
    if maker is None:
        raise NoLayerError(f"no layer is made with {part.operator.__name__}")
    if id(part) not in making.parts:
        making.parts[id(part)] = maker(making, part)
    return making.parts[id(part)]


def _leaf(making: LayerBuilder, leaf: Leaf, along: int = 0, more: int = 0) -> str:
    """A run-time operand, once however often the pattern reads it, with `more` elements along an axis."""
    if leaf.constant:
        raise NoLayerError(f"no constant is made for {leaf.name} where it stands")
    if leaf.name in making.inputs:
        return making.inputs[leaf.name]
    dtype, images = TYPES[making.get("type")], making.get("batch")
    image = () if making.matrix else (making.get("rows"), making.get("columns"))
    shape = [images, *image, making.get("channels")]
    shape[along] += more
    if making.spread and (spread := making.get(making.spread)):
        shape = [*(1 for _ in shape[1:]), shape[-1] if spread == 1 else 1]
    kind = TensorType(tuple(shape), dtype)
    require_small(True, kind)
    return making.operand(leaf.name, kind)


def _weights(making: LayerBuilder, shape: tuple[int, ...]) -> str:
    require_small(True, TensorType(shape, DType.INT8))
    dtype, kind = WEIGHTS[making.get("weight_type")], making.get("weights")
    low, high = (-1, 1) if kind == 2 else (dtype.low, dtype.high)
    array = making.generator.integers(low, high + 1, shape) if kind else np.ones(shape)
    return making.constant("weights", array.astype(dtype.numpy), dtype)


def _zero(making: LayerBuilder, axis: str, dtype: DType) -> int:
    """A zero point, or the nearest number the type has."""
    return max(dtype.low, min(making.get(axis), dtype.high))


def _layer_operand(making: LayerBuilder, part: Part) -> tuple[str, TensorType, tuple[int, int]]:
    """Name and type of a layer's operand, and the zero points of operand and weights."""
    x = _make(making, part.inputs[0])
    kind = making.builder.type_of(x)
    return x, kind, (_zero(making, "input_zero", kind.dtype), making.get("weight_zero"))


def _dense(making: LayerBuilder, part: Part) -> str:
    x, kind, zeros = _layer_operand(making, part)
    weights = _weights(making, (making.get("outputs"), kind.shape[-1]))
    return _layer(making, part, FullyConnected(*zeros), x, weights)


def _windowed(making: LayerBuilder, part: Part) -> str:
    x, kind, zeros = _layer_operand(making, part)
    kernel, stride, dilation = making.both("kernel"), making.both("stride"), making.both("dilation")
    _refuse_padding_alone(making, part, kind.shape)
    if part.operator.is_channelwise:
        weights = _weights(making, (1, *kernel, kind.shape[-1] * making.get("depth")))
    else:
        outputs, groups = making.get("outputs"), making.get("groups")
        require(kind.shape[-1] % groups == 0, "groups divide the channels")
        weights = _weights(making, (outputs, *kernel, kind.shape[-1] // groups))
    return _layer(making, part, part.operator(stride, dilation, *zeros), x, weights)


def _layer(making: LayerBuilder, part: Part, operator: Linear, x: str, weights: str) -> str:
    """Add a layer, with a bias if the pattern has one."""
    if len(part.inputs) < 3:
        return making.add(operator, x, weights)
    outputs = making.builder.type_of(weights).shape[operator.weight_axis]
    bias = making.generator.integers(-3000, 3001, outputs) * making.get("bias")
    sums = accumulator_type(making.builder.type_of(x).dtype)
    return making.add(operator, x, weights, making.constant("bias", bias.astype(sums.numpy)))


_GROUP = 16
"""Neighbours whose bits lie together."""


def _bit_product(making: LayerBuilder, part: Part) -> str:
    """A product with the bits of a matrix, which is given as they lie."""
    x = _make(making, part.inputs[0])
    shape = (making.get("outputs"), making.builder.type_of(x).shape[-1])
    require_small(True, TensorType(shape, DType.UINT8))
    array = np.full(shape, 129, np.uint8)
    if making.get("weights"):
        array = making.generator.integers(0, 256, shape).astype(np.uint8)
    planes = ToBitPlanes(_GROUP).evaluate([array])
    kind = TensorType(tuple(planes.shape), DType.UINT8)
    return making.add(BitProduct(making.get("weight_zero")), x, making.given(part.inputs[1].name, kind, planes))


def _refuse_padding_alone(making: LayerBuilder, part: Part, shape: tuple[int, ...]) -> None:
    """Raise ValueError where a stride goes beyond the image, or no window has an element of it."""
    padded = isinstance(part.inputs[0], Apply) and part.inputs[0].operator is Pad
    for name, size, lead, end in (("rows", shape[1], "top", "bottom"), ("columns", shape[2], "left", "right")):
        kernel, stride, dilation = (making.get(f"{what}_{name}") for what in ("kernel", "stride", "dilation"))
        before, after = (making.get(lead), making.get(end)) if padded else (0, 0)
        starts = range(0, size - (kernel - 1) * dilation, stride)
        read = (start + tap * dilation for start in starts for tap in range(kernel))
        is_read = any(before <= place < size - after for place in read)
        require(stride <= max(size, 1) and is_read, "it reads padding alone")


def _pad(making: LayerBuilder, part: Part) -> str:
    x = _make(making, part.inputs[0])
    pads = [making.get(name) for name in ("top", "left", "bottom", "right")]
    if part.optional and not any(pads):
        return x
    dtype = making.builder.type_of(x).dtype
    zero, offset = _zero(making, "input_zero", dtype), making.get("pad_offset")
    value = zero + offset if zero + offset <= dtype.high else max(zero - offset, dtype.low)
    return making.add(Pad((0, *pads[:2], 0), (0, *pads[2:], 0), value), x)


def _spread(making: LayerBuilder, value: str) -> Array:
    """Factors of each channel of sums with which the results fill a byte, or a narrower type."""
    sums = making.arrays[value].astype(np.float64)
    mean = np.abs(sums).mean(axis=tuple(range(sums.ndim - 1)))
    width = np.maximum(np.maximum(mean, np.abs(sums).max() / 16), 1.0)
    spread = making.generator.uniform(0.8, 1.25, sums.shape[-1])
    factors = 70.0 / 2.0 ** max(8 - making.result.bits, 0) / width * spread
    return np.asarray(factors if making.get("per_channel") else factors[:1])


def _requantize(making: LayerBuilder, part: Part) -> str:
    x = _make(making, part.inputs[0])
    mantissa, exponent = np.frexp(_spread(making, x))
    bits = {0: 31, 1: 1, 2: 15, 3: 8}[making.get("multiplier")]
    whole = np.rint(mantissa * 2.0**bits).clip(1 << bits - 1, (1 << bits) - 1).astype(np.int64)
    rounding = tuple(Rounding)[making.get("rounding")]
    operator = Requantize(rounding, output_zero_point=_zero(making, "output_zero", making.result))
    multiplier = making.constant("multiplier", (whole << 31 - bits).astype(np.int32))
    return making.add(operator, x, multiplier, making.constant("shift", exponent.astype(np.int32)))


def _scale_shift(making: LayerBuilder, part: Part) -> str:
    x = _make(making, part.inputs[0])
    factors, plain, offsets = _spread(making, x), making.get(f"scale:{part.name}"), making.get(f"offset:{part.name}")
    factors = factors[:1] if plain else factors
    exponent = np.floor((0 if plain else 7) - np.log2(np.maximum(factors, 1e-9)))
    shift = np.clip(exponent, 0, 31).astype(np.int64)
    scale = np.ones(1) if plain else np.clip(np.rint(factors * 2.0**shift), 1, 255)
    count = making.arrays[x].shape[-1] if making.get("per_channel") else 1
    steps = making.generator.integers(-700, 701, count)
    offset = (scale * steps + steps % np.maximum(scale, 1), scale * steps, steps * 0)[offsets]
    constants = {"scale": scale, "offset": offset, "shift": shift}
    names = [making.constant(name, array.astype(np.int32)) for name, array in constants.items()]
    return making.add(ScaleShift(), x, *names)


def _clip(making: LayerBuilder, part: Part) -> str:
    if isinstance(part.inputs[0], Leaf):
        x = _make(making, part.inputs[0])
        dtype = making.builder.type_of(x).dtype
    else:
        dtype = making.result = TYPES[making.get(f"result:{part.name}")]
        x = _make(making, part.inputs[0])
    low, high = RANGES[making.get(f"range:{part.name}")]
    return making.add(Clip(max(low, dtype.low), min(high, dtype.high), dtype), x)


def _pool(making: LayerBuilder, part: Part, kind: TensorType) -> Operator:
    pads = tuple((making.get(a), making.get(b)) for a, b in (("top", "bottom"), ("left", "right")))
    kernel, stride = making.both("kernel"), making.both("stride")
    more = [_zero(making, "input_zero", kind.dtype)] if part.operator is SumPool2d else []
    operator: Operator = part.operator(kernel, stride, pads, *more)
    return operator


def _lookup(making: LayerBuilder, part: Part) -> str:
    x = _make(making, part.inputs[0])
    table = making.generator.integers(-128, 128, 256).astype(np.int8)
    return making.add(Lookup(), x, making.constant("table", table))


def _slice(making: LayerBuilder, part: Part, kind: TensorType) -> Operator:
    """Without what would be padding elsewhere, every `stride`-th element."""
    images, rows, columns, channels = kind.shape
    start = (0, making.get("top"), making.get("left"), making.get(f"first:{part.name}"))
    stop = (images, rows - making.get("bottom"), columns - making.get("right"), channels)
    require(all(low < high for low, high in zip(start, stop, strict=True)), "nothing is left of it")
    return Slice(start, stop, (1, *making.both("stride"), 1))


def _concat(making: LayerBuilder, part: Part) -> str:
    if all(isinstance(one, Apply) and one.operator is Reshape for one in part.inputs):
        return making.add(Concat(0), *(_make(making, one) for one in part.inputs))
    along, unequal = making.get(f"along:{part.name}"), making.get(f"unequal:{part.name}")
    parts = []
    for number, one in enumerate(part.inputs):
        parts.append(_leaf(making, one, along, number * unequal) if isinstance(one, Leaf) else _make(making, one))
    return making.add(Concat(along), *parts)


def _user(making: LayerBuilder, part: Part) -> str:
    """An operator of the user's own, by its example."""
    assert issubclass(part.operator, UserOperator)
    if part.operator.example.__func__ is UserOperator.example.__func__:  # type: ignore[attr-defined]
        raise NoLayerError(f"{part.operator.__name__} has no example")
    operator, kinds = part.operator.example(_PointSettings(making))
    names = []
    for leaf, kind in zip(part.inputs, kinds, strict=True):
        low, high = (kind.dtype.low, kind.dtype.high) if kind.dtype.is_integer else (0, 1)
        array: Array = making.generator.integers(max(low, -(1 << 20)), min(high, 1 << 20) + 1, kind.shape)
        if kind.dtype is DType.FLOAT32:
            array = making.generator.normal(0, 1, kind.shape)
        elif kind.dtype.is_integer and not making.get("x"):
            array = np.full(kind.shape, max(low, 0) + 3)
        if not isinstance(leaf, Leaf):
            names.append(_make(making, leaf))
        elif leaf.constant:
            names.append(making.constant(leaf.name, array.astype(kind.dtype.numpy), kind.dtype))
        else:
            names.append(making.given(leaf.name, kind, array))
    return making.add(operator, *names)


Maker = Callable[[LayerBuilder, Part], str]
_MAKERS: Mapping[type[Operator], Maker] = {
    Conv2d: _windowed,
    DepthwiseConv2d: _windowed,
    FullyConnected: _dense,
    BitProduct: _bit_product,
    Pad: _pad,
    Requantize: _requantize,
    ScaleShift: _scale_shift,
    Clip: _clip,
    Lookup: _lookup,
    Concat: _concat,
}
_OPERATORS: Mapping[type[Operator], Callable[[LayerBuilder, Part, TensorType], Operator]] = {
    **dict.fromkeys((MaxPool2d, AveragePool2d, SumPool2d), _pool),
    Add: lambda making, part, kind: Add(),
    Binary: lambda making, part, kind: Binary(FUNCTIONS[making.get(f"function:{part.name}")]),
    Offset: lambda making, part, kind: Offset(0, DType.INT32),
    Transpose: lambda making, part, kind: Transpose(ORDERS[making.get(f"order:{part.name}")]),
    Slice: _slice,
    Reshape: lambda making, part, kind: Reshape((kind.elements,)),
}
"""Operators whose operands are all parts of the pattern, made for a first operand of a type."""


_ELEMENTWISE = {Requantize, ScaleShift, Clip, Offset, Lookup, Add, Binary}


def _applied(making: LayerBuilder, part: Part) -> str:
    operands = []
    for number, one in enumerate(part.inputs):
        of_two = number == 1 and part.operator in (Add, Binary)
        if of_two and set(operators_of(one)) <= _ELEMENTWISE:
            making.spread = f"spread:{part.name}"
        operands.append(_make(making, one))
        making.spread = ""
    kind = making.builder.type_of(operands[0])
    return making.add(_OPERATORS[part.operator](making, part, kind), *operands)
