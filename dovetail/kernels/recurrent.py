"""Recurrent layers, of integers and floats: one loop over the steps of a sequence, inside it over hidden values.

Integers take the sigmoid and the hyperbolic tangent of fixed-point values between points: one segment looked up, one
product.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dovetail.ir.operators.fixed import sigmoid_table
from dovetail.ir.operators.recurrent import (
    Curve,
    FixedLstm,
    FixedRecurrent,
    Recurrent,
    RecurrentKind,
    RowProducts,
    Scaling,
)
from dovetail.ir.types import Array, DType
from dovetail.kernels.c import Lines, c_type, code, loop, real, total
from dovetail.kernels.elements import Computed, Places, place_in, write_elements
from dovetail.kernels.kernel import INT32, Expression, KernelWriter, UnsupportedRegion, refuse
from dovetail.kernels.registry import kernel
from dovetail.kernels.scope import KernelScope
from dovetail.records import Record

_SIGMOIDS, _TANGENTS = 192, 256
"""Segments on each side of 0: all that three times an int16 reaches in steps of 512, and in steps of 256 all before the
tangent is flat."""


@kernel(RowProducts)
def _row_products(scope: KernelScope, operator: RowProducts) -> KernelWriter:
    """The writer of a RowProducts; sums of integers are modulo 2**32."""
    shape, real = scope.type(0).shape, scope.result.dtype is DType.FLOAT32
    held, cast, none = ("float", "", "0.0f") if real else ("uint32_t", "(uint32_t)", "0u")

    def element(places: Places) -> Computed:
        x, weights = scope.operand(0, "input"), scope.operand(1, "weights")
        first = f"{cast}{scope.operand(2, 'bias')}[{places[-1]}]" if len(scope.node.inputs) > 2 else none
        from_, with_ = place_in(shape, (*places, "depth")), place_in(shape[-2:], (places[-1], "depth"))
        value = total(f"{x}[{from_}]", -operator.input_zero_point)
        value = f"({value})" if operator.input_zero_point else value
        step = f"sum += {cast}({value} * {weights}[{with_}]);"
        lines = [f"{held} sum = {first};", *loop("depth", shape[-1], [step])]
        return lines, Expression("sum", "float") if real else Expression("(int32_t)sum", "int32_t", *INT32)

    return write_elements(scope, element)


def _sizes(scope: KernelScope) -> tuple[int, int, int, int]:
    """Steps, sequences, elements of the operand and hidden values; raises Unsupported for anything fused with a
    recurrent layer."""
    if scope.tree:
        raise UnsupportedRegion(f"{type(scope.tree[0].operator).__name__} behind a recurrent layer is not fused.")
    steps, batch, depth = scope.type(0).shape
    return steps, batch, depth, scope.output_shape[2]


def _over_steps(scope: KernelScope, lines: Lines, cells: bool = False, reverse: bool | None = None) -> Lines:
    """The loops over steps and sequences around the statements that compute all hidden values `after` a step from the
    operand at `from` and those `before`; a layer of floats may go backwards."""
    steps, batch, depth, hidden = _sizes(scope)
    read, held, size = c_type(scope.source_dtype), c_type(scope.result.dtype), batch * hidden
    x, memory = scope.operand(0, "input"), scope.operand(4, "memory")
    time, sign = "step" if reverse is None else "time", "+" if reverse else "-"
    clock = f"const int32_t time = {f'{steps - 1} - step' if reverse else 'step'};"
    before = code(f"""
        for (int32_t place = 0; place < {size}; ++place) {{
            output[{steps * size} + place] = {memory}[{size} + place];
        }}
    """)
    loops = code(
        f"""
        for (int32_t step = 0; step < {steps}; ++step) {{
            for (int32_t sequence = 0; sequence < {batch}; ++sequence) {{
                @clock
                const {read} *from = {x} + ({time} * {batch} + sequence) * {depth};
                {held} *after = output + ({time} * {batch} + sequence) * {hidden};
                const {held} *before = step == 0 ? {memory} + sequence * {hidden} : after {sign} {size};
                @cell
                @lines
            }}
        }}
        """,
        clock=[] if reverse is None else [clock],
        cell=[f"{held} *cell = output + ({steps * batch} + sequence) * {hidden};"] if cells else [],
        lines=lines,
    )
    return [*(before if cells else ()), *loops]


def _units(hidden: int, *lines: Lines) -> Lines:
    """The loop over hidden values."""
    inner = [line for part in lines for line in part]
    return code(f"for (int32_t unit = 0; unit < {hidden}; ++unit) {{\n    @inner\n}}", inner=inner)


def _scaled_once(scaling: Scaling, value: str, doubled: str = "") -> str:
    """C of a value times a factor, rounded as TensorFlow Lite Micro does; `doubled`: C of twice the multiplier."""
    multiplier, shift = scaling
    if shift < 0 and multiplier >= 1 << 30:
        return f"requantize_double({value}, {doubled or f'{2 * multiplier}u'}, {-1 - shift}, 0)"
    return f"requantize_double_any({value}, {multiplier}, {shift})"


def _require_shifts(*scalings: Scaling) -> None:
    for _, shift in scalings:
        refuse(not -31 <= shift <= 30, f"a shift of {shift} is outside -31..30.")


def segments() -> Mapping[str, Array]:
    """Start of each segment (int32, the rounding of the result added) and its slope (uint16), the lowest first.

    The halves below 0 are those of TensorFlow Lite Micro turned round, segment by segment: that of -v begins where the
    one of v ends, with the same slope (`between_sigmoids`).
    """
    table = sigmoid_table().astype(np.int64)
    slopes = np.diff(table)
    place = np.arange(_SIGMOIDS)
    starts = np.concatenate([(1 << 25) - (table[place + 1] << 9)[::-1] + 511, (table[place] << 9) + 512])
    arrays = {"sigmoid_starts": starts, "sigmoid_slopes": np.concatenate([slopes[place][::-1], slopes[place]])}
    place, middle = np.arange(_TANGENTS), 1 << 23  # the last two points are equal: flat from there
    starts = np.concatenate([127 + middle - (table[place + 1] << 8)[::-1], (table[place] << 8) - middle + 128])
    arrays |= {"tangent_starts": starts, "tangent_slopes": np.concatenate([slopes[place][::-1], slopes[place]])}
    return {stem: array.astype(np.int32 if "starts" in stem else np.uint16) for stem, array in arrays.items()}


class _FixedLayer(Record):
    """The C names of a layer's constants, those of both curves among them."""

    names: Mapping[str, str]

    def sigmoid(self, gate: str) -> str:
        """The sigmoid of an int16 in Q3.12, as Q0.15."""
        starts, slopes = (f"{self.names[stem]} + {_SIGMOIDS}" for stem in ("sigmoid_starts", "sigmoid_slopes"))
        return f"curve_16(3 * {gate}, 9, 10, {starts}, {slopes})"

    def tangent(self, value: str, left: int = 0, right: int = 0) -> str:
        """The tangent of an int16 with 12 + right - left fraction bits, as Q0.15."""
        scaled = f"{3 << left} * {value}"
        scaled = f"({scaled} + {(1 << right) >> 1}) >> {right}" if right else scaled
        starts, slopes = (f"{self.names[stem]} + {_TANGENTS}" for stem in ("tangent_starts", "tangent_slopes"))
        return f"curve_16(saturate_17({scaled}), 8, 8, {starts}, {slopes})"


