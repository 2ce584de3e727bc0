"""Reports of evaluations and of comparisons: one HTML file each; numbers and pictures lie beside it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmldlm.errors import UserError
from mmldlm.evaluation.compare import ComparedPair, ComparedQuantity, Comparison, Evaluated
from mmldlm.evaluation.plots import PLOTS, draw_pictures
from mmldlm.evaluation.results import (
    GENERATED,
    HELD_OUT,
    SIMILARITY,
    DecodedExample,
    Evaluation,
    Example,
    Inversion,
)
from mmldlm.evaluation.tables import INTERVAL, make_tables
from mmldlm.json_lines import encode
from mmldlm.metrics import read_log
from mmldlm.reports import (
    BLUE,
    GREY,
    ORANGE,
    Card,
    Picture,
    Table,
    counted,
    make_picture,
    number,
    percent,
    publish,
    render_page,
    signed,
)
from mmldlm.statistics import MORE, SAME

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REPORT, MARKDOWN, RESULT, DOCUMENTS = "report.html", "report.md", "result.json", "documents.json"


@dataclass(frozen=True)
class SideBySide:
    """Several models on the same sentences."""

    table: Table
    examples: list[Example]


def write_report(
    folder: Path, result: Evaluation, *, training_log: Path | None = None, beside: SideBySide | None = None
) -> Path:
    """Write report.html, report.md, result.json, documents.json (values of single documents) and the pictures.

    Pictures of an older report that this one lacks are removed. `beside` is shown on the page alone.
    """
    log = list(read_log(training_log)) if training_log is not None else []
    pictures = draw_pictures(result, log)
    files = {f"{picture.name}.png": picture.png for picture in pictures} | number_files(result)
    files[REPORT] = page(result, pictures, beside)
    publish(folder, files, stale=[f"{name}.png" for name in PLOTS])
    return folder / REPORT


def number_files(result: Evaluation) -> dict[str, bytes]:
    """The files of a result without page and pictures: what comparisons read."""
    documents = encode(result.documents_json())
    numbers = result.to_json() | {"documents_sha256": hashlib.sha256(documents).hexdigest()}
    text = markdown(result).encode("utf-8", "replace")
    return {DOCUMENTS: documents, RESULT: encode(numbers, indent=2), MARKDOWN: text}


def read_result(folder: Path) -> Evaluation:
    """The result in the folder of a report."""
    content, documents = _read_json(folder / DOCUMENTS)
    _, values = _read_json(folder / RESULT)
    try:
        result = Evaluation.from_json(values, documents)
    except UserError as error:
        raise UserError(f"{folder / RESULT}: {error}") from error
    if values.get("documents_sha256") != hashlib.sha256(content).hexdigest():
        raise UserError(f"{folder}: {DOCUMENTS} does not belong to {RESULT}; evaluate the run again")
    return result


def load_evaluated(path: Path, split: str | None = None) -> Evaluated:
    """From a run, from the folder of a report, or from its result.json."""
    folder = _report_folder(path, split)
    return Evaluated(str(path), read_result(folder), folder)


def _report_folder(path: Path, split: str | None) -> Path:
    if path.is_file() and path.name == RESULT:
        return path.parent
    if (path / RESULT).is_file():
        return path
    reports = sorted(result.parent.name for result in path.glob(f"reports/*/{RESULT}"))
    if split is not None and split in reports:
        return path / "reports" / split
    if split is None and len(reports) == 1:
        return path / "reports" / reports[0]
    if not reports or split is not None:
        what = f"no report on the split {split!r}" if split is not None and reports else "no report"
        raise UserError(f"{path}: there is {what}; evaluate it first: mmldlm eval {path}")
    raise UserError(f"{path}: has reports on {', '.join(reports)}; choose one with split=NAME")


def _read_json(path: Path) -> tuple[bytes, Any]:
    """The bytes of a file, and its value."""
    try:
        content = path.read_bytes()
        return content, json.loads(content)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no JSON"
        raise UserError(f"{path}: cannot be read ({reason}); evaluate the run again") from error


def page(result: Evaluation, pictures: list[Picture], beside: SideBySide | None = None) -> bytes:
    return render_page(
        f"Evaluation of {result.model.name}",
        intro=[describe(result)],
        cards=cards(result),
        notes=result.notes,
        pictures=pictures,
        tables=[*([beside.table] if beside else []), *make_tables(result)],
        command=result.command,
        details={
            "Settings": result.settings,
            "Model": vars(result.model),
            "Data": vars(result.data),
            "Versions": result.versions,
            "Seconds": result.seconds,
        },
        template="evaluation.html",
        beside=beside.examples if beside else [],
        examples=result.examples,
        generated=result.generation.examples if result.generation else [],
        mark_differences=mark_differences,
        scores=_example_scores,
    )


def markdown(result: Evaluation) -> str:
    """The tables for a README, an issue or a paper's appendix."""
    intervals = f"Intervals: 95 %, {result.settings['num_resamples']:,} bootstrap resamples of documents."
    parts = [
        f"# Evaluation of {result.model.name}\n",
        f"{describe(result)} {intervals}\n",
        "".join(f"- {note}\n" for note in result.notes),
        *(table.to_markdown() for table in make_tables(result)),
    ]
    if result.command:
        parts.append(f"```bash\n{result.command}\n```\n")
    return "\n".join(part for part in parts if part)


