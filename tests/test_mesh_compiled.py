"""Elements that are targets: pieces compiled by the element's own compiler, executed with its engines and driver."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import dovetail.target as dt
from dovetail.compile import sample_inputs
from dovetail.errors import PlanError, TargetError
from dovetail.guests.mesh.compiled import CompiledPieces, digest, share_on_engines, used_places, with_compiler
from dovetail.guests.mesh.emit import MeshProject, emit_mesh
from dovetail.guests.mesh.mapping import map_network, measure
from dovetail.guests.mesh.own import read_mapping
from dovetail.guests.mesh.partition import Objective
from dovetail.guests.mesh.pieces import execute, piece_graph
from dovetail.guests.mesh.placement import MeshMapping
from dovetail.guests.mesh.rack import ExactRun, run_exact
from dovetail.guests.mesh.topology import build_topology
from dovetail.ir.graph import Graph, GraphBuilder, evaluate
from dovetail.ir.operators.arithmetic import Quantize
from dovetail.ir.operators.reduction import MaxPool2d
from dovetail.ir.types import DType, TensorType
from dovetail.program.ir import LaunchStatement
from dovetail.schedule.partition import partition
from dovetail.target.mesh import MacArray
from dovetail.targets import load_target
from dovetail.targets.spinnaker2 import TARGET as OF_MESH
from networks import image_net
from page_blocks import assembled, blocks

needs_firmware = pytest.mark.skipif(
    find_spec("unicorn") is None or find_spec("ziglang") is None, reason="elements' firmware needs unicorn and ziglang"
)
PORT_PAGE = Path(__file__).resolve().parents[1] / "docs" / "port.md"


def meshed(element: dt.Target, routers: int = 2, **changed: object) -> dt.Target:
    """A chip of elements that compute by themselves."""
    described = dt.Mesh(
        array=None,
        grid=dt.Grid(routers, routers, 1),
        rates=dt.Rates(port=8, noc=16, link=4, dram=16),
        board=((0, 0),),
        origins=((0, 0),),
        directions=((1, 0), (0, 1), (-1, 0), (0, -1)),
        clock=250e6,
        usable=element.memory(element.values).size,
        route_entries=1024,
        dram_bytes=1 << 28,
        code=24 * 1024,
    )
    return with_compiler(replace(element, mesh=replace(described, **changed)))


@pytest.fixture
def wren(tmp_path: Path) -> dt.Target:
    """The engine of docs/port.md."""
    for name, text in assembled(list(blocks(PORT_PAGE))).items():
        if name.startswith("wren"):
            (tmp_path / name).write_text(text)
    return load_target(str(tmp_path / "wren.py"))


@lru_cache
def network(channels: int = 16) -> Graph:
    """Convolutions that are cut, one of them with a stride, a sum, and a dense layer."""
    net = image_net("small", 8, channels)
    value = net.convolution(net.x, 16, relu=True)
    value = net.addition(value, net.convolution(value, 16, 1), relu=True)
    value = net.convolution(value, 8, 1, stride=2)  # whole, it reads neither the last row nor the last column
    return net.finish(net.dense(net.convolution(value, 8, relu=True), 10))


def mapped(target: dt.Target, graph: Graph, objective: Objective) -> MeshMapping:
    """The network on the target's mesh; its pieces in numpy equal the network."""
    assert target.mesh is not None
    found = map_network(graph, partition(graph, target), build_topology(target.mesh), objective)
    given = sample_inputs(graph)
    expected, computed = evaluate(graph, given), execute(found, given)
    assert all(np.array_equal(expected[name], computed[name]) for name in graph.outputs)
    return found


def run(target: dt.Target, graph: Graph, project: MeshProject, found: MeshMapping) -> tuple[ExactRun, bool]:
    """What the elements did with two inputs, and whether every output was right."""
    given = [sample_inputs(graph, seed) for seed in range(2)]
    done = run_exact(found, project, target, given, jobs=1)
    pairs = [(evaluate(graph, arrays), outputs) for arrays, outputs in zip(given, done.outputs, strict=True)]
    assert all(len(np.unique(expected[name])) > 1 for expected, _ in pairs for name in graph.outputs)
    return done, all(np.array_equal(e[name], outputs[name]) for e, outputs in pairs for name in graph.outputs)


