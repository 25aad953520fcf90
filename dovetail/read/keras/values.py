"""State of an importer of a Keras layer: the layer and its call, its weights, and the graph being built."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from math import prod
from typing import Any

import numpy as np

from dovetail.errors import ModelError
from dovetail.ir.graph import Graph, GraphBuilder, Node
from dovetail.ir.operators.arithmetic import Dequantize
from dovetail.ir.operators.base import Operator, Padding2d
from dovetail.ir.rewrite import drop_identity, merge_reshapes
from dovetail.ir.rules import Draft, run
from dovetail.ir.scaling import folding
from dovetail.ir.types import Array, DType, Shape
from dovetail.read.keras.layer import (
    AGAIN,
    OTHERWISE,
    SMALLER,
    KerasCall,
    KerasLayer,
    KerasTensor,
    KerasWeights,
    leaves,
)
from dovetail.read.values import MAX_ELEMENTS, MAX_PLACES, Values

MAX_CALLS = 10_000
"""Most calls of layers in a model, those of models called again counted each time."""


class KerasValues(Values):
    """The import in progress, as one call of a layer sees it. Values keep Keras's own axis order, mostly NHWC."""

    layer: KerasLayer
    """The layer being read."""
    call: KerasCall
    """Arguments of the call."""

    def __init__(self, name: str, weights: KerasWeights) -> None:
        self.builder = GraphBuilder(name)
        self.weights = weights
        self._calls = count(1)
        self._constants: dict[tuple[str, str, Shape, bytes], str] = {}
        """Graph constants by layer, name, shape and content: a shared layer places its weights once."""
        self._names: Counter[str] = Counter()
        """How often each name of a node has been wanted."""

    @property
    def stem(self) -> str:
        return self.layer.name

    @property
    def origin(self) -> str:
        return self.layer.origin

    def refuse(self, what: str, hint: str = OTHERWISE) -> ModelError:
        return self.layer.refuse(what, hint)

    def count_call(self) -> None:
        """Count a call; refuses models that grow without end."""
        if next(self._calls) > MAX_CALLS:
            raise self.refuse(f"the model has more than {MAX_CALLS} calls of layers", SMALLER)

    # The graph

    def add(self, operator: Operator, operands: Sequence[str], suffix: str = "", name: str = "") -> str:
        """Add a node; what its type rule rejects is the model's fault."""
        name = name or self.named(suffix)
        number = self._names[name]
        self._names[name] += 1
        try:
            value = super().add(operator, operands, name=f"{name}_{number}" if number else name)
        except ValueError as error:
            raise self.refuse(str(error)) from error
        if not 0 < self.type_of(value).elements < MAX_ELEMENTS:
            raise self.refuse(f"computes {self.type_of(value)}; it must have 1 to {MAX_ELEMENTS} elements", AGAIN)
        return value

    def constant(self, array: Array, suffix: str) -> str:
        """A constant of the layer, once for all its calls."""
        digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest()
        key = (self.layer.place, suffix, tuple(array.shape), digest)
        if key not in self._constants:
            self._constants[key] = super().constant(array, suffix)
        return self._constants[key]

    def check_shape(self, shape: Sequence[int]) -> None:
        """Refuse a result of this shape before anything of its size is made."""
        if not 0 < prod(shape) < MAX_ELEMENTS:
            raise self.refuse(f"the result {list(shape)} has no elements, or more than {MAX_ELEMENTS}", SMALLER)

    def pick(self, x: str, places: Sequence[Sequence[int]], suffix: str = "picked") -> str:
        longest = max((len(chosen) for chosen in places), default=0)
        if longest > MAX_PLACES:
            raise self.refuse(f"gives {longest} elements along one axis; the limit is {MAX_PLACES}", SMALLER)
        self.check_shape([len(chosen) for chosen in places])
        return super().pick(x, places, suffix)

    def bordered(self, image: str, border: Padding2d, filler: float = 0.0, suffix: str = "padded") -> str:
        if any(size > 0 for sides in border for size in sides):
            batch, *sizes, channels = self.shape(image)
            rows, columns = (size + sum(sides) for size, sides in zip(sizes, border, strict=True))
            self.check_shape((batch, rows, columns, channels))
        return super().bordered(image, border, filler, suffix)

    def joined(self, values: Sequence[str], axis: int) -> str:
        """Values one behind the other along an axis counted from the front."""
        if len({len(self.shape(value)) for value in values}) != 1:
            listed = ", ".join(str(self.type_of(value)) for value in values)
            raise self.refuse(f"joins values of different ranks: {listed}", AGAIN)
        return self.concat(values, axis, "joined")

    # What the layer is called with

    def real(self, value: str) -> str:
        """The value as float32: integers are taken as the numbers they are."""
        if self.type_of(value).dtype is DType.FLOAT32:
            return value
        unit, zero = self.constant(np.ones(1, np.float32), "unit"), self.constant(np.zeros(1, np.int32), "zero")
        return self.add(Dequantize(-1), [value, unit, zero], "real")

    def one(self, real: bool = True) -> str:
        """The one value the layer is called with, float unless said otherwise."""
        values = self.call.tensors()
        if len(values) != 1:
            raise self.refuse(f"is called with {len(values)} values, expected 1", AGAIN)
        self.check_named()
        return self.real(values[0]) if real else values[0]

    def check_named(self, known: Sequence[str] = ()) -> None:
        """Refuse arguments by name that mean something."""
        for key, value in self.call.named.items():
            ignored = key in ("training", "name", *known)
            set_ = any(isinstance(leaf, KerasTensor) or leaf not in (None, False) for leaf in leaves(value))
            if set_ and not ignored:
                raise self.refuse(f"is called with {key}, which is not supported")

    def numbers(self, value: object) -> Array:
        """A constant argument or setting as float32."""
        try:
            array = np.asarray(value, dtype=np.float32)
        except (TypeError, ValueError):
            raise self.refuse(f"the argument {str(value)[:80]} is no number", AGAIN) from None
        if not np.isfinite(array).all():
            raise self.refuse("an argument is NaN or infinite", AGAIN)
        return array

    # What it has

    def weight(self, name: str, shape: Sequence[int | None]) -> Array:
        """A weight of the layer, checked to have `shape` (None for any size)."""
        array = self.weights.of(self.layer)[name]
        if len(array.shape) != len(shape) or any(
            n not in (None, size) for size, n in zip(array.shape, shape, strict=False)
        ):
            text = ", ".join("any" if size is None else str(size) for size in shape)
            raise self.refuse(f"the {name} has the shape {list(array.shape)}, expected [{text}]", AGAIN)
        return array

    def optional(self, name: str, shape: Sequence[int | None]) -> Array | None:
        """A weight the layer may do without."""
        return self.weight(name, shape) if name in self.weights.of(self.layer) else None

    # Images

    def image(self, rank: int) -> str:
        """The value the layer is called with, of `rank` image axes (1 or 2), as NHWC.

        The layer's data_format says the order; one axis becomes columns, in images one row high.
        """
        x = self.one()
        if len(self.shape(x)) != rank + 2:
            raise self.refuse(f"works on {rank + 2} axes, its operand is {self.type_of(x)}")
        if self.layer.first_channels():
            x = self.channels_last(x)
        batch, *sizes, channels = self.shape(x)
        return x if rank == 2 else self.reshape(x, (batch, 1, sizes[0], channels), "image")

    def restored(self, image: str, rank: int) -> str:
        """The NHWC result of the layer in the order its data_format says, with `rank` image axes."""
        batch, _, columns, channels = self.shape(image)
        if rank == 1:
            image = self.reshape(image, (batch, columns, channels), "row")
        return self.channels_first(image) if self.layer.first_channels() else image


Importer = Callable[[KerasValues], Any]
"""Adds a layer's nodes and gives the name of its value, or a tuple of them; raises ModelError for what it cannot
honour."""


_FOLDED = folding()


def _fold_normalisation(draft: Draft, node: Node) -> str | None:
    """Batch normalisation, which is a 1x1 depthwise layer; other factors stay as the model has them."""
    return _FOLDED(draft, node) if node.operator.is_channelwise else None


def fold_normalisations(graph: Graph) -> Graph:
    """Batch normalisation behind a convolution or dense layer as part of its weights: the same network with fewer
    layers; results differ by float rounding only."""
    return run(graph, (_fold_normalisation, merge_reshapes, drop_identity))
