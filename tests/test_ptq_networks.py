"""Quantised networks against ONNX Runtime, which knows nothing of how they were made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from dovetail.compile import Options, compile_model
from dovetail.errors import ModelError, TargetError
from dovetail.guests import zoo
from dovetail.guests.ptq import Method, QuantisedNetwork, Samples, Settings, layers, prepare, quantise_network
from dovetail.guests.ptq.calibration import calibrate, choose_layers
from dovetail.guests.ptq.execute import run
from dovetail.guests.ptq.onnx_writer import plain_onnx
from dovetail.guests.ptq.preparation import equalise, pairs
from dovetail.guests.ptq.qdq import Scheme, qdq_graph
from dovetail.ir.graph import Graph, GraphBuilder, evaluate
from dovetail.ir.onnx_runtime import runtime_session
from dovetail.ir.operators.arithmetic import Add
from dovetail.ir.operators.linear import DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.reduction import Normalise
from dovetail.ir.rewrite import simplify
from dovetail.ir.types import Array, DType, TensorType
from dovetail.quantize import quantize
from dovetail.read import load_model
from dovetail.target import Quantisation
from dovetail.targets import load_target
from ptq_networks import digits, images, onnx_runtime, varied

pytest.importorskip("onnxruntime", reason="ONNX Runtime is the oracle here (dovetail[check])")
DATA = images(48)
TEST = images(16, seed=9)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    """`varied`, prepared."""
    path = tmp_path_factory.mktemp("varied") / "varied.onnx"
    onnx.save(varied(), path)
    return prepare(load_model(path), path.name)


@pytest.fixture(scope="module")
def reference() -> Array:
    """What ONNX Runtime makes of the float network and the test data."""
    return onnx_runtime(varied(), {"image": TEST})


def quantised(graph: Graph, target: str = "riscv", **choices: object) -> QuantisedNetwork:
    settings = Settings(**choices)  # type: ignore[arg-type]
    return quantise_network(graph, Samples({"image": DATA}, None), load_target(target), settings)


def ratio(wanted: Array, got: Array) -> float:
    """Signal to noise in dB."""
    return float(10 * np.log10((wanted**2).sum() / ((got - wanted) ** 2).sum()))


def test_preparation_folds_normalisation_and_keeps_the_meaning(network: Graph, reference: Array) -> None:
    assert sum(isinstance(node.operator, DepthwiseConv2d) for node in network.nodes) == 1, "the normalisation is gone"
    batched = run(network, {"image": TEST})["scores"].reshape(16, -1)
    single = np.concatenate([evaluate(network, {"image": image})["scores"] for image in TEST])
    assert np.abs(batched - reference).max() < 1e-4 * np.abs(reference).max()
    assert np.abs(single - reference).max() < 1e-4 * np.abs(reference).max()


def test_a_float_graph_is_written_as_onnx_that_means_the_same(network: Graph, reference: Array) -> None:
    model = plain_onnx(network)
    onnx.checker.check_model(model, full_check=True)
    assert np.abs(onnx_runtime(model, {"image": TEST}) - reference).max() < 1e-4 * np.abs(reference).max()
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("Transpose") <= 1, "only before the dense layer, whose columns are in the graph's order"
    assert {node.domain for node in model.graph.node} == {""}


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("optimised", [True, False])
def test_onnx_runtime_agrees_with_the_qdq_graph(network: Graph, bits: int, optimised: bool) -> None:
    found = quantised(network, bits=bits)
    onnx.checker.check_model(found.model, full_check=True)
    got = onnx_runtime(found.model, {"image": TEST}, optimised)
    steps = next(n for n in found.graph.nodes if n.output == "scores")
    scale = float(found.graph.constants[steps.inputs[1]][0])
    ours = run(found.graph, {"image": TEST})["scores"].reshape(16, -1)
    assert np.abs(got - ours).max() <= 1.01 * scale, "within one step of the result"


@pytest.mark.parametrize("bits", [8, 2])
def test_every_layer_of_the_integer_graph_is_within_a_step_of_onnx_runtime(network: Graph, bits: int) -> None:
    """Each layer gets ONNX Runtime's own operands, so that no step of a layer before is carried on."""
    found = quantised(network, bits=bits, integer_ends=True)
    integer = quantize(simplify(found.graph))
    watched = [node.output[0] for node in found.model.graph.node if node.op_type == "QuantizeLinear"]
    model = onnx.ModelProto()
    model.CopyFrom(found.model)
    given = {output.name for output in model.graph.output}
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in watched if name not in given)
    sample = np.clip(np.rint(TEST[0] * 20), -128, 127).astype(np.int8)
    session = runtime_session(model, optimised=False)
    names = [output.name for output in session.get_outputs()]
    theirs = dict(zip(names, session.run(None, {"image": sample}), strict=True))
    values = {"image": sample, **integer.constants}
    compared = 0
    for node in integer.nodes:
        values[node.output] = node.operator.evaluate([values[name] for name in node.inputs])
        if node.output in theirs:
            array = theirs[node.output]
            ours = values[node.output]
            array = array.transpose(0, 2, 3, 1) if array.ndim == 4 else array
            assert np.abs(array.astype(int) - ours).max() <= 1, node.output
            values[node.output] = array
            compared += 1
    assert compared >= 8


