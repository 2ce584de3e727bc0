"""`mmldlm.train`: train a recipe, or resume the run in a folder.

This is where the training loop meets the rooms that it does not know: validation, decoding of samples, and the
monitor's detectors, whose findings go to the ledger and the log as they happen.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from runwatch.alerts import Change
from runwatch.detectors import Panel
from runwatch.detectors.base import RunFacts

from mmldlm.api.runs import Run, read_run
from mmldlm.api.values import local_folder, store_folder
from mmldlm.checkpoint.export import make_export, write_export
from mmldlm.checkpoint.files import candidates
from mmldlm.checkpoint.load import RUNS, LoadedModel
from mmldlm.config import Config
from mmldlm.config.recipe import config_to_yaml, make_config, override_words
from mmldlm.corruption.times import describe_modes, modes_of_run, sees_latents
from mmldlm.data.store import PairStore
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.distributed.launch import start_ranks
from mmldlm.distributed.ranks import Muted
from mmldlm.errors import UserError
from mmldlm.evaluation.validation import make_validation
from mmldlm.metrics import text_log
from mmldlm.model.denoiser import Denoiser
from mmldlm.run_folder import RunFolder, lock_run
from mmldlm.runtime import return_pages, start_runtime
from mmldlm.sampling.decode import Progress, decode_latents
from mmldlm.sampling.options import SamplingOptions
from mmldlm.sampling.pack import document_keys
from mmldlm.training.checkpoints import check_export, start_from_init
from mmldlm.training.fit import Trainer
from mmldlm.training.plan import Course, TimeEstimate, course_of, describe, estimate_time
from mmldlm.training.setup import Hooks, Reporter, Setup, set_up
from mmldlm.training.signals import StopFlag
from mmldlm.training.start import StartClock

Samples = list[dict[str, Any]]
_LEVELS = {"info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}
logger = logging.getLogger(__name__)


def train(
    recipe: str | Path | Config | Mapping[str, Any],
    *,
    store: str | Path | PairStore | None = None,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    run: str | Path | os.PathLike[str] | None = None,
    init: str | Path | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Run:
    """Train a recipe. Called again with the same arguments it resumes where the run stopped.

    `recipe` is a name, a YAML file, a `Config` or a nested mapping; `overrides` are settings such as
    `{"optim.lr": 5e-4}` or `["optim.lr=5e-4"]`. `store` is the pair store, instead of `data.store`. `run` is the folder
    of the run, default `saved/<name>`. `init` is a run, an export or `builtin:NAME`, whose averaged weights training
    starts from.

    Ctrl-C, SIGTERM and SIGUSR1 save a checkpoint after the step at hand and raise `mmldlm.errors.Interrupted`. Outside
    the main thread signals are left alone. Messages go to `logging` and to `train.log` in the folder.

    >>> settings = {"train.steps": 2, "train.trackers": [], "batch.tokens_per_step": 256, "model.depth": 1}
    >>> run = mmldlm.train("laptop", store=store, run=folder / "demo", overrides=settings)
    >>> run.step, run.finished
    (2, True)
    """
    given = [] if store is None else ["data.store=."]  # the words are parsed, which a path may not survive
    config = make_config(recipe, [*override_words(overrides), *given])
    if store is not None:
        config.data.store = str(store.path if isinstance(store, PairStore) else store_folder(store, "store"))
    if init is not None:
        config.train.init = os.fspath(init)
    path = RUNS / config.name if run is None else Path(run)
    return train_config(config, path, _Steps(progress))


def train_config(
    config: Config, path: Path, reporter: Reporter | None = None, console: logging.Handler | None = None,
    began: float | None = None,
) -> Run:  # fmt: skip
    """Train, resume, or find finished the run in a folder, which then holds an export.

    `reporter` is called with every logged line; `console` gets the messages that go to `train.log`. `began` is when the
    command began (`time.perf_counter`); the log says how long it took until the first step.
    """
    clock = StartClock(began)
    clock.done("imports")
    run = RunFolder(path)
    _resolve_init(config)
    config.data.store = str(Path(config.data.store).absolute())  # a run can be used from any folder
    # libraries that are still loading may swallow a Ctrl-C
    with StopFlag() as stop, start_ranks(config) as ranks:
        setup = set_up(config, start_runtime(config, ranks.local_world_size, ranks.device), ranks, clock)
        notes = _first_weights(config, setup, run)
        if ranks.main and (warning := setup.store.unknown_warning()):
            notes.append((logging.WARNING, warning))
        ranks.barrier()  # nobody makes the folder before all have looked
        if ranks.main:
            _train_main(setup, run, stop, reporter or _Steps(None), console, clock, notes)
        else:
            _train_beside(setup, run, stop)
    del setup
    return_pages()
    return read_run(path)


@dataclass(frozen=True)
class RunPlan:
    """What a run would be, before anything is spent."""

    settings: str
    """YAML, resolved."""
    sizes: dict[str, Any]
    course: Course
    time: TimeEstimate


def plan_run(config: Config, path: Path | None = None) -> RunPlan:
    """Build a run, time its first steps on the device, and describe it; nothing is written.

    A folder `path` in which it could not run is rejected.
    """
    if path is not None:
        RunFolder(path).check()
    _resolve_init(config)
    setup = set_up(config, start_runtime(config))
    _first_weights(config, setup, None if path is None else RunFolder(path))
    if warning := setup.store.unknown_warning():
        logger.warning(warning)
    sizes, course = describe(setup), course_of(setup)
    return RunPlan(config_to_yaml(config), sizes, course, estimate_time(setup))


def _resolve_init(config: Config) -> None:
    """A model of a package, `builtin:NAME`, becomes its folder."""
    if (config.train.init or "").startswith("builtin:"):
        config.train.init = str(local_folder(config.train.init))


def _first_weights(config: Config, setup: Setup, run: RunFolder | None) -> list[tuple[int, str]]:
    """Take those of `train.init`, unless the run resumes from its own; returns what is to be logged."""
    if run is not None and candidates(run.checkpoints):
        return []
    if run is not None:
        check_export(run)
    return start_from_init(config, setup.denoiser, setup.store)


def _train_main(
    setup: Setup,
    run: RunFolder,
    stop: StopFlag,
    reporter: Reporter,
    console: logging.Handler | None,
    clock: StartClock,
    notes: Sequence[tuple[int, str]],
) -> None:
    """The rank that writes, or the only one; `notes` are levels and messages for the log."""
    run.create()
    with lock_run(run), text_log(run.train_log, console=console) as log:
        for level, message in notes:
            log.log(level, "%s", message)
        log.info("modes: %s", describe_modes(setup.config.corruption, setup.train_split.derived_share))
        watched = _Watched(reporter, stop)
        hooks = Hooks(make_validation(setup), sample_decoder(setup), watched)
        trainer = Trainer(setup, run, hooks, stop=stop, clock=clock)
        watched.health = Health(setup.config, trainer.events.record, lambda: trainer.checkpoints.last_saved)
        trainer.fit()
        weights = trainer.weights_for_use()
        write_export(run.export, make_export(weights, setup.config, setup.store, trainer.step))
    if trainer.checkpoints.unsaved:
        again = "then run the same command again"
        new = f"train.init={run.path} begins another run with them"
        raise UserError(
            f"{trainer.checkpoints.unsaved}; the weights are in {run.export}; "
            f"{again if candidates(run.checkpoints) else new}"
        )


def _train_beside(setup: Setup, run: RunFolder, stop: StopFlag) -> None:
    """Any other rank: it computes, and writes nothing."""
    logging.getLogger("mmldlm").setLevel(logging.ERROR)  # the main rank reports the rest
    trainer = Trainer(setup, run, Hooks(lambda _: {}, lambda _, step: [], Muted()), stop=stop)
    trainer.fit()
    trainer.weights_for_use()


class _Steps:
    """A reporter that passes on how many steps are done."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress, self.num_steps = progress, 0

    def start(self, step: int, num_steps: int) -> None:
        self.num_steps = num_steps
        self.update(step, {})

    def update(self, step: int, fields: dict[str, Any]) -> None:
        if self.progress is not None:
            self.progress(step, self.num_steps)


