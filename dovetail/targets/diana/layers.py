"""What DIANA's engines can be asked: patterns, published limits, constants, jobs and cycles.

Patterns and limits after KULeuven-MICAS/htvm python/tvm/relay/op/contrib/soma_dory.py and the tilers of
pulp-platform/dory Hardware_targets/Diana. Activations lie as (channel, row, column), columns padded to 16, the bytes of
each 32-bit word swapped (htvm python/tvm/relay/backend/contrib/soma_dory/layout_transform.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import ceil, prod
from typing import Any

import numpy as np

from dovetail.graph.layout import from_notation
from dovetail.graph.types import Array, Shape
from dovetail.operators.arithmetic import Add, Clip, Offset, ScaleShift
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.operators.movement import Pad
from dovetail.target import (
    Command,
    Constraint,
    Match,
    Offload,
    Operand,
    Scope,
    apply,
    constant,
    maybe,
    operand,
)
from dovetail.target.layers import NO_GROUPS, NO_MULTIPLIER
from dovetail.target.pattern import Pattern
from dovetail.targets.diana import costs, packing
from dovetail.targets.diana.registers import Job, Layer, Operation, Padding, task_words

IMAGE = from_notation("N C H W/16 4w/4 -4w")
VECTOR = from_notation("N C/16 4c/4 -4c")
KERNELS = (1, 3, 5, 7)
"""Rows and columns of windows."""
CODES = (-32, 31)
"""Least and greatest result of the analog converter."""
SEVEN_BITS = (-64, 63)
"""Least and greatest activation of the analog array."""
NOWHERE = Operand(0, (0,) * 6)


def is_dense(match: Match) -> bool:
    """True for a fully connected layer."""
    return match.has("layer") and isinstance(match.nodes["layer"].operator, FullyConnected)


def operation(match: Match) -> Operation:
    """What the job of a tile computes."""
    if not match.has("layer"):
        return Operation.SUM
    kinds = {Conv2d: Operation.CONVOLUTION, DepthwiseConv2d: Operation.DEPTHWISE, FullyConnected: Operation.DENSE}
    return kinds[type(match.nodes["layer"].operator)]


def _convolution(match: Match) -> Conv2d | DepthwiseConv2d | None:
    operator = match.nodes["layer"].operator if match.has("layer") else None
    return operator if isinstance(operator, Conv2d | DepthwiseConv2d) else None


def _pad(match: Match) -> Pad | None:
    return match.operator("pad", Pad) if match.has("pad") else None


def _padding(match: Match) -> Padding:
    pad = _pad(match)
    return Padding(pad.before[1], pad.after[1], pad.before[2], pad.after[2]) if pad else Padding()


def _window(match: Match) -> tuple[int, int]:
    """Rows and columns of the window."""
    height, width = match.type("weights").shape[1:3] if _convolution(match) else (1, 1)
    return height, width


def _last(match: Match, name: str) -> int:
    """A parameter of which the limits say that it is the same for all channels."""
    return int(match.array(name).flat[-1])


def shape(match: Match) -> costs.Shape:
    """A tile as the cost models take it."""
    inputs, outputs = match.type("x").shape[-1], match.result.shape[-1]
    rows, columns = match.result.shape[1:3] if not is_dense(match) else (1, 1)
    groups = inputs if operation(match) is Operation.DEPTHWISE else 1
    return costs.Shape(inputs, outputs, rows, columns, _window(match), groups)


def _image(shape: Shape) -> Shape:
    """Rows, columns, channels of an image or of a vector."""
    return shape[1:] if len(shape) == 4 else (1, 1, shape[-1])


def _apart(place: Operand, dense: bool) -> tuple[int, int]:
    """Bytes between rows, and between channels; of a vector none."""
    return (0, 0) if dense else (place.strides[2], place.strides[1])


def layer(match: Match, operands: Mapping[str, Operand], padding: int) -> Layer:
    """The fields of a tile. Distances of operands that are not given are 0."""
    dense, convolution = is_dense(match), _convolution(match)
    (rows, columns, inputs), (height, width, outputs) = _image(match.type("x").shape), _image(match.result.shape)
    window, clip = _window(match), match.operator("clip", Clip)
    places = [operands.get(match.values[name], NOWHERE) if name in match.values else NOWHERE for name in ("x", "other")]
    apart = [_apart(place, dense) for place in (*places, operands.get("result", NOWHERE))]
    return Layer(
        operation=operation(match),
        c=inputs,
        k=outputs,
        cx=columns,
        cy=rows,
        fx=window[1],
        fy=window[0],
        ox=width,
        oy=height,
        activation_function=int(clip.low == 0),
        output_shift=_last(match, "shift"),
        dilation=1,
        stride=convolution.stride[0] - 1 if convolution else 0,
        ox_unroll=costs.unroll(shape(match)) if match.has("converter") else 0,
        padding=padding,
        gain=_last(match, "gain") if match.has("converter") else 0,
        in_row=apart[0][0],
        in_plane=apart[0][1],
        second_row=apart[1][0],
        second_plane=apart[1][1],
        out_row=apart[2][0],
        out_plane=apart[2][1],
    )


def _bytes(shape: Shape) -> int:
    """Bytes of an activation: rows of whole blocks of 16."""
    rows, columns, channels = _image(shape)
    if len(shape) == 2:
        return -(-channels // 16) * 16
    return channels * rows * -(-columns // 16) * 16


def _commands(function: str, more: str, field: Callable[[Padding], int]) -> Callable[..., tuple[Command, ...]]:
    def commands(match: Match, operands: Mapping[str, Operand]) -> tuple[Command, ...]:
        """The one job of a tile."""
        weights = operands.get("weights", NOWHERE)
        second = operands.get(match.values.get(more, more), NOWHERE)
        job = Job(
            weights.address,
            _packed_bytes(match) if match.has("layer") else 0,
            second.address,
            operands[match.values["x"]].address,
            _bytes(match.type("x").shape),
            operands["result"].address,
            _bytes(match.result.shape),
            layer(match, operands, field(_padding(match))),
        )
        return (Command(function, task_words(job)),)

    return commands


def _packed_bytes(match: Match) -> int:
    return int((pack_ternary if match.has("converter") else pack_digital)(match)["weights"].nbytes)


def pack_digital(match: Match) -> dict[str, Array]:
    """Weights with their biases; a sum has none."""
    if not match.has("layer"):
        return {}
    weights = match.array("weights").astype(np.int8)
    bias = np.broadcast_to(match.array("offset"), match.result.shape[-1]).astype(np.int32)
    packers = {Operation.CONVOLUTION: packing.pack_convolution, Operation.DEPTHWISE: packing.pack_depthwise,
               Operation.DENSE: packing.pack_dense}  # fmt: skip
    return {"weights": packers[operation(match)](weights, bias)}


def pack_ternary(match: Match) -> dict[str, Array]:
    """The array's cells, and scales and offsets behind the converter."""
    channels = match.result.shape[-1]
    return {
        "weights": packing.pack_ternary(match.array("weights").astype(np.int8).reshape(channels, *_window(match), -1)),
        "scales": packing.pack_scales(match.array("scale"), match.array("offset"), channels),
    }


