"""The managing element's protocol in C answers what the one in Python answers, over whatever line."""

from __future__ import annotations

import random
import shutil
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from board_rig import FLAGS, Fault, Faults, Line, no_fault, process
from dovetail.guests.mesh.building import manager_files
from dovetail.guests.mesh.remote import RackSession
from dovetail.sim.frames import ANSWER, REFUSED, Decoder, Frame, FrameKind, encode
from dovetail.sim.line import open_link
from dovetail.sim.rack import LoadKind, Rack
from test_agent import UNTOLD
from test_rack import IMAGES, Adder, small

CHECKED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g")
ADDER = Path(__file__).parent / "manager" / "adder.c"


def built(folder: Path, name: str = "adder", *flags: str) -> Path:
    """The manager of one element that adds, as a program of this computer."""
    for file, content in manager_files().items():
        path = folder / file
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    sources = [*sorted(folder.glob("manager/*.c")), ADDER]
    command = ["cc", *FLAGS, "-pedantic", *CHECKED, *flags, "-D_POSIX_C_SOURCE=200112L", f"-I{folder}/manager"]
    subprocess.run([*command, *sources, "-o", folder / name], check=True, timeout=60)
    return folder / name


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It, with frames of the usual size."""
    return built(tmp_path_factory.mktemp("manager"))


def asked(line: socket.socket) -> Callable[[Frame], Frame]:
    """A function that gives the answer to a frame."""
    decoder = Decoder()

    def ask(frame: Frame) -> Frame:
        line.sendall(encode(frame))
        while True:
            content = line.recv(1 << 16)
            assert content, "the manager has ended"
            for found in decoder.feed(content):
                return found

    return ask


def loads(step: int) -> Iterator[tuple[int, bytes]]:
    """Everything there is to load, in parts of so many bytes."""
    for what, number, content in IMAGES:
        for at in range(0, len(content), step):
            yield FrameKind.LOAD, struct.pack("<III", what, number, at) + content[at : at + step]


def requests(seed: int) -> Iterator[tuple[int, bytes]]:
    """Sensible ones with others among them, each perhaps twice."""
    generator = random.Random(seed)
    digests = (bytes(16), b"\5" * 16, bytes(15) + b"\1")
    yield from loads(generator.choice([1012, 500, 100]))
    yield FrameKind.START, digests[1]
    while True:
        number, place = generator.choice([0, 1, 2, 3]), generator.choice([0, 1, 24, 100, 190, 192, 1 << 31])
        content = generator.randbytes(generator.choice([0, 1, 24, 100, 192]))
        one: tuple[int, bytes] = generator.choice(
            [
                (FrameKind.HELLO, struct.pack("<I", number)),
                (FrameKind.SESSION, b""),
                (FrameKind.RESET, b""),
                (FrameKind.START, generator.choice(digests)),
                (FrameKind.WRITE, struct.pack("<HHI", number // 3, 0, place) + content),
                (FrameKind.RUN, struct.pack("<II", number, generator.choice([0, 1, 2, 8, 9, 1 << 31]))),
                (FrameKind.READ, struct.pack("<HHI", number // 2, generator.choice([0, 1, 24, 192, 1025]), place)),
                (FrameKind.CYCLES, struct.pack("<I", place)),
                (FrameKind.LOAD, struct.pack("<III", LoadKind.DATA, 7, place) + content),
                (FrameKind.LOAD, struct.pack("<III", generator.choice([7, 8, 1 << 31]), 0, 0) + content),
                (generator.choice([*FrameKind, 0, 10, 127]), bytes(generator.choice([0, 1, 3, 5, 7]))),
            ]
        )
        yield from [one] * generator.choice([1, 1, 2])
        if generator.random() < 0.05:
            yield FrameKind.LOAD, bytes(12)  # forget all
            yield from loads(generator.choice([1012, 500, 100]))
        if generator.random() < 0.4:
            yield FrameKind.START, digests[1]


@pytest.mark.parametrize("seed", range(4))
def test_c_answers_what_python_answers(program: Path, seed: int) -> None:
    rack, refusals, runs = Rack(Adder()), 0, 0
    with process(program) as line:
        ask = asked(line)
        for turn, (kind, payload) in zip(range(1500), requests(seed), strict=False):
            frame = Frame(kind, turn % 256, payload)
            here, there = rack.answer(frame), ask(frame)
            assert (there.kind, there.sequence) == (here.kind, here.sequence), (turn, frame, there.payload)
            refusals += there.kind == REFUSED
            assert there.payload == here.payload if there.kind != REFUSED else there.payload.isascii(), (turn, frame)
            runs = rack.runs
    assert refusals > 200 and runs > 10


def results(folder: Path, program: Path, fault: Fault, inputs: int) -> int:
    """Of a session with a manager in C, over a line with faults; how many requests were sent again."""
    given = [{"x": np.random.default_rng(n).integers(0, 256, 24).astype(np.uint8)} for n in range(inputs)]
    with (
        process(program) as board,
        Line(board, fault=fault) as line,
        RackSession(small(), IMAGES, lambda: open_link(line.where), 2, UNTOLD.append) as session,
    ):
        found = session.run(given)
    added = sum(IMAGES[0][2]) % 256
    wanted = [(one["x"] + added).astype(np.uint8).tolist() for one in given]
    assert [one["y"].tolist() for one in found.outputs] == wanted
    return found.repeated


def test_a_session_over_a_line_with_faults(program: Path, tmp_path: Path) -> None:
    """Frames that are lost, cut, doubled and damaged: each input has its result."""
    faults = Faults(3, 0.02)
    repeated = results(tmp_path, program, faults, 20)
    assert faults.count > 3 and repeated


def test_small_frames_and_other_compilers(tmp_path: Path) -> None:
    """With frames of 32 bytes; the files are C++ too, and need nothing but integers of fixed sizes."""
    short = built(tmp_path, "short", "-DBOARD_PAYLOAD=32u")
    results(tmp_path, short, no_fault, 9)
    with process(short) as line:
        ask = asked(line)
        begin = [*loads(20), (FrameKind.START, b"\5" * 16), (FrameKind.RUN, struct.pack("<II", 1, 8))]
        assert all(ask(Frame(kind, 1, payload)).kind == kind | ANSWER for kind, payload in begin)
        for bytes_, kind in ((32, FrameKind.READ | ANSWER), (33, REFUSED)):
            assert ask(Frame(FrameKind.READ, 2, struct.pack("<HHI", 0, bytes_, 0))).kind == kind
    if shutil.which("c++"):
        for source in sorted((tmp_path / "manager").glob("*.c")):
            words = [
                "c++",
                "-x",
                "c++",
                "-ffreestanding",
                "-Wall",
                "-Wextra",
                "-Werror",
                "-c",
                source,
                "-o",
                "/dev/null",
            ]
            subprocess.run(words, check=True, timeout=60)
