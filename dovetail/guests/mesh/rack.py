"""A rack of emulated elements: every element's firmware computes, and messages go by the routing tables.

Nothing is known of the network but what was loaded. An element runs when all messages that some of its pieces read were
sent, over all inputs; one with several pieces runs again when more of them can compute, the last time with all, and
every time it must send the same. Elements that can run at the same time are a wave, which is spread over a farm. Of a
network in several sections all elements stand at the barrier of a section; each goes on from there to the next.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import product

import numpy as np

from dovetail.errors import SimulationError
from dovetail.farm import Farm, LostResult, farm
from dovetail.guests.mesh.element import StoredPart
from dovetail.guests.mesh.layers import Show, unseen
from dovetail.guests.mesh.topology import Topology, build_topology, name_of, word_of
from dovetail.guests.mesh.transfers import ELEMENT_HEADER, TRANSFER
from dovetail.guests.mesh.workers import LOST_HINT, ElementJob, ElementRun, LiveElement, element_setup, run_wave
from dovetail.sim.protocol import SimulationSetup
from dovetail.sim.rack import LoadKind, RackBackend, RackContents, RackRun, RefusedError
from dovetail.target.description import Target

_CHIP = 0xFFFF0000
"""Bits of an element's word that say which chip it is on."""


@dataclass(frozen=True)
class _LoadedPiece:
    """A piece by its data."""

    section: int
    unit: int
    """Its number for the element's message unit: that of its section where there are several."""
    key: int
    sends: bool
    reads: frozenset[int]
    """Keys of messages."""
    fetches: frozenset[int]
    """Numbers of tensors."""
    stores: bool


@dataclass(frozen=True)
class _LoadedElement:
    """An element by what it was loaded with."""

    word: int
    firmware: bytes
    data: bytes
    pieces: tuple[_LoadedPiece, ...]


@dataclass(frozen=True)
class _Routes:
    """Routing entries of a chip."""

    entries: tuple[tuple[int, ...], ...]
    """Key, mask, directions and local set of each."""
    sets: Mapping[int, Sequence[int]]


_Wave = list[tuple[_LoadedElement, frozenset[int]]]
"""Elements that run side by side, and the pieces that compute on each."""


