"""CPU seconds of `dovetail compile` beside those of Vela on the same files, the two in turn.

`python scripts/compile_time.py [TARGET]...` prints for each network and target the median CPU seconds of five runs, as
a ratio to Vela's: warm (the same again), after a change of options with a warm cache, and cold (an empty cache). Needs
`vela` (the package ethos-u-vela) on the path, and the models in ../shared.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

MODELS = Path(__file__).resolve().parents[2] / "shared/models/mlperf_tiny"
NETWORKS = ("ad_autoencoder", "ic_resnet8", "kws_dscnn", "vww_mobilenetv1")
TARGETS = ("riscv", "cortex_m4", "ne16", "kestrel", "macarray")
RUNS = 5


def cpu_seconds(command: Sequence[str], environment: Mapping[str, str]) -> float:
    """User and system seconds of a command and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env={**os.environ, **environment}, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def row(model: Path, target: str, folder: Path) -> str:
    """A line of the table."""
    own = [
        sys.executable,
        "-m",
        "dovetail",
        "compile",
        str(model),
        "--target",
        target,
        "--force",
        "-o",
        str(folder / "b"),
    ]
    vela = ["vela", str(model), "--output-dir", str(folder / "vela")]
    kept = {"DOVETAIL_CACHE": str(folder / "kept")}
    cpu_seconds(own, kept)
    taken: dict[str, list[float]] = {"vela": [], "warm": [], "changed": [], "cold": []}
    for number in range(RUNS):
        taken["vela"].append(cpu_seconds(vela, {}))
        taken["warm"].append(cpu_seconds(own, kept))
        taken["changed"].append(cpu_seconds([*own, "--name", f"net_{number}"], kept))
        taken["cold"].append(cpu_seconds(own, {"DOVETAIL_CACHE": str(folder / f"cold_{number}")}))
    other, *mine = (median(seconds) for seconds in taken.values())
    ratios = " | ".join(f"{seconds:.2f} ({seconds / other:.2f})" for seconds in mine)
    return f"| {model.stem} | {target} | {other:.2f} | {ratios} |"


def main() -> int:
    """Print the table."""
    if shutil.which("vela") is None or not MODELS.is_dir():
        sys.exit(f"this needs vela on the path, and {MODELS}")
    print("| network | target | Vela, CPU s | warm (ratio) | other options (ratio) | cold (ratio) |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for network in NETWORKS:
        for target in sys.argv[1:] or TARGETS:
            with tempfile.TemporaryDirectory() as folder:
                print(row(MODELS / f"{network}_int8.tflite", target, Path(folder)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
