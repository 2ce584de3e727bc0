"""What a benchmark leaves in its folder: result.json, table.md, chart.png and chart.svg, and logs/.

`result.json` is there after the first process has ended, marked partial until the last one has, so that nothing
measured is lost however the benchmark ends.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mmldlm.benchmark import chart
from mmldlm.benchmark.conditions import Outcome
from mmldlm.benchmark.environment import summary_lines
from mmldlm.benchmark.find_batch import Search
from mmldlm.benchmark.ladder import REFERENCE, Comparison
from mmldlm.benchmark.sweep import Sweep
from mmldlm.benchmark.tables import Table, comparison_table, search_table, sweep_table
from mmldlm.benchmark.trial import Bench
from mmldlm.durable import replace_file

FORMAT = 1
Result = Comparison | Sweep | Search


@dataclass
class Report:
    """One benchmark on its way into a folder."""

    folder: Path
    bench: Bench
    environment: dict[str, Any]
    data: dict[str, Any]
    """Where the documents come from."""
    notes: list[str] = field(default_factory=list)
    """What a reader must know, such as arms that were left out."""

    def write_trials(self) -> None:
        """What is known while the measuring goes on."""
        self._write_json({"kind": "trials", "partial": True})

    def write(self, result: Result, outcomes: list[Outcome]) -> Table:
        """The whole report; returns the table for the terminal."""
        table = _table(result)
        self._write_json(_values(result) | {"conditions": [asdict(outcome) for outcome in outcomes]})
        lines = [*self._head(result), table.markdown(), "", *self._foot(result, outcomes)]
        replace_file(self.folder / "table.md", ("\n".join(lines) + "\n").encode())
        _draw(result, self.folder)
        return table

    def _write_json(self, values: dict[str, Any]) -> None:
        whole = {
            "format": FORMAT,
            **values,
            "environment": self.environment,
            "options": self.bench.options.to_json(),
            "data": self.data,
            "notes": self.notes,
            "trials": [trial.to_json() for trial in self.bench.trials],
        }
        text = json.dumps(whole, indent=1, allow_nan=False)
        replace_file(self.folder / "result.json", text.encode())

    def _head(self, result: Result) -> list[str]:
        partial = ["**Partial: the benchmark was stopped before its end.**", ""] if result.partial else []
        facts = [*summary_lines(self.environment), f"data: {describe_data(self.data)}", self._method()]
        return ["# Benchmark", "", *partial, *(f"- {line}" for line in facts), ""]

    def _method(self) -> str:
        options = self.bench.options
        devices = sorted({trial.measurement.device for trial in self.bench.trials if trial.measurement})
        where = f" on {', '.join(devices)}" if devices else ""
        return (
            f"method: a fresh process for each of {options.repeats} interleaved repeats{where}, "
            f"{options.warmup} steps of warm-up, {options.steps} timed steps in blocks of {options.block}"
        )

    def _foot(self, result: Result, outcomes: list[Outcome]) -> list[str]:
        lines = [*self.remarks(result), *(outcome.line() for outcome in outcomes)]
        return [*(f"- {line}" for line in lines), "", "![Chart of the table above](chart.png)"]

    def remarks(self, result: Result) -> list[str]:
        """What stands below the table, for people."""
        if isinstance(result, Comparison):
            said = [f"{row.name}: {text}" for row in result.rows for text in row.warnings]
            return [*self.notes, *said, *_noise_lines(result), *self._gate_lines()]
        if isinstance(result, Search) and result.stopped_by:
            return [*self.notes, f"the search ended early: {result.stopped_by}"]
        return self.notes

    def _gate_lines(self) -> list[str]:
        options = self.bench.options
        if not options.gate_steps:
            return ["loss gate: off"]
        failed = [t.failure.reason for t in self.bench.trials if t.arm == REFERENCE and t.failure]
        if failed:
            return [f"loss gate: the reference died, so nothing was gated: {failed[0]}"]
        return [
            f"loss gate: mean of |loss - reference| / |reference| over the first {options.gate_steps} steps, and the "
            f"same of the held-out loss after them, each at most {options.tolerance:g}; the reference is the padded, "
            "eager fp32 path"
        ]


def _noise_lines(comparison: Comparison) -> list[str]:
    if comparison.noise is None:
        return ["noise: not known, so every interval is compared with 1"]
    noise = comparison.noise
    return [
        f"noise: {comparison.baseline} against itself gave {noise.value:.3f} (95 % interval {noise.low:.3f} to "
        f"{noise.high:.3f}); an arm is faster or slower only where its whole interval is beyond a factor of "
        f"{noise.margin:.3f}"
    ]


def _values(result: Result) -> dict[str, Any]:
    if isinstance(result, Sweep):
        return {"kind": "sweep", "partial": result.partial, "sweep": result.to_json()}
    if isinstance(result, Search):
        return {"kind": "find-batch", "partial": result.partial, "search": result.to_json()}
    return {
        "kind": "comparison",
        "partial": result.partial,
        "baseline": result.baseline,
        "noise": asdict(result.noise) if result.noise else None,
        "rows": [row.to_json() for row in result.rows],
    }


def _table(result: Result) -> Table:
    if isinstance(result, Sweep):
        return sweep_table(result)
    return search_table(result) if isinstance(result, Search) else comparison_table(result)


def _draw(result: Result, folder: Path) -> None:
    if isinstance(result, Sweep):
        chart.draw_sweep(result, folder)
    elif isinstance(result, Search):
        chart.draw_search(result, folder)
    else:
        chart.draw_comparison(result, folder)


def describe_data(data: dict[str, Any]) -> str:
    """One line about the documents."""
    made = data["synthetic"]
    source = f"synthetic (seed {made['seed']})" if made else data["store"]
    return (
        f"{source}, {data['documents']:,} documents, {data['mean_length']:.1f} tokens on average, at most "
        f"{data['max_length']:,}, vocabulary {data['vocabulary']:,}, latents {data['slots']} x {data['channels']}"
    )
