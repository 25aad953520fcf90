"""Random TFLite models of further operators: the emitted C against TensorFlow Lite Micro or LiteRT, byte for byte.

More of them: python tests/test_random_tflite_more.py FIRST LAST [FAMILY ...] takes numbers FIRST to LAST - 1 of each.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from dovetail.compile import Options
from dovetail.targets import load_target
from oracles import network_file, run_litert_often, run_micro_often
from property_batches import Case, needs_compiler, run_batch
from random_tflite_more import SHORT, STEPS
from tflite_maker import Maker, words

pytestmark = pytest.mark.oracles

EACH = 2
"""Models of each family in a run of the tests."""
FAMILIES = (*STEPS, *(f"{name}_int16" for name in SHORT))
BY_LITERT = ("batches", "broadcast", "tile", "resize_int16", "gather_int16", "mirror_int16", "split_int16")
"""Families that TensorFlow Lite Micro does not run, or (`batches`) pads with 0 in place of the zero point."""
NEAR = ("resize_int16",)
"""Families computed in float, whose results may be a step of 16 bits off."""


def made(family: str, number: int) -> Case | None:
    """The case of a family and a number; None where the runtime does not run it."""
    name = f"{family} {number}"
    maker = Maker(name, "int16" if family.endswith("_int16") else "int8")
    network = maker.network(STEPS[family.removesuffix("_int16")](maker))
    file, feeds = network_file(network), maker.feeds(network)
    try:
        found = run_litert_often(file, feeds, reference=True) if family in BY_LITERT else run_micro_often(file, feeds)
    except (RuntimeError, ValueError):
        return None
    doubtful = [[np.ones(array.shape, bool) for array in outputs] for outputs in found] if family in NEAR else ()
    return Case(name, file, ".tflite", words(network), feeds, found, doubtful, Options(allow_float=family in NEAR))


def run(families: Iterable[str], first: int, last: int, folder: Path) -> tuple[int, list[str]]:
    """How many models were compared, and the refusals; models that differ are an AssertionError."""
    compared, refused = 0, list[str]()
    for family in families:
        cases = [case for number in range(first, last) if (case := made(family, number)) is not None]
        outcome = run_batch(cases, load_target("riscv"), "host", folder / family)
        compared += outcome.compared
        refused += [f"{family}: {text}" for text in outcome.refused]
    return compared, refused


@needs_compiler
@pytest.mark.parametrize("part", range(4))
def test_equal(part: int, tmp_path: Path) -> None:
    families = FAMILIES[part::4]
    compared, refused = run(families, 0, EACH, tmp_path)
    assert not refused and compared >= EACH * len(families) - 2


if __name__ == "__main__":
    first, last = map(int, sys.argv[1:3])
    for family in sys.argv[3:] or FAMILIES:
        with TemporaryDirectory() as scratch:
            try:
                print(family, *run([family], first, last, Path(scratch)), flush=True)
            except AssertionError as error:
                print("WRONG", family, error, flush=True)
