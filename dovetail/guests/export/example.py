"""Programs for boards: `dovetail export --example` writes a folder that builds and flashes.

The network is a library in `network/`. Beside it lie a program that runs a test vector, and the board: clock, serial
line, counter of cycles. `EXAMPLES` has a row for each kind of board.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dovetail.arrays import inputs_of
from dovetail.codegen.manifest import BuildPort
from dovetail.errors import BuildError
from dovetail.guests.export.library import ExportLibrary, interrupt_options, library_of, template
from dovetail.guests.export.write import library_files, write_export
from dovetail.ir.graph import evaluate
from dovetail.ir.layout import from_notation, to_bytes
from dovetail.ir.types import Array
from dovetail.prove import is_approximate, read_graph
from dovetail.records import Record, field
from dovetail.run import ProjectBuild
from dovetail.target.parts import PARTS

if TYPE_CHECKING:
    from dovetail.folders import Contents


class ExampleProject(Record):
    """A program for a kind of board."""

    form: str
    """Form of the library in `network/`, of `FORMS`."""
    files: Mapping[str, str]
    """Path in the folder -> template."""
    use: str
    """How to build and flash it, for the README."""
    parts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Part -> words its templates have; empty where the board's own files say which part it is."""


EXAMPLES: Mapping[str, ExampleProject] = {
    "pico": ExampleProject(
        "cmake",
        {"CMakeLists.txt": "pico_cmake", "board.c": "pico_board.c"},
        "Needs the Pico SDK and `arm-none-eabi-gcc`:\n\n"
        "    cmake -B build -DPICO_SDK_PATH=/path/to/pico-sdk && cmake --build build\n\n"
        "Hold BOOTSEL, plug the board in and copy `build/@name@_example.uf2` to it. It prints over USB and over the\n"
        "serial line on GP0 (115,200 baud). `-D@upper@_CYCLES=ON` also makes `@name@_layers.uf2`, which prints the "
        "cycles\nof each layer.",
        {"rp2040": {"board": "pico"}, "rp2350": {"board": "pico2"}},
    ),
    "stm32cube": ExampleProject(
        "make",
        {
            "Makefile": "stm32_makefile",
            "board.c": "stm32_board.c",
            "start.c": "stm32_start.c",
            "link.ld": "stm32_link.ld",
        },
        "Needs `arm-none-eabi-gcc` with newlib, and OpenOCD to flash:\n\n    make && make flash\n\n"
        "In STM32CubeIDE: File, Import, Existing Code as Makefile Project. In a project of STM32CubeMX with its own\n"
        "start-up and clock: take `network/src`, `main.c` and `vector.h`, and write `board.c` with its HAL.\n"
        "The serial line is USART2 on PA2, the ST-LINK's on Nucleo-64 boards (115,200 baud). `make cycles` makes\n"
        "`@name@_layers.bin`, which prints the cycles of each layer.",
        {"stm32f407": {"manual": "RM0090"}, "stm32f446": {"manual": "RM0390"}},
    ),
    "zephyr-app": ExampleProject(
        "zephyr",
        {"CMakeLists.txt": "zephyr_app_cmake", "board.c": "zephyr_board.c", "prj.conf": "prj.conf"},
        "Needs a Zephyr workspace; BOARD is your board's name, with a core as the build's:\n\n"
        "    west build -b BOARD . && west flash",
    ),
}
"""By the name on the command line."""
_PLAIN_MHZ = 168
"""STM32F4: clocks above need over-drive (RM0390, 5.1.4)."""


def export_example(
    build: ProjectBuild, example: str, folder: Path, input_file: Path | None = None, replace: bool = False
) -> tuple[str, ...]:
    """Write a build as a program for a board.

    Args:
        build: what `dovetail compile` made for a part.
        example: one of `EXAMPLES`. folder: where it goes.
        input_file: an .npz with one inference's inputs; None for seeded inputs.
        replace: whether an export that is there is replaced.

    Returns:
        The files, relative to the folder.

    Raises:
        BuildError: the example is for other parts, the outputs are not exact integers or come some calls later, or as
            `library_files` and `write_export`.
    """
    project, library, name = EXAMPLES[example], library_of(build), build.manifest.model_prefix
    _check(build, example)
    graph = read_graph(build)
    if is_approximate(graph):
        hint = "quantise it with --integer-ends, or export --to a library"
        raise BuildError("it computes in float32, so no test vector is exact on every board", where=name, hint=hint)
    given, _ = inputs_of(input_file, build.manifest.inputs)
    outputs = evaluate(graph, given[0])
    source = str(input_file) if input_file else "random numbers with seed 0"
    words = {**_words(build, library, project, given[0], outputs), "source": source, "array": "", "reset": ""}
    shown = [*(["memory"] if library.arena else []), *(["reset"] if graph.states else [])]
    shown += ["overdrive"] if int(words["mhz"]) > _PLAIN_MHZ else []
    files: dict[str, Contents] = {f"network/{path}": text for path, text in library_files(build, project.form).items()}
    templates = {"main.c": "example_main.c", "board.h": "board.h", "README.md": "example_readme", **project.files}
    for path, text in templates.items():
        files[path] = template(text).fill(shown, **words).encode()
    files["vector.h"] = "\n".join(
        [
            f"/* A test vector of {name}: {source}, and the outputs of the integer graph. */",
            *_arrays("input", build.manifest.inputs, given[0]),
            *_arrays("output", build.manifest.outputs, outputs),
        ]
    ).encode()
    return write_export(files, f"{example} {name}", folder, replace)


