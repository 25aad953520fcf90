"""Docstrings of classes with those of their attributes behind, as `help` and interactive Python show them."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable
from dataclasses import is_dataclass
from itertools import pairwise


class _AttributeDocs:
    """A class's docstring, put together when somebody reads it."""

    def __init__(self, own: str) -> None:
        self._own = own

    def __get__(self, instance: object, owner: type) -> str:
        (found,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        pairs = pairwise(found.body) if isinstance(found, ast.ClassDef) else ()
        said = [
            f"    {a.target.id}: {' '.join(str(b.value.value).split())}"
            for a, b in pairs
            if isinstance(a, ast.AnnAssign) and isinstance(a.target, ast.Name)
            if isinstance(b, ast.Expr) and isinstance(b.value, ast.Constant)
        ]
        return "\n".join([inspect.cleandoc(self._own), *(["", "Attributes:", *said] if said else [])])


def document(kinds: Iterable[object]) -> None:
    """Let dataclasses among these show what their attributes mean."""
    for kind in kinds:
        if isinstance(kind, type) and is_dataclass(kind):
            kind.__doc__ = _AttributeDocs(kind.__doc__ or "")  # type: ignore[assignment]
