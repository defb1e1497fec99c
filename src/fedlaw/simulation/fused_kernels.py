"""Triton: the whole local training of one client's MLP by one program, its parameters passing through the L2 cache.

Imported only where there is a GPU (or Triton's interpreter, in tests). Names are those of the mathematics: x
(B, D0) a batch, h1 = relu(x W1' + b1), h2 = relu(h1 W2' + b2), z = h2 W3' + b3, g a gradient with respect to what
it is named after. Widths are padded to powers of two (P1, P2, PO), batches to B rows; psi are a job's parameters.

The first layer holds nine tenths of the numbers and is read and written once a step: the loop that moves a tile of
W1 against the gradient multiplies it with the next batch's tile at once.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _operand(x, HALF: tl.constexpr):
    """A factor of a product: in half precision (10 bits of mantissa, as TF32 has) where that is asked for."""
    if HALF:
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16)
    return x


@triton.jit
def _dot(a, b, HALF: tl.constexpr, PRECISION: tl.constexpr):
    return tl.dot(_operand(a, HALF), _operand(b, HALF), input_precision=PRECISION)


@triton.jit
def _batch(order, at, count, row, inputs, labels, D0: tl.constexpr):
    """Where the examples (B, 1) of a batch begin, and their labels (B,); padding repeats the first one."""
    example = tl.load(order + at + tl.where(row < count, row, 0))
    return inputs + (example * D0)[:, None], tl.load(labels + example)


@triton.jit
def _enter(x_rows, w1, D0: tl.constexpr, H1: tl.constexpr, P1: tl.constexpr, B: tl.constexpr,
           BK: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """x W1' (B, P1)."""
    column, unit = tl.arange(0, BK), tl.arange(0, P1)
    z = tl.zeros((B, P1), dtype=tl.float32)
    for k in range(0, D0, BK):
        inside = (k + column) < D0
        x = tl.load(x_rows + (k + column)[None, :], mask=inside[None, :], other=0.0)
        w = tl.load(
            w1 + (unit * D0)[None, :] + (k + column)[:, None],
            mask=inside[:, None] & (unit < H1)[None, :],
            other=0.0,
        )
        z = tl.dot(x, _operand(w, HALF), z, input_precision=PRECISION)
    return z


