"""The NE16 in the simulated chip: bit-exact results, cycles of the RTL's states, two jobs behind PULP's controller.

The 24 task registers are at 0x20..0x7c; the others, and how they behave, are those of `HwpeDevice` of dovetail/sim/
launch_queue.py.

Requantisation follows the RTL (rtl/accumulator/ne16_normquant*.sv), with which the state-machine model
agrees: with a bias, product and sum wrap to 32 bits; without one the 48-bit product is shifted.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from dovetail.errors import SimulationError
from dovetail.records import Record
from dovetail.sim.device import Activity, Bus
from dovetail.sim.launch_queue import MASK32, AddressLines, Control, HwpeDevice, Launch
from dovetail.targets.ne16.image import (
    RegisterImage,
    image_problem,
    parse,
    unpack_linear_stored,
    unpack_stored,
    walk_cycles,
)
from dovetail.targets.ne16.job import CHANNELS_IN, EDGE, Register

TRIGGER, ACQUIRE, FINISHED, STATUS, RUNNING_JOB, SOFT_CLEAR, EVENT = Control
"""Byte offsets of the controller's registers."""
TASK = 0x20
"""Byte offset of the first task register."""

CONTEXTS = 2
"""Sets of task registers: jobs the engine holds, the running one included."""

_EXACT = float(1 << 53)

Values = NDArray[np.int64]
Bytes = NDArray[np.uint8]


class _Ne16Launch(Record):
    """A triggered job: its id, and what its registers said."""

    identity: int
    image: RegisterImage


class Ne16Device(HwpeDevice[_Ne16Launch]):
    """The engine as a device of the simulator; addresses in its registers go to `bus`.

    Args:
        bus: the memories.
        name: of the device, where a chip has several.
        slowdown: cycles it takes for each cycle of the state machine, e.g. 2 for one with half the clock.
        lines: what its address lines show between accesses, of `AddressLines`.
    """

    def __init__(self, bus: Bus, name: str = "ne16", slowdown: int = 1, lines: str = AddressLines.HELD.value) -> None:
        self._slowdown = slowdown
        self._weights = _WeightCache()
        super().__init__(bus, name, range(TASK, TASK + 4 * len(Register), 4), CONTEXTS, AddressLines(lines))

    def begin(self, identity: int, registers: dict[int, int]) -> tuple[_Ne16Launch, int]:
        """See `HwpeDevice.begin`."""
        image = parse(tuple(registers.values()))
        reason = image_problem(image)
        if reason:
            what = f"the NE16 cannot run this configuration: {reason}"
            hint = "look at the words of this job, or add a Constraint for what the engine cannot do"
            raise SimulationError(what, where=f"{self.name} job {identity}", hint=hint)
        return _Ne16Launch(identity, image), walk_cycles(image) * self._slowdown

    def complete(self, launch: Launch[_Ne16Launch]) -> Activity:
        """See `QueueDevice.complete`."""
        image = launch.work.image
        try:
            execute(image, self.bus, self._weights)
        except SimulationError as error:
            hint = error.hint or "look at the addresses of this job"
            raise SimulationError(error.what, where=f"{self.name} job {launch.work.identity}", hint=hint) from error
        return Activity(launch.start, launch.end, _label(image), macs=_macs(image))


def _label(image: RegisterImage) -> str:
    kind = "linear" if image.linear else ("conv 3x3", "depthwise 3x3", "conv 1x1")[image.filter_mode]
    return f"{kind} w{image.weight_bits}"


