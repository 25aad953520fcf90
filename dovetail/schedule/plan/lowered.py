"""Records of lowering: a network's statements before waits and addresses, and the answers that rounds of planning
share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from dovetail.ir.types import Array
from dovetail.program.ir import Buffer, Buffers, Role, Statement, View
from dovetail.records import Record
from dovetail.schedule.layout import LayoutPlan
from dovetail.schedule.region import CoreGroup, Homes
from dovetail.schedule.tiles.tiling import CompleteTiling
from dovetail.target.description import Target


@dataclass
class LayerStatements:
    """One layer's statements."""

    early: list[Statement] = field(default_factory=list)
    """Copies that may be made while the layer before is computed."""
    head: list[Statement] = field(default_factory=list)
    """Everything that must come before the first tile."""
    rest: list[list[Statement]] = field(default_factory=list)
    """One list for each tile, its launch first."""
    tail: list[Statement] = field(default_factory=list)
    """Copies of the last tiles' results."""


@dataclass
class LoweringCache:
    """Parts of engines as rounds of planning have lowered them, by name."""

    blobs: dict[str, tuple[CompleteTiling, list[Blob]]] = field(default_factory=dict)
    """The tiling of a part, and the packed constants of its tiles."""
    parts: dict[str, LoweredPart] = field(default_factory=dict)


class Blob(Record):
    """The packed constants of a tile side by side."""

    array: Array
    digest: bytes


class LoweredPart(Record):
    """An engine's part of a layer, lowered: the same statements as long as it lies and is cut as before."""

    source: tuple[object, ...]
    """All that it was made from, beside its tiling, the network and the target."""
    tiling: CompleteTiling
    statements: LayerStatements
    buffers: Buffers
    """The buffers it declares."""
    fetches: Mapping[str, str]
    fetched: Mapping[tuple[View, str], str]
    """Both as of a `LoweredNetwork`."""


@dataclass
class LoweredNetwork:
    """The statements of a network before waits and addresses."""

    laid: LayoutPlan
    target: Target
    homes: Homes
    cores: Mapping[str, CoreGroup]
    ends: Mapping[str, str]
    """Values made in the place of an output that is a view of them -> the output."""
    known: LoweringCache = field(default_factory=LoweringCache)
    statements: list[Statement] = field(default_factory=list)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    constants: dict[str, Array] = field(default_factory=dict)
    values: dict[str, View] = field(default_factory=dict)
    joined: dict[str, str] = field(default_factory=dict)
    """Value that others lie in -> name of its buffer."""
    fetches: dict[str, str] = field(default_factory=dict)
    """Buffer that constants are fetched into -> name of the region they are for."""
    blobs: dict[tuple[int, bytes], View] = field(default_factory=dict)
    """Alignment and digest of packed constants -> where they lie."""
    pieces: dict[str, list[Array]] = field(default_factory=dict)
    """Name of a constant -> the packed constants of a layer's tiles in it, side by side."""
    fetched: dict[tuple[View, str], str] = field(default_factory=dict)
    """Constant and memory -> the buffer that holds it for all parts of the layer, and all layers that have the same."""

    def buffer(self, name: str, memory: str, nbytes: int, role: Role) -> str:
        """Declare a buffer; returns its name."""
        self.buffers[name] = Buffer(name, memory, nbytes, role)
        return name

    def contents(self) -> dict[str, Array]:
        """The bytes of every constant."""
        return self.constants | {name: np.concatenate(pieces) for name, pieces in self.pieces.items()}
