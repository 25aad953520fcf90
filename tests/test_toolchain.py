"""Compilers, their cache, the linker script, and what is read back from ELF files."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from dovetail.codegen.build import toolchain
from dovetail.codegen.build.elf import Symbol, describe_address, section_sizes, symbols
from dovetail.codegen.build.instruction_sets import instruction_set
from dovetail.codegen.build.toolchain import compile_firmware, compile_host, find_compiler
from dovetail.codegen.emit.firmware import RUNTIME, SIMULATION_MAIN, START, linker_script, runtime_path
from dovetail.errors import BuildError, MissingExtraError, SimulationError
from dovetail.files import is_sealed, keep_file
from dovetail.sim.protocol import SimulationSetup
from dovetail.sim.worker import HostSession, simulate, simulate_host
from firmware import MEMORIES, require_cross_compiler

MODEL = """
#include "net.h"
int8_t net_in[16]; int8_t net_out[16];
static const int8_t weights[16] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
static int32_t calls = 3;
void net_run(void)
{
    calls++;
    for (int i = 0; i < 16; i++) { net_out[i] = (int8_t)(net_in[i] * SCALE + weights[(i + calls) & 15]); }
}
"""
SOURCES = [Path("net.c"), Path(START), Path("dovetail_rt.c"), Path(SIMULATION_MAIN)]
DEFINES = {"DOVETAIL_SIM": 1, "DOVETAIL_MODEL_HEADER": '"net.h"', "DOVETAIL_MODEL_RUN": "net_run"}


def project(folder: Path, scale: int = 2, isa: str = "rv32imc") -> Path:
    """Write a tiny project."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (instruction_set(isa).start, SIMULATION_MAIN, *RUNTIME):
        (folder / name).write_bytes(runtime_path(name).read_bytes())
    (folder / "net.c").write_text(MODEL)
    (folder / "net.h").write_text(f"#include <stdint.h>\n#define SCALE {scale}\nvoid net_run(void);\n")
    (folder / "link.ld").write_text(linker_script(MEMORIES, text="l2", data="l1", stack_bytes=1000, isa=isa))
    return folder


def compile_project(folder: Path, cache: Path, **more: object) -> Path:
    """Compile it."""
    return compile_firmware(folder, SOURCES, linker_script=Path("link.ld"), defines=DEFINES, cache=cache, **more)  # type: ignore[arg-type]


def test_a_project_compiles_runs_and_has_the_sizes_it_should(tmp_path: Path) -> None:
    require_cross_compiler()
    elf = compile_project(project(tmp_path / "p"), tmp_path / "cache", out=tmp_path / "build" / "fw.elf")
    assert elf == tmp_path / "build" / "fw.elf" and [p.name for p in elf.parent.iterdir()] == ["fw.elf"]
    sizes = section_sizes(elf)
    assert (sizes["rodata"], sizes["data"], sizes["bss"], sizes["stack"]) == (16, 4, 32, 1008)
    assert 100 < sizes["text"] < 700
    table = symbols(elf)
    assert table["net_in"].size == 16 and table["net_run"].function
    assert table["__stack_top"].address - table["__stack_bottom"].address == 1008
    assert table["__stack_bottom"].address == MEMORIES[1].base  # an overflow leaves the memory
    values = bytes(range(16))
    setup = SimulationSetup(elf, MEMORIES)
    run = simulate(setup, [{"net_in": values}], {"net_out": 16}).inferences[0]
    assert run.outputs["net_out"] == bytes(2 * i + (i + 4) % 16 + 1 for i in range(16))


def test_tests_take_from_one_another_what_is_equal_only(tmp_path: Path) -> None:
    """tests/quicker.py: of other content, or what failed, empty caches have nothing."""
    require_cross_compiler()
    made = [
        compile_project(project(tmp_path / name, scale), tmp_path / f"{name}_cache")
        for name, scale in (("a", 2), ("b", 2), ("c", 3))
    ]
    assert made[0].name == made[1].name != made[2].name and len({path.parent for path in made}) == 3
    first, again, other = (path.read_bytes() for path in made)
    assert first == again != other and all(is_sealed(path) for path in made)
    (tmp_path / "c" / "net.h").write_text("#define SCALE nothing\n")
    for turn in ("d", "e"):
        with pytest.raises(BuildError, match="nothing"):
            compile_project(tmp_path / "c", tmp_path / f"{turn}_cache")


