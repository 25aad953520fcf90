"""Values of JSON, TOML and YAML text, and the lines they stand on.

A path leads from a document to one of its values: names of mapping entries and numbers of list members, such as
`("layers", 3, "rows")`. Lines count from 1; an entry of a mapping stands on the line of its name.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import Any, Literal

TextForm = Literal["json", "toml", "yaml"]
"""Language of a document."""
ValuePath = tuple[str | int, ...]
"""Names and list indices from a document to one of its values."""
DEEPEST = 32
"""Levels of lists and mappings a document may have."""
_TOO_DEEP = f"lists and mappings are nested more than {DEEPEST} levels deep"
_LONGEST_NAME = 60
_INTEGER = re.compile(r"[-+]?\d{1,4000}")
_SCALARS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
"""Unquoted values of YAML that are no text."""
_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"""(?:"{1,2}(?!"))?'
    r"|'''.*?'''(?:'{1,2}(?!'))?"
    r'|"(?:\\.|[^"\\])*"'
    r"|'[^'\n]*'"
    r"|#[^\n]*"
    r"|[\[\]{},:=.]"
    r"""|[^\s"'#\[\]{},:=.]+""",
    re.DOTALL,
)
"""A string, a comment, a punctuation mark or a bare word of JSON or TOML."""


class TextFault(Exception):
    """Text that is no document. `line` is 0 if unknown; `other` is the line it clashes with, 0 for none."""

    def __init__(self, what: str, line: int = 0, other: int = 0) -> None:
        super().__init__(what)
        self.what, self.line, self.other = what, line, other


def parse_text(text: str, form: TextForm) -> Any:
    """The values of a document: dict, list, str, int, float, bool, None, and the dates of TOML.

    Unquoted scalars of YAML are whole numbers, `true`, `false`, `null` or text; it has no tags, aliases or anchors. A
    YAML text without any value is an empty mapping.

    Raises:
        TextFault: it is not of this form, has an entry twice, or is nested more than `DEEPEST` levels.
    """
    try:
        value = _YamlReader(text).document() if form == "yaml" else _parse(text, form)
    except RecursionError:
        raise TextFault(_TOO_DEEP) from None
    level = [value]
    for _ in range(DEEPEST):
        level = [inner for outer in level for inner in _members(outer)]
    if any(isinstance(one, dict | list) for one in level):
        raise TextFault(_TOO_DEEP)
    return value


def _members(value: Any) -> list[Any]:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [one for one in inside if isinstance(one, dict | list)]


