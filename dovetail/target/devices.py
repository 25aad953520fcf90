"""Models behind an engine's registers: jobs for plain functions in Python, or the engine's Verilog.

The simplest engine is one of `JobRegisters`: a driver writes a job into registers and starts it, the engine says when
it has finished. Registers are 32 bits wide: 0x00 START, write anything: begin the job. 0x04 FINISHED, read: jobs
finished since reset, all of them, modulo 2^32, which is what drivers wait for; lowers the interrupt line. 0x08 ROOM,
read: jobs that can still be handed over. From 0x10 on the job. `Rtl` says which module an engine's Verilog is, and
which of its signals belong to which port.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from dovetail.errors import SimulationError, TargetError
from dovetail.records import Record, field
from dovetail.target.engine import DeviceModel
from dovetail.target.offload import Command

JOB = 0x10
"""Byte offset of the job's first register."""


class JobRegisters(Record):
    """The registers of such an engine, by name: what a target says once for its commands and its device models."""

    names: tuple[str, ...]
    """Names of the job's registers, in order."""

    def command(self, function: str, **values: int) -> Command:
        """A start with these values, which may be negative.

        Args:
            function: of the driver, called with the job's words.
            **values: of every register.

        Raises:
            TargetError: a register has no value, a value no register, or one does not fit 32 bits.
        """
        if set(values) != set(self.names):
            wrong = sorted(set(values) ^ set(self.names))
            what = f"this call is given other registers than the job has: {', '.join(wrong)}"
            raise TargetError(what, where=function, hint=f"give exactly {', '.join(self.names)}")
        for name, value in values.items():
            if not -(1 << 31) <= value < 1 << 32:
                hint = "limit it with a Constraint, or split it into two registers"
                raise TargetError(f"{name} is set to {value}, which does not fit 32 bits", where=function, hint=hint)
        return Command(function, tuple(values[name] & 0xFFFFFFFF for name in self.names))

    def job(self, written: Mapping[int, int]) -> dict[str, int]:
        """The job's values by name, unsigned, from register contents by byte offset (0 for registers not written)."""
        return {name: written.get(JOB + 4 * index, 0) for index, name in enumerate(self.names)}

    def device(self, name: str, model: str, base: int, places: int = 1) -> DeviceModel:
        """A device whose computation are plain functions.

        Args:
            name: the engine's.
            model: module, or path of a file, that holds `cycles(job)` and `macs(job)`, which give numbers, and
                `compute(job, bus)`, which reads and writes memory; a job is what `job` gives.
            base: address of the registers.
            places: jobs it holds, the running one included.
        """
        arguments = {"name": name, "model": model, "registers": list(self.names), "places": places}
        return DeviceModel("dovetail.sim.launch_queue:JobDevice", base, JOB + 4 * len(self.names), arguments)


