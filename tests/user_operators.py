"""Models with operators of one's own, compiled and run: what the tests of such operators share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from dovetail.arrays import built
from dovetail.compile import Compiled, Options, compile_model
from dovetail.ir.graph import evaluate_all
from dovetail.ir.types import Array
from dovetail.run import run_build
from dovetail.target import Target

Feeds = Sequence[Mapping[str, Array]]


def run_everywhere(
    compiled: Compiled, target: Target, feeds: Feeds, simulators: Sequence[str] = ("host", "iss")
) -> list[dict[str, Array]]:
    """The outputs of successive inferences in numpy, after the C gave the same bits on every simulator."""
    meant = evaluate_all(compiled.graph, feeds)
    with built(compiled, target) as build:
        for simulator in simulators:
            found = run_build(build, simulator, feeds).outputs
            for number, (one, other) in enumerate(zip(found, meant, strict=True)):
                for name, array in one.items():
                    np.testing.assert_array_equal(array, other[name], f"{name} of {number} on {simulator}", strict=True)
    return meant


def compiled_from(data: bytes, folder: Path, name: str, target: Target, options: Options | None = None) -> Compiled:
    """A model's bytes, compiled."""
    path = folder / name
    path.write_bytes(data)
    return compile_model(path, target, options or Options())
