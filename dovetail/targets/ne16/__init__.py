"""A RISC-V microcontroller with an NE16 convolution engine, as GAP9 has it.

Sources of the facts: job.py and device.py; for weights pulp-platform/pulp-nnx test/Ne16Weight.py, and for
those of linear mode gvsoc/gvsoc-pulp pulp/ne16/src/ne16_matrixvec.cpp; memories and clocking after the public GAP9
descriptions (128 KiB L1, DMA of 8 bytes per cycle); L2 as a small chip has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod

import numpy as np
from numpy.typing import NDArray

import dovetail.target as dt
from dovetail import legalize
from dovetail.ir.graph import Node
from dovetail.ir.operators.arithmetic import Clip, Offset, ScaleShift
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.bits import BitProduct
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Im2col, Pad
from dovetail.ir.operators.reduction import AveragePool2d
from dovetail.ir.types import Array, DType, TensorType
from dovetail.legalize import RequantisationLimits
from dovetail.target import layers
from dovetail.target.queue_driver import queue_driver
from dovetail.targets.ne16.job import (
    CHANNELS_IN,
    CHANNELS_OUT,
    EDGE,
    Job,
    Padding,
    Requantise,
    flattened,
    job_cycles,
    launch_cycles,
    layer_cycles,
    line,
    problem,
    task_words,
)

L1 = dt.Memory("L1", base=0x10000000, size=128 * 1024)
L2 = dt.Memory("L2", base=0x1C000000, size=512 * 1024)
DMA = dt.Dma("dma", bytes_per_cycle=8, setup_cycles=16, base=0x1A100000)
DRIVER = queue_driver("dovetail.targets.ne16:driver/ne16.c", base="NE16_BASE", place="word", offset="4u * word")
QUEUE = 2
"""Launches the engine holds: one it computes, one that waits."""
LIMITS = RequantisationLimits(scale_bits=8, most_shift=31)


def job(match: dt.Match, operands: Mapping[str, dt.Operand]) -> Job:
    """The engine's job for a tile. Addresses of operands that are not given are 0."""
    dense, width, computed = _dense(match), match.result.dtype.numpy.itemsize, match.has("product")
    window = layers.PIXEL if computed else layers.window_of(match)
    x, out = (shape[-1:] if dense else shape for shape in (match.type("x").shape, match.result.shape))
    (rows, columns, inputs), (height, breadth, outputs) = layers.sizes_of(x), layers.sizes_of(out)
    nowhere = dt.Operand(0, ())
    source, target = operands.get(match.values["x"], nowhere), operands.get("result", nowhere)
    gaps = [int(match.apart(value)) for value in (match.values["x"], match.root)]  # of any size: not one line of pixels
    source_apart = source.strides[1:3] if not dense and source.strides else (columns * inputs + gaps[0], inputs)
    line = breadth * outputs * width
    target_apart = target.strides[1:3] if not dense and target.strides else (line + gaps[1], outputs * width)
    whole = Job(
        in_height=rows,
        in_width=columns,
        in_channels=inputs,
        out_height=height,
        out_width=breadth,
        out_channels=outputs,
        in_pixel_stride=source_apart[1],
        in_row_stride=source_apart[0],
        out_pixel_stride=target_apart[1],
        out_row_stride=target_apart[0],
        kernel=window.kernel[0],
        depthwise=not computed and isinstance(layers.linear_of(match), DepthwiseConv2d),
        linear=dense and dense_mode(match) == "linear",
        stride=window.stride[0],
        padding=Padding(window.before[0], window.after[0], window.before[1], window.after[1]),
        padding_value=window.padding_value if match.has("pad") else 0,
        weight_bits=weight_bits(match),
        weight_offset=-match.operator("product", BitProduct).zero_point if computed else None,
        requantise=Requantise(shift=common_shift(match)) if match.has("scale_shift") else None,
        out_bits=8 * width,
        infeat=source.address,
        outfeat=target.address,
        weights=operands.get(match.values["planes"] if computed else "weights", nowhere).address,
        scale=operands.get("scale", nowhere).address,
        scale_shift=operands.get("shift", nowhere).address,
        scale_bias=operands.get("offset", nowhere).address,
    )
    return flattened(whole)


