"""Sizes and timing of one VTA, and the field widths that follow from them.

Defaults are the public sample configuration (apache/tvm-vta, config/*_sample.json; facts in hardware/vta.md). The
timing figures are the model's own: public sources give one GEMM tile per cycle and an ALU interval of at least 2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dovetail.errors import TargetError

UOP_ELEMENT = 4
"""Bytes of a micro-operation."""
UOP_BEGIN_BITS = 13
"""Width of uop_bgn, which bounds the micro-operation memory."""
SRAM_BITS = 16
"""Width of sram_base, which bounds every memory."""


@dataclass(frozen=True, slots=True)
class VtaConfig:
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

    def __post_init__(self) -> None:
        """Check, see `validate`."""
        self.validate()

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
        """Width of a source index: log2 of the INP entries. ALU sources index ACC with the same width."""
        return self.inp_entries.bit_length() - 1

    @property
    def wgt_index_bits(self) -> int:
        """Width of a weight index: log2 of the WGT entries."""
        return self.wgt_entries.bit_length() - 1

    def validate(self) -> None:
        """Check every limit.

        Raises:
            TargetError: naming the limit and the value.
        """
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
        for name, size, element in (
            ("uop_bytes", self.uop_bytes, UOP_ELEMENT), ("inp_bytes", self.inp_bytes, self.inp_element),
            ("wgt_bytes", self.wgt_bytes, self.wgt_element), ("acc_bytes", self.acc_bytes, self.acc_element),
        ):  # fmt: skip
            if size < element:
                raise _error(f"a config that cannot hold one tile: {name} must be at least {element}, is {size}")
        self._validate_fields()

    def _validate_fields(self) -> None:
        indices = self.dst_bits + self.src_bits + self.wgt_index_bits
        limits = (
            ("the entries of the micro-operation memory", self.uop_entries, 1 << UOP_BEGIN_BITS),
            ("the entries of INP", self.inp_entries, 1 << SRAM_BITS),
            ("the entries of WGT", self.wgt_entries, 1 << SRAM_BITS),
            ("the entries of ACC", self.acc_entries, 1 << SRAM_BITS),
            ("the bits of the indices of a micro-operation (dst + src + wgt)", indices, 32),
            ("the bits of the factors of a GEMM instruction", 2 * indices, 64),
            # alu_opcode 3, use_imm 1 and imm 16 share the half with the factors
            ("the bits of the factors of an ALU instruction", 2 * (self.dst_bits + self.src_bits), 64 - 20),
        )
        for name, value, limit in limits:
            if value > limit:
                raise _error(f"{name} must be at most {limit}, are {value}")


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
