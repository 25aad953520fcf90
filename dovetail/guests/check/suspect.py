"""A failure in its smallest form, and its likely causes.

Every axis is made as simple as it can be with the failure still there. The suspicions come from the usual mistakes that
give the wrong result (`instead.py`), from the differences, and from the axes that the failure needs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from dovetail.guests.check.cases import Case, taken
from dovetail.guests.check.instead import instead
from dovetail.guests.check.layers import LEAST, MADE, PADS, SIZES, single
from dovetail.guests.check.run import Outcome
from dovetail.ir.types import Array
from dovetail.records import Record
from dovetail.sim.device import INITIAL_BYTE
from dovetail.target.offload import Offload

_SIMPLEST = {"scale": 1, "offset": 2, "along": 3}
"""The simplest settings of axes for which it is not 0."""
_ROUNDS = 9
Attempt = Callable[[Sequence[Case]], list[Outcome]]
"""Runs cases."""


class MinimalCase(Record):
    """A failing case in its smallest form."""

    outcome: Outcome
    needed: tuple[str, ...]
    """Axes without whose settings all is well."""


def shrink(
    outcome: Outcome, offload: Offload, attempt: Attempt, dear: bool = False, rounds: int = _ROUNDS
) -> MinimalCase:
    """Make a failing case as simple as it can be in so many rounds; `dear` if runs that end in an error take long."""
    if outcome.hangs or (dear and outcome.error):
        simpler = {axis: Outcome(case) for axis, case in _simpler(outcome.case, offload)}
        small = _together(outcome, simpler, offload, lambda cases: _first(outcome, cases, attempt)) or outcome
        if outcome.hangs:
            return MinimalCase(small, ())
        alone = _simpler(small.case, offload)
        return MinimalCase(small, tuple(axis for axis, case in alone if not _same(small, attempt([case])[0])))
    needed: tuple[str, ...] = ()
    for _ in range(rounds):
        single = dict(_simpler(outcome.case, offload))
        results = dict(zip(single, attempt(list(single.values())), strict=True))
        failing = {axis: result for axis, result in results.items() if _same(outcome, result)}
        needed = tuple(axis for axis in single if axis not in failing)
        if not failing:
            break
        outcome = _together(outcome, failing, offload, attempt) or next(iter(failing.values()))
    return MinimalCase(outcome, needed)


def _first(outcome: Outcome, cases: Sequence[Case], attempt: Attempt) -> list[Outcome]:
    """Cases one at a time, up to the first that fails alike."""
    outcomes: list[Outcome] = []
    for case in cases:
        outcomes += attempt([case])
        if _same(outcome, outcomes[-1]):
            break
    return outcomes


def alike(one: str, other: str) -> bool:
    """Whether two errors say the same but for numbers."""
    first, second = (re.sub(r"\d\w*", "", error.splitlines()[0]) for error in (one, other))
    return first == second


def _same(one: Outcome, other: Outcome) -> bool:
    """Whether two cases fail alike: with a wrong result, or with an error."""
    return other.failed and bool(one.error) == bool(other.error)


def _together(outcome: Outcome, failing: Mapping[str, Outcome], offload: Offload, attempt: Attempt) -> Outcome | None:
    """Every simplification at once, if that fails too; else half of them, and so on; None where nothing fails."""
    axes, cases = list(failing), []
    while len(axes) > 1:
        point = {**outcome.case.point, **{axis: failing[axis].case.point[axis] for axis in axes}}
        if (checked := taken(offload, point)) is not None:
            cases.append(replace(outcome.case, point=checked.layer.settings(point)))
        axes = axes[: len(axes) // 2]
    results = attempt(cases) if cases else []
    return next((result for result in results if _same(outcome, result)), None)


def _simplest(axis: str) -> int:
    return LEAST[axis] if axis in SIZES else _SIMPLEST.get(axis.split(":")[0], 0)


def _simpler(case: Case, offload: Offload) -> Iterator[tuple[str, Case]]:
    """For each axis the simplest setting the limits take with all others as they are."""
    for axis, value in case.point.items():
        steps = [_simplest(axis)]
        if value == steps[0] or axis in MADE:
            continue
        if axis in SIZES:
            steps += [size for size in (2, 3, value // 2, value - 1) if LEAST[axis] < size < value]
        tries = [{axis: size} for size in steps]
        name, _, direction = axis.rpartition("_")
        other = f"{name}_{_OTHER.get(direction, '')}"
        if other in case.point:  # some limits want both directions alike
            tries += [{axis: size, other: size} for size in steps]
        for less in tries:
            point = _smaller_image({**case.point, **less}, axis)
            if (checked := taken(offload, point)) is not None:
                yield axis, replace(case, point=checked.layer.settings(point))
                break


_OTHER = {"rows": "columns", "columns": "rows"}


def _smaller_image(point: dict[str, int], axis: str) -> dict[str, int]:
    """The point with less padding where a kernel gets smaller: padding is smaller than the kernel."""
    sides = {"kernel_rows": PADS[:2], "kernel_columns": PADS[2:]}.get(axis, ())
    return point | {side: min(point[side], point[axis] - 1) for side in sides if side in point}


_NEEDED = (
    (("input_zero",), "the operand's zero point: forgotten, or not taken off everywhere"),
    (("output_zero",), "the result's zero point: forgotten, or its sign"),
    (("weight_zero",), "the weights' zero point: forgotten"),
    (("pad_offset",), "the value of padding: too wide a limit, or not told to the engine"),
    (("groups",), "groups: too wide a limit"),
    (("dilation_rows", "dilation_columns"), "dilation: too wide a limit, or not told to the engine"),
    (("stride_rows", "stride_columns"), "stride: too wide a limit, or not told to the engine"),
    (("bias",), "the bias: forgotten, or in the wrong place"),
    (PADS, "padding or halo"),
    (("per_channel", "scale"), "parameters per channel: their order or their number"),
    (("kernel_rows", "kernel_columns"), "kernel or halo: too wide a limit, or the order of the taps"),
    (("batch",), "several images: too wide a limit"),
    (("rounding",), "rounding: too wide a limit"),
    (("type", "result"), "the type of operand or result: too wide a limit"),
    (("weight_type",), "narrow weights: too wide a limit, or how they are packed"),
    (("channels",), "input channels: weight order, alignment or too wide a limit"),
    (("outputs",), "output channels: weight order, alignment or too wide a limit"),
    (("rows", "columns"), "addresses: alignment, strides between rows, or too wide a limit"),
)
_EXAMINED = 6
"""Failing cases in which mistakes are looked for."""
_COMPARED = 40
"""Other cases whose results the mistakes are compared with."""


def suspicions(
    shrunk: MinimalCase, failed: Sequence[Outcome], others: Sequence[Outcome], offload: Offload
) -> list[str]:
    """Sentences, the likeliest first; at least one. `failed` are all that failed alike, the one shrunk first, and
    `others` all that were tried."""
    needed = list(_of_needed(shrunk))
    if shrunk.outcome.error:
        reason = cause_of(shrunk.outcome.error)
        sentences = [*needed, reason] if reason.startswith(REPORTED) else [reason, *needed]
    else:
        assert failed[0].actual is not None and failed[0].expected is not None
        likely, perhaps = explained([shrunk.outcome, *failed], others, offload)
        seen = list(_of_difference(failed[0].actual, failed[0].expected))
        sentences = [*likely, *needed, *seen, *perhaps] if likely else [*seen, *perhaps, *needed]
    return list(dict.fromkeys(sentences)) or ["nothing about it is known: compare the driver's registers with the job"]


REPORTED = "as the error says: "
_EXCEPTION = re.compile(r"\b[A-Z]\w*(Error|Exception)\b")
"""Part of the errors of the port's own code."""
_ERRORS = (
    ("gave no answer", "the port hangs: the device model, the driver or a library never comes to an end"),
    ("hangs", "the port hangs: the engine never finishes, or the driver waits for the wrong register"),
    ("instructions without an end", "the port hangs: the driver polls for what never comes"),
    ("places taken", "a launch is started while the engine has no room: the driver does not wait for the one before"),
    ("before a job is acquired", "a job is written while the engine has no room: the driver does not wait for one"),
    (
        "were never written",
        "a register is not written: what the launch before was given is not there, e.g. in a second context",
    ),
    ("deadlock", "the port hangs: the engine raised no interrupt, or the driver waits for one too many"),
    ("fence is missing", "a fence or a wait is missing: what one launch writes the next one reads too early"),
    ("wait is missing", "a fence or a wait is missing: what one launch writes the next one reads too early"),
    ("writes outside of its result", "the engine writes outside of its result: halo, size or stride"),
    ("not inside one memory", "an address is wrong: halo, size or stride"),
    ("align", "bad alignment: of an address, a stride or packed constants"),
    ("multiple of", "bad alignment: of an address, a stride or packed constants"),
    ("does not fit 32 bits", "a register is given a number that is too large: too wide a limit"),
    ("against its limit", "a limit is asked differently of the same layer: what its measure depends on"),
)
"""Parts of errors, in lower case, and what they point to."""


