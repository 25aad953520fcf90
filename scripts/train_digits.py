"""Trains the zoo's digits network on scikit-learn's digits and writes dovetail/guests/zoo/digits.npz.

Run from anywhere, in under two minutes on one core; the same machine gives the same file:

    python scripts/train_digits.py [file to write]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from importlib import import_module
from math import cos, pi
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dovetail.guests.zoo.networks import ZooLayer, ZooLayerKind, ZooNetwork, digits
from dovetail.guests.zoo.weights import (
    WEIGHT_BITS,
    Floats,
    Parameters,
    forward,
    on_grid,
    padded,
    random_parameters,
    taps,
)
from dovetail.ir.types import Array

Gradients = dict[str, Parameters]
Labels = npt.NDArray[np.int64]

HELD_BACK = 360
CALIBRATION = 32
EPOCHS = 50
BATCH = 32
# These two were chosen on 240 of the training images, not on those held back.
LEARNING_RATE = 1e-2
NOISE = 0.15


@dataclass(frozen=True, slots=True)
class Split:
    """The 1797 images [N, 1, 8, 8] with values 0 to 1, and their labels [N], in a seeded random order."""

    images: Floats
    labels: Labels
    test_images: Floats
    test_labels: Labels


def split(seed: int) -> Split:
    """scikit-learn's digits, the last 360 of the shuffled images held back."""
    data = import_module("sklearn.datasets").load_digits()  # it has no type stubs
    order = np.random.default_rng(seed).permutation(len(data.target))
    images = (data.images[order] / 16).astype(np.float64)[:, None]
    labels = data.target[order].astype(np.int64)
    kept = len(order) - HELD_BACK
    return Split(images[:kept], labels[:kept], images[kept:], labels[kept:])


