"""An order as a program of the compiler's: a launch for each step of its network, in one memory of bytes from 0 on.

Launches that are at work at the same time have queues of their own; the engine keeps every element behind those it is
made from (`Joint.chained`). A wait stands where the order has a launch over before another one begins. Addresses come
from the planner, rules from the verifier and numbers from the interpreter, as those of any program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import dovetail.target as dt
from dovetail.ir.graph import Graph
from dovetail.program.ir import CORE, Buffer, LaunchStatement, Program, Queue, Role, Statement, View, Wait, dense_view
from dovetail.program.verify import verify
from dovetail.schedule.plan.allocate import allocate
from dovetail.schedule.plan.lifetimes import Timeline
from dovetail.targets.maeri.order import NetworkOrder

ALIGNMENT = 64
_ENGINE, _MEMORY = "maeri", "memory"
_EXACT_SECONDS = 2.0


def machine(nbytes: int) -> dt.Target:
    """The machine of such programs, with a memory of so many bytes."""
    memory = dt.Memory(_MEMORY, base=0, size=nbytes, alignment=ALIGNMENT)
    joint = dt.Joint(1, lambda launches: None, lambda launches: [], chained=True)
    engine = dt.Engine(_ENGINE, _MEMORY, (), 1.0, (), wait="maeri_wait", joint=joint)
    policies = (dt.Policy("exact", "", (), None),)
    return dt.Target("maeri image", "", dt.Core("rv32imc"), (memory,), _MEMORY, _MEMORY, policies, (engine,))


@dataclass(frozen=True)
class StepGraph:
    """A graph as steps."""

    graph: Graph
    matches: tuple[dt.Match, ...]
    """One for each step, in a graph of its own nodes; each after those it reads."""
    stored: Mapping[str, str]
    """Value -> the value with the same bytes that is stored: itself, if nothing reshapes it."""
    layers: Mapping[str, str]
    """Result of a step that is a layer -> its sums."""

    def reads(self, match: dt.Match) -> list[str]:
        """The stored values that a step reads."""
        return [self.stored[value] for value in match.graph.inputs]

    def spans(self, order: NetworkOrder) -> list[tuple[int, int]]:
        """Cycles [begin, end) of each step: of a layer those of its items; of others, which take no time, those in
        which their operands are written."""
        layers: dict[str, tuple[int, int]] = {}
        for item in order.items:
            sums = order.work(item).node.output
            begin, end = layers.get(sums, (item.start, 0))
            layers[sums] = min(begin, item.start), max(end, order.end(item))
        written: dict[str, tuple[int, int]] = dict.fromkeys(self.graph.inputs, (0, 0))
        for match in self.matches:
            own = [written[value] for value in self.reads(match)]
            span = min(begin for begin, _ in own), max(end for _, end in own)
            written[match.root] = layers[self.layers[match.root]] if match.root in self.layers else span
        return [written[match.root] for match in self.matches]

    def in_time(self, spans: Sequence[tuple[int, int]]) -> list[int]:
        """The steps in the order they begin, each after those it reads."""
        begins: dict[str, int] = dict.fromkeys(self.graph.inputs, 0)
        for match, (begin, _) in zip(self.matches, spans, strict=True):
            begins[match.root] = max([begin, *(begins[value] for value in self.reads(match))])
        return sorted(range(len(self.matches)), key=lambda number: (begins[self.matches[number].root], number))


def lowered(net: StepGraph, order: NetworkOrder, places: Mapping[str, int] | None = None) -> Program:
    """The program of an order, verified.

    Args:
        net: the steps of its network.
        order: the order.
        places: addresses of the stored values; None to plan them.

    Raises:
        ProgramError: values lie over others that are still read or written.
    """
    graph, spans, names = net.graph, net.spans(order), dict[str, Buffer]()
    for value in (*graph.inputs, *(match.root for match in net.matches)):
        outputs = {net.stored[name] for name in graph.outputs}
        role = Role.INPUT if value in graph.inputs else Role.OUTPUT if value in outputs else Role.VALUE
        names[value] = Buffer(f"value_{len(names)}", _MEMORY, graph.types[value].nbytes, role)

    def view(value: str) -> View:
        return dense_view(names[net.stored[value]].name, graph.types[value])

    statements, lanes = list[Statement](), dict[Queue, tuple[int, int]]()
    waited = dict[Queue, int]()
    for number in net.in_time(spans):
        match, (begin, end) = net.matches[number], spans[number]
        over = {queue: index for queue, (until, index) in lanes.items() if until <= begin}
        statements += [Wait(number, queue, index) for queue, index in over.items() if waited.get(queue) != index]
        waited |= over
        queue = next(iter(over), Queue(f"{_ENGINE} {len(lanes)}"))
        lanes[queue] = end, len(statements)
        operands = {value: view(value) for value in match.graph.inputs}
        statements.append(LaunchStatement(number, _ENGINE, match, operands, view(match.root), queue=queue))
    last = len(net.matches) - 1
    statements += [Wait(last, queue, index) for queue, (_, index) in lanes.items() if waited.get(queue) != index]
    buffers = {buffer.name: buffer for buffer in names.values()}
    if places is None:
        memory, timeline = machine(1 << 40).memory(_MEMORY), Timeline(statements, buffers, CORE)
        addresses = allocate(memory, timeline, exact_seconds=_EXACT_SECONDS).addresses
    else:
        addresses = {names[value].name: place for value, place in places.items()}
    program = Program(
        name=graph.name,
        buffers={name: replace(buffer, address=addresses[name]) for name, buffer in buffers.items()},
        constants={},
        statements=tuple(statements),
        layers=tuple(match.root for match in net.matches),
        inputs={name: view(name) for name in graph.inputs},
        outputs={name: view(name) for name in graph.outputs},
        values={match.root: view(match.root) for match in net.matches},
        dma=CORE,
    )
    verify(program, machine(size_of(program)))
    return program


def size_of(program: Program) -> int:
    """Bytes of memory that a program takes."""
    return max(((buffer.address or 0) + buffer.nbytes for buffer in program.buffers.values()), default=0)
