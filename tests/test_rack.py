"""A mapped network on a rack behind an agent: over lines that are cut, past agents that end, as it was emitted."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from command_line import dovetail, refused
from dovetail.codegen.manifest import TensorPort
from dovetail.errors import BoardError, BuildError
from dovetail.guests.agent.server import Agent
from dovetail.guests.agent.settings import read_settings
from dovetail.guests.mesh.compiled import with_compiler
from dovetail.guests.mesh.emit import ElementRecord
from dovetail.guests.mesh.manifest import MeshRecord, TensorRecord, read_mesh
from dovetail.guests.mesh.rack import EmulatedElements
from dovetail.guests.mesh.remote import Images, RackSession, mesh_images
from dovetail.ir.types import Array
from dovetail.sim.board import opener
from dovetail.sim.frames import ANSWER, MAXIMUM_PAYLOAD, REFUSED, Frame, FrameKind, encode
from dovetail.sim.line import Board
from dovetail.sim.rack import LoadKind, Rack, RackBackend, RackContents, RackRun, RefusedError, rack_link
from dovetail.targets import load_target
from test_agent import SECRET, UNTOLD, Proxy

pytestmark = pytest.mark.skipif(os.name != "posix", reason="lines are POSIX")
needs_firmware = pytest.mark.skipif(
    find_spec("unicorn") is None or find_spec("ziglang") is None, reason="elements' firmware needs unicorn and ziglang"
)
INPUTS = int(os.environ.get("DOVETAIL_RACK_INPUTS", "400"))
"""Of the test with lines that are cut: a request for every two of them, at least."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mapped network."""
    made = tmp_path_factory.mktemp("rack")
    assert dovetail("zoo", "digits", "-o", made / "net.onnx") == 0
    command = ("mesh", made / "net.onnx", "-t", "spinnaker2", "--chips", 1, "-o", made / "mesh")
    assert dovetail(*command) == 0
    return made / "mesh"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """The file of the secret."""
    (tmp_path / "secret").write_text(SECRET)
    return tmp_path / "secret"


def bench(folder: Path) -> Path:
    """The settings of an agent with a rack."""
    (folder / "bench.toml").write_text('secret = "secret"\n[boards.rack]\nwhere = "mesh:spinnaker2"\n')
    return folder / "bench.toml"


