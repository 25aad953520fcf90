"""DIANA's engines by themselves: constants where the published layouts have them, jobs from registers, refusals."""

from __future__ import annotations

from dataclasses import astuple, replace
from itertools import product
from math import ceil

import numpy as np
import pytest

from dovetail.errors import SimulationError
from dovetail.ir.layout import to_physical
from dovetail.ir.types import Array
from dovetail.sim.device import MemoryBus, MemoryRegion
from dovetail.sim.launch_queue import Control
from dovetail.targets.diana import IMAGE, VECTOR
from dovetail.targets.diana import registers as packing
from dovetail.targets.diana.device import DianaDevice
from dovetail.targets.diana.registers import (
    LAYER_WORDS,
    Analog,
    DianaPadding,
    Digital,
    JobLayer,
    Operation,
    Shape,
    analog_padding,
    digital_padding,
    match_digital,
    plinio_analog,
    plinio_digital,
    unroll,
)

FIRST = Shape(3, 16, 32, 32, (3, 3))
STAGES = [(16, 16, 32), (32, 16, 16), (64, 32, 8)]
"""Outputs, inputs and rows of ResNet-8's stages."""
PUBLISHED = (
    (4160, 4292, 4875),
    (13312, 16512, 5811),
    (13312, 16512, 5811),
    (6144, 8096, 2317),
    (11264, 15456, 3469),
    (2048, 2272, 710),
    (9984, 7408, 2595),
    (19456, 14448, 4899),
    (1792, 1904, 402),
    (73, 215, 514),
)
"""Cycles by PLiNIO digital, MATCH, PLiNIO analog of ResNet-8's layers, as the fact sheet of DIANA lists them."""


def resnet8() -> list[Shape]:
    """The layers of ResNet-8 in the order of the fact sheet."""
    found = [FIRST]
    for outputs, inputs, rows in STAGES:
        found += [Shape(inputs, outputs, rows, rows, (3, 3)), Shape(outputs, outputs, rows, rows, (3, 3))]
        found += [Shape(inputs, outputs, rows, rows, (1, 1))] if outputs != inputs else []
    return [*found, Shape(64, 10, 1, 1, (1, 1))]


def test_published_cycles() -> None:
    layers = resnet8()
    for shape, row in zip(layers, PUBLISHED, strict=True):
        assert tuple(round(model(shape)) for model in (plinio_digital, match_digital, plinio_analog)) == row
    sums = [sum(model(shape) for shape in layers) for model in (plinio_digital, match_digital, plinio_analog)]
    assert [round(total) for total in sums] == [81545, 87115, 31404]
    print(f"PLiNIO digital, MATCH, PLiNIO analog: {sums}")


def test_depthwise_uses_a_sixteenth() -> None:
    assert plinio_digital(Shape(32, 32, 8, 16, (3, 3), 32)) == 32 * 8 * 9 + 8 * 16 * 64 / 8


def test_columns_at_a_time() -> None:
    """By hand: 3x3 of 64 channels and more leaves 1152 / (64 * 3) = 6 columns of windows."""
    assert [unroll(Shape(16, k, 8, 8, (3, 3))) for k in (64, 256, 512)] == [4, 2, 1]
    assert unroll(Shape(128, 16, 8, 8, (3, 3))) == 1


