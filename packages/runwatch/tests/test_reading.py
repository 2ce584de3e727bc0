"""Logs as they really are: everybody's formats, rubbish, files that grow, shrink, move and are not there yet."""

import json
import math
import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runwatch.errors import UserError
from runwatch.follow import LONGEST_LINE, FileFollower
from runwatch.parser import LineParser
from runwatch.records import Record
from runwatch.session import Session
from runwatch.settings import MonitorSettings
from runwatch.sources import find_runs

FORMATS = [
    ('{"step": 5, "time": 1794710893.5, "loss": 2.5, "lr": 0.001}', 5, {"loss": 2.5, "lr": 0.001}),
    ('{"step": 5, "loss": null, "nonfinite": ["loss"]}', 5, {"loss": math.nan}),
    ('{"step": 5, "loss": NaN, "grad_norm": Infinity}', 5, {"loss": math.nan, "grad_norm": math.inf}),
    ('{"train/loss": 2.5, "trainer/global_step": 7}', 7, {"loss": 2.5}),
    ('{"step": 3, "train": {"loss": 2.5}}', 3, {"loss": 2.5}),
    (
        "Epoch 3: 12%|...| 120/1000 [00:12<01:20, 9.1it/s, loss=2.31, lr=5e-05]",
        3120,
        {"loss": 2.31, "lr": 5e-5, "steps_per_second": 9.1},
    ),
    (
        "Training:   1%|▏    | 120/10000 [00:12<17:20,  2.00s/it, Epoch=0/3, Loss=nan, Text=2.1, Latent=0.9, Acc=0.1]",
        120,
        {
            "loss": math.nan,
            "text_loss": 2.1,
            "latent_loss": 0.9,
            "text_accuracy": 0.1,
            "steps_per_second": 0.5,
        },
    ),
    (
        "iter 100: loss 3.2145, time 120.50ms, mfu 30.00%",
        100,
        {"loss": 3.2145, "step_seconds": 0.1205, "mfu": 0.3},
    ),
    ("step 250: train loss 3.2000, val loss 3.3100", 250, {"valid_loss": 3.31}),
    (
        "\x1b[32m[rank0]:[titan] 2026-05-18 16:04:46,338 - root - INFO - \x1b[31mstep: 14  \x1b[39mloss:  3.24405  "
        "grad_norm:  0.8319  memory:  9.50GiB(64.99%)  tps: 7,282  tflops: 0.52  mfu: 0.17%\x1b[0m",
        14,
        {
            "loss": 3.24405,
            "grad_norm": 0.8319,
            "tokens_per_second": 7282.0,
            "gpu_memory_allocated": 9.5 * 2**30,
        },
    ),
    ("[titan] INFO - validate step: 10  loss:  3.1  memory:  1.00GiB(1%)  tps: 100", 10, {"valid_loss": 3.1}),
    (
        "step=10 loss=2.5e-01 lr=1e-3 grad_norm=-inf tokens/s=1,234",
        10,
        {"loss": 0.25, "tokens_per_second": 1234.0},
    ),
    ("[epoch: 92, iter:   5,100, lr:(4.7e-07,)] l_pix: 5.1e-05 ", 5100, {"loss": 5.1e-5, "lr": 4.7e-7}),
    (
        "Epoch 1 | Step 20/900 | Loss: 2.3 | Learning Rate: 5e-05 | Grad Norm: 0.8",
        20,
        {"lr": 5e-5, "grad_norm": 0.8},
    ),
]


@pytest.mark.parametrize(("line", "step", "values"), FORMATS)
def test_a_line_of_each_format(line, step, values):
    record = LineParser().parse(line)
    assert record.step == step
    for name, value in values.items():
        assert record.values[name] == pytest.approx(value, nan_ok=True), name


def test_hugging_face_dicts_take_their_step_from_the_bar():
    parser = LineParser()
    parser.parse(" 12%|█▏        | 120/1000 [00:12<01:20,  9.10it/s]")
    record = parser.parse("{'loss': '2.31', 'grad_norm': nan, 'learning_rate': 5e-05, 'epoch': 0.1}")
    assert (record.step, parser.total) == (120, 1000)
    assert math.isnan(record.values["grad_norm"])
    assert parser.parse("{'eval_loss': 2.0, 'eval_runtime': 3.1, 'epoch': 0.1}").values["valid_loss"] == 2.0
    assert parser.parse("{'train_runtime': 10.0, 'train_loss': 2.5, 'epoch': 3.0}").event == "finished"


