"""The pictures of an evaluation: what the latent saves, decoding, latents, and the training behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mmldlm.evaluation.bounds import LATENT_NAMES, TEXT_NAMES, Calibration, LatentBounds, TextBounds
from mmldlm.evaluation.results import (
    CosineReference,
    Evaluation,
    Generation,
    Inversion,
    LengthGroup,
    Retrieval,
    TextScores,
    Way,
    WaysToDecode,
)
from mmldlm.reports import BLUE, GREEN, GREY, INK, ORANGE, Picture, make_picture
from mmldlm.statistics import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_KIND_COLORS = (BLUE, ORANGE, GREY)
"""Right, shuffled, none."""
_COLORS = (BLUE, ORANGE, GREEN, GREY)
_DASHES = (0, (4, 3))
_ACCURACY = "tokens right at their position, %"
Log = Sequence[dict[str, Any]]


PLOTS: dict[str, Callable[[Evaluation, Log], Picture | None]] = {}
"""By the name of the file: draws a picture of a result and the training log; None where there is nothing to draw."""


def draw_pictures(result: Evaluation, log: Log) -> list[Picture]:
    """Every picture that the result and the training log have something for."""
    drawn = (plot(result, log) for plot in PLOTS.values())
    return [picture for picture in drawn if picture is not None]


def _plot(name: str, title: str, part: Callable[[Evaluation, Log], Any]) -> Callable[[Any], Any]:
    """Enter a function that draws a part, and returns the caption, in the list; a part that is None is not drawn."""

    def enter(draw: Callable[[Axes, Any], str]) -> Callable[[Axes, Any], str]:
        def picture(result: Evaluation, log: Log) -> Picture | None:
            if (shown := part(result, log)) is None:
                return None
            captions: list[str] = []
            drawn = make_picture(name, title, "", lambda axes: captions.append(draw(axes, shown)))
            return replace(drawn, caption=captions[0])

        PLOTS[name] = picture
        return draw

    return enter


def _error_bars(estimates: Sequence[Estimate], scale: float = 1.0) -> list[list[float]]:
    """Lengths of the bars below and above; 0 where the interval is not known."""
    low = [max(0.0, scale * (one.value - one.low)) if one.low == one.low else 0.0 for one in estimates]
    high = [max(0.0, scale * (one.high - one.value)) if one.high == one.high else 0.0 for one in estimates]
    return [low, high]


@_plot("latent_gain", "What the latent saves", lambda result, log: result.bounds.text)
def _latent_gain(axes: Axes, bounds: TextBounds) -> str:
    estimates = [kind.nats_per_token for kind in bounds.kinds]
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
    return (
        "Cost of held-out text with its own latent, with another document's and with pure noise instead. "
        "Lines: 95 % interval over documents."
    )


@_plot("time_curve", "Loss over time", lambda result, log: result.bounds.text)
def _time_curve(axes: Axes, bounds: TextBounds) -> str:
    kinds = bounds.kinds
    for kind, name, color in zip(kinds, LATENT_NAMES.values(), _KIND_COLORS, strict=True):
        rows = [row for row in kind.time_curve if row.num_tokens]
        x, y = [0.5 * (row.low + row.high) for row in rows], [row.nats for row in rows]
        axes.plot(x, y, marker="o", markersize=3.5, color=color, label=name)  # type: ignore[arg-type]
    axes.set(xlabel="text_time (0 nothing masked, 1 everything masked)", ylabel="nats per masked token")
    axes.set(xlim=(0, 1), ylim=(0, None))
    axes.legend()
    return "How hard a masked token is, by how much of the text around it is masked too."


@_plot("confidence", "Calibration of confidence", lambda result, log: result.calibration)
def _confidence(axes: Axes, calibration: Calibration) -> str:
    right = calibration.right
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
    return (
        "Whether the model, given the right latent, is right as often as it is confident; mean distance from the "
        f"diagonal {right.equal_width.error.value:.3f} (equal width), {right.equal_mass.error.value:.3f} (equal mass)."
    )


@_plot("latent_bound", "What the text says about the latent", lambda result, log: result.bounds.latent)
def _latent_bound(axes: Axes, bounds: LatentBounds) -> str:
    kinds = bounds.kinds
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
    return (
        "How well the clean latent is predicted from a noisy one; half the area under a curve, over log(1 + ratio), is "
        f"what the latent bound adds to its reconstruction. Nats per dimension: {values}."
    )


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


@_plot("accuracy_steps", "Accuracy against number of sampling steps", lambda result, log: result.inversion)
def _accuracy(axes: Axes, inversion: Inversion) -> str:
    _step_curve(axes, inversion.length_given, "token_accuracy", BLUE, "true length given", 100)
    _step_curve(axes, inversion.length_modelled, "token_accuracy", ORANGE, "length modelled", 100)
    _step_axis(axes, inversion.length_given)
    axes.set(ylabel=_ACCURACY, ylim=(0, None))
    axes.legend(loc="best")
    return "Held-out latents decoded from fully masked text. Bars: 95 % interval over documents."


def _length_groups(result: Evaluation, log: Log) -> list[LengthGroup] | None:
    groups = [group for group in result.inversion.by_length if group.length_given] if result.inversion else []
    return groups if len(groups) > 1 else None


@_plot("accuracy_length", "Accuracy by length of the text", _length_groups)
def _by_length(axes: Axes, groups: list[LengthGroup]) -> str:
    for idx, group in enumerate(groups):
        name = f"{group.shortest} to {group.longest} tokens ({group.num_documents})"
        _step_curve(axes, group.length_given, "token_accuracy", _COLORS[idx % len(_COLORS)], name, 100)
    _step_axis(axes, groups[0].length_given)
    axes.set(ylabel=_ACCURACY, ylim=(0, None))
    axes.legend(loc="best", fontsize=8)
    return "The same documents by the number of their tokens, true length given. In brackets: documents."


def _with_reference(result: Evaluation, log: Log) -> tuple[Inversion, CosineReference] | None:
    inversion = result.inversion
    return (inversion, inversion.cosine_reference) if inversion and inversion.cosine_reference else None


@_plot("reencoded_cosine", "Meaning kept by decoding", _with_reference)
def _reencoded(axes: Axes, part: tuple[Inversion, CosineReference]) -> str:
    inversion, reference = part
    _step_curve(axes, inversion.length_given, "reencoded_cosine", BLUE, "true length given")
    _step_curve(axes, inversion.length_modelled, "reencoded_cosine", ORANGE, "length modelled")
    axes.axhline(reference.true_text, color=GREEN, linewidth=1.2, label="the true text itself")
    axes.axhline(reference.strangers, color=GREY, linewidth=1.2, linestyle=_DASHES, label="unrelated texts")
    _step_axis(axes, inversion.length_given)
    axes.set_ylabel("cosine to the given latent")
    axes.legend(loc="best", fontsize=8)
    return "The decoded text is encoded again: how similar is its latent to the one it was decoded from?"


@_plot("self_check", "What more work in decoding gains", lambda result, log: result.decoding)
def _ways(axes: Axes, ways: WaysToDecode) -> str:
    by_kind: dict[Way, list[Any]] = {Way(row.way.text_sampler, row.way.guidance): [] for row in ways.rows}
    for row in sorted(ways.rows, key=lambda row: row.passes.value):
        by_kind[Way(row.way.text_sampler, row.way.guidance)].append(row)
    for idx, (kind, rows) in enumerate(by_kind.items()):
        estimates = [row.scores.token_accuracy for row in rows]
        axes.errorbar(
            [row.passes.value for row in rows], [100 * one.value for one in estimates],
            yerr=_error_bars(estimates, 100), color=_COLORS[idx % len(_COLORS)], marker="o", markersize=4,
            capsize=2, linestyle=("-", "--", ":")[idx // len(_COLORS) % 3], label=kind.title(),
        )  # fmt: skip
    axes.set(xscale="log", xlabel="passes of the network per document", ylabel=_ACCURACY)
    axes.legend(loc="best", fontsize=8)
    return "Each point is a number of candidates, with or without rounds. Bars: 95 % interval over documents."


@_plot("latent_similarity", "Latent similarity", lambda result, log: result.retrieval)
def _similarity(axes: Axes, retrieval: Retrieval) -> str:
    histogram = retrieval.histogram
    for counts, color, name in (
        (histogram.strangers, GREY, "another document's"),
        (histogram.own, BLUE, "its own"),
    ):
        heights = [100 * count / retrieval.num_queries for count in counts]
        axes.stairs(heights, histogram.edges, fill=True, alpha=0.55, color=color, label=name)
        axes.stairs(heights, histogram.edges, color=color, linewidth=1.2)
    axes.set(xlabel="cosine of the model's latent to the encoder's latent", ylabel="documents, %")
    axes.legend(loc="upper left")
    return (
        f"Text to latent, against the encoder. Its own latent comes first for "
        f"{100 * retrieval.retrieval_at_1.value:.1f} % of the documents among "
        f"{retrieval.num_candidates:,} (chance {100 * retrieval.chance_at_1:.2f} %)."
    )


@_plot("generation", "Variety of generated texts", lambda result, log: result.generation)
def _generation(axes: Axes, generation: Generation) -> str:
    shares = {f"distinct-{order}": getattr(generation.diversity, f"distinct_{order}") for order in (1, 2, 3)}
    shares |= {
        f"repeated\n{order}-grams": getattr(generation.diversity, f"repeated_{order}") for order in (1, 2, 4)
    }
    for shift, side, color, name in (
        (-0.2, "generated", BLUE, "generated"),
        (0.2, "real", GREY, "held-out"),
    ):
        estimates: list[Estimate] = [getattr(beside, side) for beside in shares.values()]
        shown = [(idx + shift, one) for idx, one in enumerate(estimates) if one.value == one.value]
        x, y = [place for place, _ in shown], [100 * one.value for _, one in shown]
        bars = _error_bars([one for _, one in shown], 100)
        axes.bar(x, y, 0.38, yerr=bars, color=color, ecolor=INK, capsize=2, label=name)
    axes.set_xticks(range(len(shares)), list(shares), fontsize=8)
    axes.grid(axis="x", visible=False)
    axes.set(ylabel="%", ylim=(0, None))
    axes.legend(fontsize=8)
    return (
        "Different n-grams among all, and n-grams that repeat one of the same text; generated texts and as many "
        "held-out ones."
    )


def _logged(*keys: str) -> Callable[[Evaluation, Log], Log | None]:
    """The training log, where some line has one of these fields."""
    return lambda result, log: log if any(key in line for line in log for key in keys) else None


@_plot("losses", "Losses over training", _logged("text_loss", "latent_loss"))
def _losses(axes: Axes, log: Log) -> str:
    for key, color, name in (("text_loss", BLUE, "text"), ("latent_loss", ORANGE, "latent")):
        _log_curve(axes, log, key, color, f"{name}, training", faint=True)
        _log_curve(axes, log, f"valid_{key}", color, f"{name}, held-out")
    axes.set(xlabel="step", ylabel="nats per token; mean squared error", ylim=(0, None))
    axes.legend(fontsize=8)
    return (
        "Text in nats per token, latent as mean squared error. Thin: each logged interval of training; "
        "with dots: held-out."
    )


@_plot("training_accuracy", "Accuracy over training", _logged("text_accuracy"))
def _accuracy_log(axes: Axes, log: Log) -> str:
    _log_curve(axes, log, "text_accuracy", BLUE, "training", faint=True, scale=100)
    _log_curve(axes, log, "valid_text_accuracy", BLUE, "held-out", scale=100)
    axes.set(xlabel="step", ylabel="masked tokens right, %", ylim=(0, None))
    axes.legend(fontsize=8)
    return "Share of masked tokens whose most probable token is right, over all times and modes of training."


def _log_curve(
    axes: Axes, log: Log, key: str, color: str, label: str, *, faint: bool = False, scale: float = 1.0
) -> None:
    lines = [line for line in log if isinstance(line.get(key), int | float)]
    if not lines:
        return
    x, y = [line["step"] for line in lines], [scale * line[key] for line in lines]
    if faint:
        axes.plot(x, y, color=color, alpha=0.45, linewidth=1, label=label)
    else:
        axes.plot(x, y, color=color, marker="o", markersize=3.5, label=label)
