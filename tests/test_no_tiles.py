"""A layer that an engine has no tiles for goes to the next engine or to the core, and all reasons are said."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dovetail import kernels
from dovetail.compile import Options, compile_model
from dovetail.errors import PlanError, TileError
from dovetail.guests import zoo
from dovetail.ir.graph import Graph
from dovetail.notes import Kind
from dovetail.schedule import plan
from dovetail.schedule.partition import explain_mismatch
from dovetail.schedule.region import EnginePart
from dovetail.schedule.tiles import choose_tiling
from dovetail.schedule.tiles.tiling import Tiling
from dovetail.target import Constraint, Target
from dovetail.target.pattern import Scope
from dovetail.targets import load_target
from test_cheaper import MACARRAY, small
from two_engines.twins import machine

LIMIT = Constraint(
    "a launch has at most 0 rows", lambda match: match.result.shape[1], lambda rows: rows < 1, Scope.TILES
)


def limited(target: Target, engines: Collection[str], *limits: Constraint) -> Target:
    """The target with more limits of some engines."""
    made = []
    for engine in target.engines:
        own = limits if engine.name in engines else ()
        offloads = (replace(one, constraints=(*one.constraints, *own)) for one in engine.offloads)
        made.append(replace(engine, offloads=tuple(offloads)))
    return replace(target, engines=tuple(made))


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small network."""
    path: Path = tmp_path_factory.mktemp("models") / "digits.onnx"
    path.write_bytes(zoo.build("digits"))
    return path


def test_the_next_engine_takes_what_one_has_no_tiles_for(digits: Path) -> None:
    made = compile_model(digits, limited(machine(), ["ne16"], LIMIT), Options())
    assert {region.place for region in made.regions if region.macs} == {"second"}
    assert not any("is not computed by" in note.text for note in made.notes)


def test_the_core_takes_what_no_engine_has_tiles_for(digits: Path) -> None:
    made = compile_model(digits, limited(machine(), ["ne16", "second"], LIMIT), Options())
    convolution = next(region for region in made.regions if region.name == "conv_4")
    assert convolution.place == "core"
    for name in ("ne16", "second"):
        assert f"{name}: no tile of conv_4 is one {name} can compute: a launch has at most 0 rows" in convolution.reason
    (said,) = (note for note in made.notes if note.text.startswith("conv_4 is not computed by ne16 and second: "))
    assert said.kind is Kind.SLOWER
    (none,) = (note.text for note in made.notes if note.text.startswith("no layer is computed by ne16 or second; "))
    assert "the largest, conv_6_1: ne16: no tile of conv_6" in none


def test_another_way_on_the_same_engine_is_no_loss_of_the_engine(digits: Path) -> None:
    """Where the first offload has no tiles and another of the same engine has."""
    assignment = compile_model(digits, load_target("gemmini"), Options()).assignment
    (layer, *_) = (region for region in assignment.regions if region.shares)
    (said,) = replace(assignment, refused={layer.name: {"gemmini": "no tile"}}).losses()
    assert said == f"{layer.name} is computed in a slower way by gemmini: no tile"


def test_tiles_that_are_missed_in_the_plan_only(monkeypatch: pytest.MonkeyPatch, digits: Path) -> None:
    """Where values lie, and so which tiles there are, is known in the plan."""

    def refuse(part: EnginePart, *others: Any) -> Tiling:
        if part.engine.name == "ne16":
            error = TileError(f"no tile of {part.name}")
            error.layer, error.engine = part.name, "ne16"
            raise error
        return choose_tiling(part, *others)

    monkeypatch.setattr(plan, "choose_tiling", refuse)
    made = compile_model(digits, machine(), Options())
    assert {region.place for region in made.regions if region.macs} == {"second"}
    layers = {region.name for region in made.regions if region.macs}
    assert {note.text.split()[0] for note in made.notes if "is not computed by ne16: no tile of" in note.text} <= layers


def test_the_core_takes_what_the_memory_of_the_only_engine_holds_no_tile_of(digits: Path) -> None:
    target = load_target("ne16")
    memories = tuple(replace(one, size=64) if one.name == "L1" else one for one in target.memories)
    made = compile_model(digits, replace(target, memories=memories), Options())
    (said, *_) = (note.text for note in made.notes if "is not computed by ne16: the smallest tile of" in note.text)
    assert said.endswith("bytes of L1; 64 are free")
    assert {region.place for region in made.regions if region.name == said.split()[0]} == {"core"}


@pytest.mark.parametrize("target", [machine(), MACARRAY], ids=["two engines", "one engine"])
def test_all_reasons_where_nothing_computes_a_layer(
    monkeypatch: pytest.MonkeyPatch, target: Target, digits: Path
) -> None:
    own = kernels.supports

    def supports(graph: Graph) -> str | None:
        has = any(type(node.operator).__name__ == "Conv2d" for node in graph.nodes)
        return "the core has no such kernel" if has else own(graph)

    monkeypatch.setattr(kernels, "supports", supports)
    names = [engine.name for engine in target.engines]
    with pytest.raises(PlanError, match="nothing can compute conv_") as caught:
        compile_model(digits, limited(target, names, LIMIT), Options())
    assert all(reason in str(caught.value) for reason in (*(f"{one}: no tile" for one in names), "core: the core has"))


def test_all_limits_that_a_layer_breaks_are_named() -> None:
    def never(number: int) -> Constraint:
        return Constraint(f"limit {number}", lambda match: match.result.shape, lambda shape: False)

    fragile = Constraint("relies on those before", lambda match: match.nodes["gone"], bool)
    graph, target = small(), limited(MACARRAY, ["macarray"], never(1), never(2), fragile)
    node = next(node for node in graph.nodes if type(node.operator).__name__ == "Clip")
    assert explain_mismatch(graph, target, node).endswith("limit 1; here: (1, 6, 6, 16); limit 2; here: (1, 6, 6, 16)")
