"""Penalties and bias follow their formulae, whatever the history."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from tokentight.sampling.penalties import Adjustment

VOCAB_SIZE = 12
tokens = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=20)
logits_of = st.lists(
    st.floats(-50, 50, width=32) | st.sampled_from([0.0, float("-inf")]),
    min_size=VOCAB_SIZE,
    max_size=VOCAB_SIZE,
)


def adjustment(
    prompt: list[int],
    output: list[int],
    *,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    bias: dict[int, float] | None = None,
) -> Adjustment:
    bias = bias or {}
    return Adjustment(
        history=np.array(prompt + output, dtype=np.int32),
        history_prompt_len=len(prompt),
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        bias_token_ids=np.array(list(bias), dtype=np.int32),
        bias_values=np.array(list(bias.values()), dtype=np.float32),
    )


settings_of = st.fixed_dictionaries(
    {
        "repetition": st.floats(0.125, 10, width=32),
        "presence": st.floats(-2, 2, width=32),
        "frequency": st.floats(-2, 2, width=32),
        "bias": st.dictionaries(
            st.integers(0, VOCAB_SIZE - 1), st.floats(-100, 100, width=32), max_size=4
        ),
    }
)


@given(logits_of, tokens, tokens, settings_of)
def test_formulae(
    logits: list[float], prompt: list[int], output: list[int], params: dict[str, Any]
) -> None:
    array = np.array(logits, dtype=np.float32)
    before = array.copy()
    got = adjustment(prompt, output, **params).apply(array)
    repetition = params["repetition"]
    expected = list(logits)
    for token in range(VOCAB_SIZE):
        value = expected[token]
        if token in prompt or token in output:
            value = value / repetition if value > 0 else value * repetition
        if token in output:
            value -= params["frequency"] * output.count(token) + params["presence"]
        expected[token] = value + params["bias"].get(token, 0.0)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4)
    assert got.dtype == np.float32
    assert array.tobytes() == before.tobytes(), "the caller's logits must not change"


@given(logits_of, tokens, st.floats(0.125, 10, width=32))
def test_transformers_repetition_penalty(
    logits: list[float], prompt: list[int], repetition: float
) -> None:
    array = np.array(logits, dtype=np.float32)
    ids: Any = torch.tensor([prompt], dtype=torch.long)
    theirs = RepetitionPenaltyLogitsProcessor(repetition)(ids, torch.from_numpy(array)[None])
    ours = adjustment(prompt, [], repetition=repetition).apply(array)
    np.testing.assert_array_equal(ours, theirs[0].numpy())


def test_extreme_parameters_saturate() -> None:
    """Neither a vanishing nor a large penalty makes a logit infinite or NaN."""
    array = np.array([3e38, 1e-3, -3e38, float("-inf")], dtype=np.float32)
    for repetition in (1e-50, 1e-38, 100.0):
        got = adjustment([0, 1, 2, 3], [], repetition=repetition).apply(array)
        assert not np.isnan(got).any()
        assert (got < np.inf).all()


def test_tokens_outside_the_vocabulary_are_named() -> None:
    assert adjustment([0, 11], [3], bias={2: 1.0}).fault(VOCAB_SIZE) is None
    history = adjustment([0, 12], []).fault(VOCAB_SIZE)
    assert history is not None
    assert "token history names token id 12" in history
    bias = adjustment([], [], bias={-1: 1.0}).fault(VOCAB_SIZE)
    assert bias is not None
    assert "logit_bias names token id -1" in bias
