"""WHILE and IF of TFLite: turns that are known are written out, ways that are not are both computed; as in Micro."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dovetail.compile import Options
from dovetail.errors import ModelError
from dovetail.notes import Kind, Note
from dovetail.targets import load_target
from tflite_writer import ModelWriter, run_calls
from user_operators import compiled_from, run_everywhere

RISCV = load_target("riscv")
Q = (0.05, 3)
"""Scale and zero point of the values."""


def number(writer: ModelWriter, name: str, value: int | None = None) -> int:
    """A tensor of one int32."""
    return writer.tensor(name, (), "INT32", None if value is None else np.array(value, np.int32))


def value(writer: ModelWriter, name: str, shape: tuple[int, ...] = (1, 6)) -> int:
    return writer.tensor(name, shape, "INT8", quantised=Q)


def condition(writer: ModelWriter, turns: int, kinds: tuple[tuple[int, ...], ...]) -> int:
    """A subgraph: whether the first of what a loop carries, a counter, is below the number of turns."""
    graph = writer.subgraph()
    counter, most, holds = number(writer, "counter"), number(writer, "most", turns), writer.tensor("holds", (), "BOOL")
    rest = [value(writer, f"carried{at}", shape) for at, shape in enumerate(kinds)]
    writer.operator("LESS", [counter, most], [holds], "LessOptions")
    writer.ends([counter, *rest], [holds], graph)
    return graph


def counted(writer: ModelWriter, counter: int) -> int:
    """The counter's next number."""
    after = number(writer, "after")
    writer.operator("ADD", [counter, number(writer, "one", 1)], [after], "AddOptions")
    return after


def summing(turns: int) -> bytes:
    """x + x + ... by a loop that carries a counter, the sum and x."""
    writer = ModelWriter()
    x, start, end = value(writer, "x"), number(writer, "start", 0), number(writer, "end")
    total, same = value(writer, "total"), value(writer, "same")
    shapes = ((1, 6), (1, 6))
    first = condition(writer, turns, shapes)
    second = writer.subgraph()
    counter, so_far, own = number(writer, "counter"), value(writer, "so_far"), value(writer, "own")
    more = value(writer, "more")
    writer.operator("ADD", [so_far, own], [more], "AddOptions")
    writer.ends([counter, so_far, own], [counted(writer, counter), more, own], second)
    in_main(
        writer,
        lambda: writer.operator(
            "WHILE",
            [start, x, x],
            [end, total, same],
            "WhileOptions",
            condSubgraphIndex=first,
            bodySubgraphIndex=second,
        ),
    )
    writer.ends([x], [total], 0)
    return writer.finish()


def in_main(writer: ModelWriter, add: Callable[[], None]) -> None:
    """Add an operator to the first subgraph."""
    writer.model.subgraphs.append(writer.model.subgraphs.pop(0))
    add()
    writer.model.subgraphs.insert(0, writer.model.subgraphs.pop())


def feeds(count: int, *shape: int) -> list[np.ndarray]:
    return [np.random.default_rng(seed).integers(-128, 128, shape).astype(np.int8) for seed in range(count)]


def as_in_micro(folder: Path, data: bytes, inputs: list[dict[str, np.ndarray]], options: Options | None = None) -> None:
    """Compiles, runs and compares with TensorFlow Lite Micro."""
    expected = run_calls(data, [dict(enumerate(one.values())) for one in inputs])
    found = run_everywhere(compiled_from(data, folder, "loop.tflite", RISCV, options), RISCV, inputs)
    for one, (other,) in zip(found, expected, strict=True):
        (own,) = one.values()
        np.testing.assert_array_equal(own, other, strict=True)


@pytest.mark.parametrize("turns", [1, 2, 5])
def test_a_loop_of_known_turns_is_written_out(tmp_path: Path, turns: int) -> None:
    as_in_micro(tmp_path, summing(turns), [{"x": x} for x in feeds(4, 1, 6)], Options(check=True))


def recurrent(steps: int = 4) -> bytes:
    """A cell written by hand: each turn takes its row of a sequence by the counter, a dense layer and a limit."""
    writer, rng = ModelWriter(), np.random.default_rng(0)
    x, end, last = value(writer, "x", (steps, 6)), number(writer, "end"), value(writer, "last")
    same = value(writer, "same", (steps, 6))
    zeros = writer.tensor("zeros", (1, 6), "INT8", np.full((1, 6), 3, np.int8), Q)
    start = number(writer, "start", 0)
    first = condition(writer, steps, ((1, 6), (steps, 6)))
    second = writer.subgraph()
    counter, memory, rows = number(writer, "counter"), value(writer, "memory"), value(writer, "rows", (steps, 6))
    row, flat, both = value(writer, "row", (6,)), value(writer, "flat"), value(writer, "both", (1, 12))
    writer.operator("GATHER", [rows, counter], [row], "GatherOptions")
    shape = writer.tensor("shape", (2,), "INT32", np.array([1, 6], np.int32))
    writer.operator("RESHAPE", [row, shape], [flat], "ReshapeOptions", newShape=[1, 6])
    writer.operator("CONCATENATION", [flat, memory], [both], "ConcatenationOptions", axis=1)
    weights = writer.tensor("w", (6, 12), "INT8", rng.integers(-127, 128, (6, 12)).astype(np.int8), (0.004, 0))
    bias = writer.tensor("b", (6,), "INT32", rng.integers(-900, 900, 6).astype(np.int32), (0.004 * 0.05, 0))
    after = value(writer, "after_cell")
    writer.operator(
        "FULLY_CONNECTED", [both, weights, bias], [after], "FullyConnectedOptions", fusedActivationFunction=1
    )
    writer.ends([counter, memory, rows], [counted(writer, counter), after, rows], second)
    in_main(
        writer,
        lambda: writer.operator(
            "WHILE",
            [start, zeros, x],
            [end, last, same],
            "WhileOptions",
            condSubgraphIndex=first,
            bodySubgraphIndex=second,
        ),
    )
    writer.ends([x], [last], 0)
    return writer.finish()


