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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from typing import Any, ClassVar, TypeVar

from dovetail.errors import ModelError
from dovetail.ir.types import Array, Shape
from dovetail.read.keras.archive import KerasFile
from dovetail.read.values import AGAIN, FOLD, OTHERWISE, SMALLER, Refusing, words
from dovetail.records import Record, field

ADVICE: Mapping[str, str] = {
    OTHERWISE: "say it with standard layers and settings, and save the model again",
    AGAIN: "save the whole model again with model.save('model.keras'): what this file says contradicts itself",
    FOLD: "make it a constant, and save the model again",
    SMALLER: "make the network smaller there, and save it again",
}
"""Advice for each kind of refusal."""

MAX_NUMBER = 1 << 31
"""Integers in a configuration are smaller."""

TRAINING_ONLY = words(
    "name trainable dtype batch_input_shape batch_shape build_input_shape autocast seed rate use_cudnn noise_shape "
    "stddev l1 l2 momentum dropout recurrent_dropout renorm_momentum synchronized fused unit_forget_bias "
    "implementation unroll input_dtype input_length input_dim force_generator seed_generator supports_masking "
    "symbolic_call"
)
"""Settings without a meaning for a computed result; those of initialisers and the like are told by their names."""

_TRAINING_ENDINGS = words("_initializer _regularizer _constraint _quantizer")


T = TypeVar("T")


class Reference(Record):
    """One result of one call of a layer."""

    layer: str
    call: int
    """Which call, counted as the file counts."""
    result: int


class KerasCall(Record):
    """Arguments of a layer's call: constants, lists, slices, and `Reference`s or, once computed, `Value`s."""

    arguments: tuple[Any, ...]
    named: Mapping[str, Any] = field(default_factory=dict)

    def all(self, kind: type[T]) -> list[T]:
        """Everything of a kind among the arguments, in order."""
        return [leaf for leaf in leaves((self.arguments, self.named)) if isinstance(leaf, kind)]


def listed(value: Any, count: int = 1) -> list[Any]:
    """A list's or tuple's members; any other value so many times."""
    return [*value] if isinstance(value, list | tuple) else [value] * count


def leaves(value: Any) -> Iterator[Any]:
    """The innermost members of nested lists, tuples and mappings, in order; mappings in the order of their keys."""
    if isinstance(value, Mapping):
        value = tuple(value[key] for key in sorted(value))
    if isinstance(value, list | tuple):
        for part in value:
            yield from leaves(part)
    else:
        yield value


class KerasNetwork(Record):
    """Layers and how they are called."""

    layers: tuple[KerasLayer, ...]
    calls: Mapping[str, tuple[KerasCall, ...]]
    """The calls of each layer, by its name."""
    inputs: tuple[Reference, ...]
    outputs: tuple[Reference, ...]


