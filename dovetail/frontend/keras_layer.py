"""A layer of a Keras model as its configuration says it, and the settings importers ask of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dovetail.errors import ModelError

# What to do about what a reader refuses; each sentence fits many messages.
OTHERWISE = "say it with standard layers and settings, and save the model again"
AGAIN = "save the whole model again with model.save('model.keras'): what this file says contradicts itself"
FOLD = "make it a constant, and save the model again"
SMALLER = "make the network smaller there, and save it again"

MAX_NUMBER = 1 << 31
"""Integers in a configuration are smaller."""

TRAINING_ONLY = frozenset(
    {
        *("name", "trainable", "dtype", "batch_input_shape", "batch_shape", "build_input_shape", "autocast"),
        *("seed", "rate", "use_cudnn", "noise_shape", "stddev", "l1", "l2", "momentum", "dropout", "recurrent_dropout"),
        *("renorm_momentum", "synchronized", "fused", "unit_forget_bias", "implementation", "unroll", "input_dtype"),
        *("input_length", "input_dim", "force_generator", "seed_generator", "supports_masking", "symbolic_call"),
    }
)
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
class Tensor:
    """A value of the graph among the arguments of a call."""

    name: str


@dataclass(frozen=True)
class Call:
    """What a layer is called with: constants, lists, slices, and `Reference`s or, once computed, `Tensor`s."""

    arguments: tuple[Any, ...]
    named: Mapping[str, Any] = field(default_factory=dict)

    def references(self) -> list[Reference]:
        """Every result the call needs."""
        return [leaf for leaf in leaves((self.arguments, self.named)) if isinstance(leaf, Reference)]

    def tensors(self) -> list[str]:
        """Names of the graph's values among the arguments, in order."""
        return [leaf.name for leaf in leaves((self.arguments, self.named)) if isinstance(leaf, Tensor)]


def leaves(value: Any) -> Iterator[Any]:
    """What is not a list, tuple or mapping inside nested ones, in order; of mappings in the order of their keys."""
    if isinstance(value, Mapping):
        value = tuple(value[key] for key in sorted(value))
    if isinstance(value, list | tuple):
        for part in value:
            yield from leaves(part)
    else:
        yield value


@dataclass(frozen=True)
class Network:
    """Layers and how they are called."""

    layers: tuple[Layer, ...]
    calls: Mapping[str, tuple[Call, ...]]
    """The calls of each layer, by its name."""
    inputs: tuple[Reference, ...]
    outputs: tuple[Reference, ...]


@dataclass(frozen=True)
class Layer:
    """One layer, or one operation of `keras.ops`."""

    file: str
    """For messages."""
    kind: str
    """Its class, by the name Keras 3 gives it."""
    name: str
    place: str
    """Where it stands in the configuration."""
    version: int
    """Major version of the Keras that wrote it."""
    config: Mapping[str, Any]
    is_operation: bool = False
    shared: str = ""
    """What the file knows a layer by that stands in several places; empty for one that does not."""
    parts: Mapping[str, Layer] = field(default_factory=dict)
    """Layers it holds, by the name of the attribute."""
    network: Network | None = None
    """Of a model: what it is made of."""
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

    def check_settings(self) -> None:
        """Refuse a setting that no one has honoured and that is set to something."""
        for key, value in self.config.items():
            known = key in self.read or key in TRAINING_ONLY or key.endswith(_TRAINING_ENDINGS)
            if not known and value not in (None, False, 0, "", [], {}):
                raise self.refuse(f"the setting {key} = {str(value)[:80]} is not supported")
