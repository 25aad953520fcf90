"""Which kernel each call of a program runs: what is written for speed, what for little code, and what is shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from dovetail import kernels
from dovetail.build.instruction_sets import instruction_set
from dovetail.emit.c_text import identifier
from dovetail.graph.graph import Graph
from dovetail.graph.layout import physical_shape
from dovetail.graph.types import Array, TensorType
from dovetail.kernels import CoreKernel, CoreTraits, Optimize, Parameter
from dovetail.kernels.kernel import declarations
from dovetail.program.in_place import overwritten
from dovetail.program.ir import Call, Program
from dovetail.target.description import Core, Target

KernelCalls = Mapping[int, tuple[CoreKernel, Mapping[str, str]]]
"""Statement index -> the kernel it calls and the C name of each of the kernel's constants, and of its block."""
Blocks = Mapping[str, tuple[str, tuple[str, ...]]]
"""C name -> C type and initialisers of each block of a compact kernel."""

_LITTLE = 1 / 512
"""The layers with the least work get little code as long as together they have no more than this share of it."""


@dataclass
class _Names:
    """C names of constants and blocks, equal contents under one name."""

    constants: dict[str, tuple[str, Array]]
    blocks: dict[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    known: dict[tuple[str, bytes], str] = field(default_factory=dict)

    def constant(self, c_type: str, array: Array, stem: str) -> str:
        """The name of a constant, `stem` if it is new."""
        key = (c_type, array.tobytes())
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
            equal = [name for name, other in self.blocks.items() if other == content]
            names[kernels.BLOCK] = equal[0] if equal else f"{stem}_{kernels.BLOCK}"
            self.blocks[names[kernels.BLOCK]] = content
        return names

    def _of(self, parameters: Sequence[Parameter], constants: Mapping[str, Array], stem: str) -> dict[str, str]:
        return {
            p.value: self.constant(p.c_type, constants[p.value], f"{stem}_{identifier(p.name)}")
            for p in parameters
            if p.is_constant and p.value != kernels.BLOCK
        }


def kernel_calls(
    program: Program, target: Target, model: str, optimize: Optimize, constants: dict[str, tuple[str, Array]]
) -> tuple[KernelCalls, tuple[CoreKernel, ...], Blocks]:
    """The kernel of every call, the functions there are, and the blocks of those that layers share.

    Args:
        program: the network.
        target: its core's registers and instructions shape the kernels.
        model: prefix of all names.
        optimize: what the kernels are made for.
        constants: gains those of the kernels.
    """
    core = core_traits(target.core)
    calls = {index: call for index, call in enumerate(program.statements) if isinstance(call, Call)}
    graphs = [as_it_lies(call) for call in calls.values()]
    stems = _numbered([f"{model}_{program.layers[call.layer]}" for call in calls.values()])
    little = range(len(graphs)) if optimize is Optimize.SIZE else _with_little_work(graphs)
    functions = [f"{stem}_kernel" for stem in stems]
    over = {place: overwritten(call, program.buffers) for place, call in enumerate(calls.values())}
    made = kernels.generate_all(
        graphs,
        functions,
        little,
        core,
        {place: value for place, value in over.items() if value is not None},
        _common_lanes(graphs, list(calls.values()), core),
    )
    found: dict[int, tuple[CoreKernel, Mapping[str, str]]] = {}
    shared: dict[str, CoreKernel] = {}
    names = _Names(constants)
    for index, stem, kernel in zip(calls, stems, made, strict=True):
        own = f"\ncore {calls[index].core}" if kernel.has_storage else ""
        known = replace(kernel, name=shared.setdefault(_text(kernel) + own, kernel).name)
        found[index] = (known, names.of_kernel(known, stem))
    return found, tuple(shared.values()), names.blocks


def core_traits(core: Core) -> CoreTraits:
    """What a core offers its kernels; three quarters of its stack are for elements side by side."""
    return CoreTraits(instruction_set(core.isa).accumulators, core.instructions, core.stack * 3 // 4)


def _common_lanes(graphs: Sequence[Graph], calls: Sequence[Call], core: CoreTraits) -> dict[int, int]:
    """Index of a call -> the order in which it must read its weights: calls of the same weights, as stripes of a layer
    are, share them as the largest of these calls wants them."""
    groups: dict[bytes, list[int]] = {}
    for index, graph in enumerate(graphs):
        if graph.constants:
            largest = max(graph.constants.values(), key=lambda array: array.nbytes)
            groups.setdefault(largest.tobytes(), []).append(index)
    found: dict[int, int] = {}
    for same in (group for group in groups.values() if len(group) > 1):
        index = max(same, key=lambda index: calls[index].result.type.elements)
        kernel = kernels.generate(graphs[index], "kernel", core)
        if kernel.lanes is not None:
            found.update(dict.fromkeys(same, kernel.lanes))
    return found


def _numbered(stems: Sequence[str]) -> list[str]:
    """The stems, a number behind those that came before."""
    counts = [stems[:index].count(stem) for index, stem in enumerate(stems)]
    return [f"{stem}_{count + 1}" if count else stem for stem, count in zip(stems, counts, strict=True)]


def _text(kernel: CoreKernel) -> str:
    """What two kernels have in common if they are one function."""
    return f"{kernel.block.c_type if kernel.block else ''}\n{kernel.key}"


def _with_little_work(graphs: Sequence[Graph]) -> list[int]:
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
    """Multiply-accumulates, or what takes about as long: operators that have none count 4 for each element."""
    found = 0
    for node in graph.nodes:
        types = [graph.types[name] for name in node.inputs]
        elements = max(prod(graph.types[name].shape) for name in (node.output, *node.inputs[:1]))
        found += node.operator.macs(types) or 4 * elements
    return found


def prototype(kernel: CoreKernel) -> str:
    """The C declaration of a kernel's function."""
    return f"void {kernel.name}({', '.join(declarations(kernel.parameters))});"


def as_it_lies(call: Call) -> Graph:
    """The computation of a call over the physical dimensions of its values, in which they are row-major."""
    layout, graph, shape = call.result.layout, call.graph, call.result.type.shape
    if layout is None:
        return graph
    physical = physical_shape(layout, shape)
    types = {
        name: TensorType(physical, kind.dtype) if kind.shape == shape and name not in graph.constants else kind
        for name, kind in graph.types.items()
    }
    return replace(graph, types=types)
