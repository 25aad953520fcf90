"""The frontier as an SVG: what weights cost against the signal-to-noise ratio they leave."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import ceil, floor

from dovetail.calibrate.budget import Point
from dovetail.calibrate.mixed import Search

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 40, 50
_TICKS = 5


def frontier_svg(found: Search, title: str) -> str:
    """A drawing of the frontier with the chosen point marked; the same text for the same search."""
    points, chosen = found.points, found.chosen
    unit = "bytes of weights" if found.unit == "bytes" else "cycles of layers with weights"
    costs, ratios = [point.cost for point in points], [point.sqnr for point in points]
    low, high = floor(min(ratios)), max(ceil(max(ratios)), floor(min(ratios)) + 1)
    left, right = min(costs), max(max(costs), min(costs) + 1)

    def place(point: Point) -> tuple[float, float]:
        """Pixels of a point."""
        x = LEFT + (point.cost - left) / (right - left) * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - (point.sqnr - low) / (high - low) * (HEIGHT - TOP - BOTTOM)
        return round(x, 1), round(y, 1)

    path = " ".join(f"{x},{y}" for x, y in map(place, points))
    x, y = place(chosen)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="14">{escape(title)}</text>',
    ]
    for index in range(_TICKS):
        share = index / (_TICKS - 1)
        at = LEFT + share * (WIDTH - LEFT - RIGHT)
        lines.append(
            f'<text x="{at:.1f}" y="{HEIGHT - 30}" text-anchor="middle">{left + share * (right - left):,.0f}</text>'
        )
        at = HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
        lines.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        lines.append(
            f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{low + share * (high - low):.0f} dB</text>'
        )
    lines += [
        f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(unit)}</text>',
        f'<polyline points="{path}" fill="none" stroke="#1f6fb4" stroke-width="2"/>',
        f'<circle cx="{x}" cy="{y}" r="5" fill="#c0392b"/>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """At most so many points, ends included, spread evenly over the cost."""
    if len(points) <= most:
        return list(points)
    first, last = points[0].cost, points[-1].cost
    found: list[Point] = []
    for index in range(most):
        wanted = first + (last - first) * index / (most - 1)
        nearest = min(points, key=lambda point: abs(point.cost - wanted))
        if nearest not in found:
            found.append(nearest)
    return found
