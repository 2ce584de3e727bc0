"""Runs of our own trainer with faults injected, and what its ledger means to the monitor."""

import json

import pytest
from runwatch.detectors import Panel
from runwatch.detectors.base import RunFacts
from runwatch.goodput import TimeLedger
from runwatch.parser import LineParser
from runwatch.records import Record
from runwatch.settings import MonitorSettings
from runwatch.sources import find_runs
from runwatch.watch import RunWatch

from mmldlm.json_lines import read_lines
from tests.health.judging import judge
from tests.health.trainer_corpus import (
    AT,
    USUAL,
    make_run,
    prepare,
    trainer_cases,
    two_ranks,
    write_stores,
)
from tests.health.trainer_faults import SimulatedTime, after_each_step, not_finite

CASES = trainer_cases()
SHORT = ("memory_fatal",)
"""Run with all tests; the others are for `-m soak`."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("trainer")
    write_stores(made)
    return made


def labelled(case):
    return pytest.param(case, id=case.name, marks=[] if case.name in SHORT else [pytest.mark.soak])


@pytest.mark.parametrize("case", map(labelled, CASES))
def test_a_run_with_a_fault(case, folder):
    verdict = judge(case.label(), make_run(case, folder))
    assert (verdict.missed, verdict.false) == ((), ())


@pytest.mark.soak
def test_runs_of_two_ranks(folder):
    verdicts = [judge(case, path) for case, path in two_ranks(folder)]
    assert [(verdict.missed, verdict.false) for verdict in verdicts] == [((), ())] * 3


def counts(run):
    run.close()
    return {code: (alert.first_step, alert.count) for (code, _), alert in run.panel.book.alerts.items()}


def test_a_rollback_watched_as_it_happens_and_read_afterwards(folder):
    """The trainer cuts its log at a rollback; only who was there saw the lines that are gone."""
    case = next(case for case in CASES if case.name == "rollback")
    clock = SimulatedTime()
    trainer = prepare(folder / "watched", folder / "store", *USUAL, *case.words, "train.steps=80")
    case.inject(trainer, clock)
    source = find_runs([str(trainer.run.path)])[0]
    live, after = (RunWatch(source, MonitorSettings(), clock=clock.time) for _ in range(2))
    with clock.inside(trainer):
        after_each_step(trainer, lambda: live.poll(live=True))
        trainer.fit()
    for run in (live, after):
        run.poll(live=False)
    told = {"M205": (AT, 4), "M504": (AT + 3, 1)}
    assert counts(after) == told
    assert counts(live) == told | {"M101": (AT, 4), "M201": (AT, 4)}
    for run in (live, after):  # four steps of half a second were undone, and going back took 0.2 s
        seconds = run.ledger.summary()["seconds"]
        assert seconds["recovery"] == pytest.approx(4 * 0.5 + 0.2, abs=0.4)
        assert seconds["useful"] == pytest.approx(80 * 0.5, rel=0.06)


def test_the_detectors_in_the_trainer_and_the_monitor_say_the_same_of_the_same_run(folder):
    clock = SimulatedTime()
    trainer = prepare(folder / "agreed", folder / "store", *USUAL, "train.steps=75", "optim.clip_norm=0")
    not_finite(lambda step: step >= 41 and step % 7 == 0)(trainer, clock)
    with clock.inside(trainer):
        trainer.fit()
    ledger = [event for event in read_lines(trainer.run.events) if event["event"] == "alert"]
    log = RunWatch(find_runs([str(trainer.run.training_log)])[0], MonitorSettings(), clock=clock.time)
    told = [(change.what, change.alert.code, change.evidence) for change in log.poll(live=False)]
    assert [(event["what"], event["code"], event["evidence"]) for event in ledger] == told
    assert {code for _, code, _ in told} >= {"M101", "M201", "M205"}
    whole = RunWatch(find_runs([str(trainer.run.path)])[0], MonitorSettings(), clock=clock.time)
    whole.poll(live=False)
    assert {code for code, _ in whole.panel.book.alerts} == {code for _, code, _ in told}
    for run in (log, whole):
        run.close()


def event(panel, name, step, **facts):
    panel.observe(LineParser().parse(json.dumps({"event": name, "at": 1000.0 + step, "step": step, **facts})))


def line(panel, step, **values):
    return panel.observe_fields(step, {"loss": 2.0, **values}, time=1000.0 + step)


def status(panel, code, subject=""):
    alert = panel.book.alerts[code, subject]
    return alert.status, alert.level, alert.first_step, alert.count


@pytest.mark.parametrize("order", ["line first", "ledger first"])
def test_skipped_updates_are_counted_once_whichever_file_tells_of_them_first(order):
    panel = Panel()
    message = Record(
        event="skipped", step=60, text="step 60: 3 updates skipped, their gradient was not finite"
    )
    tell = [
        lambda: line(panel, 60, skipped_steps=3),
        lambda: event(panel, "skipped", 60, count=3),
        lambda: panel.observe(message),
    ]
    for one in tell if order == "line first" else reversed(tell):
        one()
    assert status(panel, "M205")[2:] == (60, 1)
    event(panel, "rolled_back", 40, from_step=60)
    event(panel, "skipped", 60, count=1)  # the same number, another step
    assert status(panel, "M205")[3] == 2


def test_a_rollback_stands_at_the_step_where_it_was_noticed():
    panel = Panel()
    event(panel, "rolled_back", 40, from_step=60, reason="too many updates skipped up to step 60")
    assert status(panel, "M504") == ("open", "info", 60, 1)
    assert panel.book.alerts["M504", ""].evidence.startswith("from step 60 to step 40: too many")


def test_a_learning_rate_that_goes_back_with_its_step_is_no_jump():
    jumps = []
    for back_to in (100, 10):  # the schedule starts anew at a later step; or the run goes back to step 10
        panel = Panel()
        for step in range(1, 100):
            line(panel, step, lr=1e-3 * 0.9**step)
        line(panel, back_to, lr=1e-3 * 0.9**10)
        jumps.append(("M204", "jump") in panel.book.alerts)
    assert jumps == [True, False]


def test_memory_is_well_again_when_the_micro_batch_has_its_full_size():
    panel = Panel()
    for before, after in ((272, 136), (136, 68)):
        event(panel, "out_of_memory", 60, micro_tokens_before=before, micro_tokens_after=after)
    event(panel, "grown", 70, micro_tokens_before=68, micro_tokens_after=136)
    assert status(panel, "M401") == ("open", "warn", 60, 2)
    event(panel, "grown", 80, micro_tokens_before=136, micro_tokens_after=272)
    assert status(panel, "M401")[0] == "resolved"


def test_a_hung_step_is_a_stall_until_the_next_line_and_an_end_if_the_trainer_left():
    panel = Panel()
    event(panel, "hung_step", 61, seconds=1800.5, stacks="stacks.txt", left=False)
    assert status(panel, "M501") == ("open", "error", 61, 1)
    assert "stacks.txt" in panel.book.alerts["M501", ""].evidence
    line(panel, 61)
    assert status(panel, "M501")[0] == "resolved"
    assert ("M502", "") not in panel.book.alerts
    event(panel, "hung_step", 70, seconds=1800.5, stacks="stacks.txt", left=True)
    assert panel.facts.ended == "crashed"
    assert "train.step_timeout_action" in panel.book.alerts["M502", ""].evidence


@pytest.mark.parametrize(
    ("words", "codes"),
    [
        ("Connection closed by peer [127.0.0.1]:39320", {"M502"}),
        ("Connection reset by peer", {"M502"}),
        ("Timed out waiting 30000ms for recv operation to complete", {"M502", "M602"}),
    ],
)
def test_a_rank_that_is_gone_is_a_crash_and_one_that_does_not_answer_a_failed_communication_too(words, codes):
    panel = Panel()
    event(panel, "stopped", 60, reason=f"LostRankError: rank 0 of 2: another rank is gone ({words})")
    assert {code for code, _ in panel.book.alerts} == codes


def test_loaders_that_die_are_told_and_over_once_they_work_again():
    panel = Panel()
    event(panel, "loader_failed", 60, reason="a loader process was killed by SIGKILL")
    assert panel.book.alerts["M304", ""].evidence == "a loader process was killed by SIGKILL"
    for step in range(61, 61 + MonitorSettings().resolve_lines):
        line(panel, step)
    assert status(panel, "M304") == ("resolved", "warn", 60, 1)


def test_what_the_trainer_said_about_itself_is_not_counted_again():
    told = "2026-01-01 10:00:00,000 ERROR   mmldlm.api.train: step 9: {} M101 nonfinite-loss: loss is nan; Stop ..."
    parser = LineParser()
    assert [parser.parse(told.format(what)) for what in ("opened", "still", "resolved")] == [None] * 3
    assert parser.parse(told.replace("step 9: {} M101 nonfinite-loss: ", "")).event == "bad_loss"
    panel = Panel()
    event(panel, "alert", 9, what="opened", code="M101", evidence="loss is nan")
    assert not panel.book.alerts


def test_a_heartbeat_tells_of_a_death_on_another_machine(tmp_path):
    (tmp_path / "events.jsonl").write_text('{"event": "started", "at": 1000.0, "step": 0}\n')
    seen = {}
    for phase, age in (("step", 60), ("step", 500), ("finished", 500)):
        changed = (tmp_path / "events.jsonl").stat().st_mtime
        beat = {"step": 3, "phase": phase, "written_at": changed, "pid": 1, "host": "elsewhere"}
        (tmp_path / "heartbeat.json").write_text(json.dumps(beat))
        run = RunWatch(find_runs([str(tmp_path)])[0], MonitorSettings(), clock=lambda now=changed + age: now)
        run.poll(live=False)
        run.close()
        seen[phase, age] = "M502" in {code for code, _ in run.panel.book.alerts}
    assert seen == {("step", 60): False, ("step", 500): True, ("finished", 500): False}


@pytest.mark.parametrize(("total", "told"), [(None, True), (200, True), (1000, False)])
def test_a_latent_that_nobody_reads_yet_is_no_alert_in_the_first_steps(total, told):
    panel = Panel(facts=RunFacts(total_steps=total))
    for step in (10, 20, 30, 40):
        line(panel, step, valid_text_loss=2.0, valid_text_loss_shuffled=2.0)
    assert (("M803", "") in panel.book.alerts) == told


def feed(ledger, *records):
    for record in records:
        (ledger.event if record.event else ledger.line)(record)
    return ledger.seconds


def step_line(step):
    values = {"loss": 1.0, "tokens": 100.0 * step, "tokens_per_second": 100.0}  # a second a step
    return Record(step=step, time=1000.0 + step, values=values)


def test_the_time_of_steps_that_a_rollback_undid_is_no_useful_time():
    ledger = TimeLedger()
    feed(ledger, Record(event="started", step=0, time=1000.0), *map(step_line, range(1, 11)))
    assert ledger.seconds["useful"] == pytest.approx(10.0)
    seconds = feed(ledger, Record(event="rolled_back", step=6, time=1012.0, facts={"from_step": 10}))
    assert seconds["useful"] == pytest.approx(6.0)
    assert seconds["recovery"] == pytest.approx(4.0 + 2.0)


def test_the_time_of_a_hung_step_is_lost():
    ledger = TimeLedger()
    feed(ledger, Record(event="started", step=0, time=1000.0), *map(step_line, range(1, 11)))
    late = Record(
        step=11, time=1051.0, values={"loss": 1.0, "tokens": 1100.0, "tokens_per_second": 100 / 41.0}
    )
    seconds = feed(ledger, Record(event="hung_step", step=11, time=1031.0, facts={"seconds": 20.0}), late)
    assert seconds["useful"] == pytest.approx(11.0)
    assert seconds["recovery"] == pytest.approx(40.0)
