"""Parts of a loop-level port beside its own instructions: a layer's loops in one form, the usual steps of a schedule,
and every operand of the instructions as an address ([the walkthrough](../port_loops.md) uses all of it).

    loops = region(match, 4)                                      # as an Exo algorithm
    made = selected(loops.text, MEANINGS, schedule, MEMORIES)     # as the engine's instructions, kept on disk
    for issue in issued(made, loops.sizes, places, MEMORIES):     # one after the other, with addresses
        ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod
from pathlib import Path

import numpy as np

from dovetail.documented import document
from dovetail.errors import PlanError
from dovetail.files import default_cache, text_digest
from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.arithmetic import Clip, ScaleShift
from dovetail.ir.operators.linear import DepthwiseConv2d, FullyConnected
from dovetail.ir.types import Box, DType, TensorType, dense_steps
from dovetail.loops import Algorithm, Allocation, Issue, Lanes, Procedure, Window, algorithm, covered, memory
from dovetail.loops.procedures import is_a, procedure, procedure_text, statements, stored
from dovetail.loops.trace import Release, trace
from dovetail.records import Record
from dovetail.target import Match, Operand
from dovetail.target.layers import Linear

_FULL = {"scale": np.array([2, 3]), "offset": np.array([1 << 24, 1 << 25]), "shift": np.array([1, 2])}
"""Constants that leave nothing out: a bias beyond products, and different numbers for the channels."""


def region(match: Match, block: int) -> Algorithm:
    """A matched layer, or a tile of it, as loops over blocks of channels (`dovetail.loops.algorithm`), one image.

    Bias, scale and shift are arrays whatever they hold, so that layers differ in what is computed and in sizes only:
    bias, scale and shift are i32 [OCB, 1, block], and ((sum + bias) * scale) >> shift is the result before its limits.

    Args:
        match: of a pattern with a ScaleShift, under any name; the offset of each channel is a multiple of its scale.
        block: channels of a block; those of operand and result are filled up to whole ones.

    Raises:
        KeyError: an operator that has no loops there.
    """
    (node,) = (node for node in match.graph.nodes if isinstance(node.operator, ScaleShift))
    return algorithm(match.graph, Lanes(block), dict(zip(node.inputs[1:], _FULL.values(), strict=True)))


def example(kind: type[Linear], block: int) -> Algorithm:
    """The loops `region` gives for a layer of this kind, for looking at: no padding, a kernel of 3x3, strides of 1."""
    channels, dense_layer = 2 * block, kind is FullyConnected
    outputs = 1 if kind is DepthwiseConv2d else channels
    weights = (channels, channels) if dense_layer else (outputs, 3, 3, channels)
    types = {
        "x": TensorType((1, channels) if dense_layer else (1, 8, 8, channels), DType.INT8),
        "weights": TensorType(weights, DType.INT8),
        **dict.fromkeys(_FULL, TensorType((channels,), DType.INT32)),
    }
    constants = {name: np.ones(types[name].shape, types[name].dtype.numpy) for name in types if name != "x"}
    nodes = (
        Node(kind(), ("x", "weights"), "sum"),
        Node(ScaleShift(), ("sum", *_FULL), "scaled"),
        Node(Clip(-128, 127, DType.INT8), ("scaled",), "y"),
    )
    for node in nodes:
        types[node.output] = node.operator.infer([types[name] for name in node.inputs])
    return region(Match(Graph("example", ("x",), ("y",), nodes, types, constants), "y"), block)


def meaning(name: str, arguments: str, loops: str, *statements: str) -> str:
    """The meaning of an instruction as an Exo procedure: a nest of loops around each of some statements.

    Args:
        name: of the instruction.
        arguments: as Exo has them, e.g. "N: size, total: [i32][N, 4] @ ACC".
        loops: variables and how far each counts, outermost first: "n:N o:4".
        statements: one for each nest.
    """
    lines = [f"def {name}({arguments}):"]
    for statement in statements:
        for depth, (variable, extent) in enumerate((each.split(":") for each in loops.split()), 1):
            lines.append(f"{'    ' * depth}for {variable} in seq(0, {extent}):")
        lines.append("    " * (len(loops.split()) + 1) + statement)
    return "\n".join([*lines, ""])


def outside(made: Procedure, loop: str, *past: str) -> Procedure:
    """A loop moved outwards past others, the innermost of them first."""
    from exo.stdlib.scheduling import reorder_loops

    for outer in past:
        made = reorder_loops(made, f"{outer} {loop}")
    return made


def staged(made: Procedure, loop: str, window: str, name: str, where: str) -> Procedure:
    """A window of an argument copied ahead of the first loop of a name, into a buffer `name` of the memory `where`."""
    from exo.stdlib.scheduling import simplify, stage_mem

    return in_memory(simplify(stage_mem(made, made.find(f"for {loop} in _:_"), window, name)), where, name)


def in_memory(made: Procedure, where: str, *names: str) -> Procedure:
    """Buffers moved to a memory."""
    from exo.stdlib.scheduling import set_memory

    for name in names:
        made = set_memory(made, f"{name}: _", memory(where))
    return made


def selected(
    text: str, meanings: Sequence[str], schedule: Callable[[Procedure], Procedure], memories: Iterable[str]
) -> Procedure:
    """Loops as instructions, by the port's schedule; kept in the user's cache folder for the next run.

    Args:
        text: of an `Algorithm`.
        meanings: of the instructions, in the order in which they are looked for.
        schedule: Exo rewrites after which every statement is part of what some instruction means. It is made anew when
            the text of the file it stands in has changed.
        memories: what the meanings call the engine's own memories.

    Raises:
        TargetError: a statement no instruction covers; says which came nearest, and what differs.
    """
    wheres = tuple(memories)
    scope = {name: memory(name) for name in wheres}
    instructions = {_name(text): _instruction(text, wheres) for text in meanings}
    source = Path(inspect.getfile(schedule)).read_text(encoding="utf-8")
    key = "\n".join([text, *meanings, source, text_digest(Path(__file__).parent, code_only=True)])
    folder = default_cache() / "loops"
    return stored(
        key,
        folder,
        lambda: covered(schedule(procedure(text, {})), list(instructions.values())),
        {**instructions, **scope},
    )


def _name(text: str) -> str:
    """Name of the function a text defines."""
    return text.split("(")[0].removeprefix("def ").strip()


@lru_cache(maxsize=256)  # Exo checks it anew each time, and every layer has the same
def _instruction(text: str, memories: tuple[str, ...]) -> Procedure:
    """An instruction by its meaning."""
    return procedure(text, {name: memory(name) for name in memories}, instruction=_name(text))


def listing(made: Procedure) -> str:
    """A procedure as text."""
    return procedure_text(made)


class Scratchpad(Record):
    """A memory of an engine's own, in which buffers lie densely."""

    base: int
    """Address of its first byte, as instructions name it."""
    size: int
    """Its size in bytes."""
    element: int
    """Bytes of an element there."""


