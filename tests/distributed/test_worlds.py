"""Worlds of one, two, three and four ranks give the curve of one process, whether the network is whole or divided."""

import json
import sys

import pytest
import torch

from mmldlm.checkpoint.load import load_latest
from mmldlm.training.signals import REQUEUE
from tests import warm
from tests.distributed.pair import ROOT, environment
from tests.distributed.scenarios import PLAIN
from tests.distributed.test_two_ranks import LOOSER, ROUNDING, assert_same_curve, events, lines, own_words
from tests.distributed.worlds import MORE, WORLDS, label
from tests.runs import make_trainer

pytestmark = pytest.mark.timeout(1800)


def curves(worlds, *marks):
    return [
        pytest.param(label(world, name, words), name, marks=marks)
        for world, _, plays in worlds
        for name, words in plays
        if name in PLAIN or name == "backward_fails"
    ]


@pytest.fixture(scope="module")
def worlds(store, tmp_path_factory):
    """The folder in which all worlds have been."""
    folder = tmp_path_factory.mktemp("worlds")
    run_worlds(folder, store)
    return folder


@pytest.fixture(scope="module")
def more_worlds(store, tmp_path_factory):
    """The same for those of the long tests."""
    folder = tmp_path_factory.mktemp("more_worlds")
    run_worlds(folder, store, "more")
    return folder


@pytest.fixture
def folder_of(request):
    """Name of a world's run -> the folder in which it was."""
    usual = {label(world, name, words) for world, _, plays in WORLDS for name, words in plays}
    return lambda place: request.getfixturevalue("worlds" if place in usual else "more_worlds")


def run_worlds(folder, store, *which):
    command = [sys.executable, "-m", "tests.distributed.worlds", str(folder), str(store), *which]
    done = warm.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=1700, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.fixture(scope="module")
def alone(store, tmp_path_factory):
    """Words -> the run of one process."""
    runs = {}

    def run(*words):
        if words not in runs:
            trainer = make_trainer(tmp_path_factory.mktemp("alone"), store, "train.log_every=1", *words)
            trainer.fit()
            runs[words] = trainer
        return runs[words]

    return run


