"""Triton kernels for the gradients of convolutions and the SGD step; layouts are those of conv_kernels."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from fedlaw.simulation.conv_kernels import shifted


@triton.jit
def input_gradient(
    slope, back, gradient, count, width,
    H: tl.constexpr, W: tl.constexpr, CIN: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PAD: tl.constexpr,
    PIXEL: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, COUT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """gradient (example, H, W, in) of a convolution's input from `slope` (example, OH, OW, out), its output's.

    Grid: (jobs * ceil(width * H * W / BM), ceil(CIN / BN)).
    """
    tiles = tl.cdiv(width * H * W, BM)
    job = (tl.program_id(0) // tiles).to(tl.int64)
    first = tl.program_id(0) % tiles * BM
    rows = tl.load(count + job) * (H * W)
    row = first + tl.arange(0, BM)
    high = row % (H * W) // W + PAD
    wide = row % W + PAD
    live = row < rows
    into = tl.program_id(1) * BN + tl.arange(0, BN)
    kept = into < CIN
    start = slope + (job * width + row // (H * W)) * (OH * OW * COUT)
    back += job * (KH * KW * CIN * COUT)
    BLOCKS: tl.constexpr = (COUT + BK - 1) // BK
    trips = (first < rows).to(tl.int32) * (KH * KW * BLOCKS)  # none for padding
    total = tl.zeros((BM, BN), tl.float32)
    for trip in range(trips):
        tap = trip // BLOCKS
        channel = trip % BLOCKS * BK + tl.arange(0, BK)
        h = high - tap // KW
        w = wide - tap % KW
        inside = live & (h >= 0) & (h < OH) & (w >= 0) & (w < OW)
        at_a = start[:, None] + (h * OW + w)[:, None] * COUT + channel[None, :]
        at_b = back + (tap * CIN + into)[:, None] * COUT + channel[None, :]
        if COUT % BK == 0:
            a = tl.load(at_a, mask=inside[:, None], other=0.0)
            b = tl.load(at_b, mask=kept[:, None], other=0.0)
        else:
            known = (channel < COUT)[None, :]
            a = tl.load(at_a, mask=inside[:, None] & known, other=0.0)
            b = tl.load(at_b, mask=kept[:, None] & known, other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
    at = gradient + (job * width * (H * W) + row)[:, None] * CIN + into[None, :]
    tl.store(at, total, mask=live[:, None] & kept[None, :])


@triton.jit
def weight_step(
    x, slope, param, copy, back, count, lr, width,
    H: tl.constexpr, W: tl.constexpr, CIN: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PAD: tl.constexpr,
    PIXEL: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, COUT: tl.constexpr,
    COPY: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Weights moved by -lr times their gradient, in both of their layouts: BM of (tap, in) and BN of out.

    With COPY also in `copy` (job, out * tap * in), which has another precision; so may `back`.

    Grid: (jobs * ceil(KH * KW * CIN / BM), ceil(COUT / BN)).
    """
    INNER: tl.constexpr = KH * KW * CIN
    TILES: tl.constexpr = (INNER + BM - 1) // BM
    job = (tl.program_id(0) // TILES).to(tl.int64)
    lowest = tl.program_id(0) % TILES * BM
    rows = tl.load(count + job) * (OH * OW)
    k = lowest + tl.arange(0, BM)
    if CIN % BM == 0:  # one tap: its shift is a scalar
        below = lowest // CIN // KW - PAD
        right = lowest // CIN % KW - PAD
        channel = (lowest % CIN + tl.arange(0, BM))[None, :]
        known = True
    else:
        below = (k // CIN // KW - PAD)[None, :]
        right = (k // CIN % KW - PAD)[None, :]
        channel = (k % CIN)[None, :]
        known = (k < INNER)[None, :]
    out = tl.program_id(1) * BN + tl.arange(0, BN)
    kept = out < COUT
    x += job * width * (H * W * CIN)
    slope += job * width * (OH * OW * COUT)
    total = tl.zeros((BM, BN), tl.float32)
    for at in range(0, rows, BK):
        row = at + tl.arange(0, BK)
        live = row < rows
        image = x + row // (OH * OW) * (H * W * CIN)
        a = shifted(image, row % (OH * OW) // OW, row % OW, live, below, right, channel, known, H, W, PIXEL)
        b = tl.load(slope + row[:, None] * COUT + out[None, :], mask=live[:, None] & kept[None, :], other=0.0)
        total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION)
    here = kept[:, None] & (k < INNER)[None, :]
    at_param = param + job * (COUT * (INNER + 3)) + out[:, None] * INNER + k[None, :]
    moved = tl.load(at_param, mask=here, other=0.0) - lr * tl.trans(total)
    tl.store(at_param, moved, mask=here)
    if COPY:
        tl.store(copy + job * (COUT * INNER) + out[:, None] * INNER + k[None, :], moved, mask=here)
    at_back = back + job * (INNER * COUT) + k[:, None] * COUT + out[None, :]
    tl.store(at_back, tl.trans(moved), mask=(k < INNER)[:, None] & kept[None, :])


@triton.jit
def sum_step(param, partial, lr, width, STEP: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """param (job, SIZE) moved by -lr times the sum of partial (job, width, SIZE) over the examples.

    A job's parameters begin STEP numbers behind those of the job before. Grid: (jobs, ceil(SIZE / BLOCK)).
    """
    job = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < SIZE
    total = tl.zeros((BLOCK,), tl.float32)
    for sample in range(width):
        total += tl.load(partial + (job * width + sample) * SIZE + at, mask=here, other=0.0)
    old = tl.load(param + job * STEP + at, mask=here, other=0.0)
    tl.store(param + job * STEP + at, old - lr * total, mask=here)
