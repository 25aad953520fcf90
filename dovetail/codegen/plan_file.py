"""The file a build keeps for its report, `dovetail-plan.json`: place and time of every buffer, and every copy.

`codegen/emit/plan_file.py` writes it; reports read it, and runs that look at what engines write. The fields are those
of the report's JSON (docs/reference/report_json.md). Layers are named by their numbers, lists of numbers by their use.
"""

from __future__ import annotations

from pathlib import Path
from typing import NotRequired, TypedDict

import msgspec

from dovetail.codegen.manifest import Count
from dovetail.documents import read_document
from dovetail.errors import BuildError
from dovetail.kernels.c import Lines

PLAN = "dovetail-plan.json"
"""Name of the file in a build."""
SCHEMA = 1
"""Version of the file. It grows when a field is removed or changes its meaning."""
_MOST_BYTES = 256 << 20


class PlanValue(TypedDict):
    """A value of the network."""

    shape: list[Count]
    dtype: str
    bytes: Count


class PlanEdge(TypedDict):
    """Values a layer reads and makes."""

    reads: Lines
    makes: str


class PlanGraph(TypedDict):
    """The network as the target computes it."""

    inputs: Lines
    outputs: Lines
    states: list[tuple[str, str]]
    """Values read and written of each state."""
    values: dict[str, PlanValue]
    edges: list[PlanEdge]
    """By layer."""


class PlanConstant(TypedDict):
    """A constant of a layer."""

    name: str
    dtype: str
    bits: Count
    elements: Count
    bytes: Count
    weights: bool
    """Whether the layer multiplies its operand with it."""


class PlanLayer(TypedDict):
    """A layer."""

    kinds: Lines
    offload: str
    reason: str
    """Why no engine computes it."""
    nothing: bool
    idle: bool
    """Whether the core only begins it."""
    products: Count
    read: Count
    """Bytes of operands, as `written` of the result, that no way to compute it can do without."""
    written: Count
    constants: list[PlanConstant]
    launches: Count
    modelled: Count
    """Cycles of the launches by the offload's cost model."""
    calls: Count


class PlanBuffer(TypedDict):
    """A buffer in a memory."""

    name: str
    role: str
    address: Count
    bytes: Count
    layers: tuple[Count, Count]
    """First and last that touch it."""
    parts: list[tuple[Count, Count, Count, Count, Count]]
    """First byte and one past the last; first statement that touches them, one past the last, and the statement by
    which the core knows that all have finished."""


class PlanMemory(TypedDict):
    """Buffers of a memory, and their times."""

    base: Count
    size: Count
    busiest: int | None
    """Statement at which most bytes are taken, -1 before the first; None where the memory holds nothing."""
    buffers: list[PlanBuffer]


PlanMove = TypedDict("PlanMove", {"layer": Count, "from": str, "to": str, "constants": bool, "bytes": Count})
"""Bytes that copies write for a layer, padding included, between two memories."""


class PlanTransfers(msgspec.Struct, frozen=True, array_like=True):
    """The transfers of a copy of a DMA; in the file a list."""

    layer: Count
    count: Count
    queue: str = ""
    """Name of the DMA's queue, where there are several DMAs."""


class PlanFile(TypedDict):
    """The file."""

    statements: Count
    begins: list[tuple[Count, Count]]
    """Statement and layer of every stretch in which the core does something for one layer."""
    graph: PlanGraph
    layers: list[PlanLayer]
    memories: dict[str, PlanMemory]
    moves: list[PlanMove]
    transfers: list[PlanTransfers]
    """Every copy of a DMA."""
    results: NotRequired[dict[str, list[tuple[Count, Count, Count]]]]
    """By engine, the bytes its launches may write: first address, one past the last, and the layer."""


def read_plan(folder: Path, layers: int) -> PlanFile:
    """The plan file of a build that has so many layers. Raises BuildError where it has none, or one of another."""
    path, hint = folder / PLAN, "compile the model again"
    if not path.is_file():
        raise BuildError(
            f"the build has no {PLAN}: it was made before there were reports", where=str(folder), hint=hint
        )
    document = read_document(path, "json", PlanFile, schema=SCHEMA, most_bytes=_MOST_BYTES, error=BuildError, hint=hint)
    plan = document.value
    edges, names = plan["graph"]["edges"], plan["graph"]["values"]
    if not len(plan["layers"]) == len(edges) == layers:
        what = f"the file does not fit the build: {len(plan['layers'])} layers, expected {layers}"
        raise document.wrong(what, ("layers",))
    numbers = [number for _, number in plan["begins"]] + [copy.layer for copy in plan["transfers"]]
    if max([*numbers, *(move["layer"] for move in plan["moves"])], default=0) >= max(layers, 1):
        raise document.wrong("something is done for a layer that is not there", ("layers",))
    if unknown := {name for edge in edges for name in (*edge["reads"], edge["makes"])} - set(names):
        raise document.wrong(f"a layer reads or makes '{min(unknown)}', which is no value", ("graph", "edges"))
    return plan
