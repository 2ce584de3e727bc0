"""`mmldlm paraphrase`: texts near given ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmldlm.cli import sampling_options as option
from mmldlm.cli.samples import Answer, chosen, latents_of, lengths_of, require_one_of, text_records
from mmldlm.errors import UserError

if TYPE_CHECKING:  # the command answers --help without torch
    from mmldlm.sampling.decode import Progress
    from mmldlm.sampling.stream import Inputs

Texts = Annotated[list[str] | None, typer.Argument(metavar="[TEXT]...", help="Texts.")]
Strength = Annotated[float, typer.Option("--strength", help="How much of it is noise: up to 1.")]
Vary = Annotated[str, typer.Option("--vary", help="What is noised: latent, text or both.")]


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
        if inputs.texts is None:
            raise UserError("--in: a file of texts is needed, .txt or .jsonl with the field text")
        latents, lengths = latents_of(model, inputs, encode_with, seed), lengths_of(model, length, inputs)
        varied = model.paraphrase(
            inputs.texts, latents=latents, lengths=lengths, progress=progress, **options
        )
        return text_records(varied, inputs.texts)

    request = options | chosen(length=length, encode_with=encode_with)
    answer.serve(model, records, request, in_file, lambda: Inputs(texts=texts))
