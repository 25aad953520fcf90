"""Running on a board: the emitted firmware at the other end of TCP, a pseudo-terminal, faulty lines and a debugger.

The outputs must be those of the simulator `iss`, which takes another way: another main, and no line.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

import board_rig as rig
from command_line import dovetail, refused
from dovetail.arrays import seeded_inputs
from dovetail.errors import BoardError, BuildError, DovetailError
from dovetail.guests.agent.server import Agent
from dovetail.guests.agent.settings import read_settings
from dovetail.guests.tune.measure import make_task, runner
from dovetail.prove import read_graph
from dovetail.run import ProjectBuild, RunResult, board_firmware, board_image, open_build, run_build
from dovetail.sim.board import FrameSession
from dovetail.sim.frames import Decoder, Frame, FrameKind, encode
from dovetail.sim.line import Board, open_link
from dovetail.targets import load_target
from firmware import require_chip

pytestmark = pytest.mark.skipif(os.name != "posix", reason="lines are POSIX")
INFERENCES = 3


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Builds of two models: for a core with an engine, for a core alone, and another network for the first."""
    folder = tmp_path_factory.mktemp("builds")
    assert dovetail("zoo", "digits", "-o", folder / "digits.onnx") == 0
    for target in ("ne16", "riscv"):
        assert dovetail("compile", folder / "digits.onnx", "--target", target, "-o", folder / target) == 0
    return {target: folder / target for target in ("ne16", "riscv")}


def inputs(build: ProjectBuild) -> list[dict[str, np.ndarray]]:
    """Those of every test."""
    return [seeded_inputs(build.manifest.inputs, seed) for seed in range(INFERENCES)]


@pytest.fixture(scope="module")
def expected(builds: dict[str, Path]) -> RunResult:
    """The build with an engine on the simulator."""
    require_chip()
    build = open_build(builds["ne16"])
    return run_build(build, "iss", inputs(build))


