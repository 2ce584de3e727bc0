"""Where runs begin and end, which loss is the main one, what a name means."""

import json
import math
import struct

import pytest
from runwatch.errors import UserError
from runwatch.names import Names, parse_mapping
from runwatch.parser import LineParser
from runwatch.session import Session
from runwatch.settings import MonitorSettings
from runwatch.sources import find_runs
from runwatch.svg import curve_svg
from runwatch.tfevents import EventFollower

ROLES = {
    "train/CrossEntropyLoss": "loss", "loss/train/total": "loss", "val_loss": "valid_loss", "eval/loss": "valid_loss",
    "lm loss": "loss", "loss scale": None, "best_val_loss": None, "aux_loss_weight": None, "global_step": "step",
    "max_steps": "total_steps", "elapsed time per iteration (ms)": "step_seconds", "it/s": "steps_per_second",
    "Tokens/s/device": "tokens_per_second", "samples_per_second": "documents_per_second", "lr-AdamW": "lr",
    "lr_scheduler_gamma": None,
    "optim/total_grad_norm": "grad_norm", "grad_accum_steps": None, "max_mem": "gpu_memory_allocated", "cpu_mem": None,
    "train-rmse": "loss", "training's l2": "loss", "number of skipped iterations": "skipped_steps",
    "l_pix": "loss", "l_g_total": "loss", "l_rate": None, "G_L1": "loss", "action_l2": None,
    "eval_steps": None, "eval step": "step", "N_BATCH": None, "num_batches": None, "Batch num": "step",
    "D_A": "loss", "G_B": "loss", "cycle_A": "loss", "idt_B": "loss", "errD": "loss", "D_real": "loss",
    "loss_G": "loss",
    "Loss/scores/fake": None, "Loss/signs/real": None, "Loss/G/loss": "loss", "score matching loss": "loss",
    "D(x)": None, "D(G(z))": None, "D": None, "total/steps": "step", "time/total timesteps": "step",
    "total_steps": "total_steps", "time/time_elapsed": None, "Time cost": "plain_seconds",
}  # fmt: skip


@pytest.mark.parametrize("key", ROLES)
def test_what_a_name_means(key):
    name = Names().of(key)
    assert (name and name.role) == ROLES[key]


def runs_of(path, **more):
    session = Session(find_runs([str(path)]), MonitorSettings(), **more)
    session.look(live=False)
    session.close()
    return session.state()["runs"]


def steps(first, last):
    return "".join(f"step {step} loss {2 + 1 / (step + 1):.4f}\n" for step in range(first, last))


@pytest.mark.parametrize(
    ("text", "last_steps"),
    [
        (steps(0, 50) + steps(0, 30), [49, 29]),  # appended
        (steps(0, 50) + steps(40, 60), [59]),  # a rollback
        ("".join(f"Epoch {epoch} loss: {1 / epoch}\n" for epoch in [*range(1, 9), *range(1, 5)]), [8, 4]),
        ("".join(f"Epoch {e + 1}/3 [{k}/100] loss: 0.5\n" for e in range(3) for k in range(0, 101, 10)), [300]),
        ("".join(f"{k}%|x| {k}/99 [00:01<00:02, 9it/s, loss=0.5{k}]\n" for _ in "ab" for k in range(1, 100)), [198]),
    ],
)  # fmt: skip
def test_where_a_run_begins(tmp_path, text, last_steps):
    path = tmp_path / "train.log"
    path.write_text(text)
    assert [run["step"] for run in runs_of(path)] == last_steps


