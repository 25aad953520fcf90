"""The report of a run with all that its page shows, as JSON (docs/reference/report_json.md)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from dovetail.bounds import core_product, core_word
from dovetail.claims import transfer_owners, transfers_of
from dovetail.codegen.plan_file import PlanFile, PlanLayer, PlanMemory, read_plan
from dovetail.guests.report.bounds import KINDS, exposed, reason, spent
from dovetail.guests.report.least import Least, leasts, network_least
from dovetail.ir.graph import Graph
from dovetail.notes import Kind, Note
from dovetail.prove import read_graph
from dovetail.report import Report, busy, make_report, parts_of, union, windows

if TYPE_CHECKING:
    from dovetail.run import RunResult
    from dovetail.sim.protocol import InferenceResult
    from dovetail.target.description import Target

Json = dict[str, Any]


def detail(result: RunResult, graph: Graph | None = None) -> Json:
    """The report of a run as plain values for `json.dumps`: a superset of `Report.to_json()`. `graph` is the integer
    graph of the build; None to read it there. Raises BuildError where the build has none, or no plan that fits it."""
    report, manifest = make_report(result), result.build.manifest
    plan = read_plan(result.build.folder, len(manifest.layers))
    first, target = result.simulation.inferences[0], result.build.target
    data: Json = json.loads(json.dumps(report.to_json()))
    graph = read_graph(result.build) if graph is None else graph
    found = leasts(manifest, plan, graph, target) if first.total_cycles is not None else [None] * len(manifest.layers)
    data["layers"] = _layers(data, plan, first, target, found)
    options = {"rounding": manifest.rounding, "optimize": manifest.optimize, "memory_budget": manifest.memory_budget}
    data["options"] = options
    data["devices"] = _devices(report, target, first)
    data["graph"] = plan["graph"]
    cycles, data["least_by"] = network_least(manifest, plan, found, target) if data["bound"] else (0.0, "")
    data["least"] = round(cycles, 1) or None
    data["notes"] += _without_least(data["layers"])
    data["memories"] = {name: {**memory, "live": _live(memory)} for name, memory in plan["memories"].items()}
    data["steps"] = _steps(plan, first)
    data["moves"] = plan["moves"]
    data["groups"] = _groups(data["layers"])
    data["weights"], data["parameters"] = _weights(plan["layers"])
    data["roofline"] = _roofline(data["layers"], target)
    data["not_offloaded"] = _not_offloaded(data["layers"], data["macs"]["total"], data["cycles"]["total"])
    data["summary"] = _summary(data)
    return data


def _layers(
    run: Json, plan: PlanFile, first: InferenceResult, target: Target, found: Sequence[Least | None]
) -> list[Json]:
    owners = transfer_owners(plan, first, target)
    parts = exposed(first, len(run["layers"]), target, owners)
    moving = Counter[int]()
    for job, owner in zip(transfers_of(first, target), owners or (), strict=False):
        moving[owner] += job.end - job.start
    layers = []
    for number, (layer, own) in enumerate(zip(run["layers"], plan["layers"], strict=True)):
        times = [core["layers"].get(layer["name"]) for core in run["cores"]]
        cores = [core for core, time in zip(target.cores, times, strict=True) if time is not None] or target.cores
        limit, least = layer["bound"] or 0.0, found[number]
        output = plan["graph"]["values"][plan["graph"]["edges"][number]["makes"]]
        weights = (constant for constant in own["constants"] if constant["weights"])
        cycles = spent(layer, parts[number], max((time or 0 for time in times[1:]), default=0))
        time = sum(cycles.values()) if cycles else None
        whole = layer | {
            "offload": own["offload"],
            "kinds": own["kinds"],
            "launches": own["launches"],
            "modelled_cycles": own["modelled"] if own["launches"] else None,
            "nothing": own["nothing"],
            "result": output,
            "elements": prod(output["shape"]),
            "read": own["read"],
            "written": own["written"],
            "constants": sum(constant["bytes"] for constant in own["constants"]),
            "weights": [{key: w[key] for key in ("dtype", "bits", "elements", "bytes")} for w in weights],
            "why_not_offloaded": own["reason"],
            "dma_cycles": moving[number] if owners is not None else None,
            "least": least.cycles or None if least else None,
            "least_parts": least.parts or None if least else None,
            "why_least": least.why if least else "",
            "spent": cycles,
            "time": time,
            "share_of_bound": round(limit / time, 4) if time and limit <= time else None,
        }
        layers.append(whole | {"gap": reason(whole, target, cores)})
    return layers


def _without_least(layers: Sequence[Json]) -> list[Json]:
    """Which layers on engines have no least of their own, and why: a note for each reason."""
    names: dict[str, list[str]] = {}
    for layer in layers:
        if layer["why_least"] and not layer["least"]:
            names.setdefault(layer["why_least"], []).append(layer["name"])
    said = (f"no engine's least, so none in the network's: {', '.join(own)}: {why}" for why, own in names.items())
    return [dict(Note(Kind.FIGURES, text).to_json()) for text in said]


_SUMS = (
    *("time", "cycles", "waiting", "engine_cycles", "dma_cycles"),
    *("least", "bound", "macs", "bytes_moved", "nanoseconds"),
)
"""Figures of a layer of the model that are the sums of its parts'."""


