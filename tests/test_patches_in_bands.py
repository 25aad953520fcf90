"""Layers of patches in bands: exact, in an order in which the engine always has something to compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail import legalize
from dovetail.guests.tune.measure import measured
from dovetail.ir.graph import Graph, GraphBuilder, Node
from dovetail.ir.operators.arithmetic import Clip, Offset, ScaleShift
from dovetail.ir.operators.linear import Conv2d
from dovetail.ir.operators.movement import Concat, Im2col, Pad, Slice
from dovetail.ir.types import DType, TensorType
from dovetail.legalize import adapt
from dovetail.targets import load_target
from firmware import require_chip
from networks import Net
from test_glue import assert_alike, assert_names_stay, scaled, weights_of


def strided(rows: int, columns: int, shortcut: bool, read_elsewhere: bool, seed: int) -> Graph:
    """A 1x1 layer's image, padded below and on the right, as patches of a strided 3x3 layer. These may be read
    elsewhere, and there may be a strided 1x1 layer of the same image beside it, joined with it."""
    random, builder = np.random.default_rng(seed), GraphBuilder("net")
    x = builder.input("x", TensorType((1, 2 * rows, 2 * columns, 3), DType.UINT8))
    image = scaled(builder, x, weights_of((4, 1, 1, 3), random), random)
    padded = builder.add(Pad((0, 0, 0, 0), (0, 1, 1, 0), 17), [image], "padded")
    patches = builder.add(Im2col((3, 3), (2, 2)), [padded], "patches")
    result = scaled(builder, patches, weights_of((5, 1, 1, 36), random), random)
    if shortcut:
        some = builder.add(Slice((0, 0, 0, 0), (1, 2 * rows, 2 * columns, 4), (1, 2, 2, 1)), [image], "some")
        other = scaled(builder, some, weights_of((5, 1, 1, 4), random), random)
        result = builder.add(Concat(3), [result, other], "both")
    return builder.finish([result, *([patches] if read_elsewhere else [])])


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 9), st.integers(1, 4), st.booleans(), st.booleans(), st.data())
def test_patches_in_bands_are_exact_and_come_behind_what_needs_none(
    rows: int, columns: int, shortcut: bool, read_elsewhere: bool, data: st.DataObject
) -> None:
    ends = sorted(data.draw(st.sets(st.integers(1, rows)).map(lambda some: some | {rows})))
    cut, told = list(pairwise((0, *ends))), list[Sequence[Node]]()

    def spans(types: Mapping[str, TensorType], chain: Sequence[Node], beside: Sequence[Node]) -> list[tuple[int, int]]:
        told.append(beside)
        return cut

    before = strided(rows, columns, shortcut, read_elsewhere, rows)
    after = legalize.patches_in_bands(spans)(before)
    gathered = [node for node in after.nodes if isinstance(node.operator, Im2col)]
    assert len(gathered) == (1 if read_elsewhere else len(cut)) and bool(told) != read_elsewhere
    if len(gathered) > 1:
        kinds = [type(node.operator) for node in told[0]]
        assert kinds == ([Slice, Conv2d, ScaleShift, Clip] if shortcut else [])
        layers = [node for node in after.nodes if isinstance(node.operator, Conv2d)]
        assert not shortcut or layers[1].inputs[0] == "some", "the layer without patches comes first"
        place = {node.output: place for place, node in enumerate(after.nodes)}
        starts = [place[node.output] for node in layers[1 + shortcut :]]
        for band, node in enumerate(gathered):  # one band ahead of the engine, no further
            assert place[node.output] < starts[band] and (band < 2 or place[node.output] > starts[band - 2])
    assert_alike(before, after, np.random.default_rng(rows))
    assert_names_stay(before, after, np.random.default_rng(rows))


def test_patches_of_what_the_core_still_works_on_stay_whole() -> None:
    random, builder = np.random.default_rng(0), GraphBuilder("net")
    x = builder.input("x", TensorType((1, 9, 9, 3), DType.INT8))
    raised = builder.add(Offset(128, DType.UINT8), [x], "raised")
    patches = builder.add(Im2col((3, 3), (2, 2)), [raised], "patches")
    before = builder.finish([scaled(builder, patches, weights_of((5, 1, 1, 27), random), random)])
    assert legalize.patches_in_bands(lambda types, chain, beside: [(0, 2), (2, 4)])(before) == before


@given(st.integers(1, 9), st.lists(st.integers(0, 30), min_size=9, max_size=9), *[st.integers(0, 30) for _ in range(3)])
def test_bands_ahead_of_an_engine_end_as_soon_as_any(
    total: int, row: list[int], more: int, each: int, busy: int
) -> None:
    """Against all ways of cutting, each walked band by band."""

    def engine(rows: int) -> int:
        return more + sum(row[:rows])

    def moved(rows: int) -> int:
        return each + 11 * rows

    def end(spans: Sequence[tuple[int, int]]) -> float:
        there, computed = 0, busy
        for start, stop in spans:
            there += moved(stop - start)
            computed = max(there, computed) + engine(stop - start)
        return computed

    ways = [
        list(pairwise((0, *ends, total))) for count in range(total) for ends in combinations(range(1, total), count)
    ]
    cycles, found = legalize.bands_ahead(total, moved, engine, busy)
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])] and found[-1][1] == total
    assert end(found) == cycles == min(map(end, ways))
    assert len(found) == min(len(way) for way in ways if end(way) == cycles)


@pytest.mark.parametrize("channels", [32, 48])
def test_a_strided_layer_takes_fewer_cycles_as_patches(channels: int) -> None:
    """On `iss`, where its outputs are compared with the integer graph, and the engine's cycles are those of its RTL."""
    require_chip()
    target, net = load_target("ne16"), Net("net", (32, 32, 16), zero_point=-3, seed=channels)
    image = net.convolution(net.x, 16, 1)
    graph, policy = net.finish(net.convolution(image, channels, 3, stride=2)), target.policy(None)
    without = replace(policy, rewrites=tuple(one for one in policy.rewrites if one.name != "strided patches"))
    patches, launches = (adapt(graph, one) for one in (policy, without))
    strides = [
        [node.operator.stride for node in one.nodes if isinstance(node.operator, Conv2d)] for one in (patches, launches)
    ]
    assert strides[0] == [(1, 1)] * len(strides[0]) and strides[1][-1] == (2, 2)
    cycles = [measured(one, target, None, {}) for one in (patches, launches)]
    print(f"{channels} channels: {cycles[0]:,} cycles, {cycles[1]:,} in launches of 2x2 outputs")
    assert cycles[0] < cycles[1] - 1000


def test_patches_that_do_not_fit_beside_the_image_are_not_made() -> None:
    """A sweep over L1 changes the memory alone: the rewrite is told."""
    target, net = load_target("ne16"), Net("net", (32, 32, 16), zero_point=-3, seed=1)
    graph = net.finish(net.convolution(net.convolution(net.x, 16, 1), 32, 3, stride=2))
    fits = 2 * 34 * 34 * 16 + 16 * 16 * (9 * 16 + 32)

    def strides(size: int) -> set[tuple[int, int]]:
        memories = tuple(replace(one, size=size) if one.name == "L1" else one for one in target.memories)
        changed = replace(target, memories=memories)
        assert (changed == target) == (size == target.memory("L1").size)
        nodes = adapt(graph, changed.policy(None)).nodes
        return {node.operator.stride for node in nodes if isinstance(node.operator, Conv2d)}

    assert strides(fits) == strides(target.memory("L1").size) == {(1, 1)}
    assert strides(fits - 1) == {(1, 1), (2, 2)}
