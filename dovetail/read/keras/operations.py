"""Keras's functions of values: activations, classes of `keras.ops` (Keras 3), and TensorFlow's functions (Keras 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import inf, prod
from typing import Any

from dovetail.ir.operators.activation import UnaryKind
from dovetail.ir.operators.elementwise import BinaryKind
from dovetail.ir.operators.reduction import ReduceKind
from dovetail.ir.types import Shape
from dovetail.read.einsum import einsum
from dovetail.read.keras.layer import KerasCall, KerasLayer, listed, snake_case
from dovetail.read.keras.values import Importer, KerasValues
from dovetail.read.values import AGAIN, FOLD, Value, kept_shape, slice_of, unary, words

Function = Callable[[KerasValues, Value], Value]
"""(import, float value) -> the function of it."""

SELU_ALPHA = 1.6732632423543772
SELU_SCALE = 1.0507009873554805
"""keras.activations.selu."""


def _log_sigmoid(v: KerasValues, x: Value) -> Value:
    """-softplus(-x)."""
    for kind in (UnaryKind.NEGATIVE, UnaryKind.SOFTPLUS, UnaryKind.NEGATIVE):
        x = v.unary(kind, x, "log_sigmoid")
    return x


def softmax(v: KerasValues, x: Value, axes: Shape | None = None, logarithm: bool = False) -> Value:
    """Softmax over some axes together, or over the last one."""
    return v.softmax(x, (v.axis(-1, x.rank),) if axes is None else axes, "softmax", logarithm)


def _plain(kind: UnaryKind) -> Function:
    """A function whose node is called as the kind."""
    return unary(kind, kind.name.lower())


ACTIVATIONS: Mapping[str, Function] = {
    **{
        name: _plain(UnaryKind[name.upper()])
        for name in words("exponential gelu hard_swish sigmoid softplus softsign tanh")
    },
    "celu": lambda v, x: v.unary(UnaryKind.ELU, x, "elu", 1.0),
    "elu": lambda v, x: v.unary(UnaryKind.ELU, x, "elu", 1.0),
    "hard_shrink": lambda v, x: v.unary(UnaryKind.HARD_SHRINK, x, "shrunk", 0.5),
    # Keras 3: relu6(x + 3) / 6; before: 0.2 * x + 0.5, limited to 0 and 1
    "hard_sigmoid": lambda v, x: v.hard_sigmoid(x, 1 / 6 if v.layer.version >= 3 else 0.2, 0.5, "hard_sigmoid"),
    "hard_silu": unary(UnaryKind.HARD_SWISH, "hard_swish"),
    "hard_tanh": lambda v, x: v.clamp(x, -1.0, 1.0, "limited"),
    "leaky_relu": lambda v, x: v.relu(x, slope=0.2),
    "linear": lambda v, x: x,
    "log_sigmoid": _log_sigmoid,
    "log_softmax": lambda v, x: softmax(v, x, logarithm=True),
    "mish": lambda v, x: v.mish(x, "gated"),
    "relu": lambda v, x: v.relu(x),
    "relu6": lambda v, x: v.relu(x, high=6.0),
    "selu": lambda v, x: v.selu(x, SELU_ALPHA, SELU_SCALE, "scaled"),
    "silu": lambda v, x: v.swish(x, suffix="gated"),
    "softmax": softmax,
    "swish": lambda v, x: v.swish(x, suffix="gated"),
    "tanh_shrink": lambda v, x: v.minus(x, v.unary(UnaryKind.TANH, x, "tanh"), "shrunk"),
}
"""Functions a layer's `activation` may name."""


def activated(v: KerasValues, x: Value, key: str = "activation", default: str = "linear") -> Value:
    """The layer's activation, as its setting `key` says it, of a value: a name, or a serialised object of Keras's own.

    Raises:
        ModelError: it is a function of the user's, or none Dovetail knows.
    """
    setting = v.layer.get(key, default)
    if isinstance(setting, Mapping):
        name, config = setting.get("class_name"), setting.get("config")
        if name == "function":  # a function by its name: Keras's own are known by it, others stand with their module
            custom = str(setting.get("module", "builtins")).split(".")[0] not in ("keras", "builtins")
            setting = f"{setting.get('module')}.{config}" if custom else config
        elif isinstance(config, Mapping) and name in ACTIVATION_LAYERS and name != "PReLU":
            inner = replace(v.layer, kind=str(name), place=f"{v.layer.place}.activation", config=config, read=set())
            value = ACTIVATION_LAYERS[str(name)](v.again(layer=inner), x)
            inner.check_settings()
            return value
        else:
            setting = config if name == "Activation" else name
            setting = setting.get("activation") if isinstance(setting, Mapping) else setting
    what = f"the activation {setting!s:.80} is not one of Keras's own that Dovetail knows; no code is executed"
    return v.entry(setting, ACTIVATIONS, what)(v, x)


