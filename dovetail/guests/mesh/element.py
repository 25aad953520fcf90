"""A simulated element: the MAC array, message unit and DMA beside its core.

The MAC array takes the clocks of the mesh's description; its results are in memory when they have passed. Messages and
tensors of all inputs are given before the core starts; those the element sends to itself come as they are sent.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from dovetail.errors import SimulationError
from dovetail.guests.mesh.layers import Ints
from dovetail.records import Record
from dovetail.sim.device import Activity, Bus, find
from dovetail.sim.mac_array import KINDS, ROWS_JOB, compute, macs, work_of
from dovetail.target.mesh import MacArray

BASE = 0x40000000
_FIELDS = (
    *("key", "source", "target", "operand", "rows", "columns", "bytes", "source_row", "source_column"),
    *("target_row", "target_column", "slots", "slot_bytes"),
)
"""Fields of `mesh_transfer_t`."""
_ENDS = ("source", "target")
_REGISTERS = "registers are those its header names"
_TABLES = "report this: the tables of sender and receiver disagree"
_LOADING = 0xA5
"""Byte that memory holds while it is being loaded."""


class Register(enum.IntEnum):
    """Byte offsets of the registers, as runtime/mesh_sim.c and mesh_sections_sim.c have them."""

    TRANSFERS, EXPECT, READY, RELEASE, KEY, INPUT = range(0x00, 0x18, 4)
    DATA, SEND, FETCH, STORE, JOB, BUSY = range(0x18, 0x30, 4)
    TURNS, PIECE, CAN, IDLE, LOAD, LOADED = range(0x30, 0x48, 4)


@dataclass
class _PieceProgress:
    """State of the message unit for a piece."""

    limit: int
    """Inputs it computes."""
    expected: list[dict[str, int]] = field(default_factory=list)
    delivered: int = 0
    """Inputs of which everything is there."""
    released: int = 0
    """Inputs whose slots were given back."""


class StoredPart(Record):
    """Part of a tensor that a piece stored."""

    piece: int
    transfer: Mapping[str, int]
    """Fields of `mesh_transfer_t`: its tensor (`key`), and where in it the part belongs."""
    content: bytes

    def put(self, dram: Mapping[int, bytearray]) -> None:
        """Put it into its tensor, of those in DRAM; raises SimulationError where it has no room there."""
        size, number = self.transfer["bytes"], self.transfer["key"]
        tensor = dram.get(number, bytearray())
        for place, (start, _) in enumerate(_stretches(self.transfer)):
            if start + size > len(tensor):
                raise SimulationError(f"tensor {number} has no byte {start + size}", where="mesh", hint=_TABLES)
            tensor[start : start + size] = self.content[place * size : (place + 1) * size]


def _stretches(transfer: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    """First bytes of a transfer's columns: in the message or tensor, and from its target."""
    for row, column in product(range(transfer["rows"]), range(transfer["columns"])):
        source, target = (row * transfer[f"{end}_row"] + column * transfer[f"{end}_column"] for end in _ENDS)
        yield transfer["source"] + source, target


@dataclass
class PieceTurn:
    """Cycles at which a piece began an input, gave its slots back, and sent its message or stored it."""

    piece: int
    input: int
    begun: int
    back: int = 0
    sent: int = 0

    @property
    def done(self) -> int:
        """Cycle from which the result can go."""
        return self.sent or self.back


