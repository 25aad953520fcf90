"""Compiles the C of random builds under many flags, by gcc and clang: no warning is left, and analysers find nothing.

    python scripts/c_flags.py [--builds 100] [--first 0] [--analyse] [--sanitise]

The builds are those of scripts/fuzz.py, by number. Each source for this computer is compiled with every level of
optimisation, for 64 and 32 bits, with `WARNINGS`; with `--analyse` also by gcc's -fanalyzer, and by cppcheck and
clang-tidy where they are installed. With `--sanitise`, an inference of random bytes runs with the sanitisers of
addresses and of undefined behaviour. Prints each warning once, with a build that has it; ends with 1 where there is one
that `EXCEPTIONS` does not list.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise
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
    "[shiftTooManyBitsSigned]": "cppcheck; a shift by 31 keeps the sign with every compiler for these cores",
    "[invalidLifetime]": "cppcheck; it thinks that OpenCL keeps the pointer that errors are given by",
    "[bugprone-easily-swappable-parameters]": "clang-tidy; kernels take several pointers, or sizes, of one type",
    "[bugprone-implicit-widening-of-multiplication-result]": "clang-tidy; every offset within a build has 32 bits",
    "[bugprone-signed-char-misuse": "clang-tidy; elements of int8 are numbers",
    "padding bytes, where 0 is optimal": "clang-tidy; tables of addresses, of 64 bits on this computer only",
    "[cert-err33-c] fprintf(stderr": "clang-tidy; nobody can be told that a message was not written",
    "[cert-err33-c] OPENCL_FUNCTIONS(LOADED)": "clang-tidy; the same, in a macro",
    "[bugprone-macro-parentheses]": "clang-tidy; arguments of opencl.c's table of functions are types and names",
    "[bugprone-sizeof-expression] set(kernel, sizeof": "clang-tidy; OpenCL takes the size of a handle",
    "[bugprone-narrowing-conversions] total =": "clang-tidy; the larger of two values of int8 is one",
    "[clang-analyzer-deadcode.DeadStores]": "clang-tidy; a pointer's last step, behind which nothing is read",
    "OpenCL library cannot be loaded": "no inference runs where there is no device",
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


CPPCHECK = ("cppcheck", "--quiet", "--std=c99", "--enable=warning,portability", "--inline-suppr", "-DDOVETAIL_HOST")


def analysed(build: Path) -> Iterator[str]:
    """What cppcheck says of a build."""
    sources = [build / name for name in read_manifest(build).sources.host if name.endswith(".c")]
    folders = [f"-I{build / name}" for name in ("src", "driver", "runtime") if (build / name).is_dir()]
    command = [*CPPCHECK, "--template=warning: {message} [{id}] {file}:{line}", *folders, *sources]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    yield from (f"cppcheck all: {line}" for line in ended.stderr.splitlines() if line.startswith("warning:"))


TIDY = ("clang-tidy", "--quiet", "--checks=-*,bugprone-*,cert-*,clang-analyzer-*")


def tidied(build: Path) -> Iterator[str]:
    """What clang-tidy says of a build, with the line of C."""
    sources = [build / name for name in read_manifest(build).sources.host if name.endswith(".c")]
    folders = [f"-I{build / name}" for name in ("src", "driver", "runtime", "include") if (build / name).is_dir()]
    command = [*TIDY, *sources, "--", "-std=c99", "-DDOVETAIL_HOST", *folders]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    for said, line in pairwise([*lines, ""]):
        if re.search("warning:|error:", said):
            yield f"clang-tidy all: {said.rpartition('/')[2]} {line.strip()}"


SANITISED = (
    "gcc",
    "-std=c99",
    "-O1",
    "-g",
    "-DDOVETAIL_HOST",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
)


def sanitised(build: Path) -> Iterator[str]:
    """What the sanitisers say of two inferences of random bytes; floats are between -2 and 2."""
    manifest = read_manifest(build)
    lines = [f'#include "{manifest.model_prefix}.h"', "#include <stdlib.h>", "#include <string.h>"]
    lines += [f"extern uint8_t {name}[];" for name in sorted({port.symbol for port in manifest.inputs})]
    lines += ["int main(void) { for (int turn = 0; turn < 2; ++turn) {"]
    for port in manifest.inputs:
        value, count = "(uint8_t)rand()", port.bytes
        if port.dtype == "float32":
            value, count = (
                "0; const float x = (float)(rand() % 401 - 200) / 100.0f; memcpy(to + 4 * i, &x, 4)",
                port.bytes // 4,
            )
        place = "to[4 * i]" if port.dtype == "float32" else "to[i]"
        lines += [f"uint8_t *to = {port.place}; for (int i = 0; i < {count}; ++i) {{ {place} = {value}; }}"]
        lines[-1] = f"{{ {lines[-1]} }}"
    lines += [f"{manifest.entry}(); }} return 0; }}"]
    (build / "sanitised.c").write_text("\n".join(lines) + "\n")
    folders = [f"-I{name}" for name in ("src", "driver", "runtime") if (build / name).is_dir()]
    command = [*SANITISED, *folders, *manifest.sources.host, "sanitised.c", "-o", "sanitised", "-lm", "-lpthread"]
    made = subprocess.run(command, cwd=build, capture_output=True, text=True, check=False)
    if made.returncode:
        yield f"sanitiser build: error: {made.stderr.strip().splitlines()[-1]}"
        return
    ended = subprocess.run(["./sanitised"], cwd=build, capture_output=True, text=True, check=False, timeout=300)
    if ended.returncode:
        said = re.search("runtime error: .*|ERROR: AddressSanitizer: [a-z-]*", ended.stderr)
        yield f"sanitiser run: {said[0] if said else ended.stderr[-200:]}"


def found_in(
    first: int, count: int, ways: Sequence[tuple[str, ...]], more: Sequence[Callable[[Path], Iterator[str]]] = ()
) -> tuple[int, dict[str, str]]:
    """How many builds were compiled, and each kind of warning with an example; `more` are other looks at a build."""
    kinds: dict[str, str] = {}
    made, number = 0, first
    while made < count:
        with TemporaryDirectory() as scratch:
            one = trial(number, 0)
            build = built(one, Path(scratch)) if one.kind == "run" else None
            if build is not None:
                made += 1
                for text in chain(warnings_of(build, ways), *(one(build) for one in more)):
                    if not any(part in text for part in EXCEPTIONS):
                        kind = re.sub("[0-9]+|'[^']*'", "_", text.partition(": ")[2])
                        kinds.setdefault(kind, f"build {number} ({one.family} on {one.target}), {text}")
        number += 1
    return made, kinds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--builds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--analyse", action="store_true", help="by gcc's analyser, cppcheck and clang-tidy, too")
    parser.add_argument("--sanitise", action="store_true", help="run an inference under sanitisers, too")
    parser.add_argument("--fewer", action="store_true", help="one level of each compiler")
    given = parser.parse_args()
    ways = [
        way
        for way in (*(WAYS[3::5] if given.fewer else WAYS), *(ANALYSIS if given.analyse else ()))
        if shutil.which(way[0])
    ]
    more = [analysed] if given.analyse and shutil.which(CPPCHECK[0]) else []
    more += [tidied] if given.analyse and shutil.which(TIDY[0]) else []
    more += [sanitised] if given.sanitise else []
    made, kinds = found_in(given.first, given.builds, ways, more)
    print(*kinds.values(), f"{made} builds, {len(ways)} ways: {len(kinds)} kinds of warnings", sep="\n")
    sys.exit(bool(kinds))


if __name__ == "__main__":
    main()
