"""A discrete-event model of all elements, links and DRAM, a message at a time.

What a piece takes is what it is charged with, or, for the execution of a stream, what its firmware was seen to take.

A piece begins an input when all its messages are there, its element computes nothing else and one of its two results is
free; of several on one element that could, the one with the least input, then the first. A message goes when every
reader has finished the input whose slot it takes (back-pressure), and then takes each link of its tree in turn: it
waits until the link is free, holds it for its bytes, and its head goes on at once.

Nothing can wait for ever. Stages are numbered so that messages go up; a piece waits for pieces of lower stages at the
same input, or for readers at an earlier input. So the least (input, stage) that waits has nothing to wait for. Links:
see `topology`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from dovetail.errors import SimulationError
from dovetail.guests.mesh.layers import Ints
from dovetail.guests.mesh.placement import Router, SectionPlacement, TreeSegment
from dovetail.guests.mesh.traffic import Fetch, Floats
from dovetail.records import Record

_START, _FINISH, _SENT, _HOP = range(4)
_BACK, _MADE, _FREE = 1, 2, 4
"""Points of a piece's turn: slots given back, its message there to be sent, its element free."""


class StreamTiming(Record):
    """Times of a stream of inputs, in clocks of the elements."""

    latency: float
    """From the start to the first input's results in DRAM."""
    interval: float
    """Between inputs, once the stream runs: the longest between two of any piece, over the second half; no less than
    the bound, which a stream that has not filled the slots ahead may pass for a while."""
    bound: float
    """The least interval: the work of the busiest element, link or DRAM for one input."""
    bottleneck: str
    """Name of the busiest."""
    done: tuple[float, ...]
    """When each input's results were in DRAM."""
    start: Floats
    """[inputs, pieces] when each piece began, and `finish` when its message was there to be sent."""
    finish: Floats
    busy: Floats
    """[links] clocks each link, then each DRAM, was held for one input."""
    ready: Floats
    """[inputs, pieces] when all messages of each piece were there."""


class _Senders(Record):
    """Pieces, and behind them what is fetched from DRAM: who sends what to whom by which tree."""

    size: Floats
    segments: list[list[TreeSegment]]
    """Segments of each sender's tree, the one it begins in first."""
    members: list[Ints]
    """Readers of each sender."""
    held: list[Ints]


def simulate(placed: SectionPlacement, inputs: int = 12, turns: Floats | None = None) -> StreamTiming:
    """Run a stream of inputs; the interval is that of the second half.

    `turns` [executed inputs, pieces, 3] are clocks from when a piece begins to when its slots are given back, its
    message can go, and its element is free (`ExactRun.turns`), the inputs used one after the other, again and again;
    else those that pieces are charged with. Raises SimulationError where something waits for ever: a bug, or a wrong
    mapping."""
    return _Model(placed, inputs, charged(placed) if turns is None else turns).run()


def charged(placed: SectionPlacement) -> Floats:
    """[1, pieces, 3] turns, as `simulate` takes them, with what pieces are charged with."""
    clocks = np.concatenate([stage.costs.clocks for stage in placed.section.stages])
    ready = np.maximum(clocks - placed.topology.mesh.core.after, 0)
    return np.stack((ready, ready, clocks), axis=1)[None]


