"""Layouts, views and copies between layouts, against what each says element by element."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.ir.layout import (
    Layout,
    blocked,
    from_notation,
    from_physical,
    nbytes,
    physical_shape,
    row_major,
    same_bytes,
    to_physical,
)
from dovetail.ir.types import Array, DType, Shape, TensorType, box_slices
from dovetail.program.ir import Copy, View, dense_view, load, store
from dovetail.program.transfers import Transfer, strips, transfers

CHANNELS = blocked((0, 3, 1, 2), 3, 16)
"""Blocks of 16 channels."""


@st.composite
def layouts(draw: st.DrawFn, rank: int | None = None) -> Layout:
    """Any layout of up to four axes, each in up to three steps, some within blocks counting down."""
    rank = rank or draw(st.integers(1, 4))
    dims: list[tuple[int, int]] = []
    within: list[tuple[int, int]] = []
    for axis in range(rank):
        step = 1
        dims.append((axis, step))
        for factor in draw(st.lists(st.integers(2, 4), max_size=2)):
            within.append((axis, step))
            step *= factor
            dims.append((axis, step))
    down = [dimension for dimension in within if draw(st.booleans())]
    order = draw(st.permutations(dims))
    return Layout(tuple(order), tuple(dimension for dimension in order if dimension in down))


@st.composite
def shaped(draw: st.DrawFn) -> tuple[Layout, Shape]:
    """A layout and a shape for it."""
    layout = draw(layouts())
    return layout, tuple(draw(st.lists(st.integers(1, 9), min_size=layout.rank, max_size=layout.rank)))


def place(layout: Layout, shape: Shape, index: Shape) -> int:
    """Offset of an element, in elements, as the convention says it: one physical index after the other."""
    offset = 0
    for size, (axis, step) in zip(physical_shape(layout, shape), layout.dims, strict=True):
        coarser = min((other for a, other in layout.dims if a == axis and other > step), default=None)
        number = index[axis] // step if coarser is None else index[axis] // step % (coarser // step)
        offset = offset * size + (size - 1 - number if (axis, step) in layout.backwards else number)
    return offset


def numbered(shape: Shape) -> Array:
    """Every element another number, none of them 0."""
    return np.arange(1, prod(shape) + 1, dtype=np.int32).reshape(shape)


@given(shaped())
def test_physical_order(case: tuple[Layout, Shape]) -> None:
    layout, shape = case
    array = numbered(shape)
    physical = to_physical(array, layout)
    assert physical.shape == physical_shape(layout, shape)
    assert nbytes(layout, TensorType(shape, DType.INT32)) == 4 * physical.size
    flat = physical.reshape(-1)
    for index in np.ndindex(shape):
        assert flat[place(layout, shape, index)] == array[index]
    assert np.count_nonzero(flat) == array.size, "padding is zero"
    np.testing.assert_array_equal(from_physical(physical, layout, shape), array)


@given(layouts())
def test_notation_both_ways(layout: Layout) -> None:
    assert from_notation(str(layout)) == layout


def test_notation_of_people() -> None:
    assert str(CHANNELS) == "N C/16 H W 16c"
    assert CHANNELS.dims == ((0, 1), (3, 16), (1, 1), (2, 1), (3, 1))
    assert str(row_major(4)) == "N H W C" and row_major(4).is_row_major
    assert from_notation("N C/16 H 4c/4 W 4c").dims == ((0, 1), (3, 16), (1, 1), (3, 4), (2, 1), (3, 1))
    words = from_notation("N C H W/16 4w/4 -4w")
    assert words == Layout(((0, 1), (3, 1), (1, 1), (2, 16), (2, 4), (2, 1)), backwards=((2, 1),))
    for text in ("", "-N C H W", "N H W", "N C/16 H W 8c", "N C/16 H W", "Q W H C", "N-H"):
        with pytest.raises(ValueError):
            from_notation(text)


@pytest.mark.parametrize(
    "dims",
    [
        ((0, 1), (2, 1)),
        ((0, 2),),
        ((0, 4), (0, 3), (0, 1)),
        ((0, 1), (0, 1)),
        ((0, 0), (0, 1)),
        ((1, 1),),
    ],
)
def test_no_layout(dims: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match=r"axes|steps"):
        Layout(dims)


def test_only_what_lies_within_a_block_counts_down() -> None:
    for dimension in ((0, 4), (0, 2), (1, 1)):
        with pytest.raises(ValueError, match="not within a block"):
            Layout(((0, 4), (0, 1)), (dimension,))


def test_bytes_swapped_in_words() -> None:
    """Rows of 5 pixels, padded to 8: each word of four the other way round."""
    layout = from_notation("N C H W/4 -4w")
    array = np.arange(1, 11, dtype=np.int8).reshape(1, 2, 5, 1)
    assert to_physical(array, layout).reshape(-1).tolist() == [4, 3, 2, 1, 0, 0, 0, 5, 9, 8, 7, 6, 0, 0, 0, 10]
    copies = transfers(
        Copy(
            0,
            dense_view("a", TensorType((1, 32, 32, 3), DType.INT8)),
            dense_view("b", TensorType((1, 32, 32, 3), DType.INT8), 0, layout),
        )
    )
    assert [(t.planes, t.rows, t.row_bytes) for t in copies] == [(3, 256, 1)] * 4, "one for each place in a word"


def test_a_layout_of_another_rank() -> None:
    with pytest.raises(ValueError, match="does not fit a value of 2 axes"):
        physical_shape(CHANNELS, (1, 16))
    with pytest.raises(ValueError, match="does not order"):
        blocked((0, 1, 1), 1, 4)


@given(
    st.integers(1, 3).flatmap(
        lambda rank: st.tuples(layouts(rank), layouts(rank), st.lists(st.integers(1, 9), min_size=rank, max_size=rank))
    )
)
def test_same_bytes_is_every_element(case: tuple[Layout, Layout, list[int]]) -> None:
    a, b, sizes = case
    shape = tuple(sizes)
    places = [[place(layout, shape, index) for index in np.ndindex(shape)] for layout in (a, b)]
    total = [prod(physical_shape(layout, shape)) for layout in (a, b)]
    assert same_bytes(a, b, shape) == (places[0] == places[1] and total[0] == total[1])


def test_same_bytes_of_images() -> None:
    assert same_bytes(CHANNELS, None, (1, 1, 1, 64))
    assert same_bytes(CHANNELS, None, (1, 5, 5, 16))
    assert not same_bytes(CHANNELS, None, (1, 1, 1, 40)), "another size"
    assert not same_bytes(CHANNELS, None, (1, 1, 2, 32))


@given(shaped(), st.data())
def test_views(case: tuple[Layout, Shape], data: st.DataObject) -> None:
    """Parts of a blocked value, read and written, are those of the logical array."""
    layout, shape = case
    box = []
    for axis, size in enumerate(shape):
        block = layout.block(axis)
        start = block * data.draw(st.integers(0, (size - 1) // block))
        stops = [size, *range(start + block, size, block)]
        box.append((start, data.draw(st.sampled_from(stops))))
    kind = TensorType(shape, DType.INT32)
    base, offset = 12, 8
    memory = np.zeros(base + offset + nbytes(layout, kind), dtype=np.uint8)
    whole = dense_view("b", kind, offset, layout)
    assert whole.is_dense and whole.span == (offset, offset + nbytes(layout, kind))
    array = numbered(shape)
    store(memory, whole, base, array)
    assert not memory[: base + offset].any()
    np.testing.assert_array_equal(memory[base + offset :].view(np.int32), to_physical(array, layout).reshape(-1))
    part = whole.part(tuple(box))
    slices = box_slices(tuple(box))
    np.testing.assert_array_equal(load(memory, part, base), array[slices])
    assert part.span[0] >= whole.span[0] and part.span[1] <= whole.span[1]
    array[slices] = -7
    store(memory, part, base, array[slices])
    np.testing.assert_array_equal(load(memory, whole, base), array)


def test_views_are_cut_at_blocks() -> None:
    view = dense_view("b", TensorType((1, 4, 4, 40), DType.INT8), 0, CHANNELS)
    view.part(((0, 1), (1, 3), (0, 4), (32, 40)))
    for channels in ((8, 40), (0, 24)):
        with pytest.raises(ValueError, match="whole blocks of 16"):
            view.part(((0, 1), (0, 4), (0, 4), channels))
    assert not view.part(((0, 1), (1, 3), (0, 4), (0, 40))).is_dense
    assert view.part(((0, 1), (0, 4), (0, 4), (16, 40))).is_dense
    with pytest.raises(ValueError, match="does not lie densely"):
        view.part(((0, 1), (1, 3), (0, 4), (0, 40))).seen_as(None)


def carry_out(made: tuple[Transfer, ...], source: Array, destination: Array) -> None:
    """What a DMA does, byte by byte."""
    for t in made:
        (top, _), (left, _) = t.pad_rows, t.pad_bytes
        for plane, row in product(range(t.planes), range(t.rows + sum(t.pad_rows))):
            to = t.destination + plane * t.destination_plane_stride + row * t.destination_row_stride
            begin = t.source + plane * t.source_plane_stride + (row - top) * t.source_row_stride
            line = np.full(t.destination_row_bytes, t.fill, np.uint8)
            if top <= row < top + t.rows:
                line[left : left + t.row_bytes] = source[begin : begin + t.row_bytes]
            destination[to : to + line.size] = line


@settings(max_examples=150)
@given(
    st.integers(1, 4).flatmap(
        lambda rank: st.tuples(
            layouts(rank),
            layouts(rank),
            st.lists(st.integers(1, 9), min_size=rank, max_size=rank),
            st.sampled_from([DType.INT8, DType.INT32]),
        )
    )
)
def test_copies_between_layouts(case: tuple[Layout, Layout, list[int], DType]) -> None:
    first, second, sizes, dtype = case
    kind = TensorType(tuple(sizes), dtype)
    source, destination = dense_view("a", kind, 4, first), dense_view("b", kind, 8, second)
    try:
        made = transfers(Copy(0, source, destination))
    except ValueError as error:
        assert "do not divide each other" in str(error)
        return
    array = numbered(kind.shape).astype(dtype.numpy)
    memory, result = np.zeros(source.span[1], np.uint8), np.zeros(destination.span[1], np.uint8)
    store(memory, source, 0, array)
    carry_out(made, memory, result)
    np.testing.assert_array_equal(load(result, destination, 0), array)


@pytest.mark.parametrize(("channels", "count"), [(16, 1), (48, 1), (40, 2), (3, 1)])
def test_a_relayout_is_a_transfer_or_two(channels: int, count: int) -> None:
    """Whole blocks in one, a last block that is partly used in another."""
    kind = TensorType((1, 5, 7, channels), DType.INT8)
    views = dense_view("a", kind), dense_view("b", kind, 0, CHANNELS)
    for source, destination in (views, views[::-1]):
        made = transfers(Copy(0, source, destination))
        assert len(made) == count
        assert sum(transfer.nbytes for transfer in made) == kind.nbytes
    if channels == 48:
        first = transfers(Copy(0, *views))[0]
        assert (first.row_bytes, first.rows, first.planes) == (16, 35, 3)


def test_the_longest_axes_are_those_of_a_transfer() -> None:
    """Planes of swapped columns to rows of pixels: a transfer for each column, not for each row of each."""
    kind = TensorType((1, 9, 8, 16), DType.INT8)
    planes = from_notation("N C H W/16 4w/4 -4w")
    views = dense_view("a", kind, 0, planes), dense_view("b", kind)
    for source, destination in (views, views[::-1]):
        made = transfers(Copy(0, source, destination))
        assert [(one.planes * one.rows, one.row_bytes) for one in made] == [(9 * 16, 1)] * 8


@pytest.mark.parametrize("layout", [None, CHANNELS])
@pytest.mark.parametrize("pads", [((1, 1), (1, 1)), ((0, 1), (0, 1)), ((2, 0), (0, 0)), ((0, 0), (0, 3))])
@pytest.mark.parametrize("in_place", [False, True])
def test_pads(layout: Layout | None, pads: tuple[tuple[int, int], tuple[int, int]], in_place: bool) -> None:
    """Copied into a border, or the border alone filled around what lies there."""
    shape = (1, 4, 5, 40)
    outer = TensorType((1, 4 + sum(pads[0]), 5 + sum(pads[1]), 40), DType.INT8)
    before = (0, pads[0][0], pads[1][0], 0)
    destination = dense_view("b", outer, 16, layout)
    box = tuple((lead, lead + size) for lead, size in zip(before, shape, strict=True))
    inner: View = destination.part(box) if in_place else dense_view("a", TensorType(shape, DType.INT8), 0, layout)
    array = np.random.default_rng(0).integers(-128, 128, shape).astype(np.int8)
    result = np.zeros(destination.span[1], np.uint8)
    memory = result if in_place else np.zeros(inner.span[1], np.uint8)
    store(memory, inner, 0, array)
    copy = Copy(0, inner, destination, before, fill=-5)
    assert copy.fills_border == in_place
    made = transfers(copy)
    if in_place:
        assert all(transfer.border for transfer in made)
        made = tuple(strip for transfer in made for strip in strips(transfer))
        assert not any(strip.rows and strip.row_bytes for strip in made), "the interior is not copied"
    carry_out(made, memory, result)
    everything = [*zip(before, (0, pads[0][1], pads[1][1], 0), strict=True)]
    np.testing.assert_array_equal(load(result, destination, 0), np.pad(array, everything, constant_values=-5))
    border = sum(transfer.nbytes for transfer in transfers(copy)) if in_place else 0
    blocks = 40 if layout is None else 48
    assert not in_place or border == blocks * (outer.shape[1] * outer.shape[2] - 20)


def test_a_step_that_leads_where_finer_ones_do_is_none() -> None:
    """252 bytes, the words of each 16 swapped: the last block is partly used, but its words follow the others'."""
    kind, layout = TensorType((1, 252), DType.INT8), from_notation("N C/16 4c/4 -4c")
    made = transfers(Copy(0, dense_view("a", kind), dense_view("b", kind, 0, layout)))
    assert [(t.rows, t.row_bytes) for t in made] == [(63, 1)] * 4
