"""Schedules the loops of common layers and ships them with the package, so that nobody needs Exo to compile them.

    python scripts/ship_loops.py           # writes dovetail/kernels/scheduled/shipped.zip anew; some minutes of Exo

Common layers are those of the four MLPerf Tiny networks and of the zoo, on every bundled core with instructions of its
own. `tests/test_shipped_loops.py` schedules a sample afresh and compares, and fails where the networks want others.
"""

from __future__ import annotations

import os
import sys
import tempfile
import zipfile
from pathlib import Path

from dovetail.compile import Options, compile_model
from dovetail.kernels.scheduled import store
from dovetail.targets import BUILT_IN, load_target
from dovetail.tools import zoo

MODELS = Path(__file__).resolve().parents[2] / "shared" / "models" / "mlperf_tiny"


def models(folder: Path) -> list[Path]:
    """The networks whose layers are shipped."""
    for name in zoo.names():
        (folder / f"{name}.onnx").write_bytes(zoo.build(name))
    return [*sorted(folder.glob("*.onnx")), *sorted(MODELS.glob("*_int8.tflite"))]


def ship(folder: Path) -> int:
    """Make `shipped.zip` of what a cache folder holds: equal bytes for equal loops; the number of them."""
    made = {file.name.partition("-")[0]: file.read_bytes() for file in (folder / "loops").glob("*-*.json")}
    with zipfile.ZipFile(store.SHIPPED, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for key, data in sorted(made.items()):
            archive.writestr(zipfile.ZipInfo(f"{key}.json"), data, zipfile.ZIP_DEFLATED, 9)
    return len(made)


def main() -> int:
    """Compile everything with an empty cache and ship what was scheduled."""
    if not MODELS.is_dir():
        sys.exit(f"{MODELS} is not here: nothing was shipped")
    store.SHIPPED.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["DOVETAIL_CACHE"] = name
        targets = [target for target in map(load_target, BUILT_IN) if target.core.instructions]
        for model in models(folder):
            for target in targets:
                print(f"{model.name} for {target.name}", flush=True)
                compile_model(model, target, Options())
        print(f"{store.SHIPPED}: loops of {ship(folder)} layers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
