"""Makes trials of choices that the knobs offer, at random, and prints every one that fails.

    python scripts/tuning_trials.py [--targets ne16,vta] [--models FOLDER] [--trials N] [--seed N] [--planned]

N trials of each target, spread evenly over the distinct layers of the networks in FOLDER and, where it takes them, the
single layers of scripts/tuning_benchmark.py. A trial is what `dovetail tune` makes of it: compiled, run on `iss`,
compared with the integer graph; with --planned it ends behind the planner and the verifier of programs. Status 1 where
any failed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tuning_benchmark import LAYERS, only_layer

from dovetail.codegen.build.instruction_sets import instruction_set
from dovetail.compile import Options, compile_graph, prepare, reserved
from dovetail.errors import DovetailError
from dovetail.guests import zoo
from dovetail.guests.tune.layers import LayerKind, distinct_layers, region_alone
from dovetail.guests.tune.measure import make_task, measure
from dovetail.guests.tune.search import candidates
from dovetail.schedule.layout import choose_layouts
from dovetail.schedule.partition import partition
from dovetail.schedule.plan import plan
from dovetail.target import Target
from dovetail.target.pattern import Choice
from dovetail.targets import BUILT_IN, load_target


def layers(target: Target, models: Sequence[Path]) -> Iterator[tuple[str, LayerKind]]:
    """Every distinct layer with something to choose, and where it comes from."""
    for path in models:
        try:
            graph = prepare(path, target, Options())
            regions = partition(graph, target)
            planned = plan(choose_layouts(graph, regions, target), target, reserved(graph, target))
        except DovetailError as error:
            print(f"{target.name} {path.name}: {error.what}", file=sys.stderr)
            continue
        yield from ((path.stem, layer) for layer in distinct_layers(regions, planned, target))
    for shape in LAYERS:
        try:
            yield shape.text, only_layer(shape, target)
        except (DovetailError, ValueError):
            continue  # the engine does not take it


def failure(layer: LayerKind, choice: Choice, name: str, target: Target, planned: bool) -> str:
    """Why a trial fails; empty where it does not."""
    alone = region_alone(layer.graph, target).name
    if not planned:
        return measure(make_task(layer.graph, layer.near, name, None, "iss"), {alone: choice}).error
    try:
        compile_graph(layer.graph, target, Options(), choices={alone: choice}, near=layer.near, interpret=False)
    except DovetailError as error:
        return error.what
    return ""


def main() -> None:
    """Make the trials and print how many failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--targets", default=",".join(BUILT_IN))
    parser.add_argument("--models", type=Path)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--planned", action="store_true")
    given = parser.parse_args()
    made = failed = 0
    with tempfile.TemporaryDirectory() as folder:
        (digits := Path(folder) / "digits.onnx").write_bytes(zoo.build("digits"))
        models = [
            digits,
            *(sorted((*given.models.glob("*_int8.tflite"), *given.models.glob("*.onnx"))) if given.models else ()),
        ]
        for name in given.targets.split(","):
            target = load_target(name)
            planned = given.planned or instruction_set(target.core.isa).is_host
            found = list(layers(target, models))
            share = -(-given.trials // len(found)) if found else 0
            before = made, failed
            for number, (where, layer) in enumerate(found):
                random = np.random.default_rng((given.seed, number))
                offered = candidates(layer, target, given.seed).choices
                for index in random.choice(len(offered), min(share, len(offered)), replace=False):
                    made += 1
                    if why := failure(layer, offered[index], name, target, planned):
                        failed += 1
                        print(f"{name} {where} {layer.names[0]} {dict(offered[index])}: {why}", flush=True)
            if found:
                print(f"{name}: {made - before[0]} trials, {failed - before[1]} failed", flush=True)
    print(f"{made} trials, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
