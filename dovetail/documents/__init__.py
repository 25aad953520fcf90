"""Files from outside: JSON, TOML and YAML text becomes a typed record, or an error that names file, line and value.

A record is a `msgspec.Struct`. Its types are the rules of the file: bounds in `msgspec.Meta`, alternatives in
`Literal`; `forbid_unknown_fields=True` refuses names it does not have; a rule that no type can say raises ValueError in
`__post_init__`. For example, a file of rules:

    class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        layer: str
        rows: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1

    class Rules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        rules: Annotated[tuple[Rule, ...], msgspec.Meta(max_length=1000)] = ()

    document = read_document(path, "yaml", Rules, error=PlanError, hint="see docs/rules.md")
    for number, rule in enumerate(document.value.rules):
        if rule.layer not in layers:
            raise document.wrong("the network has no such layer", ("rules", number, "layer"))

With `rows: 0` in line 7 of the file that raises `PlanError`:

    rules.yaml:7: rules[3].rows: must be a whole number from 1 to 1024, not 0
      what to do: see docs/rules.md
"""

from __future__ import annotations

import re
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
from msgspec.inspect import type_info

from dovetail.documents.lines import TextFault, ValuePath, line_of, parse_text
from dovetail.documents.lines import TextForm as TextForm
from dovetail.documents.wording import in_words, kind_at, name_kind_at, names_of, record_at, shown
from dovetail.errors import DovetailError
from dovetail.records import Record

T = TypeVar("T")
MOST_BYTES = 1 << 20
"""Bytes of a file a user writes."""
_PLAIN_NAME = re.compile(r"[\w-]+")


class Document(Record, Generic[T]):
    """A record that was read from a text, and how errors about its values are made."""

    value: T
    name: str
    """Name of the file."""
    text: str
    form: TextForm
    error: type[DovetailError]
    """Class of errors about it."""
    hint: str
    """Advice for errors that have none of their own."""
    first_line: int = 0
    """Line of the file that the text begins at; 0 for a text that is the whole file."""

    def place(self, path: ValuePath = ()) -> str:
        """FILE:LINE of a value; the file alone for the whole document."""
        return self._at_line(line_of(self.text, self.form, path))

    def _at_line(self, line: int) -> str:
        line = line + max(self.first_line - 1, 0) if line else self.first_line
        return f"{self.name}:{line}" if line else self.name

    def wrong(
        self, what: str, path: ValuePath = (), hint: str | None = None, other: ValuePath | None = None
    ) -> DovetailError:
        """The error about the value at a path; `other` leads to a value it clashes with, whose line is named too."""
        clash = f" (clashes with {self.place(other)})" if other is not None else ""
        text = f"{path_text(path)}: {what}{clash}" if path else f"{what}{clash}"
        return self.error(text, where=self.place(path), hint=self.hint if hint is None else hint)

    def no_document(self, fault: TextFault) -> DovetailError:
        """The error about a text that cannot be parsed."""
        clash = f" (clashes with {self._at_line(fault.other)})" if fault.other else ""
        return self.error(f"{fault.what}{clash}", where=self._at_line(fault.line), hint=self.hint)


