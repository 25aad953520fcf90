"""The core kernels' C, compiled and run, against the graph's own meaning in numpy."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core_kernel_cases import FAMILIES, Case, drawn, random_array
from dovetail.errors import DovetailError
from dovetail.ir.graph import Graph, GraphBuilder, evaluate
from dovetail.ir.operators.activation import FixedSoftmax
from dovetail.ir.operators.arithmetic import Add, Clip, Lookup, Offset, Requantize, Rounding
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.elementwise import Binary, BinaryKind
from dovetail.ir.operators.linear import Conv2d, FullyConnected
from dovetail.ir.operators.movement import Concat, Im2col, Pad
from dovetail.ir.operators.reduction import MaxPool2d
from dovetail.ir.types import Array, DType, TensorType
from dovetail.kernels import HELPERS, CoreKernel, CoreTraits, generate, helper_source, is_pointwise, supports
from dovetail.kernels.helpers import with_needed

COMPILER = shutil.which("cc")
WARNINGS = ("-std=c99", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror")
GUARD = 32
"""Bytes before and after the result that must stay untouched."""

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no host C compiler `cc`")


def c_array(name: str, c_type: str, values: Array) -> str:
    """A const array with its values."""
    if values.dtype == np.float32:
        texts = [float(value).hex() + "f" for value in values.ravel()]
    else:
        texts = [f"{int(value)}" if value > -(1 << 31) else "(-2147483647 - 1)" for value in values.ravel()]
    return f"static const {c_type} {name}[{values.size}] __attribute__((aligned(8))) = {{{', '.join(texts)}}};"


def library_text(kernels: list[CoreKernel]) -> str:
    """All kernels with an exported function per kernel that takes an array of pointers."""
    needed = [helper for kernel in kernels for helper in kernel.helpers]
    parts = ["#include <stdint.h>", helper_source(dict.fromkeys(needed))]
    for kernel in kernels:
        arguments = ", ".join(f"arguments[{index}]" for index in range(len(kernel.parameters)))
        parts.append(f"{kernel.source}\nvoid run_{kernel.name}(void **arguments);")
        parts.append(f"void run_{kernel.name}(void **arguments)\n{{\n    {kernel.name}({arguments});\n}}")
    return "\n".join(parts)


def build(directory: Path, text: str, *options: str) -> Path:
    """Compile C text with the host's compiler, warnings being errors.

    Many small kernels with a sanitiser take GCC three times as long with -O1 as with -O0, so only the kernels of all
    families (`test_kernels_equal_the_graph`) and whole networks are compiled with both.
    """
    source, result = directory / "kernels.c", directory / "kernels.so"
    source.write_text(text)
    command = [str(COMPILER), *WARNINGS, *options, "-o", str(result), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return result


def aligned(array: Array, guard: int = 0) -> tuple[Array, Array]:
    """A copy at a multiple of 8 bytes (and no higher power), and the bytes around it, `guard` on each side."""
    room = np.full(array.nbytes + 2 * guard + 32, 0xA5, np.uint8)
    start = -room.ctypes.data % 16 + 8
    whole = room[start : start + array.nbytes + 2 * guard]
    inner = whole[guard : guard + array.nbytes]
    inner[:] = np.frombuffer(array.tobytes(), np.uint8)
    return inner, whole


def run(function: Any, kernel: CoreKernel, case: Case) -> Array:
    """The kernel's result through ctypes; fails when it writes outside its output."""
    kind = case.graph.types[case.graph.outputs[0]]
    result, room = aligned(np.zeros(kind.shape, kind.dtype.numpy), GUARD)
    operands = [result]
    for parameter in kernel.parameters[1:]:
        array = kernel.constants[parameter.value] if parameter.is_constant else case.inputs[parameter.value]
        operands.append(aligned(np.asarray(array))[0])
    pointers = (ctypes.c_void_p * len(operands))(*(operand.ctypes.data for operand in operands))
    function(pointers)
    assert (room[:GUARD] == 0xA5).all() and (room[-GUARD:] == 0xA5).all(), "wrote outside the result"
    return np.frombuffer(result.tobytes(), kind.dtype.numpy).reshape(kind.shape)


