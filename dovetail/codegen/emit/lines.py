"""Statements of the program as lines of C in which numbers can still be told apart, so that loops can change them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from dovetail import kernels
from dovetail.codegen.emit.lists import CommandList
from dovetail.codegen.emit.unit import Unit
from dovetail.kernels.c import Lines, integer
from dovetail.program.ir import CORE, Begin, Call, Copy, LaunchStatement, Statement, View, Wait, stream_of
from dovetail.program.series import ByteAddress, Number, Series
from dovetail.program.transfers import Transfer, dma_transfers, ends_in_padding, transfers
from dovetail.records import Record, replace
from dovetail.target.engine import Engine
from dovetail.target.offload import Command, CValue, LibraryCall, Pointer, Struct


class Hole(Record):
    """A number in a line."""

    name: str
    """The number's meaning, as an identifier."""
    number: Number
    """A place is in an array of C."""


class Ticket(Record):
    """The ticket of a statement, in a line that waits for it."""

    statement: int


Part: TypeAlias = str | Hole | Ticket
Parts: TypeAlias = tuple[Part, ...]


class Line(Record):
    """A statement of C."""

    parts: Parts
    starts: bool = False
    """Whether it gives the ticket of its statement of the program."""

    @property
    def form(self) -> tuple[str, ...]:
        """The parts of the line that are the same in every turn of a loop."""
        kinds = (one if isinstance(one, str) else one.name if isinstance(one, Hole) else "ticket" for one in self.parts)
        return (*kinds, str(self.starts))

    @property
    def holes(self) -> tuple[Hole, ...]:
        """The numbers, from left to right."""
        return tuple(one for one in self.parts if isinstance(one, Hole))


def text_of(number: Number) -> str:
    """A number, or the address of a place, as C."""
    if isinstance(number, ByteAddress):
        return f"{number.base} + {number.offset}" if number.offset else number.base
    return str(number)


def rule_text(series: Series, turn: str) -> str:
    """A number in a loop that follows a rule, as C; `turn` is the loop's variable."""
    changes = [(series.step, turn), (series.swing, f"({turn} % 2)")]
    text = text_of(series.first)
    for factor, variable in changes:
        if factor:
            product = variable if abs(factor) == 1 else f"{abs(factor)} * {variable}"
            text = product if text == "0" and factor > 0 else f"{text} {'-' if factor < 0 else '+'} {product}"
    return text


def called(function: str, *arguments: Part | Parts) -> Parts:
    """The parts of a call."""
    found: list[Part] = [f"{function}("]
    for number, argument in enumerate(arguments):
        found += [", "] if number else []
        found += argument if isinstance(argument, tuple) else [argument]
    return (*found, ")")


def statement_lines(unit: Unit, index: int, statement: Statement) -> tuple[Line, ...]:
    """A statement of the program, and what must happen before it, in order; those of lists are started with the
    first."""
    if isinstance(statement, Begin):
        return (Line((*called("DOVETAIL_MARK", Hole("layer", statement.layer)), ";")),)
    return (*(Line((text,)) for text in moves(unit, index)), *_lines(unit, index, statement))


def _lines(unit: Unit, index: int, statement: Statement) -> Iterator[Line]:
    if isinstance(statement, Begin):
        return
    if stream_of(statement):
        yield from [_list_start(unit, unit.started[index])] if index in unit.started else []
    elif isinstance(statement, Wait):
        yield _wait(unit, statement)
    elif isinstance(statement, Call) and statement.core:
        yield Line((f"core_start({statement.core}u, {job_name(unit, statement)});",), starts=True)
    elif isinstance(statement, Call):
        yield Line(kernel_call(unit, index, statement))
    elif isinstance(statement, LaunchStatement):
        yield from _launched(unit, index, statement)
    elif unit.program.dma == CORE:
        for transfer in transfers(statement):
            yield Line((*_core_transfer(unit, statement, transfer), ";"))
    else:
        made = dma_transfers(statement)
        for number, transfer in enumerate(made):
            last = number == len(made) - 1
            parts = (*_transfer(unit, statement, transfer, "dma_"), ";")
            yield Line(parts if last else ("(void)", *parts), starts=last)


