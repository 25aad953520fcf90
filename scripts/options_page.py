"""Writes docs/reference/options.md: the options of a compilation, from the fields of `dovetail.options.Options`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args, get_origin

from dovetail.options import Flag, Options, flags_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "options.md"


def _words(name: str, own: Flag) -> str:
    """An option as it is typed, with its values."""
    option = own.names[0] if own.names else f"--{name.replace('_', '-')}"
    kinds = [kind for kind in (own.kind, *get_args(own.kind)) if get_origin(kind) is Literal]
    values = "\\|".join(get_args(kinds[0])) if kinds else own.more.get("metavar", "").replace("|", "\\|")
    return f"`{option}`" if own.kind is bool else f"`{option} {values or 'VALUE'}`"


def page() -> str:
    """The whole page."""
    lines = [
        "# Options of a compilation",
        "",
        "Written by `python scripts/options_page.py` from `dovetail/options.py`. Do not edit.",
        "",
        "`dovetail compile` takes them on the command line. From Python they are keywords of `dovetail.compile`, or",
        "fields of `dovetail.Options`.",
        "",
        "| command line | keyword | meaning |",
        "|---|---|---|",
    ]
    lines += [f"| {_words(name, own)} | `{name}` | {own.help} |" for name, own in flags_of(Options).items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
