"""`mmldlm sample`: decode latents into text, encode text into latents, fill blanks, or make both from nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmldlm.errors import UserError

if TYPE_CHECKING:
    from mmldlm.cli.sample_work import Work
    from mmldlm.sampling.options import SamplingOptions

DEFAULT_COUNT = 8
_GIVEN, _HOW, _CHECK = "What is given", "How it is sampled", "Self-check"
SOURCES = {
    "l2t": ("--text", "--latents", "--from-split", "--in", "--paraphrase", "--interpolate"),
    "t2l": ("--text", "--from-split", "--in"),
    "joint": (),
}
"""What each mode may be given; exactly one of them, where there are any. --infill does without."""
NO_EFFECT = {
    "l2t": ("--num-latent-steps", "--latent-sampler", "--joint-order"),
    "t2l": (
        "--text-sampler",
        "--num-sampling-steps",
        "--block-length",
        "--temperature",
        "--top-p",
        "--length",
        "--joint-order",
        "--infill",
        "--against",
        "--encode-with",
        "--candidates",
        "--refine",
        "--check",
    ),
    "joint": (
        "--infill",
        "--against",
        "--encode-with",
        "--candidates",
        "--refine",
        "--check",
    ),
}
FILES = {"l2t": (".jsonl",), "t2l": (".npy", ".jsonl"), "joint": (".npy", ".jsonl")}
NEEDS = {
    "--strength": ("--paraphrase",),
    "--vary": ("--paraphrase",),
    "--points": ("--interpolate",),
    "--check": ("--candidates", "--refine"),
    "--data": ("--from-split", "--neighbours"),
}
"""Options that mean something only beside another one."""
EXCLUDES = {
    "--infill": ("--length", "--candidates", "--refine", "--in", "--paraphrase", "--interpolate"),
    "--paraphrase": ("--candidates", "--refine", "--against"),
    "--in": ("--json",),
}


def sample(
    run: Annotated[Path, typer.Argument(help="Folder of a run or of an export.")],
    mode: Annotated[
        str, typer.Option(help="l2t: latent to text; t2l: text to latent; joint: both from nothing.")
    ],
    text: Annotated[
        list[str] | None, typer.Option(help="A text; may be repeated.", rich_help_panel=_GIVEN)
    ] = None,
    latents: Annotated[
        Path | None,
        typer.Option(help="Raw latents: .npy of shape (n, slots, channels).", rich_help_panel=_GIVEN),
    ] = None,
    from_split: Annotated[
        str | None, typer.Option(help="Take the first pairs of this split.", rich_help_panel=_GIVEN)
    ] = None,
    in_file: Annotated[
        Path | None,
        typer.Option(
            "--in", help="A file of documents, .txt, .jsonl or .npy, of any size.", rich_help_panel=_GIVEN
        ),
    ] = None,
    infill: Annotated[
        list[str] | None,
        typer.Option(
            help="A text with blanks ____ to be filled in; may be repeated.", rich_help_panel=_GIVEN
        ),
    ] = None,
    paraphrase: Annotated[
        list[str] | None, typer.Option(help="A text to be varied; may be repeated.", rich_help_panel=_GIVEN)
    ] = None,
    strength: Annotated[
        float | None, typer.Option(help="How much of it is noise: up to 1. [0.5]", rich_help_panel=_GIVEN)
    ] = None,
    vary: Annotated[
        str | None, typer.Option(help="What is noised: latent, text or both. [both]", rich_help_panel=_GIVEN)
    ] = None,
    interpolate: Annotated[
        tuple[str, str] | None,
        typer.Option(help="Two texts; the latents between them are decoded.", rich_help_panel=_GIVEN),
    ] = None,
    points: Annotated[
        int | None, typer.Option(help="Latents from one end to the other. [5]", rich_help_panel=_GIVEN)
    ] = None,
    num: Annotated[
        int | None,
        typer.Option(
            "-n", help="How many, with --from-split or joint; 8 if not told.", rich_help_panel=_GIVEN
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Pair store of --from-split and --neighbours; that of the run if not told.",
            rich_help_panel=_GIVEN,
        ),
    ] = None,
    neighbours: Annotated[
        int | None, typer.Option(help="Add so many nearest training texts of each latent.")
    ] = None,
    length: Annotated[
        str | None,
        typer.Option(
            help="Tokens of each text, or 'original'; without it the model predicts it.", rich_help_panel=_HOW
        ),
    ] = None,
    encode_with: Annotated[
        str | None,
        typer.Option(
            help="What turns texts into latents: encoder or model. [encoder]", rich_help_panel=_GIVEN
        ),
    ] = None,
    text_sampler: Annotated[
        str | None,
        typer.Option(
            help="confidence, margin, ancestral, first_hitting or block.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    block_length: Annotated[
        int | None, typer.Option(help="Tokens of a block of the sampler block.", rich_help_panel=_HOW)
    ] = None,
    num_sampling_steps: Annotated[
        int | None, typer.Option(help="Steps of the text sampler.", rich_help_panel=_HOW)
    ] = None,
    latent_sampler: Annotated[
        str | None, typer.Option(help="ddim, dpmpp_2m or heun.", rich_help_panel=_HOW)
    ] = None,
    num_latent_steps: Annotated[
        int | None, typer.Option(help="Steps of the latent sampler. [t2l: 1]", rich_help_panel=_HOW)
    ] = None,
    joint_order: Annotated[
        str | None, typer.Option(help="interleaved, latent_first or text_first.", rich_help_panel=_HOW)
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0: always the most probable token.", rich_help_panel=_HOW)
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Keep the most probable tokens of this share.", rich_help_panel=_HOW)
    ] = None,
    guidance: Annotated[
        float | None,
        typer.Option(
            help="1: none; larger follows the condition more, below 0 flees it.", rich_help_panel=_HOW
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="A text or .npy of raw latents that guidance leads away from.", rich_help_panel=_HOW
        ),
    ] = None,
    candidates: Annotated[
        int | None,
        typer.Option(
            help="Decode so many and keep the one whose own latent is nearest.", rich_help_panel=_CHECK
        ),
    ] = None,
    refine: Annotated[
        int | None,
        typer.Option(
            help="Rounds in which the text is brought nearer to its latent.", rich_help_panel=_CHECK
        ),
    ] = None,
    check: Annotated[
        str | None,
        typer.Option(
            help="What turns candidates back into latents: model or encoder. [model]", rich_help_panel=_CHECK
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Another seed, another sample.", rich_help_panel=_HOW)] = 0,
    out: Annotated[Path | None, typer.Option(help="Write .npy (raw latents) or .jsonl (records).")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Sample from a trained model. Options that are not given are those of the run."""
    asked: dict[str, Any] = {
        "text_sampler": text_sampler,
        "block_length": block_length,
        "num_sampling_steps": num_sampling_steps,
        "latent_sampler": latent_sampler,
        "num_latent_steps": num_latent_steps,
        "joint_order": joint_order,
        "temperature": temperature,
        "top_p": top_p,
        "guidance": guidance,
    }
    wanted: dict[str, Any] = {
        "text": text, "latents": latents, "from_split": from_split, "in": in_file, "infill": infill,
        "paraphrase": paraphrase, "strength": strength, "vary": vary, "interpolate": interpolate,
        "points": points, "data": data, "neighbours": neighbours, "length": length, "encode_with": encode_with,
        "against": against, "candidates": candidates, "refine": refine,
        "check": check,
    }  # fmt: skip
    words = [
        f"--{name.replace('_', '-')}" for name, value in (wanted | asked).items() if value not in (None, [])
    ]
    _check_usage(mode, [*words, *["--json"] * json_output], num, out)
    _check_values(wanted)

    from mmldlm.checkpoint.loaded import load_model
    from mmldlm.cli.device import device_of
    from mmldlm.cli.sample_work import Request, Work
    from mmldlm.sampling.options import SamplingOptions

    changes = {name: value for name, value in asked.items() if value is not None}
    if mode == "t2l" and num_latent_steps is not None:
        changes["num_encode_steps"] = num_latent_steps
    fields = {"texts" if name == "text" else name: value for name, value in wanted.items() if name != "in"}
    given = {name: value for name, value in fields.items() if value not in (None, [])}
    request = Request(
        mode=mode, count=DEFAULT_COUNT if num is None else num, counted=num is not None, **given
    )
    model = load_model(run, device_of(device))
    options = SamplingOptions.from_config(model.config.sampling, **changes, seed=seed)
    work = Work(model, request, options)
    if in_file is not None:
        assert out is not None
        _stream(work, in_file, out, [str(run.resolve()), model.step, vars(request), vars(options)])
    else:
        _once(work, run, options, out, json_output=json_output)


