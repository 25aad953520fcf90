"""Several cores: speed-ups, shares in proportion to speed, pipelines, all exact; on the simulated chip."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from dovetail.cli.main import main
from dovetail.codegen.emit.project import write_project
from dovetail.compile import Compiled, Options, compile_graph, compile_model, prepare, sample_inputs
from dovetail.errors import DovetailError
from dovetail.ir.graph import evaluate
from dovetail.kernels import Optimize
from dovetail.program.ir import Call
from dovetail.report import Report, make_report, totals
from dovetail.run import RunResult, open_build, run_build
from dovetail.target.description import Target, with_cores
from dovetail.targets import load_target
from firmware import require_chip
from oracles import NETWORKS

pytestmark = pytest.mark.oracles

LEAST = {
    "ad_autoencoder": (1.95, 3.8),
    "ic_resnet8": (1.9, 3.6),
    "kws_dscnn": (1.8, 3.2),
    "vww_mobilenetv1": (1.8, 3.2),
}
"""Speed-up on 2 and on 4 cores."""
SUCCESSIVE = 3
"""Inputs given to a pipeline."""


@pytest.fixture(autouse=True)
def _chip() -> None:
    require_chip()


def model(name: str) -> Path:
    """A network of ../shared; skips the test where it is absent."""
    path = Path(__file__).resolve().parents[2] / "shared" / "models" / "mlperf_tiny" / f"{name}_int8.tflite"
    if not path.is_file():
        pytest.skip("the reference models of ../shared are not here")
    return path


@cache
def ran(name: str, target_name: str, cores: int | None = None, pipeline: bool = False) -> tuple[Compiled, RunResult]:
    """A network on the simulated chip, every output compared with the integer graph of one core."""
    target = with_cores(load_target(target_name), cores)
    return run_exactly(name, target, Options(pipeline=pipeline))


def run_exactly(name: str, target: Target, options: Options) -> tuple[Compiled, RunResult]:
    """As `ran`, of any target."""
    graph = prepare(model(name), target, options)
    inputs = [sample_inputs(graph, seed) for seed in range(SUCCESSIVE if options.pipeline else 1)]
    compiled = compile_graph(graph, target, options, interpret=False)
    with TemporaryDirectory() as folder:
        write_project(compiled.project, Path(folder) / "build")
        result = run_build(open_build(Path(folder) / "build", target), "iss", inputs)
    assert len(result.outputs) == len(inputs)
    for given, found in zip(inputs, result.outputs, strict=True):
        for output, expected in evaluate(graph, given).items():
            np.testing.assert_array_equal(found[output], expected)
    return compiled, result


def cycles(result: RunResult) -> int:
    """From one input to the next, when a pipeline is full."""
    total = result.simulation.inferences[-1].total_cycles
    assert total is not None
    return total


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_is_exact_and_faster_on_2_and_4_cores(name: str) -> None:
    one = cycles(ran(name, "riscv")[1])
    for cores, least in zip((2, 4), LEAST[name], strict=True):
        _, result = ran(name, "riscv", cores)
        found = one / cycles(result)
        print(f"{name} on {cores} cores: {cycles(result):,} of {one:,} cycles, {found:.3f} times as fast")
        assert least <= found <= cores


def test_instructions_of_the_busiest_core_fall_too() -> None:
    one = ran("ic_resnet8", "riscv")[1].simulation.inferences[0].instructions
    assert one is not None
    for cores, least in ((2, 1.9), (4, 3.6)):
        most = max(core.instructions or 0 for core in make_report(ran("ic_resnet8", "riscv", cores)[1]).cores)
        print(f"{cores} cores: {most:,} of {one:,} instructions")
        assert one / most >= least


def test_unlike_cores_share_layers_in_proportion_to_their_speed() -> None:
    compiled, result = ran("ic_resnet8", "riscv_big_small")
    shares = []
    for call in compiled.plan.program.statements:
        if isinstance(call, Call) and call.core:
            rows = compiled.plan.program.buffers[call.result.buffer].nbytes // call.result.strides[1]
            part = call.result.type.shape[1]
            assert abs(part - rows / 3) <= 1, f"{part} of {rows} rows for a core with a third of the speed of both"
            shares.append(part / rows)
    assert len(shares) == 9
    bound = cycles(ran("ic_resnet8", "riscv")[1]) / 1.5
    print(f"small core: {np.mean(shares):.3f} of the rows; {cycles(result):,} cycles, bound {bound:,.0f}")
    assert bound <= cycles(result) <= 1.1 * bound


@pytest.mark.parametrize("name", ["ad_autoencoder", "ic_resnet8", "kws_dscnn"])
def test_a_pipeline_of_a_big_and_a_small_core_is_within_a_tenth_of_the_balance_bound(name: str) -> None:
    """The bound: all work, as the cycles of one big core, by the speed of both together."""
    bound = cycles(ran(name, "riscv")[1]) / sum(core.speed for core in load_target("riscv_big_small").cores)
    compiled, result = ran(name, "riscv_big_small", None, True)
    assert compiled.pipeline is not None and compiled.pipeline.delay == 1
    print(f"{name}: an input every {cycles(result):,} cycles, bound {bound:,.0f}: {cycles(result) / bound:.4f}")
    assert bound <= cycles(result) * 1.001 and cycles(result) <= 1.1 * bound


@pytest.mark.parametrize(
    ("target", "count", "options"),
    [
        ("cortex_m4", 3, Options(optimize=Optimize.SIZE)),
        ("ne16", 2, Options()),  # no part of its layers is worth the start of a third
        ("riscv", 2, Options(optimize=Optimize.SIZE, pipeline=True)),
    ],
)
def test_other_cores_engines_beside_cores_and_little_code_are_exact(target: str, count: int, options: Options) -> None:
    _, result = run_exactly("ad_autoencoder", with_cores(load_target(target), count), options)
    busy = [core.cycles for core in make_report(result).cores]
    assert len(busy) == count and all(busy)


def test_the_report_shows_every_core() -> None:
    report: Report = make_report(ran("ic_resnet8", "riscv", 4)[1])
    assert [core.name for core in report.cores] == ["core", "core1", "core2", "core3"]
    for core in report.cores:
        assert core.stack_used is not None and 64 < core.stack_used < core.stack == 4096
        assert sum(core.layers.values()) <= report.cycles["total"]  # type: ignore[operator]
    for core in report.cores[1:]:
        bars = report.timeline[core.name]
        assert [bar.label for bar in bars] == [f"{layer}_on_{core.name}" for layer in core.layers]
        assert all(before.end <= bar.start for before, bar in pairwise(bars))
        assert sum(bar.end - bar.start for bar in bars) == core.cycles
    assert any(line.startswith("core3") and "stack 4,096 bytes" in line for line in totals(report))
    assert json.loads(json.dumps(report.to_json()))["cores"][3]["layers"]["conv_1"] > 1_000_000


def test_one_core_says_nothing_of_cores() -> None:
    project = ran("ad_autoencoder", "riscv")[0].project
    assert not any("cores" in name for name in project.files)
    assert not any("MAILBOX" in text or "core_start" in text for text in project.files.values())


def test_the_command_line_takes_cores_and_pipelines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compiled with 2 stages, run by the name of the target, and explained."""

    def command(*arguments: object) -> str:
        """What a command prints; it must succeed."""
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        assert not ended.value.code
        return capsys.readouterr().out

    path, build = model("ad_autoencoder"), tmp_path / "build"
    given = ("--target", "riscv", "--cores", 2, "--pipeline")
    assert "a pipeline of 2 stages: core 0 does dense_0 to" in command("compile", path, *given, "-o", build)
    header = next((build / "src").glob("*8.h")).read_text()
    assert "_DELAY 1u" in header
    shown = command("run", build, "--json", tmp_path / "report.json")
    assert "core1" in shown and "the outputs of an input come 1 call later" in shown
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["delay"] == 1 and [core["name"] for core in report["cores"]] == ["core", "core1"]
    explained = json.loads(command("explain", path, *given, "--json"))
    assert [stage["cores"] for stage in explained["pipeline"]] == [[0], [1]]
    shares = json.loads(command("explain", path, *given[:-1], "--json"))["layers"][0]["cores"]
    assert sum(shares.values()) == pytest.approx(1) and set(shares) == {"0", "1"}
    assert "--cores 4" in " ".join(command("compile", "--help").split())


def test_what_cannot_be_is_refused_with_a_way_out() -> None:
    path, riscv = model("ad_autoencoder"), load_target("riscv")
    pair = load_target("riscv_big_small")
    slow = replace(riscv, workers=(replace(riscv.core, speed=0.0),))
    other = replace(riscv, workers=(load_target("cortex_m4").core,))
    low = replace(riscv, workers=(replace(riscv.core, stack=1024),))
    for target, options, words in (
        (riscv, Options(pipeline=True), "needs several cores"),
        (with_cores(load_target("ne16"), 2), Options(pipeline=True), "has engines"),
        (pair, Options(pipeline=True, memory_budget=4096), "stripes"),
        (slow, Options(), "speed is 0"),
        (other, Options(), "another kind"),
        (low, Options(), "1024 bytes of stack"),
    ):
        with pytest.raises(DovetailError, match=words) as caught:
            compile_model(path, target, options)
        assert caught.value.hint
    for target, count in ((riscv, 0), (riscv, 65), (pair, 3)):
        with pytest.raises(DovetailError, match="cores"):
            with_cores(target, count)
