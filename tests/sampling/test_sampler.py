"""Tokens follow their distribution, and a row's token and logprobs depend on that row alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tokentight.kernels.select import KernelChoice, load_kernels
from tokentight.pipeline.plan import NO_TOKEN, Logprobs, SamplingPlan
from tokentight.sampling.errors import SamplingError
from tokentight.sampling.rows import slice_sampling
from tokentight.sampling.sampler import draw, sample, sample_valid_rows

VOCAB_SIZE = 10


def positions_of(count: int, first: int = 0) -> Any:
    return np.arange(first, first + count, dtype=np.int32)


def row_bytes(token_ids: Any, logprobs: Logprobs, row: int, count: int) -> tuple[bytes, ...]:
    return (
        token_ids[row].tobytes(),
        logprobs.logprob[row].tobytes(),
        logprobs.rank[row].tobytes(),
        logprobs.top_token_ids[row, :count].tobytes(),
        logprobs.top_logprobs[row, :count].tobytes(),
    )


token = st.integers(0, VOCAB_SIZE - 1)
row_params = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.0, 1e-30, 0.3, 1.0, 100.0])},
    optional={
        "top_k": st.integers(0, VOCAB_SIZE + 2),
        "top_p": st.sampled_from([1e-6, 0.3, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1, 1.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3]),
        "presence_penalty": st.sampled_from([-2.0, 0.0, 0.7]),
        "frequency_penalty": st.sampled_from([-1.0, 0.0, 0.5]),
        "seed": st.integers(0, 2**64 - 1),
        "choice": st.integers(0, 5),
        "num_logprobs": st.integers(-1, VOCAB_SIZE + 1),
        "logit_bias": st.dictionaries(token, st.sampled_from([-100.0, 1.5, 100.0]), max_size=3),
        "prompt": st.lists(token, max_size=4),
        "output": st.lists(token, max_size=4),
    },
)
row_logits = st.lists(
    st.floats(-20, 20, width=32) | st.sampled_from([0.0, 1.0, float("-inf")]),
    min_size=VOCAB_SIZE,
    max_size=VOCAB_SIZE,
).filter(lambda row: max(row) > -math.inf)


@given(st.lists(st.tuples(row_logits, row_params), min_size=1, max_size=6), st.data())
def test_each_row_alone_equals_the_row_in_any_batch(
    kernels: Any, make_plan: Any, rows: list[tuple[list[float], dict[str, Any]]], data: Any
) -> None:
    """Bitwise: token, logprob, rank and rivals, alone and in any run of rows."""
    logits = torch.tensor([row for row, _ in rows])
    plan = make_plan(*[params for _, params in rows])
    positions = positions_of(len(rows), 5)
    together, logprobs = sample(logits, positions, plan, kernels)
    assert ((together >= 0) & (together < VOCAB_SIZE)).all()
    start = data.draw(st.integers(0, len(rows) - 1))
    stop = data.draw(st.integers(start + 1, len(rows)))
    for run in [slice(i, i + 1) for i in range(len(rows))] + [slice(start, stop)]:
        part, part_logprobs = sample(
            logits[run], positions[run], slice_sampling(plan, run), kernels
        )
        for offset, row in enumerate(range(len(rows))[run]):
            count = min(max(0, int(plan.num_logprobs[row])), VOCAB_SIZE)
            assert row_bytes(part, part_logprobs, offset, count) == row_bytes(
                together, logprobs, row, count
            )


@pytest.mark.parametrize("vocab_size", [49_152, 49_157])
@pytest.mark.parametrize("choice", ["auto", "reference"])
def test_rows_of_a_real_vocabulary_alone_equal_the_batch(
    make_plan: Any, vocab_size: int, choice: KernelChoice
) -> None:
    """Bitwise, with the engine's own kernels: the native ones where they can be built."""
    kernels = load_kernels(choice, num_threads=2)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(12, vocab_size, generator=generator) * 2
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.95},
        {"temperature": 0.7, "top_k": 50, "num_logprobs": 5},
        {"temperature": 1.3, "top_k": 20_000, "top_p": 0.99},
        {"num_logprobs": 20},
        {"repetition_penalty": 1.2, "prompt": list(range(100))},
    ]
    plan = make_plan(*[kinds[i % 6] | {"seed": i} for i in range(12)])
    positions = positions_of(12)
    together, logprobs = sample(logits, positions, plan, kernels)
    for row in range(12):
        run = slice(row, row + 1)
        # A copy: other memory, other alignment.
        alone, alone_logprobs = sample(
            logits[run].clone(), positions[run], slice_sampling(plan, run), kernels
        )
        count = max(0, int(plan.num_logprobs[row]))
        assert row_bytes(alone, alone_logprobs, 0, count) == row_bytes(
            together, logprobs, row, count
        )


