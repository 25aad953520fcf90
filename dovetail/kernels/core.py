"""Core kernels: which regions there is C for, the C, and which layers of a network share functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from dovetail.errors import DovetailError
from dovetail.ir.graph import Graph
from dovetail.ir.layout import Layout
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.linear import DepthwiseConv2d
from dovetail.ir.types import DType
from dovetail.kernels.convolution import ONCE, write_sums
from dovetail.kernels.elements import write_pointwise
from dovetail.kernels.kernel import (
    BLOCK,
    SMALL,
    Border,
    ConstantBlock,
    CoreKernel,
    CoreTraits,
    KernelScope,
    Parameter,
    UnsupportedRegion,
    needed_helpers,
)
from dovetail.kernels.patches import write_patches
from dovetail.kernels.planes import write_planes
from dovetail.kernels.region import (
    BORDERS,
    COMPACT,
    FAMILIES,
    FLOAT_FAMILIES,
    PACKED,
    WINDOWED,
    Compact,
    Family,
    RegionParts,
    split,
)
from dovetail.kernels.scheduled.write import ScheduledKernel, write_scheduled
from dovetail.kernels.sums import products_of
from dovetail.target.pattern import Choice

Layouts = Mapping[str, Layout]
"""By value."""
_NONE: Layouts = MappingProxyType({})
_NO_CHOICE: Choice = MappingProxyType({})


def _write(
    graph: Graph,
    name: str,
    core: CoreTraits,
    border: Border | None = None,
    overwritten: str | None = None,
    lanes: int | None = None,
    layouts: Layouts = _NONE,
    choice: Choice = _NO_CHOICE,
) -> CoreKernel:
    """A region's kernel: of scheduled loops where an instruction of the core is selected in them, else written out."""
    region = split(graph)
    notes: tuple[str, ...] = ()
    family, operator = _family(region)
    if core.instructions and isinstance(operator, DepthwiseConv2d):
        scope = KernelScope(graph, core.accumulators, overwritten, room=core.room, functions=core.functions)
        try:
            found = write_planes(region, scope, products_of(region, scope, merged=False), core.instructions)
        except UnsupportedRegion:  # as ever, then
            pass
        else:
            assert found.write is not None
            return _kernel(name, scope, found.write, found)
    if core.instructions and family is write_sums:
        scope = KernelScope(
            graph, core.accumulators, overwritten, room=core.room, functions=core.functions, choice=choice
        )
        products = products_of(region, scope)
        try:
            found = write_patches(region, scope, products, core)
        except UnsupportedRegion:
            scope = KernelScope(graph, core.accumulators, overwritten, room=core.room, functions=core.functions)
        else:
            assert found.write is not None
            return _kernel(name, scope, found.write, found)
        try:
            if any(region.type(operand).dtype.bits < 8 for operand in (0, 1)):
                raise UnsupportedRegion("its operands are bytes, several of these elements share one.")
            found = write_scheduled(region, scope, products, core.instructions, core.streams)
        except UnsupportedRegion as refusal:
            notes = tuple(f"{instruction.name}: {refusal}" for instruction in core.instructions)
        else:
            if found.write is not None:
                return _kernel(name, scope, found.write, found)
            notes = found.notes
    scope = KernelScope(
        graph,
        core.accumulators,
        overwritten,
        lanes,
        border=border,
        functions=core.functions,
        layouts=layouts,
        choice=choice,
    )
    shared = [value for value, layout in layouts.items() if layout.packed]
    if shared and (sentence := takes_packed(graph, shared)):
        raise UnsupportedRegion(sentence)
    writer = family(region, scope, operator)
    made = _kernel(name, scope, writer.write, ScheduledKernel(None, writer.declarations, (), notes))
    return replace(made, foreign=bool(writer.declarations))


def _family(region: RegionParts) -> tuple[Family, Operator | None]:
    """What writes kernels of the region's anchor, and its operator; raises Unsupported where nothing does."""
    if region.anchor is None:
        return write_pointwise, None
    kinds = type(region.anchor.operator).__mro__
    kind = next((kind for kind in kinds if kind in FAMILIES), None)
    if kind is None:
        raise UnsupportedRegion(f"there is no core kernel for {kinds[0].__name__}.")
    real = region.type(0).dtype is DType.FLOAT32
    if kind not in WINDOWED:
        region.without_pad()
    return (FLOAT_FAMILIES if real and kind in FLOAT_FAMILIES else FAMILIES)[kind], region.anchor.operator


_LETTER = "\u01c1"
"""Of which a function's name is made while its text is written: no C has it."""


def _source_and_key(name: str, write: Callable[[str], list[str]]) -> tuple[str, str]:
    """A function's text, and what is the same in texts that differ in no more than the name: lines are broken by its
    length, so blanks count once."""
    text = "\n".join(write(_LETTER * len(name))) + "\n"
    key = " ".join(text.replace(_LETTER * len(name), _LETTER).split())
    return text.replace(_LETTER * len(name), name), key


