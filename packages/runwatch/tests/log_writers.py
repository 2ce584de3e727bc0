"""The same training as seven trainers would log it: a writer gets lines of numbers and leaves a log."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Line = dict[str, Any]
Lines = Iterable[Line | str]
"""Numbers, or a text that the trainer prints between them (a message, a traceback)."""


def _stamp(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S,%f")[:-3]


def _bar(step: int, total: int, seconds: float) -> str:
    drawn = "█" * (10 * step // total)
    return f"{100 * step // total:3d}%|{drawn:<10}| {step}/{total} [00:10<01:00, {1 / seconds:5.2f}it/s"


def write_own(path: Path, lines: Lines, total: int) -> Path:
    """Ours: a run folder; texts are events, as JSON."""
    path.mkdir(parents=True)
    hidden = ("step_seconds",)
    (path / "config.yaml").write_text(f"train: {{steps: {total}, checkpoint_every: {10 * total}}}\n")
    log, events = (path / "training_log.jsonl").open("w"), (path / "events.jsonl").open("w")
    with log, events:
        for line in lines:
            if isinstance(line, str):
                events.write(line + "\n")
            else:
                log.write(json.dumps({k: v for k, v in line.items() if k not in hidden}) + "\n")
    return path


def _write_text(
    path: Path, lines: Lines, form: Callable[[Line], str], head: str = "", tail: str = ""
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        file.write(head)
        for line in lines:
            file.write(line if isinstance(line, str) else form(line))
        file.write(tail)
    return path


def write_old(path: Path, lines: Lines, total: int) -> Path:
    """The research code before us: one tqdm bar, redrawn with carriage returns, numbers in its postfix."""

    def form(line: Line) -> str:
        if "loss" not in line:
            return ""
        postfix = f"Loss={line['loss']:.4f}, Text={line['text_loss']:.4f}, Latent={line['latent_loss']:.4f}"
        bar = _bar(line["step"], total, line["step_seconds"])
        return f"\rTraining: {bar}, Epoch=0/3, Progress=1.0%, {postfix}, Grad={line['grad_norm']:.4f}]"

    head = "BF16 optimizations enabled\nUsing device=cuda:0 and dtype=torch.bfloat16\n* World size: 8\n"
    return _write_text(path, lines, form, head)


def write_nanogpt(path: Path, lines: Lines, total: int) -> Path:
    """nanoGPT: `iter N: loss ..., time ...ms, mfu ...%`."""

    def form(line: Line) -> str:
        if "loss" not in line:
            return f"step {line['step']}: train loss 1.0000, val loss {line['valid_loss']:.4f}\n"
        return f"iter {line['step']}: loss {line['loss']:.4f}, time {1000 * line['step_seconds']:.2f}ms, mfu 31.20%\n"

    head = "tokens per iteration will be: 1,536\nnumber of parameters: 0.01M\ncompiling the model... (takes ~1 min)\n"
    return _write_text(path, lines, form, head)


def write_lightning(path: Path, lines: Lines, total: int) -> Path:
    """Lightning: a bar per epoch that starts again at 0."""
    per_epoch = 200

    def form(line: Line) -> str:
        if "loss" not in line:
            return "\rValidation DataLoader 0: 100%|██████████| 8/8 [00:00<00:00, 99.00it/s]"
        epoch, step = divmod(line["step"], per_epoch)
        postfix = f"v_num=0, train_loss={line['loss']:.3f}, lr={line['lr']:.2e}"
        return f"\rEpoch {epoch}: {_bar(step, per_epoch, line['step_seconds'])}, {postfix}]"

    head = "GPU available: True (cuda), used: True\n  | Name  | Type | Params\n"
    return _write_text(path, lines, form, head, f"\n`Trainer.fit` stopped: `max_steps={total}` reached.\n")


def write_hugging_face(path: Path, lines: Lines, total: int) -> Path:
    """Hugging Face Trainer: a bar, and a dictionary of numbers without a step."""

    def form(line: Line) -> str:
        if "loss" not in line:
            return str({"eval_loss": line["valid_loss"], "eval_runtime": 1.5, "epoch": 0.1}) + "\n"
        numbers = {
            "loss": round(line["loss"], 4),
            "grad_norm": line["grad_norm"],
            "learning_rate": line["lr"],
        }
        bar = _bar(line["step"], total, line["step_seconds"])
        return f"\r {bar}]\n{ {**numbers, 'epoch': round(line['epoch'], 2)} }\n"

    return _write_text(path, lines, form, "", "{'train_runtime': 300.1, 'train_loss': 1.1, 'epoch': 9.0}\n")


def write_titan(path: Path, lines: Lines, total: int) -> Path:
    """torchtitan: ANSI colours, a time, thousands with commas."""

    def form(line: Line) -> str:
        head = f"[rank0]:\x1b[37m[titan] {_stamp(line['time'])} - root - INFO - \x1b[39m"
        if "loss" not in line:
            loss = f"{line['valid_loss']:7.4f}"
            return f"{head}\x1b[32mvalidate step: {line['step']:2}  loss: {loss}  tps: 9,999\x1b[39m\n"
        rate = round(line["tokens_per_second"])
        return (
            f"{head}\x1b[31mstep: {line['step']:2}  \x1b[32mloss: {line['loss']:8.5f}  \x1b[38;2;180;60;0m"
            f"grad_norm: {line['grad_norm']:7.4f}  \x1b[36mmemory:  9.46GiB(64.99%)  \x1b[34mtps: {rate:,}  "
            f"\x1b[36mtflops: 0.52  \x1b[35mmfu: 0.17%\x1b[39m\n"
        )

    return _write_text(path, lines, form, tail="[rank0]:[titan] - root - INFO - Training completed\n")


def write_words(path: Path, lines: Lines, total: int) -> Path:
    """A script of one's own: key=value with a time before it."""

    def form(line: Line) -> str:
        if "loss" not in line:
            return (
                f"{_stamp(line['time'])} validation: step={line['step']} val_loss={line['valid_loss']:.5f}\n"
            )
        rate = (
            f"lr={line['lr']:.3e} grad_norm={line['grad_norm']:.5f} tokens/s={line['tokens_per_second']:.1f}"
        )
        return f"{_stamp(line['time'])} INFO step {line['step']}/{total} loss={line['loss']:.5f} {rate}\n"

    return _write_text(path, lines, form)


WRITERS: dict[str, Callable[[Path, Lines, int], Path]] = {
    "own": write_own, "old": write_old, "nanogpt": write_nanogpt, "lightning": write_lightning,
    "huggingface": write_hugging_face, "titan": write_titan, "words": write_words,
}  # fmt: skip