def check_times(found: MeshMapping, done: ExactRun, near: float = 0.07) -> None:
    """The stream takes what the model says, with the cycles of the firmware."""
    modelled, executed = measure(found), measure(found, clocks=done.clocks)
    for what in ("interval", "latency"):
        taken, charged = getattr(executed, what), getattr(modelled, what)
        print(f"{what} {taken:,.0f} executed, {charged:,.0f} modelled")
        assert charged == pytest.approx(taken, rel=near)


def shares(target: dt.Target, found: MeshMapping) -> float:
    """Of the multiply-accumulates of all pieces those on engines."""
    assert target.mesh is not None and isinstance(target.mesh.array, CompiledPieces)
    pieces = [(s, piece) for s in found.sections[0].stages for piece in range(s.pieces)]
    counts = np.array([share_on_engines(target.mesh.array.compiled(piece_graph(*one)[0])) for one in pieces])
    return float(counts[:, 0].sum() / counts[:, 1].sum())


@needs_firmware
@pytest.mark.parametrize(
    "objective", [Objective.LATENCY, pytest.param(Objective.THROUGHPUT, marks=pytest.mark.oracles)]
)
def test_the_engine_of_the_porting_page(wren: dt.Target, objective: Objective) -> None:
    small = replace(wren.memory("L1"), size=1536)  # too small for whole layers: they are cut to tiles
    target, graph = meshed(replace(wren, memories=(wren.memory("L2"), small)), 3), network()
    found = mapped(target, graph, objective)
    stages = found.sections[0].stages
    assert max(stage.pieces for stage in stages) > 1 and all(stage.cut.sums == 1 for stage in stages)
    assert shares(target, found) >= 0.95
    project = emit_mesh(found, target)
    done, right = run(target, graph, project, found)
    assert right and max(done.memory) <= wren.memory("L2").size
    check_times(found, done)
    assert target.mesh is not None and isinstance(target.mesh.array, CompiledPieces)
    programs = [one.plan.program.statements for one in target.mesh.array.compilations.values()]
    assert max(sum(isinstance(one, LaunchStatement) for one in statements) for statements in programs) > 1
    if objective is Objective.LATENCY:  # the comparison finds a wrong weight
        last = project.elements[-1]
        data = bytearray(last.data)
        data[32:200] = bytes(byte ^ 0x55 for byte in data[32:200])
        broken = (*project.elements[:-1], replace(last, data=bytes(data)))
        assert not run(target, graph, replace(project, elements=broken), found)[1]


def test_pieces_that_differ_in_constants_share_a_program() -> None:
    target, graph = meshed(load_target("macarray"), 4), network(32)
    found = mapped(target, graph, Objective.THROUGHPUT)
    stages = found.sections[0].stages
    assert max(stage.cut.channels * stage.cut.rows for stage in stages) > 1
    first, second = (emit_mesh(found, target) for _ in range(2))
    assert first.files == second.files
    assert len(first.programs) < len(first.elements)
    assert all(stage.costs.clocks.max() < 1 << 30 for stage in stages)
    assert {"driver/macarray.c", "runtime/dma.c"} <= first.files.keys()
    assert b"driver/macarray.c" in first.files["Makefile"]


def test_equal_pieces_are_compiled_once() -> None:
    target, graph = meshed(load_target("macarray")), network()
    assert target.mesh is not None and isinstance(target.mesh.array, CompiledPieces)
    pieces, layer = target.mesh.array, partition(graph, target)[0].graph
    assert pieces.compiled(layer) is pieces.compiled(replace(layer, name="another"))
    assert used_places(pieces.compiled(layer)) == {"macarray"}
    changed = {name: array + 1 for name, array in layer.constants.items()}
    assert digest(layer) == digest(replace(layer, name="another")) != digest(replace(layer, constants=changed))
    assert pieces.planned(layer, layer.inputs) > pieces.planned(layer, ()) > 0 and pieces.grain(layer) == (1, 1, 8)


