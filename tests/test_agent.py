"""`dovetail agent`: boards behind a server, over lines that are cut and past agents that end, and for nobody else."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest

import board_rig as rig
from command_line import dovetail, refused
from dovetail.arrays import seeded_inputs
from dovetail.errors import BoardError, DovetailError
from dovetail.guests.agent.server import Agent
from dovetail.guests.agent.settings import AgentSettings, read_settings
from dovetail.guests.tune.tuner import TuningRequest, tune
from dovetail.run import ProjectBuild, open_build, run_build
from dovetail.sim import agent as greeting
from dovetail.sim.board import FrameSession
from dovetail.sim.line import Board, LineGone

pytestmark = pytest.mark.skipif(os.name != "posix", reason="lines are POSIX")
SECRET = "0123456789abcdef0123456789abcdef"
UNTOLD: list[str] = []


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> ProjectBuild:
    """A network that keeps something from one inference to the next: what is run twice or not at all shows."""
    folder = tmp_path_factory.mktemp("agent")
    assert dovetail("zoo", "digits", "-o", folder / "digits.onnx") == 0
    command = ("compile", folder / "digits.onnx", "-t", "riscv_big_small", "--pipeline", "-o", folder / "build")
    assert dovetail(*command) == 0
    return open_build(folder / "build")


@pytest.fixture(scope="module")
def program(build: ProjectBuild, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its firmware as a program of this computer."""
    return rig.compile_process(build, tmp_path_factory.mktemp("program") / "board")


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """The file of the secret."""
    (tmp_path / "secret").write_text(SECRET + "\n")
    return tmp_path / "secret"


def settings(folder: Path, boards: Mapping[str, str], more: str = "") -> AgentSettings:
    """Those of an agent with these boards."""
    tables = "".join(f'[boards.{name}]\nwhere = "{where}"\n{more}' for name, where in boards.items())
    (folder / "bench.toml").write_text(f'secret = "secret"\n{tables}')
    return read_settings(folder / "bench.toml")


@contextmanager
def served(told: AgentSettings, port: int = 0) -> Iterator[Agent]:
    """A running agent."""
    server = Agent(told, "127.0.0.1", port, UNTOLD.append)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join(10)


def name(server: Agent, board: str = "one") -> str:
    """What `--on` takes."""
    return f"agent:127.0.0.1:{server.address[1]}/{board}"


def inputs(build: ProjectBuild, count: int) -> list[dict[str, np.ndarray]]:
    """Of so many inferences."""
    return [seeded_inputs(build.manifest.inputs, seed) for seed in range(count)]


def test_a_run_and_the_next(build: ProjectBuild, program: Path, secret: Path, tmp_path: Path) -> None:
    expected = run_build(build, "host", inputs(build, 4))
    with ExitStack() as stack:
        line = stack.enter_context(rig.Line(stack.enter_context(rig.process(program))))
        server = stack.enter_context(served(settings(tmp_path, {"one": line.where})))
        for _ in range(2):
            found = run_build(build, None, inputs(build, 4), board=Board(name(server), secret=secret))
            assert same(found.outputs, expected.outputs)
        command = ("run", build.folder, "--on", name(server), "--secret", secret, "--json", tmp_path / "r.json")
        assert dovetail(*command) == 0
    assert json.loads((tmp_path / "r.json").read_text())["simulator"] == "board"


def same(found: object, expected: object) -> bool:
    """Whether outputs of runs are equal, byte for byte."""
    return [{k: v.tobytes() for k, v in one.items()} for one in found] == [  # type: ignore[attr-defined]
        {k: v.tobytes() for k, v in one.items()}
        for one in expected  # type: ignore[attr-defined]
    ]


class Proxy:
    """A TCP relay that cuts connections after random numbers of bytes."""

    def __init__(self, port: int, seed: int, mean: int) -> None:
        self._to, self._random, self._mean = port, random.Random(seed), mean
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self.cuts = self.carried = 0
        """Connections it has cut, and bytes it has carried."""
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        import select

        while True:
            try:
                client = self._server.accept()[0]
            except OSError:
                return
            left = self._random.randrange(2 * self._mean)
            with client, suppress(OSError), socket.create_connection(("127.0.0.1", self._to), 5) as agent:
                while left > 0:
                    for one in select.select([client, agent], [], [], 20)[0]:
                        content = one.recv(min(left, 4096))
                        (agent if one is client else client).sendall(content)
                        left -= len(content) or left
                        self.carried += len(content)
            self.cuts += left <= 0

    def close(self) -> None:
        """Answer nobody any more."""
        self._server.close()


