"""Two ranks, one run: the curve of one rank, the same weights on both, and no accident on one that hangs the other."""

import json

import pytest
import torch

from mmldlm.checkpoint.load import load_latest
from mmldlm.errors import Interrupted
from mmldlm.metrics import read_log
from mmldlm.training.signals import REQUEUE
from tests.distributed.pair import end, start_pair
from tests.distributed.scenarios import PLAIN, SCENARIOS, stop_at, watch_documents
from tests.runs import make_trainer

LOSSES = ("loss", "text_loss", "latent_loss", "length_loss", "grad_norm", "text_accuracy")
ROUNDING = 3e-6
"""Sums of fp32 in another order."""
LOOSER = {"bf16_sums": 3e-3, "memory_in_sums": 3e-3, "fp16_sums": 3e-4, "muon": 3e-3}
"""Half precision is somewhere inside, and makes more of rounding."""
FACTORS = ("text_factor", "latent_factor")
SAME = ("lr", "epoch", "documents", "tokens", "batch_size", "skipped_steps")


@pytest.fixture(scope="module")
def began(store, tmp_path_factory):
    """A folder in which one rank has done the first four steps of the run that two ranks take over."""
    folder = tmp_path_factory.mktemp("ranks")
    first = make_trainer(folder / "resumed", store, "train.log_every=1")
    seen = watch_documents(first)
    stop_at(first, 4)
    with pytest.raises(Interrupted):
        first.fit()
    return folder, seen


@pytest.fixture(scope="module")
def both(store, began):
    """Name of a scenario -> what each rank saw."""
    folder, _ = began
    processes = start_pair("tests.distributed.scenarios", str(folder), str(store))
    told = end(processes, 400)
    assert [process.returncode for process in processes] == [0, 0], "\n".join(told)
    names = [*PLAIN, *SCENARIOS]
    return {
        name: [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in (0, 1)] for name in names
    }


@pytest.fixture(scope="module")
def alone(store, tmp_path_factory):
    """Words -> the curve of one rank."""
    curves = {}

    def curve(*words):
        if words not in curves:
            trainer = make_trainer(tmp_path_factory.mktemp("alone"), store, "train.log_every=1", *words)
            trainer.seen = watch_documents(trainer)
            trainer.fit()
            curves[words] = lines(trainer.run.training_log), trainer
        return curves[words]

    return curve


def lines(path):
    return [line for line in read_log(path) if "loss" in line]


def events(folder, name):
    return [json.loads(line) for line in (folder / name / "run" / "events.jsonl").read_text().splitlines()]


def assert_same_curve(ours, theirs, rel):
    assert [line["step"] for line in ours] == [line["step"] for line in theirs] == list(range(1, 13))
    for one, other in zip(ours, theirs, strict=True):
        for key in (*LOSSES, *(FACTORS if FACTORS[0] in other else ())):
            assert one[key] == pytest.approx(other[key], rel=rel, abs=1e-6, nan_ok=True), (one["step"], key)
        for key in SAME:
            assert one[key] == other[key], (one["step"], key)
    pairs = [(one[key], other[key]) for one, other in zip(ours, theirs, strict=True) for key in LOSSES]
    largest = max((abs(one - other) / abs(other) for one, other in pairs if other), default=0.0)
    print(f"largest difference of a loss or gradient norm: {largest:.1e}")


def own_words(name):
    return [word for word in PLAIN[name] if not word.startswith(("distributed", "batch", "speed"))]


@pytest.mark.parametrize("name", list(PLAIN))
def test_two_ranks_give_the_curve_of_one_and_equal_weights(both, began, alone, name):
    curve, _ = alone(*own_words(name))
    rel = LOOSER.get(name, ROUNDING)
    assert_same_curve(lines(began[0] / name / "run" / "training_log.jsonl"), curve, rel)
    assert both[name][0]["state"] == both[name][1]["state"]


@pytest.mark.parametrize("name", ["recorded", "recorded_later"])
def test_passes_without_ddp_and_one_sum_give_the_same_curve(both, began, alone, name):
    assert_same_curve(lines(began[0] / name / "run" / "training_log.jsonl"), alone()[0], ROUNDING)
    assert both[name][0]["state"] == both[name][1]["state"]


def test_the_scenarios_are_what_they_say(both, began):
    """The cuts are really there: several passes a rank, and extra ones that one rank has nothing to do for."""
    found = {name: lines(began[0] / name / "run" / "training_log.jsonl") for name in PLAIN}
    assert all(line["micro_batches"] == 1 for line in found["plain"])
    assert all(line["micro_batches"] >= 2 for line in found["micro_batches"])
    assert any(line["extra_micro_batches"] for line in found["uneven"])
    assert found["bf16_sums"][5]["loss"] != found["plain"][5]["loss"]
    assert [event["step"] for event in events(began[0], "plateau") if event["event"] == "lr_reduced"] == [
        8,
        10,
        12,
    ]
    assert len({line["text_factor"] for line in found["gradient_norm"]}) > 3


