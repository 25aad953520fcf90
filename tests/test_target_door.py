"""The public door of targets: what bundled ones import, a stranger's file can import too."""

from __future__ import annotations

from pathlib import Path

import dovetail.target as dt
from test_order import PACKAGE, imports

TARGETS = PACKAGE / "targets"
FILES = (
    *(TARGETS / f"{name}.py" for name in ("cmsis_nn", "cortex_m", "riscv", "riscv_dot4")),
    *sorted(TARGETS.glob("spinnaker2*.py")),
    *(
        path
        for name in ("ne16", "diana", "macarray", "kestrel", "gemmini")
        for path in sorted((TARGETS / name).glob("*.py"))
    ),
)
PUBLIC = ("dovetail.errors", "dovetail.ir", "dovetail.legalize", "dovetail.records", "dovetail.targets")
"""Packages, whole, that a target may be written with beside `dovetail.target`."""
MODULES = {"dovetail.target", "dovetail.target.layers", "dovetail.target.queue_driver"}
DEVICES = {"dovetail.sim.device", "dovetail.sim.launch_queue", "dovetail.sim.mac_array"}
"""For device models."""


def _is_public(name: str) -> bool:
    return name in MODULES | DEVICES or any(name == one or name.startswith(f"{one}.") for one in PUBLIC)


def test_bundled_targets_are_written_like_a_strangers() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line} imports {name}: a target imports it from dovetail.target"
        for path in FILES
        for name, line, _ in imports(path)
        if not _is_public(name)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_door_has_all_it_promises() -> None:
    assert all(hasattr(dt, name) for name in dt.__all__)
    page = (Path(__file__).parents[1] / "docs" / "port.md").read_text()
    used = {word.split("(")[0].split(".")[0] for word in page.replace("`", " ").split("dt.")[1:]}
    names = {"".join(letter for letter in word if letter.isalnum() or letter == "_") for word in used}
    assert {name for name in names if name[:1].isupper()} <= set(dt.__all__)
