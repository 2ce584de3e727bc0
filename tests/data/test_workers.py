"""Loader processes that die or hang, shards that are cut off or vanish: noticed, told, and survived where possible."""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import threading
import time

import pytest

from mmldlm.data import shard
from mmldlm.data.loader import LoaderError, Restarts
from mmldlm.errors import Interrupted, UserError
from mmldlm.training import setup
from tests.runs import curve, hit_loader, make_trainer, same, weights
from tests.stores import write_store


def hit_workers(trainer, number, steps):
    """Send a signal to all loader processes at the start of these steps, once each."""
    run, left = trainer.train_step, list(steps)

    def one_step(batch, waited):
        if trainer.step in left:
            left.remove(trainer.step)
            hit_loader(trainer, number)
        run(batch, waited)

    trainer.train_step = one_step


def failures(trainer):
    lines = [json.loads(line) for line in trainer.run.events.read_text().splitlines()]
    return [line["reason"] for line in lines if line["event"] == "loader_failed"]


WORKERS = ("data.num_workers=2", "data.prefetch=1")


def test_killed_workers_are_started_anew_and_the_run_is_bit_identical(store, whole, tmp_path):
    trainer = make_trainer(tmp_path, store, *WORKERS)
    hit_workers(trainer, signal.SIGKILL, [3, 8])
    trainer.fit()
    assert len(failures(trainer)) == 2
    assert "died (SIGKILL, perhaps out of host memory)" in failures(trainer)[0]
    assert same(weights(trainer), weights(whole))
    assert curve(trainer) == curve(whole)


def test_only_the_processes_of_the_loader_are_hit_and_one_that_is_gone_is_no_error(store, tmp_path):
    trainer = make_trainer(tmp_path, store, *WORKERS)
    batches = trainer.batches
    next(batches)
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        gone, other = trainer.batches.watched.workers
        os.kill(gone.pid, signal.SIGKILL)
        gone.join(100.0)
        hit_loader(trainer, signal.SIGKILL)
        other.join(100.0)
        assert (gone.exitcode, other.exitcode, bystander.poll()) == (-signal.SIGKILL, -signal.SIGKILL, None)
    finally:
        bystander.kill()
        bystander.wait()
        batches.close()


def test_workers_that_hang_are_started_anew_too(store, whole, tmp_path):
    trainer = make_trainer(tmp_path, store, *WORKERS, "data.worker_timeout=2")
    hit_workers(trainer, signal.SIGSTOP, [4])
    trainer.fit()
    assert failures(trainer)  # a slow machine may add one
    assert "gave nothing for" in failures(trainer)[0]
    assert same(weights(trainer), weights(whole))


def test_a_worker_that_dies_with_the_lock_of_all_hangs_nobody(store, tmp_path):
    """As a process may that is stopped or killed just while it looks whether it is to end."""
    trainer = make_trainer(tmp_path, store, *WORKERS)
    batches = trainer.batches
    next(batches)
    event = trainer.batches.watched.context.end_event.event

    def take_along():
        event._cond.acquire()
        os.kill(os.getpid(), signal.SIGKILL)

    robber = multiprocessing.get_context("fork").Process(target=take_along)
    robber.start()
    robber.join(100.0)
    assert not event._cond.acquire(timeout=0.1)
    hit_loader(trainer, signal.SIGKILL)
    with within(150.0):
        for _ in range(4):
            next(batches)
        batches.close()
    assert len(failures(trainer)) == 1


