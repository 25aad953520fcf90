"""Bounds: by hand, nearer than the schedule's own, and never above what a random plan takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from bound_plans import network, plans
from conftest import shared_dir
from dovetail.arrays import seeded_inputs
from dovetail.bounds import model_bound, work_of
from dovetail.codegen.emit.plan_file import model_work, products_of
from dovetail.codegen.emit.project import write_project
from dovetail.codegen.manifest import BuildManifest, LayerEntry, OperatorWork
from dovetail.codegen.plan_file import PlanEdge
from dovetail.compile import Compiled, Options, compile_graph, compile_model
from dovetail.guests.report import least, page
from dovetail.guests.report.detail import detail
from dovetail.legalize import adapt
from dovetail.report import make_report
from dovetail.run import open_build, run_build
from dovetail.schedule.partition import initial_partition
from dovetail.target import Best, Macs, Match, Offload, Target
from dovetail.targets import load_target
from firmware import require_chip
from networks import image_net

DENSE = Macs(1000, "FullyConnected", (1, 1), 1, 100, 10, 8)
"""A dense layer of 100 inputs and 10 outputs."""


def manifest_of(compiled: Compiled) -> BuildManifest:
    """What a build says of itself."""
    return msgspec.json.decode(compiled.project.files["dovetail.json"], type=BuildManifest)


def test_a_core_alone_multiplies_and_loads_words() -> None:
    work = OperatorWork("dense", (DENSE,), weights=1000, read=100, written=10)
    found = model_bound([work], load_target("riscv"))
    assert found.cycles == 2 * 1000 + 1110 / 4, "mul and add, each a cycle; a load or store per word"
    assert found.by == "products and words of the cores"
    assert model_bound([], load_target("riscv")).cycles == 0
    assert model_bound([work], load_target("opencl")).cycles == 0, "nobody counts this computer's cycles"


def with_peak(macs: float, width: int) -> Target:
    """The MAC array with another peak, whatever the operator, and another DMA."""
    target = load_target("macarray")
    assert target.dma is not None
    engine = replace(target.engines[0], ideal_macs_per_cycle=macs, best=None)
    return replace(target, engines=(engine,), dma=replace(target.dma, bytes_per_cycle=width))


def test_work_is_shared_between_engine_and_core_and_bytes_between_dma_and_core() -> None:
    """With a core that does a product in two cycles and a word in one, loads and stores for the engine included."""
    products = OperatorWork("dense", (DENSE,))
    assert model_bound([products], with_peak(2, 8)).cycles == pytest.approx(1000 / 2.5)
    assert model_bound([products], with_peak(2, 8)).by == "products on macarray"
    bytes_only = OperatorWork("dense", (replace(DENSE, count=1),), weights=8000)
    found = model_bound([bytes_only], with_peak(64, 8))
    # the DMA takes 1000 cycles, the core 2000 to compute with it: one in three bytes is left to the core
    assert found.cycles == pytest.approx(1000 * 2002 / 3002, rel=1e-3)
    assert found.by == "weights, inputs and outputs through dma"


def test_two_engines_do_not_help_each_other_with_what_only_one_does_well() -> None:
    """Kinds that an engine does ten times as well as the other: each does its own."""
    target = with_peak(10, 8)

    one = replace(target.engines[0], best=lambda products: Best(10.0 if products.kind == "A" else 1.0))
    two = replace(one, name="two", best=lambda products: Best(10.0 if products.kind == "B" else 1.0))
    slow = replace(target.core, costs={"multiply": 10_000})
    both = [OperatorWork(kind, (replace(DENSE, kind=kind),)) for kind in "AB"]
    found = model_bound(both, replace(target, engines=(one, two), core=slow)).cycles
    assert found == pytest.approx(100, rel=0.01)


def test_an_engine_is_no_way_for_what_it_does_not_compute() -> None:
    target = with_peak(64, 8)
    engine = replace(target.engines[0], best=lambda products: Best(0))
    found = model_bound([OperatorWork("dense", (DENSE,))], replace(target, engines=(engine,)))
    assert found.cycles == 2000


def test_an_operator_in_several_layers_is_shared_by_their_products() -> None:
    work = OperatorWork("dense", (DENSE,), weights=1000)
    layers = [
        LayerEntry(name=str(n), operators=("dense",), engine="core", macs=macs, reason_not_offloaded="")
        for n, macs in enumerate((300, 700, 0))
    ]
    counts = [[one.products[0].count for one in own] for own in work_of(layers, [work])]
    assert counts == [[300], [700], [0]]


def test_dead_parts_do_not_change_the_bound() -> None:
    model, target = shared_dir() / "models" / "mlperf_tiny" / "vww_mobilenetv1_int8.tflite", load_target("ne16")
    least_work, kept = (
        manifest_of(compile_model(model, target, Options(keep_dead=keep))).operators for keep in (False, True)
    )
    assert least_work == kept
    assert sum(one.count for each in kept for one in each.products) < 4_000_000


@pytest.mark.parametrize("name", ["ne16", "macarray", "kestrel", "riscv"])
def test_no_random_plan_is_below_a_bound(name: str) -> None:
    """A few; scripts/bounds_proof.py tries thousands, on more targets."""
    target, found = load_target(name), 0
    for plan in plans(network(17, name), target, 17, 6):
        assert 0 < plan.bound <= plan.cycles and 0 < plan.least <= plan.cycles, plan.choices
        found += 1
    assert found > 3


def test_a_random_plan_in_the_simulated_chip_is_above_its_bounds() -> None:
    require_chip()
    target = load_target("kestrel")
    (plan,) = plans(network(22, "kestrel"), target, 22, 1)
    assert max(plan.bound, plan.least) <= plan.executed(target)


@pytest.mark.parametrize("wrong", ["peak", "least"])
def test_a_bound_that_is_none_is_found(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that says too little of its peak, and a cost model that says half more."""
    target = load_target("kestrel")
    engine = target.engines[0]
    if wrong == "peak":
        slow = replace(engine, best=lambda products: replace(engine.best(products), macs_per_cycle=1.0))
        target = replace(target, engines=(slow,))
    else:
        fewest = least._fewest
        monkeypatch.setattr(least, "_fewest", lambda *given: fewest(*given) * 3 // 2)
    drawn = plans(network(20, "kestrel"), target, 20, 4)
    assert any(max(plan.bound, plan.least) > plan.cycles for plan in drawn)


@pytest.mark.parametrize("name", ["ne16", "macarray", "kestrel"])
def test_no_layer_takes_less_than_its_engine_makes_of_its_kind_at_best(name: str) -> None:
    """By the engine's own cost model, of layers of many sizes and kinds, small ones and large ones."""
    target, checked = load_target(name), 0
    engine = target.engines[0]
    sizes = ((3, 16, 32, 3), (12, 64, 64, 3), (12, 256, 64, 1), (1, 256, 256, 1), (9, 5, 7, 3))
    for size, inputs, outputs, kernel in sizes:
        net = image_net("one", size, inputs)
        graph = net.finish(net.convolution(net.x, outputs, kernel))
        for region in initial_partition(adapt(graph, target.policy(None)), target):
            for node in region.graph.nodes:
                if region.engine is None or (form := products_of(region.graph, node, region.graph.producers())) is None:
                    continue
                taken = region.offload.cycles(region.match)
                assert form.count / taken <= engine.best(form).macs_per_cycle <= engine.ideal_macs_per_cycle * 1.001
                checked += 1
    assert checked > 3


def test_the_longest_ways_to_and_from_layers() -> None:
    """Input, a pass, a layer of the engine, two passes; then a second layer of the engine beside them."""
    chain: list[PlanEdge] = [{"reads": [name], "makes": made} for name, made in ("xa", "ab", "bc", "cd")]
    own, whole = [10.0, 7.0, 20.0, 5.0], [False] * 4
    assert least.longest(chain, own, whole) == [(0, 32), (10, 25), (17, 5), (37, 0)]
    sliced = [False, False, True, False]
    assert least.longest(chain, own, sliced)[1] == (10, 0), "a slice may begin when its part is there"
    beside: list[PlanEdge] = [*chain, {"reads": ["x"], "makes": "e"}]
    assert least.longest(beside, [*own, 3.0], [False] * 5)[4] == (0, 0), "it waits for nothing, nothing for it"


def test_jobs_in_turn_take_what_the_worst_of_them_do() -> None:
    """By hand: a long pass of the core in the middle, which the engine waits for, and the start of each launch."""
    jobs = [(100, 5.0, 90.0), (50, 105.0, 40.0), (10, 185.0, 0.0)]
    assert least._in_turn(jobs, 0) == 5 + 100 + 50 + 40
    assert least._in_turn(jobs, 20) == 5 + 100 + 20 + 50 + 40
    assert least._in_turn(jobs[2:], 20) == 195


def test_a_layer_whose_cost_model_raises_is_named(tmp_path: Path) -> None:
    """It raises after the build, for one layer of two: JSON and page say so, and the other has a least."""
    require_chip()
    net = image_net("two", 8, 16)
    graph, target = net.finish(net.convolution(net.convolution(net.x, 24), 8)), load_target("macarray")
    compiled = compile_graph(adapt(graph, target.policy(None)), target, Options(), work=model_work(graph))
    write_project(compiled.project, tmp_path / "net")
    build = open_build(tmp_path / "net", target)
    result = run_build(build, "iss", [seeded_inputs(build.manifest.inputs)])

    def seeded(offload: Offload) -> Offload:
        def cycles(match: Match) -> int:
            if match.type("x").shape[-1] == 24:
                raise ZeroDivisionError("no such mode")
            return offload.cycles(match)

        return replace(offload, cycles=cycles)

    engine = target.engines[0]
    broken = replace(engine, offloads=tuple(map(seeded, engine.offloads)))
    found = detail(replace(result, build=replace(build, target=replace(target, engines=(broken,)))))
    first, second = (layer for layer in found["layers"] if layer["engine"] == "macarray")
    assert first["least"] and second["least"] is None and second["least_parts"] is None
    assert "ZeroDivisionError('no such mode')" in second["why_least"]
    (said,) = (note["text"] for note in found["notes"] if "least" in note["text"])
    assert second["name"] in said and first["name"] not in said and "no such mode" in said
    assert "no such mode" in page.page(found)
    assert not any("least" in note["text"] for note in detail(result)["notes"])


def test_a_run_below_its_bound_says_so(tmp_path: Path) -> None:
    """An engine whose target says that it is a thousand times slower than it is."""
    require_chip()
    net = image_net("one", 8, 16)
    graph, target = net.finish(net.convolution(net.x, 16)), load_target("kestrel")
    graph = replace(graph, nodes=tuple(replace(node, origin="conv") for node in graph.nodes))
    slow = replace(target.engines[0], best=lambda macs: Best(0.1))
    lame = replace(target, engines=(slow,), core=replace(target.core, costs={"multiply": 10_000}))
    made = adapt(graph, target.policy(None))
    compiled = compile_graph(made, target, Options(), work=model_work(graph), interpret=False)
    write_project(compiled.project, tmp_path / "net")
    for machine, said in ((target, 0), (lame, 1)):
        build = open_build(tmp_path / "net", target)
        result = run_build(build, "iss", [seeded_inputs(build.manifest.inputs)])
        notes = make_report(replace(result, build=replace(build, target=machine))).notes
        assert sum("fewer than" in note.text for note in notes) == said, notes
