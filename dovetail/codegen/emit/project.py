"""The files of an emitted project."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from dovetail.codegen.build.instruction_sets import EMITTED_C, instruction_set
from dovetail.codegen.emit.firmware import BOARD, COPY, CORES, DMA_DRIVER, linker_script, runtime_path
from dovetail.codegen.emit.host import host_makefile, host_source, main_source
from dovetail.codegen.emit.manifest import emitted_fields, stack_fields
from dovetail.codegen.emit.network import model_source
from dovetail.codegen.emit.pieces import pieces_source
from dovetail.codegen.emit.source import (
    arena_source,
    constants_source,
    header_source,
    kernels_source,
    weights_source,
)
from dovetail.codegen.emit.unit import Unit
from dovetail.codegen.plan_file import PLAN
from dovetail.folders import MANIFEST, PREFILL, check_replaced, write_files
from dovetail.ir.graph import Graph
from dovetail.ir.onnx_file import graph_parts
from dovetail.ir.types import Array
from dovetail.kernels import Optimize
from dovetail.kernels.c import guard
from dovetail.notes import Note
from dovetail.program.ir import LaunchStatement, View
from dovetail.records import Record, field
from dovetail.target.description import Target
from dovetail.target.engine import Deployed, Engine, Launched
from dovetail.version import __version__

GRAPH = "dovetail-graph.onnx"
"""Name of the file with the integer graph that a build's outputs are compared with."""

INCLUDED = (Path("src"), Path("runtime"), Path("driver"))
"""Folders of a project where files are included from."""
OPTIMISATION: Mapping[Optimize, str] = {Optimize.SPEED: "-O2", Optimize.SIZE: "-Os"}
"""The compiler's option for what the code is made for."""
_HEADER, _MAIN = "dovetail_rt.h", "src/main.c"
_SEVERAL = re.compile(r"(?:(?<=\n)\n)?^#ifdef DOVETAIL_MAILBOX\n.*?^#endif /\* DOVETAIL_MAILBOX \*/\n", re.M | re.S)
"""Parts of the start-up code for several cores."""


class Project(Record):
    """An emitted project in memory: file contents by relative path."""

    files: Mapping[str, str]
    target_sources: tuple[str, ...]
    """Files compiled for the target, relative paths."""
    host_sources: tuple[str, ...]
    """Files compiled for this computer."""
    graph: Graph | None = None
    """The graph the project computes, written beside it."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Files whose contents identify the build (`digest_of`)."""
    data: Mapping[str, Sequence[Array]] = field(default_factory=dict)
    """Files of bytes beside them, each as the arrays one after the other; the sources have their digests."""

    def with_file(self, name: str, text: str) -> Project:
        """The project with one more file."""
        return replace(self, files={**self.files, name: text})


