"""Convolutions and dense layers in blocks of pairs: on this computer in plain C, in `iss` in assembly."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from core_kernel_cases import Case, Maker, padded
from dovetail.codegen.emit import write_project
from dovetail.compile import Options, compile_model
from dovetail.guests.tune.layers import region_alone
from dovetail.guests.tune.measure import measured
from dovetail.ir.graph import evaluate
from dovetail.ir.operators.arithmetic import Add
from dovetail.ir.operators.linear import Conv2d, FullyConnected
from dovetail.ir.types import DType
from dovetail.kernels import CoreTraits, core_traits, generate, offered, turns
from dovetail.kernels.patches import Patches
from dovetail.options import parse_bytes
from dovetail.run import open_build, run_build
from dovetail.target.chip import PairBlock
from dovetail.target.pattern import Choice
from dovetail.targets import load_target
from dovetail.targets.cortex_m import M0PLUS, M4, PAIRS, SMLAD, UNPACK
from dovetail.timing.kernels import core_cycles
from firmware import require_chip
from oracles import references
from test_core_kernels import build, needs_compiler, run
from test_end_to_end import network_file
from test_scheduled_kernels import check, host_text
from tuning_cases import adapted, layer_graph

CORE = core_traits(M4.core)


def convolution(seed: int) -> Case:
    """A random convolution, requantised; sometimes with a residual addition, sometimes without a limit."""
    maker = Maker(f"patches {seed}")
    kernel, dilation = (maker.number(1, 4), maker.number(1, 4)), (maker.one_of(1, 1, 2), 1)
    stride = (maker.number(1, 3), maker.number(1, 3))
    span = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    channels, outputs, zero_point = maker.one_of(1, 3, 4, 8, 12, 5), maker.number(1, 9), maker.zero_point(DType.INT8)
    size = [maker.number(low, low + 9) for low in span]
    x = padded(maker, maker.input((1, *size, channels), DType.INT8), kernel, dilation, zero_point)
    operands = [x, maker.constant((outputs, *kernel, channels), DType.INT8)]
    operands += [maker.constant((outputs,), DType.INT32, 1 << 20)] if maker.one_of(True, False) else []
    value = maker.requantize(maker.add(Conv2d(stride, dilation, zero_point, 0), *operands))
    if maker.one_of(True, False, False):
        shape = maker.builder.type_of(value).shape
        value = maker.requantize(maker.add(Add(), value, maker.requantize(maker.input(shape, DType.INT8))))
    return maker.case(value if maker.one_of(True, False, False) else maker.clip(value))


def dense(seed: int) -> Case:
    """A random dense layer of some rows."""
    maker = Maker(f"rows of patches {seed}")
    rows, depth, outputs = maker.one_of(1, 1, 2, 7), maker.number(1, 40), maker.number(1, 9)
    x, weights = maker.input((rows, depth), DType.INT8), maker.constant((outputs, depth), DType.INT8)
    return maker.case(maker.requantize(maker.add(FullyConnected(maker.zero_point(DType.INT8), 0), x, weights)))


def case(size: int, kernel: int, channels: int, outputs: int, stride: int = 1) -> Case:
    """A padded convolution of a square image."""
    maker = Maker(f"patch {size} {kernel} {channels} {outputs}")
    x = padded(maker, maker.input((1, size, size, channels), DType.INT8), (kernel, kernel), (1, 1), 5)
    weights = maker.constant((outputs, kernel, kernel, channels), DType.INT8)
    return maker.case(maker.clip(maker.requantize(maker.add(Conv2d((stride, stride), (1, 1), 5, 0), x, weights))))


@needs_compiler
@pytest.mark.parametrize("room", [6144, 200])
def test_kernels_equal_the_graph(room: int, tmp_path: Path) -> None:
    """Random shapes, strides, paddings and choices, whole rows at once and in shares; under the sanitiser."""
    cases = [*(convolution(seed) for seed in range(24)), *(dense(seed) for seed in range(8))]
    core, random, kernels = replace(CORE, room=room), np.random.default_rng(7), []
    for number, one in enumerate(cases):
        space = offered(one.graph, core).space
        points = [{}, *space.points()]
        choice = points[int(random.integers(len(points)))]
        kernels.append(generate(one.graph, f"kernel_{number}", core if space.knobs else CoreTraits(6), choice=choice))
    used = sum("static inline void pairs_" in "".join(kernel.declarations) for kernel in kernels)
    shares = sum("first +=" in kernel.source for kernel in kernels)
    print(f"{used} of {len(cases)} kernels in pairs, {shares} in shares of a row")
    assert used >= (28 if room > 6000 else 15) and (room > 6000 or shares > 3)
    check(cases, kernels, tmp_path)


@pytest.mark.parametrize("made", [case(7, 3, 4, 5), case(5, 3, 3, 6, 2)], ids=["four", "odd"])
def test_every_block_in_assembly(made: Case) -> None:
    """Whatever is offered compiles, computes the graph, and takes another time than others do; none less than without
    a choice."""
    require_chip()
    space, name = offered(made.graph, CORE).space, region_alone(made.graph, M4).name
    shapes = {(point["pixels"], point["channels"]): point for point in space.points()}
    cycles = [measured(made.graph, M4, None, {name: point}) for point in shapes.values()]
    plain = measured(made.graph, M4, None, {})
    assert len(set(cycles)) == len(shapes) and plain <= min(cycles) * 1.03


@needs_compiler
def test_halves_equal_the_graph(tmp_path: Path) -> None:
    """Blocks of a core that multiplies one number at a time, in plain C under the sanitiser."""
    cases = [*(convolution(seed) for seed in range(12)), *(dense(seed) for seed in range(4))]
    core = replace(core_traits(M0PLUS.core), plain=None)
    kernels = [generate(one.graph, f"kernel_{at}", core) for at, one in enumerate(cases)]
    assert sum("static __attribute__((noinline)) void pairs_" in "".join(k.declarations) for k in kernels) >= 12
    check(cases, kernels, tmp_path)


@pytest.mark.parametrize("made", [case(7, 3, 4, 5), case(5, 3, 3, 6, 2), case(6, 1, 12, 8)], ids=["four", "odd", "one"])
def test_halves_in_assembly(made: Case, tmp_path: Path) -> None:
    """Whatever is offered computes the graph."""
    require_chip()
    points = [dict(point) for point in offered(made.graph, core_traits(M0PLUS.core)).space.points()]
    name = region_alone(made.graph, M0PLUS).name
    cycles = [measured(made.graph, M0PLUS, None, {name: point}) for point in [*points[:3], *points[-3:]]]
    assert all(cycles)


@needs_compiler
def test_wrong_c_of_a_block_is_found(tmp_path: Path) -> None:
    """A block that leaves its last step out is found as soon as results are compared."""

    def short(block: PairBlock) -> str:
        return PAIRS.write(block).replace(f"i < {block.pixels * block.channels * block.steps};", "i < 4;")

    made = case(7, 3, 4, 5)
    kernel = generate(made.graph, "kernel_0", replace(CORE, pairs=replace(PAIRS, write=short)))
    library = ctypes.CDLL(str(build(tmp_path, host_text([kernel]), "-O1", "-shared", "-fPIC")))
    wanted = evaluate(made.graph, made.inputs)[made.graph.outputs[0]]
    assert not np.array_equal(run(library.run_kernel_0, kernel, made), wanted)


def test_where_there_are_no_blocks_nothing_is_offered() -> None:
    """Neither on a core without them, nor where a pixel's columns take too much stack."""
    made = case(7, 3, 64, 5)
    alone = CoreTraits(6, (UNPACK, SMLAD), 6144)
    assert not offered(made.graph, alone).space.knobs
    taps = [offered(made.graph, core).block for core in (CORE, replace(CORE, room=1000))]
    assert [block[-1] for block in taps if block] == [2, 1], "without room, blocks of single products"


