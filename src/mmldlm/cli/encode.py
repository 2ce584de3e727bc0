"""`mmldlm encode`, `infill` and `paraphrase`: texts to latents by the model itself, texts with blanks, other texts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmldlm import randomness
from mmldlm.cli import samples as option
from mmldlm.cli.samples import (
    Answer,
    add_neighbours,
    against_of,
    chosen,
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

    from mmldlm.api.model import Model
    from mmldlm.sampling.decode import Progress
    from mmldlm.sampling.stream import Inputs

Texts = Annotated[list[str] | None, typer.Argument(metavar="[TEXT]...", help="Texts.")]
By = Annotated[str, typer.Option("--encode-with", help="model, or encoder: that of the training latents.")]
Compare = Annotated[
    bool, typer.Option("--compare/--no-compare", help="Add the cosine to the encoder's own latent.")
]
EncodeSteps = Annotated[int | None, typer.Option("--steps", help="Steps of the latent sampler. [1]")]
Blanks = Annotated[
    list[str] | None,
    typer.Argument(metavar="[TEXT]...", help="Texts with blanks: ____ is one token, ____{3} three."),
]
About = Annotated[
    list[str] | None, typer.Option("--about", help="A text whose latent the filled text is to suit.")
]
Strength = Annotated[float, typer.Option("--strength", help="How much of it is noise: up to 1.")]
Vary = Annotated[str, typer.Option("--vary", help="What is noised: latent, text or both.")]


def encode(
    run: option.Run,
    texts: Texts = None,
    from_split: option.FromSplit = None,
    in_file: option.InFile = None,
    num: option.Count = None,
    data: option.Data = None,
    encode_with: By = "model",
    compare: Compare = True,
    steps: EncodeSteps = None,
    solver: option.Solver = None,
    guidance: option.Guidance = None,
    seed: option.Seed = 0,
    neighbours: option.Neighbours = 0,
    out: option.LatentOut = None,
    json_output: option.Json = False,
    device: option.Device = "auto",
    precision: option.Precision = None,
) -> None:
    """Turn texts into latents in the encoder's own space, without the encoder."""
    require_one_of({"TEXT": texts, "--from-split": from_split, "--in": in_file})
    require_effect("-n", num, from_split, needs="--from-split")
    require_effect("--data", data, from_split, neighbours, needs="--from-split or --neighbours")
    answer = Answer("encode", out, as_json=json_output, kinds=(".npy", ".jsonl"))
    from mmldlm.api.model import load

    model = load(run, device, precision=precision)
    options: dict[str, Any] = chosen(steps=steps, solver=solver, guidance=guidance, seed=seed)
    cosines = _Cosines(model) if encode_with == "model" and compare else None

    def latents(inputs: Inputs, progress: Progress) -> np.ndarray:
        listed = require_texts(inputs)
        if encode_with == "model":
            return model.encode(listed, ids=inputs.ids, progress=progress, **options)
        return latents_of(model, inputs, encode_with)

    def records(inputs: Inputs, made: np.ndarray) -> list[dict[str, Any]]:
        near = cosines.of(inputs, made) if cosines else [None] * len(made)
        rows = [
            {"text": text, "cosine": cosine, "latent": latent.tolist()}
            for text, cosine, latent in zip(inputs.texts or [], near, made, strict=True)
        ]
        add_neighbours(rows, model, made, neighbours, data)
        return rows

    request = options | chosen(encode_with=encode_with, compare=compare, neighbours=neighbours)
    if in_file is not None:
        to_array = out is not None and out.suffix == ".npy"
        described = latents if to_array else lambda inputs, bar: records(inputs, latents(inputs, bar))
        answer.stream(model, in_file, described, request)
        return
    inputs = named_documents(model, texts, None, from_split, num, data)
    with answer.progress() as progress:
        made = latents(inputs, progress)
    answer.give(model, request, records(inputs, made), made)


class _Cosines:
    """How near latents are to those of the encoder, until it turns out that it cannot be used."""

    def __init__(self, model: Model) -> None:
        self.model, self.usable = model, True

    def of(self, inputs: Inputs, latents: np.ndarray) -> list[float] | list[None]:
        from mmldlm.latents import cosine

        if self.usable:
            try:
                return cosine(latents, latents_of(self.model, inputs, "encoder")).tolist()
            except UserError as error:
                self.usable = False
                typer.echo(f"note: no comparison with the encoder: {error}", err=True)
        return [None] * len(latents)


