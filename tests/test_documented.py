"""Every public name says what it is: in its docstring, in `help`, and on its generated page."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from dovetail.documented import attributes_of
from test_docs import script

pages = script("reference_pages")
english = script("english")
ENTRIES = [entry for module in pages.MODULES for entry in pages.entries_of(module)]
CLASSES = [one for one in ENTRIES if isinstance(one.value, type)]


def is_sentence(text: str) -> bool:
    """Whether a text begins as a sentence, has two words or more, and ends as one."""
    return bool(re.match(r"[A-Z\"`(0-9]", text)) and len(text.split()) > 1 and text.rstrip('`")')[-1:] in ".:…"


def methods() -> Iterator[tuple[str, Any]]:
    """The public methods and properties of all classes, by name."""
    for entry in CLASSES:
        for name, value in vars(entry.value).items():
            attributes = vars(entry.value).get("__annotations__", {})  # whose default may be a function
            is_method = inspect.isfunction(value) or isinstance(value, property)
            if is_method and not name.startswith("_") and name not in attributes:
                yield f"{entry.name}.{name}", getattr(entry.value, name)


def test_every_name_has_a_sentence() -> None:
    assert len(ENTRIES) > 450
    assert [(one.module, one.name) for one in ENTRIES if not is_sentence(one.text.partition("\n\n")[0])] == []


def test_help_shows_every_attribute_with_its_type_and_a_sentence() -> None:
    missing, count = [], 0
    for entry in CLASSES:
        text = inspect.getdoc(entry.value) or ""
        for one in attributes_of(entry.value):
            found = re.search(rf"^    {one.name}(?: \((.+?)\))?: (.+)$", text, re.MULTILINE)
            count += 1
            if found is None or not (found[1] or "").startswith(one.type) or not is_sentence(found[2]):
                missing.append(f"{entry.module}: {entry.name}.{one.name}")
    assert missing == []
    assert count > 800


def test_every_page_has_every_attribute() -> None:
    for entry in CLASSES:
        text = (pages.REFERENCE / "api" / f"{entry.module}.md").read_text()
        assert [one.name for one in attributes_of(entry.value) if f"\n- `{one.name}" not in text] == [], entry.name


def test_every_method_says_what_it_does() -> None:
    """An override has the docstring of its base."""
    names = [name for name, value in methods() if not is_sentence((inspect.getdoc(value) or "").partition("\n\n")[0])]
    assert names == []


def is_told(argument: inspect.Parameter, text: str) -> bool:
    """Whether a docstring names an argument, or its type is a public class, which says what it is."""
    kinds = set(re.findall(r"\w+", str(argument.annotation))) - {"Sequence", "tuple", "type", "None", "Mapping", "str"}
    return argument.name in re.findall(r"\w+", text) or (bool(kinds) and kinds <= {entry.name for entry in ENTRIES})


def test_every_argument_of_the_doors_is_told() -> None:
    """Those of the modules for targets, rewrites and own operators."""
    doors = ("dovetail.target", "dovetail.legalize", "dovetail.operators")
    public = [entry for entry in ENTRIES if entry.module.startswith(doors)]
    functions = [(entry.name, entry.value) for entry in public if inspect.isfunction(entry.value)]
    owners = tuple(f"{entry.name}." for entry in public)
    functions += [(name, one) for name, one in methods() if name.startswith(owners) and inspect.isfunction(one)]
    silent = [
        f"{name}({argument.name})"
        for name, function in functions
        for argument in inspect.signature(function).parameters.values()
        if argument.name not in ("self", "cls") and not is_told(argument, inspect.getdoc(function) or "")
    ]
    assert silent == []
    assert len(functions) > 120


def test_functions_that_raise_say_so() -> None:
    own = [entry for entry in ENTRIES if not entry.module.startswith("dovetail.cli.")]  # these have the text of --help
    functions = [(entry.name, entry.value) for entry in own if inspect.isfunction(entry.value)]
    functions += [(name, value) for name, value in methods() if inspect.isfunction(value)]
    silent = [
        name
        for name, value in functions
        if value.__doc__ and re.search(r"^\s+raise [A-Z]\w+\(", inspect.getsource(value), re.MULTILINE)
        if not re.search(r"\braise|Raise|[Ee]rror|refuse|^See `", inspect.getdoc(value) or "")
    ]
    assert silent == []


def test_first_sentences_are_plain() -> None:
    """They are the entries of the list by meaning, where nothing before them explains a pronoun."""
    told = [(re.sub("`[^`]*`", "X", text), link) for text, link in pages.meanings()]
    riddles = [(text, link) for text, link in told if english.forms(text)]
    assert riddles == []
