"""Requantisations ready-made: of each the limits of an engine that has it, and the rewrite that brings networks to it.

HALF_UP = Requantisation("half up", Rounding.SINGLE, bits=16)
offloads:  dt.Offload(name, pattern, (*LIMITS, *HALF_UP.limits), ...)  for layers.requantised("convolution", Conv2d)
policy:    dt.Policy("engine", "...", (HALF_UP.rewrite(takes),))

The integer graph then says what the engine computes, multiplier, shift and rounding, so firmware equals it bit for bit.
What each costs in accuracy: docs/quantisation.md.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from dovetail.documented import document
from dovetail.ir.graph import Graph
from dovetail.ir.operators.arithmetic import Clip, Requantize, Rounding
from dovetail.ir.operators.linear import Linear
from dovetail.ir.pattern import apply, constant, operand, rest
from dovetail.ir.requantisation.bounds import sum_bounds
from dovetail.ir.requantisation.equal import HALVES, LimitedSums, equal_scales
from dovetail.ir.rules import Left, Rule, RuleMatch, run
from dovetail.ir.types import Array, DType
from dovetail.legalize.requantisation import Accepts, accepted
from dovetail.records import Record
from dovetail.target.description import Rewrite
from dovetail.target.pattern import Constraint, Match, one_of

_X, _WEIGHTS, _MULTIPLIER, _SHIFT = operand("x"), constant("weights"), constant("multiplier"), constant("shift")
_LAYER = apply(Linear, _X, _WEIGHTS, rest("bias", known=True))
_SCALED = apply(Requantize, _LAYER, _MULTIPLIER, _SHIFT)
_LIMITED = apply(Clip, _SCALED)


class Requantisation(Record):
    """A way from a sum of products to its result: sum * multiplier * 2**(shift - 31), rounded."""

    name: str
    """Name for the policy, and for messages."""
    rounding: Rounding = Rounding.DOUBLE
    """Rounding of the product."""
    bits: int = 31
    """Bits of the multiplier; of 1 it is a power of two, and requantisation a shift."""
    per_channel: bool = True
    """A multiplier and a shift for each output channel; else one for the layer."""
    common_shift: bool = False
    """Whether all channels of a layer have one shift, beside multipliers of their own."""
    half_in_bias: bool = False
    """Whether the rewrite adds half a step of the result to the bias, for an engine that only cuts off."""

    @property
    def limits(self) -> tuple[Constraint, ...]:
        """Limits of `layers.requantised` patterns."""
        words = {
            Rounding.DOUBLE: "twice, as TensorFlow Lite Micro does",
            Rounding.SINGLE: "once, halves up",
            Rounding.AWAY: "once, halves away from zero",
        }
        how = words.get(self.rounding, f"as `{self.rounding.value}` does")
        found = [
            one_of(f"requantisation must round {how}", _rounding, self.rounding.value),
            one_of("sums are requantised as they are (zero point, left shift)", _before, (0, 0)),
        ]
        if self.bits < 31:
            sentence = f"a multiplier has at most {self.bits} bits"
            sentence = "multipliers must be powers of two" if self.bits == 1 else sentence
            bits = partial(_bits, together=self.common_shift)
            found.append(Constraint(sentence, bits, lambda most: most <= self.bits))
        if self.common_shift:
            found.append(one_of("the shift must be one for all channels", _shifts, 1))
        if not self.per_channel:
            found.append(one_of("multiplier and shift must be one for all channels", _count, 1))
        return tuple(found)

    def rewrite(self, accepts: Accepts = lambda types, node: True, exact: bool = False) -> Rewrite:
        """The step of a policy that brings requantised layers to this form; what it cannot bring there it leaves alone,
        and says why.

        Args:
            accepts: whether the engine computes a layer; told the types of all values and the layer.
            exact: whether only multipliers are taken that give the same result for every sum the layer can have
                (`dovetail.ir.requantisation.equal`); for roundings of one product and one shift.
        """
        if exact:
            rule = Rule(_LIMITED, self._equal, (accepted(accepts, _LAYER),))
            return Rewrite(self.name, lambda graph: run(graph, [rule]), lsb=0)
        same = self == Requantisation(self.name)
        rule = Rule(_SCALED, self._brought, (accepted(accepts, _LAYER),))
        return Rewrite(
            self.name, lambda graph: _at_ends(run(graph, [rule])), lsb=0 if same else 1 if self.bits > 12 else 2
        )

    def _equal(self, at: RuleMatch) -> str | Left | None:
        """The layer with the same results for every sum."""
        operator, limits = at[_SCALED], at[_LIMITED]
        if operator.input_zero_point or operator.left_shift or self.half_in_bias or self.rounding not in HALVES:
            return Left(f"{self.name}: nothing is known about the results of other sums")
        weights = at[_LAYER].filters(at.array(_WEIGHTS))
        kind, zero_point = at.type(_X).dtype, at[_LAYER].input_zero_point
        (bias,) = [at.array(value).astype(np.int64) for value in at.others(_LAYER)] or [np.zeros(1, np.int64)]
        low, high = (edge + bias for edge in sum_bounds(weights, kind.low - zero_point, kind.high - zero_point))
        wanted = LimitedSums(operator, limits, at.array(_MULTIPLIER), at.array(_SHIFT), low, high)
        found = equal_scales(wanted, self.rounding, self.bits, self.common_shift or not self.per_channel)
        if isinstance(found, int):
            sums = f"every sum from {low[found]} to {high[found]}"
            beside = " beside a common shift" if self.common_shift else ""
            return Left(f"no multiplier of {self.bits} bits{beside} gives channel {found} the same result for {sums}")
        if not self.per_channel and len(set(found[0].tolist())) > 1:
            return Left("the multipliers of channels differ; dovetail quantize can make it one")
        return self._scaled(at, *found)

    def _scaled(self, at: RuleMatch, multiplier: Array, shift: Array) -> str | None:
        """The limited requantisation with these parameters; None where it has them already."""
        arrays = [multiplier.astype(np.int32), shift.astype(np.int32)]
        same = all(np.array_equal(at.array(leaf), new) for leaf, new in zip((_MULTIPLIER, _SHIFT), arrays, strict=True))
        if same and at[_SCALED].rounding is self.rounding:
            return None
        leaves = zip(arrays, (_MULTIPLIER, _SHIFT), strict=True)
        names = [at.constant(array, DType.INT32, leaf) for array, leaf in leaves]
        scaled = at.add(replace(at[_SCALED], rounding=self.rounding), at.value(_LAYER), *names, like=_SCALED)
        return at.add(at[_LIMITED], scaled)

    def _brought(self, at: RuleMatch) -> str | Left | None:
        before = [at.array(_MULTIPLIER), at.array(_SHIFT)]
        multiplier, shift = normal(*before)
        factor = multiplier * 2.0 ** (shift - 31.0)
        crooked = np.flatnonzero(multiplier & (multiplier - 1))
        if self.bits == 1 and crooked.size:
            what = f"the multiplier of channel {crooked[0]} is no power of two ({factor[crooked[0]]:.6g})"
            return Left(f"{what}; dovetail quantize can make it one")
        if self.common_shift:
            multiplier, shift = _side_by_side(multiplier, shift, self.bits)
            if said := _missed(_reach(at), factor, multiplier * 2.0 ** (shift - 31.0)):
                return Left(said)
        else:
            multiplier, shift = normal(*_narrowed(multiplier, shift, self.bits))
        if not self.per_channel and any(len(set(own.reshape(-1).tolist())) > 1 for own in (multiplier, shift)):
            what = f"the multipliers of channels differ: {factor.min():.6g} to {factor.max():.6g}"
            return Left(f"{what}; dovetail quantize can make it one")
        count = slice(None) if self.per_channel else slice(1)
        arrays = [multiplier[count].astype(np.int32), shift[count].astype(np.int32)]
        same = all(np.array_equal(old, new) for old, new in zip(before, arrays, strict=True))
        if same and at[_SCALED].rounding is self.rounding:
            return None
        names = [
            at.constant(array, DType.INT32, leaf) for array, leaf in zip(arrays, (_MULTIPLIER, _SHIFT), strict=True)
        ]
        total = at.value(_LAYER)
        if self.half_in_bias:
            total = _raised(at, arrays[0] * 2.0 ** (arrays[1] - 31.0))
        return at.add(replace(at[_SCALED], rounding=self.rounding), total, *names)


def normal(multiplier: Array, shift: Array) -> tuple[Array, Array]:
    """The same factors, int64, with each `multiplier` from 2**30 on and its `shift`; factors of 0 as the least there
    is."""
    wide, places = multiplier.astype(np.int64), shift.astype(np.int64)
    bits = np.frexp(np.maximum(wide, 1).astype(np.float64))[1].astype(np.int64)
    raised = np.where(wide > 0, wide << (31 - bits), 1 << 30)
    return raised, np.where(wide > 0, places - (31 - bits), -31)


def _narrowed(multiplier: Array, shift: Array, bits: int) -> tuple[Array, Array]:
    """The nearest factors with multipliers of so many bits."""
    cut = np.int64(31 - bits)
    rounded = ((multiplier + ((np.int64(1) << cut) >> 1)) >> cut) << cut
    over = rounded >= np.int64(1) << 31
    return np.where(over, rounded >> 1, rounded), np.where(over, shift + 1, shift)


def _side_by_side(multiplier: Array, shift: Array, bits: int) -> tuple[Array, Array]:
    """The nearest factors with multipliers of so many bits beside one shift, the least with which none is too large."""
    places = np.broadcast_to(shift, np.broadcast_shapes(multiplier.shape, shift.shape))
    most, cut = places.max(), np.int64(31 - bits)
    while True:
        fine = np.minimum(cut + most - places, 62)
        found = (multiplier + (np.int64(1) << fine >> 1)) >> fine
        if found.max() < np.int64(1) << bits:
            return found << cut, np.array([most], np.int64)
        most += 1


_MOST_LOST = 0.5
"""Steps of a result by which a multiplier beside a common shift may miss."""


def _reach(at: RuleMatch) -> Array:
    """The greatest magnitude of each channel's sums."""
    kind, zero_point = at.type(_X).dtype, at[_LAYER].input_zero_point
    weights = at[_LAYER].filters(at.array(_WEIGHTS))
    (bias,) = [at.array(value).astype(np.int64) for value in at.others(_LAYER)] or [np.zeros(1, np.int64)]
    low, high = (edge + bias for edge in sum_bounds(weights, kind.low - zero_point, kind.high - zero_point))
    return np.maximum(np.abs(low), np.abs(high))


