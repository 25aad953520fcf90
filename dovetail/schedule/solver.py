"""OR-tools' constraint solver, where it is installed: one thread and a limit in work done, so that answers repeat."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any


def solver_version() -> str | None:
    """The version of OR-tools; None where it is not installed."""
    try:
        return version("ortools")
    except PackageNotFoundError:
        return None


def new_model() -> Any:
    """An empty model; None where OR-tools is not installed."""
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        return None
    return cp_model.CpModel()


def solve(model: Any, seconds: float, **parameters: Any) -> Any:
    """A solver that has solved a model, at best; None where it has found nothing.

    Args:
        model: of `new_model`.
        seconds: limit on deterministic solver time.
        parameters: further ones of the solver.
    """
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    fixed = {"max_deterministic_time": seconds, "num_workers": 1, "random_seed": 0}
    for name, setting in (fixed | parameters).items():
        setattr(solver.parameters, name, setting)
    return solver if solver.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None
