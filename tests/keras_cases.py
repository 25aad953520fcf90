"""Keras layers with settings to be compared with Keras itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ["KERAS_BACKEND"] = "numpy"  # before Keras is imported: inference without a compiler
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # its numpy backend takes convolutions from jax
pytest.importorskip("jax", reason="Keras's numpy backend needs jax")
keras: Any = pytest.importorskip("keras", reason="Keras is what the layers are compared with")
L: Any = keras.layers

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A layer, or a few, and the shapes of what it is called with (without the batch)."""

    name: str
    build: Callable[..., Any]
    """Called with one symbolic tensor for each shape."""
    shapes: tuple[Shape, ...]
    highest: int | None = None
    """Inputs are integers below this."""


def case(name: str, layer: Any, *shapes: Shape, highest: int | None = None) -> Case:
    """A case of a layer called with one value, or with a list of several."""
    build = layer if len(shapes) == 1 else lambda *values: layer(list(values))
    return Case(name, build, shapes, highest)


IMAGE, ROW, ODD = (9, 8, 6), (11, 6), (7, 10, 3)

CONVOLUTIONS = [
    case("dense", L.Dense(5, activation="relu"), (7,)),
    case("dense 3-D without bias", L.Dense(5, use_bias=False), (4, 7)),
    case("conv2d same stride", L.Conv2D(5, 3, 2, "same", activation="relu6"), ODD),
    case("conv2d valid", L.Conv2D(4, (2, 3), (1, 2)), IMAGE),
    case("conv2d dilated", L.Conv2D(4, 3, padding="same", dilation_rate=(2, 1), use_bias=False), IMAGE),
    case("conv2d groups", L.Conv2D(9, 3, groups=3), IMAGE),
    case("conv2d groups are channels", L.Conv2D(12, 3, groups=6, padding="same"), IMAGE),
    case("conv2d stride above kernel", L.Conv2D(3, 1, 3, "same"), IMAGE),
    case("conv1d same", L.Conv1D(4, 4, 2, "same"), ROW),
    case("conv1d causal dilated", L.Conv1D(4, 3, padding="causal", dilation_rate=2, activation="tanh"), ROW),
    case("conv1d groups", L.Conv1D(4, 3, groups=2), ROW),
    case("depthwise2d", L.DepthwiseConv2D(3, 2, "same", depth_multiplier=2), ODD),
    case("depthwise2d dilated", L.DepthwiseConv2D((3, 2), dilation_rate=2), IMAGE),
    case("depthwise1d", L.DepthwiseConv1D(3, 2, "same", depth_multiplier=2, activation="relu"), ROW),
    case("separable2d", L.SeparableConv2D(5, 3, 2, "same", depth_multiplier=2), ODD),
    case("separable1d", L.SeparableConv1D(5, 3, padding="valid", use_bias=False), ROW),
    case("conv2d transpose valid", L.Conv2DTranspose(4, 3, 2), ODD),
    case("conv2d transpose same", L.Conv2DTranspose(4, 3, 2, "same"), ODD),
    case("conv2d transpose even kernel", L.Conv2DTranspose(4, (4, 2), (2, 3), "same"), ODD),
    case("conv2d transpose stride above kernel", L.Conv2DTranspose(2, 2, 3, "valid"), ODD),
    case("conv2d transpose output padding", L.Conv2DTranspose(2, 3, 2, "same", output_padding=1), ODD),
    case("conv2d transpose dilated", L.Conv2DTranspose(2, 3, 1, "same", dilation_rate=2), ODD),
    case("conv1d transpose", L.Conv1DTranspose(4, 3, 2, "same", activation="relu"), ROW),
]

POOLS = [
    case("max pool", L.MaxPooling2D(), IMAGE),
    case("max pool same", L.MaxPooling2D(3, 2, "same"), IMAGE),
    case("average pool same", L.AveragePooling2D((3, 2), 2, "same"), IMAGE),
    case("average pool", L.AveragePooling2D(2, (1, 2)), IMAGE),
    case("max pool 1-D", L.MaxPooling1D(3, 2, "same"), ROW),
    case("average pool 1-D", L.AveragePooling1D(2), ROW),
    case("global average", L.GlobalAveragePooling2D(), IMAGE),
    case("global average kept", L.GlobalAveragePooling2D(keepdims=True), IMAGE),
    case("global maximum", L.GlobalMaxPooling2D(), IMAGE),
    case("global average 1-D", L.GlobalAveragePooling1D(), ROW),
    case("global maximum 1-D kept", L.GlobalMaxPooling1D(keepdims=True), ROW),
]

