"""How hardware is described: memories, DMA, core, engines and what each engine can be asked to do.

A target is one `Target` value. Everything that is particular to a machine is said here, once; no stage of the
compiler knows any target by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dovetail.errors import TargetError
from dovetail.ir.graph import Graph
from dovetail.ir.layout import Layout
from dovetail.ir.operators.arithmetic import Rounding
from dovetail.ir.operators.user import UserOperator
from dovetail.ir.types import Array, DType, dense_steps
from dovetail.target.mesh import Mesh
from dovetail.target.pattern import Choice, Constraint, Match, Pattern, Space


@dataclass(frozen=True)
class OrderRequest:
    """What a user asks for."""

    settings: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the hardware that differ from the target's own."""
    rules: Path | None = None
    """A file of the user's own rules, in the target's own form."""
    seconds: float = 5.0
    """To spend on better orders than the first."""
    inputs: Mapping[str, Array] | None = None
    """Inputs to execute the order on; None to leave that out."""
    progress: Callable[[str], None] = lambda text: None
    """Told what is being done, and every better order."""


@dataclass(frozen=True)
class Ordered:
    """An order, ready to show."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """A table for people: one row per layer."""
    notes: tuple[str, ...]
    """Sentences below it: how long it takes, how near to the bound that is."""
    files: Mapping[str, bytes]
    """What is written out, by relative path."""


Ordering = Callable[[Graph, OrderRequest], Ordered]
"""Orders a graph, integer or float; raises DovetailError where it cannot."""


IN_PLACE_ALIGNMENT = 64
"""Bytes packed constants are aligned to that an engine reads where they lie."""


@dataclass(frozen=True)
class Memory:
    """One memory of the chip, at a fixed address."""

    name: str
    base: int
    """First byte address."""
    size: int
    """Bytes."""
    alignment: int = 8
    """Bytes every buffer is aligned to."""
    reach: tuple[str, ...] = ()
    """Who reads and writes it: "core", engines and DMAs by their names; empty for everybody. What the core does not
    reach has no variable in the C."""

    def is_reached_by(self, name: str) -> bool:
        """Whether "core", an engine or a DMA reads and writes it."""
        return not self.reach or name in self.reach


@dataclass(frozen=True)
class Dma:
    """A copy engine between memories: 1-D to 3-D copies with strides on both sides, padding on the way in."""

    name: str
    bytes_per_cycle: int
    setup_cycles: int
    """Cycles a transfer costs beyond its bytes."""
    base: int
    """Address of its registers."""


@dataclass(frozen=True)
class RegisterMemory:
    """Registers that hold several int8 elements each, e.g. two in the halves of 32 bits.

    A meaning names it where other operands have DRAM: `a: [i8][2] @ PAIR`. The last dimension is what one register
    holds, all before count registers. Only instructions read and write it; a kernel stages its operands there with the
    instruction whose meaning is a copy from DRAM, `for p in seq(0, P): for i in seq(0, N): to[p, i] = of[...]`. The
    elements share the register's bits equally, the first in the lowest, each sign-extended.
    """

    name: str
    """As meanings write it: a C identifier."""
    c_type: str
    """C type of one register."""
    elements: int
    """Elements in one register."""


@dataclass(frozen=True)
class CoreInstruction:
    """An instruction of the core that compilers do not select by themselves, with its meaning.

    It is used wherever the loops of a core kernel contain its meaning; where they do not, `dovetail explain` says how
    near they came.
    """

    name: str
    """A C identifier."""
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
    """Where operands lie that are not in DRAM."""
    assembly: str = ""
    """For a product: one line of assembly of 4 bytes that does the same, `{operand}` standing for the register that
    holds a sum or the word of an operand. Needed where the core has `streams`."""


@dataclass(frozen=True)
class Streams:
    """What a core has for inner loops: a load that moves its pointer, and a loop without a branch. Each is one line of
    assembly of 4 bytes."""

    load: str
    """A word to the register `{to}` from the address in the register `{pointer}`, to which `{step}`, -2048 to 2047,
    is added."""
    repeat: str
    """Execute the following instructions as often as the register `{turns}` says; the last one is `{length}`
    instructions further on. It and they begin at multiples of 4 bytes, they are at least 3."""


@dataclass(frozen=True)
class KernelCycles:
    """About how long Dovetail's own kernels take on a core, where they are compared with engines and libraries. As they
    are, what RV32IMC shows in the simulator `iss`; a core with instructions of its own has others."""

    mac: float = 3.0
    """Cycles of a multiply-accumulate."""
    element: float = 2.0
    """Of an element of each operator's result."""
    requantise: float = 14.0
    """What a requantisation of an element adds."""
    tap: float = 3.8
    """Of an element of a pool's windows, where these overlap."""
    window: float = 10.0
    """Of a pixel of such windows."""
    reduced: float = 2.7
    """Of an element of a reduction, or of windows that do not overlap."""


