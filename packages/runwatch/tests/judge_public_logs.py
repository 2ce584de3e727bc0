"""Runs runwatch over logs of public repositories and compares its answers with labels made by reading them.

    python -m tests.judge_public_logs FOLDER      # from packages/runwatch

The logs are not part of this repository; `public_logs.json` has their names, SHA-256 sums and labels. Of the first
43, a file whose name has an odd last digit in its SHA-1 is held out: it was not looked at while the monitor was
written. The second set was gathered later, and nobody who wrote the monitor saw it.
"""

import argparse
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path

from .formats.judge import CANNOT_JUDGE, ask, last_loss

LABELS = Path(__file__).with_name("public_logs.json")
HALVES = ("development", "held_out", "second")
KINDS = ("right", "inexact", "missed", "false", "unread")
FAULTY = {"nan": {"M101"}}
WITHOUT_LOSS = ("no_loss", "not_a_log")


@dataclass(frozen=True)
class Verdict:
    name: str
    half: str
    kind: str
    problems: tuple[str, ...]


def judge(path: Path, label: dict) -> Verdict:
    code, answer = ask(path)
    runs = answer.get("runs", [])
    alerts = [alert for run in runs for alert in run["alerts"] if alert["level"] in ("warn", "error")]
    if label["state"] in WITHOUT_LOSS:
        kind, problems = _judge_without_loss(label, code, alerts)
    elif label["state"] in FAULTY:
        kind, problems = _judge_faulty(label, code, alerts)
    else:
        kind, problems = _judge_sound(label, code, alerts, runs)
    if kind == "right" and label["state"] not in WITHOUT_LOSS and code != CANNOT_JUDGE:
        problems = _judge_numbers(label, runs)
        kind = "inexact" if problems else "right"
    return Verdict(path.name, label["half"], kind, tuple(problems))


def _judge_without_loss(label: dict, code: int, alerts: list[dict]) -> tuple[str, list[str]]:
    if code in label.get("exits", [CANNOT_JUDGE]):
        return "right", []
    kind = "false" if code == 1 else "missed"
    return kind, [f"exit code {code} for a file without a loss, alerts {_codes(alerts)}"]


def _judge_faulty(label: dict, code: int, alerts: list[dict]) -> tuple[str, list[str]]:
    errors = {alert["code"] for alert in alerts if alert["level"] == "error"}
    if code == 1 and errors & FAULTY[label["state"]]:
        return "right", []
    return "missed", [f"exit code {code}, alerts {_codes(alerts)}, expected {sorted(FAULTY[label['state']])}"]


def _judge_sound(label: dict, code: int, alerts: list[dict], runs: list[dict]) -> tuple[str, list[str]]:
    false = [
        alert for alert in alerts if alert["code"] not in label["may_warn"] and label["state"] != "degenerate"
    ]
    if false:
        return "false", [f"{alert['level']} {alert['code']} ({alert['evidence']})" for alert in false]
    if code == CANNOT_JUDGE:
        return (
            ("right", []) if label["unread_allowed"] else ("unread", ["cannot judge a log that has a loss"])
        )
    if all(last_loss(run) is None for run in runs):
        return "unread", [f"exit code {code} without a loss"]
    if code not in label.get("exits", [0]) and label["state"] != "degenerate":
        return "false", [f"exit code {code}"]
    return "right", []


def _judge_numbers(label: dict, runs: list[dict]) -> list[str]:
    problems = []
    last = runs[-1]
    if label["runs"] is not None and len(runs) != label["runs"]:
        problems.append(f"{len(runs)} runs, expected {label['runs']}")
    if label["last_steps"] and last.get("step") not in label["last_steps"]:
        problems.append(f"step {last.get('step')}, expected one of {label['last_steps']}")
    loss = last_loss(last)
    if loss is None or not any(
        math.isclose(loss, each, rel_tol=0.01, abs_tol=1e-4) for each in label["last_losses"]
    ):
        problems.append(f"loss {loss}, expected one of {label['last_losses']}")
    return problems


def _codes(alerts: list[dict]) -> list[str]:
    return sorted({alert["code"] for alert in alerts})


def judge_folder(folder: Path) -> list[Verdict]:
    """One verdict for each labelled file that is in the folder, unchanged."""
    verdicts = []
    for name, label in json.loads(LABELS.read_text(encoding="utf-8")).items():
        for path in sorted(folder.rglob(name)):
            if hashlib.sha256(path.read_bytes()).hexdigest() == label["sha256"]:
                verdicts.append(judge(path, label))
                break
    return verdicts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--half", choices=HALVES)
    parser.add_argument("--quiet", action="store_true", help="the table only")
    options = parser.parse_args()
    verdicts = judge_folder(options.folder)
    print("| half | logs | " + " | ".join(KINDS) + " |\n" + "|---" * (len(KINDS) + 2) + "|")
    for half in HALVES:
        chosen = [verdict for verdict in verdicts if verdict.half == half]
        counts = [sum(verdict.kind == kind for verdict in chosen) for kind in KINDS]
        print(f"| {half} | {len(chosen)} | " + " | ".join(map(str, counts)) + " |")
    for verdict in verdicts:
        if verdict.problems and options.half in (None, verdict.half) and not options.quiet:
            print(f"{verdict.kind:8} {verdict.name}: " + "; ".join(verdict.problems))


if __name__ == "__main__":
    main()
