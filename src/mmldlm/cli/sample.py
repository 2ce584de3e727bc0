"""`mmldlm sample`: decode latents into text, encode text into latents, or make both from nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmldlm.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from mmldlm.checkpoint.loaded import LoadedModel
    from mmldlm.sampling.options import SamplingOptions
    from mmldlm.sampling.records import Samples
    from mmldlm.sampling.sources import Given

DEFAULT_COUNT = 8
SOURCES = {"l2t": ("--text", "--latents", "--from-split"), "t2l": ("--text", "--from-split"), "joint": ()}
"""What each mode may be given; exactly one of them, where there are any."""
NO_EFFECT = {
    "l2t": ("--num-latent-steps",),
    "t2l": ("--text-sampler", "--num-sampling-steps", "--temperature", "--top-p", "--length"),
    "joint": (),
}
FILES = {"l2t": (".jsonl",), "t2l": (".npy", ".jsonl"), "joint": (".npy", ".jsonl")}


def sample(
    run: Annotated[Path, typer.Argument(help="Folder of a run or of an export.")],
    mode: Annotated[
        str, typer.Option(help="l2t: latent to text; t2l: text to latent; joint: both from nothing.")
    ],
    text: Annotated[list[str] | None, typer.Option(help="A text; may be repeated.")] = None,
    latents: Annotated[
        Path | None, typer.Option(help="Raw latents: .npy of shape (n, slots, channels).")
    ] = None,
    from_split: Annotated[str | None, typer.Option(help="Take the first pairs of this split.")] = None,
    num: Annotated[
        int | None, typer.Option("-n", help="How many, with --from-split or joint; 8 if not told.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Pair store of --from-split; that of the run if not told.")
    ] = None,
    length: Annotated[
        str | None, typer.Option(help="Tokens of each text, or 'original'; without it the model predicts it.")
    ] = None,
    text_sampler: Annotated[str | None, typer.Option(help="confidence, ancestral or hybrid.")] = None,
    num_sampling_steps: Annotated[int | None, typer.Option(help="Steps of the text sampler.")] = None,
    num_latent_steps: Annotated[
        int | None, typer.Option(help="Steps of the latent sampler. [t2l: 1]")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0: always the most probable token.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the most probable tokens of this share.")] = None,
    guidance: Annotated[
        float | None, typer.Option(help="1: none; larger follows the condition more.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Another seed, another sample.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write .npy (raw latents) or .jsonl (records).")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Sample from a trained model. Options that are not given are those of the run."""
    asked = {
        "text_sampler": text_sampler,
        "num_sampling_steps": num_sampling_steps,
        "num_latent_steps": num_latent_steps,
        "temperature": temperature,
        "top_p": top_p,
        "guidance": guidance,
    }
    changes = {name: value for name, value in asked.items() if value is not None}
    if mode == "t2l" and num_latent_steps is not None:
        changes["num_encode_steps"] = num_latent_steps
    words = [f"--{name.replace('_', '-')}" for name, value in asked.items() if value is not None] + [
        "--length"
    ] * (length is not None)
    sources = {"--text": text or None, "--latents": latents, "--from-split": from_split}
    _check_usage(mode, [name for name, value in sources.items() if value is not None], words, num, data, out)

    from mmldlm.checkpoint.loaded import load_model
    from mmldlm.cli.device import device_of
    from mmldlm.sampling.options import SamplingOptions
    from mmldlm.sampling.records import write_samples

    model = load_model(run, device_of(device))
    options = SamplingOptions.from_config(model.config.sampling, **changes, seed=seed)
    count = DEFAULT_COUNT if num is None else num
    given = _given(model, text, latents, from_split, data, count)
    lengths = _lengths(model, length, count if given is None else len(given.ids), given)
    samples = _sample(mode, model, given, count, options, lengths, show_bar=not json_output)
    if out is not None:
        write_samples(out, samples)
    if json_output:
        report = {"mode": mode, "run": str(run), "step": model.step, "options": vars(options)}
        print(json.dumps(report | {"samples": samples.records}, ensure_ascii=False))
    else:
        _show(samples, out)


def _check_usage(
    mode: str, sources: list[str], words: list[str], num: int | None, data: Path | None, out: Path | None
) -> None:
    """Combinations that make no sense are refused before anything is loaded."""
    if mode not in SOURCES:
        raise UserError(f"--mode {mode}: allowed are {', '.join(SOURCES)}")
    allowed = SOURCES[mode]
    for name in [*sources, *words]:
        if name in NO_EFFECT[mode] or (name in sources and name not in allowed):
            raise UserError(f"{name}: has no effect with --mode {mode}; leave it out")
    if allowed and len(sources) != 1:
        raise UserError(f"--mode {mode}: needs {'only ' if sources else ''}one of {', '.join(allowed)}")
    if num is not None and mode != "joint" and "--from-split" not in sources:
        raise UserError("-n: has an effect only with --from-split or --mode joint; leave it out")
    if num is not None and num < 1:
        raise UserError(f"-n {num}: allowed is at least 1")
    if data is not None and "--from-split" not in sources:
        raise UserError("--data: has an effect only with --from-split; leave it out")
    if out is not None:
        _check_out(mode, out)


