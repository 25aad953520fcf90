"""How near the clock comes to `iss`, and whether it ranks choices alike.

    python scripts/tuning_model.py [--targets ne16,vta,FILE.py] [--models FILE...] [--quantise] [--trials N] [--layers]

Of every distinct layer of the networks with something to choose, on an engine or on the core, the default and N choices
drawn at random are estimated and measured, each layer as a network of its own; and each network as a whole. The
planner's estimate of a default, the tuner's and that in its build ("estimated" in its description) must be one number.
With --quantise the models are quantised for the target before, as `diana` wants them. A row of the table is a target:
how far the estimates of networks, of defaults and of all choices are from what is measured, Spearman's correlation of
the choices within a layer (over those layers whose slowest choice takes at least 2 % more than the fastest), and how
many choices a second of CPU the model looks at. Estimates of a layer that differ are printed. Ends with 1 where
`LIMITS` are not kept.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from bound_tables import shifts
from tables import show, write

from dovetail.compile import Options, compile_graph, compile_model, prepare
from dovetail.errors import DovetailError
from dovetail.guests.tune.layers import LayerKind, LayerModel, tunable_layers
from dovetail.guests.tune.measure import measured
from dovetail.guests.tune.search import candidates
from dovetail.schedule.plan.timed import timed
from dovetail.target import Target
from dovetail.target.pattern import Choice, Value
from dovetail.targets import BUILT_IN, load_target

ROOT = Path(__file__).resolve().parents[1]
TINY = tuple(sorted((ROOT.parent / "shared/models/mlperf_tiny").glob("*_int8.tflite")))
PORTS = tuple(
    str(one) for one in sorted((ROOT.parent / "shared/faults/ports").glob("*/*.py")) if one.stem == one.parent.name
)
TARGETS = (*(name for name in BUILT_IN if not load_target(name).core.is_host), *PORTS)
LIMITS = {"network": 0.03, "median": 0.03, "worst": 0.1}
"""Largest errors: of a whole network, of the median layer's default and of the worst one's."""
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


def estimates(layer: LayerKind, model: LayerModel, target: Target) -> dict[str, int]:
    """Cycles of a layer by itself as its build has them, as the tuner has them, and as the planner chose its tiles by,
    if nothing is computed beside it."""
    compiled = compile_graph(layer.graph, target, Options(), near=layer.near, interpret=False)
    said = {"build": timed(compiled.plan.program, compiled.regions, target)[0]}
    if model.planned is not None:
        said["tuner"] = model.planned.cycles
    tilings = list(compiled.plan.tilings.values())
    if len(compiled.regions) == len(tilings) == 1:
        said["planner"] = tilings[0].estimate.cycles + target.core.statements.around
    return said


def compared(
    network: str, layer: LayerKind, target: Target, trials: int, seed: int
) -> tuple[Compared, int, float] | None:
    """One layer, how many choices the model looked at, and the CPU seconds that took; None where none is measured.
    Says where the estimates of the default differ."""
    begun, model = time.process_time(), LayerModel.of(layer, target)
    said = estimates(layer, model, target)
    if len(set(said.values())) > 1:  # by another offload, with a copy before it, it is not the tuner's region
        print(f"{target.name} {network} {layer.names[0]}: {said}", file=sys.stderr)
    choices, thought = [dict[str, Value]()], np.array([said["build"]])
    if trials:
        begun, space = time.process_time(), candidates(layer, target, seed)
        choices, thought = [dict(choice) for choice in space.choices], space.estimates
    seconds = time.process_time() - begun
    others = 1 + np.random.default_rng(seed).permutation(len(choices) - 1)[:trials]
    rows = list[tuple[Choice, int, int]]()
    for index in (0, *(int(one) for one in others)):
        choice = choices[index]
        try:
            cycles = measured(layer.graph, target, None, {model.region.name: choice} if choice else {}, layer.near)
        except DovetailError as error:
            print(f"{target.name} {network} {layer.names[0]} {choice}: {error.what}", file=sys.stderr)
            continue
        rows.append((choice, int(thought[index]), cycles))
    if not rows:
        return None
    taken, estimated, real = zip(*rows, strict=True)
    return Compared(network, layer.names[0], taken, estimated, real), len(choices), seconds


def whole(path: Path, target: Target) -> float:
    """Estimate over cycles of a network."""
    compiled = compile_model(path, target, Options())
    total = timed(compiled.plan.program, compiled.regions, target)[0]
    return total / measured(prepare(path, target, Options()), target, None, {})


def distance(ratios: Sequence[float]) -> str:
    """The median and the largest distance from 1."""
    if not ratios:
        return ""
    off = abs(np.array(ratios) - 1)
    return f"{np.median(off):.1%}, {off.max():.1%}"


@dataclass
class Row:
    """What was found of one target."""

    name: str
    networks: list[float] = field(default_factory=list)
    """Estimate over cycles of each."""
    layers: list[Compared] = field(default_factory=list)
    looked: int = 0
    seconds: float = 0.0

    @property
    def defaults(self) -> list[float]:
        """Estimate over cycles of each layer's default."""
        return [layer.ratios[0] for layer in self.layers]

    def add(self, network: str, layer: LayerKind, target: Target, given: argparse.Namespace) -> None:
        """Compare one layer."""
        if (found := compared(network, layer, target, given.trials, given.seed)) is None:
            return
        one, count, seconds = found
        self.layers, self.looked, self.seconds = [*self.layers, one], self.looked + count, self.seconds + seconds
        if given.layers:
            print(f"{network} {layer.key[-4:]} {one.layer}: {one.correlation}, {count} choices in {seconds:.2f} s")
            for choice, own, real in zip(one.choices, one.estimated, one.cycles, strict=True):
                print(f"    {own:>9,} {real:>9,} {own / real:.3f} {dict(choice)}", flush=True)

    def cells(self) -> list[object]:
        """The row of the table."""
        orders = [one.correlation for one in self.layers if one.correlation is not None]
        order = f"{np.median(orders):.3f}, {min(orders):.3f}" if orders else ""
        both = distance([ratio for one in self.layers for ratio in one.ratios])
        parts = (distance(self.networks), len(self.layers), distance(self.defaults), both, order)
        return [self.name, *parts, round(self.looked / max(self.seconds, 1e-9))]

    def faults(self) -> Iterator[str]:
        """The limits that are not kept."""
        if not self.networks:
            yield f"{self.name}: nothing was measured"
        off = {
            "network": max((abs(one - 1) for one in self.networks), default=0.0),
            "median": float(np.median([abs(one - 1) for one in self.defaults])) if self.layers else 0.0,
            "worst": max((abs(one - 1) for one in self.defaults), default=0.0),
        }
        yield from (f"{self.name}: {name} {off[name]:.1%}" for name, limit in LIMITS.items() if off[name] > limit)


