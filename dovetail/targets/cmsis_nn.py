"""A Cortex-M that calls CMSIS-NN, Arm's library of int8 kernels. The library is the user's:

    TARGET = target(Path("CMSIS-NN"))        # or DOVETAIL_CMSIS_NN=CMSIS-NN and --target dovetail/targets/cmsis_nn.py

Facts from CMSIS-NN's public header (Include/arm_nnfunctions.h, Include/arm_nn_types.h) and TVM v0.14's rules for it
(python/tvm/relay/op/contrib/cmsisnn.py). Scratch is what the library's queries for cores with the DSP extension say,
which answer the same on any computer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.errors import TargetError
from dovetail.operators.activation import FixedSoftmax
from dovetail.operators.arithmetic import Add, Clip, Offset, Requantize
from dovetail.operators.elementwise import Binary, BinaryKind
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.operators.movement import Pad
from dovetail.operators.pooling import AveragePool2d, MaxPool2d
from dovetail.target import Constraint, CValue, Match, Offload, Struct, Target, apply, constant, maybe, operand
from dovetail.target.layers import NO_GROUPS
from dovetail.target.pattern import Pattern
from dovetail.targets.cortex_m import cortex_m
from dovetail.targets.vendor_limits import BATCH, FILL, INT8, ROUNDS, SINGLE, WEIGHTS, padding
from dovetail.targets.vendorlib import Argument, Library, Query, function, pointer, struct, with_library

VARIABLE = "DOVETAIL_CMSIS_NN"
"""Environment variable that holds the library's folder."""
_FOLDERS = ("BasicMath", "Convolution", "FullyConnected", "NNSupport", "Pooling", "Softmax")
_PARAMETERS = (constant("multiplier"), constant("shift"))
_X, _B, _Y = pointer("x"), pointer("bias", "const int32_t"), pointer("result", "int8_t")


def _tile(height: int, width: int) -> CValue:
    return Struct("cmsis_nn_tile", {"h": height, "w": width})


def _dims(shape: Callable[[Match], Sequence[int]]) -> Argument:
    """Dimensions of four axes; of two, n and c."""
    return struct("cmsis_nn_dims", lambda m: dict(zip("nhwc" if len(shape(m)) == 4 else "nc", shape(m), strict=True)))


_INPUT, _OUTPUT = _dims(lambda m: m.type("x").shape), _dims(lambda m: m.result.shape)
_FILTER, _BIAS = _dims(lambda m: m.type("weights").shape), _dims(lambda m: (1, m.result.shape[-1]))
_NO_SCRATCH = Struct("cmsis_nn_context", {"buf": 0, "size": 0})


def _operator(match: Match, name: str) -> Any:
    return match.nodes[name].operator


def _clip(match: Match) -> tuple[int, int]:
    return (_operator(match, "clip").low, _operator(match, "clip").high) if match.has("clip") else (-128, 127)


def _activation(match: Match) -> dict[str, CValue]:
    return {"activation": Struct("cmsis_nn_activation", dict(zip(("min", "max"), _clip(match), strict=True)))}


def _offsets(match: Match) -> dict[str, CValue]:
    zero_in, zero_out = _operator(match, "layer").input_zero_point, _operator(match, "requantize").output_zero_point
    return {"input_offset": -zero_in, "output_offset": zero_out, **_activation(match)}


def _window(match: Match) -> dict[str, CValue]:
    layer, (_, top, left, _) = _operator(match, "layer"), padding(match).before
    places = {"stride": _tile(*layer.stride), "padding": _tile(top, left), "dilation": _tile(*layer.dilation)}
    return {**_offsets(match), **places}


def _number(name: str) -> Callable[[Match], int]:
    """A parameter that is one for all channels."""
    return lambda match: int(match.array(name).reshape(-1)[0])


def _pooling(match: Match) -> dict[str, CValue]:
    (top, _), (left, _) = _operator(match, "pool").padding
    return {"stride": _tile(*_operator(match, "pool").stride), "padding": _tile(top, left), **_activation(match)}


