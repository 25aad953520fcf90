"""A Keras file to narrow weights on the NE16: read without Keras, quantised, compiled, run."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from conftest import shared_dir
from dovetail.codegen.emit import write_project
from dovetail.compile import Options, compile_model, sample_inputs
from dovetail.guests.ptq import Samples, Settings, prepare, quantise_network
from dovetail.ir.graph import evaluate
from dovetail.read import load_model
from dovetail.run import open_build, run_build
from dovetail.targets import load_target
from firmware import require_chip

IMAGES = 24


def test_resnet8_at_8_4_and_2_bits(tmp_path: Path) -> None:
    """Cycles and bytes of weights fall with the bits; the firmware equals the integer graph."""
    require_chip()
    path = shared_dir() / "models" / "keras" / "ic_resnet8.h5"
    graph, target = prepare(load_model(path), path.name), load_target("ne16")
    images = np.random.default_rng(0).integers(0, 256, (IMAGES, 1, 8, 8, 3)).repeat(4, axis=2).repeat(4, axis=3)
    samples = Samples({graph.inputs[0]: images.astype(np.float32)}, None)
    cycles, sizes = [], []
    for bits in (8, 4, 2):
        found = quantise_network(graph, samples, target, Settings(bits=bits, integer_ends=True))
        model = tmp_path / f"int{bits}.onnx"
        model.write_bytes(found.model.SerializeToString(deterministic=True))
        compiled = compile_model(model, target, Options())
        inputs = sample_inputs(compiled.graph)
        write_project(compiled.project, tmp_path / f"build{bits}")
        result = run_build(open_build(tmp_path / f"build{bits}"), "iss", [inputs])
        for name, array in evaluate(compiled.graph, inputs).items():
            np.testing.assert_array_equal(result.outputs[0][name], array)
        cycles.append(result.simulation.inferences[0].total_cycles or 0)
        sizes.append(found.weight_bytes)
    print(f"cycles {cycles}, bytes {sizes}")
    assert cycles[0] > 1.2 * cycles[1] and cycles[1] > 1.1 * cycles[2]
    assert sizes[0] == 2 * sizes[1] == 4 * sizes[2]
