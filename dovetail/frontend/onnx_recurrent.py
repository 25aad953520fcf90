"""ONNX's LSTM, GRU and RNN: forward, reverse and bidirectional."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dovetail.frontend.onnx_context import AGAIN, OnnxContext
from dovetail.frontend.onnx_file import OnnxNode
from dovetail.graph.types import Array
from dovetail.operators.movement import Concat, Reshape, Slice, Transpose
from dovetail.operators.recurrent_float import DEFAULT_CURVES, Curve, Recurrent, RecurrentKind

_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


@dataclass(frozen=True)
class _Sizes:
    steps: int
    batch: int
    hidden: int
    directions: tuple[bool, ...]
    """Whether each is reversed."""
    batch_first: bool
    """The attribute layout."""


def recurrent(kind: RecurrentKind) -> Callable[[OnnxContext, OnnxNode], None]:
    """The importer of one kind."""

    def build(ctx: OnnxContext, op: OnnxNode) -> None:
        """Read the attributes, then one layer per direction."""
        reset_after = bool(ctx.attribute(op, "linear_before_reset", 0)) if kind is RecurrentKind.GRU else False
        if kind is RecurrentKind.LSTM:
            ctx.only(op, "input_forget", 0)
        sizes = _sizes(ctx, op)
        curves = _curves(ctx, op, kind, len(sizes.directions))
        x = ctx.value(op, 0)
        if sizes.batch_first:
            x = ctx.add(op, Transpose((1, 0, 2)), [x], f"{x}_steps")
        memory = _memory(ctx, op, kind, sizes)
        found = []
        for place, reverse in enumerate(sizes.directions):
            rows = [_direction(ctx, op, ctx.value(op, position), place) for position in (1, 2)]
            bias = _or_zeros(ctx, op, 3, (len(sizes.directions), 2 * kind.gates * sizes.hidden))
            operands = [x, *rows, _direction(ctx, op, bias, place), _direction(ctx, op, memory, place)]
            if ctx.has(op, 7):
                operands.append(_direction(ctx, op, ctx.value(op, 7), place))
            operator = Recurrent(kind, reverse, reset_after, curves[place])
            found.append(ctx.add(op, operator, operands, f"{_stem(op)}_{place}"))
        _results(ctx, op, sizes, found)

    return build


def _sizes(ctx: OnnxContext, op: OnnxNode) -> _Sizes:
    x, r = ctx.type_of(ctx.value(op, 0)).shape, ctx.type_of(ctx.value(op, 2)).shape
    direction, layout = ctx.attribute(op, "direction", "forward"), int(ctx.attribute(op, "layout", 0))
    directions = _DIRECTIONS.get(direction, ())
    if len(x) != 3 or len(r) != 3 or r[0] != len(directions) or layout not in (0, 1):
        raise ctx.refuse(op, f"direction = {direction} and layout = {layout} do not fit {list(x)} and {list(r)}", AGAIN)
    if int(ctx.attribute(op, "hidden_size", r[2])) != r[2]:
        raise ctx.refuse(op, f"hidden_size is {op.attributes['hidden_size']}, the weights have {r[2]}", AGAIN)
    if "clip" in op.attributes:
        raise ctx.refuse(op, f"the attribute clip = {op.attributes['clip']} is not supported")
    steps, batch = (x[1], x[0]) if layout else (x[0], x[1])
    if ctx.has(op, 4) and set(ctx.integers(op, 4, "sequence lengths")) != {steps}:
        raise ctx.refuse(op, f"sequences shorter than the {steps} steps of the input are not supported")
    return _Sizes(steps, batch, r[2], directions, layout == 1)


def _curves(ctx: OnnxContext, op: OnnxNode, kind: RecurrentKind, directions: int) -> list[tuple[Curve, ...]]:
    """The activations of each direction."""
    default = DEFAULT_CURVES[kind]
    given = ctx.attribute(op, "activations", [curve.value for curve in default] * directions)
    known = {curve.value.lower(): curve for curve in Curve}
    names = [name.decode() if isinstance(name, bytes) else str(name) for name in given]
    if len(names) != directions * len(default) or any(name.lower() not in known for name in names):
        raise ctx.refuse(op, f"the activations {names} are not supported; each must be Sigmoid, Tanh or Relu")
    curves = [known[name.lower()] for name in names]
    parts = [tuple(curves[place * len(default) :][: len(default)]) for place in range(directions)]
    return [() if part == default else part for part in parts]


def _memory(ctx: OnnxContext, op: OnnxNode, kind: RecurrentKind, sizes: _Sizes) -> str:
    """Hidden values, and cells, before the first step: [directions, kept, batch, hidden]."""
    found, count = [], len(sizes.directions)
    lead = (sizes.batch, count) if sizes.batch_first else (count, sizes.batch)
    for position in (5, 6)[: kind.kept]:
        value = _or_zeros(ctx, op, position, (*lead, sizes.hidden))
        if ctx.type_of(value).shape != (*lead, sizes.hidden):
            raise ctx.refuse(op, f"operand {position} is {ctx.type_of(value)}, expected {[*lead, sizes.hidden]}", AGAIN)
        if sizes.batch_first:
            value = ctx.add(op, Transpose((1, 0, 2)), [value], f"{value}_directions")
        found.append(ctx.add(op, Reshape((count, 1, sizes.batch, sizes.hidden)), [value], f"{value}_kept"))
    return ctx.add(op, Concat(1), found, f"{_stem(op)}_memory") if len(found) > 1 else found[0]


def _or_zeros(ctx: OnnxContext, op: OnnxNode, position: int, shape: tuple[int, ...]) -> str:
    """An optional operand."""
    if ctx.has(op, position):
        return ctx.value(op, position)
    zeros: Array = np.zeros(shape, np.float32)
    value = ctx.builder.constant(f"{_stem(op)}_zeros", zeros)
    ctx.static.add(value)
    return value


def _direction(ctx: OnnxContext, op: OnnxNode, value: str, place: int) -> str:
    """The part of one direction, without the axis of directions."""
    shape = ctx.type_of(value).shape
    if place >= shape[0]:
        raise ctx.refuse(op, f"{ctx.type_of(value)} has no part for direction {place}", AGAIN)
    if shape[0] > 1:
        ends = ((place, *[0] * (len(shape) - 1)), (place + 1, *shape[1:]))
        value = ctx.add(op, Slice(*ends, (1,) * len(shape)), [value], f"{value}_{place}")
    return ctx.add(op, Reshape(shape[1:]), [value], f"{value}_one")


def _results(ctx: OnnxContext, op: OnnxNode, sizes: _Sizes, found: list[str]) -> None:
    """Y, Y_h and Y_c from what each direction gives."""
    steps, (batch, hidden) = sizes.steps, (sizes.batch, sizes.hidden)
    last = [0 if reverse else steps - 1 for reverse in sizes.directions]
    spans = ([(0, steps)] * len(found), [(place, place + 1) for place in last], [(steps, steps + 1)] * len(found))
    names = (*op.outputs, "", "", "")[:3]
    for position, (name, parts) in enumerate(zip(names, spans, strict=True)):
        if not name:
            continue
        values = []
        for value, (begin, end) in zip(found, parts, strict=True):
            part = ctx.add(op, Slice((begin, 0, 0), (end, batch, hidden), (1, 1, 1)), [value], f"{name}_part")
            values.append(ctx.add(op, Reshape((end - begin, 1, batch, hidden)), [part], f"{name}_part"))
        whole = ctx.add(op, Concat(1), values, f"{name}_whole") if len(values) > 1 else values[0]
        if sizes.batch_first:
            whole = ctx.add(op, Transpose((2, 0, 1, 3)), [whole], f"{name}_whole")
        shape = list(ctx.type_of(whole).shape)
        if position:
            del shape[1 if sizes.batch_first else 0]
        ctx.values[name] = ctx.add(op, Reshape(tuple(shape)), [whole], name)


def _stem(op: OnnxNode) -> str:
    return next(name for name in op.outputs if name)