FIRST = [
    case("first max pool", L.MaxPooling2D(2, data_format="channels_first"), (3, 8, 6)),
    case("first average 1-D", L.AveragePooling1D(2, data_format="channels_first"), (3, 8)),
    case("first global average", L.GlobalAveragePooling2D(data_format="channels_first"), (3, 8, 6)),
    case("first conv", L.Conv2D(4, 3, 2, "same", data_format="channels_first"), (3, 8, 7)),
    case("first conv1d", L.Conv1D(4, 3, data_format="channels_first"), (3, 8)),
    case("first depthwise", L.DepthwiseConv2D(3, data_format="channels_first"), (3, 8, 7)),
    case("first transpose", L.Conv2DTranspose(2, 3, 2, data_format="channels_first"), (3, 5, 4)),
    case("first flatten", L.Flatten(data_format="channels_first"), (3, 4, 5)),
    case("first padding", L.ZeroPadding2D(((1, 2), (0, 3)), data_format="channels_first"), (3, 4, 5)),
    case("first cropping", L.Cropping2D(1, data_format="channels_first"), (3, 4, 5)),
    case("first up-sampling", L.UpSampling2D(2, data_format="channels_first"), (3, 4, 5)),
    case("first batch normalization", L.BatchNormalization(axis=1), (3, 4, 5)),
]

NAMED = (
    "relu",
    "relu6",
    "leaky_relu",
    "elu",
    "selu",
    "gelu",
    "silu",
    "swish",
    "hard_sigmoid",
    "hard_swish",
    "hard_silu",
    "sigmoid",
    "tanh",
    "softmax",
    "softplus",
    "softsign",
    "exponential",
    "linear",
    "mish",
    "log_softmax",
    "celu",
    "hard_tanh",
    "log_sigmoid",
    "tanh_shrink",
    "hard_shrink",
)

ACTIVATIONS = [
    *(case(f"activation {name}", L.Activation(name), (3, 9)) for name in NAMED),
    case("relu limited", L.ReLU(max_value=1.5), (9,)),
    case("relu sloped and limited", L.ReLU(max_value=1.5, negative_slope=0.1), (9,)),
    case("relu threshold", L.ReLU(threshold=0.5), (9,)),
    case("relu threshold limited", L.ReLU(max_value=2.0, threshold=0.5), (9,)),
    case("leaky relu", L.LeakyReLU(0.15), (9,)),
    case("prelu", L.PReLU(), (4, 5)),
    case("prelu shared", L.PReLU(shared_axes=[1, 2]), (4, 5, 3)),
    case("elu", L.ELU(0.7), (9,)),
    case("softmax", L.Softmax(), (4, 5)),
    case("softmax axis", L.Softmax(axis=1), (4, 5)),
    case("softmax axes", L.Softmax(axis=(1, 2)), (4, 5, 3)),
    case("dense with a layer as activation", L.Dense(4, activation=L.LeakyReLU(0.25)), (5,)),
]

NORMALISATIONS = [
    case("batch normalization 2-D", L.BatchNormalization(), (7,)),
    case("batch normalization 3-D", L.BatchNormalization(scale=False, epsilon=0.01), (4, 7)),
    case("batch normalization 4-D", L.BatchNormalization(center=False), IMAGE),
    case("batch normalization middle axis", L.BatchNormalization(axis=2), IMAGE),
    case("conv and batch normalization", lambda x: L.BatchNormalization()(L.Conv2D(4, 3)(x)), IMAGE),
    case("conv1d and batch normalization", lambda x: L.BatchNormalization()(L.Conv1D(4, 3)(x)), ROW),
    case("dense and batch normalization", lambda x: L.BatchNormalization()(L.Dense(4, use_bias=False)(x)), (5,)),
    case("depthwise and batch normalization", lambda x: L.BatchNormalization()(L.DepthwiseConv2D(3)(x)), IMAGE),
    case("layer normalization", L.LayerNormalization(), (4, 7)),
    case("layer normalization axes", L.LayerNormalization(axis=[1, 2], scale=False), (4, 7, 3)),
    case("layer normalization axis 1", L.LayerNormalization(axis=1, center=False), (4, 7)),
    case("group normalization", L.GroupNormalization(2), IMAGE),
    case("group normalization each", L.GroupNormalization(-1, center=False), IMAGE),
    case("group normalization axis", L.GroupNormalization(3, axis=1), (6, 5, 4)),
    case("rms normalization", L.RMSNormalization(), (4, 7)),
    case("unit normalization", L.UnitNormalization(), (4, 7)),
    case("unit normalization axes", L.UnitNormalization(axis=[1, 2]), (4, 7)),
    case("normalization learnt", L.Normalization(), (7,)),
    case("normalization given", L.Normalization(mean=0.5, variance=2.0), (4, 3)),
    case("normalization given per channel", L.Normalization(mean=[0.5, 1, 2], variance=[2.0, 1, 3]), (4, 3)),
    case("rescaling", L.Rescaling(1 / 127.5, offset=-1), (4, 3)),
]

