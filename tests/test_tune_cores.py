"""Tuning what only cores compute: the command, its log, the file it gives, and choices that are none."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from command_line import dovetail, refused
from dovetail.compile import Options, compile_graph, prepare
from dovetail.ir.types import DType
from dovetail.kernels import core_traits, generate
from dovetail.schedule.knobs import choose, region_space
from dovetail.schedule.partition import partition
from dovetail.schedule.tuning import read_tuning
from dovetail.target.pattern import Choice
from dovetail.targets import load_target
from tuning_cases import adapted, digits_file, layer_graph

pytest.importorskip("lightgbm", reason="tuning needs lightgbm (dovetail[tune])")
TARGETS = ["riscv", "cortex_m4", "cortex_m0plus"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits model."""
    return digits_file(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("target", ["riscv", "cortex_m4"])
def test_tuning_gives_a_file_that_compile_uses(
    target: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No trial fails; what is in the log is not tried again; a number no block has is refused."""
    files = ("--log", tmp_path / "t.jsonl", "-o", tmp_path / "t.toml")
    words = ("tune", model, "--target", target, "--measure", "model", "--trials", "300", *files)
    assert dovetail(*words) == 0
    log = (tmp_path / "t.jsonl").read_text()
    assert log.count('"layer"') > 30 and '"error"' not in log
    tuning = read_tuning(tmp_path / "t.toml").value
    assert tuning.tuned_cycles <= tuning.default_cycles
    assert dovetail(*words) == 0 and (tmp_path / "t.jsonl").read_text() == log
    text = (tmp_path / "t.toml").read_text()
    if not tuning.layers:
        return
    assert dovetail("compile", model, "--target", target, "-o", tmp_path / "b", "--tuning", tmp_path / "t.toml") == 0
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(re.sub(r"choice = \{.*\}", "choice = { pixels = 77 }", text, count=1))
    said = refused(capsys, "compile", model, "--target", target, "-o", tmp_path / "c", "--tuning", wrong)
    assert "pixels = 77 is out of range; it may be" in said and "layer[0].choice" in said


@pytest.mark.parametrize("name", ["riscv", "cortex_m3", "cortex_m4"])
def test_choices_reach_the_kernels(name: str, model: Path) -> None:
    """Another block is another text, and of the whole space every choice is one the planner takes."""
    target = load_target(name)
    graph = prepare(model, target, Options())
    regions = partition(graph, target)
    spaces = {region.name: region_space(region, target) for region in regions}
    points = {name: list(space.points()) for name, space in spaces.items() if space.knobs}
    assert points and all(choose(regions, {one: point}, target) for one, some in points.items() for point in some)
    choices = [{one: some[place] for one, some in points.items()} for place in (0, -1)]
    made = [compile_graph(graph, target, Options(), choices=chosen, interpret=False) for chosen in choices]
    texts = ["".join(kernel.source for kernel, _ in one.unit.calls.values()) for one in made]
    assert texts[0] != texts[1]


def test_no_two_choices_are_one_kernel(model: Path) -> None:
    """A Cortex-M0+ has registers for one sum, and short loops are written out anyway: without pairs nothing is left to
    choose. On others each unrolling of a block is another text."""
    target = load_target("cortex_m0plus")
    target = replace(target, core=replace(target.core, pairs=None))
    spaces = [region_space(region, target) for region in partition(prepare(model, target, Options()), target)]
    assert any(space.knobs for space in spaces) and all(len(list(space.points())) <= 1 for space in spaces)
    target = load_target("riscv")
    graph = prepare(model, target, Options())
    region = next(region for region in partition(graph, target) if region_space(region, target).knobs)
    points = list(region_space(region, target).points())
    made = [compile_graph(graph, target, Options(), choices={region.name: p}, interpret=False) for p in points]
    texts = {"".join(kernel.source for kernel, _ in one.unit.calls.values()) for one in made}
    assert len(texts) == len(points) > 4


@pytest.mark.parametrize(
    ("size", "stride"), [((12, 12, 3), 2), ((12, 12, 16), 1), ((1, 12, 8), 1), ((12, 1, 8), 1)], ids=str
)
@pytest.mark.parametrize("name", ["riscv", "cortex_m3"])
def test_no_two_choices_of_a_padded_layer_are_one_kernel(name: str, size: tuple[int, ...], stride: int) -> None:
    """Where all pixels are computed one by one, as of an image of one row, a turn takes one tap whatever is chosen."""
    target = load_target(name)
    graph, region = adapted(layer_graph(size, 8, 3, stride, DType.INT8), target)
    core, space = core_traits(target.core), region_space(region, target)
    points = list(space.points())
    texts = {generate(graph, "layer", core, choice=point).source for point in points}
    assert len(texts) == len(points) > 3
    one: Choice = {"pixels": 1, "channels": 3, "unroll": 1}
    twice: Choice = {**one, "unroll": 2}
    said = "unroll = 2 changes nothing: a turn takes one of the taps inside"
    assert space.refusal(one) is None and space.refusal(twice) == said
    assert len({generate(graph, "layer", core, choice=choice).source for choice in (one, twice)}) == 1