def owned(target: dt.Target, text: str, folder: Path) -> MeshMapping:
    """The network as a mapping file asks."""
    assert target.mesh is not None
    graph, file = network(), folder / "own.yaml"
    file.write_text(text)
    return read_mapping(file, graph, partition(graph, target), build_topology(target.mesh), Objective.LATENCY)


@needs_firmware
@pytest.mark.oracles
def test_a_partition_of_ones_own(tmp_path: Path) -> None:
    """Boxes that are no grid, of sizes no engine likes, on elements with an engine."""
    target = meshed(load_target("macarray"), 4)
    boxes = "[{box: [[0, 3], [0, 8], [0, 16]], on: [0, 0, 9]}, {box: [[3, 8], [0, 5], [0, 7]]}]"
    found = owned(target, f"schema: 2\nlayers: {{conv_0: {{pieces: {boxes}}}}}", tmp_path)
    stage = found.sections[0].stages[0]
    assert stage.free and found.whole[0].element[0] == 9
    done, right = run(target, network(), emit_mesh(found, target), found)
    assert right and len(done.runs) == found.sections[0].pieces


def test_a_partition_of_ones_own_that_engines_do_not_take(tmp_path: Path) -> None:
    target = meshed(load_target("macarray"), 4)
    two = "schema: 2\nlayers:\n  conv_0: {on: [0, 0, 1]}\n  conv_1: {on: [0, 0, 1]}\n"
    with pytest.raises(PlanError, match=r"own.yaml:4: .* on an element that holds one \(clashes with own.yaml:3\)"):
        owned(target, two, tmp_path)
    with pytest.raises(PlanError, match=r"own.yaml:2: .*conv_1 is cut over what it sums"):
        owned(target, "schema: 2\nlayers: {conv_1: {cut: [1, 1, 1, 2]}}", tmp_path)


def test_what_no_element_can_be_is_refused() -> None:
    riscv = load_target("riscv")
    with pytest.raises(TargetError, match="one core with firmware of its own"):
        meshed(replace(riscv, workers=(riscv.core,)))
    assert with_compiler(riscv) is riscv
    array = load_target("spinnaker2")
    assert array.mesh is not None and isinstance(array.mesh.array, MacArray)
    assert array.engines and with_compiler(array) == OF_MESH  # its programs drive the array themselves
    with pytest.raises(PlanError):
        mapped(meshed(load_target("macarray"), usable=25 * 1024), network(), Objective.LATENCY)


@needs_firmware
def test_floats_and_pools_take_what_the_model_says() -> None:
    """Few floats are quantised one by one, for thirty times the clocks of each: no cut leaves so few."""
    builder = GraphBuilder("floats")
    image = builder.input("x", TensorType((1, 12, 11, 16), DType.FLOAT32))
    scale = builder.constant("scale", np.array([0.02], np.float32))
    zero = builder.constant("zero", np.array([3], np.int32))
    whole = builder.add(Quantize(DType.INT8), [image, scale, zero], "whole")
    graph = builder.finish([builder.add(MaxPool2d((2, 3), (2, 2)), [whole], "y")])
    target = meshed(load_target("riscv"), 3)
    found = mapped(target, graph, Objective.THROUGHPUT)
    first = found.sections[0].stages[0]
    assert first.pieces > 1
    done, right = run(target, graph, emit_mesh(found, target), found)
    assert right
    check_times(found, done, 0.06)


@needs_firmware
@pytest.mark.oracles
def test_a_core_alone_is_an_element_too() -> None:
    """Without engines and DMA: the kernels of the core, as for one machine."""
    target, graph = meshed(load_target("riscv"), 3), network()
    found = mapped(target, graph, Objective.LATENCY)
    project = emit_mesh(found, target)
    done, right = run(target, graph, project, found)
    assert shares(target, found) == 0 and right
    check_times(found, done)


@needs_firmware
@pytest.mark.oracles
def test_times_on_elements_of_ones_own() -> None:
    """A 4x4 mesh of the microcontroller with the array, as on the page."""
    target, graph = meshed(load_target("macarray"), 4), network(32)
    for objective in Objective:
        found = mapped(target, graph, objective)
        done, right = run(target, graph, emit_mesh(found, target), found)
        assert right
        check_times(found, done)
