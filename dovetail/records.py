"""Frozen records: `msgspec.Struct`, which the module `dataclasses` takes for a dataclass.

To make a class takes a thirtieth of a dataclass's time, which start-up pays for each, and to make an object a seventh.
"""

from __future__ import annotations

from dataclasses import Field, make_dataclass
from dataclasses import field as dataclass_field
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, dataclass_transform

from msgspec import NODEFAULT, Struct
from msgspec import field as field
from msgspec.structs import force_setattr as force_setattr
from msgspec.structs import replace as replace


class _Fields:
    """The attribute that `dataclasses` asks for, made when it is."""

    def __get__(self, record: Struct | None, kind: type[Struct]) -> dict[str, Field[Any]]:
        return _fields(kind)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Record(Struct, frozen=True):
    """A base of records: `class Size(Record)`, with `dict=True` where it has cached properties.

    `dataclasses.replace`, `fields`, `asdict`, `astuple` and `is_dataclass` take it for a dataclass. The `replace` of
    this module takes records alone, and a tenth of the time. `vars` has no field: use `msgspec.structs.asdict`.
    """

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    else:
        __dataclass_fields__ = _Fields()


@cache
def _fields(kind: type[Struct]) -> dict[str, Field[Any]]:
    """The fields of a record as those of a dataclass."""
    types = {
        name: hint for base in reversed(kind.__mro__) for name, hint in vars(base).get("__annotations__", {}).items()
    }
    names, defaults = kind.__struct_fields__, kind.__struct_defaults__
    given = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    fields = [(name, types[name], _default(given.get(name, NODEFAULT))) for name in names]
    made: dict[str, Field[Any]] = vars(make_dataclass(kind.__name__, fields))["__dataclass_fields__"]
    return made


class _Defaults(Struct):
    one: list[int] = field(default_factory=list)


_FACTORY = type(_Defaults.__struct_defaults__[0])


def _default(default: Any) -> Any:
    """The default of a field as a dataclass has it."""
    if default is NODEFAULT:
        return dataclass_field()
    made = isinstance(default, _FACTORY)
    return dataclass_field(default_factory=default.factory) if made else dataclass_field(default=default)
