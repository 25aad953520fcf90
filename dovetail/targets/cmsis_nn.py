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
from dovetail.graph.types import DType
from dovetail.operators.activation import FixedSoftmax
from dovetail.operators.arithmetic import Add, Clip, Offset, Requantize, Rounding
from dovetail.operators.elementwise import Binary, BinaryKind
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.operators.movement import Pad
from dovetail.operators.pooling import AveragePool2d, MaxPool2d
from dovetail.target import Constraint, CValue, Match, Offload, Struct, Target, apply, constant, maybe, operand
from dovetail.target.pattern import Pattern
from dovetail.targets.cortex_m import cortex_m
from dovetail.targets.vendorlib import Argument, Library, Query, function, pointer, struct, with_library

VARIABLE = "DOVETAIL_CMSIS_NN"
"""Environment variable that holds the library's folder."""
_FOLDERS = ("BasicMath", "Convolution", "FullyConnected", "NNSupport", "Pooling", "Softmax")
_PARAMETERS = (constant("multiplier"), constant("shift"))
_X, _Y = pointer("x"), pointer("result", "int8_t")


def _tile(height: int, width: int) -> CValue:
    return Struct("cmsis_nn_tile", {"h": height, "w": width})


def _dims(shape: Callable[[Match], Sequence[int]]) -> Argument:
    """Dimensions of four axes; of two, n and c."""
    return struct("cmsis_nn_dims", lambda m: dict(zip("nhwc" if len(shape(m)) == 4 else "nc", shape(m), strict=True)))


_INPUT, _OUTPUT = _dims(lambda m: m.type("x").shape), _dims(lambda m: m.result.shape)
_FILTER, _BIAS = _dims(lambda m: m.type("weights").shape), _dims(lambda m: (1, m.result.shape[-1]))
_NO_SCRATCH = Struct("cmsis_nn_context", {"buf": 0, "size": 0})


def _clip(match: Match) -> tuple[int, int]:
    return (match.operator("clip", Clip).low, match.operator("clip", Clip).high) if match.has("clip") else (-128, 127)


def _activation(match: Match) -> CValue:
    low, high = _clip(match)
    return Struct("cmsis_nn_activation", {"min": low, "max": high})


def _zero_out(match: Match) -> int:
    return match.operator("requantize", Requantize).output_zero_point


def _layer(match: Match) -> Any:
    return match.nodes["layer"].operator


