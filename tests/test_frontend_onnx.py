"""ONNX import against ONNX Runtime: whole models, operator by operator, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.errors import ModelError
from dovetail.ir.graph import Graph, evaluate, verify
from dovetail.ir.onnx_runtime import runtime_session
from dovetail.ir.operators.arithmetic import Dequantize
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Transpose
from dovetail.ir.rewrite import simplify
from dovetail.ir.types import Array, DType
from dovetail.read import load_model

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime", reason="ONNX Runtime is the oracle")
helper, numpy_helper, TensorProto = onnx.helper, onnx.numpy_helper, onnx.TensorProto

MODELS = Path(__file__).resolve().parents[2] / "shared" / "models" / "derived"
needs_models = pytest.mark.skipif(not MODELS.is_dir(), reason="the shared models are not here")

WHOLE = ("kws_dscnn_qdq_s8s8_perchannel", "vww_mbv1_qdq_u8s8", "mnist8_qop_u8s8")


def run_runtime(model: str | bytes, feeds: dict[str, Array], optimise: bool = True) -> list[Array]:
    """ONNX Runtime in exact integer arithmetic (see shared/models/README.md)."""
    session = runtime_session(model if isinstance(model, bytes) else Path(model), optimise)
    return list(session.run(None, feeds))


def inputs_for(name: str, graph: Graph, seed: int) -> Array:
    """Noise or a smooth field in the range the model was made for."""
    shape = graph.types[graph.inputs[0]].shape
    source = np.random.default_rng(seed)
    x = source.uniform(0, 1, shape) if seed % 2 else np.cumsum(source.normal(0, 0.05, shape), axis=-1) % 1.0
    return (x * (255.0 if name.startswith("mnist") else 10.0 if name.startswith("kws") else 1.0)).astype(np.float32)


@needs_models
@pytest.mark.parametrize("name", WHOLE)
def test_whole_models_mean_what_onnx_runtime_computes(name: str) -> None:
    """Within 1 step of the last quantisation, and mostly equal, on noise and smooth inputs."""
    path = MODELS / f"{name}.onnx"
    graph = load_model(path)
    small = simplify(graph)
    verify(graph)
    verify(small)
    assert small.inputs == graph.inputs and small.outputs == graph.outputs
    last = graph.producers()[graph.outputs[0]]
    assert isinstance(last.operator, Dequantize)
    step = float(graph.constants[last.inputs[1]][0])
    exact, spread = 0, 0.0
    for seed in range(6):
        feeds = {graph.inputs[0]: inputs_for(name, graph, seed)}
        # Without fusion ONNX Runtime evaluates QDQ in float, operator by operator: the float meaning itself.
        expected = run_runtime(str(path), feeds, optimise=name.startswith("mnist"))[0]
        found = next(iter(evaluate(graph, feeds).values()))
        np.testing.assert_array_equal(next(iter(evaluate(small, feeds).values())), found)
        assert np.abs(found - expected).max() <= 1.01 * step
        exact += int((found == expected).all())
        spread = max(spread, float(np.ptp(expected)))
    assert exact >= 3, f"only {exact} of 6 inputs are equal"
    assert spread > 5 * step, "the inputs do not exercise the model"


@needs_models
@pytest.mark.parametrize("name", WHOLE)
def test_no_transpose_is_left_but_at_the_border(name: str) -> None:
    graph = simplify(load_model(MODELS / f"{name}.onnx"))
    producers = graph.producers()
    for node in graph.nodes:
        if isinstance(node.operator, Transpose):
            source = producers.get(node.inputs[0])
            assert source is not None and source.inputs[0] in graph.inputs, f"{node.output} is inside the network"
        if isinstance(node.operator, Conv2d | DepthwiseConv2d | FullyConnected):
            feeding = [producers[value].operator for value in node.inputs[1:]]
            assert all(isinstance(operator, Dequantize) for operator in feeding)


RANDOM = np.random.default_rng(3)
BEGIN = RANDOM.bit_generator.state


def real(*shape: int) -> Array:
    return RANDOM.normal(0, 1, shape).astype(np.float32)


UINT8 = TensorProto.UINT8
MS = "com.microsoft"


def whole(low: int, high: int, *shape: int, kind: type = np.int8) -> Array:
    return RANDOM.integers(low, high, shape).astype(kind)


def build(
    nodes: list[Any],
    shape: tuple[int, ...],
    constants: dict[str, Any] | None = None,
    kind: int = TensorProto.FLOAT,
    opset: int = 17,
    inputs: list[Any] | None = None,
) -> bytes:
    """A model whose input is x and whose output is the last node's first result."""
    graph = helper.make_graph(
        nodes,
        "g",
        inputs or [helper.make_tensor_value_info("x", kind, list(shape))],
        [_result(nodes[-1], len(shape))],
        [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    return bytes(onnx.shape_inference.infer_shapes(model).SerializeToString())


def _result(last: Any, rank: int) -> Any:
    """The declared result: left to shape inference, or of a type where ONNX does not know the operator."""
    if last.domain == "" and last.op_type != "BatchNormalization":
        return helper.make_empty_tensor_value_info(last.output[0])
    integer = last.domain == MS and len(last.input) != 6
    return helper.make_tensor_value_info(last.output[0], UINT8 if integer else TensorProto.FLOAT, [None] * rank)


def node(op: str, inputs: str, outputs: str = "y", domain: str = "", **attributes: Any) -> Any:
    return helper.make_node(op, inputs.split(), outputs.split(), domain=domain, **attributes)


def one(op: str, shape: tuple[int, ...], constants: dict[str, Any] | None = None, **attributes: Any) -> bytes:
    opset, kind = attributes.pop("opset", 17), attributes.pop("kind", TensorProto.FLOAT)
    domain = attributes.pop("domain", "")
    names = attributes.pop("inputs", " ".join(["x", *(constants or {})]))
    return build([node(op, names, domain=domain, **attributes)], shape, constants, kind, opset)


S, Z = np.float32(0.04), np.uint8(120)
S8, Z8 = np.float32(0.02), np.int8(-7)
IMAGE = (1, 4, 9, 7)


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


def qconv(**attributes: Any) -> bytes:
    channels = 6 // attributes.get("group", 1) * attributes.get("group", 1)
    depth = 4 // attributes.get("group", 1)
    channels = 8 if attributes.get("group", 1) == 4 else channels
    constants: dict[str, Any] = {
        "xs": S,
        "xz": Z,
        "w": whole(-127, 128, channels, depth, 3, 2),
        "ws": np.linspace(0.01, 0.02, channels).astype(np.float32),
        "wz": np.zeros(channels, np.int8),
        "ys": np.float32(0.3),
        "yz": np.uint8(100),
        "b": whole(-900, 900, channels, kind=np.int32),
    }
    return one("QLinearConv", IMAGE, constants, kind=UINT8, **attributes)


CASES: dict[str, Callable[[], bytes]] = {
    "Conv pads": lambda: one(
        "Conv", IMAGE, {"w": real(6, 4, 3, 2), "b": real(6)}, pads=[1, 0, 2, 1], strides=[2, 1], dilations=[1, 2]
    ),
    "Conv same upper": lambda: one("Conv", IMAGE, {"w": real(6, 4, 4, 2)}, auto_pad="SAME_UPPER", strides=[2, 2]),
    "Conv same lower": lambda: one("Conv", IMAGE, {"w": real(6, 4, 4, 2)}, auto_pad="SAME_LOWER", strides=[2, 2]),
    "Conv valid groups": lambda: one("Conv", IMAGE, {"w": real(6, 2, 3, 3)}, auto_pad="VALID", group=2),
    "Conv depthwise": lambda: one("Conv", IMAGE, {"w": real(8, 1, 3, 3), "b": real(8)}, group=4),
    "QLinearConv": lambda: qconv(pads=[1, 1, 1, 1]),
    "QLinearConv depthwise": lambda: qconv(group=4),
    "ConvInteger": lambda: one(
        "ConvInteger",
        IMAGE,
        {"w": whole(0, 255, 5, 4, 3, 3, kind=np.uint8), "xz": Z, "wz": np.uint8(128)},
        kind=UINT8,
        pads=[1, 1, 1, 1],
    ),
    "MatMulInteger": lambda: one(
        "MatMulInteger", (3, 8), {"w": whole(-128, 127, 8, 5), "xz": Z, "wz": np.int8(3)}, kind=UINT8
    ),
    "MatMul": lambda: one("MatMul", (2, 3, 8), {"w": real(8, 5)}),
    "Shrink": lambda: one("Shrink", (4, 9), lambd=0.7),
    "Shrink with bias": lambda: one("Shrink", (4, 9), lambd=0.4, bias=0.4),
    "Einsum": lambda: one("Einsum", (2, 3, 8), {"w": real(8, 2, 5)}, equation="bij,jhk->bhik"),
    "Einsum of two": lambda: build([node("Einsum", "x x", "y", equation="bij, bkj -> bki")], (2, 3, 8)),
    "Einsum of three": lambda: one("Einsum", (3, 4), {"w": real(4, 5), "u": real(5)}, equation="ij,jk,k"),
    "Einsum diagonal": lambda: one("Einsum", (2, 3, 3), equation="...ii->i..."),
    "Einsum broadcast": lambda: one("Einsum", (1, 3, 4), {"w": real(2, 4)}, equation="...ij,...j->...i"),
    "Gemm": lambda: one("Gemm", (3, 8), {"w": real(5, 8), "b": real(1, 5)}, transB=1),
    "Gemm scalar bias": lambda: one("Gemm", (3, 8), {"w": real(8, 5), "b": real(1)}),
    "QLinearMatMul": lambda: one(
        "QLinearMatMul",
        (3, 8),
        {
            "xs": S,
            "xz": Z,
            "w": whole(0, 255, 8, 5, kind=np.uint8),
            "ws": S8,
            "wz": np.uint8(90),
            "ys": np.float32(0.2),
            "yz": Z,
        },
        kind=UINT8,
    ),
    "QGemm": lambda: one(
        "QGemm",
        (3, 8),
        {
            "xs": S,
            "xz": Z,
            "w": whole(-128, 127, 8, 5),
            "ws": S8,
            "wz": Z8,
            "b": whole(-900, 900, 5, kind=np.int32),
            "ys": np.float32(0.2),
            "yz": Z,
        },
        kind=UINT8,
        domain=MS,
    ),
    "QGemm float": lambda: one(
        "QGemm",
        (3, 8),
        {"xs": S, "xz": Z, "w": whole(-128, 127, 5, 8), "ws": S8, "wz": Z8},
        kind=UINT8,
        domain=MS,
        transB=1,
    ),
    "QLinearAdd": lambda: one(
        "QLinearAdd",
        IMAGE,
        {
            "xs": S,
            "xz": Z,
            "c": whole(0, 255, 4, 1, 1, kind=np.uint8),
            "cs": np.float32(0.03),
            "cz": np.uint8(9),
            "ys": np.float32(0.06),
            "yz": Z,
        },
        kind=UINT8,
        domain=MS,
    ),
    "QLinearGlobalAveragePool": lambda: one(
        "QLinearGlobalAveragePool", IMAGE, {"xs": S, "xz": Z, "ys": np.float32(0.011), "yz": Z}, kind=UINT8, domain=MS
    ),
    "QLinearGlobalAveragePool last": lambda: one(
        "QLinearGlobalAveragePool",
        IMAGE,
        {"xs": S, "xz": Z, "ys": np.float32(0.011), "yz": Z},
        kind=UINT8,
        domain=MS,
        channels_last=1,
    ),
    "QLinearAveragePool": lambda: one(
        "QLinearAveragePool",
        IMAGE,
        {"xs": S, "xz": Z, "ys": np.float32(0.021), "yz": Z},
        kind=UINT8,
        domain=MS,
        kernel_shape=[3, 2],
        strides=[2, 2],
        pads=[1, 0, 1, 1],
    ),
    "QLinearConcat": lambda: one(
        "QLinearConcat",
        IMAGE,
        {
            "ys": np.float32(0.06),
            "yz": Z,
            "xs": S,
            "xz": Z,
            "c": whole(0, 255, 1, 2, 9, 7, kind=np.uint8),
            "cs": np.float32(0.03),
            "cz": np.uint8(9),
        },
        inputs="ys yz x xs xz c cs cz",
        kind=UINT8,
        domain=MS,
        axis=1,
    ),
    "QLinearSigmoid": lambda: one(
        "QLinearSigmoid", IMAGE, {"xs": S, "xz": Z, "ys": np.float32(1 / 256), "yz": np.uint8(0)}, kind=UINT8, domain=MS
    ),
    "QLinearLeakyRelu": lambda: one(
        "QLinearLeakyRelu", IMAGE, {"xs": S, "xz": Z, "ys": S, "yz": np.uint8(20)}, kind=UINT8, domain=MS, alpha=0.3
    ),
    "QLinearSoftmax": lambda: build(
        [node("QLinearSoftmax", "x xs xz ys yz", domain=MS, axis=-1, opset=13)],
        (2, 9),
        {"xs": S, "xz": Z, "ys": np.float32(1 / 256), "yz": np.uint8(0)},
        UINT8,
    ),
    "Add vector": lambda: one("Add", IMAGE, {"c": real(4, 1, 1)}),
    "Relu": lambda: one("Relu", IMAGE),
    "Clip": lambda: one("Clip", IMAGE, {"l": np.float32(-0.5), "h": np.float32(0.8)}),
    "Clip old": lambda: one("Clip", IMAGE, min=-0.5, opset=10),
    "Clip integers": lambda: one("Clip", IMAGE, {"l": np.uint8(30), "h": np.uint8(90)}, kind=UINT8),
    "MaxPool": lambda: one("MaxPool", IMAGE, kernel_shape=[3, 2], strides=[2, 2], pads=[1, 0, 1, 1]),
    "MaxPool ceil": lambda: one("MaxPool", IMAGE, kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1),
    "MaxPool integers": lambda: one("MaxPool", IMAGE, kernel_shape=[2, 3], kind=UINT8, opset=12),
    "AveragePool": lambda: one("AveragePool", IMAGE, kernel_shape=[3, 2], strides=[2, 2], pads=[1, 0, 1, 1]),
    "AveragePool counts pad": lambda: one(
        "AveragePool", IMAGE, kernel_shape=[3, 2], pads=[1, 0, 1, 1], count_include_pad=1
    ),
    "AveragePool ceil": lambda: one("AveragePool", IMAGE, kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1),
    "GlobalAveragePool": lambda: one("GlobalAveragePool", IMAGE),
    "ReduceMean": lambda: one("ReduceMean", IMAGE, axes=[2, 3], keepdims=0),
    "ReduceMean operand": lambda: one("ReduceMean", IMAGE, {"a": ints(-1, -2)}, opset=18),
    "ReduceMean nhwc": lambda: one("ReduceMean", IMAGE, axes=[1, 2], keepdims=0),
    "Flatten": lambda: one("Flatten", IMAGE, axis=-2),
    "Reshape": lambda: one("Reshape", IMAGE, {"s": ints(0, -1, 7)}),
    "Squeeze": lambda: one("Squeeze", (1, 4, 1, 7), {"a": ints(0, -2)}),
    "Squeeze all old": lambda: one("Squeeze", (1, 4, 1, 7), opset=11),
    "Unsqueeze": lambda: one("Unsqueeze", (4, 7), {"a": ints(0, -2)}),
    "Transpose": lambda: one("Transpose", IMAGE, perm=[0, 2, 1, 3]),
    "Transpose reversed": lambda: one("Transpose", IMAGE),
    "Concat": lambda: one("Concat", IMAGE, {"c": real(1, 3, 9, 7)}, axis=-3),
    "Pad": lambda: one("Pad", IMAGE, {"p": ints(0, 0, 1, 0, 0, 0, 0, 2), "v": np.float32(1.5)}),
    "Pad axes": lambda: one("Pad", IMAGE, {"p": ints(1, 0, 0, 2), "v": np.float32(1.5), "a": ints(-1, 2)}, opset=18),
    "Slice": lambda: one("Slice", IMAGE, {"s": ints(1, -6), "e": ints(99, -1), "a": ints(1, 3), "t": ints(1, 2)}),
    "Softmax": lambda: one("Softmax", IMAGE, axis=1),
    "Softmax old": lambda: one("Softmax", IMAGE, axis=1, opset=11),
    "Sigmoid": lambda: one("Sigmoid", IMAGE),
    "Tanh": lambda: one("Tanh", IMAGE),
    "HardSwish": lambda: one("HardSwish", IMAGE),
    "HardSigmoid": lambda: one("HardSigmoid", IMAGE, alpha=1 / 6),
    "LeakyRelu": lambda: one("LeakyRelu", IMAGE, alpha=0.3),
    "Elu": lambda: one("Elu", IMAGE, alpha=0.7),
    "Identity": lambda: one("Identity", IMAGE),
    "Dropout": lambda: one("Dropout", IMAGE, {"r": np.float32(0.3)}),
    "Cast": lambda: one("Cast", IMAGE, to=TensorProto.FLOAT),
    "BatchNormalization": lambda: one(
        "BatchNormalization", IMAGE, {"s": real(4), "b": real(4), "m": real(4), "v": np.abs(real(4)) + 0.1}
    ),
    "QuantizeLinear axis": lambda: one(
        "QuantizeLinear",
        IMAGE,
        {"s": np.array([0.01, 0.02, 0.03, 0.04], np.float32), "z": np.array([1, 2, 3, -4], np.int8)},
        axis=1,
    ),
    "QuantizeLinear uint16": lambda: one("QuantizeLinear", IMAGE, {"s": S, "z": np.uint16(3000)}, opset=21),
    "DequantizeLinear": lambda: one("DequantizeLinear", IMAGE, {"s": S, "z": Z}, kind=UINT8),
    "folded shape": lambda: build(
        [
            node("Shape", "x", "n"),
            node("Gather", "n zero", "first"),
            node("Unsqueeze", "first axes", "f"),
            node("Concat", "f minus", "s", axis=0),
            node("Reshape", "x s"),
        ],
        IMAGE,
        {"zero": np.array(0), "axes": ints(0), "minus": ints(-1)},
    ),
    "flatten into dense": lambda: build(
        [
            node("MaxPool", "x", "p", kernel_shape=[2, 2]),
            node("Relu", "p", "r"),
            node("Flatten", "r", "f"),
            node("MatMul", "f w", "m"),
            node("Add", "m b"),
        ],
        IMAGE,
        {"w": real(4 * 8 * 6, 5), "b": real(5)},
    ),
    "quantised weights folded": lambda: build(
        [node("QuantizeLinear", "w s z", "q"), node("DequantizeLinear", "q s z", "r"), node("Conv", "x r")],
        IMAGE,
        {"w": real(6, 4, 3, 3), "s": S8, "z": Z8},
    ),
}


@pytest.fixture(autouse=True)
def the_same_numbers_whatever_came_before() -> None:
    """Each test draws from the start."""
    RANDOM.bit_generator.state = BEGIN


@pytest.mark.parametrize("case", CASES)
def test_each_operator_agrees_with_onnx_runtime(case: str, tmp_path: Path) -> None:
    data = CASES[case]()
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    graph = load_model(path)
    verify(graph)
    kind = graph.types["x"]
    source = np.random.default_rng(5)
    x = source.integers(0, 256, kind.shape) if kind.dtype is DType.UINT8 else source.normal(0, 1, kind.shape)
    feeds = {"x": x.astype(kind.dtype.numpy)}
    expected = run_runtime(data, feeds, optimise=True)[0]
    for candidate in (graph, simplify(graph)):
        verify(candidate)
        found = next(iter(evaluate(candidate, feeds).values()))
        assert found.shape == expected.shape and found.dtype == expected.dtype
        if expected.dtype.kind == "f":
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        elif expected.dtype == np.int32:
            np.testing.assert_array_equal(found, expected)
        else:
            difference = np.abs(found.astype(int) - expected.astype(int))
            assert difference.max() <= 1 and (difference == 0).mean() > 0.9


def packed4(name: str, values: Array, kind: int) -> Any:
    return helper.make_tensor(name, kind, values.shape, values.reshape(-1).tolist())


@pytest.mark.parametrize(
    ("kind", "low", "dtype"), [(TensorProto.INT4, -8, DType.INT4), (TensorProto.UINT4, 0, DType.UINT4)]
)
def test_four_bit_weights(kind: int, low: int, dtype: DType, tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(low, low + 16, (6, 4, 3, 3))
    scales = np.linspace(0.1, 0.2, 6).astype(np.float32)
    graph_proto = helper.make_graph(
        [node("DequantizeLinear", "w s z", "r", axis=0), node("Conv", "x r")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, IMAGE)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, 6, 7, 5))],
        [packed4("w", values, kind), numpy_helper.from_array(scales, "s"), packed4("z", np.full(6, low + 7), kind)],
    )
    data = helper.make_model(
        graph_proto, opset_imports=[helper.make_opsetid("", 21)], ir_version=10
    ).SerializeToString()
    (tmp_path / "w4.onnx").write_bytes(data)
    graph = simplify(load_model(tmp_path / "w4.onnx"))
    assert dtype in {graph.types[name].dtype for name in graph.constants}
    x = np.random.default_rng(1).normal(0, 1, IMAGE).astype(np.float32)
    expected = run_runtime(data, {"x": x}, optimise=False)[0]
    np.testing.assert_allclose(next(iter(evaluate(graph, {"x": x}).values())), expected, rtol=1e-4, atol=1e-4)


