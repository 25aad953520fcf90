"""The settings of an agent: a TOML file with `secret` (a file beside it), `allow`, and a table `boards.NAME` for each
board."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from dovetail.documents import read_document
from dovetail.records import Record
from dovetail.sim.agent import read_secret

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_WEEK = 7 * 86_400
_LINES = 'a line such as "serial:/dev/ttyUSB0:921600" or "tcp:127.0.0.1:4000", or "mesh:TARGET"'
_NAMES = "a name of 1 to 64 letters, digits, dots, hyphens and underscores"


class AgentBoard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A board."""

    where: Annotated[str, Meta(pattern="^(serial|tcp|mesh)(:|$)", description=_LINES)]
    """As `dovetail run --on` names it: serial or tcp; or "mesh:TARGET", a rack of emulated elements in this process."""
    load: Annotated[str, Meta(description="a command")] = ""
    """Command that loads firmware, with {elf} for its file; empty where none may be loaded."""
    seconds: Annotated[float, Meta(gt=0, le=_WEEK, description="seconds a job may take, at most a week")] = 3600.0
    """Time a job may take."""


BoardName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}\Z", description=_NAMES)]


class SettingsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file."""

    secret: Annotated[str, Meta(description="the name of the file that holds it")]
    boards: Annotated[
        dict[BoardName, AgentBoard],
        Meta(min_length=1, description="a table for each board: [boards.NAME] and where = ..."),
    ]
    allow: tuple[str, ...] | str = ("127.0.0.0/8", "::1/128")


class AgentSettings(Record):
    """Settings as the server uses them."""

    secret: bytes
    boards: Mapping[str, AgentBoard]
    allow: tuple[Network, ...]
    """Addresses that may connect."""


def read_settings(path: Path) -> AgentSettings:
    """The settings of a file.

    Raises:
        DovetailError: the file or the secret cannot be read, or an entry is missing or wrong; says which.
    """
    document = read_document(path, "toml", SettingsFile, hint="see docs/agent.md")
    file = document.value
    networks: list[Network] = []
    for number, text in enumerate([file.allow] if isinstance(file.allow, str) else file.allow):
        try:
            networks.append(ipaddress.ip_network(text))
        except ValueError:
            what = f'must be addresses or networks such as ["10.0.0.0/8"], not {text[:60]!r}'
            raise document.wrong(what, ("allow", number) if isinstance(file.allow, tuple) else ("allow",)) from None
    return AgentSettings(read_secret(path.parent / file.secret), file.boards, tuple(networks))
