"""Cortex-M in the instruction-set simulator: interrupts, wfi, devices, run-time functions, faults."""

from __future__ import annotations

import random
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dovetail import zoo
from dovetail.build.elf import symbols
from dovetail.compile import Options, compile_model, sample_inputs
from dovetail.emit import write_project
from dovetail.errors import BuildError, SimulationError, TargetError
from dovetail.graph.graph import evaluate
from dovetail.run import open_build, run_build
from dovetail.simulate.iss import simulate
from dovetail.simulate.protocol import DeviceSpec
from dovetail.target import Core
from dovetail.targets import load_target
from firmware import DMA, TIMER, build, chip
from test_iss import arithmetic

CORES = ("cortex-m4", "cortex-m7", "cortex-m33")


@pytest.mark.parametrize("isa", CORES)
def test_waking_up_takes_as_long_as_the_timer(tmp_path: Path, isa: str) -> None:
    elf = build(tmp_path, """
    int main(void) {
        const uint32_t start = dovetail_mmio_read(DOVETAIL_SIM_CYCLES_LOW);
        dovetail_mmio_write(0x1A200000u, 5000u);
        dovetail_wait_for_interrupt();
        exit_with(dovetail_mmio_read(DOVETAIL_SIM_CYCLES_LOW) - start);
        for (;;) { dovetail_wait_for_interrupt(); }
    }""", isa=isa)
    exit_code = simulate(chip(elf, TIMER, isa=isa), [], {}, instruction_limit=100_000).exit_code
    assert exit_code is not None and 5000 <= exit_code < 5050


HANDLER = """
static volatile uint32_t rings, seen, calls;
void dovetail_interrupt(void);
void dovetail_interrupt(void)
{
    uint32_t number;
    __asm__ volatile("mrs %0, ipsr" : "=r"(number));
    seen = number;
    rings = dovetail_mmio_read(0x1A200000u);
    calls++;
    if (calls < 3u) { dovetail_mmio_write(0x1A200000u, 300u); }
}
"""


def test_interrupts_reach_the_handler_and_return(tmp_path: Path) -> None:
    elf = build(tmp_path, HANDLER + """
    int main(void) {
        __asm__ volatile("cpsie i" ::: "memory");
        dovetail_mmio_write(0x1A200000u, 300u);
        uint32_t turns = 0;
        while (calls < 3u) { turns++; }
        exit_with(seen == 16u && rings == 3u && turns > 100u ? 1u : 2u);
        for (;;) { }
    }""", isa="cortex-m4")
    for native in (True, False):
        setup = chip(elf, TIMER, native_hook=native, isa="cortex-m4")
        assert simulate(setup, [], {}, instruction_limit=100_000).exit_code == 1


@pytest.mark.parametrize(("enable", "calls"), [
    ("__asm__ volatile(\"cpsie i\" ::: \"memory\");", 1),
    ("dovetail_mmio_write(0xE000E180u, 1u); __asm__ volatile(\"cpsie i\" ::: \"memory\");", 0),
    ("dovetail_mmio_write(0xE000E180u, 1u); __asm__ volatile(\"cpsie i\" ::: \"memory\");"
     "dovetail_mmio_write(0xE000E100u, 1u);__asm__ volatile(\"b 1f\\n1:\");", 1),
])
def test_an_interrupt_waits_until_it_is_enabled(tmp_path: Path, enable: str, calls: int) -> None:
    elf = build(tmp_path, HANDLER + f"""
    int main(void) {{
        dovetail_mmio_write(0x1A200000u, 10u);
        for (volatile uint32_t i = 0; i < 50u; i++) {{ }}
        const uint32_t before = calls;
        {enable}
        const uint32_t after = calls;
        exit_with(before * 10u + after);
        for (;;) {{ }}
    }}""", isa="cortex-m4")
    assert simulate(chip(elf, TIMER, isa="cortex-m4"), [], {}, instruction_limit=100_000).exit_code == calls


@pytest.mark.parametrize("isa", CORES)
def test_core_and_dma_work_at_the_same_time(tmp_path: Path, isa: str) -> None:
    elf = build(tmp_path, """
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
    }""", isa=isa)
    runs = [simulate(chip(elf, DMA, native_hook=native, isa=isa), [{}], {"out": 2}, instruction_limit=100_000)
            for native in (True, False)]
    assert runs[0] == runs[1]
    run = runs[0].inferences[0]
    assert run.outputs["out"] == bytes([9, 1])  # stale before the transfer's end
    (copy,) = run.activities["dma"]
    assert copy.end - copy.start == 16 + 4096 // 8
    assert run.total_cycles is not None and run.core_cycles is not None and run.idle_cycles is not None
    assert run.idle_cycles > 100
    assert copy.end - copy.start < run.total_cycles < copy.end - copy.start + run.core_cycles