def _groups(layers: Sequence[Json]) -> list[Json]:
    """The layers of the model, each under the name of the largest of its parts."""
    found = []
    for numbers in parts_of([layer["operators"] for layer in layers]):
        parts = [layers[number] for number in numbers]
        largest = max(parts, key=lambda part: (part["macs"], part["time"] or 0))
        group: Json = {"layers": numbers} | {
            name: largest[name] for name in ("name", "engine", "operators", "bound_by", "gap")
        }
        for name in _SUMS:
            known = [part[name] for part in parts if part[name] is not None]
            group[name] = round(sum(known), 1) if known else None
        spent = {kind: sum(part["spent"][kind] for part in parts) for kind in KINDS} if largest["spent"] else None
        share = round(group["bound"] / group["time"], 4) if group["time"] and group["bound"] <= group["time"] else None
        found.append(group | {"spent": spent, "share_of_bound": share})
    return found


def _devices(report: Report, target: Target, first: InferenceResult) -> list[Json]:
    """Everything that has a line in the timeline, and software engines: cores first, then engines, then DMAs."""
    peaks = {engine.name: engine.ideal_macs_per_cycle for engine in target.engines}
    dmas, total = [dma.name for dma in target.dmas], report.cycles["total"]
    cores = ["core", *(name for name in report.timeline if name.startswith("core"))]
    devices = []
    for name in dict.fromkeys((*cores, *peaks, *dmas, *report.timeline)):
        kind = "engine" if name in peaks else "dma" if name in dmas else "core"
        cycles = report.cycles.get(name)
        if cycles is None and name in first.activities:
            cycles = busy(first.activities[name])
        share = round(cycles / total, 4) if cycles is not None and total else None
        figures = {"busy": cycles, "share": share, "macs": report.macs.get(name), "peak": peaks.get(name)}
        devices.append({"name": name, "kind": kind, **figures})
    return devices


def _live(memory: PlanMemory) -> list[list[int]]:
    """The steps at which the bytes in use of a memory change, each with those in use from there on."""
    parts = [
        (first, last, buffer["address"] + start, buffer["address"] + stop)
        for buffer in memory["buffers"]
        for start, stop, first, last, _ in buffer["parts"]
    ]
    live = []
    for step in sorted({moment for part in parts for moment in part[:2]}):
        # a buffer that takes another's place lies in the same bytes at that step
        used = union([(low, high) for first, last, low, high in parts if first <= step < last])
        live.append([step, sum(high - low for low, high in used)])
    return live


def _steps(plan: PlanFile, first: InferenceResult) -> Json:
    """The program's steps in time: where each stretch of a layer begins, and when, in cycles (None where unknown)."""
    begins, timed = plan["begins"], windows(first)
    fits = [layer for _, layer in begins] == [layer for layer, _, _ in timed]
    at = [start for _, start, _ in timed] if fits else [None] * len(begins)
    pairs = zip(begins, at, strict=True)
    stretches = [{"step": step, "layer": layer, "cycle": cycle} for (step, layer), cycle in pairs]
    return {"count": plan["statements"], "begins": stretches}


def _weights(layers: Sequence[PlanLayer]) -> tuple[list[Json], Json]:
    """Weights by element type, the widest first, and all other constants."""
    groups: dict[tuple[int, str], Json] = {}
    others = {"elements": 0, "bytes": 0}
    for constant in {constant["name"]: constant for layer in layers for constant in layer["constants"]}.values():
        group = others
        if constant["weights"]:
            new = {"dtype": constant["dtype"], "bits": constant["bits"], "elements": 0, "bytes": 0}
            group = groups.setdefault((-constant["bits"], constant["dtype"]), new)
        group["elements"] += constant["elements"]
        group["bytes"] += constant["bytes"]
    total = sum(group["elements"] for group in groups.values())
    return [{**groups[key], "share": round(groups[key]["elements"] / total, 4)} for key in sorted(groups)], others


