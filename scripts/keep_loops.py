"""Keeps the loops that the tests schedule, so that the next run of the tests need not.

    DOVETAIL_CACHE=FOLDER make test-all      # with an empty FOLDER: schedules everything, some minutes more
    python scripts/keep_loops.py FOLDER      # writes tests/loops.zip anew

To be run when schedules have changed: tests are right without it, but slow, and warn. `tests/test_shipped_loops.py`
and `tests/test_scheduled_kernels.py` schedule samples afresh and compare. Remove tests/loops.zip before, and what no
test wants any more goes too.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

from dovetail.files import SEAL
from dovetail.kernels.scheduled.store import _maker

KEPT = Path(__file__).resolve().parents[1] / "tests" / "loops.zip"


def loops_in(cache: Path) -> list[Path]:
    """What today's schedules gave, without the digests beside it."""
    found = [file for file in sorted((cache / "loops").glob("*")) if file.suffix != SEAL]
    return [file for file in found if file.suffix != ".json" or file.stem.endswith(_maker())]


def main() -> int:
    """Write the archive: equal bytes for equal loops."""
    if len(sys.argv) != 2 or not (files := loops_in(Path(sys.argv[1]))):
        sys.exit(f"usage: {sys.argv[0]} FOLDER, a cache folder with loops in it")
    with zipfile.ZipFile(KEPT, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for file in files:
            archive.writestr(zipfile.ZipInfo(file.name), file.read_bytes(), zipfile.ZIP_DEFLATED, 9)
    print(f"{KEPT.name}: {len(files)} schedules, {KEPT.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
