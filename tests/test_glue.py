"""What lies between an engine's layers: bands, pools, pixels computed as one, and jobs that walk a line of pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dovetail import legalize
from dovetail.guests.report import near
from dovetail.ir.graph import Graph, GraphBuilder, Node, evaluate, verify
from dovetail.ir.operators.arithmetic import Add, Clip, Offset, Requantize, Rounding, ScaleShift
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected, Linear
from dovetail.ir.operators.movement import Concat, Im2col, Pad, Reshape, Transpose
from dovetail.ir.operators.reduction import AveragePool2d, SumPool2d
from dovetail.ir.types import Array, DType, TensorType
from dovetail.legalize.bands import rows_of
from dovetail.legalize.pools import division
from dovetail.targets import ne16
from dovetail.targets.ne16.job import EDGE, Ne16Job, flattened, job_cycles
from networks import Net

SIDES = st.integers(1, 12)


def subtiles(job: Ne16Job) -> int:
    """Subtiles of 3x3 outputs a job walks over."""
    return -(-job.out_height // EDGE) * -(-job.out_width // EDGE)


@given(height=st.integers(1, 60), width=st.integers(1, 60), pitch=st.integers(16, 48))
def test_a_line_of_pixels_is_walked_whole_and_in_no_more_subtiles(height: int, width: int, pitch: int) -> None:
    job = Ne16Job(height, width, 16, height, width, 8, pitch, pitch * width, 40, 40 * width, kernel=1)
    line = flattened(job)
    apart, rest = divmod(line.in_row_stride, pitch)
    assert rest == 0 and line.out_row_stride == 40 * apart
    walked = {row * apart + column for row in range(line.out_height) for column in range(line.out_width)}
    assert walked == set(range(height * width))
    assert subtiles(line) <= subtiles(job) and job_cycles(line) <= job_cycles(job)


def test_rows_apart_in_memory_and_other_jobs_stay_as_they_are() -> None:
    job = Ne16Job(25, 5, 16, 25, 5, 8, 16, 80, 40, 200, kernel=1)
    assert subtiles(job) == 18 and subtiles(flattened(job)) == 15
    for other in (replace(job, in_row_stride=96), replace(job, out_row_stride=240), replace(job, kernel=3)):
        assert flattened(other) is other


def scaled(
    builder: GraphBuilder, x: str, weights: Array, random: np.random.Generator, layer: Linear | None = None
) -> str:
    """A layer, dense or a convolution by its weights, with a scale, an offset and a shift of its own for each channel,
    clipped to bytes."""
    w = builder.constant("w", weights, DType.INT8)
    layer = layer or (FullyConnected() if weights.ndim == 2 else Conv2d())
    total = builder.add(layer, [x, w], "sum")
    channels = weights.shape[layer.weight_axis]
    numbers = ((1, 255), (-1000, 30000), (9, 12))
    arrays = (random.integers(low, high, channels).astype(np.int32) for low, high in numbers)
    names = [builder.constant(f"p{index}", array, DType.INT32) for index, array in enumerate(arrays)]
    shifted = builder.add(ScaleShift(), [total, *names], "scaled")
    return builder.add(Clip(0, 255, DType.UINT8), [shifted], "bytes")


def assert_alike(before: Graph, after: Graph, random: np.random.Generator) -> None:
    """Both graphs keep the rules and give the same."""
    verify(after)
    kind = before.types["x"]
    for _ in range(2):
        x = random.integers(kind.dtype.low, kind.dtype.high + 1, kind.shape).astype(kind.dtype.numpy)
        expected, found = evaluate(before, {"x": x}), evaluate(after, {"x": x})
        np.testing.assert_array_equal(found[after.outputs[0]], expected[before.outputs[0]])


def assert_names_stay(before: Graph, after: Graph, random: np.random.Generator) -> None:
    """What a name of the first graph stands for, it stands for in the second: `--check` compares them."""
    x = random.integers(0, 256, before.types["x"].shape).astype(np.uint8)
    old, new = (
        evaluate(replace(graph, outputs=tuple(node.output for node in graph.nodes)), {"x": x})
        for graph in (before, after)
    )
    for name in old.keys() & new.keys():
        assert old[name].shape != new[name].shape or np.array_equal(old[name], new[name]), name


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 9), SIDES, st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.booleans(), st.data())
def test_pixels_as_one_are_exact(
    height: int, groups: int, count: int, channels: int, kernel: int, patches: bool, data: st.DataObject
) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    stride = data.draw(st.integers(1, 3))
    width = groups * count
    builder = GraphBuilder("net")
    if patches:
        x = builder.input("x", TensorType((1, height + kernel, (width - 1) * stride + kernel, 3), DType.UINT8))
        source = builder.add(Im2col((kernel, kernel), (1, stride)), [x], "patches")
    else:
        source = builder.input("x", TensorType((1, height, width, 3), DType.UINT8))
    depth = builder.type_of(source).shape[3]
    weights = random.integers(-128, 128, (channels, 1, 1, depth)).astype(np.int8)
    before = builder.finish([scaled(builder, source, weights, random)])
    after = legalize.pixels_as_one(lambda result, _: count if result.shape[2] == width else 1)(before)
    made = {node.operator for node in after.nodes if isinstance(node.operator, Reshape)}
    assert bool(made) == (count > 1)
    assert_alike(before, after, random)


@settings(deadline=None, max_examples=80)
@given(st.integers(1, 7), st.integers(1, 5), st.integers(0, 4), st.sampled_from((1, 3, 5)), st.booleans(), st.data())
def test_windows_as_one_are_exact(
    height: int, groups: int, count: int, kernel: int, depthwise: bool, data: st.DataObject
) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    left, inputs = data.draw(st.integers(0, kernel - 1)), data.draw(st.integers(1, 3))
    stride = data.draw(st.sampled_from((1, 2))) if count == 1 else 1
    width = groups * max(count, 1)
    border = ((0, kernel - 1, left, 0), (0, 0, kernel - 1 - left, 0))
    builder = GraphBuilder("net")
    x = builder.input("x", TensorType((1, height, width, inputs), DType.UINT8))
    padded = builder.add(Pad(*border, 131), [x], "padded") if kernel > 1 else x
    outputs = inputs if depthwise else data.draw(st.integers(1, 3))
    shape = (1, kernel, kernel, inputs) if depthwise else (outputs, kernel, kernel, inputs)
    layer = (DepthwiseConv2d if depthwise else Conv2d)((stride, stride))
    before = builder.finish([scaled(builder, padded, weights_of(shape, random), random, layer)])
    after = legalize.windows_as_one(lambda types, node: count if node == before.nodes[-3] else 0)(before)
    layers = [node for node in after.nodes if isinstance(node.operator, Conv2d | DepthwiseConv2d)]
    # windows of one tap, and those with half of it on each side, are as wide in such pixels; a further one may be
    fits = kernel == 1 or 2 * left + 1 == kernel or count <= 1
    if fits and (count > 1 or (depthwise and count == 1)):
        assert after.types[layers[0].inputs[1]].shape == (max(count, 1) * outputs, kernel, kernel, count * inputs)
    if count == 0 or (count == 1 and not depthwise):
        assert after == before
    assert_alike(before, after, random)
    assert_names_stay(before, after, random)


def first_layer(
    height: int, kernel: int, stride: int, im2col: bool, planar: bool, random: np.random.Generator
) -> Graph:
    """An int8 input with a border, offset and convolved, as patches or directly; as an image or plane by plane."""
    builder = GraphBuilder("net")
    x = builder.input("x", TensorType((1, 2, height, 7) if planar else (1, height, 7, 2), DType.INT8))
    value = builder.add(Offset(128, DType.UINT8), [x], "unsigned")
    value = builder.add(Transpose((0, 2, 3, 1)), [value], "image") if planar else value
    value = builder.add(Pad((0, 1, 0, 0), (0, 1, 2, 0), 131), [value], "padded")
    shape = (3, kernel, kernel, 2)
    if im2col:
        value = builder.add(Im2col((kernel, kernel), (stride, stride)), [value], "patches")
        shape = (3, 1, 1, kernel * kernel * 2)
    value = scaled(builder, value, weights_of(shape, random), random)
    return builder.finish([builder.add(Clip(0, 250, DType.UINT8), [value], "y")])


def weights_of(shape: tuple[int, ...], random: np.random.Generator) -> Array:
    """Random weights of 8 bits."""
    return random.integers(-128, 128, shape).astype(np.int8)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(4, 30),
    st.integers(1, 3),
    st.integers(1, 2),
    st.booleans(),
    st.booleans(),
    st.integers(1, 6),
    st.integers(0, 99),
)
def test_first_layers_in_bands_are_exact(
    height: int, kernel: int, stride: int, im2col: bool, planar: bool, count: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    before = first_layer(height, kernel, stride, im2col, planar, random)
    swapped = legalize.moves_before_offset(before)
    kinds = [type(node.operator) for node in swapped.nodes]
    assert (kinds.index(Pad) < kinds.index(Offset)) == im2col
    assert not planar or kinds.index(Transpose) < kinds.index(Offset)
    after = legalize.first_layer_in_bands(lambda types, chain: count, 3)(swapped)
    rows = swapped.types["bytes"].shape[1]
    joined = [node for node in after.nodes if isinstance(node.operator, Concat)]
    assert bool(joined) == (min(count, rows // 3) > 1)
    offset = [node for node in after.nodes if isinstance(node.operator, Offset)]
    assert not joined or len(offset) == len(joined[0].inputs), "the core does all of it before"
    assert_alike(before, after, random)


@settings(deadline=None, max_examples=20)
@given(st.integers(6, 30), st.integers(1, 3), st.integers(1, 2), st.integers(2, 5), st.booleans(), st.integers(0, 99))
def test_two_layers_in_bands_are_exact(
    height: int, kernel: int, stride: int, count: int, apart: bool, seed: int
) -> None:
    random = np.random.default_rng(seed)
    builder = GraphBuilder("net")
    value = builder.input("x", TensorType((1, height, 7, 2), DType.INT8))
    for number, side in enumerate((kernel, 3)):
        value = builder.add(Pad((0, 1, 1, 0), (0, 1, 1, 0), 0), [value], f"padded {number}")
        value = scaled(builder, value, weights_of((2, side, side, 2), random), random)
    before = builder.finish([builder.add(Clip(0, 250, DType.UINT8), [value], "y")])
    asked: list[int] = []

    def counts(types: Mapping[str, TensorType], chain: Sequence[Node]) -> int:
        asked.append(sum(isinstance(node.operator, Conv2d) for node in chain))
        return 1 if apart and asked[-1] == 2 else count

    after = legalize.first_layer_in_bands(counts, 1, laid_out=True, layers=2)(before)
    layers = [node for node in after.nodes if isinstance(node.operator, Conv2d)]
    assert asked == [2, 1] if apart else asked[0] == 2
    assert len(layers) > 2 or after.nodes == before.nodes, "a band of padding alone"
    assert_alike(before, after, random)


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 5), st.integers(8, 40), st.integers(2, 6), st.booleans(), st.booleans())
def test_pools_of_sums_in_parts_of_the_channels_are_exact(
    rows: int, channels: int, count: int, sums: bool, read_elsewhere: bool
) -> None:
    random = np.random.default_rng(channels)
    builder = GraphBuilder("net")
    x = builder.input("x", TensorType((1, rows + 2, 5, 3), DType.INT8))
    ways = []
    for kernel in (1, 3):
        padded = builder.add(Pad((0, kernel // 2, kernel // 2, 0), (0, kernel // 2, kernel // 2, 0), 0), [x])
        total = scaled(builder, padded, weights_of((channels, kernel, kernel, 3), random), random)
        ways.append(builder.add(Clip(-128, 127, DType.INT8), [total]))
    wide = [builder.add(Offset(0, DType.INT32), [way]) for way in ways]
    image = builder.add(Clip(0, 127, DType.INT8), [builder.add(Add(), wide)])
    pool = builder.add(SumPool2d((rows + 2, 5), (rows + 2, 5)), [image])
    before = builder.finish(
        [builder.add(Clip(-9000, 9000, DType.INT32), [pool]), *(ways[:1] if read_elsewhere else [])]
    )
    after = legalize.average_pool_in_channels(lambda image: count, 4, sums=sums)(before)
    pools = [node for node in after.nodes if isinstance(node.operator, SumPool2d)]
    assert (len(pools) > 1) == (sums and not read_elsewhere)
    assert_alike(before, after, random)


@given(st.integers(1, 200), st.integers(1, 12), st.integers(1, 5))
def test_bands_are_all_rows_in_order(total: int, count: int, step: int) -> None:
    rows = rows_of(total, min(count, max(total // step, 1)), step)
    assert [start for start, _ in rows] == [0, *(end for _, end in rows[:-1])] and rows[-1][1] == total
    assert all(start < end for start, end in rows)


def pooled(
    kernel: tuple[int, int], channels: int, clip: bool, layer: bool, random: np.random.Generator, ahead: str = ""
) -> Graph:
    """An average pool of a whole image as TFLite has it, its values offset as engines take them; behind a layer or two,
    the one `ahead` a convolution or a depthwise one, with a stride or without."""
    builder = GraphBuilder("net")
    stride = 2 if ahead == "stride" else 1
    size = (1, kernel[0] * stride, kernel[1] * stride, channels)
    value = builder.input("x", TensorType(size, DType.UINT8))
    if ahead:
        padded = builder.add(Pad((0, 1, 1, 0), (0, 1, 1, 0), 7), [value], "padded")
        alone = ahead == "depthwise"
        w = builder.constant("w", weights_of((1 if alone else channels, 3, 3, channels), random), DType.INT8)
        operator = DepthwiseConv2d((stride, stride)) if alone else Conv2d((stride, stride))
        total = builder.add(operator, [padded, w], "sums")
        names = [builder.constant("n", np.array([n], np.int32), DType.INT32) for n in (3, 90, 7)]
        value = builder.add(Clip(0, 255, DType.UINT8), [builder.add(ScaleShift(), [total, *names])], "first")
    if layer:
        value = scaled(builder, value, weights_of((channels, 1, 1, channels), random), random)
    value = builder.add(AveragePool2d(kernel, kernel, input_zero_point=128), [value], "mean")
    value = builder.add(Clip(-128, 100 if clip else 127, DType.INT8), [value], "clipped")
    return builder.finish([builder.add(Offset(128, DType.UINT8), [value], "y")])


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 3), st.booleans(), st.integers(0, 99))
def test_pools_of_three_by_three_become_depthwise_layers_exactly(channels: int, clip: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    before = pooled((3, 3), channels, clip, False, random)
    after = legalize.average_pool_as_depthwise(lambda types, node: True, ne16.LIMITS)(before)
    assert_names_stay(before, after, random)
    made = any(isinstance(node.operator, DepthwiseConv2d) for node in after.nodes)
    assert made != clip, "a clip within the bytes is not one the engine has"
    assert_alike(before, after, random)
    kind = before.types["x"]
    for level in range(256):  # every value of all elements, and one more or less in one of them
        x = np.full(kind.shape, level, np.uint8)
        x[0, 0, 0] = min(level + seed % 9, 255)
        np.testing.assert_array_equal(evaluate(after, {"x": x})["y"], evaluate(before, {"x": x})["y"])


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from((0, -128, 127, 5)), st.sampled_from(Rounding), st.data())
def test_pools_of_bytes_become_depthwise_layers_exactly(
    rows: int, columns: int, zero_point: int, rounding: Rounding, data: st.DataObject
) -> None:
    builder = GraphBuilder("net")
    value = builder.input("x", TensorType((1, rows, 2 * columns, 3), DType.INT8))
    value = builder.add(AveragePool2d((rows, columns), (1, columns), input_zero_point=zero_point), [value], "mean")
    before = builder.finish([builder.add(Clip(-128, 127, DType.INT8), [value], "y")])
    after = legalize.pools_as_depthwise(lambda types, node: True, rounding)(before)
    made = any(isinstance(node.operator, DepthwiseConv2d) for node in after.nodes)
    assert made or rounding is not Rounding.DOUBLE, "one rounding up is not the mean's, away from zero"
    level = data.draw(st.integers(-128, 127))
    x = np.full(before.types["x"].shape, level, np.int8)
    x.reshape(-1)[: data.draw(st.integers(0, x.size))] = data.draw(st.integers(-128, 127))
    np.testing.assert_array_equal(evaluate(after, {"x": x})["y"], evaluate(before, {"x": x})["y"])
    assert legalize.pools_as_depthwise(lambda types, node: False, rounding)(before).nodes == before.nodes


def summed(dtype: DType, rounding: Rounding, multiplier: int, shift: int, layer: bool = False) -> Graph:
    """A mean of a whole image of 3 x 3 as TFLite's MEAN has it: a sum, scaled and limited; behind a layer or not."""
    random, builder = np.random.default_rng(0), GraphBuilder("net")
    value = builder.input("x", TensorType((1, 3, 3, 4), dtype))
    value = scaled(builder, value, weights_of((4, 1, 1, 4), random), random) if layer else value
    value = builder.add(SumPool2d((3, 3), (3, 3), input_zero_point=dtype.low + 9), [value], "sums")
    names = [builder.constant("n", np.array([number], np.int32)) for number in (multiplier, shift)]
    value = builder.add(Requantize(rounding, output_zero_point=dtype.low + 20), [value, *names], "scaled")
    return builder.finish([builder.add(Clip(dtype.low, dtype.high, dtype), [value], "y")])


