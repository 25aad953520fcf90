"""kestrel: a Cortex-M4 beside a command-stream engine with a memory and a DMA of its own (docs/port_stream.md)."""
# fmt: off

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

import dovetail.target as dt
from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.arithmetic import Add, Clip, Requantize, Rounding
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.reduction import AveragePool2d, MaxPool2d
from dovetail.ir.types import Array, TensorType
from dovetail.legalize import convolution_as_im2col
from dovetail.target import layers

HERE = Path(__file__).resolve()
Fields = dict[str, int]
Made = tuple[dt.Command, ...]

FLASH = dt.Memory("flash", base=0x08000000, size=1 << 20, reach=("core", "kestrel", "kestrel_dma"))
RAM = dt.Memory("ram", base=0x20000000, size=256 << 10, reach=("core", "kestrel_dma"))
SRAM = dt.Memory("sram", base=0x30000000, size=64 << 10, alignment=16, reach=("kestrel", "kestrel_dma"))

ROWS = ("source", "target", "row_bytes", "rows", "source_stride", "target_stride")
OPERAND = ("x", "x_block", "x_row", "x_rows", "x_columns", "channels")
RESULT = ("y", "y_block", "y_row", "y_rows", "y_columns", "outputs", "low", "high")
WINDOW = ("kernel_rows", "kernel_columns", "stride_rows", "stride_columns", "top", "left")
LINEAR = ("x_zero", "y_zero", "weights", "parameters")
SUMMED = ("other", "other_block", "other_row", "left_shift", "x_zero", "x_multiplier", "x_shift",
          "other_zero", "other_multiplier", "other_shift", "y_zero", "y_multiplier", "y_shift")
COMMANDS = dt.CommandSet({
    "DMA_LOAD": ROWS, "DMA_STORE": ROWS,
    "CONV": (*OPERAND, *RESULT, *WINDOW, *LINEAR),
    "DEPTHWISE": (*OPERAND, *RESULT, *WINDOW, *LINEAR),
    "POOL": (*OPERAND, *RESULT, *WINDOW, "average"),
    "ADD": (*OPERAND, *RESULT, *SUMMED),
})


def move(rows: dt.Rows) -> tuple[int, ...]:
    """A transfer of the engine's DMA as a command."""
    return COMMANDS.words("DMA_LOAD" if rows.load else "DMA_STORE", **{name: getattr(rows, name) for name in ROWS})


def wait(unit: str, unfinished: int) -> tuple[int, ...]:
    """The command that waits until at most so many of a unit's commands have not ended."""
    return COMMANDS.words("WAIT", unit=int(unit == "kestrel_dma"), unfinished=unfinished)


IMAGE = dt.blocked((0, 3, 1, 2), axis=3, size=16)
VECTOR = dt.blocked((0, 1), axis=1, size=16)


def place(stem: str, operand: dt.Operand) -> Fields:
    """Place of a value: its address, and the bytes between blocks of channels and between rows."""
    row = operand.strides[2] if len(operand.strides) == 5 else 0
    return {stem: operand.address, f"{stem}_block": operand.strides[1], f"{stem}_row": row}


def ends(match: dt.Match, operands: Mapping[str, dt.Operand], low: int, high: int) -> Fields:
    """The fields of operand and result that every command has."""
    x, y = layers.sizes_of(match.type("x").shape), layers.sizes_of(match.result.shape)
    return {
        **place("x", operands[match.values["x"]]), "x_rows": x[0], "x_columns": x[1], "channels": x[2],
        **place("y", operands["result"]), "y_rows": y[0], "y_columns": y[1], "outputs": y[2],
        "low": low, "high": high}


def window(kernel: Sequence[int], stride: Sequence[int], before: Sequence[int]) -> Fields:
    """The fields of a window, each pair rows and columns."""
    return dict(zip(WINDOW, (*kernel, *stride, *before), strict=True))


def command(name: str, fields: Fields) -> Made:
    """One command of a list."""
    return (dt.Command(name, COMMANDS.words(name, **fields)),)


def is_depthwise(match: dt.Match) -> bool:
    """Whether a matched layer computes each channel by itself."""
    return layers.linear_of(match).is_channelwise


