"""Networks of `quantize --target vta`: their scales are powers of two, so that shifts alone lose nothing."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from dovetail.guests.ptq import Samples, Settings, prepare, quantise_network
from dovetail.ir.graph import Graph, Node, evaluate
from dovetail.ir.operators.arithmetic import Requantize, Rounding, ScaleShift
from dovetail.ir.operators.linear import Linear
from dovetail.ir.rewrite import simplify
from dovetail.ir.types import Array
from dovetail.legalize import adapt
from dovetail.quantize import quantize
from dovetail.read import load_model
from dovetail.targets import load_target
from test_end_to_end import network_file, references

INPUTS = 12
NETWORKS = ("ic_resnet8", "kws_dscnn", "vww_mobilenetv1")


@cache
def data(name: str) -> Array:
    """The reference inputs as floats, [inputs, *shape]."""
    graph, stored = load_model(network_file(name)), references(name)
    (reader,) = (node for node in graph.nodes if graph.inputs[0] in node.inputs)
    scale, zero = (float(graph.constants[value].reshape(-1)[0]) for value in reader.inputs[1:3])
    return np.stack([(stored[f"in_{number}"].astype(np.float32) - zero) * scale for number in range(INPUTS)])


@cache
def quantised(name: str) -> Graph:
    """The float network of MLPerf Tiny, quantised for `vta` on the reference inputs."""
    path = Path(str(network_file(name)).replace("_int8", "_f32"))
    graph = prepare(load_model(path), path.name)
    return quantise_network(graph, Samples({graph.inputs[0]: data(name)}, None), load_target("vta"), Settings()).graph


def adapted(graph: Graph) -> Graph:
    """The integer graph as the target takes it."""
    return adapt(graph, load_target("vta").policy(None))


def of_channels(graph: Graph, layer: Node) -> Array:
    """The weights of a layer, [channels, taps]."""
    weights = np.moveaxis(graph.constants[layer.inputs[1]], layer.operator.weight_axis or 0, 0)
    return weights.reshape(len(weights), -1)


@pytest.mark.parametrize("name", NETWORKS)
def test_nothing_is_lost(name: str) -> None:
    """The weights are the model's own, and every output is that of single rounding, bit by bit.

    A channel whose shift would be more than the field's 15 has smaller weights: it hardly moves the result.
    """
    graph = quantize(simplify(quantised(name)), Rounding.SINGLE)
    made = adapted(graph)
    layers, others = ([node for node in g.nodes if isinstance(node.operator, Linear)] for g in (graph, made))
    channels = small = 0
    scaled = {node.inputs[0]: node for node in made.nodes if isinstance(node.operator, ScaleShift)}
    for layer, other in zip(
        layers, [node for node in others if node.origin in {n.origin for n in layers}], strict=False
    ):
        mine, its = (of_channels(g, node) for g, node in ((graph, layer), (made, other)))
        if mine.shape != its.shape:
            continue  # a sum, as a convolution
        changed = (mine != its).any(axis=1)
        shift = np.broadcast_to(made.constants[scaled[other.output].inputs[3]], changed.shape)
        assert (shift[changed] == 15).all() and np.abs(its[changed]).max(initial=0) <= 64
        channels, small = channels + changed.size, small + int(changed.sum())
    print(f"{name}: {small} of {channels} channels have smaller weights")
    assert channels > 200 and small <= channels // 100
    for given in data(name)[:4]:
        wanted, got = (evaluate(each, {each.inputs[0]: given})[each.outputs[0]] for each in (graph, made))
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("name", NETWORKS)
def test_decisions_are_those_of_micro(name: str) -> None:
    """Of the int8 networks of MLPerf Tiny, by TensorFlow Lite Micro, on the same inputs; with double rounding, too."""
    made, stored = adapted(quantize(simplify(quantised(name)), Rounding.DOUBLE)), references(name)
    agreed = 0
    for number, given in enumerate(data(name)):
        answer = int(evaluate(made, {made.inputs[0]: given})[made.outputs[0]].reshape(-1).argmax())
        micro = stored[f"out_{number}__tflm"].reshape(-1)
        agreed += bool(micro[answer] == micro.max())
    print(f"{name}: decides as tflm for {agreed} of {INPUTS} inputs")
    assert agreed >= INPUTS - 1


def test_scales_are_powers_of_two() -> None:
    """Of every requantisation: its multiplier is a half, but for the share of a pool."""
    graph = quantize(simplify(quantised("kws_dscnn")), Rounding.SINGLE)
    multipliers = [
        graph.constants[node.inputs[1]]
        for node in graph.nodes
        if isinstance(node.operator, Requantize) and isinstance(graph.producers()[node.inputs[0]].operator, Linear)
    ]
    assert len(multipliers) >= 10 and all((array == 1 << 30).all() for array in multipliers)
