"""Tunes ten single layers that no heuristic was made with, and prints default and tuned cycles.

    python scripts/tuning_benchmark.py [--target ne16|vta] [--trials N] [--jobs N] [--seed N]

Every layer is a network of its own with random weights and the engine's requantisation; on ne16 its input and output
lie in L2, on vta in DRAM in the engine's layout. Cycles are those of the `iss` simulator, outputs compared with the
integer graph.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dovetail.guests.tune.layers import LayerKind, tunable_layers
from dovetail.guests.tune.log import open_log
from dovetail.guests.tune.measure import runner
from dovetail.guests.tune.tuner import TrialRunner, TuningRequest, tune_layer
from dovetail.ir.graph import Graph, GraphBuilder
from dovetail.ir.operators.arithmetic import Clip, Requantize
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Pad
from dovetail.ir.types import DType, TensorType
from dovetail.legalize import adapt
from dovetail.schedule.tiles.tile import PLACEMENT
from dovetail.target import Target
from dovetail.targets import load_target


@dataclass(frozen=True)
class Shape:
    """A layer: kind, input rows, columns, channels, output channels, kernel, stride."""

    kind: str
    height: int
    width: int
    depth: int
    outputs: int
    kernel: int = 1
    stride: int = 1

    @property
    def text(self) -> str:
        """One line."""
        if self.kind == "dense":
            return f"dense {self.depth} -> {self.outputs}"
        stride = f" stride {self.stride}" if self.stride > 1 else ""
        kernel = f"{self.kernel}x{self.kernel}"
        return f"{self.kind} {kernel}{stride} {self.height}x{self.width}x{self.depth} -> {self.outputs}"


LAYERS = (
    Shape("conv", 28, 28, 48, 96, 3),
    Shape("conv", 19, 31, 24, 40, 3),
    Shape("conv", 57, 57, 16, 24, 3, 2),
    Shape("conv", 14, 14, 160, 64, 1),
    Shape("conv", 35, 35, 32, 64, 1),
    Shape("conv", 7, 7, 192, 128, 3),
    Shape("depthwise", 45, 45, 48, 48, 3),
    Shape("depthwise", 40, 24, 64, 64, 3, 2),
    Shape("dense", 1, 1, 784, 144),
    Shape("conv", 11, 9, 320, 80, 1),
)


def network(shape: Shape, dtype: DType, seed: int = 7) -> Graph:
    """The layer as an integer graph: padding where the kernel is 3x3, 8 bits in and out."""
    random, builder = np.random.default_rng(seed), GraphBuilder("layer")
    dense, deep = shape.kind == "dense", shape.kind != "depthwise"
    form = (1, shape.depth) if dense else (1, shape.height, shape.width, shape.depth)
    value = builder.input("x", TensorType(form, dtype))
    if shape.kernel == 3:
        value = builder.add(Pad((0, 1, 1, 0), (0, 1, 1, 0), 0), [value])
    window = (shape.kernel, shape.kernel)
    size = (shape.outputs, shape.depth) if dense else (shape.outputs if deep else 1, *window, shape.depth)
    weights = builder.constant("weights", random.integers(-127, 128, size).astype(np.int8))
    bias = builder.constant("bias", random.integers(-3000, 3000, shape.outputs).astype(np.int32))
    stride = (shape.stride, shape.stride)
    operator = FullyConnected() if dense else Conv2d(stride) if deep else DepthwiseConv2d(stride)
    sums = builder.add(operator, [value, weights, bias])
    taps = shape.kernel**2 * (shape.depth if deep else 1)
    multiplier = builder.constant("m", random.integers(1 << 30, (1 << 31) - 1, shape.outputs).astype(np.int32))
    shift = builder.constant("s", np.full(shape.outputs, -7 - int(np.log2(taps) / 2), np.int32))
    scaled = builder.add(Requantize(output_zero_point=dtype.low + 100), [sums, multiplier, shift])
    graph = builder.finish([builder.add(Clip(dtype.low, dtype.high, dtype), [scaled])])
    return replace(graph, nodes=tuple(replace(node, origin="layer") for node in graph.nodes))


def only_layer(shape: Shape, target: Target) -> LayerKind:
    """The layer as the tuner sees it."""
    for dtype in (DType.UINT8, DType.INT8):  # whichever the engine takes
        graph = adapt(network(shape, dtype), target.policy(None))
        regions, layers = tunable_layers(graph, target)
        if len(regions) == 1 and regions[0].engine is not None:
            break
    (layer,) = layers
    return layer


def main() -> None:
    """Tune every layer and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="ne16")
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    target = load_target(given.target)
    print("| layer | default | tuned | saved | choice |\n| --- | ---: | ---: | ---: | --- |")
    saved = []
    with tempfile.TemporaryDirectory() as folder, runner(given.jobs, None) as run:
        request = TuningRequest(Path("layer"), given.target, Path(folder) / "log", given.trials, seed=given.seed)
        with open_log(request.log, {"dovetail_tuning_log": 1}, print) as log:
            trials = TrialRunner(log, run)
            for number, shape in enumerate(LAYERS, 1):
                layer = only_layer(shape, target)
                result = tune_layer(trials, request, target, layer, (number, len(LAYERS)), lambda progress: None)
                assert result.default is not None and result.best is not None
                tuned = result.best.outcome.cycles
                assert tuned is not None and tuned <= result.default
                saved.append(100 * (result.default - tuned) / result.default)
                choice = ", ".join(f"{name} {value}" for name, value in result.best.choice.items() if name != PLACEMENT)
                cells = (shape.text, f"{result.default:,}", f"{tuned:,}", f"{saved[-1]:.1f} %")
                print(f"| {' | '.join(cells)} | {choice or 'the default'} |", flush=True)
    print(f"\nat least 5 % saved: {sum(one >= 5 for one in saved)} of {len(saved)} layers; {given.trials} trials each")


if __name__ == "__main__":
    main()
