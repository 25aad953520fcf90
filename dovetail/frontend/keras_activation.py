"""Keras's activation functions, by name and as layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import Any

import numpy as np

from dovetail.frontend.keras_context import Importer, KerasContext
from dovetail.frontend.keras_layer import AGAIN, Call, Layer
from dovetail.operators.activation import Clamp, LogSoftmax, Softmax, Unary, UnaryKind
from dovetail.operators.arithmetic import Add
from dovetail.operators.elementwise import Binary, BinaryKind

Function = Callable[[KerasContext, Layer, str], str]
"""(import, layer, float value) -> the function of it."""

SELU_ALPHA = 1.6732632423543772
SELU_SCALE = 1.0507009873554805
"""keras.activations.selu."""


def _scaled(ctx: KerasContext, layer: Layer, x: str, factor: float) -> str:
    if factor == 1.0:
        return x
    return ctx.add(layer, Binary(BinaryKind.MULTIPLY), [x, ctx.number(layer, factor, "factor")], "scaled")


def unary(kind: UnaryKind, alpha: float = 0.0) -> Function:
    """A function of one float."""
    return lambda ctx, layer, x: ctx.add(layer, Unary(kind, alpha), [x], kind.name.lower())


def clamp(low: float, high: float) -> Function:
    """The value limited."""
    return lambda ctx, layer, x: ctx.add(layer, Clamp(low, high), [x], "limited")


def _hard_sigmoid(ctx: KerasContext, layer: Layer, x: str) -> str:
    """Keras 3: relu6(x + 3) / 6; before: 0.2 * x + 0.5, limited to 0 and 1."""
    if layer.version >= 3:
        return ctx.add(layer, Unary(UnaryKind.HARD_SIGMOID), [x], "hard_sigmoid")
    raised = ctx.add(layer, Add(), [_scaled(ctx, layer, x, 0.2), ctx.number(layer, 0.5, "half")], "raised")
    return ctx.add(layer, Clamp(0.0, 1.0), [raised], "hard_sigmoid")


def _selu(ctx: KerasContext, layer: Layer, x: str) -> str:
    return _scaled(ctx, layer, ctx.add(layer, Unary(UnaryKind.ELU, SELU_ALPHA), [x], "elu"), SELU_SCALE)


def _gated(*kinds: UnaryKind) -> Function:
    """x times a function of it: one function after the other."""

    def build(ctx: KerasContext, layer: Layer, x: str) -> str:
        """silu: sigmoid; mish: softplus, tanh."""
        gate = x
        for kind in kinds:
            gate = ctx.add(layer, Unary(kind), [gate], "gate")
        return ctx.add(layer, Binary(BinaryKind.MULTIPLY), [x, gate], "gated")

    return build


def _log_sigmoid(ctx: KerasContext, layer: Layer, x: str) -> str:
    """-softplus(-x)."""
    for kind in (UnaryKind.NEGATIVE, UnaryKind.SOFTPLUS, UnaryKind.NEGATIVE):
        x = ctx.add(layer, Unary(kind), [x], "log_sigmoid")
    return x


def _tanh_shrink(ctx: KerasContext, layer: Layer, x: str) -> str:
    inner = ctx.add(layer, Unary(UnaryKind.TANH), [x], "tanh")
    return ctx.add(layer, Binary(BinaryKind.SUBTRACT), [x, inner], "shrunk")


def softmax(axis: int = -1, logarithm: bool = False) -> Function:
    """Softmax over one axis."""

    def build(ctx: KerasContext, layer: Layer, x: str) -> str:
        """The axis is moved to the end and back."""
        rank = len(ctx.shape(x))
        if not -rank <= axis < rank:
            raise layer.refuse(f"the axis {axis} is outside of {ctx.type_of(x)}", AGAIN)
        order = (*(place for place in range(rank) if place != axis % rank), axis % rank)
        moved = ctx.transposed(layer, x, order, "last")
        result = ctx.add(layer, LogSoftmax() if logarithm else Softmax(), [moved], "softmax")
        return ctx.transposed(layer, result, [order.index(place) for place in range(rank)], "restored")

    return build


ACTIVATIONS: Mapping[str, Function] = {
    "celu": unary(UnaryKind.ELU, 1.0),
    "elu": unary(UnaryKind.ELU, 1.0),
    "exponential": unary(UnaryKind.EXPONENTIAL),
    "gelu": unary(UnaryKind.GELU),
    "hard_sigmoid": _hard_sigmoid,
    "hard_silu": unary(UnaryKind.HARD_SWISH),
    "hard_swish": unary(UnaryKind.HARD_SWISH),
    "hard_tanh": clamp(-1.0, 1.0),
    "leaky_relu": unary(UnaryKind.LEAKY_RELU, 0.2),
    "linear": lambda ctx, layer, x: x,
    "log_sigmoid": _log_sigmoid,
    "log_softmax": softmax(logarithm=True),
    "mish": _gated(UnaryKind.SOFTPLUS, UnaryKind.TANH),
    "relu": clamp(0.0, inf),
    "relu6": clamp(0.0, 6.0),
    "selu": _selu,
    "sigmoid": unary(UnaryKind.SIGMOID),
    "silu": _gated(UnaryKind.SIGMOID),
    "softmax": softmax(),
    "softplus": unary(UnaryKind.SOFTPLUS),
    "softsign": unary(UnaryKind.SOFTSIGN),
    "swish": _gated(UnaryKind.SIGMOID),
    "tanh": unary(UnaryKind.TANH),
    "tanh_shrink": _tanh_shrink,
}
"""Functions a layer's `activation` may name."""


