"""Exact placement with a constraint solver, started from a greedy answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.plan.allocate import Pair


def improve(
    sizes: Mapping[str, int],
    clashes: Mapping[str, Mapping[str, Sequence[Pair]]],
    start: Mapping[str, int],
    bound: int,
    alignment: int,
    seconds: float,
) -> tuple[dict[str, int], int]:
    """Offsets with a peak no higher than the start's; the start itself when OR-tools is not installed.

    Args:
        sizes: bytes of each buffer, multiples of `alignment`.
        clashes: for each buffer the others it must not share bytes with, and which pieces of the two.
        start: offsets that are valid.
        bound: no peak can be lower.
        alignment: bytes.
        seconds: limit on deterministic solver time.
    """
    peak = max((start[name] + sizes[name] for name in start), default=0)
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        return dict(start), peak
    model = cp_model.CpModel()
    top = model.new_int_var(bound // alignment, peak // alignment, "peak")
    offsets = {name: model.new_int_var(0, (peak - size) // alignment, name) for name, size in sizes.items()}
    for name, size in sizes.items():
        model.add(offsets[name] + size // alignment <= top)
        model.add_hint(offsets[name], start[name] // alignment)
        for other in sorted(clashes[name]):
            for number, (mine, its) in enumerate(clashes[name][other] if name < other else ()):
                below = model.new_bool_var(f"{name} below {other} {number}")
                up, down = ((a.stop - b.start) // alignment for a, b in ((mine, its), (its, mine)))
                model.add(offsets[name] + up <= offsets[other]).only_enforce_if(below)
                model.add(offsets[other] + down <= offsets[name]).only_enforce_if(~below)
    model.minimize(top)
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return dict(start), peak
    found = {name: solver.value(offset) * alignment for name, offset in offsets.items()}
    return found, max(found[name] + sizes[name] for name in found)
