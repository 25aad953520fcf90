"""A discrete-event model of all elements, links and DRAM, a message at a time.

An element begins an input when all its messages are there, it has finished the one before and one of its two results
is free. A message goes when every reader has finished the input whose slot it takes (back-pressure), and then takes
each link of its tree in turn: it waits until the link is free, holds it for its bytes, and its head goes on at once.

Nothing can wait for ever. Stages are numbered so that messages go up; a piece waits for pieces of lower stages at the
same input, or for readers at an earlier input. So the least (input, stage) that waits has nothing to wait for. Links:
see `trees`.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import SimulationError
from dovetail.mesh.place import Placed
from dovetail.mesh.routes import Router, Tree
from dovetail.mesh.traffic import Fetch, expected

Ints = NDArray[Any]
Floats = NDArray[Any]
_START, _FINISH, _SENT = range(3)


@dataclass(frozen=True)
class Timing:
    """What a stream of inputs takes, in clocks of the elements."""

    latency: float
    """From the start to the first input's results in DRAM."""
    interval: float
    """Between inputs, once the stream runs: the longest between two of any piece, over the second half."""
    bound: float
    """The least interval: the work of the busiest element, link or DRAM for one input."""
    bottleneck: str
    """Which that is."""
    done: tuple[float, ...]
    """When each input's results were in DRAM."""
    start: Floats
    """[inputs, pieces] when each piece began, and `finish` when it was done."""
    finish: Floats
    busy: Floats
    """[links] clocks each link, then each DRAM, was held for one input."""
    messages: int
    """For one input."""


@dataclass(frozen=True)
class _Senders:
    """Pieces, and behind them what is fetched from DRAM: who sends what to whom by which tree."""

    size: Floats
    trees: list[Tree]
    members: list[Ints]
    """Readers of each sender."""
    leaves: list[Ints]
    """Place in the tree of the link that leads to each reader."""
    held: list[Ints]
    stored: list[int]
    """Place in the tree of the DRAM the message is stored in, -1 for none."""


def simulate(placed: Placed, inputs: int = 12) -> Timing:
    """Run a stream of inputs.

    Args:
        placed: a section on elements.
        inputs: how many; the interval is that of the second half.

    Raises:
        SimulationError: something waits for ever (a bug, or a mapping of one's own that is wrong).
    """
    return _Model(placed, inputs).run()


