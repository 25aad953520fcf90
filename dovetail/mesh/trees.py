"""Shortest routes that cannot block each other for ever, over any graph of routers, and how they join to trees.

Routers are ranked. A route goes down in rank first and then only up ("up*/down*" routing), so that no cycle of links
can wait for one another: those down have falling ranks, those up rising ones, and none goes from up to down. From
one source every router is reached through one router before it, so routes to many destinations are a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[Any]
FAR = 1 << 20
"""Hops to what cannot be reached."""


@dataclass(frozen=True)
class Trees:
    """Routes between all pairs of routers."""

    parent: NDArray[np.int32]
    """[source, router]: the router before it on the way; itself at the source, -1 where there is no way."""
    hops: NDArray[np.int32]
    """[source, router]: links on the way; `FAR` where there is no way."""

    @property
    def connected(self) -> bool:
        """True where every router reaches every other."""
        return bool((self.hops < FAR).all())


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
        known = hops.copy() if not down else hops
        for router in (order[::-1] if down else order):
            for before in neighbours[router]:
                if before < 0 or (rank[before] < rank[router]) == down:
                    continue
                longer = hops[:, before] + 1
                better = (longer < hops[:, router]) | ((longer == hops[:, router]) & (longer < FAR) & spread[:, before])
                if not down:  # what is reached falling keeps its route: one router before it, whatever comes behind
                    better &= known[:, router] >= FAR
                hops[better, router] = longer[better]
                parent[better, router] = before
    hops[hops > FAR] = FAR
    return Trees(parent, hops)


def safe_trees(neighbours: Ints, rank: Ints) -> Trees:
    """`ranked_trees` by the given ranks where they connect everything, else by hops from a router in the middle."""
    found = ranked_trees(neighbours, rank)
    if found.connected:
        return found
    hops = _plain_hops(neighbours)
    middle = int(np.argmin(np.where(hops >= FAR, FAR, hops).max(axis=1)))
    order = np.lexsort((rank, hops[middle]))
    other = np.empty(len(rank), np.int64)
    other[order] = np.arange(len(rank))
    return ranked_trees(neighbours, other)


def _plain_hops(neighbours: Ints) -> NDArray[np.int32]:
    """[routers, routers]: hops by any route."""
    count = len(neighbours)
    hops = np.full((count, count), FAR, np.int32)
    np.fill_diagonal(hops, 0)
    for step in range(count):
        reached = hops == step
        if not reached.any():
            break
        for direction in range(neighbours.shape[1]):
            near = neighbours[:, direction]
            have = near >= 0
            new = np.zeros_like(reached)
            new[:, near[have]] = reached[:, have]
            hops[new & (hops >= FAR)] = step + 1
    return hops


def grid_trees(width: int, height: int) -> Trees:
    """X-Y routes over a whole grid: along the row first, then along the column. Router number: row * width + column."""
    x, y = np.arange(width * height) % width, np.arange(width * height) // width
    right, below = x[None] - x[:, None], y[None] - y[:, None]
    across = np.arange(width * height)[None] - np.where(below != 0, np.sign(below) * width, np.sign(right))
    return Trees(across.astype(np.int32), (np.abs(right) + np.abs(below)).astype(np.int32))


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
    order = np.argsort(-hops, kind="stable")
    code, hops = code[order], hops[order]
    edges = np.searchsorted(-hops, -np.arange(int(hops.max(initial=0)) + 1))
    found, carried = [], np.zeros(0, np.int64)
    for level in range(len(edges) - 1, 0, -1):
        here = np.unique(np.concatenate((carried, code[edges[level] : edges[level - 1]])))
        found.append(here)
        which, place = here // count, here % count
        carried = which * count + trees.parent[source[which], place]
    everything = np.concatenate(found) if found else np.zeros(0, np.int64)
    return everything // count, everything % count


def cyclic(pairs: Sequence[tuple[int, int]]) -> bool:
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
