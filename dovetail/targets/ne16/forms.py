"""Layers the engine takes, and the form in which one is computed soonest: what the rewrites of a policy ask, in
cycles of the engine, the DMA and the core."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from math import prod

import dovetail.target as dt
from dovetail import legalize
from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.arithmetic import Offset
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Im2col, Transpose
from dovetail.ir.types import DType, TensorType
from dovetail.target import layers
from dovetail.targets.ne16.job import CHANNELS_IN, EDGE, launch_cycles, layer_cycles, line

L1 = dt.Memory("L1", base=0x10000000, size=128 * 1024)
DMA = dt.Dma("dma", bytes_per_cycle=8, setup_cycles=16, base=0x1A100000)
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
    if node.operator.is_channelwise:
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


@cache
def strided_as_patches(near: int) -> Callable[[Graph], Graph]:
    """The rewrite of strided layers to patches where that pays, with so many bytes of L1."""
    return legalize.convolution_as_im2col(partial(strided_patches_pay, near), shifted=True)


def strided_patches_pay(near: int, types: Mapping[str, TensorType], node: Node) -> bool:
    """Whether a layer that the engine would walk in launches of two by two outputs ends sooner as a 1x1 convolution of
    patches gathered in bands: the image, as it is and padded, patches and result lie in `near` bytes of L1 together."""
    image, weights, result = (types[name].shape for name in (*node.inputs[:2], node.output))
    operator = node.operator
    assert isinstance(operator, Conv2d)
    if not is_bytes(types, node) or operator.stride != (2, 2) or not takes(types, node) or weights[1] != EDGE:
        return False
    if 2 * prod(image) + prod(result[:3]) * prod(weights[1:]) + prod(result) > near:
        return False
    direct = layer_cycles(result[1], result[2], weights[3], result[3], stride=2, channel_shift=True)
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
    """When a layer of patches of a padded image ends, in cycles, and its bands. A kernel has (rows, columns, channels);
    the engine has other work for some cycles first."""
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
    window = node.operator.window([types[node.inputs[0]]])
    images, height, width, _ = types[node.output].shape
    if window is None or images != 1:
        return False
    return window.kernel == (3, 3) and (height * width == 1 or window.stride in ((1, 1), (2, 2)))


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

_ADDED = 10
"""Cycles the core adds an element of two images in."""


def additions_pay(image: TensorType) -> bool:
    """Whether the engine adds two images, as a 1x1 convolution of both, sooner than the core: with many channels nearly
    all of its products are zeros."""
    rows, columns, _ = line(*image.shape[1:3])
    channels = image.shape[3]
    engine = layer_cycles(rows, columns, 2 * channels, channels, kernel=1, channel_shift=False)
    return engine + 2 * channels**2 / DMA.bytes_per_cycle < _ADDED * image.elements


_PART = 150
"""Elements of a result for which a further part pays: fewer save cycles too, but a part is a layer more to read."""


def bands(types: Mapping[str, TensorType], chain: Sequence[Node]) -> int:
    """How many bands hide most of what the core and the DMA do before a first layer."""
    first = sum(types[node.output].elements for node in chain if isinstance(node.operator, Offset))
    windows = [node for node in chain if isinstance(node.operator, Im2col)]
    moved = sum(types[node.output].elements for node in windows)
    copies = sum(node.operator.kernel[0] for node in windows if isinstance(node.operator, Im2col))
    count: int = round(((first + moved / 4) / (_BAND + _COPY * copies)) ** 0.5)
    # planes are moved byte by byte, which takes longer than all else: one band more hides nothing
    planar = any(isinstance(node.operator, Transpose) for node in chain)
    return count + (count > 1 and not planar)


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
    mode = {"kernel": kernel, "depthwise": node.operator.is_channelwise, "channel_shift": True}
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
    depthwise = operator.is_channelwise

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


def attention_pays(macs: int) -> bool:
    """Whether the engine computes attention of so many multiply-accumulates. The core makes one in 3 cycles; the engine
    takes three launches, for which the core makes ready and whose sums it ends, some 6,000 cycles."""
    return macs > 4096
