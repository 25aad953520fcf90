"""Keras's functions of values: activations, classes of `keras.ops` (Keras 3), and TensorFlow's functions (Keras 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf, prod
from typing import Any

from dovetail.ir.operators.activation import UnaryKind
from dovetail.ir.operators.elementwise import BinaryKind
from dovetail.ir.operators.linear import MatrixProduct
from dovetail.ir.operators.movement import Slice
from dovetail.ir.operators.reduction import ReduceKind
from dovetail.read.keras.layer import AGAIN, FOLD, KerasCall, KerasLayer, KerasTensor, snake_case
from dovetail.read.keras.values import Importer, KerasValues
from dovetail.read.values import unary

Function = Callable[[KerasValues, str], str]
"""(import, float value) -> the function of it."""

SELU_ALPHA = 1.6732632423543772
SELU_SCALE = 1.0507009873554805
"""keras.activations.selu."""


def _hard_sigmoid(v: KerasValues, x: str) -> str:
    """Keras 3: relu6(x + 3) / 6; before: 0.2 * x + 0.5, limited to 0 and 1."""
    return v.hard_sigmoid(x, 1 / 6 if v.layer.version >= 3 else 0.2, 0.5, "hard_sigmoid")


def _log_sigmoid(v: KerasValues, x: str) -> str:
    """-softplus(-x)."""
    for kind in (UnaryKind.NEGATIVE, UnaryKind.SOFTPLUS, UnaryKind.NEGATIVE):
        x = v.unary(kind, x, "log_sigmoid")
    return x


def softmax(v: KerasValues, x: str, axes: tuple[int, ...] | None = None, logarithm: bool = False) -> str:
    """Softmax over some axes together, or over the last one."""
    if axes is None and not v.shape(x):
        raise v.refuse(f"the axis -1 is outside of {v.type_of(x)}", AGAIN)
    return v.softmax(x, (len(v.shape(x)) - 1,) if axes is None else axes, "softmax", logarithm)


_PLAIN = (
    *(UnaryKind.EXPONENTIAL, UnaryKind.GELU, UnaryKind.HARD_SWISH, UnaryKind.SIGMOID, UnaryKind.SOFTPLUS),
    *(UnaryKind.SOFTSIGN, UnaryKind.TANH),
)

ACTIVATIONS: Mapping[str, Function] = {
    **{kind.name.lower(): unary(kind, kind.name.lower()) for kind in _PLAIN},
    "celu": lambda v, x: v.unary(UnaryKind.ELU, x, "elu", 1.0),
    "elu": lambda v, x: v.unary(UnaryKind.ELU, x, "elu", 1.0),
    "hard_shrink": lambda v, x: v.unary(UnaryKind.HARD_SHRINK, x, "shrunk", 0.5),
    "hard_sigmoid": _hard_sigmoid,
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


def activated(v: KerasValues, x: str, key: str = "activation", default: str = "linear") -> str:
    """The layer's activation, as its setting `key` says it, of a value."""
    return _activation(v, v.layer.get(key, default))(v, x)


def _activation(v: KerasValues, setting: Any) -> Function:
    """The function a setting says: a name, or a serialised object of Keras's own.

    Raises:
        ModelError: it is a function of the user's, or none Dovetail knows.
    """
    if isinstance(setting, Mapping):
        name, config = setting.get("class_name"), setting.get("config")
        if name == "function":  # a function by its name: Keras's own are known by it, others stand with their module
            custom = str(setting.get("module", "builtins")).split(".")[0] not in ("keras", "builtins")
            setting = f"{setting.get('module')}.{config}" if custom else config
        elif isinstance(config, Mapping) and name in ACTIVATION_LAYERS and name != "PReLU":
            outer, build = v.layer, ACTIVATION_LAYERS[str(name)]
            inner = KerasLayer(outer.file, str(name), outer.name, f"{outer.place}.activation", outer.version, config)
            return lambda v, x: _checked(build(v.again(layer=inner), x), inner)
        else:
            setting = config if name == "Activation" else name
            setting = setting.get("activation") if isinstance(setting, Mapping) else setting
    if not isinstance(setting, str) or setting not in ACTIVATIONS:
        raise v.refuse(
            f"the activation {str(setting)[:80]} is not one of Keras's own that Dovetail knows; no code is executed",
            f"supported are {', '.join(sorted(ACTIVATIONS))}",
        )
    return ACTIVATIONS[setting]


