"""Which weights each layer has, and where a Keras file keeps them.

A `.keras` file keeps them in groups named after the attributes of objects, a list of layers as the classes in snake
case with a count behind each repeated one. An `.h5` file keeps a list for each layer of the outermost model: what is
trained, then what is not, of everything inside it in the order of definition (keras/src/legacy/saving and
keras/src/saving/saving_lib.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from dovetail.errors import ModelError
from dovetail.frontend.keras_archive import KerasFile
from dovetail.frontend.keras_layer import AGAIN, Layer
from dovetail.graph.types import Array

FIXED = ("moving_mean", "moving_variance", "mean", "variance", "count")
"""Weights that are never trained."""

RANDOM = ("StateVar", "seed_generator_state")
"""States of random numbers, which `.h5` files of Keras 2 list among the weights."""

Names = tuple[str, ...]


def _if(layer: Layer, key: str, name: str, default: bool = True) -> Names:
    return (name,) if layer.flag(key, default) else ()


def _kernel(layer: Layer) -> Names:
    return ("kernel", *_if(layer, "use_bias", "bias"))


def _scaled(layer: Layer) -> Names:
    return (*_if(layer, "scale", "gamma"), *_if(layer, "center", "beta"))


def _separable(layer: Layer) -> Names:
    return ("depthwise_kernel", "pointwise_kernel", *_if(layer, "use_bias", "bias"))


def _normalization(layer: Layer) -> Names:
    return () if layer.get("mean") is not None else ("mean", "variance", "count")


def _recurrent(layer: Layer) -> Names:
    return ("kernel", "recurrent_kernel", *_if(layer, "use_bias", "bias"))


def _attention(layer: Layer) -> Names:
    score = () if layer.get("score_mode", "dot") == "dot" else ("concat_score_weight",)
    return (*_if(layer, "use_scale", "scale", default=False), *score)


VARIABLES: Mapping[str, Callable[[Layer], Names]] = {
    **dict.fromkeys(("Dense", "Conv1D", "Conv2D", "Conv1DTranspose", "Conv2DTranspose"), _kernel),
    **dict.fromkeys(("DepthwiseConv1D", "DepthwiseConv2D"), _kernel),
    **dict.fromkeys(("SeparableConv1D", "SeparableConv2D"), _separable),
    **dict.fromkeys(("LayerNormalization", "GroupNormalization"), _scaled),
    "BatchNormalization": lambda layer: (*_scaled(layer), "moving_mean", "moving_variance"),
    "RMSNormalization": lambda layer: ("scale",),
    "PReLU": lambda layer: ("alpha",),
    "Embedding": lambda layer: ("embeddings",),
    "EinsumDense": lambda layer: ("kernel", *(("bias",) if layer.get("bias_axes") else ())),
    "Normalization": _normalization,
    "Attention": _attention,
    **dict.fromkeys(("LSTMCell", "GRUCell", "SimpleRNNCell"), _recurrent),
    "Projection": _kernel,
}
"""Names of a class's own weights, in Keras's order. Classes without an entry have none."""

PROJECTIONS = ("query_dense", "key_dense", "value_dense", "output_dense")
"""What a MultiHeadAttention holds."""


def children(layer: Layer) -> list[tuple[str, Layer]]:
    """The layers inside a layer by the attribute that holds them, in the order of definition."""
    if layer.network is not None:
        counts: dict[str, int] = {}
        found = []
        for inner in layer.network.layers:
            if inner.is_operation or (layer.kind == "Sequential" and inner.kind == "InputLayer"):
                continue
            name = snake_case(inner.kind)
            count = counts.get(name, 0)
            counts[name] = count + 1
            found.append((f"layers/{name}_{count}" if count else f"layers/{name}", inner))
        return found
    if layer.kind in ("LSTM", "GRU", "SimpleRNN"):
        return [("cell", replace(layer, kind=f"{layer.kind}Cell", place=f"{layer.place}.cell"))]
    if layer.kind == "MultiHeadAttention":
        return [(name, replace(layer, kind="Projection", place=f"{layer.place}.{name}")) for name in PROJECTIONS]
    if layer.kind == "Bidirectional" and "layer" in layer.parts:
        return [("forward_layer", layer.parts["layer"]), ("backward_layer", backward(layer))]
    return list(layer.parts.items())


def backward(layer: Layer) -> Layer:
    """The layer of a Bidirectional that reads from the end: its own, or the other one turned round."""
    given = layer.parts.get("backward_layer")
    if given is not None:
        return given
    forward = layer.parts["layer"]
    config = {**forward.config, "go_backwards": not forward.config.get("go_backwards", False)}
    return replace(forward, config=config, place=f"{layer.place}.backward_layer", read=set())


def snake_case(name: str) -> str:
    """A class's name as `.keras` files write it (keras/src/utils/naming.py)."""
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


