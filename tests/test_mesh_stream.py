"""Streams in time: what the event model makes of turns as they were charged, or as firmware was seen to take them."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.guests.mesh.placement import MeshMapping
from dovetail.guests.mesh.simulate import StreamTiming, simulate
from dovetail.guests.mesh.traffic import Floats
from test_mesh_mapping import mapped
from test_mesh_own import FEW, small

INPUTS = 8


@lru_cache
def found() -> MeshMapping:
    """A small network on two chips."""
    return mapped(small(), FEW)


def charged() -> Floats:
    """[1, pieces, 3] turns as the model charges them."""
    clocks = np.concatenate([stage.costs.clocks for stage in found().sections[0].stages])
    ready = clocks - FEW.core.after
    return np.stack((ready, ready, clocks), axis=1)[None]


def same(one: StreamTiming, other: StreamTiming) -> bool:
    """Whether two streams take the same times."""
    arrays = zip((one.start, one.finish, one.ready), (other.start, other.finish, other.ready), strict=True)
    return one.done == other.done and all(np.array_equal(a, b) for a, b in arrays)


def test_turns_as_charged_are_the_model() -> None:
    placed, _ = found().whole
    assert same(simulate(placed, INPUTS), simulate(placed, INPUTS, turns=charged()))
    slower = charged().copy()
    slower[0, int(slower[0, :, 2].argmax())] *= 3
    assert simulate(placed, INPUTS, turns=slower).interval >= slower.max()
    assert not same(simulate(placed, INPUTS), simulate(placed, INPUTS, turns=slower))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 30), executed=st.integers(1, 3))
def test_turns_that_were_executed_are_kept(seed: int, executed: int) -> None:
    """An element does one input at a time and sends no sooner than it can; nobody writes to a slot that is not free."""
    placed, _ = found().whole
    draw = np.random.default_rng(seed)
    shape = (executed, placed.section.pieces, 3)
    turns = np.cumsum(draw.integers(0, 2000, shape), axis=2)[:, :, [0, 1, 2]]
    times = simulate(placed, INPUTS, turns=turns)
    repeated = turns[np.arange(INPUTS) % executed]
    assert (times.start[1:] >= times.start[:-1] + repeated[:-1, :, 2]).all()
    assert np.array_equal(times.finish, times.start + repeated[:, :, 1])
    assert (times.start >= times.ready).all()
    traffic = placed.traffic
    senders, readers = traffic.pairs()
    reader_of = dict(
        zip(
            zip(traffic.set_of_members().tolist(), traffic.members.tolist(), strict=True),
            traffic.held.tolist(),
            strict=True,
        )
    )
    back = times.start + repeated[:, :, 0]
    for sender, reader in zip(senders.tolist(), readers.tolist(), strict=True):
        depth = reader_of[int(traffic.group[sender]), reader]
        assert (times.ready[:, reader] > times.finish[:, sender]).all()
        assert (times.ready[depth:, reader] > back[: INPUTS - depth, reader]).all()