def digital_cycles(model: str) -> Callable[[Match], int]:
    """Engine cycles of a tile by one of `costs.DIGITAL`."""

    def cycles(match: Match) -> int:
        """Engine cycles of a tile."""
        if not match.has("layer"):
            return ceil(costs.sum_cycles(match.result.elements))
        of_depthwise = operation(match) is Operation.DEPTHWISE
        return ceil((costs.plinio_digital if of_depthwise else costs.DIGITAL[model])(shape(match)))

    return cycles


def analog_cycles(match: Match) -> int:
    """Engine cycles of a tile."""
    return ceil(costs.plinio_analog(shape(match)))


def _elements(match: Match) -> list[int]:
    values = [name for name in ("x", "other") if name in match.values]
    return [*(match.type(name).elements for name in values), match.result.elements]


def _rounded(match: Match) -> Any:
    """Scale and shift where they are the same for all channels; else None."""
    found = [np.unique(match.array(name)) for name in ("scale", "shift")]
    return tuple(int(array[0]) for array in found) if all(array.size == 1 for array in found) else None


def _border(match: Match) -> Any:
    pad = _pad(match)
    before, after = (pad.before[1:3], pad.after[1:3]) if pad else ((0, 0), (0, 0))
    return [(size - 2 * lead, size - 2 * last) for size, lead, last in zip(_window(match), before, after, strict=True)]


