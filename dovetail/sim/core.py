"""One core of a simulated chip: what an instruction set says of it, and the hook that counts its blocks and stops it.

The hook is C (block_hook.c), built on first use and cached. Nothing here imports the emulator by itself.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from dovetail.codegen.build.elf import Symbol
from dovetail.codegen.build.toolchain import compile_host
from dovetail.errors import SimulationError
from dovetail.records import Record, field
from dovetail.sim.device import Coprocessor, Device, MemoryBus
from dovetail.sim.waits import WaitPorts
from dovetail.target.chip import Memory

RUNNING = 0
"""The core stopped by itself: it executed `wfi`."""
STOP_DEADLINE = 1
"""The time of the next device event has come, or the harness asked to stop."""
STOP_LIMIT = 2
"""The instruction limit was reached."""
STOP_INTERRUPT = 3
"""An interrupt line is high and the interrupt enables may have changed."""
NEVER = 2**64 - 1
"""A deadline that does not come."""
_SLOTS = 1 << 16


class BlockCost(Record):
    """The counts that one run of a block, up to its end, adds."""

    end: int
    """Address after the last instruction that runs."""
    instructions: int
    """Their number, predicated ones left out."""
    cycles: int
    """Their cycles, a final conditional branch counted as not taken, predicated ones as skipped."""
    taken_extra: int
    """Cycles to add when the next block does not start at `end`."""
    system: bool
    """Whether it contains an instruction that may change the interrupt enables."""
    entered_extra: int = 0
    """Cycles to add when it is jumped to."""


class Pause(Record):
    """Why the core stopped by itself, and the address of the instruction it stopped at."""

    at: int
    waits: bool
    """True after wfi, False where it can go on at once."""
    cycles: int = 0
    """Cycles the core has spent on the instruction that stopped it."""
    fault: str = ""
    """The fault the core cannot go on after; empty for none."""


class CoreSetup(Record):
    """Everything a simulated core is made from."""

    isa: str
    costs: Any
    """Cycles of each class of instruction, of the type `Architecture.costs`."""
    bus: MemoryBus
    elf: Path
    symbols: Mapping[str, Symbol]
    extension: str
    """The function that executes the core's own instructions (see `riscv.py`); empty for none."""
    coprocessors: Mapping[int, Coprocessor] = field(default_factory=dict)
    """By opcode, the devices that instructions of the core lead to."""


class EmulatedCore(Protocol):
    """A core in the emulator."""

    emulator: Any
    """The emulator's handle."""
    registers: tuple[int, Device] | None = None
    """Base address of the registers the core itself has in memory, and what answers there; 4096 bytes."""
    predicated: Mapping[int, int] = MappingProxyType({})
    """Addresses of instructions that may be skipped where they stand; `block_cost` leaves them out. For each the cycles
    it takes more when it is executed than when it is skipped."""

    wake: int = 0
    """Cycles between the rise of the interrupt line and the instruction after wfi."""
    timed: Mapping[int, Callable[[], int]] = MappingProxyType({})
    """Addresses of instructions whose cycles depend on data; what is called before one is executed gives the cycles
    `block_cost` leaves out."""

    def start(self, entry: int) -> None:
        """Go to the entry point of the firmware, as after a reset."""

    def count_into(self, state: HookState, reads: int) -> None:
        """Told the counters once: what it executes unseen by the block hook, as turns of hardware loops, adds to
        them, and calls `dovetail_reads` of block_hook.c, at the address `reads`, with what it reads."""

    def pc(self) -> int:
        """Address of the next instruction."""

    def resume_at(self) -> int:
        """The address the emulator goes on at."""
        return self.pc()

    def pause(self) -> Pause | None:
        """Why the core stopped by itself, and finish what stopped it; None for no known reason."""

    def line_enabled(self) -> bool:
        """Whether the interrupt line of the devices reaches the core: then it ends wfi. Start-up code enables it."""
        return True

    def enter_interrupt(self) -> int | None:
        """Go to the handler of the devices' interrupt and return the cycles of that; None where it is masked."""

    def block_cost(self, address: int, size: int) -> BlockCost:
        """Count the block of `size` bytes at `address`."""


