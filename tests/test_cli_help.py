"""The help of every command: options that say what they do, examples that can be typed as they stand; and how the
command line ends."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from enum import Enum
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import typer

from command_line import dovetail
from dovetail import plugins
from dovetail.cli import options
from dovetail.cli.main import all_commands, command_line, main
from dovetail.errors import DovetailError
from dovetail.fields import axes_of
from dovetail.guests import zoo
from dovetail.guests.mesh.partition import Objective
from dovetail.guests.ptq import Method
from dovetail.ir.operators.arithmetic import Rounding
from dovetail.kernels import Optimize
from dovetail.options import flags_of
from dovetail.schedule.assign.pins import parse_pins
from dovetail.sim.line import KINDS
from dovetail.targets import BUILT_IN, load_target
from porting import port_file

COMMANDS = all_commands()
GROUP: Any = typer.main.get_command(command_line(COMMANDS))
EXAMPLES = [
    (name, text)
    for name, command in GROUP.commands.items()
    for text in re.findall(r"^\s*Example: (.*)$", command.help or "", re.MULTILINE)
]
MODELS = (".tflite", ".onnx", ".keras", ".h5")


def parsed(text: str) -> dict[str, Any]:
    """What an example asks for, by the parser of the command line itself; nothing is run."""
    program, name, *arguments = shlex.split(text)
    assert program == "dovetail"
    return dict(GROUP.commands[name].make_context(name, arguments).params)


@pytest.mark.parametrize("name", sorted(GROUP.commands))
def test_commands_and_options_say_what_they_do(name: str) -> None:
    command = GROUP.commands[name]
    assert command.help and command.help.strip().split("\n")[0].rstrip().endswith((".", ":"))
    assert [one for one, _ in EXAMPLES if one == name], f"dovetail {name} has no example"
    assert [option.name for option in command.params if option.name != "help" and not option.help] == []


@pytest.mark.parametrize(("name", "text"), EXAMPLES)
def test_examples_can_be_typed(name: str, text: str) -> None:
    """Their options exist, and what they name is there: targets, models of the zoo, sizes, ways to a board."""
    assert text.split()[:2] == ["dovetail", name]
    asked = parsed(text)
    target = asked.get("target")  # of compare, one for each build
    named = [target] if isinstance(target, str) else list(target or ())
    assert all(one in BUILT_IN or one.endswith(".py") for one in named)
    model = asked.get("model")
    assert model is None or Path(model).suffix in MODELS
    if name == "zoo":
        assert asked["name"] in zoo.names()
    if name == "sweep":
        assert axes_of(load_target(target), asked["settings"])
    parse_pins(asked.get("pin") or ())
    assert asked.get("on") is None or asked["on"].startswith(tuple(kind.split(":")[0].split("[")[0] for kind in KINDS))


def test_examples_with_a_mistake_are_noticed() -> None:
    for wrong in ("dovetail compile net.tflite --tarjet ne16 -o x", "dovetail compile net.tflite", "dovetail zoo a b"):
        with pytest.raises(Exception, match=r"(?i)no such option|missing|unexpected"):
            parsed(wrong)


@pytest.mark.parametrize(
    ("name", "option", "kind", "left_out"),
    [
        ("compile", "rounding", Rounding, {"wide", "down", "away", "float32"}),  # engines have them
        ("compile", "optimize", Optimize, set()),
        ("sweep", "optimize", Optimize, set()),
        ("mesh", "objective", Objective, set()),
        ("quantize", "method", Method, set()),
    ],
)
def test_choices_are_those_of_the_library(name: str, option: str, kind: type[Enum], left_out: set[str]) -> None:
    given = get_type_hints(options.expanded(COMMANDS[name]))[option]
    choices = next((kind for kind in get_args(given) if get_origin(kind) is Literal), given)  # of one or none
    assert {*get_args(choices)} == {one.value for one in kind} - left_out


# ---- target files


@pytest.mark.parametrize(
    ("text", "where", "what", "hint"),
    [
        ("x = 1\nTARGET = (\n", ":2", "SyntaxError: '(' was never closed", "mend the Python there"),
        ("def f():\n    return 1 / 0\n\n\nf()\n", ":2", "ZeroDivisionError: division by zero", "mend the file there"),
        ("\nimport nowhere\n", ":2", "ModuleNotFoundError: No module named 'nowhere'", "install that package"),
        ("from pathlib import Path\nPath('gone').read_text()\n", ":2", "FileNotFoundError: ", "mend the file there"),
        ("import sys\nsys.exit(3)\n", ":2", "SystemExit: 3", "mend the file there"),
        ("raise KeyError\n", ":1", "KeyError", "mend the file there"),
        ("TARGET = 3\n", "", "does not define TARGET", "end the file with TARGET = Target(...)"),
    ],
)
def test_target_files_that_do_not_import(
    text: str, where: str, what: str, hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The innermost line of the file itself, what the exception says, and no stack."""
    path = tmp_path / "mine.py"
    path.write_text(text)
    assert dovetail("explain", "net.tflite", "--target", path) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"error: {path}{where}: ") and what in told and f"what to do: {hint}" in told
    assert "Traceback" not in told and told.count("\n") == 2