def describe(case: Case) -> str:
    """The region in words, for a failing test."""
    types = {name: str(case.graph.types[name]) for name in case.graph.inputs}
    return f"{types} -> {[node.operator for node in case.graph.nodes]}"


@needs_compiler
@pytest.mark.parametrize("name", list(FAMILIES))
def test_kernels_equal_the_graph(name: str, tmp_path: Path) -> None:
    cases = drawn(name, 40)
    for case in cases:
        assert supports(case.graph) is None, f"{supports(case.graph)} {describe(case)}"
    kernels = [generate(case.graph, f"kernel_{number}") for number, case in enumerate(cases)]
    path = build(
        tmp_path,
        library_text(kernels),
        "-O1",
        "-shared",
        "-fPIC",
        "-fsanitize=undefined",
        "-fno-sanitize-recover=undefined",
    )
    library = ctypes.CDLL(str(path))
    for case, kernel in zip(cases, kernels, strict=True):
        got = run(getattr(library, f"run_{kernel.name}"), kernel, case)
        wanted = evaluate(case.graph, case.inputs)[case.graph.outputs[0]]
        assert np.array_equal(got, wanted), f"{describe(case)}\n{kernel.source}\n{got}\n{wanted}"


def test_shared_functions_name_those_they_call() -> None:
    """The lines before the functions in `kernels/runtime`, which decide what is emitted with a kernel."""
    for name, text in HELPERS.items():
        called = set(re.findall(r"\b(\w+)\(", text.split("{", 1)[1])) & set(HELPERS)
        assert set(with_needed([name])) == {name, *(inner for other in called for inner in with_needed([other]))}


EDGES = (0, 1, -1, (1 << 31) - 1, -(1 << 31), (1 << 31) - 2, 1 << 30)


def rectified(seed: int) -> Case:
    """Sums around where each channel's result changes, and at the ends of int32, cut off at the zero point."""
    rng = np.random.default_rng(seed)
    channels, zero = int(rng.integers(1, 9)), int(rng.choice([-128, 0, 17, 126]))
    multiplier = rng.integers(1 << 30, 1 << 31, channels).astype(np.int32)
    multiplier[rng.random(channels) < 0.1] = 0
    multiplier[rng.random(channels) < 0.1] = (1 << 31) - 1
    shift = rng.integers(-31, 0, channels) if seed % 2 else rng.integers(-12, 1 if seed % 5 == 0 else 0, channels)
    builder = GraphBuilder("rectified")
    x = builder.input("x", TensorType((1, 7, 20, channels), DType.INT32))
    constants = [builder.constant(name, array.astype(np.int32)) for name, array in (("m", multiplier), ("s", shift))]
    scaled = builder.add(Requantize(output_zero_point=zero), [x, *constants])
    graph = builder.finish([builder.add(Clip(zero, 127, DType.INT8), [scaled])])
    steps = rng.integers(-3, 260, (140, channels)) + 0.5
    sums = steps * 2.0 ** (31 - shift) / np.maximum(multiplier, 1) + rng.integers(-2, 3, steps.shape)
    sums[rng.integers(0, 140, len(EDGES))] = np.array(EDGES)[:, None]
    return Case(graph, {"x": np.clip(sums, -(1 << 31), (1 << 31) - 1).astype(np.int32).reshape(1, 7, 20, channels)})


