"""Scheduled loops come with the package: nobody needs Exo to compile common layers, and what is shipped is what the
schedules give today."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from conftest import shared_dir
from dovetail.compile import Compiled, Options, compile_graph, prepare
from dovetail.guests import zoo
from dovetail.kernels.scheduled import store, write
from dovetail.kernels.scheduled.store import NOT_SHIPPED
from dovetail.targets import load_target
from networks import single

NETWORKS = ("ad_autoencoder_int8", "kws_dscnn_int8", "ic_resnet8_int8", "vww_mobilenetv1_int8")
WITHOUT_EXO = """
import sys, time
sys.modules["exo"] = None
from dovetail.cli.main import main
try:
    main()
finally:
    print(f"seconds {time.process_time():.2f}", file=sys.stderr)
"""


@pytest.fixture
def nothing_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache."""
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_exo(monkeypatch: pytest.MonkeyPatch, nothing_made: Path) -> None:
    """As after an installation without extras."""
    monkeypatch.setattr(write, "find_spec", lambda name: None)


def compiled(model: Path, target: str) -> Compiled:
    machine = load_target(target)
    return compile_graph(prepare(model, machine, Options()), machine, Options(), interpret=False)


@pytest.mark.usefixtures("no_exo")
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("target", ["cortex_m4", "riscv_dot4", "riscv_xpulp", "vexriscv_cfu"])
def test_the_layers_of_the_networks_are_shipped(name: str, target: str) -> None:
    unit = compiled(shared_dir() / "models" / "mlperf_tiny" / f"{name}.tflite", target).unit
    kernels = [kernel for kernel, _ in unit.calls.values()]
    assert any(kernel.instructions for kernel in kernels)
    assert not any(NOT_SHIPPED in kernel.notes for kernel in kernels), "run scripts/ship_loops.py"
    assert not any(NOT_SHIPPED in note.text for note in unit.notes)


@pytest.mark.parametrize("target", ["riscv_dot4"])
def test_what_is_shipped_is_what_is_scheduled(
    target: str, tmp_path: Path, nothing_made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every layer of the digits network, scheduled afresh by Exo."""
    pytest.importorskip("exo")
    monkeypatch.setattr(store, "_shipped", dict)
    model = tmp_path / "digits.onnx"
    model.write_bytes(zoo.build("digits"))
    compiled(model, target)
    made = {path.name.partition("-")[0]: path.read_bytes() for path in (nothing_made / "loops").glob("*.json")}
    assert made
    with zipfile.ZipFile(store.SHIPPED) as archive:
        for key, data in made.items():
            assert archive.read(f"{key}.json") == data, "run scripts/ship_loops.py"


@pytest.mark.usefixtures("no_exo")
def test_other_layers_are_computed_without_instructions_and_that_is_told() -> None:
    target = load_target("riscv_dot4")
    unit = compile_graph(single(7, 13, 11), target, Options()).unit
    (sentence,) = [note.text for note in unit.notes if note.text.startswith("layers computed without")]
    assert "1; " in sentence and "dovetail[loops]" in sentence
    assert not any(kernel.instructions for kernel, _ in unit.calls.values())


def test_damaged_loops_are_made_again(nothing_made: Path) -> None:
    """What lies in the cache may be anything."""
    made = store.Loops((store.CFunction("f", ("a",), ("a[0] = 1;",)),), ("one",), ())
    assert store.kept_loops("something", lambda: made) == made
    (place,) = (nothing_made / "loops").glob("*.json")
    assert store.kept_loops("something", lambda: None) == made
    for damage in (b"", b"[]", b"\xff\xfe", b'{"functions": 1, "used": 2, "notes": 3}', place.read_bytes()[:-5]):
        place.write_bytes(damage)
        assert store.kept_loops("something", lambda: made) == made
        assert store.kept_loops("something", lambda: None) == made


def test_a_common_network_is_compiled_in_five_seconds(tmp_path: Path) -> None:
    """From a cold cache, without Exo, start-up included."""
    model = shared_dir() / "models" / "mlperf_tiny" / "kws_dscnn_int8.tflite"
    words = ["compile", str(model), "--target", "cortex_m4", "-o", str(tmp_path / "build")]
    environment = {**os.environ, "DOVETAIL_CACHE": str(tmp_path / "cache")}
    made = subprocess.run([sys.executable, "-c", WITHOUT_EXO, *words], capture_output=True, text=True, env=environment)
    assert made.returncode == 0, made.stderr
    assert "instruction" not in made.stderr, "an instruction of the core is not used, and that is told"
    assert float(made.stderr.rpartition("seconds ")[2]) < 5
