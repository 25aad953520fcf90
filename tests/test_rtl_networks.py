"""Firmware beside Verilog: whole networks on the MAC array's RTL, its waves, its hangs, and the command line."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from dovetail.compile import Options, prepare, sample_inputs
from dovetail.errors import DovetailError, SimulationError
from dovetail.guests.zoo import build as zoo_model
from dovetail.ir.graph import Graph, evaluate
from dovetail.run import ProjectBuild, RunResult, Waves, run_build
from dovetail.target import Target
from dovetail.targets import load_target
from oracles import references
from rtl_networks import built, layer, million_cycles_per_second
from test_rtl import broken, needs_verilator
from warm_workers import STARTED

pytestmark = [
    pytest.mark.rtl,
    needs_verilator,
    pytest.mark.skipif("sys.platform != 'linux'", reason="looks into /proc"),
]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Graph, ProjectBuild]:
    """A small network of the zoo, compiled."""
    folder = tmp_path_factory.mktemp("digits")
    (folder / "digits.onnx").write_bytes(zoo_model("digits"))
    graph = prepare(folder / "digits.onnx", load_target("macarray"), Options())
    return graph, built(graph, folder / "build")


def same_outputs(graph: Graph, result: RunResult) -> None:
    """Every byte the integer graph gives."""
    expected = evaluate(graph, sample_inputs(graph))
    for name in graph.outputs:
        assert np.array_equal(result.outputs[0][name], expected[name]), name


def children() -> set[str]:
    """This process's children, zombies too."""
    found = set()
    for task in os.listdir("/proc/self/task"):
        found |= set(Path(f"/proc/self/task/{task}/children").read_text().split())
    return found


def test_resnet8_on_its_model_and_on_its_verilog(shared: Path, tmp_path: Path) -> None:
    graph = prepare(shared / "models/mlperf_tiny/ic_resnet8_int8.tflite", load_target("macarray"), Options())
    build = built(graph, tmp_path / "build")
    stored = references("ic_resnet8")
    given = {graph.inputs[0]: stored["in_0"]}
    results = [run_build(build, simulator, [given]) for simulator in ("iss", "rtl")]
    jobs = []
    for result in results:
        assert result.outputs[0][graph.outputs[0]].tolist() == stored["out_0__tflm"].tolist()
        done = result.simulation.inferences[0].activities["macarray"]
        jobs.append([(one.end - one.start, one.macs) for one in done])
    model, verilog = (result.simulation.inferences[0].total_cycles or 0 for result in results)
    print(f"ResNet8: {model} cycles on the model, {verilog} on the Verilog")
    assert verilog == model and jobs[0] == jobs[1]


