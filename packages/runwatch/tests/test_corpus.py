"""The labelled logs: every fault found in time, nothing found where nothing is wrong."""

import json

import pytest
from runwatch.detectors import Panel
from runwatch.detectors.base import RunFacts
from runwatch.settings import MonitorSettings
from runwatch.sources import find_runs
from runwatch.watch import RunWatch

from tests.corpus import cases, judge, make_log, score

ALL = cases()
LONG = ("healthy_own_long", "plateau", "healthy_own_sparse")
"""These take seconds each; the others share their trainings."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("corpus")


def test_there_are_enough_logs_and_formats():
    assert len(ALL) >= 40
    assert len({case.format for case in ALL}) == 7
    assert sum(not case.expected for case in ALL) >= 10


def labelled(case):
    return pytest.param(case, id=case.name, marks=[pytest.mark.soak] if case.name in LONG else [])


@pytest.mark.parametrize("case", map(labelled, ALL))
def test_a_labelled_log(case, folder):
    verdict = judge(case, make_log(case, folder))
    assert (verdict.missed, verdict.false) == ((), ())


def test_the_score_counts_what_it_should(tmp_path):
    healthy, nan = (next(case for case in ALL if case.name == name) for name in ("healthy_own", "nan_own"))
    wrong = judge(healthy, make_log(nan, tmp_path))  # a healthy label on an ill log: two false alarms
    missing = judge(nan, make_log(healthy, tmp_path))  # and the other way round: two misses
    numbers = score([wrong, missing])
    assert (numbers["found"], numbers["missed"], numbers["false"]) == (0, 2, 2)


@pytest.mark.parametrize("name", ["nan_own", "divergence_own", "overflow", "slow_data", "healthy_own"])
def test_a_trainer_that_asks_the_detectors_itself_hears_the_same(name, tmp_path):
    """In-process, line by line, against the log read afterwards: codes, steps, counts and levels agree."""
    case = next(case for case in ALL if case.name == name)
    path = make_log(case, tmp_path)
    run = RunWatch(find_runs([str(path)])[0], MonitorSettings())
    run.poll(live=False)
    run.close()
    panel = Panel(facts=RunFacts(total_steps=600, checkpoint_every=6000))
    for line in map(json.loads, (path / "training_log.jsonl").read_text().splitlines()):
        fields = {key: value for key, value in line.items() if key not in ("step", "time")}
        panel.observe_fields(line["step"], fields, time=line["time"])
    told = [
        {
            (a.code, a.subject, a.level, a.first_step, a.last_step, a.count, a.status)
            for a in book.alerts.values()
        }
        for book in (run.panel.book, panel.book)
    ]
    assert told[0] == told[1]
    assert bool(told[0]) == bool(case.expected)
