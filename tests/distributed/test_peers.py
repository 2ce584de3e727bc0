"""Ranks that know each other: differences are listed, a rank that is gone or stopped is named, attempts do not mix."""

import itertools
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mmldlm.distributed import peers as module
from mmldlm.distributed.peers import Peers, fresh_store
from mmldlm.distributed.ranks import LostRankError, Ranks
from mmldlm.distributed.replicas import weights_digest
from mmldlm.errors import UserError

HOST = socket.gethostname()


@pytest.fixture
def server():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def client(server):
    return dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)


def together(count, work):
    """What `work(rank)` returns or raises in a thread for each rank."""

    def one(rank):
        try:
            return work(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


@pytest.fixture
def trio(server):
    all_peers = together(3, lambda rank: Peers(client(server), rank, 3))
    yield all_peers
    for each in all_peers:
        each.close()


def test_what_differs_is_listed_by_the_main_rank_with_names_values_and_hosts(trio):
    facts = [{"optim.lr": 0.1, "torch": "2.13", "same": 1} for _ in trio]
    assert together(3, lambda rank: trio[rank].compare("a", facts[rank])) == [None] * 3
    facts[1] |= {"optim.lr": 0.2, "NCCL_ALGO": "Ring"}
    errors = together(3, lambda rank: trio[rank].compare("b", facts[rank]))
    assert all(isinstance(error, UserError) for error in errors)
    assert (
        f"optim.lr is 0.1 on ranks 0, 2, 0.2 on rank 1 on {HOST}; NCCL_ALGO is not set on ranks 0, 2, Ring on"
        in str(errors[0])
    )
    assert "same" not in str(errors[0]).replace("the same", "")
    assert f"rank 2 on {HOST}: the ranks differ; the output of rank 0 lists how" == str(errors[2])


def test_a_second_run_of_the_same_processes_is_compared_anew(trio):
    def compare(rank):
        for precision in ("fp32", "fp16"):
            time.sleep(0.2 * rank)  # the first one must not read what the others said before
            trio[rank].compare("data", {"precision": precision})
        trio[rank].compare("data", {"precision": rank})

    first, *others = together(3, compare)
    assert "precision is 0 on" in str(first)
    assert all(isinstance(error, UserError) for error in (first, *others))


def test_attempts_in_one_store_do_not_meet_whatever_the_last_one_left(server):
    for _ in range(3):  # torchrun keeps its store when it starts the ranks again
        stores = together(2, lambda rank: fresh_store(client(server), rank, 2, 20.0))
        stores[0].set("key", "fresh")
        assert stores[1].get("key") == b"fresh"
        assert not stores[1].check(["key of the last attempt"])
        stores[1].set("key of the last attempt", "1")
    began = time.monotonic()
    with pytest.raises(UserError, match=r"rank 0 of 3: rank 2 did not join within 0\.005 minutes"):
        fresh_store(client(server), 0, 3, 0.3)
    assert time.monotonic() - began < 60


def test_a_rank_that_stops_is_named_and_a_rank_that_comes_back_too(trio, monkeypatch, caplog):
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(module, "SILENT_SECONDS", 1.0)
    events = []
    trio[0].on_silent = lambda event, **fields: events.append((event, fields["rank"], fields["name"]))
    stopped = threading.Event()
    send = trio[2]._line.set

    class Line:
        def set(self, *args):
            while stopped.is_set():
                time.sleep(0.01)
            send(*args)

        def check(self, keys):
            return False

    trio[2]._line = Line()
    for each in trio:
        each.start()
    time.sleep(0.5)
    stopped.set()
    deadline = time.monotonic() + 60
    silent, back = ("rank_silent", 2, f"rank 2 on {HOST}"), f"rank 2 on {HOST} is back"
    while silent not in events and time.monotonic() < deadline:
        time.sleep(0.02)
    stopped.clear()
    while back not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.02)
    assert silent in events  # on a busy machine others may be silent for a moment too
    assert re.search(rf"rank 2 on {re.escape(HOST)} has given no sign of life for \d+ s", caplog.text)
    assert back in caplog.text


def test_a_lost_rank_is_told_from_one_that_left_with_a_reason(trio, monkeypatch):
    beats = itertools.count()

    def sleep(_seconds):  # in which the others show that they live
        for each in (trio[0], trio[2]):
            each.store.set(f"alive/{each.rank}", str(next(beats)))

    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=sleep))
    ranks = Ranks(0, 3, peers=trio[0])
    assert f"rank 0 of 3: rank 1 on {HOST} is gone; its own output says why" in str(
        ranks.lost("Connection closed")
    )
    assert f"rank 1 on {HOST} is gone" in str(Ranks(2, 3, peers=trio[2]).lost("Connection closed"))


def test_a_rank_that_left_with_a_reason_is_quoted(trio, monkeypatch):
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.1)
    for each in trio:
        each.start()
    ranks = Ranks(0, 3, peers=trio[0])
    trio[1].leave(UserError("shard-00000.arrow: is damaged"))
    trio[2].leave(LostRankError("rank 2 of 3: rank 1 is gone"))
    assert f"rank 1 on {HOST} failed: shard-00000.arrow: is damaged;" in str(ranks.lost("Connection closed"))
    assert "rank 2 on" not in str(ranks.lost("Connection closed"))


def test_one_changed_bit_of_a_weight_changes_the_digest():
    network = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2).to(torch.bfloat16))
    before = int(weights_digest(network.parameters()))
    assert int(weights_digest(network.parameters())) == before
    for parameter in network.parameters():
        bits = parameter.data.view(-1)[:1].view(torch.int32 if parameter.element_size() == 4 else torch.int16)
        bits ^= 1
        assert int(weights_digest(network.parameters())) != before
        bits ^= 1
    assert int(weights_digest(network.parameters())) == before


def test_a_rank_that_was_stopped_itself_blames_nobody(trio, monkeypatch, caplog):
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(module, "SILENT_SECONDS", 3.0)
    for each in trio:
        each.start()
    time.sleep(0.7)
    jump = time.monotonic
    monkeypatch.setattr(module.time, "monotonic", lambda: jump() + 100.0)
    time.sleep(0.7)
    assert "no sign of life" not in caplog.text
