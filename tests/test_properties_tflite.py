"""Random TFLite models through the emitted C against TensorFlow Lite Micro and LiteRT, byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from dovetail.compile import Options
from dovetail.operators.arithmetic import Rounding
from dovetail.targets import load_target
from oracles import network_file, run_litert_often, run_micro_often
from property_batches import Case, run_batch
from random_tflite import (
    STEPS,
    Maker,
    Step,
    anything,
    arithmetic,
    chain,
    convolution,
    depthwise,
    fully_connected,
    function,
    image,
    mean,
    place_of_extreme,
    pool,
    requantize,
    words,
)


@dataclass(frozen=True)
class Family:
    """Cases of one kind."""

    step: Step
    batches: int
    """How many compilations of BATCH cases."""
    dtype: str = "int8"
    oracle: str = "micro"
    """"micro", or LiteRT's "reference" or "xnnpack" kernels."""
    rounding: Rounding = Rounding.DOUBLE
    source: Callable[[Maker], int] = image
    """Draws the input."""
    refusals: tuple[str, ...] = ()
    """Beginnings of the sentences a case may be refused with."""


BATCH = 60
"""Cases that share a compilation."""

ANY_AXES = (
    "arithmetic", "concatenation", "extreme", "fully_connected", "function", "pad", "reshape", "softmax",
    "strided_slice", "transpose",
)  # fmt: skip
"""Steps that take tensors of any number of axes."""

SHORT = ("convolution", "depthwise", "fully_connected", "pool", "arithmetic", "rescale", "pad", "transpose", "mean")
"""Steps on int16."""

FAMILIES: Mapping[str, Family] = {
    **{name: Family(step, 1) for name, step in STEPS.items()},
    "convolution": Family(convolution, 10),
    "depthwise": Family(depthwise, 6),
    "fully_connected": Family(fully_connected, 4),
    "pool": Family(pool, 4),
    "arithmetic": Family(arithmetic, 4),
    "mean": Family(mean, 2),
    "function": Family(function, 2),
    "chain": Family(chain, 8),
    **{f"{name}_any_axes": Family(STEPS[name], 1, source=anything) for name in ANY_AXES},
    **{f"{name}_int16": Family(STEPS[name], 1, "int16") for name in SHORT},
    "requantize": Family(requantize, 1, source=anything),
    "requantize_int16": Family(requantize, 1, "int16", source=anything),
    "requantize_uint8": Family(requantize, 1, "uint8", source=anything),
    "place_of_extreme": Family(place_of_extreme, 1, source=anything),
    "convolution_int4": Family(partial(convolution, bits=4), 2),
    "depthwise_int4": Family(partial(depthwise, bits=4), 1),
    "fully_connected_int4": Family(partial(fully_connected, bits=4), 1, "int8", "reference", Rounding.SINGLE),
    "convolution_uint8": Family(convolution, 2, "uint8", "reference"),
    "depthwise_uint8": Family(depthwise, 2, "uint8", "reference"),
    "fully_connected_uint8": Family(fully_connected, 1, "uint8", "reference", Rounding.SINGLE),
    "convolution_single": Family(convolution, 2, "int8", "xnnpack", Rounding.SINGLE),
    "depthwise_single": Family(depthwise, 1, "int8", "xnnpack", Rounding.SINGLE),
    "fully_connected_single": Family(fully_connected, 1, "int8", "xnnpack", Rounding.SINGLE),
}
SHARE_OFF = 1e-4
"""XNNPACK multiplies in float32: where the exact product is within about 1e-5 of a half it may round the other way.
Rounding twice instead of once shows in far more elements."""

BATCHES = [(name, batch) for name, family in FAMILIES.items() for batch in range(family.batches)]


def make(family: str, seed: int) -> Case:
    """The case of that seed."""
    chosen = FAMILIES[family]
    name = f"{family} {seed}"
    maker = Maker(name, chosen.dtype, always_bias=chosen.oracle != "micro")
    network = maker.network(chosen.step(maker, chosen.source(maker)))
    file, feeds = network_file(network), maker.feeds(network)
    text = words(network)
    try:
        if chosen.oracle == "micro":
            wanted = run_micro_often(file, feeds)
        else:
            wanted = run_litert_often(file, feeds, reference=chosen.oracle == "reference")
    except (RuntimeError, ValueError) as error:
        raise AssertionError(f"{name}: the oracle does not run {text}") from error
    inexact = chosen.oracle == "xnnpack"
    doubtful = [[np.ones(array.shape, bool) for array in outputs] for outputs in wanted] if inexact else ()
    return Case(name, file, ".tflite", text, feeds, wanted, doubtful, Options(rounding=chosen.rounding))


@pytest.mark.parametrize(("family", "batch"), BATCHES)
def test_equal(family: str, batch: int, tmp_path: Path) -> None:
    cases = [make(family, seed) for seed in range(BATCH * batch, BATCH * (batch + 1))]
    outcome = run_batch(cases, load_target("riscv"), "host", tmp_path)
    print(outcome)
    strange = [text for text in outcome.refused if not text.startswith(FAMILIES[family].refusals)]
    assert not strange and outcome.compared + sum(outcome.refused.values()) == BATCH
    assert outcome.off <= outcome.elements * SHARE_OFF, "more than float32's rounding explains"