def _kernel(name: str, scope: KernelScope, write: Callable[[str], list[str]], loops: ScheduledKernel) -> CoreKernel:
    source, key = _source_and_key(name, write)
    return CoreKernel(
        name,
        source,
        scope.parameters(),
        scope.constants,
        needed_helpers("\n".join((*loops.declarations, source))),
        key=key,
        declarations=loops.declarations,
        instructions=loops.used,
        notes=loops.notes,
        block=scope.border.block if scope.border else None,
        lanes=None if loops.write is not None else scope.lanes,
    )


def supports(graph: Graph) -> str | None:
    """None when a core kernel computes the region, else one sentence that says why not; no kernel is written."""
    try:
        region = split(graph)
        family, operator = _family(region)
        family(region, KernelScope(graph), operator).check()
    except UnsupportedRegion as refusal:
        return str(refusal)
    return None


def takes_packed(graph: Graph, values: Collection[str]) -> str | None:
    """None when the region's kernel takes, or gives, these narrow values of it several to a byte; else why not."""
    region = split(graph)
    if region.anchor is None or type(region.anchor.operator) in PACKED:
        return None
    if region.tree and set(values) == set(graph.outputs):  # what is computed is put into its byte wherever it belongs
        return None
    return f"{type(region.anchor.operator).__name__} takes no elements that share bytes."


def may_overwrite(graph: Graph) -> bool:
    """True when a region's kernel may be written over an operand that is read only at the place of each element: it
    computes no element twice, and reads what an element is made from before it writes it."""
    anchor = split(graph).anchor
    return anchor is None or isinstance(anchor.operator, ONCE)


def unused_instructions(graph: Graph, core: CoreTraits) -> tuple[str, ...]:
    """Why instructions of the core are not used in a region's kernel, one sentence each; empty where there is none to
    use them in. Arguments as of `generate`."""
    try:
        return _write(graph, "kernel", core).notes
    except UnsupportedRegion:
        return ()


def generate(
    graph: Graph,
    name: str,
    core: CoreTraits = CoreTraits(),  # noqa: B008
    border: Border | None = None,
    overwritten: str | None = None,
    lanes: int | None = None,
    layouts: Layouts = _NONE,
    choice: Choice = _NO_CHOICE,
) -> CoreKernel:
    """The C of a region.

    Args:
        graph: the region: run-time inputs, constants and one result; an optional Pad, one anchor operator and a tree of
            pointwise operators behind it (`is_pointwise`).
        name: the C function's name.
        core: what the core offers.
        border: the function that computes single pixels where others are computed together; None: one of its own.
        overwritten: the operand whose place the result takes, where `may_overwrite` allows one.
        lanes: the `CoreKernel.lanes` of another kernel of the same weights, which are then in one order for both.
        layouts: of the operands and the result that share bytes; of a relayout also those of others.
        choice: settings of the knobs that `offered` names; those it refuses are left as they are without.

    Raises:
        DovetailError: no core kernel computes the region (`supports` says why).
    """
    try:
        return _write(graph, name, core, border, overwritten, lanes, layouts, choice)
    except UnsupportedRegion as refusal:
        hint = "split the region, or write a kernel for its anchor in dovetail/kernels"
        raise DovetailError(f"no core kernel computes this region: {refusal}", where=graph.name, hint=hint) from None


Table = dict[type[Operator], Compact]
LayoutsOf = Mapping[int, Layouts]
"""By index of a layer."""


@dataclass(frozen=True, slots=True)
class _KernelRequest:
    """What `generate_all` is asked for."""

    graphs: Sequence[Graph]
    names: Sequence[str]
    core: CoreTraits
    overwritten: Mapping[int, str]
    lanes: Mapping[int, int]
    layouts: LayoutsOf
    choices: Mapping[int, Choice]

    def scope(self, index: int) -> KernelScope:
        graph, over, lanes = self.graphs[index], self.overwritten.get(index), self.lanes.get(index)
        layouts, choice = self.layouts.get(index, _NONE), self.choices.get(index, _NO_CHOICE)
        functions, sums = self.core.functions, self.core.accumulators
        return KernelScope(graph, sums, over, lanes, functions=functions, layouts=layouts, choice=choice)


@dataclass(frozen=True, slots=True)
class _SharedFunction:
    """A function of compact text, as one layer sees it."""

    name: str
    source: str
    key: str
    """The text without the name, and the types of the constants: layers of equal keys can share the function."""
    parameters: tuple[Parameter, ...]
    block: ConstantBlock | None


