"""Which layers of a network share functions, and the blocks that tell those which layer they compute."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from dovetail.graph.graph import Graph
from dovetail.graph.types import DType
from dovetail.kernels.compact import (
    write_border_of_convolution,
    write_border_of_depthwise,
    write_compact_convolution,
    write_compact_dense,
    write_compact_depthwise,
    write_compact_pool,
)
from dovetail.kernels.core import Writer, generate
from dovetail.kernels.helpers import SMALL, needed_helpers
from dovetail.kernels.kernel import BLOCK, Block, CoreKernel, Parameter, Unsupported
from dovetail.kernels.region import Region, split
from dovetail.kernels.scope import Border, CoreTraits, Scope
from dovetail.operators.base import Operator
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.operators.pooling import AveragePool2d, MaxPool2d, SumPool2d

Families = Mapping[type[Operator], Callable[[Region, Scope], Writer]]

COMPACT: Families = {
    Conv2d: write_compact_convolution,
    DepthwiseConv2d: write_compact_depthwise,
    FullyConnected: write_compact_dense,
    MaxPool2d: write_compact_pool,
    AveragePool2d: write_compact_pool,
    SumPool2d: write_compact_pool,
}
"""What writes an anchor's kernel in little code; others are written as ever and left to the compiler to make small."""
BORDERS: Families = {Conv2d: write_border_of_convolution, DepthwiseConv2d: write_border_of_depthwise}
"""What writes the function of single pixels for an anchor whose other pixels are computed together."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What `generate_all` is asked for."""

    graphs: Sequence[Graph]
    names: Sequence[str]
    core: CoreTraits
    overwritten: Mapping[int, str]
    lanes: Mapping[int, int]

    def scope(self, index: int) -> Scope:
        """A new scope for a layer."""
        return Scope(self.graphs[index], self.core.accumulators, self.overwritten.get(index), self.lanes.get(index))

    def kernel(self, index: int, border: Border | None) -> CoreKernel:
        """A layer's kernel, written for speed."""
        graph, name, over = self.graphs[index], self.names[index], self.overwritten.get(index)
        return generate(graph, name, self.core, border, over, self.lanes.get(index))


@dataclass(frozen=True, slots=True)
class _Shared:
    """A function of compact text, as one layer sees it."""

    name: str
    source: str
    key: str
    """The text without the name, and the types of the constants: layers of equal keys can share the function."""
    parameters: tuple[Parameter, ...]
    block: Block | None


def generate_all(
    graphs: Sequence[Graph],
    names: Sequence[str],
    little: Collection[int],
    core: CoreTraits = CoreTraits(),  # noqa: B008
    overwritten: Mapping[int, str] | None = None,
    lanes: Mapping[int, int] | None = None,
) -> list[CoreKernel]:
    """The kernels of all layers of a network.

    Layers whose compact functions differ only in numbers and constants share them: what is the same in all these
    layers stands in the text, the rest in a block for each (`CoreKernel.block`).

    Args:
        graphs: a region each, as `generate` takes them.
        names: of the C functions; layers that share one take the first's.
        little: indices of the layers that are to take little code, however long they run. The others share the
            functions of their borders.
        core: as `generate`; its own instructions are for those that are not `little`.
        overwritten: as `generate`, by index, of the layers whose result takes an operand's place.
        lanes: as `generate`, by index.

    Raises:
        DovetailError: no core kernel computes a region.
    """
    wanted = _Wanted(graphs, names, core, overwritten or {}, lanes or {})
    compact = _shared(wanted, little, COMPACT, "")
    borders = _shared(wanted, set(range(len(graphs))) - set(little), BORDERS, "_pixel")
    found = []
    for index, (graph, name) in enumerate(zip(graphs, names, strict=True)):
        if index in compact:
            found.append(_kernel(compact[index]))
        elif index in little:
            kernel = generate(graph, name, replace(core, instructions=()), overwritten=wanted.overwritten.get(index))
            source, key = (_small(text) for text in (kernel.source, kernel.key))
            found.append(replace(kernel, source=source, key=key, declarations=(SMALL,)))
        else:
            found.append(_with_border(wanted, index, borders.get(index)))
    return found


