"""The NE16 in the simulated chip: register map, two-job queue, bit-exact results, cycles of the state machine.

Register map (byte offsets), after hwpe-ctrl as pulp-platform/pulp-nnx util/hwpe.c and gvsoc/gvsoc-pulp
pulp/ne16/src/ne16.cpp use it:

- 0x00 TRIGGER, write 0: hand over the acquired context; the job runs when those before it are done.
- 0x04 ACQUIRE, read: the job's id (0..255, counting up) and from then on the task registers are its context;
  -1 when both contexts are taken; -2 when one is acquired but not triggered yet.
- 0x08 FINISHED, read: jobs finished since the last read. Reading acknowledges: the interrupt line, high as
  long as a finished job is unacknowledged, goes low.
- 0x0c STATUS, read: bit 0 (bit 8) set while context 0 (1) is acquired, queued or running.
- 0x10 RUNNING_JOB, read: id of the running job, or of the last one that ran.
- 0x14 SOFT_CLEAR, write: drops all jobs and clears both contexts.
- 0x20..0x7c: the 24 task registers. Contexts alternate and keep their values between jobs.

Requantisation follows the RTL (rtl/accumulator/ne16_normquant*.sv), with which the state-machine model
agrees: with a bias, product and sum wrap to 32 bits; without one the 48-bit product is shifted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from dovetail.errors import SimulationError
from dovetail.simulate.device import Activity, Bus
from dovetail.targets.ne16.job import (
    CHANNELS_IN,
    CHANNELS_OUT,
    EDGE,
    MAXIMUM_PADDING,
    REGISTER_COUNT,
    Launch,
    parse,
    weight_strides,
)
from dovetail.targets.ne16.packing import unpack_linear_stored, unpack_stored

TRIGGER, ACQUIRE, FINISHED, STATUS, RUNNING_JOB, SOFT_CLEAR, TASK = 0x00, 0x04, 0x08, 0x0C, 0x10, 0x14, 0x20
"""Byte offsets of the registers."""

_MASK32 = 0xFFFFFFFF
_EXACT = float(1 << 53)

Values = NDArray[np.int64]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Queued:
    """A triggered job: its id, context, meaning, and its start and end in cycles."""

    identity: int
    context: int
    launch: Launch
    start: int
    end: int


class Ne16Device:
    """The engine as a device of the simulator; addresses in its registers go to `bus`.

    Args:
        bus: the memories.
        name: of the device, where a chip has several.
        slowdown: cycles it takes for each cycle of the state machine, e.g. 2 for one with half the clock.
    """

    def __init__(self, bus: Bus, name: str = "ne16", slowdown: int = 1) -> None:
        self.name = name
        self._slowdown = slowdown
        self._bus = bus
        self._weights = _WeightCache()
        self.reset()

    def reset(self) -> None:
        """Power-on state; also forgets the activities."""
        self._activities: list[Activity] = []
        self._clear()

    def _clear(self) -> None:
        self._contexts = [[0] * REGISTER_COUNT, [0] * REGISTER_COUNT]
        self._taken = [False, False]
        self._next_context = 0
        self._acquired: int | None = None
        self._next_identity = 0
        self._last_run = 0
        self._busy_until = 0
        self._unacknowledged = 0
        self._queue: deque[_Queued] = deque()

    def read(self, offset: int, now: int) -> int:
        """One register as an unsigned 32-bit word; SimulationError when there is none to read at `offset`."""
        if offset == ACQUIRE:
            return self._acquire() & _MASK32
        if offset == FINISHED:
            finished, self._unacknowledged = self._unacknowledged, 0
            return finished
        if offset == STATUS:
            return self._taken[0] | self._taken[1] << 8
        if offset == RUNNING_JOB:
            started = [job.identity for job in self._queue if job.start <= now]
            return started[-1] if started else self._last_run
        return self._contexts[self._next_context][_task_index(offset, "read")]

    def write(self, offset: int, value: int, now: int) -> None:
        """Write one register; SimulationError for one that cannot be written or a configuration that is illegal."""
        if offset == TRIGGER:
            self._trigger(value, now)
        elif offset == SOFT_CLEAR:
            self._clear()
            self._busy_until = now
        else:
            index = _task_index(offset, "written")
            if self._acquired is None:
                raise SimulationError(f"NE16 task register {index} is written before a job was acquired", where="ne16",
                                      hint="look at the driver: acquire a job before writing its registers")
            self._contexts[self._next_context][index] = value & _MASK32

    def _acquire(self) -> int:
        if self._acquired is not None:
            return -2
        if self._taken[self._next_context]:
            return -1
        self._taken[self._next_context] = True
        self._acquired = self._next_identity
        self._next_identity = (self._next_identity + 1) & 0xFF
        return self._acquired

    def _trigger(self, value: int, now: int) -> None:
        if self._acquired is None or value != 0:
            reason = "before a job was acquired" if self._acquired is None else f"with {value}, only 0 is supported"
            raise SimulationError(f"NE16 is triggered {reason}", where="ne16",
                                  hint="look at the driver: acquire a job, write its registers, then write 0 to "
                                       "TRIGGER")
        context, identity = self._next_context, self._acquired
        launch = parse(tuple(self._contexts[context]))
        reason = launch_problem(launch)
        if reason:
            raise SimulationError(f"the NE16 cannot run this configuration: {reason}", where=f"ne16 job {identity}",
                                  hint="look at the words of this job, or add a Constraint for what the engine "
                                       "cannot do")
        start = max(now, self._busy_until)
        self._busy_until = start + walk_cycles(launch) * self._slowdown
        self._queue.append(_Queued(identity, context, launch, start, self._busy_until))
        self._acquired, self._next_context = None, 1 - context

    def next_event(self) -> int | None:
        """Cycle at which the running job ends."""
        return self._queue[0].end if self._queue else None

    def advance(self, now: int) -> None:
        """Carry out the jobs that end at or before cycle `now`."""
        while self._queue and self._queue[0].end <= now:
            job = self._queue.popleft()
            try:
                execute(job.launch, self._bus, self._weights)
            except SimulationError as error:
                raise SimulationError(error.what, where=f"ne16 job {job.identity}",
                                      hint=error.hint or "look at the addresses of this job") from error
            self._taken[job.context] = False
            self._last_run = job.identity
            self._unacknowledged += 1
            self._activities.append(Activity(job.start, job.end, _label(job.launch), macs=_macs(job.launch)))

    def interrupt(self) -> bool:
        """High while a finished job is unacknowledged (FINISHED unread)."""
        return self._unacknowledged > 0

    def activities(self) -> list[Activity]:
        """Finished jobs since `reset`, oldest first."""
        return list(self._activities)


def _task_index(offset: int, verb: str) -> int:
    index = (offset - TASK) // 4
    if offset % 4 or not 0 <= index < REGISTER_COUNT:
        raise SimulationError(f"NE16 register at offset {offset:#x} cannot be {verb}", where="ne16",
                              hint="look at the driver: its offsets must be those of the engine's header")
    return index


def _label(launch: Launch) -> str:
    kind = "linear" if launch.linear else ("conv 3x3", "depthwise 3x3", "conv 1x1")[launch.filter_mode]
    return f"{kind} w{launch.weight_bits}"


def _written(launch: Launch) -> tuple[int, int]:
    """Rows and columns of outputs the launch writes."""
    step = 2 if launch.strided else 1
    return -(-launch.height // step), -(-launch.width // step)


def _macs(launch: Launch) -> int:
    rows, columns = _written(launch)
    channels = 1 if launch.depthwise else launch.in_channels
    return rows * columns * launch.out_channels * channels * launch.kernel**2


def launch_problem(launch: Launch) -> str:
    """Why the engine, or this model of it, cannot run a register image; the empty string when it can."""
    quant = launch.requantise
    tile_out = CHANNELS_IN if launch.depthwise else CHANNELS_OUT
    tiles = (launch.tiles_in, launch.tiles_out, launch.tiles_high, launch.tiles_wide)
    tests = (
        (launch.filter_mode == 3, "filter mode 3 is reserved"),
        (launch.mode16, "16-bit inputs are not modelled"),
        (launch.rounding, "the rounding bit (CONF0 bit 11) has no effect in the public RTL; round with the bias"),
        (launch.filter_mask != 0, "filter masking is not modelled"),
        (launch.weight_bits < 2, "weights of 1 bit are not modelled"),
        (launch.out_bits not in (8, 32), f"outputs of {launch.out_bits} bits are not modelled"),
        (min(tiles) < 1, "a number of subtiles is zero"),
        (launch.last_channels_in > CHANNELS_IN, f"an input channel remainder is above {CHANNELS_IN}"),
        (launch.last_channels_out > tile_out, f"an output channel remainder is above {tile_out}"),
        (max(launch.last_height_out, launch.last_width_out) > EDGE, "an output remainder is above 3"),
        (max(launch.last_height_in, launch.last_width_in) > EDGE + launch.kernel - 1, "an input remainder is too big"),
        (quant is None and launch.out_bits != 32, "accumulators without requantisation are written as 32 bits"),
        (quant is not None and quant.scale_bits not in (8, 32), "scales must have 8 or 32 bits"),
        (launch.stream_in and launch.out_bits != 32, "stream-in needs 32-bit outputs"),
        (launch.stream_in and launch.depthwise, "stream-in does not work in depthwise mode"),
        (launch.depthwise and launch.in_channels != launch.out_channels, "depthwise channel counts differ"),
        (launch.linear and launch.kernel != 1, "linear mode needs filter mode 1x1"),
        (launch.linear and (launch.height, launch.width) != (1, 1), "linear mode has one output pixel"),
        (launch.strided and tiles[2:] != (1, 1), "stride 2 works on a single spatial subtile"),
        (launch.kernel == 1 and any(launch.padding), "padding exists for 3x3 only"),
        (max(launch.padding) > MAXIMUM_PADDING, f"padding is above {MAXIMUM_PADDING}"),
        (launch.out_bits == 32 and launch.out_strides[0] != 32, "the innermost output stride must be 32 bytes"),
        (launch.linear and launch.in_strides[0] != CHANNELS_IN, "the input stride of linear mode must be 16 bytes"),
        (launch.filter_mode < 3 and launch.weight_strides != _expected_weight_strides(launch),
         f"weight strides {launch.weight_strides} do not fit the packed layout, {_expected_weight_strides(launch)}"),
    )  # fmt: skip
    return next((sentence for wrong, sentence in tests if wrong), "") or _shared_edge_problem(launch)


def _expected_weight_strides(launch: Launch) -> tuple[int, int, int]:
    return weight_strides(launch.kernel, launch.depthwise, launch.linear, launch.weight_bits, launch.in_channels)


def _shared_edge_problem(launch: Launch) -> str:
    """Pixels the last two subtiles share are read from memory by the last but one, so may not be padded."""
    pad = launch.padding
    for count, last, after in (
        (launch.tiles_high, launch.last_height_in, pad.bottom),
        (launch.tiles_wide, launch.last_width_in, pad.right),
    ):
        if launch.kernel == 3 and count > 1 and min(last, EDGE + 2 - after) < 2:
            return "padding after the last pixel reaches into the last subtile but one, which does not pad"
    return ""


def walk_cycles(launch: Launch) -> int:
    """Cycles from trigger (or end of the job before) to end, adding up the states of every kind of subtile.

    Written after the loops of ne16_fsm.cpp on purpose, not with the closed form of `cycles`: each checks the other.
    """
    edge_in = EDGE + launch.kernel - 1
    tile_out = CHANNELS_IN if launch.depthwise else CHANNELS_OUT
    cycles = 1
    for channel_tiles, channels, scaled in (
        (launch.tiles_out - 1, tile_out, CHANNELS_OUT),  # a full depthwise subtile scales 32 channels all the same
        (1, launch.last_channels_out, launch.last_channels_out),
    ):
        per_tile_out = _normalisation_cycles(launch, scaled)
        for row_tiles, rows, rows_in in (
            (launch.tiles_high - 1, EDGE, edge_in), (1, launch.last_height_out, launch.last_height_in)
        ):  # fmt: skip
            for column_tiles, columns, columns_in in (
                (launch.tiles_wide - 1, EDGE, edge_in), (1, launch.last_width_out, launch.last_width_in)
            ):  # fmt: skip
                one = _input_cycles(launch, channels, rows_in * columns_in) + per_tile_out
                one += _stream_cycles(launch, channels, rows, columns)
                cycles += channel_tiles * row_tiles * column_tiles * one
    return cycles


def _input_cycles(launch: Launch, channels: int, pixels: int) -> int:
    """STREAMIN_LOAD to MATRIXVEC over all groups of input channels of one subtile."""
    bits = launch.weight_bits
    if launch.depthwise:
        return 6 + pixels + 22 + channels * bits
    cycles = 0
    for group in range(launch.tiles_in):
        last = group == launch.tiles_in - 1
        if launch.linear:
            cycles += 6 + (launch.last_channels_in if last else CHANNELS_IN) + 10 + channels * bits + 6
        elif launch.kernel == 1:
            cycles += 6 + 9 + 10 + channels + 6
        else:
            cycles += 6 + pixels + 6 + channels * bits + 6
    return cycles


def _normalisation_cycles(launch: Launch, scaled: int) -> int:
    """NORMQUANT_SHIFT, NORMQUANT_MULT and NORMQUANT_BIAS with `scaled` channels."""
    quant = launch.requantise
    if quant is None:
        return 0
    multiply = scaled if quant.scale_bits == 32 else -(-scaled // 4)
    return (quant.shift is None) + multiply + 4 * quant.bias


def _stream_cycles(launch: Launch, channels: int, rows: int, columns: int) -> int:
    """STREAMIN and STREAMOUT of one subtile."""
    words = -(-channels // 8) if launch.out_bits == 32 else 1
    if launch.linear:
        return words * (1 + launch.stream_in)
    stores = (EDGE * (rows - 1) + columns) * words
    if launch.kernel == 1:
        stores += max(0, EDGE * EDGE - rows * columns * launch.out_bits // 8)
    return stores + (EDGE * EDGE * words if launch.stream_in else 0)


class _WeightCache:
    """The last weights unpacked: launches of a grid, and of an image's tiles, use the same ones again."""

    def __init__(self) -> None:
        self._key: tuple[object, ...] = ()
        self._packed = b""
        self._values: NDArray[np.float64] = np.zeros(0)

    def fetch(self, launch: Launch, bus: Bus) -> NDArray[np.float64]:
        """Signed weights (taps, C_in, C_out), depthwise (taps, 1, C), as float64."""
        bits, channels, taps = launch.weight_bits, launch.in_channels, launch.kernel**2
        rows = 1 if launch.depthwise else launch.out_channels
        nbytes = rows * -(-channels // CHANNELS_IN) * bits * taps * 2
        packed = bus.view(launch.weights, nbytes)
        key = (launch.filter_mode, launch.linear, bits, channels, rows, launch.weight_offset)
        raw = packed.tobytes()
        if key != self._key or raw != self._packed:
            if launch.linear:
                stored = unpack_linear_stored(packed, bits, channels)[:, None, :]
            else:
                stored = unpack_stored(packed, bits, launch.kernel, channels, rows)
            signed = stored.astype(np.float64) + launch.weight_offset
            self._values = np.ascontiguousarray(signed.transpose(1, 0, 2) if launch.depthwise
                                                else signed.transpose(1, 2, 0))  # fmt: skip
            self._key, self._packed = key, raw
        return self._values


def _pixels(bus: Bus, address: int, shape: tuple[int, int, int], strides: tuple[int, int]) -> Bytes:
    """A writable view of (rows, columns, bytes) pixels in memory, `strides` in bytes between columns and rows."""
    rows, columns, depth = shape
    span = (rows - 1) * strides[1] + (columns - 1) * strides[0] + depth
    return as_strided(bus.view(address & _MASK32, span), shape, (strides[1], strides[0], 1))


def _inputs(launch: Launch, bus: Bus) -> NDArray[np.float64]:
    """The padded input (rows, columns, channels) the launch sees.

    After the pixels a subtile loads there are zeros; among those it loads, the padding register's edges hold
    the padding value (ne16_load.cpp load_do_padding; RTL ne16_input_buffer.sv).
    """
    border = launch.kernel - 1
    shape = (launch.height + border, launch.width + border, launch.in_channels)
    pad, edge = launch.padding, EDGE + border
    down, right = EDGE * (launch.tiles_high - 1), EDGE * (launch.tiles_wide - 1)
    loaded = (min(shape[0], down + launch.last_height_in), min(shape[1], right + launch.last_width_in))
    bottom = min(loaded[0], down + edge - pad.bottom)
    most = min(loaded[1], right + edge - pad.right)
    padded = np.zeros(shape)
    padded[: loaded[0], : loaded[1]] = launch.padding_value
    rows, columns = bottom - pad.top, most - pad.left
    if rows > 0 and columns > 0:
        strides = launch.in_strides
        first = launch.infeat + pad.top * strides[1] + pad.left * strides[0]
        real = _pixels(bus, first, (rows, columns, launch.in_channels), strides)
        padded[pad.top : bottom, pad.left : most] = real
    return padded


def _accumulate(launch: Launch, padded: NDArray[np.float64], weights: NDArray[np.float64]) -> Values:
    """Sums of products (rows, columns, C_out), exact in 64 bits."""
    largest = float(np.abs(weights).max(initial=0.0)) * 255 * weights.shape[0] * weights.shape[1]
    if largest >= _EXACT:
        raise SimulationError(f"the weight offset {launch.weight_offset} makes sums beyond 2**53, the model's limit",
                              where="ne16", hint="choose a smaller weight offset")
    step = 2 if launch.strided else 1
    height, width, kernel = launch.height, launch.width, launch.kernel
    total = np.zeros((*_written(launch), launch.out_channels))
    for tap in range(kernel * kernel):
        row, column = divmod(tap, kernel)
        seen = padded[row : row + height : step, column : column + width : step]
        total += seen * weights[tap] if launch.depthwise else seen @ weights[tap]
    return total.astype(np.int64)


def _wrap(values: Values, bits: int) -> Values:
    """Two's-complement wrap-around to `bits` bits."""
    half = 1 << (bits - 1)
    wrapped: Values = ((values + half) & ((1 << bits) - 1)) - half
    return wrapped


def _vector(bus: Bus, address: int, count: int, dtype: str) -> Values:
    """`count` little-endian numbers in memory."""
    return np.frombuffer(bus.view(address, count * np.dtype(dtype).itemsize).tobytes(), dtype).astype(np.int64)


def _requantise(launch: Launch, accumulators: Values, bus: Bus) -> Values:
    """Scaled, biased, shifted and clipped outputs; the accumulators unchanged without requantisation."""
    quant, channels = launch.requantise, launch.out_channels
    if quant is None:
        return accumulators
    product = accumulators * _vector(bus, launch.scale, channels, "<u1" if quant.scale_bits == 8 else "<u4")
    if quant.bias:
        product = _wrap(_wrap(product, 32) + _vector(bus, launch.scale_bias, channels, "<i4"), 32)
    else:
        product = _wrap(product, 48)
    shift: int | Values
    if quant.shift is None:
        shift = _vector(bus, launch.scale_shift, channels, "<u1")
        if int(shift.max()) > 31:
            raise SimulationError(f"a per-channel shift of {int(shift.max())} is above the NE16's 31", where="ne16",
                                  hint="keep shifts from 0 to 31")
    else:
        shift = quant.shift
    low = 0 if quant.relu else -(1 << (launch.out_bits - 1))
    high = (1 << launch.out_bits) - 1 if quant.relu else -low - 1
    clipped: Values = np.clip(product >> shift, low, high)
    return clipped


def execute(launch: Launch, bus: Bus, weights: _WeightCache) -> None:
    """Compute a launch and write its outputs; SimulationError when it leaves the memories."""
    rows, columns = _written(launch)
    step = 2 if launch.strided else 1
    nbytes = launch.out_bits // 8
    strides = (launch.out_strides[1] * step, launch.out_strides[2] * step)
    target = _pixels(bus, launch.outfeat, (rows, columns, launch.out_channels * nbytes), strides)
    sums = _accumulate(launch, _inputs(launch, bus), weights.fetch(launch, bus))
    if launch.stream_in:
        sums = sums + np.ascontiguousarray(target).view("<i4")
    outputs = _requantise(launch, _wrap(sums, 32), bus)
    words = (outputs & ((1 << launch.out_bits) - 1)).astype("<u4" if nbytes == 4 else np.uint8)
    target[...] = np.ascontiguousarray(words).view(np.uint8).reshape(target.shape)
