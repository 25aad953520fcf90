"""`dovetail agent`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from dovetail.cli.console import note, say
from dovetail.cli.options import argument, option
from dovetail.errors import DovetailError


def agent(
    settings: Annotated[Path, argument(help="A TOML file: the secret, who may connect, and the boards.")],
    listen: Annotated[
        str, option(metavar="HOST:PORT", help="Where to listen; 127.0.0.1:4711 if not given.")
    ] = "127.0.0.1:4711",
) -> None:
    """Lend the boards of this computer to others on the network, until Ctrl-C.

    Runs and tunings elsewhere name one of them: dovetail run build/net --on agent:HOST/BOARD --secret FILE

    Example: dovetail agent bench.toml --listen 0.0.0.0:4711
    """
    from dovetail.guests.agent.server import Agent
    from dovetail.guests.agent.settings import read_settings

    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise DovetailError(f"'{listen}' is not HOST:PORT", where="--listen", hint="such as 0.0.0.0:4711")
    server = Agent(read_settings(settings), host.strip("[]"), int(port), note)
    try:
        say(f"listening at {server.address[0]}:{server.address[1]}")
        server.serve()
    finally:
        server.close()
