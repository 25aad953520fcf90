"""DIANA: a RISC-V core, a digital 16x16 engine for 8 bits and an analog array for ternary weights, one L1 for both.

Sources: pulp-platform/dory Hardware_targets/Diana/Diana_TVM/HW_description.json (sizes, bandwidths), eml-eda/match
target/diana (70 cycles per transfer), Ueyoshi et al., DIANA (JSSC 2023). The base addresses are ours. The published
copies are of whole rows; the DMA here also swaps and reorders bytes, at one row per cycle. Patterns and limits after
KULeuven-MICAS/htvm python/tvm/relay/op/contrib/soma_dory.py and the tilers of pulp-platform/dory
Hardware_targets/Diana. Activations lie as (channel, row, column), columns padded to 16, the bytes of each 32-bit word
swapped (htvm python/tvm/relay/backend/contrib/soma_dory/layout_transform.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil, inf, prod
from typing import Any

import numpy as np

import dovetail.target as dt
from dovetail import legalize
from dovetail.ir.graph import Node
from dovetail.ir.operators.arithmetic import Add, Clip, Offset, ScaleShift
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Im2col, Pad
from dovetail.ir.types import Array, DType, Shape, TensorType
from dovetail.legalize import ConverterLimits, RequantisationLimits
from dovetail.target import layers
from dovetail.target.queue_driver import SEVERAL, queue_driver
from dovetail.targets.diana import registers
from dovetail.targets.diana.registers import COLUMNS, ROWS, DianaJob, DianaPadding, JobLayer, Operation

L1 = dt.Memory("L1", base=0x10000000, size=256000)
WEIGHTS = dt.Memory("WEIGHTS", base=0x10080000, size=64000, alignment=16)
ARRAY = dt.Memory("ARRAY", base=0x100C0000, size=ROWS * COLUMNS * 2 // 8 + 4 * COLUMNS, alignment=16)
"""The array, and behind it scales and offsets."""
L2 = dt.Memory("L2", base=0x1C000000, size=512000)
DMA = dt.Dma("dma", bytes_per_cycle=8, setup_cycles=70, base=0x1A100000)
BASES = {"digital": 0x10201000, "analog": 0x10202000}
DRIVER = queue_driver("dovetail.targets.diana:driver/diana.c", **SEVERAL)
IMAGE = dt.from_notation("N C H W/16 4w/4 -4w")
VECTOR = dt.from_notation("N C/16 4c/4 -4c")
KERNELS = frozenset((1, 3, 5, 7))
"""Rows and columns of windows."""
CODES = (-32, 31)
"""Least and greatest result of the analog converter."""
SEVEN_BITS = (-64, 63)
"""Least and greatest activation of the analog array."""
NOWHERE = dt.Operand(0, (0,) * 6)


def operation(match: dt.Match) -> Operation:
    """The kind of a tile's job."""
    if not match.has("layer"):
        return Operation.SUM
    kinds = {Conv2d: Operation.CONVOLUTION, DepthwiseConv2d: Operation.DEPTHWISE, FullyConnected: Operation.DENSE}
    return kinds[type(match.nodes["layer"].operator)]


def _window(match: dt.Match) -> layers.LayerWindow:
    """The window of a tile; that of a sum is one pixel."""
    return layers.window_of(match) if match.has("layer") else layers.PIXEL


def _last(match: dt.Match, name: str) -> int:
    """A parameter of which the limits say that it is the same for all channels."""
    return int(match.array(name).flat[-1])


def shape(match: dt.Match) -> registers.Shape:
    """A tile as the cost models take it."""
    inputs, outputs = match.type("x").shape[-1], match.result.shape[-1]
    rows, columns, _ = layers.sizes_of(match.result.shape)
    groups = inputs if operation(match) is Operation.DEPTHWISE else 1
    return registers.Shape(inputs, outputs, rows, columns, _window(match).kernel, groups)


