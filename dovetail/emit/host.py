"""The stand-in for the engines on the host: every task computes its pattern's own meaning."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from dovetail import kernels
from dovetail.emit.c_text import C_TYPES, array_definition, elements
from dovetail.emit.source import Unit, driver_headers, place
from dovetail.errors import TargetError
from dovetail.graph.graph import Graph
from dovetail.kernels import CoreKernel
from dovetail.program.ir import Launch, View
from dovetail.target.description import Command


def host_source(unit: Unit) -> str | None:
    """The engines on the host: every task computes its pattern's own meaning. None without any but software."""
    engines = [engine for engine in unit.target.engines if engine.device]
    if not engines:
        return None
    functions: list[str] = []
    shared: dict[str, CoreKernel] = {}
    table: dict[str, list[str]] = {}
    with_blob: dict[str, bool] = {}
    helpers: list[str] = []
    for index, commands in unit.commands.items():
        launch = unit.program.statements[index]
        assert isinstance(launch, Launch)
        steps = [(name, command) for name, command in commands if isinstance(command, Command)]
        if not steps:
            continue
        with_blob.update((command.function, command.constants) for _, command in steps)
        for name, command in steps[:-1]:
            table.setdefault(command.function, []).append(f"    if (task == {name}) {{ return; }}")
        name, command = steps[-1]
        graphs = _computable(launch.graph)
        found = [_host_kernel(graph, f"compute_{graph.name}_{name}" if len(graphs) > 1 else f"compute_{name}", shared,
                              functions) for graph in graphs]  # fmt: skip
        helpers += [helper for kernel in found for helper in kernel.helpers]
        functions.append(_host_task(unit, launch, name, found, {graph.outputs[0] for graph in graphs[:-1]}))
        table.setdefault(command.function, []).append(f"    if (task == {name}) {{ run_{name}(); return 0u; }}")
    head = [f'#include "{unit.model}.h"', f'#include "{unit.model}_constants.h"']
    head += [f'#include "{header}"' for header in driver_headers(unit)]
    body = [kernels.helper_source(helpers)]
    for function, lines in table.items():
        text = "\n".join(line.replace("return;", "return 0u;") for line in lines)
        more, unused = (", const uint8_t *constants", "    (void)constants;\n") if with_blob[function] else ("", "")
        functions.append(
            f"uint32_t {function}(const uint32_t *task{more})\n{{\n{unused}{text}\n    return 0u;\n}}\n"
        )
    for engine in engines:
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


def _computable(graph: Graph) -> tuple[Graph, ...]:
    """A launch as graphs core kernels compute, in turn: what no kernel takes as one, e.g. pointwise operators before
    all others, or padding wider than a kernel, is cut in two.

    Raises:
        TargetError: the core has no kernels for either.
    """
    refusal = kernels.supports(graph)
    if refusal is None:
        return (graph,)
    for count in range(1, len(graph.nodes)):
        head, tail = graph.nodes[:count], graph.nodes[count:]
        middle = head[-1].output
        if any(name in graph.inputs for node in tail for name in node.inputs):
            continue
        first = replace(graph, name="operand", outputs=(middle,), nodes=head)
        second = replace(graph, name="result", inputs=(middle,), nodes=tail)
        if kernels.supports(first) is None and kernels.supports(second) is None:
            return first, second
    raise TargetError(f"what an engine takes cannot be computed on this computer: {refusal}", where=graph.name,
                      hint="give the offload a limit that keeps it out")


def _host_task(
    unit: Unit, launch: Launch, name: str, found: Sequence[CoreKernel], between: Collection[str]
) -> str:
    """A function that gathers strided operands, computes, and scatters the result; `between` are the values the kernels
    give each other."""
    lines = []
    for value in between:
        kind = launch.graph.types[value]
        lines.append(f"    static {C_TYPES[kind.dtype]} between[{kind.elements}] __attribute__((aligned(16)));")
    for kernel in found:
        block = _host_kernel_call(unit, launch, kernel, between)
        lines += ["    {", *block, "    }"] if between else block
    return "\n".join([f"static void run_{name}(void)", "{", *lines, "}", ""])


def _host_kernel_call(unit: Unit, launch: Launch, kernel: CoreKernel, between: Collection[str]) -> list[str]:
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
        if parameter.value in between:
            arguments.append("between")
            continue
        is_result = parameter.value == launch.graph.outputs[0]
        view = launch.result if is_result else launch.operands[parameter.value]
        c_type = C_TYPES[view.type.dtype]
        if view.is_dense and view.layout is None:
            const = "" if is_result else "const "
            arguments.append(f"({const}{c_type} *)({const}void *)({place(unit, view)})")
            continue
        lines.append(f"    static {c_type} {stem}[{view.type.elements}] __attribute__((aligned(16)));")
        arguments.append(stem)
        (after if is_result else lines).append(_strided_loop(unit, view, stem, c_type, is_result))
    return [*lines, f"    {kernel.name}({', '.join(arguments)});", *after]


def _strided_loop(unit: Unit, view: View, stem: str, c_type: str, scatter: bool) -> str:
    depth = len(view.type.shape)
    indices = [f"i{axis}" for axis in range(depth)]
    loops = "".join(
        f"for (int32_t {index} = 0; {index} < {size}; {index}++) "
        for index, size in zip(indices, view.type.shape, strict=True)
    )
    offset = " + ".join(_steps(view, indices))
    dense = "0"
    for index, size in zip(indices, view.type.shape, strict=True):
        dense = f"({dense}) * {size} + {index}"
    const = "" if scatter else "const "
    strided = f"*({const}{c_type} *)({const}void *)({place(unit, view)} + {offset})"
    body = f"{strided} = {stem}[{dense}];" if scatter else f"{stem}[{dense}] = {strided};"
    return f"    {loops}{{ {body} }}"


def _steps(view: View, indices: list[str]) -> list[str]:
    """C terms of an element's offset, one per physical dimension."""
    if view.layout is None:
        return [f"{index} * {stride}" for index, stride in zip(indices, view.strides, strict=True)]
    found = []
    for (axis, step), stride in zip(view.layout.dims, view.strides, strict=True):
        coarser = view.layout.coarser(axis, step)
        place = f"{indices[axis]} / {step}" if step > 1 else indices[axis]
        place += f" % {coarser // step}" if coarser else ""
        down = f"{coarser // step - 1} - " if coarser and (axis, step) in view.layout.backwards else ""
        found.append(f"({down}{place}) * {stride}")
    return found