def _kernel(function: _Shared) -> CoreKernel:
    block = function.block
    parameters = (*function.parameters, *((block.parameter,) if block else ()))
    source, key, helpers = _small(function.source), _small(function.key), needed_helpers(function.source)
    return CoreKernel(function.name, source, parameters, {}, helpers, key=key, declarations=(SMALL,), block=block)


def _with_border(wanted: _Wanted, index: int, function: _Shared | None) -> CoreKernel:
    """A layer's kernel, which calls the shared function of its border if there is one and it has such pixels."""
    if function is not None:
        kernel = wanted.kernel(index, Border(function.name, function.block))
        if f"{function.name}(" in kernel.source:
            helpers = needed_helpers(function.source + kernel.source)
            return replace(kernel, shared=function.source, helpers=helpers)
        return kernel
    return wanted.kernel(index, None)


def _shared(wanted: _Wanted, layers: Collection[int], families: Families, end: str) -> dict[int, _Shared]:
    """The compact functions of the layers that have one; layers with the same texts have the same function.

    Requantisation takes a form for the very shifts of a layer, or where functions are saved by it, one for all shifts;
    at a border always the first, whose constants are those of the other pixels.
    """
    own, common = (_drafts(wanted, layers, families, any_shift) for any_shift in (False, True))
    any_shift = families is COMPACT and len(common) < len(own)
    found = {}
    for members in common if any_shift else own:
        first, *others = members.values()
        fixed = {stem: value for stem, value in first.items() if all(numbers.get(stem) == value for numbers in others)}
        name = wanted.names[next(iter(members))] + end
        for index in members:
            scope = replace(wanted.scope(index), compact=True, fixed=fixed, any_shift=any_shift)
            function = _written(name, scope, families)
            assert function is not None
            found[index] = function
    return found


def _drafts(
    wanted: _Wanted, layers: Collection[int], families: Families, any_shift: bool
) -> list[dict[int, Mapping[str, int]]]:
    """For each function, the numbers of the layers that share it, by the layer's index."""
    groups: dict[str, dict[int, Mapping[str, int]]] = {}
    for index in sorted(layers):
        scope = replace(wanted.scope(index), compact=True, any_shift=any_shift)
        draft = _written("function", scope, families)
        if draft is not None:
            groups.setdefault(draft.key, {})[index] = dict(scope.numbers)
    return list(groups.values())


def _written(name: str, scope: Scope, families: Families) -> _Shared | None:
    """The function of the scope's region, None where there is no compact form."""
    try:
        region = split(scope.graph)
        if region.anchor is None or scope.graph.types[region.anchor.inputs[0]].dtype is DType.FLOAT32:
            return None
        if type(region.anchor.operator) not in families:
            return None
        writer = families[type(region.anchor.operator)](region, scope)
        source, key = ("\n".join(writer(text)) + "\n" for text in (name, "function"))
    except Unsupported:
        return None
    read = set(re.findall(rf"\b{BLOCK}->(\w+)", source))
    numbers = {stem: value for stem, value in scope.numbers.items() if stem in read}
    plain = tuple(parameter for parameter in scope.parameters() if not parameter.is_constant)
    members = tuple(parameter for parameter in scope.parameters() if parameter.is_constant)
    block = Block(f"struct {name}_{BLOCK}", members, scope.constants.arrays, numbers) if read else None
    types = " ".join(member.c_type for member in members)
    return _Shared(name, source, f"{key}{types}", plain, block)


def _small(source: str) -> str:
    return re.sub(r"^static void ", "SMALL static void ", source, flags=re.MULTILINE)
