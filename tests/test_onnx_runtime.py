"""Sessions of ONNX Runtime: one place makes them, and integer products in them are exact on every processor."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from dovetail.ir.onnx_runtime import runtime_session, with_unsigned_weights

pytest.importorskip("onnxruntime")

REPOSITORY = Path(__file__).resolve().parents[1]
HELPER = Path("dovetail/ir/onnx_runtime.py")
SESSION = re.compile(r"\bInferenceSession\(")


def sources() -> list[Path]:
    """Files of code and pages, within the repository."""
    folders = ("dovetail", "tests", "scripts", "docs")
    kinds = (".py", ".md", ".ipynb", ".txt")
    return [
        path.relative_to(REPOSITORY)
        for folder in folders
        for path in sorted((REPOSITORY / folder).rglob("*"))
        if path.suffix in kinds
    ]


def test_one_place_makes_sessions() -> None:
    places = [path for path in sources() if SESSION.search((REPOSITORY / path).read_text(encoding="utf-8"))]
    assert places == [HELPER], "use dovetail.ir.onnx_runtime.runtime_session, which is exact on every processor"


def product(op_type: str, weights: np.ndarray, zero: np.ndarray | None) -> bytes:
    """A model of one integer product; its weights are a constant."""
    shape = [2, weights.shape[0]] if op_type == "MatMulInteger" else [1, weights.shape[1], 4, 4]
    names = ["x", "w", "x_zero", *(["w_zero"] if zero is not None else [])]
    arrays = {"w": weights, "x_zero": np.array(131, np.uint8)} | ({} if zero is None else {"w_zero": zero})
    graph = helper.make_graph(
        [helper.make_node(op_type, names, ["y"])],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, shape)],
        [helper.make_tensor_value_info("y", TensorProto.INT32, None)],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return bytes(model.SerializeToString())


@pytest.mark.parametrize("optimised", [True, False])
@pytest.mark.parametrize("zero", [None, np.array(-7, np.int8), np.array([3, -9, 0], np.int8)], ids=str)
def test_products_of_extreme_operands_are_exact(zero: np.ndarray | None, optimised: bool) -> None:
    weights = np.full((6, 3), 127, np.int8)
    weights[:, 1] = -128
    x = np.full((2, 6), 255, np.uint8)
    (got,) = runtime_session(product("MatMulInteger", weights, zero), optimised).run(None, {"x": x})
    offset = 0 if zero is None else zero.astype(np.int64)
    np.testing.assert_array_equal(got, (x.astype(np.int64) - 131) @ (weights.astype(np.int64) - offset))


@pytest.mark.parametrize("op_type", ["MatMulInteger", "ConvInteger"])
def test_int8_weights_become_uint8(op_type: str) -> None:
    rng = np.random.default_rng(2)
    weights = rng.integers(-128, 128, (6, 3) if op_type == "MatMulInteger" else (3, 2, 2, 2)).astype(np.int8)
    changed = with_unsigned_weights(onnx.load_model_from_string(product(op_type, weights, None)))
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in changed.graph.initializer}
    operands = [arrays[name] for name in changed.graph.node[0].input if name in arrays]
    assert [array.dtype for array in operands] == [np.uint8] * 3
    np.testing.assert_array_equal(operands[0].astype(int) - operands[2].astype(int), weights)
