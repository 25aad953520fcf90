"""Cortex-M in the instruction-set simulator: interrupts, wfi, devices, run-time functions, faults."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dovetail.codegen.emit import write_project
from dovetail.compile import Options, compile_model, sample_inputs
from dovetail.errors import BuildError, SimulationError, TargetError
from dovetail.guests import zoo
from dovetail.ir.graph import evaluate
from dovetail.run import open_build, run_build
from dovetail.sim.device import DeviceSpec
from dovetail.sim.worker import simulate
from dovetail.target import Core
from dovetail.targets import load_target
from firmware import DMA, TIMER, build, chip

CORES = ("cortex-m4", "cortex-m7", "cortex-m33")


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
    elf = build(
        tmp_path,
        HANDLER
        + """
    int main(void) {
        __asm__ volatile("cpsie i" ::: "memory");
        dovetail_mmio_write(0x1A200000u, 300u);
        uint32_t turns = 0;
        while (calls < 3u) { turns++; }
        exit_with(seen == 16u && rings == 3u && turns > 100u ? 1u : 2u);
        for (;;) { }
    }""",
        isa="cortex-m4",
    )
    setup = chip(elf, TIMER, isa="cortex-m4")
    assert simulate(setup, [], {}, instruction_limit=100_000).exit_code == 1


@pytest.mark.parametrize(
    ("enable", "calls"),
    [
        ('__asm__ volatile("cpsie i" ::: "memory");', 1),
        ('dovetail_mmio_write(0xE000E180u, 1u); __asm__ volatile("cpsie i" ::: "memory");', 0),
        (
            'dovetail_mmio_write(0xE000E180u, 1u); __asm__ volatile("cpsie i" ::: "memory");'
            'dovetail_mmio_write(0xE000E100u, 1u);__asm__ volatile("b 1f\\n1:");',
            1,
        ),
    ],
)
def test_an_interrupt_waits_until_it_is_enabled(tmp_path: Path, enable: str, calls: int) -> None:
    elf = build(
        tmp_path,
        HANDLER
        + f"""
    int main(void) {{
        dovetail_mmio_write(0x1A200000u, 10u);
        for (volatile uint32_t i = 0; i < 50u; i++) {{ }}
        const uint32_t before = calls;
        {enable}
        const uint32_t after = calls;
        exit_with(before * 10u + after);
        for (;;) {{ }}
    }}""",
        isa="cortex-m4",
    )
    assert simulate(chip(elf, TIMER, isa="cortex-m4"), [], {}, instruction_limit=100_000).exit_code == calls


DEEP = """
static uint32_t deep(volatile uint32_t *above, uint32_t left)
{
    volatile uint32_t here[16];
    here[0] = left + above[0];
    return left == 0u ? here[0] : deep(here, left - 1u) + here[0];
}
int main(void) { volatile uint32_t none = 0; exit_with(deep(&none, 200u)); return 0; }
"""


@pytest.mark.parametrize(
    ("isa", "words"), [("cortex-m4", "bad write"), ("cortex-m7", "bad write"), ("cortex-m33", "stack limit passed")]
)
def test_a_stack_that_overflows_is_noticed(tmp_path: Path, isa: str, words: str) -> None:
    elf = build(tmp_path, DEEP, stack_bytes=1024, isa=isa)
    with pytest.raises(SimulationError, match=words):
        simulate(chip(elf, isa=isa), [], {}, instruction_limit=1_000_000)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('__asm__ volatile("svc 0");', "exception SVC"),
        ('__asm__ volatile("bkpt 0");', "exception BKPT"),
        ('__asm__ volatile("udf 0");', "stopped"),
        ("dovetail_mmio_write(0xE000E400u, 1u);", "no register at offset 0x400"),
        ("dovetail_wait_for_interrupt();", "deadlock"),
        ("*(volatile uint32_t *)0x30000000u = 1u;", "bad write of 4 bytes at 0x30000000"),
        ("((void (*)(void))0x30000001u)();", "bad instruction fetch of 2 bytes at 0x30000000"),
    ],
)
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
    device = DeviceSpec("dovetail.sim.dma:DmaDevice", 0xE000E800, 64)
    with pytest.raises(SimulationError, match="'system control space' at 0xe000e800"):
        simulate(chip(elf, device, isa="cortex-m4"), [], {})


def test_a_cost_of_no_class_of_instructions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="'mul', which is no class"):
        run_arm_target("digits", tmp_path, Core("cortex-m4", costs={"mul": 2}))
