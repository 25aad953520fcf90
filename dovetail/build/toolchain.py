"""Compilers: the firmware's cross compiler and the host's C compiler, with a cache of what they made.

Flags and their reasons: hardware/cores.md. Objects and linked files are kept under a content address (compiler
version, flags, every input byte), so an unchanged project costs no compiler run and names nothing by path.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from dovetail.build.elf import section_sizes, symbols
from dovetail.build.instruction_sets import instruction_set
from dovetail.errors import BuildError, MissingExtraError

__all__ = [
    "Compiler", "compile_firmware", "compile_host", "default_cache", "find_compiler", "section_sizes", "symbols",
]

Kind = Literal["zig", "gcc", "cc"]
Defines = Mapping[str, str | int | None]
"""Macro names and values; None defines the name alone."""

_INPUTS = (".h", ".inc", ".bin")  # files a source may include


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler driver.

    Attributes:
        command: how to start it: program and first arguments.
        kind: "zig" (clang inside ziglang), "gcc" (cross GCC) or "cc" (the host's).
        version: what it says about itself, part of every cache key.
    """

    command: tuple[str, ...]
    kind: Kind
    version: str


@dataclass(frozen=True, slots=True)
class _Job:
    """What all files of one build share: `flags` compile, `environment` for the child, `headers` a digest."""

    compiler: Compiler
    directory: Path
    flags: tuple[str, ...]
    cache: Path
    headers: str


def default_cache() -> Path:
    """Return the cache folder: DOVETAIL_CACHE, else `dovetail` in the user's cache folder."""
    if chosen := os.environ.get("DOVETAIL_CACHE"):
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "dovetail"
    root = os.environ.get("LOCALAPPDATA") if os.name == "nt" else os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "dovetail"


def find_compiler(isa: str, prefer: str | None = None) -> Compiler:
    """Find a compiler for `isa`.

    Args:
        isa: "host", or what `instruction_set` knows, such as "rv32imc" or "cortex-m4".
        prefer: "zig", "gcc", or the command of a cross GCC; default: the environment's DOVETAIL_CC, else zig where
            installed, else the usual cross GCC, such as `riscv64-unknown-elf-gcc`.

    Raises:
        BuildError: an instruction set without a compiler, or a preferred compiler that is not there.
        MissingExtraError: neither zig nor a cross GCC is installed.
    """
    if isa == "host":
        return _host_compiler()
    usual = instruction_set(isa).gcc_command
    wanted = prefer or os.environ.get("DOVETAIL_CC") or ""
    zig = _zig() if wanted in ("", "zig") else None
    if zig is not None:
        return Compiler((zig, "cc"), "zig", f"zig {_version(zig, 'version')}")
    gcc = shutil.which(usual if wanted in ("", "gcc") else wanted) if wanted != "zig" else None
    if gcc is not None:
        return Compiler((gcc,), "gcc", _version(gcc, "--version"))
    if wanted not in ("", "zig"):
        raise BuildError("this compiler was asked for and is not installed", where=f"DOVETAIL_CC={wanted}",
                         hint="unset DOVETAIL_CC to use ziglang")
    raise MissingExtraError("ziglang", "iss", "compiling firmware")


def _host_compiler() -> Compiler:
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return Compiler((found,), "cc", _version(found, "--version"))
    raise BuildError("no C compiler was found (looked for cc, gcc, clang)", where="this computer",
                     hint="install one, e.g. the package 'gcc'")


def _zig() -> str | None:
    found = importlib.util.find_spec("ziglang")
    for folder in (found.submodule_search_locations or ()) if found else ():
        if program := shutil.which("zig", path=folder):
            return program
    return shutil.which("zig")


@lru_cache(maxsize=16)
def _version(program: str, argument: str) -> str:
    answer = subprocess.run([program, argument], capture_output=True, text=True, check=False)
    if answer.returncode:
        raise BuildError(f"the compiler does not start: {answer.stderr.strip()[:200]}", where=Path(program).name,
                         hint="run it by hand to see why, or set DOVETAIL_CC to another compiler")
    return answer.stdout.strip().splitlines()[0]