def test_a_redrawn_bar_is_no_new_number_and_other_bars_are_not_steps():
    parser = LineParser()
    first = parser.parse("Training:  1%|x| 10/1000 [00:01<01:00, 9.0it/s, Loss=2.5]")
    again = parser.parse("Training:  1%|x| 11/1000 [00:01<01:00, 9.0it/s, Loss=2.5]")
    assert "loss" in first.values
    assert "loss" not in again.values
    assert parser.parse("Validation DataLoader 0:  50%|x| 5/10 [00:01<00:01, 5.0it/s]") is None


def test_evaluation_bars_without_a_name_are_not_steps():
    parser = LineParser()
    parser.parse(" 12%|█▏        | 120/1000 [00:12<01:20,  9.10it/s]")
    assert parser.parse(" 50%|█████     | 5/10 [00:00<00:00,  9.10it/s]") is None
    assert (parser.last_step, parser.total) == (120, 1000)


def test_a_bar_without_an_end_and_a_log_of_epochs():
    assert LineParser().parse("train: 120it [00:12,  9.10it/s, loss=2.5]").step == 120
    epoch = LineParser().parse("Epoch 3/10 - loss: 2.5 - val_loss: 2.75")
    assert (epoch.values["loss"], epoch.values["valid_loss"]) == (2.5, 2.75)
    parser = LineParser()
    parser.parse("iter 249: loss 3.1, time 100ms, mfu 30%")
    assert "loss" not in parser.parse("step 250: train loss 3.2, val loss 3.3").values


MESSAGES = {
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB": "oom",
    "RuntimeError: HIP out of memory. Tried to allocate 512.00 MiB": "oom",
    "Out of memory: Killed process 4242 (python) total-vm:99kB": "oom",
    "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=77.batch": "oom",
    "slurmstepd: error: Detected 2 oom_kill events in StepId=78.0": "oom",
    "2026-01-02 03:04:05: W tensorflow/core/framework/op_kernel.cc:17] RESOURCE_EXHAUSTED: OOM when allocating": "oom",
    "ResourceExhaustedError: OOM when allocating tensor with shape[8,9] and type float": "oom",
    "| WARNING: ran out of memory in worker 3, skipping batch": "oom",
    "[rank3]:[E ProcessGroupNCCL.cpp:537] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL": "nccl",
    "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError": "rendezvous",
    "OSError: [Errno 28] No space left on device": "disk_full",
    "Warning: NaN gradient detected at step 5": "bad_gradient",
    "ERROR: Invalid loss detected at step 5": "bad_loss",
    "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0": "skipped",
    "saving checkpoint to out": "checkpoint",
    "Killed": "killed",
}


@pytest.mark.parametrize("line", MESSAGES)
def test_messages_that_mean_something(line):
    assert LineParser().parse(line).event == MESSAGES[line]


def test_the_evidence_of_a_long_line_is_the_part_that_says_it():
    record = LineParser().parse(
        "a sentence of a sample " * 20 + "Error allocating 99 bytes of device memory (out of memory)."
    )
    assert record.event == "oom"
    assert "Error allocating 99" in record.text


@pytest.mark.parametrize(
    ("line", "step", "values"),
    [
        (
            "Epoch 4 Train: loss = 1.5, acc = 0.5 | Val: loss = 2.5, acc = 0.2",
            4,
            {"loss": 1.5, "valid_loss": 2.5},
        ),
        ("Epoch 4: loss = 1.5 | Val: acc = 0.2, loss = 2.5", 4, {"loss": 1.5, "valid_loss": 2.5}),
        ("Loss after 7 epochs: 0.25", 7, {"loss": 0.25}),
        ("Validation loss at step 300: 0.75", 300, {"valid_loss": 0.75}),
        ("d: 0.125;gen: -0.5:   1%|          | 30/9000 [00:17<92:41:45, 16.69s/it]", 30, {"loss": -0.5}),
    ],
)
def test_losses_behind_other_words(line, step, values):
    record = LineParser().parse(line)
    assert record.step == step
    assert {key: record.values.get(key) for key in ("loss", "valid_loss") if key in record.values} == values


