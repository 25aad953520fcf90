"""A core kernel; the parameters, expressions, statements and shared functions its text is written with."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType

import numpy as np

from dovetail.errors import TargetError
from dovetail.ir.graph import Graph
from dovetail.ir.layout import Layout
from dovetail.ir.operators.base import Operator
from dovetail.ir.types import Array, DType, Shape
from dovetail.kernels.c import c_type, times, total
from dovetail.target.chip import Core, CoreInstruction, PairBlocks, Streams
from dovetail.target.pattern import Choice, Space

_STORAGE = re.compile(r"^ +static (?!const)", re.MULTILINE)
"""A static variable inside a function."""
_DEFINED = re.compile(r"const \w+ (\w+) =")
"""A statement of `Scope.define`."""
BLOCK = "layer"
"""Name of the parameter that points to a layer's block, and key for the block's C name."""


class Optimize(enum.StrEnum):
    """What core kernels are made for."""

    SPEED = "speed"
    """Few instructions: the layers with most of the work get loops of their own."""
    SIZE = "size"
    """Little code: one function for all layers of a kind."""


class UnsupportedRegion(ValueError):
    """A region no core kernel computes; the message is one sentence that says why."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One pointer parameter of a kernel's C function."""

    name: str
    """The C identifier."""
    value: str
    """The graph value it points to, or the key into `CoreKernel.constants`."""
    c_type: str
    """C type of one element."""
    is_constant: bool
    """True when the kernel's own compile-time constants hold the elements."""
    overlaps: bool = False
    """True for the output and the operand it is written over: neither is `restrict`."""

    @property
    def declaration(self) -> str:
        """C text of the parameter; all but the output point to constants."""
        const, restrict = "" if self.name == "output" else "const ", "" if self.overlaps else "restrict "
        return f"{const}{self.c_type} *{restrict}{self.name}"


@dataclass(frozen=True, slots=True)
class ConstantBlock:
    """What tells a function shared by layers which layer it computes: a const struct for each of them."""

    c_type: str
    """`struct name`."""
    members: tuple[Parameter, ...]
    """Pointers to constants."""
    constants: Mapping[str, Array]
    """What they point to, by `Parameter.value`."""
    numbers: Mapping[str, int]
    """The members that are int32_t."""

    @property
    def parameter(self) -> Parameter:
        """The parameter through which a function gets it."""
        return Parameter(BLOCK, BLOCK, self.c_type, True)

    def definition(self) -> str:
        """C text of the struct."""
        lines = [f"    const {member.c_type} *{member.name};" for member in self.members]
        lines += [f"    int32_t {name};" for name in self.numbers]
        return "\n".join([f"{self.c_type} {{", *lines, "};"]) + "\n"

    def initialisers(self, constants: Mapping[str, str]) -> tuple[str, ...]:
        """C text of each member, from that of each constant's first element."""
        pointers = [f".{member.name} = {constants[member.value]}" for member in self.members]
        return (*pointers, *(f".{name} = {value}" for name, value in self.numbers.items()))


@dataclass(frozen=True, slots=True)
class CoreKernel:
    """A region of the integer graph as one C99 function.

    The function is `static void name(OUT *restrict output, const A *restrict input, ..., const W *restrict weights,
    ...)`: the arguments follow `parameters`. Arrays are dense and row-major; every array starts at a multiple of 8
    bytes and the output overlaps no operand, but for the one it may have been asked to be written over.
    """

    name: str
    source: str
    """C text: the function, with static functions of its own (named after it) before it."""
    parameters: tuple[Parameter, ...]
    """The arguments in order; the first is the output, the region's inputs come next, the constants last."""
    constants: Mapping[str, Array]
    """What to emit as const arrays: re-ordered, padded and folded as the kernel wants them."""
    helpers: tuple[str, ...] = ()
    """Functions of `HELPERS` the text calls, each after those it needs."""
    key: str = ""
    """The text without the function's name: kernels of equal keys can share one function."""
    declarations: tuple[str, ...] = ()
    """C text that must stand before the function once: what the core's own instructions in it need."""
    instructions: tuple[str, ...] = ()
    """Names of the core's own instructions in it."""
    notes: tuple[str, ...] = ()
    """Why instructions of the core are not used in it, one sentence each."""
    block: ConstantBlock | None = None
    """What the parameter `layer` points to, where the function, or one it calls, is shared by layers."""
    lanes: int | None = None
    """Output channels a sum-of-products kernel computes together, which is the order of its weights; else None."""
    shared: str = ""
    """C text of the function shared by layers that this one calls; it stands before both."""
    foreign: bool = False
    """Whether C of an operator's own is in it, which may divide, or compute on floats."""

    @property
    def told(self) -> tuple[Parameter, ...]:
        """The parameters and the members of the block."""
        return (*self.parameters, *(self.block.members if self.block else ()))

    @property
    def has_storage(self) -> bool:
        """True when it keeps anything in static memory while it runs: then two cores may not be in it at once."""
        return bool(_STORAGE.search(self.source + self.shared))


