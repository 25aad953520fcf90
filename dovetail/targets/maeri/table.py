"""An order for people and for programs: rows per layer, JSON, and the trace that Perfetto opens."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from dovetail.targets.maeri.bound import bound
from dovetail.targets.maeri.listing import arrange
from dovetail.targets.maeri.phases import phases
from dovetail.targets.maeri.rules import Rules
from dovetail.targets.maeri.schedule import Schedule, busy
from dovetail.targets.maeri.timing import timing
from dovetail.targets.maeri.uniform import best_tile
from dovetail.targets.maeri.work import Network

FORMAT = 1
"""Version of the JSON."""


@dataclass(frozen=True, slots=True)
class Row:
    """A layer in an order."""

    name: str
    start: int
    """Cycle of the first weight."""
    end: int
    """The cycle after the last product."""
    neurons: int
    """Virtual neurons, all that are ever used counted."""
    sizes: tuple[int, ...]
    """Multipliers of one."""
    folds: int
    """Most steps of a sum."""
    macs: int
    busy: int
    """Cycles times multipliers its virtual neurons take."""

    @property
    def share(self) -> float:
        """Products per cycle and multiplier taken."""
        return self.macs / self.busy


HEADINGS = ("layer", "start", "end", "virtual neurons", "multipliers each", "steps", "MACs", "used")
"""Of the table of layers."""


def cells(row: Row) -> list[str]:
    """A row as text, under `HEADINGS`."""
    sizes = ", ".join(map(str, row.sizes))
    return [row.name, f"{row.start:,}", f"{row.end:,}", str(row.neurons), sizes, str(row.folds), f"{row.macs:,}",
            f"{100 * row.share:.1f} %"]  # fmt: skip


def rows(schedule: Schedule) -> list[Row]:
    """One per layer, by start."""
    found = []
    for number, work in enumerate(schedule.network.works):
        items = [item for item in schedule.items if item.work == number]
        spans = [busy(item, schedule.network, schedule.config) for item in items]
        times = [timing(schedule.config, work.layer, item.tile, item.taps[1] - item.taps[0]) for item in items]
        taken = sum(span * time.size * item.tile.neurons for span, time, item in zip(spans, times, items, strict=True))
        found.append(
            Row(
                name=work.name,
                start=min(item.start for item in items),
                end=max(item.start + span for item, span in zip(items, spans, strict=True)),
                neurons=sum(item.tile.neurons for item in items),
                sizes=tuple(sorted({time.size for time in times})),
                folds=max(time.folds for time in times),
                macs=work.layer.macs,
                busy=taken,
            )
        )
    return sorted(found, key=lambda row: (row.start, row.end))


@dataclass(frozen=True, slots=True)
class Comparison:
    """An order beside other ways, in cycles."""

    makespan: int
    bound: int
    one_by_one: int
    """Each layer alone, as it would be without the others, one after the other."""
    uniform: int
    """One after the other, each with the best tile of equal virtual neurons in step."""


def compare(schedule: Schedule) -> Comparison:
    """An order beside its bound, layer after layer, and the best equal virtual neurons."""
    config, works = schedule.config, schedule.network.works
    alone = sum(arrange(_only(schedule.network, number), config, Rules()).makespan for number in range(len(works)))
    uniform = sum(best_tile(work.layer, config)[1] for work in works)
    return Comparison(schedule.makespan, bound(schedule.network, config).cycles, alone, uniform)


def _only(network: Network, number: int) -> Network:
    """The network as if a layer's operand existed from the start."""
    work = network.works[number]
    graph = replace(network.graph, nodes=(work.node,), inputs=(work.node.inputs[0],), outputs=(work.node.output,))
    return Network(graph, (work,))


def to_json(schedule: Schedule) -> str:
    """The whole order: configuration, layers, items, and where each sum leaves the tree in each phase."""
    works = schedule.network.works
    data: dict[str, Any] = {
        "format": FORMAT,
        "model": schedule.network.graph.name,
        "configuration": asdict(schedule.config),
        "makespan": schedule.makespan,
        "bound": asdict(bound(schedule.network, schedule.config)),
        "layers": [{"name": work.name, **asdict(work.layer)} for work in works],
        "items": [
            {
                "layer": works[item.work].name,
                "start": item.start,
                "end": item.start + busy(item, schedule.network, schedule.config),
                "multipliers": [item.place.start, item.place.end],
                "tile": asdict(item.tile),
                "products": list(item.taps),
                "segments": [[part.channel, part.first, part.count] for part in item.segments],
            }
            for item in schedule.items
        ],
        "phases": [
            {
                "start": phase.start,
                "configuration": phase.configuration,
                "neurons": [[place.start, place.end] for place in phase.places],
            }
            for phase in phases(schedule)
        ],
    }
    return json.dumps(data, indent=1) + "\n"


def to_trace(schedule: Schedule) -> str:
    """The order in the Trace Event format (a JSON array of complete events; a cycle is a microsecond there)."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": f"MAERI {schedule.config.multipliers}"}}
    ]
    for place in sorted({(item.place.start, item.place.end) for item in schedule.items}):
        name = f"multipliers {place[0]}..{place[1] - 1}"
        events.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": _track(*place), "args": {"name": name}})
    for item in schedule.items:
        events.append(
            {
                "ph": "X",
                "name": schedule.network.works[item.work].name,
                "pid": 1,
                "tid": _track(item.place.start, item.place.end),
                "ts": item.start,
                "dur": busy(item, schedule.network, schedule.config),
                "args": {"channels": sorted({part.channel for part in item.segments})[:64]},
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}) + "\n"


def _track(start: int, end: int) -> int:
    return start * 100_000 + end
