"""The emitted sources: constants, kernels, and the network itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dovetail import kernels
from dovetail.emit.c_text import array_definition, elements, guard, identifier, one_line, words
from dovetail.emit.calls import Blocks, KernelCalls, kernel_calls, prototype
from dovetail.emit.library import library_call
from dovetail.errors import ProgramError
from dovetail.graph.types import Array
from dovetail.kernels import CoreKernel, Optimize
from dovetail.partition.regions import Region
from dovetail.program.ir import CORE, Begin, Call, Copy, Launch, Program, Role, Statement, View, Wait
from dovetail.program.transfers import Transfer, strips, transfers
from dovetail.target.description import IN_PLACE_ALIGNMENT, Command, Engine, LibraryCall, Operand, Target


@dataclass(frozen=True)
class Unit:
    """Everything the emitted text is made from."""

    program: Program
    regions: Sequence[Region]
    target: Target
    model: str
    """Prefix of every name that other files see."""
    calls: KernelCalls
    kernels: tuple[CoreKernel, ...]
    constants: Mapping[str, tuple[str, Array]]
    """C name -> C type and elements."""
    blocks: Blocks
    """C name -> C type and initialisers of each block of a compact kernel."""
    commands: Mapping[int, tuple[tuple[str, Command | LibraryCall], ...]]
    """Statement index of a launch -> C name and content of each command."""
    tickets: Mapping[int, str]
    """Statement index -> C variable that holds its ticket, where something waits for it."""
    optimize: Optimize = Optimize.SPEED
    """What the code is made for."""
    delay: int = 0
    """Calls between an input and its outputs, in a pipeline."""

    @property
    def notes(self) -> tuple[str, ...]:
        """For each instruction of the core that no kernel uses, where it came nearest and what was in its way."""
        found = []
        for instruction in self.target.core.instructions:
            if self.optimize is Optimize.SIZE:
                found.append(f"{instruction.name} is not used in code made for size")
                continue
            if any(instruction.name in kernel.instructions for kernel, _ in self.calls.values()):
                continue
            sentences = [sentence for kernel, _ in self.calls.values() for sentence in kernel.notes]
            own = [sentence for sentence in sentences if sentence.startswith(f"{instruction.name}:")]
            nearest = own[0] if own else f"{instruction.name}: no layer has loops it is looked for in"
            found.append(f"an instruction of the core is used nowhere; {nearest}")
        return tuple(found)


def make_unit(
    program: Program,
    regions: Sequence[Region],
    target: Target,
    optimize: Optimize = Optimize.SPEED,
    delay: int = 0,
) -> Unit:
    """Choose kernels, constants and names for a program."""
    model = identifier(program.name)
    constants: dict[str, tuple[str, Array]] = {}
    for name in sorted(program.constants):
        constants[f"{model}_{name}"] = ("uint8_t", program.constants[name])
    for index, kept in enumerate(program.states):
        content = kept.first.reshape(-1).view(np.uint8)
        if len(set(content.tolist())) > 1:
            constants[f"{model}_state_{index}_first"] = ("uint8_t", content)
    calls, functions, blocks = kernel_calls(program, target, model, optimize, constants)
    commands: dict[int, tuple[tuple[str, Command | LibraryCall], ...]] = {}
    for index, statement in enumerate(program.statements):
        if isinstance(statement, Launch):
            commands[index] = _commands(program, target, regions, model, statement)
    known = (calls, functions, constants, blocks, commands, _tickets(program))
    return Unit(program, regions, target, model, *known, optimize, delay)


def _commands(
    program: Program, target: Target, regions: Sequence[Region], model: str, launch: Launch
) -> tuple[tuple[str, Command | LibraryCall], ...]:
    region = regions[launch.layer]
    offload = next(part.offload for part in region.parts if part.engine and part.engine.name == launch.engine)
    assert offload is not None
    views = [launch.result, *(launch.operands[name] for name in launch.graph.inputs)]
    if not offload.strided and not all(view.is_dense for view in views):
        raise ProgramError(f"operands of {region.name} do not lie densely", where=offload.name,
                           hint="declare the Offload strided=True if the engine takes strides, else report this")
    made = offload.commands(launch.match, addressed_operands(program, launch))
    number = _launch_number(program, launch)
    stem = f"{model}_{region.name}_task" + (f"_{number}" if number is not None else "")
    if len(made) == 1:
        return ((stem, made[0]),)
    return tuple((f"{stem}_step_{step}", command) for step, command in enumerate(made))


def addressed_operands(program: Program, launch: Launch) -> dict[str, Operand]:
    """Addresses and strides of a launch's operands by value or constant name, the result as "result"; the address of
    constants that are read where they lie is their place in the launch's blob."""
    views = {**launch.operands, "result": launch.result}
    found = {}
    for name, view in views.items():
        address = 0 if program.buffers[view.buffer].role is Role.CONSTANT else program.buffers[view.buffer].address
        assert address is not None
        found[name] = Operand(address + view.offset, view.strides)
    return found


