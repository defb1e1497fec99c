"""JAX without a framework: `lax.map` over clients of a `lax.scan` over batches, or one compiled call per client.

Weights lie as (in, out); batches are slices of data that is on the device before the clock starts; the batch that
is left over at the end of an epoch is a step of its own width, so nothing is padded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from worker import Array, Work, serve


def scores(params: Any, x: Any) -> Any:
    """Class scores."""
    for weight, bias in params[:-1]:
        x = jax.nn.relu(x @ weight + bias)
    weight, bias = params[-1]
    return x @ weight + bias


def loss(params: Any, x: Any, y: Any) -> Any:
    """Mean cross-entropy."""
    each = jax.nn.log_softmax(scores(params, x))
    return -jnp.take_along_axis(each, y[:, None], axis=1).mean()


def initial(work: Work) -> Any:
    """Parameters as a list of (weight (in, out), bias)."""
    return [(jnp.asarray(weight.T), jnp.asarray(bias)) for weight, bias in work.layers()]


def vectors(params: Any) -> Array:
    """(n, d) in torch's order, of parameters stacked over clients."""
    parts = []
    for weight, bias in params:
        parts += [np.asarray(weight).swapaxes(1, 2).reshape(len(weight), -1), np.asarray(bias)]
    return np.concatenate(parts, axis=1)


def make(work: Work) -> tuple[Callable[[], Any], Callable[[Any], tuple[Array, Array]]]:
    """One round as `work.variant`: map or loop."""
    params = initial(work)
    x, y = jnp.asarray(work.flat_inputs), jnp.asarray(work.labels.astype(np.int32))
    whole = x.shape[1] // work.batch * work.batch

    def step(psi: Any, batch: Any) -> tuple[Any, None]:
        gradient = jax.grad(loss)(psi, *batch)
        return jax.tree_util.tree_map(lambda p, g: p - work.lr * g, psi, gradient), None

    def client(psi: Any, xs: Any, ys: Any) -> Any:
        batches = xs[:whole].reshape(-1, work.batch, xs.shape[-1]), ys[:whole].reshape(-1, work.batch)

        def epoch(psi: Any, _: None) -> tuple[Any, None]:
            psi, _ = lax.scan(step, psi, batches)
            return (psi if whole == len(xs) else step(psi, (xs[whole:], ys[whole:]))[0]), None

        psi, _ = lax.scan(epoch, psi, None, length=work.epochs)
        return psi, loss(psi, xs, ys)

    everybody = jax.jit(lambda psi, x, y: lax.map(lambda one: client(psi, *one), (x, y)))
    one = jax.jit(client)
    each = [(x[i], y[i]) for i in range(len(x))] if work.variant == "loop" else []

    def run() -> Any:
        made = everybody(params, x, y) if work.variant == "map" else [one(params, *own) for own in each]
        return jax.block_until_ready(made)

    def results(made: Any) -> tuple[Array, Array]:
        if work.variant == "loop":
            made = jax.tree_util.tree_map(lambda *parts: jnp.stack(parts), *made)
        return vectors(made[0]), np.asarray(made[1])

    return run, results


if __name__ == "__main__":
    serve(make, ("jax", "jaxlib"))
