"""Types of records in words, for messages about values that are of another type."""

from __future__ import annotations

from typing import Any

import msgspec.inspect as kinds

_SHOWN = 60


def in_words(kind: kinds.Type) -> str:
    """The values a type allows, such as "a whole number from 1 to 8"; the description of its type where it has one.

    A type says it as `Annotated[str, msgspec.Meta(description="the name of a layer")]`.
    """
    match kind:
        case kinds.Metadata():
            return str((kind.extra_json_schema or {}).get("description") or in_words(kind.type))
        case kinds.BoolType():
            return "true or false"
        case kinds.IntType():
            return f"a whole number{_range(kind)}"
        case kinds.FloatType():
            return f"a number{_range(kind)}"
        case kinds.StrType():
            pattern = f" of the form {kind.pattern}" if kind.pattern else ""
            return f"a text{pattern}{_sizes(kind.min_length, kind.max_length, 'characters')}"
        case kinds.LiteralType():
            return _alternatives([repr(value) for value in kind.values])
        case kinds.EnumType():
            return _alternatives([repr(one.value) for one in kind.cls])
        case kinds.TupleType():
            members = list(map(in_words, kind.item_types))
            inside = f"each {members[0]}" if len(set(members)) == 1 else ", ".join(members)
            return f"a list of {len(members)} ({inside})"
        case kinds.CollectionType():
            return f"a list{_sizes(kind.min_length, kind.max_length, 'members')}{_each(kind.item_type)}"
        case kinds.DictType():
            return f"a mapping{_sizes(kind.min_length, kind.max_length, 'entries')}{_each(kind.value_type)}"
        case kinds.StructType() | kinds.DataclassType() | kinds.TypedDictType():
            return f"a mapping of {', '.join(names_of(kind))}"
        case kinds.UnionType():
            return _alternatives([in_words(one) for one in kind.types if not isinstance(one, kinds.NoneType)])
    return "something else"


def names_of(kind: kinds.Type) -> list[str]:
    """Names of the entries of a record's type."""
    records = kinds.StructType | kinds.DataclassType | kinds.TypedDictType
    return [one.encode_name for one in kind.fields] if isinstance(kind, records) else []


def kind_at(kind: kinds.Type, path: tuple[str | int, ...]) -> kinds.Type:
    """The type of the value that a path leads to from one of `kind`."""
    for step in path:
        kind = next((inner for one in _variants(kind) if (inner := _inner(one, step)) is not None), kinds.AnyType())
    return kind


def record_at(kind: kinds.Type, path: tuple[str | int, ...]) -> kinds.Type:
    """As `kind_at`, of types that a value may have the one that is a record."""
    variants = _variants(kind_at(kind, path))
    return next((one for one in variants if names_of(one)), kinds.AnyType())


def name_kind_at(kind: kinds.Type, path: tuple[str | int, ...]) -> kinds.Type:
    """The type of the names in the mapping that a path leads to."""
    variants = _variants(kind_at(kind, path))
    return next((one.key_type for one in variants if isinstance(one, kinds.DictType)), kinds.AnyType())


def _variants(kind: kinds.Type) -> list[kinds.Type]:
    while isinstance(kind, kinds.Metadata):
        kind = kind.type
    return [inner for one in kind.types for inner in _variants(one)] if isinstance(kind, kinds.UnionType) else [kind]


def _inner(kind: kinds.Type, step: str | int) -> kinds.Type | None:
    match kind:
        case kinds.StructType() | kinds.DataclassType() | kinds.TypedDictType():
            return next((one.type for one in kind.fields if one.encode_name == step), None)
        case kinds.DictType():
            return kind.value_type
        case kinds.TupleType():
            return kind.item_types[step] if isinstance(step, int) and step < len(kind.item_types) else None
        case kinds.CollectionType():
            return kind.item_type
    return None


def _each(kind: kinds.Type) -> str:
    return "" if isinstance(kind, kinds.AnyType) else f" (each {in_words(kind)})"


def _range(kind: kinds.IntType | kinds.FloatType) -> str:
    if kind.ge is not None and kind.le is not None:
        return f" from {kind.ge} to {kind.le}"
    sides = (("at least", kind.ge), ("above", kind.gt), ("at most", kind.le), ("below", kind.lt))
    text = " and ".join(f"{word} {limit}" for word, limit in sides if limit is not None)
    return f" {text}" if text else ""


def _sizes(least: int | None, most: int | None, unit: str) -> str:
    if least is not None and most is not None:
        return f" of {least} to {most} {unit}"
    if most is not None:
        return f" of at most {most} {unit}"
    return f" of at least {least} {unit}" if least else ""


def _alternatives(words: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def shown(value: Any) -> str:
    """A value in few words."""
    if isinstance(value, dict):
        return f"a mapping of {len(value)} {'entry' if len(value) == 1 else 'entries'}"
    if isinstance(value, list):
        inside = ", ".join(shown(one) for one in value[:8])
        return f"[{inside}{f', ... ({len(value)} members)' if len(value) > 8 else ''}]"[: 2 * _SHOWN]
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return repr(value) if len(value) <= _SHOWN else f"{value[:_SHOWN]!r}... ({len(value)} characters)"
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"