def oracle_distribution(logits: list[float], params: dict[str, Any]) -> list[float]:
    """The distribution by the formulae, in plain float64 Python."""
    values = list(logits)
    prompt, output = params.get("prompt", []), params.get("output", [])
    repetition = params.get("repetition_penalty", 1.0)
    for t in set(prompt + output):
        values[t] = values[t] / repetition if values[t] > 0 else values[t] * repetition
    for t in set(output):
        values[t] -= params.get("frequency_penalty", 0.0) * output.count(t)
        values[t] -= params.get("presence_penalty", 0.0)
    for t, bias in params.get("logit_bias", {}).items():
        values[t] += bias
    top = max(values)
    weights = [math.exp((v - top) / params["temperature"]) for v in values]
    order = sorted(range(len(values)), key=lambda t: (-values[t], t))
    order = [t for t in order if weights[t] >= params.get("min_p", 0.0) * max(weights)]
    order = order[: params.get("top_k") or len(order)]
    target = params.get("top_p", 1.0) * sum(weights[t] for t in order)
    kept: list[int] = []
    for t in order:
        if sum(weights[k] for k in kept) < target:
            kept.append(t)
    total = sum(weights[t] for t in kept)
    return [weights[t] / total if t in kept else 0.0 for t in range(len(values))]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.5, "top_k": 4},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 2.0, "min_p": 0.2},
        {"temperature": 1.2, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
        {
            "temperature": 1.0,
            "repetition_penalty": 1.4,
            "frequency_penalty": 0.3,
            "presence_penalty": 0.2,
            "prompt": [0, 1],
            "output": [2, 2, 3],
            "logit_bias": {9: 2.5, 0: -100.0},
        },
    ],
)
def test_draws_follow_the_distribution(
    kernels: Any, make_plan: Any, params: dict[str, Any]
) -> None:
    """Chi-square over many seeds and positions against the float64 oracle."""
    draws = 4000
    logits = [1.2, -0.3, 0.8, 0.1, -1.5, 2.0, 0.0, -0.7, 0.5, -2.5]
    expected = oracle_distribution(logits, params)
    plan = make_plan(*[params | {"seed": 1000 + i // 2} for i in range(draws)])
    positions = (np.arange(draws) % 2).astype(np.int32)
    tokens, _ = sample(torch.tensor([logits] * draws), positions, plan, kernels)
    counts = np.bincount(tokens, minlength=VOCAB_SIZE)
    possible = np.array(expected) > 0
    assert counts[~possible].sum() == 0
    frequencies = np.array(expected)[possible] * draws
    assert stats.chisquare(counts[possible], frequencies).pvalue > 1e-4


@given(
    st.lists(st.floats(0, 1, width=32), min_size=1, max_size=20).filter(lambda p: max(p) > 0),
    st.floats(0, 1, exclude_max=True),
)
def test_draw_inverts_the_cumulative_distribution(probabilities: list[float], noise: float) -> None:
    array = np.array(probabilities, dtype=np.float32)
    chosen = draw(array, None, noise)
    assert array[chosen] > 0
    mass_before = math.fsum(probabilities[:chosen])
    target = noise * math.fsum(probabilities)
    assert mass_before <= target * (1 + 1e-12)
    assert mass_before + probabilities[chosen] >= target * (1 - 1e-12)


def test_draw_with_noise_next_to_one_takes_the_last_possible_token() -> None:
    array = np.array([0.3, 0.3, 0.0], dtype=np.float32)
    assert draw(array, None, 1 - 2.0**-53) == 1
    assert draw(array, np.array([0, 2]), 1 - 2.0**-53) == 0
    assert draw(array, None, 0.0) == 0


@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1e-30, 1.0])
def test_a_tiny_top_p_is_greedy_and_ties_go_to_the_lowest_id(
    kernels: Any, make_plan: Any, temperature: float
) -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    params = {"temperature": temperature, "top_p": 1e-6, "seed": 5}
    tokens, _ = sample(logits, positions_of(2), make_plan(params, params), kernels)
    assert tokens.tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_that_leaves_one_token_leaves_that_token(
    kernels: Any, make_plan: Any, temperature: float
) -> None:
    bias = {t: -100.0 for t in range(VOCAB_SIZE) if t != 7} | {7: 100.0}
    rows = [{"temperature": temperature, "logit_bias": bias, "seed": i} for i in range(50)]
    logits = torch.linspace(5, -5, VOCAB_SIZE).repeat(50, 1)
    tokens, _ = sample(logits, positions_of(50), make_plan(*rows), kernels)
    assert (tokens == 7).all()


def test_impossible_tokens_are_never_drawn(kernels: Any, make_plan: Any) -> None:
    """A logit of -inf has no mass, even where top_k reaches beyond the possible tokens."""
    logits = torch.full((200, 6), -math.inf)
    logits[:, 2] = 0.0
    logits[:, 4] = 0.0
    rows = [{"temperature": 1.0, "top_k": 5, "seed": i} for i in range(200)]
    tokens, _ = sample(logits, positions_of(200), make_plan(*rows), kernels)
    assert set(tokens.tolist()) == {2, 4}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_are_named_and_cost_no_other_row(
    kernels: Any, make_plan: Any, bad: float
) -> None:
    logits = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    whole = logits.clone()
    logits[1, 3] = bad
    logits[3] = -math.inf
    params = [{"num_logprobs": 2}, {}, {"temperature": 1.0, "num_logprobs": 1}, {}]
    plan = make_plan(*params)
    with pytest.raises(SamplingError, match=r"row 1: its logits contain .*; row 3: every one"):
        sample(logits, positions_of(4), plan, kernels)
    tokens, logprobs, reasons = sample_valid_rows(logits, positions_of(4), plan, kernels)
    expected, expected_logprobs = sample(whole, positions_of(4), plan, kernels)
    assert sorted(reasons) == [1, 3]
    assert tokens[[1, 3]].tolist() == [NO_TOKEN, NO_TOKEN]
    for row in (0, 2):
        assert row_bytes(tokens, logprobs, row, 1) == row_bytes(expected, expected_logprobs, row, 1)


def test_a_bias_outside_the_vocabulary_is_named(kernels: Any, make_plan: Any) -> None:
    plan = make_plan({}, {"logit_bias": {VOCAB_SIZE: 1.0}})
    with pytest.raises(SamplingError, match=r"row 1: logit_bias names token id 10"):
        sample(torch.zeros(2, VOCAB_SIZE), positions_of(2), plan, kernels)


def test_no_rows(kernels: Any, make_plan: Any) -> None:
    tokens, logprobs = sample(torch.zeros(0, 5), positions_of(0), make_plan(), kernels)
    assert tokens.shape == (0,)
    assert logprobs.logprob.shape == (0,)


@given(st.lists(row_params, max_size=6), st.integers(-7, 7), st.integers(-7, 7))
def test_a_slice_is_the_plan_of_those_rows(
    make_plan: Any, rows: list[dict[str, Any]], start: int, stop: int
) -> None:
    got: SamplingPlan = slice_sampling(make_plan(*rows), slice(start, stop))
    expected = make_plan(*rows[start:stop])
    for name in SamplingPlan.__slots__:
        if name != "token_indices":  # those stay what they were: indices into the step
            np.testing.assert_array_equal(getattr(got, name), getattr(expected, name), name)


def test_a_slice_with_a_step_is_refused(make_plan: Any) -> None:
    with pytest.raises(ValueError, match="step 2"):
        slice_sampling(make_plan({}, {}), slice(0, 2, 2))