def emit_project(unit: Unit, manifest: Mapping[str, Any]) -> Project:
    """Every file of the project; its description is `manifest` with sources, entry point and sizes."""
    model = unit.model
    constants, kernels, host = constants_source(unit), kernels_source(unit), host_source(unit)
    pairs = {"": (header_source(unit, __version__), model_source(unit)), "_constants": constants, "_kernels": kernels}
    files = {
        f"src/{model}{part}.{end}": text for part, pair in pairs.items() for end, text in zip("hc", pair, strict=True)
    }
    common = [f"src/{model}{part}.c" for part in pairs]
    if unit.shared_arena is not None:
        common.append(f"src/{model}_arena.c")
        files[common[-1]] = arena_source(unit)
    data: dict[str, Sequence[Array]] = {}
    if (weights := weights_source(unit)) is not None:
        common.append(f"src/{model}_weights.S")
        files[common[-1]], data[f"src/{model}_weights.bin"] = weights
    copying = DMA_DRIVER if unit.target.dma else COPY if unit.core_copies else ()
    cores = CORES if unit.target.workers else ()
    start = _start(unit)
    names = (path.removeprefix("runtime/") for path in start if path != _MAIN)
    for name in (*names, _HEADER, *copying, *cores):
        text = runtime_path(name).read_text("utf-8")
        files[f"runtime/{name}"] = text if cores else _SEVERAL.sub("", text)
    shared = [*common, *(f"runtime/{name}" for name in (*copying[1:], *cores[1:]))]
    drivers, software = [], []
    for engine in unit.target.engines:
        content = _driver_files(unit, engine)
        files.update(content)
        sources = [name for name in content if name.endswith(".c")]
        drivers += [name for name in sources if name not in drivers]
        software += sources if engine.device is None else []
        software += ["runtime/dovetail_rt.c"] if engine.success is not None else []
    if host is not None:
        files[f"src/{model}_host.c"] = host
    files.update({_MAIN: main_source(unit)} if _MAIN in start else {"link.ld": _linker_script(unit)})
    pieces = (f"src/{model}_lists.c",) if unit.pieced else ()
    files |= dict.fromkeys(pieces, pieces_source(model, unit.target.engines, unit.lists, unit.pieced))
    target_sources = (*shared, *pieces, *drivers, *start)
    host_sources = (*shared, *dict.fromkeys(software), *([f"src/{model}_host.c"] if host is not None else []))
    project = Project({}, target_sources, host_sources, sources=files, data=data)
    compiled = {"target": target_sources, "host": host_sources, "board": board_sources(target_sources)}
    compiled |= {"data": tuple(data)} if data else {}
    return _described(project, unit, {**manifest, **emitted_fields(unit, compiled)})


def _described(project: Project, unit: Unit, manifest: Mapping[str, Any]) -> Project:
    """The project of its sources, with a description of them, `manifest` with their digest."""
    files, digest = dict(project.sources), digest_of(project.sources)
    if _MAIN not in _start(unit):
        files |= {f"runtime/{name}": runtime_path(name).read_text("utf-8") for name in BOARD}
        files["src/board_network.h"] = _network_header(unit, digest)
    files["Makefile"] = _makefile(unit, project.target_sources)
    described = {**manifest, "digest": digest}
    files[MANIFEST] = json.dumps(described, indent=2, sort_keys=True) + "\n"
    return replace(project, files=files)


def with_said(project: Project, unit: Unit, notes: Sequence[Note]) -> Project:
    """The project where the stack of its unit has become known: header and description say it, and the latter what
    the user was told."""
    sources = {**project.sources, f"src/{unit.model}.h": header_source(unit, __version__)}
    described = {**json.loads(project.files[MANIFEST]), **stack_fields(unit)}
    described |= {"notes": [note.to_json() for note in notes]} if notes else {}
    again = _described(replace(project, sources=sources), unit, described)
    return replace(again, files={**project.files, **again.files})


def joined(step: Project, several: Project, unit: Unit, own: Unit, place: tuple[str, int]) -> Project:
    """The project of a step with the network of several steps: its sources, and its description in a folder.

    Args:
        step: as emitted by itself. several: as emitted by itself.
        unit: of the step, as `joined_units` gives it. own: of several steps.
        place: the input that is the place of a step, and how many places there are.
    """
    first, second = (
        emit_project(one, json.loads(project.files[MANIFEST])) for one, project in ((unit, step), (own, several))
    )
    new = {name: text for name, text in second.sources.items() if name not in first.sources}
    stand_ins = f"src/{own.model}_host.c"  # two networks would each have their own of one engine
    new.pop(stand_ins, None)
    target = tuple(dict.fromkeys((*first.target_sources, *(name for name in second.target_sources if name in new))))
    on_host = () if any(engine.device for engine in unit.target.engines) else second.host_sources
    host = tuple(dict.fromkeys((*first.host_sources, *(name for name in on_host if name in new))))
    sources = {"target": target, "host": host, "board": board_sources(target), "data": (*first.data, *second.data)}
    found = Project({}, target, host, step.graph, {**first.sources, **new}, {**first.data, **second.data})
    entry = {"steps": own.steps_at_once, "place": place[0], "places": place[1]}
    found = _described(found, unit, {**json.loads(first.files[MANIFEST]), "sources": sources, "prefill": entry})
    described = {**json.loads(second.files[MANIFEST]), "sources": sources}
    found = found.with_file(PLAN, step.files[PLAN]).with_file(f"{PREFILL}/{PLAN}", several.files[PLAN])
    return found.with_file(f"{PREFILL}/{MANIFEST}", json.dumps(described, indent=2, sort_keys=True) + "\n")


