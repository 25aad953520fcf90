"""TFLite import against stored runtime outputs, against LiteRT operator by operator, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.errors import ModelError
from dovetail.ir.graph import Graph, evaluate, verify
from dovetail.ir.operators.activation import Softmax
from dovetail.ir.operators.arithmetic import Dequantize
from dovetail.ir.rewrite import simplify
from dovetail.ir.types import Array, DType
from dovetail.read import load_model
from dovetail.read.tflite import load_tflite

MODELS = Path(__file__).resolve().parents[2] / "shared" / "models"
needs_models = pytest.mark.skipif(not MODELS.is_dir(), reason="the shared models are not here")
schema = pytest.importorskip("ai_edge_litert.schema_py_generated", reason="LiteRT writes and runs the test models")

NAMES = ("ad_autoencoder", "ic_resnet8", "kws_dscnn", "vww_mobilenetv1")


def run_one(graph: Graph, x: Array, keep: tuple[str, ...] = ()) -> list[Array]:
    return list(evaluate(graph, {graph.inputs[0]: x}, keep).values())


@needs_models
@pytest.mark.parametrize("name", NAMES)
def test_float_models_agree_with_the_runtime(name: str) -> None:
    path = MODELS / "mlperf_tiny" / f"{name}_f32.tflite"
    graph = load_model(path)
    verify(graph)
    stored = np.load(f"{path}.ref.npz")
    expected = stored["out_0__xnnpack"]
    # The float DS-CNN has int8 weights in its fully connected layer: LiteRT quantises that layer's input on the fly.
    tolerance = 1e-3 if name == "kws_dscnn" else 1e-4
    scale = float(np.abs(expected).max())
    for candidate in (graph, simplify(graph)):
        np.testing.assert_allclose(run_one(candidate, stored["in_0"])[0], expected, rtol=0, atol=tolerance * scale)


@needs_models
@pytest.mark.parametrize("name", NAMES)
def test_int8_models_stay_near_tflite_micro(name: str) -> None:
    """Float meaning against TFLM's fixed point on 4 inputs: 2 or 3 LSB at the logits, many elements equal."""
    path = MODELS / "mlperf_tiny" / f"{name}_int8.tflite"
    graph = load_model(path)
    verify(graph)
    assert graph.name == path.stem
    stored = np.load(path.with_suffix(".many.npz"))
    logits, equal, total = _logits(graph), 0, 0
    for index in range(4):
        x = stored[f"in_{index}"]
        result = run_one(graph, x, (logits,) if logits else ())[-1]
        key = f"pretail_{index}__tflm" if logits else f"out_{index}__tflm"
        difference = np.abs(result.astype(int) - stored[key].astype(int))
        # One rounding differs by at most 1 LSB (tested below); along ResNet8's 9 convolutions that grew to 3.
        assert difference.max() <= (3 if name == "ic_resnet8" else 2), f"{name} input {index}: {difference.max()} LSB"
        equal += int((difference == 0).sum())
        total += difference.size
        np.testing.assert_array_equal(run_one(simplify(graph), x)[0], run_one(graph, x)[0])
    assert equal / total > 0.3


def _logits(graph: Graph) -> str:
    """The integer value a final softmax reads; "" without one."""
    producers = graph.producers()
    for node in graph.nodes:
        if isinstance(node.operator, Softmax):
            return producers[node.inputs[0]].inputs[0]
    return ""


@needs_models
def test_int4_weights_are_unpacked() -> None:
    path = MODELS / "derived" / "conv_fc_mnist_dynamic_wi4.tflite"
    graph = load_model(path)
    narrow = [name for name, kind in graph.types.items() if kind.dtype is DType.INT4]
    assert narrow
    assert all(graph.constants[name].min() >= -8 and graph.constants[name].max() <= 7 for name in narrow)
    stored = np.load(f"{path}.ref.npz")
    result = run_one(graph, stored["in_0"])[0]
    # LiteRT quantises activations on the fly: close, not equal.
    assert np.abs(result - stored["out_0__xnnpack"]).max() < 0.05
    assert result.argmax() == stored["out_0__xnnpack"].argmax()


