"""Options that the commands on a trained model share, each written once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_INPUT, _HOW, _CHECK, _OUTPUT = "Input", "Sampling", "Self-check", "Output"


def _option(*names: str, help: str, panel: str) -> typer.models.OptionInfo:
    return typer.Option(*names, help=help, rich_help_panel=panel)


Run = Annotated[str, typer.Argument(help="Run folder, export folder, or a name on the Hugging Face Hub.")]

Text = Annotated[list[str] | None, _option("--text", help="A text; may be repeated.", panel=_INPUT)]
LatentFile = Annotated[
    Path | None,
    _option("--latents", help="Latents, .npy of shape (n, slots, channels).", panel=_INPUT),
]
FromSplit = Annotated[
    str | None, _option("--from-split", help="The first pairs of this split of the pair store.", panel=_INPUT)
]
Count = Annotated[int | None, _option("-n", help="How many pairs of the split. [8]", panel=_INPUT)]
InFile = Annotated[
    Path | None,
    _option("--in", help="A file of any size: .txt, .jsonl or .npy; needs --out.", panel=_INPUT),
]
Data = Annotated[
    Path | None, _option("--data", help="The pair store, if it is not where the run had it.", panel=_INPUT)
]
EncodeWith = Annotated[
    str, _option("--encode-with", help="What turns texts into latents: encoder or model.", panel=_INPUT)
]

Length = Annotated[
    str | None,
    _option("--length", help="Tokens of each text, or 'original'; else it is predicted.", panel=_HOW),
]
Steps = Annotated[int | None, _option("--steps", help="Steps of the text sampler.", panel=_HOW)]
LatentSteps = Annotated[
    int | None, _option("--latent-steps", help="Steps of the latent sampler.", panel=_HOW)
]
Order = Annotated[
    str | None,
    _option("--order", help="confidence, margin, ancestral, first_hitting, block or block:16.", panel=_HOW),
]
Solver = Annotated[str | None, _option("--solver", help="ddim, dpmpp_2m or heun.", panel=_HOW)]
Turns = Annotated[str | None, _option("--turns", help="interleaved, latent_first or text_first.", panel=_HOW)]
Temperature = Annotated[
    float | None, _option("--temperature", help="0: always the most probable token.", panel=_HOW)
]
TopP = Annotated[
    float | None, _option("--top-p", help="Keep the most probable tokens of this share.", panel=_HOW)
]
Guidance = Annotated[
    float | None,
    _option("--guidance", help="1: none; larger follows the condition more; below 0 avoids it.", panel=_HOW),
]
Against = Annotated[
    str | None,
    _option("--against", help="A text, or latents .npy, that guidance leads away from.", panel=_HOW),
]
Seed = Annotated[int, _option("--seed", help="Another seed, another sample.", panel=_HOW)]

Candidates = Annotated[
    int | None,
    _option(
        "--candidates",
        help="Decode so many and keep the one nearest to the latent. [without a length the run's num_lengths, 3]",
        panel=_CHECK,
    ),
]
Refine = Annotated[
    int, _option("--refine", help="Rounds that replace tokens to bring the text nearer.", panel=_CHECK)
]
CheckWith = Annotated[
    str | None,
    _option("--check", help="What reads candidates back: model or encoder. [model]", panel=_CHECK),
]

Neighbours = Annotated[
    int, _option("--neighbours", help="Add so many nearest training texts of each latent.", panel=_OUTPUT)
]
Out = Annotated[Path | None, _option("--out", help="Write records to this .jsonl file.", panel=_OUTPUT)]
LatentOut = Annotated[
    Path | None, _option("--out", help="Write latents to .npy, or records to .jsonl.", panel=_OUTPUT)
]
Json = Annotated[bool, _option("--json", help="Print one JSON object.", panel=_OUTPUT)]
Device = Annotated[str, _option("--device", help="auto, cpu, cuda, ...", panel=_OUTPUT)]
Precision = Annotated[
    str | None,
    _option(
        "--precision", help="Of matrix products: fp32 or bf16. [bf16 on a GPU, else fp32]", panel=_OUTPUT
    ),
]
