"""A rank that keeps the others waiting is named, one disturbance is not."""

import time

from mmldlm.distributed.straggler import OwnTime, Straggler


def test_a_slow_rank_is_named_once_and_again_when_it_is_over():
    judge = Straggler(judged_seconds=30)
    assert not judge.judge([1.0, 8.0, 1.0], 10)
    assert not judge.judge([9.0, 9.0, 9.0], 10)
    assert judge.judge([1.0, 8.0, 1.0], 10)
    assert judge.rank == 1
    assert not judge.judge([3.0, 24.0, 3.0], 30)
    assert judge.judge([28.0, 29.0, 28.0], 30)
    assert judge.rank is None


def test_time_counts_from_an_agreement_until_the_others_are_waited_for():
    own = OwnTime()
    own.leave()
    time.sleep(0.05)
    own.arrive()
    time.sleep(0.2)
    own.arrive()
    own.leave()
    own.pause()
    time.sleep(0.2)
    own.arrive()
    seconds, elapsed = own.take()
    assert 0.05 <= seconds <= elapsed - 0.4
    assert own.take()[0] == 0.0
