"""Writes docs/reference/api and docs/reference/modules.md: the public modules, from their docstrings.

    python scripts/reference_pages.py             # write the pages
    python scripts/reference_pages.py --check     # end with 1 where a page is not up to date

docs/reference/modules.toml lists the modules. The site and a checkout show the same pages.
"""

from __future__ import annotations

import argparse
import ast
import enum
import inspect
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from functools import cache
from importlib import import_module
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from markdown_it import MarkdownIt

from dovetail.documented import Attribute, attributes_of, constants_of, summary_of
from dovetail.records import Record

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference"
LIST = tomllib.loads((REFERENCE / "modules.toml").read_text())
MODULES = [name for part in LIST.values() if part.get("pages", True) for name in part["modules"]]
"""Modules that have a page."""
DO_NOT_EDIT = "<!-- Written by `python scripts/reference_pages.py` from the docstrings. Do not edit. -->"
EXAMPLES = ("port", "port_stream", "port_loops", "port_in_place", "port_instruction", "own_operators", "board", "mesh")
"""Pages whose code is the first choice for an example."""
_CODE = re.compile(r"(`+[^`]*`+)")
_LINK = re.compile(r"\[([^\]]+)\]\([^)\s]+\)")
_SECTION = re.compile(r"^(Args|Returns|Raises|Yields):$", re.MULTILINE)
_TITLES = {"Args": "Arguments", "Returns": "Returns", "Raises": "Errors", "Yields": "Yields"}
_ITEM = re.compile(r"(?:    )?(\w[\w.*, ]*): (.*)", re.DOTALL)


@dataclass(frozen=True)
class Entry:
    """A public name, described on the page of one module."""

    module: str
    name: str
    value: Any
    """The object; an `Attribute` for a constant."""

    @property
    def text(self) -> str:
        """Its docstring, without the attributes of a class."""
        if isinstance(self.value, Attribute):
            return self.value.text
        return inspect.cleandoc(summary_of(self.value) if isinstance(self.value, type) else self.value.__doc__ or "")

    @property
    def link(self) -> str:
        """The address of its heading, from another page of the folder."""
        below = [own.name.lower() for own in entries_of(self.module)]
        earlier = below[: [own.name for own in entries_of(self.module)].index(self.name)].count(self.name.lower())
        return f"{self.module}.md#{self.name.lower()}{f'-{earlier}' if earlier else ''}"


def _public(module: str) -> list[str]:
    """The public names of a module that it defines or exports, in alphabetical order."""
    code = import_module(module)
    own = [name for name, value in vars(code).items() if getattr(value, "__module__", "") == module]
    names = getattr(code, "__all__", None) or [*own, *(one.name for one in constants_of(module))]
    return sorted({name for name in names if not name.startswith("_")}, key=lambda name: (name.lower(), name))


@cache
def _homes() -> dict[str, str]:
    """Module that describes a name, by "defining module:name"."""
    found: dict[str, str] = {}
    for module in [*MODULES, *MODULES]:
        for name in _public(module):
            value = getattr(import_module(module), name)
            place = getattr(value, "__module__", module)
            if isinstance(place, str) and not isinstance(value, ModuleType):
                found.setdefault(f"{place}:{name}", place if place in MODULES else module)
    return found


@cache
def entries_of(module: str) -> tuple[Entry, ...]:
    """The names that the page of a module describes: those it is the home of."""
    code = import_module(module)
    constants = {one.name: one for one in constants_of(module)}
    found = []
    for name in _public(module):
        value = getattr(code, name)
        if inspect.isclass(value) or (inspect.isfunction(value) and value.__name__ == name):
            if value.__module__.startswith("dovetail") and _homes()[f"{value.__module__}:{name}"] == module:
                found.append(Entry(module, name, value))
        elif name in constants:
            found.append(Entry(module, name, constants[name]))
        elif not isinstance(value, ModuleType):
            found += [Entry(module, name, one) for one in islice(_constant_elsewhere(name, value), 1)]
    return tuple(found)


def _constant_elsewhere(name: str, value: object) -> Iterator[Attribute]:
    """The description of a constant that is exported from a module without a page."""
    for module, code in sorted(sys.modules.items()):
        if not module.startswith("dovetail.") or module in MODULES or code.__name__ != module:
            continue  # an old name of a module is no second module
        if vars(code).get(name) is value:
            yield from (one for one in constants_of(module) if one.name == name)


def escaped(text: str) -> str:
    """Plain text as Markdown: only code has markup, links are left out."""
    parts = _CODE.split(_LINK.sub(r"\1", text))
    return "".join(part if i % 2 else re.sub(r"([*_<>\[\]$|])", r"\\\1", part) for i, part in enumerate(parts))