def _fixed_layer(scope: KernelScope, arrays: Mapping[str, Array]) -> _FixedLayer:
    owner = scope.node.output
    return _FixedLayer({stem: scope.constant(owner, stem, array) for stem, array in {**arrays, **segments()}.items()})


_FOUR = 4
"""Values multiplied at once; rows of weights are filled up to so many."""


@kernel(FixedLstm)
def _fixed_lstm(scope: KernelScope, operator: FixedLstm) -> KernelWriter:
    """The writer of a FixedLstm; zero points are folded into the biases."""
    _, _, depth, hidden = _sizes(scope)
    _require_shifts(*operator.input_scaling, *operator.hidden_scaling, operator.forget_scaling)
    _require_shifts(operator.update_scaling, operator.output_scaling)
    layer = _fixed_layer(scope, _fixed_constants(scope, operator))
    names, own, again = layer.names, *(-(-size // _FOUR) for size in (depth, hidden))

    def gates() -> Lines:
        """Define the four gates of a unit, whose weights of all stand side by side."""
        parts = (("given", "operands", own), ("again", f"operands + {_FOUR * own}", again))
        lines = Lines()
        for at, (stem, source, fours) in enumerate(parts):
            offsets = (f"(uint32_t){names['offsets']}[unit * 8 + {4 * at + gate}]" for gate in range(4))
            weights = f"{names[f'{stem}_weights']} + unit * {4 * _FOUR * fours}"
            lines += [
                f"uint32_t {stem}[4] = {{{', '.join(offsets)}}};",
                f"gate_sums({stem}, {source}, {weights}, {fours});",
            ]
        for gate, scalings in enumerate(zip(operator.input_scaling, operator.hidden_scaling, strict=True)):
            for at, (stem, _, _) in enumerate(parts):
                doubled = f"{names['factors']}[{2 * gate + at}]"
                scaled = _scaled_once(scalings[at], f"(int32_t){stem}[{gate}]", doubled)
                lines.append(f"const int32_t {stem}_{gate} = saturate_16({scaled});")
            lines.append(f"const int32_t gate_{gate} = saturate_16(given_{gate} + again_{gate});")
        return lines

    def body() -> Lines:
        lines = code(
            f"""
            for (int32_t place = 0; place < {depth}; ++place) {{
                operands[place] = from[place];
            }}
            __builtin_memcpy(operands + {_FOUR * own}, before, {2 * hidden});
            @units
            """,
            units=_units(hidden, gates(), _fixed_update(operator, layer)),
        )
        room = f"operands[{_FOUR * (own + again)}] __attribute__((aligned(8)))"
        return [f"static int16_t {room}; /* rows filled up with 0 */", *_over_steps(scope, lines, cells=True)]

    return scope.writer(body, has_storage=True)


def _fixed_update(operator: FixedLstm, layer: _FixedLayer) -> Lines:
    """The statements from the four gates to cell and hidden value."""
    bits, limit = operator.cell_bits, operator.cell_clip
    kept = _scaled_once(operator.forget_scaling, f"{layer.sigmoid('gate_1')} * cell[unit]")
    added = _scaled_once(operator.update_scaling, f"{layer.sigmoid('gate_0')} * {layer.tangent('gate_2')}")
    next_tangent = layer.tangent("next", max(12 - bits, 0), max(bits - 12, 0))
    shown = _scaled_once(operator.output_scaling, f"{layer.sigmoid('gate_3')} * {next_tangent}")
    return code(f"""
        const int32_t kept = saturate_16({kept});
        const int32_t added = saturate_16({added});
        const int32_t next = clip(kept + added, {max(-limit, -32768)}, {min(limit, 32767)});
        cell[unit] = (int16_t)next;
        after[unit] = (int16_t)saturate({total(shown, operator.hidden_zero_point)});
    """)


def _fixed_constants(scope: KernelScope, operator: FixedLstm) -> dict[str, Array]:
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
    return {**arrays, "factors": np.array(doubled, np.uint32), "offsets": np.concatenate(offsets, axis=1)}


class _GatedLayer(_FixedLayer):
    """A GRU or plain layer of integers."""

    operator: FixedRecurrent
    depth: int
    hidden: int

    def sum(self, stem: str, gate: int, source: str = "") -> Lines:
        """Define `stem`: the Q3.12 of a gate's products with x, or with hidden values at `source`, for the present
        unit."""
        own, depth, scalings = ("given", self.depth, self.operator.input_scaling)
        if source:
            own, depth, scalings = ("again", self.hidden, self.operator.hidden_scaling)
        row = total("unit", gate * self.hidden)
        weight = f"{self.names[f'{own}_weights']}[({row}) * {depth} + depth]"
        return code(f"""
            uint32_t {stem}_sum = (uint32_t){self.names[f"{own}_offsets"]}[{row}];
            for (int32_t depth = 0; depth < {depth}; ++depth) {{
                {stem}_sum += (uint32_t)({source or "from"}[depth] * {weight});
            }}
            const int32_t {stem} = saturate_16({_scaled_once(scalings[gate], f"(int32_t){stem}_sum")});
        """)

    def gate(self, stem: str, gate: int) -> Lines:
        """Define `stem`: a gate in Q0.15."""
        sums = [*self.sum(f"{stem}_given", gate), *self.sum(f"{stem}_again", gate, "before")]
        return [*sums, f"const int32_t {stem} = {self.sigmoid(f'saturate_16({stem}_given + {stem}_again)')};"]

    def gru(self) -> Lines:
        first, reset, source = Lines(), self.gate("reset", 1), "before"
        inner = "((reset * again + 16384) >> 15)"
        if not self.operator.reset_after:
            kept = ["kept[unit] = (int16_t)((reset * before[unit] + 16384) >> 15);"]
            first, reset, source, inner = _units(self.hidden, reset, kept), [], "kept", "again"
        last = code(f"""
            const int32_t fresh = {self.tangent(f"saturate_16(given + {inner})")};
            after[unit] = (int16_t)(((32768 - update) * fresh + update * before[unit] + 16384) >> 15);
        """)
        sums = [*self.sum("given", 2), *self.sum("again", 2, source)]
        return [*first, *_units(self.hidden, self.gate("update", 0), reset, sums, last)]

    def rnn(self) -> Lines:
        last = [f"after[unit] = (int16_t){self.tangent('saturate_16(given + again)')};"]
        return _units(self.hidden, self.sum("given", 0), self.sum("again", 0, "before"), last)


@kernel(FixedRecurrent)
def _fixed_recurrent(scope: KernelScope, operator: FixedRecurrent) -> KernelWriter:
    _, _, depth, hidden = _sizes(scope)
    _require_shifts(*operator.input_scaling, *operator.hidden_scaling)
    weights, recurrent, bias = (scope.known(name) for name in scope.node.inputs[1:4])
    of_x, of_hidden = np.split(bias, 2)
    # The sum where all of x is its zero point, modulo 2**32.
    offsets = of_x.astype(np.int64) - operator.input_zero_point * weights.astype(np.int64).sum(axis=1)
    arrays = {"given_weights": weights, "given_offsets": offsets.astype(np.int32)}
    arrays |= {"again_weights": recurrent, "again_offsets": of_hidden}
    layer = _GatedLayer(_fixed_layer(scope, arrays).names, operator, depth, hidden)
    gated = operator.kind is RecurrentKind.GRU
    keeps = gated and not operator.reset_after

    def body() -> Lines:
        kept = [f"static int16_t kept[{hidden}]; /* hidden values times their reset gates */"] if keeps else []
        return [*kept, *_over_steps(scope, layer.gru() if gated else layer.rnn())]

    return scope.writer(body, has_storage=keeps)


_CURVES = {
    Curve.SIGMOID: "logistic({x})",
    Curve.TANH: "hyperbolic_tangent({x})",
    Curve.RELU: "larger({x}, 0.0f)",
    Curve.SOFTSIGN: "({x}) / (1.0f + absolute({x}))",
    Curve.HARD_SIGMOID: "smaller(larger(({x}) * {slope} + {offset}, 0.0f), 1.0f)",
    Curve.AFFINE: "(({x}) * {slope} + {offset})",
}
_OPERANDS = ("input", "weights", "recurrent", "bias", "memory", "peepholes")


class _FloatLayer(Record):
    operator: Recurrent
    names: Mapping[str, str]
    """C names of the operands."""
    depth: int
    hidden: int

    def curve(self, place: int, x: str) -> str:
        slope, offset = map(real, self.operator.lines[place] if self.operator.lines else (1.0, 0.0))
        form = _CURVES[self.operator.functions[place]]
        return form.format(x=_limited(x, self.operator.clip if place < 2 else 0.0), slope=slope, offset=offset)

    def sums(self, stem: str, gate: int, source: str = "before") -> Lines:
        """Define `stem` and `stem`_again: the bias and products with x, and with hidden values, of a unit's gate."""
        row, names = total("unit", gate * self.hidden), self.names
        again = total("unit", (gate + self.operator.kind.gates) * self.hidden)
        return code(f"""
            float {stem} = {names["bias"]}[{row}], {stem}_again = {names["bias"]}[{again}];
            for (int32_t depth = 0; depth < {self.depth}; ++depth) {{
                {stem} += from[depth] * {names["weights"]}[({row}) * {self.depth} + depth];
            }}
            for (int32_t depth = 0; depth < {self.hidden}; ++depth) {{
                {stem}_again += {source}[depth] * {names["recurrent"]}[({row}) * {self.hidden} + depth];
            }}
        """)

    def peephole(self, gate: int, cell: str) -> str:
        """C to add for what a gate sees of the cell; empty without peepholes."""
        if "peepholes" not in self.names:
            return ""
        return f" + {self.names['peepholes']}[{total('unit', gate * self.hidden)}] * {cell}"

    def lstm(self) -> Lines:
        gates = [self.sums(stem, place) for place, stem in enumerate(("in", "out", "keep", "candidate"))]
        keep = self.curve(0, "keep + keep_again" + self.peephole(2, "cell[unit]"))
        enter = self.curve(0, "in + in_again" + self.peephole(0, "cell[unit]"))
        leave = self.curve(0, "out + out_again" + self.peephole(1, "next"))
        sum_ = f"{keep} * cell[unit] + {enter} * {self.curve(1, 'candidate + candidate_again')}"
        last = code(f"""
            const float next = {_limited(sum_, self.operator.cell_clip)};
            cell[unit] = next;
            after[unit] = {leave} * {self.curve(2, "next")};
        """)
        return _units(self.hidden, *gates, last)

    def gru(self) -> Lines:
        reset = self.curve(0, "reset + reset_again")
        first, before, again, source = Lines(), self.sums("reset", 1), f"{reset} * candidate_again", "before"
        if not self.operator.reset_after:
            first = _units(self.hidden, before, [f"scaled[unit] = {reset} * before[unit];"])
            before, again, source = [], "candidate_again", "scaled"
        last = code(f"""
            const float share = {self.curve(0, "update + update_again")};
            const float fresh = {self.curve(1, f"candidate + {again}")};
            after[unit] = (1.0f - share) * fresh + share * before[unit];
        """)
        return [*first, *_units(self.hidden, self.sums("update", 0), before, self.sums("candidate", 2, source), last)]

    def rnn(self) -> Lines:
        return _units(self.hidden, self.sums("sum", 0), [f"after[unit] = {self.curve(0, 'sum + sum_again')};"])


def _limited(x: str, most: float) -> str:
    """C of a value that is limited to a magnitude; 0 for no limit."""
    return f"smaller(larger({x}, {real(-most)}), {real(most)})" if most else x


@kernel(Recurrent)
def _recurrent(scope: KernelScope, operator: Recurrent) -> KernelWriter:
    _, _, depth, hidden = _sizes(scope)
    keeps = operator.kind is RecurrentKind.GRU and not operator.reset_after

    def body() -> Lines:
        stems = _OPERANDS[: len(scope.node.inputs)]
        layer = _FloatLayer(operator, {stem: scope.operand(at, stem) for at, stem in enumerate(stems)}, depth, hidden)
        writers = {RecurrentKind.LSTM: layer.lstm, RecurrentKind.GRU: layer.gru, RecurrentKind.RNN: layer.rnn}
        head = [f"static float scaled[{hidden}]; /* hidden values times their reset gates */"] if keeps else []
        return [
            *head,
            *_over_steps(scope, writers[operator.kind](), operator.kind is RecurrentKind.LSTM, operator.reverse),
        ]

    return scope.writer(body, has_storage=keeps)
