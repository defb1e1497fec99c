"""Triton kernels for blocks of convolution, group normalization, ReLU and 2x2 max-pooling, a model for every job.

A convolution is a matrix product whose rows are pixels, whose inner dimension runs over (tap, input channel), and
whose columns are output channels; its left factor is read from the image and never formed. A block's output is
computed in four tiles, one for each corner of the pooling window, whose rows are windows ("cells"): pooling is then
elementwise. A tile holds a whole example and whole groups of channels, so that it can be normalized before anything
is written.

Layouts, with the examples of all jobs behind each other, `width` for each job:
    x, pooled    (example, height, width, channel); those of the first block with their border of zeros
    normal       (example, height, width, channel): the normalized convolution, kept for the backward pass, which
                 turns it into the gradient with respect to the convolution's output
    rstd         (example, channel): one over the deviation that it was divided by
    param        (job, out * tap * in + 3 * out): the weights by (out, tap, in), as the forward pass reads them, the
                 bias of the convolution, weight (gamma) and bias (beta) of the normalization
    back         (job, tap, in, out): the same weights as gradients read them (see conv_gradients)
`count` (job,) is the number of real examples; those behind them are padding, and no work is done for them.
"""

# Triton's language only looks like Python: its arguments are pointers, and branches end in returns of their own.
# mypy: ignore-errors
# ruff: noqa: RET505

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot(a, b, total, PRECISION: tl.constexpr):
    """total + a b with operands in the named precision; sums are always float32."""
    if PRECISION == "bf16":
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), total)
    else:
        return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def _split_dot(a, b, total, PRECISION: tl.constexpr):
    """total (splits, I, J) + a^T b for a (rows, I), b (rows, J): each warp sums over its share of the rows."""
    SPLIT: tl.constexpr = total.shape[0]
    SHARE: tl.constexpr = a.shape[0] // SPLIT
    a = tl.permute(tl.reshape(a, (SPLIT, SHARE, a.shape[1])), (0, 2, 1))
    return dot(a, tl.reshape(b, (SPLIT, SHARE, b.shape[1])), total, PRECISION)


@triton.jit
def _channels(block, GROUPS: tl.constexpr, SIZE: tl.constexpr, BG: tl.constexpr, BS: tl.constexpr):
    """The output channels of a tile of BG groups, each of SIZE channels padded to BS, and which are real."""
    n = tl.arange(0, BG * BS)
    group = block * BG + n // BS
    member = n % BS
    return group * SIZE + member, (group < GROUPS) & (member < SIZE)


