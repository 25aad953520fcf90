"""What a core kernel is: C text, its parameters and the constants it wants, and how a region is refused."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dovetail.graph.types import Array, DType

_STORAGE = re.compile(r"^ +static (?!const)", re.MULTILINE)
"""A static variable inside a function."""
BLOCK = "layer"
"""Name of the parameter that points to a layer's block, and key for the block's C name."""


class Optimize(enum.StrEnum):
    """What core kernels are made for."""

    SPEED = "speed"
    """Few instructions: the layers with most of the work get loops of their own."""
    SIZE = "size"
    """Little code: one function for all layers of a kind."""


class Unsupported(ValueError):
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
class Block:
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
    scratch_bytes: int = 0
    """Bytes of scratch memory the function needs beside its operands."""
    key: str = ""
    """The text without the function's name: kernels of equal keys can share one function."""
    declarations: tuple[str, ...] = ()
    """C text that must stand before the function once: what the core's own instructions in it need."""
    instructions: tuple[str, ...] = ()
    """Names of the core's own instructions in it."""
    notes: tuple[str, ...] = ()
    """Why instructions of the core are not used in it, one sentence each."""
    block: Block | None = None
    """What the parameter `layer` points to, where the function, or one it calls, is shared by layers."""
    lanes: int | None = None
    """Output channels a sum-of-products kernel computes together, which is the order of its weights; else None."""
    shared: str = ""
    """C text of the function shared by layers that this one calls; it stands before both."""

    @property
    def told(self) -> tuple[Parameter, ...]:
        """The parameters and the members of the block."""
        return (*self.parameters, *(self.block.members if self.block else ()))

    @property
    def has_storage(self) -> bool:
        """True when it keeps anything in static memory while it runs: then two cores may not be in it at once."""
        return bool(_STORAGE.search(self.source + self.shared))


@dataclass
class Constants:
    """Collects the constants of one kernel under readable, unused C identifiers."""

    arrays: dict[str, Array] = field(default_factory=dict)

    def add(self, stem: str, array: Array) -> str:
        """Keep `array` under a name that begins with `stem`; returns the name."""
        name, count = stem, 1
        while name in self.arrays:
            count += 1
            name = f"{stem}_{count}"
        self.arrays[name] = array
        return name


def c_type(dtype: DType) -> str:
    """The C type that holds one element: narrow integers take a byte each."""
    if dtype is DType.FLOAT32:
        return "float"
    if dtype is DType.BOOL:
        return "uint8_t"
    return f"{'int' if dtype.signed else 'uint'}{max(dtype.bits, 8)}_t"


def declarations(parameters: Sequence[Parameter]) -> list[str]:
    """The C declarations of parameters."""
    return [parameter.declaration for parameter in parameters]


def accumulate_type(low: int, high: int) -> str:
    """The narrowest of int32_t and int64_t that holds [low, high]; raises Unsupported beyond 64 bits."""
    if low >= -(1 << 31) and high < 1 << 31:
        return "int32_t"
    if low >= -(1 << 63) and high < 1 << 63:
        return "int64_t"
    raise Unsupported(f"a sum may reach {max(-low, high)}, beyond 64 bits.")
