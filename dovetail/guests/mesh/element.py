"""A simulated element: the MAC array, message unit and DMA beside its core, and what runs it in a worker process.

Byte offsets: see runtime/mesh_sim.c. The MAC array takes the clocks of the mesh's description; its results are in
memory when they have passed. A run's first set of inputs holds the element's data, how many inputs each of its pieces
computes ("inputs") and the keys it sends to itself ("own"); each further one what an input brings: messages by key, and
"dram N" for tensors. It answers with an inference per input: messages by key, and of piece N "stored N" and "turn N":
four 64-bit clocks, when it began, gave its slots back, sent, and when its element was free for the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dovetail.errors import SimulationError
from dovetail.sim.device import Activity, Bus, find
from dovetail.sim.mac_array import KINDS, ROWS_JOB, compute, macs, work_of
from dovetail.sim.protocol import InferenceResult, Runner, RunRequest, SimulationResult, SimulationSetup
from dovetail.target.mesh import MacArray

BASE = 0x40000000
_FIELDS = (
    *("key", "source", "target", "operand", "rows", "columns", "bytes", "source_row", "source_column"),
    *("target_row", "target_column", "slots", "slot_bytes"),
)
"""Of mesh_transfer_t."""


_TABLES = "report this: the tables of sender and receiver disagree"


@dataclass
class _PieceProgress:
    """What the message unit knows of a piece."""

    limit: int
    """Inputs it computes."""
    expected: list[dict[str, int]] = field(default_factory=list)
    delivered: int = 0
    """Inputs of which everything is there."""
    released: int = 0
    """Inputs whose slots were given back."""


@dataclass
class _PieceTimes:
    """When a piece computed an input."""

    piece: int
    input: int
    begun: int
    back: int = 0
    """When its slots were given back."""
    sent: int = 0
    """When its message went, or was stored."""

    def clocks(self, rest: int) -> bytes:
        """All of them, and the end of the turn, `rest` after the message."""
        sent = self.sent or self.back
        return np.array([self.begun, self.back, sent, sent + rest], "<i8").tobytes()


class ElementDevice:
    """The device.

    Args:
        bus: the element's memory.
        array: "module:variable" of the `MacArray`; empty where the element has engines of a target instead.
    """

    name = "element"

    def __init__(self, bus: Bus, array: str) -> None:
        self._bus = bus
        self._array: MacArray | None = find(array, "MAC array") if array else None
        self.inputs: Sequence[int] = ()
        """How many each piece of the element computes."""
        self.messages: Sequence[dict[int, bytes]] = ()
        """Per input: message by key; those the element sends to itself come as they are sent."""
        self.own: frozenset[int] = frozenset()
        """Keys of those."""
        self.tensors: Sequence[Mapping[int, bytes]] = ()
        """Per input: tensors in DRAM by number."""
        self.sent: list[dict[int, bytes]] = []
        self.stored: list[dict[int, bytes]] = []
        """Per input: result by the piece."""
        self.dram = b""
        """Of which stretches can be loaded, so many bytes each clock:"""
        self.rate = 1.0
        self.reset()

    def reset(self) -> None:
        """As after power-on."""
        self._registers = dict.fromkeys(range(0, 0x48, 4), 0)
        self._pieces: dict[int, _PieceProgress] = {}
        self.turns: list[_PieceTimes] = []
        self._loads: list[tuple[int, int, bytes]] = []  # end, address, content
        self.waited = 0
        """Clocks of waiting for loads, since it was set to 0."""
        self._asked: int | None = None
        self._job: tuple[int, dict[str, int]] | None = None
        self._interrupt = False
        self._done: list[Activity] = []

    def _piece(self) -> _PieceProgress:
        """The piece the registers are about."""
        number = self._registers[0x34]
        if number >= len(self.inputs):
            hint = "look at the element's driver: select one of the pieces the element has"
            raise SimulationError(f"the element has no piece {number}", where=self.name, hint=hint)
        return self._pieces.setdefault(number, _PieceProgress(self.inputs[number]))

    def enter(self, section: int, input_: int, messages: dict[int, bytes], tensors: Mapping[int, bytes]) -> None:
        """Of a program of several sections: the next is this one, for this input, with its messages and tensors."""
        count = input_ + 1
        self.messages = [*([{}] * input_), messages]
        self.tensors = [*([{}] * input_), tensors]
        self._pieces.setdefault(section, _PieceProgress(count)).limit = count
        self.sent, self.stored, self.waited = [], [], 0

    def _loaded(self, now: int) -> int:
        """Whether all loads have ended."""
        self._interrupt = False
        if self._loads:
            self._asked = now if self._asked is None else self._asked
            return 0
        self.waited += 0 if self._asked is None else now - self._asked
        self._asked = None
        return 1

    def _load(self, to: int, place: int, count: int, now: int) -> None:
        """Begin a load; what is there until it ends is of no use."""
        if place + count > len(self.dram):
            hint = "look at the element's tables: loads lie within the image of the DRAM"
            raise SimulationError(f"{count} bytes at {place:#x} are loaded", where=self.name, hint=hint)
        begin = self._loads[-1][0] if self._loads else now
        self._bus.view(to, count)[:] = 0xA5
        self._loads.append((begin + max(1, int(count / self.rate)), to, self.dram[place : place + count]))

    def _turn(self, now: int) -> _PieceTimes:
        """The turn the registers are about; it begins now if it is a new one."""
        piece, input_ = self._registers[0x34], self._registers[0x14]
        if not self.turns or (self.turns[-1].piece, self.turns[-1].input) != (piece, input_):
            self.turns.append(_PieceTimes(piece, input_, now))
        return self.turns[-1]

    def timed(self, end: int) -> list[dict[str, bytes]]:
        """Per input: the clocks of each piece's turn; the machine stopped at `end`."""
        found: list[dict[str, bytes]] = [{} for _ in range(max((turn.input + 1 for turn in self.turns), default=0))]
        rests = [
            after.begun - (turn.sent or turn.back) for turn, after in zip(self.turns, self.turns[1:], strict=False)
        ]
        rests.append(rests[-1] if rests else end - self.turns[-1].sent)  # nothing begins behind the last
        for turn, rest in zip(self.turns, rests, strict=True):
            found[turn.input][f"turn {turn.piece}"] = turn.clocks(rest)
        return found

    def read(self, offset: int, now: int) -> int:
        """READY, CAN, IDLE, BUSY, TURNS or LOADED."""
        piece, input_ = self._piece(), self._registers[0x14]
        if offset == 0x38:
            return int(input_ < (piece.delivered if piece.expected else piece.limit))
        if offset in (0x08, 0x3C):
            if offset == 0x08 and input_ < piece.delivered:
                self._turn(now)
                return 1
            what = f"the element waits for ever for input {input_}"
            hint = "look at the element's driver: release an input's slot before waiting for a later input"
            raise SimulationError(what, where=self.name, hint=hint)
        if offset == 0x2C:
            self._interrupt = False
            return int(self._job is not None)
        if offset == 0x30:
            return sum(self.inputs)
        if offset == 0x44:
            return self._loaded(now)
        hint = "look at the element's driver: registers that are read are those its header names"
        raise SimulationError(f"the element has no register to read at {offset:#x}", where=self.name, hint=hint)

    def write(self, offset: int, value: int, now: int) -> None:
        """Set a register; EXPECT, RELEASE, SEND, FETCH, STORE, LOAD and JOB do something."""
        if offset not in self._registers:
            hint = "look at the element's driver: registers that are written are those its header names"
            raise SimulationError(f"the element has no register at {offset:#x}", where=self.name, hint=hint)
        self._registers[offset] = value
        input_, data, piece = self._registers[0x14], self._registers[0x18], self._piece()
        if offset == 0x04:
            piece.expected = self._transfers(value)
            self._deliver(piece)
        elif offset == 0x0C:
            if value != piece.released:
                what = f"input {value} is released, {piece.released} is next"
                hint = "look at the element's driver: release the inputs in their order"
                raise SimulationError(what, where=self.name, hint=hint)
            piece.released += 1
            self._turn(now).back = now
            self._deliver(piece)
        elif offset == 0x1C:
            self._turn(now).sent = now
            self.sent += [{} for _ in range(len(self.sent), input_ + 1)]
            key, content = self._registers[0x10], self._bus.view(data, value).tobytes()
            self.sent[input_][key] = content
            if key in self.own:
                self.messages[input_][key] = content
                for one in self._pieces.values():
                    self._deliver(one)
        elif offset == 0x40:
            self._load(data, self._registers[0x10], value, now)
        elif offset == 0x20:
            self._turn(now)
            for transfer in self._transfers(value):
                self._copy(transfer, self.tensors[input_][transfer["key"]], input_)
        elif offset == 0x24:
            self._turn(now).sent = self._turn(now).sent or now
            self.stored += [{} for _ in range(len(self.stored), input_ + 1)]
            self.stored[input_][self._registers[0x34]] = self._bus.view(data, value).tobytes()
        elif offset == 0x28:
            if self._array is None:
                hint = "look at the element's driver: its engines have registers of their own"
                raise SimulationError("the element has no MAC array", where=self.name, hint=hint)
            if self._job:
                hint = "look at the element's driver: wait for the job before starting another"
                raise SimulationError("the MAC array is started while it works", where=self.name, hint=hint)
            job = self._words(value, ROWS_JOB)
            self._job = (now + self._clocks(job), job)

    def next_event(self) -> int | None:
        """When the MAC array, or a load, is done."""
        ends = [self._job[0]] if self._job else []
        return min([*ends, *(load[0] for load in self._loads[:1])], default=None)

    def advance(self, now: int) -> None:
        """The MAC array's results, if it is done, and what is loaded."""
        while self._loads and self._loads[0][0] <= now:
            _, to, content = self._loads.pop(0)
            self._bus.view(to, len(content))[:] = np.frombuffer(content, np.uint8)
            self._interrupt = True
        if self._job and self._job[0] <= now:
            end, job = self._job
            self._job, self._interrupt = None, True
            compute(job, self._bus)
            self._done.append(Activity(end - self._clocks(job), end, KINDS[job["kind"]], macs=macs(job)))

    def interrupt(self) -> bool:
        """High from the end of a job until BUSY is read."""
        return self._interrupt

    def activities(self) -> list[Activity]:
        """Jobs of the MAC array."""
        return self._done

    def _words(self, address: int, names: Sequence[str]) -> dict[str, int]:
        words = self._bus.view(address, 4 * len(names)).view("<u4")
        return dict(zip(names, words.tolist(), strict=True))

    def _transfers(self, count: int) -> list[dict[str, int]]:
        size = 4 * len(_FIELDS)
        return [self._words(self._registers[0x00] + number * size, _FIELDS) for number in range(count)]

    def _deliver(self, piece: _PieceProgress) -> None:
        """Put the messages of every input where they belong whose slots are free, once all of an input are there."""
        slots = min((transfer["slots"] for transfer in piece.expected), default=1)
        keys = {transfer["key"] for transfer in piece.expected}
        while piece.expected and piece.delivered < min(piece.limit, piece.released + slots):
            given = self.messages[piece.delivered]
            missing = sorted(keys - given.keys())
            if any(key in self.own for key in missing):
                return
            if missing:
                raise SimulationError(f"no message of the key {missing[0]} came", where=self.name, hint=_TABLES)
            for transfer in piece.expected:
                self._copy(transfer, given[transfer["key"]], piece.delivered)
            piece.delivered += 1

    def _copy(self, transfer: Mapping[str, int], content: bytes, input_: int) -> None:
        source = np.frombuffer(content, np.uint8)
        to = transfer["target"] + input_ % transfer["slots"] * transfer["slot_bytes"]
        for row in range(transfer["rows"]):
            for column in range(transfer["columns"]):
                start = transfer["source"] + row * transfer["source_row"] + column * transfer["source_column"]
                part = source[start : start + transfer["bytes"]]
                if len(part) != transfer["bytes"]:
                    raise SimulationError(
                        f"a message of {len(content)} bytes is too short", where=self.name, hint=_TABLES
                    )
                place = to + row * transfer["target_row"] + column * transfer["target_column"]
                self._bus.view(place, transfer["bytes"])[:] = part

    def _clocks(self, job: Mapping[str, int]) -> int:
        assert self._array is not None, "no job is started without"
        return int(self._array.clocks(work_of(job)))


