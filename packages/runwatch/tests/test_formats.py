"""Logs in the formats of other projects' trainers: each scenario is judged as somebody who reads the log would.

`formats/known_wrong.txt` lists the judgements that are still wrong; a line that became right must leave it.
"""

from pathlib import Path

import pytest

from .formats.judge import Case, cases, judge, trainers_of
from .formats.simulation import is_held_out

DEVELOPMENT, HELD_OUT, LAST = trainers_of("development"), trainers_of("held_out"), trainers_of("last")
TRAINERS = [*DEVELOPMENT, *HELD_OUT, *LAST]
KNOWN_WRONG = set(Path(__file__).with_name("formats").joinpath("known_wrong.txt").read_text().split())


def parameter(case: Case):
    marks = [pytest.mark.xfail(reason="known to be wrong", strict=True)] if case.name in KNOWN_WRONG else []
    return pytest.param(case, id=case.name, marks=marks)


@pytest.mark.parametrize("case", [parameter(case) for case in cases(TRAINERS)])
def test_a_log_is_judged_right(case: Case, tmp_path):
    verdict = judge(case, tmp_path)
    assert not verdict.problems, f"{verdict.kind}: " + "; ".join(verdict.problems)


def test_no_training_with_nan_is_called_fine(tmp_path):
    answers = {case.name: judge(case, tmp_path) for case in cases(TRAINERS) if case.scenario == "nan"}
    assert not [name for name, verdict in answers.items() if verdict.kind == "missed"]


def test_false_alarms_are_few(tmp_path):
    sound = [case for case in cases(TRAINERS) if case.scenario in ("healthy", "ended")]
    false = [case.name for case in sound if judge(case, tmp_path).kind == "false"]
    assert len(false) <= 0.02 * len(sound), false


def test_the_split_follows_its_rule():
    assert not [trainer.name for trainer in DEVELOPMENT if is_held_out(trainer.name)]
    assert not [trainer.name for trainer in HELD_OUT if not is_held_out(trainer.name)]


def test_every_trainer_says_where_its_format_was_read():
    assert all("/" in trainer.source and trainer.statement for trainer in TRAINERS)
    assert len({trainer.name for trainer in TRAINERS}) == len(TRAINERS)