@dataclass(frozen=True)
class KerasLayer(Refusing):
    """One layer, or one operation of `keras.ops`."""

    advice: ClassVar[Mapping[str, str]] = ADVICE
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
    parts: Mapping[str, KerasLayer] = dataclass_field(default_factory=dict)
    """Layers it holds, by the name of the attribute."""
    network: KerasNetwork | None = None
    """The layers of a model."""
    read: set[str] = dataclass_field(default_factory=set)
    """Settings its importer has honoured."""

    @property
    def origin(self) -> str:
        """The layer as `Node.origin` names it."""
        return f"{self.kind} ({self.name})"

    @property
    def where(self) -> str:
        return f"{self.file}, {self.kind} '{self.name}' ({self.place})"

    def get(self, key: str, default: Any = None) -> Any:
        """A setting, now honoured; `default` where it is absent or null."""
        self.read.add(key)
        found = self.config.get(key)
        return default if found is None else found

    def ignore(self, *keys: str) -> None:
        """Settings that follow from others, or mean nothing here."""
        self.read.update(keys)

    def unfit(self, fault: object, key: str, value: object, wanted: str) -> None:
        """Refuse a setting's value, where it is at fault: it "must be ..."."""
        self.wrong_if(fault, f"the setting {key} = {value!s:.80} {wanted}")

    def whole(self, key: str, default: int | None = None, low: int = 1) -> int:
        """An integer setting of at least `low`."""
        return self._whole(key, self.get(key, default), low)

    def _whole(self, key: str, value: Any, low: int) -> int:
        odd = type(value) not in (int, float) or value != value // 1 or not low <= value < MAX_NUMBER
        self.unfit(odd, key, value, f"must be an integer of at least {low}")
        return int(value)

    def wholes(self, key: str, count: int, default: Any = None, low: int = 1) -> Shape:
        """`count` integers of at least `low`; one alone stands for all."""
        values = listed(found := self.get(key, default), count)
        self.unfit(len(values) != count, key, found, f"must be {count} integers")
        return tuple(self._whole(key, value, low) for value in values)

    def axes(self, key: str, rank: int, default: Any = -1) -> Shape:
        """One axis or several, counted from the front, in rising order."""
        values = listed(found := self.get(key, default))
        numbers = [self._whole(key, value, -rank) for value in values[: rank + 1]]
        axes = sorted({number % rank for number in numbers if number < rank} if rank else ())
        self.unfit(not values or len(axes) != len(values), key, found, f"must name different axes of {rank}")
        return tuple(axes)

    def number(self, key: str, default: float) -> float:
        """A real setting."""
        found = self.get(key, default)
        if isinstance(found, Mapping):  # Keras 2 wrote numpy numbers as {"type": "ndarray", "value": ...}
            found = found.get("value")
        self.unfit(type(found) not in (int, float) or math.isnan(found), key, found, "must be a number")
        return float(found)

    def flag(self, key: str, default: bool = False) -> bool:
        """A setting that is true or false; 1 and 0 mean the same to Keras."""
        found = self.get(key, default)
        self.unfit(found not in (True, False), key, found, "must be true or false")
        return bool(found)

    def choice(self, key: str, default: str, *known: str) -> str:
        """A setting that is one of some words."""
        found = self.get(key, default)
        if found not in known:
            raise self.refuse(f"the setting {key} = {found!s:.80} is not supported, only {', '.join(known)}")
        return str(found)

    @property
    def channels_first(self) -> bool:
        """True where images are NCHW."""
        return self.choice("data_format", "channels_last", "channels_last", "channels_first") == "channels_first"

    @property
    def policy(self) -> Mapping[str, Any]:
        """The type it computes in, as Keras serialises that: its "name", and a "mode" where it is quantised."""
        found = self.get("dtype")
        if not isinstance(found, Mapping):
            return {"name": found}
        inner = found.get("config")
        return inner if isinstance(inner, Mapping) else {"name": found.get("class_name")}

    def check_settings(self) -> None:
        """Refuse a setting that no one has honoured and that is set to something."""
        for key, value in self.config.items():
            ignored = key in self.read or key in TRAINING_ONLY or key.endswith(_TRAINING_ENDINGS)
            if not ignored and value not in (None, False, 0, "", [], {}):
                raise self.refuse(f"the setting {key} = {value!s:.80} is not supported")


FIXED = words("moving_mean moving_variance mean variance count")
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
    **dict.fromkeys(words("Dense Conv1D Conv2D Conv1DTranspose Conv2DTranspose"), _biased("kernel")),
    **dict.fromkeys(words("DepthwiseConv1D DepthwiseConv2D Projection"), _biased("kernel")),
    **dict.fromkeys(words("SeparableConv1D SeparableConv2D"), _biased("depthwise_kernel", "pointwise_kernel")),
    **dict.fromkeys(words("LayerNormalization GroupNormalization"), _scaled),
    "BatchNormalization": lambda layer: (*_scaled(layer), "moving_mean", "moving_variance"),
    "RMSNormalization": lambda layer: ("scale",),
    "PReLU": lambda layer: ("alpha",),
    "Embedding": lambda layer: ("embeddings",),
    "EinsumDense": lambda layer: ("kernel", *(("bias",) if layer.get("bias_axes") else ())),
    "Normalization": lambda layer: () if layer.get("mean") is not None else ("mean", "variance", "count"),
    "Attention": _attention,
    **dict.fromkeys(words("LSTMCell GRUCell SimpleRNNCell"), _biased("kernel", "recurrent_kernel")),
}
"""Names of a class's own weights, in Keras's order. Classes without an entry have none."""