@dataclass(frozen=True)
class Core:
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
    """What it can do beyond `isa`, the preferred first."""
    extension: str = ""
    """How the simulator executes them: the path of a C file with `dovetail_execute` (`dovetail/sim/riscv_own.h`
    says what it is given), or "module:function" in Python, called with the 32-bit instruction word and the core's
    registers (see `dovetail.sim.riscv`); empty for none."""
    streams: Streams | None = None
    """What it has for inner loops of instructions with `assembly`; None for loads and branches as `isa` has them."""
    functions: Mapping[str, str] = field(default_factory=dict)
    """C functions that stand in for Dovetail's of the same name and meaning (`dovetail/kernels/runtime`) in firmware,
    e.g. with inline assembly; this computer keeps Dovetail's."""
    packs: bool = False
    """Whether values of 4 and 2 bits that its kernels make and read lie several to a byte: less memory, more
    instructions. (Beside engines that take them so, its kernels do in any case.)"""
    kernels: KernelCycles = field(default_factory=KernelCycles)
    """About how long its kernels take: what engines and libraries must be faster than to be used."""
    speed: float = 1.0
    """Work it does in a cycle of the chip's clock, relative to other cores of the same target: work is dealt out in
    this proportion. (In the simulator its `costs` say how long it takes.)"""

    @property
    def is_host(self) -> bool:
        """True for the computer that compiles, whose cycles nobody counts."""
        return self.isa == "host"


@dataclass(frozen=True)
class Rows:
    """A copy as an engine's own DMA does it: rows of bytes, addresses and strides in bytes."""

    source: int
    target: int
    row_bytes: int
    rows: int
    source_stride: int
    """From the start of one row to that of the next; 0 to read one row again and again."""
    target_stride: int
    load: bool
    """True into the engine's memory, from wherever; False out of it."""


@dataclass(frozen=True)
class StreamDma:
    """An engine's own DMA, whose transfers are commands of the engine's stream."""

    name: str
    """As in the timeline; memories are reached by this name."""
    bytes_per_cycle: int
    setup_cycles: int
    """Cycles a transfer costs beyond its rows; each row begins a new beat of `bytes_per_cycle`."""
    move: Callable[[Rows], tuple[int, ...]]
    """The words of the command that copies."""


@dataclass(frozen=True)
class CommandStream:
    """How an engine takes lists of commands: consecutive launches, their DMA's transfers and what waits between them,
    made at compile time with final addresses, started once and ended by one interrupt.

    The engine hands commands to their units in order: those of offloads to itself, transfers to its `dma`. Each unit
    works in order; both at the same time, as far as waiting commands let them. A list begins when the one before has
    ended, which is when all of its commands have.
    """

    start: str
    """C function `uint32_t f(const uint32_t *words, uint32_t count)` that starts a list; its ticket is for `wait`."""
    wait: Callable[[str, int], tuple[int, ...]]
    """The words of the command that holds those behind it until at most so many commands of a unit, named as the
    engine or its DMA, have not ended."""
    end: tuple[int, ...] = ()
    """Words behind the last command of a list."""


@dataclass(frozen=True)
class Operand:
    """Where a launch finds one of its operands."""

    address: int
    """Of the first byte; of packed constants that are read where they lie, how far they are into the launch's blob, but
    in a stream their address as well."""
    strides: tuple[int, ...]
    """Bytes between neighbours along each physical dimension but one within a byte, of the layout the offload takes the
    operand in (along each axis of the logical shape if that is row-major)."""