@dataclass(frozen=True, slots=True)
class KernelWriter:
    """What writes one region's kernel."""

    write: Callable[[str], list[str]]
    """The C under a function name; writing twice gives the same text."""
    check: Callable[[], object]
    """Raises Unsupported where `write` would, from the statements of one element: without loops or functions."""
    declarations: tuple[str, ...] = ()
    """C text that must stand before the function once."""


def declarations(parameters: Sequence[Parameter]) -> list[str]:
    """The C declarations of parameters."""
    return [parameter.declaration for parameter in parameters]


def accumulate_type(low: int, high: int) -> str:
    """The narrowest of int32_t and int64_t that holds [low, high]; raises Unsupported beyond 64 bits."""
    if low >= -(1 << 31) and high < 1 << 31:
        return "int32_t"
    if low >= -(1 << 63) and high < 1 << 63:
        return "int64_t"
    raise UnsupportedRegion(f"a sum may reach {max(-low, high)}, beyond 64 bits.")


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
    streams: Streams | None = None
    """What it has for inner loops."""
    functions: frozenset[str] = frozenset()
    """Functions of `HELPERS` it computes in its own way."""
    pairs: PairBlocks | None = None
    """How it computes sums of products of pairs."""
    joined: int = 0
    """Instructions up to which compilers for it make several turns of a loop one, where nothing in it keeps them from
    that; 0 where they leave loops as they are."""


PIXELS, CHANNELS, UNROLL = "pixels", "channels", "unroll"
"""Names of the knobs of a block of sums in registers."""


@dataclass(frozen=True)
class KernelChoices:
    """What may be chosen about a kernel."""

    space: Space
    default: Choice
    """What a choice of nothing stands for."""
    block: tuple[int, int, int] | None = None
    """Of sums of products: pixels and channels of the block with the fewest loads per product, and taps of a load."""


def loads_per_product(block: tuple[int, int]) -> float:
    """Operands that a block of some pixels and channels loads for each of its products."""
    return sum(block) / (block[0] * block[1])


_JOINED = 148
"""`CoreTraits.joined` of Arm's cores for microcontrollers, for which LLVM unrolls in part; for others it does not."""
CALLING = ("cortex-m0plus", "cortex-m23")
"""Armv6-M and Armv8-M Baseline: no product of 64 bits, so that compilers call a function of their library for it."""


def core_traits(core: Core) -> CoreTraits:
    """What a core offers its kernels; three quarters of its stack are for elements side by side.

    Raises:
        TargetError: it has a function for none of Dovetail's.
    """
    for name in core.functions:
        if name not in HELPERS:
            hint = "name a function of dovetail/kernels/runtime"
            raise TargetError(f"there is no function '{name}' to stand in for", where="Core.functions", hint=hint)
    accumulators = 16 if core.isa.startswith("rv") else 1 if core.isa in CALLING else 6
    functions = frozenset(core.functions)
    room, joined = core.stack * 3 // 4, 0 if core.isa.startswith("rv") else _JOINED
    return CoreTraits(accumulators, core.instructions, room, core.streams, functions, core.pairs, joined)


@dataclass(frozen=True, slots=True)
class Border:
    """A function shared by layers that computes one output pixel."""

    name: str
    block: ConstantBlock | None

    def call(self, arguments: Sequence[str], place: Sequence[str]) -> str:
        """The statement for the pixel at `place`; `arguments` are the result and the inputs."""
        return f"{self.name}({', '.join([*arguments, *([BLOCK] if self.block else []), *place])});"


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
    functions: frozenset[str] = frozenset()
    """See `CoreTraits.functions`."""
    channel: str = "0"
    """In a compact kernel: C text of the present place along the result's last axis."""
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    """Of the run-time operands and the result that share bytes; of a relayout also others that are not row-major."""
    choice: Choice = field(default_factory=dict)
    """What is chosen of the kernel's knobs (`dovetail.kernels.knobs`)."""
    turn: int | None = None
    """Where whole bytes are computed at a time: the element of the turn, at `index` + `turn` of every operand."""

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
        return f"{name}[{self.index(shape)}]"

    def known(self, value: str) -> Array:
        """The array of an operand that must be constant."""
        if value not in self.graph.constants:
            raise UnsupportedRegion(f"{value!r} is computed at run time, a core kernel needs it at compile time.")
        return self.graph.constants[value]

    def define(self, stem: str, kind: str, text: str) -> str:
        """Add a statement that names an intermediate value, by a name nothing else in the function has."""
        count = 1 + sum(line.startswith(f"const {kind} {stem}") for line in self.lines)
        taken = {found[1] for line in self.lines if (found := _DEFINED.match(line))}
        taken.update(self.constants, self._inputs.values())
        name = stem if count == 1 else f"{stem}_{count}"
        while name in taken:
            count += 1
            name = f"{stem}_{count}"
        self.lines.append(f"const {kind} {name} = {text};")
        return name

    def keep(self, used: Container[str]) -> None:
        """Drop the constants whose identifiers are not in `used`."""
        self.constants = {name: array for name, array in self.constants.items() if name in used}

    def loaded(self, value: str, name: str, index: str) -> str:
        """C text of an element of a region input, the C identifier `name`, at a flat index; one that shares a byte is
        taken out of it."""
        layout = self.layouts.get(value)
        if layout is None or not layout.packed:
            return f"{name}[{index}]"
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
        found = [Parameter("output", result, self._held(result), False, over is not None)]
        for value in self.graph.inputs:
            if value in self._inputs:
                found.append(Parameter(self._inputs[value], value, self._held(value), False, value == over))
        for name, array in self.constants.items():
            found.append(Parameter(name, name, c_type(DType.of(array.dtype)), True))
        if self.border is not None and self.border.block is not None:
            found.append(self.border.block.parameter)
        return tuple(found)