def describe(result: Evaluation) -> str:
    """Model and data in one sentence."""
    model, data = result.model, result.data
    step = "" if model.step is None else f" after {counted(model.step, 'step')}"
    return (
        f"{model.num_parameters / 1e6:.1f} M parameters{step}; {data.num_documents:,} of {data.num_held_out:,} "
        f"documents of the split {data.split} ({data.num_tokens:,} tokens)."
    )


def cards(result: Evaluation) -> list[Card]:
    """The headline numbers."""
    shown = []
    if text := result.bounds.text:
        gain, nats = text.gain.shuffled, f"{text.right.nats_per_token.value:.3f} nats per token"
        interval = f"95 % interval {signed(gain.low)} to {signed(gain.high)}"
        saved = "nats per token saved by the right latent, against a shuffled one"
        shown.append(Card(number(text.right.perplexity), "perplexity of held-out text", nats))
        shown.append(Card(signed(gain.value), saved, interval))
    if inversion := result.inversion:
        shown += _inversion_cards(inversion)
    if retrieval := result.retrieval:
        chance = f"chance {percent(retrieval.chance_at_1, 2)} of {retrieval.num_candidates:,}"
        strangers = f"to unrelated ones {retrieval.stranger_cosine.value:.3f}"
        first, cosine = percent(retrieval.retrieval_at_1.value), f"{retrieval.cosine.value:.3f}"
        shown.append(Card(first, "of texts find their own latent first", chance))
        shown.append(Card(cosine, "cosine of text to latent, against the encoder", strangers))
    if result.generation:
        agreement = result.generation.agreement
        value, unrelated, by = agreement.own, agreement.own_strangers, "the model itself"
        if agreement.encoder is not None and agreement.encoder_strangers is not None:
            value, unrelated, by = agreement.encoder, agreement.encoder_strangers, "the encoder"
        what = f"cosine of generated latents and their texts, by {by}"
        beside = "" if unrelated != unrelated else f"unrelated ones {unrelated:.3f}"
        shown.append(Card(f"{value.value:.3f}", what, beside))
    return shown


def _inversion_cards(inversion: Inversion) -> list[Card]:
    best = inversion.best
    bleu = "" if best.bleu is None else f"BLEU {best.bleu.value:.1f}, "
    steps = f"{best.num_sampling_steps} steps, true length given"
    right = percent(best.token_accuracy.value)
    accuracy = Card(right, "of tokens right, decoded from the latent", f"{bleu}{steps}")
    if best.reencoded_cosine is None or inversion.cosine_reference is None:
        return [accuracy]
    unrelated = f"unrelated texts {inversion.cosine_reference.strangers:.3f}"
    meaning = Card(f"{best.reencoded_cosine.value:.3f}", "cosine of the decoded text, re-encoded", unrelated)
    return [accuracy, meaning]


def _example_scores(decoded: DecodedExample) -> str:
    cosine = decoded.reencoded_cosine
    return percent(decoded.token_accuracy, 0) + ("" if cosine is None else f", cosine {cosine:.2f}")


def mark_differences(true: str, decoded: str) -> list[tuple[str, bool]]:
    """The decoded text in pieces, each with whether the true text has it in that order; by words."""
    words = decoded.split()
    matcher = SequenceMatcher(
        None, [w.lower() for w in true.split()], [w.lower() for w in words], autojunk=False
    )
    pieces: list[tuple[str, bool]] = []
    for kind, _, _, start, stop in matcher.get_opcodes():
        if start < stop:
            pieces.append((" ".join(words[start:stop]), kind == "equal"))
    return pieces


