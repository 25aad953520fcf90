"""Scheduled kernels of regions: their loops, their epilogue, and the C text; kept on disk by content."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

import numpy as np

from dovetail.ir.types import Array, DType
from dovetail.kernels.c import c_type, function
from dovetail.kernels.epilogue import finish
from dovetail.kernels.kernel import CoreTraits, KernelScope, UnsupportedRegion
from dovetail.kernels.region import RegionParts
from dovetail.kernels.scheduled.algorithms import (
    ENTRY,
    ConvolutionSizes,
    Extra,
    InteriorPixels,
    Knobs,
    Packing,
    conv2d,
    fully_connected,
)
from dovetail.kernels.scheduled.knobs import block_of, choose_knobs, is_product, staging_of
from dovetail.kernels.scheduled.printed import c_functions, write_functions
from dovetail.kernels.scheduled.store import NOT_SHIPPED, Loops, kept_loops
from dovetail.kernels.scheduled.streams import with_streams
from dovetail.kernels.sums import MULTIPLY_ADD, Ended, Products, SumConstants, sums_of
from dovetail.kernels.window import COLUMN, ROW, WindowGeometry, anchored
from dovetail.target.chip import CoreInstruction, Streams

_PRODUCT = re.compile(r"( *)(sum\[\w+\]) \+= \(int32_t\)\((\w+\[[^\[\]]*\]) \* (\w+\[[^\[\]]*\])\);")
_POSITION, _CHANNEL = "at_position", "at_channel"
_READ = re.compile(rf"\b(\w+)\[({_POSITION}|{_CHANNEL}|0)\]")
_KINDS = {_POSITION: "position", _CHANNEL: "channel", "0": "one"}


@dataclass(frozen=True)
class ScheduledKernel:
    """A kernel's text and what it rests on."""

    write: Callable[[str], list[str]] | None
    """None where no instruction applies."""
    declarations: tuple[str, ...]
    """C text the instructions need."""
    used: tuple[str, ...]
    """Names of the instructions in it."""
    notes: tuple[str, ...]
    """One sentence per instruction that is not used."""


def write_scheduled(
    region: RegionParts,
    scope: KernelScope,
    products: Products,
    instructions: Sequence[CoreInstruction],
    streams: Streams | None = None,
) -> ScheduledKernel:
    """A kernel of sums of products with the core's own instructions.

    Args:
        region, scope, products: as `dovetail.kernels.convolution.write_sums` takes them.
        instructions: of the core.
        streams: what it has for inner loops of products that are one line of assembly.

    Raises:
        Unsupported: the loops are not described here: other types than int8, groups, several images, tables.
    """
    for name in region.anchor.inputs[2:] if region.anchor else ():
        scope.known(name)
    sums = sums_of(region, products)
    sizes, inside = _sized(region, products, sums)
    scope.input(region.source(), "input")
    result, lines, extras = epilogue(region, scope, sums)
    loops, knobs = _best(sizes, inside, extras, instructions, scope, streams is not None)
    if not loops.used:
        return ScheduledKernel(None, (), (), loops.notes)
    arrays = {"weights": packed(sums.weights, Packing(knobs.lanes, knobs.vector)), "bias": sums.inside}
    arrays["bias"] = np.pad(arrays["bias"], (0, -len(sums.inside) % knobs.lanes))
    scope.constants = {**arrays, **scope.constants}
    types = {parameter.name: parameter.c_type for parameter in scope.parameters()}
    promoted = {wide: wide for wide in ("int64_t", "uint32_t")}

    def write(name: str) -> list[str]:
        """The kernel under this name: its end as a function of one sum, then the loops."""
        inputs = ["int32_t sum", *(f"{promoted.get(types[e.name], 'int32_t')} {e.name}" for e in extras)]
        head = function(f"static inline {result} {name}_finish", inputs, lines)
        ordered = [parameter.name for parameter in scope.parameters()]
        functions = [replace(f, parameters=tuple(ordered)) if f.name == ENTRY else f for f in loops.functions]
        if MULTIPLY_ADD in scope.functions:
            functions = [replace(f, lines=tuple(map(_added, f.lines))) for f in functions]
        if streams is not None:
            for used in (i for i in instructions if knobs.straight and i.name in loops.used):
                functions = [replace(f, lines=tuple(with_streams(f.lines, used, streams))) for f in functions]
        declared = {parameter.name: parameter.declaration for parameter in scope.parameters()}
        return [*head, "", *write_functions(functions, name, types, ENTRY, declared, knobs.staging is not None)]

    declared = tuple(i.declarations for i in instructions if i.name in loops.used and i.declarations)
    return ScheduledKernel(write, declared, loops.used, loops.notes)


