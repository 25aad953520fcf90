"""Compiles the C of random builds under many flags, by gcc and clang: no warning is left, and analysers find nothing.

    python scripts/c_flags.py [--builds 100] [--first 0] [--analyse]

The builds are those of scripts/fuzz.py, by number. Each source for this computer is compiled with every level of
optimisation, for 64 and 32 bits, with `WARNINGS`; with `--analyse` also by gcc's -fanalyzer. Prints each warning once,
with a build that has it; ends with 1 where there is one that `EXCEPTIONS` does not list.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests"), str(REPOSITORY / "scripts")]

from fuzz import Trial, case_of, options_of, trial  # noqa: E402

from dovetail.codegen.build.instruction_sets import EMITTED_C  # noqa: E402
from dovetail.codegen.emit.project import write_project  # noqa: E402
from dovetail.codegen.manifest import read_manifest  # noqa: E402
from dovetail.compile import compile_model  # noqa: E402
from dovetail.errors import DovetailError  # noqa: E402
from dovetail.targets import load_target  # noqa: E402

WARNINGS = (*EMITTED_C, "-Wpedantic", "-Wcast-align", "-std=c99", "-DDOVETAIL_HOST", "-c", "-o", "/dev/null")
CLANG = (sys.executable, "-m", "ziglang", "cc")
WAYS: tuple[tuple[str, ...], ...] = (
    *(("gcc", level) for level in ("-O0", "-O1", "-O2", "-O3", "-Os")),
    *((*CLANG, level) for level in ("-O0", "-O2", "-Os")),
    (*CLANG, "-O1", "-target", "x86-linux-musl"),
)
ANALYSIS = (("gcc", "-O1", "-fanalyzer"),)
EXCEPTIONS = {
    "unused function 'multiply_upper'": "clang; only Arm's DSP branch of its caller calls it",
    "unused function 'halved'": "clang; on RV64 the helper that calls it does not",
}
"""Part of a warning -> why it stays."""


def built(one: Trial, folder: Path) -> Path | None:
    """The project of a trial; None where it is refused or not drawn."""
    if (case := case_of(one)) is None:
        return None
    model = folder / f"net{case.suffix}"
    model.write_bytes(case.file)
    try:
        write_project(compile_model(model, load_target(one.target), options_of(one, case)).project, folder / "build")
    except DovetailError:
        return None
    return folder / "build"


def warnings_of(build: Path, ways: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """What compilers say of the sources that are compiled for any processor."""
    sources = [build / name for name in read_manifest(build).sources.host if name.endswith(".c")]
    folders = [f"-I{build / name}" for name in ("src", "driver", "runtime", "include") if (build / name).is_dir()]
    for way in ways:
        for source in sources:
            yield from said_of(way, source, folders)


def said_of(way: tuple[str, ...], source: Path, folders: Sequence[str]) -> Iterator[str]:
    """What a compiler says of one source."""
    command = [*way, *WARNINGS, *folders, source]
    ended = subprocess.run(command, cwd=source.parent, capture_output=True, text=True, check=False)
    for line in ended.stderr.splitlines():
        if re.search("warning:|error:", line):
            yield f"{way[0].rpartition('/')[2]} {way[-1]}: {line.rpartition('/')[2]}"


def found_in(first: int, count: int, ways: Sequence[tuple[str, ...]]) -> tuple[int, dict[str, str]]:
    """How many builds were compiled, and each kind of warning with an example."""
    kinds: dict[str, str] = {}
    made, number = 0, first
    while made < count:
        with TemporaryDirectory() as scratch:
            one = trial(number, 0)
            build = built(one, Path(scratch)) if one.kind == "run" else None
            if build is not None:
                made += 1
                for text in warnings_of(build, ways):
                    if not any(part in text for part in EXCEPTIONS):
                        kind = re.sub("[0-9]+|'[^']*'", "_", text.partition(": ")[2])
                        kinds.setdefault(kind, f"build {number} ({one.family} on {one.target}), {text}")
        number += 1
    return made, kinds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--builds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--analyse", action="store_true", help="by gcc's analyser, too")
    given = parser.parse_args()
    ways = [way for way in (*WAYS, *(ANALYSIS if given.analyse else ())) if shutil.which(way[0])]
    made, kinds = found_in(given.first, given.builds, ways)
    print(*kinds.values(), f"{made} builds, {len(ways)} ways: {len(kinds)} kinds of warnings", sep="\n")
    sys.exit(bool(kinds))


if __name__ == "__main__":
    main()
