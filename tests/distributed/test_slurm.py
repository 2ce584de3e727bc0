"""`mmldlm launch --slurm`: the job file is sound, and the job queues itself again only when it got further."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mmldlm.cli.main import app
from mmldlm.errors import UserError
from mmldlm.launch.slurm import Job, check_directive, job_script, run_of_words
from tests.distributed.pair import environment
from tests.runs import write_recipe
from tests.stores import write_store

WORDS = ["train", "--recipe", "small.yaml", "--run", "run's folder"]


def command(folder, name, text):
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def test_the_job_file_is_clean_and_says_what_the_scheduler_needs(tmp_path):
    job = Job(WORDS, Path("run's folder"), 2, 8, 8, 3, Path("logs"), ["time=04:00:00", "partition=gpu"])
    text = job_script(job, tmp_path)
    for line in ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--requeue", "--open-mode=append",
                 "--signal=TERM@300", "--time=04:00:00", "--partition=gpu"):  # fmt: skip
        assert f"#SBATCH {line}\n" in text
    assert "srun --kill-on-bad-exit=1 --ntasks-per-node=1 " in text
    tool = Path(sys.executable).with_name("shellcheck")
    if tool.exists():
        (tmp_path / "job").write_text(text)
        done = subprocess.run([str(tool), str(tmp_path / "job")], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_the_folder_of_the_output_is_there_before_the_job_and_may_have_spaces(tmp_path, monkeypatch):
    """SLURM opens the output before the job runs, and drops it where the folder is missing."""
    monkeypatch.chdir(tmp_path)
    words = ["launch", "--slurm", "a job", "--log-dir", "my logs", "--sbatch", "get-user-env", "--", *WORDS]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "my logs").is_dir()
    assert "sbatch 'a job'" in result.output
    text = (tmp_path / "a job").read_text()
    assert '#SBATCH --output="my logs/slurm-%j.out"\n' in text
    assert "#SBATCH --gpus-per-node=1\n" in text, "get-user-env is no number of GPUs"


@pytest.mark.parametrize(("code", "further", "again"), [(75, True, True), (75, False, False), (2, True, False),
                                                        (0, True, False), (130, True, False)])  # fmt: skip
def test_the_job_is_queued_again_after_an_orderly_stop_that_got_further(tmp_path, code, further, again):
    tools, latest = tmp_path / "tools", tmp_path / "run" / "checkpoints" / "latest"
    tools.mkdir()
    latest.parent.mkdir(parents=True)
    latest.write_text("step_1")
    command(tools, "srun", f"{f'echo step_2 > {latest};' if further else ''} exit {code}")
    command(tools, "scontrol", f'echo "$*" >> {tmp_path}/scheduler')
    text = job_script(Job(["train"], Path("run")), tmp_path)
    env = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", "-c", text], env=env, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode == code
    assert (tmp_path / "scheduler").exists() == again
    if again:
        assert (tmp_path / "scheduler").read_text() == "requeue 7\n"


def test_what_sbatch_cannot_take_is_rejected(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words, reported in (("nodes=4", "sets --nodes itself"), ("Time 3", "an option of sbatch is needed")):
        with pytest.raises(UserError, match=reported):
            check_directive(words)
    with pytest.raises(UserError, match="a training is needed after --"):
        run_of_words(["eval", "saved/x"])
    assert run_of_words(["train", "--recipe", "laptop", "name=mine"]) == Path("saved/mine")
    monkeypatch.setenv("PATH", str(tmp_path))
    result = CliRunner().invoke(app, ["launch", "--slurm", "job", "--submit", "--", *WORDS])
    assert isinstance(result.exception, UserError)
    assert "sbatch is not on this machine" in str(result.exception)
    result = CliRunner().invoke(app, ["launch", "--slurm", "new/jobs/job", "--", *WORDS])
    assert (result.exit_code, (tmp_path / "new" / "jobs" / "job").is_file()) == (0, True)


SRUN = """
while [[ $1 == --* ]]; do shift; done
export SLURM_STEP_NODELIST=localhost SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=1
if [ -e {place}/limit ]; then exec "$@"; fi
touch {place}/limit
"$@" & task=$!
while [ ! -s {place}/run/training_log.jsonl ]; do sleep 0.1; done
kill -TERM $task
wait $task
"""


@pytest.mark.soak
def test_a_job_that_meets_its_time_limit_is_queued_again_and_ends(tmp_path):
    """A scheduler of three lines: sbatch runs the file until nobody asks for it again."""
    write_store(tmp_path / "store", num_train=120)
    write_recipe(tmp_path, tmp_path / "store")
    tools = tmp_path / "tools"
    tools.mkdir()
    command(tools, "srun", SRUN.format(place=tmp_path))
    command(tools, "scontrol", f'[ "$1" = requeue ] && touch {tmp_path}/again')
    command(tools, "sbatch", f"while true; do rm -f {tmp_path}/again; SLURM_JOB_ID=7 bash $1 >> {tmp_path}/out 2>&1; "
            f"[ -e {tmp_path}/again ] || break; done; echo Submitted batch job 7")  # fmt: skip
    env = environment() | {"PATH": f"{tools}:{os.environ['PATH']}"}
    words = ["train", "--recipe", "small.yaml", "--run", "run", "train.steps=300", "train.log_every=1"]
    done = subprocess.run(
        [sys.executable, "-m", "mmldlm", "launch", "--slurm", "job", "--submit", "--nproc-per-node", "2", "--", *words],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Submitted batch job 7" in done.stdout
    assert "queued again" in (tmp_path / "out").read_text()
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert '"resumed"' in events
    assert '"finished"' in events.splitlines()[-1]