def seen(folder, name, world):
    return [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.parametrize(("place", "name"), [*curves(WORLDS), *curves(MORE, pytest.mark.soak)])
def test_every_kind_and_number_of_ranks_gives_the_curve_of_one(folder_of, alone, place, name):
    whole = alone(*(own_words(name) if name in PLAIN else []))
    ours = lines(folder_of(place) / place / name / "run" / "training_log.jsonl")
    assert_same_curve(ours, lines(whole.run.training_log), LOOSER.get(name, ROUNDING))


def test_a_checkpoint_moves_from_fsdp_to_ddp_to_one_process_to_fsdp(worlds, alone):
    names = ["fsdp4_moved_3", "ddp2_moved_6", "ddp1_moved_9", "fsdp3_moved_12"]
    ends = [seen(worlds, name, int(name[4] if name[0] == "f" else name[3])) for name in names]
    assert [{(rank["code"], rank["step"]) for rank in world} for world in ends] == [
        {(REQUEUE, 3)}, {(REQUEUE, 6)}, {(REQUEUE, 9)}, {(0, 12)},
    ]  # fmt: skip
    whole = alone()
    run = worlds / "moved" / "run"
    assert_same_curve(lines(run / "training_log.jsonl"), lines(whole.run.training_log), ROUNDING)
    saved = load_latest(run / "checkpoints", report=pytest.fail)
    kept = load_latest(whole.run.checkpoints, report=pytest.fail)
    for group in ("model", "ema", "optimizer"):
        assert saved.tensors[group].keys() == kept.tensors[group].keys()
        for key, value in kept.tensors[group].items():
            torch.testing.assert_close(saved.tensors[group][key], value, rtol=1e-3, atol=1e-4)


def test_a_divided_run_that_was_stopped_and_resumed_is_the_same_to_the_bit(worlds):
    assert_same_bits(worlds / "resumed" / "run", worlds / "fsdp2_plain" / "plain" / "run")


def assert_same_bits(one, other):
    saved, kept = (load_latest(run / "checkpoints", report=pytest.fail) for run in (one, other))
    for group in ("model", "ema", "optimizer"):
        assert all(
            torch.equal(saved.tensors[group][key], value) for key, value in kept.tensors[group].items()
        )


def test_replicas_hold_the_same_and_shards_are_parts(worlds):
    first, second, third, fourth = (rank["state"] for rank in seen(worlds, "hybrid4_plain", 4))
    assert (first, second) == (third, fourth)
    assert first != second


def test_replicas_that_differ_by_a_bit_end_the_run(worlds):
    ends = seen(worlds, "hybrid4_differing", 4)
    assert {rank["step"] for rank in ends} == {2}
    assert all(
        "rank 3 and rank 1 hold the same part of the weights, which differs" in rank["told"] for rank in ends
    )


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_both_and_its_document_named(worlds):
    for rank in seen(worlds, "fsdp2_not_finite", 2):
        assert rank["before"] == rank["after"] != rank["state"]
    skipped = [e for e in events(worlds / "fsdp2_not_finite", "not_finite") if e["event"] == "skipped"]
    assert [event["count"] for event in skipped] == [1]


def test_too_many_bad_steps_roll_all_shards_back(worlds):
    assert [rank["step"] for rank in seen(worlds, "fsdp2_rolled_back", 2)] == [12, 12]
    (event,) = [e for e in events(worlds / "fsdp2_rolled_back", "rolled_back") if e["event"] == "rolled_back"]
    assert (event["from_step"], event["step"]) == (8, 4)


@pytest.mark.parametrize(
    "place", ["fsdp2_backward_fails", pytest.param("hybrid4_backward_fails", marks=pytest.mark.soak)]
)
def test_out_of_memory_in_the_backward_pass_of_one_rank_halves_on_all(folder_of, place):
    log = events(folder_of(place) / place, "backward_fails")
    assert [event["step"] for event in log if event["event"] == "out_of_memory"] == [0, 5]


@pytest.mark.parametrize(
    ("place", "world"),
    [("fsdp2_half_precision", 2), pytest.param("hybrid4_half_precision", 4, marks=pytest.mark.soak)],
)
def test_fp16_keeps_one_scale_when_a_gradient_of_one_rank_is_not_finite(folder_of, alone, place, world):
    """The rows that are not finite lie on the last rank alone; all ranks skip the update and halve the scale."""
    for rank in seen(folder_of(place), place, world):
        scales = [scale for scale, _ in rank["seen"].values()]
        assert scales == [2.0**16] * 5 + [2.0**15] * 7
        assert [int(step) for step, (_, same) in rank["seen"].items() if same] == [6]
    log = folder_of(place) / place / "half_precision" / "run" / "training_log.jsonl"
    half, full = ([line["loss"] for line in lines(path)][:5] for path in (log, alone().run.training_log))
    assert half == pytest.approx(full, rel=5e-3)
    assert half != full


def test_exports_of_one_checkpoint_are_the_same_files_whatever_wrote_them(worlds):
    one, *others = (
        worlds / place / "exported" / "run" / "export"
        for place in ("ddp1_exported", "ddp4_exported", "fsdp4_exported", "hybrid4_exported")
    )
    files = {path.relative_to(one) for path in one.rglob("*") if path.is_file()}
    assert len(files) > 2
    for other in others:
        assert {path.relative_to(other) for path in other.rglob("*") if path.is_file()} == files
        different = {str(name) for name in files if (one / name).read_bytes() != (other / name).read_bytes()}
        assert not different


@pytest.mark.soak
def test_nine_ranks_are_more_than_a_tensor_has_rows(alone):
    """So the curves of nine ranks above say something."""
    assert min(parameter.shape[0] for parameter in alone().setup.denoiser.parameters()) < 9
