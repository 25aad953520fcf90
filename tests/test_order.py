"""Which way imports may go: down the list of stages, never back up, and never in a circle."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick
PACKAGE = Path(__file__).resolve().parents[1] / "dovetail"
PUBLIC = PACKAGE.parent / "docs" / "reference" / "modules.toml"
LEANS = {
    ("dovetail.guests.agent", "dovetail.guests.mesh"),
    ("dovetail.guests.calibrate", "dovetail.guests.check"),
    ("dovetail.guests.ptq", "dovetail.guests.report"),
    ("dovetail.guests.sweep", "dovetail.guests.report"),
    ("dovetail.guests.tune", "dovetail.guests.report"),
    ("dovetail.guests.zoo", "dovetail.guests.ptq"),
}
"""Guests that use another guest."""
CORE = (
    *(
        "version",
        "records",
        "names",
        "documented",
        "errors",
        "notes",
        "files",
        "folders",
        "documents",
        "templates",
        "farm",
        "user_file",
        "plugins",
        "ir",
        "operators",
        "read",
    ),
    *(
        "quantize",
        "target",
        "legalize",
        "loops",
        "kernels",
        "program",
        "timing",
        "schedule",
        "codegen",
        "sim",
        "fields",
    ),
    *(
        "options",
        "compile",
        "run",
        "bounds",
        "energy",
        "claims",
        "report",
        "arrays",
        "prove",
        "explain",
        "survey",
        "api",
        "cli",
        "__main__",
    ),
)
"""The compiler of a described target: everything but the guests."""
GUESTS = ("targets", "guests")
"""What only uses the compiler, and comes in by entry points."""
ORDER = (*CORE, *GUESTS)
"""Folders and files of the package in the order data flows; each imports only what stands before it."""
WITHIN = {
    "schedule": (
        *(
            "solver",
            "region",
            "partition",
            "policies",
            "tiles",
            "knobs",
            "weights",
            "cores",
            "assign",
            "layout",
            "joint",
            "stripe",
            "pipeline",
            "plan",
            "tuning",
        ),
    )
}
"""The order within a folder, of what stands in it."""


def _modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


def _known(name: str) -> str:
    """The module a dotted name lies in."""
    while name not in MODULES:
        name = name.rpartition(".")[0]
    return name


@cache
def imports(path: Path) -> tuple[tuple[str, int, bool], ...]:
    """Modules of the package a file imports, the line, and whether that happens when the file itself is imported."""

    def walk(node: ast.AST, at_once: bool) -> Iterator[tuple[str, int, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ImportFrom) and (child.module or "").split(".")[0] == "dovetail":
                for name in child.names:
                    yield _known(f"{child.module}.{name.name}"), child.lineno, at_once
            elif isinstance(child, ast.Import):
                for name in child.names:
                    if name.name.split(".")[0] == "dovetail":
                        yield _known(name.name), child.lineno, at_once
            else:
                is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                yield from walk(child, at_once and not is_function and not _for_types(child))

    return tuple(walk(ast.parse(path.read_text(encoding="utf-8")), True))


def _for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _orders() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each list of folders and files in order, with the package they stand in."""
    yield "dovetail", ORDER
    yield from ((f"dovetail.{folder}", order) for folder, order in WITHIN.items())


def _below(package: str, module: str) -> str:
    """The folder or file of a package that a module stands in; empty for the package's own file and others' modules."""
    return module.removeprefix(f"{package}.").split(".")[0] if module.startswith(f"{package}.") else ""


def test_every_folder_has_its_place() -> None:
    for package, order in _orders():
        there = {_below(package, module) for module in MODULES} - {""}
        assert there == set(order), (
            f"give it its place in the order of {package}, between what it uses and what uses it"
        )


def test_no_import_goes_back_up() -> None:
    """Imports within functions and for types count too: a stage knows nothing of those behind it."""
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line} imports {name}: '{here}' may import only what stands before it "
        f"({', '.join(order[: order.index(here)])})"
        for package, order in _orders()
        for module, path in MODULES.items()
        for name, line, _ in imports(path)
        if (here := _below(package, module)) and (there := _below(package, name))
        if order.index(there) > order.index(here)
    ]
    assert not wrong, "\n".join(wrong)


@cache
def public_modules() -> frozenset[str]:
    """The modules that docs/reference/modules.toml lists, those of guests left out."""
    parts = tomllib.loads(PUBLIC.read_text()).values()
    return frozenset(name for part in parts for name in part["modules"] if not name.startswith("dovetail.guests"))


def _guest(module: str) -> str:
    """The guest a module belongs to, the bundled targets as one; empty for the core."""
    parts = module.split(".")
    return ".".join(parts[: 3 if parts[1] == "guests" else 2]) if parts[1:] and parts[1] in GUESTS else ""


def test_guests_import_public_modules_only() -> None:
    """Of the core, and of other guests only of those that `LEANS` names."""
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line} imports {name}: list it in docs/reference/{PUBLIC.name}, or in LEANS"
        for module, path in MODULES.items()
        if (here := _guest(module))
        for name, line, _ in imports(path)
        if name not in public_modules() and (there := _guest(name)) != here and (here, there) not in LEANS
    ]
    assert not wrong, "\n".join(wrong)


def test_no_folder_imports_private_names_of_another() -> None:
    wrong = []
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dovetail"):
                parts = [*str(node.module).split("."), *(one.name for one in node.names)]
                far = _below("dovetail", module) != _below("dovetail", str(node.module))
                if far and any(part.startswith("_") and not part.startswith("__") for part in parts):
                    wrong.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert not wrong, "\n".join(wrong)


def test_no_circles() -> None:
    """Not even through imports within functions or for types, between any two modules."""
    edges = {module: {name for name, _, _ in imports(path)} - {module} for module, path in MODULES.items()}
    circles = sorted(_circles(edges))
    assert not circles, "modules import each other, so neither can be read first:\n" + "\n".join(circles)


def _circles(edges: dict[str, set[str]]) -> Iterator[str]:
    """Tarjan's strongly connected components of more than one module."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(module: str) -> Iterator[str]:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(edges[module]):
            if other not in index:
                yield from visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            component = [stack.pop()]
            while component[-1] != module:
                component.append(stack.pop())
            if len(component) > 1:
                yield " <-> ".join(sorted(component))

    for module in sorted(edges):
        if module not in index:
            yield from visit(module)


def test_the_search_for_circles_finds_one() -> None:
    assert list(_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == ["b <-> c"]
