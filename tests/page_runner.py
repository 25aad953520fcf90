"""Tries the blocks of a page (tests/page_blocks.py) in a folder of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from page_blocks import FILE, NEAR, Block, commands, renewed

REPOSITORY = Path(__file__).resolve().parents[1]
SHELL = set("|&;<>$`*")
"""Characters that make a command one for a shell."""


@dataclass
class Runner:
    """A page's folder and names, what the last block printed, and how many blocks were not executed."""

    folder: Path
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "page"})
    printed: str | None = None
    written: set[str] = field(default_factory=set)
    update: Path | None = None
    """The page, if its figures are to be written anew."""

    def try_block(self, block: Block) -> None:
        """Do with a block what its language asks for; AssertionError where the page is wrong."""
        shown_after, self.printed = self.printed, None
        if block.language == "sh" and "not run" in block.said:
            for command in commands(block.text):
                if command.startswith("dovetail "):
                    options_exist(command)
                else:
                    look_at(command, block.place)
            return
        if "not run" in block.said:
            return
        if block.file and block.file not in self.written and (self.folder / block.file).exists():
            missing = differs_from_file(block.text, (self.folder / block.file).read_text())
            assert not missing, f"{block.place}: this line is not in {block.file}, or not here: {missing}"
        elif block.file:
            with (self.folder / block.file).open("a" if block.file in self.written else "w") as out:
                out.write(block.text)
            self.written.add(block.file)
        elif block.language == "text":
            assert shown_after is not None, f"{block.place}: what printed this? Say why it is not executed"
            lines, missing = renewed(block.text, shown_after, 1.0 if self.update else NEAR)  # exact lines come first
            if self.update and not missing:
                self.write(block, lines)
            assert not missing, f"{block.place}: not printed here:\n{missing}\nprinted was:\n{shown_after}"
            self.printed = shown_after
        elif block.language == "sh":
            *first, last = commands(block.text)
            status = int(block.said.get("status", "0"))
            self.printed = "".join(self.command(command, 0, block) for command in first)
            self.printed += self.command(last, status, block)
        elif block.language == "python":
            self.printed = self.python(block)
        else:
            check_text(block, self.folder)

    def write(self, block: Block, lines: list[str]) -> None:
        """Put today's lines in the place of a block of the page."""
        assert self.update is not None
        page, begin = self.update.read_text(encoding="utf-8").splitlines(), block.line - 1
        page[begin : begin + len(lines)] = lines
        self.update.write_text("\n".join(page) + "\n", encoding="utf-8")

    def python(self, block: Block) -> str:
        """Execute a block of Python; what it printed."""
        code = compile("\n" * (block.line - 1) + block.text, block.page, "exec")
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, self.names)
        return out.getvalue()

    def command(self, command: str, wanted: int, block: Block) -> str:
        """Run a command, which shall end with the status that is wanted; what it printed on both of its outputs."""
        if look_at(command, block.place):
            return ""
        words = shlex.split(command)
        plain = words[0] == "dovetail" and not SHELL & set(re.sub(r"'[^']*'", "", command))
        status, text = in_process(words[1:]) if plain else in_shell(command, self.folder)
        assert status == wanted, f"{block.place}: `{command}` ends with status {status}:\n{text}"
        return text


def in_process(arguments: list[str]) -> tuple[int, str]:
    """Status and output of the command line."""
    from dovetail.cli.main import main

    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            main(arguments)
    except SystemExit as ended:
        return int(ended.code or 0), out.getvalue()
    return 0, out.getvalue()


def in_shell(command: str, folder: Path) -> tuple[int, str]:
    """The same of any command, with this Python as `python` and this tree's `dovetail`."""
    programs = folder / ".programs"
    programs.mkdir(exist_ok=True)
    call = "import sys; sys.argv[0] = 'dovetail'; from dovetail.cli.main import main; main()"
    for name, arguments in (("python", ""), ("dovetail", f' -c "{call}"')):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{arguments} "$@"\n')
        (programs / name).chmod(0o755)
    paths = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY)}
    answer = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, **paths},
        text=True,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )
    return answer.returncode, answer.stdout


