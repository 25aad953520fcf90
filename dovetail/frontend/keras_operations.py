"""Operations in functional models: classes of `keras.ops` (Keras 3), and TensorFlow's functions (Keras 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf, prod
from typing import Any

from dovetail.frontend.keras_activation import ACTIVATIONS, Function, relu, softmax_over, unary
from dovetail.frontend.keras_context import Importer, KerasContext
from dovetail.frontend.keras_layer import AGAIN, FOLD, Call, Layer, Tensor
from dovetail.frontend.keras_merging import joined, numbers, operator_of
from dovetail.frontend.keras_movement import full_shape
from dovetail.operators.activation import Clamp, Unary, UnaryKind
from dovetail.operators.elementwise import Binary, BinaryKind
from dovetail.operators.linear import MatrixProduct
from dovetail.operators.movement import Slice
from dovetail.operators.reduction import Reduce, ReduceKind

_MISSING = object()


def _argument(layer: Layer, call: Call, place: int, *names: str, default: Any = None) -> Any:
    """An argument by its place or one of its names, or a setting of the operation."""
    if place < len(call.arguments):
        return call.arguments[place]
    for source in (call.named, layer.config):
        for name in names:
            if source.get(name, _MISSING) is not _MISSING and source[name] is not None:
                return source[name]
    return default


def _value(ctx: KerasContext, layer: Layer, argument: Any) -> str:
    """A computed value as float, or a constant."""
    if isinstance(argument, Tensor):
        return ctx.real(layer, argument.name)
    return ctx.constant(layer, "argument", numbers(layer, argument))


def _operand(ctx: KerasContext, layer: Layer, call: Call) -> str:
    """The one value an operation works on."""
    found = _argument(layer, call, 0, "x", "inputs", "input", "input_tensor", "tensor", "features", "a")
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    if not isinstance(found, Tensor):
        raise layer.refuse("works on a value that is not computed", AGAIN)
    return found.name


def _binary(kind: BinaryKind) -> Importer:
    """The importer of a function of two values, either of which may be a constant."""

    def build(ctx: KerasContext, layer: Layer, call: Call) -> str:
        """Broadcast as in numpy."""
        left = _argument(layer, call, 0, "x1", "x", "a")
        right = _argument(layer, call, 1, "x2", "y", "b")
        if left is None or right is None or not call.tensors():
            raise layer.refuse("needs two values", AGAIN)
        return ctx.add(layer, operator_of(kind), [_value(ctx, layer, left), _value(ctx, layer, right)], "result")

    return build


def _function(function: Function) -> Importer:
    """The importer of a function of one float value."""

    def build(ctx: KerasContext, layer: Layer, call: Call) -> str:
        """Settings other than the defaults are refused."""
        _only(layer, call)
        return function(ctx, layer, ctx.real(layer, _operand(ctx, layer, call)))

    return build


def _only(layer: Layer, call: Call, *known: str) -> None:
    """Refuse settings and further arguments that mean something."""
    named = {**layer.config, **call.named}
    for key, value in named.items():
        harmless = value in (None, False) or isinstance(value, Tensor)
        if key not in ("name", "dtype", "function", "trainable", *known) and not harmless:
            raise layer.refuse(f"the argument {key} = {str(value)[:80]} is not supported")


def _square(ctx: KerasContext, layer: Layer, x: str) -> str:
    return ctx.add(layer, Binary(BinaryKind.MULTIPLY), [x, x], "square")


def _inverse_root(ctx: KerasContext, layer: Layer, x: str) -> str:
    return ctx.add(layer, Unary(UnaryKind.RECIPROCAL), [ctx.add(layer, Unary(UnaryKind.SQUARE_ROOT), [x])], "result")


def _axes(layer: Layer, axis: Any, rank: int) -> tuple[int, ...]:
    """Axes of an argument, counted from the front; all where it is None."""
    listed = list(range(rank)) if axis is None else list(axis) if isinstance(axis, list | tuple) else [axis]
    proper = all(isinstance(a, int) and not isinstance(a, bool) and -rank <= a < rank for a in listed)
    if not proper or len({a % rank for a in listed}) != len(listed):
        raise layer.refuse(f"the axis {str(axis)[:80]} does not fit {rank} axes", AGAIN)
    return tuple(sorted(a % rank for a in listed))


def _reduce(kind: ReduceKind) -> Importer:
    """The importer of a reduction."""

    def build(ctx: KerasContext, layer: Layer, call: Call) -> str:
        """keepdims leaves the axes with size 1."""
        _only(layer, call, "axis", "keepdims")
        x = ctx.real(layer, _operand(ctx, layer, call))
        shape = ctx.shape(x)
        axes = _axes(layer, _argument(layer, call, 1, "axis"), len(shape))
        keep = bool(_argument(layer, call, 2, "keepdims", default=False))
        kept = tuple(1 if a in axes else size for a, size in enumerate(shape) if keep or a not in axes)
        return ctx.reshaped(layer, ctx.add(layer, Reduce(kind, axes), [x], "reduced"), kept, "shaped")

    return build


def _relu(ctx: KerasContext, layer: Layer, call: Call) -> str:
    """keras.ops.relu; TensorFlow's with an upper limit."""
    high = _argument(layer, call, 1, "max_value", default=inf)
    slope, threshold = (
        float(_argument(layer, call, 9, name, default=0.0) or 0.0) for name in ("negative_slope", "threshold")
    )
    x = ctx.real(layer, _operand(ctx, layer, call))
    return relu(ctx, layer, x, slope, float(numbers(layer, high)) if high != inf else inf, threshold)


