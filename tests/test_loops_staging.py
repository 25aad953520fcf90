"""Slots of an engine's memory: disjoint, inside it, one for every name first; used in turn and found again."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.errors import PlanError
from dovetail.loops import Demand, Pool, pools

FIXED = settings(derandomize=True, deadline=None, max_examples=200)


@st.composite
def demands(draw: st.DrawFn) -> list[Demand]:
    """Names with sizes and slots of use."""
    count = draw(st.integers(1, 5))
    numbers = st.tuples(st.integers(1, 20), st.integers(0, 12))
    return [Demand(f"name{place}", *draw(numbers)) for place in draw(st.permutations(range(count)))]


@FIXED
@given(demands(), st.integers(1, 200), st.integers(0, 4))
def test_pools_are_disjoint_and_fit(wanted: list[Demand], capacity: int, most: int) -> None:
    least = sum(demand.entries for demand in wanted)
    if least > capacity:
        with pytest.raises(PlanError) as raised:
            pools("INP", capacity, wanted, most)
        text = raised.value.what
        assert text.startswith(f"a tile needs {least} entries of INP (") and text.endswith(f"which has {capacity}")
        assert all(f"{demand.name} {demand.entries}" in text for demand in wanted)
        return
    made = pools("INP", capacity, wanted, most)
    assert set(made) == {demand.name for demand in wanted}
    taken = [0] * capacity
    for pool in made.values():
        assert pool.contents == [None] * pool.count
        for entry in range(pool.base, pool.base + pool.count * pool.entries):
            taken[entry] += 1  # IndexError: it leaves the memory
    assert max(taken) == 1
    left = taken.count(0)
    for demand in wanted:
        pool = made[demand.name]
        limit = max(1, min(demand.useful, most or capacity))
        assert pool.entries == demand.entries and 1 <= pool.count <= limit
        assert pool.count == limit or left < demand.entries  # nothing of use is left out
    assert pools("INP", capacity, wanted[::-1], most) == made


@FIXED
@given(demands(), st.integers(1, 200))
def test_no_name_has_a_third_slot_before_all_that_can_have_two(wanted: list[Demand], capacity: int) -> None:
    if sum(demand.entries for demand in wanted) > capacity:
        return
    made = pools("WGT", capacity, wanted)
    single = [demand for demand in wanted if demand.useful >= 2 and made[demand.name].count == 1]
    for demand in wanted:
        extra = (made[demand.name].count - 2) * demand.entries
        assert extra <= 0 or all(extra < other.entries for other in single)


@FIXED
@given(st.integers(1, 5), st.lists(st.one_of(st.none(), st.integers(0, 6)), max_size=40))
def test_slots_are_used_in_turn_and_found_again(count: int, keys: list[int | None]) -> None:
    pool = Pool(10, 3, count, [None] * count)
    model: deque[tuple[int | None, int]] = deque(maxlen=count)
    for number, key in enumerate(keys):
        held = [entry for other, entry in model if other == key and key is not None]
        assert pool.find(key) == (held[0] if held else None)
        if not held:
            taken = sum(1 for _ in model) if len(model) < count else None
            entry = pool.take(key)
            assert entry == (10 + 3 * taken if taken is not None else model[0][1]), number
            model.append((key, entry))


def test_what_a_slot_held_is_gone_when_it_is_taken() -> None:
    pool = Pool(0, 4, 2, [None, None])
    assert [pool.take("a"), pool.take("b"), pool.find("a"), pool.find("b")] == [0, 4, 0, 4]
    assert pool.take(None) == 0
    assert pool.find("a") is None and pool.find(None) is None and pool.find("b") == 4
