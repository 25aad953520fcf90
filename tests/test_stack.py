"""The stack a network needs: what the compiler says of frames, against what the firmware uses."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from command_line import dovetail, refused
from dovetail.codegen.build.toolchain import firmware_stack
from dovetail.codegen.emit import write_project
from dovetail.compile import Compiled, Options, compile_model
from dovetail.errors import PlanError
from dovetail.guests import zoo
from dovetail.program.interpret import sample_inputs
from dovetail.run import open_build, run_build
from dovetail.targets import load_target
from firmware import require_chip
from random_onnx import added, as_qdq, convolution, largest, made, product

COMPILERS = [
    ("rv32imc", ""),
    ("cortex-m4", ""),
    ("cortex-m3", ""),
    ("rv64gc", ""),
    ("rv32imc", "riscv64-unknown-elf-gcc"),
    ("cortex-m4", "arm-none-eabi-gcc"),
]


def chosen(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips where a compiler is not installed."""
    require_chip()
    if compiler and not shutil.which(compiler):
        pytest.skip(f"{compiler} is not installed")
    monkeypatch.setenv("DOVETAIL_CC", compiler)


def digits(folder: Path, target: str) -> Compiled:
    path = folder / "digits.onnx"
    path.write_bytes(zoo.build("digits"))
    return compile_model(path, load_target(target), Options())