def _once(work: Work, run: Path, options: SamplingOptions, out: Path | None, *, json_output: bool) -> None:
    """Everything at once, in memory."""
    from mmldlm.cli.sample_show import Bar, show
    from mmldlm.sampling.records import write_samples

    given = work.given()
    what = {"l2t": "decoding", "t2l": "encoding", "joint": "sampling"}[work.request.mode]
    with Bar(what, not json_output) as bar:
        samples = work.run(given, bar)
    if out is not None:
        write_samples(out, samples)
    if json_output:
        report = {
            "mode": work.request.mode,
            "run": str(run),
            "step": work.model.step,
            "options": vars(options),
        }
        print(json.dumps(report | {"samples": samples.records}, ensure_ascii=False))
    else:
        show(samples, out)


def _stream(work: Work, source: Path, out: Path, asked: list[Any]) -> None:
    """A file in, a file out."""
    from mmldlm.cli.sample_show import Bar
    from mmldlm.cli.sample_work import stream

    with Bar(f"{source.name} to {out.name}", True, lines=True) as bar:
        total, before = stream(work, source, out, asked, bar)
    resumed = f", {before} of them by an earlier call" if before else ""
    typer.echo(f"{total} documents written to {out}{resumed}")


def _check_usage(mode: str, words: list[str], num: int | None, out: Path | None) -> None:
    """Combinations that make no sense are refused before anything is loaded."""
    if mode not in SOURCES:
        raise UserError(f"--mode {mode}: allowed are {', '.join(SOURCES)}")
    everything = {source for sources in SOURCES.values() for source in sources}
    allowed, sources = SOURCES[mode], [word for word in words if word in everything]
    varied = "--paraphrase" in words
    for name in words:
        no_effect = name in NO_EFFECT[mode] and not (varied and name in NO_EFFECT["l2t"][:2])
        if no_effect or (name in sources and name not in allowed):
            raise UserError(f"{name}: has no effect with --mode {mode}; leave it out")
        if name in NEEDS and not set(NEEDS[name]) & set(words):
            raise UserError(f"{name}: has an effect only with {' or '.join(NEEDS[name])}; leave it out")
        for other in EXCLUDES.get(name, ()):
            if other in words:
                raise UserError(f"{name}: does not go with {other}; leave one of them out")
    least = 0 if "--infill" in words else 1
    if allowed and not least <= len(sources) <= 1:
        raise UserError(f"--mode {mode}: needs {'only ' if sources else ''}one of {', '.join(allowed)}")
    if num is not None and mode != "joint" and "--from-split" not in sources:
        raise UserError("-n: has an effect only with --from-split or --mode joint; leave it out")
    if num is not None and num < 1:
        raise UserError(f"-n {num}: allowed is at least 1")
    if "--in" in words and (out is None or out.suffix != ".jsonl"):
        raise UserError("--in: needs --out FILE.jsonl, which is written as it goes")
    if out is not None:
        _check_out(mode, out)


