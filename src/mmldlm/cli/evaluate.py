"""`mmldlm eval` measures a trained model on held-out pairs; `mmldlm compare` compares such evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mmldlm.evaluation.results import Evaluation


def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or of an export.", metavar="RUN")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="section.key=value of the sections evaluation and sampling."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Pair store; by default the one the run was trained on.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Split to evaluate on; by default the run's validation split.")
    ] = None,
    num: Annotated[int | None, typer.Option("-n", "--num", min=0, help="Held-out documents; 0: all.")] = None,
    num_decoded: Annotated[
        int | None, typer.Option(min=0, help="How many of them are decoded into text; 0: all.")
    ] = None,
    num_generated: Annotated[
        int | None, typer.Option(min=0, help="Pairs generated from nothing; 0: none.")
    ] = None,
    steps: Annotated[
        str | None, typer.Option(help="Numbers of sampling steps to decode with, as 1,2,4,8,16.")
    ] = None,
    sts: Annotated[
        Path | None, typer.Option(help="Pairs of texts with scores (.tsv, .csv, .jsonl) to correlate with.")
    ] = None,
    reference_lm: Annotated[
        str | None,
        typer.Option(help="Causal language model that scores generated texts: folder or Hub name."),
    ] = None,
    encoder: Annotated[
        bool, typer.Option("--encoder/--no-encoder", help="Encode decoded texts again with the encoder.")
    ] = True,
    seed: Annotated[int, typer.Option(min=0, help="Chooses the documents and their noise.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the report; by default RUN/reports/SPLIT.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps, xpu or cuda:1.")] = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as one JSON object, the last line of stdout.")
    ] = False,
) -> None:
    """Measure a trained model: bounds, decoding, retrieval, generation, round trips."""
    from mmldlm.api.evaluate import evaluate as measure
    from mmldlm.cli.terminal import ProgressBar

    with ProgressBar("eval") as bar:
        result = measure(
            run, data=data, split=split, num=num, steps=_step_counts(steps), num_decoded=num_decoded,
            num_generated=num_generated, overrides=settings or [], encoder=encoder, sts=sts,
            reference_lm=reference_lm, seed=seed, out=out or True, device=device, progress=bar,
        )  # fmt: skip
    if as_json:
        from mmldlm.json_lines import encode

        typer.echo(encode(result.to_json()).decode("utf-8").rstrip("\n"))
    else:
        _show(result)


def _show(result: Evaluation) -> None:
    from mmldlm.evaluation.tables import make_tables
    from mmldlm.reports import show_tables

    about = f"{result.data.num_documents} of {result.data.num_held_out} documents of {result.data.store}"
    notes = [f"note: {note}" for note in result.notes]
    show_tables(make_tables(result), [f"{about}: {result.data.split}"], [*notes, f"report: {result.report}"])


def _step_counts(words: str | None) -> list[int] | None:
    from mmldlm.errors import UserError

    if words is None:
        return None
    try:
        return [int(word) for word in words.split(",")]
    except ValueError:
        raise UserError(
            f"--steps {words}: whole numbers with commas between them are needed, such as 1,2,4,8,16"
        ) from None


def compare(
    first: Annotated[Path, typer.Argument(help="Run, folder of a report, or result.json.", metavar="RUN")],
    others: Annotated[
        list[Path], typer.Argument(help="Others, each compared with the first.", metavar="OTHER...")
    ],
    split: Annotated[
        str | None, typer.Option(help="Which report, where a run has several: that on this split.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the bootstrap.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the report; by default beside that of the first result.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the comparison as one JSON object, the last line of stdout.")
    ] = False,
) -> None:
    """Compare evaluations that were made before, paired over the documents that they share."""
    from mmldlm.api.evaluate import compare as compare_evaluations

    comparison = compare_evaluations(first, *others, split=split, seed=seed, out=out or True)
    if as_json:
        from mmldlm.json_lines import encode

        typer.echo(encode(comparison.to_json()).decode("utf-8").rstrip("\n"))
        return
    from mmldlm.evaluation.report import comparison_tables, title_of
    from mmldlm.reports import show_tables

    notes = [f"note: {note}" for note in comparison.notes]
    show_tables(
        comparison_tables(comparison), [title_of(comparison)], [*notes, f"report: {comparison.report}"]
    )