def test_functions_are_expanded(tmp_path: Path) -> None:
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
    function = helper.make_function(
        "f", "Twice", ["a"], ["c"], [node("Add", "a a", "b"), node("Relu", "b", "c")], opsets[:1]
    )
    graph_proto = helper.make_graph(
        [node("Twice", "x", "y", domain="f")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [5])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [5])],
    )
    model = helper.make_model(graph_proto, functions=[function], opset_imports=opsets, ir_version=8)
    (tmp_path / "f.onnx").write_bytes(model.SerializeToString())
    x = np.array([-1, 0, 1, 2, 3], np.float32)
    np.testing.assert_array_equal(
        evaluate(load_model(tmp_path / "f.onnx"), {"x": x})["y"], np.array([0, 0, 2, 4, 6], np.float32)
    )


def external(tmp_path: Path, location: str, length: int = 80) -> Path:
    """A model whose weights lie in another file."""
    model = onnx.ModelProto.FromString(one("MatMul", (2, 4), {"w": real(4, 5)}))
    weights = model.graph.initializer[0]
    (tmp_path / "weights.bin").write_bytes(weights.raw_data)
    weights.ClearField("raw_data")
    weights.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("length", str(length))):
        weights.external_data.add(key=key, value=value)
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    (folder / "weights.bin").write_bytes((tmp_path / "weights.bin").read_bytes())
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    return folder / "m.onnx"


