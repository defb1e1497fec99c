"""What a server holds to learn the weights, in numbers: n clients, d parameters."""

from __future__ import annotations

import os
from html import escape

from fedlaw.report.cells import Found
from fedlaw.results import Store

_NUMBER = 4  # bytes: updates are single precision
_LONG = 8  # weights, losses and scores are double


def components(n: int, d: int) -> list[tuple[str, str, str, int, int]]:
    """Symbol, shape, purpose, bytes as the paper counts them, bytes that are held here.

    The paper holds both gradient matrices. The second one is only ever needed as the product with the weights,
    which is added up as replies arrive: half of the memory.

    >>> [held for *_, paper, held in components(n=10, d=1000)]
    [80, 40000, 0, 80, 8000, 80]
    """
    return [
        ("w_k", "n", "aggregation weights", n * _LONG, n * _LONG),
        ("G_k", "d x n", "gradients of phase 1", d * n * _NUMBER, d * n * _NUMBER),
        ("G~_{k+1}", "d x n", "gradients of phase 2", d * n * _NUMBER, 0),
        ("f(theta~)", "n", "losses of the clients", n * _LONG, n * _LONG),
        ("z = G~ w", "d", "product, added up as replies arrive", d * _NUMBER, d * _LONG),
        ("h_k", "n", "projection buffer", n * _LONG, n * _LONG),
    ]


def html(found: Found, store: str | os.PathLike[str]) -> str:
    """The table for the clients and parameters of the sweep's first finished run."""
    place = next((place for place in found.places if place.finished), None)
    if place is None or place.info is None:
        return "<p>nothing of it has been run yet</p>"
    with Store(store, read_only=True) as opened:
        d = int(opened.setup(place.run)["parameters"])
    n = int(place.info.description["clients"])
    rows, totals = [], [0, 0]
    for symbol, shape, purpose, paper, held in components(n, d):
        totals = [totals[0] + paper, totals[1] + held]
        cells = (symbol, shape, purpose, _megabytes(paper), _megabytes(held))
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    last = ("all of it", "", "", _megabytes(totals[0]), _megabytes(totals[1]))
    rows.append("<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in last) + "</tr>")
    heads = ("symbol", "shape", "purpose", "as the paper counts (MB)", "held here (MB)")
    return (
        f"<h3>Memory of the weight step, n = {n} clients, d = {d:,} parameters</h3>"
        f'<div class="scroll"><table><thead><tr>{"".join(f"<th>{head}</th>" for head in heads)}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.3f}" if count < 1e6 else f"{count / 1e6:.1f}"
