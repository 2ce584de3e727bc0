"""Triton kernels of `split`: the few slots of a document beside attention among its tokens.

A program takes one head of a block of tokens of one document; what slots get from a block is stored apart and put
together by a second kernel. The equations are in `split`.
Shapes: N documents of L tokens and S slots, T = N*L, H heads, K head width, B blocks of a document. q, k and v are
(T + N*S, H, K), slots after tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mmldlm.model.kernels.gather_qkv import normalise, normalise_back, turn


@triton.jit
def merge_kernel(
    out, logsum, v, to_slots, of_slots, levels, mixed, num_tokens, length,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Slots into the results of one block, in place; and of each slot's look at the block: highest score, sum, mix."""
    head, block, document = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    at, channel = block * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    exists = at < length
    row, cell = document * length + at, head * WIDTH + channel
    here = row[:, None] * (HEADS * WIDTH) + cell[None, :]
    my_logsum = logsum + (document * HEADS + head) * length + at
    before = tl.load(my_logsum, exists, other=0.0)
    total = before
    for slot in tl.static_range(SLOTS):
        score = tl.load(to_slots + (row * SLOTS + slot) * HEADS + head, exists, other=float("-inf"))
        top = tl.maximum(total, score)
        total = top + tl.log(tl.exp(total - top) + tl.exp(score - top))
    o = tl.load(out + here, exists[:, None], other=0.0).to(tl.float32) * tl.exp(before - total)[:, None]
    values = tl.load(v + here, exists[:, None], other=0.0).to(tl.float32)
    for slot in tl.static_range(SLOTS):
        place = (row * SLOTS + slot) * HEADS + head
        share = tl.exp(tl.load(to_slots + place, exists, other=float("-inf")) - total)
        slot_row = num_tokens + document * SLOTS + slot
        o += share[:, None] * tl.load(v + slot_row * (HEADS * WIDTH) + cell).to(tl.float32)[None, :]
        score = tl.load(of_slots + place, exists, other=float("-inf"))
        top = tl.max(score, 0)
        power = tl.exp(score - top)
        goal = ((document * tl.num_programs(1) + block) * SLOTS + slot) * HEADS + head
        tl.store(levels + 2 * goal, top)
        tl.store(levels + 2 * goal + 1, tl.sum(power, 0))
        tl.store(mixed + goal * WIDTH + channel, tl.sum(power[:, None] * values, 0))
    tl.store(out + here, o, exists[:, None])
    tl.store(my_logsum, total, exists)


