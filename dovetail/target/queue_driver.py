"""C drivers of engines with a queue of launches, from their own text and what all of them share.

files={"mine.c": queue_driver("my.package:driver/mine.c", base="MINE_BASE", busy="read_register(ROOM) != 2u")}
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import resources

WORDS = {"place": "offset", "offset": "offset", "masked": "", "counts": "", "engine": "", "pass": "", "taking": ""}
"""Default texts for the words between @ signs of a driver: registers by byte offset, and
there is one engine, whose counts are variables."""
SEVERAL = {"counts": "engine->", "engine": "engine", "pass": "engine, ", "taking": "struct engine *engine, "}
"""The words of a driver of several engines, each with its counts in a `struct engine`."""


def queue_driver(resource: str, **words: str) -> Callable[[], str]:
    """A file of `Engine.files`: a driver with the shared parts put in.

    Args:
        resource: the driver's own text, as a package resource "package:file". A line `@part@` in it stands for that
            part of queue_driver.c.txt.
        **words: what stands for the words between @ signs in parts, e.g. base, the address of the registers.

    Returns:
        A function that gives the text of the file; a KeyError there is a word or part without a meaning.
    """

    def text() -> str:
        package, _, path = resource.partition(":")
        own = resources.files(package).joinpath(path).read_text("utf-8")
        _, *shared = re.split(
            r"^@(\w+)@\n", resources.files(__package__).joinpath("queue_driver.c.txt").read_text("utf-8"), flags=re.M
        )
        parts = dict(zip(shared[::2], shared[1::2], strict=True))
        whole = re.sub(r"^@(\w+)@\n", lambda found: parts[found[1]], own, flags=re.M)
        return re.sub(r"@(\w+)@", lambda found: {**WORDS, **words}[found[1]], whole)

    return text
