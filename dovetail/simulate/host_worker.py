"""The process that runs natively compiled code: `python -m dovetail.simulate.host_worker`, spoken to by `host.py`."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

from dovetail.errors import SimulationError
from dovetail.simulate.protocol import Buffers, InferenceResult, Json, RunRequest, SimulationResult, call_failed
from dovetail.simulate.worker_loop import Runner, serve


def load(setup: Json) -> Runner:
    """Load the shared library.

    Raises:
        SimulationError: that fails, or it has no such entry point.
    """
    name = Path(setup["library"]).name
    try:
        library = ctypes.CDLL(setup["library"])
        entry = getattr(library, setup["entry"])
    except (OSError, AttributeError) as error:
        raise SimulationError(f"the library cannot be used: {error}", where=name,
                              hint="host code calls reference functions, not engine drivers") from None
    entry.restype = None

    def run(request: RunRequest) -> SimulationResult:
        return SimulationResult(tuple(infer(inputs, request) for inputs in request.inputs))

    def infer(inputs: Buffers, request: RunRequest) -> InferenceResult:
        """Place the inputs, run once, read the outputs."""
        for symbol, content in inputs.items():
            ctypes.memmove(_buffer(library, symbol, len(content)), content, len(content))
        begin = time.perf_counter_ns()
        entry()
        taken = time.perf_counter_ns() - begin
        _look_for_failure(library)
        return InferenceResult({symbol: bytes(_buffer(library, symbol, size))
                                for symbol, size in request.outputs.items()}, nanoseconds=taken)

    return run


def _look_for_failure(library: ctypes.CDLL) -> None:
    try:
        what = ctypes.c_char_p.in_dll(library, "dovetail_failure").value
    except ValueError:  # a project none of whose calls can fail
        return
    if what is not None:
        status = ctypes.c_int32.in_dll(library, "dovetail_failure_status")
        raise call_failed(what.decode(errors="replace"), status.value)


def _buffer(library: ctypes.CDLL, symbol: str, size: int) -> ctypes.Array[ctypes.c_ubyte]:
    try:
        name, _, offset = symbol.partition("+")
        start = int(offset or 0)
        whole = (ctypes.c_ubyte * (start + size)).in_dll(library, name)
        return (ctypes.c_ubyte * size).from_buffer(whole, start)
    except ValueError:
        raise SimulationError(f"there is no symbol '{symbol}'", where="shared library",
                              hint="compile the model again") from None


if __name__ == "__main__":
    serve(load)
