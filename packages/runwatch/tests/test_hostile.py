"""Files that a monitor meets in the wild, tried from outside: what the command answers, and that it never breaks."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .formats.bars import tqdm_bar
from .formats.judge import CANNOT_JUDGE, ask

COMMAND = [sys.executable, "-c", "from runwatch.cli import main; main()"]
SOURCE = """
import torch

loss_weight = 0.5
for step in range(100):
    loss = 3.5  # loss: 3.5 at step 10
    print(f"step {step} loss {loss:.4f}")
    print("step 10: loss nan")
# iter 100: loss 2.31, time 12.00ms
"""
CONFIG = """
model:
  loss: mse
  loss_weight: 1.0
  aux_loss: 0.01
training:
  learning_rate: 0.001
  max_steps: 1000
  eval_loss_every: 50
"""


def curve(num: int, start: float = 4.0, floor: float = 1.0) -> list[float]:
    noise = random.Random(7)
    return [floor + (start - floor) * 2.7 ** (-5 * idx / num) + noise.gauss(0, 0.02) for idx in range(num)]


def lines(losses: list[float], first: int = 0) -> str:
    return "".join(
        f"iter {first + idx}: loss {loss:.4f}, time 21.30ms, mfu 17.40%\n" for idx, loss in enumerate(losses)
    )


def judged(tmp_path: Path, content: str | bytes, name: str = "train.log") -> tuple[int, dict]:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return ask(path)


def codes(answer: dict) -> set[str]:
    return {
        alert["code"] for run in answer.get("runs", []) for alert in run["alerts"] if alert["level"] != "info"
    }


def last(answer: dict) -> dict:
    return answer["runs"][-1]


# Files that are no logs of a training


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty.log", b""),
        ("blank.log", b"\n\n   \n"),
        ("model.bin", random.Random(1).randbytes(200_000)),
        ("train.py", SOURCE.encode()),
        ("source.log", SOURCE.encode()),
        ("config.yaml", CONFIG.encode()),
        ("config.json", json.dumps({"loss": "mse", "loss_weight": 1.0, "steps": 100, "lr": 0.1}).encode()),
        ("iris.csv", b"sepal_length,sepal_width,species\n" + b"5.1,3.5,setosa\n" * 50),
        ("access.log", b'127.0.0.1 - - [02/Mar/2026:10:15:07 +0000] "GET /loss HTTP/1.1" 200 512\n' * 50),
        ("poem.txt", b"The loss of 3 ships, the step 4 miles long, the loss: grief.\n" * 5),
        ("only_names.log", b"starting\nloading data\ntraining started\nsaving\n"),
    ],
    ids=lambda value: value if isinstance(value, str) else "content",
)
def test_what_is_no_training_log_cannot_be_judged(tmp_path, name, content):
    code, answer = judged(tmp_path, content, name)
    assert code == CANNOT_JUDGE, (code, codes(answer), [run.get("values") for run in answer.get("runs", [])])


def test_a_data_set_with_a_column_of_losses_raises_no_alarm(tmp_path):
    rows = random.Random(3)
    content = "symboling,normalized-losses,make,price\n"
    content += "".join(
        f"{rows.randrange(3)},{rows.choice(['?', '164', '65', '256'])},audi,13950\n" for _ in range(200)
    )
    code, answer = judged(tmp_path, content, "autos.csv")
    assert code != 1, codes(answer)


def test_a_missing_file_and_an_empty_folder_are_said_in_a_line(tmp_path):
    for path in (tmp_path / "missing" / "train.log", tmp_path):
        result = subprocess.run([*COMMAND, str(path), "--once"], capture_output=True, text=True, timeout=200)
        assert result.returncode in (2, 3)
        assert "Traceback" not in result.stderr


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_named_pipe_does_not_hang_the_command(tmp_path):
    os.mkfifo(tmp_path / "train.log")
    result = subprocess.run(
        [*COMMAND, str(tmp_path / "train.log"), "--once"], capture_output=True, text=True, timeout=200
    )
    assert result.returncode in (2, 3)
    assert "Traceback" not in result.stderr


# A loss that is not finite is never called fine


@pytest.mark.parametrize(
    "bad",
    [
        "iter 100: loss nan, time 21.30ms",
        "iter 100: loss NaN, time 21.30ms",
        "iter 100: loss -nan, time 21.30ms",
        "iter 100: loss inf, time 21.30ms",
        "iter 100: loss -inf, time 21.30ms",
        "iter 100: loss Infinity, time 21.30ms",
        "iter 100: loss -nan(ind), time 21.30ms",
        "iter 100: loss 1.#QNAN, time 21.30ms",
        "iter 100: loss tensor(nan, device='cuda:0'), time 21.30ms",
        "iter 100: loss [nan], time 21.30ms",
        "iter 100: loss \x1b[31mnan\x1b[0m, time 21.30ms",
        "Loss is nan, stopping training",
        "RuntimeError: Function 'MulBackward0' returned nan values in its 0th output.",
        "FloatingPointError: Loss became infinite or NaN at iteration=100!",
    ],
)
def test_a_nonfinite_loss_is_found(tmp_path, bad):
    code, answer = judged(tmp_path, lines(curve(100)) + bad + "\n")
    assert code == 1, codes(answer)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("log.jsonl", "".join(f'{{"step": {step}, "loss": NaN}}\n' for step in range(30))),
        (
            "null.jsonl",
            "".join(json.dumps({"step": step, "train/loss": None, "lr": 0.1}) + "\n" for step in range(30)),
        ),
        ("text.jsonl", "".join(f'{{"step": {step}, "loss": "nan"}}\n' for step in range(30))),
        ("metrics.csv", "epoch,loss,val_loss\n" + "".join(f"{step},nan,nan\n" for step in range(30))),
        ("keys.log", "".join(f"epoch={step} train_loss=nan val_loss=0.3\n" for step in range(30))),
        ("bar.log", "".join("\r" + tqdm_bar(step, 30, step, 1.0, "", "loss=nan") for step in range(30))),
        ("no_step.log", "loss: nan\n" * 30),
        ("upper.log", "".join(f"[Epoch {step}] TOTAL LOSS = NAN\n" for step in range(30))),
    ],
)
def test_a_run_of_nothing_but_nan_is_never_fine(tmp_path, name, content):
    code, answer = judged(tmp_path, content, name)
    assert code in (1, CANNOT_JUDGE), last(answer)["values"]
    if name != "null.jsonl":  # null may also be a value that was not measured
        assert code == 1, last(answer)["values"]


def test_nan_that_went_away_still_counts(tmp_path):
    losses = curve(300)
    content = (
        lines(losses[:150]) + "iter 150: loss nan, time 21.30ms, mfu 17.40%\n" + lines(losses[151:], 151)
    )
    assert judged(tmp_path, content)[0] == 1


def test_an_accuracy_or_a_perplexity_that_overflows_is_no_bad_loss(tmp_path):
    content = "".join(f"step {idx} loss {loss:.4f} acc nan ppl inf\n" for idx, loss in enumerate(curve(100)))
    code, answer = judged(tmp_path, content)
    assert code == 0, codes(answer)


# Encodings, control sequences, torn lines


def test_control_sequences_are_stripped(tmp_path):
    link = "\x1b]8;;https://example.org/run?loss=99\x1b\\run\x1b]8;;\x1b\\"
    content = "\x1b]0;training: loss 7 step 9\x07"
    for idx, loss in enumerate(curve(120)):
        content += f"\x1b[2K\x1b[1;32m{link} \x1b[38;2;1;2;3mstep\x1b[0m {idx}\x1b[K | "
        content += f"loss\x1b[0m \x1b[1m{loss:.4f}\x1b[0m\x1b]0;title {idx}\x07\n"
    code, answer = judged(tmp_path, content)
    assert code == 0, codes(answer)
    assert last(answer)["step"] == 119
    assert float(last(answer)["values"]["loss"]) == pytest.approx(curve(120)[-1], rel=0.01)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig", "latin-1"])
def test_other_encodings(tmp_path, encoding):
    good = ("Lernrate für das Training\n" + lines(curve(120))).encode(encoding)
    code, answer = judged(tmp_path, good)
    assert code == 0, codes(answer)
    assert last(answer)["step"] == 119
    bad = ("Lernrate für das Training\n" + lines(curve(120)) + "iter 120: loss nan, time 21.30ms\n").encode(
        encoding
    )
    assert judged(tmp_path, bad)[0] == 1


@pytest.mark.parametrize(
    "prefix",
    [
        "2026-03-02T10:15:07.123456789Z ",
        "[default0]:",
        "0: ",
        "(TrainTrainable pid=4123) ",
        "[1,0]<stdout>:",
        "[rank0]: ",
        "| ",
    ],
)
def test_prefixes_of_launchers_and_containers(tmp_path, prefix):
    """docker logs -t, torchrun, srun -l, Ray, mpirun, torchtitan and boxes put something before each line."""
    content = "".join(prefix + line + "\n" for line in lines(curve(120)).splitlines())
    code, answer = judged(tmp_path, content)
    assert code == 0, codes(answer)
    assert last(answer)["step"] == 119
    assert judged(tmp_path, content + prefix + "iter 120: loss nan, time 21.30ms, mfu 17.40%\n")[0] == 1


def test_a_hole_that_truncation_left_at_the_start(tmp_path):
    """A writer that keeps its position after a truncation leaves NUL bytes before what it writes next."""
    code, answer = judged(tmp_path, b"\x00" * 11_000 + lines(curve(120), 700).encode())
    assert code == 0, codes(answer)
    assert last(answer)["step"] == 819


def test_windows_line_ends(tmp_path):
    code, answer = judged(tmp_path, lines(curve(120)).replace("\n", "\r\n"))
    assert code == 0, codes(answer)
    assert last(answer)["step"] == 119


def test_half_a_line_at_the_end(tmp_path):
    code, answer = judged(tmp_path, lines(curve(120)) + "iter 120: loss 1")
    assert code == 0, codes(answer)
    assert last(answer)["step"] in (119, 120)
    assert float(last(answer)["values"]["loss"]) > 0.9


def test_a_bar_that_the_terminal_cut_off_gives_no_number(tmp_path):
    bars = [
        tqdm_bar(idx, 200, idx, 1.0, "train", f"acc=0.71, loss={loss:.4f}")
        for idx, loss in enumerate(curve(150), 1)
    ]
    cut = [bar[: bar.rindex(".") + 1] for bar in bars]  # "... loss=1." and no bracket
    code, answer = judged(tmp_path, "\r" + "\r".join(bars[:100] + cut[100:]))
    assert code == 0, codes(answer)
    assert float(last(answer)["values"]["loss"]) == pytest.approx(curve(150)[99], rel=0.02)


def test_a_line_of_ten_megabytes(tmp_path):
    began = time.process_time()
    code, answer = judged(
        tmp_path, lines(curve(60)) + "x" * 10_000_000 + "\n" + lines(curve(60)[-1:] * 60, 60)
    )
    assert time.process_time() - began < 60
    assert code == 0, codes(answer)
    assert last(answer)["step"] == 119


# Shapes of runs


def test_runs_appended_to_one_file_are_judged_apart(tmp_path):
    code, answer = judged(tmp_path, lines(curve(150)) + lines(curve(150)) + lines(curve(80)))
    assert code == 0, codes(answer)
    assert last(answer)["step"] == 79


def test_two_logs_of_a_folder_are_two_runs(tmp_path):
    (tmp_path / "good.log").write_text(lines(curve(120)))
    (tmp_path / "bad.log").write_text(
        lines(curve(120)) + "iter 120: loss nan, time 21.30ms, mfu 17.40%\n" * 3
    )
    code, answer = ask(tmp_path)
    assert code == 1
    assert len(answer["runs"]) == 2
    bad = {Path(run["path"]).name: {alert["code"] for alert in run["alerts"]} for run in answer["runs"]}
    assert "M101" in bad["bad.log"]
    assert "M101" not in bad["good.log"]


def test_epochs_whose_steps_start_again_are_one_run(tmp_path):
    losses = curve(300)
    content = "".join(
        f"Epoch [{idx // 30 + 1}/10], Step [{idx % 30 + 1}/30], Loss: {loss:.4f}\n"
        for idx, loss in enumerate(losses)
    )
    code, answer = judged(tmp_path, content)
    assert code == 0, codes(answer)
    assert len(answer["runs"]) == 1


def test_a_closing_mean_is_no_spike(tmp_path):
    content = lines(curve(300, start=9.0, floor=0.2)) + "Training finished. mean loss: 4.1, best loss: 0.19\n"
    code, answer = judged(tmp_path, content)
    assert code == 0
    assert not codes(answer)


def test_a_loss_of_exactly_zero_for_good_is_seen(tmp_path):
    _, answer = judged(tmp_path, lines(curve(200)) + lines([0.0] * 100, 200))
    assert codes(answer), "a training whose loss becomes 0 at once and stays there is broken"


def test_a_validation_that_diverges_is_seen(tmp_path):
    valid = [*curve(30, 4.0, 1.5), *(1.5 + 0.8 * idx for idx in range(20))]
    content = "".join(
        f"Epoch {idx + 1}/50 - train_loss: {loss:.4f} - val_loss: {other:.4f}\n"
        for idx, (loss, other) in enumerate(zip(curve(50), valid, strict=True))
    )
    _, answer = judged(tmp_path, content)
    assert codes(answer) & {"M103", "M801"}, codes(answer)


def test_a_rate_that_falls_to_a_fiftieth_is_seen(tmp_path):
    rates = [50_000.0 + idx % 7 * 100 for idx in range(100)] + [1_000.0 + idx for idx in range(20)]
    content = "".join(
        f"step {idx} | loss {loss:.4f} | tok/s {rate:.0f}\n"
        for idx, (loss, rate) in enumerate(zip(curve(120), rates, strict=True))
    )
    assert "M301" in codes(judged(tmp_path, content)[1])


def test_a_finished_log_of_last_year_is_not_stalled(tmp_path):
    path = tmp_path / "train.log"
    path.write_text(lines(curve(200)))
    year = time.time() - 365 * 86_400
    os.utime(path, (year, year))
    code, answer = ask(path)
    assert code == 0
    assert not codes(answer)


# Speed


@pytest.mark.parametrize(
    ("kind", "count"),
    [("text", 100_000), *((kind, 20_000) for kind in ("json", "bar", "table", "csv", "noise"))],
)
def test_many_lines_are_read_in_little_time(tmp_path, kind, count):
    """100,000 lines take about five seconds; a slow machine has a minute."""
    losses = curve(count)
    if kind == "text":
        content = lines(losses)
    elif kind == "json":
        content = "".join(
            f'{{"step": {idx}, "loss": {loss}, "lr": 0.001}}\n' for idx, loss in enumerate(losses)
        )
    elif kind == "bar":
        content = "".join(
            "\r" + tqdm_bar(idx, count, idx, 9.0, "", f"loss={loss:.4f}") for idx, loss in enumerate(losses)
        )
    elif kind == "table":
        content = "".join(
            f"| loss | {loss:.4f} |\n| step | {idx} |\n---------\n"
            for idx, loss in enumerate(losses[: count // 3])
        )
    elif kind == "csv":
        content = "step,loss,lr\n" + "".join(f"{idx},{loss},0.001\n" for idx, loss in enumerate(losses))
    else:
        content = (
            lines(losses[:100]) + "INFO: worker 3 fetched shard 00017 of 00128 from cache in 12 ms\n" * count
        )
    began = time.process_time()
    code, answer = judged(tmp_path, content, "metrics.csv" if kind == "csv" else "train.log")
    assert time.process_time() - began < 60 * count / 100_000
    assert code == 0, codes(answer)
    assert last(answer)["step"] in {"table": (count // 3 - 1,), "noise": (99,)}.get(kind, (count - 1,))
