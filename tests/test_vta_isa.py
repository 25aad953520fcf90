"""The VTA's configuration, its instruction bits against the field table written out again, and every stream fault."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.errors import TargetError
from dovetail.targets.vta.checks import DramRows, merged
from dovetail.targets.vta.config import VtaConfig
from dovetail.targets.vta.executor import BufferRange, estimate, execute
from dovetail.targets.vta.isa import (
    Alu,
    AluOpcode,
    Finish,
    Flags,
    Gemm,
    Instruction,
    Load,
    Store,
    Uop,
    VtaMemory,
    decode,
    decode_uop,
    encode,
    encode_uop,
    queue_of,
)
from dovetail.targets.vta.stream import Fault, StreamError, assemble, assemble_uops, disassemble, explain, listing
from test_vta_device import (
    CHISEL,
    CONFIG,
    END,
    FSIM,
    INPUT,
    NONE,
    PIPELINE_UOPS,
    POINTERS,
    POP,
    PUSH,
    RESULT,
    SMALL,
    STORED,
    UOPS,
    WEIGHTS,
    Ram,
    but,
    operations,
    pipeline,
    row,
    run,
)


def test_the_default_configuration_is_the_public_one() -> None:
    elements = (CONFIG.inp_element, CONFIG.wgt_element, CONFIG.acc_element, CONFIG.out_element)
    entries = (CONFIG.uop_entries, CONFIG.inp_entries, CONFIG.wgt_entries, CONFIG.acc_entries)
    assert elements == (16, 256, 64, 16)
    assert entries == (8192, 2048, 1024, 2048)
    assert (CONFIG.dst_bits, CONFIG.src_bits, CONFIG.wgt_index_bits) == (11, 11, 10)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block": 12}, "block must be a power of two, is 12"),
        ({"batch": 0}, "batch must be a power of two, is 0"),
        ({"inp_bytes": 3000}, "inp_bytes must be a power of two, is 3000"),
        ({"inp_bits": 4}, "inp_bits must be 8, is 4"),
        ({"alu_interval": 0}, "alu_interval must be at least 1, is 0"),
        ({"queue_depth": 0}, "queue_depth must be at least 1, is 0"),
        ({"wgt_bytes": 128}, "cannot hold one tile: wgt_bytes must be at least 256, is 128"),
        ({"acc_bytes": 32}, "cannot hold one tile: acc_bytes must be at least 64, is 32"),
        ({"uop_bytes": 65536}, "bits of a GEMM instruction must be at most 128, are 148"),
        ({"multiplies": True, "shifts_left": True}, "MUL or SHL, not both"),
        ({"least_shift": 1}, "SHR must take 0, takes 1 to 15"),
        ({"wgt_bytes": 512 * 1024}, "(dst + src + wgt) must be at most 32, are 33"),
        ({"wgt_bytes": 65536, "inp_bytes": 8192, "acc_bytes": 1 << 18}, "ALU instruction must be at most 128, are 144"),
        ({"block": 1, "inp_bytes": 128 * 1024}, "entries of INP must be at most 65536, are 131072"),
    ],
)
def test_configurations_have_limits(fields: dict[str, int], message: str) -> None:
    with pytest.raises(TargetError) as caught:
        VtaConfig(**fields)
    assert message in str(caught.value)


def test_indices_may_use_all_bits_of_a_micro_operation() -> None:
    config = VtaConfig(wgt_bytes=512 * 1024, inp_bytes=16 * 1024)
    assert (config.dst_bits, config.src_bits, config.wgt_index_bits) == (11, 10, 11)
    assert decode_uop(encode_uop(Uop(2047, 1023, 2047), config), config) == Uop(2047, 1023, 2047)


# The 128 bits again: (field, width) from the least significant bit; "high" begins at bit 64.
HEAD = [("opcode", 3), ("pop_prev", 1), ("pop_next", 1), ("push_prev", 1), ("push_next", 1)]
MEM = [
    *HEAD,
    ("memory_type", 3),
    ("sram_base", 16),
    ("dram_base", 32),
    ("high", 0),
    ("y_size", 16),
    ("x_size", 16),
    ("x_stride", 16),
    ("y_pad_0", 4),
    ("y_pad_1", 4),
    ("x_pad_0", 4),
    ("x_pad_1", 4),
]
LOOPS = [*HEAD, ("reset", 1), ("uop_bgn", 13), ("uop_end", 14), ("iter_out", 14), ("iter_in", 14), ("high", 0)]
GEMM = [*LOOPS, ("dst_out", 11), ("dst_in", 11), ("src_out", 11), ("src_in", 11), ("wgt_out", 10), ("wgt_in", 10)]
ALU = [
    *LOOPS,
    ("dst_out", 11),
    ("dst_in", 11),
    ("src_out", 11),
    ("src_in", 11),
    ("alu_opcode", 3),
    ("use_imm", 1),
    ("imm", 16),
]


def bits(table: list[tuple[str, int]], **values: int) -> tuple[int, ...]:
    """The four words of an instruction by the table; fields not given are 0."""
    text = ""
    for field, width in table:
        if field == "high":
            text = text.rjust(64, "0")
        elif width:
            text = format(values.pop(field, 0) & (1 << width) - 1, f"0{width}b") + text
    assert not values
    number = int(text.rjust(128, "0"), 2)
    return tuple(number >> 32 * word & 0xFFFFFFFF for word in range(4))


def test_bits_are_those_of_the_field_table() -> None:
    load = Load(VtaMemory.INP, 0x123, 0x89ABCDEF, 7, 9, 300, (1, 2), (3, 4), Flags(pop_next=True, push_next=True))
    assert encode(load, CONFIG) == bits(
        MEM,
        opcode=0,
        pop_next=1,
        push_next=1,
        memory_type=2,
        sram_base=0x123,
        dram_base=0x89ABCDEF,
        y_size=7,
        x_size=9,
        x_stride=300,
        y_pad_0=1,
        y_pad_1=2,
        x_pad_0=3,
        x_pad_1=4,
    )
    store = Store(VtaMemory.OUT, 5, 6, 7, 8, 9, Flags(pop_prev=True, push_prev=True))
    assert encode(store, CONFIG) == bits(
        MEM, opcode=1, pop_prev=1, push_prev=1, memory_type=4, sram_base=5, dram_base=6, y_size=7, x_size=8, x_stride=9
    )
    gemm = Gemm(True, 8191, 8192, 16383, 3, (2047, 1), (2, 2046), (1023, 5), Flags(True, False, True, False))
    assert encode(gemm, CONFIG) == bits(
        GEMM,
        opcode=2,
        pop_prev=1,
        push_prev=1,
        reset=1,
        uop_bgn=8191,
        uop_end=8192,
        iter_out=16383,
        iter_in=3,
        dst_out=2047,
        dst_in=1,
        src_out=2,
        src_in=2046,
        wgt_out=1023,
        wgt_in=5,
    )
    alu = Alu(AluOpcode.SHR, True, -3, 1, 2, 3, 4, (5, 6), (7, 8), Flags(push_next=True))
    assert encode(alu, CONFIG) == bits(
        ALU,
        opcode=4,
        push_next=1,
        uop_bgn=1,
        uop_end=2,
        iter_out=3,
        iter_in=4,
        dst_out=5,
        dst_in=6,
        src_out=7,
        src_in=8,
        alu_opcode=3,
        use_imm=1,
        imm=-3,
    )
    assert encode(Finish(Flags(pop_next=True)), CONFIG) == bits(HEAD, opcode=3, pop_next=1)
    assert encode_uop(Uop(2047, 1, 3), CONFIG) == 2047 | 1 << 11 | 3 << 22
    assert assemble([store], CONFIG) == b"".join(word.to_bytes(4, "little") for word in encode(store, CONFIG))


DEEP = VtaConfig(uop_bytes=1 << 13, inp_bytes=1 << 16, acc_bytes=1 << 16)
"""Fewer micro-operations than the public configurations; more INP than ACC."""


def pairs(limit: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(0, limit), st.integers(0, limit))


@st.composite
def instructions(draw: st.DrawFn, config: VtaConfig) -> Instruction:
    """Any instruction that has an encoding."""
    kind = draw(st.sampled_from(("load", "store", "gemm", "alu", "finish")))
    flags = Flags(*(draw(st.booleans()) for _ in range(4)))
    uops = config.uop_entries
    begin, end, outer, inner = (draw(st.integers(0, limit)) for limit in (uops - 1, 2 * uops - 1, 16383, 16383))
    dst, src, wgt = (draw(pairs(n - 1)) for n in (config.acc_entries, config.inp_entries, config.wgt_entries))
    if kind == "gemm":
        return Gemm(draw(st.booleans()), begin, end, outer, inner, dst, src, wgt, flags)
    if kind == "alu":
        opcode, src = draw(st.sampled_from(operations(config))), draw(pairs(config.acc_entries - 1))
        limits = (config.least_shift, config.most_shift) if opcode is AluOpcode.SHR else (-(2**15), 2**15 - 1)
        imm = draw(st.integers(*limits))
        return Alu(opcode, draw(st.booleans()), imm, begin, end, outer, inner, dst, src, flags)
    if kind == "finish":
        return Finish(flags)
    sram, dram, y, x, stride = (draw(st.integers(0, limit)) for limit in (65535, 2**32 - 1, 65535, 65535, 65535))
    if kind == "store":
        return Store(VtaMemory.OUT, sram, dram, y, x, stride, Flags(pop_prev=flags.pop_prev, push_prev=flags.push_prev))
    memory = draw(st.sampled_from([m for m in VtaMemory if m is not VtaMemory.OUT]))
    if memory in (VtaMemory.INP, VtaMemory.WGT):
        flags = Flags(pop_next=flags.pop_next, push_next=flags.push_next)
    y, x = (1 if memory is VtaMemory.UOP else max(1, y)), max(1, x)
    pads = [draw(pairs(15)) if memory in (VtaMemory.INP, VtaMemory.ACC) else (0, 0) for _ in "yx"]
    return Load(memory, sram, dram, y, x, stride, pads[0], pads[1], flags)


@settings(max_examples=400, deadline=None)
@given(st.data(), st.sampled_from((CONFIG, SMALL, FSIM, CHISEL, DEEP)))
def test_decoding_undoes_encoding(data: st.DataObject, config: VtaConfig) -> None:
    found = data.draw(st.lists(instructions(config), max_size=4))
    assert [decode(encode(i, config), config) for i in found] == found
    assert list(disassemble(assemble(found, config), config)) == found
    uop = Uop(*(data.draw(st.integers(0, n - 1)) for n in (config.acc_entries, config.inp_entries, config.wgt_entries)))
    assert decode_uop(encode_uop(uop, config), config) == uop
    assert assemble_uops([uop], config) == encode_uop(uop, config).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("instruction", "message"),
    [
        (Load(VtaMemory.INP, 65536, 0, 1, 1, 1), "field sram_base must be 0 to 65535, is 65536"),
        (Load(VtaMemory.INP, 0, 1 << 32, 1, 1, 1), "field dram_base must be 0 to 4294967295, is 4294967296"),
        (Load(VtaMemory.INP, 0, 0, 1, 1, 1, x_pad=(0, 16)), "field x_pad_1 must be 0 to 15, is 16"),
        (Store(VtaMemory.OUT, 0, 0, 1, 65536, 1), "field x_size must be 0 to 65535, is 65536"),
        (Gemm(False, 8192, 8192, 1, 1), "field uop_bgn must be 0 to 8191, is 8192"),
        (Gemm(False, 0, 1, 16384, 1), "field iter_out must be 0 to 16383, is 16384"),
        (Gemm(False, 0, 1, 1, 1, dst=(2048, 0)), "field dst_out must be 0 to 2047, is 2048"),
        (Gemm(False, 0, 1, 1, 1, wgt=(0, 1024)), "field wgt_in must be 0 to 1023, is 1024"),
        (Gemm(False, 0, 1, 1, 1, src=(-1, 0)), "field src_out must be 0 to 2047, is -1"),
        (Alu(AluOpcode.ADD, True, 32768, 0, 1, 1, 1), "field imm must be -32768 to 32767, is 32768"),
        (Alu(AluOpcode.ADD, True, 0, 0, 1, 1, 1, reset=True), "reset bit"),
        (Alu(AluOpcode.MUL, True, 0, 0, 1, 1, 1), "this ALU has no MUL"),
        (Alu(AluOpcode.SHL, True, 0, 0, 1, 1, 1), "this ALU has no SHL"),
        (Alu(AluOpcode.SHR, True, 16, 0, 1, 1, 1), "SHR must be by -16 to 15, is by 16"),
        (Load(VtaMemory.INP, 0, 0, 0, 1, 1), "a LOAD of no element"),
        (Load(VtaMemory.WGT, 0, 0, 1, 1, 1, x_pad=(0, 1)), "WGT cannot be padded"),
        (Load(VtaMemory.UOP, 0, 0, 2, 1, 1), "UOP is loaded in one row, not 2"),
        (Load(VtaMemory.OUT, 0, 0, 1, 1, 1), "OUT cannot be loaded"),
        (Store(VtaMemory.ACC, 0, 0, 1, 1, 1), "only OUT can be stored, not ACC"),
        (Load(VtaMemory.WGT, 0, 0, 1, 1, 1, flags=Flags(pop_prev=True)), "no previous queue"),
        (Store(VtaMemory.OUT, 0, 0, 1, 1, 1, Flags(push_next=True)), "no next queue"),
    ],
)
def test_what_has_no_encoding_is_named(instruction: Instruction, message: str) -> None:
    with pytest.raises(TargetError, match=message.replace("(", r"\(")):
        encode(instruction, CONFIG)


def test_uop_fields_have_limits() -> None:
    cases = ((Uop(2048), "dst must be 0 to 2047, is 2048"), (Uop(0, 2048), "src"), (Uop(0, 0, 1024), "wgt"))
    for uop, message in cases:
        with pytest.raises(TargetError, match=message):
            encode_uop(uop, CONFIG)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (bits(HEAD, opcode=5), "opcode 5 is unknown"),
        (bits(MEM, memory_type=5, x_size=1, y_size=1), "memory type 5 is unknown; there are 0 to 4"),
        (bits(MEM, memory_type=3), "a LOAD of no element"),
        (bits(MEM, memory_type=4), "OUT cannot be loaded"),
        (bits(MEM, opcode=1, memory_type=2), "only OUT can be stored"),
        (bits(MEM, opcode=1, memory_type=4, x_pad_0=1), "a STORE cannot pad"),
        (bits(ALU, opcode=4, alu_opcode=4), "ALU operation 4 is unknown; there are 0 to 3"),
        (bits(ALU, opcode=4, alu_opcode=5), "ALU operation 5 is unknown"),
        ((3 | 1 << 20, 0, 0, 0), "a bit outside all fields is set"),
        (bits(MEM, memory_type=2, x_size=1, y_size=1, push_prev=1), "no previous queue"),
    ],
)
def test_what_is_no_instruction_is_named(words: Any, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        decode(words, CONFIG)
    stream = assemble([Finish()], CONFIG) + b"".join(word.to_bytes(4, "little") for word in words)
    with pytest.raises(StreamError, match=f"instruction 1 .*{message}") as caught:
        disassemble(stream, CONFIG)
    assert caught.value.kind is Fault.DECODE


def test_a_stream_has_whole_instructions() -> None:
    with pytest.raises(StreamError, match="multiple of 16 bytes, is 15") as caught:
        disassemble(bytes(15), CONFIG)
    assert caught.value.kind is Fault.DECODE


def test_queues_and_printed_forms() -> None:
    stream: list[Instruction] = [
        Load(VtaMemory.INP, 3, 40, 2, 5, 7, (1, 0), (0, 2), Flags(push_next=True)),
        Load(VtaMemory.WGT, 0, 0, 1, 1, 1),
        Load(VtaMemory.UOP, 0, 0, 1, 1, 1),
        Load(VtaMemory.ACC, 0, 0, 1, 1, 1),
        Gemm(False, 0, 2, 3, 4, (5, 6), (7, 8), (9, 10), Flags(pop_prev=True)),
        Alu(AluOpcode.MAX, True, -7, 0, 1, 2, 3),
        Alu(AluOpcode.MUL, False, 0, 0, 1, 2, 3),
        Store(VtaMemory.OUT, 1, 2, 3, 4, 5),
        Finish(),
    ]
    assert [queue_of(i) for i in stream] == ["load", "load", *["compute"] * 5, "store", "compute"]
    lines = listing(assemble(stream, FSIM), FSIM).splitlines()
    assert lines[0] == "    0 load    LOAD INP[3] <- dram 40, 2 x 5 stride 7 pad y 1,0 x 0,2 [push next]"
    assert explain(stream[4]) == "GEMM uops 0..2 x 3 x 4 dst +5,6 src +7,8 wgt +9,10 [pop prev]"
    assert explain(stream[5]) == "ALU MAX imm -7 uops 0..1 x 2 x 3 dst +0,0 src +0,0"
    assert explain(stream[7]) == "STORE OUT[1] -> dram 2, 3 x 4 stride 5" and len(lines) == len(stream)


# -- faults: each is a mutation of `pipeline`


BUFFERS = (
    BufferRange("uops", UOPS, 8, True, False),
    BufferRange("input", INPUT, 512, True, False),
    BufferRange("weights", WEIGHTS, 256, True, False),
    BufferRange("result", RESULT, 512, True, True, complete=True),
)


def changed(**changes: Any) -> list[Instruction]:
    """The pipeline with fields of instructions changed: i3={"sram": 4}."""
    stream = pipeline()
    for title, fields in changes.items():
        stream[int(title[1:])] = but(stream[int(title[1:])], **fields)
    return stream


FAULTS: list[tuple[Fault, list[Instruction], str]] = [
    (
        Fault.DEADLOCK,
        changed(i3={"flags": NONE}),
        r"compute waits with instruction 8 \(GEMM .*for a token from load \(all 1 it ever gets are taken\); "
        r"store waits with instruction 9 .*from compute \(next to push one is instruction 8 ",
    ),
    (
        Fault.DEADLOCK,
        changed(i1={"flags": Flags(pop_next=True)}),
        r"load waits with instruction 1 .*from compute \(no instruction pushes one\); compute waits with instruction 5",
    ),
    (
        Fault.RACE,
        changed(i2={"flags": NONE}, i5={"flags": PUSH}),
        r"instruction 5 \(GEMM .*reads WGT entry 0, which instruction 1 \(LOAD .*writes, and no token",
    ),
    (
        Fault.RACE,
        changed(i1={"flags": PUSH}, i2={"flags": NONE}, i4={"flags": POP}, i5={"flags": PUSH}),
        r"instruction 5 \(GEMM .*reads INP entry 0, which instruction 2 \(LOAD .*writes, and no token",
    ),
    # long after the loads, but only by luck
    (
        Fault.RACE,
        changed(i2={"flags": NONE}, i5={"flags": PUSH}, i4={"iter_in": 300, "dst": (1, 1)}),
        r"instruction 5 \(GEMM .*reads INP entry 0, which instruction 2 \(LOAD .*writes, and no token",
    ),
    (Fault.RACE, changed(i3={"sram": 0}), r"instruction 5 \(GEMM .*reads INP entry 0, which instruction 3 \(LOAD"),
    # the store of the first half comes before any GEMM has run
    (
        Fault.RACE,
        changed(i4={"flags": POP}, i5={"flags": PUSH}, i6={"flags": NONE}, i9={"flags": STORED}),
        r"instruction 4 \(GEMM reset.*writes OUT entry 0, which instruction 6 \(STORE .*reads",
    ),
    # 0x7000 elements after the input begins the result
    (
        Fault.RACE,
        [*pipeline()[:7], row(VtaMemory.INP, 40, 1, 0x7003), *pipeline()[7:]],
        r"address 0x80080030, which instruction \d \((STORE|LOAD) ",
    ),
    (
        Fault.RACE,
        changed(i5={"flags": POP}, i6={"flags": NONE}),
        r"instruction 4 \(GEMM reset.*writes OUT entry 0, which instruction 6 \(STORE .*reads",
    ),
    (
        Fault.BOUNDS,
        changed(i3={"sram": 2040}),
        r"instruction 3 \(LOAD INP\[2040\].*touches INP entries 2040 to 2055; there are 0 to 2047",
    ),
    (
        Fault.BOUNDS,
        changed(i5={"uop_begin": 8000, "uop_end": 9000}),
        "instruction 5 .*touches UOP entries 8000 to 8999; there are 0 to 8191",
    ),
    (Fault.BOUNDS, changed(i5={"uop_begin": 2, "uop_end": 1}), "the last comes before the first"),
    (Fault.BOUNDS, changed(i7={"dst": (200, 0)}), "instruction 7 .*touches ACC entries 16 to 3016"),
    (Fault.BOUNDS, changed(i8={"src": (200, 0)}), "instruction 8 .*touches INP entries 16 to 3016"),
    (Fault.BOUNDS, changed(i8={"wgt": (1000, 0)}), "instruction 8 .*touches WGT entries 0 to 15000"),
    (Fault.BOUNDS, changed(i6={"sram": 2047}), "instruction 6 .*touches OUT entries 2047 to 2062"),
    (
        Fault.BOUNDS,
        changed(i3={"dram": 17}),
        r"instruction 3 .*loads the row 0x80010110 to 0x8001020f, which is not inside one readable buffer",
    ),
    (
        Fault.BOUNDS,
        changed(i9={"y_size": 2, "x_size": 8, "x_stride": 9}),
        r"instruction 9 .*stores the row 0x80080190 to 0x8008020f, which is not inside one writable buffer",
    ),
    (Fault.BOUNDS, changed(i3={"dram": 2**28}), "reaches address 0x1800100ff; the last one is 0xffffffff"),
    (Fault.UNINITIALISED, changed(i1={"sram": 1}), "instruction 5 .*reads WGT entry 0, which this stream has not"),
    (Fault.UNINITIALISED, changed(i0={"x_size": 1}), "instruction 7 .*reads UOP entry 1, "),
    (Fault.UNINITIALISED, changed(i3={"x_size": 15}), "instruction 8 .*reads INP entry 31, "),
    (Fault.UNINITIALISED, changed(i7={"iter_out": 15}), "instruction 8 .*reads ACC entry 31, "),
    (Fault.UNINITIALISED, changed(i9={"sram": 17}), r"instruction 9 \(STORE .*reads OUT entry 32, "),
    (
        Fault.HAZARD,
        changed(i5={"dst": (0, 0)}),
        "instruction 5 .*outer iteration and the first of the next both write ACC entry 0",
    ),
    (Fault.HAZARD, changed(i5={"iter_out": 1, "iter_in": 16}), "instruction 5 .*inner iteration and the first"),
    (
        Fault.HAZARD,
        changed(i5={"iter_out": 2, "iter_in": 8, "dst": (7, 1)}),
        "instruction 5 .*outer iteration and the first of the next both write ACC entry 7",
    ),
    (Fault.HAZARD, changed(i5={"iter_in": 2}), "instruction 5 .*inner iteration and the first of the next both write"),
    (
        Fault.LEFTOVER,
        changed(i5={"flags": Flags(pop_prev=True, push_prev=True, push_next=True)}),
        r"1 from compute to load, the first pushed by instruction 5 \(GEMM",
    ),
    (Fault.UNFINISHED, pipeline()[:-1], r"no FINISH; the last of 10 is instruction 9 \(STORE"),
    (Fault.UNFINISHED, [*pipeline(), Finish()], r"instruction 11 \(FINISH\) comes after instruction 10 \(FINISH"),
    (Fault.UNFINISHED, [], "empty"),
    (
        Fault.REWRITTEN,
        changed(i9={"dram": 15}),
        r"instruction 9 .*stores address 0x800800f0, which instruction 6 \(STORE .*stored before",
    ),
    (Fault.REWRITTEN, changed(i9={"y_size": 2, "x_size": 8, "x_stride": 7}), "stores address 0x80080170 twice itself"),
    (
        Fault.UNWRITTEN,
        changed(i9={"x_size": 15}),
        "no instruction stores address 0x800801f0, byte 496 of the 512 of buffer 'result'",
    ),
    (Fault.UNWRITTEN, changed(i6={"sram": 1, "dram": 1, "x_size": 15}), "0x80080000, byte 0 of the 512"),
]


@pytest.mark.parametrize(("kind", "stream", "message"), FAULTS, ids=[f"{n}-{f[0].name}" for n, f in enumerate(FAULTS)])
def test_faults_are_found_and_named(kind: Fault, stream: list[Instruction], message: str) -> None:
    run(Ram(), pipeline(), PIPELINE_UOPS, buffers=BUFFERS)
    ram = Ram()
    ram.place(UOPS, assemble_uops(PIPELINE_UOPS, CONFIG))
    image = assemble(stream, CONFIG)
    with pytest.raises(StreamError, match=message) as caught:
        execute(image, ram, POINTERS, CONFIG, buffers=BUFFERS)
    assert caught.value.kind is kind


@given(st.lists(st.builds(DramRows, *(st.integers(low, 12) for low in (0, 1, 1, 0)))))
def test_followed_bytes_are_those_stored(rows: list[DramRows]) -> None:
    starts, ends = merged(rows)
    covered = [address for start, end in zip(starts, ends, strict=True) for address in range(start, end)]
    assert covered == sorted({int(address) for r in rows for address in r.bytes()})
    assert (starts[1:] > ends[:-1]).all()


def test_the_order_tokens_give_reaches_memory() -> None:
    """A LOAD of what a STORE has written is no race once store, compute and load have passed a token on."""
    relay = Alu(AluOpcode.ADD, True, 0, 0, 1, 0, 1, flags=Flags(pop_next=True, push_prev=True))
    again = row(VtaMemory.INP, 0, 1, 0x7003, Flags(pop_next=True, push_next=True))
    use = Gemm(True, 0, 1, 1, 1, flags=POP)
    run(Ram(), [*pipeline()[:-1], relay, again, use, Finish()], PIPELINE_UOPS, buffers=BUFFERS)


def test_a_fetch_that_waits_is_part_of_a_deadlock() -> None:
    stream: list[Instruction] = [
        row(VtaMemory.INP, 0, 1, flags=Flags(pop_next=True)),
        row(VtaMemory.INP, 1, 1),
        row(VtaMemory.ACC, 0, 1, flags=Flags(push_prev=True)),
        Finish(),
    ]
    assert estimate(assemble(stream, CONFIG), CONFIG).cycles > 0
    narrow = replace(CONFIG, queue_depth=1)
    with pytest.raises(
        StreamError,
        match=r"next to push one is instruction 2 .*; the fetch waits with instruction 1 "
        r".*for one of the 1 places of the load queue",
    ) as caught:
        estimate(assemble(stream, narrow), narrow)
    assert caught.value.kind is Fault.DEADLOCK


def test_accesses_outside_memory_and_checks_left_out() -> None:
    ram = Ram()
    ram.place(UOPS, assemble_uops(PIPELINE_UOPS, CONFIG))
    image = assemble(changed(i3={"dram": 2**20}), CONFIG)
    with pytest.raises(StreamError, match=r"instruction 3 .*touches 0x81010000 to .*no memory at 0x81010000") as caught:
        execute(image, ram, POINTERS, CONFIG, ())
    assert caught.value.kind is Fault.BOUNDS
    optional = (Fault.RACE, Fault.UNINITIALISED, Fault.HAZARD, Fault.LEFTOVER, Fault.UNFINISHED, Fault.REWRITTEN)
    for stream in [stream for kind, stream, _ in FAULTS if kind in optional and stream]:
        execute(assemble(stream, CONFIG), ram, POINTERS, CONFIG, checks=())


def test_estimates_are_fast() -> None:
    stream: list[Instruction] = []
    for k in range(400):
        stream += [
            row(VtaMemory.INP, 0, 64, flags=Flags(pop_next=k > 0, push_next=True)),
            row(VtaMemory.ACC, 0, 256),
            Gemm(False, 0, 16, 4, 1, (196, 0), flags=POP),
            Alu(AluOpcode.SHR, True, 3, 0, 16, 1, 1, flags=Flags(push_prev=k < 399, push_next=True, pop_next=k > 0)),
            Store(VtaMemory.OUT, 0, 64 * k, 1, 16, 16, STORED),
        ]
    image, times = assemble([*stream, END], CONFIG), []
    for _ in range(5):
        started = time.process_time()
        estimate(image, CONFIG)
        times.append(time.process_time() - started)
    assert min(times) < 0.1  # 0.03 on a machine with nothing else to do
