"""What the commands on a trained model share: options, the documents that a command line names, samples as records.

A record is a dictionary per document: a row of the table for people, an object of JSON for programs, a line of a file.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mmldlm import durable
from mmldlm.cli.options import Texts, argument, option
from mmldlm.cli.terminal import ProgressBar, print_json
from mmldlm.errors import UserError
from mmldlm.reports import counted
from mmldlm.untrusted import printable

if TYPE_CHECKING:  # the commands answer --help without torch
    import numpy as np

    from mmldlm.api.files import Act, Inputs
    from mmldlm.api.model import Model
    from mmldlm.api.values import SampledText

_INPUT, _HOW, _CHECK, _OUTPUT = "Input", "Sampling", "Self-check", "Output"
RUN_HELP = "Run folder, export folder, builtin:wordnet, or a name on the Hugging Face Hub."
OPTIONS = {
    "run": argument(str, ..., RUN_HELP),
    "texts": argument(Texts, None, "Texts.", metavar="TEXT"),
    "text": option(Texts, None, "The same as TEXT; may be repeated.", panel=_INPUT),
    "latents": option(Path | None, None, "Latents, .npy of shape (n, slots, channels).", panel=_INPUT),
    "from_split": option(str | None, None, "The first pairs of this split of the pair store.", panel=_INPUT),
    "in_file": option(
        Path | None, None, "Texts of any number, .txt or .jsonl; needs --out.", "--in", panel=_INPUT
    ),
    "num": option(int | None, None, "How many pairs of the split. [8]", "-n", "--num", panel=_INPUT),
    "data": option(Path | None, None, "The pair store, if it is not where the run had it.", panel=_INPUT),
    "encode_with": option(str, "encoder", "What turns texts into latents: encoder or model.", panel=_INPUT),
    "length": option(
        str | None, None, "Tokens of each text, or 'original'; else it is predicted.", panel=_HOW
    ),
    "steps": option(int | None, None, "Steps of the text sampler.", panel=_HOW),
    "latent_steps": option(int | None, None, "Steps of the latent sampler.", panel=_HOW),
    "order": option(
        str | None, None, "confidence, margin, ancestral, first_hitting, block or block:16.", panel=_HOW
    ),
    "solver": option(str | None, None, "ddim, dpmpp_2m or heun.", panel=_HOW),
    "turns": option(str | None, None, "interleaved, latent_first or text_first.", panel=_HOW),
    "temperature": option(float | None, None, "0: always the most probable token.", panel=_HOW),
    "top_p": option(float | None, None, "Keep the most probable tokens of this share.", panel=_HOW),
    "guidance": option(
        float | None, None, "1: none; larger follows the condition more; below 0 avoids it.", panel=_HOW
    ),
    "against": option(
        str | None, None, "A text, or latents .npy, that guidance leads away from.", panel=_HOW
    ),
    "seed": option(int, 0, "Another seed, another sample, where something is drawn.", panel=_HOW),
    "candidates": option(
        int | None, None, "Decode so many and keep the one nearest to the latent. "
        "[without a length the run's num_lengths, 3]", panel=_CHECK,
    ),
    "refine": option(int, 0, "Rounds that replace tokens to bring the text nearer.", panel=_CHECK),
    "check": option(str | None, None, "What reads candidates back: model or encoder. [model]", panel=_CHECK),
    "neighbours": option(int, 0, "Add so many nearest training texts of each latent.", panel=_OUTPUT),
    "out": option(Path | None, None, "Write records to this .jsonl file.", panel=_OUTPUT),
    "json_output": option(bool, False, "Print one JSON object.", "--json", panel=_OUTPUT),
    "device": option(str, "auto", "auto, cpu, cuda, ...", panel=_OUTPUT),
    "precision": option(
        str | None, None, "Of matrix products: fp32 or bf16. [bf16 if the device has it, else fp32]", panel=_OUTPUT
    ),
}  # fmt: skip
LATENT_IN = {
    "in_file": option(
        Path | None, None, "Texts or latents of any number, .txt, .jsonl or .npy; needs --out.", "--in", panel=_INPUT
    )
}  # fmt: skip
LATENT_OUT = {"out": option(Path | None, None, "Write latents to .npy, or records to .jsonl.", panel=_OUTPUT)}

TITLES = {
    "at": "at",
    "original": "original",
    "infill": "blanks",
    "text": "text",
    "cosine": "cosine",
    "neighbours": "nearest training texts",
}
DEFAULT_COUNT = 8


class Answer:
    """What becomes of the samples of one command."""

    def __init__(
        self, command: str, out: Path | None, *, as_json: bool = False, kinds: Sequence[str] = (".jsonl",)
    ) -> None:
        self.command, self.out, self.as_json = command, out, as_json
        if out is None:
            return
        if out.suffix not in kinds:
            raise UserError(f"--out {out}: the name of the file must end in {' or '.join(kinds)}")
        if out.is_dir() or not out.parent.is_dir():
            problem = "is a folder" if out.is_dir() else f"the folder {out.parent} does not exist"
            raise UserError(f"--out {out}: {problem}; name a file in a folder that exists")
        durable.require_writable(out)

    def progress(self) -> ProgressBar:
        """A bar while the model works."""
        return ProgressBar(self.command, visible=not self.as_json)

    def give(
        self,
        model: Model,
        options: dict[str, Any],
        records: list[dict[str, Any]],
        latents: np.ndarray | None = None,
    ) -> None:
        """Write the file, then print the table or the JSON object."""
        if self.out is not None:
            durable.replace_file(self.out, _content(self.out, records, latents))
        if self.as_json:
            report = {"command": self.command, "run": model.source, "step": model.step, "options": options}
            print_json(report | {"samples": records})
            return
        show_table(records)
        if self.out is not None:
            typer.echo(f"written to {self.out}")
        elif latents is not None:
            typer.echo("to get the latents: --out FILE.npy")

    def serve(
        self,
        model: Model,
        act: Act,
        options: dict[str, Any],
        in_file: Path | None,
        named: Callable[[], Inputs],
    ) -> None:
        """The records of a file, part by part, or of the documents that the command line names."""
        if in_file is not None:
            self.stream(model, in_file, act, options)
            return
        inputs = named()
        with self.progress() as progress:
            records: Any = act(inputs, progress)
        self.give(model, options, records)

    def stream(self, model: Model, source: Path, act: Act, options: dict[str, Any]) -> None:
        """A file in, a file out, part by part."""
        from mmldlm.api.files import process_file

        if self.out is None or self.as_json:
            raise UserError("--in: needs --out FILE, which is written as it goes, and no --json")
        title = f"{source.name} to {self.out.name}"
        with ProgressBar(title, unit="documents") as bar:
            request = [self.command, sorted(options.items(), key=str)]
            total, earlier = process_file(model, source, self.out, act, request, bar)
        resumed = f", {earlier} of them by an earlier call" if earlier else ""
        typer.echo(f"{counted(total, 'document')} written to {self.out}{resumed}")


def _content(path: Path, records: list[dict[str, Any]], latents: np.ndarray | None) -> bytes:
    if path.suffix != ".npy":
        return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    import numpy as np

    content = io.BytesIO()
    assert latents is not None
    np.save(content, latents)
    return content.getvalue()


def text_records(
    texts: Sequence[SampledText], originals: Sequence[Any] | None = None, name: str = "original"
) -> list[dict[str, Any]]:
    """Text, token ids and the result of the self-check, after the original where there is one."""
    records: list[dict[str, Any]] = []
    for index, text in enumerate(texts):
        before = {} if originals is None else {name: originals[index]}
        check = {} if text.check is None else asdict(text.check)
        records.append(before | {"text": str(text), "tokens": text.tokens.tolist()} | check)
    return records


def add_neighbours(
    records: list[dict[str, Any]], model: Model, latents: Any, num: int, data: Path | None
) -> None:
    """The training texts nearest to each latent."""
    if num:
        for record, near in zip(records, model.neighbours(latents, model.open_store(data), num), strict=True):
            record["neighbours"] = [{"text": one.text, "cosine": one.cosine} for one in near]


def show_table(records: list[dict[str, Any]]) -> None:
    """The original beside what became of it."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    columns = [name for name in TITLES if records[0].get(name) is not None]
    table = Table(show_lines=True)
    for name in columns:
        table.add_column(TITLES[name], overflow="fold")
    for record in records:
        table.add_row(*[Text(printable(_cell(record[name]))) for name in columns])
    Console().print(table)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(f"{near['cosine']:.4f} {near['text'] or '-'}" for near in value)
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def require_one_of(sources: dict[str, Any]) -> None:
    """Exactly one of these options is set."""
    chosen = [name for name, value in sources.items() if value not in (None, [])]
    if len(chosen) != 1:
        raise UserError(f"{'only ' if chosen else ''}one of {', '.join(sources)} is needed")