EVERY = range(256)
"""Every value a byte can have, less that of its type's lowest."""
NINTH = (1908874354, -3)
"""1/9 as a multiplier and a shift."""


@pytest.mark.parametrize(("multiplier", "shift"), [NINTH, (1908874354, -2), (1431655765, -2)])
def test_means_that_came_as_sums_become_depthwise_layers_too(multiplier: int, shift: int) -> None:
    takes = lambda types, node: True  # noqa: E731
    for dtype, rounding, rewrite in (
        (DType.INT8, Rounding.DOUBLE, legalize.pools_as_depthwise(takes, Rounding.DOUBLE)),
        (DType.UINT8, Rounding.SINGLE, legalize.average_pool_as_depthwise(takes, ne16.LIMITS)),
    ):
        before = summed(dtype, rounding, multiplier, shift)
        after = rewrite(before)
        assert any(isinstance(node.operator, DepthwiseConv2d) for node in after.nodes)
        for level in EVERY:
            x = np.full(before.types["x"].shape, dtype.low + level, dtype.numpy)
            x[0, 0, :2] = dtype.high - level // 3
            np.testing.assert_array_equal(evaluate(after, {"x": x})["y"], evaluate(before, {"x": x})["y"])
    twice = summed(DType.INT8, Rounding.DOUBLE, multiplier, shift)
    other = legalize.pools_as_depthwise(takes, Rounding.SINGLE)(twice)
    assert all(not isinstance(node.operator, DepthwiseConv2d) for node in other.nodes), "the engine rounds otherwise"


