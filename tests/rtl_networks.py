"""What the tests of the simulator `rtl` and scripts/benchmarks.py share: ResNet8 on the MAC array, and how fast it is."""

from __future__ import annotations

import time
from pathlib import Path

from dovetail.compile import Options, compile_graph, prepare, sample_inputs
from dovetail.emit import write_project
from dovetail.graph.graph import Graph
from dovetail.partition import partition
from dovetail.run import Build, open_build, run_build
from dovetail.target import Target
from dovetail.targets import load_target


def layer(model: Path, number: int) -> Graph:
    """The layer with this number among those the engine of `macarray` takes, as a network of its own."""
    target = load_target("macarray")
    regions = partition(prepare(model, target, Options()), target)
    return [region.graph for region in regions if region.engine is not None][number]


def built(graph: Graph, folder: Path, target: Target | None = None) -> Build:
    """A network compiled for `macarray`, or for a target like it."""
    target = target or load_target("macarray")
    write_project(compile_graph(graph, target, Options()).project, folder, replace=True)
    return open_build(folder, target)


def million_cycles_per_second(build: Build, graph: Graph, simulator: str, inferences: int) -> float:
    """Simulated cycles per second of wall time, start-up and compilers left out."""
    given, seconds, cycles = sample_inputs(graph), [], []
    for count in (1, 1 + inferences):  # the first also builds what is not in the cache
        began = time.perf_counter()
        result = run_build(build, simulator, [given] * count)
        seconds.append(time.perf_counter() - began)
        cycles.append(sum(one.total_cycles or 0 for one in result.simulation.inferences))
    if simulator == "rtl" and seconds[0] > seconds[1]:
        raise RuntimeError("the first run took longer than the second: measure again, now that all is built")
    return (cycles[1] - cycles[0]) / (seconds[1] - seconds[0]) / 1e6