class LoadedElements:
    """The elements a rack was loaded with; raises RefusedError where they are damaged."""

    def __init__(self, loaded: RackContents, topology: Topology) -> None:
        self._topology = topology
        self.elements = [_element(loaded, word) for word in sorted(loaded.parts[LoadKind.DATA])]
        sizes = loaded.parts[LoadKind.TENSOR].items()
        self._sizes = {number: int.from_bytes(content, "little") for number, content in sizes}
        self._images = {chip: bytes(content) for chip, content in loaded.parts[LoadKind.DRAM].items()}
        self._routes = {chip: _routes(bytes(content)) for chip, content in loaded.parts[LoadKind.ROUTES].items()}

    def check(self) -> None:
        """Raise RefusedError where elements do not exist, or messages do not arrive."""
        if not self.elements:
            raise RefusedError("no element was loaded")
        chips, per = self._topology.chips, self._topology.mesh.per_chip
        for one in self.elements:
            x, y, number = one.word >> 24, one.word >> 16 & 0xFF, one.word & 0xFFFF
            if (x, y) not in chips or chips[x, y] * per + number not in self._topology.usable:
                raise RefusedError(f"this rack has no element {name_of(one.word)}")
        for one in self.elements:
            for piece in one.pieces:
                if piece.sends:
                    self._readers(one.word, piece.key)

    def _readers(self, word: int, key: int) -> set[int]:
        """The elements that a message from one of them comes to."""
        readers, todo, seen = set[int](), [word & _CHIP], set[int]()
        while todo:
            chip = todo.pop()
            routes = self._routes.get(chip)
            entry = next((e for e in routes.entries if key & e[1] == e[0]), None) if routes else None
            if routes is None or entry is None or chip in seen:
                raise RefusedError(f"the message {key} is lost at chip {name_of(chip)}, or goes round")
            seen.add(chip)
            readers.update(chip | number for number in routes.sets.get(entry[3], ()) if entry[3])
            number = self._topology.chips[chip >> 24, chip >> 16 & 0xFF]
            for way, neighbour in enumerate(self._topology.neighbours[number].tolist()):
                if entry[2] >> way & 1:
                    if neighbour < 0:
                        raise RefusedError(f"the message {key} leaves chip {name_of(chip)} without a link")
                    todo.append(word_of((*self._topology.places[neighbour], 0)))
        return readers

    @cached_property
    def sections(self) -> int:
        """Number of sections."""
        return 1 + max(piece.section for one in self.elements for piece in one.pieces)

    @cache  # noqa: B019 - there is one for each run
    def waves(self, section: int) -> list[_Wave]:
        """All runs of elements in a section, in order; of several, those that have no piece there are the last wave.
        Raises RefusedError where some wait for ever."""
        waves: list[_Wave] = []
        todo = {
            one.word: {n for n, piece in enumerate(one.pieces) if piece.section == section} for one in self.elements
        }
        done: dict[int, frozenset[int]] = {one.word: frozenset() for one in self.elements}
        keys: dict[int, set[int]] = {one.word: set() for one in self.elements}
        while waiting := [one for one in self.elements if todo[one.word] - done[one.word]]:
            ready = ((one, _ready(one, todo[one.word], done[one.word], keys[one.word])) for one in waiting)
            waves.append([(one, pieces) for one, pieces in ready if pieces > done[one.word]])
            if not waves[-1]:
                one = waiting[0]
                missing = min(key for number in todo[one.word] for key in one.pieces[number].reads - keys[one.word])
                what = f"no message of the key {missing} comes to element {name_of(one.word)}"
                raise RefusedError(f"{len(waiting)} elements wait for messages nobody sends them: {what}")
            for one, pieces in waves[-1]:
                for number in pieces - done[one.word]:
                    for word in self._readers(one.word, one.pieces[number].key) if one.pieces[number].sends else ():
                        if word not in keys:
                            raise RefusedError(f"a message goes to element {name_of(word)}, which was not loaded")
                        keys[word].add(one.pieces[number].key)
                done[one.word] = pieces
        idle = [(one, frozenset[int]()) for one in self.elements if not todo[one.word]]
        return [*waves, idle] if self.sections > 1 else waves

    def run(
        self,
        spread: Farm,
        setup: SimulationSetup,
        inputs: Sequence[Mapping[int, bytes]],
        show: Show = unseen,
    ) -> tuple[RackRun, dict[int, ElementRun]]:
        """Run all elements.

        Args:
            spread: runs elements side by side.
            setup: the element.
            inputs: tensors by number of each input.
            show: told how far it is.

        Returns:
            Results and clocks, and the last run of each element by its word.

        Raises:
            SimulationError: an element does something it must not.
            RefusedError: what was loaded cannot run.
        """
        count, sections = len(inputs), range(self.sections)
        drams = [self._dram(tensors) for tensors in inputs]
        total = sum(len(wave) for section in sections for wave in self.waves(section))
        live = self._live(setup) if self.sections > 1 else {}
        turns = [range(n, n + 1) for n in range(count)] if live else [range(count)]
        done = iter(range(1, total * len(turns) + 1))

        def ended() -> None:
            show(f"running every element's firmware: {next(done)} of {total * len(turns)}")

        runs: dict[int, ElementRun] = {}
        clocks = {one.word: np.zeros((count, len(one.pieces), 4), np.int64) for one in self.elements}
        for turn, section in product(turns, sections):
            messages: dict[int, list[dict[int, bytes]]] = {one.word: [{} for _ in turn] for one in self.elements}
            tensors = [{n: bytes(tensor) for n, tensor in drams[number].items()} for number in turn]
            for wave in self.waves(section):
                for word in [one.word for one, _ in wave] if live else ():
                    runs[word] = live[word].step(section, turn.start, messages[word][0], tensors[0])
                    ended()
                if not live:
                    jobs = {one.word: _job(one, pieces, messages[one.word], tensors) for one, pieces in wave}
                    runs |= run_wave(spread, setup, jobs, ended)
                for one, pieces in wave:
                    for number in pieces:
                        clocks[one.word][turn, number] = runs[one.word].clocks[:, one.pieces[number].unit]
                    self._carry(one, pieces, runs[one.word], turn, messages, drams)
        results = {number: b"".join(bytes(dram[number]) for dram in drams) for number in self._sizes}
        marks = np.concatenate([clocks[one.word] for one in self.elements], axis=1).reshape(-1)
        return RackRun(results, marks.tolist(), max(run.cycles for run in runs.values())), runs

    def _live(self, setup: SimulationSetup) -> dict[int, LiveElement]:
        """All elements before their first section, by their words."""
        rate = self._topology.mesh.rates.dram / len(self.elements)
        images = ((one, self._images[one.word & _CHIP]) for one in self.elements)
        return {one.word: LiveElement(setup, one.firmware, one.data, self.sections, dram, rate) for one, dram in images}

    def _dram(self, tensors: Mapping[int, bytes]) -> dict[int, bytearray]:
        """The tensors in DRAM for an input."""
        return {number: bytearray(tensors.get(number) or bytes(size)) for number, size in self._sizes.items()}

    def _carry(
        self,
        one: _LoadedElement,
        pieces: frozenset[int],
        run: ElementRun,
        turn: Sequence[int],
        messages: Mapping[int, list[dict[int, bytes]]],
        drams: Sequence[dict[int, bytearray]],
    ) -> None:
        """Bring what pieces of an element sent to its readers, and what they stored to the DRAM."""
        for number in sorted(pieces):
            self._deliver(one, one.pieces[number].key, run, turn, messages)
        stores = {one.pieces[number].unit for number in pieces if one.pieces[number].stores}
        for number in turn:
            _store(one, run.stored.get(number, ()), stores, drams[number])

    def _deliver(
        self,
        one: _LoadedElement,
        key: int,
        run: ElementRun,
        turns: Sequence[int],
        messages: Mapping[int, list[dict[int, bytes]]],
    ) -> None:
        """Bring the messages of a key to the elements that the tables lead to."""
        contents = [run.sent.get(number, {}).get(key) for number in turns]
        for word in self._readers(one.word, key) if None not in contents else ():
            for brought, content in zip(messages[word], contents, strict=True):
                if content is not None and brought.setdefault(key, content) != content:
                    what = f"with more pieces on element {name_of(one.word)}, its message {key} is another"
                    hint = "look at the element's driver: a piece must not change what another reads"
                    raise SimulationError(what, where="mesh", hint=hint)