def _wide(match: Match) -> int:
    """The largest absolute value behind the converter."""
    scale, offset = (np.abs(match.array(name).astype(np.int64)).max() for name in ("scale", "offset"))
    return int(scale * -CODES[0] + offset)


def _clip(match: Match, name: str) -> tuple[int, int]:
    clip = match.operator(name, Clip)
    return clip.low, clip.high


INT8 = (
    Constraint("activations must be int8", lambda m: (m.type("x").dtype.text, m.result.dtype.text),
               lambda v: v == ("int8", "int8")),
    Constraint("the batch must be 1", lambda m: m.result.shape[0], lambda v: v == 1),
    Constraint("results must be limited to -128..127 or 0..127 only", lambda m: _clip(m, "clip"),
               lambda v: v in ((-128, 127), (0, 127))),
    Constraint("the number of elements of operands and result must be a multiple of 4", _elements,
               lambda v: not any(count % 4 for count in v), Scope.LAYERS),
)  # fmt: skip
SHIFT = (
    Constraint("requantisation must be one right shift by 0 to 31 for the whole layer (scale, shift)", _rounded,
               lambda v: v is not None and v[0] == 1 and 0 <= v[1] <= 31),
)  # fmt: skip
WEIGHTS = (
    Constraint("weights must have at most 8 bits, signed", lambda m: m.type("weights").dtype.text,
               lambda v: v in ("int2", "int4", "int8")),
    Constraint("weights must be symmetric (zero point 0)",
               lambda m: getattr(m.nodes["layer"].operator, "weight_zero_point", 0), lambda v: v == 0),
    Constraint("activations must be symmetric (zero point 0)",
               lambda m: getattr(m.nodes["layer"].operator, "input_zero_point", 0), lambda v: v == 0),
)  # fmt: skip
WINDOW = (
    Constraint("rows and columns of the kernel must be 1, 3, 5 or 7", _window, lambda v: set(v) <= set(KERNELS)),
    Constraint("the padding must be half a kernel on every side (kernel - 2 * padding = 1)", _border,
               lambda v: all(pair == (1, 1) for pair in v), Scope.LAYERS),
    Constraint("the padding must be zeros", lambda m: getattr(_pad(m), "value", 0), lambda v: v == 0),
    Constraint("the stride must be 1x1 or 2x2", lambda m: getattr(_convolution(m), "stride", None),
               lambda v: v in ((1, 1), (2, 2))),
    Constraint("the dilation must be 1x1", lambda m: getattr(_convolution(m), "dilation", None),
               lambda v: v == (1, 1)),
)  # fmt: skip
FULL = (NO_GROUPS,)
DEPTHWISE = (NO_MULTIPLIER,)
ONE_ROW = (
    Constraint("a dense layer must have one row of operands", lambda m: m.type("x").shape[:-1], lambda v: v == (1,)),
)  # fmt: skip
DENSE = (
    *ONE_ROW,
    Constraint("a job computes at most 16 results of a dense layer", lambda m: m.result.shape[-1], lambda v: v <= 16,
               Scope.TILES),
)  # fmt: skip
SUM = (
    Constraint("both operands of a sum must be images of one type",
               lambda m: (str(m.type("x")), str(m.type("other")), len(m.result.shape)),
               lambda v: v[0] == v[1] and v[2] == 4),
    Constraint("operands of a sum must be added as they are", lambda m: [m.operator(n, Offset).offset
               for n in ("wide", "wider")], lambda v: v == [0, 0]),
    Constraint("a sum has no bias, so it is rounded down", lambda m: np.unique(m.array("offset")).tolist(),
               lambda v: v == [0]),
)  # fmt: skip
TERNARY = (
    Constraint("weights must be -1, 0 or 1",
               lambda m: (int(m.array("weights").min()), int(m.array("weights").max())),
               lambda v: v[0] >= -1 and v[1] <= 1),
    Constraint("operands must be limited to 7 bits", lambda m: _clip(m, "operand"), lambda v: v == SEVEN_BITS),
    Constraint("the converter must give 6 bits", lambda m: _clip(m, "code"), lambda v: v == CODES),
    Constraint("the converter must take off bits only (scale, offset)",
               lambda m: (_last(m, "one"), _last(m, "nothing")), lambda v: v == (1, 0)),
    Constraint("products and sums behind the converter must keep within 16 bits", _wide, lambda v: v < 1 << 15),
    Constraint("the shift behind the converter must be one for the whole layer",
               lambda m: np.unique(m.array("shift")).tolist(), lambda v: len(v) == 1),
    Constraint("an operand has at most 128 channels", lambda m: m.type("x").shape[-1], lambda v: v <= 128),
    Constraint("a job computes at most 512 channels", lambda m: m.result.shape[-1], lambda v: v <= costs.COLUMNS,
               Scope.TILES),
    Constraint("the window must fit the 1152 rows of the array, of which every tap takes at least 64",
               lambda m: packing.array_rows(prod(_window(m)), m.type("x").shape[-1]), lambda v: v <= costs.ROWS),
)  # fmt: skip


