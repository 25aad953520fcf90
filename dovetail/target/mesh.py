"""How many copies of a target are joined to a mesh: elements on chips, chips on boards, links, shared DRAM, faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import TargetError
from dovetail.records import Record, field

if TYPE_CHECKING:
    from dovetail.ir.graph import Graph
    from dovetail.ir.types import Array

Place = tuple[int, int]
"""Column and row."""
Count = NDArray[Any]
"""Whole numbers, one per candidate piece of a layer (they broadcast)."""


class Work(Record):
    """Sizes of pieces of a layer on an element's MAC array, one entry per candidate."""

    kind: str
    """"convolution", "depthwise" or "dense"."""
    height: Count
    """Rows of the result."""
    width: Count
    """Columns of the result."""
    outputs: Count
    """Channels of the result."""
    inputs: Count
    """Channels summed over (depthwise: those of the operand), of a dense layer the elements of the operand."""
    kernel: tuple[int, int] = (1, 1)
    """Rows and columns of the window."""
    stride: tuple[int, int] = (1, 1)
    """Rows and columns from one window to the next."""
    in_height: Count | int = 1
    """Rows of the operand, padding included."""
    in_width: Count | int = 1
    """Columns of the operand, padding included."""


class MacArray(Record):
    """An element's MAC array: how long work takes, and the bytes its operands take in the element's memory.

    All functions take arrays and give arrays; clocks are those of the element.
    """

    columns: int
    """Output columns computed side by side: images are cut at multiples of it."""
    rows: int
    """Output channels computed side by side."""
    clocks: Callable[[Work], Count]
    """Function that returns the cycles from the start to the last result in memory."""
    compute: Callable[[Work], Count]
    """The multiply-accumulates alone: the floor."""
    operand: Callable[[Work], Count]
    """Bytes of the operand (padding elements included)."""
    weights: Callable[[Work], Count]
    """Bytes of the weights."""
    row_sums: Callable[[Work], Count]
    """Bytes of one row of 32-bit results."""
    dense_outputs: int = 1
    """Output channels a dense layer computes side by side."""
    place: str = ""
    """"module:variable" this array is found at by the process that runs elements' firmware."""


def pack_weights(kind: str, weights: Array) -> Array:
    """Weights as the array reads them: groups of 4 channels (16 of a dense layer), a group's innermost.

    Args:
        kind: of the layer.
        weights: int8: [O, KH, KW, I], depthwise [1, KH, KW, C], dense [N, K].

    Returns:
        int8 [groups, KH, KW, I, 4]; depthwise [groups, KH, KW, 4]; dense [groups, K, 16].
    """
    if kind == "dense":
        padded = np.pad(weights, ((0, -len(weights) % 16), (0, 0)))
        return np.ascontiguousarray(padded.reshape(-1, 16, padded.shape[1]).transpose(0, 2, 1))
    if kind == "depthwise":
        padded = np.pad(weights[0], ((0, 0), (0, 0), (0, -weights.shape[3] % 4)))
        return np.ascontiguousarray(padded.reshape(*padded.shape[:2], -1, 4).transpose(2, 0, 1, 3))
    padded = np.pad(weights, ((0, -len(weights) % 4), (0, 0), (0, 0), (0, 0)))
    return np.ascontiguousarray(padded.reshape(-1, 4, *padded.shape[1:]).transpose(0, 2, 3, 4, 1))


class PieceCosts(Protocol):
    """Costs of pieces that the element's own target computes whole."""

    def grain(self, graph: Graph) -> tuple[int, int, int]:
        """Rows, columns and channels of a layer's result at multiples of which it is cut."""

    def price(self, graph: Graph) -> int:
        """Clocks of a piece, to compare cuts by; very many where it cannot be computed."""

    def planned(self, graph: Graph, copied: Sequence[str]) -> int:
        """Clocks of a piece by its plan, with those for copying some of its operands; raises DovetailError where it
        cannot be computed."""


class CoreClocks(Record):
    """Clocks an element's core takes beside its array; `scripts/mesh_core.py` measures them of a target's core."""

    read: float = 1.0
    """Cycles for each element that work outside the array reads; the next fields are exceptions."""
    moved: float = 1.0
    """Cycles for each element of a result that is only put together from others."""
    compared: float = 1.0
    """Cycles for each element read by a maximum over windows."""
    averaged: float = 1.0
    """Cycles for each element read by a mean over windows."""
    result: float = 0.0
    """Cycles for each mean."""
    divided: float = 0.0
    """Additional cycles for each mean whose number of elements is not a power of two."""
    row: float = 1.0
    """Cycles for each element of a result that depends on its whole row, such as a softmax."""
    reordered: float = 1.0
    """Cycles for each element of a result whose axes are in another order."""
    quantised: float = 1.0
    """Cycles for each float that tables quantise, in pieces of `tabled` elements or more."""
    floating: float = 1.0
    """Cycles for each float of smaller pieces, which arithmetic quantises."""
    dequantised: float = 1.0
    """Cycles for each float of a result that is made of integers."""
    tabled: float = 256
    """Floats of a piece from which they are quantised by tables."""
    finished: float = 0.0
    """Cycles for each sum of the array that is requantised, four channels at a time."""
    gaining: float = 0.0
    """Additional cycles for each such sum if its rounding depends on the sign."""
    without_lines: float = 0.0
    """Cycles for each sum that cannot be requantised with 32-bit arithmetic."""
    passed: float = 0.0
    """Cycles for each sum that is sent to another piece, which continues it."""
    joined: float = 0.0
    """Cycles for each sum that a piece receives and continues."""
    added: float = 0.0
    """Cycles for each element of a further operand."""
    group: float = 0.0
    """Cycles for each four channels of rows that are finished together, if the rows have several pixels."""
    turn: float = 0.0
    """Cycles for each pass if the rows of a piece take several passes; the array waits in this time."""
    handling: float = 0.0
    """Cycles for each input: messages, and a single pass."""
    after: float = 0.0
    """Cycles of these from the message being ready to the start of the next input."""
    section: float = 0.0
    """Cycles for each section of an input before it computes, padding left out."""
    section_go: float = 0.0
    """Additional cycles for each pass of a piece in a section, which sets its buffers."""
    padding_row: float = 0.0
    """Cycles for each stretch of padding that is written in a section."""
    padding: float = 0.0
    """Cycles for each byte of padding."""


