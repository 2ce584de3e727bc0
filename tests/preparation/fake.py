"""The `mmldlm` command with an encoder that needs no model; it can kill its own process, or wait, on request.

Run as `python -m tests.preparation.fake prepare ...`. KILL_AFTER=n: SIGKILL after n documents; SLOW=s: seconds for
each document.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mmldlm.preparation.sentence_encoder import Tokenized

CHANNELS = 6


class FakeEncoder:
    """Latents from a hash of the text, two slots."""

    num_slots, num_channels, max_tokens = 2, CHANNELS, 40
    seen = 0

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    @classmethod
    def load(cls, name: str, probe_text: object = None, **options: Any) -> FakeEncoder:
        return cls({"name": name, **{key: options[key] for key in ("prompt", "normalize", "dimension")}})

    def describe(self) -> dict[str, Any]:
        return self.options | {"normalize": False}

    def accepts(self, tokenizer: object) -> bool:
        return False

    def tokenize(self, texts: list[str], tokens: object = None) -> Tokenized:
        return Tokenized(texts, np.array([len(text.split()) for text in texts]), self.max_tokens)

    def embed(self, tokenized: Tokenized, progress: Callable[[int], None] | None = None) -> np.ndarray:
        return self.encode(tokenized.texts, progress)

    def encode(self, texts: list[str], progress: Callable[[int], None] | None = None) -> np.ndarray:
        from mmldlm.preparation.cutting import hash63

        latents = []
        for text in texts:
            FakeEncoder.seen += 1
            if FakeEncoder.seen > int(os.environ.get("KILL_AFTER", "1000000000")):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(float(os.environ.get("SLOW", "0")))
            latents.append(
                np.random.default_rng(hash63(self.options["prompt"] + text)).normal(size=(2, CHANNELS))
            )
            if progress is not None:
                progress(1)
        return np.stack(latents).astype(np.float32)


def main() -> None:
    from mmldlm.cli.main import main as command
    from mmldlm.preparation import pipeline

    pipeline.load_encoder = FakeEncoder.load  # type: ignore[assignment]
    command()


if __name__ == "__main__":
    main()
