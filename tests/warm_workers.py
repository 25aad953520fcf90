"""Simulators' workers from a process that has imported already what they need: starting one takes milliseconds.

Each is still a process of its own, forked, with the environment, folder and path of the test that wants it.
tests/test_iss_faults.py starts them as users do.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import IO, Any

from dovetail.codegen.build.toolchain import find_compiler
from dovetail.errors import DovetailError
from dovetail.sim import worker

IMPORTED = (
    "dovetail.sim.machine",
    "dovetail.sim.dma",
    "dovetail.run",
    "dovetail.fields",
    "unicorn.arm_const",
    "unicorn.riscv_const",
    "elftools.elf.elffile",
)
NO_MATTER = ("MALLOC_TRIM_THRESHOLD_", "OMP_NUM_THREADS", "PYTHONHASHSEED", "PYTHONPATH")
"""Set by dask for its own workers, with which a simulator computes the same; and the path, which a fork is told."""
BEGIN = ("LD_", "PYTHON", "OMP_", "OPENBLAS_", "ASAN_", "UBSAN_", "MALLOC_")
"""How variables begin that count when a process starts."""
STARTED = worker.start_worker
"""How users' workers start."""


class Forked:
    """A worker, with what `WorkerSession` uses of `subprocess.Popen`."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes], status: IO[bytes]) -> None:
        self.pid, self.stdin, self.stdout, self._status = pid, stdin, stdout, status
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, as `Popen.wait`."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("worker", timeout or 0.0)
            told = self._status.read()
            self.returncode = struct.unpack("i", told)[0] if told else -signal.SIGKILL
            self._status.close()
        return self.returncode

    def kill(self) -> None:
        """As `Popen.kill`."""
        if self.returncode is None and not select.select([self._status], [], [], 0)[0]:
            os.kill(self.pid, signal.SIGKILL)


class Nursery:
    """Forks workers when asked; `start` stands for `dovetail.sim.worker.start_worker`."""

    def __init__(self) -> None:
        self._variables, self._one = sensitive(os.environ), threading.Lock()
        self._line: socket.socket | None = None

    def start(self, module: str, variables: Mapping[str, str] | None, messages: IO[bytes]) -> Any:
        """A worker; not forked where its environment must be there when it begins."""
        if variables or sensitive(os.environ) != self._variables:
            return STARTED(module, variables, messages)
        asked = {"module": module, "path": sys.path, "folder": os.getcwd(), "environment": dict(os.environ)}
        (requests, stdin), (stdout, answers), (status, told) = os.pipe(), os.pipe(), os.pipe()
        with self._one:
            self._line = self._line or self._begun()
            socket.send_fds(self._line, [json.dumps(asked).encode()], [requests, answers, messages.fileno(), told])
            pid = int(self._line.recv(64))
        for file in (requests, answers, told):
            os.close(file)
        return Forked(pid, open(stdin, "wb", 0), open(stdout, "rb", 0), open(status, "rb", 0))

    def _begun(self) -> socket.socket:
        """The line to the process that forks, started here."""
        line, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join(place for place in sys.path if place)
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(other.fileno())],
            pass_fds=[other.fileno()],
            env={**os.environ, "PYTHONPATH": path},
        )
        other.close()
        return line

    def close(self) -> None:
        """End the process that forks; its workers end with their clients."""
        if self._line is not None:
            self._line.close()
            self._process.wait()


def sensitive(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables that count when a process starts."""
    return {name: value for name, value in variables.items() if name.startswith(BEGIN) and name not in NO_MATTER}


def become(asked: dict[str, Any], files: list[int]) -> None:
    """Be the worker that was asked for, in a fork."""
    for place, file in enumerate(files[:3]):
        os.dup2(file, place)
    os.closerange(3, 1 << 16)
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.path[:] = asked["path"]
    os.chdir(asked["folder"])
    worker.serve(lambda content: importlib.import_module(asked["module"]).load(content))


def main() -> None:
    """Fork a worker for each request, and say how each one ended, until the line is closed."""
    line = socket.socket(fileno=int(sys.argv[1]))
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for name in IMPORTED:
        importlib.import_module(name)
    with contextlib.suppress(DovetailError):  # who asks then says that none is there
        find_compiler("host")  # what simulates programs of this computer's own asks it for its version
    running: dict[int, int] = {}
    while True:
        ready = select.select([line, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
            while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                told = running.pop(ended[0])
                os.write(told, struct.pack("i", os.waitstatus_to_exitcode(ended[1])))
                os.close(told)
        if line in ready:
            message, files, _, _ = socket.recv_fds(line, 1 << 20, 4)
            if not message:
                return
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    become(json.loads(message), files)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            running[pid] = files[3]
            for file in files[:3]:
                os.close(file)
            line.send(str(pid).encode())


if __name__ == "__main__":
    main()