_SIDES = Constraint("padding behind must be that before or one more",
                    lambda m: [b - a for a, b in zip(padding(m).before, padding(m).after)],  # noqa: B905
                    lambda more: set(more) <= {0, 1})  # fmt: skip
_SHIFTS = Constraint("shifts of an addition must be to the right",
                     lambda m: max(_number(name)(m) for name in ("shift", "a_shift", "b_shift")), lambda n: n <= 0)
_SAME = Constraint("both operands must have the result's shape", lambda m: [m.type(name).shape for name in "ab"],
                   lambda shapes: shapes[0] == shapes[1])  # fmt: skip
_RAISED = Constraint("operands of an addition must be raised by 20 bits",
                     lambda m: {_operator(m, name).left_shift for name in "ab"}, lambda bits: bits == {20})  # fmt: skip
_PRODUCT = Constraint("it must be a product", lambda m: _operator(m, "binary").kind, BinaryKind.MULTIPLY.__eq__)
_LINEAR = (INT8, BATCH, ROUNDS, WEIGHTS)


def _requantised(inner: Pattern) -> Pattern:
    return apply(Clip, apply(Requantize, inner, *_PARAMETERS))


def _convolutions(library: Library) -> tuple[Offload, ...]:
    padded = maybe(Pad, operand("x"), name="pad")
    scaling = {key: pointer(key, "int32_t") for key in ("multiplier", "shift")}
    each = {key: lambda m, key=key: np.broadcast_to(m.array(key), m.result.shape[-1:]) for key in scaling}
    found = []
    for name, kind, parameters, limits in (
        ("arm_convolve_wrapper_s8", Conv2d, struct("cmsis_nn_conv_params", _window), (NO_GROUPS,)),
        ("arm_depthwise_conv_wrapper_s8", DepthwiseConv2d,
         struct("cmsis_nn_dw_conv_params", lambda m: {"ch_mult": m.result.shape[3] // m.type("x").shape[3],
                                                       **_window(m)}), ()),
    ):  # fmt: skip
        query = Query(f"{name}_get_buffer_size_dsp", (parameters, _INPUT, _FILTER, _OUTPUT))
        sums = (_NO_SCRATCH,) if library.parameters(name) == 12 else ()  # later versions sum weights for MVE
        given = (_context(library, query), *sums, parameters, Struct("cmsis_nn_per_channel_quant_params", scaling),
                 _INPUT, _X, _FILTER, pointer("weights"), _BIAS, _B, _OUTPUT, _Y)  # fmt: skip
        pattern = _requantised(apply(kind, padded, constant("weights"), constant("bias"), name="layer"))
        constraints = (*_LINEAR, *limits, FILL, _SIDES)
        found.append(function(library, name, pattern, given, constraints=constraints, query=query, constants=each))
    return tuple(found)


def _context(library: Library, query: Query) -> Argument:
    return lambda m: Struct("cmsis_nn_context", {"buf": pointer("scratch", "void"), "size": size}) if (
        size := query.ask(library, m)) else _NO_SCRATCH


def _fully_connected(library: Library) -> Offload:
    scaling = struct("cmsis_nn_per_tensor_quant_params", lambda m: {k: _number(k)(m) for k in ("multiplier", "shift")})
    weights = _dims(lambda m: m.type("weights").shape[::-1])  # n is the depth, c the outputs
    parameters = struct("cmsis_nn_fc_params", lambda m: {"filter_offset": 0, **_offsets(m)})
    given = (_NO_SCRATCH, parameters, scaling, _INPUT, _X, weights, pointer("weights"),
             _BIAS, _B, _OUTPUT, _Y)  # fmt: skip
    pattern = _requantised(apply(FullyConnected, operand("x"), constant("weights"), constant("bias"), name="layer"))
    return function(library, "arm_fully_connected_s8", pattern, given, constraints=(*_LINEAR, SINGLE))


