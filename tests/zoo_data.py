"""Inputs for the models of the zoo in their own form, and what is known of its digits network."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dovetail.guests.zoo import networks
from dovetail.guests.zoo.models import ZooQuantisation
from dovetail.guests.zoo.weights import Floats, stored, synthetic_inputs


def quantise(x: Floats, quantisation: ZooQuantisation) -> npt.NDArray[np.int8]:
    """The nearest integers, ties to even (QuantizeLinear's rule), saturated."""
    steps = np.rint(x / float(quantisation.scale)) + quantisation.zero_point
    integers: npt.NDArray[np.int8] = np.clip(steps, -128, 127).astype(np.int8)
    return integers


def inputs(name: str, count: int, seed: int = 1) -> npt.NDArray[np.int8]:
    """Synthetic inputs for a model: int8 [count, *shape without the batch], in the model's own input form.

    They are of the kind the model was calibrated with; `seed` 0 gives the very calibration inputs of `build(name)`.
    """
    network: networks.ZooNetwork = getattr(networks, name)()
    return quantise(synthetic_inputs(network, count, seed), ZooQuantisation.spanning(*network.input_range))


def digits_samples(count: int = 64) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int64]]:
    """Images of the digits model's test set, which its training never saw, and what they show.

    Args:
        count: how many from the first on; there are 360, and no more are given.

    Returns:
        Images, int8 [count, 1, 8, 8] in the model's own input form, and labels 0 to 9, int64 [count].
    """
    content = stored()
    quantisation = ZooQuantisation.spanning(*networks.digits().input_range)
    return quantise(content.images[:count], quantisation), content.labels[:count]


def digits_accuracy() -> float:
    """Share of its 360 test images that the digits network named correctly in float, before quantisation (0 to 1)."""
    return stored().accuracy