MERGING = [
    case("add", L.Add(), (4, 3), (4, 3), (4, 3)),
    case("add broadcast", L.Add(), (4, 3), (1, 3)),
    case("add of ranks", L.Add(), (4, 3), (3,)),
    case("subtract", L.Subtract(), (4, 3), (4, 3)),
    case("multiply", L.Multiply(), (4, 5, 3), (1, 1, 3)),
    case("average", L.Average(), (4, 3), (4, 3), (4, 3)),
    case("maximum", L.Maximum(), (4, 3), (4, 3)),
    case("minimum", L.Minimum(), (4, 3), (4, 3)),
    case("concatenate", L.Concatenate(), (4, 3), (4, 2)),
    case("concatenate axis", L.Concatenate(axis=1), (4, 3), (2, 3)),
    case("dot of vectors", L.Dot(axes=1), (5,), (5,)),
    case("dot normalised", L.Dot(axes=-1, normalize=True), (5,), (5,)),
    case("dot of matrices", L.Dot(axes=(2, 1)), (4, 5), (5, 3)),
    case("dot of matrix and vector", L.Dot(axes=(2, 1)), (4, 5), (5,)),
]

MOVEMENT = [
    case("padding 1-D", L.ZeroPadding1D((1, 3)), ROW),
    case("padding 2-D", L.ZeroPadding2D((2, 1)), IMAGE),
    case("padding 2-D sides", L.ZeroPadding2D(((0, 1), (2, 3))), IMAGE),
    case("cropping 1-D", L.Cropping1D((1, 3)), ROW),
    case("cropping 2-D", L.Cropping2D(((1, 0), (2, 3))), IMAGE),
    case("up-sampling 1-D", L.UpSampling1D(3), ROW),
    case("up-sampling nearest", L.UpSampling2D((2, 3)), IMAGE),
    case("up-sampling bilinear", L.UpSampling2D((2, 3), interpolation="bilinear"), IMAGE),
    case("resizing nearest", L.Resizing(5, 12, "nearest"), IMAGE),
    case("resizing bilinear", L.Resizing(13, 4), IMAGE),
    case("center crop", L.CenterCrop(5, 3), IMAGE),
    case(
        "augmentation",
        lambda x: L.RandomZoom(0.2)(L.RandomTranslation(0.1, 0.1)(L.RandomRotation(0.2)(L.RandomFlip()(x)))),
        (8, 8, 3),
    ),
    case("random contrast", L.RandomContrast(0.2), (8, 8, 3)),
    case("reshape", L.Reshape((-1, 4)), (6, 8)),
    case("permute", L.Permute((2, 3, 1)), IMAGE),
    case("flatten", L.Flatten(), IMAGE),
    case("repeat vector", L.RepeatVector(3), (5,)),
    case("embedding", L.Embedding(9, 4), (6,), highest=9),
    case("dropout", lambda x: L.Dense(3)(L.Dropout(0.5)(x)), (5,)),
    case("spatial dropout", lambda x: L.Conv2D(3, 1)(L.SpatialDropout2D(0.5)(x)), IMAGE),
    case("spatial dropout 1-D", lambda x: L.Conv1D(3, 1)(L.SpatialDropout1D(0.5)(x)), ROW),
    case("noise", lambda x: L.GaussianNoise(0.5)(L.GaussianDropout(0.2)(L.AlphaDropout(0.1)(x))), (5,)),
    case("regularisation", lambda x: L.Identity()(L.ActivityRegularization(0.5)(x)), (5,)),
    case("over time dense", L.TimeDistributed(L.Dense(3, activation="relu")), (4, 5)),
    case("over time conv", L.TimeDistributed(L.Conv2D(3, 3)), (2, 6, 5, 2)),
    case("over time normalization", L.TimeDistributed(L.BatchNormalization()), (3, 5)),
]

