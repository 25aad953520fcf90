"""Kernels that take most of the time of a prompt: gates, norms, sums of many rows, places up to a number."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.arrays import built
from dovetail.compile import Options, compile_graph
from dovetail.ir.graph import Graph, GraphBuilder, evaluate, evaluate_all
from dovetail.ir.operators.arithmetic import Add, Clip, Lookup, Offset, Requantize, Rounding, fixed_point
from dovetail.ir.operators.elementwise import Binary, BinaryKind, Compare, CompareKind
from dovetail.ir.operators.fixed import FixedStandard
from dovetail.ir.operators.linear import Conv2d
from dovetail.ir.operators.movement import Concat, Reshape
from dovetail.ir.operators.sequence import AttentionEnd
from dovetail.ir.requantisation.level import level_scale
from dovetail.ir.requantisation.products import table_products
from dovetail.ir.types import Array, DType, TensorType
from dovetail.legalize import views_first
from dovetail.run import run_build
from dovetail.targets import load_target

ROUNDINGS = (Rounding.SINGLE, Rounding.DOUBLE, Rounding.AWAY)


def gate(table: Array, offset: int, rounding: Rounding, factor: int, shift: int, zero_point: int, count: int) -> Graph:
    """A requantised product of a table's value and a byte."""
    builder = GraphBuilder("gate")
    x, y = (builder.input(name, TensorType((1, count), DType.INT8)) for name in "xy")
    looked_up = builder.add(Lookup(), [x, builder.constant("table", table)])
    left = builder.add(Offset(0, DType.INT32), [looked_up])
    product = builder.add(Binary(BinaryKind.MULTIPLY), [left, builder.add(Offset(offset, DType.INT32), [y])])
    numbers = [builder.constant(f"n{place}", np.array([one], np.int32)) for place, one in enumerate((factor, shift))]
    scaled = builder.add(Requantize(rounding, output_zero_point=zero_point), [product, *numbers])
    return builder.finish([builder.add(Clip(-128, 127, DType.INT8), [scaled], "z")])


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    offset=st.integers(-128, 128),
    rounding=st.sampled_from(ROUNDINGS),
    factor=st.integers(1 << 30, (1 << 31) - 1),
    shift=st.integers(-16, -9),
    zero_point=st.integers(-128, 127),
)
def test_a_gate_is_one_product(
    seed: int, offset: int, rounding: Rounding, factor: int, shift: int, zero_point: int
) -> None:
    """On all pairs of operands, where numbers are found; rounded once they always are."""
    table = np.random.default_rng(seed).integers(-4096, 4097, 256).astype(np.int16)
    graph = gate(table, offset, rounding, factor, shift, zero_point, 65536)
    one = table_products(graph, graph.nodes).get("z")
    assert one is not None or rounding is not Rounding.SINGLE
    if one is None:
        return
    x, y = (axis.reshape(1, -1).astype(np.int8) for axis in np.meshgrid(*[np.arange(-128, 128)] * 2, indexing="ij"))
    total = one.table.astype(np.int64)[x.astype(int) + 128] * (y.astype(int) + one.offset) + one.addition
    assert (
        np.abs(total).max() < 1 << 31
        and one.low <= (total >> one.shift).min()
        and (total >> one.shift).max() <= one.high
    )
    wanted = evaluate(graph, {"x": x, "y": y})["z"]
    np.testing.assert_array_equal(np.clip(total >> one.shift, -128, 127), wanted)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    reach=st.integers(100, 32767),
    spread=st.integers(0, 4),
    zero_point=st.integers(-128, 127),
)
def test_channels_of_different_shifts_are_level(seed: int, reach: int, spread: int, zero_point: int) -> None:
    """Every operand has the result that it had with the shift of its channel."""
    rng = np.random.default_rng(seed)
    multiplier = rng.integers(1 << 30, 1 << 31, 6).astype(np.int32)
    shift = (-9 + rng.integers(-spread, 1, 6)).astype(np.int32)
    operator = Requantize(Rounding.SINGLE, output_zero_point=zero_point)
    level = level_scale(operator, multiplier, shift, (-reach, reach), (-128, 127))
    assert level is not None
    x = np.arange(-reach, reach + 1)[:, None]
    found = ((x * level.multiplier.astype(np.int64) >> 32) + level.offset) >> level.shift
    wanted = fixed_point(x, multiplier, shift, Rounding.SINGLE) + zero_point
    np.testing.assert_array_equal(np.clip(found, -128, 127), np.clip(wanted, -128, 127))


