"""The four networks of MLPerf Tiny on `cortex_m55` in QEMU: twelve inputs each, compared with TensorFlow Lite Micro.

    python scripts/helium.py [--write]

The figures beside them are Renesas' of a Cortex-M85 with TensorFlow Lite
Micro and CMSIS-NN; none are published of a Cortex-M55.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

from tables import Rows, run  # noqa: E402

from dovetail.codegen.emit import write_project  # noqa: E402
from dovetail.compile import Options, compile_model  # noqa: E402
from dovetail.guests.report.detail import detail  # noqa: E402
from dovetail.run import open_build, run_build  # noqa: E402
from dovetail.targets.cortex_m import M55  # noqa: E402
from oracles import references  # noqa: E402

NETWORKS = {
    "ad_autoencoder": ("autoencoder", 264_192, 255_000),
    "ic_resnet8": ("ResNet8", 12_501_632, 4_070_000),
    "kws_dscnn": ("DS-CNN", 2_656_768, 1_660_000),
    "vww_mobilenetv1": ("MobileNetV1 0.25", 7_489_664, 6_430_000),
}
"""File -> name, multiply-accumulates of the model, and cycles published of the Cortex-M85."""
INPUTS = 12


def row(network: str) -> list[object]:
    """A row of the table; raises RuntimeError where an output is another than TensorFlow Lite Micro's."""
    name, macs, published = NETWORKS[network]
    file = REPOSITORY.parent / "shared" / "models" / "mlperf_tiny" / f"{network}_int8.tflite"
    compiled, reference = compile_model(file, M55, Options(name="net")), references(network)
    (given,), (value,) = compiled.graph.inputs, compiled.graph.outputs
    with tempfile.TemporaryDirectory() as folder:
        write_project(compiled.project, Path(folder) / "build")
        sets = [{given: reference[f"in_{at}"]} for at in range(INPUTS)]
        result = run_build(open_build(Path(folder) / "build"), "qemu", sets)
        bound = detail(result, compiled.project.graph)["bound"]
    for at, outputs in enumerate(result.outputs):
        if not np.array_equal(outputs[value], reference[f"out_{at}__tflm"]):
            raise RuntimeError(f"{network}: output {at} is another than that of TensorFlow Lite Micro")
    first, executed = result.simulation.inferences[0], sum(layer.macs for layer in result.build.manifest.layers)
    assert first.instructions is not None and first.total_cycles is not None
    per_mac = [f"{first.instructions / count:.3f}" for count in (macs, executed)]
    return [name, first.total_cycles, f"{first.total_cycles / bound:.2f}", first.instructions, *per_mac, published]


def measured() -> dict[str, Rows]:
    """The table."""
    head = ["network", "stated cycles", "times the bound", "instructions", "per MAC", "per MAC done"]
    return {"helium": [[*head, "Cortex-M85, silicon"], *map(row, NETWORKS)]}


if __name__ == "__main__":
    run((__doc__ or "").splitlines()[0], "scripts/helium.py", {"all": measured}, [REPOSITORY.parent / "shared"])
