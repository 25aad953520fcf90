"""What planning keeps instead of asking again is what it would be told again."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from importlib import import_module
from itertools import accumulate, combinations, pairwise, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.cli.main import all_commands, command_line, main
from dovetail.compile import Options, prepare
from dovetail.errors import PlanError
from dovetail.files import text_digest
from dovetail.guests import zoo
from dovetail.ir.operators.linear import Conv2d
from dovetail.schedule.assign.candidates import others
from dovetail.schedule.partition import PartitionCache, initial_partition, partition
from dovetail.schedule.plan.lifetimes import Lifetime
from dovetail.schedule.region import LaidRegion, Region
from dovetail.schedule.tiles import choose_tiling
from dovetail.schedule.tiles.tiling import TileCache, Tiling
from dovetail.target.description import Target
from dovetail.targets import load_target
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.order import NetworkOrder
from dovetail.targets.maeri.task import find_together, of_parts, side_by_side, stored

allocate = import_module("dovetail.schedule.plan.allocate")  # the package has a function of this name
PARTS = ((Conv2d(), (1, 10, 10, 8), (8, 3, 3, 8)), (Conv2d(), (1, 8, 8, 8), (16, 1, 1, 8)))
"""Two layers that do not read each other."""


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, list[Region]]:
    """ne16 and the regions of a network on its engine."""
    target, model = load_target("ne16"), tmp_path_factory.mktemp("net") / "digits.onnx"
    model.write_bytes(zoo.build("digits"))
    graph = prepare(model, target, Options())
    return target, [region for region in initial_partition(graph, target) if region.engine is not None]


def tiling(region: Region, target: Target, near: bool, budget: int, known: TileCache | None) -> Tiling | str:
    """The tiling with the values near or far, or what the planner says."""
    assert region.engine is not None
    values = (*region.graph.inputs, region.output)
    try:
        homes = dict.fromkeys(values, region.engine.memory if near else target.values)
        return choose_tiling(LaidRegion.of(region).parts[0], target, homes, budget, known)
    except PlanError as error:
        return error.what


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20_000)), min_size=2, max_size=6), st.data())
def test_tilings_do_not_depend_on_what_was_asked_before(
    layers: tuple[Target, list[Region]], asked: list[tuple[bool, int]], data: st.DataObject
) -> None:
    target, regions = layers
    region, known = data.draw(st.sampled_from(regions)), TileCache()
    for near, budget in asked:
        assert tiling(region, target, near, budget, known) == tiling(region, target, near, budget, None)
    again = known.again(lambda text: None)
    assert [tiling(region, target, *one, again) for one in asked] == [
        tiling(region, target, *one, None) for one in asked
    ]
    part = LaidRegion.of(region).parts[0]
    assert again.of(part, target).answered and not again.of(replace(part, name="another"), target).answered
    assert not again.of(replace(part, converted=frozenset({part.output}), choice={"a": 1}), target).answered


def test_variants_of_a_target_share_what_was_tried(layers: tuple[Target, list[Region]]) -> None:
    target, regions = layers
    for region in regions:
        tried = PartitionCache()
        ways = list(others(region.graph, [region], target, tried))
        assert ways
        left = {part.offload.name for way in ways for part in way if part.offload}
        assert left and region.offload is not None and region.offload.name not in left
        anew = list(others(region.graph, [region], target))
        shown = [[(part.name, part.place, part.graph.nodes, part.reason) for part in way] for way in ways]
        assert shown == [[(part.name, part.place, part.graph.nodes, part.reason) for part in way] for way in anew]
        assert partition(region.graph, target, cache=tried) == partition(region.graph, target)


def test_an_order_is_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path))
    config = MaeriConfig()
    found = find_together(PARTS, config)
    assert found is not None and len({item.work for item in found.items}) == 2

    def never() -> None:
        raise AssertionError("it is there")

    def same(order: NetworkOrder | None) -> bool:
        return order is not None and (order.items, order.makespan) == (found.items, found.makespan)

    net, asked = of_parts(PARTS), ("test", PARTS)
    assert same(stored(asked, net, config, lambda: found))
    assert same(stored(asked, net, config, never))
    assert stored(("test", "none"), net, config, lambda: None) is None
    assert stored(("test", "none"), net, config, never) is None
    files = sorted((tmp_path / "maeri").glob("*.json"))
    assert len(files) == 2
    for file in files:  # damaged: found anew, and healed
        file.write_bytes(file.read_bytes()[:-1] + b" ")
    assert same(stored(asked, net, config, lambda: found))
    assert same(stored(asked, net, config, never))
    side_by_side.cache_clear()
    assert same(side_by_side(PARTS, config))
    side_by_side.cache_clear()
    assert same(side_by_side(PARTS, config))


@pytest.mark.parametrize("name", ["compile", "run", "targets"])
def test_one_command_says_what_it_says_among_all(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert name in all_commands()
    told = []
    for call in (
        lambda: main([name, "--help"]),
        lambda: command_line(all_commands())([name, "--help"], prog_name="dovetail"),
    ):
        with contextlib.suppress(SystemExit):
            call()
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]
    assert f"dovetail {name} " in told[0]


def test_the_solver_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ortools")
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path))
    sizes, calls = {"a": 16, "b": 32, "c": 16}, list[int]()
    pieces = {name: allocate.BufferFragment(0, size, Lifetime({}, {})) for name, size in sizes.items()}
    pair = {("a", "b"), ("b", "a"), ("b", "c"), ("c", "b")}
    clashes = {
        one: {two: [(pieces[one], pieces[two])] for two in sizes if (one, two) in pair} for one in sizes
    }  # a and c may share bytes

    def counted(*given: Any) -> tuple[dict[str, int], int]:
        calls.append(1)
        return solve(*given)

    solve = allocate.improve
    monkeypatch.setattr(allocate, "improve", counted)
    question = sizes, clashes, {"a": 0, "b": 16, "c": 48}, 48, 16, 1.0
    first_answer = allocate._improved(*question)
    assert first_answer[1] == 48 and first_answer[0] == solve(*question)[0]
    assert allocate._improved(*question) == first_answer and len(calls) == 1
    allocate._improved(sizes, clashes, {"a": 0, "b": 16, "c": 48}, 48, 8, 1.0)
    assert len(calls) == 2, "another alignment is another question"
    for file in (tmp_path / "plan").glob("*.json"):
        file.write_bytes(b"[0, 0, 0]")
    assert allocate._improved(*question) == first_answer and len(calls) == 3


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_no_placement_needs_less_than_what_lies_apart(data: st.DataObject) -> None:
    """Buffers of one or two pieces, any of which must not share bytes: the solver finds nothing below the bound."""
    pytest.importorskip("ortools")
    life = Lifetime({}, {})
    groups = {}
    for name in "abcdef"[: data.draw(st.integers(2, 6))]:
        cuts = [0, *sorted(data.draw(st.sets(st.integers(1, 6), min_size=1, max_size=2)))]
        groups[name] = [allocate.BufferFragment(16 * a, 16 * b, life) for a, b in pairwise(cuts)]
    clashes: dict[str, dict[str, Any]] = {name: {} for name in groups}
    for one, two in combinations(groups, 2):
        every = list(product(groups[one], groups[two]))
        pairs = data.draw(st.sampled_from([[], every, every, every[:1]]))
        if pairs:
            clashes[one][two] = pairs
            clashes[two][one] = [(b, a) for a, b in pairs]
    sizes = {name: own[-1].stop for name, own in groups.items()}
    one_by_one = dict(zip(sizes, accumulate([0, *sizes.values()]), strict=False))
    _, peak = allocate.improve(sizes, clashes, one_by_one, 0, 16, 5.0)
    assert max(sizes.values()) <= allocate._apart(groups, clashes) <= peak


def test_a_digest_of_code_depends_on_code_alone(tmp_path: Path) -> None:
    def digest(text: str) -> str:
        text_digest.cache_clear()
        (tmp_path / "a.py").write_text(text)
        return text_digest(tmp_path, code_only=True)

    base = digest(
        '"""Words."""\n\n# more\nA = 1\n"""Its meaning."""\n\n\ndef f() -> str:\n    """Told."""\n    return "x"\n'
    )
    assert digest('"""Others,\n\nlonger."""\nA = 1\n\ndef f() -> str:\n    # why\n    return "x"\n') == base
    for changed in ("A = 2", "A = 1\nB = 1"):
        assert digest(f'{changed}\n\ndef f() -> str:\n    return "x"\n') != base
    assert digest('A = 1\n\ndef f() -> str:\n    return "y"\n') != base
