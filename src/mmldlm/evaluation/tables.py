"""The tables of an evaluation, for the terminal, Markdown and the page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mmldlm.evaluation.bounds import LATENT_NAMES, TEXT_NAMES, Calibration, LatentBounds, TextBounds
from mmldlm.evaluation.results import (
    Agreement,
    Beside,
    Distances,
    Evaluation,
    Generation,
    Inversion,
    Memorised,
    Retrieval,
    RoundTrip,
    Similarity,
    TextScores,
    Way,
    WaysToDecode,
)
from mmldlm.reports import Table, number, percent, signed
from mmldlm.statistics import Estimate

INTERVAL = "95 % interval"
Show = Callable[[float], str]
one, three, four = "{:.1f}".format, "{:.3f}".format, "{:.4f}".format


def make_tables(result: Evaluation) -> list[Table]:
    """Every table that the result has something for."""
    tokenizer = (result.data.tokenizer or {}).get("name", "an unknown tokenizer")
    parts: list[tuple[Any, Callable[[Any], Table]]] = [
        (result.bounds.text, lambda bounds: _text_bounds(bounds, tokenizer)),
        (result.calibration, _calibration),
        (result.bounds.latent, _latent_bounds),
        (result.inversion, _inversion),
        (result.inversion, _inversion_by_length),
        (result.decoding, _ways),
        (result.decoding, _way_gains),
        (result.retrieval, _retrieval),
        (result.similarity, _similarity),
        (result.round_trip, _round_trip),
        (result.generation, _generation),
    ]
    tables = [make(part) for part, make in parts if part is not None]
    return [table for table in tables if table.rows]


def _text_bounds(bounds: TextBounds, tokenizer: str) -> Table:
    kinds = bounds.kinds
    gains = (None, bounds.gain.shuffled, bounds.gain.none)
    lengths = [kind.length_nats_per_document for kind in kinds]
    ends = [kind.perplexity_with_end for kind in kinds]
    rows = [
        ["nats / token", *(_value(kind.nats_per_token) for kind in kinds)],
        [INTERVAL, *(_span(kind.nats_per_token) for kind in kinds)],
        ["bits / token", *(three(kind.bits_per_token) for kind in kinds)],
        ["perplexity", *(number(kind.perplexity) for kind in kinds)],
        ["bits / byte", *(_value(kind.bits_per_byte) for kind in kinds)],
        ["bits / character", *(_value(kind.bits_per_character) for kind in kinds)],
        ["nats / token more than right", *(_value(gain, signed) for gain in gains)],
        [INTERVAL, *(_span(gain, signed) for gain in gains)],
        ["length, nats / document", *("given" if nats is None else f"{nats:.2f}" for nats in lengths)],
        ["perplexity, end counted", *("" if end is None else number(end) for end in ends)],
    ]
    about = (
        "Continuous-time bound of masked diffusion, as MDLM defines it, on the negative log-likelihood of a text given "
        f"its latent and its length. Tokens of {tokenizer}, no special ones; {bounds.num_documents:,} documents, "
        f"{bounds.num_tokens:,} tokens, {bounds.num_draws} draws each."
    )
    shown = [row for row in rows if any(row[1:])]
    return Table("Text bound: what the latent saves", about, ["", *LATENT_NAMES.values()], shown)


def _calibration(calibration: Calibration) -> Table:
    kinds = (calibration.right, calibration.shuffled, calibration.none)
    rows = [
        [name, *_cells(kind.equal_width.error), *_cells(kind.equal_mass.error)]
        for name, kind in zip(LATENT_NAMES.values(), kinds, strict=True)
    ]
    about = "Expected calibration error: mean distance between confidence and share right, over ten buckets."
    return Table("Calibration", about, ["", "equal width", INTERVAL, "equal mass", INTERVAL], rows)


def _latent_bounds(bounds: LatentBounds) -> Table:
    def show(value: float) -> str:
        return signed(value, 4)

    kinds = bounds.kinds
    gains = (None, bounds.gain.shuffled, bounds.gain.none)
    rows = [
        ["nats / dimension", *(_value(kind.nats_per_dimension, four) for kind in kinds)],
        [INTERVAL, *(_span(kind.nats_per_dimension, four) for kind in kinds)],
        ["in raw coordinates", *(four(kind.nats_per_dimension_raw) for kind in kinds)],
        ["nats / dimension more than right", *(_value(gain, show) for gain in gains)],
        [INTERVAL, *(_span(gain, show) for gain in gains)],
    ]
    about = (
        f"Continuous-time variational bound on the negative log-density of a latent ({bounds.num_dimensions} "
        f"dimensions), up to a signal-to-noise ratio of {bounds.snr:.3g}; Gaussian reconstruction "
        f"({bounds.reconstruction_nats_per_dimension:.4f}) included, prior term exactly 0. A standard normal has "
        f"{bounds.normal_nats_per_dimension:.4f}."
    )
    return Table("Latent bound: what the text saves", about, ["", *TEXT_NAMES.values()], rows)


_SCORE_HEAD = ["tokens right", INTERVAL, "after alignment", "exact", "BLEU", "re-encoded cosine"]


def _score_cells(scores: TextScores) -> list[str]:
    return [
        *_cells(scores.token_accuracy, percent),
        _value(scores.tokens_aligned, percent),
        _value(scores.exact_match, percent),
        _value(scores.bleu, one),
        _value(scores.reencoded_cosine),
    ]


def _inversion(inversion: Inversion) -> Table:
    rows = [
        [
            f"{scores.num_sampling_steps}, {length}",
            *_score_cells(scores),
            _value(scores.token_f1, percent),
            _value(scores.right_length, percent),
        ]
        for length, both in (("true", inversion.length_given), ("modelled", inversion.length_modelled))
        for scores in both
    ]
    sampling = ", ".join(f"{key}={value}" for key, value in inversion.sampling.items())
    about = f"{inversion.num_documents:,} documents, always from fully masked text; {sampling}."
    if inversion.bleu_signature:
        about += f" BLEU: {inversion.bleu_signature}."
    head = ["steps, length", *_SCORE_HEAD, "token F1", "length right"]
    return Table("Latent to text", about, head, rows)


def _inversion_by_length(inversion: Inversion) -> Table:
    groups = inversion.by_length if len(inversion.by_length) > 1 else []
    rows = [
        [
            f"{group.shortest} to {group.longest} ({group.num_documents:,})",
            f"{scores.num_sampling_steps}, {length}",
            *_score_cells(scores),
        ]
        for group in groups
        for length, both in (("true", group.length_given), ("modelled", group.length_modelled))
        for scores in both
    ]
    about = (
        "The same documents by the number of their tokens (in brackets: documents), at every number of steps."
    )
    return Table("Latent to text, by length", about, ["tokens", "steps, length", *_SCORE_HEAD], rows)


_WAY_HEAD = ["sampler", "guidance", "candidates", "rounds"]


def _way_cells(way: Way) -> list[str]:
    return [way.text_sampler, f"{way.guidance:g}", str(way.num_candidates), str(way.num_rounds)]


def _ways(ways: WaysToDecode) -> Table:
    rows = [
        [
            *_way_cells(row.way),
            *_score_cells(row.scores),
            _value(row.passes, "{:,.1f}".format),
            _value(row.num_encoded, "{:,.1f}".format),
            one(row.seconds),
        ]
        for row in ways.rows
    ]
    judges = {"model": "the model's own t2l side", "encoder": "the encoder"}
    how = (
        f"The first candidate takes the most probable tokens, the others are drawn at temperature "
        f"{ways.candidate_temperature:g}; {judges[ways.judge]} turns texts back into latents. "
        if ways.judge
        else ""
    )
    about = (
        f"{ways.num_documents:,} documents, {ways.num_sampling_steps} steps, true length given. {how}"
        "Passes of the network and texts turned back are means per document; seconds are for all."
    )
    head = [*_WAY_HEAD, *_SCORE_HEAD, "passes", "turned back", "seconds"]
    return Table("Ways to decode", about, head, rows)


def _way_gains(ways: WaysToDecode) -> Table:
    def cell(gain: Estimate | None, show: Show) -> str:
        return "" if gain is None else f"{_value(gain, show)} ({_span(gain, show)})"

    def points(value: float) -> str:
        return signed(100 * value, 1)

    rows = [
        [
            *_way_cells(row.way),
            cell(row.token_accuracy_gain, points),
            cell(row.exact_match_gain, points),
            cell(row.bleu_gain, lambda value: signed(value, 1)),
            cell(row.reencoded_cosine_gain, signed),
        ]
        for row in ways.rows
        if row.way != ways.plain
    ]
    about = (
        f"Against one text of most probable tokens by {ways.plain.text_sampler}, guidance {ways.plain.guidance:g}, on "
        f"the same documents; in brackets the {INTERVAL} of the paired difference. Shares differ in percentage points."
    )
    head = [*_WAY_HEAD, "tokens right", "exact", "BLEU", "re-encoded cosine"]
    return Table("Ways to decode, against the plain one", about, head, rows)


def _retrieval(retrieval: Retrieval) -> Table:
    rows = [
        ["cosine to its own latent", *_cells(retrieval.cosine), ""],
        ["cosine to another's latent", *_cells(retrieval.stranger_cosine), ""],
        ["retrieval@1", *_cells(retrieval.retrieval_at_1, percent), percent(retrieval.chance_at_1, 2)],
        ["retrieval@10", *_cells(retrieval.retrieval_at_10, percent), percent(retrieval.chance_at_10, 2)],
    ]
    about = (
        f"{retrieval.num_queries:,} texts, each searched for among all {retrieval.num_candidates:,} held-out "
        "latents."
    )
    return Table("Text to latent", about, ["", "value", INTERVAL, "chance"], rows)


def _similarity(similarity: Similarity) -> Table:
    rows = [
        ["the model's latents", *_cells(similarity.own)],
        ["the encoder's latents", *_cells(similarity.encoder)],
        ["difference", *_cells(similarity.difference, signed)],
    ]
    about = f"Spearman's rank correlation of cosine and score on {similarity.num_pairs:,} pairs of texts."
    shown = [row for row in rows if any(row[1:])]
    return Table("Similarity of texts (STS)", about, ["", "correlation", INTERVAL], shown)


def _round_trip(trip: RoundTrip) -> Table:
    back = "text to the model's own latent to text"
    rows = [
        ["latent to text to latent by the model itself: cosine", *_cells(trip.latent.own)],
        ["latent to text to latent by the encoder: cosine", *_cells(trip.latent.encoder)],
        [
            "for comparison: true text to latent by the model itself: cosine",
            *_cells(trip.latent.own_of_true_text),
        ],
        [f"{back}: tokens right", *_cells(trip.text.token_accuracy, percent)],
        [f"{back}: tokens right after alignment", *_cells(trip.text.tokens_aligned, percent)],
        [f"{back}: exact", *_cells(trip.text.exact_match, percent)],
        [f"{back}: BLEU", *_cells(trip.text.bleu, one)],
        [f"{back}: re-encoded cosine", *_cells(trip.text.reencoded_cosine)],
    ]
    about = f"{trip.num_documents:,} documents, {trip.text.num_sampling_steps} steps, true length given."
    return Table("Round trips", about, ["", "value", INTERVAL], [row for row in rows if any(row[1:])])


def _generation(result: Generation) -> Table:
    sampling = ", ".join(f"{key}={value}" for key, value in result.sampling.items())
    about = (
        f"{result.num_documents:,} pairs from nothing, beside {result.num_real:,} held-out ones; {sampling}; "
        f"length {result.length}."
    )
    rows = [
        *_diversity_rows(result),
        *_agreement_rows(result.agreement),
        *_distance_rows(result.distance),
        *_memorised_rows(result.memorised),
    ]
    return Table("Joint generation", about, ["", "generated", INTERVAL, "held-out", INTERVAL], rows)


def _beside(name: str, both: Beside | None, show: Show = percent) -> list[list[str]]:
    """The row of a quantity; none where it was not measured."""
    return [] if both is None else [[name, *_cells(both.generated, show), *_cells(both.real, show)]]


def _diversity_rows(result: Generation) -> list[list[str]]:
    diversity, reference = result.diversity, result.reference_lm
    return [
        *_beside("distinct-1", diversity.distinct_1),
        *_beside("distinct-2", diversity.distinct_2),
        *_beside("distinct-3", diversity.distinct_3),
        *_beside("1-grams repeated in the same text", diversity.repeated_1),
        *_beside("2-grams repeated in the same text", diversity.repeated_2),
        *_beside("4-grams repeated in the same text", diversity.repeated_4),
        *_beside("self-BLEU", diversity.self_bleu, one),
        *(_beside(f"perplexity under {reference.name}", reference.perplexity, number) if reference else []),
    ]


def _agreement_rows(agreement: Agreement) -> list[list[str]]:
    sides = (
        ("the model itself", agreement.own, agreement.own_strangers),
        ("the encoder", agreement.encoder, agreement.encoder_strangers),
    )
    return [
        [
            f"cosine of latent and text by {who}",
            *_cells(cosine),
            "" if chance != chance else f"unrelated {chance:.3f}",
            "",
        ]
        for who, cosine, chance in sides
        if cosine is not None
    ]


def _distance_rows(distance: Distances | None) -> list[list[str]]:
    if distance is None:
        return []
    named = (
        (f"Fréchet distance of latents ({distance.num_directions} directions)", distance.latent_frechet),
        ("Fréchet distance of lengths", distance.length_frechet),
        ("Wasserstein distance of lengths, tokens", distance.length_wasserstein),
    )
    return [
        [name, f"{d.generated:.2f}", "", f"{d.real:.2f}", f"{d.real_low:.2f} to {d.real_high:.2f}"]
        for name, d in named
    ]


def _memorised_rows(memorised: Memorised | None) -> list[list[str]]:
    if memorised is None:
        return []
    return [
        *_beside("is a training document", memorised.whole),
        *_beside("is part of a training document", memorised.inside),
    ]


def _cells(value: Estimate | None, show: Show = three) -> list[str]:
    return [_value(value, show), _span(value, show)]


def _value(value: Estimate | None, show: Show = three) -> str:
    return "" if value is None or value.value != value.value else show(value.value)


def _span(value: Estimate | None, show: Show = three) -> str:
    if value is None or value.low != value.low or value.high != value.high:
        return ""
    return f"{show(value.low)} to {show(value.high)}"
