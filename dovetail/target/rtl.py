"""An engine's Verilog as a device: which module it is, and which of its signals belong to which port."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dovetail.errors import TargetError
from dovetail.target.description import DeviceModel

VERILATED = "dovetail.simulate.rtl:VerilatedDevice"
"""Factory of such devices."""
SIGNALS = {
    "apb": ("psel", "penable", "pwrite", "paddr", "pwdata", "prdata", "pready", "pslverr"),
    "axi-lite": ("awvalid", "awready", "awaddr", "wvalid", "wready", "wdata", "wstrb", "bvalid", "bready", "bresp",
                 "arvalid", "arready", "araddr", "rvalid", "rready", "rdata", "rresp"),
    "tcdm": ("req", "gnt", "we", "addr", "wdata", "be", "rdata"),
}  # fmt: skip
"""Protocol -> its signals by their usual names (AMBA APB and AXI4-Lite; PULP's tightly coupled data memory)."""
OPTIONAL = frozenset({"pready", "pslverr", "wstrb", "bresp", "rresp", "we", "wdata", "be"})
"""Signals a module may lack: ready at once, no errors, all bytes written, never written."""


@dataclass(frozen=True)
class RtlPort:
    """A port of a module.

    "apb" and "axi-lite" are for 32-bit registers. "tcdm" is for memory: a request is held until it is granted, and what
    is read comes in the cycle after the grant. Its width in bytes is that of the data signals, a power of two; every
    address is a multiple of it.
    """

    protocol: str
    """One of `SIGNALS`."""
    prefix: str = ""
    """What the names of its signals begin with."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Usual name -> the module's own, behind the prefix, where they differ; empty where the module has none."""
    low: tuple[str, ...] = ()
    """Usual names of signals that mean the opposite: ("we",) where low is a write."""

    def signals(self) -> dict[str, str]:
        """Usual name -> the module's, empty for what it lacks; raises TargetError when that cannot be."""
        place = f"port of prefix '{self.prefix}'"
        if self.protocol not in SIGNALS:
            raise TargetError(f"there is no port protocol '{self.protocol}'", where=place,
                              hint=f"use one of {', '.join(SIGNALS)}")
        known = SIGNALS[self.protocol]
        for name in (*self.names, *self.low):
            if name not in known:
                raise TargetError(f"{self.protocol} has no signal '{name}'", where=place,
                                  hint=f"it has {', '.join(known)}")
        if set(self.low) - {"we"}:
            raise TargetError(f"only 'we' can be active low, not {', '.join(self.low)}", where=place,
                              hint="give low=('we',) at most")
        for name, own in self.names.items():
            if not own and name not in OPTIONAL:
                raise TargetError(f"{self.protocol} cannot do without '{name}'", where=place,
                                  hint="give the module such a signal, and its name here")
        chosen = {name: self.names.get(name, name) for name in known}
        return {name: self.prefix + text if text else "" for name, text in chosen.items()}


@dataclass(frozen=True)
class Rtl:
    """A Verilog module behind an engine's registers, built by Verilator."""

    top: str
    """The module."""
    sources: tuple[Path, ...]
    """Its Verilog or SystemVerilog; the folders they lie in are searched for included files."""
    registers: RtlPort
    """Where the driver's accesses go: "apb" or "axi-lite"."""
    memory: tuple[RtlPort, ...] = ()
    """What reads and writes memory: "tcdm"."""
    clock: str = "clk"
    """Name of the clock."""
    reset: str = "rst_n"
    """Name of the reset signal."""
    reset_level: int = 0
    """Level of the reset signal that resets."""
    interrupt: str = "irq"
    """High from the end of a job until the driver sees it; empty where there is none."""
    busy: str = "busy"
    """High while there is work: only then is the module clocked. Empty: always."""
    parameters: Mapping[str, int] = field(default_factory=dict)
    """Parameters of the module that differ from their defaults."""
    watchdog: int = 10_000_000
    """Cycles it may be busy without its interrupt line changing."""
    stall: int = 0
    """Of 256 cycles, in how many a memory port grants nothing, pseudo-randomly: the handshake is tried as well."""
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
        for port, allowed in ((self.registers, ("apb", "axi-lite")), *((port, ("tcdm",)) for port in self.memory)):
            port.signals()
            if port.protocol not in allowed:
                raise TargetError(f"a port is '{port.protocol}'; there it must be {' or '.join(allowed)}",
                                  where=self.top, hint=f"declare it as RtlPort({allowed[0]!r}, ...)")
        written: dict[str, Any] = asdict(self)
        written["sources"] = [str(source) for source in self.sources]
        return DeviceModel(VERILATED, base, size, {"name": name or self.top, "rtl": written})


def read_rtl(written: Mapping[str, Any]) -> Rtl:
    """What `Rtl.device` wrote into the device's arguments."""
    ports = [RtlPort(**{**port, "low": tuple(port["low"])}) for port in (written["registers"], *written["memory"])]
    sources = tuple(Path(source) for source in written["sources"])
    return Rtl(**{**written, "sources": sources, "registers": ports[0], "memory": tuple(ports[1:])})
