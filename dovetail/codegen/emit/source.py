"""The emitted sources: the header a user includes, constants, kernels, and the network itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from dovetail import kernels
from dovetail.codegen.emit.firmware import FIXED
from dovetail.codegen.emit.unit import CommandList, StackNeed, Unit, dma_transfers, read_in_place
from dovetail.ir.operators.arithmetic import Rounding
from dovetail.kernels.c import (
    array_definition,
    c_type,
    elements,
    function,
    guard,
    hexadecimal,
    identifier,
    integer,
    one_line,
    real,
)
from dovetail.kernels.kernel import declarations
from dovetail.program.ir import CORE, Begin, Call, Copy, Launch, Statement, View, Wait, stream_of
from dovetail.program.transfers import Transfer, transfers
from dovetail.schedule.partition import Region
from dovetail.target.description import IN_PLACE_ALIGNMENT, Command, CValue, Engine, LibraryCall, Pointer, Struct

_ROUNDED = {
    Rounding.DOUBLE: "twice, as in TensorFlow Lite Micro",
    Rounding.SINGLE: "once, as in ONNX Runtime",
}


def header_source(unit: Unit, version: str) -> str:
    """The header a user includes: entry points, inputs and outputs with their sizes and types."""
    program = unit.program
    lines = [
        f"/* {one_line(program.name)}: inference with static memory, for {one_line(unit.target.name)}, made for "
        f"{unit.optimize.value}. */",
        *([f"/* The model's own requantisations round {_ROUNDED[unit.rounding]}. */"] if unit.rounding else []),
        "#include <stdint.h>",
        "",
        "#ifdef __cplusplus",
        'extern "C" {',
        "#endif",
        "",
        f'#define {unit.model.upper()}_DOVETAIL_VERSION "{version}"',
        "",
    ]
    for memory, size in unit.arenas().items():
        lines += _arena_declaration(unit, memory, size)
    for kind, views in (("input", program.inputs), ("output", program.outputs)):
        for index, (name, view) in enumerate(views.items()):
            lines += ["", *_port(unit, kind, index, name, view)]
    if unit.stack is not None:
        lines += ["", *_stack(unit, unit.stack)]
    lines += [
        "",
        "/* Computes the outputs from the inputs. Not reentrant; inputs may be overwritten. */",
        f"void {unit.model}_run(void);",
        "",
    ]
    if unit.delay:
        calls, first = ("call", "") if unit.delay == 1 else (f"{unit.delay} calls", f" {unit.delay}")
        lines += [
            f"/* A pipeline: the outputs are those of the inputs of the {calls} before. Those of the first{first}, "
            "after the start",
            "   or a reset, mean nothing. */",
            f"#define {unit.model.upper()}_DELAY {unit.delay}u",
        ]
    elif program.states:
        nbytes = sum(kept.first.nbytes for kept in program.states)
        lines.append(f"/* Forgets what is kept between inferences ({nbytes} bytes), for the start of a new sequence.")
        lines.append("   Before the first inference it happens by itself. */")
    lines += [f"void {unit.model}_reset(void);", ""] if unit.delay or program.states else []
    lines += ["#ifdef __cplusplus", "}", "#endif", ""]
    return guard(f"{unit.model.upper()}_H", "\n".join(lines))


def _stack(unit: Unit, need: StackNeed) -> list[str]:
    """What the header says of the stack."""
    return [
        f"/* Bytes of stack {unit.model}_run needs at most, interrupts apart: by the frames of",
        f"   {one_line(need.compiler)} for code made for {unit.optimize.value}; other compilers have others. */",
        f"#define {unit.model.upper()}_STACK_BYTES {need.nbytes}u",
    ]


def _arena_declaration(unit: Unit, memory: str, size: int) -> list[str]:
    """The array of a memory's buffers, and its bytes where the user has to bring it."""
    name = unit.arena_name(memory)
    if name != unit.shared_arena:
        return [f"extern uint8_t {name}[{size}]; /* buffers in {one_line(memory)} */"]
    bytes_of = f"{unit.model.upper()}_ARENA_BYTES"
    return [
        f"#define {bytes_of} {size}u",
        f"/* Yours: uint8_t {name}[at least {bytes_of}], aligned to 16 bytes. Networks that share it may run in turns;",
        "   each has its inputs, outputs and all between in it, so take outputs before the next one runs. */",
        f"extern uint8_t {name}[];",
    ]


