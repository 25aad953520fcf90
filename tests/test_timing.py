"""The clock against the simulated chip: whole networks, cores that are pinned, and faults that are seen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from scipy.stats import spearmanr

from command_line import dovetail
from conftest import shared_dir
from dovetail.arrays import built
from dovetail.compile import Options, compile_graph, compile_model, prepare, sample_inputs
from dovetail.guests.tune.layers import LayerModel, region_alone, tunable_layers
from dovetail.guests.tune.measure import make_task, measure, measured
from dovetail.guests.tune.tuner import TuningRequest, tune
from dovetail.ir.graph import GraphBuilder
from dovetail.ir.operators.movement import Im2col
from dovetail.ir.types import DType, TensorType
from dovetail.program.ir import LaunchStatement
from dovetail.run import run_build
from dovetail.schedule.plan.timed import timed
from dovetail.target import JobRegisters
from dovetail.target.costs import StatementCycles
from dovetail.target.description import with_cores
from dovetail.targets import load_target
from dovetail.timing import program
from dovetail.timing.clock import EngineQueue, Issuer
from dovetail.timing.kernels import core_cycles
from firmware import require_chip
from networks import image_net
from tuning_cases import digits_file

NETWORKS = ("ad_autoencoder", "kws_dscnn")
TARGETS = ("ne16", "macarray", "vta", "kestrel", "maeri", "cortex_m4")


def network(name: str) -> Path:
    """The file of a network."""
    return shared_dir() / "models" / "mlperf_tiny" / f"{name}_int8.tflite"


def ratio(model: Path, name: str) -> float:
    """Cycles by the clock over those of the simulated chip."""
    target = load_target(name)
    compiled = compile_model(model, target, Options())
    total, each = timed(compiled.plan.program, compiled.regions, target)
    assert sum(each) == total
    return total / measured(prepare(model, target, Options()), target, None, {})


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_takes_what_the_clock_says(name: str, target: str) -> None:
    require_chip()
    assert abs(ratio(network(name), target) - 1) < 0.01


def test_waits_for_weights_in_flash_are_counted() -> None:
    """56 cycles for every 8 bytes of weights, each read once: half of the time."""
    require_chip()
    assert abs(ratio(network("ad_autoencoder"), "rp2040") - 1) < 0.03


def port(name: str) -> str:
    """The file of a target that others wrote."""
    return str(shared_dir() / "faults" / "ports" / name / f"{name}.py")


@pytest.mark.parametrize("name", ["otter", "puffin", "acme"])
def test_a_network_on_a_target_of_others_takes_what_the_clock_says(name: str) -> None:
    require_chip()
    assert abs(ratio(network("ad_autoencoder"), port(name)) - 1) < 0.03


def test_a_tuning_by_the_clock_ranks_as_the_chip_does(tmp_path: Path) -> None:
    """All of a network on a target of others: trials of each layer from best to worst, and what is found."""
    require_chip()
    file, target = port("otter"), load_target(port("otter"))
    found = tune(TuningRequest(digits_file(tmp_path), file, tmp_path / "log", trials=40, measure="model"))
    ranked = 0
    for layer in found.layers:
        name = region_alone(layer.layer.graph, target).name
        trials = sorted((one for one in layer.trials if one.outcome.cycles), key=lambda one: one.outcome.cycles or 0)
        chosen = [trials[place * (len(trials) - 1) // 4] for place in range(5)] if len(trials) > 4 else []
        said = [one.outcome.cycles or 0 for one in chosen]
        taken = [measured(layer.layer.graph, target, None, {name: one.choice}, layer.layer.near) for one in chosen]
        if chosen and max(taken) > 1.02 * min(taken):
            ranked += 1
            assert spearmanr(said, taken).statistic >= 0.95, layer.layer.names
    assert ranked > 2
    graph = prepare(digits_file(tmp_path), target, Options())
    tuned = {entry.name: entry.choice for entry in found.tuning.layers}
    assert measured(graph, target, None, tuned) <= measured(graph, target, None, {})


@pytest.mark.parametrize("name", ["ne16", "macarray", "kestrel", "vta", "maeri", "cortex_m4"])
def test_planner_tuner_and_report_say_the_same_of_a_layer(name: str) -> None:
    """The planner leaves out the beginning and the end of a network."""
    target, compared = load_target(name), 0
    for layer in tunable_layers(prepare(network("kws_dscnn"), target, Options()), target)[1]:
        model = LayerModel.of(layer, target)
        compiled = compile_graph(layer.graph, target, Options(), near=layer.near, interpret=False)
        assert model.planned is not None
        said = json.loads(compiled.project.files["dovetail.json"])["estimated"]
        assert said == timed(compiled.plan.program, compiled.regions, target)[0]
        assert model.planned.cycles == said, layer.names
        tilings = list(compiled.plan.tilings.values())
        if len(compiled.regions) == len(tilings) == 1:  # no relayout beside it
            assert tilings[0].estimate.cycles + target.core.statements.around == said, layer.names
            compared += 1
    assert compared or not target.engines


def test_a_clock_without_waits_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    require_chip()
    monkeypatch.setattr(program._Replay, "_wait", lambda self, issuer, wait: None)
    assert abs(ratio(network("kws_dscnn"), "ne16") - 1) > 0.01


def test_a_layer_on_one_core_of_several_takes_as_long_as_that_core_needs() -> None:
    target = with_cores(load_target("riscv"), 4)
    compiled = compile_model(network("kws_dscnn"), target, Options(pins={"conv_0": "core1"}))
    schedule = compiled.assignment.schedule
    assert schedule is not None
    assert abs(schedule.finish / timed(compiled.plan.program, compiled.regions, target)[0] - 1) < 0.03


def test_a_trial_of_a_network_by_the_clock_is_its_program(tmp_path: Path) -> None:
    target, model = load_target("ne16"), digits_file(tmp_path)
    compiled = compile_model(model, target, Options())
    task = make_task(prepare(model, target, Options()), (), "ne16", None, "model")
    assert measure(task, {}).cycles == timed(compiled.plan.program, compiled.regions, target)[0]


def test_an_engine_that_says_nothing_of_its_driver_has_the_places_of_its_registers() -> None:
    registers = JobRegisters(tuple("abcdefgh"))
    engine = replace(load_target("macarray").engines[0], queue=0, launching=0, device=registers.device("e", "m", 0))
    assert (engine.queue, engine.launching) == (1, 51)
    assert replace(engine, queue=0, device=registers.device("e", "m", 0, places=3)).queue == 3


@pytest.mark.parametrize("more", [0, 9])
def test_a_driver_of_job_registers_takes_what_is_estimated(more: int, tmp_path: Path) -> None:
    """Its loop over the registers is unrolled, or not: 23 are, 32 are not."""
    require_chip()
    assert dovetail("new-target", "mine", "-o", tmp_path) == 0
    names, driver = [f"more_{each}" for each in range(more)], tmp_path / "mine.c"
    text = (tmp_path / "mine.py").read_text()
    text = text.replace('"parameters",\n))', f'"parameters", *{names}\n))')
    text = text.replace('"parameters"].address)', f'"parameters"].address, **dict.fromkeys({names}, 0))')
    (tmp_path / "mine.py").write_text(text)
    driver.write_text(driver.read_text().replace("WORDS = 23", f"WORDS = {23 + more}"))
    target = load_target(str(tmp_path / "mine.py"))
    small = replace(target, memories=(target.memory("L2"), replace(target.memory("L1"), size=1536)))
    net = image_net("tiles", 8, 16)
    graph = net.finish(net.convolution(net.x, 16))
    compiled = compile_graph(graph, small, Options(), interpret=False)
    assert sum(isinstance(one, LaunchStatement) for one in compiled.plan.program.statements) >= 8
    said = timed(compiled.plan.program, compiled.regions, small)[0]
    assert said == pytest.approx(measured(graph, small, None, {}), rel=0.01)


def test_the_layers_of_a_list_take_what_the_clock_says() -> None:
    """The core starts all of them at once, and waits at the end."""
    require_chip()
    target, model = load_target("kestrel"), network("ad_autoencoder")
    compiled = compile_model(model, target, Options())
    said = timed(compiled.plan.program, compiled.regions, target)[1]
    with built(compiled, target) as build:
        first = run_build(build, "iss", [sample_inputs(compiled.graph)]).simulation.inferences[0]
    taken = [marker.end_cycle - marker.start_cycle for marker in first.markers]
    assert said == pytest.approx(taken, rel=0.02)


def test_a_driver_that_goes_along_with_a_grid_waits_for_the_engine() -> None:
    queue = EngineQueue(2, 90)
    core = Issuer(StatementCycles())
    queue.launch(core, 10_000)
    queue.launch(core, 8_000, 7_000)
    assert core.now == 90 + 10_000 + 7_000 + core.costs.room


def test_layers_cut_in_place_are_estimated_in_the_plan_s_tiles() -> None:
    """Sums of eight pixels fit the registers: the planner cuts though nothing is copied, and no knob says how."""
    target = load_target(str(shared_dir() / "faults" / "ports" / "puffin" / "puffin.py"))
    layers = tunable_layers(prepare(network("ic_resnet8"), target, Options()), target)[1]
    (layer,) = [one for one in layers if one.names[0] == "conv_1"]
    planned = LayerModel.of(layer, target).planned
    compiled = compile_graph(layer.graph, target, Options(), near=layer.near, interpret=False)
    assert planned is not None and planned.tiles > 1
    assert planned.cycles == timed(compiled.plan.program, compiled.regions, target)[0]


@pytest.mark.parametrize(
    ("kernel", "shape", "stride", "most"),
    [
        *(((3, 3), (24, 32, channels), 1, 1.25) for channels in (1, 3, 8, 16)),
        *(((3, 3), (24, 32, channels), 2, 1.25) for channels in (1, 3, 8)),
        ((7, 7), (30, 30, 3), 2, 1.5),
        ((10, 4), (58, 12, 1), 2, 1.5),
        ((7, 7), (31, 31, 3), 1, 2.5),
        ((5, 5), (25, 33, 5), 2, 2.5),
    ],
)
def test_patches_of_the_core_take_about_what_is_estimated(
    kernel: tuple[int, int], shape: tuple[int, int, int], stride: int, most: float
) -> None:
    """Rows in words, which compilers order in their own ways, or byte by byte: the last two, whose rows lie in four."""
    require_chip()
    builder, target = GraphBuilder("patches"), load_target("riscv")
    x = builder.input("x", TensorType((1, *shape), DType.INT8))
    graph = builder.finish([builder.add(Im2col(kernel, (stride, stride)), [x], "y")])
    cycles = measured(graph, target, None, {}) - target.core.statements.around
    assert cycles <= most * graph.types["y"].elements
    assert abs(core_cycles(graph, target) / cycles - 1) < 0.25
