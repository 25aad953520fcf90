"""All that is known of a build and its run: the run's JSON and what the report's page shows beside it (docs/report.md).

Every figure of the page is in here; the page computes none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from dovetail.codegen.emit.manifest import PLAN, SCHEMA, constants_of
from dovetail.errors import BuildError
from dovetail.guests.report.bounds import (
    KINDS,
    bound,
    core_product,
    core_word,
    exposed,
    reason,
    spent,
    transfers_of,
    union,
    windows,
)
from dovetail.report import Report, make_report

if TYPE_CHECKING:
    from dovetail.run import ProjectBuild, RunResult
    from dovetail.sim.protocol import InferenceResult
    from dovetail.target.description import Target

_MOST = 256 << 20
_PLAN = ("begins", "graph", "memories", "moves", "statements", "transfers")
_LAYER = (
    *("calls", "constants", "idle", "kinds", "launches", "modelled", "nothing", "offload", "products", "read"),
    *("reason", "written"),
)
"""Keys of a plan, and of each of its layers."""

Json = dict[str, Any]


def read_plan(build: ProjectBuild) -> Json:
    """The plan file a build keeps for its report. Raises BuildError where it has none, or another version's."""
    path = build.folder / PLAN
    if not path.is_file():
        what = f"the build has no {PLAN}: it was made before there were reports"
        raise BuildError(what, where=str(build.folder), hint="compile the model again")
    hint = "compile the model again"
    if path.stat().st_size > _MOST:
        raise BuildError(f"the file is larger than {_MOST} bytes", where=str(path), hint=hint)
    try:
        found = json.loads(path.read_text())
        schema, layers = found["schema"], found["layers"]
        lacking = [name for name in _PLAN if name not in found]
        lacking += [name for layer in layers for name in _LAYER if name not in layer]
    except (ValueError, KeyError, TypeError) as error:
        raise BuildError(f"the file is damaged: {error}", where=str(path), hint=hint) from None
    if lacking:
        raise BuildError(f"the file does not say its {lacking[0]}", where=str(path), hint=hint)
    if schema != SCHEMA or len(layers) != len(build.manifest["layers"]):
        what = f"schema {schema}, expected {SCHEMA}; {len(layers)} layers, expected {len(build.manifest['layers'])}"
        raise BuildError(f"the file does not fit the build: {what}", where=str(path), hint=hint)
    return dict(found)


def detail(result: RunResult) -> Json:
    """The report of a run as plain values for `json.dumps`: a superset of `Report.to_json()`.
    Raises BuildError where the build has no plan that fits it."""
    report, plan = make_report(result), read_plan(result.build)
    first, target = result.simulation.inferences[0], result.build.target
    found: Json = json.loads(json.dumps(report.to_json()))
    found["layers"] = _layers(found, plan, first, target)
    found["options"] = {name: result.build.manifest.get(name) for name in ("rounding", "optimize", "memory_budget")}
    found["devices"] = _devices(report, target, first)
    found["graph"] = plan["graph"]
    found["memories"] = _memories(plan)
    found["steps"] = _steps(plan, first)
    found["moves"] = plan["moves"]
    found["weights"], found["parameters"] = _weights(plan["layers"])
    found["roofline"] = _roofline(found["layers"], target)
    found["not_offloaded"] = _not_offloaded(found["layers"], found["macs"]["total"], found["cycles"]["total"])
    found["summary"] = _summary(found)
    return found


def _layers(run: Json, plan: Json, first: InferenceResult, target: Target) -> list[Json]:
    layers = run["layers"]
    owners = _owners(plan, first, target)
    own_windows = exposed(first, len(layers), target, owners)
    transfers = transfers_of(first, target)
    moving = [0] * len(layers)
    for job, owner in zip(transfers, owners or (), strict=False):
        moving[owner] += job.end - job.start
    found = []
    for number, (layer, own) in enumerate(zip(layers, plan["layers"], strict=True)):
        parts = [core["layers"].get(layer["name"]) for core in run["cores"]]
        cores = [core for core, part in zip(target.cores, parts, strict=True) if part is not None] or target.cores
        limit = bound(layer, own, target, cores)
        weights = [constant for constant in own["constants"] if constant["weights"]]
        output = plan["graph"]["values"][plan["graph"]["edges"][number]["makes"]]
        added = {
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
            "bound": round(limit.cycles, 1) if layer["cycles"] is not None else None,
            "bound_by": limit.by if layer["cycles"] is not None else "",
            "spent": spent(layer, own_windows[number], max((part or 0 for part in parts[1:]), default=0)),
        }
        whole = layer | added
        whole["time"] = sum(whole["spent"].values()) if whole["spent"] else None
        reached = bool(whole["time"]) and limit.cycles <= whole["time"]
        whole["share_of_bound"] = round(limit.cycles / whole["time"], 4) if reached else None
        whole["gap"] = reason(whole, target, cores)
        found.append(whole)
    return found


