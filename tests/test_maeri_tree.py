"""MAERI's trees: measured cycles of the public simulator, the mapper's published sample, and the tree's own rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, fields
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dovetail.errors import TargetError
from dovetail.targets.maeri.bound import best_tile, uniform_cycles
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.machine import PositionSequence, clock, play, simulator
from dovetail.targets.maeri.network import OrderLayer
from dovetail.targets.maeri.order import ChannelSegment, Item
from dovetail.targets.maeri.outputs import layer_words, tree_words
from dovetail.targets.maeri.tile import (
    FeedbackLoops,
    MultiplierTile,
    _FeedbackPlay,
    grid,
    neuron_group,
    play_feedback,
    steps,
    tile_of,
)
from dovetail.targets.maeri.tree import Range, configure, leaving, sums_by_cycle
from maeri_judge import added, line_input, port_values, round_trips, tree_exit
from maeri_model import formula_cycles

SWEPT = OrderLayer(3, 3, 6, 6, 20, 20)
ROWS = MultiplierTile(3, 3, out_rows=3)
BANDWIDTHS = (4, 8, 16, 32, 64)
MEASURED = [
    *(
        (SWEPT, ROWS, MaeriConfig(64, width, width), cycles)
        for width, cycles in zip(BANDWIDTHS, (13548, 9402, 8400, 4230, 3972), strict=True)
    ),
    *(
        (SWEPT, ROWS, MaeriConfig(64, width, width, accumulation_buffer=False), cycles)
        for width, cycles in zip(BANDWIDTHS, (20664, 20478, 20304, 20220, 16932), strict=True)
    ),
    (SWEPT, MultiplierTile(3, 3, filters=6), MaeriConfig(), 1959),
    (SWEPT, MultiplierTile(3, 3, out_rows=6), MaeriConfig(), 2034),
    (SWEPT, MultiplierTile(3, 3, 6), MaeriConfig(), 2016),
    (SWEPT, MultiplierTile(3, 3, 2, 3), MaeriConfig(), 1968),
    (OrderLayer(1, 1, 16, 16, 16, 16), MultiplierTile(1, 1, 16, 4), MaeriConfig(), 2084),
    (OrderLayer(3, 3, 16, 16, 18, 18), MultiplierTile(3, 3, 1, 7), MaeriConfig(), 12363),
    (OrderLayer(3, 3, 1, 1, 18, 18, groups=16), MultiplierTile(3, 3, groups=7), MaeriConfig(), 801),
]
"""Measured with the public cycle-level simulator (stonne-simulator/stonne@22634b8; shared sheet maeri.md)."""


@pytest.mark.parametrize(("layer", "tile", "config", "measured"), MEASURED)
def test_measured_cycles(layer: OrderLayer, tile: MultiplierTile, config: MaeriConfig, measured: int) -> None:
    allowed = 0.02 if config.distribution == config.multipliers else 0.05
    assert uniform_cycles(layer, tile, config) == pytest.approx(measured, rel=allowed)


def measured_rows() -> list[tuple[OrderLayer, MultiplierTile, MaeriConfig, int]]:
    """300 random layers, tiles and engines, run on the public simulator (stonne-simulator/stonne@22634b8)."""
    found = []
    for line in (Path(__file__).parent / "maeri_measured.txt").read_text().splitlines()[1:]:
        numbers = [int(each) for each in line.split()]
        *engine, buffer, cycles = numbers[15:]
        config = MaeriConfig(*engine, accumulation_buffer=bool(buffer))
        found.append((OrderLayer(*numbers[:7], (numbers[7],) * 2), MultiplierTile(*numbers[8:15]), config, cycles))
    return found


def played(layer: OrderLayer, tile: MultiplierTile, config: MaeriConfig) -> int:
    """The machine's cycles of a layer computed by one tile."""
    positions = -(-layer.out_rows // tile.out_rows) * -(-layer.out_columns // tile.out_columns)
    rounds = -(-layer.filters // tile.filters) * -(-layer.groups // tile.groups)
    parts = (ChannelSegment(0, 0, positions),) * rounds
    place = Range(0, tile.size * tile.neurons)
    return play(config, layer, Item(0, 0, place, tile, (0, layer.taps), parts)).until


@pytest.mark.parametrize("counted", [formula_cycles, uniform_cycles], ids=["formulas", "machine"])
def test_random_measured_cycles(counted: Callable[[OrderLayer, MultiplierTile, MaeriConfig], int]) -> None:
    """The machine, and formulas that share nothing with it, against the public simulator."""
    errors: dict[bool, list[float]] = {True: [], False: []}
    for layer, tile, config, cycles in [*measured_rows(), *MEASURED]:
        errors[config.accumulation_buffer].append(abs(counted(layer, tile, config) / cycles - 1))
    for found in errors.values():
        print(f"{len(found)} rows: median {median(found):.2%}, worst {max(found):.2%}")
        assert median(found) <= 0.005
        assert max(found) <= 0.05


def test_formulas_and_the_machine_agree() -> None:
    """The events of whole layers, item by item, end when the clock says; formulas are near."""
    for layer, tile, config, _ in measured_rows()[::3]:
        cycles = uniform_cycles(layer, tile, config)
        assert played(layer, tile, config) == cycles <= formula_cycles(layer, tile, config) * 1.01 + 2


@pytest.mark.parametrize("multipliers", [16, 64])
def test_sums_leave_where_the_judge_says(multipliers: int) -> None:
    """Any virtual neuron, wherever it begins: its switch, its line, and the links to it."""
    for lines in (4, multipliers // 2, multipliers):
        config = MaeriConfig(multipliers, multipliers, lines)
        for size in range(2, multipliers + 1):
            for start in range(multipliers - size + 1):
                exit_ = leaving(config, Range(start, size))
                assert (*exit_.switch, exit_.first, exit_.most) == tree_exit(multipliers, start, start + size)
                assert (exit_.line, exit_.entry) == line_input(multipliers, lines, *exit_.switch)


def test_ports_send_what_the_judge_says() -> None:
    """Measured layers, wherever the tile begins."""
    for layer, tile, config, _ in measured_rows():
        width, size = config.multipliers // config.distribution, (tile.size + 1) * tile.neurons
        for at in range(0, min(config.multipliers - size, 2 * width) + 1):
            group = neuron_group(config, layer, tile, layer.taps, at)
            assert [astuple(port) for port in group.ports] == port_values(config, layer, tile, at)


def test_what_is_replayed_is_what_is_played() -> None:
    """Stretches of single virtual neurons are cut from longer ones, others replayed on other multipliers. Each equals
    the same played event after event."""
    rows = [row for row in measured_rows() if row[2].ports]
    for number, (layer, tile, config, _) in enumerate(rows[::2]):
        size = (tile.size + 1) * tile.neurons
        width = config.multipliers // config.distribution
        for at in {0, (config.multipliers - size) // width * width} if size < config.multipliers else {0}:
            group, span = neuron_group(config, layer, tile, layer.taps, at), (number % 3, 1 + number % 7)
            alike = simulator(config, grid(layer, tile)[1], tile.size, group)
            slow, fast = alike.play(*span), alike.stretch(*span)
            for field in fields(PositionSequence):
                assert np.array_equal(getattr(slow, field.name), getattr(fast, field.name)), field.name


def loops_of(places: tuple[int, ...]) -> tuple[MaeriConfig, FeedbackLoops]:
    """Virtual neurons at some multipliers, of 5 steps, on few lines."""
    config = MaeriConfig(16, 8, 2, accumulation_buffer=False)
    tile = MultiplierTile(1, 1, places[1] - 1, len(places))
    layer = OrderLayer(1, 1, 5 * tile.channels, len(places), 8, 5)
    loops = neuron_group(config, layer, tile, layer.taps, 0).loops
    assert loops is not None
    return config, loops


@pytest.mark.parametrize("places", [(0, 4), (0, 4, 8, 12), (0, 6, 12)])
def test_round_trips_are_replayed(places: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """40 positions of 5 steps on few lines: the same whether repetition is looked for or not, and as the judge says."""
    config, loops = loops_of(places)

    def ends() -> list[list[int]]:
        """Of the first positions: later some virtual neurons are done and no longer in the way."""
        run = play_feedback(loops, 40, 200)
        return [[run.end(number, count) for count in range(1, 31)] for number in range(len(places))]

    found = ends()
    monkeypatch.setattr(_FeedbackPlay, "state", lambda self: str(self.cycle))
    assert ends() == found
    neurons = [(e.first, e.most, e.line, e.entry, port) for e, port in zip(loops.exits, loops.ports, strict=True)]
    assert [own[4::5][:30] for own in round_trips(config, neurons, 5, 40)] == found


def test_tiles_keep_their_shape() -> None:
    """A virtual neuron of nine products of a 3x3 kernel is a kernel (D5), and passes inputs on (D6)."""
    layer = OrderLayer(3, 3, 4, 8, 10, 10)
    assert (
        tile_of(layer, 9) == MultiplierTile(3, 3, 1)
        and tile_of(layer, 18) == MultiplierTile(3, 3, 2)
        and tile_of(layer, 3) == MultiplierTile(1, 3, 1)
    )
    assert tile_of(layer, 12).flat and steps(layer, tile_of(layer, 12), 36) == 3
    words = layer_words(
        MaeriConfig(32, 32, 32), OrderLayer(3, 3, 1, 1, 10, 10), tile_of(OrderLayer(3, 3, 1, 1, 10, 10), 9)
    )
    assert [words[index] & 0xFFFF for index in (2, 4, 6)] == [1, 3, 3]
    flat = layer_words(MaeriConfig(32, 32, 32), layer, tile_of(layer, 12))
    assert [(word >> 16, word & 0xFFFF) for word in flat[2:8:2]] == [(36, 12), (1, 1), (1, 1)]
    first, later = clock(MaeriConfig(64, 16, 16), layer, MultiplierTile(3, 3, 1), 36).sends
    assert later < first  # only a window's last column is sent


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 12), st.data())
def test_steps_are_counted_once(rows: int, columns: int, channels: int, data: st.DataObject) -> None:
    """A box and the same number of products in a row take the same steps where the one is written as the other (D4)."""
    layer = OrderLayer(rows, columns, channels, 1, 8, 8)
    size = data.draw(st.integers(1, layer.taps))
    assert steps(layer, tile_of(layer, size), layer.taps) == -(-layer.taps // size)


def test_spacing_holds_as_many_as_the_bus_takes() -> None:
    """3x3 on 128 multipliers and 16 lines: 14 virtual neurons with a line's turn each, none further apart (D9)."""
    layer = OrderLayer(3, 3, 16, 64, 18, 18)
    places = [Range(9 * number, 9) for number in range(14)]
    config = MaeriConfig(128, 16, 16)
    assert len(sums_by_cycle(leaving(config, place).line for place in places)) <= steps(
        layer, MultiplierTile(3, 3, 1), layer.taps
    )


def test_the_mappers_published_sample() -> None:
    """VGG CONV2 on 512 multipliers, 128 values sent and 256 sums taken per cycle: 4,014,400 cycles (mRNA@852b5d5)."""
    layer, config = OrderLayer(3, 3, 64, 64, 226, 226), MaeriConfig(512, 128, 256, ports=False)
    assert uniform_cycles(layer, MultiplierTile(3, 3, 14, 4), config) == pytest.approx(4_014_400, rel=1e-4)
    _, cycles = best_tile(layer, config)
    assert cycles <= 4_014_400
    assert layer.macs / (cycles * 512) >= 0.9007


def test_two_full_halves_share_a_line() -> None:
    tree = configure(64, [Range(16 * number, 16) for number in range(4)])
    assert tree.outputs == ((2, 0), (2, 1), (2, 2), (2, 3))
    assert [line_input(64, 64, *output)[0] for output in tree.outputs[1:3]] == [0, 0]


def adds_up(multipliers: int, ranges: list[Range]) -> bool:
    """Whether each virtual neuron comes out once, with its own products only; words are followed switch by switch."""
    config = MaeriConfig(multipliers, multipliers, multipliers)
    ranges = sorted(ranges, key=lambda place: place.start)
    words = tree_words(config, configure(multipliers, ranges))
    return added(config, words, [(place.start, place.end) for place in ranges]) == ""


@pytest.mark.parametrize("multipliers", [16, 64, 128])
def test_equal_sizes_always_fit(multipliers: int) -> None:
    for size in range(2, multipliers + 1):
        ranges = [Range(number * size, size) for number in range(multipliers // size)]
        tree = configure(multipliers, ranges)
        assert adds_up(multipliers, ranges)
        for place, output in zip(ranges, tree.outputs, strict=True):
            assert configure(multipliers, [place]).outputs == (output,)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from((8, 16, 64, 128)), st.data())
def test_every_mix_of_sizes_adds_up(multipliers: int, data: st.DataObject) -> None:
    """Virtual neurons of any sizes from 2 on, with gaps: each comes out once, with its own products only."""
    ranges: list[Range] = []
    place = 0
    while multipliers - place >= 2:
        start = place + data.draw(st.integers(0, min(3, multipliers - place - 2)))
        size = data.draw(st.integers(2, min(multipliers - start, 30)))
        ranges.append(Range(start, size))
        place = start + size
    order = data.draw(st.permutations(ranges))
    try:
        tree = configure(multipliers, order)
    except TargetError:
        assume(False)
    assert adds_up(multipliers, ranges)
    places = [ranges.index(place) for place in order]
    assert [tree.outputs[places.index(number)] for number in range(len(ranges))] == [
        *configure(multipliers, ranges).outputs
    ]


PUBLISHED = {
    32: "A0D0A0A8 A0A0D0A0 0040A0A0 40486600 00000000",
    64: "7440A898 A8A0D0A0 A070A0A8 A0A0A0D0 A0A070A0 A0A0D0A0 0000A0A0 46600800 00000844",
    128: "10009840 AC7440A8 A050C8AC A8A8A0D0 A0A070A0 A8A0D0A0 D0A0A0A8 A0A0A0A0 A0A0A070 A0A0A0D0 A0A070A0 "
    "A0A0D0A0 A070A0A0 A0D0A0A0 000000A0 66080CC8 00004844",
}
"""RN_Config.vmh and configs/rn of maeri-project/MAERI_bsv: as many virtual neurons of 9 as fit."""


@pytest.mark.parametrize("multipliers", PUBLISHED)
def test_published_configurations(multipliers: int) -> None:
    """The same words, but for switches that get nothing: the published compiler lets finished sums flow on there."""
    config = MaeriConfig(multipliers, multipliers, multipliers)
    tree = configure(multipliers, [Range(9 * number, 9) for number in range(multipliers // 9)])
    doubles = multipliers // 2 - config.levels
    words = list(zip(tree_words(config, tree), (int(word, 16) for word in PUBLISHED[multipliers].split()), strict=True))
    same = 0
    for index, (ours, theirs) in enumerate(words):
        bits = 8 if index < -(-doubles // 4) else 4
        for shift in range(0, 32, bits):
            mine, other = ((word >> shift) & ((1 << bits) - 1) for word in (ours, theirs))
            extra = mine ^ other
            assert mine & extra == 0  # nothing of ours is missing there
            assert extra in ((0, 0x40, 0x10) if bits == 8 else (0, 0x8, 0xC))  # passes one value on
            same += not extra
    assert same >= 0.9 * (doubles + 2 * config.levels - 1)


def test_published_layer_information() -> None:
    """Layer_Info.vmh: K 16, C 16, 3x3, 5x5 image, 32 multipliers, 3 virtual neurons of 9 (there with one filter and
    three channels at a time)."""
    words = layer_words(MaeriConfig(32, 32, 32), OrderLayer(3, 3, 16, 16, 5, 5), MultiplierTile(3, 3))
    text = "00100001 00000010 00100001 00000010 00030003 00000001 00030003 00000001 00050001 00000003 00050001 00000003"
    assert [f"{word:08X}" for word in words] == [*text.split(), "00200001", "00000009"]


def test_what_the_tree_refuses() -> None:
    with pytest.raises(TargetError, match="overlaps"):
        configure(16, [Range(0, 5), Range(4, 3)])
    with pytest.raises(TargetError, match="leaves the 16 multipliers"):
        configure(16, [Range(10, 7)])
    with pytest.raises(TargetError, match="both need adder 0"):
        configure(16, [Range(0, 1), Range(1, 1)])


@pytest.mark.parametrize("fields", [{"multipliers": 48}, {"distribution": 0}, {"collection": 128}, {"prefetch": -1}])
def test_what_no_configuration_may_be(fields: dict[str, int]) -> None:
    with pytest.raises(TargetError, match=r"must be|at least"):
        MaeriConfig(**fields)


def test_a_sum_too_large_without_folding() -> None:
    with pytest.raises(TargetError, match="folding is off"):
        uniform_cycles(OrderLayer(3, 3, 16, 4, 8, 8), MultiplierTile(3, 3, 2), MaeriConfig(fold=False))
