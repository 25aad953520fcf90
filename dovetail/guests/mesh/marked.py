"""A user's YAML file as plain values that know their lines: bounded, no aliases, no tags, no key twice in a mapping."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.errors import PlanError

MOST_BYTES = 128 << 20
"""Of a file."""
_DEEPEST = 12
_NUMBER = re.compile(r"-?\d{1,12}")
_HINT = "docs/mesh.md shows what such a file holds"


@dataclass(frozen=True, slots=True)
class LocatedValue:
    """A value of a file."""

    value: Any
    """A dict of str to Marked, a list of Marked, an int, a str or None."""
    file: str
    line: int
    """From 1; of what a mapping holds, its key's. 0 where there is no line."""

    @property
    def place(self) -> str:
        """File and line."""
        return f"{self.file}:{self.line}" if self.line else self.file

    def wrong(self, what: str, hint: str = _HINT, other: LocatedValue | None = None) -> PlanError:
        """The error about this value; with another one it clashes with, the line of both."""
        clash = f" (clashes with {other.place})" if other is not None else ""
        return PlanError(what + clash, where=self.place, hint=hint)

    def entries(self, *known: str) -> dict[str, LocatedValue]:
        """The entries of a mapping; raises PlanError for what is none, or has others than those known, if any are."""
        if self.value is None:
            return {}
        if not isinstance(self.value, dict):
            raise self.wrong(f"this must be a mapping{_of(known)}, not {shown(self)}")
        for name, entry in self.value.items():
            if known and name not in known:
                raise entry.wrong(f"there is no '{name[:40]}' here{_of(known)}")
        return self.value

    def items(self) -> list[LocatedValue]:
        """The members of a list; raises PlanError for what is none."""
        if not isinstance(self.value, list):
            raise self.wrong(f"this must be a list, not {shown(self)}")
        return self.value

    def text(self) -> str:
        """A text; raises PlanError for what is none."""
        if not isinstance(self.value, str):
            raise self.wrong(f"this must be a text, not {shown(self)}")
        return self.value

    def numbers(self, what: str, limits: list[tuple[int, int]]) -> tuple[int, ...]:
        """A list of whole numbers, each within its limits; `what` names them in the error, a PlanError."""
        found = tuple(one.value for one in self.value) if isinstance(self.value, list) else ()
        fits = len(found) == len(limits) and all(type(one) is int for one in found)
        if not fits or any(not low <= one <= high for one, (low, high) in zip(found, limits, strict=True)):
            spans = ", ".join(f"{low} to {high}" if low < high else str(low) for low, high in limits)
            raise self.wrong(f"{what} must be {len(limits)} whole numbers ({spans}), not {shown(self)}")
        return found


def _of(known: tuple[str, ...]) -> str:
    return f" of {', '.join(known)}" if known else ""


def shown(one: LocatedValue) -> str:
    """A value in few words."""
    if isinstance(one.value, dict):
        return "a mapping"
    if isinstance(one.value, list):
        inside = ", ".join(shown(each) for each in one.value[:8])
        return f"[{inside}{', ...' if len(one.value) > 8 else ''}]"[:80]
    return "nothing" if one.value is None else repr(one.value)[:60]


def read_marked(path: Path) -> LocatedValue:
    """The values of a YAML file (JSON is YAML too).

    Raises:
        PlanError: it cannot be read, is too large, no YAML, or uses more of it than lists, mappings, numbers and texts.
    """
    where = path.name
    try:
        if path.stat().st_size > MOST_BYTES:
            raise PlanError(f"the file has more than {MOST_BYTES} bytes", where=where, hint=_HINT)
        content = path.read_bytes().decode()
    except OSError as error:
        hint = "check the spelling and the permission to read"
        raise PlanError(f"the mapping cannot be read: {error.strerror}", where=where, hint=hint) from None
    except UnicodeDecodeError:
        raise PlanError("the file is no text in UTF-8", where=where, hint=_HINT) from None
    return parse_marked(content, where)


def parse_marked(content: str, where: str) -> LocatedValue:
    """As `read_marked`, of a text; `where` names it in errors."""
    import yaml  # type: ignore[import-untyped]

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check_depth(yaml.parse(content, loader), yaml, where)
        root = yaml.compose(content, loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}" if mark else where
        what = str(getattr(error, "problem", None) or error).splitlines()[0][:100]
        raise PlanError(f"this is no YAML: {what}", where=place, hint=_HINT) from None
    if root is None:
        return LocatedValue(None, where, 0)
    return _value(root, where, root.start_mark.line + 1, yaml)


def _check_depth(events: Iterator[Any], yaml: Any, where: str) -> None:
    """Refuse what is nested deeply, refers to itself or is given another type, before anything is built of it."""
    depth = 0
    for event in events:
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        fault = "an alias or anchor" if getattr(event, "anchor", None) else ""
        fault = "a tag" if getattr(event, "tag", None) else fault
        fault = f"nested more than {_DEEPEST} deep" if depth > _DEEPEST else fault
        if fault:
            place = f"{where}:{event.start_mark.line + 1}"
            raise PlanError(
                f"this file may hold lists, mappings, numbers and texts only: {fault}", where=place, hint=_HINT
            )


def _value(node: Any, where: str, line: int, yaml: Any) -> LocatedValue:
    """The value of a YAML node that stands at a line."""
    if isinstance(node, yaml.MappingNode):
        found: dict[str, LocatedValue] = {}
        for key, value in node.value:
            here = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise PlanError("a key must be a text", where=f"{where}:{here}", hint=_HINT)
            if key.value in found:
                raise LocatedValue(None, where, here).wrong(
                    f"'{key.value[:40]}' is given twice", "leave one of them out", found[key.value]
                )
            found[key.value] = _value(value, where, here, yaml)
        return LocatedValue(found, where, line)
    if isinstance(node, yaml.SequenceNode):
        return LocatedValue([_value(one, where, one.start_mark.line + 1, yaml) for one in node.value], where, line)
    text: Any = node.value
    if not node.style and _NUMBER.fullmatch(text):
        text = int(text)
    elif not node.style and text in ("", "~", "null"):
        text = None
    return LocatedValue(text, where, line)
