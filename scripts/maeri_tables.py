"""Measures MAERI's orders: prints tables, and writes them to docs/figures with --write.

    python scripts/maeri_tables.py [SECTION ...] [--write]

Needs the reference models in ../shared for the section "networks".
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
MODELS = REPOSITORY.parent / "shared" / "models"
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

from tables import Rows, Sections, run  # noqa: E402

from dovetail.compile import Options, prepare, sample_inputs  # noqa: E402
from dovetail.ir.graph import Graph  # noqa: E402
from dovetail.ir.types import Array  # noqa: E402
from dovetail.targets import load_target  # noqa: E402
from dovetail.targets.maeri.bound import (  # noqa: E402
    bound,
    uniform_cycles,
)
from dovetail.targets.maeri.config import MaeriConfig  # noqa: E402
from dovetail.targets.maeri.listing import best_order  # noqa: E402
from dovetail.targets.maeri.network import network  # noqa: E402
from dovetail.targets.maeri.schedule import compare  # noqa: E402

KERAS = {"ResNet8": "ic_resnet8.h5", "MobileNetV1 0.25": "vww_96.h5"}
"""Models read from Keras files; the others have published shapes and random weights."""
MULTIPLIERS = (64, 256)


def measured_table() -> dict[str, Rows]:
    """Layers of equal virtual neurons beside the public simulator's measured cycles."""
    from test_maeri_tree import MEASURED

    rows = []
    for layer, tile, config, cycles in MEASURED:
        ours = uniform_cycles(layer, tile, config)
        shape = f"{layer.rows}x{layer.columns}, C {layer.channels}, K {layer.filters}, G {layer.groups}"
        lies = f"{tile.rows}x{tile.columns}x{tile.channels}, K {tile.filters}, G {tile.groups}, rows {tile.out_rows}"
        buffer = "on" if config.accumulation_buffer else "off"
        rows.append([shape, lies, config.distribution, buffer, cycles, ours, f"{100 * (ours / cycles - 1):+.2f} %"])
    header = ["layer", "tile", "bandwidth", "accumulation buffer", "measured", "here", "difference"]
    return {"maeri_measured": [header, *rows]}


def network_of(name: str) -> tuple[Graph, Mapping[str, Array]]:
    """A network and random inputs."""
    from networks import ORDERED

    if name not in KERAS:
        return ORDERED[name]()
    graph = prepare(MODELS / "keras" / KERAS[name], load_target("maeri"), Options(allow_float=True))
    return graph, sample_inputs(graph)


def networks_table() -> dict[str, Rows]:
    """Whole networks beside their bound and other ways."""
    from maeri_trials import simulate

    rows = []
    for name in ("LeNet", "AlexNet", "VGG-16", *KERAS, "Inception"):
        graph, inputs = network_of(name)
        for multipliers in MULTIPLIERS:
            config, net = MaeriConfig(multipliers, multipliers, multipliers), network(graph)
            start = time.process_time()
            schedule = best_order(net, config, seconds=0)
            seconds = time.process_time() - start
            result = simulate(schedule, inputs)
            assert result.cycles == schedule.makespan
            (alone, uniform), least = compare(schedule), bound(net, config).cycles
            used = result.products / (result.cycles * multipliers)
            rows.append(
                [
                    name,
                    multipliers,
                    schedule.makespan,
                    least,
                    f"{schedule.makespan / least:.4f}",
                    alone,
                    uniform,
                    f"{100 * used:.1f} %",
                    f"{seconds:.1f} s",
                ]
            )
    header = [
        "network",
        "multipliers",
        "cycles",
        "bound",
        "ratio",
        "layer by layer",
        "equal virtual neurons",
        "multipliers used",
        "ordered in (CPU)",
    ]
    return {"maeri_networks": [header, *rows]}


SECTIONS: Sections = {"measured": measured_table, "networks": networks_table}


if __name__ == "__main__":
    run(__doc__.splitlines()[0], "scripts/maeri_tables.py", SECTIONS, [MODELS])
