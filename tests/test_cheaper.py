"""The cheaper way of a layer is taken, with one engine too: another offload, or the core; and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dovetail.compile import Options, compile_graph
from dovetail.ir.graph import Graph
from dovetail.ir.operators.arithmetic import Clip, Requantize
from dovetail.ir.operators.linear import Conv2d
from dovetail.ir.operators.reduction import MaxPool2d
from dovetail.schedule.assign import assign
from dovetail.schedule.partition import initial_partition
from dovetail.target import Match, Target
from dovetail.target.layers import requantised
from dovetail.target.pattern import apply, constant, operand
from dovetail.targets import load_target
from networks import Net

MACARRAY = load_target("macarray")


def small() -> Graph:
    """A convolution, and a pool behind it."""
    net = Net("small", (8, 8, 8))
    return net.finish(net.pool(net.convolution(net.x, 16, stem="c", pad=0)))


def with_offloads(*offloads: Any) -> Target:
    """The MAC array with these offloads."""
    return replace(MACARRAY, engines=(replace(MACARRAY.engines[0], offloads=offloads),))


def offload(name: str, factor: float, pattern: Any = None, **changes: Any) -> Any:
    """A convolution that takes so many times its cycles."""
    given = MACARRAY.engines[0].offloads[0]

    def cycles(match: Match) -> int:
        return int(factor * given.cycles(match))

    return replace(given, name=name, pattern=pattern or given.pattern, cycles=cycles, **changes)


def places(target: Target) -> tuple[list[str], dict[str, Any]]:
    """Who computes the convolution (and the pool), by which offloads, and what is said."""
    graph = small()
    made = assign(graph, initial_partition(graph, target), target, {})
    found = [r.offload.name if r.offload else r.place for r in made.regions]
    return found, {name: told.why for name, told in made.compared.items()}


def test_a_slow_engine_is_left_for_the_core() -> None:
    target = with_offloads(offload("slow", 2000.0))
    found, said = places(target)
    assert found == ["core", "core"] and all(why.endswith(" on macarray slow") for why in said.values()) and said
    made = compile_graph(small(), target, Options())
    assert all(region.engine is None for region in made.regions)
    assert "macarray slow" in made.regions[0].reason


def test_a_port_may_insist() -> None:
    assert places(with_offloads(offload("slow", 2000.0, prefer=True))) == (["slow", "core"], {})


@pytest.mark.parametrize(("factor", "wanted", "loser"), [(100, "near", "core"), (400, "core", "macarray near")])
def test_a_figure_that_is_near_is_said(factor: float, wanted: str, loser: str) -> None:
    found, said = places(with_offloads(offload("near", factor)))
    assert found == [wanted, "core"]
    (why,) = said.values()
    assert why.startswith("fastest there: ") and why.endswith(f" on {loser}")


@pytest.mark.parametrize("order", [1, -1])
def test_the_cheaper_of_two_offloads_is_taken(order: int) -> None:
    both = [offload("dear", 3.0), offload("cheap", 1.0)][::order]
    found, said = places(with_offloads(*both))
    assert found == ["cheap", "core"]
    assert any("on macarray dear" in why for why in said.values())


def fused(factor: float) -> Any:
    """A convolution and its pool in one launch."""
    layer = apply(Conv2d, operand("x"), constant("weights"), constant("bias"), name="layer")
    clip = apply(Clip, apply(Requantize, layer, constant("multiplier"), constant("shift")))
    pattern = apply(MaxPool2d, clip, name="pool")

    def cycles(match: Match) -> int:
        return int(factor)

    return replace(offload("fused", 1.0, pattern), constraints=(), cycles=cycles)


@pytest.mark.parametrize(("cycles", "wanted"), [(100, ["fused"]), (200_000, ["convolution", "core"])])
def test_a_pair_in_one_launch_only_where_it_pays(cycles: int, wanted: list[str]) -> None:
    pattern = requantised("convolution", Conv2d)["convolution"]
    single: Callable[..., Any] = offload
    for offloads in ((fused(cycles), single("convolution", 1.0, pattern)), (single("convolution", 1.0), fused(cycles))):
        assert places(with_offloads(*offloads))[0] == wanted