def test_cosimulation_is_fast(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = layer(shared / "models/mlperf_tiny/ic_resnet8_int8.tflite", 1)
    build = built(graph, tmp_path / "build")
    same_outputs(graph, run_build(build, "rtl", [sample_inputs(graph)]))
    monkeypatch.setattr("dovetail.sim.worker.start_worker", STARTED)  # whose time is that of a child of this process
    speed = million_cycles_per_second(build, graph, "rtl", 40)
    print(f"ResNet8's second layer: {speed:.1f} million cycles per second")
    assert speed >= 1.0, "3 and more where the processor does nothing else (docs/benchmarks.md)"


def test_verilog_as_the_device_of_any_simulation(digits: tuple[Graph, ProjectBuild], tmp_path: Path) -> None:
    graph, build = digits
    engine = build.target.engines[0]
    assert engine.rtl is not None
    own = replace(build.target, engines=(replace(engine, device=engine.rtl, rtl=None),))
    result = run_build(replace(build, target=own), "iss", [sample_inputs(graph)])
    same_outputs(graph, result)
    for target in (build.target, own):
        other = run_build(replace(build, target=target), "rtl", [sample_inputs(graph)])
        assert other.simulation.inferences[0] == result.simulation.inferences[0]
    none = replace(build.target, engines=(replace(engine, rtl=None),))
    with pytest.raises(DovetailError, match="macarray: no engine is there in Verilog"):
        run_build(replace(build, target=none), "rtl", [sample_inputs(graph)])


def with_verilog(target: Target, folder: Path, old: str, new: str) -> Target:
    """The target with a text of its engine's Verilog replaced and little patience."""
    engine = target.engines[0]
    rtl = replace(broken(folder, old, new), watchdog=200_000)
    return replace(target, engines=(replace(engine, rtl=rtl.device(engine.rtl.base, 0x100)),))  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "WAIT: state <= EMIT;",
            "WAIT: state <= WAIT;",
            r"^macarray: it hangs: busy for 200000 cycles without an interrupt",
        ),
        (
            "assign pready = 1'b1;",
            "assign pready = word != 6'd1 || finished == 32'd0;",
            r"^macarray: its register port hangs: no answer to a read of 0x4 in 1000 cycles .* \(read in the block at "
            r"0x",
        ),
    ],
)
def test_an_engine_that_hangs_beside_firmware(
    digits: tuple[Graph, ProjectBuild], tmp_path: Path, old: str, new: str, message: str
) -> None:
    graph, build = digits
    before = children()
    with pytest.raises(SimulationError) as caught:
        target = with_verilog(build.target, tmp_path, old, new)
        run_build(replace(build, target=target), "rtl", [sample_inputs(graph)])
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "last register accesses: cycle " in caught.value.hint and "read 0x" in caught.value.hint
    assert len(str(caught.value).splitlines()) <= 24, "one screen"
    assert children() == before


def test_waves(digits: tuple[Graph, ProjectBuild], tmp_path: Path) -> None:
    graph, build = digits
    plain = run_build(build, "rtl", [sample_inputs(graph)])
    result = run_build(build, "rtl", [sample_inputs(graph)], waves=Waves(tmp_path / "w.vcd", 500))
    assert result.simulation == plain.simulation
    text = (tmp_path / "w.vcd").read_text()
    assert re.search(r"\$var wire +1 \S+ tcdm_req", text) and "$scope module sequencer" in text
    clock = re.search(r"\$var wire +1 (\S+) clk", text)
    assert clock is not None
    assert len(re.findall(rf"^1{re.escape(clock[1])}$", text, re.MULTILINE)) == 500
    first = result.simulation.inferences[0].activities["macarray"][0]
    times = [int(time) for time in re.findall(r"^#(\d+)$", text, re.MULTILINE)]
    assert times == sorted(times) and times[-1] >= 10 * (first.end - first.start if first.end < 400 else 400)
    run_build(build, "rtl", [sample_inputs(graph)], waves=Waves(tmp_path / "all.vcd", 10_000_000))
    assert (tmp_path / "all.vcd").read_text().startswith("$version")
    assert (tmp_path / "all.vcd").read_bytes().count(b"\n#") > 5_000, "complete though it did not reach its end"
    with pytest.raises(DovetailError, match="simulator 'iss': it has no signals to write"):
        run_build(build, "iss", [sample_inputs(graph)], waves=Waves(tmp_path / "w.vcd"))
    with pytest.raises(DovetailError, match=r"the waves cannot be written: .*No such file"):
        run_build(build, "rtl", [sample_inputs(graph)], waves=Waves(tmp_path / "no" / "w.vcd"))


def test_the_command_line(digits: tuple[Graph, ProjectBuild], tmp_path: Path) -> None:
    from dovetail.cli.main import all_commands, command_line

    ran = CliRunner().invoke(
        command_line(all_commands()), ["run", str(digits[1].folder), "--sim", "rtl", "--json", str(tmp_path / "r.json")]
    )
    assert ran.exit_code == 0, ran.output
    assert "on macarray (rtl, policy exact)" in ran.output
    assert '"simulator": "rtl"' in (tmp_path / "r.json").read_text()
