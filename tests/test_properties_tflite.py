"""Random TFLite models through the emitted C against TensorFlow Lite Micro and LiteRT, byte for byte."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.compile import Options, prepare
from dovetail.ir.graph import evaluate
from dovetail.ir.operators.arithmetic import Rounding
from dovetail.targets import load_target
from oracles import network_file, run_litert_often, run_micro_often
from property_batches import Case, needs_compiler, run_batch
from random_tflite import (
    STEPS,
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
    mean_of_any_axes,
    place_of_extreme,
    pool,
    requantize,
    softmax,
)
from tflite_maker import Maker, words

pytestmark = pytest.mark.oracles


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
    """Parts of the sentences a case may be refused with; any other refusal is a failure."""


BATCH = 60
"""Cases that share a compilation."""

ANY_AXES = (
    "arithmetic",
    "concatenation",
    "extreme",
    "fully_connected",
    "function",
    "pad",
    "reshape",
    "softmax",
    "strided_slice",
    "transpose",
)
"""Steps that take tensors of any number of axes."""

SHORT = ("convolution", "depthwise", "fully_connected", "pool", "arithmetic", "rescale", "pad", "transpose", "mean")
"""Steps on int16."""

FAMILIES: Mapping[str, Family] = {
    **{name: Family(step, 1) for name, step in STEPS.items()},
    "convolution": Family(convolution, 8),
    "depthwise": Family(depthwise, 5),
    "fully_connected": Family(fully_connected, 3),
    "pool": Family(pool, 3),
    "arithmetic": Family(arithmetic, 3),
    "mean": Family(mean, 2),
    "function": Family(function, 2),
    "chain": Family(chain, 8),
    **{f"{name}_any_axes": Family(STEPS[name], 1, source=anything) for name in ANY_AXES},
    **{f"{name}_int16": Family(STEPS[name], 1, "int16") for name in SHORT},
    "requantize": Family(requantize, 1, source=anything),
    "requantize_int16": Family(requantize, 1, "int16", source=anything),
    "requantize_uint8": Family(requantize, 1, "uint8", source=anything),
    "place_of_extreme": Family(place_of_extreme, 1, source=anything),
    "mean_of_any_axes": Family(mean_of_any_axes, 1, source=anything, refusals=("the mean over", "needs an NHWC image")),
    "function_int16": Family(function, 1, "int16", refusals=("of int16 has no table",)),
    "softmax_int16": Family(softmax, 1, "int16", refusals=("softmax of int16 has no integer form",)),
    "convolution_int4": Family(partial(convolution, bits=4), 1),
    "depthwise_int4": Family(partial(depthwise, bits=4), 1),
    "fully_connected_int4": Family(partial(fully_connected, bits=4), 1, "int8", "reference", Rounding.SINGLE),
    "convolution_uint8": Family(convolution, 1, "uint8", "reference"),
    "depthwise_uint8": Family(depthwise, 1, "uint8", "reference"),
    "fully_connected_uint8": Family(fully_connected, 1, "uint8", "reference", Rounding.SINGLE),
    "convolution_single": Family(convolution, 1, "int8", "xnnpack", Rounding.SINGLE),
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
    maker.ties &= chosen.rounding is Rounding.DOUBLE  # of single rounding each runtime has a rule of its own for halves
    last = chosen.step(maker, chosen.source(maker))
    between = [call.outputs[0] for call in maker.calls if call.outputs[0] != last]
    network = maker.network(last, *([maker.one_of(*between)] if between and maker.often(0.4) else []))
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


@needs_compiler
@pytest.mark.parametrize(("family", "batch"), BATCHES)
def test_equal(family: str, batch: int, tmp_path: Path) -> None:
    cases = [make(family, seed) for seed in range(BATCH * batch, BATCH * (batch + 1))]
    outcome = run_batch(cases, load_target("riscv"), "host", tmp_path)
    print(outcome)
    strange = [text for text in outcome.refused if not any(part in text for part in FAMILIES[family].refusals)]
    assert not strange and outcome.compared + sum(outcome.refused.values()) == BATCH
    assert outcome.off <= outcome.elements * SHARE_OFF, "more than float32's rounding explains"


@settings(max_examples=120, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_one_operator_at_a_time(data: st.DataObject) -> None:
    """The integer graph alone, in numpy: a case that fails here is shrunk to the smallest."""
    step = STEPS[data.draw(st.sampled_from(sorted(STEPS)))]
    maker = Maker("shrunk", integers=lambda low, high: int(data.draw(st.integers(low, high))))
    network = maker.network(step(maker, image(maker)))
    file, feeds = network_file(network), maker.feeds(network)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.tflite"
        path.write_bytes(file)
        graph = prepare(path, load_target("riscv"), Options())
    for feed, wanted in zip(feeds, run_micro_often(file, feeds), strict=True):
        found = evaluate(graph, dict(zip(graph.inputs, feed, strict=True)))[graph.outputs[0]]
        assert np.array_equal(found, wanted[0]), words(network)


@needs_compiler
def test_differences_and_refusals_are_found(tmp_path: Path) -> None:
    """One element off by one is a failure that names its case; what is refused is counted by its sentence."""
    first, second = make("convolution", 0), make("convolution", 1)
    wrong = [[array.copy() for array in outputs] for outputs in second.wanted]
    wrong[1][0].flat[-1] ^= 1
    with pytest.raises(AssertionError, match=r"1 of 2 models differ:\nconvolution 1: output 0 of set 1 differs in 1 "):
        run_batch([first, replace(second, wanted=wrong)], load_target("riscv"), "host", tmp_path / "wrong")
    outcome = run_batch([first, replace(second, file=b"TFL")], load_target("riscv"), "host", tmp_path / "refused")
    assert outcome.compared == 1 and sum(outcome.refused.values()) == 1


if __name__ == "__main__":  # one case again: python tests/test_properties_tflite.py convolution 17
    with TemporaryDirectory() as scratch:
        print(run_batch([make(sys.argv[1], int(sys.argv[2]))], load_target("riscv"), "host", Path(scratch)))