def test_means_that_came_as_sums_are_computed_in_bands_too() -> None:
    before = summed(DType.UINT8, Rounding.SINGLE, *NINTH, layer=True)
    after = legalize.average_pool_in_bands(lambda types, chain: ((0, 1), (1, 3)))(before)
    assert [node.operator.kernel for node in after.nodes if isinstance(node.operator, SumPool2d)] == [(1, 3), (2, 3)]
    for level in EVERY:
        x = np.random.default_rng(level).integers(0, level + 1, before.types["x"].shape).astype(np.uint8)
        np.testing.assert_array_equal(evaluate(after, {"x": x})["y"], evaluate(before, {"x": x})["y"])


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 26), SIDES, st.booleans(), st.sampled_from(("", "layer", "depthwise", "stride")), st.data())
def test_pools_in_bands_are_exact(height: int, width: int, clip: bool, ahead: str, data: st.DataObject) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    before = pooled((height, width), 4, clip, True, random, ahead)
    ends = sorted(data.draw(st.sets(st.integers(1, height - 1), max_size=4)))
    told: list[int] = []

    def spans(types: Mapping[str, TensorType], chain: Sequence[Node]) -> list[tuple[int, int]]:
        told.append(sum(isinstance(node.operator, Conv2d | DepthwiseConv2d) for node in chain))
        return list(pairwise((0, *ends, height)))

    after = legalize.average_pool_in_bands(spans)(before)
    sums = sum(isinstance(node.operator, SumPool2d) for node in after.nodes)
    assert set(told) == {2 if ahead else 1}, "the layer in front is in the bands too"
    assert_names_stay(before, after, random)
    if clip or not ends:
        assert sums == 0
    else:
        assert sums == len(ends) + 1 or height * width > 256  # the mean of 264 has no exact division
    layers = [node for node in after.nodes if isinstance(node.operator, Conv2d | DepthwiseConv2d | SumPool2d)]
    each = told[0]
    assert sums == 0 or [isinstance(node.operator, SumPool2d) for node in layers[: 2 * each + 1]] == [False] * (
        2 * each
    ) + [True], "a band is summed behind the layers of the next"
    assert_alike(before, after, random)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 9), st.lists(st.integers(1, 40), min_size=9, max_size=9), st.integers(0, 30), st.integers(0, 30))
