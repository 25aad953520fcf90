"""`dovetail check` of ports that hang, raise, or do not build: what, where, what to do; and nothing is left running."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dovetail.cli.main import main
from dovetail.errors import DovetailError, MissingExtraError
from dovetail.guests.check.findings import finding_text
from dovetail.guests.check.suite import check
from dovetail.sim.verilator import find_verilator
from dovetail.sim.worker import WorkerSession
from dovetail.target import Target
from dovetail.target.devices import read_rtl
from dovetail.targets import load_target
from porting import TINY, order, port, port_file

VERILOG = Path(__file__).resolve().parents[1] / "dovetail" / "targets" / "macarray" / "rtl"
ENDLESS = '    while job["outputs"]:\n        pass\n    sums = np.zeros('


def no_verilator() -> str:
    """Why Verilog cannot be simulated here; empty where it can."""
    try:
        find_verilator()
    except MissingExtraError as error:
        return str(error)
    return ""


needs_verilator = pytest.mark.skipif(bool(no_verilator()), reason=no_verilator() or "Verilator is here")


def children() -> set[int]:
    """Processes whose parent is this one or the tests' own nursery of workers, which stays; those that have ended and
    were not collected too."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    own = {process for process, parent in parents.items() if parent == os.getpid()}
    nurseries = {process for process in own if "warm_workers.py" in Path(f"/proc/{process}/cmdline").read_text()}
    return (own - nurseries) | {process for process, parent in parents.items() if parent in nurseries}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No test leaves a process behind, running or as a zombie."""
    before = children()
    yield
    assert children() <= before


def first_text(target: Target, simulator: str, *offloads: str, seconds: float = 20.0) -> str:
    """The first finding of a very small check."""
    found = check(target, order(*offloads, simulators=(simulator,), seconds=seconds, limits=TINY))
    assert found.findings
    return finding_text(found.findings[0])


def hangs(text: str, last: str) -> None:
    """The text says so, and shows accesses up to the last."""
    assert "suspicion the port hangs" in text and "last register accesses: " in text, text
    assert last in text.partition("last register accesses: ")[2], text


def test_a_driver_that_never_starts_the_engine(tmp_path: Path) -> None:
    target = port(tmp_path, "SMALL_BASE + START, 1u", "SMALL_BASE + JOB, 1u", ".c")
    hangs(first_text(target, "iss", "dense"), "write 0x201010 = 0x1")


def test_a_driver_that_does_not_wait(tmp_path: Path) -> None:
    target = port(tmp_path, "while ((finished - ticket) >= 0x80000000u) {", "while (0) {", ".c")
    found = check(target, order("dense", simulators=("model", "iss"))).findings
    seen = ("results are read before they are there", "a launch is started while the engine has no room: the driver")
    assert len(found) == 1 and found[0].suspicions[0].startswith(seen)
    assert found[0].suspicions[1] == "the driver: all cases are right on model"


def test_a_device_without_an_end_on_the_chip(tmp_path: Path) -> None:
    target = port(tmp_path, "    sums = np.zeros(", ENDLESS)
    hangs(first_text(target, "iss", "dense", seconds=1.0), "write 0x0 = 0x1")


def test_a_device_without_an_end_alone(tmp_path: Path) -> None:
    text = first_text(port(tmp_path, "    sums = np.zeros(", ENDLESS), "model", "dense", seconds=0.2)
    hangs(text, "write 0x0 = 0x1")
    assert "small.py:" in text


def with_verilog(folder: Path, old: str = "", new: str = "", watchdog: int = 1_000_000) -> Target:
    """The MAC array with a bug in a copy of its Verilog."""
    sources = [Path(shutil.copy(source, folder)) for source in sorted(VERILOG.glob("*.v"))]
    for source in sources:
        source.write_text(source.read_text().replace(old, new) if old else source.read_text())
    assert not old or any(new in source.read_text() for source in sources)
    target = load_target("macarray")
    engine = target.engines[0]
    assert engine.rtl is not None
    rtl = replace(read_rtl(engine.rtl.arguments["rtl"]), sources=tuple(sources), watchdog=watchdog)
    return replace(target, engines=(replace(engine, rtl=rtl.device(engine.rtl.base, engine.rtl.size)),))


@pytest.mark.rtl
@needs_verilator
def test_verilog_that_hangs(tmp_path: Path) -> None:
    hangs(first_text(with_verilog(tmp_path, watchdog=20), "rtl", "dense"), "write 0x0 = 0x1")


@pytest.mark.rtl
@needs_verilator
def test_a_bug_in_the_verilog_alone(tmp_path: Path) -> None:
    target = with_verilog(tmp_path, "{33'd0, remainder > threshold}", "34'd0")
    found = check(target, order("dense", simulators=("model", "rtl"), limits=TINY))
    assert [(one.simulator, one.failed > 0) for one in found.tested] == [("model", False), ("rtl", True)]
    text = finding_text(found.findings[0]).partition("smallest")[0]
    assert "the driver or the Verilog: all cases are right on model" in text and "rounding" in text, text


@pytest.mark.rtl
@needs_verilator
def test_verilog_that_does_not_build(tmp_path: Path) -> None:
    target = with_verilog(tmp_path, "wire        is_left = !shift[5];", "wire        is_left = !shift[5]")
    with pytest.raises(DovetailError) as raised:
        check(target, order("dense", simulators=("rtl",)))
    assert raised.value.where.startswith("macarray_scale.v:") and "syntax error" in raised.value.what
    assert raised.value.hint


@pytest.mark.parametrize(
    ("old", "new", "simulator", "message"),
    [
        ("    weights = match.array(", "    weights = match.aray(", "model", "its cycles raise AttributeError: "),
        ("match.result.elements *", "match.result.elements // 0 *", "model", "its cycles raise ZeroDivisionError: "),
        (
            "    layer = layers.layer_of(match)\n    parameters",
            "    layer = layers.layer(match)\n    parameters",
            "model",
            "the port's own code: AttributeError: ",
        ),
        ("x_row=x.row,", "x_row=x.pitch,", "iss", "the port's own code: AttributeError: "),
        ('image(bus, job["y"]', 'image(bus, job["z"]', "iss", "the port's own code: .*KeyError: 'z'"),
        (
            "LIMITS = (",
            'LIMITS = (dt.Constraint("it must be", lambda m: m.nodes["x"], bool),',
            "model",
            "the limit 'it must be' raises KeyError: 'x'",
        ),
    ],
    ids=["attribute in cycles", "division in cycles", "pack", "commands", "device", "limit"],
)
def test_code_that_raises(tmp_path: Path, old: str, new: str, simulator: str, message: str) -> None:
    text = first_text(port(tmp_path, old, new), simulator, "dense")
    line = 1 + (tmp_path / "small.py").read_text().partition(new)[0].count("\n")
    assert re.search(message, text) and f"small.py:{line}" in text, text


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("import numpy as np\n", "import numpie as np\n", "small.py:10: ModuleNotFoundError: No module named 'numpie'"),
        ("def pack(match: dt.Match)", "def pack(match: dt.Match", "small.py:32: SyntaxError: "),
        ("TARGET = ", "TARGT = ", "small.py: the file does not define TARGET"),
        ('memory="L1"', 'memory="L3"', "small.py: there is no memory 'L3' for the operands of small"),
    ],
    ids=["import", "syntax", "no target", "unknown memory"],
)
def test_files_that_are_no_target(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    old: str,
    new: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    port_file(Path(), old, new)
    with pytest.raises(SystemExit) as ended:
        main(["check", "small.py", "--only", "dense"])
    said = capsys.readouterr().err
    assert ended.value.code == 1 and message in said and "what to do" in said


def test_what_is_left_of_a_worker_is_seen() -> None:
    before = children()
    session = WorkerSession("dovetail.sim.machine", timeout=20.0)
    assert len(children() - before) == 1
    session.close()
    assert children() == before


def test_an_old_report_stays_until_the_new_one_is_there(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text("old")
    with pytest.raises(SystemExit):
        main(["check", "no_such_target", "--junit", str(report), "--markdown", str(report)])
    assert report.read_text() == "old" and list(tmp_path.iterdir()) == [report]


@pytest.mark.parametrize("option", ["--junit", "--markdown"])
def test_a_report_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", "macarray", option, str(tmp_path / "missing" / "report")])
    said = capsys.readouterr().err
    assert ended.value.code == 1 and f"{tmp_path / 'missing' / 'report'}: cannot write it" in said
    assert "what to do: choose another file" in said


def test_engines_that_share_a_file_are_checked_one_by_one(tmp_path: Path) -> None:
    """The one driver of both needs the registers of both."""
    old = "void small_init(void)"
    more = "uint32_t other_finished(void) { return dovetail_mmio_read(OTHER_BASE + FINISHED); }"
    target = port(tmp_path, old, f"uint32_t other_finished(void);\n{more}\n\n{old}", ".c")
    engine = target.engines[0]
    assert engine.device is not None
    device = replace(engine.device, base=0x00203000, arguments={**engine.device.arguments, "name": "other"})
    other = replace(engine, name="other", offloads=(), defines={"OTHER_BASE": 0x00203000}, device=device)
    found = check(replace(target, engines=(engine, other)), order("dense", simulators=("iss",), limits=TINY))
    assert found.findings == [] and found.tested[0].cases
