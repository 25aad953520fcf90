"""The VTA's instructions and micro-operations, and their 128 and 32 bits.

Facts: apache/tvm-vta include/vta/hw_spec.h. Fields follow each other from the least significant bit; no field crosses
the middle of the 128 bits, and bits no field covers are zero. Widths are those of a configuration (config.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from dovetail.errors import TargetError
from dovetail.records import Record
from dovetail.targets.vta.config import (
    HEAD,
    SRAM_BITS,
    UOP_ELEMENT,
    Fields,
    VtaConfig,
    alu_fields,
    gemm_fields,
    placed,
)

INSTRUCTION_BYTES = 16
Words = TypeVar("Words", int, npt.NDArray[np.int64])


class Opcode(IntEnum):
    """Kind of an instruction."""

    LOAD = 0
    STORE = 1
    GEMM = 2
    FINISH = 3
    ALU = 4


class VtaMemory(IntEnum):
    """Memory that a LOAD fills or a STORE reads."""

    UOP = 0
    WGT = 1
    INP = 2
    ACC = 3
    OUT = 4


class AluOpcode(IntEnum):
    """Function of an ALU instruction; SHR is arithmetic, and shifts left by a negative amount.

    MUL and SHL are both operation 4: which of them a VTA has, if any, its configuration says. SHL shifts left by the
    negated operand.
    """

    MIN = 0
    MAX = 1
    ADD = 2
    SHR = 3
    MUL = 4
    SHL = 5


_FOURTH = 4
"""The ALU operation that is MUL, SHL or nothing."""


class Flags(Record):
    """Tokens an instruction takes before it starts (pop) and gives when it ends (push), by neighbouring queue."""

    pop_prev: bool = False
    pop_next: bool = False
    push_prev: bool = False
    push_next: bool = False


NO_FLAGS = Flags()
# decoding looks members up by value, which is much faster in a tuple
_OPCODES, _MEMORIES, _ALU_OPCODES = tuple(Opcode), tuple(VtaMemory), tuple(AluOpcode)
_FLAGS = (NO_FLAGS, *(Flags(*(bool(bits >> place & 1) for place in range(4))) for bits in range(1, 16)))


class Load(Record):
    """Fill SRAM from DRAM; entries, addresses, sizes and strides count elements of `memory`.

    The SRAM entries from `sram` on hold y_pad[0] + y_size + y_pad[1] rows of x_pad[0] + x_size + x_pad[1] elements;
    what is not read from DRAM is zero.
    """

    memory: VtaMemory
    sram: int
    dram: int
    y_size: int
    x_size: int
    x_stride: int
    y_pad: tuple[int, int] = (0, 0)
    x_pad: tuple[int, int] = (0, 0)
    flags: Flags = NO_FLAGS

    @property
    def width(self) -> int:
        """Elements of an SRAM row."""
        return self.x_pad[0] + self.x_size + self.x_pad[1]

    @property
    def entries(self) -> int:
        """Elements written to SRAM, padding included."""
        return (self.y_pad[0] + self.y_size + self.y_pad[1]) * self.width


@dataclass(frozen=True, slots=True)
class Store:
    """Write y_size rows of x_size OUT elements, consecutive in SRAM, to DRAM rows x_stride elements apart."""

    memory: VtaMemory
    sram: int
    dram: int
    y_size: int
    x_size: int
    x_stride: int
    flags: Flags = NO_FLAGS

    @property
    def entries(self) -> int:
        """Elements read from SRAM."""
        return self.y_size * self.x_size


class Gemm(Record):
    """acc[dst] += inp[src] . wgt[wgt]^T, or acc[dst] = 0 with `reset`.

    For every outer and inner iteration and every micro-operation in uop_begin..uop_end-1, in this order; an index is
    that of the micro-operation plus outer iteration x factor[0] plus inner iteration x factor[1].
    """

    reset: bool
    uop_begin: int
    uop_end: int
    iter_out: int
    iter_in: int
    dst: tuple[int, int] = (0, 0)
    src: tuple[int, int] = (0, 0)
    wgt: tuple[int, int] = (0, 0)
    flags: Flags = NO_FLAGS

    @property
    def steps(self) -> int:
        """Micro-operations carried out."""
        return self.iter_out * self.iter_in * max(0, self.uop_end - self.uop_begin)


class Alu(Record):
    """acc[dst] = operation(acc[dst], imm or acc[src]), iterated as in `Gemm`.

    The public instruction has a reset bit; it has no meaning for the ALU, and `encode` and `decode` refuse it.
    """

    opcode: AluOpcode
    use_imm: bool
    imm: int
    uop_begin: int
    uop_end: int
    iter_out: int
    iter_in: int
    dst: tuple[int, int] = (0, 0)
    src: tuple[int, int] = (0, 0)
    flags: Flags = NO_FLAGS
    reset: bool = False

    @property
    def steps(self) -> int:
        """Micro-operations carried out."""
        return self.iter_out * self.iter_in * max(0, self.uop_end - self.uop_begin)


class Finish(Record):
    """The end of the stream."""

    flags: Flags = NO_FLAGS


Instruction = Load | Store | Gemm | Alu | Finish


class Uop(Record):
    """A micro-operation: indices of entries in ACC, INP (ALU: ACC) and WGT."""

    dst: int
    src: int = 0
    wgt: int = 0


def queue_of(instruction: Instruction) -> str:
    """The queue that carries an instruction out: "load", "compute" or "store"."""
    if isinstance(instruction, Store):
        return "store"
    if isinstance(instruction, Load) and instruction.memory in (VtaMemory.INP, VtaMemory.WGT):
        return "load"
    return "compute"


def element_bytes(memory: VtaMemory, config: VtaConfig) -> int:
    """DRAM bytes of one element of `memory`."""
    c = config
    return (UOP_ELEMENT, c.wgt_element, c.inp_element, c.acc_element, c.out_element)[memory]


_TRANSFER: Fields = (
    *HEAD,
    *(("memory_type", 3), ("sram_base", SRAM_BITS), ("dram_base", 32), ("y_size", 16), ("x_size", 16)),
    *(("x_stride", 16), ("y_pad_0", 4), ("y_pad_1", 4), ("x_pad_0", 4), ("x_pad_1", 4)),
)


@lru_cache(maxsize=64)
def _layout(opcode: Opcode, config: VtaConfig) -> tuple[tuple[str, int, int], ...]:
    """(name, first bit, bits) of the fields; "imm" is the only signed one."""
    if opcode is Opcode.GEMM:
        return placed(gemm_fields(config))
    if opcode is Opcode.ALU:
        return placed(alu_fields(config))
    return placed(HEAD if opcode is Opcode.FINISH else _TRANSFER)


def encode(instruction: Instruction, config: VtaConfig) -> tuple[int, int, int, int]:
    """The four little-endian 32-bit words of an instruction.

    Raises:
        TargetError: a field does not fit (field, limit, value), or the engine has no such instruction.
    """
    opcode, values = _values(instruction)
    problem = _problem(instruction) or _missing(instruction, config)
    if problem:
        raise TargetError(problem, where=opcode.name, hint="let the instruction be one the engine has")
    whole = 0
    for (name, first, bits), value in zip(_layout(opcode, config), values, strict=True):
        whole |= _fitted(name, bits, value, opcode.name) << first
    return whole & 0xFFFFFFFF, whole >> 32 & 0xFFFFFFFF, whole >> 64 & 0xFFFFFFFF, whole >> 96


def _missing(instruction: Instruction, config: VtaConfig) -> str:
    """The part of an ALU instruction that this configuration lacks, in words; empty for none."""
    if not isinstance(instruction, Alu):
        return ""
    opcode, imm = instruction.opcode, instruction.imm
    if opcode is AluOpcode.MUL and not config.multiplies:
        return "this ALU has no MUL"
    if opcode is AluOpcode.SHL and not config.shifts_left:
        return "this ALU has no SHL"
    if opcode is AluOpcode.SHR and instruction.use_imm and not config.least_shift <= imm <= config.most_shift:
        return f"SHR must be by {config.least_shift} to {config.most_shift}, is by {imm}"
    return ""


def _problem(instruction: Instruction) -> str:
    """Why an instruction whose fields fit has no meaning; empty when it has one."""
    if isinstance(instruction, Load) and instruction.memory is VtaMemory.OUT:
        return "OUT cannot be loaded"
    if isinstance(instruction, Store) and instruction.memory is not VtaMemory.OUT:
        return f"only OUT can be stored, not {instruction.memory.name}"
    if isinstance(instruction, Load) and not (instruction.x_size and instruction.y_size):
        return "a LOAD of no element pads differently on different hardware"
    if isinstance(instruction, Load) and instruction.memory in (VtaMemory.UOP, VtaMemory.WGT):
        if instruction.entries != instruction.x_size * instruction.y_size:
            return f"{instruction.memory.name} cannot be padded"
        if instruction.memory is VtaMemory.UOP and instruction.y_size != 1:
            return f"UOP is loaded in one row, not {instruction.y_size}"
    if isinstance(instruction, Alu) and instruction.reset:
        return "the reset bit has no meaning for the ALU"
    flags, queue = instruction.flags, queue_of(instruction)
    if queue == "load" and (flags.pop_prev or flags.push_prev):
        return "the load queue has no previous queue to exchange tokens with"
    if queue == "store" and (flags.pop_next or flags.push_next):
        return "the store queue has no next queue to exchange tokens with"
    return ""


def _values(instruction: Instruction) -> tuple[Opcode, tuple[int, ...]]:
    """The opcode, and the values of the fields in the order of `_layout`."""
    flags = instruction.flags
    head = (flags.pop_prev, flags.pop_next, flags.push_prev, flags.push_next)
    if isinstance(instruction, Finish):
        return Opcode.FINISH, (Opcode.FINISH, *head)
    if isinstance(instruction, Load | Store):
        i = instruction
        opcode, pads = (Opcode.LOAD, (*i.y_pad, *i.x_pad)) if isinstance(i, Load) else (Opcode.STORE, (0, 0, 0, 0))
        return opcode, (opcode, *head, i.memory, i.sram, i.dram, i.y_size, i.x_size, i.x_stride, *pads)
    g = instruction
    opcode = Opcode.GEMM if isinstance(g, Gemm) else Opcode.ALU
    first = (opcode, *head, int(g.reset), g.uop_begin, g.uop_end, g.iter_out, g.iter_in, *g.dst, *g.src)
    rest = g.wgt if isinstance(g, Gemm) else (min(g.opcode, _FOURTH), int(g.use_imm), g.imm)
    return opcode, (*first, *rest)


def _fitted(name: str, bits: int, value: int, where: str) -> int:
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if name == "imm" else (0, (1 << bits) - 1)
    if not low <= value <= high:
        hint = f"choose smaller tiles: {name} has {bits} bits"
        raise TargetError(f"field {name} must be {low} to {high}, is {value}", where=where, hint=hint)
    return value & (1 << bits) - 1


def decode(words: Sequence[int], config: VtaConfig) -> Instruction:
    """The instruction of four 32-bit words.

    Raises:
        TargetError: opcode, memory type or ALU operation is unknown, a bit outside all fields is set, or the
            instruction has no meaning.
    """
    return decode_halves(words[0] | words[1] << 32, words[2] | words[3] << 32, config)


def _undecodable(what: str, where: str) -> TargetError:
    return TargetError(what, where=where, hint="look at where the stream begins and at its length")


def decode_halves(low: int, high: int, config: VtaConfig) -> Instruction:
    """As `decode`, of the lower and upper 64 bits."""
    if low & 7 > Opcode.ALU:
        raise _undecodable(f"opcode {low & 7} is unknown; there are 0 to {int(Opcode.ALU)}", "instruction")
    opcode = _OPCODES[low & 7]
    whole, covered, values = low | high << 64, 0, []
    for _, first, bits in _layout(opcode, config):
        mask = (1 << bits) - 1
        values.append(whole >> first & mask)
        covered |= mask << first
    if whole & ~covered:
        raise _undecodable("a bit outside all fields is set", opcode.name)
    instruction = _made(opcode, values, config)
    problem = _problem(instruction)
    if problem:
        raise _undecodable(problem, opcode.name)
    return instruction


def _made(opcode: Opcode, values: list[int], config: VtaConfig) -> Instruction:
    flags = _FLAGS[values[1] | values[2] << 1 | values[3] << 2 | values[4] << 3]
    v = values[5:]
    if opcode is Opcode.FINISH:
        return Finish(flags)
    if opcode is Opcode.GEMM:
        return Gemm(bool(v[0]), v[1], v[2], v[3], v[4], (v[5], v[6]), (v[7], v[8]), (v[9], v[10]), flags)
    if opcode is Opcode.ALU:
        imm = v[11] - 0x10000 if v[11] & 0x8000 else v[11]
        made = _alu_opcode(v[9], config)
        return Alu(made, bool(v[10]), imm, v[1], v[2], v[3], v[4], (v[5], v[6]), (v[7], v[8]), flags, bool(v[0]))
    if v[0] > VtaMemory.OUT:
        raise _undecodable(f"memory type {v[0]} is unknown; there are 0 to {int(VtaMemory.OUT)}", opcode.name)
    if opcode is Opcode.LOAD:
        return Load(_MEMORIES[v[0]], v[1], v[2], v[3], v[4], v[5], (v[6], v[7]), (v[8], v[9]), flags)
    if any(v[6:]):
        raise TargetError("a STORE cannot pad", where=opcode.name, hint="pad when loading: a STORE has no room for it")
    return Store(_MEMORIES[v[0]], v[1], v[2], v[3], v[4], v[5], flags)


def _alu_opcode(code: int, config: VtaConfig) -> AluOpcode:
    """The operation of a code on this configuration."""
    if code < _FOURTH:
        return _ALU_OPCODES[code]
    if code == _FOURTH and config.shifts_left:
        return AluOpcode.SHL
    if code == _FOURTH and config.multiplies:
        return AluOpcode.MUL
    last = _FOURTH if config.shifts_left or config.multiplies else _FOURTH - 1
    raise _undecodable(f"ALU operation {code} is unknown; there are 0 to {last}", Opcode.ALU.name)


def encode_uop(uop: Uop, config: VtaConfig) -> int:
    """The 32-bit word of a micro-operation: dst, src, wgt from the least significant bit.

    Raises:
        TargetError: an index does not fit its field.
    """
    dst = _fitted("dst", config.dst_bits, uop.dst, "micro-operation")
    src = _fitted("src", config.src_bits, uop.src, "micro-operation")
    wgt = _fitted("wgt", config.wgt_index_bits, uop.wgt, "micro-operation")
    return dst | src << config.dst_bits | wgt << config.dst_bits + config.src_bits


def decode_uop(word: int, config: VtaConfig) -> Uop:
    """The micro-operation of a 32-bit word; bits above the fields are ignored."""
    return Uop(*uop_indices(word, config))


def uop_indices(words: Words, config: VtaConfig) -> tuple[Words, Words, Words]:
    """The indices dst, src and wgt of a micro-operation's word, or of an array of words."""
    dst, src = words & config.acc_entries - 1, words >> config.dst_bits & config.inp_entries - 1
    return dst, src, words >> config.dst_bits + config.src_bits & config.wgt_entries - 1
