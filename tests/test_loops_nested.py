"""One instruction that stands for four nested operations, found in the loops of a graph; near misses are explained."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from dovetail.errors import TargetError
from dovetail.ir.graph import Graph, GraphBuilder, evaluate
from dovetail.ir.operators.arithmetic import Clip
from dovetail.ir.operators.linear import Conv2d
from dovetail.ir.operators.movement import Pad, Relayout
from dovetail.ir.types import Array, DType, TensorType
from dovetail.loops import (
    Issue,
    Lanes,
    LoopMismatch,
    Procedure,
    Window,
    algorithm,
    memory,
    procedure,
    replace_first,
    trace,
)
from test_loops_evaluator import evaluate_procedure

BLOCK = 4
LANES = Lanes(BLOCK)

# The made-up engine reads rows of pixels, has a scratch-pad for everything in between and writes blocks of int8.
FRAMED_IMAGE = """    image: i8[CB, H, W, 1, 4] @ SCRATCH
    for c in seq(0, CB):
        for r in seq(0, H):
            for q in seq(0, W):
                for n in seq(0, 1):
                    for l in seq(0, 4):
                        image[c, r, q, n, l] = pixels[n, r, q, 4 * c + l]
    framed: i8[CB, UP + H + DOWN, LEFT + W + RIGHT, 1, 4] @ SCRATCH
    for c in seq(0, CB):
        for r in seq(0, UP + H + DOWN):
            for q in seq(0, LEFT + W + RIGHT):
                for n in seq(0, 1):
                    for l in seq(0, 4):
                        if r >= UP and r < UP + H and q >= LEFT and q < LEFT + W:
                            framed[c, r, q, n, l] = image[c, r - UP, q - LEFT, n, l]
                        else:
                            framed[c, r, q, n, l] = 0.0
"""

WHOLE_LAYER = f"""
def whole_layer(CB: size, H: size, W: size, UP: index, DOWN: index, LEFT: index, RIGHT: index,
                ROWS: size, COLUMNS: size, KR: size, KC: size, OB: size,
                pixels: [i8][1, H, W, 4 * CB] @ DRAM, weights: [i8][OB, CB, KR, KC, 4, 4] @ DRAM,
                floor: i32 @ DRAM, ceiling: i32 @ DRAM, result: [i8][OB, ROWS, COLUMNS, 1, 4] @ DRAM):
    assert UP >= 0
    assert DOWN >= 0
    assert LEFT >= 0
    assert RIGHT >= 0
    assert UP + H + DOWN >= ROWS - 1 + KR
    assert LEFT + W + RIGHT >= COLUMNS - 1 + KC
{FRAMED_IMAGE}    sums: i32[OB, ROWS, COLUMNS, 1, 4] @ SCRATCH
    for c in seq(0, OB):
        for r in seq(0, ROWS):
            for q in seq(0, COLUMNS):
                for n in seq(0, 1):
                    for l in seq(0, 4):
                        sums[c, r, q, n, l] = 0.0
    for c in seq(0, OB):
        for r in seq(0, ROWS):
            for q in seq(0, COLUMNS):
                for n in seq(0, 1):
                    for l in seq(0, 4):
                        for d in seq(0, CB):
                            for u in seq(0, KR):
                                for v in seq(0, KC):
                                    for i in seq(0, 4):
                                        sums[c, r, q, n, l] += framed[d, r + u, q + v, n, i] * weights[c, d, u, v, l, i]
    for c in seq(0, OB):
        for r in seq(0, ROWS):
            for q in seq(0, COLUMNS):
                for n in seq(0, 1):
                    for l in seq(0, 4):
                        sums[c, r, q, n, l] = most(sums[c, r, q, n, l], floor)
    for c in seq(0, OB):
        for r in seq(0, ROWS):
            for q in seq(0, COLUMNS):
                for n in seq(0, 1):
                    for l in seq(0, 4):
                        sums[c, r, q, n, l] = least(sums[c, r, q, n, l], ceiling)
    for c in seq(0, OB):
        for r in seq(0, ROWS):
            for q in seq(0, COLUMNS):
                for n in seq(0, 1):
                    for l in seq(0, 4):
                        result[c, r, q, n, l] = sums[c, r, q, n, l]
