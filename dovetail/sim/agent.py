"""Boards behind an agent: a line to one of them through a small server beside it (`dovetail agent`).

Whoever connects and the agent know one secret. They greet each other in messages of four bytes of length (most
significant first) and so many of JSON; behind the greeting the connection is the board's line, byte for byte:

| from | message |
|---|---|
| agent | `dovetail_agent` (1) and a `nonce` |
| client | `board`, `job`, a `nonce` of its own, `image` (bytes of firmware), `digest` (its SHA-256) and `proof` |
| client | the firmware, if there is any: else `image` is 0 and `digest` empty |
| agent | `proof`, once the board's line is open; or `error` and `hint` |

A proof is an HMAC-SHA256 of who speaks, both nonces and what is asked for, so a greeting that was listened to is worth
nothing later, and none of it can be changed. What follows is neither secret nor protected: where others may reach the
line, put it into a tunnel.

The name of a job is chosen by the client. When its connection is cut it connects again with the same job, without
firmware, and the agent gives it the board back; whether the board is where it was, the frames themselves say
(`FrameSession`). So an agent may be stopped and started meanwhile, and keeps nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import struct
import time
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from dovetail.documents import parse_document
from dovetail.errors import BoardError
from dovetail.sim.line import Board, LineGone, Link, host_and_port, unknown

DEFAULT_PORT = 4711
VERSION = 1
MOST_MESSAGE = 4096
"""Bytes of a message."""
MOST_IMAGE = 64 << 20
"""Bytes of firmware."""
LEAST_SECRET = 16
"""Bytes of a secret."""
GREETING_SECONDS = 10.0
_LOADING_SECONDS = 660.0
_LENGTH = struct.Struct(">I")


class MessageError(BoardError):
    """A message that is none."""


_Digits = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z", description="32 hexadecimal digits")]
_Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z", description="64 hexadecimal digits")]


class AgentGreeting(msgspec.Struct, frozen=True):
    """The first message of an agent."""

    dovetail_agent: Annotated[int, Meta(ge=VERSION, le=VERSION, description=f"the version of the greeting, {VERSION}")]
    nonce: str


class AgentRequest(msgspec.Struct, frozen=True):
    """A client's request to an agent."""

    board: Annotated[str, Meta(pattern=r"^[ -~]*\Z", description="the name of a board")]
    job: _Digits
    nonce: _Digits
    image: Annotated[int, Meta(ge=0, le=MOST_IMAGE, description=f"at most {MOST_IMAGE} bytes of firmware")]
    """Bytes of firmware that follow; 0 for none."""
    digest: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z", description="64 hexadecimal digits or none")]
    """Their SHA-256; empty for none."""
    proof: _Digest


class AgentAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The last message of an agent: its proof, or why it refuses and what to do."""

    proof: str = ""
    error: str = ""
    hint: str = ""


_Message = TypeVar("_Message", bound=msgspec.Struct)


def read_secret(path: Path) -> bytes:
    """The secret a file holds, without white space around it; raises BoardError where it is not there or too short."""
    try:
        found = path.read_bytes()[: 1 << 16].strip()
    except OSError as error:
        hint = "write the same file for both ends, such as with: openssl rand -hex 32"
        raise BoardError(f"the secret cannot be read: {error.strerror}", where=str(path), hint=hint) from None
    if len(found) < LEAST_SECRET:
        what = f"the secret has {len(found)} bytes; the least is {LEAST_SECRET}"
        raise BoardError(what, where=str(path), hint="make one: openssl rand -hex 32")
    return found


def proof(secret: bytes, who: str, *parts: str) -> str:
    """The proof that the speaker knows the secret: an HMAC-SHA256 in hexadecimal digits."""
    return hmac.new(secret, json.dumps([who, *parts]).encode(), hashlib.sha256).hexdigest()


def client_proof(secret: bytes, nonce: str, request: AgentRequest) -> str:
    """The proof of a client, for a nonce of the agent's."""
    parts = (nonce, request.nonce, request.board, request.job, str(request.image), request.digest)
    return proof(secret, "client", *parts)


def send(line: socket.socket, message: msgspec.Struct) -> None:
    """Send a message; raises OSError."""
    content = msgspec.json.encode(message)
    line.sendall(_LENGTH.pack(len(content)) + content)


