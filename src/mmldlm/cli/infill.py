"""`mmldlm infill`: texts whose blanks are filled in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmldlm import randomness
from mmldlm.cli import sampling_options as option
from mmldlm.cli.samples import (
    Answer,
    against_of,
    chosen,
    latents_of,
    named_documents,
    require_effect,
    require_one_of,
    text_records,
)
from mmldlm.errors import UserError

if TYPE_CHECKING:  # the command answers --help without torch
    from mmldlm.api.model import Model
    from mmldlm.api.values import SampledText
    from mmldlm.sampling.decode import Progress
    from mmldlm.sampling.stream import Inputs

Texts = Annotated[
    list[str] | None,
    typer.Argument(metavar="[TEXT]...", help="Texts with blanks: ____ is one token, ____{3} three."),
]
About = Annotated[
    list[str] | None, typer.Option("--about", help="A text whose latent the filled text is to suit.")
]


def infill(
    run: option.Run,
    texts: Texts = None,
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
    work = _Filling(model, options, encode_with, against_of(model, against, encode_with, seed))
    request = options | chosen(about=about, latents=latents, against=against, encode_with=encode_with)

    def named() -> Inputs:
        condition = named_documents(model, about, latents) if about or latents is not None else Inputs()
        return replace(condition, infill=texts)

    answer.serve(model, work.records, request, in_file, named)


@dataclass
class _Filling:
    model: Model
    options: dict[str, Any]
    encode_with: str
    against: Any

    def records(self, inputs: Inputs, progress: Progress) -> list[dict[str, Any]]:
        if inputs.infill is None and inputs.texts is not None:  # the lines of a .txt file
            inputs = replace(inputs, infill=inputs.texts, texts=None)
        if inputs.infill is None:
            raise UserError(
                "--in: a file of texts with blanks is needed, .txt or .jsonl with the field infill"
            )
        texts = self._fill(inputs.infill, inputs, progress)
        blanks = inputs.infill * len(texts) if len(inputs.infill) == 1 else inputs.infill
        return text_records(texts, blanks, "infill")

    def _fill(self, blanks: list[str], inputs: Inputs, progress: Progress) -> list[SampledText]:
        from mmldlm.sampling.pack import content_ids

        if inputs.texts is None and inputs.latents is None:
            return self.model.infill(blanks, progress=progress, **self.options)
        latents = latents_of(self.model, inputs, self.encode_with, self.options["seed"])
        ids = None
        if 1 in (len(blanks), len(latents)) or len(blanks) == len(latents):
            ids = randomness.make_key(content_ids(blanks), inputs.ids)
        return self.model.infill(
            blanks, latents, ids=ids, against=self.against, progress=progress, **self.options
        )
