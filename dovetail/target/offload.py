"""Offloads of an engine or library: their patterns, and the C calls that start them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from dovetail.ir.graph import Graph
from dovetail.ir.layout import Layout
from dovetail.ir.types import Array, dense_steps
from dovetail.records import Record, field
from dovetail.target.pattern import Choice, Constraint, Match, Pattern, Scope, Space


class Operand(Record):
    """Place of an operand of a launch."""

    address: int
    """Address of the first byte; for packed constants that are read in place, their offset in the launch's blob, but
    in a stream their address as well."""
    strides: tuple[int, ...]
    """Bytes between neighbours along each physical dimension but one within a byte, of the layout the offload takes the
    operand in (along each axis of the logical shape if that is row-major)."""
    buffer: int | None = None
    """Address in `Engine.buffer` to which the launch loads it (`Offload.buffered`); None for an operand that is not
    loaded."""
    is_loaded: bool = False
    """Whether it lies there already, from a launch before."""


def results_of(match: Match, operands: Mapping[str, Operand]) -> tuple[Operand, ...]:
    """Places of the results of a pattern made with `together`, in its order; the strides are along its own axes.

    Args:
        match: a region of such a pattern.
        operands: places of its operands and of its "result", by name.
    """
    joint, first, places = match.nodes["together"], operands["result"].address, []
    for flat in joint.inputs:
        (value,) = next(node.inputs for node in match.nodes.values() if node.output == flat)
        kind = match.graph.types[value]
        size = kind.dtype.numpy.itemsize
        places.append(Operand(first, tuple(size * step for step in dense_steps(kind.shape))))
        first += kind.nbytes
    return tuple(places)


def placed(wanted: Mapping[str, int | range], alignment: int, taken: Sequence[range] = ()) -> dict[str, range]:
    """Places in a buffer, counted from its first byte: those that are given, and the first free ones for so many
    bytes, at multiples of `alignment`, beside these and what is `taken`."""
    found = {name: one for name, one in wanted.items() if isinstance(one, range)}
    for name, nbytes in wanted.items():
        if isinstance(nbytes, int):
            start = 0
            for other in sorted([*taken, *found.values()], key=lambda one: one.start):
                if start + nbytes > other.start:
                    start = max(start, -(-other.stop // alignment) * alignment)
            found[name] = range(start, start + nbytes)
    return found


class Command(Record):
    """One start of an engine: the C function of its driver and the constant words it is given."""

    function: str
    """Name of the driver's function."""
    words: tuple[int, ...]
    """Argument of the C function, as unsigned 32-bit numbers."""
    constants: bool = False
    """True when the function takes the launch's packed constants as its second argument: `function(task, blob)`, blob
    a `const uint8_t *` aligned to 64 bytes."""
    jobs: int = 1
    """Jobs its device shows for it, so that reports know which layer each belongs to."""


class Pointer(Record):
    """A pointer to an operand of a launch, in C."""

    operand: str
    """Leaf name, packed constant name, "scratch" or "result"."""
    c_type: str
    """C type it points to, e.g. "const int8_t"."""


@dataclass(frozen=True)
class Struct:
    """A constant structure, filled at compile time."""

    c_type: str
    """Type of the structure, as the library's header names it."""
    members: Mapping[str, CValue]
    """Member -> content; a structure within a structure lies in it."""


Cases = Callable[[Mapping[str, int]], Graph]
"""An integer network for settings of sizes and numbers, as `Offload.cases` gives it."""


CValue = int | Pointer | Struct
"""An argument of a C function: a number, a pointer to an operand, or (a pointer to) a structure."""


class LibraryCall(Record):
    """A call of a C function that computes, or begins to compute: what software takes where an engine takes words."""

    function: str
    """Name of the library's function."""
    arguments: tuple[CValue, ...]
    """Arguments in the order of the parameters."""


