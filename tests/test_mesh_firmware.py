"""Every element's C, built and run in an emulated core of its own: equal to the integer graph in every byte."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec

import numpy as np
import pytest

from dovetail.compile import sample_inputs
from dovetail.errors import SimulationError
from dovetail.farm import LOST
from dovetail.guests.mesh.emit import MeshProject, emit_mesh
from dovetail.guests.mesh.mapping import measure
from dovetail.guests.mesh.partition import Objective
from dovetail.guests.mesh.placement import MeshMapping
from dovetail.guests.mesh.rack import ElementJob, ExactRun, element_setup, run_exact, run_wave
from dovetail.ir.graph import Graph, evaluate
from dovetail.target.mesh import CoreClocks, Grid, pack_weights
from dovetail.targets.spinnaker2 import MESH, TARGET
from networks import image_net
from test_mesh_mapping import mapped, tiny
from test_mesh_own import HAND, own, own_of

pytestmark = pytest.mark.oracles

if find_spec("unicorn") is None or find_spec("ziglang") is None:
    pytest.skip("elements' firmware needs unicorn and ziglang", allow_module_level=True)


def run(graph: Graph, found: MeshMapping, inputs: int = 3) -> tuple[MeshProject, ExactRun]:
    """The project, and what its elements did; outputs are compared."""
    project = emit_mesh(found, TARGET)
    given = [sample_inputs(graph, seed) for seed in range(inputs)]
    done = run_exact(found, project, TARGET, given)
    for arrays, outputs in zip(given, done.outputs, strict=True):
        expected = evaluate(graph, arrays)
        assert all(np.array_equal(expected[name], outputs[name]) for name in graph.outputs)
        assert all(len(np.unique(expected[name])) > 1 for name in graph.outputs)
    return project, done


FEW = replace(MESH.resized(chips=2), grid=Grid(2, 2, 4, gate=(1, 0), dram=(0, 1)), core=CoreClocks())
"""Two chips of 16 elements: few programs to compile. The core takes no time, so that all kinds of cuts are made."""


@lru_cache
def small() -> Graph:
    """A network whose first value is convolved and added to the result, with a stride, and sums that are cut."""
    net = image_net("small", 4, 16)
    value = net.convolution(net.x, 24, relu=True)
    value = net.addition(value, net.convolution(value, 24, 1), relu=True)
    value = net.pool(net.convolution(value, 16, stride=2, relu=True), 2, 1)
    return net.finish(net.dense(net.dense(value, 200), 7))


@pytest.mark.parametrize("objective", [Objective.LATENCY, Objective.THROUGHPUT])
def test_small_network(objective: Objective) -> None:
    found = mapped(small(), FEW, objective)
    stages = found.sections[0].stages
    assert max(stage.cut.sums for stage in stages) > 1
    assert max(stage.cut.channels for stage in stages) > 1 and max(stage.cut.rows for stage in stages) > 1
    assert len({int(chip) for chip in found.whole[0].chip}) == 2
    _, done = run(small(), found)
    assert max(done.memory) <= MESH.usable
    held = np.concatenate([stage.memory for stage in stages])
    assert (np.array(done.memory) <= held).all()  # what partition counted with was enough


PACES = {"ic_resnet8": 12_000, "vww_mobilenetv1": 14_000, "kws_dscnn": 6_000, "ad_autoencoder": 700}
"""Cycles for each input of the slowest of 152 elements, at most."""


def ratios(found: MeshMapping, done: ExactRun) -> dict[str, list[float]]:
    """What pieces are charged with, in relation to what they took, by who computes them."""
    known: dict[str, list[float]] = {}
    for stage in found.sections[0].stages:
        operators = [type(node.operator).__name__ for node in stage.layer.graph.nodes]
        kind = stage.layer.kind if stage.layer.on_array else operators[0]
        taken = done.turns[:, stage.first : stage.first + stage.pieces, 2].mean(axis=0)
        known.setdefault(kind, []).extend((stage.costs.clocks / taken).tolist())
    return known


@pytest.mark.parametrize("name", PACES)
def test_networks_on_at_least_64_elements(name: str) -> None:
    found = mapped(tiny(name), MESH.resized(chips=1))
    project, done = run(tiny(name), found, inputs=2)
    assert len(project.elements) >= 64
    assert len(project.programs) < len(project.elements) / 4
    assert max(done.memory) <= min(MESH.usable, 96 * 1024)
    assert 0 < max(one.stack for one in done.runs) <= TARGET.core.stack
    modelled, executed = measure(found), measure(found, clocks=done.clocks)
    for what in ("interval", "latency"):
        taken, charged = getattr(executed, what), getattr(modelled, what)
        print(f"{name}: {what} {taken:,.0f} executed, {charged:,.0f} modelled")
        assert charged == pytest.approx(taken, rel=0.06)
    assert max(done.paces) <= PACES[name]
    for kind, each in ratios(found, done).items():
        print(f"{name}: {kind}, {len(each)} pieces, modelled / executed {min(each):.2f} to {max(each):.2f}")
        assert min(each) > 0.88 and max(each) < 1.14
    print(
        f"{name}: {len(project.elements)} elements, {len(project.programs)} programs, "
        f"{sum(one.instructions for one in done.runs)} instructions, {max(done.memory)} bytes at most"
    )


def test_a_cluster_gives_the_same() -> None:
    distributed = pytest.importorskip("distributed")
    found = mapped(small(), FEW)
    project = emit_mesh(found, TARGET)
    given, said = [sample_inputs(small())], list[str]()
    setting = {"n_workers": 1, "threads_per_worker": 2, "processes": False, "dashboard_address": None}
    runs = [run_exact(found, project, TARGET, given, jobs=jobs) for jobs in (1, 2)]
    with distributed.LocalCluster(**setting) as cluster:
        address = cluster.scheduler_address
        last = run_exact(
            *(found, project, TARGET, given),
            scheduler=address,
            show=said.append,
        )
    runs_said = [re.findall(r"\d+", text) for text in said if "every element's firmware" in text]
    assert [int(done) for done, _ in runs_said] == list(range(1, int(runs_said[-1][1]) + 1))
    assert int(runs_said[-1][1]) >= len(project.elements) and "compiling the elements' programs" in said[0]
    expected = evaluate(small(), given[0])
    for run in (*runs, last):
        assert all(np.array_equal(expected[name], run.outputs[0][name]) for name in small().outputs)
        assert [one.cycles for one in run.runs] == [one.cycles for one in last.runs]
        assert [one.instructions for one in run.runs] == [one.instructions for one in last.runs]


def test_an_element_that_ends_its_process_is_named() -> None:
    def dying(function: object, items: Sequence[object]) -> Iterator[tuple[int, object]]:
        yield from ((number, LOST) for number, _ in enumerate(items))

    with pytest.raises(SimulationError, match="died") as caught:
        run_wave(dying, element_setup(TARGET), {7: ElementJob(b"", b"")})  # type: ignore[arg-type]
    assert caught.value.where == "element 7"


def test_projects_are_the_same_twice_and_images_hold_every_element() -> None:
    found = mapped(small(), FEW, Objective.LATENCY)
    first, second = (emit_mesh(found, TARGET) for _ in range(2))
    assert first.files == second.files
    count = 0
    for name, content in first.files.items():
        if name.startswith("chips/"):
            magic, _, _, elements, _, _, dram = struct.unpack_from("<4sIIIIII", content)
            assert magic == b"DVM2" and not dram
            place = 28
            for _ in range(elements):
                _, size, program, _ = struct.unpack_from("<II32sI", content, place)
                assert program.rstrip(b"\0").decode() in first.programs
                place += 44 + size + -size % 4
            count += elements
    assert count == len(first.elements) == found.sections[0].pieces


def test_a_wrong_constant_is_noticed() -> None:
    """The comparison can fail: some of one element's weights are changed."""
    found = mapped(small(), FEW, Objective.LATENCY)
    project = emit_mesh(found, TARGET)
    last = project.elements[-1]
    data = bytearray(last.data)
    data[32:300] = bytes(byte ^ 0x55 for byte in data[32:300])
    broken = replace(project, elements=(*project.elements[:-1], replace(last, data=bytes(data))))
    given = sample_inputs(small())
    done = run_exact(found, broken, TARGET, [given])
    expected = evaluate(small(), given)
    assert any(not np.array_equal(expected[name], done.outputs[0][name]) for name in small().outputs)