PRODUCTS = [
    case("einsum dense", L.EinsumDense("abc,cd->abd", output_shape=(None, 4), bias_axes="d"), (3, 5)),
    case("einsum dense heads", L.EinsumDense("abc,cde->abde", (None, 2, 3), bias_axes="de", activation="relu"), (3, 5)),
    case("einsum dense two axes", L.EinsumDense("abc,bcd->ad", 4, bias_axes="d"), (3, 5)),
    case("einsum dense ellipsis", L.EinsumDense("...x,xy->...y", output_shape=4), (3, 5)),
    case("einsum dense order", L.EinsumDense("abc,bd->adc", (4, 5), bias_axes="d"), (3, 5)),
    Case("self-attention", lambda x: L.MultiHeadAttention(2, 3)(x, x), ((4, 6),)),
    Case("cross-attention", lambda x, y: L.MultiHeadAttention(2, 3, 4, output_shape=5)(x, y), ((4, 6), (5, 7))),
    Case("attention of three", lambda q, v, k: L.MultiHeadAttention(1, 3)(q, v, key=k), ((4, 6), (5, 7), (5, 8))),
    Case("causal attention", lambda x: L.MultiHeadAttention(2, 3)(x, x, use_causal_mask=True), ((4, 6),)),
    Case("attention without bias", lambda x: L.MultiHeadAttention(2, 3, use_bias=False)(x, x), ((4, 6),)),
    Case("attention layer", lambda q, v: L.Attention()([q, v]), ((4, 6), (5, 6))),
    Case("attention layer scaled", lambda q, v, k: L.Attention(use_scale=True)([q, v, k]), ((4, 6), (5, 7), (5, 6))),
]

SEQUENCE = (5, 4)

RECURRENT = [
    case("lstm", L.LSTM(3), SEQUENCE),
    case("lstm sequences", L.LSTM(3, return_sequences=True), SEQUENCE),
    case("lstm backward", L.LSTM(3, return_sequences=True, go_backwards=True, use_bias=False), SEQUENCE),
    case("lstm activations", L.LSTM(3, activation="relu", recurrent_activation="sigmoid"), SEQUENCE),
    Case("lstm states", lambda x: L.Concatenate()(L.LSTM(3, return_state=True)(x)), (SEQUENCE,)),
    Case("lstm given states", lambda x, h, c: L.LSTM(3)(x, initial_state=[h, c]), (SEQUENCE, (3,), (3,))),
    case("gru", L.GRU(3, return_sequences=True), SEQUENCE),
    case("gru reset before", L.GRU(3, reset_after=False, dropout=0.2), SEQUENCE),
    case("gru without bias", L.GRU(3, use_bias=False, go_backwards=True), SEQUENCE),
    case("simple rnn", L.SimpleRNN(3), SEQUENCE),
    case("simple rnn relu", L.SimpleRNN(3, activation="relu", return_sequences=True), SEQUENCE),
    case("rnn of a cell", L.RNN(L.LSTMCell(3), return_sequences=True), SEQUENCE),
    case("bidirectional", L.Bidirectional(L.LSTM(3)), SEQUENCE),
    case("bidirectional sequences", L.Bidirectional(L.GRU(3, return_sequences=True), merge_mode="sum"), SEQUENCE),
    case(
        "bidirectional of two",
        L.Bidirectional(L.LSTM(3), "ave", backward_layer=L.LSTM(3, activation="relu", go_backwards=True)),
        SEQUENCE,
    ),
    case("bidirectional product", L.Bidirectional(L.SimpleRNN(3), merge_mode="mul"), SEQUENCE),
    case("over time recurrent", L.TimeDistributed(L.GRU(3)), (2, 5, 4)),
]