@pytest.mark.parametrize(
    ("target", "compiler"),
    [
        ("riscv", ""),
        ("cortex_m4", ""),
        ("ne16", ""),
        ("riscv", "riscv64-unknown-elf-gcc"),
        ("cortex_m4", "arm-none-eabi-gcc"),
    ],
)
def test_firmware_uses_no_more_and_little_less(
    target: str, compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen(compiler, monkeypatch)
    compiled = digits(tmp_path, target)
    assert compiled.unit.stack is not None
    write_project(compiled.project, tmp_path / "build")
    build = open_build(tmp_path / "build")
    used = run_build(build, "iss", [sample_inputs(compiled.graph)]).simulation.stack_bytes
    need = compiled.unit.stack
    assert used is not None and need.nbytes is not None and 0.7 * need.nbytes <= used <= need.nbytes
    header = (tmp_path / "build" / "src" / f"{compiled.unit.model}.h").read_text()
    said = re.search(r"#define \w+_STACK_BYTES (\d+)u", header)
    assert (
        said is not None
        and int(said[1]) == need.nbytes == json.loads((build.folder / "dovetail.json").read_text())["stack"]["nbytes"]
    )
    assert need.compiler in header


@pytest.mark.parametrize("target", ["riscv", "riscv64", "cortex_m3", "cortex_m4", "cortex_m33"])
def test_random_networks_use_no_more_and_at_least_seven_tenths(target: str, tmp_path: Path) -> None:
    require_chip()
    makers = (made(convolution, as_qdq), made(product, as_qdq), largest, added)
    for case in (make(f"stack_{number}") for number, make in enumerate(makers)):
        (tmp_path / f"{case.name}.onnx").write_bytes(case.file)
        compiled = compile_model(tmp_path / f"{case.name}.onnx", load_target(target), case.options)
        write_project(compiled.project, tmp_path / case.name)
        build, inputs = open_build(tmp_path / case.name), [sample_inputs(compiled.graph)]
        need, used = compiled.unit.stack, run_build(build, "iss", inputs).simulation.stack_bytes
        assert need is not None and need.nbytes is not None, need
        assert used is not None and 0.7 * need.nbytes <= used <= need.nbytes, (case.text, used, need.nbytes)


def test_the_reason_stands_where_there_is_no_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    require_chip()
    model = made(product, as_qdq)("reason")
    (tmp_path / "reason.onnx").write_bytes(model.file)
    assert dovetail("compile", tmp_path / "reason.onnx", "-t", "cortex_m0plus", "-o", tmp_path / "build") == 0
    reason = r"\w+ calls __aeabi_lmul of a library, whose frames are not known"
    assert re.search(rf"no bound on the stack \({reason}\), 8,192 reserved", capsys.readouterr().out)
    assert re.search(rf"is known:\n   {reason}\. \*/", (tmp_path / "build" / "src" / "reason.h").read_text())
    described = json.loads((tmp_path / "build" / "dovetail.json").read_text())
    assert re.fullmatch(reason, described["stack"]["why"])


def test_a_compile_whose_c_fails_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require_chip()
    (tmp_path / "net.onnx").write_bytes(made(product, as_qdq)("fails").file)
    monkeypatch.setattr("dovetail.codegen.emit.project.model_source", lambda unit: "void f(void) { int x = ; }\n")
    said = refused(capsys, "compile", tmp_path / "net.onnx", "-t", "riscv", "-o", tmp_path / "build")
    assert "src/net.c:1:" in said and not (tmp_path / "build").exists()


SOURCE = """
#include <stdint.h>
#include "other.h"
static uint32_t __attribute__((noinline)) leaf(volatile uint8_t *bytes) {
    volatile uint8_t own[400]; own[bytes[2]] = bytes[0]; return own[bytes[1]]; }
static uint32_t __attribute__((noinline)) small(volatile uint8_t *bytes) { return bytes[1] + 1u; }
uint32_t __attribute__((noinline)) middle(volatile uint8_t *bytes);
uint32_t __attribute__((noinline)) middle(volatile uint8_t *bytes) {
    volatile uint8_t own[200]; own[bytes[3]] = bytes[3]; return leaf(bytes) + other(own) + small(own) + 1u; }
uint32_t top(volatile uint8_t *bytes);
uint32_t top(volatile uint8_t *bytes) { return middle(bytes) + small(bytes); }
uint32_t around(volatile uint8_t *bytes);
uint32_t around(volatile uint8_t *bytes) { return bytes[0] ? around(bytes + 1) * 3u + other(bytes) : 0u; }
uint32_t turn(volatile uint8_t *bytes);
uint32_t turn(volatile uint8_t *bytes) { return top(bytes) + again(bytes); }
uint32_t pointed(volatile uint8_t *bytes, uint32_t (**which)(volatile uint8_t *));
uint32_t pointed(volatile uint8_t *bytes, uint32_t (**which)(volatile uint8_t *)) { *which = small; return bytes[0]; }
uint32_t (*pointed_far(void))(volatile uint8_t *bytes);
uint32_t (*pointed_far(void))(volatile uint8_t *bytes) { return other; }
uint32_t missing(volatile uint8_t *bytes) { return nowhere(bytes) + 1u; }
"""
OTHER = """
#include "other.h"
uint32_t turn(volatile uint8_t *bytes);
uint32_t other(volatile uint8_t *bytes) { volatile uint8_t own[1000]; own[bytes[2]] = bytes[1]; return own[bytes[1]]; }
uint32_t again(volatile uint8_t *bytes) { return bytes[0] ? turn(bytes + 1) + other(bytes) : 2u; }
"""
HEADER = """
#include <stdint.h>
uint32_t other(volatile uint8_t *bytes);
uint32_t again(volatile uint8_t *bytes);
uint32_t nowhere(volatile uint8_t *bytes);
"""


@pytest.mark.parametrize(("isa", "compiler"), COMPILERS)
def test_calls_add_up(isa: str, compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest way from a function down, through two files; the reason where there is none: circles, calls by
    address and functions that are not there."""
    chosen(compiler, monkeypatch)
    for name, text in {"one.c": SOURCE, "two.c": OTHER, "other.h": HEADER}.items():
        (tmp_path / name).write_text(text)

    def need(entry: str) -> int | str:
        both = firmware_stack(tmp_path, [Path("one.c"), Path("two.c")], entry, isa=isa)[0]
        cache = tmp_path / entry
        assert (
            both == firmware_stack(tmp_path, [Path("one.c")], entry, isa=isa, library=[Path("two.c")], cache=cache)[0]
        )
        assert (
            both == firmware_stack(tmp_path, [Path("two.c")], entry, isa=isa, library=[Path("one.c")], cache=cache)[0]
        )
        return both

    top, other = need("top"), need("other")
    assert isinstance(top, int) and 1200 <= top <= 1280 and isinstance(other, int) and 1000 <= other <= 1016
    why = {
        "turn": "turn calls itself, directly or through others",
        "again": "again calls itself, directly or through others",
        "pointed": "pointed takes the address of small, which may be called by it",
        "pointed_far": "pointed_far takes the address of other, which may be called by it",
        "missing": "missing calls nowhere of a library, whose frames are not known",
        "unheard_of": "no source has the function unheard_of",
    }
    assert {entry: need(entry) for entry in why} == why


def test_a_header_changes_only_what_includes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen("", monkeypatch)
    cache = tmp_path / "cache"
    for name, text in {"one.c": SOURCE, "two.c": "int x;", "other.h": HEADER, "far.h": "", "via.h": ""}.items():
        (tmp_path / name).write_text(text)

    def made() -> int:
        """Objects there are after compiling."""
        firmware_stack(tmp_path, [Path("one.c"), Path("two.c")], "top", isa="rv32imc", cache=cache)
        return len(list(cache.rglob("*.o")))

    assert made() == 2 == made()
    (tmp_path / "far.h").write_text("#define FAR 1")
    assert made() == 2, "nothing includes it"
    (tmp_path / "other.h").write_text(f'{HEADER}\n#  include "via.h"\n')
    assert made() == 3
    (tmp_path / "via.h").write_text("#define VIA 1")
    assert made() == 4, "included by a file that is included"
    (tmp_path / "two.c").write_text("#define WHICH <stdint.h>\n#include WHICH\nint x;")
    assert made() == 5
    (tmp_path / "far.h").write_text("#define FAR 2")
    assert made() == 6, "which file it includes is not written out"


def test_a_macro_changes_only_what_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself, in a header, in the value of a macro, or put together of parts."""
    chosen("", monkeypatch)
    texts = {
        "plain.c": "int plain;",
        "reads.c": "int top(void) { return READ; }",
        "via.c": '#include "via.h"\nint via = IN_HEADER;',
        "via.h": "#define IN_HEADER READ",
        "joined.c": "#define JOIN(a, b) a##b\nint joined = JOIN(RE, AD);",
        "named.c": "#include NAMED\nint named = IN_HEADER;",
        "start.S": "start:",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    values: dict[str, str | int | None] = {"READ": 1, "UNREAD": 1, "NAMED": '"via.h"', "ALIAS": "READ"}

    def new(**changed: str | int) -> int:
        """Objects that are made anew with other macros."""
        cache, sources = tmp_path / "cache", [Path(name) for name in texts if name != "via.h"]
        before = len(list(cache.rglob("*.o")))
        firmware_stack(tmp_path, sources, "top", isa="rv32imc", cache=cache, defines={**values, **changed})
        return len(list(cache.rglob("*.o"))) - before

    assert new() == 6
    assert new(UNREAD=2) == 1, "of the source that puts names together"
    assert new(READ=2) == 4
    (tmp_path / "reads.c").write_text("int top(void) { return ALIAS; }")
    assert new() == 1
    assert new(READ=3) == 4, "by way of another"


def test_another_name_is_measured_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code is the same, and the reason for no bound has its own name; other code is compiled."""
    chosen("", monkeypatch)
    cache = tmp_path / "cache"

    def measured(name: str, text: str, entry: str = "main") -> tuple[int | str, int]:
        """Stack, and objects in the cache."""
        folder = tmp_path / name
        (folder / "src").mkdir(parents=True, exist_ok=True)
        (folder / "src" / f"{name}.h").write_text(f"#define {name.upper()}_SIZE 64\nint {name}_run(int at);\n")
        (folder / "src" / f"{name}.c").write_text(f'#include "{name}.h"\n{text.replace("NET", name)}')
        (folder / "main.c").write_text("#include HEADER\nint main(void) { return RUN(3); }")
        need, _, _ = firmware_stack(
            folder,
            [Path("src") / f"{name}.c", Path("main.c")],
            entry,
            isa="rv32imc",
            defines={"HEADER": f'"{name}.h"', "RUN": f"{name}_run"},
            include=[Path("src")],
            cache=cache,
            network=name,
        )
        return need, len(list(cache.rglob("*.o")))

    code = "int NET_run(int at) { volatile char room[128]; room[at] = 1; return room[at + 1]; }\n"
    need, objects = measured("first", code)
    assert isinstance(need, int) and need >= 128 and objects == 2
    assert measured("second", code) == (need, 2)
    assert measured("longer", code.replace("; room", ";\n     room")) == (need, 2), "lines are broken elsewhere"
    more, objects = measured("third", code.replace("128", "256"))
    assert isinstance(more, int) and more >= need + 128 and objects == 4
    commented = code.replace("room[at] = 1;", "// set it\n    room[at] = 1;\n")
    assert measured("fourth", commented)[1] == 6 and measured("fifth", commented.replace("it\n", "it"))[1] == 8
    circle = "int NET_run(int at) { return at > 1 ? NET_run(at - 1) * 3 ^ NET_run(at - 2) : 1; }\n"
    own = "{0}_run calls itself, directly or through others"
    assert [measured(name, circle) for name in ("one", "another")] == [
        (own.format("one"), 10),
        (own.format("another"), 10),
    ]


def test_a_network_of_another_name_is_compiled_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When its firmware is built; its description has the figures all the same."""
    chosen("", monkeypatch)
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "digits.onnx").write_bytes(zoo.build("digits"))
    names = ("net_1", "network_of_letters")
    stacks = []
    for name in names:
        stacks.append(compile_model(tmp_path / "digits.onnx", load_target("riscv"), Options(name=name)).unit.stack)
        assert len(list((tmp_path / "cache").rglob("*.o"))) in (3, 4)
    assert stacks[0] == stacks[1] and stacks[0] and stacks[0].nbytes


def test_less_than_it_needs_is_refused(tmp_path: Path) -> None:
    """At compile time: on the chip it would overwrite what lies below."""
    require_chip()
    (tmp_path / "digits.onnx").write_bytes(zoo.build("digits"))
    riscv = load_target("riscv")
    small = replace(riscv, core=replace(riscv.core, stack=64))
    with pytest.raises(PlanError, match=r"needs [\d,]+ bytes of stack .* 64 are reserved") as caught:
        compile_model(tmp_path / "digits.onnx", small, Options())
    assert "--set core.stack=" in caught.value.hint
