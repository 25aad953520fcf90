"""What needs no copy and no wait: borders beside what engines write, parts of joints and inputs where they lie."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.compile import Compiled, Options, compile_graph, sample_inputs
from dovetail.errors import ProgramError
from dovetail.ir.layout import Layout
from dovetail.ir.types import Box, DType, TensorType
from dovetail.legalize import adapt
from dovetail.program.interpret import check_program
from dovetail.program.ir import Copy, LaunchStatement, View, Wait, around, byte_places, dense_view
from dovetail.program.synchronise import synchronise
from dovetail.targets import load_target
from networks import Net

VTA = load_target("vta")
BLOCKED = Layout(((0, 1), (3, 16), (1, 1), (2, 1), (3, 1)))


def places(view: View) -> set[int]:
    """The bytes of a view's elements."""
    return set(byte_places(view, 0).ravel().tolist())


@st.composite
def parts(draw: st.DrawFn) -> tuple[View, View]:
    """Two boxes of one value, row-major or in blocks of channels."""
    shape = (1, *(draw(st.integers(1, 5)) for _ in range(2)), draw(st.sampled_from((3, 16, 40, 48))))
    layout = draw(st.sampled_from((None, BLOCKED)))
    whole = dense_view("v", TensorType(shape, DType.INT8), draw(st.integers(0, 9)), layout)
    block = 16 if layout else 1

    def span(size: int, step: int) -> tuple[int, int]:
        begin = step * draw(st.integers(0, (size - 1) // step))
        return begin, min(size, begin + step * draw(st.integers(1, -(-(size - begin) // step))))

    boxes: list[Box] = [
        tuple(span(size, block if axis == 3 else 1) for axis, size in enumerate(shape)) for _ in range(2)
    ]
    return whole.part(boxes[0]), whole.part(boxes[1])


@given(parts())
@settings(max_examples=300, deadline=None)
def test_views_said_to_be_apart_share_no_byte(two: tuple[View, View]) -> None:
    one, other = two
    assert one.is_apart(other) == other.is_apart(one)
    assert not one.is_apart(other) or places(one).isdisjoint(places(other))


@pytest.mark.parametrize("layout", [None, BLOCKED])
def test_a_border_is_what_lies_around_and_apart_from_it(layout: Layout | None) -> None:
    whole = dense_view("v", TensorType((1, 6, 5, 40), DType.INT8), 0, layout)
    inner: Box = ((0, 1), (1, 5), (2, 4), (0, 40))
    copy = Copy(0, whole.part(inner), whole, (0, 1, 2, 0), 7)
    assert copy.strips == tuple(whole.part(strip) for strip in around(inner, whole.type.shape))
    border = set().union(*(places(strip) for strip in copy.strips))
    assert border == places(whole) - places(copy.source)
    assert all(strip.is_apart(copy.source) for strip in copy.strips)
    assert not replace(copy, before=(0, 1, 1, 0)).strips, "the source lies elsewhere: it is copied"


def network() -> Compiled:
    """Two padded layers on VTA, whose engine pads with zero alone."""
    net = Net("padded", (40, 24, 3), zero_point=-5)
    first = net.convolution(net.x, 40, stride=2, relu=True)
    graph = adapt(net.finish(net.convolution(first, 20)), VTA.policy(None))
    compiled = compile_graph(graph, VTA, Options(), interpret=False)
    check_program(compiled.plan.program, VTA, compiled.graph, sample_inputs(graph, 3))
    return compiled


def test_bands_lie_in_the_padded_value_and_its_border_waits_for_nothing() -> None:
    program = network().plan.program
    copies = [one for one in program.statements if isinstance(one, Copy)]
    converted = [one for one in copies if one.source.layout != one.destination.layout]
    banded = [one for one in converted if one.source.buffer == "input_0"]
    assert len(banded) > 1 and len({one.source.offset for one in banded}) == len(banded), "bands of the input itself"
    assert all(one.strips for one in copies if one not in converted), "nothing else is moved"
    waited = [two for one, two in pairwise(program.statements) if isinstance(one, Wait) and isinstance(two, Copy)]
    assert not [copy for copy in waited if copy.strips]


def test_a_wait_that_is_wrongly_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    program = network().plan.program
    statements = [one for one in program.statements if not isinstance(one, Wait)]
    assert any(isinstance(one, LaunchStatement) for one in statements)
    assert len(synchronise(statements, program.dma)) == len(program.statements)
    monkeypatch.setattr(View, "is_apart", lambda self, other: True)
    with pytest.raises(ProgramError, match="a wait is missing"):
        network()