def knobs_of(
    region: RegionParts, products: Products, core: CoreTraits
) -> tuple[ConvolutionSizes, InteriorPixels, Knobs]:
    """What the loops of a layer are on a core: their sizes, the pixels inside the image, the block; as if the first
    instruction that fits were found in them.

    Raises:
        Unsupported: as `write_scheduled`, or no instruction fits.
    """
    sums = sums_of(region, products)
    sizes, inside = _sized(region, products, sums)
    scope = KernelScope(region.graph, core.accumulators, room=core.room, functions=core.functions)
    scope.input(region.source(), "input")
    epilogue(region, scope, sums)
    for _, knobs in _offered(sizes, inside, core.instructions, scope, core.streams is not None):
        return sizes, inside, knobs
    raise UnsupportedRegion("no instruction of the core is a product that fits.")


def _sized(region: RegionParts, products: Products, sums: SumConstants) -> tuple[ConvolutionSizes, InteriorPixels]:
    window = products.window
    _check(region, window, sums)
    sizes = ConvolutionSizes(
        (*window.size, window.channels),
        (*window.outputs, len(products.weights)),
        window.kernel,
        window.stride,
        window.dilation,
        window.before,
        sums.pad_value,
    )
    return sizes, InteriorPixels(window.inside(ROW), window.inside(COLUMN))


def _added(line: str) -> str:
    """A line, one that adds a product alone with the core's own function for it."""
    return _PRODUCT.sub(rf"\1\2 = {MULTIPLY_ADD}(\2, \3, \4);", line)


def _check(region: RegionParts, window: WindowGeometry, sums: SumConstants) -> None:
    source = region.graph.types[region.source()]
    if source.dtype is not DType.INT8 or sums.weights.dtype != np.int8 or sums.kind != "int32_t":
        raise UnsupportedRegion(f"scheduled kernels multiply int8 by int8 into int32, found {source}.")
    if window.batch > 1 or window.channels != sums.weights.shape[3]:
        raise UnsupportedRegion("scheduled kernels compute one image without groups.")


def epilogue(
    region: RegionParts, scope: KernelScope, sums: SumConstants, ended: Ended | None = None
) -> tuple[str, list[str], list[Extra]]:
    """The pointwise tree as a function of a sum and single elements: type, statements, what it reads; `ended` says what
    of the tree is left behind what stands for a sum."""
    assert region.anchor is not None
    index = anchored(region.output_shape, _POSITION, _CHANNEL)
    tree, value = ended("sum", index) if ended else (region.tree, (region.anchor.output, sums.value("sum")))
    *lines, last = finish(scope, tree, index, value)
    lines.append(f"return {last.split(' = ', 1)[1]}")
    extras: dict[str, Extra] = {}

    def read(match: re.Match[str]) -> str:
        extra = Extra(match[1], _KINDS[match[2]])
        if extras.setdefault(extra.name, extra) != extra:
            raise UnsupportedRegion(f"{extra.name} is read in two ways.")
        return extra.name

    lines = [_READ.sub(read, line) for line in lines]
    if any("[" in line for line in lines):
        raise UnsupportedRegion("scheduled kernels look nothing up in tables.")
    return c_type(region.graph.types[region.graph.outputs[0]].dtype), lines, list(extras.values())


