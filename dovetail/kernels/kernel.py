"""A core kernel as it is handed on; the cores, expressions and choices it is written for."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from typing import Protocol

from dovetail.errors import TargetError
from dovetail.ir.types import Array, DType, Shape
from dovetail.kernels.c import Lines
from dovetail.kernels.helpers import HELPERS
from dovetail.records import Record, field
from dovetail.target.chip import Core, CoreInstruction, PairBlocks, Streams, VectorUnit
from dovetail.target.costs import kernel_cycles
from dovetail.target.pattern import Choice, Knob, Space

BLOCK = "layer"
"""Name of the parameter that points to a layer's block, and key for the block's C name."""


class Optimize(enum.StrEnum):
    """The aim of core kernels: speed or little code."""

    SPEED = "speed"
    """Few instructions: the layers with most of the work get loops of their own."""
    SIZE = "size"
    """Little code: one function for all layers of a kind."""


class UnsupportedRegion(ValueError):
    """A region no core kernel computes; the message is one sentence that says why."""


def refuse(condition: object, why: str) -> None:
    """Raise UnsupportedRegion where a condition holds."""
    if condition:
        raise UnsupportedRegion(why)


class Parameter(Record):
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


class ConstantBlock(Record):
    """A const struct for each layer, which tells a function that layers share which of them it computes."""

    c_type: str
    """`struct name`."""
    members: tuple[Parameter, ...]
    """Pointers to constants."""
    constants: Mapping[str, Array]
    """The arrays they point to, by `Parameter.value`."""
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


class CoreKernel(Record):
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
    """Const arrays to emit: re-ordered, padded and folded as the kernel wants them."""
    helpers: tuple[str, ...] = ()
    """Functions of `HELPERS` the text calls, each after those it needs."""
    key: str = ""
    """The text without the function's name: kernels of equal keys can share one function."""
    declarations: tuple[str, ...] = ()
    """C text that must stand before the function once, such as that of the core's own instructions in it."""
    instructions: tuple[str, ...] = ()
    """Names of the core's own instructions in it."""
    notes: tuple[str, ...] = ()
    """Why instructions of the core are not used in it, one sentence each."""
    block: ConstantBlock | None = None
    """The struct that the parameter `layer` points to, where the function, or one it calls, is shared by layers."""
    lanes: int | None = None
    """Output channels a sum-of-products kernel computes together, which is the order of its weights; else None."""
    shared: str = ""
    """C text of the function shared by layers that this one calls; it stands before both."""
    foreign: bool = False
    """Whether C of an operator's own is in it, which may divide, or compute on floats."""
    has_storage: bool = False
    """Whether it keeps anything in static memory while it runs: then two cores may not be in it at once."""

    @property
    def told(self) -> tuple[Parameter, ...]:
        """The parameters and the members of the block."""
        return (*self.parameters, *(self.block.members if self.block else ()))


class KernelWriter(Record):
    """Writes one region's kernel."""

    write: Callable[[str], Lines] | None
    """The C under a function name, writing twice gives the same text; None where no instruction of the core applies."""
    check: Callable[[], object] = lambda: None
    """Raises Unsupported where `write` would, from the statements of one element: without loops or functions."""
    declarations: tuple[str, ...] = ()
    """C text that must stand before the function once."""
    has_storage: bool = False
    """As of `CoreKernel`, and so are the following."""
    instructions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    alike: Callable[[], Hashable | None] = lambda: None
    """All that the text depends on, its name apart, once the scope has all constants; None where nobody knows."""


def declarations(parameters: Sequence[Parameter]) -> Lines:
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
SHARING = (DType.INT4, DType.UINT4, DType.INT2, DType.UINT2)
"""Elements that may share bytes; without, kernels find each in a byte of its own."""

ROOM = 3072
"""Bytes of stack a kernel may use where the core has the usual 4096."""

Index = Callable[[Shape], str]
"""C text of the flat index, at the present place of the result, into an operand of a shape that broadcasts to it."""


class Expression(Record):
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
    """The registers, stack and instructions a core offers its kernels."""

    accumulators: int = 16
    """Sums the inner loops keep at once; 16 suits the 31 registers of RISC-V, 6 the 13 of Arm Thumb."""
    instructions: tuple[CoreInstruction, ...] = ()
    """Instructions that compilers do not select by themselves."""
    room: int = ROOM
    """Bytes of stack for elements that are put side by side."""
    streams: Streams | None = None
    """Its loads and loops for inner loops of products."""
    functions: frozenset[str] = frozenset()
    """Functions of `HELPERS` it computes in its own way."""
    pairs: PairBlocks | None = None
    """How it computes sums of products of pairs."""
    vectors: VectorUnit | None = None
    """Its instructions on vectors of bytes."""
    wide: bool = False
    """Whether registers have 64 bits."""
    joined: int = 0
    """Instructions up to which compilers for it make several turns of a loop one, where nothing in it keeps them from
    that; 0 where they leave loops as they are."""
    plain: Mapping[str, float] | None = dataclass_field(default=None, hash=False)
    """Cycles of each part of kernels without instructions of its own; None: those are taken wherever they are found."""
    rates: Mapping[str, float] | None = dataclass_field(default=None, hash=False)
    """The same of kernels as the core has them; None where nobody measured: own instructions are then counted."""
    aligned: int = 0
    """Cycles of a store where words must begin at multiples of their size; 0 where they need not."""
    turn: int = 4
    """Elements of a turn of the innermost loop of kernels that compute each by itself."""

    @property
    def basic(self) -> CoreTraits:
        """The core for kernels without instructions of its own."""
        return replace(self, instructions=(), pairs=None, vectors=None)

    def chosen(self, choice: Choice) -> CoreTraits:
        """The core for a kernel with a choice: without pairs, if weights stay bytes."""
        return replace(self, pairs=None) if choice.get(WEIGHTS) == BYTES else self