def read_in_place(program: Program) -> frozenset[str]:
    """The constants an engine reads where they lie."""
    views = [view for s in program.statements if isinstance(s, Launch) for view in s.operands.values()]
    return frozenset(view.buffer for view in views if program.buffers[view.buffer].role is Role.CONSTANT)


def _launch_number(program: Program, launch: Launch) -> int | None:
    """Which of its layer's launches this is; None when it is the only one."""
    same = [s for s in program.statements if isinstance(s, Launch) and s.layer == launch.layer]
    return None if len(same) == 1 else next(i for i, s in enumerate(same) if s is launch)


def _tickets(program: Program) -> dict[int, str]:
    found: dict[int, str] = {}
    for statement in program.statements:
        if isinstance(statement, Wait) and statement.statement not in found:
            waited = program.statements[statement.statement]
            verb = "copied" if isinstance(waited, Copy) else "started" if isinstance(waited, Call) else "launched"
            layer = program.layers[waited.layer]
            count = sum(1 for name in found.values() if name.startswith(f"{layer}_{verb}"))
            found[statement.statement] = f"{layer}_{verb}_{count}"
    return found


def constants_source(unit: Unit) -> tuple[str, str]:
    """Header and source of the constants: weights, parameters and the engines' tasks."""
    declarations, definitions = [], [f'#include "{unit.model}_constants.h"\n']
    blobs = {f"{unit.model}_{name}" for name in read_in_place(unit.program)}
    for name, (c_type, array) in unit.constants.items():
        declaration = f"const {c_type} {name}[{array.size}]"
        declarations.append(f"extern {declaration};")
        alignment = IN_PLACE_ALIGNMENT if name in blobs else 16
        definitions.append(array_definition(f"{declaration} __attribute__((aligned({alignment})))", elements(array)))
    for name, (c_type, members) in unit.blocks.items():
        declarations.append(f"extern const {c_type} {name};")
        definitions.append(array_definition(f"const {c_type} {name}", members))
    for commands in unit.commands.values():
        for name, command in commands:
            if isinstance(command, LibraryCall):
                continue
            declaration = f"const uint32_t {name}[{len(command.words)}]"
            declarations.append(f"extern {declaration};")
            definitions.append(array_definition(declaration, words(command.words)))
    header = guard(f"{unit.model.upper()}_CONSTANTS_H", _included(unit) + "\n".join(declarations) + "\n")
    return header, "\n".join(definitions)


def _included(unit: Unit) -> str:
    """What the constants' header begins with: the types of blocks come from the kernels' header."""
    return f'#include "{unit.model}_kernels.h"\n\n' if unit.blocks else "#include <stdint.h>\n\n"


def kernels_source(unit: Unit) -> tuple[str, str]:
    """Header and source of the kernels the core runs."""
    needed = [name for kernel in unit.kernels for name in kernel.helpers]
    parts = [f'#include "{unit.model}_kernels.h"\n']
    parts.append(kernels.helper_source(needed))
    parts += dict.fromkeys(text for kernel in unit.kernels for text in kernel.declarations)
    parts += dict.fromkeys(kernel.shared for kernel in unit.kernels if kernel.shared)
    parts += [
        kernel.source.replace("static void " + kernel.name + "(", "void " + kernel.name + "(")
        for kernel in unit.kernels
    ]
    prototypes = list(dict.fromkeys(kernel.block.definition() for kernel in unit.kernels if kernel.block))
    prototypes += [prototype(kernel) for kernel in unit.kernels]
    header = guard(f"{unit.model.upper()}_KERNELS_H", "#include <stdint.h>\n\n" + "\n".join(prototypes) + "\n")
    return header, "\n".join(parts)


def arenas(unit: Unit) -> dict[str, int]:
    """Bytes of each memory the program's buffers reach up to."""
    sizes: dict[str, int] = {}
    for buffer in unit.program.buffers.values():
        if buffer.address is not None:
            end = buffer.address - unit.target.memory(buffer.memory).base + buffer.nbytes
            sizes[buffer.memory] = max(sizes.get(buffer.memory, 0), end)
    return sizes


