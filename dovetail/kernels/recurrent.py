"""Recurrent layers, of integers and floats: one loop over the steps of a sequence, inside it over hidden values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dovetail.ir.operators.recurrent import Curve, FixedLstm, Recurrent, RecurrentKind, RowProducts, Scaling
from dovetail.ir.types import DType, Shape
from dovetail.kernels.c import Lines, block, loop, total
from dovetail.kernels.curves import Curves
from dovetail.kernels.elements import place_in, write_elements
from dovetail.kernels.kernel import INT32, Expression, KernelWriter, UnsupportedRegion
from dovetail.kernels.registry import kernel
from dovetail.kernels.scope import KernelScope


@kernel(RowProducts)
def _row_products(scope: KernelScope, operator: RowProducts) -> KernelWriter:
    """The writer of a RowProducts; sums of integers are modulo 2**32."""
    types = scope.graph.types
    shape, real = scope.type(0).shape, types[scope.node.output].dtype is DType.FLOAT32
    held, cast, none = ("float", "", "0.0f") if real else ("uint32_t", "(uint32_t)", "0u")

    def element(places: Sequence[str]) -> tuple[Lines, Expression]:
        x, weights = scope.operand(0, "input"), scope.operand(1, "weights")
        first = f"{cast}{scope.operand(2, 'bias')}[{places[-1]}]" if len(scope.node.inputs) > 2 else none
        from_, with_ = place_in(shape, (*places, "depth")), place_in(shape[-2:], (places[-1], "depth"))
        value = total(f"{x}[{from_}]", -operator.input_zero_point)
        value = f"({value})" if operator.input_zero_point else value
        step = f"sum += {cast}({value} * {weights}[{with_}]);"
        lines = [f"{held} sum = {first};", *loop("depth", shape[-1], [step])]
        return lines, Expression("sum", "float") if real else Expression("(int32_t)sum", "int32_t", *INT32)

    return write_elements(scope, element)


def unfused(scope: KernelScope) -> Shape:
    """The shape of x; raises Unsupported for anything fused with a recurrent layer."""
    if scope.tree:
        raise UnsupportedRegion(f"{type(scope.tree[0].operator).__name__} behind a recurrent layer is not fused.")
    return scope.type(0).shape


def scaled_once(scaling: Scaling, value: str, doubled: str = "") -> str:
    """C of a value times a factor, rounded as TensorFlow Lite Micro does; `doubled`: C of twice the multiplier."""
    multiplier, shift = scaling
    if shift < 0 and multiplier >= 1 << 30:
        return f"requantize_double({value}, {doubled or f'{2 * multiplier}u'}, {-1 - shift}, 0)"
    return f"requantize_double_any({value}, {multiplier}, {shift})"


def limited(value: str) -> str:
    """C of a value limited to int16."""
    return f"saturate_16({value})"


@kernel(FixedLstm)
def _fixed_lstm(scope: KernelScope, operator: FixedLstm) -> KernelWriter:
    """The writer of a FixedLstm; zero points are folded into the biases."""
    (steps, batch, depth) = unfused(scope)
    hidden = scope.output_shape[2]
    scalings = (*operator.input_scaling, *operator.hidden_scaling, operator.forget_scaling, operator.update_scaling)
    for _, shift in (*scalings, operator.output_scaling):
        if not -31 <= shift <= 30:
            raise UnsupportedRegion(f"a shift of {shift} is outside -31..30.")
    names = _fixed_constants(scope, operator)
    curves = Curves(scope, scope.node.output)
    own, again = (-(-size // _FOUR) for size in (depth, hidden))

    def body() -> Lines:
        x, memory = scope.operand(0, "input"), scope.operand(4, "memory")
        both = {"given": operator.input_scaling, "again": operator.hidden_scaling}
        lines = [*_sums("given", "operands", own, names), *_sums("again", f"operands + {_FOUR * own}", again, names)]
        for gate in range(4):
            for at, (stem, scalings) in enumerate(both.items()):
                doubled = f"{names['factors']}[{2 * gate + at}]"
                scaled = scaled_once(scalings[gate], f"(int32_t){stem}[{gate}]", doubled)
                lines.append(f"const int32_t {stem}_{gate} = {limited(scaled)};")
            lines.append(f"const int32_t gate_{gate} = {limited(f'given_{gate} + again_{gate}')};")
        lines = [
            f"const int8_t *from = {x} + (step * {batch} + sequence) * {depth};",
            f"int16_t *after = output + (step * {batch} + sequence) * {hidden};",
            f"const int16_t *before = step == 0 ? {memory} + sequence * {hidden} : after - {batch * hidden};",
            f"int16_t *cell = output + ({steps * batch} + sequence) * {hidden};",
            *block(turns("place", depth), ["operands[place] = from[place];"]),
            f"__builtin_memcpy(operands + {_FOUR * own}, before, {2 * hidden});",
            *block(turns("unit", hidden), [*lines, *_fixed_update(operator, curves)]),
        ]
        lines = block(turns("step", steps), block(turns("sequence", batch), lines))
        kept = (
            f"static int16_t operands[{_FOUR * (own + again)}] __attribute__((aligned(8))); /* rows filled up with 0 */"
        )
        return [kept, *_cells(memory, steps, batch * hidden), *lines]

    return scope.writer(body, has_storage=True)


_FOUR = 4
"""Values multiplied at once; rows of weights are filled up to so many."""


def _sums(stem: str, source: str, fours: int, names: Mapping[str, str]) -> Lines:
    """Define the four sums of products of a unit, whose weights of all gates stand side by side."""
    places = range(4) if stem == "given" else range(4, 8)
    first = ", ".join(f"(uint32_t){names['offsets']}[unit * 8 + {place}]" for place in places)
    weights = f"{names[f'{stem}_weights']} + unit * {4 * _FOUR * fours}"
    return [f"uint32_t {stem}[4] = {{{first}}};", f"gate_sums({stem}, {source}, {weights}, {fours});"]


def turns(variable: str, stop: int) -> str:
    """The head of a loop that counts up to `stop`, which may be 1."""
    return f"for (int32_t {variable} = 0; {variable} < {stop}; ++{variable})"


def _cells(memory: str, steps: int, size: int) -> Lines:
    """The cells before the first step, where those after the last will be."""
    return block(turns("place", size), [f"output[{steps * size} + place] = {memory}[{size} + place];"])


def _fixed_update(operator: FixedLstm, curves: Curves) -> Lines:
    """The statements from the four gates to cell and hidden value."""
    bits = operator.cell_bits
    kept = scaled_once(operator.forget_scaling, f"{curves.sigmoid('gate_1')} * cell[unit]")
    added = scaled_once(operator.update_scaling, f"{curves.sigmoid('gate_0')} * {curves.tangent('gate_2')}")
    shape = max(12 - bits, 0), max(bits - 12, 0)
    shown = scaled_once(operator.output_scaling, f"{curves.sigmoid('gate_3')} * {curves.tangent('next', *shape)}")
    limit = operator.cell_clip
    return [
        f"const int32_t kept = {limited(kept)};",
        f"const int32_t added = {limited(added)};",
        f"const int32_t next = clip(kept + added, {max(-limit, -32768)}, {min(limit, 32767)});",
        "cell[unit] = (int16_t)next;",
        f"after[unit] = (int16_t)saturate({total(shown, operator.hidden_zero_point)});",
    ]


def _fixed_constants(scope: KernelScope, operator: FixedLstm) -> dict[str, str]:
    weights, recurrent, bias = (scope.known(name) for name in scope.node.inputs[1:4])
    arrays, offsets = {}, []
    given = ("given", weights, operator.input_zero_point, bias.astype(np.int64))
    for stem, array, zero_point, first in (given, ("again", recurrent, operator.hidden_zero_point, np.int64(0))):
        # The sum where all operands are their zero point, modulo 2**32.
        start = np.asarray(first - zero_point * array.astype(np.int64).sum(axis=1)).astype(np.int32)
        offsets.append(start.reshape(4, -1).T)
        filled = np.pad(array, [(0, 0), (0, -array.shape[1] % _FOUR)])
        by_pair = filled.reshape(2, 2, len(filled) // 4, -1, 2)  # two and two gates, unit, pair, value
        arrays[f"{stem}_weights"] = by_pair.transpose(2, 3, 0, 4, 1)
    pairs = zip(operator.input_scaling, operator.hidden_scaling, strict=True)
    doubled = [2 * scaling[0] & 0xFFFFFFFF for pair in pairs for scaling in pair]
    arrays |= {"factors": np.array(doubled, np.uint32), "offsets": np.concatenate(offsets, axis=1)}
    return {stem: scope.constant(scope.node.output, stem, array) for stem, array in arrays.items()}


_CURVES = {Curve.SIGMOID: "logistic({x})", Curve.TANH: "hyperbolic_tangent({x})", Curve.RELU: "larger({x}, 0.0f)"}
_OPERANDS = ("input", "weights", "recurrent", "bias", "memory", "peepholes")


@dataclass(frozen=True)
class _FloatLayer:
    operator: Recurrent
    names: Mapping[str, str]
    """C names of the operands."""
    hidden: int
    depth: int

    def curve(self, place: int, x: str) -> str:
        return _CURVES[self.operator.functions[place]].format(x=x)

    def sums(self, stem: str, gate: int, source: str = "before") -> Lines:
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


@kernel(Recurrent)
def _recurrent(scope: KernelScope, operator: Recurrent) -> KernelWriter:
    (steps, batch, depth) = unfused(scope)
    hidden, size = scope.output_shape[2], batch * scope.output_shape[2]
    update = {RecurrentKind.LSTM: _lstm, RecurrentKind.GRU: _gru, RecurrentKind.RNN: _rnn}[operator.kind]

    def body() -> Lines:
        stems = _OPERANDS[: len(scope.node.inputs)]
        names = {stem: scope.operand(place, stem) for place, stem in enumerate(stems)}
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
            head = _cells(names["memory"], steps, size)
        if operator.kind is RecurrentKind.GRU and not operator.reset_after:
            head = [f"static float scaled[{hidden}]; /* hidden values times their reset gates */"]
        lines += update(_FloatLayer(operator, names, hidden, depth))
        return [*head, *block(turns("step", steps), block(turns("sequence", batch), lines))]

    return scope.writer(body, has_storage=operator.kind is RecurrentKind.GRU and not operator.reset_after)


def _lstm(layer: _FloatLayer) -> Lines:
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


def _gru(layer: _FloatLayer) -> Lines:
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


def _rnn(layer: _FloatLayer) -> Lines:
    lines = [*layer.sums("sum", 0), f"after[unit] = {layer.curve(0, 'sum + sum_again')};"]
    return block(turns("unit", layer.hidden), lines)
