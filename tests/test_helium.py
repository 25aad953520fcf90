"""Kernels with Helium: on this computer in plain C, in QEMU in assembly; QEMU's counts beside those of known code."""

from __future__ import annotations

import ctypes
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from core_kernel_cases import Maker, padded
from dovetail.codegen.build.toolchain import compile_firmware
from dovetail.codegen.emit import write_project
from dovetail.codegen.emit.firmware import linker_script, runtime_path
from dovetail.compile import Options, compile_graph, compile_model
from dovetail.errors import DovetailError
from dovetail.ir.graph import Graph, evaluate
from dovetail.ir.operators.arithmetic import Add, Clip, Requantize, Rounding
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.types import Array, DType
from dovetail.kernels import core_traits, generate
from dovetail.run import RunResult, open_build, run_build
from dovetail.sim.arm import CortexMCosts
from dovetail.sim.helium import block_of
from dovetail.sim.protocol import InferenceResult
from dovetail.sim.qemu import HARNESS, PROGRAM, QemuSession
from dovetail.target.description import Target
from dovetail.targets.cortex_m import M4, M55
from dovetail.targets.helium import HELIUM
from firmware import require_chip
from oracles import references
from test_core_kernels import build, needs_compiler, run
from test_end_to_end import network_file
from test_scheduled_kernels import check, host_text

CORE = core_traits(M55.core)
MOST = {
    "ad_autoencoder": (0.30, 250_000),
    "kws_dscnn": (0.45, 1_500_000),
    "ic_resnet8": (0.30, 4_000_000),
    "vww_mobilenetv1": (0.70, 2_800_000),
}
"""Instructions per multiply-accumulate, and stated cycles."""
needs_qemu = pytest.mark.skipif(shutil.which(PROGRAM) is None, reason=f"{PROGRAM} is not installed")


def layer(maker: Maker, kind: str) -> str:
    """A random layer, mostly ended as vectors end it."""
    zero_point = maker.zero_point(DType.INT8)
    if kind == "dense":
        rows, depth, outputs = maker.one_of(1, 1, 5), maker.number(1, 70), maker.one_of(1, 3, 8, 10, 16, 20)
        operands = [maker.input((rows, depth), DType.INT8), maker.constant((outputs, depth), DType.INT8)]
        value = maker.add(FullyConnected(zero_point, 0), *operands, maker.constant((outputs,), DType.INT32, 1 << 12))
    else:
        kernel = (1, 1) if kind == "pointwise" else (maker.number(1, 4), maker.number(1, 4))
        stride, dilation = (maker.number(1, 2), maker.number(1, 3)), (maker.one_of(1, 1, 2), 1)
        channels, outputs = maker.one_of(1, 3, 8, 13, 16, 24, 40), maker.one_of(1, 4, 6, 8, 16, 19)
        span = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
        x = maker.input((1, *(maker.number(low, low + 7) for low in span), channels), DType.INT8)
        x = padded(maker, x, kernel, dilation, zero_point)
        made = (DepthwiseConv2d if kind == "depthwise" else Conv2d)(stride, dilation, zero_point, 0)
        shape = (1, *kernel, channels) if kind == "depthwise" else (outputs, *kernel, channels)
        value = maker.add(made, x, maker.constant(shape, DType.INT8))
    value = _requantized(maker, value)
    if kind == "pointwise" and maker.one_of(True, False):
        other = maker.requantize(maker.input(maker.builder.type_of(value).shape, DType.INT8))
        value = maker.requantize(maker.add(Add(), value, other))
    low = maker.one_of(-128, -128, maker.number(-128, 0))
    return maker.add(Clip(low, maker.one_of(127, 127, maker.number(low, 127)), DType.INT8), value)


def _requantized(maker: Maker, value: str) -> str:
    """Rounded as TFLite does, mostly by factors below 1; of few bits, so that halves come often."""
    size = maker.one_of(1, maker.builder.type_of(value).shape[-1])
    generator = np.random.default_rng(maker.number(0, 999))
    multiplier = maker.one_of(
        generator.integers(1 << 30, 1 << 31, size), generator.integers(4, 8, size) << 28, np.full(size, 1 << 30)
    )
    shift = generator.integers(-9, maker.one_of(1, -3, -5), size)
    names = (maker.builder.constant(name, one.astype(np.int32)) for name, one in (("m", multiplier), ("s", shift)))
    return maker.add(Requantize(Rounding.DOUBLE, 0, maker.number(-128, 127)), value, *names)