class _Model:
    """The state of everything while time goes on."""

    def __init__(self, placed: SectionPlacement, inputs: int, turns: Floats) -> None:
        self.placed, self.inputs = placed, inputs
        self.router = Router(placed)
        self.senders = _senders(placed, self.router)
        self.sizes: list[float] = self.senders.size.tolist()
        self.clocks: Floats = turns[:, :, 2].mean(axis=0)
        self.turns = [[_phases(*clocks) for clocks in one] for one in turns.astype(float).tolist()]
        self.pieces = len(self.clocks)
        count = len(self.senders.size)
        rates = self.router.links.rates()
        self.rates = rates.tolist()
        links = placed.topology.mesh.rates
        self.hops = [float(links.link_hop if n < self.router.links.noc else links.hop) for n in range(len(self.rates))]
        self.port = links.port
        self.free = [0.0] * len(self.rates)
        self.busy = [0.0] * len(self.rates)
        self.tenants = list(placed.tenants.values())
        places = {element: number for number, element in enumerate(placed.tenants)}
        self.home = [places[element] for element in placed.element.tolist()]  # its place in `tenants`
        self.port_free = [0.0] * len(self.tenants)
        need = np.bincount(np.concatenate(self.senders.members), minlength=self.pieces)
        self.missing: list[list[int]] = np.repeat(need[None], inputs, axis=0).tolist()
        self.arrived = [[0.0] * self.pieces for _ in range(inputs)]
        self.sources, self.depths = _reverse(self.senders, self.pieces)
        self.blocked = np.zeros((inputs, count), np.int64)
        for sender, (members, held) in enumerate(zip(self.senders.members, self.senders.held, strict=True)):
            depths, numbers = np.unique(held, return_counts=True)
            for depth, number in zip(depths.tolist(), numbers.tolist(), strict=True):
                self.blocked[depth:, sender] += number
            assert len(members) == numbers.sum()
        self.begun, self.finished = [0] * self.pieces, [0] * self.pieces
        self.sent, self.sending = [0] * count, [False] * count
        self.running = [False] * len(self.tenants)
        self.start, self.finish = np.zeros((inputs, self.pieces)), np.zeros((inputs, self.pieces))
        self.done = [0.0] * inputs
        self.events: list[tuple[float, int, int, int, int, float]] = []

    def run(self) -> StreamTiming:
        for sender in range(self.pieces, len(self.sent)):
            self._send(sender, 0.0)
        for piece in [piece for piece, count in enumerate(self.missing[0]) if not count]:
            self._turn(self.home[piece], 0.0)
        while self.events:
            now, kind, who, which, segment, tail = heapq.heappop(self.events)
            if kind == _HOP:
                self._travel(who, which, segment, now, tail)
                continue
            if kind == _FINISH:
                self._reached(who, which, now)
            elif kind == _SENT:
                self.sent[who] += 1
                self.sending[who] = False
                self._send(who, now)
            if who < self.pieces:
                self._turn(self.home[who], now)
        if min(self.sent) < self.inputs:
            stuck = self.sent.index(min(self.sent))
            what = f"the stream stops: sender {stuck} sent {self.sent[stuck]} of {self.inputs} messages"
            hint = "report this with the mapping file; give the stages more slots meanwhile"
            raise SimulationError(what, where="mesh", hint=hint)
        return self._timing()

    def _turn(self, element: int, now: float) -> None:
        """Begin what an element can begin, the least input first."""
        for piece in sorted(self.tenants[element], key=self.begun.__getitem__):
            if self.running[element]:
                return
            self._begin(piece, element, now)

    def _begin(self, piece: int, element: int, now: float) -> None:
        which = self.begun[piece]
        if which >= self.inputs or which - self.sent[piece] >= 2 or self.missing[which][piece]:
            return
        ready = self.arrived[which][piece]
        if ready > now:
            self._push(ready, _START, piece)
            return
        self.begun[piece], self.running[element] = which + 1, True
        self.start[which, piece] = now
        for clocks, what in self.turns[which % len(self.turns)][piece]:
            self._push(now + clocks, _FINISH, piece, what)

    def _reached(self, piece: int, what: int, now: float) -> None:
        """A piece is so far in its turn; see `_BACK`."""
        if what & _BACK:
            self._give_back(piece, self.begun[piece] - 1, now)
        if what & _MADE:
            self.finish[self.finished[piece], piece] = now
            self.finished[piece] += 1
            self._send(piece, now)
        if what & _FREE:
            self.running[self.home[piece]] = False

    def _give_back(self, piece: int, which: int, now: float) -> None:
        for depth, sources in zip(self.depths[piece], self.sources[piece], strict=True):
            if which + depth < self.inputs:
                row = self.blocked[which + depth]
                row[sources] -= 1
                for sender in sources[row[sources] == 0].tolist():
                    self._send(sender, now)

    def _send(self, sender: int, now: float) -> None:
        which = self.sent[sender]
        if self.sending[sender] or which >= self.inputs or self.blocked[which, sender]:
            return
        if sender < self.pieces and which >= self.finished[sender]:
            return
        self.sending[sender] = True
        done = now + self.sizes[sender] / self.port
        self._push(done, _SENT, sender)
        self._travel(sender, which, 0, now, done)

    def _push(self, time: float, kind: int, who: int, what: int = 0) -> None:
        heapq.heappush(self.events, (time, kind, who, what, 0, 0.0))

    def _travel(self, sender: int, which: int, number: int, now: float, tail: float) -> None:
        """A message enters a segment: its head now, its last byte at `tail`."""
        segment, size = self.senders.segments[sender][number], self.sizes[sender]
        heads: list[float] = []
        tails: list[float] = []
        free, busy, rates, hops = self.free, self.busy, self.rates, self.hops
        for link, before in zip(segment.link, segment.before, strict=True):
            time = size / rates[link]
            head, last = (heads[before], tails[before]) if before >= 0 else (now, tail)
            head += hops[link]
            if free[link] > head:  # this runs most often of all, and a call of `max` is slower
                head = free[link]
            free[link] = end = head + time
            busy[link] += time
            heads.append(head)
            tails.append(end if end > last else last)
        for onward, place in segment.onward:
            leaves = (heads[place], tails[place]) if place >= 0 else (now, tail)
            heapq.heappush(self.events, (leaves[0], _HOP, sender, which, onward, leaves[1]))
        if segment.stored >= 0:
            self.done[which] = max(self.done[which], tails[segment.stored])
        if segment.members:
            tails.append(tail)
            self._arrive(segment.members, which, size / self.port, [tails[place] for place in segment.leaves])

    def _arrive(self, members: Sequence[int], which: int, time: float, tails: Sequence[float]) -> None:
        """A message reaches readers, through each one's port; two of one element at the same time."""
        ports, home, missing, arrived = self.port_free, self.home, self.missing[which], self.arrived[which]
        taken = [ports[home[piece]] + time for piece in members]
        for piece, last, tail in zip(members, taken, tails, strict=True):
            ports[home[piece]] = arrival = tail if tail > last else last
            arrived[piece] = arrival if arrival > arrived[piece] else arrived[piece]
            missing[piece] -= 1
            if not missing[piece]:
                self._push(arrived[piece], _START, piece)

    def _timing(self) -> StreamTiming:
        busy = np.array(self.busy) / self.inputs
        half = self.inputs // 2
        # once the stream runs every piece has its pace; before, those ahead of the slowest and behind it are faster
        ends = np.column_stack((self.finish, np.array(self.done))) if half else self.finish
        interval = float((ends[-1] - ends[half - 1]).max()) / (self.inputs - half) if half else self.done[-1]
        clocks = np.bincount(self.home, weights=self.clocks)
        element = int(np.argmax(clocks))
        received = np.zeros(self.pieces)
        for members, size in zip(self.senders.members, self.senders.size, strict=True):
            received[members] += size
        ways = (received, self.senders.size[: self.pieces])
        ports = np.maximum(*(np.bincount(self.home, weights=way) for way in ways)) / self.port  # the busier direction
        limits = [
            (float(clocks[element]), f"the MAC array or core of {self._stages_of(element)}"),
            (float(ports.max()), f"the port of an element of {self._stages_of(int(ports.argmax()))}"),
            (float(busy.max()), self.router.links.name(int(busy.argmax()))),
        ]
        bound, name = max(limits)
        times = (tuple(self.done), self.start, self.finish, busy, np.array(self.arrived))
        return StreamTiming(self.done[0], max(interval, bound), bound, name, *times)

    def _stages_of(self, element: int) -> str:
        stages = self.placed.section.stages
        names = (next(s for s in stages[::-1] if s.first <= piece).layer.name for piece in self.tenants[element])
        return " and ".join(dict.fromkeys(names))


