"""Sizes of one MAERI, and what the user asks of an order beyond what the hardware does.

The structure is the published one: distribution tree, multipliers, augmented reduction tree, collection bus.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from dovetail.errors import ModelError, TargetError

TAIL_CYCLES = 4
"""Cycles from the last product to its sum at the collection bus, beside one per level of the virtual neuron's tree:
multiplier, bus and the two ends of the trees (fits the public simulator's runs, where 4 to 6 are seen)."""
STAGE_CYCLES = 3
"""Cycles of the stage behind the collection bus, a sum per line and cycle: multiply, shift, limit. It is ours."""


@dataclass(frozen=True, slots=True)
class MaeriConfig:
    """One MAERI.

    Raises:
        TargetError: a size is not possible.
    """

    multipliers: int = 64
    """Multiplier switches, the leaves of the trees: a power of two."""
    distribution: int = 64
    """Values the distribution tree sends per cycle."""
    collection: int = 64
    """Results the collection bus takes per cycle: its lines."""
    ports: bool = True
    """Whether each of these comes through a port of its own that feeds only its share of neighbouring multipliers (as
    in the public simulator); else any value may go to any multipliers (a fat tree, as the mRNA mapper assumes)."""
    accumulation_buffer: bool = True
    """Whether sums that need several steps add up behind the reduction tree. Without it one more multiplier per virtual
    neuron carries the sum so far back into the tree."""
    weight_depth: int = 2048
    """Weights a multiplier holds: the most steps one sum may need."""
    prefetch: int = 0
    """Further sets of weights a multiplier holds. Without one a multiplier either multiplies or gets weights; with one,
    the next filter's weights come in cycles in which the ports have no inputs to send."""
    fold: bool = True
    """Whether a dot product larger than the virtual neuron may be computed in several steps."""
    padding: bool = True
    """Whether a task may surround its image with the zero point; else what it reads is padded in memory."""
    requantise: bool = True
    """Whether each line of the collection bus ends in a stage that scales, rounds and limits sums to int8, as
    TensorFlow Lite Micro does, and adds images; else the engine gives 32-bit sums. The public RTL has none."""

    def __post_init__(self) -> None:
        """Check every limit."""
        for name in ("multipliers", "distribution", "collection"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise _error(f"{name} must be a power of two, is {value}")
        if self.multipliers < 2:
            raise _error(f"multipliers must be at least 2, are {self.multipliers}")
        for name in ("distribution", "collection"):
            if getattr(self, name) > self.multipliers:
                raise _error(f"{name} must be at most the {self.multipliers} multipliers, is {getattr(self, name)}")
        if self.weight_depth < 1 or self.prefetch < 0:
            raise _error(
                f"weight_depth must be at least 1 and prefetch at least 0, are {self.weight_depth} and {self.prefetch}"
            )

    @property
    def levels(self) -> int:
        """Levels of adders, the root included."""
        return self.multipliers.bit_length() - 1

    @property
    def port_width(self) -> int:
        """Multipliers one port of the distribution tree feeds."""
        return self.multipliers // self.distribution

    @property
    def shared_ports(self) -> bool:
        """Whether a port feeds several multipliers."""
        return self.distribution < self.multipliers


def with_multipliers(config: MaeriConfig, multipliers: int) -> MaeriConfig:
    """The configuration with so many multipliers, and networks as wide as before or as the multipliers."""
    widths = {name: min(getattr(config, name), multipliers) for name in ("distribution", "collection")}
    return replace(config, multipliers=multipliers, **widths)


def configured(config: MaeriConfig, settings: Mapping[str, int]) -> MaeriConfig:
    """A configuration with some sizes changed. Where only the multipliers are, both bandwidths follow them.

    Raises:
        TargetError: there is no such size, or it is not possible.
    """
    kinds = {field.name: type(getattr(config, field.name)) for field in fields(config)}
    for name in settings:
        if name not in kinds:
            raise TargetError(f"there is no size '{name}'", where="MAERI configuration", hint=f"use {', '.join(kinds)}")
    found = {name: kinds[name](value) for name, value in settings.items()}
    for name in ("distribution", "collection"):
        if "multipliers" in found and getattr(config, name) == config.multipliers:
            found.setdefault(name, found["multipliers"])
    return replace(config, **found)


def _error(what: str) -> TargetError:
    return TargetError(what, where="MAERI configuration", hint="change the MaeriConfig, or --set for this size")


MAX_BYTES = 1 << 20
"""Largest file of rules read, in bytes."""


@dataclass(frozen=True)
class Rules:
    """Conditions on an order; layers are named as the model names them."""

    before: tuple[tuple[str, str], ...] = ()
    """(x, y): y begins when all results of x exist."""
    apart: tuple[tuple[str, str], ...] = ()
    """(x, y): the two never work at the same time."""
    at_most: int | None = None
    """Virtual neurons that work at the same time; None for as many as fit."""
    whole_filters: bool = False
    """Whether all sums of an output channel come from one virtual neuron, as large as its kernel where that fits."""


def load_rules(path: Path) -> Rules:
    """Read rules from a small YAML file: `before` and `apart` are lists of pairs of layers, `at_most` a number,
    `whole_filters` true or false.

    Raises:
        ModelError: the file cannot be read, or says something else.
    """
    import yaml  # type: ignore[import-untyped]

    def wrong(what: str, hint: str) -> ModelError:
        return ModelError(what, where=str(path), hint=hint)

    if not path.is_file() or path.stat().st_size > MAX_BYTES:
        what = f"there is no such file, or it is larger than {MAX_BYTES} bytes"
        raise wrong(what, "check the spelling; rules are a small YAML file")
    try:
        found = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise wrong(f"this is not YAML: {error}", "write rules such as before: [[conv_0, conv_2]]") from error
    keys = [field.name for field in fields(Rules)]
    if not isinstance(found, dict) or set(found) - set(keys):
        raise wrong(f"rules are a mapping with some of {', '.join(keys)}", "leave out what is not one of these keys")
    most, whole = found.get("at_most"), found.get("whole_filters", False)
    if not (most is None or (type(most) is int and most >= 1)):
        what = f"at_most must be a number of virtual neurons, at least 1, is {most!r}"
        raise wrong(what, "give a whole number, such as at_most: 4")
    if type(whole) is not bool:
        raise wrong(f"whole_filters must be true or false, is {whole!r}", "give true or false")
    pairs = {key: found.get(key) or [] for key in ("before", "apart")}
    for key, listed in pairs.items():
        if not (isinstance(listed, list) and all(_is_pair(one) for one in listed)):
            raise wrong(f"{key} must be a list of pairs of layer names", f"write it such as {key}: [[conv_0, conv_2]]")
    before, apart = (tuple((x, y) for x, y in listed) for listed in pairs.values())
    return Rules(before, apart, most, whole)


def _is_pair(one: object) -> bool:
    return isinstance(one, list) and len(one) == 2 and all(isinstance(name, str) for name in one)