class Grid(Record):
    """The routers of a chip and the elements at them."""

    width: int
    """Elements in a row."""
    height: int
    """Number of rows."""
    elements: int
    """Elements at each router."""
    without: tuple[Place, ...] = ()
    """Routers that have no elements."""
    gate: Place = (0, 0)
    """The router where the links to other chips begin."""
    dram: Place = (0, 0)
    """The router of the DRAM controllers."""
    drams: int = 1
    """DRAM controllers, each of an equal part of the rate and, where pieces use but one, of the elements."""


class Rates(Record):
    """Bytes per clock of the elements."""

    port: float
    """Between an element's memory and its router."""
    noc: float
    """Between neighbouring routers of a chip, each way."""
    link: float
    """Between neighbouring chips, each way."""
    dram: float
    """Bytes per cycle of the DRAM of one chip, both directions together."""
    hop: int = 2
    """Clocks a message's first byte takes from one router to the next."""
    link_hop: int = 20
    """Clocks it takes from one chip to the next."""


class Faults(Record):
    """Elements and links that do not work; they are never used."""

    elements: frozenset[tuple[Place, int]] = frozenset()
    """Chip and number of the element on it."""
    links: frozenset[tuple[Place, int]] = frozenset()
    """Chip and the direction (place in `Mesh.directions`) its link leaves in; the other way is given by itself."""
    noc: frozenset[tuple[Place, Place, Place]] = frozenset()
    """Chip, and the two neighbouring routers: no traffic in either direction."""


class Mesh(Record):
    """Copies of a target joined to a mesh."""

    array: MacArray | PieceCosts | None
    """Array of multipliers in each element; None if their target has engines. (`dovetail mesh` then puts its
    compiler here.)"""
    grid: Grid
    """Places and connections of the elements."""
    rates: Rates
    """Cycles of elements and links."""
    board: tuple[Place, ...]
    """The chips of a board."""
    origins: tuple[Place, ...]
    """Possible places of boards, the preferred first."""
    directions: tuple[Place, ...]
    """Steps to the neighbouring chips; the opposite of one is also one of them."""
    clock: float
    """Hz of the elements."""
    usable: int
    """Bytes of an element's memory for code, stack, constants and buffers."""
    route_entries: int
    """Entries of a chip's routing table."""
    dram_bytes: int
    """Bytes of DRAM of a chip."""
    code: int = 8 * 1024
    """Bytes kept for an element's program and tables when pieces are sized; an emitted one has the last word."""
    stack: int = 2048
    """Bytes of each element's stack."""
    core: CoreClocks = field(default_factory=CoreClocks)
    """Cycles that are charged for the work of an element's core."""
    boards: int = 1
    """Number of boards."""
    chips: int | None = None
    """Only so many chips of the first board, those nearest its first place; None for whole boards."""
    reserved: int = 0
    """Elements of each chip left for others, the last ones."""
    faults: Faults = field(default_factory=Faults)
    """Elements and links that do not work."""

    @property
    def mac(self) -> MacArray:
        """The array; raises TypeError where elements have engines of a target instead."""
        if not isinstance(self.array, MacArray):
            raise TypeError("the elements have no array")
        return self.array

    @property
    def pieces(self) -> PieceCosts | None:
        """Cost model of pieces; None if `array` is the cost model."""
        return None if isinstance(self.array, MacArray) else self.array

    def places(self) -> tuple[Place, ...]:
        """Every chip, board by board."""
        if self.chips is not None:
            return tuple(sorted(self.board, key=lambda place: (max(place), place[1], place[0]))[: self.chips])
        return tuple((x + dx, y + dy) for dx, dy in self.origins[: self.boards] for x, y in self.board)

    @property
    def per_chip(self) -> int:
        """Elements on a chip."""
        return (self.grid.width * self.grid.height - len(self.grid.without)) * self.grid.elements

    def resized(self, boards: int | None = None, chips: int | None = None) -> Mesh:
        """The same of so many boards, or of so many chips of one board; as it is where neither is said.

        Raises:
            TargetError: there is room for fewer.
        """
        for number, most, text in (
            (chips, len(self.board), f"{chips} chips: a board has {len(self.board)}"),
            (boards, len(self.origins), f"{boards} boards: there are places for {len(self.origins)}"),
        ):
            if number is not None and not 1 <= number <= most:
                raise TargetError(text, where="mesh description", hint=f"choose from 1 to {most}")
        if chips is None and boards is None:
            return self
        return replace(self, boards=1 if chips else boards or self.boards, chips=chips)
