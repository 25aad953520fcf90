"""Recurrent layers: integers equal to TensorFlow Lite Micro at every call, floats near ONNX Runtime, refusals."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.codegen.build.toolchain import compile_host
from dovetail.codegen.emit.project import write_project
from dovetail.codegen.manifest import read_manifest
from dovetail.compile import Options, compile_model, prepare, sample_inputs
from dovetail.errors import ModelError
from dovetail.ir.graph import Graph, evaluate, evaluate_all, verify
from dovetail.ir.onnx_runtime import runtime_session
from dovetail.ir.operators.arithmetic import Clip, Requantize
from dovetail.ir.operators.fixed import between_sigmoids
from dovetail.ir.operators.recurrent import sigmoid16, tanh16
from dovetail.ir.rewrite import simplify
from dovetail.ir.types import Array, DType
from dovetail.kernels.recurrent import segments
from dovetail.quantize import quantize
from dovetail.read.onnx import load_onnx
from dovetail.read.tflite import load_tflite
from dovetail.run import open_build, run_build
from dovetail.targets import load_target
from recurrent_cases import Streamed, float_model, lstm_model, streaming_model, svdf_model, variable_model
from tflite_writer import ModelWriter, run_calls

SEEDS = 25
MODELS: dict[str, Callable[[int], Streamed]] = {
    "lstm": lstm_model,
    "svdf, int16 state": lambda seed: svdf_model(seed, "INT16"),
    "svdf, int8 state": lambda seed: svdf_model(seed, "INT8"),
    "variable": lambda seed: variable_model(np.arange(-1, 3, dtype=np.int8) * seed if seed % 2 else None, seed - 9),
    "streaming": streaming_model,
}


def integers(model: bytes) -> Graph:
    graph = quantize(simplify(load_tflite("net.tflite", model, "net")))
    verify(graph)
    return graph


def micro(streamed: Streamed) -> list[Array]:
    return [results[0] for results in run_calls(streamed.model, [{0: x} for x in streamed.inputs])]


@pytest.mark.parametrize("name", MODELS)
def test_every_call_equals_tflite_micro(name: str) -> None:
    varied = 0
    for seed in range(SEEDS):
        streamed = MODELS[name](seed)
        graph, expected = integers(streamed.model), micro(streamed)
        found = evaluate_all(graph, [{graph.given[0]: x} for x in streamed.inputs])
        for call, (outputs, wanted) in enumerate(zip(found, expected, strict=True)):
            np.testing.assert_array_equal(outputs[graph.results[0]], wanted, f"seed {seed}, call {call}")
        varied += len({wanted.tobytes() for wanted in expected}) > 2
    assert varied > SEEDS // 2, "most models should give different results from call to call"


@pytest.mark.parametrize("opcode", ["SVDF", "UNIDIRECTIONAL_SEQUENCE_LSTM"])
def test_float_models_stay_near_tflite_micro_at_every_call(opcode: str) -> None:
    for seed in range(12):
        streamed = float_model(seed, opcode)
        graph = quantize(simplify(load_tflite("net.tflite", streamed.model, "net")), allow_float=True)
        verify(graph)
        found = evaluate_all(graph, [{graph.given[0]: x} for x in streamed.inputs])
        for outputs, wanted in zip(found, micro(streamed), strict=True):
            np.testing.assert_allclose(outputs[graph.results[0]], wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("opcode, function", [("LOGISTIC", sigmoid16), ("TANH", tanh16)])
def test_gates_are_tflites_16_bit_functions(opcode: str, function: Callable[[Array], Array]) -> None:
    writer, every = ModelWriter(), np.arange(-32768, 32768).astype(np.int16)
    x = writer.tensor("x", every.shape, "INT16", None, (2.0**-12, 0))
    y = writer.tensor("y", every.shape, "INT16", None, (2.0**-15, 0))
    writer.operator(opcode, [x], [y])
    writer.ends([x], [y])
    expected = run_calls(writer.finish(), [{0: every}])[0][0]
    np.testing.assert_array_equal(function(every.astype(np.int64)), expected)


def test_segments_are_the_gates() -> None:
    """Every value there is: three times an int16 for the sigmoid, up to eight times as much for the tangent."""
    tables = {stem: array.astype(np.int64) for stem, array in segments().items()}
    for stem, bits, shift, factor in (("sigmoid", 9, 10, 3), ("tangent", 8, 8, 3), ("tangent", 8, 8, 24)):
        values = np.arange(-32768, 32768, dtype=np.int64) * factor
        limited = np.clip(values, -65536, 65535) if stem == "tangent" else values
        starts, slopes = tables[f"{stem}_starts"], tables[f"{stem}_slopes"]
        place = (limited >> bits) + len(starts) // 2
        assert place.min() >= 0 and place.max() < len(starts)
        found = (starts[place] + (limited & ((1 << bits) - 1)) * slopes[place]) >> shift
        np.testing.assert_array_equal(found, between_sigmoids(values, stem == "tangent"))


@pytest.mark.oracles
def test_instructions_of_a_real_lstm(tmp_path: Path) -> None:
    model = Path(__file__).resolve().parents[2] / "shared" / "models" / "field" / "mnist_lstm_int8.tflite"
    if not model.is_file():
        pytest.skip("the reference models of ../shared are not here")
    compiled = compile_model(model, load_target("cortex_m4"), Options())
    write_project(compiled.project, tmp_path / "build")
    result = run_build(open_build(tmp_path / "build"), "iss", [sample_inputs(compiled.graph)])
    (wanted,) = evaluate_all(compiled.graph, [sample_inputs(compiled.graph)])
    assert all(np.array_equal(result.outputs[0][name], wanted[name]) for name in compiled.graph.results)
    instructions = result.simulation.inferences[0].instructions
    assert instructions is not None
    per_mac = instructions / sum(region.macs for region in compiled.regions)
    print(f"{per_mac:.3f} instructions per MAC")
    assert per_mac <= 2.0


@pytest.mark.parametrize(("name", "core"), [("lstm", "riscv"), ("lstm", "cortex_m4"), ("streaming", "riscv")])
def test_firmware_equals_tflite_micro_at_each_call(name: str, core: str, tmp_path: Path) -> None:
    streamed = MODELS[name](1)
    path, target = tmp_path / "net.tflite", load_target(core)
    path.write_bytes(streamed.model)
    options = Options(check=True, save_stages=tmp_path / "stages")
    compiled = compile_model(path, target, options)
    write_project(compiled.project, tmp_path / "build")
    feeds = [{compiled.graph.given[0]: x} for x in streamed.inputs]
    for simulator in ("host", "iss"):
        results = run_build(open_build(tmp_path / "build"), simulator, feeds).outputs
        for outputs, expected in zip(results, micro(streamed), strict=True):
            np.testing.assert_array_equal(outputs[compiled.graph.results[0]], expected)
    assert f"void {compiled.unit.model}_reset(void);" in compiled.project.files[f"src/{compiled.unit.model}.h"]


def host_library(streamed: Any, folder: Path) -> tuple[ctypes.CDLL, Any, Any]:
    """The C of a model as a library of this computer, and the memory of its input and of its output."""
    path = folder / "net.tflite"
    path.write_bytes(streamed.model)
    compiled = compile_model(path, load_target("riscv"), Options())
    write_project(compiled.project, folder / "build")
    sources = [Path(name) for name in compiled.project.host_sources]
    folders = [Path("src"), Path("runtime")]
    made = compile_host(folder / "build", sources, defines={"DOVETAIL_HOST": None}, include=folders)
    library = ctypes.CDLL(str(made))
    manifest = read_manifest(folder / "build")
    ports = (*manifest.inputs, *manifest.outputs)
    size = max(port.offset + port.bytes for port in ports)
    memory = np.frombuffer((ctypes.c_byte * size).in_dll(library, ports[0].symbol), np.int8)
    given, result = (memory[port.offset : port.offset + port.bytes] for port in ports)
    return library, given, result


def test_a_new_sequence_begins_after_reset(tmp_path: Path) -> None:
    streamed = streaming_model(2)
    library, given, result = host_library(streamed, tmp_path)
    for sequence in range(3):
        for x, expected in zip(streamed.inputs[: 4 + sequence], micro(streamed), strict=False):
            given[:] = x.reshape(-1)
            library.net_run()
            np.testing.assert_array_equal(result, expected.reshape(-1))
        library.net_reset()


def test_a_sequence_goes_on_from_what_was_saved(tmp_path: Path) -> None:
    """Saved after two inferences, restored after another sequence."""
    streamed = streaming_model(2)
    library, given, result = host_library(streamed, tmp_path)
    size = int(re.findall(r"NET_STATE_BYTES (\d+)u", (tmp_path / "build" / "src" / "net.h").read_text())[0])
    before, saved = (ctypes.c_uint8 * size)(), (ctypes.c_uint8 * size)()

    def step(at: int) -> None:
        given[:] = streamed.inputs[at].reshape(-1)
        library.net_run()
        np.testing.assert_array_equal(result, micro(streamed)[at].reshape(-1))

    library.net_save(before)
    step(0)
    step(1)
    library.net_save(saved)
    assert bytes(saved) != bytes(before)
    library.net_restore(before)
    step(0)
    library.net_restore(saved)
    step(2)


def test_engines_leave_results_of_16_bits_to_the_core(tmp_path: Path) -> None:
    path = tmp_path / "net.tflite"
    path.write_bytes(streaming_model(2).model)
    graph = prepare(path, load_target("vta"), Options())
    producers = graph.producers()
    wide = [node for node in graph.nodes if isinstance(node.operator, Clip) and node.operator.dtype is DType.INT16]
    assert wide
    assert all(isinstance(producers[node.inputs[0]].operator, Requantize) for node in wide)


def onnx_layer(random: Any, kind: str, **attributes: Any) -> tuple[Any, dict[str, Array]]:
    """A model of one layer with every operand, and its inputs."""
    onnx = pytest.importorskip("onnx")
    steps, batch, depth, hidden = (int(random.integers(1, most)) for most in (6, 4, 6, 7))
    gates, count = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind], 2 if attributes.get("direction") == "bidirectional" else 1

    def real(*shape: int) -> Array:
        return random.normal(0, 0.6, shape).astype(np.float32)

    batch_first = attributes.get("layout") == 1
    shape = (batch, steps) if batch_first else (steps, batch)
    state = (batch, count, hidden) if batch_first else (count, batch, hidden)
    constants = {
        "w": real(count, gates * hidden, depth),
        "r": real(count, gates * hidden, hidden),
        "b": real(count, 2 * gates * hidden),
        "lengths": np.full(batch, steps, np.int32),
    }
    feeds = {"x": real(*shape, depth), "h": real(*state)}
    names = ["x", "w", "r", "b", "lengths", "h"]
    results = ["y", "y_h"]
    if kind == "LSTM":
        feeds["c"], constants["p"], results = real(*state), real(count, 3 * hidden), [*results, "y_c"]
        names += ["c", "p"]
    node = onnx.helper.make_node(kind, names, results, hidden_size=hidden, **attributes)
    kind_of = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        [node],
        "layer",
        [onnx.helper.make_tensor_value_info(name, kind_of, array.shape) for name, array in feeds.items()],
        [onnx.helper.make_tensor_value_info(name, kind_of, [None] * (3 + (name == "y"))) for name in results],
        [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 14)], ir_version=8)
    return model, feeds


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_float_layers_are_those_of_onnx_runtime(kind: str, direction: str) -> None:
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is the oracle")
    random = np.random.default_rng(len(kind) * len(direction))
    count = 2 if direction == "bidirectional" else 1
    other = {"LSTM": ["Sigmoid", "Relu", "Tanh"], "GRU": ["Sigmoid", "Relu"], "RNN": ["Sigmoid"]}[kind]
    variants: list[dict[str, Any]] = [{}, {"activations": other * count}]
    hard = {"LSTM": ["HardSigmoid", "Softsign", "Affine"], "GRU": ["HardSigmoid", "Affine"], "RNN": ["Affine"]}[kind]
    lines = sum(name in ("HardSigmoid", "Affine") for name in hard) * count
    alphas, betas = [0.3, 0.7][:lines] * (lines // 2 or 1), [0.5, 0.1][:lines] * (lines // 2 or 1)
    variants.append({"activations": hard * count, "activation_alpha": alphas, "activation_beta": betas, "clip": 0.4})
    variants += [{"linear_before_reset": 1}, {"linear_before_reset": 0}] if kind == "GRU" else []
    for attributes in variants * 2:
        model, feeds = onnx_layer(random, kind, direction=direction, **attributes)
        graph = quantize(simplify(load_onnx("layer", model.SerializeToString(), "layer", Path())), allow_float=True)
        verify(graph)
        session = runtime_session(model)
        found = evaluate(graph, feeds)
        for output, expected in zip(session.get_outputs(), session.run(None, feeds), strict=True):
            np.testing.assert_allclose(found[output.name], expected, rtol=1e-5, atol=2e-6)


def test_batches_may_come_first() -> None:
    """ONNX Runtime has no layout 1; what it gives for layout 0 is turned."""
    first, feeds = onnx_layer(np.random.default_rng(1), "LSTM", direction="bidirectional", layout=1)
    second, _ = onnx_layer(np.random.default_rng(1), "LSTM", direction="bidirectional", layout=0)
    graphs = [load_onnx("layer", model.SerializeToString(), "layer", Path()) for model in (first, second)]
    turned = {name: array.swapaxes(0, 1) for name, array in feeds.items()}
    outputs, expected = evaluate(graphs[0], feeds), evaluate(graphs[1], turned)
    np.testing.assert_array_equal(outputs["y"], expected["y"].transpose(2, 0, 1, 3))
    for name in ("y_h", "y_c"):
        np.testing.assert_array_equal(outputs[name], expected[name].swapaxes(0, 1))


ONNX_REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "coupled gates": ("LSTM", {"input_forget": 1}, "input_forget"),
    "activation": ("RNN", {"activations": ["Elu"]}, "must be one of Sigmoid"),
    "direction": ("GRU", {"direction": "sideways"}, "do not fit"),
}


@pytest.mark.parametrize("case", ONNX_REFUSED)
def test_what_an_onnx_layer_may_not_have(case: str) -> None:
    kind, attributes, message = ONNX_REFUSED[case]
    model, _ = onnx_layer(np.random.default_rng(1), kind, **attributes)
    with pytest.raises(ModelError, match=message):
        load_onnx("layer", model.SerializeToString(), "layer", Path())


def broken(change: Callable[[Any], None], name: str = "streaming") -> bytes:
    """A model with something changed in its flatbuffer."""
    import flatbuffers  # type: ignore[import-untyped]

    schema = ModelWriter().schema
    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(MODELS[name](1).model, 0))
    change(model)
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def _operators(model: Any) -> Any:
    return model.subgraphs[0].operators


def _feed(model: Any, operator: int, place: int, tensor: int) -> None:
    """Let an operator read another tensor."""
    inputs = [int(index) for index in _operators(model)[operator].inputs]
    inputs[place] = tensor
    _operators(model)[operator].inputs = inputs


TFLITE_REFUSED: dict[str, tuple[str, Callable[[Any], None], str]] = {
    "no such subgraph": ("variable", lambda m: m.subgraphs.pop(), "runs subgraph 1"),
    "assigns what is computed": (
        "variable",
        lambda m: setattr(m.subgraphs[1].tensors[1], "buffer", 0),
        "which is no constant",
    ),
    "too late": ("variable", lambda m: _operators(m).append(_operators(m).pop(0)), "after it was used"),
    "no handle": ("streaming", lambda m: _operators(m).pop(0), "not the result of a VAR_HANDLE"),
    "not a variable": (
        "svdf, int16 state",
        lambda m: setattr(m.subgraphs[0].tensors[4], "isVariable", False),
        "variable of its own",
    ),
    "other type": ("svdf, int16 state", lambda m: setattr(m.subgraphs[0].tensors[4], "type", 9), "must be int16"),
    "scalar": ("svdf, int8 state", lambda m: setattr(m.subgraphs[0].tensors[0], "shape", []), "two axes"),
    "activation": (
        "svdf, int8 state",
        lambda m: setattr(_operators(m)[0].builtinOptions, "fusedActivationFunction", 3),
        "activation 3",
    ),
    "cell step": (
        "lstm",
        lambda m: setattr(m.subgraphs[0].tensors[14].quantization, "scale", [0.001]),
        r"step of 2\*\*-9",
    ),
    "peepholes": ("lstm", lambda m: _feed(m, 0, 9, 1), "peepholes"),
    "gates": ("lstm", lambda m: _feed(m, 0, 1, -1), "operand 1 is missing"),
    "read otherwise": ("svdf, int8 state", lambda m: _feed(m, 0, 0, 4), "cannot keep"),
}


@pytest.mark.parametrize("case", TFLITE_REFUSED)
def test_what_a_tflite_model_may_not_have(case: str) -> None:
    name, change, message = TFLITE_REFUSED[case]
    with pytest.raises(ModelError, match=message):
        load_tflite("net.tflite", broken(change, name), "net")
