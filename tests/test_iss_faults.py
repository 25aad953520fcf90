"""What the simulator says when firmware, device models or its own process go wrong."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dovetail.errors import MissingExtraError, SimulationError
from dovetail.sim.device import DeviceSpec
from dovetail.sim.protocol import SimulationSetup
from dovetail.sim.worker import IssSession, simulate
from firmware import DMA, MEMORIES, TIMER, build, chip
from warm_workers import STARTED, Forked, Nursery

pytestmark = pytest.mark.usefixtures("as_users_start_them")


@pytest.fixture
def as_users_start_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are processes begun anew, not forked."""
    monkeypatch.setattr("dovetail.sim.worker.start_worker", STARTED)


def fault(elf: Path, *devices: DeviceSpec, limit: int = 1_000_000) -> SimulationError:
    """The error the firmware ends in."""
    with pytest.raises(SimulationError) as caught:
        simulate(chip(elf, *devices), [{}], {}, instruction_limit=limit)
    return caught.value


def test_a_deadlock_names_the_function(tmp_path: Path) -> None:
    elf = build(
        tmp_path,
        """
    __attribute__((noinline)) static void sleep_forever(void) { dovetail_wait_for_interrupt(); }
    int main(void) { sleep_forever(); sleep_forever(); return 0; }""",
    )
    error = fault(elf, TIMER)
    assert "deadlock" in error.what
    assert "sleep_forever" in error.where or "main" in error.where


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("*(volatile uint32_t *)0x40000010u = 1u;", ["bad write of 4 bytes at 0x40000010", "culprit+0x"]),
        ("(void)*(volatile uint8_t *)0x3u;", ["bad read of 1 bytes at 0x3", "culprit+0x"]),
        ("((void (*)(void))0x50000000u)();", ["bad instruction fetch", "0x50000000", "culprit"]),
        ("dovetail_mmio_write(0x1A100034u, 1u);", ["DONE is read-only", "culprit", "dma"]),
        ("dovetail_mmio_write(0x1A100100u, 1u);", ["no register at offset 0x100", "dma"]),
        ("(void)*(volatile uint8_t *)0x1A100000u;", ["aligned 32-bit accesses"]),
        ("dovetail_mmio_write(0x1A000100u, 1u);", ["control registers"]),
        ('__asm__ volatile(".word 0");', ["the core stopped", "culprit"]),
        ("DONE();", ["never began"]),
        ("exit_with(7u);", ["exited with code 7 after 0 of 1"]),
    ],
)
def test_a_fault_names_place_and_address(tmp_path: Path, statement: str, words: list[str]) -> None:
    elf = build(
        tmp_path,
        f"""
    __attribute__((noinline)) void culprit(void); void culprit(void) {{ {statement} __asm__ volatile("nop"); }}
    int main(void) {{ culprit(); return 0; }}""",
    )
    message = str(fault(elf, DMA))
    for word in words:
        assert word in message


def test_the_watchdog_shows_the_last_accesses(tmp_path: Path) -> None:
    elf = build(
        tmp_path,
        """
    int main(void) { for (;;) { (void)dovetail_mmio_read(0x1A100038u); } }""",
    )
    error = fault(elf, DMA, limit=5000)
    assert "5000 instructions" in error.what and "main" in error.where
    assert "read 0x1a100038 = 0x10" in error.hint


def test_stack_use_is_measured_and_an_overflow_found(tmp_path: Path) -> None:
    source = """
    int main(void) {
        volatile uint8_t big[1500];
        for (uint32_t i = 0; i < sizeof big; i++) { big[i] = (uint8_t)i; }
        exit_with(big[7]);
        for (;;) { }
    }"""
    used = simulate(chip(build(tmp_path, source)), [], {}).stack_bytes
    assert used is not None and 1500 <= used <= 1600
    small = build(tmp_path, source, stack_bytes=512)
    with pytest.raises(SimulationError, match=r"bad write|overflowed"):
        simulate(chip(small), [], {})


def test_a_dying_worker_is_an_error_and_no_zombie(tmp_path: Path) -> None:
    elf = build(tmp_path, "int main(void) { dovetail_mmio_write(0x1A200000u, 0xDEADu); return 0; }")
    session = IssSession(chip(elf, TIMER))
    process = session._process.pid
    with pytest.raises(SimulationError, match=r"died \(signal 11\)"):
        session.run([], {})
    with pytest.raises(ChildProcessError):  # already collected
        os.waitpid(process, os.WNOHANG)
    with pytest.raises(SimulationError, match="already closed"):
        session.run([], {})


