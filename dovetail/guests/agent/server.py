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
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dovetail.errors import BoardError, DovetailError
from dovetail.guests.agent.settings import AgentBoard, AgentSettings
from dovetail.sim import agent
from dovetail.sim.board import load_firmware
from dovetail.sim.line import Board, LineGone, Link, open_link

MOST_CONNECTIONS = 64
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


class Agent:
    """A server; `address` is where it listens, host and port. Ends with `close`."""

    def __init__(self, settings: AgentSettings, host: str, port: int, tell: Callable[[str], None]) -> None:
        self._settings, self._tell = settings, tell
        self._places = {name: _BoardLease(name, bench) for name, bench in settings.boards.items()}
        self._seats = threading.Semaphore(MOST_CONNECTIONS)
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
            if not self._may_connect(peer[0]) or not self._seats.acquire(blocking=False):
                line.close()
                continue
            self._open.add(line)
            threading.Thread(target=self._answer, args=(line, peer[0]), daemon=True).start()

    def close(self) -> None:
        """Stop, and cut all connections."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for line in list(self._open):
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
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
                        agent.send(line, {"error": str(refusal), "hint": refusal.hint})
                except agent.MessageError as error:
                    self._tell(f"{peer}: not a request: {error}")
                except OSError as error:
                    self._tell(f"{peer}: the connection ended: {error}")
        finally:
            self._open.discard(line)
            self._seats.release()

    def _serve_one(self, line: socket.socket, peer: str) -> None:
        nonce = secrets.token_hex(16)
        agent.send(line, {"dovetail_agent": agent.VERSION, "nonce": nonce})
        request = agent.request_of(agent.receive(line))
        expected = agent.client_proof(self._settings.secret, nonce, request)
        if not hmac.compare_digest(expected.encode(), request.proof.encode()):
            raise RequestRefusal("the secret is another", "see that both ends have the same file for --secret")
        place = self._places.get(request.board)
        if place is None:
            raise RequestRefusal(f"there is no board '{request.board}'", f"it has {', '.join(sorted(self._places))}")
        with self._turn(place, request.job, line):
            image = self._image(line, request)
            self._prepare(place, image)
            assert place.link is not None, "it was opened"
            agent.send(line, {"proof": agent.proof(self._settings.secret, "agent", request.nonce, nonce)})
            self._tell(f"{peer}: {request.board}, job {request.job[:8]}" + (", firmware loaded" if image else ""))
            _relay(line, place)

    @contextmanager
    def _turn(self, place: _BoardLease, job: str, line: socket.socket) -> Iterator[None]:
        """Have the board; a connection that this job had before is cut."""
        with place.guard:
            again = place.job == job
            if again and place.client is not None:
                with contextlib.suppress(OSError):
                    place.client.shutdown(socket.SHUT_RDWR)
        if not place.turn.acquire(timeout=_TAKEN_OVER_SECONDS if again else 0.5):
            raise RequestRefusal(f"the board '{place.name}' is in use", "try again later, or name another board")
        try:
            with place.guard:
                if place.job != job:
                    place.job, place.ends = job, time.monotonic() + place.bench.seconds
                place.client = line
            if time.monotonic() >= place.ends:
                raise RequestRefusal(
                    f"the job has had its {place.bench.seconds:g} s", "ask for fewer inferences at once"
                )
            yield
        finally:
            with place.guard:
                place.client = None
            place.turn.release()

    def _image(self, line: socket.socket, request: agent.AgentRequest) -> bytes:
        if not request.image:
            return b""
        line.settimeout(_IMAGE_SECONDS)
        image = agent.exactly(line, request.image)
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
                with tempfile.TemporaryDirectory(prefix="dovetail-agent-") as folder:
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