def _check_values(wanted: dict[str, Any]) -> None:
    """Values that no setting checks."""
    for name, low in (("candidates", 1), ("refine", 0), ("points", 2), ("neighbours", 1)):
        if wanted[name] is not None and wanted[name] < low:
            raise UserError(f"--{name} {wanted[name]}: allowed is at least {low}")
    choices = {
        "vary": ("latent", "text", "both"),
        "check": ("model", "encoder"),
        "encode_with": ("encoder", "model"),
    }
    for name, allowed in choices.items():
        if wanted[name] is not None and wanted[name] not in allowed:
            raise UserError(f"--{name.replace('_', '-')} {wanted[name]}: allowed are {', '.join(allowed)}")
    if wanted["strength"] is not None and not 0 < wanted["strength"] <= 1:
        raise UserError(f"--strength {wanted['strength']}: allowed is more than 0 and at most 1")
    if wanted["paraphrase"] and wanted["length"] is not None and wanted["vary"] != "latent":
        raise UserError(
            "--length: a text of which tokens stay keeps its length; leave it out, or --vary latent"
        )


def _check_out(mode: str, out: Path) -> None:
    if out.suffix not in FILES[mode]:
        raise UserError(
            f"--out {out}: with --mode {mode} the name of the file ends in {' or '.join(FILES[mode])}"
        )
    if out.is_dir() or not out.parent.is_dir():
        problem = "is a folder" if out.is_dir() else f"the folder {out.parent} does not exist"
        raise UserError(f"--out {out}: {problem}; name a file in a folder that exists")