def _launched(unit: Unit, index: int, launch: LaunchStatement) -> Iterator[Line]:
    engine, layer = unit.target.engine(launch.engine), unit.program.layers[launch.layer]
    made = [_started(unit, launch, name, command) for name, command in unit.commands[index]]
    for lines, _ in made:
        yield from (Line((line,)) for line in lines)
    for number, (_, call) in enumerate(made):
        last = number == len(made) - 1
        checked = engine.success is not None and not engine.wait
        parts = _checked(engine, call, layer) if checked else (*call, ";")
        yield Line(parts if last or checked else ("(void)", *parts), starts=last and not checked)


def job_name(unit: Unit, call: Call) -> str:
    """The function a call on another core is started as."""
    return f"{unit.program.layers[call.layer]}_on_core{call.core}"


def _list_start(unit: Unit, one: CommandList) -> Line:
    """The call that starts a list."""
    engine = unit.target.engine(one.engine)
    assert engine.stream is not None
    text = f"{one.name}();" if one.name in unit.pieced else f"{engine.stream.start}({one.name}, {len(one.words)});"
    return Line((text,), starts=True)


def moves(unit: Unit, index: int) -> Lines:
    """Moves to and from an engine's copy of the memory before a statement."""
    found = []
    for move in unit.program.moves.get(index, ()):
        mirror = unit.target.engine(move.engine).mirror
        assert mirror is not None
        function = mirror.to_engine if move.to_engine else mirror.from_engine
        found.append(f"{function}({unit.first_byte(move.view)}, {move.view.type.elements});")
    return found


def _wait(unit: Unit, wait: Wait) -> Line:
    waited = unit.program.statements[wait.statement]
    ticket = Ticket(unit.starts.get(wait.statement, wait.statement))
    if isinstance(waited, Call) and wait.core != CORE:
        return Line((*called("core_after", f"{wait.core.removeprefix(CORE)}u", f"{waited.core}u", ticket), ";"))
    if isinstance(waited, Call):
        return Line((*called("core_wait", f"{waited.core}u", ticket), ";"))
    if wait.queue == unit.program.dma and not stream_of(waited):
        return Line((*called("dma_wait", ticket), ";"))
    engine = unit.target.engine(stream_of(waited) or wait.queue)
    return Line(_checked(engine, called(str(engine.wait), ticket), unit.program.layers[waited.layer]))


def kernel_call(unit: Unit, index: int, call: Call) -> Parts:
    """The call of a kernel."""
    kernel, names = unit.calls[index]
    arguments: list[Part | Parts] = []
    for parameter in kernel.parameters:
        if parameter.is_constant:
            arguments.append(("&" if parameter.value == kernels.BLOCK else "") + names[parameter.value])
            continue
        is_result = parameter.value == call.graph.outputs[0]
        view = call.result if is_result else call.operands[parameter.value]
        place, const = Hole("to" if is_result else "from", unit.place(view)), "" if is_result else "const "
        cast = f"({const}{parameter.c_type} *)({const}void *)("
        arguments.append(place if parameter.c_type == "uint8_t" else (cast, place, ")"))
    return (*called(kernel.name, *arguments), ";")


def _started(unit: Unit, launch: LaunchStatement, name: str, command: Command | LibraryCall) -> tuple[Lines, Parts]:
    """Declarations of a command, and the call that gives it to the engine."""
    if isinstance(command, LibraryCall):
        lines, text = library_call(command, name, lambda operand: unit.first_byte(_operand(launch, operand)))
        return lines, (text,)
    task = Hole("task", unit.tasks[name])
    return [], called(command.function, task, *([_blob(unit, launch)] if command.constants else []))


def _checked(engine: Engine, call: Parts, layer: str) -> Parts:
    """A statement that looks at what a call returns, where somebody does."""
    if engine.success is None:
        return (*call, ";")
    function = str(call[0]).partition("(")[0]
    return ("dovetail_check(", *call, f', {engine.success}, "{function} of {engine.name} in {layer}");')


def _operand(launch: LaunchStatement, name: str) -> View:
    """The view of an operand that a command names."""
    if name == "result":
        return launch.result
    own = name == "scratch" or name in launch.packed
    return launch.operands[name if own else launch.match.values[name]]


