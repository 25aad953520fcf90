"""The client's side of a worker process: start, ask, and end it whatever happens."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import IO

from dovetail.errors import SimulationError
from dovetail.simulate.protocol import Json, receive, send

BUG = "in the simulator's worker:"
"""What an error begins with that the worker's own code, or a device model, raised; the traceback follows."""
STARTING = 60.0
"""Seconds a process may take to start and load what it runs, however little a run may."""
_SAID = "dovetail: "
"""What a line on stderr begins with that says why the emitted C gave up."""


class WorkerProcess:
    """A running worker.

    Args:
        module: the module to run, e.g. "dovetail.simulate.iss_worker".
        timeout: seconds a single request may take.
        variables: further environment variables.
    """

    def __init__(self, module: str, timeout: float, variables: Mapping[str, str] | None = None) -> None:
        self._timeout = timeout
        self._messages: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        # The worker finds the same packages; -P keeps the current folder out of its path.
        path = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, **(variables or {}), "PYTHONPATH": path}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._messages, env=environment, bufsize=0,
        )
        self._finalizer = weakref.finalize(self, _end, self._process, self._messages)

    def ask(
        self, message: Json, blobs: Sequence[bytes] = (), at_least: float = 0.0
    ) -> tuple[Json, list[bytes]]:
        """Send a request and wait for the answer, for the timeout or for `at_least` so many seconds.

        Raises:
            SimulationError: the worker reports one, died, or took longer than the timeout.
            RuntimeError: a bug in the worker or in a device model; the message is its traceback.
        """
        if not self._finalizer.alive:
            raise SimulationError("it was already closed", where="simulator", hint="start a new session")
        allowed = max(self._timeout, at_least)
        deadline = time.monotonic() + allowed
        try:
            send(self._write, message, blobs)
            answer = receive(lambda size: self._read(size, deadline, allowed))
        except BrokenPipeError:
            answer = None
        except BaseException:  # a timeout or Ctrl-C: the worker is in the middle of something
            self.close()
            raise
        if answer is None:
            raise self._died()
        content, data = answer
        if content["kind"] == "error":
            raise SimulationError(content["what"], where=content["where"], hint=content["hint"])
        if content["kind"] == "bug":
            raise RuntimeError(f"{BUG}\n{content['traceback']}")
        return content, data

    def close(self) -> None:
        """End the worker; may be called again."""
        self._finalizer()

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        view = memoryview(data)
        while view:
            view = view[os.write(self._process.stdin.fileno(), view) :]

    def _read(self, size: int, deadline: float, allowed: float) -> bytes:
        assert self._process.stdout is not None
        file = self._process.stdout.fileno()
        parts: list[bytes] = []
        while size:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([file], [], [], left)[0]:
                raise SimulationError(f"it gave no answer within {allowed:g} s", where="simulator",
                                      hint="look for a loop without an end in the driver or device model, or allow "
                                           "more time")
            part = os.read(file, min(size, 1 << 20))
            if not part:
                break
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _died(self) -> SimulationError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        code = self._process.returncode
        self._messages.seek(0)
        printed = self._messages.read()[-2000:].decode(errors="replace").strip()
        self.close()
        said = [line for line in printed.splitlines() if line.startswith(_SAID)]
        if said:
            rest = "\n".join(line for line in printed.splitlines() if line != said[-1])
            return SimulationError(said[-1].removeprefix(_SAID), where="firmware",
                                   hint=rest or "look up what that means for the driver or library")
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return SimulationError(f"its worker process died ({how})", where="simulator",
                               hint=printed or "look for a bad pointer in the driver or library")


def _end(process: subprocess.Popen[bytes], messages: IO[bytes]) -> None:
    """Close the pipes, wait a moment, kill what is left, and collect it, so that no zombie stays."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    try:
        process.wait(timeout=0.5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
    messages.close()
