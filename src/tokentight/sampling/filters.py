"""Which tokens of one row may be drawn: min-p, top-k, top-p.

Everything here looks at a single row, in an order that is total: larger value first, on ties the
lower token id. Sums are float64 over arrays whose shape the row alone determines, so a row's
survivors never depend on other rows. No full sort is needed: candidates are narrowed first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tokentight.pipeline.plan import F32

Ids = NDArray[np.intp]

_NUM_GROUPS = 1024
_SORTABLE = 4096
_NUM_BUCKETS = 4096
_SMALLEST_SPAN = 1e-30  # so that buckets per unit stay finite in float32


def surviving_ids(
    values: F32, probabilities: F32, *, top_k: int, top_p: float, min_p: float
) -> Ids | None:
    """Ascending ids of the tokens that may be drawn, None for all of them.

    `values` `[V]` are scaled logits and give the order, `probabilities` `[V]` their softmax.
    The filters apply in vLLM's order: min-p on the whole distribution, then the `top_k` largest
    (exactly that many: of equal values the lower ids), then the shortest run of what is left that
    holds at least `top_p` of its mass. The most likely token always survives. A `top_k` of 0, a
    `top_p` of 1 and a `min_p` of 0 are off.
    """
    ids: Ids | None = None
    if min_p > 0:
        floor = np.float32(min_p) * probabilities.max()
        ids = np.flatnonzero(probabilities >= floor)
        values, probabilities = values[ids], probabilities[ids]
    if 0 < top_k < values.shape[0]:
        kept = largest_ids(values, top_k)
        ids = _narrow(ids, kept)
        values, probabilities = values[kept], probabilities[kept]
    if top_p < 1:
        ids = _narrow(ids, _nucleus(values, probabilities, top_p))
    return ids


def largest_ids(values: F32, count: int) -> Ids:
    """Ascending ids of the `count` largest of `values` `[V]`; of equal ones the lower ids."""
    size = values.shape[0]
    if count >= size:
        return np.arange(size)
    candidates: Ids | None = None
    rivals = values
    if size >= 8 * _NUM_GROUPS and 4 * count <= _NUM_GROUPS:
        # `count` groups have a maximum of at least `floor`, hence so many values reach it.
        depth = size // _NUM_GROUPS
        maxima = values[: depth * _NUM_GROUPS].reshape(depth, _NUM_GROUPS).max(axis=0)
        floor = np.partition(maxima, _NUM_GROUPS - count)[_NUM_GROUPS - count]
        candidates = np.flatnonzero(values >= floor)
        rivals = values[candidates]
    smallest_kept = np.partition(rivals, rivals.shape[0] - count)[rivals.shape[0] - count]
    above = np.flatnonzero(rivals > smallest_kept)
    level = np.flatnonzero(rivals == smallest_kept)[: count - above.shape[0]]
    kept = np.concatenate([above, level])
    kept.sort()
    return _narrow(candidates, kept)


def in_order(values: F32, ids: Ids) -> Ids:
    """`ids` (ascending) reordered: larger value first, on ties the lower id."""
    ordered: Ids = ids[np.argsort(-values[ids], kind="stable")]
    return ordered


def _nucleus(values: F32, probabilities: F32, top_p: float) -> Ids:
    """Ascending indices of the shortest run, in order, that holds `top_p` of the mass."""
    weights = probabilities.astype(np.float64)
    total = float(weights.sum())
    target = top_p * total
    # All lighter tokens together hold at most half of what may be left out: none is in the run.
    lightest = 0.5 * (1 - top_p) * total / weights.shape[0]
    heavy = np.flatnonzero(weights > lightest)
    values, weights = values[heavy], weights[heavy]
    kept, unsure, mass = _bracket(values, weights, target)
    order = unsure[np.argsort(-values[unsure], kind="stable")]
    before = mass + np.cumsum(weights[order]) - weights[order]
    # Before the first of the run there is nothing, which a target of 0 would not exceed.
    num_kept = max(1, int(np.searchsorted(before, target, side="left")))
    kept[order[:num_kept]] = True
    return _narrow(heavy, np.flatnonzero(kept))


def _bracket(
    values: F32, weights: NDArray[np.float64], target: float
) -> tuple[NDArray[np.bool_], Ids, float]:
    """Which tokens are surely in the run, ids to look at in order, and the mass of the former.

    Where there are too many to sort, they are counted into buckets of like value, and the one
    bucket in which the mass reaches `target` alone needs an order.
    """
    size = values.shape[0]
    depth = values.max() - values
    span = float(depth.max())
    if size <= _SORTABLE or span < _SMALLEST_SPAN:
        return np.zeros(size, dtype=np.bool_), np.arange(size), 0.0
    buckets = (depth * ((_NUM_BUCKETS - 1) / span)).astype(np.intp)  # 0 holds the largest
    mass = np.cumsum(np.bincount(buckets, weights=weights, minlength=_NUM_BUCKETS))
    edge = min(int(np.searchsorted(mass, target, side="left")), mass.shape[0] - 1)
    mass_before = float(mass[edge - 1]) if edge else 0.0
    return buckets < edge, np.flatnonzero(buckets == edge), mass_before


def _narrow(ids: Ids | None, kept: Ids) -> Ids:
    return kept if ids is None else ids[kept]
