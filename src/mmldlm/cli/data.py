"""`mmldlm data`: look into a pair store, check it, import an old one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from mmldlm.cli.options import argument, chosen, option, takes
from mmldlm.cli.prepare import show_splits
from mmldlm.cli.terminal import Command, print_json
from mmldlm.reports import counted

app = typer.Typer(help="Look into a pair store, check it, import an old one.", no_args_is_help=True)


STORE = argument(Path, ..., "Folder of the pair store.")
INSPECT = {
    "store": STORE,
    "split": option(str, "train", "Split whose lengths and examples are shown."),
    "examples": option(int, 5, "Example texts to show.", min=0),
    "as_json": option(bool, False, "Print one JSON object instead.", "--json"),
}
IMPORT = {
    "old": argument(Path, ..., "Folder with tokens/<split>/*.npz and latents/<split>/*.npy."),
    "out": option(Path, ..., "Folder of the new pair store.", "--out", "-o", metavar="STORE"),
    "tokenizer": option(str, ..., "The tokenizer that made the tokens: name, folder or builtin:minilm."),
    "encoder": option(str | None, None, "The encoder that made the latents, for the record."),
    "prompt": option(str, "", "The prompt that the encoder was given."),
    "skip_bad": option(bool, False, "Leave bad files out and list them.", "--skip-bad"),
    "keep_special": option(bool, False, "Keep special tokens such as [CLS].", "--keep-special"),
    "latent_dtype": option(str, "float16", "float16 or float32."),
    "validation": option(
        float, 0.0, "Share of documents held out for validation, where there is no such split."
    ),
}


@app.command(cls=Command, short_help="Show what a store holds.")
@takes(INSPECT)
def inspect(words: Any) -> None:
    """Show what a store holds: splits, lengths, encoder, counts, examples."""
    from mmldlm.data.store import PairStore

    summary = PairStore.open(words.store).summary(words.split, words.examples)
    if words.as_json:
        print_json(summary)
    else:
        _show(summary)


@app.command(cls=Command)
@takes({"store": STORE})
def verify(words: Any) -> None:
    """Compare every file with its checksum; exit code 2 if any differs."""
    from mmldlm.data.store import PairStore

    opened = PairStore.open(words.store)
    damage = opened.find_damage()
    for line in damage:
        typer.echo(line, err=True)
    if damage:
        typer.echo(
            f"{len(damage)} damaged: make the store again with 'mmldlm prepare', or copy it again", err=True
        )
        raise typer.Exit(2)
    shards, files = (
        sum(len(entry["shards"]) for entry in opened.manifest.splits.values()),
        opened.manifest.files,
    )
    others = counted(len(files), "other file")
    typer.echo(f"{words.store}: {counted(shards, 'shard')} and {others}, all as they were written")


@app.command("import", cls=Command, short_help="Make a store of the research code's layout.")
@takes(IMPORT)
def import_(words: Any) -> None:
    """Make a pair store of the layout that the MM-LDLM research code used."""
    from mmldlm.data.tokenizer import Tokenizer
    from mmldlm.preparation.old_layout import import_old_layout

    spec = {"name": words.encoder, "prompt": words.prompt} if words.encoder else None
    asked = chosen(words, "skip_bad keep_special latent_dtype validation")
    store, report = import_old_layout(
        words.old, words.out, Tokenizer.load(words.tokenizer), encoder=spec, **asked
    )
    show_splits(store)
    if report.num_special:
        typer.echo(f"{counted(report.num_special, 'special token')} removed (--keep-special keeps them)")
    for line in report.bad_files:
        typer.echo(f"left out: {line}", err=True)
    if report.bad_files:
        typer.echo(f"left out: {counted(len(report.bad_files), 'bad file')}", err=True)
    typer.echo(f"pair store: {store.path}")


def _show(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.text import Text

    from mmldlm.reports import folding_table
    from mmldlm.untrusted import printable

    console = Console()
    table = folding_table(
        "split", "documents", "tokens", "unknown", "longest", "shards", title=printable(summary["store"])
    )
    for name, entry in summary["splits"].items():
        cells = [f"{entry[key]:,}" for key in ("num_documents", "num_tokens", "max_length", "num_shards")]
        cells.insert(2, f"{entry['num_unknown'] / max(1, entry['num_tokens']):.2%}")
        table.add_row(Text(printable(name)), *cells)
    console.print(table)
    latents = summary["latents"]
    lines = [
        f"latents     {latents['slots']} x {latents['channels']} {latents['dtype']}",
        f"encoder     {_words(summary['encoder'])}",
        f"tokenizer   {_words(summary['tokenizer'])}, vocabulary {summary['vocab_size']:,}",
        f"counts      {_words(summary['counts'])}",
        f"fingerprint {summary['fingerprint'][:16]}",
        "",
        *_histogram(summary["lengths"]),
        "",
        *(f"- {' '.join(str(text).split())[:200]}" for text in summary["examples"]),
    ]
    console.print("\n".join(map(printable, lines)), highlight=False, markup=False, soft_wrap=True)


def _words(values: dict[str, Any] | None) -> str:
    if values is None:
        return "not known"
    return ", ".join(
        f"{key} {str(value)[:12] if key == 'sha256' else repr(value)}"
        for key, value in values.items()
        if key != "probe"
    )


def _histogram(lengths: dict[str, Any]) -> list[str]:
    """Bars of plain characters, so that they survive any terminal and any log."""
    edges, counts = lengths["histogram"]["edges"], lengths["histogram"]["counts"]
    largest = max(counts)
    typical = f"mean {lengths['mean']:.1f}, median {lengths['median']:.0f}"
    head = f"tokens per document ({lengths['split']}): {typical}"
    bars = [
        f"{edge:>7.0f} {'#' * max(round(40 * count / largest), 1 if count else 0):<40} {count:,}"
        for edge, count in zip(edges[:-1], counts, strict=True)
    ]
    return [head, *bars]
