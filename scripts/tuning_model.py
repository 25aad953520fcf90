"""How near the cost model of `dovetail tune` comes to `iss`, and whether it ranks choices alike.

    python scripts/tuning_model.py [--targets ne16,vta] [--models FILE...] [--quantise] [--trials N] [--layers]

Of every distinct layer of the networks with something to choose, on an engine or on the core, the default and N choices
drawn at random are estimated and measured, each layer as a network of its own. What the tuner says of the default must
be what its build says ("estimated" in its description): else this ends with 1. With --quantise the models are quantised
for the target before, as `diana` wants them. A row of the table is a target: how far the estimates of the defaults
and of all choices are from what is measured, Spearman's correlation of the choices within a layer (over those layers
whose slowest choice takes at least 2 % more than the fastest), and how many choices a second of CPU the model looks at.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from bound_tables import shifts

from dovetail.compile import Options, compile_graph, prepare, reserved
from dovetail.errors import DovetailError
from dovetail.guests.tune.layers import LayerKind, distinct_layers, region_alone
from dovetail.guests.tune.measure import measured
from dovetail.guests.tune.search import candidates
from dovetail.schedule.layout import choose_layouts
from dovetail.schedule.partition import partition
from dovetail.schedule.plan import plan
from dovetail.schedule.plan.timed import timed
from dovetail.target import Target
from dovetail.target.pattern import Choice
from dovetail.targets import BUILT_IN, load_target

ROOT = Path(__file__).resolve().parents[1]
TINY = tuple(sorted((ROOT.parent / "shared/models/mlperf_tiny").glob("*_int8.tflite")))
TARGETS = tuple(name for name in BUILT_IN if not load_target(name).core.is_host)
LEAST_SPREAD = 1.02
"""Slowest over fastest choice of a layer, for its choices to have an order."""


@dataclass(frozen=True)
class Compared:
    """One layer: what the model thought of each choice, the default first, and what `iss` showed."""

    network: str
    layer: str
    choices: tuple[Choice, ...]
    estimated: tuple[int, ...]
    cycles: tuple[int, ...]

    @property
    def ratios(self) -> list[float]:
        """Estimate over cycles, of each choice."""
        return [own / real for own, real in zip(self.estimated, self.cycles, strict=True)]

    @property
    def correlation(self) -> float | None:
        """Spearman's, of equal ranks the mean; None where the choices differ too little to have an order."""
        if len(self.cycles) < 4 or max(self.cycles) < LEAST_SPREAD * min(self.cycles):
            return None
        return float(np.corrcoef(ranks(self.estimated), ranks(self.cycles))[0, 1])


def ranks(values: Sequence[float]) -> list[float]:
    """The place of each value among all in rising order; equal ones share the mean of their places."""
    array = np.asarray(values)
    return [float((array < one).sum() + ((array == one).sum() - 1) / 2) for one in array]


def layers(target: Target, models: Sequence[Path]) -> Iterator[tuple[str, LayerKind]]:
    """Every distinct layer with something to choose, and its network."""
    seen: set[str] = set()
    for path in models:
        try:
            graph = prepare(path, target, Options())
            regions = partition(graph, target)
            planned = plan(choose_layouts(graph, regions, target), target, reserved(graph, target))
        except DovetailError as error:
            print(f"{target.name} {path.name}: {error.what}")
            continue
        for layer in distinct_layers(regions, planned, target):
            if layer.key not in seen:
                seen.add(layer.key)
                yield path.stem, layer


def compared(
    network: str, layer: LayerKind, target: Target, trials: int, seed: int
) -> tuple[Compared, int, float] | None:
    """One layer, how many choices the model looked at, and the CPU seconds that took; None where none is measured."""
    begun = time.process_time()
    found = candidates(layer, target, seed)
    seconds = time.process_time() - begun
    random = np.random.default_rng(seed)
    others = 1 + random.permutation(len(found.choices) - 1)[:trials]
    name, rows = region_alone(layer.graph, target).name, list[tuple[Choice, int, int]]()
    compiled = compile_graph(layer.graph, target, Options(), near=layer.near, interpret=False)
    said = timed(compiled.plan.program, compiled.regions, target)[0]
    if said != found.estimates[0]:
        sys.exit(f"{target.name} {network} {layer.names[0]}: the tuner says {found.estimates[0]:,}, its build {said:,}")
    for index in (0, *(int(one) for one in others)):
        choice = found.choices[index]
        try:
            cycles = measured(layer.graph, target, None, {name: choice} if choice else {}, layer.near)
        except DovetailError as error:
            print(f"{target.name} {network} {layer.names[0]} {dict(choice)}: {error.what}")
            continue
        rows.append((choice, int(found.estimates[index]), cycles))
    if not rows:
        return None
    choices, estimated, real = zip(*rows, strict=True)
    return Compared(network, layer.names[0], choices, estimated, real), len(found.choices), seconds


def distance(ratios: Sequence[float]) -> str:
    """The median and the largest distance from 1."""
    off = abs(np.array(ratios) - 1)
    return f"{np.median(off):.1%}, {off.max():.1%}"


def main() -> None:
    """Print a row for each target."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--models", type=Path, nargs="*", default=TINY)
    parser.add_argument("--quantise", action="store_true", help="quantise the models for the target")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--most", type=int, default=1000, help="layers of a target, evenly spread")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", action="store_true", help="print every choice")
    given = parser.parse_args()
    print("| target | layers | defaults: median, worst | all: median, worst | Spearman: median, least | choices/s |")
    print("| --- | ---: | --- | --- | --- | ---: |")
    for name in given.targets.split(","):
        target, rows, looked, seconds = load_target(name), list[Compared](), 0, 0.0
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
            models = [shifts(one, target, Path(folder)) if given.quantise else one for one in given.models]
            every = list(layers(target, models))
        for network, layer in every[:: max(1, -(-len(every) // given.most))]:
            found = compared(network, layer, target, given.trials, given.seed)
            if found is None:
                continue
            row, count, took = found
            rows, looked, seconds = [*rows, row], looked + count, seconds + took
            if given.layers:
                print(
                    f"{network} {layer.key[-4:]} {layer.names[0]}: {row.correlation}, {count} choices in {took:.2f} s"
                )
                for choice, own, real in zip(row.choices, row.estimated, row.cycles, strict=True):
                    print(f"    {own:>9,} {real:>9,} {own / real:.3f} {dict(choice)}", flush=True)
        if not rows:
            continue
        orders = [row.correlation for row in rows if row.correlation is not None]
        order = f"{np.median(orders):.3f}, {min(orders):.3f}" if orders else "none"
        first, both = [row.ratios[0] for row in rows], [ratio for row in rows for ratio in row.ratios]
        print(f"| `{name}` | {len(rows)} | {distance(first)} | {distance(both)} | {order} | {looked / seconds:,.0f} |")


if __name__ == "__main__":
    main()
