"""What no order of a network can beat: products, what must be sent, what must be collected, and the way through it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dovetail.targets.maeri.config import TAIL_CYCLES, MaeriConfig
from dovetail.targets.maeri.work import Network, Work


@dataclass(frozen=True, slots=True)
class Bound:
    """Lower bounds of the makespan, in cycles, each for a reason of its own."""

    products: int
    """All multipliers multiply in every cycle, or get a weight where they have no place for further ones."""
    distribution: int
    """Every port sends in every cycle: each weight once, each product's input where neighbours cannot pass it on, else
    that of a window's last column."""
    collection: int
    """Every line takes a sum in every cycle."""
    path: int
    """One layer after the other as they depend on each other, each with all multipliers: a layer begins when the first
    of its inputs can exist and ends when the last of them can have been used."""

    @property
    def cycles(self) -> int:
        """The largest."""
        return max(self.products, self.distribution, self.collection, self.path)


def bound(network: Network, config: MaeriConfig) -> Bound:
    """The lower bounds of a network."""
    works = network.works
    products = sum(work.layer.macs + (0 if config.prefetch else work.weights) for work in works)
    sent = sum(_sent(work, config) for work in works)
    collected = sum(work.outputs * work.positions for work in works)
    path = max(_path(network, config).values())
    return Bound(
        -(-products // config.multipliers), -(-sent // config.distribution), -(-collected // config.collection), path
    )


def _sent(work: Work, config: MaeriConfig) -> int:
    """Values that must pass the distribution tree at least.

    A port gives a value to all its multipliers at once, so per product at most one in `port_width` needs its own.
    """
    share = config.port_width if config.ports else config.multipliers
    inputs = work.layer.macs // (work.layer.columns if work.forwards else 1)
    return work.weights // share + inputs // share


def _path(network: Network, config: MaeriConfig) -> Mapping[int, int]:
    """The earliest cycle by which each layer can be done."""
    done: dict[int, int] = {}
    numbers = {work.name: number for number, work in enumerate(network.works)}
    for number, work in enumerate(network.works):
        earlier = [numbers[each.name] for each in network.before(work)]
        # The last sum of a layer reads what exists last of some layer before, or of all of them at the same time.
        last = max((done[each] for each in earlier), default=0)
        done[number] = max(_alone(work, config), last + 1 + TAIL_CYCLES)
    return done


def _alone(work: Work, config: MaeriConfig) -> int:
    """Cycles of a layer that has everything for itself."""
    products = work.layer.macs + (0 if config.prefetch else work.weights)
    return max(-(-products // config.multipliers), -(-_sent(work, config) // config.distribution)) + TAIL_CYCLES
