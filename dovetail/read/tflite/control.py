"""WHILE and IF: what turns and chooses on numbers known at compile time is written out, turn by turn.

A condition is imported into a graph of its own from what is known, and evaluated. An IF on a value of run time computes
both ways and selects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dovetail.ir.graph import GraphBuilder, evaluate
from dovetail.ir.operators.elementwise import Select
from dovetail.ir.operators.movement import Reshape
from dovetail.ir.types import Array, DType
from dovetail.read.tflite.file import AGAIN, TfliteFile, TfliteTensor
from dovetail.read.tflite.values import SHAPE_TYPES, TfliteValues, same_quantisation

MOST_TURNS = 512
"""Most turns of a loop."""
MOST_STEPS = 20_000
"""Operators of a model, those of loops counted in every turn."""
_DEEPEST = 8
UNKNOWN = "let the number of turns be known when the network is converted, or unroll the loop there"

Walk = Callable[[TfliteValues], None]
"""Imports all operators of the file of an import."""


@dataclass(frozen=True)
class SubgraphPort:
    """A value that goes into a subgraph or comes out of it."""

    tensor: TfliteTensor
    """As whoever has it there declares it."""
    value: str
    known: Array | None = None


def loop(v: TfliteValues, walk: Walk) -> None:
    """WHILE: the body once for each turn."""
    options = v.options("WhileOptions")
    condition, body = (_subgraph(v, int(options[name])) for name in ("CondSubgraphIndex", "BodySubgraphIndex"))
    carried = [_given(v, v.input(position)) for position in range(len(v.op.inputs))]
    for _ in range(MOST_TURNS):
        if not _holds(v, condition, carried, walk):
            break
        carried = _called(v, body, carried, walk)
    else:
        raise v.refuse(f"turns more than {MOST_TURNS} times", UNKNOWN)
    _bind(v, carried)


def branch(v: TfliteValues, walk: Walk) -> None:
    """IF: the way that is taken, or both and a choice between their results."""
    options = v.options("IfOptions")
    ways = [_subgraph(v, int(options[name])) for name in ("ThenSubgraphIndex", "ElseSubgraphIndex")]
    chosen = _given(v, v.input(0))
    operands = [_given(v, v.input(position)) for position in range(1, len(v.op.inputs))]
    if chosen.known is not None:
        _bind(v, _called(v, ways[0] if chosen.known.reshape(-1)[0] else ways[1], operands, walk))
        return
    before = dict(v.variables.current)
    both = [_called(v, way, operands, walk) for way in ways]
    if v.variables.current != before:
        raise v.refuse("changes what is kept between inferences on a condition of run time")
    found = []
    for one, other in zip(*both, strict=True):
        if one.tensor.shape != other.tensor.shape or not same_quantisation(one.tensor, other.tensor):
            raise v.refuse(f"gives {one.tensor} or {other.tensor}, which differ")
        flag = v.add(Reshape((1,) * len(one.tensor.shape)), [chosen.value], "condition")
        found.append(SubgraphPort(one.tensor, v.add(Select(), [flag, one.value, other.value], "chosen")))
    _bind(v, found)


def _subgraph(v: TfliteValues, number: int) -> TfliteFile:
    found = v.file.further[number - 1] if 1 <= number <= len(v.file.further) else None
    if found is None:
        raise v.refuse(f"runs subgraph {number}, which the model does not have", AGAIN)
    return replace(found, further=v.file.further)


def _given(v: TfliteValues, tensor: TfliteTensor) -> SubgraphPort:
    """An operand: its value, and its elements where they are known."""
    known = v.known_of(tensor)
    return SubgraphPort(tensor, v.value(tensor) if known is None else v.builder.constant(tensor.name, known), known)


def _inner(v: TfliteValues, file: TfliteFile, given: Sequence[SubgraphPort]) -> TfliteValues:
    """An import of a subgraph that knows its inputs."""
    if v.depth >= _DEEPEST:
        raise v.refuse(f"is nested more than {_DEEPEST} deep", "call fewer subgraphs within each other")
    if len(file.inputs) != len(given):
        raise v.refuse(f"gives {len(given)} values to a subgraph of {len(file.inputs)} inputs", AGAIN)
    inner = v.inside(file)
    for index, one in zip(file.inputs, given, strict=True):
        tensor = file.tensors[index]
        if tensor.shape != one.tensor.shape or tensor.dtype is not one.tensor.dtype:
            raise v.refuse(f"gives {one.tensor} where {tensor} is expected", AGAIN)
        inner.give(tensor, one.value, one.known)
    return inner


def _called(v: TfliteValues, file: TfliteFile, given: Sequence[SubgraphPort], walk: Walk) -> list[SubgraphPort]:
    """The results of a subgraph for some values, in the graph being built."""
    inner = _inner(v, file, given)
    walk(inner)
    return [_given(inner, file.tensors[index]) for index in file.outputs]


def _holds(v: TfliteValues, file: TfliteFile, given: Sequence[SubgraphPort], walk: Walk) -> bool:
    """The condition of a loop, from what is known alone."""
    alone = v.again(builder=GraphBuilder("condition"), variables=replace(v.variables, current={}, states={}))
    held = []
    for number, one in enumerate(given):
        kind = v.type_of(one.value)
        stem = f"given_{number}"
        value = alone.builder.input(stem, kind) if one.known is None else alone.builder.constant(stem, one.known)
        held.append(replace(one, value=value))
    found = _called(alone, file, held, walk)
    if len(found) != 1 or found[0].tensor.dtype is not DType.BOOL:
        raise v.refuse("has a condition that is not one truth value", AGAIN)
    if found[0].known is not None:
        return bool(found[0].known.reshape(-1)[0])
    graph = alone.builder.finish([found[0].value])
    read = {name for node in graph.nodes for name in node.inputs} | set(graph.outputs)
    if read & set(graph.inputs):
        raise v.refuse("turns until a value of run time says so, which is not supported", UNKNOWN)
    return bool(
        evaluate(
            graph, {name: np.zeros(graph.types[name].shape, graph.types[name].dtype.numpy) for name in graph.inputs}
        )[graph.outputs[0]].reshape(-1)[0]
    )


def _bind(v: TfliteValues, found: Sequence[SubgraphPort]) -> None:
    """Make what a subgraph gave the operator's results."""
    results = v.results(len(found))
    for one, result in zip(found, results, strict=True):
        v.bind(one.value, result)
        if one.known is not None and result.dtype in (*SHAPE_TYPES, DType.BOOL):
            v.give(result, one.value, one.known)