@pytest.mark.parametrize("isa", CORES)
def test_runtime_functions_against_python(tmp_path: Path, isa: str) -> None:
    elf = build(tmp_path, """
    int64_t in[3]; int64_t out[8]; uint8_t memory[104];
    void *memmove(void *, const void *, unsigned);
    int main(void) {
        for (;;) {
            READY();
            const int64_t a = in[0], b = in[1]; const uint64_t u = (uint64_t)a, v = (uint64_t)b;
            const uint32_t s = (uint32_t)in[2] & 63u, n = (uint32_t)in[2] >> 8 & 31u, k = (uint32_t)in[2] >> 16 & 7u;
            out[0] = a / b; out[1] = a % b; out[2] = (int64_t)(u / v); out[3] = (int64_t)(u % v);
            out[4] = (int64_t)(u << s); out[5] = (int64_t)(u >> s); out[6] = a >> s; out[7] = (int64_t)(u * v);
            __builtin_memset(memory + k, 0x11 + (int)k, n);
            __builtin_memcpy(memory + 40 + (k ^ 3u), in, n & 15u);
            memmove(memory + 60 + k, memory + 62, n);
            __builtin_memset(memory + 100, 0, n & 3u);
            DONE();
        }
    }""", isa=isa)
    generator = random.Random(5)
    triples = [(generator.choice([-1, 1]) * generator.getrandbits(generator.randrange(1, 64)),
                generator.choice([-1, 1]) * (generator.getrandbits(generator.randrange(1, 64)) | 1),
                generator.getrandbits(24)) for _ in range(80)]
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


def test_initialised_data_is_copied_to_another_memory(tmp_path: Path) -> None:
    elf = build(tmp_path, """
    volatile uint32_t values[3] = {7, 8, 9}; volatile uint32_t zero;
    int main(void) { exit_with(values[0] + values[1] * 100u + values[2] * 10000u + zero); return 0; }""", data="l1",
                isa="cortex-m4")
    assert symbols(elf)["values"].address >> 16 == 0x1000
    assert simulate(chip(elf, isa="cortex-m4"), [], {}).exit_code == 90807


DEEP = """
static uint32_t deep(volatile uint32_t *above, uint32_t left)
{
    volatile uint32_t here[16];
    here[0] = left + above[0];
    return left == 0u ? here[0] : deep(here, left - 1u) + here[0];
}
int main(void) { volatile uint32_t none = 0; exit_with(deep(&none, 200u)); return 0; }
"""


@pytest.mark.parametrize(("isa", "words"), [
    ("cortex-m4", "bad write"), ("cortex-m7", "bad write"), ("cortex-m33", "stack limit passed")])
def test_a_stack_that_overflows_is_noticed(tmp_path: Path, isa: str, words: str) -> None:
    elf = build(tmp_path, DEEP, stack_bytes=1024, isa=isa)
    with pytest.raises(SimulationError, match=words):
        simulate(chip(elf, isa=isa), [], {}, instruction_limit=1_000_000)


@pytest.mark.parametrize(("body", "words"), [
    ("__asm__ volatile(\"svc 0\");", "exception SVC"),
    ("__asm__ volatile(\"bkpt 0\");", "exception BKPT"),
    ("__asm__ volatile(\"udf 0\");", "stopped"),
    ("dovetail_mmio_write(0xE000E400u, 1u);", "no register at offset 0x400"),
    ("dovetail_wait_for_interrupt();", "deadlock"),
    ("*(volatile uint32_t *)0x30000000u = 1u;", "bad write of 4 bytes at 0x30000000"),
    ("((void (*)(void))0x30000001u)();", "bad instruction fetch of 2 bytes at 0x30000000"),
])
def test_faults_are_said(tmp_path: Path, body: str, words: str) -> None:
    elf = build(tmp_path, f"int main(void) {{ {body} return 0; }}", isa="cortex-m4")
    with pytest.raises(SimulationError) as caught:
        simulate(chip(elf, DMA, isa="cortex-m4"), [], {}, instruction_limit=100_000)
    assert words in str(caught.value) and "main" in str(caught.value)


def test_firmware_for_another_core_is_refused(tmp_path: Path) -> None:
    elf = build(tmp_path, "int main(void) { return 0; }", isa="cortex-m4")
    with pytest.raises((BuildError, SimulationError), match="for EM_ARM"):
        simulate(chip(elf), [], {})


def run_arm_target(name: str, folder: Path, core: Core) -> None:
    """The NE16 chip with another core: compile a network of the zoo, run it, compare with its integer graph."""
    model = folder / f"{name}.onnx"
    model.write_bytes(zoo.build(name))
    target = replace(load_target("ne16"), core=core)
    compiled = compile_model(model, target, Options())
    assert any(region.engine is not None for region in compiled.regions)
    write_project(compiled.project, folder / "build", replace=True)
    given = sample_inputs(compiled.graph)
    result = run_build(open_build(folder / "build", target), "iss", [given])
    for value, expected in evaluate(compiled.graph, given).items():
        if value in compiled.graph.outputs:
            np.testing.assert_array_equal(result.outputs[0][value], expected)
    inference = result.simulation.inferences[0]
    assert inference.activities["ne16"] and inference.activities["dma"] and inference.idle_cycles


@pytest.mark.parametrize("isa", CORES)
def test_engine_and_core_are_independent(tmp_path: Path, isa: str) -> None:
    run_arm_target("digits", tmp_path, Core(isa))


def test_devices_share_no_page_with_the_core_s_own_registers(tmp_path: Path) -> None:
    elf = build(tmp_path, "int main(void) { return 0; }", isa="cortex-m4")
    device = DeviceSpec("dovetail.simulate.dma:DmaDevice", 0xE000E800, 64)
    with pytest.raises(SimulationError, match="overlap at 0xe000e800"):
        simulate(chip(elf, device, isa="cortex-m4"), [], {})


def test_a_cost_of_no_class_of_instructions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="'mul', which is no class"):
        run_arm_target("digits", tmp_path, Core("cortex-m4", costs={"mul": 2}))