def test_a_target_file_whose_import_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults of what it imports are told with its own line; a declaration that contradicts itself as ever."""
    (tmp_path / "helping_the_target.py").write_text("def (\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "mine.py"
    path.write_text("\n\nimport helping_the_target\n")
    with pytest.raises(DovetailError) as raised:
        load_target(str(path))
    assert raised.value.where == f"{path}:3" and raised.value.what == "SyntaxError: invalid syntax"
    path.write_text(
        "from dovetail.target.description import with_cores\nfrom dovetail.targets.riscv import TARGET\n"
        "TARGET = with_cores(TARGET, 99)\n"
    )
    with pytest.raises(DovetailError, match="99 cores are asked for"):
        load_target(str(path))


# ---- ends


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("x_row=x.row,", "x_row=x.pitch,", "AttributeError: 'Image' object has no attribute 'pitch'"),
        ("LIMITS = (", 'LIMITS = (dt.Constraint("it must be", lambda m: m.nodes["new"], bool),', "KeyError: 'new'"),
        (
            "    layer = layers.layer_of(match)\n    parameters",
            "    layer = np.stack([])\n    parameters",
            "ValueError: ",
        ),
    ],
    ids=["commands", "limit", "in a library it calls"],
)
def test_a_target_files_functions_that_raise(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    old: str,
    new: str,
    message: str,
) -> None:
    """The line in the user's file, no stack."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits.onnx").write_bytes(zoo.build("digits"))
    port_file(Path(), old, new)
    assert dovetail("compile", "digits.onnx", "--target", "small.py", "-o", "build") == 1
    line = 1 + (tmp_path / "small.py").read_text().partition(new)[0].count("\n")
    said = capsys.readouterr().err
    assert re.search(rf"^error: small\.py:({line}|{line + 1}): ", said, re.MULTILINE) and message in said
    assert "what to do: mend" in said and "Traceback" not in said
    assert not (tmp_path / "build").exists()


def test_a_bug_shows_its_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("broken", "no_such_module:TARGET", plugins.TARGETS)
    monkeypatch.setattr("dovetail.plugins.bundled", lambda group: {"broken": point})
    with pytest.raises(ModuleNotFoundError):
        main(["compile", "net.onnx", "--target", "broken", "-o", str(tmp_path / "build")])


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(name: str) -> None:
        """What Ctrl-C does to a command."""
        raise KeyboardInterrupt

    monkeypatch.setattr("dovetail.target.registry.load_target", interrupted)
    assert dovetail("targets") == 130
    assert capsys.readouterr() == ("", "stopped\n")


CALL = "import sys; from dovetail.cli.main import main; main(sys.argv[1:])"


def test_ctrl_c_in_the_shell(tmp_path: Path) -> None:
    """The signal itself, while a command is at work on a target file that never ends."""
    (tmp_path / "mine.py").write_text("import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(60)\n")
    call = [sys.executable, "-c", CALL, "explain", "net.tflite", "-t", "mine.py"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(call, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    until = time.monotonic() + 60
    while not (tmp_path / "begun").exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == (b"", b"stopped\n") and process.returncode == 130


@pytest.mark.parametrize("arguments", [("targets",), ("zoo",), ("compile", "--help")], ids=" ".join)
def test_a_reader_that_leaves_is_no_error(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """`dovetail targets | head -1`, when head has gone: nothing is said."""
    reading, writing = os.pipe()
    os.close(reading)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    call = [sys.executable, "-c", CALL, *arguments]
    try:
        told = subprocess.run(call, cwd=tmp_path, env=environment, stdout=writing, stderr=subprocess.PIPE, timeout=120)
    finally:
        os.close(writing)
    assert told.stderr == b"" and told.returncode != 2


def test_the_help_names_every_way_to_a_board() -> None:
    assert all(kind in flags_of(options.BoardOptions)["on"].help for kind in KINDS)
