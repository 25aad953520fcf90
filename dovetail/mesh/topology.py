"""A mesh description in numbers: chips and their links, routes between them, elements and the routers they are at."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import TargetError
from dovetail.mesh.trees import FAR, Trees, grid_trees, safe_trees
from dovetail.target.mesh import Faults, Mesh, Place

Ints = NDArray[Any]


@dataclass(frozen=True)
class Topology:
    """Chips, routers and elements by number."""

    mesh: Mesh
    places: tuple[Place, ...]
    """Of each chip."""
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
        found = np.argwhere(self.neighbours >= 0)
        return {(int(chip), int(self.neighbours[chip, way])): int(way) for chip, way in found}


def build_topology(mesh: Mesh) -> Topology:
    """Number everything.

    Raises:
        TargetError: the description contradicts itself, or elements cannot be reached.
    """
    _check(mesh)
    places = mesh.places()
    index = {place: number for number, place in enumerate(places)}
    neighbours = _neighbours(mesh, places, index)
    x, y = np.array(places).T
    span = int(y.max() - y.min()) + 1
    between = safe_trees(neighbours, (x + y) * span + (y - y.min()))
    unreached = np.nonzero((between.hops[0] >= FAR) | (between.hops[:, 0] >= FAR))[0]
    if len(unreached):
        raise TargetError(
            f"the elements of {len(unreached)} chips cannot be reached: no working link leads to chip "
            f"{places[unreached[0]]} and back",
            where="mesh description",
            hint="mark their elements as faulty and leave the chips out, or repair a link",
        )
    inside = grid_trees(mesh.grid.width, mesh.grid.height)
    detours = {index[chip]: _detour(mesh, chip) for chip in dict.fromkeys(chip for chip, _, _ in mesh.faults.noc)
               if chip in index}  # fmt: skip
    router_of = _routers(mesh)
    return Topology(mesh, places, neighbours, between, inside, detours, router_of, _usable(mesh, places, router_of))


def _check(mesh: Mesh) -> None:
    grid = mesh.grid
    places = mesh.places()
    inside = all(0 <= x < grid.width and 0 <= y < grid.height for x, y in (*grid.without, grid.gate, grid.dram))
    faulty = mesh.faults
    known = all(0 <= number < mesh.per_chip for _, number in faulty.elements) and all(
        0 <= way < len(mesh.directions) for _, way in faulty.links
    )
    opposite = all((-x, -y) in mesh.directions for x, y in mesh.directions)
    rates = (mesh.rates.port, mesh.rates.noc, mesh.rates.link, mesh.rates.dram)
    problems = [
        (not places or mesh.per_chip < 1, "there are no elements"),
        (len(set(places)) != len(places), "two chips are at one place"),
        (not inside, f"a router lies outside the grid of {grid.width}x{grid.height}"),
        (not known, "a faulty element or link does not exist"),
        (not opposite, "a link leads one way only"),
        (min(rates) <= 0, f"a rate is {min(rates)} bytes per clock"),
        (not 0 <= mesh.reserved < mesh.per_chip, f"{mesh.reserved} of {mesh.per_chip} elements are reserved"),
    ]
    for wrong, sentence in problems:
        if wrong:
            raise TargetError(sentence, where="mesh description",
                              hint="mend the Mesh of the target, or --boards, --chips and --faults")


def _neighbours(mesh: Mesh, places: tuple[Place, ...], index: dict[Place, int]) -> Ints:
    found = np.full((len(places), len(mesh.directions)), -1, np.int64)
    for chip, (x, y) in enumerate(places):
        for way, (dx, dy) in enumerate(mesh.directions):
            found[chip, way] = index.get((x + dx, y + dy), -1)
    for place, way in mesh.faults.links:
        chip = index.get(place, -1)
        if chip >= 0 and found[chip, way] >= 0:
            dx, dy = mesh.directions[way]
            found[found[chip, way], mesh.directions.index((-dx, -dy))] = -1
            found[chip, way] = -1
    return found


def _detour(mesh: Mesh, chip: Place) -> Trees:
    """Routes on a chip that avoid dead links between its routers.

    Raises:
        TargetError: they cut routers off.
    """
    width, height = mesh.grid.width, mesh.grid.height
    dead = {frozenset((a, b)) for place, a, b in mesh.faults.noc if place == chip}
    found = np.full((width * height, 4), -1, np.int64)
    for y in range(height):
        for x in range(width):
            for way, (dx, dy) in enumerate(((1, 0), (0, 1), (-1, 0), (0, -1))):
                near = (x + dx, y + dy)
                if 0 <= near[0] < width and 0 <= near[1] < height and frozenset(((x, y), near)) not in dead:
                    found[y * width + x, way] = near[1] * width + near[0]
    columns, rows = np.arange(width * height) % width, np.arange(width * height) // width
    trees = safe_trees(found, (columns + rows) * height + rows)
    if not trees.connected:
        raise TargetError(f"dead links on chip {chip} cut routers off, so that their elements cannot be reached",
                          where="mesh description", hint="mark the chip's elements as faulty")  # fmt: skip
    return trees


def _routers(mesh: Mesh) -> Ints:
    """The router of each element of a chip, in the order of a path that visits neighbours."""
    grid = mesh.grid
    path = [(x, y) for x in range(grid.width) for y in (range(grid.height) if x % 2 == 0 else range(grid.height)[::-1])]
    numbers = [y * grid.width + x for x, y in path if (x, y) not in grid.without]
    return np.repeat(np.array(numbers, np.int64), grid.elements)


def _usable(mesh: Mesh, places: tuple[Place, ...], router_of: Ints) -> Ints:
    """Elements in the order of placement: board by board, along columns of chips up and down."""
    per = mesh.per_chip
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
    index = {place: number for number, place in enumerate(places)}
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
    links = frozenset(
        (place, way) for place in places for way in ways if generator.random() < share
    )
    pairs = [((x, y), (x + dx, y + dy)) for y in range(grid.height) for x in range(grid.width)
             for dx, dy in ((1, 0), (0, 1)) if x + dx < grid.width and y + dy < grid.height]  # fmt: skip
    hit = np.argwhere(generator.random((len(places), len(pairs))) < share)
    noc = frozenset((places[chip], *pairs[pair]) for chip, pair in hit)
    elements = frozenset((places[chip], int(number)) for chip, number in dead)
    return replace(mesh, faults=Faults(elements, links, noc))