class CommandSet(Record):
    """The commands of an engine that takes lists (`Engine.stream`), by name: what a target says once for its words and
    its device model. The first word of a command is its number, from 1 on; each field is one more.

    WAIT, of unit (0 the engine, 1 its DMA) and unfinished, holds what is behind it until at most so many commands of
    that unit have not ended; it needs no saying and comes last.
    """

    WAIT: ClassVar[str] = "WAIT"
    """Name of the command that waits."""
    names: Mapping[str, tuple[str, ...]]
    """Command -> its fields, in order."""

    @property
    def _all(self) -> dict[str, tuple[str, ...]]:
        return {**self.names, self.WAIT: ("unit", "unfinished")}

    def words(self, command: str, **values: int) -> tuple[int, ...]:
        """A command with these values, which may be negative.

        Args:
            command: its name.
            **values: of every field.

        Raises:
            TargetError: there is no such command, a field has no value, a value no field, or one does not fit 32 bits.
        """
        fields = self._all
        if command not in fields:
            hint = f"it has {', '.join(fields)}"
            raise TargetError("there is no such command", where=command, hint=hint)
        number = list(fields).index(command) + 1
        return (number, *JobRegisters(fields[command]).command(command, **values).words)

    def decode(self, words: Sequence[int], where: str) -> Iterator[tuple[str, Mapping[str, int]]]:
        """The commands of a list and their fields, unsigned.

        Args:
            words: the list, 32-bit words.
            where: place of the list in messages.

        Raises:
            SimulationError: a command is unknown, or the list ends within a command.
        """
        known, place = list(self._all.items()), 0
        while place < len(words):
            if not 0 < words[place] <= len(known):
                what = f"word {place} of the list is {words[place]:#x}, which is no command"
                raise SimulationError(what, where=where, hint="look at the words of the command before, and its length")
            name, fields = known[words[place] - 1]
            values = words[place + 1 : place + 1 + len(fields)]
            if len(values) < len(fields):
                raise SimulationError(f"the list ends within {name}", where=where, hint="look at the driver's count")
            yield name, dict(zip(fields, values, strict=True))
            place += 1 + len(fields)

    def device(
        self, name: str, model: str, base: int, dma: str = "", transfers: tuple[str, ...] = (), start: int = 0
    ) -> DeviceModel:
        """A device whose computation are plain functions (`dovetail/sim/command_list.py` has its registers).

        Args:
            name: the engine's.
            model: module, or path of a file, that holds `cycles(command, fields)` and `macs(command, fields)`, which
                give numbers, as does `moved(command, fields)` for the bytes of a transfer, and
                `compute(command, fields, bus)`, which reads and writes memory.
            base: address of the registers.
            dma: name of its DMA, if it has one.
            transfers: the commands that are the DMA's.
            start: cycles from the start of a list to its first command.
        """
        arguments: dict[str, Any] = {"name": name, "model": model, "dma": dma, "start": start}
        arguments |= {"commands": {command: list(own) for command, own in self.names.items()}}
        arguments |= {"transfers": list(transfers)}
        return DeviceModel("dovetail.sim.command_list:ListDevice", base, JOB + 8, arguments)


VERILATED = "dovetail.sim.rtl:VerilatedDevice"
"""Factory of such devices."""
SIGNALS = {
    "apb": ("psel", "penable", "pwrite", "paddr", "pwdata", "prdata", "pready", "pslverr"),
    "axi-lite": (
        *("awvalid", "awready", "awaddr", "wvalid", "wready", "wdata", "wstrb", "bvalid", "bready", "bresp"),
        *("arvalid", "arready", "araddr", "rvalid", "rready", "rdata", "rresp"),
    ),
    "tcdm": ("req", "gnt", "we", "addr", "wdata", "be", "rdata"),
}
"""Protocol -> its signals by their usual names (AMBA APB and AXI4-Lite; PULP's tightly coupled data memory)."""
OPTIONAL = frozenset({"pready", "pslverr", "wstrb", "bresp", "rresp", "we", "wdata", "be"})
"""Signals a module may lack: ready at once, no errors, all bytes written, never written."""


class RtlPort(Record):
    """A port of a module.

    "apb" and "axi-lite" are for 32-bit registers. "tcdm" is for memory: a request is held until it is granted, and what
    is read comes in the cycle after the grant. Its width in bytes is that of the data signals, a power of two; every
    address is a multiple of it.
    """

    protocol: str
    """Protocol of the port, one of `SIGNALS`."""
    prefix: str = ""
    """Prefix of the names of its signals."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The module's own signal names by usual names, after the prefix, if they differ; empty for signals it lacks."""
    low: tuple[str, ...] = ()
    """Usual names of signals that mean the opposite: ("we",) where low is a write."""

    def signals(self) -> dict[str, str]:
        """The module's signal names by usual names, empty for signals it lacks; raises TargetError for impossible
        names."""
        place = f"port of prefix '{self.prefix}'"
        if self.protocol not in SIGNALS:
            hint = f"use one of {', '.join(SIGNALS)}"
            raise TargetError(f"there is no port protocol '{self.protocol}'", where=place, hint=hint)
        known = SIGNALS[self.protocol]
        for name in (*self.names, *self.low):
            if name not in known:
                hint = f"it has {', '.join(known)}"
                raise TargetError(f"{self.protocol} has no signal '{name}'", where=place, hint=hint)
        if set(self.low) - {"we"}:
            hint = "give low=('we',) at most"
            raise TargetError(f"only 'we' can be active low, not {', '.join(self.low)}", where=place, hint=hint)
        for name, own in self.names.items():
            if not own and name not in OPTIONAL:
                hint = "give the module such a signal, and its name here"
                raise TargetError(f"{self.protocol} needs the signal '{name}'", where=place, hint=hint)
        chosen = {name: self.names.get(name, name) for name in known}
        return {name: self.prefix + text if text else "" for name, text in chosen.items()}


