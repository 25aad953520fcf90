"""The worker's side of the pipe: reads requests, answers, and turns errors into answers."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable

from dovetail.errors import DovetailError
from dovetail.simulate.protocol import (
    Json,
    RunRequest,
    SimulationResult,
    receive,
    result_to_message,
    run_from_message,
    send,
)

Runner = Callable[[RunRequest], SimulationResult]


def serve(load: Callable[[Json], Runner]) -> None:
    """Answer requests until the client closes the pipe.

    Args:
        load: takes the setup of a "load" message and gives the function that answers "run" messages.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the client, which then ends this process
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever prints must not break the protocol
    requests = sys.stdin.buffer
    runner: Runner | None = None
    while (received := receive(requests.read)) is not None:
        message, blobs = received
        answer: Json
        contents: list[bytes] = []
        try:
            if message["command"] == "load":
                runner = load(message["setup"])
                answer = {"kind": "loaded"}
            elif runner is None:
                raise RuntimeError("run before load")
            else:
                answer, contents = result_to_message(runner(run_from_message(message, blobs)))
                answer["kind"] = "result"
        except DovetailError as error:
            answer = {"kind": "error", "what": error.what, "where": error.where, "hint": error.hint}
        except Exception:
            answer = {"kind": "bug", "traceback": traceback.format_exc()}
        send(lambda data: _write_all(answers.fileno(), data), answer, contents)


def _end_with(parent: int) -> None:
    """End this process when its parent is gone: in the middle of a simulation nobody reads the pipe."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
