"""A rack of emulated elements: every element's firmware computes, and messages go by the routing tables.

Nothing is known of the network but what was loaded. An element runs when all messages that some of its pieces read were
sent, over all inputs; one with several pieces runs again when more of them can compute, the last time with all, and
every time it must send the same. Elements that can run at the same time are a wave, which is spread over a farm. Of a
network in several sections all elements stand at the barrier of a section; each goes on from there to the next.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import numpy as np

from dovetail.errors import MissingExtraError, SimulationError
from dovetail.farm import Farm, LostResult, farm
from dovetail.files import TemporaryFolder
from dovetail.guests.mesh.building import build_programs, used_bytes
from dovetail.guests.mesh.element import BASE, ElementDevice, StoredPart
from dovetail.guests.mesh.emit import MeshProject
from dovetail.guests.mesh.layers import Ints, Show, unseen
from dovetail.guests.mesh.manifest import mesh_build, outputs_of, rack_images
from dovetail.guests.mesh.placement import MeshMapping
from dovetail.guests.mesh.programs import ELEMENT_HEADER, TRANSFER
from dovetail.guests.mesh.topology import Topology, build_topology, name_of, word_of
from dovetail.ir.types import Array
from dovetail.records import Record
from dovetail.sim.device import DeviceSpec, regions_of, target_devices
from dovetail.sim.protocol import RunRequest, SimulationSetup
from dovetail.sim.rack import LoadKind, RackBackend, RackContents, RackRun, RefusedError
from dovetail.target.description import Target
from dovetail.user_file import blamed

_LIMIT = 2_000_000_000
"""Instructions of an element, over all inputs."""
LOST_HINT = "look for a bad pointer in the element's driver or device model, or give the process more memory"


class ElementJob(Record):
    """An element to run; may be sent to another machine."""

    firmware: bytes
    """An ELF file."""
    data: bytes
    """For the symbol element_data."""
    inputs: tuple[int, ...] = ()
    """Per piece: inputs that are computed when it ends."""
    first: int = 0
    """The input that `messages` and `tensors` begin with."""
    own: frozenset[int] = frozenset()
    """Keys of messages the element sends to itself."""
    messages: tuple[Mapping[int, bytes], ...] = ()
    """Per input: message by key."""
    tensors: tuple[Mapping[int, bytes], ...] = ()
    """Per input: tensor in DRAM by number."""


class ElementRun(Record):
    """Messages, results and cycles of an element."""

    sent: Mapping[int, Mapping[int, bytes]]
    """Input -> message by key."""
    stored: Mapping[int, Sequence[StoredPart]]
    """Input -> parts of tensors."""
    clocks: Ints
    """[inputs, pieces, 4] as `RackRun.clocks`."""
    cycles: int
    """Executing, and waiting for the MAC array."""
    instructions: int
    stack: int
    """Most bytes of stack."""


def element_setup(target: Target) -> SimulationSetup:
    """The emulated element of a target, its firmware left out."""
    assert target.mesh is not None
    has_engines = target.mesh.pieces is not None
    array = {"array": "" if has_engines else target.mesh.mac.place}
    device = DeviceSpec("dovetail.guests.mesh.element:element_device", BASE, 4096, array)
    devices = (device, *(target_devices(target) if has_engines else ()))
    own = (target.core.isa, target.core.costs)
    return SimulationSetup(Path(), regions_of(target), devices, *own, extension=target.core.extension)


class EmulatedElement:
    """An element with its firmware, an ELF file, and its data, before its first instruction."""

    def __init__(self, setup: SimulationSetup, firmware: bytes, data: bytes) -> None:
        from dovetail.sim.machine import Machine

        with TemporaryFolder() as folder:
            path = Path(folder) / "element.elf"
            path.write_bytes(firmware)
            self._machine = Machine(replace(setup, elf=path))
        device = self._machine.devices[0]
        assert isinstance(device, ElementDevice)
        self._device = device
        self._machine.firmware.write("element_data", data)

    def begin(self, sections: int, dram: bytes, rate: float) -> None:
        """Run to the barrier before the first of some sections, which load from `dram` at `rate` bytes per clock."""
        self._device.inputs, self._device.dram, self._device.rate = [1 << 20] * sections, dram, rate
        self._machine.run(RunRequest((), {}, _LIMIT))

    def run(self, job: ElementJob, at_barrier: bool = False) -> ElementRun:
        """Run to the end, or from one barrier to the next; clocks count from here, waiting for loads left out.

        Raises:
            SimulationError: it does something it must not, or a device model of the user's fails.
        """
        machine, device, before = self._machine, self._device, self._machine.cycles
        device.enter(job.inputs, job.first, job.messages, job.tensors, job.own)
        try:
            result = machine.run(RunRequest(({},) if at_barrier else (), {}, _LIMIT))
        except Exception as error:
            fault = None if isinstance(error, SimulationError) else blamed(error)
            if fault is None:
                raise
            raise SimulationError(fault.what, where=fault.where, hint=fault.hint) from None
        clocks = device.clocks(job.first, len(job.messages), machine.cycles) - before - device.waited
        stored = {number: [*parts] for number, parts in device.stored.items()}
        counts = (machine.cycles, result.executed_instructions or 0, result.stack_bytes or 0)
        return ElementRun(dict(device.sent), stored, clocks, *counts)


def run_element(setup: SimulationSetup, job: ElementJob) -> ElementRun:
    """Run an element from its first instruction to its end in this process; raises as `EmulatedElement.run`."""
    return EmulatedElement(setup, job.firmware, job.data).run(job)


def run_wave(
    spread: Farm, setup: SimulationSetup, wave: Mapping[int, ElementJob], ended: Callable[[], None] = lambda: None
) -> dict[int, ElementRun]:
    """Run elements side by side, by their numbers; `ended` is called as each has ended. Raises SimulationError where
    one failed, or ended the process it ran in, twice."""
    numbers: Sequence[int] = list(wave)
    runs: dict[int, ElementRun] = {}
    for place, run in spread(partial(run_element, setup), list(wave.values())):
        if isinstance(run, LostResult):
            raise SimulationError(run.value, where=f"element {numbers[place]}", hint=LOST_HINT)
        runs[numbers[place]] = run
        ended()
    return runs


_CHIP = 0xFFFF0000
"""Bits of an element's word that say which chip it is on."""


