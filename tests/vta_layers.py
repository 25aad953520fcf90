"""Single layers on the VTA model: graphs, their streams, DRAM around them, and execution with every check."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, log2, prod, sqrt

import numpy as np

from dovetail.ir.graph import Graph, GraphBuilder, evaluate
from dovetail.ir.operators.arithmetic import Clip, ScaleShift, digit_scales
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Pad
from dovetail.ir.operators.reduction import MaxPool2d
from dovetail.ir.types import Array, DType, TensorType
from dovetail.sim.device import MemoryBus, MemoryRegion
from dovetail.target import Operand
from dovetail.targets.vta import choice, cost
from dovetail.targets.vta.checks import BufferRange, Pointers
from dovetail.targets.vta.config import VtaConfig
from dovetail.targets.vta.cost import VtaTiling
from dovetail.targets.vta.executor import Execution, execute
from dovetail.targets.vta.isa import Instruction, Uop
from dovetail.targets.vta.lower import lower
from dovetail.targets.vta.mapping import constants, page
from dovetail.targets.vta.stream import assemble, assemble_uops
from dovetail.targets.vta.writer import VtaRegion
from vta_output import check_output

BASE = 0x80000000
"""Where INP and OUT elements are counted from; the driver's page lies there."""
GAP = 4096
"""Buffers begin at its multiples, and there are at least so many bytes between them."""


@dataclass(frozen=True)
class Layer:
    """A layer with requantisation, or a pool."""

    kind: str
    """"conv", "depthwise", "dense" or "pool"."""
    size: tuple[int, int]
    """Rows and columns of the operand."""
    channels: int
    outputs: int
    """Output channels of a convolution or dense layer."""
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Rows above and below, columns left and right."""
    scale: str = "none"
    """"none", "uniform" or "channel"; "digits": per channel, of what shifts and additions make."""
    shift: str = "uniform"
    """As `scale`, or "far": per channel, beyond what one shift of the public hardware does."""
    bias: int = 0
    """Largest magnitude of a bias before the scale; 0 for no offset at all."""
    rounds: bool = False
    """Whether half a unit of the shift is in the offset (needs no scale)."""
    images: int = 1
    limits: tuple[int, int] = (-128, 127)
    alike: int = 0
    """Of a depthwise window: how many taps' weights differ, those alike behind one another; 0 for all."""

    @property
    def padded(self) -> tuple[int, int]:
        """Rows and columns with padding."""
        top, bottom, left, right = self.pads
        return self.size[0] + top + bottom, self.size[1] + left + right


