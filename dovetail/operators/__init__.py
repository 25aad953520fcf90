"""Operators as classes: the public interface a user's own are written against, and those bundled the same way.

    from dovetail.operators import Array, DType, Said, TensorType, UserOperator

A file of such classes is given with `--operators`, a target names them (`Target.operators`), or a package declares
each as an entry point of `dovetail.operators`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path

from dovetail import plugins
from dovetail.documented import document
from dovetail.errors import DovetailError, ModelError
from dovetail.ir.operators import OPERATORS
from dovetail.ir.operators.base import require
from dovetail.ir.operators.user import Said, SaidOperand, UserOperator
from dovetail.ir.types import Array, DType, TensorType
from dovetail.notes import Kind, Note, Tell, silent
from dovetail.user_file import import_file

__all__ = [
    "Array",
    "DType",
    "Said",
    "SaidOperand",
    "TensorType",
    "UserOperator",
    "installed_operators",
    "known_operators",
    "load_operators",
    "require",
]  # fmt: skip

_WRITTEN = "write it as in docs/own_operators.md"


def installed_operators(tell: Tell = silent) -> tuple[type[UserOperator], ...]:
    """The operators of installed packages, Dovetail's own first; `tell` hears of those that cannot be used."""
    kinds, errors = _installed()
    for error in errors:
        tell(Note(Kind.LEFT_OUT, f"{error.where}: {error.what}"))
    return kinds


@cache
def _installed() -> tuple[tuple[type[UserOperator], ...], tuple[DovetailError, ...]]:
    kinds, errors = plugins.load_all(plugins.OPERATORS, _accepted)
    return tuple(kinds.values()), errors


def _accepted(value: object) -> type[UserOperator]:
    if not isinstance(value, type) or not issubclass(value, UserOperator):
        raise ModelError(f"is no subclass of UserOperator: {value!r}", where="entry point", hint=_WRITTEN)
    _check_names([value.__name__])
    _check(value, value.__module__)
    return value


def load_operators(path: Path) -> tuple[type[UserOperator], ...]:
    """The operators that the Python file at a `path` defines.

    Raises:
        TargetError: the file does not import.
        ModelError: it defines no operator, or one that is not complete.
    """
    module = import_file(path)
    held = [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__]
    found = tuple(one for one in held if issubclass(one, UserOperator) and (one.custom_code or one.op_type))
    if not found:
        raise ModelError(
            "the file defines no operator with a custom_code or an op_type", where=str(path), hint=_WRITTEN
        )
    for kind in found:
        _check(kind, f"{path}:{inspect.getsourcelines(kind)[1]}")
    names = [name for kind in found for name in (kind.custom_code, f"{kind.domain}::{kind.op_type}") if name.strip(":")]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ModelError(f"the file defines two operators {twice[0]}", where=str(path), hint="leave one of them out")
    known_operators(found)
    return found


def _check(kind: type[UserOperator], where: str) -> None:
    missing = [name for name in ("results", "compute") if getattr(kind, name) is getattr(UserOperator, name)]
    own = [name for name in vars(kind).get("__annotations__", {}) if "ClassVar" not in str(kind.__annotations__[name])]
    if missing:
        raise ModelError(f"the operator {kind.__name__} has no {missing[0]}", where=where, hint=_WRITTEN)
    if own and (not is_dataclass(kind) or own[0] not in kind.__dataclass_fields__):
        hint = "put @dataclass(frozen=True) before the class"
        raise ModelError(f"{kind.__name__} has the attribute {own[0]} and is no dataclass", where=where, hint=hint)


def known_operators(own: Iterable[type[UserOperator]]) -> dict[str, type[UserOperator]]:
    """Operators of packages and a user's own by the names of their classes, as saved graphs have them.

    Raises:
        ModelError: a class has the name of one of Dovetail's operators.
    """
    by_name = {kind.__name__: kind for kind in (*installed_operators(), *own)}
    _check_names(by_name)
    return by_name


def _check_names(names: Iterable[str]) -> None:
    """Raise ModelError where a name is that of one of Dovetail's operators."""
    taken = next((name for name in names if name in OPERATORS), None)
    if taken is not None:
        hint = "give the class another name; what models call it is said in custom_code and op_type"
        raise ModelError(f"one of Dovetail's own operators is called {taken}", where=f"operator {taken}", hint=hint)


def combined(*groups: Sequence[type[UserOperator]]) -> tuple[type[UserOperator], ...]:
    """Operators of several sources, each once."""
    return tuple(dict.fromkeys(kind for group in groups for kind in group))


document(__name__)