@triton.jit
def slots_kernel(
    q, k, v, levels, mixed, out, logsum, num_tokens, blocks, scale,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr, SLOTS_UP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The result of one slot: what the blocks of its document found, and the slots themselves."""
    head, slot, document = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    other, channel, part = tl.arange(0, SLOTS_UP), tl.arange(0, WIDTH), tl.arange(0, CHUNK)
    size, cell, first = HEADS * WIDTH, head * WIDTH + channel, document * SLOTS
    mine = tl.load(q + (num_tokens + first + slot) * size + cell).to(tl.float32)
    at = (num_tokens + first + other)[:, None] * size + cell[None, :]
    real = other < SLOTS
    keys = tl.load(k + at, real[:, None], other=0.0).to(tl.float32)
    score = tl.where(real, tl.sum(mine[None, :] * keys, 1) * scale, float("-inf"))
    top = tl.max(score, 0)
    for start in range(0, blocks, CHUNK):
        goal = ((document * blocks + start + part) * SLOTS + slot) * HEADS + head
        top = tl.maximum(
            top, tl.max(tl.load(levels + 2 * goal, start + part < blocks, other=float("-inf")), 0)
        )
    power = tl.exp(score - top)
    total = tl.sum(power, 0)
    result = tl.sum(power[:, None] * tl.load(v + at, real[:, None], other=0.0).to(tl.float32), 0)
    for start in range(0, blocks, CHUNK):
        inside = start + part < blocks
        goal = ((document * blocks + start + part) * SLOTS + slot) * HEADS + head
        share = tl.exp(tl.load(levels + 2 * goal, inside, other=float("-inf")) - top)
        total += tl.sum(share * tl.load(levels + 2 * goal + 1, inside, other=0.0), 0)
        found = tl.load(mixed + goal[:, None] * WIDTH + channel[None, :], inside[:, None], other=0.0)
        result += tl.sum(share[:, None] * found, 0)
    tl.store(out + (first + slot) * size + cell, result / total)
    tl.store(logsum + (first + slot) * HEADS + head, top + tl.log(total))


@triton.jit
def _halves(at, inside, HALF: tl.constexpr):
    """Both halves of the channels, in fp32."""
    low, high = tl.load(at, inside, other=0.0), tl.load(at + HALF, inside, other=0.0)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def tokens_back_kernel(
    grad, out, logsum, text, q, k, v, slot_grad, slot_out, slot_logsum, grad_q, grad_k, grad_v, cosine, sine, weight,
    grad_text, sums, norm_sums, num_tokens, length, scale, eps,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Gradient of the projections of one block and head; what its tokens add to those of the q, k and v of slots."""
    head, block, document = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    HALF: tl.constexpr = WIDTH // 2
    at, channel = block * ROWS + tl.arange(0, ROWS), tl.arange(0, HALF)
    exists, used = at < length, channel < HALF
    inside = exists[:, None] & used[None, :]
    row, cell = document * length + at, head * WIDTH + channel
    size, tile = HEADS * WIDTH, document * tl.num_programs(1) + block
    here = row[:, None] * size + cell[None, :]
    angle = row[:, None] * HALF + channel[None, :]
    cosines, sines = tl.load(cosine + angle, inside, other=1.0), tl.load(sine + angle, inside, other=0.0)
    for part in tl.static_range(2):
        raw = row[:, None] * (3 * size) + part * size + cell[None, :]
        x_low, x_high = _halves(text + raw, inside, HALF)
        low, high, inverse = x_low, x_high, x_low
        if NORM:
            w_low, w_high = _halves(weight + part * WIDTH + channel, used, HALF)
            x_low, x_high, inverse = normalise(x_low, x_high, eps, WIDTH)
            low, high = x_low * w_low[None, :], x_high * w_high[None, :]
        low, high = turn(low, high, cosines, sines)  # the query or key as attention had it
        low = low.to(text.dtype.element_ty).to(tl.float32)
        high = high.to(text.dtype.element_ty).to(tl.float32)
        d_low, d_high = _halves((grad_q if part == 0 else grad_k) + here, inside, HALF)
        # of a query: the gradient of its result; of a key: the value, and that value's gradient
        e_low, e_high = _halves(grad + here if part == 0 else text + raw + size, inside, HALF)
        f_low, f_high = _halves((out if part == 0 else grad_v) + here, inside, HALF)
        if part == 0:
            my_logsum = tl.load(logsum + (document * HEADS + head) * length + at, exists, other=float("inf"))
            overlap = tl.sum(e_low * f_low + e_high * f_high, 1)
        for slot in tl.static_range(SLOTS):
            slot_row = document * SLOTS + slot
            there, of_slot = slot_row * size + cell, (num_tokens + slot_row) * size + cell
            goal = sums + (((tile * SLOTS + slot) * 3) * HEADS + head) * WIDTH + channel
            y_low, y_high = _halves((k if part == 0 else q) + of_slot, used, HALF)
            score = tl.sum(low * y_low[None, :] + high * y_high[None, :], 1) * scale
            if part == 0:  # my query looks at the slot
                z_low, z_high = _halves(v + of_slot, used, HALF)
                share = tl.exp(score - my_logsum)
                along = tl.sum(e_low * z_low[None, :] + e_high * z_high[None, :], 1)
                pull = share * (along - overlap) * scale
                tl.store(goal + 2 * size, tl.sum(share[:, None] * e_low, 0))
                tl.store(goal + 2 * size + HALF, tl.sum(share[:, None] * e_high, 0))
            else:  # the slot's query looks at my key
                z_low, z_high = _halves(slot_grad + there, used, HALF)
                o_low, o_high = _halves(slot_out + there, used, HALF)
                their_logsum = tl.load(slot_logsum + slot_row * HEADS + head)
                share = tl.where(exists, tl.exp(score - their_logsum), 0.0)
                along = tl.sum(e_low * z_low[None, :] + e_high * z_high[None, :], 1)
                pull = share * (along - tl.sum(z_low * o_low + z_high * o_high, 0)) * scale
                f_low += share[:, None] * z_low[None, :]
                f_high += share[:, None] * z_high[None, :]
            d_low += pull[:, None] * y_low[None, :]
            d_high += pull[:, None] * y_high[None, :]
            tl.store(goal + (1 - part) * size, tl.sum(pull[:, None] * low, 0))
            tl.store(goal + (1 - part) * size + HALF, tl.sum(pull[:, None] * high, 0))
        d_low, d_high = turn(d_low, d_high, cosines, -sines)
        if NORM:
            goal = norm_sums + ((tile * HEADS + head) * 2 + part) * WIDTH + channel
            tl.store(goal, tl.sum(d_low * x_low, 0))
            tl.store(goal + HALF, tl.sum(d_high * x_high, 0))
            d_low, d_high = normalise_back(
                d_low * w_low[None, :], d_high * w_high[None, :], x_low, x_high, inverse, WIDTH
            )
        tl.store(grad_text + raw, d_low, inside)
        tl.store(grad_text + raw + HALF, d_high, inside)
        if part == 1:
            tl.store(grad_text + raw + size, f_low, inside)
            tl.store(grad_text + raw + size + HALF, f_high, inside)


@triton.jit
def _sum_of_blocks(at, blocks, step, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    part, channel = tl.arange(0, CHUNK), tl.arange(0, WIDTH)
    total = tl.zeros([CHUNK, WIDTH], tl.float32)
    for start in range(0, blocks, CHUNK):
        block = start + part
        total += tl.load(at + block[:, None] * step + channel[None, :], (block < blocks)[:, None], other=0.0)
    return tl.sum(total, 0)


@triton.jit
def slots_back_kernel(
    grad, out, logsum, q, k, v, sums, grads, num_tokens, blocks, scale, num_rows,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr, SLOTS_UP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Gradients of q, k and v of the slots of a document: from its tokens, block by block, and from each other."""
    head, document = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot, channel = tl.arange(0, SLOTS_UP), tl.arange(0, WIDTH)
    size, cell, real = HEADS * WIDTH, head * WIDTH + channel, slot < SLOTS
    num_tokens, num_rows = document * 0 + num_tokens, document * 0 + num_rows  # in 64 bits
    inside = real[:, None] & (channel < WIDTH)[None, :]
    here = (document * SLOTS + slot)[:, None] * size + cell[None, :]
    queries = tl.load(q + num_tokens * size + here, inside, other=0.0).to(tl.float32)
    g = tl.load(grad + here, inside, other=0.0).to(tl.float32)
    overlap = tl.sum(g * tl.load(out + here, inside, other=0.0).to(tl.float32), 1)
    my_logsum = tl.load(logsum + (document * SLOTS + slot) * HEADS + head, real, other=float("inf"))
    grad_q = tl.zeros([SLOTS_UP, WIDTH], tl.float32)
    for other in tl.static_range(SLOTS):
        at = (document * SLOTS + other) * size + cell
        key = tl.load(k + num_tokens * size + at).to(tl.float32)
        value = tl.load(v + num_tokens * size + at).to(tl.float32)
        share = tl.exp(tl.sum(queries * key[None, :], 1) * scale - my_logsum)
        pull = share * (tl.sum(g * value[None, :], 1) - overlap) * scale
        first = sums + ((document * blocks * SLOTS + other) * 3) * size + head * WIDTH
        step = SLOTS * 3 * size
        of_tokens = _sum_of_blocks(first, blocks, step, WIDTH, CHUNK)
        grad_q += (
            pull[:, None] * key[None, :] + tl.where(slot == other, 1.0, 0.0)[:, None] * of_tokens[None, :]
        )
        grad_k = tl.sum(pull[:, None] * queries, 0) + _sum_of_blocks(first + size, blocks, step, WIDTH, CHUNK)
        grad_v = tl.sum(share[:, None] * g, 0) + _sum_of_blocks(first + 2 * size, blocks, step, WIDTH, CHUNK)
        tl.store(grads + num_rows * size + at, grad_k)
        tl.store(grads + 2 * num_rows * size + at, grad_v)
    tl.store(grads + here, grad_q, inside)
