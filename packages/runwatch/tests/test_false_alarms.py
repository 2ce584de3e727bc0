"""Sound trainings of many shapes, which must raise no alarm, and the same with a fault, which must.

python -m tests.test_false_alarms OFFSET     # other seeds than the test's, a table for each shape
"""

import json
import math
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from .formats.judge import ask

Shape = Callable[[random.Random, int], list[float]]
Harm = Callable[[list[float]], list[float]]
NUM_LINES = 400
NUM_SEEDS = 4
SHAPES: dict[str, Shape] = {}


def shape(function: Shape) -> Shape:
    SHAPES[function.__name__] = function
    return function


def fall(share: float, start: float, floor: float, speed: float = 5.0) -> float:
    return floor + (start - floor) * math.exp(-speed * share)


@shape
def smooth(noise: random.Random, num: int) -> list[float]:
    return [fall(idx / num, 10.8, 3.1) + noise.gauss(0, 0.03) for idx in range(num)]


@shape
def single_batches(noise: random.Random, num: int) -> list[float]:
    """Loss of one small batch at a time: log-normal noise, as in diffusion or fine-tuning."""
    return [fall(idx / num, 0.4, 0.12) * math.exp(noise.gauss(0, 0.5)) for idx in range(num)]


@shape
def rare_hard_batches(noise: random.Random, num: int) -> list[float]:
    values = [fall(idx / num, 4.0, 1.2) + noise.gauss(0, 0.08) for idx in range(num)]
    return [value * 1.6 if noise.random() < 0.02 else value for value in values]


@shape
def warm_restarts(noise: random.Random, num: int) -> list[float]:
    """The learning rate jumps up four times; the loss rises a little each time and falls further."""
    return [
        fall(idx / num, 3.0, 1.0, 3) + 0.15 * (1 - idx % 100 / 100) ** 3 + noise.gauss(0, 0.02)
        for idx in range(num)
    ]


@shape
def late_drop(noise: random.Random, num: int) -> list[float]:
    """Nothing happens for a third of the run, then the model finds the task."""
    return [
        0.69 - 0.6 / (1 + math.exp(-(idx / num - 0.45) * 40)) + noise.gauss(0, 0.01) for idx in range(num)
    ]


@shape
def memorised(noise: random.Random, num: int) -> list[float]:
    """Down to 0.0003, where a batch that was not memorised stands out."""
    values = [3.0 * math.exp(-9.0 * idx / num) * math.exp(noise.gauss(0, 0.6)) for idx in range(num)]
    return [value + 0.05 * noise.random() if noise.random() < 0.05 else value for value in values]


@shape
def negative(noise: random.Random, num: int) -> list[float]:
    """A Dice loss, or a bound that falls below zero."""
    return [fall(idx / num, 0.3, -0.86, 6) + noise.gauss(0, 0.015) for idx in range(num)]


@shape
def around_zero(noise: random.Random, num: int) -> list[float]:
    """A policy loss: small, of either sign, often exactly 0."""
    return [0.0 if noise.random() < 0.15 else noise.gauss(0, 0.003) for idx in range(num)]


@shape
def huge_values(noise: random.Random, num: int) -> list[float]:
    return [fall(idx / num, 3.1e6, 2.2e5) * math.exp(noise.gauss(0, 0.05)) for idx in range(num)]


@shape
def tiny_values(noise: random.Random, num: int) -> list[float]:
    return [fall(idx / num, 4.1e-4, 2.2e-6, 7) * math.exp(noise.gauss(0, 0.1)) for idx in range(num)]


@shape
def adversaries(noise: random.Random, num: int) -> list[float]:
    """A generator's loss: it swings and does not fall."""
    return [3.3 + 0.6 * math.sin(idx / 23) + noise.gauss(0, 0.35) for idx in range(num)]


@shape
def flat(noise: random.Random, num: int) -> list[float]:
    """Fine-tuning that has nothing left to learn."""
    return [1.21 + noise.gauss(0, 0.06) for idx in range(num)]