def pack(match: dt.Match) -> dict[str, Array]:
    """Weights in blocks, and per output channel bias, multiplier and right shift."""
    layer, outputs = layers.layer_of(match), match.result.shape[-1]
    if is_depthwise(match):  # blocks of 16 channels: rows, columns, channels
        padded = np.pad(layer.weights[0], [(0, 0), (0, 0), (0, -outputs % 16)])
        blocks = padded.reshape(*padded.shape[:2], -1, 16).transpose(2, 0, 1, 3)
    else:  # blocks of 8 outputs: rows, columns, blocks of 16 inputs, each 8 x 16 weights
        padded = np.pad(layer.weights, [(0, -outputs % 8), (0, 0), (0, 0), (0, -layer.weights.shape[3] % 16)])
        rows, columns, inputs = padded.shape[1:]
        blocks = padded.reshape(-1, 8, rows, columns, inputs // 16, 16).transpose(0, 2, 3, 4, 1, 5)
    parameters = np.stack([layer.bias, layer.multiplier, 31 - layer.shift], axis=1).astype("<i4")
    arrays = {"weights": blocks.astype(np.int8), "parameters": parameters}
    return {name: np.ascontiguousarray(array).reshape(-1).view(np.uint8) for name, array in arrays.items()}


def linear(match: dt.Match, operands: Mapping[str, dt.Operand]) -> Made:
    """A convolution, a depthwise one, or a dense layer, which is a convolution of one pixel."""
    layer = layers.layer_of(match)
    return command("DEPTHWISE" if is_depthwise(match) else "CONV", {
        **ends(match, operands, layer.low, layer.high), **window(layer.kernel, layer.stride, layer.before),
        "x_zero": layer.input_zero_point, "y_zero": layer.output_zero_point,
        "weights": operands["weights"].address, "parameters": operands["parameters"].address})


def linear_cycles(match: dt.Match) -> int:
    """128 products a cycle, 8 of depthwise layers; meanwhile its constants come, 8 bytes a cycle."""
    layer, outputs = layers.layer_of(match), match.result.shape[-1]
    taps, pixels = layer.kernel[0] * layer.kernel[1], match.result.elements // outputs
    groups, inputs = -(-outputs // 8), -(-layer.weights.shape[3] // 16)
    blocks = groups if is_depthwise(match) else groups * inputs
    weights = taps * (16 * -(-outputs // 16) if is_depthwise(match) else 128 * blocks)
    return max(pixels * taps * blocks, -(-(weights + 12 * outputs) // 8))


def pool(match: dt.Match, operands: Mapping[str, dt.Operand]) -> Made:
    """The mean of each window, or the largest of it."""
    clip = match.operator("clip", Clip) if match.has("clip") else Clip(-128, 127, match.result.dtype)
    operator = match.operator("layer", AveragePool2d if match.has("clip") else MaxPool2d)
    shape = window(operator.kernel, operator.stride, [before for before, _ in operator.padding])
    return command("POOL", {**ends(match, operands, clip.low, clip.high), **shape, "average": int(match.has("clip"))})


def add(match: dt.Match, operands: Mapping[str, dt.Operand]) -> Made:
    """The sum of two images, each scaled, scaled again."""
    clip, fields = match.operator("clip", Clip), place("other", operands[match.values["other"]])
    for stem, name in zip(("x", "other", "y"), SCALINGS, strict=True):
        scaling = match.operator(name, Requantize)
        fields[f"{stem}_zero"] = scaling.output_zero_point if stem == "y" else scaling.input_zero_point
        fields[f"{stem}_multiplier"] = int(match.array(f"{stem}_multiplier")[0])
        fields[f"{stem}_shift"] = 31 - int(match.array(f"{stem}_shift")[0])
    fields["left_shift"] = match.operator("x_scaled", Requantize).left_shift
    return command("ADD", {**ends(match, operands, clip.low, clip.high), **fields})


def elements_cycles(match: dt.Match) -> int:
    """8 elements a cycle, of a pool those of its windows."""
    channels, taps = match.result.shape[-1], 1
    if match.has("layer"):
        kernel = match.operator("layer", AveragePool2d if match.has("clip") else MaxPool2d).kernel
        taps = kernel[0] * kernel[1]
    return match.result.elements // channels * taps * -(-channels // 8)


SINGLE = dt.one_of(
    "requantisations must be rounded once",
    lambda m: {n.operator.rounding for n in m.nodes.values() if isinstance(n.operator, Requantize)},
    {Rounding.SINGLE})
SHIFTS = dt.Constraint(
    "shifts must be -31 to 30",
    lambda m: [layers.range_of(name)(m) for name in m.values if name.endswith("shift")],
    lambda v: all(least >= -31 and most <= 30 for least, most in v))
SHAPES = (layers.ALL_INT8, layers.ONE_IMAGE, layers.sizes_below(1 << 16))
WINDOWS = (
    layers.kernel_at_most(7, 7), layers.strides_of(1, 2), layers.NO_DILATION, *layers.zero_padding_at_most(6),
    dt.Constraint(
        "padding must be smaller than the kernel",
        lambda m: [layers.window_of(m).before, layers.window_of(m).after, layers.window_of(m).kernel],
        lambda v: all(max(before, after) < size for before, after, size in zip(*v, strict=True))))
WEIGHTS = (layers.NARROW_WEIGHTS, layers.SYMMETRIC_WEIGHTS, SINGLE, SHIFTS)
LAYERS: dict[str, tuple[type[layers.Linear], tuple[dt.Constraint, ...]]] = {
    "convolution": (Conv2d, (*WINDOWS, layers.NO_GROUPS)),
    "depthwise": (DepthwiseConv2d, (*WINDOWS, layers.NO_MULTIPLIER)),
    "dense": (FullyConnected, (layers.ONE_ROW,)),
}
NO_ZERO = dt.one_of("a mean must have no zero point", lambda m: m.operator("layer", AveragePool2d).input_zero_point, 0)
SCALINGS = ("x_scaled", "other_scaled", "requantize")
SUM = (
    SINGLE, SHIFTS, layers.ONE_SCALE,
    dt.one_of("the operands must have one shape", lambda m: m.type("x").shape == m.type("other").shape, True),
    dt.one_of("the operands must be images", lambda m: len(m.type("x").shape), 4),
    dt.Constraint(
        "the operands must be raised by as many bits, the sum by none",
        lambda m: [m.operator(name, Requantize).left_shift for name in SCALINGS],
        lambda v: v[0] == v[1] and v[2] == 0),
    dt.one_of(
        "between the operands' scalings and the sum's there must be no zero point",
        lambda m: [*(m.operator(name, Requantize).output_zero_point for name in SCALINGS[:2]),
                   m.operator(SCALINGS[2], Requantize).input_zero_point], [0, 0, 0]))


def scaled_sum() -> dt.Pattern:
    """The pattern of a residual addition, as TensorFlow Lite has it."""
    x, other = (
        dt.apply(Requantize, dt.operand(name), dt.constant(f"{name}_multiplier"), dt.constant(f"{name}_shift"),
                 name=f"{name}_scaled")
        for name in ("x", "other"))
    total = dt.apply(Add, x, other, name="total")
    return dt.apply(Clip, dt.apply(Requantize, total, dt.constant("y_multiplier"), dt.constant("y_shift")))


def offloads() -> Iterator[dt.Offload]:
    """Linear layers with and without a bias, pools, and sums; values in blocks of 16 channels."""
    def lies(layout: dt.Layout) -> dict[str, dt.Layout]:
        return dict.fromkeys(("x", "other", "result"), layout)

    for kind, (operator, limits) in LAYERS.items():
        for name, pattern in layers.requantised(kind, operator).items():
            layout = VECTOR if operator is FullyConnected else IMAGE
            yield dt.Offload(name, pattern, (*SHAPES, *WEIGHTS, *limits), pack, linear, linear_cycles,
                             channel_step=16, layouts=lies(layout))
    x = dt.operand("x")
    others: dict[str, tuple[dt.Pattern, tuple[dt.Constraint, ...], Callable[..., Made]]] = {
        "average pool": (dt.apply(Clip, dt.apply(AveragePool2d, x, name="layer")), (NO_ZERO,), pool),
        "maximum pool": (dt.apply(MaxPool2d, x, name="layer"), (), pool),
        "sum": (scaled_sum(), SUM, add)}
    for name, (pattern, limits, commands) in others.items():
        yield dt.Offload(name, pattern, (*SHAPES, *limits), lambda match: {}, commands, elements_cycles,
                         channel_step=16, layouts=lies(IMAGE))


def rounded_once(graph: Graph) -> Graph:
    """Every requantisation of the graph with one rounding."""
    def once(node: Node) -> Node:
        if isinstance(node.operator, Requantize) and node.operator.rounding is Rounding.DOUBLE:
            return replace(node, operator=replace(node.operator, rounding=Rounding.SINGLE))
        return node

    return replace(graph, nodes=tuple(map(once, graph.nodes)))


def is_large(types: Mapping[str, TensorType], node: Node) -> bool:
    """A convolution whose kernel the engine does not have; of patches it is one of 1x1."""
    return max(types[node.inputs[1]].shape[1:3]) > 7


ENGINE = dt.Engine(
    name="kestrel", memory="sram", constants="flash", offloads=tuple(offloads()), ideal_macs_per_cycle=128.0,
    best=lambda macs: dt.Best(8, "depthwise: one of 16 inputs", (1, 8, 1, 1)) if macs.kind == "DepthwiseConv2d"
    else dt.Best(min(128, 8 * macs.pixels), "8 weights come a cycle", (16, 8, 1, 1)),
    stream=dt.CommandStream(start="kestrel_start", wait=wait),
    dma=dt.StreamDma("kestrel_dma", bytes_per_cycle=8, setup_cycles=32, move=move),
    driver=(), files={name: HERE.with_name(name) for name in ("kestrel.c", "kestrel.h")}, headers=("kestrel.h",),
    prepare="kestrel_init", wait="kestrel_wait", launching=89, defines={"KESTREL_BASE": 0x40010000},
    device=COMMANDS.device(
        "kestrel", str(HERE.with_name("kestrel_model.py")), base=0x40010000,
        dma="kestrel_dma", transfers=("DMA_LOAD", "DMA_STORE"), start=60))
TARGET = dt.Target(
    name="kestrel",
    sentence="Arm Cortex-M4, 1 MiB flash, 256 KiB RAM, command-stream engine kestrel with 64 KiB and a DMA of its own",
    core=dt.Core("cortex-m4", stack=8192), memories=(FLASH, RAM, SRAM), code="flash", values="ram", engines=(ENGINE,),
    policies=(dt.Policy("engine", "the engine requantises: one product, rounded once, within 1 step", (
        dt.Rewrite("one rounding", rounded_once, lsb=1),
        dt.Rewrite("patches", convolution_as_im2col(is_large), lsb=0))),))
