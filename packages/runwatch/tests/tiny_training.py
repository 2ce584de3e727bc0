"""A real training, small enough for hundreds: a two-layer network, AdamW, a text and a latent loss, faults on demand.

Losses, gradients and validations are computed, not invented. Only the clock is simulated, so that a log is the same on
every machine. A fault is injected at a step, as it would happen: into the batch, the gradient, the rate, the clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

CLASSES, INPUTS, LATENT, HIDDEN = 16, 24, 8, 48
START = 1_700_000_000.0


@dataclass
class Training:
    """Settings of a run; `fault` names what goes wrong at `fault_step`."""

    fault: str = ""
    steps: int = 600
    fault_step: int = 300
    seed: int = 0
    batch: int = 64
    lr: float = 3e-3
    train_size: int = 4096
    log_every: int = 1
    skipped: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        teacher = np.random.default_rng(7)
        self.mix, self.to_latent = (
            teacher.normal(size=(INPUTS, CLASSES)),
            teacher.normal(size=(INPUTS, LATENT)),
        )
        self.inputs, self.labels, self.latents = self._data(self.train_size)
        self.valid = self._data(512)
        shapes = {"w1": (INPUTS + LATENT, HIDDEN), "w2": (HIDDEN, CLASSES), "w3": (HIDDEN, LATENT)}
        self.weights = {k: self.rng.normal(size=s) / math.sqrt(s[0]) for k, s in shapes.items()}
        self.moments = {k: (np.zeros(s), np.zeros(s)) for k, s in shapes.items()}

    def _data(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        inputs = self.rng.normal(size=(count, INPUTS))
        latents = np.tanh(inputs @ self.to_latent / 3)
        logits = inputs @ self.mix * 0.6 + (latents @ self.to_latent.T @ self.mix) * 0.3
        labels = (logits + self.rng.gumbel(size=logits.shape)).argmax(1)
        if self.fault == "random_labels":
            labels = self.rng.integers(0, CLASSES, count)
        return inputs, labels, latents

    def _forward(self, inputs: np.ndarray, latents: np.ndarray) -> tuple[np.ndarray, ...]:
        joined = np.concatenate([inputs * 0.5, latents], 1)
        hidden = np.tanh(joined @ self.weights["w1"])
        logits = hidden @ self.weights["w2"]
        logits = logits - logits.max(1, keepdims=True)
        return (
            joined,
            hidden,
            logits - np.log(np.exp(logits).sum(1, keepdims=True)),
            hidden @ self.weights["w3"],
        )

    def _losses(
        self, data: tuple[np.ndarray, np.ndarray, np.ndarray], shuffle: bool = False
    ) -> tuple[float, float]:
        inputs, labels, latents = data
        given = latents[np.random.default_rng(0).permutation(len(latents))] if shuffle else latents
        _, _, log_probs, predicted = self._forward(inputs, given)
        text = -log_probs[np.arange(len(labels)), labels].mean()
        return float(text), float(((predicted - latents) ** 2).mean())

    def _batch(self, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows = self.rng.integers(0, len(self.inputs), self.batch)
        inputs, labels, latents = self.inputs[rows], self.labels[rows], self.latents[rows]
        if self.fault == "nan_batch" and step == self.fault_step:
            inputs = inputs * np.nan
        if self.fault == "bad_batch" and step == self.fault_step:
            inputs, labels = -inputs * 6, (labels + 5) % CLASSES
        return inputs, labels, latents

    def _rate(self, step: int) -> float:
        total = 0.35 * self.steps if self.fault == "short_schedule" else self.steps
        since = (
            step - self.fault_step if self.fault == "restarted_schedule" and step >= self.fault_step else step
        )
        rate = self.lr * min(since / 30, 0.5 * (1 + math.cos(math.pi * min(1.0, since / total))))
        if self.fault == "random_labels":
            return self.lr / 10
        if step >= self.fault_step:
            rate = {"zero_rate": 0.0, "huge_rate": rate * 300}.get(self.fault, rate)
        return max(rate, 0.0 if step >= self.fault_step and self.fault == "zero_rate" else self.lr * 1e-3)

    def _gradients(
        self, data: tuple[np.ndarray, ...], step: int
    ) -> tuple[dict[str, np.ndarray], float, float, float]:
        inputs, labels, latents = data
        joined, hidden, log_probs, predicted = self._forward(inputs, latents)
        count, error = len(labels), np.exp(log_probs)
        error[np.arange(count), labels] -= 1
        off = predicted - latents
        back = (error @ self.weights["w2"].T / count + off @ self.weights["w3"].T * 2 / off.size) * (
            1 - hidden**2
        )
        found = {"w1": joined.T @ back, "w2": hidden.T @ error / count, "w3": hidden.T @ off * 2 / off.size}
        late = step >= self.fault_step
        scales = {
            "exploding": 100.0 if late and step < self.fault_step + 20 else 1.0,
            "vanishing": 1e-6 if late else 1.0,
            "overflow": math.inf if late and step % 7 == 0 else 1.0,
        }
        scale = scales.get(self.fault, 1.0)
        if self.fault == "latent_ignored":
            found["w1"][INPUTS:] = 0
        with np.errstate(invalid="ignore"):
            found = {name: value * scale for name, value in found.items()}
        size = float(np.sqrt((predicted**2).sum(1)).mean())
        return found, float(-log_probs[np.arange(count), labels].mean()), float((off**2).mean()), size

    def _update(self, gradients: dict[str, np.ndarray], rate: float, step: int) -> float:
        norm = math.sqrt(sum(float((value**2).sum()) for value in gradients.values()))
        if self.fault == "overflow" and not math.isfinite(norm):
            self.skipped += 1
            return norm
        clip = min(1.0, 5.0 / max(norm, 1e-12)) if self.fault != "huge_rate" else 1.0
        for name, value in gradients.items():
            first, second = self.moments[name]
            first += 0.1 * (value * clip - first)
            second += 0.02 * ((value * clip) ** 2 - second)
            decay = (
                0.1 if self.fault == "latent_collapse" and name == "w3" and step >= self.fault_step else 0.0
            )
            self.weights[name] -= rate * first / (np.sqrt(second) + 1e-8) + decay * self.weights[name]
        return norm

    def lines(self) -> Iterator[dict[str, Any]]:
        """What a trainer logs, step by step; validations are lines of their own."""
        if self.fault == "latent_ignored":
            self.weights["w1"][INPUTS:] = 0
        clock, tokens = START, 0
        for step in range(1, self.steps + 1):
            data, rate = self._batch(step), self._rate(step)
            with np.errstate(all="ignore"):
                gradients, text, latent, size = self._gradients(data, step)
                norm = self._update(gradients, rate, step)
            seconds, wait = self._clock(step)
            clock, tokens = clock + seconds, tokens + self.batch * INPUTS
            line = {
                "step": step,
                "time": clock,
                "loss": text + latent,
                "text_loss": text,
                "latent_loss": latent,
            }
            line |= {"lr": rate, "grad_norm": norm, "data_wait": wait, "tokens": tokens, "epoch": step / 64}
            line |= {"tokens_per_second": self.batch * INPUTS / seconds, "step_seconds": seconds}
            line |= {"batch_size": self.batch, "skipped_steps": self.skipped, "latent_prediction_norm": size}
            self.skipped = 0
            if step % self.log_every == 0:
                yield line
            if step % 50 == 0:
                yield {"step": step, "time": clock + 0.2, **self._validate()}
                clock += 0.3

    def _validate(self) -> dict[str, float]:
        with np.errstate(all="ignore"):
            text, latent = self._losses(self.valid)
            shuffled, _ = self._losses(self.valid, shuffle=True)
        return {"valid_loss": text + latent, "valid_text_loss": text, "valid_text_loss_shuffled": shuffled}

    def _clock(self, step: int) -> tuple[float, float]:
        """Seconds of the step and the share of them spent waiting for data."""
        seconds, wait = 0.5 * (1 + abs(self.rng.normal(0, 0.03))), 0.02
        if step < self.fault_step:
            return seconds, wait
        if self.fault == "slow":
            return seconds * 2.2, wait
        if self.fault == "jitter":
            return seconds * (1 + 2.5 * self.rng.random()), wait
        if self.fault == "slow_data":
            return seconds * 1.5, 0.35 + 0.05 * self.rng.random()
        return seconds, wait