def _convolution_gradients(layer: ZooLayer, x: Floats, dy: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """Gradients of the input and the weight from that of the sums, dy [N, O, OH, OW]."""
    image = padded(x, layer)
    dimage, dweight = np.zeros_like(image), np.zeros_like(weight)
    for (row, column, seen), (_, _, dseen) in zip(taps(image, layer), taps(dimage, layer), strict=True):
        if layer.kind is ZooLayerKind.DEPTHWISE:
            dweight[:, 0, row, column] = (dy * seen).sum(axis=(0, 2, 3))
            dseen += dy * weight[:, :, row, column, None]
        else:
            dweight[:, :, row, column] = np.tensordot(dy, seen, axes=([0, 2, 3], [0, 2, 3]))
            dseen += np.tensordot(dy, weight[:, :, row, column], axes=([1], [0])).transpose(0, 3, 1, 2)
    top, left = ((image.shape[a] - x.shape[a]) // 2 for a in (2, 3))
    return dimage[:, :, top : top + x.shape[2], left : left + x.shape[3]], dweight


def _step_back(
    layer: ZooLayer, x: Floats, dy: Floats, parameters: Parameters | None
) -> tuple[Floats, Parameters | None]:
    """Gradients of the layer's input and parameters from that of its sums."""
    if parameters is None:
        if layer.kind is ZooLayerKind.POOL:
            return np.broadcast_to(dy / (x.shape[2] * x.shape[3]), x.shape), None
        return dy.reshape(x.shape), None
    if layer.kind is ZooLayerKind.DENSE:
        return dy @ parameters.weight, Parameters(dy.T @ x, dy.sum(axis=0))
    dx, dweight = _convolution_gradients(layer, x, dy, parameters.weight)
    return dx, Parameters(dweight, dy.sum(axis=(0, 2, 3)))


def loss_and_gradients(
    network: ZooNetwork, parameters: dict[str, Parameters], images: Floats, labels: Labels
) -> tuple[float, Gradients]:
    """Mean cross-entropy of a chain of layers that ends in a softmax, and its gradient for every parameter."""
    values = forward(network, parameters, images, exact=False)
    *body, last = network.layers
    truth = np.eye(values[last.name].shape[1])[labels]
    loss = -float(np.log((values[last.name] * truth).sum(axis=1)).mean())
    dy = (values[last.name] - truth) / len(labels)
    gradients: Gradients = {}
    for layer in reversed(body):
        if layer.relu:
            dy = dy * (values[layer.name] > 0)
        dy, gradient = _step_back(layer, values[layer.inputs[0]], dy, parameters.get(layer.name))
        if gradient is not None:
            gradients[layer.name] = gradient
    return loss, gradients


def accuracy(network: ZooNetwork, parameters: dict[str, Parameters], images: Floats, labels: Labels) -> float:
    """Share of the images whose most probable class is their label."""
    values = forward(network, parameters, images, exact=False)
    return float((values[network.layers[-1].name].argmax(axis=1) == labels).mean())


def _noisy(images: Floats, generator: np.random.Generator) -> Floats:
    """The images with noise, still 0 to 1: on clean ones the network learns the training set by heart."""
    return np.clip(images + NOISE * generator.standard_normal(images.shape), 0.0, 1.0)


def adam(value: Array, gradient: Array, mean: Array, square: Array, step: int, rate: float) -> Array:
    """One step of Adam with its usual constants (arXiv:1412.6980); `mean` and `square` are updated in place."""
    mean += 0.1 * (gradient - mean)
    square += 0.001 * (gradient * gradient - square)
    slope = mean / (1 - 0.9**step) / (np.sqrt(square / (1 - 0.999**step)) + 1e-8)
    return np.asarray(value - rate * slope)


def train(network: ZooNetwork, data: Split, seed: int, epochs: int = EPOCHS) -> dict[str, Parameters]:
    """Weights from a seeded start, by Adam under a cosine-shaped learning rate; rounded to the zoo's grid."""
    parameters = random_parameters(network, seed).parameters
    memory = {name: [np.zeros_like(a) for a in (p.weight, p.weight, p.bias, p.bias)] for name, p in parameters.items()}
    generator = np.random.default_rng(seed)
    batches = len(data.labels) // BATCH
    for step in range(epochs * batches):
        if step % batches == 0:
            order = generator.permutation(len(data.labels))
        chosen = order[step % batches * BATCH :][:BATCH]
        images = _noisy(data.images[chosen], generator)
        _, gradients = loss_and_gradients(network, parameters, images, data.labels[chosen])
        rate = LEARNING_RATE * (1 + cos(pi * step / (epochs * batches))) / 2
        for name, g in gradients.items():
            p, m = parameters[name], memory[name]
            weight = adam(p.weight, g.weight, m[0], m[1], step + 1, rate)
            parameters[name] = Parameters(weight, adam(p.bias, g.bias, m[2], m[3], step + 1, rate))
    return {
        name: Parameters(on_grid(p.weight, WEIGHT_BITS), on_grid(p.bias, WEIGHT_BITS)) for name, p in parameters.items()
    }


def save(file: Path, data: Split, parameters: dict[str, Parameters], score: float) -> None:
    """Writes the weights (float32, exact on the grid), the score, and the images as scikit-learn has them, 0 to 16."""
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    for name, p in parameters.items():
        arrays[f"{name}.weight"] = p.weight.astype(np.float32)
        arrays[f"{name}.bias"] = p.bias.astype(np.float32)
    arrays["accuracy"] = np.array(score)
    arrays["calibration"] = (data.images[:CALIBRATION] * 16).astype(np.uint8)
    arrays["images"] = (data.test_images * 16).astype(np.uint8)
    arrays["labels"] = data.test_labels.astype(np.uint8)
    np.savez_compressed(file, allow_pickle=False, **arrays)


def main() -> None:
    """Trains, prints the accuracy and writes the file."""
    default = Path(__file__).resolve().parents[1] / "dovetail" / "guests" / "zoo" / "digits.npz"
    parser = argparse.ArgumentParser(description="Trains the zoo's digits network.")
    parser.add_argument("file", nargs="?", type=Path, default=default)
    file: Path = parser.parse_args().file
    network, data = digits(), split(seed=0)
    parameters = train(network, data, seed=0)
    score = accuracy(network, parameters, data.test_images, data.test_labels)
    fit = accuracy(network, parameters, data.images, data.labels)
    save(file, data, parameters, score)
    print(f"accuracy {score:.4f} on {HELD_BACK} held-back images, {fit:.4f} on the training images; wrote {file.name}")


if __name__ == "__main__":
    main()
