"""The mapping as a JSON file that other tools can read, edit and give back. What comes in is not trusted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.errors import PlanError
from dovetail.graph.graph import Graph
from dovetail.mesh.choice import Objective
from dovetail.mesh.cuts import Cut
from dovetail.mesh.execute import check_covered
from dovetail.mesh.layers import Layer, layers_of, output_layers
from dovetail.mesh.loads import loads_of
from dovetail.mesh.mapping import Mapped, wanted
from dovetail.mesh.partition import Partitioned, Section, Stage, make_stage
from dovetail.mesh.place import Placed
from dovetail.mesh.stream import Streaming
from dovetail.mesh.tables import tables_of
from dovetail.mesh.topology import Topology
from dovetail.mesh.traffic import traffic_of
from dovetail.partition import Region

SCHEMA = 1
_MOST_BYTES = 512 << 20
_MOST_SLOTS = 1024
_HINT = "edit a file that dovetail mesh wrote; the elements of pieces, cuts and slots may be changed"


def mapping_json(mapped: Mapped) -> bytes:
    """The mapping as JSON text: per stage its cut, and per piece its element (column and row of the chip, number on
    it), box, bytes and key; per chip its routing entries."""
    parts = mapped.parts
    content = {
        "schema": SCHEMA,
        "network": parts.graph.name,
        "objective": parts.objective.value,
        "boards": parts.mesh.boards,
        "chips": parts.mesh.chips,
        "elements_per_chip": parts.mesh.per_chip,
        "usable_bytes": parts.mesh.usable,
        "sections": [_section(mapped, index) for index in range(len(parts.sections))],
    }
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


def _section(mapped: Mapped, index: int) -> dict[str, Any]:
    section, placed, tables = mapped.parts.sections[index], mapped.placed[index], mapped.tables[index]
    found: dict[str, Any] = {"streamed": _streamed(section.streaming)}
    stages = []
    for stage in section.stages:
        cut = stage.cut
        one: dict[str, Any] = {"layer": stage.layer.name, "cut": [cut.rows, cut.columns, cut.channels, cut.sums],
                               "slots": list(stage.slots)}  # fmt: skip
        if placed is not None and tables is not None:
            numbers = range(stage.first, stage.first + stage.pieces)
            one["pieces"] = [
                {"element": _named(mapped.topology, int(placed.element[number])), "box": box, "bytes": used,
                 "key": int(tables.key[number])}
                for number, box, used in zip(numbers, stage.boxes.tolist(), stage.memory.tolist(), strict=True)
            ]  # fmt: skip
        stages.append(one)
    found["stages"] = stages
    if tables is not None:
        found["routes"] = [
            {"chip": list(mapped.topology.places[chip]), "entries": np.column_stack(
                [array[tables.chip == chip] for array in (tables.first, tables.keys, tables.ways, tables.local)]
            ).tolist()}
            for chip in np.unique(tables.chip).tolist()
        ]  # fmt: skip
    return found


def _streamed(streaming: Streaming | None) -> dict[str, int] | None:
    if streaming is None:
        return None
    return {"bands": streaming.bands, "slices": streaming.slices, "depths": streaming.depths}


def _named(topology: Topology, element: int) -> list[int]:
    chip, number = divmod(element, topology.mesh.per_chip)
    return [*topology.places[chip], number]


def read_mapping(path: Path, graph: Graph, regions: Sequence[Region], topology: Topology) -> Mapped:
    """A mapping of a resident network from a file; boxes, bytes, keys and routes are made anew.

    Raises:
        PlanError: the file is damaged, names what is not there, leaves a piece out, gives an element two pieces, uses
            one that is faulty, or a piece does not fit; says where.
    """
    content = _load(path)
    where = path.name
    if content.get("schema") != SCHEMA or not isinstance(content.get("sections"), list):
        raise PlanError(f"this is no mapping of schema {SCHEMA}", where=where, hint=_HINT)
    sections = content["sections"]
    if len(sections) != 1 or not isinstance(sections[0], dict) or sections[0].get("streamed") is not None:
        raise PlanError(f"only networks that are resident as a whole are read back; this has {len(sections)} sections",
                        where=where, hint=_HINT)  # fmt: skip
    layers = layers_of(graph, regions)
    outputs = output_layers(graph, layers, regions)
    given = _listed(sections[0], "stages", len(layers), where)
    stages: list[Stage] = []
    elements: list[int] = []
    for layer, one in zip(layers, given, strict=True):
        first = stages[-1].first + stages[-1].pieces if stages else 0
        stages.append(_stage(one, layer, first, topology, where))
        elements += _elements(one, stages[-1], topology, where)
    _check_elements(elements, stages, topology, where)
    try:
        objective = Objective(str(content.get("objective")))
    except ValueError:
        raise PlanError(f"there is no objective {str(content.get('objective'))[:40]!r}", where=where,
                        hint=_HINT) from None  # fmt: skip
    section = Section(tuple(stages))
    parts = Partitioned(graph, layers, outputs, topology.mesh, objective, (section,))
    traffic = traffic_of(section, wanted(parts, 0))
    check_covered(section, traffic)
    element = np.array(elements, np.int64)
    placed = Placed(section, topology, traffic, element, loads_of(traffic, topology, element))
    return Mapped(parts, topology, (placed,), (tables_of(placed),))


def _load(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise PlanError(f"the file has more than {_MOST_BYTES} bytes", where=path.name, hint=_HINT)
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise PlanError(f"the mapping cannot be read: {error.strerror}", where=path.name,
                        hint="check the spelling and the permission to read") from None
    except (ValueError, RecursionError) as error:
        raise PlanError(f"the mapping is no JSON: {str(error)[:100]}", where=path.name, hint=_HINT) from None
    if not isinstance(content, dict):
        raise PlanError("the mapping is no JSON object", where=path.name, hint=_HINT)
    return content


def _listed(content: dict[str, Any], name: str, count: int, where: str) -> list[dict[str, Any]]:
    found = content.get(name)
    if not isinstance(found, list) or len(found) != count or not all(isinstance(one, dict) for one in found):
        many = len(found) if isinstance(found, list) else 0
        what = f"'{name}' has {many} entries, {count} are needed"
        raise PlanError(f"a piece is missing: {what}" if name == "pieces" else what, where=where, hint=_HINT)
    return found


def _whole(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _stage(one: dict[str, Any], layer: Layer, first: int, topology: Topology, where: str) -> Stage:
    """The stage of a layer as the file has it."""
    at = f"{where}: {layer.name}"
    if one.get("layer") != layer.name:
        raise PlanError(f"the layer here is {layer.name}, not {str(one.get('layer'))[:40]!r}", where=where,
                        hint="the file is of another network")  # fmt: skip
    array, (height, width, channels) = topology.mesh.array, layer.image
    step = array.dense_outputs if layer.kind == "dense" else array.rows
    columns = -(-width // array.columns) if layer.on_array else width
    may = [total if free else 1 for total, free in zip((height, columns, -(-channels // step)), layer.cuttable,
                                                       strict=True)]  # fmt: skip
    limits = (*may, -(-layer.summed // layer.unit))
    cut, slots = one.get("cut"), one.get("slots")
    if not isinstance(cut, list) or len(cut) != 4 or not all(
        _whole(count, 1, limit) for count, limit in zip(cut, limits, strict=True)
    ):
        raise PlanError(f"a cut is four numbers of parts, at most {list(limits)}, not {str(cut)[:60]}", where=at,
                        hint=_HINT)
    if not isinstance(slots, list) or len(slots) != len(layer.readings) or not all(
        _whole(count, 1, _MOST_SLOTS) for count in slots
    ):
        raise PlanError(f"slots are {len(layer.readings)} numbers of inputs, not {str(slots)[:60]}", where=at,
                        hint=_HINT)
    try:
        return make_stage(layer, Cut(*cut), tuple(slots), topology.mesh, first)
    except PlanError as error:
        raise PlanError(error.what, where=at, hint=error.hint) from None


def _elements(one: dict[str, Any], stage: Stage, topology: Topology, where: str) -> list[int]:
    """The elements of a stage's pieces."""
    at = f"{where}: {stage.layer.name}"
    index = {place: number for number, place in enumerate(topology.places)}
    found = []
    for number, piece in enumerate(_listed(one, "pieces", stage.pieces, at)):
        place = piece.get("element")
        if not isinstance(place, list) or len(place) != 3 or not all(_whole(value, 0, 1 << 20) for value in place):
            place = [-1, -1, -1]
        if (place[0], place[1]) not in index or place[2] >= topology.mesh.per_chip:
            given = str(piece.get("element"))[:40]
            raise PlanError(f"piece {number} is on an element that does not exist: {given}", where=at,
                            hint="an element is column and row of its chip, and its number on it")  # fmt: skip
        if piece.get("box", stage.boxes[number].tolist()) != stage.boxes[number].tolist():
            raise PlanError(f"piece {number} has another box than its cut gives", where=at,
                            hint=f"leave boxes out, or give {stage.boxes[number].tolist()}")  # fmt: skip
        found.append(index[place[0], place[1]] * topology.mesh.per_chip + place[2])
    return found


def _check_elements(elements: Sequence[int], stages: Sequence[Stage], topology: Topology, where: str) -> None:
    """Every element once, and only those that may be used."""
    usable = set(topology.elements.tolist())
    taken: dict[int, str] = {}
    names = [f"piece {number} of {stage.layer.name}" for stage in stages for number in range(stage.pieces)]
    for element, name in zip(elements, names, strict=True):
        place = _named(topology, element)
        if element in taken:
            raise PlanError(f"the element {place} is booked twice: for {taken[element]} and for {name}", where=where,
                            hint="give one of them another element")  # fmt: skip
        if element not in usable:
            raise PlanError(f"the element {place} of {name} is faulty or reserved", where=where,
                            hint="give it another element")  # fmt: skip
        taken[element] = name
