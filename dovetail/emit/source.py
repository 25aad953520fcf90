"""The emitted sources: constants, kernels, the network itself, and the stand-in for the engines on the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dovetail import kernels
from dovetail.emit.c_text import C_TYPES, array_definition, elements, guard, identifier, one_line, words
from dovetail.graph.graph import Graph
from dovetail.graph.types import Array
from dovetail.kernels import CoreKernel
from dovetail.partition.regions import Region
from dovetail.program.ir import Begin, Call, Copy, Launch, Program, Role, Statement, View, Wait
from dovetail.program.transfers import Transfer, transfers
from dovetail.target.description import Command, Operand, Target

KernelCalls = Mapping[int, tuple[CoreKernel, Mapping[str, str]]]
"""Statement index -> the kernel it calls and the C name of each of the kernel's constants."""


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
    commands: Mapping[int, tuple[tuple[str, Command], ...]]
    """Statement index of a launch -> C name and content of each command."""
    tickets: Mapping[int, str]
    """Statement index -> C variable that holds its ticket, where something waits for it."""


def make_unit(program: Program, regions: Sequence[Region], target: Target) -> Unit:
    """Choose kernels, constants and names for a program."""
    model = identifier(program.name)
    constants: dict[str, tuple[str, Array]] = {}
    for name in sorted(program.constants):
        constants[f"{model}_{name}"] = ("uint8_t", program.constants[name])
    calls, functions = _kernel_calls(program, model, constants)
    commands: dict[int, tuple[tuple[str, Command], ...]] = {}
    for index, statement in enumerate(program.statements):
        if isinstance(statement, Launch):
            commands[index] = _commands(program, target, regions, model, statement)
    return Unit(program, regions, target, model, calls, functions, constants, commands, _tickets(program))


def _kernel_calls(
    program: Program, model: str, constants: dict[str, tuple[str, Array]]
) -> tuple[dict[int, tuple[CoreKernel, Mapping[str, str]]], tuple[CoreKernel, ...]]:
    calls: dict[int, tuple[CoreKernel, Mapping[str, str]]] = {}
    shared: dict[str, CoreKernel] = {}
    known: dict[tuple[str, bytes], str] = {}
    for index, statement in enumerate(program.statements):
        if not isinstance(statement, Call):
            continue
        layer = program.layers[statement.layer]
        kernel = kernels.generate(statement.graph, f"{model}_{layer}_kernel")
        kernel = replace(kernel, name=shared.setdefault(kernel.key, kernel).name)
        names: dict[str, str] = {}
        for parameter in kernel.parameters:
            if parameter.is_constant:
                array = kernel.constants[parameter.value]
                key = (parameter.c_type, array.tobytes())
                names[parameter.value] = known.setdefault(key, f"{model}_{layer}_{identifier(parameter.name)}")
                constants.setdefault(names[parameter.value], (parameter.c_type, array))
        calls[index] = (kernel, names)
    return calls, tuple(shared.values())


def _commands(
    program: Program, target: Target, regions: Sequence[Region], model: str, launch: Launch
) -> tuple[tuple[str, Command], ...]:
    region = regions[launch.layer]
    assert region.offload is not None
    made = region.offload.commands(launch.match, addressed_operands(program, launch))
    number = _launch_number(program, launch)
    stem = f"{model}_{region.name}_task" + (f"_{number}" if number is not None else "")
    if len(made) == 1:
        return ((stem, made[0]),)
    return tuple((f"{stem}_step_{step}", command) for step, command in enumerate(made))


def addressed_operands(program: Program, launch: Launch) -> dict[str, Operand]:
    """Addresses and strides of a launch's operands by value or constant name, the result as "result"."""
    views = {**launch.operands, "result": launch.result}
    found = {}
    for name, view in views.items():
        address = program.buffers[view.buffer].address
        assert address is not None
        found[name] = Operand(address + view.offset, view.strides)
    return found


def _launch_number(program: Program, launch: Launch) -> int | None:
    """Which of its layer's launches this is; None when it is the only one."""
    same = [s for s in program.statements if isinstance(s, Launch) and s.layer == launch.layer]
    return None if len(same) == 1 else next(i for i, s in enumerate(same) if s is launch)


