"""The pictures of an evaluation: what the latent buys, decoding, latents, and the training behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mmldlm.evaluation.figure import BLUE, GREEN, GREY, INK, ORANGE, Picture, make_picture
from mmldlm.evaluation.tables import LATENT_NAMES, TEXT_NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LATENT_COLORS = {"right": BLUE, "shuffled": ORANGE, "none": GREY}
_KIND_COLORS = (BLUE, ORANGE, GREEN, GREY)
NAMES = (
    "latent_gain",
    "time_curve",
    "confidence",
    "latent_bound",
    "accuracy_steps",
    "accuracy_length",
    "reencoded_cosine",
    "self_check",
    "latent_similarity",
    "generation",
    "losses",
    "training_accuracy",
)
"""Every picture there can be."""


def draw_pictures(result: dict[str, Any], log: Sequence[dict[str, Any]]) -> list[Picture]:
    """Every picture that the result and the training log have something for."""
    makers = (_latent_gain, _time_curve, _confidence, _latent_bound, _accuracy, _by_length, _reencoded)
    made = [make(result) for make in (*makers, _self_check, _similarity, _generation)]
    made += [_losses(log), _accuracy_log(log)]
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
        for kind, color, name in (
            ("equal_width", BLUE, "buckets of equal width (area: tokens)"),
            ("equal_mass", ORANGE, "buckets of equal mass"),
        ):
            rows = [row for row in bound["right"]["reliability"][kind] if row["num_tokens"]]
            most = max(row["num_tokens"] for row in rows) if rows else 1
            sizes = [12 + (120 if kind == "equal_width" else 12) * row["num_tokens"] / most for row in rows]
            x, y = [row["confidence"] for row in rows], [row["accuracy"] for row in rows]
            axes.plot(x, y, color=color, linewidth=1.2)
            axes.scatter(x, y, s=sizes, color=color, label=name, zorder=3, alpha=0.85)
        axes.set_xlabel("probability of the most probable token")
        axes.set_ylabel("share that is right")
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        axes.legend(loc="upper left")

    error = bound["right"]["calibration_error"]
    caption = (
        "Whether the model, given the right latent, knows how sure it may be; mean distance from the diagonal "
        f"{error['equal_width']['value']:.3f} (equal width), {error['equal_mass']['value']:.3f} (equal mass)."
    )
    return make_picture("confidence", "Calibration of confidence", caption, draw)


def _latent_bound(result: dict[str, Any]) -> Picture | None:
    bound = result.get("latent_bound")
    if not bound:
        return None

    def draw(axes: Axes) -> None:
        for kind, name in TEXT_NAMES.items():
            rows = [row for row in bound[kind]["snr_curve"] if row["squared_error"] is not None]
            x = [((1 + row["low"]) * (1 + row["high"])) ** 0.5 - 1 for row in rows]
            y = [row["squared_error"] * (1 + place) for row, place in zip(rows, x, strict=True)]
            axes.plot(x, y, marker="o", markersize=3.5, color=LATENT_COLORS[kind], label=name)
        axes.axhline(1.0, color=GREY, linewidth=1, linestyle=(0, (4, 3)), label="standard normal")
        axes.set_xscale("log")
        axes.set_xlabel("signal-to-noise ratio of the latent (left: nothing is left of it)")
        axes.set_ylabel("squared error x (1 + ratio)")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)

    values = ", ".join(f"{name} {bound[kind]['nats_per_dimension']:.3f}" for kind, name in TEXT_NAMES.items())
    caption = (
        "How well the clean latent is told from a noisy one; half the area under a curve, over log(1 + ratio), is what "
        f"the latent bound adds to its reconstruction. Nats per dimension: {values}."
    )
    return make_picture("latent_bound", "What the text tells of the latent", caption, draw)


def _by_length(result: dict[str, Any]) -> Picture | None:
    inversion = result.get("inversion")
    groups = [group for group in inversion["by_length"] if group["length_given"]] if inversion else []
    if len(groups) < 2:
        return None

    def draw(axes: Axes) -> None:
        for idx, group in enumerate(groups):
            name = f"{group['shortest']} to {group['longest']} tokens ({group['num_documents']})"
            color = _KIND_COLORS[idx % len(_KIND_COLORS)]
            _step_curve(axes, group["length_given"], "token_accuracy", color, name, scale=100)
        _step_axis(axes, groups[0]["length_given"])
        axes.set_ylabel("tokens right at their position, %")
        axes.set_ylim(bottom=0)
        axes.legend(loc="best", fontsize=8)

    caption = "The same documents by the number of their tokens, true length given. In brackets: documents."
    return make_picture("accuracy_length", "Accuracy by length of the text", caption, draw)


def _generation(result: dict[str, Any]) -> Picture | None:
    made = result.get("generation")
    if not made:
        return None
    names = {f"distinct_{n}": f"distinct-{n}" for n in (1, 2, 3)}
    names |= {f"repeated_{n}": f"repeated\n{n}-grams" for n in (1, 2, 4)}

    def draw(axes: Axes) -> None:
        for shift, whose, color, name in (
            (-0.2, "generated", BLUE, "generated"),
            (0.2, "real", GREY, "held-out"),
        ):
            points = [made["diversity"][key][whose] for key in names]
            shown = [(idx + shift, point) for idx, point in enumerate(points) if point["value"] is not None]
            x, y = [place for place, _ in shown], [100 * point["value"] for _, point in shown]
            low = [100 * (p["value"] - p["low"]) if p["low"] is not None else 0.0 for _, p in shown]
            high = [100 * (p["high"] - p["value"]) if p["high"] is not None else 0.0 for _, p in shown]
            axes.bar(x, y, 0.38, yerr=[low, high], color=color, ecolor=INK, capsize=2, label=name)
        axes.set_xticks(range(len(names)), list(names.values()), fontsize=8)
        axes.grid(axis="x", visible=False)
        axes.set_ylabel("%")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)

    caption = (
        "Different n-grams among all, and n-grams that repeat one of the same text; generated texts and as many "
        "held-out ones."
    )
    return make_picture("generation", "Variety of generated texts", caption, draw)


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


def _self_check(result: dict[str, Any]) -> Picture | None:
    check = result.get("self_check")
    if not check:
        return None
    rows = sorted(check["rows"], key=lambda row: row["passes"]["value"])
    kinds = list(dict.fromkeys(map(_kind_of_way, check["rows"])))

    def draw(axes: Axes) -> None:
        for number, kind in enumerate(kinds):
            mine = [row for row in rows if _kind_of_way(row) == kind]
            cost, points = [row["passes"]["value"] for row in mine], [row["token_accuracy"] for row in mine]
            values = [100 * point["value"] for point in points]
            low = [100 * (point["value"] - point["low"]) for point in points]
            high = [100 * (point["high"] - point["value"]) for point in points]
            axes.errorbar(
                cost, values, yerr=[low, high], color=_KIND_COLORS[number % len(_KIND_COLORS)], marker="o",
                markersize=4, capsize=2, linestyle=("-", "--", ":")[number // len(_KIND_COLORS) % 3],
                label=kind,
            )  # fmt: skip
        axes.set_xscale("log")
        axes.set_xlabel("passes of the network per document")
        axes.set_ylabel("tokens right at their position, %")
        axes.legend(loc="best", fontsize=8)

    caption = (
        "Each point is a number of candidates, with or without rounds. Bars: 95 % interval over documents."
    )
    return make_picture("self_check", "What more work in decoding buys", caption, draw)


def _kind_of_way(row: dict[str, Any]) -> str:
    """What the points of one line share; what is as usual is not said."""
    parts = [row["text_sampler"]]
    parts += [f"guidance {row['guidance']:g}"] if row["guidance"] != 1 else []
    return ", ".join(parts)


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
