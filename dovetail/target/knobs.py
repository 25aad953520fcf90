"""Knobs: what may be chosen about how a region is computed, declared as data for the tuner and for a user's file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

Value = int | str
"""The setting of a knob."""
Choice = Mapping[str, Value]
"""Settings by knob name; a knob that is absent is left to whoever declared it."""


@dataclass(frozen=True)
class Knob:
    """One thing that may be chosen."""

    name: str
    """A lower-case identifier, unique among the knobs of a region."""
    values: tuple[Value, ...]
    """What it may be set to, at least one."""
    sentence: str
    """What it sets and in which unit."""


def _no_problem(choice: Choice) -> str | None:
    return None


@dataclass(frozen=True)
class Space:
    """The choices there are for one region."""

    knobs: tuple[Knob, ...]
    problem: Callable[[Choice], str | None] = _no_problem
    """The sentence why a choice (whole or partial, every value one of its knob's) is not allowed; None when it is.
    A choice that is not allowed is never tried."""

    @property
    def size(self) -> int:
        """Number of whole choices, those that are not allowed included."""
        total = 1
        for knob in self.knobs:
            total *= len(knob.values)
        return total

    def point(self, index: int) -> dict[str, Value]:
        """The whole choice number `index` of `size`, the last knob turning fastest."""
        found: dict[str, Value] = {}
        for knob in reversed(self.knobs):
            index, position = divmod(index, len(knob.values))
            found[knob.name] = knob.values[position]
        return {knob.name: found[knob.name] for knob in self.knobs}

    def points(self) -> Iterator[dict[str, Value]]:
        """Every whole choice that is allowed, in the order of `point`."""
        names = [knob.name for knob in self.knobs]
        for values in product(*(knob.values for knob in self.knobs)):
            choice = dict(zip(names, values, strict=True))
            if self.problem(choice) is None:
                yield choice

    def refusal(self, choice: Choice) -> str | None:
        """Why a choice is none of this space: an unknown knob, a value out of range, a problem. None when it is one."""
        known = {knob.name: knob for knob in self.knobs}
        for name, value in choice.items():
            if name not in known:
                return f"there is no knob '{name}' here; there is {', '.join(known) or 'none'}"
            allowed = known[name].values
            if not any(type(value) is type(one) and value == one for one in allowed):
                return f"{name} = {value} is out of range; it may be {', '.join(map(str, allowed))}"
        return self.problem(choice)
