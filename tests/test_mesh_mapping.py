"""Partition, placement and routing on a mesh: exact, within every limit, whatever is faulty, and fast."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from conftest import shared_dir
from dovetail.compile import Options, prepare, sample_inputs
from dovetail.errors import PlanError, TargetError
from dovetail.guests.mesh.mapping import map_network, measure
from dovetail.guests.mesh.partition import Objective
from dovetail.guests.mesh.pieces import check_covered, execute
from dovetail.guests.mesh.placement import Links, MeshMapping, Router, SectionPlacement
from dovetail.guests.mesh.simulate import simulate
from dovetail.guests.mesh.topology import build_topology, random_faults
from dovetail.ir.graph import Graph, evaluate
from dovetail.schedule.partition import partition
from dovetail.target.mesh import Faults, Mesh
from dovetail.targets import load_target
from dovetail.targets.spinnaker2 import MESH, TARGET
from networks import image_net, resnet50, single, vgg16

OBJECTIVES = (Objective.LATENCY, Objective.THROUGHPUT)


def dependencies(placed: SectionPlacement) -> list[tuple[int, int]]:
    """(link, the link after it) of every message's tree. Links on a chip count twice, since what comes from other chips
    has a channel of its own there."""
    router = Router(placed)
    found: set[tuple[int, int]] = set()
    links = router.links
    sources = set(zip(placed.chip.tolist(), placed.router.tolist(), placed.traffic.group.tolist(), strict=True))
    start = placed.traffic.start
    for chip, at, group in sorted(sources):
        members = placed.traffic.members[start[group] : start[group + 1]]
        segments = router.to_pieces(chip, at, members.tolist(), False)
        numbers = [
            [link + links.count * (number > 0 and link >= links.noc) for link in segment.link]
            for number, segment in enumerate(segments)
        ]
        for own, segment in zip(numbers, segments, strict=True):
            found.update((own[before], link) for link, before in zip(own, segment.before, strict=True) if before >= 0)
            found.update((own[place], numbers[other][0]) for other, place in segment.onward if place >= 0)
    return sorted(found)


def cyclic(pairs: list[tuple[int, int]]) -> bool:
    """True where some links wait for one another in a ring: `pairs` are (link, the link after it)."""
    after: dict[int, set[int]] = {}
    waited: dict[int, int] = {}
    for link, following in pairs:
        if following not in after.setdefault(link, set()):
            after[link].add(following)
            waited[following] = waited.get(following, 0) + 1
    ready = [link for link in after if not waited.get(link)]
    while ready:
        for following in after.get(ready.pop(), ()):
            waited[following] -= 1
            if not waited[following]:
                ready.append(following)
    return any(waited.values())


def mapped(graph: Graph, mesh: Mesh, objective: Objective = Objective.THROUGHPUT) -> MeshMapping:
    """A network on a mesh as a whole."""
    return map_network(graph, partition(graph, TARGET), build_topology(mesh), objective, whole=True)


@lru_cache
def tiny(name: str) -> Graph:
    """One of the MLPerf Tiny networks."""
    file = shared_dir() / "models" / "mlperf_tiny" / f"{name}_int8.tflite"
    return prepare(file, load_target("spinnaker2"), Options())


def check_exact(graph: Graph, found: MeshMapping) -> None:
    """The pieces together give the integer graph's outputs, which are not all alike."""
    given = sample_inputs(graph)
    expected, computed = evaluate(graph, given), execute(found, given)
    for name in graph.outputs:
        assert len(np.unique(expected[name])) > 1
        assert np.array_equal(expected[name], computed[name])


def check_limits(found: MeshMapping) -> None:
    """Every piece fits its element, no element has two, tables are within their limit, nothing can wait in a ring."""
    mesh, per = found.mesh, found.mesh.per_chip
    for section, placed, tables in zip(found.sections, found.placed, found.tables, strict=True):
        assert all((stage.memory <= min(mesh.usable, 96 * 1024)).all() for stage in section.stages)
        assert all((stage.costs.fixed > mesh.code + mesh.stack).all() for stage in section.stages)
        assert len(np.unique(placed.element)) == section.pieces
        assert set(placed.element.tolist()) <= set(found.topology.elements.tolist())
        assert check_covered(section, placed.traffic) > 0 or len(section.stages) == 1
        assert tables.largest() <= mesh.route_entries
        assert not cyclic(dependencies(placed))
        dead = {(found.topology.places.index(place), number) for place, number in mesh.faults.elements}
        assert dead.isdisjoint(divmod(element, per) for element in placed.element.tolist())


