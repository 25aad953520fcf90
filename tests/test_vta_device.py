"""The VTA model: results against numpy and scalar loops, cycles against hand counts, the chip's registers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dovetail.errors import SimulationError, TargetError
from dovetail.targets.vta.checks import ALL_CHECKS, BufferRange, Pointers
from dovetail.targets.vta.config import PRESETS, VtaConfig
from dovetail.targets.vta.device import VtaDevice, VtaRegister
from dovetail.targets.vta.executor import estimate, execute
from dovetail.targets.vta.isa import Alu, AluOpcode, Finish, Flags, Gemm, Instruction, Load, Store, Uop, VtaMemory
from dovetail.targets.vta.stream import Fault, StreamError, assemble, assemble_uops
from vta_output import check_output

CONFIG = VtaConfig()
FSIM, CHISEL = PRESETS["fsim"], PRESETS["de10nano"]
ANY_SHIFT = ALL_CHECKS - {Fault.SHIFT}
SMALL = VtaConfig(batch=2, block=4, uop_bytes=64, inp_bytes=256, wgt_bytes=256, acc_bytes=1024)
BASE, SIZE = 0x80000000, 1 << 20
UOPS, INPUT, WEIGHTS, SUMS, RESULT = (BASE + place for place in (0x1000, 0x10000, 0x40000, 0x60000, 0x80000))
POINTERS = Pointers(UOPS, INPUT, WEIGHTS, SUMS, RESULT)
NONE, PUSH, POP = Flags(), Flags(push_next=True), Flags(pop_prev=True)
STORED = Flags(pop_prev=True, push_prev=True)
END = Finish(Flags(pop_next=True))
Ints = np.ndarray[Any, Any]


class Ram:
    """A bus with one memory, filled with noise."""

    def __init__(self, seed: int = 0) -> None:
        self.bytes = np.random.default_rng(seed).integers(0, 256, SIZE).astype(np.uint8)

    def view(self, address: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        if address < BASE or address + nbytes > BASE + SIZE:
            raise SimulationError(f"no memory at {address:#x}")
        return self.bytes[address - BASE : address - BASE + nbytes]

    def place(self, address: int, values: Ints | bytes) -> None:
        raw = np.frombuffer(values if isinstance(values, bytes) else np.ascontiguousarray(values).tobytes(), np.uint8)
        self.view(address, raw.size)[:] = raw

    def read(self, address: int, shape: tuple[int, ...], dtype: str) -> Ints:
        return np.frombuffer(
            self.view(address, int(np.prod(shape)) * np.dtype(dtype).itemsize).tobytes(), dtype
        ).reshape(shape)


def but(instruction: Instruction, **fields: Any) -> Instruction:
    """The instruction with other values of some fields."""
    given: Any = instruction
    changed: Instruction = replace(given, **fields)
    return changed


def run(ram: Ram, stream: Sequence[Instruction], uops: Sequence[Uop], config: VtaConfig = CONFIG, **more: Any) -> Any:
    """Place the micro-operations and execute; the estimate must agree on everything."""
    ram.place(UOPS, assemble_uops(uops, config))
    image = assemble(stream, config)
    execution = execute(image, ram, POINTERS, config, **more)
    assert estimate(image, config) == execution
    return execution


def row(memory: VtaMemory, sram: int, count: int, dram: int = 0, flags: Flags = NONE) -> Instruction:
    return Load(memory, sram, dram, 1, count, count, flags=flags)


# -- results


def test_one_gemm() -> None:
    ram = Ram()
    x, w, start = (
        ram.read(p, s, t) for p, s, t in ((INPUT, (1, 16), "i1"), (WEIGHTS, (16, 16), "i1"), (SUMS, (1, 16), "<i4"))
    )
    stream = [
        row(VtaMemory.UOP, 0, 1),
        row(VtaMemory.ACC, 0, 1),
        row(VtaMemory.INP, 0, 1),
        row(VtaMemory.WGT, 0, 1, flags=PUSH),
        Gemm(False, 0, 1, 1, 1, flags=Flags(pop_prev=True, push_next=True)),
        Store(VtaMemory.OUT, 0, 0, 1, 1, 1, STORED),
        END,
    ]
    before = ram.bytes.copy()
    ram.place(UOPS, assemble_uops([Uop(0)], CONFIG))
    before[UOPS - BASE : UOPS - BASE + 4] = 0
    execution = run(ram, stream, [Uop(0)])
    expected = (start + x.astype(np.int64) @ w.astype(np.int64).T).astype(np.int8)
    assert np.array_equal(ram.read(RESULT, (1, 16), "i1"), expected)
    before[RESULT - BASE : RESULT - BASE + 16] = expected.view(np.uint8).reshape(-1)
    assert np.array_equal(ram.bytes, before)
    assert (execution.gemm_tiles, execution.reset_tiles, execution.alu_operations) == (1, 0, 0)
    assert execution.stored == 16
    assert execution.loaded == {VtaMemory.UOP: 4, VtaMemory.WGT: 256, VtaMemory.INP: 16, VtaMemory.ACC: 64}


def tiny_convolution() -> tuple[list[Instruction], list[Uop]]:
    """3x3, padding 1, 32 -> 32 channels on 5x6 pixels, bias, shift by 9, clip, one row of output stored at a time."""
    height, width, wide = 5, 6, 8
    uops = [Uop(w, w, 0) for w in range(width)]
    stream = [row(VtaMemory.UOP, 0, width)]
    stream += [Load(VtaMemory.ACC, 30 * block + p, block, 1, 1, 1) for block in range(2) for p in range(30)]
    stream += [Load(VtaMemory.INP, 56 * block, 30 * block, height, width, width, (1, 1), (1, 1)) for block in range(2)]
    stream.append(row(VtaMemory.WGT, 0, 36, flags=PUSH))
    for first, (o, i, ky, kx) in enumerate(np.ndindex(2, 2, 3, 3)):
        flags = POP if first == 0 else Flags()
        uop = [Uop(30 * o + w, 56 * i + ky * wide + kx + w, (o * 2 + i) * 9 + ky * 3 + kx) for w in range(width)]
        begin = len(uops)
        uops += uop
        stream.append(Gemm(False, begin, begin + width, height, 1, (width, 0), (wide, 0), (0, 0), flags))
    stream[0] = row(VtaMemory.UOP, 0, len(uops))
    last = 0
    for opcode, imm in ((AluOpcode.SHR, 9), (AluOpcode.MAX, -128), (AluOpcode.MIN, 127)):
        last = len(stream)
        stream.append(Alu(opcode, True, imm, 0, 6, 10, 1, (6, 0)))
    stream[last] = but(stream[last], flags=PUSH)
    stream.append(Store(VtaMemory.OUT, 0, 0, 2, 30, 40, STORED))
    return [*stream, END], uops


def test_tiny_convolution() -> None:
    ram = Ram(1)
    x, w = ram.read(INPUT, (2, 5, 6, 16), "i1"), ram.read(WEIGHTS, (2, 2, 3, 3, 16, 16), "i1")
    bias = np.arange(-16000, 16000, 1000, dtype="<i4").reshape(2, 16)
    ram.place(SUMS, bias)
    padded = np.pad(x.astype(np.int64), ((0, 0), (1, 1), (1, 1), (0, 0)))
    sums = np.zeros((2, 5, 6, 16), np.int64) + bias[:, None, None, :]
    for o, r, c, ky, kx in np.ndindex(2, 5, 6, 3, 3):
        for i in range(2):
            sums[o, r, c] += w[o, i, ky, kx].astype(np.int64) @ padded[i, r + ky, c + kx]
    expected = np.clip(sums >> 9, -128, 127).astype(np.int8)
    stream, uops = tiny_convolution()
    buffers = [
        BufferRange("input", INPUT, 60 * 16, True, False),
        BufferRange("uops", UOPS, 4 * len(uops), True, False),
        BufferRange("constants", WEIGHTS, 0x30000, True, False),
        BufferRange("first", RESULT, 480, False, True, complete=True),
        BufferRange("second", RESULT + 640, 480, False, True, complete=True),
    ]
    execution = run(ram, stream, uops, buffers=buffers)
    assert np.array_equal(ram.read(RESULT, (30, 16), "i1"), expected[0].reshape(30, 16))
    assert np.array_equal(ram.read(RESULT + 640, (30, 16), "i1"), expected[1].reshape(30, 16))
    assert len(np.unique(expected)) > 50
    assert (execution.gemm_tiles, execution.alu_operations) == (30 * 36, 3 * 60)
    wanted = {"first": expected[0].tobytes(), "second": expected[1].tobytes()}
    image = assemble(stream, CONFIG)
    check_output(image, ram, POINTERS, CONFIG, wanted, buffers)
    ram.bytes[RESULT + 640 + 16 * 7 + 3 - BASE] ^= 1
    message = r"byte 115 of buffer 'second' .*instruction 103 \(STORE .*entry 37, lane 3"
    with pytest.raises(StreamError, match=message) as caught:
        check_output(image, ram, POINTERS, CONFIG, wanted, buffers)
    assert caught.value.kind is Fault.WRONG_OUTPUT


def wrapped(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


def scalar_alu(opcode: AluOpcode, a: int, b: int, config: VtaConfig = CONFIG) -> int:
    """One ALU operation in Python integers."""
    if opcode is AluOpcode.SHR:
        if config == FSIM:
            b = min(31, max(-31, b))
        elif config == CHISEL:
            b &= 31
        else:
            b = b & 15 if not b & 16 else (b & 15) - 16
        return wrapped(a << -b) if b < 0 else a >> b
    if opcode is AluOpcode.SHL:
        return wrapped(a << (-b & 31))
    return wrapped((min(a, b), max(a, b), a + b, 0, a * b)[opcode])


def all_bytes(count: int, zero: int) -> list[Instruction]:
    """Store the low bytes of `count` accumulators, the next ones, and so on; `zero` is a micro-operation of zeros."""
    stream: list[Instruction] = [Alu(AluOpcode.SHR, True, 0, zero, zero + 1, count, 1, (1, 0), flags=PUSH)]
    for byte in range(4):
        if byte:
            flags = Flags(pop_next=True, push_next=True)
            stream.append(Alu(AluOpcode.SHR, True, 8, zero, zero + 1, count, 1, (1, 0), flags=flags))
        stream.append(Store(VtaMemory.OUT, 0, byte * count, 1, count, count, STORED))
    return [*stream, END]


def read_words(ram: Ram, count: int, lanes: int) -> Ints:
    """The accumulators `all_bytes` has stored."""
    parts = ram.read(RESULT, (4, count * lanes), "u1")
    return np.ascontiguousarray(parts.T).view("<i4").reshape(count, lanes)


def operations(config: VtaConfig) -> list[AluOpcode]:
    """What the ALU of a configuration computes."""
    fourth = [AluOpcode.MUL] if config.multiplies else [AluOpcode.SHL] if config.shifts_left else []
    return [*list(AluOpcode)[:4], *fourth]


@pytest.mark.parametrize(
    ("preset", "opcode"),
    [(name, opcode) for name in ("pynq", "de10nano", "fsim") for opcode in operations(PRESETS[name])],
)
@pytest.mark.parametrize("imm", [None, 0, 5, -3, 15, -16, 31, 32, -32, 32767, -32768])
def test_alu_operations(preset: str, opcode: AluOpcode, imm: int | None) -> None:
    ram, config = Ram(2), PRESETS[preset]
    if opcode is AluOpcode.SHR and imm is not None and not config.least_shift <= imm <= config.most_shift:
        with pytest.raises(TargetError, match="SHR must be by"):
            assemble([Alu(opcode, True, imm, 0, 1, 16, 1)], config)
        return
    edges = np.array([0, 1, -1, 31, 32, 33, -31, -32, -33, 2**31 - 1, -(2**31), 65536, -65535, 46341, 7, -8], "<i4")
    ram.place(SUMS, np.stack([np.roll(edges, shift) for shift in range(16)] + [edges] * 16))
    values = ram.read(SUMS, (32, 16), "<i4")
    operation = Alu(opcode, imm is not None, imm or 0, 0, 1, 16, 1, (1, 0), (1, 0))
    stream = [
        row(VtaMemory.UOP, 0, 2),
        row(VtaMemory.ACC, 0, 32),
        Alu(AluOpcode.ADD, True, 0, 1, 2, 32, 1, (1, 0)),
        operation,
        *all_bytes(32, 1),
    ]
    run(ram, stream, [Uop(0, 16), Uop(0)], config, checks=ANY_SHIFT)
    right = values[16:] if imm is None else np.full((16, 16), imm)
    expected = [
        [scalar_alu(opcode, int(a), int(b), config) for a, b in zip(*pair, strict=True)]
        for pair in zip(values[:16], right, strict=True)
    ]
    found = read_words(ram, 32, 16)
    assert found[:16].tolist() == expected and np.array_equal(found[16:], values[16:])


def test_padding_of_loads() -> None:
    ram = Ram(3)
    source = ram.read(SUMS, (40, 16), "<i4")
    rows = np.stack([source[3 + 7 * y : 3 + 7 * y + 4] for y in range(3)]).astype(np.int32)
    stream = [
        row(VtaMemory.UOP, 0, 1),
        Load(VtaMemory.ACC, 0, 3, 3, 4, 7, (1, 2), (2, 1)),
        Alu(AluOpcode.ADD, True, 0, 0, 1, 42, 1, (1, 0)),
        *all_bytes(42, 0),
    ]
    run(ram, stream, [Uop(0)])
    expected = np.pad(rows, ((1, 2), (2, 1), (0, 0))).reshape(42, 16)
    assert np.array_equal(read_words(ram, 42, 16), expected)


def test_shifts_beyond_the_field_are_found() -> None:
    """Whether the amount is in the instruction or in the accumulators."""
    ram = Ram(6)
    ram.place(SUMS, np.full((2, 16), 16, "<i4"))
    shifts = (Alu(AluOpcode.SHR, False, 0, 0, 1, 1, 1), Alu(AluOpcode.SHR, True, 17, 0, 1, 1, 1))
    for shift in shifts:
        stream = [row(VtaMemory.UOP, 0, 2), row(VtaMemory.ACC, 0, 2), shift, Finish()]
        image = assemble([stream[0], stream[1], but(shift, imm=1), stream[3]], CONFIG)
        if shift.use_imm:
            image = image[:46] + bytes([17, 0]) + image[48:]  # what no assembler gives
        ram.place(UOPS, assemble_uops([Uop(0, 1), Uop(0)], CONFIG))
        with pytest.raises(StreamError, match=r"instruction 2 .*shifts by 1[67]; the amounts are -16 to 15") as caught:
            execute(image, ram, POINTERS, CONFIG)
        assert caught.value.kind is Fault.SHIFT


def naive(i: Gemm | Alu, uops: list[Uop], inp: Ints, wgt: Ints, acc: list[list[list[int]]]) -> None:
    """The definition, one lane at a time."""
    for outer in range(i.iter_out):
        for inner in range(i.iter_in):
            for uop in uops[i.uop_begin : i.uop_end]:
                dst = uop.dst + outer * i.dst[0] + inner * i.dst[1]
                src = uop.src + outer * i.src[0] + inner * i.src[1]
                for n in range(len(acc[0])):
                    for o in range(len(acc[0][0])):
                        if isinstance(i, Alu):
                            other = i.imm if i.use_imm else acc[src][n][o]
                            acc[dst][n][o] = scalar_alu(i.opcode, acc[dst][n][o], other)
                        elif i.reset:
                            acc[dst][n][o] = 0
                        else:
                            w = uop.wgt + outer * i.wgt[0] + inner * i.wgt[1]
                            total = sum(int(a) * int(b) for a, b in zip(inp[src][n], wgt[w][o], strict=True))
                            acc[dst][n][o] = wrapped(acc[dst][n][o] + total)


@st.composite
def loops(draw: st.DrawFn) -> tuple[Gemm | Alu, list[Uop]]:
    """An instruction within the bounds of `SMALL`, and its micro-operations; often entries depend on each other."""
    kind = draw(st.sampled_from(("gemm", "alu", "alu", "reset")))
    outer, inner, count = draw(st.integers(0, 4)), draw(st.integers(0, 4)), draw(st.integers(0, 4))
    begin = draw(st.integers(0, 8))

    def factors(entries: int) -> tuple[tuple[int, int], int]:
        limit = draw(st.integers(1, entries))
        pair = (draw(st.integers(0, (limit - 1) // 6)), draw(st.integers(0, (limit - 1) // 6)))
        return pair, limit - 1 - max(0, outer - 1) * pair[0] - max(0, inner - 1) * pair[1]

    (dst, last_dst), (src, last_src), (wgt, last_wgt) = factors(32), factors(32), factors(16)
    uops = [
        Uop(draw(st.integers(0, last_dst)), draw(st.integers(0, last_src)), draw(st.integers(0, last_wgt)))
        for _ in range(begin + count)
    ]
    if kind != "alu":
        return Gemm(kind == "reset", begin, begin + count, outer, inner, dst, src, wgt), uops
    opcode, use_imm = draw(st.sampled_from(operations(SMALL))), draw(st.booleans())
    limits = (SMALL.least_shift, SMALL.most_shift) if opcode is AluOpcode.SHR else (-(2**15), 2**15 - 1)
    imm = draw(st.integers(*limits))
    return Alu(opcode, use_imm, imm, begin, begin + count, outer, inner, dst, src), uops


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(loops(), st.integers(0, 2**32 - 1))
def test_random_loops_match_the_definition(case: tuple[Gemm | Alu, list[Uop]], seed: int) -> None:
    operation, uops = case
    ram = Ram(seed)
    inp, wgt = ram.read(INPUT, (32, 2, 4), "i1"), ram.read(WEIGHTS, (16, 4, 4), "i1")
    acc = ram.read(SUMS, (32, 2, 4), "<i4").tolist()
    naive(operation, uops, inp, wgt, acc)
    given_uops = [*uops, *[Uop(0)] * (16 - len(uops))]
    stream = [
        row(VtaMemory.UOP, 0, 16),
        row(VtaMemory.ACC, 0, 32),
        row(VtaMemory.INP, 0, 32),
        row(VtaMemory.WGT, 0, 16, flags=PUSH),
        Alu(AluOpcode.ADD, True, 0, 15, 16, 32, 1, (1, 0)),
        but(operation, flags=POP),
        *all_bytes(32, 15),
    ]
    execution = run(ram, stream, given_uops, SMALL, checks=ANY_SHIFT - {Fault.HAZARD})
    assert np.array_equal(read_words(ram, 32, 8), np.array(acc).reshape(32, 8))
    steps = operation.iter_out * operation.iter_in * (operation.uop_end - operation.uop_begin)
    tiles = (execution.gemm_tiles, execution.reset_tiles, execution.alu_operations - 32 - 4 * 32)
    kind = 2 if isinstance(operation, Alu) else int(operation.reset)
    assert tiles == tuple(steps if place == kind else 0 for place in range(3))


def test_long_loops_are_cut_without_a_seam() -> None:
    """More micro-operations in one instruction than are expanded at once, cut in the inner loop too."""
    ram = Ram(4)
    x, w = ram.read(INPUT, (2048, 16), "i1").astype(np.int64), ram.read(WEIGHTS, (16, 16), "i1").astype(np.int64)
    uops = [Uop(0), Uop(1)]
    big = Gemm(False, 0, 2, 3, 16000, (0, 0), (0, 0), (0, 0), POP)
    stream = [
        row(VtaMemory.UOP, 0, 2),
        row(VtaMemory.INP, 0, 2, flags=PUSH),
        row(VtaMemory.WGT, 0, 1, flags=PUSH),
        Gemm(True, 0, 2, 1, 1, flags=POP),
        big,
        Alu(AluOpcode.ADD, True, 3, 0, 2, 5, 16001),
        *all_bytes(2, 0),
    ]
    run(ram, stream, uops)
    expected = np.tile((x[0] @ w.T) * 48000 + 3 * 5 * 16001, (2, 1))
    assert np.array_equal(read_words(ram, 2, 16), expected.astype(np.int32))


def test_a_large_layer_takes_seconds_at_most() -> None:
    uops = [Uop(h * 14 + w, h * 16 + w) for h in range(14) for w in range(14)]
    stream = [row(VtaMemory.UOP, 0, 196), row(VtaMemory.INP, 0, 1024), row(VtaMemory.WGT, 0, 128, flags=PUSH)]
    stream.append(Gemm(True, 0, 196, 4, 1, (196, 0), flags=POP))
    stream += [Gemm(False, 0, 196, 4, 9, (196, 0), (0, 1), (9, 1)) for _ in range(64)]
    stream[-1] = but(stream[-1], flags=PUSH)
    started = time.process_time()
    execution = run(Ram(), [*stream, Store(VtaMemory.OUT, 0, 0, 1, 784, 784, STORED), END], uops)
    assert execution.gemm_tiles == 451584 and time.process_time() - started < 5


# -- time


def pipeline() -> list[Instruction]:
    """Two tiles of 16 pixels: the second is loaded while the first is computed, and computed while that is stored."""
    done = Flags(pop_prev=True, push_next=True)
    return [
        row(VtaMemory.UOP, 0, 2),
        row(VtaMemory.WGT, 0, 1),
        row(VtaMemory.INP, 0, 16, 0, PUSH),
        row(VtaMemory.INP, 16, 16, 16, PUSH),
        Gemm(True, 0, 1, 16, 1, (1, 0)),
        Gemm(False, 0, 1, 16, 1, (1, 0), (1, 0), flags=done),
        Store(VtaMemory.OUT, 0, 0, 1, 16, 16, POP),
        Gemm(True, 1, 2, 16, 1, (1, 0)),
        Gemm(False, 1, 2, 16, 1, (1, 0), (1, 0), flags=done),
        Store(VtaMemory.OUT, 16, 16, 1, 16, 16, STORED),
        END,
    ]


PIPELINE_UOPS = [Uop(0, 0), Uop(16, 16)]


def test_pipeline_takes_the_cycles_counted_by_hand() -> None:
    """Instruction n is delivered at 2 (n + 1): 16 bytes at 8 per cycle. 256 bytes are 32 beats, GEMMs 6 + 16 cycles.

    0: starts 2, asks 18, bus 18-19.    1: starts 4, asks 20, bus 20-52.    2: starts 52, asks 68, bus 68-100.
    3: starts 100, asks 116, bus 116-148.   4: after 0 at 19, to 41.   5: token of 2 at 100, to 122.
    6: token of 5 at 122, asks 138, the bus is 3's until 148, 148-180.   7: 122-144.   8: token of 3 at 148, to 170.
    9: after 6 at 180, asks 196, 196-228.   10: token of 9 at 228, to 229.
    """
    ram = Ram(5)
    execution = run(ram, pipeline(), PIPELINE_UOPS)
    assert {s.index: (s.queue, s.start, s.end) for s in execution.timeline} == {
        0: ("compute", 2, 19),
        1: ("load", 4, 52),
        2: ("load", 52, 100),
        3: ("load", 100, 148),
        4: ("compute", 19, 41),
        5: ("compute", 100, 122),
        6: ("store", 122, 180),
        7: ("compute", 122, 144),
        8: ("compute", 148, 170),
        9: ("store", 180, 228),
        10: ("compute", 228, 229),
    }
    assert (execution.cycles, execution.bus_busy) == (229, 1 + 32 * 5)
    assert execution.busy == {"load": 144, "compute": 106, "store": 106}
    x, w = ram.read(INPUT, (32, 16), "i1").astype(np.int64), ram.read(WEIGHTS, (16, 16), "i1").astype(np.int64)
    assert np.array_equal(ram.read(RESULT, (32, 16), "i1"), (x @ w.T).astype(np.int8))


def test_padding_alu_and_ties_take_the_cycles_counted_by_hand() -> None:
    """0: bus 18-20, then 33 padded entries. 1 and 2 both start at 53 and ask at 69: load first.

    1: bus 69-71.   2: bus 71-72.   3: bus 88-96.
    """
    stream = [
        Load(VtaMemory.INP, 0, 0, 1, 1, 1, (1, 0), (15, 1), PUSH),
        row(VtaMemory.INP, 34, 1, flags=PUSH),
        row(VtaMemory.UOP, 0, 1, flags=POP),
        row(VtaMemory.ACC, 0, 1, flags=POP),
        Finish(),
    ]
    spans = {s.index: (s.start, s.end) for s in run(Ram(), stream, [Uop(0)]).timeline}
    assert spans == {0: (2, 53), 1: (53, 71), 2: (53, 72), 3: (72, 96), 4: (96, 97)}
    alu = [row(VtaMemory.UOP, 0, 1), row(VtaMemory.ACC, 0, 1), Alu(AluOpcode.ADD, True, 1, 0, 1, 1, 3), Finish()]
    spans = {s.index: (s.start, s.end) for s in run(Ram(), alu, [Uop(0)]).timeline}
    assert spans == {0: (2, 19), 1: (19, 43), 2: (43, 55), 3: (55, 56)}
    slow = replace(CONFIG, bus_bytes=4, bus_latency=3, pipeline_cycles=10, alu_interval=5)
    spans = {s.index: (s.start, s.end) for s in run(Ram(), alu, [Uop(0)], slow).timeline}
    assert spans == {0: (4, 8), 1: (8, 27), 2: (27, 52), 3: (52, 53)}


def test_the_fetch_waits_for_places_in_the_queues() -> None:
    """With one place per queue the second LOAD is delivered when the first ends, and the UOPs behind it too."""
    stream = [row(VtaMemory.INP, 0, 1), row(VtaMemory.INP, 1, 1), row(VtaMemory.UOP, 0, 1), Finish()]
    spans = {s.index: (s.start, s.end) for s in run(Ram(), stream, [Uop(0)]).timeline}
    assert spans == {0: (2, 20), 1: (20, 38), 2: (6, 23), 3: (23, 24)}
    spans = {s.index: (s.start, s.end) for s in run(Ram(), stream, [Uop(0)], replace(CONFIG, queue_depth=1)).timeline}
    assert spans == {0: (2, 20), 1: (20, 38), 2: (22, 39), 3: (39, 40)}


# -- the device


REGISTERS = {
    VtaRegister.UOP: UOPS,
    VtaRegister.INP: INPUT,
    VtaRegister.WGT: WEIGHTS,
    VtaRegister.ACC: SUMS,
    VtaRegister.OUT: RESULT,
}
STREAM = BASE + 0x2000


def prepare(device: VtaDevice, ram: Ram, stream: Sequence[Instruction]) -> None:
    """Set all registers for a stream; nothing starts."""
    ram.place(UOPS, assemble_uops(PIPELINE_UOPS, CONFIG))
    ram.place(STREAM, assemble(stream, CONFIG))
    registers = {**REGISTERS, VtaRegister.INSN_COUNT: len(stream), VtaRegister.INSN_ADDR: STREAM}
    for register, value in registers.items():
        device.write(register, value, 0)
        assert device.read(register, 0) == value


def pipeline_result(ram: Ram, inputs: int = INPUT) -> Ints:
    x, w = ram.read(inputs, (32, 16), "i1").astype(np.int64), ram.read(WEIGHTS, (16, 16), "i1").astype(np.int64)
    return (x @ w.T).astype(np.int8)


def test_device_holds_two_launches_with_their_own_registers() -> None:
    ram = Ram(6)
    device = VtaDevice(ram)
    prepare(device, ram, pipeline())
    assert (device.read(VtaRegister.CONTROL, 0), device.read(VtaRegister.ROOM, 0), device.next_event()) == (2, 2, None)
    device.write(VtaRegister.CONTROL, 1, 1000)
    device.write(VtaRegister.INP, INPUT + 512, 1010)
    device.write(VtaRegister.OUT, RESULT + 512, 1010)
    device.write(VtaRegister.CONTROL, 1, 1020)
    ram.bytes[STREAM - BASE : STREAM - BASE + 16] = 0xFF  # both have their instructions
    assert (device.read(VtaRegister.CONTROL, 1020), device.read(VtaRegister.ROOM, 1020), device.next_event()) == (
        1,
        0,
        1229,
    )
    with pytest.raises(SimulationError, match="launch 3 was started with all 2 places taken"):
        device.write(VtaRegister.CONTROL, 1, 1030)
    before = ram.bytes.copy()
    device.advance(1228)
    assert np.array_equal(ram.bytes, before) and not device.interrupt()
    device.advance(1229)
    assert np.array_equal(ram.read(RESULT, (32, 16), "i1"), pipeline_result(ram)) and device.interrupt()
    assert (device.read(VtaRegister.CYCLES, 1229), device.read(VtaRegister.ROOM, 1229), device.next_event()) == (
        229,
        1,
        1458,
    )
    assert device.read(VtaRegister.FINISHED, 1229) == 1 and not device.interrupt()
    device.advance(5000)
    assert np.array_equal(ram.read(RESULT + 512, (32, 16), "i1"), pipeline_result(ram, INPUT + 512))
    assert (
        device.interrupt()
        and device.read(VtaRegister.FINISHED, 5000) == 2
        and device.read(VtaRegister.CONTROL, 5000) == 2
    )
    bars = [(bar.start, bar.end, bar.label, bar.macs) for bar in device.activities()]
    assert bars == [(1000, 1229, "32 tiles", 8192), (1229, 1458, "32 tiles", 8192)]
    device.reset()
    assert device.activities() == [] and device.read(VtaRegister.FINISHED, 0) == 0 and not device.interrupt()


def test_device_names_misuse() -> None:
    ram = Ram(7)
    device = VtaDevice(ram, "vta0")
    prepare(device, ram, pipeline())
    for offset in (0x2C, 0x01):
        with pytest.raises(SimulationError, match="vta0: there is no register at offset"):
            device.read(offset, 0)
    for register in (VtaRegister.CYCLES, VtaRegister.FINISHED, VtaRegister.ROOM):
        with pytest.raises(SimulationError, match=f"{register.name} is read-only"):
            device.write(register, 0, 0)
    with pytest.raises(SimulationError, match="CONTROL was written 2"):
        device.write(VtaRegister.CONTROL, 2, 0)
    device.write(VtaRegister.INSN_COUNT, 10, 0)
    with pytest.raises(SimulationError, match="vta0 launch 1: UNFINISHED"):
        device.write(VtaRegister.CONTROL, 1, 0)
    device.write(VtaRegister.INSN_ADDR, STREAM + 2, 0)
    with pytest.raises(SimulationError, match="not a multiple of 4"):
        device.write(VtaRegister.CONTROL, 1, 0)
    device.write(VtaRegister.INSN_ADDR, BASE - 64, 0)
    with pytest.raises(SimulationError, match="no memory at 0x7fffffc0"):
        device.write(VtaRegister.CONTROL, 1, 0)
    hazard = pipeline()
    hazard[5] = but(hazard[5], dst=(0, 0))
    prepare(device, ram, hazard)
    device.write(VtaRegister.CONTROL, 1, 0)
    with pytest.raises(SimulationError, match=r"vta0 launch 1: HAZARD: instruction 5 \(GEMM"):
        device.advance(229)
    with pytest.raises(TargetError, match="block must be a power of two"):
        VtaDevice(ram, block=3)
    assert VtaDevice(ram, queue_depth=8, bus_latency=1).config == VtaConfig(queue_depth=8, bus_latency=1)
