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
from dovetail.graph.graph import GraphBuilder
from dovetail.graph.types import Array, DType, TensorType
from dovetail.operators.linear import Conv2d, DepthwiseConv2d
from dovetail.simulate.device import Activity, Bus
from dovetail.simulate.launch_queue import Launch, LaunchQueue
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.schedule import Schedule
from dovetail.targets.maeri.simulate import makespan, simulate
from dovetail.targets.maeri.task import Place, Task, decode
from dovetail.targets.maeri.work import network

LAUNCHES = 2
"""Launches the device holds: one running, one waiting."""
MOST_WORDS = 1 << 24
"""Words of a task."""
_MASK32 = 0xFFFFFFFF


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
    schedule: Schedule
    constants: int


class MaeriDevice:
    """The engine as a `Device`.

    Args:
        bus: the memories it reaches.
        name: its name in reports and messages.
        fields: fields of `MaeriConfig` that differ from its defaults.

    Raises:
        TargetError: the configuration is not possible.
    """

    def __init__(self, bus: Bus, name: str = "maeri", **fields: Any) -> None:
        self.name = name
        self.config = MaeriConfig(**fields)
        self._bus = bus
        self.reset()

    def reset(self) -> None:
        """See `Device.reset`."""
        self._registers = dict.fromkeys(Register, 0)
        self._queue: LaunchQueue[_Work] = LaunchQueue(self.name, LAUNCHES)

    def read(self, offset: int, now: int) -> int:
        """See `Device.read`."""
        register = self._register(offset)
        if register is Register.FINISHED:
            return self._queue.collect()
        return self._queue.room if register is Register.ROOM else self._registers[register]

    def write(self, offset: int, value: int, now: int) -> None:
        """See `Device.write`."""
        register = self._register(offset)
        if register in (Register.FINISHED, Register.ROOM):
            raise SimulationError(f"register {register.name} is read-only", where=self.name,
                                  hint="look at the driver: it writes TASK, WORDS, CONSTANTS and CONTROL only")
        if register is Register.CONTROL:
            self._launch(value, now)
        else:
            self._registers[register] = value & _MASK32

    def next_event(self) -> int | None:
        """See `Device.next_event`."""
        return self._queue.next_event()

    def advance(self, now: int) -> None:
        """See `Device.advance`."""
        for launch in self._queue.ended(now):
            self._execute(launch.work)
            self._queue.activities.append(_activity(launch))

    def interrupt(self) -> bool:
        """See `Device.interrupt`."""
        return self._queue.interrupt

    def activities(self) -> list[Activity]:
        """See `Device.activities`."""
        return list(self._queue.activities)

    def _register(self, offset: int) -> Register:
        try:
            return Register(offset)
        except ValueError:
            raise SimulationError(f"there is no register at offset {offset:#x}", where=self.name,
                                  hint="look at the driver: its offsets must be those of the engine's header") from None

    def _launch(self, value: int, now: int) -> None:
        if value != 1:
            raise SimulationError(f"CONTROL was written {value}; it takes 1", where=self.name,
                                  hint="look at the driver: write 1 to start")
        self._queue.check_room()
        address, count = self._registers[Register.TASK], self._registers[Register.WORDS]
        if count > MOST_WORDS or address % 4:
            raise SimulationError(f"a task of {count} words at {address:#x}; the limit is {MOST_WORDS}, from a "
                                  "multiple of 4 on", where=self.name,
                                  hint="look at the driver: give the address and the words of a whole task")
        task = decode(self._bus.view(address, 4 * count).view("<u4").tolist())
        try:
            schedule = _schedule(task, self.config)
            cycles = makespan(schedule)
        except DovetailError as error:
            raise SimulationError(f"the task cannot be computed: {error.what}", where=self.name,
                                  hint=error.hint or "look at the words of the task") from error
        except (ValueError, ZeroDivisionError, MemoryError) as error:
            raise SimulationError(f"the task cannot be computed: {error}", where=self.name,
                                  hint="look at the words of the task: they contradict each other") from error
        self._queue.hand_over(_Work(task, schedule, self._registers[Register.CONSTANTS]), now, cycles)

    def _execute(self, launch: _Work) -> None:
        """Compute a launch from what its memories hold now."""
        task, layer = launch.task, launch.task.layer
        source, weights = (launch.schedule.network.works[0].node.inputs)[:2]
        outputs = layer.filters * layer.groups
        kinds = launch.schedule.network.graph.types
        blob = self._bus.view(launch.constants + task.weights, kinds[weights].elements)
        values = {
            source: self._image(task.source, kinds[source].shape[1:], np.dtype(np.uint8 if task.unsigned else np.int8)),
            weights: blob.view(np.int8).reshape(kinds[weights].shape),
        }
        bias = self._bus.view(launch.constants + task.bias, 4 * outputs).view("<i4").astype(np.int64)
        found = simulate(launch.schedule, {source: values[source][None], weights: values[weights]})
        sums = found.outputs[launch.schedule.network.graph.outputs[0]][0].astype(np.int64) + bias
        result = self._image(task.result, sums.shape, np.dtype("<i4"))
        result[...] = sums.astype(np.int32)  # wraps as the accumulators do

    def _image(self, place: Place, shape: tuple[int, ...], kind: np.dtype[np.generic]) -> Array:
        """An array in memory as [rows, columns, channels]."""
        strides = (place.row, place.column, place.channel)
        extent = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + kind.itemsize
        return as_strided(self._bus.view(place.address, extent)[: kind.itemsize].view(kind), shape, strides)


def _activity(launch: Launch[_Work]) -> Activity:
    task = launch.work.task
    return Activity(launch.start, launch.end, f"{len(task.items)} items", macs=task.layer.macs)


def _schedule(task: Task, config: MaeriConfig) -> Schedule:
    """The task's items as an order of a network of one layer."""
    layer = task.layer
    builder = GraphBuilder("launch")
    image = (1, layer.in_rows, layer.in_columns, layer.channels * layer.groups)
    x = builder.input("x", TensorType(image, DType.UINT8 if task.unsigned else DType.INT8))
    channels = layer.filters * layer.groups
    kernel = (layer.rows, layer.columns)
    shape = (1, *kernel, channels) if task.depthwise else (channels, *kernel, layer.channels)
    w = builder.constant("weights", np.zeros(shape, np.int8))
    operator = DepthwiseConv2d if task.depthwise else Conv2d
    stride = (layer.stride, layer.stride)
    result = builder.add(operator(stride, input_zero_point=task.zero_point), [x, w], "result")
    net = network(builder.finish([result]))
    return Schedule(net, config, task.items, 0)
