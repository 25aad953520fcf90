"""A small Llama with random weights as ONNX: a token in each inference, keys and values in buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper, save

LAYER = """
n = RMSNormalization x gain
q = MatMul n wq
k = MatMul n wk
v = MatMul n wv
a present_key present_value = GroupQueryAttention q k v past_key past_value position total cosine sine
o = MatMul a wo
y = Add x o
m = RMSNormalization y gain
g = MatMul m wg
s = Sigmoid g
w = Mul g s
u = MatMul m wu
h = Mul w u
d = MatMul h wd
next = Add y d
"""
"""A layer: results, operator, operands."""
END = """
n = RMSNormalization x gain
logits = MatMul n wl
"""
SHARED = ("gain", "position", "total", "cosine", "sine", "logits")
"""Names that are the same in every layer."""


def write_decoder(path: Path, layers: int, width: int, heads: int, hidden: int, places: int, tokens: int) -> None:
    """Write a decoder with a head of keys and values for each of queries.

    Args:
        path: of the file.
        layers, width, heads: how many, and the elements of a token's row.
        hidden: elements between the dense layers behind attention.
        places: rows of the buffers.
        tokens: how many there are.
    """
    rng, depth = np.random.default_rng(0), width // heads
    angles = np.outer(np.arange(places), 10000.0 ** (-np.arange(0, depth, 2) / depth))
    held = {"cosine": np.cos(angles), "sine": np.sin(angles), "gain": np.ones(width)}
    held["table"] = rng.normal(0, 0.5, (tokens, width))
    sizes = dict.fromkeys(("wq", "wk", "wv", "wo"), (width, width))
    sizes |= {"wg": (width, hidden), "wu": (width, hidden), "wd": (hidden, width), "wl": (width, tokens)}
    more: dict[str, dict[str, Any]] = {"RMSNormalization": {"epsilon": 1e-5}}
    more["GroupQueryAttention"] = {"num_heads": heads, "kv_num_heads": heads, "do_rotary": 1, "domain": "com.microsoft"}
    inputs = [("token", TensorProto.INT64, (1, 1)), ("position", TensorProto.INT32, (1, 1))]
    outputs = [("logits", TensorProto.FLOAT, (1, 1, tokens))]
    nodes = [helper.make_node("Gather", ["table", "token"], ["x_0"])]
    for layer in range(layers + 1):
        for line in (LAYER if layer < layers else END).split("\n")[1:-1]:
            results, _, (operator, *operands) = (part.split() for part in line.partition("= "))
            for name in operands:
                if name in sizes:
                    gain = 0.3 if name in ("wo", "wd") else 1.0
                    held[f"{name}_{layer}"] = rng.normal(0, gain * sizes[name][0] ** -0.5, sizes[name])
            for end, names in ((inputs, operands), (outputs, results)):
                caches = (f"{name}_{layer}" for name in names if name.startswith(("past_", "present_")))
                end += [(name, TensorProto.FLOAT, (1, heads, places, depth)) for name in caches]
            now = {"next": f"x_{layer + 1}", **{name: name for name in SHARED}}
            ends = ([now.get(name, f"{name}_{layer}") for name in names] for names in (operands, results))
            nodes.append(helper.make_node(operator, *ends, **more.get(operator, {})))
    constants = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in held.items()]
    constants.append(numpy_helper.from_array(np.array([places], np.int32), "total"))
    given, made = ([helper.make_tensor_value_info(*one) for one in some] for some in (inputs, outputs))
    versions = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(nodes, "decoder", given, made, constants)
    save(helper.make_model(graph, opset_imports=versions, ir_version=10), path)
