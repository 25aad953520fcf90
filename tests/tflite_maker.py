"""Puts a random TFLite network together, tensor by tensor: what the operators of `random_tflite` draw with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dovetail.ir.types import Array
from oracles import OperatorCall, OperatorNetwork, TensorEntry
from property_batches import Choose, Draw

LOW = {"int8": -128, "uint8": 0, "int16": -32768}
"""Smallest element of each type of activations."""

HIGH = {"int8": 127, "uint8": 255, "int16": 32767}
"""Largest one."""


class Maker(Draw):
    """Draws a network; tensors are named by their places."""

    def __init__(
        self, name: str, dtype: str = "int8", always_bias: bool = False, integers: Choose | None = None
    ) -> None:
        super().__init__(name, integers)
        self.dtype = dtype
        self.ties = self.often(0.3)
        self.always_bias = always_bias
        self.tensors: list[TensorEntry] = []
        self.calls: list[OperatorCall] = []

    def add(self, entry: TensorEntry) -> int:
        """A tensor of the network."""
        self.tensors.append(entry)
        return len(self.tensors) - 1

    def entry(self, shape: Sequence[int], scale: float = 0.0, zero_point: int | None = None) -> TensorEntry:
        """An activation with this scale and zero point, else with random ones, the extremes among them."""
        scale = scale or self.near(0.05, 1.5, 1.5) / (256 if self.dtype == "int16" else 1)
        low, high = LOW[self.dtype], HIGH[self.dtype]
        drawn = self.one_of(low, high, 0 if low < 0 else 128, *(self.number(low, high) for _ in range(4)))
        if zero_point is None:
            zero_point = 0 if self.dtype == "int16" else drawn
        return TensorEntry(f"t{len(self.tensors)}", tuple(shape), self.dtype, (float(np.float32(scale)),), zero_point)

    def near(self, scale: float, below: float = 1.0, above: float = 1.0) -> float:
        """A scale about as large: within factors of exp(below) and exp(above), now and then far beyond."""
        wide = self.one_of(1, 1, 1, 1, 1, 3)
        return self.even(scale * float(np.exp(self.rng.uniform(-below * wide, above * wide))))

    def even(self, scale: float) -> float:
        """The scale, or the nearest power of two in a network with ties: sums that lie on a half are common there."""
        return float(2.0 ** np.rint(np.log2(scale))) if self.ties else scale

    def input(self, shape: Sequence[int]) -> int:
        """An input of the network."""
        return self.add(self.entry(shape))

    def alike(self, source: int, shape: Sequence[int]) -> int:
        """A tensor quantised as another."""
        of = self.tensors[source]
        return self.add(TensorEntry(f"t{len(self.tensors)}", tuple(shape), of.dtype, of.scale, of.zero_point))

    def integers(self, values: Any) -> int:
        """A constant of int32: axes, sizes and the like."""
        array = np.array(values, np.int32)
        return self.add(TensorEntry(f"t{len(self.tensors)}", array.shape, "int32", data=array))

    def call(
        self, opcode: str, inputs: Sequence[int], output: int, kind: str = "", version: int = 2, **options: Any
    ) -> int:
        """An operator; returns its result."""
        self.calls.append(OperatorCall(opcode, tuple(inputs), (output,), options, kind, version))
        return output

    def activation(self) -> int:
        """A fused activation function: none, ReLU, ReLU-1-to-1, ReLU6."""
        return int(self.one_of(0, 0, 1, 2, 3))

    def shape(self, tensor: int) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self.tensors[tensor].shape)

    def scale(self, tensor: int) -> float:
        """The scale of an activation."""
        return self.tensors[tensor].scale[0]

    def network(self, *outputs: int) -> OperatorNetwork:
        """What was made."""
        return OperatorNetwork(self.tensors, self.calls, outputs)

    def feeds(self, network: OperatorNetwork) -> list[list[Array]]:
        """Two sets of inputs: all integers, the extremes often; and nothing but extremes."""
        sets: list[list[Array]] = [[], []]
        for place in network.inputs:
            entry = self.tensors[place]
            limits = np.iinfo(entry.dtype)
            values = self.rng.integers(limits.min, limits.max + 1, entry.shape)
            chosen = self.rng.random(entry.shape)
            values = np.where(chosen < 0.05, limits.min, np.where(chosen > 0.95, limits.max, values))
            sets[0].append(values.astype(entry.dtype))
            sets[1].append(np.where(self.rng.random(entry.shape) < 0.5, limits.min, limits.max).astype(entry.dtype))
        return sets


def words(network: OperatorNetwork) -> str:
    """The network in words."""

    def tensor(place: int) -> str:
        if place < 0:
            return "-"
        entry = network.tensors[place]
        scales = f" x{len(entry.scale)}" if len(entry.scale) > 1 else ""
        steps = f" {entry.scale[0]!r}{scales} zero {entry.zero_point}" if entry.scale else ""
        values = f" {entry.data.tolist()}" if entry.data is not None and entry.data.size <= 8 else ""
        return f"{entry.dtype}{list(entry.shape)}{steps}{values}"

    return "; ".join(
        f"{call.opcode}({', '.join(map(tensor, call.inputs))}) -> {', '.join(map(tensor, call.outputs))} "
        f"{dict(call.options)}"
        for call in network.operators
    )
