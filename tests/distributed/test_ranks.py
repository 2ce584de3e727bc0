"""One rank agrees with itself at once; several are a matter of the other tests here."""

import signal
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mmldlm.config import Config
from mmldlm.distributed.launch import start_ranks
from mmldlm.distributed.ranks import LostRankError, Ranks, code_of, error_of, is_compiler_error
from mmldlm.distributed.shards import Shards, make_mesh
from mmldlm.distributed.stop_broadcast import StopBroadcast
from mmldlm.errors import UserError
from mmldlm.runtime import spare_workers
from mmldlm.types import Piece


def test_for_one_rank_every_answer_is_its_own():
    ranks = Ranks()
    assert ranks.main
    assert not ranks.several
    assert ranks.largest(-7) == -7
    assert (ranks.any(True), ranks.any(False)) == (True, False)
    assert ranks.all_equal(object())
    assert ranks.total(2.5) == 2.5
    assert ranks.from_main("rows") == "rows"
    tensor = torch.ones(3)
    assert ranks.sum(tensor) is tensor
    assert ranks.tensor_from_each(tensor) is tensor
    ranks.barrier()


def test_a_failure_says_its_kind_and_its_rank():
    ranks = [Ranks(rank=rank, world_size=4) for rank in range(4)]
    memory = code_of(torch.OutOfMemoryError("CUDA out of memory"), ranks[2])
    compiler = code_of(error_of(code_of(_of("torch._dynamo.exc"), ranks[1]), ranks[0]), ranks[3])
    other = code_of(RuntimeError("shape"), ranks[0])
    assert 0 < memory < compiler < other  # of several, the worst is what all ranks hear
    assert isinstance(error_of(memory, ranks[0]), torch.OutOfMemoryError)
    assert "rank 2" in str(error_of(memory, ranks[0]))
    assert is_compiler_error(error_of(compiler, ranks[0]))
    assert isinstance(error_of(other, ranks[1]), LostRankError)
    assert "rank 0 failed" in str(error_of(other, ranks[1]))


def _of(module):
    return type("Unsupported", (RuntimeError,), {"__module__": module})("graph break")


def test_a_lost_rank_is_told_without_the_source_code_of_others():
    told = str(
        Ranks(1, 2).lost("[/somebody/pair.cc:553] Connection closed by peer [1.2.3.4]:5. This is ...\nmore")
    )
    assert "rank 1 of 2" in told
    assert told.endswith("(Connection closed by peer [1.2.3.4]:5)")
    assert "\n" not in told


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[pair.cc:1] Connection closed by peer"), LostRankError),
        (torch.OutOfMemoryError("full"), torch.OutOfMemoryError),
    ],
)
def test_a_rank_that_dies_between_the_agreement_and_the_sum_is_named(monkeypatch, error, expected):
    def all_reduce(tensor, *unused, group=None):
        if group != "host":
            raise error

    monkeypatch.setattr("torch.distributed.all_reduce", all_reduce)
    monkeypatch.setattr("mmldlm.distributed.shards._gather_rows", all_reduce)
    ranks = Ranks(0, 2, host="host")
    with pytest.raises(expected):
        ranks.sum(torch.ones(2))
    shards = SimpleNamespace(ranks=ranks, num_shards=2, group=None)
    with pytest.raises(expected):
        Shards.gathered(shards, torch.ones(1, 1, 2), Piece(0, 1, (2, 2)))


def test_what_breaks_off_anywhere_because_a_rank_is_gone_is_one_clear_line():
    config = Config()
    config.distributed.parallel, config.train.device = "fsdp", "cpu"
    with pytest.raises(LostRankError, match=r"resumes from the last checkpoint \(Connection reset by peer\)"):  # noqa: SIM117
        with start_ranks(config):
            raise dist.DistNetworkError("Connection reset by peer")
    with pytest.raises(torch.OutOfMemoryError), start_ranks(config):
        raise torch.OutOfMemoryError("out of memory, see lib/nvidia/nccl/include")


def test_a_rank_that_is_gone_is_not_waited_for_at_the_store(monkeypatch):
    """There it would take until the time-out; an agreement ends at once."""

    def all_reduce(*unused, group=None):
        raise RuntimeError("[pair.cc:1] Connection closed by peer")

    monkeypatch.setattr("torch.distributed.all_reduce", all_reduce)
    monkeypatch.setattr("torch.distributed.new_group", lambda **_: pytest.fail("waits"))
    peers = SimpleNamespace(compare=lambda *_: pytest.fail("waits"), why_lost=lambda: "rank 1 is gone")
    ranks = Ranks(0, 2, peers=peers)
    with pytest.raises(LostRankError, match="rank 1 is gone"):
        ranks.compare("data", {"device": "cpu"})
    with pytest.raises(LostRankError, match="rank 1 is gone"):
        Shards.new_host_group(SimpleNamespace(ranks=ranks))


@pytest.mark.parametrize(("cpus", "ranks", "workers"), [(24, 4, 6), (64, 4, 8), (2, 1, 2), (2, 8, 1)])
def test_loader_processes_are_shared_among_the_ranks_of_a_machine(monkeypatch, cpus, ranks, workers):
    monkeypatch.setattr("os.cpu_count", lambda: cpus)
    assert spare_workers(ranks) == workers


def test_hybrid_needs_the_same_number_of_ranks_on_every_machine():
    for world, local, equal in ((3, 2, True), (4, 2, False)):
        ranks = SimpleNamespace(
            world_size=world,
            local_world_size=local,
            device=torch.device("cpu"),
            all_equal=lambda _, e=equal: e,
        )
        with pytest.raises(UserError, match=f"hybrid: {world} ranks do not lie on machines of {local} each"):
            make_mesh(ranks, "hybrid")


def test_a_rank_whose_launcher_was_killed_is_asked_to_stop(monkeypatch):
    """Else it would train on and hold its device, with nobody to stop it."""
    asked = threading.Event()
    target = SimpleNamespace(received=None, pass_on=lambda number: number == signal.SIGTERM and asked.set())
    monkeypatch.setattr("mmldlm.distributed.stop_broadcast._SECONDS", 0.01)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    with StopBroadcast(Ranks(), target, [signal.SIGTERM]):
        assert not asked.wait(0.2)
        monkeypatch.setattr("os.getppid", lambda: 1)
        assert asked.wait(60)
    asked.clear()
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")  # the shell that a plain run was started from may go
    with StopBroadcast(Ranks(), target, [signal.SIGTERM]):
        monkeypatch.setattr("os.getppid", lambda: 2)
        assert not asked.wait(0.2)
