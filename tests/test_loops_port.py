"""Ports at the level of loops: the engine of docs/port_loops.md, its tiles, and what is said of memories too small."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dovetail.compile import Options, compile_model
from dovetail.errors import PlanError, TargetError
from dovetail.guests.newtarget import PortStyle, PortWish, write_new_target
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.loops import port
from dovetail.target import Operand, Target
from dovetail.targets import load_target
from firmware import require_chip
from test_end_to_end import network_file
from test_vendor_library import run_equals_graph


@pytest.fixture
def finch(tmp_path: Path) -> Target:
    """The engine of docs/port_loops.md."""
    pytest.importorskip("exo")
    write_new_target("finch", tmp_path, wish=PortWish(PortStyle.LOOPS))
    return load_target(str(tmp_path / "finch.py"))


@pytest.mark.parametrize("simulator", ["iss", "host"])
def test_a_network_in_tiles(finch: Target, simulator: str, tmp_path: Path) -> None:
    """Layers larger than the engine's memories are cut, and equal the integer graph."""
    if simulator == "iss":
        require_chip()
    compiled = compile_model(network_file("ic_resnet8"), finch, Options())
    assert any(len(tiling.tiles) > 1 for tiling in compiled.plan.tilings.values())
    assert sum(region.macs for region in compiled.regions if region.engine) > 0.96 * sum(
        region.macs for region in compiled.regions
    )
    run_equals_graph(compiled, finch, tmp_path / "build", simulator, count=1)


def test_a_tile_that_does_not_fit_is_said(finch: Target) -> None:
    """Without the limit that cuts layers, the memory that is too small and what was to lie there."""
    (engine,) = finch.engines
    kept = tuple(
        replace(offload, constraints=tuple(one for one in offload.constraints if "must fit" not in one.sentence))
        for offload in engine.offloads
    )
    with pytest.raises(PlanError, match=r"a tile needs \d+ bytes of (ACC|INP|WGT), which has \d+"):
        compile_model(network_file("ic_resnet8"), replace(finch, engines=(replace(engine, offloads=kept),)), Options())


@pytest.mark.parametrize("kind", [Conv2d, DepthwiseConv2d, FullyConnected])
def test_the_loops_of_each_kind(kind: Any) -> None:
    """One text for every layer of a kind, bias, scale and shift as arrays."""
    loops = port.example(kind, 4)
    assert all(f"{name}: [i32][" in loops.text for name in ("bias", "scale", "shift"))
    assert "digits" not in loops.text and loops.sizes["ICB"] == 2


def test_blocks_of_a_row_major_operand() -> None:
    """Strides of blocks, rows, columns, images and channels; a matrix has neither rows nor columns."""
    assert port.of_blocks(Operand(64, (1 << 10, 80, 8, 1)), 4) == Operand(64, (4, 80, 8, 1 << 10, 1))
    assert port.of_blocks(Operand(64, (32, 1)), 4) == Operand(64, (4, 0, 0, 32, 1))
    assert port.dense(8, (2, 3, 4), 4) == Operand(8, (48, 16, 4))


def test_a_schedule_that_fits_no_instruction(finch: Target, tmp_path: Path) -> None:
    """Says which statement is left, and around which loops."""
    text = (tmp_path / "finch.py").read_text()
    (tmp_path / "slow.py").write_text(text.replace('    made = port.outside(made, "kw", "so", "sn", "sw", "sh")\n', ""))
    slow = load_target(str(tmp_path / "slow.py"))
    with pytest.raises(TargetError, match=r"no instruction covers the statement 'total\[sb, sh, sw, sn, so\]"):
        compile_model(network_file("ic_resnet8"), slow, Options())