@needs_compiler
def test_rectified_sums(tmp_path: Path) -> None:
    """Walked down channel by channel where that is exact, else as any other."""
    cases = [rectified(seed) for seed in range(120)]
    kernels = [generate(case.graph, f"kernel_{number}") for number, case in enumerate(cases)]
    quick = sum("limit" in kernel.constants for kernel in kernels)
    assert 60 <= quick < len(cases), quick
    options = ("-O0", "-shared", "-fPIC", "-fsanitize=undefined", "-fno-sanitize-recover=undefined")
    library = ctypes.CDLL(str(build(tmp_path, library_text(kernels), *options)))
    for case, kernel in zip(cases, kernels, strict=True):
        got = run(getattr(library, f"run_{kernel.name}"), kernel, case)
        wanted = evaluate(case.graph, case.inputs)[case.graph.outputs[0]]
        assert np.array_equal(got, wanted), f"{kernel.source}\n{got[got != wanted]}\n{wanted[got != wanted]}"


def main_text(cases: list[Case], kernels: list[CoreKernel]) -> str:
    """A program that runs each kernel on its operands and compares with the expected result."""
    parts = ["#include <string.h>", library_text(kernels)]
    calls = []
    for number, (case, kernel) in enumerate(zip(cases, kernels, strict=True)):
        output = case.graph.outputs[0]
        wanted = evaluate(case.graph, case.inputs)[output]
        result = kernel.parameters[0]
        parts.append(c_array(f"wanted_{number}", result.c_type, wanted))
        parts.append(f"static {result.c_type} result_{number}[{wanted.size}] __attribute__((aligned(8)));")
        arguments = [f"result_{number}"]
        for at, parameter in enumerate(kernel.parameters[1:]):
            array = kernel.constants[parameter.value] if parameter.is_constant else case.inputs[parameter.value]
            parts.append(c_array(f"operand_{number}_{at}", parameter.c_type, np.asarray(array)))
            arguments.append(f"operand_{number}_{at}")
        calls.append(f"    {kernel.name}({', '.join(arguments)});")
        calls.append(f"    bad += memcmp(wanted_{number}, result_{number}, sizeof wanted_{number}) != 0;")
    return "\n".join([*parts, "int main(void)", "{", "    int bad = 0;", *calls, "    return bad;", "}", ""])


@needs_compiler
def test_no_access_outside_operands(tmp_path: Path) -> None:
    """Under the address sanitiser, each operand a global of exactly its size."""
    cases = [case for name in FAMILIES for case in drawn(name, 8)]
    kernels = [generate(case.graph, f"kernel_{number}") for number, case in enumerate(cases)]
    text = main_text(cases, kernels)
    program = build(tmp_path, text, "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.returncode} kernels differ: {done.stderr[:3000]}"


def moved(operator: Operator, shape: tuple[int, ...], seed: int) -> Case:
    """An operator that moves the bytes of an image."""
    builder = GraphBuilder("moved")
    kind = TensorType(shape, DType.INT8)
    graph = builder.finish([builder.add(operator, [builder.input("x", kind)], "y")])
    return Case(graph, {"x": random_array(seed, kind)})


@needs_compiler
@pytest.mark.parametrize("store", [1, 2])
def test_patches_and_pads_in_words(store: int, tmp_path: Path) -> None:
    """Patches of all widths, strides and numbers of channels on a core whose words are aligned, and borders of any
    width, under the sanitisers; most in words."""
    random, cases = np.random.default_rng(7 + store), []
    for seed in range(40):
        kernel = tuple(int(size) for size in random.integers(1, 6, 2))
        stride = tuple(int(size) for size in random.integers(1, 4, 2))
        channels, batch = int(random.choice([1, 1, 2, 3, 3, 5, 8])), int(random.choice([1, 1, 2]))
        sides = [int(random.integers(taps, 24)) for taps in kernel]
        cases.append(moved(Im2col(kernel, stride), (batch, *sides, channels), seed))
        pads = random.integers(0, 4, (2, 2))
        before, after = ((0, int(top), int(left), 0) for top, left in pads)
        shape = (1, int(random.integers(1, 9)), int(random.integers(1, 90)), int(random.choice([1, 3, 8, 10])))
        cases.append(moved(Pad(before, after, int(random.integers(-128, 128))), shape, seed))
    core = replace(CoreTraits(), aligned=store)
    kernels = [generate(case.graph, f"kernel_{number}", core) for number, case in enumerate(cases)]
    by_words = ["moved_word" in kernel.source for kernel in kernels]
    assert sum(by_words[::2]) >= 25 and sum(by_words[1::2]) >= 12, by_words
    program = build(tmp_path, main_text(cases, kernels), "-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover")
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.returncode} kernels differ: {done.stderr[:3000]}"