def _port(unit: Unit, kind: str, index: int, name: str, view: View) -> list[str]:
    """What the header says of an input or output, and the function between its integers and real numbers."""
    stem, element, steps = f"{unit.model.upper()}_{kind.upper()}_{index}", c_type(view.type.dtype), unit.steps.get(name)
    shared = view.layout is not None and view.layout.packed
    lines = [
        f"/* {kind} '{one_line(name)}': {view.type}, {view.layout or 'row-major'} */",
        f"#define {stem}_ELEMENTS {view.type.elements}{' /* several in a byte */' if shared else ''}",
        f"#define {stem} (({'uint8_t' if shared else element} *)(void *)({unit.first_byte(view)}))",
    ]
    if steps is None:
        return lines
    low, high = (end - steps.zero_point for end in (view.type.dtype.low, view.type.dtype.high))
    lines += [
        f"#define {stem}_SCALE {real(steps.scale)} /* real number = scale * (integer - zero point) */",
        f"#define {stem}_ZERO_POINT ({steps.zero_point})",
        "",
    ]
    if kind == "output":
        head = f"static inline float {unit.model}_dequantize_output_{index}"
        body = [f"return (float)((int32_t)integer - {stem}_ZERO_POINT) * {stem}_SCALE;"]
        return [*lines, *function(head, [f"{element} integer"], body)]
    head = f"static inline {element} {unit.model}_quantize_input_{index}"
    body = [
        f"float steps = number / {stem}_SCALE;",
        f"steps = steps > {real(low)} ? steps : {real(low)}; /* what is no number is the lowest too */",
        f"steps = steps < {real(high)} ? steps : {real(high)};",
        "steps = (steps + 12582912.0f) - 12582912.0f; /* to the nearest integer, ties to even; not with -ffast-math */",
        f"return ({element})((int32_t)steps + {stem}_ZERO_POINT);",
    ]
    return [*lines, *function(head, ["float number"], body)]


def arena_source(unit: Unit) -> str:
    """The array a user brings, for simulators and tests that have none."""
    model = unit.model
    array = f"uint8_t {unit.shared_arena}[{model.upper()}_ARENA_BYTES] __attribute__((aligned(16)));"
    return f'/* In the place of yours; not for a program that has its own. */\n#include "{model}.h"\n\n{array}\n'


def constants_source(unit: Unit) -> tuple[str, str]:
    """Header and source of the constants: weights, parameters and the engines' tasks."""
    declarations, definitions = [], [f'#include "{unit.model}_constants.h"\n']
    blobs = {f"{unit.model}_{name}" for name in read_in_place(unit.program)}
    for name, (element, array) in unit.constants.items():
        declaration = f"const {element} {name}[{array.size}]"
        declarations.append(f"extern {declaration};")
        alignment = IN_PLACE_ALIGNMENT if name in blobs else 16
        definitions.append(array_definition(f"{declaration} __attribute__((aligned({alignment})))", elements(array)))
    for name, (block, members) in unit.blocks.items():
        declarations.append(f"extern const {block} {name};")
        definitions.append(array_definition(f"const {block} {name}", ", ".join(members)))
    listed = {index for one in unit.lists for index in one.statements}
    alone = [commands for index, commands in unit.commands.items() if index not in listed]
    words = [(name, c.words) for commands in alone for name, c in commands if not isinstance(c, LibraryCall)]
    for name, content in (*words, *((one.name, one.words) for one in unit.lists)):
        declaration = f"const uint32_t {name}[{len(content)}]"
        declarations.append(f"extern {declaration};")
        definitions.append(array_definition(declaration, hexadecimal(content)))
    _, fixed = unit.fixed_constants()
    if fixed.size:
        declaration = f"const uint8_t {unit.model}_fixed_constants[{fixed.size}]"
        declarations.append(f"extern {declaration};")
        attribute = f'__attribute__((aligned({IN_PLACE_ALIGNMENT}), section("{FIXED}")))'
        definitions.append(array_definition(f"{declaration} {attribute}", elements(fixed)))
    included = f'"{unit.model}_kernels.h"' if unit.blocks else "<stdint.h>"  # which has the types of blocks
    text = f"#include {included}\n\n" + "\n".join(declarations) + "\n"
    return guard(f"{unit.model.upper()}_CONSTANTS_H", text), "\n".join(definitions)


