"""The simplest engine: a driver writes a job into registers and starts it, the engine says when it has finished.

Registers are 32 bits wide: 0x00 START, write anything: begin the job. 0x04 FINISHED, read: jobs finished since reset,
modulo 2^32; lowers the interrupt line. 0x08 ROOM, read: jobs that can still be handed over. From 0x10 on the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dovetail.errors import TargetError
from dovetail.target.description import Command, DeviceModel

JOB = 0x10
"""Byte offset of the job's first register."""


@dataclass(frozen=True)
class JobRegisters:
    """The registers of such an engine, by name: what a target says once for its commands and its device models."""

    names: tuple[str, ...]
    """Of the job's registers, in order."""

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
            raise TargetError(f"this call is given other registers than the job has: {', '.join(wrong)}",
                              where=function, hint=f"give exactly {', '.join(self.names)}")
        for name, value in values.items():
            if not -(1 << 31) <= value < 1 << 32:
                raise TargetError(f"{name} is set to {value}, which does not fit 32 bits", where=function,
                                  hint="limit it with a Constraint, or split it into two registers")
        return Command(function, tuple(values[name] & 0xFFFFFFFF for name in self.names))

    def job(self, written: Mapping[int, int]) -> dict[str, int]:
        """The job's values by name, unsigned, from what was written by byte offset (0 where nothing was)."""
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
        return DeviceModel("dovetail.simulate.job_device:JobDevice", base, JOB + 4 * len(self.names), arguments)