def cause_of(error: str) -> str:
    """The cause an error points to; begins with `REPORTED` where none is known."""
    line = error.splitlines()[0]
    own = "the port's own code: " if _EXCEPTION.search(line) else REPORTED
    return next((sentence for part, sentence in _ERRORS if part in error.lower()), f"{own}{line}")


def explained(failed: Sequence[Outcome], others: Sequence[Outcome], offload: Offload) -> tuple[list[str], list[str]]:
    """Mistakes that give the very results of failing cases: of most of those examined, and of fewer.

    The first are those that would give the results of the most cases, also of `others`, which failed or went well: on
    small layers many mistakes look alike.
    """
    examined = failed[: _EXAMINED + 1]
    counted: Counter[str] = Counter()
    for outcome in examined:
        counted.update(_fitting(outcome, offload))
    ids = {id(outcome) for outcome in examined}
    rest = [one for one in others if one.actual is not None and one.case.taken and id(one) not in ids][:_COMPARED]
    right: Counter[str] = Counter()
    for outcome in (*examined, *rest) if len(counted) > 1 else ():
        right.update(_fitting(outcome, offload, counted))
    ranked = sorted(counted, key=lambda sentence: (-right[sentence], -counted[sentence]))
    most = [sentence for sentence in ranked if 2 * counted[sentence] >= len(examined)]
    return most[:2], [sentence for sentence in ranked if sentence not in most][:2]


