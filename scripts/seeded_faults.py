"""Plants faults into stages of the compiler, one at a time, and counts how many the fuzzer's trials find.

    python scripts/seeded_faults.py [--trials 400] [--seconds 240] [--only WORD]

Each fault of scripts/seeded_faults.toml goes into a copy of the package. Then trials of scripts/fuzz.py are run there,
as `make fuzz` does: the compile, whose verifier looks at the program, the firmware on the simulated chip, its outputs
beside the integer graph's, and where all is exact beside those of the model's runtime. A fault is found by the first
trial that ends otherwise than it may, within a bound of trials and seconds. Without a fault the same trials end well.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

REPOSITORY = Path(__file__).resolve().parents[1]
CODE = """
import sys, time
sys.path.insert(0, "scripts")
import fuzz
began, (trials, seconds) = time.monotonic(), map(int, sys.argv[1:])
for number in range(trials):
    one = fuzz.trial(number, 0)
    if one.kind != "run":
        continue
    ended = fuzz.alone(one)[0]
    if ended.outcome not in fuzz.GOOD:
        print(f"found by trial {number} after {time.monotonic() - began:.0f} s, {one.target}: {ended.sign}")
        break
    if time.monotonic() - began > seconds:
        break
else:
    number = trials
if ended.outcome in fuzz.GOOD:
    print(f"not found by {number} trials")
"""


def planted(edit: tuple[str, str, str], folder: Path) -> Path:
    """A copy of the package, its tests and scripts with a fault."""
    place = folder / "copy"
    place.mkdir()
    for name in ("dovetail", "tests", "scripts"):
        shutil.copytree(REPOSITORY / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    path, old, new = edit
    text = (place / "dovetail" / path).read_text()
    assert text.count(old) == 1, f"{path}: what stands there has changed: {old}"
    (place / "dovetail" / path).write_text(text.replace(old, new))
    return place


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=400)
    parser.add_argument("--seconds", type=int, default=240, help="of each fault")
    parser.add_argument("--only", default="", help="those with this in their name")
    given = parser.parse_args()
    faults = tomllib.loads((REPOSITORY / "scripts" / "seeded_faults.toml").read_text())
    chosen = {name: fault["edit"] for name, fault in faults.items() if given.only in name}
    found = 0
    for name, edit in chosen.items():
        with TemporaryDirectory() as folder:
            place = planted(edit, Path(folder))
            environment = {**os.environ, "PYTHONPATH": str(place), "PYTHONHASHSEED": "0"}
            command = [sys.executable, "-c", CODE, str(given.trials), str(given.seconds)]
            ended = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
        said = ended.stdout.strip() or "does not start"
        found += said.startswith("found")
        print(f"{name}: {said}", flush=True)
    print(f"{found} of {len(chosen)} faults found")
    sys.exit(found < len(chosen))


if __name__ == "__main__":
    main()
