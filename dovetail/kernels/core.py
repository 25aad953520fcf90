"""Core kernels: which regions there is C for, the C, and its knobs; those of all layers of a network, of which
layers alike share compact functions."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from dovetail.errors import DovetailError
from dovetail.ir.graph import Graph
from dovetail.ir.layout import Layout
from dovetail.ir.types import DType
from dovetail.kernels.c import identifiers
from dovetail.kernels.helpers import SMALL, needed_helpers
from dovetail.kernels.kernel import (
    BLOCK,
    ConstantBlock,
    CoreKernel,
    CoreTraits,
    KernelChoices,
    KernelWriter,
    UnsupportedRegion,
)
from dovetail.kernels.pointwise import write_pointwise
from dovetail.kernels.registry import OFFERED, TRAITS, family_of, registered
from dovetail.kernels.scope import KernelScope, split
from dovetail.kernels.turns import instructed_ways, plain_wins, settled
from dovetail.target.pattern import Choice

Layouts = Mapping[str, Layout]
"""By value."""
_NO_LAYOUTS: Layouts = MappingProxyType({})
_NO_CHOICE: Choice = MappingProxyType({})
_LETTER = "\u01c1"
"""Stands for each letter of a function's name while its text is written: no C has it."""


@contextmanager
def _refused(graph: Graph) -> Iterator[None]:
    """Turns a refusal into the error that users see."""
    try:
        yield
    except UnsupportedRegion as refusal:
        hint = "split the region, or write a kernel for its anchor in dovetail/kernels"
        what = f"no core kernel computes this region: {refusal}"
        raise DovetailError(what, where=graph.name, hint=hint) from None


def generated(scope: KernelScope) -> CoreKernel:
    """The kernel of a scope that is not begun; raises as `generate`."""
    with _refused(scope.graph):
        return _generated(scope)


def _generated(scope: KernelScope) -> CoreKernel:
    """The kernel of instructions of the core where one is found in its loops, else written out."""
    ways, notes = list(instructed_ways(scope)), tuple[str, ...]()
    if losing := plain_wins(scope.graph, scope.core):
        ways, notes = [], (losing,)
    elif ways and scope.shares(scope.graph.outputs[0]):  # they give every element a byte of its own
        ways, notes = [], tuple(f"{one.name}: elements of the result share bytes." for one in scope.core.instructions)
    for way in ways:
        bare = without_borders(scope)
        try:
            plan = way.plan(bare)
            plan.offered()  # it raises where no instruction fits
            writer = plan.writer()
        except UnsupportedRegion as refusal:
            notes = tuple(f"{one.name}: {refusal}" for one in scope.core.instructions) if way.explained else ()
            continue
        if writer.write is not None:
            return written(bare, writer)
        notes = writer.notes
    shared = [value for value, layout in scope.layouts.items() if layout.packed]
    if shared and (sentence := _takes_packed(scope, shared)):
        raise UnsupportedRegion(sentence)
    return written(scope, _plain_writer(scope), notes)


def without_borders(scope: KernelScope) -> KernelScope:
    """The same for a kernel with the core's own instructions, which takes in all pixels alike."""
    return replace(scope, border=None, lanes=None, layouts={})


def _plain_writer(scope: KernelScope) -> KernelWriter:
    """Writes the kernel out; raises Unsupported where there is none."""
    if scope.anchor is None:
        return write_pointwise(scope)
    return family_of(scope)[0](scope, scope.anchor.operator)


def source_and_key(name: str, writer: KernelWriter) -> tuple[str, str]:
    """A function's text, and the part that is the same in texts that differ in no more than the name: lines are broken
    by its length, so blanks count once."""
    assert writer.write is not None
    stand_in = _LETTER * len(name)
    text = "\n".join(writer.write(stand_in)) + "\n"
    return text.replace(stand_in, name), " ".join(text.replace(stand_in, _LETTER).split())


def written(scope: KernelScope, writer: KernelWriter, notes: tuple[str, ...] = ()) -> CoreKernel:
    """The kernel that a writer gives."""
    same = writer.alike() if scope.texts is not None and not notes else None
    if scope.texts is not None and same in scope.texts:
        known, block = scope.texts[same], scope.border.block if scope.border else None
        scope.keep(known.constants)
        return replace(known, parameters=scope.parameters(), constants=scope.constants, block=block)
    kernel = _written(scope, writer, notes)
    if scope.texts is not None and same is not None:
        scope.texts[same] = kernel
    return kernel


