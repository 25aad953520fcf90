"""A region taken apart; its kernel's parameters while the text is written, and the statements of the present place."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from dovetail.ir.graph import Graph, Node
from dovetail.ir.layout import Layout
from dovetail.ir.operators.arithmetic import Clip, Requantize
from dovetail.ir.operators.movement import Pad
from dovetail.ir.types import Array, DType, Shape, TensorType
from dovetail.kernels.c import Lines, c_type, function, identifiers, times, total, without_unused
from dovetail.kernels.kernel import (
    BLOCK,
    CoreKernel,
    CoreTraits,
    Expression,
    Index,
    KernelWriter,
    Parameter,
    UnsupportedRegion,
    declarations,
    refuse,
)
from dovetail.target.pattern import Choice, Match, Pattern, apply, constant, match_pattern, operand

REQUANTISED = apply(Clip, apply(Requantize, operand("x"), constant("multiplier"), constant("shift")))
"""A value that is requantised and limited."""


@dataclass
class KernelScope:
    """A region taken apart, and the kernel written for it; `dataclasses.replace` gives one that is not begun."""

    graph: Graph
    pad: Node | None
    """The `Pad` that is folded into the anchor's window."""
    anchor: Node | None
    """The one operator that is not pointwise; None for a region of pointwise operators alone."""
    tree: tuple[Node, ...]
    """The pointwise operators, in topological order."""
    core: CoreTraits
    name: str = "kernel"
    """The C function's name."""
    border: CoreKernel | None = None
    """The function, shared by layers, that computes pixels some of whose taps are outside the image."""
    overwritten: str | None = None
    """The region input the result is written over."""
    lanes: int | None = None
    """Output channels a sum-of-products kernel computes together: asked for, and once chosen what they are."""
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    """Layouts of operands and the result that share bytes; of a relayout also others that are not row-major."""
    choice: Choice = field(default_factory=dict)
    """Settings of the kernel's knobs (`dovetail.kernels.offered`)."""
    compact: bool = False
    """Whether sizes and constants are members of a block, so that layers can share the function."""
    single: bool = False
    """Whether the compact function computes the one pixel it is told."""
    fixed: Mapping[str, int] = field(default_factory=dict)
    """Members of the block that are the same in every layer, and so are written as numbers."""
    any_shift: bool = False
    """Whether requantisation takes the one form that does for all shifts."""
    texts: dict[Hashable, CoreKernel] | None = None
    """Kernels by `KernelWriter.alike`: one alike has their text and name. None: each has its own."""
    constants: dict[str, Array] = field(init=False, default_factory=dict)
    """The kernel's constants by their C identifiers."""
    numbers: dict[str, int] = field(init=False, default_factory=dict)
    """The numbers of this layer's block."""
    lines: Lines = field(init=False, default_factory=list)
    """Statements that name intermediate values of the present place."""
    index: Index = field(init=False, default_factory=lambda: lambda shape: "0")
    """Index of the present place in an operand."""
    read: Callable[[str, str], str] = field(init=False, default_factory=lambda: "{}[{}]".format)
    """C text of the element of an array at an index; kernels that keep elements in variables have their own."""
    channel: str = field(init=False, default="0")
    """In a compact kernel: C text of the present place along the result's last axis."""
    turn: int | None = field(init=False, default=None)
    """The element of the turn, at `index` + `turn` of every operand; None where no whole bytes are computed."""
    _inputs: dict[str, str] = field(init=False, default_factory=dict)
    _kept: dict[tuple[str, str], str] = field(init=False, default_factory=dict)
    _named: dict[str, str] = field(init=False, default_factory=dict)
    """The C types of intermediate values, by name."""

    @property
    def output_shape(self) -> Shape:
        """Shape of the region's only result."""
        return self.graph.types[self.graph.outputs[0]].shape

    @property
    def node(self) -> Node:
        """The anchor of a region that has one."""
        assert self.anchor is not None
        return self.anchor

    def type(self, position: int) -> TensorType:
        """Type of an operand of the anchor."""
        return self.graph.types[self.node.inputs[position]]

    @property
    def result(self) -> TensorType:
        """Type of the anchor's result."""
        return self.graph.types[self.node.output]

    def source(self) -> str:
        """The run-time value the pad, or the anchor without one, reads first."""
        return (self.pad or self.node).inputs[0]

    @property
    def source_dtype(self) -> DType:
        """Element type of `source`."""
        return self.graph.types[self.source()].dtype

    @property
    def pad_value(self) -> float:
        """The element the pad puts around the image; 0 without one."""
        return self.pad.expect(Pad).value if self.pad else 0

    @property
    def types(self) -> list[TensorType]:
        """Types of the anchor's operands."""
        return [self.graph.types[name] for name in self.node.inputs]

    def whole(self, pattern: Pattern) -> Match | None:
        """The region as a pattern of pointwise operators; None where it is another."""
        if self.anchor is not None:
            return None
        match = match_pattern(pattern, self.graph, self.graph.outputs[0])
        return match if isinstance(match, Match) and len(match.nodes) == len(self.tree) else None

    def without_pad(self) -> None:
        """Raise Unsupported for a Pad before the anchor."""
        if self.pad is not None:
            raise UnsupportedRegion(f"a Pad before {type(self.node.operator).__name__} is not fused.")

    def require(self, allowed: tuple[DType, ...]) -> DType:
        """The dtype of `source`, raising Unsupported when it is not one of `allowed`."""
        if self.source_dtype not in allowed:
            names, kind = ", ".join(dtype.text for dtype in allowed), self.graph.types[self.source()]
            raise UnsupportedRegion(f"{type(self.node.operator).__name__} reads {kind}, expected {names}.")
        return self.source_dtype

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

    def operand(self, position: int, name: str) -> str:
        """The C identifier of an operand of the anchor, computed or constant."""
        value = self.node.inputs[position]
        if value in self.graph.constants:
            return self.constant(value, name, self.graph.constants[value])
        return self.input(value, name)

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

    def start(self, first: int) -> str:
        """C text of where a part begins in its whole: a constant, not a number, so that parts share a function."""
        return f"{self.constant(self.node.output, 'start', np.array([first], np.int32))}[0]" if first else "0"

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
        refuse(
            value not in self.graph.constants,
            f"{value!r} is computed at run time, a core kernel needs it at compile time.",
        )
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

    def function(self, name: str, lines: Lines) -> Lines:
        """A kernel that is one function with these statements, and takes the constants that they read."""
        lines = without_unused(lines)
        self.keep(identifiers(lines))
        return function(f"static void {name}", declarations(self.parameters()), lines)

    def writer(
        self, body: Callable[[], Lines], check: Callable[[], object] | None = None, has_storage: bool = False
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

    def held_type(self, array: str) -> str:
        """C type of the elements of an operand or a constant, from its C identifier."""
        if array in self.constants:
            return c_type(DType.of(self.constants[array].dtype))
        return next(self._held(value) for value, name in self._inputs.items() if name == array)

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


def _check_values(graph: Graph) -> None:
    """Raise Unsupported for region inputs or results a core cannot address."""
    refuse(len(graph.outputs) != 1, f"a core kernel gives one result, the region {len(graph.outputs)}.")
    refuse(not graph.nodes, "the region has no operator.")
    for name in (*graph.inputs, *graph.outputs):
        kind = graph.types[name]
        refuse(kind.elements == 0, f"{name!r} is {kind}: it has no elements.")
        refuse(kind.elements * kind.dtype.bits // 8 >= 1 << 31, f"{name!r} is {kind}: larger than 2 GB.")


def _tree(graph: Graph) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """The pointwise nodes that lead to the result, and all nodes before them."""
    producers = graph.producers()
    wanted, tree = {graph.outputs[0]}, []
    for node in reversed(graph.nodes):
        if node.output in wanted and node.operator.pointwise:
            tree.append(node)
            wanted.update(name for name in node.inputs if name in producers)
    inside = {node.output for node in tree}
    return tuple(reversed(tree)), tuple(node for node in graph.nodes if node.output not in inside)


def _anchor(graph: Graph, before: tuple[Node, ...]) -> tuple[Node | None, Node | None]:
    """(pad, anchor) among the nodes that are not in the tree."""
    if not before:
        return None, None
    *rest, anchor = before
    if not rest:
        return None, anchor
    fused = len(rest) == 1 and isinstance(rest[0].operator, Pad) and anchor.inputs[0] == rest[0].output
    if not fused or rest[0].output in anchor.inputs[1:]:
        names = ", ".join(type(node.operator).__name__ for node in before)
        raise UnsupportedRegion(f"only a Pad may come before the one operator that is not pointwise; found {names}.")
    return rest[0], anchor


def split(graph: Graph, core: CoreTraits = CoreTraits()) -> KernelScope:  # noqa: B008
    """Take a region apart; raises Unsupported when it is not of the one form core kernels have."""
    _check_values(graph)
    tree, before = _tree(graph)
    pad, anchor = _anchor(graph, before)
    region = KernelScope(graph, pad, anchor, tree, core)
    users = graph.users()
    if pad is not None and any(user is not anchor for user in users[pad.output]):
        raise UnsupportedRegion("the padded value is used outside the window.")
    if anchor is not None:
        first = {value for node in (pad, anchor) if node is not None for value in node.inputs}
        early = sorted(first.intersection(node.output for node in tree))
        if early:
            raise UnsupportedRegion(f"{early[0]!r} is read by {type(anchor.operator).__name__} and computed pointwise.")
        shape = graph.types[anchor.output].shape
        refuse(
            shape != region.output_shape,
            f"the result {list(shape)} is broadcast to {list(region.output_shape)} afterwards.",
        )
    return region