def arena_name(unit: Unit, memory: str) -> str:
    """C name of the array that holds a memory's buffers."""
    return f"{unit.model}_{identifier(memory)}"


def is_fixed(target: Target, memory: str) -> bool:
    """True when a memory's buffers must lie at the very addresses planned: engines are told them as numbers."""
    return memory != target.values or any(e.device and e.memory == memory for e in target.engines)


def core_copies(unit: Unit) -> bool:
    """True when the core copies, for want of a DMA."""
    return unit.program.dma == CORE and any(isinstance(s, Copy) for s in unit.program.statements)


def place(unit: Unit, view: View) -> str:
    """C expression of a view's first byte: an array and an offset."""
    buffer = unit.program.buffers[view.buffer]
    if buffer.role is Role.CONSTANT:
        return _plus(f"{unit.model}_{buffer.name}", view.offset)
    assert buffer.address is not None
    return _plus(arena_name(unit, buffer.memory), buffer.address - unit.target.memory(buffer.memory).base + view.offset)


def _plus(base: str, offset: int) -> str:
    return f"{base} + {offset}" if offset else base


def model_source(unit: Unit) -> str:
    """The network: one function per layer, and the function that runs them."""
    lines = [f'#include "{unit.model}.h"', "", '#include "dovetail_rt.h"']
    lines += ['#include "dma.h"'] if unit.target.dma else []
    lines += ['#include "copy.h"'] if core_copies(unit) else []
    lines += ['#include "cores.h"'] if unit.target.workers else []
    lines += [f'#include "{header}"' for header in driver_headers(unit)]
    lines += [f'#include "{unit.model}_constants.h"', f'#include "{unit.model}_kernels.h"', ""]
    for memory, size in arenas(unit).items():
        section = f', section(".{identifier(memory)}")' if is_fixed(unit.target, memory) else ""
        lines.append(f"uint8_t {arena_name(unit, memory)}[{size}] __attribute__((aligned(16){section}));")
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
    lines += [f"    {engine.prepare}();" for engine in unit.target.engines if engine.prepare]
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
        lines += [head, f"        ({place(unit, kept.view)})[i] = {value};", "    }"]
    return [*lines, "    has_states = 1u;", "}", ""]


def driver_headers(unit: Unit) -> list[str]:
    """The headers of the engines' drivers, by bare name."""
    files = [resource.rpartition(":")[2] for engine in unit.target.engines for resource in engine.driver]
    names = [file.rpartition("/")[2] for file in files]
    headers = [header for engine in unit.target.engines for header in engine.headers]
    return [*(name for name in names if name.endswith(".h")), *headers]


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
    for group in _in_turns([stretch for stretch in stretches if stretch[1]]):
        layers = list(dict.fromkeys(layer for layer, _ in group))
        text = [line for _, members in group for index in members for line in _job(unit, index)]
        for layer in layers:
            region = unit.regions[layer]
            where = _where(unit, region, [index for own, members in group if own == layer for index in members])
            origin = one_line(", ".join(region.origins))[:160]
            text.append(f"/* {region.name} on {where}: {origin or 'made by the compiler'} */")
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
    calls = [unit.program.statements[index] for index in members]
    cores = sorted({call.core for call in calls if isinstance(call, Call)})
    return "the core" if not unit.target.workers else f"core {' and '.join(map(str, cores))}"


def _job(unit: Unit, index: int) -> list[str]:
    """The function a call on another core is started as."""
    call = unit.program.statements[index]
    if not isinstance(call, Call) or not call.core:
        return []
    return [f"static void {_job_name(unit, index, call)}(void)", "{", f"    {_kernel_call(unit, index, call)}", "}", ""]


def _job_name(unit: Unit, index: int, call: Call) -> str:
    return f"{unit.program.layers[call.layer]}_on_core{call.core}"