def _tickets(program: Program) -> dict[int, str]:
    found: dict[int, str] = {}
    for statement in program.statements:
        if isinstance(statement, Wait) and statement.statement not in found:
            waited = program.statements[statement.statement]
            verb = "copied" if isinstance(waited, Copy) else "launched"
            layer = program.layers[waited.layer]
            count = sum(1 for name in found.values() if name.startswith(f"{layer}_{verb}"))
            found[statement.statement] = f"{layer}_{verb}_{count}"
    return found


def constants_source(unit: Unit) -> tuple[str, str]:
    """Header and source of the constants: weights, parameters and the engines' tasks."""
    declarations, definitions = [], [f'#include "{unit.model}_constants.h"\n']
    for name, (c_type, array) in unit.constants.items():
        declaration = f"const {c_type} {name}[{array.size}]"
        declarations.append(f"extern {declaration};")
        definitions.append(array_definition(f"{declaration} __attribute__((aligned(16)))", elements(array)))
    for commands in unit.commands.values():
        for name, command in commands:
            declaration = f"const uint32_t {name}[{len(command.words)}]"
            declarations.append(f"extern {declaration};")
            definitions.append(array_definition(declaration, words(command.words)))
    header = guard(f"{unit.model.upper()}_CONSTANTS_H", "#include <stdint.h>\n\n" + "\n".join(declarations) + "\n")
    return header, "\n".join(definitions)


def kernels_source(unit: Unit) -> tuple[str, str]:
    """Header and source of the kernels the core runs."""
    needed = [name for kernel in unit.kernels for name in kernel.helpers]
    parts = [f'#include "{unit.model}_kernels.h"\n']
    parts.append(kernels.helper_source(needed))
    parts += [
        kernel.source.replace("static void " + kernel.name + "(", "void " + kernel.name + "(")
        for kernel in unit.kernels
    ]
    prototypes = [_prototype(kernel) for kernel in unit.kernels]
    header = guard(f"{unit.model.upper()}_KERNELS_H", "#include <stdint.h>\n\n" + "\n".join(prototypes) + "\n")
    return header, "\n".join(parts)


def _prototype(kernel: CoreKernel) -> str:
    first, *others = kernel.parameters
    arguments = [f"{first.c_type} *restrict {first.name}"]
    arguments += [f"const {parameter.c_type} *restrict {parameter.name}" for parameter in others]
    return f"void {kernel.name}({', '.join(arguments)});"


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
    lines += [f'#include "{header}"' for header in _driver_headers(unit)]
    lines += [f'#include "{unit.model}_constants.h"', f'#include "{unit.model}_kernels.h"', ""]
    for memory, size in arenas(unit).items():
        near = memory != unit.target.values
        section = f', section(".{identifier(memory)}")' if near else ""
        lines.append(f"uint8_t {arena_name(unit, memory)}[{size}] __attribute__((aligned(16){section}));")
    lines.append("")
    if unit.tickets:
        lines.append("/* What is under way: set where it is started, read where it is waited for. */")
        lines += [f"static uint32_t {name};" for name in unit.tickets.values()]
        lines.append("")
    layers = list(_layer_functions(unit))
    lines += [line for _, text in layers for line in text]
    lines += [f"void {unit.model}_run(void)", "{"]
    lines += [f"    {engine.prepare}();" for engine in unit.target.engines if engine.prepare]
    lines += [f"    {name}();" for name, _ in layers]
    lines += ["    DOVETAIL_MARK_END();", "}", ""]
    return "\n".join(lines)


def _driver_headers(unit: Unit) -> list[str]:
    names = [resource.rpartition("/")[2] for engine in unit.target.engines for resource in engine.driver]
    return [name for name in names if name.endswith(".h")]


def _layer_functions(unit: Unit) -> Iterator[tuple[str, list[str]]]:
    """The static functions of the layers that do something, in order."""
    groups: list[tuple[int, list[int]]] = []
    for index, statement in enumerate(unit.program.statements):
        if isinstance(statement, Begin):
            groups.append((statement.layer, []))
        else:
            groups[-1][1].append(index)
    for layer, members in groups:
        if not members:
            continue
        region = unit.regions[layer]
        where = "the core" if region.place == "core" else region.place
        origin = one_line(", ".join(region.origins))[:160]
        text = [
            f"/* {region.name} on {where}: {origin or 'made by the compiler'} */",
            f"static void {region.name}(void)",
            "{",
        ]
        text.append(f"    DOVETAIL_MARK({layer});")
        for index in members:
            text += [f"    {line}" for line in _statement(unit, index, unit.program.statements[index])]
        yield region.name, [*text, "}", ""]


