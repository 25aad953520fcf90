"""Networks to try Dovetail with that need nothing from outside the package.

The four of MLPerf Tiny with random weights (their shapes, costs and value ranges are real, their answers are not), a
small one that really reads handwritten digits, and a language model that writes stories of two sentences. Needs numpy
and onnx only.
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

    Arrays = dict[str, npt.NDArray[np.generic]]

__all__ = ["build", "build_float", "calibration", "held_back", "names", "tokenizer"]


_NETWORKS: dict[str, Callable[[], ZooNetwork]] = {
    make.__name__: make
    for make in (networks.resnet8, networks.ds_cnn, networks.mobilenet_v1, networks.autoencoder, networks.digits)
}
STORY = "story"
"""The language model, which is no `ZooNetwork`: it reads a token and keeps states."""
_TRAINED = ("digits", STORY)
"""Networks whose weights are stored in the package; weights of the others are drawn from the seed."""


def names() -> tuple[str, ...]:
    """The models `build` knows."""
    return (*_NETWORKS, STORY)


def _check(name: str, known: tuple[str, ...], what: str) -> None:
    if name not in known:
        raise ModelError(what, where=f"'{name}'", hint=f"choose one of {', '.join(known)}")


def _check_asked(name: str, seed: int) -> None:
    _check(name, names(), "there is no model of this name in the zoo")
    if seed < 0:
        raise ModelError(f"a seed is 0 or more, not {seed}", where="--seed", hint="give 0 or more")


def build(name: str, seed: int = 0) -> bytes:
    """A quantised ONNX model of batch 1, QDQ inside; the same bytes for a seed.

    Images are NCHW, and `input` and `output` int8. "story" takes a `token` and its `position`, keeps caches as states,
    and gives float `logits`; it is quantised here with its calibration data, for targets with scales per channel.

    Args:
        name: one of `names()`.
        seed: of the random weights, 0 or more; trained models ignore it.

    Raises:
        ModelError: the zoo has no model of that name, or the seed is negative.
    """
    return _written(name, seed, is_quantised=True)


def _written(name: str, seed: int, is_quantised: bool) -> bytes:
    from dovetail.guests.zoo import story
    from dovetail.guests.zoo.models import model

    _check_asked(name, seed)
    if name == STORY:
        made = story.quantised() if is_quantised else story.model(story.stored().parameters)
    else:
        made = model(*_prepared(name, seed), is_quantised)
    return bytes(made.SerializeToString(deterministic=True))


def _prepared(name: str, seed: int) -> tuple[ZooNetwork, ZooWeights]:
    from dovetail.guests.zoo.weights import random_parameters, stored

    network = _NETWORKS[name]()
    return network, stored().prepared if name in _TRAINED else random_parameters(network, seed)


def build_float(name: str, seed: int = 0) -> bytes:
    """The network `build` quantises, as a float ONNX model of batch 1: images NCHW, float32 `input` and `output`.
    Raises ModelError where the zoo has no model of that name, or the seed is negative."""
    return _written(name, seed, is_quantised=False)


def calibration(name: str, seed: int = 0) -> Arrays:
    """Samples to calibrate `build_float(name)` with, by input: float32 [n, *shape without the batch], or int64
    [n, steps] of "story". Raises ModelError where the zoo has no model of that name, or the seed is negative."""
    import numpy as np

    from dovetail.guests.zoo import story

    _check_asked(name, seed)
    if name == STORY:
        return story.sequences(story.stored().calibration)
    return {"input": _prepared(name, seed)[1].calibration.astype(np.float32)}


def held_back(name: str) -> Arrays:
    """Data that the training of a network never saw, by input: of digits float32 [360, 1, 8, 8] of 0 to 1 and `labels`
    [360], of story texts, int64 [n, steps]. Raises ModelError for another network, none of which is trained."""
    import numpy as np

    from dovetail.guests.zoo import story
    from dovetail.guests.zoo.weights import stored

    _check(name, _TRAINED, "this model has no test data: its weights are random, or the zoo does not have it")
    if name == STORY:
        return story.sequences(story.stored().held_back)
    content = stored()
    return {"input": content.images.astype(np.float32), "labels": content.labels}


def tokenizer(name: str) -> bytes:
    """The tokens of the language model, as a tokenizer's file of llama2.c.
    Raises ModelError for another network."""
    from dovetail.guests.zoo import story

    _check(name, (STORY,), "this model reads no text")
    return story.tokenizer()