def require_effect(option: str, value: Any, *others: Any, needs: str) -> None:
    """An option that is set needs another one to have an effect."""
    if value not in (None, 0) and not any(others):
        raise UserError(f"{option}: has an effect only with {needs}; leave it out")


def require_texts(inputs: Inputs) -> list[str]:
    """The texts of documents, which a file may lack."""
    if inputs.texts is None:
        raise UserError("--in: a file of texts is needed, .txt or .jsonl with the field text")
    return inputs.texts


def named_documents(
    model: Model,
    texts: list[str] | None = None,
    latents: Path | None = None,
    from_split: str | None = None,
    num: int | None = None,
    data: Path | None = None,
) -> Inputs:
    """The documents that --text, --latents or --from-split name."""
    from mmldlm.api.files import Inputs, read_latents

    if texts:
        return Inputs(texts=texts)
    if latents is not None:
        return Inputs(latents=read_latents(latents, (model.num_slots, model.num_channels)))
    assert from_split is not None
    return _of_split(model, from_split, DEFAULT_COUNT if num is None else num, data)


def _of_split(model: Model, name: str, num: int, data: Path | None) -> Inputs:
    import numpy as np

    from mmldlm.api.files import Inputs

    split = model.open_store(data).split(name)
    if num < 1 or not len(split):
        raise UserError(f"-n {num}: at least 1 pair is needed; the split {name} has {len(split)}")
    indices = np.arange(min(num, len(split)))
    documents = split.read(indices)
    tokens = documents.split_tokens()
    stored = split.read_texts(indices)
    decoded = model.codec.texts_of(tokens)
    return Inputs(
        texts=[text or instead for text, instead in zip(stored, decoded, strict=True)],
        latents=documents.latents,
        document_ids=documents.ids.astype(np.uint64),
        lengths=documents.lengths,
    )


