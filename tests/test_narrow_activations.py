"""Activations of 4 and 2 bits on a port of an engine like RBE and on a core that packs them: models to firmware."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import dovetail.target as dt
from conftest import shared_dir
from dovetail import legalize
from dovetail.arrays import built
from dovetail.compile import Compiled, Options, compile_graph, compile_model, sample_inputs
from dovetail.compile import prepare as prepare_integers
from dovetail.errors import DovetailError, ProgramError
from dovetail.guests.ptq import Samples, Settings, named_activations, prepare, quantise_network
from dovetail.ir.graph import Graph, GraphBuilder, evaluate
from dovetail.ir.operators.arithmetic import Clip, Lookup, Offset, ScaleShift
from dovetail.ir.operators.linear import Conv2d
from dovetail.ir.operators.movement import Concat, Pad, Relayout, Slice
from dovetail.ir.operators.reduction import MaxPool2d
from dovetail.ir.types import Array, DType, TensorType
from dovetail.program.ir import Call, Copy, LaunchStatement, Role
from dovetail.program.verify import verify
from dovetail.prove import prove
from dovetail.read import load_model
from dovetail.run import run_build
from dovetail.schedule.layout.choose import choose
from dovetail.schedule.partition import partition
from dovetail.targets import load_target
from firmware import require_chip

PORT = Path(__file__).parent / "rbe_port" / "rbe.py"
NARROW = dt.Rewrite("narrow activations", legalize.narrow_activations(), lsb=0)


@cache
def rbe(l1: int = 128 << 10) -> dt.Target:
    """The port, perhaps with another L1."""
    target = load_target(str(PORT))
    return replace(target, memories=tuple(replace(m, size=l1) if m.name == "L1" else m for m in target.memories))


@cache
def packing_core() -> dt.Target:
    """A core alone that packs what it can."""
    plain = load_target("riscv")
    return replace(plain, core=replace(plain.core, packs=True), policies=(dt.Policy("narrow", "as exact", (NARROW,)),))


@pytest.fixture(scope="module")
def resnet8(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """ResNet8 of MLPerf Tiny quantised for the port: "8", "4", or "mixed" 4 and 2 bits; weights of 8, 4 and 4 bits."""
    path = shared_dir() / "models" / "mlperf_tiny" / "ic_resnet8_f32.tflite"
    folder = tmp_path_factory.mktemp("resnet8")
    graph = prepare(load_model(path), path.name)
    data = np.random.default_rng(0).random((4, *graph.types[graph.inputs[0]].shape), np.float32) * 255

    @cache
    def made(how: str) -> Path:
        bits = 8 if how == "8" else 4
        named = named_activations(graph, ["*conv2d_[2457]*=int2"] if how == "mixed" else [])
        settings = Settings(bits=bits, activation_bits=bits, activation_widths=named, integer_ends=True)
        found = quantise_network(graph, Samples({graph.inputs[0]: data}, None), rbe(), settings)
        result = folder / f"{how}.onnx"
        result.write_bytes(found.model.SerializeToString(deterministic=True))
        return result

    return made


def proven(compiled: Compiled, target: dt.Target, simulator: str, inputs: list[dict[str, Array]]) -> None:
    """Run the firmware and compare it with the integer graph."""
    if simulator == "iss":
        require_chip()
    with built(compiled, target) as build:
        prove(run_build(build, simulator, inputs), compiled.graph, inputs)


def peaks(compiled: Compiled) -> dict[str, int]:
    """Bytes of each memory."""
    return {placement.memory: placement.peak for placement in compiled.plan.placements}


def layouts_of(compiled: Compiled) -> set[str]:
    """The layouts values have in a network."""
    return {str(layout) for region in compiled.regions for layout in region.layouts.values()}


@pytest.mark.parametrize("simulator", ["iss", "host"])
@pytest.mark.parametrize("how", ["8", "4", "mixed"])
def test_resnet8_is_exact(how: str, simulator: str, resnet8: Callable[[str], Path]) -> None:
    compiled = compile_model(resnet8(how), rbe(), Options())
    proven(compiled, rbe(), simulator, [sample_inputs(compiled.graph, seed) for seed in range(2)])
    on_core = [region.name.rpartition("_")[0] for region in compiled.regions if region.engine is None]
    assert sorted(on_core) == ["add", "add", "add", "average_pool", "reshape", "softmax"]
    expected = {
        "8": set(),
        "4": {"N H W/2 C [2w]", "N H W C/2 [2c]", "N C/2 [2c]"},
        "mixed": {"N H W/2 C [2w]", "N H W C/2 [2c]", "N H W C/4 [4c]", "N C/2 [2c]"},
    }
    assert layouts_of(compiled) == expected[how]
    assert not any(isinstance(region.graph.nodes[0].operator, Relayout) for region in compiled.regions)
    (header,) = (str(text) for name, text in compiled.project.files.items() if name == f"src/{compiled.unit.model}.h")
    assert ("several in a byte" in header and "[2w]" in header) == (how != "8")


def test_4_bits_take_half_the_memory(resnet8: Callable[[str], Path]) -> None:
    wide, narrow = (peaks(compile_model(resnet8(how), rbe(), Options())) for how in ("8", "4"))
    for memory in ("L1", "L2"):
        assert narrow[memory] <= 0.55 * wide[memory], f"{memory}: {narrow[memory]} of {wide[memory]}"


@pytest.mark.parametrize("how", ["4", "mixed"])
def test_tiles_are_copied_packed(how: str, resnet8: Callable[[str], Path]) -> None:
    """An L1 of 11 KiB holds no whole layer: tiles of packed values come and go, of half the bytes."""
    target = rbe(11 << 10)
    compiled = compile_model(resnet8(how), target, Options())
    buffers = compiled.plan.program.buffers
    tiles = [s for s in compiled.plan.program.statements if isinstance(s, Copy) and s.source.layout is not None]
    assert sum(buffers[copy.destination.buffer].role is Role.TILE for copy in tiles) >= 10
    assert all(copy.source.layout.packed for copy in tiles if copy.source.layout)
    proven(compiled, target, "host", [sample_inputs(compiled.graph, 3)])
    proven(compiled, target, "iss", [sample_inputs(compiled.graph, 3)])


def test_stages_equal_in_onnx_runtime(resnet8: Callable[[str], Path]) -> None:
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is the oracle here (dovetail[check])")
    compile_model(resnet8("mixed"), rbe(), Options(check=True))


@pytest.fixture(scope="module")
def tfc(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """TFC_2W2A of the QONNX model zoo with its domain declared, and its reference."""
    source = shared_dir() / "models" / "field" / "TFC_2W2A.onnx"
    model = onnx.load(source)
    if "onnx.brevitas" not in {entry.domain for entry in model.opset_import}:
        model.opset_import.append(onnx.helper.make_opsetid("onnx.brevitas", 1))
    path = tmp_path_factory.mktemp("tfc") / "tfc.onnx"
    onnx.save(model, path)
    return path, np.load(source.with_name("TFC_2W2A.onnx.ref.npz"))


@pytest.mark.parametrize("simulator", ["iss", "host"])
@pytest.mark.parametrize("on", ["rbe", "core"])
def test_tfc_2w2a_runs_packed(on: str, simulator: str, tfc: tuple[Path, Any]) -> None:
    """Every layer between two quantisations reads and gives four activations to a byte; the answers are QONNX's."""
    path, reference = tfc
    target = rbe() if on == "rbe" else packing_core()
    compiled = compile_model(path, target, Options(allow_float=True))
    narrow = [
        (kind, region.layouts.get(name))
        for region in compiled.regions
        for name in (*region.graph.inputs, region.output)
        if (kind := region.graph.types[name]).dtype.bits < 8
    ]
    assert len(narrow) >= 6 and {kind.dtype for kind, _ in narrow} == {DType.INT2}
    assert {str(layout) for _, layout in narrow} == {"N C/4 [4c]"}
    assert sum(region.engine is not None for region in compiled.regions) == (3 if on == "rbe" else 0)
    (given,), (result,) = compiled.graph.inputs, compiled.graph.outputs
    inputs = [{given: sample} for sample in reference["in_0"]]
    proven(compiled, target, simulator, inputs)
    pairs = zip(inputs, reference["out_0__qonnx"], strict=True)
    assert all(np.abs(evaluate(compiled.graph, sample)[result] - wanted).max() < 1e-5 for sample, wanted in pairs)


