"""`mmldlm decode`, `generate` and `interpolate`: texts of latents, from nothing, and between two texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmldlm.cli.options import argument, chosen, option, takes
from mmldlm.cli.samples import (
    LATENT_OUT,
    OPTIONS,
    Answer,
    add_neighbours,
    against_of,
    latents_of,
    lengths_of,
    named_documents,
    require_effect,
    require_one_of,
    text_records,
)
from mmldlm.errors import UserError

if TYPE_CHECKING:  # the commands answer --help without torch
    from mmldlm.sampling.decode import Progress
    from mmldlm.sampling.stream import Inputs

_TEXT_OPTIONS = "steps order temperature top_p guidance seed"


@takes(
    OPTIONS,
    "run text latents from_split in_file num data encode_with length steps order temperature top_p guidance against "
    "seed candidates refine check neighbours out json_output device precision",
)
def decode(words: Any) -> None:
    """Decode latents into texts: those of texts, of a file, or of held-out pairs."""
    from_split, neighbours, checked = words.from_split, words.neighbours, (words.candidates or 1) > 1
    require_one_of(
        {"--text": words.text, "--latents": words.latents, "--from-split": from_split, "--in": words.in_file}
    )
    require_effect("-n", words.num, from_split, needs="--from-split")
    require_effect("--data", words.data, from_split, neighbours, needs="--from-split or --neighbours")
    require_effect("--check", words.check, checked, words.refine, needs="--candidates or --refine")
    answer = Answer("decode", words.out, as_json=words.json_output)
    from mmldlm.api.model import load

    model, seed = load(words.run, words.device, precision=words.precision), words.seed
    options = chosen(words, f"{_TEXT_OPTIONS} candidates refine check")
    away = against_of(model, words.against, words.encode_with, seed)

    def records(inputs: Inputs, progress: Progress) -> list[dict[str, Any]]:
        wanted = latents_of(model, inputs, words.encode_with, seed)
        lengths = lengths_of(model, words.length, inputs)
        texts = model.decode(
            wanted, lengths=lengths, against=away, ids=inputs.ids, progress=progress, **options
        )
        rows = text_records(texts, inputs.texts)
        add_neighbours(rows, model, wanted, neighbours, words.data)
        return rows

    def named() -> Inputs:
        return named_documents(model, words.text, words.latents, from_split, words.num, words.data)

    request = options | chosen(words, "length against neighbours encode_with")
    answer.serve(model, records, request, words.in_file, named)


@takes(
    OPTIONS
    | LATENT_OUT
    | {
        "num": option(int, 8, "How many pairs.", "-n"),
        "length": option(str | None, None, "Tokens of each text; without it they are drawn."),
    },
    "run num length steps latent_steps order solver turns temperature top_p guidance seed neighbours data out "
    "json_output device precision",
)
def generate(words: Any) -> None:
    """Generate texts and their latents from nothing."""
    if words.num < 1:
        raise UserError(f"-n {words.num}: at least 1 is needed")
    require_effect("--data", words.data, words.neighbours, needs="--neighbours")
    answer = Answer("generate", words.out, as_json=words.json_output, kinds=(".npy", ".jsonl"))
    from mmldlm.api.model import load

    model = load(words.run, words.device, precision=words.precision)
    options = chosen(words, f"{_TEXT_OPTIONS} latent_steps solver turns")
    with answer.progress() as progress:
        lengths = lengths_of(model, words.length)
        pairs = model.generate(words.num, lengths=lengths, progress=progress, **options)
    records = text_records(pairs.texts)
    for record, latent in zip(records, pairs.latents, strict=True):
        record["latent"] = latent.tolist()
    add_neighbours(records, model, pairs.latents, words.neighbours, words.data)
    answer.give(model, options | {"n": words.num} | chosen(words, "length"), records, pairs.latents)


@takes(
    OPTIONS
    | LATENT_OUT
    | {
        "first": argument(str, ..., "The text at one end.", metavar="A"),
        "second": argument(str, ..., "The text at the other end.", metavar="B"),
        "points": option(int, 5, "Latents from one end to the other."),
    },
    "run first second points encode_with length steps order temperature top_p guidance seed out json_output device",
)
def interpolate(words: Any) -> None:
    """Decode the latents between those of two texts."""
    if words.points < 2:
        raise UserError(f"--points {words.points}: at least 2 are needed")
    answer = Answer("interpolate", words.out, as_json=words.json_output, kinds=(".npy", ".jsonl"))
    from mmldlm.api.model import load
    from mmldlm.sampling.stream import Inputs

    model, points, options = load(words.run, words.device), words.points, chosen(words, _TEXT_OPTIONS)
    a, b = latents_of(model, Inputs(texts=[words.first, words.second]), words.encode_with, words.seed)
    with answer.progress() as progress:
        lengths = lengths_of(model, words.length)
        pairs = model.interpolate(a, b, points, lengths=lengths, progress=progress, **options)
    records = text_records(pairs.texts, [place / (points - 1) for place in range(points)], "at")
    answer.give(model, options | chosen(words, "points length"), records, pairs.latents)
