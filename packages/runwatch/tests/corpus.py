"""The labelled logs: who makes them, what is wrong with each, and how well the monitor finds it.

    python -m tests.corpus OUT [--docs docs]

writes all logs into OUT, reads them with the monitor and prints the table that stands in docs/corpus.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runwatch.settings import MonitorSettings
from runwatch.sources import find_runs
from runwatch.watch import RunWatch

from tests.log_writers import WRITERS
from tests.tiny_training import START, Training

AT = 300
TEXT_FORMATS = tuple(name for name in WRITERS if name != "own")


@dataclass
class Case:
    """A log to be made, and the truth about it."""

    name: str
    format: str
    fault: str = ""
    expected: tuple[str, ...] = ()
    delay: int = 0
    """Steps within which each expected code must be found."""
    also: tuple[str, ...] = ()
    """What may be reported besides, because it is true as well."""
    settings: dict[str, Any] = field(default_factory=dict)
    extra: str = ""
    """Text or events at the step of the fault."""
    ends: bool = False
    """The log ends with the fault."""
    silent: float = 0.0
    """Seconds that pass after the last line while the monitor watches."""
    from_step: int = AT
    real_clock: bool = False
    """The log was written just now by a process."""
    later: float = 0.0
    """Seconds that have passed since then."""


def cases(offset: int = 0) -> list[Case]:
    """All of them; with an offset, the same faults in trainings of other seeds."""
    found = [*_healthy(), *_in_all_formats(), *_in_one_format(), *_messages(), *_ledgers()]
    for case in found:
        case.settings["seed"] = case.settings.get("seed", 0) + offset
    return found


def _healthy() -> Iterator[Case]:
    for seed, name in enumerate(WRITERS):
        yield Case(f"healthy_{name}", name)
        yield Case(f"healthy_{name}_noisy", name, settings={"seed": 50 + seed, "batch": 8, "lr": 1e-3})
    yield Case("healthy_own_sparse", "own", settings={"seed": 70, "log_every": 5, "steps": 1200})
    yield Case("healthy_own_long", "own", settings={"seed": 71, "steps": 3000, "train_size": 200_000})


def _in_all_formats() -> Iterator[Case]:
    gradients = {"own", "old", "huggingface", "titan", "words"}
    rates = {"own", "lightning", "huggingface", "words"}
    for name in WRITERS:
        bad = ("M101", "M201") if name in gradients else ("M101",)
        yield Case(f"nan_{name}", name, "nan_batch", bad, delay=1)
        yield Case(f"spike_{name}", name, "bad_batch", ("M102",), delay=1, also=("M202",))
        jump = ("M204",) if name in rates else ()
        yield Case(
            f"divergence_{name}", name, "huge_rate", ("M103", *jump), delay=20, also=("M102", "M202", "M801")
        )
    for name in sorted(gradients):
        yield Case(f"exploding_{name}", name, "exploding", ("M202",), delay=5)
    for name in TEXT_FORMATS:
        yield Case(f"slow_{name}", name, "slow", ("M301",), delay=6)


def _in_one_format() -> Iterator[Case]:
    yield Case("vanishing", "own", "vanishing", ("M203",), delay=6)
    yield Case("overflow", "own", "overflow", ("M201", "M205"), delay=7)
    yield Case("zero_rate_own", "own", "zero_rate", ("M204",), delay=6)
    yield Case("zero_rate_words", "words", "zero_rate", ("M204",), delay=6)
    yield Case("restarted_schedule", "huggingface", "restarted_schedule", ("M204",), delay=2)
    yield Case("short_schedule", "words", "short_schedule", ("M204",), delay=30, from_step=190)
    yield Case("slow_own", "own", "slow", ("M301",), delay=6)
    yield Case("jitter_own", "own", "jitter", ("M302",), delay=60, also=("M301",))
    yield Case("jitter_titan", "titan", "jitter", ("M302",), delay=60, also=("M301",))
    yield Case("slow_data", "own", "slow_data", ("M303",), delay=10, also=("M301",))
    plateau = {"steps": 2000, "seed": 3}
    yield Case(
        "plateau",
        "own",
        "random_labels",
        ("M104",),
        delay=700,
        also=("M803",),
        settings=plateau,
        from_step=900,
    )
    memorise = {"train_size": 96, "steps": 1200, "lr": 1e-2}
    yield Case("memorising_own", "own", "", ("M801",), delay=200, settings=dict(memorise), from_step=50)
    yield Case(
        "memorising_nanogpt", "nanogpt", "", ("M801",), delay=200, settings=dict(memorise), from_step=50
    )
    yield Case("latent_collapse", "own", "latent_collapse", ("M802",), delay=120, also=("M103", "M102"))
    yield Case("latent_ignored", "own", "latent_ignored", ("M803",), delay=150, from_step=50)
    yield Case("shrunk_batch", "own", "shrunk_batch", ("M402",), delay=6, also=("M301",))


def _messages() -> Iterator[Case]:
    trace = 'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    main()\n'
    oom = f"\n{trace}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...\n"
    yield Case("out_of_memory", "nanogpt", "", ("M401", "M502"), extra=oom, ends=True)
    error = f"\n{trace}KeyError: 'input_ids'\n"
    for name in ("old", "words", "huggingface"):
        yield Case(f"crash_{name}", name, "", ("M502",), extra=error, ends=True)
    watchdog = (
        "\n[rank0]:[E ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=880, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600695 milliseconds before timing out.\n"
    )
    yield Case("collective_timeout", "titan", "", ("M602",), extra=watchdog, ends=True)
    full = f"\n{trace}OSError: [Errno 28] No space left on device: 'out/ckpt.pt'\n"
    yield Case("disk_full", "nanogpt", "", ("M403", "M502"), extra=full, ends=True)
    yield Case("killed", "words", "", ("M502",), extra="\nKilled\n", ends=True)
    for name in ("words", "old"):
        yield Case(f"stalled_{name}", name, "", ("M501",), ends=True, silent=3000.0)
    saves = "saving checkpoint to out\n"
    yield Case("overdue_checkpoint", "words", "saves_stop", ("M701",), delay=110, extra=saves)


def _ledgers() -> Iterator[Case]:
    yield Case(
        "failed_save", "own", "", ("M702",), extra=_event("save_failed", reason="no space left on the disk")
    )
    handled = _event("out_of_memory", before=8192, after=4096)
    yield Case("handled_out_of_memory", "own", "", ("M401",), extra=handled)
    yield Case("rolled_back", "own", "", ("M504",), extra=_event("rolled_back", reason="loss spike"))
    slow = _event("straggler", rank=3, name="rank 3 on node-1")
    yield Case("straggler", "own", "", ("M601",), delay=2, extra=slow)
    again = "\n".join([_event("stopped", reason="RuntimeError: bad"), _event("resumed")] * 3)
    yield Case("restart_loop", "own", "", ("M503",), also=("M502",), extra=again)
    stopped = _event("stopped", reason="UserError: shard is damaged")
    yield Case("stopped_by_error", "own", "", ("M502",), extra=stopped, ends=True)


def _event(event: str, **fields: Any) -> str:
    return json.dumps({"event": event, "at": START + 0.52 * AT, "step": AT, **fields})


def make_log(case: Case, folder: Path) -> Path:
    """Train, with the fault, and leave the log."""
    numbers, total = _trained(case.fault, tuple(sorted(case.settings.items())))

    def lines() -> Iterator[Any]:
        for line in map(dict, numbers):
            if case.fault == "shrunk_batch" and line["step"] >= AT and "loss" in line:
                line["batch_size"] = 16
            yield line
            if case.extra and line["step"] == AT and "loss" in line and case.fault != "saves_stop":
                yield case.extra
            if case.fault == "saves_stop" and line["step"] % 40 == 0 and line["step"] < AT and "loss" in line:
                yield case.extra
            if case.ends and line["step"] >= AT:
                return

    suffix = "" if case.format == "own" else ".log"
    return WRITERS[case.format](folder / f"{case.name}{suffix}", lines(), total)


@functools.cache
def _trained(fault: str, settings: tuple[tuple[str, Any], ...]) -> tuple[list[dict[str, Any]], int]:
    """One training for all the formats that tell of it."""
    training = Training(fault=fault, fault_step=AT, **dict(settings))
    return list(training.lines()), training.steps


@dataclass
class Verdict:
    """What the monitor said about one log."""

    case: Case
    found: dict[str, int]
    """Expected codes that were found in time, with their delay in steps."""
    missed: tuple[str, ...]
    false: tuple[str, ...]


def judge(case: Case, path: Path) -> Verdict:
    """Read a log once and compare with its label."""
    source, now = find_runs([str(path)])[0], [time.time() + case.later if case.real_clock else START + 1e5]
    run = RunWatch(source, MonitorSettings(), clock=lambda: now[0])
    run.poll(live=False)
    if case.silent:
        newest = run.line_time or path.stat().st_mtime
        now[0] = newest + case.silent
        run.panel.tick(now[0], live=True)
    run.close()
    found: dict[str, int] = {}
    false: set[str] = set()
    for alert in run.panel.book.alerts.values():
        late = (alert.first_step if alert.first_step is not None else case.from_step) - case.from_step
        if alert.code in case.expected and 0 <= late <= case.delay:
            found[alert.code] = min(found.get(alert.code, late), late)
        elif alert.code not in case.also and (late < 0 or alert.code not in case.expected):
            false.add(alert.code)  # too early is false too
    missed = tuple(code for code in case.expected if code not in found)
    return Verdict(case, found, missed, tuple(sorted(false)))


def score(verdicts: list[Verdict]) -> dict[str, Any]:
    """Precision and recall over all alerts, and per code."""
    right = sum(len(verdict.found) for verdict in verdicts)
    missed, false = sum(len(v.missed) for v in verdicts), sum(len(v.false) for v in verdicts)
    delays: dict[str, list[int]] = {}
    for verdict in verdicts:
        for code, late in verdict.found.items():
            delays.setdefault(code, []).append(late)
    return {
        "logs": len(verdicts),
        "healthy": sum(not verdict.case.expected for verdict in verdicts),
        "found": right,
        "missed": missed,
        "false": false,
        "precision": right / max(1, right + false),
        "recall": right / max(1, right + missed),
        "delays": {code: {"logs": len(found), "most": max(found)} for code, found in sorted(delays.items())},
    }


def markdown(verdicts: list[Verdict], numbers: dict[str, Any]) -> str:
    """The page of the docs."""
    lines = [
        "# The labelled logs",
        "",
        "Losses, gradients and validations come from real trainings of a small network. Faults are injected into its",
        "batches, gradients, rate or clock. The clock is simulated, so that the logs are the same on every machine.",
        "Each training is written in the formats of seven trainers. Lines of NCCL, of a full GPU or disk, and of a",
        "killed process are inserted as those programs print them. More formats are in [accuracy](accuracy.md).",
        "*May also* lists what is also true, such as a spike when a divergence begins.",
        "",
        f"{numbers['logs']} logs, {numbers['healthy']} of them healthy: {numbers['found']} faults found in time, "
        f"{numbers['missed']} missed, {numbers['false']} false alarms. Precision {numbers['precision']:.3f}, "
        f"recall {numbers['recall']:.3f}.",
        "",
        "| code | logs with it | longest delay, steps |",
        "|---|---|---|",
    ]
    lines += [f"| {code} | {item['logs']} | {item['most']} |" for code, item in numbers["delays"].items()]
    lines += [
        "",
        "| log | format | expected | allowed delay | found after | may also | false |",
        "|---|---|---|---|---|---|---|",
    ]
    for verdict in verdicts:
        case = verdict.case
        found = ", ".join(f"{code} {late}" for code, late in verdict.found.items())
        row = (
            case.name,
            case.format,
            ", ".join(case.expected) or "nothing",
            case.delay if case.expected else "",
        )
        missed = f" MISSED {', '.join(verdict.missed)}" if verdict.missed else ""
        cells = (*row, found + missed, ", ".join(case.also), ", ".join(verdict.false))
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Make, judge, tell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--docs", type=Path)
    parser.add_argument(
        "--offset", type=int, default=0, help="added to every seed: the same faults, other logs"
    )
    options = parser.parse_args()
    verdicts = [judge(case, make_log(case, options.out)) for case in cases(options.offset)]
    numbers = score(verdicts)
    for verdict in verdicts:
        if verdict.missed or verdict.false:
            print(
                f"{verdict.case.name}: missed {verdict.missed}, false {verdict.false}, found {verdict.found}"
            )
    print(json.dumps(numbers))
    if options.docs:
        (options.docs / "corpus.md").write_text(markdown(verdicts, numbers))
        (options.docs / "corpus.json").write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
