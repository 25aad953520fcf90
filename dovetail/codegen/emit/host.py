"""Projects for this computer: stand-ins for engines, which compute their patterns' meaning, main program, Makefile."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from dovetail import kernels
from dovetail.codegen.build.instruction_sets import EMITTED_C
from dovetail.codegen.emit.firmware import runtime_path
from dovetail.codegen.emit.lines import text_of
from dovetail.codegen.emit.stored import StoredWeights, WeightOrder, find_weights, order_of, reading
from dovetail.codegen.emit.unit import Unit, offload_of
from dovetail.errors import DovetailError, ModelError, TargetError
from dovetail.ir.graph import Graph
from dovetail.ir.types import Array
from dovetail.kernels import CoreKernel
from dovetail.kernels.c import Lines, array_definition, c_type, code, elements, function, one_line
from dovetail.kernels.movement import field_text, index_text
from dovetail.program.ir import Copy, LaunchStatement, Role, View, reads
from dovetail.program.loops import digest
from dovetail.program.transfers import Transfer, dma_rows
from dovetail.schedule.partition import as_kernels
from dovetail.schedule.region import Region
from dovetail.target.description import Target
from dovetail.target.engine import Engine
from dovetail.target.offload import Command


def host_source(unit: Unit) -> str | None:
    """The engines on the host: every task computes its pattern's own meaning. None without any but software."""
    engines = [engine for engine in unit.target.engines if engine.device]
    if not engines:
        return None
    made, held = _Kernels(unit.target), _Arrays(unit)
    functions, helpers = made.functions, made.helpers
    table: dict[str, Lines] = {}
    with_blob: dict[str, bool] = {}
    calls: dict[int, str] = {}
    listed = {index for one in unit.lists for index in one.statements}
    for index, commands in unit.commands.items():
        launch = unit.program.statements[index]
        assert isinstance(launch, LaunchStatement)
        steps = [(name, command) for name, command in commands if isinstance(command, Command)]
        if not steps:
            continue
        name, command = steps[-1]
        calls[index] = _host_task(unit, launch, name, made, held)
        if index in listed:
            continue
        done = "return 0u;" if unit.target.engine(launch.engine).wait else "return;"  # without a wait, without a ticket
        with_blob.update((command.function, command.constants) for _, command in steps)
        for early, step in steps[:-1]:
            table.setdefault(step.function, []).append(f"    if (task == {text_of(unit.tasks[early])}) {{ {done} }}")
        table.setdefault(command.function, []).append(
            f"    if (task == {text_of(unit.tasks[name])}) {{ {calls[index]} {done} }}"
        )
    head = [f'#include "{unit.model}.h"', f'#include "{unit.model}_constants.h"']
    head += [f'#include "{header}"' for header in unit.driver_headers()]
    body = [kernels.helper_source(helpers)]
    for start, lines in table.items():
        text = "\n".join(lines)
        more, unused = (", const uint8_t *constants", "    (void)constants;\n") if with_blob[start] else ("", "")
        kind, end = ("uint32_t", "    return 0u;\n") if "return 0u;" in text else ("void", "")
        functions.append(f"{kind} {start}(const uint32_t *task{more})\n{{\n{unused}{text}\n{end}}}\n")
    functions += _host_lists(unit, engines, calls)
    for engine in engines:
        if engine.wait:
            functions.append(f"void {engine.wait}(uint32_t ticket)\n{{\n    (void)ticket;\n}}\n")
        if engine.prepare:
            functions.append(f"void {engine.prepare}(void)\n{{\n}}\n")
    arenas = [f"static uint8_t {unit.arena_name(name)}[{size}];" for name, size in unit.private_arenas().items()]
    return "\n".join([*head, *arenas, "", *held.definitions, *body, *functions])


_STATEMENTS = 500
"""Most statements of a function: compilers take very long for functions of a list with 100,000."""
_COPY_ROWS = """static void copy_rows(uint8_t *to, const uint8_t *from, int32_t size, int32_t rows,
                      int32_t to_stride, int32_t from_stride)
{
    for (int32_t row = 0; row < rows; row++) {
        for (int32_t i = 0; i < size; i++) {
            to[row * to_stride + i] = from[row * from_stride + i];
        }
    }
}
"""


