"""The kernels of all layers of a network, of which layers alike share compact functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from dovetail.kernels.c import identifiers
from dovetail.kernels.core import generated, source_and_key
from dovetail.kernels.helpers import SMALL, needed_helpers
from dovetail.kernels.kernel import (
    BLOCK,
    ConstantBlock,
    CoreKernel,
    UnsupportedRegion,
)
from dovetail.kernels.registry import family_of
from dovetail.kernels.scope import KernelScope


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
            plain = replace(request.core, instructions=())
            kernels.append(_small(generated(replace(request, core=plain, lanes=None, choice={}))))
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
