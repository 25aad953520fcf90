"""Sections for latency: all elements are never worse than some of them, and every part of a layer is computed once."""

from __future__ import annotations

import struct
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dovetail.compile import sample_inputs
from dovetail.errors import PlanError, SimulationError, TargetError
from dovetail.guests.mesh.emit import MeshProject, emit_mesh
from dovetail.guests.mesh.mapping import map_network, measure
from dovetail.guests.mesh.partition import Objective
from dovetail.guests.mesh.pieces import execute
from dovetail.guests.mesh.placement import MeshMapping
from dovetail.guests.mesh.rack import ExactRun, run_exact
from dovetail.guests.mesh.topology import build_topology, random_faults
from dovetail.ir.graph import Graph, evaluate
from dovetail.schedule.partition import partition
from dovetail.target.mesh import Grid, Mesh
from dovetail.targets.spinnaker2 import MESH, TARGET
from networks import image_net
from test_mesh_mapping import check_exact, check_limits, tiny

needs_firmware = pytest.mark.skipif(
    find_spec("unicorn") is None or find_spec("ziglang") is None, reason="elements' firmware needs unicorn and ziglang"
)
FOUR = replace(MESH.resized(chips=1), grid=Grid(4, 4, 1))
"""A mesh of 4x4 elements."""
NEAR = 0.02
"""Of a latency: what the order of pieces on elements can make, of which two are measured."""


def quick(graph: Graph, mesh: Mesh) -> MeshMapping:
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


@settings(max_examples=15, deadline=None, derandomize=True)
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


@pytest.mark.parametrize("name", ["ic_resnet8", "ad_autoencoder"])
def test_sections_on_a_mesh_of_sixteen(name: str) -> None:
    found = quick(tiny(name), FOUR)
    assert len(found.sections) > 1 and all(found.placed)
    check_limits(found)
    whole = map_network(tiny(name), partition(tiny(name), TARGET), build_topology(FOUR), Objective.LATENCY, whole=True)
    assert whole.resident
    quicker, before = measure(found, 1).latency, measure(whole, 1).latency
    print(f"{name}: {quicker:.0f} clocks in {len(found.sections)} sections, {before:.0f} as a whole")
    assert quicker < 0.65 * before and quicker < {"ic_resnet8": 113_900, "ad_autoencoder": 13_600}[name]


def test_several_layers_at_a_time_and_cuts_for_a_stream_on_many_elements() -> None:
    chip = MESH.resized(chips=1)
    found = quick(tiny("kws_dscnn"), chip)
    assert 1 < len(found.sections) < len(found.network.layers) - 1 and measure(found, 1).latency < 21_600
    found = quick(tiny("ad_autoencoder"), chip)
    assert found.resident and measure(found, 1).latency < 6_000


def run(graph: Graph, found: MeshMapping, inputs: int = 2) -> tuple[MeshProject, ExactRun]:
    """What the elements did; outputs are compared, and the time with the model's."""
    project = emit_mesh(found, TARGET)
    given = [sample_inputs(graph, seed) for seed in range(inputs)]
    done = run_exact(found, project, TARGET, given)
    for arrays, outputs in zip(given, done.outputs, strict=True):
        expected = evaluate(graph, arrays)
        assert all(np.array_equal(expected[name], outputs[name]) for name in graph.outputs)
        assert all(len(np.unique(expected[name])) > 1 for name in graph.outputs)
    modelled, executed = measure(found, 1).latency, measure(found, 1, clocks=done.clocks).latency
    print(f"{graph.name}: {len(found.placed)} sections, {executed:.0f} clocks executed, {modelled:.0f} modelled")
    return project, done


@needs_firmware
@pytest.mark.parametrize(
    "name",
    [
        *("ic_resnet8", "ad_autoencoder"),
        *(pytest.param(name, marks=pytest.mark.oracles) for name in ("kws_dscnn", "vww_mobilenetv1")),
    ],
)
def test_sections_are_executed_exactly(name: str) -> None:
    found = quick(tiny(name), FOUR)
    project, done = run(tiny(name), found)
    early = [struct.unpack_from("<I", one.data, 8 + 24 * n + 12)[0] for one in project.elements for n in range(3)]
    assert max(done.memory) <= MESH.usable and any(early)
    executed = measure(found, 1, clocks=done.clocks).latency
    assert abs(executed - measure(found, 1).latency) <= 0.06 * executed


