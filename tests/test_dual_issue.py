"""The Cortex-M7 issues two instructions at once where its rules say so."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("capstone", reason="the clock of the Cortex-M7 needs dovetail[iss]")

from dovetail.sim.arm import CortexMCosts, decode, is_wide, occupied
from dovetail.sim.dual_issue import IssueClock
from dovetail.target.costs import CORTEX_M7

COSTS = CortexMCosts(**CORTEX_M7)
WORDS = {
    "adds r0, r1, r2": (0x1888,),
    "adds r3, r4, r5": (0x1963,),
    "adds r3, r0, r5": (0x1943,),
    "ldr r0, [r1]": (0x6808,),
    "ldr r2, [r3]": (0x681A,),
    "ldr r4, [r0]": (0x6804,),
    "str r0, [r1]": (0x6008,),
    "str r2, [r3]": (0x601A,),
    "lsls r0, r1, #2": (0x0088,),
    "lsls r3, r4, #2": (0x00A3,),
    "smlad r0, r1, r2, r0": (0xFB21, 0x0002),
    "smlad r3, r4, r5, r3": (0xFB24, 0x3305),
    "sxtb16 r6, r7": (0xFA2F, 0xF687),
}


def cycles(*names: str) -> int:
    """Of instructions one after the other."""
    clock = IssueClock()
    for name in names:
        words = WORDS[name]
        assert is_wide(words[0]) == (len(words) == 2)
        instruction = decode(*words)
        clock.issue(instruction, b"".join(word.to_bytes(2, "little") for word in words), occupied(instruction, COSTS))
    return clock.cycle + 1


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        (["adds r0, r1, r2", "adds r3, r4, r5"], 1),
        (["adds r0, r1, r2", "adds r3, r0, r5"], 2),
        (["ldr r0, [r1]", "ldr r2, [r3]"], 1),
        (["ldr r0, [r1]", "adds r3, r0, r5"], 3),
        (["ldr r0, [r1]", "ldr r4, [r0]"], 3),
        (["str r0, [r1]", "str r2, [r3]"], 2),
        (["ldr r0, [r1]", "str r2, [r3]"], 1),
        (["lsls r0, r1, #2", "lsls r3, r4, #2"], 2),
        (["lsls r0, r1, #2", "adds r3, r4, r5"], 1),
        (["smlad r0, r1, r2, r0", "smlad r3, r4, r5, r3"], 2),
        (["smlad r0, r1, r2, r0", "smlad r0, r1, r2, r0"], 2),
        (["smlad r0, r1, r2, r0", "adds r3, r0, r5"], 3),
        (["smlad r0, r1, r2, r0", "ldr r2, [r3]"], 1),
        (["ldr r2, [r3]", "sxtb16 r6, r7"], 2),
        (["sxtb16 r6, r7", "ldr r2, [r3]"], 1),
    ],
)
def test_pairs(names: list[str], taken: int) -> None:
    assert cycles(*names) == taken


@given(st.lists(st.sampled_from(sorted(WORDS)), min_size=1, max_size=40))
def test_never_more_than_two_at_once_and_no_wait_beyond_a_result(names: list[str]) -> None:
    assert -(-len(names) // 2) <= cycles(*names) <= 2 * len(names)


@given(st.lists(st.sampled_from(sorted(WORDS)), min_size=2, max_size=20))
def test_a_further_instruction_never_ends_earlier(names: list[str]) -> None:
    assert cycles(*names[:-1]) <= cycles(*names)
