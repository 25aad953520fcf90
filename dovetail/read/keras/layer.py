"""A layer of a Keras model as its configuration says it, the settings importers ask of it, and its weights.

A `.keras` file keeps weights in groups named after the attributes of objects, a list of layers as the classes in snake
case with a count behind each repeated one. An `.h5` file keeps a list for each layer of the outermost model: what is
trained, then what is not, of everything inside it in the order of definition (keras/src/legacy/saving and
keras/src/saving/saving_lib.py).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dovetail.errors import ModelError
from dovetail.ir.types import Array
from dovetail.read.keras.archive import KerasFile

# What to do about what a reader refuses; each sentence fits many messages.
OTHERWISE = "say it with standard layers and settings, and save the model again"
AGAIN = "save the whole model again with model.save('model.keras'): what this file says contradicts itself"
FOLD = "make it a constant, and save the model again"
SMALLER = "make the network smaller there, and save it again"

MAX_NUMBER = 1 << 31
"""Integers in a configuration are smaller."""

TRAINING_ONLY = {
    *("name", "trainable", "dtype", "batch_input_shape", "batch_shape", "build_input_shape", "autocast"),
    *("seed", "rate", "use_cudnn", "noise_shape", "stddev", "l1", "l2", "momentum", "dropout", "recurrent_dropout"),
    *("renorm_momentum", "synchronized", "fused", "unit_forget_bias", "implementation", "unroll", "input_dtype"),
    *("input_length", "input_dim", "force_generator", "seed_generator", "supports_masking", "symbolic_call"),
}
"""Settings without a meaning for a computed result; those of initialisers and the like are told by their names."""

_TRAINING_ENDINGS = ("_initializer", "_regularizer", "_constraint", "_quantizer")


@dataclass(frozen=True)
class Reference:
    """One result of one call of a layer."""

    layer: str
    call: int
    """Which call, counted as the file counts."""
    result: int


@dataclass(frozen=True)
class KerasTensor:
    """A value of the graph among the arguments of a call."""

    name: str


@dataclass(frozen=True)
class KerasCall:
    """Arguments of a layer's call: constants, lists, slices, and `Reference`s or, once computed, `KerasTensor`s."""

    arguments: tuple[Any, ...]
    named: Mapping[str, Any] = field(default_factory=dict)

    def references(self) -> list[Reference]:
        """Every result the call needs."""
        return [leaf for leaf in leaves((self.arguments, self.named)) if isinstance(leaf, Reference)]

    def tensors(self) -> list[str]:
        """Names of the graph's values among the arguments, in order."""
        return [leaf.name for leaf in leaves((self.arguments, self.named)) if isinstance(leaf, KerasTensor)]


def leaves(value: Any) -> Iterator[Any]:
    """The innermost members of nested lists, tuples and mappings, in order; mappings in the order of their keys."""
    if isinstance(value, Mapping):
        value = tuple(value[key] for key in sorted(value))
    if isinstance(value, list | tuple):
        for part in value:
            yield from leaves(part)
    else:
        yield value


@dataclass(frozen=True)
class KerasNetwork:
    """Layers and how they are called."""

    layers: tuple[KerasLayer, ...]
    calls: Mapping[str, tuple[KerasCall, ...]]
    """The calls of each layer, by its name."""
    inputs: tuple[Reference, ...]
    outputs: tuple[Reference, ...]


