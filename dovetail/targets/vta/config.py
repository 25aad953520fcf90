"""Sizes, operations and timing of one VTA, and the fields of its instructions, which follow from the sizes.

Defaults are what the public sample configuration gives with the HLS source (apache/tvm-vta, config/pynq_sample.json,
hardware/xilinx). The timing figures are the model's own: public sources give one GEMM tile per cycle and an ALU
interval of at least 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dovetail.errors import TargetError
from dovetail.records import Record

UOP_ELEMENT = 4
"""Bytes of a micro-operation."""
SRAM_BITS = 16
"""Width of sram_base, which bounds every memory."""
MOST_PAD = 15
"""The most rows or columns of zeros a LOAD puts on a side."""
UNIT_BITS = 64
"""Bits of the C type whose bit-fields an instruction is made of: no field crosses from one unit into the next."""
HEAD = (("opcode", 3), ("pop_prev", 1), ("pop_next", 1), ("push_prev", 1), ("push_next", 1))
"""The first fields of every instruction, each (name, bits)."""


class VtaConfig(Record):
    """One VTA: geometry, memories, bus and pipeline.

    Raises:
        TargetError: a size is not a power of two, a memory holds no element, or indices do not fit their fields.
    """

    batch: int = 1
    """Rows of an input or accumulator element."""
    block: int = 16
    """Input channels and output channels of a tile (block_in == block_out)."""
    inp_bits: int = 8
    wgt_bits: int = 8
    acc_bits: int = 32
    uop_bytes: int = 32 * 1024
    """Bytes of micro-operation memory."""
    inp_bytes: int = 32 * 1024
    wgt_bytes: int = 256 * 1024
    acc_bytes: int = 128 * 1024
    """Bytes of accumulator memory; OUT has as many entries."""
    bus_bytes: int = 8
    """Bytes per cycle of the memory bus, and of the port instructions are fetched through."""
    bus_latency: int = 16
    """Cycles a LOAD or STORE waits before it asks for the bus."""
    pipeline_cycles: int = 6
    """Cycles a GEMM or ALU instruction takes beyond its micro-operations."""
    alu_interval: int = 2
    """Cycles per ALU micro-operation."""
    queue_depth: int = 512
    """Instructions each of the three queues holds, the running one included."""
    least_shift: int = -16
    """The least amount of SHR; a negative one shifts left."""
    most_shift: int = 15
    """The greatest amount of SHR. Where there are 32 amounts, the ALU looks at five bits of an operand."""
    multiplies: bool = False
    """Whether ALU operation 4 is MUL; only the behavioural simulator has it."""
    shifts_left: bool = False
    """Whether ALU operation 4 is SHL, a left shift by the negated operand, as in the Chisel source."""

    @property
    def inp_element(self) -> int:
        """Bytes of an INP element: batch x block int8."""
        return self.batch * self.block

    @property
    def wgt_element(self) -> int:
        """Bytes of a WGT element: block_out x block_in int8."""
        return self.block * self.block

    @property
    def acc_element(self) -> int:
        """Bytes of an ACC element: batch x block int32."""
        return self.batch * self.block * 4

    @property
    def out_element(self) -> int:
        """Bytes of an OUT element: batch x block int8."""
        return self.batch * self.block

    @property
    def uop_entries(self) -> int:
        """Micro-operations the memory holds."""
        return self.uop_bytes // UOP_ELEMENT

    @property
    def inp_entries(self) -> int:
        """Elements of INP."""
        return self.inp_bytes // self.inp_element

    @property
    def wgt_entries(self) -> int:
        """Elements of WGT."""
        return self.wgt_bytes // self.wgt_element

    @property
    def acc_entries(self) -> int:
        """Elements of ACC, and of OUT."""
        return self.acc_bytes // self.acc_element

    @property
    def dst_bits(self) -> int:
        """Width of a destination index: log2 of the ACC entries."""
        return self.acc_entries.bit_length() - 1

    @property
    def src_bits(self) -> int:
        """Width of a source index in a micro-operation, of an ALU's too: log2 of the INP entries."""
        return self.inp_entries.bit_length() - 1

    @property
    def wgt_index_bits(self) -> int:
        """Width of a weight index: log2 of the WGT entries."""
        return self.wgt_entries.bit_length() - 1

    def __post_init__(self) -> None:
        """Check every limit."""
        for name in ("batch", "block", "uop_bytes", "inp_bytes", "wgt_bytes", "acc_bytes", "bus_bytes"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise _error(f"{name} must be a power of two, is {value}")
        for name, bits in (("inp_bits", 8), ("wgt_bits", 8), ("acc_bits", 32)):
            if getattr(self, name) != bits:
                raise _error(f"{name} must be {bits}, is {getattr(self, name)}")
        for name, least in (("bus_latency", 0), ("pipeline_cycles", 0), ("alu_interval", 1), ("queue_depth", 1)):
            if getattr(self, name) < least:
                raise _error(f"{name} must be at least {least}, is {getattr(self, name)}")
        elements = {"uop": UOP_ELEMENT, "inp": self.inp_element, "wgt": self.wgt_element, "acc": self.acc_element}
        for name, element in elements.items():
            size = getattr(self, f"{name}_bytes")
            if size < element:
                raise _error(f"a config that cannot hold one tile: {name}_bytes must be at least {element}, is {size}")
        if self.multiplies and self.shifts_left:
            raise _error("ALU operation 4 is MUL or SHL, not both")
        if not self.least_shift <= 0 <= self.most_shift:
            raise _error(f"SHR must take 0, takes {self.least_shift} to {self.most_shift}")
        limits = (
            ("the entries of INP", self.inp_entries, 1 << SRAM_BITS),
            ("the entries of WGT", self.wgt_entries, 1 << SRAM_BITS),
            ("the entries of ACC", self.acc_entries, 1 << SRAM_BITS),
            (
                "the bits of the indices of a micro-operation (dst + src + wgt)",
                self.dst_bits + self.src_bits + self.wgt_index_bits,
                32,
            ),
            ("the bits of a GEMM instruction", _bits(gemm_fields(self)), 2 * UNIT_BITS),
            ("the bits of an ALU instruction", _bits(alu_fields(self)), 2 * UNIT_BITS),
        )
        for name, value, limit in limits:
            if value > limit:
                raise _error(f"{name} must be at most {limit}, are {value}")


Fields = tuple[tuple[str, int], ...]
"""(name, bits) of the fields of an instruction, from its least significant bit on."""


def _loop_fields(config: VtaConfig) -> Fields:
    """Fields that GEMM and ALU begin with."""
    depth = config.uop_entries.bit_length() - 1
    loops = (("reset", 1), ("uop_bgn", depth), ("uop_end", depth + 1), ("iter_out", 14), ("iter_in", 14))
    return (*HEAD, *loops, ("dst_out", config.dst_bits), ("dst_in", config.dst_bits))


def gemm_fields(config: VtaConfig) -> Fields:
    """The fields of GEMM (hw_spec.h, VTAGemInsn)."""
    src, wgt = config.src_bits, config.wgt_index_bits
    return (*_loop_fields(config), ("src_out", src), ("src_in", src), ("wgt_out", wgt), ("wgt_in", wgt))


def alu_fields(config: VtaConfig) -> Fields:
    """The fields of ALU (hw_spec.h, VTAAluInsn); all its factors count entries of ACC."""
    acc = config.dst_bits
    return (*_loop_fields(config), ("src_out", acc), ("src_in", acc), ("alu_opcode", 3), ("use_imm", 1), ("imm", 16))


def placed(fields: Fields) -> tuple[tuple[str, int, int], ...]:
    """(name, first bit, bits) of every field: a field that would cross a unit begins the next."""
    found, place = [], 0
    for name, bits in fields:
        if place % UNIT_BITS + bits > UNIT_BITS:
            place += -place % UNIT_BITS
        found.append((name, place, bits))
        place += bits
    return tuple(found)


def _bits(fields: Fields) -> int:
    """Bits of an instruction, those between units included."""
    _, first, bits = placed(fields)[-1]
    return first + bits


PRESETS: Mapping[str, VtaConfig] = {
    "pynq": VtaConfig(),
    "ultra96": VtaConfig(bus_bytes=16),
    "de10nano": VtaConfig(least_shift=0, most_shift=31, shifts_left=True),
    "fsim": VtaConfig(least_shift=-31, most_shift=31, multiplies=True),
}
"""The public ones: boards of the HLS and of the Chisel source (config/pkg_config.py), and the behavioural simulator,
whose MUL and shifts of any size no hardware has."""


def macs_per_cycle(config: VtaConfig) -> int:
    """Multiply-accumulates of one GEMM step."""
    return config.batch * config.block**2


def with_macs(config: VtaConfig, macs: int) -> VtaConfig:
    """The configuration with the largest block, hence the fewest images, of so many multiply-accumulates; its memories
    hold as many elements as before, since their indices are as wide.

    Raises:
        TargetError: the number is no power of two, or another limit is broken.
    """
    if macs < 1 or macs & (macs - 1):
        raise _error(f"macs must be a power of two, are {macs}")
    block = 1 << ((macs.bit_length() - 1) // 2)
    batch = macs // block**2
    return replace(
        config,
        block=block,
        batch=batch,
        inp_bytes=config.inp_entries * batch * block,
        wgt_bytes=config.wgt_entries * block * block,
        acc_bytes=config.acc_entries * batch * block * 4,
    )


def _error(what: str) -> TargetError:
    return TargetError(what, where="VTA configuration", hint="change the VtaConfig")