OPERATIONS = [
    Case("arithmetic", lambda x, y: (x * 2.0 + y - 1.0) / (y * y + 1.5), ((4, 3), (4, 3))),
    Case("constant first", lambda x: 1.0 - 3.0 / (keras.ops.abs(x) + 2.0), ((4, 3),)),
    Case("constant array", lambda x: x * np.array([1.0, 2.0, 3.0], np.float32), ((4, 3),)),
    Case("items", lambda x: keras.ops.concatenate([x[:, 1:, ::2], x[:, :-1, 1:3]], axis=2), ((5, 4),)),
    Case("one item", lambda x: x[:, -1], ((5, 4),)),
    Case("ellipsis", lambda x: x[..., 1:], ((5, 4),)),
    Case("reductions", lambda x: keras.ops.mean(x, axis=(1, 2)) + keras.ops.max(x, axis=[1, 2]), ((5, 4, 3),)),
    Case("kept reductions", lambda x: x - keras.ops.sum(x, axis=-1, keepdims=True), ((5, 4),)),
    Case("transposition", lambda x: keras.ops.transpose(x, (0, 2, 1)), ((5, 4),)),
    Case("axes of size 1", lambda x: keras.ops.squeeze(keras.ops.expand_dims(x, 1), 1) * 2.0, ((5, 4),)),
    Case("reshape operation", lambda x: keras.ops.reshape(x, (-1, 10, 2)), ((5, 4),)),
    Case("functions", lambda x: keras.ops.relu(keras.ops.tanh(x)) + keras.ops.sigmoid(x), ((5, 4),)),
    Case("gelu by tanh", lambda x: keras.ops.gelu(x) + keras.ops.gelu(x, approximate=False), ((5, 4),)),
    Case("clip and leaky", lambda x: keras.ops.clip(x, -0.5, 0.5) + keras.ops.leaky_relu(x, 0.1), ((5, 4),)),
    Case("matmul", lambda x, y: keras.ops.matmul(x, y), ((5, 4), (4, 3))),
    Case("einsum", lambda x, y: keras.ops.einsum("bij,bkj->bki", x, y), ((5, 4), (3, 4))),
    Case("root", lambda x: keras.ops.rsqrt(keras.ops.square(x) + 1.0) + keras.ops.softmax(x, axis=1), ((5, 4),)),
    Case("extremes", lambda x: keras.ops.maximum(keras.ops.minimum(x, 0.5), -0.25), ((5, 4),)),
]

GROUPS: dict[str, list[Case]] = {
    "convolutions": CONVOLUTIONS,
    "pools": POOLS,
    "channels_first": FIRST,
    "activations": ACTIVATIONS,
    "normalisations": NORMALISATIONS,
    "merging": MERGING,
    "movement": MOVEMENT,
    "products": PRODUCTS,
    "recurrent": RECURRENT,
    "operations": OPERATIONS,
}


def together(cases: list[Case]) -> Any:
    """One functional model with the inputs and outputs of all cases, in order."""
    inputs, outputs = [], []
    for entry in cases:
        kind = "float32" if entry.highest is None else "int32"
        tensors = [keras.Input(shape, dtype=kind) for shape in entry.shapes]
        inputs += tensors
        outputs.append(entry.build(*tensors))
    return keras.Model(inputs, outputs)


def randomise(model: Any, seed: int) -> None:
    """Other weights than the initial ones, variances above 0."""
    source = np.random.default_rng(seed)
    for weight in model.weights:
        array = source.normal(0, 0.5, weight.shape).astype(np.float32)
        weight.assign(np.abs(array) + 0.5 if "variance" in weight.path else array)
    for layer in model.layers:
        if isinstance(layer, L.Normalization):
            layer.finalize_state()


def drawn(cases: list[Case], seed: int) -> list[np.ndarray[Any, Any]]:
    """An array for each input of `together`."""
    source = np.random.default_rng(seed)
    return [
        source.integers(0, entry.highest, (1, *shape)).astype(np.int32)
        if entry.highest
        else source.normal(0, 1.5, (1, *shape)).astype(np.float32)
        for entry in cases
        for shape in entry.shapes
    ]


def run_keras(model: Any, arrays: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """What Keras computes."""
    found = model(arrays if len(arrays) > 1 else arrays[0], training=False)
    return [np.asarray(array) for array in (found if isinstance(found, list | tuple) else [found])]


def saved(model: Any, folder: Path, name: str) -> list[Path]:
    """The model in both formats."""
    paths = [folder / f"{name}.keras", folder / f"{name}.h5"]
    for path in paths:
        model.save(path)
    return paths
