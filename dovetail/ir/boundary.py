"""Scales and zero points of a network's inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dovetail.documented import document
from dovetail.ir.graph import Graph, Node
from dovetail.ir.types import Array, DType
from dovetail.records import Record


class Steps(Record):
    """Scale and zero point of integers: real = scale * (integer - zero_point), in float32."""

    scale: float
    """Scale, a float32 value."""
    zero_point: int
    """Integer that stands for 0.0."""

    def quantize(self, reals: Array, dtype: DType) -> Array:
        """The nearest integers of a type, ties to even; those beyond it are its ends, and what is no number its lowest.

        Args:
            reals: of any shape, taken as float32.
            dtype: an integer type of at most 16 bits.
        """
        low, high = np.float32(dtype.low - self.zero_point), np.float32(dtype.high - self.zero_point)
        with np.errstate(over="ignore", invalid="ignore"):
            steps = np.asarray(reals, np.float32) / np.float32(self.scale)
        inside = np.minimum(np.where(steps > low, steps, low), high)
        return np.asarray((np.rint(inside).astype(np.int32) + self.zero_point).astype(dtype.numpy))

    def dequantize(self, integers: Array) -> Array:
        """The real numbers for integers, float32 of the same shape."""
        return np.asarray((integers.astype(np.int32) - self.zero_point).astype(np.float32) * np.float32(self.scale))


def boundary(graph: Graph) -> Mapping[str, Steps]:
    """The steps of those inputs and outputs of a model that are integers of at most 16 bits with one scale.

    Args:
        graph: as read, with a Dequantize behind integer inputs and a Quantize before integer outputs; movement may
            stand between.
    """
    users, producers = graph.users(), graph.producers()
    found: dict[str, Steps] = {}
    for name in graph.inputs:
        steps = {steps_of(graph, node) for node in _readers(name, users)}
        _note(graph, name, steps, found)
    for name in graph.outputs:
        node = producers.get(name)
        while node is not None and len(kept := node.operator.chosen_from(node.inputs)) == 1:
            node = producers.get(kept[0])
        if node is not None:
            _note(graph, name, {steps_of(graph, node)}, found)
    return found


def _readers(name: str, users: Mapping[str, Sequence[Node]]) -> list[Node]:
    """The nodes that compute with a value, movement of it followed."""
    found: list[Node] = []
    for node in users[name]:
        found += _readers(node.output, users) if len(node.operator.chosen_from(node.inputs)) == 1 else [node]
    return found


def steps_of(graph: Graph, node: Node) -> Steps | None:
    """The parameters of a Quantize or Dequantize with one scale that is constant; None for anything else."""
    if not (node.operator.quantises or node.operator.dequantises) or any(
        x not in graph.constants for x in node.inputs[1:]
    ):
        return None
    scale, zero_point = (graph.constants[name] for name in node.inputs[1:])
    return Steps(float(scale.reshape(-1)[0]), int(zero_point.reshape(-1)[0])) if scale.size == 1 else None


def _note(graph: Graph, name: str, steps: set[Steps | None], found: dict[str, Steps]) -> None:
    """Takes note of the steps all have in common."""
    kind = graph.types[name].dtype
    if len(steps) == 1 and (one := steps.pop()) is not None and kind.is_integer and kind.bits <= 16:
        found[name] = one


document(__name__)