@shape
def slow_climb_back(noise: random.Random, num: int) -> list[float]:
    """The loss rises by 8 % after its best, as with a harder part of the data."""
    return [
        fall(idx / num, 9.0, 2.5, 9) * (1 + 0.08 * max(0.0, idx / num - 0.5)) + noise.gauss(0, 0.03)
        for idx in range(num)
    ]


def write(losses: list[float], form: str, folder: Path) -> Path:
    path = folder / {"text": "train.log", "json": "log.jsonl", "csv": "metrics.csv"}[form]
    if form == "text":
        rows = [
            f"step {idx}/{len(losses)} | loss {loss:.6g} | lr 3.0e-04" for idx, loss in enumerate(losses, 1)
        ]
    elif form == "json":
        rows = [json.dumps({"step": idx, "train/loss": loss}) for idx, loss in enumerate(losses, 1)]
    else:
        rows = ["step,loss", *(f"{idx},{loss}" for idx, loss in enumerate(losses, 1))]
    path.write_text("\n".join(rows) + "\n")
    return path


def judged(
    name: str, seed: int, form: str, folder: Path, harm: Callable[[list[float]], list[float]] = list
) -> list[dict]:
    noise = random.Random(f"{name}/{seed}")
    _, answer = ask(write(harm(SHAPES[name](noise, NUM_LINES)), form, folder))
    return [alert for run in answer["runs"] for alert in run["alerts"] if alert["level"] != "info"]


def forms(seed: int) -> str:
    return ("text", "json", "csv")[seed % 3]


@pytest.mark.parametrize("name", SHAPES)
def test_a_sound_training_raises_no_error(name, tmp_path):
    errors = [
        alert
        for seed in range(NUM_SEEDS)
        for alert in judged(name, seed, forms(seed), tmp_path)
        if alert["level"] == "error"
    ]
    assert not errors, [(alert["code"], alert["evidence"]) for alert in errors]


def test_warnings_are_rare(tmp_path):
    warned = {
        (name, seed): [(alert["code"], alert["evidence"]) for alert in alerts]
        for name in SHAPES
        for seed in range(NUM_SEEDS)
        if (alerts := judged(name, seed, forms(seed), tmp_path))
    }
    assert len(warned) <= 0.1 * len(SHAPES) * NUM_SEEDS, warned


def diverge(losses: list[float]) -> list[float]:
    """From two thirds on the loss leaves its range upwards and stays there."""
    start, top = 2 * len(losses) // 3, max(losses)
    size = max(abs(top), max(losses) - min(losses))
    return [loss + 4 * size * min(1.0, max(0, idx - start) / 30) for idx, loss in enumerate(losses)]


def lose(losses: list[float]) -> list[float]:
    return [math.nan if idx > 0.8 * len(losses) else loss for idx, loss in enumerate(losses)]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("harm", "code"), [(diverge, "M103"), (lose, "M101")])
def test_the_same_training_with_a_fault_is_found(name, harm, code, tmp_path):
    for seed in range(2):
        alerts = judged(name, seed, forms(seed), tmp_path, harm)
        assert code in {alert["code"] for alert in alerts if alert["level"] == "error"}, (
            seed,
            [a["code"] for a in alerts],
        )


def main() -> None:
    offset, seeds = int(sys.argv[1]), 12
    print("| shape | runs | errors | warnings | divergence missed | NaN missed |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in SHAPES:
            counts = [0, 0, 0, 0]
            for seed in range(offset, offset + seeds):
                answers = [
                    judged(name, seed, forms(seed), Path(folder), harm) for harm in (list, diverge, lose)
                ]
                levels = [{alert["level"] for alert in alerts} for alerts in answers]
                codes = [
                    {alert["code"] for alert in alerts if alert["level"] == "error"} for alerts in answers
                ]
                wrong = (
                    "error" in levels[0],
                    "warn" in levels[0],
                    "M103" not in codes[1],
                    "M101" not in codes[2],
                )
                counts = [count + each for count, each in zip(counts, wrong, strict=True)]
            print(f"| {name} | {seeds} | " + " | ".join(map(str, counts)) + " |")


if __name__ == "__main__":
    main()
