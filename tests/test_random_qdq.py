"""Random ONNX models of one operator with every attribute exporters write: near ONNX Runtime's floats, and the emitted
C equal to the integer graph.

More of them: python tests/test_random_qdq.py FIRST LAST [FAMILY ...] takes numbers FIRST to LAST - 1 of each family.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from dovetail.compile import Options, prepare
from dovetail.errors import DovetailError
from dovetail.ir.graph import evaluate
from dovetail.targets import load_target
from property_batches import Case, needs_compiler, run_batch
from random_qdq import STEPS, Drawn, NotRun, drawn

pytest.importorskip("onnxruntime", reason="ONNX Runtime is the oracle")

EACH = 4
"""Models of each family in a run of the tests."""
FARTHEST = {8: 1.2, 16: 3.0}
"""Largest distance from the float result in steps, by the bits of the result. Half a step is its rounding; softmax,
normalisations and biases that are no whole sums take another half of 8 bits, and more of the finer steps of 16 bits."""
NEAR_A_HALF = 0.02
"""So near to a half the C library's functions may round otherwise than numpy's."""


def case_of(model: Drawn, folder: Path) -> tuple[Case, float]:
    """The model with what its integer graph computes, and the largest distance of that from the float result."""
    path, options = folder / "model.onnx", Options(allow_float=True)
    path.write_bytes(model.file)
    graph = prepare(path, load_target("riscv"), options)
    found, doubtful, farthest = [], [], 0.0
    for at, feed in enumerate(model.feeds):
        array = evaluate(graph, {name: feed[name] for name in graph.inputs})[graph.outputs[0]]
        steps = model.steps(array, at)
        farthest = max(farthest, float(steps.max(initial=0.0)))
        found.append([array])
        doubtful.append([np.abs(steps - 0.5) < NEAR_A_HALF])
    feeds = [[feed[name] for name in graph.inputs] for feed in model.feeds]
    return Case(model.name, model.file, ".onnx", model.op_type, feeds, found, doubtful, options), farthest


def batches(every: Iterable[Case], count: int) -> Iterator[list[Case]]:
    """So many at a time."""
    waiting = iter(every)
    while batch := list(islice(waiting, count)):
        yield batch


def cases(names: Iterable[str], folder: Path, refused: Counter[str], far: list[str]) -> Iterator[Case]:
    """Models by their names; those refused are counted by their sentences, those too far off are noted."""
    for name in names:
        try:
            model = drawn(name)
        except NotRun as error:
            refused[f"not by ONNX Runtime: {error!s:.80}"] += 1
            continue
        try:
            case, farthest = case_of(model, folder)
        except DovetailError as error:
            refused[f"{name}: {error.what}"] += 1
            continue
        if farthest > FARTHEST[16 if model.dtype.endswith("16") else 8]:
            far.append(f"{name} ({model.op_type} to {model.dtype}): {farthest:.2f} steps")
        yield case


@needs_compiler
def test_the_result_is_near_the_floats_and_the_c_is_equal(tmp_path: Path) -> None:
    refused, far = Counter[str](), list[str]()
    made = list(cases((f"{name} {number}" for name in STEPS for number in range(EACH)), tmp_path, refused, far))
    assert not refused and not far
    for at, batch in enumerate(batches(made, 40)):
        outcome = run_batch(batch, load_target("riscv"), "host", tmp_path / str(at))
        assert outcome.compared == len(batch)


if __name__ == "__main__":
    first, last = map(int, sys.argv[1:3])
    refused, far, compared = Counter[str](), list[str](), 0
    for name in sys.argv[3:] or STEPS:
        with TemporaryDirectory() as scratch:
            every = cases((f"{name} {number}" for number in range(first, last)), Path(scratch), refused, far)
            for at, batch in enumerate(batches(every, 60)):
                try:
                    compared += run_batch(batch, load_target("riscv"), "host", Path(scratch) / str(at)).compared
                except AssertionError as error:
                    print("WRONG", name, error, flush=True)
    print(compared, "compared;", *(f"\n{count} {text}" for text, count in refused.items()), "\nfar:", *far, sep="\n")
