"""Lists of commands, which an engine is started with once, and copies as what DMAs are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

from dovetail.program.ir import Copy, Program, Wait, queue_of, stream_of
from dovetail.program.transfers import dma_rows
from dovetail.records import Record
from dovetail.target.description import Target
from dovetail.target.engine import Engine, Rows
from dovetail.target.offload import Command, LibraryCall


class CommandList(Record, dict=True):
    """A list of commands of consecutive statements, with which an engine is started once."""

    name: str
    """C name of its words."""
    engine: str
    statements: tuple[int, ...]
    """Indices, its own waits included."""
    commands: tuple[tuple[int, ...], ...]
    """The words of each command, waits and the list's end included."""
    counts: Mapping[int, int]
    """Statement index -> commands it became, without waits."""

    @cached_property
    def words(self) -> tuple[int, ...]:
        """The words of all of them."""
        return tuple(word for command in self.commands for word in command)


def command_list(
    program: Program,
    target: Target,
    commands: Mapping[int, tuple[tuple[str, Command | LibraryCall], ...]],
    name: str,
    indices: tuple[int, ...],
) -> CommandList:
    """The words of statements that follow one another in an engine's list."""
    engine = target.engine(stream_of(program.statements[indices[0]]))
    assert engine.stream is not None
    listed: list[tuple[int, ...]] = []
    ended: dict[int, int] = {}
    """Statement -> commands of its queue up to its last."""
    counts: dict[str, int] = {}
    own: dict[int, int] = {}
    for index in indices:
        statement = program.statements[index]
        if isinstance(statement, Wait):
            if statement.statement in ended:  # else it is of a list before
                behind = counts[statement.queue] - ended[statement.statement]
                listed.append(tuple(engine.stream.wait(statement.queue, behind)))
            continue
        if isinstance(statement, Copy):
            made = list(dma_commands(program, engine, statement))
        else:
            made = [command.words for _, command in commands[index] if isinstance(command, Command)]
        queue, own[index] = queue_of(statement, program.dma), len(made)
        ended[index] = counts[queue] = counts.get(queue, 0) + len(made)
        listed += made
    end = (engine.stream.end,) if engine.stream.end else ()
    return CommandList(name, engine.name, indices, (*listed, *end), own)


def dma_commands(program: Program, engine: Engine, copy: Copy) -> Iterator[tuple[int, ...]]:
    """The words of the commands of an engine's own DMA that carry out a copy: one for each plane of rows."""
    assert engine.dma is not None
    source, target = (program.buffers[view.buffer] for view in (copy.source, copy.destination))
    assert source.address is not None and target.address is not None
    for rows in dma_rows(copy):
        first, second = source.address + rows.source, target.address + rows.destination
        strides = (rows.source_row_stride, rows.destination_row_stride)
        load = target.memory == engine.memory
        yield engine.dma.move(Rows(first, second, rows.row_bytes, rows.rows, *strides, load))