def test_kernels_compile_for_riscv(tmp_path: Path) -> None:
    """Clang's warnings, a 32-bit target, and no call outside the text but memcpy, memset and float arithmetic."""
    pytest.importorskip("ziglang", reason="the cross compiler is not installed")
    elftools = pytest.importorskip("elftools.elf.elffile", reason="pyelftools is not installed")
    cases = [case for name in FAMILIES for case in drawn(name, 4)]
    kernels = [generate(case.graph, f"kernel_{number}") for number, case in enumerate(cases)]
    source, result = tmp_path / "kernels.c", tmp_path / "kernels.o"
    source.write_text(library_text(kernels))
    command = [
        sys.executable,
        "-m",
        "ziglang",
        "cc",
        "-target",
        "riscv32-freestanding-none",
        "-mcpu=generic_rv32+m+c",
        "-ffreestanding",
        "-fno-sanitize=undefined",
        "-O2",
        "-g0",
        *WARNINGS,
        "-c",
        "-o",
        str(result),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]
    with result.open("rb") as stream:
        symbols = elftools.ELFFile(stream).get_section_by_name(".symtab").iter_symbols()
        called = {symbol.name for symbol in symbols if symbol["st_shndx"] == "SHN_UNDEF" and symbol.name}
    floats = {"__divsf3", "__mulsf3", "__addsf3", "__subsf3", "__floatsisf", "__fixsfsi", "__gtsf2", "__ltsf2"}
    assert called <= {"memcpy", "memset"} | floats


def convolution_region(outputs: int, seed: int, zero_point: int = -128) -> Graph:
    maker = GraphBuilder(f"layer_{seed}")
    generator = np.random.default_rng(seed)
    x = maker.input(f"image_{seed}", TensorType((1, 8, 8, 4), DType.INT8))
    x = maker.add(Pad((0, 1, 1, 0), (0, 1, 1, 0), zero_point), [x])
    weights = maker.constant("w", generator.integers(-127, 128, (outputs, 3, 3, 4)).astype(np.int8))
    value = maker.add(Conv2d(input_zero_point=zero_point), [x, weights])
    multiplier = maker.constant("m", generator.integers(1 << 30, 1 << 31, outputs).astype(np.int32))
    shift = maker.constant("s", generator.integers(-9, -5, outputs).astype(np.int32))
    value = maker.add(Requantize(output_zero_point=3), [value, multiplier, shift])
    return maker.finish([maker.add(Clip(-128, 127, DType.INT8), [value])])


def test_equal_layers_share_one_function() -> None:
    first, second = generate(convolution_region(8, 1), "first"), generate(convolution_region(8, 2), "second")
    assert first.key == second.key and first.source != second.source
    assert generate(convolution_region(4, 1), "first").key != first.key
    assert generate(convolution_region(8, 1, 5), "first").key != first.key
    assert generate(convolution_region(8, 1), "first").source == first.source
    assert [p.value for p in first.parameters if not p.is_constant] == ["clip", "image_1"]
    assert {p.value for p in first.parameters if p.is_constant} == set(first.constants)


def overflowing_add() -> Case:
    """A sum of int32 values beyond 32 bits wraps."""
    builder = GraphBuilder("wraps")
    names = [builder.input(name, TensorType((64,), DType.INT32)) for name in ("a", "b")]
    graph = builder.finish([builder.add(Add(), names)])
    return Case(graph, {name: random_array(at, graph.types[name]) for at, name in enumerate(names)})


