"""Weights and calibration inputs of the zoo's networks, and their float meaning in numpy.

Weights are drawn from a seed, or stored with the package. Values are kept on a fixed grid, so that every sum of
products is exact in float64 (at most 2**46 steps, see `on_grid`) and equal whatever the order of summation: a model is
the same bytes on any machine and thread count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import resources
from math import prod, sqrt

import numpy as np
import numpy.typing as npt

from dovetail.guests.zoo.networks import INPUT, WITH_WEIGHTS, ZooLayer, ZooLayerKind, ZooNetwork
from dovetail.records import Record

Floats = npt.NDArray[np.float64]

ACTIVATION_BITS = 10
"""Fraction bits of an activation on the grid."""
WEIGHT_BITS = 16
"""Fraction bits of a weight or bias on the grid."""


class Parameters(Record):
    """Weights and bias of a layer."""

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


def padded(x: Floats, layer: ZooLayer) -> Floats:
    """The image [N, C, H, W] with the zeros around it that the layer's windows need."""
    return np.pad(x, [(0, 0), (0, 0), *layer.borders(*x.shape[2:])])


def taps(image: Floats, layer: ZooLayer) -> Iterator[tuple[int, int, Floats]]:
    """Each element (row, column) of the window with a view of what it meets: [N, C, OH, OW] of a padded image."""
    height, width = ((image.shape[2 + a] - layer.kernel[a]) // layer.stride * layer.stride + 1 for a in (0, 1))
    for row in range(layer.kernel[0]):
        for column in range(layer.kernel[1]):
            rows = slice(row, row + height, layer.stride)
            yield row, column, image[:, :, rows, column : column + width : layer.stride]


def _convolve(layer: ZooLayer, x: Floats, parameters: Parameters) -> Floats:
    total: Floats = np.zeros(1)
    for row, column, seen in taps(padded(x, layer), layer):
        weight = parameters.weight[:, :, row, column]
        if layer.kind is ZooLayerKind.DEPTHWISE:
            total = total + weight[:, :, None] * seen
        else:
            flat = seen.reshape(*seen.shape[:2], -1)
            total = total + (weight @ flat).reshape(seen.shape[0], -1, *seen.shape[2:])
    return total + parameters.bias[:, None, None]


def apply(layer: ZooLayer, inputs: list[Floats], parameters: Parameters | None) -> Floats:
    """The layer's result before its ReLU. `inputs` and the result have a batch axis in front."""
    x = inputs[0]
    if parameters is not None:
        if layer.kind is ZooLayerKind.DENSE:
            return x @ parameters.weight.T + parameters.bias
        return _convolve(layer, x, parameters)
    if layer.kind is ZooLayerKind.ADD:
        return x + inputs[1]
    if layer.kind is ZooLayerKind.POOL:
        return np.asarray(x.sum(axis=(2, 3), keepdims=True) / (x.shape[2] * x.shape[3]))
    if layer.kind is ZooLayerKind.FLATTEN:
        return x.reshape(x.shape[0], -1)
    powers: Floats = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def forward(
    network: ZooNetwork,
    parameters: dict[str, Parameters],
    x: Floats,
    exact: bool = True,
    draw: Callable[[ZooLayer, list[Floats]], Parameters] | None = None,
) -> dict[str, Floats]:
    """The value of the input and of every layer by name, batch axis in front.

    Args:
        network: what to run.
        parameters: by layer name, for each layer that has any.
        x: [N, *network.input_shape].
        exact: keep the values on the grid; without it they are plain float64.
        draw: makes the parameters of a layer from its inputs, which are added to `parameters`.
    """
    values = {INPUT: x}
    for layer in network.layers:
        inputs = [values[name] for name in layer.inputs]
        if draw is not None and layer.kind in WITH_WEIGHTS:
            parameters[layer.name] = draw(layer, inputs)
        sums = apply(layer, inputs, parameters.get(layer.name))
        sums = on_grid(sums, ACTIVATION_BITS) if exact else sums
        values[layer.name] = np.maximum(sums, 0.0) if layer.relu else sums
    return values


CALIBRATION_INPUTS = 32
"""How many synthetic inputs weights are scaled and activation ranges measured with."""


class ZooWeights(Record):
    """A network's weights and what to calibrate its activations with."""

    parameters: dict[str, Parameters]
    """By layer name."""
    calibration: Floats
    """[N, *input_shape]"""


class DigitsFile(Record):
    """The content of `digits.npz`, written by scripts/train_digits.py."""

    prepared: ZooWeights
    images: Floats
    """[360, 1, 8, 8], 0 to 1: the images held back from training."""
    labels: npt.NDArray[np.int64]
    """[360]: what the images show, 0 to 9."""
    accuracy: float
    """Share of the held-back images that the float network names correctly."""


def synthetic_inputs(network: ZooNetwork, count: int, seed: int) -> Floats:
    """[count, *input_shape] of noise that is coarse and fine at once, each input with its own level and contrast.

    Only additions and products of uniform random numbers, so equal on every machine.
    """
    generator = np.random.default_rng(seed)
    shape = network.input_shape
    total = np.zeros((count, *shape))
    for cell, amplitude in ((1, 0.25), (4, 0.5), (16, 1.0), (64, 1.0)):
        coarse = [-(-size // cell) for size in shape[1:] or shape]
        channels = shape[:1] if len(shape) > 1 else ()
        noise = amplitude * (generator.random((count, *channels, *coarse)) - 0.5)
        for axis in range(total.ndim - len(coarse), total.ndim):
            noise = np.repeat(noise, cell, axis)
        total += noise[(slice(None), *(slice(size) for size in shape))]
    level, contrast = (generator.random((2, count)) + 0.5).reshape(2, count, *(1 for _ in shape))
    unit = np.clip(total * contrast / 2 + level / 2, 0.0, 1.0)
    low, high = network.input_range
    return on_grid(low + (high - low) * unit, ACTIVATION_BITS)


def _drawn(layer: ZooLayer, inputs: list[Floats], generator: np.random.Generator) -> Parameters:
    """He's normal initialisation (variance 2 / fan-in, arXiv:1502.01852), brought to inputs of mean square 1."""
    depth = inputs[0].shape[1]
    channels = layer.channels or depth
    fan = (1 if layer.kind is ZooLayerKind.DEPTHWISE else depth, *layer.kernel)
    shape = (channels, depth) if layer.kind is ZooLayerKind.DENSE else (channels, *fan)
    _, square = _moments(inputs[0].reshape(1, -1))
    weight = generator.standard_normal(shape) * sqrt(2 / prod(fan) / max(square[0], 2.0**-ACTIVATION_BITS))
    return Parameters(on_grid(weight, WEIGHT_BITS), np.zeros(channels))


def _moments(rows: Floats) -> tuple[Floats, Floats]:
    """Mean and mean square of each row of values on the grid, summed as integers and so exact in any order."""
    steps = np.rint(rows * 2.0**ACTIVATION_BITS).astype(np.int64)
    mean = steps.sum(axis=1) / rows.shape[1] / 2.0**ACTIVATION_BITS
    square = (steps * steps).sum(axis=1) / rows.shape[1] / 4.0**ACTIVATION_BITS
    return mean, square


def _normalised(layer: ZooLayer, drawn: Parameters, sums: Floats, generator: np.random.Generator) -> Parameters:
    """The weights with a batch normalisation folded in: each channel's sums get a deviation of about the gain.

    Its learnt scale and shift vary from channel to channel as a trained network's do. Before a ReLU the mean is
    about one deviation: around 0, each random layer enlarges the relative error of the quantisation before it
    (measured: by 16 %; the theory and the remedy are arXiv:1902.08129's), and 28 layers on the answer is noise.
    """
    mean, square = _moments(np.moveaxis(sums, 1, 0).reshape(sums.shape[1], -1))
    deviation = np.sqrt(np.maximum(square - mean * mean, 4.0**-ACTIVATION_BITS))
    scale = layer.gain * (0.75 + 0.5 * generator.random(mean.shape))
    shift = layer.gain * (0.5 * generator.random(mean.shape) + (0.75 if layer.relu else -0.25))
    factor = scale / deviation
    weight = drawn.weight * factor.reshape(-1, *(1 for _ in drawn.weight.shape[1:]))
    return Parameters(on_grid(weight, WEIGHT_BITS), on_grid(shift - mean * factor, WEIGHT_BITS))


def random_parameters(network: ZooNetwork, seed: int) -> ZooWeights:
    """Weights for every layer from `seed`, scaled so that activations neither vanish nor grow with depth."""
    generator, parameters = np.random.default_rng(seed), dict[str, Parameters]()
    calibration = synthetic_inputs(network, CALIBRATION_INPUTS, seed)

    def draw(layer: ZooLayer, inputs: list[Floats]) -> Parameters:
        drawn = _drawn(layer, inputs, generator)
        return _normalised(layer, drawn, on_grid(apply(layer, inputs, drawn), ACTIVATION_BITS), generator)

    forward(network, parameters, calibration, draw=draw)
    return ZooWeights(parameters, calibration)


def stored() -> DigitsFile:
    """The digits network as scripts/train_digits.py trained it, read from the package."""
    with resources.files("dovetail.guests.zoo").joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        content = {name: arrays[name] for name in arrays.files}
    names = [name.removesuffix(".weight") for name in content if name.endswith(".weight")]
    own = {name: (content[f"{name}.weight"], content[f"{name}.bias"]) for name in names}
    parameters = {name: Parameters(w.astype(np.float64), b.astype(np.float64)) for name, (w, b) in own.items()}
    calibration, images = (content[name].astype(np.float64) / 16 for name in ("calibration", "images"))
    labels = content["labels"].astype(np.int64)
    return DigitsFile(ZooWeights(parameters, calibration), images, labels, float(content["accuracy"]))
