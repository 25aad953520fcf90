"""The files of an emitted project."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from dovetail import __version__
from dovetail.build.instruction_sets import EMITTED_C, instruction_set
from dovetail.emit.board import board_files, board_makefile, board_sources, digest_of
from dovetail.emit.header import header_source
from dovetail.emit.host import host_source
from dovetail.emit.hosted import main_source, makefile
from dovetail.emit.runtime import runtime_path
from dovetail.emit.runtime.linker import linker_script
from dovetail.emit.source import (
    Unit,
    arena_name,
    arenas,
    constants_source,
    core_copies,
    is_fixed,
    kernels_source,
    model_source,
)
from dovetail.emit.write import write_files
from dovetail.errors import BuildError
from dovetail.kernels import Optimize
from dovetail.program.ir import Call, Copy, Launch
from dovetail.program.transfers import strips, transfers
from dovetail.target.description import Deployed, Engine, Launched, Target

MANIFEST = "dovetail.json"
"""Name of the file that describes a build."""

OPTIMISATION: Mapping[Optimize, str] = {Optimize.SPEED: "-O2", Optimize.SIZE: "-Os"}
"""The compiler's option for what the code is made for."""

_HEADER, _MAIN = "dovetail_rt.h", "src/main.c"
_DMA = ("dma.h", "dma.c")
_COPY = ("copy.h", "copy.c")
_CORES = ("cores.h", "cores.c")
_SEVERAL = re.compile(r"(?:(?<=\n)\n)?^#ifdef DOVETAIL_MAILBOX\n.*?^#endif /\* DOVETAIL_MAILBOX \*/\n", re.M | re.S)
"""What start-up code has for several cores."""


@dataclass(frozen=True)
class Project:
    """An emitted project in memory: file contents by relative path."""

    files: Mapping[str, str]
    target_sources: tuple[str, ...]
    """What is compiled for the target, relative paths."""
    host_sources: tuple[str, ...]
    """What is compiled for the host."""

    def with_file(self, name: str, text: str) -> Project:
        """The project with one more file."""
        return replace(self, files={**self.files, name: text})


def emit_project(unit: Unit, manifest: Mapping[str, Any]) -> Project:
    """Every file of the project.

    Args:
        unit: what to emit.
        manifest: content of the build's description; sources, entry point and sizes are added.
    """
    model = unit.model
    constants, kernels, host = constants_source(unit), kernels_source(unit), host_source(unit)
    files = {
        f"src/{model}.h": header_source(unit, __version__),
        f"src/{model}.c": model_source(unit),
        f"src/{model}_constants.h": constants[0],
        f"src/{model}_constants.c": constants[1],
        f"src/{model}_kernels.h": kernels[0],
        f"src/{model}_kernels.c": kernels[1],
    }
    common = [f"src/{model}.c", f"src/{model}_constants.c", f"src/{model}_kernels.c"]
    copying = _DMA if unit.target.dma else _COPY if core_copies(unit) else ()
    cores = _CORES if unit.target.workers else ()
    start = _start(unit)
    names = (path.removeprefix("runtime/") for path in start if path != _MAIN)
    for name in (*names, _HEADER, *copying, *cores):
        text = runtime_path(name).read_text()
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
    target_sources = (*shared, *drivers, *start)
    host_sources = (*shared, *dict.fromkeys(software), *([f"src/{model}_host.c"] if host is not None else []))
    digest = digest_of(files)
    files.update({} if _MAIN in start else board_files(unit, digest))
    files["Makefile"] = _makefile(unit, target_sources)
    described = {**manifest, **_description(unit, target_sources, host_sources), "digest": digest}
    files[MANIFEST] = json.dumps(described, indent=2, sort_keys=True) + "\n"
    return Project(files, target_sources, host_sources)


def _start(unit: Unit) -> tuple[str, ...]:
    """The sources that make a program of the network."""
    core = instruction_set(unit.target.core.isa)
    if core.is_host:
        return (_MAIN, "runtime/dovetail_rt.c")
    return (f"runtime/{core.start}", "runtime/dovetail_rt.c", "runtime/sim_main.c")


def _driver_files(unit: Unit, engine: Engine) -> dict[str, str]:
    """The text of an engine's C files, by their path in the project."""
    found = {}
    for resource in engine.driver:
        package, _, path = resource.partition(":")
        found[f"driver/{path.rpartition('/')[2]}"] = resources.files(package).joinpath(path).read_text()
    made = engine.made(_deployed(unit, engine)) if engine.made else {}
    files = {**{name: path.read_text() for name, path in engine.files.items()}, **made}
    return {**found, **{f"driver/{name}": text for name, text in files.items()}}


def _deployed(unit: Unit, engine: Engine) -> Deployed:
    """The network as an engine sees it."""
    launches = [s for s in unit.program.statements if isinstance(s, Launch) and s.engine == engine.name]
    offloads = [unit.regions[launch.layer].offload for launch in launches]
    listed = [Launched(o.name, launch.match) for o, launch in zip(offloads, launches, strict=True) if o is not None]
    nbytes = arenas(unit).get(engine.memory, 0)
    return Deployed(unit.model, arena_name(unit, engine.memory), nbytes, tuple(listed))


