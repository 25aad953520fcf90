"""Kernels of pointwise operators alone: loops over whole arrays, with shorter statements for some of them."""

from __future__ import annotations

from math import prod

from dovetail.ir.operators.arithmetic import Offset
from dovetail.ir.types import DType, Shape, full_box
from dovetail.kernels.additions import addition_lines
from dovetail.kernels.c import Lines, indent, loop, total
from dovetail.kernels.epilogue import finish
from dovetail.kernels.kernel import KernelWriter
from dovetail.kernels.quantising import quantising_lines
from dovetail.kernels.rectified import rectified_lines
from dovetail.kernels.scope import KernelScope
from dovetail.kernels.walks import nest
from dovetail.target.pattern import apply, operand

_BYTES = (DType.INT8, DType.UINT8)
_FLIPPED = 64
"""Bytes `flip_signs` takes."""
_FLIPS = 4
"""Calls of it in one turn, where there are several such turns."""


def _flip(scope: KernelScope) -> Lines | None:
    """The sign flip, int8 + 128 as uint8 and back: XOR of whole words, which 8-byte aligned arrays load and store in
    one instruction each."""
    match = scope.whole(apply(Offset, operand("x")))
    if match is None or {match.type("x").dtype, match.result.dtype} != set(_BYTES):
        return None
    if match.values["x"] in scope.graph.constants:
        return None
    name, count = scope.input(match.values["x"]), match.result.elements
    whole, words_end = count - count % _FLIPPED, count - count % 4
    together = _FLIPPED * _FLIPS
    several = count - count % together if count > _FLIPS * together else 0
    lines = [
        f"const uint8_t *from = __builtin_assume_aligned({name}, 8);",
        "uint8_t *to = __builtin_assume_aligned(output, 8);",
    ]
    for start, end, step in ((0, several, together), (several, whole, _FLIPPED)):
        places = [total("index", place) for place in range(0, step, _FLIPPED)]
        flips = [f"flip_signs(to + {place}, from + {place});" for place in places]
        lines += loop("index", end, flips, start=start, step=step) if end > start else []
    if words_end > whole:
        word = ["uint32_t word;", "__builtin_memcpy(&word, from + index, 4);", "word ^= 0x80808080u;"]
        lines += loop("index", words_end, [*word, "__builtin_memcpy(to + index, &word, 4);"], start=whole, step=4)
    if count > words_end:
        lines += loop("index", count, ["to[index] = (uint8_t)(from[index] ^ 0x80u);"], start=words_end)
    return lines


def _by_bytes(scope: KernelScope) -> Lines | None:
    """The loop over whole bytes of what shares them, where all operands are of the result's shape or one element: each
    byte is read and written once. None for other regions."""
    count = prod(scope.output_shape)
    packed = [layout.fields for layout in scope.layouts.values() if layout.packed]
    step = max(packed, default=1)
    shapes: list[Shape] = []

    def one(lane: int) -> Lines:
        """The statements of an element of a turn."""

        def index(operand: Shape) -> str:
            shapes.append(operand)
            return "0" if prod(operand) == 1 else total("index", lane)

        scope.turn = lane
        return ["{", *indent(finish(scope, index, None)), "}"]

    lines = [line for lane in range(step) for line in one(lane)]
    scope.turn = None
    if step == 1 or count % step or any(prod(each) not in (1, count) for each in shapes):
        return None
    output = scope.layouts.get(scope.graph.outputs[0])
    if output is not None and output.packed:
        places, shift = range(step // output.fields), output.fields.bit_length() - 1
        lines = [*(f"uint32_t byte_{place} = 0u;" for place in places), *lines]
        lines += [f"output[{total(f'(index >> {shift})', place)}] = (uint8_t)byte_{place};" for place in places]
    return loop("index", count, lines, step=step)


def write_pointwise(scope: KernelScope) -> KernelWriter:
    """The writer of a region without an anchor."""

    def body() -> Lines:
        for form in _FORMS:
            if (lines := form(scope)) is not None:
                return lines
        shape = scope.output_shape
        return nest(shape, full_box(shape), lambda index, _: finish(scope, index, None))

    return scope.writer(body, lambda: finish(scope, lambda shape: "0", None))


_FORMS = (_flip, rectified_lines, addition_lines, quantising_lines, _by_bytes)
"""Shorter statements for some regions of pointwise operators; each gives None for others."""