def _store(one: _LoadedElement, parts: Sequence[StoredPart], wanted: set[int], dram: dict[int, bytearray]) -> None:
    """Put what an element stored into the DRAM; raises SimulationError where a piece of `wanted` stored nothing."""
    for part in parts:
        if part.transfer["key"] not in dram:
            hint = "look at the element's driver: it stores into a tensor that is there"
            raise SimulationError(f"there is no tensor {part.transfer['key']}", where="mesh", hint=hint)
        part.put(dram[part.transfer["key"]])
    if missing := wanted - {part.piece for part in parts}:
        hint = "look at the element's driver: every piece must store its result"
        what = f"piece {min(missing)} of element {name_of(one.word)} stored nothing"
        raise SimulationError(what, where="mesh", hint=hint)


class EmulatedElements(RackBackend):
    """The elements of a target with a mesh, each run in an emulated core of its own."""

    def __init__(self, target: Target) -> None:
        assert target.mesh is not None, "was looked at before"
        self._setup, self._topology = element_setup(target), build_topology(target.mesh)

    def check(self, loaded: RackContents) -> None:
        LoadedElements(loaded, self._topology).check()

    def run(self, loaded: RackContents, inputs: Sequence[Mapping[int, bytes]]) -> RackRun:
        elements = LoadedElements(loaded, self._topology)
        with farm(1) as spread:  # firmware that ends its process does not end the rack's
            if elements.sections == 1:
                return elements.run(spread, self._setup, inputs)[0]
            ((_, run),) = spread(partial(_alone, elements, self._setup), [inputs])
            if isinstance(run, LostResult):
                raise SimulationError(run.value, where="mesh", hint=LOST_HINT)
            return run


