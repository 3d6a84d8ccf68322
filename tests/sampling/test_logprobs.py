"""Logprobs, ranks and rivals against float64 formulae and full sorts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokentight.pipeline.plan import NO_LOGPROBS
from tokentight.sampling.errors import SamplingError
from tokentight.sampling.logprobs import score

rows_of = st.lists(
    st.lists(st.floats(-20, 20, width=32) | st.integers(-3, 3), min_size=6, max_size=6),
    min_size=1,
    max_size=5,
)


@given(rows_of, st.data())
def test_scores_equal_the_formulae(kernels: Any, rows: list[list[float]], data: Any) -> None:
    targets = [data.draw(st.integers(0, 5)) for _ in rows]
    wanted = [data.draw(st.integers(NO_LOGPROBS, 8)) for _ in rows]
    logits = torch.tensor(rows, dtype=torch.float32)
    got = score(logits, np.array(targets, np.int32), np.array(wanted, np.int32), kernels)
    assert got.top_token_ids.shape == (len(rows), min(6, max(0, *wanted, 0)))
    for i, (row, target, count) in enumerate(zip(rows, targets, wanted, strict=True)):
        if count == NO_LOGPROBS:
            assert (got.logprob[i], got.rank[i]) == (0, 0)
            assert (got.top_token_ids[i] == -1).all()
            continue
        normalizer = math.log(math.fsum(math.exp(v) for v in row))
        order = sorted(range(6), key=lambda t: (-row[t], t))[:count]
        assert got.logprob[i] == pytest.approx(row[target] - normalizer, abs=1e-5)
        assert got.rank[i] == 1 + sum(v > row[target] for v in row)
        top = got.top_token_ids[i]
        assert top.tolist() == order + [-1] * (len(top) - len(order))
        expected = [row[t] - normalizer for t in order]
        assert got.top_logprobs[i, : len(order)].tolist() == pytest.approx(expected, abs=1e-5)
        # The chosen token's own logprob has the same bits among the rivals.
        for t, logprob in zip(order, got.top_logprobs[i], strict=False):
            assert t != target or logprob == got.logprob[i]


def test_a_token_of_probability_zero_has_a_logprob_of_minus_infinity(kernels: Any) -> None:
    logits = torch.tensor([[0.0, -math.inf, 0.0]])
    got = score(logits, np.array([1], np.int32), np.array([1], np.int32), kernels)
    assert got.logprob[0] == -math.inf
    assert got.rank[0] == 3


def test_broken_rows_and_foreign_targets_are_named(kernels: Any) -> None:
    logits = torch.zeros(3, 4)
    logits[0, 1] = math.nan
    none_wanted = np.full(3, NO_LOGPROBS, np.int32)
    with pytest.raises(SamplingError, match=r"row 0: .*NaN.*; row 2: target token id 4"):
        score(logits, np.array([0, 3, 4], np.int32), none_wanted, kernels)
