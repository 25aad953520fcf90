"""The process that emulates the core: `python -m dovetail.simulate.iss_worker`, spoken to by `iss.py`.

It exists because Unicorn is GPL-2.0 licensed and Dovetail is not, and so that a crash ends only this process.
"""

from __future__ import annotations

from dovetail.simulate.protocol import Json, setup_from_json
from dovetail.simulate.worker_loop import Runner, serve


def load(setup: Json) -> Runner:
    """Build the machine.

    Raises:
        SimulationError: the setup contradicts itself, or the firmware does not fit it.
    """
    from dovetail.simulate.machine import Machine

    return Machine(setup_from_json(setup)).run


if __name__ == "__main__":
    serve(load)
