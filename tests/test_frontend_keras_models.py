"""Whole Keras models: nested, shared, frozen, of several inputs and outputs, of every Keras's way of writing them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from dovetail.cli.main import all_commands, command_line
from dovetail.codegen.emit.project import write_project
from dovetail.compile import Options, compile_model
from dovetail.errors import DovetailError, ModelError
from dovetail.ir.graph import evaluate
from dovetail.ir.types import DType
from dovetail.read import load_model
from dovetail.run import open_build, run_build
from dovetail.targets import load_target
from keras_writer import dense_model, dense_weights, functional, h5py, layer, write_h5, write_keras

MODELS = Path(__file__).resolve().parents[2] / "shared" / "models"
RANDOM = np.random.default_rng(4)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:keras")


def real(*shape: int) -> np.ndarray[Any, Any]:
    return RANDOM.normal(0, 0.5, shape).astype(np.float32)


def outputs_of(path: Path, *arrays: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    graph = load_model(path)
    return list(evaluate(graph, dict(zip(graph.inputs, arrays, strict=True))).values())


def _nested(keras: Any) -> Any:
    """A model of models, called twice each, one inside another, and a layer shared by both branches."""
    layers = keras.layers
    head = keras.Input((4,))
    inner = keras.Model(head, layers.BatchNormalization()(layers.Dense(4, activation="tanh")(head)), name="inner")
    row = keras.Sequential([layers.Dense(4), layers.BatchNormalization(), layers.PReLU(), inner], name="row")
    x, y = keras.Input((4,), name="left"), keras.Input((4,), name="right")
    shared = layers.Dense(3)
    first, second = inner(x), row(y)
    outputs = [shared(layers.Add()([first, row(first)])), shared(second), inner(second), layers.Concatenate()([x, y])]
    return keras.Model([x, y], outputs)


def _frozen(keras: Any) -> Any:
    """Normalisations that are not trained, in a model that is and in one that is not."""
    layers = keras.layers
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(5), layers.BatchNormalization(), layers.Dense(4)])
    other = keras.Sequential([keras.Input((4,)), layers.BatchNormalization(), layers.Dense(3)])
    inner.layers[1].trainable = False
    other.trainable = False
    x = keras.Input((4,))
    return keras.Model(x, other(inner(x)))


def _several(keras: Any) -> Any:
    """A nested model of two inputs and two outputs."""
    layers = keras.layers
    a, b = keras.Input((4,)), keras.Input((4,))
    inner = keras.Model([a, b], [layers.Add()([a, b]), layers.Dense(2)(b)])
    x = keras.Input((4,))
    total, scores = inner([layers.Dense(4)(x), x])
    return keras.Model(x, [scores, total, x])


def _plain(keras: Any) -> Any:
    return keras.Sequential([keras.Input((6, 6, 2)), keras.layers.Conv2D(3, 3), keras.layers.Flatten()])


def _mapped(keras: Any) -> Any:
    """Inputs and outputs by name, in another order than that of the names."""
    layers = keras.layers
    b, a = keras.Input((4,), name="b"), keras.Input((4,), name="a")
    inner = keras.Model({"b": b, "a": a}, {"z": layers.Subtract()([a, b]), "y": layers.Dense(3)(b)}, name="inner")
    x = keras.Input((4,))
    found = inner({"b": layers.Dense(4)(x), "a": x})
    return keras.Model(x, [found["z"], found["y"]])


STRUCTURES = {"mapped": _mapped, "nested": _nested, "frozen": _frozen, "several": _several, "sequential": _plain}


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_equal_keras(name: str, tmp_path: Path) -> None:
    import keras_cases as cases

    model = STRUCTURES[name](cases.keras)
    cases.randomise(model, seed=3)
    arrays = [real(1, *entry.shape[1:]) for entry in model.inputs]
    wanted = cases.run_keras(model, arrays)
    for path in cases.saved(model, tmp_path, name):
        found = outputs_of(path, *arrays)
        assert len(found) == len(wanted)
        for ours, theirs in zip(found, wanted, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_names_are_the_models(tmp_path: Path) -> None:
    import keras_cases as cases

    x, y = (cases.keras.Input((4,), name=name) for name in ("left", "right"))
    scores, best = cases.L.Dense(3, "softmax", name="scores"), cases.L.Maximum(name="best")
    model = cases.keras.Model([x, y], [scores(x), best([x, y]), scores(y)])
    graph = load_model(cases.saved(model, tmp_path, "names")[0])
    assert graph.inputs == ("left", "right")
    assert graph.outputs == ("scores", "best", "scores_1")


def test_shared_weights_are_placed_once(tmp_path: Path) -> None:
    import keras_cases as cases

    x, y = cases.keras.Input((64,)), cases.keras.Input((64,))
    shared = cases.L.Dense(64)
    graph = load_model(cases.saved(cases.keras.Model([x, y], [shared(x), shared(y)]), tmp_path, "shared")[0])
    assert sum(array.size == 64 * 64 for array in graph.constants.values()) == 1


def test_nested_models_of_keras_2(tmp_path: Path) -> None:
    """Keras 2 counts calls of models from 1, in arguments and outputs; layers from 0."""
    dense = layer("Dense", "d", [[["i", 0, 0, {}]]], units=3, activation="relu", use_bias=True)
    head = layer("InputLayer", "i", [], batch_input_shape=[None, 3])
    inner = {**functional("inner", [head, dense], ["i"], [["d", 0, 0]]), "name": "inner"}
    layers = [
        layer("InputLayer", "x", [], batch_input_shape=[None, 3]),
        {**inner, "inbound_nodes": [[["x", 0, 0, {}]], [["add", 0, 0, {}]]]},
        layer("Add", "add", [[["x", 0, 0, {}], ["inner", 1, 0, {}]]]),
    ]
    kernel, bias, x = real(3, 3), real(3), real(1, 3)
    config = functional("net", layers, ["x"], [["inner", 2, 0], ["add", 0, 0]])
    weights = {"x": {}, "inner": {"d/kernel:0": kernel, "d/bias:0": bias}, "add": {}}
    once = np.maximum(x @ kernel + bias, 0)
    twice = np.maximum((x + once) @ kernel + bias, 0)
    found = outputs_of(write_h5(tmp_path / "m.h5", config, weights), x)
    np.testing.assert_allclose(found[0], twice, rtol=1e-5)
    np.testing.assert_allclose(found[1], x + once, rtol=1e-5)


def test_operations_of_tensorflow(tmp_path: Path) -> None:
    """TFOpLambda names a function; its arguments stand beside the reference."""
    every = {"start": None, "stop": None, "step": None}
    layers = [
        layer("InputLayer", "x", [], batch_input_shape=[None, 3]),
        layer("TFOpLambda", "tf.math.multiply", [["x", 0, 0, {"y": 2.5, "name": None}]], function="math.multiply"),
        layer(
            "TFOpLambda",
            "tf.__operators__.add",
            [["tf.math.multiply", 0, 0, {"y": ["x", 0, 0], "name": None}]],
            function="__operators__.add",
        ),
        layer("TFOpLambda", "tf.nn.relu", [["tf.__operators__.add", 0, 0, {"name": None}]], function="nn.relu"),
        layer(
            "SlicingOpLambda",
            "item",
            [["tf.nn.relu", 0, 0, {"slice_spec": [every, {"start": 1, "stop": None, "step": None}]}]],
            function="__operators__.getitem",
        ),
        layer("TFOpLambda", "concat", [[["item", 0, 0, {"axis": -1}], ["x", 0, 0, {"axis": -1}]]], function="concat"),
    ]
    config = functional("net", layers, ["x"], [["concat", 0, 0]])
    x = real(1, 3)
    found = outputs_of(write_h5(tmp_path / "m.h5", config, {}), x)
    wanted = np.concatenate([np.maximum(x * 2.5 + x, 0)[:, 1:], x], axis=-1)
    np.testing.assert_allclose(found[0], wanted, rtol=1e-6)


def test_hard_sigmoid_is_that_of_the_version(tmp_path: Path) -> None:
    """Keras 2: 0.2 * x + 0.5; Keras 3: x / 6 + 0.5."""
    x = np.array([[-1.0, 0.25, 1.5]], np.float32)
    head = layer("InputLayer", "x", batch_input_shape=[None, 3])
    config = {"class_name": "Sequential", "config": [head, layer("Activation", "a", activation="hard_sigmoid")]}
    for version, slope in (("2.15.0", 0.2), ("3.1.0", 1 / 6)):
        found = outputs_of(write_h5(tmp_path / "m.h5", config, {}, version), x)
        np.testing.assert_allclose(found[0], slope * x + 0.5, rtol=1e-6)


def test_layers_keras_3_does_not_write(tmp_path: Path) -> None:
    layers = [
        layer("InputLayer", "x", batch_input_shape=[None, 2, 2, 3]),
        layer("RandomBrightness", "b", factor=[-0.2, 0.2], value_range=[0, 255], seed=1),
        layer("ThresholdedReLU", "t", theta={"type": "ndarray", "value": 0.25}),
    ]
    config, x = {"class_name": "Sequential", "config": {"name": "net", "layers": layers}}, real(1, 2, 2, 3)
    found = outputs_of(write_h5(tmp_path / "m.h5", config, {"b": {"b/StateVar:0": np.zeros(3, np.int64)}}), x)
    np.testing.assert_array_equal(found[0], np.where(x > 0.25, x, 0))


def test_the_oldest_sequential_has_a_list_and_a_shape_in_its_first_layer(tmp_path: Path) -> None:
    old = {"class_name": "Sequential", "config": [layer("Dense", "dense", units=2, activation="linear", use_bias=True)]}
    old["config"][0]["config"]["batch_input_shape"] = [None, 3]
    weights, x = dense_weights(), real(1, 3)
    found = outputs_of(write_h5(tmp_path / "m.h5", old, {"dense": weights}, None), x)
    np.testing.assert_allclose(found[0], x @ weights["dense/kernel:0"] + 1, rtol=1e-6)


def test_the_first_keras_files_keep_weights_under_another_name(tmp_path: Path) -> None:
    """Keras 2.13 wrote .keras files with groups after the checkpoint's dependencies."""
    paths = {f"_layer_checkpoint_dependencies/dense/vars/{n}": w for n, w in enumerate(dense_weights().values())}
    x = real(1, 3)
    found = outputs_of(write_keras(tmp_path / "m.keras", dense_model(), paths, "2.13.1"), x)
    np.testing.assert_allclose(found[0], x @ dense_weights()["dense/kernel:0"] + 1, rtol=1e-6)


