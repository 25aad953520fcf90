"""The chip beside its engines: memories, DMA, cores and their instructions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from dovetail.errors import TargetError
from dovetail.records import Record, field
from dovetail.target.costs import StatementCycles

DMA_PLACES = 16
"""Transfers that may be outstanding at a `Dma`."""
BOTH = (INSTRUCTIONS, DATA) = ("instructions", "data")
"""The two kinds of bytes a core reads."""


class Cache(Record):
    """A cache between a core and a memory. The line used least recently makes way for another; writes are not noted."""

    size: int
    """Capacity in bytes."""
    ways: int = 0
    """Places a line may be in; 0 for all there are."""
    line: int = 0
    """Bytes of a line, which is fetched whole; 0 for the memory's `width`."""
    holds: tuple[str, ...] = BOTH
    """Kinds of reads that go through it: instructions, data or both."""


class Memory(Record):
    """One memory of the chip, at a fixed address.

    A core that reads it waits as `waits` and `caches` say; each core has caches of its own. Writes go through a buffer
    and never wait. DMAs and engines move bytes at rates of their own.
    """

    name: str
    """Name in targets and settings (`--set NAME.size=64K`)."""
    base: int
    """Address of the first byte."""
    size: int
    """Size in bytes."""
    alignment: int = 8
    """Bytes every buffer is aligned to."""
    reach: tuple[str, ...] = ()
    """Units that read and write it: "core", engines and DMAs by name; empty for all. A value the core does not
    reach has no variable in the C."""
    waits: int = 0
    """Cycles a read takes beyond those in the core's `costs`."""
    width: int = 4
    """Bytes it reads at once, a power of two; they stay at hand until others are read, apart for instructions and
    data."""
    prefetch: bool = False
    """Whether it reads the next `width` bytes of instructions while the core executes the last ones."""
    caches: tuple[Cache, ...] = ()
    """Between it and each core: one for both, or one for instructions and one for data at most."""
    pj_per_byte: float = 0.0
    """Energy of a byte read or written, in pJ; 0 where that is not said."""

    def __post_init__(self) -> None:
        """Raise TargetError where reads cannot wait as it says."""
        kinds = [kind for cache in self.caches for kind in cache.holds]
        lines = [self.width, *(cache.line or self.width for cache in self.caches)]
        faults = [f"reads wait {self.waits} cycles"] if self.waits < 0 else []
        if any(line < 1 or line & line - 1 for line in lines):
            faults.append(f"width and lines are powers of two, not {', '.join(map(str, lines))} bytes")
        elif any(
            c.size < line * max(1, c.ways) or c.size % (line * (c.ways or 1))
            for c, line in zip(self.caches, lines[1:], strict=True)
        ):
            sizes = ", ".join(f"{c.size} bytes in {c.ways or 'any'} ways" for c in self.caches)
            faults.append(f"caches are whole numbers of lines for each way, not {sizes}")
        if sorted(kinds) not in ([], [DATA], [INSTRUCTIONS], [DATA, INSTRUCTIONS]):
            faults.append(f"caches hold {' and '.join(BOTH)}, each once at most, not {', '.join(kinds)}")
        if faults:
            hint = "correct the Memory in the target file, or what --set says"
            raise TargetError("; ".join(faults), where=f"memory '{self.name}'", hint=hint)

    def is_reached_by(self, name: str) -> bool:
        """Whether a unit reads and writes the memory.

        Args:
            name: "core", or the name of an engine or a DMA.
        """
        return not self.reach or name in self.reach

    def cache(self, kind: str) -> Cache | None:
        """The cache that reads of a kind go through; None for none.

        Args:
            kind: `INSTRUCTIONS` or `DATA`.
        """
        return next((cache for cache in self.caches if kind in cache.holds), None)

    def line(self, kind: str) -> tuple[int, int]:
        """Bytes that come together when a core reads, and the cycles it waits for them; `kind` is INSTRUCTIONS or
        DATA."""
        cache = self.cache(kind)
        nbytes = (cache.line if cache else 0) or self.width
        return nbytes, -(-nbytes // self.width) * (1 + self.waits) - 1 if self.waits else 0

    def wait_cycles(self, nbytes: int, times: int = 1, kind: str = DATA) -> int:
        """Cycles a core waits in reading `nbytes` bytes in a row, so many times over: once for each line that the cache
        keeps, else every time. What a prefetch hides is not taken off. `kind` is INSTRUCTIONS or DATA."""
        line, cycles = self.line(kind)
        cache, lines = self.cache(kind), -(-nbytes // line)
        keeps = lines == 1 or (cache is not None and nbytes <= cache.size)
        return lines * cycles * (1 if keeps else times)


class Dma(Record):
    """A copy engine between memories: 1-D to 3-D copies with strides on both sides, padding on the way in."""

    name: str
    """Name in the timeline, and in `Memory.reach`."""
    bytes_per_cycle: int
    """Bytes per cycle while it copies a row."""
    setup_cycles: int
    """Cycles a transfer costs beyond its bytes."""
    base: int
    """Address of its registers."""


class RegisterMemory(Record):
    """Registers that hold several int8 elements each, e.g. two in the halves of 32 bits.

    A meaning names it where other operands have DRAM: `a: [i8][2] @ PAIR`. The last dimension is what one register
    holds, all before count registers. Only instructions read and write it; a kernel stages its operands there with the
    instruction whose meaning is a copy from DRAM, `for p in seq(0, P): for i in seq(0, N): to[p, i] = of[...]`. The
    elements share the register's bits equally, the first in the lowest, each sign-extended.
    """

    name: str
    """Name in the meanings of instructions, a C identifier."""
    c_type: str
    """C type of one register."""
    elements: int
    """Elements in one register."""


class CoreInstruction(Record):
    """An instruction of the core that compilers do not select by themselves, with its meaning.

    It is used in the layers whose core kernel contains its meaning and is faster with it, by estimate; elsewhere
    `dovetail explain` says both figures, or how near the loops came to the meaning.
    """

    name: str
    """Name in reports and meanings, a C identifier."""
    meaning: str
    """One Exo procedure of that name: windows of constant size @ DRAM (`a: [i8][4] @ DRAM`) and loops of constant
    length, e.g. `for i in seq(0, 4): acc[0] += a[i] * b[i]`. Activations and weights are i8, sums i32. One with a first
    operand `n: size` is a function for all taps of a block, n vectors of them; its sums are [pixels, channels]."""
    c: str
    """One C statement that does the same, `{operand}` standing for a pointer to the operand's first element (its first
    register), or for a size."""
    declarations: str = ""
    """C text `c` needs before it, e.g. a static inline function around inline assembly. What is compiled with
    DOVETAIL_HOST, or for another instruction set, must do the same in plain C."""
    alignment: int = 1
    """Every operand in DRAM begins at a multiple of so many bytes (at most 8)."""
    memories: tuple[RegisterMemory, ...] = ()
    """Memory of operands that are not in DRAM."""
    assembly: str = ""
    """For a product: one line of assembly of 4 bytes that does the same, `{operand}` standing for the register that
    holds a sum or the word of an operand. Needed where the core has `streams`."""


class Streams(Record):
    """A core's instructions for inner loops: a load that moves its pointer, and a loop without a branch. Each is one
    line of assembly of 4 bytes."""

    load: str
    """A word to the register `{to}` from the address in the register `{pointer}`, to which `{step}`, -2048 to 2047,
    is added."""
    repeat: str
    """Execute the following instructions as often as the register `{turns}` says; the last one is `{length}`
    instructions further on. It and they begin at multiples of 4 bytes, they are at least 3."""


class PairBlock(Record):
    """Sums of products of some neighbouring pixels and some channels, from pairs: two int16 in the halves of 32
    bits."""

    pixels: int
    """Computed at a time."""
    channels: int
    """Channels of the result, computed at a time."""
    steps: int
    """Pairs of a pixel, and of a channel."""
    distance: int
    """Words from the pairs of a pixel to those of the next."""
    unroll: int
    """Steps written out in a turn of the loop."""

    @property
    def name(self) -> str:
        """Name of the C function."""
        return f"pairs_{self.pixels}x{self.channels}_{self.steps}_{self.distance}_{self.unroll}"


class PairBlocks(Record):
    """Sums of products of pairs as a core computes them at its best: loops in assembly, for any size of a block."""

    shapes: tuple[tuple[int, int], ...]
    """Pixels and channels that fit the registers."""
    farthest: int
    """Bytes a load reaches beyond its pointer."""
    write: Callable[[PairBlock], str]
    """The C function `static inline void NAME(int32_t *sums, const uint32_t *from, const uint32_t *weights)`, under
    the block's name, which adds to sums[pixel * channels + channel] the products of both halves of
    from[pixel * distance + step] and weights[step * channels + channel]. As of `CoreInstruction.declarations`, it is
    plain C on this computer."""
    load: CoreInstruction | None = None
    """Brings four elements to two registers, 0 and 2, 1 and 3; None for the one of the core's instructions that does,
    beside a product of pairs."""
    most: int = 36
    """Most steps of a turn of the innermost loop."""
    loop: int = 0
    """Bytes that the innermost loop is to keep within, so that it stays in a small instruction cache; 0 for any."""


class VectorProducts(Record):
    """Sums of products of some neighbouring pixels and some channels, from bytes in vectors of `VECTOR_BYTES`."""

    pixels: int
    """Pixels computed at a time."""
    channels: int
    """Channels computed at a time."""
    rows: int
    """Rows of the kernel."""
    taps: int
    """Bytes of a row, which are adjacent."""
    distance: int
    """Bytes from a pixel to the next."""
    row: int
    """Bytes from a row to the next."""
    sums: int
    """Sums from those of a pixel to those of the next."""
    exact: bool
    """Whether bytes after a row must not be read; otherwise they are read and multiplied by zeros."""

    @property
    def steps(self) -> int:
        """Vectors of a row."""
        return -(-self.taps // VECTOR_BYTES)


class VectorColumns(Record):
    """Sums of two neighbouring pixels and `VECTOR_CHANNELS` channels over the taps of a window, each channel for
    itself."""

    kernel: tuple[int, int]
    """Rows and columns of the kernel."""
    column: int
    """Bytes from a tap to the next of its row."""
    row: int
    """Bytes from a row to the next."""
    distance: int
    """Bytes from a pixel to the next."""


class VectorEnd(Record):
    """Sums to bytes: fixed-point requantisation, rounded twice as TFLite does, by factors of at most 1 per channel."""

    channels: int
    """Channels of a pixel."""
    zero_point: int
    """Added behind the requantisation."""
    low: int
    """Least result."""
    high: int
    """Largest result."""
    rectified: bool
    """Whether what is below the zero point becomes `low` in any case."""


VECTOR_BYTES = 16
"""Bytes of a vector of a `VectorUnit`."""
VECTOR_CHANNELS = 8
"""Channels whose sums lie together: even ones in one vector, odd ones in the next."""


class VectorUnit(Record):
    """Instructions on vectors of 16 bytes: bodies of C functions whose parameters and meaning are those that
    `dovetail/kernels/vectors.py` writes. Where `condition` does not hold, and on this computer, they are plain C."""

    name: str
    """Name of the instructions, for people."""
    condition: str
    """C text of the preprocessor's condition under which compilers take the bodies."""
    per_cycle: float
    """Most products of a cycle, loads beside them."""
    bytes_per_cycle: float
    """Most bytes it loads or stores in a cycle."""
    shapes: tuple[tuple[int, int], ...]
    """Pixels and channels of `VectorProducts` that fit the registers."""
    products: Callable[[VectorProducts], str]
    """The body for sums of products."""
    columns: Callable[[VectorColumns], str]
    """The body for sums over windows."""
    end: Callable[[VectorEnd], str]
    """The body that makes bytes of sums."""
    copy: str
    """Copies `count` bytes from `from` to `to`."""


class FunctionUnit(Record):
    """Verilog of a core's own instructions, on the function-unit bus of a core in Verilog.

    The module's ports have the names that CFU Playground's systems expect of a unit: `clk`, `reset`, and `cmd_` and
    `rsp_` with `valid`, `ready` and `payload_...` (`docs/port_instruction.md` lists them).
    """

    top: str
    """Name of the Verilog module."""
    sources: tuple[Path, ...]
    """Verilog and SystemVerilog in the order they are read; modules are also found in their folders."""
    core: str = "vexriscv_cfu"
    """The core that `--sim rtl` puts it beside: one of `--core` with such a bus."""


class Core(Record):
    """The processor that runs the program."""

    isa: str
    """Instruction set: "rv32imc" and its like, "cortex-m4" and other Cortex-M
    (`dovetail/codegen/build/instruction_sets.py` says which, and what compilers, linker and start-up code make of
    it)."""
    stack: int = 4096
    """Bytes of stack reserved."""
    costs: Mapping[str, int] = field(default_factory=dict)
    """Cycles per instruction class where they differ from the stated default of the instruction set: the fields of
    `sim.riscv_costs.CoreCosts` or `sim.arm.CortexMCosts`. `dovetail.target.costs` has sets of published cores."""
    instructions: tuple[CoreInstruction, ...] = ()
    """Own instructions beyond `isa`, the preferred first."""
    extension: str = ""
    """How the simulator executes them: the path of a C file with `dovetail_execute` (`dovetail/sim/riscv_own.h`
    says what it is given), or "module:function" in Python, called with the 32-bit instruction word and the core's
    registers (see `dovetail.sim.riscv`); empty for none."""
    unit: FunctionUnit | None = None
    """The instructions in Verilog, for `--sim rtl`; None for a core without such Verilog."""
    streams: Streams | None = None
    """Instructions for inner loops of instructions with `assembly`; None for loads and branches of `isa`."""
    pairs: PairBlocks | None = None
    """C code for blocks of sums of products of pairs; None if only `instructions` compute them."""
    vectors: VectorUnit | None = None
    """Instructions on vectors of bytes; None for a core without vectors."""
    functions: Mapping[str, str] = field(default_factory=dict)
    """C functions that stand in for Dovetail's of the same name and meaning (`dovetail/kernels/runtime`) in firmware,
    e.g. with inline assembly; this computer keeps Dovetail's."""
    packs: bool = False
    """Whether values of 4 and 2 bits that its kernels make and read lie several to a byte: less memory, more
    instructions. (Beside engines that take them so, its kernels do in any case.)"""
    kernels: Mapping[str, float] | None = None
    """Cycles of each part of its kernels' loops, for comparing it with engines and libraries, and kernels with its own
    instructions with plain ones; None for those measured on a core of the same `isa` without such instructions, and on
    the bundled cores with similar ones (`dovetail.target.costs.kernel_cycles`)."""
    statements: StatementCycles = field(default_factory=StatementCycles)
    """Cycles of starts and waits, for estimates."""
    pj_per_cycle: float = 0.0
    """Energy of a cycle in which it is awake, memories left out, in pJ; 0 where that is not said."""
    speed: float = 1.0
    """Work it does in a cycle of the chip's clock, relative to other cores of the same target: work is dealt out in
    this proportion. (In the simulator its `costs` say how long it takes.)"""

    @property
    def is_host(self) -> bool:
        """True for the computer that compiles, whose cycles nobody counts."""
        return self.isa == "host"