def job_layer(match: dt.Match, operands: Mapping[str, dt.Operand], padding: int) -> JobLayer:
    """The fields of a tile. Distances of operands that are not given are 0."""
    (rows, columns, inputs), (height, width, outputs) = map(
        layers.sizes_of, (match.type("x").shape, match.result.shape)
    )
    dense, window, clip = operation(match) is Operation.DENSE, _window(match), match.operator("clip", Clip)
    names = (match.values["x"], match.values.get("other", ""), "result")
    # bytes between channels, and between rows; of a vector none
    apart = [(0, 0) if dense else operands.get(name, NOWHERE).strides[1:3] for name in names]
    return JobLayer(
        operation=operation(match),
        c=inputs,
        k=outputs,
        cx=columns,
        cy=rows,
        fx=window.kernel[1],
        fy=window.kernel[0],
        ox=width,
        oy=height,
        activation_function=int(clip.low == 0),
        output_shift=_last(match, "shift"),
        dilation=1,
        stride=window.stride[0] - 1,
        ox_unroll=registers.unroll(shape(match)) if match.has("converter") else 0,
        padding=padding,
        gain=_last(match, "gain") if match.has("converter") else 0,
        in_row=apart[0][1],
        in_plane=apart[0][0],
        second_row=apart[1][1],
        second_plane=apart[1][0],
        out_row=apart[2][1],
        out_plane=apart[2][0],
    )


