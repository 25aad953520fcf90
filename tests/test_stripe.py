"""A memory budget: networks computed in stripes equal the networks whole, and what they need is what was said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from dovetail.cli.commands import parse_bytes
from dovetail.cli.main import main
from dovetail.compile import Compiled, Options, compile_graph, compile_model, prepare, reserved, sample_inputs
from dovetail.emit import write_project
from dovetail.errors import DovetailError, PlanError, TargetError
from dovetail.graph.graph import Graph, evaluate, verify
from dovetail.graph.trim import trim
from dovetail.layout import choose_layouts
from dovetail.partition import partition
from dovetail.plan import plan
from dovetail.plan.allocate import Placement
from dovetail.program.interpret import interpret
from dovetail.run import open_build, run_build
from dovetail.stripe import Striped, Striping
from dovetail.stripe.search import Search
from dovetail.targets import load_target
from oracles import references
from test_end_to_end import network_file, require_chip
from test_plan import random_network

RISCV = load_target("riscv")


def ram(compiled: Compiled) -> Placement:
    """Where activations lie."""
    (found,) = (p for p in compiled.plan.placements if p.memory == "ram")
    return found


def macs(graph: Graph) -> int:
    return sum(node.operator.macs([graph.types[name] for name in node.inputs]) for node in graph.nodes)


def some(frontier: list[Striped]) -> list[Striped]:
    """The first with stripes, one in the middle and the last."""
    places = sorted({1, len(frontier) // 2, len(frontier) - 1})
    return [frontier[place] for place in places if 0 < place < len(frontier)]


@pytest.mark.parametrize("group", range(3))
def test_random_networks_in_stripes(group: int) -> None:
    """Exact, never beyond the budget, and as large as the search says, counted by the planner from the statements."""
    cut = tight = 0
    for seed in range(group * 4, group * 4 + 4):
        graph = trim(random_network(seed))
        inputs = sample_inputs(graph, seed)
        expected = evaluate(graph, inputs)
        frontier = list(Striping(graph, RISCV).frontier())
        for less, more in pairwise(frontier):
            assert more.peak < less.peak and more.extra_macs >= less.extra_macs
        if len(frontier) == 1:
            continue
        compiled = compile_graph(graph, RISCV, Options(memory_budget=frontier[0].peak - 1), interpret=False)
        outputs = interpret(compiled.plan.program, RISCV, inputs)
        for name in graph.outputs:
            np.testing.assert_array_equal(outputs[name], expected[name])
        assert ram(compiled).peak < frontier[0].peak and compiled.striped is not None
        for found in some(frontier):
            verify(found.graph)
            assert macs(found.graph) - macs(graph) == found.extra_macs
            made = evaluate(found.graph, inputs)
            for name in graph.outputs:
                np.testing.assert_array_equal(made[name], expected[name])
            regions = partition(found.graph, RISCV)
            planned = plan(choose_layouts(found.graph, regions, RISCV), RISCV, reserved(graph, RISCV))
            (placed,) = (p for p in planned.placements if p.memory == "ram")
            assert abs(placed.lower_bound - found.peak) <= 64, "but for the alignment of buffers"
            cut += 1
            tight += placed.peak == placed.lower_bound
    print(f"{cut} networks in stripes, {tight} placed in as little as is alive")
    assert cut >= 2 and tight >= cut // 2


def test_the_search_is_exact() -> None:
    """Against every way to cut a small network, tried one by one."""
    seen = 0
    for seed in range(16):
        graph = trim(random_network(seed))
        striping = Striping(graph, RISCV)
        search = striping._search
        ends = len(search.cuts) - 1

        def ways(first: int, direction: int, search: Search = search, ends: int = ends) -> Iterator[tuple[int, int]]:
            """Multiply-accumulates and peak of every choice from a cut on."""
            if first == ends:
                yield 0, 0
            for last in range(first + 1, ends + 1):
                for segment in search._segments(first, last):
                    if not direction or segment.direction != direction:
                        peak = search._costs.peak(segment)
                        for macs_after, peak_after in ways(last, segment.direction):
                            yield segment.macs + macs_after, max(peak, peak_after)

        if ends > 3:
            continue
        every = list(ways(0, 0))
        for found in striping.frontier():
            assert min(peak for _, peak in every) <= found.peak
            fewest = min(work for work, peak in every if peak <= found.peak)
            assert search.within(found.peak).macs == fewest  # type: ignore[union-attr]
            seen += 1
        assert striping.smallest().peak == min(peak for _, peak in every)
    assert seen >= 9


@pytest.mark.parametrize(("name", "budget", "most_extra"), [
    ("ic_resnet8", "32K", 0.0), ("vww_mobilenetv1", "36K", 0.01), ("ic_resnet8", "24K", 0.07),
    ("kws_dscnn", "10K", 0.0),
])  # fmt: skip
def test_firmware_within_a_budget_equals_micro(name: str, budget: str, most_extra: float, tmp_path: Path) -> None:
    require_chip()
    compiled = compile_model(network_file(name), RISCV, Options(memory_budget=parse_bytes(budget)))
    whole = compile_model(network_file(name), RISCV, Options())
    assert ram(compiled).peak <= parse_bytes(budget)
    extra = macs(compiled.graph) - macs(whole.graph)
    assert extra == (compiled.striped.extra_macs if compiled.striped else 0) <= most_extra * macs(whole.graph)
    write_project(compiled.project, tmp_path / "build")
    reference = references(name)
    inputs = [{compiled.graph.inputs[0]: reference[f"in_{index}"]} for index in range(2)]
    build = open_build(tmp_path / "build")
    result = run_build(build, "iss", inputs)
    for index, outputs in enumerate(result.outputs):
        np.testing.assert_array_equal(outputs[compiled.graph.outputs[0]], reference[f"out_{index}__tflm"])
    assert result.sizes["bss"] <= parse_bytes(budget)
    constants = [sum(array.nbytes for _, array in found.unit.constants.values()) for found in (compiled, whole)]
    assert constants[0] <= 1.002 * constants[1], "stripes share their weights; the border may have a bias of its own"
    assert len(compiled.unit.kernels) <= 2 * len(whole.unit.kernels), "stripes of one shape share a kernel"
    stripes = build.manifest["stripes"]
    assert sum(entry["extra_macs"] for entry in stripes) == extra and build.manifest["memory_budget"]
    print(f"{name} in {budget}: {ram(compiled).peak} bytes, {extra} MACs more, {stripes}")


@pytest.mark.parametrize("name", ["ic_resnet8", "vww_mobilenetv1", "kws_dscnn", "ad_autoencoder"])
def test_frontier(name: str) -> None:
    """How low each network can go: printed, and never at less work."""
    graph = prepare(network_file(name), RISCV, Options())
    frontier = list(Striping(graph, RISCV).frontier())
    for found in frontier:
        print(f"{name}: {found.peak} bytes, {100 * found.extra_macs / macs(graph):.2f} % more MACs, {found.describe()}")
    lowest = {"ic_resnet8": 20_000, "vww_mobilenetv1": 28_100, "kws_dscnn": 9_000, "ad_autoencoder": 768}
    assert frontier[-1].peak <= lowest[name]
    assert Striping(graph, RISCV).smallest().peak == frontier[-1].peak


def test_a_budget_out_of_reach_says_how_far() -> None:
    with pytest.raises(PlanError, match=r"need at least \d+ bytes, \d+ more than the memory budget of 20000") as caught:
        compile_model(network_file("vww_mobilenetv1"), RISCV, Options(memory_budget=20_000))
    least, missing, _ = (int(word) for word in caught.value.what.replace(",", "").split() if word.isdigit())
    assert least - missing == 20_000 and "stripes" in caught.value.where
    with pytest.raises(PlanError, match="need at least 768 bytes") as caught:
        compile_model(network_file("ad_autoencoder"), RISCV, Options(memory_budget=700))
    assert "no stretch" in caught.value.where


def test_a_budget_is_for_a_core_alone() -> None:
    with pytest.raises(TargetError, match="ne16 has engines, whose layers are cut into tiles instead"):
        compile_model(network_file("ic_resnet8"), load_target("ne16"), Options(memory_budget=32_768))


def test_numbers_of_bytes() -> None:
    known = {"32768": 32768, "32K": 32768, "32 KiB": 32768, "1M": 1 << 20, "36kb": 36864}
    assert {text: parse_bytes(text) for text in known} == known
    for text in ("", "32G", "-1", "0", "K", "1.5K"):
        with pytest.raises(DovetailError, match="is not a number of bytes"):
            parse_bytes(text)


def command(*arguments: str) -> None:
    """Run the command line, which must succeed."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert not ended.value.code


def test_the_command_says_what_it_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(network_file("ic_resnet8"))
    command("compile", model, "--target", "riscv", "--memory-budget", "24K", "-o", str(tmp_path / "build"))
    said = " ".join(capsys.readouterr().out.split())
    assert "conv_1 to conv_2 in 5 stripes" in said and "737,280 MACs more" in said
    command("explain", model, "--target", "riscv", "--memory-budget", "24K", "--json")
    described = json.loads(capsys.readouterr().out)
    assert described["memory_budget"] == 24 * 1024
    assert [entry["count"] for entry in described["stripes"]] == [5, 2]