INITIAL = {"zero": 0, "random": 2}
"""Initial contents of registers, and Verilator's number for each (VerilatedContext::randReset)."""


class Rtl(Record):
    """A Verilog module behind an engine's registers, built by Verilator."""

    top: str
    """Name of the Verilog module."""
    sources: tuple[Path, ...]
    """Verilog or SystemVerilog files in the order they are read, packages first; included files and further modules
    are searched for in their folders."""
    registers: RtlPort
    """Bus of the driver's accesses: "apb" or "axi-lite"."""
    memory: tuple[RtlPort, ...] = ()
    """Ports that read and write memory: "tcdm"."""
    clock: str = "clk"
    """Name of the clock."""
    reset: str = "rst_n"
    """Name of the reset signal; empty for a module that starts from its initial values."""
    reset_level: int = 0
    """Level of the reset signal that resets; it has an edge to this level before the clock first rises."""
    interrupt: str = "irq"
    """Signal that is high from the end of a job until the driver sees it; empty without an interrupt."""
    busy: str = "busy"
    """High while there is work: only then is the module clocked. Empty: always."""
    parameters: Mapping[str, int] = field(default_factory=dict)
    """Parameters of the module that differ from their defaults."""
    watchdog: int = 10_000_000
    """Cycles it may be busy without its interrupt line changing."""
    stall: int = 0
    """Cycles of 256 in which a memory port grants nothing, pseudo-randomly: this tries the handshake."""
    include: tuple[Path, ...] = ()
    """Further folders that are searched for included files and modules, before those of the sources."""
    defines: Mapping[str, str | int] = field(default_factory=dict)
    """Macros of the preprocessor."""
    options: tuple[str, ...] = ()
    """Further arguments of Verilator, such as "--no-assert"."""
    initial: str = "random"
    """Contents of registers that nothing initialises, one of `INITIAL`: "random", the same in every run, or "zero",
    for designs that rely on it, as FPGAs do."""
    macs: str = ""
    """"module:function" that gives the multiply-accumulates of a job from the registers as last written (byte offset ->
    value); for the report, which without it cannot tell the layers' jobs apart."""

    def device(self, base: int, size: int, name: str = "") -> DeviceModel:
        """The module as a device.

        Args:
            base: address of its registers.
            size: bytes of address space.
            name: the engine's; by default the module's.

        Raises:
            TargetError: a port that cannot be.
        """
        if self.initial not in INITIAL:
            what = f"registers cannot begin with '{self.initial}'"
            raise TargetError(what, where=self.top, hint=f"let initial be one of {', '.join(INITIAL)}")
        for port, allowed in ((self.registers, ("apb", "axi-lite")), *((port, ("tcdm",)) for port in self.memory)):
            port.signals()
            if port.protocol not in allowed:
                what = f"a port is '{port.protocol}'; there it must be {' or '.join(allowed)}"
                raise TargetError(what, where=self.top, hint=f"declare it as RtlPort({allowed[0]!r}, ...)")
        written: dict[str, Any] = asdict(self)
        written |= {name: [str(path) for path in getattr(self, name)] for name in ("sources", "include")}
        return DeviceModel(VERILATED, base, size, {"name": name or self.top, "rtl": written})


def read_rtl(written: Mapping[str, Any]) -> Rtl:
    """The `Rtl` that `Rtl.device` wrote into the device's arguments."""
    ports = [RtlPort(**{**port, "low": tuple(port["low"])}) for port in (written["registers"], *written["memory"])]
    paths = {name: tuple(Path(path) for path in written[name]) for name in ("sources", "include")}
    others = {"registers": ports[0], "memory": tuple(ports[1:]), "options": tuple(written["options"])}
    return Rtl(**{**written, **paths, **others})
