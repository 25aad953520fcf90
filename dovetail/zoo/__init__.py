"""Networks to try Dovetail with that need nothing from outside the package.

The four of MLPerf Tiny with random weights (their shapes, costs and value ranges are real, their answers are not),
and a small one that really reads handwritten digits. Needs numpy and onnx only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.errors import ModelError
from dovetail.zoo import architectures

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from dovetail.zoo.network import Network

__all__ = ["build", "digits_accuracy", "digits_samples", "inputs", "names"]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A network of the zoo."""

    network: Callable[[], Network]
    trained: bool
    """Whether its weights are stored in the package; else they are drawn from the seed."""


_ENTRIES = {
    "resnet8": _Entry(architectures.resnet8, trained=False),
    "ds_cnn": _Entry(architectures.ds_cnn, trained=False),
    "mobilenet_v1": _Entry(architectures.mobilenet_v1, trained=False),
    "autoencoder": _Entry(architectures.autoencoder, trained=False),
    "digits": _Entry(architectures.digits, trained=True),
}


def names() -> tuple[str, ...]:
    """The models `build` knows."""
    return tuple(_ENTRIES)


def _entry(name: str) -> _Entry:
    if name not in _ENTRIES:
        raise ModelError(f"the zoo has no model '{name}'", hint=f"choose one of {', '.join(names())}")
    return _ENTRIES[name]


def _check_seed(seed: int) -> None:
    if seed < 0:
        raise ModelError(f"a seed is 0 or more, not {seed}")


def build(name: str, seed: int = 0) -> bytes:
    """A quantised ONNX model: batch 1, NCHW, int8 `input` and `output`, QDQ inside; the same bytes for a seed.

    Args:
        name: one of `names()`.
        seed: of the random weights, 0 or more; "digits" has trained ones and ignores it.

    Raises:
        ModelError: the zoo has no model of that name, or the seed is negative.
    """
    from dovetail.zoo.quantised import model
    from dovetail.zoo.weights import random_parameters, stored

    _check_seed(seed)
    entry = _entry(name)
    network = entry.network()
    prepared = stored().prepared if entry.trained else random_parameters(network, seed)
    return bytes(model(network, prepared).SerializeToString(deterministic=True))


def inputs(name: str, count: int, seed: int = 1) -> npt.NDArray[np.int8]:
    """Synthetic inputs for a model: int8 [count, *shape without the batch], in the model's own input form.

    They are of the kind the model was calibrated with; `seed` 0 gives the very calibration inputs of `build(name)`.

    Raises:
        ModelError: the zoo has no model of that name, or the seed is negative.
    """
    from dovetail.zoo.quantisation import Quantisation, quantise
    from dovetail.zoo.weights import synthetic_inputs

    _check_seed(seed)
    network = _entry(name).network()
    return quantise(synthetic_inputs(network, count, seed), Quantisation.spanning(*network.input_range))


def digits_samples(count: int = 64) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int64]]:
    """Images of the digits model's test set, which its training never saw, and what they show.

    Args:
        count: how many from the first on; there are 360, and no more are given.

    Returns:
        Images, int8 [count, 1, 8, 8] in the model's own input form, and labels 0 to 9, int64 [count].
    """
    from dovetail.zoo.quantisation import Quantisation, quantise
    from dovetail.zoo.weights import stored

    content = stored()
    quantisation = Quantisation.spanning(*architectures.digits().input_range)
    return quantise(content.images[:count], quantisation), content.labels[:count]


def digits_accuracy() -> float:
    """Share of its 360 test images that the digits network named correctly in float, before quantisation (0 to 1)."""
    from dovetail.zoo.weights import stored

    return stored().accuracy