@needs_models
def test_quantised_values_keep_the_models_names_and_origins() -> None:
    graph = load_model(MODELS / "mlperf_tiny" / "ic_resnet8_int8.tflite")
    assert graph.inputs == ("input_1_int8",)
    assert graph.outputs == ("Identity_int8",)
    assert any(node.origin.startswith("CONV_2D 0 (") for node in graph.nodes)
    assert all(graph.producers()[name].operator for name in graph.outputs)


def tensor(model: Any, name: str, shape: tuple[int, ...], kind: str, data: Array | None = None, **q: Any) -> int:
    """Add a tensor; q: scale, zero_point, axis."""
    entry = schema.TensorT()
    entry.name, entry.shape, entry.type = name.encode(), list(shape), getattr(schema.TensorType, kind)
    buffer = schema.BufferT()
    if data is not None:
        buffer.data = np.frombuffer(data.tobytes(), np.uint8)
    model.buffers.append(buffer)
    entry.buffer = len(model.buffers) - 1
    if q:
        entry.quantization = schema.QuantizationParametersT()
        scale = np.atleast_1d(q["scale"]).astype(np.float32)
        entry.quantization.scale = list(map(float, scale))
        entry.quantization.zeroPoint = [int(q.get("zero_point", 0))] * len(scale)
        entry.quantization.quantizedDimension = q.get("axis", 0)
    model.subgraphs[0].tensors.append(entry)
    return len(model.subgraphs[0].tensors) - 1


def empty_model() -> Any:
    model, graph = schema.ModelT(), schema.SubGraphT()
    model.version, model.buffers, model.operatorCodes = 3, [schema.BufferT()], []
    graph.tensors, graph.operators, graph.inputs, graph.outputs = [], [], [], []
    model.subgraphs, model.description = [graph], b"test"
    return model


def operator(
    model: Any, opcode: str, inputs: list[int], outputs: list[int], options: str = "", version: int = 1, **values: Any
) -> Any:
    code = schema.OperatorCodeT()
    number = getattr(schema.BuiltinOperator, opcode)
    code.builtinCode, code.deprecatedBuiltinCode, code.version = number, min(number, 127), version
    model.operatorCodes.append(code)
    entry = schema.OperatorT()
    entry.opcodeIndex, entry.inputs, entry.outputs = len(model.operatorCodes) - 1, inputs, outputs
    if options:
        entry.builtinOptionsType = getattr(schema.BuiltinOptions, options)
        entry.builtinOptions = getattr(schema, f"{options}T")()
        for name, value in values.items():
            assert hasattr(entry.builtinOptions, name)
            setattr(entry.builtinOptions, name, value)
    model.subgraphs[0].operators.append(entry)
    return entry


def packed(model: Any) -> bytes:
    import flatbuffers  # type: ignore[import-untyped]

    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def run_litert(data: bytes, x: Array) -> Array:
    from ai_edge_litert.interpreter import Interpreter, OpResolverType  # type: ignore[import-untyped]

    runtime = Interpreter(model_content=data, experimental_op_resolver_type=OpResolverType.BUILTIN_REF)
    runtime.allocate_tensors()
    runtime.set_tensor(runtime.get_input_details()[0]["index"], x)
    runtime.invoke()
    found: Array = runtime.get_tensor(runtime.get_output_details()[0]["index"])
    return found


RANDOM = np.random.default_rng(7)
IMAGE = (1, 7, 6, 4)
SCALE = 0.05


def quantised_case(
    opcode: str,
    result: tuple[int, ...],
    options: str = "",
    version: int = 2,
    q: Mapping[str, float] | None = None,
    extra: Callable[[Any], list[int]] | None = None,
    kind: str = "INT8",
    **values: Any,
) -> bytes:
    """A model of one operator on an image of IMAGE."""
    model = empty_model()
    given: dict[str, Any] = {"scale": SCALE, "zero_point": 3 if kind == "INT8" else 0}
    source = tensor(model, "x", IMAGE, kind, **(given if kind != "FLOAT32" else {}))
    others = extra(model) if extra else []
    quantised = dict(q or given) if kind != "FLOAT32" else {}
    target = tensor(model, "y", result, kind, **quantised)
    operator(model, opcode, [source, *others], [target], options, version, **values)
    model.subgraphs[0].inputs, model.subgraphs[0].outputs = [source], [target]
    return packed(model)


