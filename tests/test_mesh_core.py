"""The clocks an element's core is charged with are those that `scripts/mesh_core.py` measures."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from dovetail.errors import TargetError
from dovetail.guests.mesh.compiled import with_compiler
from dovetail.targets import load_target
from dovetail.targets.spinnaker2 import MESH

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))
from mesh_core import fitted, measured

pytestmark = pytest.mark.oracles


def test_the_core_is_charged_with_what_was_measured() -> None:
    if find_spec("unicorn") is None or find_spec("ziglang") is None:
        pytest.skip("elements' firmware needs unicorn and ziglang")
    core, stages = measured(with_compiler(load_target("spinnaker2")))
    of_sections = {
        "section",
        "section_go",
        "padding_row",
        "padding",
    }  # fitted to executed sections: tests/test_mesh_sections.py
    shipped = {name: clocks for name, clocks in asdict(MESH.core).items() if name not in of_sections}
    found = {name: clocks for name, clocks in asdict(core).items() if name in shipped}
    assert found == pytest.approx(shipped, abs=0.15)
    ratios = np.concatenate([one.charged(core) / one.executed for one in stages])
    assert ratios.min() > 0.8 and ratios.max() < 1.25
    slower = fitted([replace(one, turns=one.turns * 2) for one in stages if not one.layer.on_array])
    assert slower.read == pytest.approx(2 * core.read, rel=0.1)


def test_elements_with_a_compiler_of_their_own_are_refused() -> None:
    with pytest.raises(TargetError, match="its elements have no MAC array"):
        measured(with_compiler(load_target("macarray")))
