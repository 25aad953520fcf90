"""Exports: libraries that other people's build systems take, without a warning, giving what the network gives."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tarfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from command_line import dovetail, refused
from dovetail.codegen.emit import write_project
from dovetail.compile import Compiled, Options, compile_model, sample_inputs
from dovetail.guests.export.write import FORMS, export
from dovetail.ir.graph import evaluate
from dovetail.run import open_build
from dovetail.targets import load_target
from test_end_to_end import network_file

STRICT = ["-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]
PROGRAM = """
#include <stdio.h>
#include "NAME.h"
ARENA
int main(void)
{
    if (fread((void *)UPPER_INPUT_0, sizeof(UPPER_INPUT_0[0]), UPPER_INPUT_0_ELEMENTS, stdin) == 0) { return 1; }
    NAME_run();
    fwrite((const void *)UPPER_OUTPUT_0, sizeof(UPPER_OUTPUT_0[0]), UPPER_OUTPUT_0_ELEMENTS, stdout);
    return 0;
}
"""


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[Compiled, Path]:
    """A small network for a core, in an array of the user's."""
    compiled = compile_model(network_file("kws_dscnn"), load_target("riscv"), Options(name="words", arena="arena"))
    folder = tmp_path_factory.mktemp("words") / "build"
    write_project(compiled.project, folder)
    return compiled, folder


def program(name: str, arena: str = "") -> str:
    """Bytes in, bytes out."""
    array = f"uint8_t {arena}[UPPER_ARENA_BYTES] __attribute__((aligned(16)));" if arena else ""
    return PROGRAM.replace("ARENA\n", array + "\n").replace("UPPER", name.upper()).replace("NAME", name)


def answers(command: list[object], compiled: Compiled) -> None:
    """A program gives what the graph gives."""
    given = sample_inputs(compiled.graph)
    found = subprocess.run(command, input=given[compiled.graph.inputs[0]].tobytes(), capture_output=True, check=True)
    assert found.stdout == evaluate(compiled.graph, given)[compiled.graph.outputs[0]].tobytes()


@pytest.mark.parametrize("form", sorted(FORMS))
def test_every_form_has_all_it_names(form: str, words: tuple[Compiled, Path], tmp_path: Path) -> None:
    """The sources compile by themselves as C99 and the headers as C++; what the form lists is there, all of it."""
    folder = tmp_path / "library"
    assert dovetail("export", words[1], "--to", form, "-o", folder) == 0
    names = {path.name for path in (folder / "src").iterdir()}
    assert {"words.c", "words.h", "dovetail_rt.h"} <= names and "sim_main.c" not in names
    texts = [path.read_text() for path in folder.iterdir() if path.is_file()]
    listed = {name for text in texts for name in re.findall(r"src/(\w+\.[ch])\b", text)}
    assert listed <= names
    if form not in ("arduino", "platformio"):
        assert {name for name in names if name.endswith(".c")} <= listed | {n.replace(".o", ".c") for n in names} | {
            f"{name}.c" for text in texts for name in re.findall(r"src/(\w+)\.o\b", text)
        }
    for path in folder.rglob("*.[ch]"):
        language = (
            ["cc", "-std=c99", "-DDOVETAIL_CYCLES=0u"] if path.suffix == ".c" else ["c++", "-std=c++11", "-x", "c++"]
        )
        systems = f"-I{Path(__file__).parent / 'rtos'}"  # stands in for the headers of operating systems
        command = [*language, *STRICT, f"-I{folder / 'src'}", systems, "-fsyntax-only", path]
        if path.suffix == ".c" or path.name == "words.h":
            subprocess.run(command, check=True)
    for path in folder.rglob("*.json"):
        json.loads(path.read_text())
    for path in folder.rglob("*.pdsc"):
        ElementTree.parse(path)


def test_arduino_takes_it_as_cpp(words: tuple[Compiled, Path], tmp_path: Path) -> None:
    """The sketch is C++, the sources C, only `src` is looked at: as the library specification has it."""
    folder = tmp_path / "library"
    export(open_build(words[1]), "arduino", folder)
    (tmp_path / "Arduino.h").write_text(
        "struct Port { void begin(long) {} void println(int) {} };\nextern Port Serial;\nvoid delay(int);\n"
    )
    sketch = next(folder.rglob("*.ino"))
    include = ["-include", tmp_path / "Arduino.h", f"-I{folder / 'src'}"]
    subprocess.run(["c++", "-std=c++11", "-x", "c++", *STRICT, *include, "-fsyntax-only", sketch], check=True)


