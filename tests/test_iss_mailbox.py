"""The simulated chip with several cores: when jobs begin and end, how long waits take, stacks, and mistakes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from dovetail.codegen.build.instruction_sets import instruction_set
from dovetail.codegen.build.toolchain import compile_firmware
from dovetail.codegen.emit.firmware import CORES, RUNTIME, linker_script, runtime_path
from dovetail.errors import SimulationError
from dovetail.sim.mailbox import LATENCY, PLACES
from dovetail.sim.protocol import InferenceResult, SimulationResult, SimulationSetup
from dovetail.sim.worker import simulate
from firmware import MEMORIES, PROLOGUE, require_cross_compiler

STACK = 1024
COSTS = {"alu": 2, "load": 2, "store": 2, "branch_taken": 6, "branch_not_taken": 2, "jump": 4, "load_use": 2}
HEAD = """
#include "cores.h"
volatile uint32_t seen[4];
#define SPIN(times) for (volatile uint32_t turn = 0; turn < (times); turn++) { }
"""


def firmware(folder: Path, source: str, workers: int, isa: str = "rv32imc") -> Path:
    """Compile C, after HEAD, for a chip with further cores."""
    require_cross_compiler(isa)
    start = instruction_set(isa).start
    for name in (start, *RUNTIME, *CORES, "dma.h"):
        (folder / name).write_bytes(runtime_path(name).read_bytes())
    (folder / "main.c").write_text(PROLOGUE + HEAD + source)
    script = linker_script(
        MEMORIES, text="l2", data="l2", stack="l1", stack_bytes=STACK, isa=isa, worker_stacks=[STACK] * workers
    )
    (folder / "link.ld").write_text(script)
    return compile_firmware(
        folder,
        [Path(name) for name in (start, "dovetail_rt.c", "cores.c", "main.c")],
        linker_script=Path("link.ld"),
        isa=isa,
        defines={"DOVETAIL_SIM": 1, "DOVETAIL_MAILBOX": "0x1A010000"},
    )


def run(
    folder: Path,
    source: str,
    *workers: dict[str, int],
    isa: str = "rv32imc",
    limit: int = 10_000_000,
) -> SimulationResult:
    """One inference of it."""
    elf = firmware(folder, source, len(workers), isa)
    setup = SimulationSetup(elf, MEMORIES, (), isa, workers=workers)
    return simulate(setup, [{}], {"seen": 16}, instruction_limit=limit)


def words(result: InferenceResult) -> list[int]:
    content = result.outputs["seen"]
    return [int.from_bytes(content[place : place + 4], "little") for place in range(0, 16, 4)]


BARRIER = """
static void brief(void) { SPIN(200u) seen[core_id()] = 1u + core_id(); }
static void lengthy(void) { SPIN(3000u) seen[core_id()] = 1u + core_id(); }
int main(void) {
    for (;;) {
    READY();
    const uint32_t one = core_start(1u, brief), two = core_start(2u, lengthy);
    SPIN(1000u)
    core_wait(1u, one);
    core_wait(2u, two);
    DONE();
    }
}
"""


@pytest.mark.parametrize("isa", ["rv32imc", "cortex-m4"])
def test_a_parallel_section_takes_the_slowest_core_and_the_start_and_the_barrier(tmp_path: Path, isa: str) -> None:
    result = run(tmp_path, BARRIER, {}, {}, isa=isa).inferences[0]
    (brief,), (lengthy,) = result.activities["core1"], result.activities["core2"]
    assert words(result)[1:3] == [2, 3]
    assert result.total_cycles is not None and result.idle_cycles is not None
    longest = lengthy.end - lengthy.start
    assert brief.end - brief.start < longest / 10
    overhead = result.total_cycles - longest
    print(f"{isa}: slowest job {longest} cycles, section {result.total_cycles}: start and barrier {overhead}")
    assert 2 * LATENCY <= overhead <= 300
    assert lengthy.end + LATENCY <= result.total_cycles
    assert brief.start < lengthy.start < brief.end, "they run at the same time"
    assert result.idle_cycles > longest / 2


def test_a_core_with_other_costs_takes_its_own_time(tmp_path: Path) -> None:
    source = BARRIER.replace("lengthy);", "brief);")
    result = run(tmp_path, source, {}, COSTS).inferences[0]
    (one,), (two,) = result.activities["core1"], result.activities["core2"]
    assert one.instructions == two.instructions > 200
    assert 1.9 * (one.end - one.start) <= two.end - two.start <= 2.1 * (one.end - one.start)


def test_jobs_of_a_core_run_one_after_another_and_more_than_there_are_places(tmp_path: Path) -> None:
    source = f"""
    static void next(void) {{ seen[1] = seen[1] * 3u + 1u; seen[2]++; }}
    int main(void) {{
        for (;;) {{
        READY();
        uint32_t last = 0u;
        for (uint32_t turn = 0; turn < {2 * PLACES + 5}u; turn++) {{ last = core_start(1u, next); }}
        core_wait(1u, last);
        seen[3] = last;
        DONE();
        }}
    }}"""
    result = run(tmp_path, source, {}).inferences[0]
    expected, count = 0, 2 * PLACES + 5
    for _ in range(count):
        expected = (expected * 3 + 1) % (1 << 32)
    assert words(result)[1:] == [expected, count, count]
    jobs = result.activities["core1"]
    assert len(jobs) == count and jobs[0].label == "next"
    assert all(one.end <= two.start for one, two in pairwise(jobs))


def test_a_core_waits_for_another_one_while_core_0_goes_on(tmp_path: Path) -> None:
    source = BARRIER.replace(
        "core_start(1u, brief), two = core_start(2u, lengthy);",
        """core_start(2u, lengthy);
        core_after(1u, 2u, one);
        const uint32_t two = core_start(1u, brief); seen[3] = seen[2];""",
    )
    source = source.replace("core_wait(1u, one)", "core_wait(1u, two)").replace(
        "core_wait(2u, two)", "core_wait(2u, one)"
    )
    result = run(tmp_path, source, {}, {}).inferences[0]
    (brief,), (lengthy,) = result.activities["core1"], result.activities["core2"]
    assert words(result)[1:] == [2, 3, 0], "core 0 went on before the long job had ended"
    assert lengthy.end + LATENCY <= brief.start <= lengthy.end + LATENCY + 20


@pytest.mark.parametrize("isa", ["rv32imc", "cortex-m33"])
def test_the_stack_of_every_core_is_measured_and_an_overflow_named(tmp_path: Path, isa: str) -> None:
    source = """
    static void deep(void) {
        volatile uint8_t big[%d];
        for (uint32_t i = 0; i < sizeof big; i++) { big[i] = 1u; }
        seen[1] = big[5];
    }
    int main(void) { for (;;) { READY(); core_wait(2u, core_start(2u, deep)); DONE(); } }
    """
    used = run(tmp_path, source % 600, {}, {}, isa=isa)
    assert used.stack_bytes is not None and used.stack_bytes < 300
    first, second = used.worker_stack_bytes
    assert first is not None and second is not None and first < 200 and 600 <= second <= 800
    with pytest.raises(SimulationError, match="stack of core 2: all of its 1024 bytes"):
        run(tmp_path, source % 1100, {}, {}, isa=isa)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("static void f(void) { for (;;) { } }", "core1: a job executed too many instructions"),
        (
            "static void f(void) { *(volatile uint32_t *)0x50000000u = 1u; }",
            "core1: bad write of 4 bytes at 0x50000000",
        ),
        (
            "static void f(void) { dovetail_mmio_write(0x1A010014u, 1u); }",
            "mailbox: core1: write of offset 0x14 by core1",
        ),
        ("static void f(void) { core_start(3u, f); }", "by core1: there is no such register"),
    ],
)
def test_mistakes_of_jobs_are_named_with_their_core(tmp_path: Path, source: str, message: str) -> None:
    main = "int main(void) { READY(); core_wait(1u, core_start(1u, f)); DONE(); for (;;) { } }"
    with pytest.raises(SimulationError) as caught:
        run(tmp_path, f"{source}\n{main}", {}, limit=100_000)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("core_wait(4u, core_start(4u, f));", "mailbox: there is no core for offset 0x58: the chip has 2"),
        ("core_wait(1u, 1u);", "deadlock"),
        ("core_after(1u, 1u, core_start(1u, f));", "core1: its next job is held back by job 1 of core1"),
        ("core_after(1u, 2u, 1u);", "mailbox: there is no core for offset 0x30: the chip has 2"),
        ("dovetail_mmio_write(0x1A010024u, 1u);", "mailbox: write of 0x1 to offset 0x24 by core 0"),
    ],
)
def test_mistakes_of_core_0_are_named(tmp_path: Path, statement: str, message: str) -> None:
    source = f"void f(void); void f(void) {{ }} int main(void) {{ READY(); {statement} DONE(); for (;;) {{ }} }}"
    with pytest.raises(SimulationError) as caught:
        run(tmp_path, source, {})
    assert message in str(caught.value)
