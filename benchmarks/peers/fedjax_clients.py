"""FedJAX: its `for_each_client` with the compiled backend and its SGD, as its own federated averaging does.

Batches are ready, on the device, in the common order: its shuffling is left out, and so are the random keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fedjax
import jax
import jax.numpy as jnp
import numpy as np
from jax_clients import initial, loss, vectors
from worker import Array, Work, serve


def make(work: Work) -> tuple[Callable[[], Any], Callable[[Any], tuple[Array, Array]]]:
    """One round."""
    params, optimizer = initial(work), fedjax.optimizers.sgd(work.lr)
    x, y = jnp.asarray(work.flat_inputs), jnp.asarray(work.labels.astype(np.int32))
    cuts = [slice(at, at + work.batch) for at in range(0, x.shape[1], work.batch)]
    full = [(x[i], y[i]) for i in range(len(x))]
    clients = [
        (i, [{"x": xs[cut], "y": ys[cut]} for cut in cuts] * work.epochs, ())
        for i, (xs, ys) in enumerate(full)
    ]
    gradient = jax.grad(loss)
    loss_after = jax.jit(loss)

    def client_init(shared: Any, _: Any) -> Any:
        return {"params": shared, "optimizer": optimizer.init(shared)}

    def client_step(state: Any, batch: Any) -> Any:
        grads = gradient(state["params"], batch["x"], batch["y"])
        moved, psi = optimizer.apply(grads, state["optimizer"], state["params"])
        return {"params": psi, "optimizer": moved}

    def client_final(_: Any, state: Any) -> Any:
        return state["params"]

    for_each = fedjax.for_each_client(client_init, client_step, client_final)

    def run() -> Any:
        made = [(psi, loss_after(psi, *full[i])) for i, psi in for_each(params, clients)]
        return jax.block_until_ready(made)

    def results(made: Any) -> tuple[Array, Array]:
        psi, losses = jax.tree_util.tree_map(lambda *parts: jnp.stack(parts), *made)
        return vectors(psi), np.asarray(losses)

    return run, results


if __name__ == "__main__":
    serve(make, ("fedjax", "jax"))
