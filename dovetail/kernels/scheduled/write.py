"""Scheduled kernels of regions: their loops, their epilogue, and the C text; kept on disk by content."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from importlib.util import find_spec

import numpy as np

from dovetail.ir.types import Array, DType
from dovetail.kernels.c import Lines
from dovetail.kernels.ends import EndFunction, end_function
from dovetail.kernels.kernel import KernelChoices, KernelWriter, Turns, UnsupportedRegion
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
from dovetail.kernels.scheduled.knobs import block_of, choose_knobs, extents, is_product, staging_of, turns_of
from dovetail.kernels.scheduled.printed import c_functions, write_functions
from dovetail.kernels.scheduled.store import NOT_SHIPPED, Loops, kept_loops
from dovetail.kernels.scheduled.streams import with_streams
from dovetail.kernels.scope import KernelScope
from dovetail.kernels.sums import MULTIPLY_ADD, SumConstants, padded, products_of, sums_of
from dovetail.kernels.window import COLUMN, ROW
from dovetail.target.chip import CoreInstruction

_PRODUCT = re.compile(r"( *)(sum\[\w+\]) \+= \(int32_t\)\((\w+\[[^\[\]]*\]) \* (\w+\[[^\[\]]*\])\);")


_NARROW = "its operands are bytes, several of these elements share one."


def _is_narrow(scope: KernelScope) -> bool:
    return any(scope.type(operand).dtype.bits < 8 for operand in (0, 1))


@dataclass(frozen=True)
class ScheduledLoops:
    """The loops of a layer of sums of products, for the core's own instructions."""

    scope: KernelScope
    sums: SumConstants
    sizes: ConvolutionSizes
    inside: InteriorPixels
    end: EndFunction

    def blocks(self) -> Iterator[Knobs]:
        """The block for each product that fits, the preferred first."""
        core, sizes = self.scope.core, self.sizes
        for instruction in filter(is_product, core.instructions):
            group, vector = extents(instruction)
            staging, fused = staging_of(instruction, core.instructions), block_of(instruction)
            if fused and (fused[0] > sizes.result[1] or fused[1] > sizes.result[2]):
                continue
            vector, group = staging.vector if staging else vector, 1 if fused else group
            straight = core.streams is not None and bool(instruction.assembly) and not staging
            registers, room = core.accumulators, core.room
            yield choose_knobs(sizes, self.inside, vector, group, registers, staging, room, straight, fused)

    def block(self) -> Knobs:
        """The block of the first instruction that fits, as if it were found in the loops; raises Unsupported where none
        does."""
        for knobs in self.blocks():
            return knobs
        raise UnsupportedRegion("no instruction of the core is a product that fits.")

    def offered(self) -> KernelChoices:
        """No knobs."""
        self.block()
        return KernelChoices()

    def turns(self) -> Turns:
        """How often the parts of the loops run."""
        knobs = self.block()
        counts, several = turns_of(knobs, self.sizes, self.inside), -(-self.sizes.taps // knobs.vector) > knobs.unroll
        if several and not knobs.straight:  # sums leave their registers between turns
            counts["kept"] = counts["product"] / knobs.unroll
        kind = "staged" if knobs.staging else "straight" if knobs.straight else "instruction"
        return {**{f"{kind}.{part}": count for part, count in counts.items()}, f"{kind}.kernel": 1}

    def writer(self) -> KernelWriter:
        """Writes the kernel; nothing where no instruction is found in the loops."""
        if _is_narrow(self.scope):
            raise UnsupportedRegion(_NARROW)
        loops, knobs = self._best()
        if not loops.used:
            return KernelWriter(None, notes=loops.notes)
        scope, instructions = self.scope, [one for one in self.scope.core.instructions if one.name in loops.used]
        weights = packed(self.sums.weights, Packing(knobs.lanes, knobs.vector))
        scope.constants = {"weights": weights, "bias": padded(self.sums.inside, knobs.lanes), **scope.constants}
        parameters = scope.parameters()
        types = {parameter.name: parameter.c_type for parameter in parameters}
        declared = {parameter.name: parameter.declaration for parameter in parameters}

        def write(name: str) -> Lines:
            """The kernel under this name: its end as a function of one sum, then the loops."""
            functions = [replace(f, parameters=tuple(types)) if f.name == ENTRY else f for f in loops.functions]
            if MULTIPLY_ADD in scope.core.functions:
                functions = [replace(f, lines=tuple(map(_added, f.lines))) for f in functions]
            if streams := scope.core.streams if knobs.straight else None:
                for used in instructions:
                    functions = [replace(f, lines=tuple(with_streams(f.lines, used, streams))) for f in functions]
            head = self.end.write(f"{name}_finish", types)
            return [*head, "", *write_functions(functions, name, types, ENTRY, declared, knobs.staging is not None)]

        texts = tuple(one.declarations for one in instructions if one.declarations)
        return KernelWriter(write, declarations=texts, instructions=loops.used, notes=loops.notes)

    def _best(self) -> tuple[Loops, Knobs]:
        """The loops for the first instruction that applies; for the last one where none does."""
        notes: dict[str, None] = {}
        for knobs in self.blocks():
            loops = _loops(self.sizes, self.inside, knobs, self.end.extras, self.scope.core.instructions)
            if loops.used:
                return loops, knobs
            notes.update(dict.fromkeys(loops.notes))
        return Loops((), (), tuple(notes)), knobs


def scheduled_loops(scope: KernelScope) -> ScheduledLoops:
    """The loops of a region of sums of products.

    Raises:
        Unsupported: the loops are not described here: other types than int8, groups, several images, tables.
    """
    products = products_of(scope)
    sums, window = sums_of(scope, products), products.window
    source = scope.graph.types[scope.source()]
    if source.dtype is not DType.INT8 or sums.weights.dtype != np.int8 or sums.kind != "int32_t":
        reason = f"scheduled kernels multiply int8 by int8 into int32, found {source}."
        raise UnsupportedRegion(_NARROW if _is_narrow(scope) else reason)
    if window.batch > 1 or window.channels != sums.weights.shape[3]:
        reason = "scheduled kernels compute one image without groups."
        raise UnsupportedRegion(_NARROW if _is_narrow(scope) else reason)
    result = (*window.outputs, len(products.weights))
    walk = (window.kernel, window.stride, window.dilation, window.before, sums.pad_value)
    sizes = ConvolutionSizes((*window.size, window.channels), result, *walk)
    inside = InteriorPixels(window.inside(ROW), window.inside(COLUMN))
    scope.input(scope.source(), "input")
    end = end_function(scope, lambda text, _: (sums.value(text), 0))
    return ScheduledLoops(scope, sums, sizes, inside, end)


def _added(line: str) -> str:
    """A line, one that adds a product alone with the core's own function for it."""
    return _PRODUCT.sub(rf"\1\2 = {MULTIPLY_ADD}(\2, \3, \4);", line)


def packed(weights: Array, packing: Packing) -> Array:
    """[outputs, KH, KW, depth] as the loops read them, flat: [outputs / lanes, taps / vector, lanes, vector]."""
    outputs, taps = len(weights), int(np.prod(weights.shape[1:]))
    rows = -(-outputs // packing.lanes) * packing.lanes
    columns = -(-taps // packing.vector) * packing.vector
    whole = np.zeros((rows, columns), weights.dtype)
    whole[:outputs, :taps] = weights.reshape(outputs, taps)
    split = whole.reshape(rows // packing.lanes, packing.lanes, columns // packing.vector, packing.vector)
    return np.ascontiguousarray(split.transpose(0, 2, 1, 3)).reshape(-1)


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
    known = [(i.name, i.meaning, i.c, i.alignment, *(astuple(m) for m in i.memories)) for i in instructions]
    described = (text, astuple(sizes), astuple(inside), astuple(knobs), known)

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

    return kept_loops(repr(described), make) or Loops((), (), (NOT_SHIPPED,))
