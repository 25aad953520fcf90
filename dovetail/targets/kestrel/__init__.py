"""kestrel: a Cortex-M4 beside a command-stream engine with a memory and a DMA of its own (docs/port_stream.md)."""

from dataclasses import replace
from pathlib import Path

import numpy as np

import dovetail.target as dt
from dovetail.ir.operators.arithmetic import Add, Clip, Requantize, Rounding
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.reduction import AveragePool2d, MaxPool2d
from dovetail.legalize import convolution_as_im2col
from dovetail.target import layers

HERE = Path(__file__).resolve()
FLASH = dt.Memory("flash", base=0x08000000, size=1 << 20, reach=("core", "kestrel", "kestrel_dma"))
RAM = dt.Memory("ram", base=0x20000000, size=256 << 10, reach=("core", "kestrel_dma"))
SRAM = dt.Memory("sram", base=0x30000000, size=64 << 10, alignment=16, reach=("kestrel", "kestrel_dma"))
IMAGE, VECTOR = dt.blocked((0, 3, 1, 2), 3, 16), dt.blocked((0, 1), 1, 16)
OPERAND = ("x", "x_block", "x_row", "x_rows", "x_columns", "channels")
RESULT = ("y", "y_block", "y_row", "y_rows", "y_columns", "outputs", "low", "high")
WINDOW = ("kernel_rows", "kernel_columns", "stride_rows", "stride_columns", "top", "left")
LINEAR = ("x_zero", "y_zero", "weights", "parameters")
ROWS = ("source", "target", "row_bytes", "rows", "source_stride", "target_stride")
COMMANDS = dt.CommandSet({
    "DMA_LOAD": ROWS, "DMA_STORE": ROWS,
    "CONV": (*OPERAND, *RESULT, *WINDOW, *LINEAR),
    "DEPTHWISE": (*OPERAND, *RESULT, *WINDOW, *LINEAR),
    "POOL": (*OPERAND, *RESULT, *WINDOW, "average"),
    "ADD": (*OPERAND, *RESULT, "other", "other_block", "other_row", "x_zero", "other_zero", "y_zero", "x_multiplier",
            "x_shift", "other_multiplier", "other_shift", "y_multiplier", "y_shift", "left_shift")})  # fmt: skip


def move(rows):
    """A transfer of the engine's DMA as a command."""
    values = {name: getattr(rows, name) for name in ROWS}
    return COMMANDS.words("DMA_LOAD" if rows.load else "DMA_STORE", **values)


def wait(unit, unfinished):
    """The command that waits."""
    return COMMANDS.words("WAIT", unit=int(unit == "kestrel_dma"), unfinished=unfinished)


def place(stem, operand):
    """Where a value lies: its address, and the bytes between blocks of 16 channels and between rows."""
    block, row = operand.strides[1], operand.strides[2] if len(operand.strides) > 3 else 0
    return {stem: operand.address, f"{stem}_block": block, f"{stem}_row": row}


def ends(match, operands, clip):
    """The fields of operand and result that every command has."""
    x, y = layers.sizes_of(match.type("x").shape), layers.sizes_of(match.result.shape)
    return {
        **place("x", operands[match.values["x"]]), "x_rows": x[0], "x_columns": x[1], "channels": x[2],
        **place("y", operands["result"]), "y_rows": y[0], "y_columns": y[1], "outputs": y[2],
        "low": clip.low, "high": clip.high}  # fmt: skip


def window(kernel, stride, before):
    """The fields of a window."""
    return dict(zip(WINDOW, (*kernel, *stride, *before), strict=True))


def command(name, **values):
    """One command of a list."""
    return (dt.Command(name, COMMANDS.words(name, **values)),)


def is_depthwise(match):
    """Whether a matched layer computes each channel by itself."""
    return isinstance(match.nodes["layer"].operator, DepthwiseConv2d)