def _bytes(shape: Shape) -> int:
    """Bytes of an activation: rows of whole blocks of 16."""
    rows, columns, channels = layers.sizes_of(shape)
    if len(shape) == 2:
        return -(-channels // 16) * 16
    return channels * rows * -(-columns // 16) * 16


def _commands(function: str, more: str, field: Callable[[DianaPadding], int]) -> Callable[..., tuple[dt.Command, ...]]:
    def commands(match: dt.Match, operands: Mapping[str, dt.Operand]) -> tuple[dt.Command, ...]:
        weights, pack = operands.get("weights", NOWHERE), pack_ternary if match.has("converter") else pack_digital
        second = operands.get(match.values.get(more, more), NOWHERE)
        (top, left), (bottom, right) = _window(match).before, _window(match).after
        padding = DianaPadding(top, bottom, left, right)
        job = DianaJob(
            weights.address,
            pack(match)["weights"].nbytes if match.has("layer") else 0,
            second.address,
            operands[match.values["x"]].address,
            _bytes(match.type("x").shape),
            operands["result"].address,
            _bytes(match.result.shape),
            job_layer(match, operands, field(padding)),
        )
        return (dt.Command(function, registers.task_words(job)),)

    return commands


def pack_digital(match: dt.Match) -> dict[str, Array]:
    """Weights with their biases; a sum has none."""
    if not match.has("layer"):
        return {}
    weights = match.array("weights").astype(np.int8)
    bias = np.broadcast_to(match.array("offset"), match.result.shape[-1]).astype(np.int32)
    packers = (registers.pack_convolution, registers.pack_depthwise, registers.pack_dense)  # by `Operation`
    return {"weights": packers[operation(match)](weights, bias)}


def pack_ternary(match: dt.Match) -> dict[str, Array]:
    """The array's cells, and scales and offsets behind the converter."""
    channels = match.result.shape[-1]
    weights = match.array("weights").astype(np.int8).reshape(channels, *_window(match).kernel, -1)
    return {
        "weights": registers.pack_ternary(weights),
        "scales": registers.pack_scales(match.array("scale"), match.array("offset"), channels),
    }


def digital_cycles(model: str) -> Callable[[dt.Match], int]:
    """Engine cycles of a tile by one of `DIGITAL`."""

    def cycles(match: dt.Match) -> int:
        if not match.has("layer"):
            return ceil(registers.sum_cycles(match.result.elements))
        of_depthwise = operation(match) is Operation.DEPTHWISE
        return ceil((registers.plinio_digital if of_depthwise else registers.DIGITAL[model])(shape(match)))

    return cycles


def _elements(match: dt.Match) -> list[int]:
    values = [name for name in ("x", "other") if name in match.values]
    return [*(match.type(name).elements for name in values), match.result.elements]


def _rounded(match: dt.Match) -> Any:
    """Scale and shift where they are the same for all channels; else None."""
    found = [np.unique(match.array(name)) for name in ("scale", "shift")]
    return tuple(int(array[0]) for array in found) if all(array.size == 1 for array in found) else None


def _border(match: dt.Match) -> Any:
    """Kernel less twice the padding, before and behind, of rows and of columns. Padding that no window reads counts as
    if it were there."""
    window, found = _window(match), []
    read, given = (layers.sizes_of(kind.shape)[:2] for kind in (match.type("x"), match.result))
    sides = zip(window.kernel, window.stride, window.before, window.after, read, given, strict=True)
    for size, stride, lead, last, image, results in sides:
        unread = results * stride - 1 - (image + lead + last - size)  # could follow without a further result
        found.append((size - 2 * lead, size - 2 * (last + max(0, min(unread, size // 2 - last)))))
    return found


def _wide(match: dt.Match) -> int:
    """The largest absolute value behind the converter."""
    scale, offset = (np.abs(match.array(name).astype(np.int64)).max() for name in ("scale", "offset"))
    return int(scale * -CODES[0] + offset)


def _clip(match: dt.Match, name: str) -> tuple[int, int]:
    clip = match.operator(name, Clip)
    return clip.low, clip.high


INT8 = (
    dt.one_of("operands must be int8", lambda m: m.type("x").dtype.text, "int8"),
    layers.BATCH,
    dt.one_of(
        "results must be int8 limited to -128..127 or 0..127 only, or uint8 to 0..127",
        lambda m: (m.result.dtype.text, *_clip(m, "clip")),
        ("int8", -128, 127),
        ("int8", 0, 127),
        ("uint8", 0, 127),
    ),
    dt.Constraint(
        "the number of elements of operands and result must be a multiple of 4",
        _elements,
        lambda v: not any(count % 4 for count in v),
        dt.Scope.LAYERS,
    ),
)
SHIFT = (
    dt.Constraint(
        "requantisation must be one right shift by 0 to 31 for the whole layer (scale, shift)",
        _rounded,
        lambda v: v is not None and v[0] == 1 and 0 <= v[1] <= 31,
    ),
)
SIGNED = (
    layers.NARROW_WEIGHTS.worded("weights must have at most 8 bits, signed"),
    layers.SYMMETRIC_WEIGHTS,
    layers.SYMMETRIC_OPERAND,
)
SQUARE = (
    dt.Constraint(
        "rows and columns of the kernel must be 1, 3, 5 or 7", lambda m: _window(m).kernel, lambda v: set(v) <= KERNELS
    ),
    layers.strides_of(1, 2).worded("the stride must be 1x1 or 2x2"),
    layers.NO_DILATION,
)
"""Limits of the window without its padding."""
WINDOW = (
    SQUARE[0],
    dt.Constraint(
        "the padding must be half a kernel on every side, or less above and below (kernel - 2 * padding = 1)",
        _border,
        lambda v: v[1] == (1, 1) and min(v[0]) >= 1,
        dt.Scope.LAYERS,
    ),
    layers.ZERO_PADDING.worded("the padding must be zeros"),
    *SQUARE[1:],
)
FULL = (layers.NO_GROUPS,)
DEPTHWISE = (layers.NO_MULTIPLIER,)
DENSE = (
    layers.ONE_ROW,
    dt.Constraint(
        "a job computes at most 16 results of a dense layer",
        lambda m: m.result.shape[-1],
        lambda v: v <= 16,
        dt.Scope.TILES,
    ),
)
SUM = (
    dt.Constraint(
        "both operands of a sum must be images of one type",
        lambda m: (str(m.type("x")), str(m.type("other")), len(m.result.shape)),
        lambda v: v[0] == v[1] and v[2] == 4,
    ),
    dt.one_of(
        "operands of a sum must be added as they are",
        lambda m: [m.operator(n, Offset).offset for n in ("wide", "wider")],
        [0, 0],
    ),
    dt.one_of(
        "a sum has no bias, so it is rounded down", lambda m: sorted(set(m.array("offset").reshape(-1).tolist())), [0]
    ),
)
TERNARY = (
    dt.Constraint("weights must be -1, 0 or 1", layers.range_of("weights"), lambda v: v[0] >= -1 and v[1] <= 1),
    dt.one_of("operands must be limited to 7 bits", lambda m: _clip(m, "operand"), SEVEN_BITS),
    dt.one_of("the converter must give 6 bits", lambda m: _clip(m, "code"), CODES),
    dt.one_of(
        "the converter must take off bits only (scale, offset)",
        lambda m: (_last(m, "one"), _last(m, "nothing")),
        (1, 0),
    ),
    dt.Constraint("products and sums behind the converter must keep within 16 bits", _wide, lambda v: v < 1 << 15),
    dt.Constraint(
        "the shift behind the converter must be one for the whole layer",
        lambda m: sorted(set(m.array("shift").reshape(-1).tolist())),
        lambda v: len(v) == 1,
    ),
    dt.Constraint("an operand has at most 128 channels", lambda m: m.type("x").shape[-1], lambda v: v <= 128),
    dt.Constraint(
        "a job computes at most 512 channels",
        lambda m: m.result.shape[-1],
        lambda v: v <= COLUMNS,
        dt.Scope.TILES,
    ),
    dt.Constraint(
        "the window must fit the 1152 rows of the array, of which every tap takes at least 64",
        lambda m: registers.array_rows(prod(_window(m).kernel), m.type("x").shape[-1]),
        lambda v: v <= ROWS,
    ),
)


NO_SHIFT = "the requantisation is no right shift; dovetail quantize makes networks of shifts"


def _scaled(value: dt.Pattern) -> dt.Pattern:
    parameters = (dt.constant("scale"), dt.constant("offset"), dt.constant("shift"))
    return dt.apply(Clip, dt.apply(ScaleShift, value, *parameters, name="scale_shift", why=NO_SHIFT))


def digital_offloads(model: str) -> tuple[dt.Offload, ...]:
    """The digital engine's offloads, with cycles by one of `DIGITAL`."""
    x, found = dt.operand("x"), []
    kinds = (
        ("convolution", Conv2d, (*WINDOW, *FULL), IMAGE),
        ("depthwise convolution", DepthwiseConv2d, (*WINDOW, *DEPTHWISE), IMAGE),
        ("dense", FullyConnected, DENSE, VECTOR),
    )
    total = dt.apply(Add, dt.apply(Offset, x, name="wide"), dt.apply(Offset, dt.operand("other"), name="wider"))
    common = (pack_digital, _commands("diana_digital_start", "other", DianaPadding.digital), digital_cycles(model))
    for name, kind, limits, layout in kinds:
        source = x if kind is FullyConnected else dt.maybe(Pad, x, name="pad")
        pattern = _scaled(dt.apply(kind, source, dt.constant("weights"), name="layer"))
        offload = dt.Offload(name, pattern, (*INT8, *SIGNED, *limits, *SHIFT), *common, channel_step=16, row_step=8)
        found.append(replace(offload, layouts={"x": layout, "result": layout}))
    layouts = dict.fromkeys(("x", "other", "result"), IMAGE)
    found.append(dt.Offload("sum", _scaled(total), (*INT8, *SUM, *SHIFT), *common, row_step=8, layouts=layouts))
    return tuple(found)


def analog_offloads() -> tuple[dt.Offload, ...]:
    """The analog engine's offloads."""
    limited, found = dt.apply(Clip, dt.operand("x"), name="operand"), []
    commands = _commands("diana_analog_start", "scales", DianaPadding.analog)
    kinds = (
        ("ternary convolution", Conv2d, dt.maybe(Pad, limited, name="pad"), (*WINDOW, *FULL), IMAGE),
        ("ternary dense", FullyConnected, limited, (layers.ONE_ROW,), VECTOR),
    )
    for name, kind, source, limits, layout in kinds:
        array = dt.apply(kind, source, dt.constant("weights"), name="layer")
        shifted = dt.apply(
            ScaleShift, array, dt.constant("one"), dt.constant("nothing"), dt.constant("gain"), name="converter"
        )
        pattern, constraints = _scaled(dt.apply(Clip, shifted, name="code")), (*INT8, *SIGNED, *limits, *TERNARY)
        offload = dt.Offload(
            name, pattern, constraints, pack_ternary, commands, lambda m: ceil(registers.plinio_analog(shape(m)))
        )
        layouts = {"x": layout, "result": layout}
        found.append(replace(offload, channel_step=registers.LINES, row_step=8, layouts=layouts))
    return tuple(found)


LIMITS = RequantisationLimits(scale_bits=1, most_shift=31, activations=DType.INT8)
CONVERTER = ConverterLimits(operand=SEVEN_BITS, code=CODES, most_shift=31, scaled_bits=16)


def digital_takes(types: Mapping[str, TensorType], node: Node) -> bool:
    """Whether the digital engine has the window of a layer (before patterns are matched)."""
    return not isinstance(node.operator, Conv2d | DepthwiseConv2d) or layers.keeps(SQUARE, types, node)


def patches_pay(types: Mapping[str, TensorType], node: Node) -> bool:
    """Whether a convolution is only possible as a 1x1 convolution of patches."""
    return types[node.inputs[0]].dtype is DType.INT8 and not digital_takes(types, node)


def shifts_pay(types: Mapping[str, TensorType], node: Node) -> bool:
    """Whether the digital engine has the window of a layer, or will have it as patches."""
    full = isinstance(node.operator, Conv2d) and types[node.inputs[1]].shape[-1] == types[node.inputs[0]].shape[-1]
    return digital_takes(types, node) or (full and types[node.inputs[1]].shape[1:3] != (1, 1))


def analog_takes(types: Mapping[str, TensorType], node: Node) -> bool:
    """Whether the array has room for the window of a layer."""
    weights = types[node.inputs[1]].shape
    rows = registers.array_rows(prod(weights[1:-1]), weights[-1])
    full = weights[-1] == types[node.inputs[0]].shape[-1]
    return full and weights[-1] <= 128 and rows <= ROWS and digital_takes(types, node)


def _engine(name: str, memory: dt.Memory, peak: float, model: str) -> dt.Engine:
    return dt.Engine(
        name=name,
        memory=L1.name,
        offloads=digital_offloads(model) if name == "digital" else analog_offloads(),
        ideal_macs_per_cycle=peak,
        best=(lambda products: registers.best(products, model))
        if name == "digital"
        else lambda products: dt.Best(peak if products.bits <= 2 else 0),
        driver=("dovetail.targets.diana:driver/diana.h",),
        queue=1,
        launching=60,
        files={"diana.c": DRIVER},
        device=dt.DeviceModel(
            "dovetail.targets.diana.device:DianaDevice", BASES[name], 0x100, {"engine": name, "costs": model}
        ),
        wait=f"diana_{name}_wait",
        prepare=f"diana_{name}_init",
        defines={f"DIANA_{name.upper()}_BASE": BASES[name]},
        constants=memory.name,
    )


QUANTISATION = dt.Quantisation(
    weight_bits=(8, 2), packed=True, per_channel=False, symmetric=True, shifts=True, ternary=True, operand_bits=7
)


def diana(model: str = "plinio") -> dt.Target:
    """The chip, the digital engine's cycles by one of the public models: "plinio" or "match"."""
    return dt.Target(
        name="diana",
        sentence="RISC-V RV32IMC, 512 kB L2, 256 kB L1, digital 16x16 engine (int8), analog array (ternary weights)",
        core=dt.Core("rv32imc"),
        memories=(L2, L1, WEIGHTS, ARRAY),
        code=L2.name,
        values=L2.name,
        dma=DMA,
        engines=(
            _engine("digital", WEIGHTS, 256.0, model),
            _engine("analog", ARRAY, round(ROWS * COLUMNS / registers.ARRAY_CYCLES, 1), model),
        ),
        quantisation=QUANTISATION,
        policies=(
            replace(DIGITAL, rewrites=(*DIGITAL.rewrites, BANDS, APART, WORDS)),
            replace(ANALOG, rewrites=(*DIGITAL.rewrites, *ANALOG.rewrites)),
        ),
    )


_PART = 250
"""Bytes of an image that keep engine, DMA and core as long as a further part of its pool."""
DIGITAL = dt.Policy(
    "digital",
    "the digital engine requantises by shifting, where scales are powers of two, within 1 step; else the core computes",
    (
        dt.Rewrite("requantisation", legalize.engine_requantisation(shifts_pay, LIMITS), lsb=1),
        dt.Rewrite("patches", legalize.convolution_as_im2col(patches_pay, shifted=True), lsb=0),
        dt.Rewrite("borders", legalize.even_borders(max(KERNELS), shifted=True), lsb=0),
        dt.Rewrite("sums", legalize.addition_by_shift(31), lsb=1),
        dt.Rewrite("whole words", legalize.dense_results_of(4), lsb=0),
    ),
)
_WAIT, _MOST_BANDS, _SURELY = 71, 8, 0.95
"""Cycles of the core between two launches; the most bands of first layers; what is surely earlier."""


def bands(types: Mapping[str, TensorType], chain: Sequence[Node]) -> int:
    """In how many bands the first layers end first, by estimate; 1 where they end about then with fewer of them in
    bands, as more launches may each come late."""
    places = [place for place, node in enumerate(chain) if isinstance(node.operator, Conv2d | DepthwiseConv2d)]
    work = [_row_cycles(types, chain[place]) * types[chain[place].output].shape[1] for place in places]
    ends = []
    for number in range(len(places)):
        end, count = _in_bands(types, chain, places[: number + 1])
        ends.append(end + sum(work[number + 1 :]))
    return count if ends[-1] <= min(ends[:-1], default=inf) * _SURELY else 1


def _in_bands(types: Mapping[str, TensorType], chain: Sequence[Node], layer: Sequence[int]) -> tuple[float, int]:
    """When some layers end first, and in how many bands: the DMA gathers one, a byte a cycle in four transfers, while
    the engine computes the one before. Rows that two bands read are gathered and computed for both."""
    image = types[chain[layer[0]].inputs[0]].shape
    gathered, copies = prod(image), 4
    for node in chain[: layer[0]]:
        if isinstance(node.operator, Im2col):
            gathered, copies = gathered + prod(image) // node.operator.kernel[1], copies + node.operator.kernel[0]
    engine, again, halo = 0.0, 0.0, 0
    for place in reversed(layer):
        operator, rows, cycles = (
            chain[place].operator,
            types[chain[place].output].shape[1],
            _row_cycles(types, chain[place]),
        )
        assert isinstance(operator, Conv2d | DepthwiseConv2d)
        engine, again = engine + rows * cycles, again + halo * cycles + _WAIT
        halo = max(0, halo * operator.stride[0] + types[chain[place].inputs[1]].shape[1] - operator.stride[0])
    more = gathered * halo / image[1] + copies * DMA.setup_cycles
    return legalize.soonest(types[chain[layer[-1]].output].shape[1], _MOST_BANDS, (gathered, more), (engine, again))


def _row_cycles(types: Mapping[str, TensorType], layer: Node) -> float:
    """Engine cycles for each row of a layer's result."""
    (_, *kernel, _), inputs = types[layer.inputs[1]].shape, types[layer.inputs[0]].shape[3]
    _, _, columns, outputs = types[layer.output].shape
    groups = inputs if layer.operator.is_channelwise else 1
    return registers.plinio_digital(registers.Shape(inputs, outputs, 1, columns, (kernel[0], kernel[1]), groups))


APART = dt.Rewrite(
    "pools in parts",
    legalize.average_pool_in_channels(lambda image: round((image.elements / _PART) ** 0.5), 16, (ScaleShift,), True),
    lsb=0,
)
BANDS = dt.Rewrite("bands", legalize.first_layer_in_bands(bands, 1, laid_out=True, layers=2), lsb=0)
"""Both are of the digital engine alone: the array takes a layer's channels at once."""
WORDS = dt.Rewrite("pools in words", legalize.pools_in_words, lsb=0)
ANALOG = dt.Policy(
    "analog",
    "layers with weights of -1, 0 and 1 go to the analog array, the rest as in `digital`",
    (dt.Rewrite("converter", legalize.through_converter(analog_takes, CONVERTER), lsb=255),),
)
TARGET = diana()