class _LoadedPiece(Record):
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


class _LoadedElement(Record):
    """An element by what it was loaded with."""

    word: int
    firmware: bytes
    data: bytes
    pieces: tuple[_LoadedPiece, ...]


_Routes = tuple[Sequence[tuple[int, ...]], Mapping[int, Sequence[int]]]
"""Routing entries of a chip, key, mask, directions and local set of each, and the sets."""
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
            entries, sets = self._routes.get(chip, ((), {}))
            entry = next((one for one in entries if key & one[1] == one[0]), None)
            if entry is None or chip in seen:
                raise RefusedError(f"the message {key} is lost at chip {name_of(chip)}, or goes round")
            seen.add(chip)
            readers.update(chip | number for number in sets.get(entry[3], ()) if entry[3])
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
        """Run all elements, given the tensors of each input by number; `show` is told how far it is.

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
                jobs = {one.word: self._job(one, pieces, turn, messages[one.word], tensors) for one, pieces in wave}
                for word, job in jobs.items() if live else ():
                    runs[word] = live[word].run(job, at_barrier=True)
                    ended()
                runs |= run_wave(spread, setup, {} if live else jobs, ended)
                for one, pieces in wave:
                    for number in pieces:
                        clocks[one.word][turn, number] = runs[one.word].clocks[:, one.pieces[number].unit]
                    self._carry(one, pieces, runs[one.word], turn, messages, drams)
        results = {number: b"".join(bytes(dram[number]) for dram in drams) for number in self._sizes}
        marks = np.concatenate([clocks[one.word] for one in self.elements], axis=1).reshape(-1)
        return RackRun(results, marks.tolist(), max(run.cycles for run in runs.values())), runs

    def _live(self, setup: SimulationSetup) -> dict[int, EmulatedElement]:
        """All elements before their first section, by their words."""
        rate = self._topology.mesh.rates.dram / len(self.elements)
        live = {one.word: EmulatedElement(setup, one.firmware, one.data) for one in self.elements}
        for word, element in live.items():
            element.begin(self.sections, self._images[word & _CHIP], rate)
        return live

    def _job(
        self,
        one: _LoadedElement,
        pieces: frozenset[int],
        turn: range,
        messages: Sequence[Mapping[int, bytes]],
        inputs: Sequence[Mapping[int, bytes]],
    ) -> ElementJob:
        """An element whose pieces compute that can."""
        limits = [0] * max(self.sections, len(one.pieces))
        for number in pieces:
            limits[one.pieces[number].unit] = turn.stop
        reads = {key for number in pieces for key in one.pieces[number].reads}
        own = reads & {one.pieces[number].key for number in pieces}
        fetches = {number for piece in one.pieces for number in piece.fetches}
        brought = tuple({key: content for key, content in each.items() if key not in own} for each in messages)
        tensors = tuple({number: each[number] for number in fetches if number in each} for each in inputs)
        return ElementJob(one.firmware, one.data, tuple(limits), turn.start, frozenset(own), brought, tensors)

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
        hint = "look at the element's driver: every piece must store its result, and must not change what another reads"
        for key in sorted(one.pieces[number].key for number in pieces):
            contents = [run.sent[number][key] for number in turn if key in run.sent.get(number, {})]
            for word in self._readers(one.word, key) if len(contents) == len(turn) else ():
                for brought, content in zip(messages[word], contents, strict=True):
                    if brought.setdefault(key, content) != content:
                        what = f"with more pieces on element {name_of(one.word)}, its message {key} is another"
                        raise SimulationError(what, where="mesh", hint=hint)
        wanted = {one.pieces[number].unit for number in pieces if one.pieces[number].stores}
        for number in turn:
            stored = run.stored.get(number, ())
            for part in stored:
                part.put(drams[number])
            if missing := wanted - {part.piece for part in stored}:
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
        run = partial(_alone, LoadedElements(loaded, self._topology), self._setup)
        with farm(1) as spread:  # firmware that ends its process does not end the rack's
            ((_, found),) = spread(run, [inputs])
        if isinstance(found, LostResult):
            raise SimulationError(found.value, where="mesh", hint=LOST_HINT)
        return found


def _alone(elements: LoadedElements, setup: SimulationSetup, inputs: Sequence[Mapping[int, bytes]]) -> RackRun:
    """All elements in one process."""
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
    return rows, sets


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


class ExactRun(Record):
    """Outputs of the elements of a network, and what they used."""

    outputs: tuple[Mapping[str, Array], ...]
    """Per input, by the network's output names."""
    runs: tuple[ElementRun, ...]
    """The last run of each element, as in `MeshProject.elements`."""
    clocks: Ints
    """[inputs, pieces of all sections, 4] cycles from the beginning of the stream, or of the piece's section where
    there are several, to when a piece began, had given its slots back, had sent its message, and was done."""
    paces: tuple[int, ...]
    """Per element: the cycles of an input, all its pieces, the longest of the inputs."""
    memory: tuple[int, ...]
    """Per element: bytes of its memory that its program, stack, data and buffers take."""

    @property
    def turns(self) -> Ints:
        """[inputs, pieces, 3] cycles from when a piece began to the later points of `clocks`."""
        return self.clocks[:, :, 1:] - self.clocks[:, :, :1]