def _roofline(layers: Sequence[Json], target: Target) -> Json:
    """Roofs: peaks of devices and the width of their ways to memory. Points: layers with MACs."""
    points = []
    for number, layer in enumerate(layers):
        if not layer["macs"] or not layer["time"]:
            continue
        device, touched = layer["engine"], layer["read"] + layer["written"] + layer["constants"]
        moved = layer["bytes_moved"] if target.dmas and device != "core" else touched
        intensity = round(layer["macs"] / moved, 4) if moved else None
        rate = round(layer["macs"] / layer["time"], 4)
        points.append(
            {"layer": number, "device": device, "bytes": moved, "intensity": intensity, "macs_per_cycle": rate}
        )
    peaks: dict[str, tuple[float, float | None]]
    peaks = {"core": (round(1 / core_product(target.cores), 4), round(4 / core_word(target.cores), 4))}
    for engine in target.engines:
        dma = target.dma_of(engine)
        peaks[engine.name] = (engine.ideal_macs_per_cycle, dma.bytes_per_cycle if dma else engine.bytes_per_cycle)
    used = {point["device"] for point in points}
    roofs = [
        {"device": name, "macs_per_cycle": peak, "bytes_per_cycle": width or None}
        for name, (peak, width) in peaks.items()
        if name in used
    ]
    return {"roofs": roofs, "points": points}


def _not_offloaded(layers: Sequence[Json], macs: int, cycles: int | None) -> list[Json]:
    """Layers that no engine computes, by reason, the most cycles first."""
    groups: dict[str, list[int]] = {}
    for number, layer in enumerate(layers):
        if layer["why_not_offloaded"]:
            groups.setdefault(layer["why_not_offloaded"], []).append(number)
    rows = []
    for text, numbers in groups.items():
        time = sum(layers[number]["time"] for number in numbers) if cycles is not None else None
        share = round(time / cycles, 4) if time is not None and cycles else None
        own = sum(layers[number]["macs"] for number in numbers)
        row: Json = {"reason": text, "layers": numbers, "cycles": time, "share_of_cycles": share}
        rows.append(row | {"macs": own, "share_of_macs": round(own / macs, 4) if macs else 0.0})
    return sorted(rows, key=lambda row: (-(row["cycles"] or 0), -row["macs"], row["layers"]))


def _summary(data: Json) -> Json:
    layers, cycles, macs = data["layers"], data["cycles"]["total"], data["macs"]["total"]
    offloaded = [layer for layer in layers if layer["ideal_macs_per_cycle"] is not None]
    places = {kind: sum(layer["spent"][kind] for layer in layers) for kind in KINDS} if cycles is not None else None
    moved = Counter[tuple[str, str]]()
    for move in data["moves"]:
        moved[move["from"], move["to"]] += move["bytes"]
    return {
        "layers": sum(not layer["nothing"] for layer in layers),
        "offloaded_layers": len(offloaded),
        "offloaded_share": round(sum(layer["macs"] for layer in offloaded) / macs, 4) if macs else 0.0,
        "macs_per_cycle": round(macs / cycles, 4) if cycles else None,
        "bytes_moved": sum(layer["bytes_moved"] for layer in layers),
        "energy": round(sum(data["energy"].values()), 6) if data["energy"] else None,
        "moved": [{"from": a, "to": b, "bytes": count} for (a, b), count in sorted(moved.items())],
        "weight_bytes": sum(group["bytes"] for group in data["weights"]),
        "firmware": sum(data["sizes"].values()) if data["sizes"] else None,
        "memory_share": {n: round(use["peak"] / use["size"], 4) for n, use in data["memory"].items()},
        "spent": places,
        "spent_share": {k: round(v / cycles, 4) for k, v in places.items()} if places and cycles else None,
    }


def trace_text(data: Mapping[str, Any]) -> str:
    """A report of `detail` in the Trace Event format: a line per device, a bar per job, bytes in use per memory.
    A cycle is a microsecond; there must be a timeline."""
    events = [_event("M", "process_name", tid=0, args={"name": f"{data['model']} on {data['target']}"})]
    for line, (device, bars) in enumerate(data["timeline"].items(), 1):
        events.append(_event("M", "thread_name", tid=line, args={"name": device}))
        for bar in bars:
            events.append(_event("X", bar["label"], tid=line, ts=bar["start"], dur=bar["end"] - bar["start"]))
    begins = data["steps"]["begins"]
    times = [begin["cycle"] for begin in begins]
    if times and None not in times:
        for name, memory in data["memories"].items():
            for begin in begins:
                live = [0, *(total for step, total in memory["live"] if step <= begin["step"])]
                events.append(_event("C", f"bytes in use, {name}", ts=begin["cycle"], args={"bytes": live[-1]}))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}) + "\n"


def _event(kind: str, name: str, **more: Any) -> Json:
    return {"ph": kind, "name": name, "pid": 1, **more}