def generate_all(
    graphs: Sequence[Graph],
    names: Sequence[str],
    little: Collection[int],
    core: CoreTraits = CoreTraits(),  # noqa: B008
    overwritten: Mapping[int, str] | None = None,
    lanes: Mapping[int, int] | None = None,
    layouts: LayoutsOf = MappingProxyType({}),
    choices: Mapping[int, Choice] = MappingProxyType({}),
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
        layouts: as `generate`, by index.
        choices: as `generate`, by index; nothing may be chosen about those that are `little`.

    Raises:
        DovetailError: no core kernel computes a region.
    """
    wanted = _KernelRequest(graphs, names, core, overwritten or {}, lanes or {}, layouts, choices)
    compact = _shared(wanted, little, COMPACT, "")
    borders = _shared(wanted, set(range(len(graphs))) - set(little), BORDERS, "_pixel")
    found = []
    for index, (graph, name) in enumerate(zip(graphs, names, strict=True)):
        if shared := compact.get(index):
            parameters = (*shared.parameters, *((shared.block.parameter,) if shared.block else ()))
            source, key, helpers = _small(shared.source), f"SMALL {shared.key}", needed_helpers(shared.source)
            found.append(
                CoreKernel(shared.name, source, parameters, {}, helpers, key, declarations=(SMALL,), block=shared.block)
            )
        elif index in little:
            plain, over = replace(core, instructions=()), wanted.overwritten.get(index)
            kernel = generate(graph, name, plain, overwritten=over, layouts=layouts.get(index, _NONE))
            source, key, declarations = _small(kernel.source), f"SMALL {kernel.key}", (*kernel.declarations, SMALL)
            found.append(replace(kernel, source=source, key=key, declarations=declarations))
        else:
            found.append(_with_border(wanted, index, borders.get(index)))
    return found


def _with_border(wanted: _KernelRequest, index: int, function: _SharedFunction | None) -> CoreKernel:
    """A layer's kernel, which calls the shared function of its border if there is one and it has such pixels."""
    graph, name, over = wanted.graphs[index], wanted.names[index], wanted.overwritten.get(index)
    border = Border(function.name, function.block) if function else None
    lanes, layouts = wanted.lanes.get(index), wanted.layouts.get(index, _NONE)
    kernel = generate(graph, name, wanted.core, border, over, lanes, layouts, wanted.choices.get(index, _NO_CHOICE))
    if function is None or f"{function.name}(" not in kernel.source:
        return kernel
    return replace(kernel, shared=function.source, helpers=needed_helpers(function.source + kernel.source))


def _shared(wanted: _KernelRequest, layers: Collection[int], families: Table, end: str) -> dict[int, _SharedFunction]:
    """The compact functions of the layers that have one; layers with the same texts have the same function.

    Requantisation takes a form for the very shifts of a layer, or where functions are saved by it, one for all shifts;
    at a border always the first, whose constants are those of the other pixels.
    """
    own = _drafts(wanted, layers, families, any_shift=False)
    common = _drafts(wanted, layers, families, any_shift=True) if families is COMPACT else own
    any_shift = len(common) < len(own)
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
    wanted: _KernelRequest, layers: Collection[int], families: Table, any_shift: bool
) -> list[dict[int, Mapping[str, int]]]:
    """For each function, the numbers of the layers that share it, by the layer's index."""
    groups: dict[str, dict[int, Mapping[str, int]]] = {}
    for index in sorted(layers):
        scope = replace(wanted.scope(index), compact=True, any_shift=any_shift)
        draft = _written("function", scope, families)
        if draft is not None:
            groups.setdefault(draft.key, {})[index] = dict(scope.numbers)
    return list(groups.values())


def _written(name: str, scope: KernelScope, families: Table) -> _SharedFunction | None:
    """The function of the scope's region, None where there is no compact form."""
    try:
        region = split(scope.graph)
        operator = region.anchor.operator if region.anchor else None
        if operator is None or type(operator) not in families or region.type(0).dtype is DType.FLOAT32:
            return None
        if any(layout.packed for layout in scope.layouts.values()):
            return None
        writer = families[type(operator)](region, scope, operator)
        source, key = _source_and_key(name, writer)
    except UnsupportedRegion:
        return None
    read = set(re.findall(rf"\b{BLOCK}->(\w+)", source))
    numbers = {stem: value for stem, value in scope.numbers.items() if stem in read}
    plain, members = (tuple(p for p in scope.parameters() if p.is_constant is which) for which in (False, True))
    block = ConstantBlock(f"struct {name}_{BLOCK}", members, scope.constants, numbers) if read else None
    types = " ".join(member.c_type for member in members)
    return _SharedFunction(name, source, f"{key}{types}", plain, block)


def _small(source: str) -> str:
    return re.sub(r"^static void ", "SMALL static void ", source, flags=re.MULTILINE)