@pytest.mark.parametrize(
    ("name", "chips", "objective"),
    [
        *(
            (name, 1, objective)
            for objective in OBJECTIVES
            for name in ("ic_resnet8", "vww_mobilenetv1", "kws_dscnn", "ad_autoencoder")
        ),
        ("ic_resnet8", 8, Objective.LATENCY),
        ("ad_autoencoder", 8, Objective.THROUGHPUT),
    ],
)
def test_tiny_networks_are_exact(name: str, chips: int, objective: Objective) -> None:
    found = mapped(tiny(name), MESH.resized(chips=chips), objective)
    assert found.resident
    check_limits(found)
    check_exact(tiny(name), found)


@pytest.mark.parametrize("make", [vgg16, resnet50])
def test_small_shapes_are_exact(make: object) -> None:
    assert callable(make)
    graph = make(64, 0.25, 40)
    for chips in (1, 3):
        found = mapped(graph, MESH.resized(chips=chips))
        check_limits(found)
        check_exact(graph, found)


def test_sums_are_cut() -> None:
    graph = single(4, 512, 64)
    found = mapped(graph, MESH.resized(chips=1), Objective.LATENCY)
    assert max(stage.cut.sums for stage in found.sections[0].stages) > 1
    check_exact(graph, found)


def test_a_value_convolved_and_added_again() -> None:
    """Pieces read one part of it through the window, another for the addition."""
    net = image_net("again", 12, 16)
    value = net.convolution(net.x, 16, relu=True)
    graph = net.finish(net.addition(value, net.convolution(value, 16), relu=True))
    found = mapped(graph, MESH.resized(chips=3), Objective.LATENCY)
    assert max(stage.cut.rows for stage in found.sections[0].stages) > 1
    check_limits(found)
    check_exact(graph, found)


def test_full_shapes_on_a_board() -> None:
    graph = resnet50()
    began = time.process_time()
    found = mapped(graph, MESH)
    assert time.process_time() - began < 20
    check_limits(found)
    timing = simulate(found.whole[0], 8)
    assert timing.interval <= 1.25 * timing.bound
    print(f"ResNet-50: {found.sections[0].pieces} pieces, {timing.interval:.0f} clocks, bound {timing.bound:.0f}")


def test_a_network_too_large_for_a_chip_is_refused_with_what_is_short() -> None:
    graph = resnet50()
    regions, topology = partition(graph, TARGET), build_topology(MESH.resized(chips=1))
    sentence = "conv_47 alone has more pieces than there are elements, 152 elements are there"
    for whole, more in ((True, ""), (False, "; in sections, code and stack of 56 layers take 96256 of an element's")):
        with pytest.raises(PlanError, match=sentence + more):
            map_network(graph, regions, topology, Objective.THROUGHPUT, whole=whole)


@pytest.mark.parametrize(("chips", "share", "seed"), [(None, 0.01, 1), (16, 0.03, 0)])
def test_faults(chips: int | None, share: float, seed: int) -> None:
    mesh = random_faults(MESH.resized(chips=chips), share, seed)
    assert mesh.faults.elements and mesh.faults.links and mesh.faults.noc
    found = mapped(tiny("ic_resnet8"), mesh)
    check_limits(found)
    check_exact(tiny("ic_resnet8"), found)
    check_links_alive(found)


def check_links_alive(found: MeshMapping) -> None:
    """No byte goes over a dead link, between chips or on one."""
    placed, _ = found.whole
    topology, grid, links = found.topology, found.mesh.grid, Links(found.topology)
    busy = simulate(placed, 1).busy
    for place, way in found.mesh.faults.links:
        chip = topology.places.index(place)
        assert placed.links[chip, way] == 0 and busy[chip * len(found.mesh.directions) + way] == 0
    for place, a, b in found.mesh.faults.noc:
        chip = topology.places.index(place)
        routers = [y * grid.width + x for x, y in (a, b)]
        assert busy[links.inside(chip, *routers)] == busy[links.inside(chip, *routers[::-1])] == 0


def test_loads_equal_those_of_every_message() -> None:
    """The bytes on each link, summed message by message along its tree."""
    found = mapped(tiny("ic_resnet8"), MESH.resized(chips=4), Objective.LATENCY)
    placed, _ = found.whole
    timing = measure(found, 1).timing
    assert timing is not None
    rates = found.mesh.rates
    ways = len(found.mesh.directions)
    chips = len(found.topology.places)
    between = timing.busy[: chips * ways].reshape(chips, ways) * rates.link
    assert np.allclose(between, placed.links)
    assert placed.links.sum() > 0


def test_routes_are_shortest_on_a_whole_board() -> None:
    topology = build_topology(MESH)
    for source in (0, 17, 47):
        hops = {source: 0}
        queue = deque([source])
        while queue:
            chip = queue.popleft()
            for near in topology.neighbours[chip].tolist():
                if near >= 0 and near not in hops:
                    hops[near] = hops[chip] + 1
                    queue.append(near)
        assert [hops[chip] for chip in range(48)] == topology.between.hops[source].tolist()


