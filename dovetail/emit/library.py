"""Calls of C functions with pointers and constant structures: how software on the core is asked to compute."""

from __future__ import annotations

from collections.abc import Callable

from dovetail.kernels.text import integer
from dovetail.target.description import CValue, LibraryCall, Pointer, Struct

Place = Callable[[str], str]
"""Operand name -> C expression of its first byte."""


def library_call(call: LibraryCall, name: str, place: Place) -> tuple[list[str], str]:
    """The declarations of a call's structures, and the call as an expression.

    Args:
        call: function and arguments.
        name: prefix of the structures' names.
        place: finds operands.
    """
    declared, arguments = [], []
    for position, value in enumerate(call.arguments):
        if isinstance(value, Struct):
            own = f"{name}_argument_{position}"
            declared.append(f"static const {value.c_type} {own} = {_text(value, place)};")
            arguments.append(f"&{own}")
        else:
            arguments.append(_text(value, place))
    return declared, f"{call.function}({', '.join(arguments)})"


def _text(value: CValue, place: Place) -> str:
    """A value as C: an initialiser or an argument."""
    if isinstance(value, Struct):
        members = (f".{name} = {_text(content, place)}" for name, content in value.members.items())
        return f"{{{', '.join(members)}}}"
    if isinstance(value, Pointer):
        if value.c_type.removeprefix("const ") == "uint8_t":  # what places are
            return place(value.operand)
        void = "const void" if value.c_type.startswith("const ") else "void"
        return f"({value.c_type} *)({void} *)({place(value.operand)})"
    return integer(value)
