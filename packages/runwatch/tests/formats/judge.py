"""Writes the logs of trainers, asks runwatch about each and compares its answer with the truth.

python -m tests.formats.judge            # from packages/runwatch; a table, and every wrong judgement
python -m tests.formats.judge --keep DIR # keeps the logs that were written
"""

import argparse
import contextlib
import importlib
import io
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .failures import append_failure
from .simulation import Log, Run, Trainer

DAY = 86_400.0
HALVES = ("development", "held_out", "last")
EXPECTED_CODES = {
    "nan": {"M101"},
    "diverging": {"M103"},
    "memory": {"M401"},
    "hung": {"M501", "M502", "M602"},
}
MAY_COME_TOO = {
    "nan": {"M101", "M102", "M103", "M105", "M201", "M202", "M205", "M801", "M502"},
    "diverging": {"M101", "M102", "M103", "M104", "M201", "M202", "M801"},
    "memory": {"M401", "M402", "M502"},
    "hung": {"M501", "M502", "M602", "M603", "M601"},
}
CANNOT_JUDGE = 3


@dataclass(frozen=True)
class Case:
    trainer: Trainer
    scenario: str

    @property
    def name(self) -> str:
        return f"{self.trainer.name}-{self.scenario}"

    def write(self, folder: Path) -> tuple[Path, Log]:
        """The log of this case as a file of its usual name."""
        run, log = Run(self.trainer.name, self.scenario), Log()
        self.trainer.write(run, log)
        if self.trainer.errors is not None:
            append_failure(run, log, self.trainer.errors)
        path = folder / self.name / self.trainer.file_name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(log.text, encoding="utf-8", newline="")
        if self.scenario in ("ended", "hung"):
            old = time.time() - 3 * DAY
            os.utime(path, (old, old))
        return path, log


@dataclass(frozen=True)
class Verdict:
    """How runwatch's answer compares with the truth; `problems` is empty where it is right."""

    case: Case
    kind: str
    """right, missed, false, unread or inexact (right alerts, wrong numbers)."""
    problems: tuple[str, ...]
    rate_read: bool | None = None
    """Whether a printed rate is among the values; None where none is printed."""


def cases(trainers: Iterable[Trainer]) -> list[Case]:
    return [Case(trainer, scenario) for trainer in trainers for scenario in trainer.scenarios]


def ask(path: Path, *options: str) -> tuple[int, dict]:
    """Exit code and JSON of `runwatch PATH --once --json`, in this process."""
    from runwatch.cli import main

    output, words = io.StringIO(), sys.argv
    sys.argv = ["runwatch", str(path), "--once", "--json", *options]
    code = 0
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
            main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        sys.argv = words
    text = output.getvalue().strip()
    return code, json.loads(text.splitlines()[-1]) if text else {}


def judge(case: Case, folder: Path) -> Verdict:
    path, log = case.write(folder)
    code, answer = ask(path)
    runs = answer.get("runs", [])
    alerts = [alert for run in runs for alert in run["alerts"] if alert["level"] in ("warn", "error")]
    errors = {alert["code"] for alert in alerts if alert["level"] == "error"}
    if not case.trainer.has_loss and case.scenario not in ("memory", "hung"):
        kind, problems = _judge_without_loss(case, code, errors)
    elif case.scenario in ("healthy", "ended"):
        kind, problems = _judge_sound(case, code, alerts)
    else:
        kind, problems = _judge_faulty(case, code, {alert["code"] for alert in alerts}, errors)
    numbers = _judge_numbers(case, runs, log) if case.trainer.has_loss else ()
    if kind == "right" and case.trainer.has_loss and not any(last_loss(run) is not None for run in runs):
        kind = "unread"
    elif kind == "right" and numbers:
        kind = "inexact"
    return Verdict(case, kind, (*problems, *numbers), _rate_read(runs, log))


def _judge_without_loss(case: Case, code: int, errors: set[str]) -> tuple[str, tuple[str, ...]]:
    if code == CANNOT_JUDGE or (case.scenario == "nan" and code == 1 and errors <= MAY_COME_TOO["nan"]):
        return "right", ()
    if errors:
        return "false", (f"exit code {code}, {sorted(errors)} in a log without a loss",)
    return "missed", (f"exit code {code} for a log without a loss, expected {CANNOT_JUDGE}",)


