"""What a plan comes to: a job for each trained arm and seed, with all evaluations of its run, and what is done already.

DIR/plan.json               settings that the runs in the folder were trained with
DIR/runs/ARM/SEED/          a run, as `mmldlm train` writes it
DIR/reports/ARM/SEED/       its evaluation: record.json, result.json, documents.json, report.md
DIR/logs/ARM-SEED.log       output of its process; the job itself beside it
DIR/result.json table.md report.html chart.png
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mmldlm.ablation.plan import Arm, Plan, training_settings
from mmldlm.config import Config
from mmldlm.config.old_settings import flatten
from mmldlm.config.recipe import config_to_dict
from mmldlm.data.store import PairStore
from mmldlm.durable import replace_file
from mmldlm.errors import UserError
from mmldlm.evaluation.compare import blind_cosines
from mmldlm.evaluation.results import Evaluation
from mmldlm.json_lines import from_plain
from mmldlm.metrics import read_log

PLAN = "plan.json"
FORMAT = "mmldlm-ablation-1"
RECORD = "record.json"
RECORD_FORMAT = "mmldlm-ablation-record-2"


@dataclass(frozen=True)
class Value:
    title: str
    better: str
    value: float


@dataclass(frozen=True)
class Record:
    """One arm with one seed."""

    arm: str
    seed: int
    identity: dict[str, Any]
    """Everything that the numbers depend on; where it has changed, the evaluation is done again."""
    values: dict[str, Value]
    num_parameters: int
    step: int
    train_seconds: float | None
    """In steps, by the run's own log: without validation, checkpoints and the start."""
    notes: list[str] = field(default_factory=list)
    collapsed: str | None = None
    """What shows that its generated texts are the same words again and again."""
    repetitive: bool = False
    """Whether its generated texts repeat tokens measurably more than held-out ones."""
    blind: list[str] = field(default_factory=list)
    """Cosines of its latents that do not depend on the text."""

    def to_json(self) -> dict[str, Any]:
        return {"format": RECORD_FORMAT} | asdict(self)


def make_record(
    arm: str, seed: int, identity: dict[str, Any], result: Evaluation, training_log: Path
) -> Record:
    """From an evaluation; quantities without a finite value are left out."""
    values = {
        name: Value(quantity.title, quantity.better, quantity.value())
        for documents in result.documents.values()
        for name, quantity in documents.quantities.items()
        if math.isfinite(quantity.value())
    }
    step = result.model.step or 0
    seconds, generation = seconds_in_steps(training_log), result.generation
    return Record(
        arm, seed, identity, values, result.model.num_parameters, step, seconds, result.notes,
        collapsed=generation.collapsed if generation else None,
        repetitive=generation is not None and generation.diversity.exceeds_real("repeated_1"),
        blind=sorted(blind_cosines(result)),
    )  # fmt: skip


def read_record(folder: Path, identity: dict[str, Any]) -> Record | None:
    """The record in a folder; None where there is none, or one of something else."""
    try:
        saved = json.loads((folder / RECORD).read_bytes())
        if saved["format"] != RECORD_FORMAT or saved["identity"] != identity:
            return None
        record: Record = from_plain(Record, saved)
        return record
    except (OSError, ValueError, KeyError, TypeError):
        return None


def seconds_in_steps(training_log: Path) -> float | None:
    """Time of training by the rates of its log, which goes over interruptions; None where it has none."""
    total, before = 0.0, 0
    for line in read_log(training_log):
        rate, documents = line.get("documents_per_second"), line.get("documents")
        if rate and documents:
            total += max(0, documents - before) / rate
            before = documents
    return total or None


@dataclass(frozen=True)
class Check:
    """One evaluation of a run."""

    arm: str
    folder: str
    settings: dict[str, Any]
    weights: str
    identity: dict[str, Any]

    def record(self) -> Record | None:
        """The result, where it is there."""
        return read_record(Path(self.folder), self.identity)


@dataclass(frozen=True)
class Job:
    """One process: train a run, then evaluate it in all the ways that the plan has for it."""

    arm: str
    seed: int
    run: str
    settings: dict[str, Any]
    split: str
    eval_seed: int
    encoder: bool
    checks: tuple[Check, ...]

    @property
    def title(self) -> str:
        return f"{self.arm}, seed {self.seed}"