@example(9, [5] * 9, 0, 0)  # the core is slower: the engine waits for it
@example(9, [1, 30, 1, 30, 1, 30, 1, 30, 1], 3, 9)
@example(8, [3] * 9, 20, 1)
@example(3, [22, 22, 1, 1, 1, 1, 1, 1, 1], 0, 0)  # two bands end as soon as three
def test_bands_behind_an_engine_end_as_soon_as_any(total: int, row: list[int], more: int, each: int) -> None:
    """Against all ways of cutting, each walked band by band."""

    def engine(rows: int) -> int:
        return more + sum(row[:rows])

    def core(rows: int) -> int:
        return each + 11 * rows

    def end(spans: Sequence[tuple[int, int]]) -> float:
        sizes = [stop - start for start, stop in spans]
        computed, handled = [0.0] * len(sizes), [0.0] * len(sizes)
        for band, rows in enumerate(sizes):  # a band is launched when the one before the last has been handled
            free = max(computed[band - 1], handled[band - 2] if band > 1 else 0.0) if band else 0.0
            computed[band] = free + engine(rows)
            handled[band] = max(computed[band], handled[band - 1] if band else 0.0) + core(rows)
        return handled[-1]

    ways = [
        list(pairwise((0, *ends, total))) for count in range(total) for ends in combinations(range(1, total), count)
    ]
    found = legalize.bands_behind(total, engine, core)
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])] and found[-1][1] == total
    assert end(found) == min(map(end, ways))
    assert len(found) == min(len(way) for way in ways if end(way) == end(found))


