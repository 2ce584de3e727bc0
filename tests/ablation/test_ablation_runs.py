"""Small real ablations. Their processes are forks, so that torch is imported once; one test starts a fresh one."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import pandas  # noqa: F401 (loaded once, before the forks)
import pytest

from mmldlm import reports
from mmldlm.ablation import session
from mmldlm.ablation.plan import is_known
from mmldlm.checkpoint.load import load_latest
from mmldlm.cli import main as cli
from mmldlm.cli.ablate import ablate_run
from mmldlm.evaluation.compare import compare_results
from mmldlm.evaluation.report import load_evaluated
from tests.kills import die_at, fork
from tests.runs import write_recipe

PLAN = """
recipe: small.yaml
base: [train.valid_every=0, train.valid_documents=4, data.num_workers=0, model.depth=1]
eval: {num_documents: 12, num_decoded: 4, num_draws: 1, steps: [2]}
quantities: [text_bound/right, t2l/cosine, decode/given/2/bleu]
arms:
  base: []
  no average: [optim.ema_decay=0]
  last: {of: base, weights: last}
  guided: {of: base, sampling: {guidance: 3}}
"""


class Forked:
    """What `subprocess.Popen` would be, for a fork of this process."""

    def __init__(self, words, log, before) -> None:
        def work() -> None:
            os.setsid()
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
            sys.argv = ["mmldlm", *words]
            sys.stdout, sys.stderr = (os.fdopen(stream, "w") for stream in (1, 2))
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            reports._to_svg, reports._to_png = (
                (lambda figure: "<svg></svg>"),
                (lambda figure: b""),
            )  # a second a report
            before(words)
            try:
                cli.main()
            except SystemExit as leaving:
                sys.stderr.flush()
                os._exit(leaving.code or 0)

        self.pid, self.returncode = fork(work), None

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def terminate(self):
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def wait(self):
        while self.poll() is None:
            time.sleep(0.01)
        return self.returncode


class Ablation:
    """The command on a plan, in this process."""

    def __init__(self, folder: Path, store: Path, plan: str = PLAN) -> None:
        write_recipe(folder, store)
        self.plan, self.out = folder / "plan.yaml", folder / "out"
        self.plan.write_text(plan)
        self.started: list[tuple[str, ...]] = []

    def run(self, *words, before=lambda words: None, fresh=()) -> int:
        start, argv = session.start, sys.argv

        def forked(module, words, log, environment):
            self.started.append(Path(words[1]).stem)
            if self.started[-1] in fresh:
                return start(module, words, log, environment)
            return Forked(words, log, before)

        session.start = forked
        sys.argv = ["mmldlm", "ablate", str(self.plan), "--out", str(self.out), "--device", "cpu", *words]
        try:
            cli.main()
        except SystemExit as leaving:
            return leaving.code or 0
        finally:
            session.start, sys.argv = start, argv
        return 0

    @property
    def result(self):
        return json.loads((self.out / "result.json").read_text())

    def values(self, arm, seed=0):
        (run,) = (run for run in self.result["runs"] if (run["arm"], run["seed"]) == (arm, seed))
        return {name: value["value"] for name, value in run["values"].items()}


@pytest.fixture(scope="module")
def done(whole, store, tmp_path_factory) -> Ablation:
    """An ablation that nothing disturbed; `whole` has loaded what forks would load one by one."""
    ablation = Ablation(tmp_path_factory.mktemp("ablation"), store)
    assert ablation.run("--seeds", "2", "--jobs", "2") == 0
    return ablation


def test_rounds_are_whole_and_other_uses_of_a_run_do_not_train(done):
    assert done.started[:4] == ["base-0", "no-average-0", "base-1", "no-average-1"]
    runs = {path.parents[1].name for path in done.out.glob("runs/*/*/export")}
    assert runs == {"base", "no-average"}
    assert len(list(done.out.glob("reports/*/*/record.json"))) == 8


def test_the_weights_of_the_last_step_are_those_of_a_run_without_average(done):
    for seed in (0, 1):
        assert done.values("last", seed) == done.values("no average", seed) != done.values("base", seed)
    assert done.values("base", 0) != done.values("base", 1)


def test_another_sampling_changes_what_is_sampled_alone(done):
    plain, guided = done.values("base"), done.values("guided")
    assert plain["text_bound/right"] == guided["text_bound/right"]
    assert plain["t2l/cosine"] != guided["t2l/cosine"]


def test_every_arm_has_the_same_documents_and_every_name_is_known(done):
    reports = [load_evaluated(done.out / "reports" / arm / "1") for arm in ("base", "no-average", "guided")]
    assert len({str(report.held_out) for report in reports}) == 1
    assert compare_results(reports).pairs[0].num_shared == 12
    assert all(is_known(name, [2]) for name in done.values("base"))


def test_the_table_is_the_mean_over_seeds_and_differences_are_paired(done):
    result = done.result
    assert not result["partial"]
    assert [column["name"] for column in result["columns"]] == ["text_bound/right", "t2l/cosine"]
    first, other = result["rows"][:2]
    for name, cell in other["quantities"].items():
        ours, theirs = ([done.values(arm, seed)[name] for seed in (0, 1)] for arm in ("no average", "base"))
        assert cell["mean"]["value"] == pytest.approx(sum(ours) / 2)
        assert cell["difference"]["value"] == pytest.approx((sum(ours) - sum(theirs)) / 2)
        margin = 12.706204736 * abs((ours[0] - theirs[0]) - (ours[1] - theirs[1])) / 2
        assert cell["difference"]["high"] - cell["difference"]["value"] == pytest.approx(margin)
    assert first["quantities"]["t2l/cosine"]["difference"] is None
    assert first["num_parameters"] == other["num_parameters"] > 0
    assert first["train_seconds"]["value"] > 0
    table = (done.out / "table.md").read_text()
    assert (
        "measured by no arm, so not in the table: decode/given/2/bleu" in table
    )  # the store has no tokenizer
    for words in ("no measurable difference", "by chance", "versions:", "## All arms", "chart.png"):
        assert words in table
    assert (done.out / "chart.png").stat().st_size > 10_000
    page = (done.out / "report.html").read_text()
    assert "<h2>All arms</h2>" in page
    assert page.count("<svg") == 1


def test_finished_runs_are_kept_and_more_seeds_are_added(done, store, tmp_path, capsys):
    again = Ablation(tmp_path, store)
    shutil.copytree(done.out, again.out)
    again.plan = done.plan
    rows = done.result["rows"]
    assert again.run("--seeds", "2", "--json") == 0
    assert again.started == []
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"] == rows
    assert again.run("--seeds", "1") == 0
    table = (again.out / "table.md").read_text()
    assert "no error bars" in table
    assert "±" not in table.split("## All arms")[1].split("\n", 4)[4]


def test_a_changed_arm_is_refused_and_a_changed_evaluation_done_again(done, store, tmp_path, capsys):
    other = Ablation(tmp_path, store, PLAN.replace("guidance: 3", "guidance: 4"))
    shutil.copytree(done.out, other.out)
    other.run("--seeds", "1")
    assert other.started == ["base-0"]
    assert other.values("base") == done.values("base")
    assert other.values("guided") != done.values("guided")
    other.plan.write_text(PLAN.replace("ema_decay=0", "ema_decay=0.5"))
    assert other.run("--seeds", "1") == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert "arm 'no average': its runs in" in told
    assert "optim.ema_decay: 0.0 -> 0.5" in told


def test_a_killed_run_stops_no_other_and_goes_on_to_the_same_numbers(done, store, tmp_path, capsys):
    ablation = Ablation(tmp_path, store, PLAN.split("  last")[0])

    run = ablation.out / "runs" / "base" / "0"

    def dies(words) -> None:
        if "base-0" in words[1]:
            die_at(3, lambda: (run / "checkpoints" / "latest").exists())  # soon after the first checkpoint

    assert ablation.run("--seeds", "1", before=dies) == 1
    assert "base, seed 0 failed: killed by the system" in capsys.readouterr().err
    assert ablation.result["partial"]
    assert [row["seeds"] for row in ablation.result["rows"]] == [[], [0]]
    snapshot = load_latest(run / "checkpoints", report=print)
    assert 0 < snapshot.step < 12
    assert ablation.run("--seeds", "1") == 0
    assert ablation.started == ["base-0", "no-average-0", "base-0"]
    for arm in ("base", "no average"):
        assert ablation.values(arm) == done.values(arm)


def test_a_failing_arm_in_a_fresh_process_is_named_with_the_last_line_of_its_log(store, tmp_path, capsys):
    plan = PLAN.split("  no average")[0] + "  too small: [batch.tokens_per_step=2]\n"
    ablation = Ablation(tmp_path, store, plan)
    assert ablation.run("--seeds", "1", "--jobs", "2", fresh=["too-small-0"]) == 1
    said = capsys.readouterr().err
    last = (ablation.out / "logs" / "too-small-0.log").read_text().splitlines()[-1]
    assert last.startswith("mmldlm: error: ")
    assert f"too small, seed 0 failed: {last}" in said
    assert ablation.result["failures"] == {"too small, seed 0": last}
    assert [row["seeds"] for row in ablation.result["rows"]] == [[0], []]


def test_what_only_a_gpu_has_is_refused_before_anything_runs(store, tmp_path, capsys):
    ablation = Ablation(tmp_path, store)
    assert ablation.run("--seeds", "1", "speed.cuda_graphs=true") == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith(
        "speed.cuda_graphs=true: needs a CUDA GPU, here it is cpu; use speed.cuda_graphs=null"
    )
    assert not ablation.started
    assert not ablation.out.exists()


def test_ctrl_c_saves_what_runs_and_still_writes_the_table(store, tmp_path, capsys):
    ablation = Ablation(tmp_path, store, PLAN.replace("base: [", "base: [train.steps=1000000, "))
    run = ablation.out / "runs" / "base" / "0"

    def press() -> None:
        while not (run / "checkpoints" / "latest").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    assert ablation.run("--seeds", "1", "--jobs", "2") == 130
    assert "the same command continues" in capsys.readouterr().err
    assert ablation.result["partial"]
    assert "**Partial" in (ablation.out / "table.md").read_text()
    assert load_latest(run / "checkpoints", report=print).step > 0


def test_a_run_whose_ablation_was_killed_leaves_too(done):
    pid = fork(lambda: ablate_run(job=done.out / "logs" / "base-0.json", parent=1))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) in (-signal.SIGTERM, 1)


def test_a_second_ablation_in_the_same_folder_is_refused(done, capsys):
    holder = os.open(done.out / ".lock", os.O_RDWR)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert done.run("--seeds", "2") == 2
        assert "another ablation is writing here" in capsys.readouterr().err
    finally:
        os.close(holder)
