"""A layer alone on a chip, beside the public simulator of SpiNNaker2."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.errors import PlanError
from dovetail.guests.mesh.layers import MeshLayer, layers_of
from dovetail.schedule.partition import partition
from dovetail.target.mesh import Mesh
from dovetail.targets.spinnaker2 import TARGET
from networks import Net, single

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))
from mesh_ways import SIMULATOR_CHIP, MappingStrategy, stream_clocks, tiling_of

# Layers of VGG-16 by the simulator's names: size, channels in and out, and what is pooled behind it.
VGG = {
    "CONV_1": (224, 3, 64, 1),
    "CONV_2": (224, 64, 64, 2),
    "CONV_4": (112, 64, 128, 1),
    "CONV_5": (112, 128, 128, 2),
    "CONV_7": (56, 128, 256, 1),
    "CONV_8": (56, 256, 256, 1),
    "CONV_9": (56, 256, 256, 2),
    "CONV_11": (28, 256, 512, 1),
    "CONV_12": (28, 512, 512, 1),
    "CONV_13": (28, 512, 512, 2),
    "CONV_15": (14, 512, 512, 1),
    "CONV_16": (14, 512, 512, 1),
    "CONV_17": (14, 512, 512, 2),
}
# Clocks without fusion, with fusion, with fusion and reuse (hardware/spinnaker2.md, section 4).
PUBLISHED = {
    "CONV_1": (494729, 114249, 119254),
    "CONV_5": (4139243, 3557807, 381753),
    "CONV_11": (1409122, 1302970, 263877),
}
OUTSIDE = {("CONV_1", MappingStrategy.FUSED)}
"""Explained by no mechanism found: 16 groups of channels read the image 16 times."""


@lru_cache
def layer_of(size: int, inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> MeshLayer:
    graph = single(size, inputs, outputs, kernel, stride)
    return layers_of(graph, partition(graph, TARGET))[0]


@lru_cache
def dense_of(inputs: int, outputs: int) -> MeshLayer:
    net = Net("dense", (inputs,))
    graph = net.finish(net.dense(net.x, outputs))
    return layers_of(graph, partition(graph, TARGET))[0]


def clocks_of(name: str, mesh: Mesh = SIMULATOR_CHIP) -> list[float]:
    """By all ways."""
    *shape, pool = VGG[name]
    return [stream_clocks(layer_of(*shape), mesh, way, pool, stored=name != "CONV_1") for way in MappingStrategy]


def errors_on(mesh: Mesh) -> dict[tuple[str, MappingStrategy], float]:
    """How far off each published number is, as a share of it."""
    return {
        (name, way): abs(clocks / known - 1)
        for name, published in PUBLISHED.items()
        for way, clocks, known in zip(MappingStrategy, clocks_of(name, mesh), published, strict=True)
    }


def test_published_clocks() -> None:
    errors = errors_on(SIMULATOR_CHIP)
    print({f"{name}, {way}": round(error, 3) for (name, way), error in errors.items()})
    assert median(errors.values()) <= 0.05
    assert {which for which, error in errors.items() if error > 0.1} == OUTSIDE


@pytest.mark.parametrize("rates", [{"dram": 64}, {"noc": 8}, {"port": 1.0}])
def test_every_mechanism_counts(rates: dict[str, float]) -> None:
    errors = errors_on(replace(SIMULATOR_CHIP, rates=replace(SIMULATOR_CHIP.rates, **rates)))
    assert sum(error > 0.1 for error in errors.values()) >= 3


@given(
    size=st.sampled_from([7, 8, 14, 28, 30, 56]),
    inputs=st.sampled_from([3, 16, 64, 256]),
    outputs=st.sampled_from([4, 32, 64, 100, 256]),
    kernel=st.sampled_from([1, 3, 5]),
    stride=st.sampled_from([1, 2]),
)
def test_no_way_beats_its_floors(size: int, inputs: int, outputs: int, kernel: int, stride: int) -> None:
    layer = layer_of(size, inputs, outputs, kernel, stride)
    try:
        tiling = tiling_of(layer, SIMULATOR_CHIP)
    except PlanError as error:
        assert "no tile" in error.what
        return
    height, width, channels = layer.image
    assert tiling.rows * tiling.columns * tiling.tiles == height * width
    assert tiling.channels * tiling.groups >= channels
    taps = kernel * kernel * -(-width // 16) * height * inputs * -(-channels // 4)
    for way in MappingStrategy:
        clocks = stream_clocks(layer, SIMULATOR_CHIP, way)
        assert clocks >= taps / SIMULATOR_CHIP.per_chip
        assert clocks >= inputs * outputs * kernel * kernel / SIMULATOR_CHIP.rates.dram


def test_only_layers_of_the_array() -> None:
    with pytest.raises(PlanError, match="only convolutions"):
        stream_clocks(replace(layer_of(7, 64, 64), kind="core"), SIMULATOR_CHIP, MappingStrategy.ALONE)


@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 2048), (100, 1000)])
def test_dense_layers_wait_for_their_weights(inputs: int, outputs: int) -> None:
    layer = dense_of(inputs, outputs)
    alone, fused, shared = (stream_clocks(layer, SIMULATOR_CHIP, way) for way in MappingStrategy)
    weights = inputs * outputs / SIMULATOR_CHIP.rates.dram
    assert weights < fused == shared < alone
    if inputs > 1000:
        assert alone < 1.15 * weights


def test_a_chip_of_too_few_routers() -> None:
    few = replace(SIMULATOR_CHIP, grid=replace(SIMULATOR_CHIP.grid, width=2, height=2))
    with pytest.raises(PlanError, match="4 of 4 routers"):
        tiling_of(layer_of(28, 64, 64), few)