def test_so_is_one_that_was_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As other tests start them: it ends as one begun anew does, in the folder of its client."""
    nursery = Nursery()
    monkeypatch.setattr("dovetail.sim.worker.start_worker", nursery.start)
    elf = build(tmp_path, "int main(void) { dovetail_mmio_write(0x1A200000u, 0xDEADu); return 0; }")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        session = IssSession(chip(elf, TIMER))
        assert isinstance(session._process, Forked)
        there = Path(f"/proc/{session._process.pid}")
        assert not there.exists() or (there / "cwd").resolve() == tmp_path.resolve()
        with pytest.raises(SimulationError, match=r"died \(signal 11\)"):
            session.run([], {})
    session = IssSession(chip(elf))
    session.close()
    assert session._process.returncode == 0
    monkeypatch.setenv("LD_SOMETHING", "counts at the start")
    with IssSession(chip(elf)) as other:
        assert not isinstance(other._process, Forked)
    nursery.close()


def test_a_slow_worker_is_ended(tmp_path: Path) -> None:
    elf = build(tmp_path, "int main(void) { for (;;) { } }")
    session = IssSession(chip(elf), timeout=1.5)
    process = session._process.pid
    with pytest.raises(SimulationError, match=r"no answer within 1\.5 s"):
        session.run([], {})
    with pytest.raises(ChildProcessError):
        os.waitpid(process, os.WNOHANG)


def test_a_forgotten_session_ends_its_process(tmp_path: Path) -> None:
    elf = build(tmp_path, "int main(void) { for (;;) { } }")
    session = IssSession(chip(elf))
    process = session._process.pid
    del session
    gc.collect()
    with pytest.raises(ChildProcessError):
        os.waitpid(process, os.WNOHANG)


KILLED_CLIENT = """
import os, sys
from pathlib import Path
from dovetail.sim.device import MemoryRegion
from dovetail.sim.worker import IssSession
from dovetail.sim.protocol import SimulationSetup
session = IssSession(SimulationSetup(Path(sys.argv[1]), (MemoryRegion("l2", 0x1C000000, 0x20000),
                                                         MemoryRegion("l1", 0x10000000, 0x10000))))
print(session._process.pid, flush=True)
session.run([], {})
"""


def test_a_killed_client_takes_its_worker_along(tmp_path: Path) -> None:
    elf = build(tmp_path, "int main(void) { for (;;) { } }")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    client = subprocess.Popen(
        [sys.executable, "-c", KILLED_CLIENT, str(elf)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert client.stdout is not None
    worker = int(client.stdout.readline())
    time.sleep(0.3)
    client.kill()
    client.communicate()
    for _ in range(50):
        if not alive(worker):
            return
        time.sleep(0.1)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("the worker went on without its client")


def alive(process: int) -> bool:
    """Whether it runs; one that only waits to be collected by init does not."""
    state = Path(f"/proc/{process}/stat")
    if Path("/proc").is_dir():
        return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_bug_in_a_device_model_shows_its_line(tmp_path: Path) -> None:
    elf = build(tmp_path, "int main(void) { dovetail_mmio_write(0x1A200000u, 0xBEEFu); return 0; }")
    with pytest.raises(SimulationError, match="ZeroDivisionError: a mistake in a device model") as caught:
        simulate(chip(elf, TIMER), [], {})
    assert "firmware.py:" in caught.value.where


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ((DeviceSpec("dovetail.sim.dma:Nothing", 0x1A100000, 64),), "no such device factory"),
        ((DeviceSpec("dovetail.sim.dma:DmaDevice", 0x1A100000, 64, {"speed": 1}),), "unexpected keyword"),
        ((DMA, DeviceSpec("dovetail.sim.dma:DmaDevice", 0x1A100040, 64, {"name": "b"})), "of 'dma' at 0x1a100040"),
        ((DMA, DeviceSpec("dovetail.sim.dma:DmaDevice", 0x1A102000, 64)), "device 'dma': 2 devices have this name"),
        ((DeviceSpec("dovetail.sim.dma:DmaDevice", 0x1C000000, 64),), "share no page"),
    ],
)
def test_impossible_chips_are_refused(tmp_path: Path, devices: tuple[DeviceSpec, ...], words: str) -> None:
    elf = build(tmp_path, "int main(void) { return 0; }")
    with pytest.raises(SimulationError) as caught:
        IssSession(chip(elf, *devices))
    assert words in str(caught.value)


def test_firmware_outside_the_memories_is_refused(tmp_path: Path) -> None:
    elf = build(tmp_path, "int main(void) { return 0; }")
    with pytest.raises(SimulationError, match="does not fit the memories"):
        IssSession(SimulationSetup(elf, MEMORIES[1:]))


def test_unicorn_stays_out_of_this_process_and_its_absence_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elf = build(tmp_path, "int main(void) { exit_with(0u); return 0; }")
    monkeypatch.delitem(sys.modules, "unicorn", raising=False)  # other tests emulate elements of a mesh in this process
    simulate(chip(elf), [], {})
    assert "unicorn" not in sys.modules
    monkeypatch.setattr("dovetail.sim.worker.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="unicorn"):
        IssSession(chip(elf))
