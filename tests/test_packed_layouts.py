"""Layouts with several elements in a byte: what each says element by element, views, copies, and what refuses them."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.ir.layout import (
    FIELDS,
    Layout,
    blocked,
    check_part,
    from_bytes,
    from_notation,
    nbytes,
    packed,
    packing_fits,
    row_major,
    same_bytes,
    stored_shape,
    to_bytes,
)
from dovetail.ir.types import Array, DType, Shape, TensorType, box_slices
from dovetail.program.ir import Copy, dense_view, load, store
from dovetail.program.transfers import transfers
from test_layout_algebra import carry_out, layouts

NARROW = (DType.INT4, DType.UINT4, DType.INT2, DType.UINT2)


@st.composite
def narrow(draw: st.DrawFn, rank: int | None = None, bits: int = 0) -> tuple[Layout, TensorType]:
    """Any layout, its bytes filled with neighbours along any axis, the first lowest or highest; and a value for it."""
    rank = rank or draw(st.integers(1, 4))
    dtype = draw(st.sampled_from([kind for kind in NARROW if bits in (0, kind.bits)]))
    base, axis = draw(layouts(rank)), draw(st.integers(0, rank - 1))
    share = FIELDS[dtype.bits]
    fine = [(a, step * share if a == axis else step) for a, step in base.dims]
    down = tuple((a, step * share if a == axis else step) for a, step in base.backwards)
    last = (axis, 1)
    layout = Layout((*fine, last), (*down, *([last] if draw(st.booleans()) else [])), packed=True)
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=rank, max_size=rank)))
    return layout, TensorType(shape, dtype)


def values(kind: TensorType, seed: int = 0) -> Array:
    """Elements over the whole range of a type."""
    generator = np.random.default_rng(seed)
    return generator.integers(kind.dtype.low, kind.dtype.high + 1, kind.shape).astype(kind.dtype.numpy)


def bits_at(layout: Layout, shape: Shape, index: Shape) -> tuple[int, int]:
    """Byte and field of an element, as the convention says it: one physical index after the other."""
    byte = 0
    for size, (axis, step) in zip(stored_shape(layout, shape), layout.dims[:-1], strict=True):
        coarser = min((other for a, other in layout.dims if a == axis and other > step), default=None)
        number = index[axis] // step if coarser is None else index[axis] // step % (coarser // step)
        byte = byte * size + (size - 1 - number if (axis, step) in layout.backwards else number)
    field = index[layout.dims[-1][0]] % layout.fields
    return byte, layout.fields - 1 - field if layout.dims[-1] in layout.backwards else field


@given(narrow(), st.integers(0, 99))
def test_every_element_is_in_its_bits(case: tuple[Layout, TensorType], seed: int) -> None:
    layout, kind = case
    array = values(kind, seed)
    held = to_bytes(array, layout)
    assert held.dtype == np.uint8 and held.size == nbytes(layout, kind) == prod(stored_shape(layout, kind.shape))
    for index in np.ndindex(kind.shape):
        byte, field = bits_at(layout, kind.shape, index)
        raw = int(held[byte]) >> kind.dtype.bits * field & (1 << kind.dtype.bits) - 1
        assert raw == int(array[index]) & (1 << kind.dtype.bits) - 1
    np.testing.assert_array_equal(from_bytes(held, layout, kind), array)
    assert int(np.unpackbits(held).sum()) == int(
        np.unpackbits(array.view(np.uint8) & ((1 << kind.dtype.bits) - 1)).sum()
    )


@given(narrow())
def test_notation_both_ways(case: tuple[Layout, TensorType]) -> None:
    layout, _ = case
    assert from_notation(str(layout)) == layout
    assert layout.bytewise.rank == layout.rank and not layout.bytewise.packed


def test_as_people_write_them() -> None:
    assert str(packed(None, 4, 4)) == "N H W C/2 [2c]"
    assert str(packed(None, 2, 2)) == "N C/4 [4c]"
    assert str(packed(None, 4, 4, axis=2)) == "N H W/2 C [2w]"
    assert str(packed(blocked((0, 3, 1, 2), 3, 32), 4, 4)) == "N C/32 H W 16c/2 [2c]"
    assert str(packed(blocked((0, 3, 1, 2), 3, 4), 4, 2)) == "N C/4 H W [4c]"
    assert from_notation("N H W C/2 [-2c]").backwards == ((3, 1),)
    assert packed(None, 4, 4).order is None and packed(None, 4, 4, axis=2).order == from_notation("N H W/2 C 2w")
    for text in (
        "N H W [C]",
        "N H W C/2 [2c] W",
        "N H W C/3 [3c]",
        "N H W C/8 [8c]",
        "N H W C/4 [2c/2] 2c",
        "[2c] C/2",
    ):
        with pytest.raises(ValueError):
            from_notation(text)
    with pytest.raises(ValueError, match="do not divide"):
        packed(blocked((0, 3, 1, 2), 3, 3), 4, 4)


def test_widths_fill_bytes() -> None:
    pairs, fours = packed(None, 2, 4), packed(None, 2, 2)
    assert packing_fits(pairs, DType.UINT4) and packing_fits(fours, DType.INT2) and packing_fits(None, DType.INT4)
    assert not packing_fits(pairs, DType.INT2) and not packing_fits(fours, DType.INT8)
    assert packing_fits(row_major(2), DType.INT2), "one to a byte"
    assert nbytes(None, TensorType((1, 10), DType.INT2)) == 10 and nbytes(fours, TensorType((1, 10), DType.INT2)) == 3


def test_same_bytes() -> None:
    pairs = packed(None, 4, 4)
    assert same_bytes(pairs, packed(blocked((0, 3, 1, 2), 3, 32), 4, 4), (1, 1, 1, 32))
    assert same_bytes(pairs, packed(blocked((0, 3, 1, 2), 3, 32), 4, 4), (1, 5, 5, 32)), "one block"
    assert not same_bytes(pairs, None, (1, 1, 1, 2)) and not same_bytes(pairs, packed(None, 4, 2), (1, 1, 1, 4))
    assert not same_bytes(pairs, from_notation("N H W C/2 [-2c]"), (1, 1, 1, 2))
    assert not same_bytes(pairs, packed(None, 4, 4, axis=2), (1, 1, 2, 2))


@given(narrow(), st.data())
def test_views(case: tuple[Layout, TensorType], data: st.DataObject) -> None:
    """Parts of a packed value, read and written, are those of the logical array; other bits stay."""
    layout, kind = case
    box = []
    for axis, size in enumerate(kind.shape):
        block = layout.block(axis)
        start = block * data.draw(st.integers(0, (size - 1) // block))
        stops = [size, *range(start + block, size, block)]
        box.append((start, data.draw(st.sampled_from(stops))))
    base, offset = 12, 8
    memory = np.full(base + offset + nbytes(layout, kind), 0xA5, dtype=np.uint8)
    whole = dense_view("b", kind, offset, layout)
    assert whole.is_dense and whole.span == (offset, offset + nbytes(layout, kind))
    array = values(kind)
    store(memory, whole, base, array)
    assert (memory[: base + offset] == 0xA5).all()
    np.testing.assert_array_equal(load(memory, whole, base), array)
    part, slices = whole.part(tuple(box)), box_slices(tuple(box))
    np.testing.assert_array_equal(load(memory, part, base), array[slices])
    assert part.span[0] >= whole.span[0] and part.span[1] <= whole.span[1]
    array[slices] = kind.dtype.low
    store(memory, part, base, array[slices])
    np.testing.assert_array_equal(load(memory, whole, base), array)


def test_parts_begin_at_bytes() -> None:
    pairs, shape = packed(None, 4, 4), (1, 4, 4, 7)
    check_part(pairs, ((0, 1), (1, 3), (0, 4), (2, 7)), shape)
    for channels in ((1, 7), (0, 3)):
        with pytest.raises(ValueError, match="whole blocks of 2"):
            check_part(pairs, ((0, 1), (0, 4), (0, 4), channels), shape)


@settings(max_examples=150)
@given(
    st.tuples(st.integers(1, 4), st.sampled_from([2, 4])).flatmap(
        lambda both: st.tuples(narrow(*both), narrow(*both)).filter(
            lambda pair: pair[0][0].dims[-1] == pair[1][0].dims[-1]
        )
    )
)
def test_bytes_are_copied_between_layouts_that_share_them_alike(
    case: tuple[tuple[Layout, TensorType], tuple[Layout, TensorType]],
) -> None:
    (first, kind), (second, _) = case
    source, destination = dense_view("a", kind, 4, first), dense_view("b", kind, 8, second)
    alike = [layout.dims[-1] in layout.backwards for layout in (first, second)]
    try:
        made = transfers(Copy(0, source, destination))
    except ValueError as error:
        assert "do not divide each other" in str(error) or (
            alike[0] != alike[1] and "hold other elements" in str(error)
        )
        return
    assert alike[0] == alike[1]
    array = values(kind)
    memory, result = np.zeros(source.span[1], np.uint8), np.zeros(destination.span[1], np.uint8)
    store(memory, source, 0, array)
    carry_out(made, memory, result)
    np.testing.assert_array_equal(load(result, destination, 0), array)


@pytest.mark.parametrize(("dtype", "fill"), [(DType.UINT4, 9), (DType.INT4, -3), (DType.UINT2, 2), (DType.INT2, -1)])
def test_padding_fills_every_element_of_a_byte(dtype: DType, fill: int) -> None:
    layout = packed(None, 4, dtype.bits)
    small, large = TensorType((1, 3, 4, 8), dtype), TensorType((1, 5, 7, 8), dtype)
    source, destination = dense_view("a", small, 0, layout), dense_view("b", large, 0, layout)
    array = values(small)
    memory, result = np.zeros(source.span[1], np.uint8), np.zeros(destination.span[1], np.uint8)
    store(memory, source, 0, array)
    carry_out(transfers(Copy(0, source, destination, (0, 1, 2, 0), fill)), memory, result)
    wanted = np.pad(array, [(0, 0), (1, 1), (2, 1), (0, 0)], constant_values=fill)
    np.testing.assert_array_equal(load(result, destination, 0), wanted)


def test_copying_neither_packs_nor_unpacks() -> None:
    kind = TensorType((1, 4, 4, 8), DType.UINT4)
    views = [dense_view("a", kind, 0, layout) for layout in (None, packed(None, 4, 4), packed(None, 4, 4, axis=2))]
    for source in views:
        for destination in views:
            if source is not destination:
                with pytest.raises(ValueError, match="hold other elements"):
                    transfers(Copy(0, source, destination))
    columns = replace(views[2], type=TensorType((1, 4, 5, 8), DType.UINT4))
    with pytest.raises(ValueError, match="share bytes"):
        transfers(Copy(0, views[2], columns, (0, 0, 1, 0)))
