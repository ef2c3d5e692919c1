"""A line plot in SVG, without a plotting library. Both axes are logarithmic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, MARGIN = 720, 420, 60
COLOURS = ("#3366cc", "#dc3912", "#109618", "#990099", "#ff9900", "#0099c6")


def svg(title: str, across: str, up: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Draws each line as steps: a value holds until the next point. All x and y must be above 0."""
    xs = [math.log10(x) for points in lines.values() for x, _ in points]
    ys = [math.log10(y) for points in lines.values() for _, y in points]
    left, right, low, high = min(xs), max(xs) + 1e-9, min(ys), max(ys) + 1e-9

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            MARGIN + (math.log10(x) - left) / (right - left) * (WIDTH - 4 * MARGIN),
            HEIGHT - MARGIN - (math.log10(y) - low) / (high - low) * (HEIGHT - 2 * MARGIN),
        )

    parts = [f'<text x="{MARGIN}" y="30" font-size="16">{escape(title)}</text>']
    parts.append(f'<text x="{WIDTH // 3}" y="{HEIGHT - 12}">{escape(across)}</text>')
    parts.append(f'<text transform="translate(16 {HEIGHT // 2 + 60}) rotate(-90)">{escape(up)}</text>')
    for part in range(5):
        x, y = 10 ** (left + (right - left) * part / 4), 10 ** (low + (high - low) * part / 4)
        parts.append(f'<text x="{at(x, 1)[0]:.0f}" y="{HEIGHT - MARGIN + 18}" text-anchor="middle">{x:.2g}</text>')
        parts.append(f'<text x="{MARGIN - 6}" y="{at(1, y)[1]:.0f}" text-anchor="end">{y:.3g}</text>')
        parts.append(f'<path d="M{MARGIN} {at(1, y)[1]:.0f}H{WIDTH - 3 * MARGIN}" stroke="#ddd"/>')
    for index, (name, points) in enumerate(lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        places = [at(*point) for point in points]
        path = f"M{places[0][0]:.1f} {places[0][1]:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in places[1:])
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{WIDTH - 3 * MARGIN + 12}" y="{80 + 20 * index}" fill="{colour}">{escape(name)}</text>')
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        f'font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )
