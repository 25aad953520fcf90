"""ONNX Runtime's own operators, weights in blocks and 16-bit floats: what is read means what ONNX Runtime computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from dovetail.errors import ModelError
from dovetail.ir.graph import evaluate
from dovetail.ir.onnx_runtime import runtime_session
from dovetail.ir.types import Array
from dovetail.notes import Note
from dovetail.read.onnx import load_onnx

RNG = np.random.default_rng(11)


def real(*shape: int) -> Array:
    return RNG.normal(0, 1, shape).astype(np.float32)


def model(
    op: str,
    shapes: dict[str, tuple[int, ...]],
    constants: dict[str, Array],
    inputs: str,
    outputs: str = "y",
    **more: Any,
) -> Any:
    """One operator of com.microsoft on float inputs."""
    domain = more.pop("domain", "com.microsoft")
    kind, rank = more.pop("kind", TensorProto.FLOAT), len(next(iter(shapes.values())))
    node = helper.make_node(op, inputs.split(" "), outputs.split(" "), domain=domain, **more)
    ends = [helper.make_tensor_value_info(name, kind, shape) for name, shape in shapes.items()]
    results = [helper.make_tensor_value_info(name, kind, ["?"] * rank) for name in outputs.split(" ") if name]
    held = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph([node], "net", ends, results, held)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def blocks(size: int, count: int, block: int, bits: int, zeros: bool) -> Any:
    """MatMulNBits with random weights."""
    many = -(-size // block)
    packed = RNG.integers(0, 256, (count, many, block * bits // 8)).astype(np.uint8)
    constants = {"w": packed, "s": np.abs(real(count * many)) + np.float32(0.1)}
    if zeros:
        constants["z"] = RNG.integers(0, 256, count * -(-many * bits // 8)).astype(np.uint8)
    inputs = "x w s z" if zeros else "x w s"
    return model("MatMulNBits", {"x": (3, size)}, constants, inputs, K=size, N=count, bits=bits, block_size=block)


def pair(op: str) -> Any:
    """A quantised operator of two."""
    forms = {f"{name}{place}": value for place, scale in enumerate((0.02, 0.03, 0.05)) for name, value in _form(scale)}
    quantise = [
        helper.make_node("QuantizeLinear", [name, f"s{at}", f"z{at}"], [f"q{at}"]) for at, name in enumerate("ab")
    ]
    last = helper.make_node("DequantizeLinear", ["r", "s2", "z2"], ["y"])
    made = model(op, {"a": (2, 8), "b": (2, 8)}, forms, "q0 s0 z0 q1 s1 z1 s2 z2", "r")
    nodes = [*quantise, *made.graph.node, last]
    del made.graph.node[:], made.graph.output[:]
    made.graph.node.extend(nodes)
    made.graph.output.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, (2, 8)))
    return made


def _form(scale: float) -> list[tuple[str, Array]]:
    return [("s", np.array(scale, np.float32)), ("z", np.array(int(scale * 300), np.uint8))]


ROWS = {"x": (2, 5, 16), "k": (2, 5, 16)}
SKIP = {"g": real(16), "b": real(16), "c": real(16)}
CASES: dict[str, Callable[[], Any]] = {
    "4 bits": lambda: blocks(64, 5, 32, 4, zeros=False),
    "4 bits, zero points": lambda: blocks(96, 5, 32, 4, zeros=True),
    "4 bits, cut block": lambda: blocks(40, 6, 16, 4, zeros=True),
    "8 bits": lambda: blocks(64, 4, 32, 8, zeros=False),
    "product": lambda: model("FusedMatMul", {"x": (3, 4), "k": (4, 5)}, {}, "x k", alpha=0.5),
    "product turned": lambda: model("FusedMatMul", {"x": (2, 4, 3)}, {"k": real(5, 4)}, "x k", transA=1, transB=1),
    "bias gelu": lambda: model("BiasGelu", {"x": (3, 8)}, {"b": real(8)}, "x b"),
    "fast gelu": lambda: model("FastGelu", {"x": (3, 8)}, {"b": real(8)}, "x b"),
    "fast gelu alone": lambda: model("FastGelu", {"x": (3, 8)}, {}, "x"),
    "quick gelu": lambda: model("QuickGelu", {"x": (3, 8)}, {}, "x", alpha=1.5),
    "skip": lambda: model("SkipLayerNormalization", ROWS, SKIP, "x k g b c", epsilon=1e-5),
    "skip, sum too": lambda: model("SkipLayerNormalization", ROWS, SKIP, "x k g b", "y   t", epsilon=1e-5),
    "simplified": lambda: model("SkipSimplifiedLayerNormalization", ROWS, SKIP, "x k g", epsilon=1e-5),
}


def compared(given: Any, near: float = 2e-5) -> None:
    rng = np.random.default_rng(3)
    session = runtime_session(given, optimised=False)  # else weights in blocks meet activations of 8 bits
    graph = load_onnx("net.onnx", given.SerializeToString(), "net", Path())
    narrow = session.get_inputs()[0].type == "tensor(float16)"
    feeds = {
        name: rng.normal(0, 1, graph.types[name].shape).astype(np.float16).astype(np.float32) for name in graph.inputs
    }
    wanted = session.run(None, {name: x.astype(np.float16) if narrow else x for name, x in feeds.items()})
    found = evaluate(graph, feeds)
    for name, array in zip(graph.outputs, wanted, strict=True):
        largest = np.abs(array.astype(np.float32)).max()
        np.testing.assert_allclose(found[name], array.astype(np.float32), atol=near * largest, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_means_what_onnx_runtime_computes(case: str) -> None:
    compared(CASES[case]())


@pytest.mark.parametrize("op", ["QLinearAdd", "QLinearMul"])
def test_quantised_sums_and_products(op: str) -> None:
    compared(pair(op), near=0.05)  # a step: ONNX Runtime rounds what it computes in float32


@pytest.mark.parametrize("axis", [0, 1])
def test_weights_in_blocks(axis: int) -> None:
    """DequantizeLinear with block_size, of int8 and int4."""
    shape, scales = (32, 12), (2, 12) if axis == 0 else (32, 3)
    constants = {"w": RNG.integers(-128, 128, shape).astype(np.int8), "s": np.abs(real(*scales)) + np.float32(0.1)}
    constants["z"] = RNG.integers(-9, 9, scales).astype(np.int8)
    block = 16 if axis == 0 else 4
    made = model("DequantizeLinear", {"x": (3, 32)}, constants, "w s z", "d", domain="", axis=axis, block_size=block)
    made.graph.node.append(helper.make_node("MatMul", ["x", "d"], ["y"]))
    made.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, (3, 12)))
    compared(made)
    made.graph.node[0].attribute[1].i += 20
    with pytest.raises(ModelError, match="do not fit the scale"):
        load_onnx("net.onnx", made.SerializeToString(), "net", Path())


def test_16_bit_floats_are_32() -> None:
    """Weights, inputs, outputs and casts; said."""
    half = TensorProto.FLOAT16
    made = model("Gemm", {"x": (3, 8)}, {"w": real(8, 5).astype(np.float16)}, "x w", domain="", kind=half)
    compared(made, near=2e-3)
    made.graph.node.append(helper.make_node("Cast", ["y"], ["c"], to=half))
    made.graph.output[0].CopyFrom(helper.make_tensor_value_info("c", half, (3, 5)))
    told = list[Note]()
    load_onnx("net.onnx", made.SerializeToString(), "net", Path(), None, told.append)
    assert [note.text for note in told] == ["net.onnx: its 16-bit floats are computed, taken and given as float32"]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"bits": 3}, "not 5x64 weights of 3 bits"), ({"N": 6}, "not 6x64 weights"), ({"K": 0}, "not 5x0 weights")],
)
def test_blocks_that_do_not_fit(change: dict[str, int], message: str) -> None:
    made = blocks(64, 5, 32, 4, zeros=False)
    for attribute in made.graph.node[0].attribute:
        attribute.i = change.get(attribute.name, attribute.i)
    with pytest.raises(ModelError, match=message):
        load_onnx("net.onnx", made.SerializeToString(), "net", Path())
