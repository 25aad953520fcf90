"""A core with a function unit in Verilog: firmware on the RTL of both, and `check` of its instructions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dovetail.codegen.emit import write_project
from dovetail.compile import Options, compile_graph, prepare, sample_inputs
from dovetail.errors import DovetailError
from dovetail.guests.check.cases import QUICK
from dovetail.guests.check.instructions import CASES, trials
from dovetail.guests.check.suite import Order, check
from dovetail.guests.zoo import build as zoo_model
from dovetail.ir.graph import evaluate
from dovetail.run import RunResult, open_build, run_build
from dovetail.sim.core_rtl import build_core
from dovetail.sim.worker import simulate
from dovetail.target import FunctionUnit, Target
from dovetail.targets import load_target
from firmware import build, chip
from test_rtl import needs_verilator
from test_rtl_cores import AD, DSCNN, RESNET8, require_core

CFU = load_target("vexriscv_cfu")
PLAIN = replace(CFU, core=replace(CFU.core, instructions=(), functions={}, extension="", unit=None))
"""The same core and memory without the unit."""


def digits(folder: Path) -> Path:
    """The zoo's network of digits."""
    (folder / "digits.onnx").write_bytes(zoo_model("digits"))
    return folder / "digits.onnx"


def ran(model: Path, target: Target, simulator: str, folder: Path) -> RunResult:
    """A network on a target, its outputs compared with the integer graph."""
    graph = prepare(model, target, Options())
    write_project(compile_graph(graph, target, Options()).project, folder, replace=True)
    given = sample_inputs(graph)
    core = "vexriscv_cfu" if simulator == "rtl" and not target.core.unit else ""
    result = run_build(open_build(folder, target), simulator, [given], core=core)
    expected = evaluate(graph, given)
    for name in graph.outputs:
        assert np.array_equal(result.outputs[0][name], expected[name]), (target.name, simulator, name)
    return result


@pytest.mark.rtl
@needs_verilator
@pytest.mark.parametrize(
    ("name", "least", "off"), [("digits", 2.0, 0.02), (AD, 3.3, 0.02), (DSCNN, 3.3, 0.02), (RESNET8, 3.3, 0.02)]
)
def test_networks_on_the_rtl_of_core_and_unit(
    name: str, least: float, off: float, tmp_path: Path, shared: Path
) -> None:
    """Equal to the graph, so many times as fast as the core alone, and as near to `iss`."""
    require_core("vexriscv_cfu")
    model = digits(tmp_path) if name == "digits" else shared / f"models/mlperf_tiny/{name}_int8.tflite"
    results = [ran(model, target, "rtl", tmp_path / "build") for target in (CFU, PLAIN)]
    unit, alone = (one.simulation.inferences[0].total_cycles or 0 for one in results)
    counted = ran(model, CFU, "iss", tmp_path / "build").simulation.inferences[0]
    print(f"{name}: {unit} cycles with the unit, {alone} without, {alone / unit:.2f}; iss {counted.total_cycles}")
    assert counted.instructions == results[0].simulation.inferences[0].instructions
    assert abs((counted.total_cycles or 0) - unit) <= off * unit
    assert alone >= least * unit


WAITS = {
    "a load's use": "lw a2, 0(a5)\nadd t3, a2, a2",
    "a load's use, later": "lw a2, 0(a5)\nnop\nadd t3, a2, a2",
    "a product's use": "mul a2, a3, a4\nadd t3, a2, a2",
    "a shift's use": "sll a2, a3, a4\nadd t3, a2, a2\nsrli a2, a3, 3\nadd t3, a2, a2",
    "an answer's use": ".insn r 0x0b, 5, 0, a2, a3, x0\nadd t3, a2, a2",
    "the unit behind a load": "lw a2, 0(a5)\n.insn r 0x0b, 5, 0, a6, a3, x0\nnop\nnop",
    "nothing": "add t3, a2, a2\nsub t4, a3, a4",
}
"""Instructions by what keeps them waiting."""
TURNS = 100