def test_single_letters_are_no_losses_without_their_adversary():
    assert LineParser().parse("step 5: d: 0.5, width: 3") is None


def test_rewards_beside_a_loss_are_noticed_once_they_are_a_curve():
    lines = [f"step {n}: loss {n + 0.5}, mean reward: {n}, explained_variance: 0.{n}" for n in range(1, 6)]
    parser = LineParser()
    assert [parser.parse(line).is_played for line in lines] == [False, False, True, True, True]
    parser = LineParser()
    lines = [
        f"step {n}: loss 0.{n}, rewards/chosen: 0.5, rewards/margins: 0.1, score: 0.7" for n in range(1, 6)
    ]
    assert not any(parser.parse(line).is_played for line in lines)


@pytest.mark.parametrize(
    "line",
    [
        "learning_rate = 0.0006", "max_steps: 1000", "Loaded 5 files with text 5", "Killed time until 5 pm",
        "number of parameters: 123.59M", "info: nothing lost here", "", "   ", "{}", "[1, 2]", '{"a": {"b": []}}',
        "2026-01-02 03:04:05: W tensorflow/core/framework/cpu_allocator_impl.cc:8] Allocation of 77 exceeds 10% of "
        "free system memory.",
        "2026-01-02 03:04:05: W tensorflow/core/common_runtime/bfc_allocator.cc:2] Allocator (GPU_0_bfc) ran out of "
        "memory trying to allocate 2.5GiB with freed_by_count=0. The caller indicates that this is not a failure",
        "2026-01-02 03:04:05: I tensorflow/stream_executor/cuda/cuda_driver.cc:7] failed to allocate 3.50G (99 bytes) "
        "from device: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
        "caption 4: an old man paints the harbour out of memory and smiles",
        "Note: lower --width if you run out of memory on a small GPU",
    ],
)  # fmt: skip
def test_lines_that_say_nothing(line):
    assert LineParser().parse(line) is None


def test_a_traceback_gives_its_last_line_and_torchrun_its_root_cause():
    parser = LineParser()
    text = """Traceback (most recent call last):
  File "train.py", line 5, in <module>
    main()
ValueError: bad batch
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 77)
============================================================"""
    found = [record for record in map(parser.parse, text.split("\n")) if record]
    assert [record.event for record in found] == ["crash", "crash"]
    assert found[0].text == "ValueError: bad batch"
    assert (found[1].rank, found[1].facts["root_cause"]) == (1, True)


def test_ctrl_c_under_torchrun_is_no_crash(tmp_path):
    path = tmp_path / "train.log"
    report = """Traceback (most recent call last):
  File "run.py", line 5, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : -2 (pid: 77)
  traceback : Signal 2 (SIGINT) received by PID 77
============================================================"""
    path.write_text("".join(f"step {k} loss {2 - k / 99}\n" for k in range(30)) + report)
    session = Session(find_runs([str(path)]), MonitorSettings())
    session.look(live=False)
    (run,) = session.state()["runs"]
    assert (run["health"], run["state"], session.worst()) == ("fine", "stopped", "warn")
    session.close()


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(), st.binary().map(lambda raw: raw.decode("utf-8", "replace"))))
def test_no_line_breaks_the_parser(line):
    assert isinstance(LineParser().parse(line), Record | None)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([line for line, _, _ in FORMATS]), st.integers(0, 2**32))
def test_no_damaged_line_breaks_the_parser(line, seed):
    noise = random.Random(seed)
    letters = list(line)
    for _ in range(noise.randrange(1, 6)):
        letters[noise.randrange(len(letters))] = noise.choice("0{}[]\"':=%|.,\x00eE-naif/")
    parser = LineParser()
    for damaged in ("".join(letters), line[: noise.randrange(len(line))]):
        assert isinstance(parser.parse(damaged), Record | None)


WHOLE = '{"step": 13, "time": 1700000013.5, "loss": 1.5, "lr": 0.0003}'


@pytest.mark.parametrize("length", range(3, len(WHOLE), 5))
def test_half_a_line_of_json_is_no_line_and_does_not_spoil_the_next(length):
    half = WHOLE.replace("13", "12")[:length]
    assert LineParser().parse(half) is None
    assert LineParser().parse(half + WHOLE) == LineParser().parse(WHOLE)


