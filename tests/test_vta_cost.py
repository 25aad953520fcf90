"""The cycles of a tiling against the device model; what does not fit, and what is said about it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from dovetail.errors import PlanError, TargetError
from dovetail.ir.graph import Graph
from dovetail.schedule.partition import partition
from dovetail.targets.vta import choice, cost, target
from dovetail.targets.vta.config import VtaConfig
from dovetail.targets.vta.cost import VtaTiling
from dovetail.targets.vta.executor import estimate
from vta_layers import Layer, case_of, default_tiling, graph_of

CONFIG = VtaConfig()
SAME = (1, 1, 1, 1)
LAYERS = {
    "3x3": Layer("conv", (12, 12), 64, 64, (3, 3), (1, 1), SAME),
    "3x3, bias": Layer("conv", (14, 14), 32, 96, (3, 3), (1, 1), SAME, "none", "channel", 5000),
    "3x3 stride 2": Layer("conv", (16, 16), 48, 64, (3, 3), (2, 2), (1, 0, 1, 0)),
    "1x1": Layer("conv", (14, 14), 128, 64),
    "depthwise": Layer("depthwise", (16, 16), 64, 0, (3, 3), (1, 1), SAME, "none", "channel", 5000),
    "dense": Layer("dense", (1, 1), 512, 480, bias=5000, rounds=True),
    "pool": Layer("pool", (16, 16), 64, 0, (2, 2), (2, 2)),
}
MORE = {
    "digits": Layer("conv", (14, 14), 32, 32, (3, 3), (1, 1), SAME, "digits", "far", 500000),
    "depthwise of odd sizes": Layer("depthwise", (25, 5), 64, 0, (3, 3), (1, 1), SAME, "none", "channel", 5000),
    "average": Layer("depthwise", (16, 16), 64, 0, (4, 4), (4, 4), bias=500, alike=1),
    "1x1 of many channels": Layer("conv", (6, 6), 256, 256, bias=5000),
}
"""Layers whose cycles are compared only."""


@cache
def graph(name: str) -> Graph:
    """A layer's graph."""
    return graph_of({**LAYERS, **MORE}[name])


@cache
def measured(name: str, tiling: VtaTiling) -> int:
    """Cycles of a tiling by the device model."""
    case = case_of(graph(name), tiling, CONFIG)
    return estimate(case.stream, CONFIG).cycles


def drawn(name: str, count: int) -> list[VtaTiling]:
    """Tilings drawn from all that fit, with any limit of slots; at most 200 tiles, more take long to lower."""
    shape, random = cost.shape(graph(name), CONFIG), np.random.default_rng(len(name))
    found = [replace(t, slots=int(random.choice((0, 0, 2, 3, 4, 8)))) for t in cost.tilings(shape, CONFIG)]
    sizes = [
        -(-shape.rows // t.rows) * -(-shape.columns // t.columns) * -(-shape.out_blocks // t.blocks) for t in found
    ]
    few = [tiling for tiling, size in zip(found, sizes, strict=True) if size <= 200]
    return [few[place] for place in random.permutation(len(few))[:count]]


@pytest.mark.parametrize("name", {**LAYERS, **MORE})
def test_a_tiling_takes_what_its_stream_takes(name: str) -> None:
    shape, tilings = cost.shape(graph(name), CONFIG), drawn(name, 6)
    assert [choice.taken(shape, tiling, CONFIG)[0] for tiling in tilings] == [measured(name, t) for t in tilings]


@pytest.mark.parametrize("name", LAYERS)
def test_default_is_near_the_best_of_all_tilings(name: str) -> None:
    """Of those measured above and the 60 that are cheapest by the closed form."""
    shape = cost.shape(graph(name), CONFIG)
    likely = sorted(cost.tilings(shape, CONFIG), key=lambda tiling: cost.cycles(shape, tiling, CONFIG))[:60]
    best = min(measured(name, tiling) for tiling in {*drawn(name, 12), *likely})
    default = measured(name, default_tiling(graph(name), CONFIG))
    print(f"{name}: default {default} cycles, best of all measured {best}, {100 * (default / best - 1):.1f} % more")
    assert default <= 1.02 * best


@pytest.mark.parametrize(
    ("config", "tiling", "message"),
    [
        (
            VtaConfig(inp_bytes=2048),
            VtaTiling(12, 12, 1, True),
            "a tile of 12x12x1 blocks needs 196 entries of INP, which has 128",
        ),
        (
            VtaConfig(wgt_bytes=8192),
            VtaTiling(2, 2, 4, True),
            "a tile of 2x2x4 blocks needs 36 entries of WGT, which has 32",
        ),
        (
            VtaConfig(acc_bytes=4096),
            VtaTiling(6, 6, 2, True),
            "a tile of 6x6x2 blocks needs 72 entries of ACC, which has 64",
        ),
    ],
)
def test_what_does_not_fit_is_said_and_not_lowered(config: VtaConfig, tiling: VtaTiling, message: str) -> None:
    shape = cost.shape(graph("3x3"), config)
    assert cost.problem(shape, tiling, config) == message
    memory = message.split(" entries of ")[1][:3]
    with pytest.raises(PlanError, match=f"entries of {memory}"):
        case_of(graph("3x3"), tiling, config)
    assert cost.problem(shape, VtaTiling(1, 1, 1, True), config) == ""


def test_what_a_bias_needs_is_counted() -> None:
    """A small one: an entry of INP beside the image. A large one: an ALU operation and a row of ACC."""
    config = VtaConfig(inp_bytes=128)
    layer = graph_of(Layer("conv", (4, 4), 16, 16, bias=200_000))
    shape = cost.shape(layer, config)
    assert (shape.digits, shape.alu, shape.parameters) == (1, 3, 0)
    assert cost.problem(shape, VtaTiling(4, 2, 1, True), config) == (
        "a tile of 4x2x1 blocks needs 9 entries of INP, which has 8"
    )
    assert case_of(layer, VtaTiling(2, 3, 1, True), config).instructions
    large = cost.shape(graph_of(Layer("conv", (4, 4), 16, 16, bias=1_000_000)), config)
    assert (large.digits, large.alu, large.parameters) == (0, 4, 1)


def test_a_config_that_cannot_hold_a_tile() -> None:
    """A memory without room for one element is refused at once, a layer without a tiling stays on the core."""
    with pytest.raises(TargetError, match=r"cannot hold one tile: wgt_bytes must be at least 256, is 128"):
        VtaConfig(wgt_bytes=128)
    config = VtaConfig(wgt_bytes=2048)
    layer = graph("3x3")
    assert choice.best(cost.shape(layer, config), config) is None
    small, usual = target(config, "small"), target(CONFIG)
    (offload,) = [o for o in small.engines[0].offloads if o.name == "padded convolution"]
    assert any(limit.sentence == "a tile must fit the SRAMs" for limit in offload.constraints)
    assert [region.engine is not None for region in partition(layer, usual)] == [True]
    assert all(region.engine is None for region in partition(layer, small))