def weights_of(shape: tuple[int, ...], axis: int, channels: int) -> Callable[[Any], list[int]]:
    def extra(model: Any) -> list[int]:
        scales = np.linspace(0.01, 0.03, channels)
        w = RANDOM.integers(-127, 128, shape).astype(np.int8)
        b = RANDOM.integers(-800, 800, channels).astype(np.int32)
        return [
            tensor(model, "w", shape, "INT8", w, scale=scales, axis=axis),
            tensor(model, "b", (channels,), "INT32", b, scale=scales * SCALE),
        ]

    return extra


def constant_of(*arrays: Array) -> Callable[[Any], list[int]]:
    def extra(model: Any) -> list[int]:
        return [tensor(model, f"c{i}", a.shape, "INT32", a.astype(np.int32)) for i, a in enumerate(arrays)]

    return extra


def vec(*values: int) -> Array:
    return np.array(values, np.int32)


CONV: dict[str, Any] = {"padding": 0, "strideH": 2, "strideW": 1, "dilationHFactor": 1, "dilationWFactor": 2}
POOL: dict[str, Any] = {"padding": 0, "strideH": 2, "strideW": 2, "filterHeight": 3, "filterWidth": 2}
WIDE: dict[str, Any] = {"scale": 0.41, "zero_point": -5}
CASES: dict[str, Callable[[], bytes]] = {
    "conv same dilated": lambda: quantised_case(
        "CONV_2D", (1, 4, 6, 6), "Conv2DOptions", 3, WIDE, weights_of((6, 3, 2, 4), 0, 6), **CONV
    ),
    "conv relu6": lambda: quantised_case(
        "CONV_2D",
        (1, 4, 6, 6),
        "Conv2DOptions",
        3,
        WIDE,
        weights_of((6, 3, 2, 4), 0, 6),
        fusedActivationFunction=3,
        **CONV,
    ),
    "depthwise multiplier": lambda: quantised_case(
        "DEPTHWISE_CONV_2D",
        (1, 5, 5, 8),
        "DepthwiseConv2DOptions",
        3,
        WIDE,
        weights_of((1, 3, 2, 8), 3, 8),
        padding=1,
        strideH=1,
        strideW=1,
        depthMultiplier=2,
        dilationHFactor=1,
        dilationWFactor=1,
        fusedActivationFunction=1,
    ),
    "fully connected": lambda: quantised_case(
        "FULLY_CONNECTED", (7, 5), "FullyConnectedOptions", 4, WIDE, fully_connected_weights(5, 24)
    ),
    "fully connected keeps axes": lambda: quantised_case(
        "FULLY_CONNECTED",
        (1, 7, 6, 5),
        "FullyConnectedOptions",
        5,
        WIDE,
        fully_connected_weights(5, 4),
        keepNumDims=True,
    ),
    "average pool": lambda: quantised_case("AVERAGE_POOL_2D", (1, 4, 3, 4), "Pool2DOptions", **POOL),
    "max pool": lambda: quantised_case("MAX_POOL_2D", (1, 4, 3, 4), "Pool2DOptions", **POOL),
    "max pool relu": lambda: quantised_case(
        "MAX_POOL_2D", (1, 4, 3, 4), "Pool2DOptions", fusedActivationFunction=1, **POOL
    ),
    "mean": lambda: quantised_case("MEAN", (1, 4), "ReducerOptions", extra=constant_of(vec(1, 2)), q=WIDE),
    "mean keeps axes": lambda: quantised_case(
        "MEAN", (1, 1, 1, 4), "ReducerOptions", extra=constant_of(vec(2, 1)), keepDims=True
    ),
    "reshape": lambda: quantised_case(
        "RESHAPE", (1, 42, 4), "ReshapeOptions", 1, extra=constant_of(vec(1, -1, 4)), newShape=[1, -1, 4]
    ),
    "squeeze": lambda: quantised_case("SQUEEZE", (7, 6, 4), "SqueezeOptions", 1, squeezeDims=[0]),
    "expand dims": lambda: quantised_case(
        "EXPAND_DIMS", (1, 7, 1, 6, 4), "ExpandDimsOptions", 1, extra=constant_of(np.array([-3]))
    ),
    "pad": lambda: quantised_case(
        "PAD", (1, 10, 6, 4), "PadOptions", extra=constant_of(np.array([[0, 0], [1, 2], [0, 0], [0, 0]]))
    ),
    "transpose": lambda: quantised_case(
        "TRANSPOSE", (1, 4, 7, 6), "TransposeOptions", extra=constant_of(vec(0, 3, 1, 2))
    ),
    "slice": lambda: quantised_case(
        "SLICE", (1, 4, 6, 2), "SliceOptions", extra=constant_of(vec(0, 3, 0, 1), vec(1, -1, 6, 2))
    ),
    "strided slice": lambda: quantised_case(
        "STRIDED_SLICE",
        (3, 6, 4),
        "StridedSliceOptions",
        extra=constant_of(vec(0, -6, 5, 0), vec(1, 9, 0, 4), vec(1, 2, 1, 1)),
        beginMask=4,
        endMask=4,
        shrinkAxisMask=1,
    ),
    "concat": lambda: quantised_case("CONCATENATION", (1, 7, 6, 8), "ConcatenationOptions", extra=twin, axis=-1),
    "add relu": lambda: quantised_case(
        "ADD", IMAGE, "AddOptions", 2, WIDE, constant_operand, fusedActivationFunction=1
    ),
    "relu": lambda: quantised_case("RELU", IMAGE, q=WIDE),
    "relu6": lambda: quantised_case("RELU6", IMAGE, q=WIDE),
    "logistic": lambda: quantised_case("LOGISTIC", IMAGE, q={"scale": 1 / 256, "zero_point": -128}),
    "tanh": lambda: quantised_case("TANH", IMAGE, q={"scale": 1 / 128, "zero_point": 0}),
    "hard swish": lambda: quantised_case("HARD_SWISH", IMAGE, "HardSwishOptions", 1, WIDE),
    "leaky relu": lambda: quantised_case("LEAKY_RELU", IMAGE, "LeakyReluOptions", 1, WIDE, alpha=0.2),
    "softmax": lambda: quantised_case(
        "SOFTMAX", IMAGE, "SoftmaxOptions", q={"scale": 1 / 256, "zero_point": -128}, beta=0.7
    ),
    "requantise": lambda: quantised_case("QUANTIZE", IMAGE, "QuantizeOptions", 1, WIDE),
}


