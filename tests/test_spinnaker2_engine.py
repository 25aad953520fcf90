"""One SpiNNaker2 element: its array as an engine, equal to the mesh's in what it computes and in its clocks."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from dovetail.codegen.emit.project import write_project
from dovetail.compile import Options, compile_graph, sample_inputs
from dovetail.ir.graph import evaluate
from dovetail.run import open_build, run_build
from dovetail.sim.mac_array import JOB, KINDS
from dovetail.targets import load_target
from dovetail.targets.spinnaker2 import ARRAY
from dovetail.targets.spinnaker2_engine import ENGINE, REGISTERS, TARGET, pack, work_of
from dovetail.targets.spinnaker2_model import cycles
from networks import image_net

needs_firmware = pytest.mark.skipif(
    find_spec("unicorn") is None or find_spec("ziglang") is None, reason="firmware needs unicorn and ziglang"
)


@needs_firmware
def test_every_product_is_on_the_array_and_exact(tmp_path: Path) -> None:
    net = image_net("small", 7, 6)
    value = net.convolution(net.x, 10, relu=True)
    value = net.convolution(value, 9, 1, stride=2)
    graph = net.finish(net.dense(value, 7))
    target = load_target("spinnaker2")
    made = compile_graph(graph, target, Options())
    on_array = [region for region in made.regions if region.engine is not None]
    assert len(on_array) == 3 and {region.place for region in on_array} == {"mac"}
    write_project(made.project, tmp_path / "build")
    given = [sample_inputs(graph, seed) for seed in range(2)]
    done = run_build(open_build(tmp_path / "build", target), "iss", given)
    here = run_build(open_build(tmp_path / "build", target), "host", given)  # of an engine without a wait
    for arrays, outputs in zip(given * 2, done.outputs + here.outputs, strict=True):
        expected = evaluate(graph, arrays)
        assert all(len(np.unique(expected[name])) > 1 for name in graph.outputs)
        assert all(np.array_equal(outputs[name], expected[name]) for name in graph.outputs)
    jobs = done.simulation.inferences[0].activities["mac"]
    macs = sum(n.operator.macs([r.graph.types[v] for v in n.inputs]) for r in on_array for n in r.graph.nodes)
    assert sum(job.macs for job in jobs) == macs
    rows = [int(ARRAY.clocks(work_of(one.match))) for one in on_array if one.match is not None]
    assert {job.end - job.start for job in jobs} == set(rows)


@needs_firmware
def test_wrong_weights_are_noticed(tmp_path: Path) -> None:
    """The program is interpreted by the pattern's meaning; the firmware by what was packed: that is what differs."""
    offload = ENGINE.offloads[0]
    broken = replace(offload, pack=lambda match: {name: array ^ 1 for name, array in pack(match).items()})
    target = replace(TARGET, engines=(replace(ENGINE, offloads=(broken,)),))
    net = image_net("small", 6, 4)
    graph = net.finish(net.convolution(net.x, 8, 3))
    made = compile_graph(graph, target, Options())
    assert any(region.engine is not None for region in made.regions)
    write_project(made.project, tmp_path / "build")
    given = sample_inputs(graph)
    (found,) = run_build(open_build(tmp_path / "build", target), "iss", [given]).outputs
    assert any(not np.array_equal(found[name], array) for name, array in evaluate(graph, given).items())


def test_the_array_is_described_once() -> None:
    assert REGISTERS.names == JOB
    job = dict.fromkeys(JOB, 1) | {"columns": 20, "outputs": 8, "inputs": 16, "kind": KINDS.index("convolution")}
    assert cycles(job) == 2 * 16 * 2 + (4 + 1) * 8  # docs: two blocks of columns, two groups of channels; results
    assert ENGINE.memory == TARGET.values == "sram" and TARGET.mesh is not None and TARGET.mesh.array is ARRAY