def _linker_script(unit: Unit) -> str:
    target = unit.target
    near = {memory: memory for memory in arenas(unit) if is_fixed(target, memory)}
    return linker_script(
        target.memories,
        text=target.code,
        data=target.values,
        stack_bytes=target.core.stack,
        extra={f".{memory.lower()}": memory for memory in near},
        isa=target.core.isa,
        worker_stacks=[core.stack for core in target.workers],
    )


def defines(unit_model: str, target: Target, board: bool = False) -> dict[str, str | None]:
    """Preprocessor definitions of a firmware for the simulator, or for a board."""
    simulated = {
        "DOVETAIL_SIM": None,
        "DOVETAIL_MODEL_HEADER": f'"{unit_model}.h"',
        "DOVETAIL_MODEL_RUN": f"{unit_model}_run",
    }
    found: dict[str, str | None] = {"DOVETAIL_BOARD": None} if board else {**simulated}
    if target.dma:
        found["DOVETAIL_DMA_BASE"] = f"0x{target.dma.base:x}u"
    if target.workers:
        found["DOVETAIL_MAILBOX"] = f"0x{target.mailbox:x}"
    for engine in target.engines:
        found.update({name: f"0x{value:x}u" for name, value in engine.defines.items()})
    return found


def _makefile(unit: Unit, sources: tuple[str, ...]) -> str:
    if instruction_set(unit.target.core.isa).is_host:
        return makefile(unit, sources, OPTIMISATION[unit.optimize])
    given, of_board = (
        " ".join(f"-D{name}" if value is None else f"-D{name}='{value}'" for name, value in found.items())
        for found in (defines(unit.model, unit.target), defines(unit.model, unit.target, board=True))
    )
    core = instruction_set(unit.target.core.isa)
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


def _description(unit: Unit, target_sources: tuple[str, ...], host_sources: tuple[str, ...]) -> dict[str, Any]:
    program = unit.program

    def ports(kind: str) -> list[dict[str, Any]]:
        """Each input or output: type, symbol and offset, bytes, layout."""
        views = program.inputs if kind == "input" else program.outputs
        found = []
        for name, view in views.items():
            buffer = program.buffers[view.buffer]
            assert buffer.address is not None
            found.append(
                {
                    "name": name,
                    "shape": list(view.type.shape),
                    "dtype": view.type.dtype.text,
                    "symbol": f"{unit.model}_{buffer.memory.lower()}",
                    "offset": buffer.address - unit.target.memory(buffer.memory).base + view.offset,
                    "bytes": view.span[1] - view.span[0],
                    "layout": str(view.layout) if view.layout else "",
                }
            )
        return found

    return {
        "dovetail": __version__,
        "entry": f"{unit.model}_run",
        "uses_float": any(p.c_type == "float" for kernel in unit.kernels for p in kernel.told),
        "model_prefix": unit.model,
        "optimize": unit.optimize.value,
        "inputs": ports("input"),
        "outputs": ports("output"),
        "state_bytes": sum(kept.first.nbytes for kept in program.states),
        "work": _work(unit),
        "sources": {"target": list(target_sources), "host": list(host_sources),
                    "board": list(board_sources(target_sources))},
    }


def _work(unit: Unit) -> list[dict[str, Any]]:
    """Per layer: transfers, bytes they write (padding too), launches, and their MACs (overlaps too) in all and by
    engine."""
    found: list[dict[str, Any]] = [
        {"transfers": 0, "bytes": 0, "launches": 0, "macs": 0, "engines": {}} for _ in unit.program.layers
    ]
    last = len(unit.program.statements) - 1
    for index, moves in unit.program.moves.items():
        own = found[unit.program.statements[min(index, last)].layer]
        own["transfers"] += len(moves)
        own["bytes"] += sum(move.view.type.nbytes for move in moves)
    for statement in unit.program.statements:
        if isinstance(statement, Copy):
            for transfer in transfers(statement):
                split = strips(transfer) if transfer.border and unit.target.dma else (transfer,)
                found[statement.layer]["transfers"] += len(split)
                found[statement.layer]["bytes"] += transfer.nbytes
        if isinstance(statement, Launch):
            types, own = statement.graph.types, found[statement.layer]
            macs = sum(n.operator.macs([types[name] for name in n.inputs]) for n in statement.graph.nodes)
            own["launches"] += 1
            own["macs"] += macs
            own["engines"][statement.engine] = own["engines"].get(statement.engine, 0) + macs
    return [{**own, **cores} for own, cores in zip(found, _cores(unit), strict=True)]


def _cores(unit: Unit) -> list[dict[str, list[int]]]:
    """Per layer: the numbers of the cores that compute it, where there are several."""
    calls = [statement for statement in unit.program.statements if isinstance(statement, Call)]
    layers = range(len(unit.program.layers))
    numbers = [sorted({call.core for call in calls if call.layer == layer}) for layer in layers]
    return [{"cores": some} if unit.target.workers else {} for some in numbers]


def write_project(project: Project, folder: Path, replace: bool = False) -> None:
    """Write every file of the project, all or none.

    Raises:
        BuildError: the folder exists and `replace` is not given, or it is not a build, or it cannot be written.
    """
    foreign = folder.exists() and not (folder / MANIFEST).is_file()
    if replace and foreign and (not folder.is_dir() or any(folder.iterdir())):
        raise BuildError("this is not a build of Dovetail's and is not replaced", where=str(folder),
                         hint="choose another folder")
    write_files({name: text.encode() for name, text in project.files.items()}, folder, replace)