def results_of(match: Match, operands: Mapping[str, Operand]) -> tuple[Operand, ...]:
    """Where each result of a pattern made with `together` lies, in its order; the strides are along its own axes."""
    joint, first, found = match.nodes["together"], operands["result"].address, []
    for flat in joint.inputs:
        (value,) = next(node.inputs for node in match.nodes.values() if node.output == flat)
        kind = match.graph.types[value]
        size = kind.dtype.numpy.itemsize
        found.append(Operand(first, tuple(size * step for step in dense_steps(kind.shape))))
        first += kind.nbytes
    return tuple(found)


@dataclass(frozen=True)
class Command:
    """One start of an engine: the C function of its driver and the constant words it is given."""

    function: str
    words: tuple[int, ...]
    constants: bool = False
    """True when the function takes the launch's packed constants as its second argument: `function(task, blob)`, blob
    a `const uint8_t *` aligned to 64 bytes."""


@dataclass(frozen=True)
class Pointer:
    """A pointer to an operand of a launch, in C."""

    operand: str
    """Leaf name, packed constant name, "scratch" or "result"."""
    c_type: str
    """What it points to, e.g. "const int8_t"."""


@dataclass(frozen=True)
class Struct:
    """A constant structure, filled at compile time."""

    c_type: str
    """As the library's header names it."""
    members: Mapping[str, CValue]
    """Member -> content; a structure within a structure lies in it."""


Cases = Callable[[Mapping[str, int]], Graph]
"""An integer network for settings of sizes and numbers, as `Offload.cases` gives it."""

CValue = int | Pointer | Struct
"""What a C function is given: a number, a pointer to an operand, or (a pointer to) a structure."""


@dataclass(frozen=True)
class LibraryCall:
    """A call of a C function that computes, or begins to compute: what software takes where an engine takes words."""

    function: str
    arguments: tuple[CValue, ...]


@dataclass(frozen=True)
class Offload:
    """One thing an engine can be asked to compute.

    The match given to its functions lies in the region's own graph, cut to a tile: shapes, pads and constants are
    the tile's.
    """

    name: str
    pattern: Pattern
    constraints: tuple[Constraint, ...]
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
    """What may be chosen about computing a region beside how it is tiled; None for nothing. What is chosen reaches the
    functions above, and the constraints, as `match.choice`."""
    default: Callable[[Match], Choice] | None = None
    """The settings that stand for knobs that are absent; needed with `knobs`."""
    floor: Callable[[Match], int] | None = None
    """Cycles of a whole region that no choice of knobs can go below; None where that is not known."""
    lossy: str = ""
    """What it costs in accuracy, as a sentence; it is then used only for layers the user pins to its engine. Empty for
    what computes every bit."""
    starting: Callable[[Match], int] = lambda match: 0
    """Cycles of a tile in which starting it keeps the core busy, beyond what any start takes: a driver that hands over
    one piece after the other."""
    prefer: bool = False
    """Whether it is taken wherever it fits, without a comparison with other offloads and the core. Else what takes the
    fewest cycles does a layer, by `cycles`, the DMA's and an estimate of the core's."""
    cases: Cases | None = None
    """Networks for `dovetail check` beside the layers it makes from the pattern: an integer graph, as it is before the
    policies' rewrites, in which something becomes this offload's. Called with settings by name: "rows", "columns",
    "channels", "outputs", "kernel_rows", "stride_rows", "top", "input_zero", ... as `check` names them, and "variant",
    a number from 0 to 7 that means what you like. What is asked for is what is tried. Raises ValueError where there is
    no such network."""

    def layouts_of(self, match: Match) -> Mapping[str, Layout]:
        """The layouts for a region, or a tile of it."""
        return self.layouts(match) if callable(self.layouts) else self.layouts


@dataclass(frozen=True)
class DeviceModel:
    """The simulated device behind an engine's registers."""

    factory: str
    """"module:function" that makes the device; called with the bus and `arguments`."""
    base: int
    size: int
    arguments: Mapping[str, Any] = field(default_factory=dict)


def _task(command: Command) -> Mapping[str, bytes]:
    return {"task": b"".join(word.to_bytes(4, "little") for word in command.words)}


@dataclass(frozen=True)
class Raw:
    """How a command is written out for other executors than our own (`dovetail compile --dump`)."""

    parts: Callable[[Command], Mapping[str, bytes]] = _task
    """A command's words as the engine reads them, under the name of each part."""
    pointers: Mapping[str, str] = field(default_factory=dict)
    """What the driver points each of the engine's registers at: a part, "constants", or a memory (its first byte)."""
    contents: Mapping[str, bytes] = field(default_factory=dict)
    """Memory -> what the driver has put at its start before the first launch."""


