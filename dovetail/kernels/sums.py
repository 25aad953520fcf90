"""Sums of products over a window: what is multiplied, the numbers folded into constants, how text names them, and how
they end: as they are, as a C function of the sum and single elements, or in one product and one shift.

The description is of a nest of loops over pixels, output channels, taps and depth. It is printed by `convolution` and
`depthwise` (blocks in registers, or sizes as members where layers share the text), `scheduled` (Exo) and the target
`opencl`. Sums whose weights lie as 16 bits may be raised so that they end in one product and one shift.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

import numpy as np
from numpy.typing import DTypeLike

from dovetail.ir.operators.arithmetic import Requantize
from dovetail.ir.operators.linear import Linear, accumulator_type
from dovetail.ir.requantisation.bounds import weight_sums
from dovetail.ir.requantisation.raised import RaisedSum, raised_sum
from dovetail.ir.types import Array, DType, blocks
from dovetail.kernels.c import Lines, c_type, function, identifiers, total
from dovetail.kernels.epilogue import element
from dovetail.kernels.kernel import RAISED, SHARING, Expression, Index, Turns, accumulate_type, refuse
from dovetail.kernels.scope import REQUANTISED, KernelScope
from dovetail.kernels.window import Nest, Number, WindowGeometry, anchored, window_of
from dovetail.records import Record
from dovetail.target.pattern import Match, match_pattern

ACTIVATIONS = (*SHARING, DType.INT8, DType.UINT8, DType.INT16)
MULTIPLY_ADD = "multiply_add"
"""The helper that is written for a product and a sum where the core computes it in its own way."""
Added = Callable[[str, str, str], str]
"""`SumNest.added`."""
Ended = Callable[[str, Index], tuple[Expression, int]]
"""From the C text of a sum and where it is: its value, and how many of the operators behind are computed with it."""


class Products(Record):
    """The products of a layer: window, weights and zero points."""

    window: WindowGeometry
    weights: Array
    """[outputs, KH, KW, depth]; depth 1 where each output reads a channel of its own."""
    zero_points: tuple[int, int]
    """The input's and the weights'."""

    @property
    def groups(self) -> int:
        """Parts of the outputs that read parts of the input channels."""
        return self.window.channels // int(self.weights.shape[3])

    @property
    def channelwise(self) -> bool:
        """True where every output reads the input channel of its own number alone."""
        return self.weights.shape[3] == 1 and len(self.weights) == self.window.channels


def products_of(scope: KernelScope, merged: bool = True) -> Products:
    """The products of the region's anchor, a `Linear`; raises Unsupported where its operands are of other types or not
    constant. A dense layer is a 1x1 convolution of an image one row high.

    Args:
        region: with such an anchor.
        scope: the kernel's parameters.
        merged: whether a pointwise convolution is of one row of all pixels.
    """
    operator, shape = scope.node.expect(Linear), scope.type(0).shape
    dense = operator.window(scope.types) is None
    if dense:
        scope.without_pad()
    scope.require(ACTIVATIONS)
    weights = operator.as_convolution(scope.known(scope.node.inputs[1]))
    window = _pixels(prod(shape[:-1]), shape[-1]) if dense else window_of(scope)
    if merged and not window.any_padded and window.kernel == window.stride == (1, 1):
        window = _pixels(window.batch * prod(window.size), window.channels)
    for name in scope.node.inputs[2:]:
        scope.known(name)
    return Products(window, weights, operator.zero_points)


def _pixels(count: int, channels: int) -> WindowGeometry:
    """A window of one tap over a row of pixels."""
    return WindowGeometry(1, (1, count), channels, (1, count), (1, 1), (1, 1), (1, 1), (0, 0))


class SumConstants(Record):
    """The numbers of a sum of products: what the kernel's constants hold."""

    weights: Array
    """Weights less their zero point, [outputs, KH, KW, depth], int8 where they fit, else int16."""
    inside: Array
    """Start of each sum where all taps are inside: bias less input zero point times sum of weights."""
    border: Array
    """Start of each sum where taps in the padding are left out and the pad value is taken off each element."""
    pad_value: int
    """The value of the padding."""
    kind: str
    """C type of a sum."""
    reach: int
    """No sum, partial or final, is larger than this."""
    wraps: bool
    """Whether sums are kept in 64 bits and their result wraps to 32."""
    bits: int = 8
    """Bits of a weight in the kernel's constants: below 8 they share bytes."""

    @property
    def stored(self) -> DType:
        """Type of the constants that hold the weights."""
        return DType.UINT8 if self.bits < 8 else DType.of(self.weights.dtype)

    def require_bytes(self) -> None:
        """Raise Unsupported where several weights share a byte."""
        refuse(self.bits < 8, "weights of less than a byte have no compact form.")

    def value(self, text: str) -> Expression:
        """A finished sum; it wraps to 32 bits where the operator's own type does and the sum may leave it."""
        if self.wraps:
            return Expression(f"(int32_t){text}", "int32_t", DType.INT32.low, DType.INT32.high)
        return Expression(text, self.kind, -self.reach, self.reach)