def first_sentence(text: str) -> str:
    """The first sentence of a docstring, on one line."""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) (?=[A-Z`(])", paragraph)[0]


def paragraphs(text: str) -> Iterator[str]:
    """A docstring as lines of Markdown: sections become lists, indented paragraphs blocks of code."""
    before, *sections = _SECTION.split(text)
    for part in re.split(r"\n\n(?=\S)|\n\n(?=    )", before.strip("\n")):
        if part.startswith("    "):
            yield from ("```{code-block} python", *textwrap.dedent(part).rstrip().split("\n"), "```", "")
        elif part.startswith("- "):
            yield from (*(f"- {escaped(' '.join(item.split()))}" for item in part[2:].split("\n- ")), "")
        elif part:
            yield from (escaped(" ".join(part.split())), "")
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        yield from (f"{_TITLES[title]}:", "")
        for item in re.split(r"\n(?=    \w)", textwrap.dedent(body).strip("\n").replace("\n", "\n    ")):
            match = _ITEM.match(item)
            said = f"`{match[1]}`: {escaped(' '.join(match[2].split()))}" if match else escaped(" ".join(item.split()))
            yield f"- {said}"
        yield ""


def signature(function: Any) -> str:
    """The arguments and the result of a function, as its source has them."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body
    assert isinstance(node, ast.FunctionDef)
    if node.args.args and node.args.args[0].arg in ("self", "cls"):
        node.args.args.pop(0)
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(node.args)}){result}"


def methods_of(kind: type) -> Iterator[tuple[str, str, str]]:
    """Name, signature and docstring of each method and property that a class describes itself."""
    for name, value in vars(kind).items():
        function = getattr(value, "__func__", value) if isinstance(value, classmethod | staticmethod) else value
        if name.startswith("_") or not getattr(value, "__doc__", None):
            continue
        if inspect.isfunction(function):
            yield name, signature(function), inspect.cleandoc(function.__doc__ or "")
        elif isinstance(value, property) or type(value).__name__ == "cached_property":
            getter = getattr(value, "fget", None) or getattr(value, "func", None)
            result = signature(getter).rpartition(" -> ")[2] if getter else ""
            yield name, f": {result}", inspect.cleandoc(value.__doc__ or "")


@cache
def _code_of_pages() -> tuple[tuple[str, str], ...]:
    """Pages and modules with the code in them, the best examples first."""
    pages = [ROOT / "docs" / f"{name}.md" for name in EXAMPLES]
    pages += [page for page in sorted(REFERENCE.glob("*.md")) if page.name != "modules.md"]
    found = []
    for page in pages:
        tokens = MarkdownIt("commonmark").parse(page.read_text())
        code = "\n".join(token.content for token in tokens if token.type == "fence" and token.info == "python")
        found.append((f"[{page.stem}](../{'' if page.parent == REFERENCE else '../'}{page.name})", code))
    for folder in ("targets", "guests", "cli"):
        for path in sorted((ROOT / "dovetail" / folder).rglob("*.py")):
            found.append((f"`{path.relative_to(ROOT)}`", path.read_text()))
    return tuple(found)


def example(entry: Entry) -> str:
    """The first page or module whose code uses a name; empty where none does."""
    call = r"\(" if inspect.isfunction(entry.value) else r"\b"
    use = re.compile(rf"\b{entry.name}{call}")
    own = f"`{entry.module.replace('.', '/')}"
    places = (place for place, code in _code_of_pages() if entry.name in code and use.search(code))
    return next((place for place in places if not place.startswith(own)), "")


def kind_of(entry: Entry) -> str:
    """The word for what an entry is."""
    if isinstance(entry.value, Attribute):
        return "constant"
    if not isinstance(entry.value, type):
        return "function"
    if issubclass(entry.value, enum.Enum):
        return "enumeration"
    if issubclass(entry.value, Exception):
        return "error"
    return "dataclass" if is_dataclass(entry.value) else "class"


def described(entry: Entry) -> Iterator[str]:
    """The lines of one entry."""
    yield from (f"## {entry.name}", "")
    value = entry.value
    if inspect.isfunction(value):
        yield from (f"`{entry.name}{signature(value)}`", "")
    elif isinstance(value, Attribute):
        yield from (f"`{entry.name}{f': {value.type}' if value.type else ''}`", "")
    else:
        bases = [one.__name__ for one in value.__bases__ if one.__module__.startswith("dovetail") and one is not Record]
        yield from (f"{kind_of(entry).capitalize()}{f', a kind of `{bases[0]}`' if bases else ''}.", "")
    yield from paragraphs(entry.text)
    if isinstance(value, type):
        attributes = attributes_of(value)
        if attributes:
            yield from ("Attributes:", "")
        for one in attributes:
            kind = " = ".join(filter(None, (one.type, one.default)))
            yield f"- `{one.name}{f': {kind}' if kind else ''}`: {escaped(one.text)}"
        methods = list(methods_of(value))
        yield from ([""] if attributes else [])
        if methods:
            yield from ("Methods and properties:", "")
        for name, arguments, text in methods:
            first, *rest = list(paragraphs(text)) or [""]
            yield f"- `{name}{arguments}`: {first}"
            yield from (f"  {line}" if line else "" for line in (["", *rest] if any(rest) else []))
        yield from ([""] if methods else [])
    if place := example(entry):
        yield from (f"Example: {place}.", "")


def page_of(module: str) -> str:
    """The page of one module."""
    lines = [f"# {module}", "", DO_NOT_EDIT, "", *paragraphs(inspect.cleandoc(import_module(module).__doc__ or ""))]
    entries = entries_of(module)
    elsewhere = []
    for name in _public(module):
        value = getattr(import_module(module), name)
        home = _homes().get(f"{getattr(value, '__module__', module)}:{name}", module)
        if isinstance(value, ModuleType):
            home = value.__name__
        if home != module and home in MODULES:
            elsewhere.append(f"[{name}]({home}.md{'' if isinstance(value, ModuleType) else f'#{name.lower()}'})")
    if entries:
        lines += ["| name | summary |", "|---|---|"]
        lines += [
            f"| [{one.name}](#{one.link.partition('#')[2]}) | {escaped(first_sentence(one.text))} |" for one in entries
        ]
        lines.append("")
    if elsewhere:
        lines += [f"Also here, and described with their own module: {', '.join(elsewhere)}.", ""]
    for entry in entries:
        lines += described(entry)
    return "\n".join(lines).rstrip() + "\n"


def modules_page() -> str:
    """The list of public modules."""
    lines = [
        "# Public modules",
        "",
        DO_NOT_EDIT.replace("the docstrings", "modules.toml"),
        "",
        "These modules keep their names from release to release. A renamed module or name works for one more release,",
        "and warns with the new name (`dovetail.names.OldNameWarning`). All other modules may change at any time.",
        "[Every attribute and function by its meaning](api/meanings.md) is on one page.",
        "",
    ]
    for part in LIST.values():
        paged = part.get("pages", True)
        lines += [
            f"## {part['title']}",
            "",
            *([part["text"], ""] if "text" in part else []),
            "| module | has |",
            "|---|---|",
        ]
        for name in part["modules"]:
            shown = f"[{name}](api/{name}.md)" if paged else f"`{name}`"
            lines.append(f"| {shown} | {escaped(first_sentence(import_module(name).__doc__ or ''))} |")
        lines.append("")
    pages = sorted(f"api/{name}" for name in ("meanings", *MODULES))
    return "\n".join([*lines, "```{toctree}", ":hidden:", "", *pages, "```"]) + "\n"


def meanings() -> list[tuple[str, str]]:
    """The first sentence on each attribute, method and function, with a link to it, in alphabetical order."""
    found = []
    for entry in (one for module in MODULES for one in entries_of(module)):
        if isinstance(entry.value, type):
            inner = [(one.name, one.text) for one in attributes_of(entry.value)]
            inner += [(name, text) for name, _, text in methods_of(entry.value)]
            found += [(first_sentence(text), f"[{entry.name}.{name}]({entry.link})") for name, text in inner if text]
        found.append((first_sentence(entry.text), f"[{entry.name}]({entry.link})"))
    return sorted(found, key=lambda one: (re.sub(r"\W", "", one[0]).lower(), one))


def meanings_page() -> str:
    """The list of everything by its meaning."""
    lines = [
        "# By meaning",
        "",
        DO_NOT_EDIT,
        "",
        "What each name of the public modules means, in alphabetical order.",
        "",
    ]
    lines += ["| meaning | name |", "|---|---|"]
    return "\n".join([*lines, *(f"| {escaped(text)} | {link} |" for text, link in meanings())]) + "\n"


def pages() -> dict[Path, str]:
    """Every generated page."""
    made = {REFERENCE / "api" / f"{module}.md": page_of(module) for module in MODULES}
    return {**made, REFERENCE / "api" / "meanings.md": meanings_page(), REFERENCE / "modules.md": modules_page()}


def stale() -> list[str]:
    """Pages that are missing, not up to date, or of no module."""
    made = pages()
    wrong = [page for page, text in made.items() if not page.exists() or page.read_text() != text]
    return [str(page.relative_to(ROOT)) for page in [*wrong, *sorted({*(REFERENCE / "api").glob("*.md")} - {*made})]]


def main() -> int:
    """Write or check the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="end with 1 where a page is not up to date")
    if parser.parse_args().check:
        wrong = stale()
        print("\n".join([*wrong, "run: python scripts/reference_pages.py"] if wrong else ["all pages are up to date"]))
        return int(bool(wrong))
    (REFERENCE / "api").mkdir(exist_ok=True)
    for page in (REFERENCE / "api").glob("*.md"):
        page.unlink()
    for page, text in pages().items():
        page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
