"""Attention where every document has the same number of tokens: among tokens by cuDNN, the few slots merged in exactly.

cuDNN works in tiles of 128 places, so 2,048 tokens and a slot would need a seventeenth. Among the tokens alone it gives
o and the logarithm l of the sum of exponentials. With the scores s_j of the slots, l' = log(e^l + sum_j e^s_j) and
o' = o e^(l - l') + sum_j e^(s_j - l') v_j. Backward, the same kernel given o' and l' returns the exact gradients among
tokens; one pass over the tokens adds what slots contribute, sums what they get, and goes back through rotation and
norm. Queries of slots look at tokens block by block. Nothing is added atomically; everything is summed in fp32.
Shapes: N documents of L tokens and S slots, T = N*L, H heads, K head width, B blocks of a document.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from mmldlm.model.kernels.gather_qkv import EPS, gather_rows, return_rows
from mmldlm.model.kernels.slots import merge_kernel, slots_back_kernel, slots_kernel, tokens_back_kernel
from mmldlm.model.operators import operator


class Blocks(NamedTuple):
    """How a kernel cuts the tokens of a document."""

    rows: int
    """Tokens of a program."""
    warps: int


FORWARD = Blocks(32, 2)
BACKWARD = Blocks(16, 1)
_CHUNK = 32
"""Blocks that are put together in one go."""


_aten = torch.ops.aten
_rank = {"cudnn": 4}
"""Dimensions of cuDNN's sums, (N, H, L, 1) or without the last: versions of PyTorch differ, and forward shows it."""


def _attend_tokens(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """q, k, v (N, H, L, K), tokens outermost in memory. Returns (N, L, H, K) and log of the sums (N, H, L), fp32."""
    if _runs("cudnn", q, k, v):
        out, sums = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)[:2]
        _rank["cudnn"] = sums.dim()
    elif _runs("flash", q, k, v):
        out, sums = _aten._scaled_dot_product_flash_attention(q, k, v)[:2]
    else:
        score = _scores(q, k)
        sums = score.logsumexp(-1)
        out = ((score - sums[..., None]).exp() @ v.float()).to(q.dtype)
    return out.transpose(1, 2).contiguous(), sums.reshape(q.shape[:3]).contiguous()


def _attend_tokens_backward(
    sums: Tensor, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v (N, L, H, K) each; sums (N, H, L), `grad` and `out` like q, (N, H, L, K).

    The weight of a key is exp(score - sum): keys beyond those given may be part of `out` and `sums`.
    """
    length = q.shape[2]
    seed = sums.new_empty(2, dtype=torch.int64)  # of no use without dropout
    if _runs("cudnn", q, k, v):
        sums = sums[..., None] if _rank["cudnn"] == 4 else sums
        grads = _aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, sums, seed[0], seed[1], None, None, None, length, length, 0.0, False
        )
    elif _runs("flash", q, k, v):
        grads = _aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, sums, None, None, length, length, 0.0, False, seed, seed[0]
        )
    else:
        share, wide = (_scores(q, k) - sums[..., None]).exp(), grad.float()
        overlap = (wide * out.float()).sum(-1, keepdim=True)
        pull = share * (wide @ v.float().mT - overlap) * q.shape[3] ** -0.5
        grads = pull @ k.float(), pull.mT @ q.float(), share.mT @ wide
    first, second, third = (part.transpose(1, 2).contiguous() for part in grads)
    return first, second, third


def _runs(name: str, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a library kernel takes these tensors, on this device."""
    if not q.is_cuda:
        return False
    problem = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, False, False)
    if name == "cudnn":
        return torch.backends.cuda.can_use_cudnn_attention(problem)
    return torch.backends.cuda.can_use_flash_attention(problem)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q.float() @ k.float().mT * q.shape[3] ** -0.5


def _sizes(num_heads: int, width: int, num_slots: int) -> dict[str, int]:
    return {"HEADS": num_heads, "WIDTH": width, "SLOTS": num_slots}


def _few(num_slots: int) -> dict[str, int]:
    return {"SLOTS_UP": triton.next_power_of_2(num_slots), "CHUNK": _CHUNK, "num_warps": 4}


