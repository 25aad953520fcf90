"""Tries to find a plan that takes fewer cycles than a bound says: random plans of small random networks.

    python scripts/bounds_proof.py [--networks 20] [--plans 2000] [--executed 60] [--write]

The networks and plans are those of tests/bound_plans.py, on each of its targets: cycles by the clock of the compiler,
and for a sample in `iss`, outputs compared with the integer graph. Prints how near the plans come to each bound. Status
1 where one is below.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

from tables import show, write  # noqa: E402

from bound_plans import TARGETS, network, plans  # noqa: E402
from dovetail.targets import load_target  # noqa: E402


def main() -> None:
    """Print a table; fail where a bound is none."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--networks", type=int, default=20)
    parser.add_argument("--plans", type=int, default=2000)
    parser.add_argument("--executed", type=int, default=60)
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--write", action="store_true", help="write the table to docs/figures")
    given = parser.parse_args()
    targets, rows, broken = given.targets.split(","), list[list[object]](), list[str]()
    each = -(-given.plans // (given.networks * len(targets)))
    every = max(1, given.networks * len(targets) * each // max(1, given.executed))
    for name in targets:
        target, ratios, executed, drawn = load_target(name), list[tuple[float, float]](), list[float](), 0
        for seed in range(given.networks):
            for plan in plans(network(seed, name), target, seed, each):
                drawn += 1
                taken = [plan.cycles]
                if drawn % every == 0:
                    taken.append(plan.executed(target))
                    executed.append(min(taken[1] / plan.bound, taken[1] / plan.least))
                ratios.append((min(taken) / plan.bound, min(taken) / plan.least))
                if min(ratios[-1]) < 1:
                    broken.append(f"{name}, network {seed}: {taken}, bounds {plan.bound:,.0f} and {plan.least:,.0f}")
        nearest = [f"{min(ratio[which] for ratio in ratios):.3f}" for which in (0, 1)]
        rows.append([name, len(ratios), len(executed), *nearest, f"{min(executed):.3f}" if executed else ""])
        print(" ".join(map(str, rows[-1])), file=sys.stderr, flush=True)
    head = ["target", "plans", "of these in `iss`", "nearest to the bound", "nearest to the engine's least", "in `iss`"]
    show({"bounds_proof": [head, *rows]})
    print("\n".join(broken))
    if given.write:
        write({"bounds_proof": [head, *rows]}, "python scripts/bounds_proof.py")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
