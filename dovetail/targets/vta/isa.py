"""The VTA's instructions and micro-operations, and their 128 and 32 bits.

Facts: apache/tvm-vta include/vta/hw_spec.h (hardware/vta.md). Fields follow each other from the least significant bit;
no field crosses the middle of the 128 bits, and bits no field covers are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

from dovetail.errors import TargetError
from dovetail.targets.vta.config import UOP_ELEMENT, VtaConfig

INSTRUCTION_BYTES = 16


class Opcode(IntEnum):
    """What an instruction is."""

    LOAD = 0
    STORE = 1
    GEMM = 2
    FINISH = 3
    ALU = 4


class Memory(IntEnum):
    """What a LOAD fills or a STORE reads."""

    UOP = 0
    WGT = 1
    INP = 2
    ACC = 3
    OUT = 4
    ACC_8BIT = 5
    """ACC, from int8 elements as large as those of INP and OUT."""


class AluOpcode(IntEnum):
    """What an ALU instruction computes; SHR is arithmetic, by a negative amount it shifts left."""

    MIN = 0
    MAX = 1
    ADD = 2
    SHR = 3
    MUL = 4


@dataclass(frozen=True, slots=True)
class Flags:
    """Tokens an instruction takes before it starts (pop) and gives when it ends (push), by neighbouring queue."""

    pop_prev: bool = False
    pop_next: bool = False
    push_prev: bool = False
    push_next: bool = False


NO_FLAGS = Flags()
# decoding looks members up by value, which is much faster in a tuple
_OPCODES, _MEMORIES, _ALU_OPCODES = tuple(Opcode), tuple(Memory), tuple(AluOpcode)
_FLAGS = (NO_FLAGS, *(Flags(*(bool(bits >> place & 1) for place in range(4))) for bits in range(1, 16)))


@dataclass(frozen=True, slots=True)
class Load:
    """Fill SRAM from DRAM; entries, addresses, sizes and strides count elements of `memory`.

    The SRAM entries from `sram` on hold y_pad[0] + y_size + y_pad[1] rows of x_pad[0] + x_size + x_pad[1] elements;
    what is not read from DRAM is zero.
    """

    memory: Memory
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

    memory: Memory
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


@dataclass(frozen=True, slots=True)
class Gemm:
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


@dataclass(frozen=True, slots=True)
class Alu:
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


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of the stream."""

    flags: Flags = NO_FLAGS


Instruction = Load | Store | Gemm | Alu | Finish


@dataclass(frozen=True, slots=True)
class Uop:
    """A micro-operation: indices of entries in ACC, INP (ALU: ACC) and WGT."""

    dst: int
    src: int = 0
    wgt: int = 0


def queue_of(instruction: Instruction) -> str:
    """The queue that carries an instruction out: "load", "compute" or "store"."""
    if isinstance(instruction, Store):
        return "store"
    if isinstance(instruction, Load) and instruction.memory in (Memory.INP, Memory.WGT):
        return "load"
    return "compute"


def element_bytes(memory: Memory, config: VtaConfig) -> int:
    """DRAM bytes of one element of `memory`."""
    sizes = (UOP_ELEMENT, config.wgt_element, config.inp_element, config.acc_element, config.out_element,
             config.out_element)  # fmt: skip
    return sizes[memory]


Fields = tuple[tuple[str, int], ...]
_HEAD: Fields = (("opcode", 3), ("flags", 4))
_LOOPS: Fields = (
    *_HEAD, ("reset", 1), ("uop_bgn", 13), ("uop_end", 14), ("iter_out", 14), ("iter_in", 14)
)  # fmt: skip
_MEMORY: tuple[Fields, Fields] = (
    (*_HEAD, ("memory_type", 3), ("sram_base", 16), ("dram_base", 32)),
    (("y_size", 16), ("x_size", 16), ("x_stride", 16), ("y_pad_0", 4), ("y_pad_1", 4), ("x_pad_0", 4), ("x_pad_1", 4)),
)


@lru_cache(maxsize=16)
def _layout(opcode: Opcode, config: VtaConfig) -> tuple[Fields, Fields]:
    """The fields of the two halves; "imm" is the only signed one."""
    factors = (("dst_out", config.dst_bits), ("dst_in", config.dst_bits), ("src_out", config.src_bits),
               ("src_in", config.src_bits))  # fmt: skip
    if opcode is Opcode.GEMM:
        return _LOOPS, (*factors, ("wgt_out", config.wgt_index_bits), ("wgt_in", config.wgt_index_bits))
    if opcode is Opcode.ALU:
        return _LOOPS, (*factors, ("alu_opcode", 3), ("use_imm", 1), ("imm", 16))
    return (_HEAD, ()) if opcode is Opcode.FINISH else _MEMORY


def encode(instruction: Instruction, config: VtaConfig) -> tuple[int, int, int, int]:
    """The four little-endian 32-bit words of an instruction.

    Raises:
        TargetError: a field does not fit (field, limit, value), or the instruction has no meaning.
    """
    opcode, values = _values(instruction)
    problem = _problem(instruction)
    if problem:
        raise TargetError(problem, where=opcode.name, hint="let the instruction be one the engine has")
    halves = zip(_layout(opcode, config), values, strict=True)
    low, high = (_pack(fields, given, opcode) for fields, given in halves)
    return low & 0xFFFFFFFF, low >> 32, high & 0xFFFFFFFF, high >> 32