def compile_firmware(
    project_dir: Path, sources: Sequence[Path], *, linker_script: Path, out: Path | None = None, isa: str = "rv32imc",
    defines: Defines | None = None, include: Sequence[Path] = (), flags: Sequence[str] = (),
    compiler: Compiler | None = None, cache: Path | None = None, compiler_runtime: bool = False,
) -> Path:
    """Compile and link firmware for a core.

    Args:
        project_dir: where the compiler runs; also the first include folder.
        sources: C and assembler files, absolute or relative to `project_dir`; memcpy, memset and the 64-bit helpers
            must be among them (emit/runtime/dovetail_rt.c), since no C library is linked.
        linker_script: see `dovetail.emit.runtime.linker`.
        out: where the ELF file goes; None leaves it in the cache.
        include: further include folders. flags: further compiler flags.
        compiler: default `find_compiler(isa)`. cache: default `default_cache()`.
        compiler_runtime: link the compiler's own runtime library (floating point); with zig it is built once, which
            takes seconds.

    Returns:
        The path of the ELF file.

    Raises:
        BuildError: the compiler or linker failed; the message is its first error.
        MissingExtraError: there is no compiler.
    """
    compiler = compiler or find_compiler(isa)
    common = ("-ffreestanding", "-O2", "-fomit-frame-pointer", "-ffunction-sections", "-fdata-sections",
              "-fno-unwind-tables", "-fno-asynchronous-unwind-tables", "-g0")
    machine = _machine_flags(compiler, isa)
    job = _job(compiler, project_dir, (*machine, *common, *flags), include, defines, cache)
    objects = _compile_all(job, sources)
    script = job.directory / linker_script
    link = (*machine, *(() if compiler_runtime else ("-nostdlib",)), "-static", "-Wl,--gc-sections",
            f"-Wl,--entry={instruction_set(isa).entry}", "-T")  # zig's own entry would win over the script's
    runtime = ("-lgcc",) if compiler.kind == "gcc" else ()
    return _link(job, objects, (*link, str(script)), runtime, digest(script.read_bytes()), out, ".elf")


def compile_host(
    project_dir: Path, sources: Sequence[Path], *, out: Path | None = None, defines: Defines | None = None,
    include: Sequence[Path] = (), flags: Sequence[str] = ("-O2",), compiler: Compiler | None = None,
    cache: Path | None = None, libraries: Sequence[str] = (),
) -> Path:
    """Compile C for this computer into a shared library, linked with `libraries` ("-ldl"); other arguments, result and
    errors as `compile_firmware`."""
    compiler = compiler or find_compiler("host")
    job = _job(compiler, project_dir, ("-fPIC", "-std=c99", *flags), include, defines, cache)
    return _link(job, _compile_all(job, sources), ("-shared",), libraries, "", out, ".so")


def cpp_compiler() -> Compiler:
    """The C++ compiler for this computer, else zig's; raises BuildError when there is neither."""
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return Compiler((found,), "cc", _version(found, "--version"))
    if zig := _zig():
        return Compiler((zig, "c++"), "zig", f"zig {_version(zig, 'version')}")
    raise BuildError("no C++ compiler was found (looked for c++, g++, clang++ and ziglang)", where="this computer",
                     hint="pip install ziglang, or install one, e.g. the package 'g++'")


def compile_cpp(
    directory: Path, sources: Sequence[Path], *, include: Sequence[Path] = (), flags: Sequence[str] = (),
    cache: Path | None = None,
) -> list[Path]:
    """Compile C++ for this computer into objects for `link_shared`; arguments and errors as `compile_firmware`."""
    return _compile_all(_job(cpp_compiler(), directory, ("-fPIC", "-std=c++17", *flags), include, None, cache), sources)


def link_shared(directory: Path, objects: Sequence[Path], out: Path) -> Path:
    """Link what `compile_cpp` gave to a shared library beside its objects; errors as `compile_firmware`."""
    return _link(_job(cpp_compiler(), directory, (), (), None, out.parent), objects, ("-shared",), (), "", out, ".so")


def _machine_flags(compiler: Compiler, isa: str) -> tuple[str, ...]:
    core = instruction_set(isa)
    if compiler.kind == "gcc":
        return (*core.gcc, "-fno-tree-loop-distribute-patterns")
    return (*core.zig, "-fno-sanitize=undefined")


