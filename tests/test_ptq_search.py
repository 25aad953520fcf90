"""Mixed precision: the frontier against trying everything, budgets, and what must hold of the digits network."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path

import numpy as np
import onnx
import pytest

from dovetail.errors import DovetailError
from dovetail.guests import zoo
from dovetail.guests.ptq import Samples, Settings, prepare, quantise_network
from dovetail.guests.ptq.accuracy import coded_inputs, compare, firmware_outputs
from dovetail.guests.ptq.layers import LayerSettings
from dovetail.guests.ptq.search import (
    FrontierPoint,
    LayerCost,
    cheapest,
    frontier,
    frontier_svg,
    outputs_on,
    sensitivities,
    weight_bytes,
    within,
)
from dovetail.guests.ptq.settings import Budget, parse_budget
from dovetail.ir.graph import Graph, evaluate
from dovetail.ir.rewrite import simplify
from dovetail.legalize import adapt
from dovetail.quantize import quantize
from dovetail.read import load_model, own_rounding
from dovetail.targets import load_target
from ptq_networks import digits, images, varied
from zoo_data import digits_accuracy

needs_iss = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("unicorn", "elftools", "ziglang")),
    reason="the simulator is not installed (dovetail[iss])",
)


CYCLES = 10_500
"""Of `varied` on ne16: between what it takes with 2-bit and with 8-bit weights."""


def layers(count: int, seed: int = 0) -> list[LayerCost]:
    generator = np.random.default_rng(seed)
    found = []
    for index in range(count):
        size, noise = generator.integers(10, 500), 10.0 ** generator.uniform(-3, -1)
        cost = {bits: float(size * bits) for bits in (8, 4, 2)}
        found.append(LayerCost(f"l{index}", {8: noise / 3000, 4: noise / 20, 2: noise}, cost))
    return found


def test_the_frontier_is_what_trying_every_choice_leaves() -> None:
    found = layers(6)
    every = []
    for widths in itertools.product((8, 4, 2), repeat=6):
        cost = sum(layer.cost[bits] for layer, bits in zip(found, widths, strict=True))
        noise = sum(layer.noise[bits] for layer, bits in zip(found, widths, strict=True))
        every.append((cost, noise))
    best = {c for c in every if not any(o[0] <= c[0] and o[1] < c[1] for o in every)}
    points = frontier(found)
    assert {round(p.cost) for p in points} == {round(cost) for cost, _ in best}
    for point in points:
        assert point.noise == pytest.approx(min(noise for cost, noise in best if round(cost) == round(point.cost)))
    limit = points[len(points) // 2].cost + 0.5
    chosen = within(points, limit, "bytes")
    assert chosen.noise == pytest.approx(min(noise for cost, noise in every if cost <= limit))


def test_long_networks_keep_a_bounded_frontier() -> None:
    points = frontier(layers(60))
    assert len(points) <= 2000
    assert points[0].widths == (2,) * 60 and points[-1].widths == (8,) * 60


def test_the_cheapest_point_is_found_by_bisection() -> None:
    points = [FrontierPoint(float(cost), 1.0 / (cost + 1), (cost,)) for cost in range(12)]
    assert cheapest(points, lambda point: 7 - point.cost, "dB").cost == 7
    with pytest.raises(DovetailError, match=r"even the widest weights miss the budget, by 2\.00 dB"):
        cheapest(points, lambda point: 13 - point.cost, "dB")


def test_budgets_are_read_and_refused() -> None:
    assert parse_budget("bytes=20k") == Budget("bytes", 20000)
    assert parse_budget("cycles=1.5M") == Budget("cycles", 1_500_000)
    assert parse_budget("loss=1.5") == Budget("loss", 1.5)
    for text in ("20k", "bytes=", "bytes=-1", "time=3", "bytes=1e9", "loss=1.5.2"):
        with pytest.raises(DovetailError, match="is no budget"):
            parse_budget(text)
    with pytest.raises(DovetailError, match=r"the budget is 5 bytes, the narrowest weights need"):
        within(frontier(layers(3)), 5, "bytes")
    points = frontier(layers(3))
    most, rest = int(points[-1].cost), 1_000_000  # cycles of what has no weights count, and are said
    assert within(points, rest + most, "cycles", float(rest)).cost == most
    with pytest.raises(DovetailError, match=r"the budget is 5 cycles, .* 1,000,000 of them for what has no weights"):
        within(points, 5, "cycles", float(rest))


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    path = tmp_path_factory.mktemp("varied") / "varied.onnx"
    onnx.save(varied(), path)
    return prepare(load_model(path), path.name)


def test_sensitivities_fall_with_bits(network: Graph) -> None:
    found = sensitivities(network, {"image": images(32)}, (8, 4, 2), LayerSettings(), lambda text: None)
    assert set(found) == {"bn", "depthwise", "conv2", "scores"} or len(found) == 4
    for noise in found.values():
        assert 0 < noise[8] < noise[4] < noise[2]


def test_a_budget_of_bytes_is_kept_and_used(network: Graph) -> None:
    settings = Settings(budget=Budget("bytes", 900))
    found = quantise_network(network, Samples({"image": images(32)}, None), load_target("ne16"), settings)
    assert found.search is not None
    assert found.weight_bytes == weight_bytes(network, found.widths) == found.search.chosen.cost
    assert 700 < found.weight_bytes <= 900
    svg = frontier_svg(found.search, "a <b>")
    assert svg.count("<circle") == 1 and "a &lt;b&gt;" in svg and "nan" not in svg


@pytest.mark.parametrize("budget", [Budget("loss", 10), Budget("sqnr", 20)])
def test_a_budget_of_accuracy_is_kept_on_validation_data(network: Graph, budget: Budget) -> None:
    data, other = (Samples({"image": images(40, seed)}, None) for seed in (1, 2))
    found = quantise_network(network, data, load_target("ne16"), Settings(budget=budget), other)
    wanted, got = (outputs_on(g, other.inputs, "scores") for g in (network, found.graph))
    assert set(found.widths.values()) != {8}
    if budget.kind == "loss":
        assert (wanted.argmax(axis=1) != got.argmax(axis=1)).mean() <= 0.10
    else:
        assert 10 * np.log10((wanted**2).sum() / ((got - wanted) ** 2).sum()) >= 20


@needs_iss
def test_a_budget_of_cycles_is_kept_on_the_simulated_chip(network: Graph) -> None:
    from dovetail.guests.ptq.search import run_report

    target, data = load_target("ne16"), Samples({"image": images(16)}, None)
    limit = CYCLES
    found = quantise_network(network, data, target, Settings(budget=Budget("cycles", limit), integer_ends=True))
    assert found.search is not None
    widest = found.search.base + sum(layer.cost[8] for layer in found.search.layers)
    assert found.search.base + found.search.chosen.cost <= limit < widest
    measured = int(run_report(found.graph, target).cycles["total"] or 0)
    assert measured <= limit * 1.03 and set(found.widths.values()) != {8}


@needs_iss
@pytest.mark.parametrize(
    ("settings", "points", "target"),
    [
        *((Settings(bits=8, integer_ends=True), 0.5, target) for target in ("riscv", "ne16")),
        *((Settings(bits=4, integer_ends=True), 1.5, target) for target in ("riscv", "ne16")),
        (Settings(budget=Budget("bytes", 1500), integer_ends=True), 3.0, "ne16"),  # which packs weights
    ],
    ids=["int8-riscv", "int8-ne16", "int4-riscv", "int4-ne16", "mixed with int2-ne16"],
)
def test_digits_keep_their_accuracy(settings: Settings, points: float, target: str, tmp_path: Path) -> None:
    """Of all images held back by the integer graph, which the firmware equals; it runs on the first of them."""
    _, graph = digits(tmp_path)
    calibration = Samples({"input": zoo.calibration("digits")["input"][:, None]}, None)
    pictures, labels = zoo.held_back("digits").values()
    found = quantise_network(graph, calibration, load_target(target), settings)
    path = tmp_path / "model.onnx"
    path.write_bytes(found.model.SerializeToString())
    qdq = simplify(load_model(path))
    integer = adapt(quantize(qdq, own_rounding(path)), load_target(target).policy(None))
    result = compare(qdq, integer, graph, {"input": pictures[:, None]}, labels, {}, lambda text: None)
    exact, coded = result.columns
    assert exact.top1 == pytest.approx(100 * digits_accuracy())
    assert exact.top1 is not None and coded.top1 is not None
    assert exact.top1 - coded.top1 <= points
    assert len(result.layers) >= 8 and result.worst[0].sqnr < result.worst[-1].sqnr
    inputs = [coded_inputs(qdq, {"input": picture[None]}) for picture in pictures[:24]]
    outputs = firmware_outputs(path, load_target(target), "iss", inputs, lambda text: None)
    for sample, got in zip(inputs, outputs, strict=True):
        assert np.array_equal(evaluate(integer, sample)[integer.outputs[0]], got)