@dataclass(frozen=True)
class Work:
    """A plan in its folder."""

    plan: Plan
    folder: Path
    seeds: range
    content: str
    """Which pair store this is."""

    def report_folder(self, arm: Arm, seed: int) -> Path:
        """Where the evaluation of an arm and seed lies."""
        return self.folder / "reports" / arm.folder / str(seed)

    def log_path(self, job: Job) -> Path:
        """What the process of a job says."""
        return self.folder / "logs" / f"{Path(job.run).parent.name}-{job.seed}.log"

    def records(self) -> list[Record]:
        records = (self.check(arm, seed).record() for arm in self.plan.arms for seed in self.seeds)
        return [record for record in records if record is not None]

    def check(self, arm: Arm, seed: int) -> Check:
        """The evaluation of an arm and seed."""
        folder, settings = self.report_folder(arm, seed), config_to_dict(self.plan.config(arm, seed))
        return Check(arm.name, str(folder), settings, arm.weights, self.identity(arm, seed))

    def identity(self, arm: Arm, seed: int) -> dict[str, Any]:
        """Everything that decides the numbers of an arm and seed, as JSON keeps it."""
        how, config = self.plan.evaluation, self.plan.config(arm, seed)
        settings = config_to_dict(config)
        settings["data"]["store"] = str(Path(settings["data"]["store"]).absolute())
        parts = {
            "settings": settings,
            "weights": arm.weights,
            "of": arm.of,
            "split": self.split(config),
            "seed": how.seed,
            "encoder": how.encoder,
            "content": self.content,
        }
        kept: dict[str, Any] = json.loads(json.dumps(parts))
        return kept

    def split(self, config: Config) -> str:
        """Where the held-out documents come from."""
        return self.plan.evaluation.split or config.data.valid_split

    def jobs(self) -> list[Job]:
        """What is still to be done, round by round: all arms with one seed before any with the next."""
        jobs = [self._job(arm, seed) for seed in self.seeds for arm in self.plan.trained]
        return [job for job in jobs if job.checks]

    def _job(self, arm: Arm, seed: int) -> Job:
        config = self.plan.config(arm, seed)
        checks = (self.check(user, seed) for user in self.plan.users(arm))
        missing = tuple(check for check in checks if check.record() is None)
        how = self.plan.evaluation
        run = str(self.folder / "runs" / arm.folder / str(seed))
        return Job(
            arm.name, seed, run, config_to_dict(config), self.split(config), how.seed, how.encoder, missing
        )


def open_work(plan: Plan, folder: Path, num_seeds: int) -> Work:
    """Find the data and whatever the folder has already; runs of an arm that has changed since are rejected."""
    config = plan.configs[plan.arms[0].name]
    store = PairStore.open(config.data.store)
    splits = [one.data.train_split for one in plan.configs.values()]
    for split in dict.fromkeys([*splits, config.data.valid_split, plan.evaluation.split or splits[0]]):
        store.split(split)
    work = Work(plan, folder, range(num_seeds), store.content)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder}: is a file; give a folder for the ablation")
    taken = folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir())
    if taken and not (folder / PLAN).is_file():
        raise UserError(f"--out {folder}: holds something else than an ablation; choose another folder")
    _reject_changes(work, _saved_plan(folder))
    return work


def write_plan(work: Work) -> None:
    """Keep what the runs are trained with, so that a later change of an arm is noticed."""
    saved = _saved_plan(work.folder)
    (work.folder / "logs").mkdir(exist_ok=True)
    arms = saved.get("arms", {}) | {
        arm.folder: training_settings(work.plan.configs[arm.name]) for arm in work.plan.trained
    }
    text = json.dumps({"format": FORMAT, "content": work.content, "arms": arms}, indent=1)
    replace_file(work.folder / PLAN, text.encode())


def _saved_plan(folder: Path) -> dict[str, Any]:
    path = folder / PLAN
    if not path.is_file():
        return {}
    try:
        saved = json.loads(path.read_bytes())
        if saved["format"] == FORMAT and isinstance(saved["arms"], dict):
            return dict(saved)
    except (ValueError, KeyError, TypeError):
        pass
    raise UserError(f"{path}: is not the plan of an ablation; choose another folder with --out")


def _reject_changes(work: Work, saved: dict[str, Any]) -> None:
    runs = work.folder / "runs"
    for arm in work.plan.trained:
        if arm.folder not in saved.get("arms", {}) or not (runs / arm.folder).is_dir():
            continue
        changes = _changes(saved["arms"][arm.folder], training_settings(work.plan.configs[arm.name]))
        if saved["content"] != work.content:
            changes.append("data.store: has other documents now")
        if changes:
            raise UserError(
                f"arm {arm.name!r}: its runs in {runs / arm.folder} were trained with other settings "
                f"({'; '.join(changes)}); put them back, delete that folder, or choose another --out"
            )


def _changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Settings that differ; one younger than the saved plan had its default."""
    before, now = flatten(config_to_dict(Config())) | flatten(old), flatten(json.loads(json.dumps(new)))
    default = json.loads(json.dumps(before))
    return [f"{name}: {default[name]} -> {value}" for name, value in now.items() if default[name] != value]
