"""State of an importer of a Keras layer: the layer and its call, its weights, and the graph being built."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np

from dovetail.ir.graph import Graph, GraphBuilder, Node
from dovetail.ir.operators.base import Operator, SlidingWindow
from dovetail.ir.rewrite import drop_identity, merge_reshapes
from dovetail.ir.rules import Draft, run
from dovetail.ir.scaling import folding
from dovetail.ir.types import Array, DType, Shape
from dovetail.read.geometry import Pair, same_padding
from dovetail.read.keras.layer import ADVICE, KerasCall, KerasLayer, KerasWeights, leaves
from dovetail.read.values import AGAIN, MAX_ELEMENTS, Value, Values

MAX_CALLS = 10_000
"""Most calls of layers in a model, those of models called again counted each time."""


class KerasValues(Values):
    """The import in progress, as one call of a layer sees it. Values keep Keras's own axis order, mostly NHWC."""

    advice = ADVICE
    layer: KerasLayer
    """The layer being read."""
    call: KerasCall
    """Arguments of the call."""

    def __init__(self, name: str, weights: KerasWeights) -> None:
        self.builder = GraphBuilder(name)
        self.weights = weights
        self.calls = count(1)
        """Counts the calls of layers."""
        self._constants: dict[tuple[str, str, Shape, bytes], Value] = {}
        """Graph constants by layer, name, shape and content: a shared layer places its weights once."""
        self._names: Counter[str] = Counter()
        """How often each name of a node has been wanted."""

    @property
    def stem(self) -> str:
        return self.layer.name

    @property
    def origin(self) -> str:
        return self.layer.origin

    @property
    def where(self) -> str:
        return self.layer.where

    # The graph

    def add(self, operator: Operator, operands: Sequence[Value], suffix: str = "", name: str = "") -> Value:
        """Add a node; what its type rule rejects is the model's fault."""
        name = name or self.named(suffix)
        number = self._names[name]
        self._names[name] += 1
        with self.refusing():
            value = super().add(operator, operands, name=f"{name}_{number}" if number else name)
        kind = value.type
        odd = not 0 < kind.elements < MAX_ELEMENTS
        self.wrong_if(odd, f"computes {kind}; it must have 1 to {MAX_ELEMENTS} elements")
        return value

    def constant(self, array: Array, suffix: str) -> Value:
        """A constant of the layer, once for all its calls."""
        digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest()
        key = (self.layer.place, suffix, tuple(array.shape), digest)
        if key not in self._constants:
            self._constants[key] = super().constant(array, suffix)
        return self._constants[key]

    # What the layer is called with

    def real(self, value: Value) -> Value:
        """The value as float32: integers are taken as the numbers they are."""
        return value if value.dtype is DType.FLOAT32 else self.as_number(value, "real")

    def one(self, real: bool = True) -> Value:
        """The one value the layer is called with, float unless said otherwise."""
        values = self.call.all(Value)
        self.wrong_if(len(values) != 1, f"is called with {len(values)} values, expected 1")
        self.check_named()
        return self.real(values[0]) if real else values[0]

    def several(self, real: bool = True) -> list[Value]:
        """The values the layer is called with, one at least; float where of several types, or unless said otherwise."""
        values = self.call.all(Value)
        self.wrong_if(not values, "is called without values")
        return values if len({value.dtype for value in values}) == 1 and not real else [*map(self.real, values)]

    def check_named(self, *known: str) -> None:
        """Refuse arguments by name that mean something."""
        for key, value in self.call.named.items():
            is_set = any(isinstance(leaf, Value) or leaf not in (None, False) for leaf in leaves(value))
            if is_set and key not in ("training", "name", *known):
                raise self.refuse(f"is called with {key}, which is not supported")

    def numbers(self, value: object) -> Array:
        """A constant argument or setting as float32."""
        try:
            array = np.asarray(value, dtype=np.float32)
        except (TypeError, ValueError):
            raise self.refuse(f"the argument {value!s:.80} is no number", AGAIN) from None
        self.wrong_if(not np.isfinite(array).all(), "an argument is NaN or infinite")
        return array

    # What it has

    def weight(self, name: str, shape: Sequence[int | None] | None = None) -> Array:
        """A weight of the layer, checked to have `shape` (None for any, or for any size)."""
        array = self.weights.of(self.layer).get(name)
        if array is None:
            raise self.refuse(f"has no weight {name}", AGAIN)
        wanted = array.shape if shape is None else shape
        fits = all(n in (None, size) for size, n in zip(array.shape, wanted, strict=False))
        text = ", ".join("any" if size is None else str(size) for size in wanted)
        what = f"the {name} has the shape {list(array.shape)}, expected [{text}]"
        self.wrong_if(len(array.shape) != len(wanted) or not fits, what)
        return array

    def optional(self, name: str, shape: Sequence[int | None] | None = None) -> Array | None:
        """A weight the layer may do without."""
        return self.weight(name, shape) if name in self.weights.of(self.layer) else None

    def bias(self, channels: int) -> list[Value]:
        """The layer's bias, if it has one, as operands."""
        bias = self.optional("bias", [channels])
        return [] if bias is None else [self.constant(bias, "bias")]

    # Images

    @property
    def image_axes(self) -> int:
        """How many image axes the layer works on, as its name says."""
        return 1 if "1D" in self.layer.kind else 2

    def image(self) -> Value:
        """The value the layer is called with, ordered as data_format says, as NHWC; one axis is one row's columns."""
        x, rank = self.one(), self.image_axes
        self.refuse_if(x.rank != rank + 2, f"works on {rank + 2} axes, its operand is {x.type}")
        if self.layer.channels_first:
            x = self.channels_last(x)
        batch, *sizes, channels = x.shape
        return x if rank == 2 else self.shaped(x, (batch, 1, sizes[0], channels), "image")

    def restored(self, image: Value) -> Value:
        """The NHWC result of the layer in the order its data_format says."""
        batch, _, columns, channels = image.shape
        if self.image_axes == 1:
            image = self.shaped(image, (batch, columns, channels), "row")
        return self.channels_first(image) if self.layer.channels_first else image

    def pair(self, key: str, default: int = 1) -> Pair:
        """A setting of one positive number per image axis, as rows and columns."""
        found = self.layer.wholes(key, self.image_axes, default)
        return (1, found[0]) if len(found) == 1 else (found[0], found[1])

    def padded(self, window: SlidingWindow, image: Value, causal: bool = False) -> SlidingWindow:
        """The window with what the setting `padding` adds around an image."""
        mode = self.layer.choice("padding", "valid", "valid", "same", *(["causal"] if causal else []))
        if mode == "same":
            return replace(window, padding=same_padding(window, image.shape[1:3]))
        return replace(window, padding=((0, 0), (window.span[1] - 1, 0))) if mode == "causal" else window


Importer = Callable[[KerasValues], Any]
"""Adds a layer's nodes and gives its value, or a tuple of them; raises ModelError for what it cannot honour."""

_FOLDED = folding()


def _fold_normalisation(draft: Draft, node: Node) -> str | None:
    """Batch normalisation, which is a 1x1 depthwise layer; other factors stay as the model has them."""
    return _FOLDED(draft, node) if node.operator.is_channelwise else None


def fold_normalisations(graph: Graph) -> Graph:
    """Batch normalisation behind a convolution or dense layer as part of its weights: the same network with fewer
    layers; results differ by float rounding only."""
    return run(graph, (_fold_normalisation, merge_reshapes, drop_identity))
