"""Logs in the formats of other projects' trainers: each scenario is judged as somebody who reads the log would."""

import pytest

from .formats.judge import Case, cases, judge, trainers_of
from .formats.simulation import is_held_out

DEVELOPMENT, HELD_OUT = trainers_of("development"), trainers_of("held_out")


@pytest.mark.parametrize("case", cases([*DEVELOPMENT, *HELD_OUT]), ids=lambda case: case.name)
def test_a_log_is_judged_right(case: Case, tmp_path):
    verdict = judge(case, tmp_path)
    assert not verdict.problems, f"{verdict.kind}: " + "; ".join(verdict.problems)


def test_the_split_follows_its_rule():
    assert not [trainer.name for trainer in DEVELOPMENT if is_held_out(trainer.name)]
    assert not [trainer.name for trainer in HELD_OUT if not is_held_out(trainer.name)]


def test_every_trainer_says_where_its_format_was_read():
    trainers = [*DEVELOPMENT, *HELD_OUT]
    assert all("/" in trainer.source and trainer.statement for trainer in trainers)
    assert len({trainer.name for trainer in trainers}) == len(trainers)
