"""`mmldlm encode`: text to latents, by the model itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmldlm.cli import sampling_options as option
from mmldlm.cli.samples import (
    Answer,
    add_neighbours,
    chosen,
    latents_of,
    named_documents,
    require_effect,
    require_one_of,
)
from mmldlm.errors import UserError

if TYPE_CHECKING:  # the command answers --help without torch
    import numpy as np

    from mmldlm.api.model import Model
    from mmldlm.sampling.decode import Progress
    from mmldlm.sampling.stream import Inputs

Texts = Annotated[list[str] | None, typer.Argument(metavar="[TEXT]...", help="Texts.")]
By = Annotated[str, typer.Option("--encode-with", help="model, or encoder: that of the training latents.")]
Compare = Annotated[
    bool, typer.Option("--compare/--no-compare", help="Add the cosine to the encoder's own latent.")
]
Steps = Annotated[int | None, typer.Option("--steps", help="Steps of the latent sampler. [1]")]


def encode(
    run: option.Run,
    texts: Texts = None,
    from_split: option.FromSplit = None,
    in_file: option.InFile = None,
    num: option.Count = None,
    data: option.Data = None,
    encode_with: By = "model",
    compare: Compare = True,
    steps: Steps = None,
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
    work = _Encoding(model, options, encode_with, compare, neighbours, data)
    request = options | chosen(encode_with=encode_with, compare=compare, neighbours=neighbours)
    if in_file is not None:
        to_array = out is not None and out.suffix == ".npy"
        answer.stream(model, in_file, work.latents if to_array else work.records, request)
        return
    inputs = named_documents(model, texts, None, from_split, num, data)
    with answer.progress() as progress:
        latents = work.latents(inputs, progress)
    answer.give(model, request, work.describe(inputs, latents), latents)


@dataclass
class _Encoding:
    model: Model
    options: dict[str, Any]
    encode_with: str
    compare: bool
    neighbours: int
    data: Path | None

    def latents(self, inputs: Inputs, progress: Progress) -> np.ndarray:
        if inputs.texts is None:
            raise UserError("--in: a file of texts is needed, .txt or .jsonl with the field text")
        if self.encode_with == "model":
            return self.model.encode(inputs.texts, ids=inputs.ids, progress=progress, **self.options)
        return latents_of(self.model, inputs, self.encode_with)

    def records(self, inputs: Inputs, progress: Progress) -> list[dict[str, Any]]:
        return self.describe(inputs, self.latents(inputs, progress))

    def describe(self, inputs: Inputs, latents: np.ndarray) -> list[dict[str, Any]]:
        cosines, texts = self._cosines(inputs, latents), inputs.texts or []
        records = [
            {"text": text, "cosine": cosine, "latent": latent.tolist()}
            for text, cosine, latent in zip(texts, cosines, latents, strict=True)
        ]
        add_neighbours(records, self.model, latents, self.neighbours, self.data)
        return records

    def _cosines(self, inputs: Inputs, latents: np.ndarray) -> list[float] | list[None]:
        from mmldlm.latents import cosine

        if self.encode_with == "model" and self.compare:
            try:
                return cosine(latents, latents_of(self.model, inputs, "encoder")).tolist()
            except UserError as error:
                self.compare = False
                typer.echo(f"note: no comparison with the encoder: {error}", err=True)
        return [None] * len(latents)