def test_pieces_that_share_elements_take_turns() -> None:
    """A partition by hand, boxes that are no grid in it: three layers on one element, which sends to itself."""
    found = own(HAND)
    project, done = run(tiny("ic_resnet8"), found)
    shared = [element for element in project.elements if len(element.pieces) > 1]
    assert len(shared) == 1 and len(shared[0].pieces) == 3
    assert {name.split("/")[2] for name in project.files if f"/{shared[0].record.program}/" in name} == {
        *("program.c", "program.h", "piece_0.c", "piece_1.c", "piece_2.c")
    }
    assert max(done.memory) <= MESH.usable
    last, text = shared[0], project.files[f"programs/{shared[0].record.program}/piece_1.c"].decode()
    start = int(text.split("(element_data + ")[1].split("u)")[0]) + 32
    wrong = bytearray(last.data)
    wrong[start : start + 300] = bytes(byte ^ 0x55 for byte in wrong[start : start + 300])
    broken = [replace(last, data=bytes(wrong)) if one is last else one for one in project.elements]
    given = sample_inputs(tiny("ic_resnet8"))
    done = run_exact(found, replace(project, elements=tuple(broken)), TARGET, [given])
    expected = evaluate(tiny("ic_resnet8"), given)
    assert any(not np.array_equal(expected[name], done.outputs[0][name]) for name in expected)