NO_SHIFT = "the requantisation is no right shift; dovetail quantize makes networks of shifts from float ones"


def _scaled(value: Pattern) -> Pattern:
    """Limited and shifted results of a sum."""
    parameters = (constant("scale"), constant("offset"), constant("shift"))
    return apply(Clip, apply(ScaleShift, value, *parameters, name="scale_shift", why=NO_SHIFT))


def digital_offloads(model: str) -> tuple[Offload, ...]:
    """What the digital engine computes, its cycles by one of `costs.DIGITAL`."""
    x, found = operand("x"), []
    kinds = (
        ("convolution", Conv2d, (*WINDOW, *FULL), IMAGE),
        ("depthwise convolution", DepthwiseConv2d, (*WINDOW, *DEPTHWISE), IMAGE),
        ("dense", FullyConnected, DENSE, VECTOR),
    )
    total = apply(Add, apply(Offset, x, name="wide"), apply(Offset, operand("other"), name="wider"))
    common = (pack_digital, _commands("diana_digital_start", "other", Padding.digital), digital_cycles(model))
    for name, kind, limits, layout in kinds:
        source = x if kind is FullyConnected else maybe(Pad, x, name="pad")
        pattern = _scaled(apply(kind, source, constant("weights"), name="layer"))
        offload = Offload(name, pattern, (*INT8, *WEIGHTS, *limits, *SHIFT), *common, channel_step=16, row_step=8)
        found.append(replace(offload, layouts={"x": layout, "result": layout}))
    layouts = dict.fromkeys(("x", "other", "result"), IMAGE)
    found.append(Offload("sum", _scaled(total), (*INT8, *SUM, *SHIFT), *common, row_step=8, layouts=layouts))
    return tuple(found)


def analog_offloads() -> tuple[Offload, ...]:
    """What the analog engine computes."""
    limited, found = apply(Clip, operand("x"), name="operand"), []
    commands = _commands("diana_analog_start", "scales", Padding.analog)
    kinds = (
        ("ternary convolution", Conv2d, maybe(Pad, limited, name="pad"), (*WINDOW, *FULL), IMAGE),
        ("ternary dense", FullyConnected, limited, ONE_ROW, VECTOR),
    )
    for name, kind, source, limits, layout in kinds:
        array = apply(kind, source, constant("weights"), name="layer")
        shifted = apply(ScaleShift, array, constant("one"), constant("nothing"), constant("gain"), name="converter")
        pattern, constraints = _scaled(apply(Clip, shifted, name="code")), (*INT8, *WEIGHTS, *limits, *TERNARY)
        offload = Offload(name, pattern, constraints, pack_ternary, commands, analog_cycles)
        layouts = {"x": layout, "result": layout}
        found.append(replace(offload, channel_step=packing.LINES, row_step=8, layouts=layouts))
    return tuple(found)