def _host_lists(unit: Unit, engines: Sequence[Engine], calls: Mapping[int, str]) -> Iterator[str]:
    """A function for each list, with its copies and the `calls` of launches in order, and those that start lists."""
    if any(isinstance(unit.program.statements[index], Copy) for one in unit.lists for index in one.statements):
        yield _COPY_ROWS
    for one in unit.lists:
        lines = []
        for index in one.statements:
            statement = unit.program.statements[index]
            if isinstance(statement, LaunchStatement):
                lines.append(calls[index])
            elif isinstance(statement, Copy):
                lines += [_host_rows(unit, statement, rows) for rows in dma_rows(statement)]
        parts = [lines[start : start + _STATEMENTS] for start in range(0, len(lines), _STATEMENTS)]
        for number, part in enumerate(parts):
            yield "\n".join([*function(f"static void {one.name}_{number}", ["void"], part), ""])
        calls_of_parts = [f"{one.name}_{number}();" for number in range(len(parts))]
        yield "\n".join([*function(f"static void run_{one.name}", ["void"], calls_of_parts), ""])
        if one.name in unit.pieced:
            yield f"uint32_t {one.name}(void)\n{{\n    run_{one.name}();\n    return 0u;\n}}\n"
    for engine in engines:
        if engine.stream is not None:
            own = [one.name for one in unit.lists if one.engine == engine.name and one.name not in unit.pieced]
            lines = [f"if (words == {name}) {{ run_{name}(); }}" for name in own]
            text = code(
                f"""
                uint32_t {engine.stream.start}(const uint32_t *words, uint32_t count)
                {{
                    (void)words;
                    (void)count;
                    @lines
                    return 0u;
                }}
                """,
                lines=lines,
            )
            yield "\n".join([*text, ""])


def _host_rows(unit: Unit, copy: Copy, rows: Transfer) -> str:
    target = unit.first_byte(replace(copy.destination, offset=rows.destination))
    source = unit.first_byte(replace(copy.source, offset=rows.source))
    strides = f"{rows.destination_row_stride}, {rows.source_row_stride}"
    return f"copy_rows({target}, {source}, {rows.row_bytes}, {rows.rows}, {strides});"


_LEAST_SHARED = 64
"""Bytes of the smallest array that is looked for in the firmware's: a few bytes are found anywhere."""


def form_of_graph(graph: Graph) -> str:
    """All of a graph but its constants' contents and the names of values: the same for layers and tiles alike."""
    place = {name: number for number, name in enumerate(graph.types)}
    nodes = [(node.operator, [place[name] for name in node.inputs], place[node.output]) for node in graph.nodes]
    ends = [[place[name] for name in names] for names in (graph.inputs, graph.outputs, graph.constants)]
    return repr((*ends, nodes, list(graph.types.values())))