def flat_softmax() -> Case:
    """So many equal elements that each has a share below half of the smallest step."""
    builder = GraphBuilder("flat")
    x = builder.input("x", TensorType((1000,), DType.INT8))
    graph = builder.finish([builder.add(FixedSoftmax(1 << 30, 22, -128, DType.INT8), [x])])
    return Case(graph, {"x": np.full(1000, 7, np.int8)})


def flipped_signs(count: int, kind: DType) -> Case:
    """Signs of so many bytes flipped: in turns of 256 and of 64 bytes, words, and bytes."""
    builder = GraphBuilder("flipped")
    other, offset = (DType.UINT8, 128) if kind is DType.INT8 else (DType.INT8, -128)
    x = builder.input("x", TensorType((count,), kind))
    graph = builder.finish([builder.add(Offset(offset, other), [x])])
    return Case(graph, {"x": random_array(count, graph.types["x"])})


def wide_sums() -> Case:
    """Sums of products beyond 32 bits, whose accumulators are two registers each."""
    builder = GraphBuilder("wide")
    x = builder.input("x", TensorType((2, 600), DType.INT16))
    kind = TensorType((3, 600), DType.INT8)
    operands = [x, builder.constant("w", random_array(3, kind)), builder.constant("b", np.array([1 << 40, 0, -9]))]
    graph = builder.finish([builder.add(FullyConnected(), operands)])
    return Case(graph, {"x": np.full((2, 600), -32768, np.int16)})


@needs_compiler
def test_edge_cases(tmp_path: Path) -> None:
    """Regions too rare to be drawn: nothing but single elements, more than one nest, one value used twice."""
    cases = []
    for kind, shapes in (("concat", [(1,), (1,)]), ("pad", [(1, 1)]), ("twice", [(3, 5)])):
        builder = GraphBuilder(kind)
        names = [builder.input(f"x{at}", TensorType(shape, DType.INT8)) for at, shape in enumerate(shapes)]
        value = names[0]
        if kind == "concat":
            value = builder.add(Concat(0), names)
        elif kind == "pad":
            value = builder.add(Pad((0, 0), (0, 0), 7), names)
        multiplier = builder.constant("m", np.array([1 << 30], np.int32))
        value = builder.add(Requantize(), [value, multiplier, builder.constant("s", np.array([2], np.int32))])
        if kind == "twice":
            value = builder.add(Add(), [value, value])
        graph = builder.finish([builder.add(Clip(-128, 127, DType.INT8), [value])])
        inputs = {name: random_array(1, graph.types[name]) for name in names}
        cases.append(Case(graph, inputs))
    cases += [overflowing_add(), flat_softmax(), wide_sums()]
    cases += [flipped_signs(count, kind) for count in (63, 71, 1024, 1351, 2048) for kind in (DType.INT8, DType.UINT8)]
    assert all(supports(case.graph) is None for case in cases)
    kernels = [generate(case.graph, f"kernel_{number}") for number, case in enumerate(cases)]
    sanitised = ("-O0", "-fsanitize=undefined", "-fno-sanitize-recover=undefined")
    program = build(tmp_path, main_text(cases, kernels), *sanitised)
    assert subprocess.run([str(program)], check=False).returncode == 0


def rounding_case(rounding: Rounding, shifts: range, dtype: DType) -> Case:
    """Requantisation without a clip: small values, where every second one is a tie, and the type's extremes."""
    builder = GraphBuilder("rounding")
    small = np.repeat(np.arange(-600, 601)[:, None], len(shifts), axis=1)
    largest = (1 << 47) - 1 if dtype is DType.INT64 else dtype.high
    wide = random_array(5, TensorType((400, len(shifts)), dtype), largest >> max(shifts[-1], 0))
    values = np.concatenate([small, wide]).astype(dtype.numpy)
    x = builder.input("x", TensorType(values.shape, dtype))
    multiplier = np.where(np.arange(len(shifts)) % 3 == 2, (1 << 31) - 1, 1 << 30).astype(np.int32)
    names = (builder.constant("m", multiplier), builder.constant("s", np.array(shifts, np.int32)))
    graph = builder.finish([builder.add(Requantize(rounding), [x, *names])])
    return Case(graph, {"x": values})