@needs_firmware
def test_faults_in_sections_are_noticed() -> None:
    """Wrong weights, and data that are not waited for."""
    graph = small_net(3)
    found = quick(graph, replace(FOUR, grid=Grid(2, 2, 1)))
    project, _ = run(graph, found)
    slow = replace(found.mesh, rates=replace(MESH.rates, dram=0.5))
    found = replace(found, topology=replace(found.topology, mesh=slow))
    run(graph, found, 1)
    assert len(found.placed) > 1
    given, expected = [sample_inputs(graph)], evaluate(graph, sample_inputs(graph))

    def differs(wrong: MeshProject) -> bool:
        try:
            outputs = run_exact(found, wrong, TARGET, given, jobs=1).outputs[0]
        except SimulationError:
            return True
        return any(not np.array_equal(expected[name], outputs[name]) for name in graph.outputs)

    # constants of every element's first section: its second load
    place = struct.unpack_from("<I", project.elements[0].data, 4)[0]
    at = [struct.unpack_from("<3I", one.data, place + 12) for one in project.elements]
    name = next(name for name in project.files if name.startswith("chips/"))
    image = bytearray(project.files[name])
    dram = len(image) - struct.unpack_from("<I", image, 24)[0]
    for start, _, size in at:
        begin = dram + start
        image[begin : begin + size] = bytes(byte ^ 0x55 for byte in project.files[name][begin : begin + size])
    assert differs(replace(project, files={**project.files, name: bytes(image)}))
    waits = b"while (dovetail_mmio_read(MESH_BASE + LOADED) == 0u)"
    name = "runtime/mesh_sections_sim.c"
    hasty = project.files[name].replace(waits, b"while (0)")
    assert hasty != project.files[name]
    assert differs(replace(project, files={**project.files, name: hasty}))


@needs_firmware
def test_projects_in_sections_are_the_same_twice() -> None:
    found = quick(small_net(3), replace(FOUR, grid=Grid(2, 2, 1)))
    first, second = (emit_mesh(found, TARGET) for _ in range(2))
    assert first.files == second.files and first.elements == second.elements
    keys = np.concatenate([tables.key for tables in first.keys])
    assert len(np.unique(keys)) == len(keys)
    assert any(name.startswith("chips/") for name in first.files)


@needs_firmware
def test_every_step_says_how_far_it_is() -> None:
    graph, said = small_net(3), list[str]()
    mesh = build_topology(replace(FOUR, grid=Grid(2, 2, 1)))
    found = map_network(graph, partition(graph, TARGET), mesh, Objective.LATENCY, show=said.append)
    execute(found, sample_inputs(graph), said.append)
    project = emit_mesh(found, TARGET)
    run_exact(found, project, TARGET, [sample_inputs(graph)], jobs=1, show=said.append)
    steps = len(found.placed) * len(project.elements)
    pieces = sum(section.pieces for section in found.sections)
    count = len(found.network.layers)
    for text in (
        *(f"measuring sections: {count} of {count} layers", f"computing every piece: {pieces} of {pieces}"),
        *("compiling the elements' programs: 1 of 1", f"running every element's firmware: {steps} of {steps}"),
    ):
        assert text in said


@needs_firmware
def test_a_layer_too_large_is_computed_in_parts() -> None:
    net = image_net("large", 4, 32)
    graph = net.finish(net.dense(net.convolution(net.x, 64, relu=True), 200))
    tight = replace(FOUR, grid=Grid(2, 2, 1), usable=40 * 1024)
    found = quick(graph, tight)
    layers = [stage.layer.index for section in found.sections for stage in section.stages]
    assert len(layers) > len(set(layers))
    check_exact(graph, found)
    _, done = run(graph, found)
    assert max(done.memory) <= tight.usable


def test_a_network_too_large_at_once_runs_in_sections() -> None:
    """For throughput, too; with `whole` it is refused."""
    net = image_net("large", 4, 32)
    graph = net.finish(net.dense(net.convolution(net.x, 64, relu=True), 200))
    tight = build_topology(replace(FOUR, grid=Grid(2, 2, 1), usable=40 * 1024))
    regions = partition(graph, TARGET)
    found = map_network(graph, regions, tight, Objective.THROUGHPUT)
    assert len(found.sections) > 1 and emit_mesh(found, TARGET).elements
    with pytest.raises(ValueError, match="not resident"):
        assert found.whole
    with pytest.raises(PlanError, match="alone has more pieces than there are elements, 4 elements are there"):
        map_network(graph, regions, tight, Objective.THROUGHPUT, whole=True)