def _statement(unit: Unit, index: int, statement: Statement) -> list[str]:
    if isinstance(statement, Wait):
        queue = statement.queue
        wait = "dma_wait" if queue == unit.program.dma else unit.target.engine(queue).wait
        return [f"{wait}({unit.tickets[statement.statement]});"]
    if isinstance(statement, Call):
        return _kernel_call(unit, index, statement)
    ticket = f"{unit.tickets[index]} = " if index in unit.tickets else "(void)"
    if isinstance(statement, Launch):
        calls = [f"{command.function}({name});" for name, command in unit.commands[index]]
        return [*(f"(void){call}" for call in calls[:-1]), ticket + calls[-1]]
    if isinstance(statement, Copy):
        moves = [_transfer(unit, statement, transfer) for transfer in transfers(statement)]
        return [*(f"(void){move}" for move in moves[:-1]), ticket + moves[-1]]
    raise TypeError(f"unknown statement {statement}")


def _kernel_call(unit: Unit, index: int, call: Call) -> list[str]:
    kernel, names = unit.calls[index]
    arguments = []
    for parameter in kernel.parameters:
        if parameter.is_constant:
            arguments.append(names[parameter.value])
            continue
        is_result = parameter.value == call.graph.outputs[0]
        view = call.result if is_result else call.operands[parameter.value]
        const = "" if is_result else "const "
        void = f"({const}void *)" if parameter.c_type != "uint8_t" else ""
        cast = f"({const}{parameter.c_type} *){void}" if void else ""
        arguments.append(f"{cast}({place(unit, view)})" if cast else place(unit, view))
    return [f"{kernel.name}({', '.join(arguments)});"]


def _transfer(unit: Unit, copy: Copy, transfer: Transfer) -> str:
    target = place(unit, replace(copy.destination, offset=transfer.destination))
    source = place(unit, replace(copy.source, offset=transfer.source))
    rows = f"{transfer.row_bytes}, {transfer.rows}, {transfer.destination_row_stride}, {transfer.source_row_stride}"
    planes = f"{transfer.planes}, {transfer.destination_plane_stride}, {transfer.source_plane_stride}"
    if transfer.is_padded:
        (top, bottom), (left, right) = transfer.pad_rows, transfer.pad_bytes
        padding = f"&(const dma_padding){{{top}, {bottom}, {left}, {right}, {transfer.fill}}}"
        return f"dma_copy_pad({target}, {source}, {rows}, {planes}, {padding});"
    if transfer.planes > 1:
        return f"dma_copy_3d({target}, {source}, {rows}, {planes});"
    if transfer.rows > 1:
        return f"dma_copy_2d({target}, {source}, {rows});"
    return f"dma_copy_1d({target}, {source}, {transfer.row_bytes});"


def host_source(unit: Unit) -> str | None:
    """The engines on the host: every task computes its pattern's own meaning. None without engines."""
    if not unit.commands:
        return None
    functions: list[str] = []
    shared: dict[str, CoreKernel] = {}
    table: dict[str, list[str]] = {}
    helpers: list[str] = []
    for index, commands in unit.commands.items():
        launch = unit.program.statements[index]
        assert isinstance(launch, Launch)
        for name, command in commands[:-1]:
            table.setdefault(command.function, []).append(f"    if (task == {name}) {{ return; }}")
        name, command = commands[-1]
        kernel = _host_kernel(launch.graph, f"compute_{name}", shared, functions)
        helpers += kernel.helpers
        functions.append(_host_task(unit, launch, name, kernel))
        table.setdefault(command.function, []).append(f"    if (task == {name}) {{ run_{name}(); return 0u; }}")
    head = [f'#include "{unit.model}.h"', f'#include "{unit.model}_constants.h"']
    head += [f'#include "{header}"' for header in _driver_headers(unit)]
    body = [kernels.helper_source(helpers)]
    for function, lines in table.items():
        text = "\n".join(line.replace("return;", "return 0u;") for line in lines)
        functions.append(f"uint32_t {function}(const uint32_t *task)\n{{\n{text}\n    return 0u;\n}}\n")
    for engine in unit.target.engines:
        functions.append(f"void {engine.wait}(uint32_t ticket)\n{{\n    (void)ticket;\n}}\n")
        if engine.prepare:
            functions.append(f"void {engine.prepare}(void)\n{{\n}}\n")
    return "\n".join([*head, "", *body, *functions])