WEIGHTS, BYTES = "weights", "bytes"
"""The setting of kernels whose weights would not fit the memory as pairs, which take twice their bytes."""
PIXELS, CHANNELS, UNROLL = "pixels", "channels", "unroll"
"""Names of the knobs of a block of sums in registers."""


class KernelChoices(Record):
    """The knobs of a kernel."""

    space: Space = field(default_factory=lambda: Space(()))
    default: Choice = field(default_factory=dict)
    """The settings of knobs that are left alone."""
    block: tuple[int, int, int] | None = None
    """Pixels and channels of the block with fewest loads per product, and taps of a load; None for other kernels."""


def loads_per_product(block: tuple[int, int]) -> float:
    """Operands that a block of some pixels and channels loads for each of its products."""
    return sum(block) / (block[0] * block[1])


def block_choices(
    blocks: Sequence[tuple[int, int]],
    unroll: Knob,
    default: tuple[int, int, int],
    load: int,
    useless: Callable[[tuple[int, int], int | str | None], str | None] = lambda block, taken: None,
) -> KernelChoices:
    """The knobs of kernels whose sums are computed in blocks of pixels and channels.

    Args:
        blocks: pixels and channels there are registers for.
        unroll: how far the innermost loop is written out.
        default: pixels, channels and unrolling where nothing is chosen.
        load: taps of a load.
        useless: why no block is computed with an unrolling; None for no reason.
    """
    pixels, channels = (tuple(dict.fromkeys(sizes)) for sizes in zip(*blocks, strict=True))
    knobs = (
        Knob(PIXELS, pixels, "neighbouring pixels of a block of sums in registers"),
        Knob(CHANNELS, channels, "channels of such a block"),
        unroll,
    )

    def problem(choice: Choice) -> str | None:
        width, count = choice.get(PIXELS), choice.get(CHANNELS)
        if not isinstance(width, int) or not isinstance(count, int):
            return None
        if (width, count) not in blocks:
            return f"there are no registers for {width} pixels x {count} channels"
        return useless((width, count), choice.get(UNROLL))

    names = (PIXELS, CHANNELS, UNROLL)
    most = (*min(blocks, key=loads_per_product), load)
    return KernelChoices(Space(knobs, problem), dict(zip(names, default, strict=True)), most)


Turns = Mapping[str, float]
"""Part of a kernel -> how often it runs. A part is named "family.part"; what ends a sum or computes an element by
itself "end.operator"."""
RAISED = "end.raised"
"""The part that stands for the requantisation of sums that end in one product and one shift."""
ENDED = "end.vectors"
"""The part that stands for all operators behind sums that vectors end."""


def turns_of_family(family: str, counts: Turns) -> dict[str, float]:
    """Counts of a kernel's parts by their whole names."""
    return {f"{family}.{part}": float(count) for part, count in counts.items()}


def summed_turns(*counts: Turns) -> dict[str, float]:
    """Counts added up, part by part."""
    total: dict[str, float] = {}
    for part, count in (item for one in counts for item in one.items()):
        total[part] = total.get(part, 0.0) + count
    return total


class InstructedLoops(Protocol):
    """The loops of a kernel with the core's own instructions, before its text is written."""

    def writer(self) -> KernelWriter:
        """Writes the kernel; raises Unsupported as `turns`."""

    def turns(self) -> Turns:
        """How often the parts of the loops run; raises Unsupported where no instruction fits."""

    def offered(self) -> KernelChoices:
        """The knobs of the loops; raises Unsupported as `turns`."""


_JOINED = 148
"""`CoreTraits.joined` of Arm's cores for microcontrollers, for which LLVM unrolls in part; for others it does not."""
CALLING = ("cortex-m0plus", "cortex-m23")
"""Armv6-M and Armv8-M Baseline: no product of 64 bits, so that compilers call a function of their library for it."""


def core_traits(core: Core) -> CoreTraits:
    """The traits of a core; three quarters of its stack are for elements side by side.

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
    plain = kernel_cycles(core.isa)
    if core.kernels is not None and core.kernels.keys() >= plain.keys():  # both kinds of kernels were measured
        plain = core.kernels
    blocks = functions, core.pairs, core.vectors
    own = core.instructions, room, core.streams, *blocks, core.isa.startswith("rv64"), joined
    aligned = core.costs.get("store", 1) if core.isa.startswith("rv") or core.isa in CALLING else 0
    return CoreTraits(accumulators, *own, plain, core.kernels, aligned)
