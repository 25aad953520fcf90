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
    from dovetail.zoo.weights import Prepared

__all__ = [
    "build",
    "build_float",
    "calibration",
    "digits_accuracy",
    "digits_samples",
    "held_back",
    "inputs",
    "names",
]


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
        raise ModelError("there is no model of this name in the zoo", where=f"'{name}'",
                         hint=f"choose one of {', '.join(names())}")
    return _ENTRIES[name]


def _check_seed(seed: int) -> None:
    if seed < 0:
        raise ModelError(f"a seed is 0 or more, not {seed}", where="--seed", hint="give 0 or more")


def build(name: str, seed: int = 0) -> bytes:
    """A quantised ONNX model: batch 1, NCHW, int8 `input` and `output`, QDQ inside; the same bytes for a seed.

    Args:
        name: one of `names()`.
        seed: of the random weights, 0 or more; "digits" has trained ones and ignores it.

    Raises:
        ModelError: the zoo has no model of that name, or the seed is negative.
    """
    from dovetail.zoo.quantised import model

    return bytes(model(*_prepared(name, seed)).SerializeToString(deterministic=True))


def _prepared(name: str, seed: int) -> tuple[Network, Prepared]:
    """A network with its weights and calibration inputs."""
    from dovetail.zoo.weights import random_parameters, stored

    _check_seed(seed)
    entry = _entry(name)
    network = entry.network()
    return network, stored().prepared if entry.trained else random_parameters(network, seed)


def build_float(name: str, seed: int = 0) -> bytes:
    """The network `build` quantises, as a float ONNX model: batch 1, NCHW, float32 `input` and `output`.

    Raises:
        ModelError: the zoo has no model of that name, or the seed is negative.
    """
    from dovetail.zoo.quantised import float_model

    return bytes(float_model(*_prepared(name, seed)).SerializeToString(deterministic=True))


def calibration(name: str, seed: int = 0) -> npt.NDArray[np.float32]:
    """Float samples to calibrate `build_float(name)` with, float32 [n, *shape without the batch].

    Raises:
        ModelError: the zoo has no model of that name, or the seed is negative.
    """
    import numpy as np

    return _prepared(name, seed)[1].calibration.astype(np.float32)


def held_back(name: str) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """The images the digits network's training never saw, float32 [360, 1, 8, 8] of 0 to 1, and their labels [360].

    Raises:
        ModelError: another network, none of which is trained.
    """
    import numpy as np

    from dovetail.zoo.weights import stored

    if not _entry(name).trained:
        raise ModelError("this model has random weights and no test data", where=f"'{name}'",
                         hint="use digits, which has")
    content = stored()
    return content.images.astype(np.float32), content.labels


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