class ElementDevice:
    """The device.

    Args:
        bus: the element's memory.
        array: "module:variable" of the `MacArray`; empty if the element has engines of a target instead.
    """

    name = "element"

    def __init__(self, bus: Bus, array: str) -> None:
        self._bus = bus
        self._array: MacArray | None = find(array, "MAC array") if array else None
        self.inputs: Sequence[int] = ()
        """Per piece of the element: inputs that it computes."""
        self.messages: dict[int, dict[int, bytes]] = {}
        """Input -> message by key."""
        self.own: frozenset[int] = frozenset()
        """Keys of messages the element sends to itself."""
        self.tensors: Mapping[int, Mapping[int, bytes]] = {}
        """Input -> tensors in DRAM by number."""
        self.dram = b""
        """Image of which stretches can be loaded, at `rate` bytes per clock."""
        self.rate = 1.0
        self.reset()

    def reset(self) -> None:
        """Set the state after power-on."""
        self._registers = dict.fromkeys(map(int, Register), 0)
        self._pieces: dict[int, _PieceProgress] = {}
        self.sent: defaultdict[int, dict[int, bytes]] = defaultdict(dict)
        """Input -> message by key."""
        self.stored: defaultdict[int, list[StoredPart]] = defaultdict(list)
        """Input -> parts of tensors."""
        self.turns: list[PieceTurn] = []
        self._loads: list[tuple[int, int, bytes]] = []  # end, address, content
        self.waited = 0
        """Clocks of waiting for loads, since it was set to 0."""
        self._waits_since: int | None = None
        self._job: tuple[int, dict[str, int]] | None = None
        self._interrupt = False
        self._activities: list[Activity] = []

    def _wrong(self, what: str, advice: str) -> SimulationError:
        """The error about what the element's program does."""
        return SimulationError(what, where=self.name, hint=f"look at the element's driver: {advice}")

    def _piece(self) -> _PieceProgress:
        """The piece the registers are about."""
        number = self._registers[Register.PIECE]
        if number >= len(self.inputs):
            raise self._wrong(f"the element has no piece {number}", "select one of the pieces the element has")
        return self._pieces.setdefault(number, _PieceProgress(self.inputs[number]))

    def enter(
        self,
        inputs: Sequence[int],
        first: int,
        messages: Sequence[Mapping[int, bytes]],
        tensors: Sequence[Mapping[int, bytes]],
        own: frozenset[int],
    ) -> None:
        """Make ready for some inputs, numbered from `first` on; see the attributes."""
        self.inputs, self.own = inputs, own
        self.messages = {first + number: dict(one) for number, one in enumerate(messages)}
        self.tensors = dict(enumerate(tensors, first))
        for number, piece in self._pieces.items():
            piece.limit = inputs[number]
        self.turns.clear()
        self.sent.clear()
        self.stored.clear()
        self.waited = 0

    def clocks(self, first: int, inputs: int, end: int) -> Ints:
        """[inputs, pieces, 4] cycles when each piece began, gave its slots back, sent, and when its element was free,
        of inputs from `first` on; the machine stopped at `end`."""
        clocks = np.zeros((inputs, len(self.inputs), 4), np.int64)
        rests = [after.begun - turn.done for turn, after in zip(self.turns, self.turns[1:], strict=False)]
        rests += [rests[-1] if rests else end - turn.done for turn in self.turns[-1:]]  # nothing begins behind the last
        for turn, rest in zip(self.turns, rests, strict=True):
            clocks[turn.input - first, turn.piece] = turn.begun, turn.back, turn.done, turn.done + rest
        return clocks

    def _turn(self, now: int) -> PieceTurn:
        """The turn the registers are about; it begins now if it is a new one."""
        piece, number = self._registers[Register.PIECE], self._registers[Register.INPUT]
        if not self.turns or (self.turns[-1].piece, self.turns[-1].input) != (piece, number):
            self.turns.append(PieceTurn(piece, number, now))
        return self.turns[-1]

    def read(self, offset: int, now: int) -> int:
        """READY, CAN, IDLE, BUSY, TURNS or LOADED."""
        piece, number = self._piece(), self._registers[Register.INPUT]
        match offset:
            case Register.CAN:
                return int(number < (piece.delivered if piece.expected else piece.limit))
            case Register.READY if number < piece.delivered:
                self._turn(now)
                return 1
            case Register.READY | Register.IDLE:
                what = f"the element waits for ever for input {number}"
                raise self._wrong(what, "release an input's slot before waiting for a later input")
            case Register.BUSY:
                self._interrupt = False
                return int(self._job is not None)
            case Register.TURNS:
                return sum(self.inputs)
            case Register.LOADED:
                return self._loaded(now)
        raise self._wrong(f"the element has no register to read at {offset:#x}", _REGISTERS)

    def write(self, offset: int, value: int, now: int) -> None:
        """Set a register; EXPECT, RELEASE, SEND, FETCH, STORE, LOAD and JOB do something."""
        if offset not in self._registers:
            raise self._wrong(f"the element has no register at {offset:#x}", _REGISTERS)
        self._registers[offset] = value
        number, data, piece = self._registers[Register.INPUT], self._registers[Register.DATA], self._piece()
        match offset:
            case Register.EXPECT:
                piece.expected = self._transfers(value)
                self._deliver(piece)
            case Register.RELEASE:
                if value != piece.released:
                    what = f"input {value} is released, {piece.released} is next"
                    raise self._wrong(what, "release the inputs in their order")
                piece.released += 1
                self._turn(now).back = now
                self._deliver(piece)
            case Register.SEND:
                self._turn(now).sent = now
                self._send(self._registers[Register.KEY], number, self._bus.view(data, value).tobytes())
            case Register.LOAD:
                self._load(data, self._registers[Register.KEY], value, now)
            case Register.FETCH:
                self._turn(now)
                for transfer in self._transfers(value):
                    self._copy(transfer, self.tensors[number][transfer["key"]], number)
            case Register.STORE:
                turn = self._turn(now)
                turn.sent = turn.sent or now
                transfer = self._words(value, _FIELDS)
                nbytes = transfer["rows"] * transfer["columns"] * transfer["bytes"]
                self.stored[number].append(StoredPart(turn.piece, transfer, self._bus.view(data, nbytes).tobytes()))
            case Register.JOB:
                self._start_job(value, now)

    def _send(self, key: int, number: int, content: bytes) -> None:
        self.sent[number][key] = content
        if key in self.own:
            self.messages[number][key] = content
            for piece in self._pieces.values():
                self._deliver(piece)

    def _load(self, to: int, place: int, count: int, now: int) -> None:
        """Begin a load; memory holds nothing of use until it ends."""
        if place + count > len(self.dram):
            what = f"{count} bytes at {place:#x} are loaded"
            raise self._wrong(what, "its tables' loads lie within the image of the DRAM")
        begin = self._loads[-1][0] if self._loads else now
        self._bus.view(to, count)[:] = _LOADING
        self._loads.append((begin + max(1, int(count / self.rate)), to, self.dram[place : place + count]))

    def _loaded(self, now: int) -> int:
        """1 if all loads have ended."""
        self._interrupt = False
        if self._loads:
            self._waits_since = now if self._waits_since is None else self._waits_since
            return 0
        self.waited += 0 if self._waits_since is None else now - self._waits_since
        self._waits_since = None
        return 1

    def _start_job(self, address: int, now: int) -> None:
        if self._array is None:
            raise self._wrong("the element has no MAC array", "its engines have registers of their own")
        if self._job:
            raise self._wrong("the MAC array is started while it works", "wait for the job before starting another")
        job = self._words(address, ROWS_JOB)
        self._job = now + self._clocks(job), job

    def next_event(self) -> int | None:
        """When the MAC array, or a load, is done."""
        ends = [self._job[0]] if self._job else []
        return min([*ends, *(load[0] for load in self._loads[:1])], default=None)

    def advance(self, now: int) -> None:
        """Write the MAC array's results, if it is done, and what is loaded."""
        while self._loads and self._loads[0][0] <= now:
            _, to, content = self._loads.pop(0)
            self._bus.view(to, len(content))[:] = np.frombuffer(content, np.uint8)
            self._interrupt = True
        if self._job and self._job[0] <= now:
            end, job = self._job
            self._job, self._interrupt = None, True
            compute(job, self._bus)
            self._activities.append(Activity(end - self._clocks(job), end, KINDS[job["kind"]], macs=macs(job)))

    def interrupt(self) -> bool:
        """High from the end of a job until BUSY is read."""
        return self._interrupt

    def activities(self) -> list[Activity]:
        """Jobs of the MAC array."""
        return self._activities

    def _words(self, address: int, names: Sequence[str]) -> dict[str, int]:
        words = self._bus.view(address, 4 * len(names)).view("<u4")
        return dict(zip(names, words.tolist(), strict=True))

    def _transfers(self, count: int) -> list[dict[str, int]]:
        first, size = self._registers[Register.TRANSFERS], 4 * len(_FIELDS)
        return [self._words(first + number * size, _FIELDS) for number in range(count)]

    def _deliver(self, piece: _PieceProgress) -> None:
        """Copy the messages of every input whose slots are free, once all messages of the input are there."""
        slots = min((transfer["slots"] for transfer in piece.expected), default=1)
        keys = {transfer["key"] for transfer in piece.expected}
        while piece.expected and piece.delivered < min(piece.limit, piece.released + slots):
            messages = self.messages[piece.delivered]
            missing = sorted(keys - messages.keys())
            if any(key in self.own for key in missing):
                return
            if missing:
                raise SimulationError(f"no message of the key {missing[0]} came", where=self.name, hint=_TABLES)
            for transfer in piece.expected:
                self._copy(transfer, messages[transfer["key"]], piece.delivered)
            piece.delivered += 1

    def _copy(self, transfer: Mapping[str, int], content: bytes, number: int) -> None:
        source = np.frombuffer(content, np.uint8)
        to = transfer["target"] + number % transfer["slots"] * transfer["slot_bytes"]
        for start, place in _stretches(transfer):
            part = source[start : start + transfer["bytes"]]
            if len(part) != transfer["bytes"]:
                what = f"a message of {len(content)} bytes is too short"
                raise SimulationError(what, where=self.name, hint=_TABLES)
            self._bus.view(to + place, transfer["bytes"])[:] = part

    def _clocks(self, job: Mapping[str, int]) -> int:
        assert self._array is not None, "no job is started without"
        return int(self._array.clocks(work_of(job)))


def element_device(bus: Bus, array: str) -> ElementDevice:
    """The device; see `ElementDevice`."""
    return ElementDevice(bus, array)
