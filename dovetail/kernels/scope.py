"""The parameters of a kernel while its text is written, and the statements of the present place."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from dovetail.ir.graph import Graph
from dovetail.ir.layout import Layout
from dovetail.ir.types import Array, DType, Shape
from dovetail.kernels.c import c_type, function, times, total, without_unused
from dovetail.kernels.kernel import (
    BLOCK,
    ROOM,
    Border,
    Expression,
    Index,
    KernelWriter,
    Parameter,
    UnsupportedRegion,
    declarations,
)
from dovetail.target.pattern import Choice


@dataclass
class KernelScope:
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
    constants: dict[str, Array] = field(default_factory=dict)
    """The kernel's constants by their C identifiers."""
    _inputs: dict[str, str] = field(default_factory=dict)
    _kept: dict[tuple[str, str], str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    """Statements that name intermediate values of the present place."""
    _named: dict[str, str] = field(default_factory=dict)
    """The C types of these values, by name."""
    index: Index = field(default=lambda shape: "0")
    """Index of the present place in an operand."""
    read: Callable[[str, str], str] = field(default="{}[{}]".format)
    """C text of the element of an array at an index; kernels that keep elements in variables have their own."""
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
    functions: frozenset[str] = frozenset()
    """See `CoreTraits.functions`."""
    channel: str = "0"
    """In a compact kernel: C text of the present place along the result's last axis."""
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    """Layouts of operands and the result that share bytes; of a relayout also others that are not row-major."""
    choice: Choice = field(default_factory=dict)
    """Settings of the kernel's knobs (`dovetail.kernels.offered`)."""
    turn: int | None = None
    """The element of the turn, at `index` + `turn` of every operand; None where no whole bytes are computed."""

    def input(self, value: str, name: str = "") -> str:
        """The C identifier of a region input, `name` if it is new."""
        if value not in self._inputs:
            wanted = name or ("addend" if self._inputs else "input")
            taken, count = {*self._inputs.values(), *self.constants}, len(self._inputs)
            self._inputs[value] = wanted
            while self._inputs[value] in taken:
                count += 1
                self._inputs[value] = f"{wanted}_{count}"
        return self._inputs[value]

    def constant(self, owner: str, stem: str, array: Array) -> str:
        """The C identifier of a constant that belongs to the value `owner`; asked again, the same one."""
        place = (owner, stem)
        if place not in self._kept:
            name, count = stem, 1
            while name in self.constants or name in self._inputs.values():
                count += 1
                name = f"{stem}_{count}"
            self._kept[place], self.constants[name] = name, np.ascontiguousarray(array)
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
        return self.read(name, self.index(shape))

    def known(self, value: str) -> Array:
        """The array of an operand that must be constant."""
        if value not in self.graph.constants:
            raise UnsupportedRegion(f"{value!r} is computed at run time, a core kernel needs it at compile time.")
        return self.graph.constants[value]

    @contextmanager
    def reading(self, read: Callable[[str, str], str]) -> Iterator[None]:
        """Read arrays in another way for some statements."""
        usual, self.read = self.read, read
        try:
            yield
        finally:
            self.read = usual

    def begin(self, index: Index) -> None:
        """Go on to another place."""
        self.lines, self._named, self.index = [], {}, index

    def define(self, stem: str, kind: str, text: str) -> str:
        """Add a statement that names an intermediate value, by a name nothing else in the function has."""
        count = 1 + sum(known == kind and name.startswith(stem) for name, known in self._named.items())
        taken = {*self._named, *self.constants, *self._inputs.values()}
        name = stem if count == 1 else f"{stem}_{count}"
        while name in taken:
            count += 1
            name = f"{stem}_{count}"
        self._named[name] = kind
        self.lines.append(f"const {kind} {name} = {text};")
        return name

    def named(self, stem: str, kind: str, text: str, low: int = 0, high: int = 0) -> Expression:
        """An intermediate value with a name of its own."""
        return Expression(self.define(stem, kind, text), kind, low, high)

    def keep(self, used: Container[str]) -> None:
        """Drop the constants whose identifiers are not in `used`."""
        self.constants = {name: array for name, array in self.constants.items() if name in used}

    def function(self, name: str, lines: list[str]) -> list[str]:
        """A kernel that is one function with these statements."""
        return function(f"static void {name}", declarations(self.parameters()), without_unused(lines))

    def writer(
        self, body: Callable[[], list[str]], check: Callable[[], object] | None = None, has_storage: bool = False
    ) -> KernelWriter:
        """The writer of such a kernel; `check` as `KernelWriter.check`, by default `body`."""
        return KernelWriter(lambda name: self.function(name, body()), check or body, has_storage=has_storage)

    def loaded(self, value: str, name: str, index: str) -> str:
        """C text of an element of a region input, the C identifier `name`, at a flat index; one that shares a byte is
        taken out of it."""
        layout = self.layouts.get(value)
        if layout is None or not layout.packed:
            return self.read(name, index)
        kind = self.graph.types[value].dtype
        if self.turn is not None:
            byte, shift = self._byte(name, layout), kind.bits * _number(layout, self.turn)
            left = 32 - kind.bits - shift
            return (
                f"field_of({byte}, {left}, {32 - kind.bits})"
                if kind.signed
                else f"({byte} >> {shift} & {2**kind.bits - 1})"
            )
        return f"{'packed' if kind.signed else 'unsigned'}_{kind.bits}({name}, {_field(layout, index)})"

    def stored(self, index: str, text: str) -> str:
        """The C statement that puts an element of the result, an int32_t where it shares a byte, at a flat index."""
        layout, kind = self.layouts.get(self.graph.outputs[0]), self.graph.types[self.graph.outputs[0]].dtype
        if layout is None or not layout.packed:
            return f"output[{index}] = {text};"
        if self.turn is not None:
            place, shift = self.turn // layout.fields, kind.bits * _number(layout, self.turn)
            return f"byte_{place} |= ((uint32_t)({text}) & {2**kind.bits - 1}u) << {shift};"
        return f"put_{kind.bits}(output, {_field(layout, index)}, {text});"

    def _byte(self, name: str, layout: Layout) -> str:
        """C text of the byte of the present element of the turn; turns begin at whole bytes."""
        return f"{name}[{total(f'(index >> {layout.fields.bit_length() - 1})', self.turn_byte(layout))}]"

    def turn_byte(self, layout: Layout) -> int:
        """Which byte of a turn the present element is in."""
        return (self.turn or 0) // layout.fields

    def shares(self, value: str) -> bool:
        """Whether elements of a region input or of the result share bytes."""
        return value in self.layouts and self.layouts[value].packed

    def _held(self, value: str) -> str:
        """C type of what holds the elements of a region input or the result."""
        return "uint8_t" if self.shares(value) else c_type(self.graph.types[value].dtype)

    def parameters(self) -> tuple[Parameter, ...]:
        """Output, inputs in the region's order, constants."""
        result = self.graph.outputs[0]
        over = self.overwritten
        parameters = [Parameter("output", result, self._held(result), False, over is not None)]
        for value in self.graph.inputs:
            if value in self._inputs:
                parameters.append(Parameter(self._inputs[value], value, self._held(value), False, value == over))
        for name, array in self.constants.items():
            parameters.append(Parameter(name, name, c_type(DType.of(array.dtype)), True))
        if self.border is not None and self.border.block is not None:
            parameters.append(self.border.block.parameter)
        return tuple(parameters)


def _number(layout: Layout, turn: int) -> int:
    """Which field of its byte an element of a turn has, from the lowest bits on."""
    field = turn % layout.fields
    return layout.fields - 1 - field if layout.dims[-1] in layout.backwards else field


def _field(layout: Layout, index: str) -> str:
    """C text of the place of an element among the fields of a packed value, the lowest bits first."""
    down = layout.dims[-1] in layout.backwards
    return f"({index}) ^ {layout.fields - 1}" if down else index
