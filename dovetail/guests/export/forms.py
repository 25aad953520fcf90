"""What each build system wants beside the files of a network."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from xml.sax.saxutils import escape, quoteattr

from dovetail.guests.export import rtos
from dovetail.guests.export.library import ExportLibrary, cycles, example

Files = dict[str, str]
"""Text by path in the export."""


def _main(library: ExportLibrary) -> str:
    """The example as a C program."""
    return example(library, f'#include "{library.name}.h"', "int main(void)", ["return best;"])


def _readme(library: ExportLibrary, use: str) -> str:
    lines = [
        f"# {library.name}",
        "",
        library.sentence + ".",
        "",
        use,
        "",
        f"Include `{library.name}.h`: it names the inputs and outputs, with their scales and zero points. Fill the",
        f"inputs, call `{library.name}_run()`, read the outputs. One inference at a time: guard the call with a mutex",
        "where several tasks use it.",
        "",
        *_waiting(library),
        "",
        "The program `cycles.c` prints the cycles of each layer; compile it and the network with `DOVETAIL_MARK_HOOK`.",
    ]
    if library.arena:
        lines += [
            "",
            f"The program brings `uint8_t {library.arena}[]` of at least `{library.upper}_ARENA_BYTES` bytes.",
        ]
    if library.foreign:
        lines += ["", f"It calls a library that is not in here: {', '.join(library.foreign)}. Link your copy of it."]
    return "\n".join([*lines, ""])


def _waiting(library: ExportLibrary) -> list[str]:
    """How it waits, and for whom, in lines."""
    if library.system:
        blocks = f" Its task blocks while {' or '.join(library.waits)} works." if library.waits else ""
        return [f"`{library.name}_rtos.h` is for {library.system}: tasks take turns.{blocks}"]
    if not library.waits:
        return ["It waits for nothing."]
    return [
        "Where an engine or a DMA works, the core waits in `wfi`; define `DOVETAIL_WAIT_HOOK` and a function",
        "`void dovetail_wait(void)` to block on a semaphore that your interrupt handler gives instead, or",
        "export with `--rtos freertos`.",
    ]


def _examples(library: ExportLibrary) -> Files:
    """The example, and the one that counts cycles, as C programs."""
    return {"example/main.c": _main(library), "example/cycles.c": cycles(library)}


def _below(folder: str, files: Mapping[str, str]) -> Files:
    return {f"{folder}/{name}": text for name, text in files.items()}


def cmake(library: ExportLibrary) -> Files:
    """A static library with an alias, installed with a package file, and the example where it is the top project."""
    name, sources = library.name, " ".join(f"src/{file}" for file in sorted(library.sources))
    weights = f"${{CMAKE_CURRENT_SOURCE_DIR}}/src/{name}_weights"
    assembled = f"set_source_files_properties({weights}.S PROPERTIES OBJECT_DEPENDS {weights}.bin)\n"
    assembled = assembled if library.data else ""
    text = f"""cmake_minimum_required(VERSION 3.16)
project({name} VERSION {library.version} LANGUAGES {"C ASM" if library.data else "C"})
include(GNUInstallDirs)

add_library({name} STATIC {sources})
add_library({name}::{name} ALIAS {name})
target_include_directories({name} PUBLIC
  $<BUILD_INTERFACE:${{CMAKE_CURRENT_SOURCE_DIR}}/src> $<INSTALL_INTERFACE:include/{name}>)
set_target_properties({name} PROPERTIES C_STANDARD 99 C_EXTENSIONS ON)
# Bytes are read as other types.
target_compile_options({name} PRIVATE -fno-strict-aliasing $<$<NOT:$<CONFIG:Debug>>:-O2>)
{assembled}
option({name.upper()}_EXAMPLE "build the example" ${{PROJECT_IS_TOP_LEVEL}})
if({name.upper()}_EXAMPLE)
  add_executable({name}_example example/main.c)
  target_link_libraries({name}_example PRIVATE {name}::{name})
endif()

