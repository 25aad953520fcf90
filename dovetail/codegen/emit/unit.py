"""Parts of the emitted text: kernels of the calls, commands of the launches, constants, names and places."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod

import numpy as np
from msgspec import Struct

from dovetail import kernels
from dovetail.codegen.emit.firmware import model_name
from dovetail.codegen.emit.lists import CommandList, command_list
from dovetail.codegen.emit.pieces import PIECE_WORDS, ListItem, pieced
from dovetail.codegen.emit.weights import Weights, as_bytes
from dovetail.errors import ProgramError
from dovetail.ir.boundary import Steps
from dovetail.ir.graph import Graph
from dovetail.ir.layout import Layout, physical_shape
from dovetail.ir.operators.activation import FixedSoftmax
from dovetail.ir.operators.arithmetic import Rounding
from dovetail.ir.operators.fixed import FixedLogSoftmax, FixedSoftmax16
from dovetail.ir.operators.movement import Relayout
from dovetail.ir.types import Array, TensorType
from dovetail.kernels import CoreKernel, Optimize, Parameter, core_traits
from dovetail.kernels.c import Lines, identifier
from dovetail.kernels.scheduled.knobs import same_kind
from dovetail.kernels.scheduled.store import NOT_SHIPPED
from dovetail.kernels.scope import KernelScope
from dovetail.notes import Kind, Note
from dovetail.program.ir import (
    CORE,
    Call,
    Copy,
    LaunchStatement,
    Program,
    Role,
    View,
    lists,
    overwritten,
    queue_of,
    side_by_side,
)
from dovetail.program.loops import digest
from dovetail.program.series import ByteAddress
from dovetail.records import Record, field
from dovetail.schedule.region import LaidRegion
from dovetail.schedule.weights import narrow_weights_note
from dovetail.target.description import Target
from dovetail.target.engine import Launched
from dovetail.target.offload import Command, LibraryCall, Offload, Operand
from dovetail.user_file import asking

KernelCalls = Mapping[int, tuple[CoreKernel, Mapping[str, str]]]
"""Statement index -> the kernel it calls and the C name of each of the kernel's constants, and of its block."""
Blocks = Mapping[str, tuple[str, tuple[str, ...]]]
"""C name -> C type and initialisers of each block of a compact kernel."""


_PERIOD = 16
"""Bytes of a state's first contents that are looked for again and again."""


_MANY = 512
"""Bytes of a state whose first contents are worth words."""


def state_bytes(first: Array) -> Array:
    """The first contents of a state, uint8: one byte or 16, if those repeated make all of them; of many bytes 16, which
    are written as words."""
    content = first.reshape(-1).view(np.uint8)
    periods = (_PERIOD, 1) if content.size >= _MANY else (1, _PERIOD)
    sizes = [size for size in periods if content.size % size == 0]
    return next((content[:size] for size in sizes if (content.reshape(-1, size) == content[:size]).all()), content)


CODE_RESERVE = 24 * 1024
"""Bytes kept free for code beside the constants when memory is planned; the linker has the last word."""
_LITTLE = 1 / 512
"""The layers with the least work get little code as long as together they have no more than this share of it."""
_EXPONENTIALS = (FixedSoftmax, FixedSoftmax16, FixedLogSoftmax)


class StackNeed(Record):
    """Stack of a program whose `main` does nothing but compute inferences, interrupts apart."""

    nbytes: int | None
    """At most; None where there is no bound."""
    compiler: str = ""
    """The compiler whose frame sizes these are: others differ."""
    why: str = ""
    """Why there is no bound."""
    flash: int = 0
    """Bytes of code and constants, as the same compiler makes them; 0 where there is none."""


