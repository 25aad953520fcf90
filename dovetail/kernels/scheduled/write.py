"""Scheduled kernels of regions: their loops, their epilogue, and the C text; kept on disk by content."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from importlib.util import find_spec

import numpy as np

from dovetail.ir.types import Array, DType
from dovetail.kernels.c import Lines, function
from dovetail.kernels.kernel import KernelChoices, KernelWriter, Turns, UnsupportedRegion
from dovetail.kernels.scheduled.algorithms import ENTRY, Knobs, Packing, ScheduledLayer, conv2d, fully_connected
from dovetail.kernels.scheduled.knobs import blocks, is_product, lanes_of, turns_of
from dovetail.kernels.scheduled.printed import c_functions, lines_of, moving_pointers, statements
from dovetail.kernels.scheduled.store import NOT_SHIPPED, CFunction, Loops, kept_loops
from dovetail.kernels.scheduled.streams import with_streams
from dovetail.kernels.scope import KernelScope
from dovetail.kernels.sums import (
    MULTIPLY_ADD,
    EndFunction,
    Extra,
    SumConstants,
    end_function,
    padded,
    products_of,
    sums_of,
)
from dovetail.kernels.window import COLUMN, ROW
from dovetail.records import Record
from dovetail.target.chip import CoreInstruction

_PRODUCT = re.compile(r"( *)(sum\[\w+\]) \+= \(int32_t\)\((\w+\[[^\[\]]*\]) \* (\w+\[[^\[\]]*\])\);")


_NARROW = "its operands are bytes, and a byte holds several elements here."


def _is_narrow(scope: KernelScope) -> bool:
    return any(scope.type(operand).dtype.bits < 8 for operand in (0, 1))


class ScheduledLoops(Record):
    """The loops of a layer of sums of products, for the core's own instructions."""

    scope: KernelScope
    sums: SumConstants
    layer: ScheduledLayer
    end: EndFunction

    def block(self) -> tuple[Knobs, int]:
        """The block of the first instruction that fits, as if it were found in the loops, and the instructions that
        bring that an operand; raises Unsupported where none does."""
        for block in blocks(self.layer, self.scope.core):
            return block
        raise UnsupportedRegion("no instruction of the core is a product that fits.")

    def offered(self) -> KernelChoices:
        """No knobs."""
        self.block()
        return KernelChoices()

    def turns(self) -> Turns:
        """How often the parts of the loops run."""
        knobs, brought = self.block()
        counts, several = turns_of(knobs, self.layer, brought), -(-self.layer.taps // knobs.vector) > knobs.unroll
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
        parameters, streams = scope.parameters(), scope.core.streams
        types = {parameter.name: parameter.c_type for parameter in parameters}
        declarations_of = {parameter.name: parameter.declaration for parameter in parameters}

        def lines(made: CFunction) -> Lines:
            """The lines of a function, as the core computes them best."""
            own = map(_added, made.lines) if MULTIPLY_ADD in scope.core.functions else made.lines
            body = statements(own)
            if streams is not None and knobs.straight:
                for used in instructions:
                    body = with_streams(body, used, streams)
            if knobs.staging:
                body = moving_pointers(body, {name: types[name] for name in made.parameters if name in types})
            return _singles_first(lines_of(body), made, types)

        def write(name: str) -> Lines:
            """The kernel under this name: its end as a function of one sum, then the loops."""
            named = {made.name: f"{name}_{made.name}" for made in loops.functions} | {ENTRY: name}
            called = re.compile(rf"\b({'|'.join([*named, 'finish'])})\(")
            named["finish"] = f"{name}_finish"
            text = self.end.write(named["finish"], types)
            for made in loops.functions:
                made = replace(made, parameters=tuple(types)) if made.name == ENTRY else made
                own = [called.sub(lambda match: named[match[1]] + "(", line) for line in lines(made)]
                declared = [declarations_of.get(one, f"int32_t {one}") for one in made.parameters]
                text += ["", *function(f"static void {named[made.name]}", declared, own)]
            return text

        texts = tuple(one.declarations for one in instructions if one.declarations)
        return KernelWriter(write, declarations=texts, instructions=loops.used, notes=loops.notes)

    def _best(self) -> tuple[Loops, Knobs]:
        """The loops for the first instruction that applies; for the last one where none does."""
        notes: dict[str, None] = {}
        for knobs, _ in blocks(self.layer, self.scope.core):
            others = [one for one in self.scope.core.instructions if not lanes_of(one)]
            loops = _loops(self.layer, knobs, self.end.extras, others)
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
    layer = ScheduledLayer(window, len(products.weights), sums.pad_value)
    scope.input(scope.source(), "input")
    end = end_function(scope, lambda text, _: (sums.value(text), 0))
    return ScheduledLoops(scope, sums, layer, end)


def _added(line: str) -> str:
    """A line, one that adds a product alone with the core's own function for it."""
    return _PRODUCT.sub(rf"\1\2 = {MULTIPLY_ADD}(\2, \3, \4);", line)


def _singles_first(lines: Lines, made: CFunction, types: Mapping[str, str]) -> Lines:
    """The lines with arrays of one element read once, before the loops."""
    text = "\n".join(lines)
    reads = {name: len(re.findall(rf"\b{name}\[", text)) for name in made.parameters if name in types}
    single = [name for name, count in reads.items() if count and count == text.count(f" {name}[0]")]
    for name in single:
        text = text.replace(f" {name}[0]", f" {name}_0")
    return [*(f"const {types[name]} {name}_0 = {name}[0];" for name in single), *text.splitlines()]


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
    layer: ScheduledLayer, knobs: Knobs, extras: Sequence[Extra], instructions: Sequence[CoreInstruction]
) -> Loops:
    """The scheduled loops; none, with the reason, where they were not made before and Exo is not installed."""
    packing, window = Packing(knobs.lanes, knobs.vector), layer.window
    dense = window.kernel == (1, 1) and window.size[0] == window.stride[1] == 1 and not any(window.before)
    text = (fully_connected if dense else conv2d)(layer, packing, extras)
    image, result = (*window.size, window.channels), (*window.outputs, layer.outputs)
    walk = (window.kernel, window.stride, window.dilation, window.before, layer.pad_value)
    known = [(i.name, i.meaning, i.c, i.alignment, *(astuple(m) for m in i.memories)) for i in instructions]
    described = (text, (image, result, *walk), (window.inside(ROW), window.inside(COLUMN)), astuple(knobs), known)

    def make() -> Loops | None:
        if not find_spec("exo"):
            return None
        from exo.core.memory import MemGenError

        from dovetail.kernels.scheduled.schedules import schedule_conv2d, schedule_fully_connected
        from dovetail.kernels.scheduled.select import Selection, scope
        from dovetail.loops.procedures import procedure

        selection = Selection(instructions)
        schedule = schedule_fully_connected if dense else schedule_conv2d
        scheduled = schedule(procedure(text, scope()), layer, knobs, selection)
        used = tuple(i.name for i in instructions if i.name in selection.used)
        try:
            if any(is_product(i) for i in instructions if i.name in used):
                return Loops(c_functions(scheduled), used, selection.notes())
        except MemGenError:  # operands were staged in registers that only instructions fill, and one was not found
            pass
        return Loops((), (), selection.notes())

    return kept_loops(repr(described), make) or Loops((), (), (NOT_SHIPPED,))