def _written(image: RegisterImage) -> tuple[int, int]:
    """Rows and columns of outputs the launch writes."""
    step = 2 if image.strided else 1
    return -(-image.height // step), -(-image.width // step)


def _macs(image: RegisterImage) -> int:
    """Products that are wanted: of pixels that two rows share, those of one."""
    rows, columns = _written(image)
    pixel, row = image.out_strides[1:]
    shared = max(columns - row // pixel, 0) if image.kernel == 1 and pixel else 0
    channels = 1 if image.depthwise else image.in_channels
    return (rows * columns - (rows - 1) * shared) * image.out_channels * channels * image.kernel**2


class _WeightCache:
    """The last weights unpacked: launches of a grid, and of an image's tiles, use the same ones again."""

    def __init__(self) -> None:
        self._key: tuple[object, ...] = ()
        self._packed = b""
        self._values: NDArray[np.float64] = np.zeros(0)

    def fetch(self, image: RegisterImage, bus: Bus) -> NDArray[np.float64]:
        """Signed weights (taps, C_in, C_out), depthwise (taps, 1, C), as float64."""
        bits, channels, taps = image.weight_bits, image.in_channels, image.kernel**2
        rows = 1 if image.depthwise else image.out_channels
        nbytes = rows * -(-channels // CHANNELS_IN) * bits * taps * 2
        packed = bus.view(image.weights, nbytes)
        key = (image.filter_mode, image.linear, bits, channels, rows, image.weight_offset)
        raw = packed.tobytes()
        if key != self._key or raw != self._packed:
            if image.linear:
                stored = unpack_linear_stored(packed, bits, channels)[:, None, :]
            else:
                stored = unpack_stored(packed, bits, image.kernel, channels, rows)
            signed = stored.astype(np.float64) + image.weight_offset
            self._values = np.ascontiguousarray(
                signed.transpose(1, 0, 2) if image.depthwise else signed.transpose(1, 2, 0)
            )
            self._key, self._packed = key, raw
        return self._values


def _pixels(bus: Bus, address: int, shape: tuple[int, int, int], strides: tuple[int, int]) -> Bytes:
    """A writable view of (rows, columns, bytes) pixels in memory, `strides` in bytes between columns and rows."""
    rows, columns, depth = shape
    span = (rows - 1) * strides[1] + (columns - 1) * strides[0] + depth
    return as_strided(bus.view(address & MASK32, span), shape, (strides[1], strides[0], 1))


def _inputs(image: RegisterImage, bus: Bus) -> NDArray[np.float64]:
    """The padded input (rows, columns, channels) the launch sees.

    After the pixels a subtile loads there are zeros; among those it loads, the padding register's edges hold
    the padding value (ne16_load.cpp load_do_padding; RTL ne16_input_buffer.sv).
    """
    border = image.kernel - 1
    shape = (image.height + border, image.width + border, image.in_channels)
    pad, edge = image.padding, EDGE + border
    down, right = EDGE * (image.tiles_high - 1), EDGE * (image.tiles_wide - 1)
    loaded = (min(shape[0], down + image.last_height_in), min(shape[1], right + image.last_width_in))
    bottom = min(loaded[0], down + edge - pad.bottom)
    most = min(loaded[1], right + edge - pad.right)
    padded = np.zeros(shape)
    padded[: loaded[0], : loaded[1]] = image.padding_value
    rows, columns = bottom - pad.top, most - pad.left
    if rows > 0 and columns > 0:
        strides = image.in_strides
        first = image.infeat + pad.top * strides[1] + pad.left * strides[0]
        real = _pixels(bus, first, (rows, columns, image.in_channels), strides)
        padded[pad.top : bottom, pad.left : most] = real
    return padded


def _accumulate(image: RegisterImage, padded: NDArray[np.float64], weights: NDArray[np.float64]) -> Values:
    """Sums of products (rows, columns, C_out), exact in 64 bits."""
    largest = float(np.abs(weights).max(initial=0.0)) * 255 * weights.shape[0] * weights.shape[1]
    if largest >= _EXACT:
        what = f"the weight offset {image.weight_offset} makes sums beyond 2**53, the model's limit"
        raise SimulationError(what, where="ne16", hint="choose a smaller weight offset")
    step = 2 if image.strided else 1
    height, width, kernel = image.height, image.width, image.kernel
    total = np.zeros((*_written(image), image.out_channels))
    for tap in range(kernel * kernel):
        row, column = divmod(tap, kernel)
        seen = padded[row : row + height : step, column : column + width : step]
        total += seen * weights[tap] if image.depthwise else seen @ weights[tap]
    return total.astype(np.int64)


def _wrap(values: Values, bits: int) -> Values:
    """Two's-complement wrap-around to `bits` bits."""
    half = 1 << (bits - 1)
    wrapped: Values = ((values + half) & ((1 << bits) - 1)) - half
    return wrapped


def _vector(bus: Bus, address: int, count: int, dtype: str) -> Values:
    """`count` little-endian numbers in memory."""
    return np.frombuffer(bus.view(address, count * np.dtype(dtype).itemsize).tobytes(), dtype).astype(np.int64)


def _requantise(image: RegisterImage, accumulators: Values, bus: Bus) -> Values:
    """Scaled, biased, shifted and clipped outputs; the accumulators unchanged without requantisation."""
    quant, channels = image.requantise, image.out_channels
    if quant is None:
        return accumulators
    product = accumulators * _vector(bus, image.scale, channels, "<u1" if quant.scale_bits == 8 else "<u4")
    if quant.bias:
        product = _wrap(_wrap(product, 32) + _vector(bus, image.scale_bias, channels, "<i4"), 32)
    else:
        product = _wrap(product, 48)
    shift: int | Values
    if quant.shift is None:
        shift = _vector(bus, image.scale_shift, channels, "<u1")
        if int(shift.max()) > 31:
            what = f"a per-channel shift of {int(shift.max())} is above the NE16's 31"
            raise SimulationError(what, where="ne16", hint="keep shifts from 0 to 31")
    else:
        shift = quant.shift
    low = 0 if quant.relu else -(1 << (image.out_bits - 1))
    high = (1 << image.out_bits) - 1 if quant.relu else -low - 1
    clipped: Values = np.clip(product >> shift, low, high)
    return clipped


def execute(image: RegisterImage, bus: Bus, weights: _WeightCache) -> None:
    """Compute a launch and write its outputs; SimulationError when it leaves the memories."""
    rows, columns = _written(image)
    step = 2 if image.strided else 1
    nbytes = image.out_bits // 8
    strides = (image.out_strides[1] * step, image.out_strides[2] * step)
    target = _pixels(bus, image.outfeat, (rows, columns, image.out_channels * nbytes), strides)
    sums = _accumulate(image, _inputs(image, bus), weights.fetch(image, bus))
    if image.stream_in:
        sums = sums + np.ascontiguousarray(target).view("<i4")
    outputs = _requantise(image, _wrap(sums, 32), bus)
    words = (outputs & ((1 << image.out_bits) - 1)).astype("<u4" if nbytes == 4 else np.uint8)
    target[...] = np.ascontiguousarray(words).view(np.uint8).reshape(target.shape)