@triton.jit
def _turn(x_rows, next_rows, back, lr, w1, D0: tl.constexpr, H1: tl.constexpr, P1: tl.constexpr, B: tl.constexpr,
          BK: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """W1 <- W1 - lr g1' x, tile by tile, and with the new W1 the next batch's x W1' (B, P1); `back` is g1'."""
    column, unit = tl.arange(0, BK), tl.arange(0, P1)
    z = tl.zeros((B, P1), dtype=tl.float32)
    place = w1 + (unit * D0)[:, None] + column[None, :]
    own = (unit < H1)[:, None]
    ahead = tl.load(
        place, mask=own & (column < D0)[None, :], other=0.0
    )  # one tile ahead: hides the way to memory
    for k in range(0, D0, BK):
        inside = (k + column) < D0
        w = ahead
        ahead = tl.load(place + BK, mask=own & ((k + BK + column) < D0)[None, :], other=0.0)
        x = tl.load(x_rows + (k + column)[None, :], mask=inside[None, :], other=0.0)
        following = tl.load(next_rows + (k + column)[None, :], mask=inside[None, :], other=0.0)
        w -= lr * tl.dot(back, x, input_precision=PRECISION)
        tl.store(place, w, mask=own & inside[None, :])
        place += BK
        z = tl.dot(following, tl.trans(_operand(w, HALF)), z, input_precision=PRECISION)
    return z


@triton.jit
def _matrix(at, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PR: tl.constexpr, PC: tl.constexpr):
    """Where the numbers of a (ROWS, COLUMNS) matrix lie, and which of the padded (PR, PC) there are."""
    i, j = tl.arange(0, PR), tl.arange(0, PC)
    return at + i[:, None] * COLUMNS + j[None, :], (i < ROWS)[:, None] & (j < COLUMNS)[None, :]


@triton.jit
def _probabilities(
    h, w, b, classes: tl.constexpr, PO: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr
):
    """z shifted to maximum 0 (-inf where there is no class), exp of it, and its sum."""
    unit = tl.arange(0, PO)
    z = _dot(h, tl.trans(w), HALF, PRECISION)
    z += tl.load(b + unit, mask=unit < classes, other=0.0)[None, :]
    z = tl.where((unit < classes)[None, :], z, -float("inf"))
    z = z - tl.max(z, 1)[:, None]
    e = tl.exp(z)
    return z, e, tl.sum(e, 1)


@triton.jit
def train_kernel(
    start, order, sizes, jobs, inputs, labels, psi, lr, epochs, length, batch_size,
    D0: tl.constexpr, H1: tl.constexpr, H2: tl.constexpr, CLASSES: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr,
    PO: tl.constexpr, B: tl.constexpr, BK: tl.constexpr, DP: tl.constexpr, DEEP: tl.constexpr,
    HALF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Job `jobs[program]`: all its SGD steps, in its row of psi (C, DP). Not DEEP, H2 = H1: one hidden layer."""
    job = tl.load(jobs + tl.program_id(0)).to(tl.int64)
    size = tl.load(sizes + job).to(tl.int32)
    order += job * epochs * length
    w1 = psi + job * DP
    b1 = w1 + H1 * D0
    w2, b2 = b1 + H1, b1 + H1 + H2 * H1
    w3 = b2 + H2 if DEEP else w2
    b3 = w3 + CLASSES * H2
    row, unit1, unit2, cls = tl.arange(0, B), tl.arange(0, P1), tl.arange(0, P2), tl.arange(0, PO)
    w2_at, w2_there = _matrix(w2, H2, H1, P2, P1)
    w3_at, w3_there = _matrix(w3, CLASSES, H2, PO, P2)
    batches = tl.cdiv(size, batch_size)
    count = tl.minimum(batch_size, size)
    x_rows, y = _batch(order, 0, count, row, inputs, labels, D0)
    z1 = _enter(x_rows, w1, D0, H1, P1, B, BK, HALF, PRECISION)
    for s in range(batches * epochs):
        bias1 = tl.load(b1 + unit1, mask=unit1 < H1, other=0.0)
        h1 = tl.maximum(z1 + bias1[None, :], 0.0)
        weights3 = tl.load(w3_at, mask=w3_there, other=0.0)
        if DEEP:
            weights2 = tl.load(w2_at, mask=w2_there, other=0.0)
            bias2 = tl.load(b2 + unit2, mask=unit2 < H2, other=0.0)
            h2 = tl.maximum(_dot(h1, tl.trans(weights2), HALF, PRECISION) + bias2[None, :], 0.0)
        else:
            h2 = h1
        _, e, norm = _probabilities(h2, weights3, b3, CLASSES, PO, HALF, PRECISION)
        right = tl.where(cls[None, :] == y[:, None], 1.0, 0.0)
        g3 = tl.where((row < count)[:, None], e / norm[:, None] - right, 0.0)
        rate = lr / count  # gradients are of sums, so that none is too small for half precision
        g2 = tl.where(h2 > 0, _dot(g3, weights3, HALF, PRECISION), 0.0)
        dw3 = _dot(tl.trans(g3), h2, HALF, PRECISION)
        bias3 = tl.load(b3 + cls, mask=cls < CLASSES, other=0.0)
        if DEEP:
            g1 = tl.where(h1 > 0, _dot(g2, weights2, HALF, PRECISION), 0.0)
            dw2 = _dot(tl.trans(g2), h1, HALF, PRECISION)
        else:
            g1 = g2
        tl.debug_barrier()  # everybody has read what is written now
        tl.store(w3_at, weights3 - rate * dw3, mask=w3_there)
        tl.store(b3 + cls, bias3 - rate * tl.sum(g3, 0), mask=cls < CLASSES)
        if DEEP:
            tl.store(w2_at, weights2 - rate * dw2, mask=w2_there)
            tl.store(b2 + unit2, bias2 - rate * tl.sum(g2, 0), mask=unit2 < H2)
        tl.store(b1 + unit1, bias1 - rate * tl.sum(g1, 0), mask=unit1 < H1)
        # The next batch, of this epoch or of the next one; after the last step the first again, for nothing.
        following = tl.where(s + 1 < batches * epochs, s + 1, 0)
        at = (following % batches) * batch_size
        count = tl.minimum(batch_size, size - at)
        next_rows, y = _batch(order, (following // batches) * length + at, count, row, inputs, labels, D0)
        z1 = _turn(
            x_rows, next_rows, tl.trans(_operand(g1, HALF)), rate, w1, D0, H1, P1, B, BK, HALF, PRECISION
        )
        x_rows = next_rows
        tl.debug_barrier()


@triton.jit
def loss_kernel(
    psi, start, order, sizes, inputs, labels, losses, epochs, length, batch_size,
    D0: tl.constexpr, H1: tl.constexpr, H2: tl.constexpr, CLASSES: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr,
    PO: tl.constexpr, B: tl.constexpr, BK: tl.constexpr, DP: tl.constexpr, DEEP: tl.constexpr,
    HALF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Mean cross-entropy of job `program` over all its examples, at its row `start` of psi (R, DP)."""
    job = tl.program_id(0).to(tl.int64)
    size = tl.load(sizes + job).to(tl.int32)
    order += job * epochs * length
    w1 = psi + tl.load(start + job) * DP
    b1 = w1 + H1 * D0
    w2, b2 = b1 + H1, b1 + H1 + H2 * H1
    w3 = b2 + H2 if DEEP else w2
    b3 = w3 + CLASSES * H2
    row, unit1, unit2, cls = tl.arange(0, B), tl.arange(0, P1), tl.arange(0, P2), tl.arange(0, PO)
    total = tl.zeros((B,), dtype=tl.float32)
    for at in range(0, size, batch_size):
        count = tl.minimum(batch_size, size - at)
        x_rows, y = _batch(order, at, count, row, inputs, labels, D0)
        z1 = _enter(x_rows, w1, D0, H1, P1, B, BK, HALF, PRECISION)
        h = tl.maximum(z1 + tl.load(b1 + unit1, mask=unit1 < H1, other=0.0)[None, :], 0.0)
        if DEEP:
            w, there = _matrix(w2, H2, H1, P2, P1)
            z2 = _dot(h, tl.trans(tl.load(w, mask=there, other=0.0)), HALF, PRECISION)
            h = tl.maximum(z2 + tl.load(b2 + unit2, mask=unit2 < H2, other=0.0)[None, :], 0.0)
        w, there = _matrix(w3, CLASSES, H2, PO, P2)
        z, _, norm = _probabilities(h, tl.load(w, mask=there, other=0.0), b3, CLASSES, PO, HALF, PRECISION)
        right = cls[None, :] == y[:, None]
        each = tl.log(norm) - tl.sum(tl.where(right, z, 0.0), 1)
        total += tl.where(row < count, each, 0.0)
    tl.store(losses + job, tl.sum(total, 0) / size)
