"""What the text of a kernel is written with: expressions with their ranges, and the parameters they name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dovetail.graph.graph import Graph, Node
from dovetail.graph.types import Array, DType, Shape
from dovetail.kernels.kernel import BLOCK, Block, Constants, Parameter, Unsupported, c_type
from dovetail.kernels.text import times
from dovetail.target.description import CoreInstruction

INT32 = (-(1 << 31), (1 << 31) - 1)

ROOM = 3072
"""Bytes of stack a kernel may use where the core has the usual 4096."""

Index = Callable[[Shape], str]
"""C text of the flat index, at the present place of the result, into an operand of a shape that broadcasts to it."""


@dataclass(frozen=True)
class Expression:
    """A C expression whose value is known to lie in [low, high]; floats have no range."""

    text: str
    c_type: str
    """int32_t (narrower operands are promoted to it), int64_t or float."""
    low: int = 0
    high: int = 0

    @property
    def reach(self) -> int:
        """The largest magnitude."""
        return max(abs(self.low), abs(self.high))


def expression_of(text: str, dtype: DType) -> Expression:
    """An element of an array."""
    if dtype is DType.FLOAT32:
        return Expression(text, "float")
    if dtype is DType.UINT32:
        return Expression(f"(int64_t){text}", "int64_t", dtype.low, dtype.high)
    return Expression(text, "int64_t" if dtype is DType.INT64 else "int32_t", dtype.low, dtype.high)


@dataclass(frozen=True, slots=True)
class CoreTraits:
    """What a core offers its kernels."""

    accumulators: int = 16
    """Sums the inner loops keep at once; 16 suits the 31 registers of RISC-V, 6 the 13 of Arm Thumb."""
    instructions: tuple[CoreInstruction, ...] = ()
    """What it can do beyond what compilers select."""
    room: int = ROOM
    """Bytes of stack for elements that are put side by side."""


@dataclass(frozen=True, slots=True)
class Border:
    """A function shared by layers that computes one output pixel."""

    name: str
    block: Block | None

    def call(self, arguments: Sequence[str], place: Sequence[str]) -> str:
        """The statement for the pixel at `place`; `arguments` are the result and the inputs."""
        return f"{self.name}({', '.join([*arguments, *([BLOCK] if self.block else []), *place])});"


@dataclass
class Scope:
    """The parameters of one kernel while its text is written, and the statements of the present place."""

    graph: Graph
    accumulators: int = 16
    """Sums there are registers for."""
    overwritten: str | None = None
    """The region input the result is written over."""
    lanes: int | None = None
    """Output channels a sum-of-products kernel computes together: asked for, and once chosen what they are."""
    room: int = ROOM
    """Bytes of stack for elements that are put side by side."""
    constants: Constants = field(default_factory=Constants)
    _inputs: dict[str, str] = field(default_factory=dict)
    _kept: dict[tuple[str, str], str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    index: Index = field(default=lambda shape: "0")
    compact: bool = False
    """Whether sizes and constants are members of a block, so that layers can share the function."""
    fixed: Mapping[str, int] = field(default_factory=dict)
    """Members of the block that are the same in every layer, and so are written as numbers."""
    numbers: dict[str, int] = field(default_factory=dict)
    """The numbers of this layer's block."""
    any_shift: bool = False
    """Whether requantisation takes the one form that does for all shifts."""
    border: Border | None = None
    """The function, shared by layers, that computes pixels some of whose taps are outside the image."""
    channel: str = "0"
    """In a compact kernel: C text of the present place along the result's last axis."""

    def input(self, value: str, name: str = "") -> str:
        """The C identifier of a region input, `name` if it is new."""
        if value not in self._inputs:
            wanted = name or ("addend" if self._inputs else "input")
            taken = list(self._inputs.values()).count
            self._inputs[value] = wanted if not taken(wanted) else f"{wanted}_{len(self._inputs) + 1}"
        return self._inputs[value]

    def constant(self, owner: str, stem: str, array: Array) -> str:
        """The C identifier of a constant that belongs to the value `owner`; asked again, the same one."""
        place = (owner, stem)
        if place not in self._kept:
            self._kept[place] = self.constants.add(stem, np.ascontiguousarray(array))
        return self._member(self._kept[place])

    def _member(self, name: str) -> str:
        return f"{BLOCK}->{name}" if self.compact else name

    def number(self, owner: str, stem: str, value: int) -> int | str:
        """A number of the value `owner`: itself, or in a compact kernel the member of the block that holds it."""
        if not self.compact:
            return value
        place = (owner, stem)
        if place not in self._kept:
            count = sum(name == stem or name.startswith(f"{stem}_of_") for name in self.numbers)
            self._kept[place] = f"{stem}_of_{count + 1}" if count else stem
            self.numbers[self._kept[place]] = value
        name = self._kept[place]
        return value if name in self.fixed else self._member(name)

    def parameter(self, owner: str, stem: str, array: Array) -> str:
        """The element, at the present place, of a constant of one element or one per channel."""
        name = self.constant(owner, stem, array)
        if not self.compact:
            return self.element(name, array.shape)
        step = self.number(owner, f"{stem}_step", int(array.size > 1))
        return f"{name}[{times(self.channel, step)}]"

    def element(self, name: str, shape: Shape) -> str:
        """The element of an array at the present place."""
        return f"{name}[{self.index(shape)}]"

    def known(self, value: str) -> Array:
        """The array of an operand that must be constant."""
        if value not in self.graph.constants:
            raise Unsupported(f"{value!r} is computed at run time, a core kernel needs it at compile time.")
        return self.graph.constants[value]

    def define(self, stem: str, kind: str, text: str) -> str:
        """Add a statement that names an intermediate value."""
        taken = sum(line.startswith(f"const {kind} {stem}") for line in self.lines)
        name = f"{stem}_{taken + 1}" if taken else stem
        self.lines.append(f"const {kind} {name} = {text};")
        return name

    def keep(self, used: set[str]) -> None:
        """Drop the constants whose identifiers are not in `used`."""
        self.constants.arrays = {name: array for name, array in self.constants.arrays.items() if name in used}

    def parameters(self) -> tuple[Parameter, ...]:
        """Output, inputs in the region's order, constants."""
        types = self.graph.types
        result = self.graph.outputs[0]
        over = self.overwritten
        found = [Parameter("output", result, c_type(types[result].dtype), False, over is not None)]
        for value in self.graph.inputs:
            if value in self._inputs:
                found.append(Parameter(self._inputs[value], value, c_type(types[value].dtype), False, value == over))
        for name, array in self.constants.arrays.items():
            found.append(Parameter(name, name, c_type(DType.of(array.dtype)), True))
        if self.border is not None and self.border.block is not None:
            found.append(self.border.block.parameter)
        return tuple(found)


Rule = Callable[[Scope, Node, Sequence[Expression]], Expression]
