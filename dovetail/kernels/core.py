"""Core kernels: which regions there is C for, the C, and the knobs of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from dovetail.errors import DovetailError
from dovetail.ir.graph import Graph
from dovetail.ir.layout import Layout
from dovetail.ir.types import DType
from dovetail.kernels.helpers import needed_helpers
from dovetail.kernels.kernel import Border, CoreKernel, CoreTraits, KernelChoices, KernelWriter, UnsupportedRegion
from dovetail.kernels.pointwise import write_pointwise
from dovetail.kernels.region import RegionParts, split
from dovetail.kernels.registry import OFFERED, TRAITS, InstructedWay, family_of, registered
from dovetail.kernels.scope import KernelScope
from dovetail.target.pattern import Choice

Layouts = Mapping[str, Layout]
"""By value."""
_NO_LAYOUTS: Layouts = MappingProxyType({})
_NO_CHOICE: Choice = MappingProxyType({})
_LETTER = "\u01c1"
"""Stands for each letter of a function's name while its text is written: no C has it."""


@dataclass(frozen=True)
class KernelRequest:
    """The arguments of `generate`."""

    graph: Graph
    name: str
    core: CoreTraits = field(default_factory=CoreTraits)
    border: Border | None = None
    overwritten: str | None = None
    lanes: int | None = None
    layouts: Layouts = field(default_factory=dict)
    choice: Choice = field(default_factory=dict)

    def scope(self) -> KernelScope:
        """The parameters of a kernel that is written out."""
        scope = KernelScope(self.graph, self.core.accumulators, self.overwritten, self.lanes, border=self.border)
        scope.functions, scope.layouts, scope.choice = self.core.functions, self.layouts, self.choice
        return scope

    def instructed_scope(self) -> KernelScope:
        """The parameters of a kernel with the core's own instructions."""
        scope = KernelScope(self.graph, self.core.accumulators, self.overwritten, room=self.core.room)
        scope.functions, scope.choice = self.core.functions, self.choice
        return scope

    def kernel(self) -> CoreKernel:
        """The kernel: of instructions of the core where one is found in its loops, else written out.

        Raises:
            UnsupportedRegion: no core kernel computes the region.
        """
        region, notes = split(self.graph), tuple[str, ...]()
        for way in instructed_ways(region, self.core):
            scope = self.instructed_scope()
            try:
                writer = way.plan(region, scope, self.core).writer()
            except UnsupportedRegion as refusal:
                notes = tuple(f"{one.name}: {refusal}" for one in self.core.instructions) if way.explained else ()
                continue
            if writer.write is not None:
                return written(self.name, scope, writer)
            notes = writer.notes
        scope = self.scope()
        shared = [value for value, layout in self.layouts.items() if layout.packed]
        if shared and (sentence := takes_packed(self.graph, shared)):
            raise UnsupportedRegion(sentence)
        return written(self.name, scope, _plain_writer(region, scope), notes)


def instructed_ways(region: RegionParts, core: CoreTraits) -> Iterator[InstructedWay]:
    """The ways to write a region's kernel with a core's own instructions, the preferred first."""
    if core.instructions and region.anchor is not None:
        yield from family_of(region)[1].ways


def _plain_writer(region: RegionParts, scope: KernelScope) -> KernelWriter:
    """Writes the kernel out; raises Unsupported where there is none."""
    if region.anchor is None:
        return write_pointwise(region, scope)
    return family_of(region)[0](region, scope, region.anchor.operator)


def source_and_key(name: str, writer: KernelWriter) -> tuple[str, str]:
    """A function's text, and the part that is the same in texts that differ in no more than the name: lines are broken
    by its length, so blanks count once."""
    assert writer.write is not None
    stand_in = _LETTER * len(name)
    text = "\n".join(writer.write(stand_in)) + "\n"
    return text.replace(stand_in, name), " ".join(text.replace(stand_in, _LETTER).split())


def written(name: str, scope: KernelScope, writer: KernelWriter, notes: tuple[str, ...] = ()) -> CoreKernel:
    """The kernel that a writer gives, under this name."""
    source, key = source_and_key(name, writer)
    return CoreKernel(
        name,
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
        _plain_writer(split(graph), KernelScope(graph)).check()
    except UnsupportedRegion as refusal:
        return str(refusal)
    return None


def takes_packed(graph: Graph, values: Collection[str]) -> str | None:
    """None when the region's kernel takes, or gives, these narrow values of it several to a byte; else why not."""
    region = split(graph)
    if region.anchor is None or ((traits := registered(TRAITS, region.anchor.operator)) and traits.packed):
        return None
    if region.tree and set(values) == set(graph.outputs):  # what is computed is put into its byte wherever it belongs
        return None
    return f"{type(region.anchor.operator).__name__} takes no elements that share bytes."


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
        return KernelRequest(graph, "kernel", core).kernel().notes
    except UnsupportedRegion:
        return ()


def offered(graph: Graph, core: CoreTraits) -> KernelChoices:
    """The knobs of a region's kernel on a core that makes it for speed; none where nothing may be chosen.

    Every setting that is offered can be written: blocks fit registers and stack.
    """
    try:
        region = split(graph)
        if region.anchor is None or region.type(0).dtype is DType.FLOAT32:
            return KernelChoices()
        for way in instructed_ways(region, core):
            try:
                return way.plan(region, KernelRequest(graph, "kernel", core).instructed_scope(), core).offered()
            except UnsupportedRegion:
                pass
        ask = registered(OFFERED, region.anchor.operator)
        return (ask(region, core) if ask else None) or KernelChoices()
    except UnsupportedRegion:
        return KernelChoices()


def generate(
    graph: Graph,
    name: str,
    core: CoreTraits = CoreTraits(),  # noqa: B008
    border: Border | None = None,
    overwritten: str | None = None,
    lanes: int | None = None,
    layouts: Layouts = _NO_LAYOUTS,
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
    return generated(KernelRequest(graph, name, core, border, overwritten, lanes, layouts, choice))


def generated(request: KernelRequest) -> CoreKernel:
    """`generate` of a request."""
    try:
        return request.kernel()
    except UnsupportedRegion as refusal:
        hint = "split the region, or write a kernel for its anchor in dovetail/kernels"
        what = f"no core kernel computes this region: {refusal}"
        raise DovetailError(what, where=request.graph.name, hint=hint) from None
