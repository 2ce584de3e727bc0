"""The fresh process: it trains what the trainer trains, counts real work, and every way to die is told apart."""

import json
import logging
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mmldlm.benchmark import measuring
from mmldlm.benchmark.measuring import Block, Failure, Job, Measurement, run_job
from mmldlm.benchmark.worker import (
    Drive,
    OverLimitError,
    _settle,
    _time_blocks,
    block_sizes,
    explain,
    main,
    measure,
)
from mmldlm.errors import UserError
from mmldlm.evaluation.validation import make_validation
from mmldlm.json_lines import from_plain
from mmldlm.training.graphs import Graphs
from tests.runs import make_trainer, write_recipe
from tests.stores import write_store


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("worker")
    store = write_store(folder / "store").path
    return Job(str(write_recipe(folder, store)), ("speed.precision=fp32",), 5, 1, 2, gate_steps=3)


def test_the_losses_are_those_of_a_training_run(job, tmp_path):
    from mmldlm.config.recipe import load_recipe

    found = measure(job)
    trainer = make_trainer(tmp_path, load_recipe(job.recipe).data.store)
    batches, losses = trainer.batches, []
    for _ in range(3):
        trainer.train_step(next(batches), 0.0)
        losses.append(trainer.window.fields()["loss"])
    assert found.losses == losses
    assert found.valid_loss == make_validation(trainer.setup)(trainer.setup.denoiser)["valid_loss"]
    assert [block.steps for block in found.blocks] == [3, 2]
    assert from_plain(Measurement, json.loads(json.dumps(asdict(found)))) == found


def test_a_store_that_holds_nothing_out_is_measured_all_the_same(job):
    settings = (*job.settings, "data.valid_split=none")
    gated, ungated = (measure(Job(job.recipe, settings, 1, 1, 1, gate_steps=steps)) for steps in (1, 0))
    assert gated.valid_loss is not None
    assert len(gated.blocks) == len(ungated.blocks) == 1
    assert [text for text in gated.warnings if "no split 'none'" in text and "training documents" in text]
    assert ungated.warnings == []


def test_work_is_counted_without_padding(job):
    packed, padded = (
        measure(Job(job.recipe, (f"speed.layout={layout}",), 4, 1, 2)) for layout in ("packed", "padded")
    )
    for ours, theirs in zip(packed.blocks, padded.blocks, strict=True):
        assert (ours.tokens, ours.documents, ours.flops) == (theirs.tokens, theirs.documents, theirs.flops)
        assert ours.places < theirs.places
        assert 0 < ours.tokens <= 2 * 256


def test_the_clock_waits_until_recording_is_done_and_times_are_alike():
    """A drive whose first blocks are slow, and that records until its fourth block."""
    times, recorded = iter([9.0, 9.1, 5.0, 2.0, 2.05, 1.0]), iter([None, None, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2])
    drive = SimpleNamespace(
        device=SimpleNamespace(type="cuda"), block=lambda steps: Block(steps, next(times)),
        recordings=lambda: next(recorded),
    )  # fmt: skip
    measured = SimpleNamespace(warnings=[])
    assert _settle(drive, 5, measured) == 25
    assert measured.warnings == []


@pytest.mark.parametrize(
    ("until", "timed", "recorded"), [(0, 2, False), (2, 4, False), (3, 6, False), (9, 6, True)]
)
def test_blocks_in_which_a_shape_was_recorded_are_timed_again(until, timed, recorded):
    """A drive that records in each of its first blocks."""
    seconds: list[float] = []
    drive = SimpleNamespace(
        block=lambda steps: seconds.append(len(seconds) + 1.0) or Block(steps, seconds[-1]),
        recordings=lambda: min(until, len(seconds)), read=lambda: {"data_wait": 0.25},
    )  # fmt: skip
    measured = Measurement("cuda", "bf16", "varlen", True, 1.0, warmup_steps=7)
    _time_blocks(drive, Job("r", (), 4, 1, 2), measured, time.perf_counter())
    assert len(seconds) == timed
    assert [block.seconds for block in measured.blocks] == [timed - 1, timed]
    assert (measured.recorded, measured.data_wait) == (recorded, 0.25)
    assert measured.warmup_steps == 7 + 2 * (timed - 2), "blocks that do not count were warm-up"


