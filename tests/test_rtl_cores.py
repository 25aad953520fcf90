"""Firmware on published cores' RTL: outputs, instructions and cycles against the instruction-set simulator's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import core_v
from dovetail import prove
from dovetail.arrays import seeded_inputs
from dovetail.codegen.emit import write_project
from dovetail.compile import Options, compile_graph, prepare, sample_inputs
from dovetail.errors import DovetailError, MissingExtraError, SimulationError
from dovetail.guests.zoo import build as zoo_model
from dovetail.ir.graph import Graph, evaluate
from dovetail.ir.types import Array
from dovetail.run import ProjectBuild, RunResult, open_build, run_build
from dovetail.sim.core_rtl import CORES, build_core, core_rtl
from dovetail.sim.protocol import SimulationSetup
from dovetail.sim.worker import simulate
from dovetail.target import costs
from dovetail.targets import load_target
from firmware import build, chip
from oracles import references
from test_rtl import needs_verilator

pytestmark = [pytest.mark.rtl, needs_verilator]

COSTS = {
    "cv32e40p": costs.CV32E40P,
    "cv32e40p-pulp": costs.CV32E40P,
    "ibex": costs.IBEX,
    "picorv32": costs.PICORV32,
    "vexriscv": {},
}
AD, DSCNN, RESNET8, VWW = "ad_autoencoder", "kws_dscnn", "ic_resnet8", "vww_mobilenetv1"


def require_core(core: str) -> None:
    """Skip the test where the core's package is not installed."""
    try:
        core_rtl(core).design()
    except MissingExtraError as missing:
        pytest.skip(str(missing))


def compiled(
    name: str, target: str, folder: Path, shared: Path | None, whole: bool = False
) -> tuple[Graph, ProjectBuild]:
    """A network of the zoo, or of ../shared, as a build; `whole` with its dead channels."""
    path = folder / "digits.onnx"
    path.write_bytes(zoo_model("digits"))
    if name != "digits":
        assert shared is not None
        path = shared / f"models/mlperf_tiny/{name}_int8.tflite"
    machine = load_target(target)
    options = Options(keep_dead=whole)
    graph = prepare(path, machine, options)
    write_project(compile_graph(graph, machine, options).project, folder / "build", replace=True)
    return graph, open_build(folder / "build", machine)


def expected(name: str, graph: Graph) -> tuple[Mapping[str, Array], Mapping[str, Array]]:
    """Inputs, and the outputs of TensorFlow Lite Micro where there are some, else of the integer graph."""
    if name == "digits":
        given = sample_inputs(graph)
        results = evaluate(graph, given)
        return given, {one: results[one] for one in graph.outputs}
    stored = references(name)
    return {graph.inputs[0]: stored["in_0"]}, {graph.outputs[0]: stored["out_0__tflm"]}


def both(
    name: str, target: str, core: str, folder: Path, shared: Path, whole: bool = False
) -> tuple[RunResult, RunResult]:
    """A network on the simulator with the core's set of costs and on the core, its outputs looked at on both."""
    require_core(core)
    graph, made = compiled(name, target, folder, shared, whole)
    isa = CORES[core].isa or made.target.core.isa
    own = replace(made.target, core=replace(made.target.core, isa=isa, costs=COSTS[core]))
    given, outputs = expected(name, graph)
    results = run_build(replace(made, target=own), "iss", [given]), run_build(made, "rtl", [given], core=core)
    for result in results:
        for output, values in outputs.items():
            assert np.array_equal(result.outputs[0][output].ravel(), values.ravel()), output
    return results


def layers(result: RunResult) -> list[tuple[int, int, int]]:
    """Number, cycles and instructions of each layer."""
    markers = result.simulation.inferences[0].markers
    return [(m.layer, m.end_cycle - m.start_cycle, m.end_instruction - m.start_instruction) for m in markers]


def error(simulated: RunResult, core: RunResult) -> float:
    """How far the simulator's cycles are from the core's, relative to these; instructions are the same."""
    one, other = simulated.simulation.inferences[0], core.simulation.inferences[0]
    assert one.instructions == other.instructions
    assert [layer[::2] for layer in layers(simulated)] == [layer[::2] for layer in layers(core)]
    return abs(one.total_cycles - other.total_cycles) / other.total_cycles


@pytest.mark.parametrize("name", ["digits", AD, DSCNN, RESNET8])
def test_cv32e40p(shared: Path, tmp_path: Path, name: str) -> None:
    simulated, core = both(name, "riscv", "cv32e40p", tmp_path, shared)
    off = error(simulated, core)
    print(f"{name} on CV32E40P: {core.simulation.inferences[0].total_cycles} cycles, off by {off:.5%}")
    assert off <= 0.001
    for (number, own, _), (_, real, _) in zip(layers(simulated), layers(core), strict=True):
        assert abs(own - real) <= max(0.005 * real, 2), (number, own, real)


