"""What lowering makes: a network's statements before waits and addresses, and what a round of planning keeps of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from dovetail.ir.types import Array
from dovetail.program.ir import Buffer, Role, Statement, View
from dovetail.schedule.layout import LayoutPlan
from dovetail.schedule.partition import Region
from dovetail.schedule.tiles.tiling import Tiling
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
    """What rounds of planning have lowered: parts of engines that lie and are cut as they did are the same
    statements."""

    blobs: dict[str, tuple[Tiling, list[Blob]]] = field(default_factory=dict)
    """Region, or part of one -> how it is cut, and the packed constants of its tiles."""
    shares: dict[str, LoweredShare] = field(default_factory=dict)
    """By name of the region, or part of one."""


@dataclass(frozen=True)
class Blob:
    """The packed constants of a tile side by side."""

    array: Array
    digest: bytes


@dataclass(frozen=True)
class LoweredShare:
    """An engine's part of a layer, lowered."""

    given: tuple[object, ...]
    """All that it was made from, beside the network and the target."""
    tiling: Tiling
    parts: LayerStatements
    buffers: Mapping[str, Buffer]
    """What it has declared."""
    fetches: Mapping[str, str]
    fetched: Mapping[tuple[View, str], str]


@dataclass
class LoweredNetwork:
    """The statements of a network before waits and addresses."""

    laid: LayoutPlan
    target: Target
    homes: Mapping[str, str]
    cores: Mapping[str, int]
    statements: list[Statement] = field(default_factory=list)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    constants: dict[str, Array] = field(default_factory=dict)
    values: dict[str, View] = field(default_factory=dict)
    fetches: dict[str, str] = field(default_factory=dict)
    """Buffer that constants are fetched into -> name of the region they are for."""
    known: LoweringCache = field(default_factory=LoweringCache)
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

    def tile_buffer(self, name: str, memory: str, nbytes: int) -> str:
        """A tile's buffer: as large as the largest tile that uses the slot."""
        known = self.buffers.get(name)
        return self.buffer(name, memory, nbytes, Role.TILE) if known is None or known.nbytes < nbytes else name

    def operand(self, region: Region, value: str) -> View:
        """Where an operand lies, in the layout the region takes it in; where its DMA converts, in the value's own."""
        if value in region.converted:
            return self.values[value]
        return self.values[value].seen_as(region.layouts.get(value))

    def contents(self) -> dict[str, Array]:
        """The bytes of every constant."""
        packed = {
            name: pieces[0] if len(pieces) == 1 else np.concatenate(pieces) for name, pieces in self.pieces.items()
        }
        return self.constants | packed