class _Watched:
    """A reporter beside the monitor's detectors; a KeyboardInterrupt in it becomes an orderly stop."""

    def __init__(self, reporter: Reporter, stop: StopFlag) -> None:
        self.reporter, self.stop = reporter, stop
        self.health: Health | None = None

    def start(self, step: int, num_steps: int) -> None:
        self._show(lambda: self.reporter.start(step, num_steps))

    def update(self, step: int, fields: dict[str, Any]) -> None:
        if self.health is not None:
            self.health.update(step, fields)
        self._show(lambda: self.reporter.update(step, fields))

    def _show(self, call: Callable[[], None]) -> None:
        try:
            call()
        except KeyboardInterrupt:
            self.stop.received = self.stop.received or signal.SIGINT


def sample_decoder(setup: Setup) -> Callable[[Denoiser, int], Samples]:
    """Decodes the first held-out latents of a run with the weights at hand, for `samples.jsonl`."""
    split, store, corruption = setup.valid_split, setup.store, setup.config.corruption
    folder = store.tokenizer_path()
    count = min(len(split), setup.config.train.valid_samples)
    if not count or folder is None or modes_of_run(corruption).l2t == 0 or not sees_latents(corruption):
        return lambda denoiser, step: []
    documents, tokenizer = split.read(np.arange(count)), Tokenizer.load(folder)
    originals = documents.split_tokens()

    def decode(denoiser: Denoiser, step: int) -> Samples:
        model = LoadedModel(
            denoiser, setup.config, setup.corruption, setup.runtime.device, store.fingerprint, store.normalizer,
            store.manifest.encoder, folder, step, setup.runtime.precision,
        )  # fmt: skip
        options = SamplingOptions.from_config(setup.config.sampling, seed=setup.config.train.seed)
        keys = document_keys(options.seed, documents.ids)
        latents = store.normalizer.normalize(documents.latents)
        decoded = decode_latents(model, latents, options, lengths=documents.lengths, keys=keys)
        texts = tokenizer.decode_batch([tokens.tolist() for tokens in (*originals, *decoded)])
        return [
            {"original": original, "decoded": text}
            for original, text in zip(texts[:count], texts[count:], strict=True)
        ]

    return decode


class Health:
    """Judges every logged line, as `mmldlm monitor` does from outside, and records what is news."""

    def __init__(self, config: Config, record: Callable[..., None], saved: Callable[[], int | None]) -> None:
        self.record, self.saved = record, saved
        self.facts = RunFacts(
            total_steps=config.train.steps,
            checkpoint_every=config.train.checkpoint_every,
            lr_restarts=config.optim.schedule == "restarts",
        )
        self.panel = Panel(facts=self.facts, own=True)

    def update(self, step: int, fields: dict[str, Any]) -> None:
        self.facts.saved_step = self.saved()
        for change in self.panel.observe_fields(step, fields, time=time.time()):
            self._report(change, step)

    def _report(self, change: Change, step: int) -> None:
        alert = change.alert.as_dict()
        kept = {
            key: alert[key] for key in ("code", "name", "level", "subject", "first_step", "count", "advice")
        }
        self.record("alert", step=step, what=change.what, evidence=change.evidence, **kept)
        level = logging.INFO if change.what == "resolved" else _LEVELS[alert["level"]]
        logger.log(
            level, "step %d: %s %s %s: %s; %s", step, change.what, alert["code"], alert["name"], change.evidence,
            alert["advice"],
        )  # fmt: skip
