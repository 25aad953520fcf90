"""Kernels whose weights lie as 16 bits: their sums may end in one product and one shift."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dovetail.ir.operators.arithmetic import Requantize
from dovetail.ir.requantisation.raised import RaisedSum, raised_sum
from dovetail.ir.types import Array
from dovetail.kernels.kernel import RAISED, Expression, Index, Turns
from dovetail.kernels.scope import REQUANTISED, KernelScope
from dovetail.kernels.sums import SumConstants, SumNest
from dovetail.target.pattern import Match, match_pattern


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
