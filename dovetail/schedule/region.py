"""Regions: the records of what is computed together, which grow from stage to stage.

The partition makes a `Region`, the stages that place it an `AssignedRegion`, the layout stage a `LaidRegion`. Tiles are
made of an `EnginePart`: a laid-out region as one of its engines sees it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cached_property
from typing import Self

from dovetail.errors import TargetError
from dovetail.ir.crop import total_macs
from dovetail.ir.graph import Graph
from dovetail.ir.layout import Layout, packing_fits, physical_shape
from dovetail.ir.types import Box, Shape, full_box
from dovetail.program.ir import CORE, ValueName
from dovetail.records import Record, field
from dovetail.target.engine import Engine
from dovetail.target.offload import Offload
from dovetail.target.pattern import Choice, Match, match_pattern

Layouts = Mapping[ValueName, Layout]
"""Layouts of values; row-major where absent."""
CoreGroup = tuple[int, ...]
"""Numbers of cores that share what they compute."""
Homes = Mapping[ValueName, str]
"""The memory each value lies in."""


class Share(Record):
    """An engine's part of a region's result, and the offload that computes it."""

    engine: Engine
    offload: Offload
    box: Box | None = None
    """The part; None for the whole result."""


class Region(Record, dict=True):
    """Nodes computed together, by engines or by the core."""

    name: str
    """Short, unique, a C identifier."""
    graph: Graph
    """The nodes as a graph of their own: runtime operands are its inputs, the one result its output."""
    shares: tuple[Share, ...]
    """The engines that compute it: one in a partition, several after assignment; empty on the core."""
    reason: str
    """On the core: the sentence that says why no engine took it; empty where an engine did or none could."""
    origins: tuple[str, ...]
    """The operators of the user's model computed here."""
    copied_by: str = ""
    """The DMA's name, or "core" without one, if the region only moves elements; empty otherwise."""
    is_noop: bool = False
    """True where the core has nothing to do: the result lies in the operand, or the operands lie in the result."""

    @classmethod
    def of(cls, region: Region) -> Self:
        """A region of an earlier stage as a record of this one, nothing decided; a later stage's as it is."""
        if isinstance(region, cls):
            return region
        return cls(**{one.name: getattr(region, one.name) for one in fields(region)})

    @property
    def engine(self) -> Engine | None:
        """The engine that computes it, the first of several; None on the core."""
        return self.shares[0].engine if self.shares else None

    @property
    def offload(self) -> Offload | None:
        """The offload of `engine`; None on the core."""
        return self.shares[0].offload if self.shares else None

    @cached_property
    def match(self) -> Match | None:
        """The pattern of `offload` in `graph`; None on the core."""
        return match_of(self.shares[0].offload, self.graph) if self.shares else None

    @property
    def place(self) -> str:
        """Name of who computes it: an engine, several joined by "+", the DMA or "core"."""
        return "+".join(share.engine.name for share in self.shares) or self.copied_by or CORE

    @property
    def output(self) -> str:
        """Name of the value computed."""
        return self.graph.outputs[0]

    @property
    def shape(self) -> Shape:
        """Shape of the value computed."""
        return self.graph.types[self.output].shape

    @property
    def macs(self) -> int:
        """Multiply-accumulates, padded taps counted."""
        return total_macs(self.graph)

    @property
    def takes_strides(self) -> bool:
        """True when its operands and its result may be parts of other values: an engine's, as a rule."""
        return bool(self.shares) and all(share.offload.strided for share in self.shares)

    @property
    def is_view(self) -> bool:
        """True when the result is its operand under another shape; a constant is copied."""
        return bool(self.graph.inputs) and all(node.operator.is_view for node in self.graph.nodes)

    @property
    def is_idle(self) -> bool:
        """True when nothing is done."""
        return self.is_noop or self.is_view

    @property
    def is_kernel(self) -> bool:
        """True when a kernel of the core computes it."""
        return not (self.shares or self.copied_by or self.is_idle)