def kernels_source(unit: Unit) -> tuple[str, str]:
    """Header and source of the kernels the core runs."""
    needed = [name for kernel in unit.kernels for name in kernel.helpers]
    parts = [f'#include "{unit.model}_kernels.h"\n']
    parts.append(kernels.helper_source(needed, unit.target.core.functions))
    parts += dict.fromkeys(text for kernel in unit.kernels for text in kernel.declarations)
    parts += dict.fromkeys(kernel.shared for kernel in unit.kernels if kernel.shared)
    parts += [kernel.source.replace(f"static void {kernel.name}(", f"void {kernel.name}(") for kernel in unit.kernels]
    prototypes = list(dict.fromkeys(kernel.block.definition() for kernel in unit.kernels if kernel.block))
    prototypes += [f"void {kernel.name}({', '.join(declarations(kernel.parameters))});" for kernel in unit.kernels]
    header = guard(f"{unit.model.upper()}_KERNELS_H", "#include <stdint.h>\n\n" + "\n".join(prototypes) + "\n")
    return header, "\n".join(parts)


def model_source(unit: Unit) -> str:
    """The network: one function per layer, and the function that runs them."""
    lines = [f'#include "{unit.model}.h"', "", '#include "dovetail_rt.h"']
    lines += ['#include "dma.h"'] if unit.target.dma else []
    lines += ['#include "copy.h"'] if unit.core_copies else []
    lines += ['#include "cores.h"'] if unit.target.workers else []
    lines += [f'#include "{header}"' for header in unit.driver_headers()]
    lines += [f'#include "{unit.model}_constants.h"', f'#include "{unit.model}_kernels.h"', ""]
    for memory, size in unit.arenas().items():
        if unit.arena_name(memory) == unit.shared_arena:
            continue
        section = f', section(".{identifier(memory)}")' if unit.is_fixed(memory) else ""
        lines.append(f"uint8_t {unit.arena_name(memory)}[{size}] __attribute__((aligned(16){section}));")
    lines.append("")
    if unit.tickets:
        lines.append("/* What is under way: set where it is started, read where it is waited for. */")
        lines += [f"static uint32_t {name};" for name in unit.tickets.values()]
        lines.append("")
    layers = list(_layer_functions(unit))
    lines += [line for _, text in layers for line in text]
    lines += _reset_function(unit) if unit.program.states else []
    lines += [f"void {unit.model}_run(void)", "{"]
    lines += ["    if (has_states == 0u) {", f"        {unit.model}_reset();", "    }"] if unit.program.states else []
    used = {one.engine for one in unit.program.statements if isinstance(one, Launch)}
    lines += [f"    {one.prepare}();" for one in unit.target.engines if one.prepare and one.name in used]
    lines += [f"    {name}();" for name, _ in layers]
    lines += [f"    {move}" for move in _moves(unit, len(unit.program.statements))]
    lines += ["    DOVETAIL_MARK_END();", "}", ""]
    return "\n".join(lines)


def _reset_function(unit: Unit) -> list[str]:
    """The function that gives every state its first contents: one byte repeated, or what a constant holds."""
    lines = ["static uint8_t has_states; /* 0 until what is kept between inferences has been set */", ""]
    lines += [f"void {unit.model}_reset(void)", "{"]
    for index, kept in enumerate(unit.program.states):
        content = kept.first.reshape(-1).view(np.uint8)
        value = f"{unit.model}_state_{index}_first[i]" if len(set(content.tolist())) > 1 else f"{content[0]}u"
        head = f"    for (uint32_t i = 0; i < {content.size}u; ++i) {{"
        lines += [head, f"        ({unit.first_byte(kept.view)})[i] = {value};", "    }"]
    return [*lines, "    has_states = 1u;", "}", ""]


Stretch = tuple[int, list[int]]
"""A layer, and the indices of statements of it that follow one another."""