def test_mixed_precision_is_read_as_float32(tmp_path: Path) -> None:
    import keras_cases as cases

    model = cases.keras.Sequential([cases.keras.Input((3,)), cases.L.Dense(2, dtype="mixed_float16")])
    cases.randomise(model, seed=1)
    x = real(1, 3)
    for path in cases.saved(model, tmp_path, "mixed"):
        (found,) = outputs_of(path, x)
        np.testing.assert_allclose(found, cases.run_keras(model, [x])[0].astype(np.float32), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("kind", ["keras", "h5"])
def test_what_keras_has_quantised_is_refused(kind: str, tmp_path: Path) -> None:
    import keras_cases as cases

    model = cases.keras.Sequential([cases.keras.Input((4,)), cases.L.Dense(4)])
    model.quantize("int8")
    path = cases.saved(model, tmp_path, "quantised")[kind == "h5"]
    with pytest.raises(ModelError, match=r"Dense 'dense.*already quantised by Keras"):
        load_model(path)


def test_integer_inputs_become_numbers(tmp_path: Path) -> None:
    head = layer("InputLayer", "x", batch_input_shape=[None, 3])
    head["config"]["dtype"] = "uint8"
    config = {"class_name": "Sequential", "config": [head, layer("Rescaling", "r", scale=1 / 255, offset=0.0)]}
    path = write_h5(tmp_path / "m.h5", config, {})
    assert load_model(path).types["x"].dtype is DType.UINT8
    (found,) = outputs_of(path, np.array([[0, 51, 255]], np.uint8))
    np.testing.assert_allclose(found, [[0.0, 0.2, 1.0]], rtol=1e-6)


def test_a_file_of_weights_only_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "m.weights.h5", "w") as file:
        file.create_dataset("layers/dense/vars/0", data=real(3, 2))
    with pytest.raises(ModelError, match=r"no Keras model(?s:.*)model\.save"):
        load_model(tmp_path / "m.weights.h5")


