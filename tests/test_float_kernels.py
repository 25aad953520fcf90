"""Float kernels, and those that select elements, compiled and run, against the graph's own meaning in numpy."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from core_kernel_cases import Maker
from dovetail.ir.graph import evaluate
from dovetail.kernels import generate, supports
from float_kernel_cases import EXACT, FLOAT
from test_core_kernels import build, describe, library_text, needs_compiler, run

COUNT = 60


@needs_compiler
@pytest.mark.parametrize("name", [*FLOAT, *EXACT])
def test_kernels_mean_what_the_graph_does(name: str, tmp_path: Path) -> None:
    family = FLOAT.get(name) or EXACT[name]
    cases = [family(Maker(f"{name} {seed}")) for seed in range(COUNT)]
    for case in cases:
        assert supports(case.graph) is None, f"{supports(case.graph)} {describe(case)}"
    kernels = [generate(case.graph, f"kernel_{number}") for number, case in enumerate(cases)]
    options = ("-O0", "-shared", "-fPIC", "-fsanitize=undefined", "-fno-sanitize-recover=undefined")
    library = ctypes.CDLL(str(build(tmp_path, library_text(kernels), *options)))
    for case, kernel in zip(cases, kernels, strict=True):
        got = run(getattr(library, f"run_{kernel.name}"), kernel, case)
        wanted = evaluate(case.graph, case.inputs)[case.graph.outputs[0]]
        if name in EXACT:
            np.testing.assert_array_equal(got, wanted, describe(case))
            continue
        reach = max(1.0, float(np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0)))
        message = f"{describe(case)}\n{kernel.source}"
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5 * reach, err_msg=message)
