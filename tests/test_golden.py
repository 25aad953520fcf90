"""Emitted C, programs and reports of a small network as texts that people read: tests/golden.

`pytest tests/test_golden.py --update` writes them anew; the difference is then what a review looks at.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from command_line import dovetail
from dovetail.version import __version__

GOLDEN = Path(__file__).with_name("golden")
TARGETS = ("riscv", "cortex_m4", "ne16", "vta", "diana", "kestrel", "macarray", "maeri")
VARIANTS = {"riscv_small": ("riscv", "--optimize", "size"), "riscv_2_cores": ("riscv", "--cores", "2")}
"""More compiles: name -> target and options."""
KERNELS = ("riscv", "riscv_small", "ne16")
"""Compiles whose kernels are kept, too."""
FIGURES = ("macs", "memory", "sizes", "stack", "layers")
MEASURED = ("bound", "cycles", "engine_cycles", "estimated", "waiting")
"""Of a layer; tests/cycles.csv has a budget of cycles."""


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The zoo's smallest network."""
    path = tmp_path_factory.mktemp("golden") / "digits.onnx"
    assert dovetail("zoo", "digits", "-o", path) == 0
    return path


def held_to(name: str, text: str, update: bool) -> None:
    """Compare a text with the one in tests/golden, or write it there."""
    path, text = GOLDEN / name, re.sub(rf"\b{re.escape(__version__)}\b", "VERSION", text)
    if update:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.is_file(), f"there is no {name}: pytest tests/test_golden.py --update"
    assert text == path.read_text(encoding="utf-8"), (
        f"{name} differs: if it shall, pytest tests/test_golden.py --update"
    )


@pytest.mark.quick
@pytest.mark.parametrize("name", [*TARGETS, *VARIANTS])
def test_emitted_c_and_the_program(
    name: str, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], update: bool
) -> None:
    target, *options = VARIANTS.get(name, (name,))
    capsys.readouterr()
    assert dovetail("compile", digits, "-t", target, "-o", tmp_path / "net", "--print-program", *options) == 0
    program = capsys.readouterr().out.replace(str(tmp_path), "BUILD").replace(str(digits), "digits.onnx")
    held_to(f"{name}/program.txt", program, update)
    for file in ("digits.h", "digits.c", *(["digits_kernels.c"] if name in KERNELS else [])):
        held_to(f"{name}/{file}", (tmp_path / "net" / "src" / file).read_text(encoding="utf-8"), update)


@pytest.mark.quick
@pytest.mark.parametrize("target", ["riscv", "ne16"])
def test_the_figures_of_a_report(target: str, digits: Path, tmp_path: Path, update: bool) -> None:
    pytest.importorskip("unicorn", reason="the simulator needs dovetail[iss]")
    assert dovetail("compile", digits, "-t", target, "-o", tmp_path / "net") == 0
    assert dovetail("run", tmp_path / "net", "--json", tmp_path / "report.json") == 0
    report = json.loads((tmp_path / "report.json").read_text())
    kept = {key: report[key] for key in FIGURES}
    assert kept.keys() == set(FIGURES)
    kept["layers"] = [{key: layer[key] for key in layer.keys() - set(MEASURED)} for layer in kept["layers"]]
    held_to(f"{target}/report.json", json.dumps(kept, indent=1, sort_keys=True) + "\n", update)
