"""Ten thousand steps in bf16: not one value that is not finite."""

import math

import pytest
import torch

from mmldlm.metrics import read_log
from tests.runs import make_trainer
from tests.stores import write_store


@pytest.mark.soak
def test_ten_thousand_steps_in_bf16_stay_finite(tmp_path):
    store = write_store(tmp_path / "store", num_train=400).path
    trainer = make_trainer(
        tmp_path, store, "speed.precision=bf16", "train.steps=10000", "train.log_every=10", "train.valid_every=1000",
        "train.checkpoint_every=1000", "batch.tokens_per_step=64",
    )  # fmt: skip
    trainer.fit()
    lines = [line for line in read_log(trainer.run.training_log) if "loss" in line]
    assert len(lines) == 1000
    assert not [line for line in lines if "nonfinite" in line or line["skipped_steps"]]
    assert all(math.isfinite(value) for line in lines for value in line.values() if isinstance(value, float))
    for named in trainer.snapshot().tensors.values():
        assert all(torch.isfinite(tensor.float()).all() for tensor in named.values())