@dataclass(frozen=True)
class Mirror:
    """How an engine that works on a copy of a memory is told what others wrote there, and they what it wrote.

    C functions `f(uint8_t *first, uint32_t bytes)`; when one returns, the bytes may be overwritten.
    """

    to_engine: str
    from_engine: str
    """It waits for all launches before."""


@dataclass(frozen=True)
class Launched:
    """A launch of an engine in a network."""

    offload: str
    """Name of the offload."""
    match: Match


@dataclass(frozen=True)
class Joint:
    """How an engine computes several launches side by side that do not read each other's results: all but the last are
    handed over and held, the last starts them all, and its ticket is for all of them.

    It is for engines that reach constants and values where they lie, and only where there is no other engine.
    """

    most: int
    """Launches at a time, the one that starts them included."""
    cycles: Callable[[Sequence[Launched]], int | None]
    """Engine cycles of launches side by side, and, by the same measure, of one alone; None where they cannot be."""
    commands: Callable[[Sequence[tuple[Launched, Mapping[str, Operand]]]], Sequence[tuple[Command, ...]]]
    """The commands of each of some launches side by side, with their operands as `Offload.commands` has them. Those of
    the last start all."""
    handing: int = 60
    """Core cycles in which its driver hands over a launch: where the engine waits for the last of them."""


@dataclass(frozen=True)
class Deployed:
    """A network as an engine sees it, for the files that are made for both."""

    prefix: str
    """What the network's C names begin with; `<prefix>.h` declares what is public."""
    arena: str
    """C name of the array of values in the engine's memory."""
    nbytes: int
    """Its size."""
    launches: tuple[Launched, ...]
    """In order."""


@dataclass(frozen=True)
class Engine:
    """An accelerator beside the core, started by a C call and working on its own until waited for; or software, which
    the core runs itself."""

    name: str
    memory: str
    """The memory its operands must lie in."""
    offloads: tuple[Offload, ...]
    """What it can compute, the preferred first."""
    ideal_macs_per_cycle: float
    """Peak multiply-accumulates per cycle, for the report."""
    driver: tuple[str, ...]
    """C files of the driver, as paths of package resources "package:file"."""
    device: DeviceModel | None = None
    """None for software: its C runs on the core, on the host too. It reaches constants and values where they lie."""
    wait: str = ""
    """C function that waits until the launch with a given ticket has finished; empty where it has finished when the
    call that starts it returns."""
    files: Mapping[str, Path | Callable[[], str]] = field(default_factory=dict)
    """More C files to compile or include with the driver: path below the project's `driver` -> where it is, or a
    function that gives its text (`dovetail.target.queue_driver` makes such)."""
    headers: tuple[str, ...] = ()
    """Which of `files` declare the functions of the commands."""
    prepare: str = ""
    """C function called once before the first launch of an inference; empty for none."""
    defines: Mapping[str, int] = field(default_factory=dict)
    """Macros the driver is compiled with, e.g. addresses and sizes of this configuration."""
    bytes_per_cycle: float | None = None
    """Bytes its own port to memory moves per cycle, for the report's bounds; None where that is not known."""
    raw: Raw = field(default_factory=Raw)
    """How its commands are written out raw."""
    success: int | None = None
    """What `wait`, or without one the functions of the commands, return when all went well; anything else is a failure
    (`dovetail_failed` in dovetail_rt.h). None where that is not looked at."""
    constants: str = ""
    """The memory it reads its packed constants in; empty for `memory`. In the memory of the code they are read where
    they lie; into any other they are copied."""
    stream: CommandStream | None = None
    """How it takes lists of commands; None where the driver starts it for each launch. The words of an offload's
    commands are then parts of a list, their functions are not looked at."""
    dma: StreamDma | None = None
    """What copies its operands and results in the same stream; None where the target's DMA or the core does. It takes
    and gives values in any layout: its transfers convert."""
    mirror: Mirror | None = None
    """How bytes get to and from its own copy of `memory`; None where it works on that itself."""
    made: Callable[[Deployed], Mapping[str, str]] | None = None
    """Further files of the driver, made for a network: path below the project's `driver` -> text."""
    libraries: tuple[str, ...] = ()
    """What a program for this computer is linked with, e.g. "-ldl"."""
    environment: Callable[[], Mapping[str, str]] | None = None
    """Environment variables of the process that runs it on this computer."""
    joint: Joint | None = None
    """How it computes several launches side by side; None where it does one after the other."""
    rtl: DeviceModel | None = None
    """The engine in Verilog, for the simulator `rtl` (`dovetail.target.Rtl` makes it); None where there is none."""