def with_need(project: Project, own: Unit) -> Project:
    """The project where the stack of its network of several steps has become known."""
    described = {**json.loads(project.files[f"{PREFILL}/{MANIFEST}"]), **stack_fields(own)}
    sources = {**project.sources, f"src/{own.model}.h": header_source(own, __version__)}
    found = replace(project, sources=sources, files={**project.files, **sources})
    return found.with_file(f"{PREFILL}/{MANIFEST}", json.dumps(described, indent=2, sort_keys=True) + "\n")


def _start(unit: Unit) -> tuple[str, ...]:
    """The sources that make a program of the network."""
    core, helpers = instruction_set(unit.target.core.isa), "runtime/dovetail_rt.c"
    return (_MAIN, helpers) if core.is_host else (f"runtime/{core.start}", helpers, "runtime/sim_main.c")


def _driver_files(unit: Unit, engine: Engine) -> dict[str, str]:
    """The text of an engine's C files, by their path in the project."""
    made = engine.made(_deployed(unit, engine)) if engine.made else {}
    return {**driver_texts(engine), **{f"driver/{name}": text for name, text in made.items()}}


def driver_texts(engine: Engine) -> dict[str, str]:
    """The same of those that are there for any network."""
    found = {}
    for resource in engine.driver:
        package, _, path = resource.partition(":")
        found[f"driver/{path.rpartition('/')[2]}"] = resources.files(package).joinpath(path).read_text("utf-8")
    files = {name: file.read_text("utf-8") if isinstance(file, Path) else file() for name, file in engine.files.items()}
    return {**found, **{f"driver/{name}": text for name, text in files.items()}}


def _deployed(unit: Unit, engine: Engine) -> Deployed:
    """The network as an engine sees it."""
    launches = [s for s in unit.program.statements if isinstance(s, LaunchStatement) and s.engine == engine.name]
    offloads = [unit.regions[launch.layer].offload for launch in launches]
    listed = [Launched(o.name, launch.match) for o, launch in zip(offloads, launches, strict=True) if o is not None]
    nbytes = unit.arenas().get(engine.memory, 0)
    return Deployed(unit.model, unit.arena_name(engine.memory), nbytes, tuple(listed))


def _linker_script(unit: Unit) -> str:
    target = unit.target
    near = sorted(memory for memory in unit.arenas() if unit.is_fixed(memory))
    return linker_script(
        target.memories,
        text=target.code,
        data=target.values,
        stack_bytes=target.core.stack,
        extra={f".{memory.lower()}": memory for memory in near},
        isa=target.core.isa,
        worker_stacks=[core.stack for core in target.workers],
        fixed=unit.fixed_constants[0] or None,
    )


def defines(unit_model: str, target: Target, board: bool = False, entry: str = "") -> dict[str, str | None]:
    """Preprocessor definitions of a firmware for the simulator, which runs the network or calls `entry`, or for a
    board."""
    found: dict[str, str | None] = {"DOVETAIL_BOARD" if board else "DOVETAIL_SIM": None}
    if not board:
        found |= {"DOVETAIL_MODEL_HEADER": f'"{unit_model}.h"', "DOVETAIL_MODEL_RUN": entry or f"{unit_model}_run"}
    if target.dma:
        found["DOVETAIL_DMA_BASE"] = f"0x{target.dma.base:x}u"
    if target.workers:
        found["DOVETAIL_MAILBOX"] = f"0x{target.mailbox:x}"
    return found | {name: f"0x{value:x}u" for engine in target.engines for name, value in engine.defines.items()}


