"""Plants faults into stages of the compiler, one at a time, and counts how many the default checks find.

    python scripts/seeded_faults.py [--trials 300] [--seconds 600] [--only WORD]

Each fault of scripts/seeded_faults.toml goes into a copy of the package. There come the first trials of
scripts/fuzz.py, as of `make fuzz`, the models at the edges: compile, with the program's verifier; the firmware on the
simulated chip; its outputs beside the integer graph's, and where nothing is approximate beside the runtime's.
Then the digits of the zoo are compiled and run for seven targets, as `dovetail run` does. Last come random trials, of
which each family of models comes once before any comes twice. A fault is found
by the first check that ends otherwise than it may. Without a fault all end well.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

REPOSITORY = Path(__file__).resolve().parents[1]
ZOO = (
    ("ne16", "L1.size=2K"), ("macarray", "L1.size=2K"), ("kestrel", "sram.size=2K"), ("diana", "L1.size=4K"),
    ("ne16", ""), ("spinnaker2", ""), ("riscv", ""), ("cortex_m4", ""),
)  # fmt: skip
"""Targets the digits run on first, and settings: engines compute tiles where there is little room."""
FAULTS = REPOSITORY / "scripts" / "seeded_faults.toml"


def planted(edit: tuple[str, str, str], folder: Path) -> Path:
    """A copy of the package, its tests and scripts with a fault."""
    place = folder / "copy"
    for name in ("dovetail", "tests", "scripts"):
        shutil.copytree(REPOSITORY / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    path, old, new = edit
    text = (place / "dovetail" / path).read_text()
    assert text.count(old) == 1, f"{path}: there is no place for the fault any more: {old}"
    (place / "dovetail" / path).write_text(text.replace(old, new))
    return place


def checked(most: int, seconds: float) -> str:
    """What the first check of this package says that fails; else how many there were."""
    sys.path.insert(0, str(REPOSITORY / "scripts"))
    import fuzz

    from dovetail.guests import zoo

    end, digits = time.monotonic() + seconds, zoo.build("digits")
    case = fuzz.Case("digits", digits, ".onnx", "digits", [], (), (), fuzz.Options())
    fuzz.case_of, case_of = (lambda one: case if one.maker == "zoo" else case_of(one)), fuzz.case_of

    options = [{"settings": dict([text.split("=")])} if text else {} for _, text in ZOO]
    zoos = [
        fuzz.Trial(-1, "run", "zoo", "digits", 0, *one) for one in zip((name for name, _ in ZOO), options, strict=True)
    ]
    turns: Counter[tuple[str, str]] = Counter()
    trials = []
    first = len(fuzz.edge_models.TRIED)
    edges = [fuzz.trial(number, 0) for number in range(first)]
    for one in (fuzz.trial(number, 0) for number in range(first, 5000)):
        turns[one.maker, one.family] += 1
        trials.append((turns[one.maker, one.family], one.number, one))
    ordered = [one for _, _, one in sorted(trials, key=lambda row: row[:2]) if one.kind == "run"]
    for tried, one in enumerate((*edges, *zoos, *ordered[:most]), 1):
        ended = fuzz.alone(one)[0]
        if ended.outcome not in fuzz.GOOD:
            return f"found by check {tried}, {one.family} on {one.target}: {ended.sign}"
        if time.monotonic() > end:
            break
    return f"not found by {tried} checks"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=600, help="of each fault")
    parser.add_argument("--only", default="", help="those with one of these words, apart by commas, in their name")
    parser.add_argument("--here", action="store_true", help="check this package as it is")
    given = parser.parse_args()
    if given.here:
        print(checked(given.trials, given.seconds))
        return
    faults = tomllib.loads(FAULTS.read_text())
    chosen = {
        name: fault["edit"] for name, fault in faults.items() if any(word in name for word in given.only.split(","))
    }
    found = 0
    for name, edit in chosen.items():
        with TemporaryDirectory() as folder:
            place = planted(edit, Path(folder))
            environment = {**os.environ, "PYTHONPATH": str(place), "PYTHONHASHSEED": "0"}
            options = ["--here", f"--trials={given.trials}", f"--seconds={given.seconds}"]
            command = [sys.executable, "scripts/seeded_faults.py", *options]
            ended = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
        said = (ended.stdout.strip() or ended.stderr.strip() or "nothing was said").splitlines()[-1]
        found += said.startswith("found")
        print(f"{name}: {said}", flush=True)
    print(f"{found} of {len(chosen)} faults found")
    sys.exit(found < len(chosen))


if __name__ == "__main__":
    main()
