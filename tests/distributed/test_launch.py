"""`mmldlm launch`: what it fills in, what it reports of a failure, which exit code it passes on."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from mmldlm.cli.main import app, main
from mmldlm.errors import UserError
from mmldlm.launch.ranks import Outcome, own_address, plan_launch, run_ranks
from tests import warm
from tests.distributed.pair import environment
from tests.runs import write_recipe
from tests.stores import write_store

STEP = {
    "SLURM_STEP_NODELIST": "node7",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_JOB_ID": "41",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    write_store(folder / "store", num_train=120)
    write_recipe(folder, folder / "store")
    return folder


def start(place, *words, ranks="2"):
    command = [sys.executable, "-m", "mmldlm", "launch", "--nproc-per-node", ranks, "--log-dir", "logs", "--"]
    return warm.Popen(
        [*command, "train", "--recipe", "small.yaml", *words],
        cwd=place, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def find_rank(run, rank):
    """Process id of a rank, by the name of its run and the environment that the agent gave it."""
    for pid, process in warm.alive().items():
        if run in process["words"] and process["environment"].get("RANK") == str(rank):
            return pid
    pytest.fail(f"there is no rank {rank}")


def wait_for_log(run, process):
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        if (run / "training_log.jsonl").exists():
            return
        time.sleep(0.05)
    pytest.fail(f"no step was done: {process.communicate(timeout=5)}")


def test_slurm_and_options_fill_the_plan():
    plan = plan_launch(STEP, nproc_per_node=8)
    assert (plan.nnodes, plan.rdzv_endpoint, plan.rdzv_id) == ((2, 2), "node7:29541", "41")
    plan = plan_launch({}, nnodes="2:4", nproc_per_node=1, rdzv_endpoint="first")
    assert (plan.nnodes, plan.rdzv_endpoint) == ((2, 4), "first:29500")
    assert plan_launch({}, nproc_per_node=3).rdzv_endpoint == "localhost:0"


@pytest.mark.parametrize(("words", "endpoint"), [
    ("fd00::1", "[fd00::1]:29500"), ("[fd00::1]", "[fd00::1]:29500"), ("[fd00::1]:7", "[fd00::1]:7"),
    ("node1.cluster", "node1.cluster:29500"), ("10.0.0.1:7", "10.0.0.1:7"),
])  # fmt: skip
def test_an_address_of_either_family_is_a_meeting_point(words, endpoint):
    assert plan_launch({}, nnodes="2", nproc_per_node=1, rdzv_endpoint=words).rdzv_endpoint == endpoint


def test_options_after_the_command_of_the_ranks_are_its_own(monkeypatch):
    """Also where -- is forgotten."""
    seen = []
    monkeypatch.setattr("mmldlm.launch.ranks.run_ranks", lambda plan, words: seen.append(words) or Outcome())
    for line in (
        "launch --nproc-per-node 2 -- train --recipe small",
        "launch --nproc-per-node 2 train --recipe small",
    ):
        assert CliRunner().invoke(app, line.split()).exit_code == 0
    assert seen == [["train", "--recipe", "small"]] * 2


@pytest.mark.parametrize(("environment", "options", "reported"), [
    ({}, {"nnodes": "2"}, "--rdzv-endpoint HOST:29500"),
    ({}, {"nnodes": "0"}, "nnodes 0: a number of nodes from 1"),
    ({}, {"nnodes": "two"}, "nnodes two"),
    ({}, {"nnodes": "2", "rdzv_endpoint": "host:port"}, "rdzv-endpoint host:port"),
    ({}, {"nnodes": "2", "rdzv_endpoint": "2001:db8::5::29500"}, "[fd00::1]:29500 for an IPv6 address"),
    ({}, {"nnodes": "2", "rdzv_endpoint": "[host]:29500"}, "rdzv-endpoint [host]:29500"),
    ({}, {"nnodes": "2", "rdzv_endpoint": "a host:1"}, "rdzv-endpoint a host:1"),
    ({}, {"nnodes": "1:2", "rdzv_endpoint": "h", "node_rank": 0}, "node rank 0: nodes 1:2 may come and go"),
    (STEP | {"SLURM_STEP_NUM_NODES": "many"}, {}, "SLURM_STEP_NUM_NODES=many"),
    (STEP | {"SLURM_JOB_ID": "x"}, {}, "SLURM_JOB_ID=x"),
    (STEP | {"SLURM_STEP_NODELIST": "n[1-2]"}, {}, "SLURM_STEP_NODELIST=n[1-2]: scontrol cannot expand it"),
    ({}, {"nnodes": "2", "rdzv_endpoint": "h", "node_rank": 2}, "node rank 2: 2 nodes"),
    (STEP | {"SLURM_STEP_NUM_TASKS": "16"}, {}, "use srun --ntasks-per-node=1"),
])  # fmt: skip
def test_what_cannot_be_launched_is_one_clear_line(environment, options, reported):
    with pytest.raises(UserError, match=r"^[^\n]*$") as error:
        plan_launch(environment, nproc_per_node=1, **options)
    assert reported in str(error.value)


@pytest.mark.parametrize(("line", "reported"), [
    ("--dry-run -- train --recipe small", "--dry-run belongs to --from-variables"),
    ("--sbatch time=1 -- train --recipe small", "belong to --slurm FILE"),
    ("--submit -- train --recipe small", "belong to --slurm FILE"),
    ("--slurm -- train --recipe small", "--slurm --: the name of the job file is missing"),
    ("--slurm j --rdzv-endpoint h:1 -- train --recipe small", "do not go with --slurm"),
    ("--from-variables --slurm j", "--slurm does not go with --from-variables"),
    ("--from-variables --nproc-per-node 4", "--nproc-per-node does not go with --from-variables"),
    ("--log-dir /dev/null/logs -- train --recipe small", "/dev/null/logs: /dev/null is a file"),
    ("--slurm /dev/null/job -- train --recipe small", "/dev/null/job: /dev/null is a file"),
])  # fmt: skip
def test_an_option_that_would_count_for_nothing_is_rejected(line, reported, monkeypatch):
    monkeypatch.setattr("mmldlm.launch.ranks.run_ranks", lambda plan, words: Outcome())
    result = CliRunner().invoke(app, ["launch", *line.split()])
    assert isinstance(result.exception, UserError)
    assert reported in str(result.exception)


def test_an_unknown_host_is_named_before_the_nodes_try_to_meet():
    plan = plan_launch({}, nnodes="2", nproc_per_node=1, rdzv_endpoint="no.such.host.invalid:1")
    assert "a host that this machine does not know" in plan.describe()
    plan.rdzv_endpoint = "127.0.0.1:29500"
    assert "does not know" not in plan.describe()


def test_the_meeting_point_is_reported_as_stated():
    assert "meeting at a free port" in plan_launch({}, nproc_per_node=1).describe()
    stated = plan_launch({}, nproc_per_node=1, rdzv_endpoint="127.0.0.1:29533")
    assert "meeting at 127.0.0.1:29533" in stated.describe()


def test_a_misspelled_command_is_the_message_of_the_rank(monkeypatch, tmp_path):
    error = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error))
    monkeypatch.setattr("sys.argv", ["mmldlm", "trian"])
    with pytest.raises(SystemExit):
        main()
    assert "No such command 'trian'" in json.loads(error.read_text())["message"]["message"]


def test_the_meeting_point_is_known_as_our_own_whatever_the_name_of_the_machine_resolves_to():
    """PyTorch looks at the name alone, and then no node opens the port."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no network")
        address = probe.getsockname()[0]
    assert own_address(f"{address}:29500") == (address, True)
    assert own_address("192.0.2.1:29500") == (address, False)
    assert own_address("localhost:29500") == own_address("no.such.host.invalid:1") == (None, False)


