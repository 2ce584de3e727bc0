"""What a causal language model of others thinks of texts: nats per token, for the generative perplexity.

Any Hugging Face causal model by folder or name; files that are here already are preferred, and no code that comes with
a model is ever run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from mmldlm.data.tokenizer import first_line, quiet_hub
from mmldlm.errors import UserError

_BATCH = 16


@dataclass(frozen=True)
class TextCosts:
    """What some texts cost."""

    nats: np.ndarray
    """(n,)"""
    num_tokens: np.ndarray
    """(n,) tokens of the reference model that were scored."""
    num_cut: int
    """Texts longer than the model can read; the rest of them is left out."""


@dataclass(frozen=True)
class ReferenceLM:
    """A causal model with its tokenizer."""

    name: str
    model: Any
    tokenizer: Any
    device: torch.device

    @classmethod
    def load(cls, name: str, device: torch.device) -> ReferenceLM:
        """From a folder, the cache of the Hub, or the Hub itself."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        quiet_hub()
        failure: Exception | None = None
        for local in (True, False):
            options = {"local_files_only": local, "trust_remote_code": False}
            try:
                tokenizer = AutoTokenizer.from_pretrained(name, **options)
                model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **options)
            except Exception as error:  # network, Hub, parsing: every library under it has its own
                failure = error
                continue
            return cls(name, model.to(device).eval().requires_grad_(False), tokenizer, device)
        assert failure is not None
        raise UserError(
            f"--reference-lm {name}: no causal language model can be loaded from there ({first_line(failure)}); "
            "give a folder written by save_pretrained, or a name on the Hugging Face Hub"
        ) from failure

    @property
    def start(self) -> int | None:
        """The token before the first one, which lets that one be scored too; None where the model has none."""
        found = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        return next((token for token in found if token is not None), None)

    @property
    def longest(self) -> int:
        """Tokens that the model can read at once."""
        return int(getattr(self.model.config, "max_position_embeddings", None) or 1024)

    @torch.inference_mode()
    def score(self, texts: list[str]) -> TextCosts:
        """Nats of every token given those before it, in batches filled up on the right, where nobody looks."""
        head = [] if self.start is None else [self.start]
        rows = [head + self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        cut = sum(len(row) > self.longest for row in rows)
        rows = [row[: self.longest] for row in rows]
        nats = np.zeros(len(rows))
        order = np.argsort([len(row) for row in rows], kind="stable")
        for start in range(0, len(rows), _BATCH):
            chosen = order[start : start + _BATCH]
            nats[chosen] = self._score([rows[idx] for idx in chosen])
        counts = np.array([max(len(row) - 1, 0) for row in rows])
        return TextCosts(nats, counts, cut)

    def _score(self, rows: list[list[int]]) -> np.ndarray:
        size = max(len(row) for row in rows)
        if size < 2:
            return np.zeros(len(rows))
        tokens = torch.zeros((len(rows), size), dtype=torch.int64)
        real = torch.zeros((len(rows), size), dtype=torch.int64)
        for idx, row in enumerate(rows):
            tokens[idx, : len(row)] = torch.tensor(row, dtype=torch.int64)
            real[idx, : len(row)] = 1
        tokens, real = tokens.to(self.device), real.to(self.device)
        logits = self.model(input_ids=tokens, attention_mask=real).logits[:, :-1].float()
        costs = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none") * real[:, 1:]
        return costs.double().sum(1).cpu().numpy()