def fully_connected_weights(rows: int, depth: int) -> Callable[[Any], list[int]]:
    def extra(model: Any) -> list[int]:
        w = RANDOM.integers(-127, 128, (rows, depth)).astype(np.int8)
        b = RANDOM.integers(-800, 800, rows).astype(np.int32)
        return [
            tensor(model, "w", w.shape, "INT8", w, scale=0.02),
            tensor(model, "b", b.shape, "INT32", b, scale=0.02 * SCALE),
        ]

    return extra


def twin(model: Any) -> list[int]:
    return [0]


def constant_operand(model: Any) -> list[int]:
    array = RANDOM.integers(-127, 128, (4,)).astype(np.int8)
    return [tensor(model, "c", (4,), "INT8", array, scale=0.07, zero_point=11)]


@pytest.mark.parametrize("case", CASES)
def test_each_operator_agrees_with_litert(case: str) -> None:
    data = CASES[case]()
    graph = load_tflite(f"{case}.tflite", data, case)
    verify(graph)
    x = np.random.default_rng(1).integers(-128, 128, IMAGE).astype(np.int8)
    expected, found = run_litert(data, x), run_one(graph, x)[0]
    assert found.shape == expected.shape and found.dtype == expected.dtype
    difference = np.abs(found.astype(int) - expected.astype(int))
    assert difference.max() <= 1, f"{difference.max()} LSB"
    assert (difference == 0).mean() > 0.9
    np.testing.assert_array_equal(run_one(simplify(graph), x)[0], found)


def test_int16_activations() -> None:
    data = quantised_case("LOGISTIC", IMAGE, version=3, kind="INT16", q={"scale": 1 / 32768})
    graph = load_tflite("a.tflite", data, "a")
    x = np.random.default_rng(1).integers(-32768, 32768, IMAGE).astype(np.int16)
    difference = np.abs(run_litert(data, x).astype(int) - run_one(graph, x)[0].astype(int))
    assert difference.max() <= 8


