"""Routes of the user's own: the ways between chips, and between the routers of a chip, that a file gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from dovetail.guests.mesh.layers import Ints
from dovetail.guests.mesh.mapping_file import RouteWish
from dovetail.guests.mesh.placement import SectionPlacement
from dovetail.guests.mesh.topology import FAR, Topology, Trees, build_topology, routers_beside


def with_routes(topology: Topology, routes: Sequence[RouteWish]) -> Topology:
    """The topology with some routes as a file gives them; every other stays.

    Messages to several readers share their way, so that from one source each place is reached from one place only; and
    no ring of links may wait for one another.

    Raises:
        PlanError: a route takes a link that is not there or dead; two routes contradict each other; links wait for one
            another in a ring.
    """
    between = [route for route in routes if route.chip is None]
    if between:
        ways = [(tuple(topology.chips[place] for place in route.way), route) for route in between]
        topology = replace(topology, between=_changed(topology.between, topology.neighbours, ways))
    width = topology.mesh.grid.width
    for chip in dict.fromkeys(route.chip for route in routes if route.chip is not None):
        number = topology.chips[chip]
        ways = [(tuple(y * width + x for x, y in one.way), one) for one in routes if one.chip == chip]
        trees = _changed(topology.routes(number), routers_beside(topology.mesh, chip), ways)
        topology = replace(topology, detours={**topology.detours, number: trees})
    return topology


def routes_of(placed: SectionPlacement) -> list[str]:
    """The ways messages take between chips, and those on chips that are not the mesh's own choice, as YAML."""
    topology, flows = placed.topology, placed.flows
    visits = np.unique(np.column_stack((flows.chip[flows.visit_flow], flows.visit_chip)), axis=0)
    routes = [str([list(topology.places[chip]) for chip in way]) for way in _ways(topology.between, visits)]
    width, usual = topology.mesh.grid.width, build_topology(topology.mesh)
    for chip in sorted(topology.detours):
        changed = np.argwhere(topology.routes(chip).parent != usual.routes(chip).parent)
        place = list(topology.places[chip])
        for way in _ways(topology.routes(chip), changed):
            routes.append(f"{{chip: {place}, routers: {[[at % width, at // width] for at in way]}}}")
    return routes


def _ways(trees: Trees, pairs: Ints) -> list[list[int]]:
    """The ways between pairs of source and destination; none that is the beginning of another."""
    wanted = {(int(source), int(last)) for source, last in pairs}
    inner = {(source, int(trees.parent[source, last])) for source, last in wanted}
    ways = []
    for source, last in sorted(wanted - inner):
        way = [last]
        while way[-1] != source:
            way.append(int(trees.parent[source, way[-1]]))
        ways.append(way[::-1])
    return ways


_Way = tuple[tuple[int, ...], RouteWish]


def _changed(trees: Trees, neighbours: Ints, ways: Sequence[_Way]) -> Trees:
    parent = trees.parent.copy()
    owners: dict[tuple[int, int], RouteWish] = {}
    for way, wish in ways:
        for before, here in pairwise(way):
            places = dict(zip(way, wish.way, strict=True))
            if here not in neighbours[before]:
                what = f"there is no working link from {list(places[before])} to {list(places[here])}"
                raise wish.at.wrong(what, "a route goes from neighbour to neighbour")
            other = owners.setdefault((way[0], here), wish)
            if other is not wish and parent[way[0], here] != before:
                what = f"from {list(wish.way[0])}, {list(places[here])} is reached by two ways"
                raise wish.at.wrong(what, "messages to several readers share their way: give one", other.at)
            parent[way[0], here] = before
    changed = Trees(parent)
    _check_rings(changed, [(way, wish) for way, wish in ways])
    return changed


def _check_rings(trees: Trees, ways: Sequence[_Way]) -> None:
    """Refuse routes by which some links wait for one another in a ring: link (a, b), then (b, c) on a message's way."""
    count = len(trees.parent)
    source, last = np.nonzero((trees.hops >= 2) & (trees.hops < FAR))
    middle = trees.parent[source, last].astype(np.int64)
    first = trees.parent[source, middle]
    pairs = np.unique(np.column_stack((first * count + middle, middle * count + last)), axis=0)
    left = pairs
    while len(left):  # take away links that wait for none, or for which none waits
        kept = left[np.isin(left[:, 0], left[:, 1]) & np.isin(left[:, 1], left[:, 0])]
        if len(kept) == len(left):
            break
        left = kept
    if not len(left):
        return
    ring = set(map(tuple, left.tolist()))
    blamed = []
    for way, wish in ways:
        links = [a * count + b for a, b in pairwise(way)]
        if any(pair in ring for pair in pairwise(links)):
            blamed.append(wish)
    wish = blamed[-1] if blamed else ways[-1][1]
    other = blamed[0].at if len(blamed) > 1 else None
    what = "with this route links wait for one another in a ring, and messages could stop for ever"
    raise wish.at.wrong(
        what, "take routes that turn as the others do: along X first, between chips falling, then rising", other
    )
