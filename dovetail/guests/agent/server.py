"""`dovetail agent`: a server beside boards that lends each to one job at a time.

dovetail/sim/agent.py has the greeting. It keeps nothing on disk but the firmware it is loading. What comes over a
connection is bounded, and before the secret was proved it is one short message.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import secrets
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dovetail.errors import BoardError, DovetailError
from dovetail.files import TemporaryFolder
from dovetail.guests.agent.settings import AgentBoard, AgentSettings
from dovetail.sim import agent
from dovetail.sim.board import load_firmware
from dovetail.sim.line import Board, LineGone, Link, open_link

MOST_CONNECTIONS = 64
"""Connections of clients that have proved that they know the secret."""
MOST_GREETINGS, MOST_OF_ADDRESS = 64, 16
"""Connections that have not yet, in all and from one address."""
_TAKEN_OVER_SECONDS = 15.0
_IMAGE_SECONDS = 120.0
_QUIET_SECONDS = 0.05


class RequestRefusal(Exception):
    """A request that is answered with a sentence and what to do."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what)
        self.hint = hint


def line_to(bench: AgentBoard) -> Link:
    """Open the line to a board, or begin a rack at the other end of it.

    Raises:
        DovetailError: it cannot be opened, or the target has no mesh.
    """
    kind, _, name = bench.where.partition(":")
    if kind != "mesh":
        return open_link(bench.where)
    from dovetail.guests.mesh.compiled import with_compiler
    from dovetail.guests.mesh.rack import EmulatedElements
    from dovetail.sim.rack import Rack, rack_link
    from dovetail.target.registry import load_target

    target = with_compiler(load_target(name))
    if target.mesh is None:
        hint = "name a target whose elements are joined, such as spinnaker2"
        raise BoardError("this target is a machine alone, not a mesh", where=bench.where, hint=hint)
    return rack_link(Rack(EmulatedElements(target)), bench.where)


class _BoardLease:
    """A board and who has it."""

    def __init__(self, name: str, bench: AgentBoard) -> None:
        self.name, self.bench = name, bench
        self.turn = threading.Lock()
        """Held by the connection that has the board."""
        self.guard = threading.Lock()
        """Guards the fields below."""
        self.job = ""
        self.ends = 0.0
        """When its time is up, by the monotonic clock."""
        self.client: socket.socket | None = None
        self.link: Link | None = None
        """Its line, which stays open from one connection to the next; only touched by who has the turn."""

    def close(self) -> None:
        """Close the board's line."""
        if self.link is not None:
            self.link.close()
            self.link = None