def test_shapes_computed_in_the_model_are_known() -> None:
    """Keras flattens a dynamic batch with SHAPE, STRIDED_SLICE and PACK."""
    model = empty_model()
    quantised: dict[str, Any] = {"scale": SCALE, "zero_point": 3}
    x = tensor(model, "x", IMAGE, "INT8", **quantised)
    bounds = [tensor(model, f"b{i}", (1,), "INT32", vec(value)) for i, value in enumerate((0, 1, 1))]
    rest = tensor(model, "rest", (), "INT32", np.array(-1, np.int32))
    sizes, batch = tensor(model, "sizes", (4,), "INT32"), tensor(model, "batch", (), "INT32")
    wanted, y = tensor(model, "wanted", (2,), "INT32"), tensor(model, "y", (1, 168), "INT8", **quantised)
    operator(model, "SHAPE", [x], [sizes], "ShapeOptions", outType=schema.TensorType.INT32)
    operator(model, "STRIDED_SLICE", [sizes, *bounds], [batch], "StridedSliceOptions", shrinkAxisMask=1)
    operator(model, "PACK", [batch, rest], [wanted], "PackOptions", valuesCount=2, axis=0)
    operator(model, "RESHAPE", [x, wanted], [y], "ReshapeOptions")
    model.subgraphs[0].inputs, model.subgraphs[0].outputs = [x], [y]
    graph = load_tflite("flatten.tflite", packed(model), "flatten")
    assert [node.output for node in graph.nodes] == ["y"]
    image = np.random.default_rng(1).integers(-128, 128, IMAGE).astype(np.int8)
    np.testing.assert_array_equal(run_one(graph, image)[0], run_litert(packed(model), image))


def small_model() -> Any:
    """A convolution, as an object tree to spoil."""
    data = CASES["conv relu6"]()
    return schema.ModelT.InitFromObj(schema.Model.GetRootAs(data, 0))


def spoil(change: Callable[[Any], object]) -> bytes:
    model = small_model()
    change(model)
    return packed(model)


