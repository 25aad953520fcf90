"""How long core kernels take by the turns of their loops: against the simulator, and counted one by one."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from conftest import shared_dir
from dovetail.guests.tune.measure import measured
from dovetail.ir.graph import Graph, GraphBuilder
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.elementwise import Binary, BinaryKind
from dovetail.ir.operators.linear import Conv2d
from dovetail.ir.operators.movement import Concat, Pad, Slice
from dovetail.ir.types import DType, Shape, TensorType
from dovetail.kernels import core_traits, turns
from dovetail.kernels.turns import Turns
from dovetail.kernels.window import WindowGeometry
from dovetail.schedule.partition import partition
from dovetail.target.costs import kernel_cycles
from dovetail.target.pattern import Choice
from dovetail.targets import load_target
from dovetail.timing.kernels import core_cycles
from firmware import require_chip
from tuning_cases import adapted, layer_graph

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "kernel_cycles.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """scripts/kernel_cycles.py."""
    spec = importlib.util.spec_from_file_location("kernel_cycles", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernel_cycles"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.oracles
@pytest.mark.parametrize(
    ("name", "worst"), [("riscv", 0.10), ("riscv_xpulp", 0.12), ("cortex_m4", 0.10), ("cortex_m0plus", 0.17)]
)
def test_layers_take_what_the_model_says(script: ModuleType, name: str, worst: float) -> None:
    """DS-CNN and ResNet8: the median layer within 3 %, on a Cortex-M0+ some of ResNet8's further off; with a part
    forgotten, far off."""
    target = load_target(name)
    models = [shared_dir() / f"models/mlperf_tiny/{model}_int8.tflite" for model in ("kws_dscnn", "ic_resnet8")]
    layers = list(script.layers_on(target, models))
    assert len(layers) > 15
    off = [abs(core_cycles(layer.graph, target) / layer.cycles - 1) for layer in layers]
    print(f"{name}: {script.spread([1 + one for one in off])}")
    assert np.median(off) <= 0.03 and max(off) <= worst
    rates = target.core.kernels or kernel_cycles(target.core.isa)
    forgotten = {part: 0.0 if part.endswith((".product", ".load")) else rate for part, rate in rates.items()}
    worse = replace(target, core=replace(target.core, kernels=forgotten))
    assert max(abs(core_cycles(layer.graph, worse) / layer.cycles - 1) for layer in layers) > 0.2


def taps_inside(window: WindowGeometry, axis: int) -> int:
    """Pairs of an output and a tap that lies in the image, one by one."""
    stride, before, dilation = window.stride[axis], window.before[axis], window.dilation[axis]
    return sum(
        0 <= place * stride - before + tap * dilation < window.size[axis]
        for place in range(window.outputs[axis])
        for tap in range(window.kernel[axis])
    )


def products_in(found: Turns) -> float:
    """Those of blocks and those of single pixels, of each kind."""
    return sum(found.get(f"sum.{pixels}product", 0) for pixels in ("", "border_", "alone_", "left_"))


sizes = st.integers(1, 9)


@given(sizes, sizes, st.integers(1, 5), st.integers(1, 9), st.integers(1, 3), st.integers(1, 2), st.integers(0, 1))
@examples(max_examples=60, deadline=None)
def test_every_product_is_counted_once(
    rows: int, columns: int, depth: int, outputs: int, kernel: int, stride: int, padding: int
) -> None:
    """Whatever the block: products are those of the taps in the image, lanes nobody reads included."""
    padding = min(padding, kernel // 2)
    assume(min(rows, columns) + 2 * padding >= kernel)
    builder = GraphBuilder("layer")
    value = builder.input("x", TensorType((1, rows, columns, depth), DType.INT8))
    if padding:
        value = builder.add(Pad((0, padding, padding, 0), (0, padding, padding, 0), 0), [value], "padded")
    weights = builder.constant("w", np.ones((outputs, kernel, kernel, depth), np.int8))
    graph = builder.finish([builder.add(Conv2d((stride, stride)), [value, weights], "y")])
    node = next(node for node in graph.nodes if isinstance(node.operator, Conv2d))
    made = graph.types[node.output].shape
    window = WindowGeometry(1, (rows, columns), depth, made[1:3], (kernel,) * 2, (stride,) * 2, (1, 1), (padding,) * 2)
    found = turns(graph, core_traits(load_target("riscv").core))
    least, products = taps_inside(window, 0) * taps_inside(window, 1) * depth * outputs, products_in(found)
    assert least <= products < 2 * least
    assert products % (taps_inside(window, 0) * taps_inside(window, 1) * depth) == 0
    assert all(count >= 0 for count in found.values())


def moved(operator: Operator, *shapes: Shape) -> Graph:
    """A network of one operator on bytes."""
    builder = GraphBuilder("moved")
    inputs = [builder.input(f"x{place}", TensorType(shape, DType.INT8)) for place, shape in enumerate(shapes)]
    return builder.finish([builder.add(operator, inputs, "y")])


LAYERS: dict[str, tuple[Graph, Choice]] = {
    "rows of 16 and 8 bytes": (moved(Concat(3), (1, 12, 16, 16), (1, 12, 16, 8)), {}),
    "rows of 12 bytes, far apart": (moved(Slice((0, 0, 0, 16), (1, 12, 16, 28), (1,) * 4), (1, 12, 16, 32)), {}),
    "rows of 20 and 24 bytes": (moved(Concat(3), (1, 12, 16, 20), (1, 12, 16, 24)), {}),
    "long rows": (moved(Concat(1), (1, 12, 16, 16), (1, 4, 16, 16)), {}),
    "the default block": (layer_graph((12, 12, 16), 24, 3, dtype=DType.INT8), {}),
    "a block of its own": (
        layer_graph((12, 12, 16), 24, 3, dtype=DType.INT8),
        {"pixels": 2, "channels": 4, "unroll": 2},
    ),
    "a pixel left over": (layer_graph((1, 5, 28), 32, dtype=DType.INT8), {}),
    "three pixels left over": (
        layer_graph((1, 7, 28), 32, dtype=DType.INT8),
        {"pixels": 4, "channels": 4, "unroll": 4},
    ),
    "a pixel left over, few products": (
        layer_graph((3, 3, 28), 32, dtype=DType.INT8),
        {"pixels": 4, "channels": 1, "unroll": 4},
    ),
    "every pixel alone": (layer_graph((24, 24, 3), 8, 3, 2, DType.INT8), {"pixels": 1, "channels": 4, "unroll": 1}),
    "every pixel alone, one block": (
        layer_graph((24, 24, 3), 8, 3, 2, DType.INT8),
        {"pixels": 1, "channels": 8, "unroll": 1},
    ),
    "every pixel alone, two blocks": (
        layer_graph((24, 24, 3), 16, 3, 2, DType.INT8),
        {"pixels": 1, "channels": 8, "unroll": 1},
    ),
    "a turn an element": (layer_graph((12, 12, 32), 20, dtype=DType.INT8), {"pixels": 1, "channels": 5, "unroll": 1}),
}


OFF = 0.06
"""How far a layer's estimate may be from what it takes."""
FARTHER = {"rows of 12 bytes, far apart": 0.14, "three pixels left over": 0.10}
"""Layers that are farther."""