def common_shift(match: dt.Match) -> int | None:
    """The right shift of every output channel, which a register holds; None where channels have their own, which the
    engine loads anew for every subtile."""
    found = set(match.array("shift").reshape(-1).tolist())
    return found.pop() if len(found) == 1 else None


def _dense(match: dt.Match) -> bool:
    return match.has("layer") and isinstance(layers.linear_of(match), FullyConnected)


def dense_default(match: dt.Match) -> dt.Choice:
    """Linear mode for the input sizes it has."""
    return {"mode": "pointwise" if match.type("x").shape[-1] % CHANNELS_IN else "linear"}


def dense_knobs(match: dt.Match) -> dt.Space:
    """How a dense layer is computed: linear mode takes 256 inputs at a time, one bit of the weights after the other;
    as a 1x1 convolution of one pixel it takes 16, all bits together."""
    depth = match.type("x").shape[-1]
    default = str(dense_default(match)["mode"])
    other = "linear" if default == "pointwise" else "pointwise"

    def problem(choice: dt.Choice) -> str | None:
        if choice.get("mode") == "linear" and depth % CHANNELS_IN:
            return f"linear mode needs a multiple of {CHANNELS_IN} inputs; here: {depth}"
        return None

    return dt.Space((dt.Knob("mode", (default, other), "the engine's mode for a dense layer"),), problem)


def dense_mode(match: dt.Match) -> str:
    """The mode that is chosen for a dense layer, or the default's."""
    return str({**dense_default(match), **match.choice}["mode"])


def weight_bits(match: dt.Match) -> int:
    """Bits the weights are stored with: those of their type, at least 2."""
    return 8 if match.has("product") else max(match.type("weights").dtype.bits, 2)


def _unsigned(weights: NDArray[np.integer], bits: int) -> NDArray[np.uint8]:
    """Weights plus 2**(bits-1), so that they are stored without a sign; ValueError when one has more bits."""
    half = 1 << (bits - 1)
    if weights.size and not (-half <= int(weights.min()) and int(weights.max()) < half):
        raise ValueError(f"weights of {bits} bits lie in {-half}..{half - 1}, not {weights.min()}..{weights.max()}")
    return weights.astype(np.uint8) + np.uint8(half)


