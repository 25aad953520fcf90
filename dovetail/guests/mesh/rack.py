"""A rack of emulated elements: every element's firmware computes, and messages go by the routing tables.

An element runs when all that some of its pieces read was sent, over all inputs, as in `exact.py`; here nothing is known
of the network but what was loaded.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dovetail.farm import Farm, farm
from dovetail.guests.mesh.manifest import name_of
from dovetail.guests.mesh.topology import Topology, build_topology
from dovetail.guests.mesh.workers import ElementJob, element_setup, run_wave
from dovetail.sim.protocol import SimulationResult
from dovetail.sim.rack import RackBackend, RackContents, RackRun, RefusedError
from dovetail.target.description import Target

_HEADER = struct.Struct("<8I")
_TRANSFER_BYTES = 52
_CHIP = 0xFFFF0000


@dataclass(frozen=True)
class _RackPiece:
    """A piece by its data."""

    key: int
    sends: bool
    stores: bool
    reads: frozenset[int]
    """Keys of messages."""
    fetches: frozenset[int]
    """Numbers of tensors."""


@dataclass(frozen=True)
class _RackElement:
    """An element by what it was loaded with."""

    word: int
    firmware: bytes
    data: bytes
    pieces: tuple[_RackPiece, ...]


class EmulatedElements(RackBackend):
    """The elements of a target with a mesh, each run in an emulated core of its own."""

    def __init__(self, target: Target) -> None:
        self._target, self._setup = target, element_setup(target)
        assert target.mesh is not None, "was looked at before"
        self._topology: Topology = build_topology(target.mesh)

    def check(self, loaded: RackContents) -> None:
        elements = _elements(loaded)
        if not elements:
            raise RefusedError("no element was loaded")
        for one in elements:
            place = (one.word >> 24, one.word >> 16 & 0xFF)
            per, known = self._topology.mesh.per_chip, self._topology.chips
            if place not in known or known[place] * per + (one.word & 0xFFFF) not in self._topology.usable:
                raise RefusedError(f"this rack has no element {name_of(one.word)}")
        chips = {chip: self._routes(bytes(content)) for chip, content in loaded.routes.items()}
        for one in elements:
            for piece in one.pieces:
                if piece.sends:
                    self._reached(chips, one.word, piece.key)

    def run(self, loaded: RackContents, inputs: Sequence[Mapping[int, bytes]]) -> RackRun:
        with farm(1) as spread:  # firmware that ends its process does not end the rack's
            return self._run(spread, loaded, inputs)

    def _run(self, spread: Farm, loaded: RackContents, inputs: Sequence[Mapping[int, bytes]]) -> RackRun:
        elements = _elements(loaded)
        chips = {chip: self._routes(bytes(content)) for chip, content in loaded.routes.items()}
        brought: dict[int, list[dict[str, bytes]]] = {one.word: [{} for _ in inputs] for one in elements}
        done: dict[int, set[int]] = {one.word: set() for one in elements}
        found: dict[int, SimulationResult] = {}
        while waiting := [one for one in elements if len(done[one.word]) < len(one.pieces)]:
            ready = [(one, pieces) for one in waiting if (pieces := _ready(one, done[one.word], brought[one.word][0]))]
            if not ready:
                names = ", ".join(name_of(one.word) for one in waiting[:4])
                raise RefusedError(f"{len(waiting)} elements wait for messages nobody sends them, such as {names}")
            wave = {one.word: _job(one, pieces, brought[one.word], inputs) for one, pieces in ready}
            found |= run_wave(spread, self._setup, wave)
            for one, pieces in ready:
                done[one.word] = pieces
                for piece in sorted(pieces):
                    self._deliver(chips, one, one.pieces[piece].key, found[one.word], brought)
        return _ran(elements, found, len(inputs))

    def _deliver(
        self,
        chips: Mapping[int, _Routes],
        one: _RackElement,
        key: int,
        result: SimulationResult,
        brought: dict[int, list[dict[str, bytes]]],
    ) -> None:
        """Bring the messages of a key to whoever the tables say."""
        sent = [inference.outputs.get(str(key)) for inference in result.inferences]
        if any(content is None for content in sent):
            return
        for word in self._reached(chips, one.word, key):
            if word not in brought:
                raise RefusedError(f"a message goes to element {name_of(word)}, which was not loaded")
            for place, content in enumerate(sent):
                brought[word][place][str(key)] = content or b""

    def _reached(self, chips: Mapping[int, _Routes], word: int, key: int) -> set[int]:
        """The elements that a message from one of them comes to."""
        found, todo, seen = set(), [word & _CHIP], set()
        while todo:
            chip = todo.pop()
            routes = chips.get(chip)
            entry = next((e for e in routes.entries if key & e[1] == e[0]), None) if routes else None
            if routes is None or entry is None or chip in seen:
                raise RefusedError(f"the message {key} is lost at chip {name_of(chip)}, or goes round")
            seen.add(chip)
            if entry[3]:
                found |= {chip | number for number in routes.sets.get(entry[3], ())}
            number = self._topology.chips[chip >> 24, chip >> 16 & 0xFF]
            for way, there in enumerate(self._topology.neighbours[number].tolist()):
                if entry[2] >> way & 1:
                    if there < 0:
                        raise RefusedError(f"the message {key} leaves chip {name_of(chip)} where there is no link")
                    x, y = self._topology.places[there]
                    todo.append(x << 24 | y << 16)
        return found

    def _routes(self, content: bytes) -> _Routes:
        try:
            entries, sets = struct.unpack_from("<2I", content)
            words = struct.unpack(f"<{len(content) // 4}I", content)
            rows = [words[2 + 4 * n : 6 + 4 * n] for n in range(min(entries, len(words)))]
            place, named = 2 + 4 * entries, {}
            for _ in range(min(sets, len(words))):
                number, count = words[place : place + 2]
                named[number] = words[place + 2 : place + 2 + count]
                place += 2 + count
        except (struct.error, ValueError):
            raise RefusedError("the routing entries of a chip are damaged") from None
        if place != len(words):
            raise RefusedError("the routing entries of a chip are damaged")
        return _Routes(tuple((a, b, c, d) for a, b, c, d in rows), named)


@dataclass(frozen=True)
class _Routes:
    """Of a chip."""

    entries: tuple[tuple[int, int, int, int], ...]
    """Key, mask, directions and local set of each."""
    sets: Mapping[int, Sequence[int]]


def _elements(loaded: RackContents) -> list[_RackElement]:
    """Everything that was loaded, in the order of words; raises RefusedError."""
    found = []
    for word, data in sorted(loaded.data.items()):
        table = bytes(loaded.tables.get(word, b""))
        numbers = struct.unpack(f"<{len(table) // 4}I", table[: len(table) // 4 * 4])
        if len(numbers) < 2 or numbers[0] not in loaded.programs:
            raise RefusedError(f"element {name_of(word)} has no program")
        pieces = tuple(_piece(bytes(data), place, word) for place in numbers[1:])
        found.append(_RackElement(word, bytes(loaded.programs[numbers[0]]), bytes(data), pieces))
    return found


def _piece(data: bytes, place: int, word: int) -> _RackPiece:
    try:
        key, sends, stores, _, first, messages, fetches, _ = _HEADER.unpack_from(data, place)
        where = [place + first + _TRANSFER_BYTES * n for n in range(min(messages + fetches, len(data)))]
        keys = [struct.unpack_from("<I", data, at)[0] for at in where]
    except struct.error:
        raise RefusedError(f"the data of element {name_of(word)} are damaged") from None
    return _RackPiece(key, bool(sends), bool(stores), frozenset(keys[:messages]), frozenset(keys[messages:]))


def _ready(one: _RackElement, done: set[int], there: Mapping[str, bytes]) -> set[int]:
    """What an element can compute now, all together, if that is more than it has done."""
    found = set(done)
    own = {piece.key for number, piece in enumerate(one.pieces) if number in found}
    while more := {
        number
        for number, piece in enumerate(one.pieces)
        if number not in found and all(key in own or str(key) in there for key in piece.reads)
    }:
        found |= more
        own |= {one.pieces[number].key for number in more}
    return found if len(found) > len(done) else set()


def _job(
    one: _RackElement, pieces: set[int], there: Sequence[Mapping[str, bytes]], inputs: Sequence[Mapping[int, bytes]]
) -> ElementJob:
    """An element with those of its pieces that compute."""
    limits = np.array([len(inputs) * (number in pieces) for number in range(len(one.pieces))], "<u4")
    reads = {key for number in pieces for key in one.pieces[number].reads}
    own = np.array(sorted(reads & {one.pieces[number].key for number in pieces}), "<u4")
    fetched = {number for piece in one.pieces for number in piece.fetches}
    brought = tuple(
        {key: content for key, content in messages.items() if int(key) not in own}
        | {f"dram {number}": tensors[number] for number in sorted(fetched) if number in tensors}
        for messages, tensors in zip(there, inputs, strict=True)
    )
    return ElementJob(
        one.firmware, {"element_data": one.data, "inputs": limits.tobytes(), "own": own.tobytes()}, brought
    )


def _ran(elements: Sequence[_RackElement], found: Mapping[int, SimulationResult], inputs: int) -> RackRun:
    """Results and clocks, by elements and pieces."""
    results = []
    clocks = np.zeros((inputs, sum(len(one.pieces) for one in elements), 4), np.int64)
    column = 0
    for one in elements:
        inferences = found[one.word].inferences
        for number, piece in enumerate(one.pieces):
            if piece.stores:
                results.append(b"".join(inference.outputs[f"stored {number}"] for inference in inferences))
            for turn, inference in enumerate(inferences):
                clocks[turn, column] = np.frombuffer(inference.outputs[f"turn {number}"], "<i8")
            column += 1
    cycles = max((result.inferences[0].total_cycles or 0) for result in found.values())
    return RackRun(results, clocks.reshape(-1).tolist(), cycles)
