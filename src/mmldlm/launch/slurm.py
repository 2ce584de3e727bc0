"""A SLURM job that runs `mmldlm launch` on every node, saves before its time is over and queues itself again.

The job goes on only after an orderly stop (exit code 75) that left a newer checkpoint: one that fails in the same way
each time ends.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mmldlm.errors import UserError

SIGNAL_SECONDS = 300
"""Before the time limit: for the step at hand and a checkpoint."""
_OWN = ("nodes", "ntasks-per-node", "requeue", "signal", "open-mode")
_SCRIPT = """#!/bin/bash
{directives}
set -u
cd {folder} || exit 2
mkdir -p {log_dir}
checkpoint() {{ readlink {latest} 2>/dev/null || cat {latest} 2>/dev/null; }}
before=$(checkpoint)
status=0
srun --kill-on-bad-exit=1 --ntasks-per-node=1 {command} || status=$?
if [ "$status" -eq 75 ] && [ "$(checkpoint)" != "$before" ]; then
  echo "stopped in order at $(checkpoint); queued again"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


@dataclass(frozen=True)
class Job:
    """The content of a job file."""

    words: Sequence[str]
    """What every rank runs."""
    run: Path
    """Folder of the run, whose newest checkpoint shows whether the job got further."""
    nnodes: int = 1
    nproc_per_node: int = 1
    gpus_per_node: int = 0
    max_restarts: int = 0
    log_dir: Path = Path("train_logs")
    directives: Sequence[str] = ()
    """More options of sbatch, `name=value`."""


def job_script(job: Job, folder: Path) -> str:
    """The text of the job file; paths are relative to a folder that all nodes see."""
    lines = [
        f"--job-name={re.sub(r'[^A-Za-z0-9._-]+', '-', job.run.name) or 'mmldlm'}",
        f"--nodes={job.nnodes}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []),
        "--requeue",
        "--open-mode=append",
        f"--signal=TERM@{SIGNAL_SECONDS}",
        f"--output={_quoted(job.log_dir / 'slurm-%j.out')}",
        *(f"--{check_directive(words)}" for words in job.directives),
    ]
    launch = [
        "-m",
        "mmldlm",
        "launch",
        "--nproc-per-node",
        str(job.nproc_per_node),
        "--log-dir",
        str(job.log_dir),
    ]
    restarts = ["--max-restarts", str(job.max_restarts)] if job.max_restarts else []
    return _SCRIPT.format(
        directives="\n".join(f"#SBATCH {line}" for line in lines),
        folder=shlex.quote(str(folder)),
        log_dir=shlex.quote(str(job.log_dir)),
        latest=shlex.quote(str(job.run / "checkpoints" / "latest")),
        command=shlex.join([sys.executable, *launch, *restarts, "--", *job.words]),
    )


def _quoted(path: Path) -> str:
    """As sbatch reads the value of an option in a job file: words in double quotes."""
    text = str(path)
    return text if re.fullmatch(r"[\w./%+=:@-]+", text) else f'"{text}"'


def check_directive(words: str) -> str:
    """One option of sbatch, `name=value`, which must not be one that the job file sets itself."""
    name, equals, value = words.lstrip("-").partition("=")
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name) or "\n" in words or (equals and not value):
        raise UserError(
            f"sbatch {words}: an option of sbatch is needed, as in time=04:00:00 or partition=gpu"
        )
    if name in _OWN:
        raise UserError(f"sbatch {words}: the job file sets --{name} itself; leave it out")
    return words.lstrip("-")


def run_of_words(words: Sequence[str]) -> Path:
    """The folder of the run that a `train` command writes: that of --run, or saved/<name> of its recipe."""
    from mmldlm.config.recipe import load_recipe

    options = {"--run": "", "--run-folder": "", "--recipe": ""}
    settings = []
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name in options:
            options[name] = value if equals else next(rest, "")
        elif equals and not name.startswith("-"):
            settings.append(word)
    chosen = options["--run"] or options["--run-folder"]
    if words[:1] != ["train"] or not (chosen or options["--recipe"]):
        raise UserError(
            "slurm: a training is needed after --, as in: -- train --recipe small --run /shared/run"
        )
    return Path(chosen) if chosen else Path("saved") / load_recipe(options["--recipe"], settings).name


def submit(path: Path) -> str:
    """Give the job file to the scheduler; what it answers."""
    try:
        done = subprocess.run(["sbatch", str(path)], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise UserError(
            "submit: sbatch is not on this machine; submit the job file where SLURM is"
        ) from error
    if done.returncode:
        raise UserError(f"submit: sbatch rejected {path}: {' '.join(done.stderr.split())[:300]}")
    return done.stdout.strip()
