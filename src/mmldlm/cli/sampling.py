"""The commands that sample: `decode`, `generate` and `interpolate` make texts of latents, of nothing, and between two
texts; `encode`, `infill` and `paraphrase` begin with texts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mmldlm import randomness
from mmldlm.cli.options import Texts, argument, chosen, option, takes
from mmldlm.cli.records import (
    LATENT_IN,
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
    require_texts,
    text_records,
)
from mmldlm.errors import UserError

if TYPE_CHECKING:  # the commands answer --help without torch
    import numpy as np

    from mmldlm.api.files import Inputs
    from mmldlm.api.model import Model
    from mmldlm.sampling.decode import Progress

_TEXT_OPTIONS = "steps order temperature top_p guidance seed"


@takes(
    OPTIONS | LATENT_IN,
    "run texts text latents from_split in_file num data encode_with length steps order temperature top_p guidance "
    "against seed candidates refine check neighbours out json_output device precision",
)
def decode(words: Any) -> None:
    """Decode latents into texts: those of texts, of a file, or of held-out pairs."""
    texts = [*(words.texts or []), *(words.text or [])]
    from_split, neighbours, checked = words.from_split, words.neighbours, (words.candidates or 1) > 1
    require_one_of(
        {"TEXT": texts, "--latents": words.latents, "--from-split": from_split, "--in": words.in_file}
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
        wanted = latents_of(model, inputs, words.encode_with, seed, tokenized=words.length == "original")
        lengths = lengths_of(model, words.length, inputs)
        texts = model.decode(
            wanted, lengths=lengths, against=away, ids=inputs.ids, progress=progress, **options
        )
        rows = text_records(texts, inputs.texts)
        add_neighbours(rows, model, wanted, neighbours, words.data)
        return rows

    def named() -> Inputs:
        return named_documents(model, texts, words.latents, from_split, words.num, words.data)

    request = options | chosen(words, "length against neighbours encode_with")
    answer.serve(model, records, request, words.in_file, named)


@takes(
    OPTIONS
    | LATENT_OUT
    | {
        "num": option(int, 8, "How many pairs.", "-n", "--num"),
        "length": option(str | None, None, "Tokens of each text; without it they are drawn."),
    },
    "run num length data steps latent_steps order solver turns temperature top_p guidance seed neighbours out "
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
    from mmldlm.api.files import Inputs
    from mmldlm.api.model import load

    model, points, options = load(words.run, words.device), words.points, chosen(words, _TEXT_OPTIONS)
    a, b = latents_of(model, Inputs(texts=[words.first, words.second]), words.encode_with, words.seed)
    with answer.progress() as progress:
        lengths = lengths_of(model, words.length)
        pairs = model.interpolate(a, b, points, lengths=lengths, progress=progress, **options)
    records = text_records(pairs.texts, [place / (points - 1) for place in range(points)], "at")
    answer.give(model, options | chosen(words, "points length"), records, pairs.latents)


@takes(
    OPTIONS
    | LATENT_OUT
    | {
        "encode_with": option(str, "model", "model, or encoder: that of the training latents."),
        "steps": option(int | None, None, "Steps of the latent sampler. [1]"),
    },
    "run texts from_split in_file num data encode_with steps solver guidance seed neighbours out json_output device "
    "precision",
)
def encode(words: Any) -> None:
    """Turn texts into latents in the encoder's own space, without the encoder."""
    from_split, in_file, out = words.from_split, words.in_file, words.out
    require_one_of({"TEXT": words.texts, "--from-split": from_split, "--in": in_file})
    require_effect("-n", words.num, from_split, needs="--from-split")
    require_effect("--data", words.data, from_split, words.neighbours, needs="--from-split or --neighbours")
    answer = Answer("encode", out, as_json=words.json_output, kinds=(".npy", ".jsonl"))
    from mmldlm.api.model import load

    model = load(words.run, words.device, precision=words.precision)
    options = chosen(words, "steps solver guidance seed")

    def latents(inputs: Inputs, progress: Progress) -> np.ndarray:
        listed = require_texts(inputs)
        if words.encode_with == "model":
            return model.encode(listed, ids=inputs.ids, progress=progress, **options)
        return latents_of(model, inputs, words.encode_with)

    def records(inputs: Inputs, encoded: np.ndarray) -> list[dict[str, Any]]:
        pairs = zip(inputs.texts or [], encoded, strict=True)
        rows = [{"text": text, "latent": latent.tolist()} for text, latent in pairs]
        add_neighbours(rows, model, encoded, words.neighbours, words.data)
        return rows

    request = options | chosen(words, "encode_with neighbours")
    if in_file is not None:
        to_array = out is not None and out.suffix == ".npy"
        described = latents if to_array else lambda inputs, bar: records(inputs, latents(inputs, bar))
        answer.stream(model, in_file, described, request)
        return
    inputs = named_documents(model, words.texts, None, from_split, words.num, words.data)
    with answer.progress() as progress:
        encoded = latents(inputs, progress)
    answer.give(model, request, records(inputs, encoded), encoded)


