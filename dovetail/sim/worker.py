"""Simulators in a process of their own: `python -m dovetail.sim.worker MODULE` runs what MODULE's `load` gives.

The worker ends when its client does, and the client ends it whatever happens: a crash or a hang is only the worker's.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from dovetail.errors import DovetailError, MissingExtraError, SimulationError
from dovetail.sim.protocol import (
    DEFAULT_INSTRUCTION_LIMIT,
    DEFAULT_TIMEOUT,
    Buffers,
    Content,
    HostSetup,
    InferenceResult,
    Json,
    Runner,
    RunRequest,
    SimulationResult,
    SimulationSetup,
    Simulator,
    call_failed,
    receive,
    send,
)
from dovetail.user_file import blamed

BUG = "in the simulator's worker:"
"""Beginning of an error raised by the worker's own code or by a device model; the traceback follows."""
STARTING = 60.0
"""Seconds a process may take to start and load what it runs, however little a run may."""
_SAID = "dovetail: "
"""Beginning of a line on stderr that says why the emitted C gave up."""


class WorkerSession(Simulator):
    """A worker, kept running between requests.

    Args:
        module: whose `load` takes the `Content` of a setup and gives a `Runner`, e.g. "dovetail.sim.machine".
        timeout: seconds a single request may take.
        variables: further environment variables.
    """

    def __init__(self, module: str, timeout: float, variables: Mapping[str, str] | None = None) -> None:
        self._timeout = timeout
        self._messages: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._process = start_worker(module, variables, self._messages)
        self._finalizer = weakref.finalize(self, _end, self._process, self._messages)

    def load(self, setup: object) -> None:
        """Load what is to run; where that fails the worker ends, and SimulationError is raised."""
        try:
            self._ask("load", setup, max(self._timeout, STARTING))
        except BaseException:
            self.close()
            raise

    def run(
        self, inputs: Sequence[Buffers], outputs: Mapping[str, int], instruction_limit: int = DEFAULT_INSTRUCTION_LIMIT
    ) -> SimulationResult:
        """See `Simulator.run`; firmware with no inputs runs until it wants inputs or exits. All inferences together may
        take `instruction_limit` instructions of firmware."""
        request = RunRequest(tuple(inputs), outputs, instruction_limit)
        return self._ask("run", request, self._timeout).of(SimulationResult)

    def close(self) -> None:
        """End the worker; may be called again."""
        self._finalizer()

    def _ask(self, command: str, content: object, allowed: float) -> Content:
        """Send a request and wait so many seconds for the answer.

        Raises:
            SimulationError: the worker reports one, died, or took longer.
            RuntimeError: a bug in the worker or in a bundled device model; the message is its traceback.
        """
        if not self._finalizer.alive:
            raise SimulationError("it was already closed", where="simulator", hint="start a new session")
        deadline = time.monotonic() + allowed
        assert self._process.stdin is not None
        requests = self._process.stdin.fileno()
        try:
            send(lambda data: _write_all(requests, data), {"command": command}, content)
            answer = receive(lambda size: self._read(size, deadline, allowed))
        except BrokenPipeError:
            answer = None
        except BaseException:  # a timeout or Ctrl-C: the worker is in the middle of something
            self.close()
            raise
        if answer is None:
            raise self._died()
        message, result = answer
        if message["kind"] == "error":
            raise SimulationError(message["what"], where=message["where"], hint=message["hint"])
        if message["kind"] == "bug":
            raise RuntimeError(f"{BUG}\n{message['traceback']}")
        return result

    def _read(self, size: int, deadline: float, allowed: float) -> bytes:
        assert self._process.stdout is not None
        file = self._process.stdout.fileno()
        parts: list[bytes] = []
        while size:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([file], [], [], left)[0]:
                hint = "look for a loop without an end in the driver or device model, or allow more time"
                raise SimulationError(f"it gave no answer within {allowed:g} s", where="simulator", hint=hint)
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
            hint = rest or "look up what that means for the driver or library"
            return SimulationError(said[-1].removeprefix(_SAID), where="firmware", hint=hint)
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        hint = printed or "look for a bad pointer in the driver or library"
        return SimulationError(f"its worker process died ({how})", where="simulator", hint=hint)


class IssSession(WorkerSession):
    """A simulated chip with its firmware; a single request may take `timeout` seconds.

    Raises:
        SimulationError: the setup contradicts itself, or the firmware does not fit it.
        MissingExtraError: Unicorn is not installed.
    """

    def __init__(self, setup: SimulationSetup, timeout: float = DEFAULT_TIMEOUT) -> None:
        if find_spec("unicorn") is None:
            raise MissingExtraError("unicorn", "iss", "simulating firmware")
        super().__init__("dovetail.sim.machine", timeout)
        self.load(setup)


class HostSession(WorkerSession):
    """The emitted project compiled for this computer. It counts nothing, and takes nanoseconds instead of cycles.

    Args:
        library: what `compile_host` made. entry: the model's entry point, void f(void).
        timeout: seconds a single request may take. environment: further environment variables of the process.
        layers: number of layers, each of which drivers may take the time of.

    Raises:
        SimulationError: the library cannot be loaded or has no such entry point.
    """

    def __init__(
        self,
        library: Path,
        entry: str,
        timeout: float = DEFAULT_TIMEOUT,
        environment: Mapping[str, str] | None = None,
        layers: int = 0,
    ) -> None:
        super().__init__("dovetail.sim.worker", timeout, environment)
        self.load(HostSetup(library.resolve(), entry, layers))