def test_losses_by_time_are_read_as_far_as_anybody_would_have_them():
    buckets = ", ".join(["0.5", "null", '"x"'] * 9999)
    lists = LineParser().parse(f'{{"step": 1, "loss": 2.0, "text_loss_by_time": [{buckets}]}}').lists
    assert len(lists["text_loss_by_time"]) == 256
    assert repr(lists["text_loss_by_time"][:4]) == "[0.5, nan, nan, 0.5]"


def test_numbers_that_a_narrow_window_cut_off_are_dropped():
    cut = LineParser().parse("Training:   1%|x| 120/10000 [00:12<17:20,  2.00s/it, loss=2.31, lr=5e-0")
    assert (cut.values["loss"], cut.values.get("lr")) == (2.31, None)


def test_a_date_in_a_line_that_is_no_strict_json_is_no_duration():
    record = LineParser().parse('{"step": 12, "time": 1700000000.5, "loss": nan}')
    assert (record.step, record.time, list(record.values)) == (12, 1700000000.5, ["loss"])


def test_a_follower_lives_through_everything(tmp_path):
    path = tmp_path / "train.log"
    follower = FileFollower(path)
    assert list(follower.lines()) == []  # not there yet
    path.write_text("one\ntwo\rthr")
    assert list(follower.lines()) == ["one", "two"]
    with path.open("a") as file:
        file.write("ee\n")
    assert list(follower.lines()) == ["three"]
    path.write_text("new\n")  # cut off and written anew
    assert list(follower.lines()) == ["new"]
    path.write_text("another\nand longer than before\n")  # the same, and it has grown before anybody looked
    assert list(follower.lines()) == ["another", "and longer than before"]
    with path.open("a") as file:
        file.write("last of the old\n")
    os.rename(path, tmp_path / "train.log.1")
    path.write_text("first of the next\n")
    assert list(follower.lines()) == ["last of the old", "first of the next"]
    path.unlink()
    assert list(follower.lines()) == []
    path.write_text("back\nno end")
    assert list(follower.lines()) == ["back"]
    assert follower.last_words() == "no end"
    follower.close()


def test_a_line_without_end_does_not_fill_the_memory(tmp_path):
    path = tmp_path / "train.log"
    path.write_bytes(b"x" * (3 * LONGEST_LINE) + b"\nafter\n")
    follower = FileFollower(path)
    assert list(follower.lines()) == ["after"]
    follower.close()


def test_paths_mean_runs(tmp_path, monkeypatch):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "training_log.jsonl").touch()
    ranks = tmp_path / "ranks" / "none_x" / "attempt_0"
    for rank in range(2):
        (ranks / str(rank)).mkdir(parents=True)
        (ranks / str(rank) / "stderr.log").touch()
    for name in ("train_a.log", "train_b.log"):
        (tmp_path / name).touch()
    own, logs, first, second, awaited = find_runs(
        [str(tmp_path / name) for name in ("own", "ranks", "train_*.log", "later.log")]
    )
    assert own.folder is not None
    assert [file.rank for file in logs.files] == [0, 1]
    assert (first.name, second.name, awaited.name) == ("train_a", "train_b", "later")
    for folder in ("own", "ranks"):
        monkeypatch.chdir(tmp_path / folder)
        assert [run.name for run in find_runs(["."])] == [folder]


@pytest.mark.parametrize("path", ["no/where/x.log", "nothing_*.log", "empty"])
def test_paths_that_mean_nothing_are_told(tmp_path, path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=path.split("/")[0].replace("*", r"\*")):
        find_runs([str(tmp_path / path)])


def losses_of(text):
    """(step, loss) of every line that has a loss of training."""
    parser = LineParser()
    records = [record for line in text.splitlines() for record in parser.records(line)]
    return [(record.step, record.values["loss"]) for record in records if "loss" in record.values]


def test_a_count_of_batches_beside_the_counter_of_a_run_does_not_move_it():
    line = "INFO:tensorflow:[{:6}] | gnorm  0.27 | loss  {}\nINFO:tensorflow:Train batches[  100] | loss 9.0"
    text = "\n".join(line.format(step, 5.0) for step in (5000, 10000, 15000))
    assert [step for step, _ in losses_of(text)] == [5000, 5000, 10000, 10000, 15000, 15000]


