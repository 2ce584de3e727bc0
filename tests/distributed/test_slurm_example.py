"""The job script of the docs, run by bash with commands that stand in for SLURM's: it does not requeue for ever."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from mmldlm.run_folder import Events

DOCS = Path(__file__).parents[2] / "docs"
START, GO_ON = ("started", {"step": 0}), ("resumed", {"step": 40})


def stopped(step, code):
    return "stopped", {"step": step, "reason": f"Interrupted: stopped after step {step}", "exit_code": code}


def failed(step):
    return "stopped", {"step": step, "reason": "UserError: shard-00000.arrow: damaged shard"}


def command(folder, name, text):
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def write_ledger(path, events):
    ledger = Events(path)
    for event, fields in events:
        ledger.record(event, **fields)
    ledger.close()


@pytest.mark.parametrize(("before", "added", "again"), [
    ([], [START, stopped(40, 75)], True),
    ([START, stopped(40, 75)], [GO_ON, stopped(41, 75)], True),
    ([START, stopped(40, 75)], [GO_ON, ("skipped", {"step": 50, "steps": [49]}), stopped(60, 75)], True),
    ([START, stopped(40, 75)], [GO_ON, stopped(40, 75)], False),
    ([START, stopped(40, 75)], [GO_ON, stopped(60, 130)], False),
    ([START, stopped(40, 75)], [GO_ON, failed(60)], False),
    ([START, stopped(40, 75)], [GO_ON, ("finished", {"step": 100})], False),
    ([START, stopped(40, 75)], [GO_ON], False),
    ([START, stopped(40, 75)], [], False),
    ([], [], False),
    ([], [START, stopped(0, 75)], False),
])  # fmt: skip
def test_the_job_is_queued_again_only_after_an_orderly_stop_and_some_steps(tmp_path, before, added, again):
    script = re.search(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", (DOCS / "distributed.md").read_text(), re.S)[
        1
    ]
    run, tools = tmp_path / "run", tmp_path / "tools"
    run.mkdir()
    tools.mkdir()
    if before:
        write_ledger(run / "events.jsonl", before)
    write_ledger(tmp_path / "added", added)
    command(tools, "scontrol", f'echo "$*" >> {tmp_path}/told; echo node1')
    command(tools, "srun", f"[ -s {tmp_path}/added ] && cat {tmp_path}/added >> {run}/events.jsonl; exit 1")
    env = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}
    text = script.replace("/shared/runs/small", str(run))
    done = subprocess.run(["bash", "-c", text], env=env, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert ("requeue 7" in (tmp_path / "told").read_text().splitlines()) == again