def test_a_wrong_setting_is_the_root_cause_and_its_exit_code_is_passed_on(place):
    process = start(place, "optim.lr=-1", "--run", "wrong")
    _, errors = process.communicate(timeout=280)
    assert process.returncode == 2, errors
    last = errors.strip().splitlines()[-1]
    assert last.startswith("mmldlm launch: root cause: rank ")
    assert "exit code 2: optim.lr=-1" in last
    assert "Traceback" not in errors
    (path,) = [
        path
        for path in (place / "logs").rglob("error.json")
        if str(path) in last.replace("(logs", f"({place}/logs")
    ]
    assert json.loads(path.read_text())["message"]["errorCode"] == 2


def test_a_killed_rank_is_the_root_cause_and_a_signal_ends_in_a_checkpoint(place):
    run, words = place / "killed", ["--run", "killed", "train.steps=100000", "train.checkpoint_every=100000"]
    process = start(place, *words, "train.log_every=1", "train.valid_every=0")
    wait_for_log(run, process)
    os.kill(find_rank("killed", 1), signal.SIGKILL)
    _, errors = process.communicate(timeout=280)
    assert process.returncode == 137, errors
    assert "root cause: rank 1, exit code 137: ended by SIGKILL" in errors

    process = start(place, *words, "train.log_every=1", "train.valid_every=0")
    written = (run / "training_log.jsonl").stat().st_size
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and (run / "training_log.jsonl").stat().st_size <= written:
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    _, errors = process.communicate(timeout=280)
    assert process.returncode == 75, errors
    assert "checkpoint saved" in errors
    assert (
        errors.strip().splitlines()[-1] == "mmldlm launch: stopped in order; the same command resumes the run"
    )
    assert any("[rank 0] " in line for line in errors.splitlines())


