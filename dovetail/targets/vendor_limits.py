"""Limits that libraries of int8 kernels have in common.

Of patterns whose parts go by these names: the operator of a layer is "layer", with a "pad" before it or not, and its
weights are "weights"."""

from __future__ import annotations

from typing import Any

from dovetail.graph.types import DType
from dovetail.operators.arithmetic import Requantize, Rounding
from dovetail.operators.movement import Pad
from dovetail.target import Constraint, Match


def padding(match: Match) -> Pad:
    """The padding of a layer's image, none where there is no pad."""
    none = Pad((0,) * 4, (0,) * 4, _layer(match).input_zero_point)
    return match.operator("pad", Pad) if match.has("pad") else none


def _layer(match: Match) -> Any:
    return match.nodes["layer"].operator


def _rounding(match: Match) -> set[Rounding]:
    operators = (node.operator for node in match.nodes.values())
    return {operator.rounding for operator in operators if isinstance(operator, Requantize)}


def _parameters(match: Match) -> int:
    """The most elements of a multiplier or shift."""
    nodes = [node for node in match.nodes.values() if isinstance(node.operator, Requantize)]
    return max(match.graph.types[value].elements for node in nodes for value in node.inputs[1:])


INT8 = Constraint(
    "values must be int8",
    lambda m: [m.graph.types[value].dtype for value in (*m.graph.inputs, m.root)],
    lambda kinds: set(kinds) == {DType.INT8},
)
BATCH = Constraint("the batch must be 1", lambda m: m.result.shape[0], lambda batch: batch == 1)
ROUNDS = Constraint("requantisations must be rounded twice", _rounding, lambda found: found == {Rounding.DOUBLE})
SINGLE = Constraint("multiplier and shift must be one for all channels", _parameters, lambda most: most == 1)
WEIGHTS = Constraint(
    "weights must be int8, zero point 0",
    lambda m: (m.type("weights").dtype, _layer(m).weight_zero_point),
    lambda found: found == (DType.INT8, 0),
)
FILL = Constraint(
    "padding must be the zero point",
    lambda m: (padding(m).value, _layer(m).input_zero_point),
    lambda found: found[0] == found[1],
)
