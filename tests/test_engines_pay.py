"""An engine never makes a network slower than the core beside it alone, on any target that comes with Dovetail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from cycle_budget import within_budget
from dovetail.codegen.emit import write_project
from dovetail.compile import Options, compile_model, sample_inputs
from dovetail.errors import PlanError
from dovetail.run import open_build, run_build
from dovetail.target import Core, Policy, Target
from dovetail.targets import BUILT_IN, load_target
from dovetail.targets.maeri import target as maeri
from dovetail.targets.maeri.config import MaeriConfig, with_multipliers
from firmware import require_chip
from test_end_to_end import network_file

pytestmark = pytest.mark.oracles
NETWORKS = ("ic_resnet8", "kws_dscnn", "vww_mobilenetv1", "ad_autoencoder")
WHOLE = (Policy("exact", "nothing is rewritten", ()),)


def targets() -> Iterator[Target]:
    """Those with engines of their own that are simulated, and an FPGA's MAERI."""
    for name in BUILT_IN:
        found = load_target(name)
        if any(engine.device for engine in found.engines):
            yield found
    yield maeri(MaeriConfig(requantise=False), "maeri_sums")


TARGETS = {target.name: target for target in targets()}
TOO_LARGE = {("spinnaker2", network) for network in ("ic_resnet8", "vww_mobilenetv1", "ad_autoencoder")}
"""What the 92 KiB of one element do not hold."""


def cycles(network: str, target: Target) -> int:
    """Of one inference, whose outputs are those of the integer graph."""
    compiled = compile_model(network_file(network), target, Options())
    with TemporaryDirectory() as folder:
        write_project(compiled.project, Path(folder) / "build")
        found = run_build(open_build(Path(folder) / "build", target), "iss", [sample_inputs(compiled.graph)])
    return found.simulation.inferences[0].total_cycles or 0


@cache
def alone(network: str, isa: str) -> int:
    """The same on a core of this instruction set with one memory."""
    plain = {"rv32": "riscv", "rv64": "riscv64"}
    base = load_target(plain.get(isa[:4], isa.replace("-", "_")))
    return cycles(network, replace(base, core=Core(isa), policies=WHOLE))


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", TARGETS)
def test_no_engine_makes_a_network_slower(name: str, network: str, update: bool) -> None:
    require_chip()
    target = TARGETS[name]
    if (name, network) in TOO_LARGE:
        with pytest.raises(PlanError, match=r"bytes short|are free"):
            compile_model(network_file(network), target, Options())
        return
    with_engines, without = cycles(network, target), alone(network, target.core.isa)
    print(f"{network} on {name}: {with_engines:,} cycles, on its core alone {without:,}")
    assert with_engines <= without
    within_budget(network, name, with_engines, update)


def test_more_multipliers_are_felt() -> None:
    """What 16 and 256 multipliers of MAERI take for the network with the most elements per product."""
    require_chip()
    found = [
        cycles("vww_mobilenetv1", maeri(with_multipliers(MaeriConfig(256, 256, 256), count), "maeri"))
        for count in (16, 64, 256)
    ]
    print(f"16, 64 and 256 multipliers: {found}")
    assert found[0] >= 2 * found[2] and found == sorted(found, reverse=True)
