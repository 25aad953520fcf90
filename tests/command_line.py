"""The command line in the process of a test."""

from __future__ import annotations

import pytest

from dovetail.cli.main import main


def dovetail(*arguments: object) -> int:
    """Run a command; its exit status."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one message of a command that must end with status 1, print nothing but notes besides, and say what to do."""
    capsys.readouterr()
    assert dovetail(*arguments) == 1
    captured = capsys.readouterr()
    notes, _, said = captured.err.rpartition("error: ")
    assert all(line.startswith(("note, ", "warning, ")) for line in notes.splitlines())
    assert "what to do: " in said and "Traceback" not in said
    assert captured.out == ""
    return captured.err
