"""The pictures of an evaluation: what the latent saves, decoding, latents, and the training behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mmldlm.evaluation.bounds import LATENT_NAMES, TEXT_NAMES, Calibration, LatentBounds, TextBounds
from mmldlm.evaluation.results import (
    Evaluation,
    Generation,
    Inversion,
    LengthGroup,
    Retrieval,
    TextScores,
    Way,
    WaysToDecode,
)
from mmldlm.evaluation.tables import measured
from mmldlm.reports import BLUE, GREEN, GREY, INK, ORANGE, Picture, make_picture
from mmldlm.statistics import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_KIND_COLORS = (BLUE, ORANGE, GREY)
"""Right, shuffled, none."""
_COLORS = (BLUE, ORANGE, GREEN, GREY)
_DASHES = (0, (4, 3))
_ACCURACY = "tokens right at their position, %"
NAMES = (
    "latent_gain", "time_curve", "confidence", "latent_bound", "accuracy_steps", "accuracy_length",
    "reencoded_cosine", "self_check", "latent_similarity", "generation", "losses", "training_accuracy",
)  # fmt: skip
"""Every picture there can be."""


def draw_pictures(result: Evaluation, log: Sequence[dict[str, Any]]) -> list[Picture]:
    """Every picture that the result and the training log have something for."""
    text, latent, inversion = result.bounds.text, result.bounds.latent, result.inversion
    pictures = [
        measured(text, _latent_gain),
        measured(text, _time_curve),
        measured(result.calibration, _confidence),
        measured(latent, _latent_bound),
        measured(inversion, _accuracy),
        measured(inversion, _by_length),
        measured(inversion, _reencoded),
        measured(result.decoding, _ways),
        measured(result.retrieval, _similarity),
        measured(result.generation, _generation),
        _losses(log),
        _accuracy_log(log),
    ]
    return [picture for picture in pictures if picture is not None]


def _error_bars(estimates: Sequence[Estimate], scale: float = 1.0) -> list[list[float]]:
    """Lengths of the bars below and above; 0 where the interval is not known."""
    low = [max(0.0, scale * (one.value - one.low)) if one.low == one.low else 0.0 for one in estimates]
    high = [max(0.0, scale * (one.high - one.value)) if one.high == one.high else 0.0 for one in estimates]
    return [low, high]


def _latent_gain(bounds: TextBounds) -> Picture:
    estimates = [kind.nats_per_token for kind in (bounds.right, bounds.shuffled, bounds.none)]

    def draw(axes: Axes) -> None:
        axes.barh(
            list(LATENT_NAMES.values()), [one.value for one in estimates], height=0.55, color=_KIND_COLORS,
            xerr=_error_bars(estimates), ecolor=INK, capsize=3,
        )  # fmt: skip
        for row, one in enumerate(estimates):
            axes.annotate(
                f"{one.value:.2f}", (0, row), xytext=(6, 0), textcoords="offset points", va="center", color="white"
            )  # fmt: skip
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("text bound, nats per token (less is better)")

    return make_picture(
        "latent_gain",
        "What the latent saves",
        "Cost of held-out text with its own latent, with another document's and with pure noise instead. "
        "Lines: 95 % interval over documents.",
        draw,
    )


def _time_curve(bounds: TextBounds) -> Picture:
    kinds = (bounds.right, bounds.shuffled, bounds.none)

    def draw(axes: Axes) -> None:
        for kind, name, color in zip(kinds, LATENT_NAMES.values(), _KIND_COLORS, strict=True):
            rows = [row for row in kind.time_curve if row.num_tokens]
            x, y = [0.5 * (row.low + row.high) for row in rows], [row.nats for row in rows]
            axes.plot(x, y, marker="o", markersize=3.5, color=color, label=name)  # type: ignore[arg-type]
        axes.set(xlabel="text_time (0 nothing masked, 1 everything masked)", ylabel="nats per masked token")
        axes.set(xlim=(0, 1), ylim=(0, None))
        axes.legend()

    caption = "How hard a masked token is, by how much of the text around it is masked too."
    return make_picture("time_curve", "Loss over time", caption, draw)


def _confidence(calibration: Calibration) -> Picture:
    right = calibration.right

    def draw(axes: Axes) -> None:
        axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=_DASHES, label="perfect calibration")
        for kind, color, name, largest in (
            (right.equal_width, BLUE, "buckets of equal width (area: tokens)", 120),
            (right.equal_mass, ORANGE, "buckets of equal mass", 12),
        ):
            rows = [row for row in kind.buckets if row.num_tokens]
            most = max((row.num_tokens for row in rows), default=1)
            sizes = [12 + largest * row.num_tokens / most for row in rows]
            x, y = [row.confidence for row in rows], [row.accuracy for row in rows]
            axes.plot(x, y, color=color, linewidth=1.2)  # type: ignore[arg-type]
            axes.scatter(x, y, s=sizes, color=color, label=name, zorder=3, alpha=0.85)  # type: ignore[arg-type]
        axes.set(xlabel="probability of the most probable token", ylabel="share that is right")
        axes.set(xlim=(0, 1), ylim=(0, 1))
        axes.legend(loc="upper left")

    caption = (
        "Whether the model, given the right latent, is right as often as it is confident; mean distance from the "
        f"diagonal {right.equal_width.error.value:.3f} (equal width), {right.equal_mass.error.value:.3f} (equal mass)."
    )
    return make_picture("confidence", "Calibration of confidence", caption, draw)


def _latent_bound(bounds: LatentBounds) -> Picture:
    kinds = (bounds.right, bounds.shuffled, bounds.none)

    def draw(axes: Axes) -> None:
        for kind, name, color in zip(kinds, TEXT_NAMES.values(), _KIND_COLORS, strict=True):
            points = [
                (((1 + row.low) * (1 + row.high)) ** 0.5, row.squared_error)
                for row in kind.snr_curve
                if row.squared_error is not None
            ]
            x, y = [middle - 1 for middle, _ in points], [error * middle for middle, error in points]
            axes.plot(x, y, marker="o", markersize=3.5, color=color, label=name)
        axes.axhline(1.0, color=GREY, linewidth=1, linestyle=_DASHES, label="standard normal")
        axes.set(xscale="log", ylabel="squared error x (1 + ratio)", ylim=(0, None))
        axes.set_xlabel("signal-to-noise ratio of the latent (left: nothing is left of it)")
        axes.legend(fontsize=8)

    named = zip(TEXT_NAMES.values(), kinds, strict=True)
    values = ", ".join(f"{name} {kind.nats_per_dimension.value:.3f}" for name, kind in named)
    caption = (
        "How well the clean latent is predicted from a noisy one; half the area under a curve, over log(1 + ratio), is "
        f"what the latent bound adds to its reconstruction. Nats per dimension: {values}."
    )
    return make_picture("latent_bound", "What the text says about the latent", caption, draw)


def _step_curve(
    axes: Axes, points: Sequence[TextScores], score: str, color: str, label: str, scale: float = 1.0
) -> None:
    estimates: list[Estimate] = [getattr(point, score) for point in points]
    if not estimates or estimates[0] is None:
        return
    x = [point.num_sampling_steps for point in points]
    y = [scale * one.value for one in estimates]
    bars = _error_bars(estimates, scale)
    axes.errorbar(x, y, yerr=bars, color=color, marker="o", markersize=4, capsize=2.5, label=label)


def _step_axis(axes: Axes, points: Sequence[TextScores]) -> None:
    counts = [point.num_sampling_steps for point in points]
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.set_xlabel("number of sampling steps")


def _accuracy(inversion: Inversion) -> Picture:
    def draw(axes: Axes) -> None:
        _step_curve(axes, inversion.length_given, "token_accuracy", BLUE, "true length given", 100)
        _step_curve(axes, inversion.length_modelled, "token_accuracy", ORANGE, "length modelled", 100)
        _step_axis(axes, inversion.length_given)
        axes.set(ylabel=_ACCURACY, ylim=(0, None))
        axes.legend(loc="best")

    caption = "Held-out latents decoded from fully masked text. Bars: 95 % interval over documents."
    return make_picture("accuracy_steps", "Accuracy against number of sampling steps", caption, draw)


def _by_length(inversion: Inversion) -> Picture | None:
    groups: list[LengthGroup] = [group for group in inversion.by_length if group.length_given]
    if len(groups) < 2:
        return None

    def draw(axes: Axes) -> None:
        for idx, group in enumerate(groups):
            name = f"{group.shortest} to {group.longest} tokens ({group.num_documents})"
            _step_curve(axes, group.length_given, "token_accuracy", _COLORS[idx % len(_COLORS)], name, 100)
        _step_axis(axes, groups[0].length_given)
        axes.set(ylabel=_ACCURACY, ylim=(0, None))
        axes.legend(loc="best", fontsize=8)

    caption = "The same documents by the number of their tokens, true length given. In brackets: documents."
    return make_picture("accuracy_length", "Accuracy by length of the text", caption, draw)


def _reencoded(inversion: Inversion) -> Picture | None:
    reference = inversion.cosine_reference
    if reference is None:
        return None

    def draw(axes: Axes) -> None:
        _step_curve(axes, inversion.length_given, "reencoded_cosine", BLUE, "true length given")
        _step_curve(axes, inversion.length_modelled, "reencoded_cosine", ORANGE, "length modelled")
        axes.axhline(reference.true_text, color=GREEN, linewidth=1.2, label="the true text itself")
        axes.axhline(
            reference.strangers, color=GREY, linewidth=1.2, linestyle=_DASHES, label="unrelated texts"
        )
        _step_axis(axes, inversion.length_given)
        axes.set_ylabel("cosine to the given latent")
        axes.legend(loc="best", fontsize=8)

    caption = "The decoded text is encoded again: how similar is its latent to the one it was decoded from?"
    return make_picture("reencoded_cosine", "Meaning kept by decoding", caption, draw)


def _ways(ways: WaysToDecode) -> Picture:
    rows = sorted(ways.rows, key=lambda row: row.passes.value)
    kinds = list(dict.fromkeys(Way(row.way.text_sampler, row.way.guidance) for row in ways.rows))

    def draw(axes: Axes) -> None:
        for idx, kind in enumerate(kinds):
            mine = [
                row
                for row in rows
                if (row.way.text_sampler, row.way.guidance) == (kind.text_sampler, kind.guidance)
            ]
            estimates = [row.scores.token_accuracy for row in mine]
            axes.errorbar(
                [row.passes.value for row in mine], [100 * one.value for one in estimates],
                yerr=_error_bars(estimates, 100), color=_COLORS[idx % len(_COLORS)], marker="o", markersize=4,
                capsize=2, linestyle=("-", "--", ":")[idx // len(_COLORS) % 3], label=kind.title(),
            )  # fmt: skip
        axes.set(xscale="log", xlabel="passes of the network per document", ylabel=_ACCURACY)
        axes.legend(loc="best", fontsize=8)

    caption = (
        "Each point is a number of candidates, with or without rounds. Bars: 95 % interval over documents."
    )
    return make_picture("self_check", "What more work in decoding gains", caption, draw)


def _similarity(retrieval: Retrieval) -> Picture:
    histogram = retrieval.histogram

    def draw(axes: Axes) -> None:
        for counts, color, name in (
            (histogram.strangers, GREY, "another document's"),
            (histogram.own, BLUE, "its own"),
        ):
            heights = [100 * count / retrieval.num_queries for count in counts]
            axes.stairs(heights, histogram.edges, fill=True, alpha=0.55, color=color, label=name)
            axes.stairs(heights, histogram.edges, color=color, linewidth=1.2)
        axes.set(xlabel="cosine of the model's latent to the encoder's latent", ylabel="documents, %")
        axes.legend(loc="upper left")

    caption = (
        f"Text to latent, against the encoder. Its own latent comes first for "
        f"{100 * retrieval.retrieval_at_1.value:.1f} % of the documents among "
        f"{retrieval.num_candidates:,} (chance {100 * retrieval.chance_at_1:.2f} %)."
    )
    return make_picture("latent_similarity", "Latent similarity", caption, draw)


def _generation(generation: Generation) -> Picture:
    diversity = generation.diversity
    named = {
        "distinct-1": diversity.distinct_1,
        "distinct-2": diversity.distinct_2,
        "distinct-3": diversity.distinct_3,
        "repeated\n1-grams": diversity.repeated_1,
        "repeated\n2-grams": diversity.repeated_2,
        "repeated\n4-grams": diversity.repeated_4,
    }

    def draw(axes: Axes) -> None:
        for shift, side, color, name in (
            (-0.2, "generated", BLUE, "generated"),
            (0.2, "real", GREY, "held-out"),
        ):
            estimates: list[Estimate] = [getattr(beside, side) for beside in named.values()]
            shown = [(idx + shift, one) for idx, one in enumerate(estimates) if one.value == one.value]
            x, y = [place for place, _ in shown], [100 * one.value for _, one in shown]
            bars = _error_bars([one for _, one in shown], 100)
            axes.bar(x, y, 0.38, yerr=bars, color=color, ecolor=INK, capsize=2, label=name)
        axes.set_xticks(range(len(named)), list(named), fontsize=8)
        axes.grid(axis="x", visible=False)
        axes.set(ylabel="%", ylim=(0, None))
        axes.legend(fontsize=8)

    caption = (
        "Different n-grams among all, and n-grams that repeat one of the same text; generated texts and as many "
        "held-out ones."
    )
    return make_picture("generation", "Variety of generated texts", caption, draw)


def _losses(log: Sequence[dict[str, Any]]) -> Picture | None:
    series = (("text_loss", BLUE, "text"), ("latent_loss", ORANGE, "latent"))
    if not any(key in line for line in log for key, _, _ in series):
        return None

    def draw(axes: Axes) -> None:
        for key, color, name in series:
            _log_curve(axes, log, key, color, f"{name}, training", faint=True)
            _log_curve(axes, log, f"valid_{key}", color, f"{name}, held-out")
        axes.set(xlabel="step", ylabel="nats per token; mean squared error", ylim=(0, None))
        axes.legend(fontsize=8)

    caption = (
        "Text in nats per token, latent as mean squared error. Thin: each logged interval of training; "
        "with dots: held-out."
    )
    return make_picture("losses", "Losses over training", caption, draw)


def _accuracy_log(log: Sequence[dict[str, Any]]) -> Picture | None:
    if not any("text_accuracy" in line for line in log):
        return None

    def draw(axes: Axes) -> None:
        _log_curve(axes, log, "text_accuracy", BLUE, "training", faint=True, scale=100)
        _log_curve(axes, log, "valid_text_accuracy", BLUE, "held-out", scale=100)
        axes.set(xlabel="step", ylabel="masked tokens right, %", ylim=(0, None))
        axes.legend(fontsize=8)

    caption = (
        "Share of masked tokens whose most probable token is right, over all times and modes of training."
    )
    return make_picture("training_accuracy", "Accuracy over training", caption, draw)


def _log_curve(
    axes: Axes,
    log: Sequence[dict[str, Any]],
    key: str,
    color: str,
    label: str,
    *,
    faint: bool = False,
    scale: float = 1.0,
) -> None:
    lines = [line for line in log if isinstance(line.get(key), int | float)]
    if not lines:
        return
    x, y = [line["step"] for line in lines], [scale * line[key] for line in lines]
    if faint:
        axes.plot(x, y, color=color, alpha=0.45, linewidth=1, label=label)
    else:
        axes.plot(x, y, color=color, marker="o", markersize=3.5, label=label)
