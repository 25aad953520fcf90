"""A Cortex-M that calls CMSIS-NN, Arm's library of int8 kernels. The library is the user's:

    TARGET = target(Path("CMSIS-NN"))        # or DOVETAIL_CMSIS_NN=CMSIS-NN and --target dovetail/targets/cmsis_nn.py

Facts from CMSIS-NN's public header (Include/arm_nnfunctions.h, Include/arm_nn_types.h) and TVM v0.14's rules for it
(python/tvm/relay/op/contrib/cmsisnn.py). Scratch is what its queries for the DSP extension say, on any computer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import dovetail.target as dt
from dovetail.errors import TargetError
from dovetail.ir.operators.activation import FixedSoftmax
from dovetail.ir.operators.arithmetic import Clip, Offset, Requantize
from dovetail.ir.operators.elementwise import Binary, BinaryKind
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.reduction import AveragePool2d, MaxPool2d
from dovetail.target import layers
from dovetail.targets import vendorlib
from dovetail.targets.cortex_m import cortex_m
from dovetail.targets.vendorlib import Argument, Library, Query, defining, function, pointer, struct

VARIABLE = "DOVETAIL_CMSIS_NN"
"""Environment variable that holds the library's folder."""
_TAKES = {"convolve_wrapper": (2.0, 52, 18), "depthwise_conv_wrapper": (10.7, 0, 0), "fully_connected": (3.2, 60, 0),
          "avgpool": (0, 0, 8), "max_pool": (0, 0, 8), "elementwise_add": (0, 100, 0), "elementwise_mul": (0, 40, 0),
          "softmax": (0, 300, 0)}  # fmt: skip
"""Cycles of a product, of an element of the result, of one a window brings: 7.0.0 on `iss`, most within a fifth."""
_CALLED = [f"arm_{name}_s8{end}" for name in _TAKES for end in ("", "_get_buffer_size_dsp")]
_X, _B, _Y = pointer("x"), pointer("bias", "const int32_t"), pointer("result", "int8_t")


def _scratch(size: int) -> dt.CValue:
    return dt.Struct("cmsis_nn_context", {"buf": pointer("scratch", "void") if size else 0, "size": size})


def _context(library: Library, query: Query) -> Argument:
    return lambda m: _scratch(query.ask(library, m))


def _tile(height: int, width: int) -> dt.CValue:
    return dt.Struct("cmsis_nn_tile", {"h": height, "w": width})


def _dims(shape: Callable[[dt.Match], Sequence[int]]) -> Argument:
    """Dimensions of four axes; of two, n and c."""
    return struct("cmsis_nn_dims", lambda m: dict(zip("nhwc" if len(shape(m)) == 4 else "nc", shape(m), strict=True)))


_INPUT, _OUTPUT = _dims(lambda m: m.type("x").shape), _dims(lambda m: m.result.shape)
_FILTER, _BIAS = _dims(lambda m: m.type("weights").shape), _dims(lambda m: (1, m.result.shape[-1]))


def _operator(match: dt.Match, name: str) -> Any:
    return match.nodes[name].operator


def _clip(match: dt.Match) -> tuple[int, int]:
    return (_operator(match, "clip").low, _operator(match, "clip").high) if match.has("clip") else (-128, 127)


def _activation(match: dt.Match) -> dict[str, dt.CValue]:
    return {"activation": dt.Struct("cmsis_nn_activation", dict(zip(("min", "max"), _clip(match), strict=True)))}


def _offsets(match: dt.Match) -> dict[str, dt.CValue]:
    zero_in, zero_out = _operator(match, "layer").input_zero_point, _operator(match, "requantize").output_zero_point
    return {"input_offset": -zero_in, "output_offset": zero_out, **_activation(match)}


def _window(match: dt.Match) -> dict[str, dt.CValue]:
    window = layers.window_of(match)
    places = {"stride": window.stride, "padding": window.before, "dilation": window.dilation}
    return {**_offsets(match), **{name: _tile(*pair) for name, pair in places.items()}}


