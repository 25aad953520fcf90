"""Random TFLite models through the emitted C against TensorFlow Lite Micro and LiteRT, byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from dovetail.compile import Options
from dovetail.operators.arithmetic import Rounding
from dovetail.targets import load_target
from oracles import network_file, run_litert_often, run_micro_often
from property_batches import Case, run_batch
from random_tflite import STEPS, Maker, Step, anything, chain, place_of_extreme, requantize, convolution, depthwise, fully_connected, image, words


@dataclass(frozen=True)
class Family:
    """Cases of one kind."""

    step: Step
    count: int
    """How many are run."""
    dtype: str = "int8"
    oracle: str = "micro"
    """"micro", or LiteRT's "reference" or "xnnpack" kernels."""
    rounding: Rounding = Rounding.DOUBLE
    source: Callable[[Maker], int] = image
    """Draws the input."""
    refusals: tuple[str, ...] = field(default=())
    """Beginnings of the sentences a case may be refused with."""


NO_TABLE = ("LOGISTIC of int16 has no table", "SIGMOID of int16 has no table")
SHAPELESS = ("transpose", "reshape", "strided_slice", "arithmetic", "extreme", "pad", "concatenation", "function", "requantize", "fully_connected", "softmax")

FAMILIES: Mapping[str, Family] = {
    **{name: Family(step, 60) for name, step in STEPS.items()},
    "chain": Family(chain, 60),
    **{f"{name}_any_axes": Family(STEPS[name], 40, source=anything) for name in SHAPELESS},
    "place_of_extreme": Family(place_of_extreme, 40, source=anything),
    **{f"{name}_int16": Family(STEPS[name], 40, "int16") for name in ("convolution", "depthwise", "fully_connected", "pool", "arithmetic", "requantize", "pad", "transpose", "mean")},
    "requantize_uint8": Family(requantize, 40, "uint8"),
    "convolution_int4": Family(partial(convolution, bits=4), 40),
    "depthwise_int4": Family(partial(depthwise, bits=4), 40),
    "fully_connected_int4": Family(partial(fully_connected, bits=4), 40, "int8", "reference", Rounding.SINGLE),
    "convolution_uint8": Family(convolution, 40, "uint8", "reference"),
    "depthwise_uint8": Family(depthwise, 40, "uint8", "reference"),
    "fully_connected_uint8": Family(fully_connected, 40, "uint8", "reference", Rounding.SINGLE),
    "convolution_single": Family(convolution, 40, "int8", "xnnpack", Rounding.SINGLE),
    "depthwise_single": Family(depthwise, 40, "int8", "xnnpack", Rounding.SINGLE),
    "fully_connected_single": Family(fully_connected, 40, "int8", "xnnpack", Rounding.SINGLE),
}


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
    return Case(name, file, ".tflite", text, feeds, wanted, options=Options(rounding=chosen.rounding))


@pytest.mark.parametrize("family", FAMILIES)
def test_equal(family: str, tmp_path: Path) -> None:
    chosen = FAMILIES[family]
    cases = [make(family, seed) for seed in range(chosen.count)]
    outcome = run_batch(cases, load_target("riscv"), "host", tmp_path)
    print(outcome)
    strange = [text for text in outcome.refused if not text.startswith(chosen.refusals)] if chosen.refusals else list(outcome.refused)
    assert not strange
    assert outcome.compared == chosen.count