@dataclass
class _Arrays:
    """The constants of the kernels, each once: where the firmware's have the same bytes, those."""

    unit: Unit
    of_layer: dict[int, tuple[View, ...]] = field(default_factory=dict)
    """Layer -> a view of each of the constants that are fetched or read for it."""
    known: dict[tuple[str, bytes], str] = field(default_factory=dict)
    """C type and digest -> expression."""
    definitions: Lines = field(default_factory=list)
    places: dict[tuple[object, ...], tuple[str, StoredWeights] | None] = field(default_factory=dict)
    """Layouts of engines' packed weights, by offload, shapes and choice."""
    texts: dict[tuple[str, int], str] = field(default_factory=dict)
    """Expressions by C type and identity of an array, which lives as long as its kernel."""
    read: tuple[int, dict[str, bytes]] = (-1, {})
    """The layer that was searched last, and the bytes of its constants."""

    def __post_init__(self) -> None:
        found: dict[int, dict[str, View]] = {}
        for statement in self.unit.program.statements:
            for view in reads(statement):
                buffer = self.unit.program.buffers[view.buffer]
                if buffer.role is Role.CONSTANT:
                    found.setdefault(statement.layer, {})[buffer.name] = view
        self.of_layer = {layer: tuple(views.values()) for layer, views in found.items()}

    def expression(self, launch: LaunchStatement, c_type: str, array: Array) -> str:
        """C for the first element of an array that a launch's kernel reads."""
        if (same := self.texts.get((c_type, id(array)))) is not None:
            return same
        key = c_type, digest(array)
        if key not in self.known:
            found = self._in_firmware(launch.layer, c_type, array) or self._from_engine(launch, c_type, array)
            self.known[key] = found or self._new(c_type, array)
        self.texts[c_type, id(array)] = self.known[key]
        return self.known[key]

    def _from_engine(self, launch: LaunchStatement, c_type: str, array: Array) -> str | None:
        """The same, taken bit by bit from what the engine reads, where its weights are found there."""
        if array.nbytes < _LEAST_SHARED or not launch.packed or (told := self._where(launch, array)) is None:
            return None
        constant, stored, order = told
        if (place := self._in_firmware(launch.layer, "uint8_t", launch.packed[constant])) is None:
            return None
        name = f"held_{len(self.definitions)}"
        self.definitions.append(reading(name, place, c_type, order, stored))
        return f"{name}()"

    def _where(self, launch: LaunchStatement, array: Array) -> tuple[str, StoredWeights, WeightOrder] | None:
        """In which packed constant the weights of a launch lie, where, and in which order they are an array; asked once
        for tiles and layers alike, and again for a layer whose weights do not lie as those of one like it."""
        offload = offload_of(self.unit.regions[launch.layer], launch)
        alike = offload.name, form_of_graph(launch.graph), tuple(sorted(launch.match.choice.items()))
        for place in (alike, (*alike, launch.layer)) if alike in self.places else (alike,):
            if place not in self.places:
                self.places[place] = find_weights(offload.pack, launch.match)
            if (told := self.places[place]) is None:
                return None
            if (order := order_of(array, told[1], launch.packed[told[0]])) is not None:
                return *told, order
            if prod(told[1].shape) != array.size:
                return None
        return None

    def _in_firmware(self, layer: int, c_type: str, array: Array) -> str | None:
        if self.read[0] != layer:
            views = self.of_layer.get(layer, ())
            self.read = layer, {view.buffer: self.unit.program.constants[view.buffer].tobytes() for view in views}
        wanted = array.tobytes() if array.nbytes >= _LEAST_SHARED else b""
        for view in self.of_layer.get(layer, ()) if wanted else ():
            start = self.read[1][view.buffer].find(wanted)
            if start >= 0 and start % array.itemsize == 0:
                place = text_of(self.unit.place(replace(view, offset=start)))
                return place if c_type == "uint8_t" else f"(const {c_type} *)(const void *)({place})"
        return None

    def _new(self, c_type: str, array: Array) -> str:
        name = f"held_{len(self.definitions)}"
        self.definitions.append(array_definition(f"static const {c_type} {name}[{array.size}]", elements(array)))
        return name


_Step = tuple[Graph, CoreKernel | None]
"""Part of what a launch computes, and its kernel; None for another shape of its operand."""


@dataclass
class _HostTask:
    """A launch's function: what differs between equal tiles, addresses and constants, are its arguments."""

    lines: Lines = field(default_factory=list)
    arguments: dict[str, str] = field(default_factory=dict)
    """Declaration of a parameter -> the argument."""

    def taking(self, kind: str, stem: str, argument: str) -> str:
        """The name of a new parameter."""
        name = f"{stem}_{len(self.arguments)}"
        self.arguments[f"{kind}{name}"] = argument
        return name


@dataclass
class _Kernels:
    """The kernels of the launches: functions, each once, and the helpers they call."""

    target: Target
    functions: Lines = field(default_factory=list)
    helpers: Lines = field(default_factory=list)
    by_key: dict[str, CoreKernel] = field(default_factory=dict)
    texts: dict[Hashable, CoreKernel] = field(default_factory=dict)
    by_graph: dict[int, list[_Step]] = field(default_factory=dict)
    """Kernels that equal tiles share, by the identity of their graph, which lives as long as its launch."""
    tasks: dict[str, str] = field(default_factory=dict)
    """Text of a launch's function -> its name."""

    def call(self, name: str, task: _HostTask) -> str:
        """C that calls a launch's function, which has this name if it is the first of its text."""
        text = "\n".join([*task.arguments, *task.lines])
        if text not in self.tasks:
            self.tasks[text] = name
            parameters = list(task.arguments) or ["void"]
            self.functions.append("\n".join([*function(f"static void {name}", parameters, task.lines), ""]))
        return f"{self.tasks[text]}({', '.join(task.arguments.values())});"

    def of(self, graph: Graph, name: str) -> list[_Step]:
        """The kernels that compute a graph, in order: one if the core has one for all of it.

        They have this name if they are the first of their kind. Raises TargetError if the core has none for a part."""
        if id(graph) not in self.by_graph:
            try:
                self.by_graph[id(graph)] = [(graph, self._kernel(graph, name))]
            except DovetailError:  # the core has no kernel for all of it
                self.by_graph[id(graph)] = [
                    (step.graph, None if step.is_view else self._kernel(step.graph, f"{name}_{number}"))
                    for number, step in enumerate(_in_steps(graph, self.target))
                ]
        return self.by_graph[id(graph)]

    def _kernel(self, graph: Graph, name: str) -> CoreKernel:
        kernel = kernels.generate(graph, name, texts=self.texts)
        if kernel.key not in self.by_key:
            self.by_key[kernel.key] = kernel
            self.functions.append(kernel.source)
        self.helpers += kernel.helpers
        return replace(kernel, name=self.by_key[kernel.key].name)