@contextmanager
def agent_process(file: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """An agent in a process of its own, which may be killed before."""
    words = [sys.executable, "-m", "dovetail", "agent", file, "--listen", f"127.0.0.1:{port}"]
    started = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert started.stdout is not None and b"listening" in started.stdout.readline()
    try:
        yield started
    finally:
        started.kill()
        started.wait(10)
        started.stdout.close()


def free_port() -> int:
    """A port nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@needs_firmware
def test_a_network_behind_an_agent_that_is_killed(
    folder: Path, secret: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The firmware of every element runs in the agent's process; the one after it is loaded anew."""
    build, port = read_mesh(folder), free_port()
    shape = build.inputs[0].shape
    given = np.random.default_rng(1).integers(-128, 128, [16, *shape]).astype(np.int8)
    np.savez(tmp_path / "x.npz", **{build.inputs[0].name: given})
    command = ("run", folder, "--on", f"agent:127.0.0.1:{port}/rack", "--secret", secret)
    with agent_process(bench(tmp_path), port) as first:
        assert dovetail(*command, "--json", tmp_path / "first.json") == 0
        assert "equals the integer graph's" in capsys.readouterr().out

        def kill() -> None:
            """Once the run has begun."""
            time.sleep(1.0)
            first.send_signal(signal.SIGKILL)

        threading.Thread(target=kill).start()
        done: list[int] = []
        files = ("--input", tmp_path / "x.npz", "--output", tmp_path / "y.npz", "--json", tmp_path / "second.json")
        runs = threading.Thread(target=lambda: done.append(dovetail(*command, *files)))
        runs.start()
        first.wait(20)
        with agent_process(bench(tmp_path), port):
            runs.join(60)
    assert done == [0] and "equals the integer graph's" in capsys.readouterr().out
    assert json.loads((tmp_path / "second.json").read_text())["loaded_anew"] >= 1
    assert len(np.load(tmp_path / "y.npz")[build.outputs[0].name]) == 16


@needs_firmware
def test_a_network_in_sections(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of it runs as any other, and what elements load is what is used."""
    assert dovetail("zoo", "digits", "-o", tmp_path / "net.onnx") == 0
    (tmp_path / "few.py").write_text(
        "from dataclasses import replace\n"
        "import dovetail.target as dt\n"
        "from dovetail.targets.spinnaker2 import MESH, TARGET\n"
        "few = replace(MESH.resized(chips=1), grid=dt.Grid(2, 2, 1))\n"
        'TARGET = replace(TARGET, name="few", mesh=few)\n'
    )
    target = ("-t", tmp_path / "few.py")
    assert dovetail("mesh", tmp_path / "net.onnx", *target, "--objective", "latency", "-o", tmp_path / "mesh") == 0
    assert "sections" in capsys.readouterr().out
    assert dovetail("run", tmp_path / "mesh", *target, "--json", tmp_path / "clocks.json") == 0
    assert "equals the integer graph's" in capsys.readouterr().out
    build = read_mesh(tmp_path / "mesh")
    clocks = np.array(json.loads((tmp_path / "clocks.json").read_text())["clocks"])
    assert clocks.shape == (1, build.pieces, 4) and (np.diff(clocks, axis=2) >= 0).all()
    image = next((tmp_path / "mesh" / "chips").iterdir())
    content = bytearray(image.read_bytes())
    size = int.from_bytes(content[24:28], "little")
    content[-size:] = bytes(byte ^ 0x55 for byte in content[-size:])
    image.write_bytes(content)
    assert "error" in refused(capsys, "run", tmp_path / "mesh", *target)


@needs_firmware
def test_what_is_wrong_with_what_was_loaded_is_found(folder: Path) -> None:
    """Routes, tables and data are what is used: with one of them changed, nothing comes out, or something else."""
    build, target = read_mesh(folder), with_compiler(load_target("spinnaker2"))
    images = mesh_images(folder, build, target)
    given = [{one.name: np.full(one.shape, 3, np.int8) for one in build.inputs}]
    machine = EmulatedElements(target)
    right = run_on(machine, build, images, given)
    routes = next(content for what, _, content in images if what is LoadKind.ROUTES)
    lost = routes[:8] + bytes([routes[8] ^ 1]) + routes[9:]
    for what, said in ((LoadKind.ROUTES, "is lost|is to go|wait for"), (LoadKind.TABLE, "has no program")):
        wrong = [(w, n, (lost if what is LoadKind.ROUTES else b"") if w is what else c) for w, n, c in images]
        with pytest.raises(BoardError, match=said):
            run_on(machine, build, wrong, given)
    # a weight of every element whose constants are weights: behind the header, before the transfers
    wrong = [
        (w, n, c[:40] + bytes([c[40] ^ 0x55]) + c[41:] if w is LoadKind.DATA and len(c) > 600 else c)
        for w, n, c in images
    ]
    assert wrong != images
    found = run_on(machine, build, wrong, given)
    assert any(not np.array_equal(found[one.name], right[one.name]) for one in build.outputs)


def run_on(
    machine: RackBackend, build: MeshRecord, images: Images, given: Sequence[Mapping[str, Array]]
) -> Mapping[str, Array]:
    """The outputs of the first input, of a rack of this process."""
    rack = Rack(machine)
    with RackSession(build, images, lambda: rack_link(rack, "here"), 60, UNTOLD.append) as session:
        return session.run(given).outputs[0]


class Adder(RackBackend):
    """In place of elements: adds up what it was loaded with and given."""

    def check(self, loaded: RackContents) -> None:
        if len(loaded.parts[LoadKind.DATA].get(7, b"")) != 5000:
            raise RefusedError("the element's data are not whole")

    def run(self, loaded: RackContents, inputs: Sequence[Mapping[int, bytes]]) -> RackRun:
        found = [np.frombuffer(one[0], np.uint8) + sum(loaded.parts[LoadKind.DATA][7]) % 256 for one in inputs]
        return RackRun({0: b"".join(one.astype(np.uint8).tobytes() for one in found)}, [5] * 4 * len(inputs), 5)


IMAGES: Images = [
    (LoadKind.DATA, 7, bytes(range(250)) * 20),
    (LoadKind.TENSOR, 0, (24).to_bytes(4, "little")),
]


def small() -> MeshRecord:
    """What fits `Adder`."""
    ports = tuple(TensorPort(name=name, shape=(24,), dtype="uint8") for name in ("x", "y"))
    tensors, elements = (TensorRecord(24, "x", ("y",)),), (ElementRecord((0, 0, 7), "p", ((0, 0, 0),)),)
    return MeshRecord("small", "none", "5a" * 16, ports[:1], ports[1:], tensors, elements)


def test_lines_that_are_cut_and_agents_that_end(secret: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every input has its own result, once and in its place; racks that begin anew are loaded anew."""
    monkeypatch.setattr("dovetail.guests.agent.server.line_to", lambda one: rack_link(Rack(Adder(), room=2), one.where))
    told, ended, kills = read_settings(bench(tmp_path)), threading.Event(), []
    generator = random.Random(5)
    first = Agent(told, "127.0.0.1", 0, UNTOLD.append)
    port = first.address[1]

    def live_and_die() -> None:
        """One agent after the other at the same port; the rack of each is gone with it."""
        server = first
        while True:
            thread = threading.Thread(target=server.serve)
            thread.start()
            last = proxy.carried + generator.randrange(30_000)
            while proxy.carried < last and not ended.wait(0.002):
                pass
            server.close()
            thread.join(10)
            if ended.is_set():
                return
            kills.append(1)
            while True:
                with suppress(BoardError):
                    server = Agent(told, "127.0.0.1", port, UNTOLD.append)
                    break
                time.sleep(0.02)

    proxy = Proxy(port, 5, 6000)
    agents = threading.Thread(target=live_and_die)
    agents.start()
    given = [{"x": np.random.default_rng(n).integers(0, 256, 24).astype(np.uint8)} for n in range(INPUTS)]
    board = Board(f"agent:127.0.0.1:{proxy.port}/rack", secret=secret)
    try:
        for _ in range(20):  # no agent may be there at first, which is an error: nothing has begun
            with suppress(BoardError):
                session = RackSession(small(), IMAGES, opener(board), 20, UNTOLD.append)
                break
            time.sleep(0.1)
        with session:
            found = session.run(given)
    finally:
        ended.set()
        agents.join(20)
        proxy.close()
    print(
        f"{found.asked} requests, {found.repeated} again, {proxy.cuts} cuts, {len(kills)} agents ended, "
        f"{found.restarts} times loaded anew"
    )
    added = sum(IMAGES[0][2]) % 256
    assert [one["y"].tolist() for one in found.outputs] == [
        (one["x"] + added).astype(np.uint8).tolist() for one in given
    ]
    assert found.clocks.shape == (INPUTS, 1, 4)
    assert found.asked >= 2 * INPUTS and proxy.cuts > 3 and kills and found.restarts


class OneCut:
    """A TCP relay that cuts the line once, after so many bytes one way, and carries on plainly."""

    def __init__(self, port: int, after: int, upwards: bool) -> None:
        self._to, self._left, self._upwards = port, after, upwards
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self.carried = [0, 0]
        """Bytes from the agent, and to it."""
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                client = self._server.accept()[0]
                agent = socket.create_connection(("127.0.0.1", self._to), 5)
                for one in ((client, agent, True), (agent, client, False)):
                    threading.Thread(target=self._carry, args=one, daemon=True).start()

    def _carry(self, source: socket.socket, to: socket.socket, upwards: bool) -> None:
        with suppress(OSError):
            while content := source.recv(1 << 16):
                self.carried[upwards] += len(content)
                if upwards == self._upwards and 0 <= self._left <= len(content):
                    to.sendall(content[: self._left])
                    self._left = -1
                    break
                self._left -= len(content) if upwards == self._upwards and self._left >= 0 else 0
                to.sendall(content)
        for line in (source, to):
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    @property
    def is_cut(self) -> bool:
        """Whether it has cut the line."""
        return self._left < 0

    def close(self) -> None:
        """Answer nobody any more."""
        self._server.close()


CUTS = int(os.environ.get("DOVETAIL_RACK_CUTS", "36"))
"""Runs with a line that is cut once; 200 take half a minute."""


def test_a_line_that_is_cut_at_any_byte(secret: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three racks at once: every run is right, and takes no 3 s more than one that is not cut."""
    monkeypatch.setattr("dovetail.guests.agent.server.line_to", lambda one: rack_link(Rack(Adder(), room=2), one.where))
    racks = "".join(f'[boards.{name}]\nwhere = "mesh:none"\n' for name in "abc")
    (tmp_path / "bench.toml").write_text(f'secret = "secret"\n{racks}')
    agent = Agent(read_settings(tmp_path / "bench.toml"), "127.0.0.1", 0, UNTOLD.append)
    threading.Thread(target=agent.serve, daemon=True).start()
    added = sum(IMAGES[0][2]) % 256
    given = [{"x": np.random.default_rng(n).integers(0, 256, 24).astype(np.uint8)} for n in range(5)]

    def run(name: str, build: MeshRecord, after: int, upwards: bool) -> tuple[float, OneCut]:
        """The seconds of a run over a line that is cut, and the relay."""
        relay, begin = OneCut(agent.address[1], after, upwards), time.monotonic()
        board = Board(f"agent:127.0.0.1:{relay.port}/{name}", secret=secret)
        with RackSession(build, IMAGES, opener(board), 5, UNTOLD.append) as session:
            found = session.run(given)
        relay.close()
        assert [one["y"].tolist() for one in found.outputs] == [
            (one["x"] + added).astype(np.uint8).tolist() for one in given
        ]
        return time.monotonic() - begin, relay

    usual, relay = run("a", small(), 1 << 30, True)
    slowest, wrong = [0.0], list[str]()

    def runs(name: str, seed: int) -> None:
        generator = random.Random(seed)
        for number in range(CUTS // 3):
            # another digest each time, so that everything is loaded again
            build = replace(small(), digest=f"{seed * CUTS + number + 1:032x}")
            upwards = generator.random() < 0.7
            after = generator.randrange(relay.carried[upwards])
            try:
                taken, cut = run(name, build, after, upwards)
                slowest.append(taken)
                if not cut.is_cut:
                    wrong.append(f"{name}: not cut after {after} bytes")
            except (BoardError, AssertionError) as error:
                wrong.append(f"{name}: cut after {after} bytes, upwards {upwards}: {error}")

    threads = [threading.Thread(target=runs, args=(name, seed)) for seed, name in enumerate("abc", 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    agent.close()
    print(f"{len(slowest) - 1} runs, {usual:.2f} s uncut, {max(slowest):.2f} s at most with a cut")
    assert not wrong and len(slowest) == 1 + CUTS // 3 * 3
    assert max(slowest) < usual + 3


def test_a_request_that_comes_twice_changes_nothing() -> None:
    rack = Rack(Adder())
    load = [
        Frame(FrameKind.LOAD, 1, w.to_bytes(4, "little") + n.to_bytes(4, "little") + bytes(4) + c[:1012])
        for w, n, c in IMAGES
    ]
    rest = [
        Frame(
            FrameKind.LOAD,
            2,
            bytes([LoadKind.DATA, 0, 0, 0, 7, 0, 0, 0]) + at.to_bytes(4, "little") + IMAGES[0][2][at : at + 1012],
        )
        for at in range(1012, 5000, 1012)
    ]
    order = [Frame(FrameKind.HELLO, 0, b"\1\0\0\0"), *load, *rest, Frame(FrameKind.START, 3, b"\5" * 16)]
    order += [Frame(FrameKind.WRITE, 4, bytes(8) + bytes(24)), Frame(FrameKind.RUN, 5, b"\1\0\0\0\1\0\0\0")]
    order += [
        Frame(FrameKind.READ, 6, b"\0\0\x18\0\0\0\0\0"),
        Frame(FrameKind.CYCLES, 7, bytes(4)),
        Frame(FrameKind.SESSION, 8),
    ]
    for frame in order:
        once, twice = rack.answer(frame), rack.answer(frame)
        assert once == twice and once.kind == frame.kind | ANSWER, frame
    assert rack.runs == 1 and rack.digest == b"\5" * 16


def test_the_frame_of_the_page() -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "agent.md").read_text()
    assert encode(Frame(FrameKind.RUN, 5, bytes([1, 0, 0, 0, 1, 0, 0, 0]))).hex(" ") in page


def test_frames_that_are_none_are_refused() -> None:
    """Ten thousand, of every kind and size; what comes after them is answered as ever."""
    rack, generator = Rack(Adder()), random.Random(9)
    refused_ones = 0
    for turn in range(10_000):
        kind = generator.choice([*FrameKind, 0, 10, 127, 255])
        content = generator.randbytes(generator.choice([0, 1, 4, 8, 12, 16, 20, MAXIMUM_PAYLOAD]))
        if turn % 2:
            content = bytes(generator.choice([0, 1, 7, 255]) for _ in content)
        refused_ones += rack.answer(Frame(kind, turn % 256, content)).kind == REFUSED
    assert refused_ones > 5000 and rack.runs == 0 and rack.loaded.nbytes() < 64 << 20
    with RackSession(small(), IMAGES, lambda: rack_link(rack, "here"), 5, UNTOLD.append) as session:
        assert session.run([{"x": np.zeros(24, np.uint8)}]).outputs[0]["y"][0] == sum(IMAGES[0][2]) % 256


def test_mistakes_are_told(folder: Path, secret: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on = ("--on", f"agent:127.0.0.1:{free_port()}/rack", "--secret", secret)
    for given in (("--sim", "host"), ("--check-layers",)):
        assert "leave it out" in refused(capsys, "run", folder, *given)
    assert "does not answer" in refused(capsys, "run", folder, *on)
    (tmp_path / "mesh.json").write_text('{"schema": 2, "inputs": 3}')
    assert "mesh.json:1: inputs: must be a list" in refused(capsys, "run", tmp_path)
    (tmp_path / "mesh.json").unlink()
    with pytest.raises(BuildError, match="this is not a mapped network"):
        read_mesh(tmp_path)
    (tmp_path / "bench.toml").write_text('secret = "secret"\n[boards.rack]\nwhere = "mesh:riscv"\n')
    server = Agent(read_settings(tmp_path / "bench.toml"), "127.0.0.1", 0, UNTOLD.append)
    thread = threading.Thread(target=server.serve)
    thread.start()
    board = Board(f"agent:127.0.0.1:{server.address[1]}/rack", secret=secret)
    with pytest.raises(BoardError, match="is a machine alone"):
        opener(board)()
    server.close()
    thread.join(10)
