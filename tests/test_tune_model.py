"""The tuner's model of engines against the simulated chip: copies between layouts, and where pixels begin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from dovetail.guests.tune import cost
from dovetail.guests.tune.layers import resolved_default
from dovetail.guests.tune.measure import measured
from dovetail.ir.graph import Graph
from dovetail.ir.types import DType
from dovetail.target.pattern import Choice
from dovetail.targets import load_target, macarray
from dovetail.timing import transfers
from firmware import require_chip
from tuning_cases import adapted, layer_graph

INT8 = DType.INT8
TILES: Choice = {"tile_rows": 5, "tile_columns": 6, "tile_channels": 16, "buffers": 2, "order": "positions"}
PARTS: Choice = {"tile_rows": 6, "tile_columns": 6, "tile_channels": 16, "buffers": 1, "order": "channels"}


def of_shifts(graph: Graph) -> Graph:
    """The layer with a requantisation that only shifts."""
    constants = {
        name: np.full_like(array, 1 << 30) if name.startswith("multiplier") else array
        for name, array in graph.constants.items()
    }
    return replace(graph, constants=constants)


CASES: dict[str, tuple[str, Graph, Choice, bool]] = {
    "kestrel": ("pixels of three channels", layer_graph((20, 22, 3), 24, 3, 2, INT8), TILES, False),
    "macarray": ("pixels of 12 bytes", layer_graph((12, 12, 12), 20, 3, 1, INT8), PARTS, True),
    "diana": ("bytes of words swapped", of_shifts(layer_graph((64,), 512, 1, 1, INT8)), {"buffers": 2}, False),
}
"""By target: what is brought to it, the layer, a choice, and whether its ends lie in the engine's memory."""


@cache
def cycles(name: str, cut: bool) -> int:
    """Of the default or the choice on the simulated chip."""
    _, layer, choice, inside = CASES[name]
    target = load_target(name)
    graph, region = adapted(layer, target)
    near = (*graph.inputs, *graph.outputs) if inside else ()
    return measured(graph, target, None, {region.name: choice} if cut else {}, near)


def farthest(name: str) -> float:
    """How far the estimates of default and choice are from what they take."""
    _, layer, choice, inside = CASES[name]
    target = load_target(name)
    graph, region = adapted(layer, target)
    near = (*graph.inputs, *graph.outputs) if inside else ()
    model, default = cost.estimator(region, target, near), resolved_default(region, target, near)
    found = [model({**default, **(choice if cut else {})}) for cut in (False, True)]
    ratios = [one.cycles / cycles(name, cut) for cut, one in enumerate(found) if one is not None]
    print(name, ratios)
    return max(abs(ratio - 1) for ratio in ratios)


@pytest.mark.parametrize("name", CASES)
def test_choices_take_what_the_model_says(name: str) -> None:
    require_chip()
    assert farthest(name) < 0.04


def as_one_row(count: Callable[..., int]) -> Callable[..., int]:
    """A fault: rows are thought to lie side by side."""
    return lambda dma, row_bytes, rows=1: count(dma, row_bytes * rows)


def anywhere(count: Callable[..., int]) -> Callable[..., int]:
    """A fault: pixels are thought to begin anywhere in a word."""
    return lambda *sizes: count(*sizes[:-1], 1)


FAULTS = {
    "kestrel": (transfers, "dma_cycles", as_one_row),
    "macarray": (macarray, "job_cycles", anywhere),
    "diana": (transfers, "dma_cycles", as_one_row),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_model_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require_chip()
    module, function, broken = FAULTS[name]
    monkeypatch.setattr(module, function, broken(getattr(module, function)))
    assert farthest(name) > 0.04