def _field(name: str, field: str, sign: int = 1) -> Argument:
    """A number of an operator, or its negative."""
    return lambda match: sign * int(getattr(_operator(match, name), field))


def _number(name: str) -> Callable[[dt.Match], int]:
    """A parameter that is one for all channels."""
    return lambda match: int(match.array(name).reshape(-1)[0])


def _pooling(match: dt.Match) -> dict[str, dt.CValue]:
    (top, _), (left, _) = _operator(match, "pool").padding
    return {"stride": _tile(*_operator(match, "pool").stride), "padding": _tile(top, left), **_activation(match)}


_SIDES = dt.Constraint("padding behind must be that before or one more",
                       lambda m: [b - a for a, b in zip(layers.padding_of(m).before, layers.padding_of(m).after)],  # noqa: B905
                       lambda more: set(more) <= {0, 1})  # fmt: skip
_SHIFTS = dt.Constraint("shifts of an addition must be to the right",
                        lambda m: max(_number(name)(m) for name in ("shift", "x_shift", "other_shift")),
                        lambda n: n <= 0)  # fmt: skip
_PRODUCT = dt.Constraint("it must be a product", lambda m: _operator(m, "binary").kind, BinaryKind.MULTIPLY.__eq__)
_LINEAR = (layers.ALL_INT8, layers.BATCH, layers.ALL_DOUBLE_ROUNDING, layers.INT8_WEIGHTS)


def _convolutions(library: Library) -> tuple[dt.Offload, ...]:
    scaling = {key: pointer(key, "int32_t") for key in ("multiplier", "shift")}
    each = {key: lambda m, key=key: np.broadcast_to(m.array(key), m.result.shape[-1:]) for key in scaling}
    found = []
    full = struct("cmsis_nn_conv_params", _window)
    depthwise = struct("cmsis_nn_dw_conv_params", lambda m: {"ch_mult": layers.NO_MULTIPLIER.measure(m), **_window(m)})
    for name, kind, parameters, limits in (
        ("arm_convolve_wrapper_s8", Conv2d, full, (layers.NO_GROUPS,)),
        ("arm_depthwise_conv_wrapper_s8", DepthwiseConv2d, depthwise, ()),
    ):
        query = Query(f"{name}_get_buffer_size_dsp", (parameters, _INPUT, _FILTER, _OUTPUT))
        sums = (_scratch(0),) if library.parameters(name) == 12 else ()  # later versions sum weights for MVE
        scaled = dt.Struct("cmsis_nn_per_channel_quant_params", scaling)
        data = (_INPUT, _X, _FILTER, pointer("weights"), _BIAS, _B, _OUTPUT, _Y)
        given = (_context(library, query), *sums, parameters, scaled, *data)
        pattern = layers.requantised(name, kind)[name]
        constraints = (*_LINEAR, *limits, layers.PADDING_OF_ZERO_POINT, _SIDES)
        found.append(function(library, name, pattern, given, constraints=constraints, query=query, constants=each))
    return tuple(found)


def _fully_connected(library: Library) -> dt.Offload:
    scaling = struct("cmsis_nn_per_tensor_quant_params", lambda m: {k: _number(k)(m) for k in ("multiplier", "shift")})
    weights = _dims(lambda m: m.type("weights").shape[::-1])  # n is the depth, c the outputs
    parameters = struct("cmsis_nn_fc_params", lambda m: {"filter_offset": 0, **_offsets(m)})
    given = (_scratch(0), parameters, scaling, _INPUT, _X, weights, pointer("weights"), _BIAS, _B, _OUTPUT, _Y)
    pattern = layers.requantised("dense", FullyConnected)["dense"]
    return function(library, "arm_fully_connected_s8", pattern, given, constraints=(*_LINEAR, layers.ONE_SCALE))


