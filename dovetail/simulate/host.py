"""Runs the emitted project compiled for this computer, in a process of its own so that its crash is only its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from dovetail.simulate.protocol import Buffers, RunRequest, SimulationResult, result_from_message, run_to_message
from dovetail.simulate.worker_process import STARTING, WorkerProcess

DEFAULT_TIMEOUT = 600.0
"""Seconds a request may take."""


class HostSession:
    """A loaded shared library, kept between requests.

    Args:
        library: what `compile_host` made.
        entry: the model's entry point, void f(void).
        timeout: seconds a single request may take.
        environment: further environment variables of the process.

    Raises:
        SimulationError: the library cannot be loaded or has no such entry point.
    """

    def __init__(
        self, library: Path, entry: str, timeout: float = DEFAULT_TIMEOUT, environment: Mapping[str, str] | None = None
    ) -> None:
        self._worker = WorkerProcess("dovetail.simulate.host_worker", timeout, environment)
        try:
            setup = {"library": str(library.resolve()), "entry": entry}
            self._worker.ask({"command": "load", "setup": setup}, at_least=STARTING)
        except BaseException:
            self._worker.close()
            raise

    def run(self, inputs: Sequence[Buffers], outputs: Mapping[str, int]) -> SimulationResult:
        """Run one inference for each element of `inputs`; no counters and no time.

        Args:
            inputs: contents of the input symbols, for each inference.
            outputs: output symbols and their sizes in bytes.

        Raises:
            SimulationError: a symbol is missing, the code crashed, or took longer than the timeout.
        """
        message, blobs = run_to_message(RunRequest(tuple(inputs), outputs))
        return result_from_message(*self._worker.ask({"command": "run", **message}, blobs))

    def close(self) -> None:
        """End the process."""
        self._worker.close()

    def __enter__(self) -> HostSession:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()


def simulate_host(
    library: Path, entry: str, inputs: Sequence[Buffers], outputs: Mapping[str, int], timeout: float = DEFAULT_TIMEOUT
) -> SimulationResult:
    """Load the library, run the inferences, and end the process; see `HostSession.run`."""
    with HostSession(library, entry, timeout) as session:
        return session.run(inputs, outputs)