def test_refused_settings_are_left_as_they_are() -> None:
    """As of stripes of a layer, whose blocks may be others."""
    made = case(7, 3, 4, 5)
    plain = generate(made.graph, "kernel", CORE)
    assert generate(made.graph, "kernel", CORE, choice={"pixels": 99}).source == plain.source
    assert generate(made.graph, "kernel", CORE, choice={"pixels": 2, "channels": 2}).source != plain.source


def test_turns_follow_the_choice() -> None:
    """Fewer pixels at once load more; the products stay."""
    made = case(12, 3, 8, 8)
    three, one = (turns(made.graph, CORE, {"pixels": count, "channels": 2}) for count in (3, 1))
    assert three["patches.product"] == one["patches.product"]
    assert three["patches.load"] < one["patches.load"]


def test_a_loop_over_few_channels_is_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the compiler: then nothing counts channels or moves pointers. The model of layers of eight channels and of
    fourteen is right only where it knows that of the first and not of the second."""
    require_chip()
    one: Choice = {"pixels": 1, "channels": 2, "unroll": 4}
    ratios: dict[str, list[float]] = {}
    for outputs in (8, 14):
        graph, region = adapted(layer_graph((12, 12, 16), outputs, dtype=DType.INT8), M4)
        took = measured(graph, M4, None, {region.name: one}) - M4.core.statements.around
        for which, told in {"as it is": None, "never": False, "always": True}.items():
            with monkeypatch.context() as patch:
                if told is not None:
                    patch.setattr(Patches, "written_out", lambda nest, pixels, told=told: told)
                ratios.setdefault(which, []).append(core_cycles(replace(graph), M4, one) / took)
    print(ratios)
    assert all(abs(ratio - 1) < 0.05 for ratio in ratios["as it is"])
    assert ratios["never"][0] > 1.1 and ratios["always"][1] < 0.95


@pytest.mark.parametrize(("size", "most", "narrow"), [("1M", 1.0, 0), ("512K", 1.1, 3), ("300K", 1.25, 10)])
def test_weights_that_do_not_fit_twice_stay_bytes(size: str, most: float, narrow: int, tmp_path: Path) -> None:
    """Layer by layer, as far as the flash goes; the estimate knows it, and the compiler says it."""
    require_chip()
    compiled = compile_model(network_file("ad_autoencoder"), M4, Options(settings={"flash.size": size}))
    assert sum(note.text.count("dense_") for note in compiled.unit.notes if "stay bytes" in note.text) == narrow
    write_project(compiled.project, tmp_path / "build")
    reference = references("ad_autoencoder")
    result = run_build(open_build(tmp_path / "build"), "iss", [{compiled.graph.inputs[0]: reference["in_0"]}])
    np.testing.assert_array_equal(result.outputs[0][compiled.graph.outputs[0]], reference["out_0__tflm"])
    taken = result.simulation.inferences[0].total_cycles
    assert taken is not None and taken <= most * 353_400
    assert abs(compiled.assignment.clock / taken - 1) < 0.1
    assert result.sizes["text"] + result.sizes["rodata"] <= parse_bytes(size)


@pytest.mark.parametrize("core", ["cortex_m4", "cortex_m7"])
def test_blocks_of_all_registers_that_take_one_turn_are_compiled(core: str) -> None:
    """A compiler found too few registers where it saw that there is one turn. Outputs are compared with the integer
    graph."""
    require_chip()
    target = load_target(core)
    for depth, outputs in product((16, 64), (5, 6, 9, 10)):
        graph, region = adapted(layer_graph((depth,), outputs, dtype=DType.INT8), target)
        choice: Choice = {"pixels": 1, "channels": 5, "unroll": depth // 2}
        assert measured(graph, target, None, {region.name: choice}) > 0
