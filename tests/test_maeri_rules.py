"""MAERI's rules: every kind is kept, checked by code of its own, and refused with the smallest set that clashes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from conftest import shared_dir
from dovetail.compile import Options, prepare
from dovetail.errors import ModelError, TargetError
from dovetail.ir.graph import Graph
from dovetail.ir.types import Array
from dovetail.targets import load_target
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.listing import arrange, best_order
from dovetail.targets.maeri.network import network
from dovetail.targets.maeri.order import NetworkOrder, broken
from dovetail.targets.maeri.rules import (
    Pin,
    Reason,
    Rules,
    UnitRules,
    clash,
    load_rules,
    smallest,
    unit_rules,
)
from maeri_trials import many, random_config, random_net, random_rules, simulate
from networks import limited_net

TRIALS = int(os.environ.get("MAERI_TRIALS", "60"))
"""Random cases; 2000 for all of them."""
CONFIG = MaeriConfig(64, 32, 16)


def three_branches() -> tuple[Graph, Mapping[str, Array]]:
    """Three convolutions that read the same image."""
    net = limited_net("branches", 9, 9, 3)
    outputs = [net.convolution(net.x, count, kernel, relu=True) for count, kernel in ((8, 3), (6, 1), (4, 5))]
    return net.builder.finish(outputs), net.inputs()


A, B, C = "Conv", "Conv_2", "Conv_3"
KEPT: Mapping[str, Rules] = {
    "chain": Rules(before=((C, A, B),)),
    "apart": Rules(apart=((A, B, C),)),
    "together": Rules(together=((A, B, C),)),
    "multipliers": Rules(pin=(Pin(A, (0, 24)), Pin(B, (32, 64)))),
    "time": Rules(pin=(Pin(A, None, 500), Pin(B, None, 0, 400))),
    "priority": Rules(priority=((C, B, A),)),
    "at most of a layer": Rules(at_most_of=((A, 3), ("convolution", 7))),
    "at most": Rules(at_most=4),
    "at most of channels": Rules(at_most_of=((f"{A}[0:4]", 2),)),
    "whole filters of one": Rules(whole_filters=(A,)),
    "channels": Rules(before=((f"{A}[0:4]", f"{B}[2:6]", f"{A}[4:8]"),), apart=((f"{C}[0:2]", f"{C}[2:4]"),)),
}


@pytest.mark.parametrize("config", [CONFIG, MaeriConfig()], ids=["shared ports", "full bandwidth"])
@pytest.mark.parametrize("name", KEPT)
def test_rules_are_kept(name: str, config: MaeriConfig) -> None:
    graph, inputs = three_branches()
    schedule = arrange(network(graph), config, KEPT[name])
    assert simulate(schedule, inputs).cycles <= schedule.makespan
    assert not broken(schedule, KEPT[name])


def spoilt(name: str) -> NetworkOrder:
    """The order without rules, all of it from the start: what it breaks is found."""
    graph, _ = three_branches()
    order = arrange(network(graph), MaeriConfig())
    if name == "time":
        return order
    moved = {"multipliers": 30, "together": 0}.get(name, 0)
    items = tuple(
        replace(
            item,
            start=7 * item.work if name == "together" else 0,
            place=replace(item.place, start=item.place.start % 8 + moved),
        )
        for item in order.items
    )
    return replace(order, items=items)


@pytest.mark.parametrize("name", sorted(set(KEPT) - {"whole filters of one", "priority"}))
def test_what_is_broken_is_found(name: str) -> None:
    assert broken(spoilt(name), KEPT[name])


CLASHES: Mapping[str, tuple[Rules, str]] = {
    "circle": (
        Rules(before=((A, B), (B, C), (C, A), (A, C))),
        f"{C} before {A}; {A} before {C}\n|{A} before {C}; {C} before {A}\n",
    ),
    "together and apart": (
        Rules(before=((A, B),), together=((B, C),), apart=((C, B),)),
        r"together: \[.*\]; apart: \[.*\]\n",
    ),
    "together and before": (Rules(together=((A, B),), before=((B, A),)), "together: .*before|before.*together"),
    "more together than may be": (Rules(at_most=2, together=((A, B, C),)), r"together: .*; at_most: 2"),
    "priority and before": (Rules(priority=((A, B),), before=((B, A),)), "priority: .*before|before.*priority"),
    "a pin nothing fits": (Rules(pin=(Pin(A, (3, 4)),)), r"pin: Conv to multipliers \[3, 4\)"),
    "two pins": (Rules(pin=(Pin(A, (0, 16)), Pin(A, (32, 64)))), r"pin: .*\[0, 16\).*\[32, 64\)"),
    "pinned times": (
        Rules(before=((A, B),), pin=(Pin(A, None, 500), Pin(B, None, 0, 400))),
        f"pin: {A} from cycle 500; pin: {B} to cycle 400; {A} before {B}",
    ),
    "itself": (Rules(apart=((A, A),)), "keeps a layer from itself"),
}


@pytest.mark.parametrize("name", CLASHES)
def test_contradictions_name_the_smallest_set(name: str) -> None:
    graph, _ = three_branches()
    rules, message = CLASHES[name]
    with pytest.raises(ModelError, match=message):
        arrange(network(graph), CONFIG, rules)


def test_a_contradiction_names_lines_of_the_file(tmp_path: Path) -> None:
    """Those of the smallest set, not of the chain's other parts or of rules that do not matter."""
    graph, _ = three_branches()
    file = tmp_path / "mine.yaml"
    file.write_text(
        f"apart:\n  - [{A}, {B}]\n  - [{B}, {C}]\nbefore:\n  - [{A}, {B}]\nat_most: {{network: 2, dense: 1}}\n"
        f"together:\n  - [{A}, {C}]\n  - [{B}, {C}]\n"
    )
    with pytest.raises(ModelError) as error:
        arrange(network(graph), CONFIG, load_rules(file))
    assert (
        error.value.what
        == f"they contradict each other: together: [{B}, {C}] (mine.yaml:9); apart: [{B}, {C}] (mine.yaml:3)"
    )
    file.write_text(f"at_most:\n  network: 2\ntogether:\n- [{A}, {B}, {C}]\npin:\n- {{what: {A}, end: 90000}}\n")
    with pytest.raises(ModelError, match=r"\(mine.yaml:4\); at_most: 2 \(mine.yaml:2\)\n"):
        arrange(network(graph), CONFIG, load_rules(file))


