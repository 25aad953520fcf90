"""The counts that scripts/house.py holds: each finds what it is there to find, and the budgets are kept."""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import house

pytestmark = pytest.mark.quick

SEEDED = """
from dovetail.guests import sweep
from dovetail.ir.graph import _hidden

class Target: ...

class _Target: ...

def long():
    '''What this is.'''
    if isinstance(operator, Conv2d) or type(node.operator) is Conv2d: ...
    node.expect(Conv2d)
""" + "\n".join(f"    x = {n}" for n in range(70))


def test_the_budgets_are_kept() -> None:
    _, figures = house.table()
    budgets = tomllib.loads(house.BUDGET.read_text())
    assert budgets.keys() <= figures.keys(), "a budget is for a figure that nobody counts"
    over = {name: (figures[name], most) for name, most in budgets.items() if figures[name] > most}
    assert not over, f"figure and budget: {over}; python scripts/house.py --where lists the places"


def test_every_seeded_fault_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded = {**house.sources(), Path("legalize/layers.py"): ast.parse(SEEDED)}
    monkeypatch.setattr(house, "sources", lambda: seeded)
    here = [line for path, line in house.type_questions() if path == Path("legalize/layers.py")]
    assert len(here) == 3, "isinstance, type and expect"
    assert any("legalize/layers.py" in place for place in house.private_imports())
    assert any("legalize/layers.py" in place for place in house.guest_imports())
    assert any("long" in place for place in house.long_functions(60))
    assert "Target" in house.repeated_classes()
    assert house.riddles()["What"] > 0