def element_device(bus: Bus, array: str) -> ElementDevice:
    """The device; see `ElementDevice`."""
    return ElementDevice(bus, array)


def runner(found: SimulationSetup) -> Runner:
    """What runs elements with a firmware; every run is a machine of its own."""

    def run(request: RunRequest) -> SimulationResult:
        from dovetail.sim.machine import Machine

        machine = Machine(found)
        device = machine.devices[0]
        assert isinstance(device, ElementDevice)
        data, brought = request.inputs[0]["element_data"], request.inputs[1:]
        machine.firmware.write("element_data", data)
        named = {name: np.frombuffer(request.inputs[0][name], "<u4").tolist() for name in ("inputs", "own")}
        device.inputs, device.own = named["inputs"], frozenset(named["own"])
        device.messages = [{int(k): v for k, v in one.items() if not k.startswith("dram")} for one in brought]
        device.tensors = [{int(k[5:]): v for k, v in one.items() if k.startswith("dram")} for one in brought]
        result = machine.run(RunRequest((), {}, request.instruction_limit))
        outputs, turns = [], device.timed(machine.cycles)
        for number in range(len(brought)):
            sent = device.sent[number] if number < len(device.sent) else {}
            stored = device.stored[number] if number < len(device.stored) else {}
            contents = {str(key): content for key, content in sent.items()}
            contents |= {f"stored {piece}": content for piece, content in stored.items()}
            contents |= turns[number] if number < len(turns) else {}
            outputs.append(InferenceResult(contents))
        outputs[0] = replace(outputs[0], instructions=result.executed_instructions, total_cycles=machine.cycles)
        return replace(result, inferences=tuple(outputs))

    return run
