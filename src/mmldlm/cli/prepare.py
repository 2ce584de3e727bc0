"""`mmldlm prepare`: text to pair store."""

from __future__ import annotations

import inspect
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from mmldlm.data.store import PairStore

Out = Annotated[Path, typer.Option("--out", "-o", help="Folder of the pair store.")]
Input = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        "-i",
        help="Text: files (.txt .jsonl .json .csv .tsv .parquet .arrow, also .gz), patterns, folders, addresses "
        "(s3://, hf://), the name or folder of a Hugging Face dataset, or builtin:sotu. Repeat for more.",
        metavar="SOURCE",
    ),
]
More = Annotated[list[str] | None, typer.Argument(help="The same as --input SOURCE.", metavar="[SOURCE]...")]
TokenizerName = Annotated[
    str,
    typer.Option(
        help="builtin:minilm, builtin:gpt2, builtin:qwen, a folder, or a name on the Hugging Face Hub."
    ),
]
EncoderName = Annotated[
    str | None,
    typer.Option(
        help="builtin:minilm (the default), a folder or name of a sentence-transformers model, or module:name for "
        "Python code of your own: a function of a list of texts, or an object with encode(texts)."
    ),
]
Latents = Annotated[
    Path | None,
    typer.Option(
        help="Latents that you have already: a .npy file, (documents, channels) or (documents, slots, channels), one "
        "row for each document of --input in order. Rows with a field 'latent' need no such file.",
        metavar="FILE",
    ),
]
TextField = Annotated[
    str | None, typer.Option(help="Field or column that holds the text; chosen automatically if it is clear.")
]
LatentField = Annotated[
    str, typer.Option(help="Field or column that holds the latent of a row; '' ignores such a field.")
]
Cut = Annotated[
    str, typer.Option(help="What becomes one pair: none (a whole row), sentences, paragraphs or chunks.")
]
MaxTokens = Annotated[
    int,
    typer.Option(
        help="Longer documents are cut, between sentences if possible; left out if latents are given."
    ),
]
MinTokens = Annotated[int, typer.Option(help="Shorter documents are left out and counted.")]
Limit = Annotated[
    int | None, typer.Option(help="At most so many pairs of --input: a fair sample over all the text.")
]
Validation = Annotated[
    float | None,
    typer.Option(
        help="Share of source documents of --input held out for validation; 0.05, but 0 with --validation-input."
    ),
]
Test = Annotated[float, typer.Option(help="Share of source documents held out for a test.")]
ValidationInput = Annotated[
    list[str] | None,
    typer.Option(
        "--validation-input",
        help="Text that goes to validation as a whole: any source that --input takes. Repeat for more.",
        metavar="SOURCE",
    ),
]
TestInput = Annotated[
    list[str] | None,
    typer.Option(
        "--test-input",
        help="Text that goes to the test split as a whole. Repeat for more.",
        metavar="SOURCE",
    ),
]
Derive = Annotated[
    int,
    typer.Option(
        help="Add up to N spans and N splices of each training document, with latents of their own: "
        "better l2t and t2l, but other text than yours. 0 to 16."
    ),
]
TextUnit = Annotated[
    str,
    typer.Option(
        help="What a document of a .txt file is: file, part (some paragraphs) or line; "
        "auto: part if there are few files, else file. All of a document goes into one split."
    ),
]
DatasetConfig = Annotated[str | None, typer.Option(help="Configuration of a Hugging Face dataset.")]
DatasetSplit = Annotated[str, typer.Option(help="Split of a Hugging Face dataset to read.")]
ValidationDatasetSplit = Annotated[
    str | None, typer.Option(help="The same for --validation-input; validation if unset.")
]
TestDatasetSplit = Annotated[str | None, typer.Option(help="The same for --test-input; test if unset.")]
Prompt = Annotated[str, typer.Option(help="Put before each text for the encoder, as it was trained.")]
Normalize = Annotated[
    bool | None,
    typer.Option(
        "--normalize/--no-normalize",
        help="Bring latents to unit length, after a cut of --dimension; by default those of "
        "sentence-transformers models only.",
    ),
]
Dimension = Annotated[int | None, typer.Option(help="Keep the first N channels (Matryoshka encoders).")]
LatentDtype = Annotated[str, typer.Option(help="float16 or float32.")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Most texts that the encoder gets at once.")]
Device = Annotated[str, typer.Option(help="Where the encoder runs: auto, cpu, cuda.")]
Engine = Annotated[
    str, typer.Option(help="plain: encode in this process; ray: on the workers of a Ray cluster.")
]
RayWorkers = Annotated[
    int | None, typer.Option(min=1, help="With --engine ray: processes that encode; default: one per GPU.")
]
RayAddress = Annotated[
    str | None, typer.Option(help="With --engine ray: a running cluster, such as auto or ray://HOST:10001.")
]
ShardDocuments = Annotated[
    int, typer.Option(help="Documents per file; a killed run loses at most two files.")
]
Seed = Annotated[int, typer.Option(help="For the split, --limit and --derive.")]


def prepare(
    out: Out,
    source: Input = None,
    more: More = None,
    tokenizer: TokenizerName = "builtin:minilm",
    encoder: EncoderName = None,
    latents: Latents = None,
    text_field: TextField = None,
    latent_field: LatentField = "latent",
    cut: Cut = "none",
    max_tokens: MaxTokens = 128,
    min_tokens: MinTokens = 1,
    limit: Limit = None,
    validation: Validation = None,
    test: Test = 0.0,
    validation_source: ValidationInput = None,
    test_source: TestInput = None,
    derive: Derive = 0,
    text_unit: TextUnit = "auto",
    dataset_config: DatasetConfig = None,
    dataset_split: DatasetSplit = "train",
    validation_dataset_split: ValidationDatasetSplit = None,
    test_dataset_split: TestDatasetSplit = None,
    prompt: Prompt = "",
    normalize: Normalize = None,
    dimension: Dimension = None,
    latent_dtype: LatentDtype = "float16",
    batch_size: BatchSize = None,
    device: Device = "auto",
    engine: Engine = "plain",
    workers: RayWorkers = None,
    ray_address: RayAddress = None,
    shard_documents: ShardDocuments = 8192,
    seed: Seed = 0,
) -> None:
    """Turn text into a pair store: tokens and latents to train on. Run again, it continues where it was stopped."""
    words: dict[str, Any] = dict(locals())  # named as the arguments of mmldlm.prepare
    from mmldlm.api.prepare import SourceName
    from mmldlm.api.prepare import prepare as prepare_store
    from mmldlm.cli.terminal import ProgressBar, in_options
    from mmldlm.errors import UserError

    sources = [SourceName(name) for name in (*(words.pop("source") or []), *(words.pop("more") or []))]
    for key in ("validation_source", "test_source"):
        words[key] = words[key] or ()
    if not sources:
        raise UserError("source: no text is given; name a file, a folder, a dataset or builtin:sotu")
    with ProgressBar("encoding", unit="documents") as progress:
        words |= {"progress": progress, "note": lambda text: progress.note(in_options(text, OPTIONS))}
        store = prepare_store(sources, **words)
    _show(store)


OPTIONS = {name: f"--{name.replace('_', '-')}" for name in inspect.signature(prepare).parameters} | {
    "source": "--input",
    "validation_source": "--validation-input",
    "test_source": "--test-input",
}
"""Arguments of the library, and the options that set them."""


def _show(store: PairStore) -> None:
    """What came out, and what deserves attention."""
    manifest = store.manifest
    for name, split in manifest.splits.items():
        typer.echo(f"{name}: {split['num_documents']:,} documents, {split['num_tokens']:,} tokens")
    counts = dict(manifest.counts)
    num_lines, num_joined = counts.pop("lines", 0), counts.pop("lines_joined", 0)
    num_sources = counts.pop("source_documents", 0)
    words = ", ".join(f"{value:,} {key.replace('_', ' ')}" for key, value in counts.items() if value)
    typer.echo(f"from {num_sources:,} source documents" + (f"; {words}" if words else ""))
    num_pairs = len(store) - counts.get("derived_spans", 0) - counts.get("derived_splices", 0)
    if num_joined:
        typer.echo(
            f"{num_lines:,} lines, {num_pairs:,} pairs, {num_joined:,} lines joined to the one before; "
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