class _Greetings:
    """Connections that have not proved that they know the secret. A new one always has a seat: where there are too
    many, the oldest of its address loses its own, or the oldest of the address that has most."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._lines: dict[socket.socket, str] = {}

    def add(self, line: socket.socket, peer: str) -> None:
        """Seat a connection from an address."""
        with self._guard:
            count = Counter(self._lines.values())
            crowded = peer if count[peer] >= MOST_OF_ADDRESS else None
            if crowded is None and len(self._lines) >= MOST_GREETINGS:
                crowded = count.most_common(1)[0][0]
            if crowded is not None:
                oldest = next(one for one, address in self._lines.items() if address == crowded)
                del self._lines[oldest]
                cut(oldest)
            self._lines[line] = peer

    def leave(self, line: socket.socket) -> None:
        """Free the seat of a connection: it has proved itself, or ended."""
        with self._guard:
            self._lines.pop(line, None)


def cut(line: socket.socket) -> None:
    """End a connection that another thread reads."""
    with contextlib.suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)


class Agent:
    """A server; `address` is where it listens, host and port. Ends with `close`."""

    def __init__(self, settings: AgentSettings, host: str, port: int, tell: Callable[[str], None]) -> None:
        self._settings, self._tell = settings, tell
        self._places = {name: _BoardLease(name, bench) for name, bench in settings.boards.items()}
        self._seats = threading.Semaphore(MOST_CONNECTIONS)
        self._greetings = _Greetings()
        self._open: set[socket.socket] = set()
        self._closed = False
        try:
            self._server = socket.create_server((host, port), reuse_port=False)
        except OSError as error:
            where, hint = f"{host}:{port}", "choose another --listen, or end what listens there"
            raise BoardError(f"cannot listen: {error.strerror}", where=where, hint=hint) from None
        self.address: tuple[str, int] = self._server.getsockname()[:2]

    def serve(self) -> None:
        """Answer until `close` is called."""
        while not self._closed:
            try:
                line, peer = self._server.accept()
            except OSError:
                return
            if not self._may_connect(peer[0]):
                line.close()
                continue
            self._open.add(line)
            self._greetings.add(line, peer[0])
            threading.Thread(target=self._answer, args=(line, peer[0]), daemon=True).start()

    def close(self) -> None:
        """Stop, cut all connections, and close the boards' lines; a board that is in use at the end of 5 s, or is given
        to a connection that was accepted just before, is closed by the connection that has it."""
        self._closed = True
        cut(self._server)
        self._server.close()
        for line in list(self._open):
            cut(line)
        for place in self._places.values():
            if place.turn.acquire(timeout=5):
                place.close()
                place.turn.release()

    def _may_connect(self, address: str) -> bool:
        found = ipaddress.ip_address(address.partition("%")[0])
        plain = getattr(found, "ipv4_mapped", None) or found
        return any(plain in network for network in self._settings.allow if network.version == plain.version)

    def _answer(self, line: socket.socket, peer: str) -> None:
        """One connection, from the greeting to its end."""
        try:
            with line:
                line.settimeout(agent.GREETING_SECONDS)
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                try:
                    self._serve_one(line, peer)
                except RequestRefusal as refusal:
                    self._tell(f"{peer}: {refusal}")
                    with contextlib.suppress(OSError):
                        agent.send(line, agent.AgentAnswer(error=str(refusal), hint=refusal.hint))
                except agent.MessageError as error:
                    self._tell(f"{peer}: not a request: {error.what}")
                except OSError as error:
                    self._tell(f"{peer}: the connection ended: {error}")
        finally:
            self._greetings.leave(line)
            self._open.discard(line)

    def _serve_one(self, line: socket.socket, peer: str) -> None:
        nonce = secrets.token_hex(16)
        agent.send(line, agent.AgentGreeting(agent.VERSION, nonce))
        request = agent.receive(line, agent.AgentRequest, time.monotonic() + agent.GREETING_SECONDS)
        expected = agent.client_proof(self._settings.secret, nonce, request)
        if not hmac.compare_digest(expected.encode(), request.proof.encode()):
            raise RequestRefusal("the secret is another", "see that both ends have the same file for --secret")
        self._greetings.leave(line)
        place = self._places.get(request.board)
        if place is None:
            raise RequestRefusal(f"there is no board '{request.board}'", f"it has {', '.join(sorted(self._places))}")
        with self._seat(), self._turn(place, request.job, line):
            image = self._image(line, request)
            self._prepare(place, image)
            assert place.link is not None, "it was opened"
            proof = agent.proof(self._settings.secret, "agent", request.nonce, nonce)
            agent.send(line, agent.AgentAnswer(proof))
            self._tell(f"{peer}: {request.board}, job {request.job[:8]}" + (", firmware loaded" if image else ""))
            _relay(line, place)

    @contextmanager
    def _seat(self) -> Iterator[None]:
        """A seat among the connections that are served."""
        if not self._seats.acquire(blocking=False):
            raise RequestRefusal(f"it serves {MOST_CONNECTIONS} connections already", "try again later")
        try:
            yield
        finally:
            self._seats.release()

    @contextmanager
    def _turn(self, place: _BoardLease, job: str, line: socket.socket) -> Iterator[None]:
        """Have the board; a connection that this job had before is cut."""
        with place.guard:
            again = place.job == job
            if again and place.client is not None:
                cut(place.client)
        if not place.turn.acquire(timeout=_TAKEN_OVER_SECONDS if again else 0.5):
            raise RequestRefusal(f"the board '{place.name}' is in use", "try again later, or name another board")
        try:
            with place.guard:
                if place.job != job:
                    place.job, place.ends = job, time.monotonic() + place.bench.seconds
                place.client = line
            if self._closed:
                raise ConnectionError("the agent has ended")
            if time.monotonic() >= place.ends:
                raise RequestRefusal(
                    f"the job has had its {place.bench.seconds:g} s", "ask for fewer inferences at once"
                )
            yield
        finally:
            with place.guard:
                place.client = None
            if self._closed:
                place.close()
            place.turn.release()

    def _image(self, line: socket.socket, request: agent.AgentRequest) -> bytes:
        if not request.image:
            return b""
        image = agent.exactly(line, request.image, time.monotonic() + _IMAGE_SECONDS)
        if hashlib.sha256(image).hexdigest() != request.digest:
            raise RequestRefusal("the firmware has another digest than was said", "send it again")
        return image

    def _prepare(self, place: _BoardLease, image: bytes) -> None:
        """Load what is to be loaded, open the board's line, and throw away what waits in it."""
        bench = place.bench
        if image and not bench.load:
            raise RequestRefusal(f"the board '{place.name}' has no command to load firmware", "leave out --board-io")
        try:
            if image:
                place.close()
                with TemporaryFolder() as folder:
                    elf = Path(folder) / "firmware.elf"
                    elf.write_bytes(image)
                    load_firmware(Board(bench.where, load=bench.load), elf)
            if place.link is None:
                place.link = line_to(bench)
            while place.link.read(_QUIET_SECONDS):
                pass
        except DovetailError as error:
            place.close()
            raise RequestRefusal(error.what, error.hint) from None


def _relay(line: socket.socket, place: _BoardLease) -> None:
    """Carry bytes between a client and its board until one of them goes, or the job's time is up."""
    link = place.link
    assert link is not None, "it was opened"
    line.settimeout(agent.GREETING_SECONDS)
    ends: list[socket.socket | Link] = [line, link]
    while (left := place.ends - time.monotonic()) > 0:
        ready = select.select(ends, [], [], left)[0]
        try:
            if link in ready:
                line.sendall(link.read(0))
            if line in ready:
                content = line.recv(1 << 16)
                if not content:
                    return
                link.write(content)
        except LineGone as gone:
            place.close()
            raise ConnectionError(f"the line to {place.name} is gone: {gone.what}") from None
        except BoardError as error:
            place.close()
            raise ConnectionError(f"{place.name}: {error.what}") from None
