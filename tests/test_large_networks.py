"""Networks with many weights: large tensors stay outside of protobuf's messages, and memory is a few times theirs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from dovetail.compile import Options, prepare
from dovetail.ir.graph import GraphBuilder, Node
from dovetail.ir.onnx_file import graph_bytes, load_graph, save_graph, to_model
from dovetail.ir.onnx_wire import without_large
from dovetail.ir.operators.linear import FullyConnected
from dovetail.ir.types import DType, TensorType, blocks
from dovetail.schedule.partition import _Partition, partition
from dovetail.targets import load_target
from networks import Net

KINDS = [np.float32, np.int8, np.uint8, np.int16, np.int32, np.int64, np.float64, np.float16]
TENSORS = st.tuples(st.sampled_from(KINDS), st.sampled_from([1, 3, 1 << 14, 1 << 16, (1 << 16) + 1]))


def model_of(tensors: list[tuple[type, int]], seed: int = 0) -> onnx.ModelProto:
    """A model that has so many elements of these types; nothing uses them."""
    random = np.random.default_rng(seed)
    held = [
        numpy_helper.from_array(random.integers(0, 100, (1, count)).astype(kind), f"w{place}")
        for place, (kind, count) in enumerate(tensors)
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (1,)) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "net", ends[:1], ends[1:], held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def restored(slim: bytes, large: dict[str, np.ndarray]) -> onnx.ModelProto:  # type: ignore[type-arg]
    """The message as protobuf has it, large contents put back by onnx."""
    model = onnx.ModelProto.FromString(slim)
    for tensor in model.graph.initializer:
        if tensor.name in large and list(tensor.dims) == [0]:
            tensor.CopyFrom(numpy_helper.from_array(large[tensor.name], tensor.name))
    return model


@settings(max_examples=30, deadline=None)
@given(st.lists(TENSORS, max_size=4))
def test_nothing_is_lost(tensors: list[tuple[type, int]]) -> None:
    model = model_of(tensors)
    data = model.SerializeToString()
    slim, large = without_large(data)
    plain = [f"w{n}" for n, (kind, count) in enumerate(tensors) if np.dtype(kind).itemsize * count >= 1 << 16]
    assert set(large) == {name for name in plain if tensors[int(name[1:])][0] is not np.float16}
    assert len(slim) <= len(data) - sum(array.nbytes for array in large.values())
    assert restored(slim, large) == model


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_messages_are_protobufs_to_refuse(data: st.DataObject) -> None:
    """What protobuf reads, it reads the same without the large tensors; what it refuses is not accepted."""
    whole = bytearray(model_of([(np.int8, 1 << 16), (np.float32, 3)]).SerializeToString())
    edges = st.one_of(st.integers(0, 80), st.integers(len(whole) - 160, len(whole) - 1))
    for place in data.draw(st.lists(edges, max_size=3)):
        whole[place] = data.draw(st.integers(0, 255))
    damaged = bytes(whole[: data.draw(st.one_of(st.just(len(whole)), edges))])
    slim, large = without_large(damaged)
    try:
        expected = onnx.ModelProto.FromString(damaged)
    except DecodeError:
        with pytest.raises(DecodeError):
            onnx.ModelProto.FromString(slim)
        return
    assert restored(slim, large) == expected


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_given_back(data: bytes) -> None:
    assert without_large(data) == (data, {})


def test_saved_graphs_are_the_bytes_of_protobuf(tmp_path: Path) -> None:
    builder = GraphBuilder("dense")
    weights = np.random.default_rng(0).integers(-127, 128, (300, 400), np.int8)
    x = builder.input("x", TensorType((1, 400), DType.INT8))
    graph = builder.finish([builder.add(FullyConnected(), [x, builder.constant("w", weights)])])
    assert graph_bytes(graph) == to_model(graph).SerializeToString(deterministic=True)
    save_graph(graph, tmp_path / "dense.onnx")
    assert (tmp_path / "dense.onnx").read_bytes() == graph_bytes(graph)
    assert np.array_equal(load_graph(tmp_path / "dense.onnx").constants["w"], weights)


@pytest.mark.parametrize("shape", [(1,), (7, 3), (1 << 19, 1), (3, 1 << 19), (700, 1000)])
def test_blocks_are_the_whole(shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    assert np.array_equal(np.concatenate([array[part] for part in blocks(array)]), array)


def dense(path: Path, sizes: list[int], external: bool = False) -> int:
    """Write dense layers one behind the other, in QDQ form; the bytes of their weights."""
    random, held, nodes, nbytes = np.random.default_rng(0), [], [], 0
    for name, value in (("step", np.float32(0.06)), ("by", np.float32(0.001)), ("zero", np.int8(0))):
        held.append(numpy_helper.from_array(np.asarray(value), name))
    last = "x"
    for place, (inputs, outputs) in enumerate(pairwise(sizes)):
        weights = random.integers(-127, 128, (outputs, inputs), np.int8)
        held.append(numpy_helper.from_array(weights, f"w{place}"))
        nbytes += weights.nbytes
        nodes += [
            helper.make_node("QuantizeLinear", [last, "step", "zero"], [f"q{place}"]),
            helper.make_node("DequantizeLinear", [f"q{place}", "step", "zero"], [f"d{place}"]),
            helper.make_node("DequantizeLinear", [f"w{place}", "by", "zero"], [f"f{place}"]),
            helper.make_node("Gemm", [f"d{place}", f"f{place}"], [f"y{place}"], transB=1),
        ]
        last = f"y{place}"
    nodes.append(helper.make_node("QuantizeLinear", [last, "step", "zero"], ["q"]))
    nodes.append(helper.make_node("DequantizeLinear", ["q", "step", "zero"], ["y"]))
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, (1, size))
        for name, size in (("x", sizes[0]), ("y", sizes[-1]))
    ]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, path, save_as_external_data=external, location=f"{path.stem}.data")
    return nbytes


def test_external_data_is_the_same_network(tmp_path: Path) -> None:
    dense(tmp_path / "inside.onnx", [300, 400, 10])
    dense(tmp_path / "outside.onnx", [300, 400, 10], external=True)
    target, options = load_target("riscv"), Options(name="net")
    inside, outside = (prepare(tmp_path / f"{name}.onnx", target, options) for name in ("inside", "outside"))
    assert graph_bytes(inside) == graph_bytes(outside)


def test_the_reason_of_a_layer_is_looked_for_near_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in all layers before it, of which a chain of thousands has many."""
    steps, kinds_above = 0, _Partition._kinds_above

    def counted(draft: _Partition, node: Node) -> Iterator[str]:
        nonlocal steps
        for kind in kinds_above(draft, node):
            steps += 1
            yield kind

    monkeypatch.setattr(_Partition, "_kinds_above", counted)
    net = Net("chain", (4, 4, 8), zero_point=5)
    value = net.x
    for place in range(100):
        value = net.convolution(value, 8, 1, f"layer_{place}")
    graph = net.finish(value)
    regions = partition(graph, load_target("diana"))
    assert len(regions) >= 100 and not any(region.shares for region in regions)
    assert 100 <= steps <= 2 * len(graph.nodes)


MEASURED = """
import sys
from itertools import pairwise
from dovetail.cli.main import main
try:
    main()
except SystemExit as end:
    assert not end.code
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system does not say what memory was needed")
def test_memory_is_a_few_times_the_weights(tmp_path: Path) -> None:
    """More than that of a small network: the model, its packed weights, and a layer in float at a time."""
    peaks, nbytes = [], 0
    for name, sizes in (("small", [20, 30]), ("large", [2000] * 6)):
        nbytes = dense(tmp_path / f"{name}.onnx", sizes)
        words = ["compile", tmp_path / f"{name}.onnx", "--target", "riscv", "--set", "flash.size=64M"]
        command = [sys.executable, "-c", MEASURED, *map(str, words), "-o", str(tmp_path / name)]
        said = subprocess.run(command, check=True, capture_output=True, text=True)
        peaks.append(int(said.stdout.split()[-1]) * 1024)
    assert peaks[1] - peaks[0] < 2.6 * nbytes