@pytest.mark.parametrize("kind", ["keras", "h5"])
def test_firmware_computes_what_keras_does(kind: str, tmp_path: Path) -> None:
    """A small network of many kinds of layers on the simulated core."""
    import keras_cases as cases

    keras, layers = cases.keras, cases.L
    x = keras.Input((10, 8, 3), name="x")
    y = layers.BatchNormalization()(layers.Conv2D(6, 3, 2, "same", activation="swish")(x))
    y = layers.Add()([y, layers.SeparableConv2D(6, 3, padding="same")(y)])
    y = layers.LayerNormalization()(layers.UpSampling2D(2, interpolation="bilinear")(y))
    y = layers.Conv2DTranspose(4, 3, 2, "same", activation="relu")(layers.MaxPooling2D(2)(y))
    y = layers.PReLU(shared_axes=[1, 2])(layers.Cropping2D(1)(y))
    z = layers.MultiHeadAttention(2, 4)(layers.Reshape((-1, 8))(y), layers.Reshape((-1, 8))(y))
    z = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(z)
    model = keras.Model(x, layers.Dense(5, activation="softmax")(layers.GlobalAveragePooling1D()(z)))
    cases.randomise(model, seed=2)
    array = real(1, 10, 8, 3)
    path = cases.saved(model, tmp_path, "net")[kind == "h5"]
    with pytest.raises(ModelError, match=r"not quantised(?s:.*)--float"):
        compile_model(path, load_target("riscv"), Options())
    compiled = compile_model(path, load_target("riscv"), Options(allow_float=True))
    write_project(compiled.project, tmp_path / "build")
    (output,) = compiled.graph.outputs
    for simulator in ("host", "iss") if kind == "keras" else ("host",):
        (found,) = run_build(open_build(tmp_path / "build"), simulator, [{"x": array}]).outputs
        np.testing.assert_allclose(found[output], cases.run_keras(model, [array])[0], rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(not MODELS.is_dir(), reason="the shared models are not here")
def test_the_command_compiles_a_keras_model(tmp_path: Path) -> None:
    path = MODELS / "keras" / "tinymaix_mnist_valid.h5"
    arguments = ["compile", str(path), "--target", "riscv", "-o", str(tmp_path / "build")]
    refused = CliRunner().invoke(command_line(all_commands()), arguments)
    assert refused.exit_code != 0
    assert CliRunner().invoke(command_line(all_commands()), [*arguments, "--float"]).exit_code == 0
    reference = np.load(f"{path}.ref.npz")
    build = open_build(tmp_path / "build")
    (name,) = (port.name for port in build.manifest.inputs)
    (found,) = run_build(build, "host", [{name: reference["in_0"]}]).outputs
    np.testing.assert_allclose(next(iter(found.values())), reference["out_0__keras_torch"], rtol=1e-5, atol=1e-7)


FLOAT_TFLITE = {"ad_autoencoder": 1e-5, "ic_resnet8": 1e-5, "vww_mobilenetv1": 1e-5, "kws_dscnn": 0.01}
"""Weights of the last are int8, which each runtime computes in its own way: they differ among themselves by this."""


@pytest.mark.parametrize("name", FLOAT_TFLITE)
@pytest.mark.skipif(not MODELS.is_dir(), reason="the shared models are not here")
def test_float_tflite_equals_its_references(name: str) -> None:
    path = MODELS / "mlperf_tiny" / f"{name}_f32.tflite"
    reference = np.load(f"{path}.ref.npz")
    (found,) = outputs_of(path, reference["in_0"])
    wanted = [reference[key] for key in reference.files if key.startswith("out_0__")]
    assert wanted
    for array in wanted:
        assert np.abs(found - array).max() <= FLOAT_TFLITE[name] * np.abs(array).max()


def test_a_missing_h5py_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_keras(tmp_path / "m.keras", dense_model(), {})
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    with pytest.raises(DovetailError, match=r"h5py(?s:.*)dovetail\[keras\]"):
        load_model(path)
