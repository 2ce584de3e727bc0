"""Initial weights, which parameters belong together, and which get no gradient from a loss: all in one place.

Parts are what can be frozen by name. What a mode leaves without a gradient is finer: it includes pieces of the last
block of the stream that produces nothing, because nothing reads that stream any more once attention has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from mmldlm.model.layers import Stream


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters of one part that are treated alike."""

    part: str
    decay: bool
    parameters: dict[str, nn.Parameter]


def allocate(module: nn.Module) -> None:
    """Memory on PyTorch's default device for the parameters that have none yet; their values are whatever was there."""
    device = torch.get_default_device()
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.is_meta:
                # empty_like of a parameter without memory imports sympy, which takes 0.4 s
                memory = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                setattr(part, name, nn.Parameter(memory))


@torch.no_grad()
def init_weights(denoiser: nn.Module, seed: int, token_counts: np.ndarray | None = None) -> None:
    """Give every parameter of a `Denoiser` its first value: a function of the seed and of how often tokens occur."""
    generator = torch.Generator().manual_seed(seed)

    def gaussian(weight: Tensor, std: float) -> None:
        if weight.is_cpu and weight.dtype == torch.float32 and weight.numel() >= 16:
            weight.normal_(0.0, std, generator=generator)  # the same bits as below, in one pass over memory
        else:
            weight.copy_(torch.randn(weight.shape, generator=generator) * std)

    for module in denoiser.modules():
        if isinstance(module, nn.Linear):
            gaussian(module.weight, module.in_features**-0.5)
            if module.bias is not None:
                module.bias.zero_()
        if isinstance(module, nn.RMSNorm):
            module.weight.fill_(1.0)
    parameters = dict(denoiser.named_parameters())
    gaussian(parameters["token_embed.weight"], 0.05)
    gaussian(parameters["slot_embed"], 0.02)
    streams = [module for module in denoiser.modules() if isinstance(module, Stream)]
    for stream in streams:
        _init_stream(stream, len(streams) // 2)
    for last in ("text_final", "latent_final", "latent_head.2"):
        parameters[f"{last}.weight"].zero_()
    if "token_head.weight" in parameters:
        gaussian(parameters["token_head.weight"], 0.02)
    if token_counts is not None:
        # the best guess before anything is learned: how often each token occurs, each seen half a time more
        rate = torch.from_numpy((token_counts + 0.5) / (token_counts.sum() + 0.5 * len(token_counts)))
        parameters["token_head.bias"][: len(rate)] = rate.log().float()
    if "length_head.output.weight" in parameters:
        parameters["length_head.output.weight"].zero_()


def _init_stream(stream: Stream, depth: int) -> None:
    """Times modulate nothing at first; gates are open, and the residual branches are scaled down with depth."""
    stream.modulation.weight.zero_()
    bias = stream.modulation.bias.view(6, -1)
    bias[2].fill_(1.0)
    bias[5].fill_(1.0)
    for output in (stream.attention_out, stream.mlp_out):
        output.weight.mul_((2 * depth) ** -0.5)


def part_of(name: str) -> str:
    """The part that a parameter of the denoiser belongs to."""
    words = name.split(".")
    if words[0] in ("token_head", "latent_head", "length_head"):
        return words[0]
    if words[0] == "blocks":
        return words[2]
    by_prefix = {"token": "text", "text": "text", "latent": "latent", "slot": "latent", "time": "shared"}
    return by_prefix[words[0].split("_")[0]]


def parameter_groups(denoiser: nn.Module) -> list[ParameterGroup]:
    """All parameters, by part and by whether weight decay applies: matrices yes; biases, norms and embeddings no."""
    groups: dict[tuple[str, bool], dict[str, nn.Parameter]] = {}
    for name, parameter in denoiser.named_parameters():
        decay = parameter.ndim >= 2 and name not in ("token_embed.weight", "slot_embed")
        groups.setdefault((part_of(name), decay), {})[name] = parameter
    return [ParameterGroup(part, decay, members) for (part, decay), members in groups.items()]


@dataclass(frozen=True)
class Unused:
    """Parameters that no loss depends on."""

    names: frozenset[str]
    """Of whole parameters."""
    rows: dict[str, slice]
    """Parameter -> those of its rows that nothing depends on; the other rows have a gradient."""


def unused_parameters(denoiser: nn.Module, *, text: bool, latent: bool, length: bool) -> Unused:
    """What gets no gradient when only these losses exist; a test holds this against autograd.

    A stream without a loss still gives keys and values to the last attention. So of its last block the way to them is
    used, and all that comes after is not: the queries with their norm, the output of attention, the feed-forward half,
    and the rows of the modulation for all of these.
    """
    names = dict(denoiser.named_parameters())
    if not text and not latent:
        used = ("length_head.",) if length else ()
        return Unused(frozenset(name for name in names if not name.startswith(used)), {})
    heads = {"token_head.": text, "latent_head.": latent, "length_head.": length}
    dead = [prefix for prefix, has_loss in heads.items() if not has_loss]
    rows: dict[str, slice] = {}
    for side, has_loss in (("text", text), ("latent", latent)):
        if has_loss:
            continue
        last = f"blocks.{_depth(names) - 1}.{side}."
        dead.append(f"{side}_final.")
        dead += [f"{last}{piece}." for piece in ("q_norm", "attention_out", "mlp_in", "mlp_out")]
        num_rows = {name: len(names[last + name]) for name in ("qkv.weight", "modulation.weight")}
        rows[f"{last}qkv.weight"] = slice(0, num_rows["qkv.weight"] // 3)
        for name in (
            "modulation.weight",
            "modulation.bias",
        ):  # of six, the first two: shift and scale before q, k, v
            rows[last + name] = slice(num_rows["modulation.weight"] // 3, None)
    return Unused(frozenset(name for name in names if name.startswith(tuple(dead))), rows)


def _depth(names: Iterable[str]) -> int:
    """Number of blocks, from the names of the parameters."""
    return 1 + max(int(name.split(".")[1]) for name in names if name.startswith("blocks."))


def other_rows(rows: slice) -> slice:
    """The rows before or after these, which begin at the first row or end with the last."""
    return slice(rows.stop, None) if not rows.start else slice(0, rows.start)
