"""Sections for latency: all elements are never worse than some of them, and every part of a layer is computed once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dovetail.errors import PlanError, TargetError
from dovetail.ir.graph import Graph
from dovetail.mesh.choice import Objective
from dovetail.mesh.mapping import Mapped, map_network, measure
from dovetail.mesh.topology import build_topology, random_faults
from dovetail.schedule.partition import partition
from dovetail.target.mesh import Grid, Mesh
from dovetail.targets.spinnaker2 import MESH, TARGET
from networks import image_net
from test_mesh_mapping import check_exact, check_limits, tiny

FOUR = replace(MESH.resized(chips=1), grid=Grid(4, 4, 1))
"""A mesh of 4x4 elements."""
NEAR = 0.02
"""Of a latency: what the order of pieces on elements can make, of which two are measured."""


def quick(graph: Graph, mesh: Mesh) -> Mapped:
    """A network on a mesh, for latency."""
    return map_network(graph, partition(graph, TARGET), build_topology(mesh), Objective.LATENCY)


def small_net(seed: int) -> Graph:
    """One to three convolutions, sums and a dense layer, by a seed."""
    random = np.random.default_rng(seed)
    net = image_net("n", int(random.integers(4, 13)), 4 * int(random.integers(1, 4)))
    value = net.x
    for _ in range(int(random.integers(1, 4))):
        channels, kernel = int(random.choice([4, 8, 12, 16, 24])), int(random.choice([1, 3]))
        value = net.convolution(value, channels, kernel, relu=True, stride=int(random.choice([1, 1, 2])))
        if random.random() < 0.4:
            value = net.addition(value, net.convolution(value, channels), relu=True)
    return net.finish(net.dense(value, int(random.integers(5, 100))) if random.random() < 0.5 else value)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """One or two chips of 1 to 18 elements."""
    width, height, size = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    corner = st.tuples(st.integers(0, width - 1), st.integers(0, height - 1))
    rate = st.sampled_from([4.0, 16.0, 32.0])
    rates = replace(MESH.rates, port=draw(rate), noc=draw(rate), dram=draw(rate))
    grid = Grid(width, height, size, gate=draw(corner), dram=draw(corner))
    chips, usable = draw(st.sampled_from([1, 1, 2])), 1024 * draw(st.sampled_from([40, 64, 92]))
    return replace(MESH.resized(chips=chips), grid=grid, rates=rates, usable=usable)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(meshes(), st.integers(0, 999), st.sampled_from([0.05, 0.1, 0.2, 0.4]), st.integers(0, 99))
def test_all_elements_are_never_worse_than_some(mesh: Mesh, seed: int, share: float, faults: int) -> None:
    graph = small_net(seed)
    hit = random_faults(mesh, share, faults)
    assume(hit.faults.elements or hit.faults.noc or hit.faults.links)
    try:
        some = measure(quick(graph, hit), 1).latency
    except (PlanError, TargetError):
        return
    assert measure(quick(graph, mesh), 1).latency <= some * (1 + NEAR)


@pytest.mark.parametrize("name", ["ic_resnet8", "kws_dscnn", "ad_autoencoder"])
def test_sections_on_a_mesh_of_sixteen(name: str) -> None:
    found = quick(tiny(name), FOUR)
    assert len(found.parts.sections) > 1 and all(found.placed)
    check_limits(found)
    check_exact(tiny(name), found)
    whole = map_network(tiny(name), partition(tiny(name), TARGET), build_topology(FOUR), Objective.LATENCY, whole=True)
    assert whole.parts.resident
    quicker, before = measure(found, 1).latency, measure(whole, 1).latency
    print(f"{name}: {quicker:.0f} clocks in {len(found.parts.sections)} sections, {before:.0f} as a whole")
    assert quicker < 0.6 * before


def test_a_layer_too_large_is_computed_in_parts() -> None:
    net = image_net("large", 4, 32)
    graph = net.finish(net.dense(net.convolution(net.x, 64, relu=True), 200))
    tight = replace(FOUR, grid=Grid(2, 2, 1), usable=40 * 1024)
    found = quick(graph, tight)
    layers = [stage.layer.index for section in found.parts.sections for stage in section.stages]
    assert len(layers) > len(set(layers)) and all(found.placed)
    check_exact(graph, found)
