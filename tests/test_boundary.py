"""What the header says of inputs and outputs: real numbers in C as in Python, and several networks in one arena."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dovetail.codegen.emit import write_project
from dovetail.compile import Options, compile_model
from dovetail.errors import TargetError
from dovetail.ir.boundary import Steps
from dovetail.ir.graph import evaluate
from dovetail.ir.operators.arithmetic import Quantize
from dovetail.ir.types import DType
from dovetail.targets import load_target
from test_end_to_end import network_file

MODELS = Path(__file__).resolve().parents[2] / "shared" / "models" / "mlperf_tiny"
NETWORKS = {"ic_resnet8": "pictures", "kws_dscnn": "words", "vww_mobilenetv1": "people", "ad_autoencoder": "sounds"}
MAIN = """
#include <stdio.h>
#include <stdint.h>
{includes}
static uint8_t largest[{most}] __attribute__((aligned(16)));
{arena}
static void read_floats(float *numbers, unsigned count)
{{
    if (fread(numbers, 4, count, stdin) != count) {{ numbers[0] = 0.0f; }}
}}
int main(void)
{{
    (void)largest;
    for (int turn = 0; turn < {turns}; turn++) {{
        {body}
    }}
    return 0;
}}
"""
BODY = """{{
            static float numbers[{upper}_INPUT_0_ELEMENTS];
            read_floats(numbers, {upper}_INPUT_0_ELEMENTS);
            for (int at = 0; at < {upper}_INPUT_0_ELEMENTS; at++) {{
                {upper}_INPUT_0[at] = {name}_quantize_input_0(numbers[at]);
            }}
            {name}_run();
            for (int at = 0; at < {upper}_OUTPUT_0_ELEMENTS; at++) {{
                const float number = {name}_dequantize_output_0({upper}_OUTPUT_0[at]);
                (void)fwrite(&number, 4, 1, stdout);
            }}
        }}
"""


@given(
    arrays.arrays(np.float32, st.integers(1, 40), elements=st.floats(width=32)),
    st.floats(2.0**-40, 2.0**40, width=32),
    st.integers(-128, 127),
)
@settings(max_examples=200, deadline=None)
def test_integers_are_those_of_the_operator(reals: np.ndarray, scale: float, zero_point: int) -> None:
    """Quantize of the graph, for all there is but what is no number."""
    steps = Steps(scale, zero_point)
    parameters = [np.array([scale], np.float32), np.array([zero_point], np.int32)]
    with np.errstate(all="ignore"):
        wanted = Quantize(DType.INT8).evaluate([np.nan_to_num(reals, nan=-np.inf), *parameters])
    np.testing.assert_array_equal(steps.quantize(reals, DType.INT8), wanted)
    np.testing.assert_allclose(steps.dequantize(wanted), (wanted.astype(np.float64) - zero_point) * scale, rtol=1e-6)


@pytest.mark.skipif(not MODELS.is_dir() or not shutil.which("cc"), reason="../shared or a C compiler is not there")
def test_networks_share_an_arena_and_real_numbers_agree_to_the_bit(tmp_path: Path) -> None:
    """Four networks in one program and one array, in turns, on twelve inputs each, against the integer graph."""
    riscv, turns, numbers = load_target("riscv"), 12, np.random.default_rng(5)
    sources, given_all, wanted, sizes = [], [], [], []
    compiled = {}
    for file, name in NETWORKS.items():
        made = compiled[name] = compile_model(network_file(file), riscv, Options(name=name, arena="arena"))
        write_project(made.project, tmp_path / name)
        sources += [tmp_path / name / "src" / f"{name}{part}.c" for part in ("", "_constants", "_kernels")]
        sizes.append(made.unit.arenas()[riscv.values])
    for _ in range(turns):
        for made in compiled.values():
            (port, view), (result, _) = (
                next(iter(v.items())) for v in (made.plan.program.inputs, made.plan.program.outputs)
            )
            steps = made.unit.steps
            reals = (steps[port].scale * numbers.normal(0, 50, view.type.shape)).astype(np.float32)
            ends = [np.inf, -np.inf, np.nan, *((np.arange(-20, 20) + 0.5) * np.float32(steps[port].scale))]  # ties, too
            reals.reshape(-1)[: len(ends)] = ends
            integers = evaluate(made.graph, {port: steps[port].quantize(reals, view.type.dtype)})[result]
            given_all.append(reals)
            wanted.append(steps[result].dequantize(integers))
    body = "".join(BODY.format(name=name, upper=name.upper()) for name in compiled)
    text = MAIN.format(
        includes="".join(f'#include "{name}.h"\n' for name in compiled),
        most=max(sizes),
        arena=f"uint8_t arena[{max(sizes)}] __attribute__((aligned(16)));",
        turns=turns,
        body=body,
    )
    (tmp_path / "main.c").write_text(text)
    folders = [f"-I{tmp_path / name / 'src'}" for name in compiled] + [f"-I{tmp_path / 'words' / 'runtime'}"]
    strict = ["-std=c99", "-O2", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-DDOVETAIL_HOST"]
    built = tmp_path / "program"
    subprocess.run(["cc", *strict, *folders, tmp_path / "main.c", *sources, "-o", built], check=True)
    answer = subprocess.run([built], input=b"".join(x.tobytes() for x in given_all), capture_output=True, check=True)
    assert answer.stdout == b"".join(x.tobytes() for x in wanted)


def test_an_arena_must_be_possible() -> None:
    for target, arena, what in (("riscv", "int", "no name of C"), ("vta", "arena", "told addresses")):
        with pytest.raises(TargetError, match=what):
            compile_model(network_file("ad_autoencoder"), load_target(target), Options(arena=arena))
