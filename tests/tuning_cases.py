"""Layers and networks the tuning tests share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dovetail.compile import reserved
from dovetail.guests import zoo
from dovetail.guests.tune.layers import LayerKind, distinct_layers
from dovetail.ir.graph import Graph
from dovetail.ir.types import DType
from dovetail.legalize import adapt
from dovetail.schedule.layout import choose_layouts
from dovetail.schedule.partition import partition
from dovetail.schedule.plan import plan
from dovetail.schedule.region import Region
from dovetail.target import Target
from networks import Net


def layer_graph(
    size: tuple[int, ...], outputs: int, kernel: int = 1, stride: int = 1, dtype: DType = DType.UINT8
) -> Graph:
    """A convolution (or dense layer, for a size of one number) with requantisation, bytes in and out."""
    net = Net("layer", size, dtype=dtype)
    made = net.dense(net.x, outputs) if len(size) == 1 else net.convolution(net.x, outputs, kernel, stride=stride)
    graph = net.finish(made)
    return replace(graph, nodes=tuple(replace(node, origin="layer") for node in graph.nodes))


def adapted(graph: Graph, target: Target) -> tuple[Graph, Region]:
    """A layer in the target's form, and its one region."""
    graph = adapt(graph, target.policy(None))
    (region,) = partition(graph, target)
    return graph, region


def tunable(graph: Graph, target: Target) -> LayerKind:
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
