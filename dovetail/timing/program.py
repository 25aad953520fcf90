"""A program in time: its statements replayed on the clock, by their shapes only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dovetail.program.ir import CORE, Begin, Call, Copy, LaunchStatement, Program, Queue, Wait, queue_of, stream_of
from dovetail.target.description import Target
from dovetail.timing.clock import CopyQueue, EngineQueue, Issuer
from dovetail.timing.transfers import copy_cost

Launches = Callable[[Sequence[LaunchStatement]], tuple[int, int]]
"""Cycles of launches that begin together, as a rule one: of the engine, and of the core that goes along with it."""


@dataclass
class _Replay:
    """The machine while a program is replayed; the two functions as of `replay`."""

    program: Program
    target: Target
    launches: Launches
    call: Callable[[Call], float]
    ends: dict[int, int] = field(default_factory=dict)
    """Statement -> when it ends."""
    held: list[LaunchStatement] = field(default_factory=list)
    """Launches that the next one starts."""

    def __post_init__(self) -> None:
        statements = self.target.core.statements
        self.core = Issuer(statements, statements.begin)
        self.lists = {engine.name: Issuer.of_list() for engine in self.target.engines if engine.stream}
        self.listed = dict.fromkeys(self.lists, 0)
        """Engine -> when the last command of its lists so far ends."""
        self.engines = {engine.name: EngineQueue.of(engine) for engine in self.target.engines}
        self.dmas = {Queue(dma.name): (dma, CopyQueue()) for dma in self.target.dmas}
        self.cores = dict.fromkeys(range(len(self.target.cores)), 0)
        self.before = ""
        """Engine whose list the statement before is of."""

    @property
    def reached(self) -> int:
        """When the last statement of a list has ended, or the core goes on behind one of its own."""
        return self.listed[self.before] if self.before else self.core.now

    def step(self, index: int) -> None:
        """Carry out a statement."""
        statement = self.program.statements[index]
        stream = stream_of(statement)
        issuer = self.lists[stream] if stream else self.core
        if stream and stream != self.before:  # a list begins when the one before has ended
            self.core.now += self.target.engine(stream).launching
            issuer.now = max(issuer.now, self.core.now, self.listed[stream])
        self.before = stream
        if isinstance(statement, Copy):
            self.ends[index] = self._copy(issuer, statement)
        elif isinstance(statement, LaunchStatement):
            self.ends[index] = self._launch(issuer, statement)
        elif isinstance(statement, Call):
            self.ends[index] = self._call(statement)
        elif isinstance(statement, Wait):
            self._wait(issuer, statement)
        if stream and index in self.ends:
            self.listed[stream] = max(self.listed[stream], self.ends[index])

    def _copy(self, issuer: Issuer, copy: Copy) -> int:
        queue = queue_of(copy, self.program.dma)
        dma, own = self.dmas.get(queue, (None, None))
        cost = copy_cost(dma, [copy])
        if own is not None and cost.starts:
            return own.copy(issuer, cost)
        issuer.now += cost.cycles
        return issuer.now

    def _launch(self, issuer: Issuer, launch: LaunchStatement) -> int:
        self.held.append(launch)
        if launch.starts_with_next:
            joint = self.target.engine(launch.engine).joint
            issuer.now += joint.handing if joint else 0
            return issuer.now
        together, self.held = self.held, []
        return self.engines[launch.engine].launch(issuer, *self.launches(together))

    def _call(self, call: Call) -> int:
        cycles = round(self.call(call))
        if call.core == 0:
            self.core.now += cycles
            return self.core.now
        self.cores[call.core] = self.core.start_core(cycles, self.cores[call.core])
        return self.cores[call.core]

    def _wait(self, issuer: Issuer, wait: Wait) -> None:
        stream = "" if wait.stream else stream_of(self.program.statements[wait.statement])
        end = self.listed[stream] if stream else self.ends[wait.statement]
        if wait.core != CORE:
            issuer.now += issuer.costs.worker // 4
            number = int(wait.core.removeprefix(CORE))
            self.cores[number] = max(self.cores[number], end)
        elif wait.queue in self.dmas:
            issuer.wait_copy(end)
        elif wait.queue != CORE:
            issuer.wait_launch(end)


def replay(
    program: Program, target: Target, launches: Launches, call: Callable[[Call], float]
) -> tuple[int, list[int]]:
    """Cycles of an inference, and of each layer from where the core turns to it (in a list, from where the commands of
    the layer before have ended) to where it turns to the next; `call` gives those of a kernel on its core."""
    clock, layers = _Replay(program, target, launches, call), [0] * len(program.layers)
    layer = since = 0
    for index, statement in enumerate(program.statements):
        if isinstance(statement, Begin):
            reached = max(since, clock.reached)
            layers[layer] += reached - since
            layer, since = statement.layer, reached
        else:
            clock.step(index)
    total = clock.core.now + target.core.statements.end
    layers[layer] += total - since
    return total, layers
