"""The most cycles that a network may take on a target: tests/cycles.csv, which `pytest --update` writes anew."""

from __future__ import annotations

import fcntl
from pathlib import Path

from tables import put, read

BUDGET = Path(__file__).with_name("cycles.csv")
COLUMNS = ["network", "target", "most"]


def rounded_up(cycles: int) -> int:
    """The budget for a measured count: up to three digits, so that a change of a thousandth needs no new budget."""
    step = 10 ** max(len(str(cycles)) - 3, 0)
    return -(-cycles // step) * step


def within_budget(network: str, target: str, cycles: int | None, update: bool) -> None:
    """Fail if a network takes more cycles than its budget; with `update`, make the count the budget.

    Args:
        network: its name, e.g. `digits`.
        target: name of the target.
        cycles: of one inference.
        update: whether pytest was started with --update.
    """
    assert cycles, f"{network} on {target}: no cycles were counted"
    if update:
        with BUDGET.open("a") as lock:  # tests run on several processes
            fcntl.flock(lock, fcntl.LOCK_EX)
            rows = {(name, where): most for name, where, most in read(BUDGET)[1:]} if BUDGET.stat().st_size else {}
            rows[network, target] = str(rounded_up(cycles))
            put(BUDGET, [COLUMNS, *([*key, rows[key]] for key in sorted(rows))])
    most = {(name, where): int(most) for name, where, most in read(BUDGET)[1:]}.get((network, target))
    again = "if that is meant, add --update to this pytest command"
    assert most is not None, f"{network} on {target} has no budget in tests/cycles.csv: {again}"
    print(f"{network} on {target}: {cycles:,} of {most:,} cycles")
    assert cycles <= most, f"{network} on {target} takes {cycles:,} cycles, its budget is {most:,}: {again}"
