"""The timeline as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def trace_text(data: Mapping[str, Any]) -> str:
    """The Trace Event format: a line per device, a bar per job, bytes in use per memory; a cycle is a microsecond.

    Args:
        data: of `dovetail.report.detail.detail`, with a timeline.
    """
    events: list[dict[str, Any]] = [_named("process_name", 0, f"{data['model']} on {data['target']}")]
    for line, (device, bars) in enumerate(data["timeline"].items(), 1):
        events.append(_named("thread_name", line, device))
        for bar in bars:
            events.append({"ph": "X", "name": bar["label"], "pid": 1, "tid": line, "ts": bar["start"],
                           "dur": bar["end"] - bar["start"]})  # fmt: skip
    begins = data["steps"]["begins"]
    times = [begin["cycle"] for begin in begins]
    if times and None not in times:
        for name, memory in data["memories"].items():
            for begin in begins:
                live = [total for step, total in memory["live"] if step <= begin["step"]]
                events.append({"ph": "C", "name": f"bytes in use, {name}", "pid": 1, "ts": begin["cycle"],
                               "args": {"bytes": live[-1] if live else 0}})  # fmt: skip
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}) + "\n"


def _named(what: str, line: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": 1, "tid": line, "args": {"name": name}}