option({name.upper()}_CYCLES "build the example that prints the cycles of each layer" OFF)
if({name.upper()}_CYCLES)
  target_compile_definitions({name} PRIVATE DOVETAIL_MARK_HOOK)
  add_executable({name}_cycles example/cycles.c)
  target_link_libraries({name}_cycles PRIVATE {name}::{name})
endif()

install(TARGETS {name} EXPORT {name} ARCHIVE DESTINATION ${{CMAKE_INSTALL_LIBDIR}})
install(DIRECTORY src/ DESTINATION include/{name} FILES_MATCHING PATTERN "*.h")
install(EXPORT {name} FILE {name}-config.cmake NAMESPACE {name}:: DESTINATION ${{CMAKE_INSTALL_LIBDIR}}/cmake/{name})
"""
    use = f"`add_subdirectory` it, or install it and `find_package({name})`; then link `{name}::{name}`."
    extra = {"CMakeLists.txt": text, **_examples(library), "README.md": _readme(library, use)}
    return {**_below("src", library.files), **extra}


def make(library: ExportLibrary) -> Files:
    """A Makefile for a static library."""
    objects = " ".join(f"src/{file.rpartition('.')[0]}.o" for file in sorted(library.sources))
    assembled = _ASSEMBLED.format(name=library.name) if library.data else ""
    text = f"""# Makes lib{library.name}.a; give CC, AR and the flags of your processor:
# make CC=arm-none-eabi-gcc AR=arm-none-eabi-ar CPU="-mcpu=cortex-m4 -mthumb"
CPU =
# HOOKS=-DDOVETAIL_MARK_HOOK is for example/cycles.c.
HOOKS =
CFLAGS = -std=gnu99 -O2 -Wall -Wextra -fno-strict-aliasing -ffunction-sections -fdata-sections $(CPU) $(HOOKS)

lib{library.name}.a: {objects}
\t$(AR) rcs $@ $^

%.o: %.c
\t$(CC) $(CFLAGS) -Isrc -c $< -o $@
{assembled}
clean:
\trm -f lib{library.name}.a {objects}
.PHONY: clean
"""
    use = f"`make` gives `lib{library.name}.a`; headers are in `src`."
    extra = {"Makefile": text, **_examples(library), "README.md": _readme(library, use)}
    return {**_below("src", library.files), **extra}


_ASSEMBLED = """
%.o: %.S
\t$(CC) $(CFLAGS) -Isrc -c $< -o $@

src/{name}_weights.o: src/{name}_weights.bin
"""


def arduino(library: ExportLibrary) -> Files:
    """A library of the Arduino library specification, version 1.5 or later."""
    properties = {
        "name": library.name,
        "version": library.version,
        "author": "Dovetail",
        "maintainer": "Dovetail",
        "sentence": library.sentence,
        "paragraph": "Made by dovetail export.",
        "category": "Data Processing",
        "url": "https://example.org",
        "architectures": "*",
        "includes": f"{library.name}.h",
    }
    head = f"#include <{library.name}.h>\n\nvoid setup()\n{{\n    Serial.begin(115200);\n}}"
    sketch = example(library, head, "void loop()", ["Serial.println(best);", "delay(1000);"])
    return {
        **_below("src", library.files),
        "library.properties": "".join(f"{key}={value}\n" for key, value in properties.items()),
        f"examples/{library.name}_example/{library.name}_example.ino": sketch,
        "extras/cycles.c": cycles(library),
        "README.md": _readme(library, "Put the folder into your sketchbook's `libraries`, or install it as a ZIP."),
    }


def platformio(library: ExportLibrary) -> Files:
    """A library with `library.json`."""
    described = {
        "name": library.name,
        "version": library.version,
        "description": library.sentence,
        "frameworks": "*",
        "platforms": "*",
        "headers": f"{library.name}.h",
        "build": {"flags": ["-fno-strict-aliasing"]},
        "examples": [{"name": library.name, "base": "example", "files": ["main.c"]}],
    }
    use = "Put the folder into your project's `lib`, or name it in `lib_deps`."
    extra = {**_examples(library), "README.md": _readme(library, use)}
    return {**_below("src", library.files), "library.json": json.dumps(described, indent=2) + "\n", **extra}


def zephyr(library: ExportLibrary) -> Files:
    """A module of Zephyr's; engines block their thread on a semaphore."""
    library = rtos.beside(library, rtos.ZEPHYR)
    option = f"DOVETAIL_{library.upper}"
    sources = "".join(f"  src/{file}\n" for file in sorted(library.sources))
    cmake_text = f"""if(CONFIG_{option})
zephyr_include_directories(src)
zephyr_library_named({library.name})
zephyr_library_sources(
{sources})
zephyr_library_compile_options(-fno-strict-aliasing)
endif()
"""
    kconfig = f"""config {option}
\tbool "{escape(library.sentence)}"
"""
    for line, device in rtos.interrupt_options(library):
        kconfig += f"""
config {line}
\tint "number of the interrupt line of {device}"
\tdepends on {option}
"""
    module = f"name: {library.name}\nbuild:\n  cmake: .\n  kconfig: Kconfig\n"
    use = f"Name the folder in `ZEPHYR_EXTRA_MODULES` and set `CONFIG_{option}=y`."
    extra = {"zephyr/module.yml": module, "Kconfig": kconfig, "CMakeLists.txt": cmake_text}
    return {
        **_below("src", library.files),
        **extra,
        **_examples(library),
        "README.md": _readme(library, use),
    }


