"""Triton kernels for blocks of convolution, group normalization, ReLU and 2x2 max-pooling, a model for every job.

A convolution is a matrix product whose rows are pixels, whose inner dimension runs over (tap, input channel), and
whose columns are output channels; its left factor is read from the image and never formed. A block's output is
computed in four tiles, one for each corner of the pooling window, whose rows are windows ("cells"): pooling is then
elementwise. A tile holds a whole example and whole groups of channels, so that it can be normalized before anything
is written.

Layouts, with the examples of all jobs behind each other, `width` for each job:
    x, pooled    (example, height, width, channel). The first block has few channels: its images have a border of
                 zeros and pixels of a power of two, and a row of its kernel counts as one tap of many channels, so
                 that taps overlap: PIXEL numbers lie between a pixel and the next, CIN belong to a tap
    normal       (example, height, width, channel): the normalized convolution, kept for the backward pass, which
                 turns it into the gradient with respect to the convolution's output
    rstd         (example, channel): one over the deviation that it was divided by
    param        (job, out * tap * in + 3 * out): the weights by (out, tap, in), as the forward pass reads them, the
                 bias of the convolution, weight (gamma) and bias (beta) of the normalization
    back         (job, tap, in, out): the same weights as gradients read them (see conv_gradients)
`count` (job,) is the number of real examples; those behind them are padding, and no work is done for them.
"""

# Triton's language only looks like Python: arguments are pointers, types are those of their elements.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _split_dot(a, b, total, PRECISION: tl.constexpr):
    """total (splits, I, J) + a^T b for a (rows, I), b (rows, J): each warp sums over its share of the rows."""
    SPLIT: tl.constexpr = total.shape[0]
    SHARE: tl.constexpr = a.shape[0] // SPLIT
    a = tl.permute(tl.reshape(a, (SPLIT, SHARE, a.shape[1])), (0, 2, 1))
    b = tl.reshape(b, (SPLIT, SHARE, b.shape[1]))
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def _channels(block, GROUPS: tl.constexpr, SIZE: tl.constexpr, BG: tl.constexpr, BS: tl.constexpr):
    """The output channels of a tile of BG groups, each of SIZE channels padded to BS, and which are real."""
    n = tl.arange(0, BG * BS)
    group = block * BG + n // BS
    member = n % BS
    return group * SIZE + member, (group < GROUPS) & (member < SIZE)


@triton.jit
def _over_group(v, BG: tl.constexpr, BS: tl.constexpr):
    """Per-channel numbers (1, BG * BS) replaced by their sum over the channel's group."""
    total = tl.sum(tl.reshape(v, (1, BG, BS)), 2)
    return tl.reshape(tl.broadcast_to(total[:, :, None], (1, BG, BS)), (1, BG * BS))


@triton.jit
def shifted(
    x, high, wide, live, below, right, channel, known, H: tl.constexpr, W: tl.constexpr, PIXEL: tl.constexpr
):
    """Pixels (high + below, wide + right) of every row's image, zero outside: (rows, channels)."""
    h = high[:, None] + below
    w = wide[:, None] + right
    inside = (h >= 0) & (h < H) & (w >= 0) & (w < W) & live[:, None] & known
    return tl.load(x[:, None] + ((h * W + w) * PIXEL + channel), mask=inside, other=0.0)