def path_text(path: ValuePath) -> str:
    """A path as messages have it, such as `layers[3].rows`."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{_name_text(step)}" for step in path)
    return "".join(steps).removeprefix(".")


def _name_text(name: str) -> str:
    return name if _PLAIN_NAME.fullmatch(name) and len(name) < 60 else repr(name[:60])


def read_text(
    path: Path,
    *,
    hint: str,
    most_bytes: int = MOST_BYTES,
    error: type[DovetailError] = DovetailError,
    what: str = "the file",
) -> str:
    """The text of a file of at most `most_bytes` bytes.

    Raises:
        DovetailError: of class `error`: it cannot be read, is larger, or is not UTF-8; `what` names it there.
    """
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except OSError as fault:
        advice = "check the spelling and the permission to read"
        raise error(f"{what} cannot be read: {fault.strerror}", where=str(path), hint=advice) from None
    if len(content) > most_bytes:
        raise error(f"{what} is larger than {most_bytes:,} bytes", where=str(path), hint=hint)
    try:
        return content.decode()
    except UnicodeDecodeError as fault:
        line = content.count(b"\n", 0, fault.start) + 1
        raise error(f"{what} is not text in UTF-8", where=f"{path}:{line}", hint=hint) from None


def read_document(
    path: Path,
    form: TextForm,
    kind: type[T],
    *,
    hint: str,
    schema: int | None = None,
    most_bytes: int = MOST_BYTES,
    error: type[DovetailError] = DovetailError,
    what: str = "the file",
) -> Document[T]:
    """Read a file into a record.

    Args:
        path: the file.
        form: its language.
        kind: type of the record.
        hint: what to do about an error.
        schema: the number the entry "schema" must be, which is looked at first and is no field of the record; None for
            a file without that entry.
        most_bytes: a larger file is refused.
        error: class of the error for whatever is wrong.
        what: names the file in messages.

    Raises:
        DovetailError: of class `error`: the file cannot be read or is too large, is not of this form, nested too
            deeply or has an entry twice, or a value is not of its type.
    """
    text = read_text(path, most_bytes=most_bytes, error=error, hint=hint, what=what)
    return _convert(Document(None, str(path), text, form, error, hint), kind, schema)


def parse_document(
    text: str,
    name: str,
    form: TextForm,
    kind: type[T],
    *,
    hint: str,
    schema: int | None = None,
    first_line: int = 0,
    error: type[DovetailError] = DovetailError,
) -> Document[T]:
    """As `read_document`, of a text; `name` is that of its file, `first_line` where the text begins in it."""
    return _convert(Document(None, name, text, form, error, hint, first_line), kind, schema)


def _convert(document: Document[Any], kind: type[T], schema: int | None) -> Document[T]:
    try:
        value = parse_text(document.text, document.form)
    except TextFault as fault:
        raise document.no_document(fault) from None
    if schema is not None and isinstance(value, dict):
        if "schema" not in value:
            raise document.wrong("'schema' is missing")
        if (version := value.pop("schema")) != schema:
            raise document.wrong(f"is {shown(version)}, expected {schema}", ("schema",))
    try:
        return replace(document, value=msgspec.convert(value, kind))
    except UnicodeEncodeError:
        raise document.wrong(
            "a text in it is no Unicode: it has half of a surrogate pair (\\ud800 to \\udfff)"
        ) from None
    except msgspec.ValidationError as fault:
        raise _explained(replace(document, value=value), kind, fault) from None


_MESSAGE = re.compile(r"(?P<what>.*?)(?: - at (?P<name>`key` in )?`\$(?P<path>[^`]*)`)?", re.DOTALL)
"""A message of msgspec: what is wrong, whether with the name of an entry, and where."""
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]|\[(\.\.\.)\]")
"""A field, the number of a list's member, or some entry of a mapping."""
_FIELD = re.compile(r"Object (missing required|contains unknown) field `(.*)`", re.DOTALL)


def _explained(document: Document[Any], kind: Any, fault: msgspec.ValidationError) -> DovetailError:
    """The error for values that do not fit their types."""
    message = _MESSAGE.fullmatch(str(fault))
    assert message is not None
    steps = _STEP.findall((message["path"] or "") + ("[...]" if message["name"] else ""))
    path, root = _path(document.value, steps, kind, str(fault)), type_info(kind)
    if fault.__cause__ is not None:  # raised by a record's __post_init__
        return document.wrong(message["what"], path)
    if field := _FIELD.fullmatch(message["what"]):
        if field[1] == "missing required":
            return document.wrong(f"'{field[2]}' is missing", path)
        names = names_of(record_at(root, path))
        near = "".join(f", perhaps '{name}'" for name in get_close_matches(field[2], names, n=1))
        hint = f"use {', '.join(names)}" if names else None
        return document.wrong(f"there is no such entry{near}", (*path, field[2]), hint)
    if message["name"]:
        return document.wrong(f"the name must be {in_words(name_kind_at(root, path[:-1]))}", path)
    what = f"must be {in_words(kind_at(root, path))}, not {shown(_at(document.value, path))}"
    return document.wrong(what if path else f"this {what}", path)


def _path(value: Any, steps: list[tuple[str, str, str]], kind: Any, message: str) -> ValuePath:
    """The path of a message, in which msgspec leaves out the names of a mapping's entries."""
    path: ValuePath = ()
    for name, number, _ in steps:
        if name or number:
            path = (*path, name or int(number))
            continue
        names = list(_at(value, path))
        while len(names) > 1:  # halve the entries as long as the rest has the same fault
            half = names[: len(names) // 2]
            names = half if _fault(_reduced(value, path, half), kind) == message else names[len(half) :]
        value, path = _reduced(value, path, names), (*path, *names)
    return path


def _at(value: Any, path: ValuePath) -> Any:
    for step in path:
        value = value[step]
    return value


def _reduced(value: Any, path: ValuePath, names: list[str]) -> Any:
    """The values with only these entries in the mapping at a path."""
    if not path:
        return {name: value[name] for name in names}
    copy = value.copy()
    copy[path[0]] = _reduced(value[path[0]], path[1:], names)
    return copy


def _fault(value: Any, kind: Any) -> str:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as fault:
        return str(fault)
    return ""
