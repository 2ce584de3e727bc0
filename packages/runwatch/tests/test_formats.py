"""Logs in the formats of other projects' trainers: each scenario is judged as somebody who reads the log would.

`formats/known_wrong.txt` lists the judgements that are still wrong; a line that became right must leave it.
"""

import functools
from pathlib import Path

import pytest

from .formats.judge import Case, cases, judge, trainers_of
from .formats.simulation import is_held_out

DEVELOPMENT, HELD_OUT, LAST = trainers_of("development"), trainers_of("held_out"), trainers_of("last")
TRAINERS = [*DEVELOPMENT, *HELD_OUT, *LAST]
CASES = cases(TRAINERS)
KNOWN_WRONG = set(Path(__file__).with_name("formats").joinpath("known_wrong.txt").read_text().split())


def parameter(case: Case):
    marks = [pytest.mark.xfail(reason="known to be wrong", strict=True)] if case.name in KNOWN_WRONG else []
    return pytest.param(case, id=case.name, marks=marks)


@pytest.fixture(scope="module")
def verdict_on(tmp_path_factory):
    """Case -> verdict, which is reached once."""
    folder = tmp_path_factory.mktemp("logs")
    return functools.cache(lambda case: judge(case, folder))


@pytest.mark.parametrize("case", [parameter(case) for case in CASES])
def test_a_log_is_judged_right(case: Case, verdict_on):
    verdict = verdict_on(case)
    assert not verdict.problems, f"{verdict.kind}: " + "; ".join(verdict.problems)


def test_no_training_with_nan_is_called_fine(verdict_on):
    answers = {case.name: verdict_on(case) for case in CASES if case.scenario == "nan"}
    assert not [name for name, verdict in answers.items() if verdict.kind == "missed"]


def test_false_alarms_are_few(verdict_on):
    sound = [case for case in CASES if case.scenario in ("healthy", "ended")]
    false = [case.name for case in sound if verdict_on(case).kind == "false"]
    assert len(false) <= 0.02 * len(sound), false


def test_the_split_follows_its_rule():
    assert not [trainer.name for trainer in DEVELOPMENT if is_held_out(trainer.name)]
    assert not [trainer.name for trainer in HELD_OUT if not is_held_out(trainer.name)]


def test_every_trainer_says_where_its_format_was_read():
    assert all("/" in trainer.source and trainer.statement for trainer in TRAINERS)
    assert len({trainer.name for trainer in TRAINERS}) == len(TRAINERS)
