"""Kernels from algorithms and schedules with a core's own instructions: exact, and honest about what is not used."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from elftools.elf.elffile import ELFFile

from conftest import KEPT_LOOPS
from core_kernel_cases import Case, Maker, fully_connected, padded
from dovetail.errors import TargetError
from dovetail.ir.graph import evaluate
from dovetail.ir.operators.arithmetic import Add
from dovetail.ir.operators.linear import Conv2d, FullyConnected
from dovetail.ir.types import DType, TensorType
from dovetail.kernels import CoreKernel, CoreTraits, generate, unused_instructions
from dovetail.run import run_build
from dovetail.target import CoreInstruction
from dovetail.targets.riscv_dot4 import DOT4
from dovetail.targets.riscv_xpulp import FUNCTIONS, SDOTSP_B, STREAMS
from firmware import require_chip
from test_core_kernels import build, describe, library_text, needs_compiler, run
from test_end_to_end import compile_with_logits, network_file, stored
from test_end_to_end import run as run_project

pytest.importorskip("exo", reason="schedules need exo-lang")

PAIRS = CoreInstruction(
    "dot4_pair",
    meaning="""
def dot4_pair(acc: [i32][2] @ DRAM, a: [i8][4] @ DRAM, b: [i8][2, 4] @ DRAM):
    assert stride(acc, 0) == 1
    assert stride(a, 0) == 1
    assert stride(b, 0) == 4
    for j in seq(0, 2):
        for i in seq(0, 4):
            acc[j] += a[i] * b[j, i]
""",
    c="dot4_pair({acc}, {a}, {b})",
    declarations="""\
