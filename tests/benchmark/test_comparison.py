"""From trials to rows, conditions and files; processes are functions here."""

import json
from dataclasses import replace

import pytest

from mmldlm.benchmark import comparison
from mmldlm.benchmark.arms import Arm, Expected
from mmldlm.benchmark.comparison import REFERENCE, compare, parse_condition
from mmldlm.benchmark.machine import describe_environment
from mmldlm.benchmark.measuring import Failure
from mmldlm.benchmark.report import Report, comparison_table
from mmldlm.errors import UserError
from tests.benchmark.measurements import measurement, pretend

ARMS = [
    Arm("plain"), Arm("quick", ("speed.compile=true",)), Arm("dead", ("speed.chunk_rows=1",)),
    Arm("other", ("model.depth=9",)), Arm("wrong", ("speed.scored_rows=false",)),
]  # fmt: skip
DATA = {
    "store": "s", "synthetic": None, "documents": 9, "mean_length": 5.0, "max_length": 8, "vocabulary": 11,
    "slots": 1, "channels": 2,
}  # fmt: skip


def answer(job):
    name = job.settings[-1]
    if job.steps == 0:
        return measurement([], losses=[2.0, 4.0])
    losses = [2.0, 4.0] if job.gate_steps else []
    if name == "speed.compile=true":
        return measurement([300, 300], gib=0.5, losses=[2.002, 4.004][: len(losses)])
    if name == "speed.chunk_rows=1":
        return Failure("memory", "out of memory")
    if name == "speed.scored_rows=false":
        return measurement([101, 99], losses=[2.2, 4.4][: len(losses)])
    return measurement([98, 102], gib=2, losses=losses)


@pytest.fixture
def measured(monkeypatch, tmp_path):
    monkeypatch.setattr(
        comparison, "reference_arm", lambda bench, arms: Arm(REFERENCE, ("speed.precision=fp32",))
    )
    bench = pretend(monkeypatch, tmp_path, answer, gate_steps=2)
    return bench, compare(bench, ARMS, "plain")


def test_rows_hold_what_the_blocks_say(measured):
    _, found = measured
    quick = found.row("quick")
    assert quick.speedup.value == pytest.approx(3.0)
    assert quick.verdict == "faster"
    assert quick.tokens_per_second.median == 300
    assert quick.documents_per_second == pytest.approx(30)
    assert quick.seconds_per_step == pytest.approx(1 / 6)
    assert (quick.data_wait, quick.fill) == pytest.approx((0.1, 0.5))
    assert quick.mfu == pytest.approx(300 * 2 / 1000)
    assert quick.memory == 2**29
    assert found.row("plain again").verdict.startswith("noise: ")
    assert found.row("wrong").verdict == "no measurable difference"
    assert not found.partial


def test_an_arm_that_varies_too_much_is_not_measured(monkeypatch, tmp_path):
    def restless(job):
        return measurement([250, 350] if job.settings[-1] == "speed.compile=true" else [100, 100])

    bench = pretend(monkeypatch, tmp_path, restless)
    result = compare(bench, ARMS[:2], "plain")
    assert result.row("quick").verdict == "not measured: it varies by 33.3 %"
    table = comparison_table(result)
    cells = {row[0]: dict(zip(table.head, row, strict=True)) for row in table.rows}
    assert (cells["quick"]["speed-up (95 %)"], cells["plain"]["speed-up (95 %)"]) == (
        "",
        "1.00 (1.00 to 1.00)",
    )
    outcomes = {
        text: parse_condition(text, ["quick", "plain"]).judge(result)
        for text in (
            "speedup(quick,plain)<1.2", "speedup(plain,quick)<0.1", "tokens_per_second(quick)<1",
            "mfu(quick)<0.001", "memory(quick)>9GiB", "speedup(plain,plain)<0.5",
        )
    }  # fmt: skip
    assert [outcome.failed for outcome in outcomes.values()] == [True, True, True, True, False, False]
    first = next(iter(outcomes.values()))
    assert first.line().endswith("fails, because quick gave no measurement: it varies by 33.3 %")