def _layer_functions(unit: Unit) -> Iterator[tuple[str, list[str]]]:
    """The static functions of the layers that do something, in order: one for each, or for all that take turns."""
    stretches: list[Stretch] = []
    for index, statement in enumerate(unit.program.statements):
        if isinstance(statement, Begin):
            stretches.append((statement.layer, []))
        else:
            stretches[-1][1].append(index)
    inside = {index for one in unit.lists for index in one.statements[1:]}  # the engine goes on by itself
    issued = [(layer, [index for index in members if index not in inside]) for layer, members in stretches]
    for group in _in_turns([stretch for stretch in issued if stretch[1]]):
        layers = list(dict.fromkeys(layer for layer, _ in group))
        text: list[str] = []
        for index, call in ((index, unit.program.statements[index]) for _, members in group for index in members):
            if isinstance(call, Call) and call.core:
                text += [f"static void {_job_name(unit, call)}(void)", "{", f"    {_kernel_call(unit, index, call)}"]
                text += ["}", ""]
        for layer in layers:
            region = unit.regions[layer]
            where = _where(unit, region, [index for own, members in group if own == layer for index in members])
            origin = one_line(", ".join(region.origins))[:160]
            text.append(f"/* {region.name} on {where}: {origin or 'made by the compiler'} */")
        for one in (unit.started[index] for _, members in group for index in members if index in unit.started):
            own = dict.fromkeys(unit.program.layers[unit.program.statements[index].layer] for index in one.statements)
            text.append(f"/* {one.name} is a list of commands for {', '.join(own)} */")
        name = "_to_".join(dict.fromkeys(unit.regions[layer].name for layer in (min(layers), max(layers))))
        text += [f"static void {name}(void)", "{"]
        for layer, members in group:
            text.append(f"    DOVETAIL_MARK({layer});")
            for index in members:
                lines = [*_moves(unit, index), *_statement(unit, index, unit.program.statements[index])]
                text += [f"    {line}" for line in lines]
        yield name, [*text, "}", ""]


def _in_turns(stretches: Sequence[Stretch]) -> Iterator[list[Stretch]]:
    """The stretches in groups: those between the first and the last of one layer belong together."""
    last = {layer: position for position, (layer, _) in enumerate(stretches)}
    group: list[Stretch] = []
    end = 0
    for position, stretch in enumerate(stretches):
        group.append(stretch)
        end = max(end, last[stretch[0]])
        if position == end:
            yield group
            group, end = [], position + 1


def _where(unit: Unit, region: Region, members: Sequence[int]) -> str:
    """Who does a layer, in words."""
    if region.place != "core":
        return region.place
    cores = sorted({call.core for index in members if isinstance(call := unit.program.statements[index], Call)})
    return "the core" if not unit.target.workers else f"core {' and '.join(map(str, cores))}"


def _job_name(unit: Unit, call: Call) -> str:
    """The function a call on another core is started as."""
    return f"{unit.program.layers[call.layer]}_on_core{call.core}"


def _statement(unit: Unit, index: int, statement: Statement) -> list[str]:
    if stream_of(statement):
        return [_list_start(unit, one) for first, one in unit.started.items() if first == index]
    if isinstance(statement, Wait):
        return [_wait(unit, statement)]
    ticket = f"{unit.tickets[index]} = " if index in unit.tickets else "(void)"
    if isinstance(statement, Call) and statement.core:
        return [f"{ticket}core_start({statement.core}u, {_job_name(unit, statement)});"]
    if isinstance(statement, Call):
        return [_kernel_call(unit, index, statement)]
    if isinstance(statement, Launch):
        engine, layer = unit.target.engine(statement.engine), unit.program.layers[statement.layer]
        made = [_started(unit, statement, name, command) for name, command in unit.commands[index]]
        begun = [*("(void)" for _ in made[:-1]), ticket]
        calls = [
            f"{how}{call};" if engine.wait else _checked(engine, call, layer, how)
            for how, (_, call) in zip(begun, made, strict=True)
        ]
        return [*(line for lines, _ in made for line in lines), *calls]
    if isinstance(statement, Copy):
        if unit.program.dma == CORE:
            return [_core_transfer(unit, statement, transfer) for transfer in transfers(statement)]
        moves = [f"dma_{_transfer(unit, statement, transfer)}" for transfer in dma_transfers(statement)]
        return [*(f"(void){move}" for move in moves[:-1]), ticket + moves[-1]]
    raise TypeError(f"unknown statement {statement}")


def _list_start(unit: Unit, one: CommandList) -> str:
    """The call that starts a list."""
    engine, index = unit.target.engine(one.engine), one.statements[0]
    assert engine.stream is not None
    ticket = f"{unit.tickets[index]} = " if index in unit.tickets else "(void)"
    return f"{ticket}{engine.stream.start}({one.name}, {len(one.words)});"


def _moves(unit: Unit, index: int) -> list[str]:
    """What brings bytes to engines with a copy of the memory, and back, before a statement."""
    found = []
    for move in unit.program.moves.get(index, ()):
        mirror = unit.target.engine(move.engine).mirror
        assert mirror is not None
        function = mirror.to_engine if move.to_engine else mirror.from_engine
        found.append(f"{function}({unit.first_byte(move.view)}, {move.view.type.elements});")
    return found