def test_large_images_begin_bands_at_few_places() -> None:
    found = legalize.bands_behind(300, lambda rows: 10.0 * rows, lambda rows: 9.0 * rows)
    assert found[0][0] == 0 and found[-1][1] == 300 and all(start % 10 == 0 for start, _ in found)


@settings(deadline=None, max_examples=20)
@given(
    st.integers(1, 5),
    st.integers(1, 40),
    st.integers(1, 6),
    st.sampled_from((4, 8)),
    st.sampled_from((1, 3)),
    st.booleans(),
)
def test_pools_in_parts_of_the_channels_are_exact(
    rows: int, channels: int, count: int, step: int, kernel: int, read_elsewhere: bool
) -> None:
    net = Net("net", (rows + 2, 5, 3), zero_point=-3, seed=channels)
    image = net.convolution(net.x, channels, kernel)
    pool = AveragePool2d((rows + 2, 5), (rows + 2, 5), input_zero_point=-3)
    mean = net.builder.add(Clip(-100, 90, DType.INT8), [net.builder.add(pool, [image])])
    before = net.finish(mean, *([image] if read_elsewhere else []))
    after = legalize.average_pool_in_channels(lambda image: count, step)(before)
    pools = [node for node in after.nodes if isinstance(node.operator, AveragePool2d)]
    assert len(pools) == (1 if read_elsewhere or min(count, channels // step) < 2 else min(count, channels // step))
    order = [type(node.operator) for node in after.nodes if isinstance(node.operator, AveragePool2d | Conv2d)]
    assert len(pools) == 1 or order[:3] == [Conv2d, Conv2d, AveragePool2d], "a layer before the pool of the one before"
    assert_alike(before, after, np.random.default_rng(rows))


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 90), st.integers(1, 6), st.sampled_from((4, 8)), st.booleans())
def test_last_layers_in_parts_are_exact(channels: int, count: int, step: int, read_elsewhere: bool) -> None:
    random, builder = np.random.default_rng(channels), GraphBuilder("net")
    x = builder.input("x", TensorType((1, 7), DType.UINT8))
    value = scaled(builder, x, weights_of((channels, 7), random), random)
    result = builder.add(Offset(-128, DType.INT8), [value], "y")
    before = builder.finish([result, *([value] if read_elsewhere else [])])
    after = legalize.last_layer_in_parts(lambda kind: count, step)(before)
    order = [type(node.operator) for node in after.nodes if isinstance(node.operator, FullyConnected | Offset)]
    parts = 1 if read_elsewhere or min(count, channels // step) < 2 else min(count, channels // step)
    assert len(order) == 2 * parts
    assert parts == 1 or order[:3] == [FullyConnected, FullyConnected, Offset], "a layer before the offset behind one"
    assert_alike(before, after, random)


@pytest.mark.parametrize("taps", [1, 2, 4, 5, 9, 16, 25, 64, 125, 256])
def test_a_division_is_right_for_every_sum(taps: int) -> None:
    wanted = (np.arange(255 * taps + 1) + taps // 2) // taps
    wide = legalize.RequantisationLimits(20, 24)
    for limits, kinds in ((ne16.LIMITS, (DType.INT2, DType.INT4, DType.INT8)), (wide, (DType.INT2,))):
        found = division(wanted, taps, limits, kinds)
        if found is None:
            assert limits is ne16.LIMITS and taps > 9
            continue
        weight, _, (scale, offset, shift) = found
        sums = np.arange(255 * taps + 1, dtype=np.int64) * weight
        np.testing.assert_array_equal(np.clip((sums * scale + offset) >> shift, 0, 255), wanted)
    odd = wanted.copy()
    odd[len(odd) // 2] += 2  # no line passes through that
    assert division(odd, taps, wide, (DType.INT2,)) is None


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from(((0, 127), (0, 90), (-3, 127))),
    st.integers(1 << 30, (1 << 31) - 1),
    st.integers(-9, 0),
    st.sampled_from(Rounding),
    st.booleans(),
)
def test_pools_in_words_are_exact(
    height: int,
    width: int,
    limits: tuple[int, int],
    multiplier: int,
    shift: int,
    rounding: Rounding,
    read_elsewhere: bool,
) -> None:
    random, builder = np.random.default_rng(multiplier % 99), GraphBuilder("net")
    x = builder.input("x", TensorType((1, height, width, 4), DType.INT8))
    image = builder.add(Clip(*limits, DType.INT8), [x], "image")
    total = builder.add(SumPool2d((height, width), (height, width)), [image], "total")
    numbers = [
        builder.constant(name, np.array([n], np.int32), DType.INT32) for name, n in (("m", multiplier), ("s", shift))
    ]
    scaled = builder.add(Requantize(rounding), [total, *numbers], "scaled")
    y = builder.add(Clip(-128, 127, DType.INT8), [scaled], "y")
    before = builder.finish([y, *([image] if read_elsewhere else [])])
    after = legalize.pools_in_words(before)
    verify(after)
    (pool,) = (node for node in after.nodes if isinstance(node.operator, SumPool2d))
    is_bytes = limits[0] >= 0 and not read_elsewhere
    assert (after.types[pool.inputs[0]].dtype is DType.UINT8) == is_bytes
    assert is_bytes or not any(isinstance(node.operator, ScaleShift) for node in after.nodes)
    full = np.full((1, height, width, 4), 127, np.int8)
    for given_x in (full, full * 0, random.integers(-128, 128, full.shape).astype(np.int8), full - np.int8(1)):
        expected, found = evaluate(before, {"x": given_x}), evaluate(after, {"x": given_x})
        np.testing.assert_array_equal(found["y"], expected["y"])


def test_the_mean_of_a_pool_in_words_has_32_bits() -> None:
    """A mean of 125 elements, as DS-CNN has it: the sum is scaled in 32 bits, for every sum there can be."""
    builder = GraphBuilder("net")
    x = builder.input("x", TensorType((1, 25, 5, 1), DType.UINT8))
    total = builder.add(SumPool2d((25, 5), (25, 5)), [x], "total")
    multiplier, shift = round((1 << 37) / 125), -6
    numbers = [
        builder.constant(name, np.array([n], np.int32), DType.INT32) for name, n in (("m", multiplier), ("s", shift))
    ]
    scaled = builder.add(Requantize(Rounding.DOUBLE), [total, *numbers], "scaled")
    before = builder.finish([builder.add(Clip(-128, 127, DType.INT8), [scaled], "y")])
    after = legalize.pools_in_words(before)
    assert [type(node.operator) for node in after.nodes] == [SumPool2d, Clip, ScaleShift, Clip]
    for level in range(0, 255 * 125 + 1, 7):
        each, more = divmod(level, 125)
        given_x = np.full(125, each, np.uint8)
        given_x[:more] += 1
        given_x = given_x.reshape(1, 25, 5, 1)
        assert evaluate(after, {"x": given_x})["y"] == evaluate(before, {"x": given_x})["y"]


def layer_of(name: str, engine: str, busy: int | None, moving: int | None, core: int, reason: str) -> dict[str, object]:
    """A layer of a report's JSON, as far as `near` reads it."""
    spent = {"peak": busy or 0, "below_peak": 0, "transfers": 0, "core": core}
    found = {"name": name, "engine": engine, "engine_cycles": busy, "dma_cycles": moving, "launches": int(bool(busy))}
    return {
        **found,
        "spent": spent,
        "time": (busy or 0) + core,
        "gap": "why",
        "nothing": False,
        "why_not_offloaded": reason,
        "bound": 1.0,
        "bound_by": "products",
        "least": busy,
    }


def test_a_report_names_the_core_s_passes_beside_an_engine() -> None:
    layers = [
        layer_of("offset_0", "core", None, 0, 300, "no engine has a pattern that ends in Offset"),
        layer_of("conv_1", "ne16", 1000, 400, 100, ""),
        layer_of("softmax_2", "core", None, 0, 50, ""),
        layer_of("argmax_3", "core", None, 0, 10, ""),
    ]
    edges = [{"makes": str(number + 1), "reads": [str(number)]} for number in range(4)]
    cycles = {"total": 1460, "core": 500, "ne16": 1000, "dma": 400}
    groups = [{**layer, "layers": [number]} for number, layer in enumerate(layers)]
    data = {"layers": layers, "groups": groups, "graph": {"edges": edges}, "cycles": cycles, "bound": None}
    assert [row[8] for row in near.rows(data)] == ["1.00", "1.10", "1.00", "1.00"]
    first, second = near.beside(data)
    assert first.startswith("offset_0, 300 cycles") and "fused into conv_1: no, because no engine has" in first
    assert second.startswith("softmax_2") and "into conv_1" in second
    assert near.whole(data) == "1,460 cycles, 1.460 times the 1,000 of ne16, which is busy longest"