def _pools(library: Library) -> tuple[dt.Offload, ...]:
    query = Query("arm_avgpool_s8_get_buffer_size_dsp", (lambda m: m.result.shape[2], lambda m: m.type("x").shape[3]))
    kernel = _dims(lambda m: (1, *_operator(m, "pool").kernel, 1))
    found = []
    for name, pattern, asked in (
        ("arm_avgpool_s8", dt.apply(Clip, dt.apply(AveragePool2d, dt.operand("x"), name="pool")), query),
        ("arm_max_pool_s8", dt.maybe(Clip, dt.apply(MaxPool2d, dt.operand("x"), name="pool")), None),
    ):
        context = _context(library, asked) if asked else _scratch(0)
        given = (context, struct("cmsis_nn_pool_params", _pooling), _INPUT, _X, kernel, _OUTPUT, _Y)
        found.append(function(library, name, pattern, given, constraints=(layers.ALL_INT8, layers.BATCH), query=asked))
    return tuple(found)


def _elementwise(library: Library) -> tuple[dt.Offload, ...]:
    scale = (_field("requantize", "output_zero_point"), _number("multiplier"), _number("shift"))
    after = (_Y, *scale, lambda m: _clip(m)[0], lambda m: _clip(m)[1], lambda m: m.result.elements)
    names = ("x", "other")
    operands, scaled, offsets = [pointer(n) for n in names], list[Argument](), [_field(n, "offset") for n in names]
    for n in names:
        scaled += [_field(n, "input_zero_point", -1), _number(f"{n}_multiplier"), _number(f"{n}_shift")]
    limits = (layers.ALL_INT8, layers.ALL_DOUBLE_ROUNDING, layers.ONE_SCALE, layers.SAME_SHAPES)
    product: dt.Pattern = dt.apply(Binary, *(dt.apply(Offset, dt.operand(n), name=n) for n in names))
    product = dt.apply(Clip, dt.apply(Requantize, product, dt.constant("multiplier"), dt.constant("shift")))
    found = []
    for name, pattern, given, constraints in (
        ("add", layers.ADDITION, (*scaled, layers.RAISED_BITS), (*layers.ADDITION_LIMITS, _SHIFTS)),
        ("mul", product, offsets, (_PRODUCT, *limits)),
    ):
        given = (*operands, *given, *after)
        found.append(function(library, f"arm_elementwise_{name}_s8", pattern, given, constraints=constraints))
    return tuple(found)


def _softmax(library: Library) -> dt.Offload:
    rows, depth = (lambda m: m.result.elements // m.result.shape[-1]), (lambda m: m.result.shape[-1])
    given = (_X, rows, depth, *(_field("fixedsoftmax", each) for each in ("multiplier", "shift", "diff_min")), _Y)
    pattern = dt.apply(FixedSoftmax, dt.operand("x"))
    return function(library, "arm_softmax_s8", pattern, given, constraints=(layers.ALL_INT8,))


def target(root: Path, number: int = 4, prefer: bool = False) -> dt.Target:
    """The Cortex-M of that number (4, 7 or 33) with the library in `root`, used where it is faster than Dovetail's own
    kernels, or wherever it fits if preferred; raises TargetError when it is not there."""
    sources = defining(root, "Source", _CALLED)
    library = Library("cmsis_nn", root, "arm_nnfunctions.h", sources, include="Include")
    linear = (*_convolutions(library), _fully_connected(library))
    rates = {f"arm_{name}_s8": vendorlib.measured(*takes) for name, takes in _TAKES.items()}
    found = (*linear, *_pools(library), *_elementwise(library), _softmax(library))
    offloads = [replace(offload, cycles=rates[offload.name], prefer=prefer) for offload in found]
    return vendorlib.with_library(cortex_m(number), library, offloads, rounding=dt.Rounding.DOUBLE)


def __getattr__(name: str) -> dt.Target:
    """`TARGET`: a Cortex-M4 with the library the environment names."""
    if name != "TARGET":
        raise AttributeError(name)
    if not os.environ.get(VARIABLE):
        hint = f"set {VARIABLE} to the folder it is in"
        raise TargetError("the library is not part of Dovetail", where="CMSIS-NN", hint=hint)
    return target(Path(os.environ[VARIABLE]))
