"""The block hook: counts instructions and cycles, and stops the core when Python has something to do.

The hook is native (block_hook.c, built with the host's C compiler on first use and cached) or, without a
compiler, the same steps in Python at about a fifth of the speed (hardware/cores.md).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dovetail.errors import BuildError, MissingExtraError, SimulationError
from dovetail.simulate.architecture import BlockCost

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


class BlockEntry(ctypes.Structure):
    """Mirrors `struct block` of block_hook.c."""

    _fields_ = tuple(
        (name, ctypes.c_uint32)
        for name in ("address", "size", "end", "instructions", "cycles", "taken_extra", "system", "unused")
    )


DECODE = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint32, ctypes.POINTER(BlockEntry))
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
    """

    _fields_ = (
        ("cycles", ctypes.c_uint64),
        ("instructions", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("instruction_limit", ctypes.c_uint64),
        ("current", ctypes.c_uint32),
        ("expected", ctypes.c_uint32),
        ("taken_extra", ctypes.c_uint32),
        ("after_system", ctypes.c_uint32),
        ("interrupt", ctypes.c_uint32),
        ("stop_reason", ctypes.c_uint32),
        ("used", ctypes.c_uint32),
        ("mask", ctypes.c_uint32),
        ("table", ctypes.c_void_p),
        ("decode", ctypes.c_void_p),
        ("stop", ctypes.c_void_p),
        ("predicated", ctypes.c_void_p),
        ("predicated_base", ctypes.c_uint32),
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


def native_hook_library() -> Path | None:
    """Build block_hook.c with the host's C compiler, or find it in the cache; None where that is impossible."""
    from dovetail.build.toolchain import compile_host

    source = Path(__file__).with_name("block_hook.c")
    try:
        return compile_host(source.parent, [source], out=None, flags=("-O2",))
    except (BuildError, MissingExtraError):
        return None


class NativeHook:
    """The hook in C.

    Args:
        library: the shared library `native_hook_library` returned.
        count: gives the cost of the block at (address, bytes).
        stop: address of the emulator's C function that stops it.
    """

    def __init__(self, library: Path, count: Callable[[int, int], BlockCost], stop: int) -> None:
        self.state = HookState(deadline=NEVER, instruction_limit=NEVER)
        self._library = ctypes.CDLL(str(library))
        self._table = (BlockEntry * _SLOTS)()
        self._predicated: ctypes.Array[ctypes.c_uint8] | None = None
        self._decode = DECODE(self._decoder(count))
        self.state.mask = _SLOTS - 1
        self.state.table = ctypes.addressof(self._table)
        self.state.decode = ctypes.cast(self._decode, ctypes.c_void_p).value
        self.state.stop = stop
        self.failure: SimulationError | None = None

    def _decoder(self, count: Callable[[int, int], BlockCost]) -> Callable[[int, int, Any], None]:
        def decode(address: int, size: int, out: Any) -> None:
            """Called from C at a block not seen before: fill in its entry of the table."""
            entry = out[0]
            try:
                cost = count(address, size)
            except SimulationError as error:
                # An exception cannot cross the C frame: stop at the next block and let the machine raise it.
                self.failure = error
                self.state.deadline = 0
                cost = BlockCost(address + size, 0, 0, 0, False)
            entry.address, entry.size, entry.end = address, size, cost.end
            entry.instructions, entry.cycles = cost.instructions, cost.cycles
            entry.taken_extra, entry.system = cost.taken_extra, int(cost.system)

        return decode

    @property
    def function(self) -> int:
        """Address of the C hook."""
        return ctypes.cast(self._library.dovetail_block_hook, ctypes.c_void_p).value or 0

    @property
    def executed_function(self) -> int:
        """Address of the C hook for executed instructions near predicated ones, the only ones it counts."""
        return ctypes.cast(self._library.dovetail_executed_hook, ctypes.c_void_p).value or 0

    def set_predicated(self, extra: Mapping[int, int]) -> None:
        """Take note of `Core.predicated`, which is not empty."""
        base = min(extra)
        table = (ctypes.c_uint8 * ((max(extra) - base) // 2 + 1))()
        for address, cycles in extra.items():
            table[(address - base) // 2] = 1 + cycles
        self._predicated = table
        self.state.predicated, self.state.predicated_base = ctypes.addressof(table), base


class PythonHook:
    """The same steps in Python; call it with the address and size of each block as it starts.

    Args:
        count: gives the cost of the block at (address, bytes).
        stop: stops the emulator.
    """

    def __init__(self, count: Callable[[int, int], BlockCost], stop: Callable[[], None]) -> None:
        self.state = HookState(deadline=NEVER, instruction_limit=NEVER)
        self.failure: SimulationError | None = None
        self._count = count
        self._stop = stop
        self._costs: dict[tuple[int, int], BlockCost] = {}
        self._predicated: Mapping[int, int] = {}

    def set_predicated(self, extra: Mapping[int, int]) -> None:
        """Take note of `Core.predicated`."""
        self._predicated = extra

    def on_code(self, emulator: Any, address: int, size: int, data: object) -> None:
        """Account for an executed instruction if it is a predicated one; the emulator calls it."""
        extra = self._predicated.get(address)
        if extra is not None and not self.state.stop_reason:
            self.state.instructions += 1
            self.state.cycles += extra

    def __call__(self, address: int, size: int) -> None:
        """Account for the block, or stop before it."""
        state = self.state
        if address != state.expected:
            state.cycles += state.taken_extra
        state.taken_extra, state.expected = 0, address
        reason = RUNNING
        if state.cycles >= state.deadline:
            reason = STOP_DEADLINE
        elif state.interrupt and state.after_system:
            reason = STOP_INTERRUPT
        elif state.instructions >= state.instruction_limit:
            reason = STOP_LIMIT
        state.after_system = 0
        if reason:
            state.stop_reason = reason
            self._stop()
            return
        cost = self._costs.get((address, size))
        if cost is None:
            cost = self._costs[address, size] = self._count(address, size)
        state.current, state.expected = address, cost.end
        state.cycles += cost.cycles
        state.instructions += cost.instructions
        state.taken_extra, state.after_system = cost.taken_extra, int(cost.system)