def test_what_is_not_level() -> None:
    """Other roundings, scales above 1, offsets that leave 32 bits, and different shifts without limits."""
    one, two = np.array([1 << 30], np.int32), np.array([1 << 30, 1 << 30], np.int32)
    single, shifts = Requantize(Rounding.SINGLE), np.array([-9, -10], np.int32)
    assert level_scale(single, one, np.array([-9], np.int32), (-(1 << 31), (1 << 31) - 1), None) is not None
    assert level_scale(Requantize(Rounding.DOUBLE), one, np.array([-9], np.int32), (-9, 9), None) is None
    assert level_scale(single, one, np.array([0], np.int32), (-9, 9), None) is None
    assert level_scale(replace(single, output_zero_point=1 << 25), one, np.array([-9], np.int32), (-9, 9), None) is None
    assert level_scale(single, two, shifts, (-9, 9), None) is None
    assert level_scale(single, two, shifts, (-99999, 99999), (-128, 127)) is None


def residual(rows: int, channels: int) -> Graph:
    """Sums of a layer, with a bias, requantised and added to what was before it."""
    rng, builder = np.random.default_rng(3), GraphBuilder("residual")
    sums = builder.input("sums", TensorType((rows, channels), DType.INT32))
    before = builder.input("before", TensorType((rows, channels), DType.INT16))
    numbers = (
        rng.integers(1 << 30, 1 << 31, channels),
        rng.integers(-9, -5, channels),
        rng.integers(-99, 99, channels),
    )
    factor, shift, bias = (builder.constant(f"n{place}", one.astype(np.int32)) for place, one in enumerate(numbers))
    scaled = builder.add(Requantize(Rounding.SINGLE), [builder.add(Add(), [sums, bias]), factor, shift])
    own = builder.add(Clip(-32768, 32767, DType.INT16), [scaled])
    total = builder.add(Add(), [builder.add(Offset(0, DType.INT32), [one]) for one in (own, before)])
    return builder.finish([builder.add(Clip(-32768, 32767, DType.INT16), [total], "y")])


def norm(rows: int, size: int) -> Graph:
    """A norm whose channels have scales with different shifts."""
    rng, builder = np.random.default_rng(4), GraphBuilder("norm")
    x = builder.input("x", TensorType((rows, size), DType.INT16))
    numbers = rng.integers(1 << 30, 1 << 31, size), rng.integers(-9, -6, size)
    factor, shift = (builder.constant(f"n{place}", one.astype(np.int32)) for place, one in enumerate(numbers))
    standard = builder.add(FixedStandard(size, 0, 619467, centred=False), [x])
    scaled = builder.add(Requantize(Rounding.SINGLE, output_zero_point=-9), [standard, factor, shift])
    return builder.finish([builder.add(Clip(-128, 127, DType.INT8), [scaled], "y")])


def up_to(rows: int, count: int) -> Graph:
    """The places that a step attends to."""
    builder = GraphBuilder("live")
    position = builder.input("position", TensorType((rows, 1), DType.INT64))
    places = builder.constant("places", np.arange(count))
    return builder.finish([builder.add(Compare(CompareKind.LESS_OR_EQUAL), [places, position], "live")])


SILU = np.round(np.arange(-128, 128) * 30 / (1 + np.exp(-np.arange(-128, 128) / 20))).astype(np.int16)
KERNELS = {
    "gate": (gate(SILU, 11, Rounding.SINGLE, 1 << 30, -12, -17, 96), 14),
    "residual": (residual(16, 24), 21),
    "norm": (norm(16, 64), 33),
    "up to": (up_to(16, 64), 4),
}
"""Graph, and the most cycles of an element on RV32IMC; before they took 24, 26, 37 and 10."""