def _judge_sound(case: Case, code: int, alerts: list[dict]) -> tuple[str, tuple[str, ...]]:
    false = [
        f"{alert['code']} ({alert['evidence']})"
        for alert in alerts
        if alert["code"] not in case.trainer.may_warn
    ]
    if false:
        return "false", tuple(f"false alarm {text}" for text in false)
    if code == CANNOT_JUDGE:
        return "unread", ("cannot judge a log that has a loss",)
    return ("right", ()) if code == 0 else ("false", (f"exit code {code} for a sound run",))


def _judge_faulty(case: Case, code: int, codes: set[str], errors: set[str]) -> tuple[str, tuple[str, ...]]:
    expected = set(EXPECTED_CODES[case.scenario])
    if case.trainer.errors == "plain" and case.scenario == "memory":
        expected.add("M502")  # memory of the host, not of a device
    if case.scenario == "nan" and case.trainer.filters_nan:
        expected |= {"M105", "M201", "M205"}
    if not errors & expected:
        kind = "unread" if code == CANNOT_JUDGE else "missed"
        return kind, (f"exit code {code}, errors {sorted(errors)}, expected one of {sorted(expected)}",)
    if code != 1:
        return "missed", (f"exit code {code}, expected 1",)
    false = codes - MAY_COME_TOO[case.scenario] - expected - set(case.trainer.may_warn)
    return ("false", (f"false alarms {sorted(false)}",)) if false else ("right", ())


def _judge_numbers(case: Case, runs: list[dict], log: Log) -> tuple[str, ...]:
    if len(runs) != 1:
        return (f"{len(runs)} runs, expected 1",)
    problems = []
    step, loss = runs[0].get("step"), last_loss(runs[0])
    if log.steps and not _close(step, log.steps, log.step_tolerance, 0.0):
        problems.append(f"step {step}, expected one of {log.steps}")
    if case.scenario != "nan" and not _close(loss, log.losses, log.tolerance):
        problems.append(f"loss {loss}, expected one of {log.losses}")
    return tuple(problems)


def _rate_read(runs: list[dict], log: Log) -> bool | None:
    if log.rate is None or not runs:
        return None
    values = [value for name, value in runs[-1].get("values", {}).items() if name != "loss"]
    return any(
        isinstance(value, int | float) and math.isclose(value, log.rate, rel_tol=0.02) for value in values
    )


def last_loss(run: dict) -> float | None:
    """The training loss, or the validation loss where a program prints no other."""
    values = run.get("values", {})
    value = values.get("loss", values.get("valid_loss"))
    return None if value is None else float(value)


def _close(value: float | None, allowed: tuple[float, ...], tolerance: float, least: float = 1e-3) -> bool:
    if value is None:
        return False
    return any(math.isclose(value, each, rel_tol=tolerance, abs_tol=least) for each in allowed)


def trainers_of(half: str) -> list[Trainer]:
    return list(importlib.import_module(f".{half}", __package__).TRAINERS)


def table(verdicts: list[Verdict]) -> str:
    """Counts per trainer, as Markdown."""
    kinds = ("right", "inexact", "missed", "false", "unread")
    rows = ["| trainer | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 1) + "|"]
    names = list(dict.fromkeys(verdict.case.trainer.name for verdict in verdicts))
    for name in [*names, None]:
        chosen = [verdict for verdict in verdicts if name in (None, verdict.case.trainer.name)]
        counts = [sum(verdict.kind == kind for verdict in chosen) for kind in kinds]
        rows.append(f"| {name or '**all**'} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("half", nargs="?", default="development", choices=HALVES)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--quiet", action="store_true", help="the table only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        verdicts = [judge(case, folder) for case in cases(trainers_of(options.half))]
    print(table(verdicts))
    rates = [verdict.rate_read for verdict in verdicts if verdict.rate_read is not None]
    print(f"printed rates read: {sum(rates)} of {len(rates)}")
    for verdict in verdicts:
        if verdict.problems and not options.quiet:
            print(f"{verdict.kind:8} {verdict.case.name}: " + "; ".join(verdict.problems))
    sys.exit(any(verdict.problems for verdict in verdicts))


if __name__ == "__main__":
    main()