@dataclass(frozen=True)
class Rewrite:
    """A step that brings the integer graph into a form the target takes."""

    name: str
    apply: Callable[[Graph], Graph]
    """The graph in that form. Of what it leaves alone, the result may say why (`Graph.left`, `Draft.leave`): that is
    what `explain` and the report then print of a layer no engine takes."""
    lsb: int
    """How far each 8-bit value that remains may move, computed from the same operands; 0 when every bit is kept."""


@dataclass(frozen=True)
class Policy:
    """A named choice of rewrites, e.g. how requantisation is done."""

    name: str
    sentence: str
    rewrites: tuple[Rewrite, ...]
    rounding: Rounding | None = None
    """The one rounding of models' requantisations that the engines take, used unless another is asked for; None for
    that of the runtime of the model's format."""


@dataclass(frozen=True)
class Quantisation:
    """What a float network may be quantised to so that the target takes it; `dovetail quantize` asks for it.

    The defaults are what the core's kernels compute.
    """

    weight_bits: tuple[int, ...] = (8, 4, 2)
    """Widths of weights it takes, of 8, 4 and 2, the widest first."""
    packed: bool = False
    """Narrow weights take less room and time there; else they are held one to a byte."""
    per_channel: bool = True
    """A scale per output channel of the weights; else one per layer."""
    symmetric: bool = False
    """Activations must have the zero point 0."""
    activations: DType = DType.INT8
    """INT8 or UINT8: what activations are given as. (A policy may change it afterwards.)"""
    shifts: bool = False
    """Requantisation is a right shift: scales are powers of two, both operands of a sum have the same one, and its
    result none smaller. Shifts per channel where weights have scales per channel."""
    ternary: bool = False
    """Weights of 2 bits are -1, 0 or 1."""
    operand_bits: int = 8
    """Bits that operands of layers with 2-bit weights are to keep within."""
    activation_bits: tuple[int, ...] = (8,)
    """Widths of activations it takes, of 8, 4 and 2, the widest first; narrower ones are of the same signedness. (What
    gives them types of few bits is a rewrite of the policy, `dovetail.legalize.narrow_activations`.)"""
    wide_sums: bool = False
    """Layers keep their sums in 32 bits, so that in a transformer's residual stream their results may have 16 bits as
    what the core computes there has; else they have 8."""


@dataclass(frozen=True)
class Derived:
    """A number that follows from a configuration and can be asked for, such as MACs per cycle."""

    present: Callable[[Any], int]
    """The number a configuration has."""
    apply: Callable[[Any, int], Any]
    """A configuration with another; raises TargetError where there is none."""
    sets: tuple[str, ...]
    """The fields it changes."""


@dataclass(frozen=True)
class Recipe:
    """How a target is made from a configuration, so that `dovetail sweep` can make others like it."""

    name: str
    """What the configuration describes, as a rule the engine: its fields are called `name.field`."""
    config: Any
    """A frozen dataclass; what of it is a number may be set. Its constructor refuses what there cannot be."""
    make: Callable[[Any], Target]
    """The target with another configuration, its own recipe included."""
    derived: Mapping[str, Derived] = field(default_factory=dict)
    """What else may be set, by name."""