def esp_idf(library: ExportLibrary) -> Files:
    """A component of ESP-IDF's, whose FreeRTOS it waits with."""
    library = rtos.beside(library, rtos.FREERTOS, "freertos/")
    sources = " ".join(f'"src/{file}"' for file in sorted(library.sources))
    cmake_text = f"""idf_component_register(SRCS {sources} INCLUDE_DIRS "src")
target_compile_options(${{COMPONENT_LIB}} PRIVATE -fno-strict-aliasing)
"""
    manifest = f'version: "{library.version}"\ndescription: {json.dumps(library.sentence)}\n'
    use = "Put the folder into your project's `components`."
    extra = {"CMakeLists.txt": cmake_text, "idf_component.yml": manifest, "README.md": _readme(library, use)}
    return {**_below("src", library.files), **extra, **_examples(library)}


def cmsis_pack(library: ExportLibrary) -> Files:
    """Sources and the description a pack is made from (`packchk`, then zip)."""
    kinds = {".c": "source", ".h": "header"}
    files = "\n".join(
        f'        <file category="{kinds[name[-2:]]}" name="src/{name}"/>' for name in sorted(library.files)
    )
    named = f"Csub={quoteattr(library.name)} Cversion={quoteattr(library.version)}"
    text = f"""<?xml version="1.0" encoding="UTF-8"?>
<package schemaVersion="1.7.7" xmlns:xs="http://www.w3.org/2001/XMLSchema-instance"
         xs:noNamespaceSchemaLocation="PACK.xsd">
  <vendor>Dovetail</vendor>
  <name>{library.name}</name>
  <description>{escape(library.sentence)}</description>
  <url></url>
  <license>README.md</license>
  <releases>
    <release version={quoteattr(library.version)} date="2026-01-01">Made by dovetail export.</release>
  </releases>
  <components>
    <component Cclass="Machine Learning" Cgroup="Network" {named}>
      <description>{escape(library.sentence)}</description>
      <files>
{files}
      </files>
    </component>
  </components>
</package>
"""
    use = "Pack the folder with the tools of Open-CMSIS-Pack, or name its `.pdsc` in your solution."
    extra = {
        f"Dovetail.{library.name}.pdsc": text,
        **_examples(library),
        "README.md": _readme(library, use),
    }
    return {**_below("src", library.files), **extra}


FORMS: Mapping[str, Callable[[ExportLibrary], Files]] = {
    "cmake": cmake,
    "make": make,
    "arduino": arduino,
    "platformio": platformio,
    "zephyr": zephyr,
    "esp-idf": esp_idf,
    "cmsis-pack": cmsis_pack,
}
"""By the name on the command line."""
C_ALONE = ("arduino", "cmsis-pack")
"""Those that do not say where an assembler looks for the bytes of large weights."""
