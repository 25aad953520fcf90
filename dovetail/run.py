"""Builds an emitted project and runs it on a simulated chip."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import structs

from dovetail.codegen.build.instruction_sets import EMITTED_C, instruction_set
from dovetail.codegen.emit.project import INCLUDED, OPTIMISATION, defines
from dovetail.codegen.manifest import BuildManifest, BuildPort, read_manifest
from dovetail.codegen.plan_file import PLAN, read_plan
from dovetail.documented import document
from dovetail.errors import BoardError, BuildError, DovetailError
from dovetail.fields import changed, fields_of
from dovetail.folders import PREFILL
from dovetail.ir.layout import from_bytes, from_notation, to_bytes
from dovetail.ir.types import Array, TensorType
from dovetail.names import names
from dovetail.records import Record
from dovetail.sim.device import DeviceSpec, guarded, target_devices
from dovetail.sim.line import Board
from dovetail.sim.protocol import InferenceResult, SimulationResult
from dovetail.sim.stretches import with_lists
from dovetail.target.description import Target, with_cores
from dovetail.target.devices import VERILATED
from dovetail.target.engine import DeviceModel
from dovetail.target.registry import is_installed, load_target

SIMULATORS = ("iss", "rtl", "qemu", "host")
"""Simulators a build runs on."""
_EITHER = "_or_step"
"""Ends the name of the C function that computes one step or several."""
BOARD = "board"
"""Stands in place of the simulator's name for a run on a board."""


class Waves(Record):
    """Signals of an engine in Verilog, written to a file."""

    file: Path
    """VCD, 10 ns a cycle."""
    cycles: int = 10_000
    """Number of cycles written, of those in which the engine has work."""


class Watchdog(Record):
    """Limits of a run, and the file for register accesses of devices."""

    instructions: int
    """Instructions the core may execute."""
    seconds: float
    """Most seconds of an inference."""
    folder: Path
    """A file for each device, `NUMBER.accesses` (dovetail/sim/device.py)."""


class ProjectBuild(Record):
    """An emitted project on disk."""

    folder: Path
    """Folder of the C project."""
    manifest: BuildManifest
    """Description of the build, from dovetail.json."""
    target: Target
    """Target of the compilation."""


class RunResult(Record):
    """Outputs of a build's run, and its costs."""

    build: ProjectBuild
    """Build that was run."""
    simulator: str
    """Simulator or board of the run."""
    outputs: tuple[Mapping[str, Array], ...]
    """Per inference, by the model's tensor names."""
    simulation: SimulationResult
    """Outputs and costs, as the simulator returned them."""
    sizes: Mapping[str, int]
    """Bytes of text, rodata, data and bss; empty on the host."""


def open_build(folder: Path, target: Target | None = None) -> ProjectBuild:
    """Read a build's description; raises BuildError when the folder is not a build of this version's kind.

    Args:
        folder: the build.
        target: the machine it was made for; None to load it by the name the build has.

    Raises:
        BuildError: it was made for a target file that is not given, or for another target than the one that is.
    """
    manifest = read_manifest(folder)
    name = manifest.target
    if target is None and not is_installed(name):
        what = f"the build was made for '{name}', the target of a file of your own"
        raise BuildError(what, where=str(folder), hint="give the file with --target")
    found = with_cores(target or load_target(name), manifest.cores)
    found = changed(found, {name: value for name, value in manifest.settings.items() if name in fields_of(found)})
    if found.name != name:
        hint = "give the file with --target"
        raise BuildError(f"the build was made for '{name}', not for '{found.name}'", where=str(folder), hint=hint)
    return ProjectBuild(folder, manifest, found)


def default_simulator(target: Target) -> str:
    """The simulator of a target: "iss" or "qemu" for a chip; "host" if the core is this computer, or has Helium and
    other units beside it."""
    simulator = instruction_set(target.core.isa).simulator
    return "host" if simulator == "qemu" and (target.engines or target.dmas or target.workers) else simulator


