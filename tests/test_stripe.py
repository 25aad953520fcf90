"""A memory budget: networks computed in stripes equal the networks whole, and what they need is what was said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from dovetail.cli.main import main
from dovetail.codegen.emit import write_project
from dovetail.compile import Compiled, Options, compile_graph, compile_model, prepare, reserved, sample_inputs
from dovetail.errors import DovetailError, PlanError, ProgramError, TargetError
from dovetail.ir.crop import trim
from dovetail.ir.graph import Graph, GraphBuilder, evaluate, verify
from dovetail.ir.operators.arithmetic import Clip
from dovetail.ir.operators.linear import Conv2d
from dovetail.ir.types import DType, TensorType
from dovetail.notes import Kind, Note
from dovetail.options import parse_bytes
from dovetail.program.ir import Call, Role
from dovetail.program.verify import verify as verify_program
from dovetail.run import open_build, run_build
from dovetail.schedule.layout import choose_layouts
from dovetail.schedule.partition import partition
from dovetail.schedule.plan import plan
from dovetail.schedule.plan.allocate import Placement
from dovetail.schedule.stripe import StripedNetwork, StripeSearch, Striping, striped
from dovetail.targets import load_target
from firmware import require_chip
from interpreted import interpret
from oracles import references
from test_end_to_end import network_file
from test_plan import random_network

RISCV = load_target("riscv")


def budget(activations: int) -> Options:
    """A budget for activations of so many bytes, and the stack."""
    return Options(memory_budget=activations + RISCV.core.stack)


def ram(compiled: Compiled) -> Placement:
    """Where activations lie."""
    (found,) = (p for p in compiled.plan.placements if p.memory == "ram")
    return found


def macs(graph: Graph) -> int:
    return sum(node.operator.macs([graph.types[name] for name in node.inputs]) for node in graph.nodes)


def some(frontier: list[StripedNetwork]) -> list[StripedNetwork]:
    """The first with stripes, one in the middle and the last."""
    places = sorted({1, len(frontier) // 2, len(frontier) - 1})
    return [frontier[place] for place in places if 0 < place < len(frontier)]


@pytest.mark.parametrize("group", range(2))
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
        compiled = compile_graph(graph, RISCV, budget(frontier[0].peak - 1), interpret=False)
        (outputs,) = interpret(compiled.plan.program, RISCV, [inputs])
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


@pytest.mark.parametrize("group", range(2))
def test_every_stretch_that_keeps_rows(group: int) -> None:
    """From the top and from the bottom, in stripes of every height: exact, and nothing is computed twice."""
    seen = 0
    for seed in range(group * 8, group * 8 + 8):
        graph = trim(random_network(seed))
        striping = Striping(graph, RISCV)
        search, whole = striping._search, striping._graph
        inputs = sample_inputs(graph, seed)
        expected = evaluate(graph, inputs)
        pairs = [(a, b) for a in range(len(search.cuts)) for b in range(a + 1, len(search.cuts))]
        every = [segment for pair in pairs for segment in search._segments(*pair) if segment.keeps]
        for segment in every[:: max(1, len(every) // 6)]:
            regions = striping._regions[search.cuts[segment.first].after : search.cuts[segment.last].after]
            made = striped(whole, regions, segment, search.steps(segment))
            verify(made)
            assert macs(made) <= macs(whole)
            for name, array in evaluate(made, inputs).items():
                np.testing.assert_array_equal(array, expected[name])
            seen += 1
    assert seen >= 5


def one_convolution() -> Graph:
    """1x1, 16 rows of 128 bytes in and out, then one of stride 2, so that the network ends small."""
    builder = GraphBuilder("rows")
    value = builder.input("x", TensorType((1, 16, 16, 8), DType.INT8))
    for stride in (1, 8):
        weights = builder.constant("w", np.full((8, 1, 1, 8), 2, np.int8))
        value = builder.add(Conv2d((stride, stride), input_zero_point=1), [value, weights])
        value = builder.add(Clip(-128, 127, DType.INT8), [value])
    return builder.finish([value])


def test_rows_of_the_operand_give_way_to_those_of_the_result() -> None:
    """Counted by hand: 2,048 bytes in, 2,048 out, and never more than one of them and a row of 128 bytes."""
    graph = one_convolution()
    compiled = compile_graph(graph, RISCV, budget(2_176))
    assert ram(compile_graph(graph, RISCV, Options())).peak == 4_096
    assert compiled.striped is not None and compiled.striped.extra_macs == 0
    assert ram(compiled).peak <= 2_176
    with pytest.raises(PlanError, match="at least 6272 bytes, 2112 more than the memory budget of 4160"):
        compile_graph(graph, RISCV, budget(64))


def test_the_verifier_sees_rows_that_are_still_wanted() -> None:
    """A result placed a row too high lies over rows of the operand that have not been read."""
    compiled = compile_graph(one_convolution(), RISCV, budget(2_176))
    program = compiled.plan.program
    verify_program(program, RISCV)
    (start,) = (b for b in program.buffers.values() if b.role is Role.INPUT)
    calls = [s for s in program.statements if isinstance(s, Call)]
    joint = program.buffers[calls[0].result.buffer]
    assert joint.address is not None and start.address is not None
    nearer = 128 if joint.address < start.address else -128
    moved = replace(joint, address=joint.address + nearer)
    with pytest.raises(ProgramError, match="overlap"):
        verify_program(replace(program, buffers={**program.buffers, joint.name: moved}), RISCV)


def test_values_given_out_stay_whole() -> None:
    """What the network gives from its middle is no place to cut and stays to the end; 64 bytes are for alignment."""
    for seed in range(3):
        graph = trim(random_network(seed))
        middle = [node.output for node in graph.nodes if isinstance(node.operator, Clip)]
        graph = replace(graph, outputs=(*graph.outputs, middle[0]) if middle[0] not in graph.outputs else graph.outputs)
        inputs = sample_inputs(graph, seed)
        expected = evaluate(graph, inputs)
        for found in some(list(Striping(graph, RISCV).frontier())):
            compiled = compile_graph(graph, RISCV, budget(found.peak + 64), interpret=False)
            (outputs,) = interpret(compiled.plan.program, RISCV, [inputs])
            for name in graph.outputs:
                np.testing.assert_array_equal(outputs[name], expected[name])


def test_the_search_is_exact() -> None:
    """Against every way to cut a small network, tried one by one."""
    seen = 0
    for seed in range(16):
        graph = trim(random_network(seed))
        striping = Striping(graph, RISCV)
        search = striping._search
        ends = len(search.cuts) - 1

        def ways(
            first: int, direction: int, search: StripeSearch = search, ends: int = ends
        ) -> Iterator[tuple[int, int]]:
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


@pytest.mark.parametrize(
    ("name", "most", "most_extra"),
    [
        ("ic_resnet8", "36K", 0.0),
        ("vww_mobilenetv1", "40K", 0.0),
        ("ic_resnet8", "24K", 0.0),
        ("ic_resnet8", "19K", 0.0),
        ("kws_dscnn", "14K", 0.0),
    ],
)
def test_firmware_within_a_budget_equals_micro(name: str, most: str, most_extra: float, tmp_path: Path) -> None:
    require_chip()
    compiled = compile_model(network_file(name), RISCV, Options(memory_budget=parse_bytes(most)))
    whole = compile_model(network_file(name), RISCV, Options())
    assert ram(compiled).peak + RISCV.core.stack <= parse_bytes(most)
    extra = macs(compiled.graph) - macs(whole.graph)
    assert extra == (compiled.striped.extra_macs if compiled.striped else 0) <= most_extra * macs(whole.graph)
    write_project(compiled.project, tmp_path / "build")
    reference = references(name)
    inputs = [{compiled.graph.inputs[0]: reference[f"in_{index}"]} for index in range(2)]
    build = open_build(tmp_path / "build")
    result = run_build(build, "iss", inputs)
    for index, outputs in enumerate(result.outputs):
        np.testing.assert_array_equal(outputs[compiled.graph.outputs[0]], reference[f"out_{index}__tflm"])
    assert result.sizes["bss"] + result.sizes["stack"] <= parse_bytes(most), "as linked"
    constants = [sum(array.nbytes for _, array in found.unit.constants.values()) for found in (compiled, whole)]
    assert constants[0] <= 1.005 * constants[1], "stripes share their weights; borders may have biases of their own"
    layers = sum(region.macs > 0 for region in whole.regions)
    assert len(compiled.unit.kernels) <= 3 * layers, "a first stripe, a last one, and those between share a kernel"
    stripes = json.loads((build.folder / "dovetail.json").read_text())["stripes"]
    assert sum(entry["extra_macs"] for entry in stripes) == extra and build.manifest.memory_budget
    print(f"{name} in {most}: {ram(compiled).peak} bytes, {extra} MACs more, {stripes}")


@pytest.mark.parametrize("name", ["ic_resnet8", "vww_mobilenetv1", "kws_dscnn", "ad_autoencoder"])
def test_frontier(name: str) -> None:
    """How low each network can go: printed, and never at less work."""
    graph = prepare(network_file(name), RISCV, Options())
    frontier = list(Striping(graph, RISCV).frontier())
    for found in frontier:
        print(f"{name}: {found.peak} bytes, {100 * found.extra_macs / macs(graph):.2f} % more MACs, {found.describe()}")
    lowest = {"ic_resnet8": 13_400, "vww_mobilenetv1": 28_100, "kws_dscnn": 8_700, "ad_autoencoder": 768}
    assert frontier[-1].peak <= lowest[name] and frontier[-1].extra_macs == 0
    assert Striping(graph, RISCV).smallest().peak == frontier[-1].peak
    regions = partition(frontier[-1].graph, RISCV)
    planned = plan(choose_layouts(frontier[-1].graph, regions, RISCV), RISCV, reserved(graph, RISCV))
    (placed,) = (p for p in planned.placements if p.memory == "ram")
    assert abs(placed.lower_bound - frontier[-1].peak) <= 64, "as the planner counts, but for alignment"


@pytest.mark.parametrize("most", ["54K", "48K", "40K"])
def test_a_memory_too_small_is_met_without_an_option(most: str, tmp_path: Path) -> None:
    """Whole layers of VWW need 55,296 bytes; the firmware in stripes links, and computes what TFLM does."""
    require_chip()
    told = list[Note]()
    asked = Options(settings={"ram.size": most, "core.stack": "2K"}, tell=told.append)
    compiled = compile_model(network_file("vww_mobilenetv1"), load_target("rp2040"), asked)
    assert compiled.striped is not None and compiled.striped.stripes
    assert any(note.kind is Kind.SLOWER and note.text.startswith("to fit the memory") for note in told)
    write_project(compiled.project, tmp_path / "build")
    build, reference = open_build(tmp_path / "build"), references("vww_mobilenetv1")
    result = run_build(build, "iss", [{compiled.graph.inputs[0]: reference["in_0"]}])
    np.testing.assert_array_equal(result.outputs[0][compiled.graph.outputs[0]], reference["out_0__tflm"])
    assert result.sizes["bss"] + 2048 <= parse_bytes(most) and build.manifest.memory_budget is None


def test_a_memory_without_room_says_the_least_that_has() -> None:
    model, target = network_file("vww_mobilenetv1"), load_target("rp2040")
    settings = {"ram.size": "12K", "core.stack": "2K"}
    with pytest.raises(PlanError, match="need at least 30080 bytes, 17792 more than the 12288 bytes of ram") as caught:
        compile_model(model, target, Options(settings=settings))
    assert "stripes" in caught.value.where and "--set ram.size=30080" in caught.value.hint
    assert compile_model(model, target, Options(settings=settings | {"ram.size": "30080"})).striped is not None


def test_a_budget_out_of_reach_says_how_far() -> None:
    with pytest.raises(PlanError, match=r"need at least \d+ bytes, \d+ more than the memory budget of 20000") as caught:
        compile_model(network_file("vww_mobilenetv1"), RISCV, Options(memory_budget=20_000))
    least, missing, _ = (int(word) for word in caught.value.what.replace(",", "").split() if word.isdigit())
    assert least - missing == 20_000 and "stripes" in caught.value.where
    with pytest.raises(PlanError, match="need at least 4864 bytes") as caught:
        compile_model(network_file("ad_autoencoder"), RISCV, budget(700))
    assert "no stretch" in caught.value.where


def test_a_budget_is_for_a_core_alone() -> None:
    with pytest.raises(TargetError, match=r"ne16: .*it has engines, whose layers are cut into tiles instead"):
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
    command("compile", model, "--target", "riscv", "--memory-budget", "28K", "-o", str(tmp_path / "build"))
    printed = capsys.readouterr()
    said = " ".join((printed.err + printed.out).split())
    assert (
        "note, slower: to fit the memory conv_1 to conv_2 in 6 stripes; conv_3 to conv_5 in 3 stripes" in said
        and "0 MACs more" in said
    )
    assert "4,096 reserved" in said
    command("explain", model, "--target", "riscv", "--memory-budget", "28K", "--json")
    described = json.loads(capsys.readouterr().out)
    assert described["memory_budget"] == 28 * 1024
    assert [(entry["count"], entry["keeps"]) for entry in described["stripes"]] == [(6, True), (3, True)]
