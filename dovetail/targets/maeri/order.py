"""What `dovetail schedule` asks of this target: the best order of a network, shown and written out."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from dovetail.errors import TargetError
from dovetail.graph.graph import Graph, evaluate
from dovetail.graph.types import Array
from dovetail.target import Ordered, OrderRequest
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.gantt import summary, to_html
from dovetail.targets.maeri.host_c import host_files
from dovetail.targets.maeri.improve import best_order
from dovetail.targets.maeri.phases import phases
from dovetail.targets.maeri.programming import layer_words, tree_words, vmh
from dovetail.targets.maeri.rules import Rules, load_rules
from dovetail.targets.maeri.schedule import Schedule
from dovetail.targets.maeri.simulate import simulate
from dovetail.targets.maeri.table import HEADINGS, cells, rows, to_json, to_trace
from dovetail.targets.maeri.work import network

_FLOAT_ERROR = 1e-4
"""Most that sums of floats in another order may differ, as a part of the largest result."""


def configured(config: MaeriConfig, settings: dict[str, int]) -> MaeriConfig:
    """A configuration with some sizes changed. Where only the multipliers are, both bandwidths follow them.

    Raises:
        TargetError: there is no such size, or it is not possible.
    """
    kinds = {field.name: type(getattr(config, field.name)) for field in fields(config)}
    for name in settings:
        if name not in kinds:
            raise TargetError(f"there is no size '{name}'", where="MAERI configuration", hint=f"use {', '.join(kinds)}")
    found = {name: kinds[name](value) for name, value in settings.items()}
    for name in ("distribution", "collection"):
        if "multipliers" in found and getattr(config, name) == config.multipliers:
            found.setdefault(name, found["multipliers"])
    return replace(config, **found)


def order(graph: Graph, request: OrderRequest, config: MaeriConfig, rules: Rules) -> Ordered:
    """The best order that is found, simulated if asked for.

    Args:
        graph: the network.
        request: what the user asks for; a file of rules stands instead of the target's.
        config: the target's.
        rules: the target's.

    Raises:
        DovetailError: the network has no layer, one does not fit, or rules or sizes are wrong.
    """
    config = configured(config, dict(request.settings))
    rules = load_rules(request.rules) if request.rules else rules

    def found(how: str, makespan: int, least: int) -> None:
        """Show how near to the bound an order is."""
        request.progress(f"{how}: {makespan:,} cycles, {100 * (makespan / least - 1):.1f} % above the bound {least:,}")

    schedule = best_order(network(graph), config, rules, request.seconds, found)
    notes = [summary(schedule)]
    if request.inputs is not None:
        request.progress("simulating")
        notes.append(_simulated(schedule, request))
    return Ordered(HEADINGS, tuple(tuple(cells(row)) for row in rows(schedule)), tuple(notes), _files(schedule))


def _simulated(schedule: Schedule, request: OrderRequest) -> str:
    """Execute the order, compare with the graph; a sentence."""
    assert request.inputs is not None
    result = simulate(schedule, request.inputs)
    graph = schedule.network.graph
    off = max(_off(result.outputs[name], array) for name, array in evaluate(graph, request.inputs).items())
    integers = all(graph.types[name].dtype.is_integer for name in graph.outputs)
    if result.cycles != schedule.makespan or off > (0 if integers else _FLOAT_ERROR):
        raise AssertionError(f"results off by {off}, {result.cycles} cycles instead of {schedule.makespan}")
    share = 100 * result.utilisation(schedule.config)
    how = "equal to the network's in every bit" if not off else f"those of the network within {off:.1e} of the largest"
    return f"Simulated: {result.cycles:,} cycles, {share:.1f} % of the multipliers used, results {how}."


def _off(found: Array, expected: Array) -> float:
    """The largest difference, as a part of the largest expected number."""
    differences = np.abs(found.astype(np.float64) - expected)
    return float(differences.max(initial=0.0) / max(np.abs(expected.astype(np.float64)).max(initial=0.0), 1e-30))


def _files(schedule: Schedule) -> dict[str, bytes]:
    """Everything that is written out."""
    config = schedule.config
    files = {
        "schedule.json": to_json(schedule),
        "schedule.html": to_html(schedule),
        "trace.json": to_trace(schedule),
        **{f"host/{name}": text for name, text in host_files(schedule).items()},
    }
    for phase in phases(schedule):
        files.setdefault(f"trees/RN_Config_{phase.configuration:04d}.vmh", vmh(tree_words(config, phase.tree)))
    for number, work in enumerate(schedule.network.works):
        tile = next(item.tile for item in schedule.items if item.work == number)
        files[f"layers/Layer_Info_{number:03d}.vmh"] = vmh(layer_words(config, work.layer, tile), digits=2)
    return {name: text.encode() for name, text in files.items()}
