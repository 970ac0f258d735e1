"""Pictures for light and dark pages: their colours, marks and texts as SVG."""

from __future__ import annotations

import html
from collections.abc import Iterable

#: text, lesser text, lines, marks of ours, marks of the papers
THEMES = {
    "light": ("#1f2328", "#59636e", "#d1d9e0", "#0072B2", "#D55E00"),
    "dark": ("#f0f6fc", "#9198a1", "#3d444d", "#4aa8e0", "#ff9e5e"),
}


def whole(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """Return a picture of parts, with what it shows in words."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" font-size="13">'
    )
    return "\n".join([head, f"<title>{html.escape(title)}</title>", *parts, "</svg>"]) + "\n"


def themed(name: str, alt: str) -> str:
    """Return what shows NAME-light.svg in a page, or NAME-dark.svg."""
    return (
        f'<picture>\n  <source media="(prefers-color-scheme: dark)" srcset="{name}-dark.svg">\n'
        f'  <img alt="{html.escape(alt)}" src="{name}-light.svg">\n</picture>'
    )


def circle(x: float, y: float, color: str, hollow: bool = False, radius: float = 5) -> str:
    """Return a dot, or a ring where ``hollow``."""
    fill = f'fill="none" stroke="{color}" stroke-width="2"' if hollow else f'fill="{color}"'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius + 0.6 * hollow:g}" {fill}/>'


def diamond(x: float, y: float, color: str) -> str:
    """Return a diamond."""
    return f'<path d="M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z" fill="{color}"/>'


def line(x: float, y: float, to_x: float, to_y: float, color: str, width: float) -> str:
    """Return a line from (x, y) to another place."""
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="{color}" stroke-width="{width}"/>'


def area(places: Iterable[tuple[float, float]], color: str) -> str:
    """Return what places surround, in a paler colour."""
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polygon points="{points}" fill="{color}" fill-opacity="0.25"/>'


def text(
    x: float, y: float, said: str, color: str, anchor: str = "middle", weight: int = 400, size: int | None = None
) -> str:
    """Return words at (x, y), which is their middle or what ``anchor`` says."""
    bold = f' font-weight="{weight}"' if weight != 400 else ""
    high = f' font-size="{size}"' if size else ""
    place = f'x="{x:.1f}" y="{y:.1f}" fill="{color}" text-anchor="{anchor}"'
    return f"<text {place}{bold}{high}>{html.escape(said)}</text>"


def number(value: float, said: str = "+.1f") -> str:
    """Return a number at a tick: its sign is a minus, and zero has none."""
    return f"{value:{said}}".replace("-", "−") if value else "0"
