"""Instructions whose operands lie in registers of their own: the DSP extension of Cortex-M, and what is refused."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from core_kernel_cases import Case, Maker, padded
from dovetail.errors import TargetError
from dovetail.ir.graph import evaluate
from dovetail.ir.operators.linear import Conv2d, FullyConnected
from dovetail.ir.types import DType
from dovetail.kernels import CoreTraits, generate, unused_instructions
from dovetail.target import CoreInstruction
from dovetail.targets.cortex_m import M4, SMLAD, UNPACK
from firmware import require_chip
from test_core_kernels import build, needs_compiler, run
from test_end_to_end import run as run_project
from test_scheduled_kernels import check, convolution, dense, host_text, padded_image, plain

pytest.importorskip("exo", reason="schedules need exo-lang")

DSP = (UNPACK, SMLAD)


def wrong(instruction: CoreInstruction, old: str, new: str) -> CoreInstruction:
    """The instruction with another meaning, its C the same."""
    assert old in instruction.meaning
    return replace(instruction, meaning=instruction.meaning.replace(old, new))


@needs_compiler
@pytest.mark.parametrize("family", [convolution, dense])
def test_kernels_equal_the_graph(family: object, tmp_path: Path) -> None:
    """Random shapes, strides, dilations and paddings; the instructions' plain C on this computer."""
    cases = [family(seed) for seed in range(20, 24)]  # type: ignore[operator]
    kernels = [generate(c.graph, f"kernel_{n}", CoreTraits(6, DSP, 6144)) for n, c in enumerate(cases)]
    used = sum(kernel.instructions == ("unpack", "smlad") for kernel in kernels)
    print(f"{used} of {len(cases)} kernels use smlad")
    assert used >= len(cases) // 2
    check(cases, kernels, tmp_path)


@needs_compiler
def test_all_taps_of_a_block_as_one_instruction(tmp_path: Path) -> None:
    """Two pixels and two channels of images, four channels of single pixels; a column more than blocks have, and three
    taps more than vectors have, as products one by one."""
    maker = Maker("blocks")
    image = padded(maker, maker.input((1, 3, 5, 3), DType.INT8), (3, 3), (1, 1), 5)
    value = maker.add(Conv2d((1, 1), (1, 1), 5, 0), image, maker.constant((3, 3, 3, 3), DType.INT8))
    cases = [maker.case(maker.clip(maker.requantize(value)))]
    maker = Maker("blocks of a row")
    rows = maker.add(FullyConnected(0, 0), maker.input((1, 24), DType.INT8), maker.constant((6, 24), DType.INT8))
    cases.append(maker.case(rows))
    kernels = [generate(c.graph, f"kernel_{n}", CoreTraits(6, M4.core.instructions, 6144)) for n, c in enumerate(cases)]
    assert kernels[0].instructions == ("unpack", "smlad_2x2", "smlad") and "smlad_2x2((6), &sum[0]" in kernels[0].source
    assert kernels[1].instructions == ("unpack", "smlad_1x4") and "smlad_1x4((6), &sum[0]" in kernels[1].source
    check(cases, kernels, tmp_path)


def test_activations_are_staged_once_for_all_channels() -> None:
    """Before the loop over channels, and the innermost loop reads both operands at constant places."""
    source = generate(padded_case().graph, "kernel", CoreTraits(6, DSP, 6144)).source
    inside = source.split("static void kernel_inside_block(")[1].split("\n}\n")[0]
    staging, products = inside.split("for (int32_t ob = 0;")
    assert "unpack(&wide[" in staging and "smlad(" not in staging
    assert "smlad(&sum[0], &wide_at[0], &tap[0]);" in products and "wide[" not in products.split("wide_at = ")[1][20:]
    assert "if (" not in inside


def padded_case() -> Case:
    maker = Maker("staged interior")
    value = maker.add(Conv2d((1, 1), (1, 1), 0, 0), padded_image(maker), maker.constant((8, 3, 3, 8), DType.INT8))
    return maker.case(maker.clip(maker.requantize(value)))


def test_a_layer_larger_than_the_stack_keeps_todays_kernel() -> None:
    case = padded_case()
    kernel = generate(case.graph, "kernel", CoreTraits(6, DSP, 100))
    assert kernel.instructions == () and kernel.source == generate(case.graph, "kernel", CoreTraits(6)).source
    assert any("need" in note and "there are 100" in note for note in kernel.notes)