class Place(Record):
    """Address, shape and strides of an operand of an instruction."""

    address: int
    """Address of the first byte."""
    shape: tuple[int, ...]
    """Elements along each dimension."""
    strides: tuple[int, ...]
    """Bytes from one to the next along each."""


class Placed(Record):
    """An instruction that is issued."""

    instruction: str
    """Its name."""
    places: Mapping[str, Place]
    """Its windows, by the names of its operands."""
    numbers: Mapping[str, int]
    """Its sizes and indices, likewise. (Scalar arguments of the region are left out: the port knows them.)"""


def of_blocks(place: Operand, block: int) -> Operand:
    """A row-major operand or result of whole blocks of channels, with the dimensions of an algorithm's `x` and `y`:
    block, row, column, image, channel of the block. Nothing is moved: channels of a pixel lie side by side."""
    image, *inner, channel = place.strides
    row, column = inner if inner else (0, 0)
    return Operand(place.address, (block * channel, row, column, image, channel))


def dense(address: int, shape: Sequence[int], element: int) -> Operand:
    """A constant argument that lies densely, of elements of so many bytes."""
    return Operand(address, tuple(element * step for step in dense_steps(tuple(shape))))


def issued(
    made: Procedure, sizes: Mapping[str, int], arguments: Mapping[str, Operand], memories: Mapping[str, Scratchpad]
) -> Iterator[Placed]:
    """The instructions in turn, every window as an address: buffers take the lowest place that is free as long as they
    live.

    Args:
        made: of `selected`.
        sizes: of the algorithm.
        arguments: where each array of the algorithm lies.
        memories: the engine's own, by name.

    Raises:
        PlanError: a memory is too small; says what is in it. A Constraint of scope TILES keeps such tiles away.
        TargetError: an instruction's own conditions do not hold.
    """
    ranks = {
        call.subproc().name(): {one.name(): len(one.shape()) for one in call.subproc().args() if one.is_tensor()}
        for call in statements(made.body())
        if is_a(call, "Call")
    }
    room: dict[int, tuple[str, Operand, int]] = {}
    for event in trace(made, sizes):
        if isinstance(event, Allocation):
            pad = memories[event.memory]
            nbytes = pad.element * prod(event.shape)
            held = [(place.address, size) for where, place, size in room.values() if where == event.memory]
            ends = [pad.base, *(address + size for address, size in held)]
            free = (e for e in sorted(ends) if all(e + nbytes <= at or at + size <= e for at, size in held))
            address = next(free)
            if address + nbytes > pad.base + pad.size:
                what = f"a tile needs {address + nbytes - pad.base} bytes of {event.memory}, which has {pad.size}"
                hint = "let a Constraint of the offload, scope TILES, say what fits"
                raise PlanError(what, where=f"{event.name} of {'x'.join(map(str, event.shape))}", hint=hint)
            room[event.buffer] = event.memory, dense(address, event.shape, pad.element), nbytes
        elif isinstance(event, Release):
            del room[event.buffer]
        else:
            yield _placed(event, ranks[event.instruction], arguments, room)


def _placed(
    issue: Issue,
    ranks: Mapping[str, int],
    arguments: Mapping[str, Operand],
    room: Mapping[int, tuple[str, Operand, int]],
) -> Placed:
    places = {}
    for name, window in issue.operands.items():
        if isinstance(window, Window):
            whole = arguments[window.array] if window.buffer is None else room[window.buffer][1]
            places[name] = _part(whole, window.box, ranks[name])
    numbers = {name: value for name, value in issue.operands.items() if isinstance(value, int)}
    return Placed(issue.instruction, places, numbers)


def _part(whole: Operand, box: Box, rank: int) -> Place:
    """A window of so many dimensions: where it is a point along one, that one is left out. (Of several along which
    nothing is left to move, it does not matter which.)"""
    dims = [(end - begin, stride) for (begin, end), stride in zip(box, whole.strides, strict=True)]
    first = sum(begin * stride for (begin, _), stride in zip(box, whole.strides, strict=True))
    for _ in range(len(dims) - rank):
        dims.pop([size for size, _ in dims].index(1))
    return Place(whole.address + first, tuple(size for size, _ in dims), tuple(stride for _, stride in dims))


document(__name__)
