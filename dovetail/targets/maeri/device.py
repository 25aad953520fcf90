"""MAERI in the simulated chip: registers, one running and one waiting launch, results at the end of a launch.

Registers are 32 bits wide; the public RTL has none, this chip's are:

- 0x00 CONTROL, write 1: launch with the registers as they are.
- 0x04 TASK, 0x08 WORDS: address of the task (`task.py`) and how many words it has. 0x0C CONSTANTS: address of the
  launch's constants.
- 0x10 FINISHED, read: launches finished since reset, modulo 2^32; lowers the interrupt line.
- 0x14 ROOM, read: launches that can still be handed over, 0 to 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from dovetail.errors import DovetailError, SimulationError
from dovetail.ir.graph import GraphBuilder
from dovetail.ir.operators.arithmetic import Rounding, fixed_point
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.types import Array, DType, TensorType
from dovetail.sim.device import Activity, Bus
from dovetail.sim.launch_queue import ControlledDevice, Launch
from dovetail.targets.maeri.config import STAGE_CYCLES, MaeriConfig
from dovetail.targets.maeri.network import network
from dovetail.targets.maeri.order import Order
from dovetail.targets.maeri.simulate import makespan, simulate
from dovetail.targets.maeri.task import Kind, Strided, Task, decode
from dovetail.targets.maeri.timing import addition_cycles

MOST_WORDS = 1 << 24
"""Words of a task."""


class Register(IntEnum):
    """Byte offsets of the registers."""

    CONTROL = 0x00
    TASK = 0x04
    WORDS = 0x08
    CONSTANTS = 0x0C
    FINISHED = 0x10
    ROOM = 0x14


@dataclass(frozen=True, slots=True)
class _Work:
    """What a launch computes, and the address of its constants."""

    task: Task
    order: Order
    constants: int


class MaeriDevice(ControlledDevice[_Work]):
    """The engine as a `Device`.

    Args:
        bus: the memories it reaches.
        name: its name in reports and messages.
        fields: fields of `MaeriConfig` that differ from its defaults.

    Raises:
        TargetError: the configuration is not possible.
    """

    def __init__(self, bus: Bus, name: str = "maeri", **fields: Any) -> None:
        self.config = MaeriConfig(**fields)
        hint = "look at the driver: it writes TASK, WORDS, CONSTANTS and CONTROL only"
        super().__init__(bus, name, Register, (Register.FINISHED, Register.ROOM), hint)

    def launch(self, now: int) -> None:
        """See `ControlledDevice.launch`."""
        address, count = self.registers[Register.TASK], self.registers[Register.WORDS]
        if count > MOST_WORDS or address % 4:
            what = f"a task of {count} words at {address:#x}; the limit is {MOST_WORDS}, from a multiple of 4 on"
            hint = "look at the driver: give the address and the words of a whole task"
            raise SimulationError(what, where=self.name, hint=hint)
        task = decode(self.bus.view(address, 4 * count).view("<u4").tolist())
        if (task.stage and not self.config.requantise) or (any(task.padding) and not self.config.padding):
            what = "the task asks for a stage or a padding that this configuration has not"
            raise SimulationError(what, where=self.name, hint="compile for the target as it is")
        try:
            order = _order(task, self.config)
            cycles = _cycles(task, order, self.config)
        except DovetailError as error:
            hint = error.hint or "look at the words of the task"
            raise SimulationError(f"the task cannot be computed: {error.what}", where=self.name, hint=hint) from error
        except (ValueError, ZeroDivisionError, MemoryError) as error:
            hint = "look at the words of the task: they contradict each other"
            raise SimulationError(f"the task cannot be computed: {error}", where=self.name, hint=hint) from error
        self.queue.hand_over(_Work(task, order, self.registers[Register.CONSTANTS]), now, cycles)

    def complete(self, launch: Launch[_Work]) -> Activity:
        """See `QueueDevice.complete`: computed from what the memories hold now."""
        task = launch.work.task
        sums = self._products(launch.work) if task.items else self._added(launch.work)
        found = sums.astype(np.int32)  # wraps as the accumulators do
        if task.stage is not None:
            stage, channels = task.stage, _channels(task) if task.items else 1
            multiplier, shift = self._scales(launch.work, channels).T
            scaled = fixed_point(found.astype(np.int64), multiplier, shift, Rounding.DOUBLE) + stage.zero_point
            found = np.clip(scaled, stage.low, stage.high).astype(np.int8)
        self._image(task.result, found.shape, found.dtype)[...] = found
        macs = task.layer.macs if task.items else 0
        return Activity(launch.start, launch.end, f"{len(task.items)} items", macs=macs)

    def _products(self, work: _Work) -> Array:
        """Sums of a layer, [rows, columns, channels]."""
        task, kinds = work.task, work.order.network.graph.types
        source, weights = (work.order.network.works[0].node.inputs)[:2]
        blob = self.bus.view(work.constants + task.weights, kinds[weights].elements)
        top, left, bottom, right = task.padding
        rows, columns, channels = (1, 1, *kinds[source].shape)[-3:]
        shape = (rows - top - bottom, columns - left - right, channels)
        x = self._image(task.source, shape, np.dtype(np.uint8 if task.unsigned else np.int8))
        x = np.pad(x, ((top, bottom), (left, right), (0, 0)), constant_values=task.zero_point)
        w = blob.view(np.int8).reshape(kinds[weights].shape)
        outputs = _channels(task)
        bias = self.bus.view(work.constants + task.bias, 4 * outputs).view("<i4").astype(np.int64)
        found = simulate(work.order, {source: x.reshape(kinds[source].shape), weights: w})
        sums = found.outputs[work.order.network.graph.outputs[0]].astype(np.int64) + bias
        return sums[None] if task.kind == Kind.TURNED else np.asarray(sums[0])

    def _added(self, work: _Work) -> Array:
        """Two images, each raised by 20 bits and brought to one scale."""
        task, stage, layer = work.task, work.task.stage, work.task.layer
        assert stage is not None
        operands = ((task.source, task.zero_point), (stage.other, stage.other_zero_point))
        total = np.zeros((layer.in_rows, layer.in_columns, layer.groups), np.int64)
        for (place, zero), (multiplier, shift) in zip(operands, self._scales(work, 3)[1:], strict=True):
            raised = (self._image(place, total.shape, np.dtype(np.int8)).astype(np.int64) - zero) << 20
            total += fixed_point(raised, multiplier, shift, Rounding.DOUBLE)
        return total

    def _scales(self, work: _Work, count: int) -> Array:
        """Multipliers and shifts, [count, 2]."""
        assert work.task.stage is not None
        return self.bus.view(work.constants + work.task.stage.scales, 8 * count).view("<i4").reshape(count, 2)

    def _image(self, place: Strided, shape: tuple[int, ...], kind: np.dtype[np.generic]) -> Array:
        """An array in memory as [rows, columns, channels]."""
        strides = (place.row, place.column, place.channel)
        extent = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + kind.itemsize
        return as_strided(self.bus.view(place.address, extent)[: kind.itemsize].view(kind), shape, strides)


def _channels(task: Task) -> int:
    """Of the result."""
    return task.layer.in_rows if task.kind == Kind.TURNED else task.layer.filters * task.layer.groups


def _cycles(task: Task, order: Order, config: MaeriConfig) -> int:
    """From the first weight to the last result in memory."""
    layer, stage = task.layer, STAGE_CYCLES if task.stage else 0
    if not task.items:
        return addition_cycles(config, layer.in_rows * layer.in_columns * layer.groups) + stage
    return makespan(order) + stage


def _order(task: Task, config: MaeriConfig) -> Order:
    """The task's items as an order of a network of one layer."""
    layer = task.layer
    builder = GraphBuilder("launch")
    image = (1, layer.in_rows, layer.in_columns, layer.channels * layer.groups)
    turned, kind = task.kind == Kind.TURNED, DType.UINT8 if task.unsigned else DType.INT8
    x = builder.input("x", TensorType((1, layer.channels) if turned else image, kind))
    channels = layer.filters * layer.groups
    kernel = (layer.rows, layer.columns)
    shape: tuple[int, ...] = (channels, *kernel, layer.channels)
    if task.kind != Kind.CONVOLUTION:
        shape = (layer.in_rows, layer.channels) if turned else (1, *kernel, channels)
    w = builder.constant("weights", np.zeros(shape, np.int8))
    stride = (layer.stride, layer.stride)
    operator = DepthwiseConv2d if task.kind == Kind.DEPTHWISE else Conv2d
    window = (
        FullyConnected(input_zero_point=task.zero_point)
        if turned
        else operator(stride, input_zero_point=task.zero_point)
    )
    result = builder.add(window, [x, w], "result")
    net = network(builder.finish([result]))
    return Order(net, config, task.items, 0)