def test_a_cell_in_a_loop(tmp_path: Path) -> None:
    as_in_micro(tmp_path, recurrent(), [{"x": x} for x in feeds(6, 4, 6)])


def choosing(known: bool | None) -> bytes:
    """x + x or x * x, on a constant or on an input."""
    writer = ModelWriter()
    x, y = value(writer, "x"), value(writer, "y")
    held = None if known is None else np.array(known)
    flag = writer.tensor("flag", (), "BOOL", held)
    for kind in ("ADD", "MUL"):
        graph = writer.subgraph()
        own, made = value(writer, "own"), value(writer, f"made_{kind}")
        writer.operator(kind, [own, own], [made], f"{kind.title()}Options")
        writer.ends([own], [made], graph)
    in_main(
        writer, lambda: writer.operator("IF", [flag, x], [y], "IfOptions", thenSubgraphIndex=1, elseSubgraphIndex=2)
    )
    writer.ends([x] if known is not None else [x, flag], [y], 0)
    return writer.finish()


@pytest.mark.parametrize("known", [True, False, None])
def test_a_choice_is_made_or_computed(tmp_path: Path, known: bool | None) -> None:
    inputs = [{"x": x} for x in feeds(4, 1, 6)]
    if known is None:
        inputs = [{**one, "flag": np.array(at % 2 == 0)} for at, one in enumerate(inputs)]
    as_in_micro(tmp_path, choosing(known), inputs)


def test_only_the_first_of_several_signatures_is_compiled(tmp_path: Path) -> None:
    writer = ModelWriter()
    x, y = value(writer, "x"), value(writer, "y")
    writer.operator("ADD", [x, x], [y], "AddOptions")
    writer.ends([x], [y])
    other = writer.subgraph()
    writer.model.subgraphs[other].name = "train"
    writer.ends([value(writer, "a")], [value(writer, "b")], other)
    told = list[Note]()
    data = writer.finish()
    as_in_micro(tmp_path, data, [{"x": x} for x in feeds(2, 1, 6)], Options(tell=told.append))
    assert told == [Note(Kind.LEFT_OUT, "loop.tflite: only its first signature is compiled, without train")]


def endless() -> bytes:
    """A loop whose body never counts."""
    writer = ModelWriter()
    x, end, y, start = value(writer, "x"), number(writer, "end"), value(writer, "y"), number(writer, "start", 0)
    first = condition(writer, 3, ((1, 6),))
    second = writer.subgraph()
    counter, own = number(writer, "counter"), value(writer, "own")
    made = value(writer, "made")
    writer.operator("ADD", [own, own], [made], "AddOptions")
    writer.ends([counter, own], [counter, made], second)
    in_main(
        writer,
        lambda: writer.operator(
            "WHILE", [start, x], [end, y], "WhileOptions", condSubgraphIndex=first, bodySubgraphIndex=second
        ),
    )
    writer.ends([x], [y], 0)
    return writer.finish()


def undecided() -> bytes:
    """A loop whose counter is an input."""
    writer = ModelWriter()
    x, start, end, y = value(writer, "x"), number(writer, "start"), number(writer, "end"), value(writer, "y")
    first = condition(writer, 3, ((1, 6),))
    second = writer.subgraph()
    counter, own = number(writer, "counter"), value(writer, "own")
    writer.ends([counter, own], [counted(writer, counter), own], second)
    in_main(
        writer,
        lambda: writer.operator(
            "WHILE", [start, x], [end, y], "WhileOptions", condSubgraphIndex=first, bodySubgraphIndex=second
        ),
    )
    writer.ends([x, start], [y], 0)
    return writer.finish()


def within_itself() -> bytes:
    """A condition whose way runs the same condition."""
    writer = ModelWriter()
    x, y, flag = value(writer, "x"), value(writer, "y"), writer.tensor("flag", (), "BOOL", np.array(True))
    graph = writer.subgraph()
    own, made, again = value(writer, "own"), value(writer, "made"), writer.tensor("again", (), "BOOL", np.array(True))
    writer.operator("IF", [again, own], [made], "IfOptions", thenSubgraphIndex=1, elseSubgraphIndex=1)
    writer.ends([own], [made], graph)
    in_main(
        writer, lambda: writer.operator("IF", [flag, x], [y], "IfOptions", thenSubgraphIndex=1, elseSubgraphIndex=1)
    )
    writer.ends([x], [y], 0)
    return writer.finish()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (endless, "turns more than 512 times"),
        (undecided, "turns until a value of run time says so"),
        (within_itself, "nested more than 8 deep"),
        (lambda: summing(5000), "turns more than 512 times"),
    ],
)
def test_what_cannot_be_written_out_is_refused(tmp_path: Path, make: Callable[[], bytes], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        compiled_from(make(), tmp_path, "loop.tflite", RISCV)
