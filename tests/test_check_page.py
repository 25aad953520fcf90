"""`check`, `new-target` and `vectors` from the command line: status, files, messages, help."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import dovetail
from dovetail.guests.check import findings, suite


def test_findings_give_status_1_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert dovetail("new-target", "mine") == 0
    path = tmp_path / "mine.py"
    path.write_text(path.read_text().replace("np.int64) + bias", "np.int64)"))
    wish = ["check", "mine.py", "--only", "dense", "--sim", "model", "--junit", "c.xml", "--markdown", "c.md"]
    assert dovetail(*wish) == 1
    assert "suspicion the bias is forgotten" in capsys.readouterr().out
    assert "the bias is forgotten" in (tmp_path / "c.xml").read_text()
    assert "the bias is forgotten" in (tmp_path / "c.md").read_text()


OWN_CLASS = '''

class Mine(JobDevice):
    """A class of the port's own, which does a command without the driver."""

    def carry_out(self, words):
        self._compute(dict(zip(NAMES, words, strict=True)), self.bus)
'''


def test_a_class_of_ones_own_is_tried_without_its_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert dovetail("new-target", "mine") == 0
    path = tmp_path / "mine.py"
    text = path.read_text().replace(
        "\nENGINE =", "\nJOBS = REGISTERS.device('mine', str(HERE), base=0x00201000)\nENGINE ="
    )
    device = 'dt.DeviceModel(f"{HERE}:Mine", JOBS.base, JOBS.size, JOBS.arguments)'
    text = text.replace('REGISTERS.device("mine", str(HERE), base=0x00201000)', device)
    head = "from dovetail.sim.launch_queue import JobDevice\n"
    own = OWN_CLASS.replace("NAMES", "REGISTERS.names")
    path.write_text(text.replace("import numpy as np\n", f"import numpy as np\n{head}", 1) + own)
    assert dovetail("check", "mine.py", "--only", "dense", "--sim", "model") == 0
    assert "mine: no findings" in capsys.readouterr().out
    path.write_text(path.read_text().replace("np.int64) + bias", "np.int64)"))
    assert dovetail("check", "mine.py", "--only", "dense", "--sim", "model") == 1
    assert "suspicion the bias is forgotten" in capsys.readouterr().out
    path.write_text(path.read_text().replace("def carry_out", "def other"))
    assert dovetail("check", "mine.py", "--only", "dense", "--sim", "model") == 1
    assert "give its class carry_out(words)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "riscv"], "it has no engine to check"),
        (["check", "ne16", "--sim", "model"], "has no Python model that works by itself"),
        (["check", "macarray", "--sim", "soup"], "there is no simulator 'soup'"),
        (["check", "macarray", "--only", "soup"], "there is no offload soup"),
        (["vectors", "riscv", "-o", "v"], "it has no engine with registers"),
        (["new-target", "Mine!"], "cannot name a target"),
    ],
)
def test_wrong_wishes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert dovetail(*arguments) == 1
    said = capsys.readouterr().err
    assert message in said and "what to do" in said


@pytest.mark.parametrize("command", ["check", "new-target", "vectors"])
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert dovetail(command, "--help") == 0
    assert f"Example: dovetail {command}" in capsys.readouterr().out


def test_an_interrupted_check_says_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*given: object, **named: object) -> findings.Checked:
        return findings.Checked("macarray", [], [findings.Tested("macarray", "dense", "model", 9, 0, 4)], True)

    monkeypatch.setattr(suite, "check", stopped)
    assert dovetail("check", "macarray", "--markdown", str(tmp_path / "found.md")) == 130
    said = capsys.readouterr()
    assert "stopped after 5 cases: no findings" in said.out and "stopped after 5" in (tmp_path / "found.md").read_text()
    assert said.err.startswith("macarray: reading the target\n")  # at once, also where stderr is no terminal
