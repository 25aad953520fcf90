"""An engine: what it computes, how it is started, how bytes reach it, and its simulated device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dovetail.records import Record, field, force_setattr
from dovetail.target.chip import Memory
from dovetail.target.offload import Command, Offload, Operand
from dovetail.target.pattern import Match

IN_PLACE_ALIGNMENT = 64
"""Bytes packed constants are aligned to that an engine reads where they lie."""
_UNROLLED = 24
"""Turns of a loop that copies words, up to which the compiler of firmware writes them one after the other."""


class Rows(Record):
    """A copy as an engine's own DMA does it: rows of bytes, addresses and strides in bytes."""

    source: int
    """Address of the first byte read."""
    target: int
    """Address of the first byte written."""
    row_bytes: int
    """Bytes of a row."""
    rows: int
    """Number of rows."""
    source_stride: int
    """Bytes from the start of one row to the start of the next; 0 to read one row repeatedly."""
    target_stride: int
    """Bytes from the start of one row to the start of the next."""
    load: bool
    """True for a copy into the engine's memory, False for a copy out of it."""


class StreamDma(Record):
    """An engine's own DMA, whose transfers are commands of the engine's stream."""

    name: str
    """Name in the timeline, and in `Memory.reach`."""
    bytes_per_cycle: int
    """Bytes per cycle while it copies a row."""
    setup_cycles: int
    """Cycles a transfer costs beyond its rows; each row begins a new beat of `bytes_per_cycle`."""
    move: Callable[[Rows], tuple[int, ...]]
    """The words of the command that copies."""


class CommandStream(Record):
    """How an engine takes lists of commands: consecutive launches, their DMA's transfers and what waits between them,
    made at compile time with final addresses, started once and ended by one interrupt.

    The engine hands commands to their units in order: those of offloads to itself, transfers to its `dma`. Each unit
    works in order; both at the same time, as far as waiting commands let them. A list begins when the one before has
    ended, which is when all of its commands have.
    """

    start: str
    """C function `uint32_t f(const uint32_t *words, uint32_t count)` that starts a list; its ticket is for `wait`."""
    wait: Callable[[str, int], tuple[int, ...]]
    """Function that returns the words of a waiting command. The command holds later commands until at most so many
    commands of a unit (the engine's name or its DMA's) are unfinished."""
    end: tuple[int, ...] = ()
    """Words after the last command of a list."""
    pieces: bool = True
    """Whether a long list may be started in pieces, cut between any two commands: sums, memories and settings of the
    engine stay as they are from one list to the next. The firmware then computes the words of large tables in loops.
    It must be False for an engine with a DMA of its own, or with words after the last command."""


class DeviceModel(Record):
    """The simulated device behind an engine's registers."""

    factory: str
    """"module:function" that makes the device; called with the bus and `arguments`."""
    base: int = 0
    """Address of its registers."""
    size: int = 0
    """Bytes of address space."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the factory, as JSON allows them."""
    opcode: int = 0
    """Opcode of the core's instructions that lead to it in place of registers, 0x0B, 0x2B, 0x5B or 0x7B for custom-0 to
    custom-3; it is then a `dovetail.sim.device.Coprocessor`."""


def _task(command: Command) -> Mapping[str, bytes]:
    return {"task": b"".join(word.to_bytes(4, "little") for word in command.words)}


class Raw(Record):
    """Form of commands for other executors than Dovetail's own (`dovetail compile --dump`)."""

    parts: Callable[[Command], Mapping[str, bytes]] = _task
    """Function that returns a command's words as the engine reads them, by the name of each part."""
    pointers: Mapping[str, str] = field(default_factory=dict)
    """Target of each of the engine's registers: a part, "constants", or a memory (its first byte)."""
    contents: Mapping[str, bytes] = field(default_factory=dict)
    """Memory -> what the driver has put at its start before the first launch."""


