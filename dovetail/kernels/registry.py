"""Writers of kernels and rules of pointwise operators, which each module registers by the operators' classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.base import Operator
from dovetail.ir.types import DType
from dovetail.kernels.kernel import (
    Expression,
    InstructedLoops,
    KernelChoices,
    KernelWriter,
    Turns,
    UnsupportedRegion,
)
from dovetail.kernels.scope import KernelScope
from dovetail.records import Record

T = TypeVar("T")
Family = Callable[[KernelScope, Any], KernelWriter]
"""From a region and its anchor's operator; raises Unsupported where there is no kernel."""


class InstructedWay(Record):
    """A way to write a kernel with the core's own instructions."""

    plan: Callable[[KernelScope], InstructedLoops]
    """Raises Unsupported where the region or the core is none for it."""
    explained: bool = False
    """Whether users are told why it is not taken."""


class KernelTraits(Record):
    """Further facts about the kernels of an anchor."""

    windowed: bool = False
    """They take in a Pad before the anchor, or say themselves why not."""
    packed: bool = False
    """They take operands that share bytes; those of pointwise operators alone do too."""
    once: bool = False
    """They compute every element of the result once."""
    compact: bool = False
    """They have a form of little code, whose sizes are members of a layer's block (`KernelScope.compact`); others are
    written as ever and left to the compiler to make small."""
    borders: bool = False
    """They may have a function of single pixels that layers share (`KernelScope.single`) beside that of several."""
    ways: tuple[InstructedWay, ...] = ()
    """Tried in order on cores with instructions of their own, for integers, before the kernel is written out."""


FAMILIES: dict[type[Operator], Family] = {}
"""Writers of the kernels of anchors."""
TRAITS: dict[type[Operator], KernelTraits] = {}
"""Traits of these kernels."""
FLOAT_FAMILIES: dict[type[Operator], Family] = {}
"""Writers where the first operand is float32, if they are not those of `FAMILIES`."""
OFFERED: dict[type[Operator], Callable[[KernelScope], KernelChoices | None]] = {}
"""The knobs of kernels that are written out; None or absent for nothing to choose."""
TURNS: dict[type[Operator], Callable[[KernelScope], Turns]] = {}
"""Counts of the loops of kernels; others are counted by the elements they read and make."""
ENDINGS: dict[type[Operator], Callable[[Graph, Node], str]] = {}
"""The part of a kernel that is a pointwise operator on an element, if it has no name of the operator's."""
RULES: dict[type[Operator], Callable[..., Expression]] = {}
"""The C of pointwise operators, from (scope, node, operator, the elements of its operands)."""


def kernel(
    *operators: type[Operator], table: dict[type[Operator], Any] | None = None, **traits: Any
) -> Callable[[T], T]:
    """Registers a function for operators in one of the tables above, by default the writer of their kernels with the
    fields of `KernelTraits`."""

    def register(function: T) -> T:
        if table is None:
            TRAITS.update(dict.fromkeys(operators, KernelTraits(**traits)))
        entries: dict[type[Operator], Any] = FAMILIES if table is None else table
        entries.update(dict.fromkeys(operators, function))
        return function

    return register


def registered(table: Mapping[type[Operator], T], operator: Operator) -> T | None:
    """The entry of an operator's class or of the nearest of its bases; None for none."""
    return next((table[kind] for kind in type(operator).__mro__ if kind in table), None)


def family_of(scope: KernelScope) -> tuple[Family, KernelTraits]:
    """The writer of the kernels of a region's anchor and their traits; raises Unsupported where there is none."""
    operator = scope.node.operator
    family, traits = registered(FAMILIES, operator), registered(TRAITS, operator)
    if family is None or traits is None:
        raise UnsupportedRegion(f"there is no core kernel for {type(operator).__name__}.")
    if not traits.windowed:
        scope.without_pad()
    if scope.type(0).dtype is not DType.FLOAT32:
        return family, traits
    return registered(FLOAT_FAMILIES, operator) or family, KernelTraits(traits.windowed, traits.packed, traits.once)


def is_pointwise(operator: Operator) -> bool:
    """True for operators that compute each element from the same place of their operands."""
    return operator.pointwise > 0


def rule(*operators: type[Operator]) -> Callable[[T], T]:
    """Registers the C of pointwise operators."""
    return kernel(*operators, table=RULES)