@pytest.mark.skipif(not shutil.which("cmake"), reason="cmake is not installed")
def test_cmake_finds_an_installed_library(words: tuple[Compiled, Path], tmp_path: Path) -> None:
    """Configured, built with its example, installed, found by another project and linked from C++."""
    compiled, build = words
    folder, root = tmp_path / "library", tmp_path / "root"
    export(open_build(build), "cmake", folder)
    quiet = {"check": True, "stdout": subprocess.DEVNULL}
    options = [f"-DCMAKE_INSTALL_PREFIX={root}", "-DCMAKE_C_FLAGS=-Wall -Wextra -Werror"]
    subprocess.run(["cmake", "-S", folder, "-B", tmp_path / "made", *options], **quiet)
    subprocess.run(["cmake", "--build", tmp_path / "made"], **quiet)
    subprocess.run(["cmake", "--install", tmp_path / "made"], **quiet)
    user = tmp_path / "user"
    user.mkdir()
    (user / "main.cpp").write_text(program("words", "arena"))
    (user / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.16)\nproject(user LANGUAGES C CXX)\nfind_package(words REQUIRED)\n"
        "add_executable(user main.cpp)\ntarget_link_libraries(user PRIVATE words::words)\n"
    )
    subprocess.run(["cmake", "-S", user, "-B", tmp_path / "theirs", f"-DCMAKE_PREFIX_PATH={root}"], **quiet)
    subprocess.run(["cmake", "--build", tmp_path / "theirs"], **quiet)
    answers([tmp_path / "theirs" / "user"], compiled)


ZEPHYRS = """
cmake_minimum_required(VERSION 3.20)
project(stand_in C)
set(CONFIG_DOVETAIL_WORDS y)
macro(zephyr_include_directories)
  include_directories(${ARGN})
endmacro()
macro(zephyr_library_named name)
  set(ZEPHYR_CURRENT_LIBRARY ${name})
  add_library(${name} STATIC)
endmacro()
macro(zephyr_library_sources)
  target_sources(${ZEPHYR_CURRENT_LIBRARY} PRIVATE ${ARGN})
endmacro()
macro(zephyr_library_compile_options)
  target_compile_options(${ZEPHYR_CURRENT_LIBRARY} PRIVATE ${ARGN})
endmacro()
include_directories(RTOS)
add_subdirectory(FOLDER module)
"""
"""What a module sees of Zephyr's build system, by the names of its documentation."""


@pytest.mark.skipif(not shutil.which("cmake"), reason="cmake is not installed")
def test_zephyr_builds_the_module(words: tuple[Compiled, Path], tmp_path: Path) -> None:
    folder, rtos = tmp_path / "library", Path(__file__).parent / "rtos"
    export(open_build(words[1]), "zephyr", folder)
    (tmp_path / "CMakeLists.txt").write_text(ZEPHYRS.replace("RTOS", str(rtos)).replace("FOLDER", str(folder)))
    quiet = {"check": True, "stdout": subprocess.DEVNULL}
    subprocess.run(["cmake", "-S", tmp_path, "-B", tmp_path / "made", "-DCMAKE_C_FLAGS=-Wall -Wextra -Werror"], **quiet)
    subprocess.run(["cmake", "--build", tmp_path / "made"], **quiet)
    assert list((tmp_path / "made").rglob("libwords.a"))


@pytest.mark.skipif(not shutil.which("genconfig"), reason="Kconfig (pip install kconfiglib) is not installed")
@pytest.mark.parametrize("chosen", [True, False])
def test_kconfig_reads_the_options(chosen: bool, tmp_path: Path) -> None:
    compiled = compile_model(network_file("kws_dscnn"), load_target("macarray"), Options(name="words"))
    write_project(compiled.project, tmp_path / "build")
    export(open_build(tmp_path / "build"), "zephyr", tmp_path / "library")
    config = f"CONFIG_DOVETAIL_WORDS={'y' if chosen else 'n'}\nCONFIG_DOVETAIL_WORDS_MACARRAY_IRQ=7\n"
    (tmp_path / ".config").write_text(config)
    command = ["genconfig", "--header-path", tmp_path / "config.h", tmp_path / "library" / "Kconfig"]
    subprocess.run(command, check=True, cwd=tmp_path)
    assert ("#define CONFIG_DOVETAIL_WORDS_MACARRAY_IRQ 7" in (tmp_path / "config.h").read_text()) == chosen


