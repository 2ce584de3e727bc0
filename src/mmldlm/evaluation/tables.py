"""The tables of an evaluation, made once for the terminal, Markdown and the page. Cells are plain text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LATENT_NAMES = {"right": "right latent", "shuffled": "shuffled latent", "none": "no latent"}
TEXT_NAMES = {"right": "right text", "shuffled": "shuffled text", "none": "no text"}
INTERVAL = "95 % interval"


@dataclass(frozen=True)
class Table:
    """Rows under a head; the first column says what a row is."""

    title: str
    about: str
    head: list[str]
    rows: list[list[str]]


def make_tables(result: dict[str, Any]) -> list[Table]:
    """Every table that the result has something for."""
    makers = (
        ("text_bound", _text_bound),
        ("text_bound", _calibration),
        ("latent_bound", _latent_bound),
        ("inversion", _inversion),
        ("inversion", _inversion_by_length),
        ("self_check", _self_check),
        ("self_check", _self_check_gain),
        ("retrieval", _retrieval),
        ("similarity", _similarity),
        ("round_trips", _round_trips),
        ("generation", _generation),
    )
    made = [make(result[part], result) for part, make in makers if result.get(part)]
    return [table for table in made if table.rows]


def _text_bound(bound: dict[str, Any], result: dict[str, Any]) -> Table:
    kinds = {kind: bound[kind] for kind in LATENT_NAMES}
    gains = {kind: bound["gain"].get(kind) for kind in kinds}
    lengths = [row["length_nats_per_document"] for row in kinds.values()]
    rows = [
        ["nats / token", *(f"{row['nats_per_token']:.3f}" for row in kinds.values())],
        [INTERVAL, *("{:.3f} to {:.3f}".format(*row["interval"]) for row in kinds.values())],
        ["bits / token", *(f"{row['bits_per_token']:.3f}" for row in kinds.values())],
        ["perplexity", *(number(row["perplexity"]) for row in kinds.values())],
        ["bits / byte", *(_value(row["bits_per_byte"]) for row in kinds.values())],
        ["bits / character", *(_value(row["bits_per_character"]) for row in kinds.values())],
        ["nats / token more than right", *(_value(gain, signed) for gain in gains.values())],
        [INTERVAL, *("" if gain is None else _span(gain, signed) for gain in gains.values())],
        ["length, nats / document", *("given" if nats is None else f"{nats:.2f}" for nats in lengths)],
    ]
    tokenizer = (result["data"]["tokenizer"] or {}).get("name", "an unknown tokenizer")
    about = (
        "Continuous-time bound of masked diffusion, as MDLM defines it, on the negative log-likelihood of a text given "
        f"its latent and its length. Tokens of {tokenizer}, no special ones; {bound['right']['num_documents']:,} "
        f"documents, {bound['right']['num_tokens']:,} tokens, {bound['right']['num_draws']} draws each."
    )
    return Table("Text bound: what the latent buys", about, ["", *LATENT_NAMES.values()], _filled(rows))


def _calibration(bound: dict[str, Any], result: dict[str, Any]) -> Table:
    rows = []
    for kind, name in LATENT_NAMES.items():
        error = bound[kind]["calibration_error"]
        rows.append([name, *_cells(error["equal_width"]), *_cells(error["equal_mass"])])
    about = "Expected calibration error: mean distance between confidence and share right, over ten buckets."
    return Table("Calibration", about, ["", "equal width", INTERVAL, "equal mass", INTERVAL], rows)


def _latent_bound(bound: dict[str, Any], result: dict[str, Any]) -> Table:
    def show(value: float) -> str:
        return signed(value, 4)

    kinds = {kind: bound[kind] for kind in TEXT_NAMES}
    gains = [bound["gain"].get(kind) for kind in kinds]
    rows = [
        ["nats / dimension", *(f"{row['nats_per_dimension']:.4f}" for row in kinds.values())],
        [INTERVAL, *("{:.4f} to {:.4f}".format(*row["interval"]) for row in kinds.values())],
        ["in raw coordinates", *(f"{row['nats_per_dimension_raw']:.4f}" for row in kinds.values())],
        ["nats / dimension more than right", *(_value(gain, show) for gain in gains)],
        [INTERVAL, *("" if gain is None else _span(gain, show) for gain in gains)],
    ]
    about = (
        f"Continuous-time variational bound on the negative log-density of a latent ({bound['num_dimensions']} "
        f"dimensions), up to a signal-to-noise ratio of {bound['snr']:.3g}; Gaussian reconstruction "
        f"({bound['reconstruction_nats_per_dimension']:.4f}) included, prior term exactly 0. A standard normal has "
        f"{bound['normal_nats_per_dimension']:.4f}."
    )
    return Table("Latent bound: what the text buys", about, ["", *TEXT_NAMES.values()], rows)


def _filled(rows: list[list[str]]) -> list[list[str]]:
    """Rows that say something."""
    return [row for row in rows if any(row[1:])]


def _inversion(inversion: dict[str, Any], result: dict[str, Any]) -> Table:
    rows = []
    for length, key in (("true", "length_given"), ("modelled", "length_modelled")):
        for point in inversion[key]:
            more = [_value(point["token_f1"], percent), _value(point["right_length"], percent)]
            rows.append([_steps(point, length), *_inversion_cells(point), *more])
    sampling = ", ".join(f"{key}={value}" for key, value in inversion["sampling"].items())
    about = f"{inversion['num_documents']:,} documents, always from fully masked text; {sampling}."
    if inversion["bleu_signature"]:
        about += f" BLEU: {inversion['bleu_signature']}."
    return Table(
        "Latent to text", about, ["steps, length", *_INVERSION_HEAD, "token F1", "length right"], rows
    )


def _inversion_by_length(inversion: dict[str, Any], result: dict[str, Any]) -> Table:
    rows = []
    for group in inversion["by_length"] if len(inversion["by_length"]) > 1 else []:
        name = f"{group['shortest']} to {group['longest']} ({group['num_documents']:,})"
        for length, key in (("true", "length_given"), ("modelled", "length_modelled")):
            rows += [[name, _steps(point, length), *_inversion_cells(point)] for point in group[key]]
    about = (
        "The same documents by the number of their tokens (in brackets: documents), at every number of steps."
    )
    head = ["tokens", "steps, length", *_INVERSION_HEAD]
    return Table("Latent to text, by length", about, head, rows)


_INVERSION_HEAD = ["tokens right", INTERVAL, "exact", "BLEU", "re-encoded cosine"]


def _steps(point: dict[str, Any], length: str) -> str:
    return f"{point['num_sampling_steps']}, {length}"


def _inversion_cells(point: dict[str, Any]) -> list[str]:
    return [
        *_cells(point["token_accuracy"], percent),
        _value(point["exact_match"], percent),
        _value(point["bleu"], "{:.1f}".format),
        _value(point["reencoded_cosine"]),
    ]


_GAINS = {
    "token_accuracy": ("tokens right", lambda value: signed(100 * value, 1)),
    "exact_match": ("exact", lambda value: signed(100 * value, 1)),
    "bleu": ("BLEU", lambda value: signed(value, 1)),
    "reencoded_cosine": ("re-encoded cosine", lambda value: signed(value)),
}
"""Name of each score of decoding, and how a difference of it is shown."""
_WAY_HEAD = ["sampler", "guidance", "candidates", "rounds"]
_WAY_KEYS = ("text_sampler", "guidance", "num_candidates", "num_rounds")


def _self_check(check: dict[str, Any], result: dict[str, Any]) -> Table:
    rows = [
        [
            *_way(row),
            *_inversion_cells(row),
            *(_value(row[key], "{:,.1f}".format) for key in ("passes", "num_encoded")),
            f"{row['seconds']:.1f}",
        ]
        for row in check["rows"]
    ]
    judges = {"model": "the model's own t2l side", "encoder": "the encoder"}
    how = (
        f"The first candidate takes the most probable tokens, the others and what is decoded anew are drawn at "
        f"temperature {check['candidate_temperature']:g}; {judges[check['judge']]} turns texts back into latents. "
        if check["judge"]
        else ""
    )
    about = (
        f"{check['num_documents']:,} documents, {check['num_sampling_steps']} steps, true length given. {how}"
        "Passes of the network and texts turned back are means per document; seconds are for all."
    )
    head = [*_WAY_HEAD, *_INVERSION_HEAD, "passes", "turned back", "seconds"]
    return Table("Ways to decode", about, head, rows)


def _self_check_gain(check: dict[str, Any], result: dict[str, Any]) -> Table:
    plain = [check["plain"][key] for key in _WAY_KEYS]
    rows = []
    for row in check["rows"]:
        way = [row[key] for key in _WAY_KEYS]
        found = [(row["difference"][key], show) for key, (_, show) in _GAINS.items()]
        if way != plain:
            cells = [
                f"{_value(value, show)} ({_span(value, show)})" if value else "" for value, show in found
            ]
            rows.append([*_way(row), *cells])
    about = (
        f"Against one text of most probable tokens by {plain[0]}, guidance {plain[1]:g}, on the same documents; in "
        f"brackets the {INTERVAL} of the paired difference. Shares differ in points of 100."
    )
    head = [*_WAY_HEAD, *(name for name, _ in _GAINS.values())]
    return Table("Ways to decode, against the plain one", about, head, rows)


def _way(row: dict[str, Any]) -> list[str]:
    """How a row was decoded."""
    return [row["text_sampler"], f"{row['guidance']:g}", str(row["num_candidates"]), str(row["num_rounds"])]


def _retrieval(retrieval: dict[str, Any], result: dict[str, Any]) -> Table:
    rows = [
        ["cosine to its own latent", *_cells(retrieval["cosine"]), ""],
        ["cosine to another's latent", *_cells(retrieval["stranger_cosine"]), ""],
    ]
    for depth in (1, 10):
        shown = _cells(retrieval[f"retrieval_at_{depth}"], percent)
        rows.append([f"retrieval@{depth}", *shown, percent(retrieval[f"chance_at_{depth}"], 2)])
    sought = f"each sought among all {retrieval['num_candidates']:,} held-out latents"
    about = f"{retrieval['num_queries']:,} texts, {sought}."
    return Table("Text to latent", about, ["", "value", INTERVAL, "chance"], rows)


def _similarity(similarity: dict[str, Any], result: dict[str, Any]) -> Table:
    rows = [
        [name, *_cells(similarity[key])]
        for key, name in (("own", "the model's latents"), ("encoder", "the encoder's latents"))
        if similarity[key]
    ]
    if similarity["difference"]:
        rows.append(["difference", *_cells(similarity["difference"], signed)])
    about = f"Spearman's rank correlation of cosine and score on {similarity['num_pairs']:,} pairs of texts."
    return Table("Similarity of texts (STS)", about, ["", "correlation", INTERVAL], rows)


def _round_trips(trips: dict[str, Any], result: dict[str, Any]) -> Table:
    there, back = trips["latent_text_latent"], trips["text_latent_text"]
    rows = [["latent to text to latent by the model itself: cosine", *_cells(there["own"])]]
    if there["encoder"]:
        rows.append(["latent to text to latent by the encoder: cosine", *_cells(there["encoder"])])
    rows.append(
        ["beside it: true text to latent by the model itself: cosine", *_cells(there["own_of_true_text"])]
    )
    for key, name, show in (
        ("token_accuracy", "tokens right", percent),
        ("exact_match", "exact", percent),
        ("bleu", "BLEU", "{:.1f}".format),
        ("reencoded_cosine", "re-encoded cosine", "{:.3f}".format),
    ):
        if back[key]:
            rows.append([f"text to the model's own latent to text: {name}", *_cells(back[key], show)])
    about = f"{trips['num_documents']:,} documents, {trips['num_sampling_steps']} steps, true length given."
    return Table("Round trips", about, ["", "value", INTERVAL], rows)


def _generation(made: dict[str, Any], result: dict[str, Any]) -> Table:
    rows = [*_diversity_rows(made["diversity"]), *_reference_rows(made["reference_lm"])]
    agreement = made["agreement"]
    for who, name in (("own", "the model itself"), ("encoder", "the encoder")):
        if agreement[who]:
            chance = f"unrelated {agreement[f'{who}_strangers']:.3f}"
            rows.append([f"cosine of latent and text by {name}", *_cells(agreement[who]), chance, ""])
    rows += [*_distance_rows(made["distance"]), *_memorised_rows(made["memorised"])]
    sampling = ", ".join(f"{key}={value}" for key, value in made["sampling"].items())
    about = (
        f"{made['num_documents']:,} pairs from nothing, beside {made['num_real']:,} held-out ones; {sampling}; "
        f"length {made['length']}."
    )
    head = ["", "generated", INTERVAL, "held-out", INTERVAL]
    return Table("Joint generation", about, head, rows)


def _diversity_rows(found: dict[str, Any]) -> list[list[str]]:
    names = {
        **{f"distinct_{n}": f"distinct-{n}" for n in (1, 2, 3)},
        **{f"repeated_{n}": f"{n}-grams repeated in the same text" for n in (1, 2, 4)},
        "self_bleu": "self-BLEU",
    }
    rows = []
    for key, name in names.items():
        if found[key]:
            show = "{:.1f}".format if key == "self_bleu" else percent
            rows.append([name, *_cells(found[key]["generated"], show), *_cells(found[key]["real"], show)])
    return rows


def _reference_rows(reference: dict[str, Any] | None) -> list[list[str]]:
    if not reference:
        return []
    values = reference["perplexity"]
    name = f"perplexity under {reference['name']}"
    return [[name, *_cells(values["generated"], number), *_cells(values["real"], number)]]


def _distance_rows(distance: dict[str, Any] | None) -> list[list[str]]:
    names = {
        "latent_frechet": f"Fréchet distance of latents ({distance['num_directions']} directions)"
        if distance
        else "",
        "length_frechet": "Fréchet distance of lengths",
        "length_wasserstein": "Wasserstein distance of lengths, tokens",
    }
    rows = []
    for key, name in names.items() if distance else ():
        value = distance[key] if distance else {}
        span = f"{value['real_low']:.2f} to {value['real_high']:.2f}"
        rows.append([name, f"{value['generated']:.2f}", "", f"{value['real']:.2f}", span])
    return rows


def _memorised_rows(memorised: dict[str, Any] | None) -> list[list[str]]:
    names = {"whole": "is a training document", "inside": "stands inside a training document"}
    return [
        [name, *_cells(memorised[key]["generated"], percent), *_cells(memorised[key]["real"], percent)]
        for key, name in names.items()
        if memorised
    ]


def _cells(value: dict[str, Any] | None, show: Any = "{:.3f}".format) -> list[str]:
    return ["", ""] if value is None else [_value(value, show), _span(value, show)]


def _value(value: dict[str, Any] | None, show: Any = "{:.3f}".format) -> str:
    return "" if value is None or value["value"] is None else show(value["value"])


def _span(value: dict[str, Any], show: Any) -> str:
    low, high = value["low"], value["high"]
    return "" if low is None or high is None else f"{show(low)} to {show(high)}"


def number(value: float | None) -> str:
    """A number that may be large; null is one that was not finite."""
    if value is None:
        return "∞"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def percent(value: float, digits: int = 1) -> str:
    """A share."""
    return f"{100 * value:.{digits}f} %"


def signed(value: float, digits: int = 3) -> str:
    """A difference."""
    return f"{value:+.{digits}f}".replace("-", "−")


def to_markdown(table: Table) -> str:
    """The table under a heading."""
    lines = [f"## {table.title}", "", _cell(table.about), "", *markdown_rows(table.head, table.rows)]
    return "\n".join(lines) + "\n"


def markdown_rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table; numbers stand on the right."""
    marks = ["---", *["---:"] * (len(head) - 1)]
    return ["| " + " | ".join(map(_cell, row)) + " |" for row in (head, marks, *rows)]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