def chip_simulator(target: Target) -> str:
    """The simulator of the target's chip, whose cycles are counted: "iss" for a core that is this computer, too, which
    then says so."""
    return "qemu" if default_simulator(target) == "qemu" else "iss"


def run_build(
    build: ProjectBuild,
    simulator: str | None,
    inputs: Sequence[Mapping[str, Array]],
    cache: Path | None = None,
    waves: Waves | None = None,
    board: Board | None = None,
    watchdog: Watchdog | None = None,
    core: str = "",
) -> RunResult:
    """Compile the project (cached by content) and run one inference per set of inputs, in succession. States keep
    their contents from one inference to the next. Inputs of the shapes of `several_steps` are computed by that network.

    Args:
        build: the project.
        simulator: one of `SIMULATORS`; None for `default_simulator`.
        inputs: arrays by input name, of exactly the model's shapes and types.
        cache: folder of compiled objects; None for the user's.
        waves: where the simulator `rtl` writes the signals of the engines in Verilog; None for nowhere.
        board: what it runs on instead of a simulator; None for none.
        watchdog: of a simulated chip, its seconds also of this computer; None for the usual limits.
        core: with the simulator `rtl`, the core that is RTL too (`sim.core_rtl.CORES`); engines that are not there in
            Verilog then keep their models. Empty for the one of `Core.unit`, or none.

    Raises:
        DovetailError: the compiler is missing or fails, the simulated chip does something it must not, or the board
            does not answer.
    """
    if board is not None and simulator not in (None, BOARD):
        what = f"a build runs on a board or on the simulator '{simulator}', not on both"
        raise DovetailError(what, where="--sim, --on", hint="leave out one of them")
    simulator = BOARD if board is not None else simulator or default_simulator(build.target)
    run, owners = _owners(build, inputs, simulator)
    sets = [_set(run, own, arrays) for own, arrays in zip(owners, inputs, strict=True)]
    wanted = {port.place: port.bytes for own in owners for port in own.manifest.outputs}
    sizes, delay = dict[str, int](), build.manifest.delay
    sets += sets[-1:] * delay
    if waves is not None and simulator != "rtl":
        raise DovetailError("it has no signals to write", where=f"simulator '{simulator}'", hint="use --sim rtl")
    if core and simulator != "rtl":
        raise DovetailError(f"its core is not RTL on '{simulator}'", where="--core", hint="use --sim rtl")
    if board is None and simulator not in SIMULATORS:
        hint = f"use one of {', '.join(SIMULATORS)}"
        raise DovetailError(f"there is no simulator '{simulator}'", where="--sim", hint=hint)
    with one_version(build):
        if board is not None:
            simulation = _run_board(run, board, sets, wanted, cache)
        elif simulator in ("iss", "rtl"):
            core = core or _core_of_unit(build.target, simulator)
            devices = _devices_on(run, simulator, core, waves, cache)
            simulation, sizes = _run_iss(run, devices, sets, wanted, cache, watchdog, core)
        elif simulator == "qemu":
            simulation, sizes = _run_qemu(run, sets, wanted, cache, watchdog)
        else:
            simulation = _run_host(run, sets, wanted, cache, watchdog)
    stretches = build.manifest.stretches if any(engine.stream for engine in build.target.engines) else ()
    inferences = tuple(with_lists(stretches, one) for one in simulation.inferences[delay:])
    simulation = replace(simulation, inferences=inferences)
    outputs = tuple(map(_outputs, owners, simulation.inferences))
    return RunResult(build, f"{simulator}{_apart(build.target, core)}", outputs, simulation, sizes)


def several_steps(build: ProjectBuild) -> ProjectBuild | None:
    """The build's network of several steps, as a build of its own; None without one."""
    return replace(build, manifest=read_manifest(build.folder / PREFILL)) if build.manifest.prefill else None