@pytest.mark.parametrize("bits", [8, 2])
@pytest.mark.parametrize("ends", [False, True])
def test_the_written_file_compiles_to_what_onnx_runtime_computes(
    network: Graph, bits: int, ends: bool, tmp_path: Path
) -> None:
    found = quantised(network, bits=bits, integer_ends=ends)
    path = tmp_path / "model.onnx"
    path.write_bytes(found.model.SerializeToString())
    for target in ("riscv", "ne16"):
        compile_model(path, load_target(target), Options(check=True))  # compares every stage in ONNX Runtime
    integer = quantize(simplify(load_model(path)))
    assert integer.types["image"].dtype is (DType.INT8 if ends else DType.FLOAT32)
    sample = TEST if not ends else np.clip(np.rint(TEST * 20), -128, 127).astype(np.int8)
    got = onnx_runtime(found.model, {"image": sample}).astype(np.float64)
    ours = np.concatenate([evaluate(integer, {"image": image})["scores"] for image in sample]).astype(np.float64)
    scale = 1.0 if ends else float(np.abs(got[got != 0]).min())
    assert np.abs(got - ours).max() <= 3.01 * scale, "six layers, each within a step"


def test_values_keep_the_names_of_the_model(network: Graph) -> None:
    model = quantised(network).model
    names = {name for node in model.graph.node for name in node.output}
    assert {"relu1", "relu2", "sum", "gate", "scores"} <= names
    assert model.graph.input[0].name == "image" and model.graph.output[0].name == "scores"


def test_quantisation_is_deterministic(network: Graph) -> None:
    first, second = (quantised(network, bits=4).model.SerializeToString(deterministic=True) for _ in range(2))
    assert first == second


def test_equalisation_leaves_the_network_as_it_is(network: Graph, reference: Array) -> None:
    equal, factors = equalise(network)
    assert [pair.first.output for pair in pairs(network)] == ["depthwise"] and set(factors) == {"depthwise", "relu2"}
    assert np.abs(np.log(factors["relu2"])).max() > 0.5, "the channels differ a lot"
    got = onnx_runtime(plain_onnx(equal), {"image": TEST})
    assert np.abs(got - reference).max() < 1e-4 * np.abs(reference).max()
    scaled = run(equal, {"image": TEST}, keep=["relu2"])["relu2"]
    plain = run(network, {"image": TEST}, keep=["relu2"])["relu2"]
    assert np.allclose(scaled, plain * factors["relu2"], rtol=1e-4, atol=1e-5)


def test_equalisation_helps_where_a_layer_has_one_scale(network: Graph, reference: Array) -> None:
    ratios = [
        ratio(
            reference,
            onnx_runtime(
                quantised(network, per_channel=False, bits=4, adaptive=False, equalise=on).model, {"image": TEST}
            ),
        )
        for on in (False, True)
    ]
    assert ratios[1] > ratios[0]


@pytest.mark.parametrize(
    ("better", "worse"),
    [({}, {"adaptive": False}), ({"adaptive": False}, {"adaptive": False, "correct_bias": False})],
    ids=["adaptive rounding", "corrected biases"],
)
def test_what_is_done_by_default_lowers_the_error(
    network: Graph, reference: Array, better: dict[str, bool], worse: dict[str, bool]
) -> None:
    ratios = [
        ratio(reference, onnx_runtime(quantised(network, bits=4, **choice).model, {"image": TEST}))
        for choice in (better, worse)
    ]
    assert ratios[0] > ratios[1] + 0.2


