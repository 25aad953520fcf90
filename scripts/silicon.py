"""Published MLPerf Tiny results of CMSIS-NN beside that library, and Dovetail's own kernels, in the simulator.

    DOVETAIL_CMSIS_NN=CMSIS-NN DOVETAIL_CC=arm-none-eabi-gcc python scripts/silicon.py [--write]

Prints the table; --write puts it into docs/figures. Needs the published milliseconds and the models in
../shared, and a clone of CMSIS-NN of your own.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED = REPOSITORY.parent / "shared"
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "scripts")]

from tables import Rows, run  # noqa: E402

from dovetail.arrays import built, seeded_inputs  # noqa: E402
from dovetail.compile import compile_model  # noqa: E402
from dovetail.options import Options  # noqa: E402
from dovetail.run import run_build  # noqa: E402
from dovetail.target import Target  # noqa: E402
from dovetail.target.registry import load_target  # noqa: E402
from dovetail.targets import cmsis_nn  # noqa: E402

NETWORKS = {"ad_autoencoder": "autoencoder", "ic_resnet8": "ResNet8", "kws_dscnn": "DS-CNN",
            "vww_mobilenetv1": "MobileNetV1 0.25"}  # fmt: skip
BOARDS = {
    "stm32l4r5": (4, "OctoML/microtvm_cmsis_nn/NUCLEO_L4R5ZI"),
    "nrf5340": (33, "OctoML/microtvm_cmsis_nn/NRF5340-DK"),
    "cortex_m33": (33, "renesas/EK-RA6M4"),
}
"""Target -> number of its Cortex-M, and the submission. What the RA6M4's caches are is not published."""


def cycles(network: str, target: Target) -> int:
    """Of an inference in `iss`, every product of the model computed as the published programs do."""
    compiled = compile_model(
        SHARED / "models" / "mlperf_tiny" / f"{network}_int8.tflite", target, Options(keep_dead=True)
    )
    with built(compiled, target) as build:
        result = run_build(build, "iss", [seeded_inputs(build.manifest.inputs)])
    total = result.simulation.inferences[0].total_cycles
    assert total is not None
    return total


def without_waits(target: Target) -> Target:
    """The target with memories that answer at once."""
    return replace(target, memories=tuple(replace(memory, waits=0) for memory in target.memories))


def rows() -> list[list[object]]:
    """Per board and network: published, the library without waits and with, the ratio, and the same of our kernels."""
    published = json.loads((SHARED / "hardware" / "mlperf_tiny_published.json").read_text())["rows"]
    found: list[list[object]] = []
    for name, (number, system) in BOARDS.items():
        (row,) = (row for row in published if row["system"] == system)
        own = load_target(name)
        library = cmsis_nn.target(Path(os.environ[cmsis_nn.VARIABLE]), number, prefer=True)
        library = replace(library, memories=own.memories)
        for network, title in NETWORKS.items():
            silicon = round(row["ms"][network.partition("_")[0]] * row["mhz"] * 1000)
            at_once, waiting = (cycles(network, one) for one in (without_waits(library), library))
            ours = [cycles(network, one) for one in (without_waits(own), own)]
            found.append([name, title, silicon, at_once, waiting, f"{waiting / silicon:.3f}", *ours])
    return found


def silicon() -> dict[str, Rows]:
    """The table."""
    head = (
        "target",
        "network",
        "published",
        "CMSIS-NN, no waits",
        "CMSIS-NN",
        "by published",
        "ours, no waits",
        "ours",
    )
    return {"silicon": [head, *rows()]}


if __name__ == "__main__":
    run(__doc__.splitlines()[0], "scripts/silicon.py", {"silicon": silicon}, (SHARED,))
