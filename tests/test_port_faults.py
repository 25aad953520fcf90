"""The kit of standard faults in a small form: its edits fit the ports, and some of each kind are found and named.

`python scripts/port_faults.py` plants all of them and tries the default check (docs/benchmarks.md).
"""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dovetail.arrays import seeded_inputs
from dovetail.codegen.emit.project import write_project
from dovetail.compile import Options, compile_graph
from dovetail.errors import SimulationError
from dovetail.guests.check.cases import QUICK, Limits
from dovetail.guests.check.suite import Order, check
from dovetail.legalize import adapt
from dovetail.run import open_build, run_build
from dovetail.targets import load_target

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "port_faults.py"
STANDARD = 20
OF_LAUNCHES = (
    "queue overrun",
    "write outside the result",
    "ignored outer stride",
    "missing fence",
    "broadcast operand",
)
"""Faults of what a launch writes, and of several launches."""
TINY, SMALL = Limits(8_000, 1_500), Limits(30_000, 6_000)


def script() -> ModuleType:
    """scripts/port_faults.py."""
    spec = importlib.util.spec_from_file_location("port_faults", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["port_faults"] = module
    spec.loader.exec_module(module)
    return module


KIT = script()
FAULTS = {f"{fault.port} {fault.name}": fault for fault in KIT.faults()}
ON_MODEL = (
    "rounding",
    "clamp",
    "wrap",
    "zero point",
    "stride",
    "halo",
    "mode word",
    "per-channel index",
    "sign",
    "shift",
)
ON_CHIP = (
    ("macarray no wait", "dense"),
    ("macarray early finish", "dense"),
    ("macarray cache", "dense"),
    ("ne16 per-channel index", "dense"),
    ("diana bias", "dense"),
    ("diana swapped operands", "sum"),
    ("kestrel queue overrun", "convolution"),
    ("kestrel ignored outer stride", "convolution"),
    ("kestrel write outside the result", "convolution"),
    ("kestrel broadcast operand", "sum"),
    ("gemmini missing fence", "dense"),
    ("gemmini early finish", "mean"),
)


def test_every_port_has_every_fault(tmp_path: Path) -> None:
    names = [fault.name for fault in FAULTS.values() if fault.port == "macarray"]
    assert len(names) == STANDARD + len(OF_LAUNCHES) and names[STANDARD:] == list(OF_LAUNCHES)
    for port in ("macarray", "ne16", "kestrel", "gemmini"):
        assert [fault.name for fault in FAULTS.values() if fault.port == port] == names
    assert [fault.name for fault in FAULTS.values() if fault.port == "diana"] == names[:STANDARD]
    for number, fault in enumerate(FAULTS.values()):
        KIT.planted(fault, tmp_path / str(number))  # raises where an edit no longer fits


def test_what_was_found_is_kept_until_its_content_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault, kept, tried = FAULTS["diana bias"], tmp_path / "new" / "kept.jsonl", []

    def apart(fault: Any) -> Any:
        tried.append(fault.key)
        return KIT.Found("it is forgotten", True, 1)

    monkeypatch.setattr(KIT, "apart", apart)
    first = KIT.looked_up(fault, kept, False)
    assert KIT.looked_up(fault, kept, False) == first and tried == ["diana:bias"]
    other = replace(fault, edits=(*fault.edits, ("device.py", "WORDS = 4", "WORDS = 8")))
    assert KIT.looked_up(other, kept, True) == first and tried == ["diana:bias"]
    assert KIT.looked_up(other, kept, False).digest != first.digest and len(tried) == 2
    rows = {("diana", "bias"): (fault, first)}
    assert list(KIT.outdated(rows)) == []
    old = {("diana", "bias"): (fault, replace(first, digest="", revision="abc1"))}
    assert list(KIT.outdated(old))[-1] == "Measured at revision abc1."
    both = {**old, ("diana", "sign"): (FAULTS["diana sign"], KIT.looked_up(FAULTS["diana sign"], kept, False))}
    assert list(KIT.outdated(both))[-1] == "Measured at revision abc1: diana:bias."


def first_suspicion(fault: str, offload: str, simulator: str, folder: Path) -> str:
    """Of a small check of a port with that fault."""
    file = KIT.planted(FAULTS[fault], folder)
    target = load_target(str(file))
    found = check(target, Order(SMALL if simulator == "model" else TINY, (simulator,), (offload,)))
    assert found.findings, fault
    return found.findings[0].suspicions[0]


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose package is imported anew, in simulators' processes too."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{SCRIPT.parents[1]}")
    for name in [name for name in sys.modules if name.split(".")[0] == KIT.PACKAGE]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


@pytest.mark.parametrize("name", ON_MODEL)
def test_faults_of_a_model(name: str, importable: Path) -> None:
    fault = FAULTS[f"macarray {name}"]
    assert re.search(fault.means, first_suspicion(f"macarray {name}", "convolution", "model", importable))


@pytest.mark.parametrize(("name", "offload"), ON_CHIP)
def test_faults_on_the_chip(name: str, offload: str, importable: Path) -> None:
    assert re.search(FAULTS[name].means, first_suspicion(name, offload, "iss", importable))


def test_weights_in_the_wrong_order_are_no_halo(importable: Path) -> None:
    """Blocks of input channels before the taps: on layers of one block, of one tap or of one pixel other mistakes look
    the same."""
    edit = "__init__.py", "transpose((0, 2, 3, 4, 1, 5) if lanes == 8", "transpose((0, 4, 2, 3, 1, 5) if lanes == 8"
    target = load_target(str(KIT.planted(KIT.Fault("macarray", "packing", (edit,), ""), importable)))
    found = check(target, Order(QUICK, ("model",), ("convolution",))).findings
    assert [one.suspicions[0].split(":")[0] for one in found] == ["weight order"]


def test_a_run_names_writes_outside_of_results(importable: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The engine, its job, the address, and whose byte it is."""
    target = load_target(str(KIT.planted(FAULTS["macarray write outside the result"], importable)))
    folder = tmp_path_factory.mktemp("build")
    graph = adapt(KIT.network(False), target.policies[0])
    write_project(compile_graph(graph, target, Options()).project, folder / "net", replace=False)
    build = open_build(folder / "net", target)
    with pytest.raises(
        SimulationError, match=r"macarray writes outside of its result: \d+ bytes in .*, the first at 0x"
    ) as e:
        run_build(build, "iss", [seeded_inputs(build.manifest.inputs)])
    assert re.search(r"\d+ bytes (behind|before) the result of \w+; that byte is of \w+", e.value.what)
