"""Prints for whole networks their floor, their cycles by default, and how far these are above the floor.

    python scripts/tuning_networks.py MODEL.. [--targets ne16,vta,macarray] [--tuned FOLDER]

Cycles are those of `iss`, outputs compared with the integer graph; the floor is that of
dovetail/guests/tune/floor.py, of the network with layers in parts or without, whichever is lower.

With --tuned, FOLDER/TARGET.MODEL.toml are what `dovetail tune -o` has written for them; where one is there and of this
version, the cycles it reached are in the table. Status 1 where a network takes fewer cycles than its floor, which is
none then.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dovetail.compile import Options, prepare
from dovetail.guests.tune.measure import measured
from dovetail.guests.tune.tuner import least_cycles
from dovetail.schedule.tuning import read_tuning
from dovetail.targets import load_target


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--targets", default="ne16,vta,macarray")
    parser.add_argument("--tuned", type=Path)
    given = parser.parse_args()
    print("| target | network | floor | default | above the floor | tuned |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    beaten = False
    for target in map(load_target, given.targets.split(",")):
        for model in given.models:
            graph = prepare(model, target, Options())
            least, default = least_cycles(model, target, Options()), measured(graph, target, None, {})
            above = f"{100 * (default - least) / least:.1f} %" if least else ""
            file = given.tuned / f"{target.name}.{model.stem}.toml" if given.tuned else None
            tuned = f"{read_tuning(file).value.tuned_cycles:,}" if file and file.is_file() else ""
            print(
                f"| {target.name} | {model.stem} | {least:,} | {default:,} | {above} | {tuned} |",
                flush=True,
            )
            beaten |= default < least
    sys.exit(beaten)


if __name__ == "__main__":
    main()