COMPARISON = "comparison"
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
    files[f"{COMPARISON}.json"] = encode(comparison.to_json(), indent=2)
    files[f"{COMPARISON}.md"] = _comparison_markdown(comparison).encode("utf-8", "replace")
    files[f"{COMPARISON}.html"] = _comparison_page(comparison, pictures)
    publish(folder, files)
    return folder / f"{COMPARISON}.html"


def title_of(comparison: Comparison) -> str:
    """The results by name, the first one last."""
    return " against ".join(reversed([one.label for one in comparison.results]))


def comparison_tables(comparison: Comparison) -> list[Table]:
    """One table for each result but the first and each set of documents."""
    tables = []
    for pair in comparison.pairs:
        for about, title in _SETS.items():
            rows = [row for row in _once(pair) if row.about == about]
            if not rows:
                continue
            few, many = (pick(row.num_documents for row in rows) for pick in (min, max))
            counts = f"{few:,} to {many:,}" if few < many else f"{many:,}"
            text = f"Difference: {pair.other} minus {pair.first}; on {counts} shared documents, paired."
            if about == HELD_OUT and len(_once(pair)) < len(pair.rows):
                text += " In bits per byte and per character the text bounds differ in the same way."
            head = ["", "verdict", pair.first, pair.other, "difference", INTERVAL, "p"]
            tables.append(
                Table(f"{title}: {pair.other} against {pair.first}", text, head, [*map(_cells, rows)])
            )
    return tables


def _once(pair: ComparedPair) -> list[ComparedQuantity]:
    """The rows without the text bound in other units, where it is there in nats: those have the same p and verdict."""
    names = {row.name for row in pair.rows}
    return [
        row
        for row in pair.rows
        if not (row.name.startswith("bits_per_") and f"text_bound/{row.name.partition('/')[2]}" in names)
    ]


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


CHANCE_NOTE = (
    f"'{SAME}': the 95 % interval of the difference contains 0. Rows are not corrected for their number: of twenty "
    "without any difference about one shows one by chance. Other training seeds are not covered."
)
"""What a verdict covers and what it does not."""


def _intro(comparison: Comparison) -> str:
    return (
        f"Each result against the first, by {comparison.num_resamples:,} paired bootstrap resamples of shared "
        f"documents. {CHANCE_NOTE}"
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


def _comparison_markdown(comparison: Comparison) -> str:
    tables = [_results_table(comparison), *comparison_tables(comparison)]
    notes = "".join(f"- {note}\n" for note in comparison.notes)
    parts = ["# Comparison\n", _intro(comparison) + "\n", notes, *(table.to_markdown() for table in tables)]
    if comparison.command:
        parts.append(f"```bash\n{comparison.command}\n```\n")
    return "\n".join(part for part in parts if part)


def _comparison_page(comparison: Comparison, pictures: list[Picture]) -> bytes:
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
    rows = [row for row in _once(pair) if row.name in shown and row.difference.standard_error > 0]
    if not rows:
        return None

    def draw(axes: Axes) -> None:
        for place, row in enumerate(rows):
            apart, sign = row.difference, 1 if row.better == MORE else -1
            low, value, high = (
                sign * end / apart.standard_error for end in (apart.low, apart.value, apart.high)
            )
            color = (BLUE if value > 0 else ORANGE) if row.verdict.endswith(" is better") else GREY
            axes.plot([low, high], [place, place], color=color, linewidth=2)
            axes.plot([value], [place], marker="o", markersize=5, color=color)
        axes.axvline(0.0, color=GREY, linewidth=1)
        axes.set_yticks(range(len(rows)), [row.title for row in rows], fontsize=6.5)
        axes.invert_yaxis()
        axes.set_xlabel("difference in standard errors (right: better)", fontsize=6.5, loc="right")
        axes.tick_params(axis="x", labelsize=6.5)

    caption = f"{pair.other} minus {pair.first}, turned so that right is better, with 95 % intervals. Grey: no verdict."
    return make_picture(f"difference_{number}", f"{pair.other} against {pair.first}", caption, draw)


def _most_steps(pair: ComparedPair) -> set[str]:
    names = [row.name.split("/") for row in pair.rows if row.name.startswith("decode/")]
    most = max((int(name[2]) for name in names), default=0)
    scores = ("token_accuracy", "tokens_aligned", "exact_match", "bleu", "reencoded_cosine")
    return {f"decode/{length}/{most}/{score}" for length in ("given", "modelled") for score in scores}
