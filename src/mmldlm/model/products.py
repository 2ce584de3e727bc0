"""Linear layers and the feed-forward half of a stream where our kernels run, with gradients that take fewer passes.

Weights are fp32 and are rounded to the type of the rows for the product. Their gradients leave it in fp32: no rounding,
and no pass that widens them again. GELU and its gradient are part of the product before them where cuBLASLt has that;
else they are passes of our own, the second of which also sums for the bias.
Shapes: M rows, D inputs, E outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmldlm.model.operators import operator


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """(M, D) -> (M, E), for a layer without bias."""
    return product(x, layer.weight)[0]


def mlp(first: nn.Linear, second: nn.Linear, x: Tensor, *, keep: bool) -> Tensor:
    """Linear, GELU, linear. `keep`: the result of GELU stays for the backward pass, which else computes it again."""
    return feed_forward(x, first.weight, first.bias, second.weight, second.bias, keep)[0]


def product_in_fp32(a: Tensor, b: Tensor) -> Tensor:
    """a @ b; not rounded to the type of the factors where the device can do that."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).float()


def _weight_gradient(grad: Tensor, x: Tensor, kind: torch.dtype) -> Tensor:
    """Sum over the rows of grad' x, in the type of the weight, which ranks may share in half precision."""
    return grad.t() @ x if kind == x.dtype else product_in_fp32(grad.t(), x).to(kind)


