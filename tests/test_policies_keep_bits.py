"""Random layers on engines whose policy is exact: after all rewrites the integer graph gives the bits of the core
alone, which other tests compare with ONNX Runtime and TensorFlow Lite Micro.

More of them: python tests/test_policies_keep_bits.py FIRST LAST takes numbers FIRST to LAST - 1 of each family.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from dovetail.compile import Options, compile_graph, prepare
from dovetail.errors import DovetailError
from dovetail.ir.graph import Graph, evaluate
from dovetail.ir.types import Array
from dovetail.target import Target
from dovetail.targets import load_target
from oracles import network_file
from random_qdq import STEPS as QDQ
from random_qdq import NotRun, drawn
from random_tflite import STEPS as IMAGES
from random_tflite import image
from random_tflite_more import SHORT
from random_tflite_more import STEPS as MORE
from tflite_maker import Maker

EXACT = (("ne16", "exact"), ("macarray", None), ("gemmini", "exact"), ("maeri", None), ("opencl", None))
TFLITE = (*IMAGES, *MORE, *(f"{name}_int16" for name in SHORT))
FAMILIES = (*(f"qdq {name}" for name in QDQ), *(f"tflite {name}" for name in TFLITE))


@dataclass(frozen=True)
class Model:
    """A model file with sets of inputs."""

    file: bytes
    suffix: str
    feeds: list[list[Array]]


def model_of(family: str, number: int) -> Model:
    """The model of a family and a number; raises NotRun where ONNX Runtime does not take it."""
    kind, name = family.split()
    if kind == "qdq":
        made = drawn(f"{name} {number}")
        return Model(made.file, ".onnx", [list(feed.values()) for feed in made.feeds])
    maker = Maker(f"{name} {number}", "int16" if name.endswith("_int16") else "int8")
    step = name.removesuffix("_int16")
    result = IMAGES[step](maker, image(maker)) if step in IMAGES else MORE[step](maker)
    network = maker.network(result)
    return Model(network_file(network), ".tflite", maker.feeds(network))


def results(graph: Graph, feeds: Iterable[Iterable[Array]]) -> list[Mapping[str, Array]]:
    """Outputs for each set of inputs."""
    return [evaluate(graph, dict(zip(graph.inputs, feed, strict=True))) for feed in feeds]


def compiled(path: Path, target: Target, policy: str | None) -> Graph:
    """The graph of the target, through every stage: programs are interpreted on the way."""
    options = Options(policy=policy, allow_float=True)
    return compile_graph(prepare(path, target, options), target, options).graph


def differing(model: Model, target: Target, policy: str | None, folder: Path) -> str:
    """What differs on the target from the core alone, in words; empty where nothing does, or both refuse the model."""
    path = folder / f"model{model.suffix}"
    path.write_bytes(model.file)
    rounding = target.policy(policy).rounding
    try:
        plain = prepare(path, load_target("riscv"), Options(allow_float=True, rounding=rounding))
    except DovetailError:
        return ""
    made = compiled(path, target, policy)
    for wanted, found in zip(results(plain, model.feeds), results(made, model.feeds), strict=True):
        for a, b in zip(wanted.values(), found.values(), strict=True):
            if a.dtype != b.dtype or a.shape != b.shape or not np.array_equal(a, b, equal_nan=a.dtype.kind == "f"):
                return f"{a.dtype}{a.shape} of the core, {b.dtype}{b.shape} of {target.name} differ"
    return ""


def all_differing(numbers: Iterable[int], folder: Path) -> Iterator[str]:
    """The models of all families that differ, each on one target after another."""
    targets = cycle([(load_target(name), policy) for name, policy in EXACT])
    for number in numbers:
        for family in FAMILIES:
            try:
                model = model_of(family, number)
            except NotRun:
                continue
            target, policy = next(targets)
            if text := differing(model, target, policy, folder):
                yield f"{family} {number}: {text}"


@pytest.mark.parametrize("number", range(2))
def test_exact_policies_keep_every_bit(number: int, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="ONNX Runtime draws the models' scales")
    assert list(all_differing([number], tmp_path)) == []


@pytest.mark.parametrize(
    ("family", "number", "target", "policy"),
    [
        # weights are no integers, but small: they stay as wide as they are
        ("qdq transposed", 1076, "ne16", "exact"),
        # one window of a pool that does not reach over the whole image: its stride decides
        ("qdq average_pool", 1097, "macarray", None),
        # a result without axes: there is nothing to cut into tiles
        ("qdq chosen", 1068, "opencl", None),
    ],
)
def test_layers_that_were_wrong(family: str, number: int, target: str, policy: str | None, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="ONNX Runtime draws the models' scales")
    assert differing(model_of(family, number), load_target(target), policy, tmp_path) == ""


if __name__ == "__main__":
    with TemporaryDirectory() as scratch:
        print(*all_differing(range(*map(int, sys.argv[1:3])), Path(scratch)), sep="\n")