def _relu_layer(v: KerasValues, x: Value) -> Value:
    """ReLU: the slope times x - threshold below the threshold, 0 without one; limited above."""
    high, slope = v.layer.number("max_value", inf), _slope(v.layer, 0.0)
    return v.relu(x, slope, high, v.layer.number("threshold", v.layer.number("theta", 0.0)))


def _slope(layer: KerasLayer, default: float) -> float:
    return layer.number("negative_slope", layer.number("alpha", default))


def _prelu(v: KerasValues, x: Value) -> Value:
    """PReLU: a slope for each element, or for each along the axes that are not shared."""
    shape = x.shape
    shared = v.layer.axes("shared_axes", len(shape)) if v.layer.get("shared_axes") else ()
    slopes = v.weight("alpha", [1 if axis in shared else shape[axis] for axis in range(1, len(shape))])
    return v.binary(BinaryKind.PRELU, x, v.constant(slopes, "alpha"), "bent")


ACTIVATION_LAYERS: Mapping[str, Function] = {
    "Activation": activated,
    "ELU": lambda v, x: v.unary(UnaryKind.ELU, x, "elu", v.layer.number("alpha", 1.0)),
    "LeakyReLU": lambda v, x: v.unary(UnaryKind.LEAKY_RELU, x, "bent", _slope(v.layer, 0.3)),
    "PReLU": _prelu,
    "ReLU": _relu_layer,
    "Softmax": lambda v, x: softmax(v, x, v.layer.axes("axis", x.rank)),
    "ThresholdedReLU": lambda v, x: v.unary(UnaryKind.THRESHOLDED_RELU, x, "kept", v.layer.number("theta", 1.0)),
}
"""Layers that are an activation."""


def _argument(v: KerasValues, place: int, *names: str, default: Any = None) -> Any:
    """An argument by its place or one of its names, or a setting of the operation."""
    if place < len(v.call.arguments):
        return v.call.arguments[place]
    given = (source.get(name) for source in (v.call.named, v.layer.config) for name in names)
    return next((value for value in given if value is not None), default)


def _value(v: KerasValues, argument: Any) -> Value:
    """A computed value as float, or a constant."""
    if isinstance(argument, Value):
        return v.real(argument)
    return v.constant(v.numbers(argument), "argument")


def _operand(v: KerasValues) -> Value:
    """The one value an operation works on."""
    found = _argument(v, 0, *words("x inputs input input_tensor tensor features a"))
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    if not isinstance(found, Value):
        raise v.refuse("works on a value that is not computed", AGAIN)
    return found


def _real(v: KerasValues) -> Value:
    """The same as float."""
    return v.real(_operand(v))


def _number(v: KerasValues, place: int, *names: str, default: float | None = None) -> float:
    """A number among the arguments."""
    return float(v.numbers(_argument(v, place, *names, default=default)))


def _binary(v: KerasValues, kind: BinaryKind) -> Value:
    """A function of two values, either of which may be a constant; broadcast as in numpy."""
    left, right = _argument(v, 0, "x1", "x", "a"), _argument(v, 1, "x2", "y", "b")
    v.wrong_if(left is None or right is None or not v.call.all(Value), "needs two values")
    return v.binary(kind, _value(v, left), _value(v, right), "result")


def _function(function: Function) -> Importer:
    """The importer of a function of one float value; settings other than the defaults are refused."""

    def build(v: KerasValues) -> Value:
        _only(v)
        return function(v, _real(v))

    return build


def _only(v: KerasValues, *known: str) -> None:
    """Refuse settings and further arguments that mean something."""
    for key, value in {**v.layer.config, **v.call.named}.items():
        ignored = value in (None, False) or isinstance(value, Value)
        if not ignored and key not in ("name", "dtype", "function", "trainable", *known):
            raise v.refuse(f"the argument {key} = {value!s:.80} is not supported")