@dataclass(frozen=True)
class Target:
    """A whole machine."""

    name: str
    sentence: str
    """What it is, for `dovetail targets`."""
    core: Core
    memories: tuple[Memory, ...]
    code: str
    """Memory of program and constants."""
    values: str
    """Memory of activations that lie nowhere closer."""
    policies: tuple[Policy, ...]
    """The default first."""
    engines: tuple[Engine, ...] = ()
    dma: Dma | None = None
    ordering: Ordering | None = None
    """Orders a whole network on the hardware, for `dovetail schedule`; None where that is not asked for."""
    quantisation: Quantisation = field(default_factory=Quantisation)
    mesh: Mesh | None = None
    """How copies of this machine are joined, for `dovetail mesh`; None for a machine alone."""
    recipe: Recipe | None = None
    """How it is made, if it is made from a configuration; None for hardware that is as it is."""
    workers: tuple[Core, ...] = ()
    """Further cores, numbered from 1, that run what `core` (number 0) starts on them. One firmware serves all: they
    have its instruction set and instructions, at least its stack, and costs and a speed of their own."""
    operators: tuple[type[UserOperator], ...] = ()
    """Operators of the port's own that models may have (docs/own_operators.md)."""
    mailbox: int = 0x1A010000
    """Address of the registers by which cores start one another (`emit/runtime/cores.h`), 4096 bytes; used only with
    workers."""

    @property
    def cores(self) -> tuple[Core, ...]:
        """Every core, by its number."""
        return (self.core, *self.workers)

    def memory(self, name: str) -> Memory:
        """The memory of that name; raises KeyError when there is none."""
        return {memory.name: memory for memory in self.memories}[name]

    def reads_constants(self, engine: Engine) -> bool:
        """True when an engine reads packed constants where the linker puts them."""
        return engine.device is None or (engine.constants or engine.memory) == self.code

    @property
    def dmas(self) -> tuple[Dma | StreamDma, ...]:
        """Everything that copies: the target's DMA, and engines' own."""
        own = tuple(engine.dma for engine in self.engines if engine.dma)
        return (*([self.dma] if self.dma else []), *own)

    @property
    def mover(self) -> str:
        """What copies where elements only move: the DMA's name, an engine's own where there is no other, or "core"."""
        return self.dmas[0].name if self.dmas else "core"

    def dma_of(self, engine: Engine) -> Dma | StreamDma | None:
        """What copies an engine's operands and results; None where the core does."""
        return engine.dma or self.dma

    def works_in_place(self, engine: Engine) -> bool:
        """True when an engine reaches constants and values where they lie: the planner cuts and copies nothing."""
        return self.reads_constants(engine) and engine.memory == self.values

    def engine(self, name: str) -> Engine:
        """The engine of that name; raises KeyError when there is none."""
        return {engine.name: engine for engine in self.engines}[name]

    def policy(self, name: str | None) -> Policy:
        """The policy of that name, the default for None; raises KeyError when there is none."""
        return self.policies[0] if name is None else {policy.name: policy for policy in self.policies}[name]


MOST_CORES = 64
"""Cores a target may have: what the mailbox of the simulated chip has registers for."""


def with_cores(target: Target, count: int | None) -> Target:
    """The target with so many cores like its own; as it is for None.

    Raises:
        TargetError: the number is not from 1 to `MOST_CORES`, or the target says itself which further cores it has.
    """
    if count is None or count == len(target.cores):
        return target
    if not 1 <= count <= MOST_CORES:
        hint = f"give a number from 1 to {MOST_CORES}"
        raise TargetError(f"{count} cores are asked for", where=target.name, hint=hint)
    if target.workers:
        what = f"it has {len(target.cores)} cores of its own, {count} are asked for"
        raise TargetError(what, where=target.name, hint="leave --cores out, or change the target file")
    return replace(target, workers=(target.core,) * (count - 1))


def _code(core: Core) -> tuple[object, ...]:
    """What the firmware of a core depends on."""
    return core.isa, core.instructions, core.extension, core.streams, dict(core.functions)


def check_cores(target: Target) -> None:
    """Raise TargetError where a further core cannot run the firmware of core 0, or one has no speed."""
    first = target.core
    for number, core in enumerate(target.cores):
        where = f"core {number} of {target.name}"
        if core.speed <= 0:
            raise TargetError(f"its speed is {core.speed}", where=where, hint="give a speed above 0")
        if _code(core) != _code(first):
            what = f"it is of another kind ({core.isa}) than core 0 ({first.isa}), whose firmware it has to run"
            raise TargetError(what, where=where, hint="give all cores the same instruction set and instructions")
        if core.stack < first.stack:
            hint = "give it as many"
            raise TargetError(f"it has {core.stack} bytes of stack, core 0 has {first.stack}", where=where, hint=hint)