def receive(line: socket.socket, kind: type[_Message], deadline: float) -> _Message:
    """The next message, which must have come by `deadline` (of `time.monotonic`); raises MessageError where it is none
    or too long, OSError where the line ends or the time is up."""
    (length,) = _LENGTH.unpack(exactly(line, _LENGTH.size, deadline))
    if not 2 <= length <= MOST_MESSAGE:
        raise MessageError(f"a message of {length} bytes", where="agent", hint=f"the most are {MOST_MESSAGE}")
    return parsed(exactly(line, length, deadline), kind)


def parsed(content: bytes, kind: type[_Message]) -> _Message:
    """The message some bytes are; raises MessageError."""
    hint = "docs/agent.md has the messages"
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise MessageError("no text in UTF-8", where="agent", hint=hint) from None
    return parse_document(text, "message", "json", kind, error=MessageError, hint=hint).value


def exactly(line: socket.socket, count: int, deadline: float) -> bytes:
    """So many bytes; raises OSError where the line ends before, or they have not come by `deadline`."""
    found = bytearray()
    while len(found) < count:
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError("it took too long")
        line.settimeout(left)
        content = line.recv(min(count - len(found), 1 << 16))
        if not content:
            raise ConnectionError("the line was closed")
        found += content
    return bytes(found)


def place_of(where: str) -> tuple[str, int, str]:
    """Host, port and board of "agent:HOST[:PORT]/BOARD"; raises BoardError."""
    kind, _, rest = where.partition(":")
    address, slash, board = rest.rpartition("/")
    if kind != "agent" or not slash or not address or not board:
        raise unknown(where)
    text = address if address.rpartition(":")[2].isdigit() else f"{address}:{DEFAULT_PORT}"
    return (*host_and_port(text, where), board)


def open_agent(board: Board, job: str, image: bytes = b"") -> Link:
    """The line to a board through its agent.

    Args:
        board: named "agent:HOST[:PORT]/BOARD", with the file of the secret.
        job: 32 hexadecimal digits; the same again to go on with a board.
        image: firmware the agent shall load before; empty for none.

    Raises:
        BoardError: the agent does not answer, does not know the secret, or refuses; says why. LineGone where it was
            there and the connection was cut.
    """
    host, port, name = place_of(board.where)
    if board.secret is None:
        raise BoardError("an agent asks for a secret", where=board.where, hint="give --secret FILE, the agent's")
    secret = read_secret(board.secret)
    failure: type[BoardError] = BoardError
    try:
        with socket.create_connection((host, port), GREETING_SECONDS) as line:
            failure = LineGone
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _greet(
                line,
                secret,
                AgentRequest(name, job, secrets.token_hex(16), len(image), _digest(image), "0" * 64),
                image,
                board,
            )
            line.setblocking(False)
            return Link(line.detach(), board.where)
    except (OSError, UnicodeError) as error:
        hint = "see that dovetail agent runs there, and that this computer may reach it"
        raise failure(f"the agent does not answer: {error}", where=board.where, hint=hint) from None
    except MessageError as error:
        what = f"what answers there is no agent: {error.what}"
        raise BoardError(what, where=board.where, hint="look at host and port") from None


def _greet(line: socket.socket, secret: bytes, request: AgentRequest, image: bytes, board: Board) -> None:
    nonce = receive(line, AgentGreeting, time.monotonic() + GREETING_SECONDS).nonce
    send(line, msgspec.structs.replace(request, proof=client_proof(secret, nonce, request)))
    line.settimeout(_LOADING_SECONDS)
    with contextlib.suppress(OSError):  # it may have refused already, and says so
        line.sendall(image)
    answer = receive(line, AgentAnswer, time.monotonic() + _LOADING_SECONDS)
    if answer.error:
        what, hint = answer.error[:400], answer.hint[:400]
        raise BoardError(f"the agent refuses: {what}", where=board.where, hint=hint or "ask who runs the agent")
    expected = proof(secret, "agent", request.nonce, nonce)
    if not hmac.compare_digest(answer.proof.encode(), expected.encode()):
        hint = "see that both ends have the same file for --secret"
        raise BoardError("the agent does not know the secret", where=board.where, hint=hint)


def _digest(image: bytes) -> str:
    return hashlib.sha256(image).hexdigest() if image else ""
