"""QONNX models against QONNX's definition, written down once more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from dovetail.compile import Options, compile_model
from dovetail.errors import ModelError
from dovetail.ir.graph import Graph, evaluate
from dovetail.ir.rewrite import simplify
from dovetail.ir.types import Array, DType
from dovetail.quantize import quantize
from dovetail.read import load_model
from dovetail.targets import load_target

DOMAIN = "qonnx.custom_op.general"


def model(
    path: Path, nodes: list[onnx.NodeProto], constants: dict[str, Array], shape: list[int], result: list[int]
) -> Path:
    """A model from `x` to `y` with QONNX's operators."""
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes) for name, sizes in (("x", shape), ("y", result))
    ]
    tensors = [numpy_helper.from_array(np.asarray(array, np.float32), name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], tensors)
    imports = [helper.make_opsetid("", 15), helper.make_opsetid(DOMAIN, 1)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), path)
    return path


def quant(inputs: list[str], output: str, **attributes: object) -> onnx.NodeProto:
    return helper.make_node("Quant", inputs, [output], domain=DOMAIN, **attributes)


def meaning(x: Array, scale: Array, zero: float, bits: int, signed: int, narrow: int) -> Array:
    """Quant by its definition."""
    low = -(2 ** (bits - 1)) + narrow if signed else 0
    high = 2 ** (bits - 1) - 1 if signed else 2**bits - 1 - narrow
    return (np.clip(np.round(x / scale + zero), low, high) - zero) * scale


def values(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8, 11])
@pytest.mark.parametrize(("signed", "narrow"), [(1, 0), (1, 1), (0, 0), (0, 1)])
def test_computed_values(tmp_path: Path, bits: int, signed: int, narrow: int) -> None:
    zero = 0 if signed else 1
    nodes = [quant(["x", "s", "z", "b"], "y", signed=signed, narrow=narrow, rounding_mode="ROUND")]
    constants = {"s": np.array(0.25), "z": np.array(zero), "b": np.array(bits)}
    graph = simplify(load_model(model(tmp_path / "m.onnx", nodes, constants, [3, 40], [3, 40])))
    x = 3 * values(3, 40)
    wanted = meaning(x, np.float32(0.25), zero, bits, signed, narrow)
    assert np.abs(evaluate(graph, {"x": x})["y"] - wanted).max() < 1e-6
    assert np.abs(evaluate(quantize(graph), {"x": x})["y"] - wanted).max() < 1e-6


def network(tmp_path: Path, bits: int, normalised: bool) -> tuple[Path, dict[str, Array]]:
    """A Brevitas-like layer: weights of so many bits per channel, batch normalisation, ReLU of 4 bits."""
    constants = {
        "w": values(6, 3, 3, 3),
        "ws": 0.1 + np.abs(values(6, 1, 1, 1, seed=1)),
        "zero": np.array(0.0),
        "wb": np.array(float(bits)),
        "xs": np.array(0.0625),
        "eight": np.array(8.0),
        "ys": np.array(0.5),
        "four": np.array(4.0),
        "g": values(6, seed=2),
        "b": values(6, seed=3),
        "m": values(6, seed=4),
        "v": np.abs(values(6, seed=5)) + 0.5,
    }
    nodes = [
        quant(["x", "xs", "zero", "eight"], "xq"),
        quant(["w", "ws", "zero", "wb"], "wq", narrow=1),
        helper.make_node("Conv", ["xq", "wq"], ["c"], pads=[1, 1, 1, 1]),
        *([helper.make_node("BatchNormalization", ["c", "g", "b", "m", "v"], ["n"])] if normalised else []),
        helper.make_node("Relu", ["n" if normalised else "c"], ["r"]),
        quant(["r", "ys", "zero", "four"], "y", signed=0),
    ]
    used = {name for node in nodes for name in node.input}
    kept = {name: np.asarray(array, np.float32) for name, array in constants.items() if name in used}
    return model(tmp_path / "m.onnx", nodes, kept, [1, 3, 8, 8], [1, 6, 8, 8]), kept


