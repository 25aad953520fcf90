"""What a person's own program does with a build: include its header, from C++ too, and run the network."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dovetail.arrays import built
from dovetail.compile import Options, compile_graph, sample_inputs
from dovetail.ir.graph import evaluate
from dovetail.targets import load_target
from networks import single

MAIN = """
#include <cstdio>
#include "MODEL.h"
#include "MODEL.h"

int main()
{
    for (int at = 0; at < MODEL_INPUT_0_ELEMENTS; at++) {
        int value = 0;
        if (std::scanf("%d", &value) != 1) { return 1; }
        MODEL_INPUT_0[at] = static_cast<int8_t>(value);
    }
    MODEL_run();
    for (int at = 0; at < MODEL_OUTPUT_0_ELEMENTS; at++) { std::printf("%d ", MODEL_OUTPUT_0[at]); }
    return 0;
}
"""


@pytest.mark.skipif(not (shutil.which("cc") and shutil.which("c++")), reason="no host compilers `cc` and `c++`")
def test_a_program_in_cpp_runs_the_network(tmp_path: Path) -> None:
    """The network is compiled as C99, the program as C++17, both without a warning."""
    target, graph = load_target("riscv"), single(6, 3, 5)
    inputs = sample_inputs(graph)
    with built(compile_graph(graph, target, Options()), target) as build:
        sources, model = build.folder / "src", build.manifest.model_prefix
        text = MAIN.replace("MODEL.h", f"{model}.h").replace("MODEL_run", f"{model}_run")
        (tmp_path / "main.cpp").write_text(text.replace("MODEL", model.upper()))
        strict = ["-Wall", "-Wextra", "-Werror", "-DDOVETAIL_HOST", f"-I{sources}", f"-I{build.folder / 'runtime'}"]
        names = [f"{model}.c", f"{model}_constants.c", f"{model}_kernels.c"]
        for name in names:
            made = ["-c", str(sources / name), "-o", str(tmp_path / f"{name}.o")]
            subprocess.run(["cc", "-std=c99", "-pedantic", *strict, *made], check=True)
        objects = [str(tmp_path / f"{name}.o") for name in names]
        program = tmp_path / "program"
        subprocess.run(
            ["c++", "-std=c++17", *strict, str(tmp_path / "main.cpp"), *objects, "-o", str(program)], check=True
        )
    given = " ".join(map(str, inputs[graph.inputs[0]].ravel()))
    found = subprocess.run([str(program)], input=given, capture_output=True, text=True, check=True)
    expected = evaluate(graph, inputs)[graph.outputs[0]]
    assert np.array_equal([int(number) for number in found.stdout.split()], expected.ravel())


def test_the_command_line_without_a_script() -> None:
    found = subprocess.run([sys.executable, "-m", "dovetail", "targets"], capture_output=True, text=True)
    assert found.returncode == 0 and "riscv" in found.stdout