def _blob(unit: Unit, launch: LaunchStatement) -> Part:
    """The place of a launch's packed constants; a null pointer when it has none."""
    views = [launch.operands[name] for name in launch.packed]
    if not views:
        return "0"
    return Hole("constants", unit.place(replace(views[0], offset=min(view.offset for view in views))))


def _core_transfer(unit: Unit, copy: Copy, transfer: Transfer) -> Parts:
    if not transfer.border:
        return _transfer(unit, copy, transfer, "", into_blocks=ends_in_padding(copy, transfer))
    target = Hole("to", unit.place(replace(copy.destination, offset=transfer.destination)))
    sizes = _sizes(row_bytes=transfer.row_bytes, rows=transfer.rows, to_row=transfer.destination_row_stride)
    sizes += _sizes(planes=transfer.planes, to_plane=transfer.destination_plane_stride)
    return called("copy_fill_border", target, *sizes, _padding(transfer, "copy_padding"))


def _sizes(**sizes: int) -> list[Hole]:
    return [Hole(name, size) for name, size in sizes.items()]


def _padding(transfer: Transfer, kind: str) -> str:
    (top, bottom), (left, right) = transfer.pad_rows, transfer.pad_bytes
    return f"&(const {kind}){{{top}, {bottom}, {left}, {right}, {transfer.fill}}}"


def _transfer(unit: Unit, copy: Copy, transfer: Transfer, prefix: str, into_blocks: bool = False) -> Parts:
    """The call that makes a transfer; the functions of the DMA's driver have a prefix, and a core may be told that rows
    go into blocks whose ends mean nothing."""
    ends = (
        Hole("to", unit.place(replace(copy.destination, offset=transfer.destination))),
        Hole("from", unit.place(replace(copy.source, offset=transfer.source))),
    )
    to_row, from_row = transfer.destination_row_stride, transfer.source_row_stride
    rows = _sizes(row_bytes=transfer.row_bytes, rows=transfer.rows, to_row=to_row, from_row=from_row)
    to_plane, from_plane = transfer.destination_plane_stride, transfer.source_plane_stride
    planes = _sizes(planes=transfer.planes, to_plane=to_plane, from_plane=from_plane)
    if transfer.is_padded:
        kind = "copy_padding" if unit.program.dma == CORE else "dma_padding"
        return called(f"{prefix}copy_pad", *ends, *rows, *planes, _padding(transfer, kind))
    if into_blocks and transfer.rows > 1:
        return called("copy_into_blocks", *ends, *rows, *planes)
    if transfer.planes > 1:
        return called(f"{prefix}copy_3d", *ends, *rows, *planes)
    if transfer.rows > 1:
        return called(f"{prefix}copy_2d", *ends, *rows)
    return called(f"{prefix}copy_1d", *ends, Hole("bytes", transfer.row_bytes))


def library_call(call: LibraryCall, name: str, first_byte: Callable[[str], str]) -> tuple[Lines, str]:
    """The declarations of a call's structures, whose names begin with `name`, and the call as an expression;
    `first_byte` gives the C expression of an operand's first byte."""
    declared, arguments = [], []
    for position, value in enumerate(call.arguments):
        if isinstance(value, Struct):
            own = f"{name}_argument_{position}"
            declared.append(f"static const {value.c_type} {own} = {_c_value(value, first_byte)};")
            arguments.append(f"&{own}")
        else:
            arguments.append(_c_value(value, first_byte))
    return declared, f"{call.function}({', '.join(arguments)})"


def _c_value(value: CValue, first_byte: Callable[[str], str]) -> str:
    """A value as C: an initialiser or an argument."""
    if isinstance(value, Struct):
        members = (f".{name} = {_c_value(content, first_byte)}" for name, content in value.members.items())
        return f"{{{', '.join(members)}}}"
    if isinstance(value, Pointer):
        if value.c_type.removeprefix("const ") == "uint8_t":  # what first bytes are
            return first_byte(value.operand)
        void = "const void" if value.c_type.startswith("const ") else "void"
        return f"({value.c_type} *)({void} *)({first_byte(value.operand)})"
    return integer(value)
