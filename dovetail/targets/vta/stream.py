"""Streams of instructions: bytes, readable text, and what can be wrong with them."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from enum import Enum

from dovetail.errors import DovetailError, TargetError
from dovetail.targets.vta.config import VtaConfig
from dovetail.targets.vta.isa import (
    INSTRUCTION_BYTES,
    Alu,
    Finish,
    Flags,
    Gemm,
    Instruction,
    Load,
    Store,
    Uop,
    decode_halves,
    encode,
    encode_uop,
    queue_of,
)


class Fault(Enum):
    """Kinds of wrong streams."""

    DECODE = "decode"
    """The bytes are not instructions."""
    DEADLOCK = "deadlock"
    """No queue can move."""
    RACE = "race"
    """Two queues touch the same data, and no chain of tokens says which comes first."""
    BOUNDS = "bounds"
    """An access outside a memory or buffer."""
    UNINITIALISED = "uninitialised"
    """A read of what this stream never wrote."""
    HAZARD = "hazard"
    """Successive micro-operations of a GEMM write the same accumulator."""
    LEFTOVER = "leftover"
    """Tokens nobody took."""
    UNFINISHED = "unfinished"
    """FINISH is missing or not the last."""
    REWRITTEN = "rewritten"
    """A byte of DRAM is stored twice."""
    UNWRITTEN = "unwritten"
    """A byte of a buffer to be filled is never stored."""
    WRONG_OUTPUT = "wrong output"
    """A stored byte is not the expected one."""


class StreamError(DovetailError):
    """A stream that is wrong.

    Attributes:
        kind: the kind of fault.
    """

    def __init__(self, kind: Fault, what: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(f"{kind.name}: {what}", where=where or "instruction stream", hint=hint)
        self.kind = kind


def assemble(instructions: Iterable[Instruction], config: VtaConfig) -> bytes:
    """The stream of `instructions`, 16 bytes each; TargetError as `encode`."""
    return b"".join(struct.pack("<4I", *encode(instruction, config)) for instruction in instructions)


def assemble_uops(uops: Iterable[Uop], config: VtaConfig) -> bytes:
    """The bytes of micro-operations, 4 each; TargetError as `encode_uop`."""
    return b"".join(struct.pack("<I", encode_uop(uop, config)) for uop in uops)


def disassemble(stream: bytes, config: VtaConfig) -> tuple[Instruction, ...]:
    """The instructions of a stream.

    Raises:
        StreamError: DECODE.
    """
    if len(stream) % INSTRUCTION_BYTES:
        raise StreamError(Fault.DECODE, f"a stream must be a multiple of {INSTRUCTION_BYTES} bytes, is {len(stream)}",
                          hint="look at where the stream begins and at its length")
    found = []
    for number, (low, high) in enumerate(struct.iter_unpack("<QQ", stream)):
        try:
            found.append(decode_halves(low, high, config))
        except TargetError as error:
            what = f"instruction {number} ({high:016x}{low:016x}): {error.where}: {error.what}"
            raise StreamError(Fault.DECODE, what,
                              hint="look at where the stream begins and at its length") from None
    return tuple(found)


def check_finished(instructions: Sequence[Instruction]) -> None:
    """Check that there is one FINISH, at the end.

    Raises:
        StreamError: UNFINISHED.
    """
    first = next((n for n, instruction in enumerate(instructions) if isinstance(instruction, Finish)), None)
    if first is None:
        if not instructions:
            raise StreamError(Fault.UNFINISHED, "the stream is empty, without even a FINISH",
                              hint="end the stream with a FINISH")
        last = name(instructions, len(instructions) - 1)
        raise StreamError(Fault.UNFINISHED, f"the stream has no FINISH; the last of {len(instructions)} is {last}",
                          hint="end the stream with a FINISH")
    if first != len(instructions) - 1:
        follower = name(instructions, first + 1)
        raise StreamError(Fault.UNFINISHED, f"{follower} comes after {name(instructions, first)}",
                          hint="let FINISH be the last instruction")


def name(instructions: Sequence[Instruction], number: int) -> str:
    """An instruction in messages: its number and printed form."""
    return f"instruction {number} ({explain(instructions[number])})"


def explain(instruction: Instruction) -> str:
    """An instruction in one line."""
    if isinstance(instruction, Finish):
        text = "FINISH"
    elif isinstance(instruction, Load):
        i = instruction
        pads = f" pad y {i.y_pad[0]},{i.y_pad[1]} x {i.x_pad[0]},{i.x_pad[1]}" if any((*i.y_pad, *i.x_pad)) else ""
        text = f"LOAD {i.memory.name}[{i.sram}] <- dram {i.dram}, {i.y_size} x {i.x_size} stride {i.x_stride}{pads}"
    elif isinstance(instruction, Store):
        i2 = instruction
        text = f"STORE {i2.memory.name}[{i2.sram}] -> dram {i2.dram}, {i2.y_size} x {i2.x_size} stride {i2.x_stride}"
    elif isinstance(instruction, Gemm):
        text = f"GEMM{' reset' if instruction.reset else ''} {_loops(instruction)} wgt +{_pair(instruction.wgt)}"
    else:
        operand = f"imm {instruction.imm}" if instruction.use_imm else "acc"
        text = f"ALU {instruction.opcode.name} {operand} {_loops(instruction)}"
    return text + _tokens(instruction.flags)


def _loops(i: Gemm | Alu) -> str:
    loops = f"uops {i.uop_begin}..{i.uop_end} x {i.iter_out} x {i.iter_in}"
    return f"{loops} dst +{_pair(i.dst)} src +{_pair(i.src)}"


def _pair(factors: tuple[int, int]) -> str:
    return f"{factors[0]},{factors[1]}"


def _tokens(flags: Flags) -> str:
    words = [text for given, text in ((flags.pop_prev, "pop prev"), (flags.pop_next, "pop next"),
                                      (flags.push_prev, "push prev"), (flags.push_next, "push next")) if given]
    return f" [{', '.join(words)}]" if words else ""


def listing(stream: bytes, config: VtaConfig) -> str:
    """The stream as text, a line per instruction with its number and queue; StreamError DECODE as `disassemble`."""
    lines = (f"{number:5d} {queue_of(instruction):7s} {explain(instruction)}\n"
             for number, instruction in enumerate(disassemble(stream, config)))  # fmt: skip
    return "".join(lines)
