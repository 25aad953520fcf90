"""What every core does in the simulator, whatever its instruction set: devices beside it, wfi, run-time functions."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from dovetail.codegen.build.elf import symbols
from dovetail.sim.worker import simulate
from firmware import DMA, TIMER, build, chip

ARM = ("cortex-m0plus", "cortex-m3", "cortex-m4", "cortex-m7", "cortex-m23", "cortex-m33", "cortex-m55")
CORES = ("rv32imc", "rv32imac", "rv64gc", *ARM)
APART, TOGETHER = "const volatile int64_t *const", "const int64_t *const"
"""Reads that keep / and % from sharing one division, and those that let them (as Arm's run-time functions do)."""


@pytest.mark.parametrize("isa", CORES)
def test_core_and_dma_work_at_the_same_time(tmp_path: Path, isa: str) -> None:
    elf = build(
        tmp_path,
        """
    uint8_t out[2]; uint8_t far_[4096] = {1};
    static uint8_t near_[4096] __attribute__((section(".l1")));
    int main(void) {
        for (;;) {
            READY();
            near_[0] = 9;
            far_[0] = 1;
            const uint32_t ticket = dma_copy_1d(near_, far_, 4096u);
            out[0] = *(volatile uint8_t *)near_;
            for (volatile uint32_t i = 0; i < 20u; i++) { }
            dma_wait(ticket);
            out[1] = near_[0];
            DONE();
        }
    }""",
        isa=isa,
    )
    (run,) = simulate(chip(elf, DMA, isa=isa), [{}], {"out": 2}, instruction_limit=100_000).inferences
    assert run.outputs["out"] == bytes([9, 1])  # stale before the transfer's end
    (copy,) = run.activities["dma"]
    assert copy.end - copy.start == 16 + 4096 // 8
    assert run.total_cycles is not None and run.core_cycles is not None and run.idle_cycles is not None
    assert run.idle_cycles > 100
    assert copy.end - copy.start < run.total_cycles < copy.end - copy.start + run.core_cycles


@pytest.mark.parametrize("isa", CORES)
def test_waking_up_takes_as_long_as_the_timer(tmp_path: Path, isa: str) -> None:
    elf = build(
        tmp_path,
        """
    int main(void) {
        const uint32_t start = dovetail_mmio_read(DOVETAIL_SIM_CYCLES_LOW);
        dovetail_mmio_write(0x1A200000u, 5000u);
        dovetail_wait_for_interrupt();
        exit_with(dovetail_mmio_read(DOVETAIL_SIM_CYCLES_LOW) - start);
        for (;;) { dovetail_wait_for_interrupt(); }
    }""",
        isa=isa,
    )
    exit_code = simulate(chip(elf, TIMER, isa=isa), [], {}, instruction_limit=100_000).exit_code
    assert exit_code is not None and 5000 <= exit_code < 5050


def arithmetic(a: int, b: int, s: int) -> list[int]:
    """What C computes from int64 a, b and a shift."""
    u, v = a % 2**64, b % 2**64
    quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    return [quotient, a - quotient * b, u // v, u % v, u << s, u >> s, a >> s, u * v]


@pytest.mark.parametrize(("isa", "pointer"), [("rv32imc", APART), *((core, TOGETHER) for core in ARM)])
def test_runtime_functions_against_python(tmp_path: Path, isa: str, pointer: str) -> None:
    elf = build(
        tmp_path,
        """
    int64_t in[3]; int64_t out[8]; uint8_t memory[104];
    void *memmove(void *, const void *, unsigned);
    int main(void) {
        for (;;) {
            READY();
            POINTER v64 = in;
            const int64_t a = v64[0], b = v64[1]; const uint64_t u = (uint64_t)a, v = (uint64_t)b;
            const uint32_t s = (uint32_t)in[2] & 63u, n = (uint32_t)in[2] >> 8 & 31u, k = (uint32_t)in[2] >> 16 & 7u;
            out[0] = a / b; out[1] = v64[0] % v64[1];
            out[2] = (int64_t)(u / v); out[3] = (int64_t)((uint64_t)v64[0] % (uint64_t)v64[1]);
            out[4] = (int64_t)(u << s); out[5] = (int64_t)(u >> s); out[6] = a >> s; out[7] = (int64_t)(u * v);
            __builtin_memset(memory + k, 0x11 + (int)k, n);
            __builtin_memcpy(memory + 40 + (k ^ 3u), in, n & 15u);
            memmove(memory + 60 + k, memory + 62, n);
            __builtin_memset(memory + 100, 0, n & 3u);
            DONE();
        }
    }""".replace("POINTER", pointer),
        isa=isa,
    )
    generator = random.Random(5)
    triples = [
        (
            generator.choice([-1, 1]) * generator.getrandbits(generator.randrange(1, 64)),
            generator.choice([-1, 1]) * (generator.getrandbits(generator.randrange(1, 64)) | 1),
            generator.getrandbits(24),
        )
        for _ in range(120)
    ]
    inputs = [{"in": struct.pack("<qqq", *triple)} for triple in triples]
    runs = simulate(chip(elf, isa=isa), inputs, {"out": 64, "memory": 104}).inferences
    memory = bytearray(104)
    for (a, b, c), content, run in zip(triples, inputs, runs, strict=True):
        assert struct.unpack("<8Q", run.outputs["out"]) == tuple(x % 2**64 for x in arithmetic(a, b, c & 63))
        n, k = c >> 8 & 31, c >> 16 & 7
        memory[k : k + n] = bytes([0x11 + k]) * n
        start = 40 + (k ^ 3)
        memory[start : start + (n & 15)] = content["in"][: n & 15]
        memory[60 + k : 60 + k + n] = memory[62 : 62 + n]
        memory[100 : 100 + (n & 3)] = bytes(n & 3)
        assert run.outputs["memory"] == bytes(memory)


@pytest.mark.parametrize("isa", CORES)
def test_initialised_data_is_copied_to_another_memory(tmp_path: Path, isa: str) -> None:
    elf = build(
        tmp_path,
        """
    volatile uint32_t values[3] = {7, 8, 9}; volatile uint32_t zero;
    int main(void) { exit_with(values[0] + values[1] * 100u + values[2] * 10000u + zero); return 0; }""",
        data="l1",
        isa=isa,
    )
    assert symbols(elf)["values"].address >> 16 == 0x1000
    assert simulate(chip(elf, isa=isa), [], {}).exit_code == 90807