def _statement(unit: Unit, index: int, statement: Statement) -> list[str]:
    if isinstance(statement, Wait):
        return [_wait(unit, statement)]
    ticket = f"{unit.tickets[index]} = " if index in unit.tickets else "(void)"
    if isinstance(statement, Call) and statement.core:
        return [f"{ticket}core_start({statement.core}u, {_job_name(unit, index, statement)});"]
    if isinstance(statement, Call):
        return [_kernel_call(unit, index, statement)]
    if isinstance(statement, Launch):
        engine, layer = unit.target.engine(statement.engine), unit.program.layers[statement.layer]
        made = [_started(unit, statement, name, command) for name, command in unit.commands[index]]
        begun = [*("(void)" for _ in made[:-1]), ticket]
        checked = [None if engine.wait else _checked(engine, call, layer) for _, call in made]
        calls = [check or f"{how}{call};" for how, check, (_, call) in zip(begun, checked, made, strict=True)]
        return [*(line for lines, _ in made for line in lines), *calls]
    if isinstance(statement, Copy):
        if unit.program.dma == CORE:
            return [_core_transfer(unit, statement, transfer) for transfer in transfers(statement)]
        split = [t for transfer in transfers(statement) for t in (strips(transfer) if transfer.border else (transfer,))]
        moves = [f"dma_{_transfer(unit, statement, transfer)}" for transfer in split]
        return [*(f"(void){move}" for move in moves[:-1]), ticket + moves[-1]]
    raise TypeError(f"unknown statement {statement}")


def _moves(unit: Unit, index: int) -> list[str]:
    """What brings bytes to engines with a copy of the memory, and back, before a statement."""
    found = []
    for move in unit.program.moves.get(index, ()):
        mirror = unit.target.engine(move.engine).mirror
        assert mirror is not None
        function = mirror.to_engine if move.to_engine else mirror.from_engine
        found.append(f"{function}({place(unit, move.view)}, {move.view.type.elements});")
    return found


def _wait(unit: Unit, wait: Wait) -> str:
    ticket, waited = unit.tickets[wait.statement], unit.program.statements[wait.statement]
    if isinstance(waited, Call):
        return f"core_wait({waited.core}u, {ticket});"
    if wait.queue == unit.program.dma:
        return f"dma_wait({ticket});"
    engine = unit.target.engine(wait.queue)
    call = f"{engine.wait}({ticket})"
    return _checked(engine, call, unit.program.layers[waited.layer]) or f"{call};"


def _kernel_call(unit: Unit, index: int, call: Call) -> str:
    kernel, names = unit.calls[index]
    arguments = []
    for parameter in kernel.parameters:
        if parameter.is_constant:
            arguments.append(("&" if parameter.value == kernels.BLOCK else "") + names[parameter.value])
            continue
        is_result = parameter.value == call.graph.outputs[0]
        view = call.result if is_result else call.operands[parameter.value]
        const = "" if is_result else "const "
        void = f"({const}void *)" if parameter.c_type != "uint8_t" else ""
        cast = f"({const}{parameter.c_type} *){void}" if void else ""
        arguments.append(f"{cast}({place(unit, view)})" if cast else place(unit, view))
    return f"{kernel.name}({', '.join(arguments)});"


def _started(unit: Unit, launch: Launch, name: str, command: Command | LibraryCall) -> tuple[list[str], str]:
    """What a command needs declared, and the call that gives it."""
    if isinstance(command, LibraryCall):
        return library_call(command, name, lambda operand: place(unit, _operand(launch, operand)))
    blob = f", {_blob(unit, launch)}" if command.constants else ""
    return [], f"{command.function}({name}{blob})"


def _checked(engine: Engine, call: str, layer: str) -> str | None:
    """A statement that looks at what a call returns; None where nobody does."""
    if engine.success is None:
        return None
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
    return place(unit, replace(views[0], offset=min(view.offset for view in views))) if views else "0"


def _core_transfer(unit: Unit, copy: Copy, transfer: Transfer) -> str:
    if not transfer.border:
        return _transfer(unit, copy, transfer)
    target = place(unit, replace(copy.destination, offset=transfer.destination))
    rows = f"{transfer.row_bytes}, {transfer.rows}, {transfer.destination_row_stride}"
    planes = f"{transfer.planes}, {transfer.destination_plane_stride}"
    return f"copy_fill_border({target}, {rows}, {planes}, {_padding(transfer, 'copy_padding')});"


def _padding(transfer: Transfer, kind: str) -> str:
    (top, bottom), (left, right) = transfer.pad_rows, transfer.pad_bytes
    return f"&(const {kind}){{{top}, {bottom}, {left}, {right}, {transfer.fill}}}"


def _transfer(unit: Unit, copy: Copy, transfer: Transfer) -> str:
    target = place(unit, replace(copy.destination, offset=transfer.destination))
    source = place(unit, replace(copy.source, offset=transfer.source))
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
