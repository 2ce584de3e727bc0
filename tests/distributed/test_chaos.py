"""However often memory runs out, on whichever ranks and wherever in the step: no deadlock, the same loss."""

import json

import pytest

from mmldlm.metrics import read_log
from tests.distributed.chaos import WORDS
from tests.distributed.pair import end, start_pair
from tests.runs import make_trainer
from tests.stores import write_store


def losses(path):
    return [(line["loss"], line["grad_norm"]) for line in read_log(path) if "loss" in line]


@pytest.mark.soak
@pytest.mark.parametrize(("seed", "kind"), [(0, "ddp"), (1, "ddp"), (2, "fsdp"), (3, "fsdp"), (4, "hybrid")])
def test_memory_that_runs_out_anywhere_changes_nothing(tmp_path, seed, kind):
    store = write_store(tmp_path / "store", num_train=120).path
    alone = make_trainer(tmp_path / "alone", store, *WORDS)
    alone.fit()
    processes = start_pair("tests.distributed.chaos", str(tmp_path), str(store), str(seed), kind, count=3)
    told = end(processes, 300)
    assert [process.returncode for process in processes] == [0, 0, 0], "\n".join(told)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    failed = [place for rank in found for place in rank["failed"]]
    assert min(failed) == -1, "one step whose exchanges were not known"
    assert max(failed) >= 0, "one whose exchanges were known"
    if kind == "ddp":
        assert found[0]["state"] == found[1]["state"] == found[2]["state"]
    ours = losses(tmp_path / "run" / "run" / "training_log.jsonl")
    for one, other in zip(ours, losses(alone.run.training_log), strict=True):
        assert one == pytest.approx(other, rel=1e-3)
