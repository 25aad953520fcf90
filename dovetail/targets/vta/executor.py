"""Runs instruction streams: results bit for bit, time (stream.py), and every check (checks.py).

Every access to SRAM and DRAM goes through the checks. The order of micro-operations matters for the ALU only: a GEMM
adds modulo 2^32 what does not depend on ACC.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from dovetail.errors import SimulationError
from dovetail.sim.device import Bus
from dovetail.targets.vta.checks import (
    ALL_CHECKS,
    BufferRange,
    DramRows,
    DramShadow,
    Indices,
    Pointers,
    rows_of,
    sram_shadows,
)
from dovetail.targets.vta.config import VtaConfig
from dovetail.targets.vta.isa import Alu, AluOpcode, Gemm, Instruction, Load, Store, VtaMemory, uop_indices
from dovetail.targets.vta.stream import (
    Execution,
    Fault,
    InstructionStart,
    StreamError,
    check_finished,
    disassemble,
    run_schedule,
)

Words = npt.NDArray[np.int32]
_CHUNK = 1 << 16
"""Micro-operations expanded at once."""
_PRODUCTS = 1 << 22
"""Weights gathered at once."""
_MOST_SHIFT = 31
"""The most places 32 bits can be shifted by."""
_EXACT_BLOCK = 1024
"""Largest block whose sums of int8 products (at most 2^14 each) are exact in float32."""


class _Datapath:
    """The memories of a VTA at work on one stream; see `execute`."""

    def __init__(
        self,
        instructions: Sequence[Instruction],
        memory: Bus,
        pointers: Pointers,
        config: VtaConfig,
        checks: Collection[Fault],
        buffers: Sequence[BufferRange] | None,
    ) -> None:
        self._memory, self._pointers, self._config = memory, pointers, config
        self._hazards, self._shifts = Fault.HAZARD in checks, Fault.SHIFT in checks
        self._dram = DramShadow(instructions, config, pointers, checks, buffers)
        self._shadows = sram_shadows(instructions, config, checks)
        real = np.float32 if config.block <= _EXACT_BLOCK else np.float64
        entry = (config.batch, config.block)
        self._uop = np.zeros(config.uop_entries, np.uint32)
        self._inp: npt.NDArray[Any] = np.zeros((config.inp_entries, *entry), real)
        self._wgt: npt.NDArray[Any] = np.zeros((config.wgt_entries, config.block, config.block), real)
        self._acc: Words = np.zeros((config.acc_entries, *entry), np.int32)
        self._out: npt.NDArray[np.int8] = np.zeros((config.acc_entries, *entry), np.int8)

    def apply(self, issue: InstructionStart) -> None:
        """Carry out an instruction.

        Raises:
            StreamError: BOUNDS, HAZARD, RACE, UNINITIALISED or REWRITTEN.
        """
        instruction = issue.instruction
        if isinstance(instruction, Load):
            self._load(issue, instruction)
        elif isinstance(instruction, Store):
            self._store(issue, instruction)
        elif isinstance(instruction, Gemm | Alu) and (instruction.steps or instruction.uop_begin > instruction.uop_end):
            uops = self._uops(issue, instruction)
            if isinstance(instruction, Gemm):
                self._gemm(issue, instruction, uops)
            else:
                self._alu(issue, instruction, uops)

    def check_end(self) -> None:
        """Raise UNINITIALISED when entries were read that nobody had written (and nobody was just about to), and
        UNWRITTEN when a buffer was not filled."""
        for shadow in self._shadows.values():
            shadow.check_reads()
        self._dram.check_complete()

    # -- transfers

    def _load(self, issue: InstructionStart, i: Load) -> None:
        rows = rows_of(i, self._config, self._pointers)
        memory, shadow = i.memory, self._shadows[i.memory]
        shadow.check_range(issue, i.sram, i.sram + i.entries - 1)
        self._dram.load(issue, rows)
        shadow.write(issue, np.arange(i.sram, i.sram + i.entries))
        target: npt.NDArray[Any] = {VtaMemory.UOP: self._uop, VtaMemory.WGT: self._wgt, VtaMemory.INP: self._inp}.get(
            memory, self._acc
        )
        dtype = {VtaMemory.UOP: "<u4", VtaMemory.ACC: "<i4"}.get(i.memory, "i1")
        raw = np.ascontiguousarray(self._rows(issue, rows)).view(dtype)
        values = raw.reshape(i.y_size, i.x_size, *target.shape[1:])
        if i.entries == i.y_size * i.x_size:
            padded = values
        else:
            padded = np.zeros((i.y_pad[0] + i.y_size + i.y_pad[1], i.width, *target.shape[1:]), dtype)
            padded[i.y_pad[0] : i.y_pad[0] + i.y_size, i.x_pad[0] : i.x_pad[0] + i.x_size] = values
        target[i.sram : i.sram + i.entries] = padded.reshape(i.entries, *target.shape[1:])

    def _store(self, issue: InstructionStart, i: Store) -> None:
        rows = rows_of(i, self._config, self._pointers)
        if not i.entries:
            return
        self._shadows[VtaMemory.OUT].check_range(issue, i.sram, i.sram + i.entries - 1)
        self._shadows[VtaMemory.OUT].read(issue, np.arange(i.sram, i.sram + i.entries))
        self._dram.store(issue, rows)
        values = self._out[i.sram : i.sram + i.entries].view(np.uint8)
        # row by row: rows may overlap when that is not checked, and the later one wins
        target = self._rows(issue, rows)
        for row, source in zip(target, values.reshape(i.y_size, rows.nbytes), strict=True):
            row[:] = source

    def _rows(self, issue: InstructionStart, rows: DramRows) -> npt.NDArray[np.uint8]:
        if rows.end == rows.address:
            return np.zeros((rows.count, rows.nbytes), np.uint8)
        try:
            span = self._memory.view(rows.address, rows.end - rows.address)
        except SimulationError as error:
            what = f"{issue} touches {rows.address:#x} to {rows.end - 1:#x}"
            raise StreamError(Fault.BOUNDS, f"{what}: {error.what}", hint=error.hint or "look at the address") from None
        return as_strided(span, (rows.count, rows.nbytes), (rows.step, 1))

    # -- micro-operations

    def _uops(self, issue: InstructionStart, i: Gemm | Alu) -> tuple[Indices, Indices, Indices]:
        """The indices dst, src and wgt of the micro-operations of an instruction."""
        if i.uop_begin > i.uop_end:
            what = f"{issue} has micro-operations {i.uop_begin} to {i.uop_end - 1}: the last comes before the first"
            raise StreamError(Fault.BOUNDS, what, hint="let uop_end be at least uop_begin")
        self._shadows[VtaMemory.UOP].check_range(issue, i.uop_begin, i.uop_end - 1)
        self._shadows[VtaMemory.UOP].read(issue, np.arange(i.uop_begin, i.uop_end))
        return uop_indices(self._uop[i.uop_begin : i.uop_end].astype(np.int64), self._config)

    def _entries(
        self, issue: InstructionStart, memory: VtaMemory, i: Gemm | Alu, uops: Indices, factors: tuple[int, int]
    ) -> Indices:
        """The distinct entries of `memory` an operand names, ascending."""
        span = int(uops.max()) + (i.iter_out - 1) * factors[0] + (i.iter_in - 1) * factors[1]
        self._shadows[memory].check_range(issue, int(uops.min()), span)
        seen = np.zeros(span + 1, bool)
        outer = np.unique(factors[0] * np.arange(i.iter_out if factors[0] else 1))
        inner = np.unique(factors[1] * np.arange(i.iter_in if factors[1] else 1))
        both = np.unique(outer[:, None] + inner)
        seen[(both[:, None] + np.unique(uops)).reshape(-1)] = True
        return np.flatnonzero(seen)

    def _gemm(self, issue: InstructionStart, i: Gemm, uops: tuple[Indices, Indices, Indices]) -> None:
        written = self._entries(issue, VtaMemory.ACC, i, uops[0], i.dst)
        if self._hazards:
            self._check_hazard(issue, i, uops[0])
        operands = ((VtaMemory.INP, uops[1], i.src), (VtaMemory.WGT, uops[2], i.wgt))
        read = {each[0]: self._entries(issue, each[0], i, *each[1:]) for each in operands}
        step = max(1, min(_CHUNK, _PRODUCTS // self._config.block**2))
        expanded = _expanded(i, (i.dst, i.src, i.wgt), uops, step)
        if i.reset:
            self._reset(issue, written, expanded)
            return
        for memory, entries in read.items():
            self._shadows[memory].read(issue, entries)
        self._shadows[VtaMemory.ACC].read(issue, written)
        for dst, src, wgt in expanded:
            self._multiply(dst, src, wgt)
        self._finish_writes(issue, written)

    def _multiply(self, dst: Indices, src: Indices, wgt: Indices) -> None:
        products = self._products(src, wgt)
        order = np.argsort(dst, kind="stable")
        targets = dst[order]
        first = np.flatnonzero(np.concatenate(([True], targets[1:] != targets[:-1])))
        sums = np.add.reduceat(products[order], first, axis=0, dtype=np.int32)
        self._acc[targets[first]] += sums

    def _products(self, src: Indices, wgt: Indices) -> Words:
        found: Words = np.matmul(self._inp[src], self._wgt[wgt].transpose(0, 2, 1)).astype(np.int32)
        return found

    def _reset(self, issue: InstructionStart, written: Indices, expanded: Iterator[tuple[Indices, ...]]) -> None:
        """Zeros in ACC; in OUT the low byte of what the sum would have been, which nothing may rely on."""
        for dst, src, wgt in expanded:
            # an entry's last product is what stays; one that was cleared before in this instruction begins at zero
            entries, place, times = np.unique(dst[::-1], return_index=True, return_counts=True)
            last = len(dst) - 1 - place
            self._acc[entries[times > 1]] = 0
            self._out[entries] = (self._acc[entries] + self._products(src[last], wgt[last])).astype(np.int8)
            self._acc[entries] = 0
        self._shadows[VtaMemory.ACC].write(issue, written)
        self._shadows[VtaMemory.OUT].write(issue, written)
        self._shadows[VtaMemory.OUT].forget(written)

    def _check_hazard(self, issue: InstructionStart, i: Gemm, dst: Indices) -> None:
        """Look at neighbours within an iteration, between inner iterations, and between outer ones."""
        within = np.flatnonzero(dst[1:] == dst[:-1])
        around = int(dst[0]) - int(dst[-1])
        if len(within):
            entry = int(dst[within[0]])
            pair = f"micro-operations {i.uop_begin + int(within[0])} and {i.uop_begin + int(within[0]) + 1}"
        elif i.iter_in > 1 and around + i.dst[1] == 0:
            entry, pair = int(dst[-1]), "the last micro-operation of an inner iteration and the first of the next"
        elif i.iter_out > 1 and around + i.dst[0] - (i.iter_in - 1) * i.dst[1] == 0:
            entry = int(dst[-1]) + (i.iter_in - 1) * i.dst[1]
            pair = "the last micro-operation of an outer iteration and the first of the next"
        else:
            return
        what = f"{issue}: {pair} both write ACC entry {entry}"
        raise StreamError(Fault.HAZARD, what, hint="let a loop over outputs be the innermost one")

    def _alu(self, issue: InstructionStart, i: Alu, uops: tuple[Indices, Indices, Indices]) -> None:
        written = self._entries(issue, VtaMemory.ACC, i, uops[0], i.dst)
        shadow = self._shadows[VtaMemory.ACC]
        shadow.read(issue, written)
        if not i.use_imm:
            read = self._entries(issue, VtaMemory.ACC, i, uops[1], i.src)
            shadow.read(issue, read)
            if self._shifts and i.opcode in (AluOpcode.SHR, AluOpcode.SHL):
                self._check_amounts(issue, read)
        elif self._shifts and i.opcode is AluOpcode.SHR:
            self._check_amounts(issue, np.zeros(0, np.int64), i.imm)
        for dst, src in _expanded(i, (i.dst, i.src), uops[:2], _CHUNK):
            for now in _waves(dst, None if i.use_imm else src):
                operand = np.int32(i.imm) if i.use_imm else self._acc[src[now]]
                self._acc[dst[now]] = alu(i.opcode, self._acc[dst[now]], operand, self._config)
        self._finish_writes(issue, written)

    def _check_amounts(self, issue: InstructionStart, entries: Indices, amount: int = 0) -> None:
        """Raise SHIFT for an amount the ALU does not look at as a whole: an immediate, or those of ACC entries."""
        low, high = self._config.least_shift, self._config.most_shift
        opcode = issue.instruction.opcode if isinstance(issue.instruction, Alu) else None
        if opcode is AluOpcode.SHL:
            low, high = -_MOST_SHIFT, 0
        amounts = np.append(self._acc[entries].reshape(-1), amount)
        wrong = amounts[(amounts < low) | (amounts > high)]
        if len(wrong):
            what = f"{issue} shifts by {int(wrong[0])}; the amounts are {low} to {high}"
            raise StreamError(Fault.SHIFT, what, hint="shift twice, each time within the amounts")

    def _finish_writes(self, issue: InstructionStart, written: Indices) -> None:
        self._shadows[VtaMemory.ACC].write(issue, written)
        self._shadows[VtaMemory.OUT].write(issue, written)
        self._out[written] = self._acc[written].astype(np.int8)


def alu(opcode: AluOpcode, left: Words, right: Words | np.int32, config: VtaConfig) -> Words:
    """One ALU operation on int32 arrays, modulo 2^32.

    SHR by a negative amount shifts left. An ALU of 32 amounts looks at five bits of the operand: as a signed number in
    the HLS source, as an unsigned one in the Chisel source, whose SHL takes five bits of the operand's negation.
    """
    if opcode is AluOpcode.MIN:
        return np.minimum(left, right)
    if opcode is AluOpcode.MAX:
        return np.maximum(left, right)
    wide, other = left.astype(np.int64), np.asarray(right, np.int64)
    if opcode is AluOpcode.ADD:
        return (wide + other).astype(np.int32)
    if opcode is AluOpcode.MUL:
        return (wide * other).astype(np.int32)
    if opcode is AluOpcode.SHL:
        return (wide << (-other & _MOST_SHIFT)).astype(np.int32)
    low, high = config.least_shift, config.most_shift
    wraps = high - low == _MOST_SHIFT
    amount = (other - low & _MOST_SHIFT) + low if wraps else np.clip(other, -_MOST_SHIFT, _MOST_SHIFT)
    return np.where(amount < 0, wide << np.maximum(-amount, 0), wide >> np.maximum(amount, 0)).astype(np.int32)


def _expanded(
    i: Gemm | Alu, factors: tuple[tuple[int, int], ...], uops: tuple[Indices, ...], limit: int
) -> Iterator[tuple[Indices, ...]]:
    """The indices of all micro-operations in order, about `limit` at once.

    Inner iterations are cut when one outer iteration is more than that.
    """
    each = len(uops[0])
    inner = max(1, min(i.iter_in, limit // each))
    outer = max(1, limit // (each * i.iter_in))
    for first in range(0, i.iter_out, outer):
        outers = np.arange(first, min(first + outer, i.iter_out), dtype=np.int64)[:, None, None]
        for start in range(0, i.iter_in, inner):
            inners = np.arange(start, min(start + inner, i.iter_in), dtype=np.int64)[:, None]
            yield tuple(
                (outers * factor[0] + inners * factor[1] + operand).reshape(-1)
                for factor, operand in zip(factors, uops, strict=True)
            )


def _waves(dst: Indices, src: Indices | None) -> Iterator[Indices | slice]:
    """Groups of steps that can be done at once, in an order that gives what one after the other gives."""
    count = len(dst)
    order = np.argsort(dst, kind="stable")
    ordered = dst[order]
    new = np.concatenate(([True], ordered[1:] != ordered[:-1]))
    if src is None or not np.isin(src, ordered[new]).any():
        # entries do not depend on each other: all first operations on an entry, all second ones, ...
        places = np.arange(count)
        rank = places - np.maximum.accumulate(np.where(new, places, 0))
        by_rank = np.argsort(rank, kind="stable")
        bounds = np.searchsorted(rank[by_rank], np.arange(int(rank.max()) + 2))
        for start, end in pairwise(bounds):
            yield order[by_rank[start:end]]
        return
    # otherwise runs of successive steps none of which needs what one before it in the run wrote
    keys = ordered * count + order
    needed = np.maximum.accumulate(np.maximum(_last_write(keys, dst, count), _last_write(keys, src, count)))
    start = 0
    while start < count:
        end = int(np.searchsorted(needed, start, side="left"))
        yield slice(start, end)
        start = end


def _last_write(keys: Indices, entries: Indices, count: int) -> Indices:
    """For each step the last step before it that writes its entry, -1 for none; `keys` = entry * count + step."""
    place = np.searchsorted(keys, entries * count + np.arange(count), side="left") - 1
    found: Indices = np.where((place >= 0) & (keys[place] // count == entries), keys[place] % count, -1)
    return found


def execute(
    stream: bytes,
    memory: Bus,
    pointers: Pointers,
    config: VtaConfig,
    checks: Collection[Fault] = ALL_CHECKS,
    buffers: Sequence[BufferRange] | None = None,
) -> Execution:
    """Run a stream on DRAM.

    Args:
        stream: instructions, 16 bytes each.
        memory: DRAM; the STOREs change it.
        pointers: byte addresses the elements of each memory are counted from.
        config: geometry and timing.
        checks: the faults looked for; DECODE, DEADLOCK and BOUNDS always are.
        buffers: the only bytes LOADs and STOREs may touch; None: whatever `memory` has.

    Raises:
        StreamError: the stream is wrong; `memory` may have been changed by the instructions before the fault.
    """
    instructions = disassemble(stream, config)
    if Fault.UNFINISHED in checks or not instructions:
        check_finished(instructions)
    datapath = _Datapath(instructions, memory, pointers, config, checks, buffers)
    execution = run_schedule(instructions, config, datapath.apply, Fault.LEFTOVER in checks)
    datapath.check_end()
    return execution


def estimate(stream: bytes, config: VtaConfig) -> Execution:
    """Time a stream without data.

    Raises:
        StreamError: DECODE, UNFINISHED, DEADLOCK or LEFTOVER; nothing else is looked at.
    """
    instructions = disassemble(stream, config)
    check_finished(instructions)
    return run_schedule(instructions, config)
