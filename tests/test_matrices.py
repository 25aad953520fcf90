"""Dense layers of many rows, products of computed matrices and dilated layers on NE16: exact, on the engine, in
firmware without floats. How bits lie is what the engine's packer says, which hardware vectors prove."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from dovetail.codegen.build.elf import code_ranges, load_image, symbols
from dovetail.codegen.emit.project import write_project
from dovetail.codegen.manifest import MANIFEST
from dovetail.compile import Compiled, Options, compile_graph, compile_model
from dovetail.errors import DovetailError
from dovetail.guests.ptq import Samples, Settings, prepare, quantise_network
from dovetail.guests.ptq.accuracy import compare_with_runtime
from dovetail.ir.graph import Graph, GraphBuilder, evaluate
from dovetail.ir.operators.arithmetic import Clip, Requantize, Rounding
from dovetail.ir.operators.bits import BitProduct, ToBitPlanes
from dovetail.ir.operators.linear import Conv2d, Convolution, DepthwiseConv2d, FullyConnected, MatrixProduct
from dovetail.ir.operators.movement import Pad
from dovetail.ir.rewrite import simplify
from dovetail.ir.types import Array, DType, TensorType
from dovetail.legalize import dense_as_convolution, products_of_bits, without_dilation
from dovetail.quantize import quantize
from dovetail.read import load_model
from dovetail.run import ProjectBuild, open_build, run_build
from dovetail.targets import load_target
from dovetail.targets.ne16.packing import pack_weights

FIELD = Path(__file__).resolve().parents[2] / "shared" / "models" / "field" / "made"
TOKENS, WIDTH, HEADS, HIDDEN = 12, 32, 2, 48
NE16 = load_target("ne16")


def inputs_of(graph: Graph, seed: int) -> dict[str, Array]:
    """Elements over the whole of each input's type."""
    rng, kinds = np.random.default_rng(seed), {name: graph.types[name] for name in graph.inputs}
    return {
        name: rng.integers(kind.dtype.low, kind.dtype.high, kind.shape, endpoint=True).astype(kind.dtype.numpy)
        for name, kind in kinds.items()
    }


def requantised(builder: GraphBuilder, total: str, dtype: DType) -> str:
    """The sums as 8-bit results."""
    rounding = Rounding.WIDE if builder.type_of(total).dtype is DType.INT64 else Rounding.SINGLE
    parameters = [builder.constant(f"{total}_{i}", np.array([n], np.int32)) for i, n in enumerate((1 << 30, -9))]
    scaled = builder.add(Requantize(rounding, 0, 100), [total, *parameters], f"{total}_scaled")
    return builder.add(Clip(dtype.low, dtype.high, dtype), [scaled], f"{total}_result")


def product(left: TensorType, right: TensorType, zero_points: tuple[int, int]) -> Graph:
    """Two matrices multiplied."""
    builder = GraphBuilder("net")
    names = [builder.input("a", left), builder.input("b", right)]
    total = builder.add(MatrixProduct(*zero_points), names, "product")
    return builder.finish([requantised(builder, total, DType.UINT8)])


@given(st.data())
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_bits_lie_as_the_packer_says(data: st.DataObject) -> None:
    rows, depth = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 70))
    stored = np.random.default_rng(rows * 100 + depth).integers(0, 256, (rows, depth)).astype(np.uint8)
    packed = pack_weights((stored.astype(np.int16) - 128).reshape(rows, 1, 1, depth), 8, False)
    planes = ToBitPlanes(16).evaluate([stored])
    # What is missing in the last group is 0 here as there.
    np.testing.assert_array_equal(planes.reshape(-1), packed)
    x = np.random.default_rng(depth).integers(0, 256, (4, depth)).astype(np.uint8)
    wanted = x.astype(np.int64) @ (stored.astype(np.int64) - 77).T
    np.testing.assert_array_equal(BitProduct(77).evaluate([x, planes]), wanted)