@pytest.fixture(scope="module")
def program(builds: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its firmware as a program of this computer."""
    return rig.compile_process(open_build(builds["ne16"]), tmp_path_factory.mktemp("program") / "board")


def check(result: RunResult, expected: RunResult) -> None:
    """Outputs are equal, and the layers' cycles add up."""
    for found, wanted in zip(result.outputs, expected.outputs, strict=True):
        assert found.keys() == wanted.keys()
        for name, array in wanted.items():
            assert array.tobytes() == found[name].tobytes()
    for inference in result.simulation.inferences:
        assert inference.total_cycles == sum(m.end_cycle - m.start_cycle for m in inference.markers) > 0


@pytest.mark.parametrize("terminal", [False, True], ids=["tcp", "serial"])
def test_the_simulated_chip_behind_a_line(
    terminal: bool, builds: dict[str, Path], expected: RunResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build = open_build(builds["ne16"])
    elf = board_firmware(build, Board("", rig.UART_IO))
    with rig.chip(build, elf) as board, rig.Line(board, terminal) as line:
        result = run_build(build, None, inputs(build), board=Board(line.where))
        check(result, expected)
        # a counter read at every layer is all that is different
        here, there = (r.simulation.inferences[0].total_cycles or 0 for r in (result, expected))
        assert there < here < 1.1 * there
        for attempt in range(2):  # one user after another
            assert dovetail("run", builds["ne16"], "--on", line.where, "--json", tmp_path / f"{attempt}.json") == 0
    report = json.loads((tmp_path / "1.json").read_text())
    assert report["simulator"] == "board" and report["cycles"]["ne16"] is None and report["instructions"] is None
    assert sum(layer["cycles"] for layer in report["layers"]) == report["cycles"]["total"] > 0
    assert "on ne16 (board, policy engine)" in capsys.readouterr().out


@pytest.mark.parametrize("terminal", [False, True], ids=["tcp", "serial"])
def test_a_process_behind_a_line(terminal: bool, builds: dict[str, Path], expected: RunResult, program: Path) -> None:
    build = open_build(builds["ne16"])
    with rig.process(program) as board, rig.Line(board, terminal) as line:
        check(run_build(build, None, inputs(build), board=Board(line.where)), expected)


@pytest.mark.parametrize("seed", range(4))
def test_faults_of_the_line_change_nothing(
    seed: int, builds: dict[str, Path], expected: RunResult, program: Path
) -> None:
    build, faults = open_build(builds["ne16"]), rig.Faults(seed, 0.05)
    with rig.process(program) as board, rig.Line(board, terminal=seed % 2 == 1, fault=faults) as line:
        check(run_build(build, None, inputs(build), board=Board(line.where, timeout=2)), expected)
    assert faults.count


def test_what_is_kept_between_inferences_survives_faults(builds: dict[str, Path], tmp_path: Path) -> None:
    """A pipeline for two cores: an inference that is run twice would shift its steps, as would what is left."""
    model = builds["ne16"].parent / "digits.onnx"
    assert dovetail("compile", model, "-t", "riscv_big_small", "--pipeline", "-o", tmp_path / "build") == 0
    build, faults = open_build(tmp_path / "build"), rig.Faults(5, 0.06)
    expected = run_build(build, "host", inputs(build))
    program = rig.compile_process(build, tmp_path / "board")
    with rig.process(program) as board, rig.Line(board, fault=faults) as line:
        for _ in range(2):
            check(run_build(build, None, inputs(build), board=Board(line.where, timeout=2)), expected)
    assert faults.count


@pytest.mark.parametrize("seed", range(3))
def test_a_line_that_is_cut_is_opened_again(seed: int, builds: dict[str, Path], tmp_path: Path) -> None:
    """At any byte, either way, with a network that keeps values between inferences: nothing is lost or done twice."""
    model = builds["ne16"].parent / "digits.onnx"
    assert dovetail("compile", model, "-t", "riscv_big_small", "--pipeline", "-o", tmp_path / "build") == 0
    build, cuts = open_build(tmp_path / "build"), rig.Cuts(seed, 0.25)
    expected = run_build(build, "host", inputs(build))
    program = rig.compile_process(build, tmp_path / "board")
    with rig.process(program) as board, rig.Line(board, cuts=cuts) as line:
        check(run_build(build, None, inputs(build), board=Board(line.where, timeout=2)), expected)
    assert cuts.count > 3


def test_a_board_that_begins_anew_is_noticed(
    builds: dict[str, Path], program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was given is lost, so its outputs would be of something else; a line that stays away is said too."""
    build = open_build(builds["ne16"])
    (port,) = build.manifest.inputs
    with ExitStack() as boards:
        first = boards.enter_context(rig.Line(boards.enter_context(rig.process(program))))
        number = int(first.where.rpartition(":")[2])
        session = FrameSession(open_link(first.where), build.manifest.digest, len(build.manifest.layers), 0.4)
        session.write(0, bytes(port.bytes))
        boards.close()
        boards.enter_context(rig.Line(boards.enter_context(rig.process(program)), port=number))
        with pytest.raises(BoardError, match="the board began anew while the line was gone"):
            session.infer()
        session.close()
        session = FrameSession(open_link(first.where), build.manifest.digest, len(build.manifest.layers), 0.4)
        boards.close()
        monkeypatch.setattr("dovetail.sim.frames._GONE_SECONDS", 0.5)
        with pytest.raises(BoardError, match="the other end of the line is gone"):
            session.infer()


def test_small_frames_and_a_bounded_number_of_retries(
    builds: dict[str, Path], expected: RunResult, tmp_path: Path
) -> None:
    build, faults = open_build(builds["ne16"]), rig.Faults(11, 0.02)
    small = rig.compile_process(build, tmp_path / "small", "BOARD_PAYLOAD=32u")
    (port,), (result,) = build.manifest.inputs, build.manifest.outputs
    with rig.process(small) as board, rig.Line(board, fault=faults) as line, closing(open_link(line.where)) as link:
        session = FrameSession(link, build.manifest.digest, len(build.manifest.layers), 0.8)
        for given, wanted in zip(inputs(build), expected.outputs, strict=True):
            session.write(0, given[port.name].tobytes())
            total, layers = session.infer()
            assert total == sum(layers) > 0
            assert session.read(0, result.bytes) == wanted[result.name].tobytes()
    assert 0 < session.talk.repeated <= 2 * faults.count


def test_an_inference_is_never_run_twice(builds: dict[str, Path], program: Path) -> None:
    """A request that comes again, with its number, gets the same answer; the counter of the process shows it."""
    build = open_build(builds["ne16"])
    with rig.process(program) as board:
        decoder, found = Decoder(), []
        for request in [
            Frame(FrameKind.HELLO, 1, b"\7\0\0\0"),
            *[Frame(FrameKind.RUN, 2, b"\1\0\0\0")] * 3,
            Frame(FrameKind.CYCLES, 3, bytes(4)),
            Frame(FrameKind.READ, 4, b"\1\0\1\0\0\0\0\0"),
            Frame(FrameKind.WRITE, 5, b"\0\0\0\0\xff\xff\xff\xff1"),
            Frame(99, 6),
            Frame(FrameKind.READ, 7, b"\0\0\xff\xff\0\0\0\0"),
        ]:
            board.sendall(encode(request))
        board.settimeout(10)
        while len(found) < 9:
            found += decoder.feed(board.recv(4096))
    assert found[0].payload[8:].hex() == build.manifest.digest
    assert [frame.payload for frame in found[2:4]] == [found[1].payload] * 2
    assert sum(np.frombuffer(found[4].payload, "<u8")) == int.from_bytes(found[1].payload, "little")
    assert [(frame.kind, frame.sequence) for frame in found[5:]] == [(0xFF, sequence) for sequence in (4, 5, 6, 7)]


@contextmanager
def peer(answers: list[bytes]) -> Iterator[str]:
    """A board that answers every packet by the next of these, then by the last again; none for silence. Zeros alone,
    which end a half request, are none."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        """One connection."""
        with server.accept()[0] as line, suppress(ConnectionError):
            position = 0
            while packet := line.recv(4096):
                if answers and packet.strip(b"\0"):
                    line.sendall(answers[min(position, len(answers) - 1)])
                    position += 1

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"tcp:127.0.0.1:{server.getsockname()[1]}"
    finally:
        thread.join(10)
        server.close()


def test_a_board_that_never_answers(builds: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    with peer([]) as where:
        begin = time.monotonic()
        said = refused(capsys, "run", builds["ne16"], "--on", where, "--timeout", "0.4")
        assert time.monotonic() - begin < 8
    assert f"{where}: the board does not answer: HELLO was sent 8 times in 0.4 s" in said


def test_a_serial_port_without_a_board(builds: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    master, slave = os.openpty()
    name = os.ttyname(slave)
    said = refused(capsys, "run", builds["ne16"], "--on", f"serial:{name}:9600", "--timeout", "0.01")
    assert "the board does not answer" in said and "at this speed" in said
    os.close(master)
    said = refused(capsys, "run", builds["ne16"], "--on", f"serial:{name}", "--timeout", "0.01")
    os.close(slave)
    assert "the other end of the line is gone" in said or "cannot be opened" in said


def test_a_board_with_another_model(builds: dict[str, Path], capsys: pytest.CaptureFixture[str], program: Path) -> None:
    with rig.process(program) as board, rig.Line(board) as line:
        said = refused(capsys, "run", builds["riscv"], "--on", line.where)
    digest = open_build(builds["riscv"]).manifest.digest
    assert "the firmware of another build" in said and digest in said and "make board" in said


HELLO = (2).to_bytes(2, "little") + (1024).to_bytes(2, "little")


@pytest.mark.parametrize(
    ("payloads", "message"),
    [
        ([b""], "introduces itself with 0 bytes"),
        ([b"\xff" * 24], "speaks version 65535"),
        ([HELLO + b"\xff\xff\xff\xffDIGEST"], "4294967295 layers"),
        ([HELLO[:2] + b"\x01\x00COUNTDIGEST"], "takes 1 bytes in a frame"),
        ([HELLO + b"COUNTDIGEST", b"", b"much too long"], "an answer has 13 bytes instead of 0"),
    ],
)
def test_hostile_answers(payloads: list[bytes], message: str, builds: dict[str, Path]) -> None:
    build = open_build(builds["ne16"])
    known = {
        b"COUNT": len(build.manifest.layers).to_bytes(4, "little"),
        b"DIGEST": bytes.fromhex(build.manifest.digest),
    }
    kinds, answers = (FrameKind.HELLO, FrameKind.RESET, FrameKind.WRITE), []
    for sequence, payload in enumerate(payloads, 1):
        for name, value in known.items():
            payload = payload.replace(name, value)
        answers.append(encode(Frame(kinds[sequence - 1] | 0x80, sequence, payload)))
    with peer(answers) as where, pytest.raises(BoardError, match=message):
        run_build(build, None, inputs(build), board=Board(where, timeout=1))


def test_a_peer_that_talks_without_end(builds: dict[str, Path]) -> None:
    noise = b"\xd7\xe9\x81\x01\xff\xff" * 2000
    with peer([noise]) as where, pytest.raises(BoardError, match="belong to no frame"):
        build = open_build(builds["ne16"])
        run_build(build, None, inputs(build), board=Board(where, timeout=0.4))


@contextmanager
def gdb_server(build: ProjectBuild, **variables: str) -> Iterator[str]:
    """A debugger's server with a core of the build's memories."""
    memories = [f"{m.name}={m.base:#x}:{m.size:#x}" for m in build.target.memories]
    command = [sys.executable, Path(__file__).parent / "board" / "gdbserver.py", *memories]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **variables}) as server:
        try:
            assert server.stdout is not None
            yield f"gdb:127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


def test_a_debugger(builds: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    require_chip()
    build = open_build(builds["riscv"])
    expected = run_build(build, "host", inputs(build))
    io = Path(__file__).parent / "board" / "counter_io.c"
    with gdb_server(build, WRITABLE="1") as where:
        for _ in range(2):
            check(run_build(build, None, inputs(build), board=Board(where, io)), expected)
        assert "there is no firmware" in refused(capsys, "run", builds["riscv"], "--on", where)
    with gdb_server(build) as where:
        said = refused(capsys, "run", builds["riscv"], "--on", where, "--board-io", io)
        assert "does not know" in said or "answers 'E0e'" in said
    with peer([]) as tcp:
        where = tcp.replace("tcp", "gdb")
        with pytest.raises(BoardError, match="does not answer"):
            run_build(build, None, inputs(build), board=Board(where, io, timeout=0.2))
    with peer([b"$" + b"0" * 100_000]) as tcp, pytest.raises(BoardError, match="longer than 16384 bytes"):
        run_build(build, None, inputs(build), board=Board(tcp.replace("tcp", "gdb"), io))
    assert "nobody answers" in refused(capsys, "run", builds["riscv"], "--on", "gdb:127.0.0.1:1", "--board-io", io)


@contextmanager
def bench(build: ProjectBuild, control: socket.socket) -> Iterator[str]:
    """A board that can be loaded: who connects to `control` says the file of the firmware, and waits until it runs."""
    running = ExitStack()

    def load() -> None:
        """Chips, one after another."""
        while True:
            with control.accept()[0] as asked:
                path = asked.recv(4096).decode()
                if path == "end":
                    break
                running.close()
                running.enter_context(rig.Line(running.enter_context(rig.chip(build, Path(path))), port=port))
                asked.sendall(b"running")
        running.close()

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    thread = threading.Thread(target=load)
    thread.start()
    try:
        yield f"tcp:127.0.0.1:{port}"
    finally:
        with socket.create_connection(control.getsockname()) as end:
            end.sendall(b"end")
        thread.join(20)


LOADER = """import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as line:
    line.sendall(sys.argv[2].encode())
    sys.exit(line.recv(10) != b"running")
"""


def test_tuning_on_a_board(
    builds: dict[str, Path],
    expected: RunResult,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each trial is firmware of its own, which is loaded and run; its outputs are compared, its cycles are near."""
    require_chip()
    pytest.importorskip("lightgbm", reason="tuning needs lightgbm (dovetail[tune])")
    monkeypatch.setattr("dovetail.guests.tune.tuner.MOST_TRIALS", 1)
    (tmp_path / "load.py").write_text(LOADER)
    model, build, log = builds["ne16"].parent / "digits.onnx", open_build(builds["ne16"]), tmp_path / "log.jsonl"
    order = ("tune", model, "-t", "ne16", "--trials", "1", "--layers", "dense_13", "-o", tmp_path / "t.toml")
    with socket.create_server(("127.0.0.1", 0)) as control, bench(build, control) as where:
        load = f"{sys.executable} {tmp_path / 'load.py'} {control.getsockname()[1]} {{elf}}"
        on = ("--on", where, "--board-io", rig.UART_IO, "--load", load)
        assert dovetail(*order, "--log", log, *on) == 0
    layer, *network = [json.loads(line)["cycles"] for line in log.read_text().splitlines()[1:]]
    there = expected.simulation.inferences[0].total_cycles or 0
    assert 0 < layer < there and network and all(there < found < 1.1 * there for found in network)
    assert 'measure = "board"' in (tmp_path / "t.toml").read_text()
    new = (*order, "--log", tmp_path / "new.jsonl")
    assert "nobody answers" in refused(capsys, *new, "--on", "tcp:127.0.0.1:1", "--board-io", rig.UART_IO)
    assert "every trial is another firmware" in refused(capsys, *new, "--on", "gdb")
    assert "cannot share one board" in refused(capsys, *new, "--on", "gdb", "--jobs", 2)


def test_trials_are_spread_over_boards(builds: dict[str, Path], tmp_path: Path) -> None:
    """Each of two boards gets some, and what comes back is what one board says."""
    require_chip()
    (tmp_path / "load.py").write_text(LOADER)
    build = open_build(builds["ne16"])
    graph = read_graph(build)
    task, found, loads = make_task(graph, (), "ne16", None, "board"), {}, []
    with ExitStack() as stack:
        boards = []
        for number in range(2):
            control = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            where = stack.enter_context(bench(build, control))
            mark = tmp_path / f"loaded_{number}"
            script = f"{sys.executable} {tmp_path / 'load.py'} {control.getsockname()[1]} {{elf}}"
            boards.append(Board(where, rig.UART_IO, f"sh -c 'echo x >> {mark}; {script}'"))
            loads.append(mark)
        run = stack.enter_context(runner(1, None, boards))
        for number, outcome in run(task, [{}] * 4):
            assert outcome.error is None or not outcome.error, outcome.error
            found[number] = outcome.cycles
    assert sorted(found) == [0, 1, 2, 3] and len(set(found.values())) == 1 and (found[0] or 0) > 0
    assert sum(mark.read_text().count("x") for mark in loads) == 4 and all(mark.exists() for mark in loads)


@contextmanager
def agents(build: ProjectBuild, folder: Path, count: int) -> Iterator[list[Board]]:
    """So many agents, each with a board whose firmware is loaded once all are being loaded, or after a minute not."""
    (folder / "load.py").write_text(LOADER)
    (folder / "secret").write_text("0123456789abcdef" * 2)
    meeting = "import pathlib, sys, time\n"
    meeting += "here = pathlib.Path(sys.argv[1])\n(here / sys.argv[2]).touch()\nlast = time.monotonic() + 60\n"
    meeting += f"while len(list(here.glob('begun_*'))) < {count}:\n"
    meeting += "    if time.monotonic() > last: sys.exit(1)\n    time.sleep(0.05)\n"
    (folder / "meet.py").write_text(meeting)
    with ExitStack() as stack:
        boards = []
        for number in range(count):
            control = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            where = stack.enter_context(bench(build, control))
            meet = f"{sys.executable} {folder / 'meet.py'} {folder} begun_{number}"
            script = f"{meet} && {sys.executable} {folder / 'load.py'} {control.getsockname()[1]} {{elf}}"
            table = f"secret = 'secret'\n[boards.one]\nwhere = '{where}'\nload = \"sh -c '{script}'\"\n"
            (folder / f"bench_{number}.toml").write_text(table)
            server = Agent(read_settings(folder / f"bench_{number}.toml"), "127.0.0.1", 0, [].append)
            thread = threading.Thread(target=server.serve)
            thread.start()
            stack.callback(thread.join, 10)
            stack.callback(server.close)
            place = f"agent:127.0.0.1:{server.address[1]}/one"
            boards.append(Board(place, rig.UART_IO, secret=folder / "secret"))
        yield boards


def test_tuning_over_three_agents_uses_all_at_once(builds: dict[str, Path], tmp_path: Path) -> None:
    """No board gets its firmware before each of the three is being given one."""
    require_chip()
    build = open_build(builds["ne16"])
    task = make_task(read_graph(build), (), "ne16", None, "board")
    with agents(build, tmp_path, 3) as boards, runner(1, None, boards) as run:
        found = dict(run(task, [{}] * 3))
    assert sorted(found) == list(range(3)) and not any(outcome.error for outcome in found.values())
    assert len({outcome.cycles for outcome in found.values()}) == 1


def children() -> set[int]:
    """Processes this one has started and not collected."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(entry.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(entry.parent.name))
    return found


def test_loading_the_firmware(builds: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_chip()
    before = children()
    build, seen = open_build(builds["riscv"]), tmp_path / "seen.elf"
    with peer([]) as where, pytest.raises(BoardError, match="does not answer"):
        run_build(build, None, inputs(build), board=Board(where, rig.UART_IO, f"cp {{elf}} {seen}", 0.1))
    assert seen.read_bytes()[:4] == b"\x7fELF"
    for command, message in (
        ("false", "failed with status 1"),
        ("./no_such_tool {elf}", "does not start"),
        ("sh -c 'echo port busy; exit 3'", "failed with status 3: port busy"),
        ("'open", "does not start"),
        (" ", "does not start"),
    ):
        with pytest.raises(BoardError, match=message):
            run_build(build, None, inputs(build), board=Board("tcp:127.0.0.1:1", rig.UART_IO, command))
    with pytest.raises(BoardError, match="no firmware"):
        run_build(build, None, inputs(build), board=Board("tcp:127.0.0.1:1", load="true {elf}"))
    monkeypatch.setattr("dovetail.sim.board._LOAD_SECONDS", 0.3)
    begin = time.monotonic()
    with pytest.raises(BoardError, match=r"took more than 0\.3 s"):
        hung = f"sh -c 'sleep 60 & echo $! > {tmp_path / 'pid'}; wait'"
        run_build(build, None, inputs(build), board=Board("tcp:127.0.0.1:1", rig.UART_IO, hung))
    assert time.monotonic() - begin < 30
    hung_child, patience = int((tmp_path / "pid").read_text()), time.monotonic() + 10
    while _runs(hung_child) and time.monotonic() < patience:  # the kernel ends it after the signal, not with it
        time.sleep(0.01)
    assert not _runs(hung_child)
    with peer([]) as where, pytest.raises(BoardError, match="does not answer"):  # the command leaves a server behind
        server = f"sh -c 'sleep 1 & echo $! > {tmp_path / 'pid'}'"
        run_build(build, None, inputs(build), board=Board(where, rig.UART_IO, server, 0.1))
    assert _runs(int((tmp_path / "pid").read_text()))
    assert children() <= before


def _runs(process: int) -> bool:
    """Whether there is such a process, and it is not dead."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_wishes_that_contradict_each_other(
    builds: dict[str, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "not on both" in dovetail_error("run", builds["ne16"], "--on", "tcp:a:1", "--sim", "iss")
    for seconds in ("0", "nan", "inf"):
        assert "a time-out is more than 0" in refused(
            capsys, "run", builds["ne16"], "--on", "tcp:127.0.0.1:1", "--timeout", seconds
        )
    assert "none is given" in refused(capsys, "run", builds["ne16"], "--load", "true")
    model = builds["ne16"].parent / "digits.onnx"
    assert "not by both" in dovetail_error("tune", model, "-t", "ne16", "--on", "gdb", "--measure", "model")
    folder = tmp_path / "host"
    assert dovetail("compile", model, "--target", "opencl", "-o", folder) == 0
    build = open_build(folder)
    assert not (folder / "runtime" / "board.h").exists()
    with pytest.raises(BuildError, match="has no firmware for a board"):
        run_build(build, None, inputs(build), board=Board("tcp:a:1"))


def dovetail_error(*arguments: object) -> str:
    """The message of the error a command ends with."""
    from dovetail.cli.main import all_commands, command_line

    with pytest.raises(DovetailError) as raised:
        command_line(all_commands())([str(argument) for argument in arguments], standalone_mode=False)
    assert raised.value.hint
    return str(raised.value)


def test_make_board_has_the_files_it_names(builds: dict[str, Path]) -> None:
    text = (builds["ne16"] / "Makefile").read_text()
    names = re.findall(r"^BOARD_SOURCES = (.*)$", text, re.MULTILINE)[0].split()
    assert "runtime/board_main.c" in names and "runtime/sim_main.c" not in names
    assert all((builds["ne16"] / name).is_file() for name in names)
    (defines,) = re.findall(r"^BOARD_DEFINES = (.*)$", text, re.MULTILINE)
    assert "-DDOVETAIL_BOARD" in defines and "DOVETAIL_SIM" not in defines and "-DDOVETAIL_DMA_BASE" in defines
    build = open_build(builds["ne16"])
    assert board_image(build).name == f"{build.manifest.model_prefix}_board.elf"
    for target in ("ne16", "riscv"):
        assert load_target(target).name == target
    without = subprocess.run(["make", "-s", "board"], cwd=builds["ne16"], capture_output=True, text=True, timeout=30)
    assert without.returncode and "BOARD_IO=file.c" in without.stdout


@pytest.mark.skipif(
    not (shutil.which("qemu-system-arm") and importlib.util.find_spec("elftools")), reason="qemu-system-arm is not here"
)
def test_the_debuggers_server_of_qemu(tmp_path: Path) -> None:
    """A server nobody here wrote: Cortex-M4 on QEMU's netduinoplus2, which wants its registers described first."""
    model, folder = tmp_path / "digits.onnx", tmp_path / "build"
    assert dovetail("zoo", "digits", "-o", model) == 0
    assert dovetail("compile", model, "--target", "cortex_m4", "-o", folder) == 0
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    empty = "".join(
        f"{kind} board_{name}({given}) {{ {body} }}\n"
        for kind, name, given, body in (
            ("uint32_t", "read", "uint8_t *bytes, uint32_t most", "(void)bytes; (void)most; return 0;"),
            ("void", "write", "const uint8_t *bytes, uint32_t count", "(void)bytes; (void)count;"),
            ("uint32_t", "cycles", "void", "return 0;"),
        )
    )
    (tmp_path / "io.c").write_text('#include "board.h"\n' + empty)
    elf = board_firmware(open_build(folder), Board("", tmp_path / "io.c"))
    server = [
        "qemu-system-arm",
        "-M",
        "netduinoplus2",
        "-kernel",
        str(elf),
        "-S",
        "-gdb",
        f"tcp:127.0.0.1:{port}",
        "-nographic",
    ]
    with subprocess.Popen([*server, "-monitor", "none", "-serial", "none"], stdin=subprocess.DEVNULL) as qemu:
        try:
            deadline = time.monotonic() + 20
            while dovetail("run", folder, "--on", f"gdb:127.0.0.1:{port}", "--board-io", tmp_path / "io.c") != 0:
                assert time.monotonic() < deadline
                time.sleep(0.3)
        finally:
            qemu.kill()
