"""The float meaning of the zoo's networks, in numpy.

Values are kept on a fixed grid, so that every sum of products is exact in float64 (at most 2**46 steps, see
`on_grid`) and equal whatever the order of summation: a model is the same bytes on any machine and thread count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dovetail.zoo.network import Kind, Layer, Network, same_padding

Floats = npt.NDArray[np.float64]

ACTIVATION_BITS = 10
"""Fraction bits of an activation on the grid."""
WEIGHT_BITS = 16
"""Fraction bits of a weight or bias on the grid."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a layer has learnt."""

    weight: Floats
    """[O, I, KH, KW] of a convolution, [C, 1, KH, KW] of a depthwise one, [O, I] of a dense layer."""
    bias: Floats
    """[O]"""


def on_grid(x: Floats, bits: int) -> Floats:
    """`x` rounded to multiples of 2**-bits.

    A product of activation and weight has 10 + 16 fraction bits; the zoo's sums stay below 2**20, so below 2**46
    steps, and float64 counts to 2**53.
    """
    return np.rint(x * 2.0**bits) / 2.0**bits


def padded(x: Floats, layer: Layer) -> Floats:
    """The image [N, C, H, W] with the zeros around it that the layer's windows need."""
    margins = [same_padding(x.shape[2 + axis], layer.kernel[axis], layer.stride) for axis in (0, 1)]
    return np.pad(x, [(0, 0), (0, 0), *margins])


def taps(image: Floats, layer: Layer) -> Iterator[tuple[int, int, Floats]]:
    """Each element (row, column) of the window with a view of what it meets: [N, C, OH, OW] of a padded image."""
    height, width = ((image.shape[2 + a] - layer.kernel[a]) // layer.stride * layer.stride + 1 for a in (0, 1))
    for row in range(layer.kernel[0]):
        for column in range(layer.kernel[1]):
            rows = slice(row, row + height, layer.stride)
            yield row, column, image[:, :, rows, column : column + width : layer.stride]


def _convolve(layer: Layer, x: Floats, parameters: Parameters) -> Floats:
    total: Floats = np.zeros(1)
    for row, column, seen in taps(padded(x, layer), layer):
        weight = parameters.weight[:, :, row, column]
        if layer.kind is Kind.DEPTHWISE:
            total = total + weight[:, :, None] * seen
        else:
            flat = seen.reshape(*seen.shape[:2], -1)
            total = total + (weight @ flat).reshape(seen.shape[0], -1, *seen.shape[2:])
    return total + parameters.bias[:, None, None]


def apply(layer: Layer, inputs: list[Floats], parameters: Parameters | None) -> Floats:
    """The layer's result before its ReLU. `inputs` and the result have a batch axis in front."""
    x = inputs[0]
    if parameters is not None:
        if layer.kind is Kind.DENSE:
            return x @ parameters.weight.T + parameters.bias
        return _convolve(layer, x, parameters)
    if layer.kind is Kind.ADD:
        return x + inputs[1]
    if layer.kind is Kind.POOL:
        mean: Floats = x.sum(axis=(2, 3), keepdims=True) / (x.shape[2] * x.shape[3])
        return mean
    if layer.kind is Kind.FLATTEN:
        return x.reshape(x.shape[0], -1)
    powers: Floats = np.exp(x - x.max(axis=-1, keepdims=True))
    shares: Floats = powers / powers.sum(axis=-1, keepdims=True)
    return shares


def activate(layer: Layer, sums: Floats) -> Floats:
    """The layer's result from what `apply` gives."""
    return np.maximum(sums, 0.0) if layer.relu else sums


def forward(network: Network, parameters: Mapping[str, Parameters], x: Floats, exact: bool = True) -> dict[str, Floats]:
    """The value of the input and of every layer by name, batch axis in front.

    Args:
        network: what to run.
        parameters: by layer name, for each layer that has any.
        x: [N, *network.input_shape].
        exact: keep the values on the grid; without it they are plain float64.
    """
    values = {network.input_name: x}
    for layer in network.layers:
        sums = apply(layer, [values[name] for name in layer.inputs], parameters.get(layer.name))
        values[layer.name] = activate(layer, on_grid(sums, ACTIVATION_BITS) if exact else sums)
    return values