def _of_tokens(x: Tensor, num_documents: int, num_tokens: int) -> Tensor:
    """(T + ..., H, K) -> (N, H, L, K), a view."""
    return x[:num_tokens].unflatten(0, (num_documents, -1)).transpose(1, 2)


def _gather(
    text: Tensor, latent: Tensor, weights: tuple[Tensor, Tensor], angles: tuple[Tensor, Tensor], num_heads: int,
    norm: bool, scores: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k and v (T + N*S, H, K): slots first, since the scores between tokens and slots need them."""
    tokens, slots = text.shape[0], latent.shape[0]
    shape = (tokens + slots, num_heads, text.shape[1] // (3 * num_heads))
    q, k, v = (text.new_empty(shape) for _ in range(3))
    problem = (text, latent, *weights, *angles, (q, k, v), num_heads, norm)
    gather_rows(*problem, first_place=tokens, num_places=slots)
    gather_rows(*problem, num_places=tokens, scores=scores)
    return q, k, v


@operator
def attend_split(
    text: Tensor, latent: Tensor, text_weight: Tensor, latent_weight: Tensor, cosine: Tensor, sine: Tensor,
    num_heads: int, num_slots: int, norm: bool, keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """text (T, 3*H*K), latent (N*S, 3*H*K); weights (2, K) of the norms of q and k; cosine, sine (T, K/2).

    Returns the results (T, H*K) and (N*S, H*K); and for the backward pass the logarithms of the sums of both, (N, H, L)
    and (N*S, H), and q, k and v (T + N*S, H, K), which are empty without `keep` and computed again.
    """
    text, latent = text.contiguous(), latent.contiguous()
    tokens, slots, width = text.shape[0], latent.shape[0], text.shape[1] // (3 * num_heads)
    documents = slots // num_slots
    length, sizes = tokens // documents, _sizes(num_heads, width, num_slots)
    blocks = triton.cdiv(length, FORWARD.rows)

    def wide(*shape: int) -> Tensor:
        return text.new_empty(shape, dtype=torch.float32)

    scores = (wide(tokens, num_slots, num_heads), wide(tokens, num_slots, num_heads))
    q, k, v = _gather(text, latent, (text_weight, latent_weight), (cosine, sine), num_heads, norm, scores)
    out, logsum = _attend_tokens(*(_of_tokens(part, documents, tokens) for part in (q, k, v)))
    levels = wide(documents, blocks, num_slots, num_heads, 2)
    mixed = wide(documents, blocks, num_slots, num_heads, width)
    merge_kernel[(num_heads, blocks, documents)](
        out, logsum, v, *scores, levels, mixed, tokens, length,
        **sizes, ROWS=FORWARD.rows, num_warps=FORWARD.warps,
    )  # fmt: skip
    slot_out, slot_logsum = text.new_empty((slots, num_heads * width)), wide(slots, num_heads)
    slots_kernel[(num_heads, num_slots, documents)](
        q, k, v, levels, mixed, slot_out, slot_logsum, tokens, blocks, width**-0.5, **sizes, **_few(num_slots)
    )
    if not keep:
        q, k, v = (text.new_empty((0, 0, 0)) for _ in range(3))
    return out.view(tokens, num_heads * width), slot_out, logsum, slot_logsum, q, k, v


@torch.library.register_fake(attend_split)
def _(
    text: Tensor, latent: Tensor, text_weight: Tensor, latent_weight: Tensor, cosine: Tensor, sine: Tensor,
    num_heads: int, num_slots: int, norm: bool, keep: bool,
) -> Any:  # fmt: skip
    tokens, slots, size = text.shape[0], latent.shape[0], text.shape[1] // 3
    documents = slots // num_slots
    shape = (tokens + slots, num_heads, size // num_heads) if keep else (0, 0, 0)
    logsum = text.new_empty((documents, num_heads, tokens // documents), dtype=torch.float32)
    slot_logsum = text.new_empty((slots, num_heads), dtype=torch.float32)
    kept = (text.new_empty(shape) for _ in range(3))
    return text.new_empty((tokens, size)), text.new_empty((slots, size)), logsum, slot_logsum, *kept


@operator
def attend_split_backward(
    grad: Tensor, slot_grad: Tensor, text: Tensor, latent: Tensor, text_weight: Tensor, latent_weight: Tensor,
    cosine: Tensor, sine: Tensor, out: Tensor, slot_out: Tensor, logsum: Tensor, slot_logsum: Tensor,
    q: Tensor, k: Tensor, v: Tensor, num_slots: int, norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of both projections, (T, 3*H*K) and (N*S, 3*H*K), and of the weights of the norms, (2, K) each."""
    text, latent, grad, slot_grad = (part.contiguous() for part in (text, latent, grad, slot_grad))
    documents, num_heads, length = logsum.shape
    tokens, slots, width = text.shape[0], latent.shape[0], text.shape[1] // (3 * num_heads)
    sizes, blocks = _sizes(num_heads, width, num_slots), triton.cdiv(length, BACKWARD.rows)
    if not q.numel():
        q, k, v = _gather(text, latent, (text_weight, latent_weight), (cosine, sine), num_heads, norm, None)
    by_head = (grad.view(tokens, num_heads, width), q, k, v, out.view(tokens, num_heads, width))
    grads = _attend_tokens_backward(logsum, *(_of_tokens(part, documents, tokens) for part in by_head))

    def wide(*shape: int) -> Tensor:
        return text.new_empty(shape, dtype=torch.float32)

    grad_text, sums = torch.empty_like(text), wide(documents, blocks, num_slots, 3, num_heads, width)
    norm_sums = wide(documents * blocks * num_heads, 2, width)
    tokens_back_kernel[(num_heads, blocks, documents)](
        grad, out, logsum, text, q, k, v, slot_grad, slot_out, slot_logsum, *grads, cosine, sine, text_weight,
        grad_text, sums, norm_sums, tokens, length, width**-0.5, EPS,
        **sizes, ROWS=BACKWARD.rows, NORM=norm, num_warps=BACKWARD.warps,
    )  # fmt: skip
    slot_grads = wide(3, slots, num_heads, width)
    slots_back_kernel[(num_heads, documents)](
        slot_grad, slot_out, slot_logsum, q, k, v, sums, slot_grads, tokens, blocks, width**-0.5, slots,
        **sizes, **_few(num_slots),
    )  # fmt: skip
    grad_q, grad_k, grad_v = slot_grads.unbind(0)
    grad_latent, grad_latent_weight = return_rows(
        grad_q, grad_k, grad_v, latent, latent_weight, cosine, sine, None, 0, False, norm
    )
    grad_text_weight = norm_sums.sum(0) if norm else torch.zeros_like(text_weight, dtype=torch.float32)
    return grad_text, grad_latent, grad_text_weight, grad_latent_weight


@torch.library.register_fake(attend_split_backward)
def _(
    grad: Tensor, slot_grad: Tensor, text: Tensor, latent: Tensor, text_weight: Tensor, latent_weight: Tensor,
    cosine: Tensor, sine: Tensor, out: Tensor, slot_out: Tensor, logsum: Tensor, slot_logsum: Tensor,
    q: Tensor, k: Tensor, v: Tensor, num_slots: int, norm: bool,
) -> Any:  # fmt: skip
    weights = (weight.new_empty(weight.shape, dtype=torch.float32) for weight in (text_weight, latent_weight))
    return text.new_empty(text.shape), latent.new_empty(latent.shape), *weights


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.num_slots, ctx.norm = inputs[7:9]
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:6], *output)


def _gradients(ctx: Any, *upstream: Any) -> Any:
    kept = ctx.saved_tensors
    over = (
        torch.zeros_like(out) if part is None else part
        for part, out in zip(upstream[:2], kept[6:8], strict=True)
    )
    return *attend_split_backward(*over, *kept, ctx.num_slots, ctx.norm), *[None] * 6


torch.library.register_autograd(attend_split, _gradients, setup_context=_keep)