@pytest.mark.usefixtures("compiler_itself")
def test_the_cache_answers_for_equal_content_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_cross_compiler()
    runs: list[list[str]] = []
    real = subprocess.run

    def counted(command: list[str], **options: object) -> object:
        runs.append(command)
        return real(command, **options)  # type: ignore[call-overload]

    find_compiler("rv32imc")
    monkeypatch.setattr("dovetail.codegen.build.toolchain.subprocess.run", counted)
    cache = tmp_path / "cache"
    first = compile_project(project(tmp_path / "a"), cache).read_bytes()
    assert len(runs) == 5
    again = compile_project(project(tmp_path / "elsewhere" / "b"), cache).read_bytes()
    assert len(runs) == 5 and again == first
    other = compile_project(
        project(tmp_path / "a", scale=3), cache
    ).read_bytes()  # only a header, which two sources do not include
    assert len(runs) == 8 and other != first
    compile_project(project(tmp_path / "a", scale=3), cache, flags=("-DUNUSED",))
    assert len(runs) == 13
    script = tmp_path / "a" / "link.ld"
    script.write_text(script.read_text().replace("0x3f0", "0x7f0"))
    assert section_sizes(compile_project(tmp_path / "a", cache, flags=("-DUNUSED",)))["stack"] == 2032
    assert len(runs) == 14  # only the link
    assert not list(cache.rglob(".*"))


@pytest.mark.usefixtures("compiler_itself")
def test_objects_unused_for_long_give_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_cross_compiler()
    monkeypatch.setattr(toolchain, "MOST_BYTES", 0)
    old = [tmp_path / "cache" / "objects" / f"{number:02x}" / "old.o" for number in range(256)]
    for path in old:
        keep_file(path, b"an object")
        os.utime(path, (0, 0))
    for _ in range(2):  # what was made stays, as it was just used; the second time nothing is made
        compile_project(project(tmp_path / "a"), tmp_path / "cache")
        made = [path for path in (tmp_path / "cache" / "objects").rglob("*.*") if path.suffix in (".o", ".elf")]
        new = {path.parent for path in made if path.name != "old.o"}
        assert (
            len(new) == 5
            and {path.parent for path in made if path.name == "old.o"} == {path.parent for path in old} - new
        )
    assert not list((tmp_path / "cache" / "zig").rglob("*.o"))  # zig keeps no second copy