def _in_steps(graph: Graph, target: Target) -> tuple[Region, ...]:
    """A graph as several things that core kernels compute, in turn; raises TargetError where the core has none for
    one."""
    try:
        return as_kernels(graph, target)
    except ModelError as error:
        what = f"what an engine takes cannot be computed on this computer: {error.what}"
        raise TargetError(what, where=graph.name, hint="give the offload a limit that keeps it out") from None


def _host_task(unit: Unit, launch: LaunchStatement, name: str, made: _Kernels, held: _Arrays) -> str:
    """The call of a function that gathers strided operands, computes, and scatters the result; `made` gains the
    functions that are new, `held` their constants."""
    steps, task = made.of(launch.graph, f"compute_{name}"), _HostTask()
    (graph, kernel), *others = steps
    if graph is launch.graph and kernel is not None and not others:
        _call_kernel(unit, launch, kernel, made.helpers, held, task)
    else:
        _call_several(unit, launch, steps, made.helpers, held, task)
    return made.call(f"run_{name}", task)


_ALIGNED = "__attribute__((aligned(16)))"


def _call_several(
    unit: Unit, launch: LaunchStatement, steps: Sequence[_Step], helpers: Lines, held: _Arrays, task: _HostTask
) -> None:
    """Operands gathered, one kernel after the other, each value dense in an array of its own, the result scattered."""
    graph, arrays = launch.graph, dict[str, str]()
    for number, value in enumerate(graph.inputs):
        view, arrays[value] = launch.operands[value], f"in_{number}"
        element = c_type(view.type.dtype)
        task.lines.append(f"static {element} in_{number}[{view.type.elements}] {_ALIGNED};")
        task.lines.append(_strided_loop(unit, view, f"in_{number}", element, False, helpers, task))
    for number, (part, kernel) in enumerate(steps):
        output = part.outputs[0]
        if kernel is None:
            arrays[output] = arrays[part.inputs[0]]
            continue
        kind, arrays[output] = graph.types[output], f"value_{number}"
        task.lines.append(f"static {c_type(kind.dtype)} value_{number}[{kind.elements}] {_ALIGNED};")
        arguments = []
        for parameter in kernel.parameters:
            arguments.append(arrays.get(parameter.value, ""))
            if parameter.is_constant:
                place = held.expression(launch, parameter.c_type, kernel.constants[parameter.value])
                arguments[-1] = task.taking(f"const {parameter.c_type} *", parameter.name, place)
        task.lines.append(f"{kernel.name}({', '.join(arguments)});")
    element = c_type(launch.result.type.dtype)
    task.lines.append(_strided_loop(unit, launch.result, arrays[graph.outputs[0]], element, True, helpers, task))


def _call_kernel(
    unit: Unit, launch: LaunchStatement, kernel: CoreKernel, helpers: Lines, held: _Arrays, task: _HostTask
) -> None:
    """Operands that are not dense gathered, the kernel, and its result scattered if that is not dense."""
    arguments: Lines = []
    after: Lines = []
    for parameter in kernel.parameters:
        if parameter.is_constant:
            place = held.expression(launch, parameter.c_type, kernel.constants[parameter.value])
            arguments.append(task.taking(f"const {parameter.c_type} *", parameter.name, place))
            continue
        is_result = parameter.value == launch.graph.outputs[0]
        view = launch.result if is_result else launch.operands[parameter.value]
        element = c_type(view.type.dtype)
        if view.is_dense and view.layout is None:
            const = "" if is_result else "const "
            place = f"({const}{element} *)({const}void *)({unit.first_byte(view)})"
            arguments.append(task.taking(f"{const}{element} *", parameter.name, place))
            continue
        stem = f"{parameter.name}_"
        task.lines.append(f"static {element} {stem}[{view.type.elements}] {_ALIGNED};")
        arguments.append(stem)
        loops = _strided_loop(unit, view, stem, element, is_result, helpers, task)
        (after if is_result else task.lines).append(loops)
    task.lines += [f"{kernel.name}({', '.join(arguments)});", *after]