def _checked(value: str, layer: KerasLayer) -> str:
    layer.check_settings()
    return value


def _relu_layer(v: KerasValues, x: str) -> str:
    """ReLU: the slope times x - threshold below the threshold, 0 without one; limited above."""
    high, slope = v.layer.number("max_value", inf), _slope(v.layer, 0.0)
    return v.relu(x, slope, high, v.layer.number("threshold", v.layer.number("theta", 0.0)))


def _slope(layer: KerasLayer, default: float) -> float:
    return layer.number("negative_slope", layer.number("alpha", default))


def _prelu(v: KerasValues, x: str) -> str:
    """PReLU: a slope for each element, or for each along the axes that are not shared."""
    shape = v.shape(x)
    shared = v.layer.axes("shared_axes", len(shape), None) if v.layer.get("shared_axes") else ()
    slopes = v.weight("alpha", [1 if axis in shared else shape[axis] for axis in range(1, len(shape))])
    return v.binary(BinaryKind.PRELU, x, v.constant(slopes, "alpha"), "bent")


ACTIVATION_LAYERS: Mapping[str, Function] = {
    "Activation": activated,
    "ELU": lambda v, x: v.unary(UnaryKind.ELU, x, "elu", v.layer.number("alpha", 1.0)),
    "LeakyReLU": lambda v, x: v.unary(UnaryKind.LEAKY_RELU, x, "bent", _slope(v.layer, 0.3)),
    "PReLU": _prelu,
    "ReLU": _relu_layer,
    "Softmax": lambda v, x: softmax(v, x, v.layer.axes("axis", len(v.shape(x)), -1)),
    "ThresholdedReLU": lambda v, x: v.unary(UnaryKind.THRESHOLDED_RELU, x, "kept", v.layer.number("theta", 1.0)),
}
"""Layers that are an activation."""


def _argument(v: KerasValues, place: int, *names: str, default: Any = None) -> Any:
    """An argument by its place or one of its names, or a setting of the operation."""
    if place < len(v.call.arguments):
        return v.call.arguments[place]
    for source in (v.call.named, v.layer.config):
        for name in names:
            if source.get(name) is not None:
                return source[name]
    return default


def _value(v: KerasValues, argument: Any) -> str:
    """A computed value as float, or a constant."""
    if isinstance(argument, KerasTensor):
        return v.real(argument.name)
    return v.constant(v.numbers(argument), "argument")


def _operand(v: KerasValues) -> str:
    """The one value an operation works on."""
    found = _argument(v, 0, "x", "inputs", "input", "input_tensor", "tensor", "features", "a")
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    if not isinstance(found, KerasTensor):
        raise v.refuse("works on a value that is not computed", AGAIN)
    return found.name


def _real(v: KerasValues) -> str:
    """The same as float."""
    return v.real(_operand(v))


def _number(v: KerasValues, place: int, *names: str, default: float | None = None) -> float:
    """A number among the arguments."""
    return float(v.numbers(_argument(v, place, *names, default=default)))


def _binary(kind: BinaryKind) -> Importer:
    """The importer of a function of two values, either of which may be a constant; broadcast as in numpy."""

    def build(v: KerasValues) -> str:
        left, right = _argument(v, 0, "x1", "x", "a"), _argument(v, 1, "x2", "y", "b")
        if left is None or right is None or not v.call.tensors():
            raise v.refuse("needs two values", AGAIN)
        return v.binary(kind, _value(v, left), _value(v, right), "result")

    return build


def _function(function: Callable[[KerasValues, str], str]) -> Importer:
    """The importer of a function of one float value; settings other than the defaults are refused."""

    def build(v: KerasValues) -> str:
        _only(v)
        return function(v, _real(v))

    return build


def _only(v: KerasValues, *known: str) -> None:
    """Refuse settings and further arguments that mean something."""
    for key, value in {**v.layer.config, **v.call.named}.items():
        harmless = value in (None, False) or isinstance(value, KerasTensor)
        if key not in ("name", "dtype", "function", "trainable", *known) and not harmless:
            raise v.refuse(f"the argument {key} = {str(value)[:80]} is not supported")


def _axes(v: KerasValues, axis: Any, rank: int) -> tuple[int, ...]:
    """Axes of an argument, counted from the front; all where it is None."""
    listed = list(range(rank)) if axis is None else list(axis) if isinstance(axis, list | tuple) else [axis]
    proper = all(isinstance(a, int) and not isinstance(a, bool) and -rank <= a < rank for a in listed)
    if not proper or len({a % rank for a in listed}) != len(listed):
        raise v.refuse(f"the axis {str(axis)[:80]} does not fit {rank} axes", AGAIN)
    return tuple(sorted(a % rank for a in listed))