def _owners(plan: Json, first: InferenceResult, target: Target) -> list[int] | None:
    """The layer of each DMA transfer; None without time, or where transfers and the program's copies do not match."""
    if not target.dmas or first.total_cycles is None:
        return None
    default = target.dma.name if target.dma else ""
    made = [(layer, count, queue[0] if queue else default) for layer, count, *queue in plan["transfers"]]
    found = [layer for dma in target.dmas for layer, count, name in made if name == dma.name for _ in range(count)]
    return found if len(found) == len(transfers_of(first, target)) else None


def _devices(report: Report, target: Target, first: InferenceResult) -> list[Json]:
    """Whoever has a line in the timeline, and software engines: cores first, then engines, then the DMA."""
    peaks = {engine.name: engine.ideal_macs_per_cycle for engine in target.engines}
    names = ["core", *(name for name in report.timeline if name.startswith("core") and name != "core"), *peaks]
    dmas = [dma.name for dma in target.dmas]
    names += dmas
    names += [name for name in report.timeline if name not in names]
    total, found = report.cycles["total"], []
    for name in names:
        kind = "engine" if name in peaks else "dma" if name in dmas else "core"
        busy = report.cycles.get(name)
        if busy is None and name in first.activities:
            spans = union([(job.start, job.end) for job in first.activities[name]])
            busy = round(sum(end - start for start, end in spans))
        share = round(busy / total, 4) if busy is not None and total else None
        macs = report.macs.get(name)
        found.append({"name": name, "kind": kind, "busy": busy, "share": share, "macs": macs, "peak": peaks.get(name)})
    return found


def _memories(plan: Json) -> Json:
    """Per memory what lies where and when, and how many bytes are in use from each step on at which that changes."""
    found = {}
    for name, memory in plan["memories"].items():
        parts = [
            (first, last, buffer["address"] + start, buffer["address"] + stop)
            for buffer in memory["buffers"]
            for start, stop, first, last, _ in buffer["parts"]
        ]
        live = []
        for step in sorted({moment for part in parts for moment in part[:2]}):
            # what overwrites another buffer in place lies in the same bytes at that step
            used = union([(low, high) for first, last, low, high in parts if first <= step < last])
            live.append([step, sum(high - low for low, high in used)])
        found[name] = {**memory, "live": live}
    return found


def _steps(plan: Json, first: InferenceResult) -> Json:
    """The program's steps in time: where each stretch of a layer begins, and when, in cycles (None where unknown)."""
    begins, timed = plan["begins"], windows(first)
    fits = [layer for _, layer in begins] == [layer for layer, _, _ in timed]
    at = [start for _, start, _ in timed] if fits else [None] * len(begins)
    pairs = zip(begins, at, strict=True)
    stretches = [{"step": step, "layer": layer, "cycle": cycle} for (step, layer), cycle in pairs]
    return {"count": plan["statements"], "begins": stretches}


def _weights(layers: Sequence[Json]) -> tuple[list[Json], Json]:
    """Weights by element type, the widest first, and all other constants."""
    groups: dict[tuple[int, str], Json] = {}
    others = {"elements": 0, "bytes": 0}
    for constant in constants_of(layers):
        group = others
        if constant["weights"]:
            new = {"dtype": constant["dtype"], "bits": constant["bits"], "elements": 0, "bytes": 0}
            group = groups.setdefault((-constant["bits"], constant["dtype"]), new)
        group["elements"] += constant["elements"]
        group["bytes"] += constant["bytes"]
    total = sum(group["elements"] for group in groups.values())
    found = [groups[key] for key in sorted(groups)]
    return [{**group, "share": round(group["elements"] / total, 4)} for group in found], others