@pytest.mark.skipif(not shutil.which("pio"), reason="PlatformIO (pip install platformio) is not installed")
def test_platformio_packs_it(words: tuple[Compiled, Path], tmp_path: Path) -> None:
    folder, packed = tmp_path / "library", tmp_path / "words.tar.gz"
    export(open_build(words[1]), "platformio", folder)
    settings = {"PLATFORMIO_SETTING_ENABLE_TELEMETRY": "no", "PLATFORMIO_CORE_DIR": str(tmp_path / "core")}
    subprocess.run(["pio", "pkg", "pack", "-o", packed, folder], check=True, env={**os.environ, **settings})
    with tarfile.open(packed) as archive:
        names = archive.getnames()
    assert {"library.json", "src/words.c", "src/words.h", "example/main.c"} <= set(names)


@pytest.mark.skipif(
    not shutil.which("compote"),
    reason="ESP-IDF's component manager (pip install idf-component-manager) is not installed",
)
def test_the_component_manager_takes_the_manifest(words: tuple[Compiled, Path], tmp_path: Path) -> None:
    folder = tmp_path / "library"
    export(open_build(words[1]), "esp-idf", folder)
    subprocess.run(["compote", "manifest", "lint", folder], check=True)
    (folder / "idf_component.yml").write_text("version: soup\n")
    assert subprocess.run(["compote", "manifest", "lint", folder], capture_output=True).returncode


def test_make_and_a_plain_program(words: tuple[Compiled, Path], tmp_path: Path) -> None:
    folder = tmp_path / "library"
    export(open_build(words[1]), "make", folder)
    subprocess.run(["make", "-s", "-C", folder, "CC=cc", "CPU=-Werror"], check=True)
    (tmp_path / "main.c").write_text(program("words", "arena"))
    built = tmp_path / "program"
    command = ["cc", "-std=gnu99", f"-I{folder / 'src'}", tmp_path / "main.c", folder / "libwords.a", "-o", built]
    subprocess.run(command, check=True)
    answers([built], words[0])


def test_cycles_of_each_layer(words: tuple[Compiled, Path], tmp_path: Path) -> None:
    """With a counter that goes up by one whenever it is read, each layer that is marked takes one."""
    folder = tmp_path / "library"
    export(open_build(words[1]), "make", folder)
    subprocess.run(["make", "-s", "-C", folder, "CC=cc", "CPU=-Werror", "HOOKS=-DDOVETAIL_MARK_HOOK"], check=True)
    (tmp_path / "counter.h").write_text("static unsigned counter;\n#define DOVETAIL_CYCLES (++counter)\n")
    include = ["-include", tmp_path / "counter.h", f"-I{folder / 'src'}", folder / "example" / "cycles.c"]
    command = ["cc", "-std=gnu99", *STRICT, "-DDOVETAIL_MARK_HOOK", *include, folder / "libwords.a"]
    subprocess.run([*command, "-o", tmp_path / "cycles"], check=True)
    found = subprocess.run([tmp_path / "cycles"], capture_output=True, text=True, check=True).stdout.splitlines()
    layers = json.loads((words[1] / "dovetail.json").read_text())["layers"]
    marked = (words[1] / "src" / "words.c").read_text().count("DOVETAIL_MARK(")
    assert [line.split()[0] for line in found] == [layer["name"] for layer in layers]
    assert sum(int(line.split()[1]) for line in found) == marked > 5


def test_what_is_no_export_stays(
    words: tuple[Compiled, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    said = refused(capsys, "export", words[1], "--to", "make", "-o", tmp_path / "mine", "--force")
    assert "not an export" in said and (tmp_path / "mine" / "letter.txt").exists()
    assert "exists" in refused(capsys, "export", words[1], "--to", "make", "-o", tmp_path / "mine")
    for form in ("make", "cmake"):
        assert dovetail("export", words[1], "--to", form, "-o", tmp_path / "net", "--force") == 0
    assert (tmp_path / "net" / "CMakeLists.txt").exists() and not (tmp_path / "net" / "Makefile").exists()
