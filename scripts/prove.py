"""Proves what Dovetail calls exact: every number that a rewrite or a kernel gives is the one that is meant.

    python scripts/prove.py [--only NAME] [--wrong] [--write | --check]

A rule is proven for all values of its ranges: by computing every one, where these are at most 2^26, else by an SMT
solver over bit vectors (z3), which gets the text of the emitted C and the project's own functions of numpy. `--wrong`
plants faults into rules, and ends with 1 unless each is refuted by a counter-example. `--write` puts the table into
docs/exact.md; `--check` compares it.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import z3

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "scripts")]

from proofs_of_c import RUNTIME, Helpers, Number, Symbol, World  # noqa: E402

from dovetail.ir.operators import gemmlowp  # noqa: E402
from dovetail.ir.operators.arithmetic import Clip, Requantize, Rounding, fixed_point  # noqa: E402
from dovetail.ir.requantisation import equal, raised, rectified  # noqa: E402
from dovetail.ir.types import DType  # noqa: E402
from dovetail.legalize import pools  # noqa: E402
from dovetail.targets.gemmini import rewrites  # noqa: E402

PAGE = REPOSITORY / "docs" / "exact.md"
MARKS = "<!-- rules: python scripts/prove.py --write -->", "<!-- end of rules -->"
QUICK = False
"""Whether only some of the shifts are proven, for the tests."""
LOW, HIGH = DType.INT32.low, DType.INT32.high


@dataclass(frozen=True)
class Edit:
    """A fault: what stands in a rule's C or Python, and what shall stand there."""

    name: str
    """Helper or function."""
    old: str
    new: str


NONE = Edit("", "", "")


@dataclass(frozen=True)
class Rule:
    """A claim of exactness."""

    name: str
    """Of the helper or function that is claimed to be exact."""
    claim: str
    ranges: str
    how: str
    """SMT, or how many values are computed."""
    check: Callable[[Edit], str | None]
    """A counter-example, None where there is none; with a fault planted."""


def runtime(edit: Edit) -> str:
    """The text of the C helpers, with a fault."""
    text = RUNTIME.read_text()
    if edit is NONE or f" {edit.name}(" not in text:
        return text
    start = text.index(f"static inline int32_t {edit.name}(")
    end = text.index("\n}\n", start)
    body = text[start:end]
    assert edit.old in body, edit
    return text[:start] + body.replace(edit.old, edit.new) + text[end:]


def edited(function: Any, edit: Edit) -> Any:
    """A function of Python, with a fault if it is one of this function's."""
    if edit.name != function.__name__:
        return function
    text = textwrap.dedent(inspect.getsource(function))
    assert edit.old in text, edit
    scope = dict(vars(sys.modules[function.__module__]))
    exec("from __future__ import annotations\n" + text.replace(edit.old, edit.new), scope)
    return scope[edit.name]


def world(least: int = 1 << 30, low: int = LOW, high: int = HIGH) -> tuple[World, Any]:
    """A multiplier of at least so much, and a value of 32 bits in 64."""
    made = World(least=least)
    made.multiplier = made.unknown("multiplier", least, HIGH)
    return made, made.unknown("value", low, high)


def short(term: Any, signed: bool = True) -> Number:
    """The low 32 bits."""
    return Number(z3.Extract(31, 0, term), 32, signed)


def meant(made: World, value: Any, shift: int, rounding: Rounding) -> Any:
    """What `fixed_point` says."""
    found = fixed_point(Symbol(made, value), Symbol(made, made.multiplier), shift, rounding)
    return found.term