def simulate(
    setup: SimulationSetup,
    inputs: Sequence[Buffers],
    outputs: Mapping[str, int],
    instruction_limit: int = DEFAULT_INSTRUCTION_LIMIT,
    timeout: float = DEFAULT_TIMEOUT,
) -> SimulationResult:
    """Load the firmware, run the inferences, and end the simulator; see `WorkerSession.run`."""
    with IssSession(setup, timeout) as session:
        return session.run(inputs, outputs, instruction_limit)


def simulate_host(
    library: Path, entry: str, inputs: Sequence[Buffers], outputs: Mapping[str, int], timeout: float = DEFAULT_TIMEOUT
) -> SimulationResult:
    """Load the library, run the inferences, and end the process; see `HostSession` and `WorkerSession.run`."""
    with HostSession(library, entry, timeout) as session:
        return session.run(inputs, outputs)


def start_worker(module: str, variables: Mapping[str, str] | None, messages: IO[bytes]) -> subprocess.Popen[bytes]:
    """A worker for `WorkerSession`, arguments as there; what it prints goes to `messages`."""
    # It finds the same packages; -P keeps the current folder out of its path.
    path = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "dovetail.sim.worker", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=messages,
        env={**os.environ, **(variables or {}), "PYTHONPATH": path},
        bufsize=0,
    )


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


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


# -- the worker's side


def serve(load: Callable[[Content], Runner]) -> None:
    """Answer requests until the client closes the pipe; errors become answers.

    `load` takes the content of a "load" message and gives the function that answers "run" messages.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the client, which then ends this process
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever prints must not break the protocol
    runner: Runner | None = None
    while (received := receive(sys.stdin.buffer.read)) is not None:
        message, content = received
        answer: Json = {"kind": "done"}
        result: SimulationResult | None = None
        try:
            if message["command"] == "load":
                runner = load(content)
            elif runner is None:
                raise RuntimeError("run before load")
            else:
                result = runner(content.of(RunRequest))
        except DovetailError as error:
            answer = {"kind": "error", "what": error.what, "where": error.where, "hint": error.hint}
        except Exception as error:
            answer = {"kind": "bug", "traceback": traceback.format_exc()}
            if (told := blamed(error)) is not None:  # a device model of the user's
                answer = {"kind": "error", "what": told.what, "where": told.where, "hint": told.hint}
        send(lambda data: _write_all(answers, data), answer, result)


def _end_with(parent: int) -> None:
    """End this process when its parent is gone: in the middle of a simulation nobody reads the pipe."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def load(content: Content) -> Runner:
    """Load the shared library of a `HostSetup`; raises SimulationError where that fails, or has no such entry point."""
    setup = content.of(HostSetup)
    try:
        library = ctypes.CDLL(str(setup.library))
        entry = getattr(library, setup.entry)
    except (OSError, AttributeError) as error:
        hint = "host code calls reference functions, not engine drivers"
        raise SimulationError(f"the library cannot be used: {error}", where=setup.library.name, hint=hint) from None
    entry.restype = None
    times = _times(library, setup.layers)

    def run(request: RunRequest) -> SimulationResult:
        """For each set of inputs: place them, run once, read the outputs."""
        found = []
        for inputs in request.inputs:
            for symbol, data in inputs.items():
                ctypes.memmove(_buffer(library, symbol, len(data)), data, len(data))
            if times is not None:
                ctypes.memset(times, 0, ctypes.sizeof(times))
            begin = time.perf_counter_ns()
            entry()
            taken = time.perf_counter_ns() - begin
            with contextlib.suppress(ValueError):  # a project none of whose calls can fail
                what = ctypes.c_char_p.in_dll(library, "dovetail_failure").value
                if what is not None:
                    status = ctypes.c_int32.in_dll(library, "dovetail_failure_status")
                    raise call_failed(what.decode(errors="replace"), status.value)
            outputs = {symbol: bytes(_buffer(library, symbol, size)) for symbol, size in request.outputs.items()}
            found.append(InferenceResult(outputs, nanoseconds=taken, layer_nanoseconds=tuple(times or ())))
        return SimulationResult(tuple(found))

    return run


def _times(library: ctypes.CDLL, layers: int) -> ctypes.Array[ctypes.c_uint64] | None:
    """The array for the nanoseconds of each layer, given to a driver that takes them; None without one."""
    with contextlib.suppress(ValueError):
        pointer = ctypes.POINTER(ctypes.c_uint64).in_dll(library, "dovetail_nanoseconds")
        times = (ctypes.c_uint64 * layers)()
        ctypes.pointer(pointer)[0] = ctypes.cast(times, type(pointer))
        return times
    return None


def _buffer(library: ctypes.CDLL, symbol: str, size: int) -> ctypes.Array[ctypes.c_ubyte]:
    try:
        name, _, offset = symbol.partition("+")
        start = int(offset or 0)
        whole = (ctypes.c_ubyte * (start + size)).in_dll(library, name)
        return (ctypes.c_ubyte * size).from_buffer(whole, start)
    except ValueError:
        hint = "compile the model again"
        raise SimulationError(f"there is no symbol '{symbol}'", where="shared library", hint=hint) from None


if __name__ == "__main__":
    serve(lambda content: importlib.import_module(sys.argv[1]).load(content))
