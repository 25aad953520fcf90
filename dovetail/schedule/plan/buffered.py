"""Engines' own buffers: where each launch loads what it needs, and what a launch before has loaded there."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from dovetail.program.ir import Buffered, LaunchStatement, Program, Statement, View, writes
from dovetail.program.loops import digest
from dovetail.records import Record
from dovetail.schedule.plan.allocate import Placement
from dovetail.target.chip import Memory
from dovetail.target.description import Target
from dovetail.target.offload import Offload, placed
from dovetail.user_file import asking


class _Loaded(Record):
    """Something that was loaded into a buffer."""

    what: Hashable
    """Equal for what is loaded in the same way from the same bytes."""
    source: tuple[str, range] | None
    """Memory and addresses it was loaded from; None for constants, which stay as they are."""
    place: range = range(0)
    """Counted from the buffer's first byte."""


@dataclass
class _LoadBuffer:
    """An engine's own buffer while a program is walked."""

    memory: Memory
    held: list[_Loaded] = field(default_factory=list)
    """The last used last."""

    def load(self, wanted: Mapping[str, int | range], asked: Mapping[str, _Loaded]) -> dict[str, Buffered]:
        """Places of what a launch wants; what is there stays where it is, if the rest has room beside it."""
        there = {
            name: one.place
            for name, size in wanted.items()
            for one in self.held
            if one.what == asked[name].what and size in (one.place, len(one.place))
        }
        places = self._beside(wanted, there)
        if places is None:
            there, places = {}, placed(wanted, self.memory.alignment)
        new = [replace(asked[name], place=place) for name, place in places.items()]
        self.held = [one for one in self.held if not any(_overlap(one.place, place) for place in places.values())] + new
        base = self.memory.base
        return {n: Buffered(range(base + places[n].start, base + places[n].stop), n in there) for n in wanted}

    def _beside(self, wanted: Mapping[str, int | range], there: Mapping[str, range]) -> dict[str, range] | None:
        """Places that leave as much of what is held as there is room for, the last used before others; None where
        what is there leaves no room for the rest."""
        idle = [one.place for one in self.held if one.place not in there.values()]
        while True:
            found = placed({**wanted, **there}, self.memory.alignment, idle)
            ordered = sorted(found.values(), key=lambda one: one.start)
            apart = all(one.stop <= other.start for one, other in pairwise(ordered))
            if apart and all(one.stop <= self.memory.size for one in ordered):
                return found
            if not idle:
                return None
            del idle[0]

    def written(self, memory: str, span: range) -> None:
        """Forget what was loaded from bytes that change."""
        self.held = [
            one
            for one in self.held
            if one.source is None or one.source[0] != memory or not _overlap(one.source[1], span)
        ]


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


def with_buffers(program: Program, target: Target, offloads: Mapping[tuple[int, str], Offload]) -> Program:
    """The program whose launches know where what they load lies in their engine's buffer, and what is there already.

    Args:
        program: its buffers have addresses.
        target: the machine.
        offloads: by number of the layer and name of the engine.
    """
    buffers = {one.name: _LoadBuffer(target.memory(one.buffer)) for one in target.engines if one.buffer}
    if not buffers:
        return program
    made: list[Statement] = []
    for statement in program.statements:
        if isinstance(statement, LaunchStatement) and statement.engine in buffers:
            offload = offloads[statement.layer, statement.engine]
            with asking(f"what {offload.name} loads for {program.layers[statement.layer]}"):
                wanted = offload.buffered(statement.match) if offload.buffered else {}
            asked = {name: _asked(program, statement, offload.name, name) for name in wanted}
            statement = replace(statement, buffered=buffers[statement.engine].load(wanted, asked))
        for view in writes(statement):
            for buffer in buffers.values():
                buffer.written(*_source(program, view))
        made.append(statement)
    return replace(program, statements=tuple(made))


def _asked(program: Program, launch: LaunchStatement, offload: str, name: str) -> _Loaded:
    if name in launch.packed:
        return _Loaded((offload, name, digest(launch.packed[name])), None)
    view = launch.operands[launch.match.values[name]]
    memory, span = _source(program, view)
    return _Loaded((offload, memory, span, view.type, view.strides, view.layout), (memory, span))


def _source(program: Program, view: View) -> tuple[str, range]:
    buffer = program.buffers[view.buffer]
    first = (buffer.address or 0) + view.span[0]
    return buffer.memory, range(first, first + view.span[1] - view.span[0])


def filled(placements: Sequence[Placement], program: Program, target: Target) -> tuple[Placement, ...]:
    """The placements of the memories, those of engines' own buffers with what launches load there."""
    made = list(placements)
    for index, one in enumerate(placements):
        own = [engine.name for engine in target.engines if engine.buffer == one.memory]
        launches = [s for s in program.statements if isinstance(s, LaunchStatement) and s.engine in own and s.buffered]
        if launches:
            base = target.memory(one.memory).base
            most = [sum(len(each.place) for each in launch.buffered.values()) for launch in launches]
            peak = max(each.place.stop for launch in launches for each in launch.buffered.values()) - base
            made[index] = replace(one, peak=peak, lower_bound=max(most))
    return tuple(made)