def _leaky(ctx: KerasContext, layer: Layer, call: Call) -> str:
    slope = float(numbers(layer, _argument(layer, call, 1, "negative_slope", "alpha", default=0.2)))
    return ctx.add(layer, Unary(UnaryKind.LEAKY_RELU, slope), [ctx.real(layer, _operand(ctx, layer, call))], "bent")


def _elu(ctx: KerasContext, layer: Layer, call: Call) -> str:
    alpha = float(numbers(layer, _argument(layer, call, 1, "alpha", default=1.0)))
    return ctx.add(layer, Unary(UnaryKind.ELU, alpha), [ctx.real(layer, _operand(ctx, layer, call))], "elu")


def _gelu(ctx: KerasContext, layer: Layer, call: Call) -> str:
    kind = UnaryKind.GELU_TANH if _argument(layer, call, 1, "approximate", default=True) else UnaryKind.GELU
    return ctx.add(layer, Unary(kind), [ctx.real(layer, _operand(ctx, layer, call))], "gelu")


def _softmax(ctx: KerasContext, layer: Layer, call: Call) -> str:
    x = ctx.real(layer, _operand(ctx, layer, call))
    axis = _argument(layer, call, 1, "axis", default=-1)
    return softmax_over(ctx, layer, x, _axes(layer, axis, len(ctx.shape(x))))


def _clip(ctx: KerasContext, layer: Layer, call: Call) -> str:
    low = _argument(layer, call, 1, "x_min", "clip_value_min")
    high = _argument(layer, call, 2, "x_max", "clip_value_max")
    x = ctx.real(layer, _operand(ctx, layer, call))
    return ctx.add(layer, Clamp(float(numbers(layer, low)), float(numbers(layer, high))), [x], "limited")


def _reshape(ctx: KerasContext, layer: Layer, call: Call) -> str:
    """Reshape of everything; the first axis may be the batch's, left open."""
    x = _operand(ctx, layer, call)
    wanted = _argument(layer, call, 1, "newshape", "shape", default=())
    if not isinstance(wanted, list | tuple):
        raise layer.refuse("the new shape is not constant", FOLD)
    shape = ctx.shape(x)
    open_ = [shape[0] if size is None and place == 0 else size for place, size in enumerate(wanted)]
    return ctx.reshaped(layer, x, full_shape(layer, open_, prod(shape)), "shaped")


def _transpose(ctx: KerasContext, layer: Layer, call: Call) -> str:
    x = _operand(ctx, layer, call)
    rank = len(ctx.shape(x))
    order = _argument(layer, call, 1, "axes", "perm", default=list(range(rank))[::-1])
    if not isinstance(order, list | tuple) or sorted(str(a) for a in order) != sorted(str(a) for a in range(rank)):
        raise layer.refuse(f"the axes {str(order)[:80]} are no order of {rank}", AGAIN)
    return ctx.transposed(layer, x, order, "transposed")


