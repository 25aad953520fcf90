"""Which device answers at which address."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.errors import SimulationError
from dovetail.simulate.device import Device


@dataclass(frozen=True, slots=True)
class Window:
    """`size` bytes of addresses from `base`, answered by `device`; None stands for the simulator's harness."""

    base: int
    size: int
    device: Device | None

    @property
    def name(self) -> str:
        """Name for messages."""
        return self.device.name if self.device is not None else "the simulator's control registers"


class AddressMap:
    """Finds the window of an address.

    Raises:
        SimulationError: two windows overlap, one is misaligned, or two devices have one name.
    """

    def __init__(self, windows: Sequence[Window]) -> None:
        self.windows = tuple(sorted(windows, key=lambda window: window.base))
        self._bases = [window.base for window in self.windows]
        names = [window.name for window in self.windows]
        for name in names:
            if names.count(name) > 1:
                raise SimulationError(f"{names.count(name)} devices have this name", where=f"device '{name}'",
                                      hint="give every engine of the target a name of its own")
        for window in self.windows:
            if window.base % 4 or window.size <= 0:
                raise SimulationError(f"it has {window.size} bytes of registers at {window.base:#x}",
                                      where=f"device '{window.name}'",
                                      hint="place registers at multiples of 4, and give them at least 4 bytes")
        for lower, upper in zip(self.windows, self.windows[1:], strict=False):
            if lower.base + lower.size > upper.base:
                raise SimulationError(f"its registers overlap those of '{lower.name}' at {upper.base:#x}",
                                      where=f"device '{upper.name}'", hint="move one of the two in the target")

    def find(self, address: int) -> Window:
        """Return the window `address` lies in.

        Raises:
            SimulationError: it lies between windows.
        """
        index = bisect_right(self._bases, address) - 1
        if index >= 0 and address < self.windows[index].base + self.windows[index].size:
            return self.windows[index]
        raise SimulationError(
            "no device answers at this address",
            where=f"{address:#x}",
            hint="look at the driver's addresses; devices: "
                 f"{', '.join(f'{w.name} {w.base:#x}..{w.base + w.size - 1:#x}' for w in self.windows)}",
        )


def page_ranges(windows: Sequence[Window], page: int = 4096) -> list[tuple[int, int]]:
    """Return the (base, bytes) ranges of whole pages that cover `windows`, which are sorted, without overlaps."""
    ranges: list[tuple[int, int]] = []
    for window in windows:
        start, end = window.base // page * page, (window.base + window.size + page - 1) // page * page
        if ranges and start < ranges[-1][0] + ranges[-1][1]:
            start = ranges.pop()[0]
        ranges.append((start, end - start))
    return ranges


def neighbours(addresses: Sequence[int], gap: int = 8) -> list[tuple[int, int]]:
    """Return the (first, last) address of each run of sorted addresses that are no more than `gap` bytes apart."""
    runs: list[tuple[int, int]] = []
    for address in addresses:
        near = bool(runs) and address - runs[-1][1] <= gap
        first = runs.pop()[0] if near else address
        runs.append((first, address))
    return runs
