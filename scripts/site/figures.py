"""The figures of docs/concepts.md and docs/improvements.md as SVG: python scripts/site/figures.py writes docs/figures/.

Each figure brings its own background, so it can be read on a light and on a dark page. Where Chromium is installed, the
headline is also written as a PNG file, for slides.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

STYLE = """<style>
  .back { fill: #ffffff; stroke: #d0d7de; } .t { fill: #1f2328; } .s { fill: #57606a; font-size: 13px; }
  .l { stroke: #57606a; fill: none; } .box { fill: #f6f8fa; stroke: #57606a; } .head { fill: #57606a; }
  .text { fill: #b6d7ff; stroke: #0969da; } .latent { fill: #ffd8a8; stroke: #bc4c00; }
  .both { fill: #d3f0d6; stroke: #1a7f37; }
  .pad { fill: #eaeef2; stroke: #afb8c1; } .go { stroke: #1a7f37; stroke-width: 2.5; fill: none; }
  .tt { fill: #0550ae; } .lt { fill: #953800; } .bt { fill: #116329; }
  @media (prefers-color-scheme: dark) {
    .back { fill: #0d1117; stroke: #30363d; } .t { fill: #e6edf3; } .s { fill: #9ea7b3; }
    .l { stroke: #8b949e; } .box { fill: #161b22; stroke: #8b949e; } .head { fill: #8b949e; }
    .text { fill: #0c2d6b; stroke: #58a6ff; } .latent { fill: #5a2a05; stroke: #f0883e; }
    .both { fill: #0f3d1c; stroke: #3fb950; }
    .pad { fill: #21262d; stroke: #484f58; } .go { stroke: #3fb950; }
    .tt { fill: #79c0ff; } .lt { fill: #ffa657; } .bt { fill: #56d364; }
  }
</style>
<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto-start-reverse">
<path class="head" d="M0 0 8 4 0 8z"/></marker></defs>"""


def svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """A whole file."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" '
        f'font-family="system-ui, sans-serif" font-size="15">\n<title>{title}</title>\n{STYLE}\n'
    )
    back = f'<rect class="back" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>\n'
    return head + back + "\n".join(parts) + "\n</svg>\n"


def label(x: float, y: float, text: str, kind: str = "t", anchor: str = "middle", extra: str = "") -> str:
    """A line of text."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}" {extra}>{text}</text>'


def box(x: float, y: float, width: float, height: float, kind: str = "box", rx: float = 6) -> str:
    """A rectangle."""
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{rx:g}"/>'


def arrow(path: str, kind: str = "l") -> str:
    """A line with a head."""
    return f'<path class="{kind}" d="{path}" marker-end="url(#a)"/>'


def modes() -> str:
    """The three modes as places on the map of the two times."""
    left, top, side = 90, 30, 340
    right, bottom = left + side, top + side
    middle, height = left + side / 2, top + side / 2
    parts = [
        box(left, top, side, side, "both", 0),
        box(left, bottom - 9, side, 18, "text", 3),
        box(left - 9, top, 18, side, "latent", 3),
        arrow(f"M{left} {bottom + 28}H{right}"),
        arrow(f"M{left - 28} {bottom}V{top}"),
        label(middle, bottom + 52, "text_time"),
        label(left - 44, height, "latent_time", extra=f'transform="rotate(-90 {left - 44} {height})"'),
        label(left, bottom + 50, "0 clean", "s"), label(right, bottom + 50, "1 all masked", "s"),
        label(left - 44, bottom + 5, "0", "s"), label(left - 44, top + 5, "1", "s"),
        label(left + 130, top + 60, "joint", "bt"), label(left + 130, top + 80, "both times drawn", "s"),
        label(middle + 20, bottom - 20, "l2t: latent clean, text time drawn", "tt"),
        label(left + 30, height - 10, "t2l: text clean, latent time drawn", "lt",
              extra=f'transform="rotate(-90 {left + 30} {height - 10})"'),
        arrow(f"M{right - 4} {top + 4}C{right - 90} {top + 40} {left + 170} {bottom - 120} {left + 56} {bottom - 56}",
              "go"),
        label(right - 20, height + 50, "generate", "bt", "end"),
    ]  # fmt: skip
    return svg(480, 440, "The modes on the map of two times", parts)


LENGTHS = (9, 14, 6, 22, 11, 8, 17, 5, 12, 10)
"""Tokens of ten documents, about as long as dictionary sentences."""


def packing() -> str:
    """The same ten documents as a padded rectangle and as one packed stream."""
    unit, height, left = 9.0, 16, 20
    longest, places = max(LENGTHS) + 1, sum(LENGTHS) + len(LENGTHS)
    fill = places / (len(LENGTHS) * longest)
    parts = [label(left, 32, f"Padded rows: {fill:.0%} filled", anchor="start")]
    y = 46.0
    for length in LENGTHS:
        parts += [
            box(left, y, unit, height, "latent", 2),
            box(left + unit, y, unit * length, height, "text", 2),
        ]
        if length + 1 < longest:
            parts.append(box(left + unit * (1 + length), y, unit * (longest - 1 - length), height, "pad", 2))
        y += height + 3
    parts += _attention(272, 46, 190)
    y += 30
    parts.append(label(left, y, f"Packed: one stream of {places} places, none empty", anchor="start"))
    y = _stream(parts, left, y + 14, unit, height, 49) + height + 30
    for index, (kind, text) in enumerate((("latent", "latent slot"), ("text", "tokens"), ("pad", "padding"))):
        parts += [
            box(left + 120 * index, y - 12, 16, 14, kind, 2),
            label(left + 24 + 120 * index, y, text, "s", "start"),
        ]
    return svg(480, round(y + 18), "A padded batch and a packed stream", parts)


def _stream(parts: list[str], left: float, y: float, unit: float, height: float, row: int) -> float:
    """Draw the documents one after the other, `row` places a line; returns the last y."""
    at = 0
    for length in LENGTHS:
        for count, kind in ((1, "latent"), (length, "text")):
            while count:
                part = min(count, row - at)
                parts.append(box(left + unit * at, y, unit * part, height, kind, 2))
                count, at = count - part, at + part
                if at == row:
                    at, y = 0, y + height + 5
    return y


def _attention(left: float, top: float, side: float) -> list[str]:
    """Who attends to whom in the packed stream."""
    scale = side / (sum(LENGTHS) + len(LENGTHS))
    parts = [label(left, top - 14, "Attention inside a document", anchor="start")]
    parts.append(box(left, top, side, side, "box", 2))
    at = 0.0
    for length in LENGTHS:
        size = scale * (length + 1)
        parts.append(box(left + at, top + at, size, size, "both", 0))
        at += size
    return parts


def streams() -> str:
    """One block of the denoiser: two streams, one attention."""
    parts: list[str] = [
        box(130, 16, 220, 30), label(240, 36, "text_time, latent_time"),
        arrow("M130 31C60 31 40 100 38 150"), arrow("M350 31C420 31 440 100 442 150"),
        '<path class="l" d="M16 140H8V392H16M464 140H472V392H464"/>',
    ]  # fmt: skip
    for x, kind, source, head in (
        (26, "text", "noisy tokens", "token logits"),
        (250, "latent", "noisy latents", "latent prediction"),
    ):
        middle = x + 102
        parts += [
            label(middle, 76, source), arrow(f"M{middle} 82V94"),
            box(x, 96, 204, 32, kind), label(middle, 117, f"{kind} embed"), arrow(f"M{middle} 128V150"),
            box(x, 152, 204, 34), label(middle, 174, "norm, modulate"), arrow(f"M{middle} 186V208"),
            arrow(f"M{middle} 246V266"),
            box(x, 268, 204, 34), label(middle, 290, "gate, add"), arrow(f"M{middle} 302V322"),
            box(x, 324, 204, 54), label(middle, 346, "norm, modulate,"), label(middle, 366, "MLP, gate, add"),
            arrow(f"M{middle} 378V412"),
            box(x, 414, 204, 32, kind), label(middle, 435, head),
        ]  # fmt: skip
    parts += [
        box(26, 210, 428, 36, "both"), label(240, 233, "one attention inside each document"),
        label(240, 402, "× depth", "s"),
    ]  # fmt: skip
    return svg(480, 464, "The two streams of the denoiser", parts)


def flow() -> str:
    """From a text to what a checkpoint can do."""
    parts: list[str] = []
    rows = (
        (("text", "files, Hub, built in"), ("pair store", "tokens and latents")),
        (("packed batch", "no padding"), ("corruption", "masks and noise at two times")),
        (("denoiser", "two streams, one attention"), ("objective", "text, latent, length")),
    )
    for number, row in enumerate(rows):
        y = 16 + 84 * number
        for x, (name, note) in zip((16, 252), row, strict=True):
            parts += [box(x, y, 212, 54, "both" if name == "denoiser" else "box")]
            parts += [label(x + 106, y + 24, name), label(x + 106, y + 43, note, "s")]
        parts.append(arrow(f"M228 {y + 27}H250"))
        parts.append(arrow(f"M358 {y + 54}V{y + 68}H122V{y + 82}"))
    parts += [
        box(16, 268, 448, 40),
        label(240, 293, "checkpoint: published, resumable, loadable at any time"),
    ]
    uses = (
        ("l2t", "latent to text", "text"),
        ("t2l", "text to latent", "latent"),
        ("joint", "both from nothing", "both"),
    )
    for number, (name, note, kind) in enumerate(uses):
        x = 16 + 154 * number
        parts += [arrow(f"M{x + 70} 308V330"), box(x, 332, 140, 54, kind)]
        parts += [label(x + 70, 356, name), label(x + 70, 375, note, "s")]
    return svg(480, 402, "From text to a model", parts)


HEADLINE: dict[str, tuple[str, dict[str, float]]] = {
    "Training speed": ("samples/s, 2,048 tokens, batch 4", {"original": 8.9, "MM-LDLM": 88.4}),
    "Memory": ("GiB in the same run", {"original": 41, "MM-LDLM": 15.1}),
    "Quality": (
        "% held-out tokens right, ≈ 100 s",
        {"original": 14.3, "autoregressive": 27.0, "MM-LDLM": 34.9},
    ),
}
"""The measured figures of docs/improvements.md, "All of it together"."""
BARS = {"original": ("pad", "t"), "autoregressive": ("latent", "lt"), "MM-LDLM": ("text", "tt")}


def headline() -> str:
    """Speed, memory and quality beside the original, for a slide."""
    parts = [
        label(800, 84, "MM-LDLM beside the original research code", extra='font-size="54" font-weight="600"')
    ]
    for number, (title, (unit, bars)) in enumerate(HEADLINE.items()):
        middle, ratio = 280 + 520 * number, bars["MM-LDLM"] / bars["original"]
        claim = f"{ratio:.1f} times as many" if ratio > 1 else f"{100 * ratio:.0f} % of it"
        parts += [
            label(middle, 176, title, extra='font-size="42" font-weight="600"'),
            label(middle, 222, unit, extra='font-size="27"'),
            label(middle, 794, claim, "tt", extra='font-size="38" font-weight="600"'),
            *_bars(middle, 690, bars),
        ]
    parts += [
        label(
            800, 846,
            "One NVIDIA H200, the original's shape; quality: true length, 113 M in one step, 104 M greedy, "
            "70 M in 32 steps.",
            extra='font-size="25"',
        ),
        label(800, 880, "Commands, dates and conditions: docs/improvements.md", extra='font-size="25"'),
    ]  # fmt: skip
    return svg(1600, 900, "MM-LDLM beside the original research code: speed, memory, quality", parts)


def _bars(middle: float, floor: float, values: dict[str, float]) -> list[str]:
    """Bars around `middle`, the largest 380 high, each with its value above and its name below."""
    pitch = 170 if len(values) > 2 else 210
    parts = [f'<path class="l" d="M{middle - 244} {floor}H{middle + 244}"/>']
    for number, (name, value) in enumerate(values.items()):
        x, height = middle + pitch * (number - (len(values) - 1) / 2), 380 * value / max(values.values())
        kind, colour = BARS[name]
        parts += [
            box(x - 62, floor - height, 124, height, kind, 4),
            label(x, floor - height - 18, f"{value:g}", colour, extra='font-size="50" font-weight="600"'),
            label(x, floor + 38, name, extra='font-size="24"'),
        ]
    return parts


FIGURES = {
    "flow.svg": flow,
    "headline.svg": headline,
    "modes.svg": modes,
    "packing.svg": packing,
    "streams.svg": streams,
}


def draw_all(folder: Path) -> None:
    """Write every figure."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        (folder / name).write_text(draw())


def photograph(drawing: Path) -> None:
    """Write the PNG file beside a drawing."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print(f"no Chromium: {drawing.with_suffix('.png').name} stays as it is")
        return
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1600,900"]
    picture = f"--screenshot={drawing.with_suffix('.png')}"
    subprocess.run(
        [browser, *options, picture, drawing.as_uri()], check=True, capture_output=True, timeout=120
    )


if __name__ == "__main__":
    figures = Path(__file__).resolve().parents[2] / "docs" / "figures"
    draw_all(figures)
    photograph(figures / "headline.svg")
