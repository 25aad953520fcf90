"""Constants of neighbouring tiles that one copy fetches, into a memory of the engine's own for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diana_networks import dense
from dovetail.compile import Options, compile_graph
from dovetail.errors import ProgramError
from dovetail.guests.tune.cost import estimator
from dovetail.guests.tune.layers import region_alone
from dovetail.guests.tune.measure import measured
from dovetail.ir.types import DType, TensorType
from dovetail.program.ir import Copy, LaunchStatement, Program, Role
from dovetail.program.verify import verify
from dovetail.schedule.tiles.clock import fetched_together
from dovetail.target.chip import Dma
from dovetail.target.pattern import Choice
from dovetail.targets import load_target
from dovetail.timing.layer import constants_ahead
from firmware import require_chip

TARGET = load_target("diana")
DMA = Dma("dma", bytes_per_cycle=8, setup_cycles=70, base=0)


def fetches(program: Program) -> list[Copy]:
    """The copies of constants to the engine."""
    copies = [one for one in program.statements if isinstance(one, Copy)]
    return [one for one in copies if program.buffers[one.source.buffer].role is Role.CONSTANT]


@given(
    st.integers(1, 1 << 16),
    st.integers(1, 200),
    st.integers(0, 1 << 16),
    st.integers(1, 64),
    st.integers(0, 200),
)
def test_as_few_copies_as_are_worth_it(packed: int, tiles: int, room: int, beat: int, setup: int) -> None:
    dma = replace(DMA, bytes_per_cycle=beat, setup_cycles=setup)
    several = fetched_together(dma, packed, tiles, room)
    copies = -(-tiles // several)
    assert 1 <= several <= tiles and (several == 1 or several * packed <= room)
    assert -(-tiles // copies) == several, "the last copy is not much shorter than the others"
    assert several == 1 or (several - 1) * packed < 8 * setup * beat + packed, "no longer than it is worth"
    assert fetched_together(None, packed, tiles, room) == fetched_together(dma, 0, tiles, room) == 1


@given(st.integers(1, 3), st.integers(1, 60), st.integers(1, 8), st.integers(0, 1), st.integers(0, 1))
def test_nothing_is_overwritten_that_is_still_read(
    buffers: int, tiles: int, together: int, fetching: int, computing: int
) -> None:
    """The copy for a tile is started with the launch of the one so many before it: the last tile that reads what lay
    in its slot has been launched then."""
    ahead = constants_ahead(buffers, tiles, together, fetching, computing)
    for first in range(0, tiles, together):
        last_reader = first - (buffers - 1) * together - 1  # of the copy before, whose slot this one takes
        started = first - ahead
        assert started < 0 or started >= last_reader, "it would overwrite"


@pytest.fixture(scope="module", autouse=True)
def _chip() -> None:
    require_chip()


CASES: tuple[tuple[tuple[int, ...], Mapping[str, int | str]], ...] = (
    ((128, 128), {"buffers": 1}),
    ((128, 128), {"buffers": 2}),
    ((128, 128), {"buffers": 3}),
    ((64, 640), {"buffers": 1}),
    ((64, 640), {"buffers": 2}),
    ((64, 200), {"buffers": 3}),
    ((640, 128), {"buffers": 3}),
    ((1920, 48), {"buffers": 2}),
    ((40, 200), {"buffers": 2}),
)


@pytest.mark.parametrize(("widths", "choice"), CASES)
def test_layers_on_the_chip(widths: tuple[int, ...], choice: Choice) -> None:
    """Whatever is chosen the firmware computes the graph, in the cycles of the cost model."""
    graph = dense(*widths)
    region = region_alone(graph, TARGET)
    choice = {"placement": "digital", "tile_channels": 16, **choice}
    estimate = estimator(region, TARGET, ())(choice)
    taken = measured(graph, TARGET, None, {region.name: choice})
    assert estimate is not None and abs(estimate.cycles - taken) <= 0.05 * taken


@settings(max_examples=12)
@given(st.lists(st.sampled_from([8, 16, 40, 44, 128, 132, 256, 300]), min_size=3, max_size=4))
def test_networks_are_computed_right(widths: list[int]) -> None:
    program = compile_graph(dense(*widths), TARGET, Options()).plan.program  # it was interpreted and compared
    assert any(isinstance(one, LaunchStatement) for one in program.statements)


def test_copies_are_few() -> None:
    program = compile_graph(dense(128, 128, 128), TARGET, Options()).plan.program
    launches = [one for one in program.statements if isinstance(one, LaunchStatement)]
    assert len(launches) == 16 and len(fetches(program)) == 6
    together = sum(copy.source.type.nbytes for copy in fetches(program))
    assert together == sum(array.nbytes for one in launches for array in one.packed.values())


def test_constants_that_are_one_are_fetched_as_one() -> None:
    """They lie side by side no more: each tile has its copy, or none where it is there already."""
    program = compile_graph(dense(128, 128, equal=True), TARGET, Options()).plan.program
    assert {copy.source.offset for copy in fetches(program)} == {0}


def test_a_copy_that_is_too_short_is_noticed() -> None:
    program = compile_graph(dense(128, 128), TARGET, Options()).plan.program
    copy = fetches(program)[0]
    bytes_of_one = copy.source.type.nbytes // 3
    short = [replace(end, type=TensorType((2 * bytes_of_one,), DType.UINT8)) for end in (copy.source, copy.destination)]
    spoilt = tuple(
        replace(one, source=short[0], destination=short[1]) if one is copy else one for one in program.statements
    )
    with pytest.raises(ProgramError):
        verify(replace(program, statements=spoilt), TARGET)
