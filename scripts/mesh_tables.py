"""Measures mappings to meshes: prints tables, and writes them to docs/figures with --write.

    python scripts/mesh_tables.py [SECTION ...] [--write]

Needs the reference models in ../shared. "exact" computes whole networks in numpy (minutes), "scale" maps 24 boards.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
MODELS = REPOSITORY.parent / "shared" / "models" / "mlperf_tiny"
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

from mesh_ways import SIMULATOR_CHIP, MappingStrategy, stream_clocks  # noqa: E402
from tables import Rows, Sections, run  # noqa: E402

from dovetail.compile import Options, prepare, sample_inputs  # noqa: E402
from dovetail.guests.mesh.layers import layers_of, network_of  # noqa: E402
from dovetail.guests.mesh.mapping import map_network, measure, place_and_route  # noqa: E402
from dovetail.guests.mesh.partition import Objective, resident  # noqa: E402
from dovetail.guests.mesh.pieces import execute  # noqa: E402
from dovetail.guests.mesh.placement import MeshMapping  # noqa: E402
from dovetail.guests.mesh.topology import build_topology, random_faults  # noqa: E402
from dovetail.ir.graph import Graph, evaluate  # noqa: E402
from dovetail.schedule.partition import partition  # noqa: E402
from dovetail.target.mesh import Mesh  # noqa: E402
from dovetail.targets.spinnaker2 import MESH, TARGET  # noqa: E402

THROUGHPUT, LATENCY = Objective.THROUGHPUT, Objective.LATENCY
SMALL = {"ResNet8": "ic_resnet8", "MobileNetV1 0.25": "vww_mobilenetv1"}
SIZES = {"a chip": MESH.resized(chips=1), "a board": MESH, "24 boards": MESH.resized(boards=24)}


def network(name: str) -> Graph:
    """A network by its name."""
    from networks import resnet50, vgg16

    if name in SMALL:
        return prepare(MODELS / f"{SMALL[name]}_int8.tflite", TARGET, Options())
    return {"ResNet-50": resnet50, "VGG-16": vgg16}[name]()


def mapping(graph: Graph, mesh: Mesh, objective: Objective) -> tuple[MeshMapping, tuple[float, float, float]]:
    """A mapping, and seconds of CPU for the topology, for partition, for the rest."""
    regions = partition(graph, TARGET)
    times = [time.process_time()]
    topology = build_topology(mesh)
    times.append(time.process_time())
    network = network_of(graph, regions)
    section = resident(network.layers, topology, objective)
    assert section is not None, "it fits"
    times.append(time.process_time())
    found = place_and_route(network, section, topology, objective)
    times.append(time.process_time())
    return found, (times[1] - times[0], times[2] - times[1], times[3] - times[2])


def scale_table() -> dict[str, Rows]:
    """How long mapping takes."""
    rows = []
    for name in ("ResNet-50", "VGG-16"):
        graph = network(name)
        for size, mesh in list(SIZES.items())[1:]:  # neither fits a chip
            found, seconds = mapping(graph, mesh, THROUGHPUT)
            stages = [stage for section in found.sections for stage in section.stages]
            entries = max((tables.largest() for tables in found.tables), default=0)
            rows.append(
                [
                    name,
                    size,
                    len(found.topology.elements),
                    max(section.pieces for section in found.sections),
                    len(found.sections),
                    *(f"{one:.1f} s" for one in (*seconds, sum(seconds))),
                    max(int(stage.memory.max()) for stage in stages),
                    entries,
                ]
            )
    header = [
        "network",
        "mesh",
        "elements",
        "pieces at a time",
        "sections",
        "topology",
        "partition",
        "place, route",
        "in all (CPU)",
        "most bytes of an element",
        "most routing entries",
    ]
    return {"mesh_mapping": [header, *rows]}


def time_table() -> dict[str, Rows]:
    """What inputs take in the model."""
    rows = []
    for name in (*SMALL, "ResNet-50", "VGG-16"):
        graph = network(name)
        for size, mesh in (("a chip", SIZES["a chip"]), ("a board", MESH))[name not in SMALL :]:
            for objective in (LATENCY, THROUGHPUT):
                found = map_network(graph, partition(graph, TARGET), build_topology(mesh), objective, whole=True)
                result = measure(found, 16)
                clocks = sum(stage.costs.floor.sum() for s in found.sections for stage in s.stages)
                rows.append(
                    [
                        name,
                        size,
                        objective.value,
                        int(result.latency),
                        int(result.interval),
                        int(result.bound),
                        f"{result.interval / result.bound:.2f}",
                        int(clocks / len(found.topology.elements)),
                        round(mesh.clock / result.interval),
                        result.bottleneck,
                    ]
                )
    header = [
        "network",
        "mesh",
        "for",
        "clocks of one input",
        "clocks between inputs",
        "bound",
        "ratio",
        "arrays' clocks / elements",
        "inputs per second",
        "bottleneck",
    ]
    return {"mesh_clocks": [header, *rows]}


def reference_table() -> dict[str, Rows]:
    """Layers beside the public simulator's, and those it says nothing of."""
    from test_mesh_ways import PUBLISHED, VGG, clocks_of

    rows, ratios = [], []
    for name in PUBLISHED:
        cells: list[object] = []
        for clocks, known in zip(clocks_of(name), PUBLISHED[name], strict=True):
            ratios.append(clocks / known)
            cells += [f"{clocks:,.0f}", f"{known:,}", f"{clocks / known:.3f}"]
        rows.append([name, *cells])
    pairs = [column for way in MappingStrategy for column in (way.value, "published", "ratio")]
    far = median(abs(ratio - 1) for ratio in ratios)
    print(f"Median of the ratios {median(ratios):.3f}, of their distances from 1: {far:.3f}.", file=sys.stderr)
    others = [[name, *map(int, clocks_of(name))] for name in VGG if name not in PUBLISHED]
    layers = {}
    for name in ("VGG-16", "ResNet-50"):
        for layer in layers_of(graph := network(name), partition(graph, TARGET)):
            if layer.kind == "dense":
                layers[f"dense, {layer.summed} to {layer.image[2]} channels"] = layer
            elif layer.kind == "convolution" and name == "ResNet-50":
                sizes = f"{layer.kernel[0]}x{layer.kernel[1]}, {layer.summed} to {layer.image[2]} channels"
                step = f", step {layer.stride[0]}" if layer.stride[0] > 1 else ""
                layers[f"{layer.image[0]}x{layer.image[1]}, {sizes}{step}"] = layer
    for name, layer in layers.items():
        others.append(
            [name, *(int(stream_clocks(layer, SIMULATOR_CHIP, way, stored=layer.index > 0)) for way in MappingStrategy)]
        )
    other = ["other layers of VGG-16 and ResNet-50", *(way.value for way in MappingStrategy)]
    return {"mesh_layers": [["layer of VGG-16", *pairs], *rows], "mesh_other_layers": [other, *others]}