MOST_PER_MAC = {AD: 0.60, DSCNN: 1.0, RESNET8: 0.60, VWW: 1.15}
"""Instructions per multiply-accumulate of a whole network, dead channels included, with the CORE-V instructions."""


@pytest.mark.parametrize("name", MOST_PER_MAC)
def test_the_instructions_of_core_v(shared: Path, tmp_path: Path, name: str) -> None:
    """`riscv_xpulp` on CV32E40P with its PULP instructions."""
    simulated, core = both(name, "riscv_xpulp", "cv32e40p-pulp", tmp_path, shared, whole=True)
    off = error(simulated, core)
    work = sum(layer.macs for layer in core.build.manifest.layers)
    instructions = core.simulation.inferences[0].instructions or 0
    per_mac, cycles = instructions / work, core.simulation.inferences[0].total_cycles
    print(f"{name} with CORE-V on the RTL: {instructions} instructions, {per_mac:.3f} per MAC, {cycles} cycles")
    print(f"cycles off by {off:.5%}")
    assert off <= 0.001
    assert per_mac <= MOST_PER_MAC[name]
    if name == AD:
        with pytest.raises(SimulationError, match="the core has trapped"):
            run_build(core.build, "rtl", [seeded_inputs(core.build.manifest.inputs)], core="cv32e40p")


def test_random_instructions_of_core_v(tmp_path: Path) -> None:
    """Registers, memory, instructions and cycles of random programs, hardware loops included, as on the RTL."""
    require_core("cv32e40p-pulp")
    library, extension = build_core("cv32e40p-pulp"), load_target("riscv_xpulp").core.extension
    for seed in range(4):
        (tmp_path / str(seed)).mkdir()
        elf = build(tmp_path / str(seed), core_v.program(seed), assembler=True)
        setup = replace(chip(elf), costs=COSTS["cv32e40p-pulp"], extension=extension)
        core = replace(setup, core_rtl="cv32e40p-pulp", core_library=library)
        mine, real = (simulate(one, [{}], {"stamps": 4 * core_v.RESULTS}).inferences[0] for one in (setup, core))
        words = [np.frombuffer(one.outputs["stamps"], "<u4") for one in (mine, real)]
        runs = [one[: core_v.RESULTS - 2 * core_v.WORDS].reshape(6, -1).astype(np.int64) for one in words]
        assert mine.instructions == real.instructions
        assert np.array_equal(words[0][-2 * core_v.WORDS :], words[1][-2 * core_v.WORDS :])
        assert np.array_equal(runs[0][:, 2:], runs[1][:, 2:])
        assert np.array_equal(*(one[:, 1] - one[:, 0] for one in runs))


def test_every_layer_is_compared_on_the_core(tmp_path: Path) -> None:
    require_core("cv32e40p")
    graph, made = compiled("digits", "riscv", tmp_path, None)
    told = prove.every_layer(made, graph, "rtl", [sample_inputs(graph)], "cv32e40p")
    assert re.fullmatch(r"each of [1-9]\d* layers equals the integer graph", told)


@pytest.mark.parametrize("name", ["digits", AD])
@pytest.mark.parametrize("core", ["ibex", "picorv32"])
def test_other_cores(shared: Path, tmp_path: Path, core: str, name: str) -> None:
    simulated, result = both(name, "riscv", core, tmp_path, shared)
    off = error(simulated, result)
    print(f"{name} on {core}: {result.simulation.inferences[0].total_cycles} cycles, off by {off:.5%}")
    assert off <= 0.01


def test_vexriscv_has_no_compressed_instructions(shared: Path, tmp_path: Path) -> None:
    """The firmware is compiled for it; how long it takes has no set of costs."""
    error(*both("digits", "riscv", "vexriscv", tmp_path, shared))


@pytest.mark.parametrize("name", ["digits", RESNET8])
def test_an_engine_in_verilog_beside_the_core(shared: Path, tmp_path: Path, name: str) -> None:
    """Jobs take the same cycles as beside the simulator; it sees register accesses at the end of their block."""
    simulated, core = both(name, "macarray", "cv32e40p", tmp_path, shared)
    one, other = simulated.simulation.inferences[0], core.simulation.inferences[0]
    jobs = [[job.end - job.start for job in each.activities["macarray"]] for each in (one, other)]
    print(f"{name} on macarray beside CV32E40P: {other.total_cycles} cycles, simulated {one.total_cycles}")
    assert len(jobs[0]) == len(jobs[1]) and sum(jobs[0]) == pytest.approx(sum(jobs[1]), rel=0.005)
    assert abs(one.total_cycles - other.total_cycles) <= 20 * len(jobs[1]) + 0.002 * other.total_cycles
    assert other.idle_cycles > 0