class Architecture(Record):
    """A family of cores."""

    elf_machine: str
    """The machine of its ELF files, as pyelftools names it."""
    costs: Callable[..., Any]
    """The frozen dataclass of cycles per class of instruction; its defaults are a stated core's."""
    make: Callable[[CoreSetup], EmulatedCore]
    """Makes a core; imports the emulator."""
    product: Callable[[Any], int]
    """Fewest cycles of a multiply-accumulate by its instructions for one number at a time."""
    word: Callable[[Any], int]
    """Fewest cycles in which a word of 4 bytes is loaded or stored."""
    bits: int = 32
    """Bits of a register and of an address."""


def emulator_calls() -> Any:
    """The emulator's C functions."""
    return importlib.import_module("unicorn.unicorn_py3.unicorn").uclib


def add_native_hook(emulator: Any, kind: int, function: Any, data: ctypes.Structure, first: int, last: int) -> None:
    """Have the emulator call a C function for addresses from `first` to `last` (all, if `first` is greater)."""
    handle, place = ctypes.byref(ctypes.c_size_t()), ctypes.cast(function, ctypes.c_void_p)
    given, ends = ctypes.c_void_p(ctypes.addressof(data)), (ctypes.c_uint64(first), ctypes.c_uint64(last))
    if status := emulator_calls().uc_hook_add(emulator._uch, handle, kind, place, given, *ends):
        raise RuntimeError(f"the emulator refused the hook: {status}")


class _BlockEntry(ctypes.Structure):
    """Mirrors `struct block` of block_hook.c."""

    _fields_ = tuple(
        (name, ctypes.c_uint32)
        for name in ("address", "size", "end", "instructions", "cycles", "taken_extra", "system", "entered_extra")
    )


_DECODE = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint32, ctypes.POINTER(_BlockEntry))
"""C type of the function the native hook calls for a block it has not seen."""


class HookState(ctypes.Structure):
    """Counters and orders shared by the hook and Python; mirrors `struct hook_state` of block_hook.c.

    Fields:
        cycles: the time, waiting included. instructions: executed so far. Both include the whole current block.
        deadline: cycle to stop at. instruction_limit: count to stop at.
        current: address of the block being executed. expected: fall-through address of that block.
        taken_extra: cycles due if the next block is elsewhere. after_system: see `BlockCost.system`.
        interrupt: whether any interrupt line is high. stop_reason: why the hook stopped the core.
        predicated: for each halfword from `predicated_base`, 0 or 1 + the cycles an instruction that may be skipped
            takes more when it is executed.
        ports: the ways to as many memories as wait, see waits.py.
    """

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("cycles", "instructions", "deadline", "instruction_limit")),
        *((name, ctypes.c_uint32) for name in ("current", "expected", "taken_extra", "after_system", "interrupt")),
        *((name, ctypes.c_uint32) for name in ("stop_reason", "used", "mask")),
        *((name, ctypes.c_void_p) for name in ("table", "decode", "stop", "predicated", "ports")),
        *((name, ctypes.c_uint32) for name in ("predicated_base", "memories")),
    )
    cycles: int
    instructions: int
    deadline: int
    instruction_limit: int
    current: int
    expected: int
    taken_extra: int
    after_system: int
    interrupt: int
    stop_reason: int