def _written(scope: KernelScope, writer: KernelWriter, notes: tuple[str, ...]) -> CoreKernel:
    source, key = source_and_key(scope.name, writer)
    return CoreKernel(
        scope.name,
        source,
        scope.parameters(),
        scope.constants,
        needed_helpers((*writer.declarations, source)),
        key=key,
        declarations=writer.declarations,
        instructions=writer.instructions,
        notes=notes or writer.notes,
        block=scope.border.block if scope.border else None,
        lanes=scope.lanes,
        foreign=bool(writer.declarations) and not writer.instructions,
        has_storage=writer.has_storage,
    )


def supports(graph: Graph) -> str | None:
    """None when a core kernel computes the region, else one sentence that says why not; no kernel is written."""
    try:
        _plain_writer(split(graph)).check()
    except UnsupportedRegion as refusal:
        return str(refusal)
    return None


def takes_packed(graph: Graph, values: Collection[str]) -> str | None:
    """None when the region's kernel takes, or gives, these narrow values of it several to a byte; else why not."""
    return _takes_packed(split(graph), values)


def _takes_packed(scope: KernelScope, values: Collection[str]) -> str | None:
    if scope.anchor is None or ((traits := registered(TRAITS, scope.anchor.operator)) and traits.packed):
        return None
    # What is computed is put into its byte wherever it belongs.
    if scope.tree and set(values) == set(scope.graph.outputs):
        return None
    return f"{type(scope.anchor.operator).__name__} takes no elements that share bytes."


def may_overwrite(graph: Graph) -> bool:
    """True when a region's kernel may be written over an operand that is read only at the place of each element: it
    computes no element twice, and reads what an element is made from before it writes it."""
    anchor = split(graph).anchor
    traits = registered(TRAITS, anchor.operator) if anchor else None
    return anchor is None or (traits is not None and traits.once)


def unused_instructions(graph: Graph, core: CoreTraits) -> tuple[str, ...]:
    """Why instructions of the core are not used in a region's kernel, one sentence each; empty where there is none to
    use them in. Arguments as of `generate`."""
    try:
        return _generated(split(graph, core)).notes
    except UnsupportedRegion:
        return ()


def offered(graph: Graph, core: CoreTraits) -> KernelChoices:
    """The knobs of a region's kernel on a core that makes it for speed; none where nothing may be chosen.

    Every setting that is offered can be written: blocks fit registers and stack.
    """
    try:
        scope = split(graph, settled(graph, core))
        if scope.anchor is None or scope.type(0).dtype is DType.FLOAT32:
            return KernelChoices()
        for way in instructed_ways(scope):
            try:
                return way.plan(scope).offered()
            except UnsupportedRegion:
                pass
        ask = registered(OFFERED, scope.anchor.operator)
        return (ask(scope) if ask else None) or KernelChoices()
    except UnsupportedRegion:
        return KernelChoices()