def differs_from_file(shown: str, text: str) -> str:
    """The first line of a block that does not stand in a file a command has written, or empty; as `differs`, without
    blank lines."""

    def told(lines: str) -> str:
        return "\n".join(line for line in lines.splitlines() if line.strip() and not FILE.match(line))

    return renewed("...\n" + told(shown), told(text), 0.0)[1]


def look_at(command: str, place: str) -> bool:
    """Check a command of which only the names are checked; False where it is to be run.

    `make GOAL`, `pip install 'dovetail[EXTRA]'`, `python scripts/X.py` and `pytest tests/X.py` take minutes or the
    network.
    """
    words = shlex.split(command, comments=True)
    if words[0] == "make" and words[1] != "-C":
        assert re.search(rf"^{words[1]}:", (REPOSITORY / "Makefile").read_text(), re.MULTILINE), f"{place}: {command}"
    elif words[:2] == ["pip", "install"]:
        extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for asked in re.findall(r"\[(.*)\]", words[2]):
            assert set(asked.split(",")) <= set(extras), f"{place}: there is no extra of '{asked}'"
    elif words[0] in ("python", "pytest") and words[1].startswith(("scripts/", "tests/")):
        assert (REPOSITORY / words[1]).is_file(), f"{place}: there is no {words[1]}"
    else:
        return False
    return True


def options_exist(command: str) -> None:
    """Let the command line read a command's words without doing anything; raises where it would refuse them."""
    import typer

    from dovetail.cli.main import all_commands, command_line

    words = shlex.split(command, comments=True)
    group = typer.main.get_command(command_line(all_commands()))
    found = group.commands[words[1]]  # type: ignore[attr-defined]
    found.make_context(words[1], words[2:])


def check_text(block: Block, folder: Path) -> None:
    """Parse, compile or lint a block that is no program by itself."""
    match block.language:
        case "json":
            for line in [block.text] if block.text.startswith(("{\n", "[")) else block.text.splitlines():
                json.loads(line)
        case "yaml":
            yaml.safe_load(block.text)
        case "toml":
            tomllib.loads(block.text)
        case "c":
            compiles(block, folder)
        case "verilog":
            lints(block, folder)
        case "diff":
            stands(block)
        case _:
            raise AssertionError(f"{block.place}: nothing is known about blocks of '{block.language}'")


def compiles(block: Block, folder: Path) -> None:
    """A block of C, against the headers every build has."""
    from dovetail.codegen.build.toolchain import find_compiler

    source = folder / "block.c"
    source.write_text(block.text)
    include = REPOSITORY / "dovetail" / "codegen" / "emit" / "runtime"
    compiler = find_compiler("host")
    command = [*compiler.command, "-std=c99", "-Wall", "-Werror", "-fsyntax-only", f"-I{include}", str(source)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, f"{block.place}: {answer.stderr}"


def stands(block: Block) -> None:
    """What a change has added stands in the file it names, as does what is shown around it."""
    there: set[str] = set()
    for line in block.text.splitlines():
        if line.startswith("--- "):
            there = {known.strip() for known in (REPOSITORY / line[4:]).read_text(encoding="utf-8").splitlines()}
        elif not line.startswith("-"):
            assert line[1:].strip() in there, f"{block.place}: this line is not in the file: {line}"


def lints(block: Block, folder: Path) -> None:
    """A block of Verilog, which may be the inside of a module; nothing without Verilator."""
    from dovetail.errors import MissingExtraError
    from dovetail.sim.verilator import find_verilator

    try:
        verilator = find_verilator()
    except MissingExtraError:
        return
    text = block.text if "module" in block.text else f"module block;\n{block.text}endmodule\n"
    (folder / "block.v").write_text(text)
    answer = subprocess.run(
        [verilator.program, "--lint-only", "-Wno-fatal", "block.v"],
        cwd=folder,
        text=True,
        env={**os.environ, "VERILATOR_ROOT": str(verilator.root)},
        capture_output=True,
        check=False,
    )
    assert answer.returncode == 0, f"{block.place}: {answer.stderr}"
