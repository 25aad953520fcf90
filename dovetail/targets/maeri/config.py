"""Sizes of one MAERI: multipliers, the two networks around them, and their buffers.

The structure is the published one (distribution tree, multipliers, augmented reduction tree, collection bus);
the shared hardware sheet maeri.md names the sources of every figure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dovetail.errors import TargetError

TAIL_CYCLES = 4
"""Cycles from the last product to its sum at the collection bus, beside one per level of the virtual neuron's tree:
multiplier, bus and the two ends of the trees (fits the public simulator's runs, where 4 to 6 are seen)."""


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
            raise _error(f"weight_depth must be at least 1 and prefetch at least 0, are {self.weight_depth} and "
                         f"{self.prefetch}")

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


def _error(what: str) -> TargetError:
    return TargetError(what, where="MAERI configuration", hint="change the MaeriConfig, or --set for this size")
