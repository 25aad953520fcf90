"""Damaged and hostile model files: each is read or refused with a DovetailError, in bounded time and memory."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail.errors import DovetailError, ModelError
from dovetail.read import load_model

MODELS = Path(__file__).resolve().parents[2] / "shared" / "models"
pytestmark = pytest.mark.skipif(not MODELS.is_dir(), reason="the shared models are not here")

SOURCES = {
    "tflite": ("mlperf_tiny/kws_dscnn_int8.tflite", 400),
    "tflite dense": ("mlperf_tiny/ad_autoencoder_int8.tflite", 100),
    "onnx": ("derived/kws_dscnn_qdq_s8s8_perchannel.onnx", 300),
    "onnx integer": ("derived/mnist8_qop_u8s8.onnx", 200),
}
"""Model and number of mutations."""

SECONDS = 2.0
"""Longest time one file may take."""


def mutations(data: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Truncations, flipped bits, overwritten and repeated words; more of them at both ends, where the structure is."""
    source = random.Random(seed)
    for index in range(count):
        spoilt = bytearray(data)
        kind = index % 5
        if kind == 0:
            yield bytes(spoilt[: source.randrange(len(data))])
            continue
        for _ in range(source.choice((1, 1, 3, 20))):
            edge = source.choice((0, 0, len(data) - 12_000, source.randrange(len(data))))
            place = min(max(edge + source.randrange(12_000), 8), len(data) - 5)
            if kind == 1:
                spoilt[place] ^= 1 << source.randrange(8)
            elif kind == 2:
                spoilt[place] = source.choice((0, 1, 0x7F, 0x80, 0xFF))
            elif kind == 3:
                word = source.choice((0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, source.getrandbits(32)))
                spoilt[place : place + 4] = word.to_bytes(4, "little")
            else:
                other = source.randrange(len(data) - 64)
                spoilt[place : place + 4] = data[other : other + 4]
        yield bytes(spoilt)


@pytest.mark.parametrize("source", SOURCES)
def test_mutated_models_import_or_are_refused(source: str, tmp_path: Path) -> None:
    name, count = SOURCES[source]
    data = (MODELS / name).read_bytes()
    path = tmp_path / Path(name).name
    refused = 0
    for number, spoilt in enumerate(mutations(data, count, seed=len(source))):
        path.write_bytes(spoilt)
        start = time.process_time()
        try:
            load_model(path)
        except DovetailError as error:
            refused += 1
            assert path.name in str(error), f"mutation {number} does not name the file: {error}"
        assert time.process_time() - start < SECONDS, f"mutation {number} took too long"
    # Truncation alone must be noticed; a flipped weight bit must not.
    assert count // 5 <= refused < count


@pytest.mark.parametrize("name", [entry for entry, _ in SOURCES.values()])
def test_every_prefix_length_near_the_start_is_refused(name: str, tmp_path: Path) -> None:
    data = (MODELS / name).read_bytes()
    path = tmp_path / Path(name).name
    for length in (1, 3, 4, 7, 8, 9, 12, 16, 40, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(DovetailError):
            load_model(path)


def test_claimed_sizes_allocate_nothing(tmp_path: Path) -> None:
    """A file that claims a terabyte is refused without asking for it."""
    onnx = pytest.importorskip("onnx")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    huge = onnx.TensorProto(name="w", data_type=kind, dims=[1 << 20, 1 << 20])
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "g", [value("x", kind, [1, 4])], [value("y", kind, [1, 4])], [huge])
    folded = helper.make_graph(
        [
            helper.make_node("Constant", [], ["s"], value_ints=[1 << 20, 1 << 20]),
            helper.make_node("ConstantOfShape", ["s"], ["w"]),
            *nodes,
        ],
        "g",
        [value("x", kind, [1, 4])],
        [value("y", kind, [1, 4])],
    )
    path = tmp_path / "huge.onnx"
    for candidate, message in ((graph, "limit is 2147483648 elements"), (folded, "more than 67108864 elements")):
        path.write_bytes(
            helper.make_model(candidate, ir_version=8, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString()
        )
        tracemalloc.start()
        with pytest.raises(ModelError, match=message):
            load_model(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 64 * 2**20


def test_functions_that_grow_without_end_are_refused(tmp_path: Path) -> None:
    """Thirty functions that call the next one twice would be a thousand million operators."""
    onnx = pytest.importorskip("onnx")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]

    def body(index: int, target: str) -> object:
        nodes = [
            helper.make_node(target, ["a"], ["b"], domain="f" if target != "Relu" else ""),
            helper.make_node(target, ["b"], ["c"], domain="f" if target != "Relu" else ""),
        ]
        return helper.make_function("f", f"F{index}", ["a"], ["c"], nodes, opsets)

    value = helper.make_tensor_value_info
    ends = [value("x", kind, [1])], [value("y", kind, [1])]
    graph = helper.make_graph([helper.make_node("F0", ["x"], ["y"], domain="f")], "g", *ends)
    path = tmp_path / "bomb.onnx"
    chains = {
        "expand to": [body(i, f"F{i + 1}" if i < 29 else "Relu") for i in range(30)],
        "calls itself": [body(0, "F1"), body(1, "F0")],
    }
    for message, functions in chains.items():
        model = helper.make_model(graph, functions=functions, opset_imports=opsets, ir_version=8)
        path.write_bytes(model.SerializeToString())
        with pytest.raises(ModelError, match=message):
            load_model(path)