SNIPPETS = {
    "alu": ("add a0, a1, a2", "xori a0, a0, 5", "c.addi a0, 1", "c.mv a3, a0", "lui a1, 7"),
    "memory": ("lw a0, 0(a5)", "sw a1, 4(a5)", "lw a3, 4(a5)", "add a0, a3, a0", "lbu a1, 3(a5)", "sh a1, 6(a5)"),
    "multiply": ("mul a0, a1, a2", "mulhu a3, a0, a1", "mulh a1, a2, a3", "mul a2, a0, a0"),
    "divide": ("divu a0, a1, a2", "rem a3, a0, a1", "div a1, a2, a3", "addi a2, a2, 77", "neg a0, a0", "c.mv a1, a2"),
    "jumps": ("c.beqz a4, 1f; addi a0, a0, 1; 1:", "bne a4, a4, 1f; c.nop; 1:", "j 1f; c.nop; 1: add a0, a0, a1"),
}
"""Instructions by what they try."""


COUNT = 3
"""Runs of each kind in a program."""


def program(seed: int) -> str:
    """Random runs of them, 4-byte instructions at any even address; each between two readings of the time."""
    rng, body = np.random.default_rng(seed), ""
    for choices in SNIPPETS.values():
        for _ in range(COUNT):
            chosen = [str(rng.choice(choices)) for _ in range(40)]
            padded = [f"{one}; c.nop" if rng.random() < 0.3 else one for one in chosen]
            text = "\n".join(padded).replace("; ", "\n")
            body += f"li a1, -123456\nli a2, 99\nli a3, -5\nli a4, 0\nla a5, words\ncall stamp\n{text}\ncall stamp\n"
    return f"""
    .option norelax
    .text
    .globl main
main:
    la s2, stamps
    li a1, 1
    call command
{body}
    li a1, 2
    call command
    j main
command:
    li a0, 0x1A000000
    sw a1, 0(a0)
    ret
stamp:
    li t0, 0x1A000000
    lw t1, 12(t0)
    sw t1, 0(s2)
    addi s2, s2, 4
    ret
    .bss
    .balign 4
words: .space 16
    .globl stamps
stamps: .space {8 * COUNT * len(SNIPPETS)}
"""


def stamps(setup: SimulationSetup) -> tuple[int, list[int]]:
    """Instructions of a program, and the cycles of each of its runs."""
    result = simulate(setup, [{}], {"stamps": 8 * COUNT * len(SNIPPETS)}).inferences[0]
    read = np.frombuffer(result.outputs["stamps"], "<u4").astype(np.int64)
    assert result.instructions is not None
    return result.instructions, (read[1::2] - read[::2]).tolist()


@pytest.mark.parametrize(("core", "within"), [("cv32e40p", 0), ("ibex", 0), ("picorv32", 0)])
def test_random_instructions_take_what_the_costs_say(tmp_path: Path, core: str, within: int) -> None:
    """Every run of 40, to the cycle."""
    require_core(core)
    library = build_core(core)
    for seed in range(3):
        (tmp_path / str(seed)).mkdir()
        elf = build(tmp_path / str(seed), program(seed), assembler=True)
        setup = replace(chip(elf), costs=COSTS[core])
        simulated = stamps(setup)
        real = stamps(replace(setup, core_rtl=core, core_library=library))
        assert simulated[0] == real[0]
        kinds = [kind for kind in SNIPPETS for _ in range(COUNT)]
        for kind, own, right in zip(kinds, simulated[1], real[1], strict=True):
            assert abs(own - right) <= within, (kind, own, right)
        assert stamps(replace(setup, costs={}))[1] != simulated[1], "other costs give other cycles"


def test_a_core_that_traps(tmp_path: Path) -> None:
    require_core("cv32e40p")
    elf = build(tmp_path, 'int main(void) { __asm__ volatile(".word 0xffffffff"); return 0; }')
    setup = replace(chip(elf), core_rtl="cv32e40p", core_library=build_core("cv32e40p"))
    with pytest.raises(SimulationError, match="the core has trapped") as caught:
        simulate(setup, [], {})
    assert "dovetail_trap" in caught.value.where


def test_what_cannot_be(tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, made = compiled("digits", "riscv", tmp_path, None)
    given = [sample_inputs(graph)]
    with pytest.raises(DovetailError, match="there is no core 'z80' as RTL"):
        run_build(made, "rtl", given, core="z80")
    with pytest.raises(DovetailError, match="its core is not RTL on 'iss'"):
        run_build(made, "iss", given, core="ibex")
    arm = replace(made, target=load_target("cortex_m4"))
    with pytest.raises(DovetailError, match="'ibex' is one RISC-V core; the target has 1 of cortex-m4"):
        run_build(arm, "rtl", given, core="ibex")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="pythondata-cpu-ibex") as missing:
        core_rtl("ibex").design()
    assert "dovetail[rtl-cores]" in missing.value.hint