def test_biases_in_fractions_of_a_sum(tfc: tuple[Path, Any]) -> None:
    """With the bias behind the scale the integer graph has the answers of QONNX, on a target that packs nothing too."""
    path, reference = tfc
    graph = prepare_integers(path, load_target("riscv"), Options(allow_float=True))
    assert sum(isinstance(node.operator, ScaleShift) for node in graph.nodes) == 3
    for sample, wanted in zip(reference["in_0"], reference["out_0__qonnx"], strict=True):
        found = evaluate(graph, {graph.inputs[0]: sample})[graph.outputs[0]]
        assert np.abs(found - wanted).max() < 1e-5


# What goes wrong is found.


FAULTS = {
    "first element in the highest bits": ("else held, bits, signed)", "else held >> 4 | held << 4, bits, signed)"),
    "results in the wrong order": ("split << (bits * np.arange", "split << (8 - bits - bits * np.arange"),
    "columns taken for channels": ("paired = what & 15, bool(what & PAIRED)", "paired = what & 15, False"),
    "widths of 4 bits taken for 2": ("bits, paired = what & 15", "bits, paired = min(what & 15, 2) or 8"),
    "limits of 4 bits left out": (">> shift, low, high)", ">> shift, low, 127)"),
    "weights without a sign": ('job["weight_bits"], True)', 'job["weight_bits"], False)'),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_engine_are_found(fault: str, resnet8: Callable[[str], Path], tmp_path: Path) -> None:
    require_chip()
    old, new = FAULTS[fault]
    text = PORT.read_text()
    assert old in text
    wrong = tmp_path / "rbe.py"
    wrong.write_text(text.replace(old, new))
    for name in ("rbe.c", "rbe.h"):
        (tmp_path / name).write_text(PORT.with_name(name).read_text())
    target = load_target(str(wrong))
    compiled = compile_model(resnet8("4"), target, Options())
    with pytest.raises(DovetailError):
        proven(compiled, target, "iss", [sample_inputs(compiled.graph, seed) for seed in range(3)])


def with_layouts(layouts: dict[str, dt.Layout]) -> dt.Target:
    """The port with layouts that do not ask for widths."""
    target = rbe()
    (engine,) = target.engines
    offloads = tuple(replace(offload, layouts=layouts) for offload in engine.offloads)
    return replace(target, engines=(replace(engine, offloads=offloads),))


def test_a_layout_of_another_width_is_refused(resnet8: Callable[[str], Path]) -> None:
    target = with_layouts({"x": dt.packed(None, 4, 2), "result": dt.packed(None, 4, 2)})
    with pytest.raises(DovetailError, match="whose bytes uint4 cannot fill"):
        compile_model(resnet8("4"), target, Options())


def test_the_verifier_knows_the_bytes(resnet8: Callable[[str], Path]) -> None:
    """A value that lies otherwise than who reads it takes it, or in bytes it cannot fill, is refused."""
    program = compile_model(resnet8("4"), rbe(), Options()).plan.program
    statements = list(program.statements)
    for kind in (LaunchStatement, Call):
        index = next(
            i
            for i, s in enumerate(statements)
            if isinstance(s, kind) and any(v.layout and v.layout.packed for v in s.operands.values())
        )
        found = statements[index]
        assert isinstance(found, LaunchStatement | Call)
        name = next(name for name, view in found.operands.items() if view.layout is not None)
        view = found.operands[name]
        assert view.layout is not None
        down = replace(view.layout, backwards=view.layout.dims[-1:])
        for layout, words in ((down, "lies .* expected"), (dt.packed(None, 4, 2), "cannot fill|touches bytes")):
            wrong = replace(view, layout=layout)
            changed = [*statements]
            changed[index] = replace(found, operands={**found.operands, name: wrong})
            with pytest.raises(ProgramError, match=words):
                verify(replace(program, statements=tuple(changed)), rbe())


# Types of few bits.


def narrow_graph(seed: int) -> Graph:
    """What limits, moves and reads values, drawn."""
    chosen, builder = np.random.default_rng(seed), GraphBuilder("net")
    x = builder.input("x", TensorType((1, 4, 4, 8), DType.UINT8 if seed % 2 else DType.INT8))
    dtype = builder.type_of(x).dtype
    known = [x]
    for _ in range(8):
        value, other = (known[int(chosen.integers(len(known)))] for _ in range(2))
        match int(chosen.integers(7)):
            case 0 | 1:
                low = int(chosen.integers(0, 3)) if dtype is DType.UINT8 else int(chosen.integers(-8, 1))
                high = low + int(chosen.choice([1, 3, 7, 15, 40]))
                known.append(builder.add(Clip(low, high, dtype), [value]))
            case 2:
                table = chosen.integers(0, int(chosen.choice([4, 16, 99])), 256).astype(dtype.numpy)
                known.append(builder.add(Lookup(), [value, builder.constant(builder.fresh("table"), table)]))
            case 3:
                known.append(builder.add(Pad((0, 1, 0, 0), (0, 0, 0, 0), int(chosen.integers(0, 30))), [value]))
                known[-1] = builder.add(Slice((0, 1, 0, 0), (1, 5, 4, 8), (1, 1, 1, 1)), [known[-1]])
            case 4:
                joined = builder.add(Concat(3), [value, other])
                known.append(builder.add(Slice((0, 0, 0, 4), (1, 4, 4, 12), (1, 1, 1, 1)), [joined]))
            case 5:
                known.append(builder.add(MaxPool2d((1, 1), (1, 1)), [value]))
            case _:
                known.append(builder.add(Offset(0, dtype), [value]))
    return builder.finish([known[-1], known[-3]] if known[-1] != known[-3] else [known[-1]])


@pytest.mark.parametrize("seed", range(40))
def test_narrow_types_change_nothing(seed: int) -> None:
    graph = narrow_graph(seed)
    found = legalize.narrow_activations()(graph)
    assert [found.types[name] for name in found.outputs] == [graph.types[name] for name in graph.outputs]
    inputs = sample_inputs(graph, seed)
    wanted, got = evaluate(graph, inputs), evaluate(found, inputs)
    for name in graph.outputs:
        np.testing.assert_array_equal(got[name], wanted[name])
    compiled = compile_graph(found, packing_core(), Options())
    proven(compiled, packing_core(), "host", [inputs])


def test_only_the_widths_asked_for() -> None:
    builder = GraphBuilder("net")
    x = builder.input("x", TensorType((1, 8), DType.UINT8))
    thin = builder.add(Clip(0, 3, DType.UINT8), [x], "thin")
    graph = builder.finish([builder.add(Offset(0, DType.INT32), [thin], "y")])
    assert legalize.narrow_activations()(graph).types["thin"].dtype is DType.UINT2
    assert legalize.narrow_activations((4,))(graph).types["thin"].dtype is DType.UINT4


def test_a_core_that_packs() -> None:
    builder = GraphBuilder("net")
    x = builder.input("x", TensorType((1, 4, 4, 32), DType.UINT4))
    graph = builder.finish([builder.add(Clip(0, 7, DType.UINT4), [x], "y")])
    (region,) = partition(graph, packing_core())
    assert not choose(graph, [region])[0].layouts
    assert choose(graph, [region], packs=True)[0].layouts == {"x": dt.packed(None, 4, 4), "y": dt.packed(None, 4, 4)}


# Layers of all sizes, whole and in tiles.


def drawn_layers(seed: int) -> Graph:
    """Two or three convolutions and a dense layer of any sizes, channels that fill no byte among them."""
    chosen, builder = np.random.default_rng(seed), GraphBuilder("layers")
    kinds = (DType.UINT8, DType.UINT4, DType.INT4, DType.UINT2, DType.INT2)

    def finished(sums: str, outputs: int, dtype: DType) -> str:
        scale = builder.constant(builder.fresh("scale"), chosen.integers(1, 99, outputs).astype(np.int32))
        offset = builder.constant(builder.fresh("offset"), chosen.integers(-9999, 9999, outputs).astype(np.int32))
        shift = builder.constant(builder.fresh("shift"), chosen.integers(6, 12, outputs).astype(np.int32))
        scaled = builder.add(ScaleShift(), [sums, scale, offset, shift])
        return builder.add(Clip(dtype.low, dtype.high, dtype), [scaled])

    def weights(shape: tuple[int, ...]) -> str:
        dtype = (DType.INT8, DType.INT4, DType.INT2)[int(chosen.integers(3))]
        array = chosen.integers(dtype.low, dtype.high + 1, shape).astype(np.int8)
        return builder.constant(builder.fresh("weights"), array, dtype)

    def kind() -> DType:
        return kinds[int(chosen.integers(len(kinds)))]

    rows, columns = (int(size) for size in chosen.integers(5, 15, 2))
    channels = int(chosen.integers(1, 12))
    value = builder.input("x", TensorType((1, rows, columns, channels), kind()))
    for _ in range(int(chosen.integers(2, 4))):
        outputs, stride = int(chosen.choice([2, 4, 6, 7, 8, 32, 36])), int(chosen.integers(1, 3))
        size = int(chosen.choice([1, 3]))
        if size == 3:
            fill = max(builder.type_of(value).dtype.low, int(chosen.integers(-1, 2)))
            value = builder.add(Pad((0, 1, 1, 0), (0, 1, int(chosen.integers(2)), 0), fill), [value])
        inputs = builder.type_of(value).shape[-1]
        sums = builder.add(Conv2d((stride, stride)), [value, weights((outputs, size, size, inputs))])
        value = finished(sums, outputs, kind())
    return builder.finish([value])


@pytest.mark.parametrize("seed", range(10))
def test_layers_of_all_sizes(seed: int) -> None:
    """Whole, and in tiles of an L1 of 3 KiB: bytes that hold columns are cut between bytes too."""
    graph = drawn_layers(seed)
    for target in (rbe(), rbe(3 << 10)):
        compiled = compile_graph(graph, target, Options())
        assert any(region.engine is not None for region in compiled.regions)
        inputs = [sample_inputs(graph, seed)]
        proven(compiled, target, "host", inputs)
        proven(compiled, target, "iss", inputs)