class _Model:
    """The state of everything while time goes on."""

    def __init__(self, placed: Placed, inputs: int) -> None:
        self.placed, self.inputs = placed, inputs
        self.router = Router(placed)
        self.senders = _senders(placed, self.router)
        stages = placed.section.stages
        self.clocks = np.concatenate([stage.costs.clocks for stage in stages]).astype(float).tolist()
        self.pieces = len(self.clocks)
        count = len(self.senders.size)
        rates = self.router.links.rates()
        self.rates = rates.tolist()
        links = placed.topology.mesh.rates
        self.hops = [float(links.link_hop if n < self.router.links.noc else links.hop) for n in range(len(self.rates))]
        self.port = links.port
        self.free = [0.0] * len(self.rates)
        self.busy = [0.0] * len(self.rates)
        self.port_free = np.zeros(self.pieces)
        need = expected(placed.traffic)
        for sender in range(self.pieces, count):
            need[self.senders.members[sender]] += 1
        self.missing = np.repeat(need[None], inputs, axis=0)
        self.arrived = np.zeros((inputs, self.pieces))
        self.sources, self.depths = _reverse(self.senders, self.pieces)
        self.blocked = np.zeros((inputs, count), np.int64)
        for sender, (members, held) in enumerate(zip(self.senders.members, self.senders.held, strict=True)):
            depths, numbers = np.unique(held, return_counts=True)
            for depth, number in zip(depths.tolist(), numbers.tolist(), strict=True):
                self.blocked[depth:, sender] += number
            assert len(members) == numbers.sum()
        self.begun, self.finished = [0] * self.pieces, [0] * self.pieces
        self.sent, self.sending = [0] * count, [False] * count
        self.running = [False] * self.pieces
        self.start, self.finish = np.zeros((inputs, self.pieces)), np.zeros((inputs, self.pieces))
        self.done = [0.0] * inputs
        self.events: list[tuple[float, int, int]] = []

    def run(self) -> Timing:
        """All inputs."""
        for sender in range(self.pieces, len(self.sent)):
            self._send(sender, 0.0)
        for piece in np.nonzero(self.missing[0] == 0)[0].tolist():
            self._begin(piece, 0.0)
        while self.events:
            now, kind, who = heapq.heappop(self.events)
            if kind == _START:
                self._begin(who, now)
            elif kind == _FINISH:
                self._finish(who, now)
            else:
                self.sent[who] += 1
                self.sending[who] = False
                self._send(who, now)
                if who < self.pieces:
                    self._begin(who, now)
        if min(self.sent) < self.inputs:
            stuck = self.sent.index(min(self.sent))
            raise SimulationError(f"the stream stops: sender {stuck} sent {self.sent[stuck]} of {self.inputs} messages",
                                  where="mesh")  # fmt: skip
        return self._timing()

    def _begin(self, piece: int, now: float) -> None:
        which = self.begun[piece]
        if self.running[piece] or which >= self.inputs or which - self.sent[piece] >= 2 or self.missing[which, piece]:
            return
        ready = self.arrived[which, piece]
        if ready > now:
            heapq.heappush(self.events, (ready, _START, piece))
            return
        self.begun[piece], self.running[piece] = which + 1, True
        self.start[which, piece] = now
        heapq.heappush(self.events, (now + self.clocks[piece], _FINISH, piece))

    def _finish(self, piece: int, now: float) -> None:
        which = self.finished[piece]
        self.finished[piece], self.running[piece] = which + 1, False
        self.finish[which, piece] = now
        for depth, sources in zip(self.depths[piece], self.sources[piece], strict=True):
            if which + depth < self.inputs:
                row = self.blocked[which + depth]
                row[sources] -= 1
                for sender in sources[row[sources] == 0].tolist():
                    self._send(sender, now)
        self._send(piece, now)
        self._begin(piece, now)

    def _send(self, sender: int, now: float) -> None:
        which = self.sent[sender]
        if self.sending[sender] or which >= self.inputs or self.blocked[which, sender]:
            return
        if sender < self.pieces and which >= self.finished[sender]:
            return
        self.sending[sender] = True
        size = self.senders.size[sender]
        heapq.heappush(self.events, (now + size / self.port, _SENT, sender))
        tails = self._travel(self.senders.trees[sender], size, now)
        stored = self.senders.stored[sender]
        if stored >= 0:
            self.done[which] = max(self.done[which], tails[stored])
        members = self.senders.members[sender]
        if len(members):
            here = now + size / self.port
            tail = np.array([*tails, here])[self.senders.leaves[sender]]
            arrival = np.maximum(self.port_free[members] + size / self.port, tail)
            self.port_free[members] = arrival
            self.arrived[which, members] = np.maximum(self.arrived[which, members], arrival)
            self.missing[which, members] -= 1
            complete = members[self.missing[which, members] == 0]
            for piece, ready in zip(complete.tolist(), self.arrived[which, complete].tolist(), strict=True):
                heapq.heappush(self.events, (ready, _START, piece))

    def _travel(self, tree: Tree, size: float, now: float) -> list[float]:
        """When the last byte has passed each link of a tree."""
        heads: list[float] = []
        tails: list[float] = []
        free, busy, rates, hops = self.free, self.busy, self.rates, self.hops
        for link, before in zip(tree.link, tree.before, strict=True):
            head = (heads[before] if before >= 0 else now) + hops[link]
            if free[link] > head:
                head = free[link]
            tail = head + size / rates[link]
            if before >= 0 and tails[before] > tail:
                tail = tails[before]
            free[link] = head + size / rates[link]
            busy[link] += size / rates[link]
            heads.append(head)
            tails.append(tail)
        return tails

    def _timing(self) -> Timing:
        busy = np.array(self.busy) / self.inputs
        half = self.inputs // 2
        # once the stream runs every piece has its pace; before, those ahead of the slowest and behind it are faster
        ends = np.column_stack((self.finish, np.array(self.done))) if half else self.finish
        interval = float((ends[-1] - ends[half - 1]).max()) / (self.inputs - half) if half else self.done[-1]
        element = int(np.argmax(self.clocks))
        ports = _port_clocks(self.senders, self.pieces, self.port)
        limits = [
            (self.clocks[element], f"the MAC array or core of {self._stage_of(element)}"),
            (float(ports.max()), f"the port of an element of {self._stage_of(int(ports.argmax()))}"),
            (float(busy.max()), self.router.links.name(int(busy.argmax()))),
        ]
        bound, name = max(limits)
        return Timing(self.done[0], interval, bound, name, tuple(self.done), self.start, self.finish, busy,
                      len(self.senders.size))  # fmt: skip

    def _stage_of(self, piece: int) -> str:
        found = [stage for stage in self.placed.section.stages if stage.first <= piece]
        return found[-1].layer.name


