"""GRU and plain recurrent layers of integers: one loop over the steps of a sequence, inside it over hidden values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dovetail.ir.operators.recurrent import FixedRecurrent, RecurrentKind
from dovetail.kernels.c import Lines, block, c_type, total
from dovetail.kernels.curves import Curves
from dovetail.kernels.kernel import KernelWriter, UnsupportedRegion
from dovetail.kernels.recurrent import limited, scaled_once, turns, unfused
from dovetail.kernels.registry import kernel
from dovetail.kernels.scope import KernelScope


@dataclass(frozen=True)
class _GatedLayer:
    operator: FixedRecurrent
    names: Mapping[str, str]
    """C names of the operands and constants."""
    curves: Curves
    hidden: int
    depth: int

    def sum(self, stem: str, gate: int, source: str, hidden: bool) -> Lines:
        """Define `stem`: the Q3.12 of a gate's products with x, or with hidden values, for the present unit."""
        own, depth = ("again", self.hidden) if hidden else ("given", self.depth)
        scaling = (self.operator.hidden_scaling if hidden else self.operator.input_scaling)[gate]
        row = total("unit", gate * self.hidden)
        weight = f"{self.names[f'{own}_weights']}[({row}) * {depth} + depth]"
        return [
            f"uint32_t {stem}_sum = (uint32_t){self.names[f'{own}_offsets']}[{row}];",
            *block(turns("depth", depth), [f"{stem}_sum += (uint32_t)({source}[depth] * {weight});"]),
            f"const int32_t {stem} = {limited(scaled_once(scaling, f'(int32_t){stem}_sum'))};",
        ]

    def gate(self, stem: str, gate: int) -> Lines:
        """Define `stem`: a gate in Q0.15."""
        return [
            *self.sum(f"{stem}_given", gate, "from", False),
            *self.sum(f"{stem}_again", gate, "before", True),
            f"const int32_t {stem} = {self.curves.sigmoid(limited(f'{stem}_given + {stem}_again'))};",
        ]

    def tangent(self, text: str) -> str:
        """C of the hyperbolic tangent of a Q3.12, in Q0.15."""
        return self.curves.tangent(limited(text))


@kernel(FixedRecurrent)
def _fixed_recurrent(scope: KernelScope, operator: FixedRecurrent) -> KernelWriter:
    (steps, batch, depth) = unfused(scope)
    hidden = scope.output_shape[2]
    for _, shift in (*operator.input_scaling, *operator.hidden_scaling):
        if not -31 <= shift <= 30:
            raise UnsupportedRegion(f"a shift of {shift} is outside -31..30.")
    weights, recurrent, bias = (scope.known(name) for name in scope.node.inputs[1:4])
    of_x, of_hidden = np.split(bias, 2)
    # The sum where all of x is its zero point, modulo 2**32.
    offsets = of_x.astype(np.int64) - operator.input_zero_point * weights.astype(np.int64).sum(axis=1)
    arrays = {"given_weights": weights, "given_offsets": offsets.astype(np.int32)}
    arrays |= {"again_weights": recurrent, "again_offsets": of_hidden}
    names = {stem: scope.constant(scope.node.output, stem, array) for stem, array in arrays.items()}
    curves = Curves(scope, scope.node.output)

    def body() -> Lines:
        x, memory = scope.operand(0, "input"), scope.operand(4, "memory")
        layer = _GatedLayer(operator, names, curves, hidden, depth)
        lines = [
            f"const {c_type(scope.source_dtype)} *from = {x} + (step * {batch} + sequence) * {depth};",
            f"int16_t *after = output + (step * {batch} + sequence) * {hidden};",
            f"const int16_t *before = step == 0 ? {memory} + sequence * {hidden} : after - {batch * hidden};",
            *(_gru(layer) if operator.kind is RecurrentKind.GRU else _rnn(layer)),
        ]
        lines = block(turns("step", steps), block(turns("sequence", batch), lines))
        if operator.kind is RecurrentKind.GRU and not operator.reset_after:
            lines = [f"static int16_t kept[{hidden}]; /* hidden values times their reset gates */", *lines]
        return lines

    return scope.writer(body, has_storage=operator.kind is RecurrentKind.GRU and not operator.reset_after)


def _gru(layer: _GatedLayer) -> Lines:
    first, reset, source = Lines(), layer.gate("reset", 1), "before"
    inner = "((reset * again + 16384) >> 15)"
    if not layer.operator.reset_after:
        turn = [*reset, "kept[unit] = (int16_t)((reset * before[unit] + 16384) >> 15);"]
        first, reset, source, inner = block(turns("unit", layer.hidden), turn), [], "kept", "again"
    lines = [
        *layer.gate("update", 0),
        *reset,
        *layer.sum("given", 2, "from", False),
        *layer.sum("again", 2, source, True),
        f"const int32_t fresh = {layer.tangent(f'given + {inner}')};",
        "after[unit] = (int16_t)(((32768 - update) * fresh + update * before[unit] + 16384) >> 15);",
    ]
    return [*first, *block(turns("unit", layer.hidden), lines)]


def _rnn(layer: _GatedLayer) -> Lines:
    lines = [*layer.sum("given", 0, "from", False), *layer.sum("again", 0, "before", True)]
    return block(turns("unit", layer.hidden), [*lines, f"after[unit] = (int16_t){layer.tangent('given + again')};"])
