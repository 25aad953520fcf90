"""Chains of layers, walked: what is found is as good as what is found by trying all; the engine runs as it was told."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.compile import Options, prepare
from dovetail.guests.tune.measure import measured
from dovetail.schedule.tiles.chain import ChainLink, ChainState, behind, quickest
from dovetail.schedule.tiles.clock import Estimate
from dovetail.schedule.tiles.tiling import Tiling
from dovetail.targets import load_target
from dovetail.timing.transfers import CopyCost
from test_end_to_end import network_file


def link(parts: int, computing: int, fetching: int) -> ChainLink:
    """A layer of so many parts."""
    cost = Estimate(0, engine=parts * computing, copying=parts * fetching, fetching=parts * fetching)
    tiling = Tiling((1,), frozenset(), min(parts, 2), estimate=cost)
    return ChainLink(tiling, parts, computing, 0, CopyCost(1, fetching))


def first_of(name: str) -> ChainState:
    """A chain without layers, on a target's engine."""
    target = load_target(name)
    return ChainState.first(target.engines[0], target.core.statements)


def end_of(first: ChainState, links: Sequence[ChainLink]) -> int:
    """Cycle in which layers cut in these ways have ended."""
    return reduce(behind, links, first).engine.ends[-1]


ENGINES = st.sampled_from(("macarray", "ne16", "kestrel")).map(first_of)
"""One launch at a time, two, and a list."""


@st.composite
def chains(draw: st.DrawFn) -> list[list[ChainLink]]:
    """Up to five layers, each cut in up to three ways."""
    found = []
    for _ in range(draw(st.integers(1, 5))):
        work, constants = draw(st.integers(100, 4000)), draw(st.integers(0, 4000))
        counts = sorted(draw(st.sets(st.sampled_from((1, 2, 3, 4, 8)), min_size=1, max_size=3)), reverse=True)
        found.append([link(count, work // count, constants // count + 16) for count in counts])
    return found


@settings(deadline=None, max_examples=150)
@given(ENGINES, chains())
def test_the_best_of_all_ways_is_found_or_nearly(first: ChainState, layers: list[list[ChainLink]]) -> None:
    found, every = end_of(first, quickest(first, layers)), [end_of(first, ways) for ways in product(*layers)]
    assert min(every) <= found <= 1.01 * min(every)


@given(ENGINES, chains())
def test_an_end_is_no_less_than_what_engine_and_dma_do(first: ChainState, layers: list[list[ChainLink]]) -> None:
    for ways in product(*layers):
        assert end_of(first, ways) >= sum(one.parts * one.computing for one in ways)
        assert end_of(first, ways) >= sum(one.parts * one.constants.cycles for one in ways)


@pytest.mark.oracles
@pytest.mark.parametrize(("name", "most"), [("macarray", 46_500), ("ne16", 35_860)])
def test_a_chain_of_dense_layers_waits_little(name: str, most: int) -> None:
    """Cycles of the autoencoder, whose constants are most of what it takes."""
    target = load_target(name)
    assert measured(prepare(Path(network_file("ad_autoencoder")), target, Options()), target, None, {}) <= most