KINDS = ("conv", "depthwise", "dense", "pointwise")


def network(seed: int, layers: int) -> tuple[Graph, dict[str, Array]]:
    """Random layers that do not touch each other."""
    maker = Maker(f"vectors together {seed}")
    graph = maker.builder.finish([layer(maker, KINDS[at % 4]) for at in range(layers)])
    return graph, {name: maker.array(graph.types[name]) for name in graph.inputs}


def on_qemu(graph: Graph, inputs: dict[str, Array], target: Target, folder: Path) -> RunResult:
    """A network compiled and run once."""
    require_chip()
    compiled = compile_graph(graph, target, Options(name="net"))
    write_project(compiled.project, folder)
    return run_build(open_build(folder, target), None, [inputs])


@needs_compiler
@pytest.mark.parametrize("room", [6144, 400])
def test_meanings_equal_the_graph(room: int, tmp_path: Path) -> None:
    """Random layers under the sanitiser: rows whole and in shares, every end."""
    makers = [(Maker(f"vectors {seed}"), KINDS[seed % 4]) for seed in range(40)]
    cases = [maker.case(layer(maker, kind)) for maker, kind in makers]
    kernels = [generate(one.graph, f"kernel_{at}", replace(CORE, room=room)) for at, one in enumerate(cases)]
    used = [kernel.instructions == ("Helium",) for kernel in kernels]
    ends = sum("_end(int8_t" in kernel.source for kernel in kernels)
    print(f"{sum(used)} of {len(cases)} kernels with vectors, {ends} requantised by them")
    assert sum(used) >= (28 if room > 6000 else 20) and ends >= 10
    check(cases, kernels, tmp_path)


@needs_qemu
@pytest.mark.parametrize("seed", range(2))
def test_vectors_equal_the_graph(seed: int, tmp_path: Path) -> None:
    """Random layers in assembly: tails, paddings, strides, limits and ties."""
    graph, inputs = network(seed, 24)
    result = on_qemu(graph, inputs, M55, tmp_path / "build")
    wanted = evaluate(graph, inputs)
    wrong = [name for name in graph.outputs if not np.array_equal(result.outputs[0][name], wanted[name])]
    assert not wrong, f"{len(wrong)} of {len(graph.outputs)} layers differ"


@needs_qemu
def test_wrong_rounding_of_halves_is_found(tmp_path: Path) -> None:
    """Without the correction of negative numbers halves are rounded up."""
    wrong = replace(HELIUM, end=lambda made: HELIUM.end(replace(made, rectified=True)))
    target = replace(M55, core=replace(M55.core, vectors=wrong))
    graph, inputs = network(0, 24)
    result, wanted = on_qemu(graph, inputs, target, tmp_path / "build"), evaluate(graph, inputs)
    assert any(not np.array_equal(result.outputs[0][name], wanted[name]) for name in graph.outputs)


COUNTED = r"""
#include <stdint.h>
int8_t net_in[64];
int32_t net_out;
void dovetail_mark(uint32_t layer);
void net_run(void);
void net_run(void)
{
    const int8_t *from = net_in;
    int32_t sum = 0;
    dovetail_mark(0);
    __asm__ volatile("dlstp.8 lr, %2\n\t"
                     "1: vldrb.8 q0, [%1], #16\n\t"
                     "vmladava.s8 %0, q0, q0\n\t"
                     "letp lr, 1b\n\t"
                     "mov r2, #5\n\t"
                     "2: subs r2, r2, #1\n\t"
                     "bne 2b\n\t"
                     : "+&Te"(sum), "+r"(from) : "r"(50) : "lr", "r2", "cc", "memory", "q0");
    dovetail_mark(0xFFFFFFFFu);
    net_out = sum;
}
"""


def counted(folder: Path, code: str) -> InferenceResult:
    """One run of a program that is a network."""
    require_chip()
    (folder / "net.h").write_text("void net_run(void);\n")
    (folder / "net.c").write_text(code)
    (folder / "link.ld").write_text(linker_script(M55.memories, text="flash", data="ram", isa=M55.core.isa))
    sources = [folder / "net.c", HARNESS, *(runtime_path(name) for name in ("cortex_m_start.S", "dovetail_rt.c"))]
    macros = {"DOVETAIL_MODEL_HEADER": '"net.h"', "DOVETAIL_MODEL_RUN": "net_run", "DOVETAIL_MARK_HOOK": None}
    include, isa = [runtime_path("dovetail_rt.h").parent], M55.core.isa
    elf = compile_firmware(
        folder, sources, linker_script=Path("link.ld"), isa=isa, defines=macros, include=include, flags=("-O1",)
    )
    with QemuSession(elf, CortexMCosts(), 20) as session:
        inputs = {"net_in": np.arange(64, dtype=np.int8).tobytes()}
        (first, second) = session.run([inputs, inputs], {"net_out": 4}).inferences
    assert first == second
    return first