def _pads(match: Match) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Elements before and after each axis, and their value."""
    pad = match.operator("pad", Pad) if match.has("pad") else Pad((0,) * 4, (0,) * 4, _layer(match).input_zero_point)
    return pad.before, pad.after, int(pad.value)


def _window(match: Match) -> dict[str, CValue]:
    """What parameters of convolutions and depthwise convolutions share."""
    layer, (_, top, left, _) = _layer(match), _pads(match)[0]
    offsets = {"input_offset": -layer.input_zero_point, "output_offset": _zero_out(match)}
    places = {"stride": _tile(*layer.stride), "padding": _tile(top, left), "dilation": _tile(*layer.dilation)}
    return {**offsets, **places, "activation": _activation(match)}


def _dense(match: Match) -> dict[str, CValue]:
    offsets = {"input_offset": -_layer(match).input_zero_point, "filter_offset": 0, "output_offset": _zero_out(match)}
    return {**offsets, "activation": _activation(match)}


def _number(match: Match, name: str) -> int:
    """A parameter that is one for all channels."""
    return int(match.array(name).reshape(-1)[0])


def _pool(match: Match) -> Any:
    return match.nodes["pool"].operator


def _pooling(match: Match) -> dict[str, CValue]:
    (top, _), (left, _) = _pool(match).padding
    return {"stride": _tile(*_pool(match).stride), "padding": _tile(top, left), "activation": _activation(match)}


def _limit(sentence: str, holds: Callable[[Match], bool]) -> Constraint:
    return Constraint(sentence, holds, bool)


_INT8 = Constraint("values must be int8", lambda m: [m.graph.types[v].dtype for v in (*m.graph.inputs, m.root)],
                   lambda kinds: set(kinds) == {DType.INT8})  # fmt: skip
_BATCH = Constraint("the batch must be 1", lambda m: m.result.shape[0], lambda batch: batch == 1)
_ROUNDS = _limit("requantisations must be rounded twice", lambda m: all(
    node.operator.rounding is Rounding.DOUBLE for node in m.nodes.values() if isinstance(node.operator, Requantize)))
_SINGLE = _limit("multiplier and shift must be one for all channels", lambda m: all(
    array.size == 1 for name, array in m.graph.constants.items()
    if any(name in node.inputs[1:] for node in m.nodes.values() if isinstance(node.operator, Requantize))))
_WEIGHTS = Constraint("weights must be int8, zero point 0",
                      lambda m: (m.type("weights").dtype, _layer(m).weight_zero_point),
                      lambda found: found == (DType.INT8, 0))  # fmt: skip
_GROUPS = Constraint("the groups must be 1", lambda m: m.type("x").shape[3] // m.type("weights").shape[3],
                     lambda groups: groups == 1)  # fmt: skip
_FILL = _limit("padding must be the zero point", lambda m: _pads(m)[2] == _layer(m).input_zero_point)
_SIDES = Constraint("padding behind must be that before or one more",
                    lambda m: [after - before for before, after in zip(*_pads(m)[:2], strict=True)],
                    lambda more: set(more) <= {0, 1})  # fmt: skip
_SHIFTS = _limit("shifts of an addition must be to the right",
                 lambda m: max(_number(m, name) for name in ("shift", "a_shift", "b_shift")) <= 0)
_SAME = Constraint("both operands must have the result's shape", lambda m: [m.type(name).shape for name in "ab"],
                   lambda shapes: shapes[0] == shapes[1])  # fmt: skip
_RAISED = _limit("operands of an addition must be raised by 20 bits",
                 lambda m: {m.operator(name, Requantize).left_shift for name in "ab"} == {20})
_PRODUCT = Constraint("it must be a product", lambda m: m.operator("binary", Binary).kind,
                      lambda kind: kind is BinaryKind.MULTIPLY)  # fmt: skip
_LINEAR = (_INT8, _BATCH, _ROUNDS, _WEIGHTS)


def _requantised(inner: Pattern) -> Pattern:
    return apply(Clip, apply(Requantize, inner, *_PARAMETERS))


def _convolutions(library: Library) -> tuple[Offload, ...]:
    padded = maybe(Pad, operand("x"), name="pad")
    scaling = {key: pointer(key, "int32_t") for key in ("multiplier", "shift")}
    each = {key: lambda m, key=key: np.broadcast_to(m.array(key), m.result.shape[-1:]) for key in scaling}
    found = []
    for name, kind, parameters, limits in (
        ("arm_convolve_wrapper_s8", Conv2d, struct("cmsis_nn_conv_params", _window), (_GROUPS,)),
        ("arm_depthwise_conv_wrapper_s8", DepthwiseConv2d,
         struct("cmsis_nn_dw_conv_params", lambda m: {**_window(m), "ch_mult": m.result.shape[3] // m.type("x").shape[3]}), ()),
    ):  # fmt: skip
        query = Query(f"{name}_get_buffer_size_dsp", (parameters, _INPUT, _FILTER, _OUTPUT))
        sums = (_NO_SCRATCH,) if library.parameters(name) == 12 else ()  # later versions sum weights for MVE
        given = (_context(library, query), *sums, parameters, Struct("cmsis_nn_per_channel_quant_params", scaling),
                 _INPUT, _X, _FILTER, pointer("weights"), _BIAS, pointer("bias", "const int32_t"), _OUTPUT, _Y)  # fmt: skip
        pattern = _requantised(apply(kind, padded, constant("weights"), constant("bias"), name="layer"))
        found.append(function(library, name, pattern, given, constraints=(*_LINEAR, *limits, _FILL, _SIDES), query=query,
                              constants=each))  # fmt: skip
    return tuple(found)


def _context(library: Library, query: Query) -> Argument:
    return lambda m: Struct("cmsis_nn_context", {"buf": pointer("scratch", "void"), "size": size}) if (
        size := query.ask(library, m)) else _NO_SCRATCH


def _fully_connected(library: Library) -> Offload:
    scaling = struct("cmsis_nn_per_tensor_quant_params", lambda m: {k: _number(m, k) for k in ("multiplier", "shift")})
    weights = _dims(lambda m: m.type("weights").shape[::-1])  # n is the depth, c the outputs
    given = (_NO_SCRATCH, struct("cmsis_nn_fc_params", _dense), scaling, _INPUT, _X, weights, pointer("weights"),
             _BIAS, pointer("bias", "const int32_t"), _OUTPUT, _Y)  # fmt: skip
    pattern = _requantised(apply(FullyConnected, operand("x"), constant("weights"), constant("bias"), name="layer"))
    return function(library, "arm_fully_connected_s8", pattern, given, constraints=(*_LINEAR, _SINGLE))


def _pools(library: Library) -> tuple[Offload, ...]:
    query = Query("arm_avgpool_s8_get_buffer_size_dsp", (lambda m: m.result.shape[2], lambda m: m.type("x").shape[3]))
    kernel = _dims(lambda m: (1, *_pool(m).kernel, 1))
    found = []
    for name, pattern, asked in (
        ("arm_avgpool_s8", apply(Clip, apply(AveragePool2d, operand("x"), name="pool")), query),
        ("arm_max_pool_s8", maybe(Clip, apply(MaxPool2d, operand("x"), name="pool")), None),
    ):
        context = _context(library, asked) if asked else _NO_SCRATCH
        given = (context, struct("cmsis_nn_pool_params", _pooling), _INPUT, _X, kernel, _OUTPUT, _Y)
        found.append(function(library, name, pattern, given, constraints=(_INT8, _BATCH), query=asked))
    return tuple(found)


def _number_of(name: str) -> Argument:
    return lambda m: _number(m, name)


def _elementwise(library: Library) -> tuple[Offload, ...]:
    operands, after = (pointer("a"), pointer("b")), (
        _Y, _zero_out, _number_of("multiplier"), _number_of("shift"), lambda m: _clip(m)[0], lambda m: _clip(m)[1],
        lambda m: m.result.elements)  # fmt: skip
    sides = [apply(Requantize, operand(n), constant(f"{n}_multiplier"), constant(f"{n}_shift"), name=n) for n in "ab"]
    scaled = [(lambda m, n=n: -m.operator(n, Requantize).input_zero_point, _number_of(f"{n}_multiplier"),
               _number_of(f"{n}_shift")) for n in "ab"]  # fmt: skip
    add = function(library, "arm_elementwise_add_s8", _requantised(apply(Add, *sides)),
                   (*operands, *scaled[0], *scaled[1], 20, *after),
                   constraints=(_INT8, _ROUNDS, _SINGLE, _SAME, _SHIFTS, _RAISED))  # fmt: skip
    offsets = [lambda m, n=n: m.operator(n, Offset).offset for n in "ab"]
    product = apply(Binary, *(apply(Offset, operand(n), name=n) for n in "ab"))
    multiply = function(library, "arm_elementwise_mul_s8", _requantised(product), (*operands, *offsets, *after),
                        constraints=(_PRODUCT, _INT8, _ROUNDS, _SINGLE, _SAME))  # fmt: skip
    return add, multiply


def _softmax(library: Library) -> Offload:
    def of(field: str) -> Argument:
        return lambda m: int(getattr(m.operator("fixedsoftmax", FixedSoftmax), field))

    given = (_X, lambda m: m.result.elements // m.result.shape[-1], lambda m: m.result.shape[-1], of("multiplier"),
             of("shift"), of("diff_min"), _Y)  # fmt: skip
    return function(library, "arm_softmax_s8", apply(FixedSoftmax, operand("x")), given, constraints=(_INT8,))


def target(root: Path, number: int = 4) -> Target:
    """The Cortex-M of that number (4, 7 or 33) with the library in a folder; raises TargetError when it is not there."""
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
        raise TargetError("CMSIS-NN is not part of Dovetail", hint=f"set {VARIABLE} to the folder it is in")
    return target(Path(os.environ[VARIABLE]))