def start_node(place, port, *words):
    node = [
        "--nnodes",
        "1:2",
        "--nproc-per-node",
        "1",
        "--rdzv-endpoint",
        f"localhost:{port}",
        "--max-restarts",
        "3",
    ]
    train = ["--log-dir", "logs", "--", "train", "--recipe", "small.yaml", *words]
    return warm.Popen(
        [sys.executable, "-m", "mmldlm", "launch", *node, *train],
        cwd=place, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def wait_for(condition, process):
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None and not condition():
        time.sleep(0.1)
    assert condition(), process.communicate(timeout=5)[0]


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.soak
def test_a_node_that_vanishes_leaves_a_run_that_goes_on_and_a_lost_meeting_point_is_one_line(place):
    """Two agents on one machine stand for two nodes; the one that came second is killed with its rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [
        "--run",
        "nodes",
        "train.steps=300",
        "train.checkpoint_every=20",
        "train.log_every=5",
        "train.valid_every=0",
    ]
    first = start_node(place, port, *words)
    wait_for(lambda: listens(port), first)
    second = start_node(place, port, *words)
    run = place / "nodes"
    wait_for(lambda: list((run / "checkpoints").glob("step_*")), first)
    (child,) = [pid for pid, process in warm.alive().items() if process["parent"] == second.pid]
    second.kill()
    os.kill(child, signal.SIGKILL)
    output = first.communicate(timeout=240)[0]
    assert first.returncode == 0, output[-3000:]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events if event["event"] in ("resumed", "finished")] == [
        "resumed",
        "finished",
    ]
    assert [event["world_size"] for event in events if event["event"] in ("started", "resumed")] == [2, 1]


def test_nodes_that_do_not_meet_are_one_clear_line(monkeypatch, tmp_path):
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError
    from torch.distributed.launcher import api

    def lost(*_, **__):
        raise RendezvousConnectionError("The connection to the C10d store has failed.")

    monkeypatch.setattr(api, "launch_agent", lost)
    plan = plan_launch(
        {}, nnodes="2", nproc_per_node=1, rdzv_endpoint="first:29500", log_dir=tmp_path / "logs"
    )
    outcome = run_ranks(plan, ["train"])
    assert outcome.code == 1
    assert outcome.message.startswith(
        "the nodes did not meet at first:29500 (The connection to the C10d store has failed."
    )


def test_a_port_in_use_is_one_clear_line_where_nodes_are_numbered_by_hand(tmp_path):
    """There the agent opens the port itself, without a rendezvous that would name what failed."""
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        plan = plan_launch({}, nnodes="2", nproc_per_node=1, node_rank=0, rdzv_endpoint=endpoint)
        plan.log_dir = tmp_path / "logs"
        outcome = run_ranks(plan, ["train"])
    assert outcome.code == 1
    assert outcome.message.startswith(f"the nodes did not meet at {endpoint} (")
    assert "address already in use" in outcome.message
