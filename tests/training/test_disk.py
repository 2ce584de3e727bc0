"""Disks that are full, limited, read-only or that damage what they hold: the run goes on, and says so."""

import errno
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from mmldlm import durable
from mmldlm.checkpoint.load import load_latest
from mmldlm.errors import UserError
from tests import warm
from tests.runs import curve, make_trainer, same, weights

ROOT = Path(__file__).parents[2]


LIMITED = """
import resource, sys
from pathlib import Path
from tests.runs import make_trainer

trainer = make_trainer(Path(sys.argv[1]), Path(sys.argv[2]))
run = trainer.train_step

def one_step(batch, waited):
    run(batch, waited)
    if trainer.step == 5:
        trainer.checkpoints.saver.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
    if trainer.step == 11:
        trainer.checkpoints.saver.wait()
        assert "the file is larger than a limit allows" in trainer.checkpoints.unsaved, trainer.checkpoints.unsaved
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

trainer.train_step = one_step
trainer.fit()
"""


def test_no_room_while_saving_costs_that_checkpoint_and_nothing_else(store, whole, tmp_path):
    env = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [sys.executable, "-c", LIMITED, str(tmp_path), str(store)]
    done = warm.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(os.listdir(checkpoints)) == ["latest", "step_00000004", "step_00000012"]
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    failed = [event for event in events if event["event"] == "save_failed"]
    assert [event["step"] for event in failed] == [8]
    assert "step_00000004 is still the newest checkpoint" in failed[0]["reason"]
    found = load_latest(checkpoints, report=pytest.fail)
    for name, tensor in whole.setup.denoiser.state_dict().items():
        assert found.tensors["model"][name].equal(tensor), name


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_every_file_of_a_checkpoint_damaged_in_turn_is_noticed_and_the_run_ends_as_if_nothing_was(
    store, tmp_path, caplog
):
    stopped = make_trainer(tmp_path / "stopped", store, "optim.min_lr_ratio=1", "train.steps=8")
    stopped.fit()
    newest = stopped.run.checkpoints / "step_00000008"
    files = sorted(os.listdir(newest))
    groups = [f"{name}.safetensors" for name in ("balance", "ema", "log", "model", "optimizer")]
    assert files == sorted([*groups, "manifest.json", "meta.json"])
    for name in files:
        for damage in (truncate, flip, os.unlink):
            aside = tmp_path / "aside"
            shutil.copytree(newest, aside)
            damage(newest / name)
            messages = []
            found = load_latest(stopped.run.checkpoints, report=messages.append)
            assert found.step == 4, (name, damage.__name__)
            assert len(messages) == 1
            assert f"step_00000008/{name}" in messages[0]
            assert "step_00000004 is used instead" in messages[0]
            shutil.rmtree(newest)
            aside.rename(newest)
    flip(newest / "optimizer.safetensors")
    again = make_trainer(tmp_path / "stopped", store, "optim.min_lr_ratio=1", "train.steps=8")
    before = weights(stopped)
    again.fit()
    assert same(weights(again), before)
    assert curve(again) == curve(stopped)
    assert "is used instead" in caplog.text


def test_a_folder_that_becomes_read_only_under_a_run_costs_no_work(
    store, whole, tmp_path, monkeypatch, caplog
):
    trainer = make_trainer(tmp_path, store)
    run = trainer.train_step

    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(args[0]))

    def one_step(batch, waited):
        run(batch, waited)
        if trainer.step == 5:
            trainer.checkpoints.saver.wait()
            for name in ("write", "mkdir", "rename", "replace"):
                monkeypatch.setattr(os, name, refuse)
        if trainer.step == 11:
            trainer.checkpoints.saver.wait()
            assert "the file system is read-only" in trainer.checkpoints.unsaved
            monkeypatch.undo()

    trainer.train_step = one_step
    trainer.fit()
    assert "lines wait in memory until then" in caplog.text
    assert same(weights(trainer), weights(whole))
    assert curve(trainer) == curve(whole)
    assert trainer.checkpoints.unsaved is None


@pytest.mark.parametrize("damage", [flip, truncate, lambda path: path.write_bytes(b""), os.unlink])
def test_a_log_that_was_changed_since_the_checkpoint_is_reported(store, whole, tmp_path, caplog, damage):
    words = ("train.log_every=1", "train.valid_every=0", "optim.min_lr_ratio=1")
    first = make_trainer(tmp_path, store, "train.steps=4", *words)
    first.fit()
    again = make_trainer(tmp_path, store, "train.steps=5", *words)
    again.fit()
    assert "cannot be trusted" not in caplog.text
    damage(first.run.training_log)
    make_trainer(tmp_path, store, "train.steps=6", *words).fit()
    assert "training_log.jsonl is not as it was when the checkpoint of step 5 was saved" in caplog.text


def test_a_run_folder_that_is_deleted_is_reported_and_the_run_can_be_resumed(store, whole, tmp_path, caplog):
    trainer = make_trainer(tmp_path, store, "train.log_every=1")
    run = trainer.train_step

    def one_step(batch, waited):
        if trainer.step == 6:
            trainer.checkpoints.saver.wait()
            shutil.rmtree(trainer.run.path)
        run(batch, waited)

    trainer.train_step = one_step
    trainer.fit()
    assert "training_log.jsonl was deleted while it was being written" in caplog.text
    assert same(weights(trainer), weights(whole))
    assert load_latest(trainer.run.checkpoints, report=pytest.fail).step == 12


def test_no_room_for_a_checkpoint_costs_old_ones_first_and_an_unsaved_end_is_not_finished(
    store, tmp_path, monkeypatch
):
    """Room for three checkpoints beside the one being written, then for two, then for none."""
    room, write = [4], durable.write_file

    def limited(path, chunks):
        if path.name == "model.safetensors" and len(list(path.parents[1].glob("step_*"))) >= room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, chunks)

    monkeypatch.setattr(durable, "write_file", limited)
    words = (
        "train.checkpoint_every=1",
        "train.keep_checkpoints=3",
        "train.log_every=1",
        "train.valid_every=0",
    )
    trainer = make_trainer(tmp_path, store, *words)
    run = trainer.train_step

    def one_step(batch, waited):
        trainer.checkpoints.saver.wait()
        room[0] = {6: 2, 11: 0}.get(trainer.step, room[0])
        run(batch, waited)

    trainer.train_step = one_step
    trainer.fit()
    events = [json.loads(line) for line in trainer.run.events.read_text().splitlines()]
    failed = [event["step"] for event in events if event["event"] == "save_failed"]
    assert failed == [12], events
    assert events[-1]["event"] == "stopped"
    assert "no space left on the disk" in events[-1]["reason"]
    assert [path.name for path in sorted(trainer.run.checkpoints.glob("step_*"))] == ["step_00000011"]


def test_a_disk_without_room_for_a_checkpoint_is_rejected_before_the_first_step(store, tmp_path, monkeypatch):
    """What could not be saved at the end would be lost; a run that has a checkpoint may go on and lose a little."""
    trainer = make_trainer(tmp_path, store)
    needed = 16 * sum(weight.numel() for weight in trainer.setup.denoiser.parameters())
    usual, free = shutil.disk_usage(tmp_path), [needed - 1]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usual._replace(free=free[0]))
    with pytest.raises(
        UserError, match=r"run: \d+ MiB are free on its disk, .* choose a run folder on another"
    ):
        trainer.fit()
    assert trainer.step == 0
    assert not trainer.run.training_log.exists()
    free[0] = needed
    make_trainer(tmp_path, store).fit()
    free[0] = 0
    make_trainer(tmp_path, store, "train.steps=13").fit()
