"""A program as text, for people and for errors."""

from __future__ import annotations

from dovetail.program.ir import (
    Begin,
    Call,
    Copy,
    Launch,
    Program,
    Statement,
    View,
    Wait,
    core_queue,
    queue_of,
)


def print_program(program: Program) -> str:
    """The whole program as text: buffers by address, then numbered statements."""
    lines = [f"program {program.name}"]
    for buffer in sorted(program.buffers.values(), key=lambda b: (b.memory, b.address or -1, b.name)):
        place = "by the linker" if buffer.address is None else f"0x{buffer.address:08x}"
        lines.append(
            f"  buffer {buffer.name}: {buffer.nbytes} bytes in {buffer.memory} at {place} ({buffer.role.value})"
        )
    for index in range(len(program.statements) + 1):
        for move in program.moves.get(index, ()):
            lines.append(f"        {'to' if move.to_engine else 'from'} {move.engine}: {_view(move.view)}")
        if index < len(program.statements):
            lines.append(print_statement(program, index))
    return "\n".join(lines) + "\n"


def print_statement(program: Program, index: int) -> str:
    """One statement as a line."""
    statement = program.statements[index]
    if isinstance(statement, Begin):
        return f"{program.layers[statement.layer]}:"
    return f"  {index:4d}  {_body(program, statement)}"


def _body(program: Program, statement: Statement) -> str:
    if isinstance(statement, Copy):
        padding = f" padded from {list(statement.before)} with {statement.fill}" if any(statement.before) else ""
        queue = queue_of(statement, program.dma)
        if statement.fills_border:
            fill = f"{list(statement.before)} around {statement.source.type} with {statement.fill}"
            return f"{queue}: fill the border of {_view(statement.destination)} from {fill}"
        return f"{queue}: copy {_view(statement.source)} to {_view(statement.destination)}{padding}"
    if isinstance(statement, Launch | Call):
        who = statement.engine if isinstance(statement, Launch) else core_queue(statement.core)
        kinds = "+".join(type(node.operator).__name__ for node in statement.graph.nodes)
        operands = ", ".join(map(_view, statement.operands.values()))
        held = ", held for the next" if isinstance(statement, Launch) and statement.held else ""
        return f"{who}: {kinds} of {operands} into {_view(statement.result)}{held}"
    if isinstance(statement, Wait):
        who = f"{statement.stream}: " if statement.stream else ""
        return f"{who}wait for {statement.queue} to finish {statement.statement}"
    raise TypeError(f"unknown statement {statement}")


def _view(view: View) -> str:
    place = f"+{view.offset}" if view.offset else ""
    strides = "" if view.is_dense else f" strides {list(view.strides)}"
    layout = f" as {view.layout}" if view.layout is not None else ""
    return f"{view.buffer}{place} {view.type}{layout}{strides}"
