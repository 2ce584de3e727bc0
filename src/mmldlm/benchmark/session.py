"""One benchmark from its options to its report: a comparison of arms, a sweep, or the search for a batch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mmldlm.benchmark.comparison import Outcome, compare, judge
from mmldlm.benchmark.environment import describe_environment
from mmldlm.benchmark.measuring import Bench, Options, Show
from mmldlm.benchmark.plan import Wanted, describe_store, plan_comparison, plan_sweep, search_arm
from mmldlm.benchmark.report import Report, Result
from mmldlm.benchmark.search import find_batch, sweep
from mmldlm.benchmark.synthetic import Synthetic
from mmldlm.durable import require_writable
from mmldlm.tables import Table


@dataclass(frozen=True)
class Finished:
    """What a benchmark measured and wrote."""

    result: Result
    report: Report
    table: Table
    outcomes: list[Outcome] = field(default_factory=list)


@dataclass
class Session:
    """Where the report goes, and who is told meanwhile."""

    options: Options
    folder: Path
    synthetic: Synthetic | None
    show: Show
    progress: Callable[[int, int, str], None]

    def compare(self, wanted: Wanted, gpu: bool) -> Finished:
        """Arms against a baseline."""
        plan = plan_comparison(self.options, wanted, gpu)
        report = self._report(plan.notes)
        result = compare(report.bench, plan.arms, plan.baseline)
        outcomes = judge(plan.conditions, result)
        return Finished(result, report, report.write(result, outcomes), outcomes)

    def sweep(self, text: str) -> Finished:
        """Time and memory against one key."""
        key, arms = plan_sweep(self.options, text, self.synthetic)
        report = self._report([])
        result = sweep(report.bench, key, arms)
        return Finished(result, report, report.write(result, []))

    def find_batch(self, texts: list[str], unit: int | None, gpu: bool) -> Finished:
        """Largest and fastest batch under the memory limit."""
        arm = search_arm(self.options, texts, gpu)
        report = self._report([])
        result = find_batch(report.bench, arm, unit or max(report.data["max_length"], 1024))
        return Finished(result, report, report.write(result, []))

    def _report(self, notes: list[str]) -> Report:
        require_writable(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(self.options, self.folder / "logs", self.show, self.progress)
        environment = describe_environment(["mmldlm", *sys.argv[1:]])
        report = Report(
            self.folder, bench, environment, describe_store(self.options.store, self.synthetic), notes
        )
        bench.after_trial = report.write_trials
        return report
