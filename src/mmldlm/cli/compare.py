"""`mmldlm compare`: compare the evaluations of two runs or more."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


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
    from mmldlm.evaluation.compare_report import comparison_tables, title_of
    from mmldlm.tables import show_tables

    notes = [f"note: {note}" for note in comparison.notes]
    show_tables(
        comparison_tables(comparison), [title_of(comparison)], [*notes, f"report: {comparison.report}"]
    )