def _missed(reach: Array, wanted: Array, found: Array) -> str:
    """Why factors are too far from the wanted ones for results of 8 bits; empty where they are not."""
    lost = np.abs(found - wanted) * np.minimum(reach, 256 / np.maximum(wanted, 2.0**-60))
    channel = int(lost.argmax())
    if lost[channel] <= _MOST_LOST:
        return ""
    wanted, found = (np.broadcast_to(each, lost.shape) for each in (wanted, found))
    what = f"beside one shift for all channels the multiplier of channel {channel} is {found[channel]:.6g}"
    return f"{what} for {wanted[channel]:.6g}: results may be {lost[channel]:.1f} off"


def _raised(at: RuleMatch, factor: Array) -> str:
    """The layer's sums with half a step of the result in the bias: the part that is cut off is then rounded."""
    (bias,) = [at.array(value) for value in at.others(_LAYER)] or [np.zeros(at.type(_LAYER).shape[-1], np.int32)]
    half = np.rint(np.minimum(0.5 / np.maximum(factor, 2.0**-60), 2.0**29)).astype(np.int64)
    raised = np.clip(bias.astype(np.int64) + half, -(1 << 31), (1 << 31) - 1).astype(np.int32)
    return at.add(at[_LAYER], _X, _WEIGHTS, at.constant(raised, DType.INT32, at.node(_LAYER).inputs[-1]), like=_LAYER)