@needs_qemu
def test_counts_are_those_of_known_code(tmp_path: Path) -> None:
    """Four turns of three instructions behind one, then five turns of two behind one; more turns, so many more."""
    made, longer = (counted(tmp_path, COUNTED.replace("#5", turns)) for turns in ("#5", "#50"))
    assert int.from_bytes(made.outputs["net_out"], "little") == sum(x * x for x in range(50))
    own = made.markers[0].end_instruction - made.markers[0].start_instruction
    assert 0 <= own - (1 + 4 * 3 + 1 + 5 * 2) <= 8
    assert made.instructions is not None and 0 <= made.instructions - own < 20
    assert longer.markers[0].end_instruction - longer.markers[0].start_instruction == own + 45 * 2
    assert longer.instructions == made.instructions + 45 * 2


@needs_qemu
def test_a_fault_is_told(tmp_path: Path) -> None:
    """Firmware that stops where nobody waits for it."""
    with pytest.raises(DovetailError, match="fault at net_run"):
        counted(tmp_path, COUNTED.replace('"mov r2, #5', '"udf #0\\n\\tmov r2, #5'))


def test_stated_cycles() -> None:
    """Load and product overlap by a cycle; a scalar instruction waits for both."""
    load, product, nothing = bytes.fromhex("b0ec101e"), bytes.fromhex("f2ee240f"), bytes.fromhex("00bf")
    costs = CortexMCosts()
    cycles = [
        block_of(code, costs).cycles for code in (load, load * 2, load + product, (load + product) * 4, load + nothing)
    ]
    assert cycles == [2, 4, 3, 9, 3]


@needs_qemu
@pytest.mark.oracles
@pytest.mark.parametrize("name", ["ad_autoencoder", "kws_dscnn"])
def test_networks_equal_micro(name: str, tmp_path: Path) -> None:
    """Two inputs of two networks; `scripts/helium.py` runs all twelve of all four."""
    require_chip()
    compiled = compile_model(network_file(name), M55, Options(name="net"))
    write_project(compiled.project, tmp_path / "build")
    reference, port = references(name), compiled.graph.inputs[0]
    result = run_build(open_build(tmp_path / "build"), "qemu", [{port: reference[f"in_{at}"]} for at in range(2)])
    for at, outputs in enumerate(result.outputs):
        assert np.array_equal(outputs[compiled.graph.outputs[0]], reference[f"out_{at}__tflm"])
    first = result.simulation.inferences[0]
    macs = sum(layer.macs for layer in open_build(tmp_path / "build").manifest.layers)
    assert first.instructions is not None and first.total_cycles is not None
    assert first.instructions <= MOST[name][0] * macs and first.total_cycles <= MOST[name][1]


def test_other_simulators_are_refused(tmp_path: Path) -> None:
    """Unicorn knows no Helium, and the machine in QEMU is no other core."""
    graph, inputs = network(0, 1)
    for target, simulator in ((M55, "iss"), (M4, "qemu")):
        folder = tmp_path / simulator
        write_project(compile_graph(graph, target, Options(name="net")).project, folder)
        with pytest.raises(DovetailError, match=f"--sim {'qemu' if simulator == 'iss' else 'iss'}"):
            run_build(open_build(folder), simulator, [inputs])


@needs_compiler
def test_wrong_c_of_a_meaning_is_found(tmp_path: Path) -> None:
    """Sums in an order that is not the numbers'."""
    maker = Maker("vectors 0")
    case = maker.case(layer(maker, "dense"))
    kernel = generate(case.graph, "kernel_0", CORE)
    text = host_text([kernel]).replace("number[0]", "number[1]")
    library = ctypes.CDLL(str(build(tmp_path, text, "-O1", "-shared", "-fPIC")))
    assert not np.array_equal(
        run(library.run_kernel_0, kernel, case), evaluate(case.graph, case.inputs)[case.graph.outputs[0]]
    )
