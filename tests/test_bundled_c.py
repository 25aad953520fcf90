"""The C of bundled operators under the sanitisers, with arrays of exactly their sizes, as C and as C++."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from core_kernel_cases import Case
from dovetail.compile import Options, prepare
from dovetail.ir.graph import Graph, evaluate
from dovetail.ir.operators.user import UserOperator
from dovetail.ir.types import Array
from dovetail.kernels import generate
from dovetail.operators import installed_operators
from dovetail.targets import load_target
from test_core_kernels import build, needs_compiler
from test_detectors import Yolo, ssd, suppression
from test_kernel_sharing import program
from test_signal_operators import front_end

RISCV = load_target("riscv")


def single(graph: Graph, name: str, values: Mapping[str, Array]) -> Case:
    """One node of a graph, alone, with the values it reads."""
    node = graph.producers()[name]
    read = tuple(dict.fromkeys(node.inputs))
    held = {value: graph.constants[value] for value in read if value in graph.constants}
    given = tuple(value for value in read if value not in held)
    types = {value: graph.types[value] for value in (*read, name)}
    return Case(Graph("case", given, (name,), (node,), types, held), {value: values[value] for value in given})


def cases(folder: Path) -> Iterator[Case]:
    """Every node of a bundled operator in some models, on ordinary inputs and on extremes."""
    limits = [np.array([9], np.int64), np.array([0.5], np.float32)]
    models = {"fast.tflite": ssd(False), "regular.tflite": ssd(True), "front.tflite": front_end()[0]}
    models |= {"yolo.onnx": Yolo().file, "nms.onnx": suppression((2, 30, 4), (2, 3, 30), limits)}
    rng = np.random.default_rng(0)
    for file, data in models.items():
        (folder / file).write_bytes(data)
        graph = prepare(folder / file, RISCV, Options())
        own = [node.output for node in graph.nodes if isinstance(node.operator, UserOperator)]
        for spread in (0.0, 1.0, 1e30):
            inputs: dict[str, Array] = dict(zip(graph.inputs[len(graph.given) :], graph.states, strict=True))
            for name in graph.given:
                kind = graph.types[name]
                low, high = (kind.dtype.low, kind.dtype.high) if kind.dtype.is_integer else (-spread, spread)
                array = rng.uniform(low, high, kind.shape) if spread else np.full(kind.shape, low)
                inputs[name] = array.astype(kind.dtype.numpy)
            values = {**inputs, **evaluate(graph, inputs, [node.output for node in graph.nodes])}
            yield from (single(graph, name, values) for name in own)


@needs_compiler
@pytest.mark.parametrize("language", ["c99", "c++17"])
def test_bundled_c_is_clean_and_exact(tmp_path: Path, language: str) -> None:
    found = list(cases(tmp_path))
    assert {type(case.graph.nodes[0].operator) for case in found} == set(installed_operators())
    text = program(found, [generate(case.graph, f"kernel_{number}") for number, case in enumerate(found)])
    flags = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
    if language == "c++17":
        flags = (*flags, "-Drestrict=__restrict", "-x", "c++", "-std=c++17", "-w")
    path = build(tmp_path, text, *flags)
    done = subprocess.run([str(path)], capture_output=True, text=True, check=False)
    assert not done.stderr, done.stderr[:3000]
    assert done.returncode == 0, f"wrong: {found[int(done.stdout)].graph.nodes[0]}"
