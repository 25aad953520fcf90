"""How far the policies that round in their own way are from the exact network: random int8 layers (convolutions,
depthwise ones, dense layers, additions, pools), each result compared with the model's own rounding.

    python scripts/policy_distance.py [--layers 1000] [--write]      # with --write: docs/figures/policies.csv

A layer that a policy leaves to the core stays exact; the table counts the layers that it changes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "tests"))

from tables import show, write  # noqa: E402

from dovetail.compile import Options, prepare  # noqa: E402
from dovetail.ir.graph import Graph, evaluate  # noqa: E402
from dovetail.target import Target  # noqa: E402
from dovetail.targets import BUILT_IN, load_target  # noqa: E402
from oracles import network_file  # noqa: E402
from random_tflite import STEPS, image  # noqa: E402
from tflite_maker import Maker  # noqa: E402

FAMILIES = ("convolution", "depthwise", "fully_connected", "arithmetic", "pool")


@dataclass
class Distance:
    """Distances of a policy's results from the exact ones, in steps of the result."""

    layers: int = 0
    changed: int = 0
    elements: int = 0
    off: int = 0
    largest: int = 0
    squares: float = 0.0
    worst: str = field(default="")

    def add(self, name: str, exact: np.ndarray, found: np.ndarray) -> None:
        """One layer's results."""
        apart = np.abs(exact.astype(np.int64) - found.astype(np.int64))
        self.elements += apart.size
        self.off += int((apart > 0).sum())
        self.squares += float((apart.astype(np.float64) ** 2).sum())
        if apart.size and apart.max() > self.largest:
            self.largest, self.worst = int(apart.max()), name

    def row(self, name: str, policy: str) -> list[object]:
        """The line of the table; shares and the mean are of the layers that the policy changes."""
        count = max(self.elements, 1)
        mean = f"{(self.squares / count) ** 0.5:.2f}"
        return [name, policy, self.changed, f"{100 * self.off / count:.1f} %", mean, self.largest]


def policies() -> Iterator[tuple[Target, str]]:
    """Each bundled target and policy that changes results: some rewrite of it is not exact."""
    for name in BUILT_IN:
        target = load_target(name)
        for policy in target.policies:
            if any(rewrite.lsb for rewrite in policy.rewrites):
                yield target, policy.name


def prepared(path: Path, target: Target, policy: str | None) -> Graph:
    """The integer graph of a model as a policy has it."""
    return prepare(path, target, Options(policy=policy))


def same(graph: Graph, other: Graph) -> bool:
    """Whether two graphs have the same operators and constants."""
    if [node.operator for node in graph.nodes] != [node.operator for node in other.nodes]:
        return False
    pairs = zip(graph.constants.values(), other.constants.values(), strict=False)
    return len(graph.constants) == len(other.constants) and all(np.array_equal(a, b) for a, b in pairs)


def measured(count: int) -> dict[tuple[str, str], Distance]:
    """Distances by target and policy, over `count` random layers."""
    found = {(target.name, policy): Distance() for target, policy in policies()}
    chosen = list(policies())
    exact_target = load_target("riscv")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "layer.tflite"
        for number in range(count):
            name = f"{FAMILIES[number % len(FAMILIES)]} policy {number}"
            maker = Maker(name)
            network = maker.network(STEPS[FAMILIES[number % len(FAMILIES)]](maker, image(maker)))
            path.write_bytes(network_file(network))
            feeds = maker.feeds(network)
            graph = prepared(path, exact_target, None)
            wanted = [evaluate(graph, dict(zip(graph.inputs, feed, strict=True))) for feed in feeds]
            for target, policy in chosen:
                distance, made = found[target.name, policy], prepared(path, target, policy)
                distance.layers += 1
                if same(made, graph):
                    continue
                distance.changed += 1
                for feed, outputs in zip(feeds, wanted, strict=True):
                    results = evaluate(made, dict(zip(made.inputs, feed, strict=True)))
                    distance.add(name, outputs[graph.outputs[0]], results[made.outputs[0]])
    return found


def main() -> int:
    """Measure and print; write the table with --write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=1000, help="random layers (1000)")
    parser.add_argument("--write", action="store_true", help="write the table to docs/figures")
    options = parser.parse_args()
    found = measured(options.layers)
    head = ["target", "policy", "layers it changes", "results that differ", "root mean square, steps", "largest, steps"]
    table = {"policies": [head, *(distance.row(*key) for key, distance in found.items())]}
    show(table)
    print(*(f"{'/'.join(key)}: worst in {distance.worst}" for key, distance in found.items()), sep="\n")
    if options.write:
        write(table, f"python scripts/policy_distance.py --layers {options.layers}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