def test_recorded_updates_count_as_recordings_do():
    graphs = Graphs()
    trainer = SimpleNamespace(stepper=SimpleNamespace(graphs=graphs), attempts=SimpleNamespace(watch=None))
    drive = SimpleNamespace(trainer=trainer)
    assert Drive.recordings(drive) == 0
    graphs.recordings["shape"] = None
    graphs._updates["shape"] = None
    assert Drive.recordings(drive) == 2
    trainer.attempts.watch = "undecided"
    assert Drive.recordings(drive) is None


@pytest.mark.parametrize(("steps", "block"), [(20, 5), (7, 3), (2, 5), (1, 1), (11, 4)])
def test_blocks_hold_all_steps_in_equal_parts(steps, block):
    sizes = block_sizes(steps, block)
    assert sum(sizes) == steps
    assert max(sizes) - min(sizes) <= 1
    assert np.mean(sizes) < 2 * block


def test_a_process_that_grows_past_its_limit_is_stopped_and_told_as_memory(job):
    with pytest.raises(OverLimitError) as error:
        measure(Job(job.recipe, (), 1, 1, 1, memory_limit=2**20))
    assert explain(error.value)["kind"] == "memory"


@pytest.mark.parametrize(("error", "kind", "reason"), [
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "memory", "out of memory"),
    (UserError("speed.x=1: no"), "settings", "speed.x=1: no"),
    (ValueError("first line\nsecond"), "error", "ValueError: first line"),
])  # fmt: skip
def test_every_cause_of_death_has_a_kind_and_a_line(error, kind, reason):
    assert explain(error) == {"kind": kind, "reason": reason}


def test_a_failure_is_the_file_that_is_left(job, tmp_path):
    (tmp_path / "job.json").write_text(
        json.dumps(asdict(Job(job.recipe, ("speed.attention=varlen",), 1, 1, 1)))
    )
    main(tmp_path / "job.json", tmp_path / "result.json")
    failure = json.loads((tmp_path / "result.json").read_text())["failure"]
    assert failure["kind"] == "settings"
    assert "speed.attention=varlen: needs a GPU" in failure["reason"]


def test_what_the_engine_warns_of_is_kept_once(job, monkeypatch):
    def warn(self, steps):
        logging.getLogger("mmldlm.training.recovery").warning("torch.compile failed, continuing without it")
        return run_block(self, steps)

    run_block = Drive.block
    monkeypatch.setattr(Drive, "block", warn)
    assert measure(job).warnings == ["torch.compile failed, continuing without it"]


DEATHS = {
    "killed": "import os; os.kill(os.getpid(), 9)",
    "silent": "import sys; sys.exit(3)",
    "hanging": "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    "open('child', 'w').write(str(child.pid))\ntime.sleep(60)",
}


@pytest.mark.parametrize(("how", "kind"), [("killed", "memory"), ("silent", "error"), ("hanging", "timeout")])
def test_a_process_that_leaves_no_result_is_a_failure_and_leaves_nothing_running(
    how, kind, job, tmp_path, monkeypatch
):
    (tmp_path / "dying.py").write_text(DEATHS[how])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measuring, "WORKER", "dying")
    for timeout in (2, 60) if how == "hanging" else (100,):
        found = run_job(job, tmp_path / "log", timeout=timeout)
        if (tmp_path / "child").exists():
            break  # a slow machine had not started it yet
    assert isinstance(found, Failure)
    assert found.kind == kind
    if how == "hanging":
        assert not _alive(int((tmp_path / "child").read_text()))


def _alive(pid: int) -> bool:
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return False
        if state == "Z":
            return False
        time.sleep(0.05)
    return True
