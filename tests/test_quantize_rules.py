"""The quantize stage's rules on hand-made graphs, on ONNX models, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from dovetail.errors import ModelError
from dovetail.ir.graph import Graph, GraphBuilder, evaluate, verify
from dovetail.ir.onnx_file import check_stages
from dovetail.ir.operators.activation import Clamp, LogSoftmax, Softmax, Unary, UnaryKind
from dovetail.ir.operators.arithmetic import Add, Clip, Dequantize, Lookup, Offset, Quantize, Requantize
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.elementwise import Binary, BinaryKind
from dovetail.ir.operators.linear import FullyConnected
from dovetail.ir.operators.movement import Concat, Gather, Pick, Reshape, Transpose
from dovetail.ir.operators.reduction import ArgExtreme, AveragePool2d, MaxPool2d, Reduce, ReduceKind
from dovetail.ir.rules import run
from dovetail.ir.types import Array, DType, TensorType
from dovetail.quantize import quantize
from dovetail.quantize.tables import one_table
from dovetail.read import load_model
from oracles import derived_file


class QdqBuilder:
    """Builds QDQ graphs by hand."""

    def __init__(self) -> None:
        self.builder = GraphBuilder("hand made")

    def parameters(self, scale: float | list[float], zero_point: int | list[int] = 0) -> list[str]:
        """Scale and zero point constants."""
        scales = np.atleast_1d(np.array(scale, np.float32))
        zero_points = np.broadcast_to(np.array(zero_point, np.int32), scales.shape)
        return [self.builder.constant("scale", scales), self.builder.constant("zero_point", zero_points)]

    def real(self, value: str, scale: float | list[float], zero_point: int | list[int] = 0, axis: int = -1) -> str:
        """A value dequantised."""
        return self.builder.add(Dequantize(axis), [value, *self.parameters(scale, zero_point)], "real")

    def input(self, shape: tuple[int, ...], scale: float, zero_point: int = 0, dtype: DType = DType.INT8) -> str:
        """A quantised input, dequantised."""
        name = self.builder.fresh("x")
        return self.real(self.builder.input(name, TensorType(shape, dtype)), scale, zero_point)

    def quantised(
        self, value: str, scale: float, zero_point: int = 0, dtype: DType = DType.INT8, stem: str = "y"
    ) -> str:
        """A float value quantised."""
        return self.builder.add(Quantize(dtype), [value, *self.parameters(scale, zero_point)], stem, "MADE 0 (y)")

    def graph(self, *outputs: str) -> Graph:
        """The graph of what was added."""
        return self.builder.finish(outputs)


def random_inputs(graph: Graph, seed: int = 0) -> dict[str, Array]:
    """Random values of each input's whole range."""
    rng = np.random.default_rng(seed)
    kinds = {name: graph.types[name] for name in graph.inputs}
    return {
        name: rng.normal(0, 2, kind.shape).astype(np.float32)
        if kind.dtype is DType.FLOAT32
        else rng.integers(kind.dtype.low, kind.dtype.high + 1, kind.shape).astype(kind.dtype.numpy)
        for name, kind in kinds.items()
    }


def check_meaning(graph: Graph, lsb: int = 1) -> Graph:
    """Quantise the graph and compare it with its float meaning; returns the integer graph."""
    integers = quantize(graph)
    verify(integers)
    assert check_stages(graph, integers, random_inputs(graph), lsb) > 0
    return integers


def kinds_of(graph: Graph) -> list[str]:
    return [type(node.operator).__name__ for node in graph.nodes]


def test_a_float_model_is_refused_with_advice() -> None:
    builder = GraphBuilder("float")
    x = builder.input("x", TensorType((1, 4), DType.FLOAT32))
    w = builder.constant("w", np.ones((2, 4), np.float32))
    y = builder.add(FullyConnected(), [x, w], "y", "FULLY_CONNECTED 0 (y)")
    with pytest.raises(ModelError, match=r"FULLY_CONNECTED 0 \(y\).*not quantised.*(?s:.*)post-training"):
        quantize(builder.finish([y]))


