"""Tunes single layers and writes the tilings that beat the planner's own into the table that comes with the package.

    python scripts/ship_tilings.py [--targets ne16,diana] [--trials N] [--jobs N] [--least PERCENT]

The layers are those of scripts/tuning_benchmark.py. A tiling is kept where it saves at least so many percent of the
layer's cycles on `iss`. Entries of other targets, and of other layers of these, stay. What is in the table counts as
the default already, so that running this again only adds to it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tuning_benchmark import LAYERS, only_layer

from dovetail.compile import Options, compile_graph
from dovetail.errors import DovetailError
from dovetail.guests.tune.layers import LayerKind, region_alone
from dovetail.guests.tune.log import open_log
from dovetail.guests.tune.measure import Runner, runner
from dovetail.guests.tune.tuner import TrialRunner, TuningRequest, tune_layer
from dovetail.schedule import shipped
from dovetail.schedule.tiles.tile import TILE
from dovetail.target import Target
from dovetail.targets import load_target


def layers(target: Target) -> Iterator[LayerKind]:
    """Those the engine takes."""
    for shape in LAYERS:
        try:
            yield only_layer(shape, target)
        except (DovetailError, ValueError):
            continue


def better(layer: LayerKind, target: Target, trials: int, least: float, run: Runner) -> shipped.TilingEntry | None:
    """The tiling of a layer that saves enough; None where none does."""
    with tempfile.TemporaryDirectory() as folder:
        request = TuningRequest(Path("layer"), target.name, Path(folder) / "log", trials)
        with open_log(request.log, {"dovetail_tuning_log": 1}, print) as log:
            result = tune_layer(TrialRunner(log, run), request, target, layer, (1, 1), lambda progress: None)
    best = result.best
    if best is None or best.outcome.cycles is None or not result.default or TILE[2] not in best.choice:
        return None
    saved = 100 * (result.default - best.outcome.cycles) / result.default
    floor = result.floor.cycles if result.floor else 0
    print(
        f"{target.name} {layer.key}: floor {floor:,}, default {result.default:,}, best {best.outcome.cycles:,}",
        flush=True,
    )
    if saved < least:
        return None
    region = region_alone(layer.graph, target)
    compiled = compile_graph(
        layer.graph, target, Options(), choices={region.name: best.choice}, near=layer.near, interpret=False
    )
    (tiling,) = compiled.plan.tilings.values()
    return shipped.TilingEntry(tiling.shape, tiling.buffers, tiling.channels_outer)


def main() -> None:
    """Tune and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--targets", default="ne16,macarray,diana,kestrel")
    parser.add_argument("--trials", type=int, default=32)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--least", type=float, default=2.0)
    given = parser.parse_args()
    with runner(given.jobs, None) as run:
        for name in given.targets.split(","):
            target = load_target(name)
            for layer in layers(target):
                if entry := better(layer, target, given.trials, given.least, run):
                    shipped.add(target, layer.key, entry)


if __name__ == "__main__":
    main()
