"""Recurrent layers on integers: one loop over the steps of a sequence, inside it over hidden values and gates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dovetail.graph.types import Array, DType, Shape
from dovetail.kernels.elements import Writer, operand, place_in, without_pad, write_elements
from dovetail.kernels.epilogue import Expression, Scope
from dovetail.kernels.kernel import Unsupported, declarations
from dovetail.kernels.region import Region
from dovetail.kernels.scope import INT32
from dovetail.kernels.text import block, function, loop, total
from dovetail.operators.fixed import sigmoid_table
from dovetail.operators.recurrent import FixedLstm, RowProducts, Scaling


def write_row_products(region: Region, scope: Scope) -> Writer:
    """The writer of a RowProducts; sums of integers are modulo 2**32."""
    anchor = region.anchor
    assert anchor is not None and isinstance(anchor.operator, RowProducts)
    without_pad(region)
    operator, types = anchor.operator, region.graph.types
    shape, real = types[anchor.inputs[0]].shape, types[anchor.output].dtype is DType.FLOAT32
    held, cast, none = ("float", "", "0.0f") if real else ("uint32_t", "(uint32_t)", "0u")

    def element(places: Sequence[str]) -> tuple[list[str], Expression]:
        x, weights = operand(region, scope, 0, "input"), operand(region, scope, 1, "weights")
        first = f"{cast}{operand(region, scope, 2, 'bias')}[{places[-1]}]" if len(anchor.inputs) > 2 else none
        from_, with_ = place_in(shape, (*places, "depth")), place_in(shape[-2:], (places[-1], "depth"))
        value = total(f"{x}[{from_}]", -operator.input_zero_point)
        value = f"({value})" if operator.input_zero_point else value
        step = f"sum += {cast}({value} * {weights}[{with_}]);"
        lines = [f"{held} sum = {first};", *loop("depth", shape[-1], [step])]
        return lines, Expression("sum", "float") if real else Expression("(int32_t)sum", "int32_t", *INT32)

    return write_elements(region, scope, element)


def unfused(region: Region) -> Shape:
    """The shape of x; raises Unsupported for anything fused with a recurrent layer."""
    assert region.anchor is not None
    without_pad(region)
    if region.tree:
        raise Unsupported(f"{type(region.tree[0].operator).__name__} behind a recurrent layer is not fused.")
    return region.graph.types[region.anchor.inputs[0]].shape


def _once(scaling: Scaling, value: str) -> str:
    """C of a product with one factor, rounded twice."""
    return f"requantize_double_any({value}, {scaling[0]}, {scaling[1]})"


def _limited(value: str) -> str:
    return f"clip({value}, -32768, 32767)"


def write_fixed_lstm(region: Region, scope: Scope) -> Writer:
    """The writer of a FixedLstm; zero points are folded into the biases."""
    anchor = region.anchor
    assert anchor is not None and isinstance(anchor.operator, FixedLstm)
    operator, (steps, batch, depth) = anchor.operator, unfused(region)
    hidden = region.output_shape[2]
    scalings = (*operator.input_scaling, *operator.hidden_scaling, operator.forget_scaling, operator.update_scaling)
    for _, shift in (*scalings, operator.output_scaling):
        if not -31 <= shift <= 30:
            raise Unsupported(f"a shift of {shift} is outside -31..30.")
    names = _fixed_constants(scope, region, operator)

    def write(name: str) -> list[str]:
        x, memory = scope.input(anchor.inputs[0], "input"), scope.input(anchor.inputs[4], "memory")
        lines = [*_sums("given", "from", depth, names), *_sums("again", "before", hidden, names)]
        turn = []
        for stem in ("given", "again"):
            factors = f"{names[f'{stem}_multiplier']}[gate], {names[f'{stem}_shift']}[gate]"
            scaled = f"requantize_double_any((int32_t){stem}[gate], {factors})"
            turn.append(f"const int32_t {stem}_16 = {_limited(scaled)};")
        turn.append(f"gates[gate] = {_limited('given_16 + again_16')};")
        lines += ["int32_t gates[4];", *block(turns("gate", 4), turn), *_fixed_update(operator, names["sigmoids"])]
        lines = [
            f"const int8_t *from = {x} + (step * {batch} + sequence) * {depth};",
            f"int16_t *after = output + (step * {batch} + sequence) * {hidden};",
            f"const int16_t *before = step == 0 ? {memory} + sequence * {hidden} : after - {batch * hidden};",
            f"int16_t *cell = output + ({steps * batch} + sequence) * {hidden};",
            *block(turns("unit", hidden), lines),
        ]
        lines = block(turns("step", steps), block(turns("sequence", batch), lines))
        lines = [*cells(memory, steps, batch * hidden), *lines]
        return function(f"static void {name}", declarations(scope.parameters()), lines)

    return write


def _sums(stem: str, source: str, depth: int, names: Mapping[str, str]) -> list[str]:
    """Define the four sums of products of a unit, whose weights of all gates stand side by side."""
    gates = range(4)
    offsets, weights = names[f"{stem}_offsets"], names[f"{stem}_weights"]
    return [
        *(f"uint32_t {stem}_{gate} = (uint32_t){offsets}[unit * 4 + {gate}];" for gate in gates),
        f"const int8_t *{stem}_with = {weights} + unit * {4 * depth};",
        *block(turns("depth", depth), [
            f"const int32_t value = {source}[depth];",
            *(f"{stem}_{gate} += (uint32_t)(value * {stem}_with[{gate}]);" for gate in gates),
            f"{stem}_with += 4;",
        ]),
        f"const uint32_t {stem}[4] = {{{', '.join(f'{stem}_{gate}' for gate in gates)}}};",
    ]  # fmt: skip


def turns(variable: str, stop: int) -> str:
    """The head of a loop that counts up to `stop`, which may be 1."""
    return f"for (int32_t {variable} = 0; {variable} < {stop}; ++{variable})"


def cells(memory: str, steps: int, size: int) -> list[str]:
    """The cells before the first step, where those after the last will be."""
    return block(turns("place", size), [f"output[{steps * size} + place] = {memory}[{size} + place];"])


def _fixed_update(operator: FixedLstm, table: str) -> list[str]:
    """The statements from the four gates to cell and hidden value."""
    bits = operator.cell_bits
    shape = f"{max(12 - bits, 0)}, {max(bits - 12, 0)}"
    kept = _once(operator.forget_scaling, f"sigmoid_16(3 * gates[1], {table}) * cell[unit]")
    added = _once(operator.update_scaling, f"sigmoid_16(3 * gates[0], {table}) * tanh_16(gates[2], 0, 0, {table})")
    shown = _once(operator.output_scaling, f"sigmoid_16(3 * gates[3], {table}) * tanh_16(next, {shape}, {table})")
    limit = operator.cell_clip
    return [
        f"const int32_t kept = {_limited(kept)};",
        f"const int32_t added = {_limited(added)};",
        f"const int32_t next = clip(kept + added, {max(-limit, -32768)}, {min(limit, 32767)});",
        "cell[unit] = (int16_t)next;",
        f"after[unit] = (int16_t)clip({total(shown, operator.hidden_zero_point)}, -128, 127);",
    ]


def _fixed_constants(scope: Scope, region: Region, operator: FixedLstm) -> dict[str, str]:
    """The C names of a FixedLstm's constants."""
    anchor = region.anchor
    assert anchor is not None
    weights, recurrent, bias = (scope.known(name) for name in anchor.inputs[1:4])

    def by_unit(array: Array) -> Array:
        """Rows by unit and then gate, which are by gate and then unit."""
        return array.reshape(4, -1, *array.shape[1:]).swapaxes(0, 1)

    arrays = {"sigmoids": sigmoid_table()}
    given = ("given", weights, operator.input_zero_point, bias.astype(np.int64))
    for stem, array, zero_point, first in (given, ("again", recurrent, operator.hidden_zero_point, np.int64(0))):
        # The sum where all operands are their zero point, modulo 2**32.
        offsets = np.asarray(first - zero_point * array.astype(np.int64).sum(axis=1)).astype(np.int32)
        arrays[f"{stem}_offsets"] = by_unit(offsets)
        arrays[f"{stem}_weights"] = by_unit(array).swapaxes(1, 2)
    for stem, four in (("given", operator.input_scaling), ("again", operator.hidden_scaling)):
        arrays[f"{stem}_multiplier"] = np.array([multiplier for multiplier, _ in four], np.int32)
        arrays[f"{stem}_shift"] = np.array([shift for _, shift in four], np.int8)
    return {stem: scope.constant(anchor.output, stem, array) for stem, array in arrays.items()}