def test_a_float_operator_between_quantised_ones_is_named() -> None:
    made = QdqBuilder()
    x = made.input((1, 4), 0.1)
    bare = made.builder.add(Softmax(), [x], "soft", "SOFTMAX 3 (soft)")
    graph = made.graph(made.quantised(made.builder.add(Add(), [bare, x], "sum", "ADD 4 (sum)"), 0.1))
    with pytest.raises(ModelError, match=r"SOFTMAX 3 \(soft\): Softmax gives the float value soft"):
        quantize(graph)
    with pytest.raises(ModelError, match="float value soft"):
        quantize(made.graph(bare))


def test_float_weights_are_refused() -> None:
    made = QdqBuilder()
    w = made.builder.constant("w", np.ones((2, 4), np.float32))
    y = made.builder.add(FullyConnected(), [made.input((1, 4), 0.1), w], "sum", "DENSE 1 (sum)")
    with pytest.raises(ModelError, match=r"DENSE 1 \(sum\): the weights of FullyConnected are float"):
        quantize(made.graph(made.quantised(y, 0.1)))


def dense(weights_array: Array, zero_point: int | list[int], scale: float | list[float], bias_of: str | None) -> Graph:
    """A dense layer by hand; the bias is float, quantised with another scale, or absent."""
    made = QdqBuilder()
    operands = [made.input((3, weights_array.shape[1]), 0.05, 7)]
    w = made.builder.constant("w", weights_array)
    operands.append(made.real(w, scale, zero_point, 0))
    if bias_of == "float":
        operands.append(made.builder.constant("b", np.linspace(-3, 3, len(weights_array), dtype=np.float32)))
    elif bias_of is not None:
        b = made.builder.constant("b", np.arange(len(weights_array), dtype=np.int32) * 40 - 60)
        operands.append(made.real(b, 0.03, 4))
    y = made.builder.add(FullyConnected(), operands, "sum", "DENSE 1 (sum)")
    return made.graph(made.quantised(y, 0.4, -5))


@pytest.mark.parametrize("bias_of", ["float", "other scale", None])
def test_biases_of_every_kind(bias_of: str | None) -> None:
    array = np.random.default_rng(1).integers(-127, 128, (4, 30)).astype(np.int8)
    check_meaning(dense(array, 0, [0.01, 0.02, 0.03, 0.015], bias_of))