"""

SIZES = {"ICB": 2, "IH": 5, "IW": 6, "T": 1, "B": 0, "L": 2, "R": 1, "OH": 4, "OW": 7, "KH": 3, "KW": 3, "OCB": 3}


def layer(relayout: bool = True, value: int = 0, stride: int = 1, channels: int = 8, images: int = 1) -> Graph:
    """relu(conv(pad(relayout(x))))."""
    random = np.random.default_rng(5)
    builder = GraphBuilder("layer")
    x = builder.input("x", TensorType((images, 5, 6, channels), DType.INT8))
    if relayout:
        x = builder.add(Relayout(), [x])
    x = builder.add(Pad((0, 1, 2, 0), (0, 0, 1, 0), value), [x])
    weights = builder.constant("w", random.integers(-2, 3, (12, 3, 3, channels)).astype(np.int8))
    sums = builder.add(Conv2d((stride, stride)), [x, weights])
    return builder.finish([builder.add(Clip(0, 127, DType.INT8), [sums])])


@cache
def engine(text: str = WHOLE_LAYER, name: str = "whole_layer") -> Procedure:
    """The instruction, with another meaning if one is given."""
    return procedure(text, {"SCRATCH": memory("SCRATCH")}, instruction=name)


def loops(graph: Graph, place: str = "SCRATCH") -> Procedure:
    """The algorithm of a graph with its buffers in a memory."""
    from exo.stdlib.scheduling import set_memory

    made = procedure(algorithm(graph, LANES).text, {})
    for name in [cursor.name() for cursor in made.find("_: _", many=True)]:
        made = set_memory(made, f"{name}: _", memory(place))
    return made


def blocks(weights: Array) -> Array:
    """OHWI weights as [out block, in block, row, column, out, in]."""
    out, height, width, depth = weights.shape
    split = weights.reshape(out // BLOCK, BLOCK, height, width, depth // BLOCK, BLOCK)
    return np.ascontiguousarray(split.transpose(0, 4, 2, 3, 1, 5))


def sentence(found: Procedure | LoopMismatch) -> str:
    assert isinstance(found, LoopMismatch)
    return found.sentence


def test_four_nested_operations_are_one_instruction() -> None:
    graph = layer()
    assert algorithm(graph, LANES).sizes == SIZES
    found = replace_first(loops(graph), engine())
    assert not isinstance(found, LoopMismatch), found
    (issue,) = trace(found, SIZES)

    def whole(name: str, *shape: int) -> Window:
        return Window(name, None, tuple((0, size) for size in shape))

    assert issue == Issue(
        "whole_layer",
        {
            "CB": 2,
            "H": 5,
            "W": 6,
            "UP": 1,
            "DOWN": 0,
            "LEFT": 2,
            "RIGHT": 1,
            "ROWS": 4,
            "COLUMNS": 7,
            "KR": 3,
            "KC": 3,
            "OB": 3,
            "pixels": whole("x", 1, 5, 6, 8),
            "weights": whole("w", 3, 2, 3, 3, 4, 4),
            "floor": "low",
            "ceiling": "high",
            "result": whole("y", 3, 4, 7, 1, 4),
        },
    )


def test_the_instruction_computes_what_the_graph_says() -> None:
    graph = layer()
    x = np.random.default_rng(1).integers(-16, 17, (1, 5, 6, 8)).astype(np.int8)
    expected = evaluate(graph, {"x": x})[graph.outputs[0]]
    assert len(np.unique(expected)) > 50  # not all cut off
    found = replace_first(loops(graph), engine())
    for made in (loops(graph), found):
        y = np.zeros((3, 4, 7, 1, 4), np.int8)
        values = {"x": x, "w": blocks(graph.constants["w"]), "y": y, "low": 0, "high": 127}
        evaluate_procedure(made, {**SIZES, **values})
        assert np.array_equal(y[:, :, :, 0].transpose(1, 2, 0, 3).reshape(1, 4, 7, 12), expected)


NEAR: dict[str, tuple[dict[str, Any], str, str]] = {
    "padding with 1": (
        {"value": 1},
        "SCRATCH",
        "whole_layer: expects the assignment 'framed[c, r, q, n, l] = 0.0', "
        "found the assignment 'padded[pb, ph, pw, pn, po] = 1.0': 0.0 is not 1.0",
    ),
    "stride 2": (
        {"stride": 2},
        "SCRATCH",
        "whole_layer: expects the indices of framed[d, r + u, q + v, n, i], "
        "found padded[ib, 2 * sh + kh, 2 * sw + kw, sn, si]",
    ),
    "another memory": ({}, "ELSEWHERE", "whole_layer: expects image in SCRATCH, found blocked in ELSEWHERE"),
    "no relayout": (
        {"relayout": False},
        "SCRATCH",
        "whole_layer: expects the assignment 'image[c, r, q, n, l] = pixels[n, r, q, 4 * c + l]', "
        "found the condition 'if ph >= T and ph < T + IH and pw >= L and pw < L + IW'",
    ),
}


@pytest.mark.parametrize("name", NEAR)
def test_a_graph_that_nearly_fits_is_explained(name: str) -> None:
    options, place, words = NEAR[name]
    assert sentence(replace_first(loops(layer(**options), place), engine())) == words


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        (
            "least(sums[c, r, q, n, l], ceiling)",
            "most(sums[c, r, q, n, l], ceiling)",
            "expects the assignment 'sums[c, r, q, n, l] = most(sums[c, r, q, n, l], ceiling)', found the assignment "
            "'total[hb, hh, hw, hn, ho] = least(total[hb, hh, hw, hn, ho], high)': "
            "most(value, value) is not least(value, value)",
        ),
        (
            "+= framed[d, r + u, q + v, n, i] * weights",
            "+= framed[d, r + u, q + v, n, i] + weights",
            "(value + value) is not (value * value)",
        ),
        (
            "weights[c, d, u, v, l, i]",
            "weights[c, d, u, v, i, l]",
            "expects the indices of weights[c, d, u, v, i, l], found w[sb, ib, kh, kw, so, si]",
        ),
        (
            "r < UP + H and q",
            "r < UP + H - 1 and q",
            "no windows, sizes and numbers make its indices, limits and conditions those found",
        ),
        ("sums[c, r, q, n, l] += framed", "sums[c, r, q, n, l] = framed", "expects the assignment 'sums"),
        ("most(sums[c, r, q, n, l], floor)", "most(sums[c, r, q, n, l], ceiling)", "cannot be unified to both"),
    ],
)
def test_an_instruction_with_a_wrong_meaning_is_not_selected(right: str, wrong: str, words: str) -> None:
    assert right in WHOLE_LAYER
    assert words in sentence(replace_first(loops(layer()), engine(WHOLE_LAYER.replace(right, wrong))))


def test_a_meaning_that_keeps_what_is_needed_later_is_not_selected() -> None:
    head = (
        "def frame(CB: size, H: size, W: size, UP: index, DOWN: index, LEFT: index, RIGHT: index, "
        "pixels: [i8][1, H, W, 4 * CB] @ DRAM):"
    )
    checks = [f"    assert {name} >= 0" for name in ("UP", "DOWN", "LEFT", "RIGHT")]
    text = "\n".join([head, *checks, FRAMED_IMAGE])
    found = replace_first(loops(layer()), engine(text, "frame"))
    assert sentence(found) == "frame: keeps padded to itself, which the statements after it need"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"channels": 6}, "relayout of 'x': the loops need a multiple of 4 channels, found 6"),
        ({"images": 2}, "relayout of 'x': the loops need 1 images, found 2"),
    ],
)
def test_a_relayout_the_loops_cannot_do_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(TargetError) as raised:
        algorithm(layer(**options), LANES)
    assert f"{raised.value.where}: {raised.value.what}" == words and "Constraint" in raised.value.hint


def test_a_relayout_in_the_middle_is_refused() -> None:
    builder = GraphBuilder("late")
    x = builder.input("x", TensorType((1, 5, 6, 8), DType.INT8))
    padded = builder.add(Pad((0, 1, 1, 0), (0, 1, 1, 0)), [x], "padded")
    with pytest.raises(TargetError, match="relayout of 'padded': a relayout can only be the first step"):
        algorithm(builder.finish([builder.add(Relayout(), [padded])]), LANES)
