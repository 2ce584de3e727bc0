"""`mmldlm eval`: measure a trained model on held-out pairs and write a report, or compare such reports."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mmldlm.checkpoint.loaded import LoadedModel
    from mmldlm.config import Config, EvaluationConfig
    from mmldlm.data.store import PairStore
    from mmldlm.evaluation.run import Tools
    from mmldlm.evaluation.tables import Table

PIPE_WIDTH = 120
"""Columns of the tables where there is no terminal."""


def evaluate(
    run: Annotated[
        list[Path],
        typer.Argument(
            help="Folder of a run, or of an export; with --compare several runs, reports or result.json.",
            metavar="RUN",
        ),
    ],
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare reports that exist, each with the first.")
    ] = False,
    data: Annotated[
        Path | None, typer.Option(help="Pair store; the one the run was trained on unless told otherwise.")
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="Split to evaluate on; the run's validation split unless told otherwise."),
    ] = None,
    num_documents: Annotated[
        int | None, typer.Option("-n", "--num-documents", min=0, help="Held-out documents; 0: all.")
    ] = None,
    num_decoded: Annotated[
        int | None, typer.Option(min=0, help="How many of them are decoded into text; 0: all.")
    ] = None,
    num_generated: Annotated[
        int | None, typer.Option(min=0, help="Pairs generated from nothing; 0: none.")
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(help="Numbers of sampling steps at which decoding is measured, as 1,2,4,8,16."),
    ] = None,
    candidates: Annotated[
        str | None,
        typer.Option(help="Numbers of texts for each latent, of which the best is kept, as 1,4,16."),
    ] = None,
    refine: Annotated[
        int | None, typer.Option(min=0, help="Rounds that improve what is kept, measured beside none.")
    ] = None,
    candidate_temperature: Annotated[
        float | None, typer.Option(help="Of all candidates but the first, and of the rounds.")
    ] = None,
    check: Annotated[
        str | None, typer.Option(help="What turns candidates back into latents: auto, model or encoder.")
    ] = None,
    text_samplers: Annotated[
        str | None, typer.Option(help="Text samplers beside each other, as confidence,margin.")
    ] = None,
    guidances: Annotated[
        str | None, typer.Option(help="Strengths of guidance beside each other, as 1,1.5,2.")
    ] = None,
    sts: Annotated[
        Path | None,
        typer.Option(help="Pairs of texts with scores (.tsv, .csv, .jsonl) to correlate similarities with."),
    ] = None,
    reference_lm: Annotated[
        str | None,
        typer.Option(help="Causal language model that reads generated texts: folder or Hub name."),
    ] = None,
    encoder: Annotated[
        bool, typer.Option("--encoder/--no-encoder", help="Re-encode texts with the store's encoder.")
    ] = True,
    seed: Annotated[int, typer.Option(min=0, help="Chooses the documents and their noise.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the report; RUN/reports/SPLIT unless told otherwise, SPLIT-of-STORE with --data."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the whole result as one JSON object, the last line of stdout."),
    ] = False,
) -> None:
    """Measure a trained model: bounds, decoding, retrieval, generation, round trips; or compare results."""
    from mmldlm.errors import UserError

    if out is not None and out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: is a file; give a folder for the report")
    options = {
        "data": data,
        "num_documents": num_documents,
        "num_decoded": num_decoded,
        "num_generated": num_generated,
        "steps": steps,
        "candidates": candidates,
        "refine": refine,
        "candidate_temperature": candidate_temperature,
        "check": check,
        "text_samplers": text_samplers,
        "guidances": guidances,
        "sts": sts,
        "reference_lm": reference_lm,
        "no_encoder": None if encoder else True,
    }
    if compare:
        _refuse_unused({**options, "device": None if device == "auto" else device})
        _compare(run, split, out, seed, as_json)
        return
    if len(run) != 1:
        raise UserError(
            f"{len(run)} folders are given; evaluate one run at a time, or compare with --compare"
        )
    common = {"split": split, "seed": seed or None, "out": out}
    _evaluate(run[0], options, split, seed, out, device, as_json, _command(run, **options, **common))


def _report_name(split: str, own: Path, data: Path | None) -> str:
    """Folder of a report: another store than the run's own, which may have moved, leaves the report on that alone."""
    other = own if data is None else data.resolve()
    return split if other.name == own.name else f"{split}-of-{other.name}"


