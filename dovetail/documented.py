"""Docstrings of classes with the types, defaults and meanings of their attributes, as `help` and editors show them."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import pairwise

from dovetail.records import Record


class Attribute(Record):
    """An attribute of a class, as its source describes it."""

    name: str
    """Its name."""
    type: str
    """The annotation; empty for a member of an enumeration."""
    default: str
    """The expression of its default; empty where a value must be given, or where the expression is long."""
    text: str
    """Its meaning in one or more sentences; empty where the source has none."""

    def __str__(self) -> str:
        """The line that `help` shows."""
        kind = " = ".join(filter(None, (self.type, self.default)))
        return f"    {self.name}{f' ({kind})' if kind else ''}: {self.text}"


_LONGEST = 30
"""Characters of a default that is shown."""
_EMPTY = {
    "field(default_factory=dict)": "{}",
    "field(default_factory=list)": "[]",
    "field(default_factory=tuple)": "()",
}
"""Defaults of dataclasses that have a shorter form."""


@cache
def _tree(module: str) -> ast.Module:
    """The syntax tree of a module."""
    return ast.parse(inspect.getsource(sys.modules[module]))


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """The classes of a module by their names."""
    return {node.name: node for node in ast.walk(_tree(module)) if isinstance(node, ast.ClassDef)}


def _described(body: list[ast.stmt]) -> Iterator[Attribute]:
    """The attributes that a class's own body sets, or the constants of a module's body."""
    for node, after in pairwise([*body, ast.Pass()]):
        target: ast.expr
        if isinstance(node, ast.AnnAssign):
            target, annotation = node.target, ast.unparse(node.annotation)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, annotation = node.targets[0], ""
        else:
            continue
        said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and after.value.value
        if isinstance(target, ast.Name) and not target.id.startswith("_") and (annotation or said):
            default = ast.unparse(node.value) if node.value and annotation else ""
            default = _EMPTY.get(default, default)
            yield Attribute(
                target.id,
                annotation.removeprefix("ClassVar[").removesuffix("]") if "ClassVar" in annotation else annotation,
                default if len(default) <= _LONGEST and not default.startswith("field(") else "",
                " ".join(str(said or "").split()),
            )


def attributes_of(kind: type) -> list[Attribute]:
    """The public attributes of a class of this package, in order; of its bases only the fields of a dataclass.

    An option of a command has its help as meaning, and a field that a class defines again the meaning in the base.
    """
    fields_of = {one.name: one for one in fields(kind)} if is_dataclass(kind) else {}
    found: dict[str, Attribute] = {}
    meanings: dict[str, str] = {}
    for base in reversed([one for one in kind.__mro__ if one.__module__.split(".")[0] == "dovetail"]):
        for own in _described(_classes(base.__module__)[base.__qualname__.rpartition(".")[2]].body):
            flag = fields_of[own.name].metadata.get("flag") if own.name in fields_of else None
            meanings[own.name] = own.text or (flag.help if flag else meanings.get(own.name, ""))
            if base is kind or own.name in fields_of:
                found[own.name] = Attribute(own.name, own.type, own.default, meanings[own.name])
    return list(found.values())


def constants_of(module: str) -> list[Attribute]:
    """The public constants of an imported module that have a docstring."""
    return [one for one in _described(_tree(module).body) if one.text]


class _AttributeDocs:
    """A class's docstring, put together when it is read."""

    def __init__(self, own: str) -> None:
        self.own = own

    def __get__(self, instance: object, owner: type) -> str:
        lines = [str(one) for one in attributes_of(owner) if one.text]
        return "\n".join([inspect.cleandoc(self.own), *(["", "Attributes:", *lines] if lines else [])])


def summary_of(kind: type) -> str:
    """The docstring of a class, without its attributes."""
    text = vars(kind).get("__doc__")
    return text.own if isinstance(text, _AttributeDocs) else text or ""


def document(module: str) -> None:
    """Let `help` of a module's public classes show their attributes.

    Args:
        module: name of an imported module; its `__all__`, if there is one, names the classes defined elsewhere.
    """
    names = vars(sys.modules[module])
    public = names.get("__all__") or [name for name in names if not name.startswith("_")]
    for kind in (names.get(name) for name in public):
        if isinstance(kind, type) and kind.__module__.split(".")[0] == "dovetail" and "<" not in kind.__qualname__:
            text = vars(kind).get("__doc__")
            if isinstance(text, str):
                kind.__doc__ = _AttributeDocs(text)  # type: ignore[assignment]