def _at_ends(graph: Graph) -> Graph:
    """The graph with the reason for leaving a requantisation also at the limits behind it, where layers end."""
    scaled = (node for node in graph.nodes if node.inputs and node.inputs[0] in graph.left)
    return replace(graph, left={**graph.left, **{node.output: graph.left[node.inputs[0]] for node in scaled}})


def _requantize(match: Match) -> Requantize:
    return match.operator("requantize", Requantize)


def _rounding(match: Match) -> str:
    return _requantize(match).rounding.value


def _before(match: Match) -> tuple[int, int]:
    return _requantize(match).input_zero_point, _requantize(match).left_shift


def _bits(match: Match, together: bool) -> int:
    """Bits between the highest and the lowest that is set, of any multiplier, or of all of them `together`."""
    wide = match.array("multiplier").astype(np.int64)
    lowest = np.maximum(wide & -wide, 1)
    lowest = lowest[wide > 0].min(initial=1 << 31) if together else lowest
    return int(np.frexp((wide // lowest).astype(np.float64))[1].max())


def _shifts(match: Match) -> int:
    return len(set(match.array("shift").reshape(-1).tolist()))


def _count(match: Match) -> int:
    return int(match.array("multiplier").size)


TFLITE = Requantisation("rounded twice")
"""Requantisation of TensorFlow Lite Micro: a high product, then a rounding shift. Networks from TFLite have it
already."""
HALF_UP = Requantisation("rounded once", Rounding.SINGLE)
"""Rounding of TOSA and XNNPACK: one product of 63 bits and one shift, halves up."""
HALF_UP_16 = Requantisation("rounded once, 16 bits", Rounding.SINGLE, bits=16)
"""The same with a multiplier of 16 bits."""
TRUNCATED = Requantisation("rounded down", Rounding.DOWN, half_in_bias=True)
"""Requantisation by one product and one shift that cuts off; the bias contains half a step."""
FLOAT32 = Requantisation("float32", Rounding.FLOAT32, bits=24)
"""The sum as float32 times a scale, rounded to the nearest, halves to even: a scale per channel."""
FLOAT32_PER_LAYER = replace(FLOAT32, name="float32, one scale", per_channel=False)
"""The same with one scale for the layer."""
SHIFTED = Requantisation("shifted", Rounding.SINGLE, bits=1)
"""A right shift per channel, halves up."""
SHIFTED_PER_LAYER = replace(SHIFTED, name="shifted, all alike", per_channel=False)
"""Requantisation by one right shift for a layer."""
COMMON_SHIFT = Requantisation("one shift, halves away", Rounding.AWAY, bits=15, common_shift=True)
"""A multiplier of 15 bits per channel and one shift for the layer, halves away from zero, as NVDLA's converters do."""
READY = (TFLITE, HALF_UP, HALF_UP_16, TRUNCATED, COMMON_SHIFT, FLOAT32, FLOAT32_PER_LAYER, SHIFTED, SHIFTED_PER_LAYER)
"""All ready-made requantisations."""

document(__name__)