@triton.jit
def _convolve(
    x, weight, high, wide, live, out, kept, trips,
    H: tl.constexpr, W: tl.constexpr, CIN: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    PAD: tl.constexpr, PIXEL: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The convolution of one image at the four corners of its cells: four tiles (cells, channels)."""
    INNER: tl.constexpr = KH * KW * CIN
    c0 = tl.zeros((high.shape[0], out.shape[0]), tl.float32)
    c1 = tl.zeros((high.shape[0], out.shape[0]), tl.float32)
    c2 = tl.zeros((high.shape[0], out.shape[0]), tl.float32)
    c3 = tl.zeros((high.shape[0], out.shape[0]), tl.float32)
    for trip in range(trips):
        k = trip * BK + tl.arange(0, BK)
        if CIN % BK == 0:  # one tap at a time: its shift is a scalar
            tap = trip * BK // CIN
            below = tap // KW - PAD
            right = tap % KW - PAD
            channel = (trip * BK % CIN + tl.arange(0, BK))[None, :]
            known = True
            b = tl.load(weight + out[:, None] * INNER + k[None, :], mask=kept[:, None], other=0.0)
        else:
            below = (k // CIN // KW - PAD)[None, :]
            right = (k // CIN % KW - PAD)[None, :]
            channel = (k % CIN)[None, :]
            known = (k < INNER)[None, :]
            b = tl.load(weight + out[:, None] * INNER + k[None, :], mask=kept[:, None] & known, other=0.0)
        a = shifted(x, high, wide, live, below, right, channel, known, H, W, PIXEL)
        b = tl.trans(b.to(a.dtype))
        c0 = tl.dot(a, b, c0, input_precision=PRECISION)
        a = shifted(x, high, wide + 1, live, below, right, channel, known, H, W, PIXEL)
        c1 = tl.dot(a, b, c1, input_precision=PRECISION)
        a = shifted(x, high + 1, wide, live, below, right, channel, known, H, W, PIXEL)
        c2 = tl.dot(a, b, c2, input_precision=PRECISION)
        a = shifted(x, high + 1, wide + 1, live, below, right, channel, known, H, W, PIXEL)
        c3 = tl.dot(a, b, c3, input_precision=PRECISION)
    return c0, c1, c2, c3


@triton.jit
def _normalize(
    c0, c1, c2, c3, v0, v1, v2, v3, kept, numbers, eps,
    BG: tl.constexpr, BS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Zero mean and unit variance over groups of `numbers` numbers; also 1 / deviation (1, N).

    What is no real position (v0..v3) or channel (kept) becomes 0; where all are real (WHOLE), none is looked at.
    """
    if not WHOLE:
        c0 = tl.where(v0[:, None] & kept, c0, 0.0)
        c1 = tl.where(v1[:, None] & kept, c1, 0.0)
        c2 = tl.where(v2[:, None] & kept, c2, 0.0)
        c3 = tl.where(v3[:, None] & kept, c3, 0.0)
    mean = _over_group(tl.sum((c0 + c1) + (c2 + c3), 0)[None, :], BG, BS) / numbers
    c0 -= mean
    c1 -= mean
    c2 -= mean
    c3 -= mean
    if not WHOLE:
        c0 = tl.where(v0[:, None] & kept, c0, 0.0)
        c1 = tl.where(v1[:, None] & kept, c1, 0.0)
        c2 = tl.where(v2[:, None] & kept, c2, 0.0)
        c3 = tl.where(v3[:, None] & kept, c3, 0.0)
    squares = (c0 * c0 + c1 * c1) + (c2 * c2 + c3 * c3)
    inverse = 1.0 / tl.sqrt(_over_group(tl.sum(squares, 0)[None, :], BG, BS) / numbers + eps)
    return c0 * inverse, c1 * inverse, c2 * inverse, c3 * inverse, inverse


@triton.jit
def _denormalize(n0, n1, n2, n3, gradient, gamma, beta, inverse, numbers, BG: tl.constexpr, BS: tl.constexpr):
    """Back through max-pooling, ReLU and normalization.

    n0..n3 (cells, N) are the normalized corners, `gradient` (cells, N) is that of the pooled output, the others are
    (1, N). Returns the corners' gradients with respect to the convolution, then those of gamma and beta (1, N).
    """
    z0 = n0 * gamma + beta
    z1 = n1 * gamma + beta
    z2 = n2 * gamma + beta
    z3 = n3 * gamma + beta
    p1 = z1 > z0  # the first of equals wins
    best = tl.where(p1, z1, z0)
    p2 = z2 > best
    best = tl.where(p2, z2, best)
    p3 = z3 > best
    best = tl.where(p3, z3, best)
    g = tl.where(best > 0, gradient, 0.0)
    g3 = tl.where(p3, g, 0.0)
    g2 = tl.where(p2 & (p3 == 0), g, 0.0)
    g1 = tl.where(p1 & (p2 == 0) & (p3 == 0), g, 0.0)
    g0 = tl.where((p1 == 0) & (p2 == 0) & (p3 == 0), g, 0.0)
    d_beta = tl.sum(g, 0)[None, :]
    d_gamma = tl.sum((g0 * n0 + g1 * n1) + (g2 * n2 + g3 * n3), 0)[None, :]
    level = _over_group(gamma * d_beta, BG, BS) / numbers
    slope = _over_group(gamma * d_gamma, BG, BS) / numbers
    g0 = inverse * (gamma * g0 - level - n0 * slope)
    g1 = inverse * (gamma * g1 - level - n1 * slope)
    g2 = inverse * (gamma * g2 - level - n2 * slope)
    g3 = inverse * (gamma * g3 - level - n3 * slope)
    return g0, g1, g2, g3, d_gamma, d_beta


@triton.jit
def block_forward(
    x, weight, param, count, pooled, normal, rstd, width, eps, STEP: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, CIN: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PAD: tl.constexpr,
    PIXEL: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    CELLS: tl.constexpr, BG: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr, KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """pooled = max-pool(ReLU(group-norm(conv(x)))) of one example's BG groups; `normal` and `rstd` if KEEP.

    `weight` points to the first job's weights, STEP numbers before the next job's: those of `param`, or a copy of
    them in another precision. Grid: (jobs * width, ceil(GROUPS / BG)).
    """
    COLUMNS: tl.constexpr = (OW + 1) // 2
    REAL: tl.constexpr = (OH + 1) // 2 * COLUMNS
    WHOLE: tl.constexpr = OH % 2 == 0 and OW % 2 == 0 and REAL == CELLS and SIZE == BS
    COUT: tl.constexpr = GROUPS * SIZE
    INNER: tl.constexpr = KH * KW * CIN
    job = (tl.program_id(0) // width).to(tl.int64)
    first = tl.program_id(0) % width
    real = tl.load(count + job)
    weight += job * STEP
    scale = param + job * (COUT * (INNER + 3)) + COUT * INNER
    out, kept = _channels(tl.program_id(1), GROUPS, SIZE, BG, BS)
    cell = tl.arange(0, CELLS)
    sample = first + tl.zeros((CELLS,), tl.int32)
    high = cell // COLUMNS * 2
    wide = cell % COLUMNS * 2
    live = (sample < real) & (cell < REAL)
    example = job * width + sample
    trips = (first < real).to(tl.int32) * ((INNER + BK - 1) // BK)  # none for padding
    c0, c1, c2, c3 = _convolve(
        x + example * (H * W * PIXEL), weight, high, wide, live, out, kept, trips,
        H, W, CIN, KH, KW, PAD, PIXEL, BK, PRECISION,
    )  # fmt: skip
    bias = tl.load(scale + out, mask=kept, other=0.0)[None, :]
    gamma = tl.load(scale + COUT + out, mask=kept, other=0.0)[None, :]
    beta = tl.load(scale + 2 * COUT + out, mask=kept, other=0.0)[None, :]
    v0 = cell < REAL
    v1 = v0 & (wide + 1 < OW)
    v2 = v0 & (high + 1 < OH)
    v3 = v1 & v2
    c0, c1, c2, c3, inverse = _normalize(
        c0 + bias, c1 + bias, c2 + bias, c3 + bias, v0, v1, v2, v3, kept[None, :],
        OH * OW * SIZE, eps, BG, BS, WHOLE,
    )  # fmt: skip
    if KEEP:
        at = normal + example[:, None] * (OH * OW * COUT) + (high * OW + wide)[:, None] * COUT + out[None, :]
        here = live[:, None] & kept[None, :]
        tl.store(at, c0, mask=here & v0[:, None])
        tl.store(at + COUT, c1, mask=here & v1[:, None])
        tl.store(at + OW * COUT, c2, mask=here & v2[:, None])
        tl.store(at + (OW + 1) * COUT, c3, mask=here & v3[:, None])
        s = first + tl.arange(0, 1)
        at = rstd + (job * width + s)[:, None] * COUT + out[None, :]
        tl.store(at, inverse, mask=(s < real)[:, None] & kept[None, :])
    c0 = c0 * gamma + beta
    c1 = c1 * gamma + beta
    c2 = c2 * gamma + beta
    c3 = c3 * gamma + beta
    best = tl.where(c1 > c0, c1, c0)
    best = tl.where(c2 > best, c2, best)
    best = tl.where(c3 > best, c3, best)
    best = tl.where(best <= 0, 0.0, best)  # NaN stays NaN
    best = tl.where(live[:, None], best, 0.0)  # padding must be finite: it meets a zero weight later
    inside = (sample < width) & (cell < REAL) & (high + 1 < OH) & (wide + 1 < OW)
    place = (high // 2 * (OW // 2) + wide // 2) * COUT
    at = pooled + example[:, None] * (OH // 2 * (OW // 2) * COUT) + place[:, None] + out[None, :]
    tl.store(at, best, mask=inside[:, None] & kept[None, :])


@triton.jit
def norm_backward(
    normal, rstd, gradient, scale, partial, count, width, STEP: tl.constexpr,
    OH: tl.constexpr, OW: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, CELLS: tl.constexpr,
    BG: tl.constexpr, BS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """From the gradient of a block's output, for one example's BG groups: that of its convolution, over `normal`.

    `scale` points to the three rows behind the first job's weights, STEP numbers before the next job's. The
    example's share in the gradients of bias, gamma and beta goes to `partial` (example, 3, out).
    Grid: (jobs * width, ceil(GROUPS / BG)).
    """
    COLUMNS: tl.constexpr = (OW + 1) // 2
    REAL: tl.constexpr = (OH + 1) // 2 * COLUMNS
    COUT: tl.constexpr = GROUPS * SIZE
    example = tl.program_id(0).to(tl.int64)
    job = example // width
    scale += job * STEP
    alive = (example % width < tl.load(count + job)).to(
        tl.int32
    )  # padding reads and writes nothing but zeros
    out, kept = _channels(tl.program_id(1), GROUPS, SIZE, BG, BS)
    cell = tl.arange(0, CELLS)
    high = cell // COLUMNS * 2
    wide = cell % COLUMNS * 2
    v0 = cell < REAL * alive
    v1 = v0 & (wide + 1 < OW)
    v2 = v0 & (high + 1 < OH)
    v3 = v1 & v2
    m0 = v0[:, None] & kept[None, :]
    m1 = v1[:, None] & kept[None, :]
    m2 = v2[:, None] & kept[None, :]
    m3 = v3[:, None] & kept[None, :]
    at = normal + example * (OH * OW * COUT) + (high * OW + wide)[:, None] * COUT + out[None, :]
    n0 = tl.load(at, mask=m0, other=0.0).to(tl.float32)
    n1 = tl.load(at + COUT, mask=m1, other=0.0).to(tl.float32)
    n2 = tl.load(at + OW * COUT, mask=m2, other=0.0).to(tl.float32)
    n3 = tl.load(at + (OW + 1) * COUT, mask=m3, other=0.0).to(tl.float32)
    place = (high // 2 * (OW // 2) + wide // 2) * COUT
    came = gradient + example * (OH // 2 * (OW // 2) * COUT) + place[:, None] + out[None, :]
    g = tl.load(came, mask=m3, other=0.0).to(tl.float32)
    gamma = tl.load(scale + COUT + out, mask=kept, other=0.0)[None, :]
    beta = tl.load(scale + 2 * COUT + out, mask=kept, other=0.0)[None, :]
    inverse = tl.load(rstd + example * COUT + out, mask=kept, other=0.0)[None, :]
    g0, g1, g2, g3, d_gamma, d_beta = _denormalize(
        n0, n1, n2, n3, g, gamma, beta, inverse, OH * OW * SIZE, BG, BS
    )
    g0 = tl.where(m0, g0, 0.0)
    g1 = tl.where(m1, g1, 0.0)
    g2 = tl.where(m2, g2, 0.0)
    g3 = tl.where(m3, g3, 0.0)
    tl.store(at, g0, mask=m0)
    tl.store(at + COUT, g1, mask=m1)
    tl.store(at + OW * COUT, g2, mask=m2)
    tl.store(at + (OW + 1) * COUT, g3, mask=m3)
    to = partial + example * (3 * COUT) + out[None, :]
    if BIAS:
        tl.store(to, tl.sum((g0 + g1) + (g2 + g3), 0)[None, :], mask=kept[None, :])
    else:
        tl.store(to, tl.zeros_like(d_beta), mask=kept[None, :])
    tl.store(to + COUT, d_gamma, mask=kept[None, :])
    tl.store(to + 2 * COUT, d_beta, mask=kept[None, :])


@triton.jit
def first_backward(
    x, param, gradient, partial, count, width, eps,
    H: tl.constexpr, W: tl.constexpr, CIN: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PAD: tl.constexpr,
    PIXEL: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    CELLS: tl.constexpr, BG: tl.constexpr, BS: tl.constexpr, SPAN: tl.constexpr, SPLIT: tl.constexpr,
    BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All gradients of the first block for one example's BG groups: the block, whose input is thin, is done again.

    KW is 1 and CIN a row of the kernel, of which SPAN numbers are real. The gradients go to `partial`
    (example, ...), laid out as `param`. Grid: (jobs * width, ceil(GROUPS / BG)).
    """
    COLUMNS: tl.constexpr = (OW + 1) // 2
    REAL: tl.constexpr = (OH + 1) // 2 * COLUMNS
    WHOLE: tl.constexpr = OH % 2 == 0 and OW % 2 == 0 and REAL == CELLS and SIZE == BS
    COUT: tl.constexpr = GROUPS * SIZE
    INNER: tl.constexpr = KH * KW * CIN
    N: tl.constexpr = BG * BS
    example = tl.program_id(0).to(tl.int64)
    job = example // width
    weight = param + job * (COUT * (INNER + 3))
    scale = weight + COUT * INNER
    alive = (example % width < tl.load(count + job)).to(tl.int32)
    out, kept = _channels(tl.program_id(1), GROUPS, SIZE, BG, BS)
    cell = tl.arange(0, CELLS)
    high = cell // COLUMNS * 2
    wide = cell % COLUMNS * 2
    live = cell < REAL * alive
    v1 = live & (wide + 1 < OW)
    v2 = live & (high + 1 < OH)
    v3 = v1 & v2
    start = x + example * (H * W * PIXEL) + tl.zeros((CELLS,), tl.int32)
    c0, c1, c2, c3 = _convolve(
        start, weight, high, wide, live, out, kept, alive * KH,
        H, W, CIN, KH, KW, PAD, PIXEL, CIN, PRECISION,
    )  # fmt: skip
    bias = tl.load(scale + out, mask=kept, other=0.0)[None, :]
    gamma = tl.load(scale + COUT + out, mask=kept, other=0.0)[None, :]
    beta = tl.load(scale + 2 * COUT + out, mask=kept, other=0.0)[None, :]
    c0, c1, c2, c3, inverse = _normalize(
        c0 + bias, c1 + bias, c2 + bias, c3 + bias, live, v1, v2, v3, kept[None, :],
        OH * OW * SIZE, eps, BG, BS, WHOLE,
    )  # fmt: skip
    place = (high // 2 * (OW // 2) + wide // 2) * COUT
    came = gradient + example * (OH // 2 * (OW // 2) * COUT) + place[:, None] + out[None, :]
    g = tl.load(came, mask=v3[:, None] & kept[None, :], other=0.0).to(tl.float32)
    g0, g1, g2, g3, d_gamma, d_beta = _denormalize(
        c0, c1, c2, c3, g, gamma, beta, inverse, OH * OW * SIZE, BG, BS
    )
    if not WHOLE:
        g0 = tl.where(live[:, None], g0, 0.0)
        g1 = tl.where(v1[:, None], g1, 0.0)
        g2 = tl.where(v2[:, None], g2, 0.0)
        g3 = tl.where(v3[:, None], g3, 0.0)
    to = partial + example * ((INNER + 3) * COUT)
    channel = tl.arange(0, CIN)
    real = (channel < SPAN)[None, :]
    rows = to + out[:, None] * INNER + channel[None, :]
    channel = channel[None, :]
    for below in range(KH):
        total = tl.zeros((SPLIT, CIN, N), tl.float32)
        a = shifted(start, high, wide, live, below, 0, channel, True, H, W, PIXEL)
        total = _split_dot(a, g0.to(a.dtype), total, PRECISION)
        a = shifted(start, high, wide + 1, live, below, 0, channel, True, H, W, PIXEL)
        total = _split_dot(a, g1.to(a.dtype), total, PRECISION)
        a = shifted(start, high + 1, wide, live, below, 0, channel, True, H, W, PIXEL)
        total = _split_dot(a, g2.to(a.dtype), total, PRECISION)
        a = shifted(start, high + 1, wide + 1, live, below, 0, channel, True, H, W, PIXEL)
        total = _split_dot(a, g3.to(a.dtype), total, PRECISION)
        # Behind a row of the kernel lie weights that are zero and stay so.
        tl.store(rows + below * CIN, tl.where(real, tl.trans(tl.sum(total, 0)), 0.0), mask=kept[:, None])
    to += INNER * COUT + out[None, :]
    if BIAS:
        tl.store(to, tl.sum((g0 + g1) + (g2 + g3), 0)[None, :], mask=kept[None, :])
    else:
        tl.store(to, tl.zeros_like(d_beta), mask=kept[None, :])
    tl.store(to + COUT, d_gamma, mask=kept[None, :])
    tl.store(to + 2 * COUT, d_beta, mask=kept[None, :])