def test_nothing_can_be_left_out_of_a_contradiction() -> None:
    """Random rules that clash: those named do without the others; without any one of them, they do not."""
    found = 0
    for seed in range(400):
        random = np.random.default_rng(seed)
        graph, _ = random_net(random)
        net, config = network(graph), random_config(random)
        told = unit_rules(random_rules(random, net, config), net)
        clashing = partial(clashes, told, config)
        if not clashing(told.reasons):
            continue
        named = smallest(told.reasons, clashing)
        assert clashing(named) and not any(clashing([each for each in named if each != one]) for one in named)
        found += 1
    assert found >= 60


def clashes(told: UnitRules, config: MaeriConfig, kept: Sequence[Reason]) -> bool:
    """Whether some of what is asked cannot be kept together."""
    return clash(told.only(kept), config)


def test_a_deadline_that_cannot_be_kept() -> None:
    graph, _ = three_branches()
    with pytest.raises(TargetError, match="the rules want it by 30"):
        arrange(network(graph), CONFIG, Rules(pin=(Pin(A, None, 0, 30),)))


def test_rules_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(
        "before: [[a, b, c]]\ntogether: [[a, 'b[0:4]']]\npriority: [[c, a]]\nwhole_filters: [a]\n"
        "at_most: {network: 8, a: 2, depthwise: 3}\npin: [{what: a, multipliers: [0, 16], begin: 10, end: 900}]\n"
    )
    assert load_rules(file) == Rules(
        before=(("a", "b", "c"),),
        at_most=8,
        whole_filters=("a",),
        together=(("a", "b[0:4]"),),
        pin=(Pin("a", (0, 16), 10, 900),),
        priority=(("c", "a"),),
        at_most_of=(("a", 2), ("depthwise", 3)),
    )
    for text in ("pin: [{what: a, where: 3}]", "pin: [a]", "pin: [{what: a, multipliers: [1]}]", "together: [[a]]"):
        file.write_text(text)
        with pytest.raises(ModelError):
            load_rules(file)