def test_zero_points_of_weights_are_taken_off() -> None:
    array = np.random.default_rng(1).integers(0, 256, (4, 30)).astype(np.uint8)
    graph = check_meaning(dense(array, 128, 0.02, "float"))
    assert graph.nodes[0].operator == FullyConnected(7, 0)
    assert graph.types[graph.nodes[0].inputs[1]].dtype is DType.INT8
    graph = check_meaning(dense(array, 90, 0.02, "float"))
    assert graph.nodes[0].operator == FullyConnected(7, 90)
    check_meaning(dense((array // 2).astype(np.uint8), [64, 60, 50, 0], [0.02] * 4, None))
    with pytest.raises(ModelError, match="do not fit int8"):
        quantize(dense(array, [128, 90, 128, 128], [0.02] * 4, None))


def test_weights_that_were_transposed() -> None:
    made = QdqBuilder()
    array = np.random.default_rng(1).integers(-127, 128, (30, 4)).astype(np.int8)
    real = made.real(made.builder.constant("w", array), [0.01, 0.02, 0.03, 0.015], 0, 1)
    w = made.builder.add(Transpose((1, 0)), [real])
    y = made.builder.add(FullyConnected(), [made.input((3, 30), 0.05, 7), w], "sum")
    graph = check_meaning(made.graph(made.quantised(y, 0.4, -5)))
    assert "Transpose" not in kinds_of(graph)


def test_float_borders_stay() -> None:
    """A float NCHW input is quantised first and transposed as integers; a float output is dequantised last."""
    made = QdqBuilder()
    image = made.builder.input("image", TensorType((1, 3, 6, 6), DType.FLOAT32))
    quantised = made.quantised(made.builder.add(Transpose((0, 2, 3, 1)), [image]), 0.03, 3, stem="q")
    real = made.real(quantised, 0.03, 3)
    pooled = made.quantised(made.builder.add(MaxPool2d((2, 2), (2, 2)), [real]), 0.03, 3)
    output = made.builder.add(Reshape((1, 27)), [made.real(pooled, 0.03, 3)], "out")
    graph = check_meaning(made.graph(output), 0)
    assert kinds_of(graph) == ["Quantize", "Transpose", "MaxPool2d", "Reshape", "Dequantize"]
    assert graph.outputs == ("out",)


def test_concatenation_brings_its_operands_to_one_quantisation() -> None:
    made = QdqBuilder()
    operands = [made.input((2, 20), 0.05, 7), made.input((2, 30), 0.03, -9), made.input((2, 10), 0.04, 1)]
    y = made.builder.add(Concat(1), operands)
    graph = check_meaning(made.graph(made.quantised(y, 0.04, 1)))
    assert kinds_of(graph).count("Requantize") == 2


def test_pools_that_change_the_quantisation() -> None:
    made = QdqBuilder()
    x = made.input((1, 8, 8, 6), 0.05, 7)
    plain = made.quantised(made.builder.add(AveragePool2d((2, 2), (2, 2)), [x]), 0.02, 3, stem="plain")
    padded = made.builder.add(AveragePool2d((3, 3), (2, 2), ((1, 1), (1, 1))), [x])
    padded = made.quantised(padded, 0.02, 3, stem="padded")
    largest = made.builder.add(MaxPool2d((3, 3), (2, 2), ((1, 1), (1, 1))), [x])
    largest = made.quantised(made.builder.add(Clamp(0.0, 6.0), [largest]), 0.06, -3, stem="largest")
    graph = check_meaning(made.graph(plain, padded, largest))
    assert kinds_of(graph).count("SumPool2d") == 2 and "MaxPool2d" in kinds_of(graph)


@pytest.mark.parametrize(("dtype", "kind"), [(DType.INT8, "Binary"), (DType.UINT16, "AveragePool2d")])
def test_a_pool_whose_counts_have_no_small_multiple(dtype: DType, kind: str) -> None:
    made = QdqBuilder()
    x = made.real(made.builder.input("x", TensorType((1, 12, 12, 2), dtype)), 0.05, 7)
    wide = made.builder.add(AveragePool2d((11, 11), (1, 1), ((5, 5), (5, 5))), [x])
    graph = check_meaning(made.graph(made.quantised(wide, 0.05, 3, dtype)), 1)
    assert kind in kinds_of(graph)


@pytest.mark.parametrize("kind", list(UnaryKind))
@pytest.mark.parametrize("dtype", [DType.INT8, DType.UINT8])
def test_tables_are_the_functions_rounded(kind: UnaryKind, dtype: DType) -> None:
    made = QdqBuilder()
    zero_point = 11
    if kind in (UnaryKind.SQUARE_ROOT, UnaryKind.LOGARITHM, UnaryKind.RECIPROCAL_ROOT):
        zero_point = dtype.low - (kind is UnaryKind.RECIPROCAL_ROOT)  # not defined below 0, nor the last at 0
    x = made.input((1, 500), 0.05, zero_point, dtype)
    y = made.builder.add(Unary(kind, 0.2), [x])
    graph = check_meaning(made.graph(made.quantised(y, 0.03, 8, dtype)), 1)
    assert kinds_of(graph) == ["Lookup"]


def test_signedness_changes_by_an_offset() -> None:
    made = QdqBuilder()
    x = made.input((1, 50), 0.05, 130, DType.UINT8)
    assert kinds_of(check_meaning(made.graph(made.quantised(x, 0.05, 2)), 0)) == ["Offset"]
    assert kinds_of(check_meaning(made.graph(made.quantised(x, 0.05, 3)))) == ["Requantize", "Clip"]


def test_a_softmax_with_any_result() -> None:
    made = QdqBuilder()
    soft = made.builder.add(Softmax(), [made.input((4, 10), 0.1, 5, DType.UINT8)])
    graph = check_meaning(made.graph(made.quantised(soft, 1 / 200, 0, DType.UINT8)), 1)
    assert kinds_of(graph) == ["FixedSoftmax", "Requantize", "Clip"]


def test_an_addition_of_a_constant_scales_it_at_compile_time() -> None:
    made = QdqBuilder()
    array = np.arange(-6, 6, dtype=np.int8).reshape(1, 1, 1, 12)
    constant = made.real(made.builder.constant("c", array), 0.2, 3)
    y = made.builder.add(Add(), [made.input((1, 3, 3, 12), 0.1, 5), constant])
    graph = check_meaning(made.graph(made.quantised(y, 0.12, -4)))
    assert kinds_of(graph).count("Requantize") == 2


def test_an_output_that_is_its_own_operand_keeps_its_name() -> None:
    made = QdqBuilder()
    x = made.input((1, 50), 0.05, 3)
    graph = check_meaning(made.graph(made.quantised(x, 0.05, 3, stem="same")), 0)
    assert graph.outputs == ("same",) and kinds_of(graph) == ["Reshape"]


ONNX_MODELS = ("kws_dscnn_qdq_s8s8_perchannel", "vww_mbv1_qdq_u8s8", "mnist8_qop_u8s8")


@pytest.mark.parametrize("name", ONNX_MODELS)
def test_onnx_models_stay_within_one_step_per_requantisation(name: str) -> None:
    """The QDQ graph is what ONNX Runtime computes; each requantisation of the integers is one step off at most."""
    path = derived_file(f"{name}.onnx")
    graph = load_model(path)
    with np.load(derived_file(f"{name}.onnx.ref.npz")) as stored:
        inputs = {graph.inputs[0]: stored["in_0"]}
        found = evaluate(graph, inputs)[graph.outputs[0]]
        np.testing.assert_allclose(found, stored["out_0__ort_precise"].reshape(found.shape), rtol=0, atol=1e-6)
    integers = quantize(graph)
    verify(integers)
    assert check_stages(graph, integers, inputs, lsb=1) > 10
    assert check_stages(graph, integers, random_inputs(graph), lsb=1) > 10
    assert not any(isinstance(node.operator, Dequantize) for node in integers.nodes[:-1])


def test_a_model_with_quantised_weights_alone_is_refused() -> None:
    with pytest.raises(ModelError, match="not quantised"):
        quantize(load_model(derived_file("conv_fc_mnist_dynamic_wi4.tflite")))


@pytest.mark.parametrize(("a", "b"), [(DType.INT8, DType.INT8), (DType.UINT8, DType.UINT8), (DType.INT16, DType.INT16)])
@pytest.mark.parametrize("kind", [BinaryKind.SUBTRACT, BinaryKind.MULTIPLY, BinaryKind.MINIMUM, BinaryKind.MAXIMUM])
def test_functions_of_two_values_on_integers(kind: BinaryKind, a: DType, b: DType) -> None:
    made = QdqBuilder()
    zero = (0, 0, 0) if a is DType.INT16 else (11, 3, 8)
    operands = [made.input((2, 3, 40), 0.05, zero[0], a), made.input((3, 1), 0.07, zero[1], b)]
    y = made.builder.add(Binary(kind), operands)
    graph = check_meaning(made.graph(made.quantised(y, 0.09, zero[2], a)))
    assert all(graph.types[node.output].dtype.is_integer for node in graph.nodes)


@pytest.mark.parametrize("kind", [ReduceKind.SUM, ReduceKind.MEAN, ReduceKind.MAXIMUM, ReduceKind.MINIMUM])
@pytest.mark.parametrize("dtype", [DType.INT8, DType.UINT8])
def test_reductions_on_integers(kind: ReduceKind, dtype: DType) -> None:
    made = QdqBuilder()
    y = made.builder.add(Reduce(kind, (0, 2)), [made.input((3, 5, 7), 0.05, 11, dtype)])
    graph = check_meaning(made.graph(made.quantised(y, 0.31, 8, dtype)))
    assert all(graph.types[node.output].dtype.is_integer for node in graph.nodes)


def test_elements_are_taken_as_the_integers_they_are() -> None:
    made = QdqBuilder()
    x = made.input((6, 5), 0.05, 11)
    indices = made.builder.input("indices", TensorType((4,), DType.INT32))
    taken = made.builder.add(Gather(0), [x, indices])
    turned = made.builder.add(Pick((tuple(range(4)), (4, 4, 0))), [taken])
    made.builder.add(ArgExtreme(1, largest=True), [x], "best")
    graph = quantize(made.graph(made.quantised(turned, 0.05, 11), "best"))
    assert kinds_of(graph) == ["ArgExtreme", "Gather", "Pick"] or kinds_of(graph) == ["Gather", "Pick", "ArgExtreme"]
    assert all(graph.types[node.output].dtype.is_integer for node in graph.nodes)


def test_what_has_no_integer_form_is_computed_in_float_where_that_is_allowed() -> None:
    made = QdqBuilder()
    x = made.input((4, 5), 0.05, 11)
    y = made.builder.add(Binary(BinaryKind.POWER), [x, made.input((4, 1), 0.07, -128)], "ratio", "POW 0 (ratio)")
    plain = made.graph(made.quantised(y, 0.03), x)
    with pytest.raises(ModelError, match="no integer form"):
        quantize(plain)
    graph = quantize(plain, allow_float=True)
    feeds = {name: np.maximum(array, 11) for name, array in random_inputs(plain).items()}  # no root of less than 0
    expected, found = evaluate(plain, feeds), evaluate(graph, feeds)
    for name, other in zip(plain.outputs, graph.outputs, strict=True):
        np.testing.assert_array_equal(expected[name], found[other])
    assert plain.outputs == graph.outputs


def test_rows_too_long_for_the_fixed_point_are_refused() -> None:
    made = QdqBuilder()
    soft = made.builder.add(LogSoftmax(), [made.input((1, 5000), 0.1, 5)], "log", "LOG_SOFTMAX 0 (log)")
    graph = made.graph(made.quantised(soft, 1 / 16, 127))
    with pytest.raises(ModelError, match="up to 4095 in a row") as caught:
        quantize(graph)
    assert caught.value.where == "LOG_SOFTMAX 0 (log)"
    assert quantize(graph, allow_float=True).outputs


def test_a_table_and_its_operand_are_one_table() -> None:
    """x times a table of x, requantised, is a table of 16 bits; with another operand it is none."""
    rng, results = np.random.default_rng(3), []
    for alone in (True, False):
        builder = GraphBuilder("table")
        x, other = (builder.input(name, TensorType((2, 300), DType.INT8)) for name in "xy")
        table = builder.constant("table", rng.integers(-128, 128, 256).astype(np.int8))
        looked_up = builder.add(Lookup(), [x if alone else other, table])
        factors = [builder.add(Offset(by, DType.INT32), [value]) for by, value in ((-3, x), (128, looked_up))]
        product = builder.add(Binary(BinaryKind.MULTIPLY), factors)
        scale = [builder.constant(name, np.array([value], np.int32)) for name, value in (("m", 1518500250), ("s", -1))]
        scaled = builder.add(Requantize(), [product, *scale])
        graph = builder.finish([builder.add(Clip(-32768, 32767, DType.INT16), [scaled], "z")])
        changed = run(graph, (one_table,))
        inputs = {name: rng.integers(-128, 128, (2, 300)).astype(np.int8) for name in "xy"}
        np.testing.assert_array_equal(evaluate(changed, inputs)["z"], evaluate(graph, inputs)["z"])
        results.append([type(node.operator) for node in changed.nodes])
    assert results[0] == [Lookup] and len(results[1]) == 6


@pytest.mark.parametrize("kind", [Add(), Binary(BinaryKind.SUBTRACT)])
def test_products_that_are_summed_are_rounded_once(kind: Operator) -> None:
    """As a rotation has them, with scales of their own: no result is more than half a step off."""
    made, scales = QdqBuilder(), ((0.02, 5), (1 / 127, 0), (0.031, -9), (0.0075, 3))
    values = [made.input((3, 40), *form) for form in scales]
    products = [made.builder.add(Binary(BinaryKind.MULTIPLY), pair) for pair in (values[:2], values[2:])]
    float_graph = made.graph(made.quantised(made.builder.add(kind, products), 0.05, 7))
    graph, inputs = quantize(float_graph), random_inputs(float_graph, 5)
    assert sum(isinstance(node.operator, Requantize) for node in graph.nodes) == 1
    forms = zip(graph.given, scales, strict=True)
    reals = [(inputs[name].astype(np.float64) - zero) * scale for name, (scale, zero) in forms]
    sign = 1 if kind == Add() else -1
    exact = (reals[0] * reals[1] + sign * reals[2] * reals[3]) / 0.05 + 7
    (found,) = evaluate(graph, inputs).values()
    assert np.abs(found - np.clip(exact, -128, 127)).max() < 0.52