def expected(x: Array, c: dict[str, Array], bits: int) -> Array:
    """The network in numpy, in NCHW."""
    xq = meaning(x, c["xs"], 0, 8, 1, 0)
    wq = meaning(c["w"], c["ws"], 0, bits, 1, 1)
    padded = np.pad(xq, [(0, 0), (0, 0), (1, 1), (1, 1)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    total = np.einsum("nchwij,ocij->nohw", windows, wq)
    if "g" in c:
        factor = c["g"] / np.sqrt(c["v"] + 1e-5)
        total = (total - c["m"].reshape(-1, 1, 1)) * factor.reshape(-1, 1, 1) + c["b"].reshape(-1, 1, 1)
    return meaning(np.maximum(total, 0), c["ys"], 0, 4, 0, 0)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("normalised", [False, True])
def test_a_layer_as_brevitas_exports_it(tmp_path: Path, bits: int, normalised: bool) -> None:
    path, constants = network(tmp_path, bits, normalised)
    x = values(1, 3, 8, 8, seed=7)
    wanted = expected(x, constants, bits)
    graph = simplify(load_model(path))
    assert np.abs(evaluate(graph, {"x": x})["y"] - wanted).mean() < 0.002
    integer = quantize(graph)
    got = evaluate(integer, {"x": x})["y"]
    assert np.abs(got - wanted).max() <= 0.5 + 1e-6, "within one step"
    assert (np.abs(got - wanted) > 0.1).mean() < 0.05
    held = {DType.INT2: 2, DType.INT4: 4, DType.INT8: 8}
    widths = [
        held[kind.dtype]
        for name, kind in integer.types.items()
        if len(kind.shape) == 4 and kind.dtype in held and name in integer.constants
    ]
    assert widths == [next(width for width in (2, 4, 8) if width >= bits)]
    compile_model(path, load_target("ne16"), Options())


@pytest.mark.parametrize("mode", ["ROUND", "FLOOR", "CEIL", "ROUND_TO_ZERO"])
def test_rounding_modes_of_weights(tmp_path: Path, mode: str) -> None:
    w = values(4, 10)
    nodes = [
        quant(["x", "s", "z", "b"], "xq"),
        quant(["w", "s", "z", "b"], "wq", rounding_mode=mode),
        helper.make_node("Gemm", ["xq", "wq"], ["y"], transB=1),
    ]
    constants = {"w": w, "s": np.array(0.25), "z": np.array(0.0), "b": np.array(4.0)}
    graph = simplify(load_model(model(tmp_path / "m.onnx", nodes, constants, [1, 10], [1, 4])))
    rounding = {"ROUND": np.round, "FLOOR": np.floor, "CEIL": np.ceil, "ROUND_TO_ZERO": np.trunc}[mode]
    found = next(array for array in graph.constants.values() if array.shape == (4, 10))
    assert np.array_equal(found, np.clip(rounding(w / 0.25), -8, 7))


def bipolar(tmp_path: Path, x: str) -> Path:
    nodes = [
        quant(["x", "s", "z", "b"], "xq"),
        helper.make_node("BipolarQuant", [x, "s"], ["wq"], domain=DOMAIN),
        *([helper.make_node("Gemm", ["xq", "wq"], ["r"], transB=1)] if x == "w" else []),
        quant(["r" if x == "w" else "wq", "s", "z", "b"], "y"),
    ]
    constants = {"s": np.array(0.25), "z": np.array(0.0), "b": np.array(8.0)}
    if x == "w":
        constants["w"] = np.where(values(4, 10) > 1, 0, values(4, 10))
    return model(tmp_path / "m.onnx", nodes, constants, [1, 10], [1, 4] if x == "w" else [1, 10])


def test_binary_weights(tmp_path: Path) -> None:
    graph = simplify(load_model(bipolar(tmp_path, "w")))
    found, kind = next((graph.constants[n], k.dtype) for n, k in graph.types.items() if k.shape == (4, 10))
    w = np.where(values(4, 10) > 1, 0, values(4, 10))
    assert kind is DType.INT2 and np.array_equal(found, np.where(w >= 0, 1, -1))
    x = values(1, 10, seed=3)
    wanted = meaning(meaning(x, np.float32(0.25), 0, 8, 1, 0) @ (found.T * 0.25), np.float32(0.25), 0, 8, 1, 0)
    assert np.abs(evaluate(quantize(graph), {"x": x})["y"] - wanted).max() <= 0.25 + 1e-6


def refused(tmp_path: Path, message: str, constants: dict[str, Array], **attributes: object) -> None:
    given = {"s": np.array(0.25), "z": np.array(0.0), "b": np.array(4.0), **constants}
    nodes = [quant(["x", "s", "z", "b"], "y", **attributes)]
    with pytest.raises(ModelError, match=message):
        quantize_file(model(tmp_path / "m.onnx", nodes, given, [1, 10], [1, 10]))


def quantize_file(path: Path) -> Graph:
    return quantize(simplify(load_model(path)))


def test_what_cannot_be_honoured_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, "1 bits, signed, are not supported; 2 to 16 are", {"b": np.array(1.0)})
    refused(tmp_path, r"4.5 bits, signed, are not supported", {"b": np.array(4.5)})
    refused(tmp_path, "17 bits, signed", {"b": np.array(17.0)})
    refused(tmp_path, "scales must be positive", {"s": np.array(0.0)})
    refused(tmp_path, "zero points whole numbers", {"z": np.array(0.5)})
    refused(tmp_path, "must be finite", {"s": np.array(np.nan)})
    refused(tmp_path, "quantised per channel", {"s": np.full((1, 10), 0.5)})
    refused(tmp_path, "rounding_mode = FLOOR of computed values", {}, rounding_mode="FLOOR")
    refused(tmp_path, "rounding_mode = DICE is not supported", {}, rounding_mode="DICE")
    with pytest.raises(ModelError, match="binary activations are not supported"):
        load_model(bipolar(tmp_path, "xq"))
