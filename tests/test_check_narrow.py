"""`dovetail check` draws activations of few bits where a port takes them: bugs in how an engine reads its bytes are
found and named."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from dovetail.guests.check.cases import QUICK, base, derive
from dovetail.guests.check.findings import finding_text
from dovetail.guests.check.layers import TYPES
from dovetail.guests.check.networks import through_policies
from dovetail.guests.check.suite import Order, check
from dovetail.target import Target
from dovetail.targets import load_target
from porting import SMALL

PORT = Path(__file__).parent / "rbe_port" / "rbe.py"
READ = "    x = elements(held.swapaxes(1, 2) if paired else held, bits, signed)\n"
WRITTEN = "fields(y.swapaxes(1, 2), bits).swapaxes(1, 2) if paired else fields(y, bits)"
FAULTS = {
    "order of the operand's": (
        READ,
        READ + "    x = x.reshape(*x.shape[:2], -1, 8 // bits)[..., ::-1].reshape(x.shape)\n",
        "the operand of few bits: elements that share a byte come in the other order",
    ),
    "order of the result's": (
        WRITTEN,
        "fields(y, bits) if not paired else "
        "fields(y.swapaxes(1, 2).reshape(rows, -1, 2)[..., ::-1].reshape(rows, -1, columns), bits).swapaxes(1, 2)",
        "the result of few bits: elements that share a byte come in the other order",
    ),
    "sign": (READ, READ.replace("signed)", "bits == 8)"), "the operand of few bits: it has the wrong sign"),
    "pairs of columns": ("PAIRED * paired", "0 * paired", "the type of operand or result"),
    "last byte of a row": (
        "-(-shape[1 if paired else 2] * bits // 8)",
        "shape[1 if paired else 2] * bits // 8",
        "an address is wrong",
    ),
    "strides": ('strides = (job[f"{name}_row"],', "strides = (shape[1] * shape[2],", "strides"),
}


def rbe(folder: Path, old: str = "", new: str = "") -> Target:
    """The port, with a bug in it."""
    shutil.copytree(PORT.parent, folder, dirs_exist_ok=True)
    text = PORT.read_text()
    assert old in text
    (folder / PORT.name).write_text(text.replace(old, new) if old else text)
    return load_target(str(folder / PORT.name))


def test_narrow_types_are_drawn_beside_sizes_that_fill_no_bytes() -> None:
    (engine,) = through_policies(load_target(str(PORT))).engines
    for offload in engine.offloads:
        start = base(offload)
        assert start is not None
        points = [case.point for case in derive(engine, offload, start, QUICK) if case.taken]
        for axis, size in (("type", "channels"), ("result:clip", "outputs")):
            for number, dtype in enumerate(TYPES):
                if dtype.bits < 8:
                    assert any(point[axis] == number and point[size] % 4 for point in points), (axis, dtype)


@pytest.mark.parametrize("name", FAULTS)
def test_bugs_in_narrow_activations_are_found(name: str, tmp_path: Path) -> None:
    old, new, suspicion = FAULTS[name]
    found = check(rbe(tmp_path, old, new), Order(SMALL, ("model",), ("convolution",))).findings
    assert found and re.search(suspicion, "\n".join(one.suspicions[0] for one in found)), "\n\n".join(
        map(finding_text, found)
    )