def test_with_a_baseline_that_varies_too_much_nothing_is_compared(monkeypatch, tmp_path):
    def restless(job):
        return measurement([300, 300] if job.settings[-1] == "speed.compile=true" else [80, 120])

    bench = pretend(monkeypatch, tmp_path, restless)
    result = compare(bench, ARMS[:2], "plain")
    assert [row.verdict for row in result.rows] == [
        "not measured: it varies by 40.0 %",
        "not measured: it varies by 40.0 %",
        "not compared: the baseline was not measured",
    ]
    assert [row.speedup for row in result.rows] == [None] * 3
    assert result.noise is None
    assert result.row("quick").memory_share == 1.0
    assert parse_condition("speedup(quick,plain)<1.2", ["quick", "plain"]).judge(result).failed
    Report(tmp_path, bench, describe_environment(), DATA).write(result, [])
    assert (
        "plain, the baseline, was not measured, so nothing is compared" in (tmp_path / "table.md").read_text()
    )


def test_an_arm_that_recorded_graphs_under_the_clock_is_not_measured(monkeypatch, tmp_path):
    def recording(job):
        quick = job.settings[-1] == "speed.compile=true"
        return replace(measurement([300, 300] if quick else [100, 100]), recorded=quick)

    row = compare(pretend(monkeypatch, tmp_path, recording), ARMS[:2], "plain").row("quick")
    assert row.verdict == "not measured: CUDA graphs were recorded while the clock ran"
    assert row.speedup is None


def test_an_arm_that_dies_in_a_later_round_has_no_speed_up(monkeypatch, tmp_path):
    answers = iter([measurement([300, 300]), Failure("memory", "out of memory")])

    def dying(job):
        return next(answers) if job.settings[-1] == "speed.compile=true" else measurement([100, 100])

    result = compare(pretend(monkeypatch, tmp_path, dying), ARMS[:2], "plain")
    assert (result.row("quick").failure, result.row("quick").speedup) == ("out of memory", None)
    assert parse_condition("speedup(quick,plain)<1.2", ["quick", "plain"]).judge(result).failed


def test_the_gate_passes_what_is_near_refuses_what_is_not_and_leaves_other_work_alone(measured):
    _, found = measured
    assert (found.row("quick").gate, found.row("quick").loss_difference) == ("pass", pytest.approx(0.001))
    assert (found.row("wrong").gate, found.row("wrong").loss_difference) == ("fail", pytest.approx(0.1))
    assert found.row("other").gate == "does other work"
    assert found.row("plain").gate == "pass"


def test_an_arm_that_dies_is_a_row_and_is_not_tried_again(measured):
    bench, found = measured
    assert found.row("dead").failure == "out of memory"
    assert sum(trial.arm == "dead" for trial in bench.trials) == 1
    assert sum(trial.arm == "wrong" for trial in bench.trials) == 2


@pytest.mark.parametrize(("text", "failed"), [
    ("speedup(quick,plain)<2.9", False), ("speedup(quick, plain) < 3.1", True), ("speedup(plain,quick)>=0.3", True),
    ("memory(quick)>400MiB", True), ("memory(quick)>1GiB", False), ("mfu(quick)<0.5", False),
    ("documents_per_second(quick)<31", True), ("tokens_per_second(quick)<=300", True),
    ("loss_difference(wrong)>0.01", True), ("loss_difference(quick)>0.01", False), ("memory(dead)>900GiB", True),
])  # fmt: skip
def test_conditions(measured, text, failed):
    names = [arm.name for arm in measured[1].arms]
    assert parse_condition(text, names).judge(measured[1]).failed is failed


@pytest.mark.parametrize(("text", "told"), [
    ("speedup(a,b)", "write a figure, a sign and a number"), ("beauty(a)<1", "figures are speedup"),
    ("speedup(a)<1", "speedup takes 2 arms, here are 1"), ("mfu(c)<1", "no arm is called 'c'; the arms are a, b"),
    ("mfu(a)<x", "'x' is no number"), ("memory(a)>3XB", "write a number with a unit, such as 80GiB"),
])  # fmt: skip
def test_a_condition_that_cannot_be_judged_is_refused_before_anything_runs(text, told):
    with pytest.raises(UserError, match="--fail-if") as error:
        parse_condition(text, ["a", "b"])
    assert told in str(error.value)