@given(st.data())
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_products_of_bits_are_exact(data: st.DataObject) -> None:
    rows, depth, columns = (data.draw(st.integers(1, 20)) for _ in range(3))
    leads = data.draw(st.sampled_from([((), ()), ((1, 2), (1, 2)), ((2, 1), (1, 3)), ((3,), (1,))]))
    wide = data.draw(st.booleans())
    zeros = (0 if wide else data.draw(st.integers(0, 255)), data.draw(st.integers(0, 255)))
    left = TensorType((*leads[0], rows, depth), DType.INT16 if wide else DType.UINT8)
    graph = product(left, TensorType((*leads[1], depth, columns), DType.UINT8), zeros)
    after = products_of_bits(lambda types, node: True, 16)(graph)
    assert not any(isinstance(node.operator, MatrixProduct) for node in after.nodes)
    given_ = inputs_of(graph, rows)
    (name,) = graph.outputs
    np.testing.assert_array_equal(evaluate(after, given_)[name], evaluate(graph, given_)[name])


def test_dense_layers_of_rows_are_convolutions() -> None:
    """Exact; the reshape stands behind the requantisation, where engines look for it."""
    builder, rng = GraphBuilder("net"), np.random.default_rng(3)
    x = builder.input("x", TensorType((2, 7, 24), DType.UINT8))
    weights = builder.constant("w", rng.integers(-128, 128, (40, 24)).astype(np.int8))
    bias = builder.constant("b", rng.integers(-9999, 9999, 40).astype(np.int32))
    total = builder.add(FullyConnected(11), [x, weights, bias], "sums")
    graph = builder.finish([requantised(builder, total, DType.UINT8)])
    after = dense_as_convolution(lambda types, node: True)(graph)
    names = [type(node.operator).__name__ for node in after.nodes]
    assert names == ["Reshape", "Conv2d", "Requantize", "Clip", "Reshape"]
    assert isinstance(after.nodes[1].operator, Conv2d) and after.types[after.nodes[1].output].shape == (1, 14, 1, 40)
    given_ = inputs_of(graph, 1)
    (name,) = graph.outputs
    np.testing.assert_array_equal(evaluate(after, given_)[name], evaluate(graph, given_)[name])


def dilated(seed: int, height: int, width: int, dilation: tuple[int, int], kind: str, kernel: tuple[int, int]) -> Graph:
    """A padded dilated layer, requantised."""
    builder, rng = GraphBuilder("net"), np.random.default_rng(seed)
    x = builder.input("x", TensorType((1, height, width, 16), DType.INT8))
    more = tuple((size - 1) * step // 2 for size, step in zip(kernel, dilation, strict=True))
    padded = builder.add(Pad((0, *more, 0), (0, *more, 0), -5), [x], "padded")
    depthwise = kind == "depthwise"
    shape = (1, *kernel, 16) if depthwise else (24, *kernel, 16)
    weights = builder.constant("w", rng.integers(-127, 128, shape).astype(np.int8))
    operator = (DepthwiseConv2d if depthwise else Conv2d)((1, 1), dilation, -5)
    bias = builder.constant("b", rng.integers(-9999, 9999, 16 if depthwise else 24).astype(np.int32))
    total = builder.add(operator, [padded, weights, bias], "sums")
    return builder.finish([requantised(builder, total, DType.INT8)])


@given(st.data())
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_undilated_convolutions_are_exact(data: st.DataObject) -> None:
    dilation = (data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4)))
    kind = data.draw(st.sampled_from(["convolution", "depthwise"]))
    kernel = data.draw(st.sampled_from([(3, 3), (1, 3), (2, 5)]))
    height, width = data.draw(st.integers(9, 15)), data.draw(st.integers(17, 20))
    graph = dilated(height, height, width, dilation, kind, kernel)
    after = without_dilation(lambda types, node: True)(graph)
    layers = [node.operator for node in after.nodes if isinstance(node.operator, Convolution)]
    assert [layer.dilation for layer in layers] == [(1, 1)]
    given_ = inputs_of(graph, width)
    (name,) = graph.outputs
    np.testing.assert_array_equal(evaluate(after, given_)[name], evaluate(graph, given_)[name])


