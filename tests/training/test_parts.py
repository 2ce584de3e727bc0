"""A run is a list of named parts: saved and restored by the same loop, also from checkpoints of earlier versions."""

import torch

from mmldlm.checkpoint.state import restore_snapshot, take_snapshot
from tests.runs import make_trainer, same, weights


class Counter:
    """A stateful part that somebody adds."""

    def __init__(self):
        self.count, self.sums = 0, torch.zeros(2)

    def state_dict(self):
        return {"count": self.count, "sums": self.sums}

    def load_state_dict(self, state):
        self.count = state["count"]
        self.sums.copy_(state["sums"])


def test_tensors_become_a_group_and_the_rest_an_entry_of_the_meta_under_the_same_name():
    counter = Counter()
    counter.count, counter.sums = 3, torch.tensor([1.0, 2.0])
    snapshot = take_snapshot({"counter": counter}, 7, {"settings": {}})
    assert snapshot.meta == {"settings": {}, "counter": {"count": 3}}
    assert snapshot.tensors["counter"].keys() == {"sums"}
    again = Counter()
    restore_snapshot({"counter": again, "younger": Counter()}, snapshot)
    assert (again.count, again.sums.tolist()) == (3, [1.0, 2.0])


def test_every_part_of_a_run_comes_back(whole, store, tmp_path):
    other = make_trainer(tmp_path, store)
    other.checkpoints.restore(other.parts, whole.snapshot())
    assert same(weights(other), weights(whole))
    for name, part in whole.parts.items():
        held = {key: value for key, value in part.state_dict().items() if not isinstance(value, torch.Tensor)}
        restored = other.parts[name].state_dict()
        assert held == {key: restored[key] for key in held}, name