@pytest.mark.rtl
@needs_verilator
@pytest.mark.parametrize("name", WAITS)
def test_waits_are_those_of_the_rtl(name: str, tmp_path: Path) -> None:
    """Loops of a few instructions, to a few cycles."""
    require_core("vexriscv_cfu")
    body = "\n".join([WAITS[name]] * 8)
    program = f"""
    .option norelax
    .globl main
main:
    la a5, words
    li a1, 1
    call command
    li s3, {TURNS}
    li a4, 5
    .balign 32
1:  {body}
    addi s3, s3, -1
    bnez s3, 1b
    li a1, 2
    call command
    j main
command:
    li a0, 0x1A000000
    sw a1, 0(a0)
    ret
    .bss
    .balign 32
words: .space 32
"""
    elf = build(tmp_path, program, assembler=True, isa="rv32im")
    setup = replace(chip(elf, isa="rv32im"), costs=CFU.core.costs, extension=CFU.core.extension)
    library = build_core("vexriscv_cfu", unit=CFU.core.unit)
    real = replace(setup, core_rtl="vexriscv_cfu", core_library=library)
    counted, taken = (simulate(one, [{}], {}).inferences[0].total_cycles or 0 for one in (setup, real))
    assert abs(counted - taken) <= TURNS + 100, (counted, taken)


@pytest.mark.rtl
@needs_verilator
def test_check_tries_instructions_on_the_rtl() -> None:
    require_core("vexriscv_cfu")
    checked = check(CFU, Order(QUICK))
    assert not checked.findings
    assert {(one.offload, one.simulator) for one in checked.tested} == {
        (one.name, simulator) for one in trials(CFU.core)[0] for simulator in ("iss", "rtl")
    }


FAULTS = {
    "the Verilog: the extension does what is meant": ("unit.v", "sums[which] + dot", "sums[which] + low"),
    "Core.extension, or the assembly": ("unit.c", "0x80000000) >> 32", "0x7FFFFFFF) >> 32"),
    "the C for other cores": ("", "acc[i % 4] += a[i] * w[i]", "acc[i % 4] += a[i] + w[i]"),
    "the assembly, or the meaning": ("", "acc[0] += a[i] * b[i]\n", "acc[0] += a[0] * b[i]\n"),
}


def faulty(target: Target, file: str, text: str, other: str, folder: Path) -> Target:
    """The target with a text replaced in its Verilog, its extension or its instructions."""
    core = target.core
    if not file:
        instructions = tuple(
            replace(one, meaning=one.meaning.replace(text, other), declarations=one.declarations.replace(text, other))
            for one in core.instructions
        )
        return replace(target, core=replace(core, instructions=instructions))
    (folder / file).write_text((Path(core.extension).parent / file).read_text().replace(text, other))
    if file == "unit.c":
        return replace(target, core=replace(core, extension=str(folder / file)))
    return replace(target, core=replace(core, unit=FunctionUnit("vexriscv_cfu_unit", (folder / file,))))


@pytest.mark.rtl
@needs_verilator
@pytest.mark.parametrize("cause", FAULTS)
def test_check_finds_where_an_instruction_is_wrong(cause: str, tmp_path: Path) -> None:
    require_core("vexriscv_cfu")
    checked = check(faulty(CFU, *FAULTS[cause], tmp_path), Order(QUICK))
    assert any(cause in finding.title for finding in checked.findings), [one.title for one in checked.findings]


def test_where_a_unit_cannot_be(tmp_path: Path) -> None:
    require_core("vexriscv_cfu")
    other = FunctionUnit("vexriscv_cfu_unit", (), core="ibex")
    with pytest.raises(DovetailError, match="'ibex' has no bus for a function unit"):
        ran(digits(tmp_path), replace(CFU, core=replace(CFU.core, unit=other)), "rtl", tmp_path / "build")
    with pytest.raises(DovetailError, match="has a data cache, which would keep"):
        ran(digits(tmp_path), load_target("ne16"), "rtl", tmp_path / "build")


def test_check_tries_instructions_on_iss() -> None:
    """Without Verilog."""
    checked = check(CFU, Order(QUICK, simulators=("iss",), offloads=("lanes4", "saturate")))
    assert not checked.findings
    assert {one.offload for one in checked.tested} == {"lanes4", "saturate"}
    assert all(one.cases >= CASES for one in checked.tested)