PLANTED = {
    "smlad multiplies other taps": (UNPACK, wrong(SMLAD, "a[i] * b[i]", "a[i] * b[1 - i]")),
    "smlad subtracts": (UNPACK, wrong(SMLAD, "a[i] * b[i]", "-a[i] * b[i]")),
    "smlad wants no registers": (UNPACK, wrong(SMLAD, "b: [i8][2] @ PAIR", "b: [i8][2] @ DRAM")),
    "unpack fills one register twice": (wrong(UNPACK, "2 * i + p", "2 * i"), SMLAD),
    "unpack reads backwards": (wrong(UNPACK, "2 * i + p", "3 - 2 * i - p"), SMLAD),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_wrong_meaning_is_refused_by_selection(planted: str) -> None:
    """Nothing of a set is used whose meanings are not what the layer computes; the difference is named."""
    case, instructions = plain(), PLANTED[planted]
    kernel = generate(case.graph, "kernel", CoreTraits(6, instructions))
    assert kernel.instructions == () and kernel.source == generate(case.graph, "kernel", CoreTraits(6)).source
    sentences = unused_instructions(case.graph, CoreTraits(instructions=instructions))
    print(sentences)
    assert any(sentence.startswith(("smlad:", "unpack:")) for sentence in sentences)


@needs_compiler
def test_columns_that_fill_no_block_without_padding(tmp_path: Path) -> None:
    """What is left of a row is a loop of its own, of the same name as that of whole blocks."""
    maker = Maker("rest of a row")
    weights = maker.constant((4, 2, 2, 4), DType.INT8)
    value = maker.add(Conv2d((1, 1), (1, 1), 0, 0), maker.input((1, 3, 8, 4), DType.INT8), weights)
    case = maker.case(maker.clip(maker.requantize(value)))
    kernel = generate(case.graph, "kernel_0", CoreTraits(6, DSP, 6144))
    assert kernel.instructions == ("unpack", "smlad") and "kernel_0_inside_rest(" in kernel.source
    check([case], [kernel], tmp_path)


@needs_compiler
def test_another_order_of_taps_is_followed_not_trusted(tmp_path: Path) -> None:
    """`unpack` said to give neighbouring taps has the loops arranged so: with C of that meaning the result is exact,
    with today's C, which does something else in the same way for both operands, it is the same sum."""
    case = plain()
    neighbours = wrong(UNPACK, "2 * i + p", "2 * p + i")
    kernel = generate(case.graph, "kernel_0", CoreTraits(6, (neighbours, SMLAD)))
    assert kernel.instructions == ("unpack", "smlad")
    check([case], [kernel], tmp_path)


@needs_compiler
def test_wrong_c_is_found_by_comparison_on_the_host(tmp_path: Path) -> None:
    """Selection trusts the meaning; C that multiplies other taps is found as soon as results are compared."""
    crossed = replace(SMLAD, declarations=SMLAD.declarations.replace("(int16_t)(*b >> 16)", "(int16_t)*b"))
    case = plain()
    kernel = generate(case.graph, "kernel_0", CoreTraits(6, (UNPACK, crossed)))
    library = ctypes.CDLL(str(build(tmp_path, host_text([kernel]), "-O1", "-shared", "-fPIC")))
    wanted = evaluate(case.graph, case.inputs)[case.graph.outputs[0]]
    assert not np.array_equal(run(library.run_kernel_0, kernel, case), wanted)


def test_a_wrong_rewrite_is_refused_by_exo() -> None:
    """Steps that would change what is computed: summing before the start, taps beyond the last, another weight."""
    from exo.stdlib.scheduling import SchedulingError, divide_loop, reorder_stmts, rewrite_expr

    from dovetail.kernels.scheduled.algorithms import Packing, ScheduledLayer, fully_connected
    from dovetail.kernels.scheduled.select import scope
    from dovetail.kernels.window import WindowGeometry
    from dovetail.loops.procedures import procedure

    window = WindowGeometry(1, (1, 1), 6, (1, 1), (1, 1), (1, 1), (1, 1), (0, 0))
    p = procedure(fully_connected(ScheduledLayer(window, 4, 0), Packing(2, 4), []), scope())
    with pytest.raises(SchedulingError):
        divide_loop(p, "c", 4, ["cb", "ci"], perfect=True)
    with pytest.raises(SchedulingError):
        reorder_stmts(p, p.find("sum = _").expand(0, 1))
    with pytest.raises(SchedulingError):
        rewrite_expr(p, p.find("weights[_]").idx()[3], "(c + 1) % 4")


def test_the_meaning_must_name_its_memories() -> None:
    with pytest.raises(TargetError, match="PAIR"):
        generate(plain().graph, "kernel", CoreTraits(6, (UNPACK, replace(SMLAD, memories=()))))


def test_random_layers_on_the_simulated_core(tmp_path: Path) -> None:
    """The inline assembly, executed: the firmware of three layers equals the operators' meaning."""
    require_chip()
    from dovetail.compile import Options, compile_graph

    for number, case in enumerate([convolution(20), dense(20)]):
        compiled = compile_graph(case.graph, M4, Options())
        result = run_project(compiled, tmp_path / str(number), [dict(case.inputs)])
        for value in compiled.graph.outputs:
            np.testing.assert_array_equal(result.outputs[0][value], evaluate(compiled.graph, case.inputs)[value])