@pytest.mark.parametrize("seed", range(2))
def test_lines_that_are_cut_and_agents_that_end(
    seed: int, build: ProjectBuild, program: Path, secret: Path, tmp_path: Path
) -> None:
    """A thousand requests; no result is lost or doubled."""
    count = 150
    expected = run_build(build, "host", inputs(build, count))
    ended = threading.Event()
    with ExitStack() as stack:
        line = stack.enter_context(rig.Line(stack.enter_context(rig.process(program))))
        told = settings(tmp_path, {"one": line.where})
        first = Agent(told, "127.0.0.1", 0, UNTOLD.append)
        port, generator, kills = first.address[1], random.Random(seed), []
        proxy = Proxy(port, seed, 3000)

        def live_and_die() -> None:
            """One agent after the other at the same port, each until some bytes more have come to it or from it."""
            server = first
            while True:
                thread = threading.Thread(target=server.serve)
                thread.start()
                last = proxy.carried + generator.randrange(12_000)
                while proxy.carried < last and not ended.wait(0.002):
                    pass
                server.close()
                thread.join(10)
                kills.append(1)
                if ended.is_set():
                    return
                while True:
                    with suppress(BoardError):
                        server = Agent(told, "127.0.0.1", port, UNTOLD.append)
                        break
                    time.sleep(0.05)

        agents = threading.Thread(target=live_and_die)
        agents.start()
        try:
            given_up, found = time.monotonic() + 120, None
            while found is None:  # no agent may be there at first, which is an error: nothing has begun
                try:
                    board = Board(f"agent:127.0.0.1:{proxy.port}/one", timeout=20, secret=secret)
                    found = run_build(build, None, inputs(build, count), board=board)
                except BoardError as error:
                    assert "began anew" not in str(error)
                    if time.monotonic() > given_up:
                        raise
                    time.sleep(0.1)
        finally:
            ended.set()
            agents.join(20)
            proxy.close()
    print(f"{proxy.carried} bytes, {proxy.cuts} cuts, {len(kills)} agents ended")
    assert same(found.outputs, expected.outputs)
    assert proxy.cuts > 3 and len(kills) > 3