def some(shifts: Sequence[int]) -> Sequence[int]:
    """All shifts, or both ends and one between them."""
    if not QUICK or len(shifts) < 5:
        return shifts
    return sorted({shifts[0], shifts[len(shifts) // 2], shifts[-1], *({-1} & {*shifts})})


def limited(made: World, term: Any, low: int, high: int) -> Any:
    """The term limited."""
    value: Any = Symbol(made, term)
    return np.minimum(np.maximum(value, low), high).term


Arguments = Callable[[World, int], Sequence[Any]]


def helper(
    name: str,
    rounding: Rounding,
    shifts: Sequence[int],
    arguments: Arguments,
    least: int = 1 << 30,
    within: Callable[[Any, int], Any] | None = None,
    wide: bool = False,
) -> Callable[[Edit], str | None]:
    """That a helper gives what `fixed_point` does where that is within 32 bits, for each shift."""

    def check(edit: Edit) -> str | None:
        for shift in some(shifts):
            made, value = world(least)
            if within is not None:
                made.solver.add(within(value, shift))
            wanted = meant(made, value, shift, rounding)
            made.solver.add(wanted >= LOW, wanted <= HIGH)
            helpers = Helpers(made, runtime(edit), frozenset(("__riscv_xlen",)) if wide else frozenset())
            found = helpers.call(name, short(value), *arguments(made, shift))
            if (against := made.counter(found.wide(64) == wanted)) is not None:
                return f"shift {shift}: {against}"
        return None

    return check


def doubled(made: World) -> Number:
    """Twice the multiplier, as helpers take it."""
    return Number(z3.Extract(31, 0, made.multiplier * 2), 32, False)


RIGHT = range(-31, 0)


def rectified_helper(edit: Edit) -> str | None:
    """requantize_rectified: of values from 0 on the same, of others 0 or less, as there."""
    for shift in some(RIGHT):
        made, value = world(low=-(1 << 30), high=(1 << 30) - 1)
        wanted = meant(made, value, shift, Rounding.DOUBLE)
        found = Helpers(made, runtime(edit)).call("requantize_rectified", short(value), doubled(made), -1 - shift, 0)
        same = z3.If(value >= 0, found.wide() == wanted, z3.And(found.wide() <= 0, wanted <= 0))
        if (against := made.counter(same)) is not None:
            return f"shift {shift}: {against}"
    return None


def plain(
    name: str, wanted: Callable[[Sequence[Any]], Any], count: int, within: Any = None
) -> Callable[[Edit], str | None]:
    """That a helper of operands of 32 bits gives what is wanted."""

    def check(edit: Edit) -> str | None:
        made = World()
        values = [made.unknown(f"value_{at}", LOW, HIGH) for at in range(count)]
        if within is not None:
            made.solver.add(within(values))
        found = Helpers(made, runtime(edit)).call(name, *map(short, values))
        return made.counter(found.wide() == wanted([Symbol(made, value) for value in values]).term)

    return check


def rounding_shift(edit: Edit) -> str | None:
    """round_shift, for each number of places."""
    for places in some(range(31)):
        made = World()
        value = made.unknown("value", LOW, HIGH)
        found = Helpers(made, runtime(edit)).call("round_shift", short(value), places)
        wanted = edited(gemmlowp.rounding_shift, edit)(Symbol(made, value), np.int64(places)).term
        if (against := made.counter(found.wide() == wanted)) is not None:
            return f"places {places}: {against}"
    return None


def bytes_of_lines(edit: Edit) -> str | None:
    """bytes_of_halves, of two numbers of which it gets the upper halves."""
    made = World()
    first, second = (made.unknown(f"value_{at}", LOW, HIGH) for at in range(2))
    halves = (z3.Extract(31, 0, second) & 0xFFFF0000) | z3.LShR(z3.Extract(31, 0, first), 16)
    found = Helpers(made, runtime(edit)).call("bytes_of_halves", Number(halves, 32, False))
    for place, value in ((0, first), (2, second)):
        byte = z3.ZeroExt(56, z3.Extract(8 * place + 7, 8 * place, found.term))
        wanted = limited(made, value >> 16, 0, 255)
        if (against := made.counter(byte == wanted)) is not None:
            return f"byte {place}: {against}"
    return None


def raised_sums(edit: Edit) -> str | None:
    """raised_sum: the upper half of the raised sum times the multiplier, and an offset, shifted."""
    function = edited(raised.raised_sum, edit)
    for rounding, limits in ((Rounding.DOUBLE, (-5, 127)), (Rounding.SINGLE, (-128, 127))):
        for shift in some(range(-20, -1)):
            zero_point = -5
            operator = Requantize(rounding, output_zero_point=zero_point)
            weights, start = np.full((1, 4), 100, np.int8), np.array([300])
            arrays = np.array([3 << 29]), np.array([shift])
            found = function(operator, limits, *arrays, start, weights)
            if found is None or not found.multiplier[0]:
                continue
            made, value = world(low=300 - 400 * 128, high=300 + 400 * 127)
            wanted = meant(made, value, shift, rounding) + zero_point
            power, offset = int(found.powers[0]), int(found.offset[0])
            product = made.product(z3.simplify(value)) << power
            own = ((product >> 32) + offset) >> found.shift
            ends = [limited(made, one, *limits) for one in (own, wanted)]
            if (against := made.counter(ends[0] == ends[1])) is not None:
                return f"{rounding.value}, shift {shift}: {against}"
    return None


def rectified_sums(edit: Edit) -> str | None:
    """rectified_sum: between the ends (2 sum * 2 multiplier / 2^32 + 1 + 2^r) / 2^(r + 1)."""
    function = edited(rectified.rectified_sum, edit)
    for shift in some(range(-24, 0)):
        found = function(Requantize(Rounding.DOUBLE), (0, 255), np.array([1 << 30]), np.array([shift]))
        if found is None:
            continue
        made, value = world(low=1, high=HIGH)
        wanted = meant(made, value, shift, Rounding.DOUBLE)
        places, product = int(found.shift[0]), made.product(value) * int(found.multiplier[0] >> 30)
        half = 1 + (1 << (places - 1))
        own = (z3.LShR(product * 2, 32) + half) >> places  # which the function has looked at: that it fits
        made.solver.add(wanted < 255, made.product(value) >> 30 < (1 << 32) - half)
        if (against := made.counter(own == wanted)) is not None:
            return f"shift {shift}: {against}"
    return None


def two_steps(edit: Edit) -> str | None:
    """finer_sums: rounded down, doubled, an offset, and to the nearest by float32, whose integers are exact here."""
    function = edited(rewrites.finer_sums, edit)
    for finest in (-15, -9, -4, -1):
        for shift in sorted({finest, max(finest, -3), -1}):
            for zero_point in (-128, -3):
                first, offset, bits = function(np.array([shift, finest]), zero_point)
                made, value = world(low=-(1 << 24), high=(1 << 24) - 1)
                wanted = meant(made, value, shift, Rounding.DOUBLE) + zero_point
                fine = meant(made, value, int(first[0]), Rounding.DOWN)
                moved = fine * 2 + int(offset[0])
                half = z3.BitVecVal(1 << (bits - 1), 64)
                rest, whole = moved & ((1 << bits) - 1), moved >> bits
                up = z3.Or(rest > half, z3.And(rest == half, (whole & 1) == 1))
                own = whole + z3.If(up, z3.BitVecVal(1, 64), z3.BitVecVal(0, 64))
                ends = [limited(made, one, zero_point, 127) for one in (own, wanted)]
                if (against := made.counter(ends[0] == ends[1])) is not None:
                    return f"shifts {shift} and {finest}, zero point {zero_point}: {against}"
    return None


def higher(edit: Edit) -> str | None:
    """Requantize.raised: operands 128 higher, results 128 higher, for every rounding."""
    function = edited(Requantize.raised, edit)
    for rounding in (Rounding.DOUBLE, Rounding.SINGLE, Rounding.DOWN, Rounding.AWAY):
        for shift in (-8, -1, 0):
            made, value = world(low=-128, high=127)
            operator = Requantize(rounding, input_zero_point=3, output_zero_point=-7)
            other = function(operator, [128, 0, 0])
            parts = [Symbol(made, made.multiplier), np.int64(shift)]
            one = operator.meaning(Symbol(made, value), *parts).term
            two = other.meaning(Symbol(made, value + 128), *parts).term
            if (against := made.counter(one == two)) is not None:
                return f"{rounding.value}, shift {shift}: {against}"
    return None


def equal_multipliers(edit: Edit) -> str | None:
    """equal_scales: where it finds multipliers of few bits, every sum has the same result."""
    replaced = edited(equal._multiplier, edit), edited(equal._interval, edit)
    kept = equal._multiplier, equal._interval
    equal._multiplier, equal._interval = replaced
    try:
        return _equal_multipliers()
    finally:
        equal._multiplier, equal._interval = kept


def _equal_multipliers() -> str | None:
    sums = np.arange(-600, 601, dtype=np.int64)
    for rounding in equal.HALVES:
        for own in (Rounding.DOUBLE, Rounding.SINGLE):
            for real in np.linspace(1 << 30, HIGH, 2 if QUICK else 8).astype(np.int64):
                for shift in (-4, -2):
                    low, high = np.array([-600]), np.array([600])
                    operator, limits = Requantize(own, output_zero_point=-4), Clip(-128, 127, DType.INT8)
                    arrays = np.array([real]), np.array([shift])
                    wanted = equal.LimitedSums(operator, limits, *arrays, low, high)
                    found = equal.equal_scales(wanted, rounding, 12, False)
                    if isinstance(found, int):
                        continue
                    made = fixed_point(sums[:, None], *found, rounding)[:, 0] - 4
                    wrong = np.flatnonzero(np.clip(made, -128, 127) != wanted.result(sums[:, None])[:, 0])
                    if wrong.size:
                        return f"{own.value} by {rounding.value}, {real} shifted by {shift}: {sums[wrong[0]]}"
    return None


def divisions(edit: Edit) -> str | None:
    """division: a weight, scale, offset and shift that give every sum of bytes its mean."""
    kept, pools._offset = pools._offset, edited(pools._offset, edit)
    try:
        for taps in (4, 9) if QUICK else (1, 2, 3, 4, 6, 9, 12, 16, 25, 36, 49, 64, 100, 169, 196, 256):
            sums = np.arange(255 * taps + 1, dtype=np.int64)
            for wanted in ((sums + taps // 2) // taps, np.rint(sums / taps).astype(np.int64)):
                found = edited(pools.division, edit)(wanted, float(taps), pools._CORE)
                if found is None:
                    continue
                weight, _, (scale, offset, shift) = found
                wrong = np.flatnonzero(np.clip(sums * weight * scale + offset >> shift, 0, 255) != wanted)
                if wrong.size:
                    return f"{taps} taps: sum {wrong[0]}"
    finally:
        pools._offset = kept
    return None


DOUBLE, SINGLE = Rounding.DOUBLE, Rounding.SINGLE
ANY, LESS = "every v, m >= 2^30", "every v, m >= 0"
BY_RIGHT, BY_BOTH = "1 <= s <= 31", "-30 <= s <= 31"
"""Ranges, as the page names them: a value, a multiplier, a shift to the right."""
BOTH = range(-31, 31)


def as_is(made: World, shift: int) -> Sequence[Any]:
    """The multiplier and the shift."""
    return short(made.multiplier), shift


def beyond(made: World, shift: int) -> Sequence[Any]:
    """The multiplier and the places to the right."""
    return short(made.multiplier), 31 - shift


def in_upper(made: World, shift: int) -> Sequence[Any]:
    """Twice the multiplier, places less one, and no zero point."""
    return doubled(made), -1 - shift, 0


def is_near(value: Any, shift: int) -> Any:
    """Whether a value and half a step fit."""
    most = HIGH - (1 << -shift - 1)
    return z3.And(value < most, value > -most)


RULES = (
    Rule("requantize_double", "rounds twice, as TensorFlow Lite Micro", f"{ANY}, {BY_RIGHT}", "SMT",
         helper("requantize_double", DOUBLE, RIGHT, in_upper)),
    Rule("requantize_double, 64 bits", "the same on RV64", f"{ANY}, {BY_RIGHT}", "SMT",
         helper("requantize_double", DOUBLE, RIGHT, in_upper, wide=True)),
    Rule("requantize_rectified", "the same where a result is at least 0; else both are at most 0",
         f"v within 30 bits, m >= 2^30, {BY_RIGHT}", "SMT", rectified_helper),
    Rule("requantize_near", "rounds twice", f"{ANY}, 1 <= s <= 30, v + 2^(s - 1) fits", "SMT",
         helper("requantize_near", DOUBLE, range(-30, 0), lambda made, shift: (doubled(made), -shift), within=is_near)),
    Rule("requantize_double_any", "rounds twice", f"{LESS}, {BY_BOTH}", "SMT",
         helper("requantize_double_any", DOUBLE, BOTH, as_is, least=0)),
    Rule("requantize_double_any_shift", "rounds twice", f"{ANY}, {BY_BOTH}", "SMT",
         helper("requantize_double_any_shift", DOUBLE, BOTH, lambda made, shift: (doubled(made), shift))),
    Rule("requantize_single", "rounds once, halves up", f"{LESS}, {BY_RIGHT}", "SMT",
         helper("requantize_single", SINGLE, RIGHT, in_upper, least=0)),
    Rule("requantize_single_any", "rounds once, halves up", f"{LESS}, {BY_BOTH}", "SMT",
         helper("requantize_single_any", SINGLE, BOTH, as_is, least=0)),
    Rule("requantize_down", "rounds down", f"{LESS}, {BY_BOTH}", "SMT",
         helper("requantize_down", Rounding.DOWN, BOTH, beyond, least=0)),
    Rule("requantize_away", "rounds to the nearest, halves away from zero", f"{LESS}, {BY_BOTH}", "SMT",
         helper("requantize_away", Rounding.AWAY, BOTH, beyond, least=0)),
    Rule("multiply_upper", "rounds twice by a shift of 0, which is once", ANY, "SMT",
         helper("multiply_upper", DOUBLE, [0], lambda made, shift: (doubled(made),))),
    Rule("round_shift", "divides by a power of two, halves away from zero", "every v, 0 <= s <= 30",
         "SMT", rounding_shift),
    Rule("clip", "limits a value", "every v, limits in order", "SMT",
         plain("clip", lambda v: np.minimum(np.maximum(v[0], v[1]), v[2]), 3, lambda v: v[1] <= v[2])),
    Rule("double_saturating", "doubles a value, limited to 32 bits", "every v", "SMT",
         plain("double_saturating", lambda v: np.minimum(np.maximum(v[0] * 2, LOW), HIGH), 1)),
    Rule("bytes_of_halves", "limits both halves to bytes", "every two v", "SMT", bytes_of_lines),
    Rule("raised_sum", "a requantisation as one upper half, one offset and one shift", "every sum of the layer tried, "
         "m >= 2^30, 2 <= s <= 20", "SMT", raised_sums),
    Rule("rectified_sum", "a requantisation cut off at the zero point as one product and one shift",
         "every sum whose result is below 255, m >= 2^30, 1 <= s <= 24", "SMT",
         rectified_sums),
    Rule("finer_sums", "a requantisation in two steps, the second in float32", "sums of 25 bits, m >= 2^30, "
         "1 <= s <= 15 beside the shifts of other channels", "SMT", two_steps),
    Rule("raised", "int8 values as uint8 ones, 128 higher", "every byte, m >= 2^30", "SMT", higher),
    Rule("equal_scales", "multipliers of 12 bits with the results of those of 31", "sums from -600 to 600, 96 scales",
         "115,296 values", equal_multipliers),
    Rule("division", "a mean as a weight, a scale, an offset and a shift",
         "every sum of bytes of windows of 1 to 256 taps, by two roundings", "485,044 values", divisions),
)  # fmt: skip

WRONG = (
    ("requantize_double", Edit("requantize_double", "high >> 31", "0")),
    ("requantize_double", Edit("halved", "value + 1", "value")),
    ("requantize_double, 64 bits", Edit("requantize_double", "<< 30", "<< 31")),
    ("requantize_double, 64 bits", Edit("requantize_double", "-0x80000000LL", "-0x40000000LL")),
    ("requantize_rectified", Edit("requantize_rectified", "+ 1) >> 1", ") >> 1")),
    ("requantize_near", Edit("requantize_near", "(shift - 1)", "shift")),
    ("requantize_double_any", Edit("requantize_double_any", "shift < 0 ?", "shift < -1 ?")),
    ("requantize_double_any_shift", Edit("requantize_double_any_shift", "(-1 - shift)", "(-shift)")),
    ("requantize_single", Edit("requantize_single", ">> 32", ">> 31")),
    ("requantize_single_any", Edit("requantize_single_any", "(right - 1)", "right")),
    ("requantize_away", Edit("requantize_away", "- (product < 0)", "")),
    ("multiply_upper", Edit("multiply_upper", "product >> 31)", "product >> 30)")),
    ("round_shift", Edit("round_shift", "(value < 0)", "0")),
    ("clip", Edit("clip", "value < low ? low : high", "value < low ? high : low")),
    ("double_saturating", Edit("double_saturating", "value > 0x3FFFFFFF ?", "value > 0x40000000 ?")),
    ("raised_sum", Edit("raised_sum", "1 << powers >> 2", "1 << powers >> 1")),
    ("rectified_sum", Edit("rectified_sum", "(1 - shift)", "(2 - shift)")),
    ("finer_sums", Edit("finer_sums", "+ 1, bits", ", bits")),
    ("finer_sums", Edit("finer_sums", "2 - int(shift.min())", "1 - int(shift.min())")),
    ("raised", Edit("raised", "+ by[0]", "- by[0]")),
    ("equal_scales", Edit("_interval", "-(-bound // number)", "bound // number")),
    ("division", Edit("_offset", "((wanted + 1) << shift) - 1", "(wanted + 1) << shift")),
)
"""Rules with a fault: a rounding, a bound, a sign, a shift off by one."""


HELPERS = [
    name
    for name in re.findall(r"int32_t (requantize_\w+|multiply_upper|round_shift|clip)\(", RUNTIME.read_text())
    if name not in ("requantize_float32", "requantize_wide")  # float; 64-bit sums, which tests compare
]
"""Helpers of the C runtime that bring sums to results: each has a rule."""


def proofs(only: str = "") -> Iterator[tuple[Rule, str | None, float]]:
    """Every rule with a counter-example, if there is one, and seconds."""
    for rule in RULES:
        if only in ("", rule.name):
            started = time.monotonic()
            yield rule, rule.check(NONE), time.monotonic() - started


def refutations() -> Iterator[tuple[str, Edit, str | None]]:
    """Every fault with its counter-example."""
    rules = {rule.name: rule for rule in RULES}
    for name, edit in WRONG:
        yield name, edit, rules[name].check(edit)


def table() -> str:
    """The rows of the page."""
    computed = {rule.name: "" if rule.how == "SMT" else f" ({rule.how})" for rule in RULES}
    rows = [f"| `{rule.name}` | {rule.claim} | {rule.ranges}{computed[rule.name]} |" for rule in RULES]
    return "\n".join(["| rule | claim | for |", "|---|---|---|", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="this rule")
    parser.add_argument("--wrong", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    failed = 0
    if given.write or given.check:
        text = PAGE.read_text()
        start, end = text.index(MARKS[0]) + len(MARKS[0]), text.index(MARKS[1])
        page = f"{text[:start]}\n{table()}\n{text[end:]}"
        failed += given.check and page != text
        if given.write:
            PAGE.write_text(page)
    elif given.wrong:
        for name, edit, against in refutations():
            failed += against is None
            print(f"{name}, {edit.old!r} -> {edit.new!r}: {against or 'NOT REFUTED'}"[:200], flush=True)
    else:
        for rule, against, seconds in proofs(given.only):
            failed += against is not None
            print(
                f"{rule.name:30} {'proven' if against is None else f'WRONG: {against}'} ({seconds:.1f} s)", flush=True
            )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