@pytest.mark.parametrize(("kind", "kernel"), [("convolution", (3, 3)), ("depthwise", (3, 3)), ("convolution", (1, 3))])
def test_the_engine_takes_dilated_layers(kind: str, kernel: tuple[int, int], tmp_path: Path) -> None:
    graph = dilated(3, 11, 14, (1, 3) if kernel[0] == 1 else (2, 3), kind, kernel)
    adapted = graph
    for rewrite in NE16.policy(None).rewrites:
        adapted = rewrite.apply(adapted)
    compiled = compile_graph(adapted, NE16, Options())
    assert all(region.engine is not None for region in compiled.regions if region.macs)
    given_ = inputs_of(graph, 8)
    result = run_build(built(compiled, tmp_path), "iss", [given_])
    (found,) = result.outputs
    print(f"{kind} {kernel}: {result.simulation.inferences[0].total_cycles:,} cycles")
    (name,) = graph.outputs
    np.testing.assert_array_equal(found[name], evaluate(adapted, given_)[name])
    steps = found[name].astype(int) - evaluate(graph, given_)[name]
    assert np.abs(steps).max() <= 2  # what the engine's own requantisation may move


def built(compiled: Compiled, folder: Path) -> ProjectBuild:
    """The project on disk."""
    write_project(compiled.project, folder / "build")
    return open_build(folder / "build", NE16)


@pytest.mark.parametrize(
    ("left", "rows", "depth", "columns"), [(DType.INT8, 20, 40, 70), (DType.INT8, 5, 21, 3), (DType.INT16, 9, 50, 33)]
)
def test_the_engine_multiplies_computed_matrices(
    left: DType, rows: int, depth: int, columns: int, tmp_path: Path
) -> None:
    """On the simulated chip, with zero points on both sides, and depths that fill no group of bits."""
    zeros = (0 if left is DType.INT16 else -9, 33)
    graph = product(TensorType((2, rows, depth), left), TensorType((2, depth, columns), DType.INT8), zeros)
    for policy in NE16.policies:
        adapted = graph
        for rewrite in policy.rewrites:
            adapted = rewrite.apply(adapted)
        compiled = compile_graph(adapted, NE16, Options())
        offloaded = [region.macs for region in compiled.regions if region.engine is not None]
        assert sum(offloaded) == 2 * rows * depth * columns * (2 if left is DType.INT16 else 1)
        given_ = inputs_of(graph, 5)
        (found,) = run_build(built(compiled, tmp_path / policy.name), "iss", [given_]).outputs
        (name,) = graph.outputs
        np.testing.assert_array_equal(found[name], evaluate(graph, given_)[name])


def block() -> bytes:
    """A transformer's block as PyTorch exports it: queries, keys and values in one layer, scaled on both sides."""
    rng = np.random.default_rng(1)
    constants: dict[str, Array] = {
        "qkv": rng.normal(0, 0.1, (WIDTH, 3 * WIDTH)).astype(np.float32),
        "qkv_bias": rng.normal(0, 0.1, 3 * WIDTH).astype(np.float32),
        "out": rng.normal(0, 0.1, (WIDTH, WIDTH)).astype(np.float32),
        "up": rng.normal(0, 0.1, (WIDTH, HIDDEN)).astype(np.float32),
        "up_bias": rng.normal(0, 0.1, HIDDEN).astype(np.float32),
        "down": rng.normal(0, 0.1, (HIDDEN, WIDTH)).astype(np.float32),
        "down_bias": rng.normal(0, 0.1, WIDTH).astype(np.float32),
        "gain": rng.normal(1, 0.1, WIDTH).astype(np.float32),
        "shift": rng.normal(0, 0.1, WIDTH).astype(np.float32),
        "root": np.array((HEADS / WIDTH) ** 0.25, np.float32),
        "parts": np.array([1, TOKENS, 3, HEADS, WIDTH // HEADS], np.int64),
        "whole": np.array([1, TOKENS, WIDTH], np.int64),
        **{f"at_{at}": np.array(at, np.int64) for at in range(3)},
    }
    node = helper.make_node
    nodes = [
        node("LayerNormalization", ["x", "gain", "shift"], ["n1"]),
        node("MatMul", ["n1", "qkv"], ["p0"]),
        node("Add", ["p0", "qkv_bias"], ["p1"]),
        node("Reshape", ["p1", "parts"], ["p2"]),
        node("Transpose", ["p2"], ["p3"], perm=[2, 0, 3, 1, 4]),
        *(node("Gather", ["p3", f"at_{at}"], [name], axis=0) for at, name in enumerate(("q", "k", "v"))),
        node("Mul", ["q", "root"], ["q1"]),
        node("Mul", ["k", "root"], ["k1"]),
        node("Transpose", ["k1"], ["k2"], perm=[0, 1, 3, 2]),
        node("MatMul", ["q1", "k2"], ["scores"]),
        node("Softmax", ["scores"], ["shares"]),
        node("MatMul", ["shares", "v"], ["mixed"]),
        node("Transpose", ["mixed"], ["m1"], perm=[0, 2, 1, 3]),
        node("Reshape", ["m1", "whole"], ["m2"]),
        node("MatMul", ["m2", "out"], ["m3"]),
        node("Add", ["x", "m3"], ["stream"]),
        node("LayerNormalization", ["stream", "gain", "shift"], ["n2"]),
        node("MatMul", ["n2", "up"], ["u0"]),
        node("Add", ["u0", "up_bias"], ["u1"]),
        node("Gelu", ["u1"], ["u2"]),
        node("MatMul", ["u2", "down"], ["d0"]),
        node("Add", ["d0", "down_bias"], ["d1"]),
        node("Add", ["stream", "d1"], ["y"]),
    ]
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, TOKENS, WIDTH])] for name in ("x", "y")]
    held = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "block", *ends, held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    return bytes(model.SerializeToString())


