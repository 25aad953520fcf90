"""Residual additions as one line and floats quantised by tables: exact on every operand, and within their cycles."""

from __future__ import annotations

import ctypes
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core_kernel_cases import Case
from dovetail.codegen.emit import write_project
from dovetail.compile import Options, compile_graph
from dovetail.ir.graph import Graph, GraphBuilder, evaluate
from dovetail.ir.operators.arithmetic import Add, Clip, Quantize, Requantize, Rounding, multiplier_arrays
from dovetail.ir.requantisation import pairs
from dovetail.ir.requantisation.pairs import SumChain, sum_chains
from dovetail.ir.types import Array, DType, TensorType
from dovetail.kernels import generate
from dovetail.kernels.c import summand, total
from dovetail.kernels.pointwise import steps_of
from dovetail.run import open_build, run_build
from dovetail.targets import load_target
from firmware import require_chip
from test_core_kernels import build, library_text, needs_compiler, run

PAIRS = np.array(list(product(range(-128, 128), repeat=2)), np.int8)
"""Every pair of int8."""
SAMPLE = {"a": PAIRS[:, 0], "b": PAIRS[:, 1]}
INT8 = [(-128, 127)] * 2


def residual(
    scales: tuple[float, float],
    zero_points: tuple[int, int, int] = (-128, 4, -9),
    limits: tuple[int, int] = (-128, 127),
    rounding: Rounding = Rounding.DOUBLE,
) -> Graph:
    """An addition of two int8 values as TensorFlow Lite does it, scales relative to the result's."""
    builder, twice = GraphBuilder("residual"), 2 * max(scales)

    def scaled(x: str, factor: float, at: int, left: int, after: int) -> str:
        numbers = zip("ms", multiplier_arrays([factor]), strict=True)
        names = [builder.constant(f"{stem}_{after}_{x}", array) for stem, array in numbers]
        operator = Requantize(rounding, input_zero_point=at, output_zero_point=after, left_shift=left)
        return builder.add(operator, [x, *names])

    inputs = [builder.input(name, TensorType((len(PAIRS),), DType.INT8)) for name in ("a", "b")]
    parts = [scaled(x, s / twice, z, 20, 0) for x, s, z in zip(inputs, scales, zero_points[:2], strict=True)]
    value = scaled(builder.add(Add(), parts), twice / (1 << 20), 0, 0, zero_points[2])
    return builder.finish([builder.add(Clip(*limits, DType.INT8), [value])])


def line_of(graph: Graph) -> SumChain:
    return sum_chains(graph, graph.nodes)[graph.outputs[0]]


@settings(deadline=None, max_examples=25)
@given(
    st.tuples(*[st.floats(0.05, 2.0)] * 2),
    st.tuples(*[st.integers(-128, 127)] * 3),
    st.sampled_from([(-128, 127), (-128, 90), (-7, 127)]),
    st.sampled_from([Rounding.DOUBLE, Rounding.SINGLE]),
)
def test_a_line_is_the_operators(
    scales: tuple[float, float], zero_points: tuple[int, int, int], limits: tuple[int, int], rounding: Rounding
) -> None:
    graph = residual(scales, zero_points, limits, rounding)
    found = line_of(graph).linear(graph, INT8, 24)
    if found is None:
        return
    wide = {name: values.astype(np.int64) for name, values in SAMPLE.items()}
    sums = sum(f * wide[name] for f, name in zip(found.factors, line_of(graph).operands, strict=True)) + found.offset
    assert np.abs(sums).max() < 1 << 31
    assert (found.low, found.high) == ((sums >> found.shift).min(), (sums >> found.shift).max())
    wanted = evaluate(graph, SAMPLE)[graph.outputs[0]]
    assert np.array_equal(np.clip(sums >> found.shift, *limits), wanted)


