"""Where a zoo network gets its weights and calibration inputs: drawn from a seed, or stored with the package."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from math import prod, sqrt

import numpy as np
import numpy.typing as npt

from dovetail.zoo.arithmetic import ACTIVATION_BITS, WEIGHT_BITS, Floats, Parameters, activate, apply, on_grid
from dovetail.zoo.network import Kind, Layer, Network

CALIBRATION_INPUTS = 32
"""How many synthetic inputs weights are scaled and activation ranges measured with."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A network's weights and what to calibrate its activations with."""

    parameters: dict[str, Parameters]
    """By layer name."""
    calibration: Floats
    """[N, *input_shape]"""


@dataclass(frozen=True, slots=True)
class Stored:
    """The content of `digits.npz`, written by scripts/train_digits.py."""

    prepared: Prepared
    images: Floats
    """[360, 1, 8, 8], 0 to 1: the images held back from training."""
    labels: npt.NDArray[np.int64]
    """[360]: what the images show, 0 to 9."""
    accuracy: float
    """Share of the held-back images that the float network names correctly."""


def synthetic_inputs(network: Network, count: int, seed: int) -> Floats:
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


def _drawn(layer: Layer, inputs: list[Floats], generator: np.random.Generator) -> Parameters:
    """He's normal initialisation (variance 2 / fan-in, arXiv:1502.01852), brought to inputs of mean square 1."""
    depth = inputs[0].shape[1]
    channels = layer.channels or depth
    fan = (1 if layer.kind is Kind.DEPTHWISE else depth, *layer.kernel)
    shape = (channels, depth) if layer.kind is Kind.DENSE else (channels, *fan)
    _, square = _moments(inputs[0].reshape(1, -1))
    weight = generator.standard_normal(shape) * sqrt(2 / prod(fan) / max(square[0], 2.0**-ACTIVATION_BITS))
    return Parameters(on_grid(weight, WEIGHT_BITS), np.zeros(channels))


def _moments(rows: Floats) -> tuple[Floats, Floats]:
    """Mean and mean square of each row of values on the grid, summed as integers and so exact in any order."""
    steps = np.rint(rows * 2.0**ACTIVATION_BITS).astype(np.int64)
    mean = steps.sum(axis=1) / rows.shape[1] / 2.0**ACTIVATION_BITS
    square = (steps * steps).sum(axis=1) / rows.shape[1] / 4.0**ACTIVATION_BITS
    return mean, square


def _normalised(layer: Layer, drawn: Parameters, sums: Floats, generator: np.random.Generator) -> Parameters:
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


def random_parameters(network: Network, seed: int) -> Prepared:
    """Weights for every layer from `seed`, scaled so that activations neither vanish nor grow with depth."""
    generator = np.random.default_rng(seed)
    calibration = synthetic_inputs(network, CALIBRATION_INPUTS, seed)
    values = {network.input_name: calibration}
    parameters: dict[str, Parameters] = {}
    for layer in network.layers:
        inputs = [values[name] for name in layer.inputs]
        if layer.kind in (Kind.CONVOLUTION, Kind.DEPTHWISE, Kind.DENSE):
            drawn = _drawn(layer, inputs, generator)
            sums = on_grid(apply(layer, inputs, drawn), ACTIVATION_BITS)
            parameters[layer.name] = _normalised(layer, drawn, sums, generator)
        sums = apply(layer, inputs, parameters.get(layer.name))
        values[layer.name] = activate(layer, on_grid(sums, ACTIVATION_BITS))
    return Prepared(parameters, calibration)


def stored() -> Stored:
    """What scripts/train_digits.py trained, read from the package."""
    with resources.files("dovetail.zoo").joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        content = {name: arrays[name] for name in arrays.files}
    names = [name.removesuffix(".weight") for name in content if name.endswith(".weight")]
    parameters = {
        name: Parameters(content[f"{name}.weight"].astype(np.float64), content[f"{name}.bias"].astype(np.float64))
        for name in names
    }
    calibration, images = (content[name].astype(np.float64) / 16 for name in ("calibration", "images"))
    labels = content["labels"].astype(np.int64)
    return Stored(Prepared(parameters, calibration), images, labels, float(content["accuracy"]))
