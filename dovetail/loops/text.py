"""Exo procedures from text, and the scalar functions their algorithms use."""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeAlias

from dovetail.errors import MissingExtraError

Procedure: TypeAlias = Any
"""An `exo.API.Procedure`; Exo has no types of its own to name here."""


def exo() -> Any:
    """The Exo package.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import exo
    except ImportError:
        raise MissingExtraError("exo", "loops", "scheduling the loops of an instruction-stream engine") from None
    return exo


def procedure(text: str, scope: Mapping[str, Any], instruction: str = "") -> Procedure:
    """The procedure a text defines, type- and bounds-checked by Exo.

    Args:
        text: one function as Exo reads it, without a decorator.
        scope: names the text uses beside the scalar functions: memories and instructions.
        instruction: for an instruction, its name; such a procedure is a meaning that `replace` can find.

    Raises:
        Exception: the text is no correct procedure; a bug of whoever wrote it.
    """
    package = exo()
    decorator = f"@instr({instruction!r})\n" if instruction else "@proc\n"
    source = f"from __future__ import annotations\n{decorator}{text.strip()}\n"
    name = f"<loops {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    names: dict[str, Any] = {"proc": package.proc, "instr": package.instr, "DRAM": package.DRAM}
    names.update(functions())
    names.update(scope)
    known = set(names)
    exec(compile(source, name, "exec"), names)  # our own text, never a user's file
    (made,) = (value for key, value in names.items() if key not in known and key not in ("annotations", "__builtins__"))
    return made


@cache
def functions() -> Mapping[str, Any]:
    """Scalar functions of int32 values: `shift_right(x, n)` (arithmetic), `least(a, b)`, `most(a, b)`."""
    exo()
    from exo.core.extern import Extern, Extern_Typecheck_Error

    class Binary(Extern):  # type: ignore[misc]  # Exo is untyped
        def __init__(self, name: str, c: str) -> None:
            super().__init__(name)
            self._c = c

        def typecheck(self, args: list[Any]) -> Any:
            if len(args) != 2:
                raise Extern_Typecheck_Error(f"{self._name} takes 2 arguments, got {len(args)}")
            return args[0].type

        def globl(self, prim_type: str) -> str:
            return ""

        def compile(self, args: list[str], prim_type: str) -> str:
            return self._c.format(*args)

    return {
        "shift_right": Binary("shift_right", "({0} >> {1})"),
        "least": Binary("least", "({0} < {1} ? {0} : {1})"),
        "most": Binary("most", "({0} > {1} ? {0} : {1})"),
    }


@cache
def memory(name: str) -> Any:
    """A memory for Exo to tell apart by name; where it lies and how it is filled is the target's affair."""
    return type(name, (exo().DRAM,), {})
