"""Sizes of a MAERI, of the published structure: distribution tree, multipliers, reduction tree, collection bus."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

from dovetail.errors import TargetError
from dovetail.records import Record

TAIL_CYCLES = 4
"""Cycles from the last product to its sum at the collection bus, beside one per level of the virtual neuron's tree:
multiplier, bus and the two ends of the trees (fits the public simulator's runs, where 4 to 6 are seen)."""
STAGE_CYCLES = 3
"""Cycles of the stage behind the collection bus, a sum per line and cycle: multiply, shift, limit. It is ours."""
_LEAST = {"weight_depth": 1, "joint": 1, "prefetch": 0, "feature_memory": 0, "prefetch_buffer": 0}


class MaeriConfig(Record):
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
    """Whether each value comes through a port of its own that feeds only its share of neighbouring multipliers (as in
    the public simulator); else any value may go to any multipliers (a fat tree, as the mRNA mapper assumes)."""
    accumulation_buffer: bool = True
    """Whether sums that need several steps add up behind the reduction tree. Without it one more multiplier per virtual
    neuron carries the sum so far back into the tree."""
    weight_depth: int = 2048
    """Weights a multiplier holds: the most steps one sum may need."""
    prefetch: int = 0
    """Further sets of weights a multiplier holds. Without one a multiplier either multiplies or gets weights; with one,
    the next filter's weights come in cycles in which the ports have no inputs to send."""
    feature_memory: int = 0
    """Bytes on the chip for the network's inputs and the layers' results; 0 for as many as an order needs."""
    prefetch_buffer: int = 0
    """Bytes on the chip that ports send weights and inputs from; 0 for as many as an order needs."""
    fold: bool = True
    """Whether a dot product larger than the virtual neuron may be computed in several steps."""
    padding: bool = True
    """Whether a task may surround its image with the zero point; else its image is padded in memory."""
    joint: int = 3
    """Tasks that may begin together, each with multipliers and ports of its own; 1 where one follows the other."""
    requantise: bool = True
    """Whether each line of the collection bus ends in a stage that scales, rounds and limits sums to int8, as
    TensorFlow Lite Micro does, and adds images; else the engine gives 32-bit sums. The public RTL has none."""

    def __post_init__(self) -> None:
        """Check every limit."""
        for name in ("multipliers", "distribution", "collection"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise _error(f"{name} must be a power of two, is {value}")
            if value > self.multipliers:
                raise _error(f"{name} must be at most the {self.multipliers} multipliers, is {value}")
        if self.multipliers < 2:
            raise _error(f"multipliers must be at least 2, are {self.multipliers}")
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise _error(f"{name} must be at least {least}, is {getattr(self, name)}")

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

    @property
    def feed_width(self) -> int:
        """Multipliers that any value of a port may reach: a port's own, or all of them in a fat tree."""
        return self.port_width if self.ports else self.multipliers

    @property
    def lanes(self) -> int:
        """Values that reach multipliers of one feed width in a cycle: one through a port, more through a fat tree."""
        return 1 if self.ports else self.distribution

    @property
    def bus_delay(self) -> int:
        """Cycles that a sum takes from where it leaves the tree to the input of its line."""
        return 1 + self.accumulation_buffer + self.shared_ports

    def carried(self, folds: int) -> int:
        """Multipliers that carry a sum of `folds` steps back into a virtual neuron: 1 for several steps without an
        accumulation buffer."""
        return int(folds > 1 and not self.accumulation_buffer)


def with_multipliers(config: MaeriConfig, multipliers: int) -> MaeriConfig:
    """The configuration with so many multipliers, and networks as wide as before or as the multipliers."""
    widths = {name: min(getattr(config, name), multipliers) for name in ("distribution", "collection")}
    return replace(config, multipliers=multipliers, **widths)


def configured(config: MaeriConfig, settings: Mapping[str, int]) -> MaeriConfig:
    """A configuration with some sizes changed; bandwidths that equal the multipliers follow them, if not set.

    Raises:
        TargetError: there is no such size, or it is not possible.
    """
    kinds = {field.name: type(getattr(config, field.name)) for field in fields(config)}
    for name in settings:
        if name not in kinds:
            raise TargetError(f"there is no size '{name}'", where="MAERI configuration", hint=f"use {', '.join(kinds)}")
    sizes = {name: kinds[name](value) for name, value in settings.items()}
    for name in ("distribution", "collection"):
        if "multipliers" in sizes and getattr(config, name) == config.multipliers:
            sizes.setdefault(name, sizes["multipliers"])
    return replace(config, **sizes)


def _error(what: str) -> TargetError:
    return TargetError(what, where="MAERI configuration", hint="change the MaeriConfig, or --set for this size")
