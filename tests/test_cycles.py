"""No network gets slower unseen: cycles of the zoo's digits on every simulated target, held to tests/cycles.csv.

The networks of MLPerf Tiny are held to the same file where tests/test_end_to_end.py and tests/test_engines_pay.py run
them. `--update` makes today's cycles the budget; the difference is part of a review.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import dovetail
from cycle_budget import rounded_up, within_budget
from dovetail.arrays import built
from dovetail.compile import Options, compile_model, sample_inputs
from dovetail.errors import MissingExtraError
from dovetail.run import default_simulator, run_build
from dovetail.targets import BUILT_IN, load_target
from firmware import require_chip

TARGETS = [name for name in BUILT_IN if not load_target(name).core.is_host]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The zoo's smallest network."""
    path = tmp_path_factory.mktemp("cycles") / "digits.onnx"
    assert dovetail("zoo", "digits", "-o", path) == 0
    return path


@pytest.mark.parametrize("name", TARGETS)
def test_digits_is_within_its_budget(name: str, digits: Path, update: bool) -> None:
    require_chip()
    target = load_target(name)
    compiled = compile_model(digits, target, Options())
    try:
        with built(compiled, target) as build:
            result = run_build(build, default_simulator(target), [sample_inputs(compiled.graph)])
    except MissingExtraError as error:
        pytest.skip(error.what)
    within_budget("digits", name, result.simulation.inferences[0].total_cycles, update)


def test_more_cycles_than_the_budget_are_found() -> None:
    assert [rounded_up(count) for count in (7, 999, 7253, 117_616)] == [7, 999, 7260, 118_000]
    with pytest.raises(AssertionError, match="its budget is"):
        within_budget("digits", "ne16", 1_000_000, False)
    with pytest.raises(AssertionError, match="no budget"):
        within_budget("none", "ne16", 1, False)
