"""Kernels of operators that a class of the user's defines: one call of its C function."""

from __future__ import annotations

import re
from dataclasses import replace

from dovetail.errors import DovetailError
from dovetail.ir.operators.user import UserOperator
from dovetail.ir.types import DType, TensorType
from dovetail.kernels.c import Lines, c_type, integer, real, total
from dovetail.kernels.helpers import HELPERS
from dovetail.kernels.kernel import KernelWriter, UnsupportedRegion
from dovetail.kernels.registry import kernel
from dovetail.kernels.scope import KernelScope

_DEFINITION = re.compile(r"\b(\w+)\s*\([^;{}()]*\)\s*\{")


@kernel(UserOperator)
def _user(scope: KernelScope, operator: UserOperator) -> KernelWriter:
    if scope.tree:
        raise UnsupportedRegion(
            f"{type(scope.tree[0].operator).__name__} behind an operator of one's own is not fused."
        )
    if not operator.texts:
        raise UnsupportedRegion(f"{type(operator).__name__} has no C for the core.")
    _check(operator)
    kinds = [scope.type(position) for position in range(len(scope.node.inputs))]
    places, results = operator.parts(kinds)
    starts = operator.starts(results, places)

    def body() -> Lines:
        kept: Lines = []

        def room(stem: str, kind: TensorType) -> str:
            kept.append(f"static {c_type(kind.dtype)} {stem}[{max(kind.elements, 1)}];")
            return stem

        arguments = [
            total("output", starts[at]) if at in starts else room(f"unused_{at}", kind)
            for at, kind in enumerate(results)
        ]
        arguments += [scope.operand(at, f"operand_{at}") for at in range(len(kinds))]
        tables = enumerate(operator.tables(kinds))
        arguments += [scope.constant(scope.node.output, f"table_{at}", array) for at, array in tables]
        arguments += [room(f"scratch_{at}", kind) for at, kind in enumerate(operator.scratch(kinds))]
        arguments += [_number(operator, value) for value in operator.numbers(kinds)]
        return [*kept, f"{operator.function}({', '.join(arguments)});"]

    has_storage = len(starts) < len(results) or bool(operator.scratch(kinds))
    return replace(scope.writer(body, lambda: None, has_storage), declarations=operator.texts)


def _number(operator: UserOperator, value: int | float) -> str:
    """C of an argument; raises DovetailError for an integer beyond 32 bits."""
    if isinstance(value, float):
        return real(value)
    if not DType.INT32.low <= value <= DType.INT32.high:
        hint = "keep it within 32 bits, or refuse it in `results`"
        raise DovetailError(f"a number, {value}, is no int32_t", where=f"operator {type(operator).__name__}", hint=hint)
    return integer(int(value))


def _check(operator: UserOperator) -> None:
    """Refuse C without the function, or with one of a name that is ours."""
    where, names = f"operator {type(operator).__name__}", _DEFINITION.findall("\n".join(operator.texts))
    if not operator.function or operator.function not in names:
        what = f"its C defines no function {operator.function!r}"
        raise DovetailError(what, where=where, hint="let `function` name the function in `c`")
    taken = sorted(set(names) & set(HELPERS))
    if taken:
        hint = "give it another name, or call the one that is there"
        raise DovetailError(f"its C defines {taken[0]}, which the package's runtime has", where=where, hint=hint)
