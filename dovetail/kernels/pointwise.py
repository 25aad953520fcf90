"""Regions of pointwise operators alone, and the word-at-a-time sign flip between int8 and uint8."""

from __future__ import annotations

from collections.abc import Callable

from dovetail.graph.types import DType, full_box
from dovetail.kernels.epilogue import Index, Scope, finish
from dovetail.kernels.kernel import declarations
from dovetail.kernels.nest import nest
from dovetail.kernels.region import Region
from dovetail.kernels.text import function, loop
from dovetail.operators.arithmetic import Offset

_BYTES = (DType.INT8, DType.UINT8)
_WORDS = 4
"""Words flipped in one turn."""


def _flips_sign(region: Region) -> bool:
    """True for int8 + 128 as uint8 and back: each byte with its top bit inverted."""
    if len(region.tree) != 1 or not isinstance(region.tree[0].operator, Offset):
        return False
    node, types = region.tree[0], region.graph.types
    kinds = {types[node.inputs[0]].dtype, types[node.output].dtype}
    return kinds == set(_BYTES) and node.inputs[0] not in region.graph.constants


def _flip(region: Region, scope: Scope) -> list[str]:
    """The sign flip: XOR of whole words, which 8-byte aligned arrays load and store in one instruction each."""
    node = region.tree[0]
    name = scope.input(node.inputs[0])
    count = region.graph.types[node.output].elements
    step = 4 * _WORDS
    whole = count - count % step
    turn = [
        f"uint32_t words[{_WORDS}];",
        f"__builtin_memcpy(words, from + index, {step});",
        *(f"words[{word}] ^= 0x80808080u;" for word in range(_WORDS)),
        f"__builtin_memcpy(to + index, words, {step});",
    ]
    lines = [
        f"const uint8_t *from = __builtin_assume_aligned({name}, 8);",
        "uint8_t *to = __builtin_assume_aligned(output, 8);",
    ]
    if whole:
        lines += loop("index", whole, turn, step=step)
    if count - whole:
        lines += loop("index", count, ["to[index] = (uint8_t)(from[index] ^ 0x80u);"], start=whole)
    return lines


def write_pointwise(region: Region, scope: Scope) -> Callable[[str], list[str]]:
    """The writer of a region without an anchor."""

    def write(name: str) -> list[str]:
        if _flips_sign(region):
            lines = _flip(region, scope)
        else:
            shape = region.output_shape

            def body(index: Index, _: str) -> list[str]:
                return finish(scope, region.tree, index, None)

            lines = nest(shape, full_box(shape), body)
        return function(f"static void {name}", declarations(scope.parameters()), lines)

    return write