def _check(build: ProjectBuild, example: str) -> None:
    parts, target = EXAMPLES[example].parts, build.manifest.target
    if parts and target not in parts:
        hint = f"compile for one of {', '.join(parts)}, or export --to {EXAMPLES[example].form}"
        raise BuildError(f"the example '{example}' is not for '{target}'", where="--example", hint=hint)
    if build.manifest.delay:
        what = f"its outputs come {build.manifest.delay} calls after their inputs, and the program calls it once"
        raise BuildError(what, where=build.manifest.model, hint="compile it without --pipeline")


def _words(
    build: ProjectBuild,
    library: ExportLibrary,
    project: ExampleProject,
    given: Mapping[str, Array],
    outputs: Mapping[str, Array],
) -> dict[str, str]:
    """The words of the templates."""
    target, manifest = build.target, build.manifest
    main, names = template("example_main.c"), {"name": library.name, "upper": library.upper}
    flash, ram = target.memory(target.code), target.memory(target.values)
    clock = PARTS[target.name].clock if target.name in PARTS else 0
    lines = [f"CONFIG_{option}=0 # line of {device}" for option, device in interrupt_options(library).items()]
    use = project.use.replace("@name@", library.name).replace("@upper@", library.upper)
    return {
        **names,
        **project.parts.get(target.name, {}),
        "arena": library.arena,
        "fill": "\n".join(main.fill_part("input", index=at, **names) for at in range(len(manifest.inputs))),
        "compare": "\n".join(main.fill_part("output", index=at, **names) for at in range(len(manifest.outputs))),
        "mhz": str(clock),
        "device": PARTS[target.name].name if target.name in PARTS else target.name,
        "form": project.form,
        "best": str(int(np.argmax(outputs[manifest.outputs[0].name]))),
        "use": use,
        "stack": str(target.core.stack),
        "interrupts": "\n".join(lines),
        "flash_base": f"{flash.base:#x}",
        "flash_size": str(flash.size),
        "ram_base": f"{ram.base:#x}",
        "ram_size": str(ram.size),
        "table": _table(build, clock),
    }


def _table(build: ProjectBuild, clock: int) -> str:
    """Needs of the network, as rows of a table."""
    manifest, target = build.manifest, build.target
    rows = [(f"input `{port.name}`", _shape(port)) for port in manifest.inputs]
    rows += [(f"output `{port.name}`", _shape(port)) for port in manifest.outputs]
    rows += [("flash", f"{manifest.stack.flash:,} bytes of {target.memory(target.code).size:,}")]
    rows += [
        (f"RAM ({name})", f"{use.peak:,} bytes of {use.size:,}") for name, use in manifest.memory.items() if use.peak
    ]
    need = manifest.stack
    rows += [("stack", f"no bound: {need.why}" if need.nbytes is None else f"{need.nbytes:,} bytes")]
    if manifest.estimated:
        time = f", {manifest.estimated / clock / 1000:,.2f} ms at {clock} MHz" if clock else ""
        rows += [("cycles", f"{manifest.estimated:,}{time}")]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def _shape(port: BuildPort) -> str:
    scale = f", scale {port.scale:g}, zero point {port.zero_point}" if port.scale is not None else ""
    return f"{port.dtype}[{'x'.join(map(str, port.shape))}]{scale}"


def _arrays(kind: str, ports: Sequence[BuildPort], values: Mapping[str, Array]) -> list[str]:
    """The bytes of inputs or outputs as C arrays."""
    lines = []
    for index, port in enumerate(ports):
        content = to_bytes(values[port.name], from_notation(port.layout) if port.layout else None).tolist()
        rows = [", ".join(map(str, content[at : at + 20])) for at in range(0, len(content), 20)]
        lines += [f"static const unsigned char {kind}_{index}[] = {{", *(f"    {row}," for row in rows), "};"]
    return [*lines, ""]