FEWER = """schema: 2
groups: {few: 2, one: 1}
layers:
  conv_0: {group: few}
  conv_1: {group: few}
  conv_2: {group: few, pieces: [{box: [[0, 2], [0, 2], [0, 7]]}, {box: [[0, 2], [0, 2], [7, 16]]}]}
  max_pool_3: {group: one}
  dense_5: {group: one}
  dense_6: {group: one}
"""


def test_a_network_on_fewer_elements_than_layers() -> None:
    """Everything shares: what is chosen where a file gives three elements only, one of them for the last layers."""
    found = own_of(small(), FEWER)
    assert len(found.whole[0].tenants) == 3
    _, done = run(small(), found)
    assert max(done.memory) <= MESH.usable


def test_a_message_that_never_comes_is_said() -> None:
    found = mapped(small(), FEW, Objective.LATENCY)
    project = emit_mesh(found, TARGET)
    last = project.elements[-1]
    start = struct.unpack_from("<I", last.data, 16)[0]
    data = bytearray(last.data)
    struct.pack_into("<I", data, start, 0xFFFF)
    broken = replace(project, elements=(*project.elements[:-1], replace(last, data=bytes(data))))
    with pytest.raises(SimulationError, match="no message of the key 65535"):
        run_exact(found, broken, TARGET, [sample_inputs(small())])


def test_weights_are_packed_in_groups_of_channels() -> None:
    weights = np.arange(5 * 2 * 3 * 4, dtype=np.int8).reshape(5, 2, 3, 4)
    packed = pack_weights("convolution", weights)
    assert packed.shape == (2, 2, 3, 4, 4)
    assert all(packed[o // 4, :, :, :, o % 4].tolist() == weights[o].tolist() for o in range(5))
    assert not packed[1, ..., 1:].any()
    dense = pack_weights("dense", np.arange(40, dtype=np.int8).reshape(20, 2))
    assert dense.shape == (2, 2, 16) and dense[1, 1, 3] == 39
