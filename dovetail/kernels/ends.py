"""The end of a sum of products as a C function of its own: of the sum and single elements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dovetail.kernels.c import Lines, c_type, function, identifiers
from dovetail.kernels.epilogue import element
from dovetail.kernels.kernel import UnsupportedRegion
from dovetail.kernels.scope import KernelScope
from dovetail.kernels.sums import Ended
from dovetail.kernels.window import anchored

_KINDS = {"at_position": "position", "at_channel": "channel", "0": "one"}
_PROMOTED = {wide: wide for wide in ("int64_t", "uint32_t")}


@dataclass(frozen=True)
class Extra:
    """An array the end reads."""

    name: str
    kind: str
    """"channel": an element per output channel; "position": per element of the result; "one": one element."""


@dataclass(frozen=True)
class EndFunction:
    """The function."""

    c_type: str
    """C type of its result."""
    lines: tuple[str, ...]
    """Statements."""
    extras: tuple[Extra, ...]
    """The arrays of which it reads an element, its arguments behind the sum."""

    def write(self, name: str, types: Mapping[str, str]) -> Lines:
        """The C under a name; `types` has the C types of the arrays."""
        extras = (f"{_PROMOTED.get(types[extra.name], 'int32_t')} {extra.name}" for extra in self.extras)
        return function(f"static inline {self.c_type} {name}", ["int32_t sum", *extras], self.lines)


def end_function(scope: KernelScope, ended: Ended) -> EndFunction:
    """The end of a region's sums; `ended` says which operators are left behind the value that stands for a sum.

    Raises:
        Unsupported: it looks something up in a table, or reads an array in two ways.
    """
    extras: dict[str, Extra] = {}

    def read(array: str, index: str) -> str:
        extra = Extra(array, _KINDS[index])
        if extras.setdefault(array, extra) != extra:
            raise UnsupportedRegion(f"{array} is read in two ways.")
        return array

    index = anchored(scope.output_shape, "at_position", "at_channel")
    with scope.reading(read):
        text = element(scope, index, *ended("sum", index))
    lines = (*scope.lines, f"return {text};")
    if any("[" in line for line in lines):
        raise UnsupportedRegion("scheduled kernels look nothing up in tables.")
    kind = c_type(scope.graph.types[scope.graph.outputs[0]].dtype)
    return EndFunction(kind, lines, tuple(extras[name] for name in identifiers(lines) if name in extras))