def test_most_scales_have_a_line() -> None:
    generator = np.random.default_rng(5)
    drawn = [tuple(generator.uniform(0.1, 1.6, 2)) for _ in range(40)]
    graphs = [
        residual(scales) for scales in [*drawn, (0.5, 0.5), (1.0, 1.0), (0.25, 0.5), (2.0, 1.0)]
    ]  # those have ties
    found = [line_of(graph).linear(graph, INT8, 24) is not None for graph in graphs]
    assert all(found[40:]) and sum(found) >= len(found) - 1


def test_a_wrong_line_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seeded fault: numbers that disagree on some pair never get out."""
    graph = residual((0.77, 1.3))
    uphill = pairs._uphill
    right = line_of(graph).linear(graph, INT8, 24)
    assert right is not None
    for wrong in ((0, 1 << 10), (40, 0)):
        pairs._line.cache_clear()

        def moved(*given: object, wrong: tuple[int, int] = wrong) -> tuple[tuple[int, ...], int]:
            (first, second), offset = uphill(*given)  # type: ignore[arg-type]
            return (first + wrong[0], second), offset + wrong[1]

        monkeypatch.setattr(pairs, "_uphill", moved)
        assert line_of(graph).linear(graph, INT8, 24) is None
    pairs._line.cache_clear()


@needs_compiler
def test_kernels_on_every_pair(tmp_path: Path) -> None:
    graphs = [
        residual((0.77, 1.3)),
        residual((0.5, 0.5), rounding=Rounding.SINGLE),
        residual((0.5, 1.0)),
        residual((1.1, 0.3), limits=(-20, 100)),
    ]
    kernels = [generate(graph, f"kernel_{number}") for number, graph in enumerate(graphs)]
    over = generate(graphs[0], "kernel_over", overwritten="a")
    assert all("add_by_table" in kernel.helpers for kernel in (*kernels, over))
    path = build(tmp_path, library_text([*kernels, over]), "-O0", "-shared", "-fPIC", "-fsanitize=undefined")
    library = ctypes.CDLL(str(path))
    for graph, kernel in zip([*graphs, graphs[0]], [*kernels, over], strict=True):
        got = run(getattr(library, f"run_{kernel.name}"), kernel, Case(graph, SAMPLE))
        assert np.array_equal(got, evaluate(graph, SAMPLE)[graph.outputs[0]])


def cycles_of(graph: Graph, target: str, inputs: dict[str, Array], folder: Path) -> float:
    """Cycles an element of the whole inference; fails where a result differs."""
    compiled = compile_graph(graph, load_target(target), Options())
    write_project(compiled.project, folder)
    result = run_build(open_build(folder), "iss", [inputs])
    wanted = evaluate(graph, inputs)
    assert all(np.array_equal(result.outputs[0][name], wanted[name]) for name in graph.outputs)
    cycles = result.simulation.inferences[0].total_cycles
    assert cycles is not None
    return cycles / next(iter(inputs.values())).size


@pytest.mark.parametrize(("target", "most"), [("cortex_m4", 5.9), ("riscv", 10.3)])
def test_cycles_of_an_addition(target: str, most: float, tmp_path: Path) -> None:
    require_chip()
    found = [cycles_of(residual(s), target, SAMPLE, tmp_path / str(s[0])) for s in ((0.77, 1.3), (0.5, 0.5))]
    print(target, [round(each, 2) for each in found], "cycles an element")
    assert max(found) <= most


FLOATS = (0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF)
"""Bits of 0, the least and greatest denormal, the least and greatest normal, infinity, and what is no number."""
SCALES = [
    (0.0235, -3, DType.INT8),
    (1 / 255, -128, DType.INT8),
    (1 / 127.5, 128, DType.UINT8),
    (0.5, 0, DType.INT8),
    (1e-38, 7, DType.INT8),
    (3e37, 0, DType.UINT8),
]


def quantising(scale: float, zero_point: int, dtype: DType, count: int) -> Graph:
    builder = GraphBuilder("quantising")
    x = builder.input("a", TensorType((count,), DType.FLOAT32))
    numbers = np.array([scale], np.float32), np.array([zero_point], np.int32)
    return builder.finish([builder.add(Quantize(dtype), [x, *map(builder.constant, ("scale", "zero_point"), numbers)])])


def telling(scale: float) -> Array:
    """Floats at every half of a step with their neighbours, the ends of the format, and others over all of it."""
    with np.errstate(all="ignore"):
        halves = ((np.arange(-300, 301) + 0.5) * np.float64(np.float32(scale))).astype(np.float32)
    near = (halves.view(np.int32)[:, None] + np.arange(-2, 3, dtype=np.int32)).ravel().view(np.uint32)
    ends = np.array([sign << 31 | bits for bits in FLOATS for sign in (0, 1)], np.uint32)
    generator = np.random.default_rng(3)
    spread = generator.integers(0, 1 << 32, 4000, dtype=np.uint64).astype(np.uint32)
    usual = (generator.normal(0, 60, 4000) * scale).astype(np.float32).view(np.uint32)
    return np.concatenate([near, ends, spread, usual]).view(np.float32)


def by_division(values: Array, scale: float, zero_point: int, dtype: DType) -> Array:
    """What the operator means, and for what is no number the least value, as the kernels with floats give."""
    with np.errstate(all="ignore"):
        steps = np.rint(values / np.float32(scale)).astype(np.float64) + zero_point
    return np.where(np.isnan(steps), dtype.low, np.clip(steps, dtype.low, dtype.high)).astype(dtype.numpy)


@needs_compiler
def test_floats_at_every_step(tmp_path: Path) -> None:
    count = len(telling(1.0))
    graphs = [quantising(*scale, count) for scale in SCALES]
    kernels = [generate(graph, f"kernel_{number}") for number, graph in enumerate(graphs)]
    assert all("quantize_bytes" in kernel.helpers for kernel in kernels)
    library = ctypes.CDLL(str(build(tmp_path, library_text(kernels), "-O1", "-shared", "-fPIC")))
    for scale, graph, kernel in zip(SCALES, graphs, kernels, strict=True):
        values = telling(scale[0])
        got = run(getattr(library, f"run_{kernel.name}"), kernel, Case(graph, {"a": values}))
        assert np.array_equal(got, by_division(values, *scale)), scale


def test_scales_without_tables() -> None:
    """Scales that are no positive number, and zero points so far off that a word would hold many steps."""
    for scale in (0.0, -1.0, float("inf"), float("nan")):
        assert steps_of(scale, 0, DType.INT8) is None
    assert steps_of(1.0, 1000, DType.INT8) is None


@pytest.mark.parametrize(("target", "most"), [("cortex_m4", 10.6), ("riscv", 15.8)])
def test_cycles_of_a_quantisation(target: str, most: float, tmp_path: Path) -> None:
    require_chip()
    for number, (scale, zero_point, dtype) in enumerate(SCALES[:3]):
        values = telling(scale)
        values = np.where(np.isnan(values), np.float32(0), values)
        graph = quantising(scale, zero_point, dtype, values.size)
        cycles = cycles_of(graph, target, {"a": values}, tmp_path / str(number))
        print(target, round(cycles, 2), "cycles a float")
        assert cycles <= most


def test_a_sum_of_what_binds_looser_has_parentheses() -> None:
    """A line without limits behind it is a shift, and what adds to it must not add to its number of bits."""
    assert total("x", 3) == "x + 3" and total("(x * 5) >> 2", 3) == "((x * 5) >> 2) + 3"
    assert total("a ? b : c", "d") == "(a ? b : c) + d" and total("f(a >> 2, b)", 1) == "f(a >> 2, b) + 1"
    assert summand("x * 5 + y") == "x * 5 + y" and summand("t[a >> 1]") == "t[a >> 1]"