def pack(match):
    """Weights in blocks, and per output channel bias, multiplier and right shift."""
    layer = layers.layer_of(match)
    outputs = match.result.shape[-1]
    if is_depthwise(match):  # blocks of 16 channels: rows, columns, channels
        padded = np.pad(layer.weights[0], [(0, 0), (0, 0), (0, -outputs % 16)])
        blocks = padded.reshape(*padded.shape[:2], -1, 16).transpose(2, 0, 1, 3)
    else:  # blocks of 8 outputs: rows, columns, blocks of 16 inputs, 8 x 16 weights
        inputs = layer.weights.shape[3]
        padded = np.pad(layer.weights, [(0, -outputs % 8), (0, 0), (0, 0), (0, -inputs % 16)])
        rows, columns = padded.shape[1:3]
        blocks = padded.reshape(-1, 8, rows, columns, padded.shape[3] // 16, 16).transpose(0, 2, 3, 4, 1, 5)
    parameters = np.stack([layer.bias, layer.multiplier, 31 - layer.shift], axis=1).astype("<i4")
    arrays = {"weights": blocks.astype(np.int8), "parameters": parameters}
    return {name: np.ascontiguousarray(array).reshape(-1).view(np.uint8) for name, array in arrays.items()}


def linear(match, operands):
    """A convolution, a depthwise one, or a dense layer, which is a convolution of one pixel."""
    layer = layers.layer_of(match)
    places = {name: operands[name].address for name in ("weights", "parameters")}
    return command(
        "DEPTHWISE" if is_depthwise(match) else "CONV", **ends(match, operands, layer), **places,
        **window(layer.kernel, layer.stride, layer.before), x_zero=layer.input_zero_point,
        y_zero=layer.output_zero_point)  # fmt: skip


def linear_cycles(match):
    """128 products a cycle, 8 of depthwise layers; weights and parameters come in meanwhile, 8 bytes a cycle."""
    layer, outputs = layers.layer_of(match), match.result.shape[-1]
    taps, inputs = layer.kernel[0] * layer.kernel[1], layer.weights.shape[3]
    pixels = match.result.elements // outputs
    if is_depthwise(match):
        return max(pixels * taps * -(-outputs // 8), (taps * (outputs + -outputs % 16) + 12 * outputs + 7) // 8)
    blocks = -(-outputs // 8) * -(-inputs // 16)
    return max(pixels * taps * blocks, taps * blocks * 16 + (12 * outputs + 7) // 8)


def pool(match, operands):
    """The largest of each window, or the mean."""
    operator = match.nodes["layer"].operator
    average = isinstance(operator, AveragePool2d)
    clip = match.operator("clip", Clip) if average else Clip(-128, 127, match.result.dtype)
    before = (operator.padding[0][0], operator.padding[1][0])
    shape = window(operator.kernel, operator.stride, before)
    return command("POOL", **ends(match, operands, clip), **shape, average=int(average))


def pool_cycles(match):
    """8 elements a cycle."""
    kernel, channels = match.nodes["layer"].operator.kernel, match.result.shape[-1]
    return match.result.elements // channels * kernel[0] * kernel[1] * -(-channels // 8)


def add(match, operands):
    """The sum of two images, each scaled, scaled again."""
    scalings = {name: match.operator(name, Requantize) for name in ("x_scaled", "other_scaled", "requantize")}
    numbers = {
        f"{stem}_{name}": int(match.array(f"{stem}_{name}")[0])
        for stem in ("x", "other", "y") for name in ("multiplier", "shift")}  # fmt: skip
    return command(
        "ADD", **ends(match, operands, match.operator("clip", Clip)),
        **place("other", operands[match.values["other"]]),
        x_zero=scalings["x_scaled"].input_zero_point, other_zero=scalings["other_scaled"].input_zero_point,
        y_zero=scalings["requantize"].output_zero_point, left_shift=scalings["x_scaled"].left_shift,
        **{name: 31 - value if name.endswith("shift") else value for name, value in numbers.items()})  # fmt: skip


def add_cycles(match):
    """8 elements a cycle."""
    channels = match.result.shape[-1]
    return match.result.elements // channels * -(-channels // 8)


SINGLE = dt.one_of(
    "requantisations must round once",
    lambda m: {n.operator.rounding for n in m.nodes.values() if isinstance(n.operator, Requantize)},
    {Rounding.SINGLE})  # fmt: skip
SHIFTS = dt.Constraint(
    "shifts must be 0 to 61 to the right behind the multiplier's 31 bits, less one",
    lambda m: [int((31 - m.array(name)).min()) for name in m.values if name.endswith("shift")],
    lambda v: all(1 <= least <= 62 for least in v))  # fmt: skip
SHAPES = (layers.ALL_INT8, layers.ONE_IMAGE, layers.sizes_below(1 << 16))
WINDOWS = (layers.kernel_at_most(7, 7), layers.strides_of(1, 2), layers.NO_DILATION, *layers.zero_padding_at_most(6))
WEIGHTS = (layers.NARROW_WEIGHTS, layers.SYMMETRIC_WEIGHTS, SINGLE, SHIFTS)
KINDS = {
    "convolution": (Conv2d, (*WINDOWS, layers.NO_GROUPS)),
    "depthwise": (DepthwiseConv2d, (*WINDOWS, layers.NO_MULTIPLIER)),
    "dense": (FullyConnected, (layers.ONE_ROW,))}  # fmt: skip
POOLS = (dt.Constraint(
    "a pool must have windows of at most 255x255", lambda m: m.nodes["layer"].operator.kernel,
    lambda v: max(v) <= 255),)  # fmt: skip
NO_ZERO = dt.one_of("a mean must have no zero point", lambda m: m.nodes["layer"].operator.input_zero_point, 0)


def summed():
    """The pattern of a residual addition, as TensorFlow Lite has it."""
    x, other = (
        dt.apply(Requantize, dt.operand(name), dt.constant(f"{name}_multiplier"), dt.constant(f"{name}_shift"),
                 name=f"{name}_scaled")
        for name in ("x", "other"))  # fmt: skip
    total = dt.apply(Add, x, other, name="total")
    return dt.apply(Clip, dt.apply(Requantize, total, dt.constant("y_multiplier"), dt.constant("y_shift")))


SUM = (
    SINGLE, SHIFTS, layers.ONE_SCALE,
    dt.one_of("the operands must have one shape", lambda m: m.type("x").shape == m.type("other").shape, True),
    dt.one_of("the operands must be raised alike", lambda m: m.operator("x_scaled", Requantize).left_shift
              == m.operator("other_scaled", Requantize).left_shift, True))  # fmt: skip


def offload(name, pattern, limits, commands, cycles, packed=None, layout=IMAGE):
    """What the engine takes, its values in blocks of 16 channels."""
    lies = dict.fromkeys(("x", "other", "result"), layout)
    return dt.Offload(name, pattern, (*SHAPES, *limits), packed or (lambda match: {}), commands, cycles,
                      channel_step=16, layouts=lies)  # fmt: skip


def offloads():
    """Linear layers with and without a bias, pools, and sums."""
    for kind, (operator, limits) in KINDS.items():
        for name, pattern in layers.requantised(kind, operator).items():
            own = VECTOR if operator is FullyConnected else IMAGE
            yield offload(name, pattern, (*WEIGHTS, *limits), linear, linear_cycles, pack, own)
    mean = dt.apply(Clip, dt.apply(AveragePool2d, dt.operand("x"), name="layer"))
    yield offload("average pool", mean, (*POOLS, NO_ZERO), pool, pool_cycles)
    yield offload("maximum pool", dt.apply(MaxPool2d, dt.operand("x"), name="layer"), POOLS, pool, pool_cycles)
    yield offload("sum", summed(), SUM, add, add_cycles)


def rounded_once(graph):
    """Every requantisation of the graph with one rounding."""
    def once(node):
        double = isinstance(node.operator, Requantize) and node.operator.rounding is Rounding.DOUBLE
        return replace(node, operator=replace(node.operator, rounding=Rounding.SINGLE)) if double else node
    return replace(graph, nodes=tuple(map(once, graph.nodes)))  # fmt: skip


def is_large(types, node):
    """A convolution whose kernel the engine does not have; as patches it is one of 1x1."""
    return max(types[node.inputs[1]].shape[1:3]) > 7


ENGINE = dt.Engine(
    name="kestrel", memory="sram", constants="flash", offloads=tuple(offloads()), ideal_macs_per_cycle=128.0,
    stream=dt.Stream(start="kestrel_start", wait=wait),
    dma=dt.StreamDma("kestrel_dma", bytes_per_cycle=8, setup_cycles=32, move=move),
    driver=(), files={name: HERE.with_name(name) for name in ("kestrel.c", "kestrel.h")}, headers=("kestrel.h",),
    prepare="kestrel_init", wait="kestrel_wait", defines={"KESTREL_BASE": 0x40010000},
    device=COMMANDS.device(
        "kestrel", str(HERE.with_name("kestrel_model.py")), base=0x40010000, dma="kestrel_dma",
        transfers=("DMA_LOAD", "DMA_STORE"), start=60))  # fmt: skip
TARGET = dt.Target(
    name="kestrel",
    sentence="Arm Cortex-M4, 1 MiB flash, 256 KiB RAM, command-stream engine kestrel with 64 KiB and a DMA of its own",
    core=dt.Core("cortex-m4", stack=8192), memories=(FLASH, RAM, SRAM), code="flash", values="ram", engines=(ENGINE,),
    policies=(dt.Policy("engine", "the engine requantises: one product, rounded once", (
        dt.Rewrite("one rounding", rounded_once, lsb=1),
        dt.Rewrite("patches", convolution_as_im2col(is_large), lsb=0))),))  # fmt: skip
