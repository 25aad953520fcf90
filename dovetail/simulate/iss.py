"""Runs firmware in the instruction-set simulator, which lives in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from types import TracebackType

from dovetail.errors import MissingExtraError
from dovetail.simulate.protocol import (
    DEFAULT_INSTRUCTION_LIMIT,
    Buffers,
    RunRequest,
    SimulationResult,
    SimulationSetup,
    result_from_message,
    run_to_message,
    setup_to_json,
)
from dovetail.simulate.worker_process import STARTING, WorkerProcess

DEFAULT_TIMEOUT = 600.0
"""Seconds a request may take."""


class IssSession:
    """A simulated chip with its firmware, kept running between requests.

    Args:
        setup: the chip and its firmware.
        timeout: seconds a single request may take.

    Raises:
        SimulationError: the setup contradicts itself, or the firmware does not fit it.
        MissingExtraError: Unicorn is not installed.
    """

    def __init__(self, setup: SimulationSetup, timeout: float = DEFAULT_TIMEOUT) -> None:
        if find_spec("unicorn") is None:
            raise MissingExtraError("unicorn", "iss", "simulating firmware")
        self._worker = WorkerProcess("dovetail.simulate.iss_worker", timeout)
        try:
            self._worker.ask({"command": "load", "setup": setup_to_json(setup)}, at_least=STARTING)
        except BaseException:
            self._worker.close()
            raise

    def run(
        self, inputs: Sequence[Buffers], outputs: Mapping[str, int],
        instruction_limit: int = DEFAULT_INSTRUCTION_LIMIT,
    ) -> SimulationResult:
        """Run one inference for each element of `inputs`; with none, run until the firmware wants inputs or exits.

        Args:
            inputs: contents of the input symbols, for each inference.
            outputs: output symbols and their sizes in bytes.
            instruction_limit: instructions all of them together may take.

        Raises:
            SimulationError: a bad access, an unknown register, a deadlock, the limit, a crash; the session is then
                of no further use.
        """
        message, blobs = run_to_message(RunRequest(tuple(inputs), outputs, instruction_limit))
        return result_from_message(*self._worker.ask({"command": "run", **message}, blobs))

    def close(self) -> None:
        """End the simulator's process."""
        self._worker.close()

    def __enter__(self) -> IssSession:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()


def simulate(
    setup: SimulationSetup, inputs: Sequence[Buffers], outputs: Mapping[str, int],
    instruction_limit: int = DEFAULT_INSTRUCTION_LIMIT, timeout: float = DEFAULT_TIMEOUT,
) -> SimulationResult:
    """Load the firmware, run the inferences, and end the simulator; see `IssSession.run`."""
    with IssSession(setup, timeout) as session:
        return session.run(inputs, outputs, instruction_limit)
