"""Traces of scheduled procedures, and what is said when an instruction does not cover a statement."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from dovetail.errors import TargetError
from dovetail.loops import (
    Allocation,
    Issue,
    LoopMismatch,
    Procedure,
    Release,
    Window,
    covered,
    memory,
    procedure,
    replace_all,
    replace_first,
    trace,
)
from dovetail.targets.vta.mapping import _ORDER, MEANINGS, instruction, schedule

SCRATCH = {"SCRATCH": memory("SCRATCH")}
COPY = """
def copy(N: size, source: [i8][N] @ DRAM, target: [i8][N] @ SCRATCH):
    for k in seq(0, N):
        target[k] = source[k]
"""
ADD = """
def add(N: size, total: [i8][N] @ SCRATCH, term: [i8][N] @ SCRATCH, bias: i8 @ DRAM):
    for k in seq(0, N):
        total[k] = total[k] + term[k] * bias
"""
SCHEDULE = """
def region(H: size, W: size, P: index, x: [i8][H + 1, W] @ DRAM, factor: i8 @ DRAM):
    assert P >= 0
    total: i8[W] @ SCRATCH
    copy(W, x[0, 0:W], total[0:W])
    for h in seq(0, H):
        row: i8[1, W] @ SCRATCH
        copy(W, x[h + 1, 0:W], row[0, 0:W])
        for half in seq(0, 2):
            if half < P and h >= 1:
                add(W, total[0:W], row[0, 0:W], factor)
            else:
                spare: i8[2] @ SCRATCH
"""


@cache
def made(text: str) -> Procedure:
    return procedure(text, SCRATCH, instruction="made up")


def test_a_trace_is_what_the_control_flow_issues() -> None:
    scheduled = procedure(SCHEDULE, {**SCRATCH, "copy": made(COPY), "add": made(ADD)})
    total = Window("total", 0, ((0, 3),))

    def load(row: int, window: Window) -> Issue:
        return Issue("copy", {"N": 3, "source": Window("x", None, ((row, row + 1), (0, 3))), "target": window})

    first, second = (Window("row", buffer, ((0, 1), (0, 3))) for buffer in (1, 4))
    add = Issue("add", {"N": 3, "total": total, "term": second, "bias": "factor"})
    assert trace(scheduled, {"H": 2, "W": 3, "P": 1}) == (
        Allocation(0, "total", "SCRATCH", (3,)),
        load(0, total),
        Allocation(1, "row", "SCRATCH", (1, 3)),
        load(1, first),
        Allocation(2, "spare", "SCRATCH", (2,)),
        Release(2),
        Allocation(3, "spare", "SCRATCH", (2,)),
        Release(3),
        Release(1),
        Allocation(4, "row", "SCRATCH", (1, 3)),
        load(2, second),
        add,
        Allocation(5, "spare", "SCRATCH", (2,)),
        Release(5),
        Release(4),
        Release(0),
    )


def test_sizes_only_change_how_often() -> None:
    scheduled = procedure(SCHEDULE, {**SCRATCH, "copy": made(COPY), "add": made(ADD)})
    for h, p in ((1, 0), (1, 5), (4, 1), (4, 2)):
        issues = [event.instruction for event in trace(scheduled, {"H": h, "W": 7, "P": p}) if isinstance(event, Issue)]
        assert (issues.count("copy"), issues.count("add")) == (h + 1, (h - 1) * min(p, 2))


REGION = """
def region(H: size, W: size, x: [i8][H, W] @ DRAM, y: [i8][H, W] @ SCRATCH):
    for h in seq(0, H):
        for w in seq(0, W):
            y[h, w] = x[h, w]
        for w in seq(0, W):
            y[h, w] = y[h, w] * y[h, w]
