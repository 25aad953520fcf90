"""Requantisations ready-made: of each the limits of an engine that has it, and the rewrite that brings networks to it.

HALF_UP = Requantisation("half up", Rounding.SINGLE, bits=16)
offloads:  dt.Offload(name, pattern, (*LIMITS, *HALF_UP.limits), ...)  for layers.requantised("convolution", Conv2d)
policy:    dt.Policy("engine", "...", (HALF_UP.rewrite(takes),))

The integer graph then says what the engine computes, multiplier, shift and rounding, so firmware equals it bit for bit.
What each costs in accuracy: docs/quantisation.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dovetail.ir.graph import Graph
from dovetail.ir.operators.arithmetic import Requantize, Rounding
from dovetail.ir.operators.linear import Linear
from dovetail.ir.pattern import apply, constant, operand, rest
from dovetail.ir.rules import Left, Rule, RuleMatch, run
from dovetail.ir.types import Array, DType
from dovetail.legalize.requantisation import Accepts, accepted
from dovetail.target.description import Rewrite
from dovetail.target.pattern import Constraint, Match, one_of

_X, _WEIGHTS, _MULTIPLIER, _SHIFT = operand("x"), constant("weights"), constant("multiplier"), constant("shift")
_LAYER = apply(Linear, _X, _WEIGHTS, rest("bias", known=True))
_SCALED = apply(Requantize, _LAYER, _MULTIPLIER, _SHIFT)


@dataclass(frozen=True)
class Requantisation:
    """How an engine brings a sum of products to its result: sum * multiplier * 2**(shift - 31), rounded in a way."""

    name: str
    """For the policy, and messages."""
    rounding: Rounding = Rounding.DOUBLE
    bits: int = 31
    """Bits of the multiplier; of 1 it is a power of two, and requantisation a shift."""
    per_channel: bool = True
    """A multiplier and a shift for each output channel; else one for the layer."""
    half_in_bias: bool = False
    """Whether the rewrite adds half a step of the result to the bias, for an engine that only cuts off."""

    @property
    def limits(self) -> tuple[Constraint, ...]:
        """Limits of `layers.requantised` patterns."""
        words = {Rounding.DOUBLE: "twice, as TensorFlow Lite Micro does", Rounding.SINGLE: "once, halves up"}
        how = words.get(self.rounding, f"as `{self.rounding.value}` does")
        found = [
            one_of(f"requantisation must round {how}", _rounding, self.rounding.value),
            one_of("sums are requantised as they are (zero point, left shift)", _before, (0, 0)),
        ]
        if self.bits < 31:
            sentence = f"a multiplier has at most {self.bits} bits"
            sentence = "multipliers must be powers of two" if self.bits == 1 else sentence
            found.append(Constraint(sentence, _bits, lambda most: most <= self.bits))
        if not self.per_channel:
            found.append(one_of("multiplier and shift must be one for all channels", _count, 1))
        return tuple(found)

    def rewrite(self, accepts: Accepts = lambda types, node: True) -> Rewrite:
        """The step of a policy that brings requantised layers to this form; what it cannot bring there it leaves alone,
        and says why.

        Args:
            accepts: whether the engine computes a layer; told the types of all values and the layer.
        """

        exact = self == Requantisation(self.name)
        rule = Rule(_SCALED, self._brought, (accepted(accepts, _LAYER),))
        return Rewrite(
            self.name, lambda graph: _at_ends(run(graph, [rule])), lsb=0 if exact else 1 if self.bits > 12 else 2
        )

    def _brought(self, at: RuleMatch) -> str | Left | None:
        before = [at.array(_MULTIPLIER), at.array(_SHIFT)]
        multiplier, shift = normal(*before)
        factor = multiplier * 2.0 ** (shift - 31.0)
        crooked = np.flatnonzero(multiplier & (multiplier - 1))
        if self.bits == 1 and crooked.size:
            what = f"the multiplier of channel {crooked[0]} is no power of two ({factor[crooked[0]]:.6g})"
            return Left(f"{what}; dovetail quantize can make it one")
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
    """The same factors with multipliers from 2**30 on, int64; factors of 0 as the least there is."""
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


def _bits(match: Match) -> int:
    """Bits between the highest and the lowest that is set, of any multiplier."""
    wide = match.array("multiplier").astype(np.int64)
    lowest = np.maximum(wide & -wide, 1)
    return int(np.frexp((wide // lowest).astype(np.float64))[1].max())


def _count(match: Match) -> int:
    return int(match.array("multiplier").size)


TFLITE = Requantisation("rounded twice")
"""As TensorFlow Lite Micro: a high product, then a rounding shift. A network of TFLite's is so already."""
HALF_UP = Requantisation("rounded once", Rounding.SINGLE)
"""As TOSA and XNNPACK: one product of 63 bits and one shift, halves up."""
HALF_UP_16 = Requantisation("rounded once, 16 bits", Rounding.SINGLE, bits=16)
"""The same with a multiplier of 16 bits."""
TRUNCATED = Requantisation("rounded down", Rounding.DOWN, half_in_bias=True)
"""One product and one shift that cuts off; half a step stands in the bias."""
FLOAT32 = Requantisation("float32", Rounding.FLOAT32, bits=24)
"""The sum as float32 times a scale, rounded to the nearest, halves to even: a scale per channel."""
FLOAT32_PER_LAYER = replace(FLOAT32, name="float32, one scale", per_channel=False)
"""The same with one scale for the layer."""
SHIFTED = Requantisation("shifted", Rounding.SINGLE, bits=1)
"""A right shift per channel, halves up."""
SHIFTED_PER_LAYER = replace(SHIFTED, name="shifted, all alike", per_channel=False)
"""One right shift for the layer."""
READY = (TFLITE, HALF_UP, HALF_UP_16, TRUNCATED, FLOAT32, FLOAT32_PER_LAYER, SHIFTED, SHIFTED_PER_LAYER)
"""All of them."""
