"""An update that was skipped names the document that was the reason."""

import json

import numpy as np
import pytest

from tests.runs import make_trainer
from tests.stores import write_store


@pytest.mark.parametrize("bad", [[], [17], [3, 90], list(range(120))])
def test_the_documents_behind_a_skipped_update_are_named(tmp_path, caplog, bad):
    store = write_store(tmp_path / "store", num_train=120).path
    words = ("train.steps=8", "train.log_every=8", "train.valid_every=0", "corruption.mode_weights={l2t: 1}")
    trainer = make_trainer(tmp_path, store, *words, "batch.tokens_per_step=512")
    split = trainer.setup.train_split
    read = split.read

    def damaged(indices):
        documents = read(indices)
        documents.latents[np.isin(indices, bad)] = np.inf
        return documents

    split.read = damaged
    trainer.fit()
    events = [json.loads(line) for line in trainer.run.events.read_text().splitlines()]
    named = {name for event in events if event["event"] == "skipped" for name in event["bad_documents"]}
    reason = bad if len(bad) < 120 else []  # where all are bad, none of them is the reason
    assert named == set(read(np.array(reason, dtype=np.int64)).ids.tolist() if reason else [])
    for index in reason:
        assert f"{index} (id " in caplog.text