def _axes(v: KerasValues, axis: Any, rank: int) -> Shape:
    """Axes of an argument, counted from the front; all where it is None."""
    given = listed([*range(rank)] if axis is None else axis)
    axes = tuple(sorted({a % rank for a in given if type(a) is int and -rank <= a < rank}))
    v.wrong_if(len(axes) != len(given), f"the axis {axis!s:.80} does not fit {rank} axes")
    return axes


def _reduce(v: KerasValues, kind: ReduceKind) -> Value:
    """A reduction; keepdims leaves the axes with size 1."""
    _only(v, "axis", "keepdims")
    x = _real(v)
    axes = _axes(v, _argument(v, 1, "axis"), x.rank)
    return v.reduce(kind, x, axes, bool(_argument(v, 2, "keepdims", default=False)))


def _relu(v: KerasValues) -> Value:
    """keras.ops.relu; TensorFlow's with an upper limit."""
    high = _argument(v, 1, "max_value", default=inf)
    slope, threshold = (float(_argument(v, 9, name, default=0.0) or 0.0) for name in ("negative_slope", "threshold"))
    return v.relu(_real(v), slope, float(v.numbers(high)) if high != inf else inf, threshold)


def _reshape(v: KerasValues) -> Value:
    """Reshape of everything; the first axis may be the batch's, left open."""
    x, wanted = _operand(v), _argument(v, 1, "newshape", "shape", default=())
    v.refuse_if(not isinstance(wanted, list | tuple), "the new shape is not constant", FOLD)
    shape = x.shape
    sizes = [shape[0] if size is None and place == 0 else size for place, size in enumerate(wanted)]
    return v.shaped(x, v.full_shape(sizes, prod(shape)), "shaped")


def _transpose(v: KerasValues) -> Value:
    x = _operand(v)
    places = list(range(x.rank))
    order = _argument(v, 1, "axes", "perm", default=places[::-1])
    odd = not isinstance(order, list | tuple) or sorted(map(str, order)) != sorted(map(str, places))
    v.wrong_if(odd, f"the axes {order!s:.80} are no order of {len(places)}")
    return v.ordered(x, order, "transposed")


def _squeeze(v: KerasValues) -> Value:
    x, axis = _operand(v), _argument(v, 1, "axis")
    shape = x.shape
    axes = [a for a, size in enumerate(shape) if size == 1 and a] if axis is None else _axes(v, axis, len(shape))
    return v.shaped(x, kept_shape(shape, axes, False), "squeezed")


def _expand(v: KerasValues) -> Value:
    x = _operand(v)
    shape = list(x.shape)
    for axis in _axes(v, _argument(v, 1, "axis", default=-1), len(shape) + 1):
        shape.insert(axis, 1)
    return v.shaped(x, shape, "expanded")


def _concatenate(v: KerasValues) -> Value:
    values = v.several()
    (axis,) = _axes(v, _argument(v, 1, "axis", default=-1), values[0].rank)
    return v.concat(values, axis, "joined")


def _matmul(v: KerasValues) -> Value:
    """A product of matrices, either of them constant or computed."""
    _only(v, "x1", "x2", "a", "b")
    return v.product(_value(v, _argument(v, 0, "x1", "a")), _value(v, _argument(v, 1, "x2", "b")), "product")


def _get_item(v: KerasValues) -> Value:
    """x[a:b, ..., c]: slices with positive steps, and single elements."""
    x, key = _operand(v), _argument(v, 1, "key", "slice_spec", default=[])
    for part in listed(key):
        proper = part is ... or type(part) is int or (isinstance(part, slice) and (part.step or 1) > 0)
        v.refuse_if(not proper, f"the index {part!s:.80} is not supported")
    places, kept = v.indexed(x.shape, listed(key))
    return v.shaped(v.add(slice_of(places), [x], "cut"), kept, "item")


def _cast(v: KerasValues) -> Value:
    kind = _argument(v, 1, "dtype", default="float32")
    if kind not in ("float32", "float16", "bfloat16", "float64"):
        raise v.refuse(f"a cast to {kind!s:.80} is not supported")
    return _real(v)


def _softmax(v: KerasValues) -> Value:
    x = _real(v)
    return softmax(v, x, _axes(v, _argument(v, 1, "axis", default=-1), x.rank))