@pytest.mark.parametrize(("channels", "depth", "height", "width"), [(16, 3, 3, 3), (20, 5, 1, 1), (33, 2, 5, 3)])
def test_convolution_weights_lie_as_published(channels: int, depth: int, height: int, width: int) -> None:
    rng = np.random.default_rng(1)
    weights = rng.integers(-128, 128, (channels, height, width, depth)).astype(np.int8)
    bias = rng.integers(-(2**31), 2**31, channels).astype(np.int32)
    packed = packing.pack_convolution(weights, bias)
    block = 16 * depth * height * width + 64
    assert packed.size == ceil(channels / 16) * block
    for k, y, x, c in np.ndindex(*weights.shape):
        place = k // 16 * block + ((c * height + y) * width + x) * 16 + k % 16
        assert packed[place ^ 3].view(np.int8) == weights[k, y, x, c]
    for k, byte in product(range(channels), range(4)):
        place = (k // 16 + 1) * block - 64 + 16 * byte + k % 16
        assert packed[place ^ 3] == int(bias[k]) >> 8 * byte & 255


def test_depthwise_channels_are_followed_by_three_of_zeros() -> None:
    weights = np.arange(1, 55, dtype=np.int8).reshape(1, 3, 3, 6)
    packed = packing.pack_depthwise(weights, np.arange(6, dtype=np.int32))
    block = 16 * 9 + 64
    assert packed.size == 2 * block, "24 channels, four times as many"
    for y, x, c in np.ndindex(3, 3, 6):
        assert packed[(4 * c // 16 * block + (y * 3 + x) * 16 + 4 * c % 16) ^ 3] == weights[0, y, x, c]
    assert np.count_nonzero(packed) == 54 + 5


def test_dense_weights_lie_as_published() -> None:
    rng = np.random.default_rng(2)
    weights = rng.integers(-128, 128, (18, 40)).astype(np.int8)
    packed = packing.pack_dense(weights, np.zeros(18, np.int32))
    block = 48 * 16 + 64
    assert packed.size == 2 * block
    for k, c in np.ndindex(18, 40):
        place = k // 16 * block + c // 16 * 256 + k % 16 * 16 + c % 16
        assert packed[place ^ 3].view(np.int8) == weights[k, c]


def test_cells_of_the_array_lie_as_published() -> None:
    """Row (tap, channel) counts from the end; a cell's sign depends on its column's parity and its block of 64 rows."""
    rng = np.random.default_rng(3)
    weights = rng.integers(-1, 2, (20, 3, 3, 70)).astype(np.int8)
    packed = packing.pack_ternary(weights)
    rows, columns = 9 * 70, 128
    assert packed.size == rows * columns // 4
    for k, y, x, c in product(range(20), range(3), range(3), range(70)):
        row = rows - 1 - ((y * 3 + x) * 70 + c)
        turned = row // 64 not in range(6, 12) if k % 2 == 0 else row // 64 <= 8
        code = packed[(row * columns + k) // 4] >> (2 * (k % 4)) & 3
        assert {0: 0, 2: 1, 1: -1}[int(code)] == (-1 if turned else 1) * int(weights[k, y, x, c])
    np.testing.assert_array_equal(
        packing.unpack_ternary(packed, rows, columns).reshape(3, 3, 70, 128)[..., :20], weights.transpose(1, 2, 3, 0)
    )
    with pytest.raises(ValueError, match="holds 3"):
        packing.unpack_ternary(np.full(16, 0xFF, np.uint8), 1, 64)


def test_padding_fields() -> None:
    padding = DianaPadding(1, 2, 3, 1)
    assert padding.digital() == 0x2131 and digital_padding(0x2131) == padding
    assert padding.analog() == 0b11010110 and analog_padding(0b11010110) == padding


class Chip:
    """One engine, memories, and a job in its registers."""

    def __init__(self, engine: str) -> None:
        self.bus = MemoryBus((MemoryRegion("L1", 0x1000, 0x40000), MemoryRegion("WEIGHTS", 0x100000, 0x40000)))
        self.device = DianaDevice(self.bus, engine)
        self.digital = engine == "digital"
        self.free = 0x1000

    def put(self, array: Array) -> int:
        """Bytes into L1; gives their address."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        address, self.free = self.free, self.free + (data.size + 15) // 16 * 16
        self.bus.view(address, data.size)[:] = data
        return address

    def start(self, layer: JobLayer, registers: dict[int, int]) -> int:
        """Hand a job over; gives the cycle it ends at."""
        kind = Digital if self.digital else Analog
        configuration = self.put(np.array(astuple(layer), "<u4"))
        assert self.device.read(Control.ACQUIRE, 0) != 0xFFFFFFFF
        for offset, value in {**registers, kind.CONF_ADDR: configuration, kind.CONF_N: LAYER_WORDS}.items():
            self.device.write(offset, value, 0)
        self.device.write(Control.TRIGGER, 0, 0)
        end = self.device.next_event()
        assert end is not None
        return end


def plain(x: Array, **changed: int) -> JobLayer:
    """A 1x1 convolution of an image (rows, columns, channels), but for what is changed."""
    rows, columns, channels = x.shape
    width = -(-columns // 16) * 16
    fields = dict.fromkeys(JobLayer.__dataclass_fields__, 0)
    fields |= {"c": channels, "k": channels, "cx": columns, "cy": rows, "fx": 1, "fy": 1, "ox": columns, "oy": rows}
    fields |= {"dilation": 1, "in_row": width, "in_plane": rows * width, "out_row": width, "out_plane": rows * width}
    return JobLayer(**{**fields, **changed})


def windows(x: Array, weights: Array, pads: DianaPadding, stride: int) -> Array:
    """Sums (rows, columns, k) by plain loops; weights (k, fy, fx, c)."""
    padded = np.pad(x.astype(int), ((pads.top, pads.bottom), (pads.left, pads.right), (0, 0)))
    channels, height, width, _ = weights.shape
    rows, columns = (padded.shape[0] - height) // stride + 1, (padded.shape[1] - width) // stride + 1
    found = np.zeros((rows, columns, channels), int)
    for row, column in np.ndindex(rows, columns):
        part = padded[row * stride : row * stride + height, column * stride : column * stride + width]
        found[row, column] = (part[None] * weights.astype(int)).sum(axis=(1, 2, 3))
    return found


def run_image(chip: Chip, layer: JobLayer, x: Array, registers: dict[int, int]) -> Array:
    """Run a job on an image; gives the result (rows, columns, channels)."""
    source = chip.put(to_physical(x[None], IMAGE))
    size = layer.k * layer.out_plane
    result = chip.put(np.full(size, 0x5A, np.uint8))
    kind = Digital if chip.digital else Analog
    end = chip.start(layer, {**registers, kind.ACT_ADDR: source, kind.OUT_DATA: result})
    assert not chip.device.interrupt() and chip.device.read(Control.ACQUIRE, 0) == 0xFFFFFFFF, "it works"
    chip.device.advance(end)
    assert chip.device.interrupt() and chip.device.read(Control.FINISHED, end) == 1 and not chip.device.interrupt()
    data = chip.bus.view(result, size).reshape(-1, 4)[:, ::-1].reshape(layer.k, layer.oy, layer.out_row)
    return np.asarray(data.view(np.int8)[:, :, : layer.ox].transpose(1, 2, 0))


@pytest.mark.parametrize(
    ("size", "stride", "shape", "pads", "relu"),
    [
        (3, 1, (9, 17, 5, 20), DianaPadding(1, 1, 1, 1), 0),
        (5, 2, (12, 12, 3, 16), DianaPadding(2, 2, 2, 2), 1),
        (7, 1, (8, 33, 2, 3), DianaPadding(3, 3, 3, 3), 1),
        (3, 1, (6, 8, 4, 8), DianaPadding(0, 1, 1, 1), 0),
        (1, 2, (8, 32, 16, 32), DianaPadding(), 0),
    ],
)
def test_digital_convolutions(size: int, stride: int, shape: tuple[int, ...], pads: DianaPadding, relu: int) -> None:
    rng = np.random.default_rng(size + stride)
    rows, columns, depth, channels = shape
    x = rng.integers(-128, 128, (rows, columns, depth)).astype(np.int8)
    weights = rng.integers(-128, 128, (channels, size, size, depth)).astype(np.int8)
    bias = rng.integers(-(2**20), 2**20, channels).astype(np.int32)
    expected = np.clip(windows(x, weights, pads, stride) + bias >> 11, 0 if relu else -128, 127)
    oy, ox = expected.shape[:2]
    row = -(-ox // 16) * 16
    layer = plain(
        x,
        k=channels,
        fx=size,
        fy=size,
        oy=oy,
        ox=ox,
        stride=stride - 1,
        padding=pads.digital(),
        activation_function=relu,
        output_shift=11,
        out_row=row,
        out_plane=oy * row,
    )
    chip, packed = Chip("digital"), packing.pack_convolution(weights, bias)
    registers = {Digital.WT_CONV_ADDR: chip.put(packed), Digital.WT_CONV_N: packed.size}
    np.testing.assert_array_equal(run_image(chip, layer, x, registers), expected)
    (activity,) = chip.device.activities()
    assert activity.end - activity.start == ceil(plinio_digital(Shape(depth, channels, oy, ox, (size, size))))
    assert activity.macs == oy * ox * channels * depth * size * size


def test_digital_depthwise() -> None:
    rng = np.random.default_rng(5)
    x = rng.integers(-128, 128, (9, 10, 6)).astype(np.int8)
    weights = rng.integers(-128, 128, (1, 3, 3, 6)).astype(np.int8)
    bias = rng.integers(-999, 999, 6).astype(np.int32)
    pads = DianaPadding(1, 1, 1, 1)
    planes = [windows(x[..., c : c + 1], weights[..., c][..., None], pads, 2)[..., 0] for c in range(6)]
    expected = np.clip(np.stack(planes, axis=-1) + bias >> 7, -128, 127)
    layer = plain(
        x,
        operation=Operation.DEPTHWISE,
        fx=3,
        fy=3,
        oy=5,
        ox=5,
        stride=1,
        padding=pads.digital(),
        output_shift=7,
        out_row=16,
        out_plane=80,
    )
    chip, packed = Chip("digital"), packing.pack_depthwise(weights, bias)
    registers = {Digital.WT_CONV_ADDR: chip.put(packed), Digital.WT_CONV_N: packed.size}
    np.testing.assert_array_equal(run_image(chip, layer, x, registers), expected)


@pytest.mark.parametrize("engine", ["digital", "analog"])
def test_dense(engine: str) -> None:
    rng = np.random.default_rng(6)
    x, chip = rng.integers(-60, 60, 40).astype(np.int8), Chip(engine)
    weights = rng.integers(-1, 2, (10, 40)).astype(np.int8)
    bias = rng.integers(-99, 99, 10)
    source, result = chip.put(to_physical(x[None], VECTOR)), chip.put(np.zeros(16, np.uint8))
    layer = plain(
        x.reshape(1, 1, -1),
        operation=Operation.DENSE,
        k=10,
        gain=2,
        output_shift=1,
        in_row=0,
        in_plane=0,
        out_row=0,
        out_plane=0,
    )
    sums = weights.astype(int) @ x.astype(int)
    if engine == "digital":
        packed = packing.pack_dense(weights, bias.astype(np.int32))
        registers = {
            Digital.WT_FC_ADDR: chip.put(packed),
            Digital.WT_FC_N: packed.size,
            Digital.ACT_ADDR: source,
            Digital.OUT_DATA: result,
        }
        expected = np.clip(sums + bias >> 1, -128, 127)
    else:
        scales = packing.pack_scales(np.array([3]), bias, 10)
        registers = {
            Analog.WT_CONV_ADDR: chip.put(packing.pack_ternary(weights.reshape(10, 1, 1, 40))),
            Analog.WT_SIMD_ADDR: chip.put(scales),
            Analog.ACT_ADDR: source,
            Analog.OUT_DATA: result,
        }
        expected = np.clip(np.clip(sums >> 2, -32, 31) * 3 + bias >> 1, -128, 127)
    chip.device.advance(chip.start(layer, registers))
    found = chip.bus.view(result, 16).reshape(-1, 4)[:, ::-1].reshape(-1).view(np.int8)
    assert found.tolist() == [*expected.tolist(), *[0] * 6]


def test_sum_is_rounded_down() -> None:
    rng = np.random.default_rng(7)
    x, other = rng.integers(-128, 128, (2, 5, 18, 3)).astype(np.int8)
    layer = plain(x, operation=Operation.SUM, output_shift=1, second_row=32, second_plane=160)
    chip = Chip("digital")
    found = run_image(chip, layer, x, {Digital.ACT_A_ADDR: chip.put(to_physical(other[None], IMAGE))})
    np.testing.assert_array_equal(found, (x.astype(int) + other) // 2)


def test_analog_convolution_saturates_twice() -> None:
    """Activations at 7 bits, sums at the converter's 6."""
    rng = np.random.default_rng(8)
    x = rng.integers(-128, 128, (6, 18, 20)).astype(np.int8)
    weights = rng.integers(-1, 2, (24, 3, 3, 20)).astype(np.int8)
    scale, offset = rng.integers(1, 60, 24), rng.integers(-900, 900, 24)
    pads = DianaPadding(1, 1, 1, 1)
    sums = windows(np.clip(x, -64, 63), weights, pads, 1)
    assert (x > 63).any() and (sums >> 4 > 31).any() and (sums >> 4 < -32).any()
    expected = np.clip(np.clip(sums >> 4, -32, 31) * scale + offset >> 3, 0, 127)
    layer = plain(x, k=24, fx=3, fy=3, padding=pads.analog(), gain=4, output_shift=3, activation_function=1)
    chip = Chip("analog")
    registers = {
        Analog.WT_CONV_ADDR: chip.put(packing.pack_ternary(weights)),
        Analog.WT_SIMD_ADDR: chip.put(packing.pack_scales(scale, offset, 24)),
    }
    np.testing.assert_array_equal(run_image(chip, layer, x, registers), expected)


BASE = plain(np.zeros((4, 16, 8), np.int8))


@pytest.mark.parametrize(
    ("engine", "layer", "reason"),
    [
        ("digital", replace(BASE, operation=4), "no operation 4"),
        ("digital", replace(BASE, k=0), "size is zero"),
        ("digital", replace(BASE, fx=2, ox=15), "window is 1x2"),
        ("digital", replace(BASE, stride=2), "stride is 3"),
        ("digital", replace(BASE, dilation=2), "dilation"),
        ("digital", replace(BASE, output_shift=32), "shift is 32"),
        ("digital", replace(BASE, ox=15), "not what the window gives"),
        ("digital", replace(BASE, out_row=20), "no multiples of 16"),
        ("digital", replace(BASE, operation=Operation.DEPTHWISE, k=9), "must be the same"),
        ("digital", replace(BASE, operation=Operation.DENSE, k=17), "17 results of a dense layer"),
        ("analog", replace(BASE, operation=Operation.SUM), "sums products only"),
        ("analog", replace(BASE, c=129), "129 input channels"),
        ("analog", replace(BASE, k=513), "513 output channels"),
        ("analog", replace(BASE, fx=5, fy=5, padding=0xAA), "takes 1600 rows"),
        ("analog", replace(BASE, gain=32), "gain is 32"),
    ],
)
def test_jobs_no_engine_has(engine: str, layer: JobLayer, reason: str) -> None:
    with pytest.raises(SimulationError, match=reason):
        Chip(engine).start(layer, {})


def test_registers_are_kept_to() -> None:
    device = Chip("digital").device
    with pytest.raises(SimulationError, match="before a job is acquired"):
        device.write(Digital.ACT_ADDR, 1, 0)
    with pytest.raises(SimulationError, match="before a job is acquired"):
        device.write(Control.TRIGGER, 0, 0)
    assert device.read(Control.ACQUIRE, 0) == 0 and device.read(Control.ACQUIRE, 0) == 0xFFFFFFFE
    with pytest.raises(SimulationError, match="no register at offset 0xbc"):
        device.write(0xBC, 1, 0)
    device.write(Control.SOFT_CLEAR, 0, 0)
    assert device.read(Control.ACQUIRE, 0) == 0 and device.read(Control.STATUS, 0) == 0


def test_weights_that_are_missing() -> None:
    chip = Chip("digital")
    end = chip.start(BASE, {Digital.ACT_ADDR: 0x1000, Digital.OUT_DATA: 0x2000, Digital.WT_CONV_N: 8})
    with pytest.raises(SimulationError, match="have 8 bytes; the layer needs 192"):
        chip.device.advance(end)