def _problem(instruction: Instruction) -> str:
    """Why an instruction whose fields fit has no meaning; empty when it has one."""
    if isinstance(instruction, Load) and instruction.memory is Memory.OUT:
        return "OUT cannot be loaded"
    if isinstance(instruction, Store) and instruction.memory is not Memory.OUT:
        return f"only OUT can be stored, not {instruction.memory.name}"
    if isinstance(instruction, Alu) and instruction.reset:
        return "the reset bit has no meaning for the ALU"
    flags, queue = instruction.flags, queue_of(instruction)
    if queue == "load" and (flags.pop_prev or flags.push_prev):
        return "the load queue has no previous queue to exchange tokens with"
    if queue == "store" and (flags.pop_next or flags.push_next):
        return "the store queue has no next queue to exchange tokens with"
    return ""


def _values(instruction: Instruction) -> tuple[Opcode, tuple[tuple[int, ...], tuple[int, ...]]]:
    """The opcode, and the values of the fields of both halves in the order of `_layout`."""
    flags = instruction.flags
    head = flags.pop_prev | flags.pop_next << 1 | flags.push_prev << 2 | flags.push_next << 3
    if isinstance(instruction, Finish):
        return Opcode.FINISH, ((Opcode.FINISH, head), ())
    if isinstance(instruction, Load | Store):
        i = instruction
        opcode, pads = (Opcode.LOAD, (*i.y_pad, *i.x_pad)) if isinstance(i, Load) else (Opcode.STORE, (0, 0, 0, 0))
        return opcode, ((opcode, head, i.memory, i.sram, i.dram), (i.y_size, i.x_size, i.x_stride, *pads))
    g = instruction
    opcode = Opcode.GEMM if isinstance(g, Gemm) else Opcode.ALU
    first = (opcode, head, int(g.reset), g.uop_begin, g.uop_end, g.iter_out, g.iter_in)
    rest = g.wgt if isinstance(g, Gemm) else (g.opcode, int(g.use_imm), g.imm)
    return opcode, (first, (*g.dst, *g.src, *rest))


def _pack(fields: Fields, given: tuple[int, ...], opcode: Opcode) -> int:
    half, place = 0, 0
    for (name, bits), value in zip(fields, given, strict=True):
        half |= _fitted(name, bits, value, opcode.name) << place
        place += bits
    return half


def _fitted(name: str, bits: int, value: int, where: str) -> int:
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if name == "imm" else (0, (1 << bits) - 1)
    if not low <= value <= high:
        raise TargetError(f"field {name} must be {low} to {high}, is {value}", where=where,
                          hint=f"choose smaller tiles: {name} has {bits} bits")
    return value & (1 << bits) - 1


def decode(words: Sequence[int], config: VtaConfig) -> Instruction:
    """The instruction of four 32-bit words.

    Raises:
        TargetError: opcode, memory type or ALU operation is unknown, a bit outside all fields is set, or the
            instruction has no meaning.
    """
    return decode_halves(words[0] | words[1] << 32, words[2] | words[3] << 32, config)


def decode_halves(low: int, high: int, config: VtaConfig) -> Instruction:
    """As `decode`, of the lower and upper 64 bits."""
    if low & 7 > Opcode.ALU:
        raise TargetError(f"opcode {low & 7} is unknown; there are 0 to {int(Opcode.ALU)}", where="instruction",
                          hint="look at where the stream begins and at its length")
    opcode = _OPCODES[low & 7]
    layout = _layout(opcode, config)
    instruction = _made(opcode, _unpack(layout[0], low, opcode), _unpack(layout[1], high, opcode))
    problem = _problem(instruction)
    if problem:
        raise TargetError(problem, where=opcode.name, hint="look at where the stream begins and at its length")
    return instruction


def _unpack(fields: Fields, half: int, opcode: Opcode) -> list[int]:
    values = []
    for _, bits in fields:
        values.append(half & (1 << bits) - 1)
        half >>= bits
    if half:
        raise TargetError("a bit outside all fields is set", where=opcode.name,
                          hint="look at where the stream begins and at its length")
    return values


def _made(opcode: Opcode, a: list[int], b: list[int]) -> Instruction:
    flags = _FLAGS[a[1]]
    if opcode is Opcode.FINISH:
        return Finish(flags)
    if opcode is Opcode.GEMM:
        return Gemm(bool(a[2]), a[3], a[4], a[5], a[6], (b[0], b[1]), (b[2], b[3]), (b[4], b[5]), flags)
    if opcode is Opcode.ALU:
        if b[4] > AluOpcode.MUL:
            raise TargetError(f"ALU operation {b[4]} is unknown; there are 0 to {int(AluOpcode.MUL)}",
                              where=opcode.name, hint="look at where the stream begins and at its length")
        imm = b[6] - 0x10000 if b[6] & 0x8000 else b[6]
        return Alu(_ALU_OPCODES[b[4]], bool(b[5]), imm, a[3], a[4], a[5], a[6], (b[0], b[1]), (b[2], b[3]), flags,
                   bool(a[2]))  # fmt: skip
    if a[2] > Memory.ACC_8BIT:
        raise TargetError(f"memory type {a[2]} is unknown; there are 0 to {int(Memory.ACC_8BIT)}", where=opcode.name,
                          hint="look at where the stream begins and at its length")
    if opcode is Opcode.LOAD:
        return Load(_MEMORIES[a[2]], a[3], a[4], b[0], b[1], b[2], (b[3], b[4]), (b[5], b[6]), flags)
    if any(b[3:]):
        raise TargetError("a STORE cannot pad", where=opcode.name, hint="pad when loading: a STORE has no room for it")
    return Store(_MEMORIES[a[2]], a[3], a[4], b[0], b[1], b[2], flags)


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
    dst, src = word & config.acc_entries - 1, word >> config.dst_bits & config.inp_entries - 1
    return Uop(dst, src, word >> config.dst_bits + config.src_bits & config.wgt_entries - 1)
