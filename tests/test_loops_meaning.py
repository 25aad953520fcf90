"""The loops of a region compute what its graph says, and VTA's instructions what the loops say: numbers compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dovetail.ir.graph import Graph, GraphBuilder, evaluate
from dovetail.ir.operators.arithmetic import Clip, ScaleShift
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Pad
from dovetail.ir.operators.reduction import MaxPool2d
from dovetail.ir.types import Array, DType, TensorType
from dovetail.loops import Algorithm, Lanes, Procedure, algorithm, digit_rows, digits, memory, ones, procedure
from dovetail.loops.procedures import parsed, procedure_text
from dovetail.targets.vta.mapping import _ORDER, instruction, schedule
from test_loops_evaluator import compiled

FIXED = settings(derandomize=True, deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
FEW = settings(FIXED, max_examples=12, phases=[Phase.generate])  # schedules take seconds: no search for less


Run = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Case:
    """A region to be made."""

    kind: str
    """conv, depthwise, dense or pool."""
    image: tuple[int, int]
    channels: int
    outputs: int
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] | None = None
    """Above, below, left, right."""
    per_channel: bool = False
    bias: bool = False
    seed: int = 0


@st.composite
def cases(draw: st.DrawFn, /, kind: str, **fixed: Any) -> Case:
    """Small regions; what is fixed is not drawn."""
    small = st.integers(1, 3)
    kernel = draw(st.tuples(small, small))
    pads = draw(st.one_of(st.none(), st.tuples(*[st.integers(0, 2)] * 4))) if kind != "pool" else None
    values: dict[str, Any] = {
        "kernel": kernel,
        "pads": pads,
        "stride": draw(st.tuples(small, small)),
        "image": tuple(size + draw(st.integers(0, 3)) for size in kernel),
        "channels": draw(st.integers(1, 9)),
        "outputs": draw(st.integers(1, 9)),
        "per_channel": draw(st.booleans()),
        "bias": draw(st.booleans()),
        "seed": draw(st.integers(0, 99)),
    }
    if fixed.get("pads") is True:
        fixed = {**fixed, "pads": draw(st.tuples(*[st.integers(0, 2)] * 4))}
    return Case(kind, **{**values, **fixed})


def region(case: Case, images: int) -> Graph:
    """The graph of a case."""
    random = np.random.default_rng(case.seed)
    builder = GraphBuilder("region")
    shape = (images, case.channels) if case.kind == "dense" else (images, *case.image, case.channels)
    x = builder.input("x", TensorType(shape, DType.INT8))
    if case.kind == "pool":
        return builder.finish([builder.add(MaxPool2d(case.kernel, case.stride), [x])])
    if case.pads is not None and case.kind != "dense":
        top, bottom, left, right = case.pads
        x = builder.add(Pad((0, top, left, 0), (0, bottom, right, 0)), [x])
    outputs = case.channels if case.kind == "depthwise" else case.outputs
    operator, weights = {
        "conv": (Conv2d(case.stride), (outputs, *case.kernel, case.channels)),
        "depthwise": (DepthwiseConv2d(case.stride), (1, *case.kernel, outputs)),
        "dense": (FullyConnected(), (outputs, case.channels)),
    }[case.kind]
    w = builder.constant("w", random.integers(-128, 128, weights).astype(np.int8))
    scale = random.integers(1, 300, outputs if case.per_channel else 1).astype(np.int32)
    bias = random.integers(-20000, 20000, outputs).astype(np.int32)
    offset = np.broadcast_to(bias * scale if case.bias else 0 * scale, outputs).astype(np.int32)
    shift = random.integers(12, 16, outputs if case.per_channel else 1).astype(np.int32)
    if case.bias:
        scale, shift = (np.broadcast_to(v, outputs).copy() for v in (scale, shift))
    names = [builder.constant(stem, v) for stem, v in (("scale", scale), ("offset", offset), ("shift", shift))]
    scaled = builder.add(ScaleShift(), [builder.add(operator, [x, w]), *names])
    return builder.finish([builder.add(Clip(-100, 127, DType.INT8), [scaled])])


def filled(array: Array, axis: int, block: int) -> Array:
    """Numbers of no meaning up to a whole block."""
    widths = [(0, -array.shape[axis] % block if place == axis % array.ndim else 0) for place in range(array.ndim)]
    return np.pad(array, widths, constant_values=1)


def in_blocks(image: Array, block: int) -> Array:
    """NHWC or NC as [block of channels, row, column, image, lane]."""
    whole = filled(image if image.ndim == 4 else image[:, None, None, :], 3, block)
    return np.ascontiguousarray(whole.reshape(*whole.shape[:3], -1, block).transpose(3, 1, 2, 0, 4))


def rows_of(values: Array, channels: int, lanes: Lanes) -> Array:
    """One value per channel as [block, image, lane]."""
    whole = filled(np.broadcast_to(values, channels), 0, lanes.block).reshape(-1, 1, lanes.block)
    return np.repeat(whole, lanes.batch, axis=1)


def weight_blocks(weights: Array, kind: str, block: int) -> Array:
    """Weights as the algorithm's arguments say, zero where a channel is filled up."""
    if kind == "depthwise":
        _, height, width, channels = weights.shape
        made = np.zeros((-(-channels // block), height, width, block, block), np.int8)
        for channel in range(channels):
            made[channel // block, :, :, channel % block, channel % block] = weights[0, :, :, channel]
        return made
    if kind == "dense":
        weights = weights[:, None, None, :]
    outputs, height, width, channels = weights.shape
    made = np.zeros((-(-outputs // block), -(-channels // block), height, width, block, block), np.int8)
    for out in range(outputs):
        for channel in range(channels):
            made[out // block, channel // block, :, :, out % block, channel % block] = weights[out, :, :, channel]
    return made


def arguments(case: Case, graph: Graph, loops: Algorithm, lanes: Lanes, x: Array) -> dict[str, Any]:
    """Every argument of the region's loops but the result."""
    values: dict[str, Any] = {**loops.sizes, "x": in_blocks(x, lanes.block), "low": -100, "high": 127}
    values["least_value"] = -128
    if case.kind == "pool":
        return {**values, "identity": np.eye(lanes.block, dtype=np.int8)}
    constants = {name.split("_")[0]: array for name, array in graph.constants.items()}
    channels = graph.types[graph.outputs[0]].shape[-1]
    values["w"] = weight_blocks(constants["w"], case.kind, lanes.block)
    for name in ("scale", "shift"):
        uniform = (constants[name] == constants[name].flat[0]).all()
        values[name] = int(constants[name].flat[0]) if uniform else rows_of(constants[name], channels, lanes)
    bias = constants["offset"] // constants["scale"]
    if (case.kind == "dense" and bias.any()) or digit_rows(bias, lanes.block) > 1:
        values["bias"] = rows_of(bias, channels, lanes)
    elif bias.any():
        assert loops.sizes["D"] == 1
        made = filled(digits(bias, loops.sizes["D"], lanes.block), 0, lanes.block)
        values["digits"] = made.reshape(-1, lanes.block, loops.sizes["D"], lanes.block).transpose(0, 2, 1, 3)
        values["one"] = np.repeat(ones(loops.sizes["D"], lanes.block)[:, None], lanes.batch, axis=1)
    return values


@cache
def algorithm_run(text: str) -> Run:
    """Loops as a function of their arguments by name."""
    return by_name(procedure(text, {}))


@cache
def scheduled(text: str, lanes: Lanes, stride: tuple[int, int]) -> tuple[Procedure, Run]:
    """The same after VTA's schedule, made anew and then read back from its text."""
    known = {name: instruction(name, lanes.batch, lanes.block, stride) for name in _ORDER}
    made = schedule(text, lanes.batch, lanes.block, list(known.values()))
    again = parsed(procedure_text(made), {**known, **{name: memory(name) for name in ("INP", "WGT", "ACC")}})
    assert procedure_text(again) == procedure_text(made)
    return again, by_name(made)


def by_name(made: Procedure) -> Run:
    """A procedure as a function of its arguments by name."""
    names, run = [argument.name() for argument in made.args()], compiled(made)
    return lambda values: run(*(values[name] for name in names))


def prepared(case: Case, lanes: Lanes) -> tuple[str, Mapping[str, Any], Array]:
    """Text, arguments and the expected result in blocks, with rubbish in the lanes beyond the channels."""
    graph = region(case, lanes.batch)
    loops = algorithm(graph, lanes)
    kind = graph.types["x"]
    x = np.random.default_rng(case.seed + 1).integers(-128, 128, kind.shape).astype(np.int8)
    expected = evaluate(graph, {"x": x})[graph.outputs[0]]
    return loops.text, arguments(case, graph, loops, lanes, x), expected


def result_of(run: Run, values: Mapping[str, Any], expected: Array, lanes: Lanes) -> Array:
    """The result of loops as NHWC or NC."""
    y = np.zeros_like(in_blocks(expected, lanes.block))
    run({**values, "y": y})
    image = y.transpose(3, 1, 2, 0, 4).reshape(*y.shape[3:4], *y.shape[1:3], -1)[..., : expected.shape[-1]]
    return image.reshape(expected.shape)


@pytest.mark.parametrize(
    ("kind", "lanes"),
    [
        ("conv", Lanes(4)),
        ("depthwise", Lanes(4)),
        ("dense", Lanes(4, 2)),
        ("pool", Lanes(3, 2)),
    ],
    ids=["conv", "depthwise", "dense", "pool"],
)
def test_the_loops_of_a_region_compute_what_the_graph_says(kind: str, lanes: Lanes) -> None:
    seen = set()

    @FIXED
    @given(cases(kind))
    def check(case: Case) -> None:
        text, values, expected = prepared(case, lanes)
        seen.add(text)
        assert np.array_equal(result_of(algorithm_run(text), values, expected, lanes), expected)

    check()
    assert len(seen) >= 4  # bias, scale and stride each change the loops


@pytest.mark.parametrize("depth", [1, 2, 3, 6])
def test_a_dense_layer_may_take_several_blocks_at_a_time(depth: int) -> None:
    lanes = Lanes(3, 2)
    case = Case("dense", (1, 1), 17, 5, (1, 1), bias=True)
    graph = region(case, lanes.batch)
    loops = algorithm(graph, lanes, None, depth)
    x = np.random.default_rng(3).integers(-128, 128, (2, 17)).astype(np.int8)
    values = arguments(case, graph, loops, lanes, x)
    values["x"] = values["x"].reshape(6 // depth, depth, 1, 2, 3)
    values["w"] = values["w"].reshape(2, 6 // depth, depth, 1, 3, 3)
    expected = evaluate(graph, {"x": x})[graph.outputs[0]]
    assert np.array_equal(result_of(algorithm_run(loops.text), values, expected, lanes), expected)


SCHEDULED: Mapping[str, tuple[dict[str, Any], Lanes]] = {
    "convolution": ({"kind": "conv", "pads": True, "stride": (2, 1), "per_channel": True, "bias": True}, Lanes(4)),
    "depthwise": ({"kind": "depthwise", "pads": None, "stride": (1, 2), "per_channel": False, "bias": False}, Lanes(4)),
    "padded depthwise": (
        {"kind": "depthwise", "pads": True, "stride": (1, 1), "per_channel": False, "bias": False},
        Lanes(3),
    ),
    "dense": ({"kind": "dense", "pads": None, "stride": (1, 1), "per_channel": False, "bias": True}, Lanes(4, 2)),
    "pool": ({"kind": "pool", "stride": (2, 3)}, Lanes(3)),
}


@pytest.mark.parametrize("name", SCHEDULED)
def test_the_instructions_of_vta_compute_what_the_loops_say(name: str) -> None:
    fixed, lanes = SCHEDULED[name]
    changed = False

    @FEW
    @given(cases(**fixed))
    def check(case: Case) -> None:
        nonlocal changed
        text, values, expected = prepared(case, lanes)
        if name == "convolution" and case.outputs == 1:
            return  # a parameter of one channel is the same for all: other loops
        whole = np.zeros_like(in_blocks(expected, lanes.block))
        other = whole.copy()
        algorithm_run(text)({**values, "y": whole})
        again, run = scheduled(text, lanes, case.stride)
        run({**values, "y": other})
        assert np.array_equal(whole, other)
        other[...] = 0
        by_name(again)({**values, "y": other})
        assert np.array_equal(whole, other)
        changed = changed or bool(whole.any())

    check()
    assert changed
