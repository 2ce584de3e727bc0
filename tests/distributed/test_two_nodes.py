"""Two nodes: agents in network namespaces of their own, or, where these are not permitted, both on this machine."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from mmldlm.metrics import read_log
from tests.distributed.pair import environment
from tests.runs import write_recipe
from tests.stores import write_store

pytestmark = pytest.mark.soak
WORDS = ["train.steps=200", "train.checkpoint_every=20", "train.log_every=5", "train.valid_every=0"]


def ip(*words):
    return subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def nodes():
    """For each of two nodes the words that start a process there and its network card; and where they meet."""
    mark = uuid.uuid4().hex[:6]
    names = [f"mmldlm-{mark}-{letter}" for letter in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", f"a{mark}", "type", "veth", "peer", "name", f"b{mark}")
        for number, (letter, name) in enumerate(zip("ab", names, strict=True), start=1):
            ip("link", "set", f"{letter}{mark}", "netns", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "address", "add", f"10.78.0.{number}/24", "dev", f"{letter}{mark}")
            ip("-n", name, "link", "set", f"{letter}{mark}", "up")
        places = [
            (["ip", "netns", "exec", name], f"{letter}{mark}")
            for letter, name in zip("ab", names, strict=True)
        ]
        yield places, "10.78.0.1:29500"
    except (OSError, subprocess.CalledProcessError):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        yield [([], ""), ([], "")], f"localhost:{port}"
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.fixture
def place(tmp_path):
    write_store(tmp_path / "store", num_train=120)
    write_recipe(tmp_path, tmp_path / "store")
    return tmp_path


def start_node(place, node, endpoint, log):
    prefix, card = node
    names = environment() | ({"GLOO_SOCKET_IFNAME": card} if card else {})
    agent = [
        "launch",
        "--nnodes",
        "1:2",
        "--nproc-per-node",
        "2",
        "--rdzv-endpoint",
        endpoint,
        "--max-restarts",
        "3",
    ]
    train = ["--log-dir", "logs", "--", "train", "--recipe", "small.yaml", "--run", "nodes", *WORDS]
    with open(place / log, "wb") as output:
        return subprocess.Popen(
            [*prefix, sys.executable, "-m", "mmldlm", *agent, *train],
            cwd=place, env=names, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip


def tree(pid):
    """A process and all that it started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in tree(int(child)))]


def kill_all(pids):
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def wait_for(condition, process, log, seconds=200.0):
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and process.poll() is None and not condition():
        time.sleep(0.1)
    assert condition(), log.read_text()[-3000:]


def last_loss(log):
    return [(line["step"], line["loss"]) for line in read_log(log) if "loss" in line][-1]


@pytest.mark.timeout(900)
def test_a_run_that_loses_a_whole_node_goes_on_and_ends_with_the_loss_of_an_uninterrupted_one(place, nodes):
    where, endpoint = nodes
    run = place / "nodes"
    first = start_node(place, where[0], endpoint, "first.txt")
    time.sleep(1.0)  # where both are one machine, the first keeps the meeting point
    second = start_node(place, where[1], endpoint, "second.txt")
    try:
        wait_for(lambda: list((run / "checkpoints").glob("step_*")), first, place / "first.txt", 400)
        kill_all(tree(second.pid))
        assert first.wait(400) == 0, (place / "first.txt").read_text()[-3000:]
    finally:
        for process in (first, second):
            if process.poll() is None:
                kill_all(tree(process.pid))
            process.wait()
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    sizes = [event["world_size"] for event in events if event["event"] in ("started", "resumed")]
    assert (sizes[0], sizes[-1]) == (4, 2)
    assert "finished" in [event["event"] for event in events]
    whole = [sys.executable, "-m", "mmldlm", "train", "--recipe", "small.yaml", "--run", "whole", *WORDS]
    subprocess.run(whole, cwd=place, env=environment(), check=True, capture_output=True, timeout=300)
    ours, theirs = (last_loss(place / name / "training_log.jsonl") for name in ("nodes", "whole"))
    assert ours[0] == theirs[0] == 200
    assert ours[1] == pytest.approx(theirs[1], rel=1e-3)