def quantised(folder: Path, integer_ends: bool) -> tuple[Path, Graph]:
    """A transformer block, quantised for NE16, and the float network."""
    (folder / "block.onnx").write_bytes(block())
    graph = prepare(load_model(folder / "block.onnx"), "block.onnx")
    data = np.random.default_rng(2).normal(size=(64, 1, TOKENS, WIDTH)).astype(np.float32)
    made = quantise_network(graph, Samples({"x": data}, None), NE16, Settings(integer_ends=integer_ends))
    path = folder / "quantised.onnx"
    path.write_bytes(made.model.SerializeToString())
    return path, graph


FLOATING = {0x07, 0x27, 0x43, 0x47, 0x4B, 0x4F, 0x53}
"""Major opcodes of RISC-V's floating-point loads, stores and arithmetic."""


def floating_instructions(elf: Path) -> int:
    """How many instructions of RISC-V firmware are floating-point ones."""
    _, loaded = load_image(elf)
    found = 0
    for start, size in code_ranges(elf):
        code = next(data[start - at :][:size] for at, data in loaded if at <= start < at + len(data))
        place = 0
        while place + 2 <= len(code):
            word = int.from_bytes(code[place : place + 4], "little")
            if word & 3 == 3:
                found += word & 0x7F in FLOATING
                place += 4
            else:  # of the short ones, quadrants 0 and 2: C.FLW, C.FLD, C.FSW, C.FSD and those of the stack
                found += word & 3 != 1 and word >> 13 & 7 in (1, 3, 5, 7)
                place += 2
    return found


def test_transformer_block_on_ne16(tmp_path: Path) -> None:
    """At least 95 % of the multiply-accumulates on the engine, no float in the firmware, the graph's results."""
    path, _ = quantised(tmp_path, integer_ends=True)
    compiled = compile_model(path, NE16, Options())
    macs = sum(region.macs for region in compiled.regions)
    offloaded = sum(region.macs for region in compiled.regions if region.engine is not None)
    assert offloaded >= 0.95 * macs > 0
    assert not json.loads(compiled.project.files[MANIFEST])["uses_float"]
    build = built(compiled, tmp_path)
    given_ = inputs_of(compiled.graph, 4)
    result = run_build(build, "iss", [given_], tmp_path / "cache")
    (found,) = result.outputs
    cycles = result.simulation.inferences[0].total_cycles
    print(f"{cycles:,} cycles, {100 * offloaded / macs:.1f} % of {macs:,} on the engine")
    np.testing.assert_array_equal(found["y"], evaluate(compiled.graph, given_)["y"])
    elves = sorted((tmp_path / "cache").rglob("*.elf"))
    assert elves
    for elf in elves:
        assert floating_instructions(elf) == 0
        assert not [name for name in symbols(elf) if re.fullmatch(r"__\w*[sd]f\w*", name)]


