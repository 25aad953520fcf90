"""The operators of graphs; `OPERATORS` has all of them by name: what a saved graph may hold."""

from __future__ import annotations

from dovetail.ir.operators import (
    activation,
    arithmetic,
    bits,
    elementwise,
    fixed,
    linear,
    movement,
    recurrent,
    reduction,
    sequence,
)
from dovetail.ir.operators.base import Operator

OPERATORS: dict[str, type[Operator]] = {
    kind.__name__: kind
    for module in (activation, arithmetic, bits, elementwise, fixed, linear, movement, recurrent, reduction, sequence)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Operator) and kind.__module__ == module.__name__
    if not kind.__subclasses__()
}
"""The operator classes by their names: those of the modules here that are no other's base."""
