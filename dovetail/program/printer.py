"""Prints a program as a person would read it aloud."""

from __future__ import annotations

from collections.abc import Iterator

from dovetail.graph.graph import Graph
from dovetail.program.ir import Begin, Call, Copy, Launch, Move, Program, Statement, View, Wait, core_queue


def print_program(program: Program) -> str:
    """The whole program as text: buffers by address, then numbered statements."""
    return "\n".join(_lines(program)) + "\n"


def print_statement(program: Program, index: int) -> str:
    """One statement as a line."""
    return _statement(program, index, program.statements[index])


def _lines(program: Program) -> Iterator[str]:
    yield f"program {program.name}"
    for buffer in sorted(program.buffers.values(), key=lambda b: (b.memory, b.address or -1, b.name)):
        place = "by the linker" if buffer.address is None else f"0x{buffer.address:08x}"
        yield f"  buffer {buffer.name}: {buffer.nbytes} bytes in {buffer.memory} at {place} ({buffer.role.value})"
    for index, statement in enumerate(program.statements):
        yield from (_move(move) for move in program.moves.get(index, ()))
        yield _statement(program, index, statement)
    yield from (_move(move) for move in program.moves.get(len(program.statements), ()))


def _statement(program: Program, index: int, statement: Statement) -> str:
    if isinstance(statement, Begin):
        return f"{program.layers[statement.layer]}:"
    return f"  {index:4d}  {_body(program, statement)}"


def _move(move: Move) -> str:
    return f"        {'to' if move.to_engine else 'from'} {move.engine}: {_view(move.view)}"


def _body(program: Program, statement: Statement) -> str:
    if isinstance(statement, Copy):
        padding = f" padded from {list(statement.before)} with {statement.fill}" if any(statement.before) else ""
        if statement.fills_border:
            fill = f"{list(statement.before)} around {statement.source.type} with {statement.fill}"
            return f"{program.dma}: fill the border of {_view(statement.destination)} from {fill}"
        return f"{program.dma}: copy {_view(statement.source)} to {_view(statement.destination)}{padding}"
    if isinstance(statement, Launch):
        operands = ", ".join(_view(view) for view in statement.operands.values())
        return f"{statement.engine}: {_kinds(statement.graph)} of {operands} into {_view(statement.result)}"
    if isinstance(statement, Call):
        operands = ", ".join(_view(view) for view in statement.operands.values())
        return f"{core_queue(statement.core)}: {_kinds(statement.graph)} of {operands} into {_view(statement.result)}"
    if isinstance(statement, Wait):
        return f"wait for {statement.queue} to finish {statement.statement}"
    raise TypeError(f"unknown statement {statement}")


def _kinds(graph: Graph) -> str:
    return "+".join(type(node.operator).__name__ for node in graph.nodes)


def _view(view: View) -> str:
    place = f"+{view.offset}" if view.offset else ""
    strides = "" if view.is_dense else f" strides {list(view.strides)}"
    layout = f" as {view.layout}" if view.layout is not None else ""
    return f"{view.buffer}{place} {view.type}{layout}{strides}"
