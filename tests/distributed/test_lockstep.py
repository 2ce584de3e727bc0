"""A step that all ranks finish or none: wherever one fails, nobody waits, and nothing is agreed that need not be."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from mmldlm.distributed.lockstep import Exchange, Lockstep
from mmldlm.distributed.ranks import LostRankError, OutOfMemoryElsewhereError
from mmldlm.distributed.straggler import OwnTime

WORLD, STEPS = 3, 6
pytestmark = pytest.mark.timeout(120)


class Wire:
    """What connects threads that stand for ranks: each exchange waits for all of them, until one has gone."""

    def __init__(self):
        self.changed, self.gone = threading.Condition(), False
        self.sent = [[] for _ in range(WORLD)]

    def exchange(self, rank, value):
        with self.changed:
            self.sent[rank].append(value)
            turn = len(self.sent[rank])
            self.changed.notify_all()
            self.changed.wait_for(
                lambda: self.gone or all(len(sent) >= turn for sent in self.sent), timeout=60
            )
            if any(len(sent) < turn for sent in self.sent):
                raise RuntimeError("gloo: Connection closed by peer")
            return [sent[turn - 1] for sent in self.sent]

    def close(self):
        with self.changed:
            self.gone = True
            self.changed.notify_all()


class Rank:
    def __init__(self, rank, host, device):
        self.rank, self.world_size, self.asked = rank, WORLD, 0
        self.host, self.device = host, device
        self.peers = SimpleNamespace(why_lost=lambda: "")
        self.lockstep = Lockstep(self)
        self.sums, self.own = [], OwnTime()

    def largest(self, code):
        self.asked += 1
        try:
            return max(self.host.exchange(self.rank, code))
        except RuntimeError as error:
            raise self.lost(str(error)) from error

    def lost(self, reason):
        return LostRankError(f"rank {self.rank}: {reason}")

    def sum(self, what, value):
        self.lockstep.begin(Exchange((what,), lambda: self.device.exchange(self.rank, 0)))
        return sum(self.device.exchange(self.rank, value))


def step(rank, fails_at, error, sizes):
    """Exchanges of these sizes; before one of them, or after the last, this rank fails."""

    def work():
        for place, size in enumerate(sizes):
            if place == fails_at:
                raise error
            rank.sums.append(rank.sum(size, 1))
        if fails_at == len(sizes):
            raise error

    before = rank.asked
    try:
        rank.lockstep.run("step", work)
    except torch.OutOfMemoryError as failure:
        return type(failure).__name__, rank.asked - before
    return "done", rank.asked - before


def play(fails, error, plan=lambda number: (1, 2, 3)):
    """`fails`: step -> (rank, place); what each rank saw in each step."""
    host, device = Wire(), Wire()

    def live(index):
        rank, seen = Rank(index, host, device), []
        try:
            for number in range(STEPS):
                who, place = fails.get(number, (None, None))
                seen.append(step(rank, place if who == index else None, error, plan(number)))
        except Exception as failure:
            for wire in (host, device):
                wire.close()
            seen.append((type(failure).__name__, str(failure)))
        return seen

    with ThreadPoolExecutor(WORLD) as pool:
        return list(pool.map(live, range(WORLD)))


def test_exchanges_that_are_known_need_one_agreement_a_step():
    for seen in play({}, None):
        assert seen == [("done", 4)] * 2 + [("done", 1)] * 4


def test_exchanges_that_change_are_agreed_on_again():
    for seen in play({}, None, lambda number: (1, 2, 3) if number < 3 else (1, 5)):
        assert [asked for _, asked in seen] == [4, 4, 1, 2, 3, 1]


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_memory_that_runs_out_anywhere_leaves_nobody_waiting(number, place):
    every = play({number: (1, place)}, torch.OutOfMemoryError("CUDA out of memory"))
    ends = [seen[number][0] for seen in every]
    assert ends == [
        OutOfMemoryElsewhereError.__name__,
        "OutOfMemoryError",
        OutOfMemoryElsewhereError.__name__,
    ]
    assert all([end for end, _ in seen if end != "done"] == ends[i : i + 1] for i, seen in enumerate(every))
    assert all(len(seen) == STEPS for seen in every)


@pytest.mark.parametrize("place", [0, 2, 3])
@pytest.mark.parametrize("number", [0, 4])
def test_another_failure_ends_the_run_of_all_ranks(number, place):
    every = play({number: (2, place)}, ZeroDivisionError("a mistake"))
    assert every[2][-1] == ("ZeroDivisionError", "a mistake")
    assert [seen[-1][0] for seen in every[:2]] == ["LostRankError"] * 2
    assert {len(seen) for seen in every} == {number + 1}


def test_a_message_that_names_a_library_of_exchanges_does_not_make_a_failure_one_of_them():
    """The compiler's messages list folders, such as that of NCCL."""
    every = play({4: (1, 1)}, torch.OutOfMemoryError("out of memory, see lib/nvidia/nccl/include"))
    assert [seen[4][0] for seen in every] == [
        OutOfMemoryElsewhereError.__name__, "OutOfMemoryError", OutOfMemoryElsewhereError.__name__
    ]  # fmt: skip


def test_an_exchange_that_breaks_off_is_a_lost_rank():
    every = play({4: (0, 1)}, RuntimeError("[pair.cc:547] gloo: Connection closed by peer"))
    assert [seen[-1][0] for seen in every] == ["LostRankError"] * 3
