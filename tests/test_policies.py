"""The note on a policy that is faster than the default one takes little work, and says what a full comparison says."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from dovetail.ir.graph import Graph, Node
from dovetail.legalize import adapt
from dovetail.schedule.partition import _Partition, cycles_within, layer_cycles
from dovetail.schedule.policies import PolicyRivals
from dovetail.target import Target
from dovetail.targets import load_target
from networks import Net


def chain() -> Graph:
    """A chain of integer layers."""
    net = Net("chain", (8, 8, 8), zero_point=5)
    value = net.x
    for place in range(12):
        value = net.convolution(value, 8, 3, f"layer_{place}")
    return net.finish(value)


def rivals_of(graph: Graph, target: Target) -> tuple[PolicyRivals, Graph]:
    """The other policies, and the graph adapted by the default one."""
    rivals = PolicyRivals(graph, target)
    adapted = adapt(graph, target.policies[0], lambda name, after, lsb: rivals.follow(after))
    return rivals, adapted


@pytest.mark.parametrize("name", ["ne16", "gemmini", "diana"])
def test_rewrites_in_common_are_done_once(name: str) -> None:
    target, graph = load_target(name), chain()
    rivals, _ = rivals_of(graph, target)
    for one in rivals.others:
        count = rivals.shared[one.name]
        rest = adapt(rivals.graphs[count], replace(one, rewrites=one.rewrites[count:]))
        assert rest.nodes == adapt(graph, one).nodes
    assert name != "ne16" or list(rivals.shared.values()) > [3]


@pytest.mark.parametrize("name", ["ne16", "gemmini", "diana", "riscv"])
def test_the_last_layers_tell_that_all_take_longer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, looked_at, attempts = load_target(name), set[str](), _Partition.attempts

    def counted(draft: _Partition, node: Node) -> object:
        looked_at.add(node.output)
        return attempts(draft, node)

    monkeypatch.setattr(_Partition, "attempts", counted)
    graph = adapt(chain(), target.policies[-1])
    cycles = layer_cycles(graph, target)
    assert cycles_within(graph, target, inf) == cycles == cycles_within(graph, target, cycles)
    assert cycles_within(graph, target, cycles - 1) is None
    looked_at.clear()
    assert cycles_within(graph, target, cycles / 10) is None
    assert len(looked_at) < len(graph.nodes) / 2 or name == "diana"  # no engine takes a layer: cut in another way


def test_the_policy_that_is_faster_is_named() -> None:
    target = load_target("ne16")
    slow, fast = target.policies[1], target.policies[0]
    turned, graph = replace(target, policies=(slow, fast)), chain()
    rivals, adapted = rivals_of(graph, turned)
    default, least = layer_cycles(adapted, target), layer_cycles(adapt(graph, fast), target)
    note = rivals.note(adapted)
    assert note is not None and least < 0.9 * default
    assert f"--requant '{fast.name}' would take {least:,.0f} cycles in place of {default:,.0f} by" in note.text
    rivals, adapted = rivals_of(graph, target)
    assert rivals.note(adapted) is None