_NAMED = words("Abs Ceil Erf Exp Floor Log Reciprocal Sign Sqrt Square")
"""Functions whose operation is called as our kind's value."""
_SPELT_OUT = (UnaryKind.ABSOLUTE, UnaryKind.NEGATIVE)
"""As its name."""
_ACTIVATIONS = words("HardSigmoid HardSilu HardTanh LogSigmoid Relu6 Selu Sigmoid Silu Softplus Softsign Tanh")
_ARITHMETIC = words("Add Subtract Multiply Divide Maximum Minimum")

OPERATIONS: Mapping[str, Importer] = {
    **{name: _function(_plain(UnaryKind(name))) for name in _NAMED},
    **{kind.name.capitalize(): _function(_plain(kind)) for kind in _SPELT_OUT},
    **{name: _function(ACTIVATIONS[snake_case(name)]) for name in _ACTIVATIONS},
    **{kind.value.removeprefix("Reduce"): partial(_reduce, kind=kind) for kind in ReduceKind},
    **{name: partial(_binary, kind=BinaryKind[name.upper()]) for name in _ARITHMETIC},
    "Cast": _cast,
    "Clip": lambda v: v.clamp(
        _real(v), _number(v, 1, "x_min", "clip_value_min"), _number(v, 2, "x_max", "clip_value_max"), "limited"
    ),
    "Concatenate": _concatenate,
    "Einsum": lambda v: einsum(v, str(_argument(v, 1 << 20, "subscripts")), [_value(v, x) for x in v.call.arguments]),
    "Elu": lambda v: v.unary(UnaryKind.ELU, _real(v), "elu", _number(v, 1, "alpha", default=1.0)),
    "ExpandDims": _expand,
    "Gelu": lambda v: v.gelu(_real(v), bool(_argument(v, 1, "approximate", default=True)), "gelu"),
    "GetItem": _get_item,
    "HardShrink": lambda v: v.unary(UnaryKind.HARD_SHRINK, _real(v), "shrunk", _number(v, 1, "threshold", default=0.5)),
    "Identity": _operand,
    "LeakyRelu": lambda v: v.unary(
        UnaryKind.LEAKY_RELU, _real(v), "bent", _number(v, 1, "negative_slope", "alpha", default=0.2)
    ),
    "Matmul": _matmul,
    "Relu": _relu,
    "Reshape": _reshape,
    "Rsqrt": _function(lambda v, x: v.unary(UnaryKind.RECIPROCAL, v.unary(UnaryKind.SQUARE_ROOT, x), "result")),
    "Softmax": _softmax,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "TrueDivide": partial(_binary, kind=BinaryKind.DIVIDE),
}
"""Operations of keras.ops by the names of their classes."""

_MATH = words("abs add divide exp log maximum minimum multiply negative rsqrt sigmoid sqrt square subtract tanh")

TENSORFLOW: Mapping[str, str] = {
    **{name: name.capitalize() for name in words("cast identity reshape squeeze transpose")},
    **{f"math.{name}": name.capitalize() for name in _MATH},
    **{f"math.reduce_{name}": name.capitalize() for name in words("max mean min sum")},
    **{f"nn.{name}": name.capitalize() for name in words("elu relu relu6 softmax")},
    "__operators__.add": "Add",
    "__operators__.getitem": "GetItem",
    "clip_by_value": "Clip",
    "compat.v1.transpose": "Transpose",
    "concat": "Concatenate",
    "expand_dims": "ExpandDims",
    "linalg.matmul": "Matmul",
    "math.truediv": "Divide",
    "nn.leaky_relu": "LeakyRelu",
}
"""Functions of TensorFlow that a TFOpLambda of Keras 2 names, as operations. Only the name is read."""


def tensorflow_operation(v: KerasValues) -> Any:
    """TFOpLambda: a function of TensorFlow by its name."""
    name = str(v.layer.get("function", "")).removeprefix("tf.")
    if v.layer.kind == "TFOpLambda" and "function" not in v.layer.config:
        name = "__operators__.getitem"  # SlicingOpLambda of older files
    operation = v.entry(name, TENSORFLOW, f"TensorFlow's function {name:.80} is not supported")
    named = {key: value for key, value in v.call.named.items() if value is not None and key != "name"}
    return OPERATIONS[operation](v.again(call=KerasCall(v.call.arguments, named)))