def _owners(
    build: ProjectBuild, inputs: Sequence[Mapping[str, Array]], simulator: str
) -> tuple[ProjectBuild, list[ProjectBuild]]:
    """The build that is run, and the network that computes each inference; raises DovetailError
    where a simulator cannot."""
    several = several_steps(build)
    owners = [several if several and _is_of(several, arrays) else build for arrays in inputs]
    if several is None or several not in owners:
        return build, owners
    if not runs_several(build, simulator):
        what = "several steps in one call run on the simulated chip alone, and without engines on this computer"
        raise DovetailError(what, where=f"simulator '{simulator}'", hint="run single steps there")
    entry = f"{several.manifest.model_prefix}{_EITHER}"
    return replace(several, manifest=structs.replace(several.manifest, entry=entry)), owners


def _set(run: ProjectBuild, own: ProjectBuild, arrays: Mapping[str, Array]) -> dict[str, bytes]:
    """The bytes of an inference of a network by place, and which of two networks it is."""
    found = {port.place: _contents(port, arrays[port.name]) for port in own.manifest.inputs}
    is_several = own.manifest.model_prefix == run.manifest.model_prefix
    turn = {f"{run.manifest.model_prefix}_next+0": int(is_several).to_bytes(4, "little")}
    return found | (turn if run.manifest.entry.endswith(_EITHER) else {})


def runs_several(build: ProjectBuild, simulator: str) -> bool:
    """Whether a simulator can run the network of several steps.

    Boards do not, nor does the host beside engines that are simulated devices.
    """
    several = several_steps(build)
    if several is None or simulator == BOARD:
        return False
    return simulator != "host" or f"src/{several.manifest.model_prefix}.c" in build.manifest.sources.host


def _is_of(build: ProjectBuild, arrays: Mapping[str, Array]) -> bool:
    return all(arrays[port.name].shape == port.shape for port in build.manifest.inputs)


@contextmanager
def one_version(build: ProjectBuild) -> Iterator[None]:
    """Read the files of one build: raises BuildError if another build replaces it in the meantime."""
    try:
        yield
    except (DovetailError, OSError):
        _check_same(build)
        raise
    _check_same(build)


def _check_same(build: ProjectBuild) -> None:
    try:
        same = read_manifest(build.folder).digest == build.manifest.digest
    except BuildError:
        same = False
    if not same:
        what = "another build took its place, or it was removed, while it was read"
        raise BuildError(what, where=str(build.folder), hint="run the command again") from None


def _devices_on(build: ProjectBuild, simulator: str, core: str, waves: Waves | None, cache: Path | None) -> _Devices:
    """The devices of a simulator; on `rtl` those that are there in Verilog, which a core that is RTL does without."""
    target = build.target
    wanted = simulator == "rtl" and (not core or waves is not None or _has_verilog(target))
    devices = target_devices(target, verilog_devices(target, waves, cache) if wanted else {})
    return devices if simulator == "rtl" else _guarded(build, devices)


def _guarded(build: ProjectBuild, devices: _Devices) -> _Devices:
    """The devices of a target, each of which may write what its engine's launches give, and no other byte."""
    if not (build.folder / PLAN).is_file():
        return devices
    target, folders = build.target, [build.folder]
    folders += [build.folder / PREFILL] if build.manifest.entry.endswith(_EITHER) else []
    known = [(folder, read_manifest(folder).layers) for folder in folders]
    plans = [(read_plan(folder, len(layers)), layers) for folder, layers in known]
    placed = [
        (memory, buffer) for plan, _ in plans for memory in plan["memories"].values() for buffer in memory["buffers"]
    ]
    starts = [(memory["base"] + buffer["address"], buffer) for memory, buffer in placed]
    others = [(start, start + buffer["bytes"], buffer["name"]) for start, buffer in starts]
    others += [(one.base, one.base + one.size, f"the memory {one.name}") for one in target.memories]
    used = {
        target.code,
        target.values,
        *(name for plan, _ in plans for name, one in plan["memories"].items() if one["buffers"]),
    }
    own = [(one.base, one.base + one.size, one.name) for one in target.memories if one.name not in used]
    found = list(devices)
    for place, engine in enumerate(engine for engine in target.engines if engine.device):
        if engine.device and engine.device.factory == VERILATED:
            continue  # it views memories once, and not for each job
        named = [
            (first, stop, layers[layer].name)
            for plan, layers in plans
            for first, stop, layer in plan.get("results", {}).get(engine.name, ())
        ]
        if named:
            found[place] = guarded(found[place], engine.name, [*named, *own], others)
    return found