@triton.jit
def _cells(OH: tl.constexpr, OW: tl.constexpr, CELLS: tl.constexpr):
    """Upper left pixel of every pooling window, and which windows have which of their corners inside the image."""
    COLUMNS: tl.constexpr = (OW + 1) // 2
    cell = tl.arange(0, CELLS)
    v0 = cell < (OH + 1) // 2 * COLUMNS
    high = tl.where(v0, cell // COLUMNS * 2, 0)
    wide = cell % COLUMNS * 2
    v1 = v0 & (wide + 1 < OW)
    v2 = v0 & (high + 1 < OH)
    return high, wide, v0, v1, v2, v1 & v2


@triton.jit
def _over_group(v, BG: tl.constexpr, BS: tl.constexpr):
    """Per-channel numbers (BG * BS,) replaced by their sum over the channel's group."""
    total = tl.sum(tl.reshape(v, (BG, BS)), 1)
    return tl.reshape(tl.broadcast_to(total[:, None], (BG, BS)), (BG * BS,))


@triton.jit
def shifted(
    x, high, wide, live, below, right, channel, known, H: tl.constexpr, W: tl.constexpr, CIN: tl.constexpr
):
    """Pixels (high + below, wide + right) of every row's image, zero outside: (rows, channels)."""
    h = high[:, None] + below
    w = wide[:, None] + right
    inside = (h >= 0) & (h < H) & (w >= 0) & (w < W) & live[:, None] & known
    return tl.load(x + (h * W + w) * CIN + channel, mask=inside, other=0.0)


@triton.jit
def _convolve(
    x, weight, high, wide, v0, out, kept,
    H: tl.constexpr, W: tl.constexpr, CIN: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    PAD: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The convolution of one image at the four corners of its cells: four tiles (cells, channels)."""
    INNER: tl.constexpr = KH * KW * CIN
    zero = tl.zeros((high.shape[0], out.shape[0]), tl.float32)
    c0, c1, c2, c3 = zero, zero, zero, zero
    for at in range(0, INNER, BK):
        k = at + tl.arange(0, BK)
        if CIN % BK == 0:  # one tap at a time: its shift is a scalar
            below = at // CIN // KW - PAD
            right = at // CIN % KW - PAD
            channel = (at % CIN + tl.arange(0, BK))[None, :]
            known = True
            b = tl.load(weight + out[:, None] * INNER + k[None, :], mask=kept[:, None], other=0.0)
        else:
            below = (k // CIN // KW - PAD)[None, :]
            right = (k // CIN % KW - PAD)[None, :]
            channel = (k % CIN)[None, :]
            known = (k < INNER)[None, :]
            b = tl.load(weight + out[:, None] * INNER + k[None, :], mask=kept[:, None] & known, other=0.0)
        b = tl.trans(b)
        a = shifted(x, high, wide, v0, below, right, channel, known, H, W, CIN)
        c0 = dot(a, b, c0, PRECISION)
        a = shifted(x, high, wide + 1, v0, below, right, channel, known, H, W, CIN)
        c1 = dot(a, b, c1, PRECISION)
        a = shifted(x, high + 1, wide, v0, below, right, channel, known, H, W, CIN)
        c2 = dot(a, b, c2, PRECISION)
        a = shifted(x, high + 1, wide + 1, v0, below, right, channel, known, H, W, CIN)
        c3 = dot(a, b, c3, PRECISION)
    return c0, c1, c2, c3


@triton.jit
def _window(x, high, wide, k, W: tl.constexpr, CIN: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr):
    """The kernel's whole window at (high, wide) of a bordered image, a one behind it: (rows, BK)."""
    INNER: tl.constexpr = KH * KW * CIN
    offset = tl.where(k < INNER, k // (KW * CIN) * (W * CIN) + k % (KW * CIN), 0)
    a = tl.load(x + ((high * W + wide) * CIN)[:, None] + offset[None, :])
    return tl.where((k == INNER)[None, :], 1.0, a)


@triton.jit
def _convolve_thin(
    x, weight, high, wide, out, kept,
    W: tl.constexpr, CIN: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """As _convolve, for a bordered image of few channels: BK > KH * KW * CIN, and one product for each corner."""
    INNER: tl.constexpr = KH * KW * CIN
    k = tl.arange(0, BK)
    here = kept[:, None] & (k < INNER)[None, :]
    b = tl.trans(tl.load(weight + out[:, None] * INNER + k[None, :], mask=here, other=0.0))
    zero = tl.zeros((high.shape[0], out.shape[0]), tl.float32)
    c0 = dot(_window(x, high, wide, k, W, CIN, KH, KW), b, zero, PRECISION)
    c1 = dot(_window(x, high, wide + 1, k, W, CIN, KH, KW), b, zero, PRECISION)
    c2 = dot(_window(x, high + 1, wide, k, W, CIN, KH, KW), b, zero, PRECISION)
    c3 = dot(_window(x, high + 1, wide + 1, k, W, CIN, KH, KW), b, zero, PRECISION)
    return c0, c1, c2, c3


@triton.jit
def _normalize(
    c0, c1, c2, c3, bias, v0, v1, v2, v3, kept, numbers, eps,
    BG: tl.constexpr, BS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """(c + bias) with zero mean and unit variance over groups of `numbers` numbers; also 1 / deviation (N,).

    What is no real position (v0..v3) or channel (kept) becomes 0; where all are real (WHOLE), none is looked at.
    """
    c0 += bias[None, :]
    c1 += bias[None, :]
    c2 += bias[None, :]
    c3 += bias[None, :]
    if not WHOLE:
        m0 = v0[:, None] & kept[None, :]
        m1 = v1[:, None] & kept[None, :]
        m2 = v2[:, None] & kept[None, :]
        m3 = v3[:, None] & kept[None, :]
        c0 = tl.where(m0, c0, 0.0)
        c1 = tl.where(m1, c1, 0.0)
        c2 = tl.where(m2, c2, 0.0)
        c3 = tl.where(m3, c3, 0.0)
    mean = (_over_group(tl.sum((c0 + c1) + (c2 + c3), 0), BG, BS) / numbers)[None, :]
    c0 -= mean
    c1 -= mean
    c2 -= mean
    c3 -= mean
    if not WHOLE:
        c0 = tl.where(m0, c0, 0.0)
        c1 = tl.where(m1, c1, 0.0)
        c2 = tl.where(m2, c2, 0.0)
        c3 = tl.where(m3, c3, 0.0)
    squares = (c0 * c0 + c1 * c1) + (c2 * c2 + c3 * c3)
    rstd = 1.0 / tl.sqrt(_over_group(tl.sum(squares, 0), BG, BS) / numbers + eps)
    factor = rstd[None, :]
    return c0 * factor, c1 * factor, c2 * factor, c3 * factor, rstd


@triton.jit
def _denormalize(n0, n1, n2, n3, gradient, gamma, beta, rstd, numbers, BG: tl.constexpr, BS: tl.constexpr):
    """Back through max-pooling, ReLU and normalization.

    n0..n3 (cells, N) are the normalized corners, `gradient` (cells, N) is that of the pooled output. Returns the
    four corners' gradients with respect to the convolution, then those of gamma and beta (N,).
    """
    scale, shift = gamma[None, :], beta[None, :]
    z0 = n0 * scale + shift
    z1 = n1 * scale + shift
    z2 = n2 * scale + shift
    z3 = n3 * scale + shift
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
    # with both in one reduction
    d_beta, d_gamma = tl.split(tl.sum(tl.join(g, (g0 * n0 + g1 * n1) + (g2 * n2 + g3 * n3)), 0))
    level = (_over_group(gamma * d_beta, BG, BS) / numbers)[None, :]
    slope = (_over_group(gamma * d_gamma, BG, BS) / numbers)[None, :]
    factor = rstd[None, :]
    g0 = factor * (scale * g0 - level - n0 * slope)
    g1 = factor * (scale * g1 - level - n1 * slope)
    g2 = factor * (scale * g2 - level - n2 * slope)
    g3 = factor * (scale * g3 - level - n3 * slope)
    return g0, g1, g2, g3, d_gamma, d_beta


@triton.jit
def block_forward(
    x, param, count, pooled, normal, rstd, width, eps,
    H: tl.constexpr, W: tl.constexpr, CIN: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PAD: tl.constexpr,
    OH: tl.constexpr, OW: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, CELLS: tl.constexpr,
    BG: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr, THIN: tl.constexpr, KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """pooled = max-pool(ReLU(group-norm(conv(x)))) of one example's BG groups; `normal` and `rstd` if KEEP.

    Grid: (jobs * width, ceil(GROUPS / BG)).
    """
    WHOLE: tl.constexpr = OH % 2 == 0 and OW % 2 == 0 and OH * OW == 4 * CELLS and SIZE == BS
    COUT: tl.constexpr = GROUPS * SIZE
    INNER: tl.constexpr = KH * KW * CIN
    example = tl.program_id(0).to(tl.int64)
    job = example // width
    out, kept = _channels(tl.program_id(1), GROUPS, SIZE, BG, BS)
    high, wide, v0, v1, v2, v3 = _cells(OH, OW, CELLS)
    place = (high // 2 * (OW // 2) + wide // 2) * COUT
    to = pooled + example * (OH // 2 * (OW // 2) * COUT) + place[:, None] + out[None, :]
    if example % width >= tl.load(count + job):  # padding must be finite: it meets a zero weight later
        tl.store(to, tl.zeros((CELLS, BG * BS), tl.float32), mask=v3[:, None] & kept[None, :])
        return
    weight = param + job * (COUT * (INNER + 3))
    scale = weight + COUT * INNER + out
    x += example * (H * W * CIN)
    if THIN:
        c0, c1, c2, c3 = _convolve_thin(x, weight, high, wide, out, kept, W, CIN, KH, KW, BK, PRECISION)
    else:
        c0, c1, c2, c3 = _convolve(
            x, weight, high, wide, v0, out, kept, H, W, CIN, KH, KW, PAD, BK, PRECISION
        )
    bias = tl.load(scale, mask=kept, other=0.0)
    c0, c1, c2, c3, inverse = _normalize(
        c0, c1, c2, c3, bias, v0, v1, v2, v3, kept, OH * OW * SIZE, eps, BG, BS, WHOLE
    )
    if KEEP:
        at = normal + example * (OH * OW * COUT) + (high * OW + wide)[:, None] * COUT + out[None, :]
        tl.store(at, c0, mask=v0[:, None] & kept[None, :])
        tl.store(at + COUT, c1, mask=v1[:, None] & kept[None, :])
        tl.store(at + OW * COUT, c2, mask=v2[:, None] & kept[None, :])
        tl.store(at + (OW + 1) * COUT, c3, mask=v3[:, None] & kept[None, :])
        tl.store(rstd + example * COUT + out, inverse, mask=kept)
    gamma = tl.load(scale + COUT, mask=kept, other=0.0)[None, :]
    beta = tl.load(scale + 2 * COUT, mask=kept, other=0.0)[None, :]
    best = c0 * gamma + beta
    c1 = c1 * gamma + beta
    c2 = c2 * gamma + beta
    c3 = c3 * gamma + beta
    best = tl.where(c1 > best, c1, best)
    best = tl.where(c2 > best, c2, best)
    best = tl.where(c3 > best, c3, best)
    best = tl.where(best <= 0, 0.0, best)  # NaN stays NaN
    tl.store(to, best, mask=v3[:, None] & kept[None, :])


@triton.jit
def norm_backward(
    normal, rstd, gradient, param, partial, count, width,
    OH: tl.constexpr, OW: tl.constexpr, INNER: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    CELLS: tl.constexpr, BG: tl.constexpr, BS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """From the gradient of a block's output, for one example's BG groups: that of its convolution, over `normal`.

    The example's share in the gradients of bias, gamma and beta goes to `partial` (example, 3, out).
    Grid: (jobs * width, ceil(GROUPS / BG)).
    """
    COUT: tl.constexpr = GROUPS * SIZE
    example = tl.program_id(0).to(tl.int64)
    job = example // width
    out, kept = _channels(tl.program_id(1), GROUPS, SIZE, BG, BS)
    to = partial + example * (3 * COUT) + out
    nothing = tl.zeros((BG * BS,), tl.float32)
    if example % width >= tl.load(count + job):
        tl.store(to, nothing, mask=kept)
        tl.store(to + COUT, nothing, mask=kept)
        tl.store(to + 2 * COUT, nothing, mask=kept)
        return
    high, wide, v0, v1, v2, v3 = _cells(OH, OW, CELLS)
    m0 = v0[:, None] & kept[None, :]
    m1 = v1[:, None] & kept[None, :]
    m2 = v2[:, None] & kept[None, :]
    m3 = v3[:, None] & kept[None, :]
    at = normal + example * (OH * OW * COUT) + (high * OW + wide)[:, None] * COUT + out[None, :]
    n0 = tl.load(at, mask=m0, other=0.0)
    n1 = tl.load(at + COUT, mask=m1, other=0.0)
    n2 = tl.load(at + OW * COUT, mask=m2, other=0.0)
    n3 = tl.load(at + (OW + 1) * COUT, mask=m3, other=0.0)
    place = (high // 2 * (OW // 2) + wide // 2) * COUT
    came = gradient + example * (OH // 2 * (OW // 2) * COUT) + place[:, None] + out[None, :]
    g = tl.load(came, mask=m3, other=0.0)
    scale = param + job * (COUT * (INNER + 3)) + COUT * INNER + out
    gamma = tl.load(scale + COUT, mask=kept, other=0.0)
    beta = tl.load(scale + 2 * COUT, mask=kept, other=0.0)
    inverse = tl.load(rstd + example * COUT + out, mask=kept, other=0.0)
    g0, g1, g2, g3, d_gamma, d_beta = _denormalize(
        n0, n1, n2, n3, g, gamma, beta, inverse, OH * OW * SIZE, BG, BS
    )
    tl.store(at, g0, mask=m0)
    tl.store(at + COUT, g1, mask=m1)
    tl.store(at + OW * COUT, g2, mask=m2)
    tl.store(at + (OW + 1) * COUT, g3, mask=m3)
    if BIAS:
        g0 = tl.where(m0, g0, 0.0)
        g1 = tl.where(m1, g1, 0.0)
        g2 = tl.where(m2, g2, 0.0)
        g3 = tl.where(m3, g3, 0.0)
        tl.store(to, tl.sum((g0 + g1) + (g2 + g3), 0), mask=kept)
    else:
        tl.store(to, nothing, mask=kept)
    tl.store(to + COUT, d_gamma, mask=kept)
    tl.store(to + 2 * COUT, d_beta, mask=kept)


@triton.jit
def first_backward(
    x, param, gradient, partial, count, width, eps,
    H: tl.constexpr, W: tl.constexpr, CIN: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PAD: tl.constexpr,
    OH: tl.constexpr, OW: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, CELLS: tl.constexpr,
    BG: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """All gradients of the first block for one example's BG groups: the block, whose input is thin, is done again.

    They go to `partial` (example, ...), laid out as `param`. Grid: (jobs * width, ceil(GROUPS / BG)).
    """
    WHOLE: tl.constexpr = OH % 2 == 0 and OW % 2 == 0 and OH * OW == 4 * CELLS and SIZE == BS
    COUT: tl.constexpr = GROUPS * SIZE
    INNER: tl.constexpr = KH * KW * CIN
    example = tl.program_id(0).to(tl.int64)
    job = example // width
    out, kept = _channels(tl.program_id(1), GROUPS, SIZE, BG, BS)
    k = tl.arange(0, BK)
    # The one behind the window sums the gradient itself, which is the bias's.
    row = tl.where((k == INNER)[None, :], COUT * INNER + out[:, None], out[:, None] * INNER + k[None, :])
    to = partial + example * (COUT * (INNER + 3))
    here = kept[:, None] & (k <= INNER)[None, :]
    if example % width >= tl.load(count + job):
        nothing = tl.zeros((BG * BS,), tl.float32)
        tl.store(to + row, tl.zeros((BG * BS, BK), tl.float32), mask=here)
        tl.store(to + COUT * (INNER + 1) + out, nothing, mask=kept)
        tl.store(to + COUT * (INNER + 2) + out, nothing, mask=kept)
        return
    high, wide, v0, v1, v2, v3 = _cells(OH, OW, CELLS)
    weight = param + job * (COUT * (INNER + 3))
    scale = weight + COUT * INNER + out
    x += example * (H * W * CIN)
    n0, n1, n2, n3 = _convolve_thin(x, weight, high, wide, out, kept, W, CIN, KH, KW, BK, PRECISION)
    bias = tl.load(scale, mask=kept, other=0.0)
    n0, n1, n2, n3, rstd = _normalize(
        n0, n1, n2, n3, bias, v0, v1, v2, v3, kept, OH * OW * SIZE, eps, BG, BS, WHOLE
    )
    place = (high // 2 * (OW // 2) + wide // 2) * COUT
    came = gradient + example * (OH // 2 * (OW // 2) * COUT) + place[:, None] + out[None, :]
    g = tl.load(came, mask=v3[:, None] & kept[None, :], other=0.0)
    gamma = tl.load(scale + COUT, mask=kept, other=0.0)
    beta = tl.load(scale + 2 * COUT, mask=kept, other=0.0)
    g0, g1, g2, g3, d_gamma, d_beta = _denormalize(
        n0, n1, n2, n3, g, gamma, beta, rstd, OH * OW * SIZE, BG, BS
    )
    if not WHOLE:
        g0 = tl.where(v0[:, None], g0, 0.0)
        g1 = tl.where(v1[:, None], g1, 0.0)
        g2 = tl.where(v2[:, None], g2, 0.0)
        g3 = tl.where(v3[:, None], g3, 0.0)
    total = tl.zeros((SPLIT, BK, BG * BS), tl.float32)
    total = _split_dot(_window(x, high, wide, k, W, CIN, KH, KW), g0, total, PRECISION)
    total = _split_dot(_window(x, high, wide + 1, k, W, CIN, KH, KW), g1, total, PRECISION)
    total = _split_dot(_window(x, high + 1, wide, k, W, CIN, KH, KW), g2, total, PRECISION)
    total = _split_dot(_window(x, high + 1, wide + 1, k, W, CIN, KH, KW), g3, total, PRECISION)
    total = tl.trans(tl.sum(total, 0))
    if not BIAS:
        total = tl.where((k < INNER)[None, :], total, 0.0)
    tl.store(to + row, total, mask=here)
    tl.store(to + COUT * (INNER + 1) + out, d_gamma, mask=kept)
    tl.store(to + COUT * (INNER + 2) + out, d_beta, mask=kept)