PROJECTIONS = words("query_dense key_dense value_dense output_dense")
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
        self._stored: dict[str, dict[str, str]] = {}
        """Paths of each layer's weights by their names, by the layer's place."""
        self._shared: dict[str, str] = {}
        """Paths of shared layers' weights in a `.keras` file: the place of the first of them."""
        if file.by_path:
            old = not file.weights.members("layers")
            self._walk(model, "", "_layer_checkpoint_dependencies" if old else "layers")
        else:
            self._lists(model)

    def of(self, layer: KerasLayer) -> dict[str, Array]:
        """The layer's own weights, float32, by name; raises ModelError where they are missing or not finite."""
        names, stored = _names(layer), self._stored.get(layer.place, {})
        what = f"the layer has the weights {', '.join(names)}; the file holds {len(stored)} for it"
        layer.wrong_if(len(names) != len(stored), what)
        # The count of a Normalization is how many samples it has seen.
        return {name: self._file.weights.array(path) for name, path in stored.items() if name != "count"}

    def _walk(self, layer: KerasLayer, path: str, layers: str) -> None:
        """Note the groups of a layer and of all inside it."""
        path = self._shared.setdefault(layer.shared, path) if layer.shared else path
        weights, held, names = self._file.weights, f"{path}/vars", _names(layer)
        if names:
            members = weights.members(held) or []
            keys = [*names, *members][: len(members)]  # what is too many counts, under any name
            self._stored[layer.place] = {key: f"{held}/{index}" for index, key in enumerate(keys)}
        for attribute, inner in children(layer):
            below = f"{path}/{attribute}"
            if attribute.startswith("layers/"):
                below = f"{path}/{layers}/{attribute.removeprefix('layers/')}"
            elif not weights.members(below.lstrip("/")):
                below = f"{path}/_{attribute}"  # Keras 2 kept some parts in private attributes
            self._walk(inner, below.lstrip("/"), layers)

    def _lists(self, model: KerasLayer) -> None:
        """Deal out the lists of an `.h5` file."""
        assert model.network is not None
        weights = self._file.weights
        others = weights.names("model_weights/top_level_model_weights", "weight_names")
        model.wrong_if(others, "the model has weights outside its layers")
        for layer in model.network.layers:
            places, group = _in_order(layer), f"model_weights/{layer.name}"
            paths = [path for path in weights.names(group, "weight_names") if _last(path) not in RANDOM]
            wanted = ", ".join(name for *_, name in places) or "none"
            what = f"the layer has the weights {wanted}; the file holds {len(paths)} for it"
            layer.wrong_if(len(paths) != len(places), what)
            for (_, inner, name), path in zip(places, paths, strict=True):
                _check_name(inner, name, path)
                path = "/".join(filter(None, f"{group}/{path}".split("/")))
                self._stored.setdefault(inner.place, {})[name] = path


def _last(path: str) -> str:
    """The name of a weight at the end of its path, without its count."""
    return path.split("/")[-1].split(":")[0]


def _names(layer: KerasLayer) -> Names:
    return VARIABLES[layer.kind](layer) if layer.kind in VARIABLES and not layer.is_operation else ()


def _in_order(layer: KerasLayer) -> list[tuple[bool, KerasLayer, str]]:
    """Weights of a layer and all inside it, as (never trained, layer, name): those that are trained first. Nothing of a
    frozen layer is."""
    frozen = layer.config.get("trainable", True) is False
    own = [(frozen or name in FIXED, layer, name) for name in _names(layer)]
    weights = (weight for _, part in children(layer) for weight in _in_order(part))
    inner = [(frozen or fixed, part, name) for fixed, part, name in weights]
    return sorted([*own, *inner], key=lambda weight: weight[0])


_ROLES = words("kernel bias gamma beta moving_mean moving_variance recurrent_kernel alpha")


def _check_name(layer: KerasLayer, name: str, path: str) -> None:
    """Refuse a list whose order is not understood: where a stored name is a role's, it must be this one's."""
    last = _last(path)
    if last in _ROLES and not (name == last or name.endswith(f"_{last}")):
        what = f"the weights {path[:200]!r} stand where the {name} of {layer.kind} '{layer.name}' should"
        raise ModelError(what, where=layer.file, hint="save the model again with a current Keras, as .keras")
