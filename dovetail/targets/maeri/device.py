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
from dataclasses import replace
from enum import IntEnum
from math import prod
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from dovetail.errors import DovetailError, SimulationError
from dovetail.ir.graph import Graph, GraphBuilder, evaluate
from dovetail.ir.operators.arithmetic import Requantize
from dovetail.ir.operators.movement import Pad
from dovetail.ir.pattern import apply
from dovetail.ir.types import Array, DType, Shape, TensorType
from dovetail.records import Record
from dovetail.sim.device import Activity, Bus
from dovetail.sim.launch_queue import ControlledDevice, Launch
from dovetail.targets.maeri.bound import addition_cycles
from dovetail.targets.maeri.coded import add_step, operators
from dovetail.targets.maeri.config import STAGE_CYCLES, MaeriConfig
from dovetail.targets.maeri.network import network
from dovetail.targets.maeri.order import NetworkOrder, check, laid_out
from dovetail.targets.maeri.task import Task, decode
from dovetail.targets.maeri.tile import in_order

_PAD, _SCALE = apply(Pad), apply(Requantize)
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


class _MaeriLaunch(Record):
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
        stage, padding = _has_stage(task), operators(_PAD, task.step.nodes)
        if (stage and not self.config.requantise) or (padding and not self.config.padding):
            what = "the task asks for a stage or a padding that this configuration has not"
            raise SimulationError(what, where=self.name, hint="compile for the target as it is")
        return task, self.registers[MaeriRegister.CONSTANTS]

    def launch(self, now: int) -> None:
        """See `ControlledDevice.launch`."""
        own, self._held = (*self._held, self._task()), []
        tasks = [task for task, _ in own]
        try:
            order, elements = _order(tasks, self._graph(own)[0], self.config), tasks[0].step.result.elements
            cycles = check(order) if order else addition_cycles(self.config, elements)
        except DovetailError as error:
            hint = error.hint or "look at the words of the task"
            what = f"the task cannot be computed: {error.where or ''}: {error.what}"
            raise SimulationError(what, where=self.name, hint=hint) from error
        except (ValueError, IndexError, ZeroDivisionError, OverflowError, MemoryError) as error:
            hint = "look at the words of the task: they contradict each other"
            raise SimulationError(f"the task cannot be computed: {error}", where=self.name, hint=hint) from error
        self.queue.hand_over(_MaeriLaunch(own, order), now, cycles + STAGE_CYCLES * any(map(_has_stage, tasks)))

    def complete(self, launch: Launch[_MaeriLaunch]) -> Activity:
        """See `QueueDevice.complete`: computed from the contents of the memories now."""
        tasks, order = launch.work.tasks, launch.work.order
        graph, inputs = self._graph(tasks)
        for (task, _), result in zip(tasks, evaluate(graph, inputs).values(), strict=True):
            self._array(task.step.result.address, result.shape, task.strides[-1], result.dtype)[...] = result
        items = sum(len(task.items) for task, _ in tasks)
        return Activity(launch.start, launch.end, f"{items} items", macs=sum(_macs(order)))

    def parts(self, launch: Launch[_MaeriLaunch]) -> Sequence[Activity]:
        """See `QueueDevice.parts`: each task from its first weight to its last result."""
        whole, (tasks, order) = self.complete(launch), (launch.work.tasks, launch.work.order)
        if order is None or len(tasks) == 1:
            return [whole]
        parts = []
        for number, (task, _) in enumerate(tasks):
            items = laid_out(order.of(number), order.network.works, self.config)
            label = f"{len(task.items)} items, {number + 1} of {len(tasks)} tasks side by side"
            end = launch.start + items.exists + STAGE_CYCLES * _has_stage(task)
            parts.append(Activity(launch.start + items.start, end, label, macs=_macs(order)[number]))
        return parts

    def _graph(self, tasks: Sequence[PlacedTask]) -> tuple[Graph, dict[str, Array]]:
        """A graph of tasks, with the constants and the inputs that are in memory now."""
        builder, inputs, results = GraphBuilder("launch"), dict[str, Array](), list[str]()
        for number, (task, constants) in enumerate(tasks):
            values, kind = list[str](), DType.UINT8 if task.unsigned else DType.INT8
            for place, strides in zip(task.step.reads, task.strides, strict=False):
                values.append(builder.input(builder.fresh("x"), TensorType(place.shape, kind)))
                inputs[values[-1]] = self._array(place.address, place.shape, strides, kind.numpy)
            for constant in task.step.constants:
                element = np.dtype(np.int8 if constant.is_weight else np.int32)
                data = self.bus.view(constants + constant.address, element.itemsize * prod(constant.shape))
                values.append(builder.constant("constant", data.view(element).reshape(constant.shape)))
            results.append(add_step(builder, task.step, values, f"task {number}"))
        return builder.finish(results), inputs

    def _array(self, address: int, shape: Shape, strides: Shape, kind: np.dtype[Any]) -> Array:
        """An array in memory."""
        extent = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + kind.itemsize
        return as_strided(self.bus.view(address, extent)[: kind.itemsize].view(kind), shape, strides)


def _has_stage(task: Task) -> bool:
    """Whether results go through the stage behind the collection bus."""
    return bool(operators(_SCALE, task.step.nodes))


def _macs(order: NetworkOrder | None) -> list[int]:
    """Products of each task; none of an addition."""
    return [work.layer.macs for work in order.network.works] if order else []


def _order(tasks: Sequence[Task], graph: Graph, config: MaeriConfig) -> NetworkOrder | None:
    """The tasks' items as an order of a network of one layer each; None for an addition, which is alone."""
    if len(tasks) > 1 and not all(task.items for task in tasks):
        hint = "start additions by themselves"
        raise SimulationError("an addition takes all ports and lines", where="maeri", hint=hint)
    if not tasks[0].items:
        return None
    net, items = network(graph), [replace(item, work=at) for at, task in enumerate(tasks) for item in task.items]
    if len(net.works) != len(tasks):
        raise ValueError(f"{len(tasks)} tasks with items have {len(net.works)} layers")
    return NetworkOrder(net, config, in_order(items), 0)