def _core_of_unit(target: Target, simulator: str) -> str:
    """The core that the function unit of the target's core is put beside; empty for none."""
    return target.core.unit.core if target.core.unit and simulator == "rtl" else ""


def _apart(target: Target, core: str) -> str:
    """The core that is RTL, and that its memories answer at once where the target's do not; empty for none."""
    if not core:
        return ""
    from dovetail.sim.core_rtl import core_rtl

    at_once = any(memory.waits for memory in target.memories) and not core_rtl(core).has_caches
    return f", core {core}{' without waits' if at_once else ''}"


def firmware(
    build: ProjectBuild, sources: Sequence[Path], macros: Mapping[str, str | None], cache: Path | None = None
) -> Path:
    """Compile and link a build for the core of its target; returns the ELF file, or raises DovetailError.

    Args:
        build: the project.
        sources: absolute, or relative to its folder.
        macros: preprocessor definitions.
        cache: folder of compiled objects; None for the user's.
    """
    from dovetail.codegen.build.toolchain import compile_firmware

    return compile_firmware(
        build.folder,
        sources,
        linker_script=Path("link.ld"),
        isa=build.target.core.isa,
        defines=macros,
        include=INCLUDED,
        flags=(*EMITTED_C, OPTIMISATION[build.manifest.optimize]),
        cache=cache,
        compiler_runtime=build.manifest.uses_float,
    )


_Sets = Sequence[Mapping[str, bytes]]
"""Bytes by place in memory, for each inference."""
_Wanted = Mapping[str, int]
"""Place in memory -> bytes of an output."""
_Devices = Sequence[DeviceSpec]


def _run_iss(
    build: ProjectBuild,
    devices: _Devices,
    inputs: _Sets,
    wanted: _Wanted,
    cache: Path | None,
    watchdog: Watchdog | None,
    core: str = "",
) -> tuple[SimulationResult, dict[str, int]]:
    from dovetail.codegen.build.elf import section_sizes
    from dovetail.sim.architecture import core_costs
    from dovetail.sim.device import regions_of, watched
    from dovetail.sim.protocol import DEFAULT_INSTRUCTION_LIMIT, DEFAULT_TIMEOUT, SimulationSetup
    from dovetail.sim.worker import IssSession

    if instruction_set(build.target.core.isa).is_host:
        raise DovetailError(
            "the core is this computer, there is no chip to simulate", where=build.target.name, hint="use --sim host"
        )
    if (other := instruction_set(build.target.core.isa).simulator) != "iss":
        what = f"its emulator, Unicorn, does not know the instructions of {build.target.core.isa}"
        raise DovetailError(what, where="simulator 'iss'", hint=f"use --sim {other}")
    library = Path()
    if core:
        from dovetail.sim.core_rtl import build_core

        build = replace(build, target=_with_core(build.target, core))
        library = build_core(core, cache, build.target.core.unit)
    target = build.target
    for each in target.cores:
        core_costs(each.isa, each.costs, target.name)
    sources = [Path(name) for name in build.manifest.sources.target]
    macros = defines(build.manifest.model_prefix, target, entry=build.manifest.entry)
    elf = firmware(build, sources, macros, cache)
    setup = SimulationSetup(
        elf,
        regions_of(target),
        tuple(devices),
        target.core.isa,
        target.core.costs,
        extension=target.core.extension,
        workers=tuple(worker.costs for worker in target.workers),
        mailbox=target.mailbox,
        core_rtl=core,
        core_library=library,
    )
    limit, seconds = DEFAULT_INSTRUCTION_LIMIT, DEFAULT_TIMEOUT
    if watchdog is not None:
        limit, seconds = watchdog.instructions, watchdog.seconds
        noted = [watched(spec, watchdog.folder / f"{number}.accesses") for number, spec in enumerate(setup.devices)]
        setup = replace(setup, devices=tuple(noted))
    with IssSession(setup, seconds) as session:
        result = session.run(list(inputs), dict(wanted), limit)
    return result, section_sizes(elf)


