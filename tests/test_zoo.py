"""The zoo's models: valid, deterministic, as costly as the originals, alive in every layer, and right about digits."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import onnx
import pytest

from command_line import dovetail
from dovetail import compile
from dovetail.errors import ModelError
from dovetail.guests import zoo
from dovetail.guests.zoo import networks, story
from dovetail.guests.zoo.networks import ZooNetwork
from dovetail.guests.zoo.weights import forward, random_parameters, stored, synthetic_inputs
from dovetail.ir.onnx_runtime import runtime_session
from dovetail.read.geometry import same_border
from firmware import require_chip
from zoo_data import digits_accuracy, digits_samples, inputs

ort = pytest.importorskip("onnxruntime")

MANIFEST = Path(__file__).resolve().parents[2] / "shared" / "models" / "manifest.json"
SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
ORIGINALS = {
    "resnet8": "mlperf_tiny/ic_resnet8_int8.tflite",
    "ds_cnn": "mlperf_tiny/kws_dscnn_int8.tflite",
    "mobilenet_v1": "mlperf_tiny/vww_mobilenetv1_int8.tflite",
    "autoencoder": "mlperf_tiny/ad_autoencoder_int8.tflite",
}
MACS = {"resnet8": 12501632, "ds_cnn": 2656768, "mobilenet_v1": 7489664, "autoencoder": 264192, "digits": 54848}
NETWORKS: dict[str, Callable[[], ZooNetwork]] = {
    "resnet8": networks.resnet8,
    "ds_cnn": networks.ds_cnn,
    "mobilenet_v1": networks.mobilenet_v1,
    "autoencoder": networks.autoencoder,
    "digits": networks.digits,
}
every_model = pytest.mark.parametrize("name", NETWORKS)


@cache
def built(name: str) -> bytes:
    return zoo.build(name)


def run(model: bytes, inputs: npt.NDArray[np.int8]) -> list[npt.NDArray[Any]]:
    """Each output of the model for a batch of inputs, one by one through ONNX Runtime."""
    session = runtime_session(model)
    results = [session.run(None, {"input": one[None]}) for one in inputs]
    return [np.concatenate(column) for column in zip(*results, strict=True)]


def some_inputs(name: str, count: int) -> npt.NDArray[np.int8]:
    return digits_samples(count)[0] if name == "digits" else inputs(name, count, seed=5)


def shape_of(value: onnx.ValueInfoProto) -> list[int]:
    return [dimension.dim_value for dimension in value.type.tensor_type.shape.dim]


def shapes_of(model: onnx.ModelProto) -> dict[str, list[int]]:
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    shapes = {value.name: shape_of(value) for value in [*inferred.input, *inferred.value_info, *inferred.output]}
    return shapes | {tensor.name: list(tensor.dims) for tensor in inferred.initializer}


def multiply_accumulates(model: onnx.ModelProto) -> int:
    """Each output element of a Conv or Gemm costs one product per weight of its output channel."""
    shapes = shapes_of(model)
    linear = [node for node in model.graph.node if node.op_type in ("Conv", "Gemm")]
    return sum(prod(shapes[node.output[0]]) * prod(shapes[node.input[1]][1:]) for node in linear)


@every_model
def test_model_is_valid_and_its_border_is_int8(name: str) -> None:
    model = onnx.load_from_string(built(name))
    onnx.checker.check_model(model, full_check=True)
    ends = [*model.graph.input, *model.graph.output]
    assert [end.name for end in ends] == ["input", "output"]
    assert all(end.type.tensor_type.elem_type == onnx.TensorProto.INT8 for end in ends)
    assert shape_of(model.graph.input[0]) == [1, *some_inputs(name, 1).shape[1:]]
    assert model.ir_version <= 13


@every_model
def test_every_operator_stands_between_integers(name: str) -> None:
    """No float reaches another operator, but for the sums a ReLU reads."""
    nodes = onnx.load_from_string(built(name)).graph.node
    producers = {output: node.op_type for node in nodes for output in node.output}
    for node in nodes:
        if node.op_type == "DequantizeLinear":
            assert producers.get(node.input[0], "QuantizeLinear") == "QuantizeLinear"
        elif node.op_type == "Relu":
            assert producers[node.input[0]] in ("Conv", "Gemm", "Add")
        elif node.op_type != "QuantizeLinear":
            assert {producers[source] for source in node.input} == {"DequantizeLinear"}, node.name


@every_model
def test_weights_are_symmetric_per_channel_and_biases_have_their_scale(name: str) -> None:
    graph = onnx.load_from_string(built(name)).graph
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    dequantisers = {node.output[0]: node for node in graph.node if node.op_type == "DequantizeLinear"}
    for node in graph.node:
        if node.op_type not in ("Conv", "Gemm"):
            continue
        x, weight, bias = (
            [constants[i] for i in dequantisers[source].input if i in constants] for source in node.input
        )
        assert weight[0].dtype == np.int8 and not weight[2].any()
        assert weight[1].shape == weight[0].shape[:1]
        assert (np.abs(weight[0].astype(int)).reshape(len(weight[0]), -1).max(axis=1) == 127).all()
        assert bias[0].dtype == np.int32
        np.testing.assert_array_equal(bias[1], x[-2] * weight[1])


@every_model
def test_multiply_accumulates(name: str) -> None:
    counted = multiply_accumulates(onnx.load_from_string(built(name)))
    assert counted == MACS[name]
    if name in ORIGINALS and MANIFEST.exists():
        entries = {entry["file"]: entry for entry in json.loads(MANIFEST.read_text())}
        assert counted == entries[ORIGINALS[name]]["macs"]


@pytest.mark.skipif(not MANIFEST.exists(), reason="the shared models are not beside the repository")
@pytest.mark.parametrize("name", ORIGINALS)
def test_weight_shapes_are_the_originals(name: str) -> None:
    """The same multiset of weight shapes, in the file's order, as the .tflite file's linear layers have."""
    tflite = pytest.importorskip("tflite")
    subgraph = tflite.Model.GetRootAs((MANIFEST.parent / ORIGINALS[name]).read_bytes(), 0).Subgraphs(0)
    theirs = []
    for operator in (subgraph.Operators(i) for i in range(subgraph.OperatorsLength())):
        tensors = [subgraph.Tensors(i) for i in operator.InputsAsNumpy()]
        if len(tensors) == 3:
            theirs.append(sorted(d for d in tensors[1].ShapeAsNumpy().tolist() if d > 1))
    model = onnx.load_from_string(built(name))
    shapes = shapes_of(model)
    linear = [node for node in model.graph.node if node.op_type in ("Conv", "Gemm")]
    assert [sorted(d for d in shapes[node.input[1]] if d > 1) for node in linear] == theirs


def test_padding_is_tensorflows() -> None:
    """By hand: pad_total = max((ceil(size / stride) - 1) * stride + kernel - size, 0), the odd one at the end."""
    assert [same_border(*case) for case in ((32, 3, 1), (32, 3, 2), (49, 10, 2), (10, 4, 2), (8, 1, 2))] == [
        (1, 1),
        (0, 1),
        (4, 5),
        (1, 1),
        (0, 0),
    ]


def test_same_bytes_in_other_processes_and_thread_counts() -> None:
    code = (
        "import hashlib\nfrom dovetail.guests import zoo\n"
        f"for n in {[*NETWORKS]}: print(hashlib.sha256(zoo.build(n)).hexdigest())"
    )
    here = [hashlib.sha256(built(name)).hexdigest() for name in NETWORKS]
    for threads, kernels in (("1", "Nehalem"), ("2", "Haswell")):
        settings = {"OPENBLAS_NUM_THREADS": threads, "OPENBLAS_CORETYPE": kernels, "PYTHONHASHSEED": threads}
        done = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | settings, capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == here


def test_seed_changes_random_weights_only() -> None:
    assert zoo.build("autoencoder", seed=1) != built("autoencoder")
    assert zoo.build("digits", seed=1) == built("digits")


@every_model
def test_answers_depend_on_the_input(name: str) -> None:
    (answers,) = run(built(name), some_inputs(name, 24))
    assert len(np.unique(answers, axis=0)) >= 10
    assert answers.std(axis=0).mean() > 10
    assert len(set(answers.argmax(axis=1))) >= 2


@every_model
def test_every_activation_is_alive_and_follows_the_float_network(name: str) -> None:
    """Each quantised tensor of ONNX Runtime on new inputs: spread, not saturated, and numpy's on the float weights."""
    model = onnx.load_from_string(built(name))
    nodes = [node for node in model.graph.node if node.op_type == "QuantizeLinear"]
    probes = [onnx.helper.make_tensor_value_info(n.output[0], onnx.TensorProto.INT8, None) for n in nodes[:-1]]
    model.graph.output.extend(probes)
    last, *inner = run(model.SerializeToString(), some_inputs(name, 16))
    network = NETWORKS[name]()
    prepared = stored().prepared if name == "digits" else random_parameters(network, seed=0)
    real = stored().images[:16] if name == "digits" else synthetic_inputs(network, 16, 5)
    floats = forward(network, prepared.parameters, real, exact=False)
    for layer, value in zip(network.layers, [*inner, last], strict=True):
        correlation = np.corrcoef(value.reshape(-1), floats[layer.name].reshape(-1))[0, 1]
        assert correlation > 0.93, f"{layer.name}: correlation {correlation:.3f}"
        assert value.std() > 6, layer.name
        assert layer is network.layers[-1] or (value == 127).mean() < 0.05, layer.name