def _phases(back: float, ready: float, free: float) -> list[tuple[float, int]]:
    """The clocks of a turn at which something is reached, and what."""
    phases: dict[float, int] = {}
    for clocks, what in ((back, _BACK), (ready, _MADE), (free, _FREE)):
        phases[clocks] = phases.get(clocks, 0) | what
    return list(phases.items())


def _senders(placed: SectionPlacement, router: Router) -> _Senders:
    traffic = placed.traffic
    segments, members, held = [], [], []
    trees: dict[tuple[int, int, int, bool], list[TreeSegment]] = {}
    sources = (placed.chip, placed.router, traffic.group, traffic.stores)
    for key in zip(*(ends.tolist() for ends in sources), strict=True):
        chip, at, group, store = key
        span = slice(traffic.start[group], traffic.start[group + 1])
        if key not in trees:
            trees[key] = router.to_pieces(chip, at, traffic.members[span].tolist(), store)
        segments.append(trees[key])
        members.append(traffic.members[span])
        held.append(traffic.held[span])
    sizes = traffic.size.tolist()
    slots = np.concatenate([np.full(stage.pieces, stage.slots[0]) for stage in placed.section.stages])
    for fetch in traffic.fetches:
        for chip, pieces, size in _shared(placed, fetch):
            segments.append(router.from_dram(chip, pieces))
            members.append(np.array(pieces))
            held.append(slots[pieces])
            sizes.append(size)
    return _Senders(np.array(sizes, float), segments, members, held)


def _shared(placed: SectionPlacement, fetch: Fetch) -> list[tuple[int, list[int], int]]:
    """(chip, pieces, bytes) of what is read once from a chip's DRAM for pieces that read the same part."""
    groups: dict[tuple[int, ...], list[int]] = {}
    keys = np.column_stack((placed.chip[fetch.pieces], fetch.size, fetch.boxes)).tolist()
    for piece, key in zip(fetch.pieces.tolist(), keys, strict=True):
        groups.setdefault(tuple(key), []).append(piece)
    return [(key[0], members, key[1]) for key, members in groups.items()]


def _reverse(senders: _Senders, pieces: int) -> tuple[list[list[Ints]], list[list[int]]]:
    """Per piece: its senders by how many inputs' worth it holds of their messages, and those depths."""
    counts = np.array([len(members) for members in senders.members])
    sender = np.repeat(np.arange(len(counts)), counts)
    member, held = np.concatenate(senders.members), np.concatenate(senders.held)
    order = np.lexsort((sender, held, member))
    sender, member, held = sender[order], member[order], held[order]
    edges = np.nonzero(np.concatenate(([True], (np.diff(member) != 0) | (np.diff(held) != 0), [True])))[0]
    sources: list[list[Ints]] = [[] for _ in range(pieces)]
    depths: list[list[int]] = [[] for _ in range(pieces)]
    for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        sources[member[a]].append(sender[a:b])
        depths[member[a]].append(int(held[a]))
    return sources, depths
