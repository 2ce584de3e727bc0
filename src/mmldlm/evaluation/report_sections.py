"""Sections of the report as HTML. Everything that comes from data is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from mmldlm.evaluation.examples import mark_differences
from mmldlm.evaluation.figure import Picture
from mmldlm.evaluation.plots import LATENT_NAMES

Cells = Sequence[str]


def headline(result: dict[str, Any]) -> str:
    """What a reader wants to know first."""
    model, data = result["model"], result["data"]
    step = "" if model["step"] is None else f" after {model['step']:,} steps"
    seconds, size = sum(result["seconds"].values()), model["num_parameters"] / 1e6
    intro = (
        f"<h1>Evaluation of {escape(model['name'])}</h1>"
        f'<p class="soft">{size:.1f} M parameters{step}; {data["num_documents"]:,} of '
        f"{data['num_held_out']:,} documents of the split <code>{escape(data['split'])}</code> "
        f"({data['num_tokens']:,} tokens), measured in {seconds:.0f} s.</p>"
    )
    cards = [*_bound_cards(result["text_bound"]), *_inversion_cards(result["inversion"])]
    cards += _retrieval_cards(result["retrieval"])
    return intro + f'<div class="cards">{"".join(cards)}</div>'


def _card(value: str, what: str, detail: str) -> str:
    return f'<div class="card"><b>{value}</b><span>{what}</span><span class="soft">{detail}</span></div>'


def _bound_cards(bound: dict[str, Any] | None) -> list[str]:
    if not bound:
        return []
    right, gain = bound["right"], bound["gain"]["shuffled"]
    interval = f"95 % interval {_signed(gain['low'])} to {_signed(gain['high'])}"
    return [
        _card(
            number(right["perplexity"]),
            "perplexity of held-out text",
            f"{right['nats_per_token']:.3f} nats per token",
        ),
        _card(
            _signed(gain["value"]),
            "nats per token saved by the right latent, against a shuffled one",
            interval,
        ),
    ]


def _inversion_cards(inversion: dict[str, Any] | None) -> list[str]:
    if not inversion:
        return []
    most = inversion["length_given"][-1]
    bleu = "" if most["bleu"] is None else f"BLEU {most['bleu']:.1f}, "
    detail = f"{bleu}{most['num_sampling_steps']} steps, true length given"
    cards = [
        _card(_percent(most["token_accuracy"]["value"]), "of tokens right, decoded from the latent", detail)
    ]
    if most["reencoded_cosine"]:
        reference = inversion["cosine_reference"]["strangers"]
        cosine = most["reencoded_cosine"]["value"]
        cards.append(
            _card(
                f"{cosine:.3f}", "cosine of the decoded text, re-encoded", f"unrelated texts {reference:.3f}"
            )
        )
    return cards


def _retrieval_cards(retrieval: dict[str, Any] | None) -> list[str]:
    if not retrieval:
        return []
    detail = f"chance {_percent(retrieval['chance_at_1'], 2)} of {retrieval['num_candidates']:,}"
    strangers = f"to unrelated ones {retrieval['stranger_cosine']['value']:.3f}"
    return [
        _card(_percent(retrieval["retrieval_at_1"]["value"]), "of texts find their own latent first", detail),
        _card(
            f"{retrieval['cosine']['value']:.3f}", "cosine of text to latent, against the encoder", strangers
        ),
    ]


def notes(lines: Sequence[str]) -> str:
    """What the reader must know to read the numbers rightly."""
    return f'<div class="notes">{"".join(f"<p>{escape(line)}</p>" for line in lines)}</div>' if lines else ""


def plots(pictures: Sequence[Picture]) -> str:
    """All pictures, as SVG inside the page."""
    figures = [
        f"<figure><h3>{escape(picture.title)}</h3>{picture.svg}<figcaption>{escape(picture.caption)}</figcaption></figure>"
        for picture in pictures
    ]
    return f'<h2>Pictures</h2><div class="plots">{"".join(figures)}</div>' if figures else ""


def bound_table(bound: dict[str, Any] | None) -> str:
    """Cost of the text under each latent."""
    if not bound:
        return ""
    rows = [_bound_row(LATENT_NAMES[kind], bound[kind], bound["gain"].get(kind)) for kind in LATENT_NAMES]
    head = [
        "",
        "nats / token",
        "95 % interval",
        "bits / token",
        "perplexity",
        "more than right",
        "length, nats / document",
    ]
    return "<h2>What the latent buys</h2>" + table(head, rows)


def _bound_row(name: str, values: dict[str, Any], gain: dict[str, float] | None) -> list[str]:
    length = values["length_nats_per_document"]
    return [
        name,
        f"{values['nats_per_token']:.3f}",
        "{:.3f} to {:.3f}".format(*values["interval"]),
        f"{values['bits_per_token']:.3f}",
        number(values["perplexity"]),
        ""
        if gain is None
        else f"{_signed(gain['value'])} ({_signed(gain['low'])} to {_signed(gain['high'])})",
        "given" if length is None else f"{length:.2f}",
    ]


def inversion_table(inversion: dict[str, Any] | None) -> str:
    """Decoding, for each number of sampling steps."""
    if not inversion:
        return ""
    rows = [_inversion_row("true length", point) for point in inversion["length_given"]]
    rows += [_inversion_row("modelled", point) for point in inversion["length_modelled"]]
    head = [
        "length",
        "steps",
        "tokens right",
        "token F1",
        "exact",
        "BLEU",
        "re-encoded cosine",
        "length right",
    ]
    sampling = ", ".join(f"{key}={value}" for key, value in inversion["sampling"].items())
    about = f"{inversion['num_documents']:,} documents, always from fully masked text; {escape(sampling)}."
    if inversion["bleu_signature"]:
        about += f" BLEU: <code>{escape(inversion['bleu_signature'])}</code>."
    return f'<h2>Latent to text</h2><p class="soft">{about}</p>' + table(head, rows)


def _inversion_row(length: str, point: dict[str, Any]) -> list[str]:
    cosine = point["reencoded_cosine"]
    return [
        length,
        str(point["num_sampling_steps"]),
        _percent(point["token_accuracy"]["value"]),
        _percent(point["token_f1"]["value"]),
        _percent(point["exact_match"]["value"]),
        "" if point["bleu"] is None else f"{point['bleu']:.1f}",
        "" if cosine is None else f"{cosine['value']:.3f}",
        _percent(point["right_length"]),
    ]


def retrieval_table(retrieval: dict[str, Any] | None) -> str:
    """Text to latent, against the encoder."""
    if not retrieval:
        return ""
    rows = [
        ["cosine to its own latent", *_estimate(retrieval["cosine"]), ""],
        ["cosine to another's latent", *_estimate(retrieval["stranger_cosine"]), ""],
    ]
    for depth in (1, 10):
        shown = _estimate(retrieval[f"retrieval_at_{depth}"], percent=True)
        rows.append(
            [f"own latent among the first {depth}", *shown, _percent(retrieval[f"chance_at_{depth}"], 2)]
        )
    about = (
        f"{retrieval['num_queries']:,} texts, each sought among all {retrieval['num_candidates']:,} latents."
    )
    return f'<h2>Text to latent</h2><p class="soft">{about}</p>' + table(
        ["", "value", "95 % interval", "chance"], rows
    )


def _estimate(value: dict[str, float], percent: bool = False) -> list[str]:
    show = _percent if percent else "{:.3f}".format
    return [show(value["value"]), f"{show(value['low'])} to {show(value['high'])}"]


def examples(pairs: Sequence[dict[str, Any]]) -> str:
    """True texts beside decoded ones, with what differs marked."""
    if not pairs:
        return ""
    about = (
        "The first documents drawn, not the best ones. Marked: words that the true text does not have there."
    )
    blocks = "".join(f'<div class="example">{_example(pair)}</div>' for pair in pairs)
    return f'<h2>Examples</h2><p class="soft">{about}</p>{blocks}'


def _example(pair: dict[str, Any]) -> str:
    columns = [f"<div><h4>true text</h4><p>{escape(pair['true'])}</p></div>"]
    for name, decoded in pair["decoded"].items():
        cosine = decoded["reencoded_cosine"]
        scores = _percent(decoded["token_accuracy"], 0) + ("" if cosine is None else f", cosine {cosine:.2f}")
        text = " ".join(
            escape(piece) if same else f"<mark>{escape(piece)}</mark>"
            for piece, same in mark_differences(pair["true"], decoded["text"])
        )
        columns.append(f"<div><h4>{escape(name)} · {scores}</h4><p>{text}</p></div>")
    return "".join(columns)


def settings(result: dict[str, Any]) -> str:
    """How to get these numbers again."""
    command = result.get("command")
    shown = f"<h2>How this was made</h2>{f'<pre>{escape(command)}</pre>' if command else ''}"
    for title, key in (
        ("Settings", "settings"),
        ("Model", "model"),
        ("Data", "data"),
        ("Versions", "versions"),
        ("Seconds", "seconds"),
    ):
        rows = "".join(
            f"<tr><td>{escape(k)}</td><td>{escape(_flat(v))}</td></tr>" for k, v in result[key].items()
        )
        shown += f"<details><summary>{title}</summary><table>{rows}</table></details>"
    return shown


def table(head: Cells, rows: Sequence[Cells]) -> str:
    """A table that scrolls sideways where the screen is narrow; the cells are HTML."""
    lines = ["".join(f"<th>{cell}</th>" for cell in head)]
    lines += ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
    return f'<div class="scroll"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def number(value: float | None) -> str:
    """A number that may be large; null is one that was not finite."""
    if value is None:
        return "∞"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={_flat(item)}" for key, item in value.items())
    return ", ".join(map(_flat, value)) if isinstance(value, list) else str(value)


def _percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f} %"


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")