def latents_of(
    model: Model, inputs: Inputs, encode_with: str, seed: int = 0, *, tokenized: bool = False
) -> np.ndarray:
    """(n, slots, channels): given, or made of the texts by the encoder or by the model itself.

    `tokenized`: the model tokenizes the texts elsewhere in the same call, which warns of unknown words.
    """
    if encode_with not in ("encoder", "model"):
        raise UserError(f"--encode-with {encode_with}: allowed are encoder, model")
    if inputs.latents is not None:
        return inputs.latents
    texts = require_texts(inputs)
    if encode_with == "model":
        return model.encode(texts, seed=seed)
    from mmldlm.preparation.encoders import EncoderUnavailableError

    try:
        return model.codec.embed(texts) if tokenized else model.embed(texts)
    except EncoderUnavailableError as error:
        raise UserError(f"{error}; --encode-with model makes them by the model itself") from None


def lengths_of(model: Model, word: str | None, inputs: Inputs | None = None) -> Any:
    """What --length says: None, a number, or the lengths of the original texts."""
    if word is None:
        return None
    if word == "original":
        if inputs is None or inputs.texts is None:
            raise UserError("--length original: there is no original text here; give a number")
        if inputs.lengths is not None:
            return inputs.lengths
        return [len(tokens) for tokens in model.tokenize(inputs.texts)]
    if not (word.isascii() and word.isdigit() and 1 <= int(word) <= model.max_length):
        raise UserError(
            f"--length {word}: allowed are 'original' and 1 to {model.max_length}, the longest in training"
        )
    return int(word)


def against_of(model: Model, word: str | None, encode_with: str, seed: int) -> Any:
    """What --against names: latents of a file, or of a text."""
    from mmldlm.api.files import Inputs, read_latents

    if word is None:
        return None
    if word.endswith(".npy"):
        return read_latents(Path(word), (model.num_slots, model.num_channels))
    return latents_of(model, Inputs(texts=[word]), encode_with, seed)