def exact_table() -> dict[str, Rows]:
    """Outputs compared with the integer graph's."""
    rows = []
    for name in ("ResNet-50", "VGG-16"):
        graph = network(name)
        given = sample_inputs(graph)
        expected = evaluate(graph, given)
        for size, mesh in (("a board", MESH), ("a board, 1 % dead", random_faults(MESH, 0.01, 0))):
            found = map_network(graph, partition(graph, TARGET), build_topology(mesh), THROUGHPUT)
            began = time.perf_counter()
            outputs = execute(found, given)
            same = all(np.array_equal(outputs[output], expected[output]) for output in graph.outputs)
            pieces = sum(section.pieces for section in found.sections)
            rows.append(
                [
                    name,
                    "pieces in numpy",
                    size,
                    pieces,
                    "",
                    "yes" if same else "NO",
                    f"{time.perf_counter() - began:.0f} s",
                    "",
                ]
            )
    rows += [_firmware(name) for name in SMALL]
    header = [
        "network",
        "computed by",
        "mesh",
        "pieces",
        "programs",
        "equals the integer graph",
        "time",
        "most bytes of an element",
    ]
    return {"mesh_outputs": [header, *rows]}


def _firmware(name: str) -> list[object]:
    from dovetail.guests.mesh.emit import emit_mesh
    from dovetail.guests.mesh.rack import run_exact

    graph = network(name)
    found, _ = mapping(graph, SIZES["a chip"], THROUGHPUT)
    project = emit_mesh(found, TARGET)
    given = [sample_inputs(graph, seed) for seed in range(3)]
    began = time.perf_counter()
    done = run_exact(found, project, TARGET, given)
    same = all(
        np.array_equal(outputs[output], evaluate(graph, arrays)[output])
        for arrays, outputs in zip(given, done.outputs, strict=True)
        for output in graph.outputs
    )
    return [
        name,
        "firmware in Unicorn, 3 inputs",
        "a chip",
        len(project.elements),
        len(project.programs),
        "yes" if same else "NO",
        f"{time.perf_counter() - began:.0f} s",
        max(done.memory),
    ]


SECTIONS: Sections = {
    "scale": scale_table,
    "time": time_table,
    "reference": reference_table,
    "exact": exact_table,
}


if __name__ == "__main__":
    run(__doc__.splitlines()[0], "scripts/mesh_tables.py", SECTIONS, [MODELS])
