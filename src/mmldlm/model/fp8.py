"""Linear layers whose three products (forward, gradient of the input, gradient of the weight) are computed in fp8.

Values are e4m3 with a scale for each row, the scale a power of two. For y = x W' + b with gradient g of y:

    y  = (x8 W8') * x_scale * w_scale' + b                     scales of rows stay outside the sum over columns
    dx = (g8 (W8 * w_scale / w_top)) * g_scale * w_top         a sum over rows of W: their scales go into its values
    dW = (g8 * s / s_top)' x8 * s_top, s = g_scale * x_scale   likewise over the rows of g and x

Accumulation is fp32, results are bf16, those of dW fp32. Weights stay fp32 and nothing is remembered between steps: a
weight is rounded again in every pass, which costs less than one percent of it. Rounding happens in the pass over memory
that computes the norm, GELU or its gradient; otherwise in one of its own (`kernels.quantize`). Without Triton plain
PyTorch does the same, for tests.
Shapes: M rows, D inputs, E outputs.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmldlm.model.operators import operator

FP8 = torch.float8_e4m3fn
_MULTIPLE, _WIDEST = 16, 16384
_FLOOR = 2.0**-60
"""Rows whose values are all smaller, zeros among them, have the scale of this value."""
_TINY = 2.0**-126
Rows = tuple[Tensor, Tensor, Tensor | None]


def fits(linear: nn.Linear) -> bool:
    """Whether the units for fp8 take a matrix of these sides."""
    sides = (linear.in_features, linear.out_features)
    return all(side % _MULTIPLE == 0 and side <= _WIDEST for side in sides)


class Rounded(NamedTuple):
    """Rows in eight bits."""

    x: Tensor
    """(M, D) what was rounded: it takes the gradient, and its values are not read again."""
    q: Tensor
    """(M, D) in e4m3."""
    scale: Tensor
    """(M, 1)"""


def round_rows(x: Tensor) -> Rounded:
    """(M, D) in eight bits."""
    return Rounded(x, *quantize8(x.detach(), False))


def linear8(linear: nn.Linear, rows: Rounded) -> Tensor:
    """(M, D) -> (M, E) in bf16."""
    return multiply8(*rows, linear.weight, linear.bias, False)


def mlp8(first: nn.Linear, second: nn.Linear, rows: Rounded) -> Tensor:
    """Linear, GELU, linear. GELU is computed where its result is rounded, its slope where its gradient is."""
    hidden = multiply8(*rows, first.weight, first.bias, True)
    return multiply8(hidden, *quantize8(hidden.detach(), True), second.weight, second.bias, False)


def product8(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, **options: Any) -> Tensor:
    """a (m, k) times the transpose of b (n, k), with scales (m, 1) and (1, n), or one for each."""
    with torch.autocast(
        a.device.type, enabled=False
    ):  # on a CPU the product is made of others, which it would round
        return torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, **options)


def _kernels_run(x: Tensor) -> bool:
    return x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def quantize_rows(x: Tensor, inner: Tensor | None = None, *, gelu: bool = False, sums: bool = False) -> Rows:
    """As the kernel of this name, which is used where it runs."""
    if _kernels_run(x):
        from mmldlm.model.kernels import quantize

        return quantize.quantize_rows(x, inner, gelu=gelu, sums=sums)
    value = x.float()
    if gelu:
        value = value * _open_share(value)
    if inner is not None:
        value = value * _slope(inner.float())
    largest = value.abs().amax(1, keepdim=True).clamp(min=_FLOOR)
    exponent = torch.frexp(largest).exponent - 1
    scaled = torch.ldexp(value, 7 - exponent)
    scale = torch.ldexp(torch.ones_like(largest), exponent - 7)
    return (scaled + (scaled - scaled)).to(FP8), scale, value.sum(0) if sums else None


def _open_share(h: Tensor) -> Tensor:
    """GELU in its form with tanh is h times this."""
    return torch.sigmoid(1.5957691216057308 * (h + 0.044715 * h * h * h))


def _slope(h: Tensor) -> Tensor:
    """Derivative of GELU."""
    share = _open_share(h)
    return share + h * 1.5957691216057308 * (1.0 + 0.134145 * h * h) * share * (1.0 - share)


def transpose(q: Tensor, factor: Tensor | None = None) -> Tensor:
    """As the kernel of this name, which is used where it runs."""
    if _kernels_run(q):
        from mmldlm.model.kernels import quantize

        return quantize.transpose(q, factor)
    q = q if factor is None else (q.float() * factor).to(FP8)
    filler = -q.shape[0] % _MULTIPLE
    return torch.nn.functional.pad(q.view(torch.uint8), (0, 0, 0, filler)).t().contiguous().view(FP8)


def _common_scale(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Scales (m, 1) as shares of the largest, and the largest: what a sum over these rows can have outside."""
    top = scale.amax().clamp(min=_TINY)
    return scale / top, top