@contextlib.contextmanager
def within(seconds):
    """Fails instead of hanging."""

    def late(number, frame):
        pytest.fail(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def test_a_slow_worker_is_waited_for(store, whole, tmp_path):
    trainer = make_trainer(tmp_path, store, *WORKERS)
    slow = trainer.setup.corruption.corrupt

    def corrupt(batch):
        if 60 in batch.positions:
            time.sleep(2.5)
        return slow(batch)

    reader = trainer.setup.reader

    def slow_reader(plan):
        made = reader(plan)
        made.corrupt = corrupt
        return made

    trainer.setup.reader = slow_reader
    trainer.fit()
    assert failures(trainer) == []
    assert same(weights(trainer), weights(whole))


def test_workers_that_always_die_end_the_run_with_one_line_and_a_checkpoint(store, tmp_path):
    trainer = make_trainer(tmp_path, store, *WORKERS, "data.worker_restarts=1")
    hit_workers(trainer, signal.SIGKILL, [5])
    reader = trainer.setup.reader

    def deadly_reader(plan):
        made = reader(plan)
        make = made.make
        made.make = lambda where: os.kill(os.getpid(), signal.SIGKILL) if where.step >= 6 else make(where)
        return made

    trainer.setup.reader = deadly_reader
    with pytest.raises(UserError, match=r"loader process \d+ died .* after 1 restarts .*data.num_workers=0"):
        trainer.fit()
    assert trainer.checkpoints.saver.last_saved == trainer.step == 6


def hang_from(trainer, step, seconds=300.0):
    """What reads the documents of this step, and of later ones, does not come back."""
    reader = trainer.setup.reader

    def stuck_reader(plan):
        made = reader(plan)
        make = made.make
        made.make = lambda where: time.sleep(seconds) if where.step >= step else make(where)
        return made

    trainer.setup.reader = stuck_reader


def ask_later(trainer, step, number):
    """A signal comes while the run waits for the documents of this step."""
    run = trainer.train_step

    def train_step(batch, waited):
        run(batch, waited)
        if trainer.step == step:
            threading.Timer(0.3, os.kill, (os.getpid(), number)).start()

    trainer.train_step = train_step


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_ends_the_waiting_for_data_that_do_not_come(
    store, whole, tmp_path, number, code, num_workers
):
    trainer = make_trainer(tmp_path, store, f"data.num_workers={num_workers}", "data.worker_timeout=250")
    hang_from(trainer, 5)
    ask_later(trainer, 5, number)
    began = time.monotonic()
    with pytest.raises(Interrupted, match=r"stopped after step 5, checkpoint saved") as told:
        trainer.fit()
    assert told.value.exit_code == code
    assert time.monotonic() - began < 100  # not the end of anybody's patience
    assert trainer.checkpoints.saver.last_saved == 5
    assert json.loads(trainer.run.events.read_text().splitlines()[-1])["reason"].startswith("Interrupted: ")
    again = make_trainer(tmp_path, store)
    again.fit()
    assert same(weights(again), weights(whole))
    assert curve(again) == curve(whole)


def test_a_signal_while_waiting_for_the_first_step_leaves_without_a_checkpoint(store, tmp_path):
    trainer = make_trainer(tmp_path, store, "data.num_workers=0")
    hang_from(trainer, 0)
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with trainer.stop, pytest.raises(Interrupted, match="stopped before the first step") as told:
        trainer.fit()
    assert told.value.exit_code == 75
    assert list(trainer.run.checkpoints.glob("step_*")) == []


def test_restarts_are_bounded_and_forgotten_after_good_steps():
    restarts, error = Restarts(2), LoaderError("a loader process died")
    assert restarts.failed(error, 0) is None
    assert restarts.failed(error, 0) is None
    for _ in range(100):
        restarts.step_done()
    assert restarts.failed(error, 0) is None
    assert restarts.failed(error, 0) is None
    assert isinstance(restarts.failed(error, 0), UserError)


def cut(path):
    os.truncate(path, 100)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("damage", "told"),
    [(cut, "damaged shard"), (os.unlink, "this file of the pair store is missing")],
    ids=["cut off", "deleted"],
)
def test_a_shard_that_is_damaged_under_a_run_is_named_and_nothing_is_lost(
    tmp_path, monkeypatch, damage, told, num_workers
):
    monkeypatch.setattr(shard, "CHECK_SECONDS", 0.0)
    store = write_store(tmp_path / "store", num_train=120, shard_documents=1000).path
    trainer = make_trainer(tmp_path, store, f"data.num_workers={num_workers}", "data.prefetch=1")
    run, (path,) = trainer.train_step, (store / "train").glob("*.arrow")

    def one_step(batch, waited):
        if trainer.step == 5:
            damage(path)
        run(batch, waited)

    trainer.train_step = one_step
    with pytest.raises(UserError, match=rf"{path.name}: {told}"):
        trainer.fit()
    assert trainer.checkpoints.saver.last_saved == trainer.step >= 6


def test_a_store_that_vanishes_is_one_line_naming_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(shard, "CHECK_SECONDS", 0.0)
    store = write_store(tmp_path / "store", num_train=120).path
    trainer = make_trainer(tmp_path, store)
    run = trainer.train_step

    def one_step(batch, waited):
        if trainer.step == 5:
            shutil.rmtree(store)
        run(batch, waited)

    trainer.train_step = one_step
    with pytest.raises(
        UserError, match=r"store/train/.*\.arrow: this file of the pair store is missing"
    ) as told:
        trainer.fit()
    assert "\n" not in str(told.value)
    assert trainer.checkpoints.saver.last_saved == 6


def test_a_missing_page_ends_a_loader_process_and_not_the_run(tmp_path, monkeypatch):
    """Cut off between two looks at the file: the process that reads it gets SIGBUS, a new one names the file."""
    monkeypatch.setattr(shard, "CHECK_SECONDS", 1e9)
    store = write_store(tmp_path / "store", num_train=120, shard_documents=1000).path
    trainer = make_trainer(tmp_path, store, "data.num_workers=1", "data.prefetch=1")
    run, (path,) = trainer.train_step, (store / "train").glob("*.arrow")

    def one_step(batch, waited):
        if trainer.step == 5:
            os.truncate(path, 0)
        run(batch, waited)

    trainer.train_step = one_step
    with pytest.raises(UserError, match=rf"{path.name}: damaged shard"):
        trainer.fit()
    assert "SIGBUS" in failures(trainer)[0]
    assert trainer.checkpoints.saver.last_saved == trainer.step


def test_a_small_shared_memory_is_reported_before_the_first_step_with_the_remedy(
    store, tmp_path, monkeypatch
):
    monkeypatch.setattr(setup, "shared_memory", lambda: 10_000)
    trainer = make_trainer(tmp_path, store, "data.num_workers=2")
    with pytest.raises(UserError, match=r"/dev/shm: 0 MiB are free.*--shm-size=8g.*data\.num_workers=0"):
        trainer.fit()
    assert trainer.step == 0
