"""Writes letters.onnx, its tokenizer letters.bin and sequences to quantise it with."""

import struct

import numpy as np
from onnx import TensorProto, helper, numpy_helper, save

text = "the cat sat on the mat and the rat sat on the cat "
letters = sorted(set(text))
pieces = ["<unk>", "<s>", "</s>", *letters]
size, places, depth = len(pieces), 32, 8
rng = np.random.default_rng(1)
follows = np.full((size, size), -4.0)
for one, other in zip(text, text[1:]):
    follows[pieces.index(one), pieces.index(other)] = max(follows[pieces.index(one), pieces.index(other)], 0) + 1
follows[1, pieces.index(" ")] = 4
arrays = {
    "embedding": np.eye(size), "wq": rng.normal(0, 0.5, (size, depth)), "wk": rng.normal(0, 0.5, (size, depth)),
    "wv": rng.normal(0, 0.2, (size, depth)), "wo": rng.normal(0, 0.2, (depth, size)), "wl": follows,
    "scale": np.array(depth**-0.5), "zero": np.array(0.0), "low": np.array(-1e9),
}  # fmt: skip
arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
arrays |= {"last": np.array([-1]), "first": np.array([0]), "places": np.arange(places)}
nodes = [("Gather", "embedding token", "x"), ("Unsqueeze", "position last", "at")]
nodes += [("MatMul", f"x w{name}", name) for name in "qkv"]
for name, row in (("key", "k"), ("value", "v")):
    nodes.append(("ScatterND", f"past_{name} at {row}", f"present_{name}"))
nodes += [
    *(("Transpose", "present_key", "turned"), ("MatMul", "q turned", "products"), ("Mul", "products scale", "scores")),
    *(("LessOrEqual", "places position", "live"), ("Where", "live zero low", "mask"), ("Add", "scores mask", "masked")),
    *(("Softmax", "masked", "shares"), ("MatMul", "shares present_value", "attended"), ("MatMul", "attended wo", "o")),
    *(("Add", "x o", "y"), ("MatMul", "y wl", "logits")),
]
caches = [(name, TensorProto.FLOAT, [places, depth]) for name in ("past_key", "past_value", "present_key", "present_value")]
ends = [("token", TensorProto.INT64, [1]), ("position", TensorProto.INT64, [1]), *caches[:2]]
results = [("logits", TensorProto.FLOAT, [1, size]), *caches[2:]]
graph = helper.make_graph(
    [helper.make_node(kind, inputs.split(), [result]) for kind, inputs, result in nodes],
    "letters",
    *([helper.make_tensor_value_info(*one) for one in some] for some in (ends, results)),
    [numpy_helper.from_array(array, name) for name, array in arrays.items()],
)
save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), "letters.onnx")

with open("letters.bin", "wb") as file:  # as llama2.c's tokenizers are
    file.write(struct.pack("<i", max(map(len, pieces))))
    for piece in pieces:
        file.write(struct.pack("<fi", 0.0, len(piece)) + piece.encode())

tokens = np.array([[1, *(pieces.index(one) for one in text[at : at + 31])] for at in range(0, 16, 4)])
np.savez("sequences.npz", token=tokens, position=np.tile(np.arange(32), (4, 1)))