def test_a_table_of_an_error_without_the_word_loss_is_read():
    assert losses_of("iter\tRMSE\n0\t0.28\n1\t0.27") == [(0, 0.28), (1, 0.27)]


def test_the_result_of_an_announced_evaluation_is_no_loss_of_training():
    text = "".join(
        f"epoch: {idx}, loss is: {5 - idx}\ntesting in eval mode\nepoch: {idx}, loss is: 9\n"
        for idx in range(4)
    )
    assert losses_of(text) == [(0, 5.0), (1, 4.0), (2, 3.0), (3, 2.0)]


def test_parts_that_are_printed_for_every_batch_do_not_replace_the_loss():
    epochs = "".join(f"Epoch: {idx} | Train: loss = {6 - idx} | f1 = 0.5\n" for idx in range(5))
    parts = "cut_loss: 5.7 | rerank_loss: 0.4\n" * 100
    assert losses_of(epochs + parts)[-1] == (4, 2.0)


@pytest.mark.parametrize(
    ("head", "line", "last"),
    [
        ("epoch: {epoch}, {done}/100 8.8%, 6.49s per iter, lr: 0.0003, tr: 1.00", "  recon loss: 5.7", 190),
        ("{done}/100 (batches) completed!", "mean loss: 5.7", 190),
    ],
)
def test_a_counter_above_a_block_is_that_of_the_block(head, line, last):
    places = [(epoch, done) for epoch in (1, 2) for done in range(10, 100, 10)]
    text = "\n".join(f"{head.format(epoch=epoch, done=done)}\n{line}" for epoch, done in places)
    assert losses_of(text)[-1][0] == last


def test_adversaries_may_have_several_losses_each():
    text = "(epoch: 1, iters: 100, time: 0.3) D: 0.111, 0.105 | G: 0.146, 0.150 | Cyc: 0.092, 0.037 | "
    assert losses_of(text) == [(100, 0.146)]


def test_a_count_with_its_share_of_the_whole_is_a_step():
    assert losses_of("train--->0m 27s (5000 50%) training loss = 3.5225") == [(5000, 3.5225)]


@pytest.mark.parametrize(
    "line", ["Five pens cost $3, so one pen costs $0.60.", "  name = crf_loss/kernel:0, shape = (768, 10)"]
)
def test_money_and_tensors_are_no_losses(line):
    assert losses_of(f"{line}\n{line}\n{line}") == []


def test_runs_of_which_only_validation_is_logged_are_told_apart():
    parser = LineParser()
    lines = [f"step:{step}/500 val_loss:{9 - step / 100}" for _ in range(3) for step in range(0, 501, 125)]
    assert sum(parser.parse(line).new_run for line in lines) == 2


def test_a_document_whose_training_was_resumed_is_one_run():
    rows = [{"epoch": 0.01 * (step % 1000), "step": step, "loss": 2.0} for step in range(100, 3000, 100)]
    parser = LineParser()
    text = json.dumps({"log_history": rows, "global_step": 2900}, indent=1)
    records = [record for line in text.splitlines() for record in parser.records(line)]
    assert len(records) == len(rows)
    assert not any(record.new_run for record in records)


@pytest.mark.parametrize(("first", "level"), [("Exception in thread Thread-1:", "warn"), ("", "error")])
def test_the_end_of_a_thread_is_not_the_end_of_the_program(tmp_path, first, level):
    lines = [f"step {step}/100 loss {5 - step / 50}" for step in range(1, 101)]
    trace = [
        "Traceback (most recent call last):",
        '  File "queue.py", line 1, in run',
        "OSError: handle is closed",
    ]
    (tmp_path / "train.log").write_text("\n".join([*lines, first, *trace]))
    session = Session(find_runs([str(tmp_path / "train.log")]), MonitorSettings())
    session.look(live=False)
    assert [(alert.code, alert.level) for alert in session.runs[0].panel.book.alerts.values()] == [
        ("M502", level)
    ]
    assert session.runs[0].state() == ("finished" if first else "crashed")