def _reduce(kind: ReduceKind) -> Importer:
    """The importer of a reduction; keepdims leaves the axes with size 1."""

    def build(v: KerasValues) -> str:
        _only(v, "axis", "keepdims")
        x = _real(v)
        axes = _axes(v, _argument(v, 1, "axis"), len(v.shape(x)))
        return v.reduce(kind, x, axes, bool(_argument(v, 2, "keepdims", default=False)))

    return build


def _relu(v: KerasValues) -> str:
    """keras.ops.relu; TensorFlow's with an upper limit."""
    high = _argument(v, 1, "max_value", default=inf)
    slope, threshold = (float(_argument(v, 9, name, default=0.0) or 0.0) for name in ("negative_slope", "threshold"))
    return v.relu(_real(v), slope, float(v.numbers(high)) if high != inf else inf, threshold)


def _reshape(v: KerasValues) -> str:
    """Reshape of everything; the first axis may be the batch's, left open."""
    x, wanted = _operand(v), _argument(v, 1, "newshape", "shape", default=())
    if not isinstance(wanted, list | tuple):
        raise v.refuse("the new shape is not constant", FOLD)
    shape = v.shape(x)
    open_ = [shape[0] if size is None and place == 0 else size for place, size in enumerate(wanted)]
    return v.reshape(x, v.layer.full_shape(open_, prod(shape)), "shaped")


def _transpose(v: KerasValues) -> str:
    x = _operand(v)
    rank = len(v.shape(x))
    order = _argument(v, 1, "axes", "perm", default=list(range(rank))[::-1])
    if not isinstance(order, list | tuple) or sorted(str(a) for a in order) != sorted(str(a) for a in range(rank)):
        raise v.refuse(f"the axes {str(order)[:80]} are no order of {rank}", AGAIN)
    return v.transpose(x, order, "transposed")


def _squeeze(v: KerasValues) -> str:
    x, axis = _operand(v), _argument(v, 1, "axis")
    shape = v.shape(x)
    axes = _axes(v, axis, len(shape)) if axis is not None else [a for a, n in enumerate(shape) if n == 1 and a]
    if any(shape[a] != 1 for a in axes):
        raise v.refuse(f"the axes {list(axes)} of {v.type_of(x)} are not all of size 1", AGAIN)
    return v.reshape(x, [size for a, size in enumerate(shape) if a not in axes], "squeezed")


def _expand(v: KerasValues) -> str:
    x = _operand(v)
    shape = list(v.shape(x))
    for axis in _axes(v, _argument(v, 1, "axis", default=-1), len(shape) + 1):
        shape.insert(axis, 1)
    return v.reshape(x, shape, "expanded")


def _concatenate(v: KerasValues) -> str:
    values = [v.real(value) for value in v.call.tensors()]
    if not values:
        raise v.refuse("is called without values", AGAIN)
    (axis,) = _axes(v, _argument(v, 1, "axis", default=-1), len(v.shape(values[0])))
    return v.joined(values, axis)


def _matmul(v: KerasValues) -> str:
    """A product of matrices, either of them constant or computed."""
    _only(v, "x1", "x2", "a", "b")
    sides = [_value(v, _argument(v, place, *names)) for place, names in ((0, ("x1", "a")), (1, ("x2", "b")))]
    return v.add(MatrixProduct(), sides, "product")


def _get_item(v: KerasValues) -> str:
    """x[a:b, ..., c]: slices with positive steps, and single elements."""
    x = _operand(v)
    shape = v.shape(x)
    key = _argument(v, 1, "key", "slice_spec", default=[])
    listed = list(key) if isinstance(key, list | tuple) else [key]
    if listed.count(Ellipsis) == 1:
        place = listed.index(Ellipsis)
        listed[place : place + 1] = [slice(None)] * (len(shape) - len(listed) + 1)
    listed += [slice(None)] * (len(shape) - len(listed))
    start, stop, step, kept = [], [], [], []
    for axis, part in enumerate(listed[: len(shape)]):
        single = isinstance(part, int) and not isinstance(part, bool) and -shape[axis] <= part < shape[axis]
        if single:
            part = slice(part % shape[axis], part % shape[axis] + 1)
        if not isinstance(part, slice) or (part.step or 1) < 1:
            raise v.refuse(f"the index {str(part)[:80]} is not supported")
        bounds = part.indices(shape[axis])
        start.append(bounds[0])
        stop.append(max(bounds[0], bounds[1]))
        step.append(bounds[2])
        kept.append(not single)
    if len(listed) != len(shape):
        raise v.refuse(f"{len(listed)} indices do not fit {v.type_of(x)}", AGAIN)
    cut = v.add(Slice(tuple(start), tuple(stop), tuple(step)), [x], "cut")
    return v.reshape(cut, [size for size, keep in zip(v.shape(cut), kept, strict=True) if keep], "item")