def graph_of(layer: Layer, seed: int = 0) -> Graph:
    """The integer graph with random weights; rows and columns no window reads are cropped off as the compiler does."""
    random, builder = np.random.default_rng(seed), GraphBuilder("layer")
    if layer.kind == "dense":
        x = builder.input("x", TensorType((layer.images, layer.channels), DType.INT8))
    else:
        x = builder.input("x", TensorType((layer.images, *layer.size, layer.channels), DType.INT8))
    if any(layer.pads):
        top, bottom, left, right = layer.pads
        x = builder.add(Pad((0, top, left, 0), (0, bottom, right, 0), 0), [x])
    if layer.kind == "pool":
        return builder.finish([builder.add(MaxPool2d(layer.kernel, layer.stride), [x])])
    depthwise = layer.kind == "depthwise"
    outputs = layer.channels if depthwise else layer.outputs
    kernel = () if layer.kind == "dense" else layer.kernel
    shape = (1 if depthwise else outputs, *kernel, layer.channels)
    drawn = random.integers(-127, 128, shape).astype(np.int8)
    if layer.alike:
        taps = np.arange(prod(kernel)) * min(layer.alike, prod(kernel)) // prod(kernel)
        drawn = drawn.reshape(prod(kernel), -1)[taps].reshape(shape)
    weights = builder.constant("w", drawn)
    operators = {"conv": Conv2d(layer.stride), "depthwise": DepthwiseConv2d(layer.stride), "dense": FullyConnected()}
    sums = builder.add(operators[layer.kind], [x, weights])
    parameters = _requantisation(layer, random, outputs, prod(shape) // outputs)
    names = [builder.constant(name, values.astype(np.int32)) for name, values in parameters.items()]
    scaled = builder.add(ScaleShift(), [sums, *names])
    return builder.finish([builder.add(Clip(*layer.limits, DType.INT8), [scaled])])


def _requantisation(layer: Layer, random: np.random.Generator, outputs: int, taps: int) -> dict[str, Array]:
    """Scale, offset and shift that bring sums of random products into about two times the range of int8."""
    spread = {"none": (1, 2), "uniform": (90, 91)}.get(layer.scale, (60, 128))
    scale = random.integers(*spread, outputs)
    scale[0], scale[-1] = spread[0], spread[1] - 1  # so that they differ where there are two
    if layer.scale == "digits":
        scale = random.choice([each for each in digit_scales(2) if each < 128], outputs)
    most = max(0, ceil(log2(74 * 74 * sqrt(taps) * 2 / 127)) + (0 if layer.scale == "none" else 6))
    around = random.integers(most - 2, most + 3, outputs)
    around[0], around[-1] = most - 2, most + 2
    far = np.full(outputs, 17) + np.arange(outputs) % 3
    shift = {"none": np.zeros(outputs), "uniform": np.full(outputs, most), "channel": around, "far": far}[layer.shift]
    shifts = np.clip(shift, 0, 31).astype(np.int64)
    bias = random.integers(-layer.bias, layer.bias + 1, outputs)
    if layer.bias:
        bias[0] = layer.bias  # so that there are as many rows of digits as asked for
    if layer.rounds:
        bias = bias + (1 << shifts >> 1)
    return {"scale": scale, "offset": bias * scale, "shift": shifts}


@dataclass(frozen=True)
class Case:
    """A layer's stream and everything it runs with."""

    graph: Graph
    config: VtaConfig
    instructions: tuple[Instruction, ...]
    uops: tuple[Uop, ...]
    image: Array
    """DRAM from BASE on, before the run, uint8."""
    pointers: Pointers
    buffers: tuple[BufferRange, ...]
    expected: Array
    """The integer graph's result."""

    @property
    def result(self) -> BufferRange:
        """The buffer to be filled."""
        return next(buffer for buffer in self.buffers if buffer.complete)

    def memory(self) -> MemoryBus:
        """A fresh DRAM with the micro-operations of the case."""
        bus = MemoryBus([MemoryRegion("dram", BASE, len(self.image))])
        bus.view(BASE, len(self.image))[:] = self.image
        micro = np.frombuffer(assemble_uops(self.uops, self.config), np.uint8)
        bus.view(self.pointers.uop, len(micro))[:] = micro
        return bus

    @property
    def stream(self) -> bytes:
        """The instructions as the device reads them."""
        return assemble(self.instructions, self.config)

    def run(self, memory: MemoryBus) -> Execution:
        """Execute with all checks."""
        return execute(self.stream, memory, self.pointers, self.config, buffers=self.buffers)

    def found(self, memory: MemoryBus) -> Array:
        """The result a run has left, int8, in the graph's layout."""
        kept = memory.view(self.result.address, self.result.nbytes).view(np.int8)
        return unblocked(kept, self.expected.shape, self.config)

    def check(self, memory: MemoryBus) -> None:
        """Compare with the expected bytes (of a result without lanes to spare), StreamError WRONG_OUTPUT."""
        wanted = {"result": blocked(self.expected, self.config, 0).tobytes()}
        check_output(self.stream, memory, self.pointers, self.config, wanted, self.buffers)


def case_of(graph: Graph, tiling: VtaTiling, config: VtaConfig, seed: int = 0) -> Case:
    """Lower a layer and lay out DRAM around it; noise between the buffers and in the lanes to spare."""
    random = np.random.default_rng(seed)
    (x_name,), (y_name,) = graph.inputs, graph.outputs
    x_type, y_type = graph.types[x_name], graph.types[y_name]
    x = random.integers(-128, 128, x_type.shape).astype(np.int8)
    packed, known = blocked(x, config, seed), constants(graph, config)
    nbytes = {
        "page": page(config).nbytes,
        "x": packed.nbytes,
        "constants": known.blob.nbytes,
        "result": blocked_size(y_type.shape, config),
    }
    places, end = {}, 0
    for name, size in nbytes.items():
        places[name] = end
        end = -(-(end + size + GAP) // GAP) * GAP
    placed = VtaRegion(
        graph,
        (Operand(places["x"], choice.strides(x_type.shape, config)),),
        Operand(places["result"], choice.strides(y_type.shape, config)),
        known,
    )
    made = lower(placed, tiling, config)
    nbytes["uops"], places["uops"] = 4 * len(made.uops), end
    image = random.integers(0, 256, end + nbytes["uops"] + GAP).astype(np.uint8)
    for name, array in (("page", page(config)), ("x", packed), ("constants", known.blob)):
        image[places[name] : places[name] + array.nbytes] = array.reshape(-1).view(np.uint8)
    at = {name: BASE + place for name, place in places.items()}
    pointers = Pointers(at["uops"], BASE, at["constants"], at["constants"], BASE)
    buffers = tuple(
        BufferRange(name, at[name], size, name != "result", name == "result", complete=name == "result")
        for name, size in nbytes.items()
        if size
    )
    expected = evaluate(graph, {x_name: x})[y_name]
    return Case(graph, config, made.instructions, made.uops, image, pointers, buffers, expected)


def default_tiling(graph: Graph, config: VtaConfig) -> VtaTiling:
    """The schedule taken when nobody has tuned."""
    found = choice.best(cost.shape(graph, config), config)
    assert found is not None
    return found


def blocked(values: Array, config: VtaConfig, seed: int) -> Array:
    """[batch, ..., channels] as [batch block, block, ..., image lane, lane], noise in the lanes to spare."""
    full = _whole(values.shape, config)
    filled = np.random.default_rng(seed).integers(-128, 128, full).astype(np.int8)
    filled[tuple(slice(size) for size in values.shape)] = values
    middle = full[1:-1]
    split = filled.reshape(-1, config.batch, *middle, full[-1] // config.block, config.block)
    last = split.ndim - 1
    return np.ascontiguousarray(split.transpose(0, last - 1, *range(2, last - 1), 1, last))


def unblocked(flat: Array, shape: tuple[int, ...], config: VtaConfig) -> Array:
    """The values of `blocked` bytes, without the lanes to spare."""
    full = _whole(shape, config)
    middle = full[1:-1]
    split = flat.reshape(full[0] // config.batch, full[-1] // config.block, *middle, config.batch, config.block)
    last = split.ndim - 1
    whole = split.transpose(0, last - 1, *range(2, last - 1), 1, last).reshape(full)
    return whole[tuple(slice(size) for size in shape)]


def blocked_size(shape: tuple[int, ...], config: VtaConfig) -> int:
    """Bytes of a `blocked` int8 value."""
    return prod(_whole(shape, config))


def _whole(shape: tuple[int, ...], config: VtaConfig) -> tuple[int, ...]:
    return -(-shape[0] // config.batch) * config.batch, *shape[1:-1], -(-shape[-1] // config.block) * config.block


RESNET = {
    "C2": (56, 64, 64, 3, 1),
    "C3": (56, 64, 128, 3, 2),
    "C4": (56, 64, 128, 1, 2),
    "C5": (28, 128, 128, 3, 1),
    "C6": (28, 128, 256, 3, 2),
    "C7": (28, 128, 256, 1, 2),
    "C8": (14, 256, 256, 3, 1),
    "C9": (14, 256, 512, 3, 2),
    "C10": (14, 256, 512, 1, 2),
    "C11": (7, 512, 512, 3, 1),
}
"""ResNet-18's convolutions: size, input and output channels, kernel, stride (apache/tvm v0.8.0,
vta/tests/python/integration/test_benchmark_topi_conv2d.py). 3x3 ones are padded by 1."""


def resnet_layer(name: str, bias: bool) -> Layer:
    """One of RESNET: requantised by a shift alone, or with a bias and rounding."""
    size, channels, outputs, kernel, stride = RESNET[name]
    pad = kernel // 2
    rows = (size + 2 * pad - kernel) // stride * stride + kernel
    after = rows - pad - size  # trailing rows no window reads are not padded
    layer = Layer("conv", (size, size), channels, outputs, (kernel, kernel), (stride, stride))
    layer = replace(layer, pads=(pad, max(0, after), pad, max(0, after)))
    return replace(layer, bias=20_000, rounds=True) if bias else layer
