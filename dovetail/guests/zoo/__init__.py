"""Networks to try Dovetail with that need nothing from outside the package.

The four of MLPerf Tiny with random weights (their shapes, costs and value ranges are real, their answers are not),
and a small one that really reads handwritten digits. Needs numpy and onnx only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dovetail.errors import ModelError
from dovetail.guests.zoo import networks
from dovetail.guests.zoo.networks import ZooNetwork

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from dovetail.guests.zoo.weights import ZooWeights

__all__ = ["build", "build_float", "calibration", "held_back", "names"]


_NETWORKS: dict[str, Callable[[], ZooNetwork]] = {
    make.__name__: make
    for make in (networks.resnet8, networks.ds_cnn, networks.mobilenet_v1, networks.autoencoder, networks.digits)
}
_TRAINED = ("digits",)
"""Networks whose weights are stored in the package; weights of the others are drawn from the seed."""


def names() -> tuple[str, ...]:
    """The models `build` knows."""
    return tuple(_NETWORKS)


def _network(name: str, seed: int = 0) -> ZooNetwork:
    if seed < 0:
        raise ModelError(f"a seed is 0 or more, not {seed}", where="--seed", hint="give 0 or more")
    if name not in _NETWORKS:
        hint = f"choose one of {', '.join(names())}"
        raise ModelError("there is no model of this name in the zoo", where=f"'{name}'", hint=hint)
    return _NETWORKS[name]()


def build(name: str, seed: int = 0) -> bytes:
    """A quantised ONNX model: batch 1, NCHW, int8 `input` and `output`, QDQ inside; the same bytes for a seed.

    Args:
        name: one of `names()`.
        seed: of the random weights, 0 or more; "digits" has trained ones and ignores it.

    Raises:
        ModelError: the zoo has no model of that name, or the seed is negative.
    """
    return _written(name, seed, is_quantised=True)


def _written(name: str, seed: int, is_quantised: bool) -> bytes:
    from dovetail.guests.zoo.models import model

    return bytes(model(*_prepared(name, seed), is_quantised).SerializeToString(deterministic=True))


def _prepared(name: str, seed: int) -> tuple[ZooNetwork, ZooWeights]:
    from dovetail.guests.zoo.weights import random_parameters, stored

    network = _network(name, seed)
    return network, stored().prepared if name in _TRAINED else random_parameters(network, seed)


def build_float(name: str, seed: int = 0) -> bytes:
    """The network `build` quantises, as a float ONNX model: batch 1, NCHW, float32 `input` and `output`.
    Raises ModelError where the zoo has no model of that name, or the seed is negative."""
    return _written(name, seed, is_quantised=False)


def calibration(name: str, seed: int = 0) -> npt.NDArray[np.float32]:
    """Float samples to calibrate `build_float(name)` with, float32 [n, *shape without the batch].
    Raises ModelError where the zoo has no model of that name, or the seed is negative."""
    import numpy as np

    return _prepared(name, seed)[1].calibration.astype(np.float32)


def held_back(name: str) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """The images the digits network's training never saw, float32 [360, 1, 8, 8] of 0 to 1, and their labels [360].
    Raises ModelError for another network, none of which is trained."""
    import numpy as np

    from dovetail.guests.zoo.weights import stored

    _network(name)
    if name not in _TRAINED:
        what = "this model has random weights and no test data"
        raise ModelError(what, where=f"'{name}'", hint="use digits, which has")
    content = stored()
    return content.images.astype(np.float32), content.labels
