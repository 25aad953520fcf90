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
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from dovetail.codegen.build.elf import section_sizes
from dovetail.codegen.build.instruction_sets import InstructionSet, instruction_set
from dovetail.codegen.build.stack import open_names, read_code, stack_need
from dovetail.errors import BuildError, MissingExtraError
from dovetail.files import (
    TemporaryFolder,
    default_cache,
    is_sealed,
    keep_file,
    kept_file,
    replace_file,
    seal,
    thin_out,
    usable_cache,
)
from dovetail.records import Record

Kind = Literal["zig", "gcc", "cc"]
Defines = Mapping[str, str | int | None]
"""Macro names and values; None defines the name alone."""

MOST_BYTES = 1 << 30
"""Bytes of all kept objects and what is linked from them; of a folder's, those used longest ago go first."""
_INPUTS = (".h", ".inc", ".bin")  # files a source may include
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*(?:include|import)\b[ \t]*(?:(["<])([^">\n]+)[">]|(\w*))', re.MULTILINE)
"""A line that includes a file: the quote and its name, or a macro of that value."""
_BLANK = "\0"
"""In place of the name of a network, where that does not matter."""


class Compiler(Record):
    """A compiler driver."""

    command: tuple[str, ...]
    """How to start it: program and first arguments."""
    kind: Kind
    """"zig" (clang inside ziglang), "gcc" (cross GCC) or "cc" (of this computer)."""
    version: str
    """The compiler's version text and a digest of its programs, part of every cache key."""
    out: tuple[str, ...] = ("-o",)
    """Arguments before the name of the file it makes; nothing for zig's own commands, which name it otherwise."""


def find_compiler(isa: str, prefer: str | None = None) -> Compiler:
    """The compiler for an instruction set.

    Args:
        isa: what `instruction_set` knows, such as "rv32imc", "cortex-m4" or "host" (cc, gcc, clang or zig).
        prefer: "zig", "gcc", or the command of a cross GCC; default: the environment's DOVETAIL_CC, else zig where
            installed, else the usual cross GCC, such as `riscv64-unknown-elf-gcc`.

    Raises:
        BuildError: an instruction set without a compiler, or a preferred compiler that is not there.
        MissingExtraError: neither zig nor a cross GCC is installed.
    """
    if isa == "host":
        return _of_this_computer("C", "cc", "gcc", "clang")
    usual = instruction_set(isa).gcc_command
    wanted = prefer or os.environ.get("DOVETAIL_CC") or ""
    zig = _zig() if wanted in ("", "zig") else None
    if zig is not None:
        return Compiler((zig, "cc"), "zig", f"zig {_version(zig, 'version')}")
    gcc = shutil.which(usual if wanted in ("", "gcc") else wanted) if wanted != "zig" else None
    if gcc is not None:
        return Compiler((gcc,), "gcc", _version(gcc, "--version"))
    if wanted not in ("", "zig"):
        hint = "unset DOVETAIL_CC to use ziglang"
        raise BuildError("this compiler was asked for and is not installed", where=f"DOVETAIL_CC={wanted}", hint=hint)
    raise MissingExtraError("ziglang", "iss", "compiling firmware")


def _of_this_computer(language: str, *names: str) -> Compiler:
    """The first of these compilers of this computer that is installed, else zig's; raises BuildError without any."""
    if found := next((place for name in names if (place := shutil.which(name))), None):
        return Compiler((found,), "cc", _version(found, "--version"))
    if zig := _zig():
        return Compiler((zig, names[0]), "zig", f"zig {_version(zig, 'version')}")
    what = f"no {language} compiler was found (looked for {', '.join(names)} and ziglang)"
    raise BuildError(what, where="this computer", hint=f"pip install ziglang, or install one, e.g. '{names[1]}'")


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
        what = f"the compiler does not start: {answer.stderr.strip()[:200]}"
        hint = "run it by hand to see why, or set DOVETAIL_CC to another compiler"
        raise BuildError(what, where=Path(program).name, hint=hint)
    return f"{answer.stdout.strip().splitlines()[0]} {_content(program)}"


def _content(program: str) -> str:
    """A digest of what a compiler consists of: itself, and the program a GCC driver calls to compile. Of large ones
    size and date stand for the content: each simulation asks, and to read thirty megabytes takes longer than most."""
    found = [program]
    if "zig" not in Path(program).name:
        answer = subprocess.run([program, "-print-prog-name=cc1"], capture_output=True, text=True, check=False)
        found += [answer.stdout.strip()] if os.path.isabs(answer.stdout.strip()) else []
    parts = []
    for path in map(Path, found):
        state = path.stat()
        large = state.st_size > _LARGE
        parts.append(f"{state.st_size} {state.st_mtime_ns}".encode() if large else path.read_bytes())
    return digest(*parts)[:16]


_LARGE = 4 << 20
"""Bytes above which a program is not read whole."""


def compile_firmware(
    project_dir: Path,
    sources: Sequence[Path],
    *,
    linker_script: Path,
    out: Path | None = None,
    isa: str = "rv32imc",
    defines: Defines | None = None,
    include: Sequence[Path] = (),
    flags: Sequence[str] = (),
    compiler: Compiler | None = None,
    cache: Path | None = None,
    compiler_runtime: bool = False,
) -> Path:
    """Compile and link firmware for a core; returns the path of the ELF file.

    Args:
        project_dir: where the compiler runs; also the first include folder.
        sources: C and assembler files, absolute or relative to `project_dir`; memcpy, memset and the 64-bit helpers
            must be among them (emit/runtime/dovetail_rt.c), since no C library is linked.
        linker_script: see `dovetail.codegen.emit.firmware`. out: where the ELF file goes; None leaves it in the cache.
        include: further include folders. flags: further compiler flags.
        compiler: default `find_compiler(isa)`. cache: default `default_cache()`.
        compiler_runtime: link the compiler's own runtime library (floating point); with zig it is built once, which
            takes seconds.

    Raises:
        BuildError: the compiler or linker failed; the message is its first error.
        MissingExtraError: there is no compiler.
    """
    work, core = _firmware(project_dir, isa, defines, include, flags, compiler, cache), instruction_set(isa)
    gcc, machine = work.compiler.kind == "gcc", _machine(core, work.compiler)
    script = work.directory / linker_script
    far = compiler_runtime and core.bits == 64 and not gcc
    alone = ("-nostdlib",) if gcc or far or not (compiler_runtime or core.library) else ()
    entry = f"-Wl,--entry={core.entry}"  # zig's own entry would win over the script's
    link = (*machine, *alone, "-static", "-Wl,--gc-sections", entry, "-T", str(script))
    runtime = ("-lgcc",) if gcc else (str(work.far_runtime(core)),) if far else ()
    made = work.link(work.compile(sources), link, runtime, digest(script.read_bytes()), ".elf")
    if out is None:
        return made
    replace_file(out, made.read_bytes())
    return out


def firmware_stack(
    project_dir: Path,
    sources: Sequence[Path],
    entry: str,
    *,
    isa: str,
    library: Sequence[Path] = (),
    defines: Defines | None = None,
    include: Sequence[Path] = (),
    flags: Sequence[str] = (),
    cache: Path | None = None,
    network: str = "",
) -> tuple[int | str, str, int]:
    """Bytes of stack a function of firmware needs at most, or why there is no bound, as `stack.stack_need` says, the
    name of the compiler that says so, and the bytes of code and tables of the sources in `src`; arguments and errors as
    `compile_firmware`, whose objects these are. Sources of the `library` are compiled only if the others leave a name
    open that stands in them. Where a `network` of another name has the same code, nothing is compiled."""
    work = _firmware(project_dir, isa, defines, include, flags, None, cache)
    compiler, keys = (
        work.compiler.version.rsplit(" ", 1)[0],
        [work.content_but(network, one) for one in (*sources, *library)],
    )
    known = work.place(digest(entry.encode(), *keys), ".sizes")
    kept = kept_file(known)
    if kept is None:
        objects, left = work.compile(sources), list(library)
        sizes = [section_sizes(made) for made, source in zip(objects, sources, strict=True) if source.parts[0] == "src"]
        words = {one: set(re.findall(r"\w+", (work.directory / one).read_text("utf-8"))) for one in library}
        code = read_code(objects)
        while more := [one for one in left if words[one] & open_names(code)]:
            objects, left = [*objects, *work.compile(more)], [one for one in left if one not in more]
            code = read_code(objects)
        need = stack_need(code, entry)
        if isinstance(need, str) and left:  # it may be for what was left out
            need = stack_need(read_code([*objects, *work.compile(left)]), entry)
        said = need.replace(network, _BLANK) if network and isinstance(need, str) else need
        kept = f"{sum(one['text'] + one['rodata'] for one in sizes)} {said}".encode()
        keep_file(known, kept)
    nbytes, _, said = kept.decode().partition(" ")
    return int(said) if said.isdigit() else said.replace(_BLANK, network), compiler, int(nbytes)


def _machine(core: InstructionSet, compiler: Compiler) -> tuple[str, ...]:
    """Flags of compiler and linker for a core."""
    if compiler.kind == "gcc":
        return (*core.gcc, "-fno-tree-loop-distribute-patterns")
    return (*core.zig, "-fno-sanitize=undefined")


def _firmware(
    directory: Path,
    isa: str,
    defines: Defines | None,
    include: Sequence[Path],
    flags: Sequence[str],
    compiler: Compiler | None,
    cache: Path | None,
) -> _CompileContext:
    """The compiler of firmware sources, with its flags and cache."""
    compiler = compiler or find_compiler(isa)
    common = "-ffreestanding -O2 -fomit-frame-pointer -ffunction-sections -fdata-sections -fno-unwind-tables"
    frames = "-fstack-usage" if compiler.kind == "gcc" else "-fstack-size-section"
    machine = _machine(instruction_set(isa), compiler)
    given = (*machine, *common.split(), "-fno-asynchronous-unwind-tables", "-g0", frames, *flags)
    return _CompileContext(compiler, directory, given, include, defines, cache)


def compile_host(
    project_dir: Path,
    sources: Sequence[Path],
    *,
    defines: Defines | None = None,
    include: Sequence[Path] = (),
    flags: Sequence[str] = ("-O2",),
    cache: Path | None = None,
    libraries: Sequence[str] = (),
) -> Path:
    """Compile C for this computer into a shared library, linked with `libraries` ("-ldl"); other arguments, result and
    errors as `compile_firmware`."""
    compiler = find_compiler("host")
    own = ("-fno-sanitize=undefined",) if compiler.kind == "zig" else ()
    flags = ("-fPIC", "-std=c99", *own, *flags)
    work = _CompileContext(compiler, project_dir, flags, include, defines, cache)
    return work.link_shared(work.compile(sources), libraries)


def cpp_compiler() -> Compiler:
    """The C++ compiler for this computer, else zig's; raises BuildError when there is neither."""
    return _of_this_computer("C++", "c++", "g++", "clang++")


def compile_cpp(
    directory: Path, sources: Sequence[Path], *, include: Sequence[Path], flags: Sequence[str], cache: Path
) -> list[Path]:
    """Compile C++ for this computer into objects for `link_shared`; arguments and errors as `compile_firmware`."""
    return _CompileContext(cpp_compiler(), directory, ("-fPIC", "-std=c++17", *flags), include, None, cache).compile(
        sources
    )


def link_shared(directory: Path, objects: Sequence[Path], out: Path) -> Path:
    """Link what `compile_cpp` gave to a shared library beside its objects; errors as `compile_firmware`."""
    made = _CompileContext(cpp_compiler(), directory, (), (), None, out.parent).link_shared(objects)
    replace_file(out, made.read_bytes())
    return out


class _CompileContext:
    """Settings shared by all files of a build: compiler and flags, folder, cache, digest of what they may include."""

    def __init__(
        self,
        compiler: Compiler,
        directory: Path,
        flags: Sequence[str],
        include: Sequence[Path],
        defines: Defines | None,
        cache: Path | None,
    ) -> None:
        self.compiler, self.directory = compiler, directory.resolve()
        self.defines = dict(sorted((defines or {}).items()))
        folders = [self.directory, *(self.directory / folder for folder in include)]
        self.flags, self.folders = tuple(flags), tuple(f"-I{folder}" for folder in folders)
        found = [(folder, path) for folder in folders for path in sorted(folder.rglob("*")) if path.suffix in _INPUTS]
        self.headers = [(path.relative_to(folder).as_posix(), path.read_bytes()) for folder, path in found]
        self.names = {name.rpartition("/")[2] for name, _ in self.headers}
        self.cache = usable_cache(cache or default_cache())

    def place(self, key: str, suffix: str) -> Path:
        """The path of an object or firmware: in one of 256 folders, as a cache gets hundreds of thousands of files."""
        return self.cache / "objects" / key[:2] / f"{key}{suffix}"

    def compile(self, sources: Sequence[Path]) -> list[Path]:
        """The object of each source."""
        with ThreadPoolExecutor(max_workers=2) as pool:
            return list(pool.map(self._compile, sources))

    def made(self, source: Path) -> tuple[Path, Sequence[str]]:
        """The path of a source's object, and the flags that it is made with."""
        flags, parts, files = self._inputs(source)
        texts = [files[0][1], *(part for file in files[1:] for part in file)]  # the name of the source does not matter
        return self.place(digest(*parts, *texts), ".o"), (*flags, *self.folders)

    def content_but(self, network: str, source: Path) -> bytes:
        """A digest of all that decides on a source's object, but for the name of a network and line ends of its files,
        which depend on that."""
        _, parts, files = self._inputs(source)
        either = "|".join(re.escape(one) for one in (network, network.upper()))
        own = re.compile(rf"\b(?:{either})(?![a-zA-Z0-9])".encode() if network else b"(?!)")
        blank = [[own.sub(_BLANK.encode(), part) for part in file] for file in (parts, *files)]
        texts = [
            re.sub(rb"\n +", b" ", text) if _BLANK.encode() in name and b"//" not in text else text
            for name, text in blank[1:]
        ]
        return digest(*blank[0], *(name for name, _ in blank[1:]), *texts).encode()

    def _inputs(self, source: Path) -> tuple[Sequence[str], Sequence[bytes], Sequence[tuple[bytes, bytes]]]:
        """All that decides on a source's object: its flags, folders to look in apart; the same with the compiler, as
        bytes; names and texts of the source and of the files that it may include."""
        if not (self.directory / source).is_file():
            hint = "compile the model again, with the files of the driver or library in place"
            raise BuildError(f"there is no source file '{source}'", where=str(self.directory), hint=hint)
        content = (self.directory / source).read_bytes()
        included = self._included(content) if source.suffix in (".c", ".S") else None
        texts = [content, *(text for _, text in included or ())]
        # Where names are put together, or anything may be included, any macro may be read.
        is_any = included is None or any(b"##" in text for text in texts)
        macros: dict[str, str | int | None] = dict(self.defines) if is_any else {}
        while more := {
            name: value
            for name, value in self.defines.items()
            if name not in macros and any(name.encode() in text for text in texts)
        }:
            macros, texts = macros | more, [str(value).encode() for value in more.values()]
        language = ("-std=c99",) if source.suffix == ".c" and self.compiler.kind != "cc" else ()
        defined = (f"-D{name}" if value is None else f"-D{name}={value}" for name, value in sorted(macros.items()))
        flags = (*self.flags, *defined, *language)
        # Folders are in the flags only as places to look; what they hold is in the digest of the headers.
        parts = [part.encode() for part in (self.compiler.version, "\0".join(flags), source.suffix)]
        files = [(str(source), content), *(self.headers if included is None else included)]
        return flags, parts, [(name.encode(), text) for name, text in files]

    def _compile(self, source: Path) -> Path:
        made, flags = self.made(source)
        told = "-fstack-usage" in flags and source.suffix == ".c"
        if not (_is_kept(made) and (not told or _is_kept(made.with_suffix(".su")))):
            self._run([*flags, "-c", str(source)], made)
        return made

    def _included(self, content: bytes) -> Sequence[tuple[str, bytes]] | None:
        """The files that a source may include: those of the names it and they say, in whichever folder; None where a
        name is not written out or of no file here, as then it may be any."""
        known, texts, found = set[str](), [content], list[tuple[str, bytes]]()
        while texts:
            new = set[str]()
            for mark, name, macro in (said for text in texts for said in _INCLUDE.findall(text)):
                written = name.decode(errors="replace") or str(self.defines.get(macro.decode())).strip('"')
                last = written.rpartition("/")[2]
                if mark != b"<" and last not in self.names:
                    return None
                new.add(last)
            if any(word in text for text in texts for word in (b"incbin", b"embed", b".include")):
                return None
            more = [file for file in self.headers if file[0].rpartition("/")[2] in new - known]
            known, texts, found = known | new, [text for _, text in more], found + more
        return found

    def link_shared(self, objects: Sequence[Path], libraries: Sequence[str] = ()) -> Path:
        """The shared library of the objects."""
        return self.link(objects, ("-shared",), libraries, "", ".so")

    def link(
        self, objects: Sequence[Path], flags: Sequence[str], last: Sequence[str], script: str, suffix: str
    ) -> Path:
        """The linked file; `script` is the digest of the linker script, `last` what stands behind the objects."""
        named = "\0".join((*(flag for flag in flags if not os.path.isabs(flag)), *last))
        parts = (self.compiler.version, named, script, *(path.stem for path in objects))
        made = self.place(digest(*(part.encode() for part in parts)), suffix)
        if not _is_kept(made):
            self._run([*flags, *map(str, objects), *last], made)
        return made

    def far_runtime(self, core: InstructionSet) -> Path:
        """zig's own runtime library for a 64-bit core and code at any address: what zig links by itself reaches the
        lowest 2 GiB only."""
        zig = self.compiler.command[0]
        said = run_tool((zig, "env"), self.directory).stdout
        known = re.search(r'lib_dir"?\s*[=:]\s*"([^"]+)"', said)
        source = Path(known[1] if known else Path(zig).parent / "lib") / "compiler_rt.zig"
        model = ["-mcmodel=medium" if flag.startswith("-mcmodel") else flag for flag in core.zig]
        work = copy(self)  # `zig cc` has no say in the code model of what is written in zig
        work.compiler = replace(self.compiler, command=(zig, "build-obj"), out=())
        flags = (*model, "-OReleaseFast", "-fstrip", "-ffunction-sections")
        made = self.place(digest(self.compiler.version.encode(), *(flag.encode() for flag in flags)), ".o")
        if not is_sealed(made):
            work._run([str(source), *flags], made)
        return made

    def _run(self, arguments: Sequence[str], made: Path) -> None:
        with TemporaryFolder(self.cache) as folder:
            # zig's own libraries stay; what it keeps of each source is kept here already
            zig = {"ZIG_GLOBAL_CACHE_DIR": str(self.cache / "zig"), "ZIG_LOCAL_CACHE_DIR": str(Path(folder) / "zig")}
            output = Path(folder) / made.name
            command = [*self.compiler.command, *arguments, *self.compiler.out, str(output)]
            if not self.compiler.out:  # zig's own commands
                command[-1] = f"-femit-bin={output}"
            answer = run_tool(command, self.directory, **zig)
            if answer.returncode:
                raise compiler_error(answer.stderr or answer.stdout, answer.returncode)
            made.parent.mkdir(parents=True, exist_ok=True)
            for path in (output.with_suffix(".su"), output):  # what GCC says of frames, first
                if path.exists():
                    path.chmod(0o644)
                    os.replace(path, made.with_suffix(path.suffix))
                    seal(made.with_suffix(path.suffix))
        with suppress(OSError):  # another process thins it out too
            thin_out(made.parent, MOST_BYTES // 256, unused=3600)


def _is_kept(made: Path) -> bool:
    """Whether a file of the cache is there, which then counts as used now."""
    if not is_sealed(made):
        return False
    with suppress(OSError):  # a cache that can only be read
        os.utime(made)
    return True


def run_tool(command: Sequence[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a compiler in a folder, with further environment variables, and collect what it prints."""
    given = {**os.environ, **variables, "LC_ALL": "C"}
    end = subprocess.DEVNULL
    return subprocess.run(
        command, cwd=folder, env=given, capture_output=True, text=True, errors="replace", stdin=end, check=False
    )


_MEND = "look at that place of your driver, library or board file; if the C is Dovetail's own, report it"
_NOT_THERE = {
    "dma.h": "the target has no DMA, and dma.h is there with one: give dma= in Target(...), or take the include and "
    "what it copies out of the driver",
    "copy.h": "copy.h is there where the core copies for an engine: leave dma= out of Target(...), or include dma.h",
    "cores.h": "cores.h is there with several cores: give cores= in Target(...), or leave the include out",
}
"""Headers of a project that only some targets have, and what to do where one is included all the same."""


def compiler_error(output: str, code: int) -> BuildError:
    """A BuildError that begins with the first error in a compiler's output."""
    lines = output.strip().splitlines()
    found = next((index for index, line in enumerate(lines) if re.search(r"\b(error|undefined)\b", line)), 0)
    rest = "\n".join(lines[found : found + 30]) or f"it printed nothing and exited with {code}"
    if re.search(r"No space left on device|NoSpaceLeft", output):
        return BuildError("the disk is full", where="compiler", hint="free space, or set DOVETAIL_CACHE and TMPDIR")
    if over := re.search(r"region [`']?(\w+)'?:? overflowed by (\d+) bytes", output):
        taken = "code, constants and variables take more than the plan keeps for them"
        what = f"the firmware is {int(over[2]):,} bytes larger than {over[1]}: {taken}"
        hint = f"enlarge it (--set {over[1]}.size=...), compile with --optimize size, or for fewer cores"
        return BuildError(what, where="linker", hint=hint)
    located = re.match(r"(?P<where>[^\s:]+:\d+(?::\d+)?): (?:fatal )?error: (?P<what>.*)", rest, re.DOTALL)
    if located:
        name = re.match(r"'?([\w.]+)'?(?: file not found|: No such file)", located["what"])
        hint = _NOT_THERE.get(name[1], _MEND) if name else _MEND
        return BuildError(located["what"], where=located["where"], hint=hint)
    return BuildError(rest, where="compiler", hint=_MEND)


def digest(*parts: bytes) -> str:
    """A content address."""
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()[:40]