def _makefile(unit: Unit, sources: tuple[str, ...]) -> str:
    core = instruction_set(unit.target.core.isa)
    if core.is_host:
        return host_makefile(unit, sources, OPTIMISATION[unit.optimize])
    given, of_board = (
        " ".join(f"-D{name}" if value is None else f"-D{name}='{value}'" for name, value in found.items())
        for found in (defines(unit.model, unit.target), defines(unit.model, unit.target, board=True))
    )
    return f"""# Builds the firmware of {unit.model}. CC is any C99 compiler for {core.name}.
CC = {core.gcc_command}
CFLAGS = {" ".join(core.gcc)} -std=c99 {OPTIMISATION[unit.optimize]} -ffreestanding -fomit-frame-pointer \\
\t-ffunction-sections -fdata-sections {" ".join(EMITTED_C)}
DEFINES = {given}
SOURCES = {" ".join(sources)}

{unit.model}.elf: $(SOURCES) link.ld
\t$(CC) $(CFLAGS) $(DEFINES) -Isrc -Iruntime -Idriver -nostdlib -Wl,--gc-sections -T link.ld $(SOURCES) -lgcc -o $@

{board_makefile(unit.model, sources, of_board)}
clean:
\trm -f {unit.model}.elf {unit.model}_board.elf
.PHONY: clean board
"""


def write_project(project: Project, folder: Path, replace: bool = False) -> None:
    """Write every file of the project, all or none; raises BuildError where the folder exists and `replace` is not
    given, it is not a build, or it cannot be written."""
    check_replaced(folder, replace)
    files: dict[str, bytes | Sequence[bytes | Array]] = {name: text.encode() for name, text in project.files.items()}
    files |= project.data
    if project.graph is not None:
        files[GRAPH] = graph_parts(project.graph)
    write_files(files, folder, replace)


def digest_of(files: Mapping[str, str]) -> str:
    """Which build it is, in hexadecimal: of names and texts of the files."""
    state = hashlib.sha256()
    for name, text in sorted(files.items()):
        state.update(f"{name}\0{len(text)}\0{text}".encode())
    return state.hexdigest()[:32]


def board_sources(target_sources: tuple[str, ...]) -> tuple[str, ...]:
    """Sources of a board's firmware, without the user's own functions."""
    own = tuple(f"runtime/{name}" for name in BOARD if name.endswith(".c"))
    return tuple(board for name in target_sources for board in (own if name == "runtime/sim_main.c" else (name,)))


def _network_header(unit: Unit, digest: str) -> str:
    """Facts about the network that board_main.c needs."""

    def ports(views: Mapping[str, View]) -> str:
        """The initialisers of the ports."""
        return ", ".join(f"{{{unit.first_byte(view)}, {view.span[1] - view.span[0]}u}}" for view in views.values())

    kept = unit.program.states or unit.delay
    lines = [
        f'#include "{unit.model}.h"',
        "",
        f"#define BOARD_DIGEST {{{', '.join(f'0x{byte:02x}u' for byte in bytes.fromhex(digest))}}}",
        f"#define BOARD_LAYERS {max(1, len(unit.program.layers))}u",
        f"#define BOARD_RUN {unit.model}_run",
        f"#define BOARD_RESET() {f'{unit.model}_reset()' if kept else '((void)0)'}",
        f"#define BOARD_INPUTS {{{ports(unit.program.inputs)}}}",
        f"#define BOARD_OUTPUTS {{{ports(unit.program.outputs)}}}",
        "",
    ]
    return guard("DOVETAIL_BOARD_NETWORK_H", "\n".join(lines))


def board_makefile(model: str, target_sources: tuple[str, ...], defines: str) -> str:
    """The part of a Makefile that links the firmware of a board."""
    return f"""# The firmware of a board. BOARD_IO is your C file with the functions of runtime/board.h.
BOARD_IO =
BOARD_DEFINES = {defines}
BOARD_SOURCES = {" ".join(board_sources(target_sources))}

board: $(BOARD_SOURCES) link.ld
\t@test -n "$(BOARD_IO)" || {{ echo "say which file has the functions of runtime/board.h: BOARD_IO=file.c"; exit 1; }}
\t$(CC) $(CFLAGS) $(BOARD_DEFINES) -Isrc -Iruntime -Idriver -nostdlib -Wl,--gc-sections -T link.ld \\
\t\t$(BOARD_SOURCES) $(BOARD_IO) -lgcc -o {model}_board.elf
"""
