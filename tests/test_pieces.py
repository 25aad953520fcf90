"""Long lists of commands as loops of the firmware: the words that come to the engine, and what a port's tables take."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dovetail.codegen.emit.lists import CommandList
from dovetail.codegen.emit.pieces import PIECE_WORDS, folded, pieced, pieces_source
from dovetail.codegen.emit.project import write_project
from dovetail.compile import Options, compile_model, sample_inputs
from dovetail.ir.graph import evaluate
from dovetail.report import make_report
from dovetail.run import open_build, run_build
from dovetail.target import CommandStream, Engine
from dovetail.targets import load_target

SHARED = Path(__file__).resolve().parents[2] / "shared"
PUFFIN = SHARED / "faults" / "ports" / "puffin" / "puffin.py"
RESNET8 = SHARED / "models" / "mlperf_tiny" / "ic_resnet8_int8.tflite"

Command = tuple[int, ...]


def nest(random: np.random.Generator, depth: int) -> list[list[Command]]:
    """Turns of random commands, and nests of such, whose words grow by steps of their own, wrapping at 32 bits."""
    if depth == 0:
        return [[tuple(int(word) for word in random.integers(0, 1 << 32, random.integers(1, 6)))]]
    body = [turn for _ in range(random.integers(1, 4)) for turn in nest(random, depth - 1)]
    inner = [command for part in body for command in part]
    steps = [random.choice([0, 1, 64, (1 << 32) - 8], len(command)) for command in inner]
    return [
        [
            tuple(int(word + turn * step) % (1 << 32) for word, step in zip(command, own, strict=True))
            for command, own in zip(inner, steps, strict=True)
        ]
        for turn in range(random.integers(1, 7))
    ]


def commands(seed: int, size: int = 4000) -> tuple[Command, ...]:
    """Several nests, with a command here and there that follows no rule."""
    random, found = np.random.default_rng(seed), list[Command]()
    while len(found) < size:
        found += [command for turn in nest(random, int(random.integers(0, 5))) for command in turn]
    return tuple(found)


RECORDER = """
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include "driver.h"
#include "net_constants.h"
static uint32_t held[2][%d], sizes[2], started, ended;
static const uint32_t *places[2];
/* A list is looked at when the one behind it is started: as late as an engine may still read it. */
static void finish(void)
{
    const uint32_t slot = ended++ %% 2u;
    printf("%%d\\n", memcmp(held[slot], places[slot], 4u * sizes[slot]));
    fwrite(places[slot], 4, sizes[slot], stderr);
}
uint32_t engine_start(const uint32_t *words, uint32_t count)
{
    while (started - ended > 0u) { finish(); }
    memcpy(held[started %% 2u], words, 4u * count);
    places[started %% 2u] = words;
    sizes[started %% 2u] = count;
    return started++;
}
void engine_wait(uint32_t ticket) { while ((int32_t)(ticket - ended) >= 0) { finish(); } }
int main(void)
{
    for (int run = 0; run < 2; run++) { engine_wait(LIST_0()); LIST_1(); engine_wait(LIST_2()); }
    return 0;
}
"""


def test_an_engine_gets_the_words_of_the_tables(tmp_path: Path) -> None:
    """Three lists, twice, in C: every word in order, no piece written while the engine may read it."""
    stream = CommandStream("engine_start", lambda unit, unfinished: ())
    engine = Engine("engine", "ram", (), 1.0, (), stream=stream, wait="engine_wait", headers=("driver.h",))
    lists = [CommandList(f"LIST_{seed}", "engine", (), commands(seed), {}) for seed in range(3)]
    source = pieces_source("net", [engine], lists, {one.name: folded(one.commands) for one in lists})
    (tmp_path / "lists.c").write_text(source)
    (tmp_path / "main.c").write_text(RECORDER % PIECE_WORDS)
    (tmp_path / "driver.h").write_text(
        "uint32_t engine_start(const uint32_t *words, uint32_t count);\nvoid engine_wait(uint32_t ticket);\n"
    )
    declared = "".join(f"uint32_t {one.name}(void);\n" for one in lists)
    (tmp_path / "net_constants.h").write_text(f"#include <stdint.h>\n{declared}")
    flags = ["-std=c99", "-O1", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined"]
    subprocess.run(["cc", *flags, "lists.c", "main.c", "-o", "lists"], cwd=tmp_path, check=True)
    ran = subprocess.run(["./lists"], cwd=tmp_path, check=True, capture_output=True)
    expected = np.array([word for one in lists for word in one.words], "<u4")
    assert np.array_equal(np.frombuffer(ran.stderr, "<u4"), np.tile(expected, 2))
    assert set(ran.stdout.split()) == {b"0"} and len(ran.stdout.split()) > 2 * len(expected) // PIECE_WORDS


def test_rules_are_found_within_rules() -> None:
    """A table of 8 by 6 by 9 commands is the words of its three kinds of command."""
    table = [
        command
        for block in range(8)
        for row in range(6)
        for command in (
            (1, 1000 * block),
            *((2, 64 * tap + 4096 * block, 8 * tap + 128 * row) for tap in range(9)),
            (3, 7 * block - row),
        )
    ]
    (item,) = folded(table)
    assert len(item.first) == 2 + 3 + 2


@pytest.mark.oracles
@pytest.mark.skipif(not PUFFIN.exists(), reason="the port of ../shared is not there")
def test_a_port_has_no_large_tables(tmp_path: Path) -> None:
    """ResNet8 on puffin, whose tables take 538 kB beside 77 kB of weights: rodata at most 150 kB, the outputs those of
    the integer graph, and next to no cycle more (2,577,894 with tables)."""
    made = compile_model(RESNET8, load_target(str(PUFFIN)), Options())
    assert any("made by loops of the firmware in 16,384 bytes of ram" in note.text for note in made.unit.notes)
    write_project(made.project, tmp_path / "net")
    inputs = sample_inputs(made.graph, 0)
    run = run_build(open_build(tmp_path / "net", made.unit.target), "iss", [inputs])
    assert run.sizes["text"] + run.sizes["rodata"] < 150_000
    assert (make_report(run).cycles["total"] or 0) in range(1, 2_590_000)
    on_host = run_build(open_build(tmp_path / "net", made.unit.target), "host", [inputs])
    for outputs in (run.outputs[0], on_host.outputs[0]):
        for name, expected in evaluate(made.graph, inputs).items():
            assert name not in outputs or np.array_equal(outputs[name], expected)
    (engine,) = made.unit.target.engines
    assert engine.stream is not None
    whole = replace(made.unit.target, engines=(replace(engine, stream=replace(engine.stream, pieces=False)),))
    assert not pieced(whole, made.unit.lists, 0) and made.unit.pieced
