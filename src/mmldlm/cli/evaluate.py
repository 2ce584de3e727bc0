"""`mmldlm eval`: measure a trained model on held-out pairs and write a report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from mmldlm.checkpoint.loaded import LoadedModel
    from mmldlm.config import EvaluationConfig
    from mmldlm.data.store import PairStore


def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or of an export.", metavar="RUN")],
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
    steps: Annotated[
        str | None,
        typer.Option(help="Numbers of sampling steps at which decoding is measured, as 1,2,4,8,16."),
    ] = None,
    encoder: Annotated[
        bool, typer.Option("--encoder/--no-encoder", help="Re-encode decoded texts with the store's encoder.")
    ] = True,
    seed: Annotated[int, typer.Option(min=0, help="Chooses the documents and their noise.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the report; RUN/reports/SPLIT unless told otherwise.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the whole result as one JSON object, the last line of stdout."),
    ] = False,
) -> None:
    """Measure a trained model: text bound with the right, a shuffled and no latent; decoding; retrieval."""
    from dataclasses import replace

    from mmldlm.checkpoint.loaded import load_model
    from mmldlm.cli.device import device_of
    from mmldlm.errors import UserError
    from mmldlm.evaluation.report import write_report
    from mmldlm.run_folder import RunFolder

    if out is not None and out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: is a file; give a folder for the report")
    model = load_model(run, device_of(device))
    config = model.config.evaluation
    config = replace(config, num_documents=config.num_documents if num_documents is None else num_documents)
    config = replace(config, num_decoded=config.num_decoded if num_decoded is None else num_decoded)
    config = replace(config, step_counts=config.step_counts if steps is None else _step_counts(steps))
    split_name = split or model.config.data.valid_split
    store = _open_store(model, data)
    result = _measure(model, store, split_name, config, encoder, seed)
    result["command"] = _command(
        run,
        data=data,
        split=split,
        num_documents=num_documents,
        num_decoded=num_decoded,
        steps=steps,
        no_encoder=None if encoder else True,
        seed=seed or None,
        out=out,
    )
    home = RunFolder(run.parent if run.name == "export" else run)
    report = write_report(out or home.reports / split_name, result, training_log=home.training_log)
    if as_json:
        _print_json(result | {"report": str(report)})
    else:
        show(result, report)


def _measure(
    model: LoadedModel,
    store: PairStore,
    split: str,
    config: EvaluationConfig,
    use_encoder: bool,
    seed: int,
) -> dict[str, Any]:
    """The whole evaluation under progress bars."""
    from mmldlm.data.tokenizer import Tokenizer
    from mmldlm.evaluation.run import evaluate_model
    from mmldlm.evaluation.selection import check_fingerprint

    check_fingerprint(model, store)  # before the encoder is loaded, which takes a while
    store.split(split)
    folder = store.tokenizer_path()
    with EvaluationProgress() as progress:
        return evaluate_model(
            model,
            store,
            split,
            config,
            decode_text=Tokenizer.load(folder).decode_batch if folder else None,
            encode=_encoder(model, progress) if use_encoder and folder else None,
            seed=seed,
            progress=progress.update,
        )


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
    from mmldlm.errors import UserError

    path = data or Path(model.config.data.store)
    if data is None and not path.exists():
        raise UserError(
            f"{path}: the pair store that this run was trained on is not here; say where with --data STORE"
        )
    return PairStore.open(path)


def _encoder(model: LoadedModel, progress: EvaluationProgress) -> Callable[[list[str]], Any] | None:
    """The encoder that made the latents; None where the store does not know it."""
    from mmldlm.errors import UserError
    from mmldlm.prepare.encoders import Encoder

    if model.encoder is None:
        return None
    progress.update("loading the encoder", 0, 1)
    try:
        encode = Encoder.from_spec(model.encoder, device=model.device.type).encode
    except UserError as error:
        raise UserError(f"{error}; or leave it out with --no-encoder") from error
    progress.update("loading the encoder", 1, 1)
    return encode


def _command(run: Path, **options: object) -> str:
    """The command line that gives this result again; options left at None are not mentioned."""
    import shlex

    words = ["mmldlm", "eval", str(run)]
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


def _print_json(result: dict[str, Any]) -> None:
    from mmldlm.json_lines import encode

    line = encode({key: value for key, value in result.items() if key != "documents"})
    typer.echo(line.decode("utf-8").rstrip("\n"))


def show(result: dict[str, Any], report: Path) -> None:
    """The numbers as tables for people."""
    from rich.console import Console

    console = Console()
    data = result["data"]
    console.print(
        f"{data['num_documents']} of {data['num_held_out']} documents of {data['store']}: {data['split']}",
        highlight=False,
        markup=False,
    )
    for part in (_bound_table(result), _inversion_table(result), _retrieval_table(result)):
        if part is not None:
            console.print(part)
    for note in result["notes"]:
        console.print(f"note: {note}", highlight=False, markup=False)
    console.print(f"report: {report}", highlight=False, markup=False, soft_wrap=True)


def _table(title: str, *columns: str) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for idx, column in enumerate(columns):
        table.add_column(column, justify="left" if idx == 0 else "right")
    return table


def _bound_table(result: dict[str, Any]) -> Any:
    bound = result["text_bound"]
    if not bound:
        return None
    table = _table("text bound", "latent", "nats/token", "95 % interval", "perplexity", "more than right")
    for kind in ("right", "shuffled", "none"):
        row, gain = bound[kind], bound["gain"].get(kind)
        table.add_row(
            kind,
            f"{row['nats_per_token']:.3f}",
            "{:.3f}, {:.3f}".format(*row["interval"]),
            f"{row['perplexity']:.1f}",
            "" if gain is None else f"{gain['value']:+.3f} ({gain['low']:+.3f}, {gain['high']:+.3f})",
        )
    return table


def _inversion_table(result: dict[str, Any]) -> Any:
    inversion = result["inversion"]
    if not inversion:
        return None
    title = f"latent to text, {inversion['num_documents']} documents"
    table = _table(title, "length", "steps", "tokens right", "exact", "BLEU", "re-encoded cosine")
    for length, points in (("given", inversion["length_given"]), ("modelled", inversion["length_modelled"])):
        for point in points:
            cosine = point["reencoded_cosine"]
            table.add_row(
                length,
                str(point["num_sampling_steps"]),
                f"{100 * point['token_accuracy']['value']:.1f} %",
                f"{100 * point['exact_match']['value']:.1f} %",
                "-" if point["bleu"] is None else f"{point['bleu']:.1f}",
                "-" if cosine is None else f"{cosine['value']:.3f}",
            )
    return table


def _retrieval_table(result: dict[str, Any]) -> Any:
    retrieval = result["retrieval"]
    if not retrieval:
        return None
    table = _table(f"text to latent, among {retrieval['num_candidates']}", "what", "value", "chance")
    own, strange = retrieval["cosine"]["value"], retrieval["stranger_cosine"]["value"]
    table.add_row("cosine to the encoder's latent", f"{own:.3f}", f"{strange:.3f}")
    for depth in (1, 10):
        found, chance = retrieval[f"retrieval_at_{depth}"]["value"], retrieval[f"chance_at_{depth}"]
        table.add_row(f"retrieval@{depth}", f"{100 * found:.1f} %", f"{100 * chance:.2f} %")
    return table
