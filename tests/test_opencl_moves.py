"""What is brought to an engine's copy of the memory and back: every byte's contents, and nothing in vain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.compile import Options, compile_graph, sample_inputs
from dovetail.errors import ProgramError
from dovetail.ir.graph import GraphBuilder
from dovetail.ir.operators.reduction import MaxPool2d
from dovetail.ir.types import Array, DType, TensorType
from dovetail.program.interpret import check_program
from dovetail.program.ir import (
    Buffer,
    Call,
    LaunchStatement,
    Move,
    Role,
    Statement,
    View,
    element_places,
    reads,
    writes,
)
from dovetail.program.synchronise import mirror
from dovetail.targets.opencl import TARGET

BYTES, BUFFERS, ENGINES = 24, ("a", "b", "c"), ("first", "second")


@st.composite
def views(draw: st.DrawFn) -> View:
    """Bytes of a buffer, side by side or apart."""
    step = draw(st.sampled_from((1, 1, 3)))
    count = draw(st.integers(1, BYTES // step))
    offset = draw(st.integers(0, BYTES - (count - 1) * step - 1))
    return View(draw(st.sampled_from(BUFFERS)), TensorType((count,), DType.UINT8), (step,), offset)


@st.composite
def statements(draw: st.DrawFn) -> Statement:
    """A call of the core or a launch of one of the engines."""
    operands, result = {str(i): draw(views()) for i in range(draw(st.integers(0, 2)))}, draw(views())
    engine = draw(st.sampled_from(("", *ENGINES)))
    nothing = cast(Any, None)
    return LaunchStatement(0, engine, nothing, operands, result) if engine else Call(0, nothing, operands, result)


def places(view: View) -> Array:
    return element_places(view, 0).reshape(-1)


class Memories:
    """Who has written which byte last, as each place sees it: 0 for nobody."""

    def __init__(self) -> None:
        self.true = {name: np.zeros(BYTES, int) for name in BUFFERS}
        self.seen = {place: {name: np.zeros(BYTES, int) for name in BUFFERS} for place in ("", *ENGINES)}
        self.count = 0

    def write(self, place: str, view: View) -> None:
        self.count += 1
        self.true[view.buffer][places(view)] = self.seen[place][view.buffer][places(view)] = self.count

    def check(self, place: str, view: View) -> None:
        np.testing.assert_array_equal(self.seen[place][view.buffer][places(view)], self.true[view.buffer][places(view)])

    def move(self, move: Move) -> None:
        """Carry out a move, which must be of use at both ends and spoil nothing."""
        source, destination = ("", move.engine) if move.to_engine else (move.engine, "")
        at, name = places(move.view), move.view.buffer
        before, after, true = self.seen[destination][name][at], self.seen[source][name][at], self.true[name][at]
        assert not ((before == true) & (after != true)).any(), "overwrites what only the destination had"
        assert all(before[end] != true[end] and after[end] == true[end] for end in (0, -1)), "carries more than needed"
        self.seen[destination][name][at] = after


@given(st.lists(statements(), max_size=12), st.lists(views(), max_size=2), st.lists(views(), max_size=2))
@settings(max_examples=200, deadline=None)
def test_everyone_reads_what_was_written_last(
    listed: Sequence[Statement], first: Sequence[View], last: Sequence[View]
) -> None:
    """Every reader finds the last contents of every byte; every move has to be."""
    buffers = {name: Buffer(name, "ram", BYTES, Role.VALUE) for name in BUFFERS}
    found, memories = mirror(listed, buffers, ENGINES, first, last), Memories()
    for view in first:
        memories.write("", view)
    for index, statement in enumerate(listed):
        here = statement.engine if isinstance(statement, LaunchStatement) else ""
        for move in found.get(index, ()):
            memories.move(move)
        for view in reads(statement):
            memories.check(here, view)
        for view in writes(statement):
            memories.write(here, view)
    for move in found.get(len(listed), ()):
        memories.move(move)
    for view in last:
        memories.check("", view)


def test_a_move_left_out_is_found() -> None:
    """The interpreter gives the engine a memory of its own."""
    builder = GraphBuilder("pools")
    x = builder.input("x", TensorType((1, 6, 6, 8), DType.INT8))
    graph = builder.finish([builder.add(MaxPool2d((2, 2), (1, 1)), [x])])
    program = compile_graph(graph, TARGET, Options()).plan.program
    (before, after) = sorted(program.moves)
    for missing in (before, after):
        rest = {index: moves for index, moves in program.moves.items() if index != missing}
        with pytest.raises(ProgramError, match="differ from the graph"):
            check_program(replace(program, moves=rest), TARGET, graph, sample_inputs(graph))


def test_engines_without_a_copy() -> None:
    """Nothing is moved."""
    view = View("a", TensorType((4,), DType.UINT8), (1,))
    launch = LaunchStatement(0, "first", cast(Any, None), {"x": view}, view)
    assert mirror([launch], {"a": Buffer("a", "ram", BYTES, Role.VALUE)}, (), [view], [view]) == {}