def match_of(offload: Offload, graph: Graph) -> Match:
    """The match of an offload that takes a whole graph."""
    match = match_pattern(offload.pattern, graph, graph.outputs[0])
    if isinstance(match, Match):
        return match
    raise ValueError(f"{offload.name} no longer matches by itself: {match.sentence}")


class Slot(Record):
    """The time a region is scheduled for, in cycles since the start of the network."""

    issue: int
    """The core starts it."""
    begin: int
    """It begins: engines have queues."""
    end: int
    fetch: int = 0
    """Its constants are fetched, if that is done early."""
    issued: int = 0
    """The core has started all of it."""


class AssignedRegion(Region):
    """A region with the choices of the user and of assignment."""

    choice: Choice = field(default_factory=dict)
    """Settings of the planner's knobs and the offload's (schedule/knobs.py); the planner chooses the rest."""
    slot: Slot | None = None
    """None where regions are computed one after the other."""
    cores: CoreGroup = ()
    """Numbers of the cores the user pinned it to; empty for all."""


class LaidRegion(AssignedRegion):
    """A region with the layouts of its values."""

    layouts: Layouts = field(default_factory=dict)
    """The layout it takes each operand in, and gives its result in, by value name; row-major where absent."""
    converted: frozenset[str] = frozenset()
    """Values that lie otherwise than it takes or gives them: its engine's DMA converts them on the way."""

    @property
    def parts(self) -> tuple[EnginePart, ...]:
        """The region as each of its engines sees it; numbered where there are several."""
        whole, several = full_box(self.shape), len(self.shares) > 1
        return tuple(
            EnginePart(
                f"{self.name}_part_{number}" if several else self.name,
                self.graph,
                share.engine,
                share.offload,
                share.box or whole,
                self.choice,
                self.layouts,
                self.converted,
                self.origins,
            )
            for number, share in enumerate(self.shares)
        )


class EnginePart(Record, dict=True):
    """A region, or part of one, as one engine computes it."""

    name: str
    graph: Graph
    """All of the region."""
    engine: Engine
    offload: Offload
    extent: Box
    """The box of the result that is computed."""
    choice: Choice
    layouts: Layouts
    converted: frozenset[str]
    """These three as of a `LaidRegion`."""
    origins: tuple[str, ...]

    @cached_property
    def match(self) -> Match:
        """The offload's pattern in `graph`."""
        return match_of(self.offload, self.graph)

    @property
    def output(self) -> str:
        """Name of the value computed."""
        return self.graph.outputs[0]

    @property
    def shape(self) -> Shape:
        """Shape of the region's whole result."""
        return self.graph.types[self.output].shape


def engine_layouts(region: Region | EnginePart) -> dict[str, Layout]:
    """The layouts other than row-major an engine takes and gives, by value; none for other regions.

    Raises:
        ValueError: an offload's layout does not fit the values it is for.
        TargetError: it packs values of another width.
    """
    offload, match = region.offload, region.match
    if offload is None or match is None:
        return {}
    layouts: dict[str, Layout] = {}
    for leaf, layout in offload.layouts_of(match).items():
        value = region.output if leaf == "result" else match.values.get(leaf)
        if value is None or layout.is_row_major or value in region.graph.constants:
            continue
        kind = region.graph.types[value]
        physical_shape(layout, kind.shape)
        if not packing_fits(layout, kind.dtype):
            what = f"it takes '{value}' as {layout}, whose bytes {kind.dtype.text} cannot fill"
            hint = "let Offload.layouts be a function that asks for the value's width, or limit that with a Constraint"
            raise TargetError(what, where=offload.name, hint=hint)
        if layouts.setdefault(value, layout) != layout:
            raise ValueError(f"{offload.name} takes '{value}' in two layouts, {layouts[value]} and {layout}")
    return layouts
