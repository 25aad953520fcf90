"""Operators' attributes as ONNX attributes and back, by the types their dataclasses declare."""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx

from dovetail.graph.types import DType
from dovetail.operators.base import Operator

_MOST_CHARACTERS = 100_000
"""Longest text of one attribute that is read."""


def write_attributes(operator: Operator) -> list[onnx.AttributeProto]:
    """One ONNX attribute per field, in the fields' order: integers and lists of them as such, others as JSON text."""
    return [_write(field.name, getattr(operator, field.name)) for field in dataclasses.fields(operator)]


def read_attributes(kind: type[Operator], attributes: Sequence[onnx.AttributeProto]) -> Operator:
    """The operator whose attributes were written; raises ValueError when they are not its own."""
    hints = typing.get_type_hints(kind)
    fields = [field.name for field in dataclasses.fields(kind)]
    values: dict[str, Any] = {}
    for attribute in attributes:
        if attribute.name not in fields or attribute.name in values:
            raise ValueError(f"{kind.__name__} has no attribute {attribute.name!r}, or it is given twice")
        values[attribute.name] = _decode(_read(attribute), hints[attribute.name], attribute.name)
    missing = [name for name in fields if name not in values]
    if missing:
        raise ValueError(f"{kind.__name__} lacks its attribute {missing[0]!r}")
    return kind(**values)


def _write(name: str, value: Any) -> onnx.AttributeProto:
    attribute = onnx.AttributeProto(name=name)
    plain = _plain(value)
    if isinstance(plain, int) and not isinstance(plain, bool):
        attribute.type = onnx.AttributeProto.INT
        attribute.i = plain
    elif isinstance(plain, list) and all(isinstance(item, int) for item in plain):
        attribute.type = onnx.AttributeProto.INTS
        attribute.ints.extend(plain)
    else:
        attribute.type = onnx.AttributeProto.STRING
        attribute.s = json.dumps(plain).encode()
    return attribute


def _plain(value: Any) -> Any:
    """The value in lists, numbers and text."""
    if isinstance(value, DType):
        return value.text
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _read(attribute: onnx.AttributeProto) -> Any:
    if attribute.type == onnx.AttributeProto.INT:
        return attribute.i
    if attribute.type == onnx.AttributeProto.INTS:
        return list(attribute.ints)
    if attribute.type == onnx.AttributeProto.STRING and len(attribute.s) <= _MOST_CHARACTERS:
        return json.loads(attribute.s)
    raise ValueError(f"attribute {attribute.name!r} is of a kind or length that Dovetail does not write")


def _decode(value: Any, hint: Any, name: str) -> Any:
    """A plain value as the declared type; raises ValueError when it is not one."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _decode(value, next(part for part in arguments if part is not type(None)), name)
    if origin is tuple and isinstance(value, list):
        kinds = [arguments[0]] * len(value) if arguments[1:] == (...,) else list(arguments)
        if len(kinds) == len(value):
            return tuple(_decode(item, kind, name) for item, kind in zip(value, kinds, strict=True))
    if isinstance(hint, type) and isinstance(value, str) and issubclass(hint, enum.Enum):
        for member in hint:
            if _plain(member) == value:
                return member
    if (hint is float and isinstance(value, (int, float))) or (isinstance(hint, type) and type(value) is hint):
        return value
    raise ValueError(f"attribute {name!r} holds {value!r}")