class Weights:
    """The weights of every layer of a file, found by the layer's place."""

    def __init__(self, file: KerasFile, model: Layer) -> None:
        """Find them; nothing is read yet.

        Raises:
            ModelError: an `.h5` file lists other weights than its layers have.
        """
        self._file = file
        self._stored: dict[str, tuple[str, ...]] = {}
        """Where the weights of each layer lie, by the layer's place."""
        self._shared: dict[str, str] = {}
        """Where the weights of shared layers lie in a `.keras` file: where the first of them stands."""
        if file.by_path:
            old = not file.weights.has("layers")
            self._walk(model, "", "_layer_checkpoint_dependencies" if old else "layers")
        else:
            self._lists(model)

    def of(self, layer: Layer) -> dict[str, Array]:
        """The layer's own weights, float32, by name.

        Raises:
            ModelError: they are missing, damaged or not finite.
        """
        names, stored = _names(layer), self._stored.get(layer.place, ())
        if len(names) != len(stored):
            raise layer.refuse(f"the layer has the weights {', '.join(names)}; the file holds {len(stored)} for it",
                               AGAIN)
        pairs = zip(names, stored, strict=True)
        # The count of a Normalization is how many samples it has seen.
        return {name: self._file.weights.array(path) for name, path in pairs if name != "count"}

    def _walk(self, layer: Layer, path: str, layers: str) -> None:
        """Note the groups of a layer and of all inside it."""
        path = self._shared.setdefault(layer.shared, path) if layer.shared else path
        names = _names(layer)
        held = f"{path}/vars"
        if names and self._file.weights.has(held):
            count = len(self._file.weights.members[held])
            self._stored[layer.place] = tuple(f"{held}/{index}" for index in range(count))
        for attribute, inner in children(layer):
            steps = attribute.replace("layers/", f"{layers}/", 1) if attribute.startswith("layers/") else attribute
            below = f"{path}/{steps}".lstrip("/")
            if not self._file.weights.has(below) and "/" not in attribute:
                below = f"{path}/_{attribute}"  # Keras 2 kept some parts in private attributes
            self._walk(inner, below, layers)

    def _lists(self, model: Layer) -> None:
        """Deal out the lists of an `.h5` file."""
        assert model.network is not None
        if self._file.weights.names("model_weights/top_level_model_weights", "weight_names"):
            raise model.refuse("the model has weights outside its layers", AGAIN)
        for layer in model.network.layers:
            places = [*_trained(layer), *_untrained(layer)]
            group = f"model_weights/{layer.name}"
            listed = self._file.weights.names(group, "weight_names") if self._file.weights.has(group) else []
            listed = [path for path in listed if path.split("/")[-1].split(":")[0] not in RANDOM]
            if len(listed) != len(places):
                wanted = ", ".join(name for _, name in places) or "none"
                raise layer.refuse(f"the layer has the weights {wanted}; the file holds {len(listed)} for it", AGAIN)
            self._deal(group, places, listed)

    def _deal(self, group: str, places: Sequence[tuple[Layer, str]], listed: Sequence[str]) -> None:
        found: dict[str, dict[str, str]] = {}
        layers: dict[str, Layer] = {}
        for (layer, name), path in zip(places, listed, strict=True):
            _check_name(layer, name, path)
            found.setdefault(layer.place, {})[name] = "/".join(part for part in f"{group}/{path}".split("/") if part)
            layers[layer.place] = layer
        for place, stored in found.items():
            self._stored[place] = tuple(stored[name] for name in _names(layers[place]))


def _names(layer: Layer) -> Names:
    return VARIABLES[layer.kind](layer) if layer.kind in VARIABLES and not layer.is_operation else ()


def _trainable(layer: Layer) -> bool:
    return layer.config.get("trainable", True) is not False


def _trained(layer: Layer) -> Iterator[tuple[Layer, str]]:
    """Weights of a layer and all inside it that are trained, as (layer, name)."""
    if _trainable(layer):
        yield from ((layer, name) for name in _names(layer) if name not in FIXED)
        for _, inner in children(layer):
            yield from _trained(inner)


def _untrained(layer: Layer) -> Iterator[tuple[Layer, str]]:
    """The others; of a frozen layer all."""
    frozen = not _trainable(layer)
    yield from ((layer, name) for name in _names(layer) if frozen or name in FIXED)
    for _, inner in children(layer):
        if frozen:
            yield from _trained(inner)
        yield from _untrained(inner)


def _check_name(layer: Layer, name: str, path: str) -> None:
    """Refuse a list whose order is not understood: where a stored name is a role's, it must be this one's."""
    last = path.split("/")[-1].split(":")[0]
    roles = ("kernel", "bias", "gamma", "beta", "moving_mean", "moving_variance", "recurrent_kernel", "alpha")
    if last in roles and not (name == last or name.endswith(f"_{last}")):
        raise ModelError(
            f"the weights {path[:200]!r} stand where the {name} of {layer.kind} '{layer.name}' should",
            where=layer.file,
            hint="save the model again with a current Keras, as .keras",
        )
