"""`mmldlm interpolate`: texts between two texts."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mmldlm.cli import sampling_options as option
from mmldlm.cli.samples import (
    Answer,
    add_neighbours,
    chosen,
    latents_of,
    lengths_of,
    require_effect,
    text_records,
)
from mmldlm.errors import UserError

First = Annotated[str, typer.Argument(metavar="A", help="The text at one end.")]
Second = Annotated[str, typer.Argument(metavar="B", help="The text at the other end.")]
Points = Annotated[int, typer.Option("--points", help="Latents from one end to the other.")]


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
    candidates: option.Candidates = None,
    refine: option.Refine = 0,
    check: option.CheckWith = None,
    neighbours: option.Neighbours = 0,
    data: option.Data = None,
    out: option.LatentOut = None,
    json_output: option.Json = False,
    device: option.Device = "auto",
) -> None:
    """Decode the latents between those of two texts."""
    if points < 2:
        raise UserError(f"--points {points}: at least 2 are needed")
    require_effect("--check", check, (candidates or 1) > 1, refine, needs="--candidates or --refine")
    require_effect("--data", data, neighbours, needs="--neighbours")
    answer = Answer("interpolate", out, as_json=json_output, kinds=(".npy", ".jsonl"))
    from mmldlm.api.model import load
    from mmldlm.sampling.stream import Inputs

    model = load(run, device)
    options: dict[str, Any] = chosen(
        steps=steps, order=order, temperature=temperature, top_p=top_p, guidance=guidance, seed=seed,
        candidates=candidates, refine=refine, check=check,
    )  # fmt: skip
    a, b = latents_of(model, Inputs(texts=[first, second]), encode_with, seed)
    with answer.progress() as progress:
        pairs = model.interpolate(
            a, b, points, lengths=lengths_of(model, length), progress=progress, **options
        )
    records = text_records(pairs.texts, [place / (points - 1) for place in range(points)], "at")
    add_neighbours(records, model, pairs.latents, neighbours, data)
    answer.give(model, options | chosen(points=points, length=length), records, pairs.latents)