def _squeeze(ctx: KerasContext, layer: Layer, call: Call) -> str:
    x = _operand(ctx, layer, call)
    shape = ctx.shape(x)
    axis = _argument(layer, call, 1, "axis")
    axes = _axes(layer, axis, len(shape)) if axis is not None else [a for a, n in enumerate(shape) if n == 1 and a]
    if any(shape[a] != 1 for a in axes):
        raise layer.refuse(f"the axes {list(axes)} of {ctx.type_of(x)} are not all of size 1", AGAIN)
    return ctx.reshaped(layer, x, tuple(size for a, size in enumerate(shape) if a not in axes), "squeezed")


def _expand(ctx: KerasContext, layer: Layer, call: Call) -> str:
    x = _operand(ctx, layer, call)
    shape = list(ctx.shape(x))
    for axis in _axes(layer, _argument(layer, call, 1, "axis", default=-1), len(shape) + 1):
        shape.insert(axis, 1)
    return ctx.reshaped(layer, x, tuple(shape), "expanded")


def _concatenate(ctx: KerasContext, layer: Layer, call: Call) -> str:
    values = [ctx.real(layer, value) for value in call.tensors()]
    if not values:
        raise layer.refuse("is called without values", AGAIN)
    (axis,) = _axes(layer, _argument(layer, call, 1, "axis", default=-1), len(ctx.shape(values[0])))
    return joined(ctx, layer, values, axis)


def _matmul(ctx: KerasContext, layer: Layer, call: Call) -> str:
    """A product of matrices, either of them constant or computed."""
    _only(layer, call, "x1", "x2", "a", "b")
    left = _value(ctx, layer, _argument(layer, call, 0, "x1", "a"))
    right = _value(ctx, layer, _argument(layer, call, 1, "x2", "b"))
    return ctx.add(layer, MatrixProduct(), [left, right], "product")


def _get_item(ctx: KerasContext, layer: Layer, call: Call) -> str:
    """x[a:b, ..., c]: slices with positive steps, and single elements."""
    x = _operand(ctx, layer, call)
    shape = ctx.shape(x)
    key = _argument(layer, call, 1, "key", "slice_spec", default=[])
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
            raise layer.refuse(f"the index {str(part)[:80]} is not supported")
        bounds = part.indices(shape[axis])
        start.append(bounds[0])
        stop.append(max(bounds[0], bounds[1]))
        step.append(bounds[2])
        kept.append(not single)
    if len(listed) != len(shape):
        raise layer.refuse(f"{len(listed)} indices do not fit {ctx.type_of(x)}", AGAIN)
    cut = ctx.add(layer, Slice(tuple(start), tuple(stop), tuple(step)), [x], "cut")
    sizes = zip(ctx.shape(cut), kept, strict=True)
    return ctx.reshaped(layer, cut, tuple(size for size, keep in sizes if keep), "item")


def _cast(ctx: KerasContext, layer: Layer, call: Call) -> str:
    kind = _argument(layer, call, 1, "dtype", default="float32")
    if kind not in ("float32", "float16", "bfloat16", "float64"):
        raise layer.refuse(f"a cast to {str(kind)[:80]} is not supported")
    return ctx.real(layer, _operand(ctx, layer, call))


def _identity(ctx: KerasContext, layer: Layer, call: Call) -> str:
    return _operand(ctx, layer, call)


_BINARY: Mapping[str, BinaryKind] = {
    "Add": BinaryKind.ADD,
    "Subtract": BinaryKind.SUBTRACT,
    "Multiply": BinaryKind.MULTIPLY,
    "Divide": BinaryKind.DIVIDE,
    "TrueDivide": BinaryKind.DIVIDE,
    "Maximum": BinaryKind.MAXIMUM,
    "Minimum": BinaryKind.MINIMUM,
}