def test_floats_are_found_in_firmware(tmp_path: Path) -> None:
    """The same test of the same network with float ends fails."""
    path, _ = quantised(tmp_path, integer_ends=False)
    compiled = compile_model(path, NE16, Options())
    build = built(compiled, tmp_path)
    given_ = {"x": np.zeros((1, TOKENS, WIDTH), np.float32)}
    run_build(build, "iss", [given_], tmp_path / "cache")
    (elf,) = sorted((tmp_path / "cache").rglob("*.elf"))
    assert [name for name in symbols(elf) if re.fullmatch(r"__\w*[sd]f\w*", name)]


def test_transformer_block_keeps_its_accuracy(tmp_path: Path) -> None:
    """Within 1 % of the float network on data it was not calibrated with; 8 bits alone would lose twice that."""
    path, graph = quantised(tmp_path, integer_ends=False)
    compiled = compile_model(path, load_target("riscv"), Options())
    data = np.random.default_rng(9).normal(size=(8, 1, TOKENS, WIDTH)).astype(np.float32)
    wanted = np.stack([evaluate(graph, {"x": one})["y"] for one in data])
    found = np.stack([evaluate(compiled.graph, {"x": one})["y"] for one in data])
    error = float(np.sqrt(((found - wanted) ** 2).mean() / (wanted**2).mean()))
    print(f"{error:.4%}")
    assert error < 0.01


def test_comparison_with_onnx_runtime(tmp_path: Path) -> None:
    """Its static quantiser loses more than twice as much; what is no ONNX file, or has integer ends, is refused."""
    path, _ = quantised(tmp_path, integer_ends=False)
    rng = np.random.default_rng(9)
    calibration, measured = (
        Samples({"x": rng.normal(size=(count, 1, TOKENS, WIDTH)).astype(np.float32)}, None) for count in (32, 8)
    )
    columns, failures = compare_with_runtime(
        tmp_path / "block.onnx", path.read_bytes(), calibration, measured, False, lambda text: None
    )
    ratio = {one.name: one.sqnr for one in columns}
    print(ratio)
    assert not failures and len(ratio) == 4
    assert ratio["Dovetail"] > ratio["ONNX Runtime, static"] + 6
    assert ratio["Dovetail"] > ratio["ONNX Runtime, static, per channel"] + 6
    with pytest.raises(DovetailError, match="ONNX Runtime's quantisers take ONNX files"):
        compare_with_runtime(tmp_path / "net.keras", b"", calibration, measured, False, lambda text: None)


@pytest.mark.skipif(not FIELD.is_dir(), reason="the shared models are not here")
@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("transformer_f32.onnx", 0.01),
        ("transformer_dynamo_f32.onnx", 0.01),
        ("lstm2.onnx", 0.01),
        ("lstm2_torch.onnx", 0.01),
        ("gru2_bidi_torch.onnx", 0.01),
        ("gru2.onnx", 0.012),
    ],
)
def test_field_models_keep_their_accuracy(name: str, most: float) -> None:
    """Of what the float network computed on the samples beside it, root mean square."""
    graph = prepare(load_model(FIELD / name), name)
    with np.load(FIELD / f"{name}.ref.npz") as stored:
        given_, wanted = stored["in_0"], stored["out_0__ort_precise"]
    (source,), shape = graph.inputs, graph.types[graph.inputs[0]].shape
    data = np.random.default_rng(0).normal(0, given_.std(), (128, *shape)).astype(np.float32)
    made = quantise_network(graph, Samples({source: data}, None), load_target("riscv"), Settings())
    integer = quantize(simplify(made.graph), Rounding.SINGLE)
    found = [evaluate(integer, {source: one.reshape(shape)})[integer.outputs[0]] for one in given_]
    error = np.sqrt(((np.stack(found).reshape(wanted.shape) - wanted) ** 2).mean() / (wanted**2).mean())
    print(f"{name}: {error:.3%}")
    assert error < most
