"""Kernels for little code: which layers of a network share a function, and the blocks that tell the layers apart."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from dovetail.graph.graph import Graph
from dovetail.graph.types import DType
from dovetail.kernels.compact import (
    BLOCK,
    write_compact_convolution,
    write_compact_dense,
    write_compact_depthwise,
    write_compact_pool,
)
from dovetail.kernels.core import Writer, generate
from dovetail.kernels.helpers import SMALL, needed_helpers
from dovetail.kernels.kernel import CoreKernel, Unsupported
from dovetail.kernels.region import Region, split
from dovetail.kernels.scope import Scope
from dovetail.kernels.text import block
from dovetail.operators.base import Operator
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.operators.pooling import AveragePool2d, MaxPool2d, SumPool2d

FAMILIES: Mapping[type[Operator], Callable[[Region, Scope], Writer]] = {
    Conv2d: write_compact_convolution,
    DepthwiseConv2d: write_compact_depthwise,
    FullyConnected: write_compact_dense,
    MaxPool2d: write_compact_pool,
    AveragePool2d: write_compact_pool,
    SumPool2d: write_compact_pool,
}
"""What writes the compact kernel of an anchor; all others are written as ever and left to the compiler to make small."""

def generate_compact(graphs: Sequence[Graph], names: Sequence[str], accumulators: int = 16) -> list[CoreKernel]:
    """The kernels of several layers in little code. Those that differ only in numbers and constants get one function:
    what is the same in all of them stands in its text, the rest in a block for each layer (`CoreKernel.block`).

    Args:
        graphs: a region each, as `generate` takes them.
        names: of the C functions; layers that share one take the first's.
        accumulators: as `generate`.

    Raises:
        DovetailError: no core kernel computes a region.
    """
    drafts = [_compact(graph, name, accumulators, None) for graph, name in zip(graphs, names, strict=True)]
    shared: dict[str, list[int]] = {}
    for index, draft in enumerate(drafts):
        shared.setdefault(draft.key, []).append(index)
    found = list(drafts)
    for members in shared.values():
        first = drafts[members[0]]
        fixed = {
            stem: value
            for stem, value in first.numbers.items()
            if all(drafts[index].numbers.get(stem) == value for index in members)
        }
        for index in members:
            found[index] = _compact(graphs[index], names[members[0]], accumulators, fixed)
    return found


def _compact(graph: Graph, name: str, accumulators: int, fixed: Mapping[str, int] | None) -> CoreKernel:
    """A region's compact kernel; `fixed` are the numbers that stand in its text, None for a draft without any."""
    anchor = split(graph).anchor if not _refused(graph) else None
    if anchor is not None and type(anchor.operator) in FAMILIES:
        scope = Scope(graph, accumulators, compact=True, fixed=fixed or {})
        try:
            kernel = _written(name, scope, FAMILIES[type(anchor.operator)](split(graph), scope))
            return kernel if fixed is None else replace(kernel, numbers=_members(kernel))
        except Unsupported:
            pass
    kernel = generate(graph, name, accumulators)
    return replace(kernel, source=_small(kernel.source), key=_small(kernel.key), declarations=(SMALL,))


def _refused(graph: Graph) -> bool:
    """True for what has no compact form: regions that are not of a core kernel's shape, and floats."""
    try:
        anchor = split(graph).anchor
    except Unsupported:
        return True
    return anchor is None or graph.types[anchor.inputs[0]].dtype is DType.FLOAT32


def _written(name: str, scope: Scope, writer: Writer) -> CoreKernel:
    source, key = (_small("\n".join(writer(text)) + "\n") for text in (name, "kernel"))
    kind = f"struct {name}_{BLOCK}" if f"{BLOCK}->" in source else ""
    return CoreKernel(
        name, source, scope.parameters(), scope.constants.arrays, needed_helpers(source), key=key,
        declarations=(SMALL,), numbers=scope.numbers, block=kind,
    )  # fmt: skip


def _members(kernel: CoreKernel) -> dict[str, int]:
    """The numbers the text reads from the block."""
    read = set(re.findall(rf"\b{BLOCK}->(\w+)", kernel.source))
    return {stem: value for stem, value in kernel.numbers.items() if stem in read}


def _small(source: str) -> str:
    return re.sub(r"^static void ", "SMALL static void ", source, flags=re.MULTILINE)


def block_type(kernel: CoreKernel) -> str:
    """The C definition of a compact kernel's block."""
    constants = [f"const {parameter.c_type} *{parameter.name};" for parameter in kernel.parameters if parameter.is_constant]
    return "\n".join(block(kernel.block, [*constants, *(f"int32_t {name};" for name in kernel.numbers)])) + ";\n"


def block_members(kernel: CoreKernel, constants: Mapping[str, str]) -> list[str]:
    """The initialisers of a layer's block.

    Args:
        kernel: the layer's kernel.
        constants: C text of each constant's first element.
    """
    pointers = [f".{p.name} = {constants[p.value]}" for p in kernel.parameters if p.is_constant]
    return [*pointers, *(f".{name} = {value}" for name, value in kernel.numbers.items())]