def test_the_report_has_one_content_in_three_forms(measured, tmp_path):
    bench, found = measured
    report = Report(tmp_path, bench, describe_environment(), DATA)
    outcome = [parse_condition("mfu(quick)<0.5", ["quick"]).judge(found)]
    table = report.write(found, outcome)
    result = json.loads((tmp_path / "result.json").read_text())
    markdown = (tmp_path / "table.md").read_text()
    assert [row["name"] for row in result["rows"]] == [row[0] for row in table.rows]
    assert result["rows"][2]["speedup"]["value"] == pytest.approx(3.0)
    assert (result["kind"], result["partial"], len(result["trials"])) == (
        "comparison",
        False,
        len(bench.trials),
    )
    assert {"cpu", "gpus", "versions", "commit", "command", "load_average"} <= result["environment"].keys()
    assert sum(line.startswith("| ") for line in markdown.splitlines()) == len(found.rows) + 2
    assert "out of memory" in markdown
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (tmp_path / "report.html").read_text()


def test_without_a_finite_loss_the_gate_fails_and_the_file_is_still_json(monkeypatch, tmp_path):
    monkeypatch.setattr(comparison, "reference_arm", lambda bench, arms: Arm(REFERENCE))

    def ill(job):
        return measurement([9.0], losses=[None]) if job.steps else measurement([], losses=[1.0])

    bench = pretend(monkeypatch, tmp_path, ill, gate_steps=1)
    found = compare(bench, [Arm("ill", ("speed.compile=true",))], "ill")
    Report(tmp_path, bench, describe_environment(), DATA).write(found, [])
    row = json.loads((tmp_path / "result.json").read_text(), parse_constant=pytest.fail)["rows"][0]
    assert (row["gate"], row["loss_difference"]) == ("fail", None)


def test_the_gate_fails_what_ends_at_another_held_out_loss(monkeypatch, tmp_path):
    monkeypatch.setattr(comparison, "reference_arm", lambda bench, arms: Arm(REFERENCE))

    def drifting(job):
        return measurement([9.0] if job.steps else [], losses=[1.0], valid_loss=2.2 if job.steps else 2.0)

    bench = pretend(monkeypatch, tmp_path, drifting, gate_steps=1)
    row = compare(bench, [Arm("drifts")], "drifts").row("drifts")
    assert (row.gate, row.loss_difference, row.valid_loss) == ("fail", 0.0, 2.2)
    assert row.valid_difference == pytest.approx(0.1)


def test_ctrl_c_keeps_what_was_measured(monkeypatch, tmp_path):
    def until_quick(job):
        if job.settings[-1] == "speed.compile=true":
            raise KeyboardInterrupt
        return answer(job)

    found = compare(pretend(monkeypatch, tmp_path, until_quick), ARMS, "plain")
    assert found.partial
    assert found.row("plain again").speedup is not None
    assert found.row("quick").failure == "not measured"


def test_what_cannot_run_here_keeps_its_row_and_plans_stand_beside_the_figures(monkeypatch, tmp_path):
    arms = [
        Arm("plain", expected=Expected(1.0, 1.0)), Arm("quick", ("speed.compile=true",), expected=Expected(1.1, 0.65)),
        Arm("flash", ("speed.attention=varlen",), absent="not run: needs a GPU", expected=Expected(1.8, 0.65)),
    ]  # fmt: skip
    bench = pretend(monkeypatch, tmp_path, answer)
    result = compare(bench, arms, "plain")
    assert not [trial for trial in bench.trials if trial.arm == "flash"]
    table = comparison_table(result)
    cells = {row[0]: dict(zip(table.head, row, strict=True)) for row in table.rows}
    assert (cells["quick"]["plan: speed"], cells["quick"]["plan: memory"]) == ("110 %", "65 %")
    assert cells["quick"]["memory"] == "25.0 %", "half a GiB instead of two"
    assert (cells["flash"]["plan: speed"], cells["flash"]["verdict"]) == ("180 %", "not run: needs a GPU")