class Mirror(Record):
    """Functions that keep an engine's own copy of a memory equal to the memory.

    C functions `f(uint8_t *first, uint32_t bytes)`; when one returns, the bytes may be overwritten.
    """

    to_engine: str
    """Function that copies bytes to the engine, called before a launch that reads them."""
    from_engine: str
    """Function that copies bytes back; it waits for all earlier launches."""


class Launched(Record):
    """A launch of an engine in a network."""

    offload: str
    """Name of the offload."""
    match: Match
    """The part of the network it computes."""


class Macs(Record):
    """Multiply-accumulates of an operator of a model, those with padding left out, and what its kind is."""

    count: int
    """Number of multiply-accumulates."""
    kind: str
    """Name of the operator's class, e.g. "DepthwiseConv2d"."""
    kernel: tuple[int, int]
    """Rows and columns of the weights."""
    pixels: int
    """Rows times columns of the result, of all images."""
    inputs: int
    """Channels of the operand that a channel of the result reads."""
    outputs: int
    """Channels of the result."""
    bits: int
    """Bits that represent all weights, from the least to the largest; the type's bits for floats, 8 for computed
    weights."""


class Best(Record):
    """The most an engine makes of a kind of operator, at whatever size."""

    macs_per_cycle: float
    """0 for a kind that it does not compute."""
    why: str = ""
    """Why it is below the peak, as a part of a sentence, e.g. "one of 16 inputs is of use to a channel"."""
    block: tuple[int, int, int, int] = (1, 1, 1, 1)
    """Inputs, outputs, rows and columns that the engine computes together; a layer that does not fill a block wastes
    the rest."""


class Joint(Record):
    """How an engine computes several launches side by side that do not read each other's results: all but the last are
    handed over and held, the last starts them all, and its ticket is for all of them.

    It is for engines that reach constants and values where they lie, and only where there is no other engine.
    """

    most: int
    """Launches at a time, the one that starts them included."""
    cycles: Callable[[Sequence[Launched]], int | None]
    """Engine cycles of launches side by side, and, by the same measure, of one alone; None where they cannot be."""
    commands: Callable[[Sequence[tuple[Launched, Mapping[str, Operand]]]], Sequence[tuple[Command, ...]]]
    """Function that returns the commands of each of some launches side by side, with their operands as
    `Offload.commands` has them. The commands of the last launch start all launches."""
    handing: int = 60
    """Core cycles in which its driver hands over a launch: where the engine waits for the last of them."""
    chained: bool = False
    """Whether a launch may read a result that a concurrent launch still writes. The engine must then keep every
    element ready before the elements made from it. Such launches have queues of their own (`LaunchStatement.queue`)."""


class Deployed(Record):
    """A network as an engine sees it, for the files that are made for both."""

    prefix: str
    """Prefix of the network's C names; `<prefix>.h` declares the public ones."""
    arena: str
    """C name of the array of values in the engine's memory."""
    nbytes: int
    """Size of the array in bytes."""
    launches: tuple[Launched, ...]
    """Launches of the engine, in order."""