def test_digits_are_read() -> None:
    images, labels = digits_samples(360)
    assert images.shape == (360, 1, 8, 8) and images.dtype == np.int8
    (answers,) = run(built("digits"), images)
    accuracy = float((answers.argmax(axis=1) == labels).mean())
    assert digits_accuracy() >= 0.96
    assert abs(accuracy - digits_accuracy()) <= 0.012, f"int8 {accuracy:.4f}"


def test_stored_images_are_scikit_learns_and_calibration_is_not_from_the_test_set() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    data = datasets.load_digits()
    known = {image.tobytes(): int(label) for image, label in zip(data.images, data.target, strict=True)}
    content = stored()
    tests = [(image[0] * 16).tobytes() for image in content.images]
    assert [known[image] for image in tests] == content.labels.tolist()
    calibration = {(image[0] * 16).tobytes() for image in content.prepared.calibration}
    assert calibration <= known.keys() and not calibration & set(tests)


def test_default_samples_and_unknown_name() -> None:
    images, labels = digits_samples()
    assert len(images) == len(labels) == 64 and len(set(labels.tolist())) == 10
    with pytest.raises(ModelError, match=r"'resnet9'(.|\n)*resnet8, ds_cnn"):
        zoo.build("resnet9")
    with pytest.raises(ModelError, match="not -1"):
        zoo.build("resnet8", seed=-1)
    with pytest.raises(ModelError, match="not -1"):
        zoo.calibration("story", seed=-1)
    with pytest.raises(ModelError, match=r"no test data(.|\n)*digits, story"):
        zoo.held_back("resnet8")
    with pytest.raises(ModelError, match="reads no text"):
        zoo.tokenizer("digits")


