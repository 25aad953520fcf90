"""Runs ResNet-18's convolutions on the VTA model and prints the tables of docs/vta.md; --write puts them there.

    python scripts/vta_layers.py [--write | --check]

Each layer alone, by the default schedule, with every check of the device, its output compared with the integer graph.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "vta.md"
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

from dovetail.targets.vta.config import VtaConfig  # noqa: E402
from dovetail.targets.vta.executor import Execution  # noqa: E402
from vta_layers import RESNET, case_of, default_tiling, graph_of, resnet_layer  # noqa: E402

VARIANTS = {"shift": False, "bias": True}
"""Section of the page -> whether the layer has a bias and rounding."""
TITLES = {"shift": "Requantised by a shift, no bias", "bias": "With bias and rounding"}


@dataclass(frozen=True)
class Row:
    """One layer measured."""

    name: str
    text: str
    square: bool
    """Whether it is 3x3 with stride 1."""
    tile: str
    """Rows x columns x channel blocks of the default schedule."""
    products: int
    """GEMM tiles of the layer itself: output tiles x input blocks x taps."""
    biases: int
    """GEMM tiles that add the bias."""
    outputs: int
    """Output tiles: elements of batch x block."""
    device: Execution
    once: int
    """Bytes of operand, weights and result, each once."""
    exact: bool

    @property
    def compute_bound(self) -> int:
        """Cycles the products and the ALU need; resets and bias are not counted."""
        return self.products + VtaConfig().alu_interval * self.device.alu_operations

    @property
    def bus_bound(self) -> int:
        """Cycles the bus needs to move every byte once."""
        return -(-self.once // VtaConfig().bus_bytes)

    @property
    def ratio(self) -> float:
        """Cycles over the larger bound."""
        return self.device.cycles / max(self.compute_bound, self.bus_bound)

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as it is printed."""
        figures = (self.compute_bound, self.bus_bound, self.device.cycles)
        return f"{self.name}: {self.text}", self.tile, *(f"{n:,}" for n in figures), f"{self.ratio:.3f}"


HEADER = ("layer", "tile", "compute bound", "bus bound", "cycles", "ratio")


def measure(name: str, bias: bool) -> Row:
    """One of RESNET, lowered by the default schedule and executed.

    Raises:
        StreamError: the device found a fault.
    """
    config = VtaConfig()
    graph = graph_of(resnet_layer(name, bias))
    tiling = default_tiling(graph, config)
    case = case_of(graph, tiling, config)
    memory = case.memory()
    device = case.run(memory)
    size, channels, outputs, kernel, stride = RESNET[name]
    x, y = graph.types[graph.inputs[0]].shape, case.expected.shape
    tiles, taps = prod(y) // config.block, kernel * kernel
    products = tiles * (channels // config.block) * taps
    return Row(
        name,
        f"{size}x{size}x{channels}->{outputs} {kernel}x{kernel} s{stride}",
        kernel == 3 and stride == 1,
        f"{tiling.rows}x{tiling.columns}x{tiling.blocks}",
        products,
        device.gemm_tiles - products,
        tiles,
        device,
        prod(x) + outputs * channels * taps + prod(y),
        bool(np.array_equal(case.found(memory), case.expected)),
    )


def section(rows: list[Row], title: str) -> str:
    """A table under its title."""
    lines = [" | ".join(HEADER), " | ".join(["---"] * 2 + ["---:"] * (len(HEADER) - 2))]
    lines += [" | ".join(row.cells) for row in rows]
    return "\n".join([f"### {title}", "", *(f"| {line} |" for line in lines)]) + "\n"


def parts(page: str, name: str) -> tuple[str, str, str]:
    """What stands before, between and after the markers of a section."""
    begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
    before, rest = page.split(begin)
    inside, after = rest.split(end, 1)
    return before + begin, inside, end + after


def main() -> None:
    """Print the tables; write them to the page, or compare them with it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--write", action="store_true", help="put the tables into docs/vta.md")
    choice.add_argument("--check", action="store_true", help="fail when docs/vta.md says something else")
    arguments = parser.parse_args()
    for name, bias in VARIANTS.items():
        rows = [measure(layer, bias) for layer in RESNET]
        if wrong := [row.name for row in rows if not row.exact]:
            sys.exit(f"not equal to the integer graph: {', '.join(wrong)}")
        text = section(rows, TITLES[name])
        print(text, flush=True)
        before, inside, after = parts(PAGE.read_text(encoding="utf-8"), name)
        if arguments.write:
            PAGE.write_text(before + text + after, encoding="utf-8")
        if arguments.check and inside != text:
            sys.exit(f"docs/vta.md differs in section '{name}'; run: python scripts/vta_layers.py --write")


if __name__ == "__main__":
    main()