def pack_weights(weights: NDArray[np.integer], bits: int, depthwise: bool) -> NDArray[np.uint8]:
    """The bytes the engine reads for a convolution.

    Args:
        weights: signed, (C_out, kh, kw, C_in); depthwise: (C, kh, kw, 1).
        bits: bits per weight, 2..8.
        depthwise: whether the layer is depthwise.

    Returns:
        uint8, ordered (C_out, groups of 16 inputs, bit, tap, 2 bytes), the
        channels of a group from the lowest bit up; a depthwise layer packs its channels like inputs. Missing
        channels are stored as zero bits. The engine adds -2**(bits-1) to every stored weight.
    """
    stored = _unsigned(weights, bits)
    if depthwise:
        stored = stored.transpose(3, 1, 2, 0)
    rows, height, width, channels = stored.shape
    groups = -(-channels // CHANNELS_IN)
    padded = np.zeros((rows, height * width, groups * CHANNELS_IN), np.uint8)
    padded[:, :, :channels] = stored.reshape(rows, height * width, channels)
    planes = _planes(padded.reshape(rows, height * width, groups, CHANNELS_IN), bits)
    # (row, tap, group, byte, bit) -> (row, group, bit, tap, byte)
    return planes.transpose(0, 2, 4, 1, 3).reshape(-1)


def _planes(stored: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Bit planes of bytes: [..., channels] -> [..., channels / 8, bits], the channels of a byte from the lowest bit up.

    Eight bytes are a matrix of 8 x 8 bits, which is transposed as one word: bits, pairs and fours change places.
    """
    words = np.ascontiguousarray(stored).view("<u8").astype(np.uint64)
    for shift, mask in ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0x00000000F0F0F0F0)):
        moved = (words ^ words >> np.uint64(shift)) & np.uint64(mask)
        words ^= moved ^ moved << np.uint64(shift)
    return words.astype("<u8").view(np.uint8).reshape(*words.shape, 8)[..., :bits]


def pack_linear_weights(weights: NDArray[np.integer], bits: int) -> NDArray[np.uint8]:
    """The bytes the engine reads in linear mode: (C_out, bit, C_in / 8 bytes), inputs from the lowest bit up.

    Args:
        weights: signed, (C_out, C_in); C_in a multiple of 16.
        bits: bits per weight, 2..8.
    """
    if weights.shape[1] % CHANNELS_IN:
        raise ValueError(f"linear mode needs a multiple of {CHANNELS_IN} inputs, not {weights.shape[1]}")
    return _planes(_unsigned(weights, bits), bits).transpose(0, 2, 1).reshape(-1)


def pack(match: dt.Match) -> dict[str, Array]:
    """Weights in bit planes; scale and shift as a byte, offset as a word per channel; no shifts where all are equal."""
    if match.has("product"):
        return {}
    weights, bits = match.array("weights"), weight_bits(match)
    if _dense(match):
        depth = weights.shape[1]
        square = weights.reshape(weights.shape[0], 1, 1, depth)
        is_linear = dense_mode(match) == "linear"
        packed = pack_linear_weights(weights, bits) if is_linear else pack_weights(square, bits, False)
    elif isinstance(layers.linear_of(match), DepthwiseConv2d):
        packed = pack_weights(np.ascontiguousarray(weights.transpose(3, 1, 2, 0)), bits, True)
    else:
        packed = pack_weights(weights, bits, False)
    found = {"weights": packed.reshape(-1)}
    if match.has("scale_shift"):
        channels = match.result.shape[-1]
        found["scale"] = np.broadcast_to(match.array("scale"), channels).astype(np.uint8)
        if common_shift(match) is None:
            found["shift"] = match.array("shift").astype(np.uint8)
        found["offset"] = np.broadcast_to(match.array("offset"), channels).astype("<i4").view(np.uint8)
    return found


def commands(match: dt.Match, operands: Mapping[str, dt.Operand]) -> tuple[dt.Command, ...]:
    """One start of the engine, which walks stride-2 layers itself."""
    return (dt.Command("ne16_start", task_words(job(match, operands))),)


def cycles(match: dt.Match) -> int:
    """Engine cycles of a tile."""
    return job_cycles(job(match, {}))


def starting(match: dt.Match) -> int:
    """Cycles the driver goes along with a grid of launches, of which the engine takes two at a time."""
    whole = job(match, {})
    launches = whole.grid[0] * whole.grid[1]
    return job_cycles(whole) * max(launches - QUEUE, 0) // launches


CONSTRAINTS = (
    dt.one_of("activations must be uint8", lambda m: m.type("x").dtype.text, "uint8"),
    layers.NARROW_WEIGHTS.worded("weights must have 2 to 8 bits, signed"),
    layers.SYMMETRIC_WEIGHTS,
    layers.SYMMETRIC_OPERAND.worded("the operand's zero point must be folded into the bias"),
    layers.BATCH,
)
REQUANTISED = (
    dt.one_of(
        "outputs must be uint8, clipped to 0..255 only",
        lambda m: [m.result.dtype.text, m.operator("clip", Clip).low, m.operator("clip", Clip).high],
        ["uint8", 0, 255],
    ),
    dt.Constraint("the scale must be 0 to 255", layers.range_of("scale"), lambda v: v[0] >= 0 and v[1] <= 255),
)
IMAGE = (
    layers.kernels_of(1, 3),
    layers.strides_of(1, 2).worded("the stride must be 1x1 or 2x2"),
    layers.NO_DILATION,
)
WINDOWS: dict[type[Operator], tuple[dt.Constraint, ...]] = {
    Conv2d: (*IMAGE, layers.NO_GROUPS),
    DepthwiseConv2d: (*IMAGE, layers.NO_MULTIPLIER, layers.kernels_of(3).worded("a depthwise kernel must be 3x3")),
}
"""Limits of a layer's shape and window, by its operator."""
LIMIT = (dt.one_of("the job must be one the engine has", lambda m: problem(job(m, {})), ""),)


def _of_computed() -> dt.Offload:
    """A 1x1 convolution whose weights are bits that the core took apart: a product of two computed matrices."""
    pattern = dt.apply(BitProduct, dt.operand("x"), dt.operand("planes"), name="product")
    packed = dt.one_of("bits must lie in groups of 16", lambda m: m.type("planes").shape[-1], CHANNELS_IN // 8)
    limits = (CONSTRAINTS[0], layers.BATCH, packed, *LIMIT)
    made = dt.Offload("product of computed matrices, 32-bit results", pattern, limits, pack, commands, cycles)
    return replace(made, channel_step=CHANNELS_OUT, row_step=6, starting=starting)


def _offloads() -> tuple[dt.Offload, ...]:
    """Every layer kind, with and without requantisation, padded by the engine where it can."""
    kinds = (
        ("convolution", Conv2d, WINDOWS[Conv2d], CHANNELS_OUT),
        ("depthwise convolution", DepthwiseConv2d, WINDOWS[DepthwiseConv2d], 16),
        ("dense", FullyConnected, (), CHANNELS_OUT),
    )
    found = []
    for name, kind, limits, step in kinds:
        for padded in (True, False) if kind is not FullyConnected else (False,):
            x = dt.operand("x")
            layer = dt.apply(kind, dt.maybe(Pad, x, name="pad") if padded else x, dt.constant("weights"), name="layer")
            scaled = dt.apply(
                ScaleShift, layer, dt.constant("scale"), dt.constant("offset"), dt.constant("shift"), name="scale_shift"
            )
            shared = (*CONSTRAINTS, *limits, *LIMIT)
            full = (*REQUANTISED, *shared)
            label = f"padded {name}" if padded else name
            own = (dense_knobs, dense_default) if kind is FullyConnected else (None, None)
            for text, pattern, constraints in (
                (label, dt.apply(Clip, scaled), full),
                (f"{label}, 32-bit results", layer, shared),
            ):
                offload = dt.Offload(text, pattern, constraints, pack, commands, cycles, channel_step=step, row_step=6)
                found.append(replace(offload, knobs=own[0], default=own[1], starting=starting))
    return (*sorted(found, key=lambda offload: "32-bit" in offload.name), _of_computed())


def takes(types: Mapping[str, TensorType], node: Node) -> bool:
    """Whether the engine has the shape of a linear layer (used to choose rewrites, before patterns are matched)."""
    if isinstance(node.operator, FullyConnected):
        return types[node.inputs[0]].shape[:-1] == (1,)
    limits = WINDOWS.get(type(node.operator))
    return limits is not None and layers.keeps((layers.BATCH, *limits), types, node)


def is_bytes(types: Mapping[str, TensorType], node: Node) -> bool:
    """Whether a layer reads what the engine reads."""
    return types[node.inputs[0]].dtype is DType.UINT8


def has_undilated(types: Mapping[str, TensorType], node: Node) -> bool:
    """Whether the engine has a dilated layer's window without the dilation, in one job or as patches."""
    x, weights = (types[name].shape for name in node.inputs[:2])
    if isinstance(node.operator, DepthwiseConv2d):
        return is_bytes(types, node) and weights[1:3] == (3, 3) and weights[3] == x[3]
    return is_bytes(types, node) and weights[3] == x[3]


_MOST_PRODUCTS, _MOST_DEPTH = 64, 4096
_FEWEST_ROWS = 4


def products_pay(types: Mapping[str, TensorType], node: Node) -> bool:
    """Whether a product of computed matrices is worth taking the right one's bits apart: about 8 cycles of the core an
    element, where each element of the result costs it about as many for each of the inputs."""
    left, result = types[node.inputs[0]].shape, types[node.output].shape
    return result[-2] >= _FEWEST_ROWS and left[-1] <= _MOST_DEPTH and prod(result[:-2]) <= _MOST_PRODUCTS


def patches_pay(types: Mapping[str, TensorType], node: Node) -> bool:
    """Whether a convolution is faster, or only possible, as a 1x1 convolution of patches gathered by the DMA."""
    operator = node.operator
    assert isinstance(operator, Conv2d)
    if (
        operator.dilation[1] != 1
        or types[node.inputs[0]].shape[0] != 1
        or types[node.inputs[0]].dtype is not DType.UINT8
    ):
        return False
    kernel, (_, height, width, channels) = types[node.inputs[1]].shape, types[node.output].shape
    depth = kernel[1] * kernel[2] * kernel[3]
    gather = kernel[1] * height * width * -(-kernel[2] * kernel[3] // DMA.bytes_per_cycle)
    as_patches = gather + layer_cycles(height, width, depth, channels, kernel=1, channel_shift=True)
    if not takes(types, node):
        return True
    direct = layer_cycles(height, width, kernel[3], channels, kernel=3, stride=operator.stride[0], channel_shift=True)
    return as_patches < direct


def strided_patches_pay(types: Mapping[str, TensorType], node: Node) -> bool:
    """Whether a layer that the engine would walk in launches of two by two outputs ends sooner as a 1x1 convolution of
    patches, gathered in bands, that lie beside the image in a half of L1."""
    image, weights, result = (types[name].shape for name in (*node.inputs[:2], node.output))
    operator = node.operator
    assert isinstance(operator, Conv2d)
    if not is_bytes(types, node) or operator.stride != (2, 2) or not takes(types, node) or weights[1] != EDGE:
        return False
    if prod(image) + prod(result[:3]) * prod(weights[1:]) > L1.size // 2:
        return False
    direct = layer_cycles(*result[1:3], weights[3], result[3], stride=2, channel_shift=True)
    return _patches_ahead(image, result, weights[1:], 0)[0] < direct


def patch_bands(
    types: Mapping[str, TensorType], chain: Sequence[Node], beside: Sequence[Node]
) -> Sequence[tuple[int, int]]:
    """The bands in which patches end soonest that the DMA gathers while the engine computes those before."""
    (patches,) = (node for node in chain if isinstance(node.operator, Im2col))
    assert isinstance(patches.operator, Im2col)
    image, result = types[patches.inputs[0]].shape, types[chain[-1].output].shape
    layers = [node for node in beside if isinstance(node.operator, Conv2d | DepthwiseConv2d)]
    busy = sum(_rows_cycles(types, node, types[node.output].shape[1]) for node in layers)
    return _patches_ahead(image, result, (*patches.operator.kernel, image[3]), busy)[1]


def _patches_ahead(
    image: Sequence[int], result: Sequence[int], kernel: Sequence[int], busy: int
) -> tuple[float, Sequence[tuple[int, int]]]:
    """When a layer of patches of a padded image ends, in cycles, and its bands; the kernel is (rows, columns, channels),
    and the engine has other work for some cycles first."""
    step = DMA.bytes_per_cycle
    gathered = prod(image) / step / result[1] + kernel[0] * result[2] * -(-kernel[1] * kernel[2] // step)

    def moved(rows: int) -> float:
        return gathered * rows + _COPY * (kernel[0] + 1)

    def engine(rows: int) -> int:
        walked = line(rows, result[2])[:2]
        return _COPY + layer_cycles(*walked, prod(kernel), result[3], kernel=1, channel_shift=True)

    return legalize.bands_ahead(result[1], moved, engine, busy)


def pools(types: Mapping[str, TensorType], node: Node) -> bool:
    """Whether the engine has the window of an average pool, as a depthwise layer."""
    operator = node.operator
    assert isinstance(operator, AveragePool2d)
    images, height, width, _ = types[node.output].shape
    walks = height * width == 1 or operator.stride in ((1, 1), (2, 2))
    return images == 1 and operator.kernel == (3, 3) and walks


_MOST_TOGETHER = 4
"""Pixels computed as one, at most."""
_SUMMED, _SUMS = 1.5, 4
"""Cycles the core sums a byte in, and adds one channel's sum of a further band to those before."""
_QUICK = 2000
"""Cycles of a pool for which no bands pay: fewer would save cycles too, but each is two layers more to read."""
_COPY = 100
"""Cycles of the core and the DMA around each transfer of a band."""
_BAND = 300
"""Cycles a further band costs beside its patches: its launch, the waits between and the rows two bands share."""

_PART = 150
"""Elements of a result for which a further part pays: fewer save cycles too, but a part is a layer more to read."""


def bands(types: Mapping[str, TensorType], chain: Sequence[Node]) -> int:
    """How many bands hide most of what the core and the DMA do before a first layer."""
    first = sum(types[node.output].elements for node in chain if isinstance(node.operator, Offset))
    windows = [node for node in chain if isinstance(node.operator, Im2col)]
    moved = sum(types[node.output].elements for node in windows)
    copies = sum(node.operator.kernel[0] for node in windows if isinstance(node.operator, Im2col))
    count: int = round(((first + moved / 4) / (_BAND + _COPY * copies)) ** 0.5)
    return count + (count > 1)


def pool_bands(types: Mapping[str, TensorType], chain: Sequence[Node]) -> Sequence[tuple[int, int]]:
    """The bands of an image whose average the core makes, with which that ends soonest."""
    (_, height, width, channels), linear = types[chain[-1].output].shape, (Conv2d, DepthwiseConv2d)
    layers = [node for node in chain if isinstance(node.operator, linear)]

    def engine(rows: int) -> int:
        return sum(_rows_cycles(types, node, rows) for node in layers)

    def core(rows: int) -> float:
        return rows * width * channels * _SUMMED + channels * _SUMS + _COPY

    return legalize.bands_behind(height, engine, core) if core(height) > _QUICK else ()


def _rows_cycles(types: Mapping[str, TensorType], node: Node, rows: int) -> int:
    """Engine cycles of some rows of a layer's result."""
    assert isinstance(node.operator, Conv2d | DepthwiseConv2d)
    (_, _, width, channels), depth = types[node.output].shape, types[node.inputs[0]].shape[3]
    kernel = types[node.inputs[1]].shape[1]
    if kernel == 1:
        rows, width, _ = line(rows, width)
    mode = {"kernel": kernel, "depthwise": isinstance(node.operator, DepthwiseConv2d), "channel_shift": True}
    return layer_cycles(rows, width, depth, channels, stride=node.operator.stride[0], **mode)


def result_parts(result: TensorType) -> int:
    """How many parts hide most of what the core does for a dense layer's result."""
    count: int = round((result.elements / _PART) ** 0.5)
    return count


def pixels_together(result: TensorType, depth: Callable[[int], int]) -> int:
    """How many pixels of a 1x1 convolution are computed fastest as one of as many times the channels."""
    (_, height, width, channels) = result.shape

    def cycles(count: int) -> int:
        rows, columns, _ = line(height, width // count)
        return launch_cycles(rows, columns, depth(count), channels * count, kernel=1, channel_shift=True)

    return min((count for count in range(1, _MOST_TOGETHER + 1) if width % count == 0), key=cycles)


def windows_together(types: Mapping[str, TensorType], node: Node) -> int:
    """How many neighbouring pixels of a 3x3 layer are computed fastest as one of as many times the channels, by a
    convolution; 0 where the layer as it is is faster than that and the fetching of as many more weights."""
    (_, height, width, outputs), (*_, inputs) = types[node.output].shape, types[node.inputs[0]].shape
    operator, weights = node.operator, types[node.inputs[1]]
    assert isinstance(operator, Conv2d | DepthwiseConv2d)
    if not takes(types, node) or weights.shape[1:3] != (EDGE, EDGE):
        return 0
    mode = {"weight_bits": max(weights.dtype.bits, 2), "channel_shift": True, "stride": operator.stride[0]}
    depthwise = isinstance(operator, DepthwiseConv2d)

    def cycles(count: int) -> float:
        if count == 0:
            return layer_cycles(height, width, inputs, outputs, depthwise=depthwise, **mode)
        groups = -(-inputs * count // CHANNELS_IN)
        fetched = groups * outputs * count * EDGE**2 * CHANNELS_IN * mode["weight_bits"] / 8
        return layer_cycles(height, width // count, inputs * count, outputs * count, **mode) + (
            fetched / DMA.bytes_per_cycle
        )

    most = _MOST_TOGETHER if operator.stride == (1, 1) else 1
    counts = [count for count in range(most + 1) if count == 0 or width % count == 0]
    return min(counts if depthwise else [count for count in counts if count != 1], key=cycles)


ENGINE = dt.Engine(
    name="ne16",
    memory=L1.name,
    offloads=_offloads(),
    ideal_macs_per_cycle=162.0,
    driver=("dovetail.targets.ne16:driver/ne16.h",),
    files={"ne16.c": DRIVER},
    device=dt.DeviceModel("dovetail.targets.ne16.device:Ne16Device", base=0x00201000, size=0x100),
    wait="ne16_wait",
    queue=QUEUE,
    launching=90,
    prepare="ne16_init",
)
SHARED = (
    dt.Rewrite("unsigned", legalize.unsigned_activations, lsb=0),
    dt.Rewrite("rows as pixels", legalize.dense_as_convolution(is_bytes), lsb=0),
    dt.Rewrite("products", legalize.products_of_bits(products_pay, CHANNELS_IN), lsb=0),
    dt.Rewrite("dilation", legalize.without_dilation(has_undilated), lsb=0),
    dt.Rewrite("patches", legalize.convolution_as_im2col(patches_pay), lsb=0),
    dt.Rewrite("stride", legalize.stride_as_slice(is_bytes), lsb=0),
    dt.Rewrite("narrow weights", legalize.narrow_weights(), lsb=0),
)
TARGET = dt.Target(
    name="ne16",
    sentence="RISC-V RV32IMC, 512 KiB L2, 128 KiB L1, DMA, NE16 engine (2- to 8-bit weights)",
    core=dt.Core("rv32imc"),
    memories=(L2, L1),
    code=L2.name,
    values=L2.name,
    dma=DMA,
    engines=(ENGINE,),
    quantisation=dt.Quantisation(packed=True, wide_sums=True),
    policies=(
        dt.Policy(
            "engine",
            "the engine requantises with its own scale and shift",
            (
                *SHARED,
                dt.Rewrite("requantisation", legalize.engine_requantisation(takes, LIMITS), lsb=2),
                dt.Rewrite("residual", legalize.addition_as_convolution(LIMITS), lsb=2),
                dt.Rewrite("pools", legalize.average_pool_as_depthwise(pools, LIMITS), lsb=0),
                dt.Rewrite("pools in bands", legalize.average_pool_in_bands(pool_bands), lsb=0, divides=True),
                dt.Rewrite("strided patches", legalize.convolution_as_im2col(strided_patches_pay, shifted=True), lsb=0),
                dt.Rewrite("pixels together", legalize.pixels_as_one(pixels_together), lsb=0),
                dt.Rewrite("windows together", legalize.windows_as_one(windows_together), lsb=0),
                dt.Rewrite("pads first", legalize.padding_before_offset, lsb=0),
                dt.Rewrite("bands", legalize.first_layer_in_bands(bands, EDGE), lsb=0, divides=True),
                dt.Rewrite("patches in bands", legalize.patches_in_bands(patch_bands), lsb=0, divides=True),
                dt.Rewrite("parts", legalize.last_layer_in_parts(result_parts, CHANNELS_OUT), lsb=0, divides=True),
                dt.Rewrite("split bias", legalize.split_bias(takes), lsb=0),
            ),
        ),
        dt.Policy(
            "exact",
            "the engine gives 32-bit sums, the core requantises as TFLite Micro does",
            (*SHARED, dt.Rewrite("split bias", legalize.split_bias(takes), lsb=0)),
        ),
    ),
)