@takes(
    OPTIONS
    | {
        "texts": argument(
            Texts, None, "Texts with blanks: ____ is one token, ____{3} three.", metavar="TEXT"
        ),
        "about": option(Texts, None, "A text whose latent the filled text is to suit."),
    },
    "run texts in_file about latents encode_with steps order temperature top_p guidance against seed out json_output "
    "device",
)
def infill(words: Any) -> None:
    """Fill blanks from the text around them, and to suit a latent where one is given."""
    about, latents, in_file = words.about, words.latents, words.in_file
    require_one_of({"TEXT": words.texts, "--in": in_file})
    if about or latents is not None:
        require_one_of({"--about": about, "--latents": latents, "--in": in_file})
    require_effect("--against", words.against, about, latents, in_file, needs="--about, --latents or --in")
    answer = Answer("infill", words.out, as_json=words.json_output)
    from mmldlm.api.files import Inputs
    from mmldlm.api.model import load

    model, options = load(words.run, words.device), chosen(words, _TEXT_OPTIONS)
    away = against_of(model, words.against, words.encode_with, words.seed)

    def records(inputs: Inputs, progress: Progress) -> list[dict[str, Any]]:
        if inputs.infill is None and inputs.texts is not None:  # the lines of a .txt file
            inputs = replace(inputs, infill=inputs.texts, texts=None)
        if inputs.infill is None:
            raise UserError(
                "--in: a file of texts with blanks is needed, .txt or .jsonl with the field infill"
            )
        condition = _condition(model, inputs, inputs.infill, words.encode_with, words.seed)
        if condition:
            condition["against"] = away
        filled = model.infill(inputs.infill, progress=progress, **condition, **options)
        blanks = inputs.infill * len(filled) if len(inputs.infill) == 1 else inputs.infill
        return text_records(filled, blanks, "infill")

    def named() -> Inputs:
        condition = named_documents(model, about, latents) if about or latents is not None else Inputs()
        return replace(condition, infill=words.texts)

    request = options | chosen(words, "about latents against encode_with")
    answer.serve(model, records, request, in_file, named)


def _condition(model: Model, inputs: Inputs, blanks: list[str], by: str, seed: int) -> dict[str, Any]:
    """The latents that filled texts are to suit, with the ids of such pairs; nothing where none are given."""
    from mmldlm.sampling.pack import content_ids

    if inputs.texts is None and inputs.latents is None:
        return {}
    latents, ids = latents_of(model, inputs, by, seed), None
    if 1 in (len(blanks), len(latents)) or len(blanks) == len(latents):
        ids = randomness.make_key(content_ids(blanks), inputs.ids)
    return {"latents": latents, "ids": ids}


@takes(
    OPTIONS
    | {
        "strength": option(float, 0.5, "How much of it is noise: up to 1."),
        "vary": option(str, "both", "What is noised: latent, text or both."),
    },
    "run texts in_file strength vary encode_with length steps latent_steps order solver temperature top_p guidance "
    "seed out json_output device",
)
def paraphrase(words: Any) -> None:
    """Vary texts: their latents are noised, some of their tokens are masked, or both, and sampled again."""
    require_one_of({"TEXT": words.texts, "--in": words.in_file})
    require_effect("--length", words.length, words.vary == "latent", needs="--vary latent")
    answer = Answer("paraphrase", words.out, as_json=words.json_output)
    from mmldlm.api.files import Inputs
    from mmldlm.api.model import load

    model = load(words.run, words.device)
    options = chosen(words, f"{_TEXT_OPTIONS} strength vary latent_steps solver")

    def records(inputs: Inputs, progress: Progress) -> list[dict[str, Any]]:
        originals, lengths = require_texts(inputs), lengths_of(model, words.length, inputs)
        latents = latents_of(model, inputs, words.encode_with, words.seed, tokenized=True)
        varied = model.paraphrase(originals, latents=latents, lengths=lengths, progress=progress, **options)
        return text_records(varied, originals)

    request = options | chosen(words, "length encode_with")
    answer.serve(model, records, request, words.in_file, lambda: Inputs(texts=words.texts))
