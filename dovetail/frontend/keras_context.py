"""What every importer of a Keras layer works with: the graph being built, the weights, and the two image orders."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dovetail.errors import ModelError
from dovetail.frontend.keras_layer import AGAIN, SMALLER, Call, Layer, Tensor, leaves
from dovetail.frontend.keras_weights import Weights
from dovetail.frontend.onnx_file import MAX_ELEMENTS
from dovetail.graph.graph import GraphBuilder
from dovetail.graph.types import Array, DType, Shape, TensorType
from dovetail.operators.base import Operator
from dovetail.operators.movement import Reshape, Transpose
from dovetail.operators.quantization import Dequantize

MAX_CALLS = 10_000
"""Most calls of layers in a model, those of models called again counted each time."""


@dataclass
class KerasContext:
    """The import in progress. Values are kept in Keras's own axis order, mostly NHWC."""

    builder: GraphBuilder
    weights: Weights
    calls: int = 0
    """Calls imported so far."""
    constants: dict[tuple[str, str, Shape, bytes], str] = field(default_factory=dict)
    """Graph constants by layer, name, shape and content: a shared layer places its weights once."""
    names: Counter[str] = field(default_factory=Counter)
    """How often each name of a node has been wanted."""

    def count(self, layer: Layer) -> None:
        """Count a call; refuses models that grow without end."""
        self.calls += 1
        if self.calls > MAX_CALLS:
            raise layer.refuse(f"the model has more than {MAX_CALLS} calls of layers", SMALLER)

    def type_of(self, value: str) -> TensorType:
        """Type of a graph value."""
        return self.builder.type_of(value)

    def shape(self, value: str) -> Shape:
        """Shape of a graph value."""
        return self.builder.type_of(value).shape

    def add(self, layer: Layer, operator: Operator, operands: Sequence[str], stem: str = "") -> str:
        """Add a node named after the layer, and `stem`; what its type rule rejects is the model's fault."""
        name = f"{layer.name}_{stem}" if stem else layer.name
        count = self.names[name]
        self.names[name] += 1
        try:
            value = self.builder.add(operator, operands, f"{name}_{count}" if count else name, layer.origin)
        except ValueError as error:
            raise layer.refuse(str(error)) from error
        if not 0 < self.type_of(value).elements < MAX_ELEMENTS:
            raise layer.refuse(f"computes {self.type_of(value)}; it must have 1 to {MAX_ELEMENTS} elements", AGAIN)
        return value

    def check_shape(self, layer: Layer, shape: Shape) -> None:
        """Refuse a result of this shape before anything of its size is made."""
        elements = 1
        for size in shape:
            elements *= size
        if not 0 < elements < MAX_ELEMENTS:
            raise layer.refuse(f"the result {list(shape)} has no elements, or more than {MAX_ELEMENTS}", SMALLER)

    def constant(self, layer: Layer, stem: str, array: Array) -> str:
        """Place a constant of the layer in the graph, once for all its calls."""
        key = (layer.place, stem, tuple(array.shape), hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest())
        if key not in self.constants:
            self.constants[key] = self.builder.constant(f"{layer.name}_{stem}", array)
        return self.constants[key]

    def number(self, layer: Layer, value: float, stem: str = "constant") -> str:
        """A float constant of one element."""
        return self.constant(layer, stem, np.array(value, np.float32))

    def weight(self, layer: Layer, name: str, shape: Sequence[int | None]) -> Array:
        """A weight of the layer, checked to have `shape` (None for any size)."""
        array = self.weights.of(layer)[name]
        fits = len(array.shape) == len(shape) and all(
            wanted in (None, size) for size, wanted in zip(array.shape, shape, strict=True)
        )
        if not fits:
            text = ", ".join("any" if size is None else str(size) for size in shape)
            raise layer.refuse(f"the {name} has the shape {list(array.shape)}, expected [{text}]", AGAIN)
        return array

    def optional(self, layer: Layer, name: str, shape: Sequence[int | None]) -> Array | None:
        """A weight the layer may do without."""
        return self.weight(layer, name, shape) if name in self.weights.of(layer) else None

    def real(self, layer: Layer, value: str) -> str:
        """The value as float32: integers are taken as the numbers they are."""
        kind = self.type_of(value).dtype
        if kind is DType.FLOAT32:
            return value
        unit = self.constant(layer, "unit", np.ones(1, np.float32))
        zero = self.constant(layer, "zero", np.zeros(1, np.int32))
        return self.add(layer, Dequantize(-1), [value, unit, zero], "real")

    def one(self, layer: Layer, call: Call, real: bool = True) -> str:
        """The one value a layer is called with, float unless said otherwise."""
        values = call.tensors()
        if len(values) != 1:
            raise layer.refuse(f"is called with {len(values)} values, expected 1", AGAIN)
        self.check_named(layer, call)
        return self.real(layer, values[0]) if real else values[0]

    def check_named(self, layer: Layer, call: Call, known: Sequence[str] = ()) -> None:
        """Refuse arguments by name that mean something."""
        for key, value in call.named.items():
            ignored = key in ("training", "name", *known)
            set_ = any(isinstance(leaf, Tensor) or leaf not in (None, False) for leaf in leaves(value))
            if set_ and not ignored:
                raise layer.refuse(f"is called with {key}, which is not supported")

    def reshaped(self, layer: Layer, value: str, shape: Shape, stem: str = "") -> str:
        """The value under another shape; itself where it has that shape."""
        return value if self.shape(value) == shape else self.add(layer, Reshape(shape), [value], stem)

    def transposed(self, layer: Layer, value: str, order: Sequence[int], stem: str = "") -> str:
        """The value with its axes in another order; itself where they are in it."""
        order = tuple(order)
        return value if order == tuple(range(len(order))) else self.add(layer, Transpose(order), [value], stem)


