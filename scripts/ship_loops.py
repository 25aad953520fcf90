"""Schedules the loops of common layers and ships them with the package, so that nobody needs Exo to compile them.

    python scripts/ship_loops.py cores     # writes dovetail/kernels/scheduled/shipped.zip anew; some minutes of Exo
    python scripts/ship_loops.py vta       # writes dovetail/targets/vta/schedules.zip anew

Common layers are those of the four MLPerf Tiny networks and of the zoo, on every bundled core with instructions of its
own, and on VTA. `tests/test_shipped_loops.py` and `tests/test_vta_listed.py` schedule a sample afresh and compare, and
fail where the networks want others.
"""

from __future__ import annotations

import os
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

from dovetail.compile import Options, compile_model
from dovetail.guests import zoo
from dovetail.kernels.scheduled import store
from dovetail.loops.procedures import Procedure, procedure_text
from dovetail.targets import BUILT_IN, load_target
from dovetail.targets.vta import listed, mapping

MODELS = Path(__file__).resolve().parents[2] / "shared" / "models" / "mlperf_tiny"


def models(folder: Path) -> list[Path]:
    """The networks whose layers are shipped."""
    for name in zoo.names():
        (folder / f"{name}.onnx").write_bytes(zoo.build(name))
    return [*sorted(folder.glob("*.onnx")), *sorted(MODELS.glob("*_int8.tflite"))]


def ship(folder: Path) -> int:
    """Make `shipped.zip` of what a cache folder holds: equal bytes for equal loops; the number of them."""
    made = {file.name.partition("-")[0]: file.read_bytes() for file in (folder / "loops").glob("*-*.json")}
    _write(store.SHIPPED, {f"{key}.json": data for key, data in made.items()})
    return len(made)


def ship_vta(folder: Path) -> int:
    """Make `schedules.zip` of what the networks take of VTA; the number of schedules."""
    made: dict[str, str] = {}
    lowering = import_module("dovetail.targets.vta.lower")

    def schedule(text: str, batch: int, block: int, stride: tuple[int, int]) -> Procedure:
        found = mapping.scheduled(text, batch, block, stride)
        made[listed.digest_of(text, batch, block, stride)] = procedure_text(found)
        return found

    with patch.object(listed, "SHIPPED", folder / "none"), patch.object(lowering, "scheduled", schedule):
        for model in models(folder):
            print(f"{model.name} for vta", flush=True)
            compile_model(model, load_target("vta"), Options())
    _write(listed.SHIPPED, {name: text.encode() for name, text in made.items()})
    return len(made)


def _write(archive: Path, files: Mapping[str, bytes]) -> None:
    """An archive of files: equal bytes for equal files."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as made:
        for name, data in sorted(files.items()):
            made.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED, 9)


def main() -> int:
    """Compile everything with an empty cache and ship what was scheduled."""
    what = sys.argv[1:]
    if what not in (["cores"], ["vta"]):
        sys.exit(__doc__)
    if not MODELS.is_dir():
        sys.exit(f"{MODELS} is not here: nothing was shipped")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["DOVETAIL_CACHE"] = name
        if what == ["vta"]:
            print(f"{listed.SHIPPED}: {ship_vta(folder)} schedules")
            return 0
        store.SHIPPED.unlink(missing_ok=True)
        targets = [target for target in map(load_target, BUILT_IN) if target.core.instructions]
        # Where twice the weights would not fit the code's memory there are no pairs (`schedule/weights.py`).
        targets += [replace(one, core=replace(one.core, pairs=None)) for one in targets if one.core.pairs]
        for model in models(folder):
            for target in targets:
                print(f"{model.name} for {target.name}", flush=True)
                compile_model(model, target, Options())
        print(f"{store.SHIPPED}: loops of {ship(folder)} layers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