"""


def test_a_statement_without_instruction_is_named() -> None:
    scheduled, missing = replace_all(procedure(REGION, SCRATCH), [made(COPY), made(ADD)])
    assert missing[0].sentence.startswith("add: expects the assignment 'total[k] = total[k] + term[k] * bias'")
    with pytest.raises(TargetError) as raised:
        trace(scheduled, {"H": 2, "W": 2})
    where = "the schedule of region, inside the loops over h, w"
    statement = "no instruction covers the statement 'y[h, w] = y[h, w] * y[h, w]'"
    assert (raised.value.where, raised.value.what) == (where, statement)
    nearest = (
        f"{statement}; the nearest is add: expects the assignment 'total[k] = total[k] + term[k] * bias', found the "
        "assignment 'y[h, w] = y[h, w] * y[h, w]': (value + (value * value)) is not (value * value)"
    )
    for attempt in (
        lambda: trace(scheduled, {"H": 2, "W": 2}, [made(COPY), made(ADD)]),
        lambda: covered(procedure(REGION, SCRATCH), [made(COPY), made(ADD)]),
    ):
        with pytest.raises(TargetError) as raised:
            attempt()
        assert (raised.value.where, raised.value.what) == (where, nearest)


LIMITED = COPY.replace("    for", "    assert N <= 4 and N >= 2\n    for", 1)


def test_an_instruction_beyond_its_own_limits_is_refused() -> None:
    scheduled = replace_first(procedure(REGION, SCRATCH), made(LIMITED))
    text = REGION.replace("        for w in seq(0, W):\n            y[h, w] = y[h, w] * y[h, w]\n", "")
    scheduled = covered(procedure(text, SCRATCH), [made(LIMITED)])
    assert len(trace(scheduled, {"H": 3, "W": 4})) == 3
    for size in (1, 5):
        words = f"the schedule of region: copy needs N <= 4 and N >= 2, found N = {size}"
        with pytest.raises(TargetError, match=words):
            trace(scheduled, {"H": 3, "W": size})
    fixed = procedure(text.replace("W: size, ", "").replace("W", "5"), SCRATCH)
    found = replace_first(fixed, made(LIMITED))
    assert isinstance(found, LoopMismatch)
    assert found.sentence == "copy: needs N <= 4 and N >= 2, found N = 5"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("y[h, w] = y[h, w] + y[h, w] * factor", "add: one array would be two of its operands"),
        ("y[h, w] = y[h, w] + z[h, w] * q[h]", "add: an element of an array cannot be its scalar operand"),
        ("y[h, w] = y[h, w] + x[h, w] * factor", "add: expects term in SCRATCH, found x in DRAM"),
        ("y[h, w] = y[h, w] + v[h, w] * factor", "add: expects term of I8, found v of I32"),
        ("y[h, w] = y[h, w] + z[h, 2 * w] * factor", "add: expects the indices of term[k], found z[h, 2 * w]"),
    ],
)
def test_why_an_operand_does_not_fit(text: str, words: str) -> None:
    region = f"""
def region(H: size, W: size, x: [i8][H, W] @ DRAM, y: [i8][H, W] @ SCRATCH, z: [i8][H, 2 * W] @ SCRATCH,
           v: [i32][H, W] @ SCRATCH, q: [i8][H] @ SCRATCH, factor: i8 @ DRAM):
    for h in seq(0, H):
        for w in seq(0, W):
            {text}
"""
    found = replace_first(procedure(region, SCRATCH), made(ADD))
    assert isinstance(found, LoopMismatch)
    assert found.sentence == words


CONVOLUTION = """
def region(ICB: size, IH: size, IW: size, T: index, B: index, L: index, R: index, OH: size, OW: size, KH: size,
           KW: size, OCB: size, x: [i8][ICB, IH, IW, 1, 4] @ DRAM, w: [i8][OCB, ICB, KH, KW, 4, 4] @ DRAM,
           y: [i8][OCB, OH, OW, 1, 4] @ DRAM):
    assert T >= 0
    assert B >= 0
    assert L >= 0
    assert R >= 0
    assert T + IH + B >= 1 * OH - 1 + KH
    assert L + IW + R >= 1 * OW - 1 + KW
    padded: i8[ICB, T + IH + B, L + IW + R, 1, 4]
    for pb in seq(0, ICB):
        for ph in seq(0, T + IH + B):
            for pw in seq(0, L + IW + R):
                for pn in seq(0, 1):
                    for po in seq(0, 4):
                        if ph >= T and ph < T + IH and pw >= L and pw < L + IW:
                            padded[pb, ph, pw, pn, po] = x[pb, ph - T, pw - L, pn, po]
                        else:
                            padded[pb, ph, pw, pn, po] = 0.0
    total: i32[OCB, OH, OW, 1, 4]
    for zb in seq(0, OCB):
        for zh in seq(0, OH):
            for zw in seq(0, OW):
                for zn in seq(0, 1):
                    for zo in seq(0, 4):
                        total[zb, zh, zw, zn, zo] = 0.0
    for sb in seq(0, OCB):
        for sh in seq(0, OH):
            for sw in seq(0, OW):
                for sn in seq(0, 1):
                    for so in seq(0, 4):
                        for ib in seq(0, ICB):
                            for kh in seq(0, KH):
                                for kw in seq(0, KW):
                                    for si in seq(0, 4):
                                        total[sb, sh, sw, sn, so] += (padded[ib, 1 * sh + kh, 1 * sw + kw, sn, si] *
                                                                      w[sb, ib, kh, kw, so, si])
    for yb in seq(0, OCB):
        for yh in seq(0, OH):
            for yw in seq(0, OW):
                for yn in seq(0, 1):
                    for yo in seq(0, 4):
                        y[yb, yh, yw, yn, yo] = total[yb, yh, yw, yn, yo]