def kept_rules(order: NetworkOrder) -> list[Rules]:
    """Rules that an order keeps, of every kind."""
    names, found = [work.name for work in order.network.works], list[Rules]()
    spans = {}
    for number, name in enumerate(names):
        own = order.of(number)
        spans[name] = min(item.start for item in own), max(order.end(item) for item in own)
        low, high = min(item.place.start for item in own), max(item.place.end for item in own)
        found.append(Rules(pin=(Pin(name, (low, high), *spans[name]),)))
    for one, other in combinations(names, 2):
        found += [Rules(before=((one, other),)), Rules(apart=((one, other),)), Rules(together=((one, other),))]
        found += [Rules(priority=((one, other),)), Rules(priority=((other, one),))]
    most = sum(item.tile.neurons for item in order.items)
    found += [Rules(at_most=most), Rules(whole_filters=True), Rules(at_most_of=((names[0], most),))]
    return [each for each in found if not broken(order, each)]


def test_a_rule_that_an_order_keeps_costs_nothing() -> None:
    """`MAERI_TRIALS=500` for the full count."""
    added = 0
    for seed in range(TRIALS // 4 if TRIALS < 500 else 500):
        random = np.random.default_rng(seed)
        graph, _ = random_net(random)
        net, config = network(graph), random_config(random)
        rules = random_rules(random, net, config) if seed % 4 else Rules()
        try:
            order = best_order(net, config, rules, seconds=0)
        except (ModelError, TargetError):
            continue
        kept = kept_rules(order)
        more = rules | kept[int(random.integers(len(kept)))]
        again = best_order(net, config, more, seconds=0)
        assert again.makespan <= order.makespan, (seed, config, rules, more)
        assert not broken(again, more)
        added += 1
    assert added >= TRIALS // 10


@pytest.mark.parametrize(
    ("files", "most"),
    [
        (("r_pin2.yaml",), 14_422),
        (("r_pin2.yaml", "r_together.yaml"), 14_422),
        (("r_pin.yaml",), 14_430),
        (("r_together.yaml",), 13_108),
    ],
)
def test_pins_and_what_they_keep_anyway(files: Sequence[str], most: int) -> None:
    """17,632 cycles, 43,279, 33,719 and 17,636 before: the last three for rules that need not cost anything."""
    folder = shared_dir() / "faults" / "maeri"
    net = network(prepare(folder / "mixed.h5", load_target("maeri"), Options(allow_float=True)))
    rules = reduce(Rules.__or__, [load_rules(folder / file) for file in files])
    order = best_order(net, MaeriConfig(), rules, seconds=0)
    assert order.makespan <= most and not broken(order, rules)


def test_kernels_side_by_side_and_the_next_layer_on_finished_outputs() -> None:
    folder = shared_dir() / "faults" / "maeri"
    rules = load_rules(folder / "r_lit.yaml")
    for file, cycles, begins in (("lit.onnx", 15_884, (0, 0, 0)), ("four.onnx", 6_141, (0, 1_341))):
        net = network(prepare(folder / file, load_target("maeri"), Options(allow_float=True)))
        order = best_order(net, MaeriConfig(), rules, seconds=0)
        assert order.makespan <= cycles
        assert tuple(min(item.start for item in order.of(number)) for number in range(len(net.works))) == begins


def test_random_layers_engines_and_rules() -> None:
    """None asks to be reported; outputs are exact, rules kept. `MAERI_TRIALS=2000` for the full count."""
    found = many(5_000, TRIALS)
    print(found.most_common(12))
    assert found["ordered"] >= TRIALS // 3
