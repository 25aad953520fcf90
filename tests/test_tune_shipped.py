"""The table of tilings that comes with the package: taken where it applies, and of no harm where it does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dovetail.compile import Options, compile_graph, sample_inputs
from dovetail.ir.graph import Graph
from dovetail.ir.types import Shape
from dovetail.program.interpret import check_program
from dovetail.schedule import shipped
from dovetail.schedule.partition import partition
from dovetail.schedule.region import LaidRegion
from dovetail.schedule.tiles import choose_tiling
from dovetail.schedule.tiles.tiling import Tiling
from dovetail.target import Target
from dovetail.target.pattern import Choice
from dovetail.targets import load_target
from tuning_cases import adapted, layer_graph, tunable

NE16 = load_target("ne16")
SIZE: Shape = (1, 3, 6, 20)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A table of one's own in place of the package's; empty at first."""
    monkeypatch.setattr(shipped, "TABLE", tmp_path / "tilings.json")
    shipped._read.cache_clear()
    yield tmp_path / "tilings.json"
    shipped._read.cache_clear()


@pytest.fixture(scope="module")
def layer() -> Graph:
    """A layer in the engine's form."""
    return adapted(layer_graph((9, 12, 16), 40, 3), NE16)[0]


def planned(graph: Graph, target: Target = NE16, choice: Choice | None = None) -> Tiling:
    """The tiling of the layer, without its tiles, in a program that is verified and equals the graph."""
    region = adapted(graph, target)[1].name
    compiled = compile_graph(graph, target, Options(), choices={region: choice} if choice else None, interpret=False)
    check_program(compiled.plan.program, target, compiled.graph, sample_inputs(graph, 3))
    (tiling,) = compiled.plan.tilings.values()
    return replace(tiling, tiles=())


def test_an_entry_is_taken_and_a_choice_goes_before_it(table: Path, layer: Graph) -> None:
    before = planned(layer)
    assert before.shape != SIZE
    key = tunable(layer, NE16).key
    shipped.add(NE16, key, shipped.TilingEntry(SIZE, 3, False))
    found = planned(layer)
    assert (found.shape, found.buffers, found.channels_outer) == (SIZE, 3, False)
    assert planned(layer, choice={"tile_rows": before.shape[1]}).shape[1] == before.shape[1]
    small = replace(NE16, memories=tuple(replace(m, size=96 << 10) if m.name == "L1" else m for m in NE16.memories))
    assert shipped.description(small) != shipped.description(NE16)
    assert planned(layer, small).shape == before.shape, "of another description: void"
    shipped.add(small, key, shipped.TilingEntry(before.shape, 2, True))
    assert planned(layer).shape == before.shape, "what was made for the other description is gone"


@pytest.mark.parametrize("size", [(1, 9, 12, 20, 1), (1, 0, 12, 40), (1, 9, 13, 40), (2, 9, 12, 40)])
def test_an_entry_that_is_not_possible_is_passed_by(table: Path, layer: Graph, size: Shape) -> None:
    before = planned(layer)
    shipped.add(NE16, tunable(layer, NE16).key, shipped.TilingEntry(size, 2, True))
    assert planned(layer) == before


def test_an_entry_that_does_not_fit_is_passed_by(table: Path) -> None:
    large = adapted(layer_graph((64, 64, 32), 64, 3), NE16)[0]
    before = planned(large)
    shipped.add(NE16, tunable(large, NE16).key, shipped.TilingEntry((1, 64, 64, 64), 2, True))
    assert planned(large) == before


def test_a_table_that_is_not_as_it_was_written_says_nothing(table: Path, layer: Graph) -> None:
    before = planned(layer)
    shipped.add(NE16, tunable(layer, NE16).key, shipped.TilingEntry(SIZE, 2, True))
    whole = table.read_text()
    for damaged in ("", "[]", "{", whole.replace("20", "24"), whole[: len(whole) // 2], '{"digest": 1, "tables": {}}'):
        table.write_text(damaged)
        shipped._read.cache_clear()
        assert planned(layer) == before, damaged
    table.write_text(whole)
    shipped._read.cache_clear()
    assert planned(layer).shape == SIZE


def test_the_table_of_the_package_is_as_it_was_written() -> None:
    shipped._read.cache_clear()
    tables = shipped._read()
    assert tables and all(load_target(name).engines and entry["tiles"] for name, entry in tables.items())


def test_an_entry_is_asked_for_by_the_ends_that_lie_near(layer: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """By those of the layer itself: what else lies in the engine's memory does not count."""
    asked = list[frozenset[str]]()
    monkeypatch.setattr(shipped, "find_entry", lambda target, graph, near: asked.append(near))
    (region,) = (one for one in partition(layer, NE16) if one.engine)
    ends = (*region.graph.inputs, region.output)
    for near in (set[str](), {ends[0]}, {ends[-1]}, set(ends)):
        homes = {name: "L1" if name in near or name == "other" else "L2" for name in (*ends, "other")}
        choose_tiling(LaidRegion.of(region).parts[0], NE16, homes, 100 << 10)
        assert asked.pop() == near and not asked