@operator
def quantize8(x: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    """x or GELU of x, (M, D), in e4m3 with scales (M, 1)."""
    return quantize_rows(x, gelu=gelu)[:2]


@torch.library.register_fake(quantize8)
def _(x: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=FP8), x.new_empty((x.shape[0], 1), dtype=torch.float32)


@operator
def multiply8(x: Tensor, q: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool) -> Tensor:
    """(M, D) in e4m3 -> (M, E). The values of x are not read: its gradient is that of what was rounded to q.

    `gelu`: what comes back is the gradient of GELU of the result.
    """
    w, w_scale, _ = quantize_rows(weight)
    bias = None if bias is None else bias.to(torch.bfloat16)
    return product8(
        q, w, scale, w_scale.view(1, -1), bias=bias, out_dtype=torch.bfloat16, use_fast_accum=True
    )


@torch.library.register_fake(multiply8)
def _(x: Tensor, q: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool) -> Tensor:
    return q.new_empty((q.shape[0], weight.shape[0]), dtype=torch.bfloat16)


@operator
def multiply8_backward(
    grad: Tensor, q: Tensor, scale: Tensor, weight: Tensor, hidden: Tensor | None, needed: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x (M, D), weight (E, D) and bias (E,); empty where they are not needed.

    `hidden`: the result of the forward product, where `grad` is the gradient of GELU of it.
    """
    g, g_scale, sums = quantize_rows(grad, hidden, sums=needed[2])
    grad_x, grad_weight, grad_bias = (weight.new_empty(0, dtype=torch.float32) for _ in range(3))
    if needed[0]:
        w, w_scale, _ = quantize_rows(weight)
        shares, top = _common_scale(w_scale)
        columns = top.expand(1, weight.shape[1]).contiguous()
        grad_x = product8(
            g, transpose(w, shares), g_scale, columns, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    if needed[1]:
        shares, top = _common_scale(g_scale * scale)
        # the sum runs over all rows of a batch: too long for the short accumulator of the fast mode
        grad_weight = product8(
            transpose(g, shares), transpose(q), top, torch.ones_like(top), out_dtype=torch.float32, use_fast_accum=False
        )  # fmt: skip
    return grad_x, grad_weight, grad_bias if sums is None else sums


@torch.library.register_fake(multiply8_backward)
def _(
    grad: Tensor, q: Tensor, scale: Tensor, weight: Tensor, hidden: Tensor | None, needed: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (q.shape, weight.shape, weight.shape[:1])
    kinds = (torch.bfloat16 if needed[0] else torch.float32, torch.float32, torch.float32)
    empties = [
        weight.new_empty(shape if wanted else (0,), dtype=kind)
        for shape, kind, wanted in zip(shapes, kinds, needed, strict=True)
    ]
    return empties[0], empties[1], empties[2]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    x, q, scale, weight, bias, gelu = inputs
    ctx.kinds = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
    ctx.save_for_backward(q, scale, weight, output if gelu else None)


def _gradients(ctx: Any, grad: Tensor) -> Any:
    wanted = ctx.needs_input_grad
    needed = [wanted[0], wanted[3], wanted[4]]
    results = multiply8_backward(grad, *ctx.saved_tensors, needed)
    grad_x, grad_weight, grad_bias = (
        result.to(kind) if here else None
        for result, kind, here in zip(results, ctx.kinds, needed, strict=True)
    )
    return grad_x, None, None, grad_weight, grad_bias, None


torch.library.register_autograd(multiply8, _gradients, setup_context=_keep)


@torch.no_grad()
def find_problem(device: torch.device) -> str | None:
    """Why products in fp8 cannot be used on this device, by a try with few rows; None where they work."""
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (
        torch.randn(m, n, generator=generator).to(device) for m, n in ((40, 64), (48, 64), (40, 48))
    )
    bias = torch.ones(48, device=device)
    try:
        q, scale = quantize8(x, False)
        y = multiply8(x, q, scale, weight, bias, False)
        results = [y, *multiply8_backward(grad, q, scale, weight, None, [True, True, True])]
    except Exception as error:
        return str(error).split("\n")[0]
    exact = [x @ weight.t() + bias, grad @ weight, grad.t() @ x, grad.sum(0)]
    errors = [float((a.float() - b).norm() / b.norm()) for a, b in zip(results, exact, strict=True)]
    return None if max(errors) < 0.1 else f"results of a try are wrong by {max(errors):.1%}"