def _rounded(weight: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """The weight in this type, and what an operator returns of it: empty if no copy was made."""
    if weight.dtype == kind:
        return weight, weight.new_empty((0, 0))
    small = weight.to(kind)
    return small, small


def _only_first(ctx: Any, output: Any) -> None:
    """Only the first result has a gradient; for the others no zeros are allocated."""
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _small_like(weight: Tensor, x: Tensor) -> Tensor:
    return x.new_empty((0, 0) if weight.dtype == x.dtype else weight.shape)


@operator
def product(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(M, D) times the transpose of (E, D), and the weight as it was multiplied with."""
    small, kept = _rounded(weight, x.dtype)
    return x @ small.t(), kept


@torch.library.register_fake(product)
def _(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty((x.shape[0], weight.shape[0])), _small_like(weight, x)


@operator
def product_backward(
    grad: Tensor, x: Tensor, weight: Tensor, small: Tensor, needed: list[bool]
) -> tuple[Tensor, Tensor]:
    """Gradients of x (M, D) and of the weight (E, D); empty where they are not needed."""
    matrix = small if small.numel() else weight
    grad_x, grad_weight = x.new_empty((0, 0)), weight.new_empty((0, 0))
    if needed[0]:
        grad_x = grad @ matrix
    if needed[1]:
        grad_weight = _weight_gradient(grad, x, weight.dtype)
    return grad_x, grad_weight


@torch.library.register_fake(product_backward)
def _(grad: Tensor, x: Tensor, weight: Tensor, small: Tensor, needed: list[bool]) -> tuple[Tensor, Tensor]:
    sizes = [part.shape if here else (0, 0) for part, here in zip((x, weight), needed, strict=True)]
    return x.new_empty(sizes[0]), weight.new_empty(sizes[1])


def _keep_product(ctx: Any, inputs: Any, output: Any) -> None:
    _only_first(ctx, output)
    ctx.save_for_backward(*inputs, output[1])


def _product_gradients(ctx: Any, grad: Tensor, _: Any) -> Any:
    needed = list(ctx.needs_input_grad)
    grads = product_backward(grad, *ctx.saved_tensors, needed)
    return tuple(part if here else None for part, here in zip(grads, needed, strict=True))


torch.library.register_autograd(product, _product_gradients, setup_context=_keep_product)


@operator
def feed_forward(
    x: Tensor, w_in: Tensor, b_in: Tensor, w_out: Tensor, b_out: Tensor, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(M, D) -> (M, D); and for the backward pass the hidden rows (M, E), GELU of them, and both weights."""
    from mmldlm.model.kernels.epilogue import linear_gelu
    from mmldlm.model.kernels.gelu import gelu

    kind = x.dtype
    (small_in, kept_in), (small_out, kept_out) = _rounded(w_in, kind), _rounded(w_out, kind)
    both = linear_gelu(x, small_in, b_in.to(kind))
    if both is None:
        hidden = torch.addmm(b_in.to(kind), x, small_in.t())
        both = hidden, gelu(hidden)
    hidden, active = both
    out = torch.addmm(b_out.to(kind), active, small_out.t())
    return out, hidden, active if keep else x.new_empty((0, 0)), kept_in, kept_out


@torch.library.register_fake(feed_forward)
def _(x: Tensor, w_in: Tensor, b_in: Tensor, w_out: Tensor, b_out: Tensor, keep: bool) -> Any:
    hidden = x.new_empty((x.shape[0], w_in.shape[0]))
    active = torch.empty_like(hidden) if keep else x.new_empty((0, 0))
    return x.new_empty(x.shape), hidden, active, _small_like(w_in, x), _small_like(w_out, x)


@operator
def feed_forward_backward(
    grad: Tensor, x: Tensor, w_in: Tensor, b_in: Tensor, w_out: Tensor, b_out: Tensor, hidden: Tensor,
    active: Tensor, small_in: Tensor, small_out: Tensor, trained: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, w_in, b_in, w_out and b_out; without `trained` the last four are empty."""
    from mmldlm.model.kernels.epilogue import product_with_slope
    from mmldlm.model.kernels.gelu import gelu, gelu_backward, sum_rows

    again = not active.numel() and trained
    matrix = small_out if small_out.numel() else w_out
    grad_hidden = product_with_slope(grad, matrix, hidden)
    if grad_hidden is None:
        grad_hidden, sums, again_active = gelu_backward(grad @ matrix, hidden, again=again)
    else:
        sums, again_active = sum_rows(grad_hidden) if trained else b_in, gelu(hidden) if again else None
    grad_x = grad_hidden @ (small_in if small_in.numel() else w_in)
    if not trained:
        return grad_x, w_in.new_empty((0, 0)), b_in.new_empty(0), w_out.new_empty((0, 0)), b_out.new_empty(0)
    active = active if again_active is None else again_active
    grad_in = _weight_gradient(grad_hidden, x, w_in.dtype)
    grad_out = _weight_gradient(grad, active, w_out.dtype)
    return grad_x, grad_in, sums.to(b_in.dtype), grad_out, sum_rows(grad).to(b_out.dtype)


@torch.library.register_fake(feed_forward_backward)
def _(
    grad: Tensor, x: Tensor, w_in: Tensor, b_in: Tensor, w_out: Tensor, b_out: Tensor, hidden: Tensor,
    active: Tensor, small_in: Tensor, small_out: Tensor, trained: bool,
) -> Any:  # fmt: skip
    sizes = [part.shape if trained else (0,) * part.ndim for part in (w_in, b_in, w_out, b_out)]
    kinds = [part.dtype for part in (w_in, b_in, w_out, b_out)]
    rest = [x.new_empty(size, dtype=kind) for size, kind in zip(sizes, kinds, strict=True)]
    return x.new_empty(x.shape), *rest


def _keep_feed_forward(ctx: Any, inputs: Any, output: Any) -> None:
    _only_first(ctx, output)
    ctx.save_for_backward(*inputs[:5], *output[1:])


def _feed_forward_gradients(ctx: Any, grad: Tensor, *_: Any) -> Any:
    needed = ctx.needs_input_grad[:5]
    grads = feed_forward_backward(grad, *ctx.saved_tensors, any(needed[1:]))
    return *(part if here else None for part, here in zip(grads, needed, strict=True)), None


torch.library.register_autograd(feed_forward, _feed_forward_gradients, setup_context=_keep_feed_forward)