def test_layers_make_up_for_the_errors_of_the_stream_they_add_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of a residual stream are nearer to the float network's, on other data too, than if each layer is fitted to
    its own sums alone."""
    rng, builder, errors = np.random.default_rng(2), GraphBuilder("stream"), list[float]()
    value = builder.input("x", TensorType((1, 24), DType.FLOAT32))
    for _ in range(4):
        weights = builder.constant("w", rng.normal(0, 0.2, (24, 24)).astype(np.float32))
        rows = builder.add(Normalise(1e-5, centred=False), [value])
        value = builder.add(Add(), [value, builder.add(FullyConnected(), [rows, weights])])
    graph = builder.finish([value])
    data, other = ({"x": rng.normal(0, 1, (600, 1, 24)).astype(np.float32)} for _ in range(2))
    widths = {node.output: 4 for node in layers.weighted_layers(graph)}
    for fitted in (layers._goal, lambda graph, node, real, *others: real[node.output]):
        monkeypatch.setattr(layers, "_goal", fitted)
        calibrated = calibrate(graph, data, Quantisation(), Settings())
        got = run(qdq_graph(graph, choose_layers(calibrated, data, widths)), other)[value]
        errors.append(float(((got - run(graph, other)[value]) ** 2).mean()))
    assert errors[0] < 0.9 * errors[1]


def test_corrected_biases_take_the_mean_error_off(network: Graph) -> None:
    calibrated = calibrate(network, {"image": DATA}, Quantisation(), Settings())
    errors = []
    for correct in (True, False):
        settings = Settings(bits=2, adaptive=False, correct_bias=correct)
        widths = {node.output: 2 for node in network.nodes if len(node.inputs) == 3}
        found = choose_layers(replace(calibrated, settings=settings), {"image": DATA}, widths)
        graph = qdq_graph(calibrated.graph, Scheme(calibrated.activations, found.weights, found.biases))
        got, wanted = (run(g, {"image": DATA}, keep=["conv2"])["conv2"] for g in (graph, network))
        errors.append(float(np.abs((got - wanted).mean(axis=(0, 1, 2, 3))).max()))
    assert errors[0] < 0.05 * errors[1]


@pytest.mark.parametrize("method", list(Method))
def test_every_method_keeps_the_network(network: Graph, reference: Array, method: Method) -> None:
    got = onnx_runtime(quantised(network, method=method).model, {"image": TEST})
    assert ratio(reference, got) > 20


def test_symmetric_activations_have_no_zero_points(network: Graph) -> None:
    model = quantised(network, symmetric=True).model
    zeros = [onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.name.endswith("_zero_point")]
    assert zeros and not any(array.any() for array in zeros)


def test_the_target_says_what_it_takes(network: Graph) -> None:
    riscv = load_target("riscv")
    narrow = replace(riscv, quantisation=Quantisation(weight_bits=(8,), per_channel=False, symmetric=True))
    with pytest.raises(TargetError, match="takes weights of 8 bits, not of 4"):
        quantise_network(network, Samples({"image": DATA}, None), narrow, Settings(bits=4))
    found = quantise_network(network, Samples({"image": DATA}, None), narrow, Settings())
    sizes = {t.name: t.dims for t in found.model.graph.initializer if t.name.endswith("_scale")}
    assert all(list(size) in ([], [1]) for size in sizes.values())


def test_narrow_weights_reach_the_ne16_with_their_width(tmp_path: Path) -> None:
    _, graph = digits(tmp_path)
    samples = Samples({"input": zoo.calibration("digits")["input"][:, None]}, None)
    sizes = {}
    for bits in (8, 4, 2):
        found = quantise_network(graph, samples, load_target("ne16"), Settings(bits=bits, integer_ends=True))
        path = tmp_path / f"{bits}.onnx"
        path.write_bytes(found.model.SerializeToString())
        compiled = compile_model(path, load_target("ne16"), Options())
        assert all(region.engine is not None for region in compiled.regions if region.macs)
        kinds = {
            region.graph.types[node.inputs[1]].dtype.bits
            for region in compiled.regions
            for node in region.graph.nodes
            if region.macs
            and len(node.inputs) > 1
            and node.inputs[1] in region.graph.constants
            and node.operator.macs([region.graph.types[name] for name in node.inputs])
        }
        assert max(kinds) == bits
        sizes[bits] = found.weight_bytes
    assert sizes[8] == 2 * sizes[4] == 4 * sizes[2]


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = varied()
    array = onnx.numpy_helper.to_array(model.graph.initializer[0]).copy()
    array[0, 0, 0, :2] = np.nan, np.inf
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(array, model.graph.initializer[0].name))
    path = tmp_path / "nan.onnx"
    onnx.save(model, path)
    with pytest.raises(ModelError, match=r"'conv1.w' holds 2 values that are NaN or infinite"):
        prepare(load_model(path), path.name)


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("weights", ["QInt8", "QInt4"])
def test_what_onnx_runtimes_own_tools_quantise_is_taken(tmp_path: Path, weights: str, per_channel: bool) -> None:
    from onnxruntime import quantization as tools
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(tools.CalibrationDataReader):  # type: ignore[misc]
        """Gives the calibration data."""

        def __init__(self) -> None:
            self.rest = iter([{"image": image} for image in DATA[:16]])

        def get_next(self) -> dict[str, Array] | None:
            return next(self.rest, None)

    paths = [tmp_path / name for name in ("float.onnx", "folded.onnx", "quantised.onnx")]
    onnx.save(varied(), paths[0])
    quant_pre_process(str(paths[0]), str(paths[1]), skip_symbolic_shape=True)
    kinds = {"activation_type": tools.QuantType.QInt8, "weight_type": getattr(tools.QuantType, weights)}
    tools.quantize_static(
        str(paths[1]), str(paths[2]), Reader(), quant_format=tools.QuantFormat.QDQ, per_channel=per_channel, **kinds
    )
    integer = quantize(simplify(load_model(paths[2])))
    ours = np.concatenate([evaluate(integer, {"image": image})["scores"] for image in TEST])
    theirs = onnx_runtime(paths[2].read_bytes(), {"image": TEST})
    scale = np.abs(theirs[theirs != 0]).min()
    assert np.abs(ours - theirs).max() <= 3.01 * scale
    compile_model(paths[2], load_target("ne16"), Options())