def _evaluate(
    run: Path,
    options: dict[str, Any],
    split: str | None,
    seed: int,
    out: Path | None,
    device: str,
    as_json: bool,
    command: str,
) -> None:
    from mmldlm.checkpoint.loaded import load_model
    from mmldlm.cli.device import device_of
    from mmldlm.evaluation.report import write_report
    from mmldlm.evaluation.tables import make_tables
    from mmldlm.run_folder import RunFolder

    model = load_model(run, device_of(device))
    config = _configure(model.config, options)
    split_name = split or model.config.data.valid_split
    store = _open_store(model, options["data"])
    result = measure(model, store, split_name, config, options, seed) | {"command": command}
    home = RunFolder(run.parent if run.name == "export" else run)
    name = _report_name(split_name, Path(model.config.data.store), options["data"])
    report = write_report(out or home.reports / name, result, training_log=home.training_log)
    if as_json:
        _print_json({key: value for key, value in result.items() if key != "documents"}, report)
        return
    data = result["data"]
    about = f"{data['num_documents']} of {data['num_held_out']} documents of {data['store']}: {data['split']}"
    show(about, make_tables(result), result["notes"], report)


def _configure(config: Config, options: dict[str, Any]) -> EvaluationConfig:
    """The run's settings, with those of the command line."""
    from dataclasses import replace

    from mmldlm.config import find_problems
    from mmldlm.errors import UserError

    names = ("num_documents", "num_decoded", "num_generated", "refine", "candidate_temperature", "check")
    told = {name: options[name] for name in names if options[name] is not None}
    if options["steps"] is not None:
        told["step_counts"] = _step_counts(options["steps"])
    kinds = {"candidates": int, "guidances": float, "text_samplers": str}
    told |= {
        name: _words(name, options[name], kind) for name, kind in kinds.items() if options[name] is not None
    }
    chosen = replace(config.evaluation, **told)
    found = find_problems(replace(config, evaluation=chosen))
    if problems := [problem for problem in found if problem.startswith("evaluation.")]:
        raise UserError("; ".join(problems))
    return chosen


def _words(name: str, given: str, kind: type) -> list[Any]:
    """A list from the command line."""
    from mmldlm.errors import UserError

    try:
        return [kind(word.strip()) for word in given.split(",")]
    except ValueError:
        raise UserError(
            f"--{name.replace('_', '-')} {given}: numbers with commas between them are needed, such as 1,4,16"
        ) from None


def measure(
    model: LoadedModel,
    store: PairStore,
    split: str,
    config: EvaluationConfig,
    options: dict[str, Any],
    seed: int,
) -> dict[str, Any]:
    """The whole evaluation under progress bars."""
    from mmldlm.evaluation.run import evaluate_model
    from mmldlm.evaluation.selection import check_fingerprint

    check_fingerprint(model, store)  # before the encoder is loaded, which takes a while
    store.split(split)
    with EvaluationProgress() as progress:
        tools = _tools(model, store, options, progress)
        return evaluate_model(model, store, split, config, tools, seed=seed, progress=progress.update)


def _tools(
    model: LoadedModel, store: PairStore, options: dict[str, Any], progress: EvaluationProgress
) -> Tools:
    """Tokenizer, encoder and whatever else was asked for; the quick ones first, so that mistakes show at once."""
    from mmldlm.data.tokenizer import Tokenizer
    from mmldlm.evaluation.reference_lm import ReferenceLM
    from mmldlm.evaluation.run import Tools
    from mmldlm.evaluation.similarity import read_scored_pairs

    pairs = read_scored_pairs(options["sts"]) if options["sts"] else None
    name = options["reference_lm"]
    reference = ReferenceLM.load(name, model.device) if name else None
    folder = store.tokenizer_path()
    if folder is None:
        return Tools(reference_lm=reference, scored_pairs=pairs)
    tokenizer = Tokenizer.load(folder)
    encode = None if options["no_encoder"] else _encoder(model, progress)
    return Tools(
        decode_text=tokenizer.decode_batch,
        tokenize=tokenizer.encode_batch,
        encode=encode,
        reference_lm=reference,
        special_ids=frozenset(tokenizer.special_ids()),
        scored_pairs=pairs,
    )