static inline void dot4_pair(int32_t *acc, const int8_t *a, const int8_t *b)
{
    for (int32_t i = 0; i < 8; ++i) {
        acc[i / 4] += a[i % 4] * b[i];
    }
}
""",
    alignment=4,
)
"""One instruction for two nested loops."""

SUBTRACTING = replace(DOT4, name="sub4", meaning=DOT4.meaning.replace("dot4", "sub4").replace("a[i]", "-a[i]"))
"""A meaning that is not what any layer computes."""


def convolution(seed: int, channels: int | None = None) -> Case:
    """A random int8 convolution with one group, requantised; sometimes with a residual addition."""
    maker = Maker(f"scheduled convolution {seed}")
    kernel = (maker.number(1, 3), maker.number(1, 4))
    dilation = (maker.one_of(1, 1, 2), maker.one_of(1, 1, 2))
    span = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    depth, outputs = channels or maker.one_of(1, 2, 3, 4, 6, 8, 16), maker.number(1, 20)
    zero_point = maker.zero_point(DType.INT8)
    size = [maker.number(low, low + 9) for low in span]
    x = padded(maker, maker.input((1, *size, depth), DType.INT8), kernel, dilation, zero_point)
    operands = [x, maker.constant((outputs, *kernel, depth), DType.INT8)]
    operands += [maker.constant((outputs,), DType.INT32, 1 << 20)] if maker.one_of(True, False) else []
    stride = (maker.number(1, 2), maker.number(1, 3))
    value = maker.requantize(maker.add(Conv2d(stride, dilation, zero_point, 0), *operands))
    if maker.one_of(True, False, False):
        shape = maker.builder.type_of(value).shape
        value = maker.requantize(maker.add(Add(), value, maker.requantize(maker.input(shape, DType.INT8))))
    return maker.case(maker.clip(value))


def dense(seed: int) -> Case:
    """A random int8 fully connected layer."""
    maker = Maker(f"scheduled dense {seed}")
    depth, outputs = maker.one_of(4, 8, 36, maker.number(1, 40)), maker.number(1, 24)
    x = maker.input((*maker.one_of((1,), (2,), (3, 2)), depth), DType.INT8)
    operands = [x, maker.constant((outputs, depth), DType.INT8), maker.constant((outputs,), DType.INT32, 1 << 20)]
    value = maker.add(FullyConnected(maker.zero_point(DType.INT8), 0), *operands)
    return maker.case(maker.clip(maker.requantize(value)))


def host_text(kernels: list[CoreKernel]) -> str:
    """A library of kernels with what their instructions need."""
    needed = dict.fromkeys(text for kernel in kernels for text in kernel.declarations)
    return "\n".join(["#include <stdint.h>", *needed, library_text(kernels)])


def check(cases: list[Case], kernels: list[CoreKernel], folder: Path) -> None:
    """Compare every kernel's result, under the sanitiser, with the graph's."""
    flags = ("-O0", "-shared", "-fPIC", "-fsanitize=undefined", "-fno-sanitize-recover=undefined")
    library = ctypes.CDLL(str(build(folder, host_text(kernels), *flags)))
    for case, kernel in zip(cases, kernels, strict=True):
        got = run(getattr(library, f"run_{kernel.name}"), kernel, case)
        wanted = evaluate(case.graph, case.inputs)[case.graph.outputs[0]]
        assert np.array_equal(got, wanted), f"{describe(case)}\n{kernel.source}\n{got}\n{wanted}"


@needs_compiler
@pytest.mark.parametrize("family", [convolution, dense])
def test_kernels_equal_the_graph(family: object, tmp_path: Path) -> None:
    cases = [family(seed) for seed in range(12)]  # type: ignore[operator]
    kernels = [generate(c.graph, f"kernel_{n}", CoreTraits(instructions=(DOT4,))) for n, c in enumerate(cases)]
    used = sum("dot4" in kernel.instructions for kernel in kernels)
    print(f"{used} of {len(cases)} kernels use dot4")
    assert used >= len(cases) // 2
    check(cases, kernels, tmp_path)


@needs_compiler
def test_an_instruction_of_two_nested_loops(tmp_path: Path) -> None:
    cases = [convolution(seed, channels=8) for seed in range(3)]
    kernels = [generate(c.graph, f"kernel_{n}", CoreTraits(instructions=(PAIRS,))) for n, c in enumerate(cases)]
    assert all(kernel.instructions == ("dot4_pair",) for kernel in kernels)
    assert all("dot4_pair(&sum[" in kernel.source for kernel in kernels)
    check(cases, kernels, tmp_path)


@cache
def plain() -> Case:
    return convolution(3, channels=8)


def test_a_wrong_meaning_is_never_selected_and_reported() -> None:
    kernel = generate(plain().graph, "kernel", CoreTraits(instructions=(SUBTRACTING,)))
    assert kernel.instructions == () and "sub4" not in kernel.source
    assert kernel.source == generate(plain().graph, "kernel").source
    (sentence,) = unused_instructions(plain().graph, CoreTraits(instructions=(SUBTRACTING,)))
    print(sentence)
    assert sentence.startswith("sub4: expects the sum") and "found the sum" in sentence


def test_alignment_is_part_of_the_meaning() -> None:
    """Channels that fill no word are gathered; an instruction that wants more than arrays give is refused."""
    wanting = replace(DOT4, alignment=8)
    (sentence,) = unused_instructions(plain().graph, CoreTraits(instructions=(wanting,)))
    assert "multiples of 4 bytes" in sentence and "wants 8" in sentence


def test_the_meaning_must_be_a_procedure() -> None:
    for meaning, words in (("def dot4(:", "no Exo procedure"), (DOT4.meaning.replace("dot4", "other"), "'other'")):
        with pytest.raises(TargetError, match=words):
            generate(plain().graph, "kernel", CoreTraits(instructions=(replace(DOT4, meaning=meaning),)))


def test_equal_layers_share_one_function() -> None:
    first = generate(plain().graph, "first", CoreTraits(instructions=(DOT4,)))
    second = generate(plain().graph, "second", CoreTraits(instructions=(DOT4,)))
    assert first.key == second.key and first.source != second.source


def test_the_interior_has_no_branches() -> None:
    """Of a padded layer, the function of blocks inside the image asks nothing about it."""
    maker = Maker("interior")
    x = padded_image(maker)
    value = maker.add(Conv2d((1, 1), (1, 1), 0, 0), x, maker.constant((8, 3, 3, 8), DType.INT8))
    case = maker.case(maker.clip(maker.requantize(value)))
    source = generate(case.graph, "kernel", CoreTraits(instructions=(DOT4,))).source
    inside = source.split("static void kernel_inside_block(")[1].split("\n}\n")[0]
    assert "if (" not in inside and "memcpy" not in inside and "dot4(" in inside
    assert "if (" in source.split("static void kernel_block(")[1].split("\n}\n")[0]


def padded_image(maker: Maker) -> str:
    from dovetail.ir.operators.movement import Pad

    x = maker.input((1, 12, 16, 8), DType.INT8)
    assert maker.builder.type_of(x) == TensorType((1, 12, 16, 8), DType.INT8)
    return maker.add(Pad((0, 1, 1, 0), (0, 1, 1, 0), 0), x)


def test_results_are_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run needs no schedule: the loops come from the cache, a damaged entry is made again."""
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path))
    first = generate(plain().graph, "kernel", CoreTraits(instructions=(DOT4,)))
    entries = sorted((tmp_path / "loops").glob("*.json"))
    assert entries
    with zipfile.ZipFile(KEPT_LOOPS) as archive:  # a sample of what the tests begin with
        known = set(archive.namelist())
        assert all(entry.read_bytes() == archive.read(entry.name) for entry in entries if entry.name in known)
    import dovetail.kernels.scheduled.write as module

    with monkeypatch.context() as without:
        without.setattr(module, "find_spec", lambda _: None)  # nothing can be scheduled
        assert generate(plain().graph, "kernel", CoreTraits(instructions=(DOT4,))).source == first.source
    for entry in entries:
        entry.write_text("{")
    assert generate(plain().graph, "kernel", CoreTraits(instructions=(DOT4,))).source == first.source