def test_external_data_is_read_from_the_models_folder_only(tmp_path: Path) -> None:
    assert load_model(external(tmp_path, "weights.bin")).constants["w"].shape == (4, 5)
    for location in ("../weights.bin", str(tmp_path / "weights.bin"), ""):
        with pytest.raises(ModelError, match="outside the model's folder"):
            load_model(external(tmp_path, location))
    with pytest.raises(ModelError, match="does not exist"):
        load_model(external(tmp_path, "missing.bin"))
    with pytest.raises(ModelError, match=r"wants bytes 0 to 9999 of 'weights.bin', which has 80"):
        load_model(external(tmp_path, "weights.bin", 9999))
    link = external(tmp_path, "link.bin").parent / "link.bin"
    link.symlink_to(tmp_path / "weights.bin")
    with pytest.raises(ModelError, match="outside the model's folder"):
        load_model(external(tmp_path, "link.bin"))


def symbolic(batch: str | int, rows: str | int = 8) -> bytes:
    x = helper.make_tensor_value_info("pixels", TensorProto.FLOAT, [batch, 3, rows, 8])
    return build([node("Relu", "pixels")], (), inputs=[x])


REFUSALS: dict[str, tuple[Callable[[], bytes], str]] = {
    "rows H": (lambda: symbolic(1, "H"), r"'pixels' has the shape \[1, 3, 'H', 8\].*\n.*--shape pixels=1,3,32,8"),
    "rows 0": (lambda: symbolic("N", 0), r"'pixels' has the shape \[1, 3, '\?', 8\]"),
    "opset": (lambda: one("Relu", IMAGE, opset=6), "ai.onnx version 6 is not supported, only 7 to"),
    "conv 3d": (lambda: one("Conv", (1, 4, 9, 9, 9), {"w": real(6, 4, 3, 3, 3)}), "only 2-D convolutions"),
    "conv weights": (lambda: build([node("Relu", "x", "w"), node("Conv", "x w")], (4, 4, 3, 3)), "must be constant"),
    "kernel": (lambda: one("Conv", IMAGE, {"w": real(6, 4, 3, 3)}, kernel_shape=[2, 2]), "kernel_shape is .2, 2."),
    "groups": (lambda: one("Conv", IMAGE, {"w": real(6, 4, 3, 3)}, group=2), "2 groups do not fit 4 channels"),
    "pad mode": (
        lambda: one("Pad", IMAGE, {"p": ints(*[0, 0, 1, 1] * 2)}, mode="mirror"),
        "mode = mirror is not supported",
    ),
    "resize mode": (
        lambda: one(
            "Resize",
            IMAGE,
            {"roi": real(0), "s": np.ones(4, np.float32)},
            coordinate_transformation_mode="tf_crop_and_resize",
        ),
        "the region has 0 numbers",
    ),
    "unknown": (lambda: one("Det", (3, 3)), "Det .* is not supported"),
    "labels": (
        lambda: one("Einsum", (3, 3), {"w": real(2, 3)}, equation="ij,jk->ik"),
        "label j of the equation stands for 3 and 2 elements",
    ),
    "block": (
        lambda: one("DequantizeLinear", (4, 4), {"s": real(2, 4)}, kind=UINT8, opset=21, block_size=2, axis=0),
        "the blocks 'x' must be constant",
    ),
    "dynamic scale": (
        lambda: build([node("DynamicQuantizeLinear", "x", "y s z"), node("DequantizeLinear", "y s z", "r")], IMAGE),
        "the scale 's' must be constant",
    ),
    "batch norm training": (
        lambda: one("BatchNormalization", IMAGE, {k: np.ones(4, np.float32) for k in "sbmv"}, training_mode=1),
        "training_mode = 1|running mean",
    ),
    "invalid": (lambda: one("Relu", IMAGE, nonsense=3), "damaged or invalid.*nonsense"),
    "cast": (lambda: one("Cast", IMAGE, to=TensorProto.DOUBLE), "from float32 to that type"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_say_what_is_wrong(case: str, tmp_path: Path) -> None:
    make, message = REFUSALS[case]
    path = tmp_path / "spoilt.onnx"
    path.write_bytes(make())
    with pytest.raises(ModelError, match=message) as caught:
        load_model(path)
    assert caught.value.where.startswith("spoilt.onnx")


def test_old_and_new_files_are_refused_by_version(tmp_path: Path) -> None:
    model = onnx.ModelProto.FromString(one("Relu", IMAGE))
    path = tmp_path / "v.onnx"
    for version in (2, 99):
        model.ir_version = version
        path.write_bytes(model.SerializeToString())
        with pytest.raises(ModelError, match=f"IR version {version} is not supported, only 3 to"):
            load_model(path)
