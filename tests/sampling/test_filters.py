"""The filters keep exactly what a full sort and exact arithmetic keep."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tokentight.sampling.filters import in_order, largest_ids, surviving_ids


def softmax(values: Any) -> Any:
    return torch.softmax(torch.from_numpy(values), 0).numpy()


def exact(number: float) -> int:
    """A float32 as a whole number of the smallest positive one."""
    scaled = Fraction(float(number)) * 2**149
    assert scaled.denominator == 1
    return scaled.numerator


def oracle(values: Any, probabilities: Any, top_k: int, top_p: Fraction, min_p: float) -> set[int]:
    """min-p, top-k, top-p by one full sort and whole-number sums."""
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    floor = np.float32(min_p) * probabilities.max()
    order = [i for i in order if probabilities[i] >= floor]
    if top_k:
        order = order[:top_k]
    target = top_p * sum(exact(probabilities[i]) for i in order)
    kept, mass = [order[0]], exact(probabilities[order[0]])
    for i in order[1:]:
        if top_p < 1 and mass >= target:
            break
        kept.append(i)
        mass += exact(probabilities[i])
    return set(kept)


def check_against_oracle(values: Any, top_k: int, top_p: float, min_p: float) -> None:
    probabilities = softmax(values)
    top_p = float(np.float32(top_p))
    got = surviving_ids(values, probabilities, top_k=top_k, top_p=top_p, min_p=min_p)
    ids = np.arange(len(values)) if got is None else got
    assert (np.diff(ids) > 0).all()
    kept = set(ids.tolist())
    # Sums of float64 may miss a tie of mass and target; nothing else may differ.
    slack = Fraction(1, 10**12)
    least = oracle(values, probabilities, top_k, Fraction(top_p) * (1 - slack), min_p)
    most = oracle(values, probabilities, top_k, Fraction(top_p) * (1 + slack), min_p)
    if top_p == 1:
        least = most
    massless = {i for i in range(len(values)) if probabilities[i] == 0}
    assert least - massless <= kept <= most


tied = st.sampled_from([0.0, -0.0, -1.0, -1.5, -2.0, -20.0, -200.0, float("-inf")])
logit = st.floats(-30, 0, width=32) | tied


@given(
    st.lists(logit, min_size=1, max_size=40),
    st.integers(0, 50),
    st.just(1.0) | st.floats(0, 1, exclude_min=True, width=32),
    st.just(0.0) | st.floats(0, 1, width=32),
)
@example([0.0, 0.0, 0.0, 0.0], 0, 0.5, 0.0)
@example([0.0] * 10, 0, 0.9, 0.0)
@example([-1.0, 0.0, -1.0, -1.0], 2, 1.0, 0.0)
@example([0.0, 0.0], 1, 1.0, 1.0)
@example([-3.0, 0.0], 0, float(np.float32(1e-45)), 0.0)
def test_survivors_equal_the_full_sort(
    values: list[float], top_k: int, top_p: float, min_p: float
) -> None:
    array = np.array(values, dtype=np.float32)
    array = array - array.max() if np.isfinite(array.max()) else np.zeros_like(array)
    check_against_oracle(array, top_k, top_p, min_p)


@pytest.mark.parametrize(("top_p", "kept"), [(0.25, 1), (0.5, 2), (0.5000001, 3), (0.75, 3)])
def test_mass_equal_to_top_p_is_enough(top_p: float, kept: int) -> None:
    """Four equal tokens, whose masses are exact: no token is taken beyond the one that reaches."""
    values = np.zeros(4, dtype=np.float32)
    got = surviving_ids(values, softmax(values), top_k=0, top_p=top_p, min_p=0.0)
    assert got is not None
    assert got.tolist() == list(range(kept))


@pytest.mark.parametrize("spread", [0.0, 1e-40, 0.1, 3.0])
@pytest.mark.parametrize("digits", [1, 9])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 0.5), (0, 0.999), (50, 1.0), (300, 0.9), (7000, 0.9), (20_000, 0.9)]
)
def test_large_vocabularies_equal_the_full_sort(
    spread: float, digits: int, top_k: int, top_p: float
) -> None:
    """Groups and buckets narrow the candidates here; rounding to few digits makes many ties."""
    values = (np.random.default_rng(1).normal(size=12_345) * spread).round(digits + 2)
    if spread < 1e-30:
        values = np.random.default_rng(1).normal(size=12_345) * spread
    array = values.astype(np.float32)
    array -= array.max()
    check_against_oracle(array, top_k, top_p, 0.0)


@given(st.lists(logit, min_size=1, max_size=60), st.integers(1, 60))
def test_largest_ids_equal_a_full_sort(values: list[float], count: int) -> None:
    array = np.array(values, dtype=np.float32)
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
    ids = largest_ids(array, count)
    assert ids.tolist() == sorted(order)
    assert in_order(array, ids).tolist() == order


@pytest.mark.parametrize("count", [1, 20, 256, 257, 5000, 9999, 10_000])
@pytest.mark.parametrize("distinct", [1, 3, 100, 10**6])
def test_largest_ids_of_large_vocabularies(count: int, distinct: int) -> None:
    array = np.random.default_rng(2).integers(0, distinct, 10_000).astype(np.float32)
    order = np.lexsort((np.arange(10_000), -array))[:count]
    ids = largest_ids(array, count)
    assert ids.tolist() == sorted(order.tolist())
    assert in_order(array, ids).tolist() == order.tolist()


@given(st.integers(0, 2**32 - 1), st.floats(0.05, 0.99), st.integers(1, 30))
def test_transformers_keeps_the_same_tokens(seed: int, share: float, top_k: int) -> None:
    """Without ties, each filter by itself keeps what transformers' own keeps."""
    values = (np.random.default_rng(seed).normal(size=30) * 2).astype(np.float32)
    values -= values.max()
    scores = torch.from_numpy(values).unsqueeze(0)
    ids: Any = torch.zeros(1, 0, dtype=torch.long)
    cases: list[tuple[Any, dict[str, Any]]] = [
        (TopKLogitsWarper(top_k), {"top_k": top_k, "top_p": 1.0, "min_p": 0.0}),
        (TopPLogitsWarper(share), {"top_k": 0, "top_p": share, "min_p": 0.0}),
        (MinPLogitsWarper(share), {"top_k": 0, "top_p": 1.0, "min_p": share}),
    ]
    for warper, params in cases:
        theirs = torch.isfinite(warper(ids, scores)[0]).nonzero().flatten().tolist()
        ours = surviving_ids(values, softmax(values), **params)
        assert (list(range(30)) if ours is None else ours.tolist()) == theirs
