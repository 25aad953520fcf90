"""The core itself as RTL: published cores of Python packages, clocked beside the simulated chip's devices.

Sources come from the installed package; ours is a module of the same ports around each core (`cores/`), and the C++
that clocks it and holds its bus (core_host.cpp). Memories answer in one cycle, and so do devices.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.codegen.build.elf import describe_address
from dovetail.errors import DovetailError, MissingExtraError, SimulationError
from dovetail.records import Record, field
from dovetail.sim.core import RUNNING, CoreSetup
from dovetail.sim.device import AddressWindow
from dovetail.sim.processor import Answer, DeviceAccess
from dovetail.sim.riscv_costs import BlockCounter
from dovetail.sim.rtl import load_calls, memories_of
from dovetail.sim.verilator import Design, build_design
from dovetail.target.chip import FunctionUnit

_OURS = Path(__file__).parent
_PAGE = 4096
_END_OF_BLOCK = ("jump", "jump_register", "branch_not_taken", "system", "csr")


class CoreRtl(Record):
    """A core of a Python package."""

    name: str
    package: str
    """The package's module; on PyPI with hyphens."""
    sources: tuple[str, ...]
    """Source files in the package, packages first; included files are found beside them and in `include`."""
    include: tuple[str, ...] = ()
    parameters: Mapping[str, int] = field(default_factory=dict)
    """Parameters of our module around the core."""
    around: str = ""
    """That module's file in `cores`, without its ending; empty for the core's name."""
    isa: str = ""
    """Instruction set the firmware is compiled for; empty for the target's."""
    has_unit: bool = False
    """Whether it has a bus for a `FunctionUnit`."""
    has_caches: bool = False
    """Whether it has caches of its own, as the target's memories have."""
    counts_late: bool = False
    """Whether a load or store is counted after it has asked for its data."""

    def design(self, unit: FunctionUnit | None = None) -> Design:
        """The sources with our module, and a function unit where the core has a bus for it; raises MissingExtraError
        where the package is not installed."""
        unit = unit if self.has_unit else None
        found = importlib.util.find_spec(self.package)
        if found is None or found.origin is None:
            raise MissingExtraError(self.package.replace("_", "-"), "rtl-cores", f"simulating {self.name} as RTL")
        data = Path(found.origin).parent
        own = _OURS / "cores" / f"{self.around or self.name}.sv"
        return Design(
            top="dovetail_core",
            sources=(*(data / source for source in self.sources), *(unit.sources if unit else ()), own),
            host=_OURS / "core_host.cpp",
            include=tuple(data / folder for folder in self.include),
            defines={"SYNTHESIS": 1, **({"DOVETAIL_UNIT": unit.top} if unit else {})},
            parameters=self.parameters,
            options=("--no-assert",),
        )


_CV32E40P = CoreRtl(
    "cv32e40p",
    "pythondata_cpu_cv32e40p",
    tuple(
        f"system_verilog/{path}.sv"
        for path in (
            *(f"rtl/include/cv32e40p_{part}_pkg" for part in ("apu_core", "fpu")),
            "rtl/include/cv32e40p_pkg",
            "rtl/cv32e40p_register_file_ff",
            "bhv/cv32e40p_sim_clock_gate",
        )
    ),
    include=("system_verilog/rtl",),
)
_PRIM = "system_verilog/vendor/lowrisc_ip/ip/prim/rtl"
CORES = {
    core.name: core
    for core in (
        _CV32E40P,
        CoreRtl(
            "cv32e40p-pulp",
            _CV32E40P.package,
            _CV32E40P.sources,
            _CV32E40P.include,
            parameters={"PULP": 1},
            around=_CV32E40P.name,
        ),
        CoreRtl(
            "ibex",
            "pythondata_cpu_ibex",
            (
                "system_verilog/rtl/ibex_pkg.sv",
                f"{_PRIM}/prim_secded_pkg.sv",
                f"{_PRIM}/prim_cipher_pkg.sv",
                "system_verilog/rtl/ibex_register_file_ff.sv",
            ),
            include=("system_verilog/rtl", _PRIM, "system_verilog/vendor/lowrisc_ip/dv/sv/dv_utils"),
            counts_late=True,
        ),
        CoreRtl("picorv32", "pythondata_cpu_picorv32", ("verilog/picorv32.v",)),
        CoreRtl("vexriscv", "pythondata_cpu_vexriscv", ("verilog/VexRiscv_Lite.v",), isa="rv32im", counts_late=True),
        CoreRtl(
            "vexriscv_cfu",
            "pythondata_cpu_vexriscv",
            ("verilog/VexRiscv_FullCfu.v",),
            isa="rv32im",
            has_unit=True,
            has_caches=True,
            counts_late=True,
        ),
    )
}
"""Cores that are there as RTL, by name."""


def core_rtl(name: str) -> CoreRtl:
    """A core by its name; raises DovetailError where there is none."""
    if name not in CORES:
        hint = f"use one of {', '.join(CORES)}"
        raise DovetailError(f"there is no core '{name}' as RTL", where="--core", hint=hint)
    return CORES[name]