def _pools(library: Library) -> tuple[Offload, ...]:
    query = Query("arm_avgpool_s8_get_buffer_size_dsp", (lambda m: m.result.shape[2], lambda m: m.type("x").shape[3]))
    kernel = _dims(lambda m: (1, *_operator(m, "pool").kernel, 1))
    found = []
    for name, pattern, asked in (
        ("arm_avgpool_s8", apply(Clip, apply(AveragePool2d, operand("x"), name="pool")), query),
        ("arm_max_pool_s8", maybe(Clip, apply(MaxPool2d, operand("x"), name="pool")), None),
    ):
        context = _context(library, asked) if asked else _NO_SCRATCH
        given = (context, struct("cmsis_nn_pool_params", _pooling), _INPUT, _X, kernel, _OUTPUT, _Y)
        found.append(function(library, name, pattern, given, constraints=(INT8, BATCH), query=asked))
    return tuple(found)


def _elementwise(library: Library) -> tuple[Offload, ...]:
    operands, after = (pointer("a"), pointer("b")), (
        _Y, lambda m: _operator(m, "requantize").output_zero_point, _number("multiplier"), _number("shift"),
        lambda m: _clip(m)[0], lambda m: _clip(m)[1], lambda m: m.result.elements)  # fmt: skip
    sides = [apply(Requantize, operand(n), constant(f"{n}_multiplier"), constant(f"{n}_shift"), name=n) for n in "ab"]
    scaled = [(lambda m, n=n: -_operator(m, n).input_zero_point, _number(f"{n}_multiplier"),
               _number(f"{n}_shift")) for n in "ab"]  # fmt: skip
    add = function(library, "arm_elementwise_add_s8", _requantised(apply(Add, *sides)),
                   (*operands, *scaled[0], *scaled[1], 20, *after),
                   constraints=(INT8, ROUNDS, SINGLE, _SAME, _SHIFTS, _RAISED))  # fmt: skip
    offsets = [lambda m, n=n: _operator(m, n).offset for n in "ab"]
    product = apply(Binary, *(apply(Offset, operand(n), name=n) for n in "ab"))
    multiply = function(library, "arm_elementwise_mul_s8", _requantised(product), (*operands, *offsets, *after),
                        constraints=(_PRODUCT, INT8, ROUNDS, SINGLE, _SAME))  # fmt: skip
    return add, multiply


def _softmax(library: Library) -> Offload:
    def of(field: str) -> Argument:
        return lambda m: int(getattr(_operator(m, "fixedsoftmax"), field))

    given = (_X, lambda m: m.result.elements // m.result.shape[-1], lambda m: m.result.shape[-1], of("multiplier"),
             of("shift"), of("diff_min"), _Y)  # fmt: skip
    return function(library, "arm_softmax_s8", apply(FixedSoftmax, operand("x")), given, constraints=(INT8,))


def target(root: Path, number: int = 4) -> Target:
    """The Cortex-M of that number (4, 7 or 33) with the library in `root`; raises TargetError when it is not there."""
    folders = [root / "Source" / f"{name}Functions" for name in _FOLDERS]
    sources = tuple(path.relative_to(root).as_posix() for folder in folders for path in sorted(folder.glob("*.c")))
    library = Library("cmsis_nn", root, "arm_nnfunctions.h", sources, include="Include")
    functions = (*_convolutions(library), _fully_connected(library), *_pools(library), *_elementwise(library),
                 _softmax(library))  # fmt: skip
    return with_library(cortex_m(number), library, functions)


def __getattr__(name: str) -> Target:
    """`TARGET`: a Cortex-M4 with the library the environment names."""
    if name != "TARGET":
        raise AttributeError(name)
    if not os.environ.get(VARIABLE):
        raise TargetError("the library is not part of Dovetail", where="CMSIS-NN",
                          hint=f"set {VARIABLE} to the folder it is in")
    return target(Path(os.environ[VARIABLE]))