def run_exact(
    mapped: MeshMapping,
    project: MeshProject,
    target: Target,
    inputs: Sequence[Mapping[str, Array]],
    jobs: int = 2,
    scheduler: str | None = None,
    show: Show = unseen,
) -> ExactRun:
    """Run every element of a network over some inputs, in processes of this machine or on the workers of a Dask
    scheduler: the results are the same. `show` is told how far it is.

    Raises:
        SimulationError: an element does something it must not, or ends the process it runs in.
        PlanError: a program does not fit its element.
        DovetailError: `jobs` is below 1, or the scheduler does not answer.
        MissingExtraError: Unicorn or Dask is not installed.
    """
    if find_spec("unicorn") is None:
        raise MissingExtraError("unicorn", "iss", "simulating firmware")
    build = mesh_build(mapped, project, target)
    words = {one.record.word: one for one in project.elements}
    given = [(number, one.input) for number, one in enumerate(build.tensors) if one.input]
    tensors = [{n: np.ascontiguousarray(arrays[name]).tobytes() for n, name in given} for arrays in inputs]
    with farm(jobs, scheduler) as spread, TemporaryFolder() as folder:
        firmware = build_programs(project.files, target, Path(folder), jobs, show)
        hint = "cut the layer into more pieces in the mapping file, give fewer slots, or use more chips"
        used = used_bytes(firmware, target, mapped.mesh.usable, hint)
        loaded = RackContents()
        data = [(LoadKind.DATA, word, one.data) for word, one in words.items()]
        for kind, number, content in [*rack_images(build, firmware, project.files), *data]:
            loaded.parts[kind][number] = bytearray(content)
        try:
            elements = LoadedElements(loaded, mapped.topology)
            run, of_elements = elements.run(spread, element_setup(target), tensors, show)
        except RefusedError as error:
            hint = "report this: the tables of sender and receiver disagree"
            raise SimulationError(str(error), where="mesh", hint=hint) from None
    outputs = outputs_of(build, run.results, len(inputs))
    order = [piece for one in project.elements for piece in one.pieces]
    clocks = np.array(run.clocks).reshape(len(inputs), build.pieces, 4)[:, np.argsort(order)]
    taken = clocks[:, :, 3] - clocks[:, :, 0]
    paces = tuple(int(taken[:, one.pieces].sum(axis=1).max()) for one in project.elements)
    memory = tuple(used[one.record.program] for one in project.elements)
    return ExactRun(tuple(outputs), tuple(of_elements[word] for word in words), clocks, paces, memory)
