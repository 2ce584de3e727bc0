"""`mmldlm eval` measures a trained model on held-out pairs; `mmldlm compare` compares such evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmldlm.cli.options import Texts, argument, chosen, option, takes
from mmldlm.cli.records import RUN_HELP
from mmldlm.cli.terminal import ProgressBar, print_json

if TYPE_CHECKING:
    from mmldlm.evaluation.results import Evaluation


_JSON = option(bool, False, "Print the result as one JSON object, the last line of stdout.", "--json")
EVAL = {
    "run": argument(str, ..., RUN_HELP),
    "settings": argument(Texts, None, "section.key=value of the sections evaluation and sampling."),
    "data": option(Path | None, None, "Pair store; by default the one the run was trained on."),
    "split": option(str | None, None, "Split to evaluate on; by default the run's validation split."),
    "num": option(int | None, None, "Held-out documents; 0: all.", "-n", "--num", min=0),
    "num_decoded": option(int | None, None, "How many of them are decoded into text; 0: all.", min=0),
    "num_generated": option(int | None, None, "Pairs generated from nothing; 0: none.", min=0),
    "steps": option(
        str | None, None, "Numbers of sampling steps to decode with, as 1,2,4,8,16.", metavar="N,N,..."
    ),
    "sts": option(Path | None, None, "Pairs of texts with scores (.tsv, .csv, .jsonl) to correlate with."),
    "reference_lm": option(
        str | None, None, "Causal language model that scores generated texts: folder or Hub name."
    ),
    "encoder": option(bool, True, "Encode decoded texts again with the encoder.", "--encoder/--no-encoder"),
    "seed": option(int, 0, "Chooses the documents and their noise.", min=0),
    "out": option(Path | None, None, "Folder of the report; by default RUN/reports/SPLIT.", metavar="FOLDER"),
    "device": option(str, "auto", "auto, cpu, cuda, mps, xpu or cuda:1."),
    "as_json": _JSON,
}
COMPARE = {
    "first": argument(Path, ..., "Run, folder of a report, or result.json.", metavar="RUN"),
    "others": argument(list[Path], ..., "Others, each compared with the first.", metavar="OTHER"),
    "split": option(str | None, None, "Which report, where a run has several: that on this split."),
    "seed": option(int, 0, "Of the bootstrap.", min=0),
    "out": option(
        Path | None, None, "Folder of the report; by default beside that of the first.", metavar="FOLDER"
    ),
    "as_json": option(
        bool, False, "Print the comparison as one JSON object, the last line of stdout.", "--json"
    ),
}


@takes(EVAL)
def evaluate(words: Any) -> None:
    """Measure a trained model: bounds, decoding, retrieval, generation, round trips."""
    from mmldlm.api.evaluate import evaluate as measure

    asked = "data split num num_decoded num_generated encoder sts reference_lm seed device"
    with ProgressBar("eval") as bar:
        result = measure(
            words.run, steps=_step_counts(words.steps), overrides=words.settings or [], out=words.out or True,
            progress=bar, **chosen(words, asked),
        )  # fmt: skip
    if words.as_json:
        print_json(result.to_json())
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


@takes(COMPARE)
def compare(words: Any) -> None:
    """Compare evaluations that were made before, paired over the documents that they share."""
    from mmldlm.api.evaluate import compare as compare_evaluations

    comparison = compare_evaluations(
        words.first, *words.others, split=words.split, seed=words.seed, out=words.out or True
    )
    if words.as_json:
        print_json(comparison.to_json())
        return
    from mmldlm.evaluation.report import CHANCE_NOTE, comparison_tables, title_of
    from mmldlm.reports import show_tables

    notes = [f"note: {note}" for note in [CHANCE_NOTE, *comparison.notes]]
    show_tables(
        comparison_tables(comparison), [title_of(comparison)], [*notes, f"report: {comparison.report}"]
    )
