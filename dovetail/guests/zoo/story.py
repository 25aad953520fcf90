"""The zoo's language model: a decoder of two layers that writes short sentences about animals, letter by letter.

Its weights, its letters and some of its text are stored with the package; scripts/train_story.py makes them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

import numpy as np
import onnx

from dovetail.arrays import write_outputs
from dovetail.files import TemporaryFolder
from dovetail.ir.onnx_body import OnnxBody, onnx_model, value_info
from dovetail.ir.types import Array, DType, TensorType
from dovetail.records import Record

NAME = "story"
LAYERS, WIDTH, HIDDEN, HEADS, PLACES = 2, 32, 96, 4, 96
"""Blocks, width of the residual stream, of the feed-forward layers, heads of attention, most tokens of a text."""
PIECES = ("<unk>", "<s>", "</s>", *" .abcdefghijklmnopqrstuvwxyz")
"""The tokens: a text begins with `<s>` and ends with `</s>`."""
EPSILON = 1e-5
"""Added to the variances of normalisations."""


class StoryFile(Record):
    """The content of `story.npz`."""

    parameters: dict[str, Array]
    """float32 by name, as `parameter_shapes` has them."""
    calibration: Array
    """int64 [N, steps]: texts of the training as tokens, as long as the shortest."""
    held_back: Array
    """int64 [N, steps]: such texts that the training never saw."""


def parameter_shapes() -> dict[str, tuple[int, ...]]:
    """The shapes of all weights: dense layers take [inputs, outputs]."""
    own = {"norm1": (WIDTH,), "norm2": (WIDTH,), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    own |= dict.fromkeys(("query", "key", "value", "out"), (WIDTH, WIDTH))
    layers = {f"{layer}.{name}": shape for layer in range(LAYERS) for name, shape in own.items()}
    tables = {"embedding": (len(PIECES), WIDTH), "places": (PLACES, WIDTH)}
    return {**tables, **layers, "norm": (WIDTH,), "head": (WIDTH, len(PIECES))}


def stored() -> StoryFile:
    """The model as scripts/train_story.py trained it, read from the package."""
    with resources.files("dovetail.guests.zoo").joinpath("story.npz").open("rb") as file, np.load(file) as arrays:
        parameters = {name: arrays[name].astype(np.float32) for name in parameter_shapes()}
        return StoryFile(parameters, *(arrays[name].astype(np.int64) for name in ("calibration", "held_back")))


def sequences(tokens: Array) -> dict[str, Array]:
    """Texts, int64 [N, steps], as data of the model: each input's values [N, steps]."""
    return {"token": tokens, "position": np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)}


def tokenizer() -> bytes:
    """The tokens as a tokenizer's file of llama2.c."""
    coded = [piece.encode() for piece in PIECES]
    return struct.pack("<i", max(map(len, coded))) + b"".join(struct.pack("<fi", 0, len(one)) + one for one in coded)


def model(parameters: Mapping[str, Array]) -> onnx.ModelProto:
    """One step of the float model: `token` and `position` in, `logits` out, and caches `past_…` and `present_…`."""
    caches = [f"{kind}_{layer}" for layer in range(LAYERS) for kind in ("key", "value")]
    body = OnnxBody()
    add, held = body.add, {name: body.initializer(name, array, DType.FLOAT32) for name, array in parameters.items()}
    live = add("LessOrEqual", [body.tensor(np.arange(PLACES)), "position"])
    mask = add("Where", [live, body.scalar(0.0, DType.FLOAT32), body.scalar(-1e9, DType.FLOAT32)])
    at = add("Unsqueeze", ["position", body.integers([-1])])
    x = add("Add", [add("Gather", [held["embedding"], "token"]), add("Gather", [held["places"], "position"])])

    def dense(x: str, name: str, result: str = "") -> str:
        return body.node("MatMul", [x, held[name]], result or f"{name}_sums")

    def heads(x: str) -> str:
        return add("Reshape", [x, body.integers([1, HEADS, -1])])

    def kept(row: str, cache: str) -> str:
        """A cache [heads, places, depth] with this row at the step's place."""
        old = add("Transpose", [f"past_{cache}"], perm=[1, 0, 2])
        return body.node("Transpose", [add("ScatterND", [old, at, row])], f"present_{cache}", perm=[1, 0, 2])

    def attended(row: str, layer: int) -> str:
        query, key, value = (heads(dense(row, f"{layer}.{name}")) for name in ("query", "key", "value"))
        keys = add("Transpose", [kept(key, f"key_{layer}")], perm=[0, 2, 1])
        products = add("MatMul", [add("Transpose", [query], perm=[1, 0, 2]), keys])
        scores = add("Mul", [products, body.scalar((WIDTH // HEADS) ** -0.5, DType.FLOAT32)])
        shares = add("Softmax", [add("Add", [scores, mask])], axis=-1)
        found = add("Transpose", [add("MatMul", [shares, kept(value, f"value_{layer}")])], perm=[1, 0, 2])
        return add("Reshape", [found, body.integers([1, WIDTH])])

    def normal(x: str, name: str) -> str:
        return add("LayerNormalization", [x, held[name]], axis=-1, epsilon=EPSILON)

    for layer in range(LAYERS):
        x = add("Add", [x, dense(attended(normal(x, f"{layer}.norm1"), layer), f"{layer}.out")])
        up = add("Relu", [dense(normal(x, f"{layer}.norm2"), f"{layer}.up")])
        x = add("Add", [x, dense(up, f"{layer}.down")])
    dense(normal(x, "norm"), "head", "logits")
    cache, one = TensorType((HEADS, PLACES, WIDTH // HEADS), DType.FLOAT32), TensorType((1,), DType.INT64)
    ends = {"token": one, "position": one, **{f"past_{name}": cache for name in caches}}
    results = {"logits": TensorType((1, len(PIECES)), DType.FLOAT32), **{f"present_{name}": cache for name in caches}}
    read, given = ([value_info(*end) for end in some.items()] for some in (ends, results))
    graph = onnx.helper.make_graph(body.nodes, NAME, read, given, body.initializers)
    return onnx_model(graph, "dovetail.zoo", {})


def quantised() -> onnx.ModelProto:
    """The stored model in QDQ form, quantised with its calibration data for targets with scales per channel."""
    from dovetail.guests import ptq
    from dovetail.read import load_model
    from dovetail.target.registry import load_target

    content = stored()
    with TemporaryFolder() as folder:
        file, data = Path(folder) / f"{NAME}.onnx", Path(folder) / "data.npz"
        file.write_bytes(model(content.parameters).SerializeToString())
        write_outputs(data, [sequences(content.calibration)], batched=False)
        graph = ptq.prepare(load_model(file), NAME)
        samples = ptq.read_samples(data, graph, ptq.Preprocessing())
    return ptq.quantise_network(graph, samples, load_target("riscv"), ptq.Settings()).model
