"""Small models at the edges of what compiler stages do, always the same: what every run of scripts/fuzz.py begins with.

Each has several results, so that one firmware shows many edges. TensorFlow Lite Micro says what the TFLite ones mean,
bit for bit; ONNX Runtime what the ONNX ones mean, in real numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import permutations

import numpy as np

from dovetail.targets import BUILT_IN
from oracles import TensorEntry, network_file, run_micro_often
from property_batches import Case
from random_qdq import QdqModel, Step, drawn
from random_tflite import STEPS, bias, image, products, summed, weights, windows
from random_tflite_more import STEPS as FURTHER
from test_random_tflite_more import BY_LITERT
from tflite_maker import Maker, words

POOLS = ("AVERAGE_POOL_2D", "MAX_POOL_2D")


def _layer(
    m: Maker, x: int, outputs: int, kernel: int = 3, stride: int = 1, *, same: bool = True, depthwise: bool = False,
    activation: int = 0, zero_point: int = 3, most: int = 127, factor: float = 0.0, dilation: tuple[int, int] = (1, 1),
    across: int = 0,
) -> int:  # fmt: skip
    """A convolution with a scale for each channel and a bias; weights are at most `most`, results about sums times
    `factor`, or fill their type; the stride along columns is `across`, or that along rows."""
    batch, rows, columns, depth = m.shape(x)
    shape = (1, kernel, kernel, outputs) if depthwise else (outputs, kernel, kernel, depth)
    scales = tuple(2.0**-7 if m.ties else 0.01 * (1 + 0.07 * (channel % 11)) for channel in range(outputs))
    data = m.rng.integers(-most, most + 1, shape).astype(np.int8)
    w = m.add(TensorEntry("w", shape, "int8", scales, 0, data, 3 if depthwise else 0))
    steps = tuple(float(np.float32(m.scale(x)) * np.float32(scale)) for scale in scales)
    taps = kernel * kernel * (1 if depthwise else depth)
    reach = int(products(m, w, taps) * most / 127) + 1
    b = m.add(TensorEntry("b", (outputs,), "int32", steps, 0, m.rng.integers(-reach, reach, outputs).astype(np.int32)))
    strides = (stride, across or stride)
    spans = zip((rows, columns), dilation, strides, strict=True)
    size = [windows(n, (kernel - 1) * apart + 1, step, same) for n, apart, step in spans]
    y = m.add(m.entry((batch, *size, outputs), m.even(m.scale(x) * scales[0] / (factor or 60 / reach)), zero_point))
    kind = "DEPTHWISE_CONV_2D" if depthwise else "CONV_2D"
    multiplied = {"depthMultiplier": outputs // depth} if depthwise else {}
    return m.call(
        kind, [x, w, b], y, "DepthwiseConv2DOptions" if depthwise else "Conv2DOptions", 3, padding=int(not same),
        strideH=stride, strideW=strides[1], dilationHFactor=dilation[0], dilationWFactor=dilation[1],
        fusedActivationFunction=activation, **multiplied,
    )  # fmt: skip


def _pool(m: Maker, x: int, opcode: str, kernel: int, stride: int) -> int:
    batch, rows, columns, depth = m.shape(x)
    y = m.alike(x, (batch, windows(rows, 0, stride, True), windows(columns, 0, stride, True), depth))
    return m.call(
        opcode, [x], y, "Pool2DOptions", padding=0, strideH=stride, strideW=stride, filterHeight=kernel,
        filterWidth=kernel, fusedActivationFunction=0,
    )  # fmt: skip


def _moved(m: Maker, x: int, order: Sequence[int]) -> int:
    shape = m.shape(x)
    y = m.alike(x, [shape[axis] for axis in order])
    return m.call("TRANSPOSE", [x, m.integers(order)], y, "TransposeOptions")


def _joined(m: Maker, parts: Sequence[int]) -> int:
    shape = m.shape(parts[0])
    y = m.alike(parts[0], (*shape[:-1], sum(m.shape(part)[-1] for part in parts)))
    return m.call("CONCATENATION", parts, y, "ConcatenationOptions", axis=3, fusedActivationFunction=0)


def borders(m: Maker) -> list[int]:
    """Windows over borders: odd sizes, so that those at the bottom and at the right leave the image."""
    found = []
    for rows, columns in ((7, 5), (6, 9)):
        x = m.add(m.entry((1, rows, columns, 3), 0.05, -11))
        found += [
            _pool(m, x, opcode, kernel, stride) for opcode in POOLS for kernel, stride in ((3, 1), (3, 2), (2, 2))
        ]
        found += [_layer(m, x, 4, 3, 2), _layer(m, x, 6, 3, 2, depthwise=True), _layer(m, x, 2, 5, 3)]
    return found


def slices(m: Maker) -> list[int]:
    """Parts that begin and end inside, with steps."""
    x = m.add(m.entry((1, 7, 6, 5), 0.05, 9))
    found = []
    for start, stop, step in (
        ((0, 1, 2, 1), (1, 6, 5, 4), (1, 1, 1, 1)), ((0, 2, 0, 0), (1, 7, 6, 5), (1, 2, 3, 1)),
        ((0, 0, 1, 0), (1, 7, 6, 5), (1, 1, 2, 2)), ((0, 3, 0, 0), (1, 5, 6, 5), (1, 1, 1, 1)),
    ):  # fmt: skip
        size = [-(-(high - low) // by) for low, high, by in zip(start, stop, step, strict=True)]
        operands = [x, *map(m.integers, (start, stop, step))]
        found.append(m.call("STRIDED_SLICE", operands, m.alike(x, size), "StridedSliceOptions"))
    return found


def transposes(m: Maker) -> list[int]:
    """Every order of four axes, and two orders after another."""
    x = m.add(m.entry((2, 3, 4, 5), 0.05, 0))
    found = [_moved(m, x, order) for order in permutations(range(4))]
    pairs = (((0, 2, 3, 1), (0, 2, 1, 3)), ((1, 2, 3, 0), (0, 2, 1, 3)), ((3, 0, 2, 1), (1, 0, 3, 2)))
    even = m.add(m.entry((3, 3, 3, 3), 0.05, 0))
    return found + [_moved(m, _moved(m, value, first), second) for value in (even, x) for first, second in pairs]


def alike(m: Maker) -> list[int]:
    """Operators of one kind on one value that differ in their attributes, and some that do not."""
    x = m.add(m.entry((1, 6, 7, 4), 0.05, -20))
    found = [_joined(m, [_pool(m, x, opcode, kernel, 1) for kernel in (3, 5, 2, 3)]) for opcode in POOLS]
    cut = [m.call(kind, [x], m.alike(x, m.shape(x)), version=1) for kind in ("RELU6", "RELU", "RELU6")]
    return [*found, _joined(m, cut)]


def rounded(m: Maker) -> list[int]:
    """Few, small sums, of which many lie on a half; with and without an activation."""
    x = m.add(m.entry((1, 9, 9, 1), 0.05, 0))
    return [
        _layer(m, x, 8, 1, zero_point=zero, activation=activation, most=7, factor=factor)
        for zero in (-30, 5) for activation in (0, 1) for factor in (0.06, 0.12)
    ]  # fmt: skip


def clamped(m: Maker) -> list[int]:
    """Results whose zero point is an end of their type: only one of the two limits cuts."""
    found = []
    for dtype, factor, zeros in (("int16", 256.0, (127, -128, 120)), ("int8", 1.0, (127, -128))):
        x = m.add(TensorEntry(f"x{dtype}", (1, 5, 5, 3), dtype, (0.05 / factor,), 0))
        for zero in zeros:
            y = m.add(TensorEntry(f"t{len(m.tensors)}", (1, 5, 5, 3), "int8", (0.055,), zero))
            found.append(m.call("QUANTIZE", [x], y, "QuantizeOptions"))
    x = m.add(m.entry((1, 5, 5, 1), 0.05, 0))
    return [*found, *(_layer(m, x, 4, 1, zero_point=zero, most=3, factor=0.5) for zero in (127, -128))]


def dilated(m: Maker) -> list[int]:
    """Taps that are apart, by other steps along rows than along columns, with strides that differ too."""
    x = m.add(m.entry((1, 9, 8, 4), 0.05, -6))
    return [
        _layer(m, x, 4, 3, stride, dilation=steps, across=across, same=same, depthwise=depthwise)
        for steps, stride, across, same in (((2, 1), 1, 1, True), ((1, 3), 1, 1, False), ((3, 2), 1, 2, True))
        for depthwise in (False, True)
    ]


def flattened(m: Maker) -> list[int]:
    """Layers whose results are turned, or not, and read as rows by dense layers."""
    found = []
    for order in ((0, 1, 2, 3), (0, 3, 1, 2), (0, 2, 3, 1)):
        turned = _moved(m, _layer(m, m.add(m.entry((2, 4, 3, 5), 0.05, 4)), 6), order)
        flat = m.call("RESHAPE", [turned, m.integers((2, 72))], m.alike(turned, (2, 72)), "ReshapeOptions", 1)
        w = weights(m, (7, 72), 0)
        operands = [flat, w, *bias(m, flat, w, 7, 72)]
        y = summed(m, (2, 7), flat, w, 72)
        found.append(m.call("FULLY_CONNECTED", operands, y, "FullyConnectedOptions", 5, keepNumDims=False))
    return found


def shifted(m: Maker) -> list[int]:
    """Values that only get another zero point, read by a layer, a pool and nobody."""
    x = m.add(m.entry((1, 6, 5, 4), 0.05, -17))
    found = []
    for zero in (-16, 40, -128, 127):
        moved = m.call("QUANTIZE", [x], m.add(m.entry(m.shape(x), 0.05, zero)), "QuantizeOptions")
        found += [moved, _layer(m, moved, 3), _pool(m, moved, "MAX_POOL_2D", 2, 2)]
    return found


def averaged(m: Maker) -> list[int]:
    """Means of many values, in the same steps and in others."""
    found = []
    for shape, axes in (
        ((1, 24, 20, 3), (1, 2)),
        ((1, 64, 64, 1), (1, 2)),
        ((1, 2, 3, 700), (3,)),
        ((1, 40, 5, 6), (1,)),
    ):
        x = m.add(m.entry(shape, 0.05, 21))
        size = [1 if axis in axes else length for axis, length in enumerate(shape)]
        for y in (m.alike(x, size), m.add(m.entry(size, 0.003, -9))):
            found.append(m.call("MEAN", [x, m.integers(axes)], y, "ReducerOptions", keepDims=True))
    whole = m.alike(x := m.add(m.entry((1, 19, 23, 5), 0.05, 3)), (1, 1, 1, 5))
    sides = {"strideH": 1, "strideW": 1, "filterHeight": 19, "filterWidth": 23, "fusedActivationFunction": 0}
    return [*found, m.call("AVERAGE_POOL_2D", [x], whole, "Pool2DOptions", padding=1, **sides)]


def stacked(
    rows: int, columns: int, channels: int, kernel: int = 3, depthwise: bool = False
) -> Callable[[Maker], list[int]]:
    """Three layers of one shape after another, with other weights each."""

    def made(m: Maker) -> list[int]:
        x = m.add(m.entry((1, rows, columns, channels), 0.05, 7))
        for at in range(3):
            x = _layer(m, x, channels, kernel, depthwise=depthwise and at == 1, activation=int(at == 0))
        return [x]

    return made


def each(m: Maker) -> list[int]:
    """One operator of each kind, drawn, on one image."""
    x = image(m, m.one_of(8, 12, 16))
    return [step(m, x) for step in STEPS.values()]


def each_further(m: Maker) -> list[int]:
    """One of each further kind, of those that TensorFlow Lite Micro runs."""
    return [step(m) for name, step in FURTHER.items() if name not in BY_LITERT]


def unsigned(m: QdqModel) -> str:
    """A convolution of uint16."""
    return m.add("Conv", [m.real((1, 3, 5, 4), "uint16"), m.weights((4, 3, 3, 3), 0)], pads=[1, 1, 1, 1])


def unsigned_sum(m: QdqModel) -> str:
    """A sum of two values of uint16."""
    return m.add("Add", [m.real((1, 3, 5, 4), "uint16"), m.real((1, 3, 5, 4), "uint16")])


def other_bias(m: QdqModel) -> str:
    """A bias for each channel, in steps other than those of the sums."""
    w, x = m.weights((4, 3, 3, 3), 0), m.real((1, 3, 5, 4), "int8")
    scales = [m.constants[node.input[1]] for node in m.nodes]
    steps = np.broadcast_to(scales[0] * scales[1] * 3, (4,)).astype(np.float32)
    held = [m.constant(m.draw.rng.integers(-9000, 9000, 4).astype(np.int32)), m.constant(steps)]
    return m.add("Conv", [x, w, m.add("DequantizeLinear", held, axis=0)], pads=[0, 1, 1, 0], strides=[2, 1])


def other_zero(m: QdqModel) -> str:
    """A value that only gets another zero point, before a convolution."""
    x = m.real((1, 3, 5, 4), "int8")
    scale, zero = (m.constants[name] for name in m.nodes[-1].input[1:])
    held = [m.constant(scale), m.constant((zero // 2 + 9).astype(np.int8))]
    moved = m.add("DequantizeLinear", [m.add("QuantizeLinear", [x, *held]), *held])
    return m.add("Conv", [moved, m.weights((4, 3, 3, 3), 0)], pads=[1, 1, 1, 1])


def widened(m: Maker) -> list[int]:
    """Few channels that become many, by powers of two: constants of many tiles are small."""
    m.ties = True
    x = m.add(m.entry((1, 8, 8, 8), 2.0**-5, 0))
    return [_layer(m, x, 64, 1, zero_point=0)]


_STACKS = {
    "stacked_24_3": stacked(7, 5, 24, 3),
    "stacked_40_1": stacked(5, 9, 40, 1),
    "stacked_8_3": stacked(13, 4, 8, 3),
    "stacked_depthwise": stacked(9, 7, 24, 3, True),
}
_NEWER = (dilated, flattened, shifted, averaged)
_WIDE = (borders, slices, transposes, alike, rounded, clamped, widened, *_NEWER, each, each_further)
TFLITE: Mapping[str, Callable[[Maker], list[int]]] = {**{step.__name__: step for step in _WIDE}, **_STACKS}
ONNX: Mapping[str, Step] = {step.__name__: step for step in (unsigned, unsigned_sum, other_bias, other_zero)}


def made(name: str, seed: int) -> Case:
    """A model with what its runtime computes."""
    if name in ONNX:
        return drawn(f"{name} {seed}", ONNX[name]).case
    m = Maker(f"{name} {seed}")
    network = m.network(*TFLITE[name](m))
    file, feeds = network_file(network), m.feeds(network)
    return Case(f"{name} {seed}", file, ".tflite", words(network), feeds, run_micro_often(file, feeds))


_SMALL = (
    ("ne16", "L1.size", "2K"),
    ("ne16", "L1.size", "8K"),
    ("macarray", "L1.size", "2K"),
    ("kestrel", "sram.size", "2K"),
)
_WHOLE = *(step.__name__ for step in _WIDE[:-2]), *ONNX
_ENGINES = ("ne16", "macarray", "gemmini", "kestrel", "diana", "vta")
_TARGETS = [name for name in BUILT_IN if name != "opencl"]
TRIED: Sequence[tuple[str, int, str, Mapping[str, object]]] = (
    *((name, 0, "riscv", {}) for name in (*_WHOLE, "each", "each_further")),
    ("widened", 0, "diana", {"settings": {"L1.size": "2K"}}),
    *((name, 0, target, {"settings": {memory: size}}) for name in _STACKS for target, memory, size in _SMALL),
    *(("each", seed, target, {}) for seed, target in enumerate(_TARGETS, 1)),
    *(("each_further", seed, target, {}) for seed, target in enumerate(_TARGETS[::3], 1)),
    *((step.__name__, 0, target, {}) for step in _NEWER for target in _ENGINES),
    *((name, 0, "cortex_m4", {}) for name in _WHOLE),
    *((name, 0, "riscv", {"optimize": "size"}) for name in _WHOLE),
)
"""Models, seeds of what is drawn in them, targets and options."""
