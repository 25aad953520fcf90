"""Files of exporters (tests/data/exporters) by their own runtimes: ONNX Runtime, LiteRT's reference kernels, Keras."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dovetail.compile import Options, prepare
from dovetail.ir.graph import Graph, evaluate
from dovetail.ir.onnx_runtime import runtime_session
from dovetail.ir.types import Array, DType
from dovetail.targets import load_target
from oracles import run_litert_often

FOLDER = Path(__file__).parent / "data" / "exporters"

SAME = {"brevitas_qonnx.onnx": "brevitas_qcdq.onnx", **dict.fromkeys(("keras2.h5", "keras2.keras"), "tf2onnx.onnx")}
"""Files whose runtime is not here (ONNX Runtime has no QONNX, Keras 3 refuses what Keras 2 wrote), and the same network
in another form."""


def inputs_of(graph: Graph, seed: int) -> dict[str, Array]:
    """Random inputs: the whole range of integers, floats of a normal distribution."""
    random, found = np.random.default_rng(seed), {}
    for name in graph.given:
        kind = graph.types[name]
        real = kind.dtype is DType.FLOAT32
        drawn = random.normal(size=kind.shape) if real else random.integers(kind.dtype.low, kind.dtype.high, kind.shape)
        found[name] = drawn.astype(kind.dtype.numpy)
    return found


def by_runtime(path: Path, inputs: list[Array]) -> list[Any]:
    """Outputs of the file's own runtime for inputs in the file's order."""
    path = path.with_name(SAME.get(path.name, path.name))
    if path.suffix == ".onnx":
        session = runtime_session(path, optimised=False)
        names = [one.name for one in session.get_inputs()]
        return list(session.run(None, dict(zip(names, inputs, strict=True))))
    if path.suffix == ".tflite":
        return list(run_litert_often(path.read_bytes(), [inputs], reference=True)[0])
    from keras_cases import keras

    return [np.asarray(keras.saving.load_model(path, compile=False)(inputs[0]))]


def verdict(path: Path) -> str:
    """How near the graph that is compiled is to the runtime: a sentence for the support page."""
    graph = prepare(path, load_target("riscv"), Options(allow_float=True))
    exact, farthest, share, step = True, 0.0, 0.0, 0.0
    for seed in range(4):
        fed = inputs_of(graph, seed)
        found = evaluate(graph, {**fed, **{name: first for name, _, first in graph.kept}})
        for name, wanted in zip(graph.results, by_runtime(path, list(fed.values())), strict=True):
            array, expected = found[name].astype(np.float64), np.asarray(wanted, np.float64).reshape(found[name].shape)
            exact &= bool(np.array_equal(array, expected))
            farthest = max(farthest, float(np.abs(array - expected).max()))
            share = max(share, float(np.mean(np.abs(array - expected) > 1e-5 * np.abs(expected).max() + 1e-6)))
            step = max(step, float(np.abs(expected).max()))
    integers = all(graph.types[name].dtype is not DType.FLOAT32 for name in graph.results)
    if exact:
        return "equal"
    if integers:
        return f"{share:.1%} of the elements differ, by at most {farthest:.0f}"
    return "float32's rounding" if share == 0 else f"{share:.1%} of the elements differ, by up to {farthest / step:.1%}"
