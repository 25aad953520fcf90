"""Engines' own buffers: places of what launches load, and what they may believe to be there. The port is that of
docs/port_in_place.md, whose commands tests/test_pages.py runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.compile import Compiled, Options, compile_graph, sample_inputs
from dovetail.errors import ProgramError, TargetError
from dovetail.guests.newtarget import PortStyle, PortWish, write_new_target
from dovetail.ir.graph import Graph
from dovetail.legalize import adapt
from dovetail.program.interpret import ProgramInterpreter
from dovetail.program.ir import LaunchStatement
from dovetail.program.verify import verify
from dovetail.target import Target
from dovetail.target.offload import placed
from dovetail.targets import load_target
from networks import branches, image_net, mixed_kernels


@pytest.fixture(scope="module")
def plover(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """The page's port."""
    folder = tmp_path_factory.mktemp("plover")
    write_new_target("plover", folder, wish=PortWish(PortStyle.IN_PLACE))
    return load_target(str(folder / "plover.py"))


def chain() -> Graph:
    """Layers after each other, the first of many tiles."""
    net = image_net("chain", 40, 8)
    x = net.convolution(net.x, 16, 3, "first", relu=True)
    return net.finish(net.dense(net.mean(net.convolution(x, 24, 3, "second", relu=True)), 10, "scores"))


def inception() -> Graph:
    """1x1, 3x3 and 5x5 of one image, joined."""
    return branches(8, 8, (8, 8, 8, 8, 8))


def kernels() -> Graph:
    """3x3, 4x4 and 5x5 of one image."""
    return mixed_kernels(12, 8, 8)


def made(make: Callable[[], Graph], target: Target, size: int) -> Compiled:
    memories = tuple(replace(m, size=size) if m.name == "cbuf" else m for m in target.memories)
    target = replace(target, memories=memories)
    return compile_graph(adapt(make(), target.policies[0]), target, Options())


def launches(compiled: Compiled) -> Iterator[tuple[int, LaunchStatement]]:
    statements = enumerate(compiled.plan.program.statements)
    return ((index, one) for index, one in statements if isinstance(one, LaunchStatement) and one.buffered)


@pytest.mark.parametrize("size", [16 << 10, 4 << 10, 2 << 10])
@pytest.mark.parametrize("make", [chain, inception, kernels])
def test_what_is_said_to_be_there_is_there(plover: Target, make: Callable[[], Graph], size: int) -> None:
    """The bytes of a buffer that launches fill as they are told, beside those in memory now."""
    compiled = made(make, plover, size)
    program, target = compiled.plan.program, compiled.unit.target
    machine, found, base = ProgramInterpreter(program, target), 0, target.memory("cbuf").base
    held = np.full(size, -1)
    for name, array in sample_inputs(compiled.graph).items():
        machine.write(program.inputs[name], array)
    loading = dict(launches(compiled))
    for index, statement in enumerate(program.statements):
        if index in loading:
            launch = loading[index]
            for name, one in launch.buffered.items():
                own = machine.read(launch.operands[name if name in launch.packed else launch.match.values[name]])
                raw, first = own.reshape(-1).view(np.uint8), one.place.start - base
                assert first >= 0 and one.place.stop - base <= size
                if one.is_loaded:
                    found += 1
                    assert np.array_equal(held[first : first + raw.size], raw)
                held[first : one.place.stop - base] = -1  # what it does not fill, nobody may believe
                held[first : first + raw.size] = raw
        machine.step(index, statement)
    assert found or size > 2 << 10


def test_layers_that_read_one_value_load_it_once(plover: Target) -> None:
    """In a buffer that holds it beside their weights."""
    by_layer: dict[int, list[bool]] = {}
    for _, launch in launches(made(kernels, plover, 16 << 10)):
        by_layer.setdefault(launch.layer, []).append(launch.buffered["x"].is_loaded)
    assert list(by_layer.values())[-2:] == [[True], [True]]


def test_faults_are_refused(plover: Target) -> None:
    compiled = made(kernels, plover, 2 << 10)
    program, target = compiled.plan.program, compiled.unit.target
    index, first = next(launches(compiled))

    def refuses(name: str, change: dict[str, object], match: str) -> None:
        wrong = {**first.buffered, name: replace(first.buffered[name], **change)}  # type: ignore[arg-type]
        statements = list(program.statements)
        statements[index] = replace(first, buffered=wrong)
        with pytest.raises(ProgramError, match=match):
            verify(replace(program, statements=tuple(statements)), target)

    verify(program, target)
    refuses("x", {"is_loaded": True}, "x is not in cbuf at 0x50000000, where")
    refuses("x", {"place": first.buffered["weights"].place}, "not its own in cbuf")
    refuses("weights", {"place": range(0x50000800, 0x50000A00)}, "not its own in cbuf")


def test_a_buffer_of_no_memory_is_refused(plover: Target, tmp_path: Path) -> None:
    for old, new, match in (
        ('buffer="cbuf"', 'buffer="soup"', "there is no memory 'soup' for the buffer of plover"),
        ('buffer="cbuf"', 'buffer="dram"', "must be a memory of its own"),
        ('buffer="cbuf", ', "", "load into a buffer, which it has not"),
    ):
        folder = tmp_path / match.replace(
            " ", "_"
        )  # a file of the same size and second would be taken from Python's cache
        made, *_ = write_new_target("plover", folder, wish=PortWish(PortStyle.IN_PLACE))
        made.write_text(made.read_text().replace(old, new))
        with pytest.raises(TargetError, match=match):
            load_target(str(folder / "plover.py"))


@given(
    sizes=st.lists(st.integers(1, 900), max_size=5),
    given_places=st.lists(st.integers(0, 3), unique=True, max_size=3),
    taken=st.lists(st.integers(0, 7), unique=True, max_size=4),
    alignment=st.sampled_from([1, 16, 256]),
)
def test_places_are_apart(sizes: list[int], given_places: list[int], taken: list[int], alignment: int) -> None:
    wanted = {f"fixed_{n}": range(512 * n, 512 * n + 300) for n in given_places}
    wanted |= {f"free_{n}": size for n, size in enumerate(sizes)}  # type: ignore[misc]
    others = [range(4096 + 256 * n, 4096 + 256 * n + 100) for n in taken]
    found = placed(wanted, alignment, others)
    assert found.keys() == wanted.keys()
    for name, place in found.items():
        assert wanted[name] in (place, len(place)) and (name[:4] != "free" or place.start % alignment == 0)
    for one, other in combinations([*found.values(), *others], 2):
        assert one.stop <= other.start or other.stop <= one.start