class Offload(Record):
    """A computation that an engine offers: its pattern, its limits, and its commands.

    The match given to its functions lies in the region's own graph, cut to a tile: shapes, pads and constants are
    the tile's.
    """

    name: str
    """Name in reports, and for `dovetail check --only`."""
    pattern: Pattern
    """The operators it computes together."""
    constraints: tuple[Constraint, ...]
    """Limits that a layer must keep, all of them."""
    pack: Callable[[Match], Mapping[str, Array]]
    """Constant operands of a (tile of a) region as the engine reads them: name -> uint8 array. They lie one behind
    the other in this order, aligned to 16 bytes (to 64 where the engine reads them where they lie)."""
    commands: Callable[[Match, Mapping[str, Operand]], tuple[Command | LibraryCall, ...]]
    """Commands that compute a tile: operands by value name, packed constant name, "scratch" and "result". Those of
    software are all calls; those of hardware all words."""
    cycles: Callable[[Match], int]
    """Engine cycles of a tile."""
    scratch: Callable[[Match], int] = lambda match: 0
    """Bytes of working memory a tile needs beside its operands."""
    channel_step: int = 1
    """Tiles are cut at multiples of this many output channels."""
    row_step: int = 1
    """Tiles are cut at multiples of this many output rows and columns."""
    layouts: Mapping[str, Layout] | Callable[[Match], Mapping[str, Layout]] = field(default_factory=dict)
    """The layout each run-time operand is taken in, by the name of its leaf in the pattern, and the one the result is
    given in, as "result"; row-major where absent. Unused parts of last blocks may hold any bytes. A function where it
    depends on the region, such as on the widths of its values: it must give every tile what it gives the whole."""
    strided: bool = True
    """False when it takes operands, and gives a result, that lie whole and densely: then nothing is cut where it lies,
    nor put inside another value."""
    knobs: Callable[[Match], Space] | None = None
    """Choices about computing a region beside its tiling; None for none. The choice reaches the
    functions above, and the constraints, as `match.choice`."""
    default: Callable[[Match], Choice] | None = None
    """The settings that stand for knobs that are absent; needed with `knobs`."""
    floor: Callable[[Match], int] | None = None
    """Cycles of a whole region that no choice of knobs can go below; None where that is not known."""
    lossy: str = ""
    """Loss of accuracy, as a sentence; it is then used only for layers the user pins to its engine. Empty for
    what computes every bit."""
    starting: Callable[[Match], int] = lambda match: 0
    """Cycles of a tile in which starting it keeps the core busy, beyond what any start takes: a driver that hands over
    one piece after the other."""
    buffered: Callable[[Match], Mapping[str, int | range]] | None = None
    """Operands that a launch loads into `Engine.buffer` before it computes, by the name of a leaf or a packed constant:
    how many bytes, for which the compiler finds a place, or which of the buffer's bytes. Those that a launch of the
    same offload loaded before, from the same unchanged bytes, are there until something is loaded over them:
    `Operand.is_loaded` says so to `commands`, `Match.loaded` to `cycles`. None where nothing is loaded."""
    prefer: bool = False
    """Whether it is taken wherever it fits, without a comparison with other offloads and the core. Else what takes the
    fewest cycles does a layer, by `cycles`, the DMA's and an estimate of the core's."""
    cases: Cases | None = None
    """Networks for `dovetail check` beside the layers it makes from the pattern: an integer graph, as it is before the
    policies' rewrites, in which something becomes this offload's. Called with settings by name: "rows", "columns",
    "channels", "outputs", "kernel_rows", "stride_rows", "top", "input_zero", ... as `check` names them, and "variant",
    a number from 0 to 7 that means what you like. What is asked for is what is tried. Raises ValueError where there is
    no such network."""

    def within(self, size: int, alignment: int) -> Offload:
        """The offload for a buffer: no launch loads more bytes than the buffer holds.

        Args:
            size: bytes of the buffer.
            alignment: bytes every operand in it is aligned to.
        """
        if (buffered := self.buffered) is None:
            return self
        sentence = "what a launch loads must fit the buffer of the engine"
        limit = Constraint(
            f"{sentence}, {size:,} bytes",
            lambda match: max((one.stop for one in placed(buffered(match), alignment).values()), default=0),
            lambda needed: bool(needed <= size),
            Scope.TILES,
        )
        kept = (one for one in self.constraints if not one.sentence.startswith(sentence))
        return replace(self, constraints=(*kept, limit))

    def layouts_of(self, match: Match) -> Mapping[str, Layout]:
        """The layouts for a region, or a tile of it."""
        return self.layouts(match) if callable(self.layouts) else self.layouts
