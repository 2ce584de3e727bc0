"""The tables, the page, the Markdown and the JSON of a comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from mmldlm.evaluation.compare import ComparedPair, ComparedQuantity, Comparison
from mmldlm.evaluation.report import json_bytes, publish
from mmldlm.evaluation.results import GENERATED, HELD_OUT, SIMILARITY
from mmldlm.evaluation.tables import INTERVAL
from mmldlm.json_lines import encode
from mmldlm.reports import BLUE, GREY, ORANGE, Picture, Table, make_picture, render_page, signed
from mmldlm.statistics import MORE, SAME

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE, MARKDOWN, COMPARISON = "comparison.html", "comparison.md", "comparison.json"
MAIN = (
    "text_bound/right",
    "text_gain/shuffled",
    "bits_per_byte/right",
    "calibration/right/equal_mass",
    "latent_bound/right",
    "t2l/cosine",
    "t2l/retrieval_at_1",
    "t2l/retrieval_at_10",
    "spearman/own",
    "round_trip/latent/own",
    "round_trip/text/token_accuracy",
    "generated/agreement/encoder",
    "generated/agreement/own",
    "generated/reference_nats",
)
"""What the picture shows, besides decoding at the largest number of steps."""
_SETS = {HELD_OUT: "Held-out documents", GENERATED: "Generated pairs", SIMILARITY: "Similarity of texts"}


def write_comparison(folder: Path, comparison: Comparison) -> Path:
    """Write comparison.html, comparison.md, comparison.json and a picture for each result but the first."""
    drawn = [_picture(number, pair) for number, pair in enumerate(comparison.pairs, 1)]
    pictures = [picture for picture in drawn if picture is not None]
    files = {f"{picture.name}.png": picture.png for picture in pictures}
    files[COMPARISON] = json_bytes(json.loads(encode(comparison.to_json())))
    files[MARKDOWN] = markdown(comparison).encode("utf-8", "replace")
    files[PAGE] = page(comparison, pictures)
    publish(folder, files)
    return folder / PAGE


def title_of(comparison: Comparison) -> str:
    """The results by name, the first one last."""
    return " against ".join(reversed([one.label for one in comparison.results]))


def comparison_tables(comparison: Comparison) -> list[Table]:
    """One table for each result but the first and each set of documents."""
    tables = []
    for pair in comparison.pairs:
        for about, title in _SETS.items():
            rows = [row for row in pair.rows if row.about == about]
            if not rows:
                continue
            few, many = (pick(row.num_documents for row in rows) for pick in (min, max))
            counts = f"{few:,} to {many:,}" if few < many else f"{many:,}"
            text = f"Difference: {pair.other} minus {pair.first}; on {counts} shared documents, paired."
            head = ["", "verdict", pair.first, pair.other, "difference", INTERVAL, "p"]
            tables.append(
                Table(f"{title}: {pair.other} against {pair.first}", text, head, [*map(_cells, rows)])
            )
    return tables


def _cells(row: ComparedQuantity) -> list[str]:
    difference, digits = row.difference, 2 if "BLEU" in row.title else 4
    if difference.low != difference.low:
        return [row.title, row.verdict, *(["-"] * 5)]
    return [
        row.title,
        row.verdict,
        f"{row.first:.{digits}f}",
        f"{row.other:.{digits}f}",
        signed(difference.value, digits),
        f"{signed(difference.low, digits)} to {signed(difference.high, digits)}",
        f"{row.p_value:.4f}",
    ]


def _intro(comparison: Comparison) -> str:
    return (
        f"Each result against the first, by {comparison.num_resamples:,} paired bootstrap resamples of shared "
        f"documents. '{SAME}': the 95 % interval of the difference contains 0. Of twenty quantities without any "
        "difference about one shows one by chance. Other training seeds are not covered."
    )


def _results_table(comparison: Comparison) -> Table:
    rows = [
        [
            one.label,
            "" if one.step is None else f"{one.step:,}",
            f"{one.num_parameters / 1e6:.1f} M",
            one.split,
            f"{one.num_documents:,}",
            one.folder or "",
        ]
        for one in comparison.results
    ]
    return Table("Results", "", ["", "step", "parameters", "split", "documents", "folder"], rows)


def markdown(comparison: Comparison) -> str:
    """The tables as Markdown."""
    tables = [_results_table(comparison), *comparison_tables(comparison)]
    notes = "".join(f"- {note}\n" for note in comparison.notes)
    parts = ["# Comparison\n", _intro(comparison) + "\n", notes, *(table.to_markdown() for table in tables)]
    if comparison.command:
        parts.append(f"```bash\n{comparison.command}\n```\n")
    return "\n".join(part for part in parts if part)


def page(comparison: Comparison, pictures: list[Picture]) -> bytes:
    """The whole HTML page."""
    return render_page(
        title_of(comparison),
        intro=[_intro(comparison)],
        notes=comparison.notes,
        pictures=pictures,
        tables=[_results_table(comparison), *comparison_tables(comparison)],
        command=comparison.command,
    )


def _picture(number: int, pair: ComparedPair) -> Picture | None:
    """Differences in standard errors, better to the right, so that quantities of any unit share one picture."""
    shown = {*MAIN, *_most_steps(pair)}
    rows = [row for row in pair.rows if row.name in shown and row.difference.standard_error > 0]
    if not rows:
        return None

    def draw(axes: Axes) -> None:
        for place, row in enumerate(rows):
            apart, sign = row.difference, 1 if row.better == MORE else -1
            low, value, high = (
                sign * end / apart.standard_error for end in (apart.low, apart.value, apart.high)
            )
            color = GREY if row.verdict == SAME else BLUE if value > 0 else ORANGE
            axes.plot([low, high], [place, place], color=color, linewidth=2)
            axes.plot([value], [place], marker="o", markersize=5, color=color)
        axes.axvline(0.0, color=GREY, linewidth=1)
        axes.set_yticks(range(len(rows)), [row.title for row in rows], fontsize=6.5)
        axes.invert_yaxis()
        axes.set_xlabel("difference in standard errors (right: better)", fontsize=6.5, loc="right")
        axes.tick_params(axis="x", labelsize=6.5)

    caption = (
        f"{pair.other} minus {pair.first}, turned so that right is better, with 95 % intervals. Grey: {SAME}."
    )
    return make_picture(f"difference_{number}", f"{pair.other} against {pair.first}", caption, draw)


def _most_steps(pair: ComparedPair) -> set[str]:
    names = [row.name.split("/") for row in pair.rows if row.name.startswith("decode/")]
    most = max((int(name[2]) for name in names), default=0)
    scores = ("token_accuracy", "exact_match", "bleu", "reencoded_cosine")
    return {f"decode/{length}/{most}/{score}" for length in ("given", "modelled") for score in scores}
