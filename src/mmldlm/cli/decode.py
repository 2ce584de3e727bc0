"""`mmldlm decode`, `generate` and `interpolate`: texts of latents, from nothing, and between two texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

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
    text_records,
)
from mmldlm.errors import UserError

if TYPE_CHECKING:  # the commands answer --help without torch
    from mmldlm.sampling.decode import Progress
    from mmldlm.sampling.stream import Inputs

Number = Annotated[int, typer.Option("-n", help="How many pairs.")]
Length = Annotated[
    str | None, typer.Option("--length", help="Tokens of each text; without it they are drawn.")
]
First = Annotated[str, typer.Argument(metavar="A", help="The text at one end.")]
Second = Annotated[str, typer.Argument(metavar="B", help="The text at the other end.")]
Points = Annotated[int, typer.Option("--points", help="Latents from one end to the other.")]


def decode(
    run: option.Run,
    text: option.Text = None,
    latents: option.LatentFile = None,
    from_split: option.FromSplit = None,
    in_file: option.InFile = None,
    num: option.Count = None,
    data: option.Data = None,
    encode_with: option.EncodeWith = "encoder",
    length: option.Length = None,
    steps: option.Steps = None,
    order: option.Order = None,
    temperature: option.Temperature = None,
    top_p: option.TopP = None,
    guidance: option.Guidance = None,
    against: option.Against = None,
    seed: option.Seed = 0,
    candidates: option.Candidates = None,
    refine: option.Refine = 0,
    check: option.CheckWith = None,
    neighbours: option.Neighbours = 0,
    out: option.Out = None,
    json_output: option.Json = False,
    device: option.Device = "auto",
    precision: option.Precision = None,
) -> None:
    """Decode latents into texts: those of texts, of a file, or of held-out pairs."""
    require_one_of({"--text": text, "--latents": latents, "--from-split": from_split, "--in": in_file})
    require_effect("-n", num, from_split, needs="--from-split")
    require_effect("--data", data, from_split, neighbours, needs="--from-split or --neighbours")
    require_effect("--check", check, (candidates or 1) > 1, refine, needs="--candidates or --refine")
    answer = Answer("decode", out, as_json=json_output)
    from mmldlm.api.model import load

    model = load(run, device, precision=precision)
    options: dict[str, Any] = chosen(
        steps=steps, order=order, temperature=temperature, top_p=top_p, guidance=guidance, seed=seed,
        candidates=candidates, refine=refine, check=check,
    )  # fmt: skip
    away = against_of(model, against, encode_with, seed)

    def records(inputs: Inputs, progress: Progress) -> list[dict[str, Any]]:
        wanted, lengths = latents_of(model, inputs, encode_with, seed), lengths_of(model, length, inputs)
        texts = model.decode(
            wanted, lengths=lengths, against=away, ids=inputs.ids, progress=progress, **options
        )
        rows = text_records(texts, inputs.texts)
        add_neighbours(rows, model, wanted, neighbours, data)
        return rows

    request = options | chosen(length=length, against=against, neighbours=neighbours, encode_with=encode_with)
    answer.serve(
        model, records, request, in_file, lambda: named_documents(model, text, latents, from_split, num, data)
    )


def generate(
    run: option.Run,
    num: Number = 8,
    length: Length = None,
    steps: option.Steps = None,
    latent_steps: option.LatentSteps = None,
    order: option.Order = None,
    solver: option.Solver = None,
    turns: option.Turns = None,
    temperature: option.Temperature = None,
    top_p: option.TopP = None,
    guidance: option.Guidance = None,
    seed: option.Seed = 0,
    neighbours: option.Neighbours = 0,
    data: option.Data = None,
    out: option.LatentOut = None,
    json_output: option.Json = False,
    device: option.Device = "auto",
    precision: option.Precision = None,
) -> None:
    """Generate texts and their latents from nothing."""
    if num < 1:
        raise UserError(f"-n {num}: at least 1 is needed")
    require_effect("--data", data, neighbours, needs="--neighbours")
    answer = Answer("generate", out, as_json=json_output, kinds=(".npy", ".jsonl"))
    from mmldlm.api.model import load

    model = load(run, device, precision=precision)
    options: dict[str, Any] = chosen(
        steps=steps, latent_steps=latent_steps, order=order, solver=solver, turns=turns,
        temperature=temperature, top_p=top_p, guidance=guidance, seed=seed,
    )  # fmt: skip
    with answer.progress() as progress:
        pairs = model.generate(num, lengths=lengths_of(model, length), progress=progress, **options)
    records = text_records(pairs.texts)
    for record, latent in zip(records, pairs.latents, strict=True):
        record["latent"] = latent.tolist()
    add_neighbours(records, model, pairs.latents, neighbours, data)
    answer.give(model, options | chosen(n=num, length=length), records, pairs.latents)


def interpolate(
    run: option.Run,
    first: First,
    second: Second,
    points: Points = 5,
    encode_with: option.EncodeWith = "encoder",
    length: option.Length = None,
    steps: option.Steps = None,
    order: option.Order = None,
    temperature: option.Temperature = None,
    top_p: option.TopP = None,
    guidance: option.Guidance = None,
    seed: option.Seed = 0,
    out: option.LatentOut = None,
    json_output: option.Json = False,
    device: option.Device = "auto",
) -> None:
    """Decode the latents between those of two texts."""
    if points < 2:
        raise UserError(f"--points {points}: at least 2 are needed")
    answer = Answer("interpolate", out, as_json=json_output, kinds=(".npy", ".jsonl"))
    from mmldlm.api.model import load
    from mmldlm.sampling.stream import Inputs

    model = load(run, device)
    options: dict[str, Any] = chosen(
        steps=steps, order=order, temperature=temperature, top_p=top_p, guidance=guidance, seed=seed
    )
    a, b = latents_of(model, Inputs(texts=[first, second]), encode_with, seed)
    with answer.progress() as progress:
        pairs = model.interpolate(
            a, b, points, lengths=lengths_of(model, length), progress=progress, **options
        )
    records = text_records(pairs.texts, [place / (points - 1) for place in range(points)], "at")
    answer.give(model, options | chosen(points=points, length=length), records, pairs.latents)
