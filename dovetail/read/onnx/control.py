"""Loop, Scan and If of ONNX. Turns whose number is known are written out; of a condition that is computed at run time,
both ways are, and their results are selected from. A body reads the values around it by their names."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dovetail.ir.operators.elementwise import Select
from dovetail.ir.types import DType
from dovetail.read.onnx.file import Constant, OnnxNode, Subgraph, wrap
from dovetail.read.onnx.values import OnnxValues
from dovetail.read.values import MOST_DEEP, MOST_TURNS, UNKNOWN_TURNS, Value

Held = Value | Constant
"""A value of the graph, or elements known at compile time: what a name stands for."""

Walk = Callable[[OnnxValues, Sequence[OnnxNode]], None]
"""Imports operators."""


def loop(v: OnnxValues, walk: Walk) -> None:
    """Loop: the body once for each turn; the condition must be known."""
    body, limit = _body(v, "body"), v.integers(0, "number of turns", (1 << 62,))[0]
    going = not v.has(1) or bool(v.array(1, "condition").all())
    carried = [_held(v, name) for name in v.op.inputs[2:]]
    count, turn = len(carried), 0
    gathered: list[list[Held]] = [[] for _ in body.outputs[count + 1 :]]
    while going and turn < limit:
        v.refuse_if(turn == MOST_TURNS, f"turns more than {MOST_TURNS} times", UNKNOWN_TURNS)
        counted = wrap(np.array(turn, np.int64), DType.INT64), wrap(np.array(True), DType.BOOL)
        flag, *found = _called(v, body, [*counted, *carried], walk)
        what = "turns until a value of run time says so, which is not supported"
        if not isinstance(flag, Constant):
            raise v.refuse(what, UNKNOWN_TURNS)
        going, carried, turn = bool(flag.array.all()), found[:count], turn + 1
        for parts, part in zip(gathered, found[count:], strict=True):
            parts.append(part)
    _bind(v, [*carried, *(_stacked(v, parts, 0) for parts in gathered)])


def scan(v: OnnxValues, walk: Walk) -> None:
    """Scan: the body once for each element along an axis of its inputs."""
    v.refuse_if(v.opset < 9, f"opset {v.opset} of this operator is not supported, only from 9 on")
    body, count = _body(v, "body"), v.attribute("num_scan_inputs", 1)
    kept = len(v.op.inputs) - count
    v.wrong_if(count < 1 or kept < 0, f"has {len(v.op.inputs)} operands, {count} of them to scan")
    gives = len(body.outputs) - kept
    zeros = (0,) * max(count, gives)
    axes, backwards = (v.attribute(f"scan_input_{name}", zeros[:count]) for name in ("axes", "directions"))
    places, prepended = (v.attribute(f"scan_output_{name}", zeros[:gives]) for name in ("axes", "directions"))
    carried, scanned = ([_held(v, name) for name in part] for part in (v.op.inputs[:kept], v.op.inputs[kept:]))
    sizes = {_shape(one)[v.axis(axis, len(_shape(one)))] for one, axis in zip(scanned, axes, strict=True)}
    v.wrong_if(len(sizes) != 1, f"scans inputs of {sorted(sizes)} elements")
    (turns,) = sizes
    v.refuse_if(turns > MOST_TURNS, f"turns {turns} times; the limit is {MOST_TURNS}", UNKNOWN_TURNS)
    gathered: list[list[Held]] = [[] for _ in range(gives)]
    for turn in range(turns):
        read = zip(scanned, axes, backwards, strict=True)
        parts = [_element(v, one, axis, turns - 1 - turn if back else turn) for one, axis, back in read]
        found = _called(v, body, [*carried, *parts], walk)
        carried = found[:kept]
        for whole, part, first in zip(gathered, found[kept:], prepended, strict=True):
            whole.insert(0 if first else len(whole), part)
    _bind(v, [*carried, *(_stacked(v, parts, axis) for parts, axis in zip(gathered, places, strict=True))])


def branch(v: OnnxValues, walk: Walk) -> None:
    """If: the way that is taken, or both and a choice between their results."""
    ways = [_body(v, name) for name in ("then_branch", "else_branch")]
    if v.name_of(0) in v.constants:
        _bind(v, _called(v, ways[0] if v.array(0, "condition").all() else ways[1], [], walk))
        return
    found: list[Held] = []
    for one, other in zip(*(map(_values(v), _called(v, way, [], walk)) for way in ways), strict=True):
        v.refuse_if(one.type != other.type, f"gives {one.type} or {other.type}, which differ")
        flag = v.reshape(v.x, (1,) * one.rank, "condition")
        found.append(v.add(Select(), [flag, one, other], "chosen"))
    _bind(v, found)


def _body(v: OnnxValues, name: str) -> Subgraph:
    found = v.given(name)
    if not isinstance(found, Subgraph):
        raise v.refuse(f"the attribute {name} is no graph", "export the network again")
    return found


def _held(v: OnnxValues, name: str) -> Held:
    """The value or the elements that a name stands for."""
    return v.constants.get(name) or v.named_value(name)


def _shape(one: Held) -> tuple[int, ...]:
    return one.shape if isinstance(one, Value) else one.array.shape


def _values(v: OnnxValues) -> Callable[[Held], Value]:
    """Puts constants into the graph."""
    return lambda one: one if isinstance(one, Value) else v.place(v.named("constant"), one)


def _called(v: OnnxValues, body: Subgraph, given: Sequence[Held], walk: Walk) -> list[Held]:
    """The results of a body for some inputs, in the graph being built."""
    v.refuse_if(v.depth >= MOST_DEEP, f"is nested more than {MOST_DEEP} deep", "nest fewer graphs within each other")
    v.wrong_if(len(body.inputs) != len(given), f"gives {len(given)} values to a body of {len(body.inputs)} inputs")
    inner = v.again(values=dict(v.values), constants={**v.constants, **body.constants}, depth=v.depth + 1)
    for name in (*body.inputs, *body.constants, *(name for node in body.nodes for name in node.outputs)):
        inner.values.pop(name, None)
    for name, one in zip(body.inputs, given, strict=True):
        inner.constants.pop(name, None)
        (inner.values if isinstance(one, Value) else inner.constants).update({name: one})  # type: ignore[dict-item]
    walk(inner, body.nodes)
    return [_held(inner, name) for name in body.outputs]


def _element(v: OnnxValues, one: Held, axis: int, place: int) -> Held:
    """One element along an axis, which goes."""
    axis %= len(_shape(one))
    if not isinstance(one, Value):
        return Constant(np.take(one.array, place, axis), one.dtype)
    part = v.part(one, axis, place, place + 1, "turn")
    return v.reshape(part, (*one.shape[:axis], *one.shape[axis + 1 :]), "element")


def _stacked(v: OnnxValues, parts: Sequence[Held], axis: int) -> Held:
    """The results of all turns, along a new axis."""
    v.refuse_if(not parts, "has a loop that never turns, whose result has no elements")
    first, place = parts[0], v.axis(axis, len(_shape(parts[0])) + 1)
    if not any(isinstance(one, Value) for one in parts):
        known = [one.array for one in parts if isinstance(one, Constant)]
        return Constant(np.stack(known, place), first.dtype)
    values = list(map(_values(v), parts))
    shape = (*values[0].shape[:place], 1, *values[0].shape[place:])
    return v.concat([v.reshape(value, shape, "turn") for value in values], place, "turns")


def _bind(v: OnnxValues, found: Sequence[Held]) -> None:
    """Make what a body gave the operator's results."""
    v.wrong_if(len(found) < len(v.op.outputs), f"has {len(v.op.outputs)} results, its body gives {len(found)}")
    for name, one in zip(v.op.outputs, found, strict=False):
        if isinstance(one, Constant):
            v.constants[name] = one
        elif name:
            v.values[name] = v.reshape(one, one.shape, name=name)
