"""Ordering a whole network on a target: what `dovetail schedule` asks for, and what it gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dovetail.graph.graph import Graph
from dovetail.graph.types import Array


@dataclass(frozen=True)
class OrderRequest:
    """What a user asks for."""

    settings: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the hardware that differ from the target's own."""
    rules: Path | None = None
    """A file of the user's own rules, in the target's own form."""
    seconds: float = 5.0
    """To spend on better orders than the first."""
    inputs: Mapping[str, Array] | None = None
    """Inputs to execute the order on; None to leave that out."""
    progress: Callable[[str], None] = lambda text: None
    """Told what is being done, and every better order."""


@dataclass(frozen=True)
class Ordered:
    """An order, ready to show."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """A table for people: one row per layer."""
    notes: tuple[str, ...]
    """Sentences below it: how long it takes, how near to the bound that is."""
    files: Mapping[str, bytes]
    """What is written out, by relative path."""


Ordering = Callable[[Graph, OrderRequest], Ordered]
"""Orders a graph, integer or float; raises DovetailError where it cannot."""