def sums_of(scope: KernelScope, products: Products) -> SumConstants:
    """Fold zero points and the pad value into the constants, exactly.

    With v the pad value: sum((x - zx) * w) over all taps = sum(x * w) + (bias - zx * sum(w)), and as padded
    taps hold v it is also sum((x - v) * w) over the taps inside + (bias + (v - zx) * sum(w)).
    """
    anchor, zero_points = scope.node, products.zero_points
    weights = products.weights
    low, high = int(weights.min()) - zero_points[1], int(weights.max()) - zero_points[1]
    kept: DTypeLike = np.int8 if low >= -128 and high <= 127 else np.int16
    stored = np.empty(weights.shape, kept) if zero_points[1] or weights.dtype != kept else weights
    for part in blocks(weights) if stored is not weights else ():
        stored[part] = weights[part].astype(np.int64) - zero_points[1]
    positive, negative = weight_sums(stored)
    total_weight, weight_reach = positive - negative, positive + negative
    bias = scope.graph.constants[anchor.inputs[2]].astype(np.int64) if len(anchor.inputs) > 2 else np.int64(0)
    pad_value, x = int(scope.pad_value), scope.source_dtype
    inside = bias - zero_points[0] * total_weight
    border = bias + (pad_value - zero_points[0]) * total_weight if scope.pad else inside
    farthest = max(-x.low, x.high) + abs(pad_value)
    reach = int((np.maximum(np.abs(inside), np.abs(border)) + weight_reach * farthest).max())
    kind = accumulate_type(-reach, reach)
    start = np.int32 if kind == "int32_t" else np.int64
    bits = scope.type(1).dtype.bits
    bits = bits if bits in WIDTHS and low >= -(1 << (bits - 1)) and high < 1 << (bits - 1) else 8
    wraps = kind == "int64_t" and accumulator_type(x) is DType.INT32
    return SumConstants(stored, inside.astype(start), border.astype(start), pad_value, kind, reach, wraps, bits)


class SumNest(Nest):
    """The nest of a sum of products."""

    sums: SumConstants

    @property
    def outputs(self) -> int:
        return len(self.sums.weights)

    def starts(self, clamped: bool, lanes: int = 1) -> str:
        """The constant each sum begins with, filled up to whole blocks of lanes."""
        scope, uses_border = self.scope, clamped and self.window.any_padded
        uses_border = uses_border and not np.array_equal(self.sums.border, self.sums.inside)
        array = self.sums.border if uses_border or scope.compact else self.sums.inside
        return scope.constant(
            "sums", "border_bias" if uses_border and not scope.compact else "bias", padded(array, lanes)
        )

    def less_padding(self, element: str, clamped: bool = True) -> str:
        """C text of an input element less what the padding holds, where taps may be in it."""
        taken: Number = self.sums.pad_value if clamped and self.window.any_padded else 0
        if self.scope.compact:
            taken = self.scope.number("sums", "pad_value", self.sums.pad_value)
        return total(element, -taken) if isinstance(taken, int) else f"{element} - {taken}"

    def added(self, total: str, left: str, right: str) -> str:
        """The statement that adds a product to a sum."""
        one = self.sums.kind == "int32_t" and not self.scope.compact and MULTIPLY_ADD in self.scope.core.functions
        return f"{total} = {MULTIPLY_ADD}({total}, {left}, {right});" if one else f"{total} += {left} * {right};"

    def weights(self, array: Array) -> str:
        """The constant of the weights in the order they are read; rows of narrow ones share bytes."""
        array = packed(array, self.sums.bits) if self.sums.bits < 8 else array
        return self.scope.constant("sums", "weights", array.reshape(-1))

    def tap_pointer(self, start: str, space: str = "") -> str:
        """The statement that points at the weights of a tap."""
        return f"{space}const {c_type(self.sums.stored)} *tap = {start};"


def padded(array: Array, lanes: int) -> Array:
    """Values per output, zeros where the last block of lanes is part-empty."""
    missing = -len(array) % lanes
    return np.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1)) if missing else array


def blocked(weights: Array, lanes: int) -> Array:
    """Weights [outputs, KH, KW, depth] in blocks of `lanes` outputs, side by side for each tap: [..., lanes]."""
    whole = padded(weights, lanes)
    return whole.reshape(-1, lanes, *weights.shape[1:]).transpose(0, 2, 3, 4, 1)


WIDTHS = (2, 4)
"""Bits of the weights that share bytes."""