@pytest.mark.parametrize("name", KERNELS)
def test_cycles_of_an_element(name: str) -> None:
    """The firmware equals the graph, also at its ends, within the cycles of an element."""
    graph, most = KERNELS[name]
    rng, target = np.random.default_rng(5), load_target("riscv")
    inputs = [
        {
            value: rng.integers(-(reach >> down), (reach >> down) + 1, kind.shape).astype(kind.dtype.numpy)
            for value in graph.inputs
            for kind in (graph.types[value],)
            for reach in (70 if kind.dtype is DType.INT64 else min(kind.dtype.high, 1 << 20),)
        }
        for down in (0, 2)
    ]
    with built(compile_graph(graph, target, Options()), target) as build:
        result = run_build(build, "iss", inputs)
    for found, wanted in zip(result.outputs, evaluate_all(graph, inputs), strict=True):
        np.testing.assert_array_equal(found[graph.outputs[0]], wanted[graph.outputs[0]])
    elements = graph.types[graph.outputs[0]].elements
    cycles = min(one.total_cycles or 0 for one in result.simulation.inferences)
    assert 0 < cycles < most * elements + 300, f"{name}: {cycles / elements:.1f} cycles an element"


def test_norms_never_leave_16_bits() -> None:
    """No element is beyond the operator's reach, so that kernels need not limit it."""
    rng = np.random.default_rng(6)
    for size in (1, 2, 3, 15, 16, 63, 64, 255, 256, 1000):
        for centred in (False, True):
            operator = FixedStandard(size, 0, 1, centred)
            rows = np.concatenate([np.eye(size)[:1] * 32767, np.eye(size)[:1], -np.eye(size)[:1] * 32768])
            rows = np.concatenate([rows, rng.integers(-32768, 32768, (40, size)), rng.integers(-2, 3, (40, size))])
            assert np.abs(operator.evaluate([rows.astype(np.int16)]).astype(int)).max() <= operator.reach <= 32767


def test_views_come_first() -> None:
    """The reshape of an engine's sums, two offsets, and the joined parts of attention; the results stay."""
    rng, builder = np.random.default_rng(7), GraphBuilder("rows")
    image = builder.input("image", TensorType((1, 4, 1, 16), DType.UINT8))
    weights = builder.constant("weights", rng.integers(-9, 9, (8, 1, 1, 16)).astype(np.int8))
    bias = builder.constant("bias", rng.integers(-9, 9, 8).astype(np.int32))
    factors = [builder.constant(f"f{place}", np.array([one], np.int32)) for place, one in enumerate((1 << 30, -5))]
    sums = builder.add(Add(), [builder.add(Conv2d(), [image, weights]), bias])
    limited = builder.add(Clip(-128, 127, DType.INT8), [builder.add(Requantize(Rounding.SINGLE), [sums, *factors])])
    seen = builder.add(Reshape((4, 8)), [limited])
    twice = builder.add(Offset(-128, DType.INT8), [builder.add(Offset(128, DType.UINT8), [seen])], "twice")
    parts = list[str]()
    for number in range(2):
        ends = [
            builder.input(f"{kind}_{number}", TensorType(shape, DType.INT32))
            for kind, shape in (("sums", (1, 8, 1, 8)), ("totals", (1, 8, 1, 1)))
        ]
        parts.append(builder.add(AttentionEnd(1, 2, 2), ends))
    joined = builder.add(Requantize(Rounding.SINGLE), [builder.add(Concat(1), parts), *factors])
    graph = builder.finish([twice, builder.add(Clip(0, 255, DType.UINT8), [joined], "joined")])
    after = views_first(graph)
    kinds = [node.operator.class_name for node in after.nodes]
    assert "Offset" not in kinds and kinds.index("Reshape") == kinds.index("Conv2d") + 1
    assert kinds[-1] == "Concat" and kinds.count("Requantize") == 3
    inputs = {
        name: rng.integers(0, 256, graph.types[name].shape).astype(graph.types[name].dtype.numpy)
        for name in graph.inputs
    }
    for mine, other in zip(evaluate(after, inputs).values(), evaluate(graph, inputs).values(), strict=True):
        np.testing.assert_array_equal(mine, other)
