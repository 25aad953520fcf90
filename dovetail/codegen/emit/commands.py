"""What launches and lists become: the commands of engines, with final addresses, and the words of their DMAs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dovetail.errors import ProgramError
from dovetail.program.ir import Copy, Launch, Program, Wait, queue_of, side_by_side, stream_of
from dovetail.program.transfers import Transfer, strips, transfers
from dovetail.schedule.partition import Region
from dovetail.target.description import Command, Engine, Launched, LibraryCall, Offload, Operand, Rows, Target
from dovetail.user_file import asking


@dataclass(frozen=True)
class CommandList:
    """What an engine is started with once: commands of statements that follow one another."""

    name: str
    """C name of its words."""
    engine: str
    statements: tuple[int, ...]
    """Indices, its own waits included."""
    words: tuple[int, ...]
    counts: Mapping[int, int]
    """Statement index -> commands it became, without waits."""


Commands = tuple[tuple[str, Command | LibraryCall], ...]
"""The commands of a launch, each with the C name of its words."""


def launch_commands(program: Program, target: Target, regions: Sequence[Region], model: str) -> dict[int, Commands]:
    """The commands of every launch by its index; their names begin with `model`."""
    launches = [(index, one) for index, one in enumerate(program.statements) if isinstance(one, Launch)]
    joint = _joint_commands(program, target, regions)
    return {index: _commands(program, target, regions, model, one, joint.get(index)) for index, one in launches}


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
    words: list[int] = []
    ended: dict[int, int] = {}
    """Statement -> commands of its queue up to its last."""
    counts: dict[str, int] = {}
    own: dict[int, int] = {}
    for index in indices:
        statement = program.statements[index]
        if isinstance(statement, Wait):
            if statement.statement in ended:  # else it is of a list before
                words += engine.stream.wait(statement.queue, counts[statement.queue] - ended[statement.statement])
            continue
        if isinstance(statement, Copy):
            made = list(dma_commands(program, engine, statement))
        else:
            made = [command.words for _, command in commands[index] if isinstance(command, Command)]
        queue, own[index] = queue_of(statement, program.dma), len(made)
        ended[index] = counts[queue] = counts.get(queue, 0) + len(made)
        words += [word for command in made for word in command]
    return CommandList(name, engine.name, indices, (*words, *engine.stream.end), own)


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


def dma_rows(copy: Copy) -> Iterator[Transfer]:
    """A copy in planes of rows, as many rows to a plane as can be."""
    for whole in transfers(copy):
        if whole.planes > whole.rows:
            strides = (whole.source_plane_stride, whole.destination_plane_stride)
            turned = replace(whole, rows=whole.planes, source_row_stride=strides[0], destination_row_stride=strides[1])
            inner = (whole.rows, whole.source_row_stride, whole.destination_row_stride)
        else:
            turned, inner = whole, (whole.planes, whole.source_plane_stride, whole.destination_plane_stride)
        for number in range(inner[0]):
            places = (whole.source + number * inner[1], whole.destination + number * inner[2])
            yield replace(turned, source=places[0], destination=places[1], planes=1)


def _offload(region: Region, launch: Launch) -> Offload:
    """What a launch of a region's asks its engine for."""
    offload = next(part.offload for part in region.parts if part.engine and part.engine.name == launch.engine)
    assert offload is not None
    return offload


def _joint_commands(program: Program, target: Target, regions: Sequence[Region]) -> dict[int, tuple[Command, ...]]:
    """The commands of launches that begin together, by the index of each."""
    found: dict[int, tuple[Command, ...]] = {}
    for together in dict.fromkeys(side_by_side(program.statements).values()):
        launches = [one for index in together if isinstance(one := program.statements[index], Launch)]
        engine, own = target.engine(launches[0].engine), [regions[launch.layer] for launch in launches]
        assert engine.joint is not None
        names = [_offload(region, launch).name for region, launch in zip(own, launches, strict=True)]
        asked = [
            (Launched(name, launch.match), addressed_operands(program, launch))
            for name, launch in zip(names, launches, strict=True)
        ]
        with asking(f"the commands of {engine.name} for {', '.join(region.name for region in own)} side by side"):
            made = engine.joint.commands(asked)
        found |= dict(zip(together, made, strict=True))
    return found


def _commands(
    program: Program,
    target: Target,
    regions: Sequence[Region],
    model: str,
    launch: Launch,
    joint: tuple[Command, ...] | None,
) -> tuple[tuple[str, Command | LibraryCall], ...]:
    region = regions[launch.layer]
    offload = _offload(region, launch)
    views = [launch.result, *(launch.operands[name] for name in launch.graph.inputs)]
    if not offload.strided and not all(view.is_dense for view in views):
        hint = "declare the Offload strided=True if the engine takes strides, else report this"
        raise ProgramError(f"operands of {region.name} do not lie densely", where=offload.name, hint=hint)
    made: Sequence[Command | LibraryCall] | None = joint
    if made is None:
        with asking(f"the commands of {offload.name} for {region.name}"):
            made = offload.commands(launch.match, addressed_operands(program, launch))
    same = [s for s in program.statements if isinstance(s, Launch) and s.layer == launch.layer]
    number = next(i for i, s in enumerate(same) if s is launch)
    stem = f"{model}_{region.name}_task" + (f"_{number}" if len(same) > 1 else "")
    if len(made) == 1:
        return ((stem, made[0]),)
    return tuple((f"{stem}_step_{step}", command) for step, command in enumerate(made))


def addressed_operands(program: Program, launch: Launch) -> dict[str, Operand]:
    """Addresses and strides of a launch's operands by value or constant name, the result as "result"; the address of
    constants that are read where they lie is their place in the launch's blob."""
    views = {**launch.operands, "result": launch.result}
    found = {}
    for name, view in views.items():
        address = program.buffers[view.buffer].address  # none where the linker places it
        found[name] = Operand((address or 0) + view.offset, view.strides)
    return found


def dma_transfers(copy: Copy) -> list[Transfer]:
    """What a DMA is asked for to carry out a copy, in order: borders as strips."""
    return [part for whole in transfers(copy) for part in (strips(whole) if whole.border else (whole,))]