"""


def wrong(name: str, *changes: tuple[str, str]) -> Procedure:
    """VTA's instruction with another meaning."""
    text = MEANINGS[name]
    for right, instead in changes:
        assert right in text, right
        text = text.replace(right, instead)
    for word, number in (("BATCH", 1), ("BLOCK", 4), ("DOWN", 1), ("ACROSS", 1)):
        text = text.replace(word, str(number))
    return procedure(text, {place: memory(place) for place in ("INP", "WGT", "ACC")}, instruction=name)


WRONG: dict[str, tuple[Callable[[], Procedure], str]] = {
    "a load that pads with ones": (
        lambda: wrong("load_padded", ("image[h, w, n, o] = 0.0", "image[h, w, n, o] = 1.0")),
        "the nearest is load_padded: expects the assignment 'image[h, w, n, o] = 1.0', "
        "found the assignment 'padded[0, ph, pw, pn, po] = 0.0': 1.0 is not 0.0",
    ),
    "a load that forgets the padding": (
        lambda: wrong(
            "load_padded",
            ("source: [i8][H, W,", "source: [i8][T + H + B, L + W + R,"),
            ("source[h - T, w - L, n, o]", "source[h, w, n, o]"),
            ("                    else:\n                        image[h, w, n, o] = 0.0\n", ""),
            ("                    if h >= T and h < T + H and w >= L and w < L + W:\n    ", ""),
        ),
        "the nearest is load_padded: expects the assignment 'image[h, w, n, o] = source[h, w, n, o]', "
        "found the condition 'if ph >= T and ph < ",
    ),
    "a product that adds": (
        lambda: wrong("product", (" * weights", " + weights")),
        "the nearest is product: expects the sum",
    ),
    "a product with its matrix the wrong way round": (
        lambda: wrong("product", ("weights[b, kh, kw, o, i]", "weights[b, kh, kw, i, o]")),
        "the nearest is product: expects the indices of weights[b, kh, kw, i, o], found weights[sb, kh, kw, so, si]",
    ),
}


SUMS = """
def region(image: i8[4, 8] @ INP, tile: i8[8, 8] @ WGT, total: i32[4, 8] @ ACC):
    for sw in seq(0, 4):
        for so in seq(0, 8):
            for si in seq(0, 8):
                total[sw, so] += image[sw, si] * tile[so, si]
"""
BY_COLUMNS = """
def outer(OW: size, image: [i8][OW, 8] @ INP, tile: [i8][8, 8] @ WGT, total: [i32][OW, 8] @ ACC):
    for i in seq(0, 8):
        for w in seq(0, OW):
            for o in seq(0, 8):
                total[w, o] += image[w, i] * tile[o, i]
"""
SPREAD = """
def copy(OW: size, source: [i8][OW, 8] @ DRAM, image: [i8][OW, 8] @ INP):
    for w in seq(0, OW):
        for o in seq(0, 8):
            for n in seq(0, 8):
                image[w, o] = source[w, n]
"""


def test_the_nearest_instruction_computes_the_same() -> None:
    """Not the one whose loops happen to agree longer."""
    memories = {place: memory(place) for place in ("INP", "WGT", "ACC")}
    outer, copy = (procedure(text, memories, instruction="run();") for text in (BY_COLUMNS, SPREAD))
    with pytest.raises(TargetError, match="the nearest is outer: expects a loop over o to 8, found the sum"):
        covered(procedure(SUMS, memories), [copy, outer])


@pytest.mark.parametrize("name", WRONG)
def test_an_instruction_of_vta_with_a_wrong_meaning_is_never_selected(name: str) -> None:
    make, words = WRONG[name]
    replaced = make()
    products = ("product_of_block", "widen")  # right ones, which would be taken in place of the wrong one
    meanings = {key: instruction(key, 1, 4, (1, 1)) for key in _ORDER if key not in products}
    with pytest.raises(TargetError) as raised:
        schedule(CONVOLUTION, 1, 4, list({**meanings, replaced.name(): replaced}.values()))
    assert words in raised.value.what
    start = "padded[0, ph, pw, pn, po] = x[pb, " if "load" in name else "total[sb, sh, sw, sn, so] += padded[0, "
    assert raised.value.what.startswith(f"no instruction covers the statement '{start}")
    assert raised.value.where.startswith("the schedule of region, inside the loops over pb, ")