class Engine(Record):
    """An accelerator beside the core, which a C call starts, and which works alone until the core waits. Software
    that the core runs is an engine too."""

    name: str
    """Name in pins, reports and the timeline, lower case."""
    memory: str
    """The memory its operands must lie in."""
    offloads: tuple[Offload, ...]
    """Offloads it can compute, the preferred first."""
    ideal_macs_per_cycle: float
    """Peak multiply-accumulates per cycle, for bounds and the report."""
    driver: tuple[str, ...]
    """C files of the driver, as paths of package resources "package:file"."""
    device: DeviceModel | None = None
    """None for software: its C runs on the core, on the host too. It reaches constants and values where they lie."""
    wait: str = ""
    """C function that waits until the launch with a given ticket has finished; empty where it has finished when the
    call that starts it returns."""
    files: Mapping[str, Path | Callable[[], str]] = field(default_factory=dict)
    """More C files to compile or include with the driver: path below the project's `driver` -> the file's place, or
    a function that returns its text (`dovetail.target.queue_driver` makes such functions)."""
    headers: tuple[str, ...] = ()
    """Names of those `files` that declare the functions of the commands."""
    prepare: str = ""
    """C function called once before the first launch of an inference; empty for none."""
    defines: Mapping[str, int] = field(default_factory=dict)
    """Macros for compiling the driver, e.g. addresses and sizes of this configuration."""
    best: Callable[[Macs], Best] | None = None
    """Function that returns the most it makes of a kind of operator, for bounds; None for its peak with every
    operator."""
    bytes_per_cycle: float | None = None
    """Bytes its own port to memory moves per cycle, for the report's bounds; None where that is not known."""
    pj_per_mac: float = 0.0
    """Energy of a multiply-accumulate in pJ; 0 where that is not said."""
    pj_per_cycle: float = 0.0
    """Energy of a busy cycle beside its multiply-accumulates, in pJ; 0 where that is not said."""
    queue: int = 0
    """Launches it holds, the one it computes included; for estimates. Its driver waits before one more. 0 for what its
    `JobRegisters` have places for, 2 without them."""
    launching: int = 0
    """Core cycles from the call that starts it to its start, without waiting; for estimates. 0 stands for a driver
    on RV32IMC that writes its `JobRegisters` in a loop, as `iss` shows it: 27 cycles, and 3 for each register (8 for
    more than 24 registers, if the compiler keeps the loop). Without `JobRegisters` it is 70."""
    raw: Raw = field(default_factory=Raw)
    """Form of its commands for other executors (`dovetail compile --dump`)."""
    success: int | None = None
    """Return value of success of `wait`, or without it of the commands' functions; any other value is a failure
    (`dovetail_failed` in dovetail_rt.h). None where that is not looked at."""
    constants: str = ""
    """The memory it reads its packed constants in; empty for `memory`. In the memory of the code they are read where
    they lie; into any other they are copied."""
    stream: CommandStream | None = None
    """How it takes lists of commands; None where the driver starts it for each launch. The words of an offload's
    commands are then parts of a list, their functions are not looked at."""
    dma: StreamDma | None = None
    """DMA that copies its operands and results in the same stream; None if the target's DMA or the core does. It takes
    and gives values in any layout: its transfers convert."""
    mirror: Mirror | None = None
    """Functions that copy bytes to and from its own copy of `memory`; None if it works on `memory` itself."""
    made: Callable[[Deployed], Mapping[str, str]] | None = None
    """Further files of the driver, made for a network: path below the project's `driver` -> text."""
    buffer: str = ""
    """Memory of the engine, into which launches load operands and constants (`Offload.buffered`); the compiler
    assigns addresses, and knows the contents. Empty for an engine without a buffer."""
    holds: int = 0
    """Bytes of the memory of values that its driver or library keeps for itself, such as a static pool: the planner
    leaves them free, and `compile` counts them."""
    libraries: tuple[str, ...] = ()
    """Linker flags of a program for this computer, e.g. "-ldl"."""
    environment: Callable[[], Mapping[str, str]] | None = None
    """Environment variables of the process that runs it on this computer."""
    joint: Joint | None = None
    """How it computes several launches side by side; None where it does one after the other."""
    rtl: DeviceModel | None = None
    """The engine in Verilog, for the simulator `rtl` (`dovetail.target.Rtl` makes it); None for an engine without
    Verilog."""

    def __post_init__(self) -> None:
        says = self.device.arguments if self.device else {}
        if not self.queue:
            force_setattr(self, "queue", int(says.get("places", 2)))
        if not self.launching:
            words = len(says.get("registers", ()))
            force_setattr(self, "launching", 27 + (3 if words <= _UNROLLED else 8) * words if words else 70)

    def within(self, buffer: Memory) -> Engine:
        """The engine, whose launches load no more than its buffer holds."""
        return replace(self, offloads=tuple(one.within(buffer.size, buffer.alignment) for one in self.offloads))

    @property
    def constants_memory(self) -> str:
        """The memory it reads its packed constants in."""
        return self.constants or self.memory