def test_back_pressure() -> None:
    """A piece is never more inputs ahead of a reader than the reader has slots."""
    found = mapped(tiny("ic_resnet8"), MESH.resized(chips=1))
    placed, _ = found.whole
    timing = measure(found, 10).timing
    assert timing is not None
    members = placed.traffic.set_of_members()
    for piece in range(placed.section.pieces):
        here = members == placed.traffic.group[piece]
        for reader, held in zip(placed.traffic.members[here], placed.traffic.held[here], strict=True):
            # when input n begins two later here, its message of input n is gone: the reader has finished n - held
            begun = timing.start[2 + held :, piece]
            assert (begun >= timing.finish[: len(begun), reader]).all()


def test_the_tables_lead_every_message_to_its_readers() -> None:
    """Follows each key from chip to chip through the entries alone."""
    found = mapped(tiny("ic_resnet8"), MESH.resized(chips=6))
    placed, tables = found.whole
    topology = found.topology
    entries: dict[int, list[tuple[int, int, int, int]]] = {}
    for row in zip(tables.chip, tables.first, tables.keys, tables.ways, tables.local, strict=True):
        entries.setdefault(int(row[0]), []).append(tuple(int(value) for value in row[1:]))  # type: ignore[arg-type]
    assert len(np.unique(tables.key)) == placed.section.pieces
    for piece in range(placed.section.pieces):
        group = int(placed.traffic.group[piece])
        wanted = set(placed.traffic.members[placed.traffic.start[group] : placed.traffic.start[group + 1]].tolist())
        got: list[int] = []
        queue = [int(placed.chip[piece])] if wanted else []
        while queue:
            chip = queue.pop()
            key = int(tables.key[piece])
            hits = [entry for entry in entries[chip] if entry[0] <= key < entry[0] + entry[1]]
            assert len(hits) == 1
            _, _, ways, local = hits[0]
            queue += [int(topology.neighbours[chip, way]) for way in range(6) if ways >> way & 1]
            if local >= 0:
                span = slice(placed.traffic.start[local], placed.traffic.start[local + 1])
                got += [m for m in placed.traffic.members[span].tolist() if placed.chip[m] == chip]
        assert sorted(got) == sorted(wanted)


def test_more_memory_or_elements_is_never_refused_for_less() -> None:
    """Both objectives, each best at its own."""
    graph = tiny("ic_resnet8")
    quick, many = (measure(mapped(graph, MESH.resized(chips=1), objective), 10) for objective in OBJECTIVES)
    assert quick.latency < many.latency
    assert many.interval < quick.interval
    assert quick.bottleneck and many.bottleneck


def test_a_layer_too_large_is_refused_with_its_levers() -> None:
    graph = tiny("ic_resnet8")
    small = replace(MESH.resized(chips=1), usable=MESH.code + MESH.stack + 300)
    with pytest.raises(PlanError, match=rf"takes \d+ bytes, an element has {small.usable}") as caught:
        mapped(graph, small)
    assert "smallest piece" in str(caught.value) and "Mesh.code" in str(caught.value)


def test_unreachable_elements_are_refused() -> None:
    cut_off = Faults(links=frozenset(((0, 0), way) for way in range(6)))
    with pytest.raises(TargetError, match="cannot be reached"):
        build_topology(replace(MESH, faults=cut_off))
    inside = Faults(noc=frozenset({((0, 0), (0, 0), (1, 0)), ((0, 0), (0, 0), (0, 1))}))
    with pytest.raises(TargetError, match="cut routers off"):
        build_topology(replace(MESH, faults=inside))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"reserved": 152}, "152 of 152 elements are reserved"),
        ({"rates": replace(MESH.rates, link=0)}, "a rate is 0"),
        ({"board": ((0, 0), (0, 0))}, "two chips are at one place"),
        ({"faults": Faults(elements=frozenset({((0, 0), 999)}))}, "does not exist"),
        ({"directions": ((1, 0),)}, "one way only"),
    ],
)
def test_descriptions_that_contradict_themselves(wrong: dict[str, object], sentence: str) -> None:
    with pytest.raises(TargetError, match=sentence):
        build_topology(replace(MESH, **wrong))  # type: ignore[arg-type]


def test_reserved_elements_are_left_alone() -> None:
    topology = build_topology(replace(MESH.resized(chips=2), reserved=8))
    assert len(topology.elements) == 2 * 144
    assert (topology.elements % 152 < 144).all()


def test_two_runs_give_the_same() -> None:
    net = image_net("two", 16, 8)
    network = net.finish(net.convolution(net.convolution(net.x, 16, relu=True), 16, relu=True))
    first, second = (mapped(network, MESH.resized(chips=3)) for _ in range(2))
    assert np.array_equal(first.whole[0].element, second.whole[0].element)
    assert np.array_equal(first.whole[1].key, second.whole[1].key)
