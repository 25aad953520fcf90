"""Parts of every firmware besides the network: C and assembler files, and the linker script they expect."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dovetail.codegen.build.instruction_sets import instruction_set
from dovetail.errors import BuildError
from dovetail.kernels.c import Lines, identifier
from dovetail.target.chip import Memory
from dovetail.target.engine import Engine

STACK_ALIGNMENT = 16
"""Bytes: what stacks are rounded up to."""
START = "rv32_start.S"
"""Start-up code of an RV32 firmware; `InstructionSet.start` names that of any core."""
RUNTIME = ("dovetail_rt.h", "dovetail_rt.c")
"""Helpers every firmware is linked with."""
DMA_DRIVER = ("dma.h", "dma.c")
"""Driver of the DMA."""
COPY = ("copy.h", "copy.c")
"""Copies by the core, where there is no DMA."""
CORES = ("cores.h", "cores.c")
"""How cores start one another, where there are several."""
SIMULATION_MAIN = "sim_main.c"
"""The harness that runs a model under a simulator."""
FIXED = ".fixed_constants"
"""The section of constants that lie at an address of their own."""
FRAMES = ("board.h", "frames.h", "frames.c")
"""Frames on a line, answered."""
BOARD = (*FRAMES, "board_main.c")
"""The firmware of a board, which answers `dovetail run --on`."""


def runtime_path(name: str) -> Path:
    """The file `name` of the folder `runtime`; raises FileNotFoundError."""
    path = Path(__file__).with_name("runtime") / name
    if not path.is_file():
        raise FileNotFoundError(path)
    return path


_STANDARD = frozenset(
    """assert complex ctype errno fenv float inttypes iso646 limits locale math setjmp signal stdarg stdbool stddef
    stdint stdio stdlib string tgmath time wchar wctype""".split()  # noqa: SIM905
)
"""Headers of C99, which compilers and drivers include."""


def model_name(text: str, engines: Iterable[Engine]) -> str:
    """The C name of a network called so, which its files have too: that of no header of C and of no other file."""
    listed = [resource for engine in engines for resource in (*engine.driver, *engine.files, *engine.headers)]
    taken = {Path(resource.rpartition(":")[2]).stem for resource in listed} | {*_STANDARD, "dovetail", "board_network"}
    taken |= {path.name.partition(".")[0] for path in Path(__file__).with_name("runtime").iterdir()}
    name = identifier(text)
    return f"m_{name}" if name in taken else name


def linker_script(
    memories: Sequence[Memory],
    *,
    text: str,
    data: str,
    stack: str | None = None,
    stack_bytes: int = 4096,
    extra: Mapping[str, str] | None = None,
    isa: str = "rv32imc",
    worker_stacks: Sequence[int] = (),
    fixed: int | None = None,
) -> str:
    """Write the linker script the start-up code of `isa` expects.

    The stack comes before .data in its memory: with nothing below it, an overflow is a bad access.

    Args:
        memories: the memories of the chip.
        text: memory of the code, and of the initial values of .data (the start-up copies them).
        data: memory of .data and .bss. stack: of the stack, default `data`.
        stack_bytes: its size, rounded up to `STACK_ALIGNMENT`. worker_stacks: those of cores 1, 2, …, which lie above
            it; the table `__worker_stack_tops` has their ends.
        extra: more unloaded sections, e.g. {".l1": "l1"}: variables given that section (or ".l1.x"), not cleared. Each
            begins where its memory does, whatever else is there; those of one memory follow one another.
        isa: instruction set of the core.
        fixed: address from which on the memory of the code holds nothing but the section `FIXED`; None for no such.

    Raises:
        BuildError: a section is put into a memory that does not exist, or there is no such instruction set.
    """
    core = instruction_set(isa)
    stack, extra, known = stack or data, extra or {}, [memory.name for memory in memories]
    for section, memory in {".text": text, ".data": data, ".stack": stack, **extra}.items():
        if memory not in known:
            raise BuildError(f"there is no memory '{memory}' for it", where=f"section {section}", hint=f"use {known}")
    shared = {section for section, memory in extra.items() if memory in (text, data, stack)}
    return "\n".join(
        [
            f"OUTPUT_ARCH({core.architecture})",
            f"ENTRY({core.entry})",
            "MEMORY",
            "{",
            *_regions(memories, text, fixed),
            "}",
            "SECTIONS",
            "{",
            *_unloaded({section: memory for section, memory in extra.items() if section in shared}),
            *_output(".text", ["KEEP(*(.text.start))", "*(.text .text.*)", *_tops(worker_stacks)], f"> {text}"),
            *_output(".rodata", ["*(.rodata .rodata.* .srodata .srodata.*)"], f"> {text}"),
            *(_output(FIXED, [f"KEEP(*({FIXED}))"], "> fixed") if fixed is not None else ()),
            *_output(".stack (NOLOAD)", _stacks([stack_bytes, *worker_stacks]), f"> {stack}"),
            *_output(".data", _between("data", "*(.data .data.* .sdata .sdata.*)"), f"> {data} AT> {text}"),
            "    __data_load = LOADADDR(.data);",
            *_output(".bss (NOLOAD)", _between("bss", "*(.sbss .sbss.* .bss .bss.* COMMON)"), f"> {data}"),
            *_unloaded({section: memory for section, memory in extra.items() if section not in shared}),
            f"    /DISCARD/ : {{ *(.comment) *(.note .note.*) *(.eh_frame .eh_frame_hdr) {core.discarded} }}",
            "}",
            "",
        ]
    )


def _regions(memories: Sequence[Memory], text: str, fixed: int | None) -> Lines:
    """The memories, the last part of that of the code as one of its own from address `fixed` on."""
    ends = {m.name: m.base + m.size if fixed is None or m.name != text else fixed for m in memories}
    regions = [f"    {m.name} (rwx) : ORIGIN = {m.base:#x}, LENGTH = {ends[m.name] - m.base:#x}" for m in memories]
    if fixed is not None:
        end = next(m.base + m.size for m in memories if m.name == text)
        regions.append(f"    fixed (r) : ORIGIN = {fixed:#x}, LENGTH = {end - fixed:#x}")
    return regions


def _between(name: str, sections: str) -> Lines:
    """Sections, with symbols at their ends."""
    return [f"__{name}_start = .;", sections, ". = ALIGN(4);", f"__{name}_end = .;"]


def _tops(worker_stacks: Sequence[int]) -> Lines:
    """The table of the tops of the workers' stacks."""
    words = [f"LONG(__stack_top_{core});" for core in range(1, len(worker_stacks) + 1)]
    return [". = ALIGN(4);", "__worker_stack_tops = .;", *words] if words else []


def _stacks(sizes: Sequence[int]) -> Lines:
    """The stack of each core, with symbols at its ends; those of core 0 have no number."""
    found = []
    for core, nbytes in enumerate(sizes):
        end = f"_{core}" if core else ""
        found += [
            f"__stack_bottom{end} = .;",
            f". += {-(-nbytes // STACK_ALIGNMENT) * STACK_ALIGNMENT:#x};",
            f"__stack_top{end} = .;",
        ]
    return found


def _unloaded(sections: Mapping[str, str]) -> Lines:
    return [
        line
        for section, memory in sections.items()
        for line in _output(f"{section} (NOLOAD)", [f"KEEP(*({section} {section}.*))"], f"> {memory}")
    ]


def _output(name: str, content: Lines, place: str) -> Lines:
    head = name.replace(" (NOLOAD)", " (NOLOAD) : ALIGN(16)") if "NOLOAD" in name else f"{name} : ALIGN(16)"
    return [f"    {head}", "    {", *(f"        {line}" for line in content), f"    }} {place}"]