def _set(target: Callable[[Any], Any], **values: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for name, value in values.items():
            assert hasattr(target(model), name)
            setattr(target(model), name, value)

    return change


def tensors(model: Any) -> Any:
    return model.subgraphs[0].tensors


def other_bias_scale(model: Any, weights: list[float]) -> None:
    """Weights with these scales, and a bias that declares others."""
    for place, scale in ((1, weights), (2, [0.1] * len(weights))):
        tensors(model)[place].quantization.scale = scale
        tensors(model)[place].quantization.zeroPoint = [0] * len(scale)


def options(model: Any) -> Any:
    return model.subgraphs[0].operators[0].builtinOptions


REFUSALS: dict[str, tuple[Callable[[Any], object], str]] = {
    "schema": (_set(lambda m: m, version=2), "schema version 2"),
    "version": (_set(lambda m: m.operatorCodes[0], version=9), "version 9 of this operator"),
    "lstm": (_set(lambda m: m.operatorCodes[0], builtinCode=16, deprecatedBuiltinCode=16), "LSTM 0 .y.*not supported"),
    "custom": (
        _set(lambda m: m.operatorCodes[0], builtinCode=32, deprecatedBuiltinCode=32, customCode=b"Ethos"),
        "'Ethos'",
    ),
    "activation": (_set(options, fusedActivationFunction=4), "TANH is not supported"),
    "padding": (_set(options, padding=3), "padding 3"),
    "stride": (_set(options, strideH=0), "stride is 0x1"),
    "dilation": (_set(options, dilationHFactor=-1), "dilation"),
    "bias type": (_set(options, quantizedBiasType=4), "quantized_bias_type"),
    "variable": (_set(lambda m: tensors(m)[0], isVariable=True), "variable"),
    "dynamic shape": (_set(lambda m: tensors(m)[0], shape=[-1, 7, 6, 4]), "every size must be fixed"),
    "huge shape": (_set(lambda m: tensors(m)[0], shape=[1 << 16, 1 << 16, 6, 4]), "limit is 2147483648"),
    "many axes": (_set(lambda m: tensors(m)[0], shape=[1] * 30), "30 axes"),
    "wrong result": (_set(lambda m: tensors(m)[3], shape=[1, 3, 6, 6]), "the model declares"),
    "short buffer": (_set(lambda m: m.buffers[2], data=np.zeros(7, np.uint8)), "needs 144 bytes"),
    "buffer index": (_set(lambda m: tensors(m)[0], buffer=99), "buffer 99"),
    "tensor index": (_set(lambda m: m.subgraphs[0].operators[0], inputs=[0, 77, 2]), "tensor 77"),
    "no outputs": (_set(lambda m: m.subgraphs[0], outputs=[]), "no outputs"),
    "element type": (_set(lambda m: tensors(m)[0], type=schema.TensorType.COMPLEX64), "COMPLEX64"),
    "scales": (_set(lambda m: tensors(m)[1].quantization, scale=[0.1] * 5), "5 scales"),
    "zero points": (_set(lambda m: tensors(m)[1].quantization, zeroPoint=[0, 0]), "2 zero points"),
    "zero scale": (_set(lambda m: tensors(m)[0].quantization, scale=[0.0]), "not a positive number"),
    "nan scale": (_set(lambda m: tensors(m)[0].quantization, scale=[float("nan")]), "not a positive number"),
    "zero point range": (_set(lambda m: tensors(m)[0].quantization, zeroPoint=[300]), "300"),
    "weights axis": (_set(lambda m: tensors(m)[1].quantization, quantizedDimension=3), "axis 3"),
    "bias scale": (lambda m: other_bias_scale(m, [0.02]), "input scale . weight scale"),
    "no quantisation": (_set(lambda m: tensors(m)[0], quantization=None), "no quantisation"),
    "sparse": (_set(lambda m: tensors(m)[1], sparsity=schema.SparsityParametersT()), "sparse"),
    "read early": (_set(lambda m: m.subgraphs[0].operators[0], inputs=[3, 1, 2]), "before it is computed"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_say_what_is_wrong(case: str) -> None:
    change, message = REFUSALS[case]
    with pytest.raises(ModelError, match=message) as caught:
        load_tflite("spoilt.tflite", spoil(change), "spoilt")
    assert caught.value.where.startswith("spoilt.tflite")


def test_the_unspoilt_model_is_read() -> None:
    load_tflite("small.tflite", packed(small_model()), "small")


def test_the_bias_s_scale_is_not_read_where_weights_have_several() -> None:
    """No runtime reads it then, and a converter lets layers share a bias of zeros."""
    load_tflite("small.tflite", spoil(lambda model: other_bias_scale(model, [0.02] * 6)), "small")


def test_shuffled_weights_and_hybrids() -> None:
    shuffled = CASES["fully connected"]()
    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(shuffled, 0))
    options(model).weightsFormat = 1
    with pytest.raises(ModelError, match="SHUFFLED4x16INT8"):
        load_tflite("a.tflite", packed(model), "a")
    hybrid = schema.ModelT.InitFromObj(schema.Model.GetRootAs(shuffled, 0))
    for index in (0, 3):
        tensors(hybrid)[index].type, tensors(hybrid)[index].quantization = schema.TensorType.FLOAT32, None
    hybrid.subgraphs[0].operators[0].inputs = [0, 1, -1]
    graph = load_tflite("a.tflite", packed(hybrid), "a")
    assert [node.output for node in graph.nodes if isinstance(node.operator, Dequantize)] == ["w_real"]


def test_files_that_are_no_models(tmp_path: Path) -> None:
    cases = {"absent.tflite": "no such file", "empty.tflite": "empty", "text.txt": "no known model format"}
    (tmp_path / "empty.tflite").write_bytes(b"")
    (tmp_path / "text.txt").write_text("hello, this is no model")
    for name, message in cases.items():
        with pytest.raises(ModelError, match=message):
            load_model(tmp_path / name)
    with pytest.raises(ModelError, match="directory"):
        load_model(tmp_path)
    others = {
        "saved_model.pb": "tf2onnx",
        "a.pb": "graphdef",
        "a.pte": "torch.onnx",
        "a.pt": "torch.onnx",
        "a.gguf": "ONNX",
    }
    for name, advice in others.items():
        (tmp_path / name).write_bytes(b"PK\x03\x04" * 9)
        with pytest.raises(ModelError, match="which is not read") as refused:
            load_model(tmp_path / name)
        assert advice in refused.value.hint
    with pytest.raises(ModelError, match="this is a TensorFlow SavedModel"):
        load_model(tmp_path)
    sparse = tmp_path / "large.tflite"
    with sparse.open("wb") as stream:
        stream.truncate(513 * 2**20)
    with pytest.raises(ModelError, match="limit is 536870912"):
        load_model(sparse)