def _compare(runs: list[Path], split: str | None, out: Path | None, seed: int, as_json: bool) -> None:
    from mmldlm.errors import UserError
    from mmldlm.evaluation.compare import compare, folder_name, load_evaluated
    from mmldlm.evaluation.compare_report import comparison_tables, write_comparison

    if len(runs) < 2:
        raise UserError("--compare: give two or more runs, reports or result.json")
    results = [load_evaluated(path, split) for path in runs]
    comparison = compare(results, seed)
    comparison["command"] = _command(runs, compare=True, split=split, seed=seed or None, out=out)
    page = write_comparison(out or results[0].folder.parent / folder_name(results), comparison)
    if as_json:
        _print_json(comparison, page)
        return
    about = " against ".join(reversed([one["label"] for one in comparison["results"]]))
    show(about, comparison_tables(comparison), comparison["notes"], page)


def _refuse_unused(options: dict[str, Any]) -> None:
    from mmldlm.errors import UserError

    for name, value in options.items():
        if value is not None:
            raise UserError(f"--{name.replace('_', '-')}: has no effect with --compare; leave it out")


def _step_counts(words: str) -> list[int]:
    from mmldlm.errors import UserError

    try:
        counts = [int(word) for word in words.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise UserError(
            f"--steps {words}: numbers of at least 1 with commas between them, such as 1,2,4,8,16"
        )
    return counts


def _open_store(model: LoadedModel, data: Path | None) -> PairStore:
    from mmldlm.data.store import PairStore

    return PairStore.open_of_run(model.config.data.store, data)


def _encoder(model: LoadedModel, progress: EvaluationProgress) -> Callable[[list[str]], Any] | None:
    """The encoder that made the latents; None where the store does not know it."""
    from mmldlm.errors import UserError
    from mmldlm.preparation.encoders import open_encoder

    if model.encoder is None:
        return None
    progress.update("loading the encoder", 0, 1)
    try:
        encode = open_encoder(model.encoder, device=model.device.type).encode
    except UserError as error:
        raise UserError(f"{error}; or leave it out with --no-encoder") from error
    progress.update("loading the encoder", 1, 1)
    return encode


def _command(runs: list[Path], **options: object) -> str:
    """The command line that gives this result again; options left at None are not mentioned."""
    import shlex

    words = ["mmldlm", "eval", *map(str, runs)]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        words += [flag] if value is True else [] if value is None else [flag, str(value)]
    return shlex.join(words)


class EvaluationProgress:
    """A bar for each part on stderr; plain lines where there is no terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        self.console = Console(stderr=True)
        columns = (
            TextColumn("{task.description:<28}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
        )
        self._bars = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> EvaluationProgress:
        self._bars.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._bars.stop()

    def update(self, part: str, done: int, total: int) -> None:
        """How far a part is; it begins when it is first named."""
        if part not in self._tasks:
            self._tasks[part] = self._bars.add_task(part, total=total)
            if not self.console.is_terminal:
                self.console.print(f"eval: {part}", highlight=False)
        self._bars.update(self._tasks[part], completed=done, total=total)


def _print_json(result: dict[str, Any], report: Path) -> None:
    from mmldlm.json_lines import encode

    typer.echo(encode(result | {"report": str(report)}).decode("utf-8").rstrip("\n"))


def show(about: str, tables: Sequence[Table], notes: Sequence[str], report: Path) -> None:
    """The numbers as tables for people."""
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE_WIDTH)
    console.print(Text(about), soft_wrap=True)
    for table in tables:
        shown = RichTable(title=Text(table.title), title_justify="left")
        for idx, column in enumerate(table.head):
            shown.add_column(Text(column), justify="left" if idx == 0 else "right", overflow="fold")
        for row in table.rows:
            shown.add_row(*map(Text, row))
        console.print(shown)
    for note in notes:
        console.print(Text(f"note: {note}"), soft_wrap=True)
    console.print(Text(f"report: {report}"), soft_wrap=True)
