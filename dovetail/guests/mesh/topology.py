"""A mesh in numbers: chips and their links, elements and the routers they are at, and the routes between them.

Routers are ranked. A route goes down in rank first and then only up ("up*/down*" routing), so that no cycle of links
can wait for one another: those down have falling ranks, those up rising ones, and none goes from up to down. From
one source every router is reached through one router before it, so routes to many destinations are a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import TargetError
from dovetail.guests.mesh.layers import Ints
from dovetail.records import Record
from dovetail.target.mesh import Faults, Mesh, Place

FAR = 1 << 20
"""Hops to what cannot be reached."""


def word_of(position: Sequence[int]) -> int:
    """Column, row and number of an element in one word."""
    return position[0] << 24 | position[1] << 16 | position[2]


def name_of(word: int) -> str:
    """Column, row and number of an element in text."""
    return f"({word >> 24}, {word >> 16 & 0xFF}, {word & 0xFFFF})"


class Trees(Record, dict=True):
    """Routes between all pairs of routers."""

    parent: NDArray[np.int32]
    """[source, router]: the router before it on the way; itself at the source, -1 where there is no way."""

    @cached_property
    def hops(self) -> NDArray[np.int32]:
        """[source, router]: links on the way; `FAR` where there is no way."""
        rows = np.arange(len(self.parent), dtype=np.int32)
        source, at = np.broadcast_arrays(rows[:, None], rows)
        hops = np.zeros(self.parent.shape, np.int32)
        while (moving := (at >= 0) & (at != source) & (hops < len(at))).any():
            hops += moving
            at = np.where(moving, self.parent[source, at], at)
        return np.where(at == source, hops, FAR).astype(np.int32)

    @property
    def connected(self) -> bool:
        """True where every router reaches every other."""
        return bool((self.parent >= 0).all())


def ranked_trees(neighbours: Ints, rank: Ints) -> Trees:
    """Routes that fall and then rise in rank, the shortest of those that fall as far as they can.

    Args:
        neighbours: [routers, directions] router in each direction, -1 where there is no link.
        rank: [routers] all different.
    """
    count = len(neighbours)
    # a column per router, a row per source, so that one operation serves all sources
    hops = np.full((count, count), FAR, np.int32)
    parent = np.full((count, count), -1, np.int32)
    np.fill_diagonal(hops, 0)
    np.fill_diagonal(parent, np.arange(count))
    order = np.argsort(rank)
    # of equally short ways some sources take one and some another
    spread = (np.add.outer(np.arange(count) * 7, np.arange(count) * 13) // 4) % 2 == 0
    for down in (True, False):
        falling = hops.copy() if not down else hops
        for router in order[::-1] if down else order:
            for before in neighbours[router]:
                if before < 0 or (rank[before] < rank[router]) == down:
                    continue
                longer = hops[:, before] + 1
                better = (longer < hops[:, router]) | ((longer == hops[:, router]) & (longer < FAR) & spread[:, before])
                if not down:  # what is reached falling keeps its route: one router before it, whatever comes behind
                    better &= falling[:, router] >= FAR
                hops[better, router] = longer[better]
                parent[better, router] = before
    return Trees(parent)


def safe_trees(neighbours: Ints, rank: Ints) -> Trees:
    """`ranked_trees` by the given ranks where they connect everything, else by hops from one of them."""
    trees = ranked_trees(neighbours, rank)
    if trees.connected:
        return trees
    hops = np.where(np.arange(len(rank)) == len(rank) // 2, 0, FAR)
    for _ in rank:
        hops = np.minimum(hops, np.where(neighbours >= 0, hops[neighbours], FAR).min(axis=1) + 1)
    return ranked_trees(neighbours, np.lexsort((rank, hops)).argsort())


def grid_trees(width: int, height: int) -> Trees:
    """X-Y routes over a whole grid: along the row first, then along the column. Router number: row * width + column."""
    x, y = np.arange(width * height) % width, np.arange(width * height) // width
    right, below = x[None] - x[:, None], y[None] - y[:, None]
    across = np.arange(width * height)[None] - np.where(below != 0, np.sign(below) * width, np.sign(right))
    return Trees(across.astype(np.int32))


def tree_links(trees: Trees, source: Ints, flow: Ints, router: Ints) -> tuple[Ints, Ints]:
    """The links flows take to many destinations, each once.

    Args:
        trees: the routes.
        source: [flows] the router each begins at.
        flow: [pairs] which flow, and router: [pairs] one of its destinations.

    Returns:
        Flow and the router at the end of the link, for every link of every flow, the farthest from the source first.
    """
    count = len(trees.parent)
    code = np.unique(flow * count + router)
    hops = trees.hops[source[code // count], code % count]
    ends, carried = [np.zeros(0, np.int64)], np.zeros(0, np.int64)
    for level in range(int(hops.max(initial=0)), 0, -1):
        ends.append(np.unique(np.concatenate((carried, code[hops == level]))))
        which, place = ends[-1] // count, ends[-1] % count
        carried = which * count + trees.parent[source[which], place]
    links = np.concatenate(ends)
    return links // count, links % count


class Topology(Record, dict=True):
    """Chips, routers and elements by number."""

    mesh: Mesh
    places: tuple[Place, ...]
    """Place of each chip."""
    neighbours: Ints
    """[chips, directions]: the chip a working link leads to, -1 for none."""
    between: Trees
    """Routes between chips."""
    inside: Trees
    """X-Y routes on a whole chip."""
    detours: dict[int, Trees]
    """Chip -> routes on it where a link between its routers is dead."""
    router_of: Ints
    """[elements of a chip]: the router each is at."""
    elements: Ints
    """Numbers of the elements that may be used, chip * elements per chip + number on it, in the order of placement."""

    def routes(self, chip: int) -> Trees:
        """The routes on a chip."""
        return self.detours.get(chip, self.inside)

    @property
    def gate(self) -> int:
        """Router where the links to other chips begin."""
        return self.mesh.grid.gate[1] * self.mesh.grid.width + self.mesh.grid.gate[0]

    @property
    def dram(self) -> int:
        """Router of the DRAM."""
        return self.mesh.grid.dram[1] * self.mesh.grid.width + self.mesh.grid.dram[0]

    @cached_property
    def chips(self) -> dict[Place, int]:
        """Place -> number of the chip there."""
        return {place: number for number, place in enumerate(self.places)}

    @cached_property
    def usable(self) -> frozenset[int]:
        """`elements`, to look one up."""
        return frozenset(self.elements.tolist())

    def position(self, element: int) -> tuple[int, int, int]:
        """Column and row of an element's chip, and its number on it."""
        chip, number = divmod(element, self.mesh.per_chip)
        return *self.places[chip], number

    @cached_property
    def capacity(self) -> int:
        """Elements that every chip has at least."""
        return int(np.bincount(self.elements // self.mesh.per_chip, minlength=len(self.places)).min())

    @property
    def routers(self) -> int:
        """Routers on a chip."""
        return self.mesh.grid.width * self.mesh.grid.height

    @cached_property
    def direction_between(self) -> dict[tuple[int, int], int]:
        """(chip, neighbour) -> direction."""
        links = np.argwhere(self.neighbours >= 0)
        return {(int(chip), int(self.neighbours[chip, way])): int(way) for chip, way in links}


def build_topology(mesh: Mesh) -> Topology:
    """Number everything.

    Raises:
        TargetError: the description contradicts itself, or elements cannot be reached.
    """
    _check(mesh)
    places = mesh.places()
    index = {place: number for number, place in enumerate(places)}
    neighbours = _neighbours(mesh, index)
    x, y = np.array(places).T
    span = int(y.max() - y.min()) + 1
    between = safe_trees(neighbours, (x + y) * span + (y - y.min()))
    unreached = np.nonzero((between.parent[0] < 0) | (between.parent[:, 0] < 0))[0]
    if len(unreached):
        raise TargetError(
            f"the elements of {len(unreached)} chips cannot be reached: no working link leads to chip "
            f"{places[unreached[0]]} and back",
            where="mesh description",
            hint="mark their elements as faulty and leave the chips out, or repair a link",
        )
    usable = _usable(mesh, index)
    if not len(usable):
        raise TargetError("no element is left", where="mesh description", hint="leave some out of the faults")
    inside = grid_trees(mesh.grid.width, mesh.grid.height)
    faulty = dict.fromkeys(chip for chip, _, _ in mesh.faults.noc if chip in index)
    detours = {index[chip]: _detour(mesh, chip) for chip in faulty}
    return Topology(mesh, places, neighbours, between, inside, detours, _routers(mesh), usable)


def _check(mesh: Mesh) -> None:
    grid = mesh.grid
    places = mesh.places()
    inside = all(0 <= x < grid.width and 0 <= y < grid.height for x, y in (*grid.without, grid.gate, grid.dram))
    faulty = mesh.faults
    exist = all(0 <= number < mesh.per_chip for _, number in faulty.elements) and all(
        0 <= way < len(mesh.directions) for _, way in faulty.links
    )
    opposite = all((-x, -y) in mesh.directions for x, y in mesh.directions)
    rates = (mesh.rates.port, mesh.rates.noc, mesh.rates.link, mesh.rates.dram)
    problems = [
        (not places or mesh.per_chip < 1, "there are no elements"),
        (len(set(places)) != len(places), "two chips are at one place"),
        (not inside, f"a router lies outside the grid of {grid.width}x{grid.height}"),
        (not exist, "a faulty element or link does not exist"),
        (not opposite, "a link leads one way only"),
        (min(rates) <= 0, f"a rate is {min(rates)} bytes per clock"),
        (not 0 <= mesh.reserved < mesh.per_chip, f"{mesh.reserved} of {mesh.per_chip} elements are reserved"),
    ]
    for wrong, sentence in problems:
        if wrong:
            hint = "mend the Mesh of the target, or --boards, --chips and --faults"
            raise TargetError(sentence, where="mesh description", hint=hint)


def _neighbours(mesh: Mesh, index: dict[Place, int]) -> Ints:
    neighbours = np.full((len(index), len(mesh.directions)), -1, np.int64)
    for chip, (x, y) in enumerate(index):
        for way, (dx, dy) in enumerate(mesh.directions):
            neighbours[chip, way] = index.get((x + dx, y + dy), -1)
    for place, way in mesh.faults.links:
        chip = index.get(place, -1)
        if chip >= 0 and neighbours[chip, way] >= 0:
            dx, dy = mesh.directions[way]
            neighbours[neighbours[chip, way], mesh.directions.index((-dx, -dy))] = -1
            neighbours[chip, way] = -1
    return neighbours


def _detour(mesh: Mesh, chip: Place) -> Trees:
    """Routes on a chip that avoid dead links between its routers.

    Raises:
        TargetError: they cut routers off.
    """
    width, height = mesh.grid.width, mesh.grid.height
    neighbours = routers_beside(mesh, chip)
    columns, rows = np.arange(width * height) % width, np.arange(width * height) // width
    trees = safe_trees(neighbours, (columns + rows) * height + rows)
    if not trees.connected:
        what = f"dead links on chip {chip} cut routers off, so that their elements cannot be reached"
        raise TargetError(what, where="mesh description", hint="mark the chip's elements as faulty")
    return trees


def routers_beside(mesh: Mesh, chip: Place) -> Ints:
    """[routers, 4]: the routers to the right, below, to the left and above each, over links of a chip that work; -1 for
    none."""
    width, height = mesh.grid.width, mesh.grid.height
    dead = {frozenset((a, b)) for place, a, b in mesh.faults.noc if place == chip}
    routers = np.full((width * height, 4), -1, np.int64)
    for y in range(height):
        for x in range(width):
            for way, (dx, dy) in enumerate(((1, 0), (0, 1), (-1, 0), (0, -1))):
                near = (x + dx, y + dy)
                if 0 <= near[0] < width and 0 <= near[1] < height and frozenset(((x, y), near)) not in dead:
                    routers[y * width + x, way] = near[1] * width + near[0]
    return routers


def _routers(mesh: Mesh) -> Ints:
    """The router of each element of a chip, in the order of a path that visits neighbours."""
    grid = mesh.grid
    path = [(x, y) for x in range(grid.width) for y in (range(grid.height) if x % 2 == 0 else range(grid.height)[::-1])]
    numbers = [y * grid.width + x for x, y in path if (x, y) not in grid.without]
    return np.repeat(np.array(numbers, np.int64), grid.elements)


def _usable(mesh: Mesh, index: dict[Place, int]) -> Ints:
    """Elements in the order of placement: board by board, along columns of chips up and down."""
    places, per = list(index), mesh.per_chip
    board = len(mesh.board) if mesh.chips is None else len(places)
    order = []
    for first in range(0, len(places), board):
        chips = range(first, min(first + board, len(places)))
        columns = sorted({places[chip][0] for chip in chips})
        for turn, column in enumerate(columns):
            inside = sorted((chip for chip in chips if places[chip][0] == column), key=lambda chip: places[chip][1])
            order += inside if turn % 2 == 0 else inside[::-1]
    alive = np.ones((len(places), per), bool)
    alive[:, per - mesh.reserved :] = False
    for place, number in mesh.faults.elements:
        if place in index:
            alive[index[place], number] = False
    numbers = (np.array(order)[:, None] * per + np.arange(per)[None]).reshape(-1)
    return numbers[alive.reshape(-1)[numbers]]


def random_faults(mesh: Mesh, share: float, seed: int) -> Mesh:
    """The mesh with a share of its elements, links between chips and links between routers dead, by a seed."""
    generator = np.random.default_rng(seed)
    places, grid = mesh.places(), mesh.grid
    dead = np.argwhere(generator.random((len(places), mesh.per_chip)) < share)
    ways = range(len(mesh.directions) // 2)
    links = frozenset((place, way) for place in places for way in ways if generator.random() < share)
    pairs = [
        ((x, y), (x + dx, y + dy))
        for y in range(grid.height)
        for x in range(grid.width)
        for dx, dy in ((1, 0), (0, 1))
        if x + dx < grid.width and y + dy < grid.height
    ]
    hit = np.argwhere(generator.random((len(places), len(pairs))) < share)
    noc = frozenset((places[chip], *pairs[pair]) for chip, pair in hit)
    elements = frozenset((places[chip], int(number)) for chip, number in dead)
    return replace(mesh, faults=Faults(elements, links, noc))