_FUNCTIONS: Mapping[str, Function] = {
    "Abs": unary(UnaryKind.ABSOLUTE),
    "Absolute": unary(UnaryKind.ABSOLUTE),
    "Ceil": unary(UnaryKind.CEILING),
    "Erf": unary(UnaryKind.ERROR_FUNCTION),
    "Exp": unary(UnaryKind.EXPONENTIAL),
    "Floor": unary(UnaryKind.FLOOR),
    "HardSigmoid": ACTIVATIONS["hard_sigmoid"],
    "HardSilu": ACTIVATIONS["hard_silu"],
    "HardTanh": ACTIVATIONS["hard_tanh"],
    "Log": unary(UnaryKind.LOGARITHM),
    "LogSigmoid": ACTIVATIONS["log_sigmoid"],
    "Negative": unary(UnaryKind.NEGATIVE),
    "Reciprocal": unary(UnaryKind.RECIPROCAL),
    "Relu6": ACTIVATIONS["relu6"],
    "Rsqrt": _inverse_root,
    "Selu": ACTIVATIONS["selu"],
    "Sigmoid": ACTIVATIONS["sigmoid"],
    "Sign": unary(UnaryKind.SIGN),
    "Silu": ACTIVATIONS["silu"],
    "Softplus": ACTIVATIONS["softplus"],
    "Softsign": ACTIVATIONS["softsign"],
    "Sqrt": unary(UnaryKind.SQUARE_ROOT),
    "Square": _square,
    "Tanh": ACTIVATIONS["tanh"],
}

_REDUCTIONS: Mapping[str, ReduceKind] = {
    "Max": ReduceKind.MAXIMUM,
    "Mean": ReduceKind.MEAN,
    "Min": ReduceKind.MINIMUM,
    "Prod": ReduceKind.PRODUCT,
    "Sum": ReduceKind.SUM,
}

OPERATIONS: Mapping[str, Importer] = {
    **{name: _binary(kind) for name, kind in _BINARY.items()},
    **{name: _function(function) for name, function in _FUNCTIONS.items()},
    **{name: _reduce(kind) for name, kind in _REDUCTIONS.items()},
    "Cast": _cast,
    "Clip": _clip,
    "Concatenate": _concatenate,
    "Elu": _elu,
    "ExpandDims": _expand,
    "Gelu": _gelu,
    "GetItem": _get_item,
    "Identity": _identity,
    "LeakyRelu": _leaky,
    "Matmul": _matmul,
    "Relu": _relu,
    "Reshape": _reshape,
    "Softmax": _softmax,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
}
"""Operations of keras.ops by the names of their classes."""

TENSORFLOW: Mapping[str, str] = {
    "__operators__.add": "Add",
    "__operators__.getitem": "GetItem",
    "cast": "Cast",
    "clip_by_value": "Clip",
    "concat": "Concatenate",
    "expand_dims": "ExpandDims",
    "identity": "Identity",
    "linalg.matmul": "Matmul",
    "math.abs": "Abs",
    "math.add": "Add",
    "math.divide": "Divide",
    "math.exp": "Exp",
    "math.log": "Log",
    "math.maximum": "Maximum",
    "math.minimum": "Minimum",
    "math.multiply": "Multiply",
    "math.negative": "Negative",
    "math.reduce_max": "Max",
    "math.reduce_mean": "Mean",
    "math.reduce_min": "Min",
    "math.reduce_sum": "Sum",
    "math.rsqrt": "Rsqrt",
    "math.sigmoid": "Sigmoid",
    "math.sqrt": "Sqrt",
    "math.square": "Square",
    "math.subtract": "Subtract",
    "math.tanh": "Tanh",
    "math.truediv": "Divide",
    "compat.v1.transpose": "Transpose",
    "nn.elu": "Elu",
    "nn.leaky_relu": "LeakyRelu",
    "nn.relu": "Relu",
    "nn.relu6": "Relu6",
    "nn.softmax": "Softmax",
    "reshape": "Reshape",
    "squeeze": "Squeeze",
    "transpose": "Transpose",
}
"""Functions of TensorFlow that a TFOpLambda of Keras 2 names, as operations. Only the name is read."""


def tensorflow_operation(ctx: KerasContext, layer: Layer, call: Call) -> Any:
    """TFOpLambda: a function of TensorFlow by its name."""
    name = str(layer.get("function", "")).removeprefix("tf.")
    if layer.kind == "TFOpLambda" and "function" not in layer.config:
        name = "__operators__.getitem"  # SlicingOpLambda of older files
    if name not in TENSORFLOW:
        raise layer.refuse(f"TensorFlow's function {name[:80]} is not supported", f"supported are {_known()}")
    build: Callable[[KerasContext, Layer, Call], Any] = OPERATIONS[TENSORFLOW[name]]
    named = {key: value for key, value in call.named.items() if value is not None and key != "name"}
    return build(ctx, layer, Call(call.arguments, named))


def _known() -> str:
    return ", ".join(sorted(TENSORFLOW))
