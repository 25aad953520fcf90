"""Knobs: what the planner and ne16 declare, that every allowed choice is planned soundly, and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dovetail.compile import Options, compile_graph, prepare, reserved, sample_inputs
from dovetail.errors import PlanError, TargetError
from dovetail.guests import zoo
from dovetail.guests.tune.cost import estimator
from dovetail.guests.tune.layers import distinct_layers, region_alone, resolved_default
from dovetail.guests.tune.search import candidates
from dovetail.ir.graph import Graph
from dovetail.ir.types import DType
from dovetail.program.interpret import check_program
from dovetail.program.ir import Call, LaunchStatement
from dovetail.program.verify import verify
from dovetail.schedule.knobs import canonical, choose, region_space, tile_classes
from dovetail.schedule.layout import choose_layouts
from dovetail.schedule.partition import partition
from dovetail.schedule.plan import plan
from dovetail.schedule.region import Region
from dovetail.target import Knob, Space, Target
from dovetail.target.offload import Offload
from dovetail.target.pattern import Choice
from dovetail.targets import load_target
from tuning_cases import adapted, layer_graph, tunable

NE16 = load_target("ne16")
CASES = {
    "3x3": layer_graph((17, 23, 24), 40, 3),
    "3x3 stride 2": layer_graph((21, 14, 16), 16, 3, 2),  # of more channels the engine computes patches
    "1x1": layer_graph((12, 9, 64), 70),
    "dense": layer_graph((96,), 50),
}


def taken_by(region: Region, offload: Offload) -> Region:
    """The region with another offload."""
    return replace(region, shares=(replace(region.shares[0], offload=offload),))


def with_choice(graph: Graph, region: Region, choice: Choice, target: Target = NE16) -> list[object]:
    """The statements of a layer with a choice, verified and interpreted."""
    compiled = compile_graph(graph, target, Options(), choices={region.name: choice}, interpret=False)
    verify(compiled.plan.program, target)
    check_program(compiled.plan.program, target, graph, sample_inputs(graph, 5))
    return list(compiled.plan.program.statements)


@pytest.mark.parametrize("name", CASES)
def test_allowed_choices_are_planned_as_said(name: str) -> None:
    graph, region = adapted(CASES[name], NE16)
    space = region_space(region, NE16)
    points = list(space.points())
    assert {"placement", "tile_channels", "buffers", "order", "early"} <= {knob.name for knob in space.knobs}
    assert all(knob.sentence and len(set(knob.values)) == len(knob.values) for knob in space.knobs)
    random = np.random.default_rng(1)
    orders = set()
    for index in random.choice(len(points), 4, replace=False):
        choice = canonical(points[index])
        statements = with_choice(graph, region, choice)
        launches = [s for s in statements if isinstance(s, LaunchStatement)]
        if choice.get("placement") == "core":
            assert not launches and any(isinstance(s, Call) for s in statements)
            continue
        sizes = [launches[0].result.type.shape[-1]] if name == "dense" else launches[0].result.type.shape[1:]
        keys = [key for key in choice if key.startswith("tile_")]
        assert list(sizes) == [choice[key] for key in keys]
        orders.add(choice["order"])
    print(name, space.size, "points,", len(points), "allowed; orders tried", orders)


def test_the_default_is_one_of_the_choices() -> None:
    for name, case in CASES.items():
        _, region = adapted(case, NE16)
        default = resolved_default(region, NE16, ())
        assert region_space(region, NE16).refusal(default) is None, name


@pytest.mark.parametrize("size", [24_000, 12_000])
def test_the_default_is_one_of_the_choices_of_a_small_memory(size: int) -> None:
    """Where no tile of whole steps of channels fits it, tiles of parts of a step are offered too."""
    near = NE16.engines[0].memory
    small = replace(NE16, memories=tuple(replace(m, size=size) if m.name == near else m for m in NE16.memories))
    _, region = adapted(layer_graph((20, 20, 64), 64, 3), small)
    default = resolved_default(region, small, ())
    space = region_space(region, small)
    offered = next(knob for knob in space.knobs if knob.name == "tile_channels")
    assert space.refusal(default) is None
    assert any(int(value) % 32 for value in offered.values) == (size == 12_000)


def test_refusals_name_knob_limit_and_value() -> None:
    _, region = adapted(CASES["3x3"], NE16)
    space = region_space(region, NE16)
    assert "no knob 'tile_depth'" in str(space.refusal({"tile_depth": 3}))
    assert "tile_rows = 7 is out of range; it may be 17, " in str(space.refusal({"tile_rows": 7}))
    assert "out of range" in str(space.refusal({"tile_rows": "17"})) and "out of range" in str(
        space.refusal({"buffers": 9})
    )
    assert "out of range" in str(space.refusal({"buffers": True})), "a bool is not a number here"
    assert "means nothing on the core" in str(space.refusal({"placement": "core", "buffers": 1}))
    whole = {"tile_rows": 17, "tile_columns": 23, "tile_channels": 40}
    assert "buffers = 1 changes nothing" in str(space.refusal({**whole, "buffers": 1}))
    many = {"tile_rows": 1, "tile_columns": 2, "tile_channels": 32}
    assert "at most 256" in str(space.refusal(many))
    assert space.refusal({}) is None and space.refusal({"tile_rows": 6}) is None
    with pytest.raises(PlanError, match="no layer 'conv_9'"):
        choose((region,), {"conv_9": {}}, NE16)
    with pytest.raises(PlanError, match="tile_rows = 7 is out of range") as caught:
        choose((region,), {region.name: {"tile_rows": 7}}, NE16)
    assert region.name in caught.value.where


def test_a_tile_the_engine_refuses_is_never_offered() -> None:
    graph, region = adapted(layer_graph((17, 23, 24), 40, 3), NE16)
    fussy = replace(region.offload, constraints=(*region.offload.constraints, *_even_rows()))  # type: ignore[type-var]
    space = region_space(taken_by(region, fussy), NE16)
    assert "rows must be even; here: 17" in str(
        space.refusal({"tile_rows": 17, "tile_columns": 23, "tile_channels": 40})
    )
    assert not [p for p in space.points() if p["placement"] != "core"], "the last tile always has an odd size"
    assert graph


def _even_rows() -> tuple[object, ...]:
    from dovetail.target import Constraint

    return (Constraint("rows must be even", lambda m: m.result.shape[1], lambda rows: rows % 2 == 0),)


def test_a_choice_too_large_for_the_memory_says_by_how_much() -> None:
    small = replace(NE16, memories=tuple(replace(m, size=24 * 1024) if m.name == "L1" else m for m in NE16.memories))
    graph, region = adapted(layer_graph((40, 40, 32), 64), small)
    choice = {"tile_rows": 10, "tile_columns": 40, "tile_channels": 32, "buffers": 2}
    with pytest.raises(PlanError, match=r"tile_rows = 10.*needs \d+ bytes of L1; 24576 are free"):
        with_choice(graph, region, choice, small)
    assert with_choice(graph, region, {"tile_rows": 2, "tile_columns": 40}, small)


def test_an_offloads_own_knob_reaches_its_commands() -> None:
    graph, region = adapted(CASES["dense"], NE16)
    files, launches = [], []
    for mode in ("linear", "pointwise"):
        launches.append(next(s for s in with_choice(graph, region, {"mode": mode}) if isinstance(s, LaunchStatement)))
        compiled = compile_graph(graph, NE16, Options(), choices={region.name: {"mode": mode}})
        files.append("".join(compiled.project.files.values()))
    assert files[0] != files[1] and [launch.match.choice for launch in launches] == [
        {"mode": "linear"},
        {"mode": "pointwise"},
    ]
    odd, other = adapted(layer_graph((40,), 30), NE16)
    assert "multiple of 16 inputs; here: 40" in str(region_space(other, NE16).refusal({"mode": "linear"})) and odd


def test_an_offload_may_not_use_the_planners_names() -> None:
    _, region = adapted(CASES["dense"], NE16)
    assert region.offload is not None
    clash = replace(region.offload, knobs=lambda match: Space((Knob("buffers", (1, 2), "mine"),)))
    with pytest.raises(TargetError, match="no default"):
        region_space(taken_by(region, replace(region.offload, default=None)), NE16)
    with pytest.raises(TargetError, match="'buffers'"):
        region_space(taken_by(region, clash), NE16)


def test_points_and_classes_cover_everything_once() -> None:
    space = Space((Knob("a", (1, 2), "first"), Knob("b", ("x", "y", "z"), "second")))
    assert [space.point(index) for index in range(space.size)] == list(space.points())
    for total, step in ((10, 3), (9, 3), (4, 8), (5, 5), (6, 4)):
        classes = list(tile_classes((1, total), (1, step)))
        assert sum((box[1][1] - box[1][0]) * count for box, count in classes) == total


@pytest.mark.parametrize("name", ["ne16", "kestrel", "macarray", "vta", "maeri", "opencl"])
def test_no_choice_that_is_offered_is_refused(name: str, tmp_path: Path) -> None:
    """Layouts, steps and limits are looked at before a choice is offered, so that no trial is lost on one."""
    (tmp_path / "digits.onnx").write_bytes(zoo.build("digits"))
    target = load_target(name)
    graph = prepare(tmp_path / "digits.onnx", target, Options())
    regions = partition(graph, target)
    planned = plan(choose_layouts(graph, regions, target, ()), target, reserved(graph, target), ())
    tried = 0
    for layer in distinct_layers(regions, planned, target):
        offered = candidates(layer, target, 0).choices
        random = np.random.default_rng(len(offered))
        (region,) = partition(layer.graph, target)
        for index in random.choice(len(offered), min(5, len(offered)), replace=False):
            choices = {region.name: offered[index]}
            compile_graph(layer.graph, target, Options(), choices=choices, near=layer.near, interpret=False)
            tried += 1
    assert tried > 5


@pytest.mark.parametrize(("name", "size", "channels"), [("kestrel", 96, 3), ("ne16", 48, 64)])
def test_the_largest_choices_that_are_offered_fit(name: str, size: int, channels: int) -> None:
    """Bytes that fill up the blocks of a layout are counted before a choice is offered."""
    target = load_target(name)
    dtype = DType.UINT8 if name == "ne16" else DType.INT8
    layer = tunable(layer_graph((size, size, channels), 8, 3, 2, dtype), target)
    region = region_alone(layer.graph, target)
    model = estimator(region, target, layer.near)
    held = [
        (found.nbytes, number, choice)
        for number, choice in enumerate(candidates(layer, target, 0).choices[1:])
        if (found := model(choice)) is not None
    ]
    for _, _, choice in sorted(held, reverse=True)[:3]:
        compile_graph(layer.graph, target, Options(), choices={region.name: choice}, near=layer.near, interpret=False)
    near = region.engine and target.memory(region.engine.memory).size
    assert near and max(held)[0] > 0.8 * near