def test_output_does_not_depend_on_folder_or_cache(tmp_path: Path) -> None:
    require_cross_compiler()
    files = [compile_project(project(tmp_path / name / name), tmp_path / name / "cache") for name in ("a", "long_b")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_first_error_comes_first(tmp_path: Path) -> None:
    require_cross_compiler()
    folder = project(tmp_path)
    (folder / "net.c").write_text(MODEL.replace("calls++;", "calls++; undeclared_one = 1; undeclared_two = 2;"))
    with pytest.raises(BuildError) as caught:
        compile_project(folder, tmp_path / "cache")
    assert "undeclared_one" in caught.value.what.splitlines()[0]
    assert caught.value.where.startswith("net.c:8:")
    (folder / "net.c").write_text(MODEL.replace("calls++;", "extern void nowhere(void); nowhere();"))
    with pytest.raises(BuildError, match="nowhere"):
        compile_project(folder, tmp_path / "cache")
    with pytest.raises(BuildError, match=r"no source file 'missing\.c'"):
        compile_firmware(folder, [Path("missing.c")], linker_script=Path("link.ld"), cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.elf"))


def test_firmware_too_large_for_its_memory_is_an_error(tmp_path: Path) -> None:
    require_cross_compiler()
    folder = project(tmp_path)
    (folder / "net.c").write_text(MODEL.replace("net_in[16]", "net_in[100000]"))
    with pytest.raises(BuildError, match=r"the firmware is [\d,]+ bytes larger than l1: .*\n.*--set l1.size="):
        compile_project(folder, tmp_path / "cache")


def test_compilers_are_found_or_their_absence_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BuildError, match="instruction set 'z80': there is no compiler"):
        find_compiler("z80")
    with pytest.raises(BuildError, match="DOVETAIL_CC=no-such-gcc: this compiler was asked for"):
        find_compiler("rv32imc", "no-such-gcc")
    monkeypatch.setenv("DOVETAIL_CC", "no-such-gcc")
    with pytest.raises(BuildError, match="no-such-gcc"):
        find_compiler("rv32imc")
    monkeypatch.delenv("DOVETAIL_CC")
    monkeypatch.setattr(toolchain, "_zig", lambda: None)
    monkeypatch.setattr("dovetail.codegen.build.toolchain.shutil.which", lambda *_, **__: None)
    with pytest.raises(MissingExtraError, match="ziglang"):
        find_compiler("rv32imc")
    with pytest.raises(BuildError, match="this computer: no C compiler was found"):
        find_compiler("host")


def test_gcc_is_told_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GCC need not be installed: a script that records its arguments stands in for it."""
    log = tmp_path / "log"
    fake = tmp_path / "fake-gcc"
    fake.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\nfor last; do :; done\ncase "$1" in\n'
        '--version|-print-*) ;; *) : > "$last" ;; esac\necho fake 1.0\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("DOVETAIL_CC", str(fake))
    compiler = find_compiler("rv32imc")
    assert (compiler.command, compiler.kind) == ((str(fake),), "gcc") and compiler.version.startswith("fake 1.0 ")
    compile_project(project(tmp_path / "p"), tmp_path / "cache")
    lines = log.read_text().splitlines()
    assert len(lines) == 7  # version, the compiler proper, four sources, link
    assert all("-march=rv32imc -misa-spec=2.2 -mabi=ilp32" in line for line in lines[2:])
    assert "-nostdlib" in lines[-1] and "-lgcc" in lines[-1] and "-lgcc" not in lines[2]


def test_one_place_says_what_each_core_needs() -> None:
    for isa, zig, gcc in (
        ("rv32ec", "-mcpu=generic_rv32+e+c", "-mabi=ilp32e"),
        ("cortex-m4", "-mcpu=cortex_m4", "-mcpu=cortex-m4"),
        ("cortex-m33", "-mcpu=cortex_m33+dsp", "-mfloat-abi=soft"),
        ("cortex-m0plus", "-mcpu=cortex_m0plus", "-mcpu=cortex-m0plus"),
        ("cortex-m55", "-mcpu=cortex_m33+dsp", "-march=armv8-m.main+dsp"),
    ):
        core = instruction_set(isa)
        assert zig in core.zig and gcc in core.gcc
        assert runtime_path(core.start).is_file()
        script = linker_script(MEMORIES, text="l2", data="l1", isa=isa)
        assert f"OUTPUT_ARCH({core.architecture})" in script and f"ENTRY({core.entry})" in script
    with pytest.raises(BuildError, match="instruction set 'cortex-m0': there is no compiler"):
        linker_script(MEMORIES, text="l2", data="l1", isa="cortex-m0")


@pytest.mark.parametrize(
    "isa",
    ["rv32imc", "rv32imac", "rv64gc", "cortex-m0plus", "cortex-m3", "cortex-m4", "cortex-m23", "cortex-m55"],
)
def test_gcc_and_zig_firmware_agree(isa: str, tmp_path: Path) -> None:
    core = instruction_set(isa)
    if shutil.which(core.gcc_command) is None:
        pytest.skip(f"{core.gcc_command} is not installed")
    folder = project(tmp_path / "p", isa=isa)
    sources = [Path(core.start) if path == Path(START) else path for path in SOURCES]
    given, outputs = {"net_in": bytes(range(16))}, []
    for name in ("zig", "gcc"):
        elf = compile_firmware(
            folder,
            sources,
            linker_script=Path("link.ld"),
            isa=isa,
            defines=DEFINES,
            compiler=find_compiler(isa, name),
            cache=tmp_path / "cache",
        )
        run = simulate(SimulationSetup(elf, MEMORIES, isa=isa), [given], {"net_out": 16})
        outputs.append(run.inferences[0].outputs)
    assert outputs[0] == outputs[1]


def host_library(folder: Path, source: str) -> Path:
    """Compile `source` for this computer, or skip."""
    try:
        find_compiler("host")
    except BuildError as error:
        pytest.skip(str(error))
    (folder / "lib.c").write_text(source)
    return compile_host(folder, [Path("lib.c")], cache=folder / "cache")


def test_host_code_runs_and_keeps_its_state(tmp_path: Path) -> None:
    library = host_library(
        tmp_path,
        """
    #include <stdint.h>
    #include <stdio.h>
    int32_t in[2], out[2]; static int32_t calls;
    void run(void) { puts("noise"); fflush(stdout); out[0] = in[0] * in[1]; out[1] = ++calls; }""",
    )
    with HostSession(library, "run") as session:
        for call, (a, b) in enumerate([(3, 4), (-5, 6), (7, 8)], start=1):
            run = session.run([{"in": struct.pack("<2i", a, b)}], {"out": 8}).inferences[0]
            assert struct.unpack("<2i", run.outputs["out"]) == (a * b, call)
        with pytest.raises(SimulationError, match="no symbol 'inn'"):
            session.run([{"inn": b"1"}], {})


def test_a_driver_tells_the_time_of_each_layer(tmp_path: Path) -> None:
    """Each inference's own; nothing where no driver takes it."""
    source = "#include <stdint.h>\nuint64_t *dovetail_nanoseconds;\nvoid run(void) { dovetail_nanoseconds[1] += 1500; }"
    for text, expected in ((source, (0, 1500, 0)), ("void run(void) {}", ())):
        with HostSession(host_library(tmp_path, text), "run", layers=3) as session:
            assert [one.layer_nanoseconds for one in session.run([{}, {}], {}).inferences] == [expected] * 2


def test_host_code_that_crashes_or_is_missing_is_an_error(tmp_path: Path) -> None:
    library = host_library(tmp_path, "void run(void) { *(volatile int *)0 = 1; }\nvoid hang(void) { for (;;) { } }")
    with pytest.raises(SimulationError, match=r"died \(signal 11\)"):
        simulate_host(library, "run", [{}], {})
    with pytest.raises(SimulationError, match="no answer within 1 s"):
        simulate_host(library, "hang", [{}], {}, timeout=1)
    with pytest.raises(SimulationError, match="nothing_here"):
        simulate_host(library, "nothing_here", [{}], {})


def test_the_linker_script_refuses_unknown_memories() -> None:
    with pytest.raises(BuildError, match=r"section \.l3: there is no memory 'l3' for it"):
        linker_script(MEMORIES, text="l2", data="l2", extra={".l3": "l3"})


def test_addresses_are_named_by_the_symbol_they_lie_in() -> None:
    table = {
        "a": Symbol(16, 8, True),
        "label": Symbol(24, 0, False),
        "b": Symbol(24, 8, True),
        "c": Symbol(40, 4, False),
    }
    named = {at: describe_address(at, table) for at in (8, 16, 23, 24, 33, 41)}
    assert named == {8: "0x8", 16: "a+0x0", 23: "a+0x7", 24: "b+0x0", 33: "label+0x9", 41: "c+0x1"}


def test_what_is_no_elf_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "x.elf").write_bytes(b"no")
    with pytest.raises(BuildError, match=r"x\.elf: not a readable ELF file"):
        section_sizes(tmp_path / "x.elf")


def test_another_compiler_of_the_same_version_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was made with one is not taken for the other's."""
    found = []
    for name, flag in (("one", "-DANSWER=1"), ("two", "-DANSWER=2")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "cc").write_text(f'#!/bin/sh\nexec {shutil.which("cc")} {flag} "$@"\n')
        (folder / "cc").chmod(0o755)
        (tmp_path / "a.c").write_text("int answer = ANSWER;\n")
        with monkeypatch.context() as patch:
            patch.setenv("PATH", str(folder), prepend=os.pathsep)
            found.append(compile_host(tmp_path, [Path("a.c")], cache=tmp_path / "cache").read_bytes())
    assert found[0] != found[1]