@cache
def alone(name: str) -> int:
    """Cycles of a layer on a plain core, by itself."""
    graph, choice = LAYERS[name]
    target = load_target("riscv")
    (region,) = partition(graph, target)
    return measured(graph, target, None, {region.name: choice} if choice else {}) - target.core.statements.around


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_takes_what_its_turns_say(name: str) -> None:
    require_chip()
    graph, choice = LAYERS[name]
    ratio = core_cycles(graph, load_target("riscv"), choice) / alone(name)
    print(name, ratio)
    assert abs(ratio - 1) < FARTHER.get(name, OFF)


def test_pixels_left_over_take_an_element_a_turn() -> None:
    """Whatever the block's unrolling: theirs is the function layers share, whose short loops a compiler writes out."""
    core = core_traits(load_target("riscv").core)
    several, few = (LAYERS[name] for name in ("three pixels left over", "a pixel left over, few products"))
    assert turns(several[0], core, several[1])["sum.left_turn"] == 3 * (32 // 4) * 28
    assert turns(few[0], core, few[1])["sum.left_turn"] == 0 < turns(few[0], core, few[1])["sum.left_load"]


@pytest.mark.parametrize(
    ("pixels", "channels", "unroll", "left"),
    [(1, 1, 1, 3), (1, 2, 4, 3), (1, 4, 1, 6), (1, 4, 2, 6), (1, 5, 1, 10), (2, 2, 2, 6), (3, 2, 1, 10), (3, 2, 2, 30)],
)
def test_turns_that_a_compiler_joins(pixels: int, channels: int, unroll: int, left: int) -> None:
    """Of a loop over 60 elements; what is left is what LLVM's assembly for a Cortex-M3 has. Where barriers keep many
    products in order it joins none, nor on RISC-V."""
    graph, choice = layer_graph((6, 6, 60), 20, dtype=DType.INT8), {"pixels": pixels, "channels": channels}
    blocks = 36 // pixels * (20 // channels)
    for name, count in (("cortex_m3", left), ("riscv", 60 // unroll)):
        found = turns(graph, core_traits(load_target(name).core), {**choice, "unroll": unroll})
        assert found["sum.turn"] == pytest.approx(blocks * count)


def test_turns_joined_take_what_iss_shows() -> None:
    """On a Cortex-M3: turns of one element and of two are the same code where a compiler joins them, and one element is
    faster than two where barriers keep it from that; the model has both."""
    require_chip()
    target = load_target("cortex_m3")
    graph, region = adapted(layer_graph((6, 6, 60), 20, dtype=DType.INT8), target)
    took, ratios = {}, {}
    for block in ((1, 4, 1), (1, 4, 2), (3, 2, 1), (3, 2, 2)):
        choice = dict(zip(("pixels", "channels", "unroll"), block, strict=True))
        took[block] = measured(graph, target, None, {region.name: choice}) - target.core.statements.around
        ratios[block] = core_cycles(graph, target, choice) / took[block]
    print(took, ratios)
    assert took[1, 4, 1] == took[1, 4, 2] and took[3, 2, 1] < 0.95 * took[3, 2, 2]
    assert all(abs(ratio - 1) < OFF for ratio in ratios.values())
    assert abs(ratios[3, 2, 1] / ratios[3, 2, 2] - 1) < 0.03
    core = core_traits(target.core)
    blocks: Choice = {"pixels": 3, "channels": 2, "unroll": 1}
    forgotten = turns(graph, replace(core, joined=0), blocks)["sum.turn"] - turns(graph, core, blocks)["sum.turn"]
    assert forgotten * kernel_cycles("cortex-m3")["sum.turn"] > 0.1 * took[3, 2, 1]


def test_the_sums_of_many_channels_are_ended_in_a_loop() -> None:
    """Of eight in one block a compiler writes the ends out, of twice eight or sixteen it keeps the loop."""
    core = core_traits(load_target("riscv").core)
    one, two = (LAYERS[f"every pixel alone, {blocks}"][0] for blocks in ("one block", "two blocks"))
    block = {"pixels": 1, "channels": 8, "unroll": 1}
    for graph, choice, looped in ((one, block, False), (two, block, True), (two, {**block, "channels": 16}, True)):
        found = turns(graph, core, choice)
        assert ("sum.alone_looped_result" in found) is looped is ("sum.alone_result" not in found)
        assert found["sum.alone_pixel"] == 144 and not found["sum.product"]
        assert not any(count for part, count in found.items() if part.startswith("sum.border_"))


@pytest.mark.parametrize(
    "part",
    [
        *("move.run", "move.byte", "move.middle_run", "sum.product", "sum.load", "sum.turn"),
        *("sum.alone_load", "sum.alone_looped_result"),
    ],
)
def test_a_fault_in_a_rate_is_found(part: str) -> None:
    require_chip()
    target, rates = load_target("riscv"), kernel_cycles("rv32imc")
    faulty = replace(target, core=replace(target.core, kernels={**rates, part: 2 * rates[part]}))
    off = {name: abs(core_cycles(graph, faulty, choice) / alone(name) - 1) for name, (graph, choice) in LAYERS.items()}
    print(part, off)
    assert any(value > FARTHER.get(name, OFF) for name, value in off.items())


@pytest.mark.parametrize("kind", [BinaryKind.MULTIPLY, BinaryKind.SUBTRACT, BinaryKind.MAXIMUM])
def test_arithmetic_of_integers_costs_no_division(kind: BinaryKind) -> None:
    """Half of the cycles are estimated, as reading words is not apart; a division would be a hundred times as much."""
    require_chip()
    builder = GraphBuilder("net")
    both = [builder.input(name, TensorType((512,), DType.INT32)) for name in ("a", "b")]
    graph, target = builder.finish([builder.add(Binary(kind), both)]), load_target("riscv")
    assert 0.4 < core_cycles(graph, target) / measured(graph, target, None, {}) < 1.5
