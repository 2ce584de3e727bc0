"""Tables of measured figures, between `<!-- figures FILE: arm, arm -->` and `<!-- end -->` in a page of docs/.

`python scripts/site/improvements.py` writes them into the pages again; the contract tests fail where a page differs.
FILE lies in docs/results: a `result.json` of `mmldlm benchmark` (for one with `--scaling` a network takes the place of
arms, or `measured` with more files), a `validation.json` of `mmldlm validate`, a `profile/summary.json` of a run, the
`newcomer.json` of scripts/newcomer.sh, or the `corpus.json` of docs/results/corpus.py. Nothing in a table is typed.
`python scripts/site/improvements.py RESULT.json NAME` keeps one, without single trials and places of this machine.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from mmldlm.benchmark.scaling import prediction_table
from mmldlm.reports import markdown_rows

DOCS = Path(__file__).resolve().parents[2] / "docs"
RESULTS = DOCS / "results"
MARK = re.compile(
    r"^(?P<mark><!-- figures (?P<file>[\w-]+\.json)(?:: (?P<arms>[^>]*?))? -->)\n"
    r"(?:(?:(?!<!-- figures ).)*?^<!-- end -->\n)?",
    flags=re.MULTILINE | re.DOTALL,
)


def fill(text: str) -> str:
    """The page with its tables as their files have them."""
    return MARK.sub(lambda match: f"{match['mark']}\n\n{_table_of(match)}\n\n<!-- end -->\n", text)


def _table_of(match: re.Match[str]) -> str:
    return table(match["file"], match["arms"]).rstrip()


def refresh() -> None:
    """Write the tables into the pages again."""
    for page in sorted(DOCS.glob("*.md")):
        before = page.read_text()
        if (after := fill(before)) != before:
            page.write_text(after)
            print(f"{page.relative_to(DOCS.parent)}: tables written")


def table(file: str, arms: str | None) -> str:
    """The arms of a comparison, or all of them, with machine, date and command below."""
    result = json.loads((RESULTS / file).read_text())
    if "longest" in result:
        return profile_table(result)
    if "cores" in result:
        return walk_table(result)
    if "checks" in result:
        return validation_table(result, file)
    if "encode_gpu_hours" in result:
        return corpus_table(result)
    if result["kind"] == "scaling":
        return scaling_table(result, file, arms or "")
    names = [name.strip() for name in arms.split(",")] if arms else [row["name"] for row in result["rows"]]
    return comparison_table(result, file, names)


def comparison_table(result: dict[str, Any], file: str, names: list[str]) -> str:
    """Arms beside the baseline. As in the tool, one that varies too much is not measured, and nothing is compared with
    a baseline that does."""
    rows = {row["name"]: row for row in result["rows"]}
    noisy = _unmeasured(rows[result["baseline"]])
    compared = [] if noisy else ["against the baseline (95 % interval)", "verdict"]
    head = ["arm", "tokens/s", *compared, "peak memory, GiB", "loss difference"]
    cells = [_cells(rows[name], compared=not noisy) for name in names]
    if any(row.get("expected") for row in rows.values()):
        head += ["memory", "plan: speed, memory"]
        cells = [row + _plan_cells(rows[name]) for row, name in zip(cells, names, strict=True)]
    against = f"the baseline is {noisy}; so nothing is compared with it" if noisy else _again(result)
    return "\n".join([*markdown_rows(head, cells), "", _machine(result, file, against)])


def _unmeasured(row: dict[str, Any]) -> str:
    """Why the speed of an arm is not shown, if so."""
    if row["failure"]:
        return str(row["failure"])
    return f"not measured: {row['doubt']}" if row["doubt"] else ""


def _again(result: dict[str, Any]) -> str:
    if not (noise := result["noise"]):
        return "the baseline was measured once"
    return f"the baseline against itself: {noise['value']:.2f} ({noise['low']:.2f} to {noise['high']:.2f})"


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


def scaling_table(result: dict[str, Any], file: str, what: str) -> str:
    """The prediction over one network, or what several runs measured beside it."""
    if what.startswith("measured"):
        return measured_table([file, *what.removeprefix("measured").replace(",", " ").split()])
    shown = prediction_table(result["predicted"], what)
    return "\n".join([*markdown_rows(shown.head, shown.rows), "", _made_by(result, file)])


def measured_table(names: list[str]) -> str:
    """A row for each run of `mmldlm benchmark --scaling`."""
    head = [
        "ranks",
        "exchanges in a step",
        "MB sent by a rank",
        "the model's",
        "s a step",
        "s without exchanges",
    ]
    head += ["s of exchanges alone", "hidden", "agreements", "efficiency", "the model's"]
    rows = []
    for name in names:
        one = json.loads((RESULTS / name).read_text())["measured"]
        many = ", ".join(f"{count} {kind}" for kind, count in one["exchanges"].items())
        rows.append([
            f"{one['kind']}, {one['nodes']} x {one['ranks'] // one['nodes']}", many, f"{one['sent'] / 1e6:.2f}",
            f"{one['predicted']['sent_gpu'] / 1e6:.2f}", f"{one['seconds']:.2f}", f"{one['seconds_alone']:.2f}",
            f"{one['communication']:.2f}", f"{one['overlap']:.0%}", str(one["agreements"]), f"{one['efficiency']:.0%}",
            f"{one['predicted']['efficiency']:.0%}",
        ])  # fmt: skip
    made = "\n".join(_made_by(json.loads((RESULTS / name).read_text()), name) for name in names)
    return "\n".join([*markdown_rows(head, rows), "", made])


def corpus_table(result: dict[str, Any]) -> str:
    """What so many sentences need."""
    small, large = result["stores"].values()
    rows = [
        ["text, TB", f"{result['text_terabytes']:.1f}"],
        [f"pair store with {small['channels']} channels, TB", f"{small['terabytes']:.1f}"],
        [f"pair store with {large['channels']:,} channels, TB", f"{large['terabytes']:.1f}"],
        ["tokens, 10^9", f"{result['tokens'] / 1e9:,.0f}"],
        ["preparing with MiniLM, hours of an H200", f"{result['encode_gpu_hours']:,.0f}"],
        ["written by each of these, MB/s", f"{result['encode_megabytes_per_second']:.0f}"],
    ]
    for name, epoch in result["epochs"].items():
        rows.append([f"one epoch of `{name}`, hours of an H200", f"{epoch['gpu_hours']:,.0f}"])
        rows.append(["read by each of these, MB/s", f"{epoch['read_megabytes_per_second']:.0f}"])
    return "\n".join(markdown_rows([f"{result['sentences']:,} sentences", "need"], rows))


def _made_by(result: dict[str, Any], file: str) -> str:
    world = result["environment"]
    command = " ".join(f"'{word}'" if " " in word or "[" in word else word for word in world["command"])
    where = f"{world['date'][:10]}, torch {world['versions']['torch']}, load {world['load_average'][0]:.0f}"
    return f"`docs/results/{file}`, {where}, by\n\n    {command}\n"


def _cells(row: dict[str, Any], *, compared: bool) -> list[str]:
    if row["failure"]:
        return [row["name"], row["failure"], *(["", ""] if compared else []), "", ""]
    noisy = _unmeasured(row)
    gap = "not gated" if row["loss_difference"] is None else f"{row['loss_difference']:.1e}"
    return [
        row["name"],
        noisy or f"{row['tokens_per_second']['median']:,.0f}",
        *(_verdict_cells(row, noisy) if compared else []),
        f"{(row['memory'] or row['resident']) / 2**30:.2f}",
        gap,
    ]


def _verdict_cells(row: dict[str, Any], noisy: str) -> list[str]:
    speedup = row["speedup"]
    if noisy or not speedup:
        return ["", "" if noisy else row["verdict"]]
    return [f"{speedup['value']:.2f} ({speedup['low']:.2f} to {speedup['high']:.2f})", row["verdict"]]


def _plan_cells(row: dict[str, Any]) -> list[str]:
    """Memory as a share of the baseline's, and what a plan expected."""
    share, hoped = row.get("memory_share"), row.get("expected")
    plan = f"{100 * hoped['speed']:.0f} %, {100 * hoped['memory']:.0f} %" if hoped else ""
    return [f"{100 * share:.0f} %" if share else "", plan]


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
        (result.get(part) or {}).pop("store", None)
    if result.get("measured"):
        result.pop("predicted")  # the same in all of them
    command = result["environment"]["command"]
    if "--out" in command:
        at = command.index("--out")
        del command[at : at + 2]
    command[0] = "mmldlm"
    (RESULTS / name).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:]:
        keep(Path(sys.argv[1]), sys.argv[2])
    else:
        refresh()
