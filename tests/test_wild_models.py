"""Files people have (../shared/models/wild), of kinds that were refused: they compute what their runtime does."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import onnx
import pytest

from conftest import shared_dir
from dovetail.compile import Options, prepare
from dovetail.errors import ModelError
from dovetail.ir.graph import Graph, evaluate
from dovetail.ir.onnx_runtime import runtime_session
from dovetail.ir.operators.base import Types
from dovetail.ir.operators.user import Said, UserOperator
from dovetail.ir.types import Array, Shape, TensorType
from dovetail.notes import Note
from dovetail.targets import load_target
from exported_models import inputs_of
from oracles import run_litert_often

SHAPES: Mapping[str, Mapping[str, Shape]] = {
    "tract_qtdnn.onnx": {"input": (20, 10)},
    "tract_qlstm.onnx": {"input": (5, 3)},
}
"""Sizes that a file leaves open."""
STEPS: Mapping[str, float] = {"tract_qtdnn.onnx": 1 / 32, "tract_qlstm.onnx": 1 / 32}
"""A step of integers, where the evaluator rounds in float: few elements may be that far off."""


@pytest.mark.oracles
@pytest.mark.parametrize(
    "name",
    [
        *("output_without_shape.onnx", "tract_qtdnn.onnx", "constant_output.tflite", "fp16_weights.tflite"),
        *("int32_concat_of_shapes.tflite", "bn_scale_1.keras", "bn_scale_1.h5", "dense_use_bias_1.keras"),
        *("thommas_cnn.keras", "glow3939_lstm_hardsigmoid_clip_bidir.onnx", "hls4ml594_gru.keras"),
        *("tflm_trained_lstm_f32.tflite", "tract_qlstm.onnx", "gtcrn_simple.onnx"),
    ],
)
def test_it_computes_what_its_runtime_does(name: str) -> None:
    path = shared_dir() / "models" / "wild" / name
    graph = prepare(path, load_target("riscv"), Options(allow_float=True, shapes=SHAPES.get(name, {})))
    for seed in range(3):
        fed = inputs_of(graph, seed)
        found = evaluate(graph, {**fed, **{name: first for name, _, first in graph.kept}})
        for own, wanted in zip(graph.results, _by_runtime(path, graph, fed), strict=True):
            _check(found[own], np.asarray(wanted), STEPS.get(name, 0.0))


@pytest.mark.oracles
def test_a_cell_is_limited_as_the_file_says(tmp_path: Path) -> None:
    """The trained model's limit of 10 is never met, one of 0.25 is."""
    data = (shared_dir() / "models" / "wild" / "tflm_trained_lstm_f32.tflite").read_bytes()
    ten, quarter = struct.pack("<f", 10.0), struct.pack("<f", 0.25)
    assert data.count(ten) == 1
    outputs = []
    for name, content in (("free", data), ("limited", data.replace(ten, quarter))):
        (path := tmp_path / f"{name}.tflite").write_bytes(content)
        graph = prepare(path, load_target("riscv"), Options(allow_float=True))
        fed = inputs_of(graph, 0)
        found = evaluate(graph, {**fed, **{state: first for state, _, first in graph.kept}})[graph.results[0]]
        _check(found, np.asarray(_by_runtime(path, graph, fed)[0]), 0.0)
        outputs.append(found)
    assert np.abs(outputs[0] - outputs[1]).max() > 0.01


def of_standard_operators(model: onnx.ModelProto) -> onnx.ModelProto:
    """A QONNX model with its quantisers written out, which ONNX Runtime runs."""
    held = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    nodes = []
    for node in model.graph.node:
        if node.op_type != "Quant":
            nodes.append(node)
            continue
        x, scale, zero, bits = node.input
        said = {entry.name: entry.i for entry in node.attribute}
        count = 2.0 ** (float(held[bits]) - said["signed"])
        limits = (-count + said["narrow"] if said["signed"] else 0.0, count - 1)
        names = [f"{node.output[0]}_{number}" for number in range(6)]
        for name, limit in zip(names, limits, strict=False):
            model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(limit), name))
        zeros = f"{zero}_float"  # of any type
        steps = (("Cast", [zero], zeros), ("Div", [x, scale], names[2]), ("Add", [names[2], zeros], names[3]))
        steps += (("Round", [names[3]], names[4]), ("Clip", [names[4], *names[:2]], names[5]))
        steps += (("Sub", [names[5], zeros], f"{names[5]}_less"), ("Mul", [f"{names[5]}_less", scale], node.output[0]))
        known = {name for other in nodes for name in other.output}
        for kind, operands, result in steps:
            more = {"to": 1} if kind == "Cast" else {}
            if result not in known:
                nodes.append(onnx.helper.make_node(kind, operands, [result], **more))
    del model.graph.node[:], model.opset_import[:]
    model.graph.node.extend(nodes)
    model.opset_import.append(onnx.helper.make_opsetid("", 13))
    return model