def _host_kernel(graph: Graph, name: str, shared: dict[str, CoreKernel], functions: list[str]) -> CoreKernel:
    kernel = kernels.generate(graph, name)
    if kernel.key not in shared:
        shared[kernel.key] = kernel
        functions.append(kernel.source)
    return replace(kernel, name=shared[kernel.key].name)


def _host_task(unit: Unit, launch: Launch, name: str, kernel: CoreKernel) -> str:
    """A function that gathers strided operands, computes, and scatters the result."""
    lines: list[str] = []
    arguments: list[str] = []
    after: list[str] = []
    for parameter in kernel.parameters:
        stem = f"{parameter.name}_"
        if parameter.is_constant:
            array = kernel.constants[parameter.value]
            declaration = f"    static const {parameter.c_type} {stem}[{array.size}]"
            lines.append(array_definition(declaration, elements(array)).rstrip())
            arguments.append(stem)
            continue
        is_result = parameter.value == launch.graph.outputs[0]
        view = launch.result if is_result else launch.operands[parameter.value]
        c_type = C_TYPES[view.type.dtype]
        if view.is_dense:
            const = "" if is_result else "const "
            arguments.append(f"({const}{c_type} *)({const}void *)({place(unit, view)})")
            continue
        lines.append(f"    static {c_type} {stem}[{view.type.elements}] __attribute__((aligned(16)));")
        arguments.append(stem)
        (after if is_result else lines).append(_strided_loop(unit, view, stem, c_type, is_result))
    call = f"    {kernel.name}({', '.join(arguments)});"
    return "\n".join([f"static void run_{name}(void)", "{", *lines, call, *after, "}", ""])


def _strided_loop(unit: Unit, view: View, stem: str, c_type: str, scatter: bool) -> str:
    depth = len(view.type.shape)
    indices = [f"i{axis}" for axis in range(depth)]
    loops = "".join(
        f"for (int32_t {index} = 0; {index} < {size}; {index}++) "
        for index, size in zip(indices, view.type.shape, strict=True)
    )
    offset = " + ".join(f"{index} * {stride}" for index, stride in zip(indices, view.strides, strict=True))
    dense = "0"
    for index, size in zip(indices, view.type.shape, strict=True):
        dense = f"({dense}) * {size} + {index}"
    const = "" if scatter else "const "
    strided = f"*({const}{c_type} *)({const}void *)({place(unit, view)} + {offset})"
    body = f"{strided} = {stem}[{dense}];" if scatter else f"{stem}[{dense}] = {strided};"
    return f"    {loops}{{ {body} }}"


def header_source(unit: Unit, version: str) -> str:
    """The header a user includes: entry point, inputs and outputs with their sizes and types."""
    program = unit.program
    lines = [
        f"/* {one_line(program.name)}: inference with static memory, for {one_line(unit.target.name)}. */",
        "#include <stdint.h>",
        "",
        f'#define {unit.model.upper()}_DOVETAIL_VERSION "{version}"',
        "",
    ]
    for memory, size in arenas(unit).items():
        lines.append(f"extern uint8_t {arena_name(unit, memory)}[{size}]; /* buffers in {one_line(memory)} */")
    for kind, views in (("input", program.inputs), ("output", program.outputs)):
        for index, (name, view) in enumerate(views.items()):
            stem = f"{unit.model.upper()}_{kind.upper()}_{index}"
            c_type = C_TYPES[view.type.dtype]
            lines += ["", f"/* {kind} '{one_line(name)}': {view.type}, row-major */"]
            lines.append(f"#define {stem}_ELEMENTS {view.type.elements}")
            lines.append(f"#define {stem} (({c_type} *)(void *)({place(unit, view)}))")
    lines += [
        "",
        "/* Computes the outputs from the inputs. Not reentrant; inputs may be overwritten. */",
        f"void {unit.model}_run(void);",
        "",
    ]
    return guard(f"{unit.model.upper()}_H", "\n".join(lines))
