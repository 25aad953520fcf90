"""MAERI in the simulated chip: registers, one running and one waiting launch, results at the end of a launch.

Registers are 32 bits wide; the public RTL has none, this chip's are:

- 0x00 CONTROL, write 1: launch with the registers as they are.
- 0x04 TASK, 0x08 WORDS: address of the task (`task.py`) and how many words it has. 0x0C CONSTANTS: address of the
  launch's constants.
- 0x10 FINISHED, read: launches finished since reset, modulo 2^32; lowers the interrupt line.
- 0x14 ROOM, read: launches that can still be handed over, 0 to 2.
- 0x18 HOLD, write 1: keep the task until the next launch, which begins with it: their items have multipliers and ports
  of their own. At most `MaeriConfig.joint` tasks, the last included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from dovetail.errors import DovetailError, SimulationError
from dovetail.ir.operators.arithmetic import Rounding, fixed_point
from dovetail.ir.types import Array
from dovetail.sim.device import Activity, Bus
from dovetail.sim.launch_queue import ControlledDevice, Launch
from dovetail.target.layers import RAISED_BITS
from dovetail.targets.maeri.bound import addition_cycles
from dovetail.targets.maeri.config import STAGE_CYCLES, MaeriConfig
from dovetail.targets.maeri.network import TaskKind
from dovetail.targets.maeri.order import NetworkOrder, layer_spans, simulate
from dovetail.targets.maeri.task import OutputStage, StridedArray, Task, decode, layers_of
from dovetail.targets.maeri.tile import in_order

MOST_WORDS = 1 << 24
"""Words of a task."""


class MaeriRegister(IntEnum):
    """Byte offsets of the registers."""

    CONTROL = 0x00
    TASK = 0x04
    WORDS = 0x08
    CONSTANTS = 0x0C
    FINISHED = 0x10
    ROOM = 0x14
    HOLD = 0x18


PlacedTask = tuple[Task, int]
"""A task, and the address of its constants."""


@dataclass(frozen=True, slots=True)
class _MaeriLaunch:
    """Tasks side by side, in one order."""

    tasks: tuple[PlacedTask, ...]
    order: NetworkOrder | None
    """None for an addition."""


class MaeriDevice(ControlledDevice[_MaeriLaunch]):
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
        hint = "look at the driver: it writes TASK, WORDS, CONSTANTS, HOLD and CONTROL only"
        super().__init__(bus, name, MaeriRegister, (MaeriRegister.FINISHED, MaeriRegister.ROOM), hint)

    def clear(self) -> None:
        """See `QueueDevice.clear`."""
        super().clear()
        self._held: list[PlacedTask] = []

    def write(self, offset: int, value: int, now: int) -> None:
        """See `ControlledDevice`; and HOLD."""
        if offset != MaeriRegister.HOLD:
            super().write(offset, value, now)
            return
        if value != 1 or len(self._held) + 1 >= self.config.joint:
            what = f"HOLD is written {value} with {len(self._held)} tasks held; {self.config.joint} may begin together"
            raise SimulationError(what, where=self.name, hint="look at the driver: write 1, then start the last one")
        self._held.append(self._task())

    def _task(self) -> PlacedTask:
        """The task that the registers describe."""
        address, count = self.registers[MaeriRegister.TASK], self.registers[MaeriRegister.WORDS]
        if count > MOST_WORDS or address % 4:
            what = f"a task of {count} words at {address:#x}; the limit is {MOST_WORDS}, from a multiple of 4 on"
            hint = "look at the driver: give the address and the words of a whole task"
            raise SimulationError(what, where=self.name, hint=hint)
        task = decode(self.bus.view(address, 4 * count).view("<u4").tolist())
        if (task.stage and not self.config.requantise) or (any(astuple(task.padding)) and not self.config.padding):
            what = "the task asks for a stage or a padding that this configuration has not"
            raise SimulationError(what, where=self.name, hint="compile for the target as it is")
        return task, self.registers[MaeriRegister.CONSTANTS]

    def launch(self, now: int) -> None:
        """See `ControlledDevice.launch`."""
        own, self._held = (*self._held, self._task()), []
        tasks = [task for task, _ in own]
        try:
            order = _order(tasks, self.config)
            cycles = _cycles(tasks, order, self.config)
        except DovetailError as error:
            hint = error.hint or "look at the words of the task"
            raise SimulationError(f"the task cannot be computed: {error.what}", where=self.name, hint=hint) from error
        except (ValueError, ZeroDivisionError, MemoryError) as error:
            hint = "look at the words of the task: they contradict each other"
            raise SimulationError(f"the task cannot be computed: {error}", where=self.name, hint=hint) from error
        self.queue.hand_over(_MaeriLaunch(own, order), now, cycles)

    def complete(self, launch: Launch[_MaeriLaunch]) -> Activity:
        """See `QueueDevice.complete`: computed from the contents of the memories now."""
        tasks, order = launch.work.tasks, launch.work.order
        results = [self._sum_of_images(*tasks[0])] if order is None else self._sums(tasks, order)
        for (task, constants), sums in zip(tasks, results, strict=True):
            self._store(task, constants, sums)
        items = sum(len(task.items) for task, _ in tasks)
        return Activity(launch.start, launch.end, f"{items} items", macs=sum(_macs(task) for task, _ in tasks))

    def parts(self, launch: Launch[_MaeriLaunch]) -> Sequence[Activity]:
        """See `QueueDevice.parts`: each task from its first weight to its last result."""
        whole, (tasks, order) = self.complete(launch), (launch.work.tasks, launch.work.order)
        if order is None or len(tasks) == 1:
            return [whole]
        parts = []
        for number, ((task, _), (first, last)) in enumerate(zip(tasks, layer_spans(order), strict=True)):
            label = f"{len(task.items)} items, {number + 1} of {len(tasks)} tasks side by side"
            end = launch.start + last + (STAGE_CYCLES if task.stage else 0)
            parts.append(Activity(launch.start + first, end, label, macs=_macs(task)))
        return parts

    def _store(self, task: Task, constants: int, sums: Array) -> None:
        """Write the sums of a task, [rows, columns, channels], or the results of its stage."""
        result = sums.astype(np.int32)  # wraps as the accumulators do
        if task.stage is not None:
            stage, channels = task.stage, _channels(task) if task.items else 1
            multiplier, shift = self._scales(task.stage, constants, channels).T
            scaled = fixed_point(result.astype(np.int64), multiplier, shift, Rounding.DOUBLE) + stage.limits.zero_point
            result = np.clip(scaled, stage.limits.low, stage.limits.high).astype(np.int8)
        self._image(task.result, result.shape, result.dtype)[...] = result

    def _sums(self, tasks: Sequence[PlacedTask], order: NetworkOrder) -> list[Array]:
        """Sums of layers side by side, each [rows, columns, channels]."""
        values: dict[str, Array] = {}
        for (task, constants), work in zip(tasks, order.network.works, strict=True):
            types, (source, weights) = order.network.graph.types, work.node.inputs[:2]
            blob = self.bus.view(constants + task.weights, types[weights].elements)
            top, left, bottom, right = astuple(task.padding)
            rows, columns, channels = (1, 1, *types[source].shape)[-3:]
            shape = (rows - top - bottom, columns - left - right, channels)
            x = self._image(task.source, shape, np.dtype(np.uint8 if task.unsigned else np.int8))
            x = np.pad(x, ((top, bottom), (left, right), (0, 0)), constant_values=task.zero_point)
            values[source] = x.reshape(types[source].shape)
            values[weights] = blob.view(np.int8).reshape(types[weights].shape)
        outputs, results = simulate(order, values).outputs, []
        for (task, constants), work in zip(tasks, order.network.works, strict=True):
            bias = self.bus.view(constants + task.bias, 4 * _channels(task)).view("<i4").astype(np.int64)
            sums = outputs[work.node.output].astype(np.int64) + bias
            results.append(sums[None] if work.turned else np.asarray(sums[0]))
        return results

    def _sum_of_images(self, task: Task, constants: int) -> Array:
        """Two images, each raised and brought to one scale, added."""
        stage, layer = task.stage, task.layer
        assert stage is not None
        operands = ((task.source, task.zero_point), (stage.other, stage.other_zero_point))
        total = np.zeros((layer.in_rows, layer.in_columns, layer.groups), np.int64)
        for (place, zero), (multiplier, shift) in zip(operands, self._scales(stage, constants, 3)[1:], strict=True):
            raised = (self._image(place, total.shape, np.dtype(np.int8)).astype(np.int64) - zero) << RAISED_BITS
            total += fixed_point(raised, multiplier, shift, Rounding.DOUBLE)
        return total

    def _scales(self, stage: OutputStage, constants: int, count: int) -> Array:
        """Multipliers and shifts, [count, 2]."""
        return self.bus.view(constants + stage.scales, 8 * count).view("<i4").reshape(count, 2)

    def _image(self, place: StridedArray, shape: tuple[int, ...], kind: np.dtype[np.generic]) -> Array:
        """An array in memory as [rows, columns, channels]."""
        strides = (place.row, place.column, place.channel)
        extent = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + kind.itemsize
        return as_strided(self.bus.view(place.address, extent)[: kind.itemsize].view(kind), shape, strides)


def _channels(task: Task) -> int:
    return task.layer.in_rows if task.kind is TaskKind.TURNED else task.layer.filters * task.layer.groups


def _macs(task: Task) -> int:
    return task.layer.macs if task.items else 0


def _cycles(tasks: Sequence[Task], order: NetworkOrder | None, config: MaeriConfig) -> int:
    """Cycles from the first weight to the last result in memory."""
    stage = STAGE_CYCLES if any(task.stage for task in tasks) else 0
    if order is None:
        layer = tasks[0].layer
        return addition_cycles(config, layer.in_rows * layer.in_columns * layer.groups) + stage
    return max(end for _, end in layer_spans(order)) + stage


def _order(tasks: Sequence[Task], config: MaeriConfig) -> NetworkOrder | None:
    """The tasks' items as an order of a network of one layer each; None for an addition, which is alone."""
    if len(tasks) > 1 and not all(task.items for task in tasks):
        hint = "start additions by themselves"
        raise SimulationError("an addition takes all ports and lines", where="maeri", hint=hint)
    if not tasks[0].items:
        return None
    items = [replace(item, work=number) for number, task in enumerate(tasks) for item in task.items]
    return NetworkOrder(layers_of(tasks), config, in_order(items), 0)
