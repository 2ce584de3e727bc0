"""`mmldlm generate`: texts and their latents from nothing."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mmldlm.cli import sampling_options as option
from mmldlm.cli.samples import Answer, add_neighbours, chosen, lengths_of, require_effect, text_records
from mmldlm.errors import UserError

Number = Annotated[int, typer.Option("-n", help="How many pairs.")]
Length = Annotated[
    str | None, typer.Option("--length", help="Tokens of each text; without it they are drawn.")
]


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
