"""Kernels of which only a program compiled for the device is there, declared in a few lines:

add = BinaryKernel("vendor_add", pattern, Path("vendor.bin"), "add", ("a", "b", "result", lambda m: 16),
                   items=lambda m: (m.result.elements, 1, 1))
TARGET = with_kernels(opencl.TARGET, [add])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dovetail.errors import TargetError
from dovetail.ir.types import Array
from dovetail.records import Record, field
from dovetail.target import Constraint, CValue, LibraryCall, Match, Offload, Pointer
from dovetail.target.pattern import Pattern, leaves
from dovetail.targets.opencl.bodies import Sizes
from dovetail.targets.opencl.project import DeviceBinary
from dovetail.targets.vendorlib import packed

Argument = str | int | Callable[[Match], int]
"""An operand by its leaf in the pattern, or "result"; or a number (int32), the same for every layer or made from the
match."""


class BinaryKernel(Record):
    """A kernel in a program compiled for the device, and what it computes."""

    name: str
    """Name of the offload in reports; a C identifier."""
    pattern: Pattern
    file: Path
    """Binary for clCreateProgramWithBinary."""
    kernel: str
    """Its name in the program."""
    arguments: Sequence[Argument]
    """In the order of its parameters; operands are buffers of their own."""
    items: Callable[[Match], Sizes]
    """Work-items along each dimension."""
    constraints: tuple[Constraint, ...] = ()
    constants: Mapping[str, Callable[[Match], Array]] = field(default_factory=dict)
    """How constant operands are laid out for it; those that are absent are given as they are."""
    cycles: Callable[[Match], int] | None = None
    """Estimated; one per element of the result by default."""

    def __post_init__(self) -> None:
        known = ("result", *leaves(self.pattern), *self.constants)
        wrong = [name for name in self.arguments if isinstance(name, str) and name not in known]
        if wrong:
            what = f"it is given '{wrong[0]}', which is no operand of its pattern"
            raise TargetError(what, where=self.name, hint=f"use {', '.join(dict.fromkeys(known))}")

    def binary(self) -> DeviceBinary:
        """The part of it that the project needs."""
        known, kinds = {**leaves(self.pattern), **dict.fromkeys(self.constants, True)}, list[str]()
        for argument in self.arguments:
            operand = "number" if not isinstance(argument, str) else "constants" if known.get(argument) else "part"
            kinds.append(operand)
        return DeviceBinary(self.file, self.kernel, self.name, tuple(kinds))

    def offload(self) -> Offload:
        """The offload that starts it."""
        return Offload(
            name=self.name,
            pattern=self.pattern,
            constraints=self.constraints,
            pack=self._packed,
            commands=lambda match, operands: (LibraryCall(self.name, self._arguments(match)),),
            cycles=self.cycles or (lambda match: match.result.elements),
            strided=False,
            prefer=self.cycles is None,  # who adds a kernel wants it, and how long it takes is not known
        )

    def _packed(self, match: Match) -> dict[str, Array]:
        return packed((n for n in self.arguments if isinstance(n, str)), self.pattern, self.constants, match)

    def _arguments(self, match: Match) -> tuple[CValue, ...]:
        constants, found = self._packed(match), list[CValue]()
        for argument in self.arguments:
            if not isinstance(argument, str):
                found.append(argument if isinstance(argument, int) else argument(match))
                continue
            kind = match.result if argument == "result" else None
            size = constants[argument].nbytes if argument in constants else (kind or match.type(argument)).nbytes
            found += [Pointer(argument, "const uint8_t"), size]
        return (*found, *self.items(match))