def test_types_without_loops_keep_todays_kernel() -> None:
    case = fully_connected(Maker("fully_connected 3"))
    kernel = generate(case.graph, "kernel", CoreTraits(instructions=(DOT4,)))
    if not kernel.instructions:
        assert kernel.source == generate(case.graph, "kernel").source and kernel.notes


MOST_PER_MAC = {"ic_resnet8": 0.7, "kws_dscnn": 1.2, "vww_mobilenetv1": 1.7, "ad_autoencoder": 0.8}
"""Instructions per multiply-accumulate of a whole network with a dot product."""
MOST_WITH_STREAMS = {"ic_resnet8": 0.6, "kws_dscnn": 1.0, "vww_mobilenetv1": 1.15, "ad_autoencoder": 0.6}
"""On `riscv_xpulp`, on whose RTL tests/test_rtl_cores.py holds the same."""


@pytest.mark.parametrize(
    ("name", "target"), [(name, target) for target in ("riscv_dot4", "riscv_xpulp") for name in MOST_PER_MAC]
)
def test_networks_with_an_own_instruction(
    name: str, target: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The firmware, its dot product executed by the target's hook, and the host's plain C equal TensorFlow Lite
    Micro."""
    require_chip()
    compiled = compile_with_logits(network_file(name), target, None)
    inputs, reference = stored(name, compiled)
    result = run_project(compiled, tmp_path / "build", inputs[:1])
    host = run_build(result.build, "host", inputs)
    for index, outputs in enumerate(host.outputs):
        np.testing.assert_array_equal(outputs[compiled.graph.outputs[0]], reference[f"out_{index}__tflm"])
    for value in compiled.graph.outputs:
        np.testing.assert_array_equal(result.outputs[0][value], host.outputs[0][value])
    macs = sum(region.macs for region in compiled.regions)
    per_mac = (result.simulation.inferences[0].instructions or 0) / macs
    record_property("instructions_per_mac", per_mac)
    print(f"{name}: {per_mac:.3f} instructions per MAC")
    assert per_mac <= (MOST_WITH_STREAMS if target == "riscv_xpulp" else MOST_PER_MAC)[name]
    assert compiled.unit.notes == ()


ENCODINGS = {
    "cv.sdotsp.b a0, a1, a2": SDOTSP_B.assembly.format(acc="a0", a="a1", b="a2"),
    "cv.lw a0, (a1), -20": STREAMS.load.format(to="a0", pointer="a1", step=-20),
    "cv.mac a0, a1, a2": FUNCTIONS["multiply_add"],
    "cv.addrnr a0, a1, a2": FUNCTIONS["requantize_near"],
    "cv.clip a0, a1, 8": FUNCTIONS["saturate"],
}
"""What LLVM calls an instruction, and the text in which the target's C asks for it."""


@pytest.mark.parametrize("text", ENCODINGS)
def test_the_encoding_is_the_assemblers(text: str, tmp_path: Path) -> None:
    """CORE-V instructions as LLVM writes them are what the target's C asks for. (It does not know hardware loops.)"""
    require_chip()
    (line,) = re.findall(r"\.insn [^\n\"\\]*", ENCODINGS[text])
    asked = re.sub(r"%(\d)", lambda match: f"a{min(int(match[1]), 2)}", line)
    words = []
    for name, line in (("asked", asked), ("known", text)):
        (tmp_path / f"{name}.s").write_text(f"{line}\n")
        flags = ["-target", "riscv32-freestanding", "-g0", "-mcpu=generic_rv32+xcvsimd+xcvmac+xcvalu+xcvmem"]
        command = [sys.executable, "-m", "ziglang", "cc", *flags, "-c", f"{name}.s", "-o", f"{name}.o"]
        subprocess.run(command, cwd=tmp_path, check=True)
        with (tmp_path / f"{name}.o").open("rb") as stream:
            words.append(ELFFile(stream).get_section_by_name(".text").data())
    assert words[0] == words[1] and len(words[0]) == 4
