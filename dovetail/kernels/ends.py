"""The ends of sums of products: as a C function of the sum and single elements, and in one product and one shift.

Sums whose weights lie as 16 bits may be raised so that they end in one product and one shift.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dovetail.ir.operators.arithmetic import Requantize
from dovetail.ir.requantisation.raised import RaisedSum, raised_sum
from dovetail.ir.types import Array
from dovetail.kernels.c import Lines, c_type, function, identifiers
from dovetail.kernels.epilogue import element
from dovetail.kernels.kernel import RAISED, Expression, Index, Turns, refuse
from dovetail.kernels.scope import REQUANTISED, KernelScope
from dovetail.kernels.sums import Ended, SumConstants, SumNest
from dovetail.kernels.window import anchored
from dovetail.target.pattern import Match, match_pattern

_KINDS = {"at_position": "position", "at_channel": "channel", "0": "one"}
_PROMOTED = {wide: wide for wide in ("int64_t", "uint32_t")}


@dataclass(frozen=True)
class Extra:
    """An array the end reads."""

    name: str
    kind: str
    """"channel": an element per output channel; "position": per element of the result; "one": one element."""


@dataclass(frozen=True)
class EndFunction:
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


@dataclass(frozen=True)
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