def _check_out(mode: str, out: Path) -> None:
    if out.suffix not in FILES[mode]:
        raise UserError(
            f"--out {out}: with --mode {mode} the name of the file ends in {' or '.join(FILES[mode])}"
        )
    if out.is_dir() or not out.parent.is_dir():
        problem = "is a folder" if out.is_dir() else f"the folder {out.parent} does not exist"
        raise UserError(f"--out {out}: {problem}; name a file in a folder that exists")


def _given(
    model: LoadedModel,
    text: list[str] | None,
    latents: Path | None,
    from_split: str | None,
    data: Path | None,
    count: int,
) -> Given | None:
    from mmldlm.sampling.sources import given_latents, given_split, given_texts

    if text:
        return given_texts(model, text)
    if latents is not None:
        return given_latents(model, latents)
    if from_split is not None:
        return given_split(model, data or Path(model.config.data.store), from_split, count)
    return None


def _lengths(model: LoadedModel, word: str | None, count: int, given: Given | None) -> np.ndarray | None:
    """What --length says, one number a document; None: the model predicts them."""
    import numpy as np

    if word is None:
        return None
    if word == "original":
        if given is None or given.lengths is None:
            raise UserError("--length original: there is no original text here; give a number")
        return given.lengths
    longest = model.denoiser.shape.max_length
    if not (word.isascii() and word.isdigit() and 1 <= int(word) <= longest):
        raise UserError(
            f"--length {word}: allowed are 'original' and 1 to {longest}, the longest the model knows"
        )
    return np.full(count, int(word))


def _sample(
    mode: str,
    model: LoadedModel,
    given: Given | None,
    count: int,
    options: SamplingOptions,
    lengths: np.ndarray | None,
    *,
    show_bar: bool,
) -> Samples:
    from mmldlm.corruption.times import modes_of_run
    from mmldlm.sampling.records import sample_latents, sample_pairs, sample_texts

    if given is None:
        if modes_of_run(model.config.corruption).joint == 0:
            typer.echo("note: in training, text and latent were never noisy together (mode joint)", err=True)
        with _Bar("sampling", show_bar) as bar:
            return sample_pairs(model, count, options, lengths, bar)
    if mode == "l2t":
        latents = _encoder_latents(model, given)
        with _Bar("decoding", show_bar) as bar:
            return sample_texts(model, given, latents, options, lengths, bar)
    real = None
    try:
        real = _encoder_latents(model, given)
    except UserError as error:
        typer.echo(f"note: cannot compare with the encoder: {error}", err=True)
    with _Bar("encoding", show_bar) as bar:
        return sample_latents(model, given, real, options, bar)


def _encoder_latents(model: LoadedModel, given: Given) -> np.ndarray:
    """Raw latents of what is given: its own, or those of the encoder that made the training data."""
    if given.latents is not None:
        return given.latents
    if model.encoder is None:
        raise UserError(
            "the model does not say which encoder made its latents; use --latents or --from-split"
        )
    from mmldlm.prepare.encoders import Encoder

    assert given.texts is not None
    return Encoder.from_spec(model.encoder, device=model.device.type).encode(given.texts)


def _show(samples: Samples, out: Path | None) -> None:
    """A table for people: the original beside what became of it."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    first = samples.records[0]
    titles = {
        "original": "original",
        "text": "decoded" if "original" in first else "text",
        "cosine": "cosine",
    }
    columns = [name for name in titles if first.get(name) is not None]
    table = Table(show_lines=True)
    for name in columns:
        table.add_column(titles[name], overflow="fold")
    for record in samples.records:
        cells = [record[name] for name in columns]
        table.add_row(*[Text(f"{cell:.4f}" if isinstance(cell, float) else cell) for cell in cells])
    console = Console()
    console.print(table)
    if out is not None:
        console.print(Text(f"written to {out}"), soft_wrap=True)
    elif samples.latents is not None:
        console.print(Text("the latents themselves: --out FILE.npy"), soft_wrap=True)


class _Bar:
    """A progress bar in a terminal, and none elsewhere."""

    def __init__(self, what: str, wanted: bool) -> None:
        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True)
        self._progress = Progress(
            console=console, transient=True, disable=not (wanted and console.is_terminal)
        )
        self._task = self._progress.add_task(what, total=None)

    def __call__(self, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done, total=total)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._progress.stop()