def build_core(name: str, cache: Path | None = None, unit: FunctionUnit | None = None) -> Path:
    """The shared library of a core, from a cache (None: the user's) where it is there; with a function unit if it has a
    bus for one.

    Raises:
        DovetailError: there is no such core, or it does not build.
        MissingExtraError: its package or Verilator is not installed.
    """
    core = core_rtl(name)
    if unit and unit.core == name and not core.has_unit:
        hint = f"use {' or '.join(each.name for each in CORES.values() if each.has_unit)}"
        raise DovetailError(f"the core '{name}' has no bus for a function unit", where="FunctionUnit.core", hint=hint)
    return build_design(core.design(unit), cache)


class _CoreRtlState(ctypes.Structure):
    """Mirrors `struct State` of core_host.cpp."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("cycles", "instructions", "deadline", "instruction_limit")),
        *((name, ctypes.c_uint32) for name in ("interrupt", "stop_reason", "pc", "access_pc", "trap", "trapped")),
    )
    cycles: int
    instructions: int
    deadline: int
    instruction_limit: int
    interrupt: int
    stop_reason: int
    pc: int
    access_pc: int
    trap: int
    taken_extra: int = 0


_ANSWER = ctypes.CFUNCTYPE(*[ctypes.c_uint32] * 5)
_TRAPPED = 4


class _Wires:
    """The part of `sim.core.EmulatedCore` that the machine needs of a core that takes interrupts by itself."""

    wake = 0
    """It takes that time by itself."""

    def __init__(self, state: _CoreRtlState) -> None:
        self._state = state

    def pc(self) -> int:
        """Address of an instruction that is being executed."""
        return self._state.pc

    def line_enabled(self) -> bool:
        """The line is wired to the core."""
        return True

    def enter_interrupt(self) -> int | None:
        """The core does that."""
        return None


class RtlProcessor:
    """A core in Verilog in the place of a `Processor`, whose methods it has.

    Args:
        setup: the memories, the firmware's symbols and the instruction set.
        windows: the devices. access: carries out accesses to them.
        core: its name. library: what `build_core` made.
    """

    def __init__(
        self, setup: CoreSetup, windows: Sequence[AddressWindow], access: Answer, core: str, library: Path
    ) -> None:
        self._symbols, self._counter = setup.symbols, BlockCounter(setup.costs, setup.bus)
        self._late = CORES[core].counts_late
        self._calls = _load(library)
        self._memories = memories_of(setup.bus)
        self._answer = _ANSWER(self._access)
        self._model = self._calls.dovetail_core_new(self._memories, len(self._memories), self._answer)
        self.state: _CoreRtlState = self._calls.dovetail_core_state(self._model).contents
        trap = self._symbols.get("dovetail_trap")
        self.state.trap = trap.address if trap else 0xFFFFFFFF
        self.core = _Wires(self.state)
        self.asleep_at: int | None = None
        self._registers = DeviceAccess(
            windows,
            access,
            now=lambda: self.state.cycles,
            place=lambda: self.place(self.state.access_pc),
            stop=self._stop,
        )

    def __del__(self) -> None:
        """Switch the model off."""
        if getattr(self, "_model", None):
            self._calls.dovetail_core_delete(self._model)

    def start(self, entry: int) -> None:
        """Stand at the firmware's entry point, its memories loaded."""
        self._calls.dovetail_core_reset(self._model, entry)

    def execute(self) -> None:
        """Clock the core until a deadline, or until it sleeps."""
        self.asleep_at = None
        self._calls.dovetail_core_run(self._model)
        if self._registers.failure:
            raise self._registers.failure
        if self.state.stop_reason == _TRAPPED:
            hint = "look at the code: an instruction this core does not have, an unaligned access, or a jump to data"
            raise SimulationError("the core has trapped", where=self.place(self.state.trap), hint=hint)
        if self.state.stop_reason == RUNNING:
            self.asleep_at = self.state.pc

    def _stop(self) -> None:
        self.state.deadline = 0

    def _access(self, write: int, address: int, enables: int, value: int) -> int:
        size = enables.bit_count()
        return self._registers.access("write" if write else "read", address, size if write else 4, value)

    def place(self, address: int) -> str:
        """An address and what lies there, for messages."""
        return f"{address:#x} ({describe_address(address, self._symbols)})"

    def recent(self) -> str:
        """The last accesses to registers, for messages."""
        return self._registers.recent()

    def traffic(self) -> dict[str, int]:
        """Nothing is counted."""
        return {}

    def clock(self) -> tuple[int, int]:
        """Cycles and instructions so far, up to the end of the block whose instruction accesses a device: where the
        other simulator counts to. The rest of the block is taken at the cycles of the core's costs."""
        cycles, instructions, position = self.state.cycles, self.state.instructions, self.state.access_pc
        while True:
            one = self._counter.at(position)
            if self._late or position != self.state.access_pc:
                instructions += 1
                cycles += self._counter.block(position, one.size).cycles
            position += one.size
            if one.ends or one.kind in _END_OF_BLOCK or position % _PAGE == 0:
                return cycles, instructions


def _load(path: Path) -> ctypes.CDLL:
    pointer, number = ctypes.c_void_p, ctypes.c_uint32
    types: dict[str, tuple[list[Any], Any]] = {
        "new": ([pointer, number, _ANSWER], pointer),
        "delete": ([pointer], None),
        "state": ([pointer], ctypes.POINTER(_CoreRtlState)),
        "reset": ([pointer, number], None),
        "run": ([pointer], None),
    }
    return load_calls(path, "dovetail_core_", types)