def activated(ctx: KerasContext, layer: Layer, x: str, key: str = "activation", default: str = "linear") -> str:
    """The layer's activation, as its setting `key` says it, of a value."""
    return activation(layer, layer.get(key, default))(ctx, layer, x)


def activation(layer: Layer, setting: Any) -> Function:
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
            inner = Layer(layer.file, str(name), layer.name, f"{layer.place}.activation", layer.version, config)
            build = ACTIVATION_LAYERS[str(name)]
            return lambda ctx, _layer, x: _checked(build(ctx, inner, x), inner)
        else:
            setting = config if name == "Activation" else name
            setting = setting.get("activation") if isinstance(setting, Mapping) else setting
    if not isinstance(setting, str) or setting not in ACTIVATIONS:
        raise layer.refuse(
            f"the activation {str(setting)[:80]} is not one of Keras's own that Dovetail knows; no code is executed",
            f"supported are {', '.join(ACTIVATIONS)}",
        )
    return ACTIVATIONS[setting]


def _checked(value: str, layer: Layer) -> str:
    layer.check_settings()
    return value


def _relu(ctx: KerasContext, layer: Layer, x: str) -> str:
    """ReLU: the slope times x - threshold below the threshold, 0 without one; limited above."""
    high = layer.number("max_value", inf)
    slope = layer.number("negative_slope", layer.number("alpha", 0.0))
    threshold = layer.number("threshold", layer.number("theta", 0.0))
    return relu(ctx, layer, x, slope, high, threshold)


def relu(ctx: KerasContext, layer: Layer, x: str, slope: float, high: float, threshold: float) -> str:
    """keras.activations.relu in its general form."""
    if threshold == 0.0 and slope == 0.0:
        return ctx.add(layer, Clamp(0.0, max(high, 0.0)), [x], "limited")
    if threshold == 0.0:
        bent = ctx.add(layer, Unary(UnaryKind.LEAKY_RELU, slope), [x], "bent")
        return bent if high == inf else ctx.add(layer, Clamp(-inf, high), [bent], "limited")
    if slope == 0.0 and threshold > 0.0:
        kept = ctx.add(layer, Unary(UnaryKind.THRESHOLDED_RELU, threshold), [x], "kept")
        return kept if high == inf else ctx.add(layer, Clamp(-inf, high), [kept], "limited")
    raise layer.refuse(f"a threshold of {threshold} with a slope of {slope} is not supported")


def _leaky_relu(ctx: KerasContext, layer: Layer, x: str) -> str:
    slope = layer.number("negative_slope", layer.number("alpha", 0.3))
    return ctx.add(layer, Unary(UnaryKind.LEAKY_RELU, slope), [x], "bent")


def _elu(ctx: KerasContext, layer: Layer, x: str) -> str:
    return ctx.add(layer, Unary(UnaryKind.ELU, layer.number("alpha", 1.0)), [x], "elu")


def _thresholded(ctx: KerasContext, layer: Layer, x: str) -> str:
    return ctx.add(layer, Unary(UnaryKind.THRESHOLDED_RELU, layer.number("theta", 1.0)), [x], "kept")


def _softmax(ctx: KerasContext, layer: Layer, x: str) -> str:
    return softmax_over(ctx, layer, x, layer.axes("axis", len(ctx.shape(x)), -1))


def softmax_over(ctx: KerasContext, layer: Layer, x: str, axes: tuple[int, ...]) -> str:
    """Softmax over several axes together: they are moved to the end and made one."""
    shape = ctx.shape(x)
    if len(axes) == 1:
        return softmax(axes[0])(ctx, layer, x)
    order = (*(place for place in range(len(shape)) if place not in axes), *axes)
    moved = ctx.transposed(layer, x, order, "last")
    kept = tuple(shape[place] for place in order[: len(shape) - len(axes)])
    count = int(np.prod([shape[place] for place in axes]))
    rows = ctx.add(layer, Softmax(), [ctx.reshaped(layer, moved, (*kept, count), "rows")], "softmax")
    whole = ctx.reshaped(layer, rows, ctx.shape(moved), "whole")
    return ctx.transposed(layer, whole, [order.index(place) for place in range(len(shape))], "restored")


def _prelu(ctx: KerasContext, layer: Layer, x: str) -> str:
    """PReLU: a slope for each element, or for each along the axes that are not shared."""
    shape = ctx.shape(x)
    shared = layer.axes("shared_axes", len(shape), None) if layer.get("shared_axes") else ()
    sizes = [1 if axis in shared else shape[axis] for axis in range(1, len(shape))]
    slopes = ctx.weight(layer, "alpha", sizes)
    return ctx.add(layer, Binary(BinaryKind.PRELU), [x, ctx.constant(layer, "alpha", slopes)], "bent")


ACTIVATION_LAYERS: Mapping[str, Function] = {
    "Activation": lambda ctx, layer, x: activated(ctx, layer, x),
    "ELU": _elu,
    "LeakyReLU": _leaky_relu,
    "PReLU": _prelu,
    "ReLU": _relu,
    "Softmax": _softmax,
    "ThresholdedReLU": _thresholded,
}
"""Layers that are an activation."""


def importer(function: Function) -> Importer:
    """The importer of a layer that is a function of one float value."""

    def build(ctx: KerasContext, layer: Layer, call: Call) -> str:
        """The function of the value the layer is called with."""
        return function(ctx, layer, ctx.one(layer, call))

    return build
