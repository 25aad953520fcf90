"""Exceptions in functions of a port: whose line, what was asked for, the port's own stack and never ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.cli.main import main
from dovetail.guests import zoo
from porting import port_file

WRONG = {
    "cycles": (
        'weights = match.array("weights")',
        'weights = match.array("nothing")',
        ("KeyError: 'nothing'", "in dovetail's array", "the cycles of convolution for", " in cost: "),
    ),
    "packer": (
        "layer = layers.layer_of(match)\n    parameters",
        "layer = layers.layer_of(None)\n    parameters",
        ("AttributeError", "scratch of convolution for|scratch of dense for", " in pack: "),
    ),
    "commands": (
        "x = layers.image_of(",
        "x = 1 // 0 + layers.image_of(",
        ("ZeroDivisionError|TypeError", "the commands of convolution for", " in commands: "),
    ),
    "constraint": (
        "layers.NO_DILATION",
        'dt.Constraint("x must be", lambda m: m.nodes["gone"], lambda v: True)',
        ("KeyError: 'gone'", "the limits of dense for", " in <lambda>: "),
    ),
    "device": ("return 20 + -(-macs(job) // 16)\n\n\ndef compute", "return 1 // 0\n\n\ndef compute", (" in cycles: ",)),
    "device's arithmetic": (
        "y_zero, low, high)\n\n\ndef image",
        "y_zero, low, hig)\n\n\ndef image",
        (" in compute: ",),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_function_that_raises_is_told_with_its_own_stack(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new, said = WRONG[name]
    file = port_file(tmp_path, old, new)
    model = tmp_path / "digits.onnx"
    model.write_bytes(zoo.build("digits"))
    monkeypatch.chdir(tmp_path)
    for words in (["compile", str(model), "-o", "build"], ["run", "build"]):
        with pytest.raises(SystemExit) as ended:
            main([*words, "--target", str(file)])
        if ended.value.code:
            break
    text = capsys.readouterr().err
    assert ended.value.code == 1 and "Traceback" not in text
    for part in said:
        assert any(choice in text for choice in part.split("|")), text
    assert f"{file.name}:" in text and "/dovetail/" not in text
    assert "what to do: mend the file there" in text


def test_a_bug_of_ours_is_not_blamed_on_the_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no function of the port is running, the stack is shown."""
    model = tmp_path / "digits.onnx"
    model.write_bytes(zoo.build("digits"))
    monkeypatch.setattr("dovetail.schedule.tiles.clock.packed_bytes", None)
    with pytest.raises(TypeError):
        main(["compile", str(model), "--target", str(port_file(tmp_path)), "-o", str(tmp_path / "build")])