def _fitting(outcome: Outcome, offload: Offload, wanted: Collection[str] = ()) -> list[str]:
    """Mistakes, of those `wanted` if there are any, that give the result of a case; of a case that went well those that
    change nothing there, and those that cannot be made."""
    assert outcome.actual is not None and outcome.expected is not None
    graph, layer = single(offload.pattern, offload.cases, outcome.case.point)
    mutants = list(instead(graph, layer, wanted))
    if outcome.failed:  # what is known of no element gives any result
        mutants = [mutant for mutant in mutants if mutant.known is None or mutant.known.any()]
    fitting = dict.fromkeys(mutant.sentence for mutant in mutants if mutant.gives(outcome.actual))
    if outcome.failed:
        right = {mutant.sentence for mutant in mutants if mutant.gives(outcome.expected)}
        return [sentence for sentence in fitting if sentence not in right]
    return [*fitting, *sorted(set(wanted) - {mutant.sentence for mutant in mutants})]


def _of_difference(actual: Array, expected: Array) -> Iterator[str]:
    """Sentences on the places and sizes of the differences."""
    wrong, gap = actual != expected, actual.astype(np.int64) - expected.astype(np.int64)
    if (np.ascontiguousarray(actual[wrong]).view(np.uint8) == INITIAL_BYTE).all():
        yield f"never written: {_where(wrong) or 'part of the result'}"
    if (order := _permutation(actual, expected)) is not None:
        if _is_written_over(order):
            yield "a buffer of sums or results holds two blocks of channels: the later one lies over the first"
        yield f"output channels permuted: weight order (result channels are {order[:8]}...)"
    if actual.ndim == 4 and actual.shape[1] == actual.shape[2] and np.array_equal(actual.swapaxes(1, 2), expected):
        yield "rows and columns of the result are swapped: strides"
    if place := _where(wrong):
        yield f"differs only {place}"
    if np.abs(gap).max() == 1 and expected.dtype.itemsize == 1:
        yield "off by one in rounding"
    if actual[..., 0].size > 3 and (gap == gap[(0,) * (actual.ndim - 1)]).all():
        yield "differs by a constant per channel: the bias, or the zero point times the sum of the weights"


def _where(wrong: Array) -> str:
    """The part of the result that holds all differences, if it is a small one; else empty."""
    if wrong.ndim == 4:
        for axis, name in ((1, "row"), (2, "column")):
            size = wrong.shape[axis]
            lines = np.flatnonzero(wrong.any(axis=tuple(other for other in range(4) if other != axis)))
            if size > 2 and lines.size == 1 and lines[0] in (0, size - 1):
                return f"on the {'last' if lines[0] else 'first'} {name}: padding or halo"
        inner = wrong[:, 1:-1, 1:-1]
        if inner.size and not inner.any():
            return "on the border: padding or halo"
    channels = np.flatnonzero(wrong.any(axis=tuple(range(wrong.ndim - 1))))
    if channels.size and channels[0] > 0 and wrong.shape[-1] - channels[0] <= wrong.shape[-1] // 2:
        return f"from channel {channels[0]} on: what does not fill a block of channels"
    return ""


def _permutation(actual: Array, expected: Array) -> list[int] | None:
    """The expected channel that each channel equals, if they are all there in another order."""
    flat, wanted = (array.reshape(-1, array.shape[-1]) for array in (actual, expected))
    if len(flat) < 4 or flat.shape[1] < 2:
        return None
    order = []
    for channel in range(flat.shape[1]):
        same = np.flatnonzero((wanted == flat[:, channel : channel + 1]).all(axis=0))
        if not same.size:
            return None
        order.append(int(same[0]))
    return order if order != sorted(order) else None


def _is_written_over(order: Sequence[int]) -> bool:
    """Whether the first channels are those of a later block, which is there as well."""
    steps = {at - place for place, at in enumerate(order) if at != place}
    moved = [place for place, at in enumerate(order) if at != place]
    return len(steps) == 1 and min(steps) > 0 and moved == list(range(len(moved))) and len(moved) <= min(steps)


_LARGE = 64
"""Rows or columns from which on a layer is thought to be computed in parts."""


def _of_needed(shrunk: MinimalCase) -> Iterator[str]:
    needed = {axis.split(":")[0] for axis in shrunk.needed}
    if any(shrunk.outcome.case.point[axis] >= _LARGE for axis in needed & {"rows", "columns"}):
        yield "strides or addresses of parts: only large images, which are computed in parts, are wrong"
    for axes, sentence in _NEEDED:
        if needed & set(axes):
            yield sentence
    if "weights" in needed:
        yield "weight order: it is right where all weights are the same"