def generate(
    graph: Graph,
    name: str,
    core: CoreTraits = CoreTraits(),  # noqa: B008
    border: CoreKernel | None = None,
    overwritten: str | None = None,
    lanes: int | None = None,
    layouts: Layouts = _NO_LAYOUTS,
    choice: Choice = _NO_CHOICE,
    texts: dict[Hashable, CoreKernel] | None = None,
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
        texts: kernels that were generated before; one whose text would be the same has their text and name.

    Raises:
        DovetailError: no core kernel computes the region (`supports` says why).
    """
    settings = {"border": border, "overwritten": overwritten, "lanes": lanes, "layouts": layouts, "choice": choice}
    return generated(scope_of(graph, name, core, texts=texts, **settings))


def scope_of(graph: Graph, name: str, core: CoreTraits, **settings: Any) -> KernelScope:
    """A region taken apart, with settings as of `generate`; raises as that."""
    with _refused(graph):
        return replace(split(graph, core.chosen(settings.get("choice", _NO_CHOICE))), name=name, **settings)


def generate_all(requests: Sequence[KernelScope], little: Collection[int]) -> list[CoreKernel]:
    """The kernels of all layers of a network.

    Layers whose compact functions differ only in numbers and constants share them: what is the same in all these
    layers stands in the text, the rest in a block for each (`CoreKernel.block`).

    Args:
        requests: of `scope_of`, a layer each; layers that share a function take the first's name.
        little: indices of the layers that are to take little code, however long they run: without the core's own
            instructions, and as nobody has chosen. The others share the functions of their borders.

    Raises:
        DovetailError: no core kernel computes a region.
    """
    compact = _shared(requests, little, single=False)
    borders = _shared(requests, set(range(len(requests))) - set(little), single=True)
    kernels = []
    for index, request in enumerate(requests):
        if shared := compact.get(index):
            kernels.append(_small(shared))
        elif index in little:
            core = replace(request.core.basic, turn=1)
            kernels.append(_small(generated(replace(request, core=core, lanes=None, choice={}))))
        else:
            kernels.append(_with_border(request, borders.get(index)))
    return kernels


def _small(kernel: CoreKernel) -> CoreKernel:
    """The kernel, its functions marked as ones the compiler shall make small."""
    lines = (f"SMALL {line}" if line.startswith("static void ") else line for line in kernel.source.split("\n"))
    declarations = (*kernel.declarations, SMALL)
    return replace(kernel, source="\n".join(lines), key=f"SMALL {kernel.key}", declarations=declarations)


def _with_border(request: KernelScope, function: CoreKernel | None) -> CoreKernel:
    """A layer's kernel, which calls the shared function of its border if there is one and it has such pixels."""
    if function is None:
        return generated(request)
    kernel = generated(replace(request, border=function))
    if f"{function.name}(" not in kernel.source:
        return kernel
    return replace(kernel, shared=function.source, helpers=needed_helpers((function.source, kernel.source)))


def _shared(requests: Sequence[KernelScope], layers: Collection[int], single: bool) -> dict[int, CoreKernel]:
    """The compact functions of the layers that have one; layers with the same texts have the same function.

    Requantisation takes a form for the very shifts of a layer, or where functions are saved by it, one for all shifts;
    at a border always the first, whose constants are those of the other pixels.
    """
    own = _drafts(requests, layers, single, any_shift=False)
    common = own if single else _drafts(requests, layers, single, any_shift=True)
    any_shift = len(common) < len(own)
    functions = {}
    for members in common if any_shift else own:
        first, *others = members.values()
        fixed = {stem: value for stem, value in first.items() if all(numbers.get(stem) == value for numbers in others)}
        name = requests[next(iter(members))].name + ("_pixel" if single else "")
        for index in members:
            scope = replace(requests[index], name=name, compact=True, single=single, fixed=fixed, any_shift=any_shift)
            function = _function(scope)
            assert function is not None
            functions[index] = function
    return functions


def _drafts(
    requests: Sequence[KernelScope], layers: Collection[int], single: bool, any_shift: bool
) -> list[dict[int, Mapping[str, int]]]:
    """For each function, the numbers of the layers that share it, by the layer's index."""
    groups: dict[str, dict[int, Mapping[str, int]]] = {}
    for index in sorted(layers):
        scope = replace(requests[index], name="function", compact=True, single=single, any_shift=any_shift)
        draft = _function(scope)
        if draft is not None:
            groups.setdefault(draft.key, {})[index] = dict(scope.numbers)
    return list(groups.values())


def _function(scope: KernelScope) -> CoreKernel | None:
    """The function of the scope's region as one layer sees it, None where there is no compact form. The types of the
    constants are in its key, too: layers of equal keys can share it."""
    if scope.anchor is None or any(layout.packed for layout in scope.layouts.values()):
        return None
    try:
        family, traits = family_of(scope)
        if not (traits.borders if scope.single else traits.compact):
            return None
        source, key = source_and_key(scope.name, family(scope, scope.anchor.operator))
    except UnsupportedRegion:
        return None
    read = identifiers([source])
    numbers = {stem: value for stem, value in scope.numbers.items() if stem in read}
    plain, members = (tuple(p for p in scope.parameters() if p.is_constant is which) for which in (False, True))
    struct = f"struct {scope.name}_{BLOCK}"
    block = ConstantBlock(struct, members, scope.constants, numbers) if BLOCK in read else None
    types = " ".join(member.c_type for member in members)
    parameters = (*plain, *((block.parameter,) if block else ()))
    return CoreKernel(scope.name, source, parameters, {}, needed_helpers([source]), f"{key}{types}", block=block)
