"""One layer, whole, given to an engine's Python model; memory is looked at afterwards."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dovetail.check.cases import Case
from dovetail.check.layers import Layer
from dovetail.check.model import MemoryView, carry_out, device_of, last_writes, time_limit
from dovetail.errors import ProgramError
from dovetail.graph.types import Array, TensorType
from dovetail.program.ir import View, dense_view, element_places, load, store
from dovetail.target.description import Command, Engine, LibraryCall, Offload, Operand, Target
from dovetail.target.pattern import Match, Scope

_UNWRITTEN = 0xA5
_CONSTANTS = 16
"""Bytes that packed constants are aligned to."""


def fits_directly(offload: Offload, match: Match) -> bool:
    """Whether a whole layer is one launch."""
    return all(limit.failure(match) is None for limit in offload.constraints if limit.scope is not Scope.LAYERS)


def on_device(
    target: Target, engine: Engine, offload: Offload, match: Match, layer: Layer, case: Case, seconds: float
) -> Array | None:
    """What the engine computes of a layer; None where its memory does not hold it.

    Args:
        target: the machine.
        engine: one with a Python model.
        offload: what it is asked for.
        match: the layer.
        layer: its operands.
        case: where things are to lie.
        seconds: it may take.

    Raises:
        SimulationError: it does what it must not.
        ProgramError: it writes outside of its result.
    """
    memory = target.memory(engine.memory)
    alignment, apart = 256 if case.aligned else memory.alignment, not case.dense
    room = _Room(alignment)
    views = {name: room.view(name, match.graph.types[name], offload, leaf, apart) for leaf, name in
             match.values.items() if name in layer.inputs}  # fmt: skip
    packed = {name: array.reshape(-1).view(np.uint8) for name, array in offload.pack(match).items()}
    step = alignment if case.aligned else _CONSTANTS
    places = {name: room.take(array.size, step) for name, array in packed.items()}
    scratch = room.take(offload.scratch(match), memory.alignment)
    result = room.view("result", match.result, offload, "result", apart)
    if room.used > memory.size:
        return None
    contents = np.full(memory.size, _UNWRITTEN, np.uint8)
    for name, view in views.items():
        store(contents, view, 0, layer.inputs[name])
    for name, array in packed.items():
        contents[places[name] : places[name] + array.size] = array
    before = contents.copy()
    operands = {name: Operand(memory.base + view.offset, view.strides) for name, view in views.items()}
    operands |= {name: Operand(memory.base + place, (1,)) for name, place in places.items()}
    operands |= {"result": Operand(memory.base + result.offset, result.strides)}
    operands |= {"scratch": Operand(memory.base + scratch, (1,))}
    _carry_out(target, engine, offload.commands(match, operands), contents, seconds)
    before[scratch : scratch + offload.scratch(match)] = contents[scratch : scratch + offload.scratch(match)]
    _written_elsewhere(before, contents, result)
    return load(contents, result, 0)


def _carry_out(
    target: Target, engine: Engine, commands: Sequence[Command | LibraryCall], contents: Array, seconds: float
) -> None:
    """Every command, on the contents of the engine's memory."""
    others = {other.name: np.full(other.size, _UNWRITTEN, np.uint8) for other in target.memories}
    device = device_of(engine, MemoryView(target, {**others, engine.memory: contents}))
    for command in commands:
        if isinstance(command, Command):
            with time_limit(seconds, last_writes(command)):
                carry_out(device, command)


def _written_elsewhere(before: Array, after: Array, result: View) -> None:
    """Raise where bytes have changed that are not the result's."""
    changed = before != after
    places = element_places(result, 0)[..., None] + np.arange(result.type.dtype.numpy.itemsize)
    changed[places] = False
    if result.layout is not None:  # what pads the last blocks may hold any bytes
        changed[result.span[0] : result.span[1]] = False
    wrong = np.flatnonzero(changed)
    if wrong.size:
        first = int(wrong[0]) - result.span[0]
        raise ProgramError(f"it writes outside of its result: {wrong.size} bytes, the first {first} bytes from where "
                           f"the result begins (it has {result.span[1] - result.span[0]})")  # fmt: skip


class _Room:
    """Places in a memory, one behind the other with some bytes between."""

    def __init__(self, alignment: int) -> None:
        self._alignment, self.used = alignment, alignment

    def take(self, nbytes: int, alignment: int) -> int:
        """The offset of so many bytes; `used` is then past them."""
        place = -(-self.used // alignment) * alignment
        self.used = place + nbytes + self._alignment
        return place

    def view(self, name: str, kind: TensorType, offload: Offload, leaf: str, apart: bool) -> View:
        """A place for a value in the layout the offload takes or gives it in."""
        layout = offload.layouts.get(leaf)
        view = dense_view(name, kind, 0, layout)
        if apart and offload.strided and layout is None and len(view.strides) >= 2:
            view = _apart(view, self._alignment)
        start, stop = view.span
        place = self.take(stop - start, self._alignment)
        return View(name, kind, view.strides, place, layout)


def _apart(view: View, step: int) -> View:
    """The same with gaps behind its pixels and rows."""
    strides = list(view.strides)
    for axis in range(len(strides) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * view.type.shape[axis + 1] + step
    return View(view.buffer, view.type, tuple(strides), view.offset)
