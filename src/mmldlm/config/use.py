"""Settings of what a trained model is used for: samples and numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmldlm.config.fields import choice, number


@dataclass
class SamplingConfig:
    """Defaults of the samplers; `mmldlm sample` has an option for each."""

    text_sampler: str = choice("confidence", "confidence", "ancestral", "first_hitting", "margin", "block")
    """confidence, margin: surest tokens first, by two measures; ancestral: the exact reverse process in steps of time;
    first_hitting: the same token by token; block: left to right in blocks."""
    block_length: int = number(32, 1)
    """Tokens of a block, for the sampler block."""
    latent_sampler: str = choice("ddim", "ddim", "dpmpp_2m", "heun")
    """ddim: first order; dpmpp_2m: second order at the same cost; heun: second order, two passes a step."""
    joint_order: str = choice("interleaved", "interleaved", "latent_first", "text_first")
    """Joint sampling: text and latent in turn, or one of them first, from noise alone."""
    num_sampling_steps: int = number(16, 1)
    num_latent_steps: int = number(16, 1)
    """Steps of the latent in joint sampling."""
    num_encode_steps: int | None = number(None, 1)
    """Steps of t2l. 1 gives the mean of what the model believes, the best embedding; more steps draw one possible
    latent. null: 1, but 16 with a prediction of noise, whose first step says little about the latent."""
    temperature: float = number(1.0, 0)
    """0: the most probable token always."""
    top_p: float = number(1.0, 0, 1, above=True)
    guidance: float = number(1.0, -100, 100)
    """1: none; larger follows the condition more strongly; below 1 less so, below 0 it leads away from it."""


@dataclass
class EvaluationConfig:
    """Size of an evaluation."""

    num_documents: int = number(512, 0)
    """Held-out documents; 0: all."""
    num_decoded: int = number(64, 0)
    """How many of them are decoded into text, which costs most of the time; 0: all."""
    num_draws: int = number(4, 1)
    """Draws of time and noise per document in the text bound, and in the latent bound."""
    step_counts: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32])
    """Numbers of sampling steps at which decoding is measured."""
    length_groups: list[int] = field(default_factory=lambda: [16, 32, 64])
    """Decoding is also told by length of the text: up to the first number of tokens, up to the next, and longer; []:
    not by length."""
    latent_snr: float = number(100.0, 0, above=True)
    """Largest signal-to-noise ratio of the latent bound: latents are told apart to 1/sqrt(latent_snr) of their
    spread."""
    num_generated: int = number(64, 0)
    """Pairs generated from nothing; 0: none."""
    candidates: list[int] = field(default_factory=list)
    """Numbers of texts decoded for each latent, of which the one nearest to the latent is kept, such as [1, 4, 16]; []:
    not measured."""
    refine: int = number(0, 0)
    """Rounds that improve what is kept, measured beside none: single tokens are replaced by other probable ones that
    bring the text nearer to the latent; 0: none."""
    candidate_temperature: float = number(1.0, 0, above=True)
    """Of all candidates but the first, which takes the most probable tokens, and of the rounds."""
    check: str = choice("auto", "auto", "model", "encoder")
    """What turns candidates back into latents: the model's own t2l side or the encoder; auto: the model, or the encoder
    where a run has no t2l side."""
    text_samplers: list[str] = field(default_factory=list)
    """Text samplers beside each other; []: the run's own."""
    guidances: list[float] = field(default_factory=list)
    """Strengths of guidance beside each other; []: the run's own."""
    batch_tokens: int = number(8192, 1)
