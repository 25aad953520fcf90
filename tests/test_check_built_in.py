"""The targets that come with Dovetail, and a library, pass a quick check; dovetail check TARGET tries all they take."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.guests.check.cases import Limits, base
from dovetail.guests.check.findings import finding_text
from dovetail.guests.check.layers import left_out
from dovetail.guests.check.networks import through_policies
from dovetail.guests.check.suite import Order, check
from dovetail.targets import BUILT_IN, load_target

LIBRARY = Path(__file__).parent / "vendor_library" / "__init__.py"
QUICK = (
    ("macarray", ("convolution",), ("model",)),
    ("macarray", ("depthwise convolution",), ("model",)),
    ("macarray", ("dense without bias",), ("iss",)),
    ("ne16", ("dense",), ("iss",)),
    ("vta", ("dense",), ("iss",)),
    ("diana", ("sum",), ("iss",)),
    ("maeri", ("requantised dense",), ("iss",)),
    ("kestrel", ("sum",), ("iss",)),
    *((str(LIBRARY), (name,), ("host",)) for name in ("vl_dense", "vl_conv", "vl_depthwise")),
)


@pytest.mark.parametrize(
    ("name", "offloads", "simulators"), QUICK, ids=[f"{one[0].split('/')[-2:][0]}-{one[1][0]}" for one in QUICK]
)
def test_a_built_in_target_passes(name: str, offloads: tuple[str, ...], simulators: tuple[str, ...]) -> None:
    found = check(load_target(name), Order(Limits(8_000, 1_500), simulators, offloads))
    assert found.findings == [], "\n\n".join(map(finding_text, found.findings))
    assert found.tested[0].cases >= 12


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_offload_has_layers(name: str) -> None:
    for engine in through_policies(load_target(name)).engines:
        for offload in engine.offloads:
            assert base(offload) is not None, offload.name
            assert left_out(offload.pattern) == (), offload.name
