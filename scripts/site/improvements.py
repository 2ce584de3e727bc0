"""Tables of measured figures: a page says `<!-- figures FILE: arm, arm -->`, the build puts the table there.

FILE lies in docs/results: a `result.json` of `mmldlm benchmark`, a `validation.json` of `mmldlm validate`, a
`profile/summary.json` of a run, or the `newcomer.json` of scripts/newcomer.sh. Nothing in a table is typed by hand.
`python scripts/site/improvements.py RESULT.json NAME` keeps one, without single trials and places of this machine.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
MARK = re.compile(r"^<!-- figures (?P<file>[\w-]+\.json)(?:: (?P<arms>[^>]*?))? -->$", flags=re.MULTILINE)


def fill(text: str) -> str:
    """The page with its tables."""
    return MARK.sub(lambda match: table(match["file"], match["arms"]), text)


def table(file: str, arms: str | None) -> str:
    """The arms of a comparison, or all of them, with machine, date and command below."""
    result = json.loads((RESULTS / file).read_text())
    if "longest" in result:
        return profile_table(result)
    if "cores" in result:
        return walk_table(result)
    if "checks" in result:
        return validation_table(result, file)
    names = [name.strip() for name in arms.split(",")] if arms else [row["name"] for row in result["rows"]]
    rows = {row["name"]: row for row in result["rows"]}
    head = "| arm | tokens/s | against the baseline (95 % interval) | verdict | peak memory, GiB | loss difference |"
    planned = any(row.get("expected") for row in rows.values())
    head += " memory | plan: speed, memory |" if planned else ""
    lines = [head, "|---" * (head.count("|") - 1) + "|"]
    lines += [_row(rows[name]) + (_plan_cells(rows[name]) if planned else "") for name in names]
    return "\n".join([*lines, "", _origin(result, file)])


def validation_table(result: dict[str, Any], file: str) -> str:
    """The checklist, a line for each check."""
    marks = {True: "✓", False: "✗", None: "not run"}
    lines = ["| check | | figures |", "|---|---|---|"]
    lines += [f"| {row['name']} | {marks[row['passed']]} | {row['detail']} |" for row in result["checks"]]
    return "\n".join([*lines, "", _machine(result, file)])


def profile_table(result: dict[str, Any], num_rows: int = 12) -> str:
    """The operators that take longest."""
    lines = [f"| {result['what']} | ms a step | calls a step | share |", "|---|---|---|---|"]
    for row in result["longest"][:num_rows]:
        calls, share = row["calls_per_step"], row["share"]
        lines.append(f"| `{row['name']}` | {row['ms_per_step']:.0f} | {calls:.0f} | {share:.1%} |")
    return "\n".join(lines)


def walk_table(result: dict[str, Any]) -> str:
    """The steps of scripts/newcomer.sh."""
    lines = ["| step | seconds |", "|---|---|"]
    lines += [f"| {row['step']} | {row['seconds']:.0f} |" for row in result["steps"]]
    machine = f"{result['date']}, {result['cores']} CPU cores, load {result['load']} at the end"
    origin = f"{machine}, by `bash scripts/newcomer.sh`."
    return "\n".join([*lines, "", origin])


def _row(row: dict[str, Any]) -> str:
    if row["failure"]:
        return f"| {row['name']} | {row['failure']} | | | | |"
    speedup, rate = row["speedup"], row["tokens_per_second"]["median"]
    interval = f"{speedup['value']:.2f} ({speedup['low']:.2f} to {speedup['high']:.2f})"
    gap = "not gated" if row["loss_difference"] is None else f"{row['loss_difference']:.1e}"
    memory = row["memory"] or row["resident"]
    return f"| {row['name']} | {rate:,.0f} | {interval} | {row['verdict']} | {memory / 2**30:.2f} | {gap} |"


def _plan_cells(row: dict[str, Any]) -> str:
    """Memory as a share of the baseline's, and what a plan expected."""
    share, hoped = row.get("memory_share"), row.get("expected")
    plan = f"{100 * hoped['speed']:.0f} %, {100 * hoped['memory']:.0f} %" if hoped else ""
    texts = (f"{100 * share:.0f} %" if share else "", plan)
    return "".join(f" {text} |" for text in texts)


def _origin(result: dict[str, Any], file: str) -> str:
    noise = result["noise"]
    against = f"the baseline against itself: {noise['value']:.2f} ({noise['low']:.2f} to {noise['high']:.2f})"
    return _machine(result, file, against)


def _machine(result: dict[str, Any], file: str, more: str = "") -> str:
    """Date, machine, versions and command."""
    world = result["environment"]
    gpus = ", ".join(gpu["name"] for gpu in world["gpus"])
    machine = gpus or f"{world['cpu']['usable_cores']} CPU cores, load {world['load_average'][0]:.1f}"
    command = " ".join(f"'{word}'" if " " in word or "[" in word else word for word in world["command"])
    facts = (
        f"{world['date'][:10]}, {machine}, torch {world['versions']['torch']}{f'; {more}' if more else ''}"
    )
    return f"{facts}. `docs/results/{file}`, by\n\n    {command}\n"


def keep(source: Path, name: str) -> None:
    """Copy a result into docs/results."""
    result = json.loads(source.read_text())
    result.pop("trials", None)
    for part in ("data", "options"):
        result.get(part, {}).pop("store", None)
    command = result["environment"]["command"]
    if "--out" in command:
        at = command.index("--out")
        del command[at : at + 2]
    command[0] = "mmldlm"
    (RESULTS / name).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    keep(Path(sys.argv[1]), sys.argv[2])
