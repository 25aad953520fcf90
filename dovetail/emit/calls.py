"""Which kernel each call of a program runs: what is written for speed, what for little code, and what is shared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

from dovetail import kernels
from dovetail.build.instruction_sets import instruction_set
from dovetail.emit.c_text import identifier
from dovetail.graph.graph import Graph
from dovetail.graph.layout import physical_shape
from dovetail.graph.types import Array, TensorType
from dovetail.kernels import CoreKernel, Optimize
from dovetail.kernels.kernel import declarations
from dovetail.program.ir import Call, Program
from dovetail.target.description import Target

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
        names = {
            parameter.value: self.constant(
                parameter.c_type, kernel.constants[parameter.value], f"{stem}_{identifier(parameter.name)}"
            )
            for parameter in kernel.parameters
            if parameter.is_constant
        }
        if kernel.block:
            content = (kernel.block, tuple(kernels.block_members(kernel, names)))
            equal = [name for name, other in self.blocks.items() if other == content]
            names[kernels.BLOCK] = equal[0] if equal else f"{stem}_{kernels.BLOCK}"
            self.blocks[names[kernels.BLOCK]] = content
        return names


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
    accumulators = instruction_set(target.core.isa).accumulators
    calls = {index: call for index, call in enumerate(program.statements) if isinstance(call, Call)}
    graphs = {index: as_it_lies(call) for index, call in calls.items()}
    stems = {index: f"{model}_{program.layers[call.layer]}" for index, call in calls.items()}
    little = list(graphs) if optimize is Optimize.SIZE else _with_little_work(graphs)
    compact = kernels.generate_compact(
        [graphs[index] for index in little], [f"{stems[index]}_kernel" for index in little], accumulators
    )
    made = dict(zip(little, compact, strict=True))
    found: dict[int, tuple[CoreKernel, Mapping[str, str]]] = {}
    shared: dict[str, CoreKernel] = {}
    names = _Names(constants)
    for index in calls:
        kernel = made.get(index) or kernels.generate(
            graphs[index], f"{stems[index]}_kernel", accumulators, target.core.instructions
        )
        kernel = replace(kernel, name=shared.setdefault(kernel.key, kernel).name)
        found[index] = (kernel, names.of_kernel(kernel, stems[index]))
    return found, tuple(shared.values()), names.blocks


def _with_little_work(graphs: Mapping[int, Graph]) -> list[int]:
    """The calls whose work is next to nothing of the network's, in order."""
    work = {index: _work(graph) for index, graph in graphs.items()}
    room = sum(work.values()) * _LITTLE
    found = []
    for index in sorted(work, key=lambda index: (work[index], index)):
        room -= work[index]
        if room < 0:
            break
        found.append(index)
    return sorted(found)


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
    arguments = declarations([parameter for parameter in kernel.parameters if not (kernel.block and parameter.is_constant)])
    if kernel.block:
        arguments.append(f"const {kernel.block} *restrict {kernels.BLOCK}")
    return f"void {kernel.name}({', '.join(arguments)});"


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
