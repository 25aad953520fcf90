"""DIANA's engines in the simulated chip: registers, one job at a time, results of exact integers, published cycles.

The registers around the job's are those of PULP's controller with one context (`HwpeDevice` of dovetail/sim/
launch_queue.py): the published headers have them at the same offsets. Job registers: see registers.py.

A job reads its layer when it is triggered, and everything else when it ends. Activations lie as (channel, row, column),
rows padded to 16 bytes, the bytes of each 32-bit word the other way round; so do vectors. How the analog engine treats
activations beyond 7 bits is not published: here they saturate.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from math import ceil

import numpy as np
from numpy.lib.stride_tricks import as_strided, sliding_window_view
from numpy.typing import NDArray

from dovetail.errors import SimulationError
from dovetail.records import Record
from dovetail.sim.device import Activity, Bus
from dovetail.sim.launch_queue import MASK32, AddressLines, HwpeDevice, Launch
from dovetail.targets.diana import registers as published
from dovetail.targets.diana.registers import LANES, ROWS, Analog, DianaPadding, Digital, JobLayer, Operation, Shape

_ADDRESSES = "look at the addresses and sizes of this job"
WORDS = 4
"""Bytes of a word, within which activations are swapped."""
OPERAND, CODE = (-64, 63), (-32, 31)
"""Least and greatest activation the analog array takes, and result its converter gives."""

Values = NDArray[np.int64]
Registers = dict[int, int]


class _DianaLaunch(Record):
    """A job: its registers as they were at the trigger, and its layer."""

    registers: Registers
    layer: JobLayer


class DianaDevice(HwpeDevice[_DianaLaunch]):
    """One of the engines as a device of the simulator.

    Args:
        bus: the memories it reaches.
        engine: "digital" or "analog".
        costs: the model of the digital engine's cycles, of `registers.DIGITAL`.
        lines: what its address lines show between accesses, of `AddressLines`.
    """

    def __init__(self, bus: Bus, engine: str, costs: str = "plinio", lines: str = AddressLines.HELD.value) -> None:
        self._kind = _DIGITAL if engine == "digital" else _ANALOG
        self._costs = costs
        super().__init__(bus, engine, self._kind.registers, 1, AddressLines(lines))

    def begin(self, identity: int, registers: dict[int, int]) -> tuple[_DianaLaunch, int]:
        """See `HwpeDevice.begin`."""
        kind = self._kind
        if registers[kind.configuration + 4] != published.LAYER_WORDS:
            what = f"CONF has {registers[kind.configuration + 4]} words; a layer has {published.LAYER_WORDS}"
            hint = "look at the driver: write the address and the words of a whole layer"
            raise SimulationError(what, where=self.name, hint=hint)
        data = self.bus.view(registers[kind.configuration], 4 * published.LAYER_WORDS)
        layer = JobLayer(*data.view("<u4").tolist())
        reason = kind.problem(layer)
        if reason:
            hint = "look at the layer's words, or add a Constraint for what the engine cannot do"
            raise SimulationError(f"the engine cannot run this job: {reason}", where=self.name, hint=hint)
        return _DianaLaunch(registers, layer), ceil(kind.cycles(layer, self._costs))

    def complete(self, launch: Launch[_DianaLaunch]) -> Activity:
        """See `QueueDevice.complete`."""
        layer = launch.work.layer
        try:
            self._kind.execute(launch.work.registers, layer, self.bus)
        except SimulationError as error:
            hint = error.hint or _ADDRESSES
            raise SimulationError(error.what, where=f"{self.name} job {launch.number}", hint=hint) from error
        except ValueError as error:
            raise SimulationError(str(error), where=f"{self.name} job {launch.number}", hint=_ADDRESSES) from error
        label = f"{Operation(layer.operation).name.lower()} {layer.fy}x{layer.fx}"
        return Activity(launch.start, launch.end, label, macs=_macs(layer))


def _macs(layer: JobLayer) -> int:
    if layer.operation == Operation.SUM:
        return 0
    depth = 1 if layer.operation == Operation.DEPTHWISE else layer.c
    return layer.k * layer.oy * layer.ox * depth * layer.fy * layer.fx


def _shape(layer: JobLayer) -> Shape:
    groups = layer.c if layer.operation == Operation.DEPTHWISE else 1
    return Shape(layer.c, layer.k, layer.oy, layer.ox, (layer.fy, layer.fx), groups)


def _digital_cycles(layer: JobLayer, costs: str) -> float:
    if layer.operation == Operation.SUM:
        return published.sum_cycles(layer.k * layer.oy * layer.ox)
    model = published.plinio_digital if layer.operation == Operation.DEPTHWISE else published.DIGITAL[costs]
    return model(_shape(layer))


def _analog_cycles(layer: JobLayer, costs: str) -> float:
    return published.plinio_analog(_shape(layer))


def _common_problem(layer: JobLayer, padding: DianaPadding) -> str:
    """Why neither engine, or this model of them, can run a layer; empty when one may."""
    sizes = (layer.c, layer.k, layer.cx, layer.cy, layer.ox, layer.oy)
    down = layer.cy + padding.top + padding.bottom - layer.fy
    across = layer.cx + padding.left + padding.right - layer.fx
    strides = (layer.in_row, layer.in_plane, layer.out_row, layer.out_plane)
    tests = (
        (layer.operation == Operation.DENSE and (layer.cx, layer.cy) != (1, 1), "a dense layer has one pixel"),
        (layer.operation > Operation.SUM, f"there is no operation {layer.operation}"),
        (min(sizes) < 1, "a size is zero"),
        (not {layer.fx, layer.fy} <= {1, 3, 5, 7}, f"the window is {layer.fy}x{layer.fx}; 1, 3, 5 and 7 there are"),
        (layer.stride > 1, f"the stride is {layer.stride + 1}; 1 and 2 there are"),
        (layer.dilation != 1, "dilation is not there"),
        (layer.output_shift > 31, f"the shift is {layer.output_shift}; at most 31"),
        (layer.activation_function > 1, f"there is no activation function {layer.activation_function}"),
        (min(down, across) < 0, "the window is larger than the padded operand"),
        (
            down // (layer.stride + 1) + 1 != layer.oy or across // (layer.stride + 1) + 1 != layer.ox,
            f"the result is {layer.oy}x{layer.ox}, which is not what the window gives",
        ),
        (any(stride % LANES for stride in strides), f"rows and planes lie {strides} bytes apart, no multiples of 16"),
    )
    return next((sentence for wrong, sentence in tests if wrong), "")


def _digital_problem(layer: JobLayer) -> str:
    alike = layer.operation in (Operation.DEPTHWISE, Operation.SUM)
    tests = (
        (alike and layer.c != layer.k, f"{layer.c} channels in and {layer.k} out must be the same"),
        (layer.operation == Operation.DENSE and layer.k > LANES, f"{layer.k} results of a dense layer; at most 16"),
    )
    found = next((sentence for wrong, sentence in tests if wrong), "")
    return found or _common_problem(layer, published.digital_padding(layer.padding))


def _analog_problem(layer: JobLayer) -> str:
    rows = published.array_rows(layer.fx * layer.fy, layer.c)
    tests = (
        (layer.operation not in (Operation.CONVOLUTION, Operation.DENSE), "the array sums products only"),
        (layer.c > 128, f"{layer.c} input channels; at most 128"),
        (layer.k > 512, f"{layer.k} output channels; at most 512"),
        (rows > ROWS, f"the window takes {rows} rows of the array, which has {ROWS}"),
        (layer.gain > 31, f"the gain is {layer.gain}; at most 31"),
    )
    found = next((sentence for wrong, sentence in tests if wrong), "")
    return found or _common_problem(layer, published.analog_padding(layer.padding))


def _planes(bus: Bus, address: int, shape: tuple[int, int, int], strides: tuple[int, int]) -> NDArray[np.uint8]:
    """A writable view of (channels, rows, words, 4) bytes in memory, `strides` between channels and rows."""
    channels, rows, columns = shape
    words = -(-columns // LANES) * LANES // WORDS
    if address % WORDS:
        what = f"an activation lies at {address:#x}, not a multiple of 4"
        raise SimulationError(what, where=f"{address:#x}", hint="align activations to 4 bytes")
    span = (channels - 1) * strides[0] + (rows - 1) * strides[1] + words * WORDS
    return as_strided(bus.view(address, span), (channels, rows, words, WORDS), (*strides, WORDS, 1))


def _load(bus: Bus, address: int, shape: tuple[int, int, int], strides: tuple[int, int]) -> Values:
    """Activations int64 (channels, rows, columns)."""
    found = np.ascontiguousarray(_planes(bus, address, shape, strides)[..., ::-1]).view(np.int8)
    return found.reshape(shape[0], shape[1], -1)[:, :, : shape[2]].astype(np.int64)


def _store(bus: Bus, address: int, values: Values, strides: tuple[int, int]) -> None:
    """Write activations (channels, rows, columns) of int8, unused bytes of rows as zeros."""
    target = _planes(bus, address, (values.shape[0], values.shape[1], values.shape[2]), strides)
    rows = np.zeros((*target.shape[:2], target.shape[2] * WORDS), np.int8)
    rows[:, :, : values.shape[2]] = values
    target[...] = rows.view(np.uint8).reshape(target.shape)[..., ::-1]


def _vector(layer: JobLayer) -> bool:
    return layer.operation == Operation.DENSE


def _operand(layer: JobLayer, bus: Bus, address: int, strides: tuple[int, int]) -> Values:
    """The operand (channels, rows, columns); of a dense layer (channels, 1, 1), which lie as one row."""
    if _vector(layer):
        return _load(bus, address, (1, 1, layer.c), strides).reshape(-1, 1, 1)
    return _load(bus, address, (layer.c, layer.cy, layer.cx), strides)


def _windows(layer: JobLayer, operand: Values, padding: DianaPadding) -> Values:
    """Every window of the padded operand: (channels, rows, columns, taps down, taps across)."""
    sides = ((0, 0), (padding.top, padding.bottom), (padding.left, padding.right))
    view = sliding_window_view(np.pad(operand, sides), (layer.fy, layer.fx), axis=(1, 2))
    step = layer.stride + 1
    return np.asarray(view[:, ::step, ::step][:, : layer.oy, : layer.ox])


def _finish(layer: JobLayer, sums: Values, registers: Registers, bus: Bus, result: int) -> None:
    """Shift, limit and write the sums (channels, rows, columns); those of 32 bits have wrapped around."""
    wrapped = (sums + (1 << 31) & MASK32) - (1 << 31)
    values = np.clip(wrapped >> layer.output_shift, 0 if layer.activation_function else -128, 127)
    if _vector(layer):
        values = values.reshape(1, 1, -1)
    _store(bus, registers[result], values, (layer.out_plane, layer.out_row))


def _run_digital(registers: Registers, layer: JobLayer, bus: Bus) -> None:
    """Sums of products and bias, or of two operands."""
    first = _operand(layer, bus, registers[Digital.ACT_ADDR], (layer.in_plane, layer.in_row))
    if layer.operation == Operation.SUM:
        other = _operand(layer, bus, registers[Digital.ACT_A_ADDR], (layer.second_plane, layer.second_row))
        _finish(layer, first + other, registers, bus, Digital.OUT_DATA)
        return
    windows = _windows(layer, first, published.digital_padding(layer.padding)).astype(np.float64)
    weights, bias = _digital_constants(registers, layer, bus)
    if layer.operation == Operation.DEPTHWISE:
        sums = np.einsum("crxab,cab->crx", windows, weights[:, 0])
    else:
        sums = np.tensordot(weights, windows, axes=([1, 2, 3], [0, 3, 4]))
    _finish(layer, sums.astype(np.int64) + bias[:, None, None], registers, bus, Digital.OUT_DATA)


def _digital_constants(registers: Registers, layer: JobLayer, bus: Bus) -> tuple[NDArray[np.float64], Values]:
    """Weights (channels, depth, taps down, taps across) and biases (channels)."""
    dense, depthwise = _vector(layer), layer.operation == Operation.DEPTHWISE
    channels, taps = layer.k * (4 if depthwise else 1), layer.fy * layer.fx
    depth = -(-layer.c // LANES) * LANES if dense else 1 if depthwise else layer.c
    nbytes = -(-channels // LANES) * published.block_bytes(taps, depth)
    place = (Digital.WT_FC_ADDR, Digital.WT_FC_N) if dense else (Digital.WT_CONV_ADDR, Digital.WT_CONV_N)
    address, given = (registers[register] for register in place)
    if given < nbytes:
        hint = "look at WT_N of the driver: it counts all blocks, padding included"
        raise SimulationError(f"the weights have {given} bytes; the layer needs {nbytes}", where="weights", hint=hint)
    stored, biases = published.unpack_blocks(bus.view(address, nbytes), taps, depth)
    if dense:
        matrix = stored.reshape(-1, depth // LANES, LANES, LANES).transpose(0, 2, 1, 3).reshape(-1, depth, 1, 1)
    else:
        matrix = stored.reshape(-1, depth, layer.fy, layer.fx, LANES).transpose(0, 4, 1, 2, 3)
        matrix = matrix.reshape(-1, depth, layer.fy, layer.fx)
    step = 4 if depthwise else 1
    used = slice(0, channels, step)
    inputs = slice(0, layer.c if dense else depth)
    return matrix[used, inputs].astype(np.float64), biases.reshape(-1)[used].astype(np.int64)


def _run_analog(registers: Registers, layer: JobLayer, bus: Bus) -> None:
    """Sums of the array, through the converter, scaled."""
    operand = _operand(layer, bus, registers[Analog.ACT_ADDR], (layer.in_plane, layer.in_row))
    windows = _windows(layer, np.clip(operand, *OPERAND), published.analog_padding(layer.padding))
    taps = layer.fy * layer.fx
    rows, columns = published.array_rows(taps, layer.c), published.array_columns(layer.k)
    cells = published.unpack_ternary(bus.view(registers[Analog.WT_CONV_ADDR], rows * columns // 4), rows, columns)
    weights = cells.reshape(layer.fy, layer.fx, -1, columns)[:, :, : layer.c, : layer.k].astype(np.float64)
    sums = np.tensordot(weights, windows.astype(np.float64), axes=([2, 0, 1], [0, 3, 4])).astype(np.int64)
    codes = np.clip(sums >> layer.gain, *CODE)
    parameters = np.frombuffer(bus.view(registers[Analog.WT_SIMD_ADDR], 4 * layer.k).tobytes(), "<i2").astype(np.int64)
    scaled = codes * parameters[: layer.k, None, None] + parameters[layer.k :, None, None]
    if np.abs(scaled).max(initial=0) >= 1 << 15:
        hint = "scale the weights down: codes and parameters must stay in 16 bits"
        raise SimulationError("a scaled code leaves 16 bits", where="analog array", hint=hint)
    _finish(layer, scaled, registers, bus, Analog.OUT_DATA)


class _EngineVariant(Record):
    """Differences between the two engines."""

    registers: tuple[IntEnum, ...]
    configuration: int
    """Offset of CONF_ADDR; its number of words is the next register."""
    problem: Callable[[JobLayer], str]
    cycles: Callable[[JobLayer, str], float]
    execute: Callable[[Registers, JobLayer, Bus], None]


_DIGITAL = _EngineVariant(tuple(Digital), Digital.CONF_ADDR, _digital_problem, _digital_cycles, _run_digital)
_ANALOG = _EngineVariant(tuple(Analog), Analog.CONF_ADDR, _analog_problem, _analog_cycles, _run_analog)