def _alone(elements: LoadedElements, setup: SimulationSetup, inputs: Sequence[Mapping[int, bytes]]) -> RackRun:
    """All elements in this process."""
    with farm(1, here=True) as spread:
        return elements.run(spread, setup, inputs)[0]


def _element(loaded: RackContents, word: int) -> _LoadedElement:
    table, data = bytes(loaded.parts[LoadKind.TABLE].get(word, b"")), bytes(loaded.parts[LoadKind.DATA][word])
    numbers = struct.unpack(f"<{len(table) // 4}I", table[: len(table) // 4 * 4])
    if len(numbers) < 4 or len(numbers) % 3 != 1 or numbers[0] not in loaded.parts[LoadKind.PROGRAM]:
        raise RefusedError(f"element {name_of(word)} has no program")
    source = bytes(loaded.parts[LoadKind.DRAM].get(word & _CHIP, b"")) or data
    places = zip(*(iter(numbers[1:]),) * 3, strict=True)
    pieces = tuple(_piece(source, *place, word, number) for number, place in enumerate(places))
    return _LoadedElement(word, bytes(loaded.parts[LoadKind.PROGRAM][numbers[0]]), data, pieces)


def _piece(data: bytes, section: int, place: int, first: int, word: int, number: int) -> _LoadedPiece:
    try:
        key, sends, stores, _, _, messages, fetches, _ = ELEMENT_HEADER.unpack_from(data, place)
        count = min(messages + fetches, len(data))
        keys = [TRANSFER.unpack_from(data, first + TRANSFER.size * number)[0] for number in range(count)]
    except struct.error:
        raise RefusedError(f"the data of element {name_of(word)} are damaged") from None
    parts = frozenset(keys[:messages]), frozenset(keys[messages:])
    return _LoadedPiece(section, max(section, number), key, bool(sends), *parts, bool(stores))


def _routes(content: bytes) -> _Routes:
    try:
        words = struct.unpack(f"<{len(content) // 4}I", content)
        entries, count = words[:2]
        rows = tuple(words[2 + 4 * n : 6 + 4 * n] for n in range(min(entries, len(words))))
        place, sets = 2 + 4 * entries, {}
        for _ in range(min(count, len(words))):
            number, size = words[place : place + 2]
            sets[number] = words[place + 2 : place + 2 + size]
            place += 2 + size
        if place != len(words):
            raise ValueError
    except (struct.error, ValueError):
        raise RefusedError("the routing entries of a chip are damaged") from None
    return _Routes(rows, sets)


def _ready(one: _LoadedElement, todo: set[int], done: frozenset[int], keys: set[int]) -> frozenset[int]:
    """The pieces of an element that can compute of those to do, given those done and the keys it was sent."""
    pieces = set(done)
    while more := {
        number
        for number in todo - pieces
        if one.pieces[number].reads <= keys | {one.pieces[other].key for other in pieces}
    }:
        pieces |= more
    return frozenset(pieces)


def _job(
    one: _LoadedElement,
    pieces: frozenset[int],
    messages: Sequence[Mapping[int, bytes]],
    inputs: Sequence[Mapping[int, bytes]],
) -> ElementJob:
    """An element whose pieces compute that can."""
    limits = tuple(len(inputs) * (number in pieces) for number in range(len(one.pieces)))
    reads = {key for number in pieces for key in one.pieces[number].reads}
    own = reads & {one.pieces[number].key for number in pieces}
    fetches = {number for piece in one.pieces for number in piece.fetches}
    brought = tuple({key: content for key, content in each.items() if key not in own} for each in messages)
    tensors = tuple({number: each[number] for number in fetches if number in each} for each in inputs)
    return ElementJob(one.firmware, one.data, limits, frozenset(own), brought, tensors)