def test_one_rank_two_ranks_one_rank_is_the_run_of_one(both, began, alone, store):
    folder, seen = began
    assert [found["code"] for found in both["resumed"]] == [REQUEUE] * 2
    last = make_trainer(folder / "resumed", store, "train.log_every=1")
    assert last.run.checkpoints.joinpath("latest").resolve().name == "step_00000008"
    rest = watch_documents(last)
    last.fit()
    curve, whole = alone()
    middle = [{int(step): found for step, found in rank["seen"].items()} for rank in both["resumed"]]
    assert [sorted(rank) for rank in middle] == [[4, 5, 6, 7]] * 2
    for step, documents in whole.seen.items():
        together = [seen, *middle, rest]
        parts = [part for rank in together for part in rank.get(step, [])]
        assert sorted(parts) == sorted(documents), step
    assert all(rank[step] for rank in middle for step in rank)  # both had something to do
    assert_same_curve(lines(last.run.training_log), curve, ROUNDING)
    assert last.progress.tokens == whole.progress.tokens
    for key, value in whole.setup.denoiser.state_dict().items():
        torch.testing.assert_close(last.setup.denoiser.state_dict()[key], value, rtol=1e-3, atol=1e-4)


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_both(both, began):
    first, second = both["not_finite"]
    assert first["before"] == first["after"] == second["before"] == second["after"]
    assert first["state"] == second["state"] != first["before"]
    skipped = [
        line["skipped_steps"] for line in lines(began[0] / "not_finite" / "run" / "training_log.jsonl")
    ]
    assert skipped == [0] * 5 + [1] + [0] * 6


def test_too_many_bad_steps_on_one_rank_roll_both_back(both, began):
    first, second = both["rolled_back"]
    assert (first["step"], second["step"]) == (12, 12)
    assert first["state"] == second["state"]
    (told,) = [event for event in events(began[0], "rolled_back") if event["event"] == "rolled_back"]
    assert (told["from_step"], told["step"]) == (8, 4)
    steps = [line["step"] for line in lines(began[0] / "rolled_back" / "run" / "training_log.jsonl")]
    assert steps == list(range(1, 13))


def test_data_that_one_rank_cannot_read_ends_the_run_for_both_with_a_checkpoint(both, began):
    first, second = both["bad_data"]
    assert second["told"] == "shard-00000.arrow: is damaged"
    assert "rank 0 of 2: another rank is gone" in first["told"]
    assert "could not read its data" in first["told"]
    saved = load_latest(began[0] / "bad_data" / "run" / "checkpoints", report=pytest.fail)
    assert saved.step == first["step"] == second["step"] == 6


@pytest.mark.parametrize("name", ["waiting_and_told", "waiting_and_another_told"])
def test_a_signal_to_either_rank_ends_the_waiting_of_both(both, began, name):
    first, second = both[name]
    assert (first["code"], second["code"]) == (REQUEUE, REQUEUE)
    saved = load_latest(began[0] / name / "run" / "checkpoints", report=pytest.fail)
    assert saved.step == first["step"] == second["step"] == 6


@pytest.mark.parametrize(("name", "changes"), [
    ("memory_before", [("out_of_memory", 4), ("grown", 7)]),
    ("memory_after_recording", [("out_of_memory", 8), ("grown", 11)]),
    ("memory_at_once", [("out_of_memory", 0), ("grown", 3)]),
    ("memory_inside", [("out_of_memory", 3), ("grown", 6), ("out_of_memory", 9)]),
    ("memory_in_sums", [("out_of_memory", 5), ("grown", 8)]),
    ("memory_measuring", [("out_of_memory", 6), ("grown", 9)]),
])  # fmt: skip
def test_out_of_memory_on_one_rank_halves_on_both_and_keeps_the_loss(both, began, alone, name, changes):
    words = own_words("gradient_norm") if name == "memory_measuring" else []
    told = [(e["event"], e["step"]) for e in events(began[0], name) if "micro_tokens_after" in e]
    assert told == changes
    rel = LOOSER.get(name, ROUNDING)
    assert_same_curve(lines(began[0] / name / "run" / "training_log.jsonl"), alone(*words)[0], rel)
    assert both[name][0]["state"] == both[name][1]["state"]


def test_memory_ran_out_when_some_sums_were_done_and_others_not(both):
    for rank in both["memory_inside"]:
        assert len(rank["summed"]) == 2
        assert all(count > 0 for count in rank["summed"])