def row_of(name: str, given: argparse.Namespace) -> Row:
    """A target's networks and distinct layers."""
    target, row, seen = load_target(name), Row(Path(name).stem), set[str]()
    with tempfile.TemporaryDirectory() as folder:
        for model in given.models:
            try:
                with redirect_stdout(sys.stderr):
                    path = shifts(model, name, Path(folder)) if given.quantise else model
                row.networks.append(whole(path, target))
                every = tunable_layers(prepare(path, target, Options()), target)[1]
            except (DovetailError, RuntimeError) as error:
                print(f"{target.name} {model.name}: {error}", file=sys.stderr)
                continue
            for layer in every[:: max(1, -(-len(every) // given.most))]:
                if layer.key not in seen:
                    seen.add(layer.key)
                    row.add(path.stem, layer, target, given)
    return row


def main() -> None:
    """Print a row for each target."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--models", type=Path, nargs="*", default=TINY)
    parser.add_argument("--quantise", action="store_true", help="quantise the models for the target")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--most", type=int, default=1000, help="layers of a network, evenly spread")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", action="store_true", help="print every choice")
    parser.add_argument("--write", action="store_true", help="write the table to docs/figures")
    given, faults = parser.parse_args(), list[str]()
    if not given.models:
        parser.error("no models: name some by --models, or have those of ../shared")
    of = "median, worst"
    head = ["target", f"networks: {of}", "layers", f"defaults: {of}", f"all: {of}", "Spearman: median, least"]
    rows: list[list[object]] = [[*head, "choices/s"]]
    for name in given.targets.split(","):
        row = row_of(name, given)
        rows.append(row.cells())
        print(*rows[-1], sep=", ", file=sys.stderr, flush=True)
        faults += row.faults()
    name = "tuning_model" if given.trials else "tuning_defaults"
    show({name: rows})
    if given.write:
        write({name: rows}, f"python scripts/tuning_model.py --most {given.most} --trials {given.trials}")
    if faults:
        sys.exit("; ".join(faults))


if __name__ == "__main__":
    main()