class BlockHook:
    """Counts instructions and cycles of a core at the beginning of each block, and stops it before one: block_hook.c
    as a shared library."""

    def __init__(self, core: EmulatedCore, memories: Sequence[Memory]) -> None:
        """`memories` are those whose reads wait or are counted."""
        source = Path(__file__).with_name("block_hook.c")
        self._library = ctypes.CDLL(str(compile_host(source.parent, [source], flags=("-O2",))))
        self._unicorn: Any = importlib.import_module("unicorn")
        self.failure: SimulationError | None = None
        """Why a block could not be counted; the core has then stopped."""
        self._emulator, self._count = core.emulator, core.block_cost
        self._table = (_BlockEntry * _SLOTS)()
        self._decode = _DECODE(self._decoded)
        self.state = HookState(deadline=NEVER, instruction_limit=NEVER, mask=_SLOTS - 1)
        """The counters and orders."""
        self.state.table = ctypes.addressof(self._table)
        self.state.decode = ctypes.cast(self._decode, ctypes.c_void_p).value
        self.state.stop = ctypes.cast(emulator_calls().uc_emu_stop, ctypes.c_void_p).value
        self._hook(self._unicorn.UC_HOOK_BLOCK, "dovetail_block_hook", self.state, 1, 0)
        self.waits = WaitPorts(memories, ctypes.addressof(self.state))
        """The ways to the memories."""
        self.state.ports, self.state.memories = ctypes.addressof(self.waits.ports), len(memories)
        for port, memory in zip(self.waits.ports[len(memories) :], memories, strict=True):
            place = (memory.base, memory.base + memory.size - 1)
            self._hook(self._unicorn.UC_HOOK_MEM_READ, "dovetail_load_hook", port, *place)
            if memory.pj_per_byte:
                self._hook(self._unicorn.UC_HOOK_MEM_WRITE, "dovetail_store_hook", port, *place)

    def hook_predicated(self, extra: Mapping[int, int]) -> None:
        """Count `Core.predicated` where they are executed: the emulator calls a hook only near them."""
        base = min(extra)
        self._marks = (ctypes.c_uint8 * ((max(extra) - base) // 2 + 1))()
        for address, cycles in extra.items():
            self._marks[(address - base) // 2] = 1 + cycles
        self.state.predicated, self.state.predicated_base = ctypes.addressof(self._marks), base
        for first, last in _neighbours(sorted(extra)):
            self._hook(self._unicorn.UC_HOOK_CODE, "dovetail_executed_hook", self.state, first, last)

    def hook_timed(self, timed: Mapping[int, Callable[[], int]]) -> None:
        """Count `Core.timed` as they are executed."""

        def execute(emulator: Any, address: int, size: int, data: object) -> None:
            if address in timed and not self.state.stop_reason:
                self.state.cycles += timed[address]()

        for first, last in _neighbours(sorted(timed)):
            self._emulator.hook_add(self._unicorn.UC_HOOK_CODE, execute, None, first, last)

    def _hook(self, kind: int, function: str, data: ctypes.Structure, first: int, last: int) -> None:
        add_native_hook(self._emulator, kind, getattr(self._library, function), data, first, last)

    def reads(self) -> int:
        """The address of the C function that is told what a core reads by itself."""
        return ctypes.cast(self._library.dovetail_reads, ctypes.c_void_p).value or 0

    def _decoded(self, address: int, size: int, out: Any) -> None:
        """Called from C at a block not seen before: fill in its entry of the table."""
        try:
            cost = self._count(address, size)
        except SimulationError as error:
            # An exception cannot cross the C frame: stop at the next block and let the machine raise it.
            self.failure = error
            self.state.deadline = 0
            cost = BlockCost(address + size, 0, 0, 0, False)
        out[0] = _BlockEntry(address, size, *astuple(cost))


def _neighbours(addresses: list[int], gap: int = 8) -> list[tuple[int, int]]:
    """The (first, last) address of each run of sorted addresses that are no more than `gap` bytes apart."""
    runs: list[tuple[int, int]] = []
    for address in addresses:
        near = bool(runs) and address - runs[-1][1] <= gap
        first = runs.pop()[0] if near else address
        runs.append((first, address))
    return runs
