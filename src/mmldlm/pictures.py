"""A picture, drawn once: as SVG that takes the page's colours, and as PNG for anywhere else."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Ink and grid lines are replaced by the page's own colours in the SVG; the others suit light and dark pages.
INK, GRID = "#1c2733", "#d5dbe1"
BLUE, ORANGE, GREY, GREEN = "#3d7fd6", "#e07b39", "#8b96a3", "#2a9d78"
_SIZE = (5.4, 3.3)
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 9.5,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Picture:
    """One plot."""

    name: str
    title: str
    caption: str
    svg: str
    """For a page, whose colours it takes."""
    png: bytes
    wide: bool = False
    """Whether a page gives it a row of its own."""


def make_picture(name: str, title: str, caption: str, draw: Callable[[Axes], None]) -> Picture:
    """Draw on one pair of axes."""
    return make_panels(name, title, caption, [draw])


def make_panels(name: str, title: str, caption: str, draws: Sequence[Callable[[Axes], None]]) -> Picture:
    """Draw on axes one above the other, which share what runs to the right."""
    size = _SIZE if len(draws) == 1 else (1.3 * _SIZE[0], 0.6 * len(draws) * _SIZE[1])

    def draw_panels(figure: Figure) -> None:
        panels = figure.subplots(len(draws), sharex=True, squeeze=False)[:, 0]
        for draw, axes in zip(draws, panels, strict=True):
            draw(axes)

    return make_figure(name, title, caption, size, draw_panels, wide=len(draws) > 1)


def make_figure(
    name: str,
    title: str,
    caption: str,
    size: tuple[float, float],
    draw: Callable[[Figure], None],
    *,
    wide: bool = True,
) -> Picture:
    """Draw on a whole figure of this size in inches."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        return Picture(name, title, caption, _to_svg(figure), _to_png(figure), wide)


def _to_svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor").replace(GRID, "var(--line)")
    return text.replace("<svg ", '<svg role="img" ', 1)


def _to_png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()
