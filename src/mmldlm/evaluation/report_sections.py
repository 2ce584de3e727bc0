"""Sections of the report as HTML. Everything that comes from data is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from mmldlm.evaluation.examples import mark_differences
from mmldlm.evaluation.figure import Picture
from mmldlm.evaluation.report_style import STYLE
from mmldlm.evaluation.tables import Table, number, percent, signed


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
    cards += [*_retrieval_cards(result["retrieval"]), *_generation_cards(result["generation"])]
    return intro + f'<div class="cards">{"".join(cards)}</div>'


def _card(value: str, what: str, detail: str) -> str:
    return f'<div class="card"><b>{value}</b><span>{what}</span><span class="soft">{detail}</span></div>'


def _bound_cards(bound: dict[str, Any] | None) -> list[str]:
    if not bound:
        return []
    right, gain = bound["right"], bound["gain"]["shuffled"]
    interval = f"95 % interval {signed(gain['low'])} to {signed(gain['high'])}"
    return [
        _card(
            number(right["perplexity"]),
            "perplexity of held-out text",
            f"{right['nats_per_token']:.3f} nats per token",
        ),
        _card(
            signed(gain["value"]),
            "nats per token saved by the right latent, against a shuffled one",
            interval,
        ),
    ]


def _inversion_cards(inversion: dict[str, Any] | None) -> list[str]:
    if not inversion:
        return []
    most = inversion["length_given"][-1]
    bleu = "" if most["bleu"] is None else f"BLEU {most['bleu']['value']:.1f}, "
    detail = f"{bleu}{most['num_sampling_steps']} steps, true length given"
    cards = [
        _card(percent(most["token_accuracy"]["value"]), "of tokens right, decoded from the latent", detail)
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
    detail = f"chance {percent(retrieval['chance_at_1'], 2)} of {retrieval['num_candidates']:,}"
    strangers = f"to unrelated ones {retrieval['stranger_cosine']['value']:.3f}"
    return [
        _card(percent(retrieval["retrieval_at_1"]["value"]), "of texts find their own latent first", detail),
        _card(
            f"{retrieval['cosine']['value']:.3f}", "cosine of text to latent, against the encoder", strangers
        ),
    ]


def _generation_cards(made: dict[str, Any] | None) -> list[str]:
    if not made:
        return []
    agreement = made["agreement"]
    who = "encoder" if agreement["encoder"] else "own"
    by = "the encoder" if who == "encoder" else "the model itself"
    unrelated = f"unrelated ones {agreement[f'{who}_strangers']:.3f}"
    return [
        _card(
            f"{agreement[who]['value']:.3f}",
            f"cosine of generated latents and their texts, by {by}",
            unrelated,
        )
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


def tables(made: Sequence[Table]) -> str:
    """All tables, each with what its numbers mean."""
    return "".join(
        f'<h2>{escape(one.title)}</h2><p class="soft">{escape(one.about)}</p>{table(one.head, one.rows)}'
        for one in made
    )


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
        scores = percent(decoded["token_accuracy"], 0) + ("" if cosine is None else f", cosine {cosine:.2f}")
        text = " ".join(
            escape(piece) if same else f"<mark>{escape(piece)}</mark>"
            for piece, same in mark_differences(pair["true"], decoded["text"])
        )
        columns.append(f"<div><h4>{escape(name)} · {scores}</h4><p>{text}</p></div>")
    return "".join(columns)


def generated(made: dict[str, Any] | None) -> str:
    """Texts from nothing, the first ones."""
    if not made or not made["examples"]:
        return ""
    lines = "".join(f'<div class="example"><p>{escape(text)}</p></div>' for text in made["examples"])
    return f'<h2>Generated texts</h2><p class="soft">The first ones, not the best.</p>{lines}'


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


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that scrolls sideways where the screen is narrow."""
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return f'<div class="scroll"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def whole_page(title: str, body: Sequence[str]) -> str:
    """A page that needs nothing else."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main></body></html>\n"
    )


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={_flat(item)}" for key, item in value.items())
    return ", ".join(map(_flat, value)) if isinstance(value, list) else str(value)