def test_only_numpy_and_onnx_are_needed() -> None:
    code = (
        "import sys\n"
        "for n in ('onnxruntime', 'sklearn', 'scipy', 'tflite'): sys.modules[n] = None\n"
        "from dovetail.guests import zoo\nassert 'onnx' not in sys.modules and 'numpy' not in sys.modules\n"
        "for n in zoo.names(): zoo.build(n)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def script(name: str) -> ModuleType:
    """A script of the project as a module."""
    with patch.object(sys, "path", [*sys.path, str(SCRIPTS)]):
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def training() -> ModuleType:
    pytest.importorskip("sklearn")
    return script("train_digits")


def test_gradients_equal_finite_differences(training: ModuleType) -> None:
    network, data = networks.digits(), training.split(0)
    parameters = random_parameters(network, 3).parameters
    images, labels = data.images[:6], data.labels[:6]
    _, gradients = training.loss_and_gradients(network, parameters, images, labels)
    generator = np.random.default_rng(0)
    for name, gradient in gradients.items():
        for kind in ("weight", "bias"):
            values = getattr(parameters[name], kind).reshape(-1)
            index = int(generator.integers(values.size))
            kept, losses = values[index], []
            for step in (1e-6, -1e-6):
                values[index] = kept + step
                losses.append(training.loss_and_gradients(network, parameters, images, labels)[0])
            values[index] = kept
            slope = (losses[0] - losses[1]) / 2e-6
            assert getattr(gradient, kind).reshape(-1)[index] == pytest.approx(slope, rel=1e-4, abs=1e-6), (name, kind)


def test_training_is_reproducible_and_stored_accuracy_is_true(training: ModuleType) -> None:
    network, data = networks.digits(), training.split(0)
    first, second = (training.train(network, data, seed=0, epochs=1) for _ in range(2))
    assert all((first[name].weight == second[name].weight).all() for name in first)
    content = stored()
    np.testing.assert_array_equal(content.images, data.test_images)
    score = training.accuracy(network, content.prepared.parameters, data.test_images, data.test_labels)
    assert score == digits_accuracy()


@pytest.fixture(scope="module")
def stories() -> ModuleType:
    return script("train_story")


def test_gradients_of_the_language_model_equal_finite_differences(stories: ModuleType) -> None:
    rng, tokens = np.random.default_rng(0), stories.texts(0)[:3, :20]
    parameters = {name: rng.normal(0, 0.2, shape) for name, shape in story.parameter_shapes().items()}
    _, gradients = stories.loss_and_gradients(parameters, tokens)
    for name, array in parameters.items():
        at, losses = int(np.abs(gradients[name]).argmax()), []
        for step in (1e-5, -1e-5):
            moved = array.copy()
            moved.reshape(-1)[at] += step
            losses.append(stories.loss_and_gradients({**parameters, name: moved}, tokens)[0])
        slope = (losses[0] - losses[1]) / 2e-5
        assert gradients[name].reshape(-1)[at] == pytest.approx(slope, rel=1e-3), name


def test_the_language_model_is_what_its_training_made(stories: ModuleType) -> None:
    """ONNX Runtime's steps are the training's network, which knows texts it never saw; the same seed gives the same."""
    content = story.stored()
    first, second = (stories.train(stories.texts(0), seed=0, steps=2) for _ in range(2))
    assert all((first[name] == second[name]).all() for name in first)
    rows = stories.texts(0)[:, : content.held_back.shape[1]]
    np.testing.assert_array_equal(content.held_back, rows[: stories.TEST])
    np.testing.assert_array_equal(content.calibration, rows[stories.HELD_BACK :][: stories.CALIBRATION])
    assert stories.loss_and_gradients(content.parameters, content.held_back)[0] / np.log(2) < 0.2
    session, nats = runtime_session(zoo.build_float("story")), list[float]()
    names = [end.name for end in session.get_outputs()]
    held = {one.name: np.zeros(one.shape, np.float32) for one in session.get_inputs() if "past" in one.name}
    for at, (token, following) in enumerate(pairwise(content.held_back[0])):
        ends = {"token": np.array([token]), "position": np.array([at]), **held}
        found = dict(zip(names, session.run(None, ends), strict=True))
        held = {name: found[name.replace("past", "present")] for name in held}
        logits = found["logits"][0].astype(np.float64)
        nats.append(float(np.log(np.exp(logits).sum()) - logits[following]))
    assert np.mean(nats) == pytest.approx(
        stories.loss_and_gradients(content.parameters, content.held_back[:1])[0], abs=1e-4
    )


def test_a_sentence_is_written(stories: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In int8, by the firmware on the simulated core too; it is one that the grammar makes."""
    model, tokens, build = (tmp_path / name for name in ("story.onnx", "story.bin", "build"))
    assert dovetail("zoo", "story", "-o", model, "--tokenizer", tokens) == 0
    assert dovetail("compile", model, "--target", "riscv", "-o", build) == 0
    capsys.readouterr()
    written = ("generate", build, "--tokenizer", tokens, "--prompt", "a quiet d", "--tokens", "96", "--json", "-")
    assert dovetail(*written) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["text"] in stories.sentences() and figures["text"].startswith("a quiet duck lived in a lake.")
    assert figures["where"] == "iss" and figures["steps"] == len(figures["text"]) + 2


@pytest.mark.parametrize("target", ["riscv", "cortex_m4"])
def test_a_language_models_cycles_are_estimated(target: str, tmp_path: Path) -> None:
    """Those of the last place, where all are read; a row written into a cache is not the whole cache."""
    require_chip()
    (tmp_path / "story.onnx").write_bytes(zoo.build("story"))
    build = compile(tmp_path / "story.onnx", target)
    steps = [{"token": np.array([5]), "position": np.array([place])} for place in (0, 95)]
    report = build.run(steps).report
    executed = report.each[1].cycles["total"]
    assert report.estimated and executed and abs(report.estimated / executed - 1) < 0.15