def packed(weights: Array, packing: Packing) -> Array:
    """[outputs, KH, KW, depth] as the loops read them, flat: [outputs / lanes, taps / vector, lanes, vector]."""
    outputs, taps = len(weights), int(np.prod(weights.shape[1:]))
    rows = -(-outputs // packing.lanes) * packing.lanes
    columns = -(-taps // packing.vector) * packing.vector
    whole = np.zeros((rows, columns), weights.dtype)
    whole[:outputs, :taps] = weights.reshape(outputs, taps)
    split = whole.reshape(rows // packing.lanes, packing.lanes, columns // packing.vector, packing.vector)
    return np.ascontiguousarray(split.transpose(0, 2, 1, 3)).reshape(-1)


def _best(
    sizes: ConvolutionSizes,
    inside: InteriorPixels,
    extras: Sequence[Extra],
    instructions: Sequence[CoreInstruction],
    scope: KernelScope,
    streams: bool,
) -> tuple[Loops, Knobs]:
    """The loops for the first instruction that applies; for the last one where none does."""
    assert instructions
    notes: dict[str, None] = {}
    for _, knobs in _offered(sizes, inside, instructions, scope, streams):
        loops = _loops(sizes, inside, knobs, extras, instructions)
        if loops.used:
            return loops, knobs
        notes.update(dict.fromkeys(loops.notes))
    return Loops((), (), tuple(notes)), knobs


def _offered(
    sizes: ConvolutionSizes,
    inside: InteriorPixels,
    instructions: Sequence[CoreInstruction],
    scope: KernelScope,
    streams: bool,
) -> Iterator[tuple[CoreInstruction, Knobs]]:
    """The products that fit, the preferred first, and the block for each."""
    for instruction in filter(is_product, instructions):
        group, vector = extents(instruction.meaning)
        staging, fused = staging_of(instruction, instructions), block_of(instruction)
        if fused and (fused[0] > sizes.result[1] or fused[1] > sizes.result[2]):
            continue
        vector, group = staging.vector if staging else vector, 1 if fused else group
        straight = streams and bool(instruction.assembly) and not staging
        registers, room = scope.accumulators, scope.room
        yield instruction, choose_knobs(sizes, inside, vector, group, registers, staging, room, straight, fused)


def extents(meaning: str) -> tuple[int, int]:
    """Output channels and taps of a meaning: the constant lengths of its last two loops, 1 where it has fewer."""
    lengths = [1, 1, *(int(length) for length in re.findall(r"in seq\(\s*0\s*,\s*(\d+)\s*\)", meaning))]
    return lengths[-2], lengths[-1]


def _loops(
    sizes: ConvolutionSizes,
    inside: InteriorPixels,
    knobs: Knobs,
    extras: Sequence[Extra],
    instructions: Sequence[CoreInstruction],
) -> Loops:
    """The scheduled loops; none, with the reason, where they were not made before and Exo is not installed."""
    packing = Packing(knobs.lanes, knobs.vector)
    dense = sizes.kernel == (1, 1) and sizes.image[0] == sizes.stride[1] == 1 and not any(sizes.before)
    text = (fully_connected if dense else conv2d)(sizes, packing, extras)
    described = [text, sizes, inside, knobs, [(i.name, i.meaning, i.c, i.alignment, i.memories) for i in instructions]]
    described += [*(["fused"] if knobs.fused else []), *(["straight"] if knobs.straight else [])]

    def make() -> Loops | None:
        if not find_spec("exo"):
            return None
        from exo.core.memory import MemGenError

        from dovetail.kernels.scheduled.schedules import schedule_conv2d, schedule_fully_connected
        from dovetail.kernels.scheduled.select import Selection, scope
        from dovetail.loops.procedures import procedure

        selection, algorithm = Selection(instructions), procedure(text, scope())
        if dense:
            scheduled = schedule_fully_connected(algorithm, sizes, knobs, selection)
        else:
            scheduled = schedule_conv2d(algorithm, sizes, inside, knobs, selection)
        used = tuple(i.name for i in instructions if i.name in selection.used)
        try:
            if any(is_product(i) for i in instructions if i.name in used):
                return Loops(c_functions(scheduled), used, selection.notes())
        except MemGenError:  # operands were staged in registers that only instructions fill, and one was not found
            pass
        return Loops((), (), selection.notes())

    return kept_loops(str(described), make) or Loops((), (), (NOT_SHIPPED,))