def _run_qemu(
    build: ProjectBuild, inputs: _Sets, wanted: _Wanted, cache: Path | None, watchdog: Watchdog | None
) -> tuple[SimulationResult, dict[str, int]]:
    from dovetail.codegen.build.elf import section_sizes
    from dovetail.codegen.emit.firmware import SIMULATION_MAIN
    from dovetail.sim.architecture import core_costs
    from dovetail.sim.protocol import DEFAULT_TIMEOUT
    from dovetail.sim.qemu import HARNESS, QemuSession

    target = build.target
    if default_simulator(target) != "qemu":
        beside = [
            *(one.name for one in (*target.engines, *target.dmas)),
            *(f"core {n + 1}" for n in range(len(target.workers))),
        ]
        what = f"it runs one core with Helium, {target.name} has {', '.join([target.core.isa, *beside])}"
        raise DovetailError(what, where="simulator 'qemu'", hint=f"use --sim {default_simulator(target)}")
    sources = [HARNESS if Path(name).name == SIMULATION_MAIN else Path(name) for name in build.manifest.sources.target]
    own = defines(build.manifest.model_prefix, target, entry=build.manifest.entry)
    macros = {**own, "DOVETAIL_MARK_HOOK": None}
    elf = firmware(build, sources, {name: value for name, value in macros.items() if name != "DOVETAIL_SIM"}, cache)
    seconds = watchdog.seconds if watchdog else DEFAULT_TIMEOUT
    with QemuSession(elf, core_costs(target.core.isa, target.core.costs, target.name), seconds) as session:
        return session.run(list(inputs), dict(wanted)), section_sizes(elf)


def _with_core(target: Target, name: str) -> Target:
    """The target with the instruction set firmware has on a core that is RTL; raises DovetailError where that core
    cannot stand in for the target's."""
    from dovetail.sim.core_rtl import core_rtl

    core = core_rtl(name)
    if instruction_set(target.core.isa).family != "riscv" or target.workers:
        what = f"'{name}' is one RISC-V core; the target has {len(target.cores)} of {target.core.isa}"
        raise DovetailError(what, where=target.name, hint="leave out --core")
    if core.has_caches and (target.engines or target.dmas):
        what = f"'{name}' has a data cache, which would keep what it reads of the registers of engines and DMA"
        raise DovetailError(what, where=target.name, hint="use another core, or a target of a core alone")
    return replace(target, core=replace(target.core, isa=core.isa or target.core.isa))


def _has_verilog(target: Target) -> bool:
    models = (model for engine in target.engines for model in (engine.device, engine.rtl))
    return any(model is not None and model.factory == VERILATED for model in models)


def verilog_devices(target: Target, waves: Waves | None = None, cache: Path | None = None) -> dict[str, DeviceModel]:
    """Engines' Verilog as devices, built, by engine; raises DovetailError if an engine has no Verilog, or it does
    not build."""
    from dovetail.sim.rtl import build_rtl
    from dovetail.target.devices import VERILATED, read_rtl

    known = [(engine.name, model) for engine in target.engines for model in (engine.device, engine.rtl) if model]
    models = {name: model for name, model in known if model.factory == VERILATED}
    if not models:
        raise DovetailError("no engine is there in Verilog", where=target.name, hint="use --sim iss")
    written: dict[str, Any] = {}
    if waves is not None:
        if len(models) > 1:
            what = f"waves are of one engine, and {', '.join(models)} are in Verilog"
            raise DovetailError(what, where="--waves", hint="take the Verilog of all engines but one out of the target")
        try:
            waves.file.write_bytes(b"")
        except OSError as error:
            raise DovetailError(
                f"the waves cannot be written: {error.strerror}", where=str(waves.file), hint="choose another file"
            ) from None
        written = {"waves": str(waves.file.resolve()), "wave_cycles": waves.cycles}
    found = {}
    for name, model in models.items():
        library = build_rtl(read_rtl(model.arguments["rtl"]), traced=waves is not None, cache=cache)
        found[name] = replace(model, arguments={**model.arguments, "library": str(library), **written})
    return found


