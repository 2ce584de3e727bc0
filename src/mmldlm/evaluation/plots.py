"""The pictures of an evaluation: what the latent buys, decoding, latents, and the training behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mmldlm.evaluation.figure import BLUE, GREEN, GREY, INK, ORANGE, Picture, make_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LATENT_COLORS = {"right": BLUE, "shuffled": ORANGE, "none": GREY}
LATENT_NAMES = {"right": "right latent", "shuffled": "shuffled latent", "none": "no latent"}
NAMES = (
    "latent_gain",
    "time_curve",
    "confidence",
    "accuracy_steps",
    "reencoded_cosine",
    "latent_similarity",
    "losses",
    "training_accuracy",
)
"""Every picture there can be."""


def draw_pictures(result: dict[str, Any], log: Sequence[dict[str, Any]]) -> list[Picture]:
    """Every picture that the result and the training log have something for."""
    made: list[Picture | None] = [_latent_gain(result), _time_curve(result), _confidence(result)]
    made += [_accuracy(result), _reencoded(result), _similarity(result), _losses(log), _accuracy_log(log)]
    return [picture for picture in made if picture is not None]


def _latent_gain(result: dict[str, Any]) -> Picture | None:
    bound = result.get("text_bound")
    if not bound:
        return None
    kinds = list(LATENT_NAMES)

    def draw(axes: Axes) -> None:
        values = [bound[kind]["nats_per_token"] for kind in kinds]
        low = [bound[kind]["nats_per_token"] - bound[kind]["interval"][0] for kind in kinds]
        high = [bound[kind]["interval"][1] - bound[kind]["nats_per_token"] for kind in kinds]
        axes.barh(
            [LATENT_NAMES[kind] for kind in kinds], values, height=0.55,
            color=[LATENT_COLORS[kind] for kind in kinds], xerr=[low, high], ecolor=INK, capsize=3,
        )  # fmt: skip
        for row, value in enumerate(values):
            axes.annotate(
                f"{value:.2f}",
                (0, row),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                color="white",
            )
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("text bound, nats per token (less is better)")

    return make_picture(
        "latent_gain",
        "What the latent buys",
        "Cost of held-out text with its own latent, with another document's and with pure noise instead. "
        "Lines: 95 % interval over documents.",
        draw,
    )


def _time_curve(result: dict[str, Any]) -> Picture | None:
    bound = result.get("text_bound")
    if not bound:
        return None

    def draw(axes: Axes) -> None:
        for kind, name in LATENT_NAMES.items():
            x, y = _points(bound[kind]["time_curve"], "nats")
            axes.plot(x, y, marker="o", markersize=3.5, color=LATENT_COLORS[kind], label=name)
        axes.set_xlabel("text_time (0 nothing masked, 1 everything masked)")
        axes.set_ylabel("nats per masked token")
        axes.set_xlim(0, 1)
        axes.set_ylim(bottom=0)
        axes.legend()

    caption = "How hard a masked token is, by how much of the text around it is masked too."
    return make_picture("time_curve", "Loss over time", caption, draw)


def _confidence(result: dict[str, Any]) -> Picture | None:
    bound = result.get("text_bound")
    if not bound:
        return None

    def draw(axes: Axes) -> None:
        axes.plot(
            [0, 1], [0, 1], color=GREY, linewidth=1, linestyle=(0, (4, 3)), label="as sure as it should be"
        )
        rows = [row for row in bound["right"]["confidence_curve"] if row["num_tokens"]]
        most = max(row["num_tokens"] for row in rows)
        sizes = [12 + 120 * row["num_tokens"] / most for row in rows]
        x, y = [row["confidence"] for row in rows], [row["accuracy"] for row in rows]
        axes.plot(x, y, color=BLUE, linewidth=1.2)
        axes.scatter(x, y, s=sizes, color=BLUE, label="right latent (area: number of tokens)", zorder=3)
        axes.set_xlabel("probability of the most probable token")
        axes.set_ylabel("share that is right")
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        axes.legend(loc="upper left")

    error = bound["right"]["calibration_error"]
    caption = f"Whether the model knows how sure it may be; mean distance from the diagonal {error:.3f}."
    return make_picture("confidence", "Calibration of confidence", caption, draw)


def _accuracy(result: dict[str, Any]) -> Picture | None:
    inversion = result.get("inversion")
    if not inversion:
        return None

    def draw(axes: Axes) -> None:
        _step_curve(axes, inversion["length_given"], "token_accuracy", BLUE, "true length given", scale=100)
        _step_curve(
            axes, inversion["length_modelled"], "token_accuracy", ORANGE, "length modelled", scale=100
        )
        _step_axis(axes, inversion["length_given"])
        axes.set_ylabel("tokens right at their position, %")
        axes.set_ylim(bottom=0)
        axes.legend(loc="best")

    caption = "Held-out latents decoded from fully masked text. Bars: 95 % interval over documents."
    return make_picture("accuracy_steps", "Accuracy against number of sampling steps", caption, draw)


def _reencoded(result: dict[str, Any]) -> Picture | None:
    inversion = result.get("inversion")
    if not inversion or not inversion["cosine_reference"]:
        return None
    reference = inversion["cosine_reference"]

    def draw(axes: Axes) -> None:
        _step_curve(axes, inversion["length_given"], "reencoded_cosine", BLUE, "true length given")
        _step_curve(axes, inversion["length_modelled"], "reencoded_cosine", ORANGE, "length modelled")
        axes.axhline(reference["true_text"], color=GREEN, linewidth=1.2, label="the true text itself")
        axes.axhline(
            reference["strangers"], color=GREY, linewidth=1.2, linestyle=(0, (4, 3)), label="unrelated texts"
        )
        _step_axis(axes, inversion["length_given"])
        axes.set_ylabel("cosine to the given latent")
        axes.legend(loc="best", fontsize=8)

    caption = (
        "The decoded text goes through the encoder again: how near is its latent to the one it came from?"
    )
    return make_picture("reencoded_cosine", "Meaning kept by decoding", caption, draw)


def _similarity(result: dict[str, Any]) -> Picture | None:
    retrieval = result.get("retrieval")
    if not retrieval:
        return None
    histogram = retrieval["histogram"]

    def draw(axes: Axes) -> None:
        total = retrieval["num_queries"]
        for key, color, name in (("strangers", GREY, "another document's"), ("own", BLUE, "its own")):
            heights = [100 * count / total for count in histogram[key]]
            axes.stairs(heights, histogram["edges"], fill=True, alpha=0.55, color=color, label=name)
            axes.stairs(heights, histogram["edges"], color=color, linewidth=1.2)
        axes.set_xlabel("cosine of the model's latent to the encoder's latent")
        axes.set_ylabel("documents, %")
        axes.legend(loc="upper left")

    at_1, chance = retrieval["retrieval_at_1"]["value"], retrieval["chance_at_1"]
    caption = (
        f"Text to latent, against the encoder. Its own latent comes first for {100 * at_1:.1f} % of the "
        f"documents among {retrieval['num_candidates']:,} (chance {100 * chance:.2f} %)."
    )
    return make_picture("latent_similarity", "Latent similarity", caption, draw)


def _losses(log: Sequence[dict[str, Any]]) -> Picture | None:
    series = (("text_loss", BLUE, "text"), ("latent_loss", ORANGE, "latent"))
    if not any(key in line for line in log for key, _, _ in series):
        return None

    def draw(axes: Axes) -> None:
        for key, color, name in series:
            _log_curve(axes, log, key, color, f"{name}, training", faint=True)
            _log_curve(axes, log, f"valid_{key}", color, f"{name}, held-out")
        axes.set_xlabel("step")
        axes.set_ylabel("nats per token; mean squared error")
        axes.set_ylim(bottom=0)
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
        axes.set_xlabel("step")
        axes.set_ylabel("masked tokens right, %")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)

    caption = (
        "Share of masked tokens whose most probable token is right, over all times and modes of training."
    )
    return make_picture("training_accuracy", "Accuracy over training", caption, draw)


def _points(curve: Sequence[dict[str, Any]], key: str) -> tuple[list[float], list[float]]:
    rows = [row for row in curve if row["num_tokens"]]
    return [0.5 * (row["low"] + row["high"]) for row in rows], [row[key] for row in rows]


def _step_curve(
    axes: Axes, points: Sequence[dict[str, Any]], key: str, color: str, label: str, scale: float = 1.0
) -> None:
    if not points or points[0][key] is None:
        return
    x = [point["num_sampling_steps"] for point in points]
    y = [scale * point[key]["value"] for point in points]
    low = [value - scale * point[key]["low"] for value, point in zip(y, points, strict=True)]
    high = [scale * point[key]["high"] - value for value, point in zip(y, points, strict=True)]
    axes.errorbar(x, y, yerr=[low, high], color=color, marker="o", markersize=4, capsize=2.5, label=label)


def _step_axis(axes: Axes, points: Sequence[dict[str, Any]]) -> None:
    counts = [point["num_sampling_steps"] for point in points]
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.set_xlabel("number of sampling steps")


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
