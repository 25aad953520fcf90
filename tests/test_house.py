"""The counts that scripts/house.py holds: each finds what it is there to find, and the budgets are kept."""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import english
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


HARD = (
    "What stands there is copied.",
    "It is copied; what the engine reads is kept.",
    "This is the layer it is the bias of.",
    "It waits, for it is late.",
    "The second follows behind it.",
    "Layers of which none is cut are kept.",
    "Nothing reads it any more.",
    "This is a byte no engine can do without.",
    "These are operators of one's own.",
    "It is read by whoever is first.",
    "Tickets wrap, and it does not mind.",
    "It is larger than what the engine reads.",
    "Where there is a DMA, it copies.",
    "These are regions between which the core waits.",
    "The second port has none.",
    "The cycles are the core's.",
    "Elements that are there are used.",
    "The input is an integer, so is the result.",
    "Both sums shall be equal.",
)


def test_hard_messages_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever way the text is put together."""
    monkeypatch.setattr(english, "ROOT", tmp_path)
    code = 'flag(0, "Of the search.")\nraise DovetailError(f"{a} is late" + ", for it waits", where="x", hint="y")\n'
    (tmp_path / "a.py").write_text(code + 'option(help="Seed of the search.")\n')
    assert [place.split(":")[1] for place in english.said(tmp_path / "a.py")] == ["1", "2"]


def test_hard_sentences_are_found_and_few() -> None:
    """Each form is found in its own sentence; plain sentences have none."""
    assert english.excess() == []
    found = [english.forms(sentence) for sentence in HARD]
    assert all(found) and {form for forms in found for form in forms} == set(english.FORMS)
    for plain in ("The contents are copied.", "Which engine do I have?", "What is the limit?", "It waits for the DMA."):
        assert english.forms(plain) == []
