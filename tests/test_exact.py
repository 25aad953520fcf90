"""What is called exact is proven, and proofs find faults: scripts/prove.py, by some shifts of each rule."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("z3", reason="the solver is not installed")

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import prove  # noqa: E402
from proofs_of_c import RUNTIME  # noqa: E402

RULES = {rule.name: rule for rule in prove.RULES}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove, "QUICK", True)


@pytest.mark.parametrize("name", RULES)
def test_it_is_proven(name: str) -> None:
    assert RULES[name].check(prove.NONE) is None


@pytest.mark.parametrize(("name", "edit"), prove.WRONG, ids=lambda one: str(getattr(one, "new", one)))
def test_a_wrong_rule_is_refuted(name: str, edit: prove.Edit) -> None:
    assert RULES[name].check(edit)


def test_there_are_twenty_wrong_ones_and_the_page_is_written() -> None:
    assert len(prove.WRONG) >= 20
    assert prove.table() in prove.PAGE.read_text("utf-8")
    text = RUNTIME.read_text("utf-8")
    missing = [name for name in prove.HELPERS if f" {name}(" in text and name not in " ".join(RULES)]
    assert not missing, "a helper that requantises, and no rule for it"
