"""A nest of layers in one launch, with an operand read twice; launches of several results; on the chip and the host."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deep_port import TARGET
from dovetail.compile import Compiled, Options, compile_graph
from dovetail.ir.graph import Graph, evaluate
from dovetail.legalize import adapt
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
    half = net.pool(image)
    return net.finish(net.convolution(image, 4), net.convolution(half, 4), net.mean(half))


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
