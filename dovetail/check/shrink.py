"""A failure in its smallest form: every axis as simple as it can be with the failure still there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dovetail.check.cases import Case, ask
from dovetail.check.layers import LEAST, PADS, SIZES, setting
from dovetail.check.run import Outcome
from dovetail.target.description import Offload

_SIMPLEST = {"input_zero": 0, "weight_zero": 0, "output_zero": 0, "pad_offset": 0, "per_channel": 0, "bias": 0,
             "weights": 0, "x": 0, "scale": 1, "offset": 2, "range": 0, "type": 0, "weight_type": 0, "result": 0,
             "rounding": 0, "with": 0, "first": 0, "along": 3, "order": 0, "function": 0}  # fmt: skip
_ROUNDS = 9


@dataclass(frozen=True)
class Shrunk:
    """The smallest form found."""

    outcome: Outcome
    needed: tuple[str, ...]
    """Axes without whose settings all is well."""


def shrink(
    outcome: Outcome, offload: Offload, attempt: Callable[[Sequence[Case]], list[Outcome]], dear: bool = False
) -> Shrunk:
    """Make a failing case as simple as it goes.

    Args:
        outcome: of the case.
        offload: what it is about.
        attempt: carries cases out.
        dear: whether a try that ends in an error takes long.
    """
    needed: tuple[str, ...] = ()
    if outcome.hangs or (dear and outcome.error):
        simpler = {axis: Outcome(case) for axis, case in _simpler(outcome.case, offload)}
        small = _together(outcome, simpler, offload, lambda cases: _first(outcome, cases, attempt))
        return Shrunk(small or outcome, ())
    for _ in range(_ROUNDS):
        single = {axis: case for axis, case in _simpler(outcome.case, offload)}
        results = dict(zip(single, attempt(list(single.values())), strict=True))
        failing = {axis: result for axis, result in results.items() if _same(outcome, result)}
        needed = tuple(axis for axis in single if axis not in failing)
        if not failing:
            break
        outcome = _together(outcome, failing, offload, attempt) or next(iter(failing.values()))
    return Shrunk(outcome, needed)


def _first(
    outcome: Outcome, cases: Sequence[Case], attempt: Callable[[Sequence[Case]], list[Outcome]]
) -> list[Outcome]:
    """Cases one at a time, up to the first that fails alike."""
    found: list[Outcome] = []
    for case in cases:
        found += attempt([case])
        if _same(outcome, found[-1]):
            break
    return found


def _same(one: Outcome, other: Outcome) -> bool:
    """Whether two cases fail alike: with a wrong result, or with an error."""
    return other.failed and bool(one.error) == bool(other.error)


def _together(
    outcome: Outcome, failing: Mapping[str, Outcome], offload: Offload,
    attempt: Callable[[Sequence[Case]], list[Outcome]],
) -> Outcome | None:
    """Every simplification at once, if that fails too; else half of them, and so on; None where nothing fails."""
    axes = list(failing)
    tries = []
    while len(axes) > 1:
        point = {**outcome.case.point, **{axis: failing[axis].case.point[axis] for axis in axes}}
        asked = ask(offload, point)
        if asked is not None and not asked.failures:
            tries.append(replace(outcome.case, point={axis: setting(point, axis) for axis in asked.layer.used}))
        axes = axes[: len(axes) // 2]
    found = [result for result in attempt(tries) if _same(outcome, result)] if tries else []
    return found[0] if found else None


def _ends(case: Case) -> Iterator[str]:
    """Axes that are not yet as simple as can be."""
    yield from (axis for axis, value in case.point.items() if value != _simplest(axis))


def _simplest(axis: str) -> int:
    return LEAST[axis] if axis in SIZES else _SIMPLEST[axis.split(":")[0]]


def _simpler(case: Case, offload: Offload) -> Iterator[tuple[str, Case]]:
    """For each axis the simplest setting the limits take with all others as they are."""
    for axis in _ends(case):
        value = case.point[axis]
        steps = [_simplest(axis)]
        if axis in SIZES:
            steps += [size for size in (2, 3, value // 2, value - 1) if LEAST[axis] < size < value]
        both = {axis, _other(axis)} & set(case.point)
        tries = [{axis: size} for size in steps] + [dict.fromkeys(both, size) for size in steps if len(both) > 1]
        for less in tries:  # some limits want both directions alike
            point = _smaller_image({**case.point, **less}, axis)
            asked = ask(offload, point)
            if asked is not None and not asked.failures:
                yield axis, replace(case, point={name: setting(point, name) for name in asked.layer.used})
                break


def _other(axis: str) -> str:
    """The same of the other direction."""
    return axis.replace("_rows", "_columns") if axis.endswith("_rows") else axis.replace("_columns", "_rows")


def _smaller_image(point: dict[str, int], axis: str) -> dict[str, int]:
    """A kernel that gets smaller takes the padding beyond it along."""
    if axis in ("kernel_rows", "kernel_columns"):
        sides = PADS[:2] if axis == "kernel_rows" else PADS[2:]
        point |= {side: min(point[side], point[axis] - 1) for side in sides if side in point}
    return point