class Unit(Record, dict=True):
    """Everything the emitted text is made from."""

    program: Program
    regions: Sequence[LaidRegion]
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
    lists: tuple[CommandList, ...] = ()
    """The lists of engines that take such, in order."""
    optimize: Optimize = Optimize.SPEED
    """Goal of the core's code: speed or size."""
    delay: int = 0
    """Calls between an input and its outputs, in a pipeline."""
    rounding: Rounding | None = None
    """That of the model's requantisations; None where it is not known."""
    steps: Mapping[str, Steps] = field(default_factory=dict)
    """Real values of the integers of inputs and outputs, by name, if known."""
    shared_arena: str | None = None
    """C name of the user's array for the values; None where the build has one of its own."""
    stack: StackNeed | None = None
    """Stack an inference needs; None if it was not measured."""
    weights: Weights = Weights.TEXT
    """How constants are written."""
    base: Unit | None = None
    """The network of one step whose arenas, states and constants this network of several steps has; None without."""
    known: Mapping[str, str] = field(default_factory=dict)
    """C names of constants of the program that `base` has, by buffer."""
    room: Mapping[str, int] = field(default_factory=dict)
    """Bytes that the network of several steps needs of each memory; empty where there is none."""

    @cached_property
    def as_bytes(self) -> frozenset[str]:
        """The constants that are written as bytes, by C name."""
        return as_bytes({**self.constants, **self.fixed_array()}, self.weights)

    def fixed_array(self) -> dict[str, tuple[str, Array]]:
        """The array of what lists read, as one of `constants`; none where there is none."""
        content = self.fixed_constants[1]
        return {f"{self.model}_fixed_constants": ("uint8_t", content)} if content.size else {}

    @property
    def notes(self) -> tuple[Note, ...]:
        """Layers whose weights stay bytes for want of room. For each instruction of the core that no kernel uses, where
        it came nearest and what was in its way.

        Nothing is said of those on whose operands others do the same, if one of them is used.
        """
        narrow = narrow_weights_note(self.regions, self.target)
        found = [Note(Kind.SLOWER, narrow)] if narrow else []
        used = {name for kernel, _ in self.calls.values() for name in kernel.instructions}
        for instruction in self.target.core.instructions:
            if self.optimize is Optimize.SIZE:
                found.append(Note(Kind.NOT_USED, f"{instruction.name} is not used in code made for size"))
                continue
            if any(other.name in used for other in same_kind(instruction, self.target.core.instructions)):
                continue
            sentences = [sentence for kernel, _ in self.calls.values() for sentence in kernel.notes]
            own = [one for one in sentences if instruction.name in one.partition(":")[0].split(", ")]
            nearest = own[0] if own else f"{instruction.name}: no layer has such loops"
            found.append(Note(Kind.NOT_USED, f"no layer uses an instruction of the core; {nearest}"))
        for engine in dict.fromkeys(one.engine for one in self.lists if one.name in self.pieced):
            saved = 4 * sum(len(one.words) for one in self.lists if one.name in self.pieced and one.engine == engine)
            what = f"the commands of {engine} are made by loops of the firmware in {8 * PIECE_WORDS:,} bytes of"
            instead = f"as tables they would take {saved:,} bytes of {self.target.code}"
            found.append(Note(Kind.SLOWER, f"{what} {self.target.values} beside the plan; {instead}"))
        missing = sum(NOT_SHIPPED in kernel.notes for kernel, _ in self.calls.values())
        if missing:
            what = f"layers computed without the core's own instructions: {missing}; {NOT_SHIPPED}"
            found.append(Note(Kind.SLOWER, what))
        return tuple(found)

    def arenas(self) -> dict[str, int]:
        """Bytes the program's buffers reach up to, of each memory the core reaches."""
        return {name: size for name, size in self._extents().items() if self._is_shared(name)}

    def private_arenas(self) -> dict[str, int]:
        """The same of those it does not reach."""
        return {name: size for name, size in self._extents().items() if not self._is_shared(name)}

    def _is_shared(self, memory: str) -> bool:
        return self.target.memory(memory).is_reached_by(CORE)

    @property
    def steps_at_once(self) -> int:
        """Steps in a call, each with a row of the first input; 1 for most networks."""
        return next(iter(self.program.inputs.values())).type.shape[0] if self.base is not None else 1

    @property
    def has_states(self) -> str:
        """C name of the flag that says whether states were set."""
        return self.base.has_states if self.base else f"{self.model}_has_states" if self.room else "has_states"

    def _extents(self) -> dict[str, int]:
        own, room = self.own_extents(), self.base.arenas() if self.base else self.room
        return {name: max(own.get(name, 0), room.get(name, 0)) for name in {**own, **room}}

    def own_extents(self) -> dict[str, int]:
        """Bytes the program's buffers reach up to, of each memory."""
        sizes: dict[str, int] = {}
        for buffer in self.program.buffers.values():
            if buffer.address is not None and buffer.role is not Role.CONSTANT:
                end = buffer.address - self.target.memory(buffer.memory).base + buffer.nbytes
                sizes[buffer.memory] = max(sizes.get(buffer.memory, 0), end)
        return sizes

    def arena_name(self, memory: str) -> str:
        """C name of the array that holds a memory's buffers."""
        if self.base is not None:
            return self.base.arena_name(memory)
        if self.shared_arena is not None and memory == self.target.values:
            return self.shared_arena
        return f"{self.model}_{identifier(memory)}"

    def is_fixed(self, memory: str) -> bool:
        """True when a memory's buffers must lie at the very addresses planned: engines are told them as numbers."""
        if memory != self.target.values:
            return True
        return any(e.device and (e.memory == memory or e.stream is not None) for e in self.target.engines)

    @property
    def core_copies(self) -> bool:
        """True when the core copies, for want of a DMA."""
        copies = (s for s in self.program.statements if isinstance(s, Copy))
        return any(queue_of(copy, self.program.dma) == CORE for copy in copies)

    @cached_property
    def beside(self) -> dict[str, tuple[str, ...]]:
        """The names of the layers each layer is computed side by side with."""
        found: dict[str, tuple[str, ...]] = {}
        for indices in set(side_by_side(self.program.statements).values()):
            names = [self.program.layers[self.program.statements[index].layer] for index in indices]
            found |= {name: tuple(other for other in names if other != name) for name in names}
        return found

    @cached_property
    def starts(self) -> dict[int, int]:
        """Statement of a list -> the one whose ticket stands for it: the first."""
        return {index: one.statements[0] for one in self.lists for index in one.statements}

    @cached_property
    def tasks(self) -> dict[str, ByteAddress]:
        """C name of a command that is started by itself -> where its words are: those of a layer lie side by side."""
        found: dict[str, ByteAddress] = {}
        ends: dict[str, int] = {}
        for array, name, words in self._words():
            found[name] = ByteAddress(array, ends.get(array, 0))
            ends[array] = found[name].offset + len(words)
        return found

    @cached_property
    def task_words(self) -> dict[str, list[int]]:
        """C name of an array of tasks -> its words."""
        found: dict[str, list[int]] = {}
        for array, _, words in self._words():
            found.setdefault(array, []).extend(words)
        return found

    def _words(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Array, name and words of each command that is started by itself."""
        listed = {index for one in self.lists for index in one.statements}
        for index, commands in self.commands.items():
            for name, command in commands if index not in listed else ():
                if isinstance(command, Command):
                    layer = self.program.layers[self.program.statements[index].layer]
                    alone = name == f"{self.model}_{layer}_task"
                    yield name if alone else f"{self.model}_{layer}_tasks", name, command.words

    @cached_property
    def pieced(self) -> Mapping[str, tuple[ListItem, ...]]:
        """The lists that the firmware makes as it goes, by name."""
        nbytes = sum(array.nbytes for array in self.program.constants.values())
        return pieced(self.target, self.lists, self.arenas().get(self.target.values, 0), nbytes)

    @cached_property
    def started(self) -> dict[int, CommandList]:
        """The list that is started at a statement, by its index."""
        return {one.statements[0]: one for one in self.lists}

    @cached_property
    def fixed_constants(self) -> tuple[int, Array]:
        """The constants lists read, as one array: its address, and its bytes (none where there are no such)."""
        mine = {n: b for n, b in self.program.buffers.items() if b.role is Role.CONSTANT and b.address is not None}
        if not mine:
            return 0, np.zeros(0, np.uint8)
        base = min(buffer.address or 0 for buffer in mine.values())
        held = np.zeros(max((buffer.address or 0) + buffer.nbytes for buffer in mine.values()) - base, np.uint8)
        for name, buffer in mine.items():
            start = (buffer.address or 0) - base
            held[start : start + buffer.nbytes] = self.program.constants[name]
        return base, held

    def first_byte(self, view: View) -> str:
        """C expression of where a view begins: an array and an offset."""
        place = self.place(view)
        return f"{place.base} + {place.offset}" if place.offset else place.base

    def place(self, view: View) -> ByteAddress:
        """First element of a view, in an array of C."""
        buffer, offset = self.program.buffers[view.buffer], view.offset
        if buffer.role is Role.CONSTANT and buffer.address is not None:
            base, offset = f"{self.model}_fixed_constants", offset + buffer.address - self.fixed_constants[0]
        elif buffer.role is Role.CONSTANT:
            base = self.known.get(buffer.name, f"{self.model}_{buffer.name}")
        else:
            assert buffer.address is not None
            base = self.arena_name(buffer.memory)
            offset += buffer.address - self.target.memory(buffer.memory).base
        return ByteAddress(base, offset)

    @property
    def known_constants(self) -> dict[tuple[str, bytes], str]:
        """C type and digest of each constant -> its name."""
        return {(kind, digest(array)): name for name, (kind, array) in self.constants.items()}

    def driver_headers(self) -> Lines:
        """The headers of the engines' drivers, by bare name."""
        files = [resource.rpartition(":")[2] for engine in self.target.engines for resource in engine.driver]
        names = [file.rpartition("/")[2] for file in files]
        headers = [header for engine in self.target.engines for header in engine.headers]
        return [*(name for name in names if name.endswith(".h")), *headers]


def make_unit(
    program: Program,
    regions: Sequence[LaidRegion],
    target: Target,
    optimize: Optimize = Optimize.SPEED,
    delay: int = 0,
    base: Unit | None = None,
) -> Unit:
    """Choose kernels, constants and names for a program; `base` is the network of one step, for one of several."""
    model = model_name(program.name, target.engines)
    by_linker = [name for name in sorted(program.constants) if program.buffers[name].address is None]
    there = base.known_constants if base else {}
    same = {name: there.get(("uint8_t", digest(program.constants[name]))) for name in by_linker if there}
    aligned = {f"{base.model}_{name}" for name in read_in_place(base.program)} if base else set[str]()
    in_place = read_in_place(program)
    known = {name: one for name, one in same.items() if one is not None and (one in aligned or name not in in_place)}
    constants = {f"{model}_{name}": ("uint8_t", program.constants[name]) for name in by_linker if name not in known}
    for index, kept in enumerate(program.states if base is None else ()):
        if (content := state_bytes(kept.first)).size > 1:
            constants[f"{model}_state_{index}_first"] = ("uint8_t", content)
    calls, functions, blocks = kernel_calls(program, regions, target, model, optimize, constants, base)
    launches = [(index, one) for index, one in enumerate(program.statements) if isinstance(one, LaunchStatement)]
    joint = _joint_commands(program, target, regions)
    stems = _stems(program, model, launches)
    commands = {
        index: _commands(program, target, regions, stems[index], launch, joint.get(index)) for index, launch in launches
    }
    made = tuple(
        command_list(program, target, commands, f"{model}_list_{number}", indices)
        for number, indices in enumerate(lists(program.statements))
    )
    parts = (calls, functions, constants, blocks, commands, made)
    return Unit(program, regions, target, model, *parts, optimize, delay, base=base, known=known)


def offload_of(region: LaidRegion, launch: LaunchStatement) -> Offload:
    """The commands that a launch of a region gives its engine."""
    offload = next(share.offload for share in region.shares if share.engine.name == launch.engine)
    assert offload is not None
    return offload


def _joint_commands(program: Program, target: Target, regions: Sequence[LaidRegion]) -> dict[int, tuple[Command, ...]]:
    """The commands of launches that begin together, by the index of each."""
    found: dict[int, tuple[Command, ...]] = {}
    for together in dict.fromkeys(side_by_side(program.statements).values()):
        launches = [one for index in together if isinstance(one := program.statements[index], LaunchStatement)]
        engine, own = target.engine(launches[0].engine), [regions[launch.layer] for launch in launches]
        assert engine.joint is not None
        asked = [
            (Launched(offload_of(region, launch).name, launch.match), addressed_operands(program, launch))
            for region, launch in zip(own, launches, strict=True)
        ]
        with asking(f"the commands of {engine.name} for {', '.join(region.name for region in own)} side by side"):
            found |= dict(zip(together, map(tuple, engine.joint.commands(asked)), strict=True))
    return found


def _stems(program: Program, model: str, launches: Sequence[tuple[int, LaunchStatement]]) -> dict[int, str]:
    """How the names of each launch's commands begin, by its index: with a number where its layer has several."""
    several, numbers = Counter(launch.layer for _, launch in launches), Counter[int]()
    found = {}
    for index, launch in launches:
        number = f"_{numbers[launch.layer]}" if several[launch.layer] > 1 else ""
        found[index] = f"{model}_{program.layers[launch.layer]}_task{number}"
        numbers[launch.layer] += 1
    return found


def _commands(
    program: Program,
    target: Target,
    regions: Sequence[LaidRegion],
    stem: str,
    launch: LaunchStatement,
    joint: tuple[Command, ...] | None,
) -> tuple[tuple[str, Command | LibraryCall], ...]:
    region = regions[launch.layer]
    offload = offload_of(region, launch)
    views = [launch.result, *(launch.operands[name] for name in launch.graph.inputs)]
    if not offload.strided and not all(view.is_dense for view in views):
        hint = "declare the Offload strided=True if the engine takes strides, else report this"
        raise ProgramError(f"operands of {region.name} do not lie densely", where=offload.name, hint=hint)
    made: Sequence[Command | LibraryCall] | None = joint
    if made is None:
        with asking(f"the commands of {offload.name} for {region.name}"):
            made = offload.commands(launch.match, addressed_operands(program, launch))
    if len(made) == 1:
        return ((stem, made[0]),)
    return tuple((f"{stem}_step_{step}", command) for step, command in enumerate(made))


def addressed_operands(program: Program, launch: LaunchStatement) -> dict[str, Operand]:
    """Addresses and strides of a launch's operands by value or constant name, the result as "result"; the address of
    constants that are read where they lie is their place in the launch's blob."""
    views = {**launch.operands, "result": launch.result}
    blob = min((launch.operands[name].offset for name in launch.packed), default=0)
    found = {}
    for name, view in views.items():
        address = program.buffers[view.buffer].address  # none where the linker places it
        found[name] = Operand(view.offset - blob if address is None else address + view.offset, view.strides)
    for name, one in launch.buffered.items():
        known = name if name in launch.packed else launch.match.values[name]
        found[known] = replace(found[known], buffer=one.place.start, is_loaded=one.is_loaded)
    return found


def read_in_place(program: Program) -> frozenset[str]:
    """The constants an engine reads where they lie."""
    launches = (s for s in program.statements if isinstance(s, LaunchStatement) and not s.stream)
    views = [view for launch in launches for view in launch.operands.values()]
    return frozenset(view.buffer for view in views if program.buffers[view.buffer].role is Role.CONSTANT)


class _ConstantNames(Struct):
    """C names of constants and blocks, equal contents under one name."""

    constants: dict[str, tuple[str, Array]]
    blocks: dict[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    known: dict[tuple[str, bytes], str] = field(default_factory=dict)
    known_blocks: dict[tuple[str, tuple[str, ...]], str] = field(default_factory=dict)

    def constant(self, c_type: str, array: Array, stem: str) -> str:
        """The name of a constant, `stem` if it is new."""
        key = (c_type, digest(array))
        if key not in self.known:
            self.known[key] = stem if stem not in self.constants else f"{stem}_{len(self.known)}"
            self.constants[self.known[key]] = (c_type, array)
        return self.known[key]

    def of_kernel(self, kernel: CoreKernel, stem: str) -> dict[str, str]:
        """The names of a kernel's constants and block; new ones begin with `stem`."""
        names = self._of(kernel.parameters, kernel.constants, stem)
        if kernel.block is not None:
            block = kernel.block
            content = (block.c_type, block.initialisers(self._of(block.members, block.constants, stem)))
            names[kernels.BLOCK] = self.known_blocks.setdefault(content, f"{stem}_{kernels.BLOCK}")
            self.blocks[names[kernels.BLOCK]] = content
        return names

    def _of(self, parameters: Sequence[Parameter], constants: Mapping[str, Array], stem: str) -> dict[str, str]:
        return {
            p.value: self.constant(p.c_type, constants[p.value], f"{stem}_{identifier(p.name)}")
            for p in parameters
            if p.is_constant and p.value != kernels.BLOCK
        }


def kernel_calls(
    program: Program,
    regions: Sequence[LaidRegion],
    target: Target,
    model: str,
    optimize: Optimize,
    constants: dict[str, tuple[str, Array]],
    base: Unit | None,
) -> tuple[KernelCalls, tuple[CoreKernel, ...], Blocks]:
    """The kernel of every call, the functions there are, and the blocks of those that layers share; all names begin
    with `model`, and `constants` gains those of the kernels that `base` has not."""
    core = core_traits(target.core)
    calls = {index: call for index, call in enumerate(program.statements) if isinstance(call, Call)}
    stems = _numbered([f"{model}_{program.layers[call.layer]}" for call in calls.values()])
    requests, texts = [], dict[Hashable, CoreKernel]()
    for call, stem in zip(calls.values(), stems, strict=True):
        region, over = regions[call.layer], overwritten(call, program.buffers)
        settings = {
            "overwritten": over,
            "layouts": _packings(call),
            "choice": region.choice if region.engine is None else {},
            "texts": texts,
        }
        requests.append(kernels.scope_of(as_it_lies(call), f"{stem}_kernel", core, **settings))
    little = range(len(requests)) if optimize is Optimize.SIZE else with_little_work([one.graph for one in requests])
    _share_lanes(requests, list(calls.values()), base)
    made = kernels.generate_all(requests, little)
    found: dict[int, tuple[CoreKernel, Mapping[str, str]]] = {}
    shared: dict[str, CoreKernel] = {}
    names = _ConstantNames(constants, known=base.known_constants if base else {})
    for index, stem, kernel in zip(calls, stems, made, strict=True):
        own = f"\ncore {calls[index].core}" if kernel.has_storage else ""
        text = f"{kernel.block.c_type if kernel.block else ''}\n{kernel.key}{own}"  # what one function has in common
        known = replace(kernel, name=shared.setdefault(text, kernel).name)
        found[index] = (known, names.of_kernel(known, stem))
    return found, tuple(shared.values()), names.blocks


def _share_lanes(requests: Sequence[KernelScope], calls: Sequence[Call], base: Unit | None) -> None:
    """Have calls of the same weights, as stripes of a layer are, read them in the order that the largest of these calls
    wants, or in that of the base."""
    groups: dict[bytes, list[int]] = {}
    for index, request in enumerate(requests):
        if request.graph.constants:
            groups.setdefault(_weights_of(request.graph), []).append(index)
    known = {index: base.program.statements[index] for index in base.calls} if base else {}
    graphs = {index: one.graph for index, one in known.items() if isinstance(one, Call) and one.graph.constants}
    given = {_weights_of(graph): base.calls[index][0].lanes for index, graph in graphs.items()} if base else {}
    for weights in [one for one in groups if one in given]:
        for index in groups.pop(weights):
            requests[index].lanes = given[weights]
    for same in (group for group in groups.values() if len(group) > 1):
        largest = max(same, key=lambda index: calls[index].result.type.elements)
        lanes = kernels.generated(replace(requests[largest], overwritten=None, layouts={}, texts=None)).lanes
        for index in same:
            requests[index].lanes = lanes


def _weights_of(graph: Graph) -> bytes:
    """Digest of the largest constant of a call."""
    return digest(max(graph.constants.values(), key=lambda array: array.nbytes))


def _numbered(stems: Sequence[str]) -> Lines:
    """The stems, a number behind those that came before."""
    counts, found = Counter[str](), Lines()
    for stem in stems:
        counts[stem] += 1
        found.append(f"{stem}_{counts[stem]}" if counts[stem] > 1 else stem)
    return found


def with_little_work(graphs: Sequence[Graph]) -> list[int]:
    """Indices of the layers whose work is next to nothing of the network's."""
    work = [_work(graph) for graph in graphs]
    room = sum(work) * _LITTLE
    found = []
    for index in sorted(range(len(work)), key=lambda index: (work[index], index)):
        room -= work[index]
        if room < 0:
            break
        found.append(index)
    return found


def _work(graph: Graph) -> int:
    """Multiply-accumulates, or what takes about as long: operators that have none count 4 for each element, those that
    look exponentials up and scale each by the sum 50."""
    found = 0
    for node in graph.nodes:
        types = [graph.types[name] for name in node.inputs]
        elements = max(prod(graph.types[name].shape) for name in (node.output, *node.inputs[:1]))
        each = 50 if isinstance(node.operator, _EXPONENTIALS) else 4
        found += node.operator.macs(types) or each * elements
    return found


def as_it_lies(call: Call) -> Graph:
    """The computation of a call over the physical dimensions of its values, in which they are row-major."""
    layout, graph, shape = call.result.layout, call.graph, call.result.type.shape
    layout = layout.order if layout is not None else None
    if layout is None or isinstance(graph.nodes[0].operator, Relayout):
        return graph
    physical = physical_shape(layout, shape)
    types = {
        name: TensorType(physical, kind.dtype) if kind.shape == shape and name not in graph.constants else kind
        for name, kind in graph.types.items()
    }
    return replace(graph, types=types)


def _packings(call: Call) -> dict[str, Layout]:
    """The layouts a call's kernel has to know: those of values whose elements share bytes, of a relayout all."""
    views = {**call.operands, call.graph.outputs[0]: call.result}
    converts = isinstance(call.graph.nodes[0].operator, Relayout)
    found = ((name, view.layout) for name, view in views.items())
    return {name: layout for name, layout in found if layout is not None and (converts or layout.packed)}