def _strided_loop(
    unit: Unit, view: View, stem: str, c_type: str, scatter: bool, helpers: Lines, task: _HostTask
) -> str:
    """Loops that gather a view into an array, or scatter the array."""
    indices = [f"i{axis}" for axis in range(len(view.type.shape))]
    sizes = list(zip(indices, view.type.shape, strict=True))
    loops = "".join(f"for (int32_t {index} = 0; {index} < {size}; {index}++) " for index, size in sizes)
    kind, offset = view.type.dtype, " + ".join(_steps(view, indices))
    dense = "0"
    for index, size in sizes:
        dense = f"({dense}) * {size} + {index}"
    const = "" if scatter else "const "
    start = task.taking(f"{const}uint8_t *", "to" if scatter else "from", unit.first_byte(view))
    strided = f"*({const}{c_type} *)({const}void *)({start} + {offset})"
    if view.layout is not None and view.layout.packed:
        helpers.append(name := f"{'put' if scatter else 'packed' if kind.signed else 'unsigned'}_{kind.bits}")
        field = field_text(view.layout, indices)
        call = f"{name}({start} + {offset}, {field}"
        body = f"{call}, {stem}[{dense}]);" if scatter else f"{stem}[{dense}] = ({c_type}){call});"
        return f"{loops}{{ {body} }}"
    body = f"{strided} = {stem}[{dense}];" if scatter else f"{stem}[{dense}] = {strided};"
    return f"{loops}{{ {body} }}"


def _steps(view: View, indices: Lines) -> Lines:
    """C terms of an element's offset, one per physical dimension but one within a byte."""
    if view.layout is None:
        return [f"{index} * {stride}" for index, stride in zip(indices, view.strides, strict=True)]
    dims = zip(view.layout.stored, view.strides, strict=True)
    return [f"({index_text(view.layout, dimension, indices)}) * {stride}" for dimension, stride in dims]


def main_source(unit: Unit) -> str:
    """A program that reads the inputs from files and writes the outputs to files."""

    def port(name: str, view: View) -> str:
        """The initialiser of a port."""
        text = one_line(name).replace("\\", "\\\\").replace('"', '\\"')
        return f'        {{"{text}", {unit.first_byte(view)}, {view.span[1] - view.span[0]}}},'

    program = unit.program
    ports = [f"   {one_line(name)}: {view.type}" for name, view in (*program.inputs.items(), *program.outputs.items())]
    text = (
        runtime_path("main.c.txt")
        .read_text("utf-8")
        .replace("@MODEL@", unit.model)
        .replace("@PORTS@", "\n".join(ports))
    )
    inputs, outputs = ([port(*item) for item in ends.items()] for ends in (program.inputs, program.outputs))
    return text.replace("@INPUTS@", "\n".join(inputs)).replace("@OUTPUTS@", "\n".join(outputs))


def host_makefile(unit: Unit, sources: tuple[str, ...], optimisation: str) -> str:
    """Builds the program with this computer's compiler."""
    engines = unit.target.engines
    defines = " ".join(f"-D{name}={value}" for engine in engines for name, value in engine.defines.items())
    libraries = " ".join(dict.fromkeys(flag for engine in engines for flag in engine.libraries))
    return f"""# Builds {unit.model} for this computer. CC is any C99 compiler.
CC = cc
CFLAGS = -std=c99 {optimisation} {" ".join(EMITTED_C)}
DEFINES = -DDOVETAIL_HOST {defines}
LIBRARIES = {libraries}
SOURCES = {" ".join(sources)}

{unit.model}: $(SOURCES)
\t$(CC) $(CFLAGS) $(DEFINES) -Isrc -Iruntime -Idriver $(SOURCES) $(LIBRARIES) -o $@

clean:
\trm -f {unit.model}
.PHONY: clean
"""