def _run_host(
    build: ProjectBuild, inputs: _Sets, wanted: _Wanted, cache: Path | None, watchdog: Watchdog | None
) -> SimulationResult:
    from dovetail.codegen.build.toolchain import compile_host
    from dovetail.sim.protocol import DEFAULT_TIMEOUT
    from dovetail.sim.worker import HostSession

    engines = [engine for engine in build.target.engines if engine.device is None]
    software = {name: value for engine in engines for name, value in engine.defines.items()}
    environment = {name: value for e in engines if e.environment for name, value in e.environment().items()}
    library = compile_host(
        build.folder,
        [Path(name) for name in build.manifest.sources.host],
        defines={"DOVETAIL_HOST": None, **software},
        include=[Path("src"), Path("runtime"), Path("driver")],
        flags=("-O1", *EMITTED_C),  # a large network is compiled for longer than it runs
        cache=cache,
        libraries=tuple(dict.fromkeys(flag for engine in engines for flag in engine.libraries)),
    )
    seconds = watchdog.seconds if watchdog else DEFAULT_TIMEOUT
    with HostSession(library, build.manifest.entry, seconds, environment, len(build.manifest.layers)) as session:
        return session.run(list(inputs), dict(wanted))


def _run_board(
    build: ProjectBuild,
    board: Board,
    inputs: Sequence[Mapping[str, bytes]],
    wanted: Mapping[str, int],
    cache: Path | None,
) -> SimulationResult:
    from dovetail.sim.board import open_board

    if not build.manifest.digest or instruction_set(build.target.core.isa).is_host:
        hint = "compile the model again, for a target whose core is not this computer"
        raise BuildError("the build has no firmware for a board", where=str(build.folder), hint=hint)
    board.check()
    with open_board(board, build.manifest, build.target.core.isa, board_firmware(build, board, cache)) as session:
        return session.run(inputs, wanted)


def board_image(build: ProjectBuild) -> Path:
    """The firmware file that the goal `board` of the Makefile writes."""
    return build.folder / f"{build.manifest.model_prefix}_board.elf"


def board_firmware(build: ProjectBuild, board: Board, cache: Path | None = None) -> Path:
    """The file of a board's firmware. It is built if the board's functions are given, and otherwise need not exist;
    raises BoardError if the file with the functions is missing."""
    if board.io is None:
        return board_image(build)
    if not board.io.is_file():
        what = f"there is no file {board.io} with the functions of runtime/board.h"
        raise BoardError(what, where=board.where, hint="give the right file with --board-io")
    sources = [*(Path(name) for name in build.manifest.sources.board), board.io.resolve()]
    return firmware(build, sources, defines(build.manifest.model_prefix, build.target, board=True), cache)


def _contents(port: BuildPort, array: Array) -> bytes:
    """The bytes of an input; row-major unless the port says otherwise."""
    return to_bytes(array, from_notation(port.layout) if port.layout else None).tobytes()


def _outputs(build: ProjectBuild, result: InferenceResult) -> dict[str, Array]:
    found = {}
    for port in build.manifest.outputs:
        layout = from_notation(port.layout) if port.layout else None
        held = np.frombuffer(result.outputs[port.place], np.uint8)
        found[port.name] = from_bytes(held, layout, TensorType(port.shape, port.kind))
    return found


if not TYPE_CHECKING:
    __getattr__ = names(__name__, Build="ProjectBuild")

document(__name__)