def _job(compiler: Compiler, directory: Path, flags: Sequence[str], include: Sequence[Path],
         defines: Defines | None, cache: Path | None) -> _Job:
    directory = directory.resolve()
    names = sorted((defines or {}).items())
    macros = [f"-D{name}" if value is None else f"-D{name}={value}" for name, value in names]
    folders = [directory, *(directory / folder for folder in include)]
    inputs = [(path.relative_to(folder).as_posix(), path) for folder in folders
              for path in sorted(folder.rglob("*")) if path.suffix in _INPUTS]
    headers = digest(*(part for name, path in inputs for part in (name.encode(), path.read_bytes())))
    search = [f"-I{folder}" for folder in folders]
    cache = (cache or default_cache()).resolve()
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(f"the cache folder cannot be made: {error.strerror}", where=str(cache),
                         hint="set DOVETAIL_CACHE to another") from None
    if not os.access(cache, os.W_OK):
        raise BuildError("the cache folder cannot be written", where=str(cache), hint="set DOVETAIL_CACHE to another")
    return _Job(compiler, directory, (*flags, *macros, *search), cache, headers)


def _compile_all(job: _Job, sources: Sequence[Path]) -> list[Path]:
    missing = [source for source in sources if not (job.directory / source).is_file()]
    if missing:
        raise BuildError(f"there is no source file '{missing[0]}'", where=str(job.directory),
                         hint="compile the model again, with the files of the driver or library in place")
    with ThreadPoolExecutor(max_workers=2) as pool:
        return list(pool.map(lambda source: _compile(job, source), sources))


def _compile(job: _Job, source: Path) -> Path:
    language = ("-std=c99",) if source.suffix == ".c" and job.compiler.kind != "cc" else ()
    flags = (*job.flags, *language)
    # Folders are in the flags only as places to look; what they hold is in the digest of the headers.
    named = [flag for flag in flags if not flag.startswith("-I")]
    content = (job.directory / source).read_bytes()
    key = digest(job.compiler.version.encode(), "\0".join(named).encode(), source.suffix.encode(), content,
                  job.headers.encode())
    made = job.cache / f"{key}.o"
    if not made.exists():
        _run(job, [*flags, "-c", str(source)], made)
    return made


def _link(job: _Job, objects: Sequence[Path], flags: Sequence[str], last: Sequence[str], script: str,
          out: Path | None, suffix: str) -> Path:
    named = [flag for flag in flags if not os.path.isabs(flag)]
    key = digest(job.compiler.version.encode(), "\0".join((*named, *last)).encode(), script.encode(),
                  *(path.stem.encode() for path in objects))
    made = job.cache / f"{key}{suffix}"
    if not made.exists():
        _run(job, [*flags, *map(str, objects), *last], made)
    if out is None:
        return made
    out.parent.mkdir(parents=True, exist_ok=True)
    with _temporary(out) as copy:
        shutil.copyfile(made, copy)
        os.replace(copy, out)
    return out


@contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """Give a free name beside `target`; what is still there afterwards is removed."""
    handle, name = tempfile.mkstemp(prefix=".", suffix=target.suffix, dir=target.parent)
    os.close(handle)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _run(job: _Job, arguments: Sequence[str], made: Path) -> None:
    zig_cache = str(job.cache / "zig")
    environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": zig_cache, "ZIG_LOCAL_CACHE_DIR": zig_cache, "LC_ALL": "C"}
    with _temporary(made) as output:
        command = [*job.compiler.command, *arguments, "-o", str(output)]
        answer = subprocess.run(command, cwd=job.directory, env=environment, capture_output=True, text=True,
                                errors="replace", stdin=subprocess.DEVNULL, check=False)
        if answer.returncode:
            raise compiler_error(answer.stderr or answer.stdout, answer.returncode)
        output.chmod(0o644)
        os.replace(output, made)


_MEND = "look at that place of your driver, library or board file; if the C is Dovetail's own, report it"


def compiler_error(output: str, code: int) -> BuildError:
    """Turn a compiler's complaints into a BuildError that begins with the first error.

    Args:
        output: what it printed. code: what it exited with.
    """
    lines = output.strip().splitlines()
    found = next((index for index, line in enumerate(lines) if re.search(r"\b(error|undefined)\b", line)), 0)
    rest = "\n".join(lines[found : found + 30]) or f"it printed nothing and exited with {code}"
    located = re.match(r"(?P<where>[^\s:]+:\d+(?::\d+)?): (?:fatal )?error: (?P<what>.*)", rest, re.DOTALL)
    if located:
        return BuildError(located["what"], where=located["where"], hint=_MEND)
    return BuildError(rest, where="compiler", hint=_MEND)


def digest(*parts: bytes) -> str:
    """A content address."""
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()[:40]