def _senders(placed: Placed, router: Router) -> _Senders:
    traffic, count = placed.traffic, placed.topology.routers
    code = (placed.chip * count + placed.router).tolist()
    trees, members, leaves, held, stored = [], [], [], [], []
    chips, routers = placed.chip.tolist(), placed.router.tolist()
    known: dict[tuple[int, int, int, bool], Ints] = {}
    for piece, group in enumerate(traffic.group.tolist()):
        a, b = traffic.start[group], traffic.start[group + 1]
        store = bool(traffic.stores[piece])
        tree = router.to_set(chips[piece], routers[piece], group, store)
        key = (chips[piece], routers[piece], group, store)
        if key not in known:
            aims = [divmod(code[member], count) for member in traffic.members[a:b].tolist()]
            known[key] = np.array([tree.leaf[aim] for aim in aims], np.int64)
        trees.append(tree)
        members.append(traffic.members[a:b])
        held.append(traffic.held[a:b])
        leaves.append(known[key])
        stored.append(_dram_at(tree, router))
    sizes = traffic.size.tolist()
    slots = _first_slots(placed)
    for fetch in traffic.fetches:
        for chip, pieces, size in _shared(placed, fetch):
            aims = sorted({code[piece] for piece in pieces})
            tree = router.from_dram(chip, aims)
            trees.append(tree)
            members.append(np.array(pieces))
            held.append(slots[pieces])
            leaves.append(np.array([tree.leaf[divmod(code[piece], count)] for piece in pieces]))
            stored.append(-1)
            sizes.append(size)
    return _Senders(np.array(sizes, float), trees, members, leaves, held, stored)


def _dram_at(tree: Tree, router: Router) -> int:
    return next((place for place, link in enumerate(tree.link) if link >= router.links.dram), -1)


def _first_slots(placed: Placed) -> Ints:
    """[pieces] inputs' worth each holds of its first operand."""
    return np.concatenate([np.full(stage.pieces, stage.slots[0]) for stage in placed.section.stages])


def _shared(placed: Placed, fetch: Fetch) -> list[tuple[int, list[int], int]]:
    """(chip, pieces, bytes) of what is read once from a chip's DRAM for pieces that read the same part."""
    groups: dict[tuple[int, ...], list[int]] = {}
    pieces = fetch.pieces.tolist()
    boxes, sizes = fetch.boxes.tolist(), fetch.size.tolist()
    for piece, box, size in zip(pieces, boxes, sizes, strict=True):
        groups.setdefault((int(placed.chip[piece]), size, *box), []).append(piece)
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


def _port_clocks(senders: _Senders, pieces: int, port: float) -> Floats:
    """[pieces] clocks the port of each is held for one input, the busier direction."""
    counts = np.array([len(members) for members in senders.members])
    received = np.bincount(np.concatenate(senders.members), weights=np.repeat(senders.size, counts), minlength=pieces)
    return np.maximum(received, senders.size[:pieces]) / port