def infill(
    run: option.Run,
    texts: Blanks = None,
    in_file: option.InFile = None,
    about: About = None,
    latents: option.LatentFile = None,
    encode_with: option.EncodeWith = "encoder",
    steps: option.Steps = None,
    order: option.Order = None,
    temperature: option.Temperature = None,
    top_p: option.TopP = None,
    guidance: option.Guidance = None,
    against: option.Against = None,
    seed: option.Seed = 0,
    out: option.Out = None,
    json_output: option.Json = False,
    device: option.Device = "auto",
) -> None:
    """Fill blanks from the text around them, and to suit a latent where one is given."""
    require_one_of({"TEXT": texts, "--in": in_file})
    if about or latents is not None:
        require_one_of({"--about": about, "--latents": latents, "--in": in_file})
    require_effect("--against", against, about, latents, in_file, needs="--about, --latents or --in")
    answer = Answer("infill", out, as_json=json_output)
    from mmldlm.api.model import load
    from mmldlm.sampling.stream import Inputs

    model = load(run, device)
    options: dict[str, Any] = chosen(
        steps=steps, order=order, temperature=temperature, top_p=top_p, guidance=guidance, seed=seed
    )
    away = against_of(model, against, encode_with, seed)

    def records(inputs: Inputs, progress: Progress) -> list[dict[str, Any]]:
        if inputs.infill is None and inputs.texts is not None:  # the lines of a .txt file
            inputs = replace(inputs, infill=inputs.texts, texts=None)
        if inputs.infill is None:
            raise UserError(
                "--in: a file of texts with blanks is needed, .txt or .jsonl with the field infill"
            )
        condition = _condition(model, inputs, inputs.infill, encode_with, seed)
        if condition:
            condition["against"] = away
        filled = model.infill(inputs.infill, progress=progress, **condition, **options)
        blanks = inputs.infill * len(filled) if len(inputs.infill) == 1 else inputs.infill
        return text_records(filled, blanks, "infill")

    def named() -> Inputs:
        condition = named_documents(model, about, latents) if about or latents is not None else Inputs()
        return replace(condition, infill=texts)

    request = options | chosen(about=about, latents=latents, against=against, encode_with=encode_with)
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


def paraphrase(
    run: option.Run,
    texts: Texts = None,
    in_file: option.InFile = None,
    strength: Strength = 0.5,
    vary: Vary = "both",
    encode_with: option.EncodeWith = "encoder",
    length: option.Length = None,
    steps: option.Steps = None,
    latent_steps: option.LatentSteps = None,
    order: option.Order = None,
    solver: option.Solver = None,
    temperature: option.Temperature = None,
    top_p: option.TopP = None,
    guidance: option.Guidance = None,
    seed: option.Seed = 0,
    out: option.Out = None,
    json_output: option.Json = False,
    device: option.Device = "auto",
) -> None:
    """Vary texts: their latents are noised, some of their tokens are masked, or both, and sampled again."""
    require_one_of({"TEXT": texts, "--in": in_file})
    answer = Answer("paraphrase", out, as_json=json_output)
    from mmldlm.api.model import load
    from mmldlm.sampling.stream import Inputs

    model = load(run, device)
    options: dict[str, Any] = chosen(
        strength=strength, vary=vary, steps=steps, latent_steps=latent_steps, order=order, solver=solver,
        temperature=temperature, top_p=top_p, guidance=guidance, seed=seed,
    )  # fmt: skip

    def records(inputs: Inputs, progress: Progress) -> list[dict[str, Any]]:
        originals = require_texts(inputs)
        latents, lengths = latents_of(model, inputs, encode_with, seed), lengths_of(model, length, inputs)
        varied = model.paraphrase(originals, latents=latents, lengths=lengths, progress=progress, **options)
        return text_records(varied, originals)

    request = options | chosen(length=length, encode_with=encode_with)
    answer.serve(model, records, request, in_file, lambda: Inputs(texts=texts))
