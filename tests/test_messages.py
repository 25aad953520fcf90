"""Every error says what is wrong, where, and what to do: the sources, read without running them.

What the tests provoke is looked at while they run (`errors_are_complete` in conftest.py).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import dovetail
from conftest import lacks
from dovetail.errors import DovetailError, MissingExtraError

ROOT = Path(dovetail.__file__).parent
LONGEST = 300

PLACED_BY_CALLER = {
    "program/verify.py": "`verify` adds the statement, the buffer or the end of the program, and what to do",
    "guests/check/run.py": "becomes a finding of `dovetail check`, which names the case and suspects a cause",
    "quantize/context.py": "the lowering adds the operator",
    "quantize/linear.py": "the lowering adds the operator",
    "quantize/rules.py": "the lowering adds the operator",
    "quantize/recurrent.py": "the lowering adds the operator",
}
"""Files whose errors get `where` from their one caller, and why."""
ADVISED_BY_CALLER = ("program/verify.py", "guests/check/run.py")
"""Those that get a hint so, too."""
ADVISED_BY_DOCUMENT = ("documents/__init__.py", "guests/mesh/mapping_file.py")
"""Files where None as a hint stands for that of the document."""
COMPLETE = {
    "MissingExtraError": "says all three of a package",
    "PluginError": "says package and entry point",
    "StreamError": "is about the instruction stream",
}
"""Errors that need no `where`, and why."""
DOORS = ("refuse", "refuse_if", "wrong_if", "unfit", "entry", "_refuse", "_refused", "fail")
"""What readers of models make their errors by; the place is the reader's, the hint has a default."""
NAMES = ("Ctrl", "Dovetail", "Verilator", "Keras")
"""Capital letters a message may begin with; so may words like ONNX, TFLite or NE16."""


@dataclass(frozen=True)
class Site:
    """A place where an error is made."""

    file: str
    call: ast.Call
    kind: str

    def __str__(self) -> str:
        return f"{self.file}:{self.call.lineno}"

    def keyword(self, name: str) -> ast.expr | None:
        """A keyword argument; None where it is absent or an empty text."""
        found = next((word.value for word in self.call.keywords if word.arg == name), None)
        return None if isinstance(found, ast.Constant) and not found.value else found

    def texts(self) -> Iterator[str]:
        """What stands literally in the message, with '_' for what is put in."""
        given = (*self.call.args, self.keyword("hint"))
        names = [node.id for node in given if isinstance(node, ast.Name)]
        for node in (*given, *(text for name in names for text in assigned(self.file).get(name, ()))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "_" for part in node.values)


@cache
def trees() -> dict[str, ast.Module]:
    """The package's files, parsed."""
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


@cache
def assigned(file: str) -> dict[str, list[ast.expr]]:
    """What the file's variables called `what` and `hint` are given: parts of messages put beside their error."""
    found: dict[str, list[ast.expr]] = {"what": [], "hint": []}
    for node in ast.walk(trees()[file]):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in found:
            found[node.targets[0].id].append(node.value)
    return found


@cache
def family() -> frozenset[str]:
    """The names of Dovetail's own errors, wherever they are declared."""
    found = {"DovetailError"}
    classes = [node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for _ in range(3):
        found |= {one.name for one in classes for base in one.bases if isinstance(base, ast.Name) and base.id in found}
    return frozenset(found)


@cache
def sites() -> tuple[Site, ...]:
    """Every call that makes an error."""
    found = []
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if name in family() or (name in DOORS and file.startswith("read/")):
                found.append(Site(file, node, name))
    return tuple(found)


def test_every_error_is_found() -> None:
    assert {"ModelError", "StreamError", "TuningError"} <= family() and len(sites()) > 800


def test_every_error_has_a_place() -> None:
    own = [site for site in sites() if site.kind not in (*DOORS, *COMPLETE) and site.file not in PLACED_BY_CALLER]
    assert [str(site) for site in own if site.keyword("where") is None] == []
    assert PLACED_BY_CALLER.keys() <= {site.file for site in sites()}, "an exception nobody needs"


def test_every_error_says_what_to_do() -> None:
    own = [site for site in sites() if site.kind not in (*DOORS, "MissingExtraError")]
    assert [str(site) for site in own if site.keyword("hint") is None and site.file not in ADVISED_BY_CALLER] == []


def test_no_way_to_make_an_error_has_an_empty_hint() -> None:
    """Defaults of parameters called `hint`: but for the error classes themselves, each has an advice."""
    empty = []
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or node.name == "__init__":
                continue
            given = node.args.args[len(node.args.args) - len(node.args.defaults) :]
            for argument, default in zip(given, node.args.defaults, strict=True):
                own = isinstance(default, ast.Constant) and default.value is None and file in ADVISED_BY_DOCUMENT
                if argument.arg == "hint" and isinstance(default, ast.Constant) and not default.value and not own:
                    empty.append(f"{file}:{node.lineno}")
    assert empty == []


def fault(text: str) -> str:
    """What is wrong with the form of a message; empty for nothing."""
    if len(text) > LONGEST:
        return f"{len(text)} characters are more than {LONGEST}"
    if text.endswith(".") and not text.endswith("..."):
        return "ends with a full stop"
    word = text.split(" ")[0].split("'")[0].rstrip(":,")
    named = word in NAMES or len(word) == 1 or any(letter.isupper() or letter.isdigit() for letter in word[1:])
    return "begins with a capital letter" if text[:1].isupper() and not named else ""


def test_messages_read_alike() -> None:
    """One sentence without a full stop and without a capital letter, as it stands behind a place and a colon."""
    wrong = [f"{site}: {fault(text)}: {text}" for site in sites() for text in site.texts() if fault(text)]
    assert wrong == []
    assert all(fault(text) for text in ("It is", "it is.", "x" * 301)) and not fault("NE16 is") and not fault("it is")


def test_what_a_missing_package_says() -> None:
    error = MissingExtraError("h5py", "keras", "reading a Keras model")
    assert str(error) == (
        "Python package 'h5py': reading a Keras model needs it, and it is not installed\n"
        "  what to do: pip install 'dovetail[keras]'"
    )


def test_incomplete_errors_are_noticed() -> None:
    """The rule conftest.py keeps, broken in each way."""
    assert lacks(DovetailError("x", where="y", hint="z")) == [] and lacks(ValueError("x")) == []
    assert lacks(DovetailError("x")) == ["where", "hint"]
    with pytest.raises(AssertionError, match="does not say hint"), pytest.raises(DovetailError):
        raise DovetailError("x", where="y")
    with pytest.raises(AssertionError, match="does not say where"), pytest.raises(SystemExit):
        try:
            raise DovetailError("x", hint="z")
        except DovetailError:
            raise SystemExit(1) from None