@pytest.mark.oracles
@pytest.mark.parametrize(("name", "share"), [("qkeras_jettagging", 0.0), ("qonnx_conv_bn", 0.002)])
def test_qonnx_is_met_or_it_is_said_by_how_much_not(name: str, share: float) -> None:
    """A normalisation rounds its offset to whole sums: where results are nearest to a half, a step of 0.13 shows it."""
    path, told = shared_dir() / "models" / "wild" / f"{name}.onnx", list[Note]()
    graph = prepare(path, load_target("riscv"), Options(allow_float=True, tell=told.append))
    model = runtime_session(of_standard_operators(onnx.load(path)), optimised=False)
    for seed in range(3):
        fed = inputs_of(graph, seed)
        (wanted,) = model.run(None, {model.get_inputs()[0].name: next(iter(fed.values()))})
        away = np.abs(evaluate(graph, fed)[graph.results[0]] - wanted)
        assert np.mean(away > 1e-5) <= share and away.max() <= (0.131 if share else 1e-6)
    assert any("within 1/64 of a step of a half" in note.text for note in told) == bool(share)


@dataclass(frozen=True)
class RequantShift(UserOperator):
    """What the network of Deeploy says in ONNX's own domain."""

    div: float
    n_levels_out: float
    signed: float
    op_type = "RequantShift"

    @classmethod
    def read(cls, said: Said) -> RequantShift:
        return cls(**{name: float(np.asarray(value).reshape(-1)[0]) for name, value in said.attributes.items()})

    def results(self, inputs: Types) -> list[TensorType]:
        return [inputs[0]]

    def compute(self, inputs: Any) -> list[Array]:
        x, factor, offset = inputs
        low = -self.n_levels_out / 2 if self.signed else 0
        steps = np.floor((x * factor + offset) / self.div)
        return [np.clip(steps, low, low + self.n_levels_out - 1).astype(np.float32)]


@pytest.mark.oracles
def test_an_operator_in_the_default_domain_that_is_not_onnx_s_is_named_and_may_be_given() -> None:
    path, options = shared_dir() / "models" / "wild" / "deeploy_mlperf_kws.onnx", Options(allow_float=True)
    with pytest.raises(
        ModelError, match=r"the operator RequantShift of the domain ai\.onnx is not supported"
    ) as caught:
        prepare(path, load_target("riscv"), options)
    assert "--operators" in caught.value.hint
    graph = prepare(path, load_target("riscv"), replace(options, operators=(RequantShift,)))
    found = evaluate(graph, inputs_of(graph, 0))[graph.results[0]]
    assert found.shape == (1, 12) and np.array_equal(found, np.rint(found))


def _by_runtime(path: Path, graph: Graph, fed: Mapping[str, Array]) -> list[Any]:
    """Outputs by ONNX Runtime, LiteRT's reference kernels or Keras, for inputs in the file's order."""
    inputs = [fed[name] for name in graph.given]
    if path.suffix == ".onnx":
        session = runtime_session(path, optimised=False)
        return list(session.run(None, dict(zip([one.name for one in session.get_inputs()], inputs, strict=True))))
    if path.suffix == ".tflite":
        return list(run_litert_often(path.read_bytes(), [inputs], reference=True)[0])
    from keras_cases import keras

    if path.name != "thommas_cnn.keras":
        made = keras.saving.load_model(path, compile=False)
        return [np.asarray(made(inputs if len(inputs) > 1 else inputs[0]))]
    layers = keras.layers  # Keras 3 does not read what Keras 2 wrote on Windows
    kinds = (layers.Conv2D(8, 3, activation="relu"), layers.MaxPooling2D(), layers.Flatten(), layers.Dense(10))
    made = keras.Sequential([keras.Input((8, 8, 1)), *kinds])
    with zipfile.ZipFile(path) as archive, h5py.File(io.BytesIO(archive.read("model.weights.h5"))) as weights:
        made.set_weights(
            [weights[f"layers\\{name}"][f"vars/{at}"][()] for name in ("conv2d", "dense") for at in (0, 1)]
        )
    return [np.asarray(made(inputs[0]))]


def _check(found: Array, wanted: Array, step: float) -> None:
    wanted = wanted.reshape(found.shape)
    if step:
        assert np.abs(found - wanted).max() <= step and np.mean(found != wanted) <= 0.05
    elif found.dtype.kind == "f":
        assert np.abs(found - wanted).max() <= 1e-4 * max(float(np.abs(wanted).max()), 1e-6)
    else:
        assert np.array_equal(found, wanted)
