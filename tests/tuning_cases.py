"""Layers and networks the tuning tests share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from dovetail import zoo
from dovetail.adapt import adapt
from dovetail.compile import reserved
from dovetail.graph.graph import Graph, GraphBuilder
from dovetail.graph.types import DType, TensorType
from dovetail.layout import choose_layouts
from dovetail.operators.arithmetic import Clip, Requantize
from dovetail.operators.linear import Conv2d, FullyConnected
from dovetail.operators.movement import Pad
from dovetail.partition import Region, partition
from dovetail.plan import plan
from dovetail.target import Target
from dovetail.tune.layer import Layer, distinct_layers


def layer_graph(size: tuple[int, ...], outputs: int, kernel: int = 1, stride: int = 1, seed: int = 3) -> Graph:
    """A convolution (or dense layer, for a size of one number) with requantisation, uint8 in and out."""
    random, builder = np.random.default_rng(seed), GraphBuilder("layer")
    value = builder.input("x", TensorType((1, *size), DType.UINT8))
    if kernel == 3:
        value = builder.add(Pad((0, 1, 1, 0), (0, 1, 1, 0), 0), [value])
    dense = len(size) == 1
    shape = (outputs, *size) if dense else (outputs, kernel, kernel, size[-1])
    weights = builder.constant("w", random.integers(-127, 128, shape).astype(np.int8))
    bias = builder.constant("b", random.integers(-3000, 3000, outputs).astype(np.int32))
    sums = builder.add(FullyConnected() if dense else Conv2d((stride, stride)), [value, weights, bias])
    multiplier = builder.constant("m", random.integers(1 << 30, (1 << 31) - 1, outputs).astype(np.int32))
    shift = builder.constant("s", np.full(outputs, -10, np.int32))
    scaled = builder.add(Requantize(output_zero_point=100), [sums, multiplier, shift])
    graph = builder.finish([builder.add(Clip(0, 255, DType.UINT8), [scaled])])
    return replace(graph, nodes=tuple(replace(node, origin="layer") for node in graph.nodes))


def adapted(graph: Graph, target: Target) -> tuple[Graph, Region]:
    """A layer in the target's form, and its one region."""
    graph = adapt(graph, target.policy(None))
    (region,) = partition(graph, target)
    return graph, region


def tunable(graph: Graph, target: Target) -> Layer:
    """A layer as the tuner takes it."""
    graph, region = adapted(graph, target)
    planned = plan(choose_layouts(graph, [region], target), target, reserved(graph, target))
    (layer,) = distinct_layers([region], planned, target)
    return layer


def digits_file(folder: Path) -> Path:
    """The digits model."""
    path = folder / "digits.onnx"
    path.write_bytes(zoo.build("digits"))
    return path
