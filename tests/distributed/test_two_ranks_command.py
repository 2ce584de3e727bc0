"""`mmldlm train` on two ranks as a user meets it: torchrun, a signal to one rank, a rank that is killed."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from mmldlm.checkpoint.load import load_latest
from mmldlm.metrics import read_log
from mmldlm.training.signals import REQUEUE
from tests import warm
from tests.distributed.pair import end, environment, start_pair
from tests.runs import make_trainer, write_recipe
from tests.stores import write_store

LONG = (
    "train.steps=100000", "train.log_every=1", "train.valid_every=0", "train.checkpoint_every=100000",
    "distributed.timeout_minutes=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    write_store(folder / "store", num_train=120)
    write_recipe(folder, folder / "store")
    return folder


def train(*words):
    return ("mmldlm", "train", "--recipe", "small.yaml", *words)


def wait_for(condition, what, processes):
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and all(process.poll() is None for process in processes):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail(f"{what} was not reached: {end(processes, 5)}")


def wait_for_step(log, step, processes):
    wait_for(
        lambda: log.exists() and any(line["step"] >= step for line in read_log(log)),
        f"step {step}",
        processes,
    )


def wait_for_checkpoint(run, processes):
    """They are written beside the steps, so a step in the log does not mean that the one before it is there."""
    wait_for(lambda: any((run / "checkpoints").glob("step_*")), "a checkpoint", processes)


def test_a_signal_to_one_rank_stops_both_with_a_whole_checkpoint_and_a_killed_one_is_told(place):
    run = place / "stopped"
    processes = start_pair(*train("--run", str(run), *LONG), cwd=place)
    wait_for_step(run / "training_log.jsonl", 3, processes)
    processes[1].send_signal(signal.SIGTERM)
    told = end(processes)
    assert [process.returncode for process in processes] == [REQUEUE, REQUEUE], told
    assert "Traceback" not in "".join(told)
    assert "".join(told).count("checkpoint saved; run the same command to resume") == 1
    stopped = load_latest(run / "checkpoints", report=pytest.fail)
    steps = [line["step"] for line in read_log(run / "training_log.jsonl")]
    assert steps == list(range(1, stopped.step + 1))
    assert len(list((run / "checkpoints").glob("step_*"))) == 1
    assert json.loads((run / "heartbeat.json").read_text())["pid"] == processes[0].pid

    processes = start_pair(*train("--run", str(run), *LONG), cwd=place)
    wait_for_step(run / "training_log.jsonl", stopped.step + 3, processes)
    processes[1].kill()
    told = end(processes)
    assert processes[0].returncode == 2, told
    assert "Traceback" not in told[0]
    line = next(
        line for line in told[0].splitlines() if line.startswith("mmldlm: error: rank 0 of 2: rank 1 on ")
    )
    assert "the same command resumes from the last checkpoint" in line
    assert load_latest(run / "checkpoints", report=pytest.fail).step == stopped.step
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    turns = [
        event["event"] for event in events if event["event"] in ("started", "stopped", "resumed", "finished")
    ]
    assert turns == ["started", "stopped", "resumed", "stopped"]
    assert f"rank 1 on {socket.gethostname()} is gone" in events[-1]["reason"]


@pytest.mark.soak
def test_a_rank_that_is_stopped_is_named_and_the_run_goes_on_when_it_is_back(place):
    """SIGSTOP, as a debugger or a machine that swaps; the name comes after half a minute without a sign of life."""
    run, host = place / "silent", socket.gethostname()
    processes = start_pair(*train("--run", str(run), *LONG, "distributed.timeout_minutes=5"), cwd=place)
    wait_for_step(run / "training_log.jsonl", 3, processes)
    processes[1].send_signal(signal.SIGSTOP)

    def silent():
        events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
        return [event["name"] for event in events if event["event"] == "rank_silent"]

    deadline = time.monotonic() + 150
    while not silent() and time.monotonic() < deadline:
        time.sleep(0.2)
    step = max(line["step"] for line in read_log(run / "training_log.jsonl"))
    processes[1].send_signal(signal.SIGCONT)
    assert silent() == [f"rank 1 on {host}"]
    wait_for_step(run / "training_log.jsonl", step + 3, processes)
    processes[0].send_signal(signal.SIGTERM)
    told = end(processes)
    assert [process.returncode for process in processes] == [REQUEUE, REQUEUE], told
    assert f"rank 1 on {host} has given no sign of life for 30 s" in told[0]


def test_ranks_that_differ_do_not_train(place):
    words = train("--run", "differ", *LONG, "train.device=cpu")
    processes = start_pair(*words, cwd=place, last=("optim.lr=0.1", "train.checkpoint_every=7"))
    told = end(processes)
    assert [process.returncode for process in processes] == [2, 2], told
    assert "Traceback" not in "".join(told)
    host = socket.gethostname()
    line = (
        f"mmldlm: error: the ranks differ: optim.lr is 0.003 on rank 0 on {host}, 0.1 on rank 1 on {host}; "
    )
    assert line + f"train.checkpoint_every is 100000 on rank 0 on {host}, 7 on rank 1" in told[0]
    assert "the ranks differ; the output of rank 0 lists how" in told[1]
    assert not (place / "differ").exists()


def ranks_of(name):
    """Rank -> process id, of the run of this name."""
    return {
        int(process["environment"]["RANK"]): pid
        for pid, process in warm.alive().items()
        if "RANK" in process["environment"] and name in process["words"]
    }


KILLED = [
    pytest.param("fsdp", 2, 0),  # rank 0 keeps the lock and publishes
    pytest.param("ddp", 2, 0, marks=pytest.mark.soak),
    pytest.param("fsdp", 3, 1, marks=pytest.mark.soak),
    pytest.param("hybrid", 2, 1, marks=pytest.mark.soak),
]


@pytest.mark.parametrize(("kind", "count", "victim"), KILLED)
def test_torchrun_restarts_a_killed_rank_and_the_run_ends_as_if_nothing_had_happened(
    place, kind, count, victim
):
    """`scripts/chaos.py` kills more of them."""
    name = f"whole_{kind}_{count}"
    run, log = place / name, place / name / "training_log.jsonl"
    words = ("train.valid_samples=0", "train.valid_every=0", "train.steps=20", "train.log_every=1")
    torchrun = warm.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count),
         "--max-restarts", "1", "-m", *train("--run-folder", name, *words, f"distributed.parallel={kind}")],
        cwd=place, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for_checkpoint(run, [torchrun])
    os.kill(ranks_of(name)[victim], signal.SIGKILL)
    told = end([torchrun], 200)[0]
    assert torchrun.returncode == 0, told
    assert told.count("20 steps done; weights for use are in") == 1
    assert (run / "export" / "model.safetensors").exists()
    losses = [(line["step"], line["loss"]) for line in read_log(log) if "loss" in line]
    assert [step for step, _ in losses] == list(range(1, 21))
    alone = make_trainer(place / f"alone_{name}", place / "store", *words)
    alone.fit()
    whole = [line["loss"] for line in read_log(alone.run.training_log) if "loss" in line]
    assert [loss for _, loss in losses] == pytest.approx(whole, rel=1e-5)
    events = [event["event"] for event in map(json.loads, (run / "events.jsonl").read_text().splitlines())]
    assert [event for event in events if event in ("started", "resumed", "finished")] == [
        "started",
        "resumed",
        "finished",
    ]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_two_agents_of_two_ranks_restart_together_when_one_rank_is_killed(place):
    """Shards inside an agent, replicas across: rank 3 dies, both agents start all ranks again."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    log = place / "agents" / "training_log.jsonl"
    words = ("train.valid_samples=0", "train.valid_every=0", "train.steps=20", "train.log_every=1")
    options = f"--nnodes 2 --nproc-per-node 2 --max-restarts 2 --rdzv-endpoint {endpoint}".split()
    command = [sys.executable, "-m", "mmldlm", "launch", *options]
    run = train("--run", "agents", *words, "distributed.parallel=hybrid")[1:]
    agents = []
    for node in ("0", "1"):
        own = ["--node-rank", node, "--log-dir", f"logs{node}", "--", *run]
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        agents.append(warm.Popen([*command, *own], cwd=place, env=environment(), **pipes))
    wait_for_step(log, 6, agents)
    os.kill(ranks_of("agents")[3], signal.SIGKILL)
    told = end(agents, 600)
    assert [agent.returncode for agent in agents] == [0, 0], told
    alone = make_trainer(place / "alone_agents", place / "store", *words)
    alone.fit()
    curves = [
        [line["loss"] for line in read_log(path) if "loss" in line] for path in (log, alone.run.training_log)
    ]
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)


@pytest.mark.parametrize(("names", "told"), [
    ({"WORLD_SIZE": "2"}, "RANK=''"),
    ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
    ({"WORLD_SIZE": "2", "RANK": "2", "LOCAL_RANK": "0"}, "RANK=2: allowed is 0 to 1"),
    ({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}, "MASTER_ADDR is not set"),
])  # fmt: skip
def test_a_place_that_makes_no_sense_is_one_clear_line(names, told):
    from mmldlm.distributed.launch import read_place
    from mmldlm.errors import UserError

    with pytest.raises(UserError) as error:
        read_place(names)
    assert told in str(error.value)
    assert "torchrun" in str(error.value)


def test_without_torchrun_there_is_one_rank():
    from mmldlm.distributed.launch import RankPlace, read_place

    assert read_place({}) == read_place({"WORLD_SIZE": "1", "RANK": "0"}) == RankPlace()
    assert os.environ.get("WORLD_SIZE", "1") == "1"
