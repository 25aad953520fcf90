"""The stages of a compilation on graphs, saved and checked as they are made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dovetail.ir.graph import Graph
from dovetail.program.interpret import sample_inputs


@dataclass
class Stages:
    """Saves and checks each stage as it is made."""

    folder: Path | None
    """The folder for stages as ONNX; None for no files."""
    check: bool
    """Whether each stage is compared with the one before."""
    count: int = 0
    before: Graph | None = None

    def add(self, name: str, graph: Graph, lsb: int) -> None:
        """Take note of a stage."""
        if self.folder is not None:
            from dovetail.ir.onnx_file import save_graph

            self.folder.mkdir(parents=True, exist_ok=True)
            save_graph(graph, self.folder / f"{self.count}_{name.replace(' ', '_')}.onnx")
        if self.check:
            from dovetail.ir.onnx_file import check_graph, check_stages

            inputs = sample_inputs(graph)
            if self.before is not None:  # the first stage computes in float, where no two runtimes round alike
                check_graph(graph, inputs)
                check_stages(self.before, graph, inputs, lsb=lsb)
        self.before = graph
        self.count += 1
