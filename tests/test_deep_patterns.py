"""A nest of layers in one launch, with an operand read twice; launches of several results; on the chip and the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import dovetail.target as dt
from deep_port import BOTH, IMAGE, REGISTERS, TARGET, convolution
from dovetail.compile import Compiled, Options, compile_graph
from dovetail.guests.check.cases import Limits
from dovetail.guests.check.suite import Order, check
from dovetail.ir.graph import Graph, evaluate
from dovetail.ir.operators.movement import Concat
from dovetail.ir.operators.reduction import MaxPool2d
from dovetail.legalize import adapt, results_together
from dovetail.target.pattern import Match, Mismatch, match_pattern
from firmware import require_chip
from networks import Net
from test_vendor_library import run_equals_graph


def blocks(shape: tuple[int, int, int] = (12, 10, 8), zero: int = 3) -> Graph:
    """Two residual blocks, and an image whose pool is read too."""
    net = Net("blocks", shape, zero_point=zero)
    value = net.x
    for inner in (16, 4):
        first = net.convolution(value, inner, relu=True)
        value = net.addition(net.convolution(first, shape[2]), value)
    image = net.convolution(value, 12)
    largest = net.pool(image, 3, 1, 1)
    return net.finish(net.convolution(image, 4), net.convolution(largest, 4), net.mean(largest))


def compiled(graph: Graph) -> Compiled:
    return compile_graph(adapt(graph, TARGET.policies[0]), TARGET, Options())


@pytest.mark.parametrize("simulator", ["iss", "host"])
@pytest.mark.parametrize("shape", [(12, 10, 8), (4, 6, 3)])
def test_blocks_in_one_launch(shape: tuple[int, int, int], simulator: str, tmp_path: Path) -> None:
    if simulator == "iss":
        require_chip()
    made = compiled(blocks(shape))
    offloads = [region.offload.name for region in made.regions if region.offload]
    assert offloads == ["residual block", "residual block", "image and pool"]
    run_equals_graph(made, TARGET, tmp_path / "build", simulator)


def test_results_together_keep_every_bit() -> None:
    graph = blocks()
    given = {
        name: np.arange(np.prod(graph.types[name].shape)).reshape(graph.types[name].shape).astype(np.int8)
        for name in graph.inputs
    }
    after = adapt(graph, TARGET.policies[0])
    assert len(after.nodes) == len(graph.nodes) + 7
    one, other = evaluate(graph, given), evaluate(after, given)
    assert all(np.array_equal(one[name], other[name]) for name in graph.outputs)


@pytest.mark.parametrize("name", ["residual block", "image and pool"])
def test_check_draws_cases_of_each(name: str) -> None:
    """And finds nothing in them."""
    checked = check(TARGET, Order(Limits(30_000, 6_000, 60), ("model",), (name,)))
    assert checked.findings == [] and sum(one.cases for one in checked.tested) > 10


def test_check_finds_a_result_at_the_wrong_place() -> None:
    """The second result a byte further on."""
    (engine,) = TARGET.engines
    broken = engine.offloads[1]

    def commands(match: dt.Match, operands: Mapping[str, dt.Operand]) -> tuple[dt.Command, ...]:
        (made,) = broken.commands(match, operands)
        assert isinstance(made, dt.Command)
        place = REGISTERS.names.index("largest")
        words = (*made.words[:place], made.words[place] + 1, *made.words[place + 1 :])
        return (replace(made, words=words),)

    changed = replace(engine, offloads=(engine.offloads[0], replace(broken, commands=commands)))
    checked = check(replace(TARGET, engines=(changed,)), Order(Limits(8_000, 1_500, 40), ("model",), (broken.name,)))
    assert checked.findings


def test_sides_of_a_result_that_is_read_elsewhere() -> None:
    """A part that stands once in a pattern may not be read outside; one that stands twice, only within; no output."""
    net = Net("read", (4, 4, 4))
    image = net.convolution(net.x, 4)
    half = net.pool(image)
    graph = net.finish(image, half)
    assert isinstance(match_pattern(BOTH, graph, half), Mismatch)
    found = match_pattern(IMAGE, graph, image)
    assert isinstance(found, Match) and set(found.values) >= {"x", "weights_1"}
    inner = match_pattern(dt.apply(MaxPool2d, IMAGE), graph, half)
    assert isinstance(inner, Mismatch) and "is also needed elsewhere" in inner.sentence
    assert isinstance(match_pattern(dt.apply(MaxPool2d, IMAGE), graph, half, inside=False), Match)


def siblings(cyclic: bool) -> Graph:
    """Two convolutions of one image, or one of what is made of the other."""
    net = Net("siblings", (4, 4, 4))
    one = net.convolution(net.x, 4)
    other = net.convolution(one if cyclic else net.x, 8)
    return net.finish(net.pool(one), net.pool(other))


@pytest.mark.parametrize("cyclic", [False, True])
def test_results_side_by_side(cyclic: bool) -> None:
    """Two layers of the same operand are one launch; of which one reads the other's result they are not."""
    pattern = dt.together(convolution(dt.operand("x"), 1), convolution(dt.operand("x" if not cyclic else "y"), 2))
    graph = siblings(cyclic)
    after = results_together(pattern)(graph)
    joints = [node.output for node in after.nodes if isinstance(node.operator, Concat)]
    assert len(joints) == (0 if cyclic else 1)
    given = {"x": np.random.default_rng(1).integers(-128, 128, (1, 4, 4, 4)).astype(np.int8)}
    one, other = evaluate(graph, given), evaluate(after, given)
    assert all(np.array_equal(one[name], other[name]) for name in graph.outputs)
