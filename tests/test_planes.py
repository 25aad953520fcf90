"""Depthwise convolutions in planes of pairs and in lanes: exact for all shapes they take; where they are not taken."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from core_kernel_cases import Case, Maker, padded
from dovetail.ir.graph import evaluate
from dovetail.ir.operators.arithmetic import Add
from dovetail.ir.operators.linear import DepthwiseConv2d
from dovetail.ir.types import DType
from dovetail.kernels import CoreTraits, generate
from dovetail.target import CoreInstruction
from dovetail.targets.cortex_m import M4, PAIR, SMLAD, UNPACK
from dovetail.targets.vexriscv_cfu import LANES
from firmware import require_chip
from test_core_kernels import build, needs_compiler, run
from test_end_to_end import run as run_project
from test_scheduled_kernels import check, host_text

DSP = (UNPACK, SMLAD)


def depthwise(seed: int, channels: int | None = None, dtype: DType = DType.INT8) -> Case:
    """A random depthwise convolution, requantised; sometimes with a residual addition, sometimes without a limit."""
    maker = Maker(f"planes {seed}")
    kernel = (maker.number(1, 5), maker.number(1, 7))
    stride, dilation = (maker.number(1, 3), maker.number(1, 2)), (maker.one_of(1, 1, 2), 1)
    span = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    channels = channels or maker.one_of(4, 8, 12)
    zero_point = maker.zero_point(dtype)
    size = [maker.number(low, low + 11) for low in span]
    x = padded(maker, maker.input((1, *size, channels), dtype), kernel, dilation, zero_point)
    operands = [x, maker.constant((1, *kernel, channels), DType.INT8)]
    operands += [maker.constant((channels,), DType.INT32, 1 << 20)] if maker.one_of(True, False) else []
    value = maker.requantize(maker.add(DepthwiseConv2d(stride, dilation, zero_point, 0), *operands))
    if maker.one_of(True, False, False):
        shape = maker.builder.type_of(value).shape
        value = maker.requantize(maker.add(Add(), value, maker.requantize(maker.input(shape, DType.INT8))))
    return maker.case(value if maker.one_of(True, False, False) else maker.clip(value))


@needs_compiler
@pytest.mark.parametrize("room", [6144, 700])
def test_kernels_equal_the_graph(room: int, tmp_path: Path) -> None:
    """Random shapes, strides, dilations and paddings, all rows at once and in bands; under the sanitiser."""
    cases = [depthwise(seed) for seed in range(24)]
    kernels = [generate(c.graph, f"kernel_{n}", CoreTraits(6, DSP, room)) for n, c in enumerate(cases)]
    used = sum(kernel.instructions == ("unpack", "smlad") for kernel in kernels)
    bands = sum("end = band + 1 " not in k.source and "? band +" in k.source for k in kernels)
    print(f"{used} of {len(cases)} kernels in planes, {bands} in bands of unequal size")
    assert used >= (22 if room > 6000 else 12)
    assert room > 6000 or bands > 0
    check(cases, kernels, tmp_path)


@needs_compiler
def test_kernels_of_lanes_equal_the_graph(tmp_path: Path) -> None:
    """The same layers on a core that multiplies neighbouring channels each by itself."""
    cases = [depthwise(seed) for seed in range(24)]
    kernels = [generate(c.graph, f"kernel_{n}", CoreTraits(16, (LANES,), 3072)) for n, c in enumerate(cases)]
    assert all(kernel.instructions == ("lanes4",) for kernel in kernels)
    check(cases, kernels, tmp_path)
    other = depthwise(1, channels=6)
    assert not generate(other.graph, "kernel", CoreTraits(16, (LANES,), 3072)).instructions


@needs_compiler
def test_a_wrong_product_is_found(tmp_path: Path) -> None:
    crossed = replace(SMLAD, declarations=SMLAD.declarations.replace("(int16_t)(*b >> 16)", "(int16_t)*b"))
    maker = Maker("sums as they are")
    weights = maker.constant((1, 3, 3, 4), DType.INT8)
    case = maker.case(maker.add(DepthwiseConv2d((1, 1), (1, 1), 0, 0), maker.input((1, 6, 7, 4), DType.INT8), weights))
    kernel = generate(case.graph, "kernel_0", CoreTraits(6, (UNPACK, crossed), 6144))
    library = ctypes.CDLL(str(build(tmp_path, host_text([kernel]), "-O1", "-shared", "-fPIC")))
    wanted = evaluate(case.graph, case.inputs)[case.graph.outputs[0]]
    assert not np.array_equal(run(library.run_kernel_0, kernel, case), wanted)


OTHERS: dict[str, tuple[Case, tuple[CoreInstruction, ...], int]] = {
    "no product of pairs": (depthwise(1), (UNPACK,), 6144),
    "no load of pairs": (depthwise(1), (SMLAD,), 6144),
    "neighbours in one register": (
        depthwise(1),
        (replace(UNPACK, meaning=UNPACK.meaning.replace("2 * i + p", "2 * p + i")), SMLAD),
        6144,
    ),
    "registers of another size": (
        depthwise(1),
        tuple(replace(i, memories=(replace(PAIR, c_type="uint64_t"),)) for i in DSP),
        6144,
    ),
    "six channels": (depthwise(1, channels=6), DSP, 6144),
    "uint8": (depthwise(1, dtype=DType.UINT8), DSP, 6144),
    "little stack": (depthwise(1), DSP, 100),
}


@pytest.mark.parametrize("name", list(OTHERS))
def test_other_layers_and_cores_keep_todays_kernel(name: str) -> None:
    case, instructions, room = OTHERS[name]
    kernel = generate(case.graph, "kernel", CoreTraits(6, instructions, room))
    assert kernel.instructions == () and kernel.source == generate(case.graph, "kernel", CoreTraits(6)).source


def test_random_layers_on_the_simulated_core(tmp_path: Path) -> None:
    """The instructions of the core, executed."""
    require_chip()
    from dovetail.compile import Options, compile_graph

    for number in (2, 5):
        case = depthwise(number)
        compiled = compile_graph(case.graph, M4, Options())
        result = run_project(compiled, tmp_path / str(number), [dict(case.inputs)])
        for value in compiled.graph.outputs:
            np.testing.assert_array_equal(result.outputs[0][value], evaluate(compiled.graph, case.inputs)[value])