def _parse(text: str, form: TextForm) -> Any:
    try:
        if form == "toml":
            return tomllib.loads(text)
        return json.loads(text, object_pairs_hook=_unique_entries, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise TextFault(f"this is not JSON: {error.msg} (column {error.colno})", error.lineno) from None
    except tomllib.TOMLDecodeError as error:
        what, line = str(error), len(text.splitlines())
        if place := re.search(r" \(at line (\d+), (column \d+)\)$", what):
            what, line = f"{what[: place.start()]} ({place[2]})", int(place[1])
        raise TextFault(f"this is not TOML: {what}", line) from None
    except KeyError as error:  # of `_unique_entries`
        first, second = _repeated_lines(text)
        raise TextFault(_twice(error.args[0]), second, first) from None
    except ValueError as error:  # Python reads no integer of more than 4,300 digits
        raise TextFault(f"this is not {form.upper()}: {str(error).partition(';')[0]}") from None


def _unique_entries(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise KeyError(name)
    return entries


def _twice(name: str) -> str:
    return f"'{name[:_LONGEST_NAME]}' stands here twice"


def _refuse_constant(name: str) -> float:
    raise TextFault(f"this is not JSON: {name} is not a number")


def _repeated_lines(text: str) -> tuple[int, int]:
    """Lines of the first two values of JSON text that have one path."""
    lines: dict[ValuePath, int] = {}
    for path, line in _json_lines(text):
        if path in lines:
            return lines[path], line
        lines[path] = line
    return 0, 0


def line_of(text: str, form: TextForm, path: ValuePath) -> int:
    """The line of a value of a document that `parse_text` accepts; for one that has none, such as a TOML table that
    only its members name, the line of the first value in it, else of the nearest value around it. 0 for the document.
    """
    if not path:
        return 0
    around, depth = 0, 0
    for place, line in {"json": _json_lines, "toml": _toml_lines, "yaml": _yaml_lines}[form](text):
        if place[: len(path)] == path:
            return line
        if len(place) > depth and place == path[: len(place)]:
            around, depth = line, len(place)
    return around


def _json_lines(text: str) -> Iterator[tuple[ValuePath, int]]:
    yield from _value_lines(_TokenReader(text, ":"), (), 1)


def _toml_lines(text: str) -> Iterator[tuple[ValuePath, int]]:
    tokens = _TokenReader(text, "=")
    table: ValuePath = ()
    last: dict[ValuePath, int] = {}
    """Array of tables -> number of the table that was begun last."""

    def resolved(names: list[str]) -> ValuePath:
        path: ValuePath = ()
        for name in names:
            path = (*path, name)
            path = (*path, last[path]) if path in last else path
        return path

    while tokens.text:
        line = tokens.line
        if tokens.text == "[":
            tokens.advance()
            is_array = tokens.text == "["
            names = tokens.name("]")
            if is_array:
                tokens.advance()
                array = (*resolved(names[:-1]), names[-1])
                last[array] = last.get(array, -1) + 1
            table = resolved(names)
            yield table, line
        else:
            yield from _value_lines(tokens, (*table, *tokens.name("=")), line)


class _TokenReader:
    """The tokens of JSON or TOML but comments, one after the other: `text`, which is empty at the end, and its `line`.

    Args:
        content: what is read.
        separator: the mark between a name and its value.
    """

    def __init__(self, content: str, separator: str) -> None:
        self.separator, self._content = separator, content
        self._matches, self._begin = _TOKEN.finditer(content), 0
        self.text, self.line = "", 1
        self.advance()

    def advance(self) -> None:
        """Go on to the next token."""
        self.text = ""
        for match in self._matches:
            self.line += self._content.count("\n", self._begin, match.start())
            self._begin = match.start()
            if not match[0].startswith("#"):
                self.text = match[0]
                return

    def name(self, end: str) -> list[str]:
        """The parts of a name, which TOML joins by dots, read with the mark at its end."""
        parts = []
        while self.text and self.text != end:
            if self.text not in (".", "["):
                parts.append(_unquoted(self.text))
            self.advance()
        self.advance()
        return parts


def _unquoted(name: str) -> str:
    if name[0] not in "'\"":
        return name
    try:
        return str(json.loads(name))
    except ValueError:  # a literal string, or an escape that only TOML has
        return str(tomllib.loads(f"name = {name}")["name"])


def _value_lines(tokens: _TokenReader, path: ValuePath, line: int) -> Iterator[tuple[ValuePath, int]]:
    """A value that stands at a path, and all values in it."""
    outer: list[tuple[ValuePath, Iterator[int] | None]] = []
    """The lists and mappings around a value; with the numbers of a list's members that are still to come."""
    while tokens.text:
        yield path, line
        opening, begin = tokens.text, tokens.line
        tokens.advance()
        if opening in ("[", "{"):
            outer.append((path, count() if opening == "[" else None))
        else:
            while tokens.text not in (",", "]", "}") and tokens.line == begin and tokens.text:  # "1.5" is three tokens
                tokens.advance()
        while outer and tokens.text in (",", "]", "}"):
            if tokens.text != ",":
                outer.pop()
            tokens.advance()
        if not outer:
            return
        (around, numbers), line = outer[-1], tokens.line
        path = (*around, next(numbers)) if numbers else (*around, *tokens.name(tokens.separator))


def _yaml_lines(text: str) -> Iterator[tuple[ValuePath, int]]:
    lines: list[tuple[ValuePath, int]] = []
    _YamlReader(text, lines).document()
    yield from lines


class _YamlReader:
    """Reads YAML text from its events, so that nothing is built of what is refused; notes the line of each value."""

    def __init__(self, text: str, lines: list[tuple[ValuePath, int]] | None = None) -> None:
        import yaml  # type: ignore[import-untyped]

        self._yaml, self._lines = yaml, lines
        self._events: Iterator[Any] = yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))

    def document(self) -> Any:
        """The only document of the text; an empty mapping where there is none."""
        yaml = self._yaml
        try:
            next(self._events)
            first = next(self._events)
            value = {} if isinstance(first, yaml.StreamEndEvent) else self._value(next(self._events), (), 0)
            rest = [event for event in self._events if isinstance(event, yaml.DocumentStartEvent)]
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            what = str(getattr(error, "problem", None) or error).splitlines()[0]
            raise TextFault(f"this is not YAML: {what[:100]}", mark.line + 1 if mark else 0) from None
        if rest:
            raise TextFault("a second YAML document begins here", rest[0].start_mark.line + 1)
        return value

    def _value(self, event: Any, path: ValuePath, line: int) -> Any:
        """The value an event begins; the line is that of its name, 0 where it has none."""
        here = event.start_mark.line + 1
        if self._lines is not None:
            self._lines.append((path, line or here))
        if isinstance(event, self._yaml.AliasEvent) or event.anchor:
            raise TextFault("an alias or anchor; write the value out instead", here)
        if event.tag:
            raise TextFault(f"the tag {event.tag[:_LONGEST_NAME]}; leave it out", here)
        if len(path) > DEEPEST:
            raise TextFault(_TOO_DEEP, here)
        if isinstance(event, self._yaml.MappingStartEvent):
            return self._mapping(path)
        if isinstance(event, self._yaml.SequenceStartEvent):
            inside = iter(lambda: self._next(self._yaml.SequenceEndEvent), None)
            return [self._value(one, (*path, number), 0) for number, one in enumerate(inside)]
        return _scalar(event.value) if event.implicit[0] else event.value

    def _next(self, end: type) -> Any:
        """The next event, None for one of the kind that ends what is read."""
        event = next(self._events)
        return None if isinstance(event, end) else event

    def _mapping(self, path: ValuePath) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for name in iter(lambda: self._next(self._yaml.MappingEndEvent), None):
            line = name.start_mark.line + 1
            if not isinstance(name, self._yaml.ScalarEvent):
                raise TextFault("the name of an entry must be a text", line)
            if name.value in entries:
                raise TextFault(_twice(name.value), line, lines[name.value])
            lines[name.value] = line
            entries[name.value] = self._value(next(self._events), (*path, name.value), line)
        return entries


def _scalar(text: str) -> Any:
    if _INTEGER.fullmatch(text):
        return int(text)
    return _SCALARS.get(text, text)
