"""Records every file that `dovetail compile` writes, and compares two such records.

    python scripts/emitted.py record FOLDER [--quick]     # compile all cases below into FOLDER, run them, note cycles;
                                                          # started again, it goes on where it was ended
    python scripts/emitted.py compare BEFORE AFTER        # ends with 1 and says where, if a byte or a cycle differs

For changes that must leave the emitted C alone: record on both revisions, then compare. `PYTHONPATH` says which
Dovetail compiles. Cases that end with an error are recorded with their message.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dovetail.targets import BUILT_IN

MODELS = Path(__file__).resolve().parents[2] / "shared" / "models" / "mlperf_tiny"
NETWORKS = ("ad_autoencoder_int8", "kws_dscnn_int8", "ic_resnet8_int8", "vww_mobilenetv1_int8")
CORES = ("riscv", "cortex_m4", "riscv_xpulp")
"""Targets that are a core alone: budgets, several cores and small code are for them."""
VARIANTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), tuple(BUILT_IN)),
    "exact": (("--requant", "exact"), tuple(BUILT_IN)),
    "size": (("--optimize", "size"), (*CORES, "ne16")),
    "cores2": (("--cores", "2"), ("riscv", "cortex_m4", "ne16")),
    "pipeline": (("--pipeline",), ("riscv_big_small",)),
}
"""Options of `compile`, and the targets they are tried on."""
BUDGETS = {"ic_resnet8_int8": "24576", "vww_mobilenetv1_int8": "34000", "digits": "1K", "kws_dscnn_int8": "16K"}
"""Bytes of activations to compile for, by network."""
QUICK = ("digits", "kws_dscnn_int8")
PROGRAM = "from dovetail.cli.main import main; main()"


@dataclass(frozen=True)
class Case:
    """One call of `compile`."""

    network: str
    target: str
    variant: str
    options: tuple[str, ...]

    @property
    def name(self) -> str:
        """A folder's name."""
        return f"{self.network}-{self.target}-{self.variant}"


def cases(quick: bool) -> Iterator[Case]:
    """Everything that is compiled; `quick`: two networks, without variants."""
    networks = QUICK if quick else ("digits", *NETWORKS)
    for network in networks:
        for variant, (options, targets) in VARIANTS.items():
            if not quick or variant == "default":
                yield from (Case(network, target, variant, options) for target in targets)
        if network in BUDGETS and not quick:
            yield Case(network, "riscv", "budget", ("--memory-budget", BUDGETS[network]))


def record(folder: Path, quick: bool, only: str) -> None:
    """Compile and run every case; leaves the projects and `record.json` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    _dovetail("zoo", "digits", "-o", str(folder / "digits.onnx"))
    wanted = [case for case in cases(quick) if only in case.name]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = dict(zip((case.name for case in wanted), pool.map(lambda c: _one(c, folder), wanted), strict=True))
    (folder / "record.json").write_text(json.dumps(found, indent=1, sort_keys=True))
    ended = sum("error" in entry for entry in found.values())
    print(f"{folder}: {len(found)} cases, {ended} of which end with an error")


def _one(case: Case, folder: Path) -> dict[str, object]:
    """Digests of one case's files, and its simulated cycles; kept in a file beside the project."""
    known = folder / f"{case.name}.record"
    if not known.is_file():
        found = _made(case, folder)
        known.with_suffix(".part").write_text(json.dumps(found))
        known.with_suffix(".part").replace(known)
        print(case.name, flush=True)
    read: dict[str, object] = json.loads(known.read_text())
    return read


def _made(case: Case, folder: Path) -> dict[str, object]:
    model = folder / "digits.onnx" if case.network == "digits" else MODELS / f"{case.network}.tflite"
    project = folder / case.name
    made = _dovetail("compile", str(model), "--target", case.target, "-o", str(project), "--force", *case.options)
    if made.returncode != 0:
        return {"error": made.stderr.replace(str(folder), "")}
    files = sorted(path for path in project.rglob("*") if path.is_file())
    found = {str(path.relative_to(project)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    report = folder / f"{case.name}.json"
    run = _dovetail("run", str(project), "--json", str(report))
    if run.returncode != 0:
        return {"files": found, "run": run.stderr.replace(str(folder), "")}
    totals = json.loads(report.read_text())
    return {"files": found, "cycles": totals.get("cycles"), "instructions": totals.get("instructions")}


def compare(before: Path, after: Path) -> int:
    """Say what differs; the number of cases that do."""
    old, new = (json.loads((folder / "record.json").read_text()) for folder in (before, after))
    shared = sorted(old.keys() & new.keys())
    if not shared:
        sys.exit("the two records have no case in common: nothing was compared")
    wrong = [name for name in shared if old[name] != new[name]]
    for name in wrong:
        for key in sorted(old[name].keys() | new[name].keys()):
            was, now = old[name].get(key), new[name].get(key)
            if key == "files" and was and now:
                print(name, *(file for file in sorted(was.keys() | now.keys()) if was.get(file) != now.get(file)))
            elif was != now and key != "files":
                print(f"{name} {key}: {was} -> {now}")
    ran = sum(old[name].get("cycles") is not None for name in shared)
    if not ran:
        sys.exit("no case in common was run: nothing was compared but messages")
    broken = [name for name in shared if "Traceback" in str(new[name].get("error", new[name].get("run", "")))]
    if broken:
        sys.exit(f"{len(broken)} cases end with a stack, not with a message: {', '.join(broken[:5])}")
    left = len(old.keys() ^ new.keys())
    print(f"{len(shared)} cases compared, {ran} with cycles, {len(wrong)} differ; {left} stand in one record only")
    return len(wrong)


def _dovetail(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("folder", type=Path)
    recording.add_argument("--quick", action="store_true", help="two networks, default options")
    recording.add_argument("--only", default="", help="cases with this text in their name")
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    given = parser.parse_args(arguments)
    if given.command == "record":
        record(given.folder, given.quick, given.only)
        return 0
    return 1 if compare(given.before, given.after) else 0


if __name__ == "__main__":
    sys.exit(main())
