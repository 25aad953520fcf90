"""Sizes and counts of the house, against the budgets in `scripts/house.toml`.

    python scripts/house.py             # a table: lines and tokens of every folder, core and guests; counts
    python scripts/house.py --hold      # ends with 1, and says where, if something is above its budget

Tokens are names, numbers, strings and operators; comments and docstrings do not count.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "dovetail"
BUDGET = Path(__file__).with_suffix(".toml")
GUESTS = ("guests", "targets")
"""Folders of the package that only use the compiler; everything else is the core."""
HOME = ("ir/operators", "operators", "guests/operators")
"""Folders where operators are defined, so may ask each other's classes."""
_LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


@cache
def sources() -> dict[Path, ast.Module]:
    """The syntax tree of every Python file of the package, by path within it."""
    return {path.relative_to(PACKAGE): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def folder_of(path: Path) -> str:
    """The row of the table a file counts in."""
    parts = path.parts
    if len(parts) == 1:
        return "."
    return "/".join(parts[:2]) if parts[0] in GUESTS and len(parts) > 2 else parts[0]


def is_guest(path: Path) -> bool:
    """Whether a file belongs to a guest."""
    return path.parts[0] in GUESTS


def tokens_of(path: Path) -> int:
    """Tokens of code in a file."""
    docstrings = {
        (node.value.lineno, node.value.col_offset)
        for node in ast.walk(sources()[path])
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    text = (PACKAGE / path).read_text()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type not in _LAYOUT and token.start not in docstrings for token in tokens)


def operator_classes() -> set[str]:
    """Names of the classes of operators and of what they share."""
    bases: dict[str, set[str]] = defaultdict(set)
    for path, tree in sources().items():
        if str(path).startswith("ir/operators") or str(path).startswith("guests/operators"):
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    bases[node.name] |= {base.id for base in node.bases if isinstance(base, ast.Name)}
    found = {"Operator"}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return found


def type_questions() -> Iterator[tuple[Path, int]]:
    """Each question for an operator's class outside the operators' home: file and line. Questions are `isinstance`,
    `Node.expect` and `Draft.made_by` with an operator's class, and `type(operator)`."""
    operators = operator_classes()
    for path, tree in sources().items():
        if str(path).startswith(HOME):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _asks_class(node, operators):
                yield path, node.lineno


def _asks_class(call: ast.Call, operators: set[str]) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name == "type" and len(call.args) == 1:
        return ast.unparse(call.args[0]).endswith("operator")
    if name not in ("isinstance", "expect", "made_by"):
        return False
    inside = [one for argument in call.args for one in ast.walk(argument)]
    names = {one.id for one in inside if isinstance(one, ast.Name)}
    return bool(operators & (names | {one.attr for one in inside if isinstance(one, ast.Attribute)}))


def repeated_classes() -> dict[str, list[str]]:
    """Class names that stand for more than one thing, with the places."""
    places = defaultdict(list)
    for path, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{path}:{node.lineno}")
    return {name: at for name, at in sorted(places.items()) if len(at) > 1}


def long_functions(most: int) -> Iterator[str]:
    """Functions of more lines than `most`."""
    for path, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > most:
                    yield f"{path}:{node.lineno} {node.name} has {lines} lines"


def private_imports() -> Iterator[str]:
    """Imports of private names from another folder."""
    for path, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("dovetail"):
                for name in node.names:
                    private = name.name.startswith("_") or any(p.startswith("_") for p in node.module.split("."))
                    if private and not name.name.startswith("__"):
                        yield f"{path}:{node.lineno} imports {node.module}.{name.name}"


def guest_imports() -> Iterator[str]:
    """Imports of a guest by the core."""
    for path, tree in sources().items():
        if is_guest(path):
            continue
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{name.name}" for name in node.names]
            elif isinstance(node, ast.Import):
                names = [name.name for name in node.names]
            for name in names:
                if name.startswith(tuple(f"dovetail.{guest}" for guest in GUESTS)):
                    yield f"{path}:{node.lineno} imports {name}"


def riddles() -> Counter[str]:
    """Docstrings that begin as a riddle."""
    found: Counter[str] = Counter()
    for tree in sources().values():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                word = node.value.value.split(" ")[0]
                if word in ("What", "Of", "Who", "Where", "Whom", "Whose", "Those"):
                    found[word] += 1
    return found


def table() -> tuple[list[str], dict[str, int]]:
    """The rows of the table, and the figures that budgets are for."""
    rows: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    sums = {"core": [0, 0], "guests": [0, 0]}
    for path in sources():
        lines, tokens = (PACKAGE / path).read_text().count("\n"), tokens_of(path)
        for k, value in enumerate((1, lines, tokens)):
            rows[folder_of(path)][k] += value
        part = sums["guests" if is_guest(path) else "core"]
        part[0] += lines
        part[1] += tokens
    text = [
        f"{name:28} {files:4} files {lines:7,} lines {tokens:9,} tokens"
        for name, (files, lines, tokens) in sorted(rows.items(), key=lambda row: (row[0].split("/")[0] in GUESTS, row))
    ]
    lines, tokens = (sum(part[k] for part in sums.values()) for k in (0, 1))
    figures = {
        "lines": lines,
        "tokens": tokens,
        "core_lines": sums["core"][0],
        "core_tokens": sums["core"][1],
        "tokens_per_100_lines": 100 * tokens // lines,
        "longest_file": max((PACKAGE / path).read_text().count("\n") for path in sources()),
        "long_functions": len(list(long_functions(60))),
        "type_questions": len(list(type_questions())),
        "repeated_classes": len(repeated_classes()),
        "private_imports": len(list(private_imports())),
        "guest_imports": len(list(guest_imports())),
        "riddles": sum(riddles().values()),
    }
    return text, figures


def main() -> int:
    """Print the table; the number of budgets that are exceeded with `--hold`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hold", action="store_true", help="end with 1 where a figure is above its budget")
    parser.add_argument("--where", action="store_true", help="list the places that are counted")
    options = parser.parse_args()
    rows, figures = table()
    budgets = tomllib.loads(BUDGET.read_text())
    print("\n".join(rows))
    over = 0
    for name, figure in figures.items():
        is_over = name in budgets and figure > budgets[name]
        over += is_over
        allowed = f"at most {budgets[name]:,}" if name in budgets else ""
        print(f"{name:24} {figure:9,}  {allowed}{'  EXCEEDED' if is_over else ''}")
    if options.where:
        print("\n".join(f"{path}:{line} asks for an operator's class" for path, line in type_questions()))
        print("\n".join(f"class {name}: {', '.join(at)}" for name, at in repeated_classes().items()))
        print("\n".join([*long_functions(60), *private_imports(), *guest_imports()]))
    return int(options.hold and over > 0)


if __name__ == "__main__":
    sys.exit(main())