def test_a_folder_of_run_folders_and_logs(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.jsonl").touch()
    (tmp_path / "notes").mkdir()
    (tmp_path / "three.log").write_text(steps(1, 3))
    assert [source.name for source in find_runs([str(tmp_path)])] == ["one", "two", "three"]


def test_the_engine_counts_steps_beside_a_loop_that_counts_epochs(tmp_path):
    lines = []
    for step in range(10, 400, 10):
        lines += [
            f"Epoch {step // 20}, Loss: {1 - step / 1000:.3f}",
            f"[2026-01-01 10:00:00,100] [INFO] [Rank 0] step={step}, skipped={step}, lr=[1e-05], mom=[(0.9, 0.99)]",
            f"[2026-01-01 10:00:00,101] [INFO] epoch=0/micro_step={step}/global_step={step}, SamplesPerSec=0.6",
        ]
    path = tmp_path / "train.log"
    path.write_text("\n".join(lines))
    (run,) = runs_of(path)
    assert run["step"] == 390
    assert {alert["code"] for alert in run["alerts"]} == {"M205"}  # every update was skipped


def test_a_counter_that_no_loss_stands_beside_moves_no_step(tmp_path):
    lines = []
    for epoch in range(12):
        lines += [f"Epoch[{epoch}] Batch [{batch}]\tTrain-SmoothL1={9 - epoch / 2}" for batch in (20, 40, 60)]
        lines += [
            f"Update[{epoch * 700 + 1}]: Change learning rate to 1.0e-04",
            'Saved checkpoint to "m.params"',
        ]
    path = tmp_path / "train.log"
    path.write_text("\n".join(lines))
    (run,) = runs_of(path)
    assert (run["step"], run["alerts"]) == (12 * 60, [])


READING = "".join(f"\r{n}%|#| {50 * n}/5000 [00:01<00:02, 98.0it/s]" for n in range(1, 101)) + "\n"
ANCHORS = (
    "".join(f"\ranchors, fitness 0.7: {n}%|#| {n}0/1000 [00:01<00:02, 9it/s]" for n in range(101)) + "\n"
)
BARS = "".join(f"\r{n}%|#| {n}/50 [00:01<00:02, 9it/s, loss=1.{n}]" for _ in "ab" for n in range(1, 51))


@pytest.mark.parametrize(
    ("text", "step", "counts"),
    [
        (READING + "".join(f"Epoch {n}: train loss {2 / n:.4f}\n" for n in range(1, 21)), 20, "epochs"),
        (READING + "".join(f"train loss = {2 / n:.4f}\n" for n in range(1, 21)), 18, "steps"),
        (ANCHORS + BARS, 100, "steps"),
    ],
)
def test_a_bar_before_the_training_counts_no_steps_of_it(tmp_path, text, step, counts):
    (tmp_path / "train.log").write_text(text)
    (run,) = runs_of(tmp_path / "train.log")
    assert (run["step"], run["counts"], run["total_steps"]) == (step, counts, None)
    assert run["state"] != "finished"
    assert counts == "steps" or "rate" not in run["values"]


def bars_of(epochs, last):
    return "".join(
        f"\rEpoch {epoch}/{last}: {n}%|#| {n}/50 [00:01<00:02, 9it/s, loss=1.{n}]"
        for epoch in epochs
        for n in range(1, 51)
    )


@pytest.mark.parametrize(
    ("text", "step", "total"),
    [
        (bars_of(range(2), 1), 100, 100),  # counted from 0, and the last is the total
        (bars_of(range(9), 10), 450, 500),
        (bars_of([1, 2, 5, 6], 6), 300, 300),  # two epochs were left out
    ],
)
def test_bars_stand_where_their_epoch_says(tmp_path, text, step, total):
    (tmp_path / "train.log").write_text(text)
    (run,) = runs_of(tmp_path / "train.log")
    assert (run["step"], run["total_steps"]) == (step, total)


def test_a_number_may_stand_before_the_word_epoch():
    line = "INFO: 3-epoch (100/4400): total loss 2.25, part: 1.5, lr 1.0e-04"
    parser = LineParser()
    parser.parse(line)
    assert (parser.stepper.epoch, parser.stepper.inner, parser.stepper.inner_total) == (3, 100, 4400)


@pytest.mark.parametrize(
    ("line", "is_over"),
    [
        ("Finished Training", True),
        ("INFO: Finish training: the best accuracy is 0.8", True),
        ("Finished training epoch 3", False),
    ],
)
def test_words_that_end_a_training(line, is_over):
    record = LineParser().parse(line)
    assert (record is not None and record.event == "finished") == is_over


@pytest.mark.parametrize("score", ["eval = 0.9", "val: 0.9", "test 0.9", "val acc: 0.9", "val loss: 0.9"])
def test_a_score_of_validation_at_the_end_leaves_the_loss_one_of_training(score):
    records = [
        LineParser().parse(f"Epoch 3 loss: 0.5, {score}"),
        LineParser().parse(f"iter 9 loss = 0.5 {score}"),
    ]
    assert [record.values["loss"] for record in records] == [0.5, 0.5]
    assert {record.values.get("valid_loss") for record in records} == {0.9 if "loss" in score else None}


def test_names_of_columns_may_hold_numbers():
    parser = LineParser()
    parser.parse("agent acc,loss,max 100 episode reward")
    assert parser.parse("0.5,1.25,34").values["loss"] == 1.25


def test_a_length_is_no_loss():
    assert Names().of("LLen") is None


def test_two_programs_that_write_into_one_file_are_not_a_hundred_runs(tmp_path):
    lines = [
        f"(epoch: {epoch}, iters: {iters}, time: 0.1) G_L1: {3 - epoch / 50}, D_real: 0.4"
        for iters in range(100, 5000, 100)
        for epoch in (4 + iters // 2000, 12 + iters // 2000)
    ]
    path = tmp_path / "train.log"
    path.write_text("\n".join(lines))
    assert len(runs_of(path)) < 6


def test_lines_of_an_announced_evaluation_are_one_validation():
    parser, records = LineParser(), []
    for epoch in range(2):
        lines = [f"Epoch {epoch + 1}/2", *(f"step {k}/60 - loss: 0.5" for k in range(10, 61, 10))]
        lines += [
            "Eval begin...",
            *(f"step {k}/20 - loss: 0.{k}" for k in range(5, 21, 5)),
            "Eval samples: 640",
        ]
        records += [record for line in lines for record in parser.records(line)]
    assert [record.values["valid_loss"] for record in records if "valid_loss" in record.values] == [0.2, 0.2]
    assert (parser.last_step, parser.total) == (120, 120)


def test_the_time_of_an_epoch_and_the_number_of_an_error_are_no_losses():
    parser = LineParser()
    assert (
        parser.parse("Epoch[3] Batch [20] Speed: 140.1 samples/sec accuracy=0.9").values.get("loss") is None
    )
    for line in (
        "INFO:root:Epoch[3] Time cost=140.990",
        "CheckFail file=/src/a.cpp line=28 error=71 : asserted",
    ):
        record = parser.parse(line)
        assert record is None or "loss" not in record.values


def test_a_step_alone_on_its_line_is_that_of_the_next():
    parser = LineParser()
    for line in ("current step: 7th step", "batch loss:0.52", "current step: 8th step"):
        parser.parse(line)
    record = parser.parse("batch loss:0.51")
    assert (record.step, record.values["loss"]) == (8, 0.51)


def test_settings_printed_as_a_dictionary_tell_no_step():
    parser = LineParser()
    parser.parse("{'model': 'tiny', 'eval_steps': 500, 'batch_size': 16, 'learning_rate': 1e-05}")
    losses = [
        parser.parse(f"{{'loss': {2 - k / 10}, 'learning_rate': 1e-05, 'epoch': 0.1}}") for k in range(5)
    ]
    assert [record.step for record in losses] == [1, 2, 3, 4, 5]


def test_the_objective_of_a_policy_comes_before_its_entropy():
    values = LineParser().parse("iter=3 loss_critic=618.8 loss_entropy=0.02 loss_objective=-0.01").values
    assert values["loss"] == -0.01


def test_episodes_counted_in_thousands_are_no_epochs(tmp_path):
    lines = [
        f"step:{k}K smpl:{32 * k}K ep:{'1K' if k > 9 else 99 * k} loss:{2 - k / 20} lr:1e-5"
        for k in range(1, 20)
    ]
    path = tmp_path / "train.log"
    path.write_text("\n".join(lines))
    assert [run["step"] for run in runs_of(path)] == [19_000]


def test_lines_of_json_without_a_loss_tell_their_names(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(json.dumps({"step": k, "train/return": k - 50.0, "episodes": k}) + "\n" for k in range(9))
    )
    (run,) = runs_of(path)
    assert run["unread"]["names"] == ["step", "train/return", "episodes"]


def test_a_column_without_a_loss_can_be_named(tmp_path):
    path = tmp_path / "progress.csv"
    path.write_text(
        "episode,episode_reward,steps_done\n" + "".join(f"{k},{50 + k},{k * 9}\n" for k in range(30))
    )
    (unread,) = runs_of(path)
    assert unread["health"] == "cannot judge"
    assert unread["unread"]["names"] == ["episode", "episode_reward", "steps_done"]
    (run,) = runs_of(path, mapped=parse_mapping(["loss=episode_reward", "step=steps_done"]))
    assert (run["step"], run["values"]["loss"]) == (261, 79)


def test_a_mean_that_closes_an_epoch_is_no_point_of_the_curve():
    parser = LineParser()
    for step in range(1, 20):
        parser.parse(f"step {step} loss {2.0 - step / 100}")
    assert parser.parse("Epoch 1 average train loss: 9.5") is None
    assert math.isnan(parser.parse("step 20 loss nan").values["loss"])


def test_a_log_without_a_loss_cannot_be_judged_until_its_numbers_are_named(tmp_path, call):
    path = tmp_path / "odd.log"
    path.write_text("".join(f"it {it} fooness {2 - it / 1000}\n" for it in range(0, 200, 10)))
    done = call("--once", path)
    assert done.exit_code == 3
    assert "it 0 fooness 2.0" in done.stdout
    assert "--map loss=NAME" in done.stdout
    named = call("--once", path, "--map", "loss=fooness", "--map", "step=it")
    assert (named.exit_code, "odd: fine" in named.stdout, "step 190" in named.stdout) == (0, True, True)
    for wrong in ("loss", "colour=red", "loss="):
        with pytest.raises(UserError, match="--map"):
            parse_mapping([wrong])


def test_several_logs_of_a_folder_are_several_runs_and_both_streams_of_a_job_are_one(tmp_path):
    for name in ("a.log", "b.csv", "job.out", "job.err"):
        (tmp_path / name).write_text("step,loss\n1,2.0\n2,1.9\n3,1.8\n" if name == "b.csv" else steps(0, 9))
    assert sorted((run["name"], run["step"]) for run in runs_of(tmp_path)) == [("a", 8), ("b", 3), ("job", 8)]


def varint(value):
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def block(number, content):
    return varint(number << 3 | 2) + varint(len(content)) + content


def test_scalars_of_tensorboard_are_read_as_they_are_appended(tmp_path):
    path = tmp_path / "events.out.tfevents.1.host"
    follower = EventFollower(path)
    for step, loss in ((1, 2.5), (2, math.nan)):
        value = block(1, b"train/loss") + varint(2 << 3 | 5) + struct.pack("<f", loss)
        event = (
            varint(1 << 3 | 1)
            + struct.pack("<d", 1.7e9)
            + varint(2 << 3)
            + varint(step)
            + block(5, block(1, value))
        )
        with path.open("ab") as file:
            file.write(struct.pack("<Q", len(event)) + b"crc." + event + b"crc.")
        (line,) = follower.lines()
        assert json.loads(line)["step"] == step
        assert LineParser().parse(line).values["loss"] == pytest.approx(loss, nan_ok=True)
    path.write_bytes(path.read_bytes() + b"\x10")
    assert list(follower.lines()) == []  # half an event


def test_a_diverged_curve_does_not_flatten_the_others_and_nan_has_a_cross():
    good = {"steps": [1, 2, 3], "values": [3.0, 2.0, 1.0]}
    bad = {"steps": [1, 2, 3], "values": [3.0, 9e6, None]}
    both = curve_svg("loss", [good, bad])
    assert "log scale" in both
    assert both.count('class="ended"') == 1
    alone = curve_svg("loss", [good])
    assert "log scale" not in alone
    assert 'class="ended"' not in alone