def _cast(v: KerasValues) -> str:
    kind = _argument(v, 1, "dtype", default="float32")
    if kind not in ("float32", "float16", "bfloat16", "float64"):
        raise v.refuse(f"a cast to {str(kind)[:80]} is not supported")
    return _real(v)


def _softmax(v: KerasValues) -> str:
    x = _real(v)
    return softmax(v, x, _axes(v, _argument(v, 1, "axis", default=-1), len(v.shape(x))))


# Functions whose operation is called as our kind's value, as its name, or as an activation.
_SPELT_OUT = (UnaryKind.ABSOLUTE, UnaryKind.NEGATIVE)
_NAMED = (
    *(UnaryKind.ABSOLUTE, UnaryKind.CEILING, UnaryKind.ERROR_FUNCTION, UnaryKind.EXPONENTIAL, UnaryKind.FLOOR),
    *(UnaryKind.LOGARITHM, UnaryKind.RECIPROCAL, UnaryKind.SIGN, UnaryKind.SQUARE_ROOT, UnaryKind.SQUARE),
)
_ACTIVATIONS = (
    *("HardSigmoid", "HardSilu", "HardTanh", "LogSigmoid", "Relu6", "Selu", "Sigmoid", "Silu"),
    *("Softplus", "Softsign", "Tanh"),
)
_ARITHMETIC = (
    *(BinaryKind.ADD, BinaryKind.SUBTRACT, BinaryKind.MULTIPLY, BinaryKind.DIVIDE),
    *(BinaryKind.MAXIMUM, BinaryKind.MINIMUM),
)

OPERATIONS: Mapping[str, Importer] = {
    **{kind.value: _function(unary(kind, kind.name.lower())) for kind in _NAMED},
    **{kind.name.capitalize(): _function(unary(kind, kind.name.lower())) for kind in _SPELT_OUT},
    **{name: _function(ACTIVATIONS[snake_case(name)]) for name in _ACTIVATIONS},
    **{kind.value.removeprefix("Reduce"): _reduce(kind) for kind in ReduceKind},
    **{kind.name.capitalize(): _binary(kind) for kind in _ARITHMETIC},
    "Cast": _cast,
    "Clip": lambda v: v.clamp(
        _real(v), _number(v, 1, "x_min", "clip_value_min"), _number(v, 2, "x_max", "clip_value_max"), "limited"
    ),
    "Concatenate": _concatenate,
    "Einsum": lambda v: v.einsum(str(_argument(v, 1 << 20, "subscripts")), [_value(v, x) for x in v.call.arguments]),
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
    "TrueDivide": _binary(BinaryKind.DIVIDE),
}
"""Operations of keras.ops by the names of their classes."""

_MATH = (
    *("abs", "add", "divide", "exp", "log", "maximum", "minimum", "multiply", "negative"),
    *("rsqrt", "sigmoid", "sqrt", "square", "subtract", "tanh"),
)

TENSORFLOW: Mapping[str, str] = {
    **{name: name.capitalize() for name in ("cast", "identity", "reshape", "squeeze", "transpose")},
    **{f"math.{name}": name.capitalize() for name in _MATH},
    **{f"math.reduce_{name}": name.capitalize() for name in ("max", "mean", "min", "sum")},
    **{f"nn.{name}": name.capitalize() for name in ("elu", "relu", "relu6", "softmax")},
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
    if name not in TENSORFLOW:
        known = ", ".join(sorted(TENSORFLOW))
        raise v.refuse(f"TensorFlow's function {name[:80]} is not supported", f"supported are {known}")
    named = {key: value for key, value in v.call.named.items() if value is not None and key != "name"}
    return OPERATIONS[TENSORFLOW[name]](v.again(call=KerasCall(v.call.arguments, named)))