def packed(values: Array, bits: int) -> Array:
    """Signed integers side by side, the first in the lowest bits, as uint8; every row of the last axis begins a byte.

    Args:
        values: of any shape; bytes a row does not fill hold zeros.
        bits: 2 or 4.
    """
    share = 8 // bits
    padded = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % share)])
    fields = (padded.astype(np.int64) & ((1 << bits) - 1)).reshape(*values.shape[:-1], -1, share)
    return np.asarray((fields << (bits * np.arange(share))).sum(axis=-1), dtype=np.uint8)


def row_bytes(count: int, bits: int) -> int:
    """Bytes of `count` weights that begin at a byte."""
    return -(-count * bits // 8)


def unpacked(array: str, bits: int, base: int, place: int) -> str:
    """C text of weight number `place`, known now, of those that begin at byte `base` of an array."""
    share = 8 // bits
    at, field = base + place // share, place % share
    return f"field_of({array}[{at}], {32 - bits * (field + 1)}, {32 - bits})"


def looked_up(array: str, bits: int, place: str) -> str:
    """C text of weight number `place`, found at run time, of an array packed without gaps."""
    return f"packed_{bits}({array}, {place})"


_KINDS = {"at_position": "position", "at_channel": "channel", "0": "one"}
_PROMOTED = {held: held for held in ("int64_t", "uint32_t", "float")}


class Extra(Record):
    """An array the end reads."""

    name: str
    kind: str
    """"channel": an element per output channel; "position": per element of the result; "one": one element."""


class EndFunction(Record):
    """The function."""

    c_type: str
    """C type of its result."""
    lines: tuple[str, ...]
    """Statements."""
    extras: tuple[Extra, ...]
    """The arrays of which it reads an element, its arguments behind the sum."""

    def write(self, name: str, types: Mapping[str, str]) -> Lines:
        """The C under a name; `types` has the C types of the arrays."""
        extras = (f"{_PROMOTED.get(types[extra.name], 'int32_t')} {extra.name}" for extra in self.extras)
        return function(f"static inline {self.c_type} {name}", ["int32_t sum", *extras], self.lines)


def end_function(scope: KernelScope, ended: Ended) -> EndFunction:
    """The end of a region's sums; `ended` says which operators are left behind the value that stands for a sum.

    Raises:
        Unsupported: it looks something up in a table, or reads an array in two ways.
    """
    extras: dict[str, Extra] = {}

    def read(array: str, index: str) -> str:
        extra = Extra(array, _KINDS[index])
        refuse(extras.setdefault(array, extra) != extra, f"{array} is read in two ways.")
        return array

    index = anchored(scope.output_shape, "at_position", "at_channel")
    with scope.reading(read):
        text = element(scope, index, *ended("sum", index))
    lines = (*scope.lines, f"return {text};")
    refuse(any("[" in line for line in lines), "scheduled kernels look nothing up in tables.")
    kind = c_type(scope.graph.types[scope.graph.outputs[0]].dtype)
    return EndFunction(kind, lines, tuple(extras[name] for name in identifiers(lines) if name in extras))


def raised_end(scope: KernelScope, sums: SumConstants) -> RaisedSum | None:
    """How the sums of a layer of int8 are raised; None where that is not exact or they do not begin their end so."""
    users = scope.graph.users()[scope.tree[0].output] if scope.tree else []
    match = match_pattern(REQUANTISED, scope.graph, users[0].output) if users else None
    if not isinstance(match, Match) or match.values["x"] != scope.node.output:
        return None
    operator, limits = match.operator("requantize", Requantize), match.nodes["clip"].operator.limited_to
    assert limits is not None
    return raised_sum(operator, limits, match.array("multiplier"), match.array("shift"), sums.inside, sums.weights)


class RaisedNest(SumNest):
    """The nest of a sum of products of which the weights lie as 16 bits."""

    raised: RaisedSum | None
    """None for sums that end as ever."""

    def raised_turns(self) -> Turns:
        """The requantisation of raised sums, if they are."""
        return {RAISED: float(self.scope.result.elements)} if self.raised else {}

    def powers(self, array: Array) -> Array:
        """An array of a row per channel as int64, raised."""
        wide = array.astype(np.int64)
        return wide if self.raised is None else wide << self.raised.powers.reshape(-1, *[1] * (array.ndim - 1))

    @property
    def begun(self) -> Array:
        """The start of each sum."""
        return self.powers(self.sums.inside).astype(np.int32)

    def ended(self, text: str, index: Index) -> tuple[Expression, int]:
        """The value of the C text of a sum at a place, and how many of the operators behind are computed with it."""
        if self.raised is None:
            return self.sums.value(text), 0
        scope, raised, requantised = self.scope, self.raised, self.scope.tree[0].output
        scope.begin(index)
        multiplier = scope.parameter(requantised, "multiplier", raised.multiplier)
        offset = scope.parameter(requantised, "offset", raised.offset)
        text = f"(multiply_add_upper({text}, {multiplier}, {offset}) >> {raised.shift})"
        return Expression(text, "int32_t", -raised.reach, raised.reach), 1
