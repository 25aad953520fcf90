"""Blocks of sums as assembly, with loads that move their pointer and loops without a branch: where, and exact."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from core_kernel_cases import Case, Maker
from dovetail.codegen.emit import write_project
from dovetail.compile import Options, compile_graph
from dovetail.errors import TargetError
from dovetail.ir.graph import evaluate
from dovetail.ir.operators.linear import Conv2d, FullyConnected
from dovetail.ir.types import DType
from dovetail.kernels import CoreTraits, core_traits, generate
from dovetail.run import open_build, run_build
from dovetail.target import Target
from dovetail.targets import load_target
from dovetail.targets.riscv_xpulp import SDOTSP_B, STREAMS
from firmware import require_chip
from test_core_kernels import needs_compiler
from test_scheduled_kernels import check, convolution, dense

pytest.importorskip("exo", reason="schedules need exo-lang")

XPULP = load_target("riscv_xpulp")
TRAITS = core_traits(XPULP.core)


def layer(
    size: tuple[int, int, int], outputs: int, kernel: int, stride: int = 1, dilation: int = 1, seed: int = 0
) -> Case:
    """A convolution of an image without padding, requantised."""
    maker = Maker(f"streams {size} {outputs} {kernel} {seed}")
    x = maker.input((1, *size), DType.INT8)
    operands = [x, maker.constant((outputs, kernel, kernel, size[2]), DType.INT8)]
    operands.append(maker.constant((outputs,), DType.INT32, 1 << 16))
    value = maker.add(Conv2d((stride, stride), (dilation, dilation), 3, 0), *operands)
    return maker.case(maker.clip(maker.requantize(value)))


def wide(depth: int) -> Case:
    """A dense layer of several pixels."""
    maker = Maker(f"streams dense {depth}")
    operands = [maker.input((4, depth), DType.INT8), maker.constant((8, depth), DType.INT8)]
    return maker.case(maker.clip(maker.requantize(maker.add(FullyConnected(1, 0), *operands))))


def source(case: Case, traits: CoreTraits = TRAITS) -> str:
    return generate(case.graph, "kernel", traits).source


def assembly(text: str) -> list[list[str]]:
    """The lines of each asm statement."""
    pieces = [piece.split('"memory"')[0] for piece in text.split("__asm__ volatile(")[1:]]
    return [
        [line.strip().strip('"').removesuffix("\\n") for line in one.splitlines() if "\\n" in line] for one in pieces
    ]


def loops(lines: list[str]) -> list[int]:
    """The instructions of each hardware loop's body."""
    return [int(line.split()[-1]) - 1 for line in lines if line.startswith(".insn i 0x2b")]


def equal_on_the_simulator(case: Case, target: Target, folder: Path) -> bool:
    """Whether the firmware of a case gives what the graph does."""
    require_chip()
    made = compile_graph(case.graph, target, Options())
    write_project(made.project, folder, replace=True)
    (outputs,) = run_build(open_build(folder, target), "iss", [dict(case.inputs)]).outputs
    wanted = evaluate(case.graph, case.inputs)
    return all(np.array_equal(outputs[name], wanted[name]) for name in case.graph.outputs)


CASES = {
    "4x4 sums": layer((6, 8, 16), 8, 1),
    "rows written out": layer((6, 9, 8), 8, 3),
    "stride": layer((9, 9, 8), 12, 3, stride=2),
    "dilated": layer((9, 9, 8), 4, 3, dilation=2),
    "channels that fill no word": layer((6, 8, 3), 8, 3),
    "channels that fill no block": layer((6, 8, 8), 7, 2),
    "one pixel": wide(64),
    "too far apart": wide(1600),
}


@pytest.mark.parametrize("name", CASES)
def test_layers_on_the_simulator(name: str, tmp_path: Path) -> None:
    assert equal_on_the_simulator(CASES[name], XPULP, tmp_path)
    blocks = assembly(source(CASES[name]))
    assert bool(blocks) == (name != "too far apart")
    assert all(length <= 64 for lines in blocks for length in loops(lines))


@pytest.mark.parametrize("seed", range(4))
def test_random_layers_on_the_simulator(seed: int, tmp_path: Path) -> None:
    assert equal_on_the_simulator(convolution(seed, channels=(4, 8, 3, 16)[seed]), XPULP, tmp_path / "convolution")
    assert equal_on_the_simulator(dense(seed), XPULP, tmp_path / "dense")


@needs_compiler
def test_this_computer_has_plain_c(tmp_path: Path) -> None:
    cases = [*CASES.values(), *(convolution(seed, channels=8) for seed in range(4))]
    check(cases, [generate(case.graph, f"kernel_{n}", TRAITS) for n, case in enumerate(cases)], tmp_path)


def test_a_function_must_stand_in_for_one() -> None:
    with pytest.raises(TargetError, match="no function 'saturated' to stand in for"):
        core_traits(replace(XPULP.core, functions={"saturated": ""}))


def test_a_turn_is_loads_and_products_alone() -> None:
    """Of 4 x 4 sums, 8 loads and 16 products, in one loop over all taps of a pixel."""
    (lines,) = assembly(source(CASES["4x4 sums"]))
    at = next(number for number, line in enumerate(lines) if line.startswith(".insn i 0x2b"))
    body = lines[at + 1 : at + 25]
    assert loops(lines) == [24]
    assert [sum(line.startswith(f".insn {kind}") for line in body) for kind in ("i 0x0b", "r 0x7b")] == [8, 16]
    assert lines[at - 2 : at] == ["li %[h0], 4", ".balign 4"]
    waits = [now for before, now in pairwise(body) if before.split()[3] in now.split()[4:]]
    assert not [line for line in waits if line.startswith(".insn r")], "a product waits for its load"


def test_rows_of_a_kernel_follow_one_another() -> None:
    """3 x 3 taps are three loops over kernel column and channel, between which the pointer goes to the next row."""
    (first, *_) = assembly(source(CASES["rows written out"]))
    assert len(loops(first)) == 3
    assert [line for line in first if line.startswith("li ")] == ["li %[h0], 6"] * 3
    assert sum(line.startswith("addi %[held]") for line in first) == 2


def test_without_streams_the_loops_stay() -> None:
    """As on `riscv_dot4`."""
    plain = replace(TRAITS, streams=None, functions=frozenset())
    text = source(CASES["4x4 sums"], plain)
    assert "__asm__" not in text and "sdotsp_b(" in text
    silent = replace(TRAITS, instructions=(replace(SDOTSP_B, assembly=""),))
    assert not assembly(source(CASES["4x4 sums"], silent))


@pytest.mark.parametrize(
    "wrong",
    [
        replace(STREAMS, load=STREAMS.load.replace("{step}", "4")),
        replace(STREAMS, repeat=STREAMS.repeat.replace("{turns}", "x0")),
        replace(STREAMS, load=STREAMS.load.replace("0x0b, 2", "0x0b, 1")),
    ],
    ids=["steps", "turns", "halves"],
)
def test_wrong_streams_are_seen(wrong: object, tmp_path: Path) -> None:
    """The comparison above finds instructions that do something else."""
    target = replace(XPULP, core=replace(XPULP.core, streams=wrong))
    try:
        assert not equal_on_the_simulator(CASES["rows written out"], target, tmp_path)
    except Exception as error:
        assert "hardware loop" in str(error)