def _wait(unit: Unit, wait: Wait) -> str:
    ticket, waited = unit.tickets[wait.statement], unit.program.statements[wait.statement]
    if isinstance(waited, Call):
        return f"core_wait({waited.core}u, {ticket});"
    if wait.queue == unit.program.dma and not stream_of(waited):
        return f"dma_wait({ticket});"
    engine = unit.target.engine(stream_of(waited) or wait.queue)
    return _checked(engine, f"{engine.wait}({ticket})", unit.program.layers[waited.layer])


def _kernel_call(unit: Unit, index: int, call: Call) -> str:
    kernel, names = unit.calls[index]
    arguments = []
    for parameter in kernel.parameters:
        if parameter.is_constant:
            arguments.append(("&" if parameter.value == kernels.BLOCK else "") + names[parameter.value])
            continue
        is_result = parameter.value == call.graph.outputs[0]
        view = call.result if is_result else call.operands[parameter.value]
        place, const = unit.first_byte(view), "" if is_result else "const "
        cast = f"({const}{parameter.c_type} *)({const}void *)({place})"
        arguments.append(place if parameter.c_type == "uint8_t" else cast)
    return f"{kernel.name}({', '.join(arguments)});"


def _started(unit: Unit, launch: Launch, name: str, command: Command | LibraryCall) -> tuple[list[str], str]:
    """What a command needs declared, and the call that gives it."""
    if isinstance(command, LibraryCall):
        return library_call(command, name, lambda operand: unit.first_byte(_operand(launch, operand)))
    blob = f", {_blob(unit, launch)}" if command.constants else ""
    return [], f"{command.function}({name}{blob})"


def _checked(engine: Engine, call: str, layer: str, how: str = "") -> str:
    """A statement that looks at what a call returns; where nobody does, `how` stands before the call."""
    if engine.success is None:
        return f"{how}{call};"
    function = call.partition("(")[0]
    return f'dovetail_check({call}, {engine.success}, "{function} of {engine.name} in {layer}");'


def _operand(launch: Launch, name: str) -> View:
    """Where a launch finds what a command names."""
    if name == "result":
        return launch.result
    own = name == "scratch" or name in launch.packed
    return launch.operands[name if own else launch.match.values[name]]


def _blob(unit: Unit, launch: Launch) -> str:
    """C expression of a launch's packed constants; a null pointer when it has none."""
    views = [launch.operands[name] for name in launch.packed]
    return unit.first_byte(replace(views[0], offset=min(view.offset for view in views))) if views else "0"


def _core_transfer(unit: Unit, copy: Copy, transfer: Transfer) -> str:
    if not transfer.border:
        return _transfer(unit, copy, transfer)
    target = unit.first_byte(replace(copy.destination, offset=transfer.destination))
    rows = f"{transfer.row_bytes}, {transfer.rows}, {transfer.destination_row_stride}"
    planes = f"{transfer.planes}, {transfer.destination_plane_stride}"
    return f"copy_fill_border({target}, {rows}, {planes}, {_padding(transfer, 'copy_padding')});"


def _padding(transfer: Transfer, kind: str) -> str:
    (top, bottom), (left, right) = transfer.pad_rows, transfer.pad_bytes
    return f"&(const {kind}){{{top}, {bottom}, {left}, {right}, {transfer.fill}}}"


def _transfer(unit: Unit, copy: Copy, transfer: Transfer) -> str:
    target = unit.first_byte(replace(copy.destination, offset=transfer.destination))
    source = unit.first_byte(replace(copy.source, offset=transfer.source))
    rows = f"{transfer.row_bytes}, {transfer.rows}, {transfer.destination_row_stride}, {transfer.source_row_stride}"
    planes = f"{transfer.planes}, {transfer.destination_plane_stride}, {transfer.source_plane_stride}"
    if transfer.is_padded:
        kind = "copy_padding" if unit.program.dma == CORE else "dma_padding"
        return f"copy_pad({target}, {source}, {rows}, {planes}, {_padding(transfer, kind)});"
    if transfer.planes > 1:
        return f"copy_3d({target}, {source}, {rows}, {planes});"
    if transfer.rows > 1:
        return f"copy_2d({target}, {source}, {rows});"
    return f"copy_1d({target}, {source}, {transfer.row_bytes});"


def library_call(call: LibraryCall, name: str, first_byte: Callable[[str], str]) -> tuple[list[str], str]:
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
