"""A target's rules on the compiled chip: kept by every launch and by the order of launches, or refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dovetail.codegen.emit import write_project
from dovetail.compile import Compiled, Options, compile_graph, sample_inputs
from dovetail.errors import ModelError
from dovetail.ir.graph import evaluate
from dovetail.legalize import adapt
from dovetail.program.ir import LaunchStatement
from dovetail.run import open_build, run_build
from dovetail.targets.maeri import target
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.network import own_name
from dovetail.targets.maeri.rules import Pin, Rules
from dovetail.targets.maeri.task import Task, decode
from dovetail.targets.maeri.words import MASK
from firmware import require_chip
from networks import mixed_kernels

CONFIG = MaeriConfig(64, 16, 16)


def compiled(rules: Rules, config: MaeriConfig = CONFIG) -> Compiled:
    """Three kernels of one image, Conv, Conv_2 and Conv_3, on a chip with rules."""
    chip = target(config, "ruled", rules)
    return compile_graph(adapt(mixed_kernels(12, 1, 4), chip.policies[0]), chip, Options())


def tasks(made: Compiled) -> Iterator[tuple[str, Task]]:
    """The task words of each launch in the emitted C, by the name that rules know, in the program's order."""
    texts = [text for text in made.project.files.values() if isinstance(text, str)]
    for one in made.plan.program.statements:
        if isinstance(one, LaunchStatement) and one.match.has("layer"):
            pattern = rf"mixed_{made.plan.program.layers[one.layer]}_task\[\d*\] = \{{(.*?)\}}"
            (words,) = [found[1] for text in texts for found in re.finditer(pattern, text, re.DOTALL)]
            numbers = [int(word.strip("uU "), 0) & MASK for word in words.replace("\n", "").split(",") if word.strip()]
            yield own_name(one.match.nodes["layer"].origin), decode(numbers[1:])


RULES = Rules(
    at_most=8,
    priority=(("Conv_4", "Conv_2"),),
    pin=(Pin("Conv_3", (0, 32)),),
    before=(("Conv_4", "Conv_3"),),
    whole_filters=("Conv_2",),
)


def test_rules_of_a_target_are_kept_by_its_firmware(tmp_path: Path) -> None:
    require_chip()
    made, chip = compiled(RULES), target(CONFIG, "ruled", RULES)
    names = [name for name, _ in tasks(made)]
    assert sorted(names) == ["Conv", "Conv_2", "Conv_3", "Conv_4"]
    assert names.index("Conv_4") < min(names.index("Conv_2"), names.index("Conv_3"))
    for name, task in tasks(made):
        assert sum(item.tile.neurons for item in task.items) <= 8
        if name == "Conv_3":
            assert all(item.place.end <= 32 for item in task.items)
    inputs = sample_inputs(made.graph)
    write_project(made.project, tmp_path / "build")
    result = run_build(open_build(tmp_path / "build", chip), "iss", [inputs])
    for name, array in evaluate(made.graph, inputs).items():
        np.testing.assert_array_equal(result.outputs[0][name], array)
    free = [task for name, task in tasks(compiled(Rules())) if name == "Conv_3"]
    assert not free or any(item.place.end > 32 for item in free[0].items)


def test_layers_side_by_side_keep_rules_too() -> None:
    rules = Rules(pin=(Pin("Conv_2", (0, 16)),), at_most=12)
    assert all(sum(item.tile.neurons for item in task.items) <= 12 for _, task in tasks(compiled(rules)))
    assert all(item.place.end <= 16 for item in dict(tasks(compiled(rules)))["Conv_2"].items)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (Rules(apart=(("Conv", "nothing"),)), "there is no layer 'nothing'"),
        (Rules(pin=(Pin("Conv", None, 500),)), "knows no cycles"),
        (Rules(before=(("Conv_3", "Conv_2"), ("Conv_2", "Conv_3"))), "contradict each other"),
        (Rules(together=(("Conv_2", "Conv_3"),), before=(("Conv_4", "Conv_2"),)), "do not begin together on this chip"),
    ],
)
def test_what_the_chip_cannot_keep_is_refused(rules: Rules, message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        compiled(rules)
    assert error.value.hint
