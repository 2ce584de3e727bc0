"""`mmldlm decode`: latents to text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmldlm.cli import sampling_options as option
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

if TYPE_CHECKING:  # the command answers --help without torch
    from mmldlm.sampling.decode import Progress
    from mmldlm.sampling.stream import Inputs


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