def _roofline(layers: Sequence[Json], target: Target) -> Json:
    """Peaks and ways to memory as lines, layers with MACs as points."""
    peaks = {"core": round(1 / core_product(target.cores), 4)}
    widths = {"core": round(4 / core_word(target.cores), 4)}
    for engine in target.engines:
        if any(layer["engine"] == engine.name for layer in layers):
            peaks[engine.name] = engine.ideal_macs_per_cycle
            dma = target.dma_of(engine)
            width = dma.bytes_per_cycle if dma else engine.bytes_per_cycle
            widths |= {engine.name: width} if width else {}
    points = []
    for number, layer in enumerate(layers):
        if not layer["macs"] or not layer["time"]:
            continue
        own, touched = layer["engine"], layer["read"] + layer["written"] + layer["constants"]
        moved = layer["bytes_moved"] if target.dmas and own != "core" else touched
        intensity = round(layer["macs"] / moved, 4) if moved else None
        rate = round(layer["macs"] / layer["time"], 4)
        points.append({"layer": number, "device": own, "bytes": moved, "intensity": intensity, "macs_per_cycle": rate})
    used = {point["device"] for point in points}
    kept = {name: peak for name, peak in peaks.items() if name in used}
    roofs = [{"device": n, "macs_per_cycle": peak, "bytes_per_cycle": widths.get(n)} for n, peak in kept.items()]
    return {"roofs": roofs, "points": points}


def _not_offloaded(layers: Sequence[Json], macs: int, cycles: int | None) -> list[Json]:
    """Layers that no engine computes, by reason, the most cycles first."""
    groups: dict[str, list[int]] = {}
    for number, layer in enumerate(layers):
        if layer["why_not_offloaded"]:
            groups.setdefault(layer["why_not_offloaded"], []).append(number)
    found = []
    for text, numbers in groups.items():
        took = sum(layers[number]["time"] for number in numbers) if cycles is not None else None
        group: Json = {"reason": text, "layers": numbers, "cycles": took}
        group["share_of_cycles"] = round(took / cycles, 4) if took is not None and cycles else None
        group["macs"] = sum(layers[number]["macs"] for number in numbers)
        found.append(group | {"share_of_macs": round(group["macs"] / macs, 4) if macs else 0.0})
    return sorted(found, key=lambda group: (-(group["cycles"] or 0), -group["macs"], group["layers"]))


def _summary(found: Json) -> Json:
    layers, cycles, macs = found["layers"], found["cycles"]["total"], found["macs"]["total"]
    offloaded = [layer for layer in layers if layer["ideal_macs_per_cycle"] is not None]
    places = {kind: sum(layer["spent"][kind] for layer in layers) for kind in KINDS} if cycles is not None else None
    moved: dict[tuple[str, str], int] = {}
    for move in found["moves"]:
        moved[move["from"], move["to"]] = moved.get((move["from"], move["to"]), 0) + move["bytes"]
    return {
        "layers": sum(not layer["nothing"] for layer in layers),
        "offloaded_layers": len(offloaded),
        "offloaded_share": round(sum(layer["macs"] for layer in offloaded) / macs, 4) if macs else 0.0,
        "macs_per_cycle": round(macs / cycles, 4) if cycles else None,
        "bytes_moved": sum(layer["bytes_moved"] for layer in layers),
        "moved": [{"from": a, "to": b, "bytes": count} for (a, b), count in sorted(moved.items())],
        "weight_bytes": sum(group["bytes"] for group in found["weights"]),
        "firmware": sum(found["sizes"].values()) if found["sizes"] else None,
        "memory_share": {n: round(use["peak"] / use["size"], 4) for n, use in found["memory"].items()},
        "spent": places,
        "spent_share": {k: round(v / cycles, 4) for k, v in places.items()} if places and cycles else None,
    }


def trace_text(data: Mapping[str, Any]) -> str:
    """What `detail` gave in the Trace Event format: a line per device, a bar per job, bytes in use per memory.
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