def test_an_agent_that_ends_opens_no_line(secret: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that was heard just before leaves no board behind whose line nobody closes."""
    opened: list[object] = []
    monkeypatch.setattr("dovetail.guests.agent.server.line_to", opened.append)
    receive, before = greeting.receive, threading.enumerate()
    with served(settings(tmp_path, {"one": "tcp:127.0.0.1:1"})) as server:

        def ending(line: socket.socket, kind: type[greeting._Message], deadline: float) -> greeting._Message:
            """The message; where it is a request the agent ends behind it."""
            message = receive(line, kind, deadline)
            if isinstance(message, greeting.AgentRequest):
                server.close()
            return message

        monkeypatch.setattr(greeting, "receive", ending)
        with pytest.raises(LineGone):
            greeting.open_agent(Board(name(server), secret=secret), "a" * 32)
    for thread in set(threading.enumerate()) - set(before):
        thread.join(10)
    assert not opened


def test_a_board_is_lent_to_one_job(build: ProjectBuild, program: Path, secret: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        line = stack.enter_context(rig.Line(stack.enter_context(rig.process(program))))
        server = stack.enter_context(served(settings(tmp_path, {"one": line.where})))
        board = Board(name(server), secret=secret)
        link = greeting.open_agent(board, "a" * 32)
        session = FrameSession(link, build.manifest.digest, len(build.manifest.layers), 2)
        with pytest.raises(BoardError, match="the board 'one' is in use"):
            greeting.open_agent(board, "b" * 32)
        again = greeting.open_agent(board, "a" * 32)  # the same job takes its board over
        again.close()
        session.close()
        end = time.monotonic() + 10
        while time.monotonic() < end:
            with suppress(BoardError):
                greeting.open_agent(board, "b" * 32).close()
                break
        else:
            pytest.fail("the board is not given back")


def test_a_jobs_time_is_limited(build: ProjectBuild, program: Path, secret: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        line = stack.enter_context(rig.Line(stack.enter_context(rig.process(program))))
        server = stack.enter_context(served(settings(tmp_path, {"one": line.where}, "seconds = 0.5\n")))
        board = Board(name(server), secret=secret)
        link = greeting.open_agent(board, "a" * 32)
        begin = time.monotonic()
        with pytest.raises(BoardError, match="the other end of the line is gone"):
            while time.monotonic() < begin + 10:
                link.read(1)
        with pytest.raises(BoardError, match=r"the job has had its 0\.5 s"):
            greeting.open_agent(board, "a" * 32)
        link.close()


def test_who_does_not_know_the_secret(build: ProjectBuild, secret: Path, tmp_path: Path) -> None:
    with served(settings(tmp_path, {"one": "tcp:127.0.0.1:1"})) as server:
        (tmp_path / "other").write_text("f" * 32)
        with pytest.raises(BoardError, match="the secret is another"):
            greeting.open_agent(Board(name(server), secret=tmp_path / "other"), "a" * 32)
        with pytest.raises(BoardError, match="there is no board 'two'"):
            greeting.open_agent(Board(name(server, "two"), secret=secret), "a" * 32)
        with pytest.raises(BoardError, match="has no command to load firmware"):
            greeting.open_agent(Board(name(server), secret=secret), "a" * 32, b"elf")
        with pytest.raises(BoardError, match="the agent refuses: nobody answers at"):
            greeting.open_agent(Board(name(server), secret=secret), "a" * 32)
        with pytest.raises(BoardError, match="an agent asks for a secret"):
            greeting.open_agent(Board(name(server)), "a" * 32)
        (tmp_path / "other").write_text("short")
        with pytest.raises(BoardError, match="the least is 16"):
            greeting.open_agent(Board(name(server), secret=tmp_path / "other"), "a" * 32)


def test_an_agent_that_does_not_know_it_either(secret: Path) -> None:
    """Whoever answers in an agent's place is not believed."""

    class Other(msgspec.Struct):
        """A message of something else."""

        hello: int = 1

    answers: list[list[msgspec.Struct]] = [
        [greeting.AgentGreeting(1, "x"), greeting.AgentAnswer("0" * 64)],
        [Other()],
        [greeting.AgentGreeting(2, "x")],
    ]
    for messages, said in zip(answers, ("does not know the secret", "is no agent", "is no agent"), strict=True):
        with socket.create_server(("127.0.0.1", 0)) as server:

            def serve(server: socket.socket = server, messages: list[msgspec.Struct] = messages) -> None:
                with suppress(OSError), server.accept()[0] as line:
                    for message in messages:
                        greeting.send(line, message)
                    line.recv(4096)

            thread = threading.Thread(target=serve)
            thread.start()
            with pytest.raises(BoardError, match=said):
                greeting.open_agent(Board(f"agent:127.0.0.1:{server.getsockname()[1]}/x", secret=secret), "a" * 32)
            thread.join(10)


def heard_from(line: socket.socket, kind: type[greeting._Message]) -> greeting._Message:
    """The next message of an agent."""
    return greeting.receive(line, kind, time.monotonic() + 10)


def proved(request: greeting.AgentRequest, nonce: str) -> greeting.AgentRequest:
    """The request with its proof."""
    return msgspec.structs.replace(request, proof=greeting.client_proof(SECRET.encode(), nonce, request))


@pytest.mark.parametrize("altered", ["board", "job", "nonce", "image", "digest", "proof", "agent's nonce"])
def test_a_proof_is_of_everything_that_is_asked_for(altered: str, secret: Path, tmp_path: Path) -> None:
    """A request with one thing changed behind its proof, or with a proof that was heard before, gets nothing."""
    others = {"board": "two", "image": 3, "digest": "d" * 64, "proof": "0" * 64}
    request = greeting.AgentRequest("one", "a" * 32, "b" * 32, 0, "", "0" * 64)
    refusals = []
    with served(settings(tmp_path, dict.fromkeys(("one", "two"), "tcp:127.0.0.1:1"))) as server:
        for is_altered in (False, True):
            with socket.create_connection(server.address) as line:
                nonce = heard_from(line, greeting.AgentGreeting).nonce
                heard = "c" * 32 if is_altered and altered == "agent's nonce" else nonce
                message = proved(request, heard)
                if is_altered and altered in message.__struct_fields__:
                    message = msgspec.structs.replace(message, **{altered: others.get(altered, "e" * 32)})
                greeting.send(line, message)
                refusals.append(heard_from(line, greeting.AgentAnswer).error)
    assert "nobody answers" in refusals[0] and refusals[1] == "the secret is another"


def test_firmware_that_was_changed_on_its_way_is_not_loaded(secret: Path, tmp_path: Path) -> None:
    image, other = b"firmware", b"Firmware"
    with (
        served(settings(tmp_path, {"one": "tcp:127.0.0.1:1"}, 'load = "cp {elf} loaded"')) as server,
        socket.create_connection(server.address) as line,
    ):
        digest = hashlib.sha256(image).hexdigest()
        request = greeting.AgentRequest("one", "a" * 32, "b" * 32, len(image), digest, "0" * 64)
        greeting.send(line, proved(request, heard_from(line, greeting.AgentGreeting).nonce))
        line.sendall(other)
        assert "another digest" in heard_from(line, greeting.AgentAnswer).error


def test_ten_thousand_malformed_greetings(secret: Path, tmp_path: Path) -> None:
    """None is taken for a request, none is an error of ours, and the agent is well afterwards."""
    generator = random.Random(3)
    good = {"board": "one", "job": "a" * 32, "nonce": "b" * 32, "image": 0, "digest": "", "proof": "0" * 64}
    wrong: list[object] = [None, 5, -1, 1 << 40, "", "x" * 33, "\ud800" * 64, [], {}, True, 1.5]
    for turn in range(10_000):
        message: dict[str, object] = dict(good)
        for key in generator.sample(sorted(good), generator.randrange(1, 4)):
            message[key] = generator.choice(wrong)
        content = bytearray(json.dumps(message).encode())
        for _ in range(generator.randrange(4) if turn % 2 else 0):
            content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        with suppress(greeting.MessageError):
            request = greeting.parsed(bytes(content), greeting.AgentRequest)
            assert greeting.client_proof(SECRET.encode(), "n", request).encode() != request.proof.encode()
    with served(settings(tmp_path, {"one": "tcp:127.0.0.1:1"})) as server:
        for _ in range(100):
            with socket.create_connection(server.address) as line, suppress(OSError):
                line.sendall(generator.randbytes(generator.randrange(1, 200)))
        for size in (0, 5000, 0xFFFFFFFF):  # a length too small or too large is not waited for
            with socket.create_connection(server.address) as line:
                heard_from(line, greeting.AgentGreeting)
                line.sendall(size.to_bytes(4, "big"))
                line.settimeout(5)
                assert line.recv(1) == b""
        with pytest.raises(BoardError, match="nobody answers"):
            greeting.open_agent(Board(name(server), secret=secret), "a" * 32)


def test_slow_greetings_keep_nobody_out(secret: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hundred connections of several addresses that send a byte now and then, and never prove anything."""
    monkeypatch.setattr(greeting, "GREETING_SECONDS", 3.0)
    with served(settings(tmp_path, {"one": "tcp:127.0.0.1:1"})) as server, ExitStack() as stack:
        lines = []
        for number in range(200):
            source = (f"127.0.0.{1 + number % 5}", 0)
            line = stack.enter_context(socket.create_connection(server.address, 5, source))
            line.sendall((4000).to_bytes(4, "big") + b" ")
            lines.append(line)
            if number % 50 == 49:  # an honest client of the crowded address
                begin = time.monotonic()
                with pytest.raises(BoardError, match="nobody answers"):
                    greeting.open_agent(Board(name(server), secret=secret), "a" * 32)
                assert time.monotonic() - begin < 2
        assert len(server._greetings._lines) <= 64
        end, ended = time.monotonic() + 10, [False] * len(lines)
        while not all(ended) and time.monotonic() < end:  # a byte a second does not move the end of the greeting
            time.sleep(0.5)
            for number, line in enumerate(lines):
                try:
                    line.sendall(b" ")
                    line.setblocking(False)
                    while line.recv(1000):
                        pass
                    ended[number] = True
                except BlockingIOError:
                    line.setblocking(True)
                except OSError:
                    ended[number] = True
        assert all(ended)


def test_only_allowed_addresses_connect(secret: Path, tmp_path: Path) -> None:
    (tmp_path / "bench.toml").write_text(
        'secret = "secret"\nallow = ["10.0.0.0/8"]\n[boards.one]\nwhere = "tcp:127.0.0.1:1"\n'
    )
    with served(read_settings(tmp_path / "bench.toml")) as server, pytest.raises(BoardError, match="does not answer"):
        greeting.open_agent(Board(name(server), secret=secret), "a" * 32)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("secret = 3", "bench.toml:1: secret: must be the name of the file"),
        ('secret = "secret"', "'boards' is missing"),
        ('secret = "secret"\n[boards]', "bench.toml:2: boards: must be a table for each board"),
        ('secret = "secret"\nsoup = 1\n', "bench.toml:2: soup: there is no such entry"),
        (
            'secret = "secret"\nallow = ["everyone"]\n[boards.a]\nwhere = "tcp:h:1"\n',
            r"bench.toml:2: allow\[0\]: must be addresses",
        ),
        ('secret = "secret"\n[boards.a]\nwhere = "gdb"\n', r"bench.toml:3: boards\.a\.where: must be a line such as"),
        (
            'secret = "secret"\n[boards.a]\nwhere = "tcp:h:1"\nseconds = -1\n',
            r"bench.toml:4: boards\.a\.seconds: must be seconds",
        ),
        (
            'secret = "secret"\n[boards.a]\nwhere = "tcp:h:1"\nspeed = 3\n',
            r"bench.toml:4: boards\.a\.speed: there is no such entry",
        ),
        ("[[", "this is not TOML"),
    ],
)
def test_settings_that_are_wrong(text: str, message: str, secret: Path, tmp_path: Path) -> None:
    (tmp_path / "bench.toml").write_text(text)
    with pytest.raises(DovetailError) as caught:
        read_settings(tmp_path / "bench.toml")
    assert re.search(message, str(caught.value))


def test_firmware_is_loaded_by_the_agent(build: ProjectBuild, secret: Path, tmp_path: Path) -> None:
    """By its own command, with the bytes that were sent."""
    with ExitStack() as stack:
        server = socket.create_server(("127.0.0.1", 0))
        stack.callback(server.close)
        load = f'load = "cp {{elf}} {tmp_path / "loaded"}"\n'
        where = f"tcp:127.0.0.1:{server.getsockname()[1]}"
        running = stack.enter_context(served(settings(tmp_path, {"one": where}, load)))
        greeting.open_agent(Board(name(running), secret=secret), "c" * 32, b"firmware").close()
        assert (tmp_path / "loaded").read_bytes() == b"firmware"


def test_a_board_is_named_once(tmp_path: Path) -> None:
    """Trials on several boards are in tests/test_board.py."""
    board = Board("tcp:127.0.0.1:1", tmp_path / "uart.c")
    twice = TuningRequest(Path("x.onnx"), "riscv", tmp_path / "log", measure="board", boards=(board, board))
    with pytest.raises(DovetailError, match="this board is named twice"):
        tune(twice, lambda now: None, lambda text: None)


def test_the_command_says_where_it_listens(
    secret: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings(tmp_path, {"one": "tcp:127.0.0.1:1"})
    monkeypatch.setattr(Agent, "serve", lambda self: None)
    assert dovetail("agent", tmp_path / "bench.toml", "--listen", "127.0.0.1:0") == 0
    assert "listening at 127.0.0.1:" in capsys.readouterr().out
    assert "is not HOST:PORT" in refused(capsys, "agent", tmp_path / "bench.toml", "--listen", "here")
