"""The page, the Markdown and the JSON of a comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmldlm.evaluation import report_sections as sections
from mmldlm.evaluation.compare import NO_DIFFERENCE
from mmldlm.evaluation.figure import BLUE, GREY, ORANGE, Picture, make_picture
from mmldlm.evaluation.report import json_bytes, publish
from mmldlm.evaluation.tables import INTERVAL, Table, signed, to_markdown
from mmldlm.json_lines import encode

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE, MARKDOWN, RESULT = "comparison.html", "comparison.md", "comparison.json"
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
_WHERE = {
    "held_out": "Held-out documents",
    "generated": "Generated pairs",
    "similarity": "Similarity of texts",
}


def write_comparison(folder: Path, comparison: dict[str, Any]) -> Path:
    """Write comparison.html, comparison.md, comparison.json and a picture for each result but the first."""
    plain = json.loads(encode(comparison))
    pictures = [
        picture for number, pair in enumerate(plain["comparisons"], 1) if (picture := _picture(number, pair))
    ]
    files = {f"{picture.name}.png": picture.png for picture in pictures}
    files |= {RESULT: json_bytes(plain), MARKDOWN: markdown(plain).encode("utf-8", "replace")}
    files[PAGE] = page(plain, pictures).encode("utf-8", "replace")
    publish(folder, files)
    return folder / PAGE


def comparison_tables(comparison: dict[str, Any]) -> list[Table]:
    """One table for each result but the first and each set of documents."""
    made = []
    for pair in comparison["comparisons"]:
        for about, where in _WHERE.items():
            rows = [_cells(row) for row in pair["rows"] if row["about"] == about]
            counts = [row["num_documents"] for row in pair["rows"] if row["about"] == about]
            if not rows:
                continue
            spread = (
                f"{min(counts):,} to {max(counts):,}" if min(counts) < max(counts) else f"{max(counts):,}"
            )
            text = f"Difference: {pair['other']} minus {pair['first']}; on {spread} shared documents, paired."
            head = ["", "verdict", pair["first"], pair["other"], "difference", INTERVAL, "p"]
            made.append(Table(f"{where}: {pair['other']} against {pair['first']}", text, head, rows))
    return made


def _cells(row: dict[str, Any]) -> list[str]:
    difference = row["difference"]
    digits = 2 if "BLEU" in row["title"] else 4
    if difference["low"] is None:
        return [row["title"], row["verdict"], *(["-"] * 5)]
    return [
        row["title"],
        row["verdict"],
        f"{row['first']:.{digits}f}",
        f"{row['other']:.{digits}f}",
        signed(difference["value"], digits),
        f"{signed(difference['low'], digits)} to {signed(difference['high'], digits)}",
        f"{row['p_value']:.4f}",
    ]


def _intro(comparison: dict[str, Any]) -> str:
    return (
        f"Each result against the first, by {comparison['num_resamples']:,} paired bootstrap resamples of shared "
        f"documents. '{NO_DIFFERENCE}': the 95 % interval of the difference holds 0. Of twenty quantities without any "
        "difference about one shows one by chance. Other training seeds are not covered."
    )


def _results_table(comparison: dict[str, Any]) -> Table:
    rows = [
        [
            one["label"],
            "" if one["step"] is None else f"{one['step']:,}",
            f"{one['num_parameters'] / 1e6:.1f} M",
            one["split"],
            f"{one['num_documents']:,}",
            one["folder"],
        ]
        for one in comparison["results"]
    ]
    return Table("Results", "", ["", "step", "parameters", "split", "documents", "folder"], rows)


def markdown(comparison: dict[str, Any]) -> str:
    """The tables as Markdown."""
    tables = [_results_table(comparison), *comparison_tables(comparison)]
    notes = "".join(f"- {note}\n" for note in comparison["notes"])
    parts = ["# Comparison\n", _intro(comparison) + "\n", notes, *map(to_markdown, tables)]
    if command := comparison.get("command"):
        parts.append(f"```bash\n{command}\n```\n")
    return "\n".join(part for part in parts if part)


def page(comparison: dict[str, Any], pictures: list[Picture]) -> str:
    """The whole HTML page."""
    title = " against ".join(reversed([one["label"] for one in comparison["results"]]))
    command = comparison.get("command")
    body = [
        f'<h1>{sections.escape(title)}</h1><p class="soft">{sections.escape(_intro(comparison))}</p>',
        sections.notes(comparison["notes"]),
        sections.plots(pictures),
        sections.tables([_results_table(comparison), *comparison_tables(comparison)]),
        f"<h2>How this was made</h2><pre>{sections.escape(command)}</pre>" if command else "",
    ]
    return sections.whole_page(title, body)


def _picture(number: int, pair: dict[str, Any]) -> Picture | None:
    """Differences in standard errors, better to the right, so that quantities of any unit share one picture."""
    shown = {*MAIN, *_most_steps(pair)}
    rows = [row for row in pair["rows"] if row["name"] in shown and row["difference"]["standard_error"]]
    if not rows:
        return None

    def draw(axes: Axes) -> None:
        for place, row in enumerate(rows):
            difference, sign = row["difference"], 1 if row["better"] == "more" else -1
            low, value, high = (
                sign * difference[key] / difference["standard_error"] for key in ("low", "value", "high")
            )
            same = row["verdict"] == NO_DIFFERENCE
            color = GREY if same else BLUE if value > 0 else ORANGE
            axes.plot([low, high], [place, place], color=color, linewidth=2)
            axes.plot([value], [place], marker="o", markersize=5, color=color)
        axes.axvline(0.0, color=GREY, linewidth=1)
        axes.set_yticks(range(len(rows)), [row["title"] for row in rows], fontsize=6.5)
        axes.invert_yaxis()
        axes.set_xlabel("difference in standard errors (right: better)", fontsize=6.5, loc="right")
        axes.tick_params(axis="x", labelsize=6.5)

    caption = (
        f"{pair['other']} minus {pair['first']}, turned so that right is better, with 95 % intervals. Grey: "
        f"{NO_DIFFERENCE}."
    )
    return make_picture(f"difference_{number}", f"{pair['other']} against {pair['first']}", caption, draw)


def _most_steps(pair: dict[str, Any]) -> set[str]:
    names = [row["name"].split("/") for row in pair["rows"] if row["name"].startswith("decode/")]
    most = max((int(name[2]) for name in names), default=0)
    scores = ("token_accuracy", "exact_match", "bleu", "reencoded_cosine")
    return {f"decode/{length}/{most}/{score}" for length in ("given", "modelled") for score in scores}