Importer = Callable[[KerasContext, Layer, Call], Any]
"""Adds a layer's nodes and gives the name of its value, or a tuple of them; raises ModelError for what it cannot
honour."""


def images(ctx: KerasContext, layer: Layer, x: str, rank: int) -> str:
    """A value of `rank` image axes as NHWC; one axis becomes columns, in images one row high.

    Args:
        ctx: the import.
        layer: the layer; its data_format says the order.
        x: float value.
        rank: 1 or 2.
    """
    shape = ctx.shape(x)
    if len(shape) != rank + 2:
        raise layer.refuse(f"works on {rank + 2} axes, its operand is {ctx.type_of(x)}")
    if layer.first_channels():
        x = ctx.transposed(layer, x, (0, *range(2, rank + 2), 1), "last")
    batch, *sizes, channels = ctx.shape(x)
    return x if rank == 2 else ctx.reshaped(layer, x, (batch, 1, sizes[0], channels), "image")


def restored(ctx: KerasContext, layer: Layer, image: str, rank: int) -> str:
    """The NHWC result of a layer in the order its data_format says, with `rank` image axes."""
    batch, _, columns, channels = ctx.shape(image)
    if rank == 1:
        image = ctx.reshaped(layer, image, (batch, columns, channels), "row")
    if layer.first_channels():
        return ctx.transposed(layer, image, (0, rank + 1, *range(1, rank + 1)), "first")
    return image


def plain_inputs(layer: Layer, dtype: Any, shape: Any) -> TensorType:
    """The type of a network's input, its batch of any size as 1.

    Raises:
        ModelError: a size is not given, or the type is none an activation may have.
    """
    if isinstance(dtype, dict):
        dtype = dtype.get("config", {}).get("name") if isinstance(dtype.get("config"), dict) else None
    known = {"uint8": DType.UINT8, "int8": DType.INT8, "int16": DType.INT16, "int32": DType.INT32, "int64": DType.INT64}
    floats = ("float32", "float16", "bfloat16", "float64", "mixed_float16", "mixed_bfloat16", None)
    found = DType.FLOAT32 if dtype in floats else known.get(str(dtype))
    if found is None:
        raise layer.refuse(f"an input of the type {str(dtype)[:80]} is not supported")
    if not isinstance(shape, list) or not shape:
        raise ModelError(
            "the model does not say the shape of its input",
            where=f"{layer.file}, {layer.kind} '{layer.name}' ({layer.place})",
            hint="give the first layer a keras.Input of the shape it is to be used with, and save again",
        )
    sizes = [1 if size is None and axis == 0 else size for axis, size in enumerate(shape)]
    for axis, size in enumerate(sizes):
        if size is None:
            raise layer.refuse(
                f"the size of axis {axis} of the input {shape} is left open; only the first may be",
                "make the model with a keras.Input of fixed sizes, load the weights into it and save it",
            )
        if not isinstance(size, int) or isinstance(size, bool) or not 0 < size < MAX_ELEMENTS:
            raise layer.refuse(f"the input's shape {str(shape)[:80]} is no shape", AGAIN)
    kind = TensorType(tuple(sizes), found)
    if kind.elements >= MAX_ELEMENTS:
        raise layer.refuse(f"the input is {kind}; the limit is {MAX_ELEMENTS} elements", SMALLER)
    return kind