@dataclass(frozen=True)
class KerasLayer:
    """One layer, or one operation of `keras.ops`."""

    file: str
    """For messages."""
    kind: str
    """Its class, by the name Keras 3 gives it."""
    name: str
    place: str
    """Its place in the configuration."""
    version: int
    """Major version of the Keras that wrote it."""
    config: Mapping[str, Any]
    is_operation: bool = False
    shared: str = ""
    """The file's mark of a layer that stands in several places; empty for any other layer."""
    parts: Mapping[str, KerasLayer] = field(default_factory=dict)
    """Layers it holds, by the name of the attribute."""
    network: KerasNetwork | None = None
    """The layers of a model."""
    read: set[str] = field(default_factory=set)
    """Settings its importer has honoured."""

    @property
    def origin(self) -> str:
        """The layer as `Node.origin` names it."""
        return f"{self.kind} ({self.name})"

    def refuse(self, what: str, hint: str = OTHERWISE) -> ModelError:
        """The error for something about this layer that cannot be honoured."""
        return ModelError(what, where=f"{self.file}, {self.kind} '{self.name}' ({self.place})", hint=hint)

    def get(self, key: str, default: Any = None) -> Any:
        """A setting, now honoured; `default` where it is absent or null."""
        self.read.add(key)
        found = self.config.get(key)
        return default if found is None else found

    def whole(self, key: str, default: int | None = None, low: int = 0) -> int:
        """An integer setting of at least `low`."""
        return self._whole(key, self.get(key, default), low)

    def _whole(self, key: str, value: Any, low: int) -> int:
        real = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not real or value != int(value) or not low <= value < MAX_NUMBER:
            raise self.refuse(f"the setting {key} = {str(value)[:80]} must be an integer of at least {low}", AGAIN)
        return int(value)

    def wholes(self, key: str, count: int, default: Any = None, low: int = 0) -> tuple[int, ...]:
        """`count` integers of at least `low`; one alone stands for all."""
        found = self.get(key, default)
        values = list(found) if isinstance(found, list | tuple) else [found] * count
        if len(values) != count:
            raise self.refuse(f"the setting {key} = {str(found)[:80]} must be {count} integers", AGAIN)
        return tuple(self._whole(key, value, low) for value in values)

    def axes(self, key: str, rank: int, default: Any) -> tuple[int, ...]:
        """One axis or several, counted from the front, in rising order."""
        found = self.get(key, default)
        values = list(found) if isinstance(found, list | tuple) else [found]
        numbers = [self._whole(key, value, -rank) for value in values[: rank + 1]]
        axes = tuple(sorted({number % rank for number in numbers if number < rank} if rank else ()))
        if not values or len(axes) != len(values):
            raise self.refuse(f"the setting {key} = {str(found)[:80]} must name different axes of {rank}", AGAIN)
        return axes

    def number(self, key: str, default: float) -> float:
        """A real setting."""
        found = self.get(key, default)
        if isinstance(found, Mapping):  # Keras 2 wrote numpy numbers as {"type": "ndarray", "value": ...}
            found = found.get("value")
        if isinstance(found, bool) or not isinstance(found, int | float) or math.isnan(found):
            raise self.refuse(f"the setting {key} = {str(found)[:80]} must be a number", AGAIN)
        return float(found)

    def flag(self, key: str, default: bool) -> bool:
        """A setting that is true or false."""
        found = self.get(key, default)
        if not isinstance(found, bool):
            raise self.refuse(f"the setting {key} = {str(found)[:80]} must be true or false", AGAIN)
        return found

    def choice(self, key: str, default: str, known: Sequence[str]) -> str:
        """A setting that is one of some words."""
        found = self.get(key, default)
        if found not in known:
            raise self.refuse(f"the setting {key} = {str(found)[:80]} is not supported, only {', '.join(known)}")
        return str(found)

    def first_channels(self) -> bool:
        """True where images are NCHW."""
        return self.choice("data_format", "channels_last", ("channels_last", "channels_first")) == "channels_first"

    def full_shape(self, wanted: Sequence[object], elements: int) -> tuple[int, ...]:
        """A shape with at most one -1, which takes what is left of so many elements."""
        sizes = [
            size for size in wanted if isinstance(size, int) and not isinstance(size, bool) and -1 <= size < MAX_NUMBER
        ]
        rest = math.prod(size for size in sizes if size != -1)
        if len(sizes) != len(wanted) or sizes.count(-1) > 1 or 0 in sizes or (-1 in sizes and elements % rest):
            raise self.refuse(f"{elements} elements have not the shape {str(list(wanted))[:80]}", AGAIN)
        return tuple(elements // rest if size == -1 else size for size in sizes)

    def check_settings(self) -> None:
        """Refuse a setting that no one has honoured and that is set to something."""
        for key, value in self.config.items():
            known = key in self.read or key in TRAINING_ONLY or key.endswith(_TRAINING_ENDINGS)
            if not known and value not in (None, False, 0, "", [], {}):
                raise self.refuse(f"the setting {key} = {str(value)[:80]} is not supported")


FIXED = ("moving_mean", "moving_variance", "mean", "variance", "count")
"""Weights that are never trained."""

RANDOM = ("StateVar", "seed_generator_state")
"""States of random numbers, which `.h5` files of Keras 2 list among the weights."""

Names = tuple[str, ...]


def _if(layer: KerasLayer, key: str, name: str, default: bool = True) -> Names:
    return (name,) if layer.flag(key, default) else ()


def _biased(*kernels: str) -> Callable[[KerasLayer], Names]:
    return lambda layer: (*kernels, *_if(layer, "use_bias", "bias"))


def _scaled(layer: KerasLayer) -> Names:
    return (*_if(layer, "scale", "gamma"), *_if(layer, "center", "beta"))


def _attention(layer: KerasLayer) -> Names:
    score = () if layer.get("score_mode", "dot") == "dot" else ("concat_score_weight",)
    return (*_if(layer, "use_scale", "scale", default=False), *score)


VARIABLES: Mapping[str, Callable[[KerasLayer], Names]] = {
    **dict.fromkeys(("Dense", "Conv1D", "Conv2D", "Conv1DTranspose", "Conv2DTranspose"), _biased("kernel")),
    **dict.fromkeys(("DepthwiseConv1D", "DepthwiseConv2D", "Projection"), _biased("kernel")),
    **dict.fromkeys(("SeparableConv1D", "SeparableConv2D"), _biased("depthwise_kernel", "pointwise_kernel")),
    **dict.fromkeys(("LayerNormalization", "GroupNormalization"), _scaled),
    "BatchNormalization": lambda layer: (*_scaled(layer), "moving_mean", "moving_variance"),
    "RMSNormalization": lambda layer: ("scale",),
    "PReLU": lambda layer: ("alpha",),
    "Embedding": lambda layer: ("embeddings",),
    "EinsumDense": lambda layer: ("kernel", *(("bias",) if layer.get("bias_axes") else ())),
    "Normalization": lambda layer: () if layer.get("mean") is not None else ("mean", "variance", "count"),
    "Attention": _attention,
    **dict.fromkeys(("LSTMCell", "GRUCell", "SimpleRNNCell"), _biased("kernel", "recurrent_kernel")),
}
"""Names of a class's own weights, in Keras's order. Classes without an entry have none."""

PROJECTIONS = ("query_dense", "key_dense", "value_dense", "output_dense")
"""Layers within a MultiHeadAttention."""


def children(layer: KerasLayer) -> list[tuple[str, KerasLayer]]:
    """The layers inside a layer by the attribute that holds them, in the order of definition."""
    if layer.network is not None:
        counts: Counter[str] = Counter()
        found = []
        for inner in layer.network.layers:
            if not inner.is_operation and not (layer.kind == "Sequential" and inner.kind == "InputLayer"):
                name = snake_case(inner.kind)
                found.append((f"layers/{name}_{counts[name]}" if counts[name] else f"layers/{name}", inner))
                counts[name] += 1
        return found
    if layer.kind in ("LSTM", "GRU", "SimpleRNN"):
        return [("cell", replace(layer, kind=f"{layer.kind}Cell", place=f"{layer.place}.cell"))]
    if layer.kind == "MultiHeadAttention":
        return [(name, replace(layer, kind="Projection", place=f"{layer.place}.{name}")) for name in PROJECTIONS]
    if layer.kind == "Bidirectional" and "layer" in layer.parts:
        return [("forward_layer", layer.parts["layer"]), ("backward_layer", backward(layer))]
    return list(layer.parts.items())


def backward(layer: KerasLayer) -> KerasLayer:
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


class KerasWeights:
    """The weights of every layer of a file, found by the layer's place."""

    def __init__(self, file: KerasFile, model: KerasLayer) -> None:
        """Find them, unread; raises ModelError where an `.h5` file lists other weights than its layers have."""
        self._file = file
        self._stored: dict[str, tuple[str, ...]] = {}
        """Paths of each layer's weights, by the layer's place."""
        self._shared: dict[str, str] = {}
        """Paths of shared layers' weights in a `.keras` file: the place of the first of them."""
        if file.by_path:
            old = not file.weights.has("layers")
            self._walk(model, "", "_layer_checkpoint_dependencies" if old else "layers")
        else:
            self._lists(model)

    def of(self, layer: KerasLayer) -> dict[str, Array]:
        """The layer's own weights, float32, by name; raises ModelError where they are missing or not finite."""
        names, stored = _names(layer), self._stored.get(layer.place, ())
        if len(names) != len(stored):
            listed = ", ".join(names)
            raise layer.refuse(f"the layer has the weights {listed}; the file holds {len(stored)} for it", AGAIN)
        pairs = zip(names, stored, strict=True)
        # The count of a Normalization is how many samples it has seen.
        return {name: self._file.weights.array(path) for name, path in pairs if name != "count"}

    def _walk(self, layer: KerasLayer, path: str, layers: str) -> None:
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

    def _lists(self, model: KerasLayer) -> None:
        """Deal out the lists of an `.h5` file."""
        assert model.network is not None
        if self._file.weights.names("model_weights/top_level_model_weights", "weight_names"):
            raise model.refuse("the model has weights outside its layers", AGAIN)
        for layer in model.network.layers:
            places, group = [*_trained(layer), *_untrained(layer)], f"model_weights/{layer.name}"
            listed = self._file.weights.names(group, "weight_names") if self._file.weights.has(group) else []
            listed = [path for path in listed if path.split("/")[-1].split(":")[0] not in RANDOM]
            if len(listed) != len(places):
                wanted = ", ".join(name for _, name in places) or "none"
                raise layer.refuse(f"the layer has the weights {wanted}; the file holds {len(listed)} for it", AGAIN)
            found: dict[str, dict[str, str]] = {}
            for (inner, name), path in zip(places, listed, strict=True):
                _check_name(inner, name, path)
                found.setdefault(inner.place, {})[name] = "/".join(filter(None, f"{group}/{path}".split("/")))
            for inner in {inner.place: inner for inner, _ in places}.values():
                self._stored[inner.place] = tuple(found[inner.place][name] for name in _names(inner))


def _names(layer: KerasLayer) -> Names:
    return VARIABLES[layer.kind](layer) if layer.kind in VARIABLES and not layer.is_operation else ()


def _trainable(layer: KerasLayer) -> bool:
    return layer.config.get("trainable", True) is not False


def _trained(layer: KerasLayer) -> Iterator[tuple[KerasLayer, str]]:
    """Weights of a layer and all inside it that are trained, as (layer, name)."""
    if _trainable(layer):
        yield from ((layer, name) for name in _names(layer) if name not in FIXED)
        for _, inner in children(layer):
            yield from _trained(inner)


def _untrained(layer: KerasLayer) -> Iterator[tuple[KerasLayer, str]]:
    """The others; of a frozen layer all."""
    frozen = not _trainable(layer)
    yield from ((layer, name) for name in _names(layer) if frozen or name in FIXED)
    for _, inner in children(layer):
        if frozen:
            yield from _trained(inner)
        yield from _untrained(inner)


def _check_name(layer: KerasLayer, name: str, path: str) -> None:
    """Refuse a list whose order is not understood: where a stored name is a role's, it must be this one's."""
    last = path.split("/")[-1].split(":")[0]
    roles = ("kernel", "bias", "gamma", "beta", "moving_mean", "moving_variance", "recurrent_kernel", "alpha")
    if last in roles and not (name == last or name.endswith(f"_{last}")):
        what = f"the weights {path[:200]!r} stand where the {name} of {layer.kind} '{layer.name}' should"
        raise ModelError(what, where=layer.file, hint="save the model again with a current Keras, as .keras")