@needs_compiler
def test_every_rounding_at_ties_and_extremes(tmp_path: Path) -> None:
    cases = [
        rounding_case(rounding, shifts, DType.INT32)
        for rounding in Rounding
        if rounding is not Rounding.WIDE
        for shifts in (range(-31, 0), range(0, 1), range(-8, 5))
    ]
    cases.append(rounding_case(Rounding.WIDE, range(-31, -16), DType.INT64))
    kernels = [generate(case.graph, f"kernel_{number}") for number, case in enumerate(cases)]
    called = {helper for kernel in kernels for helper in kernel.helpers if "requantize" in helper}
    assert len(called) == 8, f"some way to requantise is not run: {sorted(called)}"
    library = ctypes.CDLL(str(build(tmp_path, library_text(kernels), "-O1", "-shared", "-fPIC")))
    for case, kernel in zip(cases, kernels, strict=True):
        wanted = evaluate(case.graph, case.inputs)[case.graph.outputs[0]]
        got = run(getattr(library, f"run_{kernel.name}"), kernel, case)
        assert np.array_equal(got, wanted), f"{kernel.source} {np.argwhere(got != wanted)[:5]}"


def refused(value: Callable[[GraphBuilder, str], str], dtype: DType = DType.INT8) -> str:
    builder = GraphBuilder("region")
    x = builder.input("x", TensorType((1, 4, 4, 2), dtype))
    graph = builder.finish([value(builder, x)])
    sentence = supports(graph)
    assert sentence is not None
    with pytest.raises(DovetailError, match="no core kernel"):
        generate(graph, "kernel")
    return sentence


def test_refusals_say_why() -> None:
    def two_anchors(builder: GraphBuilder, x: str) -> str:
        return builder.add(MaxPool2d((2, 2), (2, 2)), [builder.add(MaxPool2d((2, 2), (1, 1)), [x])])

    def run_time_weights(builder: GraphBuilder, x: str) -> str:
        return builder.add(Conv2d(), [x, builder.input("w", TensorType((1, 1, 1, 2), DType.INT8))])

    def wide_pad(builder: GraphBuilder, x: str) -> str:
        weights = builder.constant("w", np.ones((1, 1, 1, 2), np.int8))
        return builder.add(Conv2d(), [builder.add(Pad((0, 3, 0, 0), (0, 0, 0, 0)), [x]), weights])

    def activated_twice(builder: GraphBuilder, x: str) -> str:
        table = builder.constant("t", np.zeros(256, np.int8))
        active = builder.add(Lookup(), [x, table])
        pooled = builder.add(MaxPool2d((1, 1), (1, 1)), [active])
        return builder.add(Binary(BinaryKind.MAXIMUM), [pooled, active])

    assert "is read by MaxPool2d and computed pointwise" in refused(activated_twice)
    assert "found MaxPool2d, MaxPool2d" in refused(two_anchors)
    assert "'w' is computed at run time" in refused(run_time_weights)
    assert "wider than the window" in refused(wide_pad)
    nothing = Graph("region", ("x",), ("x",), (), {"x": TensorType((1, 4), DType.INT8)})
    assert "no operator" in (supports(nothing) or "")


def test_pointwise_operators() -> None:
    assert all(is_pointwise(operator) for operator in (Requantize(), Add(), Lookup(), Clip(0, 1, DType.INT8)))
    assert not any(is_pointwise(operator) for operator in (Conv2d(), MaxPool2d((1, 1), (1, 1)), Pad((), ())))