@pytest.mark.parametrize(
    ("marked", "summary"),
    [
        ("Epoch: [{}/9] Iter:[5/10], Loss: 2.5", "Loss: 9.0, MeanIU: 0.7"),
        ("solver.cpp:228] Iteration {}, loss = 2.5", "    Train net output #3: loss = 9.0 (* 1 = 9.0 loss)"),
    ],
)
def test_a_loss_without_the_step_that_others_have_sums_up(marked, summary):
    text = "\n".join(f"{marked.format(step)}\n{summary}" for step in range(9))
    assert [loss for _, loss in losses_of(text)][5:] == [2.5] * (len(losses_of(text)) - 5)


def test_the_errors_of_a_fit_without_steps_are_no_curve():
    assert losses_of("Analysis of the fit\n    MAE =   0.0031\n    RMSE =   0.0041\n    MAE =   0.0029") == []


def test_the_score_at_an_iteration_is_the_loss():
    assert losses_of("[main] INFO Listener - Score at iteration 78700 is 0.985") == [(78700, 0.985)]


def test_the_columns_of_a_detector_are_losses_and_its_settings_are_none():
    lines = [
        "hyperparameters: lr0=0.01, warmup_epochs=3.0, cls=0.5, loss_ota=1",
        "train: Scanning 'labels' images and labels...: 100%|####| 595/595 [00:00<00:00, 1758.01it/s]",
        "  Epoch  gpu_mem      box     obj   cls   total  labels  img_size",
        "  0/299     2.1G  0.07599  0.0377     0  0.1137     168       640:  50%|## | 1/2 [00:03<00:02, 3.9s/it]",
    ]
    assert losses_of("\n".join(lines)) == [(1, 0.1137)]


@pytest.mark.parametrize(("start", "num_runs"), [("Starting training from iteration 0", 3), ("", 2)])
def test_a_run_that_is_announced_may_be_short(start, num_runs):
    parser = LineParser()
    lines = [
        line for _ in range(3) for line in (start, "iter: 19  total_loss: 5.4", "iter: 39  total_loss: 4.8")
    ]
    assert 1 + sum(record.new_run for line in lines for record in parser.records(line)) == num_runs


@pytest.mark.parametrize(("epoch", "num_runs", "step"), [(0, 2, 30), (2, 1, 230)])
def test_a_counter_that_falls_back_in_its_epoch_is_another_run_or_a_rollback(epoch, num_runs, step):
    parser = LineParser()
    places = [(idx, done) for idx in range(epoch + 1) for done in range(0, 100, 10)][:-3]
    places += [(epoch, done) for done in (0, 10, 20, 30)]
    records = [parser.parse(f"Epoch: [{idx}][{done}/100] Loss 2.5 (2.6)") for idx, done in places]
    assert (1 + sum(record.new_run for record in records), records[-1].step) == (num_runs, step)


def test_runs_are_told_apart_by_epochs_above_bars_that_show_no_loss():
    parser = LineParser()
    epoch = [
        "  0%|   | 0/6 [00:00<?, ?it/s]",
        "100%|###| 6/6 [00:04<00:00,  4.4s/it]",
        "Loss:  157.1",
        "Evaluating...",
    ]
    lines = [line for _ in range(3) for idx in range(4) for line in (f"Epoch {idx}", *epoch)]
    assert sum(record.new_run for line in lines for record in parser.records(line)) == 2


def test_time_since_the_start_of_an_epoch_is_not_that_of_a_step():
    lines = [
        f"Epoch: {epoch} | Batch: {batch}/100 | Loss: 4.6 | Time: {2.9 * batch / 10:.1f}s"
        for epoch in range(5)
        for batch in range(10, 110, 10)
    ]
    parser = LineParser()
    assert not any("step_seconds" in parser.parse(line).values for line in lines)


def test_a_log_of_which_only_validation_is_logged_by_epochs_has_steps():
    parser = LineParser()
    records = [parser.parse(f'log: {{"epoch": {idx}, "valid_xe_loss": {5 - idx}}}') for idx in range(1, 4)]
    assert (records[-1].step, records[-1].values["valid_loss"]) == (3, 2.0)


def test_a_bar_that_has_not_begun_says_nothing_about_the_line_behind_it():
    line = "Validation: |          | 0/? [00:00<?, ?it/s]INFO  Epoch 499: v_loss 2.1e+00  loss 3.0e-01"
    assert losses_of(line)[0][1] == 0.3


def test_the_summary_of_a_model_has_no_losses():
    row = "4 | latent_loss_fn         | SmoothL1Loss      | 0     \n"
    assert losses_of(3 * row) == []