def _number(layout: Layout, turn: int) -> int:
    """Which field of its byte an element of a turn has, from the lowest bits on."""
    field = turn % layout.fields
    return layout.fields - 1 - field if layout.dims[-1] in layout.backwards else field


def _field(layout: Layout, index: str) -> str:
    """C text of the place of an element among the fields of a packed value, the lowest bits first."""
    down = layout.dims[-1] in layout.backwards
    return f"({index}) ^ {layout.fields - 1}" if down else index


Rule = Callable[..., Expression]
"""The C of a pointwise operator's result from (scope, node, operator, the elements that are its operands)."""
RULES: dict[type[Operator], tuple[Rule, int]] = {}
"""The rule of each pointwise operator, and how many of its operands are elements; parameters follow those."""


def rule(operator: type[Operator], operands: int = 1) -> Callable[[Rule], Rule]:
    """Registers the C of a pointwise operator."""

    def register(write: Rule) -> Rule:
        RULES[operator] = (write, operands)
        return write

    return register


def is_pointwise(operator: Operator) -> bool:
    """True for operators that compute each element from the same place of their operands."""
    return type(operator) in RULES


SMALL = """\
/* Functions the compiler shall make small. */
#if defined(__clang__)
#define SMALL __attribute__((minsize, noinline))
#elif defined(__GNUC__)
#define SMALL __attribute__((optimize("Os"), noinline))
#else
#define SMALL
#endif
"""
"""C text that must stand before functions marked SMALL."""

_FUNCTION = re.compile(r"^/\*.*?^static inline \w+ (\w+)\(.*?^}\n", re.MULTILINE | re.DOTALL)


def _functions(file: str) -> Mapping[str, str]:
    """C text of each function in a file, by its name, the comment before it included."""
    text = (Path(__file__).parent / "runtime" / file).read_text(encoding="utf-8")
    return {found[1]: found[0] for found in _FUNCTION.finditer(text)}


FLOAT_HELPERS = _functions("floats.c")
"""C source of the float functions, by name."""
HELPERS: Mapping[str, str] = {
    **_functions("integers.c"),
    **_functions("fixed.c"),
    **FLOAT_HELPERS,
    **_functions("narrow.c"),
    **_functions("recurrent.c"),
}
"""C source of each shared inline function, by its name.

The right shift of a negative number is arithmetic in every compiler supported (C99 leaves it to the implementation);
conversions to narrower signed types are modular there too. Nothing else is relied upon.

The float functions are small, freestanding and in float32 alone. Each states its largest error over all floats, in
units in the last place (tests/test_float_functions.py measures them). Exponentials and logarithms are Taylor series
after exact range reduction (ln 2 in two parts, whose first has few enough bits that its multiples are exact), the
square root is Newton's iteration, erfc a Chebyshev fit of log(erfc(x)) + x**2 - log(t) in t = 1 / (1 + x / 2).
"""


def needed_helpers(source: str) -> tuple[str, ...]:
    """The helpers a C text calls, and those they call, each after those it needs."""
    found: list[str] = []
    _add_needed(_called_in(source), found)
    return tuple(found)


def _add_needed(called: Sequence[str], found: list[str]) -> None:
    for name in called:
        if name not in found:
            _add_needed(_called_by(name), found)
            if name not in found:
                found.append(name)


def _called_in(text: str) -> tuple[str, ...]:
    """The helpers a C text calls by itself, in the order of `HELPERS`."""
    called = set(_CALL.findall(text))
    return tuple(name for name in HELPERS if name in called)


@cache
def _called_by(name: str) -> tuple[str, ...]:
    """The helpers a helper calls by itself."""
    return _called_in(HELPERS[name].split("{", 1)[1])


_CALL = re.compile(r"\b(\w+)\(")


def helper_source(names: Iterable[str], own: Mapping[str, str] = MappingProxyType({})) -> str:
    """The C text of helpers and all they need, each once; `own` are a core's, by name, for its firmware alone."""
    calls = "".join(f"{name}(" for name in names)
    firmware = "#if (defined(__riscv) || defined(__arm__)) && !defined(DOVETAIL_HOST)"
    texts = {name: HELPERS[name] for name in needed_helpers(calls)}
    texts |= {name: f"{firmware}\n{own[name]}#else\n{text}#endif\n" for name, text in texts.items() if name in own}
    return "\n".join(texts.values())
