"""Runs a program in numpy: memories are byte arrays, an engine computes its pattern's own meaning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from dovetail.errors import ProgramError
from dovetail.ir.graph import Graph, evaluate
from dovetail.ir.types import Array, DType, box_slices
from dovetail.program.ir import (
    Call,
    Copy,
    LaunchStatement,
    Program,
    Role,
    Statement,
    View,
    load,
    print_statement,
    side_by_side,
    store,
    writes,
)
from dovetail.records import Record
from dovetail.target.description import Target


def check_program(program: Program, target: Target, graph: Graph, inputs: Mapping[str, Array]) -> None:
    """Compare the program with the graph it was made from, bit for bit, layer by layer.

    Args:
        program: the program.
        target: the machine.
        graph: the network.
        inputs: an array per input of the graph, states included. Where there are states, a second inference with the
            same other inputs is compared too.

    Raises:
        ProgramError: names the first layer whose value differs.
    """
    machine, held = ProgramInterpreter(program, target), dict(inputs)
    for kept, (name, _, _) in zip(program.states, graph.kept, strict=True):
        machine.write(kept.view, inputs[name])
    for _ in range(2 if graph.states else 1):
        expected = _compare(machine, graph, held)
        held |= {read: expected[written] for read, written, _ in graph.kept}


def _compare(machine: ProgramInterpreter, graph: Graph, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """One inference of `check_program`; returns the values of the graph."""
    program, written = machine.program, {node.output for node in graph.nodes}
    kept = [name for name in program.values if name in written]
    expected = evaluate(graph, inputs, kept)
    for name, view in program.inputs.items():
        machine.write(view, inputs[name])
    final = _last_writes(program, kept)
    for index, statement in enumerate(program.statements):
        machine.step(index, statement)
        for name in final.get(index, ()):
            actual = machine.read(program.values[name], machine.place(statement))
            _require_equal(f"layer {program.layers[statement.layer]}", name, actual, expected[name])
    if machine.copies:  # the outputs have still to be where the host reads them
        machine.bring(len(program.statements))
        for name, view in program.outputs.items():
            if name in expected:
                _require_equal("at the end", name, machine.read(view), expected[name])
    return expected


def _require_equal(where: str, name: str, actual: Array, expected: Array) -> None:
    numbers = actual.dtype == np.float32  # of a network whose weights are none, too
    if not np.array_equal(actual, expected, equal_nan=numbers):
        count = int((actual != expected).sum())
        what = f"{count} of {actual.size} elements of '{name}' differ from the graph"
        hint = "look at the offload's tile and layout declarations; of a target of Dovetail's, report this"
        raise ProgramError(what, where=where, hint=hint)


class LaunchRecord(Record):
    """One launch as it happened."""

    index: int
    """Index of the statement."""
    launch: LaunchStatement
    before: Mapping[str, Array]
    """Every memory as the launch found it, uint8."""
    result: Array
    """The logical array it computed."""


def observe(program: Program, target: Target, inputs: Mapping[str, Array]) -> Iterator[LaunchRecord]:
    """Every launch of one inference, the first, in order."""
    machine = ProgramInterpreter(program, target)
    for name, view in program.inputs.items():
        machine.write(view, inputs[name])
    held: list[tuple[int, LaunchStatement]] = []
    for index, statement in enumerate(program.statements):
        if not isinstance(statement, LaunchStatement):
            machine.step(index, statement)
            continue
        held.append((index, statement))
        before = {name: memory.copy() for name, memory in machine.memories.items()}
        machine.step(index, statement)
        if not statement.starts_with_next:
            for number, launch in held:
                yield LaunchRecord(number, launch, before, machine.read(launch.result, machine.place(launch)))
            held = []


def _last_writes(program: Program, values: Sequence[str]) -> dict[int, list[str]]:
    """Statement index -> values complete once it has been carried out; parts of states, complete from the start, are
    left out, for what is written there replaces them."""
    last: dict[str, int] = {}
    together = side_by_side(program.statements)
    for index, statement in enumerate(program.statements):
        for view in writes(statement):
            last[view.buffer] = max(last.get(view.buffer, 0), together.get(index, (index,))[-1])
    complete: dict[int, list[str]] = {}
    for name in values:
        buffer = program.values[name].buffer
        if buffer in last and program.buffers[buffer].role is not Role.STATE:
            complete.setdefault(last[buffer], []).append(name)
    return complete


class ProgramInterpreter:
    """The memories of the machine and what each statement does to them."""

    def __init__(self, program: Program, target: Target) -> None:
        self.program = program
        self.memories = {memory.name: np.zeros(memory.size, dtype=np.uint8) for memory in target.memories}
        self.bases = {memory.name: memory.base for memory in target.memories}
        self.copies = {engine.name: self._copy_of(engine.memory) for engine in target.engines if engine.mirror}
        """Engine -> its own copy of the memory it works in."""
        self.held: dict[str, list[LaunchStatement]] = {}
        """By engine, the launches that wait for the one that starts them."""
        for kept in program.states:
            self.write(kept.view, kept.first)

    def _copy_of(self, memory: str) -> Array:
        """A memory that holds something else than the other."""
        mine = [buffer for buffer in self.program.buffers.values() if buffer.memory == memory]
        ends = [b.address + b.nbytes - self.bases[memory] for b in mine if b.address is not None]
        return np.full(max(ends, default=0), 0xA5, dtype=np.uint8)

    def place(self, statement: Statement) -> str:
        """The engine in whose copy of the memory a statement is carried out; empty for the memory itself."""
        return statement.engine if isinstance(statement, LaunchStatement) and statement.engine in self.copies else ""

    def read(self, view: View, place: str = "") -> Array:
        """The logical array that lies in `view`, in the memory or an engine's copy; of constants, their bytes."""
        buffer = self.program.buffers[view.buffer]
        if buffer.role is Role.CONSTANT:
            return load(self.program.constants[buffer.name], view, 0)
        return load(self.copies[place] if place else self.memories[buffer.memory], view, self._base(view))

    def write(self, view: View, array: Array, place: str = "") -> None:
        """Put a logical array where `view` lies, in the memory or an engine's copy."""
        memory = self.copies[place] if place else self.memories[self.program.buffers[view.buffer].memory]
        store(memory, view, self._base(view), array)

    def bring(self, index: int) -> None:
        """Carry out what is brought to and from engines before a statement."""
        for move in self.program.moves.get(index, ()):
            source, destination = ("", move.engine) if move.to_engine else (move.engine, "")
            self.write(move.view, self.read(move.view, source), destination)

    def _base(self, view: View) -> int:
        buffer = self.program.buffers[view.buffer]
        assert buffer.address is not None
        return buffer.address - self.bases[buffer.memory]

    def step(self, index: int, statement: Statement) -> None:
        """Carry out one statement."""
        self.bring(index)
        if isinstance(statement, Copy):
            self._copy(statement)
        elif isinstance(statement, Call):
            self._compute([statement])
        elif isinstance(statement, LaunchStatement):
            for name, array in statement.packed.items():
                if not np.array_equal(self.read(statement.operands[name]), array.reshape(-1).view(np.uint8)):
                    raise ProgramError(
                        f"the bytes of {name} are not its packed constants",
                        where=f"statement {print_statement(self.program, index).strip()}",
                        hint="look at the offload's constants: they must not depend on more than the match and "
                        "the tile",
                    )
            held = self.held.setdefault(statement.engine, [])
            held.append(statement)
            if not statement.starts_with_next:
                self._compute(held)
                self.held[statement.engine] = []

    def _copy(self, copy: Copy) -> None:
        source = self.read(copy.source)
        if copy.before:
            kind = copy.destination.type
            padded = np.full(kind.shape, np.array(copy.fill).astype(kind.dtype.numpy))
            padded[box_slices(copy.inner)] = source
            source = padded
        self.write(copy.destination, source)

    def _compute(self, together: Sequence[LaunchStatement | Call]) -> None:
        """Launches that begin together find what is there before any of them has a result."""
        results = []
        for statement in together:
            graph, place = statement.graph, self.place(statement)
            operands = {name: self.read(statement.operands[name], place) for name in graph.inputs}
            results.append((statement.result, evaluate(graph, operands)[graph.outputs[0]], place))
        for view, array, place in results:
            self.write(view, array, place)


def sample_inputs(graph: Graph, seed: int = 0) -> dict[str, Array]:
    """Seeded inputs, contents of states too, that use the whole range of their types."""
    generator = np.random.default_rng(seed)
    arrays: dict[str, Array] = {}
    for name in graph.inputs:
        kind = graph.types[name]
        if kind.dtype.is_integer:
            arrays[name] = generator.integers(kind.dtype.low, kind.dtype.high + 1, kind.shape).astype(kind.dtype.numpy)
        else:
            numbers = generator.random(kind.shape, dtype=np.float32)
            arrays[name] = numbers < 0.5 if kind.dtype is DType.BOOL else numbers
    return arrays
