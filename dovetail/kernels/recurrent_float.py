"""Recurrent layers in float32: one loop over the steps of a sequence, inside it over hidden values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dovetail.kernels.elements import Writer, operand
from dovetail.kernels.epilogue import Scope
from dovetail.kernels.kernel import declarations
from dovetail.kernels.recurrent import cells, turns, unfused
from dovetail.kernels.region import Region
from dovetail.kernels.text import block, function, total
from dovetail.operators.recurrent_float import Curve, Recurrent, RecurrentKind

_CURVES = {
    Curve.SIGMOID: "logistic({x})",
    Curve.TANH: "hyperbolic_tangent({x})",
    Curve.RELU: "larger({x}, 0.0f)",
}
_OPERANDS = ("input", "weights", "recurrent", "bias", "memory", "peepholes")


@dataclass(frozen=True)
class _Layer:
    operator: Recurrent
    names: Mapping[str, str]
    """C names of the operands."""
    hidden: int
    depth: int

    def curve(self, place: int, x: str) -> str:
        """C of f, g or h."""
        return _CURVES[self.operator.functions[place]].format(x=x)

    def sums(self, stem: str, gate: int, source: str = "before") -> list[str]:
        """Define `stem` and `stem`_again: the bias and products with x, and with hidden values, of a unit's gate."""
        row = total("unit", gate * self.hidden)
        biases = [row, total("unit", (gate + self.operator.kind.gates) * self.hidden)]
        first, again = (f"{self.names['bias']}[{place}]" for place in biases)
        weights = f"{self.names['weights']}[({row}) * {self.depth} + depth]"
        recurrent = f"{self.names['recurrent']}[({row}) * {self.hidden} + depth]"
        return [
            f"float {stem} = {first}, {stem}_again = {again};",
            *block(turns("depth", self.depth), [f"{stem} += from[depth] * {weights};"]),
            *block(turns("depth", self.hidden), [f"{stem}_again += {source}[depth] * {recurrent};"]),
        ]

    def peephole(self, gate: int, cell: str) -> str:
        """C to add for what a gate sees of the cell; empty without peepholes."""
        if "peepholes" not in self.names:
            return ""
        return f" + {self.names['peepholes']}[{total('unit', gate * self.hidden)}] * {cell}"


def write_recurrent(region: Region, scope: Scope) -> Writer:
    """The writer of a Recurrent."""
    anchor = region.anchor
    assert anchor is not None and isinstance(anchor.operator, Recurrent)
    operator, (steps, batch, depth) = anchor.operator, unfused(region)
    hidden, size = region.output_shape[2], batch * region.output_shape[2]
    update = {RecurrentKind.LSTM: _lstm, RecurrentKind.GRU: _gru, RecurrentKind.RNN: _rnn}[operator.kind]

    def write(name: str) -> list[str]:
        stems = _OPERANDS[: len(anchor.inputs)]
        names = {stem: operand(region, scope, place, stem) for place, stem in enumerate(stems)}
        behind = f"after {'+' if operator.reverse else '-'} {size}"
        lines = [
            f"const int32_t time = {f'{steps - 1} - step' if operator.reverse else 'step'};",
            f"const float *from = {names['input']} + (time * {batch} + sequence) * {depth};",
            f"float *after = output + (time * {batch} + sequence) * {hidden};",
            f"const float *before = step == 0 ? {names['memory']} + sequence * {hidden} : {behind};",
        ]
        head = []
        if operator.kind is RecurrentKind.LSTM:
            lines.append(f"float *cell = output + ({steps * batch} + sequence) * {hidden};")
            head = cells(names["memory"], steps, size)
        if operator.kind is RecurrentKind.GRU and not operator.reset_after:
            head = [f"static float scaled[{hidden}]; /* hidden values times their reset gates */"]
        lines += update(_Layer(operator, names, hidden, depth))
        lines = block(turns("step", steps), block(turns("sequence", batch), lines))
        return function(f"static void {name}", declarations(scope.parameters()), [*head, *lines])

    return write


def _lstm(layer: _Layer) -> list[str]:
    gates = [line for place, stem in enumerate(("in", "out", "keep", "candidate")) for line in layer.sums(stem, place)]
    keep = layer.curve(0, "keep + keep_again" + layer.peephole(2, "cell[unit]"))
    enter = layer.curve(0, "in + in_again" + layer.peephole(0, "cell[unit]"))
    leave = layer.curve(0, "out + out_again" + layer.peephole(1, "next"))
    lines = [
        *gates,
        f"const float next = {keep} * cell[unit] + {enter} * {layer.curve(1, 'candidate + candidate_again')};",
        "cell[unit] = next;",
        f"after[unit] = {leave} * {layer.curve(2, 'next')};",
    ]
    return block(turns("unit", layer.hidden), lines)


def _gru(layer: _Layer) -> list[str]:
    reset = layer.curve(0, "reset + reset_again")
    first, before, again = [], layer.sums("reset", 1), f"{reset} * candidate_again"
    source = "before"
    if not layer.operator.reset_after:
        turn = [*before, f"scaled[unit] = {reset} * before[unit];"]
        first, before, again, source = block(turns("unit", layer.hidden), turn), [], "candidate_again", "scaled"
    lines = [
        *layer.sums("update", 0),
        *before,
        *layer.sums("candidate", 2, source),
        f"const float share = {layer.curve(0, 'update + update_again')};",
        f"const float fresh = {layer.curve(1, f'candidate + {again}')};",
        "after[unit] = (1.0f - share) * fresh + share * before[unit];",
    ]
    return [*first, *block(turns("unit", layer.hidden), lines)]


def _rnn(layer: _Layer) -> list[str]:
    lines = [*layer.sums("sum", 0), f"after[unit] = {layer.curve(0, 'sum + sum_again')};"]
    return block(turns("unit", layer.hidden), lines)
