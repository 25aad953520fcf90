"""The model of time beside executed firmware: networks of many kinds, on meshes of 16, 64 and 152 elements."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from command_line import dovetail
from conftest import shared_dir
from dovetail.compile import Options, prepare, sample_inputs
from dovetail.guests.mesh.emit import emit_mesh
from dovetail.guests.mesh.mapping import map_network, measure
from dovetail.guests.mesh.partition import Objective
from dovetail.guests.mesh.rack import run_exact
from dovetail.guests.mesh.topology import build_topology
from dovetail.ir.graph import Graph, evaluate
from dovetail.kernels import core_traits, generate
from dovetail.schedule.partition import partition
from dovetail.target.description import Target
from dovetail.target.mesh import Grid, Mesh
from dovetail.targets.spinnaker2 import MESH, TARGET
from test_mesh_mapping import tiny

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))
from mesh_core import chain, with_floats

if find_spec("unicorn") is None or find_spec("ziglang") is None:
    pytest.skip("elements' firmware needs unicorn and ziglang", allow_module_level=True)

NEAR = 0.06
CHIP = MESH.resized(chips=1)
MESHES = {16: replace(CHIP, grid=Grid(4, 4, 1)), 64: replace(CHIP, grid=Grid(4, 4, 4)), 152: CHIP}
FARTHER = {
    ("chain", Objective.LATENCY, 152): 0.075,
    ("kws_dscnn", Objective.THROUGHPUT, 16): 0.07,
    ("digits", Objective.THROUGHPUT, 64): 0.08,
}
"""How far the model may be where rows of pieces have four or five pixels (docs/mesh.md, Limits)."""
TINY = ("ad_autoencoder", "ic_resnet8", "kws_dscnn")
ELSEWHERE = ((Objective.THROUGHPUT, 152), (Objective.LATENCY, 16))
"""Of these and VWW the same is in test_mesh_firmware.py and test_mesh_sections.py."""
SLOW = pytest.mark.oracles
CASES = [
    pytest.param(name, objective, elements, marks=() if name in ("odd", "digits") else SLOW)
    for name in ("odd", "digits", "floats", "chain", *TINY)
    for objective in Objective
    for elements in MESHES
    if name not in TINY or (objective, elements) not in ELSEWHERE
]


@cache
def graph_of(name: str) -> Graph:
    """A network by its name; `chain` has layers of many sizes."""
    if name.startswith("odd"):  # floats plane by plane, a slice, a transposition and pools
        return prepare(shared_dir() / "faults" / "mesh" / "odd_q.onnx", TARGET, Options())
    if name == "digits":
        with TemporaryDirectory() as folder:
            assert dovetail("zoo", "digits", "-o", Path(folder) / "net.onnx") == 0
            return prepare(Path(folder) / "net.onnx", TARGET, Options())
    own = {"floats": lambda: with_floats(3, 12, 20), "chain": lambda: chain(-128, 8, 16)}
    return own.get(name, lambda: tiny(name))()


def check(graph: Graph, target: Target, mesh: Mesh, objective: Objective, near: float = NEAR) -> None:
    """Executed equal, and the times as modelled."""
    found = map_network(graph, partition(graph, target), build_topology(mesh), objective)
    given = [sample_inputs(graph, seed) for seed in range(2)]
    done = run_exact(found, emit_mesh(found, target), target, given)
    for arrays, outputs in zip(given, done.outputs, strict=True):
        expected = evaluate(graph, arrays)
        assert all(np.array_equal(expected[name], outputs[name]) for name in graph.outputs)
    modelled, executed = measure(found), measure(found, clocks=done.clocks)
    for what in ("interval", "latency"):
        taken, charged = getattr(executed, what), getattr(modelled, what)
        print(f"{graph.name}, {len(build_topology(mesh).elements)} elements, {objective.value}: {what} ", end="")
        print(f"{taken:,.0f} executed, {charged:,.0f} modelled ({charged / taken - 1:+.1%})")
        assert charged == pytest.approx(taken, rel=near)


@pytest.mark.parametrize(("name", "objective", "elements"), CASES)
def test_times_are_as_modelled(name: str, objective: Objective, elements: int) -> None:
    check(graph_of(name), TARGET, MESHES[elements], objective, FARTHER.get((name, objective, elements), NEAR))


def test_floats_are_quantised_by_tables_from_so_many_on() -> None:
    """What pieces are charged with changes where their kernel does."""
    least = int(MESH.core.tabled)
    for count, tabled in ((least - 4, False), (least, True)):
        layer = partition(with_floats(1, 2, count // 2), TARGET)[0]
        kernel = generate(layer.graph, "compute", core_traits(TARGET.core))
        assert ("quantize_bytes" in kernel.source) == tabled
